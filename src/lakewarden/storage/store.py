"""What a store must guarantee.

Keys are relative to the store's root (a bucket, a container, or `/` of the local disk), use `/`
and carry no leading slash.  Everything is synchronous and safe to call from many threads: a task
keeps hundreds of requests in flight with a thread pool, not with an event loop.

A store promises:

1. `list` sees every object whose write was acknowledged before the call (strong listing), in
   ascending order of the key's UTF-8 bytes, each once.
2. `get` after an acknowledged `put` returns the new bytes.
3. `put_if_absent` succeeds for exactly one of any number of concurrent callers.
4. `delete` of a missing key is no error; other keys of the batch are unaffected by one that fails.
5. Modification times come from one clock, the store's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Lock
from typing import Protocol, runtime_checkable

import pyarrow as pa

#: Most keys one bulk delete request may carry (S3's limit).
DELETE_BATCH_MAX = 1000
#: Objects in one LIST answer (S3's limit).
LIST_PAGE_SIZE = 1000

#: One row per object.  `modified` is null when the store does not tell; then the age is unknown.
OBJECT_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("modified", pa.timestamp("us", tz="UTC")),
    ]
)


class Request(StrEnum):
    """Kinds of requests a store is charged for."""

    LIST = "LIST"
    GET = "GET"
    HEAD = "HEAD"
    PUT = "PUT"
    DELETE = "DELETE"


class Deletion(StrEnum):
    """What became of one key of a bulk delete."""

    DELETED = "deleted"
    MISSING = "missing"  # only stores that can tell (the local disk) say so
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """The outcome for one key; `error` says why it failed."""

    key: str
    outcome: Deletion
    error: str = ""


@dataclass(slots=True)
class Requests:
    """Requests counted by kind; safe to share between threads."""

    counts: dict[Request, int] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, kind: Request, number: int = 1) -> None:
        with self._lock:
            self.counts[kind] = self.counts.get(kind, 0) + number

    def drain(self) -> dict[Request, int]:
        """Return what was counted since the last drain."""
        with self._lock:
            counts, self.counts = self.counts, {}
        return counts


class ReadStore(Protocol):
    """A store that cannot change anything: all that planning ever gets."""

    requests: Requests
    #: Whether `after`/`before` save requests (otherwise the store lists everything and filters).
    lists_ranges: bool

    def list(
        self, prefix: str, *, after: str | None = None, before: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield objects under directory `prefix` with `after` < key < `before`, in key order.

        Batches have OBJECT_SCHEMA.  `prefix` is a directory: `t` never yields `t_backup/x`; the
        empty prefix is the whole store.  A missing directory yields nothing.
        """
        ...

    def list_directory(self, prefix: str) -> tuple[Sequence[str], Sequence[str]]:
        """Return names of directories and of objects directly below `prefix`, one level only."""
        ...

    def get(self, key: str) -> bytes:
        """Return the object's bytes, or raise NotFound."""
        ...

    def exists(self, key: str) -> bool:
        """Tell whether the object is there (one HEAD request)."""
        ...


@runtime_checkable
class LinkStore(Protocol):
    """A store that can give an object a second name, without copying it."""

    def link(self, source: str, target: str) -> bool:
        """Let `target` be what `source` is; False if that cannot be done here.

        Raises NotFound if there is no `source`, and AlreadyExists without touching what is there.
        """
        ...


@runtime_checkable
class JotStore(Protocol):
    """A store that writes faster what need not outlive a power failure."""

    def jot(self, key: str, data: bytes) -> None:
        """Write an object that nothing depends on, replacing what was there."""
        ...


class Store(ReadStore, Protocol):
    """A store that can also be changed."""

    def put(self, key: str, data: bytes) -> None:
        """Write the object, replacing what was there."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write the object, or raise AlreadyExists without touching what is there."""
        ...

    def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        """Delete up to DELETE_BATCH_MAX keys; one result per key, in the given order.

        Never raises for a single key: failures are results.
        """
        ...

    def prune_directory(self, prefix: str) -> bool:
        """Remove the directory if it exists, is real (no link) and is empty; tell if it did.

        Object stores have no directories and return False.
        """
        ...
