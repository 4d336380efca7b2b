"""Who may come in.  Asked before anything of a request is read but its headers.

A route names the role that it needs; one that names none needs the highest.  Without authentication
only this machine is answered, and no web page of another site can use a browser on it: the address
must be a loopback name, and whoever changes something must not come from elsewhere.
"""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from lakewarden.jobs.tokens import Role
from lakewarden.service.failures import unauthorized, web_error
from lakewarden.service.parts import Parts

#: Where Lakekeeper's clients look for all of this.
MANAGEMENT = "/management/v1"
#: Under this name a route's description says which role it needs; the OpenAPI document shows it.
ROLE = "x-required-role"
#: For routes that everybody may call.
OPEN = "none"
#: Deeper than anything that makes sense, and shallow enough for everyone who reads it later.
_DEPTH_MAX = 64
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, by the name that the audit log shows."""

    name: str
    role: Role


#: Who calls when nobody needs a token.
LOCAL = Caller("local", Role.ADMIN)


def needs(role: Role) -> dict[str, Any]:
    """Describe a route that needs a role."""
    return {ROLE: role.value}


class GuardedRoute(APIRoute):
    """A route that lets only those in who may, and then reads the body with care."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        needed = (self.openapi_extra or {}).get(ROLE, Role.ADMIN.value)
        has_body = self.body_field is not None or "requestBody" in (self.openapi_extra or {})

        async def guarded(request: Request) -> Response:
            parts: Parts = request.app.state.parts
            if needed != OPEN:
                refusal = await _let_in(request, parts, Role(needed))
                if refusal is not None:
                    return refusal
            if has_body:
                await _check_body(request)
            return await handle(request)

        return guarded


async def _let_in(request: Request, parts: Parts, needed: Role) -> Response | None:
    """Find out who calls, and return None if they may."""
    if not parts.settings.authenticate:
        _check_local(request)
        request.state.caller = LOCAL
        return None
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        return unauthorized(
            "a token is needed: send the header Authorization: Bearer TOKEN; an operator makes one "
            "with lakewarden token create"
        )
    holder = await run_in_threadpool(parts.tokens.holder, secret.strip())
    if holder is None:
        return unauthorized("the token is not known, was revoked or has expired; ask for a new one")
    request.state.caller = Caller(holder.name, holder.role)
    if not holder.role.may(needed):
        raise web_error(
            403,
            f"this needs the role {needed.value}, and the token {holder.name!r} has {holder.role.value}",
        )
    return None


def _check_local(request: Request) -> None:
    said = request.headers.get("host", "")
    try:
        host = urlsplit(f"//{said}").hostname or ""
    except ValueError:
        host = ""
    if not is_loopback(host):
        raise web_error(
            403, "without authentication, only requests to a loopback address are answered"
        )
    origin = request.headers.get("origin")
    if origin is not None and request.method != "GET" and origin.partition("://")[2] != said:
        raise web_error(403, "pages of other sites may not change anything here")


def is_loopback(host: str) -> bool:
    """Tell whether a name or address can mean this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _check_body(request: Request) -> None:
    """Refuse what is no JSON, and JSON that some part of the service could not keep."""
    body = await request.body()
    if not body:
        return
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _JSON:
        raise web_error(415, f"the body must be {_JSON}; say so in the Content-Type header")
    problem = await run_in_threadpool(_problem_of, body)
    if problem is not None:
        raise web_error(400, f"the body {problem}; nothing was done")


def _problem_of(body: bytes) -> str | None:
    try:
        found = json.loads(body.decode())
    except (ValueError, RecursionError):
        return "is no JSON"
    level: list[Any] = [found]
    for _ in range(_DEPTH_MAX):
        inner: list[Any] = []
        for one in level:
            match one:
                case dict():
                    inner += one.keys()
                    inner += one.values()
                case list():
                    inner += one
                case str() if "\x00" in one or not _is_text(one):
                    return "holds characters that are none (NUL, or half of a pair)"
                case float() if not math.isfinite(one):
                    return "holds a number that is none (NaN, or one too large)"
                case _:
                    pass
        if not inner:
            return None
        level = inner
    return f"is nested more than {_DEPTH_MAX} deep"


def _is_text(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= one <= "\udfff" for one in text)
