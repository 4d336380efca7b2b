"""Stores and databases that take a call and stay silent: whoever asks for something else is answered."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import lance
import pyarrow as pa
import pytest

from lakewarden.formats.iceberg.patience import PatientCatalog
from lakewarden.jobs.tokens import Role
from lakewarden.service.app import create_app
from lakewarden.service.aside import Aside, OneForAll
from lakewarden.service.settings import ServiceSettings
from lakewarden.testing.simulation import World
from tests.jobs.test_worker import wait_until
from tests.service.small import BASE, Service
from tests.service.test_framing import serving


class Silence:
    """A server that takes every connection and says nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.callers: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]

    def listen(self) -> None:
        with suppress(OSError):
            while True:
                self.callers.append(self._listener.accept()[0])

    def end(self) -> None:
        """Hang up."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self.callers:
            one.close()


@pytest.fixture
def silence() -> Iterator[Silence]:
    made = Silence()
    thread = Thread(target=made.listen, daemon=True)
    thread.start()
    yield made
    with suppress(OSError):
        made.end()
    thread.join(10)


@contextmanager
def running(template: Path, place: Path, world: World, **settings: Any) -> Iterator[Caller]:
    place.write_bytes(template.read_bytes())
    app = create_app(ServiceSettings(f"sqlite:///{place}", **settings), clock=world)
    with Service.running(app, world) as service, serving(app) as port:
        yield Caller(f"http://127.0.0.1:{port}", service)


class Caller:
    """Calls a service over a real socket."""

    def __init__(self, address: str, service: Service) -> None:
        self.address = address
        self.service = service

    def __call__(
        self, method: str, path: str, *, role: Role = Role.ADMIN, seconds: float = 10, **more: Any
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.service.tokens[role]}"}
        address = path[1:] if path.startswith("//") else BASE + path
        return httpx.request(
            method, f"{self.address}{address}", headers=headers, timeout=seconds, **more
        )

    def register(self, name: str, location: str, **more: Any) -> httpx.Response:
        body = {"warehouse-name": name, "kind": "lance", "location": location, **more}
        return self("POST", "/warehouse", json=body, seconds=60)


def silent(silence: Silence) -> dict[str, Any]:
    options = {
        "aws_endpoint": f"http://127.0.0.1:{silence.port}",
        "aws_access_key_id": "k",
        "aws_secret_access_key": "s",
        "client_max_retries": "0",
    }
    return {"storage-options": options}


def test_a_store_that_stays_silent_takes_nobody_else_down(
    template: Path, tmp_path: Path, world: World, silence: Silence
) -> None:
    lance.write_dataset(pa.table({"id": [1]}), tmp_path / "lake" / "t.lance")
    with running(template, tmp_path / "tasks.db", world) as call, ThreadPoolExecutor(60) as pool:
        known = call.register("known", str(tmp_path / "lake")).json()["warehouse-id"]
        # More than there are threads that answer.
        waiting = [
            pool.submit(call.register, f"w{number}", f"s3://b{number}/x", **silent(silence))
            for number in range(45)
        ]
        wait_until(lambda: len(silence.callers) >= 4)
        wait_until(lambda: sum(one.done() for one in waiting) == 41)
        assert call("GET", "//health").json()["health"] == "healthy"
        assert call("GET", "/info").status_code == 200
        assert call("POST", f"/warehouse/{known}/task/list", json={}).status_code == 200
        refused = [one.result() for one in waiting if one.done()]
        refused.append(call("POST", f"/warehouse/{known}/tables/refresh", role=Role.OPERATE))
        for answer in refused:
            assert answer.status_code == 503, answer.text
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == (503, "ServiceUnavailable")
            assert "4 warehouses are being looked at" in error["message"]
            assert answer.headers["retry-after"] == "5"
        silence.end()
        told = [one.result(60) for one in waiting]
        unreadable = [one.json()["error"]["type"] for one in told if one.status_code == 400]
        assert unreadable == ["WarehouseNotReadable"] * 4
        # Whoever comes now is served.
        answer = call("POST", f"/warehouse/{known}/tables/refresh", role=Role.OPERATE)
        assert answer.json() == {"tables": 1, "added": 0, "gone": 0}


def test_a_catalog_that_stays_silent_is_not_waited_for_for_ever(
    template: Path,
    tmp_path: Path,
    world: World,
    silence: Silence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PatientCatalog, "patience", (1.0, 1.0))
    uri = f"http://127.0.0.1:{silence.port}"
    lance.write_dataset(pa.table({"id": [1]}), tmp_path / "lake" / "t.lance")
    with running(template, tmp_path / "tasks.db", world, looks_max=1) as call:
        for properties in (
            {"type": "rest", "uri": uri},
            {"uri": uri},
            {"uri": uri, "credential": "me:secret", "oauth2-server-uri": f"{uri}/tokens"},
        ):
            more = {"kind": "iceberg", "catalog-properties": properties}
            answer = call.register("silent", "c", **more)
            assert answer.status_code == 400, answer.text
            assert "timed out" in answer.json()["error"]["message"]
        # Its place is free again.
        assert call.register("lake", str(tmp_path / "lake")).status_code == 201


def test_a_look_that_takes_too_long_registers_nothing_and_keeps_its_place(
    template: Path, tmp_path: Path, world: World, silence: Silence
) -> None:
    lance.write_dataset(pa.table({"id": [1]}), tmp_path / "lake" / "t.lance")
    place = tmp_path / "tasks.db"
    with running(template, place, world, looks_max=1, look_seconds=0.5) as call:
        answer = call.register("late", "s3://b/x", **silent(silence))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "WarehouseNotReadable"
        assert "0.5 seconds" in answer.json()["error"]["message"]
        assert call.register("other", str(tmp_path / "lake")).status_code == 503
        silence.end()
        wait_until(lambda: call.register("other", str(tmp_path / "lake")).status_code == 201)
        names = [one["name"] for one in call("GET", "/warehouse").json()["warehouses"]]
        assert names == ["other"]


def test_a_database_that_stays_silent_is_told_in_time(
    template: Path, tmp_path: Path, world: World
) -> None:
    settings = {"health_seconds": 0.5}
    with running(template, tmp_path / "tasks.db", world, **settings) as call, ExitStack() as held:
        database = call.service.parts.database
        # Every connection is somebody else's.
        for _ in range(15):
            held.enter_context(database.reading())
        for _ in range(2):
            answer = call("GET", "//health", seconds=5)
            assert answer.status_code == 503
            assert answer.json() == {"health": "unhealthy", "services": {"database": "unhealthy"}}
        held.close()
        wait_until(lambda: call("GET", "//health").status_code == 200)


def test_many_who_ask_how_it_is_at_once_are_all_told() -> None:
    asked: list[int] = []
    answered = Event()

    def ask() -> None:
        asked.append(1)
        assert answered.wait(30)

    async def everybody() -> None:
        one = OneForAll(Aside(2, 30.0), ask)
        waiting = [asyncio.create_task(one.ask()) for _ in range(50)]
        await asyncio.sleep(0)
        answered.set()
        await asyncio.gather(*waiting)
        assert len(asked) == 1
        # Who comes later asks anew.
        await one.ask()
        assert len(asked) == 2

    asyncio.run(everybody())
