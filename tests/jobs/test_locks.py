"""Transactions of the service do not wait for each other in a circle, and survive it if others do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Barrier
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

import sqlalchemy as sa

from lakewarden.jobs.commits import Change, Commits
from lakewarden.jobs.control import Action, TaskControl
from lakewarden.jobs.database import open_database
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import OPTIMIZE
from lakewarden.jobs.refusals import TaskTakenOver
from lakewarden.jobs.scheduling import Fragmentation
from lakewarden.jobs.schema import SLOT
from lakewarden.jobs.tasks import Beat, EntityType, Failure, NewTask, Origin, Scope
from lakewarden.jobs.warehouses import FoundTable, WarehouseKind, Warehouses
from lakewarden.testing.simulation import World
from lakewarden.world import SystemChance, SystemClock
from tests.jobs.small import EXPIRE, ORPHANS, active

if TYPE_CHECKING:
    from tests.postgres import PostgresServer

TABLES = 30
SECONDS = 6.0
CLOCK = SystemClock()

Item = TypeVar("Item")


def deadlocks(url: str) -> int:
    """Return how many there were; whoever had one has told of it when its connection is closed."""
    query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    database = open_database(url)
    with database.reading() as connection:
        found = connection.scalar(sa.text(query))
    database.close()
    return int(found)


def one(chance: World, items: Sequence[Item]) -> Item:
    return items[chance.below(len(items))]


def some(chance: World, items: Sequence[Item], number: int) -> list[Item]:
    """Return so many of these, or all that there are, in any order."""
    return sorted(items, key=lambda _: chance.below(1 << 30))[:number]


class Storm:
    """Everything that the service and its workers do to one warehouse, each again and again."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.database = open_database(url)
        self.queue = TaskQueue(self.database, SystemChance(), 0.01)
        self.warehouses = Warehouses(self.database, SystemChance())
        self.commits = Commits(self.queue)
        made = self.warehouses.register("l", WarehouseKind.ICEBERG, "c")
        self.id, self.scope = made.id, Scope(warehouse_id=made.id)
        self.brief: UUID | None = None
        self.tables = self.warehouses.refresh(made.id, self.found(World(0)))

    def found(self, chance: World) -> list[FoundTable]:
        """Return the tables, in any order, with properties that differ each time."""
        numbers = some(chance, range(TABLES), TABLES)
        told = {"n": str(chance.below(1 << 30))}
        return [
            FoundTable((f"t{n}",), EntityType.TABLE, f"iceberg://c/t{n}", told) for n in numbers
        ]

    def configure(self, chance: World) -> None:
        name, switch = one(
            chance,
            [
                (EXPIRE, "expire-snapshots"),
                (ORPHANS, "remove-orphan-files"),
                (OPTIMIZE, "optimize"),
            ],
        )
        config: dict[str, object] = {f"enable-{switch}": True}
        if name == ORPHANS:
            config["target-reclaim-bytes"] = chance.below(1 << 30)
        if name == EXPIRE:
            config["min-snapshots-to-expire"] = 1 + chance.below(98)
        self.commits.configure(self.scope, name, config, 60 + chance.below(540))

    def record(self, chance: World) -> None:
        now = CLOCK.now()
        chosen = some(chance, self.tables, TABLES // 2)
        self.commits.record(
            self.scope,
            [
                Change(
                    table.id,
                    f"m{chance.below(1 << 30)}",
                    now,
                    versions=[now - timedelta(days=9)] * 200,
                    fragmentation=Fragmentation(50, 1 << 20),
                )
                for table in chosen
            ],
        )

    def work(self, chance: World) -> None:
        queue = one(chance, [EXPIRE, ORPHANS, OPTIMIZE])
        claims = some(chance, self.queue.pick(queue, limit=TABLES), TABLES)
        self.queue.heartbeats([Beat(claim, 0.5) for claim in claims])
        at = CLOCK.now() + timedelta(milliseconds=chance.below(100))
        for claim in claims:
            with suppress(TaskTakenOver):
                if chance.below(2):
                    self.queue.fail(claim, "by chance", one(chance, list(Failure)))
                    continue
                number = claim.entity.id
                assert number is not None
                self.queue.succeed(
                    claim,
                    successor=NewTask(
                        queue, self.scope, claim.entity, at, Origin.ADAPTIVE, "again"
                    ),
                    along=partial(self.forget, number),
                )

    def forget(self, number: UUID, connection: sa.Connection) -> None:
        self.warehouses.forget_commit(connection, number)

    def control(self, chance: World) -> None:
        tasks = [row.task_id for row in active(self.database)]
        chosen = some(chance, tasks, TABLES)
        action = one(chance, [Action.RUN_NOW, Action.RUN_NOW, Action.STOP, Action.CANCEL])
        TaskControl(self.database).control(self.scope, action, chosen)

    def come_and_go(self, chance: World) -> None:
        """Let there be another warehouse for a moment."""
        self.brief = self.warehouses.register(
            f"b{chance.below(1 << 60)}", WarehouseKind.ICEBERG, "c"
        ).id
        self.warehouses.refresh(self.brief, self.found(chance))
        self.warehouses.delete(self.brief)

    def visit(self, chance: World) -> None:
        """Do things to that other one, which may be gone in the middle of it."""
        if self.brief is None:
            return
        self.warehouses.refresh(self.brief, self.found(chance)[: 1 + chance.below(TABLES)])
        config = {"min-snapshots-to-expire": chance.below(1 << 30)}
        self.commits.configure(Scope(warehouse_id=self.brief), EXPIRE, config)

    def refresh(self, chance: World) -> None:
        self.warehouses.refresh(self.id, self.found(chance)[: 1 + chance.below(TABLES - 1)])
        self.warehouses.refresh(self.id, self.found(chance))


def rage(storm: Storm, roles: Sequence[Callable[[World], None]], seconds: float) -> None:
    """Let all of this be done again and again, and nobody wait in a circle."""
    end = CLOCK.elapsed() + seconds

    def play(number: int) -> int:
        chance, times = World(number), 0
        while CLOCK.elapsed() < end:
            roles[number](chance)
            times += 1
        return times

    with ThreadPoolExecutor(len(roles)) as pool:
        times = list(pool.map(play, range(len(roles))))
    storm.database.close()
    assert min(times) >= 1, times
    assert deadlocks(storm.url) == 0


def test_nobody_waits_for_one_that_waits_for_them(
    postgres: PostgresServer, postgres_template: str
) -> None:
    storm = Storm(postgres.url(postgres.database(template=postgres_template)))
    roles: list[Callable[[World], None]] = [
        storm.configure, storm.configure, storm.record, storm.record, storm.work, storm.work,
        storm.control, storm.refresh, storm.come_and_go, storm.visit, storm.visit,
    ]  # fmt: skip
    rage(storm, roles, SECONDS)


def test_what_has_failed_is_forgotten_while_it_is_tried_again(
    postgres: PostgresServer, postgres_template: str
) -> None:
    storm = Storm(postgres.url(postgres.database(template=postgres_template)))

    def tasks(chance: World) -> list[NewTask]:
        """Return a task for each table, due in any order."""
        now = CLOCK.now()
        return [
            NewTask(EXPIRE, storm.scope, table.entity, now - timedelta(seconds=chance.below(999)))
            for table in storm.tables
        ]

    def forget(chance: World) -> None:
        rows = [{"key": slot} for slot in sorted(task.slot for task in tasks(chance))]
        failed = sa.update(SLOT).where(SLOT.c.slot == sa.bindparam("key"))
        with storm.database.writing() as connection:
            connection.execute(failed.values(failed_at=CLOCK.now()), rows)
        config = {"min-snapshots-to-expire": chance.below(1 << 30)}
        storm.commits.configure(storm.scope, EXPIRE, config)

    def work(chance: World) -> None:
        storm.queue.enqueue(tasks(chance))
        storm.queue.pick(EXPIRE, limit=TABLES)
        chosen = [row.task_id for row in active(storm.database)]
        control = TaskControl(storm.database).control
        for action in (Action.STOP, Action.RUN_NOW, Action.CANCEL):
            control(storm.scope, action, chosen)

    rage(storm, [forget, forget, work], SECONDS / 2)


def test_what_was_ended_in_favour_of_another_is_done_again(
    postgres: PostgresServer, postgres_template: str
) -> None:
    database = open_database(postgres.url(postgres.database(template=postgres_template)))
    with database.writing() as connection:
        rows = [{"slot": name, "fence": 0} for name in ("a", "b")]
        connection.execute(sa.insert(SLOT).values(rows))
    both = Barrier(2, timeout=30)

    def count(first: str, second: str) -> None:
        tries = 0

        def work(connection: sa.Connection) -> None:
            nonlocal tries
            tries += 1
            for slot in (first, second):
                mine = sa.update(SLOT).where(SLOT.c.slot == slot)
                connection.execute(mine.values(fence=SLOT.c.fence + 1))
                if tries == 1 and slot == first:
                    both.wait()

        database.transact(work)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(count, "ab", "ba"))
    with database.reading() as connection:
        assert dict(connection.execute(sa.select(SLOT.c.slot, SLOT.c.fence)).all()) == {
            "a": 2,
            "b": 2,
        }
    database.close()
