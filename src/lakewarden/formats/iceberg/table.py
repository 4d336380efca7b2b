"""Look at one Iceberg table without Spark: its snapshots, tags and branches, one request."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from lakewarden.expiry import RefKind, SnapshotDecision, decide
from lakewarden.formats.iceberg.metadata import TableMetadata
from lakewarden.retention import Branch, Tag, Version


@dataclass(frozen=True, slots=True)
class SnapshotLook:
    """What a look at a table shows, newest snapshot first."""

    versions: tuple[Version, ...]
    tags: tuple[Tag, ...]
    #: Each with the snapshot it is at.
    branches: tuple[Branch, ...]

    def names_of(self, version: Version) -> list[str]:
        """Return the tags and branches that hold a snapshot."""
        here = version.number
        tags = [f"tag {tag.name}" for tag in self.tags if tag.version == here]
        return tags + [
            f"head of branch {branch.name}"
            for branch in self.branches
            if branch.parent_version == here
        ]


def look(metadata: TableMetadata) -> SnapshotLook:
    """Return what the metadata says about snapshots and refs."""
    decided = decide(metadata.history(), None, 0).decisions
    newest = sorted(decided, key=lambda one: (-one.snapshot.timestamp_ms, one.snapshot.snapshot_id))
    refs = sorted(metadata.refs, key=lambda ref: ref.name)
    return SnapshotLook(
        tuple(_version(one) for one in newest),
        tuple(Tag(r.name, "", r.snapshot_id) for r in refs if r.kind is RefKind.TAG),
        tuple(Branch(r.name, "", r.snapshot_id) for r in refs if r.kind is RefKind.BRANCH),
    )


def _version(decision: SnapshotDecision) -> Version:
    written = datetime.fromtimestamp(decision.snapshot.timestamp_ms / 1000, UTC)
    return Version(decision.snapshot.snapshot_id, decision.branch, written)
