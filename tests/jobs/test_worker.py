"""Loops, their settings and their supervisor, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest

from lakewarden.errors import Refused, UsageError
from lakewarden.jobs.database import open_database
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS, QUEUES, REMOVE_ORPHAN_FILES, TASK_LOG_CLEANUP
from lakewarden.jobs.running import Engine
from lakewarden.jobs.tasks import TaskStatus
from lakewarden.jobs.worker import WorkerSettings, run_workers, supervise
from lakewarden.testing import invariants
from lakewarden.world import SystemClock
from tests.jobs.lab import lance_orphans, lance_table
from tests.jobs.small import active

if TYPE_CHECKING:
    from tests.jobs.lab import Lab

URL = "sqlite:////nowhere/tasks.db"


def nothing() -> Engine:
    raise AssertionError("nobody needs Spark here")


def wait_until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    clock = SystemClock()
    give_up = clock.elapsed() + seconds
    while not happened():
        assert clock.elapsed() < give_up, "it has not happened in time"
        clock.sleep(0.05)


def test_settings_are_those_of_the_environment() -> None:
    plain = WorkerSettings.of({}, URL, nothing)
    assert plain.workers == dict.fromkeys(QUEUES, 2)
    assert (plain.poll_seconds, plain.detect_seconds, plain.rate_limit) == (10.0, 60.0, None)
    told = WorkerSettings.of(
        {
            "LAKEWARDEN__TASK_EXPIRE_SNAPSHOTS_WORKERS": "0",
            "LAKEWARDEN__TASK_LOG_CLEANUP_WORKERS": "5",
            "LAKEWARDEN__TASK_POLL_INTERVAL": "500ms",
            "LAKEWARDEN__DETECT_INTERVAL": "5m",
            "LAKEWARDEN__TASK_DELETE_RATE_LIMIT": "12.5",
        },
        URL,
        nothing,
    )
    assert told.workers[EXPIRE_SNAPSHOTS] == 0
    assert told.workers[TASK_LOG_CLEANUP] == 5
    assert (told.poll_seconds, told.detect_seconds, told.rate_limit) == (0.5, 300.0, 12.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LAKEWARDEN__TASK_OPTIMIZE_WORKERS", "-1"),
        ("LAKEWARDEN__TASK_OPTIMIZE_WORKERS", "many"),
        ("LAKEWARDEN__TASK_OPTIMIZE_WORKERS", "65"),
        ("LAKEWARDEN__TASK_POLL_INTERVAL", "soon"),
        ("LAKEWARDEN__DETECT_INTERVAL", "-5s"),
        ("LAKEWARDEN__TASK_DELETE_RATE_LIMIT", "0"),
        ("LAKEWARDEN__TASK_DELETE_RATE_LIMIT", "nan"),
    ],
)
def test_settings_that_make_no_sense_are_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is '{value}'"):
        WorkerSettings.of({name: value}, URL, nothing)


def test_address_of_the_database_is_not_shown() -> None:
    assert "secret" not in repr(WorkerSettings("postgresql://me:secret@db/tasks", nothing))


def test_loop_that_dies_is_started_again_and_the_others_go_on() -> None:
    stop, started = Event(), {"frail": 0, "steady": 0}

    def frail() -> None:
        started["frail"] += 1
        if started["frail"] < 3:
            raise RuntimeError("died")
        stop.wait()

    def steady() -> None:
        started["steady"] += 1
        stop.wait()

    thread = Thread(target=supervise, args=({"frail": frail, "steady": steady}, stop))
    thread.start()
    wait_until(lambda: started["frail"] == 3)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert started == {"frail": 3, "steady": 1}


def test_database_that_nobody_made_is_not_waited_for(tmp_path: Path) -> None:
    settings = WorkerSettings(f"sqlite:///{tmp_path}/slip.db", nothing, {TASK_LOG_CLEANUP: 1})
    with pytest.raises(Refused, match="there is no database"):
        run_workers(settings, Event())
    assert list(tmp_path.iterdir()) == []


def test_database_that_is_away_when_workers_start_is_waited_for(
    template: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, stop = tmp_path / "later" / "tasks.db", Event()
    settings = WorkerSettings(f"sqlite:///{place}", nothing, {TASK_LOG_CLEANUP: 1}, 0.1, 0)
    thread = Thread(target=run_workers, args=(settings, stop))
    thread.start()
    try:
        wait_until(lambda: "waiting for the database" in caplog.text)
        place.parent.mkdir()
        (tmp_path / "new").write_bytes(template.read_bytes())
        (tmp_path / "new").rename(place)
        database = open_database(settings.database_url)
        wait_until(lambda: len(active(database)) == 1)
        database.close()
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def test_workers_that_wait_for_a_database_end_when_they_are_told_to() -> None:
    stop = Event()
    thread = Thread(target=run_workers, args=(WorkerSettings(URL, nothing), stop))
    thread.start()
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.spark
def test_workers_find_tables_and_do_what_is_due(lab: Lab, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    places = [lance_table(lake / f"t{number}.lance", 25) for number in range(2)]
    left = [path for place in places for path in lance_orphans(place)]
    warehouse = lab.lance(lake)
    for queue in (EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES):
        warehouse.configure(queue)
    stop, engines = Event(), list[int]()

    def engine() -> Engine:
        engines.append(1)
        return lab.engine

    settings = WorkerSettings(
        str(lab.database.engine.url), engine, poll_seconds=0.1, detect_seconds=0.5
    )
    # As if the database were away at first.
    with lab.database.writing() as connection:
        connection.exec_driver_sql("ALTER TABLE entity RENAME TO elsewhere")
    thread = Thread(target=run_workers, args=(settings, stop))
    thread.start()
    SystemClock().sleep(1.0)
    with lab.database.writing() as connection:
        connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO entity")

    def ended() -> list[tuple[str, str]]:
        with lab.database.reading() as connection:
            query = "SELECT queue_name, status FROM task_log WHERE final"
            return [(row.queue_name, row.status) for row in connection.exec_driver_sql(query)]

    wait_until(lambda: len(ended()) >= 4, 120)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    done = TaskStatus.SUCCESS.value
    assert sorted(ended()) == [(EXPIRE_SNAPSHOTS, done)] * 2 + [(REMOVE_ORPHAN_FILES, done)] * 2
    # One session for all loops.
    assert engines == [1]
    assert not any(path.exists() for path in left)
    for place in places:
        assert {number for _, number in invariants.versions(place)} == {25}
        invariants.assert_no_live_file_missing(place)
        invariants.assert_nothing_deletable_left(place)
