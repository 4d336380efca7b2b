"""Delete what a plan lets go, batch by batch, for as long as somebody says that it may go on.

Who runs a plan unattended may lose the right to: it was asked to stop, or somebody else has taken its
place because it was not heard of.  So a *gate* is asked before every batch, and its answer holds for a
while only: whoever deletes looks at the clock before each request, and leaves what is late.  What was
left is tried again, after another question, and that alone: every file counts once.

Commits that precede deletions go through a *turnstile*, one by one: it asks the same gate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from threading import Lock
from typing import Protocol

from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as F

from lakewarden.errors import ErrorKind, Interrupted
from lakewarden.maintenance.dependence import held_by
from lakewarden.maintenance.plan import Plan, TablePlan
from lakewarden.maintenance.survey import Costs, Reading
from lakewarden.model import RemovalStats
from lakewarden.pipeline import deletion
from lakewarden.pipeline.deletion import LATE, Pace
from lakewarden.storage.store import Deletion
from lakewarden.world import Clock

#: Files that make it worth another task.
_FILES_PER_TASK = 4000
#: What a receipt says of a table for which the gate was closed.
STOPPED = "stopped before everything was gone; what is gone was unneeded: run again for the rest"
#: Batches in a row that may be too late for their first file.
_LATE_TIMES = 3
#: How long an answer is good for whoever comes next through a turnstile.
_FRESH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Passage:
    """What a gate answers: of which tables more may go, and until when, if there is an end."""

    tables: Collection[str]
    until: datetime | None = None


class Gate(Protocol):
    """Stands before every batch of deletions, and before the commits that precede them."""

    @property
    def batch_files(self) -> int | None:
        """Files that may go between two questions; None for all."""
        ...

    def passing(self, tables: Collection[str]) -> Passage:
        """Answer for these tables, by their keys.  For which it was closed once, it stays closed."""
        ...

    def gone(self, files: Mapping[str, int]) -> None:
        """Hear how many more files of each table are gone."""
        ...


class OpenGate:
    """Nobody stops anything."""

    batch_files: int | None = None

    def passing(self, tables: Collection[str]) -> Passage:
        return Passage(tables)

    def gone(self, files: Mapping[str, int]) -> None:
        """Tell nobody."""


@dataclass(slots=True)
class Turnstile:
    """Lets those pass who act at the same time, each right before it acts.

    The gate is asked for all of them together, again after a moment, and is believed until its answer
    is over.
    """

    gate: Gate
    clock: Clock
    tables: Collection[str]
    _lock: Lock = field(default_factory=Lock)
    _passage: Passage = field(default_factory=lambda: Passage(()))
    #: When it was asked, on the steady clock.
    _asked: float | None = None

    @property
    def until(self) -> datetime | None:
        return self._passage.until

    def lets(self, table: str) -> bool:
        """Tell whether something may be done to this table now."""
        with self._lock:
            now = self.clock.elapsed()
            if self._asked is None or now - self._asked >= _FRESH_SECONDS or self._is_over():
                self._passage, self._asked = self.gate.passing(self.tables), now
            return table in self._passage.tables and not self._is_over()

    def _is_over(self) -> bool:
        return self.until is not None and self.clock.now() >= self.until


@dataclass(slots=True)
class Deleting:
    """One plan's deletions under way."""

    plan: Plan
    reading: Reading
    costs: Costs
    gate: Gate
    rate_limit: float | None
    #: The tables of which more may go.
    tables: dict[int, TablePlan]
    #: What became of files, by table and kind.
    done: list[Row] = field(default_factory=list)
    #: Tables for which the gate was closed before everything was done.
    stopped: set[int] = field(default_factory=set)
    #: On the steady clock.
    started: float = 0.0
    _depth: int = 0
    _idle: int = 0

    def run(self) -> None:
        """Delete content, then manifests; all in one job if there is little."""
        self.started = self.reading.clock.elapsed()
        files = sum(table.removal.files_removed for table in self.tables.values())
        if not files:
            return
        together = min(files, self.gate.batch_files or files)
        tasks = max(1, min(self.reading.tasks, together // _FILES_PER_TASK))
        size = sum(table.removal.bytes_removed for table in self.tables.values())
        doomed, is_manifest = self.plan.deletions, deletion.turn() > 0
        with self.costs.stage(self.reading, "delete", f"{files:,} files, {size:,} bytes"):
            if tasks == 1 and together == files:
                self._batch(doomed, self.tables, tasks, in_order=True)
                return
            for part in _parts(doomed.filter(~is_manifest), files, together):
                self._batch(part, self.tables, tasks, in_order=False)
        with self.costs.stage(self.reading, "delete manifests"):
            for group in _groups(dict(self.tables), together):
                for part in _in_order(doomed.filter(is_manifest), group, together):
                    self._batch(part, group, tasks, in_order=True)

    def _batch(
        self, files: DataFrame, tables: Mapping[int, TablePlan], tasks: int, *, in_order: bool
    ) -> None:
        """Delete files of these tables; what was late is tried again, in halves."""
        self._keep_pace()
        until = self._ask()
        mine = self._ready(tables, in_order=in_order)
        if not mine:
            return
        delete = deletion.delete_in_order if in_order else deletion.delete_content
        pace = Pace(tasks, self.rate_limit, self.reading.clock, until)
        chosen = _of_tables(files, mine, self.plan)
        found = delete(chosen, self.plan.roots, self.reading.opening, pace).collect()
        self.costs.add_noted(found, "kind", "files")
        before = len(self.done)
        rows = [row for row in found if row.note is None]
        if not self._note(rows):
            return
        if len(self.done) > before:
            self._depth += 1
            again = _halves(self._left(chosen, rows), self._depth, in_order=in_order)
        else:
            self._count_idle()
            again = [files]
        for part in again:
            self._batch(part, tables, tasks, in_order=in_order)

    def _left(self, files: DataFrame, rows: Sequence[Row]) -> DataFrame:
        """Return the files of a batch that are still there: what is gone must not be counted twice.

        They are no more than a batch, which the gate keeps small.
        """
        left = [
            (row.table_id, row.root_id, row.path, row.kind, row.bytes, row.version)
            for row in rows
            if row.outcome not in deletion.OVER
        ]
        return self.reading.spark.createDataFrame(left, files.select(*deletion.COLUMNS).schema)

    def _ready(self, tables: Mapping[int, TablePlan], *, in_order: bool) -> dict[int, TablePlan]:
        """Return the tables of which more may go; manifests wait for all that comes before them."""
        failed = {row.table_id for row in self.done if row.outcome == Deletion.FAILED.value}
        return {
            number: one
            for number, one in tables.items()
            if number in self.tables and not (in_order and number in failed)
        }

    def _keep_pace(self) -> None:
        """Wait until the batches before have used up their time; within a batch its tasks do."""
        clock, rate = self.reading.clock, self.rate_limit
        if rate is not None:
            counted = sum(row.files for row in self.done)
            clock.sleep(max(0.0, self.started + counted / rate - clock.elapsed()))

    def _count_idle(self) -> None:
        """Give up if answers never hold for as long as it takes to begin."""
        self._idle += 1
        if self._idle < _LATE_TIMES:
            return
        raise Interrupted(
            ErrorKind.STOPPED,
            "the time between two signs of life is too short to delete anything; what is gone was "
            "unneeded, the rest stays: raise max-seconds-since-last-heartbeat, then run again",
        )

    def _ask(self) -> datetime | None:
        keys = {one.table_key: number for number, one in self.tables.items()}
        passage = self.gate.passing(keys)
        closed = {number for key, number in keys.items() if key not in passage.tables}
        if closed:
            # Versions that were to go stay in these tables, and need their files elsewhere.
            uses = {one.table_id: set(one.uses) for one in self.plan.tables}
            closed |= held_by(closed, uses).keys() & self.tables.keys()
        self.stopped |= closed
        for number in closed:
            del self.tables[number]
        return passage.until

    def _note(self, rows: Sequence[Row]) -> bool:
        """Write down what became of files, and tell whether some were left because it was late."""
        late = any(row.outcome == LATE for row in rows)
        self._idle = self._idle if late else 0
        # What failed or was held is tried again with what was late, and counts then.
        over = deletion.OVER
        self.done += [row for row in rows if not late or row.outcome in over]
        keys = {one.table_id: one.table_key for one in self.plan.tables}
        gone: dict[str, int] = {}
        for row in rows:
            if row.outcome in over:
                gone[keys[row.table_id]] = gone.get(keys[row.table_id], 0) + row.files
        self.gate.gone(gone)
        return late


def closed(plan: Plan, gate: Gate) -> Plan:
    """Return the plan without tables that the gate is closed for already."""
    keys = [one.table_key for one in plan.tables if one.goes_ahead]
    passing = gate.passing(keys).tables if keys else ()
    return replace(
        plan,
        tables=[
            one
            if not one.goes_ahead or one.table_key in passing
            else replace(
                one, removal=RemovalStats(), error=STOPPED, error_kind=ErrorKind.STOPPED.value
            )
            for one in plan.tables
        ],
    )


def _parts(files: DataFrame, number: int, size: int) -> Iterator[DataFrame]:
    """Cut a frame into parts of about so many rows, which need not be counted for that."""
    parts = -(-number // size)
    if parts == 1:
        yield files
        return
    part = F.pmod(F.xxhash64("root_id", "path"), F.lit(parts))
    yield from (files.filter(part == F.lit(one)) for one in range(parts))


def _halves(files: DataFrame, salt: int, *, in_order: bool) -> list[DataFrame]:
    """Cut a frame in two, those that go first in the first if there is an order."""
    if in_order:
        order = Window.partitionBy("table_id").orderBy(deletion.turn(), "version", "path")
        placed = files.withColumn("place", F.percent_rank().over(order))
        return [
            placed.filter("place < 0.5").drop("place"),
            placed.filter("place >= 0.5").drop("place"),
        ]
    parity = F.pmod(F.xxhash64("root_id", "path", F.lit(salt)), F.lit(2))
    return [files.filter(parity == F.lit(one)) for one in range(2)]


def _groups(tables: Mapping[int, TablePlan], size: int) -> Iterator[dict[int, TablePlan]]:
    """Put tables together that have about so many manifests."""
    group: dict[int, TablePlan] = {}
    held = 0
    for number, table in tables.items():
        own = _manifests(table)
        if group and held + own > size:
            yield group
            group, held = {}, 0
        group[number] = table
        held += own
    if group:
        yield group


def _in_order(
    manifests: DataFrame, group: Mapping[int, TablePlan], size: int
) -> Iterator[DataFrame]:
    """Cut the manifests of a table that has many into parts, those that go first in the first."""
    parts = -(-sum(map(_manifests, group.values())) // size)
    if parts <= 1:
        yield manifests
        return
    # Nobody else is in the group then.
    mine = manifests.filter(F.col("table_id").isin(list(group)))
    order = Window.partitionBy("table_id").orderBy(deletion.turn(), "version", "path")
    place = F.floor((F.row_number().over(order) - 1) / F.lit(size))
    placed = mine.withColumn("part", F.least(place, F.lit(parts - 1)))
    yield from (placed.filter(F.col("part") == F.lit(one)).drop("part") for one in range(parts))


def _manifests(table: TablePlan) -> int:
    gone = table.removal
    return gone.manifest_files_removed + gone.manifest_lists_removed + gone.metadata_files_removed


def _of_tables(files: DataFrame, tables: Mapping[int, TablePlan], plan: Plan) -> DataFrame:
    if len(tables) == len(plan.tables):
        return files
    return files.filter(F.col("table_id").isin(list(tables)))
