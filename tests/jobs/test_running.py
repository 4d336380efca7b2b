"""Batches of tasks on real tables: one run for many, and the rules that are applied at pickup."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from lakewarden.jobs import running
from lakewarden.jobs.control import Action
from lakewarden.jobs.planning import plan_orphans
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES
from lakewarden.jobs.running import Engine, Runner
from lakewarden.jobs.tasks import Failure, Origin, TaskStatus
from lakewarden.testing import iceberg, iceberg_oracle, invariants, tables
from tests.jobs.lab import (
    DAY_MS,
    Lab,
    iceberg_orphans,
    iceberg_table,
    lance_orphans,
    lance_table,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.postgres import PostgresServer

pytestmark = pytest.mark.spark

WRITERS = "younger than 1 hour: a writer may still build on it"


def spark_jobs(spark: SparkSession) -> set[int]:
    return set(spark.sparkContext.statusTracker().getJobIdsForGroup(None))


@pytest.mark.nightly
def test_orphans_of_many_lance_tables_go_in_one_run(
    lab: Lab, tmp_path: Path, spark: SparkSession
) -> None:
    lake = tmp_path / "lake"
    few, many = lake / "few", lake / "many"
    for number in range(2):
        lance_orphans(lance_table(few / f"t{number}.lance", 2))
    for number in range(8):
        lance_orphans(lance_table(many / f"t{number}.lance", 2))
    jobs = {}
    for place in (few, many):
        warehouse = lab.lance(place)
        warehouse.configure(REMOVE_ORPHAN_FILES)
        tasks = warehouse.ask(REMOVE_ORPHAN_FILES)
        before = spark_jobs(spark)
        assert lab.run(REMOVE_ORPHAN_FILES) == len(tasks)
        jobs[place] = len(spark_jobs(spark) - before)
        for task in tasks:
            details = warehouse.details(task)
            assert details.info.status is TaskStatus.SUCCESS, details.message
            assert details.info.progress == 1.0
            result = warehouse.result(task)
            assert result["deleted_count"] == result["would_delete_count"] == 3
            assert result["deleted_bytes"] == 3 * len(b"left over")
            assert result["listed_count"] > 3
            assert result["skipped_unknown_age_count"] == 0
        for table in place.iterdir():
            invariants.assert_no_live_file_missing(table)
            invariants.assert_nothing_deletable_left(table)
            assert len(set(invariants.versions(table))) == 2
    assert jobs[many] == jobs[few]


@pytest.mark.nightly
def test_orphans_are_looked_for_again_at_the_rate_that_was_seen(lab: Lab, tmp_path: Path) -> None:
    lance_orphans(lance_table(tmp_path / "lake" / "busy.lance", 2))
    lance_table(tmp_path / "lake" / "idle.lance", 2)
    warehouse = lab.lance(tmp_path / "lake")
    warehouse.configure(REMOVE_ORPHAN_FILES, target_reclaim_bytes=0)
    busy, idle = warehouse.ask(REMOVE_ORPHAN_FILES, "busy", "idle")
    lab.run(REMOVE_ORPHAN_FILES)
    waits = {}
    for name, task in (("busy", busy), ("idle", idle)):
        done = warehouse.details(task).info
        with lab.database.reading() as connection:
            query = "SELECT origin, reason, scheduled_for FROM task WHERE parent_task_id = ?"
            after = connection.exec_driver_sql(query, (task.hex,)).all()
        assert len(after) == 1
        assert after[0].origin == Origin.ADAPTIVE
        assert done.picked_up_at is not None
        waits[name] = after[0].scheduled_for / 1e6 - done.picked_up_at.timestamp()
        assert warehouse.result(task)["next_run_reason"] == after[0].reason
    assert waits["busy"] == pytest.approx(86_400, abs=120)
    assert waits["idle"] == pytest.approx(7_776_000, abs=120)


def test_what_failed_attempts_deleted_counts_for_the_next_run(lab: Lab, tmp_path: Path) -> None:
    lance_table(tmp_path / "lake" / "t.lance", 2)
    warehouse = lab.lance(tmp_path / "lake")
    warehouse.configure(REMOVE_ORPHAN_FILES)
    (task,) = warehouse.ask(REMOVE_ORPHAN_FILES)
    (claim,) = lab.queue.pick(REMOVE_ORPHAN_FILES)
    # It has deleted all that there was, and was stopped then.
    lab.queue.fail(claim, "stopped", Failure.STOPPED, result={"deleted_bytes": 1 << 40})
    warehouse.control(Action.RUN_NOW, task)
    lab.run(REMOVE_ORPHAN_FILES)
    result = warehouse.result(task)
    assert result["deleted_bytes"] == 0
    seconds = (1 << 40) / result["rate_bytes_per_second"]
    # They have gathered since the table's oldest version was written, however short it is known.
    assert 0 < seconds - 30 * 86_400 < 600


def test_snapshots_of_many_iceberg_tables_expire_in_one_run(
    lab: Lab, tmp_path: Path, spark: SparkSession
) -> None:
    made = [iceberg_table(tmp_path, f"t{number}", 4) for number in range(3)]
    before = [iceberg_oracle.reachable(table) for table in made]
    kept = [iceberg_oracle.fingerprints(table) for table in made]
    warehouse = lab.iceberg(tmp_path)
    warehouse.configure(EXPIRE_SNAPSHOTS, min_snapshots_to_expire=3)
    tasks = warehouse.ask(EXPIRE_SNAPSHOTS, "t0", "t1", "t2", origin=Origin.COMMIT)
    assert lab.run(EXPIRE_SNAPSHOTS) == 3
    for table, task, then, prints in zip(made, tasks, before, kept, strict=True):
        details = warehouse.details(task)
        assert details.info.status is TaskStatus.SUCCESS, details.message
        table.refresh()
        assert len(table.metadata.snapshots) == 1
        result = warehouse.result(task)
        assert result["expired_snapshots_count"] == len(prints) - 1
        assert result["deleted_data_files_count"] == 3
        assert result["deleted_manifest_lists_count"] == len(prints) - 1
        assert result["failed_deletes_count"] == 0
        iceberg_oracle.assert_intact(table, prints)
        left = {path for path in iceberg_oracle.leftovers(then, table) if Path(path).exists()}
        assert left == set()


def stop_at(lab: Lab, stage: str) -> None:
    """Let somebody ask tasks to stop when they say that they are at this stage."""
    trigger = (
        "CREATE TRIGGER stops AFTER UPDATE ON task WHEN NEW.status = 'RUNNING' "
        f"""AND NEW.execution_details LIKE '%"{stage}"%' """
        "BEGIN UPDATE task SET status = 'STOPPING' WHERE task_id = NEW.task_id; END"
    )
    with lab.database.writing() as connection:
        connection.exec_driver_sql(trigger)


def test_no_snapshot_expires_for_a_task_that_was_stopped_before_its_commit(
    lab: Lab, tmp_path: Path
) -> None:
    table = iceberg_table(tmp_path, "t", 4)
    before, prints = table.metadata_location, iceberg_oracle.fingerprints(table)
    warehouse = lab.iceberg(tmp_path)
    warehouse.configure(EXPIRE_SNAPSHOTS)
    (task,) = warehouse.ask(EXPIRE_SNAPSHOTS)
    # The plan is made by then, and looked at again.
    stop_at(lab, "commit")
    lab.run(EXPIRE_SNAPSHOTS)
    assert warehouse.failures(task) == [(Failure.STOPPED, "stopped on request")]
    table.refresh()
    assert table.metadata_location == before
    iceberg_oracle.assert_intact(table, prints)


def test_versions_of_lance_tables_expire_each_by_its_own_settings(lab: Lab, tmp_path: Path) -> None:
    import lance

    lake = tmp_path / "lake"
    plain, keeping = lance_table(lake / "plain.lance"), lance_table(lake / "keeping.lance")
    lance.dataset(str(keeping)).update_config({"history.expire.min-snapshots-to-keep": "4"})
    tables.age(keeping, 30)
    tagged = lance_table(lake / "tagged.lance")
    tables.tag(tagged, "release", 2)
    prints = {place: invariants.fingerprints(place) for place in (plain, keeping, tagged)}
    warehouse = lab.lance(lake)
    warehouse.configure(EXPIRE_SNAPSHOTS, min_snapshots_to_expire=0)
    tasks = warehouse.ask(EXPIRE_SNAPSHOTS, "plain", "keeping", "tagged", origin=Origin.COMMIT)
    lab.run(EXPIRE_SNAPSHOTS)
    expected = {plain: {6}, keeping: {4, 5, 6, 7}, tagged: {2, 6}}
    for task, (place, versions) in zip(tasks, expected.items(), strict=True):
        details = warehouse.details(task)
        assert details.info.status is TaskStatus.SUCCESS, details.message
        found = set(invariants.versions(place))
        assert {number for _, number in found} == versions
        assert warehouse.result(task)["expired_snapshots_count"] == len(prints[place]) - len(found)
        invariants.assert_all_versions_read(place, {one: prints[place][one] for one in found})
        invariants.assert_no_live_file_missing(place)
        invariants.assert_nothing_deletable_left(place)


def test_when_the_next_run_is_the_clock_of_the_database_tells(
    postgres: PostgresServer, postgres_template: str, spark: SparkSession, tmp_path: Path
) -> None:
    lab = Lab.of(postgres.url(postgres.database(template=postgres_template)), spark)
    lance_table(tmp_path / "lake" / "t.lance", 1)
    warehouse = lab.lance(tmp_path / "lake")
    warehouse.configure(REMOVE_ORPHAN_FILES)
    (task,) = warehouse.ask(REMOVE_ORPHAN_FILES)
    now = lab.database.clock.now()
    # The worker's own clock is wrong, by less than would be too much.
    lab.later(timedelta(minutes=4))
    assert lab.run(REMOVE_ORPHAN_FILES) == 1
    told = datetime.fromisoformat(warehouse.result(task)["next_run_at"])
    assert timedelta(0) <= told - now - timedelta(days=90) < timedelta(minutes=3)
    lab.database.close()


def test_a_run_that_lets_nothing_go_says_why(lab: Lab, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    young = tables.appended(lake / "young.lance", 4)
    tables.tag(young, "one", 2)
    tables.tag(young, "two", 2)
    lance_table(lake / "few.lance", 3)
    small = iceberg.create(iceberg.catalog(tmp_path), "db.small")
    iceberg.grow(small, 3)
    before = {place: invariants.fingerprints(place) for place in lake.iterdir()}
    directory, catalog = lab.lance(lake), lab.iceberg(tmp_path)
    for warehouse in (directory, catalog):
        warehouse.configure(EXPIRE_SNAPSHOTS)
    asked = directory.ask(EXPIRE_SNAPSHOTS, "young")
    (few,) = directory.ask(EXPIRE_SNAPSHOTS, "few", origin=Origin.COMMIT)
    asked += catalog.ask(EXPIRE_SNAPSHOTS, "small")
    assert lab.run(EXPIRE_SNAPSHOTS) == 3
    lanced, ice = (directory.result(asked[0]), catalog.result(asked[1]))
    # A version may have several reasons, and two tags are one.
    assert lanced["kept_snapshots_count"] == 4
    assert lanced["kept_snapshots_reasons"] == {
        "younger than 5 days": 4, WRITERS: 4, "head": 1, "last 1": 1, "tag": 1,
    }  # fmt: skip
    said = directory.details(asked[0]).message
    assert said == (
        "0 versions expired, 0 files and 0 bytes deleted; 4 versions stay "
        f"(4 {WRITERS}, 4 younger than 5 days, 1 head, 1 last 1, 1 tag)"
    )
    assert ice["kept_snapshots_reasons"]["younger than 5 days"] == ice["kept_snapshots_count"] >= 3
    assert "versions stay" in str(catalog.details(asked[1]).message)
    assert directory.result(few)["kept_snapshots_reasons"] == {"head": 1, "last 1": 1}
    assert directory.details(few).message == (
        "nothing was done: 2 versions can go, fewer than the 20 that are worth a run; "
        "1 version stays (1 head, 1 last 1)"
    )
    for place, prints in before.items():
        invariants.assert_all_versions_read(place, prints)
    iceberg_oracle.assert_intact(small)


@pytest.mark.nightly
def test_what_another_task_is_in_the_middle_of_is_no_damage(lab: Lab, tmp_path: Path) -> None:
    place = lance_table(tmp_path / "lake" / "t.lance", 6)
    left = lance_orphans(place)
    warehouse = lab.lance(tmp_path / "lake")
    for queue in (EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES):
        warehouse.configure(queue)
    (expiry,) = warehouse.ask(EXPIRE_SNAPSHOTS)
    (orphans,) = warehouse.ask(REMOVE_ORPHAN_FILES)
    # Somebody expires versions, and is killed after the first file.
    (claim,) = lab.queue.pick(EXPIRE_SNAPSHOTS)
    (oldest,) = (one.path for one in lance_files(place, 1))
    (place / "data" / oldest).unlink()
    assert lab.run(REMOVE_ORPHAN_FILES) == 1
    details = warehouse.details(orphans)
    assert details.info.status is TaskStatus.SCHEDULED
    assert "do not exist" in str(details.attempts[0].message)
    assert all(one.exists() for one in left)
    lab.queue.fail(claim, "killed", Failure.STOPPED)
    warehouse.control(Action.RUN_NOW, expiry)
    assert lab.run(EXPIRE_SNAPSHOTS) == 1
    warehouse.control(Action.RUN_NOW, orphans)
    assert lab.run(REMOVE_ORPHAN_FILES) == 1
    for task in (expiry, orphans):
        assert warehouse.details(task).info.status is TaskStatus.SUCCESS
    invariants.assert_no_live_file_missing(place)
    invariants.assert_nothing_deletable_left(place)


def test_damage_stays_damage_when_nobody_else_is_at_the_table(lab: Lab, tmp_path: Path) -> None:
    place = lance_table(tmp_path / "lake" / "t.lance", 6)
    warehouse = lab.lance(tmp_path / "lake")
    for queue in (EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES):
        warehouse.configure(queue)
    (oldest,) = (one.path for one in lance_files(place, 1))
    (place / "data" / oldest).unlink()
    # One that only waits has begun nothing.
    warehouse.ask(EXPIRE_SNAPSHOTS)
    (orphans,) = warehouse.ask(REMOVE_ORPHAN_FILES)
    lab.run(REMOVE_ORPHAN_FILES)
    # It may be a cleanup by hand, which nobody here knows of.
    assert warehouse.details(orphans).info.status is TaskStatus.SCHEDULED
    warehouse.control(Action.RUN_NOW, orphans)
    lab.run(REMOVE_ORPHAN_FILES)
    assert warehouse.details(orphans).info.status is TaskStatus.FAILED


def lance_files(place: Path, version: int) -> list[Any]:
    import lance

    opened = lance.dataset(str(place), version=version)
    return [file for one in opened.get_fragments() for file in one.data_files()]


def test_shallow_clone_without_a_task_keeps_what_it_needs(lab: Lab, tmp_path: Path) -> None:
    import lance

    lake = tmp_path / "lake"
    source = lance_table(lake / "source.lance")
    clone = lake / "clone.lance"
    lance.dataset(str(source), version=2).shallow_clone(str(clone), reference=2)
    tables.age(lake, 30)
    prints = invariants.fingerprints(clone)
    warehouse = lab.lance(lake)
    warehouse.configure(EXPIRE_SNAPSHOTS)
    (task,) = warehouse.ask(EXPIRE_SNAPSHOTS, "source")
    lab.run(EXPIRE_SNAPSHOTS)
    assert warehouse.details(task).info.status is TaskStatus.SUCCESS
    assert warehouse.result(task)["expired_snapshots_count"] == 5
    invariants.assert_all_versions_read(clone, prints)
    assert warehouse.tables().keys() == {"source", "clone"}


@pytest.mark.nightly
def test_dry_run_says_what_would_go_and_deletes_nothing(lab: Lab, tmp_path: Path) -> None:
    made = {name: iceberg_table(tmp_path, name, 1) for name in ("a", "b")}
    left = {name: iceberg_orphans(table) for name, table in made.items()}
    warehouse = lab.iceberg(tmp_path)
    # Whoever wants nothing to go is heard: the warehouse here, a table below.
    warehouse.configure(REMOVE_ORPHAN_FILES, dry_run=True)
    with made["a"].transaction() as change:
        change.set_properties({"lakewarden.remove-orphan-files.dry-run": "false"})
    tasks = warehouse.ask(REMOVE_ORPHAN_FILES, "a", "b")
    lab.run(REMOVE_ORPHAN_FILES)
    for task in tasks:
        result = warehouse.result(task)
        assert (result["dry_run"], result["would_delete_count"]) == (True, 3)
        assert result["would_delete_bytes"] == 3 * len(b"left over")
        assert (result["deleted_count"], result["deleted_bytes"]) == (0, 0)
        assert result["rate_bytes_per_second"] == 0
    assert all(path.exists() for paths in left.values() for path in paths)

    def done() -> list[tuple[bool, bool]]:
        found = warehouse.slots(REMOVE_ORPHAN_FILES, "a", "b")
        return [(row.ran_at is not None, row.done_at is not None) for row in found]

    assert done() == [(True, False), (True, False)]
    warehouse.configure(REMOVE_ORPHAN_FILES)
    with made["b"].transaction() as change:
        change.set_properties({"lakekeeper.remove-orphan-files.dry-run": "true"})
    with lab.database.writing() as connection:
        connection.exec_driver_sql("DELETE FROM task")
    again = warehouse.ask(REMOVE_ORPHAN_FILES, "a", "b")
    lab.run(REMOVE_ORPHAN_FILES)
    assert [warehouse.result(task)["deleted_count"] for task in again] == [3, 0]
    assert done() == [(True, True), (True, False)]
    assert [path.exists() for path in left["a"]] == [False] * 3
    assert [path.exists() for path in left["b"]] == [True] * 3
    for table in made.values():
        iceberg_oracle.assert_intact(table)


def test_dry_run_that_was_stopped_says_so(lab: Lab, tmp_path: Path) -> None:
    iceberg_orphans(iceberg_table(tmp_path, "t", 1))
    warehouse = lab.iceberg(tmp_path)
    warehouse.configure(REMOVE_ORPHAN_FILES, dry_run=True)
    (task,) = warehouse.ask(REMOVE_ORPHAN_FILES)
    # Whatever it is that was done last.
    stop_at(lab, "stage")
    lab.run(REMOVE_ORPHAN_FILES)
    assert warehouse.failures(task) == [(Failure.STOPPED, "stopped on request")]


def test_tables_that_are_excluded_end_as_done_with_the_reason(lab: Lab, tmp_path: Path) -> None:
    without_gc = iceberg_table(tmp_path, "no_gc", 4, **{"gc.enabled": "false"})
    off = iceberg_table(tmp_path, "off", 4, **{"lakekeeper.history.expire.enabled": "false"})
    iceberg_table(tmp_path, "gone", 1)
    warehouse = lab.iceberg(tmp_path)
    warehouse.configure(EXPIRE_SNAPSHOTS)
    tasks = warehouse.ask(EXPIRE_SNAPSHOTS, "no_gc", "off", "gone")
    iceberg.catalog(tmp_path).drop_table("db.gone")
    lab.run(EXPIRE_SNAPSHOTS)
    told = [warehouse.details(task) for task in tasks]
    assert [one.info.status for one in told] == [TaskStatus.SUCCESS] * 3
    reasons = [warehouse.result(task)["skipped"] for task in tasks]
    assert reasons[0].startswith("GcDisabled: ")
    assert reasons[1].startswith("ExpireSnapshotsDisabled: ")
    assert "gone" in str(told[2].message)
    for table, snapshots in ((without_gc, 7), (off, 7)):
        table.refresh()
        assert len(table.metadata.snapshots) == snapshots


def test_table_that_wants_it_is_included_though_the_warehouse_is_off(
    lab: Lab, tmp_path: Path
) -> None:
    wants = {"lakewarden.remove-orphan-files.enabled": "true"}
    table = iceberg_table(tmp_path, "wants", 1, **wants)
    other = iceberg_table(tmp_path, "other", 1)
    left, stays = iceberg_orphans(table), iceberg_orphans(other)
    warehouse = lab.iceberg(tmp_path)
    warehouse.configure(REMOVE_ORPHAN_FILES, enable_remove_orphan_files=False)
    wanted, unwanted = warehouse.ask(REMOVE_ORPHAN_FILES, "wants", "other")
    lab.run(REMOVE_ORPHAN_FILES)
    assert warehouse.result(wanted)["deleted_count"] == 3
    assert warehouse.result(unwanted)["skipped"].startswith("RemoveOrphanFilesDisabled: ")
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in stays)


def test_age_below_the_floor_fails_at_pickup_and_for_good(lab: Lab, tmp_path: Path) -> None:
    own = {"lakewarden.remove-orphan-files.older-than-ms": "1000"}
    table = iceberg_table(tmp_path, "t", 1)
    exempt = iceberg_table(tmp_path, "exempt", 1, **own)
    left = iceberg_orphans(table, days=2) + iceberg_orphans(exempt, days=0.5)
    warehouse = lab.iceberg(tmp_path)
    warehouse.configure(REMOVE_ORPHAN_FILES, default_older_than_ms=DAY_MS - 1)
    tasks = warehouse.ask(REMOVE_ORPHAN_FILES, "t", "exempt")
    lab.run(REMOVE_ORPHAN_FILES)
    for task in tasks:
        details = warehouse.details(task)
        assert details.info.status is TaskStatus.FAILED
        assert str(details.message).startswith("RemoveOrphanFilesRetentionTooShort: ")
    assert all(path.exists() for path in left)
    assert lab.run(REMOVE_ORPHAN_FILES) == 0
    # A day exactly is enough, and a table's own age has no floor.
    warehouse.configure(REMOVE_ORPHAN_FILES, default_older_than_ms=DAY_MS)
    again = warehouse.ask(REMOVE_ORPHAN_FILES, "t", "exempt")
    lab.run(REMOVE_ORPHAN_FILES)
    assert [warehouse.result(task)["deleted_count"] for task in again] == [3, 3]
    assert [warehouse.result(task)["older_than_ms"] for task in again] == [DAY_MS, 1000]
    for one in (table, exempt):
        iceberg_oracle.assert_intact(one)


@pytest.mark.nightly
def test_too_few_snapshots_are_not_worth_a_run_unless_somebody_asks(
    lab: Lab, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    place = lance_table(lake / "t.lance", 4)
    table = iceberg_table(tmp_path, "t", 4)
    directory, catalog = lab.lance(lake), lab.iceberg(tmp_path)
    for warehouse in (directory, catalog):
        warehouse.configure(EXPIRE_SNAPSHOTS)
        warehouse.ask(EXPIRE_SNAPSHOTS, "t", origin=Origin.COMMIT)
    assert lab.run(EXPIRE_SNAPSHOTS) == 2
    assert len(set(invariants.versions(place))) == 4
    table.refresh()
    assert len(table.metadata.snapshots) == 7
    asked = [one.ask(EXPIRE_SNAPSHOTS, "t")[0] for one in (directory, catalog)]
    assert lab.run(EXPIRE_SNAPSHOTS) == 2
    assert len(set(invariants.versions(place))) == 1
    table.refresh()
    assert len(table.metadata.snapshots) == 1
    assert directory.result(asked[0])["expired_snapshots_count"] == 3
    assert catalog.result(asked[1])["expired_snapshots_count"] == 6


def test_damaged_table_fails_for_good_and_the_others_go_on(lab: Lab, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    fine, broken = lance_table(lake / "fine.lance"), lance_table(lake / "broken.lance")
    left = lance_orphans(fine) + lance_orphans(broken)
    newest = min((broken / "_versions").glob("*.manifest"))
    whole = newest.read_bytes()
    warehouse = lab.lance(lake)
    warehouse.configure(REMOVE_ORPHAN_FILES)
    tasks = warehouse.ask(REMOVE_ORPHAN_FILES, "fine", "broken")
    newest.write_bytes(whole[: len(whole) // 2])
    lab.run(REMOVE_ORPHAN_FILES)
    assert [warehouse.details(task).info.status for task in tasks] == [
        TaskStatus.SUCCESS,
        TaskStatus.FAILED,
    ]
    assert [path.exists() for path in left] == [False] * 3 + [True] * 3
    with lab.database.reading() as connection:
        waiting = connection.exec_driver_sql("SELECT parent_task_id FROM task").scalars().all()
    assert waiting == [tasks[0].hex]


@pytest.mark.parametrize("queue", [EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES])
@pytest.mark.parametrize("kind", ["lance", "iceberg"])
def test_a_table_that_is_excluded_while_it_is_planned_is_left_alone(
    lab: Lab, tmp_path: Path, kind: str, queue: str
) -> None:
    if kind == "lance":
        place = lance_table(tmp_path / "lake" / "t.lance", 5)
        lance_orphans(place)
        warehouse = lab.lance(tmp_path / "lake")
    else:
        table = iceberg_table(tmp_path, "t")
        iceberg_orphans(table)
        place, warehouse = iceberg.local(table.location()), lab.iceberg(tmp_path)

    def engine() -> Engine:
        # Asked for when the task was picked and its table looked at.
        if kind == "lance":
            lance.dataset(str(place)).update_config({"gc.enabled": "false"})
        else:
            with table.refresh().transaction() as changes:
                changes.set_properties({"gc.enabled": "false"})
        return lab.engine

    before = invariants.files(place)
    settings = {"max_snapshot_age_ms": DAY_MS} if queue == EXPIRE_SNAPSHOTS else {}
    warehouse.configure(queue, **settings)
    (task,) = warehouse.ask(queue, "t")
    Runner(lab.queue, lab.warehouses, engine, lab.stop).run(lab.queue.pick(queue))
    assert "gc.enabled" in str(warehouse.details(task).message)
    assert before <= invariants.files(place)


def test_a_property_that_nobody_can_read_is_its_own_tables_trouble(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = iceberg_table(tmp_path, "bad"), iceberg_table(tmp_path, "good")
    kept, gone = iceberg_orphans(bad), iceberg_orphans(good)
    warehouse = lab.iceberg(tmp_path)
    warehouse.configure(REMOVE_ORPHAN_FILES)
    tasks = warehouse.ask(REMOVE_ORPHAN_FILES, "bad", "good")

    def then_set(*arguments: Any) -> Any:
        found = plan_orphans(*arguments)
        with bad.refresh().transaction() as changes:
            changes.set_properties({"lakewarden.remove-orphan-files.older-than-ms": "soon"})
        return found

    monkeypatch.setattr(running, "plan_orphans", then_set)
    lab.run(REMOVE_ORPHAN_FILES)
    status = [warehouse.details(task).info.status for task in tasks]
    assert status == [TaskStatus.FAILED, TaskStatus.SUCCESS]
    assert "older-than-ms" in str(warehouse.details(tasks[0]).message)
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in gone)
