"""Where tables are found, and what a look at one of them shows: one class for each kind of warehouse.

Storage and catalogs are only read here, but for one thing: a look at a Lance table of a warehouse of ours
puts the manifest of its current version at the public name, if whoever committed it has not come to that.
`marker` names a table's last commit and costs one request,
`properties` one or two; `look` opens the table's metadata, and nothing of its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import make_url

from lakewarden.errors import ErrorKind, NotFound, Refused
from lakewarden.expiry import SnapshotHistory
from lakewarden.formats.iceberg.metadata import parse, unpacked
from lakewarden.formats.iceberg.target import CatalogTarget
from lakewarden.formats.lance import layout, manifest
from lakewarden.jobs.scheduling import Fragmentation
from lakewarden.jobs.tasks import EntityType
from lakewarden.jobs.warehouses import Access, FoundTable, TableEntity, WarehouseKind
from lakewarden.maintenance import fleet
from lakewarden.model import MAIN, FileKind, Format
from lakewarden.pipeline.frames import ReadStores, concurrently
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import ReadStore
from lakewarden.warehouse.warehouse import MANIFEST

if TYPE_CHECKING:
    from lakewarden.formats.iceberg.catalog import Lake
    from lakewarden.maintenance.fleet import Neighbour
    from lakewarden.warehouse.manifest import Pin, Table
    from lakewarden.warehouse.warehouse import Warehouse

#: The catalog property under which a warehouse of ours says where its log is, if not in the store.
LOG_DATABASE = "lakewarden.log-database"
#: A catalog that is not there is not made.
_NO_CHANGE = {"init_catalog_tables": "false"}
#: Levels of a directory in which Lance tables are looked for, its own included.
_DEPTH_MAX = 4
#: Iceberg's own: what a file should have, and from which share of that on it is left alone.
_TARGET_SIZE = "write.target-file-size-bytes"
_TARGET_BYTES = 512 << 20
_LARGE_ENOUGH = 0.75
#: Digits of a manifest's name where the newest comes first.
_DIGITS = 20
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_END_MS = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Look:
    """A table as it is now.  What is None is not known for its format."""

    marker: str
    properties: Mapping[str, str]
    history: SnapshotHistory | None = None
    versions: Sequence[datetime] | None = None
    fragmentation: Fragmentation | None = None

    @property
    def oldest(self) -> datetime | None:
        """Return when the oldest version was written that the table still has."""
        if self.history is not None:
            written = [one.timestamp_ms for one in self.history.snapshots]
            # Times that no calendar has tell nothing.
            fine = [at for at in written if 0 <= at < _END_MS]
            return _EPOCH + timedelta(milliseconds=min(fine)) if fine else None
        return min(self.versions or (), default=None)


class Place(Protocol):
    """Where tables are: a warehouse that is registered, or one that somebody is about to."""

    @property
    def kind(self) -> WarehouseKind: ...

    @property
    def location(self) -> str: ...


class Named(Protocol):
    """A table, known already or just found."""

    @property
    def name(self) -> tuple[str, ...]: ...

    @property
    def target(self) -> str: ...


class Source(Protocol):
    """The tables of one warehouse."""

    @property
    def opener(self) -> Opener:
        """How their storage is reached."""
        ...

    def find(self) -> list[FoundTable]:
        """Return the tables that there are, without properties; raise NotFound if nothing is there."""
        ...

    def properties(self, table: Named) -> Mapping[str, str]:
        """Return what a table itself says; raise NotFound if it is gone."""
        ...

    def marker(self, table: TableEntity) -> str:
        """Return what names the last commit; raise NotFound if the table is gone."""
        ...

    def look(self, table: TableEntity) -> Look:
        """Look at a table closely; raise NotFound if it is gone."""
        ...


def open_source(place: Place, access: Access) -> LanceDirectory | IcebergCatalog | OwnTables:
    """Return the tables of a warehouse, with what is needed to reach them."""
    options = dict(access.storage_options)
    match place.kind:
        case WarehouseKind.LANCE:
            return LanceDirectory(Location.parse(place.location), Opener(options))
        case WarehouseKind.ICEBERG:
            _refuse_missing(access.catalog_properties)
            lake = fleet.open_lake({**_NO_CHANGE, **access.catalog_properties})
            reached = lake.storage_options(place.location) | options
            return IcebergCatalog(place.location, lake, Opener(reached))
        case WarehouseKind.LAKEWARDEN:
            from lakewarden.warehouse.warehouse import Warehouse  # noqa: PLC0415  # loads PyIceberg

            opener = Opener(options)
            database = access.catalog_properties.get(LOG_DATABASE)
            found = Warehouse.open(place.location, opener=opener, database=database)
            return OwnTables(found, opener)


def _refuse_missing(properties: Mapping[str, str]) -> None:
    """Refuse a catalog in a file that is not there: SQLite would make one."""
    uri = properties.get("uri", "")
    if uri.startswith(("sqlite:", "sqlite+")):
        file = make_url(uri).database
        if file and not Path(file).exists():
            raise NotFound(f"there is no catalog at {file}; check the uri in catalog-properties")


# -- a directory of Lance tables -------------------------------------------------------------------


@dataclass(frozen=True)
class LanceDirectory:
    """Every Lance table below a directory, by its path from there."""

    location: Location
    opener: Opener
    #: Places of other warehouses, where shallow clones may be that need files of these tables.
    beside: tuple[Location, ...] = ()

    def find(self) -> list[FoundTable]:
        stores = ReadStores(self.opener)
        names, files = stores(self.location).list_directory(self.location.path)
        if not names and not files:
            raise NotFound(
                f"{self.location.uri} does not exist or is empty; check the path and the credentials"
            )
        if MANIFEST in names:
            raise Refused(
                ErrorKind.IN_WAREHOUSE,
                f"{self.location.uri} is a warehouse of ours; register it as kind lakewarden",
            )
        return [
            FoundTable(self._name(table), EntityType.GENERIC_TABLE, table.uri)
            for table in sorted(_tables_below(self.location, stores))
        ]

    def _name(self, table: Location) -> tuple[str, ...]:
        below = table.path[len(self.location.path) :].strip("/")
        return tuple(below.split("/")) if below else (table.path.rpartition("/")[2],)

    def properties(self, table: Named) -> Mapping[str, str]:
        place = Location.parse(table.target)
        store = ReadStores(self.opener)(place)
        return manifest.decode(store.get(_newest(place, store).key)).config

    def marker(self, table: TableEntity) -> str:
        place = Location.parse(table.target)
        return _newest(place, ReadStores(self.opener)(place)).marker

    def look(self, table: TableEntity) -> Look:
        place = Location.parse(table.target)
        uri = f"/{place.path}" if place.is_local else place.uri
        options = {} if place.is_local else self.opener.options
        return _look_at_lance(place, ReadStores(self.opener)(place), (uri, None, options))


def _tables_below(root: Location, stores: ReadStores) -> Iterator[Location]:
    """Go down level by level; what is inside a table is not looked at."""
    level = [root]
    for _ in range(_DEPTH_MAX):
        listed = concurrently(lambda place: stores(place).list_directory(place.path)[0], level)
        below: list[Location] = []
        for place, names in zip(level, listed, strict=True):
            if "_versions" in names:
                yield place
            else:
                below += [place.child(name) for name in names if not name.startswith(("_", "."))]
        level = below


@dataclass(frozen=True, slots=True)
class _Manifest:
    """A version of branch main, as it is listed."""

    key: str
    number: int
    modified: datetime | None

    @property
    def counts_down(self) -> bool:
        return len(self.key.rpartition("/")[2].partition(".")[0]) == _DIGITS

    @property
    def marker(self) -> str:
        """By its time, too, for a table that was made again counts anew."""
        return f"{self.number}@{'' if self.modified is None else self.modified.isoformat()}"


def _manifests(place: Location, store: ReadStore) -> Iterator[_Manifest]:
    begin = f"{place.path}/" if place.path else ""
    for batch in store.list(f"{begin}_versions"):
        columns = (batch.column(name).to_pylist() for name in ("key", "modified"))
        for key, modified in zip(*columns, strict=True):
            entry = layout.classify(key[len(begin) :])
            ours = entry.kind is FileKind.MANIFEST and entry.branch == MAIN
            if ours and entry.version is not None and not entry.detached:
                yield _Manifest(key, entry.version, modified)


def _newest(place: Location, store: ReadStore) -> _Manifest:
    best: _Manifest | None = None
    for one in _manifests(place, store):
        if best is None or one.number > best.number:
            best = one
        if one.counts_down:
            # The first is the newest: one page is enough.
            break
    if best is None:
        raise NotFound(f"{place.uri} holds no Lance table any more")
    return best


def _look_at_lance(
    place: Location, store: ReadStore, opened: tuple[str, int | None, Mapping[str, str]]
) -> Look:
    from lakewarden.formats.lance.condition import condition  # noqa: PLC0415  # loads pylance

    marker = _newest(place, store).marker
    written = [one.modified for one in _manifests(place, store) if one.modified is not None]
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
    #: Tables of other warehouses' catalogs.
    beside: tuple[Neighbour, ...] = ()

    def find(self) -> list[FoundTable]:
        try:
            found = self.lake.tables(CatalogTarget(self.name))
        except NotFound:
            # A catalog may be empty for now.
            return []
        return [FoundTable(one.parts, EntityType.TABLE, one.uri) for one in found]

    def properties(self, table: Named) -> Mapping[str, str]:
        return parse(*self._metadata(table)).properties

    def marker(self, table: TableEntity) -> str:
        return self.lake.locate(CatalogTarget.parse(table.target)).metadata_location

    def look(self, table: TableEntity) -> Look:
        return look_at_metadata(*self._metadata(table))

    def _metadata(self, table: Named) -> tuple[bytes, str]:
        pointer = self.lake.locate(CatalogTarget.parse(table.target))
        stores = ReadStores(Opener({**self.opener.options, **pointer.options}))
        return self.lake.read(pointer, stores), pointer.metadata_location


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
    head = next((one for one in raw.get("snapshots") or () if one["snapshot-id"] == current), None)
    told = (head or {}).get("summary") or {}
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
    #: Places of other warehouses, where shallow clones may be that need files of these tables.
    beside: tuple[Location, ...] = ()
    #: Iceberg tables of other warehouses: one of them may be the same as one of these.
    known_elsewhere: tuple[Neighbour, ...] = ()

    def find(self) -> list[FoundTable]:
        return [
            FoundTable(one.name, _type_of(one), one.location)
            for one in self.warehouse.read().tables()
        ]

    def properties(self, table: Named) -> Mapping[str, str]:
        view = self.warehouse.view(self.warehouse.known.manifest)
        found = view.table(table.name)
        pin = view.pins.get(found.id)
        if pin is None or found.format is not Format.ICEBERG:
            return found.properties
        place = Location.parse(pin.path)
        own = parse(self.opener(place).get(place.key), pin.path).properties
        return {**own, **found.properties}

    def marker(self, table: TableEntity) -> str:
        return _pinned_marker(*self.pinned(table))

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
        marker = _pinned_marker(found, pin)
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


def _pinned_marker(table: Table, pin: Pin) -> str:
    """By what the log says of the table, too: that changes without a new version of it."""
    named = f"{pin.version}@{pin.path}"
    if not table.properties:
        return named
    told = json.dumps(dict(table.properties), sort_keys=True).encode()
    return f"{named}#{sha256(told).hexdigest()[:16]}"


def _type_of(table: Table) -> EntityType:
    return EntityType.TABLE if table.format is Format.ICEBERG else EntityType.GENERIC_TABLE
