"""A service and its callers, made short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI

from lakewarden.jobs.tasks import Claim, EntityType, Scope
from lakewarden.jobs.tokens import Role
from lakewarden.jobs.warehouses import FoundTable, WarehouseKind
from lakewarden.service.parts import Parts
from lakewarden.testing.simulation import World

BASE = "/management/v1"
#: What every answer that is an error has, and nothing else.
ERROR_KEYS = {"message", "type", "code"}


@dataclass
class Client:
    """Calls an application from code that is not async."""

    app: FastAPI
    portal: BlockingPortal

    def request(self, method: str, address: str, **more: Any) -> httpx.Response:
        return self.portal.call(partial(self._request, method, address, **more))

    async def _request(self, method: str, address: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, address, **more)


@dataclass
class Service:
    """An application, and those who call it."""

    app: FastAPI
    world: World
    client: Client
    tokens: Mapping[Role, str]

    @classmethod
    @contextmanager
    def running(cls, app: FastAPI, world: World) -> Iterator[Service]:
        parts: Parts = app.state.parts
        tokens = {role: parts.tokens.create(f"{role.value}er", role)[1] for role in Role}
        with start_blocking_portal() as portal:
            yield cls(app, world, Client(app, portal), tokens)
        parts.database.close()

    @property
    def parts(self) -> Parts:
        parts: Parts = self.app.state.parts
        return parts

    def call(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        role: Role | None = Role.ADMIN,
        **more: Any,
    ) -> httpx.Response:
        """Send a request; the address is one below /management/v1, unless it begins with //."""
        headers = dict(more.pop("headers", {}))
        if role is not None:
            headers.setdefault("authorization", f"Bearer {self.tokens[role]}")
        if json is not None:
            more["json"] = json
        address = path[1:] if path.startswith("//") else BASE + path
        return self.client.request(method, address, headers=headers, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.call("GET", path, **more)

    def post(self, path: str, json: Any = None, **more: Any) -> httpx.Response:
        return self.call(
            "POST", path, {} if json is None and "content" not in more else json, **more
        )

    # -- what is there ---------------------------------------------------------------------------

    def warehouse(
        self, tables: int = 1, properties: Mapping[str, str] | None = None, name: str = "lake"
    ) -> Lake:
        """Register a warehouse whose tables nobody has looked at."""
        info = self.parts.warehouses.register(name, WarehouseKind.LANCE, f"/nowhere/{name}")
        found = [
            FoundTable(("db", f"t{number:03}"), kind, f"/nowhere/{number}", dict(properties or {}))
            for number, kind in enumerate(
                [EntityType.TABLE, *[EntityType.GENERIC_TABLE] * (tables - 1)]
            )
        ]
        known = self.parts.warehouses.refresh(info.id, found)
        return Lake(self, info.id, [one.id for one in known])


@dataclass
class Lake:
    """A warehouse as its callers know it; its first table is an Iceberg table, the others are not."""

    service: Service
    id: UUID
    tables: list[UUID]

    @property
    def path(self) -> str:
        return f"/warehouse/{self.id}"

    @property
    def scope(self) -> Scope:
        return Scope(warehouse_id=self.id)

    def entity(self, number: int = 0) -> dict[str, str]:
        kind = "table" if number == 0 else "generic-table"
        return {"type": kind, f"{kind}-id": str(self.tables[number])}

    def enable(self, queue: str = "expire_snapshots", /, **config: Any) -> None:
        switch = f"enable-{queue.replace('_', '-')}"
        body = {"queue-config": {switch: True, **config}}
        answer = self.service.post(f"{self.path}/task-queue/{queue}/config", body)
        assert answer.status_code == 204, answer.text

    def schedule(self, number: int = 0, queue: str = "expire_snapshots", /, **more: Any) -> str:
        body = {"entity": self.entity(number), **more}
        answer = self.service.post(f"{self.path}/task-queue/{queue}/schedule", body)
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["task-id"]
        return found

    def listed(self, **wanted: Any) -> list[dict[str, Any]]:
        answer = self.service.post(f"{self.path}/task/list", wanted)
        assert answer.status_code == 200, answer.text
        tasks: list[dict[str, Any]] = answer.json()["tasks"]
        return tasks

    def details(self, task: str, **query: Any) -> dict[str, Any]:
        answer = self.service.get(f"{self.path}/task/by-id/{task}", params=query)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def control(self, action: str, *tasks: str, **more: Any) -> httpx.Response:
        body = {"action": {"action-type": action, **more}, "task-ids": list(tasks)}
        return self.service.post(f"{self.path}/task/control", body)

    def pick(self, queue: str = "expire_snapshots") -> Claim:
        (claim,) = self.service.parts.queue.pick(queue)
        return claim


def refusal(answer: httpx.Response, code: int, name: str) -> str:
    """Check that an answer is an error as Iceberg clients know it, and return its message."""
    assert answer.status_code == code, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() - {"stack"} == ERROR_KEYS, error
    assert (error["code"], error["type"]) == (code, name), error
    assert ("stack" in error) == (code >= 500)
    message: str = error["message"]
    assert message
    assert "\n" not in message
    return message
