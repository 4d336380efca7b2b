"""Where tables are, and how their next versions are made: each alone, or all of a warehouse together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import lance

from lakewarden.errors import Damaged, ErrorKind, NotFound, Refused
from lakewarden.formats.iceberg import rewriting
from lakewarden.formats.iceberg.catalog import Lake
from lakewarden.formats.iceberg.target import CatalogTarget
from lakewarden.formats.lance import compacting
from lakewarden.formats.lance.rehearsal import Version
from lakewarden.maintenance.fleet import Targets
from lakewarden.maintenance.rewriting import IcebergJob, Job, LanceJob, Opened
from lakewarden.model import MAIN, WAREHOUSE_MARK, Format
from lakewarden.packing import Rules, Shape
from lakewarden.pipeline.frames import ReadStores, concurrently
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.warehouse import forks
from lakewarden.warehouse.lance import tables_of, uri_of
from lakewarden.warehouse.manifest import Pin, Table
from lakewarden.warehouse.transaction import Changes, transaction
from lakewarden.warehouse.warehouse import View, Warehouse

#: What readers meet, the version that a warehouse names, and the one that the table has.
Measured = tuple[Shape, int | None, int | None]
#: Who the log says has done it.
ACTOR = "lakewarden:optimize"


class Skip(Exception):  # noqa: N818  # no error: there is a reason to leave the table alone
    """A table is left alone."""

    def __init__(self, reason: str, pinned: int | None = None, head: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.pinned = pinned
        self.head = head


class Visit(Protocol):
    """While tables are being changed; what was changed is public afterwards."""

    @property
    def version(self) -> int | None:
        """The version of the warehouse that it has become."""
        ...

    @property
    def left_out(self) -> frozenset[str]:
        """Tables that somebody else has changed before they could be published."""
        ...

    def opened(self, job: Job) -> Opened:
        """Open a table for changes."""
        ...

    @property
    def waits(self) -> bool:
        """Whether what is committed is not public before the visit is over."""
        ...

    def withdraw(self, job: Job) -> None:
        """Leave a table out, because something went wrong with it."""
        ...


class Place(Protocol):
    """Tables that are looked after together."""

    def keys(self) -> Sequence[str]:
        """Return the names of the tables."""
        ...

    def look(self, key: str, rules: Rules, where: str | None) -> Job:
        """Find out what there is to do for a table; raise Skip if it is left alone."""
        ...

    def measure(self, key: str) -> Measured:
        """Return what readers of a table meet now."""
        ...

    def visiting(self) -> AbstractContextManager[Visit]:
        """Open tables for changes."""
        ...


# -- each alone ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plain:
    """A table of its own: what is committed is public."""

    uri: str
    options: dict[str, str]
    load: Any = None

    def lance(self, number: int | None) -> Any:
        return _lance(self.uri, number, self.options)

    def version(self) -> Version:
        return Version(self.uri, self.lance(None).version, self.options)

    def iceberg(self) -> Any:
        return self.load()

    def outrun(self) -> bool:
        # What is committed here is public at once; of what went wrong nothing is known.
        return False


def _lance(uri: str, number: int | None, options: dict[str, str]) -> Any:
    try:
        return lance.dataset(uri, version=number, storage_options=options or None)
    except (OSError, ValueError) as error:
        if "not found" in str(error).lower():
            raise NotFound(f"{uri} holds no Lance table; name the table itself") from error
        raise Damaged(
            ErrorKind.CORRUPT_MANIFEST, f"{uri} cannot be opened ({compacting.line(error)})"
        ) from error


@dataclass(frozen=True)
class Alone:
    """Tables by their paths or in catalogs, each with a history of its own."""

    targets: Targets
    opener: Opener
    lake: Lake | None = None
    #: Names of tables that are wanted; all if there is none.
    only: tuple[str, ...] = ()
    version: int | None = None
    left_out: frozenset[str] = frozenset()
    waits: bool = False

    def keys(self) -> list[str]:
        found = [place.uri for place in self._paths() if self.targets.changes(place)]
        for target in self.targets.iceberg.tables:
            assert self.lake is not None
            tables = self.lake.tables(target)
            found += [one.uri for one in tables if self.targets.iceberg.changes(one)]
        chosen = dict.fromkeys(key for key in found if matches(key, self.only))
        if not chosen:
            raise NotFound("no table is left to look after; check the path, --table and --exclude")
        return list(chosen)

    def _paths(self) -> Iterator[Location]:
        for place in (*self.targets.tables, *self.targets.directories):
            if place.is_local and not Path(_uri(place)).exists():
                raise NotFound(f"{place.uri} does not exist; check the path")
        yield from self.targets.tables
        for directory in self.targets.directories:
            yield from _tables_below(directory, ReadStores(self.opener))

    def look(self, key: str, rules: Rules, where: str | None) -> Job:
        target = _in_catalog(key)
        if target is not None:
            table = self._load(target)
            return IcebergJob.of(key, table, rewriting.plan(table, rules, where), None)
        place = Location.parse(key)
        mark = place.child(WAREHOUSE_MARK)
        if self.opener(mark).exists(mark.key):
            raise Refused(
                ErrorKind.IN_WAREHOUSE,
                f"{key} belongs to a warehouse, and a version that its log does not know would be "
                "drift; nothing was changed: optimize the warehouse itself, lakewarden optimize "
                "WAREHOUSE",
            )
        found = _lance(_uri(place), None, self.options(place))
        if compacting.cleans_itself(found):
            # Every commit of ours would let Lance delete versions, and tags do not stop it.
            raise Skip("auto_cleanup_configured", head=found.version)
        version = Version(_uri(place), found.version, self.options(place))
        work = compacting.plan(found, rules)
        return LanceJob(
            key,
            Format.LANCE,
            work.pieces,
            work.shape,
            work.left_alone,
            head=work.version,
            version=version,
        )

    def options(self, place: Location) -> dict[str, str]:
        """Return how Lance reaches a table."""
        return {} if place.is_local else dict(self.opener.options)

    def measure(self, key: str) -> Measured:
        target = _in_catalog(key)
        if target is not None:
            return _measured(self._load(target), None)
        place = Location.parse(key)
        found = _lance(_uri(place), None, self.options(place))
        return compacting.shape(found), None, found.version

    def visiting(self) -> AbstractContextManager[Visit]:
        return nullcontext(self)

    def opened(self, job: Job) -> Opened:
        target = _in_catalog(job.key)
        if target is not None:
            return _Plain(job.key, {}, lambda: self._load(target))
        place = Location.parse(job.key)
        return _Plain(_uri(place), self.options(place))

    def withdraw(self, job: Job) -> None:
        """Do nothing: what is committed is committed."""

    def _load(self, target: CatalogTarget) -> Any:
        assert self.lake is not None
        return self.lake.load(target)


def _measured(table: Any, pinned: int | None) -> Measured:
    job = IcebergJob.of("", table, rewriting.plan(table, Rules()), pinned)
    return job.shape, pinned, job.head


def _uri(place: Location) -> str:
    return f"/{place.path}" if place.is_local else place.uri


def _in_catalog(key: str) -> CatalogTarget | None:
    return CatalogTarget.parse(key) if key.startswith("iceberg://") else None


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Tell whether a table is wanted, by its whole name or the last part of it."""
    last = key.rstrip("/").rpartition("/")[2]
    return not patterns or any(
        fnmatch(key, pattern) or fnmatch(last, pattern) for pattern in patterns
    )


def _tables_below(directory: Location, stores: ReadStores) -> Iterator[Location]:
    """Yield the Lance tables below a directory; what lies inside a table is none."""
    level = [directory]
    while level:
        listed = list(
            concurrently(lambda place: (place, *stores(place).list_directory(place.path)), level)
        )
        level = []
        for place, names, _ in listed:
            if "_versions" in names:
                yield place
            else:
                level += [place.child(name) for name in sorted(names) if not name.startswith("_")]


# -- all of a warehouse together -------------------------------------------------------------------


@dataclass
class Together:
    """The tables of a warehouse: all that were changed become one version."""

    warehouse: Warehouse
    branch: str = MAIN
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    _lock: Lock = field(default_factory=Lock)
    #: Ids of tables by their keys.
    _ids: dict[str, str] = field(default_factory=dict)

    def keys(self) -> list[str]:
        self._ids = _keyed(self.warehouse.read(branch=self.branch).tables())
        found = [
            key
            for key in self._ids
            if matches(key, self.only) and not (self.exclude and matches(key, self.exclude))
        ]
        if not found and (self.only or self.exclude):
            raise NotFound("no table is left to look after; check --table and --exclude")
        return found

    def look(self, key: str, rules: Rules, where: str | None) -> Job:
        view, table, pin = self._find(key)
        if pin is None:
            raise Skip("empty")
        if table.format is Format.ICEBERG:
            loaded = self._catalog().load_table(table.name)
            return IcebergJob.of(key, loaded, rewriting.plan(loaded, rules, where), pin.version)
        if forks.directory(pin.path) != forks.own(view, table):
            # The branch has it from its base; rewriting it here would copy it.
            raise Skip("inherited", pin.version, pin.version)
        tables = tables_of(self.warehouse)
        # What was committed and is not public yet becomes so: whoever comes next does it.
        tables.publish(table, pin)
        options = tables.options() or {}
        head = _lance(uri_of(table, pin), None, options).version
        if head > pin.version:
            pin = self._newer(table, pin, head)
            head = max(head, pin.version)
        if head < pin.version:
            raise Damaged(
                ErrorKind.DRIFT,
                f"the newest version of {key} is {head}, and the warehouse names {pin.version}: versions "
                f"are missing; look at what: lakewarden repair {self.warehouse.location.uri}",
            )
        version = Version(uri_of(table, pin), pin.version, options)
        found = _lance(version.uri, version.number, options)
        work = compacting.plan(found, rules)
        return LanceJob(
            key,
            Format.LANCE,
            work.pieces,
            work.shape,
            work.left_alone,
            pinned=pin.version,
            head=head,
            version=version,
        )

    def _newer(self, table: Table, seen: Pin, head: int) -> Pin:
        """Return the pin after another look: somebody may have committed since; else it is drift."""
        with self._lock:
            now = self.warehouse.read(branch=self.branch).pins.get(table.id)
        if now is None or now == seen:
            raise Skip("drift_needs_repair", seen.version, head)
        tables_of(self.warehouse).publish(table, now)
        return now

    def _find(self, key: str) -> tuple[View, Table, Pin | None]:
        with self._lock:
            view = self.warehouse.view(self.warehouse.known.manifest, self.branch)
        return view, _table(view, key, self._ids[key]), view.pins.get(self._ids[key])

    def _catalog(self) -> Any:
        from lakewarden.warehouse.iceberg import WarehouseCatalog  # noqa: PLC0415

        told: Any = {"lakewarden.branch": self.branch}
        return WarehouseCatalog("lakewarden", opened=self.warehouse, **told)

    def measure(self, key: str) -> Measured:
        with self._lock:
            self.warehouse.refresh()
        _, table, pin = self._find(key)
        assert pin is not None
        if table.format is Format.ICEBERG:
            return _measured(self._catalog().load_table(table.name), pin.version)
        tables = tables_of(self.warehouse)
        tables.publish(table, pin)
        found = _lance(uri_of(table, pin), pin.version, tables.options() or {})
        return compacting.shape(found), pin.version, pin.version

    @contextmanager
    def visiting(self) -> Iterator[Visit]:
        with transaction(
            self.warehouse, message="optimize", branch=self.branch, actor=ACTOR, leaves_out=True
        ) as changes:
            visit = _Visit(changes, self._ids)
            yield visit
        visit.version = changes.version
        visit.left_out = frozenset(key for key, one in self._ids.items() if one in changes.left_out)


@dataclass
class _Visit:
    changes: Changes
    ids: dict[str, str]
    version: int | None = None
    left_out: frozenset[str] = frozenset()
    waits: bool = True
    _lock: Lock = field(default_factory=Lock)

    def opened(self, job: Job) -> Opened:
        return _Waiting(self.changes, self._table(job), self._lock)

    def withdraw(self, job: Job) -> None:
        # Of a table that was dropped before we came there is nothing to take back.
        table = self.changes.view.manifest.tables.get(self.ids[job.key])
        if table is not None:
            with self._lock:
                self.changes.withdraw(table)

    def _table(self, job: Job) -> Table:
        return _table(self.changes.view, job.key, self.ids[job.key])


def _keyed(tables: Sequence[Table]) -> dict[str, str]:
    """Return the ids of tables by what they are called; a dot in a name may make two alike."""
    names = [".".join(table.name) for table in tables]
    return {
        name if names.count(name) == 1 else f"{name}#{table.id}": table.id
        for name, table in zip(names, tables, strict=True)
    }


def _table(view: View, key: str, number: str) -> Table:
    found = next((one for one in view.tables() if one.id == number), None)
    if found is None:
        raise NotFound(f"{key} was dropped meanwhile")
    return found


@dataclass(frozen=True)
class _Waiting:
    """A table in a transaction: what is committed waits for the others."""

    changes: Changes
    table: Table
    lock: Lock

    def lance(self, number: int | None) -> Any:
        return lance.dataset(
            namespace_client=self.changes.lance, table_id=list(self.table.name), version=number
        )

    def version(self) -> Version:
        waits = self.changes.waits(self.table)
        pin = waits or self.changes.view.pins[self.table.id]
        path = pin.path.removeprefix(forks.directory(pin.path)) if waits else None
        options = tables_of(self.changes.warehouse).options() or {}
        return Version(uri_of(self.table, pin), pin.version, options, path)

    def iceberg(self) -> Any:
        return self.changes.iceberg.load_table(self.table.name)

    def outrun(self) -> bool:
        # Nothing of a transaction is public before its end.
        warehouse, view = self.changes.warehouse, self.changes.view
        with self.lock:
            now = warehouse.view(warehouse.refresh().manifest, view.branch)
        return now.pins.get(self.table.id) != view.pins.get(self.table.id)
