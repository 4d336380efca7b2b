"""What follows from a commit: it is written down, and tasks that it makes worthwhile are queued.

Both in one transaction of the service's database, so that no crash in between loses a task.  The commit
itself was made before, on the store or in a catalog, by whoever writes: a change detector compares what
a log, a catalog or a listing shows (`marker`) with what was seen last, and looks closer at tables that
differ.  As long as a commit is not written down it is news, so it does not matter who was away when
it was made.  The same commit told twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from lakewarden.expiry import SnapshotHistory
from lakewarden.jobs.config import ExpireSettings, OptimizeSettings, OrphanSettings, exclusion
from lakewarden.jobs.config_store import ConfigStore, StoredConfig, read_config, read_configs
from lakewarden.jobs.locks import keep_warehouse, lock_all_tables, lock_tables
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
from lakewarden.jobs.tasks import NewTask, Origin, Scope, Turn
from lakewarden.jobs.transitions import CHUNK, forget_failures, set_free
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
        return self.queue.database.transact(
            lambda connection: self.record_with(connection, scope, changes)
        )

    def record_with(
        self, connection: sa.Connection, scope: Scope, changes: Sequence[Change]
    ) -> list[Outcome]:
        """Do the same within a transaction of the caller's, in a number of statements that stays small."""
        now = self.queue.database.moment(connection)
        keep_warehouse(connection, scope.warehouse_id)
        configs = _configs(connection, scope)
        news = _news(connection, scope, changes)
        slots = [
            NewTask(queue, scope, one.table.entity, now).slot for one in news for queue in configs
        ]
        last = _last(connection, slots)
        wanted = [
            (one.table, queue, decision)
            for one in news
            for queue, decision in _decisions(scope, one, configs, last, now)
        ]
        found = self._follow(connection, scope, wanted)
        # Still news: every look finds it again until the attempt has ended.
        missed = {one.table_id for one in found if one.missed}
        _write_down(connection, news, missed)
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
        that the detector looks at every table, and so is what has failed in this queue.  Nobody has to
        write to a table to wake it up.  A config that says what was said before changes nothing.
        """

        def write(connection: sa.Connection) -> None:
            keep_warehouse(connection, scope.warehouse_id)
            before = read_config(connection, scope, queue).config
            changed = ConfigStore(self.queue.database).set(
                connection, scope, queue, config, max_seconds_since_last_heartbeat
            )
            if changed and scope.warehouse_id is not None:
                self._reconsider(connection, scope, scope.warehouse_id, queue, before)

        if joined is not None:
            write(joined)
        else:
            self.queue.database.transact(write)

    def _reconsider(
        self,
        connection: sa.Connection,
        scope: Scope,
        warehouse_id: UUID,
        queue: str,
        before: Mapping[str, Any],
    ) -> None:
        # They stay until the tasks are there.
        tables = [entity(row) for row in lock_all_tables(connection, warehouse_id)]
        _forget_commits(connection, tables)
        if queue == REMOVE_ORPHAN_FILES:
            self._look_for_orphans(connection, scope, tables, before)
        # What the run before has left, or what has failed, may go now.
        set_free(connection, scope, queue)
        forget_failures(connection, scope, queue)

    def _look_for_orphans(
        self,
        connection: sa.Connection,
        scope: Scope,
        tables: Sequence[TableEntity],
        before: Mapping[str, Any],
    ) -> None:
        """Queue the first look at each table that wants it, or let the next come sooner."""
        now = self.queue.database.moment(connection)
        stored = read_config(connection, scope, REMOVE_ORPHAN_FILES).config
        wanted = [table for table in tables if _wants_orphans_gone(table, stored)]

        def task(table: TableEntity, decision: Decision) -> NewTask:
            at, why = decision.at or now, decision.reason
            return NewTask(REMOVE_ORPHAN_FILES, scope, table.entity, at, Origin.COMMIT, why)

        slot = {table.id: task(table, Decision(now, "")).slot for table in wanted}
        last = _last(connection, list(slot.values()))
        ran_at = {table.id: last.get(slot[table.id], _Last()).ran_at for table in wanted}
        firsts = [task(table, first_orphan_run(now, ran_at[table.id])) for table in wanted]
        # Together: a warehouse may have thousands, and nobody else writes meanwhile.
        made = self.queue.enqueue(firsts, connection=connection)
        sooner = [
            task(table, decision)
            for table, first in zip(wanted, made, strict=True)
            if first is None
            and (decision := _sooner(table, before, stored, now, ran_at[table.id])) is not None
        ]
        self.queue.bring_forward(sooner, connection)

    def _follow(
        self,
        connection: sa.Connection,
        scope: Scope,
        wanted: Sequence[tuple[TableEntity, str, Decision]],
    ) -> list[Outcome]:
        """Queue what was decided, or bring forward what is there, and tell what came of each decision."""
        tasks = {
            (table.id, queue): NewTask(
                queue, scope, table.entity, decision.at, Origin.COMMIT, decision.reason
            )
            for table, queue, decision in wanted
            if decision.at is not None
        }
        ids = self.queue.enqueue(list(tasks.values()), connection=connection)
        made = dict(zip(tasks, ids, strict=True))
        # How often to look for orphans, the last run has decided.
        there = {
            key: task
            for key, task in tasks.items()
            if made[key] is None and task.queue != REMOVE_ORPHAN_FILES
        }
        turns = self.queue.bring_forward(list(there.values()), connection)
        missed = {key for key, turn in zip(there, turns, strict=True) if turn is Turn.BEGUN}
        return [
            Outcome(
                table.id,
                queue,
                decision,
                made.get((table.id, queue)),
                missed=(table.id, queue) in missed,
            )
            for table, queue, decision in wanted
        ]


@dataclass(frozen=True, slots=True)
class _News:
    """A commit that nobody has told of, and the table as it is known with it."""

    change: Change
    table: TableEntity


@dataclass(frozen=True, slots=True)
class _Last:
    """When the last run in a slot ended, and when the last failure."""

    ran_at: datetime | None = None
    failed_at: datetime | None = None


def _configs(connection: sa.Connection, scope: Scope) -> dict[str, Mapping[str, Any]]:
    queues = (EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES, OPTIMIZE)
    stored = read_configs(connection, scope)
    return {queue: stored.get(queue, StoredConfig()).config for queue in queues}


def _news(connection: sa.Connection, scope: Scope, changes: Sequence[Change]) -> list[_News]:
    """Return the commits that were not told before, of tables that are there; they are locked."""
    told = {change.table_id: change for change in changes}
    found: list[_News] = []
    for row in lock_tables(connection, scope.warehouse_id, told):
        change = told[row.id]
        if row.active and row.marker != change.marker:
            properties = row.properties if change.properties is None else change.properties
            found.append(_News(change, replace(entity(row), properties=dict(properties))))
    return found


def _write_down(connection: sa.Connection, news: Sequence[_News], missed: set[UUID]) -> None:
    if not news:
        return
    told = (
        sa.update(ENTITY)
        .where(ENTITY.c.id == sa.bindparam("number"))
        .values(
            marker=sa.bindparam("seen"),
            changed_at=sa.bindparam("at"),
            properties=sa.bindparam("own"),
        )
    )
    rows = [
        {
            "number": one.table.id,
            "seen": None if one.table.id in missed else one.change.marker,
            "at": one.change.at,
            "own": one.table.properties,
        }
        for one in news
    ]
    connection.execute(told, rows)


def _forget_commits(connection: sa.Connection, tables: Sequence[TableEntity]) -> None:
    """Let the detector look at these tables, and at none that somebody else has meanwhile."""
    seen = [table.id for table in tables if table.marker is not None]
    for first in range(0, len(seen), CHUNK):
        mine = ENTITY.c.id.in_(seen[first : first + CHUNK])
        connection.execute(sa.update(ENTITY).where(mine).values(marker=None))


def _decisions(
    scope: Scope,
    news: _News,
    configs: Mapping[str, Mapping[str, Any]],
    last: Mapping[str, _Last],
    now: datetime,
) -> Iterator[tuple[str, Decision]]:
    """Yield what each queue makes of a table that it concerns."""
    table, change = news.table, news.change
    for queue, stored in configs.items():
        try:
            if exclusion(queue, table.properties, stored, table.type) is not None:
                continue
            before = last.get(NewTask(queue, scope, table.entity, now).slot, _Last())
            decision: Decision | None
            if queue == EXPIRE_SNAPSHOTS:
                decision = _expiry(change, ExpireSettings.of(table.properties, stored), now)
            elif queue == OPTIMIZE:
                wanted = OptimizeSettings.of(table.properties, stored)
                decision = _optimize(change, wanted, now, before.ran_at)
            else:
                decision = first_orphan_run(now, before.ran_at)
        except RequestRefused as refusal:
            # Nobody's commit fails because of a property that cannot be read.
            decision = Decision(None, refusal.message)
        else:
            decision = None if decision is None else after_failure(decision, before.failed_at)
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


def _last(connection: sa.Connection, slots: Sequence[str]) -> dict[str, _Last]:
    found: dict[str, _Last] = {}
    for first in range(0, len(slots), CHUNK):
        query = sa.select(SLOT).where(SLOT.c.slot.in_(slots[first : first + CHUNK]))
        for row in connection.execute(query):
            found[row.slot] = _Last(row.ran_at, row.failed_at)
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
