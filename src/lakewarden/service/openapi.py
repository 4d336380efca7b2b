"""The OpenAPI document: what FastAPI knows, and what it does not.

FastAPI describes its own error body, which is never sent here, and cannot see the settings of queues,
which are checked elsewhere under names of their own.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import lakewarden
from lakewarden.jobs.config import QUEUE_NAME, SETTINGS, Form, Setting
from lakewarden.jobs.config_store import HEARTBEAT_SECONDS_MAX
from lakewarden.jobs.durations import ISO_DURATION
from lakewarden.service.wire import ErrorBody

_ERROR = {"$ref": "#/components/schemas/ErrorBody"}
_CLASSES = {
    "4XX": "Refused; nothing was changed.",
    "5XX": "Failed here; the log tells more under the error's id.",
}


def config_schema_name(queue: str) -> str:
    return "".join(word.capitalize() for word in queue.split("_")) + "QueueConfig"


def config_body(queue: str) -> dict[str, Any]:
    """Describe the body that sets a queue's config."""
    properties = {
        "queue-config": {"$ref": f"#/components/schemas/{config_schema_name(queue)}"},
        "max-seconds-since-last-heartbeat": {
            "anyOf": [
                {
                    "type": "integer",
                    "format": "int64",
                    "minimum": 1,
                    "maximum": HEARTBEAT_SECONDS_MAX,
                },
                {"type": "null"},
            ]
        },
    }
    schema = {"type": "object", "properties": properties, "required": ["queue-config"]}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _setting(one: Setting) -> dict[str, Any]:
    found: dict[str, Any]
    match one.form:
        case Form.BOOLEAN:
            found = {"type": "boolean"}
        case Form.INT32 | Form.INT64:
            bits = 31 if one.form is Form.INT32 else 63
            low = -(2**bits) if one.minimum is None else one.minimum
            found = {"type": "integer", "format": f"int{bits + 1}"}
            found |= {"minimum": low, "maximum": 2**bits - 1}
        case Form.DURATION:
            found = {"type": "string", "pattern": ISO_DURATION}
    if one.nullable:
        found = {"anyOf": [found, {"type": "null"}]}
    return found if one.default is None else {**found, "default": one.default}


def _config_schema(queue: str) -> dict[str, Any]:
    properties = {one.key: _setting(one) for one in SETTINGS[queue]}
    properties[QUEUE_NAME] = {"type": "string", "description": "Added to answers; not stored."}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def install(app: FastAPI) -> None:
    """Let an application describe itself like this."""

    def document() -> dict[str, Any]:
        if not app.openapi_schema:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(
        title="Lakewarden",
        version=lakewarden.__version__,
        summary="Table maintenance: queues, tasks and what they did.",
        routes=app.routes,
    )
    parts = made.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for theirs in ("HTTPValidationError", "ValidationError"):
        schemas.pop(theirs, None)
    shapes = ErrorBody.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= shapes.pop("$defs")
    schemas["ErrorBody"] = shapes
    schemas |= {config_schema_name(queue): _config_schema(queue) for queue in SETTINGS}
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path in made["paths"].values():
        for operation in path.values():
            _describe(operation)
    return made


def _describe(operation: dict[str, Any]) -> None:
    """Add to one operation what it may answer, and what it needs."""
    answers = operation["responses"]
    answers.pop("422", None)
    for code, words in _CLASSES.items():
        answers[code] = {
            "description": words,
            "content": {"application/json": {"schema": _ERROR}},
        }
    for answer in answers.values():
        answer["headers"] = {
            "x-request-id": {
                "description": "The caller's own id, if it is a UUID, or a new one.",
                "schema": {"type": "string", "format": "uuid"},
            }
        }
    if operation.get("x-required-role", "admin") != "none":
        operation["security"] = [{"token": []}]
    config = operation.pop("x-config", None)
    if config is not None:
        schema = {
            "type": "object",
            "properties": {
                "queue-config": {
                    "allOf": [{"$ref": f"#/components/schemas/{config}"}],
                    "required": [QUEUE_NAME],
                },
                "max-seconds-since-last-heartbeat": {"type": ["integer", "null"]},
            },
            "required": ["queue-config", "max-seconds-since-last-heartbeat"],
        }
        answers["200"]["content"]["application/json"]["schema"] = schema
