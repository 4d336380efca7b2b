"""Iceberg tables in a warehouse, through PyIceberg's `load_catalog`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import Table
from pyiceberg.table.update import SetLocationUpdate
from pyiceberg.types import StringType

from lakewarden.errors import ErrorKind, LakewardenError, NotFound, Refused, UsageError
from lakewarden.storage.opening import Opener
from lakewarden.testing import iceberg as kit
from lakewarden.warehouse.iceberg import WarehouseCatalog
from lakewarden.warehouse.manifest import Operation
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import (
    IDS,
    IMPL,
    VERSIONS,
    Failure,
    Opening,
    Tampered,
    catalog,
    every_step,
    iceberg_ids,
    id_rows,
    is_open,
    make,
    names_of,
    on_branch,
    reopen,
)

#: Whoever loses is told at once, instead of PyIceberg's trying again by itself.
AT_ONCE = {"commit.retry.num-retries": "0"}
TIDY = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "2",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def lake(root: Path) -> Warehouse:
    return make(root)


@pytest.fixture
def main(root: Path, lake: Warehouse) -> Catalog:
    found = catalog(root, **{"lakewarden.actor": "anna"})
    found.create_namespace("db")
    return found


@pytest.fixture
def facts(main: Catalog) -> Table:
    """Table db.facts with the ids 1, 2 and 3, in two snapshots."""
    table = main.create_table("db.facts", IDS, properties=AT_ONCE)
    table.append(id_rows(1, 2))
    table.append(id_rows(3))
    return table


def files(root: Path) -> set[str]:
    """Return all files of tables, but for the marks that say whose they are."""
    found = (root / "tables").rglob("*")
    return {str(one.relative_to(root)) for one in found if one.is_file() and one.suffix != ".json"}


def metadata_files(table: Table) -> set[str]:
    return {str(one) for one in (Path(table.location()) / "metadata").glob("*.metadata.json")}


# -- every kind of change --------------------------------------------------------------------------


def test_a_table_is_made_and_written(lake: Warehouse, main: Catalog, root: Path) -> None:
    before = lake.refresh().version
    table = main.create_table("db.facts", IDS)
    table.append(id_rows(1, 2))
    assert lake.refresh().version == before + 2
    assert iceberg_ids(catalog(root)) == [1, 2]
    assert main.list_tables("db") == [("db", "facts")]
    assert main.table_exists("db.facts")
    done = [(one.transaction.actor, one.transaction.message) for one in lake.history(2)]
    assert done == [("anna", "append db.facts"), ("anna", "create db.facts")]


def extra(table: Table) -> None:
    with table.update_schema() as change:
        change.add_column("extra", StringType())


Step = tuple[Callable[[Table], object], Operation | None, list[int]]
STEPS: dict[str, Step] = {
    "append": (lambda table: table.append(id_rows(4)), Operation.APPEND, [1, 2, 3, 4]),
    "overwrite": (lambda table: table.overwrite(id_rows(9)), None, [9]),
    "delete of a file": (lambda table: table.delete("id == 3"), Operation.DELETE, [1, 2]),
    "delete of rows": (lambda table: table.delete("id == 2"), None, [1, 3]),
    "delete of everything": (lambda table: table.delete("id > 0"), Operation.DELETE, []),
    "new column": (extra, Operation.SCHEMA, [1, 2, 3]),
    "partitioning": (
        lambda table: table.update_spec().add_identity("id").commit(),
        Operation.SCHEMA,
        [1, 2, 3],
    ),
    "tag": (lambda table: kit.tag(table, "mine"), None, [1, 2, 3]),
    "branch": (lambda table: kit.branch(table, "mine"), None, [1, 2, 3]),
    "rollback": (
        lambda table: table.manage_snapshots().rollback_to_snapshot(kit.ids(table)[0]).commit(),
        Operation.RESTORE,
        [1, 2],
    ),
}


@pytest.mark.parametrize("step", STEPS)
def test_every_change_is_one_version(lake: Warehouse, root: Path, facts: Table, step: str) -> None:
    act, operation, expected = STEPS[step]
    before = lake.refresh().version
    act(facts)
    assert lake.refresh().version == before + 1
    assert iceberg_ids(catalog(root)) == expected
    assert catalog(root).load_table("db.facts").metadata == facts.metadata
    (last,) = lake.history(1)
    if operation is not None:
        assert [one.operation for one in last.transaction.changes] == [operation]


def test_properties_are_set_and_removed(main: Catalog, facts: Table) -> None:
    with facts.transaction() as change:
        change.set_properties({"a": "1", "b": "2"})
    with facts.transaction() as change:
        change.remove_properties("a")
    found = main.load_table("db.facts").properties
    assert ("a" in found, found["b"]) == (False, "2")


def test_a_commit_that_changes_nothing_makes_no_version(
    lake: Warehouse, main: Catalog, facts: Table
) -> None:
    before = lake.refresh().version
    main.commit_table(facts, (), ())
    assert lake.refresh().version == before


def test_icebergs_own_branches_and_tags_work(main: Catalog, facts: Table) -> None:
    kit.branch(facts, "audit")
    kit.tag(facts, "release")
    facts.append(id_rows(7), branch="audit")
    facts.append(id_rows(8))
    found = main.load_table("db.facts")
    assert sorted(found.scan().to_arrow()["id"].to_pylist()) == [1, 2, 3, 8]
    audit = found.scan(snapshot_id=found.refs()["audit"].snapshot_id).to_arrow()
    assert sorted(audit["id"].to_pylist()) == [1, 2, 3, 7]
    kit.unref(found, "audit")
    assert set(main.load_table("db.facts").refs()) == {"main", "release"}


@pytest.mark.parametrize("version", [1, 2])
def test_tables_of_older_format_versions_go_back_and_forth(
    lake: Warehouse, main: Catalog, root: Path, version: int
) -> None:
    table = main.create_table("db.facts", IDS, properties={"format-version": str(version)})
    table.append(id_rows(1))
    good = lake.read()
    table.append(id_rows(2))
    extra(table)
    reopen(root).restore(good)
    found = main.load_table("db.facts")
    assert found.metadata.format_version == version
    assert found.schema().column_names == ["id"]
    found.append(id_rows(3))
    assert iceberg_ids(catalog(root)) == [1, 3]


def test_compressed_metadata_is_written_read_and_restored(
    lake: Warehouse, main: Catalog, root: Path
) -> None:
    table = main.create_table(
        "db.facts", IDS, properties={"write.metadata.compression-codec": "gzip"}
    )
    table.append(id_rows(1))
    good = lake.read()
    table.append(id_rows(2))
    reopen(root).restore(good)
    main.load_table("db.facts").append(id_rows(3))
    assert iceberg_ids(catalog(root)) == [1, 3]


def test_unknown_fields_of_the_metadata_survive(
    lake: Warehouse, main: Catalog, root: Path, facts: Table
) -> None:
    """A newer writer has added some; the pin is of that file, so it is changed in place."""
    place = Path(facts.metadata_location)
    raw = json.loads(place.read_text())
    raw["vendor"] = {"a": [1, 2]}
    raw["schemas"][0]["vendor"] = 1
    raw["schemas"][0]["fields"][0]["vendor"] = 2
    raw["snapshots"][0]["vendor"] = 3
    raw["refs"]["main"]["vendor"] = 4
    place.write_text(json.dumps(raw))
    good = lake.read()
    main.load_table("db.facts").append(id_rows(4))
    reopen(root).restore(good)
    extra(main.load_table("db.facts"))
    after = json.loads(Path(main.load_table("db.facts").metadata_location).read_text())
    assert after["vendor"] == {"a": [1, 2]}
    assert after["schemas"][0]["vendor"] == 1
    assert after["schemas"][0]["fields"][0]["vendor"] == 2
    assert after["snapshots"][0]["vendor"] == 3


# -- tables ----------------------------------------------------------------------------------------


def test_a_table_exists_once(main: Catalog, facts: Table) -> None:
    with pytest.raises(TableAlreadyExistsError):
        main.create_table("db.facts", IDS)
    assert main.create_table_if_not_exists("db.facts", IDS).metadata == facts.metadata
    with pytest.raises(NoSuchTableError):
        main.load_table("db.none")
    with pytest.raises(NoSuchNamespaceError):
        main.create_table("none.facts", IDS)


def test_of_two_who_make_one_table_at_once_one_is_told(root: Path, main: Catalog) -> None:
    tampered = Tampered()
    late = WarehouseCatalog("late", opened=Warehouse.open(str(root), opener=tampered))
    tampered.once("put_if_absent", VERSIONS, lambda: main.create_table("db.facts", IDS))
    with pytest.raises(TableAlreadyExistsError):
        late.create_table("db.facts", IDS)
    main.load_table("db.facts").append(id_rows(1))
    assert iceberg_ids(late) == [1]


@pytest.mark.parametrize("name", ["db.a/b", "db.__x", "db.a$b", ("db", ""), ("db", "a.b")])
def test_a_bad_name_makes_no_table(lake: Warehouse, main: Catalog, root: Path, name: Any) -> None:
    before = lake.refresh().version
    with pytest.raises(UsageError) as raised:
        main.create_table(name, IDS)
    assert raised.value.kind is ErrorKind.BAD_NAME
    assert lake.refresh().version == before
    assert not (root / "tables").exists()


def test_one_name_in_two_spellings_is_one_table(main: Catalog) -> None:
    composed, apart = "db.na\u00efve", "db.nai\u0308ve"
    main.create_table(apart, IDS).append(id_rows(1))
    main.load_table(apart).append(id_rows(2))
    assert iceberg_ids(main, composed) == [1, 2]


def test_a_table_may_lie_where_its_maker_says_but_not_in_another(
    main: Catalog, facts: Table, tmp_path: Path
) -> None:
    place = tmp_path / "elsewhere"
    table = main.create_table("db.far", IDS, location=str(place))
    table.append(id_rows(1))
    assert (place / "metadata").is_dir()
    for taken in (place, place / "below", facts.location(), tmp_path):
        with pytest.raises(Refused) as raised:
            main.create_table("db.over", IDS, location=str(taken))
        assert raised.value.kind is ErrorKind.LOCATION_OVERLAP
    assert iceberg_ids(main, "db.far") == [1]


@pytest.mark.parametrize("place", ["with space", "with%20percent", "ümlaut"])
def test_a_warehouse_may_lie_at_any_path(tmp_path: Path, place: str) -> None:
    make(tmp_path / place)
    found = catalog(tmp_path / place)
    found.create_namespace("db")
    found.create_table("db.facts", IDS).append(id_rows(1))
    assert iceberg_ids(catalog(tmp_path / place)) == [1]


def test_a_table_does_not_move(main: Catalog, facts: Table, tmp_path: Path) -> None:
    away = SetLocationUpdate(location=str(tmp_path / "elsewhere"))
    with pytest.raises(Refused):
        main.commit_table(facts, (), (away,))
    assert main.load_table("db.facts").location() == facts.location()


def test_a_dropped_table_keeps_its_files_and_comes_back(
    lake: Warehouse, root: Path, main: Catalog, facts: Table
) -> None:
    before = files(root)
    main.drop_table("db.facts")
    assert files(root) == before
    for gone in (main.load_table, main.drop_table, main.purge_table):
        with pytest.raises(NoSuchTableError):
            gone("db.facts")
    lake.undrop(("db", "facts"))
    assert iceberg_ids(main) == [1, 2, 3]


def test_a_purged_table_keeps_its_files_too(
    lake: Warehouse, root: Path, main: Catalog, facts: Table
) -> None:
    before = files(root)
    main.purge_table("db.facts")
    assert files(root) == before
    assert names_of(lake) == []
    main.create_table("db.facts", IDS).append(id_rows(9))
    assert iceberg_ids(main) == [9]
    assert files(root) >= before


def test_nothing_is_committed_to_a_table_that_was_dropped_or_replaced(
    lake: Warehouse, main: Catalog, facts: Table
) -> None:
    main.drop_table("db.facts")
    with pytest.raises(CommitFailedException):
        facts.append(id_rows(4))
    main.create_table("db.facts", IDS, properties=AT_ONCE)
    with pytest.raises(CommitFailedException):
        facts.append(id_rows(4))
    assert iceberg_ids(main) == []
    main.drop_table("db.facts")
    assert names_of(lake) == []


def test_a_table_is_renamed_and_stays_where_it_is(main: Catalog, facts: Table) -> None:
    main.create_namespace("other")
    moved = main.rename_table("db.facts", "other.renamed")
    assert moved.location() == facts.location()
    assert iceberg_ids(main, "other.renamed") == [1, 2, 3]
    with pytest.raises(NoSuchTableError):
        main.load_table("db.facts")
    with pytest.raises(NoSuchTableError):
        main.rename_table("db.facts", "db.x")
    with pytest.raises(NoSuchNamespaceError):
        main.rename_table("other.renamed", "none.x")
    main.create_table("db.facts", IDS)
    with pytest.raises(TableAlreadyExistsError):
        main.rename_table("db.facts", "other.renamed")


def test_a_table_of_another_catalog_is_registered_and_goes_on_here(
    lake: Warehouse, main: Catalog, tmp_path: Path
) -> None:
    with kit.catalog(tmp_path / "theirs") as theirs:
        table = kit.create(theirs)
        kit.grow(table, 2)
        found = main.register_table("db.adopted", table.metadata_location)
        assert found.metadata == table.metadata
        kit.append(found, 100)
        assert len(iceberg_ids(main, "db.adopted")) == 9
        for name in ("db.adopted", "db.again"):
            with pytest.raises((TableAlreadyExistsError, Refused)):
                main.register_table(name, table.metadata_location)
        main.purge_table("db.adopted")
        assert len(iceberg_ids(theirs, "db.t")) == 6
    assert names_of(lake) == []


def test_what_is_no_metadata_is_not_registered(
    main: Catalog, lake: Warehouse, tmp_path: Path
) -> None:
    before = lake.refresh().version
    (tmp_path / "no.json").write_text("{}")
    for place in (tmp_path / "none.metadata.json", tmp_path / "no.json"):
        with pytest.raises(Exception, match=r"."):  # PyIceberg's own words
            main.register_table("db.x", str(place))
    assert lake.refresh().version == before


def test_a_table_is_made_in_a_transaction_of_pyiceberg(
    lake: Warehouse, main: Catalog, root: Path
) -> None:
    before = lake.refresh().version
    with main.create_table_transaction("db.facts", IDS) as change:
        change.append(id_rows(1))
        assert names_of(lake) == []
    assert lake.refresh().version == before + 1
    assert iceberg_ids(catalog(root)) == [1]


def test_of_two_transactions_that_make_one_table_one_loses(root: Path, main: Catalog) -> None:
    late = main.create_table_transaction("db.facts", IDS)
    late.append(id_rows(1))
    main.create_table("db.facts", IDS).append(id_rows(2))
    with pytest.raises((CommitFailedException, TableAlreadyExistsError)):
        late.commit_transaction()
    assert iceberg_ids(catalog(root)) == [2]


def test_the_catalog_says_what_it_needs() -> None:
    with pytest.raises(UsageError, match="warehouse: s3://"):
        load_catalog("lake", **{"py-catalog-impl": IMPL})


def test_what_is_no_warehouse_is_no_catalog(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as raised:
        catalog(tmp_path)
    assert raised.value.kind is ErrorKind.NOT_A_WAREHOUSE


def test_the_log_may_be_in_a_database(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/log.db"
    make(tmp_path / "lake", database=database)
    found = catalog(tmp_path / "lake", **{"lakewarden.log-database": database})
    found.create_namespace("db")
    found.create_table("db.facts", IDS).append(id_rows(1))
    again = catalog(tmp_path / "lake", **{"lakewarden.log-database": database})
    assert iceberg_ids(again) == [1]


# -- namespaces ------------------------------------------------------------------------------------


def test_namespaces_nest_and_have_properties(main: Catalog, root: Path) -> None:
    main.create_namespace("a.b.c", {"owner": "anna"})
    again = catalog(root)
    assert again.list_namespaces() == [("a",), ("db",)]
    assert again.list_namespaces("a") == [("a", "b")]
    assert again.list_namespaces("a.b.c") == []
    assert again.load_namespace_properties("a.b.c") == {"owner": "anna"}
    assert again.load_namespace_properties("a.b") == {}
    assert again.namespace_exists("a.b")
    summary = again.update_namespace_properties("a.b.c", {"owner", "none"}, {"x": "1"})
    assert (summary.removed, summary.updated, summary.missing) == (["owner"], ["x"], ["none"])
    assert main.load_namespace_properties("a.b.c") == {"x": "1"}
    for name in ("db", "a", "a.b.c"):
        with pytest.raises(NamespaceAlreadyExistsError):
            main.create_namespace(name)


def test_a_missing_namespace_is_told(main: Catalog) -> None:
    for ask in (
        main.list_tables,
        main.list_namespaces,
        main.load_namespace_properties,
        main.drop_namespace,
        lambda name: main.update_namespace_properties(name, updates={"a": "b"}),
    ):
        with pytest.raises(NoSuchNamespaceError):
            ask("none")
    assert not main.namespace_exists("none")


def test_a_namespace_with_something_in_it_is_not_dropped(main: Catalog, facts: Table) -> None:
    main.create_namespace("a.b")
    for full in ("db", "a"):
        with pytest.raises(NamespaceNotEmptyError):
            main.drop_namespace(full)
    main.drop_namespace("a.b")
    main.drop_table("db.facts")
    main.drop_namespace("db")
    assert main.list_namespaces() == []


def test_a_namespace_stays_when_what_was_made_below_it_goes(main: Catalog) -> None:
    main.create_namespace("a")
    main.create_namespace("a.b")
    main.drop_namespace("a.b")
    assert main.namespace_exists("a")


@pytest.mark.parametrize("name", [("a.b",), ("",), ("a", ""), ("x/y",), ("__m",)])
def test_a_namespace_whose_tables_could_have_no_name_is_refused(
    main: Catalog, name: tuple[str, ...]
) -> None:
    before = main.list_namespaces()
    with pytest.raises((UsageError, ValueError)):
        main.create_namespace(name)
    assert main.list_namespaces() == before


def test_a_warehouse_has_no_views(main: Catalog) -> None:
    assert main.list_views("db") == []
    assert not main.view_exists("db.v")
    with pytest.raises(NotImplementedError):
        main.drop_view("db.v")


# -- many at once ----------------------------------------------------------------------------------


def appending(open_one: Callable[[], Catalog], workers: int = 6) -> list[int]:
    """Append from many threads; return what was acknowledged."""
    done: list[int] = []

    def work(worker: int) -> None:
        mine = open_one()
        for step in range(5):
            new = 100 * (worker + 1) + step
            try:
                mine.load_table("db.facts").append(id_rows(new))
            except CommitFailedException:
                continue
            done.append(new)

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(work, range(workers)):
            pass
    return sorted(done)


def test_of_many_writers_those_that_lose_are_told_and_nothing_else_is_lost(
    root: Path, lake: Warehouse, facts: Table
) -> None:
    before = lake.refresh().version
    done = appending(lambda: catalog(root))
    assert len(done) >= 5
    assert iceberg_ids(catalog(root)) == [1, 2, 3, *done]
    assert lake.refresh().version == before + len(done)


def test_threads_may_share_a_catalog(root: Path, main: Catalog, facts: Table) -> None:
    done = appending(lambda: main)
    assert len(done) >= 5
    assert iceberg_ids(catalog(root)) == [1, 2, 3, *done]


def test_catalogs_may_share_a_warehouse(root: Path, lake: Warehouse, facts: Table) -> None:
    done = appending(lambda: WarehouseCatalog("shared", opened=lake))
    assert iceberg_ids(catalog(root)) == [1, 2, 3, *done]


def test_writers_who_try_again_all_get_through(root: Path, main: Catalog) -> None:
    patient = {"commit.retry.num-retries": "50", "commit.retry.min-wait-ms": "1"}
    patient["commit.retry.max-wait-ms"] = "20"
    main.create_table("db.facts", IDS, properties=patient)
    done = appending(lambda: catalog(root), 4)
    assert len(done) == 20
    assert iceberg_ids(catalog(root)) == done


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_a_commit_that_was_outrun_does_not_undo_the_other(
    root: Path, main: Catalog, facts: Table, shared: bool
) -> None:
    """The other commits after ours has looked at the table and before it is claimed."""
    tampered = Tampered()
    ours = WarehouseCatalog("ours", opened=Warehouse.open(str(root), opener=tampered))
    theirs = ours if shared else main
    tampered.once(
        "put_if_absent",
        ".metadata.json",
        lambda: theirs.load_table("db.facts").append(id_rows(66)),
    )
    with pytest.raises(CommitFailedException):
        ours.load_table("db.facts").append(id_rows(4))
    assert iceberg_ids(catalog(root)) == [1, 2, 3, 66]
    before = files(root)
    ours.load_table("db.facts").append(id_rows(5))
    assert iceberg_ids(catalog(root)) == [1, 2, 3, 5, 66]
    assert before < files(root)


def test_the_metadata_of_a_commit_that_was_outrun_is_gone(
    root: Path, main: Catalog, facts: Table
) -> None:
    old = catalog(root).load_table("db.facts")
    tampered = Tampered()
    late = WarehouseCatalog("late", opened=Warehouse.open(str(root), opener=tampered))
    tampered.once("put_if_absent", VERSIONS, lambda: old.append(id_rows(66)))
    with pytest.raises(CommitFailedException):
        late.load_table("db.facts").append(id_rows(4))
    current = main.load_table("db.facts")
    named = {one.metadata_file for one in current.metadata.metadata_log}
    assert metadata_files(facts) == named | {current.metadata_location}


# -- commits that go wrong -------------------------------------------------------------------------


def test_a_commit_of_which_nobody_knows_is_unknown_and_keeps_its_files(
    root: Path, facts: Table
) -> None:
    tampered = Tampered()
    ours = WarehouseCatalog("ours", opened=Warehouse.open(str(root), opener=tampered))
    table = ours.load_table("db.facts")
    claimed = [False]

    def rule(method: str, key: str) -> Any:
        claimed[0] = claimed[0] or (method == "put_if_absent" and VERSIONS in key)
        return "after" if claimed[0] and VERSIONS in key else None

    tampered.rule = rule
    with pytest.raises(CommitStateUnknownException):
        table.append(id_rows(4))
    assert iceberg_ids(catalog(root)) == [1, 2, 3, 4]


def test_an_append_may_fail_anywhere(tmp_path: Path) -> None:
    place, saved = tmp_path / "lake", tmp_path / "saved"
    warehouse = make(place)
    first = catalog(place)
    first.create_namespace("db")
    table = first.create_table("db.facts", IDS, properties={**AT_ONCE, **TIDY})
    for number in (1, 2, 3):
        table.append(id_rows(number))
    # There is something to clean after the commit, and a tag to look at before.
    warehouse.create_tag("two", version=warehouse.read().version - 1)
    before = warehouse.read().version
    shutil.copytree(place, saved)

    def prepare() -> Opening:
        shutil.rmtree(place)
        shutil.copytree(saved, place)
        return Opener()

    def act(opener: Opening) -> None:
        found = WarehouseCatalog("lake", opened=Warehouse.open(str(place), opener=opener))
        found.load_table("db.facts").append(id_rows(4))

    def check(opener: Opening, raised: Failure | None, where: str) -> None:
        lake = reopen(place)
        landed = lake.known.version == before + 1
        ids = [1, 2, 3, 4] if landed else [1, 2, 3]
        assert iceberg_ids(catalog(place)) == ids, where
        if raised is None:
            assert landed, where
        elif landed:
            assert is_open(raised), (where, raised)
        else:
            act(opener)
            assert iceberg_ids(catalog(place)) == [1, 2, 3, 4], where
        lake.restore(lake.read(tag="two"))
        assert iceberg_ids(catalog(place)) == [1, 2], where

    assert every_step(tmp_path / "calls", prepare, act, check) > 5


def test_a_commit_that_was_made_does_not_fail_because_tidying_up_does(
    root: Path, lake: Warehouse, main: Catalog
) -> None:
    table = main.create_table("db.facts", IDS, properties={**AT_ONCE, **TIDY})
    for number in (1, 2, 3):
        table.append(id_rows(number))
    lake.create_tag("then", version=lake.refresh().version - 1)
    tampered = Tampered()
    ours = WarehouseCatalog("ours", opened=Warehouse.open(str(root), opener=tampered))
    found = ours.load_table("db.facts")
    tampered.once("put_if_absent", VERSIONS, lambda: tampered.failing("get", "__manifest"))
    found.append(id_rows(4))
    assert iceberg_ids(catalog(root)) == [1, 2, 3, 4]


# -- old metadata files ----------------------------------------------------------------------------


def test_metadata_files_stay_unless_the_table_says_otherwise(facts: Table) -> None:
    for number in range(5):
        facts.append(id_rows(10 + number))
    assert len(metadata_files(facts)) == 8


def test_metadata_files_that_have_fallen_out_of_the_log_go(
    lake: Warehouse, main: Catalog, root: Path
) -> None:
    table = main.create_table("db.facts", IDS, properties=TIDY)
    for number in range(5):
        table.append(id_rows(number))
    current = main.load_table("db.facts")
    named = {one.metadata_file for one in current.metadata.metadata_log}
    assert len(named) == 2
    assert metadata_files(table) == named | {current.metadata_location}
    assert iceberg_ids(catalog(root)) == [0, 1, 2, 3, 4]
    # What they were of is told as reclaimed.
    gone = reopen(root)
    with pytest.raises(LakewardenError) as raised:
        gone.restore(gone.read(version=lake.refresh().version - 4))
    assert raised.value.kind is ErrorKind.RECLAIMED
    assert iceberg_ids(catalog(root)) == [0, 1, 2, 3, 4]


def test_metadata_files_that_a_tag_or_a_branch_of_the_warehouse_needs_stay(
    lake: Warehouse, main: Catalog, root: Path
) -> None:
    table = main.create_table("db.facts", IDS, properties=TIDY)
    table.append(id_rows(1))
    lake.create_tag("one")
    table.append(id_rows(2))
    lake.create_branch("two")
    table.append(id_rows(3))
    lake.create_tag("gone")
    lake.delete_tag("gone")
    for number in range(4, 9):
        table.append(id_rows(number))
    assert len(metadata_files(table)) == 3 + 2
    fresh = reopen(root)
    assert iceberg_ids(on_branch(root, "two")) == [1, 2]
    fresh.restore(fresh.read(tag="one"))
    assert iceberg_ids(catalog(root)) == [1]


def test_a_commit_on_a_branch_takes_away_nothing_that_main_needs(
    lake: Warehouse, main: Catalog, root: Path
) -> None:
    table = main.create_table("db.facts", IDS, properties=TIDY)
    table.append(id_rows(1))
    lake.create_branch("side")
    side = on_branch(root, "side").load_table("db.facts")
    for number in range(10, 15):
        side.append(id_rows(number))
    assert iceberg_ids(catalog(root)) == [1]
    assert iceberg_ids(on_branch(root, "side")) == [1, 10, 11, 12, 13, 14]
    main.load_table("db.facts").append(id_rows(2))
    assert iceberg_ids(catalog(root)) == [1, 2]


def test_a_commit_on_main_takes_away_nothing_that_a_branch_of_a_branch_needs(
    lake: Warehouse, main: Catalog, root: Path
) -> None:
    table = main.create_table("db.facts", IDS, properties=TIDY)
    table.append(id_rows(1))
    lake.create_branch("side")
    lake.create_branch("deep", source="side")
    for number in range(2, 7):
        table.append(id_rows(number))
    assert iceberg_ids(on_branch(root, "deep")) == [1]


# -- branches of the warehouse ---------------------------------------------------------------------


def test_a_table_is_forked_by_its_first_write_on_a_branch(
    lake: Warehouse, main: Catalog, root: Path, facts: Table
) -> None:
    before = files(root), metadata_files(facts)
    lake.create_branch("side")
    side = on_branch(root, "side")
    assert iceberg_ids(side) == [1, 2, 3]
    assert (files(root), metadata_files(facts)) == before
    side.load_table("db.facts").append(id_rows(50))
    assert len(metadata_files(facts) - before[1]) == 1
    assert (iceberg_ids(side), iceberg_ids(main)) == ([1, 2, 3, 50], [1, 2, 3])
    facts.append(id_rows(4))
    assert (iceberg_ids(side), iceberg_ids(main)) == ([1, 2, 3, 50], [1, 2, 3, 4])
    assert list(lake.refresh().manifest.branches["side"].pins) == [
        lake.read().table(("db", "facts")).id
    ]


def test_tables_come_and_go_on_a_branch_alone(
    lake: Warehouse, main: Catalog, root: Path, facts: Table
) -> None:
    lake.create_branch("side")
    side = on_branch(root, "side")
    side.create_table("db.new", IDS).append(id_rows(1))
    side.drop_table("db.facts")
    assert side.list_tables("db") == [("db", "new")]
    assert main.list_tables("db") == [("db", "facts")]
    side.drop_table("db.new")
    assert side.list_tables("db") == []
    side.create_table("db.new", IDS)
    side.create_table("db.facts", IDS).append(id_rows(9))
    assert (iceberg_ids(side), iceberg_ids(main)) == ([9], [1, 2, 3])


def test_a_table_that_was_made_on_a_branch_is_renamed_there_or_that_is_refused(
    lake: Warehouse, main: Catalog, root: Path, facts: Table
) -> None:
    lake.create_branch("side")
    side = on_branch(root, "side")
    side.create_table("db.new", IDS)
    expected = ("db", "renamed")
    try:
        side.rename_table("db.new", "db.renamed")
    except Refused:
        expected = ("db", "new")
    assert side.list_tables("db") == [("db", "facts"), expected]
    assert main.list_tables("db") == [("db", "facts")]


def test_a_rename_on_a_branch_never_means_a_namesake_on_main(
    lake: Warehouse, main: Catalog, root: Path, facts: Table
) -> None:
    lake.create_branch("side")
    side = on_branch(root, "side")
    side.drop_table("db.facts")
    side.create_table("db.other", IDS)
    main.create_table("db.other", IDS).append(id_rows(7))
    with suppress(Refused):
        side.rename_table("db.other", "db.mine")
    assert main.list_tables("db") == [("db", "facts"), ("db", "other")]
    assert iceberg_ids(main, "db.other") == [7]


def test_a_branch_that_is_not_there_is_told(root: Path, lake: Warehouse, facts: Table) -> None:
    with pytest.raises(NotFound, match="no branch none"):
        on_branch(root, "none").load_table("db.facts")


def test_nothing_is_written_to_a_branch_that_was_deleted(
    root: Path, lake: Warehouse, main: Catalog, facts: Table
) -> None:
    lake.create_branch("side")
    table = on_branch(root, "side").load_table("db.facts")
    lake.delete_branch("side")
    with pytest.raises((NotFound, CommitFailedException)):
        table.append(id_rows(50))
    assert iceberg_ids(main) == [1, 2, 3]


def test_writers_of_different_branches_do_not_conflict(
    root: Path, lake: Warehouse, main: Catalog, facts: Table
) -> None:
    lake.create_branch("side")
    tampered = Tampered()
    ours = WarehouseCatalog("ours", opened=Warehouse.open(str(root), opener=tampered))
    side = on_branch(root, "side").load_table("db.facts")
    tampered.once("put_if_absent", VERSIONS, lambda: side.append(id_rows(50)))
    ours.load_table("db.facts").append(id_rows(4))
    assert iceberg_ids(main) == [1, 2, 3, 4]
    assert iceberg_ids(on_branch(root, "side")) == [1, 2, 3, 50]


# -- going back ------------------------------------------------------------------------------------


def test_a_restored_table_has_its_schema_and_keeps_its_history(
    lake: Warehouse, main: Catalog, root: Path, facts: Table
) -> None:
    good = lake.read()
    kit.tag(facts, "mine")
    extra(facts)
    facts.append(pa.table({"id": pa.array([9], pa.int64()), "extra": ["x"]}))
    newest = kit.ids(facts)
    reopen(root).restore(good)
    found = main.load_table("db.facts")
    assert found.schema().column_names == ["id"]
    assert iceberg_ids(main) == [1, 2, 3]
    assert kit.ids(found) == newest
    assert "mine" in found.refs()
    later = [one.timestamp_ms for one in found.metadata.snapshot_log]
    assert later == sorted(later)
    assert found.metadata.metadata_log[-1].metadata_file == facts.metadata_location
    found.append(id_rows(4))
    assert iceberg_ids(catalog(root)) == [1, 2, 3, 4]


def test_a_table_goes_back_to_when_it_was_empty(lake: Warehouse, main: Catalog, root: Path) -> None:
    table = main.create_table("db.facts", IDS)
    empty = lake.read()
    table.append(id_rows(1))
    reopen(root).restore(empty)
    assert iceberg_ids(main) == []
    main.load_table("db.facts").append(id_rows(2))
    assert iceberg_ids(catalog(root)) == [2]


def test_a_snapshot_that_was_expired_does_not_come_back_and_nothing_changes(
    lake: Warehouse, main: Catalog, root: Path, facts: Table
) -> None:
    good = lake.read()
    first = kit.ids(facts)[-1]
    facts.overwrite(id_rows(9))
    facts.maintenance.expire_snapshots().by_ids([first]).commit()
    before = lake.refresh().version
    with pytest.raises(NotFound) as raised:
        reopen(root).restore(good)
    assert raised.value.kind is ErrorKind.RECLAIMED
    assert lake.refresh().version == before
    assert iceberg_ids(main) == [9]


def test_a_handle_from_before_a_restore_does_not_write_over_it(
    lake: Warehouse, main: Catalog, root: Path, facts: Table
) -> None:
    good = lake.read()
    other = catalog(root).load_table("db.facts")
    other.append(id_rows(9))
    stale = catalog(root).load_table("db.facts")
    reopen(root).restore(good)
    with pytest.raises(CommitFailedException):
        stale.append(id_rows(10))
    assert iceberg_ids(main) == [1, 2, 3]
