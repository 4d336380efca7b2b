"""The task queue: who does what, and that it is done once.

Promises, on SQLite and PostgreSQL alike:

1. One active task for each slot: a (project, warehouse, entity, queue).
2. An attempt is handed to one worker.  It ends once: whoever reports with a task id, attempt and fence
   that are not the task's any more is told so, and nothing is changed.
3. A task ends in exactly one log row that is final, in the same transaction in which it leaves the
   queue and its successor enters.
4. A worker that was not heard of for the queue's heartbeat time loses its task to the next that asks.
   That is a failed attempt like others, so a task that kills its workers comes to an end.

Lakekeeper differs in some of this; docs/understanding/tasks.md says where and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from lakewarden.errors import StorageError
from lakewarden.jobs.database import Database
from lakewarden.jobs.locks import lock_slots
from lakewarden.jobs.queues import QUEUES, QueueKind, queue_kind
from lakewarden.jobs.refusals import TaskAlreadyActive, TaskTakenOver, check_time
from lakewarden.jobs.schema import SLOT, TASK, TASK_CONFIG, TASK_LOG, Document, Moment, from_micros
from lakewarden.jobs.tasks import (
    HELD,
    Beat,
    Claim,
    Extent,
    Failure,
    NewTask,
    Origin,
    Signal,
    TaskStatus,
    Turn,
)
from lakewarden.jobs.transitions import (
    CHUNK,
    Ending,
    Row,
    bring_forward,
    end,
    entity_of,
    insert,
    log,
    make_again,
    requeue,
    scope_of,
    start,
)
from lakewarden.world import Chance

#: Waits between attempts: about this long after the first, twice as long after each other.
BACKOFF_FIRST_SECONDS = 30.0
#: What became of an attempt is written down if the database comes back within this many tries.
_OUTCOME_TRIES = 5
_OUTCOME_PAUSE_SECONDS = 1.0
_STEPS = 1 << 20

LOST = "Attempt timed out."


@dataclass(frozen=True, slots=True)
class TaskQueue:
    """All queues of one database."""

    database: Database
    chance: Chance
    #: How long to wait after a first attempt that failed.
    backoff_seconds: float = BACKOFF_FIRST_SECONDS

    # -- into the queue --------------------------------------------------------------------------

    def enqueue(
        self, tasks: Sequence[NewTask], *, connection: sa.Connection | None = None
    ) -> list[UUID | None]:
        """Add tasks, and return their ids: None for each whose slot is taken already.

        With a `connection`, they are added when its transaction is committed.
        """
        if connection is not None:
            now = self.database.moment(connection)
            return insert(connection, tasks, now, self.chance)
        with self.database.writing() as own:
            return self.enqueue(tasks, connection=own)

    def schedule(self, task: NewTask, *, joined: sa.Connection | None = None) -> UUID:
        """Add a task that somebody asked for, or raise TaskAlreadyActive."""
        check_time(task.scheduled_for)
        with self.database.writing(joined) as connection:
            (made,) = self.enqueue([task], connection=connection)
            if made is None:
                active = sa.select(TASK.c.task_id).where(TASK.c.slot == task.slot)
                raise TaskAlreadyActive(connection.scalar(active))
        return made

    def bring_forward(self, tasks: Sequence[NewTask], connection: sa.Connection) -> list[Turn]:
        """Let the task in each one's slot run as early as it would, for the same reason.

        Only a task that no attempt was made at is moved, never to a later time, and not if somebody
        asked for it, or if somebody or the run before has said when it is to run.
        """
        return bring_forward(connection, tasks, self.database.moment(connection))

    # -- out of the queue ------------------------------------------------------------------------

    def pick(self, queue: str, *, limit: int = 1, one_warehouse: bool = False) -> list[Claim]:
        """Take up to `limit` tasks that are due, or whose worker is lost, oldest first.

        Several are for one pipeline run; each is its own attempt and ends by itself.  Those of
        `one_warehouse`, that of the oldest, leave the others to whoever is free.
        """
        kind = queue_kind(queue)

        def take(connection: sa.Connection) -> list[Claim]:
            now = self.database.moment(connection)
            due = _due(kind, now)
            if one_warehouse:
                first = connection.execute(due.limit(1)).one_or_none()
                if first is None:
                    return []
                due = due.where(TASK.c.warehouse_id == first.warehouse_id)
            found = connection.execute(due.limit(limit)).all()
            lock_slots(connection, [row.slot for row in found])
            rows = [row for row in found if not self._is_over(connection, row, kind, now)]
            if not rows:
                return []
            slots = start(connection, rows, now)
            return [_claim(row, slots[row.slot], now) for row in rows]

        return self.database.transact(take)

    def _is_over(self, connection: sa.Connection, row: Row, kind: QueueKind, now: datetime) -> bool:
        """End the attempt of a worker that is lost, and tell whether it was the task's last one."""
        if row.status == TaskStatus.SCHEDULED:
            return False
        ending = Ending(TaskStatus.FAILED, LOST, Failure.LOST)
        if _spent(connection, row.task_id, row.attempt) < kind.max_attempts:
            log(connection, row, ending, now, final=False)
            return False
        end(connection, row, ending, now)
        make_again(connection, row, now, self.chance)
        return True

    # -- while it runs ---------------------------------------------------------------------------

    def heartbeat(
        self, claim: Claim, progress: float | None = None, details: Mapping[str, Any] | None = None
    ) -> Signal:
        """Say that the worker lives and how far it is, and hear what it is to do."""
        return self.heartbeats([Beat(claim, progress, details)])[claim.task_id]

    def heartbeats(self, beats: Sequence[Beat]) -> dict[UUID, Signal]:
        """Do the same for all tasks of a batch, in one transaction."""
        # By id, as others do who lock several: nobody waits for one that waits for them.
        ordered = sorted(beats, key=lambda beat: beat.claim.task_id)

        def tell(connection: sa.Connection) -> dict[UUID, Signal]:
            _renew(connection, ordered, self.database.moment(connection))
            return _signals(connection, [beat.claim for beat in ordered])

        return self.database.transact(tell)

    def now(self) -> datetime:
        """Return what time it is, by the clock that decides."""
        with self.database.reading() as connection:
            return self.database.moment(connection)

    def had_company(self, claim: Claim) -> bool:
        """Tell whether tasks of other queues were at the same table since this attempt began.

        Also one that waits for its next attempt: what it has begun is not finished.
        """
        slots = [
            NewTask(name, claim.scope, claim.entity, claim.scheduled_for).slot
            for name in QUEUES
            if name != claim.queue
        ]
        begun = sa.exists().where(TASK.c.slot.in_(slots), TASK.c.attempt > 0)
        ended = sa.exists().where(
            TASK_LOG.c.slot.in_(slots), TASK_LOG.c.ended_at >= claim.picked_up_at
        )
        with self.database.reading() as connection:
            return bool(connection.scalar(sa.select(sa.or_(begun, ended))))

    def deleted_before(self, claims: Sequence[Claim]) -> dict[UUID, int]:
        """Return for each table the bytes that attempts have deleted that failed since it was last done."""
        gone: dict[UUID, int] = {}
        with self.database.reading() as connection:
            for first in range(0, len(claims), CHUNK):
                slots = [claim.slot for claim in claims[first : first + CHUNK]]
                for number, result in connection.execute(failed_since_done(slots)):
                    gone[number] = gone.get(number, 0) + (result or {}).get("deleted_bytes", 0)
        return gone

    # -- done ------------------------------------------------------------------------------------

    def succeed(
        self,
        claim: Claim,
        message: str | None = None,
        *,
        result: Mapping[str, Any] | None = None,
        extent: Extent = Extent.DONE,
        successor: NewTask | None = None,
        along: Callable[[sa.Connection], None] | None = None,
    ) -> None:
        """End the task.  Only a run that looked at the table counts as one, and ends a wait after a failure.

        What is to be done `along` with it, which comes first, and the successor, if its slot is free then,
        are parts of the same transaction, which may be tried several times.  Raises TaskTakenOver
        if the attempt is not this worker's any more; reporting the same again is fine.
        """
        ending = Ending(TaskStatus.SUCCESS, message, None, result)

        def write(connection: sa.Connection, row: Row, now: datetime) -> None:
            end(connection, row, ending, now)
            if extent is not Extent.SKIPPED:
                ran = {"ran_at": now, "failed_at": None}
                ran |= {"done_at": now} if extent is Extent.DONE else {}
                connection.execute(sa.update(SLOT).where(SLOT.c.slot == row.slot).values(ran))
            if successor is not None:
                following = replace(successor, parent_id=claim.task_id)
                insert(connection, [following], now, self.chance)

        self._report(claim, ending, write, along)

    def fail(
        self,
        claim: Claim,
        message: str,
        failure: Failure = Failure.TRANSIENT,
        *,
        result: Mapping[str, Any] | None = None,
    ) -> TaskStatus:
        """End the attempt, and return SCHEDULED if there will be another one, or FAILED.

        The next attempt is made after a while, longer each time.  One that was stopped does not count.
        A task that has failed, but not for good, is followed by a new one.  Raises as `succeed` does.
        """
        ending = Ending(TaskStatus.FAILED, message, failure, result)

        def write(connection: sa.Connection, row: Row, now: datetime) -> None:
            spent = _spent(connection, row.task_id, row.attempt)
            if _tries_again(connection, claim, failure, spent):
                log(connection, row, ending, now, final=False)
                requeue(connection, row, now + self._backoff(spent), now)
                return
            end(connection, row, ending, now)
            if failure is not Failure.PERMANENT:
                make_again(connection, row, now, self.chance)

        ended = self._report(claim, ending, write)
        return TaskStatus.FAILED if ended else TaskStatus.SCHEDULED

    def _report(
        self,
        claim: Claim,
        ending: Ending,
        write: Callable[[sa.Connection, Row, datetime], None],
        along: Callable[[sa.Connection], None] | None = None,
    ) -> bool:
        """Write down how an attempt ended, once, and tell whether the task ended with it."""
        mine = sa.select(TASK).where(_held_by(claim)).with_for_update()
        for tries in range(1, _OUTCOME_TRIES + 1):
            try:
                with self.database.writing() as connection:
                    if along is not None:
                        along(connection)
                    row = connection.execute(mine).one_or_none()
                    if row is not None:
                        write(connection, row, self.database.moment(connection))
                    return _reported(connection, claim, ending)
            except StorageError:
                # The database may only have been restarted.
                if tries == _OUTCOME_TRIES:
                    raise
                self.database.clock.sleep(_OUTCOME_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def _backoff(self, spent: int) -> timedelta:
        """Return how long to wait after so many attempts: half of it is left to chance."""
        seconds = self.backoff_seconds * 2.0 ** (spent - 1)
        return timedelta(seconds=seconds * (0.5 + self.chance.below(_STEPS) / _STEPS / 2))


def _gone(claim: Claim) -> str:
    return (
        f"attempt {claim.attempt} at task {claim.task_id} is not this worker's any more: it was "
        "cancelled or taken over; nothing more is done for it here"
    )


def _held_by(claim: Claim) -> sa.ColumnElement[bool]:
    return sa.and_(
        TASK.c.task_id == claim.task_id,
        TASK.c.attempt == claim.attempt,
        TASK.c.fence == claim.fence,
        TASK.c.status.in_(HELD),
    )


def failed_since_done(slots: Sequence[str]) -> sa.Select[tuple[UUID, Any]]:
    """Return a query for the tables and results of attempts that failed since the slots were last done."""
    since = sa.func.coalesce(SLOT.c.done_at, sa.literal(from_micros(0), Moment))
    return (
        sa.select(TASK_LOG.c.entity_id, TASK_LOG.c.result)
        .join(SLOT, SLOT.c.slot == TASK_LOG.c.slot)
        .where(
            SLOT.c.slot.in_(slots),
            TASK_LOG.c.ended_at > since,
            TASK_LOG.c.status == TaskStatus.FAILED,
        )
    )


def _due(kind: QueueKind, now: datetime) -> sa.Select[Any]:
    patience = sa.func.coalesce(
        TASK_CONFIG.c.max_seconds_since_last_heartbeat, kind.heartbeat_seconds
    )
    config = sa.and_(
        TASK_CONFIG.c.scope_id == sa.func.coalesce(TASK.c.warehouse_id, TASK.c.project_id),
        TASK_CONFIG.c.queue_name == TASK.c.queue_name,
    )
    return (
        sa.select(TASK, TASK_CONFIG.c.config, patience.label("patience"))
        .select_from(TASK.outerjoin(TASK_CONFIG, config))
        .where(
            TASK.c.queue_name == kind.name,
            TASK.c.scheduled_for <= now,
            sa.or_(TASK.c.status == TaskStatus.SCHEDULED, TASK.c.stale_at <= now),
        )
        .order_by(TASK.c.scheduled_for, TASK.c.task_id)
        .with_for_update(of=TASK, skip_locked=True)
    )


def _claim(row: Row, slot: Row, now: datetime) -> Claim:
    return Claim(
        task_id=row.task_id,
        attempt=row.attempt + 1,
        fence=slot.fence,
        queue=row.queue_name,
        scope=scope_of(row),
        entity=entity_of(row),
        scheduled_for=row.scheduled_for,
        picked_up_at=now,
        created_at=row.created_at,
        heartbeat_seconds=row.patience,
        origin=Origin(row.origin),
        reason=row.reason,
        data=row.task_data,
        config=row.config or {},
        done_at=slot.done_at,
    )


def _renew(connection: sa.Connection, beats: Sequence[Beat], now: datetime) -> None:
    """Write down beats in this order; what one does not tell stays as it was."""
    if not beats:
        return
    done, found = sa.bindparam("done", type_=sa.Double), sa.bindparam("found", type_=Document)
    told = (
        sa.update(TASK)
        .where(
            TASK.c.task_id == sa.bindparam("id"),
            TASK.c.attempt == sa.bindparam("try"),
            TASK.c.fence == sa.bindparam("number"),
            TASK.c.status != TaskStatus.SCHEDULED,
        )
        .values(
            last_heartbeat_at=now,
            stale_at=sa.bindparam("stale"),
            updated_at=now,
            progress=sa.func.coalesce(done, TASK.c.progress),
            execution_details=sa.func.coalesce(found, TASK.c.execution_details),
        )
    )
    rows: list[dict[str, Any]] = []
    for beat in beats:
        claim, progress = beat.claim, beat.progress
        row = {"id": claim.task_id, "try": claim.attempt, "number": claim.fence}
        row["stale"] = now + timedelta(seconds=claim.heartbeat_seconds)
        row["done"] = None if progress is None else min(max(progress, 0.0), 1.0)
        row["found"] = None if beat.details is None else dict(beat.details)
        rows.append(row)
    connection.execute(told, rows)


def _signals(connection: sa.Connection, claims: Sequence[Claim]) -> dict[UUID, Signal]:
    found: dict[UUID, Row] = {}
    for first in range(0, len(claims), CHUNK):
        ids = [claim.task_id for claim in claims[first : first + CHUNK]]
        rows = connection.execute(
            sa.select(TASK.c.task_id, TASK.c.attempt, TASK.c.fence, TASK.c.status).where(
                TASK.c.task_id.in_(ids)
            )
        )
        found |= {row.task_id: row for row in rows}
    return {claim.task_id: _signal(claim, found.get(claim.task_id)) for claim in claims}


def _signal(claim: Claim, row: Row | None) -> Signal:
    if row is None or (row.attempt, row.fence) != (claim.attempt, claim.fence):
        return Signal.NOT_ACTIVE
    return Signal.STOP if row.status == TaskStatus.STOPPING else Signal.CONTINUE


def _reported(connection: sa.Connection, claim: Claim, ending: Ending) -> bool:
    """Tell whether the task ended with this attempt; raise if it did not end as reported.

    Also asked when the attempt is over already: the answer to an earlier report may have been lost.
    """
    written = connection.execute(
        sa.select(TASK_LOG.c.final, TASK_LOG.c.status, TASK_LOG.c.failure).where(
            TASK_LOG.c.task_id == claim.task_id,
            TASK_LOG.c.attempt == claim.attempt,
            TASK_LOG.c.fence == claim.fence,
        )
    ).one_or_none()
    if written is None or (written.status, written.failure) != (ending.status, ending.failure):
        raise TaskTakenOver(_gone(claim))
    return bool(written.final)


def _spent(connection: sa.Connection, task_id: UUID, attempt: int) -> int:
    """Return how many attempts count up to this one: those that were stopped say nothing of the task."""
    return attempt - _ended_by(connection, task_id, Failure.STOPPED)


def _tries_again(connection: sa.Connection, claim: Claim, failure: Failure, spent: int) -> bool:
    kind = queue_kind(claim.queue)
    if failure is Failure.STOPPED:
        return True
    if failure is Failure.PERMANENT or spent >= kind.max_attempts:
        return False
    if failure is not Failure.TIMEOUT:
        return True
    return _ended_by(connection, claim.task_id, failure) + 1 < kind.max_timeouts


def _ended_by(connection: sa.Connection, task_id: UUID, failure: Failure) -> int:
    """Return how many earlier attempts ended like this."""
    before = sa.select(sa.func.count()).where(
        TASK_LOG.c.task_id == task_id, TASK_LOG.c.failure == failure
    )
    return connection.scalar(before) or 0
