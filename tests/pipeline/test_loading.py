"""Frames into tables of a warehouse, and tables back into frames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lakewarden.errors import Conflict, ErrorKind, NotFound, UsageError
from lakewarden.model import Format
from lakewarden.pipeline import loading
from lakewarden.pipeline.scanning import frame, scan_of
from lakewarden.pipeline.source import WarehouseSource
from lakewarden.warehouse.transaction import transaction
from lakewarden.warehouse.warehouse import View, Warehouse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LANCE, ICEBERG = ("lance_rows",), ("iceberg_rows",)
BOTH = (LANCE, ICEBERG)
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def spark(spark: SparkSession) -> Iterator[SparkSession]:
    before = spark.conf.get(PUSHDOWN) or "false"
    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(WarehouseSource)
    yield spark
    spark.conf.set(PUSHDOWN, before)


def rows(spark: SparkSession, start: int, end: int, name: str = "old") -> DataFrame:
    return spark.range(start, end, numPartitions=2).selectExpr("id", f"'{name}' AS name")


@pytest.fixture
def warehouse(spark: SparkSession, tmp_path: Path) -> Warehouse:
    """A warehouse with ten rows in a table of each format."""
    made = Warehouse.init(str(tmp_path / "lake"))
    with transaction(made, message="make") as tx:
        loading.create(tx, LANCE, rows(spark, 0, 10))
        loading.create(tx, ICEBERG, rows(spark, 0, 10), Format.ICEBERG)
    return made


def seen(spark: SparkSession, warehouse: Warehouse, table: Any, view: View | None = None) -> Any:
    found = frame(spark, scan_of(warehouse, view or warehouse.read(), table))
    return sorted((row.id, row.name) for row in found.select("id", "name").collect())


def expected(*parts: tuple[int, int, str]) -> list[tuple[int, str]]:
    return sorted((number, name) for start, end, name in parts for number in range(start, end))


def test_tables_of_both_formats_are_made_in_one_version(
    spark: SparkSession, warehouse: Warehouse
) -> None:
    assert warehouse.known.version == 2
    for table in BOTH:
        assert seen(spark, warehouse, table) == expected((0, 10, "old"))


def test_append_overwrite_and_merge(spark: SparkSession, warehouse: Warehouse) -> None:
    before = warehouse.read()
    with transaction(warehouse) as tx:
        for table in BOTH:
            loading.append(tx, table, rows(spark, 10, 15, "more"))
    with transaction(warehouse) as tx:
        for table in BOTH:
            loading.merge(tx, table, rows(spark, 8, 20, "new"), on=["id"])
    for table in BOTH:
        assert seen(spark, warehouse, table) == expected((0, 8, "old"), (8, 20, "new"))
    merged = warehouse.read()
    with transaction(warehouse) as tx:
        for table in BOTH:
            loading.overwrite(tx, table, rows(spark, 0, 2))
    for table in BOTH:
        assert seen(spark, warehouse, table) == expected((0, 2, "old"))
        assert seen(spark, warehouse, table, merged) == expected((0, 8, "old"), (8, 20, "new"))
        assert seen(spark, warehouse, table, before) == expected((0, 10, "old"))
    assert warehouse.known.version == 5, "one version for every transaction"


@pytest.mark.parametrize("table", BOTH)
def test_merge_replaces_every_row_with_a_key(
    spark: SparkSession, warehouse: Warehouse, table: Any
) -> None:
    with transaction(warehouse) as tx:
        loading.append(tx, table, rows(spark, 0, 3, "again"))
    with transaction(warehouse) as tx:
        loading.merge(tx, table, rows(spark, 0, 10, "new"), on=["id"])
    assert seen(spark, warehouse, table) == expected((0, 10, "new"))


def test_a_merge_that_cannot_be_is_refused(spark: SparkSession, warehouse: Warehouse) -> None:
    twice = rows(spark, 0, 3).unionByName(rows(spark, 2, 5))
    for given, on, told in (
        (twice, ["id"], "several rows have id=2"),
        (rows(spark, 0, 3), ["none"], "no column none"),
        (rows(spark, 0, 3), [], "no key"),
    ):
        with (
            pytest.raises(UsageError, match=told),
            transaction(warehouse) as tx,
        ):
            loading.merge(tx, LANCE, given, on=on)

    def append_and_merge() -> None:
        with transaction(warehouse) as tx:
            loading.append(tx, LANCE, rows(spark, 0, 3))
            loading.merge(tx, LANCE, rows(spark, 0, 3), on=["id"])

    with pytest.raises(UsageError, match="after another change"):
        append_and_merge()
    assert warehouse.refresh().version == 2


@pytest.mark.nightly
@pytest.mark.parametrize("table", BOTH)
def test_a_merge_does_not_undo_what_others_did_meanwhile(
    spark: SparkSession, warehouse: Warehouse, table: Any, tmp_path: Path
) -> None:
    other = Warehouse.open(str(tmp_path / "lake"))

    def merge_both() -> None:
        with transaction(warehouse) as tx:
            loading.merge(tx, table, rows(spark, 0, 5, "ours"), on=["id"])
            with transaction(other) as theirs:
                loading.merge(theirs, table, rows(spark, 0, 5, "theirs"), on=["id"])

    with pytest.raises(Conflict) as refused:
        merge_both()
    assert refused.value.kind is ErrorKind.CONFLICT
    assert seen(spark, warehouse, table) == expected((0, 5, "theirs"), (5, 10, "old"))


def test_a_load_that_is_tried_again_is_loaded_once(
    spark: SparkSession, warehouse: Warehouse
) -> None:
    for _ in range(2):
        with transaction(warehouse, request="load 1") as tx:
            for table in BOTH:
                loading.append(tx, table, rows(spark, 10, 12))
    for table in BOTH:
        assert seen(spark, warehouse, table) == expected((0, 12, "old"))
    assert warehouse.refresh().version == 3


@pytest.mark.parametrize("table", [pytest.param(LANCE, marks=pytest.mark.nightly), ICEBERG])
def test_the_data_source(spark: SparkSession, warehouse: Warehouse, table: Any) -> None:
    lake = warehouse.location.uri

    def read(**options: str) -> Any:
        return spark.read.format("lakewarden").options(warehouse=lake, **options)

    def write(request: str, mode: str) -> None:
        rows(spark, 10, 15).write.format("lakewarden").mode(mode).options(
            warehouse=lake, request=request
        ).save(table[0])

    write("first", "append")
    write("first", "append")
    assert read().load(table[0]).count() == 15
    assert read(version="2").load(table[0]).count() == 10
    warehouse.create_tag("now")
    write("second", "overwrite")
    assert read().load(table[0]).count() == 5
    assert read(tag="now").load(table[0]).count() == 15
    found = read(tag="now").load(table[0])
    assert found.filter("id >= 3 AND id < 6 AND name = 'old'").count() == 3
    assert found.filter("id IN (1, 2, 99)").count() == 2
    assert found.filter("NOT (id > 3) AND name IS NOT NULL").count() == 4
    assert found.filter("name LIKE 'o%'").count() == 15
    assert read().schema("name string").load(table[0]).columns == ["name"]


@pytest.mark.nightly
@pytest.mark.parametrize("table", BOTH)
def test_a_branch_is_loaded_and_read_apart(
    spark: SparkSession, warehouse: Warehouse, table: Any
) -> None:
    warehouse.create_branch("dev")
    with transaction(warehouse, branch="dev") as tx:
        loading.merge(tx, table, rows(spark, 5, 12, "new"), on=["id"])
    with transaction(warehouse, branch="dev") as tx:
        loading.append(tx, table, rows(spark, 20, 22, "more"))
        loading.create(tx, ("made",), rows(spark, 0, 3))
    options = {"warehouse": warehouse.location.uri, "branch": "dev"}
    rows(spark, 30, 31, "last").write.format("lakewarden").mode("append").options(**options).save(
        table[0]
    )
    dev = warehouse.read(branch="dev")
    there = expected((0, 5, "old"), (5, 12, "new"), (20, 22, "more"), (30, 31, "last"))
    assert seen(spark, warehouse, table, dev) == there
    assert seen(spark, warehouse, ("made",), dev) == expected((0, 3, "old"))
    assert spark.read.format("lakewarden").options(**options).load(table[0]).count() == len(there)
    assert seen(spark, warehouse, table) == expected((0, 10, "old"))


def test_filters_reach_the_format(spark: SparkSession, warehouse: Warehouse) -> None:
    from pyspark.sql.datasource import EqualTo, StringContains

    for table in BOTH:
        scan: Any = scan_of(warehouse, warehouse.read(), table)
        narrow = scan.filtered([EqualTo(("id",), 3), StringContains(("name",), "x")])
        found = [row for part in narrow.parts() for batch in narrow.read(part) for row in
                 batch.to_pylist()]  # fmt: skip
        assert [row["id"] for row in found] == [3]


def test_spark_hands_filters_over(spark: SparkSession, warehouse: Warehouse) -> None:
    """A file that the filter rules out is not opened: it is not even there."""
    with transaction(warehouse) as tx:
        loading.append(tx, ICEBERG, rows(spark, 100, 110).coalesce(1))
    (place,) = (one.location for one in warehouse.read().tables() if one.name == ICEBERG)
    newest = max(Path(place).glob("data/*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    newest.unlink()
    read = spark.read.format("lakewarden").options(warehouse=warehouse.location.uri)
    assert read.load(ICEBERG[0]).filter("id < 100").count() == 10


@pytest.mark.nightly
def test_keys_that_are_null_equal_nothing(spark: SparkSession, warehouse: Warehouse) -> None:
    some = rows(spark, 0, 10).selectExpr("nullif(id, 9) AS id", "name")
    nulls = spark.sql("SELECT CAST(NULL AS BIGINT) AS id, 'none' AS name FROM range(2)")
    for form in Format:
        table = (f"{form.value}_nulls",)
        with transaction(warehouse) as tx:
            loading.create(tx, table, some, form)
        with transaction(warehouse) as tx:
            loading.merge(tx, table, nulls, on=["id"])
        found = frame(spark, scan_of(warehouse, warehouse.read(), table))
        assert found.filter("id IS NULL").count() == 3
        assert found.count() == 12


def test_what_is_not_there_is_told(spark: SparkSession, warehouse: Warehouse) -> None:
    with pytest.raises(NotFound, match="no table nothing"):
        scan_of(warehouse, warehouse.read(), ("nothing",))
    with pytest.raises(UsageError, match="no column other"):
        scan_of(warehouse, warehouse.read(), LANCE, ["other"]).schema()
    warehouse.declare(("empty",), Format.LANCE)
    with pytest.raises(NotFound, match="is empty"):
        scan_of(warehouse, warehouse.read(), ("empty",))
