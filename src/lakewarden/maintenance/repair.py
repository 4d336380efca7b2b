"""Repair of a warehouse: what was written past it, and what is damaged.

`plan` reads and changes nothing, not even what is committed and waits to be published.  `execute` moves
pins: to the heads that there are (one version of the log for each branch, whatever the number of its
tables), or, with `to_pin`, to a new version that is what the pin was.  Data is never rewritten, and every
version stays readable by its number.  A commit either moves all pins of a branch or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatch
from functools import cache

from lakewarden.errors import (
    Conflict,
    Damaged,
    ErrorKind,
    Exit,
    LakewardenError,
    NotFound,
    StorageError,
)
from lakewarden.maintenance import damage, log_damage
from lakewarden.maintenance.damage import Finding
from lakewarden.maintenance.kept import Pinned, unpublished
from lakewarden.maintenance.survey import Costs, Reading
from lakewarden.model import Format
from lakewarden.pipeline.frames import concurrently
from lakewarden.storage.location import Location
from lakewarden.warehouse import drift, forks, iceberg, iceberg_drift, lance
from lakewarden.warehouse.commit import Head
from lakewarden.warehouse.drift import Action, Classification, Line, action_on
from lakewarden.warehouse.manifest import Change, Manifest, Operation, Pin, Table
from lakewarden.warehouse.warehouse import Warehouse

#: Who the log says has moved pins.
ACTOR = "lakewarden:repair"
FORCED = f"{ACTOR}:force"


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for."""

    confirm: bool = False
    #: Publish what is suspicious or unverifiable as well.
    force: bool = False
    #: Go back to the pins instead.
    to_pin: bool = False
    #: Patterns of tables' names; none for all.
    tables: tuple[str, ...] = ()

    def wants(self, table: Table) -> bool:
        name = ".".join(table.name)
        return not self.tables or any(fnmatch(name, pattern) for pattern in self.tables)


@dataclass(frozen=True, slots=True)
class Row:
    """One table on one branch, and what is, or was, done about it."""

    line: Line
    action: Action
    #: What is wrong, or why nothing was done.
    error: str | None = None
    error_kind: ErrorKind | None = None
    #: The version that its pin has become.
    pin: Pin | None = None

    @property
    def failed(self) -> bool:
        """Whether what is wrong with it is not for moving a pin."""
        return self.error_kind is not None

    def but(self, error: LakewardenError) -> Row:
        return replace(self, action=Action.REFUSED, error=error.message, error_kind=error.kind)


@dataclass(frozen=True)
class RepairPlan:
    """What was found, and what would be done."""

    warehouse: Warehouse = field(repr=False)
    request: Request
    #: The version that was looked at; None if it cannot be read.
    base: Head | None
    rows: Sequence[Row]
    findings: Sequence[Finding] = ()
    #: Why the warehouse cannot be read.
    error: LakewardenError | None = None
    costs: Costs = field(default_factory=Costs, repr=False)


@dataclass(frozen=True)
class RepairReceipt:
    """What was done."""

    request: Request
    rows: Sequence[Row]
    findings: Sequence[Finding]
    #: The newest version of the warehouse that repair has made; None if it has made none.
    version: int | None = None
    error: LakewardenError | None = None

    @property
    def exit_code(self) -> Exit:
        if any(row.error_kind in _CONFLICTS and row.action is Action.REFUSED for row in self.rows):
            return Exit.CONFLICT
        refused = any(row.action is Action.REFUSED for row in self.rows)
        return Exit.REFUSED if refused or self.error is not None else Exit.DONE


_CONFLICTS = (ErrorKind.CONFLICT, ErrorKind.INCOMPATIBLE, ErrorKind.HISTORY_GAP)


# -- planning --------------------------------------------------------------------------------------


def plan(warehouse: Warehouse, request: Request, reading: Reading, *, now: datetime) -> RepairPlan:
    """Find drift and damage.  Nothing is changed."""
    costs = Costs()
    looking = warehouse.reading()
    with costs.stage(reading, "read the log"):
        findings = log_damage.find(looking)
        try:
            base = looking.refresh()
            pinned = Pinned(looking, base.manifest)
        except Damaged as error:
            return RepairPlan(warehouse, request, None, (), findings, error, costs)
    with costs.stage(reading, "look for drift"):
        lines = list(_lines(looking, base.manifest, pinned, now))
    tables = pinned.checked(lines, warehouse.location.uri)
    if pinned.trouble is not None and not findings:
        findings.append(log_damage.unread_history(pinned.trouble))
    names = {".".join(one.name) for one in base.manifest.tables.values() if request.wants(one)}
    if request.tables and not names:
        raise NotFound(
            f"no table of {warehouse.location.uri} is called like {', '.join(request.tables)}; "
            f"lakewarden tables {warehouse.location.uri} lists them"
        )
    found = damage.find([one for one in tables if one.key in names], reading, costs)
    rows = [_row(line, request, found) for line in lines if request.wants(line.table)]
    return RepairPlan(warehouse, request, base, rows, [*found, *findings], costs=costs)


def _lines(
    warehouse: Warehouse, manifest: Manifest, pinned: Pinned, now: datetime
) -> Iterable[Line]:
    """Yield every table on every branch that has versions of its own, with what happened to it."""
    views = [warehouse.view(manifest, branch) for branch in sorted(manifest.branches)]
    tables = {one.id: one for view in views for one in view.tables()}
    known = pinned.metadata()

    @cache
    def announced() -> frozenset[str]:
        return iceberg_drift.announced(warehouse.log)

    def look(table: Table) -> list[Line]:
        store = warehouse.opener(Location.parse(table.location))
        if table.format is Format.ICEBERG:
            # A branch has a table's metadata for its own once it has changed it.
            mine = [
                Line(table, view.branch, pin, pin)
                for view in views
                if (pin := manifest.branches[view.branch].pins.get(table.id)) is not None
            ]
            return [iceberg_drift.examine(one, store, known, announced, now) for one in mine]
        try:
            tree = drift.forks_of(table, store) if len(views) > 1 else frozenset[str]()
        except LakewardenError as error:
            own = (drift.line_of(view, table, frozenset()) for view in views)
            return [one.failed(error) for one in own if one is not None]
        found = (drift.line_of(view, table, tree) for view in views)
        return [drift.examine(one, store) for one in found if one is not None]

    ordered = sorted(tables.values(), key=lambda one: one.name)
    for found in concurrently(look, ordered):
        yield from found


def _row(line: Line, request: Request, found: Sequence[Finding]) -> Row:
    """Return what is done about a table if nothing comes in between."""
    if line.error_kind is not None:
        action = Action.REFUSED if request.confirm else Action.NO_OP
        return Row(line, action, line.error, line.error_kind)
    row = Row(line, _action(line, request), line.error)
    if not line.drifted or request.to_pin:
        return row
    broken = next(
        (one for one in found if one.table_key == line.key and unpublished(line) in one.refs), None
    )
    if broken is None:
        return row
    error = Damaged(
        ErrorKind.DAMAGED_VERSION,
        f"the head of {line.key} cannot be published: {broken.means}; go back to the pin instead: "
        "--to-pin --confirm",
    )
    blocked = row.but(error)
    return blocked if request.confirm else replace(blocked, action=Action.PREVIEW)


def _action(line: Line, request: Request) -> Action:
    if not request.to_pin:
        return action_on(line.classification, confirm=request.confirm, force=request.force)
    if not line.drifted or line.table.format is Format.ICEBERG:
        # An Iceberg table is at its pin: readers and writers know no other metadata.
        return Action.NO_OP
    return Action.HEALED if request.confirm else Action.PREVIEW


# -- doing it --------------------------------------------------------------------------------------


def execute(plan: RepairPlan) -> RepairReceipt:
    """Move pins as the plan says, and put strays aside.

    A branch on which somebody else was faster, or on which a table has changed since, is left as it is;
    its rows say so.
    """
    assert plan.request.confirm
    rows: list[Row] = [row for row in plan.rows if not _moves(row)]
    version: int | None = None
    branches = dict.fromkeys(row.line.branch for row in plan.rows)
    for branch in branches:
        mine = [row for row in plan.rows if _moves(row) and row.line.branch == branch]
        if mine:
            done, made = _move(plan, branch, mine)
            rows += done
            version = made or version
    order = {(row.line.table.id, row.line.branch): at for at, row in enumerate(plan.rows)}
    rows.sort(key=lambda row: order[row.line.table.id, row.line.branch])
    findings = [log_damage.put_aside(plan.warehouse, one) for one in plan.findings]
    return RepairReceipt(plan.request, rows, findings, version, plan.error)


def _moves(row: Row) -> bool:
    return row.action in (Action.HEALED, Action.FORCED)


def _move(plan: RepairPlan, branch: str, rows: Sequence[Row]) -> tuple[list[Row], int | None]:
    """Move the pins of one branch in one version."""
    forced = any(row.action is Action.FORCED for row in rows)
    # With nothing remembered of its tables: they have a warehouse of their own.
    warehouse = replace(plan.warehouse, actor=FORCED if forced else ACTOR, formats={})
    assert plan.base is not None
    refused: list[Row] = []
    ready: list[tuple[Row, Change]] = []
    for row in rows:
        try:
            ready.append((row, _change(warehouse, plan, row)))
        except LakewardenError as error:
            refused.append(row.but(error))
    if not ready:
        return refused, None
    changes = [change for _, change in ready]
    named = ", ".join(row.line.key for row, _ in ready[:3]) + (", …" if len(ready) > 3 else "")
    message = f"repair {named}" + (": back to the pin" if plan.request.to_pin else "")
    try:
        head = warehouse.commit(
            changes, base=plan.base, branch=branch, message=message, rebase=_refuse
        )
    except LakewardenError as error:
        if plan.request.to_pin and error.kind is not ErrorKind.COMMIT_UNKNOWN:
            for row, change in ready:
                _discard(warehouse, row, change)
        return refused + [row.but(error) for row, _ in ready], None
    done = [replace(row, pin=change.after) for row, change in ready]
    if plan.request.to_pin:
        done = [_shown(warehouse, row) for row in done]
    return refused + done, head.version


def _change(warehouse: Warehouse, plan: RepairPlan, row: Row) -> Change:
    """Return the change of one table, after looking once more at what it was decided on."""
    line = row.line
    assert line.head is not None
    if line.table.format is Format.LANCE:
        tables = lance.tables_of(warehouse)
        store, root = tables.store(line.table)
        head = drift.head_of(store, root, forks.directory(line.pin.path))
        if head is None or head.version != line.head.version:
            raise Conflict(
                ErrorKind.CONFLICT,
                f"{line.key} was written to again while it was being repaired (version "
                f"{'none' if head is None else head.version}); nothing was changed: do it again",
            )
        if plan.request.to_pin:
            warehouse.refresh()
            after = tables.restore(line.table, line.head, line.pin)
            return Change(Operation.RESTORE, line.table.id, line.logged, after)
        tables.check_head(line.table, line.head)
    else:
        iceberg.tables_of(warehouse).read(line.table, line.head)
    verified = line.classification is Classification.VERIFIED_MAINTENANCE
    does = Operation.REWRITE if verified else Operation.OVERWRITE
    return Change(does, line.table.id, line.logged, line.head)


def _refuse(change: Change, manifest: Manifest) -> Change:
    name = ".".join(manifest.tables[change.table].name)
    raise Conflict(
        ErrorKind.CONFLICT,
        f"{name} has changed while it was being repaired; nothing was committed: do it again",
    )


def _discard(warehouse: Warehouse, row: Row, change: Change) -> None:
    if change.after is not None:
        with suppress(StorageError):
            lance.tables_of(warehouse).discard(row.line.table, change.after)


def _shown(warehouse: Warehouse, row: Row) -> Row:
    """Publish a version that was committed; whoever reads the table next does it, if we cannot."""
    assert row.pin is not None
    try:
        lance.tables_of(warehouse).publish(row.line.table, row.pin)
    except StorageError:
        return row
    except LakewardenError as error:
        # Somebody has written past the warehouse in that very moment.
        return row.but(error)
    return row
