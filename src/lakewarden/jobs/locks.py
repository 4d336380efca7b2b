"""In which order rows are locked: a warehouse, its tables, tasks, slots; several of a kind by their key.

Whoever keeps to it never waits for somebody who waits for them.  Tables stand before tasks, so whoever
ends a task and changes its table changes the table first.  `pick` waits for no task: it takes those that
nobody has.  SQLite has one writer at a time, and locks nothing here.
"""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

import sqlalchemy as sa

from lakewarden.jobs.schema import ENTITY, SLOT, WAREHOUSE
from lakewarden.jobs.transitions import CHUNK, Row


def keep_warehouse(connection: sa.Connection, warehouse_id: UUID | None) -> None:
    """Let nobody forget a warehouse until this transaction ends."""
    _warehouse(connection, warehouse_id, read=True)


def have_warehouse(connection: sa.Connection, warehouse_id: UUID) -> bool:
    """Do the same, be the only one who does this, and tell whether the warehouse is there."""
    return _warehouse(connection, warehouse_id, read=False)


def _warehouse(connection: sa.Connection, warehouse_id: UUID | None, *, read: bool) -> bool:
    mine = sa.select(WAREHOUSE.c.id).where(WAREHOUSE.c.id == warehouse_id)
    return connection.scalar(mine.with_for_update(read=read, key_share=True)) is not None


def lock_tables(
    connection: sa.Connection, warehouse_id: UUID | None, ids: Collection[UUID]
) -> list[Row]:
    """Return these tables of a warehouse, which nobody else changes until this transaction ends."""
    found: list[Row] = []
    ordered = sorted(ids)
    for first in range(0, len(ordered), CHUNK):
        chosen = ENTITY.c.id.in_(ordered[first : first + CHUNK])
        found += connection.execute(_tables(warehouse_id).where(chosen))
    return found


def lock_all_tables(connection: sa.Connection, warehouse_id: UUID) -> list[Row]:
    """Do the same with all that a warehouse has now."""
    return list(connection.execute(_tables(warehouse_id).where(ENTITY.c.active)))


def _tables(warehouse_id: UUID | None) -> sa.Select[tuple[object, ...]]:
    mine = sa.select(ENTITY).where(ENTITY.c.warehouse_id == warehouse_id)
    return mine.order_by(ENTITY.c.id).with_for_update(key_share=True)


def lock_slots(connection: sa.Connection, slots: Collection[str]) -> None:
    """Let nobody else change what is known of these slots; those that are not there yet are nobody's."""
    if connection.dialect.name != "postgresql":
        return
    ordered = sorted(slots)
    for first in range(0, len(ordered), CHUNK):
        chosen = sa.select(SLOT.c.slot).where(SLOT.c.slot.in_(ordered[first : first + CHUNK]))
        # As Python sorts, whatever the database's language is.
        connection.execute(chosen.order_by(sa.collate(SLOT.c.slot, "C")).with_for_update())
