"""What tables of other warehouses need of the tables of one, as far as this service knows them.

A shallow clone takes files from a Lance table wherever that lies, and an Iceberg table may be in two
catalogs; neither table shows it.  So whoever deletes reads the other warehouses, too: places of Lance
tables as if they were part of the directory, catalogs for where their tables lie.  What cannot be
looked at may need anything, and nothing goes until it can.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound, Refused, StorageError
from lakewarden.formats.iceberg.metadata import parse
from lakewarden.formats.iceberg.target import CatalogTarget
from lakewarden.jobs.discovery import TOGETHER
from lakewarden.jobs.sources import IcebergCatalog, LanceDirectory, OwnTables, Source, open_source
from lakewarden.jobs.warehouses import Access, FoundTable, WarehouseInfo, WarehouseKind, Warehouses
from lakewarden.maintenance.fleet import Neighbour
from lakewarden.model import Format
from lakewarden.pipeline.frames import ReadStores, concurrently
from lakewarden.pipeline.metadata import Summary, where
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener

#: As all but catalogs in directories call them.
_OWN_NAME = re.compile(r"-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.(?:gz\.)?metadata\.json")
_REMEMBERED_MAX = 100_000


class Memory:
    """What metadata files say: one whose name holds an id of its own is never written again.

    So a look at a catalog in which nothing has changed costs a question for each table, and no file.
    """

    def __init__(self) -> None:
        self._known: dict[str, Summary] = {}

    def get(self, location: str) -> Summary | None:
        return self._known.get(location)

    def keep(self, location: str, summary: Summary) -> None:
        if _OWN_NAME.search(location):
            if len(self._known) >= _REMEMBERED_MAX:
                self._known.clear()
            self._known[location] = summary


@dataclass(frozen=True)
class Neighbourhood:
    """The other warehouses, with how to reach them."""

    warehouses: Warehouses
    own: WarehouseInfo
    access: Access
    others: Mapping[WarehouseInfo, Access]
    memory: Memory

    @classmethod
    def of(
        cls, warehouses: Warehouses, own: WarehouseInfo, access: Access, memory: Memory
    ) -> Neighbourhood:
        infos = [info for info in warehouses.all(own.project_id) if info.id != own.id]
        others = {one: warehouses.access(one.id) for one in infos}
        return cls(warehouses, own, access, others, memory)

    def hide(self, text: str) -> str:
        """Take out of a text what was given for reaching any of them."""
        every = [self.access, *self.others.values()]
        return reduce(lambda rest, access: access.hide(rest), every, text)

    def seen_by(self, source: Source) -> Source:
        """Return the tables of a warehouse with what others may need of them."""
        if isinstance(source, LanceDirectory):
            opener, beside = self._around(source.opener, source.location)
            return replace(source, opener=opener, beside=beside)
        if isinstance(source, IcebergCatalog):
            return replace(source, beside=tuple(self._beside()))
        if isinstance(source, OwnTables):
            opener, beside = self._around(source.opener, source.warehouse.location)
            known = tuple(self._beside())
            return replace(source, opener=opener, beside=beside, known_elsewhere=known)
        return source

    def _around(self, opener: Opener, home: Location) -> tuple[Opener, tuple[Location, ...]]:
        """Return where Lance tables are that are not at home, and how they are reached."""
        apart: dict[Location, Mapping[str, str]] = {}
        for info, access in self.others.items():
            if info.kind is WarehouseKind.ICEBERG:
                continue
            with _speaking_of(info, access):
                places = list(self._places(info, access))
            # What lies in another place is found there.
            apart |= {
                one: access.storage_options for one in places if not _is_in(one, (home, *apart))
            }
        return replace(opener, apart=apart), tuple(apart)

    def _places(self, info: WarehouseInfo, access: Access) -> Iterator[Location]:
        stores = ReadStores(Opener(dict(access.storage_options)))
        root = Location.parse(info.location)
        if not _is_there(root, stores) and self.warehouses.tables(info.id):
            raise _away(root)
        yield root
        if info.kind is not WarehouseKind.LAKEWARDEN:
            return
        source = open_source(info, access)
        assert isinstance(source, OwnTables)
        # Also tables of other branches, and dropped ones, which may be brought back.
        for table in source.warehouse.known.manifest.tables.values():
            place = Location.parse(table.location)
            if table.format is not Format.LANCE or table.purged or root.contains(place):
                continue
            if _is_there(place, stores):
                yield place
            elif table.dropped is None:
                raise _away(place)

    def _beside(self) -> Iterator[Neighbour]:
        for info, access in self.others.items():
            if info.kind is WarehouseKind.ICEBERG and not self._is_same(info, access):
                with _speaking_of(info, access):
                    found = _tables_of(info, access, self.memory)
                    if not found and self.warehouses.tables(info.id):
                        raise StorageError(
                            ErrorKind.STORAGE, "the catalog shows no table, where tables were"
                        )
                yield from found

    def _is_same(self, info: WarehouseInfo, access: Access) -> bool:
        """Tell whether a catalog is registered twice: its tables have one pointer each all the same."""
        given = access.catalog_properties == self.access.catalog_properties
        return given and info.location == self.own.location


def _is_there(place: Location, stores: ReadStores) -> bool:
    return any(stores(place).list_directory(place.path))


def _is_in(place: Location, others: Collection[Location]) -> bool:
    return any(other == place or other.contains(place) for other in others)


def _away(place: Location) -> StorageError:
    return StorageError(ErrorKind.STORAGE, f"nothing is at {place.uri}, where tables were")


def _tables_of(info: WarehouseInfo, access: Access, memory: Memory) -> list[Neighbour]:
    source = open_source(info, access)
    assert isinstance(source, IcebergCatalog)
    looked = concurrently(partial(_look, info, source, memory), source.find(), TOGETHER)
    return [one for one in looked if one is not None]


def _look(
    info: WarehouseInfo, source: IcebergCatalog, memory: Memory, table: FoundTable
) -> Neighbour | None:
    try:
        pointer = source.lake.locate(CatalogTarget.parse(table.target))
    except NotFound:
        return None
    # By the warehouse's name: two may call their catalogs the same.
    named = CatalogTarget(info.name, table.name)
    known = memory.get(pointer.metadata_location)
    if known is not None:
        return Neighbour(named, pointer, known)
    stores = ReadStores(Opener({**source.opener.options, **pointer.options}))
    try:
        metadata = parse(source.lake.read(pointer, stores), pointer.metadata_location)
    except (Damaged, NotFound, Refused):
        return Neighbour(named, pointer)
    found = where(metadata)
    memory.keep(pointer.metadata_location, found)
    return Neighbour(named, pointer, found)


@contextmanager
def _speaking_of(info: WarehouseInfo, access: Access) -> Iterator[None]:
    try:
        yield
    except LakewardenError as error:
        raise StorageError(
            ErrorKind.STORAGE,
            f"warehouse {info.name!r} cannot be looked at, and its tables may need files of this one "
            f"({access.hide(error.message)}); nothing goes: mend that, or delete that warehouse",
        ) from None
