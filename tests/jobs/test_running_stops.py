"""Runs that are stopped, cancelled, too long or outrun: nothing more goes, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import pytest
import sqlalchemy as sa

from lakewarden.jobs.control import Action
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS, OPTIMIZE, REMOVE_ORPHAN_FILES
from lakewarden.jobs.schema import TASK, TASK_CONFIG
from lakewarden.jobs.tasks import Failure, TaskStatus
from lakewarden.maintenance import deleting
from lakewarden.pipeline import errands
from lakewarden.testing import invariants, tables
from lakewarden.world import SystemClock
from tests.jobs.lab import lance_orphans, lance_table

if TYPE_CHECKING:
    from tests.jobs.lab import Lab, Registered

pytestmark = [pytest.mark.spark, pytest.mark.nightly]

#: Files that go within a second, between two questions, and in all.
RATE, BATCH, ORPHANS = 20.0, 10, 120


@pytest.fixture
def slow(lab: Lab, tmp_path: Path) -> Registered:
    """A warehouse of two tables whose orphans take several seconds each to go."""
    for name in ("one", "two"):
        lance_orphans(lance_table(tmp_path / "lake" / f"{name}.lance", 2), ORPHANS)
    warehouse = lab.lance(tmp_path / "lake")
    warehouse.configure(REMOVE_ORPHAN_FILES)
    lab.paced(RATE, BATCH)
    return warehouse


def left(tmp_path: Path, name: str) -> int:
    return len(list((tmp_path / "lake" / f"{name}.lance").glob("data/left-*")))


@contextmanager
def once(happened: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Do something from another thread as soon as something has happened."""

    def watch() -> None:
        while not happened():
            SystemClock().sleep(0.02)
        act()

    thread = Thread(target=watch)
    thread.start()
    yield
    thread.join()


def assert_tables_are_fine(tmp_path: Path) -> None:
    for place in (tmp_path / "lake").iterdir():
        invariants.assert_no_live_file_missing(place)
        assert len(set(invariants.versions(place))) == 2


def rows(lab: Lab, task: UUID) -> list[tuple[str, str | None, bool]]:
    """Return how each attempt at a task ended."""
    with lab.database.reading() as connection:
        query = "SELECT status, failure, final FROM task_log WHERE task_id = ? ORDER BY attempt"
        found = connection.exec_driver_sql(query, (task.hex,))
        return [(row.status, row.failure, bool(row.final)) for row in found]


def test_task_that_is_stopped_ends_between_batches_and_the_other_goes_on(
    lab: Lab, slow: Registered, tmp_path: Path
) -> None:
    one, two = slow.ask(REMOVE_ORPHAN_FILES, "one", "two")
    with once(lambda: left(tmp_path, "one") < ORPHANS, lambda: slow.control(Action.STOP, one)):
        lab.run(REMOVE_ORPHAN_FILES)
    assert 0 < left(tmp_path, "one") < ORPHANS
    assert left(tmp_path, "two") == 0
    # It is tried again, after a while.
    assert slow.details(one).info.status is TaskStatus.SCHEDULED
    assert rows(lab, one) == [("FAILED", Failure.STOPPED, False)]
    attempt = slow.attempts(one)[0]
    assert attempt.details is not None
    assert attempt.details["deleted_count"] == ORPHANS - left(tmp_path, "one")
    assert slow.details(two).info.status is TaskStatus.SUCCESS
    assert slow.result(two)["deleted_count"] == ORPHANS
    assert_tables_are_fine(tmp_path)
    slow.control(Action.RUN_NOW, one)
    lab.paced(1e6, 1000)
    assert lab.run(REMOVE_ORPHAN_FILES) == 1
    assert left(tmp_path, "one") == 0
    assert rows(lab, one)[1:] == [("SUCCESS", None, True)]


def test_task_that_is_cancelled_deletes_no_more_and_reports_nothing(
    lab: Lab, slow: Registered, tmp_path: Path
) -> None:
    (task,) = slow.ask(REMOVE_ORPHAN_FILES, "one")
    with once(lambda: left(tmp_path, "one") < ORPHANS, lambda: slow.control(Action.CANCEL, task)):
        lab.run(REMOVE_ORPHAN_FILES)
    assert 0 < left(tmp_path, "one") < ORPHANS
    assert rows(lab, task) == [("CANCELLED", None, True)]
    assert_tables_are_fine(tmp_path)


def test_worker_that_shuts_down_hands_its_tasks_back(
    lab: Lab, slow: Registered, tmp_path: Path
) -> None:
    tasks = slow.ask(REMOVE_ORPHAN_FILES, "one", "two")
    with once(lambda: left(tmp_path, "one") < ORPHANS, lab.stop.set):
        lab.run(REMOVE_ORPHAN_FILES)
    assert left(tmp_path, "one") + left(tmp_path, "two") > 0
    for task in tasks:
        assert slow.details(task).info.status is TaskStatus.SCHEDULED
        assert rows(lab, task) == [("FAILED", Failure.STOPPED, False)]
    assert_tables_are_fine(tmp_path)


def test_attempt_that_takes_too_long_fails_and_is_tried_once_more(
    lab: Lab, slow: Registered, tmp_path: Path
) -> None:
    # Shorter than settings allow, so that nobody has to wait.
    short = {"enable-remove-orphan-files": True, "max-run-time-seconds": 3}
    with lab.database.writing() as connection:
        connection.execute(sa.update(TASK_CONFIG).values(config=short))
    (task,) = slow.ask(REMOVE_ORPHAN_FILES, "one")
    lab.run(REMOVE_ORPHAN_FILES)
    assert left(tmp_path, "one") > 0
    assert rows(lab, task) == [("FAILED", Failure.TIMEOUT, False)]
    before = left(tmp_path, "one")
    slow.control(Action.RUN_NOW, task)
    with lab.database.writing() as connection:
        no_time = {**short, "max-run-time-seconds": 0}
        connection.execute(sa.update(TASK_CONFIG).values(config=no_time))
    lab.run(REMOVE_ORPHAN_FILES)
    assert left(tmp_path, "one") == before
    assert rows(lab, task)[1:] == [("FAILED", Failure.TIMEOUT, True)]
    assert slow.details(task).info.status is TaskStatus.FAILED
    assert_tables_are_fine(tmp_path)


def test_worker_whose_task_was_taken_over_deletes_no_more(
    lab: Lab, slow: Registered, tmp_path: Path
) -> None:
    (task,) = slow.ask(REMOVE_ORPHAN_FILES, "one")
    seen: list[int] = []

    def take_over() -> None:
        with lab.database.writing() as connection:
            connection.execute(sa.update(TASK).values(stale_at=SystemClock().now()))
        (claim,) = lab.queue.pick(REMOVE_ORPHAN_FILES)
        seen.append(left(tmp_path, "one"))
        lab.queue.succeed(claim, "the other has done it")

    with once(lambda: left(tmp_path, "one") < ORPHANS, take_over):
        lab.run(REMOVE_ORPHAN_FILES)
    # A batch may have been under way.
    assert 0 <= seen[0] - left(tmp_path, "one") <= 2 * BATCH
    assert left(tmp_path, "one") > 0
    assert rows(lab, task) == [("FAILED", Failure.LOST, False), ("SUCCESS", None, True)]
    assert_tables_are_fine(tmp_path)


def test_versions_are_gone_in_order_when_expiry_is_stopped(lab: Lab, tmp_path: Path) -> None:
    place = lance_table(tmp_path / "lake" / "t.lance", 40)
    warehouse = lab.lance(tmp_path / "lake")
    warehouse.configure(EXPIRE_SNAPSHOTS)
    (task,) = warehouse.ask(EXPIRE_SNAPSHOTS, "t")
    lab.paced(RATE, 5)

    def manifests() -> int:
        return len(list(place.glob("_versions/*.manifest")))

    with once(lambda: manifests() < 38, lambda: warehouse.control(Action.STOP, task)):
        lab.run(EXPIRE_SNAPSHOTS)
    rest = sorted(number for _, number in invariants.versions(place))
    # The files of all of them went first, then manifests, oldest first.
    assert rest == list(range(41 - len(rest), 41))
    assert 1 < len(rest) < 40
    assert rows(lab, task) == [("FAILED", Failure.STOPPED, False)]
    lab.paced(1e6, 1000)
    warehouse.control(Action.RUN_NOW, task)
    lab.run(EXPIRE_SNAPSHOTS)
    assert [number for _, number in invariants.versions(place)] == [40]
    invariants.assert_no_live_file_missing(place)
    invariants.assert_nothing_deletable_left(place)


def test_nothing_goes_while_the_database_is_away(
    lab: Lab, slow: Registered, tmp_path: Path
) -> None:
    (task,) = slow.ask(REMOVE_ORPHAN_FILES, "one")
    counts: list[int] = []

    def rename(one: str, other: str) -> None:
        with lab.database.writing() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {one} RENAME TO {other}")

    def take_away_for_a_while() -> None:
        rename("task", "elsewhere")
        # The batch under way ends; no other begins.
        SystemClock().sleep(2.0)
        counts.append(left(tmp_path, "one"))
        SystemClock().sleep(1.5)
        counts.append(left(tmp_path, "one"))
        rename("elsewhere", "task")

    with once(lambda: left(tmp_path, "one") < ORPHANS, take_away_for_a_while):
        lab.run(REMOVE_ORPHAN_FILES)
    assert counts[0] == counts[1] > 0
    assert left(tmp_path, "one") == 0
    assert rows(lab, task) == [("SUCCESS", None, True)]
    assert_tables_are_fine(tmp_path)


@pytest.mark.parametrize("action", [Action.CANCEL, Action.STOP])
def test_optimize_commits_nothing_for_a_task_that_is_not_its_own_any_more(
    lab: Lab, tmp_path: Path, action: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tables.appended(tmp_path / "lake" / "t.lance", 12)
    other = tables.appended(tmp_path / "lake" / "other.lance", 12)
    warehouse = lab.lance(tmp_path / "lake")
    warehouse.configure(OPTIMIZE)
    one, two = warehouse.ask(OPTIMIZE, "t", "other")
    rewrite = errands.run

    def then_act(*work: Any) -> Any:
        done = rewrite(*work)
        if warehouse.details(one).info.status is TaskStatus.RUNNING:
            warehouse.control(action, one)
        return done

    monkeypatch.setattr(errands, "run", then_act)
    monkeypatch.setattr(deleting, "_FRESH_SECONDS", 0.0)
    lab.run(OPTIMIZE)
    found = lance.dataset(str(place))
    assert (found.version, len(found.get_fragments())) == (12, 12)
    # What was rewritten is gone again.
    assert len(list(place.glob("data/*"))) == 12
    assert len(lance.dataset(str(other)).get_fragments()) == 1
    assert warehouse.details(two).info.status is TaskStatus.SUCCESS
    ended = ("CANCELLED", None, True) if action is Action.CANCEL else ("FAILED", "stopped", False)
    assert rows(lab, one) == [ended]
