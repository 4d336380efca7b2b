"""Measure a tick of the service: tasks of many tables in one pipeline run, against a run for each.

    scripts/bench jobs-tick
    scripts/bench jobs-tick --tick-tables 100

All tasks are picked together and run by the worker's own code, on SQLite.  Single runs plan and execute
one table each, without the service; some are measured, and all would take so many times as long.

PARTS names the parts for `scripts/bench`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

from tables import age, fleet, linked

import lakewarden
from lakewarden.cli.session import Engine as Session
from lakewarden.cli.session import start
from lakewarden.jobs.commits import Commits
from lakewarden.jobs.config_store import ConfigStore
from lakewarden.jobs.database import migrate, open_database
from lakewarden.jobs.discovery import Discovery
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS
from lakewarden.jobs.running import Engine, Runner
from lakewarden.jobs.tasks import NewTask, Scope
from lakewarden.jobs.warehouses import WarehouseKind, Warehouses
from lakewarden.world import SystemChance

PARTS = ("jobs-tick",)
TABLES = 1000
KEEP = 10
#: Single runs that are measured.
SINGLES = 100

Found = dict[str, Any]


def together(spark: Any, place: Path, url: str) -> Found:
    """Run a task for every table below a directory."""
    migrate(url)
    database = open_database(url)
    chance = SystemChance()
    queue, warehouses = TaskQueue(database, chance), Warehouses(database, chance)
    info = warehouses.register(f"{place}", WarehouseKind.LANCE, str(place))
    scope = Scope(info.project_id, info.id)
    settings = {"enable-expire-snapshots": True, "min-snapshots-to-keep": KEEP}
    with database.writing() as connection:
        ConfigStore(database).set(connection, scope, EXPIRE_SNAPSHOTS, settings)
    tables = warehouses.refresh(info.id, Discovery(warehouses, Commits(queue)).find(info.id))
    now = database.clock.now()
    queue.enqueue([NewTask(EXPIRE_SNAPSHOTS, scope, one.entity, now) for one in tables])
    runner = Runner(queue, warehouses, lambda: Engine(spark, 2 * (os.cpu_count() or 1)), Event())
    started = time.perf_counter()
    claims = queue.pick(EXPIRE_SNAPSHOTS, limit=len(tables))
    runner.run(claims)
    seconds = time.perf_counter() - started
    with database.reading() as connection:
        query = "SELECT count(*) FROM task_log WHERE final AND status = 'SUCCESS'"
        done = connection.exec_driver_sql(query).scalar()
    database.close()
    assert done == len(claims) == len(tables), f"{done} of {len(tables)} tasks are done"
    return {"tables": len(tables), "seconds": seconds}


def alone(spark: Any, places: list[Path]) -> float:
    """Return how long a run for one table takes."""
    started = time.perf_counter()
    for place in places:
        plan = lakewarden.plan_cleanup(spark, [str(place)], keep=KEEP, older_than="5d")
        receipt = lakewarden.execute(spark, plan)
        assert not receipt.failed, receipt.failed[0]
    return (time.perf_counter() - started) / len(places)


def measure(parts: list[str], base: Path, tables: int, keep: Callable[[Found], None]) -> None:
    if "jobs-tick" not in parts:
        return
    source = fleet(base, tables)
    spark = start(Session())
    try:
        with tempfile.TemporaryDirectory() as scratch:
            # The first runs of a session are slower.
            for step in range(3):
                warm = linked(source / "t0000.lance", Path(scratch) / f"warm{step}.lance")
                age(warm, 30)
                alone(spark, [warm])
            copy = linked(source, Path(scratch) / "single")
            age(copy, 30)
            each = alone(spark, sorted(copy.iterdir())[:SINGLES])
            copy = linked(source, Path(scratch) / "together")
            age(copy, 30)
            found = together(spark, copy, f"sqlite:///{scratch}/tasks.db")
    finally:
        spark.stop()
    found |= {"single_seconds": each, "singles_seconds": each * found["tables"]}
    print("  tick", found, flush=True)
    keep({"tick": found})
