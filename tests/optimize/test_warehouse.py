"""Tables of a warehouse: one version for all that changed, none if nothing did, and no drift."""

from __future__ import annotations

from pathlib import Path

import lance
import pytest

from lakewarden.errors import Exit
from lakewarden.maintenance import places
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.warehouse import Warehouse
from tests.optimize.tuning import (
    Interrupted,
    Lake,
    Tuner,
    everything,
    rows,
    some,
    unindexed,
    uses_index,
)

pytestmark = pytest.mark.spark


def test_all_tables_become_one_version_of_the_system(tuner: Tuner, lake: Lake) -> None:
    for name in ("a", "b", "c"):
        lake.fill(name, 1 if name == "c" else 5)
    lake.open("a").create_scalar_index("id", "BTREE")
    lake.write("a", 500)
    before = {name: rows(lake.open(name)) for name in "abc"}
    version = lake.version
    receipt = tuner.run(lake.place())
    assert receipt.version == version + 1 == lake.version
    (logged,) = lake.warehouse.history(1)
    assert logged.transaction.actor == places.ACTOR
    assert len(logged.transaction.changes) == 2
    assert {row.table_key: row.committed for row in receipt.rows} == {
        "db.a": True,
        "db.b": True,
        "db.c": False,
    }
    for name in "abc":
        found = lake.open(name)
        assert rows(found) == before[name]
        assert len(found.get_fragments()) == 1
        # Who opens the table by its path sees the same.
        assert lance.dataset(str(lake.path(name))).version == found.version
    assert unindexed(lake.open("a"), "id_idx") == 0
    assert uses_index(lake.open("a"), "id = 550")


def test_nothing_to_do_makes_no_version(tuner: Tuner, lake: Lake) -> None:
    lake.fill("t")
    tuner.run(lake.place())
    version, there = lake.version, everything(lake.root)
    receipt = tuner.run(lake.place())
    assert receipt.version is None
    assert lake.version == version
    assert everything(lake.root) == there


def test_writers_and_restores_go_on_afterwards(tuner: Tuner, lake: Lake) -> None:
    lake.fill("t")
    version = lake.version
    tuner.run(lake.place())
    lake.write("t", 600)
    lake.open("t").delete("id = 3")
    assert lake.open("t").count_rows() == 699
    warehouse = Warehouse.open(str(lake.root))
    warehouse.restore(warehouse.read(version=version))
    assert lake.open("t").count_rows() == 600


def test_drift_is_skipped_and_the_others_are_done(tuner: Tuner, lake: Lake) -> None:
    lake.fill("t")
    lake.fill("drifted")
    path = str(lake.path("drifted"))
    lance.write_dataset(some(900), path, mode="append")
    there = everything(lake.path("drifted"))
    receipt = tuner.run(lake.place())
    drifted, fine = receipt.rows
    assert (drifted.skipped, drifted.manifest_version, drifted.lance_head_version) == (
        "drift_needs_repair",
        6,
        7,
    )
    assert fine.committed
    assert everything(lake.path("drifted")) == there


def test_a_head_before_the_pin_is_an_error_of_that_table(tuner: Tuner, lake: Lake) -> None:
    lake.fill("t")
    lake.fill("lost")
    newest = min((lake.path("lost") / "_versions").glob("*.manifest"))
    newest.unlink()
    receipt = tuner.run(lake.place())
    lost, fine = receipt.rows
    assert lost.error is not None
    assert fine.committed
    assert receipt.exit_code is Exit.PARTIAL


def test_a_table_that_changed_before_the_publish_is_tried_again(tuner: Tuner, lake: Lake) -> None:
    for name in ("busy", "calm"):
        lake.fill(name)
        lake.open(name).create_scalar_index("id", "BTREE")
        lake.write(name, 600)
    visits = []

    def write_once() -> None:
        visits.append(True)
        if len(visits) == 1:
            lake.write("busy", 7000)

    receipt = tuner.run(Interrupted(lake.warehouse, act=write_once))
    assert receipt.failed == []
    assert len(visits) > 1
    for name, number in (("busy", 800), ("calm", 700)):
        found = lake.open(name)
        assert found.count_rows() == number
        assert unindexed(found, "id_idx") == 0
    assert len(lake.open("calm").get_fragments()) == 1
    assert len(lake.open("busy").get_fragments()) <= 2
    messages = [logged.transaction.message for logged in lake.warehouse.history(4)]
    assert messages[0] == "optimize"


def test_a_table_that_is_dropped_meanwhile_holds_nobody_up(tuner: Tuner, lake: Lake) -> None:
    lake.fill("gone")
    lake.fill("there")
    planned = tuner.plan(lake.place())
    Warehouse.open(str(lake.root)).drop(("db", "gone"))
    gone, there = tuner.execute(planned).rows
    assert gone.error is not None
    assert there.committed
    assert len(lake.open("there").get_fragments()) == 1


def test_on_a_branch_only_what_is_its_own(tuner: Tuner, lake: Lake) -> None:
    lake.fill("own")
    lake.fill("shared")
    lake.warehouse.create_branch("dev")

    on_dev = Namespace(Warehouse.open(str(lake.root)), branch="dev")
    for start in (700, 800):
        lance.write_dataset(
            some(start), namespace_client=on_dev, table_id=["db", "own"], mode="append"
        )
    on_main = rows(lake.open("own"))
    receipt = tuner.run(lake.place(branch="dev"))
    own, shared = receipt.rows
    assert own.committed
    assert shared.skipped == "inherited"
    found = lance.dataset(namespace_client=on_dev, table_id=["db", "own"])
    assert found.count_rows() == 800
    assert len(found.get_fragments()) == 1
    assert rows(lake.open("own")) == on_main
    assert len(lake.open("own").get_fragments()) == 6


def test_a_crash_before_the_publish_changes_nothing(
    tuner: Tuner, lake: Lake, tmp_path: Path
) -> None:
    lake.fill("t")
    version = lake.version

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuner.run(Interrupted(lake.warehouse, act=stop))
    assert lake.version == version
    assert lake.open("t").count_rows() == 600
    assert len(lake.open("t").get_fragments()) == 6
    tuner.run(lake.place())
    assert len(lake.open("t").get_fragments()) == 1
