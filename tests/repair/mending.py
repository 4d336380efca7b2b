"""Repair of small warehouses, and what others do to tables behind their backs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from pyspark.sql import SparkSession

from lakewarden.maintenance import repair
from lakewarden.maintenance.repair import RepairPlan, RepairReceipt, Request, Row
from lakewarden.maintenance.survey import Reading
from lakewarden.storage.opening import Opener
from lakewarden.warehouse.warehouse import Warehouse
from lakewarden.world import SystemClock
from tests.warehouse.lakes import reopen

NOW = timedelta(0)


@dataclass(frozen=True)
class Mender:
    """Plans and executes, each time as another process would."""

    spark: SparkSession
    root: Path

    def plan(
        self,
        *,
        opening: Callable[..., Any] | None = None,
        later: timedelta = NOW,
        **asked: Any,
    ) -> RepairPlan:
        """Plan as if it were later."""
        opening = opening or Opener({})
        reading = Reading(self.spark, opening, SystemClock(), 2)
        found = Warehouse.unread(str(self.root), opener=opening)
        return repair.plan(found, Request(**asked), reading, now=SystemClock().now() + later)

    def execute(self, plan: RepairPlan, opening: Callable[..., Any] | None = None) -> RepairReceipt:
        """Do what was planned, through another warehouse object."""
        found = Warehouse.unread(str(self.root), opener=opening or Opener({}))
        return repair.execute(replace(plan, warehouse=found))

    def run(self, **asked: Any) -> RepairReceipt:
        return self.execute(self.plan(confirm=True, **asked))

    def newest(self) -> int:
        return reopen(self.root).known.version


def row_of(told: RepairPlan | RepairReceipt, key: str = "db.t", branch: str = "main") -> Row:
    """Return the one row of a table on a branch."""
    (found,) = (row for row in told.rows if row.line.key == key and row.line.branch == branch)
    return found


def said(row: Row) -> tuple[str, str, list[str]]:
    """Return what a row says in the words of the documentation."""
    line = row.line
    operations = [step.operation for step in line.steps]
    return line.classification.value, row.action.value, operations


def versions(row: Row) -> tuple[int, int | None]:
    """Return the versions of pin and head."""
    return row.line.pin.version, row.line.head.version if row.line.head is not None else None


def compact(place: Path | str) -> None:
    """Compact a table past the warehouse."""
    lance.dataset(str(place)).optimize.compact_files()


def append(place: Path | str, *ids: int) -> None:
    """Write rows past the warehouse."""
    rows = pa.table({"id": pa.array(ids, pa.int64())})
    lance.write_dataset(rows, str(place), mode="append")


def ids_at(place: Path | str, version: int | None = None) -> list[int]:
    """Read a table by its path."""
    found: list[int] = lance.dataset(str(place), version=version).to_table()["id"].to_pylist()
    return sorted(found)


def transaction_of(place: Path, version: int) -> Path:
    """Return the file that says what a version changed."""
    from lakewarden.formats.lance.manifest import transaction_file

    manifest = place / "_versions" / f"{2**64 - 1 - version:020d}.manifest"
    return place / "_transactions" / transaction_file(manifest.read_bytes())
