"""Where the versions go that Lance clients ask for: into the log at once, or with a transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lakewarden.errors import Conflict, ErrorKind, Refused
from lakewarden.model import OURS, Format
from lakewarden.warehouse import forks
from lakewarden.warehouse.lance_tables import LanceTables, whole
from lakewarden.warehouse.manifest import MAIN, Change, Manifest, Name, Operation, Pin, Table
from lakewarden.warehouse.warehouse import View, Warehouse
from lakewarden.world import fresh_id

#: Lance's names for what changes do, in ours.
_OPERATIONS = {
    "append": Operation.APPEND,
    "delete": Operation.DELETE,
    "overwrite": Operation.OVERWRITE,
    "create_index": Operation.INDEX,
    "rewrite": Operation.REWRITE,
    "reserve_fragments": Operation.REWRITE,
    "merge": Operation.MERGE,
    "restore": Operation.RESTORE,
    "update": Operation.UPDATE,
    "data_replacement": Operation.UPDATE,
    "project": Operation.SCHEMA,
    "update_config": Operation.SCHEMA,
    "update_bases": Operation.SCHEMA,
    "clone": Operation.RESTORE,
}


class Session(Protocol):
    """Where versions go that clients ask for."""

    def view(self, *, fresh: bool = False) -> View:
        """Return what the clients see."""
        ...

    def declare(self, name: Name, location: str | None) -> Table:
        """Make a table without a version."""
        ...

    def take(self, table: Table, before: Pin | None, after: Pin) -> Pin:
        """Make a version of what a client has staged, or raise Conflict."""
        ...


class Immediate:
    """Every version that a client asks for is one of the warehouse, at once."""

    def __init__(self, warehouse: Warehouse, tables: LanceTables, branch: str = MAIN) -> None:
        self._warehouse = warehouse
        self._tables = tables
        self._branch = branch

    def view(self, *, fresh: bool = False) -> View:
        head = self._warehouse.known
        if fresh or self._branch not in head.manifest.branches:
            head = self._warehouse.refresh()
        return self._warehouse.view(head.manifest, self._branch)

    def declare(self, name: Name, location: str | None) -> Table:
        return self._warehouse.declare(name, Format.LANCE, location=location, branch=self._branch)

    def take(self, table: Table, before: Pin | None, after: Pin) -> Pin:
        does = self._tables.admitted(table, after)
        change = Change(meaning(does), table.id, before, after)
        self.commit([change], f"{does} {'.'.join(table.name)}")
        return after

    def commit(self, changes: Sequence[Change], message: str) -> None:
        """Make one version of changes of several tables."""
        base = self._warehouse.known
        view = self._warehouse.view(base.manifest, self._branch)
        for change in changes:
            table = view.manifest.tables.get(change.table)
            if table is not None and change.after is not None:
                # Others who share the warehouse may have heard that the branch was made again.
                _, root = self._tables.store(table)
                self._tables.staged(view, table, f"{root}/{change.after.path}")
        self._warehouse.commit(
            changes, base=base, branch=self._branch, message=message, rebase=_redo
        )


@dataclass(frozen=True)
class Reading:
    """One version of the warehouse, on one branch; nothing is ever written."""

    seen: View

    def view(self, *, fresh: bool = False) -> View:  # noqa: ARG002  # there is only the one
        return self.seen

    def declare(self, name: Name, location: str | None) -> Table:  # noqa: ARG002
        raise self.refused()

    def take(self, table: Table, before: Pin | None, after: Pin) -> Pin:  # noqa: ARG002
        raise self.refused()

    def refused(self) -> Refused:
        """Return what to raise at who wants to write."""
        return Refused(
            ErrorKind.UNSUPPORTED_FEATURE,
            f"version {self.seen.version} of the warehouse is only read here; write to the head of a "
            "branch",
        )


def _redo(change: Change, manifest: Manifest) -> Change:
    """The client rebases by Lance's rules, and asks again."""
    name = ".".join(manifest.tables[change.table].name)
    raise Conflict(ErrorKind.CONFLICT, f"somebody else has committed to {name}")


@dataclass
class Waiting:
    """Versions wait, unseen by others, until all of a transaction are committed together."""

    tables: LanceTables
    base: View
    id: str = field(default_factory=fresh_id)
    made: dict[str, Table] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)
    #: What each version does, oldest first.
    does: dict[str, list[str]] = field(default_factory=dict)

    def view(self, *, fresh: bool = False) -> View:  # noqa: ARG002  # a transaction sees one version
        manifest = self.base.manifest
        if self.made:
            manifest = replace(manifest, tables={**manifest.tables, **self.made})
        return View(manifest, self.base.branch, {**self.base.pins, **self.pins})

    def declare(self, name: Name, location: str | None) -> Table:
        table = self.tables.new_table(self.view(), name, location)
        self.made[table.id] = table
        return table

    def take(self, table: Table, before: Pin | None, after: Pin) -> Pin:  # noqa: ARG002
        does = self.tables.admitted(table, after)
        earlier = self.pins.get(table.id)
        steps = self.does.setdefault(table.id, [])
        through = (*earlier.through, earlier.path) if earlier is not None else ()
        if earlier is not None and earlier.version == after.version:
            # Compaction reserves numbers and then asks for the same version again.
            through, steps[:] = through[:-1], steps[:-1]
        steps.append(does)
        stem = after.path.rpartition("/")[2].partition(".manifest")[0]
        path = f"{forks.directory(after.path)}{OURS}/{self.id}/{stem}"
        # Clients copy whatever is not called so to its public name by themselves.
        waits = replace(after, path=f"{path}.manifest", through=through)
        store, root = self.tables.store(table)
        store.put(f"{root}/{waits.path}", whole(store, f"{root}/{after.path}"))
        store.delete([f"{root}/{after.path}"])
        self.pins[table.id] = waits
        return waits

    def may_replace(self, table: Table, version: int) -> bool:
        """Tell whether the last version only reserved numbers, so that another may take its place."""
        last = self.pins.get(table.id)
        return (
            last is not None
            and last.version == version
            and self.does[table.id][-1:] == ["reserve_fragments"]
        )


def meaning(does: str) -> Operation:
    """Return what Lance calls a change, in our words."""
    return _OPERATIONS.get(does, Operation.OVERWRITE)
