"""Which tables a warehouse has, and which of them have changed since somebody looked.

Tables of others tell nobody when they change.  The detector asks for every table what names its last
commit, one request each, and looks closer only at those that differ from what was seen last; what it
finds is told like a commit (`commits`).  A warehouse of ours is watched the same way, through its log:
one look for all its tables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from lakewarden.errors import LakewardenError
from lakewarden.jobs.commits import Change, Commits, Outcome
from lakewarden.jobs.sources import Source, open_source
from lakewarden.jobs.tasks import Scope
from lakewarden.jobs.warehouses import FoundTable, TableEntity, WarehouseInfo, Warehouses
from lakewarden.pipeline.frames import concurrently

_LOG = logging.getLogger("lakewarden.jobs")
#: Catalogs and stores are asked about so many tables at the same time.
TOGETHER = 16
#: Tables that are looked at, and written down, together.
_CHUNK = 200

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Discovery:
    """Finds tables, and changes of tables, of the warehouses of one database."""

    warehouses: Warehouses
    commits: Commits

    def refresh(self, warehouse_id: UUID) -> list[TableEntity]:
        """Make known what tables a warehouse has now, and return them."""
        return self._refresh(warehouse_id, self._source(self.warehouses.get(warehouse_id)))

    def detect(self, warehouse_id: UUID) -> list[Outcome]:
        """Find tables that are new or gone, and those with new commits; queue what is worthwhile."""
        info = self.warehouses.get(warehouse_id)
        source = self._source(info)
        tables = {one.id: one for one in self._refresh(warehouse_id, source)}
        scope = Scope(info.project_id, info.id)
        markers = _answers(source.marker, tables.values())
        outcomes: list[Outcome] = []
        unseen = self.commits.unseen(scope, markers)
        for first in range(0, len(unseen), _CHUNK):
            chosen = [tables[number] for number in unseen[first : first + _CHUNK]]
            looks = _answers(source.look, chosen)
            now = self.commits.queue.database.clock.now()
            changes = [
                Change(
                    number,
                    look.marker,
                    now,
                    look.properties,
                    look.history,
                    look.versions,
                    look.fragmentation,
                )
                for number, look in looks.items()
            ]
            outcomes += self.commits.record(scope, changes)
        return outcomes

    def detect_all(self) -> None:
        """Do the same for every warehouse; one that cannot be read is logged, and tried again."""
        for info in self.warehouses.all():
            try:
                self.detect(info.id)
            except LakewardenError as error:
                _LOG.warning("warehouse %s could not be looked at: %s", info.name, error.message)

    def _source(self, info: WarehouseInfo) -> Source:
        return open_source(info, self.warehouses.access(info.id))

    def _refresh(self, warehouse_id: UUID, source: Source) -> list[TableEntity]:
        found = source.find()
        # A listing does not show properties; what was seen of them before still counts.
        known = {one.name: one.properties for one in self.warehouses.tables(warehouse_id)}
        with_properties = [
            FoundTable(one.name, one.type, one.target, known.get(one.name, one.properties))
            for one in found
        ]
        return self.warehouses.refresh(warehouse_id, with_properties)


def _answers(
    ask: Callable[[TableEntity], Answer], tables: Iterable[TableEntity]
) -> Mapping[UUID, Answer]:
    """Ask about tables at the same time; what goes wrong with one is logged, the others go on."""

    def answer(table: TableEntity) -> tuple[UUID, Answer | LakewardenError]:
        try:
            return table.id, ask(table)
        except LakewardenError as error:
            return table.id, error

    found: dict[UUID, Answer] = {}
    listed: Sequence[TableEntity] = list(tables)
    for number, told in concurrently(answer, listed, TOGETHER):
        if isinstance(told, LakewardenError):
            _LOG.warning("table %s could not be looked at: %s", number, told.message)
        else:
            found[number] = told
    return found
