"""Optimize on a real Spark cluster, and through Spark Connect."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import lance
import pytest

from lakewarden.testing import tables
from lakewarden.testing.processes import connect_server, spark_cluster, started
from tests.optimize.tuning import Lake, add, in_pieces, rows, unindexed

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PIECES = 24


def tasks_by_stage(events: Path) -> dict[int, Counter[str]]:
    """Count finished tasks in Spark's own event log, for each stage by the executor."""
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for log in events.rglob("*"):
        if log.is_file():
            for line in log.read_text().splitlines():
                if '"SparkListenerTaskEnd"' in line:
                    told = json.loads(line)
                    counts[told["Stage ID"]][told["Task Info"]["Executor ID"]] += 1
    return counts


def test_tasks_of_one_table_run_on_both_workers_of_a_cluster(tmp_path: Path) -> None:
    table = in_pieces(tmp_path / "t.lance", PIECES)
    before = rows(lance.dataset(str(table)))
    size = sum(path.stat().st_size for path in (table / "data").iterdir()) // (PIECES // 3)
    events = tmp_path / "events"
    events.mkdir()
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        # Both executors first, then the work: otherwise the first one may do all of it.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
        "spark.cores.max": "2",
        "spark.executor.cores": "1",
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    with (
        spark_cluster(tmp_path) as url,
        started("optimize", table, "--target-size", size, "--json", "--master", url, *conf) as run,
    ):
        code, stdout, stderr = run.result()
    assert code == 0, stderr
    (row,) = json.loads(stdout)["tables"]
    assert row["groups"] > 3
    assert rows(lance.dataset(str(table))) == before
    # One errand is one task, and nothing else of the run has as many.
    (dealt,) = [one for one in tasks_by_stage(events).values() if sum(one.values()) > 3]
    assert sum(dealt.values()) == row["groups"]
    assert set(dealt) == {"0", "1"}, f"both workers took part: {dealt}"


def test_spark_connect_optimizes_a_table_and_a_warehouse(tmp_path: Path, lake: Lake) -> None:
    table = in_pieces(tmp_path / "t.lance")
    tables.index(table)
    add(table, 600)
    lake.fill("t")
    before = rows(lance.dataset(str(table))), rows(lake.open("t"))
    with connect_server(tmp_path) as url:
        for target in (table, lake.root):
            with started("optimize", target, "--json", "--remote", url) as run:
                code, _, stderr = run.result()
            assert code == 0, stderr
    found: list[Any] = [lance.dataset(str(table)), lake.open("t")]
    assert tuple(map(rows, found)) == before
    assert [len(one.get_fragments()) for one in found] == [1, 1]
    assert unindexed(found[0], "id_idx") == 0
