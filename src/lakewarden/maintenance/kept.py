"""Which versions of tables somebody may read: what a search for damage looks at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lakewarden.errors import LakewardenError
from lakewarden.formats.iceberg.paths import place
from lakewarden.formats.lance.table import look
from lakewarden.maintenance.damage import Checked, Version
from lakewarden.model import MAIN, Format
from lakewarden.retention import Version as Stored
from lakewarden.storage.location import Location
from lakewarden.storage.store import ReadStore
from lakewarden.warehouse import forks
from lakewarden.warehouse.drift import Line
from lakewarden.warehouse.manifest import Manifest, Pin, Table
from lakewarden.warehouse.warehouse import Warehouse


@dataclass(slots=True)
class _Kept:
    """A pin, and everything that brings it back."""

    pin: Pin
    refs: list[str] = field(default_factory=list)
    current: bool = False
    #: The newest version of the warehouse that has it, on main.
    version: int | None = None


class Pinned:
    """The pins that branches, tags and kept versions of a warehouse name, by table."""

    def __init__(self, warehouse: Warehouse, manifest: Manifest) -> None:
        self._warehouse = warehouse
        self._manifest = manifest
        self._kept: dict[str, dict[str, _Kept]] = {}
        #: Why older versions could not be read, if they could not.
        self.trouble: LakewardenError | None = None
        for branch in manifest.branches:
            pins = warehouse.pins_of(manifest, branch)
            for kept in self._take(pins, f"branch {branch}"):
                kept.current = True
        try:
            self._take_refs()
            self._take_history()
        except LakewardenError as error:
            self.trouble = error

    def _take(self, pins: Mapping[str, Pin], ref: str, version: int | None = None) -> list[_Kept]:
        taken = []
        for number, pin in pins.items():
            table = self._manifest.tables.get(number)
            if table is None or table.purged or (table.external and table.dropped is not None):
                # Gone, or let go: its files are somebody else's.
                continue
            kept = self._kept.setdefault(number, {}).setdefault(pin.path, _Kept(pin))
            if ref not in kept.refs:
                kept.refs.append(ref)
            kept.version = kept.version if version is None else version
            taken.append(kept)
        return taken

    def _take_refs(self) -> None:
        log, head = self._warehouse.log, self._manifest
        for name, tag in sorted(head.tags.items()):
            pins = self._warehouse.pins_of(log.at(tag.version), tag.branch)
            self._take(pins, f"tag {name}")
        for name, branch in head.branches.items():
            if branch.parent:
                pins = self._warehouse.pins_of(log.at(branch.base), branch.parent)
                self._take(pins, f"beginning of branch {name}")

    def _take_history(self) -> None:
        """Take what versions from the floor on have committed, and what there was at the floor."""
        head = self._manifest
        floors = {max(head.floor, table.floor, 1) for table in head.tables.values()}
        for floor in sorted(floors):
            then = self._warehouse.log.at(floor)
            for name in then.branches:
                mine = {
                    number: pin
                    for number, pin in self._warehouse.pins_of(then, name).items()
                    if self._floor(number) == floor and self._same(then, name)
                }
                self._take(mine, f"version {floor}", floor if name == MAIN else None)
        oldest = min(floors, default=1)
        moved = []
        for logged in self._warehouse.history():
            if logged.version < oldest:
                break
            moved.append(logged)
        for logged in reversed(moved):
            branch = logged.transaction.branch
            alive = head.branches.get(branch)
            if alive is None or alive.made > logged.version:
                continue
            pins = {
                one.table: one.after
                for one in logged.transaction.changes
                if one.after is not None and logged.version >= self._floor(one.table)
            }
            number = logged.version if branch == MAIN else None
            self._take(pins, f"version {logged.version}", number)

    def _floor(self, number: str) -> int:
        table = self._manifest.tables.get(number)
        return max(self._manifest.floor, table.floor if table is not None else 0, 1)

    def _same(self, then: Manifest, name: str) -> bool:
        now = self._manifest.branches.get(name)
        return now is not None and now.made == then.branches[name].made

    def metadata(self) -> frozenset[str]:
        """Return the metadata files of Iceberg tables that are known, as canonical URIs."""
        found = (place(path) for kept in self._kept.values() for path in kept)
        return frozenset(one.uri for one in found if one is not None)

    def checked(self, lines: Iterable[Line], uri: str) -> list[Checked]:
        """Return the tables with all versions to be looked at: heads past the warehouse, too."""
        for line in lines:
            if line.drifted and line.head is not None:
                kept = _Kept(line.head, [unpublished(line)])
                self._kept.setdefault(line.table.id, {}).setdefault(line.head.path, kept)
        return [
            self._checked(self._manifest.tables[number], kept.values(), uri)
            for number, kept in self._kept.items()
        ]

    def _checked(self, table: Table, kept: Iterable[_Kept], uri: str) -> Checked:
        key, place = ".".join(table.name), Location.parse(table.location)
        newest = sorted(kept, key=lambda one: (one.version or 0, one.pin.version), reverse=True)
        return Checked(
            key,
            table.format,
            place.uri,
            [
                replace(
                    _lance(place, one.pin) if table.format is Format.LANCE else _iceberg(one.pin),
                    refs=tuple(one.refs),
                    current=one.current,
                    # Cleanup takes expired snapshots out of the metadata that main has, and out of no other.
                    whole=f"branch {MAIN}" in one.refs,
                    back=None
                    if one.version is None
                    else f"lakewarden restore {uri} {key} --version {one.version}",
                )
                for one in newest
            ],
        )


def unpublished(line: Line) -> str:
    """Return what brings back the head of a table that was written past the warehouse."""
    assert line.head is not None
    return f"head of {line.branch}, version {line.head.version}, which is not published"


def _lance(place: Location, pin: Pin) -> Version:
    public = forks.public(pin.path)
    root = place.child(forks.directory(pin.path)) if forks.directory(pin.path) else place
    waits = place.child(pin.path).uri if pin.path != public else None
    return Version(pin.version, place.child(public).uri, root.uri, waits, pin.size)


def _iceberg(pin: Pin) -> Version:
    found = place(pin.path)
    uri = pin.path if found is None else found.uri
    return Version(pin.version, uri, uri.rpartition("/")[0])


def lance_table(place: Location, store: ReadStore) -> Checked:
    """Return a table that is in no warehouse, with all its versions."""
    seen = look(place, store)
    heads: dict[str, int] = {}
    for one in seen.versions:
        if not one.detached:
            heads[one.branch] = max(one.number, heads.get(one.branch, 0))
    ordered = sorted(seen.versions, key=lambda one: (one.branch != MAIN, one.branch, -one.number))
    return Checked(
        place.uri,
        Format.LANCE,
        place.uri,
        [_stored(place, one, heads, seen.names_of(one)) for one in ordered],
    )


def _stored(
    place: Location, one: Stored, heads: Mapping[str, int], names: Sequence[str]
) -> Version:
    is_head = not one.detached and heads.get(one.branch) == one.number
    root = place if one.branch == MAIN else place.child(f"tree/{one.branch}")
    back = f"lance.dataset({place.uri!r}, version={one.number}).restore()"
    return Version(
        one.number,
        place.child(one.path).uri,
        root.uri,
        refs=(*([f"branch {one.branch}"] if is_head else []), *names),
        current=is_head,
        back=back if one.branch == MAIN and not one.detached else None,
    )


def iceberg_table(key: str, location: str, metadata: str) -> Checked:
    """Return a table of a catalog, with the metadata that is current."""
    at, home = place(metadata), place(location)
    uri = metadata if at is None else at.uri
    version = Version(0, uri, location, refs=("branch main",), whole=True, current=True)
    return Checked(
        key,
        Format.ICEBERG,
        location if home is None else home.uri,
        [version],
        "bring the files back from a backup, or roll the table back to a snapshot that is sound",
    )
