"""Which tables a warehouse has, and which of them have changed since somebody looked.

Tables of others tell nobody when they change.  The detector asks for every table what names its last
commit, one request each, and looks closer only at those that differ from what was seen last; what it
finds is told like a commit (`commits`).  A warehouse of ours is watched the same way, through its log:
one look for all its tables.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar, cast
from uuid import UUID

from lakewarden.errors import (
    Damaged,
    ErrorKind,
    LakewardenError,
    NotFound,
    Refused,
    StorageError,
    UsageError,
)
from lakewarden.jobs.commits import Change, Commits, Outcome
from lakewarden.jobs.refusals import RequestRefused
from lakewarden.jobs.reporting import in_words
from lakewarden.jobs.sources import Named, Place, Source, open_source
from lakewarden.jobs.tasks import Scope
from lakewarden.jobs.warehouses import (
    Access,
    FoundTable,
    TableEntity,
    WarehouseInfo,
    WarehouseKind,
    Warehouses,
)
from lakewarden.pipeline.frames import concurrently
from lakewarden.storage.location import Location

_LOG = logging.getLogger("lakewarden.jobs")
#: Catalogs and stores are asked about so many tables at the same time.
TOGETHER = 16
#: Tables that are looked at, and written down, together.
_CHUNK = 200
_TABLES_MAX = 100_000
#: Tables that are asked what they say while somebody waits: some seconds of requests.
ASKED_MAX = 1000
_CATALOG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
#: They name Python classes to be loaded: whoever sets them runs code in this process.
_LOADS_CODE = re.compile(r"(?i)py-|.*[-.]impl$|auth\.")

Answer = TypeVar("Answer")
Item = TypeVar("Item", bound=Named)
#: What a table is called: its id, or its name as long as it has none.
Key = TypeVar("Key", bound=UUID | tuple[str, ...])


@dataclass(frozen=True, slots=True)
class NewPlace:
    """Where a warehouse is that nobody has registered yet, in the only spelling that it has here."""

    kind: WarehouseKind
    location: str


def check_place(kind: WarehouseKind, location: str, access: Access) -> NewPlace:
    """Return the place of a warehouse, or refuse it; nothing is looked at."""
    dangerous = sorted(name for name in access.catalog_properties if _LOADS_CODE.match(name))
    if dangerous:
        raise UsageError(
            ErrorKind.USAGE,
            f"{', '.join(dangerous)[:200]} may not be set here, for it names code to be loaded; put it "
            "into the PyIceberg configuration of the service",
        )
    if kind is WarehouseKind.ICEBERG:
        if not _CATALOG.fullmatch(location):
            raise UsageError(
                ErrorKind.USAGE,
                "the location of an iceberg warehouse is the name of a catalog: letters, digits, - and _",
            )
        return NewPlace(kind, location)
    if "://" not in location and not location.startswith("/"):
        raise UsageError(
            ErrorKind.USAGE, "the location is relative, and nobody knows to what; write it in full"
        )
    return NewPlace(kind, Location.parse(location).uri)


def discover(place: Place, access: Access, *, asked_max: int = ASKED_MAX) -> list[FoundTable]:
    """Return the tables of a place with what they say themselves, or raise WarehouseNotReadable.

    Only some are asked what they say, for somebody waits; the detector asks the others.  If none of
    them can be asked, the warehouse cannot be read.
    """
    with _readable(access):
        source = open_source(place, access)
        found = _few_enough(source.find())
        told, troubles = _asked(source, found[:asked_max], access)
        if troubles and not told:
            raise troubles[0]
        return _with(found, told)


@dataclass(frozen=True, slots=True)
class Discovery:
    """Finds tables, and changes of tables, of the warehouses of one database."""

    warehouses: Warehouses
    commits: Commits
    asked_max: int = ASKED_MAX

    def find(self, warehouse_id: UUID) -> list[FoundTable]:
        """Return what tables a warehouse has now, or raise WarehouseNotReadable.

        Tables of which no commit was seen yet are asked what they say, some of them at least.  What
        the others say came with their last commit.
        """
        info, access = self.warehouses.get(warehouse_id), self.warehouses.access(warehouse_id)
        seen = {one.name for one in self.warehouses.tables(warehouse_id) if one.marker is not None}
        with _readable(access):
            source = open_source(info, access)
            found = _few_enough(_found(source))
            unseen = [one for one in found if one.name not in seen]
            told, _ = _asked(source, unseen[: self.asked_max], access)
            return _with(found, told)

    def detect(self, warehouse_id: UUID) -> list[Outcome]:
        """Find tables that are new or gone, and those with new commits; queue what is worthwhile."""
        info, access = self.warehouses.get(warehouse_id), self.warehouses.access(warehouse_id)
        with _foreseen(access):
            return self._detect(info, access)

    def _detect(self, info: WarehouseInfo, access: Access) -> list[Outcome]:
        with _readable(access):
            source = open_source(info, access)
            found = _found(source)
        tables = {one.id: one for one in self.warehouses.refresh(info.id, found)}
        scope = Scope(info.project_id, info.id)
        markers = _answers(source.marker, tables.values(), access)
        outcomes: list[Outcome] = []
        unseen = self.commits.unseen(scope, markers)
        for first in range(0, len(unseen), _CHUNK):
            chosen = [tables[number] for number in unseen[first : first + _CHUNK]]
            looks = _answers(source.look, chosen, access)
            now = self.commits.queue.database.clock.now()
            changes = [
                Change(
                    number,
                    look.marker,
                    now,
                    look.properties,
                    look.history,
                    look.versions,
                    look.fragmentation,
                )
                for number, look in looks.items()
            ]
            outcomes += self.commits.record(scope, changes)
        return outcomes

    def detect_all(self) -> None:
        """Do the same for every warehouse; one that cannot be read is logged, and tried again."""
        for info in self.warehouses.all():
            try:
                self.detect(info.id)
            except LakewardenError as error:
                _LOG.warning("warehouse %s could not be looked at: %s", info.name, error.message)
            except Exception as error:  # noqa: BLE001  # whatever it is, the others are looked at
                # What is needed to reach it is not known, so its words may hold that.
                what = type(error).__name__
                _LOG.error("warehouse %s could not be looked up (%s)", info.name, what)


@contextmanager
def _readable(access: Access) -> Iterator[None]:
    """Say of what goes wrong that a warehouse cannot be read, without what was given to reach it."""
    try:
        yield
    except LakewardenError as error:
        raise RequestRefused(
            ErrorKind.STORAGE if isinstance(error, StorageError) else error.kind,
            "WarehouseNotReadable",
            400,
            f"the warehouse cannot be read: {access.hide(error.message)}",
        ) from None
    except Exception as error:  # noqa: BLE001  # a defect, but its words may hold what was given
        raise _defect(error, access) from None


@contextmanager
def _foreseen(access: Access) -> Iterator[None]:
    """Say what nobody foresaw as one of our own errors, without what was given to reach a warehouse."""
    try:
        yield
    except LakewardenError:
        raise
    except Exception as error:  # noqa: BLE001  # a defect, but its words may hold what was given
        raise _defect(error, access) from None


def _defect(error: Exception, access: Access) -> LakewardenError:
    said = access.hide(in_words(error))
    return LakewardenError(ErrorKind.CATALOG, f"looking for tables failed: {said}")


def _found(source: Source) -> list[FoundTable]:
    """Return the tables of a place that was there before: with nothing in it, it has none."""
    try:
        return source.find()
    except NotFound:
        return []


def _few_enough(found: list[FoundTable]) -> list[FoundTable]:
    if len(found) > _TABLES_MAX:
        raise Refused(ErrorKind.USAGE, f"{len(found)} tables are too many for one warehouse")
    return found


def _asked(
    source: Source, tables: Sequence[FoundTable], access: Access
) -> tuple[Mapping[tuple[str, ...], Mapping[str, str]], list[Exception]]:
    """Ask tables what they say, and return that by their names, with what went wrong."""

    def ask(table: FoundTable) -> Mapping[str, str]:
        try:
            return source.properties(table)
        except (Damaged, NotFound):
            # Damage is told when something is done to the table; it may also just have gone.
            return {}

    return _all(ask, {one.name: one for one in tables}, access)


def _with(
    found: Sequence[FoundTable], told: Mapping[tuple[str, ...], Mapping[str, str]]
) -> list[FoundTable]:
    return [
        replace(one, properties=dict(told[one.name])) if one.name in told else one for one in found
    ]


def _answers(
    ask: Callable[[TableEntity], Answer], tables: Iterable[TableEntity], access: Access
) -> Mapping[UUID, Answer]:
    """Ask about tables that are known."""
    return _all(ask, {one.id: one for one in tables}, access)[0]


def _all(
    ask: Callable[[Item], Answer], items: Mapping[Key, Item], access: Access
) -> tuple[Mapping[Key, Answer], list[Exception]]:
    """Ask about tables at the same time; what goes wrong with one is logged, the others go on."""

    def answer(key: Key) -> tuple[Key, Answer | None, Exception | None]:
        try:
            return key, ask(items[key]), None
        except Exception as error:  # noqa: BLE001  # logged below, and no other table's
            return key, None, error

    found: dict[Key, Answer] = {}
    troubles: list[Exception] = []
    for key, told, trouble in concurrently(answer, items, TOGETHER):
        if trouble is None:
            found[key] = cast(Answer, told)
            continue
        troubles.append(trouble)
        said = trouble.message if isinstance(trouble, LakewardenError) else in_words(trouble)
        name = ".".join(items[key].name)
        _LOG.warning("table %s could not be looked at: %s", name, access.hide(said))
    return found, troubles
