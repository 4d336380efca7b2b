"""Who may do what: every address with every role, and what a machine without tokens answers."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from lakewarden.jobs.tokens import Role
from lakewarden.service.app import create_app
from lakewarden.service.gate import OPEN, ROLE
from lakewarden.service.settings import ServiceSettings
from lakewarden.testing.simulation import World
from tests.service.small import Service, refusal

SOMEBODY = UUID(int=0xABCD)
#: What each address needs.  A new one must be added here, after a thought.
NEEDED: dict[tuple[str, str], str] = {
    ("GET", "/health"): OPEN,
    ("GET", "/metrics"): "read",
    ("GET", "/management/v1/info"): "read",
    ("GET", "/management/v1/audit"): "admin",
    ("GET", "/management/v1/warehouse"): "read",
    ("POST", "/management/v1/warehouse"): "admin",
    ("GET", "/management/v1/warehouse/{warehouse_id}"): "read",
    ("DELETE", "/management/v1/warehouse/{warehouse_id}"): "admin",
    ("GET", "/management/v1/warehouse/{warehouse_id}/tables"): "read",
    ("POST", "/management/v1/warehouse/{warehouse_id}/tables/refresh"): "operate",
    ("POST", "/management/v1/warehouse/{warehouse_id}/task/list"): "read",
    ("GET", "/management/v1/warehouse/{warehouse_id}/task/by-id/{task_id}"): "read",
    ("POST", "/management/v1/warehouse/{warehouse_id}/task/control"): "operate",
    ("POST", "/management/v1/project/task/list"): "read",
    ("GET", "/management/v1/project/task/by-id/{task_id}"): "read",
    ("POST", "/management/v1/project/task/control"): "operate",
    ("GET", "/management/v1/warehouse/{warehouse_id}/task-queue/{queue_name}/effective-config"): "read",
    **{
        (method, f"/management/v1/{base}/task-queue/{queue}/config"): role
        for base, queues in (
            ("warehouse/{warehouse_id}",
             ("expire_snapshots", "remove_orphan_files", "optimize", "{queue_name}")),
            ("project", ("task_log_cleanup", "{queue_name}")),
        )
        for queue in queues
        for method, role in (("GET", "read"), ("POST", "admin"))
    },
    **{
        ("POST", f"/management/v1/warehouse/{{warehouse_id}}/task-queue/{queue}/schedule"): "operate"
        for queue in ("expire_snapshots", "remove_orphan_files", "optimize", "{queue_name}")
    },
}  # fmt: skip


def routes(service: Service) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    pending = list(service.app.router.routes)
    while pending:
        route: Any = pending.pop()
        inner = getattr(route, "original_router", None)
        if inner is not None:
            pending += inner.routes
        elif hasattr(route, "openapi_extra"):
            for method in route.methods:
                found[method, route.path] = (route.openapi_extra or {}).get(ROLE, "nobody said")
    return found


def test_every_address_is_in_the_matrix(plain: Service) -> None:
    assert routes(plain) == NEEDED


def send(service: Service, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    address = path.format(warehouse_id=SOMEBODY, task_id=SOMEBODY, queue_name="optimize")
    body = {"content": b"{}"} if method == "POST" else {}
    given = {"content-type": "application/json", **headers}
    return service.client.request(method, address, headers=given, **body)


@pytest.mark.parametrize(("method", "path"), NEEDED, ids=lambda value: value)
def test_an_address_lets_in_whom_it_must_and_nobody_else(
    plain: Service, method: str, path: str
) -> None:
    needed = NEEDED[method, path]
    for role in Role:
        answer = send(plain, method, path, {"authorization": f"Bearer {plain.tokens[role]}"})
        if needed == OPEN or role.may(Role(needed)):
            assert answer.status_code not in {401, 403}, (role, answer.text)
        else:
            message = refusal(answer, 403, "Forbidden")
            assert needed in message
    if needed == OPEN:
        assert send(plain, method, path, {}).status_code == 200
        return
    for header in (
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer lwt_0"},
        {"authorization": f"Basic {plain.tokens[Role.ADMIN]}"},
        {"authorization": plain.tokens[Role.ADMIN]},
        {"authorization": f"Bearer {plain.tokens[Role.ADMIN]}x"},
        {"authorization": "Bearer ' OR 1=1 --"},
    ):
        answer = send(plain, method, path, header)
        refusal(answer, 401, "Unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_nothing_of_a_strangers_body_is_read(plain: Service) -> None:
    async def endless() -> Any:
        yield b"{"
        raise AssertionError("the body was read before anybody asked who sends it")

    answer = plain.client.request("POST", "/management/v1/warehouse", content=endless())
    refusal(answer, 401, "Unauthorized")


def test_a_token_is_worth_nothing_when_it_is_revoked_or_has_expired(service: Service) -> None:
    tokens = service.parts.tokens
    _, short = tokens.create("short", Role.READ, expires_at=service.world.now() + timedelta(days=1))
    headers = {"authorization": f"Bearer {short}"}
    assert service.get("/info", role=None, headers=headers).status_code == 200
    service.world._pass(86_400)
    refusal(service.get("/info", role=None, headers=headers), 401, "Unauthorized")
    tokens.revoke("reader")
    refusal(service.get("/info", role=Role.READ), 401, "Unauthorized")
    assert service.get("/info", role=Role.ADMIN).status_code == 200


def test_only_hashes_of_tokens_are_kept(plain: Service) -> None:
    import sqlalchemy as sa

    from lakewarden.jobs.schema import TOKEN

    with plain.parts.database.reading() as connection:
        kept = repr(connection.execute(sa.select(TOKEN)).all())
    assert all(secret.removeprefix("lwt_") not in kept for secret in plain.tokens.values())


# -- the audit log -------------------------------------------------------------------------------


def test_who_changed_what_is_written_down(service: Service) -> None:
    lake = service.warehouse()
    lake.enable(**{"max-snapshot-age-ms": 7, "queue-name": "not a setting"})
    service.world._pass(1)
    body = {"entity": lake.entity()}
    path = f"{lake.path}/task-queue/expire_snapshots/schedule"
    task = service.post(path, body, role=Role.OPERATE).json()["task-id"]
    service.world._pass(1)
    lake.control("cancel", task)
    service.world._pass(1)
    # What was refused or only read changed nothing.
    service.post(path, body, role=Role.READ)
    service.get(f"{lake.path}/task/by-id/{task}")
    service.call("DELETE", lake.path)
    entries = service.get("/audit").json()["entries"]
    assert [set(one) for one in entries] == [
        {"at", "actor", "action", "project-id", "warehouse-id", "context"}
    ] * 4
    assert [(one["actor"], one["action"]) for one in reversed(entries)] == [
        ("adminer", "modify_task_queue_config"),
        ("operateer", "schedule_task"),
        ("adminer", "control_tasks"),
        ("adminer", "delete_warehouse"),
    ]
    assert {one["warehouse-id"] for one in entries} == {str(lake.id)}
    assert entries[3]["context"]["queue_config"] == {
        "enable-expire-snapshots": True,
        "max-snapshot-age-ms": 7,
    }
    assert entries[1]["context"] == {"action": "cancel", "task_ids": [task], "scheduled_for": None}


def test_the_audit_log_is_read_by_page_and_ends(service: Service) -> None:
    lake = service.warehouse()
    for number in range(7):
        service.world._pass(number % 2)
        lake.enable(**{"min-snapshots-to-keep": number + 1})
    seen, token = [], None
    for _ in range(3):
        query = {"page-size": 3} | ({} if token is None else {"page-token": token})
        answer = service.get("/audit", params=query).json()
        seen += [
            one["context"]["queue_config"]["min-snapshots-to-keep"] for one in answer["entries"]
        ]
        token = answer["next-page-token"]
    assert token is None
    assert sorted(seen) == list(range(1, 8))


# -- without tokens ------------------------------------------------------------------------------


@pytest.fixture
def alone(template: Path, tmp_path: Path, world: World) -> Any:
    place = tmp_path / "alone.db"
    place.write_bytes(template.read_bytes())
    settings = ServiceSettings(f"sqlite:///{place}", authenticate=False)
    with Service.running(create_app(settings, clock=world), world) as made:
        yield made


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8181", "[::1]:8181", "LOCALHOST:1"])
def test_this_machine_needs_no_token(alone: Service, host: str) -> None:
    assert alone.get("/info", role=None, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["example.com", "localhost.example.com", "10.0.0.1", "127.0.0.1.nip.io", "", "[::", "a b"],
)
def test_other_names_for_this_machine_are_not_answered(alone: Service, host: str) -> None:
    refusal(alone.get("/info", role=None, headers={"host": host}), 403, "Forbidden")


def test_pages_of_other_sites_change_nothing(alone: Service) -> None:
    lake = alone.warehouse()
    path = f"{lake.path}/tables/refresh"
    evil = {"origin": "http://evil.example", "host": "localhost:8181"}
    refusal(alone.call("POST", path, role=None, headers=evil), 403, "Forbidden")
    refusal(
        alone.call("POST", path, role=None, headers={**evil, "origin": "null"}), 403, "Forbidden"
    )
    own = {"origin": "http://localhost:8181", "host": "localhost:8181"}
    # It is let in, and then finds nothing at that place: the tables stay known.
    answer = alone.call("POST", path, role=None, headers=own)
    assert (answer.status_code, answer.json()["gone"]) == (200, 0)
    # What a page can send without asking first is no JSON.
    text = {"host": "localhost:8181", "content-type": "text/plain"}
    answer = alone.client.request(
        "POST", f"/management/v1{lake.path}/task/control", headers=text, content=b"{}"
    )
    refusal(answer, 415, "UnsupportedMediaType")


def test_whoever_needs_no_token_is_called_local(alone: Service) -> None:
    lake = alone.warehouse()
    path = f"{lake.path}/task-queue/optimize/config"
    assert alone.post(path, {"queue-config": {}}, role=None).status_code == 204
    assert alone.get("/audit", role=None).json()["entries"][0]["actor"] == "local"
