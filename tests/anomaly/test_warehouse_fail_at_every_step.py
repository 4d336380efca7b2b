"""Whatever storage call of a warehouse's cleanup fails, nothing is lost, and a rerun finishes it.

The n-th call fails, whatever it is, once before and once after its effect, and what must stay is read
after each.  A rerun costs most, so the default makes one for every few faults; the profile `nightly`
makes one after each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from pyspark.sql import SparkSession

from lakewarden.errors import LakewardenError
from lakewarden.maintenance import warehouse as maintenance
from lakewarden.maintenance.removal import Receipt
from lakewarden.storage.opening import Opener
from lakewarden.testing.faults import FaultyOpener, When
from tests.warehouse.cleaning import Cleaner, Lab, Lake, before, floor_here, laboratory, new_lake
from tests.warehouse.lakes import id_rows, reopen
from tests.warehouse.survivors import everything

pytestmark = pytest.mark.spark

NIGHTLY = settings.get_current_profile_name() == "nightly"
#: Every so many faults are followed by a rerun.
RERUNS = 1 if NIGHTLY else 16
STEP = 1 if NIGHTLY else 4


def build(lake: Lake) -> int:
    """Make a warehouse with something of every kind to remove; return the first version to stay."""
    warehouse = lake.warehouse
    warehouse.set_properties({"lakewarden.undrop-for": "0s"})
    for name in ("l", "l_dropped"):
        lake.lance("create", name, 1, 2)
        lake.at(name).delete("id = 1")
    for name in ("i", "i_dropped"):
        lake.create(name, 1, 2).delete("id = 1")
    warehouse.create_tag("old")
    warehouse.create_branch("dev")
    lake.iceberg("i", "dev").append(id_rows(7))
    for number in (3, 4):
        lake.lance("overwrite", "l", number)
        lake.iceberg("i").overwrite(id_rows(number))
    # Nobody has these but main, which lets them go.
    lake.lance("create", "l_purged", 1)
    lake.create("i_purged", 1)
    for name in ("l_dropped", "i_dropped", "l_purged", "i_purged"):
        warehouse.drop(("db", name))
    floor = floor_here(warehouse)
    lake.lance("append", "l", 5)
    lake.iceberg("i").append(id_rows(5))
    return floor


@dataclass
class Faults:
    """A laboratory whose store fails, and what an undisturbed run makes of the warehouse."""

    lab: Lab
    counter: Path
    calls: int = 0
    ended: set[str] = field(default_factory=set)

    def reset(self) -> None:
        self.lab.reset()
        self.counter.unlink(missing_ok=True)

    def execute(self, opener: Callable[..., Any]) -> Receipt:
        found = reopen(self.lab.lake.root, opener=opener)
        plan = replace(self.lab.plan, warehouse=found)
        return maintenance.execute(plan, self.lab.cleaner.reading(opener))

    def faulty(self, number: int, when: When) -> FaultyOpener:
        return FaultyOpener(Opener({}), number, when, str(self.counter))

    def rerun(self) -> None:
        """Finish what was begun: purged tables are forgotten by a run of their own."""
        self.lab.cleaner.run(self.lab.lake.again(), before(self.lab.floor))
        self.lab.expected.check(self.lab.lake.again())
        # What a run that failed had written and not committed is too young to be told from a writer's.
        assert self.kept() >= self.ended
        assert {one for one in self.kept() - self.ended if not self.is_young(one)} == set()

    def is_young(self, name: str) -> bool:
        return "/metadata/" in name and "lakewarden" in name

    def kept(self) -> set[str]:
        """Return what is there of the tables, but for metadata files and refs: the rest must agree."""
        found = everything(self.lab.lake.root / "tables")
        skipped = (".metadata.json", "latest_version_hint.json", "warehouse.json")
        return {path for path in found if not path.endswith(skipped)}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Faults:
    root = tmp_path_factory.mktemp("faults")
    lake = new_lake(root / "lake")
    floor = build(lake)
    made = laboratory(lake, root / "master", Cleaner(spark), floor)
    found = Faults(made, root / "counter")
    counting = found.faulty(0, "before")
    assert found.execute(counting).failed == []
    made.expected.check(lake.again())
    found.calls, found.ended = counting.plan.calls(), found.kept()
    return found


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.nightly), "after"])
def test_nothing_is_lost_whatever_call_fails(faults: Faults, when: When) -> None:
    assert faults.calls > 20
    # By default one call of four; the nightly profile fails each.
    for number in range(1 + (when == "after") * (STEP // 2), faults.calls + 1, STEP):
        faults.reset()
        faulty = faults.faulty(number, when)
        trouble: object = "nothing was raised"
        try:
            trouble = [one.error for one in faults.execute(faulty).failed]
        except LakewardenError as error:
            trouble = error
        try:
            faults.lab.expected.check(faults.lab.lake.again(), finished=False)
            if number % RERUNS < STEP:
                faults.rerun()
        except Exception as error:
            error.add_note(f"call {number}, {when}: {trouble}")
            raise
