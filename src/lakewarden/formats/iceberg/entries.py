"""Entries of manifests, read and written so that nothing of them is lost.

PyIceberg reads manifests without the data file that a delete file refers to, and writes none of
delete files.  Here both are done, with its own Avro reader and writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType
from typing import Any, Literal

from pyiceberg.avro.file import AvroFile, AvroOutputFile
from pyiceberg.io import FileIO, OutputFile
from pyiceberg.manifest import (
    MANIFEST_ENTRY_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    ManifestWriterV1,
    ManifestWriterV2,
    data_file_with_partition,
    manifest_entry_schema_with_data_file,
    read_manifest_list,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import UnknownTransform, VoidTransform
from pyiceberg.types import IntegerType, ListType, NestedField, StructType, UnknownType
from pyiceberg.utils.concurrent import ExecutorFactory

#: The fields of a file as they are held here: those of the newest format, the older ones first.
HELD: Literal[3] = 3
#: Formats of which manifests can be written.
WRITTEN_FORMATS = (1, 2)
#: The file path in bounds of position delete files.
PATH_ID = 2147483546
_REFERENCED_ID, _EQUALITY_IDS = 143, 135
_REFERENCED = 17
#: Entries that are packed together.
_BLOCK = 256

#: What tells partitions apart; unlike records, NaN is like NaN.
PartitionKey = tuple[int, tuple[Any, ...]]


def partition_key(file: DataFile) -> PartitionKey:
    """Return what files of one partition, of one spec, have in common."""
    values = (file.partition[place] for place in range(len(file.partition)))
    return file.spec_id, tuple("NaN" if value != value else value for value in values)  # noqa: PLR0124


def manifests_of(snapshot: Snapshot, io: FileIO) -> list[ManifestFile]:
    """Return the manifests of a snapshot, from storage and not from a cache of the process."""
    return list(read_manifest_list(io.new_input(snapshot.manifest_list)))


def live(manifest: ManifestFile, io: FileIO) -> list[ManifestEntry]:
    """Return the entries of files that are there, with what they inherit from the manifest.

    What they hold is compared by `==`: where format 1 says nothing, a bare number stands for it.
    """
    with AvroFile[ManifestEntry](
        io.new_input(manifest.manifest_path),
        MANIFEST_ENTRY_SCHEMAS[HELD],
        read_types={-1: ManifestEntry, 2: DataFile},
        read_enums={0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    ) as reader:
        found = [one for one in reader if one.status is not ManifestEntryStatus.DELETED]
    for entry in found:
        added = entry.status is ManifestEntryStatus.ADDED
        if entry.snapshot_id is None and manifest.added_snapshot_id is not None:
            entry.snapshot_id = manifest.added_snapshot_id
        if entry.sequence_number is None and (added or not manifest.sequence_number):
            entry.sequence_number = manifest.sequence_number or 0
        if entry.file_sequence_number is None and (added or not manifest.sequence_number):
            entry.file_sequence_number = manifest.sequence_number or 0
        entry.data_file.spec_id = manifest.partition_spec_id
    return found


def all_live(manifests: Sequence[ManifestFile], io: FileIO) -> Iterator[list[ManifestEntry]]:
    """Return the live entries of each manifest; many are read at the same time."""
    return ExecutorFactory.get_or_create().map(lambda one: live(one, io), manifests)


def sequence(entry: ManifestEntry) -> int:
    """Return the data sequence number of a file."""
    return entry.sequence_number or 0


def unwritable(metadata: TableMetadata, spec: PartitionSpec) -> str | None:
    """Say why manifests of a spec cannot be written here, if so."""
    if any(isinstance(one.transform, UnknownTransform) for one in spec.fields):
        return "partition_transform_unsupported"
    kinds = spec.partition_type(metadata.schema()).fields
    if any(isinstance(one.field_type, UnknownType) for one in kinds):
        # What was made of a column that is gone has no type that is known.
        return "partition_column_dropped"
    return None


# -- which deletes apply ---------------------------------------------------------------------------


def target(file: DataFile) -> str | None:
    """Return the one data file that a position delete file is about, if it is about one."""
    named: str | None = file[_REFERENCED] if len(file) > _REFERENCED else None
    if named:
        return named
    lower, upper = (
        (bounds or {}).get(PATH_ID) for bounds in (file.lower_bounds, file.upper_bounds)
    )
    return lower.decode() if lower is not None and lower == upper else None


def _may_name(deletes: DataFile, path: str) -> bool:
    """Tell whether a position delete file may name a data file, by its bounds, which may be cut."""
    lower, upper = (
        (bounds or {}).get(PATH_ID) for bounds in (deletes.lower_bounds, deletes.upper_bounds)
    )
    named = path.encode()
    below = upper is None or named <= upper or named.startswith(upper)
    return below and (lower is None or lower <= named)


def _is_unpartitioned(spec: PartitionSpec) -> bool:
    """Tell whether a spec divides nothing; format 1 leaves a void where a field was taken away."""
    return all(isinstance(one.transform, VoidTransform) for one in spec.fields)


@dataclass(slots=True)
class Deletes:
    """Delete files of one snapshot, by what they can apply to."""

    by_path: dict[str, list[ManifestEntry]] = field(default_factory=dict)
    by_partition: dict[PartitionKey, list[ManifestEntry]] = field(default_factory=dict)
    #: Equality deletes; those of a spec without fields, or with void ones only, apply everywhere.
    equality: dict[PartitionKey, list[ManifestEntry]] = field(default_factory=dict)
    everywhere: list[ManifestEntry] = field(default_factory=list)

    @classmethod
    def of(cls, entries: Iterable[ManifestEntry], specs: Mapping[int, PartitionSpec]) -> Deletes:
        made = cls()
        unpartitioned = {number for number, spec in specs.items() if _is_unpartitioned(spec)}
        for entry in entries:
            file = entry.data_file
            key = partition_key(file)
            if file.content == DataFileContent.EQUALITY_DELETES:
                divided = file.spec_id not in unpartitioned
                found = made.equality.setdefault(key, []) if divided else made.everywhere
            elif (path := target(file)) is not None:
                found = made.by_path.setdefault(path, [])
            else:
                found = made.by_partition.setdefault(key, [])
            found.append(entry)
        return made

    def positions(self, entry: ManifestEntry) -> list[ManifestEntry]:
        """Return the position delete files and deletion vectors that may apply to a data file."""
        path, since = entry.data_file.file_path, sequence(entry)
        shared = self.by_partition.get(partition_key(entry.data_file), ())
        named = [one for one in shared if _may_name(one.data_file, path)]
        return [one for one in (*self.by_path.get(path, ()), *named) if sequence(one) >= since]

    def equalities(self, entry: ManifestEntry) -> list[ManifestEntry]:
        """Return the equality delete files that may apply to a data file."""
        held = self.equality.get(partition_key(entry.data_file), ())
        since = sequence(entry)
        return [one for one in (*held, *self.everywhere) if sequence(one) > since]


# -- writing ---------------------------------------------------------------------------------------


class _Blocks(AvroOutputFile[ManifestEntry]):
    """Packs many entries into a block, where PyIceberg packs each into its own."""

    def __enter__(self) -> _Blocks:
        super().__enter__()
        self._waiting: list[ManifestEntry] = []
        return self

    def __exit__(
        self,
        exctype: type[BaseException] | None,
        excinst: BaseException | None,
        exctb: TracebackType | None,
    ) -> None:
        if exctype is None:
            self._flush()
        super().__exit__(exctype, excinst, exctb)

    def write_block(self, objects: list[ManifestEntry]) -> None:
        self._waiting += objects
        if len(self._waiting) >= _BLOCK:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            super().write_block(self._waiting)
        self._waiting = []


class _Whole:
    """Writes what is held of entries, as far as the format has it."""

    _spec: PartitionSpec
    _schema: Schema
    _output_file: OutputFile
    version: Any
    _meta: Any

    def new_writer(self) -> AvroOutputFile[ManifestEntry]:
        return _Blocks(
            output_file=self._output_file,
            file_schema=self._entry(self.version),
            record_schema=self._entry(HELD),
            schema_name="manifest_entry",
            metadata=self._meta,
        )

    def _entry(self, version: Any) -> Schema:
        kind = data_file_with_partition(self._spec.partition_type(self._schema), version)
        # PyIceberg has longs where equality ids are ints.
        ids = ListType(element_id=136, element_type=IntegerType(), element_required=True)
        fields = [
            NestedField(_EQUALITY_IDS, one.name, ids, required=False, doc=one.doc)
            if one.field_id == _EQUALITY_IDS
            else one
            for one in kind.fields
        ]
        if version == 2:
            newest = data_file_with_partition(StructType(), HELD).fields
            fields += [one for one in newest if one.field_id == _REFERENCED_ID]
        return manifest_entry_schema_with_data_file(version, StructType(*fields))


class _Writer1(_Whole, ManifestWriterV1):
    """Writes manifests of format 1."""


class _Writer2(_Whole, ManifestWriterV2):
    """Writes manifests of format 2, of data files."""


class _DeletesWriter2(_Writer2):
    """Writes manifests of format 2, of delete files."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


@dataclass(slots=True)
class Manifests:
    """Writes the manifests of one new snapshot, and remembers where."""

    metadata: TableMetadata
    io: FileIO
    snapshot_id: int
    #: Entries of a manifest at most, so that it has about the size that the table asks for.
    most: int
    place: Callable[[str], str]
    token: str
    written: list[str] = field(default_factory=list)

    def write(
        self, entries: Iterable[ManifestEntry], content: ManifestContent
    ) -> list[ManifestFile]:
        """Write entries, each with the status it has; those of one spec together."""
        by_spec: dict[int, list[ManifestEntry]] = {}
        for entry in entries:
            by_spec.setdefault(entry.data_file.spec_id, []).append(entry)
        return list(
            chain.from_iterable(
                self._write(self.metadata.specs()[spec], held, content)
                for spec, held in by_spec.items()
            )
        )

    def _write(
        self, spec: PartitionSpec, entries: Sequence[ManifestEntry], content: ManifestContent
    ) -> Iterator[ManifestFile]:
        for start in range(0, len(entries), self.most):
            with self._writer(spec, content) as writer:
                for entry in entries[start : start + self.most]:
                    writer.add_entry(entry)
            yield writer.to_manifest_file()

    def _writer(self, spec: PartitionSpec, content: ManifestContent) -> ManifestWriter:
        kind: type[ManifestWriter] = _Writer1
        if self.metadata.format_version == 2:
            kind = _DeletesWriter2 if content is ManifestContent.DELETES else _Writer2
        path = self.place(f"{self.token}-m{len(self.written)}.avro")
        self.written.append(path)
        codec = self.metadata.properties.get("write.avro.compression-codec", "gzip")
        output = self.io.new_output(path)
        schema = self.metadata.schema()
        return kind(spec, schema, output, self.snapshot_id, codec)  # type: ignore[arg-type]


def with_status(
    entry: ManifestEntry, status: ManifestEntryStatus, snapshot_id: int | None
) -> ManifestEntry:
    """Return an entry with another status, and the snapshot that gave it."""
    return ManifestEntry.from_args(
        status=status,
        snapshot_id=snapshot_id,
        sequence_number=entry.sequence_number,
        file_sequence_number=entry.file_sequence_number,
        data_file=entry.data_file,
    )


def added(file: DataFile, snapshot_id: int, number: int) -> ManifestEntry:
    """Return the entry of a new file that counts as written with an earlier snapshot."""
    return ManifestEntry.from_args(
        status=ManifestEntryStatus.ADDED,
        snapshot_id=snapshot_id,
        sequence_number=number,
        file_sequence_number=None,
        data_file=file,
    )


def data_file(values: Mapping[str, Any], spec_id: int) -> DataFile:
    """Make a file as they are held here."""
    made = DataFile.from_args(HELD, **values)
    made.spec_id = spec_id
    return made
