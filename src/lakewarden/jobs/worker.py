"""Worker processes: loops that pick tasks of one queue each, and one that watches for changes.

Tasks of one warehouse that are due at the same time are picked together and share pipeline runs.  All loops of a process
use one Spark session, which is started when the first batch needs it and kept warm.  A loop that dies is
started again; a database that is away is waited for.  If Spark itself is gone, the process ends.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from threading import Event, Lock, Thread
from typing import TypeVar

from lakewarden.errors import ErrorKind, LakewardenError, StorageError, UsageError
from lakewarden.jobs.commits import Commits
from lakewarden.jobs.database import open_database
from lakewarden.jobs.discovery import Discovery
from lakewarden.jobs.log_cleanup import LogCleanup
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import (
    EXPIRE_SNAPSHOTS,
    OPTIMIZE,
    QUEUES,
    REMOVE_ORPHAN_FILES,
    TASK_LOG_CLEANUP,
)
from lakewarden.jobs.running import Engine, Runner
from lakewarden.jobs.tasks import Claim
from lakewarden.jobs.warehouses import Warehouses
from lakewarden.pipeline.frames import answers
from lakewarden.world import SystemChance

_LOG = logging.getLogger("lakewarden.jobs")
#: Variables of the environment that say how many loops a queue has in a process.
WORKERS = {
    EXPIRE_SNAPSHOTS: "LAKEWARDEN__TASK_EXPIRE_SNAPSHOTS_WORKERS",
    REMOVE_ORPHAN_FILES: "LAKEWARDEN__TASK_REMOVE_ORPHAN_FILES_WORKERS",
    OPTIMIZE: "LAKEWARDEN__TASK_OPTIMIZE_WORKERS",
    TASK_LOG_CLEANUP: "LAKEWARDEN__TASK_LOG_CLEANUP_WORKERS",
}
POLL_INTERVAL = "LAKEWARDEN__TASK_POLL_INTERVAL"
DETECT_INTERVAL = "LAKEWARDEN__DETECT_INTERVAL"
RATE_LIMIT = "LAKEWARDEN__TASK_DELETE_RATE_LIMIT"
#: Tasks that are picked together at most.
BATCH = 500
_WORKERS = 2
_WORKERS_MAX = 64
#: After an error of the database.
_PAUSE_SECONDS = 5.0
#: While it is away when workers start.
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
#: Idle loops do not all ask at the same moment.
_JITTER_MS = 500
#: How often the supervisor looks at its loops.
_LOOK_SECONDS = 0.5
_INTERVAL = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(ms|s|m|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class WorkerSettings:
    """How a process works."""

    database_url: str = field(repr=False)
    #: Starts Spark; called once, when it is needed first.
    engine: Callable[[], Engine]
    #: Loops of each queue; none of a queue that is not named.
    workers: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(QUEUES, _WORKERS))
    poll_seconds: float = 10.0
    #: How often tables are looked for, and at; 0 for never.
    detect_seconds: float = 60.0
    #: Keys that this process may delete in a second; None for no limit.
    rate_limit: float | None = None
    #: Surrounds every run of tasks that were picked together.
    around: Callable[[Sequence[Claim]], AbstractContextManager[object]] = nullcontext

    @classmethod
    def of(
        cls, environ: Mapping[str, str], database_url: str, engine: Callable[[], Engine]
    ) -> WorkerSettings:
        """Read the settings out of the environment, or say which variable makes no sense."""
        counts = {queue: _count(environ, name) for queue, name in WORKERS.items()}
        limit = environ.get(RATE_LIMIT)
        return cls(
            database_url,
            engine,
            counts,
            _interval(environ, POLL_INTERVAL, 10.0),
            _interval(environ, DETECT_INTERVAL, 60.0),
            None if limit is None else _rate(limit),
        )


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, str(_WORKERS))
    if not text.isdecimal() or int(text) > _WORKERS_MAX:
        raise _unreadable(name, text, f"a number of workers from 0 to {_WORKERS_MAX}")
    return int(text)


def _interval(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    found = _INTERVAL.fullmatch(text.strip())
    if found is None:
        raise _unreadable(name, text, "an interval like 500ms, 10s or 5m")
    return float(found[1]) * _SECONDS[found[2] or "s"]


def _rate(text: str) -> float:
    found = re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,6})?", text.strip())
    if found is None or float(text) <= 0:
        raise _unreadable(RATE_LIMIT, text, "a number of keys a second above 0")
    return float(text)


def _unreadable(name: str, text: str, wanted: str) -> UsageError:
    return UsageError(ErrorKind.USAGE, f"{name} is {text[:50]!r}; it must be {wanted}")


def run_workers(settings: WorkerSettings, stop: Event) -> None:
    """Work until `stop` is set; what runs then ends at the next place where it can, and is requeued.

    Raises if Spark is gone.
    """
    opened = _patiently(lambda: open_database(settings.database_url), stop)
    if opened is None:
        return
    with closing(opened) as database:
        chance = SystemChance()
        queue, warehouses = TaskQueue(database, chance), Warehouses(database, chance)
        spark = _Spark(settings, stop)
        runner = Runner(queue, warehouses, spark, stop, spark.is_lost)
        loops: dict[str, Callable[[], None]] = {}
        for name, number in settings.workers.items():
            for step in range(number):
                loops[f"{name}-{step + 1}"] = _Loop(queue, runner, name, settings, stop)
        if settings.workers.get(TASK_LOG_CLEANUP):
            _patiently(LogCleanup(queue).ensure, stop)
        if settings.detect_seconds:
            discovery = Discovery(warehouses, Commits(queue))
            loops["detect"] = _Watch(discovery, settings.detect_seconds, stop)
        supervise(loops, stop)
    if spark.lost:
        raise LakewardenError(
            ErrorKind.SPARK,
            "Spark has ended and cannot be started again in this process; tasks that ran are tried "
            "again by others: start the worker again, with more memory if the machine had run out of it",
        )


def _patiently(work: Callable[[], Answer], stop: Event) -> Answer | None:
    """Wait for a database that is away, longer each time; None if `stop` is set first."""
    pause = _FIRST_PAUSE_SECONDS
    while not stop.is_set():
        try:
            return work()
        except StorageError as error:
            _LOG.warning("waiting for the database: %s", error.message)
            stop.wait(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
    return None


def supervise(loops: Mapping[str, Callable[[], None]], stop: Event) -> None:
    """Keep loops running until `stop` is set, and return when they have ended."""
    running: dict[str, Thread] = {}
    while not stop.is_set():
        for name, loop in loops.items():
            if name not in running or not running[name].is_alive():
                if name in running:
                    _LOG.warning("worker %s has died and is started again", name)
                running[name] = Thread(target=_guarded(loop, name), name=name, daemon=True)
                running[name].start()
        stop.wait(_LOOK_SECONDS)
    for thread in running.values():
        thread.join()


def _guarded(loop: Callable[[], None], name: str) -> Callable[[], None]:
    def run() -> None:
        try:
            loop()
        except Exception:  # noqa: BLE001  # whatever it is, the others go on
            # The supervisor starts it again; a worker that is silently gone would be worse.
            _LOG.exception("worker %s failed", name)

    return run


@dataclass
class _Spark:
    """Spark, started for the first that needs it, and given to all others.

    A session whose JVM or server is gone does not come back, and whoever goes on picking tasks without it
    fails them all: the process ends, for whoever looks after it to start another.
    """

    settings: WorkerSettings
    stop: Event
    lost: bool = False
    _started: Engine | None = None
    _lock: Lock = field(default_factory=Lock)

    def __call__(self) -> Engine:
        with self._lock:
            if self._started is None:
                limit = self.settings.rate_limit
                self._started = replace(self.settings.engine(), rate_limit=limit)
            return self._started

    def is_lost(self) -> bool:
        """Tell whether it was started and does not answer any more."""
        with self._lock:
            if not self.lost and self._started is not None and not answers(self._started.spark):
                _LOG.error("Spark does not answer any more; this worker ends")
                self.lost = True
                self.stop.set()
            return self.lost


@dataclass(frozen=True)
class _Loop:
    """Picks tasks of one queue, and runs them."""

    queue: TaskQueue
    runner: Runner
    name: str
    settings: WorkerSettings
    stop: Event

    def __call__(self) -> None:
        while not self.stop.is_set():
            try:
                claims = self.queue.pick(self.name, limit=BATCH, one_warehouse=True)
            except StorageError as error:
                _LOG.warning("no task could be picked: %s", error.message)
                self.stop.wait(_PAUSE_SECONDS)
                continue
            if claims:
                _LOG.info("%s: tasks picked: %d", self.name, len(claims))
                with self.settings.around(claims):
                    self.runner.run(claims)
            else:
                pause = self.queue.chance.below(_JITTER_MS) / 1000
                self.stop.wait(self.settings.poll_seconds + pause)


@dataclass(frozen=True)
class _Watch:
    """Looks for tables and for commits to them."""

    discovery: Discovery
    seconds: float
    stop: Event

    def __call__(self) -> None:
        while not self.stop.is_set():
            try:
                self.discovery.detect_all()
            except StorageError as error:
                _LOG.warning("tables could not be looked for: %s", error.message)
            except Exception:  # noqa: BLE001  # started anew it would not wait for the next look
                _LOG.exception("tables could not be looked for")
            self.stop.wait(self.seconds)
