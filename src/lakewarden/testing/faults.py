"""Stores that fail at a chosen call.

A test runs an operation once to count its storage calls, then again and again with the first,
second, third … call failing, before or after its effect, and checks that nothing was lost.  Calls
are counted through a locked file, so they are numbered across Spark's worker processes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import pyarrow as pa

from lakewarden.errors import ErrorKind, StorageError
from lakewarden.storage.location import Location
from lakewarden.storage.store import DeleteResult, Deletion, Request, Store

When = Literal["before", "after"]
Answer = TypeVar("Answer")
# Inside the class `list` is the method.
DeleteResults = list[DeleteResult]


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which call fails and how; `fail_call` 0 never fails and only counts.

    `only` restricts both counting and failing to some kinds of calls.
    """

    fail_call: int
    when: When
    counter_path: str
    only: frozenset[Request] | None = None

    def fails(self, kind: Request) -> bool:
        """Count one call; tell whether it is the one to fail."""
        if self.only is not None and kind not in self.only:
            return False
        return count(self.counter_path) == self.fail_call

    def calls(self) -> int:
        """Return how many calls were counted so far."""
        path = Path(self.counter_path)
        return int(path.read_text() or 0) if path.exists() else 0


def count(path: str) -> int:
    """Add one to the number in the file, exclusively, and return it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        number = int(os.read(descriptor, 32) or b"0") + 1
        os.pwrite(descriptor, str(number).encode(), 0)
    finally:
        os.close(descriptor)
    return number


@dataclass(frozen=True)
class FaultyOpener:
    """Opens faulty stores; picklable when the inner opener is."""

    opener: Callable[[Location], Store]
    fail_call: int
    when: When
    counter_path: str
    only: frozenset[Request] | None = None

    @property
    def plan(self) -> FaultPlan:
        return FaultPlan(self.fail_call, self.when, self.counter_path, self.only)

    def __call__(self, location: Location) -> Store:
        return FaultyStore(self.opener(location), self.plan)


class FaultyStore:
    """A store whose n-th call fails, as if the request or its answer had been lost."""

    def __init__(self, inner: Store, plan: FaultPlan) -> None:
        self.requests = inner.requests
        self.lists_ranges = inner.lists_ranges
        self._inner = inner
        self._plan = plan

    def list(
        self, prefix: str, *, after: str | None = None, before: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        fails = self._plan.fails(Request.LIST)
        if fails and self._plan.when == "before":
            raise self._fault("list", prefix)
        yield from self._inner.list(prefix, after=after, before=before)
        if fails:
            raise self._fault("list", prefix)

    def list_directory(self, prefix: str) -> tuple[Sequence[str], Sequence[str]]:
        return self._call(Request.LIST, prefix, lambda: self._inner.list_directory(prefix))

    def get(self, key: str) -> bytes:
        return self._call(Request.GET, key, lambda: self._inner.get(key))

    def exists(self, key: str) -> bool:
        return self._call(Request.HEAD, key, lambda: self._inner.exists(key))

    def put(self, key: str, data: bytes) -> None:
        self._call(Request.PUT, key, lambda: self._inner.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._call(Request.PUT, key, lambda: self._inner.put_if_absent(key, data))

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        if not self._plan.fails(Request.DELETE):
            return self._inner.delete(keys)
        if self._plan.when == "after":
            self._inner.delete(keys)
        why = self._fault("delete", f"{len(keys)} keys").message
        return [DeleteResult(key, Deletion.FAILED, why) for key in keys]

    def prune_directory(self, prefix: str) -> bool:
        # Not counted: object stores make no request for it.
        return self._inner.prune_directory(prefix)

    def _call(self, kind: Request, key: str, call: Callable[[], Answer]) -> Answer:
        fails = self._plan.fails(kind)
        if fails and self._plan.when == "before":
            raise self._fault(kind, key)
        answer = call()
        if fails:
            raise self._fault(kind, key)
        return answer

    def _fault(self, action: str, key: str) -> StorageError:
        return StorageError(
            ErrorKind.STORAGE,
            f"injected fault {self._plan.when} storage call {self._plan.fail_call}: {action} {key}",
        )
