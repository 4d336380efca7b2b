"""Execute a plan.

Order, and why a crash at any point is harmless: first everything is looked at once more (refs,
heads, branches, new tables), and Iceberg tables are committed to (`committing`); then files go that
name no others; manifests go last, of Lance oldest first.  While a manifest is there a rerun still
knows which files only it named.  If a file of a table could not be deleted, that table's manifests
wait for the next run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from lakewarden.errors import ErrorKind, Exit, Interrupted, UsageError
from lakewarden.maintenance.cleanup import removal_of
from lakewarden.maintenance.committing import Commits, finish, prepare
from lakewarden.maintenance.deleting import STOPPED, Deleting, Gate, OpenGate, closed
from lakewarden.maintenance.dependence import held_by
from lakewarden.maintenance.plan import Plan, TablePlan
from lakewarden.maintenance.safety import Breakers
from lakewarden.maintenance.survey import (
    Costs,
    Reading,
    errors_in,
    list_fully,
    tables_in,
)
from lakewarden.model import FileKind, Format, RemovalStats
from lakewarden.pipeline import listing, references
from lakewarden.pipeline.frames import (
    Root,
    settle,
    to_micros,
)
from lakewarden.pipeline.listing import State, Unit, states_in
from lakewarden.retention import MIN_AGE
from lakewarden.storage.location import Location
from lakewarden.storage.store import LIST_PAGE_SIZE, Deletion


@dataclass(frozen=True, slots=True)
class TableReceipt:
    """What was done to one table."""

    table_key: str
    removed: RemovalStats = field(default_factory=RemovalStats)
    failed_deletes: int = 0
    kept_unverified: int = 0
    kept_unknown_age: int = 0
    skipped: str | None = None
    error: str | None = None
    error_kind: str | None = None
    #: The table changed after the plan was made; planning again will do.
    outdated: bool = False
    format: Format = Format.LANCE
    expired_refs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an operation did."""

    operation: str
    tables: Sequence[TableReceipt]
    requests: Mapping[str, int]
    seconds: Mapping[str, float]
    #: What was noticed and holds nothing back.
    warnings: tuple[str, ...] = ()

    @property
    def removed(self) -> RemovalStats:
        total = RemovalStats()
        for table in self.tables:
            total += table.removed
        return total

    @property
    def failed(self) -> list[TableReceipt]:
        return [table for table in self.tables if table.error is not None or table.failed_deletes]

    @property
    def outdated(self) -> list[TableReceipt]:
        return [table for table in self.tables if table.outdated]

    @property
    def exit_code(self) -> Exit:
        """What a program should be told."""
        if not self.failed:
            return Exit.DONE
        if len(self.outdated) == len(self.failed):
            return Exit.CONFLICT
        removed = self.removed
        changed = removed.files_removed > 0 or removed.old_versions_removed > 0
        return Exit.PARTIAL if changed or len(self.failed) < len(self.tables) else Exit.REFUSED

    def after(self, plan: Plan) -> Receipt:
        """Return this receipt with what making its plan cost."""
        return replace(
            self,
            requests=added(plan.requests, self.requests),
            seconds=added(plan.seconds, self.seconds),
        )

    def followed_by(self, later: Receipt) -> Receipt:
        """Return this receipt with what a later run over the same tables added."""
        before = {table.table_key: table for table in self.tables}
        tables = [
            replace(
                table,
                removed=before[table.table_key].removed + table.removed,
                expired_refs=(*before[table.table_key].expired_refs, *table.expired_refs),
            )
            if table.table_key in before
            else table
            for table in later.tables
        ]
        known = {table.table_key for table in tables}
        return Receipt(
            self.operation,
            [*tables, *(table for table in self.tables if table.table_key not in known)],
            added(self.requests, later.requests),
            added(self.seconds, later.seconds),
            (*self.warnings, *later.warnings),
        )


Number = TypeVar("Number", int, float)


def added(one: Mapping[str, Number], other: Mapping[str, Number]) -> dict[str, Number]:
    """Add up what was counted or measured under each name."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def execute(
    plan: Plan,
    reading: Reading,
    *,
    breakers: Breakers | None = None,
    rate_limit: float | None = None,
    gate: Gate | None = None,
) -> Receipt:
    """Delete what the plan says, and nothing else; a table that changed meanwhile is left alone.

    A `gate` is asked first, and again before each commit and each batch of files.
    """
    if rate_limit is not None and rate_limit <= 0:
        raise UsageError(
            ErrorKind.USAGE, f"--rate-limit is {rate_limit:g}; it must be above 0 keys/s"
        )
    check(plan, breakers or Breakers())
    gate = gate or OpenGate()
    asked, plan = plan, closed(plan, gate)
    costs = Costs()
    going = {table.table_id: table for table in plan.tables if table.goes_ahead}
    outdated: dict[int, str] = {}
    done: list[Row] = []
    stopped: set[int] = set()
    commits = Commits()
    if going:
        lance = [table for table in going.values() if table.format is Format.LANCE]
        if lance:
            with costs.stage(reading, "check again", f"tables: {len(lance):,}"):
                outdated = _changed_since(plan, reading, costs)
        commits = prepare(plan, reading, costs, gate)
        shut = {table.table_id for table in asked.tables if table.goes_ahead} - going.keys()
        stays = "keeps versions that were to go"
        outdated |= _held(plan, shut | commits.stopped, stays) | commits.outdated
        reading = commits.reading or reading
        going = {
            number: table
            for number, table in going.items()
            if number not in outdated and number not in commits.stopped
        }
        deleting = Deleting(plan, reading, costs, gate, rate_limit, dict(going))
        try:
            deleting.run()
        except PySparkException as error:
            first = str(error).strip().partition("\n")[0]
            raise Interrupted(
                ErrorKind.SPARK,
                f"Spark failed while files were being deleted ({first}); some are gone, all of them "
                "unneeded: run again to remove the rest",
            ) from error
        done, stopped = deleting.done, deleting.stopped | commits.closed
        unfinished = {row.table_id for row in done if row.outcome == Deletion.FAILED.value}
        unfinished |= stopped
        finish(commits, [number for number in going if number not in unfinished], reading, costs)
    receipts = [
        replace(receipt, error=STOPPED, error_kind=ErrorKind.STOPPED.value)
        if table.table_id in stopped
        else receipt
        for table, receipt in zip(
            plan.tables, _receipts(plan.tables, done, outdated, commits), strict=True
        )
    ]
    warnings = tuple(commits.warnings)
    return Receipt(plan.operation, receipts, costs.requests, costs.seconds, warnings)


def check(plan: Plan, breakers: Breakers) -> None:
    """Refuse a plan that is larger than its user expects."""
    breakers.check(
        files=plan.removal.files_removed,
        size=plan.removal.bytes_removed,
        files_in_all=sum(table.objects for table in plan.tables if table.goes_ahead),
    )


def _held(plan: Plan, stopped: Collection[int], why: str) -> dict[int, str]:
    """Return tables that stopped ones use: versions that were to go stay there and need their files."""
    keys = {table.table_id: table.table_key for table in plan.tables}
    held = held_by(stopped, {table.table_id: set(table.uses) for table in plan.tables})
    return {used: f"{keys[user]} uses files of this table and {why}" for used, user in held.items()}


def _changed_since(plan: Plan, reading: Reading, costs: Costs) -> dict[int, str]:
    """Return tables whose refs moved, or whose plan a newer version contradicts, with the reason."""
    units = _units_again(plan)
    tables = [table for table in plan.tables if table.format is Format.LANCE]
    roots = [root for root in plan.roots if root.owned and root.format is Format.LANCE]
    newcomers: list[Root] = []
    if plan.directories:
        listed, noted = list_fully(units, reading)
        newcomers = _newcomers(plan, tables_in(noted, units)[0], roots)
        objects, more = settle(listing.identify(listed, units, [*roots, *newcomers]))
        noted += more
    else:
        objects, noted = list_fully(units, reading, roots)
    costs.add_noted(noted, "key", "size")
    failed = errors_in(noted, "unit", "key").values()
    unseen = [error for error in failed if error.kind is not ErrorKind.NOT_FOUND]
    if unseen:
        # What cannot be looked at again may hold a new shallow clone of any table.
        return {table.table_id: unseen[0].message for table in tables}
    changed: dict[int, str] = {}
    seen = states_in(noted)
    fresh = bool(newcomers)
    for root, table in zip(roots, tables, strict=True):
        state = seen.get(root.root_id, State())
        if table.error is None and state.refs_mark != table.refs_mark:
            changed.setdefault(
                root.table_id, "a tag or branch was made, moved or deleted meanwhile"
            )
        fresh = fresh or state.manifests_mark != table.manifests_mark
    if fresh:
        changed |= _contradicted(plan, objects, [*roots, *newcomers], reading, costs)
    return changed | _held(plan, changed, "has changed meanwhile")


def _contradicted(
    plan: Plan, objects: DataFrame, roots: Sequence[Root], reading: Reading, costs: Costs
) -> dict[int, str]:
    """Open every version that is new since the plan, and find plans that it contradicts."""
    known = plan.versions.select("root_id", "path", "modified_us")
    is_manifest = F.col("kind") == FileKind.MANIFEST.value
    # A staged manifest may become a version at any moment; old ones are left over.
    soon = (F.col("kind") == FileKind.STAGED_MANIFEST.value) & (
        F.col("modified_us") >= F.lit(to_micros(plan.made_at - MIN_AGE))
    )
    fresh = (
        objects.filter(is_manifest | soon)
        # By time, too: a table that was dropped and made again uses the same names.
        .join(known, on=["root_id", "path", "modified_us"], how="left_anti")
        .withColumn("kept", F.lit(True))
    )
    named, noted = settle(
        references.references_of(fresh, roots, reading.opening, tasks=reading.tasks)
    )
    costs.add_noted(noted, "key", "version")
    unread = errors_in(noted, "by_root", "key")
    lance = [table for table in plan.tables if table.format is Format.LANCE]
    if any(root.root_id in unread for root in roots[len(lance) :]):
        # A table that appeared meanwhile and cannot be read may need files of any other.
        return {table.table_id: "a new table could not be read" for table in lance}
    own = fresh.select("root_id", F.col("path").alias("key"))
    by_key = named.filter(F.col("key").isNotNull()).select("root_id", "key").unionByName(own)
    by_stem = named.filter(F.col("stem").isNotNull()).select("stem").distinct()
    doomed = plan.deletions.select("table_id", "root_id", "key", "stem")
    hit = (
        doomed.join(by_key, on=["root_id", "key"], how="left_semi")
        .unionByName(doomed.join(by_stem, on="stem", how="left_semi"))
        .select("table_id")
        .distinct()
    )
    reason = "a newer version needs files that were about to go"
    found = {row.table_id: reason for row in hit.collect()}
    tables = {root.root_id: root.table_id for root in roots}
    for root_id, error in unread.items():
        # It may be a clone, so its own trouble holds every table back.
        found |= {table.table_id: error.message for table in lance}
        found[tables[root_id]] = error.message
    return found


def _units_again(plan: Plan) -> list[Unit]:
    """Return what to list again: all of a unit, or only refs, versions and branches of its tables.

    Whichever costs fewer requests; three ranges per table are needed to leave data files out.
    """
    units: list[Unit] = []
    taken: set[int] = set()
    for unit in plan.units:
        inside = [
            (root, table)
            for root, table in zip(plan.roots, plan.tables, strict=False)
            if root.owned
            and root.format is Format.LANCE
            and root.table_id not in taken
            and unit.covers(root.location)
        ]
        taken.update(root.table_id for root, _ in inside)
        pages = sum(table.objects for _, table in inside) / LIST_PAGE_SIZE
        if pages <= 3 * len(inside):
            if inside or unit.inside:
                units.append(unit)
            continue
        for root, _ in inside:
            units += [Unit(root.location.child(name)) for name in ("_refs", "_versions", "tree")]
        units += _between(unit, [root.location for root, _ in inside])
    return units


def _between(unit: Unit, tables: Sequence[Location]) -> list[Unit]:
    """Return the rest of a directory's range without its tables: new ones may be there."""
    if unit.place in tables:
        return []
    after, rest = unit.after, []
    for path in sorted(f"{table.path}/" for table in tables):
        rest.append(Unit(unit.place, after, path))
        # "0" is the character after "/": all keys of the table come before it.
        after = f"{path[:-1]}0"
    return [*rest, Unit(unit.place, after, unit.before)]


def _newcomers(plan: Plan, places: Iterable[Location], roots: Sequence[Root]) -> list[Root]:
    """Return tables that appeared in the plan's directories since."""
    known = {root.location for root in roots}
    number = max(root.root_id for root in plan.roots) + 1
    new = [place for place in places if place not in known]
    return [Root(number + step, -1 - step, place) for step, place in enumerate(new)]


def _receipts(
    tables: Iterable[TablePlan],
    done: Iterable[Row],
    outdated: Mapping[int, str],
    commits: Commits,
) -> list[TableReceipt]:
    removed = {
        number: RemovalStats(old_versions_removed=gone) for number, gone in commits.expired.items()
    }
    failures: dict[int, tuple[int, str]] = {}
    for row in done:
        if row.outcome == Deletion.DELETED.value:
            before = removed.get(row.table_id, RemovalStats())
            removed[row.table_id] = before + removal_of(row.kind, row.files, row.bytes)
        elif row.outcome == Deletion.FAILED.value:
            count, example = failures.get(row.table_id, (0, row.error))
            failures[row.table_id] = (count + row.files, example)
    receipts = []
    for table in tables:
        failed, example = failures.get(table.table_id, (0, ""))
        receipt = TableReceipt(
            table_key=table.table_key,
            removed=removed.get(table.table_id, RemovalStats()),
            failed_deletes=failed,
            kept_unverified=table.kept_unverified,
            kept_unknown_age=table.kept_unknown_age,
            skipped=table.skipped,
            error=table.error,
            error_kind=table.error_kind,
            format=table.format,
            expired_refs=table.expired_refs if table.table_id in commits.expired else (),
        )
        if table.table_id in commits.failed:
            trouble = commits.failed[table.table_id]
            receipt = replace(receipt, error=trouble.message, error_kind=trouble.kind.value)
        if failed:
            message = f"{failed} file(s) could not be deleted ({example}); run again to retry them"
            receipt = replace(receipt, error=message, error_kind=ErrorKind.STORAGE.value)
        if table.table_id in outdated:
            message = (
                f"{outdated[table.table_id]}; nothing of this table was deleted: plan it again"
            )
            receipt = replace(
                receipt, error=message, error_kind=ErrorKind.PLAN_OUTDATED.value, outdated=True
            )
        receipts.append(receipt)
    return receipts
