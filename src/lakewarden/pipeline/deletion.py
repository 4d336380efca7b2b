"""Delete the files of a plan in batches, and say what became of each.

Batches mix tables: a request carries up to a thousand keys of one store, whoever owns them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, groupby
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from lakewarden.errors import LakewardenError
from lakewarden.model import FileKind
from lakewarden.pipeline.frames import (
    Opening,
    Root,
    Stage,
    Stores,
    batches,
    concurrently,
    request_notes,
    spread,
    sql,
)
from lakewarden.storage.location import Location
from lakewarden.storage.store import DELETE_BATCH_MAX, DeleteResult, Deletion
from lakewarden.world import Clock

Row = dict[str, Any]
#: What became of the files of one table and kind.  A file that is left, where some may be late, has a
#: row and a place of its own, so that it can be tried again.
RECEIPTS = pa.schema(
    [
        ("table_id", pa.int32()),
        ("kind", pa.string()),
        ("outcome", pa.string()),
        ("files", pa.int64()),
        ("bytes", pa.int64()),
        ("error", pa.string()),
        ("note", pa.string()),
        ("root_id", pa.int32()),
        ("path", pa.string()),
        ("version", pa.int64()),
    ]
)
COLUMNS = ("table_id", "root_id", "path", "kind", "size", "version")
#: Bulk requests one task keeps in flight.
_BATCHES_IN_FLIGHT = 16
#: What becomes of a manifest while something that it names is still there.
HELD = "held"
#: What becomes of files whose turn came when nobody was allowed to delete them any more.
LATE = "late"
#: What became of files that are not there any more.
OVER = frozenset({Deletion.DELETED.value, Deletion.MISSING.value})
#: Files that name others go after those, so that whoever resumes still finds what is left.
_LATER = {
    FileKind.MANIFEST: 1,
    FileKind.MANIFEST_FILE: 1,
    FileKind.MANIFEST_LIST: 2,
    FileKind.METADATA: 3,
}
#: Directories that go when they are empty: of index segments and of blob sidecars.
_PRUNABLE = re.compile(r"(?:tree/.+/)?(?:_indices/.+|data/[^/]+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast deletion may go: keys per second over the whole job, None for no limit."""

    tasks: int
    keys_per_second: float | None
    clock: Clock
    #: Batches that would begin later are left; None for no end.
    until: datetime | None = None


def delete_content(
    files: DataFrame, roots: Sequence[Root], opening: Opening, pace: Pace
) -> DataFrame:
    """Delete files that name no others, in any order; returns RECEIPTS."""
    cut = files.select(*COLUMNS).coalesce(pace.tasks)
    return cut.mapInArrow(_deleter(roots, opening, pace), sql(RECEIPTS))


def delete_in_order(
    files: DataFrame, roots: Sequence[Root], opening: Opening, pace: Pace
) -> DataFrame:
    """Delete each table's manifests after its other files, oldest first; returns RECEIPTS.

    Manifests go one batch after the other, so that a crash leaves no gap below.  Those of a table
    of which something could not be deleted stay, and are reported as held.
    """
    together = spread(files.select(*COLUMNS), pace.tasks, "table_id")
    ordered = together.sortWithinPartitions(turn(), "version", "table_id", "path")
    return ordered.mapInArrow(_deleter(roots, opening, pace), sql(RECEIPTS))


def turn() -> Column:
    """Return when a file's turn to go comes: 0 for all that name no others."""
    kind = F.col("kind")
    turns = F.lit(0)
    for one, number in _LATER.items():
        turns = F.when(kind == one.value, F.lit(number)).otherwise(turns)
    return turns


def _deleter(roots: Sequence[Root], opening: Opening, pace: Pace) -> Stage:
    def delete_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = _Task({root.root_id: root for root in roots}, Stores(opening), pace)
        rate = pace.keys_per_second / pace.tasks if pace.keys_per_second else None
        # Below a thousand keys a second, smaller batches keep the pace even.
        size = DELETE_BATCH_MAX if rate is None else max(1, min(DELETE_BATCH_MAX, int(rate)))
        outcome: dict[_Became, list[int]] = {}
        rows = (row for batch in incoming for row in batch.to_pylist())
        for in_order, part in groupby(rows, lambda row: _LATER.get(FileKind(row["kind"]), 0)):
            groups = _by_store(part, task, size)
            if rate is not None:
                groups = _paced(groups, rate, pace.clock)
            delete = task.delete_manifests if in_order else task.delete
            in_flight = 1 if rate is not None or in_order else _BATCHES_IN_FLIGHT
            for row, result, error in chain.from_iterable(concurrently(delete, groups, in_flight)):
                left = pace.until is not None and result not in OVER
                place = (row["root_id"], row["path"], row["version"]) if left else (None,) * 3
                became = _Became(row["table_id"], row["kind"], result, error, *place)
                total = outcome.setdefault(became, [0, 0])
                total[0] += 1
                total[1] += row["size"] or 0
        yield from batches(_receipts(outcome), RECEIPTS)
        yield from request_notes(task.stores.requests(), RECEIPTS, "kind", "files")

    return delete_batches


class _Became(NamedTuple):
    """What files have in common that are counted together."""

    table_id: int
    kind: str
    outcome: str
    error: str
    root_id: int | None
    path: str | None
    version: int | None


class _Task:
    """Deletes batches, and remembers the tables of which something could not be deleted."""

    def __init__(self, roots: Mapping[int, Root], stores: Stores, pace: Pace) -> None:
        self.roots = roots
        self.stores = stores
        self._pace = pace
        self._failed: set[int] = set()

    def delete(self, rows: Sequence[Row]) -> list[tuple[Row, str, str]]:
        """Delete one batch; say of every row what became of it, and why."""
        if self._pace.until is not None and self._pace.clock.now() >= self._pace.until:
            # Manifests of these tables have to wait, too.
            self._failed.update(row["table_id"] for row in rows)
            return [(row, LATE, "") for row in rows]
        results = self._attempt(rows)
        failed = [row for row, one in results if one.outcome is Deletion.FAILED]
        self._failed.update(row["table_id"] for row in failed)
        self._prune(row for row, one in results if one.outcome is not Deletion.FAILED)
        return [(row, one.outcome.value, one.error) for row, one in results]

    def delete_manifests(self, rows: Sequence[Row]) -> list[tuple[Row, str, str]]:
        """Delete one batch, without those of tables that still have something older."""
        held = [row for row in rows if row["table_id"] in self._failed]
        free = [row for row in rows if row["table_id"] not in self._failed]
        return (self.delete(free) if free else []) + [(row, HELD, "") for row in held]

    def _attempt(self, rows: Sequence[Row]) -> list[tuple[Row, DeleteResult]]:
        keys = [self.roots[row["root_id"]].key(row["path"]) for row in rows]
        try:
            results = self.stores(self.roots[rows[0]["root_id"]].location).delete(keys)
        except LakewardenError as error:
            results = [DeleteResult(key, Deletion.FAILED, error.message) for key in keys]
        return list(zip(rows, results, strict=True))

    def _prune(self, rows: Iterable[Row]) -> None:
        """Remove directories (of index segments, of sidecars) that deletion has emptied."""
        directories = {(row["root_id"], row["path"].rpartition("/")[0]) for row in rows}
        for root_id, directory in directories:
            root, left = self.roots[root_id], directory
            while _PRUNABLE.fullmatch(left):
                if not self.stores(root.location).prune_directory(root.key(left)):
                    break
                left = left.rpartition("/")[0]


def _by_store(rows: Iterable[Row], task: _Task, size: int) -> Iterator[tuple[Row, ...]]:
    """Group rows into batches that one request can carry, keeping their order per store."""
    pending: dict[Location, list[Row]] = {}
    for row in rows:
        at = task.roots[row["root_id"]].location
        group = pending.setdefault(task.stores.scope(at), [])
        group.append(row)
        if len(group) == size:
            yield tuple(group)
            group.clear()
    for group in pending.values():
        if group:
            yield tuple(group)


def _paced(
    groups: Iterable[tuple[Row, ...]], rate: float, clock: Clock
) -> Iterator[tuple[Row, ...]]:
    """Let each batch wait until the batches before it have used up their time."""
    free_at = clock.elapsed()
    for group in groups:
        clock.sleep(max(0.0, free_at - clock.elapsed()))
        free_at = max(free_at, clock.elapsed()) + len(group) / rate
        yield group


def _receipts(outcome: Mapping[_Became, list[int]]) -> Iterator[Row]:
    for became, (files, size) in outcome.items():
        yield {**became._asdict(), "files": files, "bytes": size}
