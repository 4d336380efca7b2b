"""What kind of failure an error is, and what is told of those that nobody foresaw."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from traceback import format_exception

from lakewarden.errors import ErrorKind, LakewardenError
from lakewarden.jobs import results
from lakewarden.jobs.holding import Holding
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.tasks import Claim, Failure

_LOG = logging.getLogger("lakewarden.jobs")
_LINE_MAX = 300


def in_words(error: Exception) -> str:
    """Return the first line of what an error says, with its name."""
    line = str(error).strip().partition("\n")[0][:_LINE_MAX]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def unforeseen(holding: Holding, claim: Claim, error: Exception) -> str:
    """Log the whole of an error, without what nobody may read; return what its task says of it."""
    trace = "".join(format_exception(error)).strip()
    _LOG.error("task %s failed: %s", claim.task_id, holding.hidden(claim, trace))
    return f"the run failed ({in_words(error)}); see the worker's log"


def failure_at_table(queue: TaskQueue, claim: Claim, kind: str | None) -> Failure:
    """Tell failures that stay from those that may pass.

    Expiry takes a version's files before the version itself, so whoever looks at the table in between,
    or after it was killed, sees what looks like damage.  Tasks are asked about; a cleanup by hand
    nobody here knows of, so damage counts when it is seen a second time.  What else is wrong is wrong
    with or without others.
    """
    failure = results.failure_of(kind)
    if results.is_damage(kind) and (claim.attempt == 1 or queue.had_company(claim)):
        return Failure.TRANSIENT
    return failure


class Reporting:
    """Reports what goes wrong inside as the failure of all tasks that nothing was reported about.

    If Spark does not answer any more, that is no task's fault: `is_lost` is asked, and ends the worker.
    """

    def __init__(
        self, holding: Holding, claims: Sequence[Claim], is_lost: Callable[[], bool]
    ) -> None:
        self._holding = holding
        self._claims = claims
        self._is_lost = is_lost

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if isinstance(error, LakewardenError):
            words, failure = error.message, results.failure_in(error)
        else:
            # Spark's own errors, and mistakes of ours.
            words, failure = unforeseen(self._holding, self._claims[0], error), Failure.TRANSIENT
        ours = isinstance(error, LakewardenError) and error.kind is not ErrorKind.SPARK
        if (not ours and self._is_lost()) or self._holding.stop.is_set():
            words, failure = f"the worker is shutting down ({words})", Failure.STOPPED
        held = {claim.task_id for claim in self._holding.left()}
        for claim in self._claims:
            if claim.task_id in held:
                self._holding.fail(claim, words, failure)
        return True
