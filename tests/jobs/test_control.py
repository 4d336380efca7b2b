"""What people do to tasks: on every state, all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from threading import Event
from uuid import UUID

import pytest

from lakewarden.jobs.control import Action, TaskControl
from lakewarden.jobs.database import Database
from lakewarden.jobs.holding import End, Holding
from lakewarden.jobs.listing import TaskLists
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.refusals import RequestRefused, TaskTakenOver
from lakewarden.jobs.tasks import Claim, Failure, Origin, Scope, Signal, TaskStatus, Turn
from lakewarden.testing.simulation import World
from tests.jobs.small import EXPIRE, LAKE, OTHER, active, logged, picked, wanted

Control = Callable[..., None]


@pytest.fixture
def control(database: Database) -> Control:
    return TaskControl(database).control


def stopping(queue: TaskQueue, control: Control, world: World) -> Claim:
    claim = picked(queue, world.now())
    control(LAKE, Action.STOP, [claim.task_id])
    return claim


def status(database: Database) -> str:
    (row,) = active(database)
    return str(row.status)


def test_a_running_task_is_asked_to_stop_and_tried_again_later(
    queue: TaskQueue, database: Database, control: Control, world: World
) -> None:
    claim = stopping(queue, control, world)
    assert status(database) == TaskStatus.STOPPING
    assert queue.heartbeat(claim) is Signal.STOP
    holding = Holding(queue, Event()).take([claim])
    assert holding.check([claim])[0] == frozenset()
    assert holding.ended(claim) == End("stopped on request", Failure.STOPPED)
    assert queue.fail(claim, "stopped on request", Failure.STOPPED) is TaskStatus.SCHEDULED
    assert queue.pick(EXPIRE) == []
    world.sleep(60)
    assert queue.pick(EXPIRE)[0].attempt == 2


def test_whoever_was_asked_to_stop_may_also_be_done(
    queue: TaskQueue, database: Database, control: Control, world: World
) -> None:
    queue.succeed(stopping(queue, control, world))
    assert active(database) == []


def test_whoever_does_not_stop_and_is_not_heard_of_loses_the_task(
    queue: TaskQueue, database: Database, control: Control, world: World
) -> None:
    claim = stopping(queue, control, world)
    world.sleep(claim.heartbeat_seconds)
    (taken,) = queue.pick(EXPIRE)
    assert (taken.task_id, taken.attempt) == (claim.task_id, 2)
    assert status(database) == TaskStatus.RUNNING


def test_stop_leaves_what_does_not_run(
    queue: TaskQueue, database: Database, control: Control, world: World
) -> None:
    (task_id,) = queue.enqueue([wanted(world.now())])
    control(LAKE, Action.STOP, [task_id])
    assert status(database) == TaskStatus.SCHEDULED


@pytest.mark.parametrize("state", ["waiting", "running", "stopping", "again"])
def test_cancel_ends_a_task_in_any_state(
    queue: TaskQueue, database: Database, control: Control, world: World, state: str
) -> None:
    claim: Claim | None = None
    if state == "waiting":
        (task_id,) = queue.enqueue([wanted(world.now())])
    else:
        claim = picked(queue, world.now())
        task_id = claim.task_id
        if state == "stopping":
            control(LAKE, Action.STOP, [task_id])
        if state == "again":
            queue.fail(claim, "not yet")
    assert task_id is not None
    control(LAKE, Action.CANCEL, [task_id])
    assert active(database) == []
    last = logged(database)[-1]
    assert (last.status, last.final) == (TaskStatus.CANCELLED, True)
    details = TaskLists(database).details(LAKE, task_id)
    assert details.info.status is TaskStatus.CANCELLED
    assert [one.message for one in details.attempts] == (["not yet"] if state == "again" else [])
    if claim is not None:
        assert queue.heartbeat(claim) is Signal.NOT_ACTIVE
        with pytest.raises(TaskTakenOver):
            queue.succeed(claim)
        holding = Holding(queue, Event()).take([claim])
        assert holding.check([claim])[0] == frozenset()
        # There is nothing to report.
        assert holding.ended(claim) == End("it was cancelled, or somebody else has it")
    assert queue.enqueue([wanted(world.now())]) != [None]


def test_a_waiting_task_runs_now_or_at_another_time(
    queue: TaskQueue, database: Database, control: Control, world: World
) -> None:
    (task_id,) = queue.enqueue([wanted(world.now() + timedelta(days=9))])
    later = world.now() + timedelta(days=500)
    control(LAKE, Action.RUN_AT, [task_id], at=later)
    (row,) = active(database)
    assert row.scheduled_for == later
    control(LAKE, Action.RUN_NOW, [task_id])
    assert [claim.task_id for claim in queue.pick(EXPIRE)] == [task_id]


@pytest.mark.parametrize("origin", [Origin.COMMIT, Origin.ADAPTIVE])
def test_what_somebody_put_off_is_not_brought_forward(
    queue: TaskQueue, database: Database, control: Control, world: World, origin: Origin
) -> None:
    (task_id,) = queue.enqueue([wanted(world.now(), origin=origin)])
    later = world.now() + timedelta(days=2)
    control(LAKE, Action.RUN_AT, [task_id], at=later)
    with database.writing() as connection:
        assert queue.bring_forward([wanted(world.now())], connection) == [Turn.WAITS]
    assert queue.pick(EXPIRE) == []
    world.sleep(2 * 86_400)
    # It is still the task that it was, and does no more than it would have done.
    assert [(claim.task_id, claim.origin) for claim in queue.pick(EXPIRE)] == [(task_id, origin)]


def test_who_wants_a_task_now_wants_it_to_do_what_it_can(
    queue: TaskQueue, control: Control, world: World
) -> None:
    later = world.now() + timedelta(hours=1)
    (task_id,) = queue.enqueue([wanted(later, origin=Origin.COMMIT)])
    control(LAKE, Action.RUN_NOW, [task_id])
    (claim,) = queue.pick(EXPIRE)
    assert (claim.task_id, claim.origin) == (task_id, Origin.MANUAL)


def test_run_now_shortens_the_wait_between_attempts(
    queue: TaskQueue, control: Control, world: World
) -> None:
    claim = picked(queue, world.now())
    queue.fail(claim, "not yet")
    control(LAKE, Action.RUN_NOW, [claim.task_id])
    (again,) = queue.pick(EXPIRE)
    assert (again.task_id, again.attempt) == (claim.task_id, 2)


def test_run_now_waits_no_longer_for_one_that_does_not_stop(
    queue: TaskQueue, database: Database, control: Control, world: World
) -> None:
    claim = stopping(queue, control, world)
    control(LAKE, Action.RUN_NOW, [claim.task_id])
    # It is not the task's worker from then on, also before somebody else is.
    assert queue.heartbeat(claim) is Signal.NOT_ACTIVE
    (again,) = queue.pick(EXPIRE)
    assert (again.task_id, again.attempt) == (claim.task_id, 2)
    with pytest.raises(TaskTakenOver):
        queue.fail(claim, "stopped")
    (row,) = logged(database)
    assert (row.attempt, row.status, row.failure) == (1, TaskStatus.FAILED, Failure.STOPPED)
    assert "did not in time" in row.message
    queue.succeed(again)


@pytest.mark.parametrize("action", [Action.RUN_NOW, Action.RUN_AT])
def test_a_running_task_is_left_to_run(
    queue: TaskQueue, database: Database, control: Control, world: World, action: Action
) -> None:
    claim = picked(queue, world.now())
    at = {"at": world.now()} if action is Action.RUN_AT else {}
    control(LAKE, action, [claim.task_id], **at)
    assert status(database) == TaskStatus.RUNNING
    assert queue.heartbeat(claim) is Signal.CONTINUE


@pytest.mark.parametrize("action", [Action.STOP, Action.CANCEL, Action.RUN_NOW])
def test_a_task_that_is_over_stays_over(
    queue: TaskQueue, database: Database, control: Control, world: World, action: Action
) -> None:
    claim = picked(queue, world.now())
    queue.succeed(claim)
    control(LAKE, action, [claim.task_id])
    (row,) = logged(database)
    assert row.status == TaskStatus.SUCCESS


@pytest.mark.parametrize("action", [Action.STOP, Action.CANCEL, Action.RUN_NOW])
def test_one_unknown_task_and_nothing_is_done(
    queue: TaskQueue, database: Database, control: Control, world: World, action: Action
) -> None:
    claim = picked(queue, world.now())
    before = active(database)
    for scope, more in ((LAKE, [UUID(int=5)]), (OTHER, []), (Scope(), [])):
        with pytest.raises(RequestRefused, match="there is no task") as error:
            control(scope, action, [claim.task_id, *more])
        assert (error.value.name, error.value.code) == ("TaskNotFoundError", 404)
    assert active(database) == before


def test_limits_of_a_request(database: Database, control: Control, world: World) -> None:
    control(LAKE, Action.CANCEL, [])
    for given, at, name in (
        ([UUID(int=number) for number in range(101)], None, "TooManyTasks"),
        ([UUID(int=1), UUID(int=1)], None, "DuplicateTaskIds"),
        ([UUID(int=1)], world.now(), "BadRequest"),
    ):
        with pytest.raises(RequestRefused) as error:
            control(LAKE, Action.CANCEL, given, at=at)
        assert (error.value.name, error.value.code) == (name, 400)
    with pytest.raises(RequestRefused, match="needs scheduled-for"):
        control(LAKE, Action.RUN_AT, [UUID(int=1)])


@pytest.mark.parametrize("year", [1, 1969, 3000, 9999])
def test_a_time_that_nobody_can_mean_is_refused(
    queue: TaskQueue, database: Database, control: Control, world: World, year: int
) -> None:
    at = datetime(year, 12, 31, 23, 59, 59, tzinfo=UTC)
    (task_id,) = queue.enqueue([wanted(world.now())])
    before = active(database)
    with pytest.raises(RequestRefused, match="years 1970 to 2999") as error:
        control(LAKE, Action.RUN_AT, [task_id], at=at)
    assert (error.value.name, error.value.code) == ("BadRequest", 400)
    with pytest.raises(RequestRefused, match="years 1970 to 2999"):
        queue.schedule(wanted(at, 2, origin=Origin.MANUAL))
    assert active(database) == before
    for fine in (datetime(1970, 1, 1, tzinfo=UTC), datetime(2999, 12, 31, tzinfo=UTC)):
        control(LAKE, Action.RUN_AT, [task_id], at=fine)
