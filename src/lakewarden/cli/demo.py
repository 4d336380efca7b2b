"""Builds small tables with a history, cleans them, and proves that every kept version still reads.

Lance tables and an Iceberg table in one run, as `lakewarden cleanup DIR iceberg://demo` would do it;
then a warehouse of both formats: a load of two tables, a tag, a bad load, going back, optimizing, cleaning.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StaticTable

from lakewarden.cli import output
from lakewarden.cli.session import Engine, cores, start
from lakewarden.errors import ErrorKind, LakewardenError
from lakewarden.maintenance import cleanup, optimize, removal
from lakewarden.maintenance import warehouse as warehouses
from lakewarden.maintenance.fleet import open_lake, parse_targets
from lakewarden.maintenance.places import Together
from lakewarden.maintenance.survey import Reading
from lakewarden.retention import OnTagged
from lakewarden.storage.opening import Opener
from lakewarden.warehouse import reclaiming
from lakewarden.warehouse.iceberg import WarehouseCatalog
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.lance import Reading as LanceReading
from lakewarden.warehouse.transaction import transaction
from lakewarden.warehouse.warehouse import View, Warehouse
from lakewarden.world import SystemClock

_DAY = 86400


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What one version of a table contains: enough to notice any loss."""

    table: str
    version: int
    rows: int
    total: int


def show(*, keep_directory: bool) -> None:
    """Run the demonstration; raise if anything that should have stayed is gone."""
    lance = _lance()
    clock = SystemClock()
    root = Path(tempfile.mkdtemp(prefix="lakewarden-demo-"))
    try:
        _say(f"building three Lance tables, a shallow clone and an Iceberg table in {root}")
        now = clock.now().timestamp()
        _build(lance, root / "lance", now)
        catalog = _iceberg(root / "iceberg", now)
        _say("starting local Spark")
        spark = start(Engine(archive=True))
        lake = open_lake(opened={"demo": catalog})
        reading = Reading(spark, Opener({}), clock, 2 * cores(), lake=lake)
        targets = parse_targets([str(root / "lance"), "iceberg://demo"], recursive=True)
        rules = cleanup.Rules(older_than=timedelta(days=14), keep=5, on_tagged=OnTagged.KEEP)
        policy, expiry = rules.for_targets(targets)
        request = cleanup.Cleanup(policy, expiry=expiry)

        _say(
            f"\n$ lakewarden cleanup {root}/lance iceberg://demo --recursive --older-than 14d "
            "--keep 5 --on-tagged keep"
        )
        plan = cleanup.plan(targets, request, reading, now=clock.now())
        _say(output.plan_text(plan, []))
        _say("preview: nothing was changed; add --confirm to remove")
        _say("\nplan.kept_versions(), in Python, says why versions stay:")
        for row in plan.kept_versions(10):
            name = output.version_name(row["version"], row["branch"])
            _say(f"  {Path(row['table_key']).name} {name}: {row['reasons']}")

        kept = [
            (row.root_id, row.branch, row.version)
            for row in plan.versions.filter("kept and not detached").collect()
        ]
        tables = {one.table_id: one.table_key for one in plan.tables}
        before = list(_fingerprints(lance, catalog, kept, tables))
        _say("\n$ … --confirm")
        receipt = removal.execute(plan, reading)
        _say(output.receipt_text(receipt))
        after = list(_fingerprints(lance, catalog, kept, tables))
        if receipt.failed or before != after:
            raise LakewardenError(ErrorKind.DAMAGED_VERSION, "a kept version reads differently now")
        _say(f"\nproof    all {len(after)} kept versions read the same rows as before")
        again = cleanup.plan(targets, request, reading, now=clock.now())
        if again.removal.files_removed:
            raise LakewardenError(ErrorKind.DAMAGED_VERSION, "a second run found more to remove")
        _say("proof    a second run finds nothing left to remove")
        show_warehouse(lance, root / "lake", reading)
        spark.stop()
    finally:
        if keep_directory:
            _say(f"left     {root}")
        else:
            shutil.rmtree(root)


def show_warehouse(lance: Any, place: Path, reading: Reading) -> None:
    """Fill a warehouse, undo a bad load, and clean up; raise if anything is not as it should be."""
    _say(f"\n$ lakewarden warehouse init {place}")
    warehouse = Warehouse.init(str(place), actor="demo")
    WarehouseCatalog("demo", opened=warehouse).create_namespace("shop")
    for step in range(12):
        with transaction(warehouse, message=f"load {step}") as tx:
            mode = "overwrite" if step else "create"
            rows = _rows(step * 10, 10)
            lance.write_dataset(
                rows, namespace_client=tx.lance, table_id=["shop", "vectors"], mode=mode
            )
            if not step:
                tx.iceberg.create_table("shop.orders", rows.schema)
            tx.iceberg.load_table("shop.orders").append(rows)
        if step == 3:
            warehouse.create_tag("training")
    good = warehouse.read()
    with transaction(warehouse, message="a bad load") as tx:
        tx.iceberg.load_table("shop.orders").delete("id >= 0")
    _say(f"$ lakewarden restore {place} --version {good.version}")
    warehouse.restore(good, message="undo the bad load")
    _say(f"$ lakewarden log {place} --limit 4")
    for logged in warehouse.history(4):
        _say(f"  {logged.version:>3}  {logged.transaction.message}")
    _optimize(lance, warehouse, place, reading)
    tagged, head = warehouse.read(tag="training"), warehouse.read()
    before = [_seen(lance, warehouse, view) for view in (tagged, good, head)]
    _say(f"$ lakewarden cleanup {place} --keep 4 --min-age 0s --confirm")
    request = warehouses.Request(reclaiming.Rules(keep=4, min_age=timedelta(0)))
    plan = warehouses.plan(warehouse, request, reading, now=reading.clock.now())
    receipt = warehouses.execute(plan, reading)
    _say(output.receipt_text(receipt))
    if receipt.failed or before != [_seen(lance, warehouse, one) for one in (tagged, good, head)]:
        raise LakewardenError(ErrorKind.DAMAGED_VERSION, "a kept version reads differently now")
    _say("proof    the tag, the version before the bad load and the newest read as before")


def _optimize(lance: Any, warehouse: Warehouse, place: Path, reading: Reading) -> None:
    """Rewrite the small files of both tables; raise if a row is not what it was."""
    view = warehouse.read()
    before = _seen(lance, warehouse, view)
    _say(f"$ lakewarden optimize {place}")
    planned = optimize.plan(Together(warehouse), optimize.Request(), reading)
    receipt = optimize.execute(planned, reading)
    for row in receipt.rows:
        if row.before and row.after:
            _say(f"  {row.table_key}: {row.before.files} files became {row.after.files}")
    after = warehouse.read()
    same = before == _seen(lance, warehouse, view) == _seen(lance, warehouse, after)
    if receipt.failed or receipt.version != after.version or not same:
        raise LakewardenError(ErrorKind.DAMAGED_VERSION, "a row is not what it was")
    _say(f"proof    version {after.version} has the same rows in fewer files, and version "
         f"{view.version} is as it was")  # fmt: skip


def _seen(lance: Any, warehouse: Warehouse, view: View) -> list[int]:
    """Return the rows of both tables at a version."""
    namespace = Namespace(warehouse, LanceReading(view))
    vectors = lance.dataset(namespace_client=namespace, table_id=["shop", "vectors"])
    orders = StaticTable.from_metadata(view.pins[view.table(("shop", "orders")).id].path)
    return sorted(
        [*vectors.to_table()["id"].to_pylist(), *orders.scan().to_arrow()["id"].to_pylist()]
    )


def _build(lance: Any, root: Path, now: float) -> None:
    root.mkdir()
    events = root / "events.lance"
    _grow(lance, events, range(10))
    lance.fragment.write_fragments(_rows(900, 5), str(events))  # a write that was never committed
    _grow(lance, events, range(10, 30))
    table = lance.dataset(str(events))
    table.delete("id % 7 = 0")
    table.create_scalar_index("id", "BTREE")
    table.tags.create("release-1", 4)
    branch = table.create_branch("experiment", 9)
    lance.write_dataset(_rows(500, 20), branch, mode="append")

    prices = root / "prices.lance"
    for step in range(25):
        lance.write_dataset(_rows(step, 200), str(prices), mode="overwrite" if step else "create")
    _grow(lance, root / "users.lance", range(12))
    clone = lance.dataset(str(root / "users.lance")).shallow_clone(
        str(root / "users-test.lance"), 3
    )
    lance.write_dataset(_rows(5000, 10), clone, mode="append")
    _age(root, now)


def _iceberg(root: Path, now: float) -> SqlCatalog:
    """Build a table with thirty snapshots over ninety days, deletes, a tag and a branch."""
    (root / "warehouse").mkdir(parents=True)
    catalog = SqlCatalog(
        "demo", uri=f"sqlite:///{root}/catalog.db", warehouse=f"file://{root}/warehouse"
    )
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.orders", _rows(0, 1).schema)
    for step in range(27):
        table.append(_rows(step * 10, 10))
    table.delete("id < 45")
    snapshots = [one.snapshot_id for one in table.metadata.snapshots]
    table.manage_snapshots().create_tag(snapshots[3], "audit").commit()
    table.manage_snapshots().create_branch(snapshots[8], "experiment").commit()
    table.append(_rows(900, 10))
    path = Path(table.refresh().metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_bytes())
    # Time lives in the metadata; the last snapshot is from now.
    for position, one in enumerate(reversed(metadata["snapshots"])):
        one["timestamp-ms"] = int((now - position * 3 * _DAY) * 1000)
    metadata["snapshot-log"] = []
    path.write_text(json.dumps(metadata))
    return catalog


def _grow(lance: Any, place: Path, steps: range) -> None:
    for step in steps:
        lance.write_dataset(_rows(step * 10, 10), str(place), mode="append" if step else "create")


def _rows(first: int, number: int) -> pa.Table:
    return pa.table({"id": range(first, first + number), "value": [i * 0.5 for i in range(number)]})


def _age(root: Path, now: float) -> None:
    """Spread each table's history over the last ninety days."""
    span = 90 * _DAY
    for table in root.iterdir():
        files = sorted(
            (path.stat().st_mtime_ns, path) for path in table.rglob("*") if path.is_file()
        )
        for position, (_, path) in enumerate(files):
            moment = now - span + (span - _DAY) * (position + 1) / len(files)
            os.utime(path, (moment, moment))


def _fingerprints(
    lance: Any,
    catalog: SqlCatalog,
    versions: list[tuple[int, str, int]],
    tables: dict[int, str],
) -> Iterator[Fingerprint]:
    for table_id, branch, version in sorted(versions):
        table = tables[table_id]
        if table.startswith("iceberg://"):
            loaded = catalog.load_table(table.rpartition("/")[2])
            rows = loaded.scan(snapshot_id=version).to_arrow()
        else:
            place = table if branch == "main" else f"{table}/tree/{branch}"
            rows = lance.dataset(place, version=version).to_table()
        yield Fingerprint(table, version, rows.num_rows, sum(rows.column("id").to_pylist()))


def _lance() -> Any:
    try:
        import lance
        import lance.fragment
    except ImportError as error:
        raise LakewardenError(
            ErrorKind.USAGE,
            "the demo writes Lance tables and needs pylance; pip install 'lakewarden[lance]'",
        ) from error
    return lance


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
