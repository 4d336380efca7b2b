"""Others beside optimize: a writer without pause, other optimizes, and power cuts.

What every version must hold is known from the writer's log alone.
"""

from __future__ import annotations

import json
import random  # noqa: TID251  # the seed is shown when a test fails
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import pytest
from hypothesis import settings

from lakewarden.errors import Conflict, ErrorKind, Exit
from lakewarden.maintenance.optimize import Receipt
from lakewarden.maintenance.places import Together
from lakewarden.testing import tables
from lakewarden.testing.changing import Changed, changer
from lakewarden.testing.invariants import (
    assert_all_versions_read,
    assert_no_live_file_missing,
    fingerprints,
)
from lakewarden.testing.processes import started
from lakewarden.warehouse.manifest import Operation, Pin, Table
from lakewarden.warehouse.warehouse import Warehouse
from tests.optimize.tuning import Lake, Tuner, add, alone, in_pieces, rows, some, unindexed
from tests.warehouse.lakes import VERSIONS, Tampered

pytestmark = [pytest.mark.slow, pytest.mark.spark]

NIGHTLY = settings.get_current_profile_name() == "nightly"
ROUNDS = 12 if NIGHTLY else 2
#: Between the writer's changes, so that a few tries of optimize are enough.
PAUSE = 0.05


def held(found: Any) -> list[tuple[int, int]]:
    """Return all rows; no index has a part in it."""
    table = found.to_table(columns=["id", "value"])
    ids, values = table.column("id").to_pylist(), table.column("value").to_pylist()
    return sorted(zip(ids, values, strict=True))


def states(changes: Sequence[Changed], last: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield every version from the first change on, with the rows that it must have."""
    known: dict[int, int] = {}
    for at, change in enumerate(changes):
        change.apply(known)
        following = changes[at + 1].version if at + 1 < len(changes) else last + 1
        for version in range(change.version, following):
            yield version, sorted(known.items())


def check_history(path: Path, changes: Sequence[Changed]) -> None:
    """Read versions whole: rows are those of the acknowledged changes, neither fewer nor more.

    By default one of many, and all that optimize has made; the profile `nightly` reads each.
    """
    head = lance.dataset(str(path)).version
    written = {change.version for change in changes}
    every = 1 if NIGHTLY else max(1, head // 30)
    for version, expected in states(changes, head):
        if version % every == 0 or version not in written:
            assert held(lance.dataset(str(path), version=version)) == expected, version


def check_answers(found: Any) -> None:
    """Ask through the indices for many keys, and compare with a scan of everything."""
    everyone = held(found)
    ids, values = {one for one, _ in everyone}, sorted({value for _, value in everyone})
    last = max(ids, default=0)
    for wanted in (*range(0, last + 5, max(1, last // 40)), last):
        assert asked(found, f"id = {wanted}") == [row for row in everyone if row[0] == wanted]
    for wanted in values[:: max(1, len(values) // 20)]:
        assert asked(found, f"value = {wanted}") == [row for row in everyone if row[1] == wanted]
    for first in range(0, last, max(1, last // 7)):
        between = f"id >= {first} AND id < {first + 50} AND value > {values[0]}"
        assert asked(found, between) == [
            row for row in everyone if first <= row[0] < first + 50 and row[1] > values[0]
        ]


def asked(found: Any, predicate: str) -> list[tuple[int, int]]:
    scanner = found.scanner(filter=predicate, columns=["id", "value"])
    assert "ScalarIndexQuery" in scanner.explain_plan(), predicate
    table = scanner.to_table()
    ids, values = table.column("id").to_pylist(), table.column("value").to_pylist()
    return sorted(zip(ids, values, strict=True))


def check_receipt(receipt: Receipt, seed: int) -> None:
    """Being outrun is no error of anybody's; everything else is."""
    for row in receipt.rows:
        assert row.error is None or row.error_kind == ErrorKind.CONFLICT.value, (seed, row.error)
        assert row.skipped is None, (seed, row.skipped)


def check_calm(tuner: Tuner, place: Any, path: Path, changes: Sequence[Changed]) -> None:
    """Once nobody writes, one more run ends it, and the next has nothing to do."""
    (row,) = tuner.run(place()).rows
    assert row.error is None
    found = lance.dataset(str(path))
    assert len(found.get_fragments()) <= 1
    assert [unindexed(found, name) for name in ("id_idx", "value_idx")] == [0, 0]
    assert_no_live_file_missing(path)
    check_history(path, changes)
    check_answers(found)
    (row,) = tuner.run(place()).rows
    assert not row.committed
    assert lance.dataset(str(path)).version == found.version


@pytest.mark.nightly
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_a_writer_without_pause_loses_nothing_to_optimize_in_a_loop(
    tuner: Tuner, tmp_path: Path, stable: bool
) -> None:
    table, seed = tmp_path / "t.lance", random.randrange(10**6)
    committed = 0
    with changer(table, log=tmp_path / "log", seed=seed, pause=PAUSE, stable=stable) as beside:
        for _ in range(ROUNDS):
            receipt = tuner.run(alone(table))
            check_receipt(receipt, seed)
            committed += receipt.rows[0].committed
            beside.wait_for(3)
        changes = beside.stop()
    assert committed, f"seed {seed}: it had something to do"
    assert len(changes) > 15, "the writer was at work"
    check_calm(tuner, lambda: alone(table), table, changes)


@pytest.mark.nightly
def test_a_writer_to_a_warehouse_loses_nothing_to_optimize_in_a_loop(
    tuner: Tuner, tmp_path: Path
) -> None:
    lake, seed = Lake(tmp_path / "lake"), random.randrange(10**6)
    committed = 0
    with changer(
        lake.root, log=tmp_path / "log", seed=seed, pause=2 * PAUSE, warehouse=True
    ) as beside:
        for _ in range(ROUNDS):
            receipt = tuner.run(lake.place())
            check_receipt(receipt, seed)
            committed += receipt.rows[0].committed
            beside.wait_for(3)
        changes = beside.stop()
    assert committed, f"seed {seed}: it had something to do"
    path = lake.path("t")
    check_calm(tuner, lake.place, path, changes)
    check_log(lake, changes)


def check_log(lake: Lake, changes: Sequence[Changed]) -> None:
    """Nobody else has written, and nothing that was staged is left or was shown by mistake."""
    path = lake.path("t")
    assert lake.open("t").version == lance.dataset(str(path)).version
    logged = [one.transaction for one in Warehouse.open(str(lake.root)).history()]
    pins = {
        change.after.version: (one.actor, change.operation)
        for one in logged
        for change in one.changes
        if change.after is not None
    }
    ours = {version for version, (actor, _) in pins.items() if actor != "writer"}
    assert not ours & {change.version for change in changes}
    assert {pins[version][1] for version in ours} <= {Operation.REWRITE, Operation.INDEX}
    public = {one.name for one in (path / "_versions").glob("*.manifest")}
    assert len(public) == lance.dataset(str(path)).version


@pytest.mark.nightly
@pytest.mark.parametrize("warehouse", [False, True], ids=["alone", "warehouse"])
def test_a_writer_that_never_waits_is_not_held_up(
    tuner: Tuner, tmp_path: Path, warehouse: bool
) -> None:
    """Optimize may be outrun each time; the writer never notices."""
    seed, root = random.randrange(10**6), tmp_path / "t.lance"
    lake = Lake(tmp_path / "lake") if warehouse else None
    there = lake.root if lake else root
    with changer(there, log=tmp_path / "log", seed=seed, warehouse=warehouse) as beside:
        for _ in range(3):
            check_receipt(tuner.run(lake.place() if lake else alone(root)), seed)
        changes = beside.stop()
    assert sum(change.refused for change in changes) <= len(changes) // 20, seed
    check_calm(
        tuner,
        lake.place if lake else lambda: alone(root),
        lake.path("t") if lake else root,
        changes,
    )


@pytest.mark.nightly
def test_a_table_that_others_change_before_each_claim_is_left_out_soon(
    tuner: Tuner, lake: Lake
) -> None:
    """Its indices alone are replayed on top of the others', and the log waits longer each time."""
    indexed(lake, "t")
    before, outrun = rows(lake.open("t")), 0
    tampered = Tampered()

    def write_first(method: str, key: str) -> None:
        nonlocal outrun
        if method == "put_if_absent" and VERSIONS in key and outrun < 8:
            lake.write("t", 9000 + 100 * outrun)
            outrun += 1

    place = Together(Warehouse.open(str(lake.root), opener=tampered))
    (job,) = tuner.plan(place, min_files=50).jobs
    with place.visiting() as visit:
        opened = visit.opened(job)
        errand = job.index(opened)
        assert errand is not None
        assert job.commit_index(opened, errand.run())
        tampered.rule = write_first
    assert visit.left_out == {"db.t"}
    assert outrun < 8
    expected = sum((rows_of(9000 + 100 * at) for at in range(outrun)), before)
    assert rows(lake.open("t")) == expected
    tuner.run(lake.place())
    check_done(lake, "t", expected)


def rows_of(start: int) -> Counter[Any]:
    return Counter(tuple(row.values()) for row in some(start).to_pylist())


@pytest.mark.parametrize("reserved", [False, True], ids=["before numbers are reserved", "after"])
def test_what_was_rewritten_for_a_try_that_failed_is_not_committed_without_its_files(
    tuner: Tuner, lake: Lake, reserved: bool
) -> None:
    """Lance takes the files away after the one failure, and leaves them after the other."""
    lake.fill("t")
    before, place, asked = rows(lake.open("t")), lake.place(), 0
    (job,) = tuner.plan(place).jobs
    results = [job.errand(piece).run() for piece in job.pieces]

    def outrun_once(table: Table, before: Pin | None, after: Pin) -> Pin:
        nonlocal asked
        asked += 1
        if asked == 1 and not reserved:
            lake.write("t", 9000)
            raise Conflict(ErrorKind.CONFLICT, "db.t was changed by somebody else")
        taken: Pin = take(table, before, after)
        if asked == 1:
            lake.write("t", 9000)
        return taken

    with place.visiting() as visit:
        opened: Any = visit.opened(job)
        session = opened.changes._lance  # where clients ask for versions
        take, session.take = session.take, outrun_once
        assert job.commit(opened, results).outrun
        visit.withdraw(job)
    with place.visiting() as visit:
        again = job.commit(visit.opened(job), results)
    assert (list(again.lost), again.changed) == (([], True) if reserved else (results, False))
    assert rows(lake.open("t")) == before + rows_of(9000)
    assert_no_live_file_missing(lake.path("t"))
    tuner.run(lake.place())
    assert len(lake.open("t").get_fragments()) == 1
    assert rows(lake.open("t")) == before + rows_of(9000)


def test_a_table_whose_change_the_log_does_not_take_leaves_the_others_alone(
    tuner: Tuner, lake: Lake
) -> None:
    """Lance has put the rewrite on top of an update of other rows; to the log these do not agree."""
    for name in ("busy", "calm"):
        lake.fill(name, 3)
    place = lake.place()
    jobs = tuner.plan(place).jobs
    done = {job.key: [job.errand(piece).run() for piece in job.pieces] for job in jobs}
    lake.write("busy", 5000)
    with place.visiting() as visit:
        lake.open("busy").update({"text": "'new'"}, where="id = 5001")
        for job in jobs:
            assert job.commit(visit.opened(job), done[job.key]).changed
    assert visit.left_out == {"db.busy"}
    assert visit.version is not None
    assert len(lake.open("calm").get_fragments()) == 1
    assert lake.open("busy").count_rows("text = 'new'") == 1
    assert lake.open("busy").count_rows() == 400


# -- two at once -----------------------------------------------------------------------------------


def test_two_optimizes_at_once_do_it_once(tuner: Tuner, lake: Lake, tmp_path: Path) -> None:
    for name in ("a", "b"):
        indexed(lake, name)
    plain = in_pieces(tmp_path / "t.lance")
    before = {name: rows(lake.open(name)) for name in "ab"}
    with ThreadPoolExecutor(4) as pool:
        places = [lake.place(), lake.place(), alone(plain), alone(plain)]
        receipts = list(pool.map(tuner.run, places))
    for receipt in receipts:
        for row in receipt.rows:
            assert row.error is None or row.error_kind == ErrorKind.CONFLICT.value, row.error
    tuner.run(lake.place())
    for name in "ab":
        check_done(lake, name, before[name])
    found = lance.dataset(str(plain))
    assert rows(found) == rows(lance.dataset(str(plain), version=6))
    assert len(found.get_fragments()) == 1


@pytest.mark.nightly
def test_an_optimize_of_another_process_does_no_harm(tuner: Tuner, lake: Lake) -> None:
    indexed(lake, "a")
    before = rows(lake.open("a"))
    with started("optimize", lake.root, "--json") as other:
        assert other.stage("rewrite")
        here = tuner.run(lake.place())
        code, stdout, stderr = other.result()
    assert code in (Exit.DONE, Exit.CONFLICT), stderr
    assert here.exit_code in (Exit.DONE, Exit.CONFLICT)
    assert "Traceback" not in stderr
    assert json.loads(stdout)["message_type"] == "optimize_receipt"
    tuner.run(lake.place())
    check_done(lake, "a", before)


def indexed(lake: Lake, name: str) -> None:
    """Make a table in pieces, some of which an index does not cover."""
    lake.fill(name, 4)
    lake.open(name).create_scalar_index("id", "BTREE")
    for start in (400, 500):
        lake.write(name, start)
    lake.open(name).delete("id % 10 = 3")


def check_done(lake: Lake, name: str, before: Any) -> None:
    found = lake.open(name)
    assert rows(found) == before
    assert lance.dataset(str(lake.path(name))).version == found.version
    assert len(found.get_fragments()) == 1
    assert unindexed(found, "id_idx") == 0
    check_ids(found)


def check_ids(found: Any) -> None:
    """Ask through the index for ids, and compare with a scan."""
    ids = set(found.to_table(columns=["id"]).column("id").to_pylist())
    for wanted in range(0, 700, 13):
        answer = found.to_table(filter=f"id = {wanted}", columns=["id"]).column("id").to_pylist()
        assert answer == ([wanted] if wanted in ids else []), wanted


# -- power cuts ------------------------------------------------------------------------------------

MOMENTS = [
    (kind, stage) for kind in ("alone", "lake") for stage in ("rewrite", "commit", "reindex")
]


def test_an_optimize_killed_at_any_moment_is_finished_by_the_next(
    tuner: Tuner, lake: Lake, tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    for kind, stage in MOMENTS if NIGHTLY else [chance.choice(MOMENTS)]:
        where = f"{kind}, {stage}, seed {seed}"
        name = f"t{stage}"
        if kind == "lake":
            indexed(lake, name)
            root, target = lake.path(name), lake.root
        else:
            root = target = in_pieces(tmp_path / f"{name}.lance", 4)
            tables.index(root)
            add(root, 400)
        known, before = fingerprints(root), rows(lance.dataset(str(root)))
        with started("optimize", target) as run:
            assert run.stage(stage), where
            time.sleep(chance.uniform(0, 0.3))  # noqa: TID251  # at any moment
            run.kill()
        # By the path and through the warehouse, before anybody has mended anything.
        check_versions(root, known, before)
        tuner.run(lake.place() if kind == "lake" else alone(root))
        check_versions(root, known, before)
        found = lance.dataset(str(root))
        assert len(found.get_fragments()) == 1, where
        assert unindexed(found, "id_idx") == 0, where
        check_ids(found)
        if kind == "lake":
            check_done(lake, name, before)


def check_versions(root: Path, known: Any, before: Any) -> None:
    """Old versions read as they did, new ones have the same rows, and their numbers have no gap."""
    assert_all_versions_read(root, known)
    assert_no_live_file_missing(root)
    numbers = [row["version"] for row in lance.dataset(str(root)).versions()]
    assert numbers == list(range(1, len(numbers) + 1))
    for number in numbers[len(known) :]:
        assert rows(lance.dataset(str(root), version=number)) == before, number
