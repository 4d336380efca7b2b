"""The tables of the service's database, for SQLite and PostgreSQL.

`task` holds active tasks only, `task_log` one row for every attempt that is over.  `slot` outlives
tasks: it numbers the attempts at one (warehouse, entity, queue) and remembers what the last run saw.
The migrations make these tables; a test holds both together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: What stands where a NUL stood.
_NO_NUL = "\ufffd"


def to_micros(at: datetime) -> int:
    """Return an instant as microseconds since 1970."""
    return (at - _EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    return _EPOCH + micros * _MICROSECOND


class Moment(sa.types.TypeDecorator[datetime]):
    """An instant, to the microsecond: a timestamp with time zone, or a number where there is none."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(sa.DateTime(timezone=True))
        return dialect.type_descriptor(sa.BigInteger())

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> Any:
        if value is None or dialect.name == "postgresql":
            return value
        return to_micros(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        if dialect.name == "postgresql":
            found: datetime = value.astimezone(UTC)
            return found
        return from_micros(int(value))


class Word(sa.types.TypeDecorator[str]):
    """A member of an enumeration, by its value: drivers would choose between that and its name."""

    impl = sa.String(16)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else str(value)


class Words(sa.types.TypeDecorator[str]):
    """A text of others.  PostgreSQL has no place for NUL in it, and would take the row for a mistake."""

    impl = sa.String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else _without_nul(value)


class Document(sa.types.TypeDecorator[Any]):
    """JSON, without NUL in it either.  None is a NULL of the database, not the word null."""

    impl = sa.JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        kind = postgresql.JSONB if dialect.name == "postgresql" else sa.JSON
        return dialect.type_descriptor(kind(none_as_null=True))

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002
        return each_text(value, _without_nul)


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a document with every text in it changed, however deep, names of keys included."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {each_text(key, change): each_text(one, change) for key, one in value.items()}
        case list() | tuple():
            return [each_text(one, change) for one in value]
        case _:
            return value


def _without_nul(text: str) -> str:
    return text.replace("\0", _NO_NUL)


METADATA = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)


WAREHOUSE = sa.Table(
    "warehouse",
    METADATA,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("project_id", sa.Uuid, nullable=False),
    sa.Column("name", Words(255), nullable=False),
    sa.Column("kind", Word, nullable=False),
    sa.Column("location", Words(2048), nullable=False),
    # Storage options and catalog properties: read by workers only, never by what answers requests.
    sa.Column("access", Document, nullable=False),
    sa.Column("created_at", Moment, nullable=False),
    sa.UniqueConstraint("project_id", "name"),
)

ENTITY = sa.Table(
    "entity",
    METADATA,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column(
        "warehouse_id", sa.Uuid, sa.ForeignKey("warehouse.id", ondelete="CASCADE"), nullable=False
    ),
    sa.Column("type", Word, nullable=False),
    sa.Column("name", Document, nullable=False),
    # The name in one piece, and its SHA-256 for the unique key: no index bears names of any length.
    sa.Column("key", Words, nullable=False),
    sa.Column("key_hash", sa.LargeBinary(32), nullable=False),
    sa.Column("target", Words, nullable=False),
    sa.Column("properties", Document, nullable=False),
    # Which commit was seen last, in the words of whoever told of it.
    sa.Column("marker", Words),
    sa.Column("changed_at", Moment),
    sa.Column("created_at", Moment, nullable=False),
    sa.Column("active", sa.Boolean, nullable=False),
    sa.UniqueConstraint("warehouse_id", "key_hash"),
)


def _of_task() -> list[sa.Column[Any]]:
    """Return what active tasks and attempts that are over have in common."""
    return [
        sa.Column("project_id", sa.Uuid, nullable=False),
        sa.Column("warehouse_id", sa.Uuid),
        sa.Column("queue_name", Words(64), nullable=False),
        sa.Column("entity_type", Word, nullable=False),
        sa.Column("entity_id", sa.Uuid),
        sa.Column("entity_name", Document),
        sa.Column("slot", Words(256), nullable=False),
        sa.Column("status", Word, nullable=False),
        sa.Column("scheduled_for", Moment, nullable=False),
        sa.Column("picked_up_at", Moment),
        sa.Column("last_heartbeat_at", Moment),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("progress", sa.Double, nullable=False),
        sa.Column("execution_details", Document),
        sa.Column("task_data", Document, nullable=False),
        sa.Column("parent_task_id", sa.Uuid),
        sa.Column("origin", Word, nullable=False),
        sa.Column("reason", Words),
        # When the task was made; an attempt's own end is ended_at.
        sa.Column("created_at", Moment, nullable=False),
    ]


TASK = sa.Table(
    "task",
    METADATA,
    sa.Column("task_id", sa.Uuid, primary_key=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    *_of_task(),
    # When others may take it over, unless its worker is heard of.
    sa.Column("stale_at", Moment),
    sa.Column("updated_at", Moment),
    # Who said that its time stands: no commit brings it forward.
    sa.Column("fixed_by", Word),
    sa.UniqueConstraint("slot"),
    sa.Index(None, "queue_name", "scheduled_for", "task_id"),
    sa.Index(None, "warehouse_id", "created_at", "task_id"),
)

TASK_LOG = sa.Table(
    "task_log",
    METADATA,
    sa.Column("task_id", sa.Uuid, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    *_of_task(),
    sa.Column("ended_at", Moment, nullable=False),
    sa.Column("duration_seconds", sa.Double),
    sa.Column("message", Words),
    sa.Column("failure", Word),
    sa.Column("result", Document),
    # Whether the task ended with this attempt.
    sa.Column("final", sa.Boolean, nullable=False),
    sa.Index(None, "warehouse_id", "created_at", "task_id"),
    sa.Index(None, "project_id", "ended_at"),
    # What happened to one table.
    sa.Index(None, "slot", "ended_at"),
    # For the numbers, which are of all projects.
    sa.Index(None, "ended_at"),
)
# A task ends once: the database sees to it.
sa.Index(
    "uq_task_log_final",
    TASK_LOG.c.task_id,
    unique=True,
    sqlite_where=sa.text("final"),
    postgresql_where=sa.text("final"),
)

SLOT = sa.Table(
    "slot",
    METADATA,
    sa.Column("slot", Words(256), primary_key=True),
    sa.Column("fence", sa.BigInteger, nullable=False),
    # When the last run ended that looked at the table, and the last that did all its work: no dry run.
    sa.Column("ran_at", Moment),
    sa.Column("done_at", Moment),
    # When the last task failed, if none has succeeded since.
    sa.Column("failed_at", Moment),
)

TASK_CONFIG = sa.Table(
    "task_config",
    METADATA,
    # The warehouse, or the project for queues of projects.
    sa.Column("scope_id", sa.Uuid, primary_key=True),
    sa.Column("queue_name", Words(64), primary_key=True),
    sa.Column("config", Document, nullable=False),
    sa.Column("max_seconds_since_last_heartbeat", sa.BigInteger),
    sa.Column("updated_at", Moment, nullable=False),
)

# Nothing is ever removed from it.
AUDIT = sa.Table(
    "audit",
    METADATA,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("at", Moment, nullable=False),
    sa.Column("actor", Words(255), nullable=False),
    sa.Column("action", Words(64), nullable=False),
    sa.Column("project_id", sa.Uuid),
    sa.Column("warehouse_id", sa.Uuid),
    sa.Column("context", Document, nullable=False),
    sa.Index(None, "at", "id"),
)

TOKEN = sa.Table(
    "token",
    METADATA,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("name", Words(255), nullable=False, unique=True),
    sa.Column("role", Word, nullable=False),
    # SHA-256 of a secret with 256 bits of chance: there is nothing to guess.
    sa.Column("hash", sa.LargeBinary(32), nullable=False, unique=True),
    sa.Column("created_at", Moment, nullable=False),
    sa.Column("expires_at", Moment),
)
