"""Lance tables in a warehouse, through pylance as its users call it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import lance_namespace as api
import pyarrow as pa
import pytest
from lance.commit import CommitConflictError
from lance_namespace.errors import (
    InternalError,
    TableAlreadyExistsError,
    TableNotFoundError,
)

from lakewarden.errors import (
    AlreadyExists,
    Conflict,
    ErrorKind,
    LakewardenError,
    NotFound,
    Refused,
    UsageError,
)
from lakewarden.model import Format
from lakewarden.warehouse.lance import Namespace, Waiting, tables_of
from lakewarden.warehouse.manifest import Operation
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import (
    IDS,
    VERSIONS,
    Hasty,
    T,
    Tampered,
    catalog,
    dataset,
    lance_ids,
    make,
    names_of,
    reopen,
    write,
)

ID = list(T)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def lake(root: Path) -> Warehouse:
    return make(root, actor="anna")


@pytest.fixture
def namespace(lake: Warehouse) -> Namespace:
    return Namespace(lake)


@pytest.fixture
def table(namespace: Namespace) -> Namespace:
    """The namespace, with table db.t of ids 0 to 9 and their squares, in two files."""
    for mode, start in (("create", 0), ("append", 5)):
        squares(namespace, mode, range(start, start + 5))
    return namespace


def squares(namespace: Namespace, mode: str, ids: range | list[int]) -> None:
    rows = pa.table({"id": pa.array(ids, pa.int64()), "square": [one * one for one in ids]})
    lance.write_dataset(rows, namespace_client=namespace, table_id=ID, mode=mode)


def rows(lake: Warehouse) -> dict[int, int]:
    """Return squares by id, after a look through another handle and by path."""
    fresh = reopen(lake.location.uri)
    lance_ids(fresh)
    found = dataset(Namespace(fresh)).to_table().to_pydict()
    assert len(found["id"]) == len(set(found["id"]))
    return dict(zip(found["id"], found["square"], strict=True))


SQUARES = {one: one * one for one in range(10)}


# -- every kind of change --------------------------------------------------------------------------


def test_a_table_is_made_in_two_versions_declared_and_written(
    lake: Warehouse, namespace: Namespace
) -> None:
    write(namespace, "create", 1, 2)
    assert lance_ids(lake) == [1, 2]
    done = [one.transaction.changes[0].operation for one in lake.history(2)]
    assert done == [Operation.OVERWRITE, Operation.CREATE]
    assert lake.read().version == 3


def merge(found: Any) -> None:
    new = pa.table({"id": pa.array([9, 10], pa.int64()), "square": [-1, 100]})
    found.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(new)


Step = tuple[Callable[[Any], object], Operation, dict[int, int]]
STEPS: dict[str, Step] = {
    "append": (
        lambda found: found.insert(pa.table({"id": [10], "square": [100]})),
        Operation.APPEND,
        {**SQUARES, 10: 100},
    ),
    "overwrite": (
        lambda found: lance.write_dataset(
            pa.table({"id": [1], "square": [7]}), found, mode="overwrite"
        ),
        Operation.OVERWRITE,
        {1: 7},
    ),
    "delete": (
        lambda found: found.delete("id >= 3"),
        Operation.DELETE,
        {0: 0, 1: 1, 2: 4},
    ),
    "delete of everything": (lambda found: found.delete("true"), Operation.DELETE, {}),
    "update": (
        lambda found: found.update({"square": "-1"}, where="id = 4"),
        Operation.UPDATE,
        {**SQUARES, 4: -1},
    ),
    "merge insert": (merge, Operation.UPDATE, {**SQUARES, 9: -1, 10: 100}),
    "index": (lambda found: found.create_scalar_index("id", "BTREE"), Operation.INDEX, SQUARES),
    "new column": (
        lambda found: found.add_columns({"cube": "square * id"}),
        Operation.MERGE,
        SQUARES,
    ),
    "renamed column": (
        lambda found: found.alter_columns({"path": "square", "nullable": True}),
        Operation.SCHEMA,
        SQUARES,
    ),
    "configuration": (lambda found: found.update_config({"a": "b"}), Operation.SCHEMA, SQUARES),
}


@pytest.mark.parametrize("step", STEPS)
def test_every_change_is_one_version_and_its_path_shows_it(
    lake: Warehouse, table: Namespace, step: str
) -> None:
    act, operation, expected = STEPS[step]
    before = lake.refresh().version
    with table.told():
        act(dataset(table))
    assert lake.refresh().version == before + 1
    assert rows(lake) == expected
    (last,) = lake.history(1)
    assert [one.operation for one in last.transaction.changes] == [operation]
    assert last.transaction.actor == "anna"


def test_dropped_columns_are_gone(lake: Warehouse, table: Namespace) -> None:
    dataset(table).add_columns({"cube": "square * id"})
    before = lake.refresh().version
    dataset(table).drop_columns(["cube"])
    assert lake.refresh().version == before + 1
    assert dataset(Namespace(reopen(lake.location.uri))).schema.names == ["id", "square"]
    assert rows(lake) == SQUARES


def test_compaction_changes_no_row(lake: Warehouse, table: Namespace) -> None:
    dataset(table).delete("id = 3")
    before = lake.refresh().version
    dataset(table).optimize.compact_files()
    assert len(dataset(table).get_fragments()) == 1
    assert rows(lake) == {one: square for one, square in SQUARES.items() if one != 3}
    done = [
        one.transaction.changes[0].operation for one in lake.history(lake.known.version - before)
    ]
    assert set(done) == {Operation.REWRITE}


def test_an_index_is_used_and_stays_through_other_changes(
    lake: Warehouse, table: Namespace
) -> None:
    dataset(table).create_scalar_index("id", "BTREE")
    squares(table, "append", [20])
    dataset(table).optimize.optimize_indices()
    found = dataset(Namespace(reopen(lake.location.uri)))
    assert found.to_table(filter="id = 20").num_rows == 1
    assert [index.name for index in found.describe_indices()] == ["id_idx"]


def test_lances_own_restore_is_a_version(lake: Warehouse, table: Namespace) -> None:
    dataset(table).delete("id > 2")
    before = lake.refresh().version
    old = dataset(table, version=2)
    old.restore()
    assert lake.refresh().version == before + 1
    assert rows(lake) == SQUARES


def test_all_versions_of_a_table_are_there(lake: Warehouse, table: Namespace) -> None:
    for number in range(10, 14):
        squares(table, "append", [number])
    found = dataset(table)
    assert [one["version"] for one in found.versions()] == [1, 2, 3, 4, 5, 6]
    by_path = lance.dataset(found.uri)
    assert [one["version"] for one in by_path.versions()] == [1, 2, 3, 4, 5, 6]
    assert [dataset(table, version=one).count_rows() for one in (1, 2, 6)] == [5, 10, 14]


def test_versions_are_listed_in_pages_in_both_orders(table: Namespace) -> None:
    for number in range(10, 13):
        squares(table, "append", [number])

    def listed(**more: Any) -> Any:
        return table.list_table_versions(api.ListTableVersionsRequest(id=ID, **more))

    assert [one.version for one in listed().versions] == [1, 2, 3, 4, 5]
    assert [one.version for one in listed(descending=True).versions] == [5, 4, 3, 2, 1]
    seen, token = [], None
    while True:
        page = listed(limit=2, page_token=token)
        seen += [one.version for one in page.versions]
        token = page.page_token
        if token is None:
            break
    assert seen == [1, 2, 3, 4, 5]


def test_an_old_handle_goes_on_from_where_the_table_is(lake: Warehouse, table: Namespace) -> None:
    old = dataset(table)
    squares(table, "append", [10])
    old.insert(pa.table({"id": [11], "square": [121]}))
    assert rows(lake) == {**SQUARES, 10: 100, 11: 121}


def test_a_table_may_lie_where_its_maker_says(lake: Warehouse, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    namespace = Namespace(lake)
    made = namespace.declare_table(api.DeclareTableRequest(id=ID, location=str(place)))
    assert made.location == str(place)
    write(namespace, "append", 1)
    assert lance.dataset(str(place)).count_rows() == 1
    assert lance_ids(lake) == [1]


def test_a_table_that_was_only_declared_can_be_written(lake: Warehouse) -> None:
    """Its maker may have died before the first write."""
    namespace = Namespace(lake)
    namespace.declare_table(api.DeclareTableRequest(id=ID))
    assert namespace.describe_table(api.DescribeTableRequest(id=ID)).is_only_declared
    write(namespace, "overwrite", 1)
    assert lance_ids(lake) == [1]


@pytest.mark.parametrize("place", ["with space", "with%20percent", "ümlaut", "plus+and#hash"])
def test_a_warehouse_may_lie_at_any_path(tmp_path: Path, place: str) -> None:
    lake = make(tmp_path / place)
    namespace = Namespace(lake)
    write(namespace, "create", 1)
    write(namespace, "append", 2)
    assert lance_ids(lake) == [1, 2]


# -- many at once ----------------------------------------------------------------------------------

Worker = Callable[[int], None]


def together(work: Worker, workers: int = 8) -> None:
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(work, range(workers)):
            pass


def appended(namespace: Namespace, worker: int, name: tuple[str, ...]) -> None:
    for step in range(5):
        write(namespace, "append", 100 * worker + step, name=name)


WRITTEN = [100 * worker + step for worker in range(8) for step in range(5)]


def test_no_append_of_many_writers_is_lost(root: Path, lake: Warehouse) -> None:
    write(Namespace(lake), "create", -1)
    before = lake.refresh().version
    together(lambda worker: appended(Namespace(reopen(root)), worker, T))
    assert lake.refresh().version == before + 40
    assert lance_ids(lake) == [-1, *WRITTEN]


def test_writers_of_different_tables_do_not_hinder_each_other(root: Path, lake: Warehouse) -> None:
    def work(worker: int) -> None:
        # They wait for each other often, and not long.
        namespace = Namespace(reopen(root, chance=Hasty()))
        name = ("db", f"t{worker}")
        write(namespace, "create", -1, name=name)
        appended(namespace, worker, name)

    before = lake.refresh().version
    together(work)
    assert lake.refresh().version == before + 8 * 7
    for worker in range(8):
        ids = [100 * worker + step for step in range(5)]
        assert lance_ids(lake, ("db", f"t{worker}")) == [-1, *ids]


def test_threads_may_share_a_namespace(lake: Warehouse, namespace: Namespace) -> None:
    write(namespace, "create", -1)
    together(lambda worker: appended(namespace, worker, T))
    assert lance_ids(reopen(lake.location.uri)) == [-1, *WRITTEN]


def test_threads_with_namespaces_of_their_own_may_share_a_warehouse(lake: Warehouse) -> None:
    write(Namespace(lake), "create", -1)
    together(lambda worker: appended(Namespace(lake), worker, T))
    assert lance_ids(reopen(lake.location.uri)) == [-1, *WRITTEN]
    assert lake.refresh().version == 43


def test_a_version_is_not_taken_that_another_namespace_has_just_got(
    root: Path, lake: Warehouse
) -> None:
    """Both share one warehouse; the other commits between our look at the head and our claim."""
    tampered = Tampered()
    shared = reopen(root, opener=tampered)
    write(Namespace(shared), "create", 1)
    other = Namespace(shared)
    tampered.once("put", "__manifest/_transactions/", lambda: write(other, "append", 2))
    write(Namespace(shared), "append", 3)
    assert lance_ids(reopen(root)) == [1, 2, 3]


def test_a_version_is_not_taken_that_was_got_while_ours_was_being_looked_at(
    root: Path, lake: Warehouse
) -> None:
    """The same, while our staged manifest is read."""
    tampered = Tampered()
    shared = reopen(root, opener=tampered)
    write(Namespace(shared), "create", 1)
    other = Namespace(shared)
    tampered.once("get", ".manifest-", lambda: write(other, "append", 2))
    write(Namespace(shared), "append", 3)
    assert lance_ids(reopen(root)) == [1, 2, 3]


def test_changes_of_many_kinds_at_once_leave_every_row(root: Path, lake: Warehouse) -> None:
    squares(Namespace(lake), "create", list(range(100)))

    def work(worker: int) -> None:
        namespace = Namespace(reopen(root))
        for step in range(3):
            if worker == 0:
                retried(lambda: compacted(namespace))
            elif worker == 1:
                retried(lambda: dataset(namespace).update({"square": "-1"}, where="id = 1"))
            else:
                new = 100 * worker + step
                squares(namespace, "append", [new])

    together(work, 4)
    expected = {one: one * one for one in range(100)} | {1: -1}
    expected |= {
        one: one * one for worker in (2, 3) for one in range(100 * worker, 100 * worker + 3)
    }
    assert rows(lake) == expected


def compacted(namespace: Namespace) -> None:
    dataset(namespace).optimize.compact_files()


def retried(act: Callable[[], object]) -> None:
    for _ in range(20):
        try:
            act()
        except (OSError, CommitConflictError):
            continue
        return
    raise AssertionError("never got through")


# -- conflicts -------------------------------------------------------------------------------------


def conflict(
    first: Callable[[Any], object], second: Callable[[Any], object], open_one: Callable[[], Any]
) -> type[BaseException] | None:
    """Do the second on a handle that has not seen the first; return how it fails."""
    ours = open_one()
    first(open_one())
    try:
        second(ours)
    except Exception as error:  # noqa: BLE001  # whatever pylance raises
        return type(error)
    return None


CHANGES: dict[str, Callable[[Any], object]] = {
    "append": STEPS["append"][0],
    "overwrite": STEPS["overwrite"][0],
    "delete": lambda found: found.delete("id = 3"),
    "update": lambda found: found.update({"square": "-1"}, where="id = 3"),
    "columns": STEPS["new column"][0],
    "compaction": lambda found: found.optimize.compact_files(),
    "restore": lambda found: found.restore(),
}


@pytest.mark.parametrize("second", CHANGES)
@pytest.mark.parametrize("first", CHANGES)
def test_conflicts_are_those_of_plain_lance(
    lake: Warehouse, table: Namespace, tmp_path: Path, first: str, second: str
) -> None:
    place = str(tmp_path / "plain.lance")
    for start in (0, 5):
        ids = range(start, start + 5)
        new = pa.table({"id": pa.array(ids, pa.int64()), "square": [one * one for one in ids]})
        lance.write_dataset(new, place, mode="append" if start else "create")
    plain = conflict(CHANGES[first], CHANGES[second], lambda: lance.dataset(place))
    ours = conflict(CHANGES[first], CHANGES[second], lambda: dataset(table))
    assert ours is plain
    expected = lance.dataset(place).to_table().sort_by("id")
    found = dataset(Namespace(reopen(lake.location.uri))).to_table().sort_by("id")
    assert found == expected
    lance_ids(lake)


def test_of_two_who_make_one_table_one_is_told(root: Path, lake: Warehouse) -> None:
    write(Namespace(lake), "create", 1)
    with pytest.raises(Exception, match="there is a table"):
        write(Namespace(reopen(root)), "create", 2)
    assert lance_ids(lake) == [1]


def test_nothing_is_written_to_a_table_that_was_dropped_meanwhile(
    lake: Warehouse, table: Namespace
) -> None:
    old = dataset(table)
    lake.drop(T)
    with pytest.raises(LakewardenError), table.told():
        old.insert(pa.table({"id": [10], "square": [100]}))
    lake.undrop(T)
    assert rows(lake) == SQUARES


def test_a_handle_goes_on_after_a_rename_only_under_the_new_name(
    lake: Warehouse, table: Namespace
) -> None:
    lake.rename(T, ("db", "new"))
    with pytest.raises(TableNotFoundError):
        dataset(table)
    assert lance_ids(lake, ("db", "new")) == list(range(10))


# -- between claim and publication -----------------------------------------------------------------


@pytest.fixture
def tampered() -> Tampered:
    return Tampered()


@pytest.fixture
def watched(root: Path, lake: Warehouse, tampered: Tampered) -> Namespace:
    """A namespace over stores that can be made to fail, with table db.t of id 1."""
    namespace = Namespace(reopen(root, opener=tampered))
    write(namespace, "create", 1)
    return namespace


def fail_publication(tampered: Tampered, times: int = 10**6) -> None:
    """Let no manifest of the next version of a table reach its public name."""
    tampered.failing("put_if_absent", f"/_versions/{2**64 - 1 - 2:020d}.manifest", times)


def test_a_version_that_was_claimed_and_not_published_is_healed_by_the_next_reader(
    root: Path, lake: Warehouse, tampered: Tampered, watched: Namespace
) -> None:
    before = lake.refresh().version
    fail_publication(tampered)
    with suppress(LakewardenError), watched.told():
        write(watched, "append", 2)
    location = lake.read().table(T).location
    assert lake.read().version == before + 1
    assert lance.dataset(location).count_rows() == 1
    assert dataset(Namespace(reopen(root))).count_rows() == 2
    assert lance.dataset(location).count_rows() == 2
    assert lance_ids(lake) == [1, 2]


def test_a_version_that_was_not_published_is_healed_by_the_next_writer(
    root: Path, lake: Warehouse, tampered: Tampered, watched: Namespace
) -> None:
    fail_publication(tampered)
    with suppress(LakewardenError), watched.told():
        write(watched, "append", 2)
    write(Namespace(reopen(root)), "append", 3)
    assert lance_ids(lake) == [1, 2, 3]


def test_a_writer_is_not_told_that_it_failed_when_its_version_only_waits_to_be_published(
    root: Path, lake: Warehouse, tampered: Tampered, watched: Namespace
) -> None:
    """Who is told `storage` would write the rows again."""
    fail_publication(tampered)
    raised: LakewardenError | None = None
    try:
        with watched.told():
            write(watched, "append", 2)
    except LakewardenError as error:
        raised = error
    assert raised is None or raised.kind is ErrorKind.COMMIT_UNKNOWN
    assert lance_ids(reopen(root)) == [1, 2]


@pytest.mark.parametrize("times", [1, 2])
def test_a_hiccup_while_publishing_goes_unnoticed(
    root: Path, lake: Warehouse, tampered: Tampered, watched: Namespace, times: int
) -> None:
    before = lake.refresh().version
    fail_publication(tampered, times)
    write(watched, "append", 2)
    assert lance_ids(reopen(root)) == [1, 2]
    assert lake.refresh().version == before + 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", range(1, 13))
def test_rows_are_written_once_however_often_the_claim_or_its_answer_is_lost(
    root: Path, lake: Warehouse, tampered: Tampered, watched: Namespace, when: Any, times: int
) -> None:
    """From the claim on, so many calls to the log fail."""
    before = lake.refresh().version
    left, claimed = [times], [False]

    def rule(method: str, key: str) -> Any:
        claimed[0] = claimed[0] or (method == "put_if_absent" and VERSIONS in key)
        if claimed[0] and VERSIONS in key and left[0]:
            left[0] -= 1
            return when
        return None

    tampered.rule = rule
    raised: LakewardenError | None = None
    try:
        with watched.told():
            write(watched, "append", 2)
    except LakewardenError as error:
        raised = error
    fresh = reopen(root)
    landed = fresh.known.version - before
    assert landed in (0, 1)
    assert lance_ids(fresh) == ([1, 2] if landed else [1])
    if raised is None:
        assert landed
    elif landed:
        assert raised.kind is ErrorKind.COMMIT_UNKNOWN
    write(Namespace(fresh), "append", 3)
    assert lance_ids(reopen(root)) == ([1, 2, 3] if landed else [1, 3])


def test_no_staged_manifest_is_left_behind(lake: Warehouse, table: Namespace) -> None:
    squares(table, "append", [10])
    place = Path(lake.read().table(T).location) / "_versions"
    assert [one.name for one in place.iterdir() if ".manifest-" in one.name] == []


# -- drift -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_a_commit_by_path_is_not_seen_and_the_next_one_through_us_is_refused(
    lake: Warehouse, namespace: Namespace, mode: str
) -> None:
    write(namespace, "create", 1)
    before = lake.refresh().version
    location = lake.read().table(T).location
    lance.write_dataset(pa.table({"id": [66]}), location, mode="append")
    assert dataset(namespace).to_table()["id"].to_pylist() == [1]
    with pytest.raises(Refused, match="past the warehouse") as raised, namespace.told():
        write(namespace, mode, 2)
    assert raised.value.kind is ErrorKind.DRIFT
    assert lake.refresh().version == before
    assert dataset(Namespace(reopen(lake.location.uri))).to_table()["id"].to_pylist() == [1]
    assert sorted(lance.dataset(location).to_table()["id"].to_pylist()) == [1, 66]


def test_drift_of_one_table_does_not_touch_another(lake: Warehouse, namespace: Namespace) -> None:
    write(namespace, "create", 1)
    lance.write_dataset(pa.table({"id": [66]}), lake.read().table(T).location, mode="append")
    write(namespace, "create", 1, name=("db", "other"))
    write(namespace, "append", 2, name=("db", "other"))
    assert lance_ids(lake, ("db", "other")) == [1, 2]


def test_a_commit_by_path_between_claim_and_publication_is_drift_and_loses_nothing(
    root: Path, lake: Warehouse, tampered: Tampered, watched: Namespace
) -> None:
    """The version is ours in the log; its public name holds what somebody wrote by path."""
    location = lake.read().table(T).location
    by_path = lance.dataset(location)
    tampered.once(
        "put_if_absent",
        VERSIONS,
        lambda: by_path.insert(pa.table({"id": pa.array([66], pa.int64())})),
    )
    with pytest.raises(LakewardenError) as raised, watched.told():
        write(watched, "append", 2)
    assert raised.value.kind in (ErrorKind.DRIFT, ErrorKind.COMMIT_UNKNOWN)
    fresh = reopen(root)
    with pytest.raises(LakewardenError) as raised, (again := Namespace(fresh)).told():
        # Never their rows under the name of ours.
        assert dataset(again).to_table()["id"].to_pylist() == [1, 2]
    assert raised.value.kind is ErrorKind.DRIFT


# -- tables ----------------------------------------------------------------------------------------


def test_tables_are_listed_described_and_found(root: Path, lake: Warehouse) -> None:
    namespace = Namespace(lake)
    for name in (("top",), ("db", "a"), ("db", "b"), ("db", "deep", "c"), ("other", "d")):
        write(namespace, "create", 1, name=name)
    facts = catalog(root)
    facts.create_table("db.facts", IDS)

    def listed(*space: str, **more: Any) -> Any:
        return namespace.list_tables(api.ListTablesRequest(id=list(space), **more))

    assert listed().tables == ["top"]
    assert listed("db").tables == ["a", "b"]
    assert listed("db", "deep").tables == ["c"]
    assert listed("none").tables == []
    page = listed("db", limit=1)
    assert page.tables == ["a"]
    assert listed("db", limit=1, page_token=page.page_token).tables == ["b"]
    spaces = namespace.list_namespaces(api.ListNamespacesRequest(id=[]))
    assert spaces.namespaces == ["db", "other"]
    spaces = namespace.list_namespaces(api.ListNamespacesRequest(id=["db"]))
    assert spaces.namespaces == ["deep"]
    told = namespace.describe_table(api.DescribeTableRequest(id=["db", "a"]))
    assert (told.table, told.namespace, told.version) == ("a", ["db"], 1)
    assert told.managed_versioning
    assert not told.is_only_declared
    namespace.table_exists(api.TableExistsRequest(id=["db", "a"]))
    for missing in (["db", "none"], ["a"], ["db", "facts"]):
        with pytest.raises(TableNotFoundError):
            namespace.table_exists(api.TableExistsRequest(id=missing))
        with pytest.raises(TableNotFoundError):
            namespace.describe_table(api.DescribeTableRequest(id=missing))


def test_requests_may_be_dictionaries(table: Namespace) -> None:
    assert table.describe_table({"id": ID}).version == 2
    assert table.list_tables({"id": ["db"]}).tables == ["t"]


def test_a_table_is_dropped_and_its_files_stay(lake: Warehouse, table: Namespace) -> None:
    location = Path(lake.read().table(T).location)
    files = {one for one in location.rglob("*") if one.is_file()}
    table.drop_table(api.DropTableRequest(id=ID))
    assert {one for one in location.rglob("*") if one.is_file()} == files
    assert names_of(lake) == []
    with pytest.raises(TableNotFoundError):
        table.drop_table(api.DropTableRequest(id=ID))
    with pytest.raises(TableNotFoundError):
        dataset(table)
    write(table, "create", 5)
    assert lance_ids(lake) == [5]
    assert {one for one in location.rglob("*") if one.is_file()} == files


def test_a_table_is_renamed_within_and_across_namespaces(lake: Warehouse, table: Namespace) -> None:
    table.rename_table(api.RenameTableRequest(id=ID, new_table_name="u"))
    assert names_of(lake) == ["db.u"]
    table.rename_table(
        api.RenameTableRequest(id=["db", "u"], new_table_name="v", new_namespace_id=["x", "y"])
    )
    assert names_of(lake) == ["x.y.v"]
    write(table, "create", 1)
    with pytest.raises(TableAlreadyExistsError):
        table.rename_table(
            api.RenameTableRequest(id=ID, new_table_name="v", new_namespace_id=["x", "y"])
        )
    assert lance_ids(lake, ("x", "y", "v")) == list(range(10))


@pytest.mark.parametrize(
    "name", [("__manifest",), ("a/b",), ("a", ""), ("a.b",), ("a$b",), ("x" * 256,), ("tab\there",)]
)
def test_a_bad_name_makes_no_table(
    lake: Warehouse, namespace: Namespace, name: tuple[str, ...]
) -> None:
    with pytest.raises(Exception, match="cannot be a name"):
        write(namespace, "create", 1, name=name)
    assert lake.refresh().version == 1
    assert not (Path(lake.location.uri) / "tables").exists()


@pytest.mark.parametrize("name", [("Größe", "数"), ("with space",), ("a-b_c",), ("x" * 255,)])
def test_other_names_are_fine(lake: Warehouse, namespace: Namespace, name: tuple[str, ...]) -> None:
    write(namespace, "create", 1, name=name)
    write(namespace, "append", 2, name=name)
    assert lance_ids(lake, name) == [1, 2]


def test_one_name_in_two_spellings_is_one_table(lake: Warehouse, namespace: Namespace) -> None:
    composed, apart = ("db", "na\u00efve"), ("db", "nai\u0308ve")
    write(namespace, "create", 1, name=apart)
    write(namespace, "append", 2, name=composed)
    write(namespace, "append", 3, name=apart)
    assert lance_ids(lake, composed) == [1, 2, 3]


# -- what is refused -------------------------------------------------------------------------------


def test_lances_own_branches_are_refused_and_ours_are_named(
    lake: Warehouse, table: Namespace
) -> None:
    before = lake.refresh().version
    with pytest.raises(OSError, match="lakewarden branch"):
        dataset(table).create_branch("side")
    assert lake.refresh().version == before
    assert rows(lake) == SQUARES


def test_a_manifest_of_another_table_is_refused(lake: Warehouse, table: Namespace) -> None:
    write(table, "create", 1, name=("db", "other"))
    theirs = Path(lake.read().table(("db", "other")).location)
    (manifest,) = (theirs / "_versions").glob("*.manifest")
    request = api.CreateTableVersionRequest(
        id=ID, version=3, manifest_path=str(manifest).lstrip("/"), naming_scheme="V2"
    )
    with pytest.raises(InternalError, match="is not one of table"):
        table.create_table_version(request)
    assert rows(lake) == SQUARES


# -- the past --------------------------------------------------------------------------------------


def seen_at(lake: Warehouse, **at: Any) -> list[int]:
    """Read a table as it was at a version of the warehouse."""
    then = Namespace(lake, Waiting(tables_of(lake), lake.read(**at)))
    with then.told():
        ids: list[int] = sorted(dataset(then).to_table()["id"].to_pylist())
    return ids


def test_an_older_version_of_the_warehouse_has_the_rows_that_were_pinned(
    root: Path, lake: Warehouse
) -> None:
    namespace = Namespace(lake)
    write(namespace, "create", 1)
    for number in (2, 3):
        write(namespace, "append", number)
    lake.create_tag("three")
    lake.create_branch("side")
    write(namespace, "overwrite", 9)
    fresh = reopen(root)
    assert [seen_at(fresh, version=version) for version in (3, 4, 5)] == [[1], [1, 2], [1, 2, 3]]
    assert seen_at(fresh, tag="three") == [1, 2, 3]
    assert seen_at(fresh, branch="side") == [1, 2, 3]
    view = fresh.read(version=4)
    table = view.table(T)
    by_path = lance.dataset(table.location, version=view.pins[table.id].version)
    assert by_path.count_rows() == 2


def test_a_version_that_lance_has_cleaned_is_told_as_reclaimed(root: Path, lake: Warehouse) -> None:
    """Somebody has run Lance's own cleanup on the table."""
    namespace = Namespace(lake)
    write(namespace, "create", 1)
    good = lake.read().version
    write(namespace, "overwrite", 2)
    lance.dataset(lake.read().table(T).location).cleanup_old_versions(
        older_than=timedelta(0), delete_unverified=True
    )
    fresh = reopen(root)
    assert lance_ids(fresh) == [2]
    raised: LakewardenError | None = None
    try:
        # Never the rows of another version.
        assert seen_at(fresh, version=good) == [1]
    except LakewardenError as error:
        raised = error
    assert raised is not None
    assert raised.kind is ErrorKind.RECLAIMED


def test_a_cleaned_version_cannot_be_restored_and_nothing_changes(
    root: Path, lake: Warehouse
) -> None:
    namespace = Namespace(lake)
    write(namespace, "create", 1)
    good = lake.read().version
    write(namespace, "overwrite", 2)
    before = lake.read().version
    lance.dataset(lake.read().table(T).location).cleanup_old_versions(
        older_than=timedelta(0), delete_unverified=True
    )
    fresh = reopen(root)
    with pytest.raises(NotFound) as raised:
        fresh.restore(fresh.read(version=good))
    assert raised.value.kind is ErrorKind.RECLAIMED
    assert fresh.read().version == before
    assert lance_ids(fresh) == [2]


# -- what went wrong -------------------------------------------------------------------------------


def test_told_raises_what_went_wrong_here(lake: Warehouse, table: Namespace) -> None:
    """Whether pylance has wrapped it or not."""
    with pytest.raises(NotFound), table.told():
        dataset(table, ("db", "none"))
    with pytest.raises(AlreadyExists), table.told():
        write(table, "create", 1)
    with pytest.raises(UsageError), table.told():
        write(table, "create", 1, name=("a/b",))
    lance.write_dataset(dataset(table).to_table(), lake.read().table(T).location, mode="append")
    with pytest.raises(Refused), table.told():
        squares(table, "append", [10])


def test_told_leaves_other_errors_alone(namespace: Namespace) -> None:
    with pytest.raises(ZeroDivisionError), namespace.told():
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="mine"), namespace.told():
        raise ValueError("mine")


def test_told_leaves_an_error_alone_that_has_nothing_to_do_with_an_earlier_one(
    namespace: Namespace,
) -> None:
    def work() -> None:
        with pytest.raises(TableNotFoundError):
            namespace.table_exists(api.TableExistsRequest(id=ID))
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), namespace.told():
        work()


def test_threads_are_told_their_own_troubles(namespace: Namespace) -> None:
    def work(worker: int) -> str:
        with pytest.raises(NotFound) as raised, namespace.told():
            dataset(namespace, ("db", f"none{worker}"))
        return raised.value.message

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(work, [*range(4)] * 5))
    for worker, message in zip([*range(4)] * 5, told, strict=True):
        assert f"db.none{worker} " in message


def test_both_formats_know_of_a_name_that_is_taken(root: Path, lake: Warehouse) -> None:
    facts = catalog(root)
    facts.create_namespace("db")
    facts.create_table("db.t", IDS)
    namespace = Namespace(lake)
    with pytest.raises(TableAlreadyExistsError):
        write(namespace, "create", 1)
    assert lake.read().table(T).format is Format.ICEBERG


def test_a_conflict_is_not_the_end_of_a_namespace(root: Path, lake: Warehouse) -> None:
    namespace = Namespace(lake)
    write(namespace, "create", 1)
    old = dataset(namespace)
    write(Namespace(reopen(root)), "overwrite", 2)
    with pytest.raises((OSError, Conflict, CommitConflictError)):
        old.delete("id = 1")
    write(namespace, "append", 3)
    assert lance_ids(lake) == [2, 3]
