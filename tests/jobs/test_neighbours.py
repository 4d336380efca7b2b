"""Warehouses of one service whose tables need files of each other: nothing goes that any of them needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pytest

from lakewarden.errors import LakewardenError
from lakewarden.jobs.neighbours import Memory, Neighbourhood
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES
from lakewarden.jobs.sources import IcebergCatalog, open_source
from lakewarden.jobs.tasks import TaskStatus
from lakewarden.jobs.warehouses import Access, WarehouseKind
from lakewarden.maintenance.fleet import Neighbour
from lakewarden.model import Format
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.testing import iceberg, iceberg_oracle, invariants, tables
from lakewarden.warehouse.manifest import Change, Operation, Pin
from tests.jobs.lab import DAY_MS, iceberg_orphans, iceberg_table, lance_table
from tests.warehouse.cleaning import new_lake

if TYPE_CHECKING:
    from tests.jobs.lab import Lab, Registered


def in_another_catalog(lab: Lab, root: Path, metadata_location: str) -> Registered:
    """Register a table in a catalog of its own, and that catalog in the service."""
    with iceberg.catalog(root, "copies") as catalog:
        catalog.create_namespace("db")
        catalog.register_table("db.t", metadata_location)
    access = Access(catalog_properties=iceberg.catalog_properties(root))
    return lab.register(WarehouseKind.ICEBERG, "copies", access)


@pytest.mark.spark
def test_a_shallow_clone_in_another_warehouse_keeps_what_it_needs(lab: Lab, tmp_path: Path) -> None:
    source = lance_table(tmp_path / "lake" / "source.lance", 6)
    clone = tables.clone(source, tmp_path / "dev" / "clone.lance", 2)
    needed = invariants.fingerprints(clone)
    warehouse = lab.lance(tmp_path / "lake")
    lab.lance(tmp_path / "dev")
    warehouse.configure(EXPIRE_SNAPSHOTS, max_snapshot_age_ms=DAY_MS)
    (task,) = warehouse.ask(EXPIRE_SNAPSHOTS, "source")
    lab.run(EXPIRE_SNAPSHOTS)
    assert warehouse.details(task).info.status is TaskStatus.SUCCESS
    invariants.assert_all_versions_read(clone, needed)
    # Of six versions, one stays and one is needed elsewhere.
    assert warehouse.result(task)["deleted_data_files_count"] == 4


@pytest.mark.spark
def test_a_shallow_clone_in_a_warehouse_of_ours_keeps_what_it_needs(
    lab: Lab, tmp_path: Path
) -> None:
    source = lance_table(tmp_path / "lake" / "source.lance", 6)
    own = new_lake(tmp_path / "own")
    made = own.warehouse.declare(("db", "clone"), Format.LANCE)
    lance.dataset(str(source)).shallow_clone(made.location, 2)
    (manifest,) = (own.place(made) / "_versions").glob("*.manifest")
    pin = Pin(lance.dataset(made.location).version, f"_versions/{manifest.name}")
    changes = [Change(Operation.OVERWRITE, made.id, None, pin)]
    own.warehouse.commit(changes, base=own.warehouse.refresh())
    rows = own.at("clone").to_table()
    warehouse = lab.lance(tmp_path / "lake")
    lab.register(WarehouseKind.LAKEWARDEN, str(own.root))
    warehouse.configure(EXPIRE_SNAPSHOTS, max_snapshot_age_ms=DAY_MS)
    (task,) = warehouse.ask(EXPIRE_SNAPSHOTS, "source")
    lab.run(EXPIRE_SNAPSHOTS)
    assert warehouse.result(task)["deleted_data_files_count"] == 4
    assert own.at("clone").to_table().equals(rows)


@pytest.mark.spark
@pytest.mark.parametrize("dropped", [False, True])
def test_a_shallow_clone_that_a_warehouse_of_ours_has_registered_keeps_what_it_needs(
    lab: Lab, tmp_path: Path, *, dropped: bool
) -> None:
    source = lance_table(tmp_path / "lake" / "source.lance", 6)
    clone = tables.clone(source, tmp_path / "elsewhere" / "clone.lance", 2)
    own = new_lake(tmp_path / "own")
    own.namespace.register_table({"id": ["db", "clone"], "location": str(clone)})
    if dropped:
        # It can be brought back.
        own.warehouse.drop(("db", "clone"))
    needed = invariants.fingerprints(clone)
    warehouse = lab.lance(tmp_path / "lake")
    lab.register(WarehouseKind.LAKEWARDEN, str(own.root))
    warehouse.configure(EXPIRE_SNAPSHOTS, max_snapshot_age_ms=DAY_MS)
    (task,) = warehouse.ask(EXPIRE_SNAPSHOTS, "source")
    lab.run(EXPIRE_SNAPSHOTS)
    assert warehouse.result(task)["deleted_data_files_count"] == 4
    invariants.assert_all_versions_read(clone, needed)


@pytest.mark.spark
@pytest.mark.parametrize("queue", [EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES])
def test_a_shallow_clone_of_a_table_of_ours_keeps_what_it_needs(
    lab: Lab, tmp_path: Path, queue: str
) -> None:
    own = new_lake(tmp_path / "own")
    own.lance("create", "points", 0)
    for step in range(1, 8):
        own.lance("overwrite", "points", step)
    clone = tables.clone(own.place("points"), tmp_path / "dev" / "clone.lance", 2)
    needed = invariants.fingerprints(clone)
    warehouse = lab.register(WarehouseKind.LAKEWARDEN, str(own.root))
    lab.lance(tmp_path / "dev")
    lab.later()
    warehouse.configure(queue)
    (task,) = warehouse.ask(queue, "points")
    lab.run(queue)
    details = warehouse.details(task)
    assert details.info.status is TaskStatus.SUCCESS, details.message
    invariants.assert_all_versions_read(clone, needed)
    if queue == EXPIRE_SNAPSHOTS:
        # Of eight versions, three stay and one is needed elsewhere.
        assert warehouse.result(task)["deleted_data_files_count"] == 4
    assert own.at("points").to_table()["id"].to_pylist() == [7]


@pytest.mark.spark
def test_a_table_of_ours_that_lies_in_another_warehouse_is_cleaned_by_its_log(
    lab: Lab, tmp_path: Path
) -> None:
    place = lance_table(tmp_path / "lake" / "old.lance", 2)
    own = new_lake(tmp_path / "own")
    own.namespace.register_table({"id": ["db", "old"], "location": str(place)})
    for step in range(1, 7):
        own.lance("overwrite", "old", step)
    plain, warehouse = (
        lab.lance(tmp_path / "lake"),
        lab.register(WarehouseKind.LAKEWARDEN, str(own.root)),
    )
    lab.later()
    for one in (plain, warehouse):
        one.configure(EXPIRE_SNAPSHOTS)
    (mine,), (its,) = plain.ask(EXPIRE_SNAPSHOTS), warehouse.ask(EXPIRE_SNAPSHOTS, "old")
    lab.run(EXPIRE_SNAPSHOTS)
    assert plain.details(mine).info.status is TaskStatus.FAILED
    assert warehouse.details(its).info.status is TaskStatus.SUCCESS, warehouse.details(its)
    assert warehouse.result(its)["expired_snapshots_count"] > 0
    invariants.assert_no_live_file_missing(place)


@pytest.mark.spark
def test_nothing_goes_while_a_warehouse_that_may_hold_clones_is_away(
    lab: Lab, tmp_path: Path
) -> None:
    """Its disk is not mounted: what is on it still needs what it needs."""
    source = lance_table(tmp_path / "lake" / "source.lance", 6)
    tables.clone(source, tmp_path / "dev" / "clone.lance", 2)
    warehouse, dev = lab.lance(tmp_path / "lake"), lab.lance(tmp_path / "dev")
    dev.tables()
    shutil.move(tmp_path / "dev", tmp_path / "away")
    (tmp_path / "dev").mkdir()
    before = invariants.files(source)
    warehouse.configure(EXPIRE_SNAPSHOTS, max_snapshot_age_ms=DAY_MS)
    (task,) = warehouse.ask(EXPIRE_SNAPSHOTS, "source")
    lab.run(EXPIRE_SNAPSHOTS)
    assert "may need files of this one" in str(warehouse.attempts(task)[0].message)
    assert warehouse.details(task).info.status is TaskStatus.SCHEDULED
    assert invariants.files(source) == before


def assert_left_alone(lab: Lab, warehouse: Registered, queue: str, name: str, copy: str) -> None:
    """Run a task on a table that another catalog knows, and see that nothing goes of either."""
    warehouse.configure(queue)
    (task,) = warehouse.ask(queue, name)
    lab.run(queue)
    details = warehouse.details(task)
    assert details.info.status is TaskStatus.FAILED
    assert "a file of one may be needed by the other" in str(details.message)
    assert iceberg_oracle.missing(iceberg_oracle.opened(copy)) == set()


@pytest.mark.spark
@pytest.mark.parametrize("queue", [EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES])
def test_a_table_in_two_catalogs_keeps_what_either_needs(
    lab: Lab, tmp_path: Path, queue: str
) -> None:
    table = iceberg_table(tmp_path / "one", "t")
    warehouse = lab.iceberg(tmp_path / "one")
    in_another_catalog(lab, tmp_path / "two", table.metadata_location)
    with iceberg.catalog(tmp_path / "two", "copies") as catalog:
        # Of this snapshot, the first catalog knows nothing.
        iceberg.append(catalog.load_table("db.t"), 900)
        copy = catalog.load_table("db.t").metadata_location
    iceberg.age(iceberg.local(table.location()), 30)
    assert_left_alone(lab, warehouse, queue, "t", copy)


@pytest.mark.spark
@pytest.mark.parametrize("queue", [EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES])
def test_a_table_of_ours_that_another_catalog_knows_keeps_what_either_needs(
    lab: Lab, tmp_path: Path, queue: str
) -> None:
    own = new_lake(tmp_path / "own")
    own.create("lines", 0)
    for step in range(1, 8):
        own.iceberg("lines").append(tables.rows(step).select(["id"]))
    warehouse = lab.register(WarehouseKind.LAKEWARDEN, str(own.root))
    in_another_catalog(lab, tmp_path / "two", own.iceberg("lines").metadata_location)
    with iceberg.catalog(tmp_path / "two", "copies") as catalog:
        catalog.load_table("db.t").append(tables.rows(9).select(["id"]))
        copy = catalog.load_table("db.t").metadata_location
    lab.later()
    assert_left_alone(lab, warehouse, queue, "lines", copy)


@pytest.mark.spark
def test_a_catalog_that_is_registered_twice_is_one(lab: Lab, tmp_path: Path) -> None:
    table = iceberg_table(tmp_path, "t")
    left = iceberg_orphans(table)
    warehouse = lab.iceberg(tmp_path)
    access = Access(catalog_properties=iceberg.catalog_properties(tmp_path))
    lab.warehouses.register("again", WarehouseKind.ICEBERG, "lake", access=access)
    warehouse.configure(REMOVE_ORPHAN_FILES)
    (task,) = warehouse.ask(REMOVE_ORPHAN_FILES, "t")
    lab.run(REMOVE_ORPHAN_FILES)
    assert warehouse.result(task)["deleted_count"] == len(left)


def test_nothing_goes_while_another_catalog_does_not_answer(bare_lab: Lab, tmp_path: Path) -> None:
    table = iceberg_table(tmp_path / "one", "t")
    warehouse = bare_lab.iceberg(tmp_path / "one")
    in_another_catalog(bare_lab, tmp_path / "two", table.metadata_location)
    (tmp_path / "two" / "catalog.db").write_bytes(b"none")
    warehouse.configure(EXPIRE_SNAPSHOTS)
    (task,) = warehouse.ask(EXPIRE_SNAPSHOTS, "t")
    bare_lab.run(EXPIRE_SNAPSHOTS)
    said = str(warehouse.attempts(task)[0].message)
    assert "may need files of this one" in said
    # What was given to reach it is nobody's to read.
    assert "catalog.db" not in said


def test_nothing_goes_while_another_catalog_shows_none_of_its_tables(
    bare_lab: Lab, tmp_path: Path
) -> None:
    """Its database was restored from long ago, or nobody may list it any more."""
    table = iceberg_table(tmp_path / "one", "t")
    warehouse = bare_lab.iceberg(tmp_path / "one")
    in_another_catalog(bare_lab, tmp_path / "two", table.metadata_location).tables()
    with iceberg.catalog(tmp_path / "two", "copies") as catalog:
        catalog.drop_table("db.t")
    warehouse.configure(EXPIRE_SNAPSHOTS)
    (task,) = warehouse.ask(EXPIRE_SNAPSHOTS, "t")
    bare_lab.run(EXPIRE_SNAPSHOTS)
    assert "shows no table, where tables were" in str(warehouse.attempts(task)[0].message)


def test_metadata_of_other_catalogs_is_read_once(bare_lab: Lab, tmp_path: Path) -> None:
    table = iceberg_table(tmp_path / "one", "t")
    warehouse = bare_lab.iceberg(tmp_path / "one")
    in_another_catalog(bare_lab, tmp_path / "two", table.metadata_location)
    info, memory = warehouse.info, Memory()
    access = bare_lab.warehouses.access(info.id)

    def seen() -> tuple[Neighbour, ...]:
        around = Neighbourhood.of(bare_lab.warehouses, info, access, memory)
        source = around.seen_by(open_source(info, access))
        assert isinstance(source, IcebergCatalog)
        return source.beside

    first = seen()
    assert [one.summary is not None for one in first] == [True]
    # Nobody looks at it again, until the catalog names another.
    iceberg.local(table.metadata_location).rename(tmp_path / "away")
    assert seen() == first
    (tmp_path / "away").rename(iceberg.local(table.metadata_location))
    with iceberg.catalog(tmp_path / "two", "copies") as catalog:
        iceberg.append(catalog.load_table("db.t"), 900)
    (moved,) = seen()
    assert moved.pointer.metadata_location != first[0].pointer.metadata_location


def test_a_place_apart_is_reached_with_its_own_options_alone() -> None:
    lake, dev = Location.parse("s3://lake/a"), Location.parse("s3://lake/dev")
    opener = Opener({"no_such_option": "1"}, apart={dev: {"aws_region": "eu-west-1"}})
    opener(dev.child("clone.lance"))
    with pytest.raises(LakewardenError, match="no_such_option"):
        opener(lake.child("t.lance"))
