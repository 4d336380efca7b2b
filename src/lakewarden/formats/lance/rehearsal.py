"""Lets Lance change a table without anybody seeing it, and tells what it would have committed.

A worker may do work that Lance ends with a commit, such as bringing indices up to date; when, and
whether, it becomes a version is for the driver to decide.  So the worker opens the table through a
namespace that takes every version and keeps it to itself: the files are there, the transaction is
told, and the manifest that was staged goes again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import lance
import lance_namespace as api
from lance_namespace import LanceNamespace

from lakewarden.errors import NotFound
from lakewarden.formats.lance import layout
from lakewarden.formats.lance.manifest import transaction_file
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener

_TABLE = ["table"]


@dataclass(frozen=True)
class Version:
    """One version of a Lance table, for anybody who wants to open it; picklable."""

    uri: str
    number: int
    options: dict[str, str] = field(default_factory=dict)
    #: Where its manifest is, below the table, if not under its public name.
    path: str | None = None

    @property
    def location(self) -> Location:
        return Location.parse(self.uri)

    def open(self) -> Any:
        """Open it for reading, if it is public."""
        return lance.dataset(self.uri, version=self.number, storage_options=self.options or None)

    def manifest(self) -> str:
        """Return the key of its manifest."""
        if self.path is not None:
            return self.location.child(self.path).key
        store = Opener(self.options)(self.location)
        keys = [
            self.location.child("_versions").child(name).key
            for name in layout.manifest_names(self.number)
        ]
        found = next((key for key in keys if store.exists(key)), None)
        if found is None:
            raise NotFound(f"version {self.number} of {self.uri} is not there any more")
        return found


class Rehearsal(LanceNamespace):
    """A namespace with one table, whose new versions nobody else ever sees."""

    def __init__(self, version: Version) -> None:
        self._version = version
        #: Number and key of the manifest of each version, the newest last.
        self._known = [(version.number, version.manifest())]

    def namespace_id(self) -> str:
        return f"rehearsal of {self._version.uri}"

    def open(self) -> Any:
        """Open the table; commits of this handle come here."""
        return lance.dataset(
            namespace_client=self,
            table_id=_TABLE,
            storage_options=self._version.options or None,
        )

    @property
    def made(self) -> bool:
        """Tell whether a version was made."""
        return len(self._known) > 1

    def forget(self) -> None:
        """Take away the manifests that were staged, and their transactions; other files stay."""
        location = self._version.location
        store = Opener(self._version.options)(location)
        for _, key in self._known[1:]:
            with suppress(NotFound):
                named = transaction_file(store.get(key))
                store.delete([location.child("_transactions").child(named).key] if named else [])
            store.delete([key])
        del self._known[1:]

    # -- what Lance asks --------------------------------------------------------------------------

    def describe_table(self, request: Any) -> Any:  # noqa: ARG002  # there is one table
        return api.DescribeTableResponse(
            location=self._version.uri,
            version=self._known[-1][0],
            managed_versioning=True,
            storage_options=self._version.options or None,
        )

    def list_table_versions(self, request: Any) -> Any:  # noqa: ARG002
        return api.ListTableVersionsResponse(versions=[_told(*self._known[-1])])

    def describe_table_version(self, request: Any) -> Any:
        asked = request["version"] if isinstance(request, dict) else request.version
        found = next((one for one in self._known if one[0] == asked), self._known[-1])
        return api.DescribeTableVersionResponse(version=_told(*found))

    def create_table_version(self, request: Any) -> Any:
        told = request if isinstance(request, dict) else request.to_dict()
        self._known.append((told["version"], told["manifest_path"]))
        return api.CreateTableVersionResponse(version=_told(*self._known[-1]))


def _told(number: int, key: str) -> Any:
    return api.TableVersion(version=number, manifest_path=key)
