"""The service about itself: what it can do, how it is, what was done, numbers."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

import lakewarden
from lakewarden.errors import StorageError
from lakewarden.jobs.queues import QUEUES
from lakewarden.jobs.tasks import DEFAULT_PROJECT
from lakewarden.jobs.tokens import Role
from lakewarden.service.aside import Full
from lakewarden.service.gate import MANAGEMENT, OPEN, ROLE, GuardedRoute, needs
from lakewarden.service.metrics import CONTENT_TYPE
from lakewarden.service.parts import Parts, PartsOf
from lakewarden.service.warehouses import PageSize, PageToken, page_size
from lakewarden.service.wire import AuditList, AuditRow, Health, ServerInfo

log = logging.getLogger(__name__)

router = APIRouter(prefix=MANAGEMENT, route_class=GuardedRoute, tags=["service"])
#: Outside of /management/v1.
outside = APIRouter(route_class=GuardedRoute, tags=["service"])


@router.get(
    "/info",
    summary="Show the version and the queues.",
    operation_id="get_server_info",
    response_model=ServerInfo,
    openapi_extra=needs(Role.READ),
)
def show_info() -> ServerInfo:
    return ServerInfo(
        version=lakewarden.__version__,
        default_project_id=str(DEFAULT_PROJECT),
        queues=sorted(QUEUES),
    )


@router.get(
    "/audit",
    summary="Show who changed what, newest first.",
    operation_id="list_audit",
    response_model=AuditList,
    openapi_extra=needs(Role.ADMIN),
)
def list_audit(parts: PartsOf, token: PageToken = None, size: PageSize = None) -> AuditList:
    page = parts.audit.page(token=token, size=page_size(size))
    rows = [AuditRow.of(one) for one in page.entries]
    return AuditList(entries=rows, next_page_token=page.next_token)


@outside.get(
    "/health",
    summary="Tell whether requests can be met.",
    operation_id="get_health",
    response_model=Health,
    responses={503: {"model": Health, "description": "The database does not answer."}},
    openapi_extra={ROLE: OPEN},
)
async def show_health(parts: PartsOf) -> Response:
    # Told without any of the threads that answer requests: also when all of them wait.
    problem = await _problem_of(parts)
    if problem is not None:
        log.warning("%s", problem, extra={"action": "health"})
        return JSONResponse(
            {"health": "unhealthy", "services": {"database": "unhealthy"}}, status_code=503
        )
    return JSONResponse({"health": "healthy", "services": {"database": "healthy"}})


async def _problem_of(parts: Parts) -> str | None:
    try:
        await parts.asking.ask()
    except StorageError as error:
        return error.message
    except Full:
        return "the database was asked how it is, again and again, and has not answered yet"
    except TimeoutError:
        return f"the database has not answered for {parts.asking.seconds:g} seconds"
    return None


@outside.get(
    "/metrics",
    summary="Show numbers for Prometheus.",
    operation_id="get_metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    openapi_extra=needs(Role.READ),
)
def show_metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE)
