"""The service as it is run in production: PostgreSQL, an object store, workers of which one is killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import lance
import pyarrow as pa
import pytest
import sqlalchemy as sa
from pyarrow import fs
from pyiceberg.table import Table

from lakewarden.storage.opening import Opener
from lakewarden.testing import iceberg, iceberg_oracle, invariants, tables
from lakewarden.testing.processes import end, lakewarden_command, running, spark_cluster
from lakewarden.testing.s3 import S3Server, s3_server
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.warehouse import Warehouse
from lakewarden.world import SystemClock
from tests.jobs.test_worker import wait_until
from tests.postgres import PostgresServer

pytestmark = [pytest.mark.spark, pytest.mark.s3, pytest.mark.slow, pytest.mark.nightly]

BUCKET = "lake"
QUEUES = ("expire_snapshots", "remove_orphan_files", "optimize")
#: Lance tables, Iceberg tables, appends to each, and files that nobody names in each.
LANCES, ICES, APPENDS, ORPHANS = 6, 2, 12, 40
#: Keys that go in a second, so that there is a middle; seconds after which a worker counts as lost.
RATE, HEARTBEAT = 20, 15
#: For everything to be done, on a machine with other things to do.
PATIENCE = 300
CLOCK = SystemClock()


# -- the store -----------------------------------------------------------------------------------


@dataclass
class Lake:
    """A bucket with tables of every kind, and what is in them."""

    server: S3Server
    root: Path
    ices: list[Table] = field(default_factory=list)
    before: dict[Any, Any] = field(default_factory=dict)

    @property
    def catalog(self) -> dict[str, str]:
        where = {"warehouse": f"s3://{BUCKET}/ice", **iceberg.s3_properties(self.server)}
        return iceberg.catalog_properties(self.root, **where)

    @property
    def files(self) -> fs.FileSystem:
        options = self.server.options
        return fs.S3FileSystem(
            access_key=options["aws_access_key_id"],
            secret_key=options["aws_secret_access_key"],
            endpoint_override=options["aws_endpoint"].removeprefix("http://"),
            scheme="http",
        )

    def own(self) -> Namespace:
        opener = Opener(self.server.options)
        return Namespace(Warehouse.open(f"s3://{BUCKET}/own", opener=opener))

    def keys(self, prefix: str) -> list[str]:
        found = self.files.get_file_info(fs.FileSelector(f"{BUCKET}/{prefix}", recursive=True))
        return [one.path.removeprefix(f"{BUCKET}/") for one in found if one.is_file]

    def left(self, prefix: str) -> int:
        """Return how many files are there that no version names."""
        return sum("/left-" in key for key in self.keys(prefix))

    def download(self, prefix: str, target: Path) -> Path:
        for key in self.keys(prefix):
            place = target / key.removeprefix(f"{prefix}/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(self.files.open_input_stream(f"{BUCKET}/{key}").read())
        return target


def fill(server: S3Server, root: Path) -> Lake:
    """Make tables that are worth every kind of task, a month old where age counts."""
    lake = Lake(server, root)
    server.create_bucket(BUCKET)
    local = root / "lances"
    for number in range(LANCES):
        place = tables.appended(local / f"t{number}.lance", APPENDS)
        tables.tag(place, "kept", 3)
        lake.before[place.name] = invariants.fingerprint(place, ("main", 3))
        for step in range(ORPHANS):
            tables.orphan(place, f"data/left-{step}.lance")
    server.load(BUCKET, "lances", str(local), age_days=30)
    catalog = iceberg.catalog(root, **{k: v for k, v in lake.catalog.items() if k != "type"})
    for number in range(ICES):
        table = iceberg.create(catalog, f"db.i{number}")
        snapshots = iceberg.grow(table, APPENDS)
        table.manage_snapshots().create_tag(snapshots[2], "kept").commit()
        prefix = table.location().removeprefix(f"s3://{BUCKET}/")
        for step in range(ORPHANS):
            iceberg.orphan(root / f"left{number}", f"data/left-{step}.parquet")
        server.load(BUCKET, prefix, str(root / f"left{number}"), age_days=30)
        lake.before[number] = iceberg_oracle.fingerprints(table)
        lake.ices.append(table)
    Warehouse.init(f"s3://{BUCKET}/own", opener=Opener(server.options))
    for step in range(APPENDS):
        rows = pa.table({"id": [step]})
        mode = "append" if step else "create"
        lance.write_dataset(rows, namespace_client=lake.own(), table_id=["db", "points"], mode=mode)
    return lake


# -- the processes -------------------------------------------------------------------------------


@dataclass
class Service:
    """`lakewarden serve` that only answers, as an administrator's script calls it."""

    address: str
    token: str
    warehouses: list[str] = field(default_factory=list)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {self.token}"}
        address = f"{self.address}/management/v1{path}"
        answer = httpx.request(method, address, json=body, headers=headers, timeout=60)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def register(
        self, name: str, kind: str, location: str, config: Mapping[str, Any], **more: Any
    ) -> None:
        body = {"warehouse-name": name, "kind": kind, "location": location, **more}
        number = self.call("POST", "/warehouse", body)["warehouse-id"]
        for queue in QUEUES:
            given = {f"enable-{queue.replace('_', '-')}": True}
            given |= config if queue == "expire_snapshots" else {}
            body = {"queue-config": given, "max-seconds-since-last-heartbeat": HEARTBEAT}
            self.call("POST", f"/warehouse/{number}/task-queue/{queue}/config", body)
        self.warehouses.append(number)

    def tasks(self) -> list[dict[str, Any]]:
        """Return all tasks of all warehouses, page by page."""
        found: list[dict[str, Any]] = []
        for number in self.warehouses:
            token = None
            while True:
                body = {"page-size": 7, "page-token": token}
                page = self.call("POST", f"/warehouse/{number}/task/list", body)
                found += page["tasks"]
                token = page["next-page-token"]
                if token is None:
                    break
        return found


def lakewarden(environ: Mapping[str, str], *arguments: str) -> str:
    import os

    done = subprocess.run(
        lakewarden_command(*arguments),
        env={**os.environ, **environ},  # noqa: TID251  # the process needs its path
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


@contextmanager
def serving(environ: Mapping[str, str], log: Path) -> Iterator[Service]:
    lakewarden(environ, "migrate")
    made = json.loads(lakewarden(environ, "token", "create", "ops", "--role", "admin", "--json"))
    command = lakewarden_command("serve", "--port", 0, "--no-workers", "--auth")
    with running(command, log=log, environ=environ) as process:

        def address() -> str | None:
            assert process.poll() is None, log.read_text()
            said = re.search(r"^serving  (http://\S+) \(", log.read_text(), re.MULTILINE)
            return said[1] if said else None

        wait_until(lambda: address() is not None, 60)
        yield Service(str(address()), made["token"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@dataclass
class Worker:
    """`lakewarden worker`, and what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    def has_picked(self, queue: str) -> bool:
        return bool(re.search(rf"{queue}: tasks picked: \d+", self.log.read_text()))


@contextmanager
def working(environ: Mapping[str, str], log: Path, engine: Sequence[str]) -> Iterator[Worker]:
    more = {
        "LAKEWARDEN__TASK_POLL_INTERVAL": "200ms",
        "LAKEWARDEN__DETECT_INTERVAL": "2s",
        "LAKEWARDEN__TASK_DELETE_RATE_LIMIT": str(RATE),
        **{f"LAKEWARDEN__TASK_{queue.upper()}_WORKERS": "1" for queue in QUEUES},
    }
    command = lakewarden_command("worker", *engine)
    with running(command, log=log, environ={**environ, **more}) as process:
        yield Worker(process, log)


# -- the test ------------------------------------------------------------------------------------


@contextmanager
def local_engine(_place: Path) -> Iterator[list[str]]:
    """Let every worker have a Spark of its own."""
    yield ["--master", "local[2]"]


@contextmanager
def cluster_engine(place: Path) -> Iterator[list[str]]:
    """Let both work on a cluster of two, a core for each."""
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        "spark.cores.max": "1",
    }
    with spark_cluster(place) as url:
        conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        yield ["--master", url, *conf]


@pytest.mark.parametrize(
    "engine", [local_engine, cluster_engine], ids=["local Spark", "a cluster of two"]
)
def test_every_task_ends_once_though_a_worker_is_killed(
    postgres: PostgresServer,
    tmp_path: Path,
    engine: Callable[[Path], Any],
) -> None:
    url = postgres.url(postgres.database())
    environ = {"DATABASE_URL": url}
    with ExitStack() as stack:
        lake = fill(stack.enter_context(s3_server()), tmp_path)
        service = stack.enter_context(serving(environ, tmp_path / "serve.log"))
        arguments = stack.enter_context(engine(tmp_path))
        options = {"storage-options": lake.server.options}
        few = {"min-snapshots-to-expire": 1}
        service.register("lances", "lance", f"s3://{BUCKET}/lances", few, **options)
        # Of snapshots the time counts that they say, not that of their files.
        service.register(
            "ices", "iceberg", "lake", few | {"max-snapshot-age-ms": 1},
            **{"catalog-properties": lake.catalog},
        )  # fmt: skip
        service.register("own", "lakewarden", f"s3://{BUCKET}/own", few, **options)
        workers = [
            stack.enter_context(working(environ, tmp_path / f"worker{number}.log", arguments))
            for number in range(2)
        ]
        kill_in_the_middle(lake, workers)
        # Life goes on: somebody writes to tables that are being worked on.
        for number in range(2):
            where = f"s3://{BUCKET}/lances/t{number}.lance"
            rows = tables.rows(1000)
            lance.write_dataset(rows, where, mode="append", storage_options=lake.server.options)
        wait_until(lambda: is_done(service, workers), PATIENCE)
        (survivor,) = (one for one in workers if one.process.poll() is None)
        survivor.process.send_signal(signal.SIGTERM)
        assert survivor.process.wait(60) == 0
        said = survivor.log.read_text()
        assert " ERROR " not in said, said
        assert "Traceback" not in said, said
        assert lake.server.options["aws_secret_access_key"] not in said
        assert_each_ended_once(url)
        assert_nothing_live_is_missing(lake, tmp_path / "copy")


def kill_in_the_middle(lake: Lake, workers: Sequence[Worker]) -> None:
    """Kill whoever removes orphan files, when some are gone and some are not."""

    def has_begun() -> bool:
        for one in workers:
            assert one.process.poll() is None, one.log.read_text()
        return lake.left("lances") < LANCES * ORPHANS

    wait_until(has_begun, PATIENCE)
    (busy, *_) = (one for one in workers if one.has_picked("remove_orphan_files"))
    end(busy.process, signal.SIGKILL)
    assert 0 < lake.left("lances") < LANCES * ORPHANS


def is_done(service: Service, workers: Sequence[Worker]) -> bool:
    """Tell whether all tables were done by every queue, and nothing is due any more."""
    assert any(one.process.poll() is None for one in workers), workers[0].log.read_text()
    # Asking takes time, too, which others need.
    CLOCK.sleep(0.5)
    listed = service.tasks()
    soon = CLOCK.now() + timedelta(minutes=10)
    active = [one for one in listed if one["status"] in {"SCHEDULED", "RUNNING", "STOPPING"}]
    due = [one for one in active if datetime.fromisoformat(one["scheduled-for"]) < soon]
    done = {(one["queue-name"], one["entity-name"][-1]) for one in listed if one not in active}
    lances, ices = {f"t{n}.lance" for n in range(LANCES)}, {f"i{n}" for n in range(ICES)}
    wanted = {("remove_orphan_files", name) for name in lances | ices | {"points"}}
    wanted |= {("optimize", name) for name in lances | ices | {"points"}}
    wanted |= {("expire_snapshots", name) for name in lances | ices}
    return not due and wanted <= done


def assert_each_ended_once(url: str) -> None:
    """Read the database itself: how tasks ended, and that no two had a table at the same time."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        active = set(connection.scalars(sa.text("SELECT task_id FROM task")))
        rows = connection.execute(
            sa.text(
                "SELECT task_id, attempt, final, status, failure, message, slot, fence, "
                "picked_up_at, ended_at FROM task_log ORDER BY slot, picked_up_at, fence"
            )
        ).all()
    engine.dispose()
    by_task, by_slot = defaultdict(list), defaultdict(list)
    for row in rows:
        by_task[row.task_id].append(row)
        by_slot[row.slot].append(row)
    for task, attempts in by_task.items():
        assert task not in active
        assert [one.attempt for one in attempts] == list(range(1, len(attempts) + 1))
        assert [one.final for one in attempts] == [False] * (len(attempts) - 1) + [True]
        assert attempts[-1].status == "SUCCESS", [(one.slot, one.message) for one in attempts]
    for attempts in by_slot.values():
        for one, following in pairwise(attempts):
            assert one.fence < following.fence
            assert one.ended_at <= following.picked_up_at
    # It was killed in the middle of something, and somebody else has done that.
    assert "lost" in {row.failure for row in rows}


def assert_nothing_live_is_missing(lake: Lake, copy: Path) -> None:
    """Look with pylance and PyIceberg alone."""
    lake.download("lances", copy)
    for number in range(LANCES):
        place = copy / f"t{number}.lance"
        invariants.assert_no_live_file_missing(place)
        assert invariants.fingerprint(place, ("main", 3)) == lake.before[place.name]
        kept = [version for _, version in invariants.versions(place)]
        assert 3 in kept
        assert not {1, 2, 4, 5, 6, 7, 8, 9, 10, 11} & set(kept)
        expected = [row for step in range(APPENDS) for row in ids_of(step)]
        expected += tables.rows(1000)["id"].to_pylist() if number < 2 else []
        found = lance.dataset(str(place))
        assert sorted(found.to_table()["id"].to_pylist()) == sorted(expected)
        assert len(found.get_fragments()) < APPENDS
    for number, table in enumerate(lake.ices):
        iceberg_oracle.assert_intact(table, lake.before[number])
        assert "kept" in table.refs()
        assert len(table.metadata.snapshots) < APPENDS
        expected = [one for step in range(APPENDS) for one in range(10 * step, 10 * step + 3)]
        assert sorted(table.scan().to_arrow()["id"].to_pylist()) == expected
        assert len(list(table.scan().plan_files())) < APPENDS
    points = lance.dataset(namespace_client=lake.own(), table_id=["db", "points"])
    assert sorted(points.to_table()["id"].to_pylist()) == list(range(APPENDS))
    assert len(points.get_fragments()) < APPENDS
    assert [lake.left(prefix) for prefix in ("lances", "ice")] == [0, 0]


def ids_of(step: int) -> list[int]:
    """Return the ids that a step of `tables.appended` adds."""
    return list(tables.rows(10 * step)["id"].to_pylist())
