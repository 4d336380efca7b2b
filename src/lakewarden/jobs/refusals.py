"""What a request about tasks can be refused for, under the names that Lakekeeper's clients know."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from lakewarden.errors import Conflict, ErrorKind, LakewardenError, Refused

#: Times outside are slips of the pen, and the ends of the calendar lie in other years elsewhere.
_EARLIEST, _END = datetime(1970, 1, 1, tzinfo=UTC), datetime(3000, 1, 1, tzinfo=UTC)


class RequestRefused(Refused):
    """A request cannot be met: `name` and `code` are the `type` and `code` of the error's body."""

    def __init__(self, kind: ErrorKind, name: str, code: int, message: str) -> None:
        super().__init__(kind, message)
        self.name = name
        self.code = code

    def __reduce__(self) -> tuple[type[LakewardenError], tuple[ErrorKind, str, int, str]]:  # type: ignore[override]
        return type(self), (self.kind, self.name, self.code, self.message)


class TaskTakenOver(Conflict):
    """The attempt is over: it was cancelled, or somebody else has the task.  Report nothing."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.TASK_TAKEN_OVER, message)

    def __reduce__(self) -> tuple[type[TaskTakenOver], tuple[str]]:  # type: ignore[override]
        return type(self), (self.message,)


class TaskAlreadyActive(RequestRefused):
    """A task for the same table and queue waits or runs; `task_id` is None if it ended just now."""

    def __init__(self, task_id: UUID | None) -> None:
        which = "/task/list shows it" if task_id is None else f"task-id={task_id}"
        super().__init__(
            ErrorKind.TASK_ACTIVE,
            "TaskAlreadyActive",
            409,
            f"a task for this entity and queue is active already ({which}); use /task/control with "
            "run-now or run-at to run it at another time",
        )
        self.task_id = task_id

    def __reduce__(self) -> tuple[type[TaskAlreadyActive], tuple[UUID | None]]:  # type: ignore[override]
        return type(self), (self.task_id,)


def bad_request(name: str, message: str, kind: ErrorKind = ErrorKind.USAGE) -> RequestRefused:
    return RequestRefused(kind, name, 400, message)


def check_time(at: datetime) -> None:
    """Refuse a time for a task that nobody can mean."""
    if not _EARLIEST <= at < _END:
        years = f"{_EARLIEST.year} to {_END.year - 1}"
        raise bad_request("BadRequest", f"scheduled-for must be in the years {years}, in UTC")


def not_found(name: str, message: str) -> RequestRefused:
    return RequestRefused(ErrorKind.NOT_FOUND, name, 404, message)
