"""Workers as processes of their own: `python -m tests.jobs.actors ROLE URL PLACE …`.

What a worker deletes, it appends to a file of the task, with the attempt and fence it had: the file is the
store, which knows nothing of fences, and what is in it afterwards is what really happened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event

from lakewarden.errors import StorageError
from lakewarden.jobs.database import Database, open_database
from lakewarden.jobs.holding import Holding
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.refusals import TaskTakenOver
from lakewarden.jobs.tasks import Claim, Failure
from lakewarden.world import SystemChance, SystemClock
from tests.jobs.small import EXPIRE

BATCHES = 3
CLOCK = SystemClock()


def delete(place: Path, claim: Claim, batch: int) -> None:
    """Leave a line that cannot be torn."""
    line = json.dumps(
        {"attempt": claim.attempt, "fence": claim.fence, "batch": batch, "worker": os.getpid()}
    )
    with (place / str(claim.task_id)).open("a") as file:
        file.write(f"{line}\n")


def work(queue: TaskQueue, place: Path, claims: list[Claim], pause: float) -> None:
    """Do a batch of tasks as a pipeline run does: in steps, asking before each."""
    holding = Holding(queue, Event()).take(claims)
    mine = claims
    for batch in range(BATCHES):
        going, until = holding.check(mine)
        mine = [claim for claim in mine if claim.task_id in going]
        for claim in list(mine):
            while claim in mine and CLOCK.now() >= until:
                # Stopped in between: whose the tasks are is asked anew.
                going, until = holding.check(mine)
                mine = [one for one in mine if one.task_id in going]
            if claim in mine:
                delete(place, claim, batch)
        CLOCK.sleep(pause)
    for claim in mine:
        with suppress(TaskTakenOver):
            if claim.attempt == 1 and claim.task_id.int % 10 == 0:
                queue.fail(claim, "by chance", Failure.TRANSIENT)
            else:
                queue.succeed(claim, "done")


def worker(queue: TaskQueue, place: Path, limit: str, pause: str) -> None:
    """Take tasks until the file `end` is there, and outlive restarts of the database."""
    while not (place / "end").exists():
        try:
            claims = queue.pick(EXPIRE, limit=int(limit))
            work(queue, place, claims, float(pause))
        except StorageError:
            CLOCK.sleep(0.2)
            continue
        if not claims:
            CLOCK.sleep(0.05)


def victim(queue: TaskQueue, place: Path, pid: str) -> None:
    """Take a task, delete one batch, say so, and stop for as long as nobody wakes it up."""
    (claim,) = queue.pick(EXPIRE)
    holding = Holding(queue, Event()).take([claim])
    holding.check([claim])
    delete(place, claim, 0)
    (place / pid).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    going, _ = holding.check([claim])
    if going:
        delete(place, claim, 1)
    else:
        (place / f"{pid}.refused").write_text(str(holding.ended(claim)))
    with suppress(TaskTakenOver):
        queue.succeed(claim, "too late")


def main() -> None:
    role, url, place, *more = sys.argv[1:]
    roles: dict[str, Callable[..., None]] = {"worker": worker, "victim": victim}
    database: Database = open_database(url)
    roles[role](TaskQueue(database, SystemChance(), 0.2), Path(place), *more)
    database.close()


if __name__ == "__main__":
    main()
