"""The pipeline on a real Spark cluster, and through Spark Connect."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakewarden.testing.processes import connect_server, spark_cluster, started
from tests.cli.small import contents, first_ids, make_table, versions_of

pytestmark = pytest.mark.slow

TABLES = 6


def make_fleet(root: Path) -> list[Path]:
    places = [root / f"t{number}.lance" for number in range(TABLES)]
    for place in places:
        make_table(place)
    return places


def check_cleaned(places: list[Path], total: dict[str, int]) -> None:
    assert total["old_versions_removed"] == 4 * len(places)
    assert total["data_files_removed"] == 4 * len(places)
    for place in places:
        assert versions_of(place) == [5, 6]
        assert first_ids(place, [5, 6]) == [20, 25]


def tasks_by_executor(events: Path) -> Counter[str]:
    """Count finished tasks in Spark's own event log."""
    counts: Counter[str] = Counter()
    for log in events.rglob("*"):
        if log.is_file():
            for line in log.read_text().splitlines():
                if '"SparkListenerTaskEnd"' in line:
                    counts[json.loads(line)["Task Info"]["Executor ID"]] += 1
    return counts


@pytest.mark.nightly
def test_a_standalone_cluster_of_two_workers_cleans_a_fleet(tmp_path: Path) -> None:
    lake, events = tmp_path / "lake", tmp_path / "events"
    events.mkdir()
    places = make_fleet(lake)
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.sql.shuffle.partitions": "4",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        # Both executors first, then the work: otherwise the first one may do all of it.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
        "spark.cores.max": "2",
        "spark.executor.cores": "1",
        "lakewarden.tasks": "6",
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    with (
        spark_cluster(tmp_path) as url,
        started(
            "cleanup",
            lake,
            "--recursive",
            "--keep",
            2,
            "--confirm",
            "--json",
            "--master",
            url,
            *conf,
        ) as run,
    ):
        code, stdout, stderr = run.result()
    assert code == 0, stderr
    assert f"target   {lake} (local disk; {url})" in stderr
    check_cleaned(places, json.loads(stdout)["total"])
    counts = tasks_by_executor(events)
    assert set(counts) == {"0", "1"}, f"both workers took part: {counts}"


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with connect_server(tmp_path_factory.mktemp("connect")) as url:
        yield url


@pytest.mark.nightly
def test_spark_connect_runs_the_command_line(connect: str, tmp_path: Path) -> None:
    places = make_fleet(tmp_path / "lake")
    plan = tmp_path / "plan"
    before = contents(tmp_path / "lake")
    arguments = (tmp_path / "lake", "--recursive", "--keep", 2, "--json", "--remote", connect)
    with started("cleanup", *arguments, "--save-plan", plan) as preview:
        code, stdout, stderr = preview.result()
    assert code == 0, stderr
    assert json.loads(stdout)["total"]["old_versions_removed"] == 4 * TABLES
    assert contents(tmp_path / "lake") == before
    with started("apply", plan, "--confirm", "--json", "--remote", connect) as run:
        code, stdout, stderr = run.result()
    assert code == 0, stderr
    check_cleaned(places, json.loads(stdout)["total"])


SCRIPT = """
import json, sys
from pyspark.sql import SparkSession
import lakewarden

spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
assert "connect" in type(spark).__module__, type(spark)
plan = lakewarden.plan_cleanup(spark, sys.argv[2:], keep=2, tasks=4)
going = plan.files.filter("verdict = 'delete'").groupBy("kind").count().collect()
receipt = lakewarden.execute(spark, plan, tasks=4)
assert "cleanup" in plan._repr_html_()
print(json.dumps({
    "kinds": {row["kind"]: row["count"] for row in going},
    "errors": [table.error for table in receipt.tables],
    "old_versions_removed": receipt.removed.old_versions_removed,
    "data_files_removed": receipt.removed.data_files_removed,
}))
"""


@pytest.mark.nightly
def test_spark_connect_runs_the_python_interface(connect: str, tmp_path: Path) -> None:
    places = make_fleet(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, connect, *(str(place) for place in places)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == [None] * TABLES
    assert found["kinds"] == dict.fromkeys(("data", "manifest", "transaction"), 4 * TABLES)
    check_cleaned(places, found)


@pytest.mark.parametrize(
    "engine",
    [("--master", "spark://127.0.0.1:1"), ("--remote", "sc://127.0.0.1:1"), ("--master", "moon")],
    ids=["no master", "no server", "no such kind"],
)
def test_an_engine_that_is_not_there_is_one_line(engine: tuple[str, ...], tmp_path: Path) -> None:
    make_table(tmp_path / "t.lance")
    begun = time.monotonic()
    with started("cleanup", tmp_path / "t.lance", "--keep", 2, *engine) as run:
        code, stdout, stderr = run.result()
    lines = [line for line in stderr.splitlines() if not line.startswith(("target ", "stage "))]
    assert code == 1
    assert stdout == ""
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error    ")
    assert engine[1] in lines[0]
    # Spark itself tries for a minute, its client for ten.
    assert time.monotonic() - begun < 30
