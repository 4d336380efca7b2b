"""Many actors on one store, one call at a time, in an order that a seed decides.

Actors are ordinary code in threads.  Every call to the store waits at a turnstile; when all actors
wait there, one is let through, chosen by the seed.  So a seed replays exactly.  The store forgets
requests and answers now and then, and its listings may be a little behind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from threading import Condition, Thread, local
from typing import TypeVar

import pyarrow as pa

from lakewarden.errors import ErrorKind, StorageError
from lakewarden.storage.store import DeleteResult, Deletion, Store
from lakewarden.testing.memory import MemoryStore

Answer = TypeVar("Answer")
# Inside the class `list` is the method.
DeleteResults = list[DeleteResult]


class Killed(BaseException):
    """The actor's process has come to its end in the middle of what it did."""


class World:
    """Time, chance and ids of a simulation, and the turnstile."""

    def __init__(self, seed: int, *, faults: float = 0.0, kills: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.steps = 0
        self._faults = faults
        self._kills = kills
        self._time = datetime(2026, 1, 1, tzinfo=UTC)
        self._turn = Condition()
        self._waiting: list[str] = []
        self._chosen: str | None = None
        self._alive: set[str] = set()
        self._who = local()
        self._ids = 0
        self._errors: list[BaseException] = []

    # -- what actors see as the world ------------------------------------------------------------

    def now(self) -> datetime:
        return self._time

    def elapsed(self) -> float:
        return self._time.timestamp()

    def sleep(self, seconds: float) -> None:
        self._pass(seconds)
        self.gate()

    def below(self, number: int) -> int:
        return self.random.randrange(number)

    def fresh_id(self) -> str:
        self._ids += 1
        return f"{self._ids:032x}"

    def _pass(self, seconds: float) -> None:
        self._time += timedelta(seconds=seconds)

    # -- the turnstile ---------------------------------------------------------------------------

    def run(
        self, actors: Mapping[str, Callable[[], None]], check: Callable[[], None] | None = None
    ) -> None:
        """Run the actors to their ends; `check` is called after every step."""
        self._alive = set(actors)
        threads = [
            Thread(target=self._act, args=(name, act), daemon=True) for name, act in actors.items()
        ]
        for thread in threads:
            thread.start()
        while True:
            with self._turn:
                self._turn.wait_for(lambda: len(self._waiting) == len(self._alive))
                if self._errors or not self._alive:
                    break
                if check is not None:
                    check()
                self.steps += 1
                self._pass(0.001)
                self._chosen = self.random.choice(sorted(self._waiting))
                self._waiting.remove(self._chosen)
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._chosen is None or self._chosen not in self._alive)
        if self._errors:
            raise self._errors[0]
        if check is not None:
            check()

    def _act(self, name: str, act: Callable[[], None]) -> None:
        self._who.name = name
        try:
            self.gate()
            act()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  # told by `run`
            self._errors.append(error)
        finally:
            with self._turn:
                self._alive.discard(name)
                self._chosen = None
                self._turn.notify_all()

    def gate(self) -> None:
        """Wait until it is this actor's turn; others (the test itself) just pass."""
        name = getattr(self._who, "name", None)
        if name is None:
            return
        with self._turn:
            self._chosen = None
            self._waiting.append(name)
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._chosen == name)
        if self.random.random() < self._kills:
            raise Killed

    def faulty(self) -> bool:
        """Tell whether the next thing goes wrong; nothing does for the test itself."""
        mine = getattr(self._who, "name", None) is not None
        return mine and self.random.random() < self._faults


class SimulatedStore:
    """A store behind the turnstile, which loses requests and answers, and lists late."""

    lists_ranges = True

    def __init__(self, world: World, inner: Store | None = None, *, stale: float = 0.0) -> None:
        self._world = world
        self._inner = inner or MemoryStore(world)
        self._stale = stale
        self._before: dict[str, Sequence[pa.RecordBatch]] = {}
        self.requests = self._inner.requests

    def list(
        self, prefix: str, *, after: str | None = None, before: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        old = self._before.get(prefix)
        found = self._call(lambda: [*self._inner.list(prefix, after=after, before=before)])
        self._before[prefix] = found
        late = old is not None and self._world.random.random() < self._stale
        yield from old if late and old is not None else found

    def list_directory(self, prefix: str) -> tuple[Sequence[str], Sequence[str]]:
        return self._call(lambda: self._inner.list_directory(prefix))

    def get(self, key: str) -> bytes:
        return self._call(lambda: self._inner.get(key))

    def exists(self, key: str) -> bool:
        return self._call(lambda: self._inner.exists(key))

    def put(self, key: str, data: bytes) -> None:
        self._call(lambda: self._inner.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._call(lambda: self._inner.put_if_absent(key, data))

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        try:
            return self._call(lambda: self._inner.delete(keys))
        except StorageError as error:
            return [DeleteResult(key, Deletion.FAILED, error.message) for key in keys]

    def prune_directory(self, prefix: str) -> bool:
        return self._inner.prune_directory(prefix)

    def _call(self, call: Callable[[], Answer]) -> Answer:
        self._world.gate()
        if self._world.faulty():
            raise StorageError(ErrorKind.STORAGE, "simulated: the request was lost")
        answer = call()
        if self._world.faulty():
            raise StorageError(ErrorKind.STORAGE, "simulated: the answer was lost")
        return answer
