"""Where tables are found, and what a look at one of them shows: one class for each kind of warehouse.

Storage is only read here.  `marker` names a table's last commit and costs one request; `look` opens
the table's metadata, and nothing of its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from lakewarden.errors import NotFound
from lakewarden.expiry import SnapshotHistory
from lakewarden.formats.iceberg.metadata import parse, unpacked
from lakewarden.formats.iceberg.target import CatalogTarget
from lakewarden.formats.lance import layout
from lakewarden.jobs.scheduling import Fragmentation
from lakewarden.jobs.tasks import EntityType
from lakewarden.jobs.warehouses import Access, FoundTable, TableEntity, WarehouseInfo, WarehouseKind
from lakewarden.maintenance import fleet
from lakewarden.maintenance.fleet import Targets
from lakewarden.maintenance.places import Alone
from lakewarden.model import MAIN, FileKind, Format
from lakewarden.pipeline.frames import ReadStores
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import ReadStore

if TYPE_CHECKING:
    from lakewarden.formats.iceberg.catalog import Lake
    from lakewarden.warehouse.manifest import Pin, Table
    from lakewarden.warehouse.warehouse import Warehouse

#: The catalog property under which a warehouse of ours says where its log is, if not in the store.
LOG_DATABASE = "lakewarden.log-database"
#: Iceberg's own: what a file should have, and from which share of that on it is left alone.
_TARGET_SIZE = "write.target-file-size-bytes"
_TARGET_BYTES = 512 << 20
_LARGE_ENOUGH = 0.75
#: Digits of a manifest's name where the newest comes first.
_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Look:
    """A table as it is now.  What is None is not known for its format."""

    marker: str
    properties: Mapping[str, str]
    history: SnapshotHistory | None = None
    versions: Sequence[datetime] | None = None
    fragmentation: Fragmentation | None = None


class Source(Protocol):
    """The tables of one warehouse."""

    @property
    def opener(self) -> Opener:
        """How their storage is reached."""
        ...

    def find(self) -> list[FoundTable]:
        """Return the tables that there are; their properties are not looked at."""
        ...

    def marker(self, table: TableEntity) -> str:
        """Return what names the last commit; raise NotFound if the table is gone."""
        ...

    def look(self, table: TableEntity) -> Look:
        """Look at a table closely; raise NotFound if it is gone."""
        ...


def open_source(info: WarehouseInfo, access: Access) -> LanceDirectory | IcebergCatalog | OwnTables:
    """Return the tables of a warehouse, with what is needed to reach them."""
    options = dict(access.storage_options)
    match info.kind:
        case WarehouseKind.LANCE:
            return LanceDirectory(Location.parse(info.location), Opener(options))
        case WarehouseKind.ICEBERG:
            lake = fleet.open_lake(dict(access.catalog_properties))
            reached = lake.storage_options(info.location) | options
            return IcebergCatalog(info.location, lake, Opener(reached))
        case WarehouseKind.LAKEWARDEN:
            from lakewarden.warehouse.warehouse import Warehouse  # noqa: PLC0415  # loads PyIceberg

            opener = Opener(options)
            database = access.catalog_properties.get(LOG_DATABASE)
            found = Warehouse.open(info.location, opener=opener, database=database)
            return OwnTables(found, opener)


# -- a directory of Lance tables -------------------------------------------------------------------


@dataclass(frozen=True)
class LanceDirectory:
    """Every Lance table below a directory, by its path from there."""

    location: Location
    opener: Opener

    def find(self) -> list[FoundTable]:
        place = Alone(Targets((), (self.location,)), self.opener)
        try:
            found = place.keys()
        except NotFound:
            return []
        return [
            FoundTable(self._name(Location.parse(uri)), EntityType.GENERIC_TABLE, uri)
            for uri in found
        ]

    def _name(self, table: Location) -> tuple[str, ...]:
        below = table.path[len(self.location.path) :].strip("/")
        return tuple(below.split("/")) if below else (table.path.rpartition("/")[2],)

    def marker(self, table: TableEntity) -> str:
        place = Location.parse(table.target)
        return _newest(place, ReadStores(self.opener)(place))

    def look(self, table: TableEntity) -> Look:
        place = Location.parse(table.target)
        uri = f"/{place.path}" if place.is_local else place.uri
        options = {} if place.is_local else self.opener.options
        return _look_at_lance(place, ReadStores(self.opener)(place), (uri, None, options))


def _manifests(place: Location, store: ReadStore) -> Iterator[tuple[str, int, datetime | None]]:
    """Yield name, number and time of the versions of branch main, as they are listed."""
    begin = f"{place.path}/" if place.path else ""
    for batch in store.list(f"{begin}_versions"):
        columns = (batch.column(name).to_pylist() for name in ("key", "modified"))
        for key, modified in zip(*columns, strict=True):
            entry = layout.classify(key[len(begin) :])
            ours = entry.kind is FileKind.MANIFEST and entry.branch == MAIN
            if ours and entry.version is not None and not entry.detached:
                yield key.rpartition("/")[2], entry.version, modified


def _newest(place: Location, store: ReadStore) -> str:
    """Name the newest version: by its time, too, for a table that was made again counts anew."""
    best: tuple[int, datetime | None] | None = None
    for name, number, modified in _manifests(place, store):
        if best is None or number > best[0]:
            best = (number, modified)
        if len(name.partition(".")[0]) == _DIGITS:
            # Names count down, so the first is the newest: one page is enough.
            break
    if best is None:
        raise NotFound(f"{place.uri} holds no Lance table any more")
    return f"{best[0]}@{'' if best[1] is None else best[1].isoformat()}"


def _look_at_lance(
    place: Location, store: ReadStore, opened: tuple[str, int | None, Mapping[str, str]]
) -> Look:
    from lakewarden.formats.lance.condition import condition  # noqa: PLC0415  # loads pylance

    marker = _newest(place, store)
    written = [modified for _, _, modified in _manifests(place, store) if modified is not None]
    found = condition(*opened)
    scattered = Fragmentation(found.small_files, found.small_bytes)
    return Look(marker, found.properties, None, written, scattered)


# -- a PyIceberg catalog ---------------------------------------------------------------------------


@dataclass(frozen=True)
class IcebergCatalog:
    """Every table of a catalog."""

    name: str
    lake: Lake
    opener: Opener

    def find(self) -> list[FoundTable]:
        try:
            found = self.lake.tables(CatalogTarget(self.name))
        except NotFound:
            return []
        return [FoundTable(one.parts, EntityType.TABLE, one.uri) for one in found]

    def marker(self, table: TableEntity) -> str:
        return self.lake.locate(CatalogTarget.parse(table.target)).metadata_location

    def look(self, table: TableEntity) -> Look:
        pointer = self.lake.locate(CatalogTarget.parse(table.target))
        stores = ReadStores(Opener({**self.opener.options, **pointer.options}))
        return look_at_metadata(self.lake.read(pointer, stores), pointer.metadata_location)


def look_at_metadata(data: bytes, location: str) -> Look:
    """Return what a metadata file shows."""
    found = parse(data, location)
    raw = json.loads(unpacked(data))
    scattered = _scattered(raw, found.current_snapshot_id, found.properties)
    return Look(location, found.properties, found.history(), None, scattered)


def _scattered(
    raw: Mapping[str, Any], current: int | None, properties: Mapping[str, str]
) -> Fragmentation | None:
    """Estimate from the snapshot's own summary how scattered a table is; no manifest is opened."""
    head = next((one for one in raw.get("snapshots", ()) if one["snapshot-id"] == current), None)
    told = (head or {}).get("summary", {})
    try:
        files, size = int(told["total-data-files"]), int(told["total-files-size"])
        target = int(properties.get(_TARGET_SIZE, _TARGET_BYTES))
    except (KeyError, ValueError, TypeError):
        return None
    small = files > 0 and size / files < _LARGE_ENOUGH * target
    return Fragmentation(files, size) if small else Fragmentation(0, 0)


# -- a warehouse of ours ---------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnTables:
    """The tables that a warehouse's log names on branch main.

    The log is read once for all of them, so their markers cost nothing.
    """

    warehouse: Warehouse
    opener: Opener

    def find(self) -> list[FoundTable]:
        return [
            FoundTable(one.name, _type_of(one), one.location)
            for one in self.warehouse.read().tables()
        ]

    def marker(self, table: TableEntity) -> str:
        _, pin = self.pinned(table)
        return f"{pin.version}@{pin.path}"

    def pinned(self, table: TableEntity) -> tuple[Table, Pin]:
        """Return a table with its current version; raise NotFound if it has none."""
        view = self.warehouse.view(self.warehouse.known.manifest)
        found = view.table(table.name)
        pin = view.pins.get(found.id)
        if pin is None:
            raise NotFound(f"table {'.'.join(table.name)} has no version yet")
        return found, pin

    def look(self, table: TableEntity) -> Look:
        found, pin = self.pinned(table)
        marker = f"{pin.version}@{pin.path}"
        if found.format is Format.ICEBERG:
            place = Location.parse(pin.path)
            seen = look_at_metadata(self.opener(place).get(place.key), pin.path)
            properties = {**seen.properties, **found.properties}
            return Look(marker, properties, seen.history, None, seen.fragmentation)
        from lakewarden.warehouse.lance import tables_of, uri_of  # noqa: PLC0415  # loads pylance

        tables = tables_of(self.warehouse)
        tables.publish(found, pin)
        place = Location.parse(found.location)
        opened = (uri_of(found, pin), pin.version, tables.options() or {})
        seen = _look_at_lance(place, ReadStores(self.opener)(place), opened)
        properties = {**seen.properties, **found.properties}
        return Look(marker, properties, None, seen.versions, seen.fragmentation)


def _type_of(table: Table) -> EntityType:
    return EntityType.TABLE if table.format is Format.ICEBERG else EntityType.GENERIC_TABLE
