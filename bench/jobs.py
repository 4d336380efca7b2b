"""Measure how fast workers get tasks out of a full queue, one at a time and in batches.

Pickers are processes that pick and end tasks until none is left.  On SQLite; also on PostgreSQL if
`scripts/bench jobs-pickup --jobs-database postgresql://…` names an empty database.

PARTS names the parts for `scripts/bench`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from lakewarden.jobs.database import migrate, open_database
from lakewarden.jobs.listing import TaskLists
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS
from lakewarden.jobs.tasks import Entity, EntityType, NewTask, Scope
from lakewarden.world import SystemChance, SystemClock

PARTS = ("jobs-pickup",)
TASKS = 10_000
PICKERS = (1, 4)
BATCHES = (1, 100)

Found = dict[str, Any]


def fill(url: str, tasks: int) -> float:
    """Queue tasks that are due, and return how long it took."""
    migrate(url)
    database = open_database(url)
    queue = TaskQueue(database, SystemChance())
    now = SystemClock().now()
    # Slots that no earlier case has used.
    scope = Scope(warehouse_id=UUID(int=time.time_ns()))
    started = time.perf_counter()
    queue.enqueue(
        [
            NewTask(EXPIRE_SNAPSHOTS, scope, Entity(EntityType.TABLE, UUID(int=number)), now)
            for number in range(tasks)
        ]
    )
    seconds = time.perf_counter() - started
    database.close()
    return seconds


def drain(url: str, batch: int) -> None:
    """Be a picker: take tasks until there are no more, and tell how long picking and ending took."""
    database = open_database(url)
    queue = TaskQueue(database, SystemChance())
    queue.pick(EXPIRE_SNAPSHOTS, limit=0)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.time()
    picked, picking, ending = 0, [], 0.0
    while True:
        started = time.perf_counter()
        claims = queue.pick(EXPIRE_SNAPSHOTS, limit=batch)
        done = time.perf_counter()
        if not claims:
            break
        picking.append(done - started)
        picked += len(claims)
        for claim in claims:
            queue.succeed(claim)
        ending += time.perf_counter() - done
    told = {"began": began, "ended": time.time(), "picked": picked}
    print(json.dumps(told | {"picking": picking, "ending": ending}), flush=True)
    database.close()


def pickup(url: str, pickers: int, batch: int, tasks: int = TASKS) -> Found:
    filled = fill(url, tasks)
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--drain", url, str(batch)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(pickers)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [json.loads(process.communicate()[0]) for process in processes]
    assert sum(line["picked"] for line in told) == tasks, told
    database = open_database(url)
    assert TaskLists(database).counts() == []
    kind = database.engine.dialect.name
    database.close()
    picking = sorted(one for line in told for one in line["picking"])
    wall = max(line["ended"] for line in told) - min(line["began"] for line in told)
    return {
        "database": kind,
        "tasks": tasks,
        "pickers": pickers,
        "batch": batch,
        "queued_per_second": tasks / filled,
        "picked_per_second": tasks / (sum(picking) / pickers),
        "done_per_second": tasks / wall,
        "median": picking[len(picking) // 2],
        "worst": picking[-1],
    }


def measure(parts: list[str], url: str | None, keep: Callable[[Found], None]) -> None:
    if "jobs-pickup" not in parts:
        return
    lines = []
    with tempfile.TemporaryDirectory() as place:
        for database in filter(None, (f"sqlite:///{place}/tasks.db", url)):
            for pickers in PICKERS:
                for batch in BATCHES:
                    lines.append(pickup(database, pickers, batch))
                    print("  pickup", lines[-1], flush=True)
    keep({"pickup": lines})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--drain", url, batch]:
            drain(url, int(batch))
