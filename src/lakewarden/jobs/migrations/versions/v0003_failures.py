"""When tasks failed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from lakewarden.jobs.schema import Moment

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("slot", sa.Column("failed_at", Moment(), nullable=True))
