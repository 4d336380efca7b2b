"""Warehouses that are looked after, and their tables.  How to reach one goes in and never comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from lakewarden.errors import ErrorKind
from lakewarden.expiry import ENCRYPTION_KEY, GC_ENABLED
from lakewarden.jobs.config import SETTINGS
from lakewarden.jobs.discovery import NewPlace, check_place, discover
from lakewarden.jobs.listing import PAGE_SIZE, PAGE_SIZE_MAX
from lakewarden.jobs.paging import page_token, read_page_token
from lakewarden.jobs.refusals import RequestRefused, bad_request
from lakewarden.jobs.tasks import Scope
from lakewarden.jobs.tokens import Role
from lakewarden.jobs.warehouses import FoundTable
from lakewarden.service.aside import Full
from lakewarden.service.gate import MANAGEMENT, GuardedRoute, needs
from lakewarden.service.parts import Parts, PartsOf
from lakewarden.service.scopes import ProjectScope, WarehouseScope
from lakewarden.service.wire import (
    RefreshedTables,
    RegisteredWarehouse,
    RegisterWarehouse,
    Table,
    TableList,
    Warehouse,
    WarehouseList,
)

router = APIRouter(prefix=MANAGEMENT, route_class=GuardedRoute, tags=["warehouses"])

#: Properties that decide about maintenance; a table may have others that are nobody's business.
_SHOWN = frozenset(
    {GC_ENABLED, ENCRYPTION_KEY}
    | {name for queue in SETTINGS.values() for one in queue for name in one.properties}
)

#: Long enough for the longest name of a table, whatever its characters.
PageToken = Annotated[str | None, Query(alias="page-token", max_length=8192)]
PageSize = Annotated[int | None, Query(alias="page-size", ge=-(2**63), lt=2**63)]


def page_size(given: int | None) -> int:
    return PAGE_SIZE if given is None else min(max(given, 1), PAGE_SIZE_MAX)


@router.post(
    "/warehouse",
    summary="Register a warehouse, and find its tables.",
    operation_id="create_warehouse",
    status_code=201,
    response_model=RegisteredWarehouse,
    openapi_extra=needs(Role.ADMIN),
)
async def register(
    request: Request, parts: PartsOf, scope: ProjectScope, body: RegisterWarehouse
) -> RegisteredWarehouse:
    place = check_place(body.kind, body.location, body.access)
    # First: what cannot be read is not registered.
    found = await _look(parts, partial(discover, place, body.access))
    return await run_in_threadpool(_register, request, parts, scope, body, place, found)


def _register(
    request: Request,
    parts: Parts,
    scope: Scope,
    body: RegisterWarehouse,
    place: NewPlace,
    found: Sequence[FoundTable],
) -> RegisteredWarehouse:
    with parts.database.writing() as connection:
        made = parts.warehouses.register(
            body.warehouse_name,
            place.kind,
            place.location,
            access=body.access,
            project_id=scope.project_id,
            joined=connection,
        )
        context = {"name": made.name, "kind": made.kind.value, "location": place.location}
        whose = Scope(scope.project_id, made.id)
        parts.note(request, "register_warehouse", whose, context, joined=connection)
    # If this comes to nothing, whoever looks for changes finds the tables.
    parts.warehouses.refresh(made.id, found)
    return RegisteredWarehouse(warehouse_id=made.id, tables=len(found))


async def _look(parts: Parts, look: Callable[[], list[FoundTable]]) -> list[FoundTable]:
    """Look at a warehouse beside everything else: whoever is asked there may stay silent."""
    try:
        return await parts.looking.run(look)
    except Full:
        raise RequestRefused(
            ErrorKind.STORAGE,
            "ServiceUnavailable",
            503,
            f"{parts.settings.looks_max} warehouses are being looked at, and this service looks at no "
            "more of them at once; nothing was done: try again in a while",
        ) from None
    except TimeoutError:
        raise bad_request(
            "WarehouseNotReadable",
            f"the warehouse cannot be read: looking at it took longer than {parts.looking.seconds:g} "
            "seconds; nothing was done: check that its storage and its catalog answer",
            ErrorKind.STORAGE,
        ) from None


@router.get(
    "/warehouse",
    summary="List the warehouses.",
    operation_id="list_warehouses",
    response_model=WarehouseList,
    openapi_extra=needs(Role.READ),
)
def list_warehouses(parts: PartsOf, scope: ProjectScope) -> WarehouseList:
    found = parts.warehouses.all(scope.project_id)
    return WarehouseList(warehouses=[Warehouse.of(one) for one in found])


@router.get(
    "/warehouse/{warehouse_id}",
    summary="Show a warehouse.",
    operation_id="get_warehouse",
    response_model=Warehouse,
    openapi_extra=needs(Role.READ),
)
def show_warehouse(parts: PartsOf, warehouse_id: UUID) -> Warehouse:
    return Warehouse.of(parts.warehouses.get(warehouse_id))


@router.delete(
    "/warehouse/{warehouse_id}",
    summary="Forget a warehouse; no file is touched.",
    operation_id="delete_warehouse",
    status_code=204,
    response_class=Response,
    openapi_extra=needs(Role.ADMIN),
)
def forget_warehouse(request: Request, parts: PartsOf, scope: WarehouseScope) -> None:
    assert scope.warehouse_id is not None
    with parts.database.writing() as connection:
        parts.warehouses.delete(scope.warehouse_id, joined=connection)
        parts.note(request, "delete_warehouse", scope, joined=connection)


@router.get(
    "/warehouse/{warehouse_id}/tables",
    summary="List the tables of a warehouse, by name.",
    operation_id="list_tables",
    response_model=TableList,
    openapi_extra=needs(Role.READ),
)
def list_tables(
    parts: PartsOf, scope: WarehouseScope, token: PageToken = None, size: PageSize = None
) -> TableList:
    assert scope.warehouse_id is not None
    after = read_page_token(token) if token else ""
    page, more = parts.warehouses.page(scope.warehouse_id, after, page_size(size))
    return TableList(
        tables=[
            Table.of(one, {name: v for name, v in one.properties.items() if name in _SHOWN})
            for one in page
        ],
        next_page_token=page_token(page[-1].key) if more else None,
    )


@router.post(
    "/warehouse/{warehouse_id}/tables/refresh",
    summary="Look which tables a warehouse has now.",
    operation_id="refresh_tables",
    response_model=RefreshedTables,
    openapi_extra=needs(Role.OPERATE),
)
async def refresh_tables(
    request: Request, parts: PartsOf, scope: WarehouseScope
) -> RefreshedTables:
    assert scope.warehouse_id is not None
    found = await _look(parts, partial(parts.discovery.find, scope.warehouse_id))
    return await run_in_threadpool(_refresh, request, parts, scope, found)


def _refresh(
    request: Request, parts: Parts, scope: Scope, found: Sequence[FoundTable]
) -> RefreshedTables:
    assert scope.warehouse_id is not None
    before = {one.id for one in parts.warehouses.tables(scope.warehouse_id)}
    # First: there may be so many tables that they are made known in several transactions.
    parts.note(request, "refresh_tables", scope, {"tables_found": len(found)})
    after = {one.id for one in parts.warehouses.refresh(scope.warehouse_id, found)}
    return RefreshedTables(tables=len(after), added=len(after - before), gone=len(before - after))
