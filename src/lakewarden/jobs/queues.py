"""The queues there are, and how patient each is."""

from __future__ import annotations

from dataclasses import dataclass

from lakewarden.errors import ErrorKind
from lakewarden.jobs.refusals import RequestRefused
from lakewarden.jobs.tasks import EntityType

DAY_SECONDS = 86_400
EXPIRE_SNAPSHOTS = "expire_snapshots"
REMOVE_ORPHAN_FILES = "remove_orphan_files"
OPTIMIZE = "optimize"
TASK_LOG_CLEANUP = "task_log_cleanup"

_TABLES = (EntityType.TABLE, EntityType.GENERIC_TABLE)


@dataclass(frozen=True, slots=True)
class QueueKind:
    """What is so for every task of a queue."""

    name: str
    entities: tuple[EntityType, ...] = _TABLES
    #: Attempts in all, those included whose worker was lost, but not those that were stopped.
    max_attempts: int = 5
    #: How many of them may take too long.
    max_timeouts: int = 2
    #: Unless the queue's config says otherwise.
    heartbeat_seconds: int = 120
    #: When a task is made again after one that has failed, but not for good.
    again_after_seconds: int = DAY_SECONDS
    #: Whether people may ask for a task.
    schedulable: bool = True

    @property
    def of_project(self) -> bool:
        return self.entities == (EntityType.PROJECT,)


QUEUES = {
    kind.name: kind
    for kind in (
        QueueKind(EXPIRE_SNAPSHOTS),
        QueueKind(REMOVE_ORPHAN_FILES),
        QueueKind(OPTIMIZE),
        QueueKind(
            TASK_LOG_CLEANUP,
            (EntityType.PROJECT,),
            heartbeat_seconds=3600,
            schedulable=False,
        ),
    )
}


def queue_kind(name: str, *, code: int = 400) -> QueueKind:
    """Return the queue of a name.  Settings answer 400 to others, schedules 404, as Lakekeeper does."""
    kind = QUEUES.get(name)
    if kind is None:
        raise RequestRefused(
            ErrorKind.QUEUE_UNKNOWN,
            "QueueNotFound",
            code,
            f"there is no queue of this name; the queues are {', '.join(sorted(QUEUES))}",
        )
    return kind
