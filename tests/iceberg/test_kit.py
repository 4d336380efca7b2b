"""The test kit for Iceberg: every builder makes what it says, and the oracle notices damage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFileContent
from pyiceberg.table import Table
from pyiceberg.table.puffin import PuffinFile

from lakewarden.storage.store import Request
from lakewarden.testing import iceberg, iceberg_oracle, iceberg_rest
from lakewarden.testing.iceberg import LakeCatalog
from lakewarden.testing.iceberg_oracle import KINDS, assert_intact, normal, reachable, unreferenced
from lakewarden.testing.s3 import S3Server, s3_server

if TYPE_CHECKING:
    from tests.iceberg.conftest import Warehouse

DAY_MS = iceberg.DAY_MS


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[LakeCatalog]:
    catalog = iceberg.catalog(tmp_path)
    yield catalog
    catalog.close()


@pytest.fixture
def table(lake: LakeCatalog) -> Table:
    return iceberg.create(lake)


def held(table: Table, **scan: Any) -> list[int]:
    """Return the ids of the rows that a scan reads."""
    return sorted(table.scan(**scan).to_arrow().column("id").to_pylist())


def contents(table: Table) -> set[DataFileContent]:
    current = table.current_snapshot()
    assert current is not None
    return {
        entry.data_file.content
        for manifest in current.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io)
    }


# -- catalogs --------------------------------------------------------------------------------------


def test_another_process_finds_the_catalog_by_name(table: Table, tmp_path: Path) -> None:
    iceberg.append(table, 0)
    home = iceberg.configure(tmp_path / "home", iceberg.catalog_properties(tmp_path))
    program = (
        "from pyiceberg.catalog import load_catalog; "
        "print(load_catalog('lake').load_table('db.t').scan().to_arrow().num_rows)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **home},  # noqa: TID251
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "3"


# -- what PyIceberg writes -------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2, 3])
def test_appends_and_overwrites_in_every_format_version(lake: LakeCatalog, version: int) -> None:
    table = iceberg.create(lake, version=version)
    made = iceberg.grow(table, 2)
    assert iceberg.ids(table) == made
    assert table.format_version == version
    assert held(table) == [0, 1, 2, 10, 11, 12]
    iceberg.overwrite(table, 50)
    assert held(table) == [50, 51, 52]
    assert held(table, snapshot_id=made[0]) == [0, 1, 2]
    assert_intact(table)
    assert not unreferenced(table)


@pytest.mark.parametrize(
    ("partitioning", "expected"),
    [
        ("identity", {"n0": [0, 4], "n1": [1, 5], "n2": [2, 6], "n3": [3]}),
        ("day", {"2026-01-01": [0, 1, 2], "2026-01-02": [3, 4, 5], "2026-01-03": [6]}),
        # From the specification's hash, computed without PyIceberg.
        ("bucket", {"0": [0, 1, 2], "1": [6], "2": [4], "3": [3, 5]}),
    ],
)
def test_partitions(lake: LakeCatalog, partitioning: str, expected: dict[str, list[int]]) -> None:
    table = iceberg.create(lake, partitioning=partitioning)
    iceberg.append(table, 0, 7)
    found = {
        Path(path).parent.name.removeprefix(f"by_{partitioning}="): pq.ParquetFile(path)
        .read(["id"])
        .column("id")
        .to_pylist()
        for path in reachable(table)["content"]
    }
    assert found == expected
    for one in range(7):
        # Planned by partition: a file with a wrong partition value would not be read.
        assert held(table, row_filter=f"id = {one}") == [one]
    iceberg.overwrite(table, 10)
    assert held(table) == [10, 11, 12]
    assert_intact(table)


def test_deleting_rows_rewrites_their_file(table: Table) -> None:
    iceberg.grow(table, 2)
    before = reachable(table)["content"]
    iceberg.delete(table, "id = 1")
    assert held(table) == [0, 2, 10, 11, 12]
    assert len(reachable(table)["content"] - before) == 1
    assert contents(table) == {DataFileContent.DATA}


def test_schema_and_spec_evolve_without_a_snapshot(table: Table) -> None:
    iceberg.append(table, 0)
    iceberg.add_column(table)
    iceberg.repartition(table, "day")
    assert len(iceberg.ids(table)) == 1
    assert len(table.schemas()) == len(table.specs()) == 2
    iceberg.append(table, 10)
    assert held(table) == [0, 1, 2, 10, 11, 12]
    assert_intact(table)


def test_refs(table: Table) -> None:
    first, second = iceberg.grow(table, 2)
    iceberg.tag(table, "release", first, max_ref_age_ms=5)
    iceberg.branch(table, "side", min_snapshots_to_keep=2)
    third = iceberg.append(table, 100, branch="side")
    refs = table.refs()
    assert {name: ref.snapshot_id for name, ref in refs.items()} == {
        "main": second,
        "release": first,
        "side": third,
    }
    assert refs["release"].max_ref_age_ms == 5
    iceberg.unref(table, "side")
    iceberg.unref(table, "release")
    assert set(table.refs()) == {"main"}
    assert third in iceberg.ids(table)


def test_a_staged_snapshot_has_no_ref(table: Table) -> None:
    first = iceberg.append(table, 0)
    staged = iceberg.stage(table, 100)
    assert iceberg.ids(table) == [first, staged]
    assert {ref.snapshot_id for ref in table.refs().values()} == {first}
    assert held(table) == [0, 1, 2]
    assert held(table, snapshot_id=staged) == [0, 1, 2, 100, 101, 102]


def test_a_rollback_leaves_later_snapshots_without_a_ref(table: Table) -> None:
    made = iceberg.grow(table, 3)
    iceberg.rollback(table, made[0])
    assert held(table) == [0, 1, 2]
    assert iceberg.ids(table) == made


@pytest.mark.parametrize(
    ("properties", "kind", "place"),
    [
        ({"write.data.path": "{root}/elsewhere"}, "content", "{root}/elsewhere/"),
        ({"write.metadata.path": "{root}/told"}, "manifest", "{root}/told/"),
    ],
)
def test_files_go_where_the_properties_say(
    lake: LakeCatalog, tmp_path: Path, properties: dict[str, str], kind: str, place: str
) -> None:
    named = {key: value.format(root=tmp_path) for key, value in properties.items()}
    table = iceberg.create(lake, properties=named)
    iceberg.append(table, 0)
    assert all(path.startswith(place.format(root=tmp_path)) for path in reachable(table)[kind])
    assert_intact(table)


def test_the_object_storage_layout_scatters_files(lake: LakeCatalog) -> None:
    table = iceberg.create(lake, properties={"write.object-storage.enabled": "true"})
    iceberg.append(table, 0)
    (path,) = reachable(table)["content"]
    assert len(Path(path).relative_to(normal(table.location())).parts) == 6
    assert_intact(table)


def test_a_file_from_outside(table: Table, tmp_path: Path) -> None:
    path = f"file://{tmp_path}/outside/one.parquet"
    iceberg.add_outside(table, path, 0)
    assert reachable(table)["content"] == {normal(path)}
    assert not normal(path).startswith(normal(table.location()))
    assert held(table) == [0, 1, 2]


# -- statistics and delete files -------------------------------------------------------------------


def test_statistics_are_real_and_can_be_shared(table: Table) -> None:
    first, second = iceberg.grow(table, 2)
    path = iceberg.statistics(table, first)
    assert iceberg.statistics(table, second, path) == path
    footer = PuffinFile(Path(normal(path)).read_bytes()).footer
    assert [blob.snapshot_id for blob in footer.blobs] == [first]
    assert [one.snapshot_id for one in table.metadata.statistics] == [first, second]
    counted = iceberg.partition_statistics(table)
    found = reachable(table)
    assert found["statistics"] == {normal(path)}
    assert found["partition-statistics"] == {normal(counted)}
    assert not unreferenced(table)


@pytest.mark.parametrize("partitioning", ["", "bucket"])
def test_position_deletes(lake: LakeCatalog, partitioning: str) -> None:
    table = iceberg.create(lake, partitioning=partitioning)
    iceberg.grow(table, 2)
    iceberg.position_deletes(table, [1, 11])
    assert held(table) == [0, 2, 10, 12]
    assert contents(table) == {DataFileContent.DATA, DataFileContent.POSITION_DELETES}
    assert_intact(table)
    assert not unreferenced(table)


def test_equality_deletes(table: Table) -> None:
    iceberg.grow(table, 2)
    made = iceberg.equality_deletes(table, [1, 11])
    assert contents(table) == {DataFileContent.DATA, DataFileContent.EQUALITY_DELETES}
    assert_intact(table)
    assert iceberg_oracle.fingerprints(table)[made] == iceberg_oracle.fingerprint(table, made)
    assert not unreferenced(table)
    with pytest.raises(ValueError, match="equality deletes"):
        held(table)


def test_deletion_vectors_share_one_file(lake: LakeCatalog) -> None:
    table = iceberg.create(lake, version=3)
    iceberg.grow(table, 2)
    before = reachable(table)["content"]
    iceberg.deletion_vectors(table, [1, 11])
    assert held(table) == [0, 2, 10, 12]
    (vectors,) = reachable(table)["content"] - before
    assert vectors.endswith(".puffin")
    assert len(PuffinFile(Path(vectors).read_bytes()).footer.blobs) == 2
    assert_intact(table)


# -- many snapshots, and time ----------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2, 3])
def test_synthetic_history(lake: LakeCatalog, version: int) -> None:
    table = iceberg.create(lake, version=version)
    made = iceberg.synthetic(table, 4, 5)
    assert iceberg.ids(table) == made
    sizes = {kind: len(paths) for kind, paths in reachable(table).items()}
    assert sizes["manifest-list"] == sizes["manifest"] == 4
    assert sizes["content"] == 20
    assert iceberg_oracle.missing(table) == reachable(table)["content"]
    assert [one.parent_snapshot_id for one in table.snapshots()] == [None, *made[:-1]]


def test_synthetic_history_with_real_files(table: Table) -> None:
    iceberg.synthetic(table, 4, 5, real=True)
    assert held(table) == list(range(20))
    iceberg.append(table, 100)
    assert len(held(table)) == 23
    assert_intact(table)
    assert not unreferenced(table)


def test_backdating_moves_everything_that_has_a_time(table: Table) -> None:
    made = iceberg.grow(table, 3)
    iceberg.tag(table, "release")
    files = iceberg_oracle.on_disk(table.location())
    added = [reachable_from(table, one) for one in made]
    iceberg.backdate(table, [30, 20, 10])

    now = now_ms()
    ages = [(now - one.timestamp_ms) / DAY_MS for one in table.snapshots()]
    assert ages == pytest.approx([30, 20, 10], abs=0.01)
    logged = [(now - one.timestamp_ms) / DAY_MS for one in table.metadata.snapshot_log]
    assert logged == pytest.approx([30, 20, 10], abs=0.01)
    kept = [(now - one.timestamp_ms) / DAY_MS for one in table.metadata.metadata_log]
    assert kept == pytest.approx([30, 30, 20, 10], abs=0.01)
    assert (now - table.metadata.last_updated_ms) / DAY_MS == pytest.approx(10, abs=0.01)
    for new, days in zip(
        (added[0], added[1] - added[0], added[2] - added[1]), (30, 20, 10), strict=True
    ):
        assert {round(age_of(path)) for path in new} == {days}
    assert round(age_of(normal(table.metadata_location))) == 10
    assert iceberg_oracle.on_disk(table.location()) == files
    iceberg.append(table, 100)
    assert_intact(table)


def test_one_age_moves_the_whole_history(table: Table) -> None:
    iceberg.grow(table, 2)
    before = [one.timestamp_ms for one in table.snapshots()]
    iceberg.backdate(table, 7)
    after = [one.timestamp_ms for one in table.snapshots()]
    assert after[1] - after[0] == before[1] - before[0]
    assert (now_ms() - after[1]) / DAY_MS == pytest.approx(7, abs=0.01)


def test_ages_must_be_in_order(table: Table) -> None:
    iceberg.grow(table, 2)
    with pytest.raises(ValueError, match="must fall"):
        iceberg.backdate(table, [10, 20])


def reachable_from(table: Table, snapshot: int) -> set[str]:
    """Return the files of one snapshot below its manifest list."""
    named = table.metadata.snapshot_by_id(snapshot)
    assert named is not None
    found = {normal(named.manifest_list)}
    for manifest in named.manifests(table.io):
        found.add(normal(manifest.manifest_path))
        entries = manifest.fetch_manifest_entry(table.io)
        found |= {normal(entry.data_file.file_path) for entry in entries}
    return found


def now_ms() -> float:
    # The files of a real catalog are as old as the real clock says.
    return time.time() * 1000  # noqa: TID251


def age_of(path: str) -> float:
    return (now_ms() - Path(path).stat().st_mtime * 1000) / DAY_MS


# -- the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("file:///a/b", "/a/b"),
        ("file:/a/b", "/a/b"),
        ("/a//b/../c", "/a/c"),
        ("s3a://bucket/a//b", "s3://bucket/a//b"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("gs://bucket/a", "gs://bucket/a"),
    ],
)
def test_one_form_of_a_path(path: str, expected: str) -> None:
    assert normal(path) == expected


@pytest.fixture
def rich(lake: LakeCatalog) -> Table:
    """A table with files of every kind, and some that only its history needs."""
    table = iceberg.create(lake)
    iceberg.grow(table, 2)
    iceberg.position_deletes(table, [1])
    iceberg.statistics(table)
    iceberg.partition_statistics(table)
    iceberg.overwrite(table, 50)
    return table


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_misses_every_kind_of_file(rich: Table, kind: str) -> None:
    assert_intact(rich)
    path = Path(min(reachable(rich)[kind]))
    moved = path.rename(path.with_suffix(".away"))
    with pytest.raises((AssertionError, FileNotFoundError), match=path.name):
        assert_intact(rich)
    moved.rename(path)
    assert_intact(rich)


def test_the_oracle_finds_what_nobody_names(rich: Table) -> None:
    assert unreferenced(rich) == set()
    left = iceberg.orphan(rich.location(), "data/left.parquet")
    assert unreferenced(rich) == {str(left)}
    assert age_of(str(left)) == pytest.approx(30, abs=0.01)


def test_the_oracle_notices_other_rows(lake: LakeCatalog) -> None:
    table, other = iceberg.create(lake), iceberg.create(lake, "db.other")
    iceberg.append(table, 0)
    iceberg.append(other, 10)
    expected = iceberg_oracle.fingerprints(table)
    assert_intact(table, expected)
    ((path,), (source,)) = reachable(table)["content"], reachable(other)["content"]
    Path(path).write_bytes(Path(source).read_bytes())
    with pytest.raises(AssertionError, match="reads differently"):
        assert_intact(table, expected)


def test_fingerprints_do_not_depend_on_the_order_of_rows(lake: LakeCatalog) -> None:
    one, two = iceberg.create(lake, "db.one"), iceberg.create(lake, "db.two")
    iceberg.append(one, 0)
    iceberg.append(one, 10)
    iceberg.append(two, 10)
    iceberg.append(two, 0)
    prints = [
        iceberg_oracle.fingerprint(table, iceberg.ids(table)[number])
        for table, number in ((one, 1), (two, 1), (one, 0), (two, 0))
    ]
    assert prints[0] == prints[1]
    assert prints[2] != prints[3]


def test_what_an_expiry_should_have_deleted(table: Table) -> None:
    first = iceberg.append(table, 0)
    stats = iceberg.statistics(table, first)
    lists = reachable(table)["manifest-list"]
    iceberg.overwrite(table, 50)
    before = reachable(table)
    location = table.metadata_location
    gone = [one for one in iceberg.ids(table) if one != iceberg.ids(table)[-1]]
    table.maintenance.expire_snapshots().by_ids(gone).commit()

    left = iceberg_oracle.leftovers(before, table)
    assert left == iceberg_oracle.leftovers(location, table.metadata_location)
    after = reachable(table)
    assert left == {
        path
        for kind in ("manifest-list", "manifest", "content", "statistics")
        for path in before[kind] - after[kind]
    }
    assert normal(stats) in left
    assert lists < left
    assert len(left & before["content"]) == 1
    assert normal(location) not in left
    assert left == unreferenced(table)
    for path in left:
        Path(path).unlink()
    assert_intact(table)


def test_entries_marked_as_deleted_are_not_live(table: Table) -> None:
    first = iceberg.append(table, 0)
    (old,) = reachable(table)["content"]
    iceberg.delete(table, "id >= 0")
    table.maintenance.expire_snapshots().by_id(first).commit()
    current = table.current_snapshot()
    assert current is not None
    marked = {
        normal(entry.data_file.file_path)
        for manifest in current.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
    }
    assert marked == {old}
    assert reachable(table)["content"] == set()
    assert old in unreferenced(table)


def test_metadata_files_that_left_the_log_are_no_leftovers_of_an_expiry(lake: LakeCatalog) -> None:
    table = iceberg.create(lake, properties={"write.metadata.previous-versions-max": "1"})
    first, _ = iceberg.grow(table, 2)
    before = reachable(table)
    table.maintenance.expire_snapshots().by_id(first).commit()
    dropped = before["metadata-log"] - reachable(table)["metadata-log"]
    assert len(dropped) == 1
    left = iceberg_oracle.leftovers(before, table)
    assert left == before["manifest-list"] - reachable(table)["manifest-list"]
    assert dropped < unreferenced(table)


# -- S3 --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.mark.s3
def test_tables_on_s3(server: S3Server, tmp_path: Path) -> None:
    server.create_bucket("kit")
    named = {"warehouse": "s3://kit/warehouse", **iceberg.s3_properties(server)}
    catalog = iceberg.catalog(tmp_path, **named)
    table = iceberg.create(catalog)
    iceberg.grow(table, 2)
    iceberg.position_deletes(table, [1])
    expected = iceberg_oracle.fingerprints(table)
    iceberg.backdate(table, [30, 20, 10])
    assert_intact(table, expected)
    assert not unreferenced(table)
    iceberg.age_on_s3(server, table.location(), 30, tmp_path / "scratch")
    files = table.io.fs_by_scheme("s3", "kit")  # type: ignore[attr-defined]
    paths = [path.removeprefix("s3://") for path in iceberg_oracle.everything(reachable(table))]
    for info in files.get_file_info(paths):
        assert (now_ms() - info.mtime_ns / 1e6) / DAY_MS == pytest.approx(30, abs=0.01)
    assert_intact(table, expected)

    gone = min(reachable(table)["content"])
    with table.io.new_output(f"{table.location()}/data/left").create() as file:
        file.write(b"left over")
    assert unreferenced(table) == {f"{table.location()}/data/left"}
    table.io.delete(gone)
    assert iceberg_oracle.missing(table) == {gone}

    server.reset()
    catalog.load_table("db.t")
    asked = server.requests()
    assert asked[Request.GET] == 1
    catalog.close()


# -- what Iceberg's own code makes and reads -------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["partitioned", "positions", "vectors", "refs", "wap", "stats"])
def test_tables_of_spark_are_intact(spark_warehouse: Warehouse, name: str) -> None:
    table = spark_warehouse.catalog.load_table(f"db.{name}")
    assert_intact(table)
    # Hadoop leaves a checksum beside every file on a local disk.
    assert all(Path(path).name.endswith(".crc") for path in unreferenced(table))


@pytest.mark.nightly
def test_tables_of_spark_have_what_they_are_for(spark_warehouse: Warehouse) -> None:
    load: Callable[[str], Table] = spark_warehouse.catalog.load_table
    versions = {name: load(name).format_version for name in ("db.partitioned", "db.vectors")}
    assert versions == {"db.partitioned": 1, "db.vectors": 3}
    assert len(load("db.partitioned").spec().fields) == 2
    assert DataFileContent.POSITION_DELETES in contents(load("db.positions"))
    assert held(load("db.positions")) == [0, 3, 10, 11, 13]
    assert held(load("db.vectors")) == [0, 3, 10, 12, 13]
    assert any(path.endswith(".puffin") for path in reachable(load("db.vectors"))["content"])
    refs = load("db.refs")
    assert set(refs.refs()) == {"main", "first", "side", "short"}
    assert held(refs) == [0, 1, 2, 3, 10, 11, 12, 13]
    staged = unnamed(load("db.wap"))
    summaries = [one.summary for one in load("db.wap").snapshots() if one.snapshot_id in staged]
    assert {one["wap.id"] for one in summaries if one} == {"published", "staged"}
    stats = reachable(load("db.stats"))
    assert len(stats["statistics"]) == 2
    assert len(stats["partition-statistics"]) == 1


@pytest.mark.nightly
def test_spark_reads_what_the_kit_writes_by_hand(spark_warehouse: Warehouse) -> None:
    assert spark_warehouse.read == {
        "hand.positions": [0, 2, 10, 12],
        "hand.positions WHERE id = 12": [12],
        "hand.equality": [0, 2, 10, 12],
        "hand.vectors": [0, 2, 10, 12],
        "hand.days": [50, 51, 52],
        "hand.days WHERE day = DATE'2026-01-18'": [51, 52],
        "hand.synthetic": [0, 1, 2, 3],
    }


def unnamed(table: Table) -> set[int]:
    """Return the snapshots that are no ancestor of any ref."""
    found = set(iceberg.ids(table))
    for ref in table.refs().values():
        one = table.metadata.snapshot_by_id(ref.snapshot_id)
        while one is not None:
            found.discard(one.snapshot_id)
            parent = one.parent_snapshot_id
            one = None if parent is None else table.metadata.snapshot_by_id(parent)
    return found


@pytest.mark.nightly
def test_the_rest_catalog_serves_the_same_tables(lake: LakeCatalog, tmp_path: Path) -> None:
    table = iceberg.create(lake)
    iceberg.grow(table, 2)
    try:
        serving = iceberg_rest.rest_catalog(tmp_path)
        with serving as remote:
            seen = remote.load_table("db.t")
            assert iceberg.ids(seen) == iceberg.ids(table)
            iceberg.append(seen, 100)
            iceberg.backdate(seen, [30, 20, 10])
            gone = iceberg.ids(seen)[0]
            remote.load_table("db.t").maintenance.expire_snapshots().by_id(gone).commit()
            assert_intact(remote.load_table("db.t"))
    except iceberg_rest.UnavailableError as reason:
        if "CI" in os.environ:  # noqa: TID251
            raise
        pytest.skip(str(reason))
    table.refresh()
    assert held(table) == [0, 1, 2, 10, 11, 12, 100, 101, 102]
    assert gone not in iceberg.ids(table)
    assert json.loads(Path(normal(table.metadata_location)).read_text())["snapshots"]
