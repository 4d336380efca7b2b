"""The data files of a snapshot with their deletes: which can be rewritten, and which together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestFile,
)
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation
from pyiceberg.utils.concurrent import ExecutorFactory

from lakewarden.formats.iceberg import arranging, entries, regrouping
from lakewarden.formats.iceberg.entries import Deletes, PartitionKey, partition_key, sequence
from lakewarden.formats.iceberg.rewritten import Piece, Source

#: In the summary of a rewrite: the size that its files were to have.
PACKED = "lakewarden.target-bytes"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Data files that would be rewritten, if they could be."""

    reason: str
    files: int
    bytes: int


def named(held: Sequence[ManifestEntry], io: FileIO) -> dict[str, dict[str, int]]:
    """Read which data files are named, and how often, by delete files that name several."""
    shared = [
        one.data_file
        for one in held
        if one.data_file.content == DataFileContent.POSITION_DELETES
        and one.data_file.file_format is FileFormat.PARQUET
        and entries.target(one.data_file) is None
    ]

    def read(file: DataFile) -> dict[str, int]:
        counts: dict[str, int] = defaultdict(int)
        with io.new_input(file.file_path).open() as stream:
            fragment = ds.ParquetFileFormat(dictionary_columns=["file_path"]).make_fragment(stream)
            for batch in fragment.to_batches(columns=["file_path"]):
                for one in pc.value_counts(batch.column(0)).to_pylist():
                    counts[one["values"]] += one["counts"]
        return counts

    read_all = ExecutorFactory.get_or_create().map(read, shared)
    return {file.file_path: one for file, one in zip(shared, read_all, strict=True)}


@dataclass(frozen=True, slots=True)
class Found:
    """A data file with its deletes."""

    entry: ManifestEntry
    manifest: ManifestFile
    deletes: tuple[ManifestEntry, ...]
    deleted_rows: int
    #: Why it cannot be rewritten.
    obstacle: str | None

    @property
    def live_bytes(self) -> int:
        """Bytes that its rows take which are not deleted, without what every file has."""
        file = self.entry.data_file
        size = sum((file.column_sizes or {}).values()) or file.file_size_in_bytes
        rows = max(file.record_count, 1)
        return min(size, file.file_size_in_bytes) * max(rows - self.deleted_rows, 0) // rows

    def source(self) -> Source:
        file = self.entry.data_file
        # Bounds and counts of all columns stay where they are.
        bare = {
            "content": file.content,
            "file_path": file.file_path,
            "file_format": file.file_format,
            "partition": file.partition,
            "record_count": file.record_count,
            "file_size_in_bytes": file.file_size_in_bytes,
        }
        return Source(
            entries.data_file(bare, file.spec_id),
            tuple(one.data_file.file_path for one in self.deletes),
            sequence(self.entry),
            self.manifest.manifest_path,
            self.deleted_rows,
        )


class Survey:
    """Collects data files, and finds what to do with them."""

    def __init__(
        self, metadata: TableMetadata, deletes: Deletes, named: Mapping[str, Mapping[str, int]]
    ) -> None:
        self._metadata, self._deletes, self._named = metadata, deletes, named
        self._specs = {
            number: entries.unwritable(metadata, spec) for number, spec in metadata.specs().items()
        }
        self._whole = self._obstacle()
        self.found: list[Found] = []

    def _obstacle(self) -> str | None:
        """Say why nothing of the table can be rewritten, if so."""
        metadata, schema = self._metadata, self._metadata.schema()
        if metadata.format_version not in entries.WRITTEN_FORMATS:
            # Rows of format 3 have ids, which must go with them into new files.
            return "row_lineage_unsupported"
        if metadata.properties.get("write.format.default", "parquet").lower() != "parquet":
            return "file_format_unsupported"
        order = metadata.sort_order_by_id(metadata.default_sort_order_id)
        if order is not None and not arranging.sortable(order, schema):
            return "sort_order_unsupported"
        return self._specs[metadata.default_spec_id]

    def look(self, entry: ManifestEntry, manifest: ManifestFile) -> None:
        """Note a data file."""
        path = entry.data_file.file_path
        applying = self._deletes.positions(entry)
        exact = [one for one in applying if self._names(one, path)]
        rows = sum(self._rows(one, path) for one in exact)
        gone = min(rows, entry.data_file.record_count)
        self.found.append(
            Found(entry, manifest, tuple(exact), gone, self._of(entry, manifest, exact))
        )

    def _names(self, deletes: ManifestEntry, path: str) -> bool:
        named = self._named.get(deletes.data_file.file_path)
        return named is None or path in named

    def _rows(self, deletes: ManifestEntry, path: str) -> int:
        named = self._named.get(deletes.data_file.file_path)
        return deletes.data_file.record_count if named is None else named[path]

    def _of(
        self, entry: ManifestEntry, manifest: ManifestFile, deletes: Sequence[ManifestEntry]
    ) -> str | None:
        file, metadata = entry.data_file, self._metadata
        if self._whole is not None:
            return self._whole
        if file.file_format is not FileFormat.PARQUET:
            return "file_format_unsupported"
        if file.key_metadata is not None or manifest.key_metadata is not None:
            return "encryption_unsupported"
        if self._specs[file.spec_id] is not None:
            return self._specs[file.spec_id]
        if file.spec_id != metadata.default_spec_id and not arranging.dividable(
            metadata.spec(), metadata.schema()
        ):
            return "partition_transform_unsupported"
        if self._deletes.equalities(entry):
            return "equality_deletes_unsupported"
        if any(one.data_file.file_format is not FileFormat.PARQUET for one in deletes):
            return "delete_format_unsupported"
        return None

    def pieces(self, wanted: regrouping.Wanted) -> tuple[list[Piece], list[Skipped]]:
        """Group files of one partition, and tell groups that cannot be rewritten from the rest."""
        groups: dict[tuple[PartitionKey, str | None], list[Found]] = defaultdict(list)
        for one in self.found:
            groups[partition_key(one.entry.data_file), one.obstacle].append(one)
        pieces: list[Piece] = []
        left: dict[str, list[Found]] = defaultdict(list)
        for (_, obstacle), members in groups.items():
            members.sort(key=lambda one: (sequence(one.entry), one.entry.data_file.file_path))
            sized = [self._sized(place, one, wanted) for place, one in enumerate(members)]
            for group in regrouping.regroup(sized, wanted):
                chosen = [members[one.place] for one in group.members]
                if obstacle is not None:
                    left[obstacle] += chosen
                    continue
                sources = tuple(one.source() for one in chosen)
                into = self._metadata.default_spec_id
                pieces.append(Piece(len(pieces), sources, into, wanted.target_bytes, group.outputs))
        skipped = [
            Skipped(reason, len(held), sum(one.entry.data_file.file_size_in_bytes for one in held))
            for reason, held in sorted(left.items())
        ]
        return pieces, skipped

    def _sized(self, place: int, found: Found, wanted: regrouping.Wanted) -> regrouping.Sized:
        file = found.entry.data_file
        return regrouping.Sized(
            place,
            file.file_size_in_bytes,
            found.live_bytes,
            found.deleted_rows / max(file.record_count, 1),
            self._is_settled(found.entry.snapshot_id, wanted.target_bytes),
        )

    def _is_settled(self, snapshot_id: int | None, target: int) -> bool:
        """Tell whether a snapshot was a rewrite to files of at least this size."""
        snapshot = None if snapshot_id is None else self._metadata.snapshot_by_id(snapshot_id)
        if snapshot is None or snapshot.summary is None:
            return False
        packed = snapshot.summary.get(PACKED)
        is_rewrite = snapshot.summary.operation is Operation.REPLACE
        return is_rewrite and packed is not None and int(packed) >= target

    def deletes_left(
        self, held: Sequence[ManifestEntry], *, complete: bool
    ) -> tuple[dict[str, frozenset[str]], frozenset[str]]:
        """Return what shared delete files are about, and which are about nothing that is there.

        Without having seen all data files, nothing can be said.
        """
        if not complete or self._whole is not None:
            return {}, frozenset()
        there = {one.entry.data_file.file_path for one in self.found}
        shared = {path: frozenset(there.intersection(named)) for path, named in self._named.items()}
        single = {
            one.data_file.file_path
            for one in held
            if one.data_file.content == DataFileContent.POSITION_DELETES
            and entries.target(one.data_file) not in {None, *there}
        }
        return shared, frozenset(single | {path for path, named in shared.items() if not named})
