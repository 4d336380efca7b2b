"""Changes of several tables, of both formats, that become one version or none.

    with transaction(warehouse, message="daily load") as tx:
        lance.write_dataset(rows, namespace_client=tx.lance, table_id=["db", "vectors"], mode="append")
        tx.iceberg.load_table("db.facts").append(facts)

Everything is written at once and seen by nobody else until the end.  Tables that somebody else has
changed meanwhile are rebased by their format's own rules, and only those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lakewarden.errors import Conflict, ErrorKind, LakewardenError, StorageError
from lakewarden.model import Format
from lakewarden.warehouse import iceberg, lance
from lakewarden.warehouse.backoff import SlotBackoff
from lakewarden.warehouse.commit import Head
from lakewarden.warehouse.manifest import (
    MAIN,
    Change,
    Manifest,
    Operation,
    Pin,
    Table,
    Transaction,
)
from lakewarden.warehouse.warehouse import View, Warehouse

Result = TypeVar("Result")

#: Times that a change of a table that may be left out is put on top of others'.  The log waits twice
#: as long after each, and all other tables with it; to leave it out takes no time.
_REPLAYS = 3


@dataclass
class Changes:
    """A transaction while it is being made."""

    warehouse: Warehouse
    base: Head
    view: View
    message: str | None = None
    #: The caller's own name for it.
    request: str | None = None
    #: Tables that are read, and must not have changed when it is committed.
    reads: list[Table] = field(default_factory=list)
    #: The version that it has become.
    version: int | None = None
    #: Who the log says has done it, if not whoever opened the warehouse.
    actor: str | None = None
    #: Leave tables out that somebody else has changed meanwhile, and commit the others.
    leaves_out: bool = False
    #: Tables that were left out, by their ids.
    left_out: dict[str, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._submitted = False
        self._replays: Counter[str] = Counter()
        # Both formats know of each other's new tables: names and places are taken once.
        made: dict[str, Table] = {}
        self._lance = lance.Waiting(lance.tables_of(self.warehouse), self.view, made=made)
        self._iceberg = iceberg.Waiting(self.view, made=made)
        #: The Lance tables, for any Lance client.
        self.lance = lance.Namespace(self.warehouse, self._lance)
        #: The Iceberg tables, for PyIceberg.
        self.iceberg = iceberg.WarehouseCatalog(
            "lakewarden", opened=self.warehouse, session=self._iceberg
        )

    @property
    def done_before(self) -> int | None:
        """The version that an earlier try of the same request has become."""
        return self.base.manifest.requests.get(self.request or "")

    def reading(self, name: tuple[str, ...]) -> Table:
        """Say that a table's state matters: if it changes meanwhile, this is not committed."""
        table = self.view.table(name)
        self.reads.append(table)
        return table

    def table(self, name: tuple[str, ...]) -> Table:
        """Return a table as the transaction sees it, or raise NotFound."""
        return self._lance.view().find(name) or self._iceberg.view().table(name)

    def changed(self, table: Table) -> bool:
        """Tell whether the transaction has changed a table."""
        return table.id in self._lance.pins or table.id in self._iceberg.changes

    def commit(self) -> None:
        """Make one version of it all; nothing if nothing was changed."""
        while True:
            changes = [*self._of_lance(), *self._iceberg.changes.values()]
            if not changes:
                return
            self._submitted = True
            made = self._transaction(changes)
            try:
                head = self.warehouse.submit(self.base, made, self._rebase)
            except LakewardenError as error:
                if isinstance(error, Conflict) and self.leaves_out and self._leave_out(changes):
                    continue
                # Only these say what became of it: after an interrupt it may be committed all the same.
                if error.kind is not ErrorKind.COMMIT_UNKNOWN:
                    self.discard()
                raise
            break
        self.version = head.manifest.requests.get(self.request or "", head.version)
        if head.tail[-1].transaction.id != made.id:
            # An earlier try of the same request has done it.
            self.discard()
            return
        for number, pin in self._lance.pins.items():
            # It is committed; whoever reads the table next shows it, if we cannot.
            with suppress(StorageError):
                lance.tables_of(self.warehouse).publish(head.manifest.tables[number], pin)
        with suppress(StorageError):
            for before, after in self._iceberg.replaced.values():
                iceberg.tables_of(self.warehouse).clean_metadata(before, after)

    def _transaction(self, changes: Sequence[Change]) -> Transaction:
        return Transaction(
            self.warehouse.log.new_id(),
            self.base.version,
            tuple(changes),
            self.view.branch,
            self.actor or self.warehouse.actor,
            self.message,
            self.request,
            {table.id: self.view.pins.get(table.id) for table in self.reads},
        )

    def _leave_out(self, changes: Sequence[Change]) -> bool:
        """Give up tables that are not what they were any more; tell whether there were any."""
        now = self.warehouse.view(self.warehouse.refresh().manifest, self.view.branch)
        there = {table.id for table in now.tables()}
        # A client may have put its change on top of others' already, and the log not agree to that.
        moved = [
            change.table
            for change in changes
            if change.table not in there
            or now.pins.get(change.table) != change.before
            or now.pins.get(change.table) != self.view.pins.get(change.table)
        ]
        for number in moved:
            self.withdraw(self.view.manifest.tables[number])
        return bool(moved)

    def withdraw(self, table: Table) -> None:
        """Leave a table out after all, and take away what was written to make its next version."""
        self.left_out[table.id] = table
        self._lance.does.pop(table.id, None)
        pin = self._lance.pins.pop(table.id, None)
        if pin is not None:
            lance.tables_of(self.warehouse).discard(table, pin)
        change = self._iceberg.changes.pop(table.id, None)
        self._iceberg.replaced.pop(table.id, None)
        if change is not None and change.after is not None:
            iceberg.tables_of(self.warehouse).delete([change.after.path])

    def waits(self, table: Table) -> Pin | None:
        """Return the version of a Lance table that waits in this transaction."""
        return self._lance.pins.get(table.id)

    def _of_lance(self) -> Iterator[Change]:
        for table in self._lance.made.values():
            if table.format is Format.LANCE:
                pin = self._lance.pins.get(table.id)
                yield Change(Operation.CREATE, table.id, after=pin, name=table.name, made=table)
        for number, pin in self._lance.pins.items():
            if number not in self._lance.made:
                steps = [lance.meaning(one) for one in self._lance.does[number]]
                # Going back counts, whatever follows: what it went back to may be going meanwhile.
                # So does rewriting, which indices may follow.
                first = (Operation.RESTORE, Operation.REWRITE)
                does = next((one for one in first if one in steps), steps[-1])
                yield Change(does, number, self._lance.base.pins.get(number), pin)

    def abort(self) -> None:
        """Give up what has not been submitted."""
        if not self._submitted:
            self.discard()

    def discard(self) -> None:
        """Take away what was written and is certain not to have been committed."""
        tables = self._lance.view().manifest.tables
        for number, pin in self._lance.pins.items():
            lance.tables_of(self.warehouse).discard(tables[number], pin)
        iceberg.tables_of(self.warehouse).delete(self._iceberg.written)

    def _rebase(self, change: Change, manifest: Manifest) -> Change:
        view = self.warehouse.view(manifest, self.view.branch)
        if view.pins.get(change.table) == change.before:
            # A Lance client has rebased it already.
            return change
        table = manifest.tables[change.table]
        steps = self._lance.does.get(change.table, [])
        replayed = len(steps) == 1 and lance.meaning(steps[0]) is not Operation.REWRITE
        self._replays[change.table] += 1
        if self.leaves_out and self._replays[change.table] > _REPLAYS:
            replayed = False
        if table.format is not Format.LANCE or not replayed:
            raise Conflict(
                ErrorKind.CONFLICT,
                f"{'.'.join(table.name)} was changed by somebody else, and what this transaction "
                "does to it cannot be put on top; nothing was committed: do it again",
            )
        pin = lance.replay(self.warehouse, table, self._lance, view)
        self._lance.pins[change.table] = pin
        return replace(change, before=view.pins[change.table], after=pin)


@contextmanager
def transaction(
    warehouse: Warehouse,
    *,
    message: str | None = None,
    request: str | None = None,
    branch: str = MAIN,
    actor: str | None = None,
    leaves_out: bool = False,
) -> Iterator[Changes]:
    """Make one version of everything that is done inside, or none if it fails.

    `request` is a name of the caller's: of all tries under one name, one is committed.  With
    `leaves_out`, tables that somebody else has changed meanwhile are left out instead.
    """
    head = warehouse.refresh()
    view = warehouse.view(head.manifest, branch)
    changes = Changes(warehouse, head, view, message, request, actor=actor, leaves_out=leaves_out)
    try:
        # Lance's clients say little about why a version was refused.
        with changes.lance.told():
            yield changes
    except BaseException:
        # Whatever ends the work, an interrupt too, ends it before the commit.
        changes.abort()
        raise
    changes.commit()


def run(
    warehouse: Warehouse,
    work: Callable[[Changes], Result],
    *,
    message: str | None = None,
    request: str | None = None,
    branch: str = MAIN,
    attempts: int = 20,
) -> Result:
    """Do work in a transaction, again and again until nobody is in the way."""
    clock, backoff = warehouse.log.clock, SlotBackoff(warehouse.log.chance)
    for attempt in range(1, attempts + 1):
        started = clock.elapsed()
        try:
            with transaction(warehouse, message=message, request=request, branch=branch) as changes:
                return work(changes)
        except Conflict as error:
            if attempt == attempts or error.kind is not ErrorKind.CONFLICT:
                raise
        clock.sleep(backoff.after(clock.elapsed() - started))
    raise AssertionError("attempts is at least one")
