"""Many writers, branches, tags, restores, a cleanup and lost messages, in every order of a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import settings

from lakewarden.errors import (
    AlreadyExists,
    Conflict,
    ErrorKind,
    LakewardenError,
    NotFound,
    Refused,
    StorageError,
)
from lakewarden.model import Format
from lakewarden.storage.location import Location
from lakewarden.testing.memory import MemoryStore
from lakewarden.testing.simulation import SimulatedStore, World
from lakewarden.warehouse import commit as commit_module
from lakewarden.warehouse import conflicts
from lakewarden.warehouse import warehouse as warehouse_module
from lakewarden.warehouse.codec import ENTRIES
from lakewarden.warehouse.commit import Head, Limits, Log, Rebase
from lakewarden.warehouse.handlers import StoreHandler
from lakewarden.warehouse.manifest import (
    EMPTY,
    MAIN,
    Change,
    Entry,
    Logged,
    Manifest,
    Operation,
    Pin,
    Table,
    Transaction,
    apply,
)
from lakewarden.warehouse.reclaiming import Reclaim, Rules, decide
from lakewarden.warehouse.warehouse import View, Warehouse

#: By default some; the nightly profile tries more orders of events.
SEEDS = 1000 if settings.get_current_profile_name() == "nightly" else 300
TABLES = ("a", "b", "c")
PREFIX = "w/__manifest"


WORKS = (
    Operation.TAG,
    Operation.UNTAG,
    Operation.BRANCH,
    Operation.UNBRANCH,
    Operation.RESTORE,
)
#: Few, so that several want the same.
REFS = ("one", "two")


def appended(before: Pin, name: str) -> Pin:
    """Return a table's next version; its path tells all that was ever written to it."""
    return Pin(before.version + 1, f"{before.path}+{int(name, 16):x}")


class Rows:
    """What the tables do for the warehouse; nothing of them is stored but their pins."""

    def restore(self, table: Table, current: Pin, target: Pin) -> Pin:
        return Pin(current.version + 1, target.path)

    def publish(self, table: Table, pin: Pin) -> None:
        pass

    discard = publish


class Keeper(Warehouse):
    """A warehouse that writes down what it was told of its transactions."""

    told: Callable[[str, Callable[[], Head]], Head]

    def submit(self, base: Head, transaction: Transaction, rebase: Rebase) -> Head:
        return self.told(
            transaction.id, lambda: super(Keeper, self).submit(base, transaction, rebase)
        )


class Lake:
    """A warehouse of three tables, whose rows are what their pins say."""

    def __init__(self, seed: int, *, faults: float, kills: float = 0.0, stale: float = 0.0) -> None:
        self.world = World(seed, faults=faults, kills=kills)
        self.memory = MemoryStore(self.world)
        self.store = SimulatedStore(self.world, self.memory, stale=stale)
        #: Ids of transactions whose writers were told that they are committed, refused, or neither.
        self.committed: list[str] = []
        self.refused: list[str] = []
        self.checked: tuple[Entry, Manifest] | None = None
        #: The warehouse at each of its versions.
        self.past: dict[int, Manifest] = {}
        #: What was done, and how often.
        self.done: Counter[Operation] = Counter()
        #: Transactions in the order of their versions.
        self.history: list[str] = []
        self.logs: list[Log] = []
        #: Whether somebody takes away what refs hold.
        self.hasty = False
        #: How long cleanup leaves versions of the log.
        self.log_age = timedelta(0)
        log = self.log(self.memory)
        made = [
            Change(
                Operation.CREATE, one, after=Pin(1, one), made=Table(one, (one,), Format.LANCE, one)
            )
            for one in TABLES
        ]
        log.commit(log.head(), Transaction("init", 0, tuple(made)), commit_module.stands)

    def log(self, store: Any = None) -> Log:
        store = store or self.store
        log = Log(
            StoreHandler(store, f"{PREFIX}/_versions"),
            store,
            PREFIX,
            self.world,
            self.world,
            Limits(tries=1000, seconds=1e9),
            self.world.fresh_id,
        )
        self.logs.append(log)
        return log

    # -- actors ----------------------------------------------------------------------------------

    def writer(self, commits: int) -> Callable[[], None]:
        """Append to one table or two at a time."""

        def write() -> None:
            log = self.log()
            for _ in range(commits):
                number = 1 + self.world.below(2)
                tables = self.world.random.sample(TABLES, number)
                self._once(log, tables, self.world.fresh_id())

        return write

    def _once(self, log: Log, tables: list[str], name: str) -> None:
        def commit() -> Head:
            head = log.head()
            pins = head.manifest.pins()
            changes = [
                Change(Operation.APPEND, one, pins[one], appended(pins[one], name))
                for one in tables
            ]
            transaction = Transaction(name, head.version, tuple(changes))
            return log.commit(head, transaction, partial(self.rebase, name))

        with suppress(LakewardenError):
            self.told(name, commit)

    def told(self, name: str, commit: Callable[[], Head]) -> Head:
        """Commit, and write down what became of it by what was said."""
        try:
            done = commit()
        except LakewardenError as error:
            if error.kind is not ErrorKind.COMMIT_UNKNOWN:
                self.refused.append(name)
            raise
        self.committed.append(name)
        return done

    @staticmethod
    def rebase(name: str, change: Change, head: Manifest) -> Change:
        before = head.pins()[change.table]
        return replace(change, before=before, after=appended(before, name))

    def keeper(self, works: int) -> Callable[[], None]:
        """Make and delete branches and tags, go back, and write on branches."""

        def keep() -> None:
            place = Location.parse("memory://lake/w")
            lake = Keeper(place, self.log(), lambda _: self.store)
            lake.told = self.told
            lake.formats[Format.LANCE] = Rows()
            kinds = (self._tag, self._branch, self._branch, self._go_back, self._write)
            for _ in range(works):
                # What is not there (any more), or is in the way, is told, and that is fine.
                with suppress(NotFound, AlreadyExists, Conflict, Refused, StorageError):
                    self.world.random.choice(kinds)(lake)

        return keep

    def _ref(self) -> str:
        return self.world.random.choice(REFS)

    def _some(self, lake: Warehouse) -> View:
        """Return some branch at some version."""
        newest = lake.refresh().version
        manifest = lake.log.at(max(1, newest - self.world.below(4)))
        return lake.view(manifest, self.world.random.choice(sorted(manifest.branches)))

    def _tag(self, lake: Warehouse) -> None:
        name = self._ref()
        if name in lake.known.manifest.tags:
            lake.delete_tag(name)
        else:
            some = self._some(lake)
            lake.create_tag(name, version=some.version, branch=some.branch)

    def _branch(self, lake: Warehouse) -> None:
        name = self._ref()
        if name in lake.known.manifest.branches and self.world.below(2):
            lake.delete_branch(name)
        else:
            some = self._some(lake)
            lake.create_branch(name, version=some.version, source=some.branch)

    def _go_back(self, lake: Warehouse) -> None:
        some = self._some(lake)
        lake.restore(some, (self.world.random.choice(TABLES),) if self.world.below(2) else None)

    def _write(self, lake: Warehouse) -> None:
        head = lake.refresh()
        branches = sorted(set(head.manifest.branches) - {MAIN}) or [MAIN]
        view = lake.view(head.manifest, self.world.random.choice(branches))
        name, table = self.world.fresh_id(), self.world.random.choice(TABLES)

        def rebase(change: Change, manifest: Manifest) -> Change:
            before = lake.view(manifest, view.branch).pins[table]
            return replace(change, before=before, after=appended(before, name))

        before = view.pins[table]
        change = Change(Operation.APPEND, table, before, appended(before, name))
        lake.submit(head, Transaction(name, head.version, (change,), view.branch), rebase)

    def cleaner(self, rounds: int, keep: int) -> Callable[[], None]:
        """Take away old versions, as cleanup does, but without waiting until they are old."""

        def clean() -> None:
            log = self.log()
            for _ in range(rounds):
                try:
                    newest = log.handler.head()
                    old = [one for one in log.handler.versions() if one <= newest - keep]
                    log.handler.forget(old)
                except StorageError:
                    continue

        return clean

    def reclaimer(self, rounds: int) -> Callable[[], None]:
        """Clean as cleanup does: decide, commit what stays, and only then take old versions away."""

        def reclaim() -> None:
            place = Location.parse("memory://lake/w")
            lake = Keeper(place, self.log(), lambda _: self.store)
            lake.told = self.told
            for _ in range(rounds):
                with suppress(NotFound, Conflict, Refused, StorageError):
                    self._reclaim(lake)

        return reclaim

    def _reclaim(self, lake: Warehouse) -> None:
        plan = decide(lake, Rules(keep=1, min_age=timedelta(0)), self.world.now())
        changes = plan.changes()
        if changes:
            lake.commit(changes, base=plan.base)
        held = plan.base.manifest.held()
        handler = lake.log.handler
        young = int((self.world.now() - self.log_age).timestamp() * 1_000_000)
        old = [one for one in handler.versions() if one < plan.floor and one not in held]
        handler.forget([one for one in old if self.past[one].at_us < young])

    # -- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        """Check everything that has been added since the last time."""
        handler = StoreHandler(self.memory, f"{PREFIX}/_versions")
        newest = handler.head()
        if self.checked is None:
            first = ENTRIES.decode(handler.read(1), "1")
            self.checked = first, apply(EMPTY, first.logged)
            self.past[1] = self.checked[1]
        while self.checked[0].version < newest:
            entry, manifest = self.checked
            after = ENTRIES.decode(handler.read(entry.version + 1), "next")
            assert after.parent == entry.write_id, "it follows the version before"
            assert after.logged.at_us > entry.logged.at_us, "time goes forward"
            self.past[after.version] = apply(manifest, after.logged)
            self.checked = after, self.past[after.version]
            self.history.append(after.logged.transaction.id)
            for change in after.logged.transaction.changes:
                self.done[change.operation] += 1
                self._check_change(after.logged, change, manifest)
            self._check_others(after.logged.transaction.branch, manifest)

    def pins(self, manifest: Manifest, branch: str) -> dict[str, Pin]:
        """Return the pins of a branch, from what has been checked."""
        own = manifest.branches[branch]
        base = self.pins(self.past[own.base], own.parent) if own.parent else {}
        return manifest.pins(branch, base)

    def _check_change(self, logged: Logged, change: Change, before: Manifest) -> None:
        """Check that a change makes sense after the version before it."""
        branch, name = logged.transaction.branch, change.name[0] if change.name else ""
        match change.operation:
            case Operation.APPEND | Operation.RESTORE:
                was = self.pins(before, branch)[change.table]
                assert change.before == was, "an update was lost"
                if change.operation is Operation.APPEND:
                    wanted = appended(was, logged.transaction.id).path
                else:
                    then = self.past[int((logged.transaction.message or "").split()[-1])]
                    wanted = self.pins(then, branch)[change.table].path
                now = self.pins(self.past[logged.version], branch)[change.table]
                assert now == Pin(was.version + 1, wanted), "it is what it was to be"
            case Operation.TAG:
                assert name not in before.tags, "a tag was moved"
                assert change.source in self.past[change.version or 0].branches
            case Operation.UNTAG:
                assert name in before.tags
            case Operation.BRANCH:
                assert name not in before.branches, "a branch was replaced"
                assert change.source in self.past[change.version or 0].branches
            case Operation.UNBRANCH:
                assert name in before.branches
                children = [one for one in before.branches.values() if one.parent == name]
                assert not children, "a branch that others begin on was deleted"
            case Operation.RECLAIM:
                assert (change.version or 0) > before.floor, "it moves on"
            case _:
                raise AssertionError(f"nobody here does {change.operation}")

    def _check_others(self, branch: str, before: Manifest) -> None:
        """Check that a change of one branch is seen on no other."""
        assert self.checked is not None
        after = self.checked[1]
        for other in {*before.branches} & {*after.branches} - {branch}:
            if before.branches[other].made == after.branches[other].made:
                assert self.pins(before, other) == self.pins(after, other)

    def check_end(self) -> None:
        """Check that what was said to the writers is true."""
        self.check()
        assert self.checked is not None
        head = self.log(self.memory).head()
        assert head.manifest == self.checked[1], "checkpoint and tail are the whole history"
        assert len(self.history) == len(set(self.history)), "nothing was committed twice"
        assert set(self.committed) <= set(self.history), "what was said to be committed is"
        assert not set(self.refused) & set(self.history), "what was said to be refused is not"
        self._check_refs(head.manifest)

    def _check_refs(self, head: Manifest) -> None:
        """Check that branches and tags show what they are, or say that it was reclaimed."""
        log = self.log(self.memory)
        lake = Warehouse(Location.parse("memory://lake/w"), log, lambda _: self.memory)
        wanted = [(head.version, branch) for branch in head.branches]
        wanted += [(tag.version, tag.branch) for tag in head.tags.values()]
        for version, branch in wanted:
            try:
                found = lake.read(version=version, branch=branch).pins
            except NotFound as error:
                assert error.kind is ErrorKind.RECLAIMED  # noqa: PT017
                assert self.hasty, "cleanup keeps what refs hold"
            else:
                assert found == self.pins(self.past[version], branch)


def run(
    seed: int,
    *,
    faults: float = 0.02,
    writers: int = 3,
    keepers: int = 0,
    clean: bool = False,
    reclaimers: int = 0,
    log_age: timedelta = timedelta(0),
    **lake: Any,
) -> Lake:
    one = Lake(seed, faults=faults, **lake)
    one.log_age = log_age
    one.hasty = clean
    actors: dict[str, Callable[[], None]] = {}
    actors |= {f"writer {i}": one.writer(3) for i in range(writers)}
    actors |= {f"reclaimer {i}": one.reclaimer(3) for i in range(reclaimers)}
    actors |= {f"keeper {i}": one.keeper(4) for i in range(keepers)}
    if clean:
        actors["cleaner"] = one.cleaner(5, keep=1)
    one.world.run(actors, one.check)
    one.check_end()
    return one


def runs(seeds: int, **lake: Any) -> Iterator[Lake]:
    """Run seeds, half of them with kills and most with listings that are behind."""
    for seed in range(seeds):
        try:
            kills, stale = 0.002 if seed % 2 else 0.0, 0.1 if seed % 3 else 0.0
            yield run(seed, kills=kills, stale=stale, **lake)
        except BaseException:
            print(f"\nseed {seed}")  # noqa: T201
            raise


def test_no_order_of_events_loses_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "CHECKPOINT_EVERY", 3)
    done: Counter[Operation] = Counter()
    retried = 0
    for lake in runs(SEEDS, writers=1, keepers=2):
        done += lake.done
        retried += sum(log.retries for log in lake.logs)
    assert done[Operation.APPEND] > SEEDS * 3
    assert min(done[one] for one in WORKS) > SEEDS / 10, done
    assert retried > SEEDS, "writers did get in each other's way"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cleanup take versions that writers may still need, as if those had slept for hours."""
    monkeypatch.setattr(commit_module, "SLOW", timedelta(0))


@pytest.mark.usefixtures("hasty")
def test_writers_that_slept_through_a_cleanup_lose_nothing() -> None:
    refused = 0
    for lake in runs(SEEDS // 10, clean=True, faults=0.01, writers=2, keepers=1):
        refused += len(lake.refused)
    assert refused, "some did sleep"


@pytest.mark.usefixtures("hasty")
def test_cleanup_takes_nothing_that_tags_and_branches_hold() -> None:
    done: Counter[Operation] = Counter()
    gone = 0
    for lake in runs(SEEDS // 10, faults=0.01, writers=1, keepers=2, reclaimers=1):
        done += lake.done
        there = set(StoreHandler(lake.memory, f"{PREFIX}/_versions").versions())
        gone += len(set(lake.past) - there)
    assert done[Operation.RECLAIM] > SEEDS / 100, done
    assert gone, "versions did go"


def test_who_looks_for_the_next_version_by_name_finds_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Versions go when they are old, and whoever has seen one lately finds what follows it."""
    monkeypatch.setattr(commit_module, "SLOW", timedelta(milliseconds=30))
    gone = 0
    age = timedelta(milliseconds=300)
    for lake in runs(SEEDS // 20, faults=0.01, writers=3, keepers=1, reclaimers=1, log_age=age):
        there = set(StoreHandler(lake.memory, f"{PREFIX}/_versions").versions())
        gone += len(set(lake.past) - there)
    assert gone, "versions did go"


def test_a_log_that_forgets_too_soon_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "SLOW", timedelta(hours=1))
    assert caught(300, faults=0.0, writers=4, keepers=1, reclaimers=2)


@pytest.mark.usefixtures("hasty")
def test_a_reclaim_that_is_not_committed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reclaim, "changes", lambda *_: [])
    assert caught(300, faults=0.0, writers=1, keepers=2, reclaimers=1)


@pytest.mark.usefixtures("hasty")
def test_a_reclaim_that_does_not_conflict_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflicts, "_clearing", lambda *_: conflicts.Rule.STANDS)
    assert caught(300, faults=0.0, writers=1, keepers=3, reclaimers=2)


def test_a_seed_replays_exactly() -> None:
    first, second = (run(7, faults=0.1, writers=2, keepers=2) for _ in range(2))
    assert first.world.steps == second.world.steps
    assert (first.committed, first.refused) == (second.committed, second.refused)
    assert len({run(seed).world.steps for seed in range(20)}) > 3


def caught(seeds: int = 30, **lake: Any) -> bool:
    """Tell whether some seed notices."""
    for seed in range(seeds):
        try:
            run(seed, **lake)
        except (AssertionError, LakewardenError):
            return True
    return False


def test_a_blind_put_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(self: StoreHandler, version: int, data: bytes) -> None:
        self._store.put(self.key(version), data)

    monkeypatch.setattr(StoreHandler, "claim", blind)
    assert caught(faults=0.0)


def test_a_rebase_that_is_skipped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lake, "rebase", staticmethod(lambda _, change, head: change))
    monkeypatch.setattr(commit_module, "_outdated", lambda *_: None)
    assert caught(faults=0.0)


def test_a_branch_that_is_deleted_under_its_writers_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = conflicts._rule

    def careless(mine: Transaction, change: Change, their: Transaction, theirs: Change) -> Any:
        kinds = {change.operation, theirs.operation}
        if Operation.UNBRANCH in kinds:
            return conflicts.Rule.STANDS
        return ours(mine, change, their, theirs)

    monkeypatch.setattr(conflicts, "_rule", careless)
    assert caught(300, faults=0.0, writers=0, keepers=3)


def test_tags_and_branches_that_are_not_compared_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conflicts, "_same_name", lambda *_: conflicts.Rule.STANDS)
    assert caught(faults=0.0, writers=0, keepers=3)


def test_a_branch_that_moves_with_main_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def moving(self: Warehouse, manifest: Manifest, branch: str) -> dict[str, Pin]:
        return {**manifest.pins(), **manifest.pins(branch)}

    monkeypatch.setattr(Warehouse, "pins_of", moving)
    assert caught(100, faults=0.0, writers=1, keepers=2)


def test_a_restore_that_does_not_look_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warehouse_module, "_refuse", commit_module.stands)
    monkeypatch.setattr(commit_module, "_outdated", lambda *_: None)
    assert caught(100, faults=0.0, writers=2, keepers=1)


@pytest.mark.usefixtures("hasty")
def test_a_gap_that_is_ignored_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def bridged(self: Log, version: int, head: Entry) -> list[Logged]:
        return [one for one in (*head.tail, head.logged) if one.version > version][-1:]

    monkeypatch.setattr(Log, "since", bridged)
    monkeypatch.setattr(commit_module, "_outdated", lambda *_: None)
    assert caught(200, clean=True, faults=0.0)


def test_a_slot_that_was_cleaned_is_caught() -> None:
    """Without a second look a writer takes the number of a version that is gone."""
    assert caught(200, clean=True, faults=0.0)


def test_an_answer_that_is_not_read_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def believes(self: Log, entry: Entry) -> bool:
        try:
            self.handler.claim(entry.version, ENTRIES.encode(entry))
        except (AlreadyExists, StorageError):
            return False
        return True

    monkeypatch.setattr(Log, "_claim", believes)
    assert caught(faults=0.1)
