"""Damage of the log itself: told by name; what nobody reads can be put aside."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import count

import pytest

from lakewarden.errors import StorageError
from lakewarden.maintenance import log_damage
from lakewarden.maintenance.damage import Finding
from lakewarden.storage.location import Location
from lakewarden.storage.opening import read_only
from lakewarden.testing.faults import When
from lakewarden.testing.memory import MemoryStore
from lakewarden.testing.simulation import World
from lakewarden.warehouse import soundness
from lakewarden.warehouse.codec import CHECKPOINTS
from lakewarden.warehouse.commit import CHECKPOINT_EVERY
from lakewarden.warehouse.manifest import Pin
from lakewarden.warehouse.soundness import Trouble, flaws, quarantine
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import Tampered, declared, keys, made_in, moved, objects, opened

LOG = "wh/__manifest"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def lake(store: MemoryStore) -> Warehouse:
    """A warehouse with a checkpoint, and some versions after it."""
    world = World(0)
    found = made_in(store, world)
    table = declared(found)
    for number in range(1, CHECKPOINT_EVERY + 8):
        moved(found, table, number)
    return found


def entry(version: int) -> str:
    return f"{LOG}/_versions/{2**64 - 1 - version:020d}.json"


def checkpoint(lake: Warehouse) -> tuple[str, int]:
    """Return the one checkpoint, and its version."""
    (key,) = keys(lake.log.store, f"{LOG}/_checkpoints")
    return key, int(key.rpartition("/")[2])


def found(lake: Warehouse) -> dict[Trouble, list[int | None]]:
    told: dict[Trouble, list[int | None]] = {}
    for flaw in flaws(lake.log):
        told.setdefault(flaw.trouble, []).append(flaw.version)
    return told


def only(lake: Warehouse) -> Finding:
    (one,) = log_damage.find(lake)
    assert one.means
    assert one.next
    return one


def test_a_sound_log_has_no_flaws(lake: Warehouse) -> None:
    assert found(lake) == {}
    assert log_damage.find(lake) == []


def test_a_log_that_was_reclaimed_in_part_has_no_flaws(lake: Warehouse, store: MemoryStore) -> None:
    _, version = checkpoint(lake)
    store.delete([entry(number) for number in range(1, version)])
    assert found(lake) == {}


@pytest.mark.parametrize("version", [3, CHECKPOINT_EVERY + 9])
def test_a_version_that_cannot_be_read_is_told(
    lake: Warehouse, store: MemoryStore, version: int
) -> None:
    store.put(entry(version), store.get(entry(version))[:-5] + b"xxxxx")
    assert found(lake) == {Trouble.UNREADABLE_VERSION: [version]}
    one = only(lake)
    assert (one.versions, one.strays) == ((version,), ())
    assert "backup" in one.next


def test_a_checkpoint_that_disagrees_with_the_log_is_told(
    lake: Warehouse, store: MemoryStore
) -> None:
    """It is whole and sealed, and yet another warehouse than the versions make."""
    key, version = checkpoint(lake)
    there = CHECKPOINTS.decode(store.get(key), key)
    (number, pin), *_ = there.branches["main"].pins.items()
    assert pin is not None
    main = replace(there.branches["main"], pins={number: Pin(66, pin.path)})
    store.put(key, CHECKPOINTS.encode(replace(there, branches={"main": main})))
    assert found(lake) == {Trouble.WRONG_CHECKPOINT: [version]}
    assert "disagrees" in only(lake).means


def test_a_checkpoint_that_is_missing_or_cannot_be_read_is_told(
    lake: Warehouse, store: MemoryStore
) -> None:
    key, version = checkpoint(lake)
    store.put(key, b"nonsense")
    assert found(lake) == {Trouble.UNREADABLE_CHECKPOINT: [version]}
    store.delete([key])
    assert found(lake) == {Trouble.MISSING_CHECKPOINT: [version + 1]}


def test_a_version_that_does_not_follow_the_one_before_is_told(
    lake: Warehouse, store: MemoryStore
) -> None:
    """The store has lost version 5, and somebody has written another one in its place."""
    other = MemoryStore()
    copy = made_in(other, World(1))
    table = declared(copy)
    for number in range(1, 10):
        moved(copy, table, number)
    store.put(entry(5), other.get(entry(5)))
    assert found(lake)[Trouble.BROKEN_CHAIN] == [5, 6]


def test_what_nobody_reads_is_put_aside_and_what_somebody_might_is_not(
    lake: Warehouse, store: MemoryStore
) -> None:
    inside = [
        "_transactions/abc.json",
        "_versions/notes.txt",
        "_checkpoints/0001",
        "_versions/7.json",
    ]
    outside = ["notes.txt", "_newer/thing"]
    for path in (*inside, *outside):
        store.put(f"{LOG}/{path}", b"nonsense")
    before = objects(store)
    told = log_damage.find(lake)
    assert {path for one in told for path in one.strays} == set(inside)
    assert {one.files for one in told if not one.strays} == {2}
    done = [log_damage.put_aside(lake, one) for one in told]
    assert sum(one.quarantined for one in done) == len(inside)
    after = objects(store)
    for path in inside:
        assert f"{LOG}/{path}" not in after
        assert after[f"{LOG}/_quarantine/{path}"] == b"nonsense"
    assert {key: data for key, data in after.items() if "_quarantine" not in key} == {
        key: data for key, data in before.items() if key.removeprefix(f"{LOG}/") not in inside
    }
    # What was put aside is no finding, and the warehouse goes on.
    assert all(not one.strays for one in log_damage.find(opened(store)))
    moved(opened(store), lake.read().table(("db", "t")), 66)


def test_what_a_newer_release_has_announced_is_left_alone(
    lake: Warehouse, store: MemoryStore
) -> None:
    (name, *_) = keys(store, f"{LOG}/_transactions")
    body = b'{"stamp": 99, "id": "x"}'

    store.put(name, body + b"\nsha256:" + hashlib.sha256(body).hexdigest().encode())
    one = only(lake)
    assert (one.kind, one.strays) == (Trouble.UNREADABLE_ANNOUNCEMENT.value, ())


def test_work_in_progress_is_no_stray(lake: Warehouse, store: MemoryStore) -> None:
    for path in ("_versions/.tmp-0123", "_transactions/.tmp-0123", "_due/t.5", "_try-abc/x"):
        store.put(f"{LOG}/{path}", b"")
    assert log_damage.find(lake) == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 5))
def test_putting_aside_may_fail_anywhere_and_loses_nothing(
    store: MemoryStore, number: int, when: When
) -> None:
    store.put("log/_versions/odd", b"odd")
    calls, tampered = count(1), Tampered(lambda _: store)
    tampered.rule = lambda *_: when if next(calls) == number else None
    faulty = tampered(Location.parse("memory://lake"))
    with pytest.raises(StorageError, match="injected"):
        quarantine(faulty, "log", ["_versions/odd"])
    assert b"odd" in objects(store).values()
    quarantine(faulty, "log", ["_versions/odd"])
    assert objects(store) == {"log/_quarantine/_versions/odd": b"odd"}


def test_another_stray_of_the_same_name_is_left_where_it_is(store: MemoryStore) -> None:
    for data in (b"first", b"second"):
        store.put("log/_versions/odd", data)
        quarantine(store, "log", ["_versions/odd"])
    assert objects(store) == {
        "log/_quarantine/_versions/odd": b"first",
        "log/_versions/odd": b"second",
    }


def test_looking_writes_nothing(lake: Warehouse, store: MemoryStore) -> None:
    store.put(f"{LOG}/_versions/odd", b"odd")
    before = objects(store)
    log = replace(lake.log, store=read_only(store))  # type: ignore[arg-type]
    assert [one.stray for one in soundness.flaws(log)] == [True]
    assert objects(store) == before
