"""Cleanup of small warehouses, the way the command line does it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
from pyiceberg.catalog import Catalog
from pyiceberg.table import Table as IcebergTable
from pyspark.sql import SparkSession

from lakewarden.maintenance import warehouse as maintenance
from lakewarden.maintenance.removal import Receipt
from lakewarden.maintenance.survey import Reading
from lakewarden.maintenance.warehouse import Request, WarehousePlan
from lakewarden.model import Format
from lakewarden.storage.opening import Opener
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.manifest import Change, Operation, Pin, Table
from lakewarden.warehouse.reclaiming import Rules
from lakewarden.warehouse.warehouse import Warehouse
from lakewarden.world import SystemClock
from tests.warehouse.lakes import IDS, catalog, id_rows, make, on_branch, reopen, write
from tests.warehouse.survivors import Survivors, path_of, survivors

#: Lets versions and tables of a moment ago go.
NOW = timedelta(0)


@dataclass(frozen=True)
class Cleaner:
    """Plans and executes; young files of writers may go only if asked for."""

    spark: SparkSession

    def reading(self, opening: Callable[..., Any] | None = None) -> Reading:
        return Reading(self.spark, opening or Opener({}), SystemClock(), 2)

    def plan(
        self, warehouse: Warehouse, request: Request, *, later: timedelta = NOW
    ) -> WarehousePlan:
        """Plan as if it were later: what was written just now is old then."""
        maintenance.publish(warehouse)
        now = SystemClock().now() + later
        return maintenance.plan(warehouse, request, self.reading(), now=now)

    def execute(self, plan: WarehousePlan, warehouse: Warehouse) -> Receipt:
        return maintenance.execute(replace(plan, warehouse=warehouse), self.reading())

    def run(
        self, warehouse: Warehouse, request: Request, *, later: timedelta = NOW
    ) -> tuple[WarehousePlan, Receipt]:
        """Clean, and see that nothing has failed."""
        plan = self.plan(warehouse, request, later=later)
        receipt = self.execute(plan, warehouse)
        assert {one.table_key: one.error for one in receipt.failed} == {}
        return plan, receipt


def before(version: int, **more: Any) -> Request:
    """Ask for the versions below one to go."""
    return Request(Rules(before_version=version, min_age=NOW), **{"log_age": NOW, **more})


def floor_here(warehouse: Warehouse) -> int:
    """Make a version that changes no table, and return it: what comes from here on is to stay."""
    warehouse.set_properties({"floor": "here"})
    return warehouse.refresh().version


def by_key(receipt: Receipt) -> dict[str, Any]:
    return {one.table_key: one for one in receipt.tables}


@dataclass
class Lake:
    """A warehouse on the local disk with short ways to write to it."""

    root: Path
    warehouse: Warehouse
    namespace: Namespace
    catalog: Catalog

    def lance(self, mode: str, name: str, *ids: int) -> Any:
        return write(self.namespace, mode, *ids, name=("db", name))

    def at(self, name: str) -> Any:
        """Open a Lance table through the warehouse."""
        return lance.dataset(namespace_client=self.namespace, table_id=["db", name])

    def create(self, name: str, *ids: int, branch: str = "main") -> IcebergTable:
        where = self.catalog if branch == "main" else on_branch(self.root, branch)
        table = where.create_table(f"db.{name}", IDS)
        if ids:
            table.append(id_rows(*ids))
        return table

    def iceberg(self, name: str, branch: str = "main") -> IcebergTable:
        where = self.catalog if branch == "main" else on_branch(self.root, branch)
        return where.load_table(f"db.{name}")

    def table(self, name: str) -> Table:
        return self.warehouse.read().table(("db", name))

    def place(self, table: Table | str) -> Path:
        return path_of((self.table(table) if isinstance(table, str) else table).location)

    def clone(self, source: str, name: str) -> Table:
        """Make a table of the warehouse that uses the files of another."""
        made = self.warehouse.declare(("db", name), Format.LANCE)
        found = lance.dataset(self.table(source).location)
        found.shallow_clone(made.location, reference=found.version)
        (manifest,) = (path_of(made.location) / "_versions").glob("*.manifest")
        pin = Pin(lance.dataset(made.location).version, f"_versions/{manifest.name}")
        self.warehouse.commit(
            [Change(Operation.OVERWRITE, made.id, None, pin)], base=self.warehouse.refresh()
        )
        return made

    def again(self) -> Warehouse:
        return reopen(self.root)


@dataclass
class Lab:
    """A warehouse that can be put back, a plan to clean it, and what must be left."""

    lake: Lake
    master: Path
    cleaner: Cleaner
    floor: int
    plan: WarehousePlan
    expected: Survivors

    def reset(self) -> None:
        # At the same place: Iceberg's metadata says where its files are.
        shutil.rmtree(self.lake.root)
        shutil.copytree(self.master, self.lake.root)

    def clean(self) -> None:
        self.cleaner.execute(self.plan, self.lake.again())


def laboratory(lake: Lake, master: Path, cleaner: Cleaner, floor: int) -> Lab:
    """Keep a copy of a warehouse, and plan to clean it up to a floor."""
    expected = survivors(lake.warehouse, floor)
    plan = cleaner.plan(lake.again(), before(floor))
    assert {one.table_key: one.error for one in plan.tables.tables if one.error} == {}
    shutil.copytree(lake.root, master)
    return Lab(lake, master, cleaner, floor, plan, expected)


def new_lake(root: Path, **options: Any) -> Lake:
    warehouse = make(root, **options)
    properties: Mapping[str, str] = (
        {"lakewarden.log-database": options["database"]} if "database" in options else {}
    )
    found = Lake(root, warehouse, Namespace(warehouse), catalog(root, **properties))
    found.catalog.create_namespace("db")
    return found
