"""The Python front door: plan and execute with a Spark session of the caller's.

import lakewarden

plan = lakewarden.plan_cleanup(spark, ["s3://lake/events.lance"], keep=10, older_than="14d")
plan.files.filter("verdict = 'delete'").show()
receipt = lakewarden.execute(spark, plan)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from pyspark.sql import SparkSession

from lakewarden.maintenance import cleanup, fleet, removal
from lakewarden.maintenance import plan as plans
from lakewarden.maintenance.cleanup import Cleanup
from lakewarden.maintenance.plan import Plan
from lakewarden.maintenance.removal import Receipt
from lakewarden.maintenance.safety import MIN_AGE, UNVERIFIED_AFTER, Breakers
from lakewarden.maintenance.survey import Reading
from lakewarden.model import MAIN, parse_duration
from lakewarden.pipeline.frames import ReadStores, Stores
from lakewarden.retention import OnTagged, Policy
from lakewarden.storage.opening import Opener
from lakewarden.world import SystemClock

Duration = timedelta | str
#: Tasks a stage is cut into, unless the caller knows better.
TASKS = 16


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
    recursive: bool = False,
    protect: Sequence[str] = (),
    exclude: Sequence[str] = (),
    storage_options: Mapping[str, str] | None = None,
    tasks: int = TASKS,
) -> Plan:
    """Plan the removal of old versions; the options are those of `lakewarden cleanup`."""
    policy = Policy(
        older_than=None if older_than is None else _duration(older_than),
        keep=keep,
        before_version=before_version,
        versions=None if versions is None else frozenset(versions),
        on_tagged=OnTagged(on_tagged),
        min_age=_duration(min_age),
        expire_detached=expire_detached,
        branch=branch,
        clean_referenced_branches=clean_referenced_branches,
    )
    request = Cleanup(policy, _duration(unverified_after), delete_unverified, age_from_commit)
    where = _targets(targets, recursive=recursive, protect=protect, exclude=exclude)
    reading = _reading(spark, storage_options, tasks)
    return cleanup.plan(where, request, reading, now=reading.clock.now())


def plan_orphans(
    spark: SparkSession,
    targets: str | Sequence[str],
    *,
    older_than: Duration = UNVERIFIED_AFTER,
    unsafe_below_floor: bool = False,
    recursive: bool = False,
    protect: Sequence[str] = (),
    exclude: Sequence[str] = (),
    storage_options: Mapping[str, str] | None = None,
    tasks: int = TASKS,
) -> Plan:
    """Plan the removal of files that no version names; see `lakewarden remove-orphans`."""
    request = cleanup.orphans(_duration(older_than), unsafe_below_floor=unsafe_below_floor)
    where = _targets(targets, recursive=recursive, protect=protect, exclude=exclude)
    reading = _reading(spark, storage_options, tasks)
    return cleanup.plan(where, request, reading, now=reading.clock.now())


def execute(
    spark: SparkSession,
    plan: Plan,
    *,
    breakers: Breakers | None = None,
    rate_limit: float | None = None,
    storage_options: Mapping[str, str] | None = None,
    tasks: int = TASKS,
) -> Receipt:
    """Delete what the plan says; tables that changed since are left alone and say so."""
    reading = _reading(spark, storage_options, tasks)
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
    targets: str | Sequence[str], *, recursive: bool, protect: Sequence[str], exclude: Sequence[str]
) -> fleet.Targets:
    named = [targets] if isinstance(targets, str) else list(targets)
    return fleet.parse_targets(named, recursive=recursive, protect=protect, exclude=exclude)


def _reading(spark: SparkSession, options: Mapping[str, str] | None, tasks: int) -> Reading:
    return Reading(spark, Opener(dict(options or {})), SystemClock(), tasks)


def _duration(value: Duration) -> timedelta:
    return parse_duration(value) if isinstance(value, str) else value
