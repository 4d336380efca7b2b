"""Spark frames into tables of a warehouse: files are written by the workers, the commit is one.

    with transaction(warehouse, message="daily load", request="2026-11-15") as tx:
        append(tx, ("db", "vectors"), vectors)
        merge(tx, ("db", "facts"), facts, on=["id"])

Workers write data files that nobody sees and tell the driver what they have written; the transaction
makes them part of their tables, all at once.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakewarden.errors import ErrorKind, UsageError
from lakewarden.model import Format
from lakewarden.pipeline.scanning import FILE, ROW_ADDRESS, IcebergScan, LanceScan, frame

if TYPE_CHECKING:
    from pyiceberg.table import Table as IcebergTable

    from lakewarden.warehouse.manifest import Name
    from lakewarden.warehouse.transaction import Changes

_MESSAGE = pa.schema([("message", pa.binary())])
#: Row addresses of Lance: the fragment in the upper half, the row in the lower.
_FRAGMENT_BITS = 32


def create(tx: Changes, name: Name, rows: DataFrame, form: Format = Format.LANCE) -> None:
    """Make a table of a frame."""
    schema = _arrow_schema(rows)
    if form is Format.ICEBERG:
        tx.iceberg.create_table(name, schema)
        append(tx, name, rows)
        return
    import lance  # noqa: PLC0415
    import lance_namespace as api  # noqa: PLC0415

    made = tx.lance.declare_table(api.DeclareTableRequest(id=list(name)))
    written = _collected(rows, _LanceWriter(made.location, schema, made.storage_options or {}))
    lance.LanceDataset.commit(
        made.location,
        lance.LanceOperation.Overwrite(schema, _fragments(written)),
        namespace_client=tx.lance,
        table_id=list(name),
        namespace_client_managed_versioning=True,
        storage_options=made.storage_options,
    )


def append(tx: Changes, name: Name, rows: DataFrame) -> None:
    """Add the rows of a frame to a table."""
    write(tx, name, rows, overwrite=False)


def overwrite(tx: Changes, name: Name, rows: DataFrame) -> None:
    """Put the rows of a frame in the place of all that are there."""
    write(tx, name, rows, overwrite=True)


def write(tx: Changes, name: Name, rows: DataFrame, *, overwrite: bool) -> None:
    """Append, or overwrite."""
    writer = writer_for(tx, name)
    aligned = rows.select(*(F.col(f"`{column}`") for column in writer.schema.names))
    stage(tx, name, _collected(aligned, writer), overwrite=overwrite)


def writer_for(tx: Changes, name: Name) -> Writer:
    """Return what workers need to write files of a table."""
    if tx.table(name).format is Format.LANCE:
        found = _dataset(tx, name)
        return _LanceWriter(found.uri, found.schema, _options(tx))
    loaded = tx.iceberg.load_table(name)
    return _IcebergWriter(pickle.dumps((loaded.metadata, loaded.io.properties)), _arrow(loaded))


def stage(tx: Changes, name: Name, messages: Sequence[bytes], *, overwrite: bool) -> None:
    """Make files that workers have written part of a table, in the transaction."""
    if tx.table(name).format is Format.LANCE:
        import lance  # noqa: PLC0415

        found = _dataset(tx, name)
        fragments = _fragments(messages)
        operation = (
            lance.LanceOperation.Overwrite(found.schema, fragments)
            if overwrite
            else lance.LanceOperation.Append(fragments)
        )
        lance.LanceDataset.commit(found, operation, read_version=found.version)
        return
    from pyiceberg.expressions import AlwaysTrue  # noqa: PLC0415

    with tx.iceberg.load_table(name).transaction() as changes:
        if overwrite:
            changes.delete(AlwaysTrue())
        with changes.update_snapshot().fast_append() as appended:
            for file in _files(messages):
                appended.append_data_file(file)


def merge(tx: Changes, name: Name, rows: DataFrame, on: Sequence[str]) -> None:
    """Put rows of a frame in the place of those with equal keys, and add the others.

    A key that is null equals nothing.  Two rows of the frame with one key are an error: which of them
    is meant nobody can tell.
    """
    _check_keys(rows, on)
    table = tx.table(name)
    if tx.changed(table):
        raise UsageError(
            ErrorKind.USAGE,
            f"cannot merge into {'.'.join(name)} after another change of it in one transaction, "
            "which workers do not see yet; merge first, or in a transaction of its own",
        )
    if table.format is Format.LANCE:
        _merge_lance(tx, name, rows, on)
    else:
        _merge_iceberg(tx, name, rows, on)


def _check_keys(rows: DataFrame, on: Sequence[str]) -> None:
    missing = [key for key in on if key not in rows.columns]
    if not on or missing:
        what = f"the frame has no column {missing[0]}" if missing else "no key was given"
        raise UsageError(ErrorKind.USAGE, f"cannot merge: {what}; name columns of both sides")
    twice = rows.dropna(subset=list(on)).groupBy(*on).count().filter("count > 1").limit(1).collect()
    if twice:
        key = ", ".join(f"{name}={twice[0][name]!r}" for name in on)
        raise UsageError(
            ErrorKind.USAGE, f"cannot merge: several rows have {key}; leave one for every key"
        )


def _merge_lance(tx: Changes, name: Name, rows: DataFrame, on: Sequence[str]) -> None:
    import lance  # noqa: PLC0415

    found = _dataset(tx, name)
    writer = writer_for(tx, name)
    aligned = rows.select(*(F.col(f"`{column}`") for column in writer.schema.names))
    scan = LanceScan(found.uri, found.version, _options(tx), tuple(on), with_place=True)
    there = frame(rows.sparkSession, scan)
    matched = there.join(rows.select(*on), on=list(on), how="left_semi")
    gone = matched.groupBy(F.shiftright(F.col(ROW_ADDRESS), _FRAGMENT_BITS).alias("fragment")).agg(
        F.collect_list(ROW_ADDRESS).alias("addresses")
    )
    changed = _updated(gone.mapInArrow(_deleter(scan), "message binary").collect())
    fragments = _fragments(_collected(aligned, writer))
    updated = [one for one, left in changed if left]
    removed = [one.id for one, left in changed if not left]
    operation = lance.LanceOperation.Update(
        removed_fragment_ids=removed,
        updated_fragments=updated,
        new_fragments=fragments,
        fields_modified=[],
    )
    lance.LanceDataset.commit(found, operation, read_version=found.version)


def _deleter(scan: LanceScan) -> Any:
    """Delete rows of fragments, without committing; workers write the deletion files."""

    def delete(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = scan.dataset()
        for batch in incoming:
            for row in batch.to_pylist():
                fragment = found.get_fragment(row["fragment"])
                addresses = ", ".join(map(str, row["addresses"]))
                left = fragment.delete(f"_rowaddr IN ({addresses})")
                told = (fragment.metadata if left is None else left).to_json()
                message = pickle.dumps((json.dumps(told), left is not None))
                yield pa.RecordBatch.from_pylist([{"message": message}], schema=_MESSAGE)

    return delete


def _updated(rows: Sequence[Any]) -> list[tuple[Any, bool]]:
    from lance import FragmentMetadata  # noqa: PLC0415

    found = [pickle.loads(row.message) for row in rows]  # noqa: S301  # our own workers' words
    return [(FragmentMetadata.from_json(text), left) for text, left in found]


def _merge_iceberg(tx: Changes, name: Name, rows: DataFrame, on: Sequence[str]) -> None:
    loaded = tx.iceberg.load_table(name)
    writer = writer_for(tx, name)
    columns = writer.schema.names
    scan = IcebergScan(loaded.metadata_location, _options(tx), with_place=True)
    there = frame(rows.sparkSession, scan)
    touched = there.join(rows.select(*on), on=list(on), how="left_semi").select(FILE).distinct()
    paths = {row[0] for row in touched.collect()}
    # Rows of files that are replaced, but for those that are replaced themselves.
    kept = there.join(touched, on=FILE, how="left_semi").join(
        rows.select(*on), on=list(on), how="left_anti"
    )
    both = kept.select(*columns).unionByName(rows.select(*columns))
    messages = _collected(both, writer)
    with loaded.transaction() as changes, changes.update_snapshot().overwrite() as replaced:
        for task in loaded.scan().plan_files():
            if task.file.file_path in paths:
                replaced.delete_data_file(task.file)
        for file in _files(messages):
            replaced.append_data_file(file)


# -- what workers do -------------------------------------------------------------------------------


class Writer:
    """Writes files of one table from Arrow batches; picklable."""

    schema: pa.Schema

    def write(self, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
        """Write everything, and tell what was written."""
        raise NotImplementedError


@dataclass(frozen=True)
class _LanceWriter(Writer):
    uri: str
    schema: pa.Schema
    options: dict[str, str]

    def write(self, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
        from lance.fragment import write_fragments  # noqa: PLC0415

        first = next(batches, None)
        if first is None:
            return
        whole = (one.cast(self.schema) for one in _chained(first, batches))
        reader = pa.RecordBatchReader.from_batches(self.schema, whole)
        for fragment in write_fragments(
            reader, self.uri, schema=self.schema, storage_options=self.options or None
        ):
            yield json.dumps(fragment.to_json()).encode()


@dataclass(frozen=True)
class _IcebergWriter(Writer):
    #: The table's metadata and the properties of its storage, pickled: they hold more than frames can.
    table: bytes
    schema: pa.Schema

    def write(self, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
        from pyiceberg.io import load_file_io  # noqa: PLC0415
        from pyiceberg.io.pyarrow import _dataframe_to_data_files  # noqa: PLC0415

        metadata, properties = pickle.loads(self.table)  # noqa: S301  # from our own driver
        rows = pa.Table.from_batches((one.cast(self.schema) for one in batches), self.schema)
        if not rows.num_rows:
            return
        io = load_file_io(properties, metadata.location)
        for file in _dataframe_to_data_files(metadata, rows, io, counter=count(0)):
            yield pickle.dumps(file)


def _chained(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _collected(rows: DataFrame, writer: Writer) -> list[bytes]:
    """Let workers write a frame; return what they tell, a few words for every file."""

    def write(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for message in writer.write(iter(incoming)):
            yield pa.RecordBatch.from_pylist([{"message": message}], schema=_MESSAGE)

    return [bytes(row.message) for row in rows.mapInArrow(write, "message binary").collect()]


def _fragments(messages: Sequence[bytes]) -> list[Any]:
    from lance import FragmentMetadata  # noqa: PLC0415

    return [FragmentMetadata.from_json(one.decode()) for one in messages]


def _files(messages: Sequence[bytes]) -> list[Any]:
    return [pickle.loads(one) for one in messages]  # noqa: S301  # from our own workers


def _dataset(tx: Changes, name: Name) -> Any:
    import lance  # noqa: PLC0415

    return lance.dataset(namespace_client=tx.lance, table_id=list(name))


def _options(tx: Changes) -> dict[str, str]:
    return dict(getattr(tx.warehouse.opener, "options", {}))


def _arrow(table: IcebergTable) -> pa.Schema:
    from pyiceberg.io.pyarrow import schema_to_pyarrow  # noqa: PLC0415

    return schema_to_pyarrow(table.schema(), include_field_ids=False)


def _arrow_schema(rows: DataFrame) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    return to_arrow_schema(rows.schema)
