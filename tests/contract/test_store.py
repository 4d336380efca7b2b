"""Every store keeps every promise of storage.store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from lakewarden.errors import AlreadyExists
from lakewarden.storage.contract import CHECKS, Check, validate
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener, read_only
from lakewarden.storage.store import OBJECT_SCHEMA, DeleteResult, Deletion, ReadStore, Store
from lakewarden.testing.s3 import S3Server

numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    store: Store
    location: Location


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    number = next(numbers)
    options: dict[str, str] = {}
    match request.param:
        case "local":
            uri = str(tmp_path)
        case "memory":
            uri = f"memory://contract-{number}/t"
        case _:
            server: S3Server = request.getfixturevalue("s3")
            server.create_bucket(f"contract-{number}")
            uri, options = f"s3://contract-{number}/t", server.options
    location = Location.parse(uri)
    return Place(Opener(options)(location), location)


def keys(store: ReadStore, prefix: str) -> list[str]:
    return [key for batch in store.list(prefix) for key in batch["key"].to_pylist()]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_store_keeps_its_promise(place: Place, check: Check) -> None:
    check.run(place.store, place.location.child(check.name).key)


def test_listings_have_the_schema(place: Place) -> None:
    place.store.put(place.location.child("x").key, b"1")
    for batch in place.store.list(place.location.key):
        assert isinstance(batch, pa.RecordBatch)
        assert batch.schema == OBJECT_SCHEMA


def test_validation_passes_and_leaves_nothing(place: Place) -> None:
    place.store.put(place.location.child("mine").key, b"1")
    outcomes = validate(place.store, place.location, ids=lambda: "1")
    assert [outcome.detail for outcome in outcomes if not outcome.ok] == []
    assert keys(place.store, place.location.key) == [place.location.child("mine").key]
    assert list(place.store.list_directory(place.location.key)[0]) == []


def test_reader_has_no_means_to_change_anything(place: Place) -> None:
    reader = read_only(place.store)
    for name in ("put", "put_if_absent", "delete", "prune_directory"):
        assert not hasattr(reader, name)
    place.store.put(place.location.child("x").key, b"1")
    assert keys(reader, place.location.key) == [place.location.child("x").key]
    assert reader.requests is place.store.requests


class Lying:
    """A store with one promise broken."""

    def __init__(self, inner: Store, **broken: Callable[..., object]) -> None:
        self._inner = inner
        self._broken = broken

    def __getattr__(self, name: str) -> object:
        return self._broken.get(name) or getattr(self._inner, name)


class LyingList:
    """A listing changed on its way."""

    def __init__(self, store: Store, change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> None:
        self._store = store
        self._change = change

    def __call__(
        self, prefix: str, *, after: str | None = None, before: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        return map(self._change, self._store.list(prefix, after=after, before=before))


def backwards(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.sort_by([("key", "descending")])


def from_1970(batch: pa.RecordBatch) -> pa.RecordBatch:
    modified = OBJECT_SCHEMA.field("modified")
    return batch.set_column(2, modified, pa.array([0] * batch.num_rows, modified.type))


def liars(store: Store) -> Iterator[tuple[str, Lying]]:
    def ignoring_range(prefix: str, **_: object) -> Iterator[pa.RecordBatch]:
        return store.list(prefix)

    def prefix_as_text(prefix: str, **_: object) -> Iterator[pa.RecordBatch]:
        for batch in store.list(prefix.rpartition("/")[0]):
            yield batch.filter(pc.starts_with(batch["key"], prefix))

    def check_then_put(key: str, data: bytes) -> None:
        if store.exists(key):
            raise AlreadyExists(key)
        store.put(key, data)

    def deleting_most(wanted: Sequence[str]) -> object:
        return [*store.delete(wanted[:-1]), DeleteResult(wanted[-1], Deletion.DELETED)]

    yield "ranges", Lying(store, list=ignoring_range)
    yield "segments", Lying(store, list=prefix_as_text)
    yield "listing", Lying(store, list=LyingList(store, backwards))
    yield "ages", Lying(store, list=LyingList(store, from_1970))
    yield "conditional-put", Lying(store, put_if_absent=store.put)
    yield "race", Lying(store, put_if_absent=check_then_put)
    yield "bulk-delete", Lying(store, delete=deleting_most)
    yield "missing", Lying(store, get=lambda key: b"", exists=lambda key: True)
    yield "one-level", Lying(store, list_directory=lambda prefix: ([], []))


def test_each_lie_is_found(tmp_path: Path) -> None:
    store = Opener()(Location.parse(str(tmp_path)))
    for number, (name, liar) in enumerate(liars(store)):
        location = Location.parse(f"{tmp_path}/{number}")
        outcomes = validate(liar, location, ids=lambda: "1")  # type: ignore[arg-type]
        found = {outcome.name: outcome.detail for outcome in outcomes if not outcome.ok}
        assert name in found, f"{name} was not found out"
        assert "\n" not in found[name]
