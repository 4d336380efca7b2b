"""Faults of the checklist that have no better place; each names its items (docs/understanding/faults.md).

A process that dies is one whose calls do not reach the store any more: that is all others can see of
its death.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import lance
import pyarrow as pa
import pytest
from lance_namespace.errors import LanceNamespaceError

from lakewarden.errors import Conflict, Damaged, ErrorKind, LakewardenError, NotFound, StorageError
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import Store
from lakewarden.testing.faults import When
from lakewarden.warehouse.commit import CHECKPOINT_EVERY, Log
from lakewarden.warehouse.iceberg import WarehouseCatalog
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.manifest import Change, Manifest
from lakewarden.warehouse.transaction import Changes, run, transaction
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import (
    MEMORY,
    VERSIONS,
    Hasty,
    T,
    Tampered,
    catalog,
    dataset,
    declared,
    filled,
    iceberg_ids,
    id_rows,
    is_open,
    keys,
    lance_ids,
    moved,
    opened,
    reopen,
    write,
)
from tests.warehouse.small import PREFIX, Haunted, append, commit, create, grow, open_log, pin

U = ("db", "u")
WHEN: tuple[When, ...] = ("before", "after")
ANNOUNCED, WAITING = "__manifest/_transactions/", r"/_lakewarden/\w+/"
PUBLIC = r"/tables/.*/_versions/\d+\.manifest$"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def lake(root: Path) -> Warehouse:
    """Lance tables db.t and db.u with id 1, Iceberg table db.facts with id 10."""
    return filled(root, U)


def load(tx: Changes) -> None:
    """Append to all three tables."""
    if tx.done_before is None:
        write(tx.lance, "append", 2)
        write(tx.lance, "append", 2, name=U)
        tx.iceberg.load_table("db.facts").append(id_rows(20))


BEFORE, AFTER = ([1], [1], [10]), ([1, 2], [1, 2], [10, 20])


def seen(root: Path) -> tuple[list[int], list[int], list[int]]:
    """Return the rows of all tables, as somebody sees them who has just come."""
    fresh = reopen(root)
    return lance_ids(fresh), lance_ids(fresh, U), iceberg_ids(catalog(root))


class Call(NamedTuple):
    """One of the calls that an operation makes to its store."""

    method: str
    key: str
    when: When
    #: How many of the same kind come before it.
    skip: int = 0


def dying(at: Call) -> Tampered:
    """Open stores for a process that dies at a call."""
    tampered, left, dead = Tampered(), [at.skip], [False]

    def rule(method: str, key: str) -> When | None:
        if dead[0]:
            return "before"
        if method == at.method and re.search(at.key, key):
            last = left[0] == 0
            left[0], dead[0] = left[0] - 1, last
            return at.when if last else None
        return None

    tampered.rule = rule
    return tampered


def elsewhere(act: Callable[[], object]) -> Callable[[], object]:
    """Do something in a thread of its own: Lance cannot be called by what Lance calls."""

    def acted() -> object:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(act).result(timeout=60)

    return acted


def waiting(root: Path) -> set[str]:
    """Return the manifests of transactions that wait."""
    found = (str(one.relative_to(root)) for one in (root / "tables").rglob("*.manifest"))
    return {one for one in found if re.search(WAITING, one)}


# -- crash windows ---------------------------------------------------------------------------------

WINDOWS = {
    "19 before it is announced": (Call("put", ANNOUNCED, "before"), False),
    "20 announced, nothing claimed": (Call("put", ANNOUNCED, "after"), False),
    "21 one table of three staged": (Call("put", WAITING, "after"), False),
    "21 two tables of three staged": (Call("put", WAITING, "after", 1), False),
    "22 all staged, before the claim": (Call("put_if_absent", VERSIONS, "before"), False),
    "23 claimed, the answer lost": (Call("put_if_absent", VERSIONS, "after"), True),
    "23 claimed, nothing public": (Call("put_if_absent", PUBLIC, "before"), True),
    "24 one table public, still staged": (Call("put_if_absent", PUBLIC, "after"), True),
    "24 one table public, the other not": (Call("put_if_absent", PUBLIC, "before", 1), True),
}


@pytest.mark.parametrize("window", WINDOWS)
def test_a_process_that_dies_in_a_transaction_has_done_all_or_nothing(
    root: Path, lake: Warehouse, window: str
) -> None:
    """Items 4, 19 to 24: whoever comes next sees all of it, or none, and can do it again."""
    at, lands = WINDOWS[window]
    before = lake.known.version
    raised: LakewardenError | None = None
    try:
        with transaction(reopen(root, opener=dying(at)), request="load") as tx:
            load(tx)
    except LakewardenError as error:
        raised = error
    assert raised is None or is_open(raised) or not lands, "nobody hears that it failed"
    assert raised is not None or lands
    assert reopen(root).known.version == before + lands
    assert seen(root) == (AFTER if lands else BEFORE)
    with transaction(reopen(root), request="load") as tx:
        load(tx)
    assert seen(root) == AFTER
    assert reopen(root).known.version == before + 1


RESTORES = {
    "21 one table of three made": (Call("put", WAITING, "after"), False),
    "25 all made, nothing claimed": (Call("put_if_absent", VERSIONS, "before"), False),
    "26 claimed, nothing public": (Call("put_if_absent", PUBLIC, "before"), True),
    "26 one table public, the other not": (Call("put_if_absent", PUBLIC, "after"), True),
}


@pytest.mark.parametrize("window", RESTORES)
def test_a_process_that_dies_while_it_goes_back_does_no_damage_twice(
    root: Path, lake: Warehouse, window: str
) -> None:
    """Items 25, 26: our only way back is a restore, and that is a version like others."""
    at, lands = RESTORES[window]
    good = lake.known.version
    run(lake, load)
    late = reopen(root, opener=dying(at))
    with suppress(LakewardenError):
        late.restore(late.read(version=good))
    assert reopen(root).known.version == good + 1 + lands
    assert seen(root) == (BEFORE if lands else AFTER)
    for _ in range(2):
        again = reopen(root)
        again.restore(again.read(version=good))
        assert seen(root) == BEFORE
    write(Namespace(reopen(root)), "append", 3)
    assert lance_ids(reopen(root)) == [1, 3]


def test_a_reader_that_dies_while_it_publishes_is_healed_by_the_next(
    tmp_path: Path, root: Path, lake: Warehouse
) -> None:
    """Item 27: the second crash, inside what mends the first, at every call of it."""
    died = reopen(root, opener=dying(Call("put_if_absent", VERSIONS, "after")))
    with suppress(LakewardenError):
        run(died, load)
    saved = tmp_path / "saved"
    shutil.copytree(root, saved)
    calls: list[str] = []

    def heal(last: int | None = None, when: When = "before") -> None:
        """Read the tables, in a process that dies at its last call."""
        shutil.rmtree(root)
        shutil.copytree(saved, root)
        reader, made = Tampered(), calls if last is None else []

        def rule(method: str, key: str) -> When | None:
            made.append(f"{method} {key}")
            if last is None or len(made) < last:
                return None
            return when if len(made) == last else "before"

        reader.rule = rule
        with suppress(LakewardenError, LanceNamespaceError, OSError, ValueError):
            fresh = reopen(root, opener=reader)
            lance_ids(fresh)
            lance_ids(fresh, U)

    heal()
    assert len([one for one in calls if one.startswith("put_if_absent")]) == 2
    for last in range(1, len(calls) + 1):
        for when in WHEN:
            heal(last, when)
            assert seen(root) == AFTER, f"{when} {calls[last - 1]}"


# -- announcements and what waits to be published --------------------------------------------------


@pytest.fixture
def store() -> Haunted:
    return Haunted()


@pytest.fixture
def log(store: Haunted) -> Log:
    return open_log(store)


@pytest.mark.parametrize("when", WHEN)
def test_what_cannot_be_announced_is_not_committed(store: Haunted, log: Log, when: When) -> None:
    """Item 9: the first put fails, and the writer knows for certain that nothing happened."""
    base = grow(log, 3)

    def lost(action: str, key: str) -> None:
        if action == "put" and "/_transactions/" in key:
            raise StorageError(ErrorKind.STORAGE, "the connection broke")

    setattr(store, when, lost)
    with pytest.raises(StorageError, match="broke") as raised:
        commit(log, append("a", 4), base=base)
    assert raised.value.kind is ErrorKind.STORAGE, "what was written for it may go"
    store.before = store.after = lambda action, key: None
    assert open_log(store).head().version == 3
    assert commit(log, append("a", 4), base=base).version == 4


def test_a_staged_manifest_that_cannot_be_deleted_is_in_nobodys_way(
    root: Path, lake: Warehouse
) -> None:
    """Item 10: the write is done, and neither readers nor writers stumble over what is left."""
    before = lake.known.version
    tampered = Tampered()
    late = reopen(root, opener=tampered)
    tampered.failing("delete", "/tables/")
    run(late, load)
    assert waiting(root)
    # Nor do those who try to take it away again, and fail again.
    assert lance_ids(reopen(root, opener=tampered)) == [1, 2]
    assert seen(root) == AFTER
    write(Namespace(reopen(root)), "append", 3)
    assert lance_ids(reopen(root)) == [1, 2, 3]
    assert reopen(root).known.version == before + 2


def test_a_listing_that_fails_is_no_empty_warehouse(store: Haunted, log: Log) -> None:
    """Item 11: neither opening nor looking again takes it for a warehouse without versions."""
    head = grow(log, 3)

    def lost(action: str, key: str) -> None:
        if action == "list":
            raise StorageError(ErrorKind.STORAGE, "the connection broke")

    store.before = lost
    with pytest.raises(StorageError, match="broke"):
        open_log(store).head()
    # Who has seen the newest a moment ago looks for the next by its name.
    assert log.head(head).version == head.version
    # A writer that is not outrun does not list; one that is must not guess.
    store.before = lambda action, key: None
    grow(open_log(store), 4)
    store.before = lost
    with pytest.raises(StorageError, match="broke"):
        commit(log, append("a", 4), base=head)
    store.before = lambda action, key: None
    assert list(log.handler.versions()) == [4, 3, 2, 1]


def test_two_readers_may_publish_the_same_version_at_once(root: Path, lake: Warehouse) -> None:
    """Item 12: what waits has vanished when the second reader wants to read it."""
    with suppress(LakewardenError):
        run(reopen(root, opener=dying(Call("put_if_absent", VERSIONS, "after"))), load)
    assert waiting(root)
    tampered = Tampered()
    slow = reopen(root, opener=tampered)
    tampered.once("get", "/_lakewarden/", elsewhere(lambda: lance_ids(reopen(root))))
    assert lance_ids(slow) == [1, 2]
    assert seen(root) == AFTER


SPOILED: dict[str, Callable[[bytes], bytes | None]] = {
    "12 vanished": lambda _: None,
    "13 cut": lambda data: data[:20],
    "13 empty": lambda _: b"",
    "14 newer": lambda _: b'{"stamp": 99, "operation": "teleport"}',
    "18 of another warehouse": lambda data: data.replace(b'"a"', b'"z"'),
}


@pytest.mark.parametrize("how", SPOILED)
def test_whatever_becomes_of_an_announcement_nobody_is_stopped(
    store: Haunted, log: Log, how: str
) -> None:
    """Items 12 to 14, 16, 18: the entry holds the transaction; what was announced decides nothing."""
    grow(log, 5)
    head = log.head()
    # One that was announced and never claimed is spoiled with the rest, and has a namesake.
    announced = keys(store, f"{PREFIX}/_transactions")
    data = SPOILED[how](store.get(announced[0]))
    for key in [*announced, f"{PREFIX}/_transactions/{'9' * 32}.json"]:
        store.delete([key])
        if data is not None:
            store.put(key, data)
    fresh = open_log(store)
    assert fresh.head().manifest == head.manifest
    assert [fresh.at(version).version for version in range(1, 6)] == [1, 2, 3, 4, 5]
    grow(fresh, CHECKPOINT_EVERY + 2)
    assert fresh.head().version == CHECKPOINT_EVERY + 2


# -- others at the same time -----------------------------------------------------------------------


def test_what_a_live_writer_has_announced_and_staged_is_left_alone(
    root: Path, lake: Warehouse
) -> None:
    """Item 35: others open, read, heal and write while it waits for its claim."""
    tampered = Tampered()
    late = reopen(root, opener=tampered)

    def others() -> None:
        staged = waiting(root)
        assert len(staged) == 2
        assert seen(root) == BEFORE
        write(Namespace(reopen(root)), "create", 5, name=("db", "new"))
        lake.create_tag("meanwhile")
        assert seen(root) == BEFORE
        assert waiting(root) == staged

    tampered.once("put_if_absent", VERSIONS, others)
    run(late, load, attempts=1)
    assert seen(root) == AFTER
    assert not waiting(root)


def test_a_reader_does_not_publish_a_schema_that_is_not_committed(
    root: Path, lake: Warehouse
) -> None:
    """Item 36: between the staging of a new column and its claim others see the old columns."""
    tampered = Tampered()
    late = Namespace(reopen(root, opener=tampered))
    place = lake.read().table(T).location

    def others() -> None:
        assert lance_ids(reopen(root)) == [1]
        assert lance.dataset(place).schema.names == ["id"]

    tampered.once("put_if_absent", VERSIONS, elsewhere(others))
    dataset(late).add_columns({"double": "id * 2"})
    assert lance.dataset(place).schema.names == ["id", "double"]


def test_branches_that_go_while_all_are_enumerated_are_those_that_were_there(
    store: Haunted,
) -> None:
    """Item 44: whoever enumerates sees one version; who asks later hears that a branch is gone."""
    lake = Warehouse.init(MEMORY, opener=lambda _: store)
    table = declared(lake)
    for version, branch in enumerate(("one", "two", "three"), start=1):
        moved(lake, table, version)
        lake.create_branch(branch)
    reader = opened(store)
    deleted: list[str] = []

    def meanwhile(action: str, key: str) -> None:
        if action == "get" and "/_versions/" in key and not deleted:
            deleted.append("two")
            opened(store).delete_branch("two")

    store.before = meanwhile
    assert sorted(one.version for one in reader.pinned_by_refs()) == [1, 2, 3, 3]
    assert deleted == ["two"]
    with pytest.raises(NotFound, match="no branch two"):
        reader.read(branch="two")
    assert sorted(one.version for one in reader.pinned_by_refs()) == [1, 3, 3]


def test_everything_goes_back_though_somebody_writes_to_a_table_that_was_unchanged(
    root: Path, lake: Warehouse
) -> None:
    """Item 45: either the write is undone with the rest, or the restore is told that it came."""
    good = lake.read()
    write(Namespace(lake), "append", 2)
    tampered = Tampered()
    late = reopen(root, opener=tampered)
    tampered.once(
        "put_if_absent", VERSIONS, lambda: write(Namespace(reopen(root)), "append", 3, name=U)
    )
    try:
        late.restore(good)
    except Conflict:
        assert seen(root) == ([1, 2], [1, 3], [10])
    else:
        assert seen(root) == BEFORE


def merge(tx: Changes) -> None:
    update = dataset(tx.lance).merge_insert("id").when_matched_update_all()
    update.when_not_matched_insert_all().execute(id_rows(1, 7))


def test_a_merge_that_failed_does_not_block_later_writes(root: Path, lake: Warehouse) -> None:
    """Item 46."""
    tampered = Tampered()
    late = reopen(root, opener=tampered)
    tampered.once("put_if_absent", VERSIONS, lambda: write(Namespace(reopen(root)), "append", 3))
    with pytest.raises(Conflict):
        run(late, merge, attempts=1)
    assert not waiting(root)
    for namespace in (Namespace(late), Namespace(reopen(root))):
        write(namespace, "append", 4)
    run(late, merge)
    assert lance_ids(reopen(root)) == [1, 3, 4, 4, 7]


def test_writers_that_take_tables_in_opposite_orders_do_not_wait_for_each_other(
    root: Path, lake: Warehouse
) -> None:
    """Item 48: nothing is locked while somebody waits for something else."""
    before = lake.known.version

    def work(worker: int) -> None:
        mine = reopen(root, chance=Hasty())
        tables = (T, U, T) if worker else (U, T, U)

        def both(tx: Changes, step: int) -> None:
            for number, name in enumerate(tables):
                write(tx.lance, "append", 1000 * (worker + 1) + 10 * step + number, name=name)

        for step in range(4):
            run(mine, lambda tx, step=step: both(tx, step), attempts=1000)  # type: ignore[misc]

    # Daemons: if they do wait for each other, they do so for ever.
    threads = [Thread(target=work, args=(worker,), daemon=True) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    fresh = reopen(root)
    assert fresh.known.version == before + 8
    assert len(lance_ids(fresh)) + len(lance_ids(fresh, U)) == 2 + 8 * 3


# -- storage ---------------------------------------------------------------------------------------


def rebased(change: Change, head: Manifest) -> Change:
    before = head.pins()[change.table]
    return Change(change.operation, change.table, before, pin(before.version + 1))


class Late(Haunted):
    """A store whose listings do not know of the newest objects."""

    hidden: frozenset[str] = frozenset()

    def list(
        self, prefix: str, *, after: str | None = None, before: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        for batch in super().list(prefix, after=after, before=before):
            known = [key not in self.hidden for key in batch.column("key").to_pylist()]
            yield batch.filter(pa.array(known))


@pytest.mark.parametrize("late", [1, 2, 5])
def test_a_listing_that_is_behind_loses_no_version(late: int) -> None:
    """Item 75: who reads gets an older version, whole; who writes comes after the newest."""
    store = Late()
    grow(open_log(store), CHECKPOINT_EVERY + 4)
    newest = CHECKPOINT_EVERY + 4
    known = {keys(store, f"{PREFIX}/_versions")[number] for number in range(late)}
    store.hidden = frozenset(known)
    log = open_log(store)
    old = log.head()
    assert old.version == newest - late
    assert old.manifest.pins() == {"a": pin(newest - late)}
    head = commit(log, append("a", old.version + 1), base=old, rebase=rebased)
    store.hidden = frozenset()
    assert head.version == open_log(store).head().version == newest + 1
    assert head.manifest.pins() == {"a": pin(newest + 1)}


def readonly() -> Tampered:
    tampered = Tampered()
    changes = ("put", "put_if_absent", "delete")
    tampered.rule = lambda method, _: "before" if method in changes else None
    return tampered


def test_who_may_not_write_reads_tables_of_both_formats(root: Path, lake: Warehouse) -> None:
    """Item 76."""
    run(lake, load)
    files = sorted(root.rglob("*"))
    reader = reopen(root, opener=readonly())
    facts = WarehouseCatalog("lake", opened=reader)
    assert (lance_ids(reader), lance_ids(reader, U), iceberg_ids(facts)) == AFTER
    assert sorted(root.rglob("*")) == files


def test_who_may_not_write_is_told_about_a_version_that_waits_to_be_published(
    root: Path, lake: Warehouse
) -> None:
    """Item 76: other tables can be read, and that one too when somebody has read it who may."""
    died = reopen(root, opener=dying(Call("put_if_absent", VERSIONS, "after")))
    with suppress(LakewardenError):
        run(died, lambda tx: write(tx.lance, "append", 2))
    reader = reopen(root, opener=readonly())
    namespace = Namespace(reader)
    with pytest.raises(StorageError, match="put_if_absent"), namespace.told():
        dataset(namespace)
    assert lance_ids(reader, U) == [1]
    assert lance_ids(reopen(root)) == [1, 2]
    assert lance_ids(reader) == [1, 2]


class Misreading:
    """Opens stores that cut one answer short: that to the n-th request for a kind of key."""

    def __init__(self, key: str, number: int = 1) -> None:
        self.key = key
        self.left = number

    def __call__(self, location: Location) -> Store:
        store = Opener()(location)
        get = store.get

        def misread(key: str) -> bytes:
            data = get(key)
            self.left -= bool(re.search(self.key, key))
            if self.left == 0:
                self.left = -1
                return data[: len(data) // 2]
            return data

        store.get = misread  # type: ignore[method-assign]
        # As on a store that cannot give a second name to what is there.
        store.link = lambda source, target: False  # type: ignore[attr-defined]
        return store


@pytest.mark.parametrize("number", [1, 2])
def test_a_staged_manifest_that_is_misread_is_not_published(
    root: Path, lake: Warehouse, number: int
) -> None:
    """Item 74: a read that was cut short must not become the version that everybody sees."""
    misreading = Misreading(r"/_versions/\d+\.manifest-", number)
    with suppress(OSError, ValueError, LakewardenError, LanceNamespaceError):
        write(Namespace(reopen(root, opener=misreading)), "append", 2)
    assert misreading.left < 0
    assert lance_ids(reopen(root)) in ([1], [1, 2])


@pytest.mark.parametrize("number", [1, 2])
def test_a_staged_manifest_that_is_misread_does_not_wait_to_be_published(
    root: Path, lake: Warehouse, number: int
) -> None:
    """Item 74, in a transaction, which copies it to where it waits."""
    misreading = Misreading(r"/_versions/\d+\.manifest-", number)
    with suppress(OSError, ValueError, LakewardenError, LanceNamespaceError):
        run(reopen(root, opener=misreading), lambda tx: write(tx.lance, "append", 2))
    assert misreading.left < 0
    assert lance_ids(reopen(root)) in ([1], [1, 2])


def test_a_waiting_manifest_that_is_misread_is_not_published(root: Path, lake: Warehouse) -> None:
    """Item 74, when the next reader publishes what waits."""
    with suppress(LakewardenError):
        run(reopen(root, opener=dying(Call("put_if_absent", VERSIONS, "after"))), load)
    misreading = Misreading(WAITING)
    with suppress(OSError, ValueError, LakewardenError, LanceNamespaceError):
        lance_ids(reopen(root, opener=misreading))
    assert misreading.left < 0
    assert seen(root) == AFTER


class Forgetful(Haunted):
    """A store that says it has created an object, and has not."""

    forgets = False

    def put_if_absent(self, key: str, data: bytes) -> None:
        if not self.forgets:
            super().put_if_absent(key, data)
        self.forgets = False


def test_a_version_that_was_acknowledged_and_lost_is_noticed() -> None:
    """Item 73: somebody else takes its number, and the writer goes on from what it believes."""
    store = Forgetful()
    ours, theirs = open_log(store), open_log(store)
    base = commit(ours, create("a", after=pin(1)), create("b", after=pin(1)))
    store.forgets = True
    believed = commit(ours, append("a", 2), base=base)
    known = commit(theirs, append("b", 2), base=theirs.head())
    assert believed.version == known.version == 2
    with suppress(Conflict, Damaged):
        commit(ours, append("a", 3), base=believed)
    with pytest.raises(Damaged, match="does not follow"):
        theirs.head(known)


def test_a_copy_of_a_warehouse_leaves_the_tables_of_the_original_alone(
    tmp_path: Path, root: Path, lake: Warehouse
) -> None:
    """Item 18: the log of the copy names the places of the original's tables."""
    shutil.copytree(root, tmp_path / "copy")
    with suppress(LakewardenError, OSError, ValueError):
        write(Namespace(reopen(tmp_path / "copy")), "append", 66)
    assert lance.dataset(lake.read().table(T).location).count_rows() == 1
    write(Namespace(reopen(root)), "append", 2)
    assert lance_ids(reopen(root)) == [1, 2]
