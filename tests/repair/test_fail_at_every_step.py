"""Whatever storage call of a repair fails, the table is at its pin or mended, and a rerun mends it."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from lakewarden.errors import ErrorKind
from lakewarden.maintenance.repair import RepairReceipt
from lakewarden.storage.opening import Opener
from lakewarden.warehouse.lance import Namespace
from tests.repair.mending import Mender, append, compact, ids_at, row_of
from tests.warehouse.cleaning import Lake
from tests.warehouse.lakes import Failure, Opening, dataset, every_step, lance_ids, reopen

pytestmark = [pytest.mark.spark, pytest.mark.nightly]

NIGHTLY = settings.get_current_profile_name() == "nightly"
#: Every so many faults are followed by a rerun, which costs most.
RERUNS = 1 if NIGHTLY else 6


@pytest.mark.parametrize("asked", [{"force": True}, {"to_pin": True}], ids=["publish", "to pin"])
def test_a_repair_may_fail_anywhere_and_a_rerun_finishes_it(
    lake: Lake, mender: Mender, tmp_path: Path, asked: dict[str, Any]
) -> None:
    """After each fault everybody reads what was committed before, or all of the repair."""
    place = lake.place("t")
    append(place, 66)
    compact(lake.place("other"))
    (lake.root / "__manifest/_transactions/broken.json").write_text("nonsense")
    written = {number: ids_at(place, number) for number in range(1, 5)}
    plan = mender.plan(confirm=True, **asked)
    master = tmp_path / "master"
    shutil.copytree(lake.root, master)
    number = mender.newest()
    mended = [1, 2, 3, 66] if "force" in asked else [1, 2, 3]
    receipts: list[RepairReceipt] = []
    checked, table = count(), lake.table("t")

    def prepare() -> Opening:
        receipts.clear()
        shutil.rmtree(lake.root)
        shutil.copytree(master, lake.root)
        return Opener({})

    def moved() -> bool:
        """Tell whether the log says that db.t was mended: each table is, or is not."""
        now = reopen(lake.root)
        newest = next(now.history(1)).transaction
        return now.known.version > number and any(one.table == table.id for one in newest.changes)

    def check(_: Opening, raised: Failure | None, where: str) -> None:
        seen = sorted(dataset(Namespace(reopen(lake.root))).to_table()["id"].to_pylist())
        assert seen == (mended if moved() else [1, 2, 3]), (where, raised)
        if receipts and row_of(receipts[0]).error_kind is not ErrorKind.COMMIT_UNKNOWN:
            assert (row_of(receipts[0]).action.value != "refused") == moved(), where
        # The stray is where it was or put aside, and never lost.
        assert list((lake.root / "__manifest").rglob("broken.json")), where
        if next(checked) % RERUNS:
            return
        again = mender.run(**asked)
        assert {row.action.value for row in again.rows} <= {"healed", "forced", "no_op"}, where
        assert lance_ids(reopen(lake.root)) == mended, where
        assert lance_ids(reopen(lake.root), ("db", "other")) == [1, 2, 3], where
        assert {number: ids_at(place, number) for number in written} == written, where
        aside = lake.root / "__manifest/_quarantine/_transactions/broken.json"
        assert aside.read_text() == "nonsense", where
        assert not (lake.root / "__manifest/_transactions/broken.json").exists(), where

    calls = every_step(
        tmp_path / "counter",
        prepare,
        lambda opener: receipts.append(mender.execute(plan, opener)),
        check,
    )
    assert calls > 5
