"""Settings of the queues: what was stored, and what applies to one table."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

from lakewarden.errors import ErrorKind
from lakewarden.jobs.config import QUEUE_NAME, effective, exclusion, trouble
from lakewarden.jobs.config_store import StoredConfig
from lakewarden.jobs.queues import QUEUES, queue_kind
from lakewarden.jobs.refusals import bad_request
from lakewarden.jobs.tasks import Scope
from lakewarden.jobs.tokens import Role
from lakewarden.service.gate import MANAGEMENT, GuardedRoute, needs
from lakewarden.service.openapi import config_body, config_schema_name
from lakewarden.service.parts import Parts, PartsOf
from lakewarden.service.scopes import ProjectScope, WarehouseScope
from lakewarden.service.wire import (
    EffectiveConfig,
    EffectiveSetting,
    Exclusion,
    SetTaskQueueConfig,
    TaskQueueConfig,
    ref_of,
)

router = APIRouter(prefix=MANAGEMENT, route_class=GuardedRoute, tags=["task queues"])

#: Joined to every task that is picked, so no place to keep things.
_CONFIG_BYTES_MAX = 64 * 1024
_OF_WAREHOUSE = "/warehouse/{warehouse_id}/task-queue"
_OF_PROJECT = "/project/task-queue"


def _read(parts: Parts, scope: Scope, queue: str) -> TaskQueueConfig:
    """Answer with exactly what was stored, and the queue's name."""
    # For other names nothing was ever stored, and the database need not hear them.
    stored = parts.configs.get(scope, queue) if queue in QUEUES else StoredConfig()
    return TaskQueueConfig(
        queue_config={**stored.config, QUEUE_NAME: queue},
        max_seconds_since_last_heartbeat=stored.max_seconds_since_last_heartbeat,
    )


def _write(
    request: Request, parts: Parts, scope: Scope, queue: str, body: SetTaskQueueConfig
) -> None:
    given = body.queue_config
    if len(json.dumps(given)) > _CONFIG_BYTES_MAX:
        raise bad_request(
            "InvalidQueueConfig",
            f"the config of {queue[:100]} is larger than {_CONFIG_BYTES_MAX} bytes; nothing was changed",
            ErrorKind.QUEUE_CONFIG,
        )
    seconds = body.max_seconds_since_last_heartbeat
    with parts.database.writing() as connection:
        parts.commits.configure(scope, queue, given, seconds, joined=connection)
        context = {
            "queue_name": queue,
            "queue_config": {key: value for key, value in given.items() if key != QUEUE_NAME},
            "max_seconds_since_last_heartbeat": seconds,
        }
        parts.note(request, "modify_task_queue_config", scope, context, joined=connection)


def _reading(queue: str) -> Callable[..., TaskQueueConfig]:
    def read(parts: PartsOf, scope: WarehouseScope) -> TaskQueueConfig:
        return _read(parts, scope, queue)

    return read


def _writing(queue: str) -> Callable[..., None]:
    def write(
        request: Request, parts: PartsOf, scope: WarehouseScope, body: SetTaskQueueConfig
    ) -> None:
        _write(request, parts, scope, queue, body)

    return write


def _reading_project(queue: str) -> Callable[..., TaskQueueConfig]:
    def read(parts: PartsOf, scope: ProjectScope) -> TaskQueueConfig:
        return _read(parts, scope, queue)

    return read


def _writing_project(queue: str) -> Callable[..., None]:
    def write(
        request: Request, parts: PartsOf, scope: ProjectScope, body: SetTaskQueueConfig
    ) -> None:
        _write(request, parts, scope, queue, body)

    return write


def _add(
    base: str, queue: str, operation: str, read: Callable[..., Any], write: Callable[..., Any]
) -> None:
    """Add the addresses of one queue, each with the schema of its own config."""
    router.add_api_route(
        f"{base}/{queue}/config",
        read,
        methods=["GET"],
        summary=f"Show the config of {queue}, as it was stored.",
        operation_id=f"get_{operation}",
        response_model=TaskQueueConfig,
        openapi_extra={**needs(Role.READ), "x-config": config_schema_name(queue)},
    )
    router.add_api_route(
        f"{base}/{queue}/config",
        write,
        methods=["POST"],
        summary=f"Replace the config of {queue}.",
        operation_id=f"set_{operation}",
        status_code=204,
        response_class=Response,
        openapi_extra={**needs(Role.ADMIN), "requestBody": config_body(queue)},
    )


for _queue in QUEUES.values():
    if _queue.of_project:
        _add(
            _OF_PROJECT,
            _queue.name,
            f"project_task_queue_config_{_queue.name}",
            _reading_project(_queue.name),
            _writing_project(_queue.name),
        )
    else:
        _add(
            _OF_WAREHOUSE,
            _queue.name,
            f"task_queue_config_{_queue.name}",
            _reading(_queue.name),
            _writing(_queue.name),
        )


# Names that are no queue's: nothing was ever stored, and nothing can be.


@router.get(
    f"{_OF_WAREHOUSE}/{{queue_name}}/config",
    include_in_schema=False,
    openapi_extra=needs(Role.READ),
)
def read_other(queue_name: str, parts: PartsOf, scope: WarehouseScope) -> TaskQueueConfig:
    return _read(parts, scope, queue_name)


@router.post(
    f"{_OF_WAREHOUSE}/{{queue_name}}/config",
    include_in_schema=False,
    status_code=204,
    response_class=Response,
    openapi_extra=needs(Role.ADMIN),
)
def write_other(
    request: Request,
    queue_name: str,
    parts: PartsOf,
    scope: WarehouseScope,
    body: SetTaskQueueConfig,
) -> None:
    _write(request, parts, scope, queue_name, body)


@router.get(
    f"{_OF_PROJECT}/{{queue_name}}/config", include_in_schema=False, openapi_extra=needs(Role.READ)
)
def read_other_of_project(queue_name: str, parts: PartsOf, scope: ProjectScope) -> TaskQueueConfig:
    return _read(parts, scope, queue_name)


@router.post(
    f"{_OF_PROJECT}/{{queue_name}}/config",
    include_in_schema=False,
    status_code=204,
    response_class=Response,
    openapi_extra=needs(Role.ADMIN),
)
def write_other_of_project(
    request: Request, queue_name: str, parts: PartsOf, scope: ProjectScope, body: SetTaskQueueConfig
) -> None:
    _write(request, parts, scope, queue_name, body)


@router.get(
    f"{_OF_WAREHOUSE}/{{queue_name}}/effective-config",
    summary="Show what applies to one table, and from where.",
    operation_id="get_effective_config",
    response_model=EffectiveConfig,
    openapi_extra=needs(Role.READ),
)
def read_effective(
    queue_name: str,
    parts: PartsOf,
    scope: WarehouseScope,
    table: Annotated[UUID, Query(description="The table's id.")],
) -> EffectiveConfig:
    kind = queue_kind(queue_name, code=404)
    if kind.of_project:
        raise bad_request(
            "UnsupportedEntityType", f"{queue_name} is a queue of the project and concerns no table"
        )
    assert scope.warehouse_id is not None
    found = parts.warehouses.table(scope.warehouse_id, None, table)
    stored = parts.configs.get(scope, queue_name).config
    reason = exclusion(queue_name, found.properties, stored, found.type) or trouble(
        queue_name, found.properties, stored
    )
    ref = ref_of(found.entity)
    assert ref is not None
    return EffectiveConfig(
        queue_name=queue_name,
        entity=ref,
        entity_name=list(found.name),
        enabled=reason is None,
        excluded=None if reason is None else Exclusion(type=reason.name, message=reason.message),
        settings={
            key: EffectiveSetting.of(applied)
            for key, applied in effective(queue_name, found.properties, stored).items()
        },
    )
