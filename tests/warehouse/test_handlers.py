"""Every commit handler keeps every promise of warehouse.handlers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from lakewarden.errors import AlreadyExists, ErrorKind, NotFound, StorageError
from lakewarden.storage.local import LocalStore
from lakewarden.storage.store import DELETE_BATCH_MAX, Request
from lakewarden.testing.faults import FaultPlan, FaultyStore
from lakewarden.testing.memory import MemoryStore
from lakewarden.warehouse.handlers import (
    _VERSIONS,
    CommitHandler,
    SqlHandler,
    StoreHandler,
)

if TYPE_CHECKING:
    from tests.postgres import PostgresServer

CLAIMERS = 8
Open = Callable[[], CommitHandler]


@dataclass
class Databases:
    """Engines that are closed in the end."""

    engines: list[sa.Engine]

    def open(self, url: str, warehouse: str = "file:///lake") -> SqlHandler:
        engine = sa.create_engine(url)
        self.engines.append(engine)
        return SqlHandler(engine, warehouse)


@pytest.fixture
def databases() -> Iterator[Databases]:
    made = Databases([])
    yield made
    for engine in made.engines:
        engine.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/log.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.database())


@pytest.fixture(params=["local", "memory", "sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, databases: Databases) -> Open:
    """Opens the same empty log again and again, each time as another process would."""
    match request.param:
        case "local":
            return lambda: StoreHandler(LocalStore(), f"{str(tmp_path).strip('/')}/_versions")
        case "memory":
            store = MemoryStore()
            return lambda: StoreHandler(store, "w/_versions")
        case "sqlite":
            return lambda: databases.open(f"sqlite:///{tmp_path}/log.db")
        case _:
            server: PostgresServer = request.getfixturevalue("postgres")
            name = server.database()
            return lambda: databases.open(server.url(name))


@pytest.fixture
def handler(opened: Open) -> CommitHandler:
    return opened()


# -- the contract --------------------------------------------------------------------------------


def test_a_new_log_has_no_version(handler: CommitHandler) -> None:
    assert handler.head() == 0
    assert list(handler.versions()) == []


def test_what_is_claimed_can_be_read(handler: CommitHandler, opened: Open) -> None:
    handler.claim(1, b"one")
    assert (handler.head(), handler.read(1)) == (1, b"one")
    other = opened()
    other.claim(2, b"two")
    assert (handler.head(), handler.read(2)) == (2, b"two")


def test_versions_come_newest_first(handler: CommitHandler) -> None:
    for version in range(1, 13):
        handler.claim(version, b"%d" % version)
        assert handler.head() == version
    assert list(handler.versions()) == list(range(12, 0, -1))


def test_a_version_that_is_taken_stays_as_it_is(handler: CommitHandler, opened: Open) -> None:
    handler.claim(1, b"first")
    for again in (handler, opened()):
        for data in (b"first", b"second"):
            with pytest.raises(AlreadyExists) as error:
                again.claim(1, data)
            assert error.value.kind is ErrorKind.ALREADY_EXISTS
            assert "\n" not in error.value.message
    assert (handler.head(), handler.read(1)) == (1, b"first")


def race(handlers: list[CommitHandler], version: int) -> list[bytes]:
    """Let everybody claim one version at once; return what the winners had to say."""
    start = Barrier(len(handlers))

    def claim(racer: int) -> bytes | None:
        data = f"{version} is mine, says {racer}".encode()
        start.wait()
        try:
            handlers[racer].claim(version, data)
        except AlreadyExists:
            return None
        return data

    with ThreadPoolExecutor(len(handlers)) as pool:
        return [data for data in pool.map(claim, range(len(handlers))) if data is not None]


@pytest.mark.parametrize("shared", [True, False], ids=["one-handler", "a-handler-each"])
def test_one_of_many_claimers_wins(handler: CommitHandler, opened: Open, shared: bool) -> None:
    racers = [handler if shared else opened() for _ in range(CLAIMERS)]
    for version in range(1, 7):
        winners = race(racers, version)
        assert len(winners) == 1
        assert handler.read(version) == winners[0]
        assert handler.head() == version


def test_claimers_of_a_log_that_all_open_at_once(opened: Open) -> None:
    start = Barrier(CLAIMERS)

    def claim(racer: int) -> bool:
        start.wait()
        try:
            opened().claim(1, b"%d" % racer)
        except AlreadyExists:
            return False
        return True

    opened()
    with ThreadPoolExecutor(CLAIMERS) as pool:
        assert sum(pool.map(claim, range(CLAIMERS))) == 1


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", bytes(range(256)) * 3, "ü\u2028😀".encode(), b"'; DROP TABLE x; --", b"x" * 3_000_000],
    ids=["empty", "zero", "bytes", "text", "quotes", "large"],
)  # fmt: skip
def test_bytes_survive(handler: CommitHandler, opened: Open, data: bytes) -> None:
    handler.claim(1, data)
    found = opened().read(1)
    assert isinstance(found, bytes)
    assert found == data


def test_a_version_that_there_is_not_is_not_found(handler: CommitHandler) -> None:
    handler.claim(1, b"one")
    for version in (0, 2, 10**9):
        with pytest.raises(NotFound) as error:
            handler.read(version)
        assert error.value.kind is ErrorKind.NOT_FOUND


def test_what_is_forgotten_is_gone_and_the_rest_is_not(handler: CommitHandler) -> None:
    for version in range(1, 7):
        handler.claim(version, b"%d" % version)
    handler.forget([1, 2, 4])
    assert list(handler.versions()) == [6, 5, 3]
    assert handler.read(3) == b"3"
    with pytest.raises(NotFound):
        handler.read(4)


def test_forgetting_twice_is_forgetting_once(handler: CommitHandler) -> None:
    handler.claim(1, b"1")
    handler.claim(2, b"2")
    for versions in ([1], [1], [1, 99], [1, 1], []):
        handler.forget(versions)
        assert list(handler.versions()) == [2]


def test_many_can_be_forgotten_at_once(handler: CommitHandler) -> None:
    for version in range(1, 6):
        handler.claim(version, b"x")
    handler.forget([*range(1, 4), *range(10, 10 + 2 * DELETE_BATCH_MAX), 4])
    assert list(handler.versions()) == [5]


def test_a_log_may_begin_late(handler: CommitHandler) -> None:
    for version in (1000, 2**31 - 1):
        handler.claim(version, b"x")
        assert handler.head() == version


@pytest.mark.parametrize("version", [2**31, 2**40, 2**63 - 1])
def test_numbers_are_64_bits_long(handler: CommitHandler, version: int) -> None:
    handler.claim(version, b"x")
    assert (handler.head(), handler.read(version)) == (version, b"x")
    handler.forget([version])
    assert handler.head() == 0


# -- versions as objects -------------------------------------------------------------------------


def test_finding_the_newest_of_many_costs_one_request() -> None:
    store = MemoryStore()
    handler = StoreHandler(store, "w/_versions")
    for version in range(1, 2501):
        handler.claim(version, b"x")
    store.requests.drain()
    assert handler.head() == 2500
    assert store.requests.drain() == {Request.LIST: 1}


def test_other_objects_are_no_versions() -> None:
    store = MemoryStore()
    handler = StoreHandler(store, "w/_versions")
    for name in ("README", "1.json", "x.json", f"{7:020d}.json.tmp", f"{7:019d}.json"):
        store.put(f"w/_versions/{name}", b"")
    store.put(f"w/_versions_old/{7:020d}.json", b"")
    assert list(handler.versions()) == []


def test_a_version_that_cannot_be_forgotten_is_an_error(tmp_path: Path) -> None:
    inner = MemoryStore()
    StoreHandler(inner, "w/_versions").claim(1, b"x")
    plan = FaultPlan(1, "before", str(tmp_path / "calls"), frozenset({Request.DELETE}))
    handler = StoreHandler(FaultyStore(inner, plan), "w/_versions")
    with pytest.raises(StorageError, match="cannot delete"):
        handler.forget([1])
    assert handler.head() == 1


# -- versions as rows ----------------------------------------------------------------------------


def test_a_place_behind_the_newest_version_is_never_free(url: str, databases: Databases) -> None:
    """So a writer that slept through a cleanup cannot take the number of a version that is gone."""
    handler = databases.open(url)
    for version in range(1, 6):
        handler.claim(version, b"%d" % version)
    handler.forget([1, 2, 3])
    for version in (1, 2, 3, 4, 5, 0, -1):
        with pytest.raises(AlreadyExists):
            handler.claim(version, b"mine")
    assert list(handler.versions()) == [5, 4]
    handler.claim(6, b"6")


def test_warehouses_in_one_database_do_not_meet(url: str, databases: Databases) -> None:
    one, other = databases.open(url, "s3://b/one"), databases.open(url, "s3://b/other")
    for version in (1, 2, 3):
        one.claim(version, b"one")
    other.claim(1, b"other")
    assert (one.head(), other.head()) == (3, 1)
    other.forget([1, 2, 3])
    assert list(one.versions()) == [3, 2, 1]
    assert list(other.versions()) == []


def test_two_may_open_an_empty_database_at_once(url: str, databases: Databases) -> None:
    others = [databases.open]

    def overtake(*_: object, **__: object) -> None:
        if others:
            others.pop()(url).claim(1, b"x")

    # Right between looking and creating.
    sa.event.listen(_VERSIONS, "before_create", overtake)
    try:
        assert databases.open(url).head() == 1
    finally:
        sa.event.remove(_VERSIONS, "before_create", overtake)


SECRET = "hunter2"


def uses(handler: CommitHandler) -> Iterator[Callable[[], object]]:
    yield handler.head
    yield lambda: handler.read(1)
    yield lambda: list(handler.versions())
    yield lambda: handler.claim(2, b"x")
    yield lambda: handler.forget([1])


def broken(use: Callable[[], object]) -> None:
    with pytest.raises(StorageError) as error:
        use()
    assert error.value.kind is ErrorKind.STORAGE
    assert not isinstance(error.value, AlreadyExists | NotFound)
    assert "\n" not in error.value.message
    assert SECRET not in error.value.message
    assert error.value.__cause__ is None


def test_a_database_that_went_away_is_a_storage_error(
    postgres: PostgresServer, databases: Databases
) -> None:
    name = postgres.database()
    handler = databases.open(postgres.url(name))
    handler.claim(1, b"x")
    postgres.drop(name)
    for use in itertools.chain(uses(handler), uses(handler)):
        broken(use)


def test_a_database_file_that_was_replaced_is_a_storage_error(
    tmp_path: Path, databases: Databases
) -> None:
    file = tmp_path / f"{SECRET}.db"
    handler = databases.open(f"sqlite:///{file}")
    handler.claim(1, b"x")
    databases.engines[0].dispose()
    file.write_bytes(b"this was never a database" * 1000)
    for use in uses(handler):
        broken(use)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://ada:{SECRET}@127.0.0.1:1/lake?connect_timeout=5",
        f"postgresql+psycopg://ada:{SECRET}@/lake?host=/nowhere",
        "sqlite:////nowhere/at/all.db",
    ],
)
def test_a_database_that_is_not_there_is_a_storage_error(url: str, databases: Databases) -> None:
    if url.startswith("postgresql"):
        pytest.importorskip("psycopg")
    broken(lambda: databases.open(url))


def test_who_is_not_let_in_hears_so_without_the_password(
    postgres: PostgresServer, databases: Databases
) -> None:
    url = postgres.url("postgres").replace("lakewarden@", f"nobody-at-all:{SECRET}@")
    broken(lambda: databases.open(url))
