"""Iceberg maintenance against an S3 server that counts what it is asked.

The floors are those of a tool that remembers nothing between runs.  A run may cost a fifth more
than its floor, and a constant: EXTRA for each run, for what does not grow with the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import lakewarden
from lakewarden.testing import iceberg as kit
from lakewarden.testing import iceberg_oracle as oracle
from lakewarden.testing.s3 import S3Server, s3_server

pytestmark = [pytest.mark.spark, pytest.mark.s3]

BUCKET = "lake"
#: Expiry: PyIceberg looks for the table (HEAD, GET), the list of records in progress (LIST), the
#: record itself (PUT, DELETE).  Orphans: the same look, and metadata files that are about to go.
EXTRA = 8


@dataclass
class World:
    spark: SparkSession
    server: S3Server
    catalog: kit.LakeCatalog
    root: Path
    served: dict[str, int] = field(default_factory=dict)
    counter: int = 0

    def table(self, name: str, **shape: Any) -> Any:
        return kit.create(self.catalog, name, **shape)

    def age(self, location: str, days: float = 30) -> None:
        self.counter += 1
        kit.age_on_s3(self.server, location, days, self.root / f"aged{self.counter}")

    def leave(self, prefix: str, number: int, days: float = 30) -> set[str]:
        """Put orphans below a prefix of the bucket."""
        self.counter += 1
        directory = self.root / f"left{self.counter}"
        names = {f"data/left-{one:05}.parquet" for one in range(number)}
        for name in names:
            kit.orphan(directory, name)
        self.server.load(BUCKET, prefix, str(directory), age_days=days)
        return {f"s3://{BUCKET}/{prefix}/{name}" for name in names}

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.server.reset()
        yield
        self.served = {kind.value: n for kind, n in self.server.requests().items()}

    def orphans(self, *targets: str, **rules: Any) -> Any:
        return lakewarden.plan_orphans(
            self.spark, list(targets), catalog={"lake": self.catalog}, tasks=4, **rules
        )

    def execute(self, plan: Any, **rules: Any) -> Any:
        return lakewarden.execute(
            self.spark, plan, catalog={"lake": self.catalog}, tasks=4, **rules
        ).after(plan)


@pytest.fixture(scope="module")
def world(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("on-s3")
    with s3_server() as server:
        server.create_bucket(BUCKET)
        # The catalog's properties say how to reach the store; no storage options anywhere below.
        catalog = kit.catalog(root, warehouse=f"s3://{BUCKET}/wh", **kit.s3_properties(server))
        yield World(spark, server, catalog, root)
        catalog.close()


def _report(what: str, served: dict[str, int], floor: int) -> None:
    total = sum(served.values())
    print(f"{what}: {total} requests {served}, floor {floor}, x{total / floor:.2f}")  # noqa: T201


@dataclass
class Cost:
    served: dict[str, int]
    receipt: dict[str, int]
    floor: int
    gone: set[str]
    missing: set[str]
    expected: set[str]


@pytest.fixture(scope="module")
def orphans(world: World) -> Cost:
    table = world.table("db.many")
    kit.synthetic(table, 25, 3, real=True)
    world.age(table.location())
    left = world.leave("wh/db/many", 1010)
    before = oracle.on_disk(table.location(), table.io.properties)
    with world.counted():
        receipt = world.execute(world.orphans("iceberg://lake/db.many"))
    after = oracle.on_disk(table.location(), table.io.properties)
    snapshots = len(kit.ids(table))
    manifests = len(oracle.reachable(table)["manifest"])
    floor = ceil(len(before) / 1000) + 1 + snapshots + manifests + ceil(len(left) / 1000)
    _report("orphans", world.served, floor)
    return Cost(
        world.served, dict(receipt.requests), floor, before - after, oracle.missing(table), left
    )


def test_orphans_go_and_nothing_else(orphans: Cost) -> None:
    assert orphans.gone == orphans.expected
    assert not orphans.missing


def test_orphans_cost_little_more_than_the_floor(orphans: Cost) -> None:
    assert sum(orphans.served.values()) <= 1.2 * orphans.floor + EXTRA
    assert orphans.served["LIST"] == 2
    assert orphans.served["DELETE"] == 2


@pytest.fixture(scope="module")
def expiry(world: World) -> Cost:
    """Linear history: every second commit replaces the files of the one before."""
    table = world.table("db.linear")
    for step in range(6):
        kit.append(table, 100 * step)
        kit.overwrite(table, 100 * step + 50)
    kit.backdate(table, [40 - number for number in range(len(kit.ids(table)))])
    before = oracle.reachable(table)
    expired = len(kit.ids(table)) - 2
    with world.counted():
        plan = lakewarden.plan_cleanup(
            world.spark,
            "iceberg://lake/db.linear",
            keep=2,
            catalog={"lake": world.catalog},
            tasks=4,
        )
        receipt = world.execute(plan)
    table = world.catalog.load_table("db.linear")
    assert len(kit.ids(table)) == 2
    expected = oracle.leftovers(before, table)
    exist = oracle.on_disk(table.location(), table.io.properties)
    # One metadata file, the lists that go and one neighbour, all manifests, the commit, the deletes.
    floor = 1 + expired + 1 + len(before["manifest"]) + 1 + ceil(len(expected) / 1000)
    _report("expire", world.served, floor)
    gone = {path for path in expected if path not in exist}
    return Cost(world.served, dict(receipt.requests), floor, gone, oracle.missing(table), expected)


def test_expiry_removes_what_only_expired_snapshots_name(expiry: Cost) -> None:
    assert expiry.expected
    assert expiry.gone == expiry.expected
    assert not expiry.missing


def test_expiry_costs_little_more_than_the_floor(expiry: Cost) -> None:
    assert sum(expiry.served.values()) <= 1.2 * expiry.floor + EXTRA


def test_what_orphans_cost_is_what_the_receipt_says(orphans: Cost) -> None:
    assert orphans.receipt == orphans.served


def test_what_expiry_costs_is_what_the_receipt_says(expiry: Cost) -> None:
    assert expiry.receipt == expiry.served


@pytest.mark.parametrize("scheme", ["s3a", "s3n"])
def test_or_30_hadoops_schemes_mean_the_same_bucket(world: World, scheme: str) -> None:
    """Files are named by one scheme, and the location by another."""
    table = world.table(f"db.{scheme}", location=f"s3://{BUCKET}/wh/{scheme}")
    kit.grow(table, 2)
    metadata = kit.read_metadata(table, table.metadata_location)
    metadata["location"] = metadata["location"].replace("s3://", f"{scheme}://")
    for snapshot in metadata["snapshots"]:
        snapshot["manifest-list"] = snapshot["manifest-list"].replace("s3://", f"{scheme}://")
    kit.write_metadata(table, table.metadata_location, metadata)
    world.age(f"s3://{BUCKET}/wh/{scheme}")
    left = world.leave(f"wh/{scheme}", 2)
    before = oracle.on_disk(f"s3://{BUCKET}/wh/{scheme}", table.io.properties)
    receipt = world.execute(world.orphans(f"iceberg://lake/db.{scheme}"))
    assert receipt.tables[0].error is None
    after = oracle.on_disk(f"s3://{BUCKET}/wh/{scheme}", table.io.properties)
    assert before - after == left
    assert not oracle.missing(world.catalog.load_table(f"db.{scheme}"))


def test_denied_deletes_are_counted_and_tried_again(world: World) -> None:
    table = world.table("db.denied")
    kit.grow(table, 1)
    world.age(table.location())
    left = sorted(world.leave("wh/db/denied", 6))
    world.server.deny_deletes([left[0].removeprefix(f"s3://{BUCKET}/")])
    receipt = world.execute(world.orphans("iceberg://lake/db.denied"))
    world.server.deny_deletes([])
    (done,) = receipt.tables
    assert done.failed_deletes == 1
    assert done.removed.files_removed == 5
    assert "could not be deleted" in (done.error or "")
    again = world.execute(world.orphans("iceberg://lake/db.denied"))
    assert again.tables[0].removed.files_removed == 1
    assert not again.failed
    assert not set(left) & oracle.on_disk(table.location(), table.io.properties)
    oracle.assert_intact(table)


def test_a_slow_store_is_asked_again(world: World) -> None:
    table = world.table("db.slow")
    kit.grow(table, 1)
    world.age(table.location())
    left = world.leave("wh/db/slow", 3)
    plan = world.orphans("iceberg://lake/db.slow")
    world.server.throttle(2)
    receipt = world.execute(plan)
    world.server.throttle(0)
    if receipt.failed:
        receipt = world.execute(world.orphans("iceberg://lake/db.slow"))
    assert not receipt.failed
    assert not left & oracle.on_disk(table.location(), table.io.properties)
    oracle.assert_intact(table)


@pytest.mark.nightly
def test_small_tables_share_list_requests(world: World) -> None:
    """Twenty tables side by side are listed as ranges of their directory, not one by one."""
    tables = [world.table(f"fleet.t{number:02}") for number in range(20)]
    for table in tables:
        kit.append(table, 0)
    world.age(f"s3://{BUCKET}/wh/fleet")
    left: set[str] = set()
    for number in range(0, 20, 5):
        left |= world.leave(f"wh/fleet/t{number:02}", 2)
    with world.counted():
        receipt = world.execute(world.orphans("iceberg://lake/fleet"))
    floor = 1 + 20 * 3 + 1
    _report("fleet of 20", world.served, floor)
    assert receipt.removed.files_removed == len(left)
    assert world.served["LIST"] <= 16, "at most 16 ranges for each directory"
    assert world.served["LIST"] < len(tables)
    assert world.served["DELETE"] == 1, "deletes are shared, too"
    for table in tables:
        oracle.assert_intact(table)


@pytest.mark.nightly
def test_only_part_of_a_table_costs_no_look_at_every_other_file(world: World) -> None:
    table = world.table("db.part")
    kit.synthetic(table, 10, 5, real=True)
    world.age(table.location())
    left = world.leave("wh/db/part", 2)
    with world.counted():
        receipt = world.execute(
            world.orphans(
                "iceberg://lake/db.part", location=f"{table.location()}/data", guard="targets"
            )
        )
    _report("part", world.served, 1 + 1 + 10 + 10 + 1)
    assert receipt.removed.files_removed == len(left)
    assert world.served.get("HEAD", 0) <= 1


def test_a_doubled_slash_in_a_key_is_never_an_orphan(world: World) -> None:
    """A location that ended in a slash gave data files such keys; PyArrow cannot write them."""
    table = world.table("db.slashed", location=f"s3://{BUCKET}/wh/slashed")
    kit.grow(table, 1)
    world.age(f"s3://{BUCKET}/wh/slashed")
    (left,) = world.leave("wh/slashed/", 1)
    entry = {
        "content": 0, "file_path": left, "file_format": "PARQUET", "partition": {},
        "record_count": 3, "file_size_in_bytes": 9, "block_size_in_bytes": 1 << 26,
    }  # fmt: skip
    assert "/slashed//data/" in left
    kit.commit(table, kit.Manifest([entry]))
    plan = world.orphans("iceberg://lake/db.slashed")
    assert not plan.deletions.count()
