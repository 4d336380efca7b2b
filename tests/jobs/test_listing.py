"""Lists end, show each task once, and details tell what became of it."""

from __future__ import annotations

import base64
from datetime import timedelta
from itertools import pairwise
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakewarden.jobs.control import Action, TaskControl
from lakewarden.jobs.database import Database
from lakewarden.jobs.listing import Page, TaskFilter, TaskLists, read_token
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.refusals import RequestRefused
from lakewarden.jobs.tasks import Entity, EntityType, Failure, Scope, TaskStatus
from lakewarden.testing.simulation import World
from tests.jobs.small import (
    EXPIRE,
    LAKE,
    ORPHANS,
    OTHER,
    explained,
    fill_log,
    picked,
    reads_all,
    table,
    wanted,
)


@pytest.fixture
def lists(database: Database) -> TaskLists:
    return TaskLists(database)


def ids(page: Page) -> list[UUID]:
    return [task.task_id for task in page.tasks]


def all_pages(lists: TaskLists, size: int, wanted_: TaskFilter | None = None) -> list[UUID]:
    found, token = [], None
    for _ in range(100):
        page = lists.page(LAKE, wanted_, token=token, size=size)
        found += ids(page)
        if page.next_token is None:
            return found
        assert page.tasks
        token = page.next_token
    pytest.fail("the list has no end")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 100])
def test_pages_come_to_an_end_and_show_each_task_once(
    queue: TaskQueue, lists: TaskLists, world: World, size: int
) -> None:
    made: list[UUID] = []
    for number in range(1, 8):
        # Two and two are made at the same time.
        if number % 2:
            world.sleep(1)
        (one,) = queue.enqueue([wanted(world.now(), number)])
        assert one is not None
        made.append(one)
    for claim in queue.pick(EXPIRE, limit=3):
        queue.succeed(claim)
    found = all_pages(lists, size)
    assert sorted(found) == sorted(made)
    created = [task.created_at for task in lists.page(LAKE).tasks]
    assert created == sorted(created, reverse=True)


def test_a_page_is_read_from_an_index(lists: TaskLists, database: Database) -> None:
    fill_log(database)
    page = lists.page(LAKE, size=10)
    whole = [one.task_id for one in lists.page(LAKE, size=1000).tasks]
    assert ids(page) == whole[:10]
    assert ids(lists.page(LAKE, size=10, token=page.next_token)) == whole[10:20]
    plans = explained(
        database,
        lambda: (lists.page(LAKE, size=10), lists.page(LAKE, size=10, token=page.next_token)),
    )
    assert len(plans) == 2
    for plan in plans:
        assert "ix_task_log_warehouse_id_created_at_task_id" in plan, plan
        assert not reads_all(plan), plan
        # What is sorted is what the index has given for a page, never the log.
        for line, below in pairwise(line for line in plan.splitlines() if "Key:" not in line):
            assert "Sort" not in line or "task_log" not in below, plan
            assert "USE TEMP B-TREE" not in below or "task_log" not in line, plan


def test_a_full_last_page_has_no_token(queue: TaskQueue, lists: TaskLists, world: World) -> None:
    queue.enqueue([wanted(world.now(), number) for number in (1, 2)])
    assert lists.page(LAKE, size=2).next_token is None
    assert lists.page(OTHER) == Page((), None)


def test_a_task_that_is_tried_again_is_listed_once_as_it_is_now(
    queue: TaskQueue, lists: TaskLists, world: World
) -> None:
    claim = picked(queue, world.now())
    queue.fail(claim, "not yet")
    (task,) = lists.page(LAKE).tasks
    assert (task.task_id, task.status, task.attempt) == (claim.task_id, TaskStatus.SCHEDULED, 1)
    assert lists.page(LAKE, TaskFilter(status=[TaskStatus.FAILED])).tasks == ()
    world.sleep(60)
    (again,) = queue.pick(EXPIRE)
    queue.fail(again, "never", Failure.PERMANENT)
    (task,) = lists.page(LAKE).tasks
    assert (task.task_id, task.status, task.attempt) == (claim.task_id, TaskStatus.FAILED, 2)
    assert task.updated_at == world.now()


def test_tokens_are_lakekeepers(queue: TaskQueue, lists: TaskLists, world: World) -> None:
    queue.enqueue([wanted(world.now(), number) for number in (1, 2)])
    first = lists.page(LAKE, size=1)
    token = first.next_token
    assert token is not None
    assert "=" not in token
    text = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    micros = int(world.now().timestamp() * 1_000_000)
    assert text == f"1&{micros}&{first.tasks[0].task_id}"


@pytest.mark.parametrize(
    ("token", "name"),
    [
        ("*", "PaginateTokenDecodeError"),
        ("é", "PaginateTokenDecodeError"),
        ("abcde", "PaginateTokenDecodeError"),
        (base64.urlsafe_b64encode(b"2&5&x").decode(), "PaginateTokenParseError"),
        (base64.urlsafe_b64encode(b"1&5").decode(), "PaginateTokenParseError"),
        (base64.urlsafe_b64encode(b"1&5&" + b"0" * 31).decode(), "PaginateTokenParseError"),
        (
            base64.urlsafe_b64encode(b"1&" + b"9" * 30 + b"&" + b"0" * 32).decode(),
            "PaginateTokenParseError",
        ),
    ],
)
def test_a_token_of_somebody_else_is_refused(lists: TaskLists, token: str, name: str) -> None:
    with pytest.raises(RequestRefused) as error:
        lists.page(LAKE, token=token)
    assert (error.value.name, error.value.code) == (name, 400)


@given(st.text(max_size=80))
def test_no_token_breaks_anything(token: str) -> None:
    with pytest.raises(RequestRefused):
        read_token(token)


def test_filters_leave_what_fits(queue: TaskQueue, lists: TaskLists, world: World) -> None:
    start = world.now()
    (one,) = queue.enqueue([wanted(start, 1)])
    world.sleep(10)
    (two,) = queue.enqueue([wanted(start, 2, ORPHANS)])
    world.sleep(10)
    whole = Entity(EntityType.WAREHOUSE)
    (three,) = queue.enqueue([wanted(start, 3)])
    queue.succeed(queue.pick(ORPHANS)[0])

    def found(**conditions: object) -> list[UUID | None]:
        return list(ids(lists.page(LAKE, TaskFilter(**conditions))))  # type: ignore[arg-type]

    assert found() == [three, two, one]
    assert found(status=[TaskStatus.SUCCESS]) == [two]
    assert found(status=[TaskStatus.SUCCESS, TaskStatus.SCHEDULED]) == [three, two, one]
    assert found(queues=[EXPIRE]) == [three, one]
    assert found(queues=["nonsense"]) == []
    assert found(queues=[]) == found(entities=[]) == found(status=[]) == []
    assert found(entities=[table(1), table(2)]) == [two, one]
    assert found(entities=[whole]) == []
    assert found(created_after=start + timedelta(seconds=10)) == [three, two]
    assert found(created_before=start + timedelta(seconds=10)) == [two, one]
    assert lists.page(OTHER).tasks == ()
    assert lists.page(Scope()).tasks == ()


@pytest.mark.parametrize(("what", "name"), [("entities", "TooManyEntities"), ("queues", "TooManyQueueNames")])  # fmt: skip
def test_too_long_filters_are_refused(what: str, name: str) -> None:
    with pytest.raises(RequestRefused) as error:
        TaskFilter(**{what: [table(number) for number in range(101)]})  # type: ignore[arg-type]
    assert error.value.name == name
    TaskFilter(**{what: [table(number) for number in range(100)]})  # type: ignore[arg-type]


# -- details -------------------------------------------------------------------------------------


def test_details_tell_of_the_attempt_that_runs_and_those_before(
    queue: TaskQueue, lists: TaskLists, world: World
) -> None:
    claim = picked(queue, world.now())
    for number in range(1, 4):
        world.sleep(2)
        queue.heartbeat(claim, number / 10, {"files": number})
        queue.fail(claim, f"broken {number}")
        waits = lists.details(LAKE, claim.task_id)
        assert (waits.message, waits.details) == (None, None)
        assert [one.attempt for one in waits.attempts] == list(range(number, 0, -1))
        world.sleep(3600)
        (claim,) = queue.pick(EXPIRE)
    queue.heartbeat(claim, 0.7, {"files": 9})
    details = lists.details(LAKE, claim.task_id)
    assert (details.info.status, details.info.attempt) == (TaskStatus.RUNNING, 4)
    assert (details.details, details.message) == ({"files": 9}, None)
    assert [one.attempt for one in details.attempts] == [3, 2, 1]
    third = details.attempts[0]
    assert (third.message, third.progress, third.details) == ("broken 3", 0.3, {"files": 3})
    assert third.duration_seconds == 2.0
    assert [one.attempt for one in lists.details(LAKE, claim.task_id, attempts=2).attempts] == [
        3,
        2,
    ]


def test_details_of_a_task_that_is_over_tell_how_it_ended(
    queue: TaskQueue, lists: TaskLists, world: World
) -> None:
    claim = picked(queue, world.now())
    queue.fail(claim, "not yet")
    world.sleep(60)
    (claim,) = queue.pick(EXPIRE)
    queue.succeed(claim, "3 went", result={"count": 3})
    details = lists.details(LAKE, claim.task_id)
    assert (details.info.status, details.info.progress) == (TaskStatus.SUCCESS, 1.0)
    assert (details.message, details.details) == ("3 went", {"count": 3})
    assert [one.message for one in details.attempts] == ["not yet"]
    assert lists.details(LAKE, claim.task_id, attempts=0).attempts == ()


def test_a_failure_of_the_only_attempt_can_be_read(
    queue: TaskQueue, lists: TaskLists, world: World
) -> None:
    claim = picked(queue, world.now())
    queue.fail(claim, "corrupt manifest", Failure.PERMANENT)
    assert lists.details(LAKE, claim.task_id).message == "corrupt manifest"


def test_others_tasks_are_not_told_of(queue: TaskQueue, lists: TaskLists, world: World) -> None:
    claim = picked(queue, world.now())
    for scope, name in ((OTHER, "TaskNotFoundError"), (Scope(), "TaskNotFound")):
        with pytest.raises(RequestRefused) as error:
            lists.details(scope, claim.task_id)
        assert (error.value.name, error.value.code) == (name, 404)


def test_queues_are_counted(queue: TaskQueue, lists: TaskLists, world: World) -> None:
    start = world.now()
    queue.enqueue([wanted(start + timedelta(hours=number), number) for number in (1, 2, 3)])
    world.sleep(3600)
    queue.pick(EXPIRE)
    found = {(one.queue, one.status): (one.number, one.next_at) for one in lists.counts()}
    assert found == {
        (EXPIRE, TaskStatus.RUNNING): (1, start + timedelta(hours=1)),
        (EXPIRE, TaskStatus.SCHEDULED): (2, start + timedelta(hours=2)),
    }


def test_a_task_that_was_cancelled_is_listed_as_such(
    queue: TaskQueue, lists: TaskLists, world: World
) -> None:
    (task_id,) = queue.enqueue([wanted(world.now())])
    assert task_id is not None
    TaskControl(queue.database).control(LAKE, Action.CANCEL, [task_id])
    (task,) = lists.page(LAKE).tasks
    assert (task.status, task.attempt, task.picked_up_at) == (TaskStatus.CANCELLED, 0, None)
