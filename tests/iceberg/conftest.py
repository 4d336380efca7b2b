"""Tables written by Iceberg's own Spark runtime, for all tests of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg")

from lakewarden.testing import iceberg, iceberg_spark
from lakewarden.testing.iceberg import LakeCatalog

_MERGE_ON_READ = (
    "'write.delete.mode'='merge-on-read', 'write.update.mode'='merge-on-read', "
    "'write.merge.mode'='merge-on-read', 'write.distribution-mode'='none'"
)


def _insert(table: str, *starts: int, number: int = 4) -> list[iceberg_spark.Step]:
    """Return statements that append rows of the given ids, a file each."""
    return [
        f"INSERT INTO {table} SELECT /*+ COALESCE(1) */ id, concat('n', id % 4), "
        f"date_add(DATE'2026-01-01', CAST(id DIV 3 AS INT)) FROM range({start}, {start + number})"
        for start in starts
    ]


def _create(table: str, version: int, properties: str = "", partition: str = "") -> str:
    named = f"'format-version'='{version}'" + (f", {properties}" if properties else "")
    clause = f"PARTITIONED BY ({partition})" if partition else ""
    return (
        f"CREATE TABLE {table} (id BIGINT, name STRING, day DATE) USING iceberg {clause} "
        f"TBLPROPERTIES ({named})"
    )


#: One table of each kind; every statement is one that a user of Spark would write.
STEPS: list[iceberg_spark.Step] = [
    "CREATE NAMESPACE IF NOT EXISTS db",
    # Partitioned, with files rewritten by a copy-on-write delete, and v1.
    _create("db.partitioned", 1, partition="days(day), bucket(2, id)"),
    *_insert("db.partitioned", 0, 10),
    "DELETE FROM db.partitioned WHERE id = 1",
    "INSERT OVERWRITE db.partitioned SELECT * FROM db.partitioned WHERE id > 2",
    # Position delete files, one of them made useless by compaction.
    _create("db.positions", 2, _MERGE_ON_READ),
    *_insert("db.positions", 0, 10),
    "DELETE FROM db.positions WHERE id = 1",
    "UPDATE db.positions SET name = 'new' WHERE id = 11",
    "MERGE INTO db.positions t USING (SELECT 2 AS id) s ON t.id = s.id WHEN MATCHED THEN DELETE",
    "CALL lake.system.rewrite_data_files('db.positions', options => map('rewrite-all', 'true'))",
    "DELETE FROM db.positions WHERE id = 12",
    # Deletion vectors.
    _create("db.vectors", 3, _MERGE_ON_READ),
    *_insert("db.vectors", 0, 10),
    "DELETE FROM db.vectors WHERE id = 1",
    "DELETE FROM db.vectors WHERE id IN (2, 11)",
    # Refs, a branch with a commit of its own, and a rollback.
    _create("db.refs", 2),
    *_insert("db.refs", 0),
    "ALTER TABLE db.refs CREATE TAG first RETAIN 30 DAYS",
    "ALTER TABLE db.refs CREATE BRANCH side WITH SNAPSHOT RETENTION 2 SNAPSHOTS",
    *_insert("db.refs.branch_side", 100),
    *_insert("db.refs", 10, 20),
    "ALTER TABLE db.refs CREATE BRANCH short RETAIN 1 DAYS",
    "ALTER TABLE db.refs ADD COLUMN extra STRING",
    # Write, audit, publish: one snapshot published by cherry-pick, one left staged.
    _create("db.wap", 2, "'write.wap.enabled'='true'"),
    *_insert("db.wap", 0),
    {"spark.wap.id": "published"},
    *_insert("db.wap", 10),
    {"spark.wap.id": "staged"},
    *_insert("db.wap", 20),
    {"spark.wap.id": None},
    *_insert("db.wap", 30),
    "CALL lake.system.publish_changes('db.wap', 'published')",
    # Statistics of both kinds, and manifests rewritten into one.
    _create("db.stats", 2, partition="name"),
    *_insert("db.stats", 0, 10),
    "CALL lake.system.compute_table_stats('db.stats')",
    "CALL lake.system.compute_partition_stats('db.stats')",
    "CALL lake.system.rewrite_manifests('db.stats')",
    "CALL lake.system.compute_table_stats('db.stats')",
]


@dataclass(frozen=True, slots=True)
class Warehouse:
    """A directory with a catalog of tables that Spark wrote."""

    root: Path
    catalog: LakeCatalog
    #: The ids that Spark reads in the tables of namespace `hand`, which the kit wrote; also with a
    #: condition, for which Spark leaves out files by their partition values.
    read: dict[str, list[int]]


def spark_or_skip(root: Path, steps: list[iceberg_spark.Step]) -> list[list[dict[str, Any]]]:
    """Run steps in Iceberg's Spark; without the runtime the test is skipped, but not in CI."""
    try:
        return iceberg_spark.run(root, steps)
    except iceberg_spark.UnavailableError as reason:
        if "CI" in os.environ:  # noqa: TID251
            raise
        pytest.skip(str(reason))


def _by_hand(catalog: LakeCatalog) -> list[str]:
    """Make tables of what the kit writes itself, for Iceberg's own reader to judge."""
    positions = iceberg.create(catalog, "hand.positions", partitioning="bucket")
    iceberg.grow(positions, 2)
    iceberg.position_deletes(positions, [1, 11])
    equality = iceberg.create(catalog, "hand.equality")
    iceberg.grow(equality, 2)
    iceberg.equality_deletes(equality, [1, 11])
    vectors = iceberg.create(catalog, "hand.vectors", version=3)
    iceberg.grow(vectors, 2)
    iceberg.deletion_vectors(vectors, [1, 11])
    days = iceberg.create(catalog, "hand.days", partitioning="day")
    iceberg.append(days, 0)
    iceberg.overwrite(days, 50)
    synthetic = iceberg.create(catalog, "hand.synthetic")
    iceberg.synthetic(synthetic, 2, 2, real=True)
    made = [positions, equality, vectors, days, synthetic]
    for table in made:
        iceberg.backdate(table, 10)
    pruned = ["hand.positions WHERE id = 12", "hand.days WHERE day = DATE'2026-01-18'"]
    return [".".join(table.name()) for table in made] + pruned


@pytest.fixture(scope="session")
def spark_warehouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warehouse]:
    """One table of each kind, made in one Java process; for tests that change nothing."""
    root = tmp_path_factory.mktemp("iceberg-spark")
    catalog = iceberg.catalog(root)
    hand = _by_hand(catalog)
    answers = spark_or_skip(root, [*STEPS, *(f"SELECT id FROM {name} ORDER BY 1" for name in hand)])
    read = [[row["id"] for row in rows] for rows in answers[-len(hand) :]]
    # Rolling back needs an id, which only the catalog can tell.
    refs = catalog.load_table("db.refs")
    iceberg.rollback(refs, iceberg.ids(refs)[2])
    yield Warehouse(root, catalog, dict(zip(hand, read, strict=True)))
    catalog.close()
