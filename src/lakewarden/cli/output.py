"""Renders plans, receipts and errors: the same facts as text and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from lakewarden.errors import LakewardenError
from lakewarden.model import Format, RemovalStats

if TYPE_CHECKING:
    from lakewarden.formats.iceberg.table import SnapshotLook
    from lakewarden.formats.lance.table import Look
    from lakewarden.maintenance.plan import Plan, TablePlan
    from lakewarden.maintenance.removal import Receipt
    from lakewarden.storage.contract import CheckOutcome

#: Lines of a listing that a person reads; the rest is counted.
_VERSIONS_SHOWN = 12
_TABLES_SHOWN = 40
#: Versions are counted from one; snapshot ids are random and never this small.
_SNAPSHOT_IDS = 10**9


def size_text(size: int) -> str:
    """Say bytes the way people do: 1.9 TiB."""
    number, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{int(number)} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def to_stdout(text: str) -> None:
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


def to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def document(message_type: str, **facts: Any) -> str:
    """Return the one JSON document of a command."""
    return json.dumps({"message_type": message_type, **facts}, indent=2, default=_plain)


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def error_document(error: LakewardenError) -> str:
    return document(
        "error", kind=error.kind.value, message=error.message, exit_code=int(error.exit_code)
    )


# -- plans ---------------------------------------------------------------------------------------


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return one row per table with the field names of the documentation."""
    rows = []
    for table in plan.tables:
        row: dict[str, Any] = {"table_key": table.table_key, **asdict(table.removal)}
        row |= {
            "versions_kept": table.versions_kept,
            "files_in_use": table.files_in_use,
            "bytes_in_use": table.bytes_in_use,
            "orphans": table.orphans,
            "kept_unverified": table.kept_unverified,
            "kept_unknown_age": table.kept_unknown_age,
            "kept_unknown_kind": table.kept_unknown_kind,
            "failed_deletes": 0,
            "skipped": table.skipped,
            "error": table.error,
            "error_kind": table.error_kind,
            "warnings": list(table.warnings),
        }
        if table.format is Format.ICEBERG:
            row |= _iceberg_counts(table.removal, table.kept_unknown_age) | {
                "would_delete_count": table.removal.files_removed,
                "would_delete_bytes": table.removal.bytes_removed,
                "deleted_bytes": 0,
                "listed_count": table.objects if plan.operation == "remove-orphans" else None,
                "skipped_too_young_count": table.kept_unverified,
                "expired_refs": list(table.expired_refs),
                "metadata_location": table.metadata_location,
            }
        rows.append(_with_requests(row, plan.tables, plan.requests))
    return rows


def _iceberg_counts(removal: RemovalStats, unknown_age: int) -> dict[str, int]:
    """Return the counts by the names Iceberg's procedures and Lakekeeper give them."""
    return {
        "expired_snapshots_count": removal.old_versions_removed,
        "deleted_data_files_count": removal.data_files_removed,
        "deleted_position_delete_files_count": removal.position_delete_files_removed,
        "deleted_equality_delete_files_count": removal.equality_delete_files_removed,
        "deleted_manifest_files_count": removal.manifest_files_removed,
        "deleted_manifest_lists_count": removal.manifest_lists_removed,
        "deleted_statistics_files_count": removal.statistics_files_removed,
        "skipped_unknown_age_count": unknown_age,
    }


def plan_json(plan: Plan, kept: Iterable[Mapping[str, Any]]) -> str:
    return document(
        f"{plan.operation}_plan",
        policy=plan.policy,
        made_at=plan.made_at.isoformat(),
        tables=plan_rows(plan),
        kept_versions=list(kept),
        total=asdict(plan.removal),
        requests=dict(plan.requests),
        seconds=dict(plan.seconds),
    )


def plan_text(
    plan: Plan, kept: Sequence[Mapping[str, Any]], orphans: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the plan as people read it: what stays and why, what goes."""
    lines = [f"policy   {plan.policy}"]
    if plan.operation == "remove-orphans":
        kept = ()
    lines += _one_table(plan.tables[0], kept) if len(plan.tables) == 1 else _many_tables(plan)
    for row in orphans:
        lines.append(f"  {row['path']}   {_moment(row['modified'])}   {size_text(row['size'])}")
    unnamed = sum(table.orphans for table in plan.tables)
    if len(orphans) < unnamed and orphans:
        lines.append(f"  … and {unnamed - len(orphans):,} more")
    requests = ", ".join(f"{number} {kind}" for kind, number in sorted(plan.requests.items()))
    lines.append(f"cost     {requests or 'no requests'}; {sum(plan.seconds.values()):.1f} s")
    return "\n".join(lines)


def _one_table(table: TablePlan, kept: Sequence[Mapping[str, Any]]) -> list[str]:
    total = table.versions_kept + table.removal.old_versions_removed
    noun = "snapshot" if table.format is Format.ICEBERG else "version"
    lines = [f"keep     {table.versions_kept:,} of {count_text(total, noun)}"]
    for row in kept[:_VERSIONS_SHOWN]:
        when = _moment(row["modified"])
        name = version_name(row["version"], row["branch"])
        lines.append(f"  {name:<16} {when}   {row['reasons']}")
    if kept and table.versions_kept > len(kept[:_VERSIONS_SHOWN]):
        lines.append(f"  … and {table.versions_kept - len(kept[:_VERSIONS_SHOWN]):,} more")
    if table.expired_refs:
        lines.append(f"expire   {', '.join(table.expired_refs)} (tags and branches)")
    lines += removal_lines("remove", table.removal, noun)
    if table.orphans:
        lines.append(f"  of these {count_text(table.orphans, 'file')} that no version names")
    if table.kept_unverified:
        lines.append(
            f"keep     {count_text(table.kept_unverified, 'file')} that no version names, still young, "
            f"{size_text(table.bytes_unverified)}"
        )
    if table.kept_unknown_age:
        lines.append(f"keep     {count_text(table.kept_unknown_age, 'file')} of unknown age")
    if table.kept_unknown_kind:
        why = "hidden" if table.format is Format.ICEBERG else "of a kind Lance does not write"
        lines.append(f"keep     {count_text(table.kept_unknown_kind, 'file')} {why}")
    if table.skipped:
        lines.append(f"skipped  {table.skipped}")
    return lines


def _many_tables(plan: Plan) -> list[str]:
    lines = [f"tables   {len(plan.tables):,}"]
    interesting = sorted(
        (table for table in plan.tables if table.error is None and table.removal.files_removed),
        key=lambda table: -table.removal.bytes_removed,
    )
    for table in interesting[:_TABLES_SHOWN]:
        total = table.versions_kept + table.removal.old_versions_removed
        lines.append(
            f"  {table.table_key}   keep {table.versions_kept:,} of {total:,}, remove "
            f"{count_text(table.removal.files_removed, 'file')}, {size_text(table.removal.bytes_removed)}"
        )
    if len(interesting) > _TABLES_SHOWN:
        lines.append(
            f"  … and {len(interesting) - _TABLES_SHOWN:,} more tables with something to remove"
        )
    idle = len(plan.tables) - len(interesting) - len(plan.failed)
    if idle:
        lines.append(f"  {count_text(idle, 'table')} with nothing to remove")
    return lines + removal_lines("remove", plan.removal)


def removal_lines(verb: str, removal: RemovalStats, noun: str = "version") -> list[str]:
    """Say what goes, by kind."""
    if not removal.files_removed and not removal.old_versions_removed:
        return [f"{verb:<8} nothing"]
    kinds = (
        ("data", removal.data_files_removed),
        ("deletions", removal.deletion_files_removed),
        ("indices", removal.index_files_removed),
        ("transactions", removal.transaction_files_removed),
        ("manifests", removal.manifest_files_removed),
        ("temporary", removal.temporary_files_removed),
        ("position deletes", removal.position_delete_files_removed),
        ("equality deletes", removal.equality_delete_files_removed),
        ("manifest lists", removal.manifest_lists_removed),
        ("statistics", removal.statistics_files_removed),
        ("metadata", removal.metadata_files_removed),
    )
    versions = count_text(removal.old_versions_removed, noun)
    files = count_text(removal.files_removed, "file")
    return [
        f"{verb:<8} {versions}, {files}, {size_text(removal.bytes_removed)}",
        "  " + "   ".join(f"{name} {number:,}" for name, number in kinds if number),
    ]


# -- receipts ------------------------------------------------------------------------------------


def receipt_json(receipt: Receipt) -> str:
    rows = []
    for table in receipt.tables:
        row: dict[str, Any] = {"table_key": table.table_key, **asdict(table.removed)}
        row |= {
            name: getattr(table, name)
            for name in (
                "failed_deletes",
                "kept_unverified",
                "kept_unknown_age",
                "skipped",
                "error",
                "error_kind",
            )
        }
        if table.format is Format.ICEBERG:
            row |= _iceberg_counts(table.removed, table.kept_unknown_age) | {
                "deleted_count": table.removed.files_removed,
                "deleted_bytes": table.removed.bytes_removed,
                "failed_deletes_count": table.failed_deletes,
                "skipped_too_young_count": table.kept_unverified,
                "expired_refs": list(table.expired_refs),
            }
        rows.append(_with_requests(row, receipt.tables, receipt.requests))
    return document(
        f"{receipt.operation}_receipt",
        tables=rows,
        total=asdict(receipt.removed),
        failed_deletes=sum(table.failed_deletes for table in receipt.tables),
        requests=dict(receipt.requests),
        seconds=dict(receipt.seconds),
    )


def receipt_text(receipt: Receipt) -> str:
    lines = removal_lines("removed", receipt.removed)
    requests = ", ".join(f"{number} {kind}" for kind, number in sorted(receipt.requests.items()))
    lines.append(f"cost     {requests or 'no requests'}; {sum(receipt.seconds.values()):.1f} s")
    return "\n".join(lines)


def _with_requests(
    row: dict[str, Any], tables: Sequence[object], requests: Mapping[str, int]
) -> dict[str, Any]:
    # One request may serve many tables, so only a table on its own has a count of its own.
    return row | {"requests": dict(requests) if len(tables) == 1 else None}


# -- looks ---------------------------------------------------------------------------------------


def versions_text(seen: Look | SnapshotLook, limit: int | None) -> str:
    shown = seen.versions if limit is None else seen.versions[:limit]
    lines = [f"{'version':<16} written (UTC)      held by"]
    for version in shown:
        name = version_name(version.number, version.branch)
        notes = (["detached"] if version.detached else []) + seen.names_of(version)
        lines.append(f"{name:<16} {_moment(version.modified)}   {', '.join(notes)}".rstrip())
    if len(shown) < len(seen.versions):
        lines.append(f"… and {len(seen.versions) - len(shown):,} more; --limit 0 shows all")
    return "\n".join(lines)


def versions_json(key: str, seen: Look | SnapshotLook, limit: int | None) -> str:
    rows = [
        {
            "version": version.number,
            "branch": version.branch,
            "modified": version.modified.isoformat() if version.modified else None,
            "detached": version.detached,
            "held_by": seen.names_of(version),
        }
        for version in seen.versions[:limit]
    ]
    return document("versions", table_key=key, versions=rows)


def refs_text(seen: Look | SnapshotLook) -> str:
    lines = [
        f"tag      {tag.name:<20} {version_name(tag.version, tag.branch)}" for tag in seen.tags
    ]
    for branch in seen.branches:
        # A Lance branch starts from a version of its parent; an Iceberg branch is at a snapshot.
        verb = "from" if branch.parent else "at"
        start = version_name(branch.parent_version, branch.parent)
        lines.append(f"branch   {branch.name:<20} {verb} {start}")
    return "\n".join(lines) or "no tags and no branches"


def refs_json(key: str, seen: Look | SnapshotLook) -> str:
    return document(
        "refs",
        table_key=key,
        tags=[asdict(tag) for tag in seen.tags],
        branches=[asdict(branch) for branch in seen.branches],
    )


def version_name(number: int, branch: str) -> str:
    """Return v7, v7@branch, or an Iceberg snapshot's id, which is long enough to be known."""
    name = f"v{number}" if number < _SNAPSHOT_IDS else str(number)
    return name if branch in ("", "main") else f"{name}@{branch}"


def outcomes_text(outcomes: Sequence[CheckOutcome]) -> str:
    lines = [
        f"{'ok    ' if one.ok else 'BROKEN'}   {one.guarantee}"
        + (f" ({one.detail})" if one.detail else "")
        for one in outcomes
    ]
    broken = sum(not one.ok for one in outcomes)
    last = (
        f"{broken} of {len(outcomes)} guarantees are missing" if broken else "all guarantees hold"
    )
    return "\n".join([*lines, last])


def _moment(moment: datetime | None) -> str:
    return moment.strftime("%Y-%m-%d %H:%M") if moment else "age unknown     "
