"""Whatever goes wrong while a warehouse is optimized, nothing is lost, and a rerun finishes it.

The n-th storage call of ours fails, once before and once after its effect.  Lance's own reading and
writing cannot be failed this way, nor what workers do: files that are missing or damaged stand for
that.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pytest
from hypothesis import settings
from pyspark.sql import SparkSession

from lakewarden.errors import Exit, LakewardenError
from lakewarden.maintenance.places import Together
from lakewarden.storage.opening import Opener
from lakewarden.testing.faults import FaultyOpener, When
from lakewarden.testing.invariants import assert_all_versions_read, fingerprints
from lakewarden.warehouse.warehouse import Warehouse
from tests.optimize.tuning import Lake, Tuner, add, alone, in_pieces, rows, unindexed

pytestmark = [pytest.mark.spark, pytest.mark.nightly]

NIGHTLY = settings.get_current_profile_name() == "nightly"
NAMES = ("a", "b")


@dataclass
class Faults:
    """A warehouse of two tables that is made again and again, and whose store fails."""

    lake: Lake
    tuner: Tuner
    master: Path
    counter: Path
    calls: int = 0
    before: dict[str, Counter[Any]] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        shutil.rmtree(self.lake.root)
        shutil.copytree(self.master, self.lake.root)
        self.counter.unlink(missing_ok=True)

    def run(self, number: int, when: When) -> list[str | None]:
        opener = FaultyOpener(Opener({}), number, when, str(self.counter))
        found = Warehouse.open(str(self.lake.root), opener=opener)
        receipt = self.tuner.run(Together(found))
        self.calls = opener.plan.calls()
        return [row.error for row in receipt.rows]

    def check(self) -> None:
        """Rows and old versions are what they were, for whoever comes by path or by name."""
        for name in NAMES:
            found = self.lake.open(name)
            assert rows(found) == self.before[name]
            assert_all_versions_read(self.lake.path(name), self.versions[name])
            check_answers(found)
            assert lance.dataset(str(self.lake.path(name))).version == found.version

    def rerun(self) -> None:
        receipt = self.tuner.run(self.lake.place())
        assert receipt.failed == []
        self.check()
        for name in NAMES:
            assert len(self.lake.open(name).get_fragments()) == 1
            assert unindexed(self.lake.open(name), "id_idx") == 0


def check_answers(found: Any) -> None:
    ids = set(found.to_table(columns=["id"]).column("id").to_pylist())
    for wanted in range(0, 400, 7):
        answer = found.to_table(filter=f"id = {wanted}", columns=["id"]).column("id").to_pylist()
        assert answer == ([wanted] if wanted in ids else []), wanted


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Faults:
    root = tmp_path_factory.mktemp("faults")
    lake = Lake(root / "lake")
    made = Faults(lake, Tuner(spark), root / "master", root / "counter")
    for name in NAMES:
        lake.fill(name, 2)
        lake.open(name).create_scalar_index("id", "BTREE")
        lake.write(name, 200)
        lake.open(name).delete("id % 5 = 2")
        made.before[name] = rows(lake.open(name))
        made.versions[name] = fingerprints(lake.path(name))
    shutil.copytree(lake.root, made.master)
    assert made.run(0, "before") == [None, None]
    made.check()
    return made


@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_is_lost_whatever_call_fails(faults: Faults, when: When) -> None:
    calls = faults.calls
    assert calls > 20
    # By default a few, others each time the number of calls changes; the nightly profile fails each.
    step = 1 if NIGHTLY else max(1, calls // 2)
    for number in range(1 + (when == "after") * (step // 2), calls + 1, step):
        faults.reset()
        trouble: object
        try:
            trouble = faults.run(number, when)
        except LakewardenError as error:
            trouble = error
        try:
            faults.check()
            if NIGHTLY or number % 2:
                faults.rerun()
        except Exception as error:
            error.add_note(f"call {number}, {when}: {trouble}")
            raise
    faults.calls = calls


# -- workers in trouble ----------------------------------------------------------------------------


def test_an_index_that_cannot_be_read_is_that_tables_trouble(tuner: Tuner, lake: Lake) -> None:
    for name in NAMES:
        lake.fill(name, 3)
        lake.open(name).create_scalar_index("id", "BTREE")
        lake.write(name, 300)
    before = rows(lake.open("a"))
    for file in (lake.path("a") / "_indices").rglob("*.lance"):
        file.write_bytes(b"damaged")
    receipt = tuner.run(lake.place())
    damaged, fine = receipt.rows
    assert damaged.error is not None
    assert "id_idx" in damaged.error
    assert fine.error is None
    assert receipt.exit_code is Exit.PARTIAL
    assert rows(lake.open("a")) == before
    assert len(lake.open("b").get_fragments()) == 1
    assert unindexed(lake.open("b"), "id_idx") == 0


def test_a_file_of_a_warehouse_that_is_missing_is_that_tables_trouble(
    tuner: Tuner, lake: Lake
) -> None:
    for name in NAMES:
        lake.fill(name, 3)
    version, head = lake.version, lake.open("a").version
    next((lake.path("a") / "data").iterdir()).unlink()
    receipt = tuner.run(lake.place())
    damaged, fine = receipt.rows
    assert damaged.error is not None
    assert not damaged.committed
    assert fine.committed
    assert lake.version == version + 1
    assert lake.open("a").version == head


def test_a_version_that_is_gone_when_workers_come_is_that_tables_trouble(
    tuner: Tuner, tmp_path: Path
) -> None:
    gone, fine = in_pieces(tmp_path / "gone.lance", 3), in_pieces(tmp_path / "fine.lance", 3)
    planned = tuner.plan(alone(gone, fine))
    shutil.rmtree(gone)
    receipt = tuner.execute(planned)
    lost, done = receipt.rows
    assert lost.error is not None
    assert done.committed
    assert not gone.exists()


def test_a_table_made_anew_under_the_plan_keeps_its_own_rows(tuner: Tuner, tmp_path: Path) -> None:
    """Numbers of versions and fragments are the same again; files are not."""
    table = in_pieces(tmp_path / "t.lance", 3)
    planned = tuner.plan(alone(table))
    job = planned.jobs[0]
    results = [job.errand(piece).run() for piece in job.pieces]
    shutil.rmtree(table)
    in_pieces(table, 3, start=50)
    expected = rows(lance.dataset(str(table)))
    with planned.place.visiting() as visit:
        done = job.commit(visit.opened(job), results)
    assert list(done.lost) == results
    assert rows(lance.dataset(str(table))) == expected
    add(table, 9000)
    assert lance.dataset(str(table)).count_rows() == 400
