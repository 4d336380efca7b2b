"""The task after a task: when a table is worth the next run, as the run itself has seen it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from lakewarden.errors import LakewardenError
from lakewarden.jobs.config import ExpireSettings, OptimizeSettings, OrphanSettings
from lakewarden.jobs.queues import DAY_SECONDS
from lakewarden.jobs.scheduling import (
    Decision,
    OrphanRun,
    after_orphan_run,
    expire_snapshots,
    expire_versions,
    gathered_seconds,
)
from lakewarden.jobs.sources import Look, Source
from lakewarden.jobs.tasks import Claim, FixedBy, NewTask, Origin
from lakewarden.jobs.warehouses import TableEntity
from lakewarden.maintenance.optimize import Row

_LOG = logging.getLogger("lakewarden.jobs")
_DAY = timedelta(seconds=DAY_SECONDS)


@dataclass(frozen=True, slots=True)
class Next:
    """What was decided, and the task that follows from it, if one does."""

    decision: Decision
    task: NewTask | None = None

    @property
    def at(self) -> datetime | None:
        return None if self.task is None else self.task.scheduled_for


def after_orphans(
    claim: Claim,
    table: TableEntity,
    look: Look,
    settings: OrphanSettings,
    deleted_bytes: int,
    now: datetime,
) -> Next:
    """Look again when enough will have gathered, at the rate that this run saw.

    A table is as old as the oldest version that it has, or as long as it is known, whichever is longer.
    """
    created = min(look.oldest or table.created_at, table.created_at)
    seconds = gathered_seconds(now, claim.done_at, table_created_at=created)
    decision = after_orphan_run(OrphanRun(deleted_bytes, seconds), settings, now)
    return _next(claim, table, decision, decision.at)


def after_expiry(
    claim: Claim,
    table: TableEntity,
    settings: object,
    source: Source,
    now: datetime,
    *,
    idle: bool,
) -> Next:
    """Come back when enough of what is left will be old enough: no commit may ever tell.

    Not within a day of a run that did something.  What tags, branches and clones hold looks old, and
    does not go: if enough looks old right after a run, that is why, and no commit makes a difference
    before the day is over.
    """
    assert isinstance(settings, ExpireSettings)
    try:
        look = source.look(table)
    except LakewardenError as error:
        # What was done is done; the detector finds the table again, or that it is gone.
        _LOG.info("table %s was not looked at again: %s", table.id, error.message)
        return Next(Decision(None, "the table could not be looked at again"))
    if look.history is not None:
        decision = expire_snapshots(look.history, settings, now)
    else:
        decision = expire_versions(look.versions or (), settings, now)
    if decision.at is None or decision.at > now:
        at = decision.at
        if at is not None and not idle:
            at = max(at, now + _DAY)
        return _next(claim, table, decision, at)
    held = Decision(
        now + _DAY, f"{decision.reason}; tags, branches or clones hold what the last run has left"
    )
    return _next(claim, table, held, held.at, fixed_by=FixedBy.RUN)


def after_optimize(
    claim: Claim, table: TableEntity, settings: OptimizeSettings, row: Row, now: datetime
) -> Next:
    """Come back for what was put off; what is written meanwhile, commits tell of."""
    if not row.deferred:
        return Next(Decision(None, "nothing was put off"))
    at = now + timedelta(seconds=settings.min_interval_seconds)
    return _next(
        claim, table, Decision(at, f"{row.deferred} groups of files were beyond max-bytes"), at
    )


def _next(
    claim: Claim,
    table: TableEntity,
    decision: Decision,
    at: datetime | None,
    *,
    fixed_by: FixedBy | None = None,
) -> Next:
    if at is None:
        return Next(decision)
    task = NewTask(
        claim.queue,
        claim.scope,
        table.entity,
        at,
        Origin.ADAPTIVE,
        decision.reason,
        fixed_by=fixed_by,
    )
    return Next(decision, task)
