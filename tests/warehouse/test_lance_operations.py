"""Every operation of Lance's namespace interface: it is done, or what to do instead is said."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import lance_namespace as api
import pytest
from lance_namespace.errors import (
    ConcurrentModificationError,
    InternalError,
    LanceNamespaceError,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NamespaceNotFoundError,
    TableAlreadyExistsError,
    TableNotFoundError,
    TableTagAlreadyExistsError,
    TableTagNotFoundError,
    TableVersionNotFoundError,
    UnsupportedOperationError,
)

from lakewarden.errors import Refused
from lakewarden.model import WAREHOUSE_MARK
from lakewarden.warehouse.lance import Namespace, Reading
from lakewarden.warehouse.manifest import Operation
from lakewarden.warehouse.refusals import ADVICE
from lakewarden.warehouse.transaction import transaction
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import (
    IDS,
    T,
    catalog,
    dataset,
    id_rows,
    lance_ids,
    make,
    names_of,
    reopen,
    write,
)

ID = list(T)
OTHER = ["db", "other"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def lake(root: Path) -> Warehouse:
    return make(root)


@pytest.fixture
def namespace(lake: Warehouse) -> Namespace:
    """The namespace of a warehouse with tables db.t and db.other, of id 1 each."""
    found = Namespace(lake)
    for name in (T, ("db", "other")):
        write(found, "create", 1, name=name)
    return found


# -- all of them -----------------------------------------------------------------------------------


def operations() -> list[str]:
    offered = inspect.getmembers(api.LanceNamespace, inspect.isfunction)
    return [name for name, _ in offered if not name.startswith("_")]


@pytest.mark.parametrize("name", operations())
def test_every_operation_is_done_or_says_what_to_do_instead(
    lake: Warehouse, namespace: Namespace, name: str
) -> None:
    ours, theirs = getattr(Namespace, name), getattr(api.LanceNamespace, name)
    assert ours is not theirs
    if name not in ADVICE:
        assert name in vars(Namespace)
        return
    before = lake.refresh().version
    arguments = ({"id": ID}, b"")[: len(inspect.signature(theirs).parameters) - 1]
    with pytest.raises(UnsupportedOperationError) as raised:
        getattr(namespace, name)(*arguments)
    assert ADVICE[name] in str(raised.value)
    assert "\n" not in ADVICE[name]
    assert lake.refresh().version == before


def test_nothing_is_refused_that_is_not_offered() -> None:
    assert set(ADVICE) <= set(operations())
    assert not set(ADVICE) & set(vars(Namespace))


# -- registering -----------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A Lance table that no warehouse knows, of ids 1 and 2, in two versions."""
    place = tmp_path / "outside"
    for one in (1, 2):
        lance.write_dataset(id_rows(one), place, mode="append" if place.exists() else "create")
    return place


def register(namespace: Namespace, place: Path, name: list[str], **more: Any) -> Any:
    return namespace.register_table({"id": name, "location": str(place), **more})


def test_a_table_that_was_there_is_registered_and_goes_on(
    lake: Warehouse, namespace: Namespace, outside: Path
) -> None:
    before = lake.refresh().version
    told = register(namespace, outside, ["db", "old"], properties={"owner": "anna"})
    assert (told.location, told.properties) == (str(outside), {"owner": "anna"})
    assert lake.refresh().version == before + 1
    name = ("db", "old")
    assert lance_ids(lake, name) == [1, 2]
    assert lake.read().table(name).external
    assert (outside / WAREHOUSE_MARK).exists()
    write(namespace, "append", 3, name=name)
    lake.create_branch("dev")
    write(Namespace(lake, branch="dev"), "append", 4, name=name)
    assert lance_ids(lake, name) == [1, 2, 3]
    assert sorted(lance.dataset(outside).to_table()["id"].to_pylist()) == [1, 2, 3]


def test_a_table_of_old_names_is_registered(
    lake: Warehouse, namespace: Namespace, tmp_path: Path
) -> None:
    place = tmp_path / "old"
    for mode in ("create", "append"):
        lance.write_dataset(id_rows(1), place, mode=mode, enable_v2_manifest_paths=False)
    register(namespace, place, ["old"])
    write(namespace, "append", 2, name=("old",))
    assert lance_ids(lake, ("old",)) == [1, 1, 2]


def test_what_cannot_be_registered_is_refused(
    lake: Warehouse, namespace: Namespace, outside: Path, tmp_path: Path
) -> None:
    before = lake.refresh().version
    inner = Path(lake.read().table(T).location) / "data"
    with pytest.raises(TableAlreadyExistsError):
        register(namespace, outside, ID)
    with pytest.raises(InternalError, match="no Lance table in"):
        register(namespace, tmp_path / "nothing", ["new"])
    lance.write_dataset(id_rows(1), inner)
    with pytest.raises(InternalError, match="overlaps"):
        register(namespace, inner, ["new"])
    with pytest.raises(InternalError, match="not registered over"):
        register(namespace, outside, ["new"], mode="Overwrite")
    assert not (outside / WAREHOUSE_MARK).exists()
    other = make(tmp_path / "second")
    register(Namespace(other), outside, ["new"])
    with pytest.raises(InternalError, match=r"another warehouse.*second"):
        register(namespace, outside, ["new"])
    (outside / WAREHOUSE_MARK).write_text("[]")
    with pytest.raises(InternalError, match="another warehouse"):
        register(namespace, outside, ["new"])
    assert lake.refresh().version == before


def test_forks_of_another_warehouse_are_not_taken_for_ours(
    lake: Warehouse, namespace: Namespace, outside: Path
) -> None:
    version = lake.refresh().version
    lance.dataset(outside).create_branch(f"lakewarden-{version + 2}")
    with pytest.raises(InternalError, match=f"lakewarden-{version + 2}.*branches.delete"):
        register(namespace, outside, ["new"])
    lance.dataset(outside).branches.delete(f"lakewarden-{version + 2}")
    lance.dataset(outside).create_branch("lakewarden-1")
    lance.dataset(outside).create_branch("theirs")
    register(namespace, outside, ["new"])


def test_a_table_that_is_let_go_keeps_its_files_and_can_come_back(
    lake: Warehouse, namespace: Namespace, root: Path
) -> None:
    table = lake.read().table(T)
    place = Path(table.location)
    good = lake.read()
    told = namespace.deregister_table({"id": ID})
    assert (told.id, told.location) == (ID, str(place))
    assert names_of(lake) == ["db.other"]
    assert not (place / WAREHOUSE_MARK).exists()
    kept = reopen(root).known.manifest.tables[table.id]
    assert (kept.external, kept.dropped) == (True, lake.refresh().version)
    lance.write_dataset(id_rows(2), place, mode="append")
    register(namespace, place, ["db", "again"])
    back = lake.read().table(("db", "again"))
    assert (back.id, back.external, back.dropped) == (table.id, True, None)
    assert (place / WAREHOUSE_MARK).exists()
    assert lance_ids(lake, ("db", "again")) == [1, 2]
    lake.restore(good, T)
    assert lance_ids(lake, ("db", "again")) == [1]


def test_a_table_that_is_let_go_can_be_undropped(lake: Warehouse, namespace: Namespace) -> None:
    namespace.deregister_table({"id": ID})
    lake.undrop(T)
    assert lance_ids(lake) == [1]
    place = Path(lake.read().table(T).location)
    assert json.loads((place / WAREHOUSE_MARK).read_text())["warehouse"] == lake.location.uri


def test_a_table_that_a_branch_has_is_not_let_go(lake: Warehouse, namespace: Namespace) -> None:
    lake.create_branch("dev")
    with pytest.raises(ConcurrentModificationError, match="branch dev still has"):
        namespace.deregister_table({"id": ID})
    lake.drop(T, branch="dev")
    dev = Namespace(lake, branch="dev")
    with pytest.raises(TableNotFoundError):
        dev.deregister_table({"id": ID})
    namespace.deregister_table({"id": ID})
    write(dev, "create", 5, name=("db", "own"))
    with pytest.raises(LanceNamespaceError):
        dev.deregister_table({"id": ["db", "own"]})
    assert names_of(lake, branch="dev") == ["db.other", "db.own"]


# -- several at once -------------------------------------------------------------------------------


class Held(Namespace):
    """A namespace whose clients stage versions and do not get them; what they asked is kept."""

    def __init__(self, warehouse: Warehouse) -> None:
        super().__init__(warehouse)
        self.asked: list[dict[str, Any]] = []

    def create_table_version(self, request: Any) -> Any:
        self.asked.append(dict(request))
        raise InternalError("held back")


def staged(lake: Warehouse, *names: list[str]) -> list[dict[str, Any]]:
    """Let clients stage a version of each table with one more id, 2."""
    held = Held(lake)
    for name in names:
        with pytest.raises(OSError, match=r"held back|Commit result"):
            write(held, "append", 2, name=tuple(name))
    return [one for number, one in enumerate(held.asked) if one not in held.asked[:number]]


def test_versions_of_several_tables_are_one_of_the_warehouse(
    lake: Warehouse, namespace: Namespace
) -> None:
    entries = staged(lake, ID, OTHER)
    before = lake.refresh().version
    told = namespace.batch_create_table_versions({"entries": entries})
    assert [one.version for one in told.versions] == [2, 2]
    assert lake.refresh().version == before + 1
    assert lance_ids(lake) == lance_ids(lake, tuple(OTHER)) == [1, 2]
    (last,) = lake.history(1)
    assert [one.operation for one in last.transaction.changes] == [Operation.APPEND] * 2
    assert last.transaction.message == "append db.t; append db.other"


def test_if_one_of_several_is_outrun_none_is_committed(
    root: Path, lake: Warehouse, namespace: Namespace
) -> None:
    entries = staged(lake, ID, OTHER)
    write(Namespace(reopen(root)), "append", 7, name=tuple(OTHER))
    with pytest.raises(ConcurrentModificationError):
        namespace.batch_create_table_versions({"entries": entries})
    assert (lance_ids(lake), lance_ids(lake, tuple(OTHER))) == ([1], [1, 7])


def test_a_batch_of_different_operations_is_one_version(
    lake: Warehouse, namespace: Namespace
) -> None:
    (entry,) = staged(lake, ID)
    before = lake.refresh().version
    done = namespace.batch_commit_tables(
        {
            "operations": [
                {"create_table_version": entry},
                {"declare_table": {"id": ["db", "new"]}},
                {"deregister_table": {"id": OTHER}},
            ]
        }
    ).results
    assert lake.refresh().version == before + 1
    assert done[0].create_table_version.version.version == 2
    assert done[1].declare_table.managed_versioning
    assert done[2].deregister_table.id == OTHER
    assert names_of(lake) == ["db.new", "db.t"]
    assert lance_ids(lake) == [1, 2]
    write(namespace, "append", 5, name=("db", "new"))
    assert lance_ids(lake, ("db", "new")) == [5]


def declare(name: list[str]) -> dict[str, Any]:
    return {"declare_table": {"id": name}}


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ([declare(["new"]), {"deregister_table": {"id": ["none"]}}], TableNotFoundError),
        ([declare(["new"]), declare(["new"])], TableAlreadyExistsError),
        ([declare(["new"]), declare(ID)], TableAlreadyExistsError),
        ([{"deregister_table": {"id": ID}}] * 2, InternalError),
        ([declare(["new"]), {"delete_table_versions": {"ranges": []}}], UnsupportedOperationError),
    ],
)
def test_a_batch_with_something_wrong_changes_nothing(
    lake: Warehouse,
    namespace: Namespace,
    wanted: list[dict[str, Any]],
    error: type[LanceNamespaceError],
) -> None:
    before = lake.refresh().version
    with pytest.raises(error):
        namespace.batch_commit_tables({"operations": wanted})
    assert lake.refresh().version == before
    assert names_of(lake) == ["db.other", "db.t"]


def test_a_batch_is_not_part_of_a_transaction(lake: Warehouse, namespace: Namespace) -> None:
    with transaction(lake) as tx, pytest.raises(InternalError, match="ask for each by itself"):
        tx.lance.batch_commit_tables({"operations": [declare(["new"])]})
    assert names_of(lake) == ["db.other", "db.t"]


# -- a table's own tags ----------------------------------------------------------------------------


def tags(namespace: Namespace) -> dict[str, int]:
    found = namespace.list_table_tags({"id": ID}).tags
    return {name: one.version for name, one in found.items()}


def test_a_table_has_tags_of_its_own(lake: Warehouse, namespace: Namespace) -> None:
    write(namespace, "append", 2)
    assert tags(namespace) == {}
    namespace.create_table_tag({"id": ID, "tag": "first", "version": 1})
    namespace.create_table_tag({"id": ID, "tag": "second", "version": 2})
    assert tags(namespace) == {"first": 1, "second": 2}
    assert dataset(namespace, version="first").count_rows() == 1
    namespace.update_table_tag({"id": ID, "tag": "first", "version": 2})
    assert namespace.get_table_tag_version({"id": ID, "tag": "first"}).version == 2
    namespace.delete_table_tag({"id": ID, "tag": "first"})
    assert tags(namespace) == {"second": 2}
    page = namespace.list_table_tags({"id": ID, "limit": 1})
    assert (list(page.tags), page.page_token) == (["second"], None)


def test_what_is_wrong_with_a_tag_is_told(lake: Warehouse, namespace: Namespace) -> None:
    namespace.create_table_tag({"id": ID, "tag": "x", "version": 1})
    with pytest.raises(TableTagAlreadyExistsError):
        namespace.create_table_tag({"id": ID, "tag": "x", "version": 1})
    with pytest.raises(TableVersionNotFoundError):
        namespace.create_table_tag({"id": ID, "tag": "y", "version": 2})
    wanted: list[Callable[[], object]] = [
        lambda: namespace.get_table_tag_version({"id": ID, "tag": "y"}),
        lambda: namespace.update_table_tag({"id": ID, "tag": "y", "version": 1}),
        lambda: namespace.delete_table_tag({"id": ID, "tag": "y"}),
    ]
    for act in wanted:
        with pytest.raises(TableTagNotFoundError):
            act()
    with transaction(lake) as tx, pytest.raises(InternalError, match="outside transactions"):
        tx.lance.create_table_tag({"id": ID, "tag": "y", "version": 1})


def test_tags_on_a_branch_are_those_of_the_branch(lake: Warehouse, namespace: Namespace) -> None:
    lake.create_branch("dev")
    dev = Namespace(lake, branch="dev")
    write(dev, "append", 5)
    namespace.create_table_tag({"id": ID, "tag": "here", "version": 1})
    dev.create_table_tag({"id": ID, "tag": "there", "version": 2})
    assert (tags(namespace), tags(dev)) == ({"here": 1}, {"there": 2})
    with pytest.raises(TableTagAlreadyExistsError):
        namespace.create_table_tag({"id": ID, "tag": "there", "version": 1})


# -- namespaces ------------------------------------------------------------------------------------


def spaces(namespace: Namespace, *parent: str) -> list[str]:
    found: list[str] = namespace.list_namespaces({"id": list(parent)}).namespaces
    return found


def test_namespaces_are_those_of_both_formats(
    root: Path, lake: Warehouse, namespace: Namespace
) -> None:
    made = {"id": ["a", "b"], "properties": {"owner": "anna"}}
    assert namespace.create_namespace(made).properties == {"owner": "anna"}
    assert spaces(namespace) == ["a", "db"]
    assert spaces(namespace, "a") == ["b"]
    iceberg = catalog(root)
    assert iceberg.load_namespace_properties("a.b") == {"owner": "anna"}
    iceberg.create_namespace("c")
    iceberg.create_table("c.facts", IDS)
    assert spaces(namespace) == ["a", "c", "db"]
    assert namespace.describe_namespace({"id": ["a", "b"]}).properties == {"owner": "anna"}
    namespace.namespace_exists({"id": []})
    with pytest.raises(NamespaceAlreadyExistsError):
        namespace.create_namespace({"id": ["a"]})
    namespace.create_namespace({"id": ["a"], "mode": "ExistOk"})
    with pytest.raises(NamespaceNotEmptyError):
        namespace.drop_namespace({"id": ["c"]})
    namespace.drop_namespace({"id": ["a", "b"]})
    assert spaces(namespace) == ["c", "db"]
    for act in (namespace.drop_namespace, namespace.namespace_exists, namespace.list_namespaces):
        with pytest.raises(NamespaceNotFoundError):
            act({"id": ["a", "b"]})
    namespace.drop_namespace({"id": ["a", "b"], "mode": "skip"})


def test_all_tables_are_listed_in_one_word_each(lake: Warehouse, namespace: Namespace) -> None:
    write(namespace, "create", 1, name=("top",))
    assert namespace.list_all_tables({}).tables == ["db$other", "db$t", "top"]


# -- a version to read -----------------------------------------------------------------------------


def test_a_version_to_read_is_not_changed(lake: Warehouse, namespace: Namespace) -> None:
    reading = Namespace(lake, Reading(lake.read()))
    wanted: list[Callable[[], object]] = [
        lambda: write(reading, "append", 2),
        lambda: write(reading, "create", 2, name=("new",)),
        lambda: reading.drop_table({"id": ID}),
        lambda: reading.create_namespace({"id": ["x"]}),
        lambda: reading.batch_commit_tables({"operations": [declare(["new"])]}),
    ]
    before = lake.refresh().version
    for act in wanted:
        with pytest.raises((OSError, InternalError)):
            act()
    assert lake.refresh().version == before

    def append() -> None:
        with reading.told():
            write(reading, "append", 2)

    with pytest.raises(Refused, match="only read here"):
        append()
