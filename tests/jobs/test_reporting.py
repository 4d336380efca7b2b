"""What kind of failure an error is, and what is told of those that nobody foresaw."""

from __future__ import annotations

from dataclasses import replace
from threading import Event

import pytest

from lakewarden.errors import ErrorKind
from lakewarden.jobs.holding import Holding
from lakewarden.jobs.listing import TaskLists
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.reporting import failure_at_table
from lakewarden.jobs.tasks import Failure
from lakewarden.jobs.warehouses import Access
from lakewarden.testing.simulation import World
from tests.jobs.small import EXPIRE, ORPHANS, picked


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "alone", "in_company"),
    [
        (ErrorKind.DAMAGED_VERSION, Failure.PERMANENT, Failure.TRANSIENT),
        (ErrorKind.CORRUPT_MANIFEST, Failure.PERMANENT, Failure.TRANSIENT),
        (ErrorKind.GC_DISABLED, Failure.PERMANENT, Failure.PERMANENT),
        (ErrorKind.QUEUE_CONFIG, Failure.PERMANENT, Failure.PERMANENT),
        (ErrorKind.BREAKER, Failure.PERMANENT, Failure.PERMANENT),
        (ErrorKind.STORAGE, Failure.TRANSIENT, Failure.TRANSIENT),
    ],
)
def test_only_what_looks_like_damage_may_be_the_doing_of_others(
    queue: TaskQueue, world: World, kind: ErrorKind, alone: Failure, in_company: Failure
) -> None:
    claim = replace(picked(queue, world.now(), name=ORPHANS), attempt=2)
    assert failure_at_table(queue, claim, kind.value) is alone
    picked(queue, world.now(), name=EXPIRE)
    assert failure_at_table(queue, claim, kind.value) is in_company


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("over", [False, True])
def test_nothing_that_a_task_tells_holds_a_secret(
    queue: TaskQueue, world: World, *, over: bool
) -> None:
    claim = picked(queue, world.now())
    holding = Holding(queue, Event()).take([claim])
    holding.hide([claim], Access({"key": "hunter2"}).hide)
    told = {"errors": [{"why": "hunter2"}, "sig=hunter3"], "at": "s3://a:hunter4@b", "n": 1}
    if over:
        holding.fail(claim, "password: hunter5", Failure.PERMANENT, told)
    else:
        holding.tell(claim, 0.5, told)
        holding.check([claim])
    found = TaskLists(queue.database).details(claim.scope, claim.task_id)
    assert found.details == {"errors": [{"why": "…"}, "sig=…"], "at": "s3://…@b", "n": 1}
    assert found.message == ("password: …" if over else None)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_looks_like_damage_is_looked_at_twice(queue: TaskQueue, world: World) -> None:
    claim = picked(queue, world.now(), name=ORPHANS)
    kind = ErrorKind.DAMAGED_VERSION.value
    assert failure_at_table(queue, claim, kind) is Failure.TRANSIENT
    assert failure_at_table(queue, claim, ErrorKind.BREAKER.value) is Failure.PERMANENT
    assert failure_at_table(queue, replace(claim, attempt=2), kind) is Failure.PERMANENT
