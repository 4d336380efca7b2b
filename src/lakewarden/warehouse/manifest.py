"""What a warehouse is at one version: its tables, their pins, branches and tags.

Nothing here reads or writes.  A transaction says what somebody wants to change; logged under a
number it is a version; the versions applied one after the other are the warehouse.

A table's *pin* says which of its own versions is current.  A branch starts with the pins that another
one had at some version and keeps only those that have changed since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from lakewarden.errors import Damaged, ErrorKind
from lakewarden.model import Format

MAIN = "main"
#: Shapes of entries and checkpoints that this release writes.  Older ones are migrated.
STAMP = 2
#: Requests that are remembered, so that one which is repeated does not happen twice.
REMEMBERED = 10_000


class Operation(StrEnum):
    """What a change does."""

    # To the rows, columns or files of a table.
    APPEND = "append"
    OVERWRITE = "overwrite"
    DELETE = "delete"
    UPDATE = "update"
    MERGE = "merge"
    INDEX = "index"
    REWRITE = "rewrite"
    SCHEMA = "schema"
    RESTORE = "restore"
    EXPIRE = "expire"
    # To a table as a whole.
    CREATE = "create"
    DROP = "drop"
    UNDROP = "undrop"
    RENAME = "rename"
    PROPERTIES = "properties"
    # To the warehouse.
    TAG = "tag"
    UNTAG = "untag"
    BRANCH = "branch"
    UNBRANCH = "unbranch"
    SETTINGS = "settings"
    # To what is kept.
    RECLAIM = "reclaim"
    PURGE = "purge"
    FORGET = "forget"


#: Operations that move a table's pin.
CONTENT = frozenset(
    {
        Operation.APPEND, Operation.OVERWRITE, Operation.DELETE, Operation.UPDATE, Operation.MERGE,
        Operation.INDEX, Operation.REWRITE, Operation.SCHEMA, Operation.RESTORE, Operation.EXPIRE,
    }
)  # fmt: skip

#: Operations that change what is kept, and nothing that anybody reads.
UPKEEP = frozenset({Operation.EXPIRE, Operation.RECLAIM, Operation.PURGE, Operation.FORGET})

#: A table's name: its namespaces, if any, and the name itself.
Name = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """One version of a table: a Lance manifest or an Iceberg metadata file."""

    #: Lance's number; of Iceberg tables, how many metadata files there were before.
    version: int
    #: The manifest, relative to the table, or the URI of the metadata file.
    path: str
    size: int | None = None
    e_tag: str | None = None
    #: Manifests of the versions right before it that were committed together with it.
    through: tuple[str, ...] = ()
    #: Of an Iceberg table: the snapshots that the metadata's refs name; None if that is not known.
    snapshots: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table, which keeps its id through renames and gets a new one when it is made again."""

    id: str
    name: Name
    format: Format
    location: str
    #: The branch that it was made on; until it has a pin, it is known there alone.  Empty when that
    #: branch is gone.
    branch: str = MAIN
    properties: Mapping[str, str] = field(default_factory=dict)
    #: The version that dropped it, and when; its files are there until cleanup.
    dropped: int | None = None
    dropped_us: int | None = None
    #: Its last version, by which it can be brought back.
    last: Pin | None = None
    #: Its files are going: nothing brings it back.
    purged: bool = False
    #: What it was at versions of the warehouse below this one may be gone, if no ref holds them.
    floor: int = 0
    #: It was there before it was registered, or was let go: not in the warehouse, its files stay.
    external: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that a transaction does."""

    operation: Operation
    #: The table's id; empty if the change is one of the warehouse.
    table: str = ""
    #: The pin that the writer saw, and the one to be.
    before: Pin | None = None
    after: Pin | None = None
    #: Of a table that is made, brought back or renamed; of a tag or branch one name alone.
    name: Name = ()
    #: The table that is made.
    made: Table | None = None
    #: New values; None takes a property away.
    properties: Mapping[str, str | None] = field(default_factory=dict)
    #: The version that a tag or a branch is made of, and that version's branch; the first one that
    #: stays after a reclaim.
    version: int | None = None
    source: str = MAIN
    #: Fragments that are replaced or in which rows are deleted; None if that is not known.
    touches: frozenset[int] | None = None
    #: Of a table that is dropped: its files are to stay for ever.
    external: bool = False


@dataclass(frozen=True, slots=True)
class Transaction:
    """What somebody wants to change, and what they had seen before."""

    id: str
    read_version: int
    changes: tuple[Change, ...]
    branch: str = MAIN
    actor: str | None = None
    message: str | None = None
    #: The caller's own name for it: committed once, however often it is tried.
    request: str | None = None
    #: Tables that were read, and must still be at these pins.
    expects: Mapping[str, Pin | None] = field(default_factory=dict)

    @property
    def is_upkeep(self) -> bool:
        """Whether it only lets go of what is old."""
        return all(change.operation in UPKEEP for change in self.changes)

    def __str__(self) -> str:
        who = self.actor or "somebody"
        what = f" ({' '.join(self.message.split())})" if self.message else ""
        return f"transaction {self.id[:8]} of {who}{what}"


@dataclass(frozen=True, slots=True)
class Logged:
    """A transaction that has become a version."""

    version: int
    at_us: int
    transaction: Transaction


@dataclass(frozen=True, slots=True)
class Entry:
    """What is stored for one version.

    With the checkpoint that it names, and the versions between, it is the whole warehouse: one entry
    and one checkpoint are all that is ever read to know a version.
    """

    logged: Logged
    #: Who wrote it, this time: tells one's own put from somebody else's.
    write_id: str
    stamp: int
    #: The write of the version before: what follows something else does not follow us.
    parent: str = ""
    checkpoint: int = 0
    #: The versions after the checkpoint, oldest first, without this one.
    tail: tuple[Logged, ...] = ()

    @property
    def version(self) -> int:
        return self.logged.version


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of versions; what it has not changed is as it was at its base."""

    #: Tells a branch from an earlier one of the same name: the version that made it.
    made: int
    base: int = 0
    parent: str = ""
    #: Pins that differ from those of the base; None for a table that is not on this branch any more.
    pins: Mapping[str, Pin | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tag:
    """A name for a version that keeps it."""

    version: int
    branch: str
    made_us: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A warehouse at one version."""

    stamp: int
    version: int = 0
    at_us: int = 0
    tables: Mapping[str, Table] = field(default_factory=dict)
    branches: Mapping[str, Branch] = field(default_factory=lambda: {MAIN: Branch(0)})
    tags: Mapping[str, Tag] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    #: Callers' names of transactions, with the versions that they became; the oldest fall out.
    requests: Mapping[str, int] = field(default_factory=dict)
    #: Versions below this one are gone, unless some ref holds them.
    floor: int = 0

    def held(self) -> frozenset[int]:
        """Return the versions that tags and branches hold."""
        return frozenset(version for version, _ in self.held_views())

    def held_views(self) -> frozenset[tuple[int, str]]:
        """Return the versions that tags and branches hold, each with the branch it is held of."""
        bases = ((one.base, one.parent) for one in self.branches.values() if one.parent)
        return frozenset((*bases, *((tag.version, tag.branch) for tag in self.tags.values())))

    def gone(self, version: int) -> bool:
        """Tell whether a version was reclaimed, whatever is still there of it."""
        return version < self.floor and version not in self.held()

    def pins(self, branch: str = MAIN, base: Mapping[str, Pin] | None = None) -> dict[str, Pin]:
        """Return the pins of a branch; `base` are those that it started with (main: none)."""
        whole = {**(base or {}), **self.branches[branch].pins}
        return {table: pin for table, pin in whole.items() if pin is not None}


#: A warehouse before its first version.
EMPTY = Manifest(STAMP)


def apply(manifest: Manifest, logged: Logged) -> Manifest:
    """Return the warehouse after one more version."""
    if logged.version != manifest.version + 1:
        raise Damaged(
            ErrorKind.CORRUPT_MANIFEST,
            f"version {logged.version} of the warehouse does not follow version "
            f"{manifest.version}; a version in between is missing",
        )
    state = _State(manifest, logged)
    for change in logged.transaction.changes:
        state.take(change)
    requests = dict(manifest.requests)
    if logged.transaction.request is not None:
        requests[logged.transaction.request] = logged.version
        for oldest in list(requests)[: max(0, len(requests) - REMEMBERED)]:
            del requests[oldest]
    return Manifest(
        manifest.stamp,
        version=logged.version,
        at_us=logged.at_us,
        tables=state.tables,
        branches=state.branches,
        tags=state.tags,
        properties=state.properties,
        requests=requests,
        floor=state.floor,
    )


def replay(start: Manifest, versions: Iterable[Logged]) -> Manifest:
    """Apply versions one after the other."""
    for logged in versions:
        start = apply(start, logged)
    return start


class _State:
    """A manifest while it is being changed."""

    def __init__(self, manifest: Manifest, logged: Logged) -> None:
        self.tables = dict(manifest.tables)
        self.branches = dict(manifest.branches)
        self.tags = dict(manifest.tags)
        self.properties = dict(manifest.properties)
        self.floor = manifest.floor
        self._logged = logged
        self._branch = logged.transaction.branch
        own = self.branches.get(self._branch)
        if own is None:
            raise Damaged(
                ErrorKind.CORRUPT_MANIFEST,
                f"version {logged.version} of the warehouse is one of a branch that there is not "
                f"({self._branch})",
            )
        # Copied once, not once for each change.
        self._pins = dict(own.pins)
        self.branches[self._branch] = replace(own, pins=self._pins)

    def take(self, change: Change) -> None:
        match change.operation:
            case Operation.TAG:
                version = change.version if change.version is not None else self._logged.version - 1
                tag = Tag(version, change.source, self._logged.at_us)
                self.tags[change.name[0]] = tag
            case Operation.UNTAG:
                self.tags.pop(change.name[0], None)
            case Operation.BRANCH:
                base = change.version if change.version is not None else self._logged.version - 1
                made = Branch(self._logged.version, base, change.source)
                self.branches[change.name[0]] = made
            case Operation.UNBRANCH:
                self._unbranch(change.name[0])
            case Operation.SETTINGS:
                self.properties = updated(self.properties, change.properties)
            case Operation.RECLAIM if not change.table:
                self.floor = max(self.floor, change.version or 0)
            case Operation.FORGET:
                self.tables.pop(change.table, None)
            case _:
                self._take_table(change)

    def _unbranch(self, name: str) -> None:
        """Forget a branch, and drop the tables that were made on it."""
        gone = self.branches.pop(name, None)
        for table in [one for one in self.tables.values() if one.branch == name]:
            if gone is not None and table.dropped is None:
                table = self._dropped(table, gone.pins.get(table.id))  # noqa: PLW2901
            # The next branch of that name is another one.
            self.tables[table.id] = replace(table, branch="")

    def _dropped(self, table: Table, last: Pin | None) -> Table:
        version, at_us = self._logged.version, self._logged.at_us
        return replace(table, dropped=version, dropped_us=at_us, last=last)

    def _take_table(self, change: Change) -> None:
        if change.made is not None:
            self.tables[change.table] = change.made
        elif change.table not in self.tables:
            raise Damaged(
                ErrorKind.CORRUPT_MANIFEST,
                f"version {self._logged.version} of the warehouse changes a table that there is not "
                f"({change.table})",
            )
        table = self.tables[change.table]
        if change.operation is Operation.DROP:
            if self._branch in (MAIN, table.branch):
                table = self._dropped(table, change.before)
            self._pin(change.table, None)
        elif change.after is not None:
            self._pin(change.table, change.after)
        if change.external:
            table = replace(table, external=True)
        self.tables[change.table] = _described(table, change)

    def _pin(self, table: str, pin: Pin | None) -> None:
        if pin is None and self._branch == MAIN:
            self._pins.pop(table, None)
        else:
            self._pins[table] = pin


def _described(table: Table, change: Change) -> Table:
    """Return the table with what a change says of it as a whole."""
    if change.operation is Operation.UNDROP:
        table = replace(table, dropped=None, dropped_us=None, last=None)
    elif change.operation is Operation.PURGE:
        table = replace(table, purged=True)
    elif change.operation is Operation.RECLAIM:
        table = replace(table, floor=max(table.floor, change.version or 0))
    if change.name:
        table = replace(table, name=change.name)
    if change.properties:
        table = replace(table, properties=updated(table.properties, change.properties))
    return table


def updated(properties: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return properties with changes; None takes one away."""
    whole = {**properties, **changes}
    return {name: value for name, value in whole.items() if value is not None}
