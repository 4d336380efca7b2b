"""Keeps reads fast: few large files, indices that cover all rows, old versions left as they are.

    planned = optimize.plan(Together(warehouse), Request(), reading)
    receipt = optimize.execute(planned, reading)

For every table: look whether it is what the warehouse says, plan, rewrite, commit, bring indices up to
date, publish.  The tasks of all tables are one Spark job, and their indices another; commits are made
by the driver, one for each table, on top of the version that its plan has read.  Tables of a warehouse
that were changed become one version of it.  Those that a writer has changed meanwhile are tried again:
what was rewritten of files that are still the same is used, the rest is planned anew.

Who runs it unattended may lose the right to: a gate is asked before a table's files are committed,
before its indices are, and before a warehouse shows any of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lakewarden.errors import (
    Conflict,
    ErrorKind,
    Exit,
    Interrupted,
    LakewardenError,
    StorageError,
    UsageError,
)
from lakewarden.maintenance.deleting import Gate, OpenGate, Turnstile
from lakewarden.maintenance.places import Measured, Place, Skip, Visit
from lakewarden.maintenance.rewriting import Job, Outcome
from lakewarden.maintenance.survey import Costs, Reading
from lakewarden.packing import Rules, Shape, within
from lakewarden.pipeline import errands
from lakewarden.pipeline.frames import concurrently

#: Times that a table is tried which others change all the time.
_ROUNDS = 8
#: Tables that the driver looks after at once.
CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Request:
    """What the user wants."""

    rules: Rules = field(default_factory=Rules)
    #: Iceberg: only files that may hold rows of which this is true.
    where: str | None = None
    #: Tables that the driver looks after at once.
    concurrency: int = CONCURRENCY

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UsageError(
                ErrorKind.USAGE, f"{self.concurrency} tables at once are none; it must be 1 or more"
            )


@dataclass(frozen=True, slots=True)
class Row:
    """What was, or would be, done to one table."""

    table_key: str
    fragments_removed: int = 0
    fragments_added: int = 0
    committed: bool = False
    skipped: str | None = None
    #: The version that the warehouse names, and the one that the table has.
    manifest_version: int | None = None
    lance_head_version: int | None = None
    before: Shape | None = None
    after: Shape | None = None
    #: Groups of files that are rewritten, their files and bytes, and groups beyond the budget.
    groups: int = 0
    files_to_rewrite: int = 0
    bytes_to_rewrite: int = 0
    #: Files that the table is expected to have afterwards.
    files_expected: int | None = None
    deferred: int = 0
    #: Files that are left alone, by the reason.
    left_alone: Mapping[str, int] = field(default_factory=dict)
    reindexed: bool = False
    error: str | None = None
    error_kind: str | None = None

    def json(self) -> dict[str, Any]:
        """Return the row as programs read it."""
        told = asdict(self)
        for when in ("before", "after"):
            shape = told.pop(when)
            indices = shape.pop("indices") if shape else []
            told |= {f"{name}_{when}": value for name, value in (shape or {}).items()}
            told[f"index_coverage_{when}"] = list(indices)
        return told


@dataclass(frozen=True)
class Plan:
    """What is to be done to every table, pinned to the version that was read."""

    place: Place
    request: Request
    jobs: tuple[Job, ...]
    rows: tuple[Row, ...]
    seconds: Mapping[str, float]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.error is not None]


@dataclass(frozen=True)
class Receipt:
    """What was done."""

    rows: tuple[Row, ...]
    #: The newest version of the warehouse that was made of it.
    version: int | None
    seconds: Mapping[str, float]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.error is not None]

    @property
    def exit_code(self) -> Exit:
        """What a program should be told."""
        if not self.failed:
            return Exit.DONE
        if all(row.error_kind == ErrorKind.CONFLICT.value for row in self.failed):
            return Exit.CONFLICT
        changed = any(row.committed for row in self.rows)
        return Exit.PARTIAL if changed or len(self.failed) < len(self.rows) else Exit.REFUSED


# -- planning --------------------------------------------------------------------------------------


def plan(place: Place, request: Request, reading: Reading) -> Plan:
    """Look at every table, and choose what is worth doing within the budget."""
    costs = Costs()
    keys = place.keys()
    with costs.stage(reading, "plan", f"{len(keys):,} tables"):
        looks = concurrently(lambda key: _look(place, key, request), keys, request.concurrency)
        found = dict(zip(keys, looks, strict=True))
    jobs, rows = _chosen([one for one in found.values() if isinstance(one, Job)], request.rules)
    told = {row.table_key: row for row in rows}
    told |= {key: one for key, one in found.items() if isinstance(one, Row)}
    return Plan(place, request, tuple(jobs), tuple(told[key] for key in keys), costs.seconds)


def _look(place: Place, key: str, request: Request) -> Job | Row:
    try:
        return place.look(key, request.rules, request.where)
    except Skip as skip:
        return Row(
            key,
            skipped=skip.reason,
            manifest_version=skip.pinned,
            lance_head_version=skip.head,
        )
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this table's
        return _failed(Row(key), _in_a_line(error))


def _in_a_line(error: Exception) -> LakewardenError:
    """Return what went wrong with one table in our words: libraries raise all kinds of errors."""
    if isinstance(error, LakewardenError):
        return error
    words = " ".join(str(error).split())[:300]
    return StorageError(
        ErrorKind.STORAGE,
        f"{type(error).__name__}: {words}; what is committed of the table stands: look at it with "
        "lakewarden repair",
    )


def _chosen(jobs: Sequence[Job], rules: Rules) -> tuple[list[Job], list[Row]]:
    """Keep of all tables' work what pays most for the bytes that may be read."""
    chosen, _ = within([piece for job in jobs for piece in job.pieces], rules.max_bytes)
    wanted = {id(piece) for piece in chosen}
    kept, rows = [], []
    for job in jobs:
        mine = replace(job, pieces=tuple(one for one in job.pieces if id(one) in wanted))
        kept.append(mine)
        rows.append(
            Row(
                job.key,
                manifest_version=job.pinned,
                lance_head_version=job.head,
                before=job.shape,
                groups=len(mine.pieces),
                files_to_rewrite=sum(piece.files for piece in mine.pieces),
                bytes_to_rewrite=sum(piece.bytes for piece in mine.pieces),
                files_expected=job.shape.files - sum(one.files - one.makes for one in mine.pieces),
                deferred=len(job.pieces) - len(mine.pieces),
                left_alone=job.left_alone,
            )
        )
    return kept, rows


def _failed(row: Row, error: LakewardenError) -> Row:
    return replace(row, error=error.message, error_kind=error.kind.value)


# -- doing -----------------------------------------------------------------------------------------


@dataclass
class _Table:
    """A table while it is being worked on."""

    job: Job
    #: What workers have rewritten, and nobody has committed yet.
    results: list[Any] | None = None
    outcome: Outcome | None = None
    #: What a worker did for its indices, in this round.
    told: Any = None
    indexed: bool = False
    #: What was rewritten after that.
    rest: list[Any] = field(default_factory=list)
    #: Somebody else was faster with the indices.
    outrun: bool = False
    #: It was outrun before: its files are published without waiting for its indices.
    hurried: bool = False


def execute(planned: Plan, reading: Reading, gate: Gate | None = None) -> Receipt:
    """Do what the plan says, for as long as `gate` lets each table pass, and tell what was done."""
    run = _Run(planned, reading, gate or OpenGate())
    todo = [_Table(job) for job in planned.jobs if job.needed]
    for _ in range(_ROUNDS):
        if not todo:
            break
        todo = run.round(todo)
    run.give_up(todo)
    run.look_again()
    rows = tuple(run.rows[row.table_key] for row in planned.rows)
    return Receipt(rows, run.version, run.costs.seconds)


class _Run:
    """One execution of a plan."""

    def __init__(self, planned: Plan, reading: Reading, gate: Gate) -> None:
        self._plan = planned
        self._reading = reading
        keys = [row.table_key for row in planned.rows]
        self._door = Turnstile(gate, reading.clock, keys)
        self._at_once = planned.request.concurrency
        self.costs = Costs(seconds=dict(planned.seconds))
        self.rows = {row.table_key: row for row in planned.rows}
        self.version: int | None = None
        #: Bytes that were read to be written again.
        self._spent = 0

    def round(self, tables: Sequence[_Table]) -> list[_Table]:
        """Rewrite, commit, bring indices up to date, publish; return what must be tried again."""
        rewritten = self._rewrite([one for one in tables if self._goes_on(one)])
        try:
            with self._plan.place.visiting() as visit:
                committed = self._commit(visit, rewritten)
                self._reindex(visit, [one for one in committed if self._may_index(one)])
                self._rewrite_rest(visit, [one for one in committed if one.indexed])
                committed = [one for one in committed if self._goes_public(visit, one)]
        except LakewardenError as error:
            # Of all that would have become one version, nothing is certain to be gone.
            for one in rewritten:
                self._fail(one, error)
            return []
        self.version = visit.version or self.version
        return self._after(visit, committed)

    def _goes_on(self, one: _Table) -> bool:
        """Tell whether a table may be changed now; if not, take away what nobody has committed."""
        if self._door.lets(one.job.key):
            return True
        self._stop(one, one.results or [])
        return False

    def _stop(self, one: _Table, results: Sequence[Any] = (), told: Sequence[Any] = ()) -> None:
        """Say that a table was stopped, and take away what nobody has committed of it."""
        words = "stopped before everything was committed; what was committed stands"
        try:
            one.job.discard(results, told)
        except Exception as error:  # noqa: BLE001  # told below, and no other table's
            words += f", and files that were written are left ({_in_a_line(error).message})"
        self._fail(one, Interrupted(ErrorKind.STOPPED, f"{words}: run again for the rest"))

    def _goes_public(self, visit: Visit, one: _Table) -> bool:
        """Tell whether what was committed to a table stands; if not, it was withdrawn in time."""
        assert one.outcome is not None
        changed = one.outcome.changed or one.indexed
        if not (visit.waits and changed) or self._door.lets(one.job.key):
            return True
        visit.withdraw(one.job)
        # What was rewritten stays: the next run of orphans finds it.
        self._stop(one)
        return False

    @staticmethod
    def _may_index(table: _Table) -> bool:
        # Who was outrun publishes files first: the time until then is shorter.
        outcome = table.outcome
        return outcome is None or not (outcome.outrun or (table.hurried and outcome.changed))

    def _rewrite(self, tables: Sequence[_Table]) -> list[_Table]:
        """Let workers do the pieces of all tables, as one job."""
        fresh = [one for one in tables if one.results is None]
        pairs = [(one, piece) for one in fresh for piece in one.job.pieces]
        size = sum(piece.bytes for _, piece in pairs)
        with self._rewriting(len(pairs), size):
            done = self._sent([(one.job, piece) for one, piece in pairs])
        for one in fresh:
            one.results = []
        for (one, _), back in zip(pairs, done, strict=True):
            assert one.results is not None
            if back.error is not None:
                self._fail(one, back.error)
            else:
                one.results.append(back.brought)
        return list(tables)

    def _sent(self, pieces: Sequence[tuple[Job, Any]]) -> list[errands.Back[Any]]:
        """Let workers rewrite pieces, as one job."""
        work = [job.errand(piece) for job, piece in pieces]
        weights = [piece.bytes for _, piece in pieces]
        return errands.run(self._reading.spark, work, weights, self._reading.tasks)

    def _rewriting(self, groups: int, size: int) -> AbstractContextManager[None]:
        self._spent += size
        words = f"{groups:,} groups, {size / 2**20:,.1f} MiB"
        return self.costs.stage(self._reading, "rewrite", words)

    def _commit(self, visit: Visit, tables: Sequence[_Table]) -> list[_Table]:
        """Commit what was rewritten, every table by itself; return those that are fine."""
        with self.costs.stage(self._reading, "commit", f"{len(tables):,} tables"):
            fine = list(
                concurrently(lambda one: self._commit_one(visit, one), tables, self._at_once)
            )
        return [one for one, good in zip(tables, fine, strict=True) if good]

    def _commit_one(self, visit: Visit, one: _Table) -> bool:
        if not self._goes_on(one):
            visit.withdraw(one.job)
            return False
        try:
            one.outcome = one.job.commit(visit.opened(one.job), one.results or [])
            if one.outcome.outrun:
                visit.withdraw(one.job)
        except Conflict:
            # Nothing of it was committed; the next round sees what has changed.
            visit.withdraw(one.job)
            one.outcome = Outcome(lost=one.results or [])
        except Exception as error:  # noqa: BLE001  # the other tables go on
            # What was rewritten may be committed, so it stays.
            visit.withdraw(one.job)
            self._fail(one, _in_a_line(error))
            return False
        return True

    def _reindex(self, visit: Visit, tables: Sequence[_Table]) -> None:
        """Let workers bring indices of all tables up to date, as one job, and commit that."""
        wanted = list(concurrently(lambda one: self._index_of(visit, one), tables, self._at_once))
        pairs = [(one, errand) for one, errand in zip(tables, wanted, strict=True) if errand]
        if not pairs:
            return
        with self.costs.stage(self._reading, "reindex", f"{len(pairs):,} tables"):
            work = [errand for _, errand in pairs]
            weights = [one.job.shape.bytes for one, _ in pairs]
            done = errands.run(self._reading.spark, work, weights, self._reading.tasks)
            for (one, _), back in zip(pairs, done, strict=True):
                if back.error is not None:
                    # The files are fine; the indices are as incomplete as they were.
                    self._fail(one, back.error)
                else:
                    one.told = back.brought
            list(
                concurrently(
                    lambda pair: self._index_one(visit, pair[0]),
                    [pair for pair in pairs if pair[0].told is not None],
                    self._at_once,
                )
            )

    def _index_of(self, visit: Visit, one: _Table) -> errands.Errand[Any] | None:
        try:
            return one.job.index(visit.opened(one.job))
        except Exception as error:  # noqa: BLE001  # the other tables go on
            self._fail(one, _in_a_line(error))
            return None

    def _index_one(self, visit: Visit, one: _Table) -> None:
        if not self._door.lets(one.job.key):
            self._stop(one, told=[one.told])
            one.told = None
            return
        try:
            one.indexed = one.job.commit_index(visit.opened(one.job), one.told)
        except Conflict:
            one.job.discard([], [one.told])
            one.told, one.outrun = None, True
        except Exception as error:  # noqa: BLE001  # the other tables go on
            self._fail(one, _in_a_line(error))

    def _rewrite_rest(self, visit: Visit, tables: Sequence[_Table]) -> None:
        """Rewrite together what was apart because an index did not cover all of it."""
        rules = self._plan.request.rules
        jobs = list(concurrently(lambda one: self._rest_of(visit, one), tables, self._at_once))
        left = None if rules.max_bytes is None else rules.max_bytes - self._spent
        chosen, _ = within([piece for job in jobs for piece in job.pieces], left)
        wanted = {id(piece) for piece in chosen}
        triples = [
            (one, job, piece)
            for one, job in zip(tables, jobs, strict=True)
            for piece in job.pieces
            if id(piece) in wanted
        ]
        if not triples:
            return
        size = sum(piece.bytes for _, _, piece in triples)
        with self._rewriting(len(triples), size):
            done = self._sent([(job, piece) for _, job, piece in triples])
        for (one, _, _), back in zip(triples, done, strict=True):
            # If it went wrong the table is better than before all the same; the next run sees it.
            one.rest += [back.brought] if back.error is None else []
        for one, job in zip(tables, jobs, strict=True):
            self._commit_rest(visit, one, job)

    def _rest_of(self, visit: Visit, one: _Table) -> Job:
        try:
            return one.job.rest(visit.opened(one.job), self._plan.request.rules)
        except Exception as error:  # noqa: BLE001  # the other tables go on
            self._fail(one, _in_a_line(error))
            return replace(one.job, pieces=())

    def _commit_rest(self, visit: Visit, one: _Table, job: Job) -> None:
        if not one.rest:
            return
        assert one.outcome is not None
        if not self._door.lets(job.key):
            self._stop(one, one.rest)
            one.rest = []
            return
        try:
            rest = job.commit(visit.opened(job), one.rest)
        except Exception as error:  # noqa: BLE001  # the other tables go on
            self._fail(one, _in_a_line(error))
            return
        job.discard(one.rest if rest.outrun else rest.lost)
        one.outcome += rest

    def _after(self, visit: Visit, tables: Sequence[_Table]) -> list[_Table]:
        """Write down what is public now; return what must be tried again."""
        again: list[_Table] = []
        for one in tables:
            assert one.outcome is not None
            waited = one.outcome.changed or one.indexed or one.outcome.outrun
            if one.job.key in visit.left_out and waited:
                # What was rewritten is as good as before, the indices were those of its version.
                one.job.discard(one.rest, [one.told])
                again.append(_Table(one.job, one.results, hurried=True))
                continue
            self._note(one)
            if one.outcome.lost:
                one.job.discard(one.outcome.lost)
                again += self._planned_again(one)
            elif one.outrun or (one.hurried and one.outcome.changed):
                # Only its indices are left.
                again.append(_Table(one.job, [], hurried=True))
        return again

    def _note(self, one: _Table) -> None:
        outcome = one.outcome
        assert outcome is not None
        row = self.rows[one.job.key]
        self.rows[one.job.key] = replace(
            row,
            fragments_removed=row.fragments_removed + outcome.removed,
            fragments_added=row.fragments_added + outcome.added,
            committed=row.committed or outcome.changed or one.indexed,
            reindexed=row.reindexed or one.indexed,
        )

    def _planned_again(self, one: _Table) -> list[_Table]:
        """Plan what was lost anew, for no more bytes than it was allowed."""
        found = _look(self._plan.place, one.job.key, self._plan.request)
        if isinstance(found, Row):
            row = self.rows[one.job.key]
            self.rows[one.job.key] = replace(
                row,
                skipped=found.skipped,
                error=found.error or row.error,
                error_kind=found.error_kind or row.error_kind,
            )
            return []
        allowed = sum(piece.bytes for piece in one.job.pieces)
        budget = allowed if self._plan.request.rules.max_bytes is not None else None
        pieces, _ = within(found.pieces, budget)
        fresh = replace(found, pieces=tuple(pieces))
        return [_Table(fresh, hurried=True)] if fresh.needed else []

    def _fail(self, one: _Table, error: LakewardenError) -> None:
        self.rows[one.job.key] = _failed(self.rows[one.job.key], error)

    def give_up(self, tables: Sequence[_Table]) -> None:
        """Say of tables that were outrun in every round that they were."""
        for one in tables:
            one.job.discard(one.results or [])
            error = Conflict(
                ErrorKind.CONFLICT,
                f"others have changed it in each of {_ROUNDS} tries; what was committed stands, the rest "
                "is as it was: run optimize again when fewer write",
            )
            self._fail(one, error)

    def look_again(self) -> None:
        """Measure the tables that were changed."""
        changed = [key for key, row in self.rows.items() if row.committed]
        if not changed:
            return
        with self.costs.stage(self._reading, "measure", f"{len(changed):,} tables"):
            for key, seen in zip(
                changed, concurrently(self._measured, changed, self._at_once), strict=True
            ):
                if seen is not None:
                    shape, pinned, head = seen
                    self.rows[key] = replace(
                        self.rows[key],
                        after=shape,
                        manifest_version=pinned,
                        lance_head_version=head,
                    )

    def _measured(self, key: str) -> Measured | None:
        try:
            return self._plan.place.measure(key)
        except Exception as error:  # noqa: BLE001  # it may have been dropped since
            # What was done is done; only what it has become is not known.
            told = _in_a_line(error).message
            self._reading.progress("measure", f"{key} could not be measured: {told}")
            return None
