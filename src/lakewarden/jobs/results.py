"""PURE: what a task tells about its run, under the names that operators of other systems know."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from lakewarden.errors import ErrorKind, LakewardenError
from lakewarden.jobs.scheduling import Decision
from lakewarden.jobs.tasks import Failure
from lakewarden.maintenance.optimize import Row
from lakewarden.maintenance.plan import TablePlan
from lakewarden.maintenance.removal import TableReceipt
from lakewarden.model import RemovalStats

#: Errors that come back until somebody does something about the table, its settings or its place.
_PERMANENT = frozenset(
    {
        ErrorKind.USAGE,
        ErrorKind.EMPTY_POLICY,
        ErrorKind.UNKNOWN_SCHEME,
        ErrorKind.UNKNOWN_OPTION,
        ErrorKind.NOT_A_TABLE,
        ErrorKind.CORRUPT_MANIFEST,
        ErrorKind.UNSUPPORTED_FEATURE,
        ErrorKind.DAMAGED_REF,
        ErrorKind.DAMAGED_VERSION,
        ErrorKind.TAGGED_VERSION,
        ErrorKind.LOCATION_OVERLAP,
        ErrorKind.RETENTION_TOO_SHORT,
        ErrorKind.BREAKER,
        ErrorKind.GC_DISABLED,
        ErrorKind.PREFIX_MISMATCH,
        ErrorKind.INCOMPATIBLE,
        ErrorKind.HISTORY_GAP,
        ErrorKind.NEWER_STAMP,
        ErrorKind.NOT_A_WAREHOUSE,
        ErrorKind.BAD_NAME,
        ErrorKind.DRIFT,
        ErrorKind.IN_WAREHOUSE,
        ErrorKind.QUEUE_CONFIG,
    }
)

#: What something looks like that vanishes while somebody reads it.
_DAMAGE = frozenset(
    {
        ErrorKind.CORRUPT_MANIFEST,
        ErrorKind.DAMAGED_REF,
        ErrorKind.DAMAGED_VERSION,
        ErrorKind.HISTORY_GAP,
    }
)

#: Of why versions stay, a message says so much.
_REASONS_SHOWN = 5
_MILLISECOND = timedelta(milliseconds=1)


def failure_of(kind: ErrorKind | str | None) -> Failure:
    """Tell errors that may pass from those that stay."""
    return Failure.PERMANENT if kind in _PERMANENT else Failure.TRANSIENT


def is_damage(kind: ErrorKind | str | None) -> bool:
    """Tell whether something that must be there was not, or could not be read."""
    return kind in _DAMAGE


def failure_in(error: LakewardenError) -> Failure:
    return failure_of(error.kind)


def skipped(reason: str) -> dict[str, Any]:
    """Return the result of a task that had nothing to do."""
    return {"skipped": reason}


def expired(planned: TablePlan, done: TableReceipt | None) -> dict[str, Any]:
    """Return what expiry did to a table, or before it did anything, what it is about to."""
    gone = RemovalStats() if done is None else done.removed
    return {
        "expired_snapshots_count": gone.old_versions_removed,
        "expired_refs": list(() if done is None else done.expired_refs),
        **_deleted(gone),
        "failed_deletes_count": 0 if done is None else done.failed_deletes,
        "kept_snapshots_count": planned.versions_kept,
        "skipped": planned.skipped,
    }


def kept(reasons: Mapping[str, int]) -> dict[str, Any]:
    """Return why versions stay, for a run that let none go; one may have several reasons."""
    return {"kept_snapshots_reasons": dict(reasons)} if reasons else {}


def kept_message(result: Mapping[str, Any]) -> str:
    """Say the same in words, to be added to a message."""
    reasons = result.get("kept_snapshots_reasons", {})
    shown = [f"{number} {reason}" for reason, number in list(reasons.items())[:_REASONS_SHOWN]]
    if not shown:
        return ""
    shown += ["…"] if len(reasons) > len(shown) else []
    number = result["kept_snapshots_count"]
    return f"; {number} version{' stays' if number == 1 else 's stay'} ({', '.join(shown)})"


def _deleted(gone: RemovalStats) -> dict[str, Any]:
    return {
        "deleted_data_files_count": gone.data_files_removed,
        "deleted_position_delete_files_count": gone.position_delete_files_removed,
        "deleted_equality_delete_files_count": gone.equality_delete_files_removed,
        "deleted_manifest_files_count": gone.manifest_files_removed,
        "deleted_manifest_lists_count": gone.manifest_lists_removed,
        "deleted_statistics_files_count": gone.statistics_files_removed,
        "deleted_metadata_files_count": gone.metadata_files_removed,
        "deleted_deletion_files_count": gone.deletion_files_removed,
        "deleted_index_files_count": gone.index_files_removed,
        "deleted_transaction_files_count": gone.transaction_files_removed,
        "deleted_bytes": gone.bytes_removed,
    }


def orphans(
    planned: TablePlan, done: TableReceipt | None, older_than: timedelta, *, dry_run: bool
) -> dict[str, Any]:
    """Return what removal of orphan files found and did."""
    gone = RemovalStats() if done is None else done.removed
    return {
        "dry_run": dry_run,
        "older_than_ms": older_than // _MILLISECOND,
        "would_delete_count": planned.removal.files_removed,
        "would_delete_bytes": planned.removal.bytes_removed,
        "deleted_count": gone.files_removed,
        "deleted_bytes": gone.bytes_removed,
        "failed_delete_count": 0 if done is None else done.failed_deletes,
        "listed_count": planned.objects,
        "referenced_count": planned.files_in_use,
        "referenced_bytes": planned.bytes_in_use,
        "skipped_too_young_count": planned.kept_unverified,
        "skipped_unknown_age_count": planned.kept_unknown_age,
        "skipped_unknown_kind_count": planned.kept_unknown_kind,
    }


def shares(requests: Mapping[str, int], number: int) -> list[dict[str, int]]:
    """Divide the requests of a run among its tasks: all shares together are all of them."""
    return [
        {
            kind: count // number + (step < count % number)
            for kind, count in sorted(requests.items())
            if count // number + (step < count % number)
        }
        for step in range(number)
    ]


def scheduled(decision: Decision, at: datetime | None) -> dict[str, Any]:
    """Return what was decided about the next run."""
    return {
        "next_run_at": None if at is None else at.isoformat(),
        "next_run_reason": decision.reason,
        "rate_bytes_per_second": decision.rate,
    }


def optimized(row: Row) -> dict[str, Any]:
    """Return what optimize did to a table."""
    told = row.json()
    told.pop("table_key")
    return told


def expiry_message(result: Mapping[str, Any]) -> str:
    files = sum(
        value for name, value in result.items() if name.startswith("deleted_") and "files" in name
    ) + result.get("deleted_manifest_lists_count", 0)
    return (
        f"{result['expired_snapshots_count']} versions expired, {files} files and "
        f"{result['deleted_bytes']} bytes deleted"
    )


def orphans_message(result: Mapping[str, Any]) -> str:
    if result["dry_run"]:
        return (
            f"dry run: {result['would_delete_count']} orphan files and "
            f"{result['would_delete_bytes']} bytes would be deleted"
        )
    return f"{result['deleted_count']} orphan files and {result['deleted_bytes']} bytes deleted"


def optimize_message(row: Row) -> str:
    if row.skipped is not None:
        return f"nothing was done: {row.skipped}"
    put_off = f"{row.deferred} groups of files were put off: they are beyond max-bytes"
    if not row.committed:
        return put_off if row.deferred else "nothing was worth rewriting"
    return (
        f"{row.fragments_removed} files became {row.fragments_added}"
        f"{', indices are up to date' if row.reindexed else ''}"
        f"{f'; {put_off}' if row.deferred else ''}"
    )
