"""Measure optimize against pylance's compaction and Iceberg's `rewrite_data_files`, on the same data.

Two gigabytes in 2,000 small files, as one table and as fifty.  Tables are built once and copied by hard links; each side
rewrites its own copy in the same run, into files of the same size, and its rows are counted and summed
afterwards.  PARTS names the parts for `scripts/bench`; `--optimize-mib` makes the data smaller.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import iceberg as peers
import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.optimize import Compaction
from tables import Lake, linked

import lakewarden
from lakewarden.cli.session import Engine, start
from lakewarden.testing.processes import spark_cluster

PARTS = ("optimize-lance", "optimize-fleet", "optimize-workers", "optimize-iceberg")
MIB = 2048
FILES = 2000
TABLES = 50
#: Files that one table becomes.
TARGETS = 16
_COLUMNS = 8
_REPEATS = 3

Found = dict[str, Any]


def rows(first: int, number: int) -> pa.Table:
    """Return rows of about 80 bytes that do not compress."""
    chance = np.random.default_rng(first)
    columns = {f"v{at}": chance.random(number) for at in range(_COLUMNS)}
    return pa.table({"id": np.arange(first, first + number), **columns})


_ROW = 8 * (_COLUMNS + 1)


def build(base: Path, mib: int, files: int, *, index: bool = True) -> Path:
    """Build a Lance table of small fragments; its index does not cover the last tenth."""
    place = base / f"optimize-{mib}-{files}{'' if index else '-plain'}.lance"
    if place.exists():
        return place
    growing = base / "optimize-growing.lance"
    shutil.rmtree(growing, ignore_errors=True)
    number = mib * 2**20 // files // _ROW
    table = None
    for at in range(files):
        mode = "append" if at else "create"
        table = lance.write_dataset(rows(at * number, number), table or str(growing), mode=mode)
        if index and at == files * 9 // 10:
            table.create_scalar_index("id", "BTREE")
    growing.rename(place)
    print(f"  built {place.name}", flush=True)
    return place


def truth(table: Any) -> tuple[int, float]:
    """Return what must be the same before and afterwards."""
    found = table.to_table(columns=["id", "v0"])
    return found.num_rows, round(float(pc.sum(found.column("v0")).as_py()), 3)


def target_of(table: Any, targets: int) -> int:
    """Return the bytes that a file is to have."""
    total = sum(file.file_size_bytes for one in table.get_fragments() for file in one.data_files())
    return int(total / targets * 1.01)


def ours(spark: Any, places: list[str], target: int) -> Found:
    began = time.perf_counter()
    plan = lakewarden.plan_optimize(spark, places, target_bytes=target)
    receipt = lakewarden.execute(spark, plan)
    seconds = time.perf_counter() - began
    assert not receipt.failed, receipt.failed[0]
    files = sum(row.after.files for row in receipt.rows if row.after is not None)
    return {"seconds": seconds, "stages": dict(receipt.seconds), "files": files}


def native(places: list[str], target: int) -> Found:
    """Compact with pylance in one process, all its threads allowed, then its indices."""
    seconds, files = 0.0, 0
    for place in places:
        table = lance.dataset(place)
        per_row = sum(
            file.file_size_bytes for one in table.get_fragments() for file in one.data_files()
        ) / max(table.count_rows(), 1)
        began = time.perf_counter()
        table.optimize.compact_files(target_rows_per_fragment=int(target / per_row))
        table = lance.dataset(place)
        table.optimize.optimize_indices()
        seconds += time.perf_counter() - began
        files += len(lance.dataset(place).get_fragments())
    return {"seconds": seconds, "files": files}


def compared(
    base: Path, sources: list[Path], targets: int, sides: dict[str, Callable[..., Found]]
) -> Found:
    """Let every side rewrite copies of the same tables, in turns."""
    target = target_of(lance.dataset(str(sources[0])), targets)
    before = [truth(lance.dataset(str(one))) for one in sources]
    runs: dict[str, list[Found]] = {name: [] for name in sides}
    for _ in range(_REPEATS):
        for name, side in sides.items():
            scratch = base / "optimize-scratch"
            shutil.rmtree(scratch, ignore_errors=True)
            places = [str(linked(one, scratch / f"{at}.lance")) for at, one in enumerate(sources)]
            runs[name].append(side(places, target))
            assert [truth(lance.dataset(place)) for place in places] == before
            shutil.rmtree(scratch)
    return {name: sorted(each, key=lambda run: run["seconds"])[1] for name, each in runs.items()}


def local(base: Path, sources: list[Path], targets: int) -> Found:
    spark = start(Engine())
    try:
        warm_up(spark, base)
        with Watching() as seen:
            found = compared(
                base,
                sources,
                targets,
                {"lakewarden": lambda places, size: ours(spark, places, size), "pylance": native},
            )
        return found | {"memory_mib": seen.workers}
    finally:
        spark.stop()


def warm_up(spark: Any, base: Path) -> None:
    small = linked(build(base, 2, 20), base / "optimize-warm.lance")
    ours(spark, [str(small)], 2**20)
    shutil.rmtree(small)


class Watching:
    """Looks for the peak memory of Python workers while something runs."""

    def __init__(self) -> None:
        self.workers = 0
        self._on = True
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Watching:
        self._look = self._pool.submit(self._watch)
        return self

    def _watch(self) -> None:
        while self._on:
            self.workers = max(self.workers, peers.peaks(os.getpid())["workers"])
            # Often enough for a peak, seldom enough not to be one.
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._on = False
        self._look.result()
        self._pool.shutdown()


def pin_workers() -> None:
    """Give each worker of the cluster, and what it starts from now on, a processor of its own."""
    cores = sorted(os.sched_getaffinity(0))
    found = [
        int(place.parent.name)
        for place in Path("/proc").glob("[0-9]*/cmdline")
        if b"spark.deploy.worker.Worker" in place.read_bytes()
    ]
    for at, number in enumerate(found):
        for thread in Path(f"/proc/{number}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[at % len(cores)]})


def bare(source: Path, processes: int) -> float:
    """Return how long Lance's tasks alone take, dealt out to processes with a processor each.

    No cluster is faster on this machine.
    """
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--bare", str(source), str(at), str(processes)],
            env={**os.environ, "LANCE_CPU_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for at in range(processes)
    ]  # fmt: skip
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
    began = time.perf_counter()
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert all(process.wait() == 0 for process in started)
    return time.perf_counter() - began


def run_bare(source: str, at: int, processes: int) -> None:
    """Be one of them; the first task warms up and is done again."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[at]})
    table = lance.dataset(source)
    options = {"target_rows_per_fragment": table.count_rows() // TARGETS + 1}
    tasks = Compaction.plan(table, options).tasks[at::processes]
    tasks[0].execute(table)
    print("ready", flush=True)
    sys.stdin.readline()
    for task in tasks:
        task.execute(table)


def workers(base: Path, source: Path) -> Found:
    """Rewrite one table on a standalone cluster of one worker, and of two, a core each."""
    found: Found = {}
    for number in (1, 2):
        with (
            tempfile.TemporaryDirectory() as logs,
            spark_cluster(Path(logs), workers=number) as url,
        ):
            pin_workers()
            conf = {
                "spark.executorEnv.LANCE_CPU_THREADS": "1",
                "spark.executor.cores": "1",
                "spark.default.parallelism": str(number),
                # As local sessions have it: Lakewarden is installed where the workers are.
                "spark.python.daemon.module": "lakewarden.pipeline.daemon",
                "spark.python.unix.domain.socket.enabled": "true",
            }
            spark = start(Engine(master=url, conf=conf))
            try:
                warm_up(spark, base)
                side = compared(
                    base,
                    [source],
                    TARGETS,
                    {"lakewarden": lambda places, size: ours(spark, places, size)},  # noqa: B023
                )
            finally:
                spark.stop()
        copy = linked(source, base / "optimize-bare.lance")
        found[str(number)] = side["lakewarden"] | {"bare": bare(copy, number)}
        shutil.rmtree(copy)
        print(f"  {number} workers: {side['lakewarden']['seconds']:.2f} s", flush=True)
    return found


# -- Iceberg ---------------------------------------------------------------------------------------


def build_iceberg(base: Path, mib: int, files: int) -> Lake:
    place = Lake(base / f"optimize-iceberg-{mib}-{files}", "optimize")
    if (place.root / "pointer").exists():
        return place
    shutil.rmtree(place.root, ignore_errors=True)
    with place.open() as catalog:
        catalog.create_namespace("db")
        number = mib * 2**20 // files // _ROW
        table = catalog.create_table("db.t", rows(0, 1).schema)
        for batch in range(0, files, 100):
            with table.transaction() as changes:
                for at in range(batch, min(batch + 100, files)):
                    changes.append(rows(at * number, number))
        (place.root / "pointer").write_text(table.metadata_location)
    print(f"  built {place.root.name}", flush=True)
    return place


def reset(lake: Lake) -> None:
    """Let the table be what it was; what was written since stays beside it."""
    with closing(sqlite3.connect(lake.root / "catalog.db")) as base, base:
        base.execute(
            "UPDATE iceberg_tables SET metadata_location = ?, previous_metadata_location = NULL",
            ((lake.root / "pointer").read_text(),),
        )


def iceberg(base: Path, mib: int, files: int) -> Found:
    """Rewrite one table, with Lakewarden and with Iceberg's procedure, in turns."""
    lake = build_iceberg(base, mib, files)
    target = mib * 2**20 // TARGETS
    spark = start(Engine())
    runs: dict[str, list[Found]] = {"lakewarden": [], "iceberg": []}
    try:
        with peers.Peer() as peer, Watching() as seen:
            # The first turn warms up.
            for turn in range(_REPEATS + 1):
                for side, each in runs.items():
                    reset(lake)
                    run = _rewritten(spark, peer if side == "iceberg" else None, lake, target)
                    if turn:
                        each.append(run)
                    print(f"  {side}: {run['seconds']:.2f} s, {run['files']} files", flush=True)
    finally:
        spark.stop()
        reset(lake)
    found = {name: sorted(each, key=lambda run: run["seconds"])[1] for name, each in runs.items()}
    return found | {"memory_mib": seen.workers}


def _rewritten(spark: Any, peer: peers.Peer | None, lake: Lake, target: int) -> Found:
    with lake.open() as catalog:
        table = catalog.load_table("db.t")
        expected = table.scan(selected_fields=("id", "v0")).to_arrow()
        began = time.perf_counter()
        if peer is not None:
            size = f"map('target-file-size-bytes', '{target}')"
            done = peer.call(lake, "rewrite_data_files", table="'db.t'", options=size)
            seconds, stages = done["seconds"], {}
        else:
            plan = lakewarden.plan_optimize(
                spark,
                f"iceberg://{lake.name}/db.t",
                target_bytes=target,
                catalog={lake.name: catalog},
            )
            receipt = lakewarden.execute(spark, plan)
            seconds, stages = time.perf_counter() - began, dict(receipt.seconds)
            assert not receipt.failed, receipt.failed[0].error
        after = catalog.load_table("db.t")
        found = after.scan(selected_fields=("id", "v0")).to_arrow()
        assert pc.sum(found.column("id")) == pc.sum(expected.column("id"))
        assert found.num_rows == expected.num_rows
        files = len(list(after.scan().plan_files()))
    return {"seconds": seconds, "stages": stages, "files": files}


def measure(parts: list[str], base: Path, mib: int, keep: Callable[[Found], None]) -> None:
    """Measure some of PARTS."""
    files = max(20, FILES * mib // MIB)
    if "optimize-lance" in parts:
        source = build(base, mib, files)
        keep({"lance": local(base, [source], TARGETS) | {"mib": mib, "files": files}})
        source = build(base, mib, files, index=False)
        keep({"plain": local(base, [source], TARGETS) | {"mib": mib, "files": files}})
    if "optimize-fleet" in parts:
        one = build(base, max(1, mib // TABLES), max(2, files // TABLES))
        sources = [linked(one, base / "optimize-fleet" / f"{at}.lance") for at in range(TABLES)]
        keep({"fleet": local(base, sources, 1) | {"mib": mib, "tables": TABLES}})
    if "optimize-workers" in parts:
        for index in (False, True):
            spread = workers(base, build(base, mib, files, index=index))
            keep({"workers_indexed" if index else "workers": spread})
    if "optimize-iceberg" in parts:
        keep({"iceberg": iceberg(base, mib, files) | {"mib": mib, "files": files}})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--bare", source, at, processes]:
            run_bare(source, int(at), int(processes))
