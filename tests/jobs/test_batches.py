"""What becomes of tasks before any of their tables is worked on; nothing here needs Spark."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

import lance
import pytest
import sqlalchemy as sa

from lakewarden.errors import ErrorKind, LakewardenError
from lakewarden.jobs.control import Action
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS, OPTIMIZE, REMOVE_ORPHAN_FILES
from lakewarden.jobs.running import Engine, Runner
from lakewarden.jobs.schema import WAREHOUSE
from lakewarden.jobs.tasks import Failure, TaskStatus
from lakewarden.jobs.worker import WorkerSettings, run_workers
from tests.jobs.lab import Lab, lance_table
from tests.jobs.small import active
from tests.jobs.test_worker import wait_until

QUEUES = (EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES, OPTIMIZE)


@pytest.fixture
def lab(bare_lab: Lab) -> Lab:
    return bare_lab


def nothing() -> Engine:
    raise AssertionError("nobody needs Spark here")


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("why", ["the worker is shutting down", "stopped on request"])
def test_nothing_is_begun_for_tasks_that_have_ended(
    lab: Lab, tmp_path: Path, queue: str, why: str
) -> None:
    for name in ("a", "b"):
        lance_table(tmp_path / name / "t.lance", 1)
    warehouses = [lab.lance(tmp_path / name) for name in ("a", "b")]
    tasks = []
    for warehouse in warehouses:
        warehouse.configure(queue)
        tasks += warehouse.ask(queue)
    claims = lab.queue.pick(queue, limit=2)
    if why == "stopped on request":
        for warehouse, task in zip(warehouses, tasks, strict=True):
            warehouse.control(Action.STOP, task)
    else:
        lab.stop.set()
    Runner(lab.queue, lab.warehouses, nothing, lab.stop).run(claims)
    for warehouse, task in zip(warehouses, tasks, strict=True):
        assert warehouse.failures(task) == [(Failure.STOPPED, why)]


class Gone:
    """A session whose JVM was killed."""

    def __getattr__(self, name: str) -> object:
        raise ConnectionRefusedError(f"nobody answers ({name})")


def test_worker_whose_spark_is_gone_hands_its_tasks_back_and_ends(lab: Lab, tmp_path: Path) -> None:
    lance_table(tmp_path / "lake" / "t.lance", 2)
    warehouse = lab.lance(tmp_path / "lake")
    warehouse.configure(REMOVE_ORPHAN_FILES)
    (task,) = warehouse.ask(REMOVE_ORPHAN_FILES)
    settings = WorkerSettings(
        str(lab.database.engine.url), lambda: Engine(Gone(), 1), {REMOVE_ORPHAN_FILES: 1}, 0.1, 0
    )
    with pytest.raises(LakewardenError, match="start the worker again") as error:
        run_workers(settings, lab.stop)
    assert error.value.kind is ErrorKind.SPARK
    ((failure, _),) = warehouse.failures(task)
    assert failure == Failure.STOPPED
    assert warehouse.details(task).info.status is TaskStatus.SCHEDULED


@pytest.mark.parametrize("queue", QUEUES)
def test_task_of_a_warehouse_that_is_gone_ends_for_good(
    lab: Lab, tmp_path: Path, queue: str
) -> None:
    lance_table(tmp_path / "lake" / "t.lance", 1)
    warehouse = lab.lance(tmp_path / "lake")
    warehouse.configure(queue)
    (task,) = warehouse.ask(queue)
    with lab.database.writing() as connection:
        connection.execute(sa.delete(WAREHOUSE))
    assert lab.run(queue) == 1
    details = warehouse.details(task)
    assert details.info.status is TaskStatus.SUCCESS
    assert details.message == "the warehouse is gone"
    assert active(lab.database) == []


def test_loop_takes_tasks_of_one_warehouse_at_a_time(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lakewarden.jobs")
    for name in ("a", "b"):
        for table in ("one", "two"):
            place = lance_table(tmp_path / name / f"{table}.lance", 1)
            # Nothing is to be done, so nobody needs Spark.
            lance.dataset(str(place)).update_config({"lakewarden.history.expire.enabled": "false"})
        lab.lance(tmp_path / name).ask(EXPIRE_SNAPSHOTS)
    url, stop = str(lab.database.engine.url), Event()
    settings = WorkerSettings(url, nothing, {EXPIRE_SNAPSHOTS: 1}, 0.1, 0)
    thread = Thread(target=run_workers, args=(settings, stop))
    thread.start()
    wait_until(lambda: active(lab.database) == [])
    stop.set()
    thread.join(60)
    picked = [one.getMessage() for one in caplog.records if "picked" in one.getMessage()]
    assert picked == ["expire_snapshots: tasks picked: 2"] * 2
