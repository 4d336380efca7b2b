"""What happens to Iceberg tables between a plan and its deletes: a second look, then the commit.

A table that has changed since it was planned is not lost to this run: if its new snapshots need
nothing of what is about to go, the plan holds, and the commit is made against the new state.  Only
a plan that is contradicted is made again.

The gate that stands before deletions stands before each commit, too, and before each attempt at it.

Before the commit a record is written beside the table's metadata.  It says from which metadata the
expiry started, so that a run after a crash can find the files that no metadata names any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakewarden.errors import Conflict, Damaged, ErrorKind, LakewardenError
from lakewarden.formats.iceberg.layout import PENDING
from lakewarden.formats.iceberg.metadata import Removal, dropped_metadata_files
from lakewarden.formats.iceberg.paths import Equality, place
from lakewarden.formats.iceberg.target import CatalogTarget
from lakewarden.maintenance import fleet
from lakewarden.maintenance.deleting import Gate, Turnstile
from lakewarden.maintenance.plan import Plan, TablePlan
from lakewarden.maintenance.survey import Costs, Reading, errors_in, with_credentials
from lakewarden.model import Format
from lakewarden.pipeline import metadata, snapshots
from lakewarden.pipeline.frames import (
    NOTE_TABLE,
    Stores,
    concurrently,
    settle,
    to_millis,
)
from lakewarden.pipeline.metadata import SNAPSHOT, Rule, Source, Summary, summary_of
from lakewarden.storage.location import Location
from lakewarden.storage.store import DeleteResult, Deletion
from lakewarden.world import fresh_id

if TYPE_CHECKING:
    from lakewarden.formats.iceberg.catalog import Lake, Pointer

#: Catalogs are asked about, and given, so many tables at the same time.
_TOGETHER = 8
#: Times a table is looked at and committed to before it is planned again.
_ATTEMPTS = 8


@dataclass(slots=True)
class Commits:
    """What became of the Iceberg tables of a plan before its deletes."""

    #: Tables that must be planned again, and why.
    outdated: dict[int, str] = field(default_factory=dict)
    #: Tables that failed for another reason.
    failed: dict[int, LakewardenError] = field(default_factory=dict)
    #: Tables for which the gate was closed before their commit.
    closed: set[int] = field(default_factory=set)
    #: Snapshots that were taken out of each table's metadata.
    expired: dict[int, int] = field(default_factory=dict)
    #: Records to take away once a table's files are gone.
    records: dict[int, tuple[str, ...]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    #: How to reach the tables' files from here on: catalogs may have handed out new credentials.
    reading: Reading | None = None

    @property
    def stopped(self) -> set[int]:
        return {*self.outdated, *self.failed, *self.closed}


def prepare(plan: Plan, reading: Reading, costs: Costs, gate: Gate) -> Commits:
    """Look at every Iceberg table of the plan again, and commit what must go before its files.

    The looks take their time, so the gate is asked right before each commit.
    """
    going = {t.table_id: t for t in plan.tables if t.format is Format.ICEBERG and t.goes_ahead}
    commits = Commits(records={number: table.pending for number, table in going.items()})
    if not going:
        return commits
    lake = reading.lake or fleet.open_lake()
    waiting = set(going)
    committed = [table for table in going.values() if table.commits]
    ids = _going_ids(plan, [table.table_id for table in committed])
    door = Turnstile(gate, reading.clock, [table.table_key for table in committed])
    for _ in range(_ATTEMPTS):
        with costs.stage(reading, "check again", f"tables: {len(waiting):,}"):
            heads = _look(lake, plan, commits)
            commits.reading = reading = with_credentials(reading, heads.values())
            _compare(plan, heads, reading, costs, commits)
        ready = {n: heads[n] for n in waiting if n in heads and n not in commits.stopped}
        changing = {n: head for n, head in ready.items() if going[n].commits}
        if not changing:
            return commits
        with costs.stage(reading, "commit", f"tables: {len(changing):,}"):
            stores = Stores(reading.opening)
            work = _Committing(lake, stores, reading, commits, door)
            jobs = [(going[n], head, ids.get(n, frozenset())) for n, head in changing.items()]
            again = concurrently(work.commit, jobs, _TOGETHER)
            waiting = {number for number in again if number is not None}
            costs.add_requests(stores.requests())
        if not waiting:
            return commits
    commits.outdated |= dict.fromkeys(waiting, "others keep committing to it")
    return commits


def finish(commits: Commits, done: Collection[int], reading: Reading, costs: Costs) -> None:
    """Take away the records of tables whose files are all gone."""
    stores = Stores(reading.opening)
    by_store: dict[Location, list[str]] = {}
    for number in done:
        for uri in commits.records.get(number, ()):
            found = place(uri)
            if found is not None:
                by_store.setdefault(found.store, []).append(found.key)
    for store, keys in by_store.items():
        try:
            for start in range(0, len(keys), 1000):
                stores(store).delete(keys[start : start + 1000])
            for directory in {key.rpartition("/")[0] for key in keys}:
                stores(store).prune_directory(directory)
        except LakewardenError as error:
            commits.warnings.append(f"records were left in {store.uri}: {error.message}")
    costs.add_requests(stores.requests())


def _going_ids(plan: Plan, tables: Sequence[int]) -> dict[int, frozenset[int]]:
    if not tables:
        return {}
    rows = (
        plan.versions.filter(~F.col("kept") & F.col("root_id").isin(list(tables)))
        .groupBy("root_id")
        .agg(F.collect_list("version").alias("ids"))
        .collect()
    )
    return {row.root_id: frozenset(row.ids) for row in rows}


def _look(lake: Lake, plan: Plan, commits: Commits) -> dict[int, Pointer]:
    """Ask the catalogs where the plan's tables are now, those that are only read, too."""
    tables = {t.table_id: t for t in plan.tables if t.metadata_location is not None}

    def ask(number: int) -> tuple[int, Pointer | LakewardenError]:
        try:
            return number, lake.locate(CatalogTarget.parse(tables[number].table_key))
        except LakewardenError as error:
            return number, error

    heads: dict[int, Pointer] = {}
    for number, answer in concurrently(ask, sorted(tables), _TOGETHER):
        if not isinstance(answer, LakewardenError):
            heads[number] = answer
        elif tables[number].goes_ahead or answer.kind is not ErrorKind.NOT_FOUND:
            # A table that is gone needs nothing.
            _fail(plan, commits, {number: answer})
    return heads


def _fail(plan: Plan, commits: Commits, errors: Mapping[int, LakewardenError]) -> None:
    """Record that tables could not be looked at; what those may need, the others keep."""
    going = {table.table_id for table in plan.tables if table.goes_ahead}
    for number, error in errors.items():
        if number in going:
            commits.failed[number] = error
        else:
            reason = f"a table that may need its files could not be looked at ({error.message})"
            commits.outdated |= dict.fromkeys(going, reason)


def _compare(
    plan: Plan,
    heads: Mapping[int, Pointer],
    reading: Reading,
    costs: Costs,
    commits: Commits,
) -> None:
    """Find out whether tables that have changed contradict the plan."""
    seen = {table.table_id: table.metadata_location for table in plan.tables}
    moved = {n: head for n, head in heads.items() if head.metadata_location != seen[n]}
    # What was committed by us a moment ago has moved, too.
    moved = {n: head for n, head in moved.items() if n not in commits.expired}
    if not moved:
        return
    tables = {table.table_id: table for table in plan.tables}
    sources = [
        Source(
            n,
            head.metadata_location,
            tables[n].goes_ahead,
            again=True,
            held=plan.held.get(n),
        )
        for n, head in moved.items()
    ]
    # By the same rules and at the same moment: what differs is what has changed.
    rule = Rule(plan.expiry, to_millis(plan.made_at))
    facts, noted = settle(
        metadata.tables(reading.spark, sources, rule, reading.opening, tasks=reading.tasks)
    )
    costs.add_noted(noted, "text", "size")
    _fail(plan, commits, errors_in(noted, "table_id", "text"))
    now = {row.table_id: summary_of(row.text) for row in noted if row.note == NOTE_TABLE}
    commits.outdated |= _replaced(plan, now) | _refs_moved(plan, now)
    second = _SecondLook(plan, reading, costs, facts)
    commits.outdated |= second.contradictions([n for n in moved if n in now])
    _fail(plan, commits, second.failed)


def _replaced(plan: Plan, now: Mapping[int, Summary]) -> dict[int, str]:
    places = {root.root_id: root.location for root in plan.roots}
    tables = {table.table_id: table for table in plan.tables}
    return {
        number: "it was dropped and made again, or moved, meanwhile"
        for number, summary in now.items()
        if tables[number].goes_ahead
        and (place(summary.location) != places[number] or summary.uuid != tables[number].uuid)
    }


def _refs_moved(plan: Plan, now: Mapping[int, Summary]) -> dict[int, str]:
    """Find tables of which a ref was to expire and now would not."""
    return {
        table.table_id: "a tag or branch that was to expire has moved meanwhile"
        for table in plan.tables
        if table.table_id in now
        and not set(table.expired_refs) <= set(now[table.table_id].expired_refs)
    }


@dataclass(slots=True)
class _SecondLook:
    """Compares what is named now, and was not then, with what is about to go."""

    plan: Plan
    reading: Reading
    costs: Costs
    facts: DataFrame
    failed: dict[int, LakewardenError] = field(default_factory=dict)

    def contradictions(self, tables: Sequence[int]) -> dict[int, str]:
        """Return the tables of which something is needed that was to go, and why."""
        if not tables:
            return {}
        now = self.facts.filter(F.col("what") == SNAPSHOT)
        then = self.plan.versions.filter(F.col("root_id").isin(list(tables))).select(
            F.col("root_id").alias("table_id"),
            "version",
            F.col("kept").alias("stays"),
            F.col("reasons").contains("head of").alias("was_head"),
        )
        both = now.join(then, on=["table_id", "version"], how="full_outer")
        trouble = both.filter(~F.col("stays") & F.expr("coalesce(kept, true)"))
        found = {
            row.table_id: "a snapshot that was to go now stays, or somebody else is expiring"
            for row in trouble.select("table_id").distinct().collect()
        }
        return found | self._needed(both)

    def _needed(self, both: DataFrame) -> dict[int, str]:
        """Open what is new, and find tables of which it names something that is about to go."""
        columns = self.facts.columns
        fresh = both.filter(F.col("stays").isNull()).select(*columns)
        # What heads named then was read then.  They are opened again, to tell new from known.
        heads = both.filter(F.col("was_head") & F.col("kept")).select(*columns)
        listed = self._read(
            fresh.withColumns({"open": F.lit(True), "kept": F.lit(True)})
            .unionByName(heads.withColumns({"open": F.lit(True), "kept": F.lit(False)}))
            .unionByName(self.facts.filter("what != 'snapshot'").withColumn("open", F.lit(False))),
            snapshots.lists,
        )
        named, known = listed.filter("kept"), listed.filter("NOT kept")
        manifests = named.filter("uri IS NOT NULL")
        unknown = manifests.join(
            known.select("uri").distinct(), on="uri", how="left_anti"
        ).withColumn("tables", F.col("table_id").cast("string"))
        needed = snapshots.rooted(
            named.unionByName(self._read(unknown, snapshots.contents)), self.plan.roots
        )
        doomed = snapshots.with_whole_paths(
            self.plan.deletions.select("table_id", "root_id", "key", "stem"), self.plan.roots
        )
        by_key = needed.select("root_id", "key").distinct()
        by_path = needed.filter("bare IS NOT NULL").select(F.col("bare").alias("stem")).distinct()
        hit = doomed.join(by_key, on=["root_id", "key"], how="left_semi").unionByName(
            doomed.join(by_path, on="stem", how="left_semi")
        )
        reason = "what was committed meanwhile needs files that were about to go"
        return {row.table_id: reason for row in hit.select("table_id").distinct().collect()}

    def _read(self, rows: DataFrame, stage: Callable[..., DataFrame]) -> DataFrame:
        places = {
            root.root_id: root.location
            for root in self.plan.roots
            if root.format is Format.ICEBERG and root.owned and root.location.scheme != "iceberg"
        }
        data, noted = settle(
            stage(rows, places, self.reading.opening, Equality(), tasks=self.reading.tasks)
        )
        self.costs.add_noted(noted, "text", "size")
        self.failed |= errors_in(noted, "table_id", "text")
        return data


@dataclass(slots=True)
class _Committing:
    """Commits to tables, one at a time each."""

    lake: Lake
    stores: Stores
    reading: Reading
    commits: Commits
    door: Turnstile

    def commit(self, job: tuple[TablePlan, Pointer, frozenset[int]]) -> int | None:
        """Commit one table's removal; return its number if it must be looked at again."""
        table, head, ids = job
        number = table.table_id
        if not self.door.lets(table.table_key):
            self.commits.closed.add(number)
            return None
        now_ms = to_millis(self.reading.clock.now())
        try:
            record = self._record(table, head)
        except LakewardenError as error:
            self.commits.failed[number] = error
            return None
        # Whoever was held up on the way asks again.
        if not self.door.lets(table.table_key):
            self._forget(record)
            self.commits.closed.add(number)
            return None
        try:
            commit = self.lake.committing(head, self.stores)
            done = commit.remove(Removal(ids, table.expired_refs), now_ms=now_ms)
        except Conflict as error:
            if not error.landed:
                # There is nothing to resume.
                self._forget(record)
            return number
        except Damaged as error:
            # Somebody must look at it before anything of it goes.
            self._forget(record)
            self.commits.failed[number] = error
            return None
        except LakewardenError as error:
            # It may have landed; the record stays, and the next run finds out.
            self.commits.failed[number] = error
            return None
        self.commits.expired[number] = len(ids)
        # Where the commit was a swap, nobody else's that started from the same file can land.
        swapped = done.writes_metadata and head.metadata_location == table.metadata_location
        self.commits.records[number] = (*table.pending, record, *(table.rivals if swapped else ()))
        # What is not dropped is left over, and goes with other orphan files.
        if done.writes_metadata and self.door.lets(table.table_key):
            current = place(done.metadata_location)
            self._drop(
                dropped_metadata_files(
                    done.log_before,
                    head.metadata_location,
                    done.log_after,
                    done.properties,
                    default_enabled=False,
                ),
                current.parent if current is not None else None,
            )
        return None

    def _record(self, table: TablePlan, head: Pointer) -> str:
        directory = head.metadata_location.rpartition("/")[0]
        uri = f"{directory}/{PENDING}/{fresh_id()}.json"
        found = place(uri)
        if found is None:
            raise LakewardenError(
                ErrorKind.UNKNOWN_SCHEME, f"{uri} lies in no store that can be reached from here"
            )
        record = {"format": 1, "table": table.table_key, "metadata": head.metadata_location}
        self.stores(found).put_if_absent(found.key, json.dumps(record).encode())
        return uri

    def _forget(self, record: str) -> None:
        found = place(record)
        if found is None:
            return
        try:
            self.stores(found).delete([found.key])
            self.stores(found).prune_directory(found.parent.path)
        except LakewardenError as error:
            self.commits.warnings.append(f"{record} was left: {error.message}")

    def _drop(self, files: Sequence[str], home: Location | None) -> None:
        """Delete metadata files that have fallen out of the log; a failure is no harm.

        A log may name files of another table, which was copied or registered: those stay.
        """
        for uri in files:
            found = place(uri)
            if found is None or found.parent != home:
                continue
            try:
                results = self.stores(found).delete([found.key])
            except LakewardenError as error:
                results = [DeleteResult(found.key, Deletion.FAILED, error.message)]
            for result in results:
                if result.outcome is Deletion.FAILED:
                    self.commits.warnings.append(f"{uri} could not be deleted: {result.error}")
