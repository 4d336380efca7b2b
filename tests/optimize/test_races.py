"""Others beside optimize: a writer without pause, other optimizes, and power cuts.

What every version must hold is known from the writer's log alone.
"""

from __future__ import annotations

import json
import random  # noqa: TID251  # the seed is shown when a test fails
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import pytest
from hypothesis import settings

from lakewarden.errors import ErrorKind
from lakewarden.maintenance.optimize import Receipt
from lakewarden.testing import tables
from lakewarden.testing.changing import Changed, changer
from lakewarden.testing.processes import copy_tree, started
from lakewarden.warehouse.manifest import Operation
from lakewarden.warehouse.warehouse import Warehouse
from tests.optimize.tuning import (
    Lake,
    Tuner,
    add,
    alone,
    everything,
    in_pieces,
    rows,
    together,
    unindexed,
)

pytestmark = [pytest.mark.slow, pytest.mark.spark]

NIGHTLY = settings.get_current_profile_name() == "nightly"
ROUNDS = 12 if NIGHTLY else 3
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
    check_history(path, changes)
    check_answers(found)
    (row,) = tuner.run(place()).rows
    assert not row.committed
    assert lance.dataset(str(path)).version == found.version


@pytest.mark.parametrize(
    "stable", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["addresses", "stable ids"]
)
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
