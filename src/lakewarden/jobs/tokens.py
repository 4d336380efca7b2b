"""Who may do what: bearer tokens, of which only a hash is kept, and the record of what was done."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from lakewarden.errors import ErrorKind
from lakewarden.jobs.database import Database
from lakewarden.jobs.listing import PAGE_SIZE, page_token, read_token
from lakewarden.jobs.refusals import RequestRefused, not_found
from lakewarden.jobs.schema import AUDIT, TOKEN
from lakewarden.jobs.tasks import Scope
from lakewarden.jobs.transitions import upsert
from lakewarden.world import Chance, ordered_id

#: Says what it is to whoever finds one in a file, and to tools that look for secrets.
PREFIX = "lwt_"
_BITS = 256


class Role(StrEnum):
    """What the holder of a token may do; each may do what those before it may."""

    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"

    def may(self, needed: Role) -> bool:
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True)
class Principal:
    """Whom a token belongs to."""

    id: UUID
    name: str
    role: Role
    created_at: datetime
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who did what."""

    at: datetime
    actor: str
    action: str
    scope: Scope | None
    context: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Some of what was done, newest first; without a token there is no more."""

    entries: tuple[AuditEntry, ...]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one database."""

    database: Database
    chance: Chance

    def create(
        self,
        name: str,
        role: Role,
        *,
        expires_at: datetime | None = None,
        joined: sa.Connection | None = None,
    ) -> tuple[Principal, str]:
        """Make a token, and return it: it cannot be shown again."""
        secret = f"{PREFIX}{self.chance.below(2**_BITS):064x}"
        with self.database.writing(joined) as connection:
            now = self.database.moment(connection)
            made = Principal(ordered_id(now, self.chance), name, role, now, expires_at)
            new = upsert(connection, TOKEN).values(
                id=made.id,
                name=name,
                role=role,
                hash=_hash(secret),
                created_at=now,
                expires_at=expires_at,
            )
            free = new.on_conflict_do_nothing(index_elements=["name"])
            if connection.execute(free.returning(TOKEN.c.id)).one_or_none() is None:
                raise RequestRefused(
                    ErrorKind.ALREADY_EXISTS,
                    "TokenAlreadyExists",
                    409,
                    f"there is a token {name!r} already; revoke it first, or choose another name",
                )
        return made, secret

    def holder(self, secret: str) -> Principal | None:
        """Return whom a token belongs to; None if nobody has such a token, or not any more."""
        query = sa.select(TOKEN).where(TOKEN.c.hash == _hash(secret))
        with self.database.reading() as connection:
            row = connection.execute(query).one_or_none()
            now = self.database.moment(connection)
        if row is None or (row.expires_at is not None and row.expires_at <= now):
            return None
        return Principal(row.id, row.name, Role(row.role), row.created_at, row.expires_at)

    def all(self) -> list[Principal]:
        with self.database.reading() as connection:
            return [
                Principal(row.id, row.name, Role(row.role), row.created_at, row.expires_at)
                for row in connection.execute(sa.select(TOKEN).order_by(TOKEN.c.name))
            ]

    def revoke(self, name: str, *, joined: sa.Connection | None = None) -> None:
        with self.database.writing(joined) as connection:
            if not connection.execute(sa.delete(TOKEN).where(TOKEN.c.name == name)).rowcount:
                raise not_found("TokenNotFound", f"there is no token {name!r}")


@dataclass(frozen=True, slots=True)
class Audit:
    """The record of who changed what."""

    database: Database
    chance: Chance

    def record(
        self,
        actor: str,
        action: str,
        scope: Scope | None = None,
        context: Mapping[str, Any] | None = None,
        *,
        joined: sa.Connection | None = None,
    ) -> None:
        """Write down what was done, in the transaction that does it.

        What is passed as `context` must hold no credential.
        """
        with self.database.writing(joined) as connection:
            now = self.database.moment(connection)
            connection.execute(
                sa.insert(AUDIT).values(
                    id=ordered_id(now, self.chance),
                    at=now,
                    actor=actor,
                    action=action,
                    project_id=None if scope is None else scope.project_id,
                    warehouse_id=None if scope is None else scope.warehouse_id,
                    context=dict(context or {}),
                )
            )

    def page(self, *, token: str | None = None, size: int = PAGE_SIZE) -> AuditPage:
        """Return what was done last, newest first."""
        query = sa.select(AUDIT).order_by(AUDIT.c.at.desc(), AUDIT.c.id.desc()).limit(size + 1)
        if token:
            at, number = read_token(token)
            query = query.where(
                sa.or_(AUDIT.c.at < at, sa.and_(AUDIT.c.at == at, AUDIT.c.id < number))
            )
        with self.database.reading() as connection:
            rows = connection.execute(query).all()
        entries = tuple(
            AuditEntry(
                row.at,
                row.actor,
                row.action,
                None if row.project_id is None else Scope(row.project_id, row.warehouse_id),
                row.context,
            )
            for row in rows[:size]
        )
        last = rows[size - 1] if len(rows) > size else None
        return AuditPage(entries, None if last is None else page_token(last.at, last.id))


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
