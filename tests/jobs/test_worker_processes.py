"""Real worker processes: killed, frozen past their heartbeat, told to end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

import pytest

from lakewarden.jobs.queues import REMOVE_ORPHAN_FILES
from lakewarden.jobs.tasks import Claim, Failure, Signal
from lakewarden.testing import invariants
from lakewarden.testing.processes import end, lakewarden_command, running
from lakewarden.world import SystemClock
from tests.jobs.lab import Lab, Registered, lance_orphans, lance_table
from tests.jobs.small import store
from tests.jobs.test_worker import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ORPHANS, VERSIONS = 300, 3
#: Keys that go in a second, and seconds after which a worker counts as lost: every answer of the
#: database is good for 40 files, and whoever deletes them does so 20 at a time.
RATE, HEARTBEAT = 20, 8
CLOCK = SystemClock()


@pytest.fixture
def lab(bare_lab: Lab) -> Lab:
    return bare_lab


@pytest.fixture
def table(tmp_path: Path) -> Path:
    place = lance_table(tmp_path / "lake" / "t.lance", VERSIONS)
    lance_orphans(place, ORPHANS)
    return place


@pytest.fixture
def task(lab: Lab, table: Path) -> tuple[Registered, UUID]:
    warehouse = lab.lance(table.parent)
    config = {"enable-remove-orphan-files": True}
    store(lab.database, warehouse.scope, REMOVE_ORPHAN_FILES, config, HEARTBEAT)
    (made,) = warehouse.ask(REMOVE_ORPHAN_FILES)
    return warehouse, made


@contextmanager
def worker(lab: Lab, log: Path, *, rate: float) -> Iterator[subprocess.Popen[bytes]]:
    environ = {
        "DATABASE_URL": str(lab.database.engine.url),
        "LAKEWARDEN__TASK_EXPIRE_SNAPSHOTS_WORKERS": "0",
        "LAKEWARDEN__TASK_REMOVE_ORPHAN_FILES_WORKERS": "1",
        "LAKEWARDEN__TASK_OPTIMIZE_WORKERS": "0",
        "LAKEWARDEN__TASK_LOG_CLEANUP_WORKERS": "0",
        "LAKEWARDEN__TASK_POLL_INTERVAL": "200ms",
        "LAKEWARDEN__DETECT_INTERVAL": "0",
        "LAKEWARDEN__TASK_DELETE_RATE_LIMIT": str(rate),
    }
    with running(lakewarden_command("worker"), log=log, environ=environ) as process:
        yield process


def family(root: int) -> list[int]:
    """Return a process and all that it started; Spark's Python workers are a group of their own."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name of a program may hold anything, and ends with the last bracket.
            fields = status.read_text().rpartition(")")[2].split()
            parents[int(status.parent.name)] = int(fields[1])
    found = [root]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def signal_all(processes: list[int], number: signal.Signals) -> None:
    for one in processes:
        with suppress(ProcessLookupError):
            os.kill(one, number)


def left(table: Path) -> int:
    return len(list(table.glob("data/left-*")))


def wait_in_the_middle(table: Path) -> None:
    """Return when files were deleted a moment ago, and the next are not due yet."""
    wait_until(lambda: left(table) < ORPHANS)
    seen = left(table)
    wait_until(lambda: left(table) < seen)

    def between_two_batches() -> bool:
        # A request that is under way goes on whoever is frozen; on a busy machine it takes a while.
        before = left(table)
        CLOCK.sleep(0.2)
        return left(table) == before

    wait_until(between_two_batches)
    assert left(table) > 0


def ends(lab: Lab, task: UUID) -> list[tuple[str, str | None, bool]]:
    with lab.database.reading() as connection:
        query = "SELECT status, failure, final FROM task_log WHERE task_id = ? ORDER BY attempt"
        found = connection.exec_driver_sql(query, (task.hex,))
        return [(row.status, row.failure, bool(row.final)) for row in found]


def assert_table_is_fine(table: Path) -> None:
    invariants.assert_no_live_file_missing(table)
    assert len(set(invariants.versions(table))) == VERSIONS


def test_worker_that_was_frozen_past_its_heartbeat_deletes_nothing_more(
    lab: Lab, table: Path, task: tuple[Registered, UUID], tmp_path: Path
) -> None:
    with worker(lab, tmp_path / "frozen.log", rate=RATE) as frozen:
        wait_in_the_middle(table)
        everybody = family(frozen.pid)
        # The driver, Java, and Python workers with files in their hands.
        assert len(everybody) > 3
        signal_all(everybody, signal.SIGSTOP)
        rest = left(table)
        # Another one takes the task as soon as it may, and has it from then on.
        claims: list[Claim] = []

        def take() -> bool:
            claims.extend(lab.queue.pick(REMOVE_ORPHAN_FILES))
            return bool(claims)

        wait_until(take)
        assert (claims[0].task_id, claims[0].attempt) == (task[1], 2)
        signal_all(everybody, signal.SIGCONT)
        for _ in range(HEARTBEAT):
            assert lab.queue.heartbeat(claims[0]) is Signal.CONTINUE
            CLOCK.sleep(1.0)
        assert left(table) == rest > 0
        # It lives, has reported nothing, and is ready for other tasks.
        assert frozen.poll() is None
        assert ends(lab, task[1]) == [("FAILED", Failure.LOST, False)]
        lab.queue.succeed(claims[0], "done by the other")
        again = task[0].ask(REMOVE_ORPHAN_FILES)
        wait_until(lambda: left(table) < rest)
        frozen.send_signal(signal.SIGTERM)
        assert frozen.wait(60) == 0
    assert ends(lab, task[1])[1:] == [("SUCCESS", None, True)]
    assert ends(lab, again[0]) == [("FAILED", Failure.STOPPED, False)]
    assert_table_is_fine(table)


@pytest.mark.nightly
def test_worker_whose_java_was_killed_ends_and_fails_no_task(
    lab: Lab, table: Path, task: tuple[Registered, UUID], tmp_path: Path
) -> None:
    with worker(lab, tmp_path / "worker.log", rate=RATE) as process:
        wait_in_the_middle(table)
        java = [
            one
            for one in family(process.pid)
            if Path(f"/proc/{one}/comm").read_text().strip() == "java"
        ]
        assert java
        signal_all(java, signal.SIGKILL)
        assert process.wait(60) == 1
    assert left(table) > 0
    assert ends(lab, task[1]) == [("FAILED", Failure.STOPPED, False)]
    assert "start the worker again" in (tmp_path / "worker.log").read_text()
    assert_table_is_fine(table)


@pytest.mark.nightly
def test_task_of_a_worker_that_was_killed_ends_once_and_nothing_is_lost(
    lab: Lab, table: Path, task: tuple[Registered, UUID], tmp_path: Path
) -> None:
    with worker(lab, tmp_path / "killed.log", rate=RATE) as killed:
        wait_in_the_middle(table)
        end(killed, signal.SIGKILL)
    rest = left(table)
    assert rest > 0
    with worker(lab, tmp_path / "second.log", rate=10_000):
        wait_until(lambda: any(final for _, _, final in ends(lab, task[1])))
    assert ends(lab, task[1]) == [("FAILED", Failure.LOST, False), ("SUCCESS", None, True)]
    assert task[0].result(task[1])["deleted_count"] == rest
    assert left(table) == 0
    assert_table_is_fine(table)
    invariants.assert_nothing_deletable_left(table)
