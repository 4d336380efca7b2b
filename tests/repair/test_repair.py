"""Repair of warehouses: pins move to heads, or heads go back to pins; nothing else is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pytest

from lakewarden.errors import ErrorKind, Exit
from lakewarden.maintenance.repair import RepairReceipt
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import Request as Call
from lakewarden.testing.faults import FaultyOpener
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.manifest import Logged, Operation
from tests.repair.mending import (
    Mender,
    append,
    compact,
    ids_at,
    row_of,
    said,
    transaction_of,
    versions,
)
from tests.warehouse.cleaning import Lake
from tests.warehouse.lakes import Tampered, dataset, id_rows, lance_ids, reopen, write

pytestmark = pytest.mark.spark

T = ("db", "t")


def files(place: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(place)): one.read_bytes() for one in place.rglob("*") if one.is_file()
    }


def last(lake: Lake) -> Logged:
    """Return the newest version of the log."""
    return next(reopen(lake.root).history(1))


def unverifiable(place: Path) -> None:
    compact(place)
    transaction_of(place, lance.dataset(str(place)).version).unlink()


DRIFT: dict[str, Callable[[Path], None]] = {
    "verified_maintenance": compact,
    "suspicious": lambda place: append(place, 66),
    "unverifiable": unverifiable,
}


def on_dev(lake: Lake, mode: str, *ids: int) -> None:
    write(Namespace(reopen(lake.root), branch="dev"), mode, *ids)


def fork_of(lake: Lake) -> Path:
    (found,) = (lake.place("t") / "tree").iterdir()
    return found


# -- the table of actions --------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("kind", DRIFT)
def test_a_preview_changes_nothing(lake: Lake, mender: Mender, kind: str, tmp_path: Path) -> None:
    """XM-14.  Neither a file nor a request that could have changed one, in any process."""
    DRIFT[kind](lake.place("t"))
    before = files(lake.root)
    counting = FaultyOpener(
        Opener({}), 0, "before", str(tmp_path / "calls"), frozenset({Call.PUT, Call.DELETE})
    )
    plan = mender.plan(opening=counting)
    row = row_of(plan)
    assert said(row)[:2] == (kind, "preview")
    assert versions(row)[0] == 3
    assert counting.plan.calls() == 0
    assert files(lake.root) == before


def test_a_preview_publishes_nothing_either(lake: Lake, mender: Mender, tmp_path: Path) -> None:
    tampered = Tampered()
    tampered.failing("put_if_absent", "/tables/")
    write(Namespace(reopen(lake.root, opener=tampered)), "append", 4)
    before = files(lake.root)
    counting = FaultyOpener(
        Opener({}), 0, "before", str(tmp_path / "calls"), frozenset({Call.PUT, Call.DELETE})
    )
    plan = mender.plan(opening=counting)
    assert said(row_of(plan))[:2] == ("no_drift", "no_op")
    assert plan.findings == []
    assert (counting.plan.calls(), files(lake.root)) == (0, before)
    assert lance_ids(reopen(lake.root)) == [1, 2, 3, 4]


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
def test_compaction_by_somebody_else_is_published(lake: Lake, mender: Mender, force: bool) -> None:
    """XM-15.  One version, by repair's own name; no file of the table is touched."""
    place = lake.place("t")
    compact(place)
    before, number = files(place), mender.newest()
    receipt = mender.run(force=force)
    assert said(row_of(receipt)) == (
        "verified_maintenance",
        "healed",
        ["reserve_fragments", "rewrite"],
    )
    assert (receipt.version, receipt.exit_code) == (number + 1, Exit.DONE)
    assert files(place) == before
    made = last(lake)
    assert (made.version, made.transaction.actor) == (number + 1, "lakewarden:repair")
    assert [one.operation for one in made.transaction.changes] == [Operation.REWRITE]
    # Whoever reads sees the head, and whoever writes goes on from there.
    again = reopen(lake.root)
    assert dataset(Namespace(again)).version == 5
    write(Namespace(again), "append", 4)
    assert lance_ids(reopen(lake.root)) == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["suspicious", "unverifiable"])
def test_anything_else_is_refused_and_nothing_is_written(
    lake: Lake, mender: Mender, kind: str
) -> None:
    """XM-16."""
    DRIFT[kind](lake.place("t"))
    before = files(lake.root)
    receipt = mender.run()
    assert said(row_of(receipt))[:2] == (kind, "refused")
    assert (receipt.version, receipt.exit_code) == (None, Exit.REFUSED)
    assert files(lake.root) == before


@pytest.mark.parametrize("kind", ["suspicious", "unverifiable"])
def test_what_was_looked_at_can_be_forced(lake: Lake, mender: Mender, kind: str) -> None:
    place = lake.place("t")
    DRIFT[kind](place)
    before = files(place)
    receipt = mender.run(force=True)
    assert said(row_of(receipt))[:2] == (kind, "forced")
    assert receipt.exit_code is Exit.DONE
    assert last(lake).transaction.actor == "lakewarden:repair:force"
    assert files(place) == before
    assert lance_ids(reopen(lake.root)) == ids_at(place)


def test_a_raw_delete_is_refused_and_can_be_forced(lake: Lake, mender: Mender) -> None:
    """XM-16, as Omnigraph tests it."""
    lance.dataset(str(lake.place("t"))).delete("id = 1")
    assert said(row_of(mender.run())) == ("suspicious", "refused", ["delete"])
    assert dataset(Namespace(reopen(lake.root))).count_rows() == 3
    assert said(row_of(mender.run(force=True))) == ("suspicious", "forced", ["delete"])
    assert lance_ids(reopen(lake.root)) == [2, 3]


def test_verified_tables_are_healed_though_others_are_refused(lake: Lake, mender: Mender) -> None:
    compact(lake.place("t"))
    append(lake.place("other"), 66)
    lake.lance("create", "sound", 1)
    receipt = mender.run()
    done = {row.line.key: row.action.value for row in receipt.rows}
    assert done == {"db.other": "refused", "db.sound": "no_op", "db.t": "healed"}
    assert receipt.exit_code is Exit.REFUSED
    assert len(last(lake).transaction.changes) == 1


def test_several_tables_are_published_in_one_version(lake: Lake, mender: Mender) -> None:
    for name in ("t", "other"):
        compact(lake.place(name))
    number = mender.newest()
    assert mender.run().version == number + 1
    assert len(last(lake).transaction.changes) == 2
    assert mender.newest() == number + 1


@pytest.mark.nightly
def test_repairing_again_does_nothing(lake: Lake, mender: Mender) -> None:
    compact(lake.place("t"))
    assert mender.run().version is not None
    before = files(lake.root)
    again = mender.run(force=True)
    assert [row.action.value for row in again.rows] == ["no_op", "no_op"]
    assert (again.version, again.exit_code) == (None, Exit.DONE)
    assert files(lake.root) == before


def test_only_tables_that_are_asked_for(lake: Lake, mender: Mender) -> None:
    for name in ("t", "other"):
        compact(lake.place(name))
    receipt = mender.run(tables=("db.o*",))
    assert [row.line.key for row in receipt.rows] == ["db.other"]
    assert said(row_of(mender.plan()))[:2] == ("verified_maintenance", "preview")


# -- tables for which no pin can move --------------------------------------------------------------


@pytest.mark.nightly
def test_a_head_below_the_pin_is_an_error_and_the_others_are_done(
    lake: Lake, mender: Mender
) -> None:
    compact(lake.place("other"))
    (lake.place("t") / "_versions" / f"{2**64 - 1 - 3:020d}.manifest").unlink()
    for name in ("force", "to_pin"):
        asked: dict[str, Any] = {name: True}
        plan = mender.plan(**asked)
        assert row_of(plan).error_kind is ErrorKind.DAMAGED_VERSION
    receipt = mender.run(force=True)
    assert said(row_of(receipt))[:2] == ("no_drift", "refused")
    assert said(row_of(receipt, "db.other"))[:2] == ("verified_maintenance", "healed")
    assert receipt.exit_code is Exit.REFUSED


def test_a_head_that_would_clean_itself_is_not_published(lake: Lake, mender: Mender) -> None:
    found = lance.dataset(str(lake.place("t")))
    found.update_config({"lance.auto_cleanup.interval": "1", "lance.auto_cleanup.older_than": "1s"})
    row = row_of(mender.run(force=True))
    assert (row.action.value, row.error_kind) == ("refused", ErrorKind.UNSUPPORTED_FEATURE)
    assert mender.run(to_pin=True).exit_code is Exit.DONE
    assert lance_ids(reopen(lake.root)) == [1, 2, 3]


def test_a_head_that_cannot_be_read_is_not_published_even_if_forced(
    lake: Lake, mender: Mender
) -> None:
    place = lake.place("t")
    before = set((place / "data").iterdir())
    append(place, 66)
    (new,) = set((place / "data").iterdir()) - before
    new.unlink()
    row = row_of(mender.run(force=True))
    assert (row.action.value, row.error_kind) == ("refused", ErrorKind.DAMAGED_VERSION)
    assert "--to-pin" in str(row.error)
    assert row_of(mender.plan()).action.value == "preview"
    assert mender.run(to_pin=True).exit_code is Exit.DONE
    assert lance_ids(reopen(lake.root)) == [1, 2, 3]


# -- branches --------------------------------------------------------------------------------------


def test_drift_on_a_branch_is_seen_and_published_there(lake: Lake, mender: Mender) -> None:
    lake.warehouse.create_branch("dev")
    on_dev(lake, "append", 10)
    on_dev(lake, "append", 11)
    compact(fork_of(lake))
    plan = mender.plan()
    assert said(row_of(plan))[:2] == ("no_drift", "no_op")
    assert said(row_of(plan, branch="dev"))[:2] == ("verified_maintenance", "preview")
    receipt = mender.run()
    assert said(row_of(receipt, branch="dev"))[:2] == ("verified_maintenance", "healed")
    assert last(lake).transaction.branch == "dev"
    on_dev(lake, "append", 12)
    found = dataset(Namespace(reopen(lake.root), branch="dev"))
    assert sorted(found.to_table()["id"].to_pylist()) == [1, 2, 3, 10, 11, 12]
    assert lance_ids(reopen(lake.root)) == [1, 2, 3]


@pytest.mark.nightly
def test_drift_in_a_fork_that_nothing_was_committed_to_is_seen(lake: Lake, mender: Mender) -> None:
    lake.warehouse.create_branch("dev")
    # Whoever opens it there makes a fork.
    dataset(Namespace(reopen(lake.root), branch="dev"))
    append(fork_of(lake), 66)
    assert said(row_of(mender.plan(), branch="dev")) == ("suspicious", "preview", ["append"])
    mender.run(force=True)
    found = dataset(Namespace(reopen(lake.root), branch="dev"))
    assert sorted(found.to_table()["id"].to_pylist()) == [1, 2, 3, 66]
    assert lance_ids(reopen(lake.root)) == [1, 2, 3]
    assert {row.line.classification.value for row in mender.plan().rows} == {"no_drift"}


def test_drift_on_two_branches_is_one_version_for_each(lake: Lake, mender: Mender) -> None:
    lake.warehouse.create_branch("dev")
    on_dev(lake, "append", 10)
    compact(lake.place("t"))
    compact(fork_of(lake))
    number = mender.newest()
    receipt = mender.run()
    assert {row.action.value for row in receipt.rows if row.line.key == "db.t"} == {"healed"}
    assert mender.newest() == receipt.version == number + 2
    assert {one.transaction.branch for one in reopen(lake.root).history(2)} == {"main", "dev"}


# -- back to the pin -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=() if one == "suspicious" else pytest.mark.nightly) for one in DRIFT],
)
def test_a_table_goes_back_to_its_pin_as_a_new_version(
    lake: Lake, mender: Mender, kind: str
) -> None:
    place = lake.place("t")
    DRIFT[kind](place)
    head, number = lance.dataset(str(place)).version, mender.newest()
    written = {one: ids_at(place, one) for one in range(1, head + 1)}
    plan = mender.plan(to_pin=True)
    assert said(row_of(plan))[:2] == (kind, "preview")
    receipt = mender.run(to_pin=True)
    row = row_of(receipt)
    assert said(row)[:2] == (kind, "healed")
    assert row.pin is not None
    assert (row.pin.version, receipt.version) == (head + 1, number + 1)
    assert lance_ids(reopen(lake.root)) == [1, 2, 3]
    assert lance.dataset(str(place)).version == head + 1
    # What was written past the warehouse can still be read.
    assert {one: ids_at(place, one) for one in written} == written
    change = last(lake).transaction
    assert (change.actor, change.changes[0].operation) == ("lakewarden:repair", Operation.RESTORE)
    assert mender.run(to_pin=True).version is None
    write(Namespace(reopen(lake.root)), "append", 4)
    assert lance_ids(reopen(lake.root)) == [1, 2, 3, 4]


@pytest.mark.parametrize("committed", [False, True], ids=["empty fork", "fork"])
def test_a_branch_goes_back_to_its_pin(lake: Lake, mender: Mender, committed: bool) -> None:
    lake.warehouse.create_branch("dev")
    dataset(Namespace(reopen(lake.root), branch="dev"))
    expected = [1, 2, 3]
    if committed:
        on_dev(lake, "append", 10)
        expected = [1, 2, 3, 10]
    append(fork_of(lake), 66)
    receipt = mender.run(to_pin=True)
    assert said(row_of(receipt, branch="dev"))[:2] == ("suspicious", "healed")
    found = dataset(Namespace(reopen(lake.root), branch="dev"))
    assert sorted(found.to_table()["id"].to_pylist()) == expected
    assert lance_ids(reopen(lake.root)) == [1, 2, 3]


# -- others at the same time -----------------------------------------------------------------------


def conflicted(receipt: RepairReceipt) -> None:
    row = row_of(receipt)
    assert (row.action.value, row.error_kind) == ("refused", ErrorKind.CONFLICT)
    assert "do it again" in str(row.error)
    assert (receipt.version, receipt.exit_code) == (None, Exit.CONFLICT)


@pytest.mark.nightly
@pytest.mark.parametrize("asked", [{}, {"to_pin": True}], ids=["publish", "to pin"])
def test_whoever_is_second_is_told(lake: Lake, mender: Mender, asked: dict[str, Any]) -> None:
    compact(lake.place("t"))
    plan = mender.plan(confirm=True, **asked)
    assert mender.execute(plan).version is not None
    before = files(lake.root)
    conflicted(mender.execute(plan))
    after = files(lake.root)
    announced = {name for name in after if "/_transactions/" in name} - set(before)
    # A try of ours is announced, and its transaction beside the table is too young to be anybody's.
    assert all(name in before or name in announced for name in after if "_versions/" in name)
    assert lance_ids(reopen(lake.root)) == [1, 2, 3]


@pytest.mark.nightly
@pytest.mark.parametrize("asked", [{}, {"to_pin": True}], ids=["publish", "to pin"])
def test_a_table_that_is_written_to_again_is_looked_at_again(
    lake: Lake, mender: Mender, asked: dict[str, Any]
) -> None:
    compact(lake.place("t"))
    plan = mender.plan(confirm=True, **asked)
    append(lake.place("t"), 66)
    number = mender.newest()
    conflicted(mender.execute(plan))
    assert mender.newest() == number
    assert said(row_of(mender.run()))[0] == "suspicious"


@pytest.mark.nightly
@pytest.mark.parametrize("asked", [{}, {"to_pin": True}], ids=["publish", "to pin"])
def test_somebody_who_commits_in_that_very_moment_wins_or_does_not_matter(
    lake: Lake, mender: Mender, asked: dict[str, Any]
) -> None:
    compact(lake.place("t"))
    plan = mender.plan(confirm=True, **asked)
    tampered = Tampered()
    # To another table: both land.
    tampered.once("put_if_absent", "__manifest/_versions", lambda: lake.lance("append", "other", 4))
    receipt = mender.execute(plan, tampered)
    assert row_of(receipt).action.value == "healed"
    assert lance_ids(reopen(lake.root), ("db", "other")) == [1, 2, 3, 4]
    assert lance_ids(reopen(lake.root)) == [1, 2, 3]
    # To the same one: another repair.
    append(lake.place("t"), 66)
    plan = mender.plan(confirm=True, force=not asked, **asked)
    other = mender.plan(confirm=True, force=True)
    tampered.once("put_if_absent", "__manifest/_versions", lambda: mender.execute(other))
    conflicted(mender.execute(plan, tampered))
    assert lance_ids(reopen(lake.root)) == [1, 2, 3, 66]


def test_a_writer_that_was_at_work_is_told_or_put_on_top(lake: Lake, mender: Mender) -> None:
    """What it read was the pin; after the repair that is not the current version any more."""
    place = lake.place("t")
    namespace = Namespace(reopen(lake.root))
    opened = dataset(namespace)
    append(place, 66)
    mender.run(force=True)
    opened.insert(id_rows(4))
    assert lance_ids(reopen(lake.root)) == [1, 2, 3, 4, 66]
