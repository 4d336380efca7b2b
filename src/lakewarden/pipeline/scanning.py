"""Reading a table of a warehouse at one version, on the workers.

A `Scan` is small and picklable: it names one version of one table, and cuts it into parts that workers
read on their own.  Columns that are not wanted are not read, and filters are handed to the format.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from lakewarden.errors import ErrorKind, NotFound, UsageError
from lakewarden.model import Format
from lakewarden.warehouse.formats import with_formats

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

    from lakewarden.warehouse.manifest import Name
    from lakewarden.warehouse.warehouse import View, Warehouse

#: Where a row is: its file (Iceberg) or its address (Lance).
FILE = "_file"
ROW_ADDRESS = "_rowaddr"
#: Parts that a table is cut into, at most: workers take one after the other.
_PARTS = 256
_PART = pa.schema([("part", pa.binary())])


class Scan(Protocol):
    """One version of one table, to be read."""

    def schema(self) -> pa.Schema:
        """Return the columns that are read."""
        ...

    def parts(self) -> list[bytes]:
        """Cut the table into parts, each for one worker."""
        ...

    def read(self, part: bytes) -> Iterator[pa.RecordBatch]:
        """Read a part."""
        ...


def scan_of(
    warehouse: Warehouse, view: View, name: Name, columns: Sequence[str] | None = None
) -> Scan:
    """Return the scan of a table as a view shows it."""
    table = view.table(name)
    pin = view.pins.get(table.id)
    if pin is None:
        raise NotFound(f"table {'.'.join(name)} is empty: nothing has been written to it yet")
    options = dict(getattr(warehouse.opener, "options", {}))
    wanted = None if columns is None else tuple(columns)
    if table.format is Format.LANCE:
        # Workers find it by its public name.
        with_formats(warehouse).formats[Format.LANCE].publish(table, pin)
        from lakewarden.warehouse.lance import uri_of  # noqa: PLC0415

        return LanceScan(uri_of(table, pin), pin.version, options, wanted)
    return IcebergScan(pin.path, options, wanted)


def frame(spark: SparkSession, scan: Scan) -> DataFrame:
    """Return a scan as a frame; nothing is read before it is used."""
    parts = pa.table({"part": pa.array(scan.parts(), pa.binary())}, schema=_PART)
    schema = from_arrow_schema(scan.schema())
    wanted = to_arrow_schema(schema)

    def read(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in incoming:
            for part in batch.column("part").to_pylist():
                for found in scan.read(part):
                    yield found.cast(wanted)

    number = max(1, parts.num_rows)
    rows = (
        spark.createDataFrame(parts) if parts.num_rows else spark.createDataFrame([], "part binary")
    )
    return rows.repartition(number).mapInArrow(read, schema)


@dataclass(frozen=True)
class LanceScan:
    """A version of a Lance table."""

    uri: str
    version: int
    options: dict[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    filter: str | None = None
    with_place: bool = False

    def dataset(self) -> Any:
        import lance  # noqa: PLC0415

        try:
            return lance.dataset(
                self.uri, version=self.version, storage_options=self.options or None
            )
        except (OSError, ValueError) as error:
            if "not found" not in str(error).lower():
                raise
            raise NotFound(
                f"version {self.version} of {self.uri} was reclaimed by a cleanup; tag versions that "
                "must stay",
                ErrorKind.RECLAIMED,
            ) from error

    def schema(self) -> pa.Schema:
        whole = self.dataset().schema
        found = whole if self.columns is None else _chosen(whole, self.columns)
        return found.append(pa.field(ROW_ADDRESS, pa.int64())) if self.with_place else found

    def parts(self) -> list[bytes]:
        numbers = [one.fragment_id for one in self.dataset().get_fragments()]
        return [pickle.dumps(some) for some in _cut(numbers)]

    def read(self, part: bytes) -> Iterator[pa.RecordBatch]:
        found = self.dataset()
        numbers = pickle.loads(part)  # noqa: S301  # from our own driver
        scanner = found.scanner(
            columns=None if self.columns is None else list(self.columns),
            filter=self.filter,
            fragments=[found.get_fragment(number) for number in numbers],
            with_row_address=self.with_place,
        )
        for batch in scanner.to_batches():
            if self.with_place:
                at = batch.schema.get_field_index(ROW_ADDRESS)
                batch = batch.set_column(at, ROW_ADDRESS, batch.column(at).cast(pa.int64()))  # noqa: PLW2901
            yield batch

    def filtered(self, filters: Sequence[Filter]) -> LanceScan:
        """Return the scan with what of the filters can be told to Lance."""
        told = [text for one in filters if (text := _sql(one)) is not None]
        return replace(self, filter=" AND ".join(told) or None)


@dataclass(frozen=True)
class IcebergScan:
    """A version of an Iceberg table."""

    metadata_location: str
    options: dict[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    #: An expression of PyIceberg's, pickled.
    filter: bytes | None = None
    with_place: bool = False

    def table(self) -> Any:
        from pyiceberg.table import StaticTable  # noqa: PLC0415

        try:
            return StaticTable.from_metadata(self.metadata_location, _for_pyiceberg(self.options))
        except FileNotFoundError as error:
            raise NotFound(
                f"a version of an Iceberg table was reclaimed by a cleanup "
                f"({self.metadata_location}); tag versions that must stay",
                ErrorKind.RECLAIMED,
            ) from error

    def _scan(self) -> Any:
        chosen = ("*",) if self.columns is None else self.columns
        found = self.table().scan(selected_fields=chosen)
        if self.filter is not None:
            found = found.filter(pickle.loads(self.filter))  # noqa: S301  # from our own driver
        return found

    def schema(self) -> pa.Schema:
        from pyiceberg.io.pyarrow import schema_to_pyarrow  # noqa: PLC0415

        whole = schema_to_pyarrow(self.table().schema(), include_field_ids=False)
        found = whole if self.columns is None else _chosen(whole, self.columns)
        return found.append(pa.field(FILE, pa.string())) if self.with_place else found

    def parts(self) -> list[bytes]:
        return [pickle.dumps(some) for some in _cut(list(self._scan().plan_files()))]

    def read(self, part: bytes) -> Iterator[pa.RecordBatch]:
        from pyiceberg.io.pyarrow import ArrowScan  # noqa: PLC0415

        scan = self._scan()
        names = [name for name in self.schema().names if name != FILE]
        reader = ArrowScan(scan.table_metadata, scan.io, scan.projection(), scan.row_filter)
        for task in pickle.loads(part):  # noqa: S301  # from our own driver
            for batch in reader.to_record_batches([task]):
                chosen = batch.select(names)
                if self.with_place:
                    path = pa.repeat(pa.scalar(task.file.file_path), batch.num_rows)
                    chosen = chosen.append_column(FILE, path)
                yield chosen

    def filtered(self, filters: Sequence[Filter]) -> IcebergScan:
        """Return the scan with what of the filters can be told to PyIceberg."""
        from pyiceberg.expressions import And  # noqa: PLC0415

        told = [found for one in filters if (found := _expression(one)) is not None]
        if not told:
            return self
        whole = told[0]
        for one in told[1:]:
            whole = And(whole, one)
        return replace(self, filter=pickle.dumps(whole))


def _chosen(whole: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    missing = [name for name in columns if name not in whole.names]
    if missing:
        raise UsageError(
            ErrorKind.USAGE,
            f"there is no column {missing[0]}; the table has {', '.join(whole.names)}",
        )
    return pa.schema([whole.field(name) for name in columns])


def _cut(items: Sequence[Any]) -> Iterator[list[Any]]:
    step = max(1, -(-len(items) // _PARTS))
    for start in range(0, len(items), step):
        yield list(items[start : start + step])


def _for_pyiceberg(options: dict[str, str]) -> dict[str, str]:
    from lakewarden.formats.iceberg.catalog import pyiceberg_properties  # noqa: PLC0415

    return pyiceberg_properties(options)


# -- filters ---------------------------------------------------------------------------------------

_COMPARISONS = {
    "EqualTo": "=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
}


def _literal(value: object) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return None


def _sql(one: Any) -> str | None:
    """Return a filter as Lance reads it; None if that is not certain to mean the same."""
    kind = type(one).__name__
    if kind == "Not":
        inner = _sql(one.child)
        return None if inner is None else f"NOT ({inner})"
    column = ".".join(f"`{name}`" for name in one.attribute)
    if kind in ("IsNull", "IsNotNull"):
        return f"{column} IS {'NOT ' if kind == 'IsNotNull' else ''}NULL"
    if kind == "In":
        values = [_literal(value) for value in one.value]
        return (
            None
            if None in values or not values
            else f"{column} IN ({', '.join(filter(None, values))})"
        )
    value = _literal(getattr(one, "value", None))
    if kind not in _COMPARISONS or value is None:
        return None
    return f"{column} {_COMPARISONS[kind]} {value}"


def _expression(one: Any) -> Any:
    """Return a filter as PyIceberg reads it; None if that is not certain to mean the same."""
    from pyiceberg import expressions  # noqa: PLC0415

    # Its models take positional arguments that type checkers do not see.
    e: Any = expressions

    kind = type(one).__name__
    if kind == "Not":
        inner = _expression(one.child)
        return None if inner is None else e.Not(inner)
    column = ".".join(one.attribute)
    if kind in ("IsNull", "IsNotNull"):
        return e.IsNull(column) if kind == "IsNull" else e.NotNull(column)
    plain = (bool, int, str)
    if kind == "In":
        values = list(one.value)
        known = values and all(isinstance(value, plain) for value in values)
        return e.In(column, values) if known else None
    value = getattr(one, "value", None)
    if kind not in _COMPARISONS or not isinstance(value, plain):
        return None
    return getattr(e, "EqualTo" if kind == "EqualTo" else kind)(column, value)


def spark_schema(scan: Scan) -> StructType:
    """Return the columns of a scan as Spark knows them."""
    return from_arrow_schema(scan.schema())
