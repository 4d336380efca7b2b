"""PURE: when a table is worth being looked after next, and why.

- *Orphan files*: when the bytes that gather, at the rate that the last run saw, are worth a listing of
  the whole table; never twice a day, and never less often than the maximum interval.
- *Expiry*: as soon as enough snapshots can go.  When that will be is known in advance, since time alone
  makes snapshots old: a table that nobody writes to any more needs no commit to be expired.
- *Optimize*: when readers are spared enough files for the bytes that it reads.
- *After a failure*: not within a day, however much is written meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from lakewarden.expiry import MS_MAX, Rules, SnapshotHistory, decide
from lakewarden.jobs.config import ExpireSettings, OptimizeSettings, OrphanSettings
from lakewarden.jobs.queues import DAY_SECONDS
from lakewarden.model import format_duration
from lakewarden.retention import MIN_AGE

_GIB = 1 << 30
#: What a file is to have where nobody says: only for telling how many are too many.
_TARGET_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Decision:
    """When to run next, None for not at all, and why."""

    at: datetime | None
    reason: str
    #: Orphan bytes per second, as the run saw it.
    rate: float | None = None


def after_failure(decision: Decision, failed_at: datetime | None) -> Decision:
    """Return a decision with what the last failure makes of it: commits alone mend nothing."""
    if decision.at is None or failed_at is None:
        return decision
    earliest = failed_at + timedelta(seconds=DAY_SECONDS)
    if decision.at >= earliest:
        return decision
    return replace(
        decision, at=earliest, reason=f"{decision.reason}; not within a day of the last failure"
    )


# -- orphan files --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OrphanRun:
    """What a run found."""

    #: Bytes that were deleted; none in a dry run, and files of unknown size count as none.
    deleted_bytes: int
    #: How long they had gathered: since the last run that deleted.
    seconds: float


def gathered_seconds(
    now: datetime, done_at: datetime | None, *, table_created_at: datetime
) -> float:
    """Return how long orphans had gathered when a run found them.

    Since the last run that deleted, for a dry run leaves them; before the first, since there is the table.
    """
    since = table_created_at if done_at is None else done_at
    return max((now - since).total_seconds(), 1.0)


def after_orphan_run(run: OrphanRun, settings: OrphanSettings, now: datetime) -> Decision:
    """Return when to look for orphans again."""
    # What failed attempts have deleted before a dry run counts when the next one deletes.
    rate = 0.0 if settings.dry_run else run.deleted_bytes / max(run.seconds, 1.0)
    ceiling = settings.maximum_interval_seconds
    if rate == 0:
        words = "a dry run deletes nothing" if settings.dry_run else "no orphan bytes were found"
        return _orphans(now, ceiling, f"{words}: the maximum interval", rate)
    wanted = settings.target_reclaim_bytes / rate
    if wanted <= DAY_SECONDS:
        return _orphans(
            now, DAY_SECONDS, f"{rate:.4g} bytes of orphans a second: the shortest interval", rate
        )
    words = f"{rate:.4g} bytes of orphans a second"
    if wanted >= ceiling:
        return _orphans(now, ceiling, f"{words}: the maximum interval", rate)
    target = settings.target_reclaim_bytes
    return _orphans(now, wanted, f"{words}: {target} bytes by then", rate)


def _orphans(now: datetime, seconds: float, why: str, rate: float) -> Decision:
    # A ceiling below the floor is refused when it is set; the floor holds anyway.
    span = timedelta(seconds=max(seconds, DAY_SECONDS))
    return Decision(now + span, why, rate)


def first_orphan_run(now: datetime, previous_run_at: datetime | None = None) -> Decision:
    """Return when to look if no run has said so: now, but not twice a day.

    Nobody knows what has gathered; and whoever waits for the next commit may wait for ever.
    """
    if previous_run_at is None:
        return Decision(now, "nobody has looked for orphans yet")
    earliest = previous_run_at + timedelta(seconds=DAY_SECONDS)
    return Decision(max(now, earliest), "the table has changed since somebody looked for orphans")


def sooner_orphan_run(
    before: OrphanSettings | None,
    settings: OrphanSettings,
    now: datetime,
    previous_run_at: datetime | None,
) -> Decision | None:
    """Return when to look under new settings, if the last run would have said another time.

    If more may be deleted now, or less is worth a run, it has said nothing.  Of a shorter maximum
    interval as much has passed as there has.
    """
    if before is None or _is_keener(settings, before):
        decision = first_orphan_run(now, previous_run_at)
        return replace(decision, reason="the config has changed since somebody looked for orphans")
    ceiling = settings.maximum_interval_seconds
    if ceiling >= before.maximum_interval_seconds:
        return None
    since = now if previous_run_at is None else previous_run_at
    at = since + timedelta(seconds=max(ceiling, DAY_SECONDS))
    return Decision(max(now, at), "the maximum interval is shorter now")


def _is_keener(settings: OrphanSettings, before: OrphanSettings) -> bool:
    return (
        settings.dry_run < before.dry_run
        or settings.older_than < before.older_than
        or settings.target_reclaim_bytes < before.target_reclaim_bytes
    )


# -- expiry --------------------------------------------------------------------------------------


def expire_snapshots(history: SnapshotHistory, settings: ExpireSettings, now: datetime) -> Decision:
    """Return when enough snapshots of an Iceberg table can go, if nobody writes to it until then."""
    rules = Rules(
        _ms(settings.max_snapshot_age),
        settings.min_snapshots_to_keep,
        _ms(settings.max_ref_age),
    )
    now_ms = round(now.timestamp() * 1000)
    enough = max(settings.min_snapshots_to_expire, 1)

    def going(at_ms: int) -> int:
        found = decide(history, rules, at_ms)
        return sum(not one.keep for one in found.decisions)

    # Nothing else can change what goes.  The more time has passed, the more does, but for refs with
    # shorter ages of their own; the task looks again when it is picked.
    moments = [now_ms, *sorted(at for at in _changes(history, rules) if at > now_ms)]
    first = bisect_left(moments, enough, key=going)
    if first == len(moments):
        return Decision(None, f"{going(moments[-1])} of {enough} snapshots can go, ever")
    return _expiry(now, moments[first] - now_ms, going(moments[first]), enough)


def expire_versions(
    written: Sequence[datetime], settings: ExpireSettings, now: datetime
) -> Decision:
    """Return the same for versions of a Lance table, `written` at these times."""
    age = max(settings.max_snapshot_age, MIN_AGE)
    ordered = sorted(written)
    removable = ordered[: max(len(ordered) - settings.min_snapshots_to_keep, 0)]
    enough = max(settings.min_snapshots_to_expire, 1)
    if len(removable) < enough:
        return Decision(None, f"{len(removable)} of {enough} versions can go, ever")
    old = [at for at in removable if now - at > age]
    last = removable[enough - 1]
    wait = age - (now - last) + timedelta(milliseconds=1)
    return _expiry(
        now, max(round(wait / timedelta(milliseconds=1)), 0), max(len(old), enough), enough
    )


def _expiry(now: datetime, wait_ms: int, going: int, enough: int) -> Decision:
    if wait_ms <= 0:
        return Decision(now, f"{going} can go, of {enough} that are worth a run")
    try:
        at = now + timedelta(milliseconds=wait_ms)
    except OverflowError:
        return Decision(None, "nothing can go in our time")
    return Decision(at, f"{going} will be old enough to go, of {enough} that are worth a run")


def _changes(history: SnapshotHistory, rules: Rules) -> set[int]:
    """Return when a snapshot or ref gets too old, each a moment after its last good one."""
    ages = {rules.max_snapshot_age_ms} | {
        ref.max_snapshot_age_ms for ref in history.refs if ref.max_snapshot_age_ms is not None
    }
    ages |= {rules.max_ref_age_ms} | {
        ref.max_ref_age_ms for ref in history.refs if ref.max_ref_age_ms is not None
    }
    sums = {one.timestamp_ms + age + 1 for one in history.snapshots for age in ages}
    return {at for at in sums if at <= MS_MAX}


def _ms(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


# -- optimize ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How scattered a table is."""

    #: Files that are smaller than they should be, and their bytes.
    small_files: int
    small_bytes: int


def optimize(
    found: Fragmentation,
    settings: OptimizeSettings,
    now: datetime,
    previous_run_at: datetime | None = None,
) -> Decision:
    """Return when rewriting small files is worth what it reads."""
    earliest = now
    if previous_run_at is not None:
        earliest = max(now, previous_run_at + timedelta(seconds=settings.min_interval_seconds))
    if found.small_files < settings.min_files:
        few = f"{found.small_files} small files of {settings.min_files} that are worth a run"
        return Decision(None, few)
    target = settings.target_file_size_bytes or _TARGET_BYTES
    saved = found.small_files - max(-(-found.small_bytes // target), 1)
    # Reading anything costs something.
    cost = max(found.small_bytes / _GIB, 1 / 1024)
    words = f"{saved} files fewer for {found.small_bytes} bytes read, {saved / cost:.3g} per GiB"
    if saved <= 0 or saved / cost < settings.min_files_saved_per_gib:
        return Decision(
            None, f"{words}, of {settings.min_files_saved_per_gib} that are worth a run"
        )
    if earliest > now:
        pause = format_duration(timedelta(seconds=settings.min_interval_seconds))
        words += f"; not within {pause} of the last run"
    return Decision(earliest, words)
