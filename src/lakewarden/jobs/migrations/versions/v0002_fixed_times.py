"""Tasks whose time stands."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column(
        "task", sa.Column("fixed", sa.Boolean(), nullable=False, server_default=sa.false())
    )
