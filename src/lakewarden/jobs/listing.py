"""What can be read about tasks: lists by page, the details of one, numbers for metrics.

A task is listed once, as it is now: active as its row in `task`, over as its final row in `task_log`.
The last page has no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from lakewarden.jobs import paging
from lakewarden.jobs.database import Database
from lakewarden.jobs.refusals import bad_request, not_found
from lakewarden.jobs.schema import TASK, TASK_LOG, from_micros, to_micros
from lakewarden.jobs.tasks import (
    Attempt,
    Entity,
    EntityType,
    Origin,
    Scope,
    TaskDetails,
    TaskInfo,
    TaskStatus,
)
from lakewarden.jobs.transitions import Row, entity_of, scope_of

PAGE_SIZE = 100
PAGE_SIZE_MAX = 1000
FILTER_MAX = 100
ATTEMPTS_SHOWN = 5
TASK_NOT_FOUND = "TaskNotFoundError"


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Which tasks to list.  None means all; an empty sequence, none."""

    status: Sequence[TaskStatus] | None = None
    queues: Sequence[str] | None = None
    #: An entity of type warehouse means the tasks of the warehouse itself.
    entities: Sequence[Entity] | None = None
    #: Both inclusive.
    created_after: datetime | None = None
    created_before: datetime | None = None

    def __post_init__(self) -> None:
        for name, given in (("Entities", self.entities), ("QueueNames", self.queues)):
            if given is not None and len(given) > FILTER_MAX:
                raise bad_request(
                    f"TooMany{name}",
                    f"{len(given)} are too many; name at most {FILTER_MAX} at once",
                )


@dataclass(frozen=True, slots=True)
class Page:
    """Some tasks, newest first; without a token there are no more."""

    tasks: tuple[TaskInfo, ...]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class TaskCount:
    """How many active tasks of a queue are in a state, and when the first of them is due."""

    queue: str
    status: TaskStatus
    number: int
    next_at: datetime


@dataclass(frozen=True, slots=True)
class TaskLists:
    """Reads tasks; changes nothing."""

    database: Database

    def page(
        self,
        scope: Scope,
        wanted: TaskFilter | None = None,
        *,
        token: str | None = None,
        size: int | None = None,
    ) -> Page:
        """Return a page of a scope's tasks."""
        wanted = wanted or TaskFilter()
        chosen = (wanted.status, wanted.queues, wanted.entities)
        if any(one is not None and not one for one in chosen):
            return Page((), None)
        after = None if not token else read_token(token)
        number = PAGE_SIZE if size is None else min(max(size, 1), PAGE_SIZE_MAX)
        # One more than asked for tells whether there is another page.  Each table's newest are read from
        # an index, and only they are sorted.
        parts = [
            _newest(_infos(table).where(*_conditions(table, scope, wanted, after)), table.c, number)
            for table in (TASK, TASK_LOG)
        ]
        union = sa.union_all(*(sa.select(part.subquery()) for part in parts)).subquery()
        newest = _newest(sa.select(union), union.c, number)
        with self.database.reading() as connection:
            rows = connection.execute(newest).all()
        tasks = tuple(_info(row) for row in rows[:number])
        return Page(
            tasks,
            page_token(tasks[-1].created_at, tasks[-1].task_id) if len(rows) > number else None,
        )

    def details(
        self, scope: Scope, task_id: UUID, *, attempts: int = ATTEMPTS_SHOWN
    ) -> TaskDetails:
        """Return all that is known of a task of the scope, with its earlier attempts, newest first."""
        query = sa.select(TASK).where(TASK.c.task_id == task_id, _within(TASK, scope))
        with self.database.reading() as connection:
            # In this order: a task that ends in between is in the log then.
            active = connection.execute(query).one_or_none()
            logged = connection.execute(
                sa.select(TASK_LOG)
                .where(TASK_LOG.c.task_id == task_id, _within(TASK_LOG, scope))
                .order_by(TASK_LOG.c.attempt.desc())
                .limit(attempts + 1)
            ).all()
        over = next((row for row in logged if row.final), None)
        if over is not None:
            details = over.result if over.result is not None else over.execution_details
            earlier = [row for row in logged if not row.final]
            return TaskDetails(
                _info_of_log(over),
                over.task_data,
                details,
                over.message,
                _attempts(earlier, attempts),
            )
        if active is None:
            # Lakekeeper's own name for it, at this one address.
            name = "TaskNotFound" if scope.warehouse_id is None else TASK_NOT_FOUND
            raise task_not_found([task_id], name)
        earlier = [row for row in logged if row.attempt < active.attempt or _waits(active)]
        return TaskDetails(
            _info(active),
            active.task_data,
            active.execution_details,
            None,
            _attempts(earlier, attempts),
        )

    def counts(self) -> list[TaskCount]:
        """Return how full the queues are."""
        query = sa.select(
            TASK.c.queue_name,
            TASK.c.status,
            sa.func.count().label("number"),
            sa.func.min(TASK.c.scheduled_for).label("next_at"),
        ).group_by(TASK.c.queue_name, TASK.c.status)
        with self.database.reading() as connection:
            return [
                TaskCount(row.queue_name, TaskStatus(row.status), row.number, row.next_at)
                for row in connection.execute(query)
            ]


def task_not_found(task_ids: Sequence[UUID], name: str = TASK_NOT_FOUND) -> Exception:
    """Return the error for tasks that are not in a scope; others' tasks are not told of."""
    which = ", ".join(str(task_id) for task_id in task_ids[:3])
    return not_found(name, f"there is no task {which} here; /task/list shows those there are")


def _waits(row: Row) -> bool:
    return bool(row.status == TaskStatus.SCHEDULED)


def _within(table: sa.Table, scope: Scope) -> sa.ColumnElement[bool]:
    return sa.and_(
        table.c.project_id == scope.project_id,
        table.c.warehouse_id.is_(None)
        if scope.warehouse_id is None
        else table.c.warehouse_id == scope.warehouse_id,
    )


def _conditions(
    table: sa.Table, scope: Scope, wanted: TaskFilter, after: tuple[datetime, UUID] | None
) -> list[sa.ColumnElement[bool]]:
    found = [_within(table, scope)]
    if table is TASK_LOG:
        found.append(table.c.final)
    if wanted.status is not None:
        found.append(table.c.status.in_(wanted.status))
    if wanted.queues is not None:
        found.append(table.c.queue_name.in_(wanted.queues))
    if wanted.entities is not None:
        found.append(sa.or_(*(_is(table, entity) for entity in wanted.entities)))
    if wanted.created_after is not None:
        found.append(table.c.created_at >= wanted.created_after)
    if wanted.created_before is not None:
        found.append(table.c.created_at <= wanted.created_before)
    if after is not None:
        made, task_id = after
        # The first says nothing new, but it is what an index can begin with.
        found.append(table.c.created_at <= made)
        found.append(
            sa.or_(
                table.c.created_at < made,
                sa.and_(table.c.created_at == made, table.c.task_id < task_id),
            )
        )
    return found


def _is(table: sa.Table, entity: Entity) -> sa.ColumnElement[bool]:
    if entity.type in {EntityType.WAREHOUSE, EntityType.PROJECT}:
        return table.c.entity_type == entity.type
    return sa.and_(table.c.entity_type == entity.type, table.c.entity_id == entity.id)


#: What a list shows, in the words of both tables.
_LISTED = (
    "task_id", "project_id", "warehouse_id", "queue_name", "entity_type", "entity_id", "entity_name",
    "status", "scheduled_for", "picked_up_at", "attempt", "last_heartbeat_at", "progress",
    "parent_task_id", "created_at", "origin", "reason",
)  # fmt: skip


def _infos(table: sa.Table) -> sa.Select[Any]:
    changed = table.c.updated_at if table is TASK else table.c.ended_at
    return sa.select(*(table.c[name] for name in _LISTED), changed.label("updated_at"))


def _newest(query: sa.Select[Any], columns: Any, number: int) -> sa.Select[Any]:
    return query.order_by(columns.created_at.desc(), columns.task_id.desc()).limit(number + 1)


def _info(row: Row, updated_at: datetime | None = None) -> TaskInfo:
    return TaskInfo(
        task_id=row.task_id,
        scope=scope_of(row),
        queue=row.queue_name,
        entity=entity_of(row),
        status=TaskStatus(row.status),
        scheduled_for=row.scheduled_for,
        picked_up_at=row.picked_up_at,
        attempt=row.attempt,
        last_heartbeat_at=row.last_heartbeat_at,
        progress=row.progress,
        parent_id=row.parent_task_id,
        created_at=row.created_at,
        updated_at=updated_at or row.updated_at,
        origin=Origin(row.origin),
        reason=row.reason,
    )


def _info_of_log(row: Row) -> TaskInfo:
    return _info(row, row.ended_at)


def _attempts(rows: Sequence[Row], number: int) -> tuple[Attempt, ...]:
    return tuple(
        Attempt(
            attempt=row.attempt,
            status=TaskStatus(row.status),
            scheduled_for=row.scheduled_for,
            started_at=row.picked_up_at,
            duration_seconds=row.duration_seconds,
            message=row.message,
            created_at=row.ended_at,
            progress=row.progress,
            details=row.result if row.result is not None else row.execution_details,
        )
        for row in rows[:number]
    )


def page_token(at: datetime, number: UUID) -> str:
    """Return what a caller sends to see what comes after this row."""
    return paging.page_token(f"{to_micros(at)}&{number}")


def read_token(token: str) -> tuple[datetime, UUID]:
    """Return the row that a token names, or refuse it."""
    try:
        micros, task_id = paging.read_page_token(token).split("&")
        return from_micros(int(micros)), UUID(task_id)
    except (ValueError, OverflowError):
        raise paging.strange_token() from None
