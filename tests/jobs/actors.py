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

from lakewarden.errors import StorageError
from lakewarden.jobs.database import Database, open_database
from lakewarden.jobs.queue import BatchFence, Fence, TaskQueue
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
    """Do a batch of tasks as a pipeline run does: in steps, with a fence before each."""
    fence = BatchFence(queue, claims)
    for batch in range(BATCHES):
        fence.check()
        for claim in list(fence.claims):
            if fence.holds(claim):
                delete(place, claim, batch)
            else:
                # Stopped in between: what was not deleted is found again by the next attempt.
                fence.claims.remove(claim)
        CLOCK.sleep(pause)
    for claim in fence.claims:
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
    fence = Fence(queue, claim)
    fence.check()
    delete(place, claim, 0)
    (place / pid).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        fence.check()
        delete(place, claim, 1)
    except TaskTakenOver as refusal:
        held = fence.holds()
        (place / f"{pid}.refused").write_text(f"{held} {refusal.message}")
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
