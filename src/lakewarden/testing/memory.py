"""A store in memory, with the guarantees of a real one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from threading import Lock

import pyarrow as pa

from lakewarden.errors import AlreadyExists, NotFound
from lakewarden.storage.store import (
    LIST_PAGE_SIZE,
    OBJECT_SCHEMA,
    DeleteResult,
    Deletion,
    Request,
    Requests,
)
from lakewarden.world import Clock, SystemClock

# Inside the class `list` is the method.
DeleteResults = list[DeleteResult]


class MemoryStore:
    """Objects in a dictionary; safe to call from many threads."""

    lists_ranges = True

    def __init__(self, clock: Clock | None = None) -> None:
        self.requests = Requests()
        self._clock = clock or SystemClock()
        self._objects: dict[str, tuple[bytes, datetime]] = {}
        self._lock = Lock()

    def list(
        self, prefix: str, *, after: str | None = None, before: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        with self._lock:
            found = [
                {"key": key, "size": len(data), "modified": modified}
                for key, (data, modified) in self._objects.items()
                if key.startswith(start)
                and (after is None or key.encode() > after.encode())
                and (before is None or key.encode() < before.encode())
            ]
        found.sort(key=lambda row: str(row["key"]).encode())
        for at in range(0, max(len(found), 1), LIST_PAGE_SIZE):
            self.requests.add(Request.LIST)
            page = found[at : at + LIST_PAGE_SIZE]
            if page:
                yield pa.RecordBatch.from_pylist(page, schema=OBJECT_SCHEMA)

    def list_directory(self, prefix: str) -> tuple[Sequence[str], Sequence[str]]:
        self.requests.add(Request.LIST)
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        with self._lock:
            below = [key[len(start) :] for key in self._objects if key.startswith(start)]
        directories = {name.partition("/")[0] for name in below if "/" in name}
        return sorted(directories), sorted(name for name in below if "/" not in name)

    def get(self, key: str) -> bytes:
        self.requests.add(Request.GET)
        try:
            return self._objects[key][0]
        except KeyError:
            raise NotFound(f"memory:///{key} does not exist") from None

    def exists(self, key: str) -> bool:
        self.requests.add(Request.HEAD)
        return key in self._objects

    def put(self, key: str, data: bytes) -> None:
        self.requests.add(Request.PUT)
        with self._lock:
            self._objects[key] = data, self._clock.now()

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.requests.add(Request.PUT)
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(f"memory:///{key} already exists and was left as it is")
            self._objects[key] = data, self._clock.now()

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        self.requests.add(Request.DELETE)
        with self._lock:
            return [
                DeleteResult(
                    key, Deletion.DELETED if self._objects.pop(key, None) else Deletion.MISSING
                )
                for key in keys
            ]

    def prune_directory(self, prefix: str) -> bool:  # noqa: ARG002
        return False
