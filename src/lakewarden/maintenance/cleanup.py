"""Remove old versions and the files that only they use; remove files that no version names.

Both are one plan: `remove-orphans` is cleanup with a policy that keeps every version.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, UsageError
from lakewarden.maintenance.fleet import Targets
from lakewarden.maintenance.plan import Plan, TablePlan
from lakewarden.maintenance.safety import UNVERIFIED_AFTER, check_orphan_age, check_unverified_age
from lakewarden.maintenance.survey import (
    Costs,
    Reading,
    Scope,
    Survey,
    TableState,
    hold_back,
    survey,
)
from lakewarden.model import (
    STATS_FIELD,
    FileKind,
    FileReason,
    RemovalStats,
    Verdict,
    format_duration,
)
from lakewarden.pipeline import classification
from lakewarden.pipeline.frames import from_text, pin
from lakewarden.pipeline.history import Retention
from lakewarden.retention import Policy
from lakewarden.verdict import Margin

#: Missing files that an error names.
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What the user asked for."""

    policy: Policy | None
    unverified_after: timedelta = UNVERIFIED_AFTER
    delete_unverified: bool = False
    age_from_commit: bool = False

    def __post_init__(self) -> None:
        if self.unverified_after < timedelta(0):
            raise UsageError(ErrorKind.USAGE, "a duration cannot be negative; write 0s for none")
        if self.policy is not None and not self.delete_unverified:
            check_unverified_age(self.unverified_after)

    def describe(self) -> str:
        if self.policy is None:
            return f"remove files no version names, older than {format_duration(self.unverified_after)}"
        words = self.policy.describe()
        if self.delete_unverified:
            words += "; and files no version names, whatever their age"
        return words


def orphans(older_than: timedelta, *, unsafe_below_floor: bool = False) -> Cleanup:
    """Return the request that removes only files no version names."""
    check_orphan_age(older_than, unsafe_below_floor=unsafe_below_floor)
    return Cleanup(policy=None, unverified_after=older_than)


def plan(targets: Targets, request: Cleanup, reading: Reading, *, now: datetime) -> Plan:
    """Decide what goes and why.  Nothing is changed."""
    costs = Costs()
    retention = Retention(request.policy, now, request.unverified_after)
    found = survey(Scope(targets, retention, request.age_from_commit), reading, costs)
    margin = Margin(now, request.unverified_after, request.delete_unverified)
    with costs.stage(reading, "judge"):
        judged = pin(
            classification.classify(
                found.objects,
                found.references,
                found.roots,
                margin,
                stems=found.stems,
            )
        )
        tables = _summaries(judged, found, reading)
    if request.policy is not None:
        tables = [replace(table, orphans=0) for table in tables]
    return Plan(
        operation="remove-orphans" if request.policy is None else "cleanup",
        made_at=now,
        policy=request.describe(),
        tables=tables,
        roots=found.roots,
        units=found.units,
        directories=targets.directories,
        files=judged.filter(F.col("verdict") != classification.MISSING).select(
            *classification.VERDICTS
        ),
        versions=found.versions,
        requests=costs.requests,
        seconds=costs.seconds,
    )


def _summaries(judged: DataFrame, found: Survey, reading: Reading) -> list[TablePlan]:
    counted: dict[int, list[Any]] = defaultdict(list)
    rows = (
        judged.groupBy("table_id", "verdict", "reason", "kind")
        .agg(F.count(F.lit(1)).alias("files"), F.sum("size").alias("bytes"))
        .collect()
    )
    for row in rows:
        counted[row.table_id].append(row)
    states = found.tables
    if any(row.verdict == classification.MISSING for row in rows):
        damage = _damage(classification.really_missing(judged, found.roots, reading.opening))
        states = hold_back(states, damage)
    return [_summary(state, counted[state.table_id]) for state in states]


def _damage(lost: DataFrame) -> dict[int, LakewardenError]:
    """Say, for every table whose kept versions name missing files, what is missing."""
    rows = (
        lost.groupBy("by_root")
        .agg(
            F.count(F.lit(1)).alias("files"),
            F.slice(F.sort_array(F.collect_list("key")), 1, _EXAMPLES).alias("examples"),
            F.max("by_version").alias("version"),
            F.max("note").alias("failed"),
        )
        .collect()
    )
    return {
        row.by_root: from_text(row.failed)
        if row.failed
        else Damaged(
            ErrorKind.DAMAGED_VERSION,
            f"{row.files} file(s) that kept versions name do not exist (version {row.version}: "
            f"{', '.join(row.examples)}); nothing goes: restore them, or remove those versions",
        )
        for row in rows
    }


def _summary(state: TableState, rows: list[Any]) -> TablePlan:
    stays: dict[str, tuple[int, int]] = {}
    removal, versions_kept, orphans = RemovalStats(), 0, 0
    for row in rows:
        if row.kind == FileKind.MANIFEST.value and row.verdict == Verdict.KEEP.value:
            versions_kept += row.files
        if row.verdict == classification.MISSING:
            continue
        if row.verdict == Verdict.DELETE.value:
            removal += removal_of(row.kind, row.files, row.bytes)
            orphans += row.files if row.reason != FileReason.ONLY_REMOVED_VERSIONS else 0
        elif not (row.reason == FileReason.UNKNOWN_KIND and row.kind != FileKind.UNKNOWN):
            files, size = stays.get(row.reason, (0, 0))
            stays[row.reason] = (files + row.files, size + row.bytes)
    in_use = stays.get(FileReason.IN_USE, (0, 0))
    young = stays.get(FileReason.UNVERIFIED_YOUNG, (0, 0))
    held = state.error is not None or not state.changes
    return TablePlan(
        table_id=state.table_id,
        table_key=state.root.location.uri,
        objects=state.seen.objects,
        versions_kept=versions_kept,
        removal=RemovalStats() if held else removal,
        orphans=0 if held else orphans,
        files_in_use=in_use[0],
        bytes_in_use=in_use[1],
        kept_unverified=young[0],
        bytes_unverified=young[1],
        kept_unknown_age=stays.get(FileReason.UNKNOWN_AGE, (0, 0))[0],
        kept_unknown_kind=stays.get(FileReason.UNKNOWN_KIND, (0, 0))[0],
        refs_mark=state.seen.refs_mark,
        manifests_mark=state.seen.manifests_mark,
        uses=tuple(sorted(state.uses)),
        skipped=None if state.changes else "protected: read, not changed",
        error=None if state.error is None else state.error.message,
        error_kind=None if state.error is None else state.error.kind.value,
        warnings=state.warnings,
    )


def removal_of(kind: str, files: int, size: int) -> RemovalStats:
    """Count files of one kind as removed."""
    counts = {field.name: 0 for field in fields(RemovalStats)}
    counts[STATS_FIELD[FileKind(kind)]] = files
    counts["bytes_removed"] = size
    if kind == FileKind.MANIFEST.value:
        counts["old_versions_removed"] = files
    return RemovalStats(**counts)
