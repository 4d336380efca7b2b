"""Real writers in processes of their own, some of which are killed, on tables of both formats."""

from __future__ import annotations

import random  # noqa: TID251
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from lakewarden.testing.processes import end, running
from lakewarden.warehouse.formats import with_formats
from lakewarden.warehouse.iceberg import WarehouseCatalog
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.manifest import Operation
from lakewarden.warehouse.warehouse import Warehouse

WRITER = """
import random, sys, warnings
warnings.simplefilter("ignore")
import lance, pyarrow as pa
from pyiceberg.exceptions import CommitFailedException
from lakewarden.errors import Conflict, ErrorKind
from lakewarden.warehouse.iceberg import WarehouseCatalog
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.transaction import run
from lakewarden.warehouse.warehouse import Warehouse

place, tables, writer, commits = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
warehouse = Warehouse.open(place, actor=f"writer {writer}")
namespace, catalog = Namespace(warehouse), WarehouseCatalog("lake", opened=warehouse)
chance = random.Random(writer)

def lance_append(space, table, rows):
    lance.write_dataset(rows, namespace_client=space, table_id=[f"l{table}"], mode="append")

for number in range(commits):
    table, name = chance.randrange(tables), writer * 1_000_000 + number
    rows = pa.table({"id": [name]})
    kind = chance.choice(["lance", "iceberg", "both"])
    print("try", kind, table, name, flush=True)
    while True:
        try:
            if kind == "lance":
                lance_append(namespace, table, rows)
            elif kind == "iceberg":
                catalog.load_table(f"i{table}").append(rows)
            else:
                def work(tx):
                    lance_append(tx.lance, table, rows)
                    tx.iceberg.load_table(f"i{table}").append(rows)
                run(warehouse, work, attempts=100)
            break
        except CommitFailedException:
            continue
        except Conflict as error:
            if error.kind is not ErrorKind.CONFLICT:
                raise
        except OSError as error:
            if "retries" not in str(error) and "conflict" not in str(error).lower():
                raise
    print("done", kind, table, name, flush=True)
print("end", flush=True)
"""


def race(root: Path, *, writers: int, tables: int, commits: int, kills: int) -> None:
    """Let writers commit, kill some of them, and compare what they were told with what is there."""
    warehouse = Warehouse.init(str(root / "lake"))
    namespace, catalog = Namespace(warehouse), WarehouseCatalog("lake", opened=warehouse)
    schema = pa.schema([("id", pa.int64())])
    for table in range(tables):
        lance.write_dataset(
            schema.empty_table(), namespace_client=namespace, table_id=[f"l{table}"], mode="create"
        )
        catalog.create_table(f"i{table}", schema)
    before = warehouse.refresh().version
    logs = [root / f"writer-{number}.log" for number in range(writers)]
    chance = random.Random(writers)
    with ExitStack() as stack:
        running_writers = [
            stack.enter_context(
                running(
                    [sys.executable, "-c", WRITER, str(root / "lake"),
                     *map(str, (tables, number, commits))],
                    log=logs[number],
                )
            )
            for number in range(writers)
        ]  # fmt: skip
        for process in running_writers[:kills]:
            give_up = time.monotonic() + 120
            target = chance.randrange(2, commits)
            log = logs[running_writers.index(process)]
            while log.read_text().count("done") < target and process.poll() is None:
                assert time.monotonic() < give_up, log.read_text()
                time.sleep(0.02)  # noqa: TID251  # until it has written something
            end(process, signal.SIGKILL)
        for process in running_writers[kills:]:
            assert process.wait(600) == 0, logs[running_writers.index(process)].read_text()[-2000:]
    check(Warehouse.open(str(root / "lake")), logs, before)


def check(warehouse: Warehouse, logs: list[Path], before: int) -> None:
    told: dict[str, Counter[tuple[str, int]]] = {"try": Counter(), "done": Counter()}
    for log in logs:
        for line in log.read_text().splitlines():
            word, *rest = line.split()
            if word not in told:
                # PyIceberg speaks of its own retries.
                continue
            kind, number, row = rest
            for form in ("lance", "iceberg") if kind == "both" else (kind,):
                told[word][f"{form[0]}{number}", int(row)] += 1
    namespace = Namespace(with_formats(warehouse))
    catalog = WarehouseCatalog("lake", opened=warehouse)
    there: Counter[tuple[str, int]] = Counter()
    for one in warehouse.read().tables():
        (name,) = one.name
        if name.startswith("l"):
            found = lance.dataset(namespace_client=namespace, table_id=[name])
            assert lance.dataset(found.uri).version == found.version, "by path it is the same head"
            ids = found.to_table()["id"]
        else:
            ids = catalog.load_table(name).scan().to_arrow()["id"]
        there.update((name, row) for row in ids.to_pylist())
    assert not told["done"] - there, "an acknowledged row is gone"
    assert not there - told["try"], "a row is there twice, or nobody wrote it"
    history = [logged for logged in warehouse.history() if logged.version > before]
    changes = [change for logged in history for change in logged.transaction.changes]
    assert all(change.operation is Operation.APPEND for change in changes)
    assert len(changes) == sum(there.values()), "as many changes as rows"
    assert [logged.version for logged in history] == list(range(before + len(history), before, -1))
    assert len({logged.transaction.id for logged in history}) == len(history)


def test_writers_lose_nothing_and_write_nothing_twice(tmp_path: Path) -> None:
    race(tmp_path, writers=5, tables=2, commits=12, kills=2)


@pytest.mark.nightly
def test_many_writers_with_thousands_of_commits(tmp_path: Path) -> None:
    race(tmp_path, writers=16, tables=4, commits=150, kills=4)
