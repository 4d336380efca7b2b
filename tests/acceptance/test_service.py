"""The whole service as one process: three kinds of warehouses, tasks by hand and by commits, an end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import lance
import pytest
from pyiceberg.table import Table

from lakewarden.testing import iceberg, iceberg_oracle, invariants, tables
from lakewarden.testing.processes import lakewarden_command, running
from tests.jobs.lab import iceberg_orphans, iceberg_table, lance_orphans, lance_table
from tests.jobs.test_worker import wait_until
from tests.warehouse.cleaning import new_lake

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ENVIRONMENT = {
    "LAKEWARDEN__TASK_POLL_INTERVAL": "100ms",
    "LAKEWARDEN__DETECT_INTERVAL": "300ms",
    "LAKEWARDEN__TASK_EXPIRE_SNAPSHOTS_WORKERS": "1",
    "LAKEWARDEN__TASK_REMOVE_ORPHAN_FILES_WORKERS": "1",
    "LAKEWARDEN__TASK_OPTIMIZE_WORKERS": "1",
}


@dataclass
class Server:
    """`lakewarden serve`, and what it says."""

    process: subprocess.Popen[bytes]
    log: Path
    address: str = ""

    def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = httpx.request(method, f"{self.address}/management/v1{path}", json=body, timeout=60)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def register(self, name: str, kind: str, location: str, **more: Any) -> Lake:
        body = {"warehouse-name": name, "kind": kind, "location": location, **more}
        return Lake(self, self.call("POST", "/warehouse", body)["warehouse-id"])


@dataclass
class Lake:
    """A registered warehouse, as its administrator knows it."""

    server: Server
    number: str

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return self.server.call(method, f"/warehouse/{self.number}{path}", body)

    def enable(self, queue: str, **config: Any) -> None:
        body = {"queue-config": {f"enable-{queue.replace('_', '-')}": True, **config}}
        self.call("POST", f"/task-queue/{queue}/config", body)

    def schedule(self, queue: str, table: str) -> str:
        known = {
            one["entity-name"][-1]: one["entity"] for one in self.call("GET", "/tables")["tables"]
        }
        answer = self.call("POST", f"/task-queue/{queue}/schedule", {"entity": known[table]})
        return str(answer["task-id"])

    def ended(self, queue: str, table: str) -> dict[str, Any]:
        """Wait until the first task of a table in a queue is over; return all about it."""
        found: list[dict[str, Any]] = []

        def is_over() -> bool:
            body = {"queue-name": [queue], "status": ["SUCCESS", "FAILED"]}
            listed = self.call("POST", "/task/list", body)["tasks"]
            found[:] = [one for one in listed if one["entity-name"][-1] == table]
            return bool(found)

        wait_until(is_over, 90)
        task = self.call("GET", f"/task/by-id/{found[-1]['task-id']}")
        assert task["status"] == "SUCCESS", task
        return dict(task)


@contextmanager
def serving(directory: Path) -> Iterator[Server]:
    log = directory / "serve.log"
    command = lakewarden_command("serve", "--port", 0, "--data-directory", directory / "data")
    with running(command, log=log, environ=ENVIRONMENT) as process:
        server = Server(process, log)

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            said = re.search(r"^serving  (http://\S+) \(", log.read_text(), re.MULTILINE)
            server.address = said[1] if said else ""
            return bool(said)

        wait_until(listens)
        yield server


def test_a_service_looks_after_tables_of_every_kind(tmp_path: Path) -> None:
    directory, root = tmp_path / "lance", tmp_path / "iceberg"
    growing = tables.appended(directory / "growing.lance", 7)
    fresh = tables.appended(directory / "fresh.lance", 2)
    prints = {place: invariants.fingerprints(place) for place in (growing, fresh)}
    old = lance_table(directory / "old.lance", 25)
    tables.tag(old, "kept", 3)
    left = lance_orphans(old)
    tagged = invariants.fingerprint(old, ("main", 3))
    orders = iceberg_table(root, "orders", 12)
    left += iceberg_orphans(orders)
    newest = ids(orders)
    small = iceberg.create(iceberg.catalog(root), "db.small")
    iceberg.grow(small, 6)
    readable = iceberg_oracle.fingerprints(small)
    rows = ids(small)
    ours = new_lake(tmp_path / "ours")
    ours.lance("create", "points", 0)
    lines = ours.create("lines", 0)
    for step in range(1, 6):
        ours.lance("append", "points", step)
        lines.append(iceberg.rows(step, 1).select(["id"]))

    with serving(tmp_path) as server:
        lances = server.register("lances", "lance", str(directory))
        properties = iceberg.catalog_properties(root)
        ices = server.register("ices", "iceberg", "lake", **{"catalog-properties": properties})
        own = server.register("own", "lakewarden", str(tmp_path / "ours"))

        # By hand: fewer files than a queue would run for are as many as the format can put together.
        for lake, table in (
            (lances, "growing.lance"),
            (ices, "small"),
            (own, "points"),
            (own, "lines"),
        ):
            lake.enable("optimize")
            lake.schedule("optimize", table)
        for lake in (lances, ices):
            lake.enable("remove_orphan_files")
        # Of a Lance table cleanup takes what is a week old along: whoever comes first gets it.
        ices.enable("expire_snapshots")
        for lake, table in (
            (lances, "growing.lance"),
            (ices, "small"),
            (own, "points"),
            (own, "lines"),
        ):
            task = lake.ended("optimize", table)
            assert task["execution-details"]["committed"] is True, task
        assert len(lance.dataset(str(growing)).get_fragments()) == 1
        assert len(ours.at("points").get_fragments()) == 1

        # Nobody has asked for these, and nobody has to write to a table first.
        for lake, table in ((lances, "old.lance"), (ices, "orders")):
            removed = lake.ended("remove_orphan_files", table)["execution-details"]
            assert removed["deleted_count"] == 3
            lake.enable("expire_snapshots")
            expired = lake.ended("expire_snapshots", table)["execution-details"]
            assert expired["expired_snapshots_count"] >= 20
            assert expired["requests"]["LIST" if lake is lances else "GET"] > 0

        # By commits: the detector sees them, and says why.
        for step in range(12):
            tables.append(fresh, 1000 + step * 10)
        task = lances.ended("optimize", "fresh.lance")
        assert "files fewer" in json.dumps(task["task-data"])
        assert len(lance.dataset(str(fresh)).get_fragments()) < 10

        metrics = httpx.get(f"{server.address}/metrics", timeout=60).text
        assert re.search(
            r'storage_requests_total{kind="LIST",queue="expire_snapshots"} [1-9]', metrics
        )
        assert re.search(r'reclaimed_bytes_total{queue="remove_orphan_files"} [1-9]', metrics)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    said = [json.loads(line) for line in server.log.read_text().splitlines() if line[:1] == "{"]
    assert [one for one in said if one["level"] == "error"] == []
    # Also while Spark starts, and takes stderr for itself.
    picked = {one["message"].partition(":")[0] for one in said if "picked" in one["message"]}
    assert picked >= {"optimize", "expire_snapshots", "remove_orphan_files"}

    # Independent eyes: what is gone was to go, what is there can be read.
    assert not any(path.exists() for path in left)
    invariants.assert_no_live_file_missing(old)
    invariants.assert_nothing_deletable_left(old)
    assert {number for _, number in invariants.versions(old)} == {3, 25}
    assert invariants.fingerprint(old, ("main", 3)) == tagged
    for place, expected in prints.items():
        found = {one: invariants.fingerprint(place, one) for one in expected}
        assert found == expected
        invariants.assert_no_live_file_missing(place)
    assert lance.dataset(str(growing)).count_rows() == 3 * 7
    assert lance.dataset(str(fresh)).count_rows() == 3 * 14
    for lasting, numbers in ((orders, newest), (small, rows)):
        lasting.refresh()
        assert ids(lasting) == numbers
        iceberg_oracle.assert_intact(lasting)
    iceberg_oracle.assert_intact(small, readable)
    assert len(list(small.scan().plan_files())) == 1
    assert sorted(ours.at("points").to_table()["id"].to_pylist()) == list(range(6))
    assert ids(ours.iceberg("lines")) == list(range(6))
    assert len(list(ours.iceberg("lines").scan().plan_files())) == 1


def ids(table: Table) -> list[int]:
    return sorted(table.scan().to_arrow()["id"].to_pylist())
