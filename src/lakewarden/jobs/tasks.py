"""The nouns: a task, its attempts, and what is told about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

#: The project of everything that names none.
DEFAULT_PROJECT = UUID(int=0)


class TaskStatus(StrEnum):
    """Where a task is.  The first three are active; a task ends in exactly one of the others."""

    SCHEDULED = "SCHEDULED"
    RUNNING = "RUNNING"
    #: Asked to stop; its worker has not answered yet.
    STOPPING = "STOPPING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


ACTIVE = (TaskStatus.SCHEDULED, TaskStatus.RUNNING, TaskStatus.STOPPING)
#: A worker has it.
HELD = (TaskStatus.RUNNING, TaskStatus.STOPPING)


class EntityType(StrEnum):
    """What a task is about."""

    TABLE = "table"
    VIEW = "view"
    #: A table of another format than Iceberg: Lance tables.
    GENERIC_TABLE = "generic-table"
    WAREHOUSE = "warehouse"
    PROJECT = "project"


class Origin(StrEnum):
    """Who wanted a task."""

    MANUAL = "manual"
    COMMIT = "commit"
    #: Its predecessor did.
    ADAPTIVE = "adaptive"
    #: It is always there, like the cleanup of the task log.
    STANDING = "standing"


class FixedBy(StrEnum):
    """Who said when a task is to run, so that no commit brings it forward."""

    #: Somebody put it off, perhaps to mend a setting first.
    PERSON = "person"
    #: The run before found that no commit makes a difference until then; another config may.
    RUN = "run"


class Failure(StrEnum):
    """What kind of failure ended an attempt, which decides whether there is another one."""

    #: May work next time.
    TRANSIENT = "transient"
    #: Will fail again until somebody does something: damaged tables, refusals.
    PERMANENT = "permanent"
    #: Took longer than an attempt may.
    TIMEOUT = "timeout"
    #: Stopped because somebody asked for it.
    STOPPED = "stopped"
    #: The worker was not heard of any more.
    LOST = "lost"


class Extent(StrEnum):
    """How much of its work a task did that succeeded."""

    #: None: nobody looked at the table.
    SKIPPED = "skipped"
    #: Nothing was to change, as in a dry run.
    LOOKED = "looked"
    DONE = "done"


class Signal(StrEnum):
    """What a worker hears when it says that it is alive."""

    CONTINUE = "continue"
    #: End, and report it.
    STOP = "stop"
    #: End, and report nothing: the task was cancelled, or somebody else has it.
    NOT_ACTIVE = "not_active"


class Turn(StrEnum):
    """What becomes of a slot's task if it is wanted sooner."""

    SOONER = "sooner"
    #: As it was; its next attempt, which is still to begin, sees all that is there by then.
    WAITS = "waits"
    #: Runs, or has just ended: it may have seen less.
    BEGUN = "begun"


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose tasks: a warehouse's, or those of the project itself."""

    project_id: UUID = DEFAULT_PROJECT
    warehouse_id: UUID | None = None

    @property
    def config_id(self) -> UUID:
        """Return under which id queue configs of this scope are kept."""
        return self.project_id if self.warehouse_id is None else self.warehouse_id

    @property
    def slots(self) -> str:
        """Return how the slots of all its tasks begin."""
        return f"{self.project_id}/{'-' if self.warehouse_id is None else self.warehouse_id}/"


@dataclass(frozen=True, slots=True)
class Entity:
    """What a task is about.  A warehouse or project is meant by the scope alone: no id."""

    type: EntityType
    id: UUID | None = None
    #: Namespace and name, as they were when the task was made.
    name: tuple[str, ...] | None = None


def _slot(scope: Scope, entity: Entity, queue: str) -> str:
    number = "-" if entity.id is None else entity.id
    return f"{scope.slots}{entity.type}/{number}/{queue}"


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task that is wanted."""

    queue: str
    scope: Scope
    entity: Entity
    scheduled_for: datetime
    origin: Origin = Origin.MANUAL
    #: Why it is worthwhile, in words.
    reason: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    parent_id: UUID | None = None
    #: Who said that its time stands: no commit brings it forward.
    fixed_by: FixedBy | None = None

    @property
    def slot(self) -> str:
        """Return what only one active task can have."""
        return _slot(self.scope, self.entity, self.queue)


@dataclass(frozen=True, slots=True)
class Claim:
    """One attempt at a task, in the hands of one worker.

    `task_id`, `attempt` and `fence` together say whose attempt it is; everything that a worker
    reports is dropped if they are not the task's any more.
    """

    task_id: UUID
    attempt: int
    #: Grows with every attempt at anything in this slot, also of later tasks.
    fence: int
    queue: str
    scope: Scope
    entity: Entity
    scheduled_for: datetime
    picked_up_at: datetime
    created_at: datetime
    #: How long the worker may not be heard of until others take the task over.
    heartbeat_seconds: int
    origin: Origin
    reason: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    #: The queue's config as it was stored when the task was picked.
    config: Mapping[str, Any] = field(default_factory=dict)
    #: When the last run in this slot ended that was no dry run.
    done_at: datetime | None = None

    @property
    def slot(self) -> str:
        """Return what no other active task has."""
        return _slot(self.scope, self.entity, self.queue)


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life.  `details` None leaves what was told before as it is."""

    claim: Claim
    progress: float | None = None
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """What lists show of a task."""

    task_id: UUID
    scope: Scope
    queue: str
    entity: Entity
    status: TaskStatus
    scheduled_for: datetime
    picked_up_at: datetime | None
    attempt: int
    last_heartbeat_at: datetime | None
    progress: float
    parent_id: UUID | None
    created_at: datetime
    updated_at: datetime | None
    origin: Origin
    reason: str | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that is over."""

    attempt: int
    status: TaskStatus
    scheduled_for: datetime
    started_at: datetime | None
    duration_seconds: float | None
    message: str | None
    created_at: datetime
    progress: float
    details: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class TaskDetails:
    """All that is known of a task.  `attempts` are the earlier ones, newest first."""

    info: TaskInfo
    data: Mapping[str, Any]
    #: What the current attempt tells, or what the last one told and found.
    details: Mapping[str, Any] | None
    message: str | None
    attempts: tuple[Attempt, ...] = ()
