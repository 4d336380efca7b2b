"""The stored configs of queues: returned as they were given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from lakewarden.errors import ErrorKind
from lakewarden.jobs.config import parse_config
from lakewarden.jobs.database import Database
from lakewarden.jobs.queues import queue_kind
from lakewarden.jobs.refusals import bad_request
from lakewarden.jobs.schema import TASK_CONFIG
from lakewarden.jobs.tasks import Scope
from lakewarden.jobs.transitions import upsert

#: A year: whoever is not heard of for longer is lost.
HEARTBEAT_SECONDS_MAX = 366 * 86_400


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """What was set for a queue; empty if nothing was."""

    config: Mapping[str, Any] = field(default_factory=dict)
    max_seconds_since_last_heartbeat: int | None = None


@dataclass(frozen=True, slots=True)
class ConfigStore:
    """Configs of warehouses, and of projects for queues of projects."""

    database: Database

    def get(self, scope: Scope, queue: str) -> StoredConfig:
        """Return what was stored; any name may be asked for, also one that is no queue."""
        with self.database.reading() as connection:
            return read_config(connection, scope, queue)

    def set(
        self,
        connection: sa.Connection,
        scope: Scope,
        queue: str,
        config: object,
        max_seconds_since_last_heartbeat: int | None = None,
    ) -> bool:
        """Replace a config as a whole, and tell whether it is another than before.

        Without a heartbeat time the one that was set stays.  Tasks see it when they are picked; one that
        runs does not.
        """
        kind = queue_kind(queue)
        if kind.of_project != (scope.warehouse_id is None):
            whose = "project" if kind.of_project else "warehouse"
            raise bad_request(
                "QueueNotFound",
                f"{queue} is a queue of the {whose}; set its config there",
                ErrorKind.QUEUE_UNKNOWN,
            )
        kept = parse_config(queue, config)
        seconds = max_seconds_since_last_heartbeat
        if seconds is not None and not 1 <= seconds <= HEARTBEAT_SECONDS_MAX:
            raise bad_request(
                "InvalidQueueConfig",
                f"max-seconds-since-last-heartbeat must be from 1 to {HEARTBEAT_SECONDS_MAX}",
                ErrorKind.QUEUE_CONFIG,
            )
        before = read_config(connection, scope, queue)
        if (kept, seconds or before.max_seconds_since_last_heartbeat) == (
            before.config,
            before.max_seconds_since_last_heartbeat,
        ):
            return False
        told = {"config": kept, "updated_at": self.database.moment(connection)}
        if seconds is not None:
            told["max_seconds_since_last_heartbeat"] = seconds
        new = upsert(connection, TASK_CONFIG).values(
            scope_id=scope.config_id, queue_name=queue, **told
        )
        connection.execute(
            new.on_conflict_do_update(index_elements=["scope_id", "queue_name"], set_=told)
        )
        return True


def read_config(connection: sa.Connection, scope: Scope, queue: str) -> StoredConfig:
    return read_configs(connection, scope).get(queue, StoredConfig())


def read_configs(connection: sa.Connection, scope: Scope) -> dict[str, StoredConfig]:
    """Return what was stored for each queue of a scope."""
    query = sa.select(TASK_CONFIG).where(TASK_CONFIG.c.scope_id == scope.config_id)
    return {
        row.queue_name: StoredConfig(row.config, row.max_seconds_since_last_heartbeat)
        for row in connection.execute(query)
    }
