"""`spark.read.format("lakewarden")`: a table of a warehouse at one version; and `df.write` to it.

    spark.dataSource.register(WarehouseSource)
    rows = (
        spark.read.format("lakewarden")
        .option("warehouse", "/data/lake").option("tag", "training")
        .load("db.vectors")
    )

A schema that is given names the columns that are read.  Filters are handed to the format if
`spark.sql.python.filterPushdown.enabled` is set, and checked by Spark again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema

from lakewarden.errors import ErrorKind, UsageError
from lakewarden.model import parse_moment
from lakewarden.pipeline import loading
from lakewarden.pipeline.scanning import IcebergScan, LanceScan, Scan, scan_of, spark_schema
from lakewarden.storage.opening import Opener
from lakewarden.warehouse import names
from lakewarden.warehouse.formats import with_formats
from lakewarden.warehouse.manifest import MAIN
from lakewarden.warehouse.transaction import transaction
from lakewarden.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

    from lakewarden.warehouse.manifest import Name

_STORAGE = "storage."


@dataclass(frozen=True)
class _Options:
    """What the options of a read or a write say."""

    given: Mapping[str, str]

    def get(self, name: str) -> str | None:
        return self.given.get(name)

    def open(self) -> Warehouse:
        uri = self.get("warehouse")
        if uri is None:
            raise UsageError(
                ErrorKind.USAGE, 'say where the warehouse is: .option("warehouse", "/data/lake")'
            )
        storage = {
            key.removeprefix(_STORAGE): value
            for key, value in self.given.items()
            if key.startswith(_STORAGE)
        }
        return with_formats(
            Warehouse.open(
                uri,
                opener=Opener(storage),
                database=self.get("log-database"),
                actor=self.get("actor"),
            )
        )

    def table(self) -> Name:
        found = self.get("table") or self.get("path")
        if not found:
            raise UsageError(ErrorKind.USAGE, 'say which table: .load("namespace.table")')
        return names.parse_name(found)

    def branch(self) -> str:
        return self.get("branch") or MAIN

    def scan(self, columns: Iterable[str] | None = None) -> Scan:
        warehouse = self.open()
        version, at = self.get("version"), self.get("at")
        view = warehouse.read(
            version=None if version is None else _number(version),
            tag=self.get("tag"),
            at=None if at is None else parse_moment(at),
            branch=self.get("branch"),
        )
        return scan_of(warehouse, view, self.table(), None if columns is None else list(columns))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(ErrorKind.USAGE, f"{text!r} is no version of a warehouse; give a number")
    return int(text)


class WarehouseSource(DataSource):
    """Tables of warehouses, for Spark."""

    @classmethod
    def name(cls) -> str:
        return "lakewarden"

    def schema(self) -> StructType:
        return spark_schema(_Options(dict(self.options)).scan())

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader(_Options(dict(self.options)), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002, FBT001
        return _Writer(_Options(dict(self.options)), overwrite)


class _Part(InputPartition):
    def __init__(self, part: bytes) -> None:
        super().__init__(part)


class _Reader(DataSourceReader):
    def __init__(self, options: _Options, schema: StructType) -> None:
        # The version is chosen here, once; workers only ever hear of that one.
        self._scan: Any = options.scan(schema.fieldNames())
        self._schema = to_arrow_schema(schema)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        if isinstance(self._scan, LanceScan | IcebergScan):
            self._scan = self._scan.filtered(filters)
        # What the format has left out is left out; Spark looks at the rest once more.
        return filters

    def partitions(self) -> list[InputPartition]:
        return [_Part(part) for part in self._scan.parts()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in self._scan.read(partition.value):
            yield batch.cast(self._schema)


@dataclass
class _Written(WriterCommitMessage):
    messages: list[bytes]


class _Writer(DataSourceArrowWriter):
    """Appends, or overwrites; one version of the warehouse for all that is written."""

    def __init__(self, options: _Options, overwrite: bool) -> None:  # noqa: FBT001
        self._options = options
        self._overwrite = overwrite
        with transaction(options.open(), branch=options.branch()) as nothing:
            self._writer = loading.writer_for(nothing, options.table())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        wanted = self._writer.schema.names
        return _Written(list(self._writer.write(batch.select(wanted) for batch in iterator)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        written = [one for some in messages if isinstance(some, _Written) for one in some.messages]
        name = self._options.table()
        with transaction(
            self._options.open(),
            message=self._options.get("message") or f"write {'.'.join(name)}",
            request=self._options.get("request"),
            branch=self._options.branch(),
        ) as changes:
            if changes.done_before is None:
                loading.stage(changes, name, written, overwrite=self._overwrite)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave what was written: nobody names it, and it goes with other orphans."""
