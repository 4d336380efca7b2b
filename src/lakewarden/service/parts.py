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
from lakewarden.service.aside import Aside, OneForAll
from lakewarden.service.settings import ServiceSettings
from lakewarden.world import Chance, Clock, SystemChance

#: Threads that may wait for a database that says nothing, to tell how it is.
_ASKED_AT_ONCE = 8


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
    #: For looks at warehouses, whose storage or catalog may stay silent.
    looking: Aside
    #: For asking the database how it is, whatever else goes on.
    asking: OneForAll

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

    def ask() -> None:
        with database.reading() as connection:
            connection.execute(sa.select(1))

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
        Aside(settings.looks_max, settings.look_seconds),
        OneForAll(Aside(_ASKED_AT_ONCE, settings.health_seconds), ask),
    )


# Not in a thread: those may all be taken.
async def _parts(request: Request) -> Parts:
    parts = request.app.state.parts
    assert isinstance(parts, Parts)
    return parts


PartsOf = Annotated[Parts, Depends(_parts)]
