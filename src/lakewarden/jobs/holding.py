"""The tasks of one batch while this worker has them: signs of life, stops, time limits, reports.

A thread says every now and then that the worker lives.  Before anything is deleted the database is
asked again (`check`), and its answer holds for half of the time after which others may take a task
over: a worker that was away for longer finds that out before it deletes, and so do those that delete
for it on other machines, as long as their clocks differ by less than the other half.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Event, Lock, Thread
from typing import Any, Self, TypeVar
from uuid import UUID

import sqlalchemy as sa

from lakewarden.errors import ErrorKind, Interrupted, StorageError
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.refusals import TaskTakenOver
from lakewarden.jobs.schema import each_text
from lakewarden.jobs.secrets import without_secrets
from lakewarden.jobs.tasks import Beat, Claim, Extent, Failure, NewTask, Signal, TaskStatus
from lakewarden.world import Clock

_LOG = logging.getLogger("lakewarden.jobs")
#: Signs of life within the time after which a worker counts as lost.
_BEATS = 4
#: A database that is away is asked again so often, for so long.
_PAUSE_SECONDS = 2.0
_PATIENCE_SECONDS = 900.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class End:
    """Why no more is done for a task here.  Without a failure there is nothing to report."""

    reason: str
    failure: Failure | None = None


@dataclass(slots=True)
class _Task:
    claim: Claim
    #: When it has taken too long, on the steady clock.
    deadline: float | None = None
    progress: float | None = None
    details: Mapping[str, Any] | None = None
    end: End | None = None


@dataclass
class Holding:
    """Tasks in this worker's hands.  As a context it keeps them there."""

    queue: TaskQueue
    #: Set when the whole worker is to end.
    stop: Event
    _tasks: dict[UUID, _Task] = field(default_factory=dict)
    #: What takes out of a text what nobody may read, also of tasks that are reported.
    _hiding: dict[UUID, Callable[[str], str]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _over: Event = field(default_factory=Event)
    _thread: Thread | None = None

    @property
    def clock(self) -> Clock:
        return self.queue.database.clock

    def take(self, claims: Sequence[Claim]) -> Self:
        self._tasks = {claim.task_id: _Task(claim) for claim in claims}
        return self

    def __enter__(self) -> Self:
        self._thread = Thread(target=self._live, name="lakewarden-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    # -- while it runs ---------------------------------------------------------------------------

    def hide(self, claims: Sequence[Claim], hide: Callable[[str], str]) -> None:
        """Let nothing be reported about these tasks but what is left by `hide`."""
        self._hiding |= {claim.task_id: hide for claim in claims}

    def limit(self, claim: Claim, seconds: float) -> None:
        """Let an attempt take so long from now on."""
        task = self._tasks.get(claim.task_id)
        if task is not None:
            task.deadline = self.clock.elapsed() + seconds

    def tell(
        self, claim: Claim, progress: float | None = None, details: Mapping[str, Any] | None = None
    ) -> None:
        """Say how far a task is; whoever asks hears of it with the next sign of life."""
        task = self._tasks.get(claim.task_id)
        if task is not None:
            task.progress = task.progress if progress is None else progress
            task.details = task.details if details is None else self._told(claim, details)

    def ended(self, claim: Claim) -> End | None:
        """Return why no more is to be done for a task; None if it goes on."""
        task = self._tasks.get(claim.task_id)
        return End("it was reported") if task is None else task.end

    def check(self, claims: Collection[Claim]) -> tuple[frozenset[UUID], datetime]:
        """Return which of these tasks are still this worker's to go on with, and until when that holds.

        The fence of every task: its sign of life is renewed in the same question.  A database that
        does not answer is waited for, and nothing is deleted meanwhile.
        """
        asked = self.clock.now()
        self.patiently(self._beat)
        self._look_at_limits()
        going = [one for one in claims if self.ended(one) is None]
        shortest = min((one.heartbeat_seconds for one in going), default=0)
        until = asked + timedelta(seconds=shortest / 2)
        return frozenset(one.task_id for one in going), until

    def going(self, claims: Sequence[Claim]) -> list[Claim]:
        """Return which of these tasks go on; of those that do not, it is reported why."""
        passing, _ = self.check(claims)
        for claim in claims:
            end = self.ended(claim)
            if claim.task_id not in passing and end is not None:
                self.end_of(claim, end)
        return [claim for claim in claims if claim.task_id in passing]

    def _look_at_limits(self) -> None:
        now = self.clock.elapsed()
        for task in list(self._tasks.values()):
            if task.end is None and self.stop.is_set():
                task.end = End("the worker is shutting down", Failure.STOPPED)
            elif task.end is None and task.deadline is not None and now > task.deadline:
                task.end = End(
                    "the attempt took longer than max-run-time-seconds; what was done stays done",
                    Failure.TIMEOUT,
                )

    def _live(self) -> None:
        shortest = min((one.claim.heartbeat_seconds for one in self._tasks.values()), default=60)
        while not self._over.wait(shortest / _BEATS):
            try:
                self._beat()
            except StorageError as error:
                # `check` waits for the database; until it answers nothing more is deleted.
                _LOG.warning("no sign of life could be given: %s", error.message)

    def _beat(self) -> None:
        with self._lock:
            alive = [one for one in list(self._tasks.values()) if not _is_gone(one)]
            if not alive:
                return
            beats = [Beat(one.claim, one.progress, one.details) for one in alive]
            signals = self.queue.heartbeats(beats)
            for task in alive:
                match signals[task.claim.task_id]:
                    case Signal.STOP if task.end is None:
                        task.end = End("stopped on request", Failure.STOPPED)
                    case Signal.NOT_ACTIVE:
                        task.end = End("it was cancelled, or somebody else has it")
                    case _:
                        pass

    def patiently(self, work: Callable[[], Answer]) -> Answer:
        """Ask a database that is away again, for a while."""
        give_up = self.clock.elapsed() + _PATIENCE_SECONDS
        while True:
            try:
                return work()
            except StorageError as error:
                if self.clock.elapsed() > give_up:
                    raise Interrupted(
                        ErrorKind.STORAGE,
                        f"the database has not answered for {_PATIENCE_SECONDS:g} seconds "
                        f"({error.message}); nothing more is done here",
                    ) from error
                _LOG.warning("waiting for the database: %s", error.message)
                self.clock.sleep(_PAUSE_SECONDS)

    # -- at its end ------------------------------------------------------------------------------

    def succeed(
        self,
        claim: Claim,
        message: str,
        result: Mapping[str, Any],
        *,
        extent: Extent = Extent.DONE,
        successor: NewTask | None = None,
        along: Callable[[sa.Connection], None] | None = None,
    ) -> None:
        """Report that a task is done, unless it is somebody else's by now."""
        words, told = self._hidden(claim, message, result)

        def report() -> None:
            self.queue.succeed(
                claim, words, result=told, extent=extent, successor=successor, along=along
            )
            _LOG.info("%s is done: %s", _named(claim), words)

        self.report(claim, report)

    def fail(
        self,
        claim: Claim,
        message: str,
        failure: Failure,
        result: Mapping[str, Any] | None = None,
    ) -> None:
        """Report that an attempt has failed, unless the task is somebody else's by now."""
        words, told = self._hidden(claim, message, result)

        def report() -> None:
            status = self.queue.fail(claim, words, failure, result=told)
            then = "has failed" if status is TaskStatus.FAILED else "will be tried again"
            _LOG.warning("%s %s: %s", _named(claim), then, words)

        self.report(claim, report)

    def hidden(self, claim: Claim, text: str) -> str:
        """Return a text without what nobody may read of this task's warehouse."""
        return without_secrets(self._hiding.get(claim.task_id, str)(text))

    def _hidden(
        self, claim: Claim, message: str, result: Mapping[str, Any] | None
    ) -> tuple[str, Mapping[str, Any] | None]:
        told = None if result is None else self._told(claim, result)
        return self.hidden(claim, message), told

    def _told(self, claim: Claim, details: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = each_text(details, lambda text: self.hidden(claim, text))
        return found

    def end_of(self, claim: Claim, end: End, result: Mapping[str, Any] | None = None) -> None:
        """Report why no more was done for a task, if that is to be reported."""
        if end.failure is None:
            _LOG.info("task %s: %s; nothing is reported", claim.task_id, end.reason)
            self._tasks.pop(claim.task_id, None)
            return
        self.fail(claim, end.reason, end.failure, result)

    def report(self, claim: Claim, report: Callable[[], None]) -> None:
        """Tell the database how an attempt ended, when it answers, if it is still this worker's."""
        task = self._tasks.get(claim.task_id)
        if task is None:
            return
        try:
            if not _is_gone(task):
                self.patiently(report)
        except TaskTakenOver as error:
            _LOG.info("%s", error.message)
        finally:
            self._tasks.pop(claim.task_id, None)

    def left(self) -> list[Claim]:
        """Return the tasks that nothing was reported about."""
        return [one.claim for one in list(self._tasks.values())]


def _is_gone(task: _Task) -> bool:
    return task.end is not None and task.end.failure is None


def _named(claim: Claim) -> str:
    name = ".".join(claim.entity.name or ())
    return f"task {claim.task_id} ({claim.queue}{f' of {name}' if name else ''})"
