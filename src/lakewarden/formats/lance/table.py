"""Look at one Lance table without Spark: its versions, tags and branches, no manifest opened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lakewarden.errors import Damaged, ErrorKind, NotFound
from lakewarden.formats.lance import layout, refs
from lakewarden.model import MAIN, FileKind
from lakewarden.retention import Branch, Tag, Version
from lakewarden.storage.location import Location
from lakewarden.storage.store import ReadStore


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at a table shows, newest version first."""

    versions: tuple[Version, ...]
    tags: tuple[Tag, ...]
    branches: tuple[Branch, ...]

    def names_of(self, version: Version) -> list[str]:
        """Return the tags and branches that hold a version."""
        place = (version.branch, version.number)
        names = [f"tag {tag.name}" for tag in self.tags if (tag.branch, tag.version) == place]
        return names + [
            f"branch {branch.name} starts here"
            for branch in self.branches
            if (branch.parent, branch.parent_version) == place
        ]


def look(place: Location, store: ReadStore) -> Look:
    """List versions and refs; raise if there is no table."""
    versions = []
    for directory in ("_versions", "tree"):
        versions += list(_versions(place, store, directory))
    if not versions:
        if not any(store.list_directory(place.path)):
            raise NotFound(
                f"{place.uri} does not exist or is empty; check the path and credentials"
            )
        raise Damaged(
            ErrorKind.NOT_A_TABLE,
            f"{place.uri} holds no Lance table (no _versions/*.manifest); name the table itself",
        )
    found = [
        refs.parse_ref(path, store.get(f"{place.path}/{path}"))
        for path in _paths(place, store, "_refs")
    ]
    return Look(
        tuple(sorted(versions, key=_newest_first)),
        tuple(sorted((ref for ref in found if isinstance(ref, Tag)), key=lambda tag: tag.name)),
        tuple(sorted((ref for ref in found if isinstance(ref, Branch)), key=lambda one: one.name)),
    )


def _newest_first(version: Version) -> tuple[float, bool, int]:
    written = version.modified.timestamp() if version.modified else 0.0
    return -written, version.branch != MAIN, -version.number


def _versions(place: Location, store: ReadStore, directory: str) -> Iterator[Version]:
    prefix = f"{place.path}/" if place.path else ""
    for batch in store.list(f"{prefix}{directory}"):
        columns = (batch.column(name).to_pylist() for name in ("key", "modified"))
        for key, modified in zip(*columns, strict=True):
            entry = layout.classify(key[len(prefix) :])
            if entry.kind is FileKind.MANIFEST and entry.version is not None:
                path = key[len(prefix) :]
                yield Version(entry.version, entry.branch, modified, entry.detached, path=path)


def _paths(place: Location, store: ReadStore, directory: str) -> Iterator[str]:
    prefix = f"{place.path}/" if place.path else ""
    for batch in store.list(f"{prefix}{directory}"):
        for key in batch.column("key").to_pylist():
            yield key[len(prefix) :]
