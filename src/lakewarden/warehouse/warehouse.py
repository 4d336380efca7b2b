"""The front door: a warehouse at any of its versions, and every way to make the next one.

    warehouse = Warehouse.open("s3://bucket/lake")
    view = warehouse.read(tag="training")
    warehouse.restore(view, message="undo the bad load")

A `View` never changes: all tables that are read through it are those of one version.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Protocol, Self, TypedDict, Unpack, cast

import sqlalchemy as sa

from lakewarden.errors import (
    AlreadyExists,
    Conflict,
    Damaged,
    ErrorKind,
    LakewardenError,
    NotFound,
    Refused,
    StorageError,
    UsageError,
)
from lakewarden.model import WAREHOUSE_MARK, Format
from lakewarden.storage.contract import creates_if_absent
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener, read_only
from lakewarden.storage.store import Store
from lakewarden.warehouse import names
from lakewarden.warehouse.commit import Head, Log, Rebase, stands
from lakewarden.warehouse.due import AutoCleanup, Marks
from lakewarden.warehouse.handlers import CommitHandler, SqlHandler, StoreHandler
from lakewarden.warehouse.manifest import (
    MAIN,
    Change,
    Logged,
    Manifest,
    Name,
    Operation,
    Pin,
    Table,
    Tag,
    Transaction,
    updated,
)
from lakewarden.world import Chance, Clock, SystemChance, SystemClock, fresh_id

#: The directory of the warehouse's own objects, below its root.
MANIFEST = "__manifest"
TABLES = "tables"
#: What makes a directory a warehouse: it says where the log is.
_MARKER = "handler.json"
#: Where it was made; its tables lie where they were made, too.
_HOME = "lakewarden.location"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Tables(Protocol):
    """What the tables of one format can do for the warehouse."""

    def restore(self, table: Table, current: Pin, target: Pin) -> Pin:
        """Make a version after `current` that is what `target` was; nobody sees it yet."""
        ...

    def publish(self, table: Table, pin: Pin) -> None:
        """Let everybody see a version that has been committed; done twice it does nothing."""
        ...

    def discard(self, table: Table, pin: Pin) -> None:
        """Take away a version that was made and is certain not to have been committed."""
        ...


@dataclass(frozen=True)
class View:
    """A warehouse at one version, seen from one branch."""

    manifest: Manifest
    branch: str
    pins: Mapping[str, Pin]
    #: Tables of which this version was reclaimed, by their ids.
    reclaimed: frozenset[str] = frozenset()

    @property
    def version(self) -> int:
        return self.manifest.version

    @cached_property
    def _by_name(self) -> dict[Name, Table]:
        tables = self.manifest.tables
        own = self.manifest.branches[self.branch].pins
        declared = (
            one
            for one in tables.values()
            if one.branch == self.branch and one.dropped is None and one.id not in own
        )
        there = (tables[number] for number in self.pins)
        return {one.name: one for one in (*declared, *there)}

    def tables(self) -> list[Table]:
        """Return all tables, by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def find(self, name: Name) -> Table | None:
        return self._by_name.get(tuple(unicodedata.normalize("NFC", part) for part in name))

    def table(self, name: Name) -> Table:
        """Return the table of that name, or raise NotFound."""
        found = self.find(name)
        if found is not None and found.id in self.reclaimed:
            raise NotFound(
                f"table {'.'.join(name)} of version {self.version} was reclaimed by a cleanup; tag "
                "versions that must stay",
                ErrorKind.RECLAIMED,
            )
        if found is None:
            where = f"version {self.version} of the warehouse"
            where += f" on branch {self.branch}" if self.branch != MAIN else ""
            raise NotFound(f"there is no table {'.'.join(name)} in {where}")
        return found


class Access(TypedDict, total=False):
    """How a warehouse is reached, and who asks."""

    opener: Callable[[Location], Store] | None
    #: Where the log is kept, if not in the store.
    database: str | None
    actor: str | None
    clock: Clock | None
    chance: Chance | None


@dataclass
class Warehouse:
    """The tables under one root, and the log of all their changes."""

    location: Location
    log: Log
    opener: Callable[[Location], Store]
    actor: str | None = None
    formats: dict[Format, Tables] = field(default_factory=dict)
    #: Is told at once, and must return at once, when a commit has made tables due to be cleaned.
    on_due: Callable[[Sequence[str]], None] | None = None
    _head: Head | None = None
    _bases: dict[tuple[int, str], Mapping[str, Pin]] = field(default_factory=dict)

    # -- making and opening ----------------------------------------------------------------------

    @classmethod
    def init(cls, uri: str, **access: Unpack[Access]) -> Self:
        """Make an empty warehouse."""
        found, database = cls._at(uri, access), access.get("database")
        store, prefix = found.log.store, found.log.prefix
        if not database and not creates_if_absent(store, f"{prefix}/_try-{fresh_id()}"):
            raise Refused(
                ErrorKind.UNSUPPORTED_FEATURE,
                f"the store of {found.location.uri} does not refuse to create what exists, so two "
                "writers could take the same version; keep the log in a database: "
                "--log-database postgresql://…",
            )
        marker = f"{prefix}/{_MARKER}"
        if store.exists(marker):
            raise _exists(found.location)
        head = found.log.head()
        if not head.version:
            settings = {"lakewarden.id": fresh_id(), _HOME: found.location.uri}
            begin = Change(Operation.SETTINGS, properties=settings)
            transaction = Transaction(fresh_id(), 0, (begin,), actor=found.actor, message="init")
            try:
                head = found.log.commit(head, transaction, stands)
            except Conflict as error:
                raise _exists(found.location) from error
        # Comes last: what has it is a warehouse.  Without it, making one goes on where it stopped.
        handler = {"handler": "sql" if database else "store"}
        try:
            store.put_if_absent(marker, json.dumps(handler).encode())
        except AlreadyExists as error:
            raise _exists(found.location) from error
        if head.version > 1:
            raise _exists(found.location)
        found._head = head  # noqa: SLF001  # of this class
        return found

    @classmethod
    def open(cls, uri: str, **access: Unpack[Access]) -> Self:
        """Open a warehouse."""
        found = cls.unread(uri, **access)
        found.refresh()
        return found

    @classmethod
    def unread(cls, uri: str, **access: Unpack[Access]) -> Self:
        """Return a warehouse of which no version was read yet: its log may be damaged."""
        found = cls._at(uri, access)
        _check_handler(found.location, found.log, access.get("database"))
        return found

    def reading(self) -> Self:
        """Return the same warehouse with no means to change anything."""
        store = cast("Store", read_only(self.log.store))
        handler = self.log.handler
        if isinstance(handler, StoreHandler):
            handler = StoreHandler(store, f"{self.log.prefix}/_versions")
        opener = self.opener

        def opening(location: Location) -> Store:
            return cast("Store", read_only(opener(location)))

        log = replace(self.log, handler=handler, store=store)
        return replace(self, log=log, opener=opening, formats={}, on_due=None)

    @staticmethod
    def is_at(location: Location, opener: Callable[[Location], Store]) -> bool:
        """Tell whether a place is a warehouse."""
        marker = location.child(MANIFEST).child(_MARKER)
        return opener(marker).exists(marker.key)

    @classmethod
    def _at(cls, uri: str, access: Access) -> Self:
        location, database = Location.parse(uri), access.get("database")
        opening = access.get("opener") or Opener()
        store = opening(location)
        prefix = location.child(MANIFEST).key
        handler: CommitHandler = (
            SqlHandler(_engine(database), location.uri)
            if database
            else StoreHandler(store, f"{prefix}/_versions")
        )
        clock, chance = access.get("clock") or SystemClock(), access.get("chance") or SystemChance()
        return cls(
            location, Log(handler, store, prefix, clock, chance), opening, access.get("actor")
        )

    # -- reading ---------------------------------------------------------------------------------

    def refresh(self) -> Head:
        """Find out what is the newest version."""
        self._head = self.log.head(self._head)
        if not self._head.version:
            raise NotFound(
                f"the log of {self.location.uri} holds no version; if it is kept in a database, check "
                "that --log-database names the right one",
                ErrorKind.NOT_A_WAREHOUSE,
            )
        return self._head

    @property
    def known(self) -> Head:
        """The newest version that this object has heard of."""
        return self._head or self.refresh()

    def read(
        self,
        *,
        version: int | None = None,
        tag: str | None = None,
        at: datetime | None = None,
        branch: str | None = None,
    ) -> View:
        """Return the warehouse at its head, at a version, at a tag or at a time."""
        if sum(one is not None for one in (version, tag, at)) > 1:
            raise UsageError(ErrorKind.USAGE, "a version, a tag and a time exclude each other")
        head = self.refresh().manifest
        if tag is not None:
            found = self.tag_of(head, tag)
            version, branch = found.version, branch or found.branch
        elif at is not None:
            version = self.version_at(at, head)
        return self.view(self._at_version(version), branch or MAIN)

    def _at_version(self, version: int | None) -> Manifest:
        """Return the warehouse at a version that has not been reclaimed, or now."""
        head = self.known.manifest
        if version in (None, head.version):
            return head
        if 0 < version < head.version and head.gone(version):
            raise NotFound(
                f"version {version} of the warehouse was reclaimed by a cleanup (the newest is "
                f"{head.version}); tag versions that must stay",
                ErrorKind.RECLAIMED,
            )
        return self.log.at(version)

    def view(self, manifest: Manifest, branch: str = MAIN) -> View:
        """Return what a branch sees at a version."""
        if branch not in manifest.branches:
            raise NotFound(f"there is no branch {branch} at version {manifest.version}")
        return View(
            manifest, branch, self.pins_of(manifest, branch), self._reclaimed(manifest, branch)
        )

    def _reclaimed(self, manifest: Manifest, branch: str) -> frozenset[str]:
        """Return the tables whose part of a version is gone, and refuse a branch that is."""
        head = self.known.manifest
        if manifest.version >= head.version:
            return frozenset()
        if (manifest.version, branch) in head.held_views():
            return frozenset()
        if manifest.version < head.floor:
            # Some ref holds this version, of another branch.
            raise NotFound(
                f"branch {branch} of version {manifest.version} was reclaimed by a cleanup; tag "
                "versions that must stay",
                ErrorKind.RECLAIMED,
            )
        now, then = head.branches.get(branch), manifest.branches[branch]
        if now is None or now.made != then.made:
            raise NotFound(
                f"branch {branch} of version {manifest.version} was deleted; what it held is gone or "
                "going",
                ErrorKind.RECLAIMED,
            )
        return frozenset(
            number
            for number in manifest.tables
            if number not in head.tables or head.tables[number].floor > manifest.version
        )

    def check_whole(self, view: View) -> None:
        """Raise if a part of a version was reclaimed."""
        for number in sorted(view.reclaimed & {*view.pins}):
            view.table(view.manifest.tables[number].name)

    def pins_of(self, manifest: Manifest, branch: str) -> Mapping[str, Pin]:
        own = manifest.branches[branch]
        if not own.parent:
            return manifest.pins(branch)
        key = own.base, own.parent
        if key not in self._bases:
            self._bases[key] = self.pins_of(self.log.at(own.base), own.parent)
        return manifest.pins(branch, self._bases[key])

    @staticmethod
    def tag_of(manifest: Manifest, name: str) -> Tag:
        """Return a tag, or raise NotFound."""
        name = unicodedata.normalize("NFC", name)
        if name not in manifest.tags:
            raise NotFound(f"there is no tag {name}; lakewarden tag lists those that there are")
        return manifest.tags[name]

    def version_at(self, moment: datetime, head: Manifest) -> int:
        """Return the newest version that is not younger than a moment."""
        wanted = (moment - _EPOCH) // timedelta(microseconds=1)
        if wanted >= head.at_us:
            return head.version
        low, high = 1, head.version
        best: int | None = None
        later = self.log.entry(high)
        while low < high:
            middle = (low + high) // 2
            try:
                found = self.log.entry(middle)
            except NotFound:
                low = middle + 1
                continue
            if found.logged.at_us <= wanted:
                best, low = middle, middle + 1
            else:
                later, high = found, middle
        # Between versions that are kept there may have been others, which the next one remembers.
        times = {one.version: one.at_us for one in (*later.tail, later.logged)}
        if best is not None and times.get(best + 1, wanted) > wanted:
            return best
        raise NotFound(
            f"the version of the warehouse at {moment.isoformat(timespec='seconds')} was reclaimed, or "
            "the warehouse was made later",
            ErrorKind.RECLAIMED,
        )

    def pinned_by_refs(self) -> Iterator[Pin]:
        """Yield the pins of every branch and every tag."""
        head = self.known.manifest
        for branch in head.branches:
            yield from self.pins_of(head, branch).values()
        for tag in head.tags.values():
            yield from self.pins_of(self.log.at(tag.version), tag.branch).values()

    def history(self, limit: int | None = None, *, since: Head | None = None) -> Iterator[Logged]:
        """Yield versions, newest first, as far back as they are kept; or from one that is known."""
        version = (since or self.refresh()).version
        while version > 0 and limit != 0:
            try:
                entry = self.log.entry(version)
            except NotFound:
                return
            found = [entry.logged, *reversed(entry.tail)][:limit]
            yield from found
            version -= len(found)
            limit = None if limit is None else limit - len(found)

    # -- changing --------------------------------------------------------------------------------

    def commit(
        self,
        changes: Sequence[Change],
        *,
        base: Head | None = None,
        branch: str = MAIN,
        message: str | None = None,
        rebase: Rebase = stands,
        expects: Mapping[str, Pin | None] | None = None,
    ) -> Head:
        """Make one version of some changes, prepared on `base`.

        `expects` are tables that are not changed, and must still be what they were.
        """
        base = base or self.known
        number = self.log.new_id()
        made = Transaction(
            number,
            base.version,
            tuple(changes),
            branch,
            self.actor,
            message,
            expects=expects or {},
        )
        return self.submit(base, made, rebase)

    def submit(self, base: Head, transaction: Transaction, rebase: Rebase) -> Head:
        """Make a version of a transaction."""
        self._check_home(base.manifest)
        head = self._head = self.log.commit(base, transaction, rebase)
        made = head.tail[-1].transaction
        if made.id == transaction.id:
            due = self.marks.leave(head.manifest, made.changes)
            if due and self.on_due is not None:
                self.on_due(due)
        return head

    def _check_home(self, manifest: Manifest) -> None:
        """Refuse to write through a copy: the places of its tables are those of the original."""
        home = manifest.properties.get(_HOME)
        if home is not None and home != self.location.uri:
            raise Refused(
                ErrorKind.LOCATION_OVERLAP,
                f"this warehouse was made at {home} and its tables lie there; {self.location.uri} is a "
                "copy of its log, and writing through both would lose data: open the original",
            )

    @property
    def marks(self) -> Marks:
        """The marks of tables that are due to be cleaned."""
        return Marks(self.log.store, self.log.prefix)

    def create_tag(self, name: str, *, version: int | None = None, branch: str = MAIN) -> Tag:
        """Give a version a name that keeps it."""
        name = names.ref_name(name, "tag")
        head = self.refresh()
        if name in head.manifest.tags:
            raise AlreadyExists(
                f"tag {name} exists (version {head.manifest.tags[name].version}); delete it first"
            )
        version = head.version if version is None else version
        self.check_whole(self.view(self._at_version(version), branch))
        change = Change(Operation.TAG, name=(name,), version=version, source=branch)
        done = self.commit([change], base=head, message=f"tag {name}")
        return done.manifest.tags[name]

    def delete_tag(self, name: str) -> None:
        head = self.refresh()
        self.tag_of(head.manifest, name)
        change = Change(Operation.UNTAG, name=(unicodedata.normalize("NFC", name),))
        self.commit([change], base=head, message=f"delete tag {name}")

    def create_branch(self, name: str, *, version: int | None = None, source: str = MAIN) -> None:
        """Begin a branch at a version; nothing is copied."""
        name = names.ref_name(name, "branch")
        head = self.refresh()
        if name in head.manifest.branches:
            raise AlreadyExists(f"branch {name} exists; delete it first")
        version = head.version if version is None else version
        self.check_whole(self.view(self._at_version(version), source))
        change = Change(Operation.BRANCH, name=(name,), version=version, source=source)
        self.commit([change], base=head, message=f"branch {name}")

    def delete_branch(self, name: str) -> None:
        """Forget a branch; cleanup takes away what only it has used."""
        head = self.refresh()
        if name == MAIN:
            raise Refused(ErrorKind.USAGE, "main cannot be deleted")
        if name not in head.manifest.branches:
            raise NotFound(f"there is no branch {name}")
        made = head.manifest.branches[name].made
        children = [
            one
            for one, own in head.manifest.branches.items()
            # It may have begun on an earlier branch of that name.
            if own.parent == name and own.base >= made
        ]
        if children:
            raise Refused(
                ErrorKind.CONFLICT,
                f"branch {children[0]} begins on {name}; delete {children[0]} first",
            )
        change = Change(Operation.UNBRANCH, name=(name,))
        self.commit([change], base=head, message=f"delete branch {name}")

    def set_properties(
        self, properties: Mapping[str, str | None], name: Name | None = None
    ) -> None:
        """Set properties of the warehouse or of a table; None takes one away."""
        head = self.refresh()
        if name is None:
            self.commit([Change(Operation.SETTINGS, properties=properties)], base=head)
            return
        table = self.view(head.manifest).table(name)
        AutoCleanup.of(updated(table.properties, properties))
        change = Change(Operation.PROPERTIES, table.id, properties=properties)
        self.commit([change], base=head)

    def rename(self, name: Name, to: Name) -> None:
        """Give a table another name; it stays where it is."""
        to = names.table_name(to)
        head = self.refresh()
        view = self.view(head.manifest)
        table = view.table(name)
        # A name holds on every branch.
        if any(one.name == to and one.dropped is None for one in head.manifest.tables.values()):
            raise AlreadyExists(f"there is a table {'.'.join(to)} already")
        message = f"rename {'.'.join(name)} to {'.'.join(to)}"
        self.commit([Change(Operation.RENAME, table.id, name=to)], base=head, message=message)

    def declare(
        self, name: Name, form: Format, *, location: str | None = None, branch: str = MAIN
    ) -> Table:
        """Make a table that has no version yet."""
        head = self.refresh()
        table = self.new_table(self.view(head.manifest, branch), name, form, location=location)
        self.mark(table)
        change = Change(Operation.CREATE, table.id, name=table.name, made=table)
        self.commit([change], base=head, branch=branch, message=f"create {'.'.join(name)}")
        return table

    def new_table(
        self, view: View, name: Name, form: Format, *, location: str | None = None
    ) -> Table:
        """Return a table to be made, checked against those that there are."""
        name = names.table_name(name)
        if view.find(name) is not None:
            raise AlreadyExists(f"there is a table {'.'.join(name)} already")
        number = fresh_id()
        place = (
            Location.parse(location)
            if location
            else self.location.child(TABLES).child(names.directory(name, number))
        )
        if location:
            self.check_apart(place, view.manifest)
        return Table(number, name, form, place.uri, view.branch)

    def mark(self, table: Table) -> None:
        """Leave word in the table's directory that it is not to be cleaned on its own."""
        place = Location.parse(table.location).child(WAREHOUSE_MARK)
        told = {"warehouse": self.location.uri, "table": table.id}
        self.opener(place).put(place.key, json.dumps(told).encode())

    def unmark(self, table: Table) -> None:
        """Take that word away, if it is ours: another warehouse may have the table by now."""
        place = Location.parse(table.location).child(WAREHOUSE_MARK)
        store = self.opener(place)
        with suppress(StorageError, ValueError, AttributeError):
            told = json.loads(store.get(place.key))
            if (told.get("warehouse"), told.get("table")) == (self.location.uri, table.id):
                store.delete([place.key])

    def check_apart(self, place: Location, manifest: Manifest) -> None:
        """Raise if a place overlaps with that of another table, or with the log."""
        taken = {Location.parse(one.location): one for one in manifest.tables.values()}
        own = self.location.child(MANIFEST)
        for other in (*taken, own):
            if overlap(place, other):
                whose = f"table {'.'.join(taken[other].name)}" if other in taken else "the log"
                raise Refused(
                    ErrorKind.LOCATION_OVERLAP,
                    f"{place.uri} overlaps with {whose} ({other.uri}); what belongs to whom could "
                    "not be told: choose another place",
                )

    def drop(self, name: Name, *, branch: str = MAIN) -> None:
        """Hide a table; `undrop` brings it back until cleanup takes it away."""
        head = self.refresh()
        view = self.view(head.manifest, branch)
        table = view.table(name)
        change = Change(Operation.DROP, table.id, before=view.pins.get(table.id))
        self.commit([change], base=head, branch=branch, message=f"drop {'.'.join(name)}")

    def undrop(self, name: Name) -> Table:
        """Bring back the table of that name that was dropped last."""
        head = self.refresh()
        view = self.view(head.manifest)
        dropped = [
            one
            for one in head.manifest.tables.values()
            if one.name == name
            and one.dropped is not None
            and one.branch == MAIN
            and not one.purged
        ]
        if not dropped:
            raise NotFound(
                f"no dropped table {'.'.join(name)} is left; cleanup may have taken it away"
            )
        if view.find(name) is not None:
            raise AlreadyExists(f"there is a table {'.'.join(name)}; rename it first")
        table = max(dropped, key=lambda one: one.dropped or 0)
        pin = table.last or self.log.at((table.dropped or 1) - 1).pins().get(table.id)
        if table.external:
            self.mark(table)
        change = Change(Operation.UNDROP, table.id, name=name, after=pin)
        done = self.commit([change], base=head, message=f"undrop {'.'.join(name)}")
        return done.manifest.tables[table.id]

    def restore(self, to: View, name: Name | None = None, *, message: str | None = None) -> Head:
        """Bring a table, or all of them, back to what they were, as a new version.

        Tables that were made since are dropped, and those that were dropped since come back.
        """
        head = self.refresh()
        # Cleanup may have been here since that view was taken.
        to = self.view(self._at_version(to.version), to.branch)
        if name is None:
            self.check_whole(to)
        view = self.view(head.manifest, to.branch)
        _check_same_branch(to, view)
        before, now = ({one.id: one for one in each.tables()} for each in (to, view))
        chosen = {to.table(name).id} if name else {*before, *now}
        # With everything its names come back; a single table keeps the one that it has.
        named = (
            {number: table.name for number, table in before.items()}
            if not name and to.branch == MAIN
            else {number: now.get(number, before[number]).name for number in chosen & {*before}}
        )
        others = [one for one in now.values() if one.id not in chosen]
        _check_names([*named.values(), *(one.name for one in others)])
        made: list[tuple[Table, Pin]] = []
        try:
            changes = [
                change
                for number in sorted(chosen)
                if (change := self._restored(number, (to, before), (view, now), made)) is not None
            ]
            changes = [replace(change, name=named.get(change.table, ())) for change in changes] + [
                Change(Operation.RENAME, number, name=name)
                for number, name in named.items()
                if number in now
                and now[number].name != name
                and all(change.table != number for change in changes)
            ]
            if not changes:
                return head
            message = message or f"restore version {to.version}"
            changed = {change.table for change in changes}
            same = {number: view.pins.get(number) for number in chosen - changed}
            done = self.commit(
                changes,
                base=head,
                branch=to.branch,
                message=message,
                rebase=_refuse,
                expects=same,
            )
        except LakewardenError as error:
            # Only these say what became of it: after an interrupt it may be committed all the same.
            if error.kind is not ErrorKind.COMMIT_UNKNOWN:
                for table, pin in made:
                    self._known(table).discard(table, pin)
            raise
        for table, pin in made:
            # Whoever reads the table next does it, if we cannot.
            with suppress(StorageError):
                self._known(table).publish(table, pin)
        return done

    def _known(self, table: Table) -> Tables:
        """Return who knows the table's format."""
        if table.format not in self.formats:
            # Not above: those import this module.
            from lakewarden.warehouse.formats import with_formats  # noqa: PLC0415

            with_formats(self)
        return self.formats[table.format]

    def _restored(
        self,
        number: str,
        past: tuple[View, Mapping[str, Table]],
        present: tuple[View, Mapping[str, Table]],
        made: list[tuple[Table, Pin]],
    ) -> Change | None:
        (to, before), (view, there) = past, present
        now, then = view.pins.get(number), to.pins.get(number)
        is_there, was_there = number in there, number in before
        table = view.manifest.tables.get(number)
        if table is None or table.purged:
            name = ".".join(to.manifest.tables[number].name)
            raise NotFound(
                f"table {name} of version {to.version} was reclaimed", ErrorKind.RECLAIMED
            )
        if not was_there:
            return Change(Operation.DROP, number, before=now)
        if is_there and (now == then or then is None):
            return None
        last = now if is_there else self._pin_at_drop(table, view)
        if last is None and then is not None:
            name = ".".join(table.name)
            raise NotFound(
                f"the last version of {name} on branch {view.branch} is not known any more, so nothing "
                "can follow it",
                ErrorKind.RECLAIMED,
            )
        after = then
        if then is not None and last is not None and last != then:
            after = self._known(table).restore(table, last, then)
            made.append((table, after))
        if is_there:
            return Change(Operation.RESTORE, number, now, after)
        return Change(Operation.UNDROP, number, after=after)

    def _pin_at_drop(self, table: Table, view: View) -> Pin | None:
        """Return the last version of a table that was dropped."""
        at_home = view.branch in (MAIN, table.branch)
        if table.last is not None and at_home:
            return table.last
        if table.dropped is not None and at_home:
            return self.pins_of(self.log.at(table.dropped - 1), view.branch).get(table.id)
        # Dropped on a branch, of which only the log knows.
        for logged in self.history():
            for change in logged.transaction.changes:
                ours = logged.transaction.branch == view.branch and change.table == table.id
                if ours and change.operation is Operation.DROP:
                    return change.before
        return None


def _check_same_branch(to: View, now: View) -> None:
    """Raise if the branch has been made anew since: the versions of the old one are not its own."""
    if to.manifest.branches[to.branch].made != now.manifest.branches[now.branch].made:
        raise Refused(
            ErrorKind.UNSUPPORTED_FEATURE,
            f"version {to.version} is one of an earlier branch {to.branch}, which was deleted; begin "
            f"another branch there: lakewarden branch … --version {to.version}",
        )


def _check_names(names: Sequence[Name]) -> None:
    """Raise if two tables would have one name."""
    for name, number in Counter(names).items():
        if number > 1:
            raise AlreadyExists(
                f"there is another table {'.'.join(name)} now; rename or drop it first"
            )


def _refuse(change: Change, manifest: Manifest) -> Change:
    name = ".".join(manifest.tables[change.table].name)
    raise Conflict(
        ErrorKind.CONFLICT,
        f"{name} has changed while it was being restored; nothing was committed: do it again",
    )


def _engine(database: str) -> sa.Engine:
    try:
        # The driver that comes with lakewarden[postgres].
        return sa.create_engine(re.sub("^postgres(ql)?://", "postgresql+psycopg://", database))
    except (sa.exc.ArgumentError, ImportError, ValueError) as error:
        raise UsageError(
            ErrorKind.USAGE,
            f"--log-database cannot be used ({type(error).__name__}); write it like "
            "postgresql://user@host/name, and install lakewarden[postgres]",
        ) from error


def overlap(one: Location, other: Location) -> bool:
    """Tell whether one place lies inside the other."""
    return _inside(one, other) or _inside(other, one)


def _inside(inner: Location, outer: Location) -> bool:
    if (inner.scheme, inner.authority) != (outer.scheme, outer.authority):
        return False
    return not outer.path or inner.path == outer.path or inner.path.startswith(f"{outer.path}/")


def _exists(location: Location) -> AlreadyExists:
    return AlreadyExists(f"{location.uri} is a warehouse already; nothing was changed")


def _check_handler(location: Location, log: Log, database: str | None) -> None:
    key = f"{log.prefix}/{_MARKER}"
    try:
        kept = json.loads(log.store.get(key))["handler"]
    except NotFound:
        raise NotFound(
            f"{location.uri} is no warehouse; make one: lakewarden warehouse init {location.uri}",
            ErrorKind.NOT_A_WAREHOUSE,
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(ErrorKind.CORRUPT_MANIFEST, f"{key} is damaged ({error!r})") from error
    if (kept == "sql") != bool(database):
        raise UsageError(
            ErrorKind.USAGE,
            f"the log of {location.uri} is kept in "
            + (
                "a database; say which: --log-database postgresql://…"
                if kept == "sql"
                else "its store, not in a database; leave out --log-database"
            ),
        )
