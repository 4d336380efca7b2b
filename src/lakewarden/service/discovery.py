"""Which tables a warehouse has, found by looking.  Storage and catalogs are read, nothing is written.

What looking costs: of a warehouse of ours, its log and a request for each Iceberg table; of a catalog,
its lists and one or two requests for each table; of a directory of Lance tables, a listing for each
directory and two requests for each table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound, Refused, UsageError
from lakewarden.formats.iceberg.metadata import parse
from lakewarden.formats.iceberg.target import CatalogTarget
from lakewarden.formats.lance import layout, manifest
from lakewarden.jobs.tasks import EntityType
from lakewarden.jobs.warehouses import Access, FoundTable, WarehouseKind
from lakewarden.maintenance.fleet import open_lake
from lakewarden.model import MAIN, FileKind, Format
from lakewarden.pipeline.frames import ReadStores, concurrently
from lakewarden.service.failures import not_reachable
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.warehouse.manifest import Table
from lakewarden.warehouse.warehouse import MANIFEST, View, Warehouse

#: The property that says where the log of a warehouse of ours is, if not in its store.
LOG_DATABASE = "lakewarden.log-database"
_CATALOG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
#: They name Python classes to be loaded: whoever sets them runs code in this process.
_LOADS_CODE = re.compile(r"(?i)py-|.*[-.]impl$|auth\.")
_NO_CHANGE = {"init_catalog_tables": "false"}
_DEPTH_MAX = 4
_TABLES_MAX = 100_000
#: Shorter ones stand in too many words that are no secrets.
_SECRET_LENGTH_MIN = 4


def check_place(kind: WarehouseKind, location: str, access: Access) -> str:
    """Return a warehouse's location in the only spelling that it has here, or refuse it."""
    dangerous = sorted(name for name in access.catalog_properties if _LOADS_CODE.match(name))
    if dangerous:
        raise UsageError(
            ErrorKind.USAGE,
            f"{', '.join(dangerous)[:200]} may not be set here, for it names code to be loaded; put it "
            "into the PyIceberg configuration of the service",
        )
    if kind is WarehouseKind.ICEBERG:
        if not _CATALOG.fullmatch(location):
            raise UsageError(
                ErrorKind.USAGE,
                "the location of an iceberg warehouse is the name of a catalog: letters, digits, - and _",
            )
        return location
    if "://" not in location and not location.startswith("/"):
        raise UsageError(
            ErrorKind.USAGE, "the location is relative, and nobody knows to what; write it in full"
        )
    return Location.parse(location).uri


def discover(kind: WarehouseKind, location: str, access: Access) -> list[FoundTable]:
    """Return the tables that a warehouse has now, or raise WarehouseNotReadable."""
    try:
        found = list(_LOOKS[kind](location, access))
    except LakewardenError as error:
        error.message = _without(error.message, access)
        raise not_reachable(error) from None
    except Exception as error:  # noqa: BLE001  # a defect, but its words may hold what was given
        said = _without(" ".join(f"{type(error).__name__}: {error}".split()), access)
        raise LakewardenError(ErrorKind.CATALOG, f"looking for tables failed: {said}") from None
    if len(found) > _TABLES_MAX:
        raise not_reachable(
            Refused(ErrorKind.USAGE, f"{len(found)} tables are too many for one warehouse")
        )
    return found


def _without(text: str, access: Access) -> str:
    """Take everything out of a text that was given for reaching the warehouse."""
    values = {*access.storage_options.values(), *access.catalog_properties.values()}
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SECRET_LENGTH_MIN:
            text = text.replace(value, "…")
    return text


# -- a warehouse of ours -------------------------------------------------------------------------


def _of_warehouse(location: str, access: Access) -> Iterator[FoundTable]:
    opening = Opener(dict(access.storage_options))
    database = access.catalog_properties.get(LOG_DATABASE)
    view = Warehouse.open(location, opener=opening, database=database).read()
    tables = view.tables()
    properties = concurrently(partial(_pinned, view, ReadStores(opening)), tables)
    for table, own in zip(tables, properties, strict=True):
        kind = EntityType.TABLE if table.format is Format.ICEBERG else EntityType.GENERIC_TABLE
        yield FoundTable(table.name, kind, table.location, {**own, **table.properties})


def _pinned(view: View, stores: ReadStores, table: Table) -> Mapping[str, str]:
    """Return what an Iceberg table's own metadata says."""
    pin = view.pins.get(table.id)
    if pin is None or table.format is not Format.ICEBERG:
        return {}
    place = Location.parse(pin.path)
    return parse(stores(place).get(place.key), pin.path).properties


# -- a PyIceberg catalog -------------------------------------------------------------------------


def _of_catalog(location: str, access: Access) -> Iterator[FoundTable]:
    lake = open_lake({**_NO_CHANGE, **access.catalog_properties})
    options = {**lake.storage_options(location), **access.storage_options}

    def properties(table: CatalogTarget) -> Mapping[str, str]:
        pointer = lake.locate(table)
        stores = ReadStores(Opener({**options, **pointer.options}))
        return parse(lake.read(pointer, stores), pointer.metadata_location).properties

    try:
        tables = lake.tables(CatalogTarget(location))
    except NotFound:
        # A catalog may be empty for now.
        tables = []
    for table, own in zip(tables, concurrently(properties, tables), strict=True):
        yield FoundTable(table.parts, EntityType.TABLE, table.uri, own)


# -- a directory of Lance tables -----------------------------------------------------------------


def _of_directory(location: str, access: Access) -> Iterator[FoundTable]:
    root = Location.parse(location)
    stores = ReadStores(Opener(dict(access.storage_options)))
    store = stores(root)
    names, files = store.list_directory(root.path)
    if not names and not files:
        raise NotFound(f"{root.uri} does not exist or is empty; check the path and the credentials")
    if MANIFEST in names:
        raise Refused(
            ErrorKind.IN_WAREHOUSE,
            f"{root.uri} is a warehouse of ours; register it as kind lakewarden",
        )
    for table in sorted(_tables_below(root, stores)):
        name = root.relative(table) or table.path.rpartition("/")[2]
        yield FoundTable(
            tuple(name.split("/")), EntityType.GENERIC_TABLE, table.uri, _config(table, stores)
        )


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


def _config(table: Location, stores: ReadStores) -> Mapping[str, str]:
    """Return what the newest version of a Lance table on main says."""
    store, prefix = stores(table), f"{table.path}/"
    newest: tuple[int, str] | None = None
    for batch in store.list(f"{prefix}_versions"):
        for key in batch.column("key").to_pylist():
            entry = layout.classify(key[len(prefix) :])
            real = entry.kind is FileKind.MANIFEST and not entry.detached and entry.branch == MAIN
            if real and entry.version is not None:
                newest = max(newest or (0, ""), (entry.version, key))
    if newest is None:
        return {}
    try:
        return manifest.decode(store.get(newest[1])).config
    except (Damaged, NotFound):
        # Damage is told when something is done to the table; a writer may just have cleaned it.
        return {}


_LOOKS = {
    WarehouseKind.LAKEWARDEN: _of_warehouse,
    WarehouseKind.ICEBERG: _of_catalog,
    WarehouseKind.LANCE: _of_directory,
}
