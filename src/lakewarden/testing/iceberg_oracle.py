"""What must be true of Iceberg tables whatever was done to them, checked with PyIceberg alone.

Nothing of ours is imported here: an oracle that shares code with what it judges shares its bugs.
Manifests are read with `pyiceberg.manifest`, rows with PyIceberg's own scan.  Paths are compared in
the form that `normal` gives them.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow.fs
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFileContent, ManifestFile, read_manifest_list
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import StaticTable, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

METADATA = "metadata"
METADATA_LOG = "metadata-log"
MANIFEST_LIST = "manifest-list"
MANIFEST = "manifest"
CONTENT = "content"
STATISTICS = "statistics"
PARTITION_STATISTICS = "partition-statistics"
KINDS = (
    METADATA, METADATA_LOG, MANIFEST_LIST, MANIFEST, CONTENT, STATISTICS, PARTITION_STATISTICS,
)  # fmt: skip

#: The files that a table's metadata names, by kind.
Reach = dict[str, set[str]]
#: A table, or the location of one of its metadata files.
Source = Table | str


def normal(path: str | Path) -> str:
    """Return the one form of a path: local ones without scheme, S3 ones with `s3://`."""
    text = str(path)
    scheme, separator, rest = text.partition("://")
    if separator and scheme in {"s3", "s3a", "s3n"}:
        return f"s3://{rest}"
    if separator and scheme != "file":
        return text
    return os.path.normpath(text.removeprefix("file://").removeprefix("file:"))


def reachable(source: Source, properties: Mapping[str, str] | None = None) -> Reach:
    """Return every file that the metadata needs, whether it exists or not.

    Of manifests only live entries count: an entry marked as deleted names a file that its snapshot
    does not have.  `properties` reach the storage where only a location is given.
    """
    metadata, location, io = _opened(source, properties)
    found: Reach = {kind: set() for kind in KINDS}
    found[METADATA] = {location}
    found[METADATA_LOG] = {entry.metadata_file for entry in metadata.metadata_log}
    found[STATISTICS] = {one.statistics_path for one in metadata.statistics}
    found[PARTITION_STATISTICS] = {one.statistics_path for one in metadata.partition_statistics}
    manifests: dict[str, ManifestFile] = {}
    for snapshot in metadata.snapshots:
        found[MANIFEST_LIST].add(snapshot.manifest_list)
        manifests |= {one.manifest_path: one for one in _manifests(snapshot, io)}
    found[MANIFEST] = set(manifests)
    for manifest in manifests.values():
        found[CONTENT] |= set(_live(manifest, io))
    return {kind: {normal(path) for path in paths} for kind, paths in found.items()}


def everything(reach: Reach) -> set[str]:
    """Return the files of all kinds."""
    return set().union(*reach.values())


def leftovers(before: Source | Reach, after: Source | Reach) -> set[str]:
    """Return the files that an expiry between two states should have deleted.

    Metadata files are not among them: they leave the log by other rules.  What was reachable before
    must be asked before anything is deleted, or the manifests that tell are gone.
    """
    sets = []
    for state in (before, after):
        reach = state if isinstance(state, dict) else reachable(state)
        sets.append((everything(reach), reach[METADATA] | reach[METADATA_LOG]))
    (had, old_metadata), (has, _) = sets
    return had - has - old_metadata


def on_disk(root: Path | str, properties: Mapping[str, str] | None = None) -> set[str]:
    """Return all files below a directory or an S3 location."""
    text = normal(root)
    if not text.startswith("s3://"):
        return {normal(path) for path in Path(text).rglob("*") if not path.is_dir()}
    bucket, _, prefix = text.removeprefix("s3://").partition("/")
    files = PyArrowFileIO(dict(properties or {})).fs_by_scheme("s3", bucket)
    selector = pyarrow.fs.FileSelector(
        f"{bucket}/{prefix}".rstrip("/"), recursive=True, allow_not_found=True
    )
    return {f"s3://{info.path}" for info in files.get_file_info(selector) if info.is_file}


def unreferenced(table: Table, root: Path | str | None = None) -> set[str]:
    """Return the files below the table's location (or `root`) that its metadata does not name."""
    place = table.location() if root is None else root
    return on_disk(place, table.io.properties) - everything(reachable(table))


def missing(table: Table) -> set[str]:
    """Return the files that the table's metadata names and that do not exist."""
    return {path for path in everything(reachable(table)) if not _exists(table, path)}


def fingerprint(table: Table, snapshot: int) -> str:
    """Read all rows of one snapshot; equal means that it holds the same rows, in any order.

    PyIceberg does not apply equality deletes; of such a snapshot the bytes of every file count.
    """
    named = table.metadata.snapshot_by_id(snapshot)
    assert named is not None
    digest = hashlib.sha256()
    if _has_equality_deletes(named, table.io):
        for path in sorted(
            path for one in _manifests(named, table.io) for path in _live(one, table.io)
        ):
            with table.io.new_input(path).open() as file:
                digest.update(path.encode() + hashlib.sha256(file.read()).digest())
        return digest.hexdigest()
    read = table.scan(snapshot_id=snapshot).to_arrow()
    digest.update(repr(read.schema.names).encode())
    for row, number in sorted(Counter(repr(row) for row in read.to_pylist()).items()):
        digest.update(f"{number} {row}\n".encode())
    return digest.hexdigest()


def fingerprints(table: Table) -> dict[int, str]:
    """Read every snapshot."""
    return {
        snapshot.snapshot_id: fingerprint(table, snapshot.snapshot_id)
        for snapshot in table.metadata.snapshots
    }


def assert_intact(table: Table, expected: Mapping[int, str] | None = None) -> None:
    """Every file that is named exists, every ref names a snapshot, and every snapshot reads.

    With `expected`, the fingerprints of some time before, those snapshots that are still there must
    read what they read then.
    """
    table.refresh()
    gone = missing(table)
    assert not gone, f"{table.name()} lacks {sorted(gone)}"
    known = {snapshot.snapshot_id for snapshot in table.metadata.snapshots}
    lost = {
        name: ref.snapshot_id for name, ref in table.refs().items() if ref.snapshot_id not in known
    }
    assert not lost, f"{table.name()} has refs to no snapshot: {lost}"
    for snapshot, now in fingerprints(table).items():
        then = (expected or {}).get(snapshot, now)
        assert now == then, f"{table.name()} snapshot {snapshot} reads differently now"


def _opened(
    source: Source, properties: Mapping[str, str] | None
) -> tuple[TableMetadata, str, FileIO]:
    if not isinstance(source, str):
        return source.metadata, source.metadata_location, source.io
    io = load_file_io(dict(properties or {}), source)
    return FromInputFile.table_metadata(io.new_input(source)), source, io


def opened(location: str, properties: Mapping[str, str] | None = None) -> Table:
    """Open one metadata file as a table of its own."""
    return StaticTable.from_metadata(location, dict(properties or {}))


def _manifests(snapshot: Snapshot, io: FileIO) -> list[ManifestFile]:
    # Not `snapshot.manifests`, which answers from a cache of the process.
    return list(read_manifest_list(io.new_input(snapshot.manifest_list)))


def _live(manifest: ManifestFile, io: FileIO) -> Iterator[str]:
    for entry in manifest.fetch_manifest_entry(io, discard_deleted=True):
        yield entry.data_file.file_path


def _has_equality_deletes(snapshot: Snapshot, io: FileIO) -> bool:
    return any(
        entry.data_file.content is DataFileContent.EQUALITY_DELETES
        for manifest in _manifests(snapshot, io)
        for entry in manifest.fetch_manifest_entry(io)
    )


def _exists(table: Table, path: str) -> bool:
    return table.io.new_input(path).exists()
