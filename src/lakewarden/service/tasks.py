"""Tasks: asked for, listed, looked at, controlled."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Body, Query, Request, Response

from lakewarden.errors import ErrorKind
from lakewarden.jobs.config import exclusion
from lakewarden.jobs.control import Action
from lakewarden.jobs.listing import ATTEMPTS_SHOWN, TaskFilter
from lakewarden.jobs.queues import QUEUES, queue_kind
from lakewarden.jobs.refusals import bad_request
from lakewarden.jobs.tasks import NewTask, Scope
from lakewarden.jobs.tokens import Role
from lakewarden.service.gate import MANAGEMENT, GuardedRoute, needs
from lakewarden.service.parts import Parts, PartsOf
from lakewarden.service.scopes import ProjectScope, WarehouseScope, warehouse_scope
from lakewarden.service.wire import (
    ControlTasks,
    ListProjectTasks,
    ListTasks,
    ProjectTaskDetails,
    ProjectTaskInfo,
    ProjectTaskList,
    RunAt,
    ScheduledTask,
    ScheduleTask,
    TaskList,
    WarehouseTaskDetails,
    WarehouseTaskInfo,
    entity_of,
)

router = APIRouter(prefix=MANAGEMENT, route_class=GuardedRoute, tags=["tasks"])

#: Later than this is a slip of the pen.
_LATEST = timedelta(days=365)
_WAREHOUSE = "/warehouse/{warehouse_id}"

NumAttempts = Annotated[
    int,
    Query(alias="numAttempts", ge=0, lt=2**16, description="How many earlier attempts to show."),
]


# -- asking for one ------------------------------------------------------------------------------


def _schedule(
    request: Request, parts: Parts, warehouse_id: UUID, queue: str, body: ScheduleTask
) -> ScheduledTask:
    # In Lakekeeper's order: the time is looked at before anything else.
    with parts.database.reading() as connection:
        now = parts.database.moment(connection)
    at = body.scheduled_for or now
    if at > now + _LATEST:
        raise bad_request(
            "ScheduledForTooFarInFuture",
            f"scheduled-for is more than {_LATEST.days} days ahead; choose an earlier time",
        )
    scope = warehouse_scope(parts, warehouse_id)
    wanted = entity_of(body.entity)
    assert wanted.id is not None
    found = parts.warehouses.table(warehouse_id, wanted.type, wanted.id)
    if not queue_kind(queue, code=404).schedulable:
        raise bad_request(
            "QueueNotUserSchedulable",
            f"tasks of {queue} make themselves and cannot be asked for",
            ErrorKind.QUEUE_UNKNOWN,
        )
    stored = parts.configs.get(scope, queue).config
    refusal = exclusion(queue, found.properties, stored, found.type)
    if refusal is not None:
        raise refusal
    if body.payload not in (None, {}):
        # Whoever writes {"dry-run": true} here must not get a run that deletes.
        raise bad_request(
            "InvalidTaskPayload",
            f"tasks of {queue} take no payload; what they do is set by the config and the table",
        )
    reason = f"asked for by {request.state.caller.name}"
    with parts.database.writing() as connection:
        # The warehouse may be forgotten at the same time.
        parts.warehouses.table(warehouse_id, wanted.type, wanted.id, joined=connection)
        task = NewTask(queue, scope, found.entity, at, reason=reason)
        made = parts.queue.schedule(task, joined=connection)
        context = {"queue_name": queue, "entity_id": str(found.id), "task_id": str(made)}
        parts.note(request, "schedule_task", scope, context, joined=connection)
    return ScheduledTask(task_id=made)


def _scheduling(queue: str) -> Any:
    def schedule(
        request: Request, parts: PartsOf, warehouse_id: UUID, body: ScheduleTask
    ) -> ScheduledTask:
        return _schedule(request, parts, warehouse_id, queue, body)

    return schedule


for _queue in QUEUES.values():
    if _queue.schedulable:
        router.add_api_route(
            f"{_WAREHOUSE}/task-queue/{_queue.name}/schedule",
            _scheduling(_queue.name),
            methods=["POST"],
            summary=f"Ask for a task of {_queue.name}.",
            operation_id=f"schedule_task_{_queue.name}",
            response_model=ScheduledTask,
            openapi_extra=needs(Role.OPERATE),
        )


@router.post(
    f"{_WAREHOUSE}/task-queue/{{queue_name}}/schedule",
    include_in_schema=False,
    response_model=ScheduledTask,
    openapi_extra=needs(Role.OPERATE),
)
def schedule_other(
    request: Request, queue_name: str, parts: PartsOf, warehouse_id: UUID, body: ScheduleTask
) -> ScheduledTask:
    return _schedule(request, parts, warehouse_id, queue_name, body)


# -- tasks of a warehouse ------------------------------------------------------------------------


@router.post(
    f"{_WAREHOUSE}/task/list",
    summary="List tasks of a warehouse, newest first.",
    operation_id="list_tasks",
    response_model=TaskList,
    openapi_extra=needs(Role.READ),
)
def list_tasks(
    parts: PartsOf, scope: WarehouseScope, body: Annotated[ListTasks | None, Body()] = None
) -> TaskList:
    body = body or ListTasks()
    entities = None if body.entities is None else [entity_of(one) for one in body.entities]
    page = parts.lists.page(
        scope,
        TaskFilter(body.status, body.queue_name, entities, body.created_after, body.created_before),
        token=body.page_token,
        size=body.page_size,
    )
    tasks = [WarehouseTaskInfo.of(one) for one in page.tasks]
    return TaskList(tasks=tasks, next_page_token=page.next_token)


@router.get(
    f"{_WAREHOUSE}/task/by-id/{{task_id}}",
    summary="Show all that is known of a task.",
    operation_id="get_task_details",
    response_model=WarehouseTaskDetails,
    openapi_extra=needs(Role.READ),
)
def show_task(
    task_id: UUID,
    parts: PartsOf,
    scope: WarehouseScope,
    attempts: NumAttempts = ATTEMPTS_SHOWN,
) -> WarehouseTaskDetails:
    return WarehouseTaskDetails.of_details(parts.lists.details(scope, task_id, attempts=attempts))


@router.post(
    f"{_WAREHOUSE}/task/control",
    summary="Stop, cancel or reschedule tasks of a warehouse.",
    operation_id="control_tasks",
    status_code=204,
    response_class=Response,
    openapi_extra=needs(Role.OPERATE),
)
def control_tasks(
    request: Request, parts: PartsOf, scope: WarehouseScope, body: ControlTasks
) -> None:
    _control(request, parts, scope, body)


# -- tasks of the project ------------------------------------------------------------------------


@router.post(
    "/project/task/list",
    summary="List tasks of the project, newest first.",
    operation_id="list_project_tasks",
    response_model=ProjectTaskList,
    openapi_extra=needs(Role.READ),
)
def list_project_tasks(
    parts: PartsOf, scope: ProjectScope, body: Annotated[ListProjectTasks | None, Body()] = None
) -> ProjectTaskList:
    body = body or ListProjectTasks()
    page = parts.lists.page(
        scope,
        TaskFilter(
            body.status,
            body.queue_name,
            created_after=body.created_after,
            created_before=body.created_before,
        ),
        token=body.page_token,
        size=body.page_size,
    )
    tasks = [ProjectTaskInfo.of(one) for one in page.tasks]
    return ProjectTaskList(tasks=tasks, next_page_token=page.next_token)


@router.get(
    "/project/task/by-id/{task_id}",
    summary="Show all that is known of a task of the project.",
    operation_id="get_project_task_details",
    response_model=ProjectTaskDetails,
    openapi_extra=needs(Role.READ),
)
def show_project_task(
    task_id: UUID,
    parts: PartsOf,
    scope: ProjectScope,
    attempts: NumAttempts = ATTEMPTS_SHOWN,
) -> ProjectTaskDetails:
    return ProjectTaskDetails.of_details(parts.lists.details(scope, task_id, attempts=attempts))


@router.post(
    "/project/task/control",
    summary="Stop, cancel or reschedule tasks of the project.",
    operation_id="control_project_tasks",
    status_code=204,
    response_class=Response,
    openapi_extra=needs(Role.OPERATE),
)
def control_project_tasks(
    request: Request, parts: PartsOf, scope: ProjectScope, body: ControlTasks
) -> None:
    _control(request, parts, scope, body)


def _control(request: Request, parts: Parts, scope: Scope, body: ControlTasks) -> None:
    action = Action(body.action.action_type)
    at = body.action.scheduled_for if isinstance(body.action, RunAt) else None
    with parts.database.writing() as connection:
        parts.control.control(scope, action, body.task_ids, at=at, joined=connection)
        if body.task_ids:
            context = {
                "action": action.value,
                "task_ids": [str(one) for one in body.task_ids],
                "scheduled_for": None if at is None else at.isoformat(),
            }
            parts.note(request, "control_tasks", scope, context, joined=connection)
