"""Cleanup of a warehouse loses nothing: what must stay is read before and after, by other means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession

from lakewarden.errors import ErrorKind, NotFound, Refused
from lakewarden.maintenance.removal import Receipt
from lakewarden.maintenance.warehouse import Request, WarehousePlan
from lakewarden.warehouse.manifest import Operation, Pin, Table
from lakewarden.warehouse.reclaiming import Rules, decide
from lakewarden.warehouse.transaction import transaction
from lakewarden.world import SystemClock
from tests.warehouse.cleaning import NOW, Cleaner, Lake, before, floor_here, new_lake
from tests.warehouse.lakes import VERSIONS, Tampered, id_rows, reopen, write
from tests.warehouse.survivors import (
    Survivors,
    age,
    content,
    everything,
    files_of,
    missing,
    survivors,
)

pytestmark = pytest.mark.spark


@pytest.fixture
def cleaner(spark: SparkSession) -> Cleaner:
    return Cleaner(spark)


# -- a warehouse with something of everything ------------------------------------------------------


@dataclass
class Zoo:
    """A warehouse after its cleanup, and what was there before."""

    lake: Lake
    floor: int
    expected: Survivors
    before: set[str]
    plan: WarehousePlan
    receipt: Receipt
    after: set[str]
    tables: dict[str, Table]
    #: Files that are needed by others than versions of the warehouse.
    more: dict[str, set[Path]]

    def exactly(self, name: str) -> None:
        """See that of a table all is there that something that survives needs, and nothing else."""
        table = self.tables[name]
        needed = self.expected.files(table.id)
        head = self.lake.warehouse.read()
        # What cleanup itself has committed since.
        needed |= Survivors(
            {(0, "", table.id): (table, head.pins[table.id])} if table.id in head.pins else {},
            {},
            {},
        ).files(table.id)
        needed |= self.more.get(name, set())
        assert missing(needed) == []
        assert content(table.location) == {one for one in needed if not one.name.endswith(".json")}

    def goes(self, name: str) -> int:
        """Return how many files of a table went."""
        place = f"{self.lake.place(self.tables[name]).relative_to(self.lake.root)}/"
        return sum(one.startswith(place) for one in self.before - self.after)


def lances_of_old(lake: Lake) -> None:
    lake.lance("create", "l_append", 1)
    lake.lance("append", "l_append", 2)
    lake.lance("create", "l_over", 1)
    lake.lance("overwrite", "l_over", 2)
    lake.lance("create", "l_delete", 1, 2, 3, 4, 5, 6)
    lake.at("l_delete").delete("id = 1")
    lake.at("l_delete").update({"id": "id + 100"}, where="id = 2")
    lake.lance("create", "l_index", 1, 2, 3)
    lake.at("l_index").create_scalar_index("id", "BTREE")
    lake.lance("append", "l_index", 4)
    lake.at("l_index").create_scalar_index("id", "BTREE", replace=True)
    lake.lance("create", "l_compact", 1)
    lake.lance("append", "l_compact", 2)
    lake.lance("append", "l_compact", 3)
    lake.lance("create", "l_native", 1)
    lance.dataset(lake.table("l_native").location).tags.create("mine", 1)
    lake.lance("overwrite", "l_native", 2)
    lake.lance("create", "l_base", 1)
    lake.clone("l_base", "l_clone")
    lake.lance("overwrite", "l_base", 2)
    lake.lance("create", "l_dropped", 1)
    lake.lance("overwrite", "l_dropped", 2)
    lake.lance("create", "l_branched", 1)
    lake.lance("create", "l_tagged", 1)
    lake.lance("create", "l_rename", 1)
    lake.lance("create", "l_restored", 1)


def icebergs_of_old(lake: Lake) -> None:
    lake.create("i_append", 1).append(id_rows(2))
    lake.create("i_over", 1).overwrite(id_rows(2))
    lake.create("i_delete", 1, 2, 3).delete("id = 1")
    lake.create("i_back", 1).append(id_rows(2))
    table = lake.create("i_native", 1)
    first = table.current_snapshot()
    assert first is not None
    table.manage_snapshots().create_tag(first.snapshot_id, "mine").commit()
    table.manage_snapshots().create_branch(first.snapshot_id, "line").commit()
    table.append(id_rows(7), branch="line")
    table.overwrite(id_rows(2))
    lake.create("i_expired", 1).overwrite(id_rows(2))
    lake.create("i_fork", 1).overwrite(id_rows(2))
    lake.create("i_gone", 1)
    lake.create("i_held", 1)
    lake.create("i_dropped", 1).overwrite(id_rows(2))
    lake.create("i_rename", 1).overwrite(id_rows(2))
    lake.create("i_restored", 1)


def old(lake: Lake) -> None:
    """Do what is to be forgotten, but for what refs hold."""
    lances_of_old(lake)
    icebergs_of_old(lake)
    warehouse = lake.warehouse
    warehouse.create_tag("middle")
    warehouse.create_branch("dev")
    warehouse.create_branch("gone")
    warehouse.create_branch("held")
    lake.iceberg("i_fork", "dev").overwrite(id_rows(20))
    lake.iceberg("i_gone", "gone").append(id_rows(20))
    lake.iceberg("i_held", "held").append(id_rows(20))
    lake.create("i_made_there", 1, branch="dev")
    warehouse.create_tag("of-held", branch="held")
    lake.iceberg("i_held", "held").overwrite(id_rows(30))
    warehouse.delete_branch("gone")
    warehouse.delete_branch("held")
    for name in ("l_dropped", "i_dropped", "l_branched"):
        warehouse.drop(("db", name))
    for number in (3, 4):
        for name in ("l_over", "l_native", "l_base", "l_rename", "l_restored", "l_tagged"):
            lake.lance("overwrite", name, number)
        for name in ("i_over", "i_native", "i_expired", "i_fork", "i_rename", "i_restored"):
            lake.iceberg(name).overwrite(id_rows(number))
        lake.iceberg("i_gone").overwrite(id_rows(number))
        lake.iceberg("i_held").overwrite(id_rows(number))
    lake.at("l_delete").delete("id = 3")
    lake.at("l_index").optimize.optimize_indices()
    lake.at("l_compact").optimize.compact_files()
    warehouse.drop(("db", "l_tagged"))


def young(lake: Lake) -> None:
    """Do what is to stay."""
    warehouse = lake.warehouse
    lake.lance("append", "l_append", 5)
    lake.lance("overwrite", "l_over", 5)
    lake.at("l_delete").delete("id = 4")
    lake.lance("append", "l_index", 5)
    lake.iceberg("i_append").append(id_rows(5))
    lake.iceberg("i_over").overwrite(id_rows(5))
    lake.iceberg("i_delete").delete("id = 2")
    back = lake.iceberg("i_back")
    back.overwrite(id_rows(9))
    oldest = min(back.snapshots(), key=lambda one: one.sequence_number or 0)
    back.manage_snapshots().rollback_to_snapshot(oldest.snapshot_id).commit()
    back.append(id_rows(8))
    lake.iceberg("i_fork", "dev").append(id_rows(21))
    lake.iceberg("i_fork").append(id_rows(22))
    warehouse.rename(("db", "l_rename"), ("db", "l_renamed"))
    warehouse.rename(("db", "i_rename"), ("db", "i_renamed"))
    for name in ("l_restored", "i_restored"):
        warehouse.restore(warehouse.read(tag="middle"), ("db", name))
    lake.lance("create", "l_new", 1)
    lake.lance("overwrite", "l_new", 2)
    lake.create("i_new", 1).overwrite(id_rows(2))
    lake.lance("create", "l_late", 1)
    warehouse.drop(("db", "l_late"))
    table = lake.iceberg("i_expired")
    table.overwrite(id_rows(6))
    current = table.current_snapshot()
    assert current is not None
    expiry = table.maintenance.expire_snapshots()
    for one in table.snapshots():
        if one.snapshot_id != current.snapshot_id:
            expiry = expiry.by_id(one.snapshot_id)
    expiry.commit()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Zoo:
    lake = new_lake(tmp_path_factory.mktemp("zoo") / "lake")
    old(lake)
    floor = floor_here(lake.warehouse)
    young(lake)
    warehouse = lake.again()
    manifest = warehouse.read().manifest
    tables = {one.name[-1]: one for one in manifest.tables.values()}
    expected = survivors(warehouse, floor)
    first = Pin(1, "")
    # Tables have tags, clones and branches of their own.
    more = {name: {*files_of(tables[name], first)} for name in ("l_native", "l_base")}
    # Of what nothing names not even the young stays: the worst that can happen.
    age(lake.root, 30)
    there = everything(lake.root)
    plan, receipt = Cleaner(spark).run(warehouse, before(floor))
    after = everything(lake.root)
    return Zoo(lake, floor, expected, there, plan, receipt, after, tables, more)


def test_everything_that_is_kept_reads_as_before(zoo: Zoo) -> None:
    assert zoo.plan.reclaim.floor == zoo.floor
    assert len(zoo.expected.pins) > 500
    zoo.expected.check(zoo.lake.again())


EXACT = (
    *("l_append", "l_over", "l_delete", "l_index", "l_compact", "l_native", "l_base", "l_clone"),
    *("l_renamed", "l_restored", "l_new", "i_append", "i_over", "i_delete", "i_back", "i_native"),
    *("i_fork", "i_renamed", "i_restored", "i_new", "i_held", "i_gone", "i_made_there"),
)


@pytest.mark.parametrize("name", EXACT)
def test_of_a_table_nothing_is_left_but_what_is_needed(zoo: Zoo, name: str) -> None:
    zoo.exactly(name)


@pytest.mark.parametrize(
    "name", ["l_over", "l_native", "l_base", "l_renamed", "i_over", "i_renamed", "i_gone", "i_fork"]
)
def test_what_was_overwritten_long_ago_is_gone(zoo: Zoo, name: str) -> None:
    assert zoo.goes(name) >= 3


@pytest.mark.parametrize("name", ["l_dropped", "i_dropped", "l_branched", "l_tagged", "l_late"])
def test_nothing_goes_of_a_table_that_was_dropped_and_may_come_back(zoo: Zoo, name: str) -> None:
    assert zoo.goes(name) == 0


def test_only_files_of_tables_and_of_the_log_go(zoo: Zoo) -> None:
    kinds = {one.split("/")[0] for one in zoo.before - zoo.after}
    assert kinds == {"__manifest", "tables"}
    made = set(zoo.after - zoo.before)
    assert {one.split("/")[0] for one in made if not one.endswith(".metadata.json")} == {
        "__manifest"
    }


def test_of_the_log_the_entries_stay_that_refs_are_read_through(zoo: Zoo) -> None:
    log = zoo.lake.root / "__manifest"
    versions = {2**64 - 1 - int(path.stem) for path in (log / "_versions").iterdir()}
    head = zoo.lake.again().refresh().manifest
    held = head.tags["middle"].version, head.tags["of-held"].version, head.branches["dev"].base
    kept = {version for version in versions if version < zoo.floor}
    # The branch that was tagged and deleted began two versions after the one that is there.
    assert kept == {*held, head.branches["dev"].base + 2}
    assert versions - kept == {*range(zoo.floor, head.version + 1)}
    points = sorted(int(path.stem) for path in (log / "_checkpoints").iterdir())
    assert all(any(point <= version for point in points) for version in versions if version > 40)
    assert len(list((log / "_transactions").iterdir())) <= head.version - zoo.floor + 2


def test_a_version_that_a_tag_holds_of_one_branch_is_not_held_of_another(zoo: Zoo) -> None:
    warehouse = zoo.lake.again()
    version = warehouse.refresh().manifest.tags["of-held"].version
    with pytest.raises(NotFound) as raised:
        warehouse.read(version=version, branch="main")
    assert raised.value.kind is ErrorKind.RECLAIMED
    with pytest.raises(NotFound) as raised:
        warehouse.create_tag("late", version=version, branch="dev")
    assert raised.value.kind is ErrorKind.RECLAIMED
    with pytest.raises(NotFound) as raised:
        warehouse.create_branch("late", version=version, source="main")
    assert raised.value.kind is ErrorKind.RECLAIMED


def test_a_second_run_does_nothing_and_makes_no_version(zoo: Zoo, spark: SparkSession) -> None:
    warehouse = zoo.lake.again()
    there, version = everything(zoo.lake.root), warehouse.refresh().version
    plan, receipt = Cleaner(spark).run(warehouse, before(zoo.floor))
    assert plan.changes == []
    assert receipt.removed.files_removed == receipt.removed.old_versions_removed == 0
    assert everything(zoo.lake.root) == there
    assert zoo.lake.again().refresh().version == version


def test_tables_that_were_dropped_come_back_as_they_were(zoo: Zoo) -> None:
    """The last of these tests: it changes the warehouse."""
    lake, warehouse = zoo.lake, zoo.lake.again()
    lake = Lake(lake.root, warehouse, type(lake.namespace)(warehouse), lake.catalog)
    for name in ("l_dropped", "i_dropped", "l_branched", "l_tagged", "l_late"):
        warehouse.undrop(("db", name))
    assert ids(lake.at("l_dropped")) == [2]
    assert lake.iceberg("i_dropped").scan().to_arrow()["id"].to_pylist() == [2]
    assert [ids(lake.at(one)) for one in ("l_branched", "l_tagged", "l_late")] == [[1], [4], [1]]
    zoo.expected.check(zoo.lake.again())
    # And tables can go back to what the tag holds.
    for name in ("l_over", "l_index", "l_tagged", "i_over", "i_back", "i_held"):
        warehouse.restore(warehouse.read(tag="middle"), ("db", name))
    for name, rows in (("l_over", [2]), ("l_index", [1, 2, 3, 4]), ("l_tagged", [1])):
        assert ids(lake.at(name)) == rows
    for name, rows in (("i_over", [2]), ("i_back", [1, 2]), ("i_held", [1])):
        found = lake.iceberg(name).scan().to_arrow()["id"].to_pylist()
        assert sorted(found) == rows


def ids(found: Any) -> list[int]:
    return sorted(found.to_table()["id"].to_pylist())


# -- dropped tables --------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_table_dropped_on_main_comes_back_although_a_branch_goes_on_with_it(
    tmp_path: Path, cleaner: Cleaner
) -> None:
    """Main had moved on since the branch began: what it had, only the dropped table knows."""
    lake = new_lake(tmp_path / "lake")
    warehouse = lake.warehouse
    lake.create("t", 1)
    warehouse.create_branch("dev")
    lake.iceberg("t", "dev").append(id_rows(2))
    lake.iceberg("t").overwrite(id_rows(3))
    warehouse.drop(("db", "t"))
    floor = floor_here(warehouse)
    for number in (4, 5, 6):
        lake.iceberg("t", "dev").append(id_rows(number))
    warehouse.set_properties({"lakewarden.undrop-for": "90d"})
    expected = survivors(warehouse, floor)
    age(lake.root, 30)
    cleaner.run(lake.again(), before(floor))
    expected.check(lake.again())
    lake.again().undrop(("db", "t"))
    assert rows(lake.iceberg("t")) == [3]
    assert rows(lake.iceberg("t", "dev")) == [1, 2, 4, 5, 6]


def test_a_dropped_table_is_purged_after_its_time_and_forgotten_by_a_later_run(
    tmp_path: Path, cleaner: Cleaner
) -> None:
    lake = new_lake(tmp_path / "lake")
    warehouse = lake.warehouse
    warehouse.set_properties({"lakewarden.undrop-for": "0s"})
    lake.lance("create", "l", 1)
    lake.lance("overwrite", "l", 2)
    lance.dataset(lake.table("l").location).tags.create("mine", 1)
    lake.create("i", 1).overwrite(id_rows(2))
    lake.lance("create", "stays", 1)
    warehouse.create_branch("dev")
    lake.create("there", 1, branch="dev")
    going = [lake.table("l"), lake.table("i")]
    going += (warehouse.read(branch="dev").table(("db", "there")),)
    warehouse.delete_branch("dev")
    for name in ("l", "i"):
        warehouse.drop(("db", name))
    floor = floor_here(warehouse)
    for number in (2, 3, 4):
        lake.lance("append", "stays", number)
    expected = survivors(warehouse, floor)
    plan, _ = cleaner.run(lake.again(), before(floor))
    assert {one.table for one in plan.changes if one.operation is Operation.PURGE} == {
        one.id for one in going
    }
    for name in ("l", "i"):
        with pytest.raises(NotFound):
            lake.again().undrop(("db", name))
        with pytest.raises(NotFound) as raised:
            lake.again().read(version=floor - 1)
        assert raised.value.kind is ErrorKind.RECLAIMED
    plan, _ = cleaner.run(lake.again(), before(floor))
    assert {one.operation for one in plan.changes} == {Operation.FORGET}
    known = lake.again().read().manifest.tables
    for table in going:
        assert table.id not in known
        assert not lake.place(table).exists() or everything(lake.place(table)) == set()
    plan, _ = cleaner.run(lake.again(), before(floor))
    assert plan.changes == []
    expected.check(lake.again())
    tables = {lake.place(one) for one in lake.again().read().manifest.tables.values()}
    left = {one for one in (lake.root / "tables").iterdir() if everything(one)}
    assert left == tables, "there are files of a table that nobody knows any more"


def test_a_table_made_and_dropped_on_a_branch_goes_with_its_files(tmp_path: Path) -> None:
    lake = new_lake(tmp_path / "lake")
    lake.warehouse.set_properties({"lakewarden.undrop-for": "0s"})
    lake.warehouse.create_branch("dev")
    lake.create("t", 1, branch="dev")
    lake.warehouse.drop(("db", "t"), branch="dev")
    lake.warehouse.delete_branch("dev")
    floor = floor_here(lake.warehouse)
    rules = Rules(before_version=floor, keep=1, min_age=NOW)
    for step in range(4):
        lake.warehouse.set_properties({"number": str(step)})
    found = decide(lake.warehouse, rules, SystemClock().now())
    (made,) = found.base.manifest.tables
    assert (found.purge, found.forget) == ((made,), ())


# -- a table in trouble ----------------------------------------------------------------------------


def test_drift_holds_its_own_table_back_and_what_is_not_public_is_published(
    tmp_path: Path, cleaner: Cleaner
) -> None:
    lake = new_lake(tmp_path / "lake")
    for name in ("drifted", "late", "sound"):
        lake.lance("create", name, 1)
        for number in (2, 3, 4):
            lake.lance("overwrite", name, number)
    floor = floor_here(lake.warehouse)
    for name in ("drifted", "late", "sound"):
        lake.lance("overwrite", name, 5)
    drifted = lake.table("drifted")
    lance.write_dataset(id_rows(66), drifted.location, mode="append")
    tampered = Tampered()
    with transaction(reopen(lake.root, opener=tampered)) as tx:
        write(tx.lance, "append", 6, name=("db", "late"))
        write(tx.lance, "append", 7, name=("db", "late"))
        tampered.once(
            "put_if_absent", VERSIONS, lambda: tampered.failing("put_if_absent", "/tables/")
        )
    late = lake.table("late")
    assert ids(lance.dataset(late.location)) == [5]
    there = {path: path.read_bytes() for path in lake.place(drifted).rglob("*") if path.is_file()}
    age(lake.root, 30)
    warehouse = lake.again()
    plan = cleaner.plan(warehouse, before(floor))
    receipt = cleaner.execute(plan, warehouse)
    (failed,) = receipt.failed
    assert (failed.table_key, failed.error_kind) == ("db.drifted", ErrorKind.DRIFT.value)
    after = {path: path.read_bytes() for path in lake.place(drifted).rglob("*") if path.is_file()}
    assert after == there
    assert {one.table_key: one.removed.data_files_removed for one in receipt.tables} == {
        "__manifest": 0,
        "db.drifted": 0,
        "db.late": 3,
        "db.sound": 3,
    }
    assert ids(lance.dataset(late.location)) == [5, 6, 7]
    survivors(lake.again(), floor).check(lake.again())


def test_a_branch_whose_beginning_cannot_be_read_stops_everything(
    tmp_path: Path, cleaner: Cleaner
) -> None:
    lake = new_lake(tmp_path / "lake")
    lake.lance("create", "t", 1)
    lake.warehouse.create_branch("dev")
    base = lake.warehouse.refresh().manifest.branches["dev"].base
    for number in range(2, 6):
        lake.lance("overwrite", "t", number)
    entry = lake.root / "__manifest/_versions" / f"{2**64 - 1 - base:020d}.json"
    assert entry.exists()
    for damage in (lambda: entry.write_bytes(b"{"), entry.unlink):
        damage()
        there = everything(lake.root)
        with pytest.raises(Refused) as raised:
            cleaner.run(lake.again(), before(base + 3))
        assert raised.value.kind is ErrorKind.DAMAGED_REF
        assert everything(lake.root) == there


# -- logs in databases -----------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.nightly)])
def database(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    # Connections that are kept open would outlive the server.
    monkeypatch.setattr(sa, "create_engine", partial(sa.create_engine, poolclass=sa.NullPool))
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/log.db"
    else:
        server = request.getfixturevalue("postgres")
        name = server.database()
        yield server.url(name)
        server.drop(name)


@pytest.mark.nightly
def test_a_log_in_a_database_forgets_what_no_ref_is_read_through(
    database: str, tmp_path: Path, cleaner: Cleaner
) -> None:
    lake = new_lake(tmp_path / "lake", database=database)
    warehouse = lake.warehouse
    lake.lance("create", "l", 1)
    lake.create("i", 1)
    for number in range(2, 18):
        lake.lance("overwrite", "l", number)
        lake.iceberg("i").overwrite(id_rows(number))
        if number == 5:
            warehouse.create_tag("five")
            warehouse.create_branch("lazy")
    floor = floor_here(warehouse)
    lake.lance("append", "l", 20)
    lake.iceberg("i").append(id_rows(20))
    expected = survivors(warehouse, floor)
    cleaner.run(warehouse, before(floor))
    again = reopen(lake.root, database=database)
    expected.check(again)
    head = again.refresh().manifest
    held = {head.tags["five"].version, head.branches["lazy"].base}
    assert {*again.log.handler.versions()} == held | {*range(floor, head.version + 1)}


# -- a table with rules of its own -----------------------------------------------------------------


@pytest.mark.nightly
def test_rules_of_one_table_reclaim_that_table_alone(tmp_path: Path, cleaner: Cleaner) -> None:
    lake = new_lake(tmp_path / "lake")
    warehouse = lake.warehouse
    for name in ("l", "l_other"):
        lake.lance("create", name, 1)
    for name in ("i", "i_other"):
        lake.create(name, 1)
    for number in range(2, 9):
        for name in ("l", "l_other"):
            lake.lance("overwrite", name, number)
        for name in ("i", "i_other"):
            lake.iceberg(name).overwrite(id_rows(number))
        if number == 3:
            warehouse.create_tag("three")
    lance_table, iceberg_table = lake.table("l"), lake.table("i")
    last = {
        number: [
            one.version
            for one in warehouse.history()
            if any(change.table == number and change.after for change in one.transaction.changes)
        ]
        for number in (lance_table.id, iceberg_table.id)
    }
    floors = {lance_table.id: last[lance_table.id][3], iceberg_table.id: last[iceberg_table.id][4]}
    expected = survivors(warehouse, 1, floors)
    rules = {
        lance_table.id: Rules(keep=4, min_age=NOW),
        iceberg_table.id: Rules(keep=5, min_age=NOW),
    }
    plan, receipt = cleaner.run(lake.again(), Request(None, rules), later=timedelta(hours=2))
    assert plan.reclaim.floors == floors
    removed = {one.table_key: one.removed.data_files_removed for one in receipt.tables}
    # The others are read, for they may use files of these.
    assert removed == {"__manifest": 0, "db.i": 2, "db.i_other": 0, "db.l": 3, "db.l_other": 0}
    expected.check(lake.again())
    again = lake.again()
    tag = again.refresh().manifest.tags["three"].version
    for version in range(1, floors[lance_table.id]):
        view = again.read(version=version)
        if lance_table.id not in view.pins or version == tag:
            continue
        with pytest.raises(NotFound) as raised:
            view.table(("db", "l"))
        assert raised.value.kind is ErrorKind.RECLAIMED
        with pytest.raises(NotFound) as raised:
            again.create_tag("late", version=version)
        assert raised.value.kind is ErrorKind.RECLAIMED
        with pytest.raises(NotFound) as raised:
            again.restore(view, ("db", "l"))
        assert raised.value.kind is ErrorKind.RECLAIMED
    assert again.read(tag="three").table(("db", "l")).id == lance_table.id
    plan, receipt = cleaner.run(lake.again(), Request(None, rules), later=timedelta(hours=2))
    assert plan.changes == []
    assert receipt.removed.files_removed == 0


def rows(table: Any) -> list[int]:
    return sorted(table.scan().to_arrow()["id"].to_pylist())
