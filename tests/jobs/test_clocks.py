"""A worker whose clock is wrong, on a database that has its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES
from lakewarden.jobs.tasks import NewTask, TaskStatus
from lakewarden.testing import invariants, tables
from tests.jobs.lab import DAY_MS, Lab, lance_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.postgres import PostgresServer

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("queue", [EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES])
def test_a_worker_whose_clock_is_ahead_takes_nothing_young_for_old(
    postgres: PostgresServer,
    postgres_template: str,
    spark: SparkSession,
    tmp_path: Path,
    queue: str,
) -> None:
    """A month ahead, a file of a write in progress looks a month old."""
    place = lance_table(tmp_path / "lake" / "t.lance", 3, days=0)
    tables.orphan(place, "data/being-written.lance", days=0)
    before = invariants.files(place)
    lab = Lab.of(postgres.url(postgres.database(template=postgres_template)), spark)
    warehouse = lab.lance(tmp_path / "lake")
    settings = {"max_snapshot_age_ms": DAY_MS} if queue == EXPIRE_SNAPSHOTS else {}
    warehouse.configure(queue, **settings)
    table = warehouse.tables()["t"]
    asked = NewTask(queue, warehouse.scope, table.entity, lab.database.clock.now())
    task = lab.queue.schedule(asked)
    lab.later()
    assert lab.run(queue) == 1
    assert invariants.files(place) == before
    assert "clock" in str(warehouse.attempts(task)[0].message)
    assert warehouse.details(task).info.status is TaskStatus.SCHEDULED
    lab.database.close()
