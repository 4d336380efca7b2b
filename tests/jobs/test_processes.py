"""Workers that are killed, stopped and outrun: each task ends once, and nobody deletes too late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lakewarden.jobs.database import Database, open_database
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.tasks import Claim, TaskStatus
from lakewarden.world import SystemChance, SystemClock
from tests.jobs.actors import BATCHES
from tests.jobs.small import EXPIRE, LAKE, active, logged, store, wanted

if TYPE_CHECKING:
    from tests.postgres import PostgresServer

CLOCK = SystemClock()
ROOT = Path(__file__).parents[2]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "store"
    made.mkdir()
    return made


@pytest.fixture
def real(url: str) -> Iterator[Database]:
    """The database with its own clock, as workers have it."""
    opened = open_database(url)
    yield opened
    opened.close()


@pytest.fixture
def start(url: str, start_at: Callable[[str], Start]) -> Start:
    return start_at(url)


@pytest.fixture
def start_at(place: Path) -> Iterator[Callable[[str], Start]]:
    begun: list[subprocess.Popen[bytes]] = []

    def at(url: str) -> Start:
        def run(role: str, *more: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "tests.jobs.actors", role, url, str(place), *more]
            begun.append(subprocess.Popen(command, cwd=ROOT))
            return begun[-1]

        return run

    yield at
    for process in begun:
        process.kill()
        process.wait()


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = CLOCK.elapsed() + seconds
    while not true():
        assert CLOCK.elapsed() < end, "it took too long"
        # Looking takes the workers' time.
        CLOCK.sleep(0.1)


def prepare(database: Database, tasks: int, heartbeat: int) -> TaskQueue:
    store(database, LAKE, EXPIRE, {}, heartbeat)
    queue = TaskQueue(database, SystemChance())
    made = queue.enqueue([wanted(CLOCK.now(), number) for number in range(1, tasks + 1)])
    assert None not in made
    return queue


def deletions(place: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in place.iterdir()
        if len(path.name) == 36
    }


def check_story(database: Database, place: Path, tasks: int) -> None:
    """What was deleted and what was written down must tell the same story."""
    assert active(database) == []
    rows = logged(database)
    ends = Counter(row.task_id for row in rows if row.final)
    assert len(ends) == tasks
    assert set(ends.values()) == {1}
    assert {row.status for row in rows if row.final} == {TaskStatus.SUCCESS}
    done = deletions(place)
    assert len(done) == tasks
    for task, lines in done.items():
        # Later attempts have larger numbers, and nobody deletes after somebody with a larger one.
        fences = [line["fence"] for line in lines]
        assert fences == sorted(fences), task
        assert len({(line["fence"], line["worker"]) for line in lines}) == len(set(fences))
        final = next(row for row in rows if row.final and str(row.task_id) == task)
        last = [line["batch"] for line in lines if line["fence"] == final.fence]
        assert last == list(range(BATCHES)), task


def finish(
    database: Database, place: Path, workers: list[subprocess.Popen[bytes]], seconds: float = 120
) -> None:
    until(lambda: not active(database), seconds)
    (place / "end").touch()
    for process in workers:
        process.wait(30)


def taken_over(queue: TaskQueue) -> Claim:
    """Return the next task that can be had, as soon as it can."""
    found: list[Claim] = []

    def take() -> bool:
        found.extend(queue.pick(EXPIRE))
        return bool(found)

    until(take)
    return found[0]


def test_a_worker_that_wakes_up_late_deletes_nothing(
    real: Database, place: Path, start: Start
) -> None:
    queue = prepare(real, 1, heartbeat=1)
    late = start("victim", "late")
    until((place / "late").exists)
    # It stops itself a moment later.
    until(lambda: _state(late.pid) == "T")
    claim = taken_over(queue)
    assert claim.attempt == 2
    os.kill(late.pid, signal.SIGCONT)
    assert late.wait(30) == 0
    assert "somebody else has it" in (place / "late.refused").read_text()
    (lines,) = deletions(place).values()
    assert [(line["attempt"], line["batch"]) for line in lines] == [(1, 0)]
    queue.succeed(claim, "in time")
    rows = logged(real)
    assert [(row.attempt, row.status, row.final) for row in rows] == [
        (1, TaskStatus.FAILED, False),
        (2, TaskStatus.SUCCESS, True),
    ]


def test_tasks_of_workers_that_are_killed_are_done_by_others(
    real: Database, place: Path, start: Start
) -> None:
    tasks = 40
    prepare(real, tasks, heartbeat=2)
    doomed = [start("worker", "5", "0.3") for _ in range(2)]
    until(lambda: len(deletions(place)) >= 5)
    others = [start("worker", "3", "0.01") for _ in range(2)]
    for process in doomed:
        process.send_signal(signal.SIGKILL)
    CLOCK.sleep(0.5)
    finish(real, place, others)
    check_story(real, place, tasks)


@pytest.mark.nightly
def test_thousands_of_tasks_end_once_while_workers_come_and_go(
    real: Database, place: Path, start: Start
) -> None:
    tasks = 3000
    prepare(real, tasks, heartbeat=5)
    workers = [start("worker", "25", "0.02") for _ in range(4)]
    for round_ in range(6):
        until(lambda least=200 * (round_ + 1): len(deletions(place)) >= least, 300)  # type: ignore[misc]
        doomed = workers.pop(0)
        # Killed, or stopped for longer than its heartbeat, and woken up among those who took over.
        doomed.send_signal(signal.SIGKILL if round_ % 2 else signal.SIGSTOP)
        workers.append(start("worker", "25", "0.02"))
        if not round_ % 2:
            CLOCK.sleep(7)
            doomed.send_signal(signal.SIGCONT)
            workers.append(doomed)
    finish(real, place, workers, 600)
    check_story(real, place, tasks)


@pytest.mark.nightly
def test_a_restart_of_postgres_loses_nothing(
    postgres: PostgresServer, postgres_template: str, place: Path, start_at: Callable[[str], Start]
) -> None:
    url = postgres.url(postgres.database(template=postgres_template))
    database = open_database(url)
    tasks = 600
    prepare(database, tasks, heartbeat=10)
    start = start_at(url)
    workers = [start("worker", "10", "0.05") for _ in range(3)]
    for mode in ("immediate", "fast"):
        least = len(deletions(place)) + 60
        until(lambda least=least: len(deletions(place)) >= least, 120)  # type: ignore[misc]
        postgres.control("-w", "-m", mode, "stop")
        CLOCK.sleep(1)
        postgres.start()
    finish(database, place, workers, 300)
    check_story(database, place, tasks)
    database.close()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
