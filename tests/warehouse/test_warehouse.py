"""A warehouse as a whole: making and opening, reading at any version, history, failing anywhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lakewarden.errors import (
    AlreadyExists,
    Damaged,
    ErrorKind,
    LakewardenError,
    NotFound,
    Refused,
    UsageError,
)
from lakewarden.testing.memory import MemoryStore
from lakewarden.testing.simulation import World
from lakewarden.warehouse.commit import stands
from lakewarden.warehouse.manifest import Change, Operation, Transaction
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import (
    MEMORY,
    VERSIONS,
    Failure,
    Opening,
    Overwriting,
    T,
    Tampered,
    declared,
    every_step,
    is_open,
    keys,
    made_in,
    moved,
    names_of,
    objects,
    opened,
    pinned,
)

# -- making and opening ----------------------------------------------------------------------------


def test_a_new_warehouse_is_empty_and_at_version_one(lake: Warehouse) -> None:
    assert lake.read().version == 1
    assert lake.read().tables() == []
    (only,) = lake.history()
    assert (only.transaction.actor, only.transaction.message) == ("anna", "init")


def test_what_init_has_tried_is_gone(lake: Warehouse, store: MemoryStore) -> None:
    kinds = sorted(key.split("/")[2] for key in keys(store))
    assert kinds == ["_transactions", "_versions", "handler.json"]


def test_init_twice_is_refused_and_changes_nothing(lake: Warehouse, store: MemoryStore) -> None:
    declared(lake)
    before = objects(store)
    with pytest.raises(AlreadyExists, match="is a warehouse already"):
        made_in(store)
    assert objects(store) == before


def test_of_two_who_init_at_once_one_is_told_that_the_other_was_first(store: MemoryStore) -> None:
    tampered = Tampered(lambda _: store)
    others: list[Warehouse] = []
    tampered.once("put_if_absent", VERSIONS, lambda: others.append(made_in(store)))
    with pytest.raises(AlreadyExists):
        Warehouse.init(MEMORY, opener=tampered)
    assert opened(store).read().version == 1
    assert opened(store).known.manifest.properties == others[0].known.manifest.properties


def test_a_store_that_overwrites_is_refused_and_the_way_out_is_named() -> None:
    store = Overwriting()
    with pytest.raises(Refused, match="--log-database") as raised:
        made_in(store)
    assert raised.value.kind is ErrorKind.UNSUPPORTED_FEATURE
    assert keys(store) == []


def test_with_a_database_a_store_may_overwrite(tmp_path: Path) -> None:
    store, database = Overwriting(), f"sqlite:///{tmp_path}/log.db"
    first = Warehouse.init(MEMORY, opener=lambda _: store, database=database)
    declared(first)
    again = Warehouse.open(MEMORY, opener=lambda _: store, database=database)
    assert names_of(again) == ["db.t"]
    assert [one.version for one in again.history()] == [2, 1]
    with pytest.raises(AlreadyExists):
        Warehouse.init(MEMORY, opener=lambda _: store, database=database)


def test_a_warehouse_in_a_store_is_not_made_again_in_a_database(
    lake: Warehouse, store: MemoryStore, tmp_path: Path
) -> None:
    declared(lake)
    database = f"sqlite:///{tmp_path}/log.db"
    with pytest.raises(AlreadyExists):
        Warehouse.init(MEMORY, opener=lambda _: store, database=database)
    assert names_of(opened(store)) == ["db.t"]


def test_a_warehouse_in_a_database_is_not_made_again_in_a_store(
    store: MemoryStore, tmp_path: Path
) -> None:
    database = f"sqlite:///{tmp_path}/log.db"
    declared(Warehouse.init(MEMORY, opener=lambda _: store, database=database))
    with pytest.raises(AlreadyExists):
        made_in(store)
    again = Warehouse.open(MEMORY, opener=lambda _: store, database=database)
    assert names_of(again) == ["db.t"]


def test_what_is_no_warehouse_is_not_opened(store: MemoryStore) -> None:
    with pytest.raises(NotFound, match="lakewarden warehouse init") as raised:
        opened(store)
    assert raised.value.kind is ErrorKind.NOT_A_WAREHOUSE
    assert keys(store) == []


def test_the_database_must_be_named_when_the_log_is_there(
    store: MemoryStore, tmp_path: Path
) -> None:
    Warehouse.init(MEMORY, opener=lambda _: store, database=f"sqlite:///{tmp_path}/log.db")
    with pytest.raises(UsageError, match="--log-database"):
        opened(store)


def test_no_database_may_be_named_when_the_log_is_in_the_store(
    lake: Warehouse, store: MemoryStore, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="leave out --log-database"):
        Warehouse.open(
            MEMORY, opener=lambda _: store, database=f"sqlite:///{tmp_path}/elsewhere.db"
        )


def test_an_empty_database_is_not_taken_for_the_log(store: MemoryStore, tmp_path: Path) -> None:
    declared(
        Warehouse.init(MEMORY, opener=lambda _: store, database=f"sqlite:///{tmp_path}/log.db")
    )
    with pytest.raises(NotFound):
        Warehouse.open(MEMORY, opener=lambda _: store, database=f"sqlite:///{tmp_path}/wrong.db")
    with pytest.raises(LakewardenError):
        # Or the tables of the real one would be written over by those of another log.
        Warehouse.init(MEMORY, opener=lambda _: store, database=f"sqlite:///{tmp_path}/wrong.db")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'"store"'])
def test_a_damaged_handler_file_is_told(lake: Warehouse, store: MemoryStore, data: bytes) -> None:
    store.put("wh/__manifest/handler.json", data)
    with pytest.raises(Damaged) as raised:
        opened(store)
    assert raised.value.kind is ErrorKind.CORRUPT_MANIFEST


def test_a_warehouse_that_was_never_finished_can_be_made_again(store: MemoryStore) -> None:
    tampered = Tampered(lambda _: store)
    tampered.failing("put_if_absent", VERSIONS)
    with pytest.raises(LakewardenError):
        Warehouse.init(MEMORY, opener=tampered)
    with pytest.raises(NotFound, match="make one") as raised:
        opened(store)
    assert raised.value.kind is ErrorKind.NOT_A_WAREHOUSE
    assert made_in(store).read().version == 1


def test_reading_writes_nothing(lake: Warehouse, store: MemoryStore) -> None:
    table = declared(lake)
    for version in range(1, 40):
        moved(lake, table, version)
    lake.create_tag("good", version=20)
    lake.create_branch("side", version=10)
    before = objects(store)
    readonly = Tampered(lambda _: store)
    readonly.rule = lambda method, _: "before" if method in ("put", "put_if_absent") else None
    reader = Warehouse.open(MEMORY, opener=readonly)
    for at in ({}, {"version": 5}, {"tag": "good"}, {"branch": "side"}):
        assert reader.read(**at).tables()
    assert len(list(reader.history())) == lake.known.version
    assert objects(store) == before


# -- reading ---------------------------------------------------------------------------------------


def test_a_version_a_tag_a_time_and_a_branch_are_read(lake: Warehouse, world: World) -> None:
    table = declared(lake)
    times = {}
    for version in (1, 2, 3):
        world.sleep(60)
        moved(lake, table, version)
        times[version] = world.now()
    lake.create_tag("second", version=lake.known.version - 1)
    lake.create_branch("side", version=lake.known.version - 3)
    world.sleep(60)
    moved(lake, table, 4)
    moved(lake, table, 11, "side")
    assert pinned(lake) == 4
    assert pinned(lake, tag="second") == 2
    assert pinned(lake, branch="side") == 11
    assert pinned(lake, version=3) == 1
    assert pinned(lake, version=2) is None
    assert [pinned(lake, at=times[version]) for version in (1, 2, 3)] == [1, 2, 3]
    assert pinned(lake, at=times[2] + timedelta(seconds=59)) == 2
    assert pinned(lake, at=times[3] + timedelta(days=365)) == 4
    assert pinned(lake, at=times[3] - timedelta(microseconds=2000)) == 2


def test_a_view_does_not_change(lake: Warehouse) -> None:
    table = declared(lake)
    moved(lake, table, 1)
    view = lake.read()
    moved(lake, table, 2)
    lake.drop(T)
    declared(lake, "db", "other")
    assert view.pins[view.table(T).id].version == 1
    assert [one.name for one in view.tables()] == [T]


def test_what_others_have_done_is_seen_by_the_next_read(
    lake: Warehouse, store: MemoryStore
) -> None:
    declared(opened(store), "db", "theirs")
    assert names_of(lake) == ["db.theirs"]


def test_version_tag_and_time_exclude_each_other(lake: Warehouse) -> None:
    lake.create_tag("one")
    for at in (
        {"version": 1, "tag": "one"},
        {"tag": "one", "at": datetime(2026, 1, 1, tzinfo=UTC)},
    ):
        with pytest.raises(UsageError, match="exclude"):
            lake.read(**at)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [0, -1, 99, 2**64, 2**70])
def test_a_version_that_never_was_is_not_found(lake: Warehouse, version: int) -> None:
    with pytest.raises(NotFound, match="there is no version") as raised:
        lake.read(version=version)
    assert raised.value.kind is ErrorKind.NOT_FOUND


@pytest.mark.parametrize("version", [0, -1, 99, 2**64, 2**70])
def test_a_version_that_never_was_is_not_found_in_a_database(tmp_path: Path, version: int) -> None:
    lake = Warehouse.init(
        MEMORY, opener=lambda _: STORES.setdefault(tmp_path, MemoryStore()), database="sqlite://"
    )
    with pytest.raises(NotFound, match="there is no version") as raised:
        lake.read(version=version)
    assert raised.value.kind is ErrorKind.NOT_FOUND


STORES: dict[Path, MemoryStore] = {}


def test_a_reclaimed_version_is_told_from_one_that_never_was(lake: Warehouse) -> None:
    for number in range(6):
        lake.set_properties({"n": str(number)})
    lake.log.handler.forget([2, 3])
    with pytest.raises(NotFound, match="reclaimed") as raised:
        lake.read(version=3)
    assert raised.value.kind is ErrorKind.RECLAIMED
    assert lake.read(version=4).version == 4


def test_a_time_before_the_first_version_is_not_found(lake: Warehouse, world: World) -> None:
    with pytest.raises(NotFound, match="made later"):
        lake.read(at=world.now() - timedelta(days=1))


def test_a_time_whose_version_was_reclaimed_is_not_answered_with_an_older_one(
    lake: Warehouse, world: World
) -> None:
    """Version 3 is kept by a tag; what was current after version 5 must not be taken for it."""
    for number in range(2, 7):
        world.sleep(60)
        lake.set_properties({"n": str(number)})
    times = {one.version: one.at_us for one in lake.history()}
    lake.log.handler.forget([4, 5])
    for version in (4, 5):
        with pytest.raises(NotFound) as raised:
            lake.read(at=datetime.fromtimestamp(times[version] / 1e6, UTC) + timedelta(seconds=1))
        assert raised.value.kind is ErrorKind.RECLAIMED
    kept = lake.read(at=datetime.fromtimestamp(times[3] / 1e6, UTC) + timedelta(seconds=1))
    assert kept.version == 3


def test_every_time_finds_its_version(lake: Warehouse, world: World) -> None:
    for number in range(2, 40):
        world.sleep(10)
        lake.set_properties({"n": str(number)})
    for one in lake.history():
        moment = datetime.fromtimestamp(one.at_us / 1e6, UTC) + timedelta(seconds=1)
        assert lake.read(at=moment).version == one.version


def test_a_table_that_is_not_there_is_told_with_version_and_branch(lake: Warehouse) -> None:
    lake.create_branch("side")
    with pytest.raises(NotFound, match=r"no table db\.t in version 2 .* on branch side"):
        lake.read(branch="side").table(T)


# -- history ---------------------------------------------------------------------------------------


def test_history_is_newest_first_and_limited(lake: Warehouse) -> None:
    for number in range(69):
        lake.set_properties({"n": str(number)})
    everything = [one.version for one in lake.history()]
    assert everything == list(range(70, 0, -1))
    for limit in (0, 1, 31, 32, 33, 34, 69, 70, 71):
        assert [one.version for one in lake.history(limit)] == everything[:limit]


def test_history_ends_where_it_was_reclaimed(lake: Warehouse) -> None:
    for number in range(69):
        lake.set_properties({"n": str(number)})
    lake.log.handler.forget(range(1, 65))
    found = [one.version for one in lake.history()]
    assert found == list(range(70, 70 - len(found), -1))
    assert found[-1] <= 65


def test_history_says_what_was_done_by_whom(lake: Warehouse, store: MemoryStore) -> None:
    declared(lake)
    opened(store).drop(T)
    lake.create_tag("t1")
    told = [(one.transaction.actor, one.transaction.message) for one in lake.history(3)]
    assert told == [("anna", "tag t1"), ("bob", "drop db.t"), ("anna", "create db.t")]


# -- fail at every step ----------------------------------------------------------------------------


def test_init_may_fail_anywhere(tmp_path: Path) -> None:
    worlds: list[MemoryStore] = []

    def prepare() -> Opening:
        worlds.append(MemoryStore())
        return lambda _: worlds[-1]

    def check(opener: Opening, raised: Failure | None, where: str) -> None:
        if raised is not None:
            # It may have been made all the same, and then is left alone.
            with suppress(AlreadyExists):
                Warehouse.init(MEMORY, opener=opener)
        lake = Warehouse.open(MEMORY, opener=opener)
        assert lake.read().version == 1, where
        declared(lake)

    calls = every_step(
        tmp_path / "calls", prepare, lambda opener: Warehouse.init(MEMORY, opener=opener), check
    )
    assert calls > 5


STEPS: dict[str, Callable[[Warehouse], object]] = {
    "tag": lambda lake: lake.create_tag("new", version=4),
    "untag": lambda lake: lake.delete_tag("old"),
    "branch": lambda lake: lake.create_branch("new", version=4),
    "unbranch": lambda lake: lake.delete_branch("side"),
    "drop": lambda lake: lake.drop(T),
    "undrop": lambda lake: lake.undrop(("db", "gone")),
    "rename": lambda lake: lake.rename(T, ("db", "new")),
    "declare": lambda lake: declared(lake, "db", "new"),
    "properties": lambda lake: lake.set_properties({"a": "b"}, T),
}


def told(lake: Warehouse) -> object:
    """Return what users see of a warehouse, without ids and times."""
    head = lake.read().manifest
    return (
        {name: tag.version for name, tag in head.tags.items()},
        {
            branch: {
                ".".join(one.name): (view.pins.get(one.id), dict(one.properties))
                for one in view.tables()
            }
            for branch in head.branches
            for view in [lake.read(branch=branch)]
        },
    )


def filled() -> MemoryStore:
    """A warehouse that is about to need a checkpoint, with something of everything."""
    store = MemoryStore()
    lake = made_in(store)
    table, gone = declared(lake), declared(lake, "db", "gone")
    moved(lake, table, 1)
    moved(lake, gone, 1)
    lake.drop(("db", "gone"))
    lake.create_tag("old")
    lake.create_branch("side")
    for version in range(2, 26):
        moved(lake, table, version)
    return store


def copied(store: MemoryStore) -> MemoryStore:
    fresh = MemoryStore()
    for key, data in objects(store).items():
        fresh.put(key, data)
    return fresh


@pytest.mark.parametrize("step", STEPS)
def test_a_change_may_fail_anywhere_and_a_rerun_finishes_it(tmp_path: Path, step: str) -> None:
    act = STEPS[step]
    template = filled()
    undisturbed = opened(copied(template))
    act(undisturbed)
    wanted, versions = told(undisturbed), undisturbed.known.version
    worlds: list[MemoryStore] = []

    def prepare() -> Opening:
        worlds.append(copied(template))
        return lambda _: worlds[-1]

    def check(opener: Opening, raised: Failure | None, where: str) -> None:
        lake = Warehouse.open(MEMORY, opener=opener)
        if raised is None:
            assert told(lake) == wanted, where
        elif lake.known.version == versions:
            # It is done, and nobody was told that it is not.
            assert is_open(raised), (where, raised)
        else:
            assert told(lake) == told(opened(template)), where
            act(lake)
        assert told(lake) == wanted, where
        assert lake.known.version == versions, where
        assert [one.version for one in lake.history()] == list(range(versions, 0, -1)), where

    calls = every_step(
        tmp_path / "calls",
        prepare,
        lambda opener: act(Warehouse.open(MEMORY, opener=opener)),
        check,
    )
    assert calls >= 5


def test_a_commit_whose_outcome_is_unknown_is_not_repeated_blindly(tmp_path: Path) -> None:
    """Every answer about the version is lost; it has landed all the same."""
    store = filled()
    tampered = Tampered(lambda _: store)
    lake = Warehouse.open(MEMORY, opener=tampered)
    before = lake.known.version
    claimed = [False]

    def rule(method: str, key: str) -> Any:
        claimed[0] = claimed[0] or (method == "put_if_absent" and VERSIONS in key)
        return "after" if claimed[0] and VERSIONS in key else None

    tampered.rule = rule
    with pytest.raises(LakewardenError) as raised:
        lake.drop(T)
    assert raised.value.kind is ErrorKind.COMMIT_UNKNOWN
    again = opened(store)
    assert again.known.version == before + 1
    assert names_of(again) == []


def test_a_transaction_of_somebody_else_is_never_taken_for_ones_own(
    store: MemoryStore, lake: Warehouse
) -> None:
    """The answer was lost, and the version that is there is another's."""
    declared(lake)
    tampered = Tampered(lambda _: store)
    late = Warehouse.open(MEMORY, opener=tampered)
    other = opened(store)
    raced = [False]

    def rule(method: str, key: str) -> Any:
        if method == "put_if_absent" and VERSIONS in key and not raced[0]:
            raced[0] = True
            other.create_tag("theirs")
            return "before"
        return None

    tampered.rule = rule
    late.create_tag("ours")
    assert set(lake.read().manifest.tags) == {"ours", "theirs"}
    assert lake.known.version == 4


def test_one_request_is_committed_once(lake: Warehouse) -> None:
    for _ in range(2):
        made = Transaction(
            lake.log.new_id(),
            lake.known.version,
            (Change(Operation.SETTINGS, properties={"a": "b"}),),
            request="job-1",
        )
        lake.submit(lake.refresh(), made, stands)
    assert lake.refresh().version == 2
