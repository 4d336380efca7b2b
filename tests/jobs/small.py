"""Tasks of one warehouse, made short."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from lakewarden.jobs.config_store import ConfigStore
from lakewarden.jobs.database import Database
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES
from lakewarden.jobs.schema import TASK, TASK_LOG
from lakewarden.jobs.tasks import Claim, Entity, EntityType, NewTask, Origin, Scope, TaskStatus

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


def fill_log(database: Database, tables: int = 50, each: int = 100) -> None:
    """Write down many attempts that are over, and let the database know how many there are."""
    now = database.clock.now()
    rows: list[dict[str, Any]] = [
        {
            "task_id": UUID(int=(number << 32) + step), "attempt": 1,
            "project_id": LAKE.project_id, "warehouse_id": LAKE.warehouse_id,
            "queue_name": ORPHANS, "entity_type": EntityType.TABLE, "entity_id": UUID(int=number),
            "slot": wanted(now, number, ORPHANS).slot, "status": TaskStatus.FAILED,
            "scheduled_for": now, "fence": 1, "progress": 0.0, "task_data": {}, "origin": "commit",
            "created_at": now - timedelta(seconds=step), "ended_at": now, "final": True,
        }
        for number in range(1, tables + 1)
        for step in range(each)
    ]  # fmt: skip
    with database.writing() as connection:
        connection.execute(sa.insert(TASK_LOG), rows)
        connection.execute(sa.text("ANALYZE"))


def explained(database: Database, work: Callable[[], object]) -> list[str]:
    """Return how the database does what it is asked in some work, a text for each statement."""
    asked: list[tuple[str, Any]] = []

    def listen(_connection: object, _cursor: object, text: str, given: Any, *_: object) -> None:
        if text.startswith("SELECT"):
            asked.append((text, given))

    sa.event.listen(database.engine, "before_cursor_execute", listen)
    work()
    sa.event.remove(database.engine, "before_cursor_execute", listen)
    how = "EXPLAIN" if database.is_postgres else "EXPLAIN QUERY PLAN"
    plans: list[str] = []
    with database.reading() as connection:
        for text, given in asked:
            rows = connection.exec_driver_sql(f"{how} {text}", given).all()
            plans.append("\n".join(str(row[-1]) for row in rows))
    return plans


def reads_all(plan: str) -> bool:
    """Tell whether a plan reads the whole log of tasks, or sorts what it has read of it."""
    return any(
        re.search(r"Seq Scan on task_log|SCAN task_log(?! USING INDEX)", line)
        for line in plan.splitlines()
    )


def store(
    database: Database, scope: Scope, queue: str, config: object, heartbeat: int | None = None
) -> None:
    """Set a config, and decide nothing anew because of it."""
    with database.writing() as connection:
        ConfigStore(database).set(connection, scope, queue, config, heartbeat)
