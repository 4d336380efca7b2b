"""What people can do to tasks that are there: stop, cancel, run now, run at another time.

All of one request or nothing.  A task in a state that an action does not concern is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from lakewarden.jobs.database import Database
from lakewarden.jobs.listing import task_not_found
from lakewarden.jobs.locks import lock_slots
from lakewarden.jobs.refusals import bad_request, check_time
from lakewarden.jobs.schema import TASK, TASK_LOG
from lakewarden.jobs.tasks import Failure, FixedBy, Origin, Scope, TaskStatus
from lakewarden.jobs.transitions import Ending, Row, end, log, requeue

TASKS_MAX = 100


class Action(StrEnum):
    """What is to become of tasks."""

    #: Running tasks end at the next place where they can, and are tried again later.
    STOP = "stop"
    #: Active tasks end; whoever runs one finds out by its next heartbeat.
    CANCEL = "cancel"
    #: Waiting tasks become due; those that were asked to stop are not waited for any longer.
    RUN_NOW = "run-now"
    RUN_AT = "run-at"


@dataclass(frozen=True, slots=True)
class TaskControl:
    """Acts on the tasks of one database."""

    database: Database

    def control(
        self,
        scope: Scope,
        action: Action,
        task_ids: Sequence[UUID],
        *,
        at: datetime | None = None,
        joined: sa.Connection | None = None,
    ) -> None:
        """Do one thing to tasks of a scope; `at` goes with RUN_AT only."""
        if len(task_ids) > TASKS_MAX:
            raise bad_request(
                "TooManyTasks", f"{len(task_ids)} tasks are too many; name at most {TASKS_MAX}"
            )
        if len(set(task_ids)) < len(task_ids):
            raise bad_request("DuplicateTaskIds", "a task is named twice; name each once")
        if (action is Action.RUN_AT) != (at is not None):
            raise bad_request(
                "BadRequest", f"{action} {'needs' if at is None else 'takes no'} scheduled-for"
            )
        if at is not None:
            check_time(at)
        if not task_ids:
            return
        with self.database.writing(joined) as connection:
            active = sa.select(TASK).where(
                TASK.c.task_id.in_(task_ids),
                TASK.c.project_id == scope.project_id,
                TASK.c.warehouse_id.is_not_distinct_from(scope.warehouse_id),
            )
            # In one order, so that two requests do not wait for each other.
            rows = connection.execute(active.order_by(TASK.c.task_id).with_for_update()).all()
            _check_known(connection, scope, set(task_ids) - {row.task_id for row in rows})
            lock_slots(connection, [row.slot for row in rows])
            now = self.database.moment(connection)
            for row in rows:
                _act(connection, row, action, now if at is None else at, now)


def _check_known(connection: sa.Connection, scope: Scope, missing: set[UUID]) -> None:
    """Raise unless all of these have ended here; that is no state for any action."""
    if not missing:
        return
    ended = sa.select(TASK_LOG.c.task_id).where(
        TASK_LOG.c.task_id.in_(missing),
        TASK_LOG.c.project_id == scope.project_id,
        TASK_LOG.c.warehouse_id.is_not_distinct_from(scope.warehouse_id),
    )
    unknown = missing - set(connection.scalars(ended))
    if unknown:
        raise task_not_found(sorted(unknown))


def _act(connection: sa.Connection, row: Row, action: Action, at: datetime, now: datetime) -> None:
    status = TaskStatus(row.status)
    match action:
        case Action.STOP:
            if status is TaskStatus.RUNNING:
                stopping = {"status": TaskStatus.STOPPING, "updated_at": now}
                mine = TASK.c.task_id == row.task_id
                connection.execute(sa.update(TASK).where(mine).values(stopping))
        case Action.CANCEL:
            end(connection, row, Ending(TaskStatus.CANCELLED, "Cancelled on request."), now)
        case Action.RUN_NOW | Action.RUN_AT:
            if status is TaskStatus.STOPPING:
                late = (
                    "The attempt was asked to stop and did not in time; the task was rescheduled."
                )
                ending = Ending(TaskStatus.FAILED, late, Failure.STOPPED)
                log(connection, row, ending, now, final=False)
            if status is not TaskStatus.RUNNING:
                requeue(connection, row, at, now)
                stands: dict[str, Any] = {"fixed_by": FixedBy.PERSON}
                if action is Action.RUN_NOW:
                    # Who wants a task now wants it to do what it can.
                    stands["origin"] = Origin.MANUAL
                mine = TASK.c.task_id == row.task_id
                connection.execute(sa.update(TASK).where(mine).values(stands))
