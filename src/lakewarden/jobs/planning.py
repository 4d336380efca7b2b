"""One plan for tables of a warehouse, whatever its kind: what the maintenance operations are asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from glob import escape
from uuid import UUID

from lakewarden import expiry as snapshots
from lakewarden import retention
from lakewarden.errors import ErrorKind, NotFound
from lakewarden.expiry import ExpiryPolicy
from lakewarden.formats.iceberg.target import CatalogTarget
from lakewarden.jobs.config import ExpireSettings, OptimizeSettings
from lakewarden.jobs.sources import IcebergCatalog, LanceDirectory, OwnTables, Source
from lakewarden.jobs.warehouses import TableEntity
from lakewarden.maintenance import cleanup, optimize, removal
from lakewarden.maintenance import warehouse as warehouses
from lakewarden.maintenance.cleanup import Cleanup
from lakewarden.maintenance.deleting import Gate
from lakewarden.maintenance.fleet import IcebergTargets, Targets
from lakewarden.maintenance.optimize import Row
from lakewarden.maintenance.pinned import target_of
from lakewarden.maintenance.places import Alone, Place, Together
from lakewarden.maintenance.plan import Plan, TablePlan
from lakewarden.maintenance.removal import TableReceipt
from lakewarden.maintenance.survey import Reading
from lakewarden.maintenance.warehouse import Request
from lakewarden.model import Format
from lakewarden.packing import Rules as FileRules
from lakewarden.retention import NOT_BEFORE, OnTagged, Policy
from lakewarden.storage.location import Location
from lakewarden.warehouse.reclaiming import Rules

#: Bytes that are rewritten between two questions whether to go on.
_PORTION_BYTES = 4 << 30
#: Reasons that only say that the log of a warehouse of ours, whose rules these are, wants it.
_BY_LOG = frozenset({snapshots.BY_WAREHOUSE, snapshots.UNTOUCHED, retention.UNTOUCHED})


@dataclass(frozen=True)
class Done:
    """What was done to each table, and the requests that it took for all of them."""

    tables: Mapping[str, TableReceipt] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """A plan, and what the pipeline calls each table."""

    source: Source
    keys: Mapping[UUID, str]
    rows: Mapping[str, TablePlan]
    #: What making the plan cost.
    requests: Mapping[str, int]
    execute: Callable[[Gate, float | None], Done]
    #: The plan that the rows are of.
    plan: Plan
    #: What tells more than the pipeline, which is only told to keep versions of a warehouse of ours.
    rules: Mapping[str, str] = field(default_factory=dict)

    def kept_because(self, keys: Collection[str]) -> dict[str, dict[str, int]]:
        """Return for how many versions of each of these tables each reason to stay holds."""
        ids = {key: self.rows[key].table_id for key in keys if self.rows[key].table_id >= 0}
        found = self.plan.kept_because(list(ids.values())) if ids else {}
        return {key: self._in_words(key, found[number]) for key, number in ids.items()}

    def _in_words(self, key: str, reasons: Mapping[str, int]) -> dict[str, int]:
        told: dict[str, int] = {}
        for reason, number in reasons.items():
            by_log = reason in _BY_LOG or reason.startswith(NOT_BEFORE)
            words = self.rules[key] if by_log and key in self.rules else reason
            told[words] = max(number, told.get(words, 0))
        return told

    def refresh(self) -> None:
        """Forget what was known of a warehouse of ours before the run."""
        if isinstance(self.source, OwnTables):
            self.source.warehouse.refresh()


def plan_expiry(
    source: Source,
    tables: Sequence[TableEntity],
    settings: Mapping[UUID, ExpireSettings],
    reading: Reading,
) -> Planned:
    """Plan which versions of all these tables go.

    Outside a warehouse of ours, all of them have the same settings.
    """
    one = settings[tables[0].id]
    if isinstance(source, OwnTables):
        rules = {
            number: Rules(mine.max_snapshot_age, mine.min_snapshots_to_keep)
            for number, mine in settings.items()
        }
        return _own(source, tables, rules, Request(None), reading)
    policy = Policy(
        older_than=one.max_snapshot_age, keep=one.min_snapshots_to_keep, on_tagged=OnTagged.KEEP
    )
    expiry = ExpiryPolicy(
        one.max_snapshot_age,
        one.min_snapshots_to_keep,
        max_ref_age=one.max_ref_age,
        min_snapshots_to_expire=one.min_snapshots_to_expire,
    )
    if isinstance(source, IcebergCatalog):
        return _others(source, tables, Cleanup(None, expiry=expiry), reading)
    return _others(source, tables, Cleanup(policy), reading)


def plan_orphans(
    source: Source, tables: Sequence[TableEntity], older_than: timedelta, reading: Reading
) -> Planned:
    """Plan which files of all these tables go because no version names them.

    The floor for ages was looked at before.
    """
    if isinstance(source, OwnTables):
        # Below the first version there is none, so no version goes.
        rules = {table.id: Rules(before_version=1) for table in tables}
        asked = Request(None, unverified_after=older_than, unsafe_below_floor=True)
        return _own(source, tables, rules, asked, reading)
    return _others(source, tables, cleanup.orphans(older_than, unsafe_below_floor=True), reading)


def _targets(source: Source, tables: Sequence[TableEntity]) -> tuple[Targets, dict[UUID, str]]:
    if isinstance(source, LanceDirectory):
        places = {table.id: Location.parse(table.target) for table in tables}
        # The others are read: a shallow clone among them may need files of these.
        read = (source.location, *source.beside)
        targets = Targets((), read, only=frozenset(places.values()))
        return targets, {number: place.uri for number, place in places.items()}
    named = {table.id: CatalogTarget.parse(table.target) for table in tables}
    beside = source.beside if isinstance(source, IcebergCatalog) else ()
    targets = Targets((), iceberg=IcebergTargets(tuple(named.values()), beside=beside))
    return targets, {number: one.uri for number, one in named.items()}


def _others(
    source: Source, tables: Sequence[TableEntity], request: Cleanup, reading: Reading
) -> Planned:
    targets, keys = _targets(source, tables)
    plan = cleanup.plan(targets, request, reading, now=reading.clock.now())

    def execute(gate: Gate, rate_limit: float | None) -> Done:
        done = removal.execute(plan, reading, rate_limit=rate_limit, gate=gate)
        return Done({one.table_key: one for one in done.tables}, done.requests)

    return Planned(source, keys, _rows(plan.tables, keys), plan.requests, execute, plan)


def _own(
    source: OwnTables,
    tables: Sequence[TableEntity],
    rules: Mapping[UUID, Rules],
    request: Request,
    reading: Reading,
) -> Planned:
    warehouses.publish(source.warehouse)
    pinned = {table.id: source.pinned(table)[0] for table in tables}
    chosen = {found.id: rules[number] for number, found in pinned.items()}
    keys = {
        number: target_of(found.id).uri
        if found.format is Format.ICEBERG
        else Location.parse(found.location).uri
        for number, found in pinned.items()
    }
    asked = replace(
        request, tables=chosen, beside=source.beside, known_elsewhere=source.known_elsewhere
    )
    plan = warehouses.plan(source.warehouse, asked, reading, now=reading.clock.now())

    def execute(gate: Gate, rate_limit: float | None) -> Done:
        done = warehouses.execute(plan, reading, rate_limit=rate_limit, gate=gate)
        # Receipts call tables by their names.
        by_name = {one.table_key: one for one in done.tables}
        mine = {
            key: by_name[plan.names[key]] for key in keys.values() if plan.names.get(key) in by_name
        }
        return Done(mine, done.requests)

    rows = _rows(plan.tables.tables, keys)
    words = {keys[number]: rule.of_one_table() for number, rule in rules.items()}
    return Planned(source, keys, rows, plan.tables.requests, execute, plan.tables, words)


def _rows(found: Sequence[TablePlan], keys: Mapping[UUID, str]) -> dict[str, TablePlan]:
    """Return the plans of the tables that were asked for; one that is not there is gone."""
    rows = {one.table_key: one for one in found}
    gone = NotFound("the table was not found any more; look at the warehouse again")
    missing = TablePlan(-1, "", error=gone.message, error_kind=ErrorKind.NOT_FOUND.value)
    return {key: rows.get(key, missing) for key in keys.values()}


# -- optimize --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimizing:
    """A plan to rewrite files of many tables, done in portions."""

    keys: Mapping[UUID, str]
    plan: optimize.Plan
    reading: Reading

    def portions(self) -> Iterator[list[str]]:
        """Yield tables that are done together, as one job."""
        sizes = {row.table_key: row.bytes_to_rewrite for row in self.plan.rows}
        portion: list[str] = []
        size = 0
        for key in self.keys.values():
            if portion and size + sizes.get(key, 0) > _PORTION_BYTES:
                yield portion
                portion, size = [], 0
            portion.append(key)
            size += sizes.get(key, 0)
        if portion:
            yield portion

    def do(self, keys: Collection[str], gate: Gate) -> dict[str, Row]:
        """Do what is planned for some tables, if the gate is open, and return what was done to each."""
        jobs = tuple(job for job in self.plan.jobs if job.key in keys)
        rows = tuple(row for row in self.plan.rows if row.table_key in keys)
        done = optimize.execute(replace(self.plan, jobs=jobs, rows=rows), self.reading, gate)
        found = {row.table_key: row for row in done.rows}
        gone = "the table was not found any more; look at the warehouse again"
        missing = Row("", error=gone, error_kind=ErrorKind.NOT_FOUND.value)
        return {key: found.get(key, missing) for key in keys}


def optimizing(
    source: Source,
    tables: Sequence[TableEntity],
    settings: OptimizeSettings,
    min_files: int | None,
    reading: Reading,
) -> Optimizing:
    """Plan what is worth rewriting in all these tables."""
    place: Place
    if isinstance(source, OwnTables):
        keys = {table.id: ".".join(table.name) for table in tables}
        place = Together(source.warehouse, only=tuple(escape(key) for key in keys.values()))
    elif isinstance(source, LanceDirectory):
        places = {table.id: Location.parse(table.target) for table in tables}
        keys = {number: one.uri for number, one in places.items()}
        place = Alone(Targets(tuple(places.values())), source.opener)
    else:
        targets, keys = _targets(source, tables)
        assert isinstance(source, IcebergCatalog)
        place = Alone(targets, source.opener, source.lake)
    rules = FileRules(settings.target_file_size_bytes, min_files, max_bytes=settings.max_bytes)
    return Optimizing(keys, optimize.plan(place, optimize.Request(rules), reading), reading)
