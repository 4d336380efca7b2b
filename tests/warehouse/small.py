"""Changes, transactions and logs in a line each, and a world that does as it is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from lakewarden.model import Format
from lakewarden.testing.memory import MemoryStore
from lakewarden.warehouse.commit import Head, Limits, Log, Rebase, stands
from lakewarden.warehouse.handlers import StoreHandler
from lakewarden.warehouse.manifest import Change, Logged, Operation, Pin, Table, Transaction

PREFIX = "w/__manifest"
START = datetime(2026, 1, 1, tzinfo=UTC)


def pin(number: int) -> Pin:
    return Pin(number, f"_versions/{number}.manifest", size=100 + number)


def table(number: str, name: str | None = None, **fields: Any) -> Table:
    return Table(number, (name or number,), Format.LANCE, f"w/tables/{number}", **fields)


def create(number: str, name: str | None = None, after: Pin | None = None) -> Change:
    made = table(number, name)
    return Change(Operation.CREATE, number, after=after, name=made.name, made=made)


def content(operation: Operation, number: str = "a", at: int = 2, **fields: Any) -> Change:
    """Return a change that moves a pin to the version `at`."""
    return Change(operation, number, pin(at - 1), pin(at), **fields)


def append(number: str = "a", at: int = 2) -> Change:
    return content(Operation.APPEND, number, at)


def ref(operation: Operation, name: str, **fields: Any) -> Change:
    return Change(operation, name=(name,), **fields)


def transaction(*changes: Change, **fields: Any) -> Transaction:
    return Transaction(**{"id": "f" * 32, "read_version": 0, "changes": changes, **fields})


def logged(version: int, *changes: Change, **fields: Any) -> Logged:
    made = transaction(*changes, **{"id": f"{version:032x}", **fields})
    return Logged(version, version * 1_000_000, made)


class FakeClock:
    """Time that passes when somebody sleeps or a test says so."""

    def __init__(self) -> None:
        self.time = 0.0
        self.slept: list[float] = []

    def now(self) -> datetime:
        return START + timedelta(seconds=self.time)

    def elapsed(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


class Dice:
    """Chance that was decided beforehand; by default the largest number that there is."""

    def __init__(self, throw: Callable[[int], int] = lambda number: number - 1) -> None:
        self.asked: list[int] = []
        self._throw = throw

    def below(self, number: int) -> int:
        self.asked.append(number)
        return self._throw(number)


Event = Callable[[str, str], None]


def nothing(action: str, key: str) -> None:
    """Let a request pass."""


class Haunted(MemoryStore):
    """A store where a test can do something before and after every request."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        super().__init__(clock or FakeClock())
        self.before: Event = nothing
        self.after: Event = nothing
        #: What is read instead of what is there.
        self.misread: Callable[[str, bytes], bytes] = lambda _, data: data

    def list(
        self, prefix: str, *, after: str | None = None, before: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        self.before("list", prefix)
        yield from super().list(prefix, after=after, before=before)

    def get(self, key: str) -> bytes:
        self.before("get", key)
        return self.misread(key, super().get(key))

    def put(self, key: str, data: bytes) -> None:
        self.before("put", key)
        super().put(key, data)
        self.after("put", key)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.before("claim", key)
        super().put_if_absent(key, data)
        self.after("claim", key)


_ids = itertools.count(1)


def fresh() -> str:
    return f"{next(_ids):032x}"


def open_log(
    store: MemoryStore,
    clock: FakeClock | None = None,
    dice: Dice | None = None,
    limits: Limits | None = None,
) -> Log:
    return Log(
        StoreHandler(store, f"{PREFIX}/_versions"),
        store,
        PREFIX,
        clock or FakeClock(),
        dice or Dice(),
        limits or Limits(),
        fresh,
    )


def commit(
    log: Log, *changes: Change, base: Head | None = None, rebase: Rebase = stands, **fields: Any
) -> Head:
    """Commit changes that were prepared on `base`, or on the newest version."""
    base = base or log.head()
    made = transaction(*changes, **{"id": fresh(), "read_version": base.version, **fields})
    return log.commit(base, made, rebase)


def grow(log: Log, versions: int) -> Head:
    """Append to one table until there are that many versions."""
    head = log.head()
    if head.version == 0:
        head = commit(log, create("a", after=pin(1)), base=head)
    while head.version < versions:
        head = commit(log, append("a", head.version + 1), base=head)
    return head
