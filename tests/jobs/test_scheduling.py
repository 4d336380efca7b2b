"""When tables are looked after: single decisions, and 90 days that pass in a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakewarden.expiry import Ref, RefKind, Rules, Snapshot, SnapshotHistory, decide
from lakewarden.jobs.config import ExpireSettings, OptimizeSettings, OrphanSettings
from lakewarden.jobs.scheduling import (
    Decision,
    Fragmentation,
    OrphanRun,
    after_orphan_run,
    expire_snapshots,
    expire_versions,
    first_orphan_run,
    gathered_seconds,
    optimize,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)
DAY = 86_400
GIB = 1 << 30
ORPHANS = OrphanSettings.of({}, {})
EXPIRE = ExpireSettings.of({}, {})
OPTIMIZE = OptimizeSettings.of({}, {})


def days(number: float) -> timedelta:
    return timedelta(days=number)


def interval(decision: Decision) -> float:
    assert decision.at is not None
    return (decision.at - NOW).total_seconds()


# -- orphan files: one decision ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deleted", "seconds", "expected"),
    [
        (0, 30 * DAY, 90 * DAY),
        (GIB, DAY, DAY),
        (100 * GIB, DAY, DAY),
        (GIB, 10 * DAY, 10 * DAY),
        (GIB // 2, 10 * DAY, 20 * DAY),
        (1, 10 * DAY, 90 * DAY),
        (GIB, 0, DAY),
    ],
)
def test_the_next_run_is_when_a_gibibyte_has_gathered(
    deleted: int, seconds: float, expected: float
) -> None:
    decision = after_orphan_run(OrphanRun(deleted, seconds), ORPHANS, NOW)
    assert interval(decision) == pytest.approx(expected)
    assert decision.rate == deleted / max(seconds, 1)
    assert decision.reason


def test_no_target_means_every_day_as_long_as_there_are_orphans() -> None:
    settings = replace(ORPHANS, target_reclaim_bytes=0)
    assert interval(after_orphan_run(OrphanRun(1, 80 * DAY), settings, NOW)) == DAY
    assert interval(after_orphan_run(OrphanRun(0, DAY), settings, NOW)) == 90 * DAY


@given(
    st.integers(0, 2**60),
    st.floats(0, 10**9),
    st.integers(0, 2**62),
    st.integers(DAY, 10**9),
)
def test_an_interval_is_between_a_day_and_the_maximum(
    deleted: int, seconds: float, target: int, maximum: int
) -> None:
    settings = replace(ORPHANS, target_reclaim_bytes=target, maximum_interval_seconds=maximum)
    found = interval(after_orphan_run(OrphanRun(deleted, seconds), settings, NOW))
    assert DAY <= found <= maximum
    if deleted == 0:
        assert found == maximum
    more = interval(after_orphan_run(OrphanRun(deleted * 2, seconds), settings, NOW))
    assert more <= found


def test_a_dry_run_sees_no_rate_whatever_failed_attempts_have_deleted() -> None:
    decision = after_orphan_run(OrphanRun(GIB, DAY), replace(ORPHANS, dry_run=True), NOW)
    assert decision.rate == 0
    assert interval(decision) == 90 * DAY


def test_orphans_have_gathered_since_the_last_run_that_deleted_or_since_there_is_the_table() -> (
    None
):
    created = NOW - days(2)
    assert gathered_seconds(NOW, NOW - days(9), table_created_at=created) == 9 * DAY
    assert gathered_seconds(NOW, None, table_created_at=created) == 2 * DAY
    assert gathered_seconds(NOW, NOW + days(1), table_created_at=created) == 1.0


def test_a_table_is_looked_at_at_once_but_not_twice_a_day() -> None:
    assert first_orphan_run(NOW).at == NOW
    assert first_orphan_run(NOW, NOW - days(3)).at == NOW
    assert first_orphan_run(NOW, NOW - timedelta(hours=1)).at == NOW + timedelta(hours=23)


# -- orphan files: 90 days -----------------------------------------------------------------------


@dataclass
class Table:
    """A table whose writers leave orphans: bytes for each hour since the start."""

    leaves: Callable[[int], int]
    settings: OrphanSettings = ORPHANS
    older_than: timedelta = timedelta(days=7)
    runs: list[datetime] = field(default_factory=list)
    reclaimed: int = 0
    most: int = 0

    def live(self, length: int = 90) -> list[float]:
        """Let days pass, and return the days between runs."""
        start, now, end = NOW, NOW, NOW + days(length)
        previous: datetime | None = None
        left: list[tuple[datetime, int]] = []
        hour = 0
        while now <= end:
            while start + timedelta(hours=hour) <= now:
                left.append((start + timedelta(hours=hour), self.leaves(hour)))
                hour += 1
            self.most = max(self.most, sum(size for _, size in left))
            gone = [one for one in left if now - one[0] > self.older_than]
            left = [one for one in left if now - one[0] <= self.older_than]
            found = sum(size for _, size in gone)
            self.reclaimed += found
            seconds = gathered_seconds(now, previous, table_created_at=start)
            decision = after_orphan_run(OrphanRun(found, seconds), self.settings, now)
            self.runs.append(now)
            previous = now
            assert decision.at is not None
            now = decision.at
        return [(after - before) / days(1) for before, after in pairwise(self.runs)]


def test_an_idle_table_is_checked_at_the_ceiling() -> None:
    table = Table(lambda _: 0)
    assert table.live(365) == [90.0] * 4
    assert table.reclaimed == 0


def test_a_busy_table_is_looked_at_every_day() -> None:
    table = Table(lambda _: GIB, replace(ORPHANS, maximum_interval_seconds=7 * DAY))
    gaps = table.live()
    # The first week nothing is old enough; then it is a day's worth of orphans each day.
    assert gaps[0] == 7.0
    assert set(gaps[2:]) == {1.0}
    assert table.reclaimed >= 80 * 24 * GIB


def test_a_table_in_between_reclaims_about_the_target_each_time() -> None:
    daily = GIB // 5
    table = Table(lambda _: daily // 24, replace(ORPHANS, maximum_interval_seconds=30 * DAY))
    gaps = table.live()
    assert gaps[0] == 30.0
    assert len(gaps) >= 8
    assert all(4.5 <= gap <= 6.5 for gap in gaps[3:]), gaps


def test_a_table_that_falls_asleep_is_left_alone_and_found_again() -> None:
    # Busy for 20 days, still for 40, busy again.
    def leaves(hour: int) -> int:
        return GIB // 10 if hour < 20 * 24 or hour >= 60 * 24 else 0

    table = Table(leaves, replace(ORPHANS, maximum_interval_seconds=10 * DAY))
    gaps = table.live()
    assert min(gaps) == 1.0
    asleep = [at for at in table.runs if NOW + days(32) < at < NOW + days(60)]
    assert len(asleep) <= 3
    awake = [at for at in table.runs if at > NOW + days(79)]
    assert len(awake) >= 10


def test_a_dry_run_comes_at_the_ceiling() -> None:
    settings = replace(ORPHANS, dry_run=True)
    decision = after_orphan_run(OrphanRun(0, DAY), settings, NOW)
    assert interval(decision) == 90 * DAY
    assert "dry run" in decision.reason


@given(
    st.lists(st.integers(0, 4 * GIB), min_size=1, max_size=90),
    st.integers(0, 8 * GIB),
    st.integers(1, 90),
)
def test_in_any_90_days_runs_are_a_day_apart_or_more_and_never_too_late(
    daily: list[int], target: int, ceiling: int
) -> None:
    settings = replace(ORPHANS, target_reclaim_bytes=target, maximum_interval_seconds=ceiling * DAY)
    table = Table(lambda hour: daily[hour // 24 % len(daily)] // 24, settings)
    gaps = table.live()
    assert all(1.0 <= gap <= ceiling for gap in gaps)
    assert len(table.runs) <= 91


# -- expiry --------------------------------------------------------------------------------------


def chain(number: int, *, first: datetime, every: timedelta) -> SnapshotHistory:
    """A table with one branch and a snapshot at regular times."""
    snapshots = [
        Snapshot(index + 1, round((first + index * every).timestamp() * 1000), index or None)
        for index in range(number)
    ]
    return SnapshotHistory(snapshots, [Ref("main", number, RefKind.BRANCH)], number)


def going(history: SnapshotHistory, settings: ExpireSettings, at: datetime) -> int:
    rules = Rules(
        settings.max_snapshot_age // timedelta(milliseconds=1),
        settings.min_snapshots_to_keep,
        settings.max_ref_age // timedelta(milliseconds=1),
    )
    found = decide(history, rules, round(at.timestamp() * 1000))
    return sum(not one.keep for one in found.decisions)


def test_expiry_is_due_when_enough_snapshots_can_go() -> None:
    history = chain(26, first=NOW - days(30), every=timedelta(hours=1))
    assert expire_snapshots(history, EXPIRE, NOW).at == NOW
    few = chain(20, first=NOW - days(30), every=timedelta(hours=1))
    decision = expire_snapshots(few, EXPIRE, NOW)
    assert decision.at is None
    assert "19 of 20" in decision.reason
    # The newest stays, whatever its age.
    enough = chain(21, first=NOW - days(30), every=timedelta(hours=1))
    assert expire_snapshots(enough, EXPIRE, NOW).at == NOW


def test_a_table_that_nobody_writes_to_is_expired_when_its_time_has_come() -> None:
    history = chain(40, first=NOW - days(2), every=timedelta(hours=1))
    decision = expire_snapshots(history, EXPIRE, NOW)
    twentieth = NOW - days(2) + timedelta(hours=19)
    assert decision.at == twentieth + days(5) + timedelta(milliseconds=1)


@pytest.mark.parametrize("least", [0, 1])
def test_without_a_threshold_the_first_that_can_go_counts(least: int) -> None:
    settings = replace(EXPIRE, min_snapshots_to_expire=least)
    history = chain(3, first=NOW - days(6), every=days(2))
    assert expire_snapshots(history, settings, NOW).at == NOW
    alone = chain(1, first=NOW - days(600), every=days(2))
    assert expire_snapshots(alone, settings, NOW).at is None


@given(
    st.integers(1, 40),
    st.integers(1, 72),
    st.integers(0, 25),
    st.integers(1, 10),
    st.integers(0, 12),
    st.sampled_from([None, 1, 20]),
)
def test_expiry_is_due_at_the_first_moment_at_which_enough_can_go(
    number: int, hours: int, least: int, keep: int, age: int, tagged: int | None
) -> None:
    history = chain(number, first=NOW - days(8), every=timedelta(hours=hours))
    # A table's snapshots are not from the future.
    history = replace(
        history,
        snapshots=[one for one in history.snapshots if one.timestamp_ms <= NOW.timestamp() * 1000],
    )
    head = history.snapshots[-1].snapshot_id
    refs = [Ref("main", head, RefKind.BRANCH)]
    if tagged is not None and tagged <= head:
        refs.append(Ref("old", tagged, RefKind.TAG, max_ref_age_ms=12 * DAY * 1000))
    history = SnapshotHistory(history.snapshots, refs, head)
    settings = replace(
        EXPIRE,
        min_snapshots_to_expire=least,
        min_snapshots_to_keep=keep,
        max_snapshot_age=days(age),
    )
    enough = max(least, 1)
    decision = expire_snapshots(history, settings, NOW)
    if decision.at is None:
        assert going(history, settings, NOW + days(1000)) < enough
        return
    assert decision.at >= NOW
    assert going(history, settings, decision.at) >= enough
    if decision.at > NOW:
        assert going(history, settings, decision.at - timedelta(milliseconds=1)) < enough


def test_versions_of_lance_tables_follow_the_same_rule() -> None:
    written = [NOW - days(2) + timedelta(hours=hour) for hour in range(40)]
    decision = expire_versions(written, EXPIRE, NOW)
    assert decision.at == written[19] + days(5) + timedelta(milliseconds=1)
    assert expire_versions([NOW - days(9)] * 21, EXPIRE, NOW).at == NOW
    assert expire_versions([NOW - days(9)] * 20, EXPIRE, NOW).at is None
    assert expire_versions([], EXPIRE, NOW).at is None


def test_90_days_of_hourly_commits_are_expired_every_20_hours() -> None:
    """Every commit asks, as a hook does; a run takes away what can go."""
    written: list[datetime] = []
    runs: list[datetime] = []
    due: datetime | None = None
    for hour in range(90 * 24):
        now = NOW + timedelta(hours=hour)
        written.append(now)
        if due is not None and due <= now:
            runs.append(now)
            written = [at for at in written[:-1] if now - at <= days(5)] + written[-1:]
            due = None
        decision = expire_versions(written, EXPIRE, now)
        if due is None and decision.at is not None:
            due = decision.at
    gaps = {(after - before) / timedelta(hours=1) for before, after in pairwise(runs[1:])}
    assert gaps == {20.0}
    assert (runs[0] - NOW) > days(5)
    assert len(written) <= 5 * 24 + 21


# -- optimize ------------------------------------------------------------------------------------


def test_optimize_waits_until_there_is_enough_to_gain() -> None:
    assert optimize(Fragmentation(9, GIB), OPTIMIZE, NOW).at is None
    worth = optimize(Fragmentation(100, GIB), OPTIMIZE, NOW)
    assert worth.at == NOW
    assert "98 files fewer" in worth.reason


def test_optimize_is_not_worth_reading_much_for_little() -> None:
    # Twelve files of almost the target size: little to gain, and gibibytes to read.
    decision = optimize(Fragmentation(12, 5 * GIB), OPTIMIZE, NOW)
    assert decision.at is None
    assert "worth a run" in decision.reason


def test_optimize_leaves_a_pause() -> None:
    found = Fragmentation(100, GIB)
    recent = optimize(found, OPTIMIZE, NOW, NOW - timedelta(minutes=10))
    assert recent.at == NOW + timedelta(minutes=50)
    assert "last run" in recent.reason
    assert optimize(found, OPTIMIZE, NOW, NOW - days(1)).at == NOW


@given(st.integers(0, 10_000), st.integers(0, 2**45), st.integers(2, 100), st.integers(0, 1000))
def test_more_small_files_of_the_same_bytes_are_never_worth_less(
    files: int, size: int, least: int, gain: int
) -> None:
    settings = replace(OPTIMIZE, min_files=least, min_files_saved_per_gib=gain)
    if optimize(Fragmentation(files, size), settings, NOW).at is not None:
        assert files >= least
        assert optimize(Fragmentation(files + 1, size), settings, NOW).at is not None
