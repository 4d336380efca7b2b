"""A service without its HTTP side: a database, warehouses of each kind, and a runner on real Spark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from pyiceberg.table import Table

from lakewarden.jobs.commits import Commits
from lakewarden.jobs.control import Action, TaskControl
from lakewarden.jobs.database import Database, open_database
from lakewarden.jobs.discovery import Discovery
from lakewarden.jobs.listing import TaskLists
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import DAY_SECONDS, EXPIRE_SNAPSHOTS, OPTIMIZE, REMOVE_ORPHAN_FILES
from lakewarden.jobs.running import Engine, Runner
from lakewarden.jobs.schema import SLOT
from lakewarden.jobs.tasks import Attempt, NewTask, Origin, Scope, TaskDetails
from lakewarden.jobs.warehouses import (
    Access,
    TableEntity,
    WarehouseInfo,
    WarehouseKind,
    Warehouses,
)
from lakewarden.testing import iceberg, tables
from lakewarden.world import SystemChance, SystemClock
from tests.jobs.small import logged, store

ON = {
    EXPIRE_SNAPSHOTS: "enable-expire-snapshots",
    REMOVE_ORPHAN_FILES: "enable-remove-orphan-files",
    OPTIMIZE: "enable-optimize",
}
DAY_MS = DAY_SECONDS * 1000


@dataclass
class Later(SystemClock):
    """The machine's clock, ahead by so much: what was written just now is old."""

    ahead: timedelta

    def now(self) -> datetime:
        return super().now() + self.ahead


@dataclass
class Lab:
    """What a worker process has, in this one."""

    database: Database
    engine: Engine
    stop: Event

    @classmethod
    def of(cls, database_url: str, spark: Any, **engine: Any) -> Lab:
        return cls(open_database(database_url), Engine(spark, 2, **engine), Event())

    @property
    def queue(self) -> TaskQueue:
        return TaskQueue(self.database, SystemChance())

    @property
    def warehouses(self) -> Warehouses:
        return Warehouses(self.database, SystemChance())

    @property
    def discovery(self) -> Discovery:
        return Discovery(self.warehouses, Commits(self.queue))

    @property
    def runner(self) -> Runner:
        return Runner(self.queue, self.warehouses, lambda: self.engine, self.stop)

    def later(self, ahead: timedelta = timedelta(days=30)) -> None:
        """Go on so much later."""
        self.database = replace(self.database, clock=Later(ahead))

    def paced(self, keys_per_second: float, batch_files: int) -> None:
        """Delete slowly, a few files between two questions."""
        self.engine = replace(self.engine, rate_limit=keys_per_second, batch_files=batch_files)

    # -- warehouses ------------------------------------------------------------------------------

    def register(
        self, kind: WarehouseKind, location: str, access: Access | None = None
    ) -> Registered:
        info = self.warehouses.register(f"{kind}-{location}", kind, location, access=access)
        return Registered(self, info)

    def lance(self, directory: Path) -> Registered:
        return self.register(WarehouseKind.LANCE, str(directory))

    def iceberg(self, root: Path) -> Registered:
        access = Access(catalog_properties=iceberg.catalog_properties(root))
        return self.register(WarehouseKind.ICEBERG, "lake", access)

    # -- tasks -----------------------------------------------------------------------------------

    def run(self, queue: str) -> int:
        """Pick what is due, all of it together, and run it; returns how many tasks there were."""
        claims = self.queue.pick(queue, limit=100)
        if claims:
            self.runner.run(claims)
        return len(claims)


@dataclass
class Registered:
    """A warehouse that the service looks after."""

    lab: Lab
    info: WarehouseInfo

    @property
    def scope(self) -> Scope:
        return Scope(self.info.project_id, self.info.id)

    def configure(self, queue: str, **config: Any) -> None:
        """Switch a queue on, with settings whose dashes are underscores here."""
        told = {name.replace("_", "-"): value for name, value in config.items()}
        store(self.lab.database, self.scope, queue, {ON[queue]: True} | told)

    def tables(self) -> dict[str, TableEntity]:
        found = self.lab.warehouses.refresh(self.info.id, self.lab.discovery.find(self.info.id))
        return {one.name[-1].removesuffix(".lance"): one for one in found}

    def ask(self, queue: str, *names: str, origin: Origin = Origin.MANUAL) -> list[UUID]:
        """Queue a task for each of these tables, or for all."""
        known = self.tables()
        now = self.lab.database.clock.now()
        made = self.lab.queue.enqueue(
            [NewTask(queue, self.scope, known[name].entity, now, origin) for name in names or known]
        )
        return [one for one in made if one is not None]

    def details(self, task: UUID) -> TaskDetails:
        return TaskLists(self.lab.database).details(self.scope, task)

    def attempts(self, task: UUID) -> tuple[Attempt, ...]:
        return self.details(task).attempts

    def failures(self, task: UUID) -> list[tuple[str, str]]:
        """Return how the attempts at a task have failed, with what was said of it."""
        rows = [row for row in logged(self.lab.database) if row.task_id == task]
        return [(row.failure, row.message) for row in rows if row.failure is not None]

    def result(self, task: UUID) -> dict[str, Any]:
        return dict(self.details(task).details or {})

    def slots(self, queue: str, *names: str) -> list[sa.Row[Any]]:
        """Return what is known of the runs of a queue at these tables."""
        known, now = self.tables(), self.lab.database.clock.now()
        wanted = [NewTask(queue, self.scope, known[name].entity, now).slot for name in names]
        with self.lab.database.reading() as connection:
            found = connection.execute(sa.select(SLOT).where(SLOT.c.slot.in_(wanted)))
            return sorted(found, key=lambda row: wanted.index(row.slot))

    def control(self, action: Action, *ids: UUID) -> None:
        TaskControl(self.lab.database).control(self.scope, action, list(ids))


# -- tables with a past ----------------------------------------------------------------------------


def lance_table(place: Path, versions: int = 6, days: float = 30) -> Path:
    """Make a table whose versions are all that old; each has a file of its own."""
    tables.overwritten(place, versions)
    return tables.age(place, days)


def lance_orphans(place: Path, number: int = 3, days: float = 30) -> list[Path]:
    return [tables.orphan(place, f"data/left-{step}.lance", days) for step in range(number)]


def iceberg_table(root: Path, name: str, snapshots: int = 6, **properties: str) -> Table:
    """Make a table with snapshots from a month ago, the head is younger than any rule."""
    table = iceberg.create(iceberg.catalog(root), f"db.{name}", properties=properties)
    iceberg.append(table, 0)
    for step in range(1, snapshots):
        # A delete and an append, two snapshots.
        iceberg.overwrite(table, step * 10)
    number = len(table.metadata.snapshots)
    iceberg.backdate(table, [30 - step / 10 for step in range(number - 1)] + [0.5])
    return table


def iceberg_orphans(table: Table, number: int = 3, days: float = 30) -> list[Path]:
    return [
        iceberg.orphan(table.location(), f"data/left-{step}.parquet", days)
        for step in range(number)
    ]
