"""What a worker does: read the files of a piece without their deleted rows, and write new ones.

Rows are streamed.  Where they must be sorted, or divided into partitions of a newer spec, as many
are held as go into one new file.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyiceberg.io import FileIO, OutputFile, OutputStream, load_file_io
from pyiceberg.io.pyarrow import (
    ParquetFormatModel,
    ParquetFormatWriter,
    _get_column_projection_values,
    _to_requested_schema,
    pyarrow_to_schema,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionKey, PartitionSpec
from pyiceberg.schema import prune_columns, sanitize_column_names
from pyiceberg.table import Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import SortOrder
from pyiceberg.typedef import Record
from pyiceberg.types import ListType, MapType

from lakewarden.errors import Damaged, ErrorKind
from lakewarden.formats.iceberg.arranging import arranged, divided
from lakewarden.formats.iceberg.entries import data_file
from lakewarden.world import fresh_id

#: Files up to this size are read at once.
_WHOLE = 32 << 20
#: Bytes that are read at once of larger ones.
_BUFFER = 8 << 20
#: Rows, and bytes as far as these can be told, that are decoded at once.
_ROWS, _BYTES = 65_536, 16 << 20
_ROW_GROUP_BYTES = "write.parquet.row-group-size-bytes"
_ROW_GROUP_DEFAULT = 128 << 20
#: What Arrow may hold of rows that are sorted, for each byte of the target.
_HELD = 4
#: Files may grow beyond the target by so much before the next one is begun.
_BEYOND = 1.5
_POSITIONS = ("file_path", "pos")


@dataclass(frozen=True, slots=True)
class Source:
    """A data file of a piece, with what of it is needed to read it and to find it again."""

    file: DataFile
    #: Paths of the position delete files that name it.
    deletes: tuple[str, ...]
    sequence_number: int
    #: The manifest that had it.
    manifest: str
    deleted_rows: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Data files of one partition that are rewritten together."""

    number: int
    sources: tuple[Source, ...]
    #: The spec that new files are of; the sources' may be an older one.
    into_spec: int
    target_bytes: int
    #: New files that are expected, each of about the target's size.
    outputs: int

    @property
    def makes(self) -> int:
        """Files that it is expected to make."""
        return self.outputs

    @property
    def files(self) -> int:
        """Files that it reads."""
        return len(self.sources)

    @property
    def bytes(self) -> int:
        """Bytes that it reads."""
        return sum(one.file.file_size_in_bytes for one in self.sources)

    @property
    def rows(self) -> int:
        """Rows that it reads, deleted ones, too."""
        return sum(one.file.record_count for one in self.sources)

    @property
    def gain(self) -> float:
        """What readers save: files fewer, and a file for the deleted rows of each."""
        shares = (one.deleted_rows / max(one.file.record_count, 1) for one in self.sources)
        return self.files - self.outputs + sum(shares)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The new files of a piece, which nobody sees yet."""

    piece: int
    files: tuple[DataFile, ...]
    #: Rows of the old files that are not deleted: as many as the new files hold.
    rows: int
    deleted_rows: int

    @property
    def bytes(self) -> int:
        return sum(file.file_size_in_bytes for file in self.files)


def described(table: Table) -> bytes:
    """Return what a worker needs to know of a table, for `rewrite`."""
    return pickle.dumps((table.metadata, dict(table.io.properties)))


def storage_of(table: bytes) -> FileIO:
    """Return the storage of a table that was described."""
    metadata, properties = pickle.loads(table)  # noqa: S301  # from our own driver
    return load_file_io(properties, metadata.location)


def rewrite(piece: Piece, table: bytes) -> Rewritten:
    """Write the rows of a piece into new files; if it fails, none of them are left.

    Raises Damaged if the files do not hold the rows that the table's metadata says they hold.
    """
    metadata, properties = pickle.loads(table)  # noqa: S301  # from our own driver
    io = load_file_io(properties, metadata.location)
    reading = _Reading(metadata, io, _positions(piece, io))
    writing = _Writing(metadata, io, piece)
    try:
        writing.write(reading.batches(piece))
        _check(piece, reading, writing)
    except BaseException:
        # Nobody knows of these files yet.
        discard_files(writing.paths, io)
        raise
    return Rewritten(piece.number, tuple(writing.files), writing.rows, reading.deleted)


def _check(piece: Piece, reading: _Reading, writing: _Writing) -> None:
    """Raise Damaged if rows were lost, or found, on the way."""
    expected = piece.rows - reading.deleted
    if not reading.rows == writing.rows == expected:
        raise Damaged(
            ErrorKind.DAMAGED_VERSION,
            f"{piece.sources[0].file.file_path} and {piece.files - 1} files with it were to hold "
            f"{expected} rows that are not deleted, {reading.rows} were read and {writing.rows} "
            "written; nothing was changed: the table's metadata and its files do not agree",
        )


def discard(results: Iterable[Rewritten], io: FileIO) -> list[str]:
    """Delete the files of results that certainly did not land; returns those that could not be."""
    return discard_files([file.file_path for one in results for file in one.files], io)


def discard_files(paths: Iterable[str], io: FileIO) -> list[str]:
    """Delete files that nobody knows of; what is left of them is an orphan, and no harm."""
    left = []
    for path in paths:
        try:
            io.delete(path)
        except FileNotFoundError:
            continue
        except OSError:
            left.append(path)
    return left


# -- reading ---------------------------------------------------------------------------------------


def _positions(piece: Piece, io: FileIO) -> dict[str, Any]:
    """Return the positions of deleted rows for each data file, ascending."""
    wanted: dict[str, list[str]] = {}
    for source in piece.sources:
        for path in source.deletes:
            wanted.setdefault(path, []).append(source.file.file_path)
    found: dict[str, list[Any]] = {}
    for path, files in wanted.items():
        with io.new_input(path).open() as file:
            fragment = ds.ParquetFileFormat().make_fragment(file)
            held = fragment.to_table(
                columns=list(_POSITIONS), filter=pc.field("file_path").isin(files)
            )
        for name in files:
            mine = held.filter(pc.field("file_path") == name).column("pos")
            found.setdefault(name, []).append(mine.to_numpy())
    return {name: np.unique(np.concatenate(parts)) for name, parts in found.items()}


@dataclass(slots=True)
class _Reading:
    """Reads data files as the table's schema has them, and counts."""

    metadata: TableMetadata
    io: FileIO
    positions: dict[str, Any]
    rows: int = 0
    #: Rows that were there and are deleted.
    deleted: int = 0

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        for source in piece.sources:
            start = 0
            gone = self.positions.get(source.file.file_path, np.empty(0, np.int64))
            for batch in self._file(source.file):
                end = start + batch.num_rows
                first, last = np.searchsorted(gone, (start, end))
                kept = batch
                if last > first:
                    mask = np.ones(batch.num_rows, bool)
                    mask[gone[first:last] - start] = False
                    kept = batch.filter(pa.array(mask))
                start = end
                self.deleted += batch.num_rows - kept.num_rows
                self.rows += kept.num_rows
                if kept.num_rows:
                    yield kept

    def _file(self, file: DataFile) -> Iterator[pa.RecordBatch]:
        """Read one data file, without its deletes, by field ids."""
        schema = self.metadata.schema()
        opened = self.io.new_input(file.file_path)
        with opened.open() as stream:
            small = file.file_size_in_bytes <= _WHOLE
            held = pa.BufferReader(stream.read()) if small else stream
            parquet = pq.ParquetFile(held, pre_buffer=False, buffer_size=0 if small else _BUFFER)
            physical = pyarrow_to_schema(
                parquet.schema_arrow,
                self.metadata.name_mapping(),
                downcast_ns_timestamp_to_us=True,
                format_version=self.metadata.format_version,
            )
            missing = _get_column_projection_values(
                file, schema, schema, self.metadata.specs().get(file.spec_id), physical.field_ids
            )
            leaves = {
                one
                for one in schema.field_ids
                if not isinstance(schema.find_type(one), MapType | ListType)
            }
            pruned = prune_columns(physical, leaves, select_full_types=False)
            width = file.file_size_in_bytes / max(file.record_count, 1)
            for batch in parquet.iter_batches(
                batch_size=int(max(1, min(_ROWS, _BYTES / max(width, 1)))),
                columns=[column.name for column in pruned.columns],
            ):
                yield _to_requested_schema(
                    schema,
                    pruned,
                    batch,
                    downcast_ns_timestamp_to_us=True,
                    projected_missing_fields=missing,
                    allow_timestamp_tz_mismatch=True,
                )


# -- writing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place(PartitionKey):
    """A partition of which the values are known."""

    record: Record = field(default_factory=Record)

    def to_path(self) -> str:
        return self.partition_spec.partition_to_path(self.record, self.schema)


class _Watched:
    """An output file that tells how much has been written to it."""

    def __init__(self, output: OutputFile) -> None:
        self._output = output
        self.stream: OutputStream | None = None

    def create(self, overwrite: bool = False) -> OutputStream:  # noqa: FBT001, FBT002  # PyIceberg's
        self.stream = self._output.create(overwrite)
        return self.stream

    def written(self) -> int:
        return self.stream.tell() if self.stream is not None else 0


class _Writing:
    """Writes rows into new files of about the target size."""

    def __init__(self, metadata: TableMetadata, io: FileIO, piece: Piece) -> None:
        self._metadata, self._io, self._piece = metadata, io, piece
        self._schema = metadata.schema()
        self._file_schema = sanitize_column_names(self._schema)
        self._arrow = schema_to_pyarrow(self._file_schema, include_field_ids=True)
        self._spec: PartitionSpec = metadata.specs()[piece.into_spec]
        self._order: SortOrder = _order(metadata)
        # What PyIceberg warns of, because it does not do it, is done here or has no meaning.
        self._properties = {
            name: value
            for name, value in metadata.properties.items()
            if name != _ROW_GROUP_BYTES and not name.startswith("write.parquet.bloom-filter")
        }
        wished = int(metadata.properties.get(_ROW_GROUP_BYTES, _ROW_GROUP_DEFAULT))
        self._group_bytes = max(1, min(wished, piece.target_bytes))
        self._locations = load_location_provider(metadata.location, metadata.properties)
        self._numbers = count()
        self.files: list[DataFile] = []
        self.paths: list[str] = []
        self.rows = 0

    def write(self, batches: Iterator[pa.RecordBatch]) -> None:
        """Write everything."""
        source = self._piece.sources[0].file
        divide = source.spec_id != self._piece.into_spec
        live = sum(one.file.record_count - one.deleted_rows for one in self._piece.sources)
        limit = max(1, math.ceil(live / max(self._piece.outputs, 1)))
        if not divide and not self._order.fields:
            rest = _Peekable(batches)
            while rest.more():
                self._one(source.partition, _first(rest, limit))
            return
        most = _HELD * self._piece.target_bytes
        for rows in self._chunks(batches, limit, most):
            parts: Iterable[tuple[Record, pa.Table]] = [(source.partition, rows)]
            if divide:
                parts = divided(rows, self._spec, self._schema)
            for record, part in parts:
                pieces = _Peekable(iter(arranged(part, self._order, self._schema).to_batches()))
                while pieces.more():
                    self._one(record, pieces)

    def _chunks(
        self, batches: Iterator[pa.RecordBatch], rows: int, most: int
    ) -> Iterator[pa.Table]:
        """Return rows of one new file each; fewer, if they take more memory than they may."""
        kind = schema_to_pyarrow(self._schema, include_field_ids=False)
        rest = _Peekable(batches)
        while rest.more():
            held: list[pa.Table] = []
            size = 0
            for batch in _first(rest, rows):
                held.append(pa.Table.from_batches([batch]).cast(kind))
                size += held[-1].nbytes
                if size >= most:
                    break
            yield pa.concat_tables(held).combine_chunks()

    def _one(self, record: Record, batches: Iterator[pa.RecordBatch]) -> None:
        """Write one file: until there is no more, or it is much larger than wanted."""
        name = f"{next(self._numbers):05}-{self._piece.number}-{fresh_id()}.parquet"
        place = _Place([], self._spec, self._schema, record) if self._spec.fields else None
        path = self._locations.new_data_location(name, place)
        output = self._io.new_output(path)
        watched = _Watched(output)
        self.paths.append(path)
        most = _BEYOND * self._piece.target_bytes
        with ParquetFormatWriter(watched, self._file_schema, self._properties) as writer:  # type: ignore[arg-type]
            for group in self._groups(batches):
                writer.write(group)
                if watched.written() >= most:
                    break
        statistics = writer.result()
        self.rows += statistics.record_count
        self.files.append(
            data_file(
                {
                    "content": DataFileContent.DATA,
                    "file_path": path,
                    "file_format": FileFormat.PARQUET,
                    "partition": record,
                    "file_size_in_bytes": len(output),
                    "sort_order_id": self._order.order_id if self._order.fields else None,
                    **statistics.to_serialized_dict(),
                },
                self._spec.spec_id,
            )
        )

    def _groups(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        """Return row groups of a file, in the table's types and with its field ids."""
        waiting: list[pa.RecordBatch] = []
        held = 0
        for batch in batches:
            made = _to_requested_schema(
                self._file_schema,
                self._schema,
                batch,
                include_field_ids=True,
                format_model=ParquetFormatModel(),
            )
            # Files differ in how they hold strings and lists.
            whole = pa.Table.from_batches([made]).cast(self._arrow)
            waiting += whole.to_batches()
            held += whole.nbytes
            if held >= self._group_bytes:
                yield pa.Table.from_batches(waiting)
                waiting, held = [], 0
        if waiting:
            yield pa.Table.from_batches(waiting)


class _Peekable(Iterator[pa.RecordBatch]):
    """Batches of which one can be looked at, and a part of one put back."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._back: list[pa.RecordBatch] = []

    def __next__(self) -> pa.RecordBatch:
        return self._back.pop() if self._back else next(self._batches)

    def more(self) -> bool:
        with suppress(StopIteration):
            self._back.append(next(self))
            return True
        return False

    def put_back(self, batch: pa.RecordBatch) -> None:
        self._back.append(batch)


def _first(batches: _Peekable, rows: int) -> Iterator[pa.RecordBatch]:
    """Return as many rows, and leave the rest."""
    left = rows
    for batch in batches:
        if batch.num_rows > left:
            batches.put_back(batch.slice(left))
            yield batch.slice(0, left)
            return
        left -= batch.num_rows
        yield batch
        if not left:
            return


def _order(metadata: TableMetadata) -> SortOrder:
    found = metadata.sort_order_by_id(metadata.default_sort_order_id)
    return found if found is not None else SortOrder(order_id=0)
