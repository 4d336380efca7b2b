"""Real processes: `lakewarden serve` on loopback, two of them on one database."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lakewarden.jobs.queues import TASK_LOG_CLEANUP
from lakewarden.jobs.tasks import EntityType
from lakewarden.jobs.tokens import Role, Tokens
from lakewarden.jobs.warehouses import FoundTable, WarehouseKind, Warehouses
from lakewarden.jobs.worker import POLL_INTERVAL, WORKERS
from lakewarden.world import SystemChance
from tests.jobs.test_worker import wait_until
from tests.postgres import PostgresServer
from tests.warehouse.cleaning import new_lake

pytestmark = pytest.mark.slow


@dataclass
class Server:
    """A process that serves."""

    process: subprocess.Popen[str]
    address: str

    def call(self, method: str, path: str, token: str | None = None, **more: Any) -> httpx.Response:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        address = f"{self.address}/management/v1{path}"
        return httpx.request(method, address, headers=headers, timeout=60, **more)

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Ask it to end, and return its exit code and what it has logged."""
        self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=60)
        return self.process.returncode, [
            json.loads(line) for line in rest.splitlines() if line.startswith("{")
        ]


@contextmanager
def serving(environment: Mapping[str, str], *arguments: str) -> Iterator[Server]:
    import os

    command = [sys.executable, "-m", "lakewarden.cli.main", "serve", "--port", "0", "--no-workers"]
    process = subprocess.Popen(
        [*command, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},  # noqa: TID251  # the process needs its path
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        found = re.match(r"serving  (http://\S+) \(", first)
        assert found, first
        yield Server(process, found[1])
    finally:
        process.kill()
        process.communicate()


def test_an_embedded_service_needs_nothing_and_ends_when_asked(tmp_path: Path) -> None:
    with serving({}, "--data-directory", str(tmp_path / "data")) as server:
        answer = server.call("GET", "/info")
        assert answer.status_code == 200
        assert "server" not in answer.headers
        code, lines = server.end()
    assert code == 0
    access = [line for line in lines if line["logger"] == "lakewarden.access"]
    assert [line["caller"] for line in access] == ["local"]
    assert access[0]["request_id"] == answer.headers["x-request-id"]
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "data" / "lakewarden.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.nightly
def test_two_instances_on_one_database_are_one_service(
    postgres: PostgresServer, postgres_template: str
) -> None:
    from lakewarden.jobs.database import open_database

    url = postgres.url(postgres.database(template=postgres_template))
    database = open_database(url)
    _, token = Tokens(database, SystemChance()).create("both", Role.ADMIN)
    warehouses = Warehouses(database, SystemChance())
    info = warehouses.register("lake", WarehouseKind.LANCE, "/nowhere")
    tables = warehouses.refresh(
        info.id,
        [FoundTable(("t", str(n)), EntityType.TABLE, f"/nowhere/{n}") for n in range(20)],
    )
    database.close()
    environment = {"DATABASE_URL": url}
    with serving(environment, "--auth") as one, serving(environment, "--auth") as other:
        assert other.call("GET", "/info").status_code == 401
        base = f"/warehouse/{info.id}"
        config = {"queue-config": {"enable-optimize": True}}
        path = f"{base}/task-queue/optimize"
        assert one.call("POST", f"{path}/config", token, json=config).status_code == 204
        shown = other.call("GET", f"{path}/config", token).json()
        assert shown["queue-config"]["enable-optimize"] is True

        def ask(turn: tuple[int, Server]) -> int:
            number, server = turn
            body = {"entity": {"type": "table", "table-id": str(tables[number].id)}}
            return server.call("POST", f"{path}/schedule", token, json=body).status_code

        # Everybody asks both for the same: one of the two gets it, every time.
        turns = [(number, server) for number in range(20) for server in (one, other)]
        with ThreadPoolExecutor(8) as pool:
            codes = list(pool.map(ask, turns))
        assert [sorted(pair) for pair in zip(codes[::2], codes[1::2], strict=True)] == [
            [200, 409]
        ] * 20
        listed = [
            server.call("POST", f"{base}/task/list", token, json={}).json()
            for server in (one, other)
        ]
        assert listed[0] == listed[1]
        assert len(listed[0]["tasks"]) == 20
        # Pages of one go on at the other.
        seen: list[str] = []
        mark = None
        for server in (one, other, one):
            body = {"page-size": 7, "page-token": mark}
            page = server.call("POST", f"{base}/task/list", token, json=body).json()
            seen += [task["task-id"] for task in page["tasks"]]
            mark = page["next-page-token"]
        assert mark is None
        assert seen == [task["task-id"] for task in listed[0]["tasks"]]
        _, lines = one.end()
        assert other.call("GET", "/info", token).status_code == 200
        _, more = other.end()
    assert token not in str(lines) + str(more)
    assert {line["level"] for line in lines + more} == {"info"}


def test_commits_while_no_service_runs_are_found_when_one_starts(tmp_path: Path) -> None:
    lake = new_lake(tmp_path / "wh")
    for name in ("busy", "idle"):
        lake.lance("create", name, 0)
    # Nobody works on tasks; somebody looks for commits.
    environment = {
        "LAKEWARDEN__DETECT_INTERVAL": "200ms",
        **dict.fromkeys(WORKERS.values(), "0"),
    }
    arguments = ("--data-directory", str(tmp_path / "data"), "--workers")
    with serving(environment, *arguments) as server:
        body = {"warehouse-name": "wh", "kind": "lakewarden", "location": str(lake.root)}
        number = server.call("POST", "/warehouse", json=body).json()["warehouse-id"]
        config = {"queue-config": {"enable-optimize": True, "min-files": 3}}
        path = f"/warehouse/{number}/task-queue/optimize/config"
        assert server.call("POST", path, json=config).status_code == 204

        def have_been_seen() -> bool:
            listed = server.call("GET", f"/warehouse/{number}/tables").json()["tables"]
            return all(one["changed-at"] is not None for one in listed)

        wait_until(have_been_seen)
        server.process.kill()
        server.process.wait()
    for step in range(1, 4):
        lake.lance("append", "busy", step)
    with serving(environment, *arguments) as server:

        def listed() -> list[dict[str, Any]]:
            answer = server.call("POST", f"/warehouse/{number}/task/list", json={})
            tasks: list[dict[str, Any]] = answer.json()["tasks"]
            return tasks

        wait_until(lambda: bool(listed()))
        (task,) = listed()
        assert (task["queue-name"], task["entity-name"]) == ("optimize", ["db", "busy"])
        told = server.call("GET", f"/warehouse/{number}/task/by-id/{task['task-id']}").json()
        assert told["task-data"]["origin"] == "commit"
        assert "files fewer" in told["task-data"]["reason"]
        code, _ = server.end()
    assert code == 0


# -- traces --------------------------------------------------------------------------------------


@contextmanager
def collecting() -> Iterator[tuple[str, list[Any]]]:
    """Be an OpenTelemetry collector: yield its address, and the spans that it is sent."""
    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            sent = ExportTraceServiceRequest()
            data = self.rfile.read(int(self.headers["content-length"]))
            packed = self.headers.get("content-encoding") == "gzip"
            sent.ParseFromString(gzip.decompress(data) if packed else data)
            spans.extend(
                span
                for resource in sent.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        Thread(target=collector.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{collector.server_port}/v1/traces", spans
        finally:
            collector.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@pytest.mark.parametrize(
    "named",
    [
        "option",
        *(pytest.param(one, marks=pytest.mark.nightly) for one in ("variable", "shared variable")),
    ],
)
def test_a_collector_is_sent_requests_and_runs_of_tasks(tmp_path: Path, named: str) -> None:
    alone = dict.fromkeys(WORKERS.values(), "0") | {
        WORKERS[TASK_LOG_CLEANUP]: "1",
        POLL_INTERVAL: "100ms",
    }
    with collecting() as (endpoint, spans):
        place = str(tmp_path / "data")
        # Nobody reads the log meanwhile.
        quiet = ("--log-level", "error")
        options = ["--data-directory", place, "--workers", *quiet]
        if named == "option":
            options += ["--otlp-endpoint", endpoint]
        elif named == "variable":
            alone |= {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint}
        else:
            # The usual one, for all that is sent: each kind has its own address below it.
            shared = endpoint.removesuffix("v1/traces")
            alone |= {"OTEL_EXPORTER_OTLP_ENDPOINT": shared}
        with serving(alone, *options) as server:
            assert server.call("GET", "/info").status_code == 200
            wait_until(lambda: bool(_tasks(server, "SCHEDULED")))
            (task,) = _tasks(server, "SCHEDULED")
            wanted = {"action": {"action-type": "run-now"}, "task-ids": [task["task-id"]]}
            answer = server.call("POST", "/project/task/control", json=wanted)
            assert answer.status_code == 204, answer.text
            wait_until(lambda: bool(_tasks(server, "SUCCESS")))
            code, _ = server.end()
    assert code == 0
    told = {span.name: attributes(span) for span in spans}
    assert told["GET /management/v1/info"]["http.response.status_code"] == 200
    assert told["run task_log_cleanup"]["lakewarden.tasks"] == 1


def _tasks(server: Server, status: str) -> list[dict[str, Any]]:
    answer = server.call("POST", "/project/task/list", json={"status": [status]})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["tasks"]
    return found
