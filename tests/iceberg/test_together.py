"""Several tables in one run: what one needs, the others do not remove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import lakewarden
from lakewarden.testing import iceberg as kit
from lakewarden.testing import iceberg_oracle as oracle

pytestmark = pytest.mark.spark


@pytest.fixture
def catalog(tmp_path: Path) -> Any:
    return kit.catalog(tmp_path)


def shared_file(catalog: Any, **properties: str) -> tuple[Any, Any, str]:
    """Two tables that name the file with which the first began, and which it has replaced since."""
    table = kit.create(catalog, "db.a")
    kit.append(table, 0)
    (task,) = table.scan().plan_files()
    other = kit.create(catalog, "db.b", properties=properties)
    other.add_files([task.file.file_path])
    kit.overwrite(table, 100)
    kit.backdate(table, 30)
    return table, other, task.file.file_path


def clean(spark: SparkSession, catalog: Any, **rules: Any) -> Any:
    plan = lakewarden.plan_cleanup(
        spark, "iceberg://lake", catalog={"lake": catalog}, tasks=2, **rules
    )
    return lakewarden.execute(spark, plan, catalog={"lake": catalog}, tasks=2)


def test_file_of_a_table_that_is_not_worth_a_run_stays(spark: SparkSession, catalog: Any) -> None:
    threshold = {"lakewarden.history.expire.min-snapshots-to-expire": "50"}
    _, other, path = shared_file(catalog, **threshold)
    kit.append(other, 500)
    kit.backdate(other, 30)
    receipt = clean(spark, catalog)
    assert receipt.removed.old_versions_removed > 0
    assert kit.local(path).exists()
    oracle.assert_intact(catalog.load_table("db.b"))


def test_file_that_two_tables_let_go_stays_if_one_of_them_cannot(
    spark: SparkSession, catalog: Any
) -> None:
    _, other, path = shared_file(catalog)
    kit.overwrite(other, 700)
    kit.backdate(other, 30)
    with other.transaction() as change:
        change.set_properties({"gc.enabled": "false"})
    receipt = clean(spark, catalog)
    assert len(receipt.failed) == 1
    assert kit.local(path).exists()
    oracle.assert_intact(catalog.load_table("db.b"))


def test_file_that_two_tables_let_go_outlives_both(spark: SparkSession, catalog: Any) -> None:
    """Only one of the commits might have landed; then it is an orphan, one day."""
    _, other, path = shared_file(catalog)
    kit.overwrite(other, 700)
    kit.backdate(other, 30)
    assert not clean(spark, catalog).failed
    assert kit.local(path).exists()
    kit.age(kit.local(catalog.load_table("db.a").location()), 30)
    plan = lakewarden.plan_orphans(spark, "iceberg://lake", catalog={"lake": catalog}, tasks=2)
    lakewarden.execute(spark, plan, catalog={"lake": catalog}, tasks=2)
    assert not kit.local(path).exists()


def test_neighbours_whose_names_begin_alike_are_all_listed(
    spark: SparkSession, catalog: Any
) -> None:
    names = ["orders", "orders-archive", "orders_old", "orders!", "ordersz"]
    strays = []
    for name in names:
        table = kit.create(catalog, f"db.{name}")
        kit.grow(table, 1)
        kit.age(kit.local(table.location()), 30)
        strays.append(kit.orphan(kit.local(table.location()), "data/stray.parquet"))
    plan = lakewarden.plan_orphans(spark, "iceberg://lake", catalog={"lake": catalog}, tasks=2)
    assert not plan.failed
    assert [table.removal.files_removed for table in plan.tables] == [1] * len(names)
    lakewarden.execute(spark, plan, catalog={"lake": catalog}, tasks=2)
    assert not any(stray.exists() for stray in strays)


def test_metadata_without_identity_is_an_orphan_like_any_other(
    spark: SparkSession, catalog: Any
) -> None:
    table = kit.create(catalog, "db.a")
    kit.grow(table, 2)
    kit.age(kit.local(table.location()), 30)
    old = kit.orphan(kit.local(table.location()), "metadata/00009-x.metadata.json")
    raw = kit.read_metadata(table, table.metadata_location)
    raw.pop("table-uuid")
    kit.write_metadata(table, f"file://{old}", raw)
    kit.age(kit.local(table.location()), 30)
    plan = lakewarden.plan_orphans(spark, "iceberg://lake", catalog={"lake": catalog}, tasks=2)
    assert not plan.failed
    assert plan.removal.metadata_files_removed == 1
