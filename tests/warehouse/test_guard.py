"""Maintenance of single tables leaves those of a warehouse alone: it cannot know what they need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

import lakewarden
from lakewarden.errors import ErrorKind, Refused
from lakewarden.testing import iceberg as kit
from lakewarden.testing import iceberg_oracle
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = pa.table({"id": [1, 2, 3]})
IMPL = "lakewarden.warehouse.iceberg.WarehouseCatalog"


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse.init(str(tmp_path / "lake"))


def test_versions_of_a_lance_table_stay(spark: SparkSession, warehouse: Warehouse) -> None:
    namespace = Namespace(warehouse)
    for mode in ("create", "overwrite", "overwrite"):
        lance.write_dataset(ROWS, namespace_client=namespace, table_id=["t"], mode=mode)
    warehouse.create_tag("first", version=3)
    (table,) = warehouse.read().tables()
    plan = lakewarden.plan_cleanup(spark, table.location, keep=1, min_age="0s", tasks=2)
    assert plan.tables[0].error_kind == ErrorKind.IN_WAREHOUSE
    assert plan.removal.files_removed == 0
    plan = lakewarden.plan_orphans(spark, table.location, older_than="7d", tasks=2)
    assert plan.tables[0].error_kind == ErrorKind.IN_WAREHOUSE


def test_files_that_a_branch_of_the_warehouse_needs_are_no_orphans(
    spark: SparkSession, warehouse: Warehouse, tmp_path: Path
) -> None:
    """Another catalog knows the table, too; it does not know the branch."""
    lake = str(tmp_path / "lake")
    main = load_catalog("main", **{"py-catalog-impl": IMPL, "warehouse": lake})
    main.create_namespace("db")
    table = main.create_table("db.t", ROWS.schema)
    table.append(ROWS)
    warehouse.create_branch("side")
    side = load_catalog(
        "side", **{"py-catalog-impl": IMPL, "warehouse": lake, "lakewarden.branch": "side"}
    )
    side.load_table("db.t").append(ROWS)
    with kit.catalog(tmp_path) as other:
        other.create_namespace_if_not_exists("db")
        other.register_table("db.t", table.metadata_location)
        plan = lakewarden.plan_orphans(
            spark, f"iceberg://{other.name}/db.t", older_than="7d", catalog={other.name: other}
        )
        assert plan.tables[0].error_kind == ErrorKind.IN_WAREHOUSE
    with pytest.raises(Refused, match="is a warehouse"):
        lakewarden.plan_cleanup(spark, "iceberg://main/db.t", keep=1, catalog={"main": main})


def test_snapshots_that_the_log_of_a_warehouse_names_stay(
    spark: SparkSession, warehouse: Warehouse, tmp_path: Path
) -> None:
    """Another catalog knows the table, too, and would take out what a tag of the warehouse needs."""
    main = load_catalog("main", **{"py-catalog-impl": IMPL, "warehouse": str(tmp_path / "lake")})
    main.create_namespace("db")
    main.create_table("db.t", ROWS.schema).append(ROWS)
    warehouse.refresh()
    warehouse.create_tag("first")
    first = main.load_table("db.t").metadata_location
    main.load_table("db.t").overwrite(ROWS)
    with kit.catalog(tmp_path) as other:
        other.create_namespace_if_not_exists("db")
        other.register_table("db.t", main.load_table("db.t").metadata_location)
        plan = lakewarden.plan_cleanup(
            spark, f"iceberg://{other.name}/db.t", older_than="0s", catalog={other.name: other}
        )
        assert plan.tables[0].error_kind == ErrorKind.IN_WAREHOUSE
        lakewarden.execute(spark, plan, catalog={other.name: other})
    assert iceberg_oracle.missing(iceberg_oracle.opened(first)) == set()
