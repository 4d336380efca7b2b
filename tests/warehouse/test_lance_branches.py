"""Lance tables on branches of a warehouse: forked on the first write, and never seen on main."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import lance
import lance_namespace as api
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakewarden.errors import Conflict, ErrorKind, LakewardenError, NotFound, Refused, UsageError
from lakewarden.pipeline.scanning import scan_of
from lakewarden.storage.opening import Opener
from lakewarden.testing.s3 import s3_server
from lakewarden.warehouse import forks
from lakewarden.warehouse.formats import with_formats
from lakewarden.warehouse.lance import Immediate, Namespace, Reading, tables_of
from lakewarden.warehouse.manifest import Operation, Pin
from lakewarden.warehouse.transaction import run, transaction
from lakewarden.warehouse.warehouse import View, Warehouse
from tests.warehouse.lakes import (
    VERSIONS,
    Failure,
    Hasty,
    Opening,
    T,
    Tampered,
    dataset,
    every_step,
    id_rows,
    is_open,
    lance_ids,
    make,
    names_of,
    reopen,
    write,
)

OTHER = ("db", "other")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def lake(root: Path) -> Warehouse:
    """A warehouse with table db.t of ids 1, 2 and 3, in two files, and branch dev."""
    lake = make(root)
    write(Namespace(lake), "create", 1, 2)
    write(Namespace(lake), "append", 3)
    lake.create_branch("dev")
    return lake


@pytest.fixture
def dev(lake: Warehouse) -> Namespace:
    return Namespace(lake, branch="dev")


def ids(lake: Warehouse, branch: str = "dev", name: tuple[str, ...] = T) -> list[int]:
    """Read a table on a branch: as clients do that write, that only read, and as Spark does."""
    fresh = reopen(lake.location.uri)
    view = fresh.read(branch=branch)
    read: list[int] = sorted(seen(Namespace(fresh, Reading(view)), name))
    assert sorted(seen(Namespace(fresh, branch=branch), name)) == read
    assert scanned(fresh, name, branch=branch) == read
    return read


def seen(namespace: Namespace, name: tuple[str, ...] = T) -> list[int]:
    found: list[int] = dataset(namespace, name).to_table()["id"].to_pylist()
    return found


def scanned(lake: Warehouse, name: tuple[str, ...] = T, **at: Any) -> list[int]:
    scan = scan_of(lake, lake.read(**at), name)
    batches = (batch for part in scan.parts() for batch in scan.read(part))
    return sorted(one for batch in batches for one in batch.column("id").to_pylist())


def pin(lake: Warehouse, branch: str = "dev", name: tuple[str, ...] = T) -> Pin:
    view = lake.read(branch=branch)
    return view.pins[view.table(name).id]


def place(lake: Warehouse, name: tuple[str, ...] = T, branch: str = "main") -> Path:
    return Path("/" + lake.read(branch=branch).table(name).location.removeprefix("file:///"))


# -- forking ---------------------------------------------------------------------------------------


def test_a_branch_copies_nothing_and_reading_it_writes_nothing(lake: Warehouse) -> None:
    before = sorted(place(lake).rglob("*"))
    assert seen(Namespace(lake, Reading(lake.read(branch="dev")))) == [1, 2, 3]
    assert scanned(lake, branch="dev") == [1, 2, 3]
    assert sorted(place(lake).rglob("*")) == before


def test_a_table_is_forked_for_a_writer_and_main_never_sees_it(
    lake: Warehouse, dev: Namespace
) -> None:
    base = pin(lake)
    write(dev, "append", 10)
    assert ids(lake) == [1, 2, 3, 10]
    assert lance_ids(lake) == [1, 2, 3]
    write(Namespace(lake), "append", 4)
    assert (ids(lake), lance_ids(lake)) == ([1, 2, 3, 10], [1, 2, 3, 4])
    made = lake.known.manifest.branches["dev"].made
    found = pin(lake)
    assert found.path.startswith(f"tree/lakewarden-{made}/_versions/")
    assert found.version == base.version + 1
    assert list(lance.dataset(place(lake)).branches.list()) == [f"lakewarden-{made}"]


def test_a_client_that_has_only_read_goes_on_to_write(lake: Warehouse, dev: Namespace) -> None:
    found = dataset(dev)
    version = lake.refresh().version
    assert pin(lake).path.startswith("_versions/")
    found.insert(id_rows(10))
    found.delete("id = 1")
    assert lake.refresh().version == version + 2
    assert sorted(found.to_table()["id"].to_pylist()) == [2, 3, 10]
    assert (ids(lake), lance_ids(lake)) == ([2, 3, 10], [1, 2, 3])
    assert [one["version"] for one in found.versions()] == [2, 3, 4]


def test_the_constructor_of_a_session_takes_a_branch(lake: Warehouse) -> None:
    write(Namespace(lake, Immediate(lake, tables_of(lake), "dev")), "append", 5)
    assert ids(lake) == [1, 2, 3, 5]


def test_a_namespace_is_made_by_its_class(lake: Warehouse) -> None:
    impl = "lakewarden.warehouse.lance.Namespace"
    told = {"warehouse": lake.location.uri, "branch": "dev", "actor": "zoe"}
    made = api.connect(impl, told)
    assert isinstance(made, Namespace)
    write(made, "append", 5)
    assert ids(lake) == [1, 2, 3, 5]
    (last,) = lake.history(1)
    assert (last.transaction.actor, last.transaction.branch) == ("zoe", "dev")
    with pytest.raises(UsageError, match="colour"):
        Namespace(lake.location.uri, colour="zoe")
    with pytest.raises(UsageError, match="actor"):
        Namespace(lake, actor="zoe")


def merged(found: Any) -> None:
    new = id_rows(3, 4)
    found.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(new)


CHANGES: dict[str, tuple[Callable[[Any], object], list[int]]] = {
    "append": (lambda found: found.insert(id_rows(4)), [1, 2, 3, 4]),
    "overwrite": (lambda found: lance.write_dataset(id_rows(7), found, mode="overwrite"), [7]),
    "delete": (lambda found: found.delete("id > 1"), [1]),
    "update": (lambda found: found.update({"id": "30"}, where="id = 3"), [1, 2, 30]),
    "merge": (merged, [1, 2, 3, 4]),
    "index": (lambda found: found.create_scalar_index("id", "BTREE"), [1, 2, 3]),
    "columns": (lambda found: found.add_columns({"double": "id * 2"}), [1, 2, 3]),
    "compaction": (lambda found: found.optimize.compact_files(), [1, 2, 3]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_stays_on_its_branch(lake: Warehouse, dev: Namespace, change: str) -> None:
    act, expected = CHANGES[change]
    with dev.told():
        act(dataset(dev))
        act_again, _ = CHANGES["append"]
    assert ids(lake) == expected
    assert lance_ids(lake) == [1, 2, 3]
    assert dataset(Namespace(lake)).schema.names == ["id"]
    if change != "columns":
        act_again(dataset(dev))
        assert ids(lake) == sorted([*expected, 4])


def test_a_compaction_that_would_lose_an_index_is_refused(lake: Warehouse) -> None:
    """Lance names an index of the base that it has rewritten on the branch; its readers fail then."""
    dataset(Namespace(lake)).create_scalar_index("id", "BTREE")
    lake.create_branch("late")
    late = Namespace(lake, branch="late")

    def compact(**options: Any) -> None:
        with late.told():
            dataset(late).optimize.compact_files(**options)

    with pytest.raises(Refused, match="defer_index_remap"):
        compact()
    with pytest.raises(Refused, match="defer_index_remap"), transaction(lake, branch="late") as tx:
        dataset(tx.lance).optimize.compact_files()
    assert dataset(late).to_table(filter="id = 2").num_rows == 1
    compact(defer_index_remap=True)
    assert dataset(late).to_table(filter="id = 2").num_rows == 1
    dataset(late).create_scalar_index("id", "BTREE", replace=True)
    write(late, "append", 4)
    compact()
    assert dataset(late).to_table(filter="id = 2").num_rows == 1
    assert (ids(lake, "late"), lance_ids(lake)) == ([1, 2, 3, 4], [1, 2, 3])


def test_a_branch_of_a_branch_goes_on_from_there(lake: Warehouse, dev: Namespace) -> None:
    write(dev, "append", 10)
    lake.create_branch("sub", source="dev")
    write(dev, "append", 11)
    sub = Namespace(lake, branch="sub")
    assert sorted(seen(sub)) == [1, 2, 3, 10]
    write(sub, "append", 100)
    dataset(sub).delete("id = 10")
    assert ids(lake, "sub") == [1, 2, 3, 100]
    assert (ids(lake), lance_ids(lake)) == ([1, 2, 3, 10, 11], [1, 2, 3])


def test_a_table_of_old_names_is_forked_too(lake: Warehouse) -> None:
    """Versions of old tables are called 1.manifest, 2.manifest and so on."""
    namespace = Namespace(lake)
    lance.write_dataset(
        id_rows(1),
        namespace_client=namespace,
        table_id=list(OTHER),
        mode="create",
        enable_v2_manifest_paths=False,
    )
    write(namespace, "append", 2, name=OTHER)
    assert (place(lake, OTHER) / "_versions" / "2.manifest").exists()
    lake.create_branch("late")
    write(Namespace(lake, branch="late"), "append", 3, name=OTHER)
    write(Namespace(lake, branch="late"), "append", 4, name=OTHER)
    assert ids(lake, "late", OTHER) == [1, 2, 3, 4]
    assert lance_ids(lake, OTHER) == [1, 2]


def test_an_older_version_of_a_branch_is_read(lake: Warehouse, dev: Namespace) -> None:
    for one in (10, 11):
        write(dev, "append", one)
    lake.create_tag("ten", version=lake.refresh().version - 1, branch="dev")
    dataset(dev).delete("true")
    assert sorted(seen(Namespace(lake, Reading(lake.read(tag="ten"))))) == [1, 2, 3, 10]
    assert scanned(lake, tag="ten") == [1, 2, 3, 10]
    lake.delete_branch("dev")
    assert scanned(lake, tag="ten") == [1, 2, 3, 10]
    reading = Namespace(lake, Reading(lake.read(tag="ten")))

    def append() -> None:
        with reading.told():
            write(reading, "append", 1)

    with pytest.raises(LakewardenError, match="only read here"):
        append()


@pytest.mark.nightly
def test_who_may_not_fork_can_read(lake: Warehouse, dev: Namespace) -> None:
    (place(lake) / "tree").write_text("in the way")
    assert sorted(seen(dev)) == [1, 2, 3]

    def append() -> None:
        with dev.told():
            write(dev, "append", 4)

    with pytest.raises(Refused, match="open the table again"):
        append()
    assert lance_ids(lake) == [1, 2, 3]
    (place(lake) / "tree").unlink()
    append()
    assert (ids(lake), lance_ids(lake)) == ([1, 2, 3, 4], [1, 2, 3])


def test_a_client_checks_the_fork_out_by_its_own_name(lake: Warehouse) -> None:
    """LanceDB opens main first, and asks for the branch then; the table may not be forked yet."""
    name = f"lakewarden-{lake.known.manifest.branches['dev'].made}"
    main = Namespace(lake)
    assert main.list_table_branches({"id": list(T)}).branches == {}
    found = dataset(main).checkout_version((name, None))
    found.insert(id_rows(10))
    assert sorted(found.to_table()["id"].to_pylist()) == [1, 2, 3, 10]
    (last,) = lake.history(1)
    assert last.transaction.branch == "dev"
    assert (ids(lake), lance_ids(lake)) == ([1, 2, 3, 10], [1, 2, 3])
    told = main.list_table_branches({"id": list(T)}).branches
    assert list(told) == [name]
    assert told[name].metadata == {"lakewarden.branch": "dev"}
    assert told[name].parent_version == 2
    lake.delete_branch("dev")
    assert main.list_table_branches({"id": list(T)}).branches == {}
    with pytest.raises(OSError, match="lakewarden branch"):
        dataset(main).checkout_version((name, None)).insert(id_rows(11))


# -- several at once -------------------------------------------------------------------------------


def test_writers_on_both_branches_at_once_lose_and_mix_nothing(root: Path, lake: Warehouse) -> None:
    def work(number: int) -> None:
        own = reopen(root, chance=Hasty())
        namespace = Namespace(own, branch="dev" if number % 2 else "main")
        for turn in range(4):
            with namespace.told():
                write(namespace, "append", 100 * number + turn)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))
    dev, main = ([1, 2, 3], [1, 2, 3])
    for number in range(1, 5):
        (dev if number % 2 else main).extend(100 * number + turn for turn in range(4))
    assert ids(lake) == dev
    assert lance_ids(reopen(root)) == main


FORKER = """
import sys
from tests.warehouse.lakes import reopen, write
from lakewarden.warehouse.lance import Namespace
namespace = Namespace(reopen(sys.argv[1]), branch="dev")
print("ready", flush=True)
sys.stdin.readline()
write(namespace, "append", int(sys.argv[2]))
"""


def test_processes_that_fork_at_once_share_one_fork(root: Path, lake: Warehouse) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKER, str(root)]
    started = [
        subprocess.Popen(
            [*command, str(one)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for one in (10, 11, 12)
    ]
    for one in started:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in started:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    for one in started:
        one.communicate(timeout=120)
        assert one.returncode == 0
    assert ids(lake) == [1, 2, 3, 10, 11, 12]
    assert lance_ids(lake) == [1, 2, 3]


@pytest.mark.s3
def test_branches_in_a_bucket() -> None:
    with s3_server() as server:
        server.create_bucket("lake")
        opener = Opener(server.options)
        lake = with_formats(Warehouse.init("s3://lake/wh", opener=opener))
        write(Namespace(lake), "create", 1)
        lake.create_branch("dev")
        assert scanned(lake, branch="dev") == [1]
        write(Namespace(lake, branch="dev"), "append", 2)
        with transaction(lake, branch="dev") as tx:
            write(tx.lance, "append", 3)
        assert sorted(seen(Namespace(lake, branch="dev"))) == [1, 2, 3]
        assert scanned(lake, branch="dev") == [1, 2, 3]
        assert scanned(lake) == seen(Namespace(lake)) == [1]


# -- crashes ---------------------------------------------------------------------------------------


def test_a_crash_between_fork_and_commit_leaves_nothing_to_be_seen(root: Path) -> None:
    tampered = Tampered()
    lake = make(root, opener=tampered)
    write(Namespace(lake), "create", 1)
    lake.create_branch("dev")
    dev = Namespace(lake, branch="dev")
    found = dataset(dev)
    version = lake.refresh().version
    tampered.failing("put_if_absent", VERSIONS)
    with pytest.raises((OSError, LakewardenError)):
        found.insert(id_rows(66))
    tampered.rule = lambda *_: None
    fresh = reopen(root)
    assert fresh.read().version == version
    assert pin(fresh).path.startswith("_versions/")
    assert (ids(fresh), lance_ids(fresh)) == ([1], [1])
    write(Namespace(fresh, branch="dev"), "append", 2)
    assert (ids(fresh), lance_ids(fresh)) == ([1, 2], [1])


def test_whatever_call_fails_on_a_branch_the_write_is_all_there_or_not_at_all(
    tmp_path: Path,
) -> None:
    numbers = count()
    made: list[Path] = []

    def prepare() -> Opening:
        made.append(tmp_path / str(next(numbers)))
        lake = make(made[-1])
        write(Namespace(lake), "create", 1)
        lake.create_branch("dev")
        return Opener()

    def act(opening: Opening) -> None:
        dev = Namespace(reopen(made[-1], opener=opening), branch="dev")
        with dev.told():
            write(dev, "append", 2)

    def check(_: Opening, raised: Failure | None, where: str) -> None:
        fresh = reopen(made[-1])
        allowed = [[1, 2]] if raised is None else [[1], [1, 2]] if is_open(raised) else [[1]]
        assert ids(fresh) in allowed, (where, raised)
        assert lance_ids(fresh) == [1], where
        before = ids(fresh)
        write(Namespace(fresh, branch="dev"), "append", 3)
        assert ids(fresh) == [*before, 3], where

    assert every_step(tmp_path / "calls", prepare, act, check) > 5


def test_a_crash_inside_the_fork_is_finished_by_the_next_writer(lake: Warehouse) -> None:
    """Lance writes the version first, and then the ref that protects what it needs."""
    dataset(Namespace(lake, branch="dev"))
    (ref,) = (place(lake) / "_refs" / "branches").iterdir()
    told = json.loads(ref.read_text())
    ref.unlink()
    fresh = reopen(lake.location.uri)
    write(Namespace(fresh, branch="dev"), "append", 10)
    again = json.loads(ref.read_text())
    for one in (told, again):
        one.pop("createAt")
        one["identifier"]["version_mapping"][0].pop()
    assert again == told
    assert lance.dataset(place(lake)).branches.list()
    assert (ids(lake), lance_ids(lake)) == ([1, 2, 3, 10], [1, 2, 3])


def test_a_crash_inside_the_fork_of_a_fork_is_finished_too(lake: Warehouse, dev: Namespace) -> None:
    write(dev, "append", 10)
    lake.create_branch("sub", source="dev")
    dataset(Namespace(lake, branch="sub"))
    made = lake.known.manifest.branches["sub"].made
    ref = place(lake) / "_refs" / "branches" / f"lakewarden-{made}.json"
    told = json.loads(ref.read_text())
    ref.unlink()
    write(Namespace(reopen(lake.location.uri), branch="sub"), "append", 11)
    again = json.loads(ref.read_text())
    for one in (told, again):
        one.pop("createAt")
        one["identifier"]["version_mapping"][-1].pop()
    assert again == told
    assert ids(lake, "sub") == [1, 2, 3, 10, 11]


def test_a_version_that_was_not_shown_is_shown_by_the_next_reader(root: Path) -> None:
    tampered = Tampered()
    lake = make(root, opener=tampered)
    write(Namespace(lake), "create", 1)
    lake.create_branch("dev")
    dev = Namespace(lake, branch="dev")
    dataset(dev)
    tampered.failing("put_if_absent", "/tree/lakewarden-")
    write(dev, "append", 2)
    tampered.rule = lambda *_: None
    assert (ids(lake), lance_ids(lake)) == ([1, 2], [1])


# -- the same name again ---------------------------------------------------------------------------


def test_a_branch_that_is_made_again_has_no_old_rows(lake: Warehouse, dev: Namespace) -> None:
    write(dev, "append", 10)
    stale = dataset(dev)
    lake.delete_branch("dev")
    lake.create_branch("dev")
    assert ids(lake) == [1, 2, 3]

    def insert() -> None:
        with dev.told():
            stale.insert(id_rows(66))

    with pytest.raises(Refused, match="open the table again"):
        insert()
    assert ids(lake) == [1, 2, 3]
    write(Namespace(lake, branch="dev"), "append", 11)
    assert (ids(lake), lance_ids(lake)) == ([1, 2, 3, 11], [1, 2, 3])


def test_a_table_that_was_made_on_a_branch_goes_with_it(lake: Warehouse, dev: Namespace) -> None:
    write(dev, "create", 1, name=OTHER)
    write(dev, "append", 2, name=OTHER)
    assert ids(lake, "dev", OTHER) == [1, 2]
    assert names_of(lake) == ["db.t"]
    lake.create_branch("sub", source="dev")
    write(Namespace(lake, branch="sub"), "append", 3, name=OTHER)
    assert (ids(lake, "sub", OTHER), ids(lake, "dev", OTHER)) == ([1, 2, 3], [1, 2])
    for branch in ("sub", "dev"):
        lake.delete_branch(branch)
    lake.create_branch("dev")
    assert names_of(lake, branch="dev") == ["db.t"]
    with pytest.raises(NotFound):
        lake.undrop(OTHER)
    write(Namespace(lake, branch="dev"), "create", 5, name=OTHER)
    assert ids(lake, "dev", OTHER) == [5]


def test_who_shares_a_warehouse_with_somebody_who_heard_of_it_writes_nothing_old(
    root: Path,
) -> None:
    """Between what a client is told and the commit, the branch is made again."""
    tampered = Tampered()
    lake = make(root, opener=tampered)
    write(Namespace(lake), "create", 1)
    lake.create_branch("dev")
    stale = dataset(Namespace(lake, branch="dev"))

    def again() -> None:
        other = reopen(root)
        other.delete_branch("dev")
        other.create_branch("dev")
        lake.refresh()

    tampered.once("get", "/_transactions/", again)
    with pytest.raises(OSError, match=r"open the table again|Commit result"):
        stale.insert(id_rows(66))
    assert (ids(lake), lance_ids(lake)) == ([1], [1])


def test_a_branch_that_is_deleted_takes_writers_along(root: Path, lake: Warehouse) -> None:
    dev = Namespace(lake, branch="dev")
    stale = dataset(dev)
    other = reopen(root)
    other.delete_branch("dev")

    def insert() -> None:
        with dev.told():
            stale.insert(id_rows(66))

    with pytest.raises(NotFound, match="no branch dev"):
        insert()
    other.create_branch("dev")
    with pytest.raises(Refused, match="open the table again"):
        insert()
    assert ids(lake) == [1, 2, 3]


# -- transactions ----------------------------------------------------------------------------------


def test_a_transaction_on_a_branch_is_one_version_of_it(lake: Warehouse) -> None:
    write(Namespace(lake), "create", 1, name=OTHER)
    lake.create_branch("late")
    before = lake.refresh().version
    with transaction(lake, branch="late") as tx:
        write(tx.lance, "append", 10)
        write(tx.lance, "append", 11)
        write(tx.lance, "append", 12, name=OTHER)
        write(tx.lance, "create", 13, name=("db", "new"))
        assert sorted(seen(tx.lance)) == [1, 2, 3, 10, 11]
        assert ids(lake, "late") == [1, 2, 3]
    assert lake.refresh().version == before + 1
    assert ids(lake, "late") == [1, 2, 3, 10, 11]
    assert ids(lake, "late", OTHER) == [1, 12]
    assert ids(lake, "late", ("db", "new")) == [13]
    assert (lance_ids(lake), lance_ids(lake, OTHER)) == ([1, 2, 3], [1])
    assert forks.public(pin(lake, "late").path).startswith("tree/lakewarden-")


def test_a_transaction_is_put_on_top_of_what_others_did_on_the_branch(
    root: Path, lake: Warehouse
) -> None:
    with transaction(lake, branch="dev") as tx:
        write(tx.lance, "append", 10)
        write(Namespace(reopen(root), branch="dev"), "append", 11)
        write(Namespace(reopen(root)), "append", 4)
    assert (ids(lake), lance_ids(lake)) == ([1, 2, 3, 10, 11], [1, 2, 3, 4])


def test_a_transaction_that_fails_leaves_the_branch_alone(lake: Warehouse) -> None:
    def work() -> None:
        with transaction(lake, branch="dev") as tx:
            write(tx.lance, "append", 10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert ids(lake) == [1, 2, 3]
    assert not list(place(lake).rglob("_lakewarden/*/*.manifest"))
    run(lake, lambda tx: write(tx.lance, "append", 11), branch="dev")
    assert ids(lake) == [1, 2, 3, 11]


def test_a_transaction_does_not_outlive_its_branch(lake: Warehouse) -> None:
    def work() -> None:
        with transaction(lake, branch="dev") as tx:
            write(tx.lance, "append", 10)
            other = reopen(lake.location.uri)
            other.delete_branch("dev")
            other.create_branch("dev")

    with pytest.raises(Conflict) as raised:
        work()
    assert raised.value.kind is ErrorKind.INCOMPATIBLE
    assert ids(lake) == [1, 2, 3]


# -- going back ------------------------------------------------------------------------------------


def test_a_branch_goes_back_to_what_it_began_with_and_forward_again(
    lake: Warehouse, dev: Namespace
) -> None:
    base = lake.read(branch="dev")
    write(dev, "append", 10)
    ten = lake.read(branch="dev")
    write(dev, "append", 11)
    write(Namespace(lake), "append", 4)
    lake.restore(base)
    assert ids(lake) == [1, 2, 3]
    lake.restore(ten, T)
    assert ids(lake) == [1, 2, 3, 10]
    write(dev, "append", 12)
    assert (ids(lake), lance_ids(lake)) == ([1, 2, 3, 10, 12], [1, 2, 3, 4])


def test_a_table_dropped_on_a_branch_comes_back_and_goes_on(
    lake: Warehouse, dev: Namespace
) -> None:
    write(dev, "append", 10)
    ten = lake.read(branch="dev")
    write(dev, "append", 11)
    dev.drop_table({"id": list(T)})
    assert names_of(lake, branch="dev") == []
    assert lance_ids(lake) == [1, 2, 3]
    (last,) = lake.history(1)
    assert (last.transaction.branch, last.transaction.changes[0].operation) == (
        "dev",
        Operation.DROP,
    )
    lake.restore(ten)
    assert ids(lake) == [1, 2, 3, 10]
    write(dev, "append", 12)
    assert ids(lake) == [1, 2, 3, 10, 12]


def test_what_an_earlier_branch_of_the_name_was_is_not_brought_back(
    lake: Warehouse, dev: Namespace
) -> None:
    write(dev, "append", 10)
    old = lake.read(branch="dev")
    write(dev, "append", 12)
    lake.create_tag("mine", branch="dev")
    lake.delete_branch("dev")
    lake.create_branch("dev")
    with pytest.raises(Refused, match="earlier branch dev"):
        lake.restore(lake.read(tag="mine"))
    # What only an earlier branch of that name had may be gone any moment.
    with pytest.raises(NotFound, match="was deleted"):
        lake.restore(old)
    with pytest.raises(NotFound, match="was deleted"):
        lake.create_branch("again", version=old.version, source="dev")
    tagged = lake.read(tag="mine")
    lake.create_branch("again", version=tagged.version, source="dev")
    assert ids(lake, "again") == [1, 2, 3, 10, 12]
    write(Namespace(lake, branch="again"), "append", 11)
    assert ids(lake, "again") == [1, 2, 3, 10, 11, 12]


def test_a_table_is_renamed_on_main_alone(lake: Warehouse, dev: Namespace) -> None:
    request = {"id": list(T), "new_table_name": "u", "new_namespace_id": ["db"]}
    with pytest.raises(Exception, match="rename on main"):
        dev.rename_table(request)
    write(dev, "append", 10)
    Namespace(lake).rename_table(request)
    assert ids(lake, "dev", ("db", "u")) == [1, 2, 3, 10]
    rows = pa.table({"id": pa.array([11], pa.int64())})
    lance.write_dataset(rows, namespace_client=dev, table_id=["db", "u"], mode="append")
    assert ids(lake, "dev", ("db", "u")) == [1, 2, 3, 10, 11]
    assert lance_ids(lake, ("db", "u")) == [1, 2, 3]


# -- against a model -------------------------------------------------------------------------------

STEPS = (
    "append", "delete", "update", "compact", "transaction", "index",
    "branch", "unbranch", "restore",
)  # fmt: skip


class Model:
    """Branches with the ids that each must show, and a warehouse that is to show the same."""

    def __init__(self, root: Path) -> None:
        self.lake = make(root)
        self.rows = {"main": [1, 2, 3]}
        self.past: list[tuple[View, list[int]]] = []
        self._fresh = count(100)
        write(Namespace(self.lake), "create", 1, 2)
        write(Namespace(self.lake), "append", 3)

    def step(self, what: str, choice: int) -> None:
        branch = sorted(self.rows)[choice % len(self.rows)]
        namespace, rows, new = (
            Namespace(self.lake, branch=branch),
            self.rows[branch],
            next(self._fresh),
        )
        match what:
            case "append":
                write(namespace, "append", new)
                rows.append(new)
            case "delete" if rows:
                dataset(namespace).delete(f"id = {rows[0]}")
                del rows[0]
            case "update" if rows:
                dataset(namespace).update({"id": str(new)}, where=f"id = {rows[-1]}")
                rows[-1] = new
            case "compact":
                dataset(namespace).optimize.compact_files(defer_index_remap=True)
            case "transaction":
                with transaction(self.lake, branch=branch) as tx:
                    write(tx.lance, "append", new)
                    dataset(tx.lance).delete(f"id = {rows[0] if rows else 0}")
                rows[:] = [*rows[1:], new]
            case "index":
                dataset(namespace).create_scalar_index("id", "BTREE", replace=True)
            case "branch" if f"b{choice}" not in self.rows:
                self.lake.create_branch(f"b{choice}", source=branch)
                self.rows[f"b{choice}"] = list(rows)
            case "unbranch" if branch != "main":
                with suppress(Refused):
                    self.lake.delete_branch(branch)
                    del self.rows[branch]
            case "restore" if self.past:
                self._restore(*self.past[choice * len(self.past) // 4])

    def _restore(self, view: View, rows: list[int]) -> None:
        branch = view.branch
        there = self.lake.refresh().manifest.branches.get(branch)
        if there is not None and there.made == view.manifest.branches[branch].made:
            self.lake.restore(view)
            self.rows[branch] = list(rows)

    def check(self) -> None:
        for branch, rows in self.rows.items():
            assert ids(self.lake, branch) == sorted(rows)
            for one in rows[:1]:
                found = dataset(Namespace(self.lake, branch=branch))
                assert found.to_table(filter=f"id = {one}").num_rows == 1
            self.past.append((self.lake.read(branch=branch), list(rows)))
        assert lance_ids(self.lake) == sorted(self.rows["main"])


@settings(max_examples=max(5, settings().max_examples // 10), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3)), min_size=4, max_size=14))
def test_every_branch_shows_its_own_rows_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    model = Model(tmp_path_factory.mktemp("model") / "lake")
    for what, choice in steps:
        model.step(what, choice)
        model.check()
