"""Cleanup of a whole warehouse: what its log lets go, in one run over all its tables.

Order, and why a crash at any point is harmless: what is committed and not public is published; the
plan is made; the reclaim is committed to the log, and from then on nobody can hold on to what goes;
snapshots leave the metadata of Iceberg tables; files go; the log's own old objects go last.  A run
after a crash finds the floor where it is and does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakewarden.errors import ErrorKind, LakewardenError, NotFound
from lakewarden.expiry import ExpiryPolicy
from lakewarden.formats.lance.layout import HINT
from lakewarden.maintenance import cleanup, removal
from lakewarden.maintenance.cleanup import Cleanup, removal_of
from lakewarden.maintenance.deleting import STOPPED, Gate, OpenGate, Turnstile, closed
from lakewarden.maintenance.fleet import IcebergTargets, Neighbour, Targets
from lakewarden.maintenance.pinned import PinnedTables, WarehouseTables, target_of
from lakewarden.maintenance.plan import Plan, TablePlan
from lakewarden.maintenance.removal import Receipt, TableReceipt
from lakewarden.maintenance.safety import UNVERIFIED_AFTER, Breakers
from lakewarden.maintenance.survey import Costs, Reading, list_fully
from lakewarden.model import OURS, FileKind, FileReason, Format, RemovalStats, Verdict
from lakewarden.pipeline import classification, deletion
from lakewarden.pipeline.deletion import Pace
from lakewarden.pipeline.frames import (
    DECISIONS,
    OBJECTS,
    Root,
    Stores,
    concurrently,
    frame,
    pin,
    to_micros,
)
from lakewarden.pipeline.listing import Unit
from lakewarden.retention import MIN_AGE, OnTagged, Policy
from lakewarden.storage.location import Location
from lakewarden.storage.store import DELETE_BATCH_MAX, Deletion
from lakewarden.warehouse import forks, lance
from lakewarden.warehouse.commit import SLOW
from lakewarden.warehouse.handlers import StoreHandler
from lakewarden.warehouse.manifest import Change, Operation
from lakewarden.warehouse.reclaiming import Reclaim, Rules, decide, due
from lakewarden.warehouse.warehouse import MANIFEST, Warehouse

#: Who does what cleanup commits.
SYSTEM = "lakewarden"
#: Writers that sleep for so long make sure that their version still follows the one before.
LOG_AGE = 10 * SLOW
#: The log among the tables.
_LOG = -1
#: What is told of the log where the gate is closed.
_STOPPED = TableReceipt(MANIFEST, error=STOPPED, error_kind=ErrorKind.STOPPED.value)


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for."""

    rules: Rules | None
    #: Tables with rules of their own, by id.
    tables: Mapping[str, Rules] = field(default_factory=dict)
    unverified_after: timedelta = UNVERIFIED_AFTER
    delete_unverified: bool = False
    #: Somebody has decided that no writer takes longer than `unverified_after`.
    unsafe_below_floor: bool = False
    #: Marks of tables that are due; taken away when they have been cleaned.
    marks: tuple[str, ...] = ()
    #: How old entries of the log must be to go, whatever else is said.
    log_age: timedelta = LOG_AGE
    #: Directories elsewhere in which shallow clones may be that need files of the warehouse.
    beside: tuple[Location, ...] = ()
    #: Iceberg tables of catalogs elsewhere: one of them may be the same as one of the warehouse.
    known_elsewhere: tuple[Neighbour, ...] = ()

    @classmethod
    def for_due(cls, warehouse: Warehouse, min_age: timedelta = MIN_AGE, **margins: Any) -> Request:
        """Return the request that cleans the tables that are due, each by its own properties."""
        tables, marks = due(warehouse, min_age)
        return cls(None, tables, marks=tuple(marks), **margins)

    @property
    def min_age(self) -> timedelta:
        given = [self.rules] if self.rules is not None else [*self.tables.values()]
        return max((rules.min_age for rules in given), default=MIN_AGE)

    def cleanup(self) -> Cleanup:
        """Return the request for the tables: the pins say what goes, these are the margins."""
        policy = Policy(before_version=1, on_tagged=OnTagged.KEEP, min_age=self.min_age)
        expiry = ExpiryPolicy(older_than=self.min_age, keep=1)
        return Cleanup(
            policy,
            self.unverified_after,
            self.delete_unverified,
            expiry=expiry,
            unsafe_below_floor=self.unsafe_below_floor,
        )

    def describe(self) -> str:
        words = self.rules.describe() if self.rules is not None else "tables that are due"
        return f"{words}; what tags and branches hold stays"


@dataclass(frozen=True, slots=True)
class WarehousePlan:
    """What cleanup of a warehouse would do."""

    warehouse: Warehouse = field(repr=False)
    reclaim: Reclaim = field(repr=False)
    #: The tables, as the pipeline knows them.
    tables: Plan
    #: The log's own objects that go.
    log: DataFrame
    log_row: TablePlan
    #: What of the log is younger than this stays.
    log_before: datetime
    #: Purged tables of which no file is left.
    emptied: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    #: Refs and hints of purged tables, by the tables' ids: they go last.
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Marks of tables that were due.
    marks: tuple[str, ...] = ()

    @property
    def shown(self) -> Plan:
        """The plan as people read it: tables by their names, and the log among them."""
        renamed = [replace(one, table_key=self.named(one)) for one in self.tables.tables]
        return replace(self.tables, tables=[*sorted(renamed, key=_by_key), self.log_row])

    def named(self, table: TablePlan | TableReceipt) -> str:
        return self.names.get(table.table_key, table.table_key)

    @property
    def changes(self) -> list[Change]:
        """What is committed before anything goes, so that nobody holds on to it meanwhile.

        Also where no floor moves: what a deleted tag or branch held, somebody may be about to tag.
        """
        found = self.reclaim.changes(self.emptied)
        rows = [*self.tables.tables, self.log_row]
        if not found and any(one.removal != RemovalStats() for one in rows):
            found = [Change(Operation.RECLAIM, version=self.reclaim.floor)]
        return found


def _by_key(table: TablePlan) -> str:
    return table.table_key


def publish(warehouse: Warehouse) -> None:
    """Let everybody see what is committed, so that nothing of it is taken for left over."""
    manifest = warehouse.refresh().manifest
    pins = [
        (manifest.tables[number], one)
        for branch in manifest.branches.values()
        for number, one in branch.pins.items()
        if one is not None and manifest.tables[number].format is Format.LANCE
    ]
    tables = lance.tables_of(warehouse)

    def show(work: Any) -> None:
        # What cannot be shown holds its own table back: its head is not where it should be.
        with suppress(LakewardenError):
            tables.publish(*work)

    list(concurrently(show, pins))


def plan(
    warehouse: Warehouse, request: Request, reading: Reading, *, now: datetime
) -> WarehousePlan:
    """Decide what goes and why.  Nothing is changed."""
    costs = Costs()
    with costs.stage(reading, "read the log"):
        reclaim = decide(warehouse, request.rules, now, request.tables)
    targets = _targets(reclaim, request)
    # As of the version that was decided on: of what came later, nothing was decided.
    reading = replace(reading, lake=PinnedTables(warehouse, reclaim))
    names = _names(reclaim)
    if targets.tables or targets.directories or targets.iceberg.tables:
        found = cleanup.plan(targets, request.cleanup(), reading, now=now)
    else:
        found = _nothing(reading, now)
    purged = {key for key, number in names.items() if _is_purged(reclaim, number)}
    found = replace(
        found,
        policy=request.describe(),
        tables=[
            replace(one, metadata_location=None) if one.table_key in purged else one
            for one in found.tables
        ],
    )
    mine = [(one, names[one.table_key]) for one in found.tables if one.table_key in names]
    left = _left(
        found, {one.table_id: number for one, number in mine if reclaim.table(number).purged}
    )
    gone = tuple(number for one, number in mine if number in left and _is_empty(one, left[number]))
    with costs.stage(reading, "read the log's own files"):
        before = now - max(request.min_age, request.log_age)
        files = _log_files(
            warehouse, reclaim, reading, costs, before=before, log_age=request.log_age
        )
        log = pin(files)
        row = _log_row(log, reclaim, len(_old_rows(reclaim, warehouse, before)))
    dotted = {key: ".".join(reclaim.table(number).name) for key, number in names.items()}
    found = replace(
        found,
        requests=removal.added(found.requests, costs.requests),
        seconds=removal.added(found.seconds, costs.seconds),
    )
    return WarehousePlan(
        warehouse, reclaim, found, log, row, before, gone, dotted, left, request.marks
    )


def _targets(reclaim: Reclaim, request: Request) -> Targets:
    beside = request.beside
    pins = {_place(reclaim, number): one for number, one in reclaim.lance.items()}
    held = {target_of(number): one for number, one in reclaim.iceberg.items()}
    same = reclaim.unchanged
    # A table of ours may lie in one of them, and is found there.
    outside = [
        one for one in pins if not any(place == one or place.contains(one) for place in beside)
    ]
    return Targets(
        tuple(outside),
        # Where no Lance table is, nothing goes that a clone could need.
        beside if pins else (),
        only=frozenset(pins),
        unchanged=frozenset(_place(reclaim, number) for number in same if number in reclaim.lance),
        pins=pins,
        iceberg=IcebergTargets(
            tuple(held),
            held=held,
            unchanged=frozenset(target_of(number) for number in same if number in reclaim.iceberg),
            beside=request.known_elsewhere,
        ),
    )


def _place(reclaim: Reclaim, number: str) -> Location:
    return Location.parse(reclaim.table(number).location)


def _names(reclaim: Reclaim) -> dict[str, str]:
    """Return the ids of all tables by what the pipeline calls them."""
    lances = {_place(reclaim, number).uri: number for number in reclaim.lance}
    return lances | {target_of(number).uri: number for number in reclaim.iceberg}


def _is_purged(reclaim: Reclaim, number: str) -> bool:
    found = reclaim.lance.get(number) or reclaim.iceberg.get(number)
    return found is not None and found.purged


def _left(found: Plan, purged: Mapping[int, str]) -> dict[str, list[str]]:
    """Return the refs and hints of purged tables, of which no verdict lets go."""
    left: dict[str, list[str]] = {number: [] for number in purged.values()}
    if purged:
        marks = F.col("kind").isin(FileKind.REF.value, FileKind.HINT.value)
        own = found.files.filter(F.col("table_id").isin(list(purged)) & marks)
        for row in own.select("table_id", "path").collect():
            left[purged[row.table_id]].append(row.path)
    return left


def _is_empty(table: TablePlan, left: Sequence[str]) -> bool:
    files = table.objects - table.kept_unknown_kind - len(left)
    return table.error is None and not table.removal.files_removed and files <= 0


def _nothing(reading: Reading, now: datetime) -> Plan:
    empty = frame(reading.spark, OBJECTS, []).selectExpr(
        *(name for name in classification.VERDICTS if name not in ("verdict", "reason")),
        "CAST(NULL AS STRING) AS reason",
        "CAST(NULL AS STRING) AS verdict",
    )
    versions = frame(reading.spark, DECISIONS, [])
    return Plan("cleanup", now, "", [], [], [], [], empty, versions, {}, {})


# -- the log's own objects -------------------------------------------------------------------------


def _log_files(
    warehouse: Warehouse,
    reclaim: Reclaim,
    reading: Reading,
    costs: Costs,
    *,
    before: datetime,
    log_age: timedelta,
) -> DataFrame:
    """Return the entries, checkpoints and announcements that no version that stays needs."""
    place = warehouse.location.child(MANIFEST)
    listed, noted = list_fully([Unit(place)], reading)
    costs.add_noted(noted, "key", "size")
    held = sorted(reclaim.entries)
    stays = [warehouse.log.entry(one).checkpoint for one in held if 0 < one < reclaim.floor]
    first = warehouse.log.entry(reclaim.floor)
    path = F.substring(F.col("key"), len(place.key) + 2, 2**31 - 1)
    number = F.regexp_extract("path", r"^_(?:versions|checkpoints)/(\d{20})(?:\.json)?$", 1)
    files = listed.withColumn("path", path).withColumn("number", number)
    # By the store's own clock as well: its newest entry is no older than what writers know.
    entries = files.filter(F.col("path").startswith("_versions/"))
    newest = entries.agg(F.max("modified_us")).collect()[0][0]
    limits = [to_micros(before) or 0]
    if newest is not None:
        limits.append(newest - log_age // timedelta(microseconds=1))
    old = f"modified_us < {min(limits)}"
    # Entries count down, so that the newest is listed first.
    entry = "CAST(18446744073709551615BD - CAST(number AS DECIMAL(20, 0)) AS BIGINT)"
    files = files.selectExpr(
        "path",
        "key",
        "size",
        "modified_us",
        "CASE WHEN number = '' THEN NULL WHEN startswith(path, '_versions/') "
        f"THEN {entry} ELSE CAST(number AS BIGINT) END AS version",
    )
    none = "(-1)"
    goes = (
        f"CASE WHEN startswith(path, '_versions/') AND version < {reclaim.floor} "
        f"AND version NOT IN {_listed(held) or none} THEN '{FileKind.MANIFEST.value}' "
        f"WHEN startswith(path, '_checkpoints/') AND version < {first.checkpoint} "
        f"AND version NOT IN {_listed(stays) or none} THEN '{FileKind.MANIFEST_LIST.value}' "
        f"WHEN startswith(path, '_transactions/') AND modified_us < {first.logged.at_us} "
        f"THEN '{FileKind.TRANSACTION.value}' END"
    )
    reason = FileReason.ONLY_REMOVED_VERSIONS.value
    return files.withColumn("kind", F.expr(goes)).filter(f"kind IS NOT NULL AND {old}").selectExpr(
        f"{_LOG} AS table_id", f"{_LOG} AS root_id", "path", "kind", "path AS key",
        "CAST(NULL AS STRING) AS stem", "size", "modified_us", "CAST(NULL AS STRING) AS branch",
        "version", f"'{reason}' AS reason", f"'{Verdict.DELETE.value}' AS verdict",
    )  # fmt: skip


def _listed(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})" if numbers else ""


def _log_row(log: DataFrame, reclaim: Reclaim, rows: int) -> TablePlan:
    counted = RemovalStats(old_versions_removed=rows)
    for row in (
        log.groupBy("kind").agg(F.count("*").alias("files"), F.sum("size").alias("bytes")).collect()
    ):
        counted += removal_of(row.kind, row.files, row.bytes)
    kept = reclaim.base.version - reclaim.floor + 1
    return TablePlan(_LOG, MANIFEST, versions_kept=kept, removal=counted, warnings=reclaim.warnings)


# -- execution -------------------------------------------------------------------------------------


def execute(
    plan: WarehousePlan,
    reading: Reading,
    *,
    breakers: Breakers | None = None,
    rate_limit: float | None = None,
    gate: Gate | None = None,
) -> Receipt:
    """Commit the reclaim, then delete.  Raises Conflict if somebody holds on to what was to go.

    A `gate` is asked first, before each commit to a table and before each batch of files, and under
    the log's name for what is no table's.
    """
    limits, warehouse, gate = breakers or Breakers(), plan.warehouse, gate or OpenGate()
    removal.check(plan.tables, limits)
    plan = _passing(plan, gate)
    if plan.changes:
        message = f"reclaim below {plan.reclaim.floor}"
        if plan.reclaim.floors:
            message = f"reclaim versions of {len(plan.reclaim.floors)} table(s) that were due"
        _as_system(warehouse).commit(plan.changes, base=plan.reclaim.base, message=message)
    reading = replace(reading, lake=WarehouseTables(_as_system(warehouse), plan.reclaim))
    done = removal.execute(plan.tables, reading, breakers=limits, rate_limit=rate_limit, gate=gate)
    costs = Costs()
    sound = {one.table_key for one in done.tables if one.error is None and not one.failed_deletes}
    log = _STOPPED
    door = Turnstile(gate, reading.clock, [MANIFEST])
    if door.lets(MANIFEST):
        with costs.stage(reading, "reclaim branches and the log"):
            stores = Stores(reading.opening)
            _forget_forks(plan, sound, stores)
            _forget_places(plan, stores)
            costs.add_requests(stores.requests())
            log = _delete_log(plan, reading, costs, rate_limit, door)
            if door.lets(MANIFEST):
                warehouse.marks.take_away(_done(plan, sound))
    tables = [replace(one, table_key=plan.named(one)) for one in done.tables]
    tables.sort(key=lambda one: one.table_key)
    return replace(
        done,
        tables=[*tables, log],
        requests=removal.added(done.requests, costs.requests),
        seconds=removal.added(done.seconds, costs.seconds),
    )


def _passing(plan: WarehousePlan, gate: Gate) -> WarehousePlan:
    """Return the plan without tables that the gate is closed for: their floors stay, too."""
    tables = closed(plan.tables, gate)
    numbers = _names(plan.reclaim)
    left = {
        numbers[one.table_key] for one in tables.tables if one.error_kind == ErrorKind.STOPPED.value
    }
    floors = {number: floor for number, floor in plan.reclaim.floors.items() if number not in left}
    return replace(plan, tables=tables, reclaim=replace(plan.reclaim, floors=floors))


def _done(plan: WarehousePlan, sound: set[str]) -> list[str]:
    """Return the marks of tables that have been cleaned, or are none any more."""
    numbers = _names(plan.reclaim)
    failed = {
        numbers[one.table_key]
        for one in plan.tables.tables
        if one.table_key in numbers and one.table_key not in sound
    }
    return [name for name in plan.marks if name.partition(".")[0] not in failed]


def _as_system(warehouse: Warehouse) -> Warehouse:
    return replace(warehouse, actor=warehouse.actor or SYSTEM)


def _forget_forks(plan: WarehousePlan, sound: set[str], stores: Stores) -> None:
    """Take away the refs of forks whose files are gone; longest names first, so children before."""
    keys = {one.table_id: one.table_key for one in plan.tables.tables}
    numbers = _names(plan.reclaim)
    roots = {root.root_id: root for root in plan.tables.roots}
    begin = f"_refs/branches/{forks.PREFIX}"
    rows = (
        plan.tables.files.filter(F.col("path").startswith(begin))
        .select("table_id", "root_id", "path")
        .collect()
    )
    for row in sorted(rows, key=lambda one: -len(one.path)):
        pins = plan.reclaim.lance.get(numbers.get(keys.get(row.table_id, ""), ""))
        name = row.path.rpartition("/")[2].removesuffix(".json")
        if pins is not None and pins.lets_go(name) and keys[row.table_id] in sound:
            root = roots[row.root_id]
            hint = f"tree/{name}/_versions/{HINT}"
            stores(root.location).delete([root.key(hint), root.key(row.path)])
            stores(root.location).prune_directory(root.key(f"tree/{name}"))


def _forget_places(plan: WarehousePlan, stores: Stores) -> None:
    """Take away what is left of tables that the log has forgotten; of those elsewhere, our mark."""
    for number in (*plan.emptied, *plan.reclaim.forget):
        table = Location.parse(plan.reclaim.table(number).location)
        if number in plan.reclaim.forget:
            plan.warehouse.unmark(plan.reclaim.table(number))
            continue
        place = table.child(OURS)
        store = stores(place)
        keys = [key for batch in store.list(place.key) for key in batch.column("key").to_pylist()]
        keys += (table.child(path).key for path in plan.left.get(number, ()))
        for start in range(0, len(keys), DELETE_BATCH_MAX):
            store.delete(keys[start : start + DELETE_BATCH_MAX])
        store.prune_directory(place.key)


def _delete_log(
    plan: WarehousePlan,
    reading: Reading,
    costs: Costs,
    rate_limit: float | None,
    door: Turnstile,
) -> TableReceipt:
    """Delete the log's own old objects; what is late is left to the next run."""
    if not door.lets(MANIFEST):
        return _STOPPED
    warehouse = plan.warehouse
    root = Root(_LOG, _LOG, warehouse.location.child(MANIFEST))
    pace = Pace(1, rate_limit, reading.clock, door.until)
    done = deletion.delete_in_order(plan.log, [root], reading.opening, pace).collect()
    costs.add_noted(done, "kind", "files")
    removed, failed, example = RemovalStats(), 0, ""
    for row in done:
        if row.note is None and row.outcome == Deletion.DELETED.value:
            removed += removal_of(row.kind, row.files, row.bytes)
        elif row.note is None and row.outcome == Deletion.FAILED.value:
            failed, example = failed + row.files, row.error
    if any(row.outcome == deletion.LATE for row in done) or not door.lets(MANIFEST):
        return replace(_STOPPED, removed=removed, failed_deletes=failed)
    rows = _old_rows(plan.reclaim, warehouse, plan.log_before)
    warehouse.log.handler.forget(rows)
    removed += RemovalStats(old_versions_removed=len(rows))
    receipt = TableReceipt(MANIFEST, removed, failed)
    if failed:
        message = f"{failed} file(s) could not be deleted ({example}); run again to retry them"
        receipt = replace(receipt, error=message, error_kind=ErrorKind.STORAGE.value)
    return receipt


def _old_rows(reclaim: Reclaim, warehouse: Warehouse, before: datetime) -> list[int]:
    """Return the versions that a log in a database is to forget; in a store they are files."""
    held, handler = reclaim.entries, warehouse.log.handler
    if isinstance(handler, StoreHandler):
        return []
    try:
        below = min(reclaim.floor, warehouse.version_at(before, reclaim.base.manifest))
    except NotFound:
        return []
    return [one for one in handler.versions() if one < below and one not in held]
