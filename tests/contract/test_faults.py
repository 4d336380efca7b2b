"""The faulty store fails where it is told to, and nowhere else."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from lakewarden.errors import StorageError
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import Deletion, Request
from lakewarden.testing.faults import FaultyOpener, When, count


def opener(tmp_path: Path, fail_call: int, when: When = "before") -> FaultyOpener:
    return FaultyOpener(Opener(), fail_call, when, str(tmp_path / "counter"))


def place(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path / "t"))


def test_zero_only_counts(tmp_path: Path) -> None:
    faulty = opener(tmp_path, 0)
    store, key = faulty(place(tmp_path)), place(tmp_path).child("x").key
    assert faulty.plan.calls() == 0
    store.put(key, b"1")
    store.exists(key)
    list(store.list(place(tmp_path).key))
    store.delete([key])
    assert faulty.plan.calls() == 4


@pytest.mark.parametrize(("when", "effect"), [("before", False), ("after", True)])
def test_put_fails_before_or_after_its_effect(tmp_path: Path, when: When, effect: bool) -> None:
    store, key = opener(tmp_path, 2, when)(place(tmp_path)), place(tmp_path).child("x").key
    store.put(f"{key}0", b"1")
    with pytest.raises(StorageError, match="injected fault"):
        store.put(key, b"1")
    assert store.exists(key) is effect


@pytest.mark.parametrize(("when", "effect"), [("before", False), ("after", True)])
def test_delete_fails_as_results(tmp_path: Path, when: When, effect: bool) -> None:
    store, key = opener(tmp_path, 2, when)(place(tmp_path)), place(tmp_path).child("x").key
    store.put(key, b"1")
    assert [result.outcome for result in store.delete([key])] == [Deletion.FAILED]
    assert store.exists(key) is not effect


@pytest.mark.parametrize(("when", "seen"), [("before", 0), ("after", 1)])
def test_listing_fails_at_once_or_at_its_end(tmp_path: Path, when: When, seen: int) -> None:
    store = opener(tmp_path, 2, when)(place(tmp_path))
    store.put(place(tmp_path).child("x").key, b"1")
    batches = store.list(place(tmp_path).key)
    for _ in range(seen):
        assert next(batches).num_rows == 1
    with pytest.raises(StorageError, match="injected fault"):
        next(batches)


def test_other_kinds_are_not_counted(tmp_path: Path) -> None:
    only = frozenset({Request.DELETE})
    faulty = FaultyOpener(Opener(), 1, "before", str(tmp_path / "counter"), only)
    store, key = faulty(place(tmp_path)), place(tmp_path).child("x").key
    store.put(key, b"1")
    assert faulty.plan.calls() == 0
    assert store.delete([key])[0].outcome is Deletion.FAILED


def test_calls_are_numbered_across_processes(tmp_path: Path) -> None:
    faulty = pickle.loads(pickle.dumps(opener(tmp_path, 0)))
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        # Large portions, so that the processes really meet.
        numbers = list(pool.map(count, [faulty.counter_path] * 4000, chunksize=500))
    assert sorted(numbers) == list(range(1, 4001))
    assert faulty.plan.calls() == 4000
