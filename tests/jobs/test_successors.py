"""The task after a task: what is left over makes no run of every commit."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from uuid import UUID

import lance
import pyarrow as pa
import pytest

from lakewarden.jobs.config import ExpireSettings, OrphanSettings
from lakewarden.jobs.database import Database
from lakewarden.jobs.discovery import NewPlace
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.scheduling import expire_versions
from lakewarden.jobs.sources import Source, open_source
from lakewarden.jobs.successors import after_expiry, after_orphans
from lakewarden.jobs.tasks import Claim, NewTask, Origin, Turn
from lakewarden.jobs.warehouses import Access, TableEntity, WarehouseKind
from lakewarden.testing.simulation import World
from lakewarden.world import SystemClock
from tests.jobs.small import EXPIRE, LAKE, ORPHANS, picked

DAY = timedelta(days=1)
SETTINGS = ExpireSettings.of({}, {"min-snapshots-to-expire": 2})


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A directory with a table of four versions, two of which are tagged."""
    for number in range(4):
        made = lance.write_dataset(pa.table({"id": [number]}), tmp_path / "t.lance", mode="append")
        if number < 2:
            made.tags.create(f"v{made.version}", made.version)
    return open_source(NewPlace(WarehouseKind.LANCE, str(tmp_path)), Access())


def known(source: Source, now: datetime) -> TableEntity:
    (found,) = source.find()
    return TableEntity(
        UUID(int=1), UUID(int=0xA), found.type, found.name, found.target, {}, None, None, now,
        active=True,
    )  # fmt: skip


def brought_forward(queue: TaskQueue, database: Database, task: NewTask) -> bool:
    with database.writing() as connection:
        return queue.bring_forward([task], connection) == [Turn.SOONER]


def test_orphans_gather_through_dry_runs_and_since_the_oldest_version(
    queue: TaskQueue, world: World, source: Source
) -> None:
    settings = OrphanSettings.of({}, {"target-reclaim-bytes": 1000})
    # Known for a moment, written ten days ago.
    now = SystemClock().now() + 10 * DAY
    table = known(source, now)
    look = source.look(table)

    def rate(claim: Claim) -> float:
        found = after_orphans(claim, table, look, settings, 10 * 86_400, now).decision.rate
        assert found is not None
        return found

    claim = picked(queue, world.now(), name=ORPHANS)
    assert rate(claim) == pytest.approx(1.0, rel=0.01)
    assert rate(replace(claim, done_at=now - 5 * DAY)) == pytest.approx(2.0)


def test_versions_that_refs_hold_make_no_run_of_every_commit(
    queue: TaskQueue, database: Database, world: World, source: Source
) -> None:
    # All are old, and a run has just let none of them go.
    now = SystemClock().now() + 9 * DAY
    table = known(source, now)
    claim = picked(queue, world.now())
    after = after_expiry(claim, table, SETTINGS, source, now, idle=True)
    assert after.at == now + DAY
    queue.succeed(claim, successor=after.task)
    written = source.look(table).versions
    assert written is not None
    for hours in (1, 12, 23):
        moment = now + timedelta(hours=hours)
        commit = expire_versions((*written, moment), SETTINGS, moment)
        assert commit.at == moment
        task = NewTask(EXPIRE, LAKE, table.entity, moment, Origin.COMMIT, commit.reason)
        assert not brought_forward(queue, database, task)


def test_what_gets_old_within_a_day_is_let_go_with_the_next_commit(
    queue: TaskQueue, database: Database, world: World, source: Source
) -> None:
    now = SystemClock().now() + SETTINGS.max_snapshot_age - timedelta(hours=2)
    table = known(source, now)
    claim = picked(queue, world.now())
    after = after_expiry(claim, table, SETTINGS, source, now, idle=False)
    assert after.at == now + DAY
    queue.succeed(claim, successor=after.task)
    moment = now + timedelta(hours=3)
    task = NewTask(EXPIRE, LAKE, table.entity, moment, Origin.COMMIT, "2 can go")
    assert brought_forward(queue, database, task)


def test_who_came_too_early_comes_back_in_time(
    queue: TaskQueue, world: World, source: Source
) -> None:
    now = SystemClock().now() + SETTINGS.max_snapshot_age - timedelta(hours=2)
    claim = picked(queue, world.now())
    after = after_expiry(claim, known(source, now), SETTINGS, source, now, idle=True)
    assert after.at is not None
    assert timedelta(hours=1) < after.at - now <= timedelta(hours=2)


def test_versions_of_the_last_hour_stay_whatever_the_config_says(source: Source) -> None:
    now = SystemClock().now()
    settings = ExpireSettings.of({}, {"max-snapshot-age-ms": 1000, "min-snapshots-to-expire": 1})
    written = source.look(known(source, now)).versions
    assert written is not None
    decision = expire_versions(written, settings, now)
    assert decision.at is not None
    assert timedelta(minutes=50) < decision.at - now <= timedelta(hours=1)
