"""Few large files instead of many small ones: what is worth rewriting, and the commit of it.

    work = plan(table, Rules())
    told = described(table)
    results = [rewrite(piece, told) for piece in work.pieces]      # anywhere
    outcome = commit(table, work, results, properties={})
    discard([one for one in results if one.piece in outcome.lost], table.io)

The commit changes no row.  It is made on top of whatever has been committed since the plan; a piece
is left out if one of its files is gone, or if something may have been deleted from one of them.
New files count as written with the snapshot that was planned from, so that equality deletes that
come later apply to them as they would have to the old ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.expressions import BooleanExpression
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestFile,
)
from pyiceberg.table import ManifestGroupPlanner, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot, ancestors_of

from lakewarden.errors import ErrorKind, UsageError
from lakewarden.formats.iceberg import entries, regrouping
from lakewarden.formats.iceberg.entries import Deletes, partition_key, sequence
from lakewarden.formats.iceberg.replacing import (
    MANIFEST_BYTES,
    MANIFEST_BYTES_DEFAULT,
    Committing,
    Draft,
)
from lakewarden.formats.iceberg.rewritten import Piece, Rewritten, Source
from lakewarden.formats.iceberg.surveying import PACKED, Skipped, Survey, named
from lakewarden.packing import Rules
from lakewarden.world import Clock, SystemClock

MAIN = "main"
TARGET_BYTES = "write.target-file-size-bytes"
TARGET_BYTES_DEFAULT = 512 << 20
_MIN_MANIFESTS = ("commit.manifest.min-count-to-merge", 100)
#: Manifests that are on average smaller than this share of what they should be are small.
_SMALL_MANIFEST = 0.25


@dataclass(frozen=True, slots=True)
class Work:
    """What is worth rewriting of one snapshot, and what there is."""

    #: The snapshot it was planned from; none, if the branch has none.
    snapshot_id: int | None
    branch: str
    target_bytes: int
    pieces: tuple[Piece, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    #: Data files that were looked at, and of what is there, all but those that a filter left out.
    files: int = 0
    bytes: int = 0
    #: Rows that are not deleted, and those that are.
    rows: int = 0
    deleted_rows: int = 0
    delete_files: int = 0
    manifests: int = 0
    #: Manifests are many and small.
    merge_manifests: bool = False
    #: Data manifests and delete files that were there.
    known_manifests: frozenset[str] = frozenset()
    known_deletes: frozenset[str] = frozenset()
    #: Of position delete files about several data files, those of these that are there.
    shared: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: Position delete files about nothing that is there.
    dangling: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a rewrite; pieces by their numbers."""

    #: None if nothing was left to commit.
    snapshot_id: int | None = None
    committed: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    removed_delete_files: int = 0


@dataclass(frozen=True, slots=True)
class Merged:
    """What became of manifests."""

    snapshot_id: int | None
    before: int
    after: int


# -- planning --------------------------------------------------------------------------------------


def plan(
    table: Table,
    rules: Rules,
    row_filter: str | BooleanExpression | None = None,
    *,
    branch: str = MAIN,
) -> Work:
    """Find the data files that are worth rewriting; changes nothing.

    With a filter, only files that may hold rows for which it is true.
    """
    metadata = table.metadata
    target = rules.target_bytes or int(metadata.properties.get(TARGET_BYTES, TARGET_BYTES_DEFAULT))
    snapshot = metadata.snapshot_by_name(branch)
    if snapshot is None:
        return Work(None, branch, target)
    manifests = entries.manifests_of(snapshot, table.io)
    data = [one for one in manifests if one.content == ManifestContent.DATA]
    of_deletes = [one for one in manifests if one.content == ManifestContent.DELETES]
    held = [one for found in entries.all_live(of_deletes, table.io) for one in found]
    survey = Survey(metadata, Deletes.of(held, metadata.specs()), named(held, table.io))
    for manifest, found in _matching(table, data, row_filter):
        for entry in found:
            survey.look(entry, manifest)
    wanted = regrouping.Wanted(target, rules.min_files or regrouping.MIN_FILES, rules.deletions)
    pieces, skipped = survey.pieces(wanted)
    shared, dangling = survey.deletes_left(held, complete=row_filter is None)
    return Work(
        snapshot.snapshot_id,
        branch,
        target,
        tuple(pieces),
        tuple(skipped),
        files=len(survey.found),
        bytes=sum(one.entry.data_file.file_size_in_bytes for one in survey.found),
        rows=sum(one.entry.data_file.record_count - one.deleted_rows for one in survey.found),
        deleted_rows=sum(one.deleted_rows for one in survey.found),
        delete_files=len(held),
        manifests=len(manifests),
        merge_manifests=_many_and_small(metadata, manifests),
        known_manifests=frozenset(one.manifest_path for one in data),
        known_deletes=frozenset(one.data_file.file_path for one in held),
        shared=shared,
        dangling=dangling,
    )


def _matching(
    table: Table, manifests: Sequence[ManifestFile], row_filter: str | BooleanExpression | None
) -> Iterable[tuple[ManifestFile, Iterable[ManifestEntry]]]:
    if row_filter is None:
        return zip(manifests, entries.all_live(manifests, table.io), strict=True)
    try:
        planner = ManifestGroupPlanner(table.metadata, table.io, row_filter)
        # Each is begun at once, and waited for below.
        begun = [(one, planner.plan_manifest_entries([one])) for one in manifests]
        return [(one, [entry for part in parts for entry in part]) for one, parts in begun]
    except (ValueError, TypeError) as error:
        raise UsageError(
            ErrorKind.USAGE,
            f"the filter {str(row_filter)!r} does not fit {'.'.join(table.name())} ({error}); use "
            "columns of the table, as in: day >= '2026-01-01'",
        ) from error


def _many_and_small(metadata: TableMetadata, manifests: Sequence[ManifestFile]) -> bool:
    if metadata.format_version not in entries.WRITTEN_FORMATS:
        return False
    small = _mergeable(metadata, manifests)
    name, default = _MIN_MANIFESTS
    if len(small) <= max(1, int(metadata.properties.get(name, default))):
        return False
    average = sum(one.manifest_length for one in small) / len(small)
    return average < _SMALL_MANIFEST * _manifest_bytes(metadata)


def _mergeable(metadata: TableMetadata, manifests: Iterable[ManifestFile]) -> list[ManifestFile]:
    """Return the manifests that are smaller than they should be, and can be written anew."""
    enough = regrouping.SMALL * _manifest_bytes(metadata)
    return [
        one
        for one in manifests
        if one.manifest_length < enough
        and one.key_metadata is None
        and entries.unwritable(metadata, metadata.specs()[one.partition_spec_id]) is None
    ]


def _names_files(manifest: ManifestFile) -> bool:
    """Tell whether a manifest holds more than what some earlier snapshot took away."""
    return manifest.has_added_files() or manifest.has_existing_files()


def _manifest_bytes(metadata: TableMetadata) -> int:
    return int(metadata.properties.get(MANIFEST_BYTES, MANIFEST_BYTES_DEFAULT))


# -- committing ------------------------------------------------------------------------------------


def commit(
    table: Table,
    work: Work,
    results: Sequence[Rewritten],
    *,
    properties: Mapping[str, str],
    clock: Clock | None = None,
) -> Outcome:
    """Put new files in the place of old ones, in one snapshot; leaves out what has been overtaken.

    Raises Conflict if others keep committing: nothing was changed then.  After COMMIT_UNKNOWN the
    files of the results must stay.
    """
    chosen = {piece.number: piece for piece in work.pieces}
    pairs = [(chosen[one.piece], one) for one in results]
    committing = Committing(table, work.branch, clock or SystemClock())

    def drafted(head: Snapshot) -> Draft[Outcome] | None:
        return _replacing(table, work, pairs, head, properties)

    landed = committing.replace(drafted) if pairs or work.dangling else None
    if landed is None:
        return Outcome(lost=tuple(one.piece for one in results))
    told = landed.told
    return Outcome(landed.snapshot_id, told.committed, told.lost, told.removed_delete_files)


def _replacing(
    table: Table,
    work: Work,
    pairs: Sequence[tuple[Piece, Rewritten]],
    head: Snapshot,
    properties: Mapping[str, str],
) -> Draft[Outcome] | None:
    """Return the snapshot that does it on top of the head; none, if nothing of it holds any more."""
    start = table.metadata.snapshot_by_id(work.snapshot_id) if work.snapshot_id else None
    if start is None or not any(
        one.snapshot_id == work.snapshot_id for one in ancestors_of(head, table.metadata)
    ):
        # The branch was rolled back, or nobody knows what has happened since.
        return None
    state = _State.of(table, work, head)
    kept = [(piece, one) for piece, one in pairs if state.holds(piece)]
    gone = {source.file.file_path for piece, _ in kept for source in piece.sources}
    useless = state.useless(gone)
    if not gone and not useless:
        return None
    committed = {piece.number for piece, _ in kept}
    told = Outcome(
        committed=tuple(piece.number for piece, _ in kept),
        lost=tuple(piece.number for piece, _ in pairs if piece.number not in committed),
        removed_delete_files=len(useless),
    )
    draft = Draft(
        told,
        kept=[],
        files=[file for _, one in kept for file in one.files],
        sequence_number=start.sequence_number or 0,
        properties=dict(properties),
    )
    # Files of an older spec may have become many small ones of this.
    if all(source.file.spec_id == piece.into_spec for piece, _ in kept for source in piece.sources):
        draft.properties = {**draft.properties, PACKED: str(work.target_bytes)}
    leaving = gone | useless
    for manifest in filter(_names_files, state.manifests):
        found = state.opened.get(manifest.manifest_path, ())
        going = [one for one in found if one.data_file.file_path in leaving]
        if not going:
            draft.kept.append(manifest)
            continue
        draft.replaced.append(manifest)
        draft.going += going
        draft.staying += [one for one in found if one.data_file.file_path not in leaving]
    return draft


@dataclass(frozen=True, slots=True)
class _State:
    """A branch as it is now, as far as it matters to some work."""

    work: Work
    manifests: list[ManifestFile]
    #: Live entries of the manifests that were opened: of deletes all, of data where files may be.
    opened: dict[str, list[ManifestEntry]]
    files: dict[str, ManifestEntry]
    deletes: Deletes
    delete_files: dict[str, ManifestEntry]

    @classmethod
    def of(cls, table: Table, work: Work, head: Snapshot) -> _State:
        manifests = entries.manifests_of(head, table.io)
        theirs = {source.manifest for piece in work.pieces for source in piece.sources}
        needed = [
            one
            for one in manifests
            if one.content == ManifestContent.DELETES
            or one.manifest_path in theirs
            or one.manifest_path not in work.known_manifests
        ]
        opened = {
            manifest.manifest_path: found
            for manifest, found in zip(needed, entries.all_live(needed, table.io), strict=True)
        }
        both: dict[bool, dict[str, ManifestEntry]] = {True: {}, False: {}}
        for found in opened.values():
            for entry in found:
                is_data = entry.data_file.content == DataFileContent.DATA
                both[is_data][entry.data_file.file_path] = entry
        deletes = Deletes.of(both[False].values(), table.metadata.specs())
        return cls(work, manifests, opened, both[True], deletes, both[False])

    def holds(self, piece: Piece) -> bool:
        """Tell whether the rows of a piece are still those that were read."""
        return all(self._holds(source) for source in piece.sources)

    def _holds(self, source: Source) -> bool:
        entry = self.files.get(source.file.file_path)
        if entry is None or sequence(entry) != source.sequence_number:
            return False
        if not self.delete_files.keys() >= set(source.deletes):
            return False
        applying = (*self.deletes.positions(entry), *self.deletes.equalities(entry))
        return all(one.data_file.file_path in self.work.known_deletes for one in applying)

    def useless(self, gone: set[str]) -> set[str]:
        """Return the position delete files about nothing that is left once files are gone."""
        found = set()
        for path, entry in self.delete_files.items():
            if entry.data_file.content != DataFileContent.POSITION_DELETES:
                continue
            shared = self.work.shared.get(path)
            if (
                path in self.work.dangling
                or entries.target(entry.data_file) in gone
                or (shared is not None and shared <= gone)
            ):
                found.add(path)
        return found


def rewrite_manifests(
    table: Table,
    work: Work,
    *,
    properties: Mapping[str, str],
    clock: Clock | None = None,
) -> Merged:
    """Put few manifests, each of few partitions, in the place of many; the files stay the same."""
    committing = Committing(table, work.branch, clock or SystemClock())
    landed = committing.replace(lambda head: _merging(table, head, properties))
    if landed is None:
        return Merged(None, 0, 0)
    snapshot = table.metadata.snapshot_by_id(landed.snapshot_id)
    assert snapshot is not None
    return Merged(landed.snapshot_id, landed.told, len(entries.manifests_of(snapshot, table.io)))


def _merging(table: Table, head: Snapshot, properties: Mapping[str, str]) -> Draft[int] | None:
    if table.metadata.format_version not in entries.WRITTEN_FORMATS:
        return None
    manifests = entries.manifests_of(head, table.io)
    small = _mergeable(table.metadata, manifests)
    if len(small) < 2:
        return None
    staying = [one for found in entries.all_live(small, table.io) for one in found]
    staying.sort(key=lambda one: _order(one.data_file))
    paths = {one.manifest_path for one in small}
    return Draft(
        len(manifests),
        kept=[one for one in manifests if one.manifest_path not in paths and _names_files(one)],
        replaced=small,
        staying=staying,
        properties=dict(properties),
    )


def _order(file: DataFile) -> tuple[Any, ...]:
    """Return what puts files of one partition beside each other."""
    spec, values = partition_key(file)
    return spec, [(one is not None, str(type(one)), one) for one in values], file.file_path
