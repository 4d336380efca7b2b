"""Run by Alembic: takes the connection, and with it the transaction, from `database.migrate`."""

from __future__ import annotations

from alembic import context

from lakewarden.jobs.database import VERSION_TABLE
from lakewarden.jobs.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
    # SQLite changes tables by making them anew.
    render_as_batch=True,
)
context.run_migrations()
