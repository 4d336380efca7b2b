"""Measure commits to a warehouse against the formats' own, and what opening it costs.

Writers are processes.  Each appends one row at a time, to one table that all share or to a table of its
own, through Lakewarden and, in the same run on the same disk, through plain pylance or PyIceberg's SQL
catalog on SQLite.

PARTS names the parts for `scripts/bench`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog

from lakewarden.model import Format
from lakewarden.testing.memory import MemoryStore
from lakewarden.warehouse.commit import Log, stands
from lakewarden.warehouse.handlers import StoreHandler
from lakewarden.warehouse.iceberg import WarehouseCatalog
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.manifest import Change, Operation, Pin, Table, Transaction
from lakewarden.warehouse.warehouse import Warehouse
from lakewarden.world import SystemChance, SystemClock, fresh_id

PARTS = ("warehouse-commits", "warehouse-opening")
WRITERS = (1, 4, 16)
#: How long writers of each case write.
SECONDS = 6.0
SIZES = (10, 100, 1000, 10_000)
SCHEMA = pa.schema([("id", pa.int64())])
ROWS = pa.table({"id": [1]})
KINDS = ("lance", "pylance", "iceberg", "pyiceberg", "lance, no backoff")

Found = dict[str, Any]


def catalog_of(place: Path, kind: str) -> Catalog:
    if kind == "iceberg":
        return WarehouseCatalog("lake", opened=Warehouse.open(str(place / "lake")))
    return load_catalog(
        "lake", type="sql", uri=f"sqlite:///{place}/catalog.db", warehouse=f"file://{place}/files"
    )


def appender(place: Path, kind: str, table: int) -> Callable[[], object]:
    """Return what appends one row, and tries again for as long as others are in the way."""
    if kind == "pylance":
        return lambda: lance.write_dataset(ROWS, f"{place}/t{table}.lance", mode="append")
    if kind.startswith("lance"):
        space, name = Namespace(Warehouse.open(str(place / "lake"))), [f"t{table}"]
        return lambda: lance.write_dataset(
            ROWS, namespace_client=space, table_id=name, mode="append"
        )
    catalog = catalog_of(place, kind)
    return lambda: catalog.load_table(f"db.t{table}").append(ROWS)


def make(place: Path, kind: str, tables: int) -> None:
    if kind.startswith(("lance", "iceberg")):
        Warehouse.init(str(place / "lake"))
    for table in range(tables):
        if kind == "pylance":
            lance.write_dataset(ROWS, f"{place}/t{table}.lance")
        elif kind.startswith("lance"):
            space = Namespace(Warehouse.open(str(place / "lake")))
            lance.write_dataset(ROWS, namespace_client=space, table_id=[f"t{table}"], mode="create")
        else:
            catalog = catalog_of(place, kind)
            catalog.create_namespace_if_not_exists("db")
            catalog.create_table(f"db.t{table}", SCHEMA)


def write(place: Path, kind: str, table: int, seconds: float) -> None:
    """Be a writer: commit when told to for some seconds, and tell how long each took."""
    if kind.endswith("no backoff"):
        from lakewarden.warehouse import backoff  # noqa: PLC0415

        for wait in ("after", "beside"):
            setattr(backoff.SlotBackoff, wait, lambda _self, _seconds: 0.0)
    append = appender(place, kind, table)
    warm = False
    while not warm:
        # All of them warm up at once, and some are outrun.
        with suppress(Exception):
            append()
            warm = True
    print("ready", flush=True)
    sys.stdin.readline()
    spent, failed = [], 0
    began = time.time()
    started = time.perf_counter()
    while time.time() < began + seconds:
        try:
            append()
        except Exception:  # noqa: BLE001  # whatever it is called, somebody was in the way
            failed += 1
            continue
        spent.append(time.perf_counter() - started)
        started = time.perf_counter()
    told = {"began": began, "ended": time.time(), "seconds": spent, "failed": failed}
    print(json.dumps(told), flush=True)


def commits(kind: str, writers: int, *, shared: bool) -> Found:
    with tempfile.TemporaryDirectory() as place:
        make(Path(place), kind, 1 if shared else writers)
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--write", place, kind, str(0 if shared else number),
                 str(SECONDS)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for number in range(writers)
        ]  # fmt: skip
        for process in processes:
            assert process.stdout is not None
            while process.stdout.readline().strip() != "ready":
                assert process.poll() is None
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [_last(process) for process in processes]
    spent = sorted(one for line in told for one in line["seconds"])
    wall = max(line["ended"] for line in told) - min(line["began"] for line in told)
    return {
        "kind": kind,
        "writers": writers,
        "shared": shared,
        "per_second": len(spent) / wall,
        "median": statistics.median(spent) if spent else 0.0,
        "worst": spent[-1] if spent else 0.0,
        "failed": sum(line["failed"] for line in told),
    }


def _last(process: subprocess.Popen[str]) -> Found:
    out, _ = process.communicate()
    found: Found = json.loads(out.strip().splitlines()[-1])
    return found


def opening() -> list[Found]:
    """Measure opening and committing at several numbers of versions and of tables, in requests too."""
    lines = [_opened("versions", size) for size in SIZES]
    return [*lines, *(_opened("tables", size) for size in SIZES)]


def _opened(what: str, size: int) -> Found:
    store = MemoryStore()

    def log() -> Log:
        handler = StoreHandler(store, "w/_versions")
        return Log(handler, store, "w", SystemClock(), SystemChance())

    def made(number: int) -> Change:
        name = f"t{number}"
        pin = Pin(1, f"_versions/{number:020d}.manifest-{fresh_id()}", 1000)
        table = Table(fresh_id(), (name,), Format.LANCE, f"/lake/tables/{name}")
        return Change(Operation.CREATE, table.id, after=pin, name=(name,), made=table)

    writer = log()
    tables = size if what == "tables" else 10
    first = Transaction(fresh_id(), 0, tuple(made(number) for number in range(tables)))
    head = writer.commit(writer.head(), first, stands)
    chosen = next(iter(head.manifest.tables))

    def append(head: Any, writer: Log) -> Any:
        pin = head.manifest.pins()[chosen]
        after = Pin(pin.version + 1, f"_versions/{fresh_id()}", 1000)
        change = Change(Operation.APPEND, chosen, pin, after)
        return writer.commit(head, Transaction(fresh_id(), head.version, (change,)), stands)

    for _ in range((size if what == "versions" else 40) - 1):
        head = append(head, writer)
    store.requests.drain()
    started = time.perf_counter()
    reader = log()
    head = reader.head()
    opened = time.perf_counter()
    opening_requests = sum(store.requests.drain().values())
    append(head, reader)
    return {
        "what": what,
        "size": size,
        "open_seconds": opened - started,
        "open_requests": opening_requests,
        "commit_seconds": time.perf_counter() - opened,
        "commit_requests": sum(store.requests.drain().values()),
    }


def measure(parts: list[str], keep: Callable[[Found], None]) -> None:
    if "warehouse-opening" in parts:
        found = opening()
        for line in found:
            print("  opening", line, flush=True)
        keep({"opening": found})
    if "warehouse-commits" in parts:
        lines = []
        for shared in (True, False):
            for writers in WRITERS:
                for kind in KINDS:
                    lines.append(commits(kind, writers, shared=shared))
                    print("  commits", lines[-1], flush=True)
        keep({"commits": lines})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--write", place, kind, table, number]:
            write(Path(place), kind, int(table), float(number))
