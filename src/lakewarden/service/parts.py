"""What the routes work with, opened once for each process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Depends, Request

from lakewarden.jobs.commits import Commits
from lakewarden.jobs.config_store import ConfigStore
from lakewarden.jobs.control import TaskControl
from lakewarden.jobs.database import Database, open_database
from lakewarden.jobs.discovery import Discovery
from lakewarden.jobs.listing import TaskLists
from lakewarden.jobs.log_cleanup import LogCleanup
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.tasks import Scope
from lakewarden.jobs.tokens import Audit, Tokens
from lakewarden.jobs.warehouses import Warehouses
from lakewarden.service.settings import ServiceSettings
from lakewarden.world import Chance, Clock, SystemChance


@dataclass(frozen=True, slots=True)
class Parts:
    """The database, and everything that reads and writes it."""

    settings: ServiceSettings
    database: Database
    queue: TaskQueue
    lists: TaskLists
    control: TaskControl
    configs: ConfigStore
    warehouses: Warehouses
    tokens: Tokens
    audit: Audit

    @property
    def discovery(self) -> Discovery:
        return Discovery(self.warehouses, self.commits)

    @property
    def commits(self) -> Commits:
        return Commits(self.queue)

    def note(
        self,
        request: Request,
        action: str,
        scope: Scope | None = None,
        context: Mapping[str, Any] | None = None,
        *,
        joined: sa.Connection | None = None,
    ) -> None:
        """Write down who did what, in the transaction that does it; `context` holds no credential."""
        self.audit.record(request.state.caller.name, action, scope, context, joined=joined)


def open_parts(
    settings: ServiceSettings, *, clock: Clock | None = None, chance: Chance | None = None
) -> Parts:
    """Open the database, which must be up to date."""
    database = open_database(settings.database_url, clock=clock)
    chance = chance or SystemChance()
    queue = TaskQueue(database, chance)
    LogCleanup(queue).ensure()
    return Parts(
        settings,
        database,
        queue,
        TaskLists(database),
        TaskControl(database),
        ConfigStore(database),
        Warehouses(database, chance),
        Tokens(database, chance),
        Audit(database, chance),
    )


def _parts(request: Request) -> Parts:
    parts = request.app.state.parts
    assert isinstance(parts, Parts)
    return parts


PartsOf = Annotated[Parts, Depends(_parts)]
