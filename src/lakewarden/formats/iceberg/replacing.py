"""A snapshot that holds the same rows in other files, committed on top of whatever is there.

Whoever wants one says what it is to be, given the head; if somebody else commits first, it is asked
again.  A commit has three outcomes: it did not land, and what was written for it is taken away; it
landed; or nobody knows.  A lost answer is looked for in the table before anything else is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest_list,
)
from pyiceberg.table import Table
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.snapshots import (
    Operation,
    Snapshot,
    SnapshotSummaryCollector,
    Summary,
    update_snapshot_summaries,
)
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)

from lakewarden.errors import Conflict, ErrorKind, LakewardenError
from lakewarden.formats.iceberg.entries import Manifests, added, with_status
from lakewarden.formats.iceberg.rewritten import discard_files
from lakewarden.world import Chance, Clock, SystemChance, SystemClock, fresh_id

Told = TypeVar("Told")

MANIFEST_BYTES = "commit.manifest.target-size-bytes"
MANIFEST_BYTES_DEFAULT = 8 << 20
#: Bytes of an entry, where there is none to learn from.
_ENTRY_BYTES = 512


@dataclass(slots=True)
class Draft(Generic[Told]):
    """What the next snapshot is to hold, and what its maker wants to know once it has landed."""

    told: Told
    #: Manifests that stay as they are.
    kept: list[ManifestFile]
    #: Manifests that are taken apart; of their entries those that stay, and those that go.
    replaced: list[ManifestFile] = field(default_factory=list)
    staying: list[ManifestEntry] = field(default_factory=list)
    going: list[ManifestEntry] = field(default_factory=list)
    #: New files, and the sequence number that they count as written with.
    files: Sequence[DataFile] = ()
    sequence_number: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Landed(Generic[Told]):
    """The snapshot that a draft has become."""

    snapshot_id: int
    told: Told


@dataclass(frozen=True, slots=True)
class Committing:
    """Commits to one branch of a table."""

    table: Table
    branch: str
    clock: Clock = field(default_factory=SystemClock)
    chance: Chance = field(default_factory=SystemChance)

    def replace(self, drafted: Callable[[Snapshot], Draft[Told] | None]) -> Landed[Told] | None:
        """Commit what is drafted for the head; nothing, if nothing is.

        Raises Conflict if others keep committing, and COMMIT_UNKNOWN if nobody can tell.
        """
        tries = max(0, self._property("commit.retry.num-retries", 4)) + 1
        for number in range(tries):
            if number:
                self._wait(number)
            self.table.refresh()
            head = self.table.metadata.snapshot_by_name(self.branch)
            draft = drafted(head) if head is not None else None
            if head is None or draft is None:
                return None
            attempt = _Attempt(self.table, self.branch, head, draft)
            if self._try(attempt):
                return Landed(attempt.snapshot_id, draft.told)
        raise Conflict(
            ErrorKind.CONFLICT,
            f"others have committed to {self._name} {tries} times meanwhile; nothing was changed: "
            "run it again when it is less busy",
        )

    @property
    def _name(self) -> str:
        return ".".join(self.table.name())

    def _try(self, attempt: _Attempt[Told]) -> bool:
        """Tell whether an attempt has landed; if it has not, nothing of it is left."""
        try:
            updates, requirements = attempt.prepare()
        except BaseException:
            attempt.forget()
            raise
        try:
            self.table._do_commit(updates, requirements)  # noqa: SLF001
        except CommitFailedException as error:
            # A request that was sent twice finds its own commit in its way.
            if self._seen(attempt, error):
                return True
            attempt.forget()
            return False
        except LakewardenError as error:
            if error.kind is not ErrorKind.COMMIT_UNKNOWN:
                attempt.forget()
            raise
        except Exception as error:
            # Whatever it was, the commit may have landed before.
            if self._seen(attempt, error):
                return True
            raise self._unknown(error) from error
        return True

    def _seen(self, attempt: _Attempt[Told], error: Exception) -> bool:
        """Look for an attempt in the table."""
        try:
            self.table.refresh()
        except Exception as second:  # noqa: BLE001
            # Neither the commit nor the question was answered.
            error.add_note(f"then, looking for it: {second}")
            raise self._unknown(error) from error
        return self.table.metadata.snapshot_by_id(attempt.snapshot_id) is not None

    def _unknown(self, error: Exception) -> LakewardenError:
        return LakewardenError(
            ErrorKind.COMMIT_UNKNOWN,
            f"whether the commit to {self._name} has landed is not known ({error}); new files were "
            "left where they are: look at the table's history, then run it again",
        )

    def _wait(self, number: int) -> None:
        least = max(0, self._property("commit.retry.min-wait-ms", 100))
        most = max(0, self._property("commit.retry.max-wait-ms", 60_000))
        wait = min(least * 2 ** (number - 1), most)
        self.clock.sleep((wait / 2 + self.chance.below(wait // 2 + 1)) / 1000)

    def _property(self, name: str, default: int) -> int:
        return int(self.table.metadata.properties.get(name, default))


class _Attempt(Generic[Told]):
    """One try to commit a draft, with everything that is written for it."""

    def __init__(self, table: Table, branch: str, head: Snapshot, draft: Draft[Told]) -> None:
        self._table, self._branch, self._head, self.draft = table, branch, head, draft
        self.snapshot_id: int = table.metadata.new_snapshot_id()
        self._manifests = Manifests(
            table.metadata,
            table.io,
            self.snapshot_id,
            _most(table, draft.replaced),
            table.location_provider().new_metadata_location,
            fresh_id(),
        )

    def prepare(self) -> tuple[tuple[TableUpdate, ...], tuple[TableRequirement, ...]]:
        """Write manifests and their list; nobody sees them yet."""
        metadata, draft = self._table.metadata, self.draft
        new = [added(one, self.snapshot_id, draft.sequence_number) for one in draft.files]
        staying = [
            with_status(one, ManifestEntryStatus.EXISTING, one.snapshot_id) for one in draft.staying
        ]
        going = [
            with_status(one, ManifestEntryStatus.DELETED, self.snapshot_id) for one in draft.going
        ]
        manifests: list[ManifestFile] = []
        for entries in (new, going, staying):
            for content in (ManifestContent.DATA, ManifestContent.DELETES):
                manifests += self._manifests.write(_of(entries, content), content)
        number = metadata.next_sequence_number()
        place = self._table.location_provider().new_metadata_location(
            f"snap-{self.snapshot_id}-0-{self._manifests.token}.avro"
        )
        self._manifests.written.append(place)
        with write_manifest_list(
            format_version=metadata.format_version,
            output_file=self._table.io.new_output(place),
            snapshot_id=self.snapshot_id,
            parent_snapshot_id=self._head.snapshot_id,
            sequence_number=number,
            avro_compression=metadata.properties.get("write.avro.compression-codec", "gzip"),  # type: ignore[arg-type]
        ) as writer:
            writer.add_manifests([*manifests, *draft.kept])
        snapshot = Snapshot(
            snapshot_id=self.snapshot_id,
            parent_snapshot_id=self._head.snapshot_id,
            manifest_list=place,
            sequence_number=number,
            summary=self._summary(),
            schema_id=metadata.current_schema_id,
        )
        ref = metadata.refs[self._branch]
        moved = SetSnapshotRefUpdate(
            snapshot_id=self.snapshot_id,
            ref_name=self._branch,
            type=SnapshotRefType.BRANCH,
            # What is not said here, the branch would lose.
            max_ref_age_ms=ref.max_ref_age_ms,
            max_snapshot_age_ms=ref.max_snapshot_age_ms,
            min_snapshots_to_keep=ref.min_snapshots_to_keep,
        )
        return (AddSnapshotUpdate(snapshot=snapshot), moved), (
            AssertTableUUID(uuid=metadata.table_uuid),
            AssertRefSnapshotId(snapshot_id=self._head.snapshot_id, ref=self._branch),
        )

    def _summary(self) -> Summary:
        metadata = self._table.metadata
        schema, specs = metadata.schema(), metadata.specs()
        limit = int(metadata.properties.get("write.summary.partition-limit", 0))
        counted = SnapshotSummaryCollector(limit)
        for file in self.draft.files:
            counted.add_file(file, schema, specs[file.spec_id])
        for entry in self.draft.going:
            counted.remove_file(entry.data_file, schema, specs[entry.data_file.spec_id])
        known = {**counted.build(), **self.draft.properties}
        # PyIceberg adds up totals of any operation but this one.
        whole = update_snapshot_summaries(
            Summary(Operation.OVERWRITE, **known), self._head.summary or {"": ""}
        )
        return Summary(Operation.REPLACE, **whole.additional_properties)

    def forget(self) -> None:
        """Take away what was written for it; it is certain that it did not land."""
        discard_files(self._manifests.written, self._table.io)


def _of(entries: Iterable[ManifestEntry], content: ManifestContent) -> list[ManifestEntry]:
    is_data = content is ManifestContent.DATA
    return [one for one in entries if (one.data_file.content == DataFileContent.DATA) is is_data]


def _most(table: Table, manifests: Sequence[ManifestFile]) -> int:
    """Return how many entries make a manifest of the size that the table asks for."""
    target = int(table.metadata.properties.get(MANIFEST_BYTES, MANIFEST_BYTES_DEFAULT))
    counts = [
        sum(
            number or 0
            for number in (
                one.added_files_count,
                one.existing_files_count,
                one.deleted_files_count,
            )
        )
        for one in manifests
    ]
    entries = sum(counts)
    size = sum(one.manifest_length for one in manifests) / entries if entries else _ENTRY_BYTES
    return max(1, int(target / max(size, 1)))
