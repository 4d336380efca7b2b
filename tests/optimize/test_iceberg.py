"""Iceberg tables through the whole of optimize: alone in a catalog, and with Lance tables of a warehouse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog

from lakewarden.errors import Exit
from lakewarden.formats.iceberg.catalog import Lake as Catalogs
from lakewarden.maintenance.fleet import parse_targets
from lakewarden.maintenance.places import Alone
from lakewarden.storage.opening import Opener
from lakewarden.testing import iceberg
from lakewarden.warehouse.iceberg import WarehouseCatalog
from lakewarden.warehouse.warehouse import Warehouse
from tests.optimize.tuning import Interrupted, Lake, Tuner, everything

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("id", pa.int64()), ("day", pa.string())])


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with iceberg.catalog(tmp_path / "lake") as found:
        found.create_namespace("db")
        yield found


def place(catalog: Catalog, **options: Any) -> Alone:
    targets = parse_targets(["iceberg://lake/db"])
    return Alone(targets, Opener(), Catalogs(None, {"lake": catalog}), **options)


def some(start: int) -> pa.Table:
    return pa.table(
        {"id": range(start, start + 10), "day": [f"d{start // 10}"] * 10}, schema=SCHEMA
    )


def fill(catalog: Catalog, name: str, pieces: int = 7) -> Any:
    table = catalog.create_table(f"db.{name}", SCHEMA)
    for at in range(pieces):
        table.append(some(at * 10))
    return table


def rows(table: Any) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in table.scan().to_arrow().to_pylist())


def files(table: Any) -> int:
    return len(list(table.scan().plan_files()))


def test_a_whole_namespace(tuner: Tuner, catalog: Catalog) -> None:
    before = {name: rows(fill(catalog, name)) for name in ("a", "b")}
    fill(catalog, "few", 2)
    receipt = tuner.run(place(catalog))
    assert [(row.table_key.rpartition(".")[2], row.committed) for row in receipt.rows] == [
        ("a", True),
        ("b", True),
        ("few", False),
    ]
    for name, expected in before.items():
        table = catalog.load_table(f"db.{name}")
        assert rows(table) == expected
        assert files(table) == 1
        snapshot = table.current_snapshot()
        assert snapshot is not None
        assert snapshot.summary is not None
        assert snapshot.summary["lakewarden.maintenance"] == "optimize"
        # Old snapshots are what they were.
        first = table.metadata.snapshots[0].snapshot_id
        assert table.scan(snapshot_id=first).to_arrow().num_rows == 10
    assert not any(job.needed for job in tuner.plan(place(catalog)).jobs)


def test_rows_deleted_meanwhile_stay_deleted(tuner: Tuner, catalog: Catalog) -> None:
    fill(catalog, "t", 12)
    planned = tuner.plan(place(catalog))
    catalog.load_table("db.t").delete("id = 15")
    catalog.load_table("db.t").append(some(500))
    receipt = tuner.execute(planned)
    assert receipt.exit_code is Exit.DONE
    table = catalog.load_table("db.t")
    ids = Counter(table.scan().to_arrow().column("id").to_pylist())
    assert ids == Counter([*(one for one in range(120) if one != 15), *range(500, 510)])


def test_files_rewritten_for_nothing_are_gone(
    tuner: Tuner, catalog: Catalog, tmp_path: Path
) -> None:
    fill(catalog, "t")
    planned = tuner.plan(place(catalog))
    catalog.load_table("db.t").overwrite(some(900))
    data = tmp_path / "lake" / "warehouse"
    there = {path for path in everything(data) if path.endswith(".parquet")}
    receipt = tuner.execute(planned)
    assert receipt.failed == []
    assert {path for path in everything(data) if path.endswith(".parquet")} == there
    assert rows(catalog.load_table("db.t")) == Counter(
        tuple(row.values()) for row in some(900).to_pylist()
    )


class Racing(iceberg.LakeCatalog):
    """A catalog on which somebody else appends before every commit, once it has made so many."""

    fair: int = 10**9

    def commit_table(self, table: Any, requirements: Any, updates: Any) -> Any:
        self.fair -= 1
        if self.fair < 0:
            fair, self.fair = self.fair, 10**9
            self.load_table(table.name()).append(some(10_000))
            self.fair = fair
        return super().commit_table(table, requirements, updates)


def test_manifests_that_cannot_be_merged_cost_no_file(tuner: Tuner, tmp_path: Path) -> None:
    """The files are committed first: if others are faster then, what is live must stay."""
    settings = iceberg.catalog_properties(tmp_path / "lake")
    (tmp_path / "lake").mkdir()
    settings.pop("type")
    catalog = Racing("lake", **settings)
    with catalog:
        catalog.create_namespace("db")
        table = catalog.create_table(
            "db.t", SCHEMA, properties={"commit.manifest.min-count-to-merge": "2"}
        )
        for at in range(8):
            table.append(some(at * 10))
        planned = tuner.plan(place(catalog))
        assert planned.jobs[0].needed
        catalog.fair = 1
        receipt = tuner.execute(planned)
        catalog.fair = 10**9
        (row,) = receipt.rows
        assert (row.committed, row.error) == (True, None)
        found = catalog.load_table("db.t").scan().to_arrow().column("id").to_pylist()
        assert [one for one in sorted(found) if one < 10_000] == list(range(80))


def test_a_table_that_cannot_be_read_is_that_tables_trouble(tuner: Tuner, catalog: Catalog) -> None:
    fill(catalog, "good")
    bad = fill(catalog, "bad")
    snapshot = bad.current_snapshot()
    assert snapshot is not None
    Path(snapshot.manifests(bad.io)[0].manifest_path.removeprefix("file://")).unlink()
    receipt = tuner.run(place(catalog))
    by_name = {row.table_key.rpartition(".")[2]: row for row in receipt.rows}
    assert by_name["good"].committed
    assert by_name["bad"].error is not None
    assert receipt.exit_code is Exit.PARTIAL


def test_only_files_that_may_hold_such_rows(tuner: Tuner, catalog: Catalog) -> None:
    fill(catalog, "t", 12)
    (row,) = tuner.run(place(catalog), where="id < 60").rows
    assert row.fragments_removed == 6
    assert files(catalog.load_table("db.t")) == 7


def test_both_formats_become_one_version(tuner: Tuner, lake: Lake) -> None:
    lake.fill("vectors")
    with WarehouseCatalog("lake", opened=Warehouse.open(str(lake.root))) as catalog:
        before = rows(fill(catalog, "facts"))
        version = lake.version
        receipt = tuner.run(lake.place())
        assert receipt.version == version + 1 == lake.version
        assert [(row.table_key, row.committed) for row in receipt.rows] == [
            ("db.facts", True),
            ("db.vectors", True),
        ]
        assert rows(catalog.load_table("db.facts")) == before
        assert files(catalog.load_table("db.facts")) == 1
    assert len(lake.open("vectors").get_fragments()) == 1
    # A second run makes no version.
    assert tuner.run(lake.place()).version is None
    # And the way back is open.
    warehouse = Warehouse.open(str(lake.root))
    warehouse.restore(warehouse.read(version=version))
    assert lance.dataset(str(lake.path("vectors"))).count_rows() == 600


def test_a_table_that_changes_before_the_publish_is_tried_again(tuner: Tuner, lake: Lake) -> None:
    with WarehouseCatalog("lake", opened=Warehouse.open(str(lake.root))) as catalog:
        catalog.create_namespace("db")
        fill(catalog, "busy", 8)
        fill(catalog, "calm", 8)
        visits = []

        def delete_once() -> None:
            visits.append(True)
            if len(visits) == 1:
                catalog.load_table("db.busy").delete("id = 33")

        receipt = tuner.run(Interrupted(lake.warehouse, act=delete_once))
        assert receipt.failed == []
        ids = catalog.load_table("db.busy").scan().to_arrow().column("id").to_pylist()
        assert sorted(ids) == [one for one in range(80) if one != 33]
        assert files(catalog.load_table("db.busy")) == 1
        assert files(catalog.load_table("db.calm")) == 1
