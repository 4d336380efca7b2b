"""Measure the HTTP API: how many requests a second, and how long each takes, for 1, 16 and 64 clients.

The service is a process of its own with tokens and 1,000 tasks, without workers.  Clients are
connections of one other process that ask again as soon as they are answered.  On SQLite; also on
PostgreSQL if `--jobs-database` names an empty database.

PARTS names the parts for `scripts/bench`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from lakewarden.jobs.config_store import ConfigStore
from lakewarden.jobs.database import migrate, open_database
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.tasks import EntityType, NewTask, Scope
from lakewarden.jobs.tokens import Role, Tokens
from lakewarden.jobs.warehouses import FoundTable, WarehouseKind, Warehouses
from lakewarden.world import SystemChance, SystemClock

PARTS = ("service-api",)
CLIENTS = (1, 16, 64)
TASKS = 1000
#: How long each case is measured, after a second that is not.
SECONDS = 5.0
WARM_SECONDS = 1.0

Found = dict[str, Any]
#: Name, method, address, bodies that are sent in turn.
Request = tuple[str, str, str, list[Any]]


def fill(url: str) -> tuple[str, list[Request]]:
    """Put tasks into an empty database, and return a token and what to ask."""
    migrate(url)
    database = open_database(url)
    chance = SystemChance()
    _, token = Tokens(database, chance).create("bench", Role.ADMIN)
    warehouses = Warehouses(database, chance)
    lake = warehouses.register("bench", WarehouseKind.LANCE, "/nowhere").id
    found = [FoundTable((f"t{n}",), EntityType.TABLE, f"/nowhere/{n}") for n in range(TASKS)]
    tables = warehouses.refresh(lake, found)
    scope, now = Scope(warehouse_id=lake), SystemClock().now()
    with database.writing() as connection:
        ConfigStore(database).set(connection, scope, "optimize", {"enable-optimize": True})
    made = TaskQueue(database, chance).enqueue(
        [NewTask("optimize", scope, table.entity, now) for table in tables]
    )
    database.close()
    assert isinstance(made[0], UUID)
    base = f"/management/v1/warehouse/{lake}"
    # The same once more would change nothing.
    configs = [{"queue-config": {"enable-optimize": True, "min-files": n}} for n in (10, 11)]
    return token, [
        ("info", "GET", "/management/v1/info", [None]),
        ("config", "GET", f"{base}/task-queue/optimize/config", [None]),
        ("details", "GET", f"{base}/task/by-id/{made[0]}", [None]),
        ("list 100", "POST", f"{base}/task/list", [{}]),
        ("change config", "POST", f"{base}/task-queue/optimize/config", configs),
    ]


@contextmanager
def serving(url: str) -> Iterator[str]:
    command = [sys.executable, "-m", "lakewarden.cli.main", "serve", "--port", "0", "--auth"]
    process = subprocess.Popen(
        [*command, "--no-workers", "--log-level", "warning"],
        env={**os.environ, "DATABASE_URL": url},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        found = re.match(r"serving  (\S+)", process.stderr.readline())
        assert found
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


async def ask(address: str, token: str, request: Request, clients: int) -> Found:
    name, method, path, bodies = request
    where = urlsplit(address)

    def written(body: Any) -> bytes:
        # By hand: a client library would take longer than the service.
        content = b"" if body is None else json.dumps(body).encode()
        return (
            f"{method} {path} HTTP/1.1\r\nhost: {where.netloc}\r\nauthorization: Bearer {token}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        ).encode() + content

    turns = itertools.cycle([written(body) for body in bodies])
    took: list[float] = []
    started = time.perf_counter() + WARM_SECONDS
    ends = started + SECONDS

    async def one() -> None:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        while (begun := time.perf_counter()) < ends:
            writer.write(next(turns))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 20"), head
            length = re.search(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            if begun >= started:
                took.append(time.perf_counter() - begun)
        writer.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    ordered = sorted(took)
    return {
        "request": name,
        "clients": clients,
        "per_second": len(took) / SECONDS,
        "median_ms": statistics.median(ordered) * 1000,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1000,
    }


def measure(parts: list[str], postgres: str | None, keep: Callable[[Found], None]) -> None:
    if "service-api" not in parts:
        return
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as place:
        urls = {"sqlite": f"sqlite:///{place}/bench.db", "postgresql": postgres}
        for kind, url in urls.items():
            if url is None:
                continue
            token, requests = fill(url)
            with serving(url) as address:
                for request in requests:
                    for clients in CLIENTS:
                        line = asyncio.run(ask(address, token, request, clients))
                        found.append({"database": kind, **line})
                        print("  service", found[-1], flush=True)
    keep({"api": found})
