"""Bodies over a real socket: where one ends is sure, and none is larger than the service reads."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from time import monotonic
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from tests.service.small import Service

LIST = "/management/v1/project/task/list"
MOST = 1024 * 1024


@contextmanager
def serving(app: FastAPI) -> Iterator[int]:
    """Serve an application as `lakewarden serve` does, and yield the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    thread = Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


@pytest.fixture
def port(plain: Service) -> Iterator[int]:
    with serving(plain.app) as found:
        yield found


def exchange(port: int, head: list[str], body: bytes) -> tuple[int, dict[str, Any], bytes]:
    """Send a request byte by byte as it is given; return the answer, and what comes after it."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        lines = [
            f"POST {LIST} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            *head,
        ]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        # It may be answered before all is sent.
        with suppress(OSError):
            connection.sendall(body)
        found = b""
        while b"\r\n\r\n" not in found:
            found += _more(connection)
        begin, _, rest = found.partition(b"\r\n\r\n")
        named = dict(line.lower().split(b": ", 1) for line in begin.split(b"\r\n")[1:])
        size = int(named[b"content-length"])
        while len(rest) < size:
            rest += _more(connection)
    return int(begin.split()[1]), json.loads(rest[:size]), named.get(b"connection", b"")


def _more(connection: socket.socket) -> bytes:
    found = connection.recv(65536)
    assert found, "the connection was closed without an answer"
    return found


def chunked(body: bytes) -> bytes:
    pieces = [body[first : first + 65536] for first in range(0, len(body), 65536)]
    return b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"


def test_a_body_with_two_lengths_is_refused_and_nothing_is_read_after_it(
    plain: Service, port: int
) -> None:
    token = f"Authorization: Bearer {list(plain.tokens.values())[-1]}"
    for head in (
        ["Content-Length: 5", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked", "Content-Length: 5"],
    ):
        # No more than that: who sends on to somebody who has answered and gone may lose the answer.
        code, answer, connection = exchange(port, [token, *head], chunked(b"{}"))
        assert (code, answer["error"]["type"]) == (400, "BadRequest"), answer
        assert "Transfer-Encoding" in answer["error"]["message"]
        assert connection == b"close"


def test_a_body_in_chunks_is_counted_as_it_comes(plain: Service, port: int) -> None:
    head = [
        f"Authorization: Bearer {list(plain.tokens.values())[-1]}",
        "Transfer-Encoding: chunked",
    ]
    code, answer, _ = exchange(port, head, chunked(b"{}" + b" " * (MOST - 2)))
    assert code == 200, answer
    started = monotonic()
    code, answer, _ = exchange(port, head, chunked(b"{}" + b" " * (5 * MOST)))
    assert (code, answer["error"]["type"]) == (413, "PayloadTooLarge"), answer
    assert monotonic() - started < 10
