"""How each failure is answered: always with the body that Iceberg clients know.

What went wrong on this side is told by an id only, and in full by the log.  No answer repeats a value
that a request held: it may have been a credential in the wrong place.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from uuid import UUID

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from lakewarden.errors import Conflict, LakewardenError, StorageError, UsageError
from lakewarden.jobs.refusals import RequestRefused
from lakewarden.jobs.secrets import without_secrets
from lakewarden.world import fresh_id

log = logging.getLogger(__name__)

#: Names of errors that come from the web's own rules.
_TYPES = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    413: "PayloadTooLarge",
    415: "UnsupportedMediaType",
    422: "UnprocessableEntity",
    500: "InternalServerError",
    503: "ServiceUnavailable",
}
#: As much of a message as anyone reads.
_MESSAGE_MAX = 1000
_LOOKED_AT_MAX = 20 * _MESSAGE_MAX
_PROBLEMS_MAX = 3
_LATER = {"retry-after": "5"}
_OURS = (
    "the service could not do this; its operator finds the reason in the log, under the error's id"
)


def error_response(
    code: int,
    name: str,
    message: str,
    headers: Mapping[str, str] | None = None,
    *,
    told: bool = False,
) -> Response:
    """Return an error's answer.

    From 500 on, only the id that the log has it under is told, unless the message is meant for callers.
    """
    error: dict[str, Any] = {"message": message[:_MESSAGE_MAX], "type": name, "code": code}
    if code >= 500:
        number = UUID(fresh_id())
        # Where an exception is handled, the log gets all of it.
        log.error(
            "%s",
            message,
            exc_info=sys.exc_info()[0] is not None,
            extra={"action": "error_response", "error_id": str(number), "type": name},
        )
        if not told:
            error["message"] = _OURS
        error["stack"] = [f"Error ID: {number}"]
    return JSONResponse({"error": error}, code, headers=dict(headers or {}))


def internal_error() -> Response:
    """Return the answer to a defect."""
    return error_response(500, _TYPES[500], "a request failed in a way nobody foresaw")


def bad_framing() -> Response:
    """Return the answer to a request whose end nobody can be sure of; nothing more is read after it."""
    message = (
        "the request has both Content-Length and Transfer-Encoding, so its end is not sure; send one "
        "of them; nothing was done"
    )
    return error_response(400, _TYPES[400], message, {"connection": "close"})


def install(app: FastAPI) -> None:
    """Let every failure of an application be answered like this."""
    app.add_exception_handler(LakewardenError, _refused)
    app.add_exception_handler(RequestValidationError, _unreadable)
    app.add_exception_handler(HTTPException, _of_the_web)


def answer(error: LakewardenError) -> Response:
    """Return the answer to an error that was raised on purpose."""
    # Cut before, for it may be endless, but far beyond what is told: half of a secret looks like none.
    message = without_secrets(error.message[:_LOOKED_AT_MAX])
    match error:
        case RequestRefused():
            later = _LATER if error.code == 503 else None
            return error_response(error.code, error.name, message, later, told=True)
        case UsageError():
            return error_response(400, _TYPES[400], message)
        case Conflict():
            return error_response(409, "Conflict", message)
        case StorageError():
            # The service's own database; what warehouses raise is translated where it happens.
            return error_response(503, _TYPES[503], message, _LATER)
        case _:
            return error_response(500, _TYPES[500], message)


def unauthorized(message: str) -> Response:
    return error_response(401, _TYPES[401], message, {"www-authenticate": "Bearer"})


def web_error(code: int, message: str) -> HTTPException:
    return HTTPException(code, message)


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, LakewardenError)
    return answer(error)


async def _of_the_web(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = error.status_code
    name = _TYPES.get(code, HTTPStatus(code).phrase.replace(" ", ""))
    message = str(error.detail)
    if code == 404:
        message = "there is nothing at this address; the document at /openapi.json has all there is"
    if code == 405:
        message = f"{request.method} is not possible here; see the Allow header"
    return error_response(code, name, message, error.headers)


async def _unreadable(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems: Sequence[Mapping[str, Any]] = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        return error_response(400, _TYPES[400], "the body is no JSON; nothing was done")
    words = "; ".join(_problem(one) for one in problems[:_PROBLEMS_MAX])
    more = len(problems) - _PROBLEMS_MAX
    words += f"; and {more} more" if more > 0 else ""
    # Addresses that cannot be right are bad requests; bodies that can be read but not used, 422.
    code = 422 if first["loc"][0] == "body" else 400
    return error_response(code, _TYPES[code], f"{words}; nothing was done")


def _problem(one: Mapping[str, Any]) -> str:
    where = ".".join(str(part)[:100] for part in one["loc"][1:]) or str(one["loc"][0])
    message = str(one["msg"]).removeprefix("Value error, ")
    if one["type"] == "union_tag_invalid":
        # Pydantic repeats the value.
        message = f"must be one of {one['ctx']['expected_tags']}"
    elif one["type"].startswith("uuid"):
        message = "must be a UUID"
    return f"{where}: {message[:200]}"
