"""Cleanup of a warehouse where tables, branches and writers meet in ways that nobody plans for."""

from __future__ import annotations

from pathlib import Path

import lance
import pytest
from pyspark.sql import SparkSession

from lakewarden.errors import Conflict, ErrorKind, LakewardenError
from lakewarden.maintenance.warehouse import Request
from lakewarden.model import WAREHOUSE_MARK
from lakewarden.warehouse import commit as commit_module
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.reclaiming import Rules
from lakewarden.warehouse.transaction import transaction
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.cleaning import NOW, Cleaner, Lake, before, floor_here, new_lake
from tests.warehouse.lakes import id_rows, on_branch, write
from tests.warehouse.survivors import path_of, survivors

pytestmark = pytest.mark.spark


@pytest.fixture
def cleaner(spark: SparkSession) -> Cleaner:
    return Cleaner(spark)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return new_lake(tmp_path / "lake")


def settled(lake: Lake) -> int:
    """Return a version that can be the floor: the last three stay in any case."""
    floor = floor_here(lake.again())
    for step in range(2):
        lake.again().set_properties({"step": str(step)})
    return floor


def ids(lake: Lake, name: str, branch: str = "main") -> list[int]:
    namespace = Namespace(lake.again(), branch=branch)
    found = lance.dataset(namespace_client=namespace, table_id=["db", name])
    return sorted(found.to_table()["id"].to_pylist())


# -- files that another table uses -----------------------------------------------------------------


def shared(lake: Lake) -> None:
    """Let table b use a data file of table a, which then goes on without it."""
    a, b = lake.create("a", 1), lake.create("b")
    (file,) = [one.file.file_path for one in a.scan().plan_files()]
    b.add_files([file])
    for number in range(2, 6):
        lake.iceberg("a").overwrite(id_rows(number))


@pytest.mark.nightly
def test_a_table_that_is_due_leaves_what_another_uses(lake: Lake, cleaner: Cleaner) -> None:
    shared(lake)
    rules = {lake.table("a").id: Rules(keep=3, min_age=NOW)}
    plan, _ = cleaner.run(lake.again(), Request(None, rules))
    assert plan.reclaim.floors
    assert lake.iceberg("b").scan().to_arrow()["id"].to_pylist() == [1]


def test_a_table_that_can_come_back_keeps_what_it_uses_of_others(
    lake: Lake, cleaner: Cleaner
) -> None:
    shared(lake)
    lake.again().drop(("db", "b"))
    cleaner.run(lake.again(), before(settled(lake)))
    lake.again().undrop(("db", "b"))
    assert lake.iceberg("b").scan().to_arrow()["id"].to_pylist() == [1]


@pytest.mark.nightly
def test_a_table_that_only_a_tag_has_keeps_what_it_uses_of_others(
    lake: Lake, cleaner: Cleaner
) -> None:
    shared(lake)
    lake.again().create_tag("mine")
    lake.again().drop(("db", "b"))
    cleaner.run(lake.again(), before(settled(lake)))
    tagged = lake.again().read(tag="mine")
    lake.again().restore(tagged, ("db", "b"))
    assert lake.iceberg("b").scan().to_arrow()["id"].to_pylist() == [1]


# -- what looks back -------------------------------------------------------------------------------


@pytest.mark.nightly
def test_going_back_counts_whatever_follows_it_in_a_transaction(
    lake: Lake, cleaner: Cleaner
) -> None:
    lake.lance("create", "t", 1)
    for number in range(2, 6):
        lake.lance("overwrite", "t", number)
    floor = settled(lake)
    plan = cleaner.plan(lake.again(), before(floor))

    def load() -> None:
        with transaction(lake.again()) as tx:
            where = {"namespace_client": tx.lance, "table_id": ["db", "t"]}
            lance.dataset(**where, version=2).restore()
            write(tx.lance, "append", 9, name=("db", "t"))
            cleaner.execute(plan, lake.again())

    with pytest.raises(Conflict):
        load()
    assert ids(lake, "t") == [5]


def test_a_table_that_comes_with_files_between_plan_and_reclaim_stops_it(
    tmp_path: Path, lake: Lake, cleaner: Cleaner
) -> None:
    """It may be a clone of what is about to go."""
    lake.lance("create", "t", 1)
    for number in range(2, 6):
        lake.lance("overwrite", "t", number)
    plan = cleaner.plan(lake.again(), before(settled(lake)))
    place = str(tmp_path / "clone.lance")
    lance.dataset(lake.table("t").location, version=2).shallow_clone(place, reference=2)
    Namespace(lake.again()).register_table({"id": ["db", "clone"], "location": place})
    with pytest.raises(Conflict):
        cleaner.execute(plan, lake.again())
    cleaner.run(lake.again(), before(settled(lake)))
    assert ids(lake, "clone") == [2]


# -- branches --------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_branch_is_written_for_the_first_time_after_a_cleanup(
    lake: Lake, cleaner: Cleaner
) -> None:
    """What its metadata remembers of older snapshots is gone, and nobody needs it."""
    lake.create("i", 1)
    for number in range(2, 6):
        lake.iceberg("i").overwrite(id_rows(number))
    lake.again().create_branch("dev")
    for number in range(6, 9):
        lake.iceberg("i").overwrite(id_rows(number))
    cleaner.run(lake.again(), before(settled(lake)))
    on_branch(lake.root, "dev").load_table("db.i").append(id_rows(50))
    lake.iceberg("i").overwrite(id_rows(9))
    floor = settled(lake)
    expected = survivors(lake.again(), floor)
    cleaner.run(lake.again(), before(floor))
    expected.check(lake.again())
    found = on_branch(lake.root, "dev").load_table("db.i").scan().to_arrow()
    assert sorted(found["id"].to_pylist()) == [5, 50]


def test_a_branch_made_again_from_its_own_tag_goes_on(lake: Lake) -> None:
    lake.again().create_branch("dev")
    write(Namespace(lake.again(), branch="dev"), "create", 1, name=("db", "t"))
    lake.again().create_tag("mine", branch="dev")
    write(Namespace(lake.again(), branch="dev"), "append", 2, name=("db", "t"))
    lake.again().delete_branch("dev")
    tagged = lake.again().read(tag="mine")
    lake.again().create_branch("dev", version=tagged.version, source="dev")
    write(Namespace(lake.again(), branch="dev"), "append", 3, name=("db", "t"))
    assert ids(lake, "t", "dev") == [1, 3]
    lake.again().delete_branch("dev")


def test_a_table_dropped_on_both_branches_comes_back_after_its_last_version(lake: Lake) -> None:
    lake.lance("create", "t", 1)
    lake.again().create_branch("dev")
    write(Namespace(lake.again(), branch="dev"), "append", 2, name=("db", "t"))
    first = lake.again().read(branch="dev")
    write(Namespace(lake.again(), branch="dev"), "append", 3, name=("db", "t"))
    lake.again().drop(("db", "t"), branch="dev")
    lake.again().drop(("db", "t"))
    lake.again().restore(first, ("db", "t"))
    assert ids(lake, "t", "dev") == [1, 2]
    write(Namespace(lake.again(), branch="dev"), "append", 4, name=("db", "t"))
    assert ids(lake, "t", "dev") == [1, 2, 4]


# -- tables of others ------------------------------------------------------------------------------


def test_a_table_that_was_let_go_is_left_to_its_new_owner(
    tmp_path: Path, lake: Lake, cleaner: Cleaner
) -> None:
    place = tmp_path / "outside.lance"
    lance.write_dataset(id_rows(1), place)
    lake.namespace.register_table({"id": ["db", "t"], "location": str(place)})
    lake.namespace.deregister_table({"id": ["db", "t"]})
    other = Namespace(Warehouse.init(str(tmp_path / "other")))
    other.register_table({"id": ["t"], "location": str(place)})
    mark = (place / WAREHOUSE_MARK).read_bytes()
    lake.again().set_properties({"lakewarden.undrop-for": "0s"})
    plan, _ = cleaner.run(lake.again(), before(settled(lake)))
    assert len(plan.reclaim.forget) == 1
    assert (place / WAREHOUSE_MARK).read_bytes() == mark


def test_files_that_somebody_else_writes_to_a_registered_table_stay(
    lake: Lake, cleaner: Cleaner, tmp_path: Path
) -> None:
    """Its old catalog may still be in use."""
    made = new_lake(tmp_path / "first").create("i", 1)
    lake.catalog.register_table("db.i", made.metadata_location)
    for number in range(2, 6):
        lake.iceberg("i").overwrite(id_rows(number))
    stray = path_of(made.location()) / "data/somebody-elses.parquet"
    stray.write_bytes(b"theirs")
    cleaner.run(lake.again(), before(settled(lake), delete_unverified=True))
    assert stray.read_bytes() == b"theirs"
    assert lake.iceberg("i").scan().to_arrow()["id"].to_pylist() == [5]


# -- damage ----------------------------------------------------------------------------------------


def test_a_version_that_is_missing_above_the_floor_stops_everything(
    tmp_path: Path, cleaner: Cleaner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_module, "CHECKPOINT_EVERY", 2)
    lake = new_lake(tmp_path / "lake")
    lake.create("i", 1)
    floor = floor_here(lake.again())
    for number in range(2, 10):
        lake.iceberg("i").append(id_rows(number))
    newest = lake.again().refresh().version
    for version in range(newest - 6, newest - 3):
        (lake.root / "__manifest/_versions" / f"{2**64 - 1 - version:020d}.json").unlink()
    with pytest.raises(LakewardenError) as raised:
        cleaner.run(lake.again(), before(floor))
    assert raised.value.kind is ErrorKind.HISTORY_GAP


def test_a_tag_whose_metadata_is_gone_holds_its_table_back(lake: Lake, cleaner: Cleaner) -> None:
    lake.create("i", 1)
    lake.iceberg("i").overwrite(id_rows(2))
    lake.again().create_tag("mine")
    (pin,) = lake.again().read(tag="mine").pins.values()
    for number in range(3, 6):
        lake.iceberg("i").overwrite(id_rows(number))
    # Somebody has expired it in the table, so that only the tag's own metadata knows it.
    table = lake.iceberg("i")
    current = table.current_snapshot()
    assert current is not None
    old = [one.snapshot_id for one in table.snapshots() if one != current]
    table.maintenance.expire_snapshots().by_ids(old).commit()
    path_of(pin.path).unlink()
    warehouse = lake.again()
    receipt = cleaner.execute(cleaner.plan(warehouse, before(settled(lake))), warehouse)
    assert {one.table_key for one in receipt.failed} == {"db.i"}
    assert {one.removed.data_files_removed for one in receipt.tables} == {0}
