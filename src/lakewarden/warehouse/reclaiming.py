"""What of a warehouse's past stays, and what may go.

Versions from the *floor* on stay, all of them; of older ones those that tags and branches hold.  What
is kept of a table follows from that: the versions that it was pinned to.  A table may have a floor of
its own, above that of the warehouse.

A reclaim is first committed, as a version like any other: from then on nobody can tag, branch or
restore what is going.  Only then files are deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property

from lakewarden.errors import ErrorKind, LakewardenError, NotFound, Refused
from lakewarden.expiry import Held
from lakewarden.model import Format, format_duration, parse_duration
from lakewarden.retention import MIN_AGE, NOT_BEFORE, Pins, check_rules, check_some
from lakewarden.storage.location import Location
from lakewarden.warehouse import forks
from lakewarden.warehouse.commit import Head
from lakewarden.warehouse.due import AutoCleanup
from lakewarden.warehouse.manifest import (
    MAIN,
    UPKEEP,
    Change,
    Manifest,
    Operation,
    Pin,
    Table,
)
from lakewarden.warehouse.warehouse import Warehouse

#: Versions that stay whatever the rules say: enough to undo a bad load, and the one before.
RECOVERY = 3
#: How long a dropped table can be brought back, unless the warehouse says otherwise.
GRACE = "lakewarden.undrop-for"
DEFAULT_GRACE = timedelta(days=7)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user wants kept; a version goes only if every rule that is given lets it go."""

    older_than: timedelta | None = None
    keep: int | None = None
    before_version: int | None = None
    min_age: timedelta = MIN_AGE

    def __post_init__(self) -> None:
        check_some(self.older_than, self.keep, self.before_version)
        check_rules(self.keep, self.before_version, self.older_than, self.min_age)

    def describe(self) -> str:
        """Say the rules in words, as the plan prints them."""
        rules = []
        if self.older_than is not None:
            rules.append(f"older than {format_duration(self.older_than)}")
        if self.keep is not None:
            rules.append(f"beyond the last {self.keep}")
        if self.before_version is not None:
            rules.append(f"before version {self.before_version}")
        return "remove versions of the warehouse " + " and ".join(rules)

    def of_one_table(self) -> str:
        """Say which versions stay of a table that has these rules for itself."""
        if self.before_version is not None:
            return f"{NOT_BEFORE} {self.before_version} of the warehouse"
        age = format_duration(max(self.older_than or timedelta(0), self.min_age))
        return f"among the last {max(self.keep or 0, RECOVERY)}, or younger than {age}"


@dataclass(frozen=True, slots=True)
class Reclaim:
    """What stays, what goes, and the changes that say so."""

    base: Head
    floor: int
    #: Tables with a floor of their own that is to move.
    floors: Mapping[str, int] = field(default_factory=dict)
    #: What is needed of each table of the two formats; of those that are purged, nothing.
    lance: Mapping[str, Pins] = field(default_factory=dict)
    iceberg: Mapping[str, Held] = field(default_factory=dict)
    #: The metadata file, and its branch, that an Iceberg table's snapshots are taken out of.
    pointers: Mapping[str, tuple[str, Pin]] = field(default_factory=dict)
    #: Tables among them that stay as they are: they are read, for they may use files of others.
    unchanged: frozenset[str] = frozenset()
    #: Dropped tables whose files are to go, and those outside the warehouse, whose files stay.
    purge: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    #: Versions whose entries the log keeps below the floor.
    entries: frozenset[int] = frozenset()

    def table(self, number: str) -> Table:
        return self.base.manifest.tables[number]

    def only(self, chosen: Mapping[str, int]) -> Reclaim:
        """Return the same for some of the tables; the others stay as they are."""
        lance = {number: pins for number, pins in self.lance.items() if not pins.purged}
        iceberg = {number: held for number, held in self.iceberg.items() if not held.purged}
        others = {*lance, *iceberg} - chosen.keys()
        return replace(
            self,
            lance=lance,
            iceberg=iceberg,
            unchanged=self.unchanged | others,
            purge=(),
            forget=(),
        )

    def changes(self, emptied: tuple[str, ...] = ()) -> list[Change]:
        """Return what must be committed before files go; `emptied` have no files left."""
        changes, known = [], max(self.base.manifest.floor, 1)
        if self.floor > known:
            changes.append(Change(Operation.RECLAIM, version=self.floor))
        changes += (
            Change(Operation.RECLAIM, number, version=floor)
            for number, floor in sorted(self.floors.items())
            if floor > max(self.table(number).floor, known)
        )
        changes += (Change(Operation.PURGE, number) for number in self.purge)
        changes += (Change(Operation.FORGET, number) for number in (*self.forget, *emptied))
        return changes


def decide(
    warehouse: Warehouse,
    rules: Rules | None,
    now: datetime,
    tables: Mapping[str, Rules] | None = None,
) -> Reclaim:
    """Decide what stays.  Without rules all versions do; `tables` have rules of their own.

    Raises Refused if some branch or tag cannot be read: what it needs is not known then.
    """
    past = _Past(warehouse, warehouse.refresh(), now)
    floor = past.floor(rules)
    own = {number: past.floor_of(number, each) for number, each in (tables or {}).items()}
    whole = past.decided(floor, own, rules.min_age if rules is not None else MIN_AGE)
    return whole if rules is not None else whole.only(own)


def keeps(warehouse: Warehouse, table: Table, current: Pin, version: int) -> bool:
    """Tell whether an older version of a Lance table is one that stays."""
    manifest = warehouse.known.manifest
    known = manifest.tables.get(table.id, table)
    floor = max(manifest.floor, known.floor)
    if floor <= 1:
        return True
    pins = _Past(warehouse, warehouse.known, _EPOCH).lance(table.id, floor)
    line = line_of(current)
    return version >= pins.floors.get(line, 0) or (line, version) in pins.held


def due(warehouse: Warehouse, min_age: timedelta = MIN_AGE) -> tuple[dict[str, Rules], list[str]]:
    """Return the tables that are due, each with the rules it has; and all marks that say so."""
    manifest = warehouse.refresh().manifest
    found: dict[str, Rules] = {}
    marks = warehouse.marks.found()
    for number in marks:
        table = manifest.tables.get(number)
        # The mark of a table that is gone, or asks for nothing any more, is just taken away.
        wanted = None if table is None else AutoCleanup.of(table.properties)
        if table is not None and table.dropped is None and wanted is not None:
            found[number] = Rules(wanted.older_than, wanted.retain, min_age=min_age)
    return found, [name for names in marks.values() for name in names]


class _Past:
    """The versions of a warehouse while they are decided about."""

    def __init__(self, warehouse: Warehouse, head: Head, now: datetime) -> None:
        self._warehouse = warehouse
        self._base = head
        self._head = head.manifest
        self._now = now
        self._at: Callable[[int], Manifest] = cache(self._read)
        self._seen: dict[tuple[int, str], Mapping[str, Pin]] = {}
        self._warnings: list[str] = []

    def _read(self, version: int) -> Manifest:
        return self._head if version == self._head.version else self._warehouse.log.at(version)

    # -- floors ----------------------------------------------------------------------------------

    def floor(self, rules: Rules | None) -> int:
        """Return the first version that stays, with all after it."""
        known = max(self._head.floor, 1)
        if rules is None:
            return known
        newest, safe = self._head.version, self._last(RECOVERY)
        floors = [self._at_age(max(rules.older_than or timedelta(0), rules.min_age))]
        if rules.keep is not None:
            floors.append(self._last(rules.keep))
        if rules.before_version is not None:
            floors.append(rules.before_version)
        wanted = min(floors)
        if wanted > safe and newest >= RECOVERY:
            self._warnings.append(
                f"the last {RECOVERY} versions of the warehouse stay whatever the rules say: a bad "
                "load can be undone with them; 10 or more are recommended"
            )
        return max(known, min(wanted, safe))

    def _last(self, number: int) -> int:
        """Return the oldest of the last so many versions, not counting those that only let go."""
        left, oldest = number, 1
        for logged in self._warehouse.history(since=self._base):
            if logged.version < self._head.floor:
                return max(self._head.floor, 1)
            left -= not logged.transaction.is_upkeep
            oldest = logged.version
            if not left:
                break
        return oldest if not left else 1

    def _at_age(self, age: timedelta) -> int:
        """Return the version that was current then: every moment since can be read."""
        try:
            return self._warehouse.version_at(self._now - age, self._head)
        except NotFound:
            # Everything is younger, or what was then is gone.
            return max(self._head.floor, 1)

    def floor_of(self, number: str, rules: Rules) -> int:
        """Return the first version of the warehouse that stays for one table."""
        known = max(self._head.floor, self._head.tables[number].floor, 1)
        kept = max(rules.keep or RECOVERY, RECOVERY)
        moved = self._moved(number, known, kept)
        floors = [moved, self._at_age(max(rules.older_than or timedelta(0), rules.min_age))]
        if rules.before_version is not None:
            floors.append(rules.before_version)
        return max(known, min(floors))

    def _moved(self, number: str, floor: int, times: int) -> int:
        """Return the version at which a table got the oldest of its last so many versions."""
        left, home = times, self._head.tables[number].branch
        for logged in self._warehouse.history(since=self._base):
            if logged.version < floor:
                break
            # What cleanup itself has made is no version that anybody asked to keep.
            mine = (c for c in logged.transaction.changes if c.operation not in UPKEEP)
            at_home = logged.transaction.branch in (MAIN, home)
            if at_home and any(c.table == number and c.after is not None for c in mine):
                left -= 1
                if not left:
                    return logged.version
        return floor

    # -- what is needed --------------------------------------------------------------------------

    def decided(self, floor: int, own: Mapping[str, int], min_age: timedelta) -> Reclaim:
        tables = self._head.tables
        needs = _Needs(self._views(), self._refs())
        floors = {
            number: max(floor, table.floor, own.get(number, 0)) for number, table in tables.items()
        }
        files, needed = self._iceberg_files(floors), needs.tables()
        sorted_out = _Sorted()
        for number, table in tables.items():
            if number not in needed:
                sorted_out.unneeded(table, self._fate(table, floor, min_age))
            elif table.format is Format.LANCE:
                sorted_out.lance[number] = self._lance(number, self._at(floors[number]), needs)
            else:
                current = self._current(number)
                if current is None:
                    # What only a ref has is on no branch that could be committed to.
                    sorted_out.unchanged.add(number)
                    current = MAIN, next(needs.of(number))
                sorted_out.pointers[number] = current
                sorted_out.iceberg[number] = self._iceberg(
                    table, self._at(floors[number]), needs, files.get(number, {}), current
                )
        return Reclaim(
            self._base,
            floor,
            floors={number: floors[number] for number in own},
            lance=sorted_out.lance,
            iceberg=sorted_out.iceberg,
            pointers=sorted_out.pointers,
            unchanged=frozenset(sorted_out.unchanged),
            purge=tuple(sorted_out.purge),
            forget=tuple(sorted_out.forget),
            warnings=tuple(self._warnings),
            entries=self._entries(),
        )

    def _fate(self, table: Table, floor: int, min_age: timedelta) -> Operation | None:
        """Return what becomes of a table that no branch and no tag has; None: it stays."""
        place, root = Location.parse(table.location), self._warehouse.location
        inside = root.contains(place) and not table.external
        if table.purged:
            return Operation.PURGE if inside else Operation.FORGET
        if table.dropped is None or table.dropped > floor:
            return None
        grace = max(self._grace, min_age)
        since = _EPOCH + timedelta(microseconds=table.dropped_us or 0)
        if self._now - since < grace:
            return None
        # Files elsewhere may be somebody else's as well.
        return Operation.PURGE if inside and table.last is not None else Operation.FORGET

    @cached_property
    def _grace(self) -> timedelta:
        text = self._head.properties.get(GRACE)
        return DEFAULT_GRACE if text is None else parse_duration(text)

    def _views(self) -> dict[str, Mapping[str, Pin]]:
        return {branch: self._pins(self._head, branch) for branch in self._head.branches}

    def _refs(self) -> list[Mapping[str, Pin]]:
        """Return the pins of every version that a tag names or a branch begins at."""
        held = sorted(self._head.held_views())
        return [self._pins(self._at(version), branch) for version, branch in held]

    def _entries(self) -> frozenset[int]:
        """Return the versions that refs name, and those that their branches began at.

        A tag may be all that is left of a branch, and is read through the version it began at.
        """
        left, seen = [*self._head.held_views()], set()
        while left:
            version, name = left.pop()
            seen.add(version)
            own = self._at(version).branches[name]
            if own.parent:
                left.append((own.base, own.parent))
        return frozenset(seen)

    def _pins(self, manifest: Manifest, branch: str) -> Mapping[str, Pin]:
        key = manifest.version, branch
        try:
            if key not in self._seen:
                self._seen[key] = self._warehouse.pins_of(manifest, branch)
            return self._seen[key]
        except (LakewardenError, KeyError) as error:
            why = error.message if isinstance(error, LakewardenError) else "it is not there"
            raise Refused(
                ErrorKind.DAMAGED_REF,
                f"branch {branch} of version {manifest.version} cannot be read ({why}); what it needs "
                "is not known, so nothing goes: mend that first",
            ) from error

    def lance(self, number: str, floor: int) -> Pins:
        """Return what is needed of a Lance table whose floor is given."""
        return self._lance(number, self._at(floor), _Needs(self._views(), self._refs()))

    def _lance(self, number: str, then: Manifest, needs: _Needs) -> Pins:
        heads: dict[str, int] = {}
        floors: dict[str, int] = {}
        for name, branch in self._head.branches.items():
            now = branch.pins.get(number)
            if now is None:
                continue
            line = line_of(now)
            before = then.branches.get(name)
            same = before is not None and before.made == branch.made
            was = before.pins.get(number) if before is not None and same else None
            heads[line] = now.version
            floors[line] = was.version if was is not None and line_of(was) == line else 0
        held = {(line_of(pin), pin.version) for pin in needs.of(number)}
        # Whoever opens a table on a branch to write has forked it, before anything is committed.
        alive = frozenset(f"{forks.PREFIX}{one.made}" for one in self._head.branches.values())
        return Pins(heads, floors, frozenset(held), forks.PREFIX, alive)

    def _current(self, number: str) -> tuple[str, Pin] | None:
        """Return the branch on which an Iceberg table's snapshots are decided; main if it is there."""
        for name, branch in sorted(self._head.branches.items(), key=lambda one: one[0] != MAIN):
            pin = branch.pins.get(number)
            if pin is not None:
                return name, pin
        return None

    def _iceberg(
        self,
        table: Table,
        then: Manifest,
        needs: _Needs,
        files: Mapping[str, tuple[int, ...] | None],
        current: tuple[str, Pin],
    ) -> Held:
        alive = [name for name, one in self._head.branches.items() if _is(then, name, one.made)]
        pins = [self._pins(then, name).get(table.id) for name in alive]
        # The last is for whoever brings the table back to main.
        pins += [*needs.of(table.id), current[1], table.last]
        kept = {pin.path: pin.snapshots for pin in pins if pin is not None}
        refs = [pin.path for pin in needs.of(table.id)]
        return Held(table.location, {**files, **kept}, refs, external=table.external)

    def _iceberg_files(
        self, floors: Mapping[str, int]
    ) -> dict[str, dict[str, tuple[int, ...] | None]]:
        """Return the metadata that Iceberg tables had at versions that stay."""
        found: dict[str, dict[str, tuple[int, ...] | None]] = {}
        mine = {n for n, one in self._head.tables.items() if one.format is Format.ICEBERG}
        lowest = min((floors[number] for number in mine), default=self._head.version)
        seen = self._head.version + 1
        for logged in self._warehouse.history(since=self._base) if mine else ():
            seen = logged.version
            if logged.version < lowest:
                break
            branch = self._head.branches.get(logged.transaction.branch)
            if branch is None or branch.made > logged.version:
                continue
            for number, pin in _moves(logged.transaction.changes):
                if number in mine and logged.version >= floors[number]:
                    found.setdefault(number, {})[pin.path] = pin.snapshots
        if mine and seen > lowest:
            raise Refused(
                ErrorKind.HISTORY_GAP,
                f"version {seen - 1} of the warehouse is missing though it stays; what it needs is not "
                "known, so nothing goes: restore the object from a backup",
            )
        return found


@dataclass(slots=True)
class _Sorted:
    """Tables by what becomes of them, while they are decided about."""

    lance: dict[str, Pins] = field(default_factory=dict)
    iceberg: dict[str, Held] = field(default_factory=dict)
    pointers: dict[str, tuple[str, Pin]] = field(default_factory=dict)
    unchanged: set[str] = field(default_factory=set)
    purge: list[str] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)

    def unneeded(self, table: Table, fate: Operation | None) -> None:
        """Take a table that no branch and no tag has; it may still come back."""
        if fate is Operation.FORGET:
            self.forget.append(table.id)
            return
        purged = fate is Operation.PURGE
        if purged and not table.purged:
            self.purge.append(table.id)
        if table.last is None:
            # It never had a version, and so no file.
            return
        if not purged:
            self.unchanged.add(table.id)
        if table.format is Format.LANCE:
            self.lance[table.id] = Pins(purged=purged)
            return
        self.pointers[table.id] = MAIN, table.last
        last = {table.last.path: table.last.snapshots}
        self.iceberg[table.id] = Held(table.location, {} if purged else last, purged=purged)


@dataclass(frozen=True, slots=True)
class _Needs:
    """Pins that somebody reads: of every branch now, and of every version that a ref holds."""

    views: Mapping[str, Mapping[str, Pin]]
    refs: list[Mapping[str, Pin]]

    def tables(self) -> set[str]:
        return {number for pins in (*self.views.values(), *self.refs) for number in pins}

    def of(self, number: str) -> Iterator[Pin]:
        for pins in (*self.views.values(), *self.refs):
            if number in pins:
                yield pins[number]


def _is(manifest: Manifest, name: str, made: int) -> bool:
    return name in manifest.branches and manifest.branches[name].made == made


def _moves(changes: tuple[Change, ...]) -> Iterator[tuple[str, Pin]]:
    return ((one.table, one.after) for one in changes if one.after is not None)


def line_of(pin: Pin) -> str:
    """Return the table's own branch that a pin of a Lance table is on."""
    return forks.name(forks.directory(pin.path)) or MAIN
