"""What goes wrong is answered in one form, and what went wrong on this side stays in the log."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from lakewarden.jobs.schema import TASK
from lakewarden.service.app import create_app
from lakewarden.service.settings import ServiceSettings
from lakewarden.testing.simulation import World
from tests.postgres import PostgresServer
from tests.service.small import Service, refusal

JSON = {"content-type": "application/json"}
LIST = "/management/v1/project/task/list"


def raw(service: Service, content: Any, path: str = LIST, **headers: str) -> Any:
    given = {"authorization": f"Bearer {list(service.tokens.values())[-1]}", **JSON, **headers}
    return service.client.request("POST", path, content=content, headers=given)


@pytest.mark.parametrize(
    "path",
    ["/", "/nothing", "/management/v1", "/management/v1/", "/management/v1/info/", "/docs", "/redoc",
     "/management/v1/warehouse/x/y", "/management//v1/info", "/health/../metrics/x", "/%00", "/\u00e9"],
)  # fmt: skip
def test_an_address_with_nothing_behind_it(plain: Service, path: str) -> None:
    refusal(plain.client.request("GET", path), 404, "NotFound")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "POST", "OPTIONS", "TRACE", "BREW"])
def test_a_method_that_is_not_possible(plain: Service, method: str) -> None:
    answer = plain.call(method, "/info")
    refusal(answer, 405, "MethodNotAllowed")
    assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize(
    "content",
    [b"{", b"nothing", b'{"a":1}}', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100 + b"1" + b"}" * 100,
     b'{"page-token":"\\u0000"}', b'{"page-token":"\\ud800"}', b'{"\\ud800":1}', b'{"a":NaN}',
     b'{"a":Infinity}', b'{"a":1e999}', b"1" * 5000, b"'a'"],
)  # fmt: skip
def test_a_body_that_is_no_json_or_none_that_can_be_kept(plain: Service, content: bytes) -> None:
    refusal(raw(plain, content), 400, "BadRequest")


@pytest.mark.parametrize("content", [b"[]", b"1", b'"text"', b"true"])
def test_a_body_that_is_another_kind_of_json(plain: Service, content: bytes) -> None:
    refusal(raw(plain, content), 422, "UnprocessableEntity")


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "x"]
)
def test_a_body_that_says_it_is_something_else(plain: Service, kind: str) -> None:
    answer = raw(plain, b"{}", **{"content-type": kind})
    refusal(answer, 415, "UnsupportedMediaType")


def test_a_body_may_name_its_characters(plain: Service) -> None:
    answer = raw(plain, b"{}", **{"content-type": "Application/JSON; charset=utf-8"})
    assert answer.status_code == 200


@pytest.mark.parametrize("said", [2**30, 5, None])
def test_a_body_that_is_too_large_is_not_read_to_its_end(plain: Service, said: int | None) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        for _ in range(1000):
            sent += 65536
            yield b" " * 65536

    headers = {} if said is None else {"content-length": str(said)}
    answer = raw(plain, endless(), **headers)
    assert "1048576" in refusal(answer, 413, "PayloadTooLarge")
    assert sent <= (0 if said == 2**30 else 2 * 1024 * 1024)


def test_a_body_of_just_the_size_is_read(plain: Service) -> None:
    padded = b"{}" + b" " * (1024 * 1024 - 2)
    assert raw(plain, padded).status_code == 200
    refusal(raw(plain, padded + b" "), 413, "PayloadTooLarge")


@pytest.mark.parametrize(
    "body",
    [
        {"page-size": "5"}, {"page-size": 1.5}, {"page-size": True}, {"page-size": 2**63},
        {"status": "RUNNING"}, {"status": ["running"]}, {"queue-name": "optimize"},
        {"queue-name": [None]}, {"created-after": 5}, {"created-after": "2026-01-01T00:00:00"},
        {"created-after": "yesterday"}, {"created-after": "9999-12-31T23:59:59-12:00"},
        {"created-before": "0001-01-01T00:00:00+12:00"}, {"page-token": 7},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_named(plain: Service, body: dict[str, Any]) -> None:
    message = refusal(plain.post("/project/task/list", body), 422, "UnprocessableEntity")
    assert next(iter(body)) in message


TABLE = {"type": "table", "table-id": "0190b7a1-0000-7000-8000-000000000001"}


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        ("/project/task/list", {"page_size": 5}, "page-size"),
        ("/project/task/list", {"queue-names": ["optimize"]}, "queue-name"),
        ("/project/task/control", {"action": {"action-type": "stop"}, "task_ids": []}, "task-ids"),
        ("/project/task/control", {"action": {"action-type": "stop", "at": 1}, "task-ids": []}, ""),
        ("/project/task-queue/task_log_cleanup/config", {"queue_config": {}}, "queue-config"),
        ("/project/task-queue/task_log_cleanup/config",
         {"queue-config": {}, "max-seconds-since-heartbeat": 90}, "max-seconds-since-last-heartbeat"),
        ("{}/task/list", {"entities": [{"type": "table", "table_id": TABLE["table-id"]}]}, "table-id"),
        ("{}/task-queue/optimize/schedule", {"entity": TABLE, "schedule-for": None}, "scheduled-for"),
        ("{}/task-queue/optimize/schedule", {"entity": TABLE, "scheduled_for": None}, "scheduled-for"),
        ("/warehouse", {"warehouse_name": "x", "kind": "lance", "location": "/x"}, "warehouse-name"),
        ("/warehouse", {"warehouse-name": "x", "kind": "lance", "location": "/x",
                        "storage_options": {"aws_secret_access_key": "hunter2"}}, "storage-options"),
    ],
    ids=range(11),
)  # fmt: skip
def test_a_key_that_nobody_knows_is_named_with_the_nearest(
    plain: Service, path: str, body: dict[str, Any], meant: str
) -> None:
    answer = plain.post(path.format(plain.warehouse().path), body)
    message = refusal(answer, 422, "UnprocessableEntity")
    assert f"did you mean {meant}?" in message if meant else "there are action-type" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    "number",
    ["x", "..%2F..%2Fetc%2Fpasswd", "%27%20OR%201=1--", "00000000-0000-0000-0000-00000000000g", "1",
     "%00", "\U0001f600", "a" * 5000],
)  # fmt: skip
@pytest.mark.parametrize(
    "path", ["/warehouse/{}", "/warehouse/{}/tables", "/warehouse/{}/task-queue/optimize/config",
             "/project/task/by-id/{}"],
)  # fmt: skip
def test_an_id_that_is_none_goes_nowhere(plain: Service, path: str, number: str) -> None:
    answer = plain.get(path.format(number))
    # A slash that was hidden makes another address.
    if answer.status_code == 404:
        assert "%2F" in number
        return
    assert "UUID" in refusal(answer, 400, "BadRequest")
    assert number not in answer.text or len(number) < 3


@pytest.mark.parametrize(
    "name", ["x" * 3000, "%F0%9F%98%80", "a%20b", "%00", "';DROP TABLE task;--", "..", "%ff"]
)
def test_a_queue_may_be_called_anything_and_is_none(service: Service, name: str) -> None:
    path = f"{service.warehouse().path}/task-queue/{name}/config"
    answer = service.get(path)
    assert answer.status_code in {200, 400, 404}, answer.text
    answer = service.post(path, {"queue-config": {}})
    assert answer.status_code in {400, 404}, answer.text
    refusal(answer, answer.status_code, answer.json()["error"]["type"])


def test_no_answer_repeats_a_value(plain: Service) -> None:
    secret = "hunter2hunter2"
    lake = plain.warehouse(name=secret)
    path = f"/warehouse/{lake.id}/task-queue"
    body = {"queue-config": {"max-snapshot-age-ms": secret}}
    # Also where a credential was pasted by mistake.
    answers = [
        plain.post(f"{path}/expire_snapshots/config", body),
        plain.post(f"{path}/{secret}/config", {"queue-config": {}}),
        plain.post(f"{path}/{secret}/schedule", {"entity": lake.entity()}),
    ]
    for answer in answers:
        assert answer.is_client_error
        assert secret not in answer.text


def test_a_request_has_the_id_it_was_given_or_a_new_one(plain: Service) -> None:
    number = "0190b7a1-0000-7000-8000-000000000001"
    answer = plain.get("/info", headers={"x-request-id": number.upper()})
    assert answer.headers["x-request-id"] == number
    seen = set()
    for strange in ("", "me", "x\r\ny: 1".replace("\r\n", " "), number + "0"):
        given = plain.get("/nothing", headers={"x-request-id": strange}).headers["x-request-id"]
        assert UUID(given).version == 4
        seen.add(given)
    assert len(seen) == 4


# -- failures on this side -----------------------------------------------------------------------


@pytest.fixture
def broken(template: Path, tmp_path: Path, world: World) -> Any:
    """A service with an address that fails, for want of a real defect."""
    place = tmp_path / "broken.db"
    place.write_bytes(template.read_bytes())
    app: FastAPI = create_app(ServiceSettings(f"sqlite:///{place}"), clock=world)

    @app.get("/defect")
    def fail() -> None:
        raise RuntimeError("the innermost secret: password=hunter2")

    with Service.running(app, world) as made:
        yield made


def test_a_defect_tells_its_id_and_the_log_the_rest(
    broken: Service, caplog: pytest.LogCaptureFixture
) -> None:
    answer = broken.client.request("GET", "/defect")
    refusal(answer, 500, "InternalServerError")
    assert "secret" not in answer.text
    (stack,) = answer.json()["error"]["stack"]
    found = re.fullmatch(r"Error ID: (\S+)", stack)
    assert found
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert record.__dict__["error_id"] == str(UUID(found[1]))
    assert record.exc_info is not None
    assert "innermost" in str(record.exc_info[1])
    # It is counted like any other answer.
    assert 'route="/defect",status="500"} 1.0' in broken.get("//metrics").text


def test_a_database_that_is_away_is_told_and_comes_back(
    postgres: PostgresServer, postgres_template: str, world: World
) -> None:
    name = postgres.database(template=postgres_template)
    app = create_app(ServiceSettings(postgres.url(name), authenticate=False), clock=world)
    with Service.running(app, world) as service:
        assert service.get("//health", role=None).json()["health"] == "healthy"
        postgres.run(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        postgres.run(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        )
        answer = service.get("//health", role=None)
        assert answer.status_code == 503
        assert answer.json() == {"health": "unhealthy", "services": {"database": "unhealthy"}}
        answer = service.post("/project/task/list", {}, role=None)
        refusal(answer, 503, "ServiceUnavailable")
        assert name not in answer.text
        postgres.run(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        assert service.get("//health", role=None).status_code == 200
        assert len(service.post("/project/task/list", {}, role=None).json()["tasks"]) == 1


def test_what_was_refused_left_no_trace(plain: Service) -> None:
    lake = plain.warehouse()
    for body in ({}, {"entity": None}, {"entity": lake.entity()}, {"entity": {"type": "project"}}):
        answer = plain.post(f"{lake.path}/task-queue/optimize/schedule", body)
        assert 400 <= answer.status_code < 500
    with plain.parts.database.reading() as connection:
        found = connection.scalar(sa.select(sa.func.count()).select_from(TASK))
    assert found == 1  # the cleanup of the log
    assert plain.get("/audit").json()["entries"] == []
