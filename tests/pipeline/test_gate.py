"""Deletions behind a gate: asked before every batch, believed for a while only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import lakewarden
from lakewarden.errors import ErrorKind, Interrupted
from lakewarden.maintenance import fleet, removal
from lakewarden.maintenance.deleting import Passage
from lakewarden.maintenance.survey import Reading
from lakewarden.storage.opening import Opener
from lakewarden.testing import iceberg, iceberg_oracle, invariants, tables
from lakewarden.world import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@dataclass
class Leases:
    """Lets everything pass, for so many seconds each time."""

    seconds: float
    batch_files: int | None = None
    #: Closes after so many questions.
    most: int = 10_000
    asked: int = 0
    told: dict[str, int] = field(default_factory=dict)
    #: It stays open for these.
    always: Collection[str] = ()

    def passing(self, found: Collection[str]) -> Passage:
        self.asked += 1
        until = SystemClock().now() + timedelta(seconds=self.seconds)
        open_for = found if self.asked <= self.most else self.always
        return Passage([one for one in found if one in open_for], until)

    def gone(self, files: Mapping[str, int]) -> None:
        for key, number in files.items():
            self.told[key] = self.told.get(key, 0) + number


def reading(spark: SparkSession) -> Reading:
    return Reading(spark, Opener({}), SystemClock(), 2)


def with_orphans(place: Path, number: int) -> list[Path]:
    tables.age(tables.overwritten(place, 3), 30)
    return [tables.orphan(place, f"data/left-{step}.lance") for step in range(number)]


def test_what_is_late_is_left_and_tried_again(spark: SparkSession, tmp_path: Path) -> None:
    place = tmp_path / "t.lance"
    left = with_orphans(place, 60)
    plan = lakewarden.plan_orphans(spark, str(place))
    # Six seconds' worth of files, and answers that hold for three.
    gate = Leases(3.0)
    receipt = removal.execute(plan, reading(spark), rate_limit=10, gate=gate)
    assert gate.asked > 2
    assert not any(path.exists() for path in left)
    assert receipt.removed.files_removed == 60
    # What was gone before the time was over is told of once.
    assert gate.told == {one.table_key: 60 for one in receipt.tables}
    assert [(one.error, one.failed_deletes) for one in receipt.tables] == [(None, 0)]
    invariants.assert_nothing_deletable_left(place)
    assert len(set(invariants.versions(place))) == 3


def test_nothing_goes_after_the_time_is_over(spark: SparkSession, tmp_path: Path) -> None:
    place = tmp_path / "t.lance"
    with_orphans(place, 5)
    before = invariants.files(place)
    plan = lakewarden.plan_cleanup(spark, str(place), keep=1)
    with pytest.raises(Interrupted, match="max-seconds-since-last-heartbeat") as refused:
        removal.execute(plan, reading(spark), gate=Leases(-1.0))
    assert refused.value.kind is ErrorKind.STOPPED
    assert invariants.files(place) == before


def test_batches_are_small_and_counted(spark: SparkSession, tmp_path: Path) -> None:
    places = [tmp_path / "lake" / f"t{number}.lance" for number in range(3)]
    for place in places:
        tables.age(tables.overwritten(place, 12), 30)
        with_orphan = tables.orphan(place, "data/left.lance")
        assert with_orphan.exists()
    plan = lakewarden.plan_cleanup(
        spark, str(tmp_path / "lake"), recursive=True, keep=2, min_age="0s"
    )
    gate = Leases(60.0, batch_files=8)
    receipt = removal.execute(plan, reading(spark), gate=gate)
    # First for all, then for each batch: parts are of about that size.
    assert gate.asked >= 1 + receipt.removed.files_removed // 8
    assert gate.told == {one.table_key: one.removed.files_removed for one in receipt.tables}
    for place in places:
        assert {number for _, number in invariants.versions(place)} == {11, 12}
        invariants.assert_no_live_file_missing(place)
        invariants.assert_nothing_deletable_left(place)


@pytest.mark.parametrize(
    "questions", [1, 3, *(pytest.param(one, marks=pytest.mark.nightly) for one in (2, 5, 8))]
)
def test_gate_that_closes_at_any_question_loses_nothing(
    spark: SparkSession, tmp_path: Path, questions: int
) -> None:
    place = tmp_path / "t.lance"
    tables.age(tables.overwritten(place, 10), 30)
    prints = invariants.fingerprints(place)
    plan = lakewarden.plan_cleanup(spark, str(place), keep=3, min_age="0s")
    receipt = removal.execute(
        plan, reading(spark), gate=Leases(60.0, batch_files=4, most=questions)
    )
    (table,) = receipt.tables
    assert table.error_kind == ErrorKind.STOPPED.value
    kept = {one: prints[one] for one in prints if one[1] > 7}
    invariants.assert_all_versions_read(place, kept)
    again = lakewarden.plan_cleanup(spark, str(place), keep=3, min_age="0s")
    removal.execute(again, reading(spark))
    assert set(invariants.versions(place)) == kept.keys()
    invariants.assert_nothing_deletable_left(place)


@pytest.mark.parametrize("questions", [0, 1])
def test_files_that_a_clone_needs_stay_with_the_versions_it_keeps(
    spark: SparkSession, tmp_path: Path, questions: int
) -> None:
    """The gate is closed for the clone alone: at once, or when files are to go."""
    source = tables.overwritten(tmp_path / "lake" / "a.lance", 4)
    clone = tables.clone(source, tmp_path / "lake" / "b.lance", 2)
    tables.overwrite(clone, 500)
    tables.overwrite(clone, 600)
    for place in (source, clone):
        tables.age(place, 30)
    prints = invariants.fingerprints(clone)
    plan = lakewarden.plan_cleanup(
        spark, str(tmp_path / "lake"), recursive=True, keep=1, min_age="0s"
    )
    (named,) = (one.table_key for one in plan.tables if one.table_key.endswith("a.lance"))
    removal.execute(plan, reading(spark), gate=Leases(60.0, most=questions, always=[named]))
    invariants.assert_all_versions_read(clone, prints)
    # What the clone lets go, the source may let go the next time.
    again = lakewarden.plan_cleanup(
        spark, str(tmp_path / "lake"), recursive=True, keep=1, min_age="0s"
    )
    assert not removal.execute(again, reading(spark)).failed
    assert [number for _, number in invariants.versions(source)] == [4]
    invariants.assert_nothing_deletable_left(source)


def test_closed_gate_lets_no_commit_pass(spark: SparkSession, tmp_path: Path) -> None:
    catalog = iceberg.catalog(tmp_path)
    goes, stays = (iceberg.create(catalog, name) for name in ("db.goes", "db.stays"))
    for table in (goes, stays):
        iceberg.grow(table, 4)
        iceberg.backdate(table, 30)
    before, files = stays.metadata_location, iceberg_oracle.on_disk(stays.location())
    prints = iceberg_oracle.fingerprints(stays)
    plan = lakewarden.plan_cleanup(
        spark, "iceberg://lake/db", keep=1, older_than="1d", catalog={"lake": catalog}
    )
    lake = fleet.open_lake({}, {"lake": catalog})
    where = Reading(spark, Opener({}), SystemClock(), 2, lake=lake)
    stopped = ErrorKind.STOPPED.value
    gates: list[tuple[Leases, str | None]] = [
        # Closed at once; open, with answers that are over; open at first, then for the other only.
        (Leases(60.0, most=0), stopped),
        (Leases(-1.0), stopped),
        (Leases(60.0, most=1, always=["iceberg://lake/db.goes"]), None),
    ]
    for gate, other in gates:
        receipt = removal.execute(plan, where, gate=gate)
        stays.refresh()
        assert stays.metadata_location == before
        assert iceberg_oracle.on_disk(stays.location()) == files
        kinds = {one.table_key: one.error_kind for one in receipt.tables}
        assert kinds == {"iceberg://lake/db.stays": stopped, "iceberg://lake/db.goes": other}
    assert len(stays.metadata.snapshots) == 4
    iceberg_oracle.assert_intact(stays, prints)
    goes.refresh()
    assert len(goes.metadata.snapshots) == 1
    iceberg_oracle.assert_intact(goes)
