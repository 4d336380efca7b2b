"""The pipeline's shape: jobs do not grow with tables, a long listing is cut, the driver stays small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import lakewarden
from lakewarden.pipeline import listing
from lakewarden.pipeline.listing import Unit, split
from lakewarden.storage.location import Location
from lakewarden.testing.s3 import s3_server

pytestmark = pytest.mark.spark


def small_table(place: Path, versions: int = 3) -> None:
    for step in range(versions):
        rows = pa.table({"id": [step]})
        lance.write_dataset(rows, str(place), mode="overwrite" if step else "create")


def jobs_of(spark: SparkSession, group: str, work: Callable[[], Any]) -> int:
    context = spark.sparkContext
    context.setJobGroup(group, group)
    try:
        work()
        return len(context.statusTracker().getJobIdsForGroup(group))
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]


def test_number_of_spark_jobs_does_not_depend_on_the_number_of_tables(
    spark: SparkSession, tmp_path: Path, clean: Callable[..., Any]
) -> None:
    counts = []
    for number in (2, 12):
        fleet = tmp_path / f"fleet{number}"
        for table in range(number):
            small_table(fleet / f"t{table}.lance")
        group = f"fleet-of-{number}"
        counts.append(jobs_of(spark, group, partial(clean, fleet, recursive=True, keep=1)))
        assert all(len(lance.dataset(str(table)).version_refs()) == 1 for table in fleet.iterdir())
    assert counts[0] == counts[1] > 0


@pytest.mark.nightly
@pytest.mark.s3
def test_a_long_listing_is_cut_into_ranges_and_loses_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "t.lance"
    small_table(place)
    for step in range(6000):
        (place / "data" / f"{step * 2797 % 2**24:024b}{step:026x}.lance").touch()
    expected = sum(1 for path in place.rglob("*") if path.is_file())
    with s3_server() as server:
        server.create_bucket("shape")
        server.load("shape", "t.lance", str(place))
        rules: dict[str, Any] = {"keep": 1, "min_age": "0s", "tasks": 4}
        rules["storage_options"] = server.options
        whole = lakewarden.plan_cleanup(spark, "s3://shape/t.lance", **rules)
        monkeypatch.setattr(listing, "PAGES_PER_UNIT", 1)
        cut = lakewarden.plan_cleanup(spark, "s3://shape/t.lance", **rules)
    assert cut.requests["LIST"] > whole.requests["LIST"]
    assert cut.tables[0].objects == whole.tables[0].objects == expected
    assert cut.removal == whole.removal


def test_ranges_of_a_split_cover_every_key_once() -> None:
    unit = Unit(Location.parse("s3://bucket/t.lance"), after="t.lance/_transactions/5")
    ranges = split(unit)
    keys = [
        "t.lance/_transactions/77-x.txn",
        "t.lance/_versions/18446744073709551614.manifest",
        "t.lance/data/0000011.lance",
        "t.lance/data/1111111.lance",
        "t.lance/data/zzz",
        "t.lance/tree/dev/data/01.lance",
        "t.lance/zebra",
    ]
    found = Counter(
        key
        for key in keys
        for part in ranges
        if (part.after is None or key > part.after) and (part.before is None or key < part.before)
    )
    assert found == Counter(keys)
    assert len(ranges) > 20
