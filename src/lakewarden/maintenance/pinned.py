"""The Iceberg tables of a warehouse as the pipeline asks for them: by id, at the pins of the log."""

from __future__ import annotations

from threading import Lock

from lakewarden.errors import Conflict, ErrorKind, LakewardenError, NotFound
from lakewarden.formats.iceberg.catalog import Commit, Committed, Lake, Opening, Pointer
from lakewarden.formats.iceberg.metadata import Removal
from lakewarden.formats.iceberg.target import CatalogTarget
from lakewarden.warehouse import iceberg
from lakewarden.warehouse.manifest import Change, Manifest, Operation, Table
from lakewarden.warehouse.reclaiming import Reclaim
from lakewarden.warehouse.warehouse import Warehouse

_CATALOG = "warehouse"


def target_of(number: str) -> CatalogTarget:
    """Return what the pipeline calls a table; ids stay when names change."""
    return CatalogTarget(_CATALOG, (number,))


class WarehouseTables(Lake):
    """The Iceberg tables of a warehouse by their ids, as the pipeline asks for them."""

    #: Seconds after which the log is looked at again.
    _FRESH = 1.0

    def __init__(self, warehouse: Warehouse, reclaim: Reclaim) -> None:
        super().__init__()
        self._warehouse = warehouse
        self._reclaim = reclaim
        self._lock = Lock()
        self._manifest = reclaim.base.manifest
        self._seen = reclaim.base.seen

    def tables(self, target: CatalogTarget) -> list[CatalogTarget]:
        return [target] if target.parts else [target_of(one) for one in self._reclaim.iceberg]

    def locate(self, table: CatalogTarget) -> Pointer:
        number = table.parts[-1]
        branch, seen = self._reclaim.pointers[number]
        if number in self._reclaim.unchanged or self._reclaim.iceberg[number].purged:
            return Pointer(table, seen.path)
        found = self._fresh().branches[branch].pins.get(number)
        if found is None:
            raise NotFound(f"{'.'.join(self._reclaim.table(number).name)} was dropped meanwhile")
        return Pointer(table, found.path)

    def _fresh(self) -> Manifest:
        with self._lock:
            now = self._warehouse.log.clock.elapsed()
            if now - self._seen > self._FRESH:
                self._manifest, self._seen = self._warehouse.refresh().manifest, now
            return self._manifest

    def committing(self, pointer: Pointer, opening: Opening) -> Commit:  # noqa: ARG002
        number = pointer.table.parts[-1]
        branch, _ = self._reclaim.pointers[number]
        table = self._reclaim.table(number)
        # Whatever becomes of it, what is known of the log is outdated then.
        self._seen = float("-inf")
        return _Expiry(self._warehouse, table, branch, pointer, self._lock)


class PinnedTables(WarehouseTables):
    """The same tables as a plan sees them."""

    def locate(self, table: CatalogTarget) -> Pointer:
        _, seen = self._reclaim.pointers[table.parts[-1]]
        return Pointer(table, seen.path)


class _Expiry(Commit):
    """Takes snapshots out of the metadata of one table of a warehouse."""

    def __init__(
        self, warehouse: Warehouse, table: Table, branch: str, pointer: Pointer, lock: Lock
    ) -> None:
        self._warehouse = warehouse
        self._table = table
        self._branch = branch
        self._pointer = pointer
        self._lock = lock

    def remove(self, removal: Removal, *, now_ms: int) -> Committed:  # noqa: ARG002
        # One after the other: they all make versions of one log.
        with self._lock:
            head = self._warehouse.refresh()
            found = head.manifest.branches[self._branch].pins.get(self._table.id)
            name = ".".join(self._table.name)
            if found is None or found.path != self._pointer.metadata_location:
                raise Conflict(ErrorKind.CONFLICT, f"{name} changed meanwhile")
            tables = iceberg.tables_of(self._warehouse)
            after = tables.without(self._table, found, removal)
            change = Change(Operation.EXPIRE, self._table.id, found, after)
            try:
                self._warehouse.commit(
                    [change],
                    base=head,
                    branch=self._branch,
                    message=f"expire snapshots of {name}",
                    rebase=iceberg.stale,
                )
            except LakewardenError as error:
                if error.kind is not ErrorKind.COMMIT_UNKNOWN:
                    tables.discard(self._table, after)
                raise
        return Committed(after.path, [], [], {}, writes_metadata=False)
