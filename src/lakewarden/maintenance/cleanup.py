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

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, Refused, UsageError
from lakewarden.expiry import ExpiryPolicy
from lakewarden.formats.iceberg.target import CatalogTarget
from lakewarden.maintenance.fleet import Targets
from lakewarden.maintenance.iceberg import survey_iceberg
from lakewarden.maintenance.plan import Plan, TablePlan
from lakewarden.maintenance.safety import (
    UNVERIFIED_AFTER,
    check_orphan_age,
    check_unverified_age,
)
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
    MAIN,
    STATS_FIELD,
    FileKind,
    FileReason,
    Format,
    PrefixMismatch,
    RemovalStats,
    Verdict,
    format_duration,
)
from lakewarden.pipeline import classification, metadata
from lakewarden.pipeline.frames import NOTE_REQUESTS, from_text, pin, to_millis
from lakewarden.pipeline.history import Retention
from lakewarden.pipeline.metadata import Rule
from lakewarden.retention import MIN_AGE, OnTagged, Policy
from lakewarden.verdict import Margin

#: Missing files that an error names.
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for versions as the user gave them, before it is clear which formats they are for."""

    older_than: timedelta | None = None
    keep: int | None = None
    before_version: int | None = None
    versions: frozenset[int] | None = None
    on_tagged: OnTagged = OnTagged.ERROR
    min_age: timedelta = MIN_AGE
    expire_detached: bool = False
    branch: str = MAIN
    clean_referenced_branches: bool = False
    max_ref_age: timedelta | None = None
    min_snapshots_to_expire: int | None = None

    def for_targets(self, targets: Targets) -> tuple[Policy | None, ExpiryPolicy | None]:
        """Return the policy for the Lance tables and the one for the Iceberg tables."""
        lance = iceberg = None
        if targets.iceberg.tables:
            iceberg = self._iceberg()
        if targets.tables or targets.directories:
            lance = Policy(
                older_than=self.older_than,
                keep=self.keep,
                before_version=self.before_version,
                versions=self.versions,
                on_tagged=self.on_tagged,
                min_age=self.min_age,
                expire_detached=self.expire_detached,
                branch=self.branch,
                clean_referenced_branches=self.clean_referenced_branches,
            )
        return lance, iceberg

    def _iceberg(self) -> ExpiryPolicy:
        if self.before_version is not None:
            raise UsageError(
                ErrorKind.USAGE,
                "--before-version has no meaning for Iceberg, whose snapshot ids have no order; use "
                "--older-than, --keep or --versions",
            )
        if self.branch != MAIN:
            raise UsageError(
                ErrorKind.USAGE,
                "--branch is for Lance; Iceberg's expiry looks at every branch, each by its own "
                "retention",
            )
        return ExpiryPolicy(
            self.older_than,
            self.keep,
            self.versions,
            self.max_ref_age,
            self.min_snapshots_to_expire,
        )


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What the user asked for."""

    #: For Lance tables; None keeps every version.
    policy: Policy | None
    unverified_after: timedelta = UNVERIFIED_AFTER
    delete_unverified: bool = False
    age_from_commit: bool = False
    #: For Iceberg tables; None keeps every snapshot.
    expiry: ExpiryPolicy | None = None
    #: Somebody has decided that no writer takes longer than `unverified_after`.
    unsafe_below_floor: bool = False

    def __post_init__(self) -> None:
        if self.unverified_after < timedelta(0):
            raise UsageError(ErrorKind.USAGE, "a duration cannot be negative; write 0s for none")
        if self.policy is not None and not (self.delete_unverified or self.unsafe_below_floor):
            check_unverified_age(self.unverified_after)

    @property
    def only_orphans(self) -> bool:
        return self.policy is None and self.expiry is None

    def describe(self) -> str:
        """Say what was asked for; of the rules those that some target follows."""
        if self.only_orphans:
            return f"remove files no version names, older than {format_duration(self.unverified_after)}"
        if self.policy is None:
            assert self.expiry is not None
            return self.expiry.describe()
        words = self.policy.describe()
        if self.delete_unverified:
            words += "; and files no version names, whatever their age"
        return words if self.expiry is None else f"{words}; Iceberg: {self.expiry.describe()}"


def orphans(older_than: timedelta, *, unsafe_below_floor: bool = False) -> Cleanup:
    """Return the request that removes only files no version names."""
    check_orphan_age(older_than, unsafe_below_floor=unsafe_below_floor)
    return Cleanup(policy=None, unverified_after=older_than)


def plan(targets: Targets, request: Cleanup, reading: Reading, *, now: datetime) -> Plan:
    """Decide what goes and why.  Nothing is changed."""
    costs = Costs()
    found = _surveys(targets, request, reading, costs, now)
    margin = Margin(now, request.unverified_after, request.delete_unverified)
    with costs.stage(reading, "judge"):
        judged = pin(
            classification.classify(
                found.objects,
                found.references,
                margin,
                stems=found.stems,
            )
        )
        tables = _summaries(judged, found, reading, costs, targets.iceberg.prefix_mismatch)
    if not request.only_orphans:
        tables = [replace(table, orphans=0) for table in tables]
    return Plan(
        operation="remove-orphans" if request.only_orphans else "cleanup",
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
        expiry=request.expiry,
        held={
            table.table_id: (targets.iceberg.held or {})[CatalogTarget.parse(table.table_key)]
            for table in tables
            if targets.iceberg.held and table.format is Format.ICEBERG
        },
    )


def _surveys(
    targets: Targets, request: Cleanup, reading: Reading, costs: Costs, now: datetime
) -> Survey:
    """Read all targets, of both formats, into one survey."""
    parts: list[Survey] = []
    if targets.tables or targets.directories:
        retention = Retention(request.policy, now, request.unverified_after)
        parts.append(survey(Scope(targets, retention, request.age_from_commit), reading, costs))
    if targets.iceberg.tables:
        first = max((root.root_id + 1 for part in parts for root in part.roots), default=0)
        rule = Rule(request.expiry, to_millis(now))
        parts.append(survey_iceberg(targets.iceberg, rule, reading, costs, first_id=first))
    whole = parts[0]
    for part in parts[1:]:
        whole = Survey(
            [*whole.tables, *part.tables],
            [*whole.roots, *part.roots],
            [*whole.units, *part.units],
            whole.objects.unionByName(part.objects),
            whole.versions.unionByName(part.versions),
            whole.references.unionByName(part.references),
            whole.stems or part.stems,
        )
    return whole


def _summaries(
    judged: DataFrame,
    found: Survey,
    reading: Reading,
    costs: Costs,
    mismatch: PrefixMismatch,
) -> list[TablePlan]:
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
        lost = classification.really_missing(judged, found.references, found.roots, reading.opening)
        damage = _damage(lost)
        states = hold_back(states, damage)
    if mismatch is PrefixMismatch.ERROR and any(
        row.reason == FileReason.OTHER_PREFIX for row in rows
    ):
        states = hold_back(states, _mismatches(judged, found))
    if any(_is_stray_metadata(row) for row in rows):
        states = hold_back(states, _strangers(judged, found, reading, costs))
    return [_summary(state, counted[state.table_id]) for state in states]


def _is_stray_metadata(row: Any) -> bool:
    listed = row.reason not in (FileReason.IN_USE, FileReason.ONLY_REMOVED_VERSIONS)
    return bool(listed and row.kind == FileKind.METADATA.value)


def _mismatches(judged: DataFrame, found: Survey) -> dict[int, LakewardenError]:
    """Say of which tables a file is named with another scheme or authority than it is found by."""
    rows = (
        judged.filter(F.col("reason") == FileReason.OTHER_PREFIX.value)
        .groupBy("table_id")
        .agg(F.count(F.lit(1)).alias("files"), F.min_by("path", "path").alias("path"),
             F.first("root_id").alias("root_id"))
        .collect()
    )  # fmt: skip
    places = {root.root_id: root.location.uri for root in found.roots}
    return {
        row.table_id: Refused(
            ErrorKind.PREFIX_MISMATCH,
            f"{row.files} file(s) such as {places[row.root_id]}/{row.path} are named by the table with "
            "another scheme or authority; nothing goes: say what is the same with --equal-scheme or "
            "--equal-authority, or pass --prefix-mismatch ignore (keep them) or delete",
        )
        for row in rows
    }


def _strangers(
    judged: DataFrame, found: Survey, reading: Reading, costs: Costs
) -> dict[int, LakewardenError]:
    """Say of which tables the metadata that nothing names is that of another table."""
    uuids = {s.table_id: s.summary.uuid for s in found.tables if s.summary is not None}
    rows = metadata.strangers(judged, found.roots, uuids, reading.opening).collect()
    costs.add_noted(rows, "path", "root_id")
    return {
        row.table_id: Refused(
            ErrorKind.LOCATION_OVERLAP,
            f"{row.path} is metadata of another table ({row.found}), which shares this location; its "
            "files could be taken for orphans, so nothing goes: move one of the tables away",
        )
        if row.found
        else from_text(row.note)
        for row in rows
        if row.note != NOTE_REQUESTS
    }


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
    if state.summary is not None:
        versions_kept = state.summary.kept
        removal = replace(removal, old_versions_removed=state.summary.going)
    in_use = stays.get(FileReason.IN_USE, (0, 0))
    young = stays.get(FileReason.UNVERIFIED_YOUNG, (0, 0))
    held = state.error is not None or not state.changes
    return TablePlan(
        table_id=state.table_id,
        table_key=state.table_key,
        format=state.root.format,
        objects=state.seen.objects
        or sum(row.files for row in rows if row.verdict != classification.MISSING),
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
        skipped="protected: read, not changed" if not state.changes else _skipped(state),
        error=None if state.error is None else state.error.message,
        error_kind=None if state.error is None else state.error.kind.value,
        warnings=state.warnings,
        metadata_location=state.metadata_location,
        uuid=state.summary.uuid if state.summary else None,
        expired_refs=state.summary.expired_refs if state.summary else (),
        pending=state.summary.pending if state.summary else (),
        rivals=state.summary.rivals if state.summary else (),
    )


def _skipped(state: TableState) -> str | None:
    return state.summary.skipped if state.summary is not None else None


def removal_of(kind: str, files: int, size: int) -> RemovalStats:
    """Count files of one kind as removed."""
    counts = {field.name: 0 for field in fields(RemovalStats)}
    counts[STATS_FIELD[FileKind(kind)]] = files
    counts["bytes_removed"] = size
    if kind == FileKind.MANIFEST.value:
        counts["old_versions_removed"] = files
    return RemovalStats(**counts)
