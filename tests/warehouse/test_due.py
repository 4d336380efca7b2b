"""Tables that ask to be cleaned as they are written to: a mark, and somebody who takes it up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

import lakewarden
from lakewarden.errors import ErrorKind, Refused, StorageError
from lakewarden.testing.faults import When
from lakewarden.warehouse.due import INTERVAL, OLDER_THAN, RETAIN
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.warehouse import Warehouse
from lakewarden.world import SystemClock
from tests.warehouse.lakes import Tampered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = ("db", "t")
CLOCK = SystemClock()
MARKS = "lake/__manifest/_due"


@pytest.fixture
def lake(tmp_path: Path) -> Warehouse:
    """A warehouse with table db.t, which is due after every fifth version and keeps three."""
    warehouse = Warehouse.init(str(tmp_path / "lake"))
    write(warehouse, "create", 1)
    warehouse.set_properties({INTERVAL: "5", RETAIN: "3"}, T)
    return warehouse


def write(warehouse: Warehouse, mode: str, number: int) -> None:
    rows = pa.table({"id": pa.array([number], pa.int64())})
    lance.write_dataset(rows, namespace_client=Namespace(warehouse), table_id=list(T), mode=mode)


def versions(warehouse: Warehouse) -> list[int]:
    (table,) = warehouse.read().tables()
    return [one["version"] for one in lance.dataset(table.location).versions()]


def marks(root: Path) -> list[str]:
    place = root / MARKS
    return sorted(one.name for one in place.iterdir()) if place.exists() else []


def soon(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        CLOCK.sleep(0.1)
    raise AssertionError("it did not happen within a minute")


def test_the_commit_that_makes_a_table_due_leaves_a_mark(tmp_path: Path, lake: Warehouse) -> None:
    for number in range(2, 5):
        write(lake, "overwrite", number)
    assert marks(tmp_path) == []
    write(lake, "overwrite", 5)
    (table,) = lake.read().tables()
    assert marks(tmp_path) == [f"{table.id}.{lake.known.version}"]
    write(lake, "overwrite", 6)
    assert len(marks(tmp_path)) == 1


def test_a_transaction_that_passes_the_number_leaves_a_mark_too(
    tmp_path: Path, lake: Warehouse
) -> None:
    """Several versions of a table may come with one version of the warehouse."""
    from lakewarden.warehouse.transaction import transaction

    for number in range(2, 5):
        write(lake, "overwrite", number)
    with transaction(lake) as tx:
        for number in (5, 6):
            rows = pa.table({"id": pa.array([number], pa.int64())})
            lance.write_dataset(rows, namespace_client=tx.lance, table_id=list(T), mode="append")
    assert lake.read().pins[lake.read().table(T).id].version == 6
    assert len(marks(tmp_path)) == 1


def test_a_mark_that_cannot_be_left_does_not_fail_the_commit(
    tmp_path: Path, lake: Warehouse
) -> None:
    tampered = Tampered()
    other = Warehouse.open(str(tmp_path / "lake"), opener=tampered)
    for number in range(2, 5):
        write(other, "overwrite", number)

    def rule(method: str, key: str) -> When | None:
        if method == "put" and "_due" in key:
            raise StorageError(ErrorKind.STORAGE, "the disk is full")
        return None

    tampered.rule = rule
    write(other, "overwrite", 5)
    assert marks(tmp_path) == []
    tampered.rule = lambda _method, _key: None
    for number in range(6, 11):
        write(other, "overwrite", number)
    assert len(marks(tmp_path)) == 1


def test_a_table_that_is_due_is_cleaned_around_its_tags(
    spark: SparkSession, tmp_path: Path, lake: Warehouse
) -> None:
    """H10: Lance's own hook stops for ever at the first tagged version that is old enough."""
    write(lake, "overwrite", 2)
    lake.create_tag("training")
    for number in range(3, 11):
        write(lake, "overwrite", number)
    assert len(marks(tmp_path)) == 2
    plan = lakewarden.plan_warehouse_cleanup(spark, lake, due=True, min_age="0s", tasks=2)
    receipt = lakewarden.execute(spark, plan, tasks=2)
    assert not receipt.failed
    assert versions(lake) == [2, 8, 9, 10]
    assert marks(tmp_path) == []
    # Again, later: it goes on.
    for number in range(11, 16):
        write(lake, "overwrite", number)
    plan = lakewarden.plan_warehouse_cleanup(spark, lake, due=True, min_age="0s", tasks=2)
    lakewarden.execute(spark, plan, tasks=2)
    assert versions(lake) == [2, 13, 14, 15]
    tagged = lake.read(tag="training")
    assert tagged.pins[tagged.table(T).id].version == 2


def test_what_is_young_stays_although_it_is_due(spark: SparkSession, lake: Warehouse) -> None:
    lake.set_properties({OLDER_THAN: "1d", RETAIN: None}, T)
    for number in range(2, 6):
        write(lake, "overwrite", number)
    plan = lakewarden.plan_warehouse_cleanup(spark, lake, due=True, min_age="0s", tasks=2)
    assert plan.tables.removal.files_removed == 0
    assert plan.changes == []


def test_a_writer_with_a_session_cleans_in_the_background(
    spark: SparkSession, tmp_path: Path, lake: Warehouse
) -> None:
    lakewarden.keep_clean(spark, lake, min_age="0s", tasks=2)
    for number in range(2, 6):
        write(lake, "overwrite", number)
    soon(lambda: versions(lake) == [3, 4, 5])
    soon(lambda: marks(tmp_path) == [])
    write(lake, "append", 6)
    assert lance.dataset(namespace_client=Namespace(lake), table_id=list(T)).count_rows() == 2


def test_what_fails_in_the_background_is_logged_and_left_for_later(
    spark: SparkSession,
    tmp_path: Path,
    lake: Warehouse,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise StorageError(ErrorKind.STORAGE, "the bucket is on fire")

    monkeypatch.setattr("lakewarden.maintenance.warehouse.execute", broken)
    lakewarden.keep_clean(spark, lake, min_age="0s", tasks=2)
    with caplog.at_level(logging.WARNING, "lakewarden"):
        for number in range(2, 6):
            write(lake, "overwrite", number)
        soon(lambda: "on fire" in caplog.text)
    assert len(marks(tmp_path)) == 1


def test_the_mark_of_a_table_that_asks_for_nothing_any_more_is_just_taken_away(
    spark: SparkSession, tmp_path: Path, lake: Warehouse
) -> None:
    for number in range(2, 6):
        write(lake, "overwrite", number)
    lake.set_properties({INTERVAL: None, RETAIN: None}, T)
    plan = lakewarden.plan_warehouse_cleanup(spark, lake, due=True, min_age="0s", tasks=2)
    lakewarden.execute(spark, plan, tasks=2)
    assert marks(tmp_path) == []
    assert versions(lake) == [1, 2, 3, 4, 5]


def test_lances_own_hook_is_refused(lake: Warehouse) -> None:
    """It would remove versions that tags and branches of the warehouse need."""
    namespace = Namespace(lake)
    found = lance.dataset(namespace_client=namespace, table_id=list(T))
    with pytest.raises(Refused, match="auto-cleanup"), namespace.told():
        found.update_config({"lance.auto_cleanup.interval": "1"})
    assert lance.dataset(namespace_client=Namespace(lake), table_id=list(T)).config() == {}
