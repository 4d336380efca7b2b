"""What can be watched: numbers for Prometheus, lines of the log, traces."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from lakewarden.errors import UsageError
from lakewarden.jobs.secrets import without_secrets
from lakewarden.jobs.tasks import Failure
from lakewarden.service.app import create_app
from lakewarden.service.logs import JsonLines
from lakewarden.service.settings import ServiceSettings
from lakewarden.service.tracing import OpenTelemetry, tracing_to
from lakewarden.testing.simulation import World
from lakewarden.world import SystemClock
from tests.service.small import Service


def numbers(service: Service) -> dict[str, dict[tuple[str, ...], float]]:
    """Return every number, by its name and the values of its labels."""
    answer = service.get("//metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for one in family.samples:
            found.setdefault(one.name, {})[
                tuple(value for _, value in sorted(one.labels.items()))
            ] = one.value
    return found


def test_queues_and_what_came_out_of_them_are_counted(service: Service) -> None:
    lake = service.warehouse(tables=4)
    lake.enable()
    for number in range(4):
        lake.schedule(number)
    world = service.world
    for _ in range(2):
        claim = lake.pick()
        world._pass(20)
        requests = {"LIST": 3, "DELETE": 2}
        result = {"deleted_bytes": 500, "requests": requests}
        service.parts.queue.succeed(claim, result=result)
    claim = lake.pick()
    world._pass(20)
    service.parts.queue.fail(claim, "damaged", Failure.PERMANENT)
    queue = "expire_snapshots"
    for _ in range(2):
        # What was counted is not counted again, however often somebody asks.
        found = numbers(service)
        assert found["lakewarden_task_attempts_total"] == {
            ("SUCCESS", queue): 2.0, ("FAILED", queue): 1.0,
        }  # fmt: skip
        assert found["lakewarden_task_duration_seconds_sum"] == {(queue,): 60.0}
        assert found["lakewarden_reclaimed_bytes_total"] == {(queue,): 1000.0}
        assert found["lakewarden_storage_requests_total"] == {
            ("LIST", queue): 6.0, ("DELETE", queue): 4.0,
        }  # fmt: skip
        world._pass(30)
    found = numbers(service)
    depth = found["lakewarden_tasks"]
    assert depth[queue, "SCHEDULED"] == 1
    assert depth[queue, "RUNNING"] == depth[queue, "STOPPING"] == 0
    assert depth["task_log_cleanup", "SCHEDULED"] == 1
    next_run = found["lakewarden_task_next_run_timestamp_seconds"]
    assert next_run[queue,] < world.now().timestamp() < next_run["task_log_cleanup",]


def test_work_before_this_process_is_not_this_process_work(url: str, world: World) -> None:
    app = create_app(ServiceSettings(url), clock=world)
    with Service.running(app, world) as first:
        lake = first.warehouse(tables=2)
        lake.enable()
        lake.schedule()
        first.parts.queue.succeed(lake.pick())
        world._pass(1)
        later = create_app(ServiceSettings(url), clock=world)
        lake.schedule(1)
        first.parts.queue.succeed(lake.pick())
        assert numbers(first)["lakewarden_task_attempts_total"] == {
            ("SUCCESS", "expire_snapshots"): 2.0
        }
        assert b'outcome="SUCCESS",queue="expire_snapshots"} 1.0' in later.state.metrics.text()
        later.state.parts.database.close()


def test_requests_are_counted_by_what_they_ask_and_not_by_whom_they_name(plain: Service) -> None:
    lake = plain.warehouse()
    for _ in range(3):
        plain.get(f"{lake.path}/tables")
    for number in range(5):
        plain.call(f"VERB{number}", f"//nothing/{number}", role=None)
    counted = numbers(plain)["lakewarden_http_requests_total"]
    path = "/management/v1/warehouse/{warehouse_id}/tables"
    assert counted["GET", path, "200"] == 3
    assert counted["other", "unmatched", "404"] == 5
    assert str(lake.id) not in str(counted)


# -- the log -------------------------------------------------------------------------------------


def test_every_request_is_a_line_that_says_who_and_what(
    plain: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = plain.get("/info")
        plain.get("//health", role=None)
    lines = [
        json.loads(JsonLines().format(one))
        for one in caplog.records
        if one.name == "lakewarden.access"
    ]
    line, health = lines
    assert (line["level"], line["action"], line["status"]) == ("info", "request", 200)
    assert (line["caller"], line["path"]) == ("adminer", "/management/v1/info")
    assert line["milliseconds"] >= 0
    assert line["time"].endswith("Z")
    assert health["level"] == "debug"
    assert answer.headers["x-request-id"]


def test_lines_about_a_request_carry_its_id() -> None:
    from lakewarden.service.logs import request_id

    token = request_id.set("one")
    line = json.loads(
        JsonLines().format(logging.makeLogRecord({"msg": "a\nb", "levelname": "INFO"}))
    )
    request_id.reset(token)
    assert (line["request_id"], line["message"]) == ("one", "a\nb")
    assert "\n" not in JsonLines().format(logging.makeLogRecord({"msg": "a\nb"}))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Bearer lwt_0123abcd done", "Bearer lwt_… done"),
        ("postgresql://me:pw@host/x and s3://bucket/a", "postgresql://…@host/x and s3://bucket/a"),
        ("password=hunter2 next", "password=… next"),
        ("'aws_secret_access_key': 'abc', 'x'", "'aws_secret_access_key': '…', 'x'"),
        ("s3.session-token=abc&b", "s3.session-token=…&b"),
        ("Authorization: Bearer abc", "Authorization: Bearer …"),
        ("Authorization: Basic dXNlcjpwdw==, x", "Authorization: Basic …, x"),
        (
            "https://a.blob.core.windows.net/c?sv=2&sig=aB%2F3%3D&se=5",
            "https://a.blob.core.windows.net/c?sv=2&sig=…&se=5",
        ),
        (
            "https://b/k?X-Amz-Credential=AKIA%2F20&X-Amz-Security-Token=Fwo&X-Amz-Signature=0f3",
            "https://b/k?X-Amz-Credential=…&X-Amz-Security-Token=…&X-Amz-Signature=…",
        ),
        ("to=https%3A%2F%2Fb%3FX-Amz-Signature%3D0f3", "to=https%3A%2F%2Fb%3FX-Amz-Signature%3D…"),
        ('"password": "two words, and more", "x"', '"password": "…", "x"'),
        (r"""passphrase = 'it\'s; long' x""", "passphrase = '…' x"),
        (r"said {\"client_secret\": \"a b\"", r"said {\"client_secret\": \"…"),
        ("api-key=1 private_key=2 pwd=3", "api-key=… private_key=… pwd=…"),
        ("postgresql://me:p@ss@host/x@y", "postgresql://…@host/x@y"),
        ("design=flat, sigma=2", "design=flat, sigma=2"),
        ("the page token is not one of ours", "the page token is not one of ours"),
        ("table db.t at /data/t has 3 files", "table db.t at /data/t has 3 files"),
    ],
)
def test_secrets_are_told_by_their_looks(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize(
    "part", ["token", "token ", 'password"', "sig-", "://", "://a@", "secret=", "=\"'", "\\", "%3D"]
)
def test_secrets_are_looked_for_in_time_that_grows_with_the_text_only(part: str) -> None:
    clock = SystemClock()
    started = clock.elapsed()
    without_secrets(part * 40_000)
    assert clock.elapsed() - started < 3


def test_no_secret_is_deep_enough_to_be_logged() -> None:
    class Thing:
        def __str__(self) -> str:
            return "s3://me:hunter2@bucket"

    extra = {"details": [{"why": "password=hunter2"}, ("sig=hunter2",)], "thing": Thing()}
    line = JsonLines().format(logging.makeLogRecord({"msg": "x", **extra}))
    assert "hunter2" not in line
    assert json.loads(line)["details"] == [{"why": "password=…"}, ["sig=…"]]


# -- traces --------------------------------------------------------------------------------------


def test_traces_go_on_where_the_caller_began(template: Any, tmp_path: Any, world: World) -> None:
    place = tmp_path / "traced.db"
    place.write_bytes(template.read_bytes())
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracing = OpenTelemetry(provider.get_tracer("test"))
    app = create_app(ServiceSettings(f"sqlite:///{place}"), clock=world, tracing=tracing)
    with Service.running(app, world) as service:
        lake = service.warehouse()
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        service.get(lake.path, headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
        service.get("/nothing")
    found, missing = kept.get_finished_spans()
    assert found.name == "GET /management/v1/warehouse/{warehouse_id}"
    assert missing.name == "GET unmatched"
    codes = [(one.attributes or {})["http.response.status_code"] for one in (found, missing)]
    assert codes == [200, 404]
    assert found.kind.name == "SERVER"
    assert found.parent is not None
    assert found.parent.trace_id == int(trace, 16)
    assert missing.parent is None


def test_traces_without_the_package_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UsageError, match=r"lakewarden\[tracing\]"):
        tracing_to("http://127.0.0.1:4318/v1/traces")
