"""Changes of several tables, of both formats, that become one version or none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import lance_namespace as api
import pyarrow as pa
import pytest
from pyiceberg.exceptions import NoSuchTableError

from lakewarden.errors import Conflict, ErrorKind, LakewardenError, NotFound, Refused
from lakewarden.model import WAREHOUSE_MARK
from lakewarden.storage.opening import Opener
from lakewarden.testing import iceberg as kit
from lakewarden.warehouse.handlers import StoreHandler
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.manifest import Operation
from lakewarden.warehouse.transaction import Changes, run, transaction
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import (
    IDS,
    VERSIONS,
    Failure,
    Hasty,
    Opening,
    T,
    Tampered,
    catalog,
    dataset,
    every_step,
    filled,
    iceberg_ids,
    id_rows,
    is_open,
    lance_ids,
    make,
    names_of,
    on_branch,
    reopen,
    write,
)

FACTS = ("db", "facts")


class Stop(Exception):  # noqa: N818  # it is no error
    """What a user raises to leave a transaction."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def lake(root: Path) -> Warehouse:
    """Lance table db.t with id 1, Iceberg table db.facts with id 10."""
    return filled(root, actor="anna")


def both(tx: Changes, one: int = 2, other: int = 20) -> None:
    """Append to both tables."""
    write(tx.lance, "append", one)
    tx.iceberg.load_table("db.facts").append(id_rows(other))


def seen(root: Path) -> tuple[list[int], list[int]]:
    """Return the rows of both tables, as somebody sees them who has just come."""
    return lance_ids(reopen(root)), iceberg_ids(catalog(root))


def files(root: Path) -> set[str]:
    """Return the manifests and metadata files of all tables, wherever they are."""
    found = (one for one in (root / "tables").rglob("*") if one.is_file())
    return {
        str(one.relative_to(root))
        for one in found
        if not str(one).endswith(WAREHOUSE_MARK)
        and (".manifest" in one.name or one.name.endswith(".metadata.json"))
    }


# -- all or nothing --------------------------------------------------------------------------------


def test_both_tables_change_in_one_version(root: Path, lake: Warehouse) -> None:
    before = lake.known.version
    with transaction(lake, message="daily load") as tx:
        both(tx)
    assert tx.version == lake.refresh().version == before + 1
    assert seen(root) == ([1, 2], [10, 20])
    (last,) = lake.history(1)
    assert (last.transaction.actor, last.transaction.message) == ("anna", "daily load")
    assert {one.operation for one in last.transaction.changes} == {Operation.APPEND}
    assert len(last.transaction.changes) == 2


def test_nobody_sees_anything_before_the_end(root: Path, lake: Warehouse) -> None:
    with transaction(lake) as tx:
        both(tx)
        write(tx.lance, "create", 5, name=("db", "new"))
        tx.iceberg.create_table("db.newer", IDS).append(id_rows(50))
        # Neither through the same warehouse, nor another, nor by path.
        assert seen(root) == ([1], [10])
        assert lance_ids(lake) == [1]
        assert names_of(reopen(root)) == ["db.facts", "db.t"]
        assert not catalog(root).table_exists("db.newer")
        # The one who does it sees it.
        assert sorted(dataset(tx.lance).to_table()["id"].to_pylist()) == [1, 2]
        assert iceberg_ids(tx.iceberg) == [10, 20]
        assert dataset(tx.lance, ("db", "new")).count_rows() == 1
        assert iceberg_ids(tx.iceberg, "db.newer") == [50]
        assert tx.iceberg.list_tables("db") == [FACTS, ("db", "newer")]
    assert names_of(reopen(root)) == ["db.facts", "db.new", "db.newer", "db.t"]
    assert seen(root) == ([1, 2], [10, 20])
    assert lance_ids(lake, ("db", "new")) == [5]
    assert iceberg_ids(catalog(root), "db.newer") == [50]


def test_what_fails_inside_leaves_nothing(root: Path, lake: Warehouse) -> None:
    before, there = lake.known.version, files(root)

    def work() -> None:
        with transaction(lake) as tx:
            both(tx)
            both(tx, 3, 30)
            write(tx.lance, "create", 5, name=("db", "new"))
            tx.iceberg.create_table("db.newer", IDS).append(id_rows(50))
            raise Stop

    with pytest.raises(Stop):
        work()
    assert lake.refresh().version == before
    assert seen(root) == ([1], [10])
    assert names_of(lake) == ["db.facts", "db.t"]
    assert files(root) == there
    with transaction(lake) as tx:
        both(tx)
    assert seen(root) == ([1, 2], [10, 20])


@pytest.mark.parametrize("error", [ValueError("mine"), OSError("mine"), RuntimeError("mine")])
def test_the_errors_of_users_stay_theirs(lake: Warehouse, error: Exception) -> None:
    """Looking for a table that is not there, and not minding, changes nothing about that."""

    def work() -> None:
        with transaction(lake) as tx:
            with suppress(Exception):
                dataset(tx.lance, ("db", "none"))
            write(tx.lance, "append", 2)
            raise error

    with pytest.raises(type(error), match="mine"):
        work()


def test_a_transaction_that_changes_nothing_is_no_version(root: Path, lake: Warehouse) -> None:
    before = lake.known.version
    with transaction(lake, request="job") as tx:
        assert dataset(tx.lance).count_rows() == 1
        assert iceberg_ids(tx.iceberg) == [10]
    assert tx.version is None
    assert lake.refresh().version == before


def test_a_transaction_sees_one_version_of_the_warehouse(root: Path, lake: Warehouse) -> None:
    with transaction(lake) as tx:
        with transaction(reopen(root)) as other:
            both(other, 7, 70)
        assert seen(root) == ([1, 7], [10, 70])
        assert dataset(tx.lance).to_table()["id"].to_pylist() == [1]
        assert iceberg_ids(tx.iceberg) == [10]
        lake.refresh()
        assert dataset(tx.lance).to_table()["id"].to_pylist() == [1]


# -- what can be done inside -----------------------------------------------------------------------


def test_a_table_may_be_written_several_times(root: Path, lake: Warehouse) -> None:
    before = lake.known.version
    with transaction(lake) as tx:
        both(tx)
        both(tx, 3, 30)
        dataset(tx.lance).delete("id = 1")
        tx.iceberg.load_table("db.facts").delete("id == 10")
        write(tx.lance, "append", 4)
        assert sorted(dataset(tx.lance).to_table()["id"].to_pylist()) == [2, 3, 4]
    assert lake.refresh().version == before + 1
    assert seen(root) == ([2, 3, 4], [20, 30])
    found = lance.dataset(lake.read().table(T).location)
    assert [one["version"] for one in found.versions()] == [1, 2, 3, 4, 5]
    assert [found.checkout_version(one).count_rows() for one in (1, 2, 3)] == [1, 2, 3]
    write(Namespace(lake), "append", 5)
    assert seen(root) == ([2, 3, 4, 5], [20, 30])


STEPS: dict[str, tuple[Callable[[Any], object], list[int]]] = {
    "overwrite": (lambda found: lance.write_dataset(id_rows(9), found, mode="overwrite"), [9]),
    "delete": (lambda found: found.delete("id = 2"), [1, 3]),
    "update": (lambda found: found.update({"id": "8"}, where="id = 2"), [1, 3, 8]),
    "merge insert": (
        lambda found: found.merge_insert("id").when_not_matched_insert_all().execute(id_rows(3, 4)),
        [1, 2, 3, 4],
    ),
    "index": (lambda found: found.create_scalar_index("id", "BTREE"), [1, 2, 3]),
    "new column": (lambda found: found.add_columns({"twice": "id * 2"}), [1, 2, 3]),
    "compaction": (lambda found: found.optimize.compact_files(), [1, 2, 3]),
    "restore": (lambda found: found.checkout_version(1).restore(), [1]),
}


@pytest.mark.parametrize("after", [False, True], ids=["alone", "after an append"])
@pytest.mark.parametrize("step", STEPS)
def test_everything_that_lance_does_can_be_done_inside(
    root: Path, lake: Warehouse, step: str, after: bool
) -> None:
    act, expected = STEPS[step]
    write(Namespace(lake), "append", 2)
    if not after:
        write(Namespace(lake), "append", 3)
    before = lake.refresh().version
    with transaction(lake) as tx:
        if after:
            write(tx.lance, "append", 3)
        act(dataset(tx.lance))
        assert sorted(dataset(tx.lance).to_table()["id"].to_pylist()) == expected
    assert lake.refresh().version == before + 1
    assert lance_ids(reopen(root)) == expected
    if step != "new column":
        write(Namespace(reopen(root)), "append", 100)
        assert lance_ids(reopen(root)) == [*expected, 100]


def test_compaction_inside_makes_one_file_and_loses_no_row(root: Path, lake: Warehouse) -> None:
    for number in (2, 3, 4):
        write(Namespace(lake), "append", number)
    with transaction(lake) as tx:
        dataset(tx.lance).optimize.compact_files()
        tx.iceberg.load_table("db.facts").append(id_rows(20))
    assert len(dataset(Namespace(lake)).get_fragments()) == 1
    assert seen(root) == ([1, 2, 3, 4], [10, 20])


def test_a_table_made_inside_is_one_version_with_the_rest(root: Path, lake: Warehouse) -> None:
    before = lake.known.version
    with transaction(lake) as tx:
        write(tx.lance, "create", 5, name=("db", "new"))
        write(tx.lance, "append", 6, name=("db", "new"))
        tx.iceberg.create_table("db.newer", IDS).append(id_rows(50))
        tx.iceberg.load_table("db.newer").append(id_rows(60))
    assert lake.refresh().version == before + 1
    assert lance_ids(reopen(root), ("db", "new")) == [5, 6]
    assert iceberg_ids(catalog(root), "db.newer") == [50, 60]
    assert {one.operation for one in next(lake.history(1)).transaction.changes} == {
        Operation.CREATE
    }


def test_a_name_is_taken_once_inside_too(lake: Warehouse) -> None:
    with transaction(lake) as tx:
        tx.iceberg.create_table("db.new", IDS)
        with pytest.raises(Exception, match="there is a table"):
            tx.iceberg.create_table("db.new", IDS)
        with pytest.raises(Exception, match="there is a table"):
            write(tx.lance, "create", 1, name=("db", "new"))
    assert names_of(lake) == ["db.facts", "db.new", "db.t"]


def test_a_place_is_taken_once_inside_too(lake: Warehouse, tmp_path: Path) -> None:
    place = str(tmp_path / "elsewhere")
    with transaction(lake) as tx:
        tx.iceberg.create_table("db.new", IDS, location=place)
        with pytest.raises(Exception, match="overlaps"):
            tx.lance.declare_table(api.DeclareTableRequest(id=["db", "over"], location=place))
        with pytest.raises(Refused, match="overlaps"):
            tx.iceberg.create_table("db.over", IDS, location=place)
    assert names_of(lake) == ["db.facts", "db.new", "db.t"]


def test_a_table_that_is_only_declared_inside_is_there_afterwards_or_refused(
    lake: Warehouse,
) -> None:
    with transaction(lake) as tx:
        tx.lance.declare_table(api.DeclareTableRequest(id=["db", "empty"]))
    assert names_of(lake) == ["db.empty", "db.facts", "db.t"]


def test_tables_are_dropped_and_renamed_outside(lake: Warehouse) -> None:
    before = lake.known.version
    with transaction(lake) as tx:
        for refused in (
            lambda: tx.iceberg.drop_table("db.facts"),
            lambda: tx.iceberg.purge_table("db.facts"),
            lambda: tx.iceberg.rename_table("db.facts", "db.x"),
            lambda: tx.lance.drop_table(api.DropTableRequest(id=list(T))),
            lambda: tx.lance.rename_table(api.RenameTableRequest(id=list(T), new_table_name="x")),
        ):
            with pytest.raises(Exception, match="outside transactions"):
                refused()
    assert lake.refresh().version == before


@pytest.mark.parametrize(
    "act",
    [
        lambda tx: tx.iceberg.create_namespace("new"),
        lambda tx: tx.iceberg.update_namespace_properties("db", updates={"a": "b"}),
        lambda tx: tx.iceberg.drop_namespace("empty"),
    ],
    ids=["made", "changed", "dropped"],
)
def test_namespaces_never_change_behind_the_back_of_a_transaction(
    root: Path, lake: Warehouse, act: Callable[[Changes], object]
) -> None:
    catalog(root).create_namespace("empty")
    before = lake.refresh().version

    def work() -> None:
        with transaction(lake) as tx:
            with suppress(Refused):
                act(tx)
            raise Stop

    with pytest.raises(Stop):
        work()
    assert lake.refresh().version == before
    assert catalog(root).list_namespaces() == [("db",), ("empty",)]


@pytest.mark.parametrize("written", [False, True], ids=["as it is", "and written"])
def test_a_registered_table_is_not_destroyed_when_the_transaction_fails(
    lake: Warehouse, tmp_path: Path, written: bool
) -> None:
    with kit.catalog(tmp_path / "theirs") as theirs:
        table = kit.create(theirs)
        kit.grow(table, 2)
        named = table.metadata_location

        def work() -> None:
            with transaction(lake) as tx:
                adopted = tx.iceberg.register_table("db.adopted", named)
                if written:
                    kit.append(adopted, 100)
                raise Stop

        with pytest.raises(Stop):
            work()
        assert Path(named.removeprefix("file://")).exists()
        assert len(iceberg_ids(theirs, "db.t")) == 6
        with transaction(lake) as tx:
            kit.append(tx.iceberg.register_table("db.adopted", named), 100)
    assert len(iceberg_ids(catalog(lake.location.uri), "db.adopted")) == 9


def test_metadata_files_that_have_fallen_out_of_the_log_go_after_a_transaction_too(
    root: Path, lake: Warehouse
) -> None:
    tidy = {
        "write.metadata.delete-after-commit.enabled": "true",
        "write.metadata.previous-versions-max": "2",
    }
    catalog(root).create_table("db.tidy", IDS, properties=tidy)
    for number in range(6):
        with transaction(lake) as tx:
            tx.iceberg.load_table("db.tidy").append(id_rows(number))
    found = catalog(root).load_table("db.tidy")
    named = {one.metadata_file for one in found.metadata.metadata_log}
    assert len(named) == 2
    there = {str(one) for one in (Path(found.location()) / "metadata").glob("*.metadata.json")}
    assert there == named | {found.metadata_location}


# -- branches --------------------------------------------------------------------------------------


def test_iceberg_tables_change_on_a_branch(root: Path, lake: Warehouse) -> None:
    lake.create_branch("side")
    with transaction(lake, branch="side") as tx:
        tx.iceberg.load_table("db.facts").append(id_rows(20))
        tx.iceberg.create_table("db.new", IDS)
        assert dataset(tx.lance).count_rows() == 1
    assert iceberg_ids(on_branch(root, "side")) == [10, 20]
    assert seen(root) == ([1], [10])
    assert names_of(lake) == ["db.facts", "db.t"]


def test_tables_of_both_formats_change_on_a_branch_in_one_version(
    root: Path, lake: Warehouse
) -> None:
    lake.create_branch("side")
    before = lake.refresh().version
    with transaction(lake, branch="side") as tx:
        write(tx.lance, "append", 2)
        tx.iceberg.load_table("db.facts").append(id_rows(20))
    assert lake.refresh().version == before + 1
    write(Namespace(lake), "append", 3)
    assert seen(root) == ([1, 3], [10])
    side = dataset(Namespace(reopen(root), branch="side"))
    assert sorted(side.to_table()["id"].to_pylist()) == [1, 2]
    assert iceberg_ids(on_branch(root, "side")) == [10, 20]


# -- requests --------------------------------------------------------------------------------------


def test_a_request_is_committed_once(root: Path, lake: Warehouse) -> None:
    before = lake.known.version
    with transaction(lake, request="load-1") as tx:
        assert tx.done_before is None
        both(tx)
    first, there = tx.version, files(root)
    for again in (lake, reopen(root)):
        with transaction(again, request="load-1") as tx:
            assert tx.done_before == first
            both(tx, 3, 30)
        assert tx.version == first
    assert lake.refresh().version == before + 1
    assert seen(root) == ([1, 2], [10, 20])
    assert files(root) == there
    with transaction(lake, request="load-2") as tx:
        both(tx, 3, 30)
    assert seen(root) == ([1, 2, 3], [10, 20, 30])


def test_a_request_is_remembered_when_others_have_gone_on(root: Path, lake: Warehouse) -> None:
    with transaction(lake, request="load-1") as tx:
        both(tx)
    first = tx.version
    for number in range(40):
        lake.set_properties({"n": str(number)})
    lake.log.handler.forget(range(1, lake.refresh().version))
    with transaction(reopen(root), request="load-1") as tx:
        both(tx)
    assert tx.version == first
    assert seen(root) == ([1, 2], [10, 20])


def test_of_two_tries_of_a_request_at_once_one_is_committed(root: Path, lake: Warehouse) -> None:
    before = lake.known.version
    tampered = Tampered()
    late = reopen(root, opener=tampered)

    def work(tx: Changes) -> None:
        both(tx)

    tampered.once("put_if_absent", VERSIONS, lambda: run(reopen(root), work, request="load-1"))
    run(late, work, request="load-1")
    assert lake.refresh().version == before + 1
    assert seen(root) == ([1, 2], [10, 20])


def test_a_request_whose_outcome_was_unknown_can_be_tried_again(
    root: Path, lake: Warehouse
) -> None:
    before = lake.known.version
    tampered = Tampered()
    late = reopen(root, opener=tampered)
    claimed = [False]

    def rule(method: str, key: str) -> Any:
        claimed[0] = claimed[0] or (method == "put_if_absent" and VERSIONS in key)
        return "after" if claimed[0] and VERSIONS in key else None

    def work() -> None:
        with transaction(late, request="load-1") as tx:
            both(tx)
            tampered.rule = rule

    with pytest.raises(LakewardenError) as raised:
        work()
    assert raised.value.kind is ErrorKind.COMMIT_UNKNOWN
    with transaction(reopen(root), request="load-1") as tx:
        both(tx)
    assert tx.version == before + 1
    assert seen(root) == ([1, 2], [10, 20])


# -- others ----------------------------------------------------------------------------------------


def outrun(root: Path, work: Callable[[Changes], object], theirs: Callable[[], object]) -> None:
    """Do work in a transaction; right before it is claimed, somebody else commits."""
    tampered = Tampered()
    late = reopen(root, opener=tampered)
    with transaction(late) as tx:
        work(tx)
        tampered.once("put_if_absent", VERSIONS, theirs)


def test_an_append_is_put_on_top_of_anothers_and_the_other_table_is_left_as_it_is(
    root: Path, lake: Warehouse
) -> None:
    before = lake.known.version
    outrun(root, both, lambda: write(Namespace(lake), "append", 7))
    assert seen(root) == ([1, 2, 7], [10, 20])
    assert lake.refresh().version == before + 2
    assert not any("_lakewarden/" in one for one in files(root))


def test_an_append_is_put_on_top_of_others_again_and_again(root: Path, lake: Warehouse) -> None:
    tampered = Tampered()
    late = reopen(root, opener=tampered, chance=Hasty())
    left = [7, 8, 9]

    def rule(method: str, key: str) -> Any:
        if method == "put_if_absent" and VERSIONS in key and left:
            new = left.pop(0)
            write(Namespace(reopen(root)), "append", new)
        return None

    with transaction(late) as tx:
        both(tx)
        tampered.rule = rule
    assert seen(root) == ([1, 2, 7, 8, 9], [10, 20])
    assert not any("_lakewarden/" in one for one in files(root))


def test_an_append_whose_client_has_rebased_already_is_committed(
    root: Path, lake: Warehouse
) -> None:
    """The other commits before ours is written, but after the transaction has begun."""
    with transaction(lake) as tx:
        write(Namespace(reopen(root)), "append", 7)
        both(tx)
    assert seen(root) == ([1, 2, 7], [10, 20])


#: What is done inside, and by somebody else meanwhile, to ids 1 to 4 in two files.
OURS: dict[str, Callable[[Any], object]] = {
    "append": lambda found: found.insert(id_rows(20)),
    "overwrite": lambda found: lance.write_dataset(id_rows(21), found, mode="overwrite"),
    "delete": lambda found: found.delete("id = 1"),
    "update": lambda found: found.update({"id": "22"}, where="id = 1"),
    "merge insert": lambda found: (
        found.merge_insert("id").when_not_matched_insert_all().execute(id_rows(1, 23))
    ),
    "index": lambda found: found.create_scalar_index("id", "BTREE"),
    "new column": lambda found: found.add_columns({"twice": "id * 2"}),
    "configuration": lambda found: found.update_config({"ours": "1"}),
    "compaction": lambda found: found.optimize.compact_files(),
    "restore": lambda found: found.checkout_version(1).restore(),
}
THEIRS: dict[str, Callable[[Any], object]] = {
    "append": lambda found: found.insert(id_rows(30)),
    "overwrite": lambda found: lance.write_dataset(id_rows(31), found, mode="overwrite"),
    "delete": lambda found: found.delete("id = 4"),
    "update": lambda found: found.update({"id": "32"}, where="id = 4"),
    "index": lambda found: found.create_scalar_index("id", "BTREE"),
    "new column": lambda found: found.add_columns({"thrice": "id * 3"}),
    "configuration": lambda found: found.update_config({"theirs": "1"}),
    "compaction": lambda found: found.optimize.compact_files(),
}


@pytest.mark.parametrize("theirs", THEIRS)
@pytest.mark.parametrize("ours", OURS)
def test_what_waits_is_put_on_top_of_what_others_did_or_refused_whole(
    tmp_path: Path, ours: str, theirs: str
) -> None:
    """As if the other had come first, or as if we had not come at all."""
    root, plain = tmp_path / "lake", str(tmp_path / "plain")
    warehouse = make(root)
    for mode, new in (("create", (1, 2)), ("append", (3, 4))):
        write(Namespace(warehouse), mode, *new)
        lance.write_dataset(id_rows(*new), plain, mode=mode)
    THEIRS[theirs](lance.dataset(plain))
    without = sorted(lance.dataset(plain).to_table()["id"].to_pylist())
    OURS[ours](lance.dataset(plain))
    expected = sorted(lance.dataset(plain).to_table()["id"].to_pylist())
    before = warehouse.read().version
    tampered = Tampered()
    late = reopen(root, opener=tampered)

    def work() -> None:
        with transaction(late) as tx:
            OURS[ours](dataset(tx.lance))
            tampered.once(
                "put_if_absent",
                VERSIONS,
                lambda: THEIRS[theirs](dataset(Namespace(reopen(root)))),
            )

    try:
        work()
    except Conflict:
        expected = without
    else:
        assert reopen(root).known.version > before + 1
    assert lance_ids(reopen(root)) == expected
    found = dataset(Namespace(reopen(root)))
    for name in found.schema.names:
        assert found.to_table(columns=[name]).num_rows == len(expected)
    found.validate()


def test_several_appends_are_not_put_on_top_but_refused_whole(root: Path, lake: Warehouse) -> None:
    there = files(root)

    def work(tx: Changes) -> None:
        both(tx)
        both(tx, 3, 30)

    with pytest.raises(Conflict) as raised:
        outrun(root, work, lambda: write_seven(root))
    assert raised.value.kind is ErrorKind.CONFLICT
    assert seen(root) == ([1, 7], [10])
    assert len(files(root) - there) == 1


def write_seven(root: Path) -> None:
    write(Namespace(reopen(root)), "append", 7)


def test_a_change_that_does_not_get_along_with_anothers_is_refused_whole(
    root: Path, lake: Warehouse
) -> None:
    """An append after an overwrite, as in plain Lance."""
    with pytest.raises(Conflict) as raised:
        outrun(root, both, lambda: write(Namespace(reopen(root)), "overwrite", 7))
    assert raised.value.kind is ErrorKind.INCOMPATIBLE
    assert seen(root) == ([7], [10])


def test_an_iceberg_table_that_has_moved_is_a_conflict_of_the_whole(
    root: Path, lake: Warehouse
) -> None:
    there = files(root)
    with pytest.raises(Conflict) as raised:
        outrun(root, both, lambda: append_fact(root, 70))
    assert raised.value.kind is ErrorKind.CONFLICT
    assert seen(root) == ([1], [10, 70])
    assert len(files(root) - there) == 1


def append_fact(root: Path, number: int) -> None:
    catalog(root).load_table("db.facts").append(id_rows(number))


def test_a_table_that_was_dropped_meanwhile_is_a_conflict_of_the_whole(
    root: Path, lake: Warehouse
) -> None:
    with pytest.raises(Conflict):
        outrun(root, both, lambda: reopen(root).drop(T))
    assert iceberg_ids(catalog(root)) == [10]
    lake.undrop(T)
    assert lance_ids(reopen(root)) == [1]


def test_a_name_that_was_taken_meanwhile_is_a_conflict_of_the_whole(
    root: Path, lake: Warehouse
) -> None:
    def work(tx: Changes) -> None:
        both(tx)
        write(tx.lance, "create", 5, name=("db", "new"))

    with pytest.raises(Conflict):
        outrun(root, work, lambda: catalog(root).create_table("db.new", IDS))
    assert seen(root) == ([1], [10])
    assert iceberg_ids(catalog(root), "db.new") == []


def test_others_may_do_what_they_like_to_other_tables(root: Path, lake: Warehouse) -> None:
    def theirs() -> None:
        write(Namespace(reopen(root)), "create", 5, name=("db", "new"))
        reopen(root).create_tag("t")

    outrun(root, both, theirs)
    assert seen(root) == ([1, 2], [10, 20])
    assert lance_ids(reopen(root), ("db", "new")) == [5]


def test_a_rename_by_others_is_no_conflict(root: Path, lake: Warehouse) -> None:
    outrun(root, both, lambda: reopen(root).rename(T, ("db", "renamed")))
    assert lance_ids(reopen(root), ("db", "renamed")) == [1, 2]
    assert iceberg_ids(catalog(root)) == [10, 20]


def test_a_rename_and_an_append_by_others_are_put_below(root: Path, lake: Warehouse) -> None:
    def theirs() -> None:
        other = reopen(root)
        write(Namespace(other), "append", 7)
        other.rename(T, ("db", "renamed"))

    outrun(root, both, theirs)
    assert lance_ids(reopen(root), ("db", "renamed")) == [1, 2, 7]
    assert iceberg_ids(catalog(root)) == [10, 20]


@pytest.mark.parametrize(
    "theirs",
    [
        lambda root: write(Namespace(reopen(root)), "append", 7),
        lambda root: reopen(root).drop(T),
    ],
    ids=["changed", "dropped"],
)
def test_what_was_read_must_not_have_changed(
    root: Path, lake: Warehouse, theirs: Callable[[Path], object]
) -> None:
    def work(tx: Changes) -> None:
        tx.reading(T)
        rows = dataset(tx.lance).count_rows()
        tx.iceberg.load_table("db.facts").append(id_rows(rows))

    with pytest.raises(Conflict) as raised:
        outrun(root, work, lambda: theirs(root))
    assert raised.value.kind is ErrorKind.CONFLICT
    assert iceberg_ids(catalog(root)) == [10]


def test_what_was_read_and_is_written_must_not_have_changed_either(
    root: Path, lake: Warehouse
) -> None:
    def work(tx: Changes) -> None:
        tx.reading(T)
        write(tx.lance, "append", dataset(tx.lance).count_rows() + 1)

    with pytest.raises(Conflict):
        outrun(root, work, lambda: write(Namespace(reopen(root)), "append", 7))
    assert lance_ids(reopen(root)) == [1, 7]


def test_what_was_read_must_not_have_changed_before_the_client_looked_again(
    root: Path, lake: Warehouse
) -> None:
    """The client rebases by itself; that it read something else before counts all the same."""

    def work() -> None:
        with transaction(lake) as tx:
            tx.reading(T)
            write(Namespace(reopen(root)), "append", 7)
            write(tx.lance, "append", 2)

    with pytest.raises(Conflict):
        work()
    assert lance_ids(reopen(root)) == [1, 7]


def test_what_was_read_may_be_renamed_and_others_may_change(root: Path, lake: Warehouse) -> None:
    def work(tx: Changes) -> None:
        tx.reading(T)
        tx.iceberg.load_table("db.facts").append(id_rows(20))

    def theirs() -> None:
        other = reopen(root)
        other.rename(T, ("db", "renamed"))
        write(Namespace(other), "create", 5, name=("db", "new"))

    outrun(root, work, theirs)
    assert iceberg_ids(catalog(root)) == [10, 20]


def test_only_a_table_that_is_there_can_be_read(lake: Warehouse) -> None:
    with transaction(lake) as tx, pytest.raises(NotFound):
        tx.reading(("db", "none"))


# -- many at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_many_transactions_over_two_tables_all_get_through_whole(
    root: Path, lake: Warehouse, shared: bool
) -> None:
    before = lake.known.version
    common = reopen(root, chance=Hasty())

    def work(worker: int) -> None:
        mine = common if shared else reopen(root, chance=Hasty())
        for step in range(5):
            number = 100 * (worker + 1) + step
            run(mine, lambda tx, number=number: both(tx, number, number), attempts=1000)  # type: ignore[misc]

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(work, range(4)):
            pass
    numbers = [100 * (worker + 1) + step for worker in range(4) for step in range(5)]
    assert seen(root) == ([1, *numbers], [10, *numbers])
    assert lake.refresh().version == before + 20
    assert not any("_lakewarden/" in one for one in files(root))
    # Each version has both of its rows, or none: no version is half of a transaction.
    table, facts = lake.read().table(T), lake.read().table(FACTS)
    for one in lake.history(20):
        assert {change.table for change in one.transaction.changes} == {table.id, facts.id}


def test_transactions_of_one_warehouse_may_be_open_at_once(root: Path, lake: Warehouse) -> None:
    with transaction(lake) as first, transaction(lake) as second:
        write(first.lance, "append", 2)
        write(second.lance, "append", 3)
        assert sorted(dataset(first.lance).to_table()["id"].to_pylist()) == [1, 2]
        assert sorted(dataset(second.lance).to_table()["id"].to_pylist()) == [1, 3]
        second.iceberg.load_table("db.facts").append(id_rows(20))
    assert seen(root) == ([1, 2, 3], [10, 20])


def test_a_commit_beside_an_open_transaction_of_the_same_warehouse_is_not_lost(
    root: Path, lake: Warehouse
) -> None:
    with transaction(lake) as tx:
        write(tx.lance, "append", 2)
        write(Namespace(lake), "append", 3)
        lake.create_tag("t")
    assert lance_ids(reopen(root)) == [1, 2, 3]


# -- doing it again --------------------------------------------------------------------------------


def test_work_is_done_again_until_nobody_is_in_the_way(root: Path, lake: Warehouse) -> None:
    tampered = Tampered()
    late = reopen(root, opener=tampered, chance=Hasty())
    tries = []

    def work(tx: Changes) -> int:
        tries.append(iceberg_ids(tx.iceberg))
        both(tx)
        if len(tries) < 3:
            tampered.once("put_if_absent", VERSIONS, lambda: append_fact(root, 70 + len(tries)))
        return len(tries)

    assert run(late, work) == 3
    assert tries == [[10], [10, 71], [10, 71, 72]]
    assert seen(root) == ([1, 2], [10, 20, 71, 72])


def test_work_is_not_done_again_for_ever(root: Path, lake: Warehouse) -> None:
    tampered = Tampered()
    late = reopen(root, opener=tampered, chance=Hasty())
    tries = []

    def work(tx: Changes) -> None:
        tries.append(1)
        both(tx)
        tampered.once("put_if_absent", VERSIONS, lambda: append_fact(root, 70 + len(tries)))

    with pytest.raises(Conflict):
        run(late, work, attempts=3)
    assert len(tries) == 3
    assert seen(root) == ([1], [10, 71, 72, 73])


def test_work_that_cannot_succeed_or_fails_by_itself_is_not_done_again(
    root: Path, lake: Warehouse
) -> None:
    tries = []

    def work(tx: Changes) -> None:
        tries.append(1)
        both(tx)
        raise Stop

    with pytest.raises(Stop):
        run(lake, work)

    tampered = Tampered()
    late = reopen(root, opener=tampered, chance=Hasty())

    def hopeless(tx: Changes) -> None:
        tries.append(1)
        both(tx)
        tampered.once("put_if_absent", VERSIONS, lambda: reopen(root).drop(T))

    with pytest.raises(Conflict) as raised:
        run(late, hopeless)
    assert raised.value.kind is ErrorKind.INCOMPATIBLE
    assert len(tries) == 2


# -- fail at every step ----------------------------------------------------------------------------


def test_a_transaction_may_fail_anywhere(tmp_path: Path) -> None:
    """And is then done whole, or not at all; a rerun of the request ends in the same state."""
    place, saved = tmp_path / "lake", tmp_path / "saved"
    before = filled(place, actor="anna").known.version
    shutil.copytree(place, saved)

    def prepare() -> Opening:
        shutil.rmtree(place)
        shutil.copytree(saved, place)
        return Opener()

    def act(opener: Opening) -> None:
        with transaction(reopen(place, opener=opener), request="load-1") as tx:
            if tx.done_before is not None:
                return
            both(tx)
            write(tx.lance, "append", 3)
            write(tx.lance, "create", 5, name=("db", "new"))

    def check(opener: Opening, raised: Failure | None, where: str) -> None:
        lake = reopen(place)
        landed = lake.known.version == before + 1
        if raised is None:
            assert landed, where
        elif landed:
            assert is_open(raised), (where, raised)
        else:
            assert lake.known.version == before, where
            assert seen(place) == ([1], [10]), where
            assert names_of(lake) == ["db.facts", "db.t"], where
        act(opener)
        assert seen(place) == ([1, 2, 3], [10, 20]), where
        assert lance_ids(reopen(place), ("db", "new")) == [5], where
        assert reopen(place).known.version == before + 1, where

    assert every_step(tmp_path / "calls", prepare, act, check) > 10


def test_a_transaction_that_was_not_published_is_healed_by_the_next_reader(
    root: Path, lake: Warehouse
) -> None:
    tampered = Tampered()
    late = reopen(root, opener=tampered)

    def work() -> None:
        with transaction(late) as tx:
            both(tx)
            write(tx.lance, "append", 3)
            write(tx.lance, "create", 5, name=("db", "new"))
            tampered.once(
                "put_if_absent", VERSIONS, lambda: tampered.failing("put_if_absent", "/tables/")
            )

    with suppress(LakewardenError):
        work()
    assert seen(root) == ([1, 2, 3], [10, 20])
    assert lance_ids(reopen(root), ("db", "new")) == [5]
    found = lance.dataset(lake.read().table(T).location)
    assert [one["version"] for one in found.versions()] == [1, 2, 3]


def test_a_transaction_that_was_committed_does_not_fail_because_publishing_does(
    root: Path, lake: Warehouse
) -> None:
    """Who is told that it failed would load the same rows again."""
    tampered = Tampered()
    late = reopen(root, opener=tampered)
    with transaction(late) as tx:
        both(tx)
        tampered.once(
            "put_if_absent", VERSIONS, lambda: tampered.failing("put_if_absent", "/tables/")
        )
    assert seen(root) == ([1, 2], [10, 20])


def test_a_missing_table_is_told_inside(lake: Warehouse) -> None:
    with transaction(lake) as tx:
        with pytest.raises(NoSuchTableError):
            tx.iceberg.load_table("db.none")
        with pytest.raises(Exception, match=r"no table db\.none"):
            dataset(tx.lance, ("db", "none"))


def test_drift_is_told_with_its_reason(root: Path, lake: Warehouse) -> None:
    lance.write_dataset(
        pa.table({"id": pa.array([66], pa.int64())}), lake.read().table(T).location, mode="append"
    )

    def work() -> None:
        with transaction(lake) as tx:
            both(tx)

    with pytest.raises(Refused) as raised:
        work()
    assert raised.value.kind is ErrorKind.DRIFT
    assert iceberg_ids(catalog(root)) == [10]


@pytest.mark.parametrize("landed", [True, False])
def test_an_interrupt_takes_nothing_away_that_may_be_committed(
    lake: Warehouse, root: Path, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    """Somebody presses Ctrl-C while the version is being claimed."""
    claim = StoreHandler.claim

    def interrupted(self: StoreHandler, version: int, data: bytes) -> None:
        if landed:
            claim(self, version, data)
        raise KeyboardInterrupt

    def load() -> None:
        with transaction(lake) as tx:
            write(tx.lance, "append", 2)
            tx.iceberg.load_table("db.facts").append(id_rows(20))
            monkeypatch.setattr(StoreHandler, "claim", interrupted)

    before = seen(root)
    with pytest.raises(KeyboardInterrupt):
        load()
    monkeypatch.undo()
    after = ([*before[0], 2], [*before[1], 20]) if landed else before
    assert seen(root) == after


def test_work_that_fails_after_its_commit_takes_nothing_away(lake: Warehouse, root: Path) -> None:
    def load() -> None:
        with transaction(lake) as tx:
            write(tx.lance, "append", 2)
            tx.iceberg.load_table("db.facts").append(id_rows(20))
            tx.commit()
            raise ValueError("too late")

    before = seen(root)
    with pytest.raises(ValueError, match="too late"):
        load()
    assert seen(root) == ([*before[0], 2], [*before[1], 20])
