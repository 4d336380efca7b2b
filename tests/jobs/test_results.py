"""What a task says about its run, and when it comes back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from lakewarden.jobs import results, successors
from lakewarden.jobs.config import OptimizeSettings
from lakewarden.jobs.queues import OPTIMIZE
from lakewarden.jobs.tasks import Claim, EntityType, Origin
from lakewarden.jobs.warehouses import TableEntity
from lakewarden.maintenance.optimize import Row
from tests.jobs.small import LAKE, table

NOW = datetime(2026, 3, 1, tzinfo=UTC)
TABLE = TableEntity(
    UUID(int=1), UUID(int=0xA), EntityType.TABLE, ("db", "t1"), "/t", {}, None, None, NOW, True
)
CLAIM = Claim(
    task_id=UUID(int=9),
    attempt=1,
    fence=1,
    queue=OPTIMIZE,
    scope=LAKE,
    entity=table(),
    scheduled_for=NOW,
    picked_up_at=NOW,
    created_at=NOW,
    heartbeat_seconds=60,
    origin=Origin.COMMIT,
)
PUT_OFF = "3 groups of files were put off: they are beyond max-bytes"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row("t"), "nothing was worth rewriting"),
        (Row("t", deferred=3), PUT_OFF),
        (Row("t", 9, 1, committed=True), "9 files became 1"),
        (Row("t", 9, 1, committed=True, deferred=3), f"9 files became 1; {PUT_OFF}"),
    ],
)
def test_what_was_put_off_is_told_and_come_back_for(row: Row, message: str) -> None:
    assert results.optimize_message(row) == message
    settings = OptimizeSettings.of({}, {"min-interval-seconds": 3600})
    after = successors.after_optimize(CLAIM, TABLE, settings, row, NOW)
    assert after.at == (NOW + timedelta(hours=1) if row.deferred else None)
