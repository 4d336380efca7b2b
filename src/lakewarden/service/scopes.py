"""Whose tasks a request is about.  Ids are checked here; none reaches a store."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Depends, Header, Path

from lakewarden.jobs.refusals import not_found
from lakewarden.jobs.tasks import DEFAULT_PROJECT, Scope
from lakewarden.service.parts import PartsOf


def warehouse_scope(parts: PartsOf, warehouse_id: Annotated[UUID, Path()]) -> Scope:
    """Return the scope of a warehouse that there is."""
    return Scope(parts.warehouses.get(warehouse_id).project_id, warehouse_id)


def _project_scope(
    project: Annotated[
        UUID | None,
        Header(alias="x-project-id", description="The project; there is one, the default."),
    ] = None,
) -> Scope:
    """Return the scope of the project."""
    if project not in {None, DEFAULT_PROJECT}:
        raise not_found(
            "ProjectNotFound",
            f"there is no project {project}; leave the header x-project-id out for the default one",
        )
    return Scope()


WarehouseScope = Annotated[Scope, Depends(warehouse_scope)]
ProjectScope = Annotated[Scope, Depends(_project_scope)]
