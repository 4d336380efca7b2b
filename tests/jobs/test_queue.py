"""The queue keeps its promises, on SQLite and on PostgreSQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from threading import Barrier, Event
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
import sqlalchemy as sa

from lakewarden.jobs.control import Action, TaskControl
from lakewarden.jobs.database import Database, open_database
from lakewarden.jobs.holding import Holding
from lakewarden.jobs.queue import BACKOFF_FIRST_SECONDS, LOST, TaskQueue
from lakewarden.jobs.queues import OPTIMIZE, QUEUES
from lakewarden.jobs.refusals import RequestRefused, TaskAlreadyActive, TaskTakenOver
from lakewarden.jobs.schema import SLOT, TASK
from lakewarden.jobs.tasks import Beat, Extent, Failure, Origin, Scope, Signal, TaskStatus, Turn
from lakewarden.testing.simulation import World
from lakewarden.world import SystemChance, SystemClock
from tests.jobs.small import (
    EXPIRE,
    LAKE,
    ORPHANS,
    OTHER,
    active,
    explained,
    fill_log,
    logged,
    picked,
    reads_all,
    store,
    table,
    wanted,
)

if TYPE_CHECKING:
    from tests.postgres import PostgresServer

HEARTBEAT = QUEUES[EXPIRE].heartbeat_seconds
ATTEMPTS = QUEUES[EXPIRE].max_attempts


# -- into the queue ------------------------------------------------------------------------------


def test_there_is_one_active_task_for_a_table_and_queue(queue: TaskQueue, world: World) -> None:
    first = wanted(world.now())
    others = [
        wanted(world.now(), 2),
        wanted(world.now(), queue=ORPHANS),
        wanted(world.now(), scope=OTHER),
    ]
    made = queue.enqueue([first, *others, first])
    assert made[-1] is None
    assert len({one for one in made if one is not None}) == 4
    assert queue.enqueue([replace(first, data={"other": 1})]) == [None]


def test_asking_for_a_task_that_is_there_tells_which(queue: TaskQueue, world: World) -> None:
    made = queue.schedule(wanted(world.now()))
    with pytest.raises(TaskAlreadyActive) as error:
        queue.schedule(wanted(world.now()))
    assert error.value.task_id == made
    assert f"task-id={made}" in error.value.message
    assert (error.value.name, error.value.code) == ("TaskAlreadyActive", 409)


def test_tasks_of_one_warehouse_are_picked_together_and_leave_the_others(
    queue: TaskQueue, world: World
) -> None:
    now = world.now()
    for number in range(1, 4):
        minutes = timedelta(minutes=number)
        queue.enqueue([wanted(now - minutes, number), wanted(now - minutes, number, scope=OTHER)])
    oldest = wanted(now - timedelta(hours=1), 9, scope=OTHER)
    queue.enqueue([oldest, wanted(now, scope=Scope())])

    def warehouses(limit: int) -> list[UUID | None]:
        claims = queue.pick(EXPIRE, limit=limit, one_warehouse=True)
        return [one.scope.warehouse_id for one in claims]

    assert warehouses(3) == [OTHER.warehouse_id] * 3
    assert warehouses(500) == [LAKE.warehouse_id] * 3
    assert warehouses(500) == [OTHER.warehouse_id]
    assert warehouses(500) == [None]
    assert warehouses(500) == []


def test_a_slot_is_free_again_when_its_task_has_ended(queue: TaskQueue, world: World) -> None:
    claim = picked(queue, world.now())
    queue.succeed(claim)
    again = picked(queue, world.now())
    assert again.task_id != claim.task_id
    assert again.attempt == 1
    assert again.fence > claim.fence


def test_a_database_from_a_backup_gives_no_number_away_again(
    template: Path, tmp_path: Path, world: World
) -> None:
    """A worker goes on while the database is put back to before it began, and another begins."""
    place = tmp_path / "tasks.db"
    place.write_bytes(template.read_bytes())
    with closing(open_database(f"sqlite:///{place}", clock=world)) as database:
        TaskQueue(database, world).enqueue([wanted(world.now())])
    backup = place.read_bytes()
    with closing(open_database(f"sqlite:///{place}", clock=world)) as database:
        (before,) = TaskQueue(database, world).pick(EXPIRE)
    world.sleep(1)
    place.write_bytes(backup)
    with closing(open_database(f"sqlite:///{place}", clock=world)) as database:
        queue = TaskQueue(database, world)
        (after,) = queue.pick(EXPIRE)
        assert (before.task_id, before.attempt) == (after.task_id, after.attempt)
        assert queue.heartbeat(before) is Signal.NOT_ACTIVE
        assert queue.heartbeat(after) is Signal.CONTINUE
        with pytest.raises(TaskTakenOver):
            queue.succeed(before)


def test_tasks_that_do_not_come_to_be_are_not_there(
    queue: TaskQueue, database: Database, world: World
) -> None:
    def fails() -> None:
        with database.writing() as connection:
            assert queue.enqueue([wanted(world.now())], connection=connection) != [None]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert active(database) == []
    assert queue.enqueue([wanted(world.now())]) != [None]


def test_of_many_that_want_a_slot_one_gets_it(url: str, world: World) -> None:
    def ask(queue: TaskQueue) -> UUID | None:
        barrier.wait()
        return queue.enqueue([wanted(world.now())])[0]

    databases = [open_database(url, clock=world) for _ in range(8)]
    barrier = Barrier(len(databases))
    with ThreadPoolExecutor(len(databases)) as pool:
        made = list(pool.map(ask, [TaskQueue(one, SystemChance()) for one in databases]))
    for one in databases:
        one.close()
    assert len([one for one in made if one is not None]) == 1


# -- out of the queue ----------------------------------------------------------------------------


def test_only_what_is_due_is_picked_oldest_first(queue: TaskQueue, world: World) -> None:
    now = world.now()
    queue.enqueue(
        [
            wanted(now - timedelta(hours=1), 1),
            wanted(now - timedelta(hours=2), 2),
            wanted(now + timedelta(microseconds=1), 3),
            wanted(now, 4),
            wanted(now, 5, ORPHANS),
        ]
    )
    claims = queue.pick(EXPIRE, limit=10)
    assert [claim.entity.name for claim in claims] == [("db", "t2"), ("db", "t1"), ("db", "t4")]
    assert queue.pick(EXPIRE) == []
    world.sleep(1)
    assert [claim.entity.name for claim in queue.pick(EXPIRE)] == [("db", "t3")]


def test_a_batch_is_no_larger_than_asked_for(queue: TaskQueue, world: World) -> None:
    queue.enqueue([wanted(world.now(), number) for number in range(1, 1201)])
    sizes = [len(queue.pick(EXPIRE, limit=1100)) for _ in range(3)]
    assert sizes == [1100, 100, 0]


def test_a_claim_tells_all_that_a_worker_needs(queue: TaskQueue, world: World) -> None:
    store(queue.database, LAKE, EXPIRE, {"min-snapshots-to-keep": 3, "max-ref-age-ms": None}, 77)
    made = wanted(world.now(), reason="20 can go", data={"a": {"b": None}}, origin=Origin.MANUAL)
    (task_id,) = queue.enqueue([made])
    world.sleep(5)
    (claim,) = queue.pick(EXPIRE)
    assert (claim.task_id, claim.attempt) == (task_id, 1)
    assert (claim.scope, claim.entity, claim.queue) == (made.scope, made.entity, EXPIRE)
    assert (claim.reason, claim.data, claim.origin) == ("20 can go", {"a": {"b": None}}, "manual")
    assert claim.config == {"min-snapshots-to-keep": 3, "max-ref-age-ms": None}
    assert claim.heartbeat_seconds == 77
    assert claim.scheduled_for == made.scheduled_for
    assert claim.picked_up_at == world.now()
    assert claim.done_at is None


def looked_at(queue: TaskQueue) -> datetime | None:
    """Return when somebody has looked at the one table there is."""
    with queue.database.reading() as connection:
        found: datetime | None = connection.scalar(sa.select(SLOT.c.ran_at))
    return found


def test_the_next_run_knows_when_the_last_one_ended(queue: TaskQueue, world: World) -> None:
    queue.succeed(picked(queue, world.now()))
    ended = world.now()
    world.sleep(60)
    again = picked(queue, world.now())
    assert looked_at(queue) == again.done_at == ended
    queue.fail(again, "broken", Failure.PERMANENT)
    world.sleep(60)
    third = picked(queue, world.now())
    assert looked_at(queue) == third.done_at == ended
    # A dry run does not do what is to be done, and one that was skipped not even look.
    queue.succeed(third, extent=Extent.LOOKED)
    looked = world.now()
    world.sleep(60)
    fourth = picked(queue, world.now())
    assert (looked_at(queue), fourth.done_at) == (looked, ended)
    queue.succeed(fourth, extent=Extent.SKIPPED)
    world.sleep(60)
    fifth = picked(queue, world.now())
    assert (looked_at(queue), fifth.done_at) == (looked, ended)


def test_an_unknown_queue_is_told_with_those_there_are(queue: TaskQueue) -> None:
    with pytest.raises(RequestRefused, match="expire_snapshots, optimize") as error:
        queue.pick("nonsense")
    assert error.value.name == "QueueNotFound"


# -- while it runs -------------------------------------------------------------------------------


def test_a_heartbeat_tells_how_far_it_is(
    queue: TaskQueue, database: Database, world: World
) -> None:
    claim = picked(queue, world.now())
    world.sleep(10)
    assert queue.heartbeat(claim, 0.25, {"files": 3}) is Signal.CONTINUE
    assert queue.heartbeat(claim) is Signal.CONTINUE
    (row,) = active(database)
    assert (row.progress, row.execution_details) == (0.25, {"files": 3})
    assert row.last_heartbeat_at == world.now()


def test_one_transaction_tells_of_a_whole_batch(queue: TaskQueue, world: World) -> None:
    queue.enqueue([wanted(world.now(), number) for number in range(1, 601)])
    claims = queue.pick(EXPIRE, limit=600)
    queue.succeed(claims[0])
    signals = queue.heartbeats([Beat(claim, 0.5) for claim in claims])
    assert signals[claims[0].task_id] is Signal.NOT_ACTIVE
    assert {signals[claim.task_id] for claim in claims[1:]} == {Signal.CONTINUE}


def test_signs_of_life_wait_for_nobody_who_waits_for_them(
    postgres: PostgresServer, postgres_template: str, world: World
) -> None:
    database = open_database(
        postgres.url(postgres.database(template=postgres_template)), clock=world
    )
    queue = TaskQueue(database, world)
    first, second = (picked(queue, world.now(), number) for number in (1, 2))
    assert first.task_id < second.task_id
    row = sa.select(TASK.c.task_id).with_for_update(nowait=True)
    waits = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    with ThreadPoolExecutor(1) as pool:
        with database.writing() as connection:
            connection.execute(row.where(TASK.c.task_id == first.task_id))
            # Whatever each of them tells.
            beats = pool.submit(queue.heartbeats, [Beat(second), Beat(first, 0.5)])
            for _ in range(500):
                if connection.scalar(waits):
                    break
                SystemClock().sleep(0.01)
            assert not beats.done()
            connection.execute(row.where(TASK.c.task_id == second.task_id))
        assert set(beats.result(10).values()) == {Signal.CONTINUE}
    database.close()


def test_whoever_is_heard_of_keeps_the_task(queue: TaskQueue, world: World) -> None:
    claim = picked(queue, world.now())
    for _ in range(10):
        world.sleep(HEARTBEAT - 1)
        assert queue.pick(EXPIRE) == []
        assert queue.heartbeat(claim) is Signal.CONTINUE
    world.sleep(HEARTBEAT)
    (taken,) = queue.pick(EXPIRE)
    assert taken.task_id == claim.task_id


def test_a_lost_worker_has_nothing_to_say_any_more(
    queue: TaskQueue, database: Database, world: World
) -> None:
    late = picked(queue, world.now())
    queue.heartbeat(late, 0.5, {"files": 3})
    world.sleep(HEARTBEAT)
    (taken,) = queue.pick(EXPIRE)
    assert (taken.attempt, taken.task_id) == (2, late.task_id)
    assert taken.fence > late.fence

    assert queue.heartbeat(late, 0.9, {"files": 9}) is Signal.NOT_ACTIVE
    for report in (
        lambda: queue.succeed(late, successor=wanted(world.now(), 7)),
        lambda: queue.fail(late, "late"),
    ):
        with pytest.raises(TaskTakenOver, match="cancelled or taken over"):
            report()
    (row,) = active(database)
    assert (row.task_id, row.status, row.progress) == (taken.task_id, TaskStatus.RUNNING, 0.0)
    (lost,) = logged(database)
    assert (lost.attempt, lost.status, lost.message) == (1, TaskStatus.FAILED, LOST)
    assert (lost.failure, lost.final, lost.progress) == (Failure.LOST, False, 0.5)
    assert lost.execution_details == {"files": 3}
    queue.succeed(taken)
    assert [row.final for row in logged(database)] == [False, True]


def test_a_task_that_kills_its_workers_comes_to_an_end(
    queue: TaskQueue, database: Database, world: World
) -> None:
    first = picked(queue, world.now())
    for attempt in range(2, ATTEMPTS + 1):
        world.sleep(HEARTBEAT)
        (claim,) = queue.pick(EXPIRE)
        assert claim.attempt == attempt
    world.sleep(HEARTBEAT)
    assert queue.pick(EXPIRE) == []
    (row,) = active(database)
    assert (row.parent_task_id, row.attempt) == (first.task_id, 0)
    assert row.scheduled_for == world.now() + timedelta(days=1)
    assert [row.final for row in logged(database)] == [*[False] * (ATTEMPTS - 1), True]


def test_an_answer_holds_no_longer_than_nobody_can_take_over(
    queue: TaskQueue, world: World
) -> None:
    claim = picked(queue, world.now())
    holding = Holding(queue, Event()).take([claim])
    world.sleep(HEARTBEAT - 1)
    going, until = holding.check([claim])
    assert going == {claim.task_id}
    # Half of the time is for clocks that differ.
    assert until == world.now() + timedelta(seconds=HEARTBEAT / 2)
    world.sleep(HEARTBEAT - 1)
    assert queue.pick(EXPIRE) == []
    world.sleep(1)
    (taken,) = queue.pick(EXPIRE)
    assert holding.check([claim])[0] == frozenset()
    assert Holding(queue, Event()).take([taken]).check([taken])[0] == {taken.task_id}


def test_a_batch_goes_on_without_what_others_have(queue: TaskQueue, world: World) -> None:
    queue.enqueue([wanted(world.now(), number) for number in (1, 2, 3)])
    claims = one, two, three = queue.pick(EXPIRE, limit=3)
    holding = Holding(queue, Event()).take(claims)
    world.sleep(HEARTBEAT - 1)
    for claim in (one, three):
        queue.heartbeat(claim)
    TaskControl(queue.database).control(LAKE, Action.STOP, [one.task_id])
    world.sleep(1)
    assert [claim.task_id for claim in queue.pick(EXPIRE)] == [two.task_id]
    assert holding.check(claims)[0] == {three.task_id}
    ends = [holding.ended(claim) for claim in claims]
    assert [end and end.failure for end in ends] == [Failure.STOPPED, None, None]
    assert [end is None for end in ends] == [False, False, True]


# -- done ----------------------------------------------------------------------------------------


def test_what_failed_attempts_have_deleted_since_a_table_was_done_is_known(
    queue: TaskQueue, database: Database, world: World
) -> None:
    def attempt(number: int, size: int, name: str = ORPHANS) -> None:
        claim = picked(queue, world.now(), number, name)
        queue.fail(claim, "broken", Failure.PERMANENT, result={"deleted_bytes": size})
        world.sleep(60)

    attempt(1, 1)
    queue.succeed(picked(queue, world.now(), 1, ORPHANS))
    world.sleep(60)
    attempt(1, 10)
    queue.succeed(picked(queue, world.now(), 1, ORPHANS), extent=Extent.LOOKED)
    attempt(1, 100)
    attempt(2, 1000)
    attempt(1, 5000, EXPIRE)
    claim = picked(queue, world.now(), 3, ORPHANS)
    queue.fail(claim, "no result")
    claims = [replace(claim, entity=table(number)) for number in (1, 2, 3)]
    assert queue.deleted_before(claims) == {table(1).id: 110, table(2).id: 1000, table(3).id: 0}
    assert queue.deleted_before([]) == {}


def test_no_look_at_one_table_reads_the_whole_log(queue: TaskQueue, database: Database) -> None:
    claim = picked(queue, database.clock.now(), 1, ORPHANS)
    fill_log(database)
    plans = explained(database, lambda: (queue.deleted_before([claim]), queue.had_company(claim)))
    assert len(plans) == 2
    for plan in plans:
        assert "ix_task_log_slot_ended_at" in plan, plan
        assert not reads_all(plan), plan


def test_success_ends_a_task_and_queues_the_next(
    queue: TaskQueue, database: Database, world: World
) -> None:
    claim = picked(queue, world.now())
    world.sleep(90)
    queue.heartbeat(claim, 0.4)
    world.sleep(0.5)
    later = wanted(world.now() + timedelta(days=3), reason="by then")
    queue.succeed(claim, "3 went", result={"count": 3}, successor=later)
    (row,) = logged(database)
    assert (row.status, row.message, row.result) == (TaskStatus.SUCCESS, "3 went", {"count": 3})
    assert (row.progress, row.duration_seconds, row.final) == (1.0, 90.5, True)
    assert row.ended_at == world.now()
    (following,) = active(database)
    assert (following.parent_task_id, following.reason) == (claim.task_id, "by then")
    assert following.scheduled_for == later.scheduled_for


def test_what_goes_along_with_success_stands_or_falls_with_it(
    queue: TaskQueue, database: Database, world: World
) -> None:
    claim = picked(queue, world.now())

    def add(connection: object) -> None:
        queue.enqueue([wanted(world.now(), 9)], connection=connection)  # type: ignore[arg-type]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        queue.succeed(claim, along=add)
    assert [row.task_id for row in active(database)] == [claim.task_id]
    assert logged(database) == []
    queue.succeed(claim)


def test_telling_the_same_twice_is_fine_and_another_story_is_not(
    queue: TaskQueue, database: Database, world: World
) -> None:
    done, failed = picked(queue, world.now(), 1), picked(queue, world.now(), 2)
    later = wanted(world.now())
    for _ in range(2):
        queue.succeed(done, "done", successor=later)
        assert queue.fail(failed, "not yet") is TaskStatus.SCHEDULED
    with pytest.raises(TaskTakenOver):
        queue.fail(done, "no")
    with pytest.raises(TaskTakenOver):
        queue.succeed(failed, "yes")
    assert len(logged(database)) == 2
    assert len(active(database)) == 2


def test_a_failure_is_followed_by_another_attempt_after_a_while(
    queue: TaskQueue, database: Database, world: World
) -> None:
    claim = picked(queue, world.now())
    made = claim.scheduled_for
    for attempt in range(1, ATTEMPTS):
        queue.heartbeat(claim, 0.3, {"files": attempt})
        assert queue.fail(claim, f"broken {attempt}") is TaskStatus.SCHEDULED
        (row,) = active(database)
        wait = (row.scheduled_for - world.now()).total_seconds()
        longest = BACKOFF_FIRST_SECONDS * 2 ** (attempt - 1)
        assert longest / 2 <= wait <= longest
        assert (row.attempt, row.progress, row.execution_details) == (attempt, 0.0, None)
        assert queue.pick(EXPIRE) == []
        world.sleep(wait)
        (claim,) = queue.pick(EXPIRE)
        assert claim.attempt == attempt + 1
    assert queue.fail(claim, "broken for good") is TaskStatus.FAILED
    rows = logged(database)
    assert [row.attempt for row in rows] == list(range(1, ATTEMPTS + 1))
    assert [row.final for row in rows] == [*[False] * (ATTEMPTS - 1), True]
    assert rows[0].scheduled_for == made
    assert (rows[0].progress, rows[0].execution_details) == (0.3, {"files": 1})


def test_waits_are_not_all_alike(queue: TaskQueue, database: Database, world: World) -> None:
    queue.enqueue([wanted(world.now(), number) for number in range(1, 21)])
    for claim in queue.pick(EXPIRE, limit=20):
        queue.fail(claim, "the store is down")
    assert len({row.scheduled_for for row in active(database)}) > 15


def test_what_fails_for_good_is_not_tried_again(
    queue: TaskQueue, database: Database, world: World
) -> None:
    claim = picked(queue, world.now(), name=ORPHANS)
    assert queue.fail(claim, "corrupt", Failure.PERMANENT) is TaskStatus.FAILED
    assert active(database) == []


@pytest.mark.parametrize("name", [EXPIRE, ORPHANS, OPTIMIZE])
def test_a_new_task_waits_for_the_next_day_after_all_attempts_have_failed(
    queue: TaskQueue, database: Database, world: World, name: str
) -> None:
    claim = picked(queue, world.now(), name=name)
    while queue.fail(claim, "the store is down") is TaskStatus.SCHEDULED:
        world.sleep(3600)
        (claim,) = queue.pick(name)
    assert claim.attempt == QUEUES[name].max_attempts
    (row,) = active(database)
    assert row.scheduled_for == world.now() + timedelta(days=1)
    assert (row.parent_task_id, row.attempt) == (claim.task_id, 0)
    assert row.task_id != claim.task_id


def test_attempts_that_were_stopped_do_not_count(
    queue: TaskQueue, database: Database, world: World
) -> None:
    claim = picked(queue, world.now())
    for _ in range(2 * ATTEMPTS):
        assert queue.fail(claim, "shutting down", Failure.STOPPED) is TaskStatus.SCHEDULED
        (row,) = active(database)
        # Nothing has failed: there is nothing to wait longer for each time.
        assert row.scheduled_for <= world.now() + timedelta(seconds=BACKOFF_FIRST_SECONDS)
        world.sleep(BACKOFF_FIRST_SECONDS)
        (claim,) = queue.pick(EXPIRE)
    for _ in range(ATTEMPTS - 2):
        assert queue.fail(claim, "broken") is TaskStatus.SCHEDULED
        world.sleep(3600)
        (claim,) = queue.pick(EXPIRE)
    # Neither for workers that are lost.
    world.sleep(3600)
    (claim,) = queue.pick(EXPIRE)
    assert claim.attempt == 3 * ATTEMPTS
    assert queue.fail(claim, "broken") is TaskStatus.FAILED


def test_a_run_that_takes_too_long_is_tried_once_more(queue: TaskQueue, world: World) -> None:
    claim = picked(queue, world.now(), name=ORPHANS)
    outcomes = [Failure.TRANSIENT, Failure.TIMEOUT, Failure.TRANSIENT]
    for failure in outcomes:
        assert queue.fail(claim, failure, failure) is TaskStatus.SCHEDULED
        world.sleep(3600)
        (claim,) = queue.pick(ORPHANS)
    assert queue.fail(claim, "too long again", Failure.TIMEOUT) is TaskStatus.FAILED


# -- bringing forward ----------------------------------------------------------------------------


def test_a_task_is_brought_forward_but_never_put_off(
    queue: TaskQueue, database: Database, world: World
) -> None:
    now = world.now()
    queue.enqueue([wanted(now + timedelta(days=5))])

    def bring(days: int) -> bool:
        with database.writing() as connection:
            sooner = wanted(now + timedelta(days=days), reason="new")
            return queue.bring_forward([sooner], connection) == [Turn.SOONER]

    assert [bring(6), bring(5), bring(2), bring(3)] == [False, False, True, False]
    (row,) = active(database)
    assert (row.scheduled_for, row.reason) == (now + timedelta(days=2), "new")


def test_what_somebody_asked_for_or_was_tried_is_not_brought_forward(
    queue: TaskQueue, database: Database, world: World
) -> None:
    now = world.now()
    queue.schedule(wanted(now + timedelta(days=5), 1, origin=Origin.MANUAL))
    queue.fail(picked(queue, now, 2), "not yet")
    with database.writing() as connection:
        turns = queue.bring_forward([wanted(now, number) for number in (1, 2, 3)], connection)
    # Of the third there is no task, or not any more.
    assert turns == [Turn.WAITS, Turn.WAITS, Turn.BEGUN]
