"""Ways in which expiry or the removal of orphans could take something that an Iceberg table needs."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import MANIFEST_LIST_FILE_SCHEMAS
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.snapshots import Operation
from pyspark.sql import SparkSession

import lakewarden
from lakewarden.maintenance.plan import Plan
from lakewarden.maintenance.removal import Receipt, TableReceipt
from lakewarden.testing import iceberg as kit
from lakewarden.testing import iceberg_oracle as oracle
from lakewarden.testing.iceberg import LakeCatalog

pytestmark = pytest.mark.spark

T = "iceberg://lake/db.t"
U = "iceberg://lake/db.u"


class Lab:
    """A catalog, and operations on it."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark = spark
        self.root = root
        self.catalog: LakeCatalog = kit.catalog(root)

    def use(self, kind: type[LakeCatalog]) -> None:
        """Go on with another implementation of the same catalog."""
        settings = kit.catalog_properties(self.root)
        settings.pop("type")
        self.catalog.close()
        self.catalog = kind("lake", **settings)

    def table(self, name: str = "db.t", steps: int = 5, **shape: Any) -> Table:
        """Make a table of which all but the newest snapshot hold files of their own."""
        table = kit.create(self.catalog, name, **shape)
        kit.append(table, 0)
        for step in range(1, steps):
            kit.overwrite(table, 10 * step)
        kit.backdate(table, 30)
        return table

    @property
    def catalogs(self) -> dict[str, Catalog]:
        return {"lake": self.catalog}

    def plan(self, *targets: str, **rules: Any) -> Plan:
        given = {"older_than": "0s", "keep": 1, **rules}
        return lakewarden.plan_cleanup(
            self.spark, targets or (T,), catalog=self.catalogs, tasks=2, **given
        )

    def orphans(self, *targets: str, **rules: Any) -> Plan:
        return lakewarden.plan_orphans(
            self.spark, targets or (T,), catalog=self.catalogs, tasks=2, **rules
        )

    def execute(self, plan: Plan) -> Receipt:
        return lakewarden.execute(self.spark, plan, catalog=self.catalogs, tasks=2)

    def clean(self, *targets: str, **rules: Any) -> TableReceipt:
        return self.execute(self.plan(*targets, **rules)).tables[0]

    def sweep(self, *targets: str, **rules: Any) -> TableReceipt:
        return self.execute(self.orphans(*targets, **rules)).tables[0]


@pytest.fixture
def lab(spark: SparkSession, tmp_path: Path) -> Iterator[Lab]:
    made = Lab(spark, tmp_path)
    yield made
    made.catalog.close()


def metadata_of(table: Table) -> dict[str, Any]:
    return kit.read_metadata(table, table.metadata_location)


def rewrite(table: Table, change: Callable[[dict[str, Any]], object]) -> None:
    """Commit a change of the metadata that PyIceberg would not make."""
    metadata = metadata_of(table)
    change(metadata)
    kit._point(table, metadata, table.metadata_location)


def record(table: Table, text: str, name: str = "left.json") -> Path:
    """Leave a record as a crashed expiry does."""
    place = kit.local(table.metadata_location).parent / "_lakewarden" / name
    place.parent.mkdir(exist_ok=True)
    place.write_text(text)
    return place


def records(table: Table) -> list[Path]:
    return sorted(kit.local(table.metadata_location).parent.glob("_lakewarden/*"))


# -- what changes between a plan and its execution -------------------------------------------------


def test_branch_that_went_on_after_the_plan_keeps_its_ref(lab: Lab) -> None:
    table = lab.table()
    kit.branch(table, "side", max_ref_age_ms=1000)
    kit.backdate(table, 30)
    plan = lab.plan()
    assert plan.tables[0].expired_refs == ("side",)
    made = kit.append(table, 900, branch="side")
    receipt = lab.execute(plan).tables[0]
    table.refresh()
    assert "side" in table.refs(), "a branch that somebody has just written to is gone"
    assert table.refs()["side"].snapshot_id == made
    assert receipt.outdated
    oracle.assert_intact(table)


@pytest.mark.nightly
def test_tag_that_was_moved_after_the_plan_stays(lab: Lab) -> None:
    table = lab.table()
    kit.tag(table, "release", max_ref_age_ms=1000)
    kit.backdate(table, 30)
    plan = lab.plan()
    assert plan.tables[0].expired_refs == ("release",)
    new = kit.append(table, 900)
    kit.unref(table, "release")
    kit.tag(table, "release", new)
    lab.execute(plan)
    table.refresh()
    assert table.refs()["release"].snapshot_id == new


@pytest.mark.nightly
def test_ref_whose_limit_was_lifted_after_the_plan_stays(lab: Lab) -> None:
    table = lab.table()
    kit.tag(table, "release", kit.ids(table)[-1], max_ref_age_ms=1000)
    kit.backdate(table, 30)
    plan = lab.plan()
    assert plan.tables[0].expired_refs == ("release",)
    rewrite(table, lambda raw: raw["refs"]["release"].pop("max-ref-age-ms"))
    lab.execute(plan)
    table.refresh()
    assert "release" in table.refs()


def test_tag_on_a_going_snapshot_holds_the_plan(lab: Lab) -> None:
    table = lab.table()
    before = oracle.fingerprints(table)
    plan = lab.plan()
    kit.tag(table, "release", kit.ids(table)[2])
    assert lab.execute(plan).tables[0].outdated
    oracle.assert_intact(table, before)


@pytest.mark.nightly
def test_rollback_to_a_going_snapshot_holds_the_plan(lab: Lab) -> None:
    table = lab.table()
    before = oracle.fingerprints(table)
    plan = lab.plan()
    kit.rollback(table, kit.ids(table)[3])
    assert lab.execute(plan).tables[0].outdated
    oracle.assert_intact(table, before)


def cherry_pick(table: Table, staged: int) -> int:
    """Publish a staged append as Java does: its files are added once more, in a new manifest."""
    snapshot = table.metadata.snapshot_by_id(staged)
    assert snapshot is not None
    entries = [
        entry["data_file"]
        for manifest in kit._read_avro(table, snapshot.manifest_list)
        if manifest["added_snapshot_id"] == staged
        for entry in kit._read_avro(table, manifest["manifest_path"])
    ]
    return kit.commit(table, kit.Manifest(entries))


@pytest.mark.nightly
def test_cherry_picked_file_stays_when_the_staged_snapshot_goes(lab: Lab) -> None:
    table = lab.table()
    staged = kit.stage(table, 700)
    picked = cherry_pick(table, staged)
    kit.backdate(table, 30)
    expected = oracle.fingerprint(table, picked)
    receipt = lab.clean()
    assert receipt.error is None
    oracle.assert_intact(table, {picked: expected})
    assert staged not in kit.ids(table)


@pytest.mark.nightly
def test_cherry_pick_after_the_plan_holds_it(lab: Lab) -> None:
    table = lab.table()
    staged = kit.stage(table, 700)
    kit.backdate(table, 30)
    plan = lab.plan()
    picked = cherry_pick(table, staged)
    expected = oracle.fingerprint(table, picked)
    lab.execute(plan)
    oracle.assert_intact(table, {picked: expected})


def test_cherry_pick_whose_snapshot_expired_after_the_plan_holds_it(lab: Lab) -> None:
    """The manifest was added by a snapshot that neither the plan nor the table knows."""
    table = lab.table()
    staged = kit.stage(table, 700)
    kit.backdate(table, 30)
    plan = lab.plan()
    picked = cherry_pick(table, staged)
    head = kit.append(table, 800)
    expected = oracle.fingerprint(table, head)
    table.maintenance.expire_snapshots().by_id(picked).commit()
    table.refresh()
    lab.execute(plan)
    oracle.assert_intact(table, {head: expected})


def expired_but_not_removed(lab: Lab) -> tuple[Table, int, dict[int, str], dict[str, Any]]:
    """Make a table as a crash after the commit leaves it; also returns what it was before."""
    table = lab.table()
    before, was = oracle.fingerprints(table), metadata_of(table)
    old, gone = table.metadata_location, kit.ids(table)[0]
    table.maintenance.expire_snapshots().by_id(gone).commit()
    table.refresh()
    record(table, json.dumps({"format": 1, "table": T, "metadata": old}))
    return table, gone, before, was


@pytest.mark.nightly
def test_snapshot_that_came_back_after_the_plan_holds_it(lab: Lab) -> None:
    """A crash left files of an expired snapshot; the snapshot is put back before they are removed."""
    table, gone, before, was = expired_but_not_removed(lab)
    plan = lab.plan(keep=100)
    assert plan.removal.files_removed > 0
    rewrite(table, lambda raw: raw.update(snapshots=was["snapshots"]))
    lab.execute(plan)
    oracle.assert_intact(table, before)
    assert gone in kit.ids(table)


def test_snapshot_that_came_back_before_the_plan_stays(lab: Lab) -> None:
    table, gone, before, was = expired_but_not_removed(lab)
    rewrite(table, lambda raw: raw.update(snapshots=was["snapshots"]))
    lab.clean(keep=100)
    oracle.assert_intact(table, before)
    assert gone in kit.ids(table)
    assert not records(table)


def test_what_a_crash_left_is_removed(lab: Lab) -> None:
    table, gone, before, _ = expired_but_not_removed(lab)
    assert lab.clean(keep=100).removed.files_removed > 0
    oracle.assert_intact(table, before)
    assert not oracle.unreferenced(table)
    assert not records(table)
    assert gone not in kit.ids(table)


@pytest.mark.nightly
def test_old_metadata_that_became_current_after_the_plan_is_no_orphan(lab: Lab) -> None:
    """A table is registered anew from a metadata file that its log no longer names."""
    table = lab.table(properties={"write.metadata.previous-versions-max": "1"})
    for number in range(3):
        with table.transaction() as change:
            change.set_properties({"step": str(number)})
    kit.age(lab.root / "warehouse", 30)
    named = {entry.metadata_file for entry in table.metadata.metadata_log}
    files = sorted(kit.local(table.location()).glob("metadata/*.metadata.json"))
    old = next(
        str(file)
        for file in reversed(files)
        if f"file://{file}" not in named | {table.metadata_location}
        and len(kit.read_metadata(table, str(file))["snapshots"]) == len(kit.ids(table))
    )
    plan = lab.orphans()
    assert plan.removal.files_removed > 0
    lab.catalog.drop_table("db.t")
    again = lab.catalog.register_table("db.t", f"file://{old}")
    lab.execute(plan)
    assert Path(old).exists(), "the current metadata file is gone"
    oracle.assert_intact(again)


def test_statistics_that_were_set_after_the_plan_are_no_orphans(lab: Lab) -> None:
    table = lab.table()
    path = kit.statistics(table)
    raw = kit.read_metadata(table, table.metadata_location)
    kit.backdate(table, 30)
    rewrite(table, lambda metadata: metadata.pop("statistics"))
    kit.age(lab.root / "warehouse", 30)
    plan = lab.orphans()
    assert plan.removal.files_removed == 1
    rewrite(table, lambda metadata: metadata.update(statistics=raw["statistics"]))
    lab.execute(plan)
    assert kit.local(path).exists()
    oracle.assert_intact(table)


def test_metadata_file_that_was_changed_in_place_is_not_trusted(lab: Lab) -> None:
    """Nobody should do that; a tag that appears this way must not be left without its snapshot."""
    table = lab.table()
    before = oracle.fingerprints(table)
    plan = lab.plan()
    metadata = metadata_of(table)
    metadata["refs"]["late"] = {"snapshot-id": kit.ids(table)[1], "type": "tag"}
    kit.write_metadata(table, table.metadata_location, metadata)
    lab.execute(plan)
    table.refresh()
    oracle.assert_intact(table, before)


@pytest.mark.nightly
def test_table_that_was_made_again_is_not_the_planned_one(lab: Lab) -> None:
    lab.table()
    plan = lab.plan()
    lab.catalog.drop_table("db.t")
    again = lab.table()
    before = oracle.fingerprints(again)
    assert lab.execute(plan).tables[0].outdated
    oracle.assert_intact(again, before)
    assert set(kit.ids(again)) == set(before)


@pytest.mark.nightly
def test_plan_for_another_catalog_of_the_same_name(lab: Lab, tmp_path: Path) -> None:
    lab.table()
    plan = lab.plan()
    other = Lab(lab.spark, tmp_path / "other")
    table = other.table()
    before = oracle.fingerprints(table)
    assert other.execute(plan).tables[0].outdated
    oracle.assert_intact(table, before)
    assert set(kit.ids(table)) == set(before)
    other.catalog.close()


def test_saved_plan_applied_twice(lab: Lab) -> None:
    table = lab.table()
    directory = str(lab.root / "plan")
    lakewarden.save_plan(lab.plan(), directory)
    first = lab.execute(lakewarden.load_plan(lab.spark, directory)).tables[0]
    assert first.error is None
    kit.append(table.refresh(), 500)
    before = oracle.fingerprints(table)
    second = lab.execute(lakewarden.load_plan(lab.spark, directory)).tables[0]
    assert second.outdated
    assert second.removed.files_removed == 0
    oracle.assert_intact(table, before)
    assert not records(table)


@pytest.mark.nightly
def test_saved_plan_of_orphans_applied_after_one_was_adopted(lab: Lab) -> None:
    table = lab.table()
    file = f"{table.location()}/data/adopted.parquet"
    kit._write(table, file, kit._parquet(kit.rows(300)))
    kit.orphan(table.location(), "data/left.parquet")
    kit.age(lab.root / "warehouse", 30)
    directory = str(lab.root / "plan")
    lakewarden.save_plan(lab.orphans(), directory)
    table.add_files([file])
    before = oracle.fingerprints(table)
    lab.execute(lakewarden.load_plan(lab.spark, directory))
    oracle.assert_intact(table, before)


# -- catalogs that fail ----------------------------------------------------------------------------


class LyingCatalog(LakeCatalog):
    """Commits, and says that it did not: what a client makes of an answer that it lost.

    It asks again, and the second time the pointer is not what it expects any more.
    """

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        super().commit_table(table, requirements, updates)
        raise CommitFailedException("the table has been changed by another process")


def test_commit_that_landed_although_the_catalog_says_it_failed(lab: Lab) -> None:
    table = lab.table()
    newest = kit.ids(table)[-1]
    before = oracle.fingerprints(table)
    lab.use(LyingCatalog)
    lab.clean()
    table = lab.catalog.load_table("db.t")
    oracle.assert_intact(table, {newest: before[newest]})


# -- tables that share -----------------------------------------------------------------------------


def test_files_of_a_table_with_the_same_data_path_are_no_orphans(lab: Lab) -> None:
    """Many tables are often sent to one place for data."""
    shared = {"write.data.path": f"file://{lab.root}/shared"}
    lab.table(properties=shared)
    other = lab.table("db.u", properties=shared)
    before = oracle.fingerprints(other)
    kit.age(lab.root, 30)
    lab.sweep()
    oracle.assert_intact(other, before)


def test_files_of_a_table_whose_data_path_is_inside_another_table_are_no_orphans(lab: Lab) -> None:
    table = lab.table()
    other = lab.table("db.u", properties={"write.data.path": f"{table.location()}/guest"})
    before = oracle.fingerprints(other)
    kit.age(lab.root, 30)
    lab.sweep()
    oracle.assert_intact(other, before)


def test_table_inside_the_data_path_of_another_is_not_touched(lab: Lab) -> None:
    lab.table(properties={"write.data.path": f"file://{lab.root}/data"})
    other = lab.table("db.u", location=f"file://{lab.root}/data/u")
    before = oracle.fingerprints(other)
    kit.age(lab.root, 30)
    lab.sweep()
    oracle.assert_intact(other, before)


@pytest.mark.nightly
def test_data_path_of_earlier_times_inside_another_table(lab: Lab) -> None:
    """The property is gone, the files are still where it sent them."""
    table = lab.table()
    other = lab.table("db.u", properties={"write.data.path": f"{table.location()}/guest"})
    with other.transaction() as change:
        change.remove_properties("write.data.path")
    before = oracle.fingerprints(other)
    kit.age(lab.root, 30)
    receipt = lab.sweep(T, protect=[U])
    oracle.assert_intact(other, before)
    assert receipt.error is None


def add_to_both(lab: Lab) -> tuple[Table, Table, dict[int, str]]:
    """Make two tables that name one data file, outside of both."""
    table, other = lab.table(steps=2), lab.table("db.u", steps=2)
    path = f"file://{lab.root}/landing/both.parquet"
    kit.add_outside(table, path, 600)
    other.add_files([path])
    kit.overwrite(table, 50)
    kit.backdate(table, 30)
    kit.backdate(other, 30)
    return table, other, oracle.fingerprints(other)


@pytest.mark.nightly
def test_file_of_two_tables_stays_if_both_are_cleaned(lab: Lab) -> None:
    _, other, before = add_to_both(lab)
    lab.clean(T, U)
    oracle.assert_intact(other, before)


def test_file_of_two_tables_stays_if_both_are_cleaned_and_nothing_of_one_goes(lab: Lab) -> None:
    table, other = lab.table(steps=2), kit.create(lab.catalog, "db.u")
    path = f"file://{lab.root}/landing/both.parquet"
    kit.add_outside(table, path, 600)
    other.add_files([path])
    kit.overwrite(table, 50)
    kit.backdate(table, 30)
    before = oracle.fingerprints(other)
    lab.clean("iceberg://lake/db")
    oracle.assert_intact(other, before)


def test_file_of_two_tables_stays_if_both_are_swept(lab: Lab) -> None:
    table, other = lab.table(steps=2), kit.create(lab.catalog, "db.u")
    path = f"{table.location()}/data/both.parquet"
    kit.add_outside(table, path, 600)
    other.add_files([path])
    kit.overwrite(table, 50)
    table.maintenance.expire_snapshots().by_ids(kit.ids(table)[:-1]).commit()
    kit.age(lab.root, 30)
    before = oracle.fingerprints(other)
    lab.sweep("iceberg://lake/db")
    oracle.assert_intact(other, before)


@pytest.mark.nightly
def test_file_of_two_tables_stays_if_the_other_is_protected(lab: Lab) -> None:
    _, other, before = add_to_both(lab)
    assert lab.clean(T, protect=[U]).error is None
    oracle.assert_intact(other, before)


def test_file_of_two_tables_stays_as_long_as_gc_is_off(lab: Lab) -> None:
    table, other, before = add_to_both(lab)
    with table.transaction() as change:
        change.set_properties({"gc.enabled": "false"})
    assert lab.clean(T).error_kind == "gc_disabled"
    oracle.assert_intact(other, before)


def share_manifest(lab: Lab, steps: int) -> tuple[Table, Table, int]:
    """Make a second table whose newest snapshot names a manifest of the first one's oldest."""
    table, other = lab.table(), lab.table("db.u", steps=steps)
    first = table.metadata.snapshots[0]
    manifest = kit._read_avro(table, first.manifest_list)[0]
    kit.append(other, 900)
    head = other.current_snapshot()
    assert head is not None
    listed = [*kit._read_avro(other, head.manifest_list), manifest]
    schema = (MANIFEST_LIST_FILE_SCHEMAS[2], "manifest_file")
    kit._write_avro(other, head.manifest_list, schema, {"snapshot-id": "1"}, listed)
    kit.backdate(other, 30)
    return table, other, head.snapshot_id


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [1, 4])
def test_manifest_of_two_tables_stays_if_both_are_cleaned(lab: Lab, steps: int) -> None:
    _, other, head = share_manifest(lab, steps)
    before = oracle.fingerprint(other, head)
    lab.clean(T, U)
    oracle.assert_intact(other, {head: before})


def test_manifest_of_two_tables_stays_if_nothing_of_one_goes(lab: Lab) -> None:
    _, other, head = share_manifest(lab, 1)
    other.maintenance.expire_snapshots().by_id(kit.ids(other)[0]).commit()
    other.refresh()
    before = oracle.fingerprint(other, head)
    lab.clean(T, U)
    oracle.assert_intact(other, {head: before})


# -- odd histories ---------------------------------------------------------------------------------


def test_manifest_list_of_two_snapshots_stays_with_the_second(lab: Lab) -> None:
    table = kit.create(lab.catalog, "db.t")
    kit.grow(table, 6)
    kit.backdate(table, 30)

    def reuse(metadata: dict[str, Any]) -> None:
        metadata["snapshots"][4]["manifest-list"] = metadata["snapshots"][0]["manifest-list"]

    rewrite(table, reuse)
    kept = kit.ids(table)[2:]
    before = oracle.fingerprints(table)
    receipt = lab.clean(keep=4)
    assert receipt.removed.old_versions_removed == 2
    oracle.assert_intact(table, before)
    assert kit.ids(table) == kept


@pytest.mark.nightly
def test_statistics_of_two_snapshots_stay_with_the_second(lab: Lab) -> None:
    table = lab.table()
    path = kit.statistics(table, kit.ids(table)[0])
    kit.statistics(table, path=path)
    parts = kit.partition_statistics(table, kit.ids(table)[1])
    kit.partition_statistics(table, path=parts)
    kit.backdate(table, 30)
    assert lab.clean().error is None
    oracle.assert_intact(table)
    assert kit.local(path).exists()
    assert kit.local(parts).exists()


@pytest.mark.nightly
def test_file_that_was_deleted_and_added_again_stays(lab: Lab) -> None:
    table = lab.table(steps=1)
    path = f"{table.location()}/data/again.parquet"
    kit.add_outside(table, path, 600)
    kit.overwrite(table, 50)
    table.add_files([path])
    head = kit.append(table, 60)
    kit.backdate(table, 30)
    before = oracle.fingerprint(table, head)
    assert lab.clean().removed.old_versions_removed > 3
    oracle.assert_intact(table, {head: before})
    assert lab.sweep().error is None
    oracle.assert_intact(table, {head: before})


def test_file_that_an_expired_snapshot_deleted_is_added_again_on_a_branch(lab: Lab) -> None:
    table = lab.table(steps=1)
    path = f"{table.location()}/data/again.parquet"
    kit.add_outside(table, path, 600)
    kit.branch(table, "side")
    kit.overwrite(table, 50)
    kit.overwrite(table, 70)
    kit.backdate(table, 30)
    before = {
        ref.snapshot_id: oracle.fingerprint(table, ref.snapshot_id) for ref in table.refs().values()
    }
    assert lab.clean().error is None
    oracle.assert_intact(table, before)


def test_snapshots_of_the_future_and_out_of_order(lab: Lab) -> None:
    table = lab.table()
    ids = kit.ids(table)
    now = int(time.time() * 1000)  # noqa: TID251

    def skew(metadata: dict[str, Any]) -> None:
        ages = [9, -400, 3, 500, 2, 70, 1, 8, 60]
        for snapshot, days in zip(metadata["snapshots"], ages, strict=True):
            snapshot["timestamp-ms"] = now - days * kit.DAY_MS

    rewrite(table, skew)
    before = oracle.fingerprints(table)
    assert lab.clean(keep=2, older_than="5d").error is None
    oracle.assert_intact(table, before)
    assert ids[-1] in kit.ids(table)
    assert ids[-2] in kit.ids(table)


@pytest.mark.nightly
def test_parents_in_a_circle(lab: Lab) -> None:
    table = lab.table()
    ids = kit.ids(table)

    def circle(metadata: dict[str, Any]) -> None:
        metadata["snapshots"][0]["parent-snapshot-id"] = ids[-1]

    rewrite(table, circle)
    before = oracle.fingerprints(table)
    assert lab.clean(keep=3).error is None
    oracle.assert_intact(table, before)
    assert kit.ids(table) == ids[-3:]


def test_ref_to_a_snapshot_that_is_not_there(lab: Lab) -> None:
    table = lab.table()
    rewrite(table, lambda raw: raw["refs"].update(lost={"snapshot-id": 77, "type": "tag"}))
    before = oracle.fingerprints(table)
    assert lab.clean().error is None
    oracle.assert_intact(table, before)


def test_branch_main_of_a_snapshot_that_is_not_there(lab: Lab) -> None:
    table = lab.table()
    metadata = metadata_of(table)
    metadata["refs"]["main"]["snapshot-id"] = 77
    metadata["current-snapshot-id"] = 77
    files = oracle.on_disk(lab.root / "warehouse")
    kit.write_metadata(table, table.metadata_location, metadata)
    assert lab.clean().error_kind == "damaged_ref"
    assert oracle.on_disk(lab.root / "warehouse") == files


@pytest.mark.nightly
def test_numbers_that_fit_nowhere_are_the_trouble_of_one_table(lab: Lab) -> None:
    odd = [
        ("snapshot-id", 2**63), ("snapshot-id", -(2**63) - 1), ("timestamp-ms", 2**62),
        ("timestamp-ms", 2**70), ("parent-snapshot-id", 2**70),
    ]  # fmt: skip
    sound = lab.table("db.a", steps=3)
    damaged = [lab.table(f"db.t{number}", steps=2) for number in range(len(odd))]
    before = [oracle.fingerprints(table) for table in damaged]
    was = [kit.local(table.metadata_location).read_bytes() for table in damaged]
    for table, (field, value) in zip(damaged, odd, strict=True):
        metadata = metadata_of(table)
        metadata["snapshots"][0][field] = value
        kit.write_metadata(table, table.metadata_location, metadata)
    receipts = lab.execute(lab.plan("iceberg://lake/db")).tables
    assert receipts[0].error is None
    assert receipts[0].removed.old_versions_removed == 4
    oracle.assert_intact(sound)
    for table, text, then, receipt in zip(damaged, was, before, receipts[1:], strict=True):
        if receipt.error is not None:
            kit.local(table.metadata_location).write_bytes(text)
            oracle.assert_intact(table.refresh(), then)


@pytest.mark.nightly
def test_largest_ids_that_fit(lab: Lab) -> None:
    table = lab.table()
    ids = kit.ids(table)

    def rename(metadata: dict[str, Any]) -> None:
        text = json.dumps(metadata)
        text = text.replace(str(ids[0]), str(2**63 - 1)).replace(str(ids[-1]), str(-(2**63)))
        metadata.clear()
        metadata.update(json.loads(text))
        # The name of the list holds the id, too, and is not to change.
        metadata["snapshots"][0]["manifest-list"] = first
        metadata["snapshots"][-1]["manifest-list"] = last

    first, last = (table.metadata.snapshots[n].manifest_list for n in (0, -1))
    rewrite(table, rename)
    before = oracle.fingerprints(table)
    assert lab.clean().error is None
    oracle.assert_intact(table, before)
    assert kit.ids(table) == [-(2**63)]


@pytest.mark.nightly
def test_log_that_names_metadata_of_another_table(lab: Lab) -> None:
    """A commit drops old entries of the log and deletes their files, but not another table's."""
    other = lab.table("db.u")
    table = lab.table(
        properties={
            "write.metadata.previous-versions-max": "1",
            "write.metadata.delete-after-commit.enabled": "true",
        }
    )
    entry = {"metadata-file": other.metadata_location, "timestamp-ms": 1}
    rewrite(table, lambda raw: raw.update({"metadata-log": [entry]}))
    assert lab.clean().error is None
    assert kit.local(other.metadata_location).exists(), "another table's current metadata is gone"
    oracle.assert_intact(other)


@pytest.mark.nightly
def test_names_that_differ_in_case_only(lab: Lab) -> None:
    table, other = lab.table(), lab.table("db.T")
    place = f"{table.location()}/data/Part.parquet"
    kit.add_outside(table, place, 800)
    kit.overwrite(table, 50)
    kit.add_outside(table, f"{table.location()}/data/part.parquet", 810)
    kit.backdate(table, 30)
    head = kit.ids(table)[-1]
    before, beside = oracle.fingerprint(table, head), oracle.fingerprints(other)
    assert lab.clean().error is None
    assert lab.sweep().error is None
    oracle.assert_intact(table, {head: before})
    oracle.assert_intact(other, beside)
    assert not kit.local(place).exists()


# -- files that were cut ---------------------------------------------------------------------------


def cut(path: str) -> bytes:
    """Leave of an Avro file its header and its first blocks; returns what it was."""
    file = kit.local(path)
    data = file.read_bytes()
    found = list(fastavro.block_reader(BytesIO(data)))
    last = found[-1]
    end = last.offset
    assert end < len(data)
    file.write_bytes(data[:end])
    return data


@pytest.mark.nightly
def test_manifest_that_was_cut_between_blocks(lab: Lab) -> None:
    table = lab.table()
    kit.append(table, 900)
    kit.backdate(table, 30)
    before = oracle.fingerprints(table)
    head = table.current_snapshot()
    assert head is not None
    for manifest in head.manifests(table.io):
        data = cut(manifest.manifest_path)
        for run in (lab.clean, lab.sweep):
            assert run().error is not None
        kit.local(manifest.manifest_path).write_bytes(data)
        oracle.assert_intact(table, before)


def test_manifest_list_that_was_cut_between_blocks(lab: Lab) -> None:
    """It looks like that of an empty table, but the snapshot says how many files it has."""
    table = lab.table()
    kit.append(table, 900)
    kit.backdate(table, 30)
    before = oracle.fingerprints(table)
    head = table.current_snapshot()
    assert head is not None
    data = cut(head.manifest_list)
    lab.clean()
    lab.sweep()
    kit.local(head.manifest_list).write_bytes(data)
    oracle.assert_intact(table.refresh(), {head.snapshot_id: before[head.snapshot_id]})


# -- records of expiries that were not finished ----------------------------------------------------


NONSENSE = (
    "", "{", "{}", "[]", "7", "null", '"text"', '{"metadata": null}', '{"metadata": 7}',
    '{"metadata": []}', '{"metadata": ""}', '{"metadata": "nowhere"}',
    '{"metadata": "ftp://host/x.metadata.json"}', '{"metadata": "file:///none.metadata.json"}',
    '{"metadata": "file:///"}', "[" * 100_000,
)  # fmt: skip


@pytest.mark.nightly
def test_records_of_nonsense_hold_nobody_up(lab: Lab) -> None:
    table = lab.table(steps=3)
    newest = kit.ids(table)[-1]
    before = oracle.fingerprint(table, newest)
    for number, text in enumerate(NONSENSE):
        record(table, text, f"{number}.json")
    receipt = lab.clean()
    assert receipt.error is None, receipt.error
    oracle.assert_intact(table, {newest: before})
    assert not records(table), "nonsense is cleared away"


@pytest.mark.nightly
def test_record_that_names_damaged_metadata_holds_nobody_up(lab: Lab) -> None:
    table = lab.table(steps=3)
    bad = kit.local(table.metadata_location).with_name("bad.metadata.json")
    bad.write_text('{"format-version": 2}')
    record(table, json.dumps({"format": 1, "table": T, "metadata": f"file://{bad}"}))
    receipt = lab.clean()
    assert receipt.error is None, receipt.error
    oracle.assert_intact(table)


@pytest.mark.nightly
def test_record_of_another_table_is_not_followed(lab: Lab) -> None:
    table, other = lab.table(), lab.table("db.u")
    before = oracle.fingerprints(other)
    record(table, json.dumps({"format": 1, "table": U, "metadata": other.metadata_location}))
    assert lab.clean().error is None
    oracle.assert_intact(table)
    oracle.assert_intact(other, before)


def test_record_of_another_table_without_uuid_is_not_followed(lab: Lab) -> None:
    """Format 1 allows tables without an identity."""
    table, other = lab.table(version=1), lab.table("db.u", version=1)
    for one in (table, other):
        metadata = metadata_of(one)
        metadata.pop("table-uuid")
        kit.write_metadata(one, one.metadata_location, metadata)
    record(table, json.dumps({"format": 1, "table": U, "metadata": other.metadata_location}))
    lab.clean()
    gone = {
        path for path in oracle.everything(oracle.reachable(other)) if not kit.local(path).exists()
    }
    assert not gone


def forged(lab: Lab, table: Table, content: int) -> Path:
    """Write metadata of the same table that calls live data files those of a gone snapshot."""
    head = table.current_snapshot()
    assert head is not None
    directory = kit.local(table.metadata_location).parent
    manifests = kit._read_avro(table, head.manifest_list)
    for number, manifest in enumerate(manifests):
        copy = directory / f"forged-{number}-m0.avro"
        shutil.copy(kit.local(manifest["manifest_path"]), copy)
        manifest.update(manifest_path=f"file://{copy}", content=content)
    listed = f"file://{directory}/snap-77-forged.avro"
    schema = (MANIFEST_LIST_FILE_SCHEMAS[2], "manifest_file")
    kit._write_avro(table, listed, schema, {"snapshot-id": "77"}, manifests)
    metadata = metadata_of(table)
    metadata["snapshots"] = [
        {**metadata["snapshots"][-1], "snapshot-id": 77, "manifest-list": listed}
    ]
    place = directory / "99999-forged.metadata.json"
    kit.write_metadata(table, f"file://{place}", metadata)
    return place


@pytest.mark.parametrize("content", [0, 1], ids=["as data", "as deletes"])
def test_record_that_names_forged_metadata_costs_no_live_file(lab: Lab, content: int) -> None:
    table = lab.table()
    kit.append(table, 900)
    kit.statistics(table)
    before = oracle.fingerprints(table)
    place = forged(lab, table, content)
    record(table, json.dumps({"format": 1, "table": T, "metadata": f"file://{place}"}))
    lab.clean(keep=100)
    oracle.assert_intact(table, before)


def test_record_that_names_a_diverged_copy_of_the_table(lab: Lab, tmp_path: Path) -> None:
    """Another catalog has the same table and went on with it; its snapshots are not ours to remove."""
    table = lab.table()
    other = Lab(lab.spark, tmp_path / "other")
    other.catalog.create_namespace("db")
    copy = other.catalog.register_table("db.t", table.metadata_location)
    kit.append(copy, 900)
    before = oracle.fingerprint(copy, kit.ids(copy)[-1])
    record(table, json.dumps({"format": 1, "table": T, "metadata": copy.metadata_location}))
    lab.clean(keep=100)
    oracle.assert_intact(copy, {kit.ids(copy)[-1]: before})
    other.catalog.close()


@pytest.mark.nightly
def test_record_of_a_table_beside_in_the_same_directory_stays(lab: Lab) -> None:
    """Two tables may be told to keep their metadata in one place."""
    shared = {"write.metadata.path": f"file://{lab.root}/metadata"}
    lab.table(properties=shared)
    other = lab.table("db.u", properties=shared)
    old, count = other.metadata_location, len(oracle.on_disk(other.location()))
    other.maintenance.expire_snapshots().by_ids(kit.ids(other)[:-1]).commit()
    other.refresh()
    record(other, json.dumps({"format": 1, "table": U, "metadata": old}))
    assert lab.clean(T).error is None
    assert len(records(other)) == 1, "what the other table left cannot be found any more"
    lab.clean(U)
    oracle.assert_intact(other)
    assert len(oracle.on_disk(other.location())) < count
    assert not records(other)


def test_record_stays_while_another_run_is_still_deleting(lab: Lab) -> None:
    """A run that expires nothing must finish what the record stands for before it takes it away."""
    table = lab.table()
    reach = oracle.reachable(table)
    old = table.metadata_location
    place = record(table, json.dumps({"format": 1, "table": T, "metadata": old}))
    plan = lab.plan(keep=100)
    # The other run's commit lands after this plan was made.
    table.maintenance.expire_snapshots().by_ids(kit.ids(table)[:-1]).commit()
    table.refresh()
    lab.execute(plan)
    left = {p for p in oracle.leftovers(reach, table) if kit.local(p).exists()}
    assert place.exists() or not left, "files are left, and nothing tells of them"


@pytest.mark.nightly
def test_record_is_found_after_the_metadata_moved(lab: Lab) -> None:
    table = lab.table()
    reach = oracle.reachable(table)
    old = table.metadata_location
    table.maintenance.expire_snapshots().by_ids(kit.ids(table)[:-1]).commit()
    table.refresh()
    record(table, json.dumps({"format": 1, "table": T, "metadata": old}))
    lab.catalog.rename_table("db.t", "db.renamed")
    renamed = lab.catalog.load_table("db.renamed")
    assert lab.clean("iceberg://lake/db.renamed").error is None
    left = {p for p in oracle.leftovers(reach, renamed) if kit.local(p).exists()}
    assert not left
    assert not records(renamed)
    oracle.assert_intact(renamed)


def test_position_deletes_and_operations_by_hand_survive(lab: Lab) -> None:
    table = kit.create(lab.catalog, "db.t")
    kit.grow(table, 4)
    kit.position_deletes(table, [1, 11])
    kit.commit(table, kit.Manifest(kit._data_files(table, kit.rows(90))),
               operation=Operation.OVERWRITE, replace=True)  # fmt: skip
    kit.append(table, 95)
    kit.position_deletes(table, [96])
    kit.backdate(table, 30)
    head = kit.ids(table)[-1]
    before = oracle.fingerprint(table, head)
    reach = oracle.reachable(table)
    assert lab.clean().error is None
    oracle.assert_intact(table, {head: before})
    assert not {p for p in oracle.leftovers(reach, table) if kit.local(p).exists()}
