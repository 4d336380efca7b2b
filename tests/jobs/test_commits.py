"""What follows from a commit is queued with it, or neither is there."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

import pytest
import sqlalchemy as sa

from lakewarden.expiry import Ref, RefKind, Snapshot, SnapshotHistory
from lakewarden.jobs.commits import Change, Commits
from lakewarden.jobs.control import Action, TaskControl
from lakewarden.jobs.database import Database
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import OPTIMIZE
from lakewarden.jobs.scheduling import Fragmentation
from lakewarden.jobs.tasks import (
    EntityType,
    Extent,
    Failure,
    FixedBy,
    NewTask,
    Origin,
    Scope,
    TaskStatus,
)
from lakewarden.jobs.warehouses import FoundTable, TableEntity, WarehouseKind, Warehouses
from lakewarden.testing.simulation import World
from tests.jobs.small import EXPIRE, ORPHANS, active, store

DAY = timedelta(days=1)
ALL_ON: dict[str, dict[str, object]] = {
    EXPIRE: {"enable-expire-snapshots": True, "min-snapshots-to-expire": 2},
    ORPHANS: {"enable-remove-orphan-files": True},
    OPTIMIZE: {"enable-optimize": True},
}


class Lake:
    """A warehouse with two tables, and how to tell of commits to them."""

    def __init__(self, queue: TaskQueue, world: World) -> None:
        self.queue, self.world = queue, world
        self.warehouses = Warehouses(queue.database, world)
        self.commits = Commits(queue)
        self.scope = Scope(
            warehouse_id=self.warehouses.register("l", WarehouseKind.ICEBERG, "c").id
        )
        self.one, self.two = self.find({}, {})

    def find(self, *properties: dict[str, str]) -> list[TableEntity]:
        assert self.scope.warehouse_id is not None
        return self.warehouses.refresh(
            self.scope.warehouse_id,
            [
                FoundTable(
                    ("db", f"t{number}"), EntityType.TABLE, f"iceberg://c/db.t{number}", given
                )
                for number, given in enumerate(properties, 1)
            ],
        )

    def switch_on(self) -> None:
        for queue, config in ALL_ON.items():
            store(self.queue.database, self.scope, queue, config)

    def change(self, marker: str = "m1", ages: tuple[float, ...] = (9, 8, 7, 0)) -> Change:
        """A commit after which the table has snapshots of these ages, in days."""
        now = self.world.now()
        snapshots = [
            Snapshot(
                number, round((now - timedelta(days=age)).timestamp() * 1000), number - 1 or None
            )
            for number, age in enumerate(ages, 1)
        ]
        history = SnapshotHistory(snapshots, [Ref("main", len(ages), RefKind.BRANCH)], len(ages))
        return Change(
            self.one.id, marker, now, history=history, fragmentation=Fragmentation(50, 1 << 30)
        )

    def task(self, queue: str) -> NewTask:
        return NewTask(queue, self.scope, self.one.entity, self.world.now())

    def queued(self) -> dict[tuple[UUID, str], str]:
        return {(row.entity_id, row.queue_name): row.reason for row in active(self.queue.database)}


@pytest.fixture
def lake(queue: TaskQueue, world: World) -> Lake:
    return Lake(queue, world)


def test_a_commit_queues_what_it_makes_worthwhile(lake: Lake) -> None:
    lake.switch_on()
    outcomes = lake.commits.record(lake.scope, [lake.change()])
    assert [(one.queue, one.task_id is not None) for one in outcomes] == [
        (EXPIRE, True),
        (ORPHANS, True),
        (OPTIMIZE, True),
    ]
    one = lake.one.id
    assert lake.queued() == {
        (one, EXPIRE): "3 can go, of 2 that are worth a run",
        (one, ORPHANS): "nobody has looked for orphans yet",
        (one, OPTIMIZE): "48 files fewer for 1073741824 bytes read, 48 per GiB",
    }
    assert {row.origin for row in active(lake.queue.database)} == {Origin.COMMIT}
    (claim,) = lake.queue.pick(EXPIRE)
    assert claim.entity == lake.one.entity


def test_nothing_is_queued_where_nothing_is_switched_on(lake: Lake) -> None:
    assert lake.commits.record(lake.scope, [lake.change()]) == []
    assert lake.queued() == {}


def test_a_table_may_want_what_its_warehouse_does_not_and_the_other_way_round(lake: Lake) -> None:
    (lake.one, lake.two) = lake.find(
        {"lakekeeper.remove-orphan-files.enabled": "true"}, {"gc.enabled": "false"}
    )
    other = replace(lake.change(), table_id=lake.two.id)
    lake.commits.record(lake.scope, [lake.change(), other])
    assert set(lake.queued()) == {(lake.one.id, ORPHANS)}
    lake.switch_on()
    again = [lake.change("m2"), replace(other, marker="m2")]
    lake.commits.record(lake.scope, again)
    # Optimize removes nothing that others may need.
    assert set(lake.queued()) == {
        (lake.one.id, EXPIRE), (lake.one.id, ORPHANS), (lake.one.id, OPTIMIZE),
        (lake.two.id, OPTIMIZE),
    }  # fmt: skip


def test_properties_that_came_with_the_commit_count(lake: Lake) -> None:
    lake.switch_on()
    off = {"lakewarden.remove-orphan-files.enabled": "false", "gc.enabled": "true"}
    lake.commits.record(lake.scope, [replace(lake.change(), properties=off)])
    assert set(lake.queued()) == {(lake.one.id, EXPIRE), (lake.one.id, OPTIMIZE)}


def test_the_same_commit_told_twice_changes_nothing(lake: Lake) -> None:
    lake.switch_on()
    assert lake.commits.record(lake.scope, [lake.change()])
    for claim in lake.queue.pick(EXPIRE):
        lake.queue.succeed(claim)
    assert lake.commits.record(lake.scope, [lake.change()]) == []
    assert (lake.one.id, EXPIRE) not in lake.queued()
    assert lake.commits.record(lake.scope, [lake.change("m2")])
    assert (lake.one.id, EXPIRE) in lake.queued()


def test_the_commit_and_its_tasks_stand_or_fall_together(lake: Lake, database: Database) -> None:
    lake.switch_on()

    def crash() -> None:
        with database.writing() as connection:
            assert lake.commits.record_with(connection, lake.scope, [lake.change()])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    assert lake.queued() == {}
    assert lake.commits.unseen(lake.scope, {lake.one.id: "m1"}) == [lake.one.id]
    assert lake.commits.record(lake.scope, [lake.change()])
    assert lake.commits.unseen(lake.scope, {lake.one.id: "m1"}) == []


@pytest.mark.parametrize("name", [EXPIRE, OPTIMIZE])
def test_a_commit_while_its_task_runs_is_seen_after_it(lake: Lake, name: str) -> None:
    lake.switch_on()
    lake.commits.record(lake.scope, [lake.change("m1")])
    (claim,) = lake.queue.pick(name)
    for _ in range(2):
        # Told as often as somebody looks, and nothing comes of it yet.
        outcomes = lake.commits.record(lake.scope, [lake.change("m2")])
        assert [one.queue for one in outcomes if one.missed] == [name]
        assert lake.commits.unseen(lake.scope, {lake.one.id: "m2"}) == [lake.one.id]
    lake.queue.succeed(claim)
    lake.commits.record(lake.scope, [lake.change("m2")])
    assert (lake.one.id, name) in lake.queued()
    assert lake.commits.unseen(lake.scope, {lake.one.id: "m2"}) == []


def test_a_commit_before_the_next_attempt_is_seen_by_it(lake: Lake) -> None:
    lake.switch_on()
    lake.commits.record(lake.scope, [lake.change("m1")])
    (claim,) = lake.queue.pick(OPTIMIZE)
    lake.queue.fail(claim, "not yet")
    outcomes = lake.commits.record(lake.scope, [lake.change("m2")])
    assert not any(one.missed for one in outcomes)
    assert lake.commits.unseen(lake.scope, {lake.one.id: "m2"}) == []


def test_expiry_is_queued_for_later_and_brought_forward_but_not_put_off(lake: Lake) -> None:
    lake.switch_on()
    now = lake.world.now()
    lake.commits.record(lake.scope, [lake.change("m1", (2, 1, 0))])
    due = next(row for row in active(lake.queue.database) if row.queue_name == EXPIRE)
    assert due.scheduled_for == now + timedelta(days=4, milliseconds=1)
    store(
        lake.queue.database,
        lake.scope,
        EXPIRE,
        ALL_ON[EXPIRE] | {"max-snapshot-age-ms": 86_400_000},
    )
    lake.commits.record(lake.scope, [lake.change("m2", (2, 1, 0))])
    due = next(row for row in active(lake.queue.database) if row.queue_name == EXPIRE)
    assert due.scheduled_for == now + timedelta(milliseconds=1)
    store(lake.queue.database, lake.scope, EXPIRE, ALL_ON[EXPIRE])
    lake.commits.record(lake.scope, [lake.change("m3", (2, 1, 0))])
    still = next(row for row in active(lake.queue.database) if row.queue_name == EXPIRE)
    assert still.scheduled_for == due.scheduled_for


def test_a_commit_does_not_hurry_the_next_look_for_orphans(lake: Lake) -> None:
    lake.switch_on()
    lake.commits.record(lake.scope, [lake.change("m1")])
    (claim,) = lake.queue.pick(ORPHANS)
    lake.queue.fail(claim, "corrupt", Failure.PERMANENT)
    lake.commits.record(lake.scope, [lake.change("m2")])
    lake.world.sleep(86_400)
    (claim,) = lake.queue.pick(ORPHANS)
    lake.queue.succeed(claim)
    lake.commits.record(lake.scope, [lake.change("m3")])
    following = next(row for row in active(lake.queue.database) if row.queue_name == ORPHANS)
    assert following.scheduled_for == lake.world.now() + timedelta(days=1)


def test_a_run_that_was_skipped_is_no_look(lake: Lake) -> None:
    lake.switch_on()
    lake.commits.record(lake.scope, [lake.change("m1")])
    (claim,) = lake.queue.pick(ORPHANS)
    lake.queue.succeed(claim, extent=Extent.SKIPPED)
    lake.commits.record(lake.scope, [lake.change("m2")])
    assert lake.queued()[lake.one.id, ORPHANS] == "nobody has looked for orphans yet"
    # Nor does it end the wait after a failure.
    (claim,) = lake.queue.pick(ORPHANS)
    lake.queue.fail(claim, "corrupt", Failure.PERMANENT)
    failed_at = lake.world.now()
    lake.queue.enqueue([replace(lake.task(ORPHANS), origin=Origin.MANUAL)])
    (claim,) = lake.queue.pick(ORPHANS)
    lake.queue.succeed(claim, extent=Extent.SKIPPED)
    lake.commits.record(lake.scope, [lake.change("m3")])
    (row,) = [row for row in active(lake.queue.database) if row.queue_name == ORPHANS]
    assert row.scheduled_for == failed_at + DAY


@pytest.mark.parametrize("name", [EXPIRE, ORPHANS, OPTIMIZE])
@pytest.mark.parametrize("failure", [Failure.PERMANENT, Failure.TRANSIENT])
def test_what_has_failed_is_not_tried_again_with_every_commit(
    lake: Lake, name: str, failure: Failure
) -> None:
    lake.switch_on()
    lake.commits.record(lake.scope, [lake.change("m0")])
    (claim,) = lake.queue.pick(name)
    while lake.queue.fail(claim, "corrupt", failure) is TaskStatus.SCHEDULED:
        lake.world.sleep(3600)
        (claim,) = lake.queue.pick(name)
    failed_at = lake.world.now()
    for marker in ("m1", "m2"):
        lake.world.sleep(3600)
        lake.commits.record(lake.scope, [lake.change(marker)])
        (row,) = [row for row in active(lake.queue.database) if row.queue_name == name]
        assert row.scheduled_for == failed_at + timedelta(days=1)
    lake.world.sleep(22 * 3600)
    (claim,) = lake.queue.pick(name)
    # The wait ends with a success.
    lake.queue.succeed(claim)
    lake.world.sleep(86_400)
    outcomes = lake.commits.record(lake.scope, [lake.change("m3")])
    (outcome,) = [one for one in outcomes if one.queue == name]
    assert outcome.decision.at == lake.world.now()


def test_a_new_config_is_tried_at_once(lake: Lake) -> None:
    lake.switch_on()
    lake.commits.record(lake.scope, [lake.change("m1")])
    for name in ALL_ON:
        (claim,) = lake.queue.pick(name)
        lake.queue.fail(claim, "the config cannot be used", Failure.PERMANENT)
    lake.commits.configure(lake.scope, EXPIRE, ALL_ON[EXPIRE] | {"min-snapshots-to-keep": 2})
    lake.commits.record(lake.scope, [lake.change("m1")])
    # What others have failed at, it says nothing about.
    assert [len(lake.queue.pick(name)) for name in (EXPIRE, ORPHANS, OPTIMIZE)] == [1, 0, 0]


@pytest.mark.parametrize("heartbeat", [None, 77])
def test_a_config_that_says_the_same_changes_nothing(lake: Lake, heartbeat: int | None) -> None:
    for name, config in ALL_ON.items():
        lake.commits.configure(lake.scope, name, config, 77)
    lake.commits.record(lake.scope, [lake.change("m1")])
    (claim,) = lake.queue.pick(EXPIRE)
    lake.queue.fail(claim, "corrupt", Failure.PERMANENT)
    lake.commits.configure(lake.scope, EXPIRE, ALL_ON[EXPIRE], heartbeat)
    assert lake.commits.unseen(lake.scope, {lake.one.id: "m1"}) == []
    lake.commits.record(lake.scope, [lake.change("m2")])
    assert lake.queue.pick(EXPIRE) == []
    # Another heartbeat time is a change like others.
    lake.commits.configure(lake.scope, EXPIRE, ALL_ON[EXPIRE], 78)
    assert lake.commits.unseen(lake.scope, {lake.one.id: "m2"}) == [lake.one.id]


@pytest.mark.parametrize("who", list(FixedBy))
def test_a_new_config_frees_what_the_run_before_put_off_but_not_what_somebody_did(
    lake: Lake, who: FixedBy
) -> None:
    lake.switch_on()
    lake.commits.record(lake.scope, [lake.change("m1")])
    (claim,) = lake.queue.pick(EXPIRE)
    later = lake.world.now() + DAY
    fixed = FixedBy.RUN if who is FixedBy.RUN else None
    successor = NewTask(
        EXPIRE, lake.scope, claim.entity, later, Origin.ADAPTIVE, "refs hold", fixed_by=fixed
    )
    lake.queue.succeed(claim, successor=successor)
    if who is FixedBy.PERSON:
        (task,) = [r.task_id for r in active(lake.queue.database) if r.queue_name == EXPIRE]
        TaskControl(lake.queue.database).control(lake.scope, Action.RUN_AT, [task], at=later)

    def due(marker: str) -> datetime:
        lake.commits.record(lake.scope, [lake.change(marker)])
        (row,) = [r for r in active(lake.queue.database) if r.queue_name == EXPIRE]
        found: datetime = row.scheduled_for
        return found

    assert due("m2") == later
    lake.commits.configure(lake.scope, ORPHANS, ALL_ON[ORPHANS] | {"dry-run": True})
    assert due("m3") == later
    lake.commits.configure(lake.scope, EXPIRE, ALL_ON[EXPIRE] | {"max-ref-age-ms": 1})
    assert due("m3") == (lake.world.now() if who is FixedBy.RUN else later)


def test_many_commits_are_written_down_in_as_many_statements_as_few(
    lake: Lake, database: Database
) -> None:
    lake.switch_on()
    tables = lake.find(*[{}] * 160)
    statements: list[str] = []

    def count(*given: object) -> None:
        statements.append(str(given[2]))

    def tell(number: int, marker: str) -> int:
        statements.clear()
        told = [replace(lake.change(marker), table_id=one.id) for one in tables[:number]]
        lake.commits.record(lake.scope, told)
        return len(statements)

    sa.event.listen(database.engine, "before_cursor_execute", count)
    # The first makes tasks, the others find them there, and one of them runs.
    few = [tell(3, "m1"), tell(3, "m2")]
    (claim,) = lake.queue.pick(EXPIRE)
    few.append(tell(3, "m3"))
    many = [tell(160, "m4"), tell(160, "m5")]
    assert max(many) <= max(few) + 2 < 20
    assert len(lake.queued()) == 3 * 160
    assert lake.commits.unseen(lake.scope, {one.id: "m5" for one in tables}) == [claim.entity.id]


def test_a_property_that_cannot_be_read_fails_no_commit(lake: Lake) -> None:
    lake.switch_on()
    bad = {"history.expire.max-snapshot-age-ms": "soon"}
    outcomes = lake.commits.record(lake.scope, [replace(lake.change(), properties=bad)])
    expire = next(one for one in outcomes if one.queue == EXPIRE)
    assert expire.decision.at is None
    assert "'soon'" in expire.decision.reason
    assert set(lake.queued()) == {(lake.one.id, ORPHANS), (lake.one.id, OPTIMIZE)}


def test_tables_that_are_gone_or_elsewhere_are_left_alone(lake: Lake) -> None:
    lake.switch_on()
    lake.find({})
    gone = replace(lake.change(), table_id=lake.two.id)
    assert lake.commits.record(lake.scope, [gone]) == []
    elsewhere = Scope(warehouse_id=UUID(int=3))
    assert lake.commits.record(elsewhere, [lake.change()]) == []
    markers = {lake.one.id: "m1", lake.two.id: "m1", UUID(int=4): "m1"}
    assert lake.commits.unseen(lake.scope, markers) == [lake.one.id]
    assert lake.commits.unseen(elsewhere, markers) == []


def test_switching_on_wakes_up_tables_that_nobody_writes_to(lake: Lake) -> None:
    lake.commits.record(lake.scope, [lake.change()])
    assert lake.commits.unseen(lake.scope, {lake.one.id: "m1"}) == []
    for queue, config in ALL_ON.items():
        lake.commits.configure(lake.scope, queue, config)
    assert set(lake.queued()) == {(lake.one.id, ORPHANS), (lake.two.id, ORPHANS)}
    assert lake.commits.unseen(lake.scope, {lake.one.id: "m1"}) == [lake.one.id]
    lake.commits.record(lake.scope, [lake.change()])
    assert (lake.one.id, EXPIRE) in lake.queued()


@pytest.mark.parametrize(
    ("before", "after", "passed", "due"),
    [
        ({"dry-run": True}, {"dry-run": False}, 3 * DAY, 3 * DAY),
        ({"dry-run": True}, {}, DAY / 2, DAY),
        ({}, {"default-older-than-ms": 86_400_000}, 3 * DAY, 3 * DAY),
        ({"target-reclaim-bytes": 9}, {"target-reclaim-bytes": 8}, 3 * DAY, 3 * DAY),
        ({}, {"maximum-interval-seconds": 864_000}, 3 * DAY, 10 * DAY),
        ({}, {"maximum-interval-seconds": 864_000}, 30 * DAY, 30 * DAY),
        # What was a mistake: no task could run.
        ({"default-older-than-ms": 1}, {}, 3 * DAY, 3 * DAY),
        # What wants less, or nothing else.
        ({}, {"dry-run": True}, 3 * DAY, 90 * DAY),
        ({}, {"maximum-interval-seconds": 9_000_000}, 3 * DAY, 90 * DAY),
        ({}, {"default-older-than-ms": 1}, 3 * DAY, 90 * DAY),
        ({}, {}, 3 * DAY, 90 * DAY),
    ],
)
def test_a_config_that_wants_more_brings_the_next_look_for_orphans_forward(
    lake: Lake,
    before: dict[str, object],
    after: dict[str, object],
    passed: timedelta,
    due: timedelta,
) -> None:
    lake.commits.configure(lake.scope, ORPHANS, ALL_ON[ORPHANS] | before)
    ended = lake.world.now()
    for claim in lake.queue.pick(ORPHANS, limit=2):
        lake.queue.succeed(
            claim,
            successor=NewTask(
                ORPHANS, lake.scope, claim.entity, ended + 90 * DAY, Origin.ADAPTIVE, "the maximum"
            ),
        )
    lake.world.sleep(passed.total_seconds())
    # Another queue's config says nothing about orphans.
    lake.commits.configure(lake.scope, EXPIRE, ALL_ON[EXPIRE])
    assert {row.scheduled_for for row in active(lake.queue.database)} == {ended + 90 * DAY}
    lake.commits.configure(lake.scope, ORPHANS, ALL_ON[ORPHANS] | after)
    rows = active(lake.queue.database)
    assert [row.scheduled_for for row in rows] == [ended + due] * 2
