"""Tasks on a warehouse of ours, tasks that rewrite files, and the task that cleans the log of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from lakewarden.jobs import results, running
from lakewarden.jobs.log_cleanup import LogCleanup
from lakewarden.jobs.planning import plan_orphans
from lakewarden.jobs.queues import (
    EXPIRE_SNAPSHOTS,
    OPTIMIZE,
    REMOVE_ORPHAN_FILES,
    TASK_LOG_CLEANUP,
)
from lakewarden.jobs.tasks import Origin, TaskStatus
from lakewarden.jobs.warehouses import WarehouseKind
from lakewarden.testing import iceberg, iceberg_oracle, invariants, tables
from tests.jobs.lab import lance_table
from tests.warehouse.cleaning import Lake, new_lake
from tests.warehouse.survivors import survivors

if TYPE_CHECKING:
    from tests.jobs.lab import Lab, Registered

pytestmark = [pytest.mark.spark, pytest.mark.nightly]


def filled(root: Path) -> Lake:
    """Make a warehouse with a table of each format, and seven versions of both."""
    lake = new_lake(root)
    lake.lance("create", "points", 0)
    table = lake.create("lines", 0)
    for step in range(1, 7):
        lake.lance("overwrite", "points", step)
        table = lake.iceberg("lines")
        table.append(tables.rows(step).select(["id"]))
    return lake


def registered(lab: Lab, lake: Lake) -> Registered:
    return lab.register(WarehouseKind.LAKEWARDEN, str(lake.root))


def test_a_warehouse_that_lets_nothing_go_says_why(lab: Lab, tmp_path: Path) -> None:
    lake = filled(tmp_path / "wh")
    warehouse = registered(lab, lake)
    warehouse.configure(EXPIRE_SNAPSHOTS)
    tasks = warehouse.ask(EXPIRE_SNAPSHOTS, "points", "lines")
    lab.run(EXPIRE_SNAPSHOTS)
    for task in tasks:
        result = warehouse.result(task)
        assert result["expired_snapshots_count"] == 0
        rule = "among the last 3, or younger than 5 days"
        assert result["kept_snapshots_reasons"][rule] == result["kept_snapshots_count"] == 7
        assert f"7 versions stay (7 {rule}" in str(warehouse.details(task).message)
    assert len(set(invariants.versions(lake.place("points")))) == 7


def test_versions_of_a_warehouse_expire_each_table_by_its_rules(lab: Lab, tmp_path: Path) -> None:
    lake = filled(tmp_path / "wh")
    lake.warehouse.create_tag("before")
    tagged = survivors(lake.warehouse, lake.warehouse.refresh().version)
    lake.lance("overwrite", "points", 99)
    warehouse = registered(lab, lake)
    lab.later()
    warehouse.configure(EXPIRE_SNAPSHOTS, min_snapshots_to_expire=0)
    tasks = warehouse.ask(EXPIRE_SNAPSHOTS, "points", "lines", origin=Origin.COMMIT)
    before = lake.warehouse.refresh().version
    lab.run(EXPIRE_SNAPSHOTS)
    for task in tasks:
        details = warehouse.details(task)
        assert details.info.status is TaskStatus.SUCCESS, details.message
    # Three versions always stay, and what the tag holds is one of them.
    assert warehouse.result(tasks[0])["expired_snapshots_count"] == 5
    assert warehouse.result(tasks[1])["expired_snapshots_count"] > 0
    place = lake.place("points")
    assert {number for _, number in invariants.versions(place)} == {6, 7, 8}
    invariants.assert_no_live_file_missing(place)
    invariants.assert_nothing_deletable_left(place)
    assert lake.at("points").to_table()["id"].to_pylist() == [99]
    assert sorted(lake.iceberg("lines").scan().to_arrow()["id"].to_pylist()) == sorted(
        [0, *(one for step in range(1, 7) for one in tables.rows(step)["id"].to_pylist())]
    )
    # One commit lets go of both tables' versions, and one takes snapshots out of Iceberg's metadata.
    messages = [one.transaction.message for one in lake.again().history(10)]
    assert sum(str(one).startswith("reclaim versions of 2") for one in messages) == 1
    assert lake.warehouse.refresh().version > before
    assert tagged is not None
    assert lake.again().read(tag="before").tables()


def test_orphans_of_a_warehouse_go_and_no_version_does(lab: Lab, tmp_path: Path) -> None:
    lake = filled(tmp_path / "wh")
    left = [
        tables.orphan(lake.place("points"), "data/left.lance", days=1),
        tables.orphan(lake.place("lines"), "data/left.parquet", days=1),
    ]
    prints = invariants.fingerprints(lake.place("points"))
    snapshots = len(lake.iceberg("lines").metadata.snapshots)
    warehouse = registered(lab, lake)
    lab.later()
    warehouse.configure(REMOVE_ORPHAN_FILES)
    tasks = warehouse.ask(REMOVE_ORPHAN_FILES, "points", "lines")
    lab.run(REMOVE_ORPHAN_FILES)
    assert [warehouse.details(task).info.status for task in tasks] == [TaskStatus.SUCCESS] * 2
    assert [warehouse.result(task)["deleted_count"] for task in tasks] == [1, 1]
    assert not any(path.exists() for path in left)
    invariants.assert_all_versions_read(lake.place("points"), prints)
    assert len(lake.iceberg("lines").metadata.snapshots) == snapshots


def test_whoever_switches_the_floor_off_does_so_in_a_warehouse_of_ours_too(
    lab: Lab, tmp_path: Path
) -> None:
    lake = filled(tmp_path / "wh")
    hours = {"old": 3.0, "young": 0.5}
    left = {
        name: tables.orphan(lake.place("points"), f"data/{name}.lance", days=age / 24)
        for name, age in hours.items()
    }
    warehouse = registered(lab, lake)
    short: dict[str, Any] = {"default_older_than_ms": 3_600_000}
    warehouse.configure(REMOVE_ORPHAN_FILES, **short)
    (task,) = warehouse.ask(REMOVE_ORPHAN_FILES, "points")
    lab.run(REMOVE_ORPHAN_FILES)
    message = str(warehouse.details(task).message)
    assert message.startswith("RemoveOrphanFilesRetentionTooShort: ")
    assert all(path.exists() for path in left.values())
    warehouse.configure(REMOVE_ORPHAN_FILES, **short, disable_min_older_than_check=True)
    (task,) = warehouse.ask(REMOVE_ORPHAN_FILES, "points")
    lab.run(REMOVE_ORPHAN_FILES)
    assert warehouse.result(task)["deleted_count"] == 1
    assert {name: path.exists() for name, path in left.items()} == {"old": False, "young": True}


def test_small_files_of_many_tables_become_few(lab: Lab, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    places = [lake / f"t{number}.lance" for number in range(2)]
    for place in places:
        tables.appended(place, 12)
    rows = [lance.dataset(str(place)).to_table().sort_by("id") for place in places]
    calm = lance_table(lake / "calm.lance", 1)
    warehouse = lab.lance(lake)
    warehouse.configure(OPTIMIZE)
    tasks = warehouse.ask(OPTIMIZE, "t0", "t1", "calm")
    lab.run(OPTIMIZE)
    for task in tasks:
        details = warehouse.details(task)
        assert details.info.status is TaskStatus.SUCCESS, details.message
    for place, before, task in zip(places, rows, tasks, strict=False):
        found = lance.dataset(str(place))
        assert len(found.get_fragments()) == 1
        assert found.to_table().sort_by("id").equals(before)
        result = warehouse.result(task)
        assert (result["fragments_removed"], result["fragments_added"]) == (12, 1)
        assert result["committed"] is True
    assert warehouse.result(tasks[2])["committed"] is False
    assert lance.dataset(str(calm)).version == 1


@pytest.mark.parametrize(
    ("origin", "config", "fragments"),
    [
        (Origin.MANUAL, {}, 1),
        (Origin.MANUAL, {"min_files": 9}, 8),
        (Origin.MANUAL, {"min_files": 8}, 1),
        (Origin.COMMIT, {}, 8),
    ],
)
def test_whoever_asks_by_hand_gets_what_the_format_can_do(
    lab: Lab, tmp_path: Path, origin: Origin, config: dict[str, int], fragments: int
) -> None:
    place = tables.appended(tmp_path / "lake" / "t.lance", 8)
    warehouse = lab.lance(tmp_path / "lake")
    warehouse.configure(OPTIMIZE, **config)
    (task,) = warehouse.ask(OPTIMIZE, origin=origin)
    lab.run(OPTIMIZE)
    assert warehouse.details(task).info.status is TaskStatus.SUCCESS
    assert len(lance.dataset(str(place)).get_fragments()) == fragments
    assert lance.dataset(str(place)).count_rows() == 24


def test_small_files_of_an_iceberg_table_become_few(lab: Lab, tmp_path: Path) -> None:
    names = ("small", "few")
    made = [iceberg.create(iceberg.catalog(tmp_path), f"db.{name}") for name in names]
    for table, files in zip(made, (6, 4), strict=True):
        iceberg.grow(table, files)
    before = [
        (table.scan().to_arrow().to_pylist(), iceberg_oracle.fingerprints(table)) for table in made
    ]
    warehouse = lab.iceberg(tmp_path)
    warehouse.configure(OPTIMIZE)
    tasks = warehouse.ask(OPTIMIZE, *names)
    lab.run(OPTIMIZE)
    # Five are worth it to the format.
    assert [warehouse.result(task)["committed"] for task in tasks] == [True, False]
    for table, files, (rows, snapshots) in zip(made, (1, 4), before, strict=True):
        table.refresh()
        found = table.scan().to_arrow().sort_by("id").to_pylist()
        assert found == sorted(rows, key=lambda row: row["id"])
        assert len(list(table.scan().plan_files())) == files
        iceberg_oracle.assert_intact(table, snapshots)


def test_requests_of_a_run_are_shared_among_its_tasks(lab: Lab, tmp_path: Path) -> None:
    for name in ("a", "b"):
        lance_table(tmp_path / "lake" / f"{name}.lance", 4)
    warehouse = lab.lance(tmp_path / "lake")
    warehouse.configure(EXPIRE_SNAPSHOTS)
    tasks = warehouse.ask(EXPIRE_SNAPSHOTS, "a", "b")
    lab.run(EXPIRE_SNAPSHOTS)
    found = [warehouse.result(task)["requests"] for task in tasks]
    assert all(one["LIST"] > 0 and one["GET"] > 0 for one in found)
    assert max(one["GET"] for one in found) - min(one["GET"] for one in found) <= 1
    assert sum(one.get("DELETE", 0) for one in found) > 0
    counted = {"GET": 7, "LIST": 1}
    assert results.shares(counted, 3) == [{"GET": 3, "LIST": 1}, {"GET": 2}, {"GET": 2}]


def test_log_of_tasks_is_cleaned_and_will_be_again(lab: Lab, tmp_path: Path) -> None:
    LogCleanup(lab.queue).ensure()
    lab.later()
    assert lab.run(TASK_LOG_CLEANUP) == 1
    with lab.database.reading() as connection:
        ended = connection.exec_driver_sql("SELECT status FROM task_log").scalars().all()
        waits = connection.exec_driver_sql("SELECT queue_name FROM task").scalars().all()
    assert ended == ["SUCCESS"]
    assert waits == [TASK_LOG_CLEANUP]


@pytest.mark.parametrize("name", ["points", "lines"])
def test_a_table_of_ours_that_is_excluded_while_it_is_planned_is_left_alone(
    lab: Lab, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = filled(tmp_path / "wh")
    left = tables.orphan(lake.place(name), "data/left", days=1)
    warehouse = registered(lab, lake)
    lab.later()
    warehouse.configure(REMOVE_ORPHAN_FILES)
    (task,) = warehouse.ask(REMOVE_ORPHAN_FILES, name)

    def then_exclude(*arguments: Any) -> Any:
        found = plan_orphans(*arguments)
        lake.again().set_properties({"gc.enabled": "false"}, ("db", name))
        return found

    monkeypatch.setattr(running, "plan_orphans", then_exclude)
    lab.run(REMOVE_ORPHAN_FILES)
    assert "gc.enabled" in str(warehouse.details(task).message)
    assert left.exists()
