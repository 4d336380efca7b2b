"""What can become of a row of `task`, each step within the caller's transaction.

    insert ─► SCHEDULED ─ start ─► RUNNING ─► STOPPING
                  ▲                   │           │
                  └───── requeue ─────┴───────────┤
                                                  └─ end ─► a final row of `task_log`

`start` and `requeue` take the slot's next number, so that nobody who had the task before has it still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from lakewarden.jobs.queues import queue_kind
from lakewarden.jobs.schema import SLOT, TASK, TASK_LOG, to_micros
from lakewarden.jobs.tasks import (
    HELD,
    Entity,
    EntityType,
    Failure,
    FixedBy,
    NewTask,
    Origin,
    Scope,
    TaskStatus,
    Turn,
)
from lakewarden.world import Chance, ordered_id

#: What SQLite takes in one statement, with room to spare.
CHUNK = 500
_SHARED = tuple(name for name in TASK.c.keys() if name in TASK_LOG.c)  # noqa: SIM118

Row = sa.Row[Any]


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended."""

    status: TaskStatus
    message: str | None = None
    failure: Failure | None = None
    result: Mapping[str, Any] | None = None


def insert(
    connection: sa.Connection, tasks: Sequence[NewTask], now: datetime, chance: Chance
) -> list[UUID | None]:
    """Queue tasks, and return their ids: None for each whose slot is taken."""
    rows = [_row(task, now, chance) for task in tasks]
    made: set[UUID] = set()
    for first in range(0, len(rows), CHUNK):
        new = upsert(connection, TASK).values(rows[first : first + CHUNK])
        free = new.on_conflict_do_nothing(index_elements=["slot"])
        made |= set(connection.scalars(free.returning(TASK.c.task_id)))
    return [row["task_id"] if row["task_id"] in made else None for row in rows]


def _row(task: NewTask, now: datetime, chance: Chance) -> dict[str, Any]:
    return {
        "task_id": ordered_id(now, chance),
        "attempt": 0,
        "project_id": task.scope.project_id,
        "warehouse_id": task.scope.warehouse_id,
        "queue_name": task.queue,
        "entity_type": task.entity.type,
        "entity_id": task.entity.id,
        "entity_name": None if task.entity.name is None else list(task.entity.name),
        "slot": task.slot,
        "status": TaskStatus.SCHEDULED,
        "scheduled_for": task.scheduled_for,
        "fence": 0,
        "progress": 0.0,
        "task_data": dict(task.data),
        "parent_task_id": task.parent_id,
        "origin": task.origin,
        "reason": task.reason,
        "created_at": now,
        "fixed_by": task.fixed_by,
    }


def bring_forward(connection: sa.Connection, tasks: Sequence[NewTask], now: datetime) -> list[Turn]:
    """Let tasks that are there run as early as these would, if they may, and tell what becomes of each."""
    known: dict[str, Row] = {}
    slots = [task.slot for task in tasks]
    for first in range(0, len(slots), CHUNK):
        there = sa.select(TASK).where(TASK.c.slot.in_(slots[first : first + CHUNK]))
        known |= {row.slot: row for row in connection.execute(there)}
    turns = [_turn(known.get(task.slot), task) for task in tasks]
    moved = [
        {
            "id": known[task.slot].task_id,
            "at": task.scheduled_for,
            "why": task.reason,
            "who": task.origin,
        }
        for task, turn in zip(tasks, turns, strict=True)
        if turn is Turn.SOONER
    ]
    if moved:
        # One by one by id, as others do who lock several; a worker may have taken one meanwhile.
        moved.sort(key=lambda row: row["id"])
        sooner = (
            sa.update(TASK)
            .where(
                TASK.c.task_id == sa.bindparam("id"),
                TASK.c.status == TaskStatus.SCHEDULED,
                TASK.c.attempt == 0,
                TASK.c.fixed_by.is_(None),
                TASK.c.scheduled_for > sa.bindparam("at"),
            )
            .values(
                scheduled_for=sa.bindparam("at"),
                reason=sa.bindparam("why"),
                origin=sa.bindparam("who"),
                updated_at=now,
            )
        )
        connection.execute(sooner, moved)
    return turns


def _turn(row: Row | None, task: NewTask) -> Turn:
    if row is None or row.status != TaskStatus.SCHEDULED:
        return Turn.BEGUN
    free = row.attempt == 0 and row.origin != Origin.MANUAL and row.fixed_by is None
    return Turn.SOONER if free and row.scheduled_for > task.scheduled_for else Turn.WAITS


def start(connection: sa.Connection, rows: Sequence[Row], now: datetime) -> dict[str, Row]:
    """Begin the next attempt at each task, and return the slots with their new numbers."""
    slots = _advance(connection, [row.slot for row in rows], now)
    begin = (
        sa.update(TASK)
        .where(TASK.c.task_id == sa.bindparam("id"))
        .values(
            status=TaskStatus.RUNNING,
            attempt=TASK.c.attempt + 1,
            fence=sa.bindparam("number"),
            stale_at=sa.bindparam("stale"),
            picked_up_at=now,
            last_heartbeat_at=now,
            progress=0.0,
            execution_details=None,
            updated_at=now,
        )
    )
    connection.execute(
        begin,
        [
            {
                "id": row.task_id,
                "number": slots[row.slot].fence,
                "stale": now + timedelta(seconds=row.patience),
            }
            for row in rows
        ],
    )
    return slots


def requeue(connection: sa.Connection, row: Row, at: datetime, now: datetime) -> None:
    """Let a task wait for its next attempt."""
    slots = _advance(connection, [row.slot], now)
    connection.execute(
        sa.update(TASK)
        .where(TASK.c.task_id == row.task_id)
        .values(
            status=TaskStatus.SCHEDULED,
            scheduled_for=at,
            fence=slots[row.slot].fence,
            stale_at=None,
            picked_up_at=None,
            last_heartbeat_at=None,
            progress=0.0,
            execution_details=None,
            updated_at=now,
        )
    )


def end(connection: sa.Connection, row: Row, ending: Ending, now: datetime) -> None:
    """Take a task out of the queue for good."""
    connection.execute(sa.delete(TASK).where(TASK.c.task_id == row.task_id))
    log(connection, row, ending, now, final=True)
    if ending.status is TaskStatus.FAILED:
        mine = SLOT.c.slot == row.slot
        connection.execute(sa.update(SLOT).where(mine).values(failed_at=now))


def log(connection: sa.Connection, row: Row, ending: Ending, now: datetime, *, final: bool) -> None:
    """Write down an attempt that is over.

    A task that waits for its next attempt has its last one in the log already: what becomes of it
    then is told of the next, which never began.
    """
    values = {name: getattr(row, name) for name in _SHARED}
    if row.status == TaskStatus.SCHEDULED and row.attempt > 0:
        values["attempt"] = row.attempt + 1
    began = row.picked_up_at if row.status in HELD else None
    values |= {
        "status": ending.status,
        "picked_up_at": began,
        "ended_at": now,
        "duration_seconds": None if began is None else (now - began).total_seconds(),
        "progress": 1.0 if ending.status is TaskStatus.SUCCESS else row.progress,
        "message": ending.message,
        "failure": ending.failure,
        "result": None if ending.result is None else dict(ending.result),
        "final": final,
    }
    connection.execute(sa.insert(TASK_LOG).values(values))


def make_again(connection: sa.Connection, row: Row, now: datetime, chance: Chance) -> None:
    """Queue a new task after one that has failed: no commit may ever make another."""
    task = NewTask(
        row.queue_name,
        scope_of(row),
        entity_of(row),
        now + timedelta(seconds=queue_kind(row.queue_name).again_after_seconds),
        Origin.ADAPTIVE,
        "the last task failed, but not for good",
        parent_id=row.task_id,
    )
    insert(connection, [task], now, chance)


def set_free(connection: sa.Connection, scope: Scope, queue: str) -> None:
    """Let commits bring tasks forward whose time stands because of what the run before has found."""
    fixed = sa.select(TASK.c.task_id).where(
        TASK.c.warehouse_id == scope.warehouse_id,
        TASK.c.queue_name == queue,
        TASK.c.fixed_by == FixedBy.RUN,
    )
    # One by one by id, as others do who lock several.
    tasks = [{"id": number} for number in sorted(connection.scalars(fixed))]
    if tasks:
        mine = sa.and_(TASK.c.task_id == sa.bindparam("id"), TASK.c.fixed_by == FixedBy.RUN)
        connection.execute(sa.update(TASK).where(mine).values(fixed_by=None), tasks)


def forget_failures(connection: sa.Connection, scope: Scope, queue: str) -> None:
    """Let nothing in a queue wait any longer because something failed."""
    failed = sa.select(SLOT.c.slot).where(
        SLOT.c.slot.startswith(scope.slots),
        SLOT.c.slot.endswith(f"/{queue}", autoescape=True),
        SLOT.c.failed_at.is_not(None),
    )
    # One by one by key, as others do who lock several.
    slots = [{"key": slot} for slot in sorted(connection.scalars(failed))]
    if slots:
        mine = SLOT.c.slot == sa.bindparam("key")
        connection.execute(sa.update(SLOT).where(mine).values(failed_at=None), slots)


def upsert(connection: sa.Connection, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
    """Return an insert that can say what to do about a conflict."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def _advance(connection: sa.Connection, slots: Sequence[str], now: datetime) -> dict[str, Row]:
    """Give each slot its next number, one that no backup of the database has given away.

    By the time: whoever has a number from after a backup that was restored must not have that of
    somebody who comes later.
    """
    number = to_micros(now)
    found: dict[str, Row] = {}
    ordered = sorted(slots)
    for first in range(0, len(ordered), CHUNK):
        rows = [{"slot": slot, "fence": number} for slot in ordered[first : first + CHUNK]]
        new = upsert(connection, SLOT).values(rows)
        counted = new.on_conflict_do_update(
            index_elements=["slot"],
            set_={"fence": sa.case((SLOT.c.fence < number, number), else_=SLOT.c.fence + 1)},
        )
        found |= {row.slot: row for row in connection.execute(counted.returning(SLOT))}
    return found


def scope_of(row: Row) -> Scope:
    return Scope(row.project_id, row.warehouse_id)


def entity_of(row: Row) -> Entity:
    name = None if row.entity_name is None else tuple(row.entity_name)
    return Entity(EntityType(row.entity_type), row.entity_id, name)
