"""The log of tasks by when attempts ended, for the numbers."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_index("ix_task_log_ended_at", "task_log", ["ended_at"])
