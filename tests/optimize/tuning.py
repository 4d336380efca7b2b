"""Tables that are worth optimizing, and what must be the same afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from pyspark.sql import SparkSession

from lakewarden.maintenance import optimize
from lakewarden.maintenance.fleet import parse_targets
from lakewarden.maintenance.optimize import Plan, Receipt, Request
from lakewarden.maintenance.places import Alone, Place, Together, Visit
from lakewarden.maintenance.survey import Reading
from lakewarden.packing import Rules
from lakewarden.storage.opening import Opener
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.warehouse import Warehouse
from lakewarden.world import SystemClock

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])


@dataclass
class Tuner:
    """Optimizes, with one Spark session."""

    spark: SparkSession

    @property
    def reading(self) -> Reading:
        return Reading(self.spark, Opener(), SystemClock(), 2)

    def plan(self, place: Place, **rules: Any) -> Plan:
        where = rules.pop("where", None)
        return optimize.plan(place, Request(Rules(**rules), where), self.reading)

    def execute(self, planned: Plan) -> Receipt:
        return optimize.execute(planned, self.reading)

    def run(self, place: Place, **rules: Any) -> Receipt:
        return self.execute(self.plan(place, **rules))


def alone(*paths: Path, recursive: bool = False, **options: Any) -> Alone:
    return Alone(
        parse_targets([str(path) for path in paths], recursive=recursive), Opener(), **options
    )


def together(root: Path, **options: Any) -> Together:
    return Together(Warehouse.open(str(root)), **options)


@dataclass
class Interrupted(Together):
    """Lets something happen right before everything is published."""

    act: Callable[[], None] = lambda: None

    @contextmanager
    def visiting(self) -> Iterator[Visit]:
        with super().visiting() as visit:
            yield visit
            self.act()


def some(start: int, number: int = 100) -> pa.Table:
    ids = list(range(start, start + number))
    return pa.table({"id": ids, "text": [f"word{one % 7} of {one}" for one in ids]}, schema=SCHEMA)


def in_pieces(root: Path, pieces: int = 6, *, start: int = 0, **options: Any) -> Path:
    """Make a Lance table of many small fragments."""
    for at in range(pieces):
        mode = "append" if at or root.exists() else "create"
        lance.write_dataset(some((start + at) * 100), str(root), mode=mode, **options)
    return root


def add(root: Path, start: int, number: int = 100) -> None:
    lance.write_dataset(some(start, number), str(root), mode="append")


class Lake:
    """A warehouse with Lance tables of small fragments."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.warehouse = Warehouse.init(str(root))

    def namespace(self) -> Namespace:
        return Namespace(Warehouse.open(str(self.root)))

    def write(self, name: str, start: int, mode: str = "append", number: int = 100) -> None:
        lance.write_dataset(
            some(start, number), namespace_client=self.namespace(), table_id=["db", name], mode=mode
        )

    def fill(self, name: str, pieces: int = 6) -> None:
        for at in range(pieces):
            self.write(name, at * 100, "append" if at else "create")

    def open(self, name: str, version: int | None = None) -> Any:
        return lance.dataset(
            namespace_client=self.namespace(), table_id=["db", name], version=version
        )

    def place(self, **options: Any) -> Together:
        return together(self.root, **options)

    @property
    def version(self) -> int:
        return Warehouse.open(str(self.root)).known.version

    def path(self, name: str) -> Path:
        view = Warehouse.open(str(self.root)).read()
        return Path(view.table(("db", name)).location)


def rows(found: Any) -> Counter[tuple[Any, ...]]:
    """Return the rows of a table, each as often as it is there."""
    return Counter(tuple(row.values()) for row in found.to_table().to_pylist())


def unindexed(found: Any, name: str) -> int:
    """Return what Lance itself says of fragments that an index does not cover."""
    return int(found.stats.index_stats(name)["num_unindexed_fragments"])


def uses_index(found: Any, predicate: str) -> bool:
    return "ScalarIndexQuery" in found.scanner(filter=predicate).explain_plan()


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
