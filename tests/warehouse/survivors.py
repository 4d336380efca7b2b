"""What must be there after a cleanup of a warehouse, read with pylance and PyIceberg alone.

Of the warehouse only the log is asked, before the cleanup: which table was at which pin.  What the
pins hold is read by path, and compared with what the same paths hold later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import lance
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import StaticTable
from pyiceberg.table.snapshots import Snapshot

from lakewarden.errors import ErrorKind, NotFound
from lakewarden.model import Format
from lakewarden.warehouse.manifest import Manifest, Pin, Table
from lakewarden.warehouse.warehouse import View, Warehouse

#: A version, a branch and a table's id.
Key = tuple[int, str, str]
Rows = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Survivors:
    """What was there before: all that must read the same, and what must be gone."""

    #: Where each of them is, and what it held.
    pins: dict[Key, tuple[Table, Pin]]
    rows: dict[Key, Rows]
    #: Tags, by name; what they held is among the above.
    tags: dict[str, tuple[int, str]]
    #: Versions below the floor that no ref holds.
    gone: list[int] = field(default_factory=list)

    def check(self, warehouse: Warehouse, *, finished: bool = True) -> None:
        """See that all of it reads the same, by path and through the log.

        After a run that has finished, the rest is told gone.
        """
        read: dict[tuple[str, str], Rows] = {}
        views: dict[tuple[int, str], View] = {}
        for (version, branch, number), (table, pin) in self.pins.items():
            key, place = (version, branch), (table.location, pin.path)
            if place not in read:
                read[place] = rows_of(table, pin)
            assert read[place] == self.rows[*key, number], (key, table.name)
            if key not in views:
                views[key] = warehouse.read(version=version, branch=branch)
            assert views[key].pins[number] == pin
            assert views[key].table(table.name).id == number
        for name, (version, branch) in self.tags.items():
            view = warehouse.read(tag=name)
            assert (view.version, view.branch) == (version, branch)
        for version in self.gone if finished else ():
            with pytest.raises(NotFound) as raised:
                warehouse.read(version=version)
            assert raised.value.kind is ErrorKind.RECLAIMED, version

    def files(self, number: str) -> set[Path]:
        """Return every file that what survives of one table needs."""
        return {
            path
            for (_, _, own), (table, pin) in self.pins.items()
            if own == number
            for path in files_of(table, pin)
        }


def survivors(warehouse: Warehouse, floor: int, floors: dict[str, int] | None = None) -> Survivors:
    """Read all that a cleanup up to `floor` must leave: later versions, tags and branches.

    `floors` are those of single tables, by id.
    """
    head = warehouse.refresh().manifest
    views = {(version, branch) for version, branch in _views(warehouse, head, floor)}
    held = {(tag.version, tag.branch) for tag in head.tags.values()}
    bases = {(one.base, one.parent) for one in head.branches.values() if one.parent}
    pins: dict[Key, tuple[Table, Pin]] = {}
    for version, branch in sorted(views | held | bases):
        view = warehouse.read(version=version, branch=branch)
        for number, pin in view.pins.items():
            own = (floors or {}).get(number, 0)
            if version >= own or (version, branch) in held | bases:
                pins[version, branch, number] = (view.manifest.tables[number], pin)
    seen: dict[tuple[str, str], Rows] = {}
    rows: dict[Key, Rows] = {}
    for key, (table, pin) in pins.items():
        place = table.location, pin.path
        rows[key] = seen[place] = seen[place] if place in seen else rows_of(table, pin)
    kept = {version for version, _ in held | bases}
    tags = {name: (tag.version, tag.branch) for name, tag in head.tags.items()}
    return Survivors(pins, rows, tags, [one for one in range(1, floor) if one not in kept])


def _views(warehouse: Warehouse, head: Manifest, floor: int) -> Iterator[tuple[int, str]]:
    for version in range(floor, head.version + 1):
        then = warehouse.log.at(version).branches
        for name, branch in head.branches.items():
            if name in then and then[name].made == branch.made:
                yield version, name


# -- tables ----------------------------------------------------------------------------------------


def rows_of(table: Table, pin: Pin) -> Rows:
    """Read one version of a table by its path."""
    if table.format is Format.LANCE:
        found = lance.dataset(place_of(table, pin), version=pin.version).to_table()
    else:
        found = StaticTable.from_metadata(pin.path).scan().to_arrow()
    return tuple(sorted(tuple(row.values()) for row in found.to_pylist()))


def place_of(table: Table, pin: Pin) -> str:
    """Return where Lance finds a version: in the table, or in a branch of it."""
    parts = pin.path.split("/")
    return f"{table.location}/tree/{parts[1]}" if parts[0] == "tree" else table.location


def files_of(table: Table, pin: Pin) -> Iterator[Path]:
    """Yield the files that one version of a table needs."""
    yield from _lance_files(table, pin) if table.format is Format.LANCE else _iceberg_files(pin)


def _lance_files(table: Table, pin: Pin) -> Iterator[Path]:
    root = Path(path_of(table.location))
    found = lance.dataset(table.location, version=pin.version)
    for fragment in found.get_fragments():
        for one in fragment.metadata.files:
            # A file of a base path is one of another table.
            if one.base_id is None:
                yield root / "data" / one.path
        deleted = fragment.deletion_file()
        if deleted is not None:
            yield root / deleted
    for index in found.describe_indices():
        for segment in index.segments:
            yield from (root / "_indices" / segment.uuid).iterdir()


def _iceberg_files(pin: Pin) -> Iterator[Path]:
    metadata = StaticTable.from_metadata(pin.path).metadata
    named = {ref.snapshot_id for ref in metadata.refs.values()}
    yield path_of(pin.path)
    yield from _snapshot_files(one for one in metadata.snapshots if one.snapshot_id in named)


def _snapshot_files(snapshots: Iterable[Snapshot]) -> Iterator[Path]:
    for snapshot in snapshots:
        yield path_of(snapshot.manifest_list)
        io = PyArrowFileIO()
        for manifest in snapshot.manifests(io):
            yield path_of(manifest.manifest_path)
            for entry in manifest.fetch_manifest_entry(io):
                yield path_of(entry.data_file.file_path)


def path_of(uri: str) -> Path:
    parsed = urlparse(uri)
    return Path(unquote(parsed.path)) if parsed.scheme else Path(uri)


def content(place: str | Path) -> set[Path]:
    """Return the files of a table that hold rows, deletions, indices and lists of those."""
    root = path_of(str(place))
    return {
        path
        for path in root.rglob("*")
        if path.is_file()
        and path.relative_to(root).parts[0] in ("data", "_deletions", "_indices", "metadata")
        and not path.name.endswith(".json")
    }


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def missing(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if not path.exists()]


def age(root: Path, days: int) -> None:
    """Make files old: those that nothing names are not taken for a writer's any more."""
    for path in root.rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - days * 86400
            os.utime(path, (then, then))
