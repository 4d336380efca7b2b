"""What goes over the wire: names with hyphens, explicit nulls, times in UTC.

A key that nobody knows is refused, with the nearest that there is, and so is a value of the wrong type:
whoever mistypes `scheduled-for` must not get a run at once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo

from lakewarden.jobs.config import Applied, Source, nearest
from lakewarden.jobs.durations import format_iso_duration
from lakewarden.jobs.tasks import (
    Attempt,
    Entity,
    EntityType,
    Scope,
    TaskDetails,
    TaskInfo,
    TaskStatus,
)
from lakewarden.jobs.tokens import AuditEntry
from lakewarden.jobs.warehouses import Access, TableEntity, WarehouseInfo, WarehouseKind

#: Whole numbers that fit into 64 bits.
_INT64 = 2**63


def _hyphens(name: str) -> str:
    return name.replace("_", "-")


class Wire(BaseModel):
    """A body that is sent, or a part of one.  It is made here, by the names that fields have here."""

    model_config = ConfigDict(
        alias_generator=_hyphens, validate_by_name=True, validate_by_alias=False
    )


class Asked(BaseModel):
    """A body that came in, or a part of one: only the names of the wire, and no others."""

    model_config = ConfigDict(alias_generator=_hyphens, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, given: Any) -> Any:
        known = [name for field in cls.model_fields.values() for name in _names(field)]
        for key in given if isinstance(given, dict) else ():
            if key not in known:
                raise ValueError(f"{str(key)[:50]!r} is no key here; {nearest(key, known)}")
        return given


def _names(field: FieldInfo) -> list[str]:
    named = field.validation_alias
    if isinstance(named, AliasChoices):
        return [str(one) for one in named.choices]
    return [str(named)]


def _only_text(value: object) -> object:
    # Numbers would be taken for seconds since 1970.
    if not isinstance(value, str | datetime):
        raise ValueError("write a time as RFC 3339 does, like 2026-11-16T08:00:00Z")  # noqa: TRY004  # pydantic's
    return value


def _to_utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("a time needs its offset, like 2026-11-16T08:00:00Z")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("a time must be in the years 1 to 9999, in UTC") from None


Moment = Annotated[
    datetime,
    BeforeValidator(_only_text),
    AfterValidator(_to_utc),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
Int64 = Annotated[StrictInt, Field(ge=-_INT64, lt=_INT64, json_schema_extra={"format": "int64"})]
Name = Annotated[
    str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f/\\]+$")
]


# -- entities ------------------------------------------------------------------------------------


class TableRef(Asked):
    """An Iceberg table."""

    type: Literal["table"]
    table_id: UUID


class ViewRef(Asked):
    """A view."""

    type: Literal["view"]
    view_id: UUID


class GenericTableRef(Asked):
    """A table of another format: a Lance table."""

    type: Literal["generic-table"]
    generic_table_id: UUID


class WarehouseRef(Asked):
    """The warehouse itself."""

    type: Literal["warehouse"]


EntityRef = Annotated[TableRef | ViewRef | GenericTableRef, Field(discriminator="type")]
EntityFilter = Annotated[
    TableRef | ViewRef | GenericTableRef | WarehouseRef, Field(discriminator="type")
]


def entity_of(ref: TableRef | ViewRef | GenericTableRef | WarehouseRef) -> Entity:
    match ref:
        case TableRef():
            return Entity(EntityType.TABLE, ref.table_id)
        case ViewRef():
            return Entity(EntityType.VIEW, ref.view_id)
        case GenericTableRef():
            return Entity(EntityType.GENERIC_TABLE, ref.generic_table_id)
        case WarehouseRef():
            return Entity(EntityType.WAREHOUSE)


def ref_of(entity: Entity) -> TableRef | ViewRef | GenericTableRef | None:
    """Return how a table is named; None for what the scope alone means."""
    if entity.id is None:
        return None
    match entity.type:
        case EntityType.TABLE:
            return TableRef.model_validate({"type": "table", "table-id": entity.id})
        case EntityType.VIEW:
            return ViewRef.model_validate({"type": "view", "view-id": entity.id})
        case EntityType.GENERIC_TABLE:
            named = {"type": "generic-table", "generic-table-id": entity.id}
            return GenericTableRef.model_validate(named)
        case EntityType.WAREHOUSE | EntityType.PROJECT:
            return None


# -- queue configs -------------------------------------------------------------------------------


class SetTaskQueueConfig(Asked):
    """A config that replaces the one there was, as a whole."""

    #: Checked by the queue itself, which has names of its own for what is wrong.
    queue_config: Any
    #: Null leaves the one that was set.
    max_seconds_since_last_heartbeat: Int64 | None = None


class TaskQueueConfig(Wire):
    """What was stored, and nothing else: no defaults."""

    queue_config: dict[str, Any]
    max_seconds_since_last_heartbeat: int | None


class EffectiveSetting(Wire):
    """What applies, and from where."""

    value: Any
    source: Source
    #: The table's property that says so.
    property: str | None

    @classmethod
    def of(cls, applied: Applied) -> Self:
        return cls(value=applied.value, source=applied.source, property=applied.property)


class Exclusion(Wire):
    """Why a queue leaves a table alone."""

    type: str
    message: str


class EffectiveConfig(Wire):
    """What a queue would do to one table."""

    queue_name: str
    entity: EntityRef
    entity_name: list[str]
    enabled: bool
    excluded: Exclusion | None
    settings: dict[str, EffectiveSetting]


# -- tasks ---------------------------------------------------------------------------------------


class ScheduleTask(Asked):
    """A task that somebody asks for."""

    entity: EntityRef
    scheduled_for: Moment | None = None
    payload: Any = None


class ScheduledTask(Wire):
    """The task that was made."""

    task_id: UUID


class ListProjectTasks(Asked):
    """Which tasks of the project to list."""

    status: list[TaskStatus] | None = None
    queue_name: list[str] | None = None
    created_after: Moment | None = None
    created_before: Moment | None = None
    page_token: str | None = None
    page_size: Int64 | None = None


class ListTasks(ListProjectTasks):
    """Which tasks of a warehouse to list."""

    entities: list[EntityFilter] | None = None


class ProjectTaskInfo(Wire):
    """A task of the project itself."""

    task_id: UUID
    project_id: str
    queue_name: str
    status: TaskStatus
    scheduled_for: Moment
    picked_up_at: Moment | None
    attempt: int
    last_heartbeat_at: Moment | None
    progress: float
    parent_task_id: UUID | None
    created_at: Moment
    updated_at: Moment | None

    @classmethod
    def of(cls, info: TaskInfo, **more: Any) -> Self:
        return cls(
            task_id=info.task_id,
            project_id=str(info.scope.project_id),
            queue_name=info.queue,
            status=info.status,
            scheduled_for=info.scheduled_for,
            picked_up_at=info.picked_up_at,
            attempt=info.attempt,
            last_heartbeat_at=info.last_heartbeat_at,
            progress=info.progress,
            parent_task_id=info.parent_id,
            created_at=info.created_at,
            updated_at=info.updated_at,
            **more,
        )


class WarehouseTaskInfo(ProjectTaskInfo):
    """A task of a warehouse."""

    warehouse_id: UUID
    entity: EntityRef | None
    entity_name: list[str] | None

    @classmethod
    def of(cls, info: TaskInfo, **more: Any) -> Self:
        name = info.entity.name
        return super().of(
            info,
            warehouse_id=info.scope.warehouse_id,
            entity=ref_of(info.entity),
            entity_name=None if name is None else list(name),
            **more,
        )


class TaskAttempt(Wire):
    """An attempt that is over."""

    attempt: int
    status: TaskStatus
    scheduled_for: Moment
    started_at: Moment | None
    duration: str | None
    message: str | None
    created_at: Moment
    progress: float
    execution_details: dict[str, Any] | None

    @classmethod
    def of(cls, one: Attempt) -> Self:
        seconds = one.duration_seconds
        return cls(
            attempt=one.attempt,
            status=one.status,
            scheduled_for=one.scheduled_for,
            started_at=one.started_at,
            duration=None if seconds is None else format_iso_duration(seconds),
            message=one.message,
            created_at=one.created_at,
            progress=one.progress,
            execution_details=None if one.details is None else dict(one.details),
        )


def _details(found: TaskDetails) -> dict[str, Any]:
    # Why a task was made has no place of its own in Lakekeeper's body.
    why = {"origin": found.info.origin.value, "reason": found.info.reason}
    return {
        "task_data": {**why, **found.data},
        "execution_details": None if found.details is None else dict(found.details),
        "message": found.message,
        "attempts": [TaskAttempt.of(one) for one in found.attempts],
    }


class ProjectTaskDetails(ProjectTaskInfo):
    """All that is known of a task of the project."""

    task_data: dict[str, Any]
    execution_details: dict[str, Any] | None
    message: str | None
    attempts: list[TaskAttempt]

    @classmethod
    def of_details(cls, found: TaskDetails) -> Self:
        return cls.of(found.info, **_details(found))


class WarehouseTaskDetails(WarehouseTaskInfo):
    """All that is known of a task of a warehouse."""

    task_data: dict[str, Any]
    execution_details: dict[str, Any] | None
    message: str | None
    attempts: list[TaskAttempt]

    @classmethod
    def of_details(cls, found: TaskDetails) -> Self:
        return cls.of(found.info, **_details(found))


class TaskList(Wire):
    """Tasks of a warehouse, newest first; without a token there are no more."""

    tasks: list[WarehouseTaskInfo]
    next_page_token: str | None


class ProjectTaskList(Wire):
    """Tasks of the project, newest first; without a token there are no more."""

    tasks: list[ProjectTaskInfo]
    next_page_token: str | None


class PlainAction(Asked):
    """What needs no further word."""

    action_type: Literal["stop", "cancel", "run-now"]


class RunAt(Asked):
    """Another time."""

    action_type: Literal["run-at"]
    scheduled_for: Moment = Field(
        validation_alias=AliasChoices("scheduled-for", "scheduled_for"),
        serialization_alias="scheduled-for",
    )


class ControlTasks(Asked):
    """What is to become of which tasks."""

    action: Annotated[PlainAction | RunAt, Field(discriminator="action_type")]
    task_ids: list[UUID]


# -- warehouses ----------------------------------------------------------------------------------

_Text = Annotated[str, StringConstraints(max_length=8192)]


class RegisterWarehouse(Asked):
    """Where tables are that are to be looked after."""

    warehouse_name: Name
    kind: WarehouseKind
    #: A path or URI; of a PyIceberg catalog, its name.
    location: Annotated[str, StringConstraints(min_length=1, max_length=2048)]
    #: How to reach files; may hold credentials, and is never shown again.
    storage_options: dict[str, _Text] = Field(default_factory=dict, max_length=100, repr=False)
    #: How to reach the catalog, or the log's database; the same.
    catalog_properties: dict[str, _Text] = Field(default_factory=dict, max_length=100, repr=False)

    @property
    def access(self) -> Access:
        return Access(self.storage_options, self.catalog_properties)


class RegisteredWarehouse(Wire):
    """The warehouse that was registered."""

    warehouse_id: UUID
    tables: int


class Warehouse(Wire):
    """A warehouse, without what is needed to reach it."""

    warehouse_id: UUID
    name: str
    project_id: str
    kind: WarehouseKind
    location: str
    created_at: Moment

    @classmethod
    def of(cls, info: WarehouseInfo) -> Self:
        return cls(
            warehouse_id=info.id,
            name=info.name,
            project_id=str(info.project_id),
            kind=info.kind,
            location=info.location,
            created_at=info.created_at,
        )


class WarehouseList(Wire):
    """The warehouses of the project, by name."""

    warehouses: list[Warehouse]


class Table(Wire):
    """A table that is looked after."""

    entity: EntityRef
    entity_name: list[str]
    #: What commands take.
    target: str
    #: Those that decide about maintenance; others are nobody's business here.
    properties: dict[str, str]
    changed_at: Moment | None
    created_at: Moment

    @classmethod
    def of(cls, found: TableEntity, properties: dict[str, str]) -> Self:
        return cls(
            entity=_reference(found),
            entity_name=list(found.name),
            target=found.target,
            properties=properties,
            changed_at=found.changed_at,
            created_at=found.created_at,
        )


def _reference(found: TableEntity) -> TableRef | ViewRef | GenericTableRef:
    ref = ref_of(found.entity)
    assert ref is not None
    return ref


class TableList(Wire):
    """Tables by name; without a token there are no more."""

    tables: list[Table]
    next_page_token: str | None


class RefreshedTables(Wire):
    """What a look at the warehouse has found."""

    tables: int
    added: int
    gone: int


# -- the service itself --------------------------------------------------------------------------


class ServerInfo(Wire):
    """What clients want to know first."""

    version: str
    default_project_id: str
    queues: list[str]


class Health(Wire):
    """Whether requests can be met."""

    health: Literal["healthy", "unhealthy"]
    services: dict[str, Literal["healthy", "unhealthy"]]


class AuditRow(Wire):
    """Who changed what."""

    at: Moment
    actor: str
    action: str
    project_id: str | None
    warehouse_id: UUID | None
    context: dict[str, Any]

    @classmethod
    def of(cls, entry: AuditEntry) -> Self:
        scope = entry.scope or Scope()
        return cls(
            at=entry.at,
            actor=entry.actor,
            action=entry.action,
            project_id=None if entry.scope is None else str(scope.project_id),
            warehouse_id=scope.warehouse_id,
            context=dict(entry.context),
        )


class AuditList(Wire):
    """What was changed, newest first; without a token there is no more."""

    entries: list[AuditRow]
    next_page_token: str | None


class ErrorModel(Wire):
    """What went wrong."""

    message: str
    type: str
    code: int
    stack: list[str] | None = None


class ErrorBody(Wire):
    """The body of every answer that is an error."""

    error: ErrorModel
