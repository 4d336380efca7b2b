"""Names of any length; who said when a task runs; when a table was last done, and what happened to it."""

from __future__ import annotations

import hashlib
from typing import Any

import sqlalchemy as sa
from alembic import op

from lakewarden.jobs.schema import Moment

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("task", sa.Column("fixed_by", sa.String(length=16), nullable=True))
    op.execute("UPDATE task SET fixed_by = 'person' WHERE fixed")
    op.drop_column("task", "fixed")
    op.add_column("slot", sa.Column("done_at", Moment(), nullable=True))
    op.execute("UPDATE slot SET done_at = ran_at")
    op.drop_column("slot", "rate")
    op.drop_column("task_log", "rate")
    op.create_index("ix_task_log_slot_ended_at", "task_log", ["slot", "ended_at"])
    with op.batch_alter_table("entity") as table:
        table.add_column(sa.Column("key_hash", sa.LargeBinary(length=32), nullable=True))
        table.alter_column("key", type_=sa.Text(), existing_nullable=False)
        table.alter_column("target", type_=sa.Text(), existing_nullable=False)
        table.alter_column("marker", type_=sa.Text(), existing_nullable=True)
    _fill_hashes()
    with op.batch_alter_table("entity") as table:
        table.alter_column("key_hash", existing_type=sa.LargeBinary(length=32), nullable=False)
        table.drop_constraint("uq_entity_warehouse_id_key", type_="unique")
        table.create_unique_constraint(
            "uq_entity_warehouse_id_key_hash", ["warehouse_id", "key_hash"]
        )


def _fill_hashes() -> None:
    entity: Any = sa.table("entity", sa.column("id"), sa.column("key"), sa.column("key_hash"))
    connection = op.get_bind()
    rows = [
        {"number": number, "hash": hashlib.sha256(key.encode()).digest()}
        for number, key in connection.execute(sa.select(entity.c.id, entity.c.key))
    ]
    if rows:
        mine = entity.c.id == sa.bindparam("number")
        connection.execute(
            sa.update(entity).where(mine).values(key_hash=sa.bindparam("hash")), rows
        )
