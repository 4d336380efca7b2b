"""The task that removes old rows of the task log: one for each project, always there.

Deleting, ending the task and queueing the next are one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from lakewarden.jobs.config import LogSettings
from lakewarden.jobs.config_store import read_config
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import TASK_LOG_CLEANUP
from lakewarden.jobs.schema import TASK_LOG
from lakewarden.jobs.tasks import (
    DEFAULT_PROJECT,
    Claim,
    Entity,
    EntityType,
    NewTask,
    Origin,
    Scope,
)


@dataclass(frozen=True, slots=True)
class LogCleanup:
    """Keeps the task log from growing for ever."""

    queue: TaskQueue

    def ensure(self, project_id: UUID = DEFAULT_PROJECT) -> None:
        """See to it that a project has its task; called when a service starts."""
        scope = Scope(project_id)
        with self.queue.database.writing() as connection:
            stored = read_config(connection, scope, TASK_LOG_CLEANUP).config
            self.queue.enqueue([self._next(connection, scope, stored)], connection=connection)

    def run(self, claim: Claim) -> int:
        """Do a task, and return how many tasks were forgotten.

        A task is forgotten as a whole, when its end is older than the retention period.
        """
        database = self.queue.database
        with database.reading() as connection:
            before = database.moment(connection) - LogSettings.of(claim.config).retention_period
            successor = self._next(connection, claim.scope, claim.config)
            old = sa.select(TASK_LOG.c.task_id).where(
                TASK_LOG.c.project_id == claim.scope.project_id,
                TASK_LOG.c.final,
                TASK_LOG.c.ended_at < before,
            )
            number = connection.scalar(sa.select(sa.func.count()).select_from(old.subquery())) or 0
        self.queue.succeed(
            claim,
            f"{number} tasks that ended before {before:%Y-%m-%d %H:%M} UTC were forgotten",
            result={"forgotten_tasks_count": number},
            successor=successor,
            along=lambda connection: _delete(connection, old),
        )
        return number

    def _next(self, connection: sa.Connection, scope: Scope, stored: Mapping[str, Any]) -> NewTask:
        at = self.queue.database.moment(connection) + LogSettings.of(stored).cleanup_period
        return NewTask(
            TASK_LOG_CLEANUP,
            scope,
            Entity(EntityType.PROJECT),
            at.replace(second=0, microsecond=0),
            Origin.STANDING,
            "the log of tasks is cleaned regularly",
        )


def _delete(connection: sa.Connection, old: sa.Select[tuple[UUID]]) -> None:
    connection.execute(sa.delete(TASK_LOG).where(TASK_LOG.c.task_id.in_(old)))
