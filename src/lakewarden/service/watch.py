"""Stands around every request: gives it an id, bounds its body, counts, times and logs it.

Whatever nobody else has caught is answered here, so that a defect has the body of any other error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from uuid import UUID

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lakewarden.service.failures import bad_framing, internal_error, web_error
from lakewarden.service.logs import request_id
from lakewarden.service.metrics import Metrics
from lakewarden.service.tracing import Tracing
from lakewarden.world import Clock, fresh_id

log = logging.getLogger("lakewarden.access")

REQUEST_ID = b"x-request-id"
#: Called often and by machines.
_QUIET = frozenset({"/health", "/metrics"})
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Watch:
    """The outermost layer of the application."""

    app: ASGIApp
    clock: Clock
    metrics: Metrics
    tracing: Tracing
    body_bytes_max: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        number = _id_of(headers)
        token = request_id.set(number)
        answer = _Answer(send, number)
        started = self.clock.elapsed()
        try:
            with self.tracing.request(scope, headers) as span:
                try:
                    app = bad_framing() if _has_two_lengths(headers) else self.app
                    await app(scope, _Bounded(receive, headers, self.body_bytes_max), answer)
                except Exception:  # noqa: BLE001  # the last that can answer; logs all of it
                    response = internal_error()
                    if not answer.started:
                        await response(scope, receive, answer)
                span.end(_route_of(scope), answer.status)
        finally:
            self._note(scope, answer.status, self.clock.elapsed() - started)
            request_id.reset(token)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = _route_of(scope)
        # Methods are the caller's to invent, and each would be a series of its own.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self.metrics.count_request(method, route, status, seconds)
        caller = scope.get("state", {}).get("caller")
        log.log(
            logging.DEBUG if route in _QUIET else logging.INFO,
            "%s %s %s",
            method,
            route,
            status,
            extra={
                "action": "request",
                "path": scope["path"][:500],
                "status": status,
                "milliseconds": round(seconds * 1000, 1),
                "caller": None if caller is None else caller.name,
            },
        )


def _has_two_lengths(headers: Headers) -> bool:
    """Tell whether a body has an end by each of two rules, so that others may see another end."""
    return "content-length" in headers and "transfer-encoding" in headers


def _id_of(headers: Headers) -> str:
    """Return the id that the caller gave, if it is one, or a new one."""
    try:
        return str(UUID(headers.get("x-request-id", "")))
    except ValueError:
        return str(UUID(fresh_id()))


def _route_of(scope: Scope) -> str:
    """Return the address as it is described, without anybody's ids."""
    route = scope.get("route")
    return str(getattr(route, "path_format", None) or getattr(route, "path", "unmatched"))


class _Answer:
    """Passes an answer on, and remembers how it began."""

    def __init__(self, send: Send, number: str) -> None:
        self.started = False
        self.status = 500
        self._send = send
        self._number = number

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._number
            headers["x-content-type-options"] = "nosniff"
            headers["cache-control"] = "no-store"
        await self._send(message)


class _Bounded:
    """Passes a body on as long as it is not too large, whatever its length was said to be."""

    def __init__(self, receive: Receive, headers: Headers, most: int) -> None:
        self._receive = receive
        self._most = most
        said = headers.get("content-length", "")
        self._said = int(said) if said.isdecimal() and len(said) < 20 else 0
        self._seen = 0

    async def __call__(self) -> Message:
        # One that is said to be too large is not read at all.
        self._check(self._said)
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        self._check(self._seen)
        return message

    def _check(self, size: int) -> None:
        if size > self._most:
            raise web_error(413, f"the body is larger than {self._most} bytes; nothing was done")
