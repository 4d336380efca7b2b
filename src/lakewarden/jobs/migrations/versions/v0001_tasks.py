"""Tasks, their log and settings; warehouses and tables; who may do what, and who did."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from lakewarden.jobs.schema import Document, Moment

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("at", Moment(), nullable=False),
        sa.Column("actor", sa.String(length=255), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=True),
        sa.Column("warehouse_id", sa.Uuid(), nullable=True),
        sa.Column("context", Document, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_at_id", "audit", ["at", "id"])
    op.create_table(
        "slot",
        sa.Column("slot", sa.String(length=256), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("ran_at", Moment(), nullable=True),
        sa.Column("rate", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("slot", name="pk_slot"),
    )
    op.create_table(
        "task",
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("warehouse_id", sa.Uuid(), nullable=True),
        sa.Column("queue_name", sa.String(length=64), nullable=False),
        sa.Column("entity_type", sa.String(length=16), nullable=False),
        sa.Column("entity_id", sa.Uuid(), nullable=True),
        sa.Column("entity_name", Document, nullable=True),
        sa.Column("slot", sa.String(length=256), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("scheduled_for", Moment(), nullable=False),
        sa.Column("picked_up_at", Moment(), nullable=True),
        sa.Column("last_heartbeat_at", Moment(), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("execution_details", Document, nullable=True),
        sa.Column("task_data", Document, nullable=False),
        sa.Column("parent_task_id", sa.Uuid(), nullable=True),
        sa.Column("origin", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("stale_at", Moment(), nullable=True),
        sa.Column("updated_at", Moment(), nullable=True),
        sa.PrimaryKeyConstraint("task_id", name="pk_task"),
        sa.UniqueConstraint("slot", name="uq_task_slot"),
    )
    op.create_index(
        "ix_task_queue_name_scheduled_for_task_id",
        "task",
        ["queue_name", "scheduled_for", "task_id"],
    )
    op.create_index(
        "ix_task_warehouse_id_created_at_task_id", "task", ["warehouse_id", "created_at", "task_id"]
    )
    op.create_table(
        "task_config",
        sa.Column("scope_id", sa.Uuid(), nullable=False),
        sa.Column("queue_name", sa.String(length=64), nullable=False),
        sa.Column("config", Document, nullable=False),
        sa.Column("max_seconds_since_last_heartbeat", sa.BigInteger(), nullable=True),
        sa.Column("updated_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("scope_id", "queue_name", name="pk_task_config"),
    )
    op.create_table(
        "task_log",
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("warehouse_id", sa.Uuid(), nullable=True),
        sa.Column("queue_name", sa.String(length=64), nullable=False),
        sa.Column("entity_type", sa.String(length=16), nullable=False),
        sa.Column("entity_id", sa.Uuid(), nullable=True),
        sa.Column("entity_name", Document, nullable=True),
        sa.Column("slot", sa.String(length=256), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("scheduled_for", Moment(), nullable=False),
        sa.Column("picked_up_at", Moment(), nullable=True),
        sa.Column("last_heartbeat_at", Moment(), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("execution_details", Document, nullable=True),
        sa.Column("task_data", Document, nullable=False),
        sa.Column("parent_task_id", sa.Uuid(), nullable=True),
        sa.Column("origin", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("ended_at", Moment(), nullable=False),
        sa.Column("duration_seconds", sa.Double(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("failure", sa.String(length=16), nullable=True),
        sa.Column("result", Document, nullable=True),
        sa.Column("rate", sa.Double(), nullable=True),
        sa.Column("final", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "attempt", name="pk_task_log"),
    )
    op.create_index("ix_task_log_project_id_ended_at", "task_log", ["project_id", "ended_at"])
    op.create_index(
        "ix_task_log_warehouse_id_created_at_task_id",
        "task_log",
        ["warehouse_id", "created_at", "task_id"],
    )
    op.create_index(
        "uq_task_log_final",
        "task_log",
        ["task_id"],
        unique=True,
        sqlite_where=sa.text("final"),
        postgresql_where=sa.text("final"),
    )
    op.create_table(
        "token",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("expires_at", Moment(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_token"),
        sa.UniqueConstraint("hash", name="uq_token_hash"),
        sa.UniqueConstraint("name", name="uq_token_name"),
    )
    op.create_table(
        "warehouse",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("location", sa.String(length=2048), nullable=False),
        sa.Column("access", Document, nullable=False),
        sa.Column("created_at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_warehouse"),
        sa.UniqueConstraint("project_id", "name", name="uq_warehouse_project_id_name"),
    )
    op.create_table(
        "entity",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("warehouse_id", sa.Uuid(), nullable=False),
        sa.Column("type", sa.String(length=16), nullable=False),
        sa.Column("name", Document, nullable=False),
        sa.Column("key", sa.String(length=1024), nullable=False),
        sa.Column("target", sa.String(length=2048), nullable=False),
        sa.Column("properties", Document, nullable=False),
        sa.Column("marker", sa.String(length=2048), nullable=True),
        sa.Column("changed_at", Moment(), nullable=True),
        sa.Column("created_at", Moment(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["warehouse_id"], ["warehouse.id"], name="fk_entity_warehouse_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_entity"),
        sa.UniqueConstraint("warehouse_id", "key", name="uq_entity_warehouse_id_key"),
    )
