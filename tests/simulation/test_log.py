"""Many writers, a cleanup and lost messages, in every order that a seed can think of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from lakewarden.errors import AlreadyExists, Conflict, ErrorKind, LakewardenError, StorageError
from lakewarden.model import Format
from lakewarden.testing.memory import MemoryStore
from lakewarden.testing.simulation import SimulatedStore, World
from lakewarden.warehouse import commit as commit_module
from lakewarden.warehouse.codec import ENTRIES
from lakewarden.warehouse.commit import Limits, Log
from lakewarden.warehouse.handlers import StoreHandler
from lakewarden.warehouse.manifest import (
    EMPTY,
    Change,
    Entry,
    Logged,
    Manifest,
    Operation,
    Pin,
    Table,
    Transaction,
    apply,
)

SEEDS = 1000
TABLES = ("a", "b", "c")
PREFIX = "w/__manifest"


def pin(number: int) -> Pin:
    return Pin(number, f"{number}.manifest")


class Lake:
    """A warehouse of three tables, whose rows are counted by their pins."""

    def __init__(self, seed: int, *, faults: float, kills: float = 0.0, stale: float = 0.0) -> None:
        self.world = World(seed, faults=faults, kills=kills)
        self.memory = MemoryStore(self.world)
        self.store = SimulatedStore(self.world, self.memory, stale=stale)
        #: Ids of transactions whose writers were told that they are committed, refused, or neither.
        self.committed: list[str] = []
        self.refused: list[str] = []
        self.checked: tuple[Entry, Manifest] | None = None
        #: Transactions in the order of their versions.
        self.history: list[str] = []
        self.logs: list[Log] = []
        log = self.log(self.memory)
        made = [
            Change(Operation.CREATE, one, after=pin(1), made=Table(one, (one,), Format.LANCE, one))
            for one in TABLES
        ]
        log.commit(log.head(), Transaction("init", 0, tuple(made)), commit_module.stands)

    def log(self, store: Any = None) -> Log:
        store = store or self.store
        log = Log(
            StoreHandler(store, f"{PREFIX}/_versions"),
            store,
            PREFIX,
            self.world,
            self.world,
            Limits(tries=1000, seconds=1e9),
            self.world.fresh_id,
        )
        self.logs.append(log)
        return log

    # -- actors ----------------------------------------------------------------------------------

    def writer(self, commits: int) -> Callable[[], None]:
        """Append to one table or two at a time."""

        def write() -> None:
            log = self.log()
            for _ in range(commits):
                number = 1 + self.world.below(2)
                tables = self.world.random.sample(TABLES, number)
                self._once(log, tables, self.world.fresh_id())

        return write

    def _once(self, log: Log, tables: list[str], name: str) -> None:
        try:
            head = log.head()
            pins = head.manifest.pins()
            changes = [
                Change(Operation.APPEND, one, pins[one], pin(pins[one].version + 1))
                for one in tables
            ]
            transaction = Transaction(name, head.version, tuple(changes))
            log.commit(head, transaction, self.rebase)
        except Conflict:
            self.refused.append(name)
        except LakewardenError as error:
            if error.kind is not ErrorKind.COMMIT_UNKNOWN:
                self.refused.append(name)
        else:
            self.committed.append(name)

    @staticmethod
    def rebase(change: Change, head: Manifest) -> Change:
        before = head.pins()[change.table]
        return replace(change, before=before, after=pin(before.version + 1))

    def cleaner(self, rounds: int, keep: int) -> Callable[[], None]:
        """Take away old versions, as cleanup does, but without waiting until they are old."""

        def clean() -> None:
            log = self.log()
            for _ in range(rounds):
                try:
                    newest = log.handler.head()
                    old = [one for one in log.handler.versions() if one <= newest - keep]
                    log.handler.forget(old)
                except StorageError:
                    continue

        return clean

    # -- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        """Check everything that has been added since the last time."""
        handler = StoreHandler(self.memory, f"{PREFIX}/_versions")
        newest = handler.head()
        if self.checked is None:
            first = ENTRIES.decode(handler.read(1), "1")
            self.checked = first, apply(EMPTY, first.logged)
        while self.checked[0].version < newest:
            entry, manifest = self.checked
            after = ENTRIES.decode(handler.read(entry.version + 1), "next")
            assert after.parent == entry.write_id, "it follows the version before"
            assert after.logged.at_us > entry.logged.at_us, "time goes forward"
            for change in after.logged.transaction.changes:
                assert change.before == manifest.pins().get(change.table), "an update was lost"
            self.checked = after, apply(manifest, after.logged)
            self.history.append(after.logged.transaction.id)

    def check_end(self) -> None:
        """Check that what was said to the writers is true."""
        self.check()
        assert self.checked is not None
        head = self.log(self.memory).head()
        assert head.manifest == self.checked[1], "checkpoint and tail are the whole history"
        assert len(self.history) == len(set(self.history)), "nothing was committed twice"
        assert set(self.committed) <= set(self.history), "what was said to be committed is"
        assert not set(self.refused) & set(self.history), "what was said to be refused is not"


def run(
    seed: int, *, faults: float = 0.02, writers: int = 3, clean: bool = False, **lake: Any
) -> Lake:
    one = Lake(seed, faults=faults, **lake)
    actors = {f"writer {i}": one.writer(3) for i in range(writers)}
    if clean:
        actors["cleaner"] = one.cleaner(5, keep=1)
    one.world.run(actors, one.check)
    one.check_end()
    return one


def test_no_order_of_events_loses_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "CHECKPOINT_EVERY", 3)
    committed = retried = 0
    for seed in range(SEEDS):
        try:
            lake = run(seed, kills=0.002 if seed % 2 else 0.0, stale=0.1 if seed % 3 else 0.0)
        except BaseException:
            print(f"\nseed {seed}")  # noqa: T201
            raise
        committed += len(lake.committed)
        retried += sum(log.retries for log in lake.logs)
    assert committed > SEEDS * 6
    assert retried > SEEDS, "writers did get in each other's way"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cleanup take versions that writers may still need, as if those had slept for hours."""
    monkeypatch.setattr(commit_module, "SLOW", timedelta(0))


@pytest.mark.usefixtures("hasty")
def test_writers_that_slept_through_a_cleanup_lose_nothing() -> None:
    refused = 0
    for seed in range(SEEDS // 10):
        lake = run(seed, clean=True, faults=0.01)
        refused += len(lake.refused)
    assert refused, "some did sleep"


def test_a_seed_replays_exactly() -> None:
    first, second = run(7, faults=0.1), run(7, faults=0.1)
    assert first.world.steps == second.world.steps
    assert (first.committed, first.refused) == (second.committed, second.refused)
    assert len({run(seed).world.steps for seed in range(20)}) > 3


def caught(seeds: int = 30, **lake: Any) -> bool:
    """Tell whether some seed notices."""
    for seed in range(seeds):
        try:
            run(seed, **lake)
        except (AssertionError, LakewardenError):
            return True
    return False


def test_a_blind_put_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(self: StoreHandler, version: int, data: bytes) -> None:
        self._store.put(self.key(version), data)

    monkeypatch.setattr(StoreHandler, "claim", blind)
    assert caught(faults=0.0)


def test_a_rebase_that_is_skipped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lake, "rebase", staticmethod(commit_module.stands))
    monkeypatch.setattr(commit_module, "_outdated", lambda *_: None)
    assert caught(faults=0.0)


@pytest.mark.usefixtures("hasty")
def test_a_gap_that_is_ignored_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def bridged(self: Log, version: int, head: Entry) -> list[Logged]:
        return [one for one in (*head.tail, head.logged) if one.version > version][-1:]

    monkeypatch.setattr(Log, "since", bridged)
    monkeypatch.setattr(commit_module, "_outdated", lambda *_: None)
    assert caught(200, clean=True, faults=0.0)


def test_a_slot_that_was_cleaned_is_caught() -> None:
    """Without a second look a writer takes the number of a version that is gone."""
    assert caught(200, clean=True, faults=0.0)


def test_an_answer_that_is_not_read_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def believes(self: Log, entry: Entry) -> bool:
        try:
            self.handler.claim(entry.version, ENTRIES.encode(entry))
        except (AlreadyExists, StorageError):
            return False
        return True

    monkeypatch.setattr(Log, "_claim", believes)
    assert caught(faults=0.1)
