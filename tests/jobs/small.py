"""Tasks of one warehouse, made short."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from lakewarden.jobs.database import Database
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES
from lakewarden.jobs.schema import TASK, TASK_LOG
from lakewarden.jobs.tasks import Claim, Entity, EntityType, NewTask, Origin, Scope

LAKE = Scope(warehouse_id=UUID(int=0xA))
OTHER = Scope(warehouse_id=UUID(int=0xB))
EXPIRE, ORPHANS = EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES


def table(number: int = 1) -> Entity:
    return Entity(EntityType.TABLE, UUID(int=number), ("db", f"t{number}"))


def wanted(at: datetime, number: int = 1, queue: str = EXPIRE, **more: Any) -> NewTask:
    given: dict[str, Any] = {"scope": LAKE, "origin": Origin.COMMIT, **more}
    return NewTask(queue=queue, entity=table(number), scheduled_for=at, **given)


def picked(queue: TaskQueue, at: datetime, number: int = 1, name: str = EXPIRE) -> Claim:
    """Queue a task and take it."""
    queue.enqueue([wanted(at, number, name)])
    (claim,) = queue.pick(name)
    return claim


def active(database: Database) -> list[sa.Row[Any]]:
    with database.reading() as connection:
        return list(connection.execute(sa.select(TASK).order_by(TASK.c.task_id)))


def logged(database: Database) -> list[sa.Row[Any]]:
    order = (TASK_LOG.c.created_at, TASK_LOG.c.task_id, TASK_LOG.c.attempt)
    with database.reading() as connection:
        return list(connection.execute(sa.select(TASK_LOG).order_by(*order)))
