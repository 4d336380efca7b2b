"""What follows from a commit: it is written down, and tasks that it makes worthwhile are queued.

Both in one transaction of the service's database, so that no crash in between loses a task.  The commit
itself was made before, on the store or in a catalog, by whoever writes: a change detector compares what
a log, a catalog or a listing shows (`marker`) with what was seen last, and looks closer at tables that
differ.  As long as a commit is not written down it is news, so it does not matter who was away when
it was made.  The same commit told twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from lakewarden.expiry import SnapshotHistory
from lakewarden.jobs.config import ExpireSettings, OptimizeSettings, OrphanSettings, exclusion
from lakewarden.jobs.config_store import ConfigStore, read_config
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS, OPTIMIZE, REMOVE_ORPHAN_FILES
from lakewarden.jobs.refusals import RequestRefused
from lakewarden.jobs.scheduling import (
    Decision,
    Fragmentation,
    after_failure,
    expire_snapshots,
    expire_versions,
    first_orphan_run,
    optimize,
    sooner_orphan_run,
)
from lakewarden.jobs.schema import ENTITY, SLOT
from lakewarden.jobs.tasks import NewTask, Origin, Scope
from lakewarden.jobs.transitions import CHUNK
from lakewarden.jobs.warehouses import TableEntity, entity


@dataclass(frozen=True, slots=True)
class Change:
    """A table as it is after a commit.  What is None is not known, and decides nothing."""

    table_id: UUID
    #: What names the commit: a metadata location, a version.
    marker: str
    at: datetime
    properties: Mapping[str, str] | None = None
    #: The snapshots of an Iceberg table, or when the versions of a Lance table were written.
    history: SnapshotHistory | None = None
    versions: Sequence[datetime] | None = None
    fragmentation: Fragmentation | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a commit led to for one queue.  No task id: not worthwhile, or a task is there already."""

    table_id: UUID
    queue: str
    decision: Decision
    task_id: UUID | None = None
    #: Whether the task that is there runs already, and may not have seen the commit.
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Commits:
    """Writes commits down."""

    queue: TaskQueue

    def record(self, scope: Scope, changes: Sequence[Change]) -> list[Outcome]:
        """Write down commits to tables of a warehouse, and queue what they make worthwhile."""
        with self.queue.database.writing() as connection:
            return self.record_with(connection, scope, changes)

    def record_with(
        self, connection: sa.Connection, scope: Scope, changes: Sequence[Change]
    ) -> list[Outcome]:
        """Do the same within a transaction of the caller's."""
        now = self.queue.database.moment(connection)
        configs = _configs(connection, scope)
        # In one order, so that two that tell of the same tables do not wait for each other.
        ordered = sorted(changes, key=lambda change: change.table_id)
        found: list[Outcome] = []
        for change in ordered:
            table = _write_down(connection, scope, change)
            if table is None:
                continue
            follows = [
                self._follow(connection, scope, table, queue, decision)
                for queue, decision in _decisions(connection, scope, table, change, configs, now)
            ]
            if any(one.missed for one in follows):
                # Still news: every look finds it again until the attempt has ended.
                mine = ENTITY.c.id == table.id
                connection.execute(sa.update(ENTITY).where(mine).values(marker=None))
            found += follows
        return found

    def unseen(self, scope: Scope, markers: Mapping[UUID, str]) -> list[UUID]:
        """Return the tables whose last commit is not the one that was seen last.

        All that a detector has to know: one request to the catalog, or to the store, for each table.
        """
        seen: dict[UUID, str | None] = {}
        ids = list(markers)
        with self.queue.database.reading() as connection:
            for first in range(0, len(ids), CHUNK):
                query = sa.select(ENTITY.c.id, ENTITY.c.marker).where(
                    ENTITY.c.id.in_(ids[first : first + CHUNK]),
                    ENTITY.c.warehouse_id == scope.warehouse_id,
                    ENTITY.c.active,
                )
                seen |= {row.id: row.marker for row in connection.execute(query)}
        return [table for table in ids if table in seen and seen[table] != markers[table]]

    def configure(
        self,
        scope: Scope,
        queue: str,
        config: object,
        max_seconds_since_last_heartbeat: int | None = None,
        *,
        joined: sa.Connection | None = None,
    ) -> None:
        """Set a queue's config, and decide anew about the tables that it concerns.

        The first look for orphans is queued at once, and the next one comes sooner where the run
        before would have said so.  For the rest nobody knows enough here; the last commits are forgotten, so
        that the detector looks at every table.  Nobody has to write to a table to wake it up.
        """
        with self.queue.database.writing(joined) as connection:
            before = read_config(connection, scope, REMOVE_ORPHAN_FILES).config
            ConfigStore(self.queue.database).set_with(
                connection, scope, queue, config, max_seconds_since_last_heartbeat
            )
            if scope.warehouse_id is not None:
                self._reconsider(connection, scope, before)

    def _reconsider(
        self, connection: sa.Connection, scope: Scope, before: Mapping[str, Any]
    ) -> None:
        mine = sa.and_(ENTITY.c.warehouse_id == scope.warehouse_id, ENTITY.c.active)
        now = self.queue.database.moment(connection)
        stored = _configs(connection, scope)[REMOVE_ORPHAN_FILES]
        connection.execute(
            sa.update(ENTITY).where(mine, ENTITY.c.marker.is_not(None)).values(marker=None)
        )
        # What has failed may go well now.
        slots = sa.and_(SLOT.c.slot.startswith(scope.slots), SLOT.c.failed_at.is_not(None))
        connection.execute(sa.update(SLOT).where(slots).values(failed_at=None))
        # They stay until the tasks are there.
        query = (
            sa.select(ENTITY)
            .where(mine)
            .order_by(ENTITY.c.id)
            .with_for_update(read=True, key_share=True)
        )
        tables = [entity(row) for row in connection.execute(query)]
        wanted = [table for table in tables if _wants_orphans_gone(table, stored)]

        def task(table: TableEntity, decision: Decision) -> NewTask:
            at, why = decision.at or now, decision.reason
            return NewTask(REMOVE_ORPHAN_FILES, scope, table.entity, at, Origin.COMMIT, why)

        slot = {table.id: task(table, Decision(now, "")).slot for table in wanted}
        ran_at = _all_ran_at(connection, list(slot.values()))
        firsts = [
            task(table, first_orphan_run(now, ran_at.get(slot[table.id]))) for table in wanted
        ]
        # Together: a warehouse may have thousands, and nobody else writes meanwhile.
        made = self.queue.enqueue(firsts, connection=connection)
        if before == stored:
            return
        for table, first in zip(wanted, made, strict=True):
            if first is None:
                sooner = _sooner(table, before, stored, now, ran_at.get(slot[table.id]))
                if sooner is not None:
                    self.queue.bring_forward(task(table, sooner), connection)

    def _follow(
        self,
        connection: sa.Connection,
        scope: Scope,
        table: TableEntity,
        queue: str,
        decision: Decision,
    ) -> Outcome:
        if decision.at is None:
            return Outcome(table.id, queue, decision)
        task = NewTask(queue, scope, table.entity, decision.at, Origin.COMMIT, decision.reason)
        (made,) = self.queue.enqueue([task], connection=connection)
        missed = False
        if made is None and queue != REMOVE_ORPHAN_FILES:
            # How often to look for orphans, the last run has decided.
            self.queue.bring_forward(task, connection)
            missed = not self.queue.is_waiting(task, connection)
        return Outcome(table.id, queue, decision, made, missed)


def _configs(connection: sa.Connection, scope: Scope) -> dict[str, Mapping[str, Any]]:
    queues = (EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES, OPTIMIZE)
    return {queue: read_config(connection, scope, queue).config for queue in queues}


def _write_down(connection: sa.Connection, scope: Scope, change: Change) -> TableEntity | None:
    """Return the table if the commit is news, None if it was told before or the table is gone."""
    told: dict[str, Any] = {"marker": change.marker, "changed_at": change.at}
    if change.properties is not None:
        told["properties"] = dict(change.properties)
    news = (
        sa.update(ENTITY)
        .where(
            ENTITY.c.id == change.table_id,
            ENTITY.c.warehouse_id == scope.warehouse_id,
            ENTITY.c.active,
            ENTITY.c.marker.is_distinct_from(change.marker),
        )
        .values(told)
        .returning(ENTITY)
    )
    row = connection.execute(news).one_or_none()
    return None if row is None else entity(row)


def _decisions(
    connection: sa.Connection,
    scope: Scope,
    table: TableEntity,
    change: Change,
    configs: Mapping[str, Mapping[str, Any]],
    now: datetime,
) -> Iterator[tuple[str, Decision]]:
    """Yield what each queue makes of a table that it concerns."""
    for queue, stored in configs.items():
        try:
            if exclusion(queue, table.properties, stored, table.type) is not None:
                continue
            slot = NewTask(queue, scope, table.entity, now).slot
            ran_at, failed_at = _last(connection, slot)
            decision: Decision | None
            if queue == EXPIRE_SNAPSHOTS:
                decision = _expiry(change, ExpireSettings.of(table.properties, stored), now)
            elif queue == OPTIMIZE:
                wanted = OptimizeSettings.of(table.properties, stored)
                decision = _optimize(change, wanted, now, ran_at)
            else:
                decision = first_orphan_run(now, ran_at)
        except RequestRefused as refusal:
            # Nobody's commit fails because of a property that cannot be read.
            decision = Decision(None, refusal.message)
        else:
            decision = None if decision is None else after_failure(decision, failed_at)
        if decision is not None:
            yield queue, decision


def _expiry(change: Change, settings: ExpireSettings, now: datetime) -> Decision | None:
    if change.history is not None:
        return expire_snapshots(change.history, settings, now)
    return None if change.versions is None else expire_versions(change.versions, settings, now)


def _optimize(
    change: Change, settings: OptimizeSettings, now: datetime, ran_at: datetime | None
) -> Decision | None:
    if change.fragmentation is None:
        return None
    return optimize(change.fragmentation, settings, now, ran_at)


def _last(connection: sa.Connection, slot: str) -> tuple[datetime | None, datetime | None]:
    """Return when the last run in a slot ended, and when the last failure."""
    query = sa.select(SLOT.c.ran_at, SLOT.c.failed_at).where(SLOT.c.slot == slot)
    row = connection.execute(query).one_or_none()
    return (None, None) if row is None else (row.ran_at, row.failed_at)


def _all_ran_at(connection: sa.Connection, slots: Sequence[str]) -> dict[str, datetime | None]:
    found: dict[str, datetime | None] = {}
    for first in range(0, len(slots), CHUNK):
        chosen = SLOT.c.slot.in_(slots[first : first + CHUNK])
        query = sa.select(SLOT.c.slot, SLOT.c.ran_at).where(chosen)
        found |= {row.slot: row.ran_at for row in connection.execute(query)}
    return found


def _sooner(
    table: TableEntity,
    before: Mapping[str, Any],
    stored: Mapping[str, Any],
    now: datetime,
    ran_at: datetime | None,
) -> Decision | None:
    """Return when to look for orphans if a new config wants it sooner than the last run said."""
    try:
        wanted = OrphanSettings.of(table.properties, stored)
    except RequestRefused:
        # No task can run with it.
        return None
    try:
        settings = OrphanSettings.of(table.properties, before)
    except RequestRefused:
        settings = None
    return sooner_orphan_run(settings, wanted, now, ran_at)


def _wants_orphans_gone(table: TableEntity, stored: Mapping[str, Any]) -> bool:
    try:
        return exclusion(REMOVE_ORPHAN_FILES, table.properties, stored, table.type) is None
    except RequestRefused:
        # No config is refused because of one table's property that cannot be read.
        return False
