"""Run tasks of one queue that were picked together: one pipeline run for all that agree in settings.

What applies to a table is decided now, from its properties as they are and the config that came with
the task.  Tables of one warehouse with the same settings share a run; each task has its own record,
progress and result, and trouble with one table is that task's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound, Refused
from lakewarden.jobs import results, successors
from lakewarden.jobs.config import ExpireSettings, OptimizeSettings, OrphanSettings, exclusion
from lakewarden.jobs.discovery import TOGETHER
from lakewarden.jobs.hands import PLANNED, Doorkeeper, Group, InHand, Settings, groups
from lakewarden.jobs.holding import End, Holding
from lakewarden.jobs.log_cleanup import LogCleanup
from lakewarden.jobs.neighbours import Memory, Neighbourhood
from lakewarden.jobs.planning import Done, Planned, optimizing, plan_expiry, plan_orphans
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import EXPIRE_SNAPSHOTS, OPTIMIZE, TASK_LOG_CLEANUP
from lakewarden.jobs.refusals import RequestRefused
from lakewarden.jobs.reporting import Reporting, failure_at_table, unforeseen
from lakewarden.jobs.sources import IcebergCatalog, Source, open_source
from lakewarden.jobs.tasks import Claim, Extent, Failure
from lakewarden.jobs.warehouses import Warehouses
from lakewarden.maintenance.optimize import Row
from lakewarden.maintenance.plan import TablePlan
from lakewarden.maintenance.removal import TableReceipt, added
from lakewarden.maintenance.survey import Reading
from lakewarden.model import format_duration
from lakewarden.pipeline.frames import concurrently

#: Files that go between two questions whether this worker may go on.
BATCH_FILES = 10_000
#: Times that a table is planned which others change all the time.
_ATTEMPTS = 3
#: How much the clocks of a worker and of the database may differ.
_CLOCKS_DIFFER_MAX = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Engine:
    """What runs pipelines in this process."""

    #: The session; Spark's own names stay below this layer.
    spark: Any
    #: Tasks that a stage is cut into.
    tasks: int
    #: Keys that may be deleted in a second, None for no limit.
    rate_limit: float | None = None
    batch_files: int = BATCH_FILES


@dataclass(frozen=True)
class Runner:
    """Runs batches in this process."""

    queue: TaskQueue
    warehouses: Warehouses
    #: Starts the session when it is needed first.
    engine: Callable[[], Engine]
    #: Set when the process is to end.
    stop: Event
    #: Tells whether the session is gone, and sees to it that the process ends if so.
    is_lost: Callable[[], bool] = lambda: False
    #: What is known of tables of other warehouses.
    memory: Memory = field(default_factory=Memory)

    def run(self, claims: Sequence[Claim]) -> None:
        """Run tasks of one queue, and report each of them."""
        with Holding(self.queue, self.stop).take(claims) as holding:
            try:
                if claims[0].queue == TASK_LOG_CLEANUP:
                    for claim in claims:
                        holding.report(claim, partial(self._clean_log, claim))
                    return
                for number in dict.fromkeys(claim.scope.warehouse_id for claim in claims):
                    mine = [claim for claim in claims if claim.scope.warehouse_id == number]
                    self._run_warehouse(holding, number, mine)
            finally:
                for claim in holding.left():
                    holding.fail(
                        claim, "the worker could not do it; see its log", Failure.TRANSIENT
                    )

    def _clean_log(self, claim: Claim) -> None:
        LogCleanup(self.queue).run(claim)

    def _run_warehouse(
        self, holding: Holding, number: UUID | None, claims: Sequence[Claim]
    ) -> None:
        with Reporting(holding, claims, self.is_lost):
            assert number is not None
            claims = holding.going(claims)
            if not claims:
                return
            try:
                info, access = self.warehouses.get(number), self.warehouses.access(number)
            except RequestRefused as error:
                if error.kind is not ErrorKind.NOT_FOUND:
                    raise
                # Whoever asked for its tasks was faster than whoever deleted it, by a little.
                for claim in claims:
                    told = results.skipped(error.message)
                    skipped = Extent.SKIPPED
                    holding.succeed(claim, "the warehouse is gone", told, extent=skipped)
                return
            holding.hide(claims, access.hide)
            source = open_source(info, access)
            hands = [
                hand
                for hand in concurrently(
                    lambda claim: self._pick_up(holding, source, claim), claims, TOGETHER
                )
                if hand is not None
            ]
            for group in groups(source, hands):
                mine = [hand.claim for hand in group.hands]
                with Reporting(holding, mine, self.is_lost):
                    self._run_group(holding, group)

    # -- what applies ----------------------------------------------------------------------------

    def _pick_up(self, holding: Holding, source: Source, claim: Claim) -> InHand | None:
        """Look at a task's table, and end the task if there is nothing to do for it."""
        try:
            found = self._look(source, claim)
        except NotFound as error:
            self._end_of_gone(holding, claim, error)
            return None
        except RequestRefused as error:
            if error.kind is ErrorKind.NOT_FOUND:
                self._end_of_gone(holding, claim, error)
            else:
                holding.fail(claim, f"{error.name}: {error.message}", results.failure_in(error))
            return None
        except LakewardenError as error:
            holding.fail(claim, error.message, results.failure_in(error))
            return None
        except Exception as error:  # noqa: BLE001  # whatever it is, the other tables are fine
            holding.fail(claim, unforeseen(holding, claim, error), Failure.TRANSIENT)
            return None
        if isinstance(found, RequestRefused):
            _report_excluded(holding, claim, found)
            return None
        return found

    def _end_of_gone(self, holding: Holding, claim: Claim, error: LakewardenError) -> None:
        """End the task of a table that is not there, and let it be looked at should it be back."""

        def forget(connection: sa.Connection) -> None:
            assert claim.entity.id is not None
            self.warehouses.forget_commit(connection, claim.entity.id)

        told = results.skipped(error.message)
        holding.succeed(claim, "the table is gone", told, extent=Extent.SKIPPED, along=forget)

    def _look(self, source: Source, claim: Claim) -> InHand | RequestRefused:
        """Return what applies to a table now, or why its queue does not concern it."""
        assert claim.scope.warehouse_id is not None
        assert claim.entity.id is not None
        table = self.warehouses.table(claim.scope.warehouse_id, claim.entity.type, claim.entity.id)
        look = source.look(table)
        refusal = exclusion(claim.queue, look.properties, claim.config, table.type)
        if refusal is not None:
            return refusal
        kinds: Mapping[str, type[Settings]] = {
            EXPIRE_SNAPSHOTS: ExpireSettings,
            OPTIMIZE: OptimizeSettings,
        }
        kind = kinds.get(claim.queue, OrphanSettings)
        return InHand(claim, table, look, kind.of(look.properties, claim.config))

    # -- pipeline runs ---------------------------------------------------------------------------

    def _run_group(self, holding: Holding, group: Group) -> None:
        for hand in group.hands:
            if not isinstance(hand.settings, ExpireSettings):
                holding.limit(hand.claim, hand.settings.max_run_time_seconds)
        group = group.going(holding)
        if not group.hands:
            return
        if isinstance(group.settings, OptimizeSettings):
            self._optimize(holding, group, group.settings)
        else:
            self._clean(holding, group, _ATTEMPTS)

    def _reading(self, holding: Holding, group: Group) -> Reading:
        def tell(stage: str, detail: str) -> None:
            for hand in group.hands:
                holding.tell(hand.claim, details={"stage": stage, "detail": detail})

        engine = self.engine()
        lake = group.source.lake if isinstance(group.source, IcebergCatalog) else None
        clock = self.queue.database.clock
        return Reading(engine.spark, group.source.opener, clock, engine.tasks, tell, lake)

    def _clean(self, holding: Holding, group: Group, attempts: int) -> None:
        """Plan all tables of a group together, delete what goes, and report every task."""
        self._check_clock(holding)
        group = self._with_neighbours(holding, group)
        reading, engine = self._reading(holding, group), self.engine()
        tables = [hand.table for hand in group.hands]
        if isinstance(group.settings, OrphanSettings):
            planned = plan_orphans(group.source, tables, group.settings.older_than, reading)
        else:
            expiring = {
                hand.table.id: replace(hand.settings, min_snapshots_to_expire=hand.min_snapshots)
                for hand in group.hands
                if isinstance(hand.settings, ExpireSettings)
            }
            planned = plan_expiry(group.source, tables, expiring, reading)
        # Planning takes its time, and where nothing is to go nobody asks later.
        planned.refresh()
        group = self._still_concerned(holding, group.going(holding))
        if not group.hands:
            return
        hands = {planned.keys[hand.table.id]: hand for hand in group.hands}
        few = {key for key, hand in hands.items() if _is_few(planned.rows[key], hand)}
        for hand in group.hands:
            holding.tell(hand.claim, PLANNED)
        lease = min(hand.claim.heartbeat_seconds for hand in group.hands) / 4
        together = engine.batch_files
        if engine.rate_limit is not None:
            together = max(1, min(together, int(engine.rate_limit * lease)))
        going = {key: row.removal.files_removed for key, row in planned.rows.items()}
        door = Doorkeeper(holding, hands, together, going, few)
        ended = Done()
        dry = isinstance(group.settings, OrphanSettings) and group.settings.dry_run
        if not dry and any(planned.rows[key].goes_ahead for key in hands if key not in few):
            ended = planned.execute(door, engine.rate_limit)
        done = ended.tables
        shares = results.shares(added(planned.requests, ended.requests), len(hands))
        hands = {
            key: replace(hand, requests=added(hand.requests, share))
            for (key, hand), share in zip(hands.items(), shares, strict=True)
        }
        again = self._report_cleaned(holding, planned, hands, done, few)
        if again and attempts > 1:
            self._clean(holding, replace(group, hands=again), attempts - 1)
            return
        for hand in again:
            error = done[planned.keys[hand.table.id]].error or "it keeps changing"
            holding.fail(hand.claim, error, Failure.TRANSIENT)

    def _with_neighbours(self, holding: Holding, group: Group) -> Group:
        """Return the group with what tables of other warehouses may need of its own, as of now."""
        claims = [hand.claim for hand in group.hands]
        number = claims[0].scope.warehouse_id
        assert number is not None
        info, access = self.warehouses.get(number), self.warehouses.access(number)
        around = Neighbourhood.of(self.warehouses, info, access, self.memory)
        holding.hide(claims, around.hide)
        return replace(group, source=around.seen_by(group.source))

    def _still_concerned(self, holding: Holding, group: Group) -> Group:
        """Return the group without tables that somebody has excluded while they were planned."""

        def still(hand: InHand) -> bool:
            claim = hand.claim
            try:
                told = group.source.properties(hand.table)
                refusal = exclusion(claim.queue, told, claim.config, hand.table.type)
            except (Damaged, NotFound):
                # The second look finds it out.
                return True
            except LakewardenError as error:
                holding.fail(claim, error.message, results.failure_in(error))
                return False
            if refusal is not None:
                _report_excluded(holding, claim, refusal)
            return refusal is None

        going = concurrently(still, group.hands, TOGETHER)
        hands = [hand for hand, goes in zip(group.hands, going, strict=True) if goes]
        return replace(group, hands=hands)

    def _check_clock(self, holding: Holding) -> None:
        """Refuse to judge ages by a clock that is wrong: what was just written would look old."""
        ahead = holding.patiently(self.queue.database.ahead)
        if abs(ahead) > _CLOCKS_DIFFER_MAX:
            raise Refused(
                ErrorKind.STORAGE,
                f"this worker's clock differs from the database's by {format_duration(abs(ahead))}, so "
                "what was written just now may look old; nothing goes: set the clock right",
            )

    def _report_cleaned(
        self,
        holding: Holding,
        planned: Planned,
        hands: Mapping[str, InHand],
        done: Mapping[str, TableReceipt],
        few: Collection[str],
    ) -> list[InHand]:
        """Report every task that is over; return those whose table must be planned again."""
        again: list[InHand] = []
        fine: dict[str, InHand] = {}
        for key, hand in hands.items():
            row, receipt, claim = planned.rows[key], done.get(key), hand.claim
            result = _result(hand, row, receipt)
            if key in few:
                fine[key] = hand
            elif row.error is not None:
                failure = failure_at_table(self.queue, claim, row.error_kind)
                holding.fail(claim, row.error, failure, result)
            elif receipt is not None and receipt.error_kind == ErrorKind.STOPPED.value:
                holding.end_of(claim, _stop_of(holding, claim), result)
            elif receipt is not None and receipt.outdated:
                again.append(hand)
            elif receipt is not None and receipt.error is not None:
                failure = failure_at_table(self.queue, claim, receipt.error_kind)
                holding.fail(claim, receipt.error, failure, result)
            else:
                fine[key] = hand
        self._succeed(holding, planned, fine, done, few)
        return again

    def _succeed(
        self,
        holding: Holding,
        planned: Planned,
        fine: Mapping[str, InHand],
        done: Mapping[str, TableReceipt],
        few: Collection[str],
    ) -> None:
        """Report what is done, with the next run if it is known when that is worthwhile."""
        source, now = planned.source, holding.patiently(self.queue.now)
        planned.refresh()

        expiring = {k: h for k, h in fine.items() if isinstance(h.settings, ExpireSettings)}
        idle = {key for key in expiring if key in few or _is_idle(planned.rows[key])}

        def decide(key: str) -> successors.Next:
            hand = expiring[key]
            return successors.after_expiry(
                hand.claim, hand.table, hand.settings, source, now, idle=key in idle
            )

        decided = concurrently(decide, list(expiring), TOGETHER)
        following = dict(zip(expiring, decided, strict=True))
        kept = planned.kept_because(idle)
        orphans = [h.claim for h in fine.values() if isinstance(h.settings, OrphanSettings)]
        before = holding.patiently(partial(self.queue.deleted_before, orphans))
        for key, hand in fine.items():
            row, receipt = planned.rows[key], done.get(key)
            result = _result(hand, row, receipt)
            why = results.kept(kept.get(key, {}))
            if isinstance(hand.settings, OrphanSettings):
                message = results.orphans_message(result)
                gone = before.get(hand.table.id, 0) + result["deleted_bytes"]
                after = successors.after_orphans(
                    hand.claim, hand.table, hand.look, hand.settings, gone, now
                )
            else:
                message, after = results.expiry_message(result), following[key]
            if key in few:
                reason = (
                    f"{row.removal.old_versions_removed} versions can go, fewer than the "
                    f"{hand.min_snapshots} that are worth a run"
                )
                message = f"nothing was done: {reason}"
                told = {"kept_snapshots_count": row.versions_kept, "requests": dict(hand.requests)}
                result = results.skipped(reason) | told
            elif row.skipped is not None:
                message = f"nothing was done: {row.skipped}"
            result |= why
            message += results.kept_message(result)
            result |= results.scheduled(after.decision, after.at)
            holding.succeed(hand.claim, message, result, extent=_extent(hand), successor=after.task)

    def _optimize(self, holding: Holding, group: Group, settings: OptimizeSettings) -> None:
        """Optimize all tables of a group, some at a time; those whose task has ended are left."""
        reading = self._reading(holding, group)
        tables = [hand.table for hand in group.hands]
        min_files = group.hands[0].min_files
        work = optimizing(group.source, tables, settings, min_files, reading)
        hands = {work.keys[hand.table.id]: hand for hand in group.hands}
        claims = [hand.claim for hand in group.hands]
        door = Doorkeeper(holding, hands, None, {})
        for keys in work.portions():
            passing, _ = holding.check(claims)
            chosen = [key for key in keys if hands[key].claim.task_id in passing]
            for key, row in work.do(chosen, door).items():
                self._report_optimized(holding, hands[key], row, settings)
            for key in keys:
                end = holding.ended(hands[key].claim)
                if key not in chosen and end is not None:
                    holding.end_of(hands[key].claim, end)

    def _report_optimized(
        self, holding: Holding, hand: InHand, row: Row, settings: OptimizeSettings
    ) -> None:
        result = results.optimized(row)
        if row.error_kind == ErrorKind.STOPPED.value:
            holding.end_of(hand.claim, _stop_of(holding, hand.claim), result)
            return
        if row.error is not None:
            holding.fail(hand.claim, row.error, results.failure_of(row.error_kind), result)
            return
        now = holding.patiently(self.queue.now)
        after = successors.after_optimize(hand.claim, hand.table, settings, row, now)
        result |= results.scheduled(after.decision, after.at)
        holding.succeed(hand.claim, results.optimize_message(row), result, successor=after.task)


def _report_excluded(holding: Holding, claim: Claim, refusal: RequestRefused) -> None:
    told = results.skipped(f"{refusal.name}: {refusal.message}")
    words = f"nothing was done: {refusal.message}"
    holding.succeed(claim, words, told, extent=Extent.SKIPPED)


def _stop_of(holding: Holding, claim: Claim) -> End:
    """Return why a gate was closed."""
    return holding.ended(claim) or End("it was stopped", Failure.STOPPED)


def _is_few(row: TablePlan, hand: InHand) -> bool:
    """Tell whether fewer versions can go than are worth a run."""
    return row.stands and row.removal.old_versions_removed < hand.min_snapshots


def _is_idle(row: TablePlan) -> bool:
    """Tell whether no version goes."""
    return row.skipped is not None or not row.removal.old_versions_removed


def _extent(hand: InHand) -> Extent:
    dry = isinstance(hand.settings, OrphanSettings) and hand.settings.dry_run
    return Extent.LOOKED if dry else Extent.DONE


def _result(hand: InHand, row: TablePlan, receipt: TableReceipt | None) -> dict[str, Any]:
    if isinstance(hand.settings, OrphanSettings):
        settings = hand.settings
        told = results.orphans(row, receipt, settings.older_than, dry_run=settings.dry_run)
    else:
        told = results.expired(row, receipt)
    return told | {"requests": dict(hand.requests)}
