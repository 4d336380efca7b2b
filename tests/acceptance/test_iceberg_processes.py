"""Real processes beside each other on Iceberg tables: a writer, several cleanups, and power cuts."""

from __future__ import annotations

import json
import os
import random  # noqa: TID251  # the seed is shown when a test fails
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lakewarden
from lakewarden.testing import iceberg as kit
from lakewarden.testing import iceberg_oracle as oracle
from lakewarden.testing.processes import connect_server, running, spark_cluster, started

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.spark]

T = "iceberg://lake/db.t"

#: Writes until SIGTERM, in bursts: one JSON line with all live ids after each acknowledged write.
#: Without any pause a cleanup would never find the table as it was when it looked last.
WRITER = """
import json, random, signal, sys, time
from pyiceberg.exceptions import CommitFailedException
from sqlalchemy.exc import OperationalError
from lakewarden.testing import iceberg as kit

stopping = []
signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
source = random.Random(int(sys.argv[2]))
catalog = kit.catalog(sys.argv[1])
table = kit.create(catalog)
live, following, tags = [], 0, 0
while not stopping:
    action = source.choice(("append", "append", "append", "overwrite", "delete", "tag"))
    new = list(range(following, following + 3))
    try:
        table = catalog.load_table("db.t")
        if action == "append" or not live:
            kit.append(table, following)
            after = live + new
        elif action == "overwrite":
            kit.overwrite(table, following)
            after = new
        elif action == "delete":
            border = source.choice(live)
            kit.delete(table, f"id >= {border}")
            after = [one for one in live if one < border]
        else:
            tags += 1
            kit.tag(table, f"v{tags % 3}-{tags}")
            if tags > 3:
                kit.unref(catalog.load_table("db.t"), f"v{(tags - 3) % 3}-{tags - 3}")
            after = live
    except (CommitFailedException, OperationalError):
        # Not acknowledged; if it has landed nevertheless, the table says so.
        table = catalog.load_table("db.t")
        after = table.scan().to_arrow()["id"].to_pylist()
    following += 3
    live = sorted(after)
    print(json.dumps(live), flush=True)
    if following % 18 == 0 and not stopping:
        time.sleep(float(sys.argv[3]))
"""


def environ(root: Path) -> dict[str, str]:
    return kit.configure(root / "home", kit.catalog_properties(root))


@contextmanager
def opened(root: Path) -> Iterator[Table]:
    catalog = kit.catalog(root)
    try:
        yield catalog.load_table("db.t")
    finally:
        catalog.close()


def rich_table(root: Path, steps: int = 30) -> None:
    """Make a table with something of every kind to delete."""
    catalog = kit.catalog(root)
    table = kit.create(catalog)
    kit.append(table, 0)
    for step in range(1, steps):
        kit.overwrite(table, 10 * step)
        if step % 10 == 0:
            kit.statistics(table)
            kit.position_deletes(table, [10 * step])
    kit.tag(table, "release", kit.ids(table)[5])
    kit.backdate(table, 30)
    catalog.close()


def records(root: Path) -> list[Path]:
    return list(root.glob("warehouse/db/t/metadata/_lakewarden/*"))


def files(root: Path) -> set[str]:
    """Return what is there, but for metadata files: a commit that failed may leave one."""
    found = oracle.on_disk(root / "warehouse")
    return {path for path in found if not path.endswith(".metadata.json")}


def progress(root: Path) -> dict[str, int]:
    """Count files of each kind; that one changes shows how far an expiry has come."""
    table = root / "warehouse/db/t"
    return {
        "record": len(records(root)),
        "commit": len(list(table.glob("metadata/*.metadata.json"))),
        "data": len(list(table.glob("data/*"))),
        "manifests": len(list(table.glob("metadata/*.avro"))),
    }


@pytest.mark.nightly
def test_a_writer_in_bursts_loses_nothing_to_cleanup_in_a_loop(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    log = tmp_path / "writes.log"
    home = environ(tmp_path)
    expired = 0
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(seed), "5"]
    with running(command, log=log) as writer:
        give_up = time.monotonic() + 60
        while len(log.read_text().splitlines()) < 6 and time.monotonic() < give_up:
            time.sleep(0.1)  # noqa: TID251  # until the writer has begun
        for arguments in (
            ("cleanup", T, "--keep", 2, "--older-than", "0s", "--confirm", "--json"),
            # The floor of a day stands: what the writer is about to commit is younger.
            ("remove-orphans", T, "--older-than", "1d", "--confirm", "--json"),
            ("cleanup", T, "--keep", 2, "--older-than", "0s", "--confirm", "--json"),
        ):
            with started(*arguments, environ=home) as run:
                code, stdout, stderr = run.result()
            assert code in (0, 4), f"seed {seed}: {code} {stdout}{stderr}"
            expired += json.loads(stdout)["total"]["old_versions_removed"]
        writer.send_signal(signal.SIGTERM)
        assert writer.wait(30) == 0, f"seed {seed}: {log.read_text()[-2000:]}"
    writes = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("[")]
    assert len(writes) > 10, "the writer was at work"
    with opened(tmp_path) as table:
        oracle.assert_intact(table)
        held = sorted(table.scan().to_arrow()["id"].to_pylist())
        assert held == writes[-1], f"seed {seed}: an acknowledged write is gone"
    # And the table is in order: a last run brings it down to two snapshots and the tags.
    with opened(tmp_path) as table:
        before, reach = oracle.fingerprints(table), oracle.reachable(table)
    with started("cleanup", T, "--keep", 2, "--older-than", "0s", "--confirm", environ=home) as run:
        assert run.result()[0] == 0
    with opened(tmp_path) as table:
        oracle.assert_intact(table, before)
        assert expired + len(before) > len(kit.ids(table)), "there was something to do"
        assert not {path for path in oracle.leftovers(reach, table) if Path(path).exists()}
    assert not records(tmp_path)


@pytest.mark.nightly
def test_two_cleanups_at_once(tmp_path: Path) -> None:
    rich_table(tmp_path)
    home = environ(tmp_path)
    with opened(tmp_path) as table:
        before, reach = oracle.fingerprints(table), oracle.reachable(table)
    words = ("cleanup", T, "--keep", 3, "--older-than", "0s", "--confirm", "--json")
    with started(*words, environ=home) as one, started(*words, environ=home) as two:
        answers = [run.result() for run in (one, two)]
    for code, stdout, stderr in answers:
        assert code in (0, 4), stdout + stderr
    assert any(code == 0 for code, _, _ in answers)
    with opened(tmp_path) as table:
        oracle.assert_intact(table, before)
        assert len(kit.ids(table)) == 4
        left = {path for path in oracle.leftovers(reach, table) if Path(path).exists()}
        assert not left
    assert not records(tmp_path)


@pytest.mark.nightly
def test_a_cleanup_killed_at_any_moment_is_finished_by_the_next(
    spark: SparkSession, tmp_path: Path
) -> None:
    """After the record, after the commit, while data files go, while manifests go."""
    root, master = tmp_path / "lake", tmp_path / "master"
    rich_table(root)
    home = environ(root)
    with opened(root) as table:
        before = oracle.fingerprints(table)
    shutil.copytree(root, master)

    def clean() -> Any:
        catalog = kit.catalog(root)
        try:
            rules: dict[str, Any] = {"keep": 3, "older_than": "0s", "catalog": {"lake": catalog}}
            plan = lakewarden.plan_cleanup(spark, T, tasks=2, **rules)
            return lakewarden.execute(spark, plan, catalog={"lake": catalog}, tasks=2)
        finally:
            catalog.close()

    clean()
    expected = files(root)
    whole = len(files(master))
    for phase in ("record", "commit", "data", "manifests"):
        shutil.rmtree(root)
        shutil.copytree(master, root)
        was = progress(root)
        arguments = ("cleanup", T, "--keep", 3, "--older-than", "0s", "--confirm")
        with started(*arguments, "--rate-limit", 20, environ=home) as run:
            give_up = time.monotonic() + 90
            while progress(root)[phase] == was[phase]:
                assert time.monotonic() < give_up, phase
                assert run.process.poll() is None, phase
                time.sleep(0.001)  # noqa: TID251  # until the phase has begun
            run.kill()
        assert files(root) != expected, f"{phase}: it had finished already"
        assert records(root), phase
        with opened(root) as table:
            oracle.assert_intact(table, before)
        receipt = clean()
        assert not receipt.failed, (phase, receipt.failed)
        with opened(root) as table:
            oracle.assert_intact(table, before)
            assert len(kit.ids(table)) == 4, phase
        assert files(root) == expected, phase
    assert len(expected) < whole


def check_fleet(root: Path, before: dict[str, dict[int, str]]) -> None:
    catalog = kit.catalog(root)
    try:
        for name, prints in before.items():
            table = catalog.load_table(name)
            oracle.assert_intact(table, prints)
            assert len(kit.ids(table)) == 2
            assert not oracle.unreferenced(table)
    finally:
        catalog.close()


def make_fleet(root: Path, tables: int = 4) -> dict[str, dict[int, str]]:
    catalog = kit.catalog(root)
    before = {}
    for number in range(tables):
        table = kit.create(catalog, f"db.t{number}")
        kit.grow(table, 2)
        kit.overwrite(table, 50)
        kit.append(table, 60)
        kit.backdate(table, 30)
        kit.orphan(table.location(), "data/left.parquet")
        before[f"db.t{number}"] = oracle.fingerprints(table)
    catalog.close()
    return before


@pytest.mark.nightly
def test_a_standalone_cluster_of_two_workers(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    before = make_fleet(lake)
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.sql.shuffle.partitions": "4",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.cores.max": "2",
        "spark.executor.cores": "1",
        "lakewarden.tasks": "4",
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    db = "iceberg://lake/db"
    with spark_cluster(tmp_path) as url:
        for words in (
            ("cleanup", db, "--keep", 2, "--older-than", "0s"),
            ("remove-orphans", db, "--older-than", "7d"),
        ):
            arguments = (*words, "--confirm", "--json", "--master", url, *conf)
            with started(*arguments, environ=environ(lake)) as run:
                code, stdout, stderr = run.result()
            assert code == 0, stderr
            assert json.loads(stdout)["total"]["data_files_removed"] == len(before) * (
                2 if words[0] == "cleanup" else 1
            )
    check_fleet(lake, before)


SCRIPT = """
import json, sys
from pyspark.sql import SparkSession
import lakewarden

spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
assert "connect" in type(spark).__module__, type(spark)
db = "iceberg://lake/db"
errors = []
for make in (
    lambda: lakewarden.plan_cleanup(spark, db, keep=2, older_than="0s", tasks=4),
    lambda: lakewarden.plan_orphans(spark, db, tasks=4),
):
    plan = make()
    receipt = lakewarden.execute(spark, plan, tasks=4)
    errors += [table.error for table in receipt.tables]
print(json.dumps(errors))
"""


@pytest.mark.nightly
def test_spark_connect(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    before = make_fleet(lake)
    with connect_server(tmp_path) as url:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, url],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            env={**os.environ, **environ(lake)},  # noqa: TID251
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None] * 2 * len(before)
    check_fleet(lake, before)
