"""The Python front door: plan and execute with a Spark session of the caller's.

import lakewarden

plan = lakewarden.plan_cleanup(spark, ["s3://lake/events.lance"], keep=10, older_than="14d")
plan.files.filter("verdict = 'delete'").show()
receipt = lakewarden.execute(spark, plan)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, overload

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from lakewarden import packing
from lakewarden.errors import LakewardenError
from lakewarden.formats.iceberg.paths import Equality
from lakewarden.maintenance import cleanup, fleet, removal
from lakewarden.maintenance import optimize as optimizing
from lakewarden.maintenance import plan as plans
from lakewarden.maintenance import warehouse as warehouses
from lakewarden.maintenance.cleanup import Cleanup
from lakewarden.maintenance.fleet import IcebergTargets
from lakewarden.maintenance.optimize import Plan as OptimizePlan
from lakewarden.maintenance.optimize import Receipt as OptimizeReceipt
from lakewarden.maintenance.places import Alone, Place, Together
from lakewarden.maintenance.plan import Plan
from lakewarden.maintenance.removal import Receipt
from lakewarden.maintenance.safety import UNVERIFIED_AFTER, Breakers
from lakewarden.maintenance.survey import Reading
from lakewarden.maintenance.warehouse import WarehousePlan
from lakewarden.model import MAIN, Guard, PrefixMismatch, parse_duration
from lakewarden.packing import DELETIONS
from lakewarden.pipeline.frames import ReadStores, Stores, slots
from lakewarden.retention import MIN_AGE, OnTagged
from lakewarden.storage.opening import Opener
from lakewarden.warehouse import reclaiming
from lakewarden.warehouse.warehouse import Warehouse
from lakewarden.world import SystemClock

_LOG = logging.getLogger("lakewarden")
Duration = timedelta | str
#: Settings for the catalogs of `iceberg://` targets, or open PyIceberg catalogs by name.
Catalogs = Mapping[str, Any]


def plan_cleanup(
    spark: SparkSession,
    targets: str | Sequence[str],
    *,
    older_than: Duration | None = None,
    keep: int | None = None,
    before_version: int | None = None,
    versions: Iterable[int] | None = None,
    on_tagged: str = "error",
    min_age: Duration = MIN_AGE,
    unverified_after: Duration = UNVERIFIED_AFTER,
    delete_unverified: bool = False,
    branch: str = MAIN,
    clean_referenced_branches: bool = False,
    expire_detached: bool = False,
    age_from_commit: bool = False,
    max_ref_age: Duration | None = None,
    min_snapshots_to_expire: int | None = None,
    recursive: bool = False,
    protect: Sequence[str] = (),
    exclude: Sequence[str] = (),
    catalog: Catalogs | None = None,
    guard: str = Guard.CATALOG,
    storage_options: Mapping[str, str] | None = None,
    tasks: int | None = None,
) -> Plan:
    """Plan the removal of old versions; the options are those of `lakewarden cleanup`."""
    where = _targets(
        targets, recursive=recursive, protect=protect, exclude=exclude, guard=Guard(guard)
    )
    rules = cleanup.Rules(
        older_than=None if older_than is None else _duration(older_than),
        keep=keep,
        before_version=before_version,
        versions=None if versions is None else frozenset(versions),
        on_tagged=OnTagged(on_tagged),
        min_age=_duration(min_age),
        expire_detached=expire_detached,
        branch=branch,
        clean_referenced_branches=clean_referenced_branches,
        max_ref_age=None if max_ref_age is None else _duration(max_ref_age),
        min_snapshots_to_expire=min_snapshots_to_expire,
    )
    policy, expiry = rules.for_targets(where)
    request = Cleanup(
        policy, _duration(unverified_after), delete_unverified, age_from_commit, expiry
    )
    reading = _reading(spark, where, catalog, storage_options, tasks)
    return cleanup.plan(where, request, reading, now=reading.clock.now())


def plan_warehouse_cleanup(
    spark: SparkSession,
    warehouse: Warehouse,
    *,
    older_than: Duration | None = None,
    keep: int | None = None,
    before_version: int | None = None,
    due: bool = False,
    min_age: Duration = MIN_AGE,
    unverified_after: Duration = UNVERIFIED_AFTER,
    delete_unverified: bool = False,
    tasks: int | None = None,
) -> WarehousePlan:
    """Plan the removal of old versions of a warehouse, in all its tables and in its log.

    With `due` only tables that are due are cleaned, each as its own properties say.
    """
    margins: dict[str, Any] = {
        "unverified_after": _duration(unverified_after),
        "delete_unverified": delete_unverified,
    }
    if due:
        request = warehouses.Request.for_due(warehouse, _duration(min_age), **margins)
    else:
        age = None if older_than is None else _duration(older_than)
        rules = reclaiming.Rules(age, keep, before_version, _duration(min_age))
        request = warehouses.Request(rules, **margins)
    reading = Reading(spark, warehouse.opener, SystemClock(), tasks or slots(spark))
    return warehouses.plan(warehouse, request, reading, now=reading.clock.now())


def keep_clean(
    spark: SparkSession,
    warehouse: Warehouse,
    *,
    min_age: Duration = MIN_AGE,
    tasks: int | None = None,
) -> None:
    """Clean tables in this session, in the background, when commits of `warehouse` make them due.

    What fails is logged and left to the next that is due, or to `lakewarden cleanup --due`.
    """
    running = ThreadPoolExecutor(1, thread_name_prefix="lakewarden-cleanup")

    def clean() -> None:
        try:
            # Not the writer's object: its view of the warehouse is its own.
            mine = replace(warehouse, on_due=None, formats={})
            warehouses.publish(mine)
            plan = plan_warehouse_cleanup(spark, mine, due=True, min_age=min_age, tasks=tasks)
            execute(spark, plan, tasks=tasks)
        except (LakewardenError, PySparkException) as error:
            _LOG.warning("tables that are due were not cleaned: %s", error)

    def start(_due: Sequence[str]) -> None:
        running.submit(clean)

    warehouse.on_due = start


def plan_orphans(
    spark: SparkSession,
    targets: str | Sequence[str],
    *,
    older_than: Duration = UNVERIFIED_AFTER,
    unsafe_below_floor: bool = False,
    prefix_mismatch: str = PrefixMismatch.ERROR,
    equal_schemes: Mapping[str, str] | None = None,
    equal_authorities: Mapping[str, str] | None = None,
    inventory: str | None = None,
    location: str | None = None,
    recursive: bool = False,
    protect: Sequence[str] = (),
    exclude: Sequence[str] = (),
    catalog: Catalogs | None = None,
    guard: str = Guard.CATALOG,
    storage_options: Mapping[str, str] | None = None,
    tasks: int | None = None,
) -> Plan:
    """Plan the removal of files that no version names; see `lakewarden remove-orphans`."""
    request = cleanup.orphans(_duration(older_than), unsafe_below_floor=unsafe_below_floor)
    where = _targets(
        targets,
        recursive=recursive,
        protect=protect,
        exclude=exclude,
        guard=Guard(guard),
        equality=Equality(equal_schemes or {}, equal_authorities or {}),
        prefix_mismatch=PrefixMismatch(prefix_mismatch),
        inventory=inventory,
        below=location,
    )
    reading = _reading(spark, where, catalog, storage_options, tasks)
    return cleanup.plan(where, request, reading, now=reading.clock.now())


def plan_optimize(
    spark: SparkSession,
    targets: str | Sequence[str] | Warehouse,
    *,
    target_bytes: int | None = None,
    min_files: int | None = None,
    deletions: float = DELETIONS,
    max_bytes: int | None = None,
    where: str | None = None,
    tables: Sequence[str] = (),
    exclude: Sequence[str] = (),
    recursive: bool = False,
    branch: str = MAIN,
    catalog: Catalogs | None = None,
    storage_options: Mapping[str, str] | None = None,
    concurrency: int = optimizing.CONCURRENCY,
) -> OptimizePlan:
    """Plan fewer and larger files and complete indices; see `lakewarden optimize`."""
    request = optimizing.Request(
        packing.Rules(target_bytes, min_files, deletions, max_bytes), where, concurrency
    )
    if isinstance(targets, Warehouse):
        place: Place = Together(targets, branch, tuple(tables), tuple(exclude))
        reading = Reading(spark, targets.opener, SystemClock(), slots(spark))
        return optimizing.plan(place, request, reading)
    targeted = _targets(targets, recursive=recursive, protect=(), exclude=exclude)
    reading = _reading(spark, targeted, catalog, storage_options, None)
    assert isinstance(reading.opening, Opener)
    place = Alone(targeted, reading.opening, reading.lake, tuple(tables))
    return optimizing.plan(place, request, reading)


@overload
def execute(spark: SparkSession, plan: OptimizePlan) -> OptimizeReceipt: ...


@overload
def execute(
    spark: SparkSession,
    plan: Plan | WarehousePlan,
    *,
    breakers: Breakers | None = None,
    rate_limit: float | None = None,
    catalog: Catalogs | None = None,
    storage_options: Mapping[str, str] | None = None,
    tasks: int | None = None,
) -> Receipt: ...


def execute(
    spark: SparkSession,
    plan: Plan | WarehousePlan | OptimizePlan,
    *,
    breakers: Breakers | None = None,
    rate_limit: float | None = None,
    catalog: Catalogs | None = None,
    storage_options: Mapping[str, str] | None = None,
    tasks: int | None = None,
) -> Receipt | OptimizeReceipt:
    """Do what the plan says; tables that changed since are left alone, or tried again, and say so."""
    if isinstance(plan, OptimizePlan):
        reading = Reading(spark, Opener(), SystemClock(), tasks or slots(spark))
        return optimizing.execute(plan, reading)
    if isinstance(plan, WarehousePlan):
        reading = Reading(spark, plan.warehouse.opener, SystemClock(), tasks or slots(spark))
        return warehouses.execute(plan, reading, breakers=breakers, rate_limit=rate_limit)
    where = fleet.targets_of([table.table_key for table in plan.tables])
    reading = _reading(spark, where, catalog, storage_options, tasks)
    return removal.execute(plan, reading, breakers=breakers, rate_limit=rate_limit)


def load_plan(
    spark: SparkSession, directory: str, *, storage_options: Mapping[str, str] | None = None
) -> Plan:
    """Read a plan that was written with `--save-plan` or `save_plan`."""
    return plans.load(spark, directory, ReadStores(Opener(dict(storage_options or {}))))


def save_plan(
    plan: Plan, directory: str, *, storage_options: Mapping[str, str] | None = None
) -> None:
    """Write a plan to a new directory."""
    plans.save(plan, directory, Stores(Opener(dict(storage_options or {}))))


def _targets(
    targets: str | Sequence[str],
    *,
    recursive: bool,
    protect: Sequence[str],
    exclude: Sequence[str],
    **iceberg: Any,
) -> fleet.Targets:
    named = [targets] if isinstance(targets, str) else list(targets)
    return fleet.parse_targets(
        named,
        recursive=recursive,
        protect=protect,
        exclude=exclude,
        iceberg=IcebergTargets(**iceberg),
    )


def _reading(
    spark: SparkSession,
    targets: fleet.Targets,
    catalog: Catalogs | None,
    options: Mapping[str, str] | None,
    tasks: int | None,
) -> Reading:
    lake = None
    if targets.iceberg.tables:
        properties = {k: v for k, v in (catalog or {}).items() if isinstance(v, str)}
        opened = {k: v for k, v in (catalog or {}).items() if not isinstance(v, str)}
        lake = fleet.open_lake(properties, opened)
    opener = Opener(targets.iceberg.storage_options(lake) | dict(options or {}))
    return Reading(spark, opener, SystemClock(), tasks or slots(spark), lake=lake)


def _duration(value: Duration) -> timedelta:
    return parse_duration(value) if isinstance(value, str) else value
