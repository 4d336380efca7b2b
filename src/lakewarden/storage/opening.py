"""Picks the store for a location.

An `Opener` is small and picklable: it is what a Spark task gets, and connections are made where
they are used.  Connections are shared within a process; request counts are not, so that a task
reports its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

import pyarrow as pa

from lakewarden.storage.cloud import ObjectStore, open_client
from lakewarden.storage.local import LocalStore
from lakewarden.storage.location import Location
from lakewarden.storage.options import ClientSettings, client_settings
from lakewarden.storage.store import ReadStore, Store

if TYPE_CHECKING:
    from lakewarden.storage.cloud import Client

_Connection = tuple["Client", ClientSettings]
_connections: dict[tuple[int, Location, frozenset[tuple[str, str]]], _Connection] = {}
_lock = Lock()


@dataclass(frozen=True)
class Opener:
    """Opens the store a location is in, with the given storage options."""

    options: Mapping[str, str] = field(default_factory=dict)
    #: Further options below certain places: a catalog may hand out credentials table by table.
    scopes: Mapping[Location, Mapping[str, str]] = field(default_factory=dict)
    #: Places that are reached in another way: with these options, and none of the others.
    apart: Mapping[Location, Mapping[str, str]] = field(default_factory=dict)

    def __call__(self, location: Location) -> Store:
        if location.is_local:
            return LocalStore()
        scope = self.scope(location)
        options = {**self.options, **self.scopes.get(scope, {})}
        options = dict(self.apart.get(scope, options))
        client, settings = _connection(location.store, options)
        return ObjectStore(location, client, settings)

    def scope(self, location: Location) -> Location:
        """Return the place whose options hold at a location: one of the scopes, or its store."""
        while (self.scopes or self.apart) and location.path:
            if location in self.scopes or location in self.apart:
                return location
            location = location.parent
        return location.store

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}=***" for name in sorted(self.options))
        return f"Opener({shown})"


def _connection(root: Location, options: Mapping[str, str]) -> _Connection:
    # The process id: a forked worker must not use its parent's connections.
    wanted = (os.getpid(), root, frozenset(options.items()))
    with _lock:
        if wanted not in _connections:
            settings = client_settings(root.scheme, options)
            _connections[wanted] = (open_client(root, settings), settings)
        return _connections[wanted]


class ReadOnly:
    """A store that has no way to change anything."""

    def __init__(self, store: ReadStore) -> None:
        self.requests = store.requests
        self.lists_ranges = store.lists_ranges
        self._store = store

    def list(
        self, prefix: str, *, after: str | None = None, before: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        return self._store.list(prefix, after=after, before=before)

    def list_directory(self, prefix: str) -> tuple[Sequence[str], Sequence[str]]:
        return self._store.list_directory(prefix)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def exists(self, key: str) -> bool:
        return self._store.exists(key)

    def __repr__(self) -> str:
        return f"ReadOnly({self._store!r})"


def read_only(store: ReadStore) -> ReadStore:
    """Return the store without its means to change anything."""
    return ReadOnly(store)
