"""Writers in processes of their own append while cleanups follow them as closely as they can."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest
from pyspark.sql import SparkSession

from lakewarden.errors import Conflict, ErrorKind
from lakewarden.maintenance.warehouse import Request
from lakewarden.testing.processes import running
from lakewarden.warehouse.manifest import UPKEEP, Operation
from lakewarden.warehouse.reclaiming import Rules
from tests.warehouse.cleaning import NOW, Cleaner, Lake, new_lake
from tests.warehouse.lakes import IDS, reopen
from tests.warehouse.survivors import survivors

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WRITER = """
import os, sys, time, warnings
from itertools import count
warnings.simplefilter("ignore")
import lance, pyarrow as pa
from pyiceberg.exceptions import CommitFailedException
from lakewarden.errors import Conflict, LakewardenError, NotFound
from lakewarden.warehouse.iceberg import WarehouseCatalog
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.warehouse import Warehouse

place, stop, writer = sys.argv[1], sys.argv[2], int(sys.argv[3])
warehouse = Warehouse.open(place, actor=f"writer {writer}")
namespace, catalog = Namespace(warehouse), WarehouseCatalog("lake", opened=warehouse)
for number in count():
    if os.path.exists(stop):
        break
    kind, name = ("l", "i")[number % 2], writer * 1_000_000 + number
    rows = pa.table({"id": pa.array([name], pa.int64())})
    print("try", kind, name, flush=True)
    while True:
        try:
            if kind == "l":
                lance.write_dataset(
                    rows, namespace_client=namespace, table_id=["db", "l"], mode="append"
                )
            else:
                catalog.load_table("db.i").append(rows)
            break
        except (CommitFailedException, Conflict) as error:
            print("again", kind, name, str(error)[:200].replace(chr(10), " "), flush=True)
        except OSError as error:
            if "retries" not in str(error) and "conflict" not in str(error).lower():
                raise
            print("again", kind, name, str(error)[:200].replace(chr(10), " "), flush=True)
    print("done", kind, name, flush=True)
    # Without a pause no commit of a cleanup would ever come in between.
    time.sleep(0.8)
"""
#: What may hold a table, or a whole run, back while others write.
LATER = {ErrorKind.PLAN_OUTDATED.value, ErrorKind.CONFLICT.value}


def clean(lake: Lake, cleaner: Cleaner, rounds: int, said: list[str]) -> None:
    """Clean again and again; note what was held back, and what was removed."""
    request = Request(Rules(keep=3, min_age=NOW))
    for _ in range(rounds):
        warehouse = reopen(lake.root)
        try:
            receipt = cleaner.execute(cleaner.plan(warehouse, request), warehouse)
        except Conflict as error:
            said.append(error.kind.value)
            continue
        said += (str(one.error_kind) for one in receipt.failed)
        said += (f"removed {one.table_key}" for one in receipt.tables if one.removed.files_removed)


def race(root: Path, spark: SparkSession, *, writers: int, cleaners: int, rounds: int) -> list[str]:
    lake, cleaner = new_lake(root / "lake"), Cleaner(spark)
    lake.lance("create", "l")
    lake.catalog.create_table("db.i", IDS)
    before = lake.warehouse.refresh().version
    logs = [root / f"writer-{number}.log" for number in range(writers)]
    said: list[str] = []
    threads = [Thread(target=clean, args=(lake, cleaner, rounds, said)) for _ in range(cleaners)]
    with ExitStack() as stack:
        stop = root / "stop"
        command = [sys.executable, "-c", WRITER, str(lake.root), str(stop)]
        processes = [
            stack.enter_context(running([*command, str(number)], log=logs[number]))
            for number in range(writers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60 * rounds)
        stop.touch()
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(60) == 0, log.read_text()[-3000:]
    check(lake, logs, before)
    # Nobody writes any more, so nothing holds anything back.
    warehouse = reopen(lake.root)
    plan, receipt = cleaner.run(warehouse, Request(Rules(keep=3, min_age=NOW)))
    said += (f"removed {one.table_key}" for one in receipt.tables if one.removed.files_removed)
    check(lake, logs, before)
    survivors(lake.again(), plan.reclaim.floor).check(lake.again())
    return said


def check(lake: Lake, logs: list[Path], before: int) -> None:
    """Compare what writers were told with what is there."""
    told: dict[str, Counter[tuple[str, int]]] = {"try": Counter(), "done": Counter()}
    for log in logs:
        for line in log.read_text().splitlines():
            word, *rest = line.split()
            if word in told:
                told[word][rest[0], int(rest[1])] += 1
    again = Lake(lake.root, lake.again(), lake.namespace, lake.catalog)
    there: Counter[tuple[str, int]] = Counter()
    there.update(("l", one) for one in again.at("l").to_table()["id"].to_pylist())
    there.update(("i", one) for one in again.iceberg("i").scan().to_arrow()["id"].to_pylist())
    assert there == told["done"] == told["try"]
    # Each was committed once, as far back as the log remembers.
    history = [logged for logged in again.warehouse.history() if logged.version > before]
    changes = [change for logged in history for change in logged.transaction.changes]
    appends = [change for change in changes if change.operation is Operation.APPEND]
    assert len(appends) <= sum(there.values())
    assert {change.operation for change in changes} <= UPKEEP | {Operation.APPEND}


def test_cleanups_beside_writers_lose_nothing(tmp_path: Path, spark: SparkSession) -> None:
    said = race(tmp_path, spark, writers=2, cleaners=2, rounds=1)
    # Cleanups get in each other's way, and a table under constant change may have to wait: until
    # nobody writes any more, at most.  Entries of the log are too young to go.
    assert {"removed db.l", "removed db.i"} <= {*said}, said
    # Nobody wrote past the warehouse.
    assert {one for one in said if not one.startswith("removed")} <= LATER, said


@pytest.mark.nightly
def test_many_writers_and_cleanups_for_a_long_time(tmp_path: Path, spark: SparkSession) -> None:
    said = race(tmp_path, spark, writers=4, cleaners=3, rounds=60)
    assert {"removed db.l", "removed db.i"} <= {*said}
    assert {one for one in said if not one.startswith("removed")} <= LATER
