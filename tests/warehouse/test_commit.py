"""How a transaction becomes a version: what it costs, what may go wrong, and what is then said."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest

from lakewarden.errors import (
    AlreadyExists,
    Conflict,
    Damaged,
    ErrorKind,
    Exit,
    LakewardenError,
    NotFound,
    Refused,
    StorageError,
)
from lakewarden.storage.store import Request
from lakewarden.warehouse.backoff import SlotBackoff
from lakewarden.warehouse.codec import CHECKPOINTS, ENTRIES, TRANSACTIONS
from lakewarden.warehouse.commit import CHECKPOINT_EVERY, SLOW, Head, Limits, Log
from lakewarden.warehouse.handlers import StoreHandler
from lakewarden.warehouse.manifest import (
    EMPTY,
    STAMP,
    Change,
    Entry,
    Logged,
    Manifest,
    Operation,
    Pin,
    replay,
)
from tests.warehouse.small import (
    PREFIX,
    Dice,
    FakeClock,
    Haunted,
    append,
    commit,
    content,
    create,
    fresh,
    grow,
    open_log,
    pin,
    ref,
    table,
    transaction,
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> Haunted:
    return Haunted(clock)


@pytest.fixture
def log(store: Haunted, clock: FakeClock) -> Log:
    return open_log(store, clock)


def key(version: int) -> str:
    return f"{PREFIX}/_versions/{2**64 - 1 - version:020d}.json"


def checkpoint_key(version: int) -> str:
    return f"{PREFIX}/_checkpoints/{version:020d}"


def moved(change: Change, manifest: Manifest) -> Change:
    """Put an append on top of what the table is now."""
    before = manifest.pins()[change.table]
    return replace(change, before=before, after=pin(before.version + 1))


def history(store: Haunted) -> list[str]:
    """Return the ids of all transactions, oldest first, from the objects themselves."""
    handler = StoreHandler(store, f"{PREFIX}/_versions")
    entries = [ENTRIES.decode(handler.read(one), str(one)) for one in handler.versions()]
    return [one.logged.transaction.id for one in reversed(entries)]


def refused(log: Log, *changes: Change, base: Head | None = None) -> Conflict:
    """Commit what cannot be committed; check that nothing has changed but what others did."""
    base = base or log.head()
    before = log.head().manifest
    with pytest.raises(Conflict) as error:
        commit(log, *changes, base=base)
    assert log.head().manifest == before
    assert "nothing was committed" in error.value.message
    assert error.value.exit_code is Exit.CONFLICT
    return error.value


# -- what it costs -------------------------------------------------------------------------------


def test_the_500th_commit_costs_what_the_first_did(store: Haunted, log: Log) -> None:
    head = commit(log, create("a", after=pin(1)))
    store.requests.drain()
    for _ in range(499):
        head = commit(log, append("a", head.version + 1), base=head)
        # What it announces, the version, and now and then a checkpoint.
        checkpoint = head.version % CHECKPOINT_EVERY == 1
        assert store.requests.drain() == {Request.PUT: 3 if checkpoint else 2}
    assert head.version == 500


def test_opening_costs_the_same_however_long_the_history(store: Haunted) -> None:
    costs = {}
    for versions in (1, 10, CHECKPOINT_EVERY, CHECKPOINT_EVERY + 1, 100, 500):
        grow(open_log(store), versions)
        store.requests.drain()
        assert open_log(store).head().version == versions
        costs[versions] = store.requests.drain()
    assert costs[1] == costs[10] == {Request.LIST: 1, Request.GET: 1}
    assert costs[100] == costs[500] == {Request.LIST: 1, Request.GET: 2}


def test_entries_do_not_grow_with_history(store: Haunted, log: Log) -> None:
    grow(log, 500)
    sizes = [len(store.get(key(version))) for version in range(1, 501)]
    assert max(sizes[64:]) < 1.1 * max(sizes[:64])


def test_any_version_is_read_with_two_requests(store: Haunted, log: Log) -> None:
    grow(log, 70)
    store.requests.drain()
    for version in range(1, 71):
        found = log.at(version)
        assert (found.version, found.pins()) == (version, {"a": pin(version)})
        assert sum(store.requests.drain().values()) <= 2


def test_a_head_that_is_known_costs_one_request(store: Haunted, log: Log, clock: FakeClock) -> None:
    head = grow(log, 40)
    store.requests.drain()
    assert log.head(head).manifest is head.manifest
    assert store.requests.drain() == {Request.GET: 1}
    commit(open_log(store), append("a", 41))
    store.requests.drain()
    assert log.head(head).version == 41
    assert store.requests.drain() == {Request.GET: 2}
    for number in range(42, 60):
        commit(open_log(store), append("a", number))
    store.requests.drain()
    assert log.head(head).version == 59
    assert store.requests.drain() == {Request.GET: 3, Request.LIST: 1}
    # What was known long ago may be followed by nothing because that was taken away.
    clock.sleep(SLOW.total_seconds() + 1)
    log.handler.forget([41])
    assert log.head(head).version == 59


@pytest.mark.parametrize("versions", [10, 100, 400])
def test_being_outrun_costs_the_same_however_long_the_history(
    store: Haunted, log: Log, versions: int
) -> None:
    base = grow(log, versions)
    commit(open_log(store), append("a", versions + 1), base=base)
    store.requests.drain()
    commit(log, append("a", versions + 1), base=base, rebase=moved)
    assert store.requests.drain() == {Request.PUT: 3, Request.GET: 2, Request.LIST: 1}


# -- checkpoints ---------------------------------------------------------------------------------


def test_checkpoints_are_made_at_regular_distances(store: Haunted, log: Log) -> None:
    grow(log, 3 * CHECKPOINT_EVERY + 1)
    made = store.list_directory(f"{PREFIX}/_checkpoints")[1]
    assert list(made) == [f"{CHECKPOINT_EVERY * n:020d}" for n in (1, 2, 3)]
    for version in range(1, 3 * CHECKPOINT_EVERY + 2):
        entry = log.entry(version)
        assert entry.checkpoint + len(entry.tail) + 1 == version
        assert len(entry.tail) < CHECKPOINT_EVERY


def test_checkpoint_and_tail_are_the_whole_history(store: Haunted, log: Log) -> None:
    head = grow(log, 3 * CHECKPOINT_EVERY + 5)
    every = [log.entry(version).logged for version in range(1, head.version + 1)]
    assert open_log(store).head().manifest == head.manifest == replay(EMPTY, every)
    assert log.since(0, log.entry(head.version)) == every
    assert log.since(90, log.entry(head.version)) == every[90:]
    assert log.since(head.version, log.entry(head.version)) == []


def test_a_checkpoint_that_fails_does_not_fail_the_commit(store: Haunted, log: Log) -> None:
    grow(log, CHECKPOINT_EVERY)

    def fails(action: str, key: str) -> None:
        if "_checkpoints" in key and action == "put":
            raise StorageError(ErrorKind.STORAGE, "no room")

    store.before = fails
    head = grow(log, CHECKPOINT_EVERY + 5)
    assert open_log(store).head().manifest == head.manifest
    assert log.entry(head.version).checkpoint == 0
    store.before = lambda action, key: None
    head = grow(log, CHECKPOINT_EVERY + 6)
    assert log.entry(head.version).checkpoint == CHECKPOINT_EVERY + 5
    assert open_log(store).head().manifest == head.manifest


def test_a_lost_checkpoint_is_an_error_and_no_empty_warehouse(store: Haunted, log: Log) -> None:
    grow(log, CHECKPOINT_EVERY + 3)
    store.delete([checkpoint_key(CHECKPOINT_EVERY)])
    with pytest.raises(LakewardenError):
        open_log(store).head()
    assert log.at(CHECKPOINT_EVERY).pins() == {"a": pin(CHECKPOINT_EVERY)}


# -- reading -------------------------------------------------------------------------------------


def test_a_warehouse_without_versions_is_empty(log: Log) -> None:
    head = log.head()
    assert (head.version, head.manifest, head.write_id) == (0, EMPTY, "")


def test_versions_that_there_never_were_are_not_found(log: Log) -> None:
    grow(log, 3)
    for version in (0, 4, 99):
        with pytest.raises(NotFound, match="the newest is 3") as error:
            log.at(version)
        assert error.value.kind is ErrorKind.NOT_FOUND


def test_a_version_that_was_reclaimed_says_so(log: Log) -> None:
    grow(log, 5)
    log.handler.forget([2])
    with pytest.raises(NotFound, match="reclaimed") as error:
        log.at(2)
    assert error.value.kind is ErrorKind.RECLAIMED
    assert log.at(3).pins() == {"a": pin(3)}, "the others do without it"


def test_time_goes_forward_even_if_the_clock_does_not(log: Log, clock: FakeClock) -> None:
    clock.time = 100.0
    grow(log, 2)
    clock.time = -1000.0
    grow(log, 4)
    times = [log.entry(version).logged.at_us for version in (1, 2, 3, 4)]
    assert times == sorted(set(times))


def test_what_is_to_be_committed_is_announced_first(store: Haunted, log: Log) -> None:
    seen: list[tuple[str, str]] = []
    store.before = lambda action, key: seen.append((action, key))
    head = log.head()
    made = transaction(create("a", after=pin(1)), id=fresh(), actor="ada")
    log.commit(head, made, moved)
    announced = f"{PREFIX}/_transactions/{made.id}.json"
    assert seen[-2:] == [("put", announced), ("claim", key(1))]
    assert TRANSACTIONS.decode(store.get(announced), "it") == made


class Denied(Haunted):
    """A store for readers: every put is refused."""

    def put(self, key: str, data: bytes) -> None:
        raise StorageError(ErrorKind.ACCESS_DENIED, f"no writing of {key}")

    put_if_absent = put


def test_who_may_not_write_may_read(store: Haunted, log: Log) -> None:
    head = grow(log, 40)
    denied = Denied()
    denied._objects = store._objects
    reader = open_log(denied)
    assert reader.head().manifest == head.manifest
    assert reader.at(33) == log.at(33)
    assert reader.entry(7) == log.entry(7)
    with pytest.raises(StorageError) as error:
        commit(reader, append("a", 41))
    assert error.value.kind is ErrorKind.ACCESS_DENIED
    assert log.head().version == 40


# -- three outcomes of a put ---------------------------------------------------------------------


def lost(times: int, action: str = "claim") -> Callable[[str, str], None]:
    """Return an event that fails some requests, as if they or their answers had been lost."""
    left = [times]

    def event(happens: str, key: str) -> None:
        if happens == action and left[0] > 0:
            left[0] -= 1
            raise StorageError(ErrorKind.STORAGE, "the connection broke")

    return event


def test_a_lost_answer_is_no_second_version(store: Haunted, log: Log) -> None:
    base = grow(log, 3)
    store.after = lost(1)
    head = commit(log, append("a", 4), base=base, rebase=moved)
    assert head.version == log.head().version == 4
    assert head.manifest == log.at(4)
    assert len(set(history(store))) == len(history(store)) == 4
    assert log.retries == 0


def test_a_claim_that_finds_itself_is_ours(store: Haunted, log: Log) -> None:
    """Clients of object stores repeat a request whose answer was lost, and then find its effect."""
    base = grow(log, 3)

    def repeated(action: str, key: str) -> None:
        if action == "claim":
            raise AlreadyExists(f"{key} is there")

    store.after = repeated
    head = commit(log, append("a", 4), base=base, rebase=moved)
    assert (head.version, log.retries) == (4, 0)
    assert len(history(store)) == 4


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_lost_request_is_made_again_as_the_same_write(
    store: Haunted, log: Log, times: int
) -> None:
    base = grow(log, 3)
    seen: list[str] = []
    fails = lost(times)

    def watched(action: str, key: str) -> None:
        if action == "claim":
            seen.append(key)
        fails(action, key)

    store.before = watched
    head = commit(log, append("a", 4), base=base, rebase=moved)
    assert seen == [key(4)] * (times + 1)
    assert log.entry(4).write_id == head.write_id
    assert (head.version, log.retries, len(history(store))) == (4, 0, 4)


def test_a_lost_request_whose_place_was_taken_is_rebased(store: Haunted, log: Log) -> None:
    base = grow(log, 3)
    rival = open_log(store)
    fails = lost(1)

    def outrun(action: str, key: str) -> None:
        if action == "claim" and store.before is outrun:
            store.before = lambda action, key: None
            commit(rival, append("a", 4), base=base)
            fails(action, key)

    store.before = outrun
    head = commit(log, append("a", 4), base=base, rebase=moved)
    assert (head.version, head.manifest.pins()) == (5, {"a": pin(5)})
    assert len(set(history(store))) == 5


def unknown(log: Log, base: Head) -> StorageError:
    with pytest.raises(StorageError) as error:
        commit(log, append("a", base.version + 1), base=base, rebase=moved)
    assert error.value.kind is ErrorKind.COMMIT_UNKNOWN
    assert f"version {base.version + 1}" in error.value.message
    assert "\n" not in error.value.message
    return error.value


def test_an_outcome_that_can_never_be_read_is_unknown(store: Haunted, log: Log) -> None:
    base = grow(log, 3)
    claims = []

    def down(action: str, key: str) -> None:
        claims.append(action) if action == "claim" else None
        if "_versions" in key:
            raise StorageError(ErrorKind.STORAGE, "the store is down")

    store.before = down
    assert "the store is down" in unknown(log, base).message
    assert len(claims) == 4


def test_an_answer_that_is_lost_and_cannot_be_read_back_is_unknown(
    store: Haunted, log: Log
) -> None:
    base = grow(log, 3)
    store.after = lost(99)
    store.before = lost(99, "get")
    unknown(log, base)
    store.before = store.after = lambda action, key: None
    assert log.head().version == 4, "it is for the caller to look, and it is there"


def test_a_place_that_is_neither_free_nor_taken_is_unknown(store: Haunted, log: Log) -> None:
    base = grow(log, 3)
    store.before = lost(99)
    assert "connection broke" in unknown(log, base).message

    def taken(action: str, key: str) -> None:
        if action == "claim":
            raise AlreadyExists(key)

    store.before = taken
    assert "does not exist" in unknown(log, base).message


def test_a_claim_that_is_denied_at_once_was_not_made(store: Haunted, log: Log) -> None:
    base = grow(log, 3)
    claims: list[str] = []

    def denied(action: str, key: str) -> None:
        if action == "claim":
            claims.append(key)
            raise StorageError(ErrorKind.ACCESS_DENIED, "not yours")

    store.before = denied
    with pytest.raises(StorageError) as error:
        commit(log, append("a", 4), base=base)
    assert error.value.kind is ErrorKind.ACCESS_DENIED
    assert claims == [key(4)]


def test_a_claim_that_is_denied_after_an_unknown_one_is_unknown(store: Haunted, log: Log) -> None:
    """Credentials that run out in the middle: writers take away what was certainly not committed."""
    base = grow(log, 3)
    store.after = lost(1)
    gets = lost(1, "get")
    claims: list[str] = []

    def runs_out(action: str, key: str) -> None:
        gets(action, key)
        claims.append(key) if action == "claim" else None
        if len(claims) > 1:
            raise StorageError(ErrorKind.ACCESS_DENIED, "the token has expired")

    store.before = runs_out
    with pytest.raises(StorageError) as error:
        commit(log, append("a", 4), base=base)
    store.before = store.after = lambda action, key: None
    assert log.head().version == 4, "it was committed"
    assert error.value.kind is ErrorKind.COMMIT_UNKNOWN


def test_an_answer_that_is_lost_and_misread_is_unknown(store: Haunted, log: Log) -> None:
    """A read that breaks off in the middle proves nothing about what is there."""
    base = grow(log, 3)
    store.after = lost(1)
    store.misread = lambda key, data: data[: len(data) // 2] if "_versions" in key else data
    with pytest.raises(LakewardenError) as error:
        commit(log, append("a", 4), base=base)
    store.misread = lambda key, data: data
    assert log.head().version == 4, "it was committed"
    assert error.value.kind is ErrorKind.COMMIT_UNKNOWN


# -- requests by name ----------------------------------------------------------------------------


def test_a_request_that_is_repeated_happens_once(store: Haunted, log: Log) -> None:
    grow(log, 3)
    first = commit(log, append("a", 4), request="load 7")
    again = commit(log, append("a", 5), request="load 7")
    other = commit(log, append("a", 5), request="load 8")
    assert (first.version, again.version, other.version) == (4, 4, 5)
    assert again.manifest == first.manifest
    assert len(history(store)) == 5


def test_a_request_is_known_after_checkpoints_and_to_others(store: Haunted, log: Log) -> None:
    grow(log, 3)
    first = commit(log, append("a", 4), request="load 7")
    grow(log, 3 * CHECKPOINT_EVERY)
    again = commit(open_log(store), append("a", 9), request="load 7")
    assert (again.version, again.write_id) == (first.version, first.write_id)
    assert log.head().version == 3 * CHECKPOINT_EVERY


def test_a_request_that_somebody_repeats_meanwhile_happens_once(store: Haunted, log: Log) -> None:
    base = grow(log, 3)
    first = commit(open_log(store), append("a", 4), base=base, request="load 7")
    again = commit(log, append("a", 4), base=base, request="load 7", rebase=moved)
    assert (again.version, again.write_id) == (first.version, first.write_id)
    assert len(history(store)) == 4


@pytest.mark.parametrize(
    "change",
    [content(Operation.OVERWRITE, "a", 4), create("b", after=pin(1))],
    ids=["again", "never"],
)
def test_a_request_does_not_conflict_with_itself(store: Haunted, log: Log, change: Change) -> None:
    base = grow(log, 3)
    first = commit(open_log(store), change, base=base, request="load 7")
    again = commit(log, change, base=base, request="load 7")
    assert again.version == first.version


def test_a_request_whose_version_was_reclaimed_was_done_all_the_same(log: Log) -> None:
    grow(log, 3)
    first = commit(log, append("a", 4), request="load 7")
    grow(log, 8)
    log.handler.forget([1, 2, 3, 4, 5])
    assert commit(log, append("a", 9), request="load 7").version >= first.version
    assert log.head().version == 8


# -- others in the way ---------------------------------------------------------------------------


def crowd(store: Haunted, clock: FakeClock, seconds: Iterator[float]) -> list[int]:
    """Let somebody else take every version right before us; a try takes as long as given."""
    rival = open_log(store, clock)
    taken: list[int] = []

    def outrun(action: str, key: str) -> None:
        if action == "claim":
            store.before = lambda action, key: None
            clock.time += next(seconds)
            head = rival.head()
            after = head.manifest.pins()["a"].version + 1
            taken.append(commit(rival, append("a", after), base=head).version)
            store.before = outrun

    store.before = outrun
    return taken


def test_after_so_many_tries_it_is_given_up(store: Haunted, clock: FakeClock) -> None:
    log = open_log(store, clock, limits=Limits(tries=3))
    base = grow(log, 3)
    taken = crowd(store, clock, iter([0.0] * 99))
    with pytest.raises(Conflict, match="outrun by others 3 times") as error:
        commit(log, append("a", 4), base=base, rebase=moved)
    assert error.value.kind is ErrorKind.CONFLICT
    assert (taken, log.retries) == ([4, 5, 6], 3)
    assert log.head().manifest.pins() == {"a": pin(6)}


def test_others_with_other_tables_are_just_in_the_way_for_a_moment(
    store: Haunted, clock: FakeClock
) -> None:
    """However many of them are faster, the waits do not add up, and nobody gives up so soon."""
    dice = Dice()
    log = open_log(store, clock, dice, limits=Limits(tries=3, seconds=1e9))
    base = grow(log, 3)
    rival = open_log(store, clock)
    left = 20

    def outrun(action: str, key: str) -> None:
        nonlocal left
        if action == "claim" and left:
            left -= 1
            store.before = lambda action, key: None
            commit(rival, ref(Operation.TAG, f"t{left}"))
            store.before = outrun

    store.before = outrun
    assert commit(log, append("a", 4), base=base).version == 24
    assert set(dice.asked) == {4}


def test_after_so_much_time_it_is_given_up(store: Haunted, clock: FakeClock) -> None:
    log = open_log(store, clock, Dice(lambda _: 0), Limits(tries=50, seconds=25))
    base = grow(log, 3)
    taken = crowd(store, clock, iter([10.0] * 99))
    with pytest.raises(Conflict, match="25 seconds"):
        commit(log, append("a", 4), base=base, rebase=moved)
    assert taken == [4, 5, 6]


def test_waits_are_slots_of_the_length_of_the_first_try(store: Haunted, clock: FakeClock) -> None:
    dice = Dice()
    log = open_log(store, clock, dice, Limits(tries=4, seconds=1e9))
    base = grow(log, 3)
    clock.slept.clear()
    crowd(store, clock, iter([0.5, 3.0, 0.1, 7.0]))
    with pytest.raises(Conflict):
        commit(log, append("a", 4), base=base, rebase=moved)
    unit = 1.1 * 0.5
    assert dice.asked[:3] == [4, 8, 16]
    assert clock.slept[:3] == pytest.approx([3 * unit, 7 * unit, 15 * unit])


def test_slots_double_and_the_unit_stays() -> None:
    dice = Dice()
    backoff = SlotBackoff(dice)
    waits = [backoff.after(seconds) for seconds in (0.2, 5.0, 0.0, 1.0, 9.0)]
    assert dice.asked == [4, 8, 16, 32, 64]
    assert waits == pytest.approx([0.22 * (slots - 1) for slots in dice.asked])


def test_every_slot_can_be_had_and_no_other() -> None:
    for tries, slots in enumerate((4, 8, 16)):
        for slot in range(slots):
            backoff = SlotBackoff(Dice(lambda _, slot=slot: slot))  # type: ignore[misc]
            waits = [backoff.after(1.0) for _ in range(tries + 1)]
            assert waits[-1] == pytest.approx(slot * 1.1)


def test_each_commit_measures_anew(store: Haunted, clock: FakeClock) -> None:
    dice = Dice()
    log = open_log(store, clock, dice, Limits(tries=2, seconds=1e9))
    for seconds in (0.5, 2.0):
        base = grow(log, 3) if seconds == 0.5 else log.head()
        dice.asked.clear()
        clock.slept.clear()
        crowd(store, clock, iter([seconds] * 9))
        with pytest.raises(Conflict):
            commit(log, append("a", base.manifest.pins()["a"].version + 1), base=base, rebase=moved)
        store.before = lambda action, key: None
        assert dice.asked[0] == 4
        assert clock.slept[0] == pytest.approx(3 * 1.1 * seconds)


def test_writers_of_different_tables_all_land(store: Haunted, log: Log) -> None:
    names = [f"t{number}" for number in range(8)]
    base = commit(log, *(create(name, after=pin(1)) for name in names))
    for name in names:
        commit(open_log(store), append(name, 2), base=base, rebase=never_called)
    head = log.head()
    assert head.version == 9
    assert head.manifest.pins() == dict.fromkeys(names, pin(2))
    entries = [log.entry(version) for version in range(1, 10)]
    assert [one.parent for one in entries] == ["", *(one.write_id for one in entries[:-1])]


def never_called(change: Change, manifest: Manifest) -> Change:
    raise AssertionError(f"{change} needed no rebase on {manifest.version}")


def test_only_the_tables_that_have_changed_are_rebased(store: Haunted, log: Log) -> None:
    base = commit(log, create("a", after=pin(1)), create("b", after=pin(1)))
    commit(open_log(store), append("a", 2), base=base)
    rebased: list[str] = []

    def rebase(change: Change, manifest: Manifest) -> Change:
        rebased.append(change.table)
        assert manifest.version == 2
        return moved(change, manifest)

    head = commit(log, append("a", 2), append("b", 2), base=base, rebase=rebase)
    assert rebased == ["a"]
    assert head.manifest.pins() == {"a": pin(3), "b": pin(2)}
    assert log.entry(3).logged.transaction.read_version == 2


def test_a_rebase_that_fails_leaves_nothing(store: Haunted, log: Log) -> None:
    base = grow(log, 3)
    commit(open_log(store), append("a", 4), base=base)

    def rebase(change: Change, manifest: Manifest) -> Change:
        raise Conflict(ErrorKind.CONFLICT, "it cannot be put on top")

    with pytest.raises(Conflict, match="on top"):
        commit(log, append("a", 4), base=base, rebase=rebase)
    assert log.head().version == 4


def test_work_that_must_be_done_again_is_a_conflict(store: Haunted, log: Log) -> None:
    base = grow(log, 3)
    commit(open_log(store), content(Operation.MERGE, "a", 4), base=base, actor="bob")
    error = refused(log, content(Operation.MERGE, "a", 4), base=base)
    assert error.kind is ErrorKind.CONFLICT
    assert "bob" in error.message
    assert "version 4" in error.message


def test_work_that_makes_no_sense_any_more_is_incompatible(store: Haunted, log: Log) -> None:
    base = grow(log, 3)
    commit(open_log(store), Change(Operation.DROP, "a", before=pin(3)), base=base)
    error = refused(log, append("a", 4), base=base)
    assert error.kind is ErrorKind.INCOMPATIBLE


def test_what_was_read_must_not_have_moved(store: Haunted, log: Log) -> None:
    base = commit(log, create("a", after=pin(1)), create("b", after=pin(1)))
    commit(open_log(store), append("b", 2), base=base)
    expects: dict[str, Pin | None] = {"b": pin(1)}
    with pytest.raises(Conflict, match="depends on what it read of b") as error:
        commit(log, append("a", 2), base=base, expects=expects)
    assert error.value.kind is ErrorKind.CONFLICT
    assert log.head().version == 2


def test_a_branch_made_again_is_not_the_branch_that_was_read(store: Haunted, log: Log) -> None:
    grow(log, 2)
    base = commit(log, ref(Operation.BRANCH, "dev", version=2))
    rival = open_log(store)
    commit(rival, ref(Operation.UNBRANCH, "dev"))
    commit(rival, ref(Operation.BRANCH, "dev", version=2))
    with pytest.raises(Conflict) as error:
        commit(log, append("a", 3), base=base, branch="dev")
    assert error.value.kind is ErrorKind.INCOMPATIBLE


# -- versions that were taken away ---------------------------------------------------------------


def test_a_gap_since_what_was_read_is_a_conflict(store: Haunted, log: Log) -> None:
    base = grow(log, 5)
    grow(open_log(store), CHECKPOINT_EVERY + 8)
    for missing in (7, 20, CHECKPOINT_EVERY):
        gone = {number: log.handler.read(number) for number in [missing]}
        log.handler.forget([missing])
        error = refused(log, append("a", 6), base=base)
        assert error.kind is ErrorKind.HISTORY_GAP
        assert f"version {missing} " in error.message
        for number, data in gone.items():
            log.handler.claim(number, data)


def test_a_version_missing_behind_what_was_read_is_no_gap(store: Haunted, log: Log) -> None:
    base = grow(log, 5)
    grow(open_log(store), 9)
    log.handler.forget([1, 2, 3, 4, 5])
    head = commit(log, append("a", 6), base=base, rebase=moved)
    assert (head.version, head.manifest.pins()) == (10, {"a": pin(10)})


def test_a_slow_writer_whose_place_was_reclaimed_is_not_told_that_it_committed(
    store: Haunted, log: Log, clock: FakeClock
) -> None:
    base = grow(log, 5)
    head = grow(open_log(store, clock), CHECKPOINT_EVERY + 8)
    log.handler.forget(range(1, 7))
    clock.time += SLOW.total_seconds() + 1
    error = refused(log, append("a", 6), base=base)
    assert error.kind is ErrorKind.HISTORY_GAP
    assert log.head().manifest == head.manifest
    assert list(log.handler.versions())[-1] == 7, "its entry is gone again"


def test_a_slow_writer_whose_place_was_reclaimed_goes_to_the_end_if_all_is_known(
    store: Haunted, log: Log, clock: FakeClock
) -> None:
    base = grow(log, 5)
    grow(open_log(store, clock), 9)
    log.handler.forget(range(1, 7))
    clock.time += SLOW.total_seconds() + 1
    head = commit(log, append("a", 6), base=base, rebase=moved)
    assert (head.version, head.manifest.pins()) == (10, {"a": pin(10)})
    assert list(log.handler.versions()) == [10, 9, 8, 7]


def test_a_slow_writer_with_nobody_after_it_has_committed(
    store: Haunted, log: Log, clock: FakeClock
) -> None:
    base = grow(log, 5)
    clock.time += timedelta(days=1).total_seconds()
    assert commit(log, append("a", 6), base=base).version == 6
    assert log.head().version == 6


def test_a_slow_answer_with_others_on_top_has_committed(
    store: Haunted, log: Log, clock: FakeClock
) -> None:
    base = grow(log, 5)

    def slow(action: str, key: str) -> None:
        if action == "claim":
            store.after = lambda action, key: None
            grow(open_log(store, clock), 8)
            clock.time += SLOW.total_seconds() + 1

    store.after = slow
    assert commit(log, append("a", 6), base=base).version == 6
    assert log.head().version == 8


def test_a_slow_answer_of_a_version_that_somebody_has_tagged_takes_nothing_away(
    store: Haunted, log: Log, clock: FakeClock
) -> None:
    base = grow(log, 5)

    def slow(action: str, key: str) -> None:
        if action == "claim":
            store.after = lambda action, key: None
            other = open_log(store, clock)
            for number in range(7, 13):
                commit(other, ref(Operation.TAG, f"tag-{number}", version=6))
            other.handler.forget([7, 8, 9])
            clock.time += SLOW.total_seconds() + 1

    store.after = slow
    assert commit(log, append("a", 6), base=base).version == 6
    assert log.at(6).pins()["a"].version == 6


def swept(store: Haunted, log: Log, clock: FakeClock) -> StorageError:
    """Commit slowly on a base after which cleanup has taken away all but the newest versions."""
    base = grow(log, 5)
    grow(open_log(store, clock), 40)
    log.handler.forget(range(1, 39))
    clock.time += SLOW.total_seconds() + 1
    with pytest.raises(StorageError) as error:
        commit(log, append("a", 6), base=base)
    return error.value


def test_a_slow_writer_far_behind_is_not_told_that_it_committed(
    store: Haunted, log: Log, clock: FakeClock
) -> None:
    assert swept(store, log, clock).kind is ErrorKind.COMMIT_UNKNOWN
    assert log.head().version == 40


def test_a_slow_writer_far_behind_leaves_no_version_that_never_was(
    store: Haunted, log: Log, clock: FakeClock
) -> None:
    swept(store, log, clock)
    assert list(log.handler.versions()) == [40, 39]
    with pytest.raises(NotFound) as error:
        log.at(6)
    assert error.value.kind is ErrorKind.RECLAIMED


def test_a_head_from_a_slow_answer_is_old(store: Haunted, log: Log, clock: FakeClock) -> None:
    """Committing on it again must look whether others have gone on and been cleaned away."""
    base = grow(log, 5)
    hours = timedelta(hours=2).total_seconds()

    def slow(action: str, key: str) -> None:
        if action == "claim":
            store.after = lambda action, key: None
            grow(open_log(store, clock), 9)
            clock.time += hours

    store.after = slow
    head = commit(log, append("a", 6), base=base)
    assert head.version == 6
    log.handler.forget(range(1, 8))
    made = commit(log, append("a", 7), base=head, rebase=moved)
    assert log.head().manifest == made.manifest, "what was said to be committed is"


# -- damage --------------------------------------------------------------------------------------


def flipped(data: bytes) -> Iterator[bytes]:
    """Yield the bytes with each bit turned over."""
    for at in range(len(data)):
        for bit in range(8):
            yield data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def cut(data: bytes) -> Iterator[bytes]:
    return (data[:length] for length in range(len(data)))


def test_an_entry_with_any_bit_turned_is_damaged(store: Haunted, log: Log) -> None:
    grow(log, 2)
    data = store.get(key(2))
    for bad in flipped(data):
        with pytest.raises(Damaged) as error:
            ENTRIES.decode(bad, "2")
        assert error.value.kind is ErrorKind.CORRUPT_MANIFEST


def test_an_entry_that_is_cut_anywhere_is_damaged(store: Haunted, log: Log) -> None:
    grow(log, 2)
    for bad in cut(store.get(key(2))):
        with pytest.raises(Damaged):
            ENTRIES.decode(bad, "2")


def test_a_checkpoint_with_any_bit_turned_is_damaged_or_the_same() -> None:
    manifest = Manifest(STAMP, 7, 7, {"a": table("a")}, requests={"r": 3})
    data = CHECKPOINTS.encode(manifest)
    for bad in (*flipped(data), *cut(data)):
        with suppress(Damaged):
            assert CHECKPOINTS.decode(bad, "x") == manifest


def test_damage_stops_readers_and_writers(store: Haunted, log: Log) -> None:
    base = grow(log, 2)
    head = grow(log, 3)
    data = store.get(key(3))
    for bad in (b"", b"\x00", b"{}", data[:-1], data + b"x", data.replace(b"append", b"delete")):
        store.put(key(3), bad)
        for use in (log.head, lambda: log.at(3), lambda: open_log(store).head(base)):
            with pytest.raises(Damaged, match="version 3 is damaged") as error:
                use()
            assert "backup" in error.value.message
        with pytest.raises(LakewardenError):
            commit(log, append("a", 3), base=base, rebase=moved)
        assert store.get(key(3)) == bad, "nobody writes over it"
    store.put(key(3), data)
    assert log.head().manifest == head.manifest


def test_a_damaged_checkpoint_stops_readers(store: Haunted, log: Log) -> None:
    grow(log, CHECKPOINT_EVERY + 2)
    whole = store.get(checkpoint_key(CHECKPOINT_EVERY))
    for bad in (b"", whole[:-3], whole[:10] + b"\xff" + whole[11:], b"x" + whole):
        store.put(checkpoint_key(CHECKPOINT_EVERY), bad)
        with pytest.raises(Damaged, match="checkpoint"):
            open_log(store).head()


def test_an_entry_under_another_number_is_damaged(store: Haunted, log: Log) -> None:
    grow(log, 3)
    store.put(key(3), store.get(key(2)))
    with pytest.raises(Damaged, match="says that it is version 2"):
        log.at(3)


def test_a_checkpoint_under_another_number_is_damaged(store: Haunted, log: Log) -> None:
    grow(log, 2 * CHECKPOINT_EVERY + 2)
    one, two = checkpoint_key(CHECKPOINT_EVERY), checkpoint_key(2 * CHECKPOINT_EVERY)
    store.put(two, store.get(one))
    with pytest.raises(Damaged, match=f"one of version {CHECKPOINT_EVERY}"):
        open_log(store).head()


def test_an_entry_whose_tail_has_a_hole_is_damaged(store: Haunted, log: Log) -> None:
    grow(log, 5)
    entry = log.entry(5)
    store.put(key(5), ENTRIES.encode(replace(entry, tail=entry.tail[:1] + entry.tail[2:])))
    with pytest.raises(Damaged, match="missing"):
        log.head()


# -- newer releases ------------------------------------------------------------------------------


def sealed(body: bytes) -> bytes:
    return body + b"\nsha256:" + hashlib.sha256(body).hexdigest().encode()


def test_what_a_newer_release_wrote_is_refused(store: Haunted, log: Log) -> None:
    base = grow(log, 2)
    grow(log, 3)
    newer = replace(log.entry(3), stamp=STAMP + 1)
    store.put(key(3), ENTRIES.encode(newer))
    uses: list[Callable[[], object]] = [
        log.head,
        lambda: log.at(3),
        lambda: log.head(base),
        lambda: commit(log, append("a", 3), base=base, rebase=moved),
    ]
    for use in uses:
        with pytest.raises(Refused, match="upgrade lakewarden first") as error:
            use()
        assert error.value.kind is ErrorKind.NEWER_STAMP
    assert list(log.handler.versions()) == [3, 2, 1]
    assert log.at(2).version == 2, "what is older can be read"


def test_a_newer_shape_is_refused_before_it_is_understood(store: Haunted, log: Log) -> None:
    grow(log, 2)
    strange = {"stamp": STAMP + 1, "logged": "somewhere else", "operation": "teleport"}
    store.put(key(2), sealed(json.dumps(strange).encode()))
    with pytest.raises(Refused, match="upgrade lakewarden first"):
        log.head()


def test_a_shape_of_this_release_that_is_not_understood_is_damage(store: Haunted, log: Log) -> None:
    grow(log, 2)
    body = store.get(key(2)).partition(b"\nsha256:")[0]
    assert ENTRIES.decode(sealed(body), "2") == log.entry(2)
    for bad in (body.replace(b'"append"', b'"teleport"'), b"[]", b"null", b"{", b"7"):
        store.put(key(2), sealed(bad))
        with pytest.raises(Damaged):
            log.head()


def test_a_newer_checkpoint_is_refused(store: Haunted, log: Log) -> None:
    grow(log, CHECKPOINT_EVERY + 2)
    where = checkpoint_key(CHECKPOINT_EVERY)
    newer = replace(log.at(CHECKPOINT_EVERY), stamp=STAMP + 1)
    store.put(where, CHECKPOINTS.encode(newer))
    with pytest.raises(Refused, match="upgrade lakewarden first"):
        open_log(store).head()


def test_an_entry_survives_its_bytes() -> None:
    change = content(Operation.DELETE, "ä", 3, touches=frozenset({1, 5}))
    made = transaction(
        change,
        create("b"),
        Change(Operation.SETTINGS, properties={"x": None, "y": "\x00\u2028"}),
        actor="ada",
        message="two\nlines",
        request="r",
        branch="dev",
        expects={"a": None, "b": pin(1)},
    )
    tail = tuple(Logged(version, version, made) for version in (4, 5, 6))
    entry = Entry(Logged(7, 7, made), "w", STAMP, "v", 3, tail)
    assert ENTRIES.decode(ENTRIES.encode(entry), "7") == entry
    assert TRANSACTIONS.decode(TRANSACTIONS.encode(made), "it") == made
