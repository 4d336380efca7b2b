"""Removal of orphans by an inventory instead of LIST requests.

The table lies on an S3 server that counts requests; inventories are files on the local disk.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import lakewarden
from lakewarden.errors import LakewardenError
from lakewarden.storage.store import Request
from lakewarden.testing import iceberg as kit
from lakewarden.testing import iceberg_oracle as oracle
from lakewarden.testing.s3 import S3Server, s3_server
from lakewarden.world import SystemClock

pytestmark = [pytest.mark.spark, pytest.mark.s3]

Rows = list[dict[str, Any]]
BUCKET = "inventoried"
HOME = f"s3://{BUCKET}/wh/db/t"
ORPHANS = {
    "data/left.parquet", "data/a b/ü.parquet", "data/a+b%20.parquet", "metadata/left-m0.avro",
}  # fmt: skip


@dataclass
class World:
    spark: SparkSession
    server: S3Server
    catalog: kit.LakeCatalog
    #: The inventory's rows, in S3's columns.
    rows: Rows
    listed: set[str]

    def plan(self, inventory: str | Path | None, **rules: Any) -> Any:
        return lakewarden.plan_orphans(
            self.spark,
            "iceberg://lake/db.t",
            catalog={"lake": self.catalog},
            inventory=None if inventory is None else str(inventory),
            tasks=2,
            **rules,
        )


def _gone(plan: Any) -> set[str]:
    assert plan.tables[0].error is None, plan.tables[0].error
    return {row.path for row in plan.deletions.collect()}


@pytest.fixture(scope="module")
def world(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("inventory")
    with s3_server() as server:
        server.create_bucket(BUCKET)
        catalog = kit.catalog(root, warehouse=f"s3://{BUCKET}/wh", **kit.s3_properties(server))
        table = kit.create(catalog, "db.t", location=HOME)
        kit.grow(table, 3)
        kit.age_on_s3(server, HOME, 30, root / "aged")
        for path in ORPHANS:
            kit.orphan(root / "left", path)
        server.load(BUCKET, "wh/db/t", str(root / "left"), age_days=30)
        then = (SystemClock().now() - timedelta(days=30)).replace(microsecond=0)
        keys = [
            key.removeprefix(f"s3://{BUCKET}/") for key in oracle.on_disk(HOME, table.io.properties)
        ]
        rows = [
            {"bucket": BUCKET, "key": key, "size": 9, "last_modified_date": then,
             "is_latest": True, "is_delete_marker": False}
            for key in sorted(keys)
        ]  # fmt: skip
        assert len(rows) > 12
        made = World(spark, server, catalog, rows, set())
        made.listed = _gone(made.plan(None))
        yield made
        catalog.close()


def test_a_listing_finds_the_orphans(world: World) -> None:
    assert world.listed == ORPHANS


# -- forms ----------------------------------------------------------------------------------------


def _csv(rows: Rows, *, header: bool = True, encode: bool = False) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    if header:
        writer.writerow(rows[0])
    for row in rows:
        shown = {**row, "key": quote_plus(row["key"], safe="/")} if encode else row
        writer.writerow(_cell(value) for value in shown.values())
    return text.getvalue().encode()


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return "" if value is None else str(value)


def _parquet(rows: Rows, path: Path, kind: pa.DataType | None = None) -> None:
    table = pa.Table.from_pylist(rows)
    if kind is not None:
        place = table.column_names.index("last_modified_date")
        table = table.set_column(place, "last_modified_date", table.column(place).cast(kind))
    pq.write_table(table, path)


def _own(rows: Rows, prefix: str) -> Rows:
    return [
        {
            "path": f"{prefix}{row['key']}",
            "size": row["size"],
            "modified_at": row["last_modified_date"],
        }
        for row in rows
    ]


def _with_manifest(rows: Rows, root: Path) -> Path:
    """Write an inventory as S3 does: CSV without header, keys encoded, a manifest beside it."""
    half = len(rows) // 2
    files = []
    for number, part in enumerate((rows[:half], rows[half:])):
        path = root / f"part-{number}.csv.gz"
        path.write_bytes(gzip.compress(_csv(part, header=False, encode=True)))
        files.append({"key": str(path).lstrip("/"), "size": 1, "MD5checksum": "x"})
    schema = "Bucket, Key, Size, LastModifiedDate, IsLatest, IsDeleteMarker"
    manifest = {
        "sourceBucket": BUCKET, "destinationBucket": "arn:aws:s3:::reports", "version": "2016-11-30",
        "fileFormat": "CSV", "fileSchema": schema, "files": files,
    }  # fmt: skip
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root / "manifest.json"


def _make(form: str, rows: Rows, root: Path) -> Path:
    match form:
        case "parquet":
            _parquet(rows, root / "one.parquet")
        case "parquet, milliseconds, in parts":
            _parquet(rows[:5], root / "a.parquet", pa.timestamp("ms"))
            _parquet(rows[5:], root / "b.parquet", pa.timestamp("ns", tz="Europe/Berlin"))
        case "csv":
            (root / "one.csv").write_bytes(_csv(rows))
        case "csv.gz":
            (root / "one.csv.gz").write_bytes(gzip.compress(_csv(rows)))
        case "manifest":
            return _with_manifest(rows, root)
        case "own columns":
            _parquet(_own(rows, f"s3a://{BUCKET}/"), root / "one.parquet")
            return root / "one.parquet"
        case "own columns, epoch":
            own = _own(rows, f"s3://{BUCKET}/")
            stamped = [
                {**row, "modified_at": int(row["modified_at"].timestamp() * 1000)} for row in own
            ]
            (root / "one.csv").write_bytes(_csv_own(stamped))
        case _:
            raise AssertionError(form)
    return root


def _csv_own(rows: Rows) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


FORMS = (
    "parquet", "parquet, milliseconds, in parts", "csv", "csv.gz", "manifest", "own columns",
    "own columns, epoch",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_or_14_an_inventory_finds_what_a_listing_finds(
    world: World, form: str, tmp_path: Path
) -> None:
    inventory = _make(form, world.rows, tmp_path)
    world.server.reset()
    plan = world.plan(inventory)
    served = world.server.requests()
    assert _gone(plan) == world.listed
    assert Request.LIST not in served
    assert set(served) <= {Request.GET, Request.HEAD}


def test_or_14_age_location_and_place_still_count(world: World, tmp_path: Path) -> None:
    now = SystemClock().now()
    ages: dict[str, datetime | None] = {
        "data/left.parquet": now - timedelta(days=2),
        "data/a+b%20.parquet": None,
        "data/a b/ü.parquet": now + timedelta(days=2),
    }
    rows = [
        {**row, "last_modified_date": ages.get(row["key"].removeprefix("wh/db/t/"), row["last_modified_date"])}
        for row in world.rows
    ]  # fmt: skip
    rows += [
        {**rows[0], "key": "wh/db/t_backup/data/x.parquet"},
        {**rows[0], "key": "elsewhere/x.parquet"},
        {**rows[0], "bucket": "other", "key": "wh/db/t/data/other.parquet"},
        {**rows[0], "key": "wh/db/t/data/deleted.parquet", "is_delete_marker": True},
        {**rows[0], "key": "wh/db/t/data/former.parquet", "is_latest": False},
        {**rows[0], "key": "wh/db/t/_scratch/x"},
    ]
    _parquet(rows, tmp_path / "one.parquet")
    plan = world.plan(tmp_path)
    assert _gone(plan) == {"metadata/left-m0.avro"}
    (table,) = plan.tables
    assert table.kept_unknown_age == 2
    assert table.kept_unverified == 1
    assert table.kept_unknown_kind == 1
    assert not _gone(world.plan(tmp_path, location=f"{HOME}/data"))


def test_an_inventory_that_is_older_than_the_table_lacks_nothing(
    world: World, tmp_path: Path
) -> None:
    """Files that are not in it are neither orphans nor missing."""
    rows = [row for row in world.rows if "left" in row["key"]]
    _parquet(rows, tmp_path / "one.parquet")
    assert _gone(world.plan(tmp_path)) == {"data/left.parquet", "metadata/left-m0.avro"}


def test_seconds_are_not_taken_for_milliseconds(world: World, tmp_path: Path) -> None:
    """Else a file of today would be one of January 1970, and go."""
    today = int(SystemClock().now().timestamp()) - 3600
    rows = [{**row, "modified_at": today} for row in _own(world.rows, f"s3://{BUCKET}/")]
    _parquet(rows, tmp_path / "one.parquet")
    try:
        plan = world.plan(tmp_path)
    except LakewardenError:
        return
    assert not _gone(plan)


def test_a_doubled_slash_is_part_of_a_key(world: World, tmp_path: Path) -> None:
    """A location that ended in a slash gave its files such keys."""
    table = kit.create(world.catalog, "db.slashed", location=f"s3://{BUCKET}/wh/db/slashed")
    kit.grow(table, 1)
    (task,) = table.scan().plan_files()
    path = task.file.file_path.replace("/slashed/", "/slashed//")
    entry = {
        "content": 0, "file_path": path, "file_format": "PARQUET", "partition": {},
        "record_count": 3, "file_size_in_bytes": 9, "block_size_in_bytes": 1 << 26,
    }  # fmt: skip
    kit.commit(table, kit.Manifest([entry]))
    rows = [{**world.rows[0], "key": path.removeprefix(f"s3://{BUCKET}/")}]
    _parquet(rows, tmp_path / "one.parquet")
    plan = lakewarden.plan_orphans(
        world.spark,
        "iceberg://lake/db.slashed",
        catalog={"lake": world.catalog},
        inventory=str(tmp_path),
        tasks=2,
    )
    assert not plan.deletions.count()


def test_what_reading_an_inventory_costs_is_counted(world: World, tmp_path: Path) -> None:
    """Here the inventory itself is in the bucket."""
    _parquet(world.rows, tmp_path / "one.parquet")
    world.server.load(BUCKET, "reports", str(tmp_path))
    world.server.reset()
    plan = world.plan(f"s3://{BUCKET}/reports")
    served = {kind.value: number for kind, number in world.server.requests().items()}
    assert _gone(plan) == world.listed
    assert served.get("LIST") == 1
    assert dict(plan.requests) == served


# -- what is no inventory -------------------------------------------------------------------------


def _wrong_columns(root: Path) -> Path:
    pq.write_table(pa.table({"key": ["x"], "size": [1]}), root / "one.parquet")
    return root


def _wrong_columns_csv(root: Path) -> Path:
    (root / "one.csv").write_text("name,bytes\nx,1\n")
    return root


def _empty(root: Path) -> Path:
    return root


def _missing(root: Path) -> Path:
    return root / "nowhere"


def _missing_manifest(root: Path) -> Path:
    return root / "manifest.json"


def _garbage_parquet(root: Path) -> Path:
    (root / "one.parquet").write_bytes(b"no parquet")
    return root


def _garbage_csv(root: Path) -> Path:
    (root / "one.csv").write_bytes(b"\xff\xfe\x00\x01\n\x00")
    return root


def _cut_gzip(root: Path) -> Path:
    (root / "one.csv.gz").write_bytes(gzip.compress(b"key,size,last_modified\nx,1,2\n" * 99)[:-20])
    return root


def _garbage_time(root: Path) -> Path:
    (root / "one.csv").write_text("key,size,last_modified\nx,1,yesterday\n")
    return root


def _garbage_size(root: Path) -> Path:
    (root / "one.csv").write_text("key,size,last_modified\nx,large,2026-01-01T00:00:00Z\n")
    return root


def _ragged(root: Path) -> Path:
    (root / "one.csv").write_text("key,size,last_modified\nx,1\n")
    return root


def _garbage_manifest(root: Path) -> Path:
    (root / "manifest.json").write_text("{no json")
    return root / "manifest.json"


def _foreign_manifest(root: Path) -> Path:
    (root / "manifest.json").write_text('{"format-version": 2}')
    return root / "manifest.json"


def _dead_manifest(root: Path) -> Path:
    files = [{"key": f"{root}/gone.csv.gz".lstrip("/")}]
    manifest = {
        "fileFormat": "CSV", "fileSchema": "Bucket, Key, Size, LastModifiedDate",
        "destinationBucket": "arn:aws:s3:::b", "files": files,
    }  # fmt: skip
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root / "manifest.json"


def _no_key(root: Path) -> Path:
    when = datetime(2026, 1, 1, tzinfo=UTC)
    pq.write_table(
        pa.table({"key": ["x", None], "size": [1, 1], "last_modified": [when, when]}),
        root / "one.parquet",
    )
    return root


BAD: dict[str, Callable[[Path], Path]] = {
    made.__name__.strip("_"): made
    for made in (
        _wrong_columns, _wrong_columns_csv, _empty, _missing, _missing_manifest, _garbage_parquet,
        _garbage_csv, _cut_gzip, _garbage_time, _garbage_size, _ragged, _garbage_manifest,
        _foreign_manifest, _dead_manifest, _no_key,
    )
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_or_31_what_is_no_inventory_is_an_error_of_one_line(
    world: World, case: str, tmp_path: Path
) -> None:
    """No inventory never means "nothing there", nor a silent listing."""
    inventory = BAD[case](tmp_path)
    with pytest.raises(LakewardenError) as error:
        world.plan(inventory)
    assert "\n" not in error.value.message
    assert len(error.value.message) > 20


def test_an_inventory_without_rows_removes_nothing(world: World, tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("key,size,last_modified\n")
    assert _gone(world.plan(tmp_path)) == set()
