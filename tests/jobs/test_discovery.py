"""Tables are found where they are, and their commits are noticed, at one request for each table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lance
import pytest
import sqlalchemy as sa

from lakewarden.errors import LakewardenError, NotFound
from lakewarden.jobs.commits import Change
from lakewarden.jobs.discovery import NewPlace, check_place, discover
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS, OPTIMIZE, REMOVE_ORPHAN_FILES
from lakewarden.jobs.refusals import RequestRefused
from lakewarden.jobs.schema import TASK_CONFIG, WAREHOUSE
from lakewarden.jobs.sources import LanceDirectory, OwnTables, open_source
from lakewarden.jobs.tasks import EntityType, TaskStatus
from lakewarden.jobs.warehouses import Access, WarehouseKind
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import Request, Store
from lakewarden.testing import iceberg, tables
from tests.jobs.lab import Lab, Registered, iceberg_table, lance_table
from tests.warehouse.cleaning import new_lake


@pytest.fixture
def lab(bare_lab: Lab) -> Lab:
    return bare_lab


def test_lance_tables_of_a_directory_come_and_go(lab: Lab, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    lance_table(lake / "a.lance", 1)
    lance_table(lake / "deep" / "b.lance", 1)
    warehouse = lab.lance(lake)
    found = warehouse.tables()
    assert {name: one.name for name, one in found.items()} == {
        "a": ("a.lance",),
        "b": ("deep", "b.lance"),
    }
    assert {one.type for one in found.values()} == {EntityType.GENERIC_TABLE}
    (lake / "a.lance").rename(tmp_path / "away")
    assert warehouse.tables().keys() == {"b"}
    (tmp_path / "away").rename(lake / "a.lance")
    assert warehouse.tables()["a"].id == found["a"].id


def test_tables_of_a_catalog_and_of_a_warehouse_are_found(lab: Lab, tmp_path: Path) -> None:
    iceberg_table(tmp_path, "t", 1)
    catalog = lab.iceberg(tmp_path)
    assert catalog.tables()["t"].target == "iceberg://lake/db.t"
    assert catalog.tables()["t"].type is EntityType.TABLE
    lake = new_lake(tmp_path / "wh")
    lake.lance("create", "points", 1)
    lake.create("lines", 1)
    own = lab.register(WarehouseKind.LAKEWARDEN, str(lake.root)).tables()
    assert {name: one.type for name, one in own.items()} == {
        "points": EntityType.GENERIC_TABLE,
        "lines": EntityType.TABLE,
    }


def test_commits_queue_what_they_make_worthwhile_once(lab: Lab, tmp_path: Path) -> None:
    lance_table(tmp_path / "lake" / "t.lance", 25)
    iceberg_table(tmp_path, "t", 12)
    directory, catalog = lab.lance(tmp_path / "lake"), lab.iceberg(tmp_path)
    for warehouse in (directory, catalog):
        for queue in (EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES):
            warehouse.configure(queue)
        first = lab.discovery.detect(warehouse.info.id)
        assert {one.queue for one in first if one.task_id is not None} == {
            EXPIRE_SNAPSHOTS,
            REMOVE_ORPHAN_FILES,
        }
        # The same commits, seen again, are no news.
        assert lab.discovery.detect(warehouse.info.id) == []


def test_new_commit_is_noticed_in_every_kind_of_warehouse(lab: Lab, tmp_path: Path) -> None:
    place = tables.appended(tmp_path / "lake" / "t.lance", 2)
    table = iceberg_table(tmp_path, "t", 1)
    lake = new_lake(tmp_path / "wh")
    lake.lance("create", "points", 1)
    kinds: list[tuple[Registered, Callable[[], object]]] = [
        (lab.lance(tmp_path / "lake"), lambda: tables.append(place, 100)),
        (lab.iceberg(tmp_path), lambda: iceberg.append(table, 100)),
        (
            lab.register(WarehouseKind.LAKEWARDEN, str(lake.root)),
            lambda: lake.lance("append", "points", 2),
        ),
    ]
    for warehouse, commit in kinds:
        lab.discovery.detect(warehouse.info.id)
        (before,) = lab.warehouses.tables(warehouse.info.id)
        commit()
        lab.discovery.detect(warehouse.info.id)
        (after,) = lab.warehouses.tables(warehouse.info.id)
        assert before.marker is not None
        assert after.marker != before.marker
        assert after.id == before.id


def test_scattered_table_is_worth_optimizing(lab: Lab, tmp_path: Path) -> None:
    tables.appended(tmp_path / "lake" / "many.lance", 30)
    tables.appended(tmp_path / "lake" / "few.lance", 2)
    warehouse = lab.lance(tmp_path / "lake")
    warehouse.configure(OPTIMIZE)
    found = {one.table_id: one for one in lab.discovery.detect(warehouse.info.id)}
    known = warehouse.tables()
    assert found[known["many"].id].task_id is not None
    assert found[known["few"].id].task_id is None


def test_properties_that_were_seen_survive_a_refresh(lab: Lab, tmp_path: Path) -> None:
    iceberg_table(tmp_path, "t", 1, **{"gc.enabled": "false"})
    warehouse = lab.iceberg(tmp_path)
    lab.discovery.detect(warehouse.info.id)
    assert warehouse.tables()["t"].properties["gc.enabled"] == "false"


def test_marker_of_a_lance_table_costs_one_request(lab: Lab, tmp_path: Path) -> None:
    place = tables.appended(tmp_path / "lake" / "t.lance", 5)
    warehouse = lab.lance(tmp_path / "lake")
    opened: list[Store] = []

    class Counting(Opener):
        def __call__(self, location: Location) -> Store:
            opened.append(super().__call__(location))
            return opened[-1]

    source = LanceDirectory(Location.parse(str(tmp_path / "lake")), Counting())
    marker = source.marker(warehouse.tables()["t"])
    counted = [store.requests.drain() for store in opened]
    assert counted == [{Request.LIST: 1}]
    assert marker.startswith(f"{lance.dataset(str(place)).version}@")


def test_old_names_of_manifests_are_compared_by_number(lab: Lab, tmp_path: Path) -> None:
    tables.old_naming(tmp_path / "lake" / "t.lance", 11)
    warehouse = lab.lance(tmp_path / "lake")
    source = open_source(warehouse.info, lab.warehouses.access(warehouse.info.id))
    assert source.marker(warehouse.tables()["t"]).startswith("11@")


def test_log_of_a_warehouse_is_read_once_for_all_markers(lab: Lab, tmp_path: Path) -> None:
    lake = new_lake(tmp_path / "wh")
    for name in ("a", "b", "c"):
        lake.lance("create", name, 1)
    warehouse = lab.register(WarehouseKind.LAKEWARDEN, str(lake.root))
    found = warehouse.tables()
    source = open_source(warehouse.info, lab.warehouses.access(warehouse.info.id))
    assert isinstance(source, OwnTables)
    source.warehouse.log.store.requests.drain()
    assert len({source.marker(one) for one in found.values()}) == 3
    assert source.warehouse.log.store.requests.drain() == {}


def test_a_service_that_dies_before_the_task_is_written_finds_the_commit_again(
    lab: Lab, tmp_path: Path
) -> None:
    lake = new_lake(tmp_path / "wh")
    lake.lance("create", "points", 0)
    warehouse = lab.register(WarehouseKind.LAKEWARDEN, str(lake.root))
    warehouse.configure(OPTIMIZE, min_files=2)
    lab.discovery.detect(warehouse.info.id)
    (before,) = lab.warehouses.tables(warehouse.info.id)
    for step in range(1, 4):
        lake.lance("append", "points", step)
    refuse = (
        "CREATE TRIGGER dies BEFORE INSERT ON task BEGIN SELECT RAISE(ABORT, 'out of power'); END"
    )
    with lab.database.writing() as connection:
        connection.exec_driver_sql(refuse)
    for _ in range(2):
        with pytest.raises(LakewardenError, match="out of power"):
            lab.discovery.detect(warehouse.info.id)
    assert [one.marker for one in lab.warehouses.tables(warehouse.info.id)] == [before.marker]
    with lab.database.writing() as connection:
        connection.exec_driver_sql("DROP TRIGGER dies")
    (found,) = lab.discovery.detect(warehouse.info.id)
    assert found.task_id is not None
    (after,) = lab.warehouses.tables(warehouse.info.id)
    assert after.marker != before.marker
    assert lab.discovery.detect(warehouse.info.id) == []


def test_warehouse_that_cannot_be_read_does_not_hold_up_others(lab: Lab, tmp_path: Path) -> None:
    lance_table(tmp_path / "lake" / "t.lance", 25)
    broken = lab.register(WarehouseKind.LAKEWARDEN, str(tmp_path / "nothing"))
    fine = lab.lance(tmp_path / "lake")
    fine.configure(REMOVE_ORPHAN_FILES)
    lab.discovery.detect_all()
    assert lab.warehouses.tables(broken.info.id) == []
    (table,) = lab.warehouses.tables(fine.info.id)
    assert table.marker is not None


def test_trouble_of_any_kind_with_one_warehouse_is_its_own(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("a", "b", "c")
    for name in names:
        lance_table(tmp_path / name / "t.lance", 1)
    config, access, fine = (lab.lance(tmp_path / name) for name in names)
    config.configure(REMOVE_ORPHAN_FILES)
    # What a later release might write.
    with lab.database.writing() as connection:
        connection.execute(sa.update(TASK_CONFIG).values(config=["of", "another", "form"]))
        mine = sa.update(WAREHOUSE).where(WAREHOUSE.c.id == access.info.id)
        connection.execute(mine.values(access={"keys": {"secret": "sk-7f3a91bc"}}))
    lab.discovery.detect_all()
    (table,) = lab.warehouses.tables(fine.info.id)
    assert table.marker is not None
    told = [one.getMessage() for one in caplog.records]
    assert [one.split(" could ")[0] for one in told] == [
        f"warehouse {config.info.name}",
        f"warehouse {access.info.name}",
    ]
    assert "sk-7f3a91bc" not in caplog.text


def test_what_was_given_to_reach_a_warehouse_is_in_no_log_and_no_report(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "sk-7f3a91bc"
    # A store's own words may repeat anything; here the place does.
    place = lance_table(tmp_path / secret / "t.lance", 1)
    access = Access({"aws_secret_access_key": secret})
    warehouse = lab.register(WarehouseKind.LANCE, str(tmp_path / secret), access)
    warehouse.configure(EXPIRE_SNAPSHOTS)
    (task,) = warehouse.ask(EXPIRE_SNAPSHOTS)
    for manifest in (place / "_versions").iterdir():
        manifest.write_bytes(b"nonsense")
    lab.discovery.detect(warehouse.info.id)
    assert "could not be looked at: " in caplog.text
    lab.run(EXPIRE_SNAPSHOTS)
    details = warehouse.details(task)
    assert details.info.status is TaskStatus.FAILED
    assert "…/t.lance cannot be opened" in str(details.message)
    assert secret not in f"{details} {caplog.text}"


def test_damaged_table_keeps_no_other_from_being_found(lab: Lab, tmp_path: Path) -> None:
    place = lance_table(tmp_path / "lake" / "bad.lance", 1)
    good = lance_table(tmp_path / "lake" / "good.lance", 1)
    lance.dataset(str(good)).update_config({"lakewarden.optimize.enabled": "true"})
    for manifest in (place / "_versions").iterdir():
        manifest.write_bytes(b"nonsense")
    found = lab.lance(tmp_path / "lake").tables()
    assert found.keys() == {"bad", "good"}
    assert found["good"].properties == {"lakewarden.optimize.enabled": "true"}


@pytest.mark.parametrize("by", ["detect", "refresh"])
def test_commit_that_is_written_down_meanwhile_is_not_undone(
    lab: Lab, tmp_path: Path, by: str
) -> None:
    place = lance_table(tmp_path / "lake" / "t.lance", 1)
    lance.dataset(str(place)).update_config({"owner": "ada"})
    warehouse = lab.lance(tmp_path / "lake")
    (table,) = warehouse.tables().values()
    assert (table.properties, table.marker) == ({"owner": "ada"}, None)
    if by == "detect":
        # Nobody but the commit can say what it says now.
        for manifest in (place / "_versions").iterdir():
            manifest.write_bytes(b"nonsense")
    commit = Change(table.id, "m1", lab.database.clock.now(), {"gc.enabled": "false"})
    found = lab.discovery.find(warehouse.info.id)
    reads: list[str] = []

    def between(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        reads.append(statement)
        if "FROM entity" in statement and sum("FROM entity" in one for one in reads) == 1:
            lab.discovery.commits.record(warehouse.scope, [commit])

    sa.event.listen(lab.database.engine, "after_cursor_execute", between)
    try:
        if by == "detect":
            lab.discovery.detect(warehouse.info.id)
        else:
            changed = [replace(one, properties={"owner": "eve"}) for one in found]
            lab.warehouses.refresh(warehouse.info.id, changed)
    finally:
        sa.event.remove(lab.database.engine, "after_cursor_execute", between)
    (after,) = lab.warehouses.tables(warehouse.info.id)
    assert (after.properties, after.marker) == ({"gc.enabled": "false"}, "m1")
    # Nor by who looks later, but asked the table before.
    lab.warehouses.refresh(warehouse.info.id, found)
    assert lab.warehouses.tables(warehouse.info.id) == [after]


def test_what_a_log_of_ours_says_of_a_table_is_noticed(lab: Lab, tmp_path: Path) -> None:
    lake = new_lake(tmp_path / "wh")
    lake.lance("create", "points", 1)
    own = lab.register(WarehouseKind.LAKEWARDEN, str(lake.root))
    lab.discovery.detect(own.info.id)
    off = {"lakewarden.optimize.enabled": "false"}
    # No version of the table is made by this.
    lake.warehouse.set_properties(off, ("db", "points"))
    lab.discovery.detect(own.info.id)
    (table,) = lab.warehouses.tables(own.info.id)
    assert table.properties == off
    lake.warehouse.set_properties(dict.fromkeys(off), ("db", "points"))
    lab.discovery.detect(own.info.id)
    (table,) = lab.warehouses.tables(own.info.id)
    assert table.properties == {}


def test_only_some_tables_are_asked_while_somebody_waits(lab: Lab, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    for name in ("a", "b", "c"):
        lance_table(lake / f"{name}.lance", 1)
        lance.dataset(str(lake / f"{name}.lance")).update_config({"owner": name})
    place = check_place(WarehouseKind.LANCE, str(lake), Access())
    found = discover(place, Access(), asked_max=2)
    assert [one.properties for one in found] == [{"owner": "a"}, {"owner": "b"}, None]
    warehouse = lab.lance(lake)
    hasty = replace(lab.discovery, asked_max=1)
    for _ in range(2):
        lab.warehouses.refresh(warehouse.info.id, hasty.find(warehouse.info.id))
    known = lab.warehouses.tables(warehouse.info.id)
    assert [one.properties for one in known] == [{"owner": "a"}, {}, {}]
    # The detector asks them all, and from then on nobody who waits asks them again.
    lab.discovery.detect(warehouse.info.id)
    known = lab.warehouses.tables(warehouse.info.id)
    assert [one.properties for one in known] == [{"owner": "a"}, {"owner": "b"}, {"owner": "c"}]
    assert [one.properties for one in lab.discovery.find(warehouse.info.id)] == [None] * 3


def test_table_whose_storage_says_no_keeps_no_other_from_being_found(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("bad", "good"):
        iceberg_table(tmp_path, name, 1, **{"gc.enabled": "false"})
    properties = iceberg.catalog_properties(tmp_path)
    engine = sa.create_engine(properties["uri"])
    elsewhere = sa.text(
        "UPDATE iceberg_tables SET metadata_location = 's3://bucket/m.json' WHERE table_name = :name"
    )
    with engine.begin() as connection:
        connection.execute(elsewhere, {"name": "bad"})
    nobody = {"aws_endpoint": "http://127.0.0.1:1", "client_max_retries": "0"}
    keys = {"aws_access_key_id": "k-7f3a91bc", "aws_secret_access_key": "sk-7f3a91bc"}
    access = Access({**nobody, **keys}, properties)
    place = check_place(WarehouseKind.ICEBERG, "lake", access)
    assert {one.name[-1]: one.properties for one in discover(place, access)} == {
        "bad": None,
        "good": {"gc.enabled": "false"},
    }
    assert "table db.bad could not be looked at: " in caplog.text
    assert "7f3a91bc" not in caplog.text
    found = lab.register(WarehouseKind.ICEBERG, "lake", access).tables()
    assert {name: one.properties for name, one in found.items()} == {
        "bad": {},
        "good": {"gc.enabled": "false"},
    }
    # If all of them say no, whoever registers has given the wrong credentials.
    with engine.begin() as connection:
        connection.execute(elsewhere, {"name": "good"})
    with pytest.raises(RequestRefused) as error:
        discover(place, access)
    assert error.value.name == "WarehouseNotReadable"


def lance_table_that_panics(place: Path) -> None:
    """Make a table whose newest manifest says that its indices are longer than it is itself."""
    tables.appended(place, 2)
    lance.dataset(str(place)).create_scalar_index("id", "BTREE")
    newest = min((place / "_versions").glob("*.manifest"))
    newest.write_bytes(newest.read_bytes()[:3] + b"\xff" + newest.read_bytes()[4:])


def test_trouble_of_any_kind_with_one_table_is_its_own(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    off = {"lakewarden.history.expire.enabled": "false"}
    lance_table_that_panics(tmp_path / "lake" / "bad.lance")
    lance_table(tmp_path / "lake" / "good.lance", 1)
    lance.dataset(str(tmp_path / "lake" / "good.lance")).update_config(off)
    warehouse = lab.lance(tmp_path / "lake")
    lab.discovery.detect_all()
    warehouse.configure(EXPIRE_SNAPSHOTS)
    seen = {one.name[-1]: one.marker for one in lab.warehouses.tables(warehouse.info.id)}
    assert [marker is None for _, marker in sorted(seen.items())] == [True, False]
    bad, good = warehouse.ask(EXPIRE_SNAPSHOTS, "bad", "good")
    lab.run(EXPIRE_SNAPSHOTS)
    assert warehouse.details(good).info.status is TaskStatus.SUCCESS
    assert warehouse.details(bad).info.status is not TaskStatus.SUCCESS
    assert caplog.text.count("could not be looked at: ") == 1


def test_a_table_whose_metadata_says_null_for_nothing_is_an_empty_one(
    lab: Lab, tmp_path: Path
) -> None:
    table = iceberg.create(iceberg.catalog(tmp_path), "db.t")
    found = iceberg.read_metadata(table, table.metadata_location)
    iceberg.write_metadata(table, table.metadata_location, {**found, "snapshots": None})
    warehouse = lab.iceberg(tmp_path)
    lab.discovery.detect_all()
    (seen,) = lab.warehouses.tables(warehouse.info.id)
    assert seen.marker == table.metadata_location


@pytest.mark.parametrize("looked", [True, False])
def test_table_that_was_away_when_its_task_was_due_is_looked_after_again(
    lab: Lab, tmp_path: Path, *, looked: bool
) -> None:
    lake = tmp_path / "lake"
    lance_table(lake / "t.lance", 25)
    lance_table(lake / "other.lance", 1)
    warehouse = lab.lance(lake)
    warehouse.configure(EXPIRE_SNAPSHOTS)
    (first,) = [one.task_id for one in lab.discovery.detect(warehouse.info.id) if one.task_id]
    (lake / "t.lance").rename(tmp_path / "away")
    if looked:
        lab.discovery.detect(warehouse.info.id)
    assert lab.run(EXPIRE_SNAPSHOTS) == 1
    assert warehouse.details(first).message == "the table is gone"
    (tmp_path / "away").rename(lake / "t.lance")
    (again,) = [one.task_id for one in lab.discovery.detect(warehouse.info.id) if one.task_id]
    assert again != first


def test_directory_that_is_empty_for_a_moment_loses_no_table(lab: Lab, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    lance_table(lake / "t.lance", 25)
    warehouse = lab.lance(lake)
    warehouse.configure(EXPIRE_SNAPSHOTS)
    known = warehouse.tables()
    lake.rename(tmp_path / "away")
    lake.mkdir()
    lab.discovery.detect_all()
    assert [one.id for one in lab.warehouses.tables(warehouse.info.id)] == [known["t"].id]
    lake.rmdir()
    (tmp_path / "away").rename(lake)
    assert any(one.task_id for one in lab.discovery.detect(warehouse.info.id))


def test_a_catalog_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    access = Access({}, {"type": "sql", "uri": f"sqlite:///{tmp_path}/nope.db"})
    with pytest.raises(NotFound, match=r"no catalog at .*nope\.db; check the uri"):
        open_source(NewPlace(WarehouseKind.ICEBERG, "prod"), access)
    assert list(tmp_path.iterdir()) == []
