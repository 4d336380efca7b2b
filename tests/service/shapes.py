"""The shapes of Lakekeeper's bodies, key by key: what each may hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

Check = Callable[[Any], bool]

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")
_DURATION = re.compile(r"PT(\d+H)?(\d+M)?(\d+(\.\d+)?S)?")
STATES = {"RUNNING", "SCHEDULED", "STOPPING", "CANCELLED", "SUCCESS", "FAILED"}


def text(value: Any) -> bool:
    return isinstance(value, str)


def uuid(value: Any) -> bool:
    return isinstance(value, str) and str(UUID(value)) == value


def time(value: Any) -> bool:
    return isinstance(value, str) and bool(_TIME.fullmatch(value))


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def part(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value <= 1


def names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def thing(value: Any) -> bool:
    return isinstance(value, dict)


def state(value: Any) -> bool:
    return value in STATES


def duration(value: Any) -> bool:
    return isinstance(value, str) and bool(_DURATION.fullmatch(value))


def entity(value: Any) -> bool:
    kind = value["type"]
    return value.keys() == {"type", f"{kind}-id"} and uuid(value[f"{kind}-id"])


def or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


PROJECT_TASK: Mapping[str, Check] = {
    "task-id": uuid,
    "project-id": text,
    "queue-name": text,
    "status": state,
    "scheduled-for": time,
    "picked-up-at": or_null(time),
    "attempt": whole,
    "last-heartbeat-at": or_null(time),
    "progress": part,
    "parent-task-id": or_null(uuid),
    "created-at": time,
    "updated-at": or_null(time),
}
TASK = {
    **PROJECT_TASK,
    "warehouse-id": uuid,
    "entity": or_null(entity),
    "entity-name": or_null(names),
}
ATTEMPT: Mapping[str, Check] = {
    "attempt": whole,
    "status": state,
    "scheduled-for": time,
    "started-at": or_null(time),
    "duration": or_null(duration),
    "message": or_null(text),
    "created-at": time,
    "progress": part,
    "execution-details": or_null(thing),
}
_DETAILS: Mapping[str, Check] = {
    "task-data": thing,
    "execution-details": or_null(thing),
    "message": or_null(text),
    "attempts": lambda value: all(fits(one, ATTEMPT) for one in value),
}
DETAILS = {**TASK, **_DETAILS}
PROJECT_DETAILS = {**PROJECT_TASK, **_DETAILS}


def fits(found: Mapping[str, Any], shape: Mapping[str, Check]) -> bool:
    """Check that a body has every key of its shape, no other, and the right kind of value in each."""
    assert found.keys() == shape.keys()
    for key, check in shape.items():
        assert check(found[key]), (key, found[key])
    return True
