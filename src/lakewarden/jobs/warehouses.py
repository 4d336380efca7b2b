"""The warehouses that are looked after, and the tables found in them.

How to reach a warehouse's storage or catalog (`Access`) may hold credentials.  It is written once and
read by workers only; nothing that lists warehouses selects it, and its text shows names, no values.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from lakewarden.errors import ErrorKind
from lakewarden.jobs.database import Database
from lakewarden.jobs.locks import have_warehouse, keep_warehouse, lock_tables
from lakewarden.jobs.refusals import RequestRefused, not_found
from lakewarden.jobs.schema import ENTITY, SLOT, TASK, TASK_CONFIG, WAREHOUSE
from lakewarden.jobs.tasks import DEFAULT_PROJECT, Entity, EntityType, Scope
from lakewarden.jobs.transitions import CHUNK, Row, upsert
from lakewarden.storage.location import Location
from lakewarden.world import Chance, ordered_id

_LOG = logging.getLogger("lakewarden.jobs")
#: What whoever finds a table says about it, whatever was known.
_TOLD = ("type", "target", "active")
_MISSING = {
    EntityType.TABLE: "NoSuchTableException",
    EntityType.VIEW: "NoSuchViewException",
    EntityType.GENERIC_TABLE: "NoSuchGenericTableException",
}


#: Shorter values stand in too many words that are no secrets.
_SECRET_LENGTH_MIN = 4
#: What is given to reach a warehouse, and tells nobody anything.
_NO_SECRETS = frozenset({"true", "false", "rest", "hive", "glue", "in-memory"})


class WarehouseKind(StrEnum):
    """Where the tables of a warehouse are found."""

    #: One of ours: its log knows them.
    LAKEWARDEN = "lakewarden"
    #: A PyIceberg catalog: `location` is its name.
    ICEBERG = "iceberg"
    #: A directory of Lance tables.
    LANCE = "lance"


@dataclass(frozen=True, slots=True)
class Access:
    """Storage options and catalog properties, credentials among them."""

    storage_options: Mapping[str, str] = field(default_factory=dict)
    catalog_properties: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        names = sorted({*self.storage_options, *self.catalog_properties})
        return f"Access({', '.join(f'{name}=…' for name in names)})"

    def hide(self, text: str) -> str:
        """Take everything out of a text that was given for reaching a warehouse, but the place itself."""
        catalog = {v for name, v in self.catalog_properties.items() if name != "warehouse"}
        for value in sorted({*self.storage_options.values(), *catalog}, key=len, reverse=True):
            if len(value) >= _SECRET_LENGTH_MIN and value not in _NO_SECRETS:
                text = text.replace(value, "…")
        return text


@dataclass(frozen=True, slots=True)
class WarehouseInfo:
    """A warehouse, without what is needed to reach it."""

    id: UUID
    project_id: UUID
    name: str
    kind: WarehouseKind
    location: str
    created_at: datetime


def _key(name: tuple[str, ...]) -> str:
    """Return a name in one piece: by this tables are told apart, and ordered."""
    return json.dumps(name, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table as somebody who looked found it."""

    name: tuple[str, ...]
    type: EntityType
    #: What the maintenance commands take: a URI, or iceberg://CATALOG/NAMESPACE.TABLE.
    target: str
    #: What it says itself; None if nobody has asked it.
    properties: Mapping[str, str] | None = None

    @property
    def key(self) -> str:
        return _key(self.name)

    @property
    def key_hash(self) -> bytes:
        return hashlib.sha256(self.key.encode()).digest()


@dataclass(frozen=True, slots=True)
class TableEntity:
    """A table that is known."""

    id: UUID
    warehouse_id: UUID
    type: EntityType
    name: tuple[str, ...]
    target: str
    properties: Mapping[str, str]
    #: Which commit was seen last.
    marker: str | None
    changed_at: datetime | None
    created_at: datetime
    active: bool

    @property
    def entity(self) -> Entity:
        return Entity(self.type, self.id, self.name)

    @property
    def key(self) -> str:
        return _key(self.name)


@dataclass(frozen=True, slots=True)
class Warehouses:
    """The warehouses of one database."""

    database: Database
    chance: Chance

    def register(
        self,
        name: str,
        kind: WarehouseKind,
        location: str,
        *,
        access: Access | None = None,
        project_id: UUID = DEFAULT_PROJECT,
        joined: sa.Connection | None = None,
    ) -> WarehouseInfo:
        """Add a warehouse.  A name is used once in a project, and a place once at all."""
        secret = access or Access()
        with self.database.writing(joined) as connection:
            if connection.dialect.name == "postgresql":
                # Two that register at the same time would not see each other.
                connection.execute(sa.text("LOCK TABLE warehouse IN SHARE ROW EXCLUSIVE MODE"))
            now = self.database.moment(connection)
            info = WarehouseInfo(
                ordered_id(now, self.chance), project_id, name, kind, location, now
            )
            new = upsert(connection, WAREHOUSE).values(
                id=info.id,
                project_id=project_id,
                name=name,
                kind=kind,
                location=location,
                access={
                    "storage_options": dict(secret.storage_options),
                    "catalog_properties": dict(secret.catalog_properties),
                },
                created_at=now,
            )
            free = new.on_conflict_do_nothing(index_elements=["project_id", "name"])
            if connection.execute(free.returning(WAREHOUSE.c.id)).one_or_none() is None:
                raise RequestRefused(
                    ErrorKind.ALREADY_EXISTS,
                    "WarehouseAlreadyExists",
                    409,
                    "there is a warehouse of this name already; choose another, or delete it first",
                )
            _refuse_taken(connection, info)
        return info

    def all(self, project_id: UUID = DEFAULT_PROJECT) -> list[WarehouseInfo]:
        """Return the warehouses of a project, by name."""
        mine = _infos().where(WAREHOUSE.c.project_id == project_id)
        with self.database.reading() as connection:
            return [_info(row) for row in connection.execute(mine.order_by(WAREHOUSE.c.name))]

    def get(self, warehouse_id: UUID) -> WarehouseInfo:
        with self.database.reading() as connection:
            row = connection.execute(_infos().where(WAREHOUSE.c.id == warehouse_id)).one_or_none()
        if row is None:
            raise not_found(
                "WarehouseNotFound", f"there is no warehouse {warehouse_id}; register it first"
            )
        return _info(row)

    def access(self, warehouse_id: UUID) -> Access:
        """Return how to reach a warehouse: for workers, never for answers or logs."""
        query = sa.select(WAREHOUSE.c.access).where(WAREHOUSE.c.id == warehouse_id)
        with self.database.reading() as connection:
            kept = connection.scalar(query)
        return Access() if kept is None else Access(**kept)

    def delete(self, warehouse_id: UUID, *, joined: sa.Connection | None = None) -> None:
        """Forget a warehouse and its tables, unless tasks are active.  No file is touched."""
        mine = TASK.c.warehouse_id == warehouse_id
        with self.database.writing(joined) as connection:
            # First, so that nobody queues a task in between: whoever does has the table's row locked,
            # which goes with the warehouse's, or finds none.
            gone = sa.delete(WAREHOUSE).where(WAREHOUSE.c.id == warehouse_id)
            project = connection.scalar(gone.returning(WAREHOUSE.c.project_id))
            active = connection.scalar(sa.select(sa.func.count()).where(mine)) or 0
            if active:
                raise RequestRefused(
                    ErrorKind.TASK_ACTIVE,
                    "WarehouseHasUnfinishedTasks",
                    409,
                    f"{active} tasks of the warehouse are active; cancel them first",
                )
            if project is None:
                raise not_found("WarehouseNotFound", f"there is no warehouse {warehouse_id}")
            connection.execute(sa.delete(TASK_CONFIG).where(TASK_CONFIG.c.scope_id == warehouse_id))
            # Nobody is there whom their numbers would keep out, and no warehouse gets this id again.
            slots = SLOT.c.slot.startswith(Scope(project, warehouse_id).slots)
            connection.execute(sa.delete(SLOT).where(slots))

    # -- tables ----------------------------------------------------------------------------------

    @property
    def _key(self) -> sa.ColumnElement[str]:
        """What tables are ordered by: in every database the order of characters, not a language's."""
        return ENTITY.c.key.collate("C") if self.database.is_postgres else ENTITY.c.key.expression

    def refresh(self, warehouse_id: UUID, found: Sequence[FoundTable]) -> list[TableEntity]:
        """Make known what tables a warehouse has now, and return them, by name.

        A table that is back has the id that it had.  One that is gone is kept, but not active: no task
        is made for it, and its tasks can still be read; its last commit is forgotten, so that it is
        looked at when it is back.  If nothing at all is found where tables were, that is a mount or an
        answer that is missing sooner than the end of all of them: nothing is changed then.

        What a table says itself is written only as long as no commit of it was seen: from then on it
        belongs to the last commit, and whoever found the table may have asked it before that.
        """
        listed = {one.key: one for one in found}
        with self.database.reading() as connection:
            query = sa.select(ENTITY).where(ENTITY.c.warehouse_id == warehouse_id)
            known = {row.key: row for row in connection.execute(query)}
        there = [entity(row) for _, row in sorted(known.items()) if row.active]
        if not listed and there:
            _LOG.warning(
                "no table of warehouse %s was found, and there were some; they stay known: check that "
                "its storage is there, or delete the warehouse",
                warehouse_id,
            )
            return there
        gone = [row.id for key, row in known.items() if row.active and key not in listed]
        # In one order, so that two that found the same do not wait for each other.
        news = [one for key, one in sorted(listed.items()) if _differs(known.get(key), one)]
        if not gone and not news:
            return there
        # Most of the time nothing is written; and never so much that others wait for long.
        for first in range(0, len(gone), CHUNK):
            self._deactivate(warehouse_id, gone[first : first + CHUNK])
        for asked in (True, False):
            some = [one for one in news if (one.properties is not None) == asked]
            for first in range(0, len(some), CHUNK):
                self._make_known(warehouse_id, some[first : first + CHUNK], asked=asked)
        return self.tables(warehouse_id)

    def _deactivate(self, warehouse_id: UUID, ids: Sequence[UUID]) -> None:
        away = sa.update(ENTITY).where(ENTITY.c.id.in_(ids)).values(active=False, marker=None)

        def write(connection: sa.Connection) -> None:
            keep_warehouse(connection, warehouse_id)
            lock_tables(connection, warehouse_id, ids)
            connection.execute(away)

        self.database.transact(write)

    def _make_known(self, warehouse_id: UUID, tables: Sequence[FoundTable], *, asked: bool) -> None:
        def write(connection: sa.Connection) -> None:
            if not have_warehouse(connection, warehouse_id):
                return
            known = sa.select(ENTITY.c.id).where(
                ENTITY.c.warehouse_id == warehouse_id,
                ENTITY.c.key_hash.in_([table.key_hash for table in tables]),
            )
            lock_tables(connection, warehouse_id, connection.scalars(known).all())
            now = self.database.moment(connection)
            rows = [
                {
                    "id": ordered_id(now, self.chance),
                    "warehouse_id": warehouse_id,
                    "name": list(table.name),
                    "key": table.key,
                    "key_hash": table.key_hash,
                    "created_at": now,
                    "type": table.type,
                    "target": table.target,
                    "properties": dict(table.properties or {}),
                    "active": True,
                }
                for table in tables
            ]
            new = upsert(connection, ENTITY).values(rows)
            told: dict[str, Any] = {name: new.excluded[name] for name in _TOLD}
            if asked:
                # Decided here, not by what was read before: a commit may have been seen since.
                told["properties"] = sa.case(
                    (ENTITY.c.marker.is_(None), new.excluded.properties),
                    else_=ENTITY.c.properties,
                )
            connection.execute(
                new.on_conflict_do_update(index_elements=["warehouse_id", "key_hash"], set_=told)
            )

        self.database.transact(write)

    def forget_commit(self, connection: sa.Connection, table_id: UUID) -> None:
        """Forget which commit was seen last, so that the table is looked at again if it is back."""
        connection.execute(sa.update(ENTITY).where(ENTITY.c.id == table_id).values(marker=None))

    def tables(self, warehouse_id: UUID) -> list[TableEntity]:
        """Return the tables that a warehouse has, by name."""
        query = sa.select(ENTITY).where(ENTITY.c.warehouse_id == warehouse_id, ENTITY.c.active)
        with self.database.reading() as connection:
            return [entity(row) for row in connection.execute(query.order_by(self._key))]

    def page(self, warehouse_id: UUID, after: str, size: int) -> tuple[list[TableEntity], bool]:
        """Return the tables that come after a key, so many of them, and whether there are more.

        Tables that come or go meanwhile neither repeat others nor hide them.
        """
        query = (
            sa.select(ENTITY)
            .where(ENTITY.c.warehouse_id == warehouse_id, ENTITY.c.active, self._key > after)
            .order_by(self._key)
            .limit(size + 1)
        )
        with self.database.reading() as connection:
            found = [entity(row) for row in connection.execute(query)]
        return found[:size], len(found) > size

    def table(
        self,
        warehouse_id: UUID,
        kind: EntityType | None,
        entity_id: UUID,
        *,
        joined: sa.Connection | None = None,
    ) -> TableEntity:
        """Return a table that is there, or raise 404 under the name for its kind.

        Without a kind it may be of any.  Within a transaction that is `joined`, it stays there until that ends.
        """
        query = sa.select(ENTITY).where(
            ENTITY.c.warehouse_id == warehouse_id,
            ENTITY.c.id == entity_id,
            ENTITY.c.active,
        )
        if kind is not None:
            query = query.where(ENTITY.c.type == kind)
        if joined is not None:
            row = joined.execute(query.with_for_update(read=True, key_share=True)).one_or_none()
        else:
            with self.database.reading() as connection:
                row = connection.execute(query).one_or_none()
        if row is None:
            wanted = kind or EntityType.TABLE
            raise not_found(
                _MISSING[wanted],
                f"there is no {wanted} {entity_id} in this warehouse, or not any more",
            )
        return entity(row)


def _refuse_taken(connection: sa.Connection, info: WarehouseInfo) -> None:
    """Refuse a place that is, holds or lies in that of another warehouse.

    Tables of both would have two tasks at a time, by two configs.  Names of catalogs are no places.
    """
    if info.kind is WarehouseKind.ICEBERG:
        return
    own = Location.parse(info.location)
    query = _infos().where(WAREHOUSE.c.kind != WarehouseKind.ICEBERG, WAREHOUSE.c.id != info.id)
    for other in [_info(row) for row in connection.execute(query.order_by(WAREHOUSE.c.name))]:
        place, mine = _comparable(Location.parse(other.location), own)
        if place == mine or place.contains(mine) or mine.contains(place):
            where = "at this place" if place == mine else "above or below this place"
            raise RequestRefused(
                ErrorKind.ALREADY_EXISTS,
                "WarehouseLocationTaken",
                409,
                f"there is a warehouse {where} already, {other.name!r}; each table may belong to one "
                "only: choose another place, or delete that warehouse first",
            )


def _comparable(one: Location, other: Location) -> tuple[Location, Location]:
    """Return places of Azure without their accounts if one of them does not say which it is in."""
    both = "@" in one.authority and "@" in other.authority
    if {one.scheme, other.scheme} != {"az"} or both:
        return one, other
    first, second = (
        replace(place, authority=place.authority.partition("@")[0]) for place in (one, other)
    )
    return first, second


def _differs(row: Row | None, table: FoundTable) -> bool:
    if row is None:
        return True
    if (row.type, row.target, row.active) != (table.type, table.target, True):
        return True
    asked = table.properties is not None and row.marker is None
    return asked and row.properties != dict(table.properties or {})


def entity(row: Row) -> TableEntity:
    return TableEntity(
        id=row.id,
        warehouse_id=row.warehouse_id,
        type=EntityType(row.type),
        name=tuple(row.name),
        target=row.target,
        properties=row.properties,
        marker=row.marker,
        changed_at=row.changed_at,
        created_at=row.created_at,
        active=row.active,
    )


def _infos() -> sa.Select[Any]:
    return sa.select(*(column for column in WAREHOUSE.c if column.name != "access"))


def _info(row: Row) -> WarehouseInfo:
    return WarehouseInfo(
        row.id, row.project_id, row.name, WarehouseKind(row.kind), row.location, row.created_at
    )
