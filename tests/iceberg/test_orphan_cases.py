"""The cases of Iceberg's own orphan tests that apply here, and those that its users reported.

Numbers are those of our list of peers' behaviours.  Each case is a table; all that need the same
rules are cleaned in one run, as users do.  After it, PyIceberg alone must find everything that any
snapshot names, and exactly the expected files may have gone.
"""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyspark.sql import SparkSession

import lakewarden
from lakewarden.errors import ErrorKind, LakewardenError, Refused, UsageError
from lakewarden.testing import iceberg as kit
from lakewarden.testing import iceberg_oracle as oracle
from lakewarden.testing import tables as lance_kit

pytestmark = pytest.mark.spark

OLD = 30.0
NFC, NFD = "gr\u00fcn", unicodedata.normalize("NFD", "gr\u00fcn")


@dataclass
class Lake:
    """A catalog, a directory, and what runs took away from it."""

    spark: SparkSession
    root: Path
    catalogs: dict[str, kit.LakeCatalog] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.catalogs.setdefault("lake", kit.catalog(self.root))

    @property
    def catalog(self) -> kit.LakeCatalog:
        return self.catalogs["lake"]

    def other(self, name: str = "other") -> kit.LakeCatalog:
        """Return a catalog of which ours knows nothing."""
        if name not in self.catalogs:
            self.catalogs[name] = kit.catalog(self.root / name, name)
        return self.catalogs[name]

    def table(self, name: str, steps: int = 1, **shape: Any) -> Table:
        made = kit.create(self.catalog, f"db.{name}", **shape)
        kit.grow(made, steps)
        return made

    def home(self, name: str) -> Path:
        return self.root / "warehouse" / "db" / name

    def orphan(self, name: str, path: str = "data/left.parquet", days: float = OLD) -> Path:
        return kit.orphan(self.home(name), path, days)

    def plan(self, *targets: str, **rules: Any) -> Any:
        named = [f"iceberg://lake/db.{name}" if "/" not in name else name for name in targets]
        return lakewarden.plan_orphans(
            self.spark, named or "iceberg://lake", catalog=self.catalogs, tasks=4, **rules
        )

    def execute(self, plan: Any) -> Any:
        return lakewarden.execute(self.spark, plan, catalog=self.catalogs, tasks=4)

    def run(
        self, *targets: str, between: Callable[[], object] | None = None, **rules: Any
    ) -> Outcome:
        """Plan and execute, with something happening in between."""
        before = oracle.on_disk(self.root)
        plan = self.plan(*targets, **rules)
        assert oracle.on_disk(self.root) == before, "a plan changes nothing"
        if between is not None:
            between()
            before = oracle.on_disk(self.root)
        receipt = self.execute(plan)
        return Outcome(self, plan, receipt, before - oracle.on_disk(self.root))

    def close(self) -> None:
        for one in self.catalogs.values():
            one.close()


@dataclass
class Outcome:
    """What became of a lake."""

    lake: Lake
    plan: Any
    receipt: Any
    gone: set[str]

    def gone_from(self, name: str) -> set[str]:
        """Return the files that went, below the table's own directory."""
        start = f"{self.lake.home(name)}/"
        return {path.removeprefix(start) for path in self.gone if path.startswith(start)}

    def planned(self, name: str) -> Any:
        return _of(self.plan.tables, name)

    def done(self, name: str) -> Any:
        return _of(self.receipt.tables, name)

    def reasons(self, name: str) -> dict[str, str]:
        number = self.planned(name).table_id
        rows = self.plan.files.filter(f"table_id = {number}").collect()
        return {row.path: row.reason for row in rows}

    def intact(self, name: str) -> None:
        oracle.assert_intact(self.lake.catalog.load_table(f"db.{name}"))

    def refused(self, name: str, kind: ErrorKind) -> None:
        """Nothing of this table went, and it says why, in one line."""
        planned, done = self.planned(name), self.done(name)
        assert planned.error_kind == kind.value, planned.error
        assert "\n" not in planned.error
        assert done.error == planned.error
        assert not self.gone_from(name)
        assert not planned.goes_ahead


def _of(tables: Any, name: str) -> Any:
    named = name if "/" in name else f"iceberg://lake/db.{name}"
    return next(one for one in tables if one.table_key.endswith(named))


def _edit_location(table: Table, location: str) -> None:
    metadata = kit.read_metadata(table, table.metadata_location)
    kit.write_metadata(table, table.metadata_location, {**metadata, "location": location})


def _respell(table: Table, spelled: Callable[[str], str]) -> str:
    """Make the table name its only data file in another way; returns the file's real path."""
    (task,) = table.scan().plan_files()
    file = task.file
    entry = {
        "content": 0, "file_path": spelled(file.file_path), "file_format": "PARQUET",
        "partition": {}, "record_count": file.record_count,
        "file_size_in_bytes": file.file_size_in_bytes, "block_size_in_bytes": 1 << 26,
    }  # fmt: skip
    kit.commit(table, kit.Manifest([entry]), replace=True)
    # Only the new spelling is left: the first snapshot goes from the metadata.
    first, _ = kit.ids(table)
    metadata = kit.read_metadata(table, table.metadata_location)
    metadata["snapshots"] = [s for s in metadata["snapshots"] if s["snapshot-id"] != first]
    metadata["snapshot-log"] = metadata["snapshot-log"][-1:]
    kit.write_metadata(table, table.metadata_location, metadata)
    table.refresh()
    return str(kit.local(file.file_path))


# -- one run over everything ----------------------------------------------------------------------


def _valid_files(lake: Lake) -> None:
    table = lake.table("valid", 3)
    kit.delete(table, "id = 0")
    kit.overwrite(table, 50)
    kit.tag(table, "first", kit.ids(table)[0])
    kit.branch(table, "side", kit.ids(table)[1])
    kit.append(table, 70, branch="side")
    kit.age(table.location(), OLD)
    for path in ("data/left.parquet", "data/deep/er/left.orc", "metadata/left-m0.avro",
                 "metadata/snap-1-left.avro", "metadata/left.stats", "stray", "data/a:b.parquet"):  # fmt: skip
        lake.orphan("valid", path)


VALID_GONE = {
    "data/left.parquet", "data/deep/er/left.orc", "metadata/left-m0.avro",
    "metadata/snap-1-left.avro", "metadata/left.stats", "stray", "data/a:b.parquet",
}  # fmt: skip


def _staged(lake: Lake) -> None:
    table = lake.table("staged")
    kit.stage(table, 100)
    kit.age(table.location(), OLD)
    lake.orphan("staged")


def _ages(lake: Lake) -> None:
    kit.age(lake.table("ages").location(), OLD)
    lake.orphan("ages", "data/older.parquet", 7.01)
    lake.orphan("ages", "data/younger.parquet", 6.99)
    lake.orphan("ages", "data/future.parquet", -3)
    lake.orphan("ages", "data/just.parquet", 0)
    for name, stamp in (("zero", 0), ("before", -5)):
        os.utime(lake.orphan("ages", f"data/{name}.parquet"), (stamp, stamp))


def _metadata_versions(lake: Lake) -> None:
    limits = {
        "write.metadata.previous-versions-max": "2",
        "write.metadata.delete-after-commit.enabled": "false",
    }
    table = lake.table("versions", 5, properties=limits)
    (lake.home("versions") / "metadata" / "version-hint.text").write_text("5")
    (lake.home("versions") / "metadata" / "x.gz.metadata.json").write_bytes(b"no gzip")
    kit.age(table.location(), OLD)


def _partitions(lake: Lake) -> None:
    kit.age(lake.table("partitions", partitioning="identity").location(), OLD)
    for number in range(60):
        lake.orphan("partitions", f"data/by_identity=v{number}/left.parquet")
    lake.orphan("partitions", "/".join(f"d{number}=x" for number in range(40)) + "/left.parquet")


def _statistics(lake: Lake) -> None:
    table = lake.table("statistics", 2)
    first, second = kit.ids(table)
    replaced = [kit.statistics(table, first), kit.partition_statistics(table, first)]
    kit.statistics(table, first)
    kit.partition_statistics(table, first)
    kit.statistics(table, second)
    kit.partition_statistics(table, second)
    kit.age(table.location(), OLD)
    (lake.root / "replaced").write_text("\n".join(replaced))


def _delete_files(lake: Lake) -> None:
    table = lake.table("deletes", 2)
    kit.position_deletes(table, [1])
    kit.equality_deletes(table, [11])
    vectors = lake.table("vectors", 2, version=3)
    kit.deletion_vectors(vectors, [1, 11])
    for one in (table, vectors):
        kit.age(one.location(), OLD)
    lake.orphan("deletes", "data/left-deletes.parquet")
    lake.orphan("vectors", "data/left-deletes.puffin")


def _first_format(lake: Lake) -> None:
    kit.age(lake.table("first_format", 2, version=1).location(), OLD)
    lake.orphan("first_format")


def _empty(lake: Lake) -> None:
    lake.table("empty", 0)
    lake.orphan("empty")


def _hidden(lake: Lake) -> None:
    table = lake.table("hidden")
    with table.update_spec() as change:
        change.add_field("name", IdentityTransform(), "_p")
    kit.append(table, 50)
    kit.age(table.location(), OLD)
    for path in ("_scratch/x", "data/_temporary/0/x.parquet", ".staging/x", "data/_x.parquet",
                 "data/.left.parquet.crc", "data/_q=1/left.parquet", ".trash/x",
                 "data/_p=n1/_x", "_p=n1/left.parquet", "data/_p=n1/left.parquet"):  # fmt: skip
        lake.orphan("hidden", path)


def _names(lake: Lake) -> None:
    for name in ("plain", "slash"):
        lake.orphan("names", f"data/{name} .parquet")
    for path in (f"data/{NFC}/x.parquet", f"data/{NFD}2/x.parquet", "data/100%/x.parquet",
                 "data/a%20b/x", "data/a b/y", "data/a+b/y", "data/q?x#1", "data/~x", "data/x\ny"):  # fmt: skip
        lake.orphan("names", path)
    kit.age(lake.table("names").location(), OLD)


SPELLINGS: dict[str, Callable[[str], str]] = {
    "one_slash": lambda uri: uri.replace("file://", "file:"),
    "bare": lambda uri: uri.removeprefix("file://"),
    "host": lambda uri: uri.replace("file://", "file://localhost"),
    "upper": lambda uri: uri.replace("file:", "FILE:"),
    "double": lambda uri: uri.replace("/data/", "//data//"),
    "dots": lambda uri: uri.replace("/data/", "/./x/../data/"),
    "encoded": lambda uri: uri.replace("00000-", "%30%30000-"),
    "encoded_twice": lambda uri: uri.replace("00000-", "%25300000-"),
    "encoded_dash": lambda uri: re.sub(r"[^/]*$", lambda name: name[0].replace("-", "%2D"), uri),
}


def _spellings(lake: Lake) -> None:
    for name, spelled in SPELLINGS.items():
        table = lake.table(f"spelled_{name}")
        path = _respell(table, spelled)
        (lake.root / f"real_{name}").write_text(path)
        kit.age(table.location(), OLD)
        lake.orphan(f"spelled_{name}")


def _encoded_root(lake: Lake) -> None:
    table = lake.table("encoded_root")
    path = _respell(table, lambda uri: uri.replace("/warehouse/", "/ware%68ouse/"))
    (lake.root / "real_root").write_text(path)
    kit.age(table.location(), OLD)
    lake.orphan("encoded_root")


def _siblings(lake: Lake) -> None:
    kit.age(lake.table("t").location(), OLD)
    lake.orphan("t")
    lake.orphan("t_backup")
    lake.orphan("t.old")
    lake.orphan("t0")


def _linked(lake: Lake) -> None:
    """A location that is reached through a link, and files that are named by both ways."""
    (lake.root / "real").mkdir()
    (lake.root / "link").symlink_to(lake.root / "real")
    table = lake.table("linked", location=f"file://{lake.root}/link/linked")
    _respell(table, lambda uri: uri.replace("/link/", "/real/"))
    kit.append(table, 40)
    kit.age(lake.root / "real", OLD)
    kit.orphan(lake.root / "real" / "linked", "data/left.parquet")
    # A directory inside the table that lies on another disk.
    inside = lake.table("linked_data")
    data = lake.home("linked_data") / "data"
    shutil.move(data, lake.root / "disk")
    data.symlink_to(lake.root / "disk")
    kit.age(inside.location(), OLD)
    kit.age(lake.root / "disk", OLD)
    kit.orphan(lake.root / "disk", "left.parquet")
    lake.orphan("linked_data", "stray")


def _overlapping(lake: Lake) -> None:
    one = lake.table("shared_one")
    lake.table("shared_two", location=f"{one.location()}/")
    outer = lake.table("outer")
    lake.table("inner", location=f"{outer.location()}/sub/inner")
    twice = lake.table("twice")
    lake.catalog.register_table("db.again", twice.metadata_location)
    for name in ("shared_one", "outer", "twice"):
        kit.age(lake.home(name), OLD)
        lake.orphan(name)


def _strangers(lake: Lake) -> None:
    """Tables of another catalog at, and inside, the location of ours; and a Lance table."""
    same = lake.table("with_stranger")
    kit.grow(kit.create(lake.other(), "x.same", location=same.location()), 2)
    outer = lake.table("with_nested")
    kit.grow(kit.create(lake.other(), "x.nested", location=f"{outer.location()}/deep/in"), 2)
    lake.table("with_lance")
    lance_kit.create(lake.home("with_lance") / "vectors.lance")
    lake.table("with_lance_data")
    lance_kit.create(lake.home("with_lance_data") / "data")
    for name in ("with_stranger", "with_nested", "with_lance", "with_lance_data"):
        kit.age(lake.home(name), OLD)
        lake.orphan(name, "stray.parquet")


def _elsewhere(lake: Lake) -> None:
    place = f"file://{lake.root}/elsewhere"
    properties = {
        "write.data.path": f"{place}/data/",
        "write.metadata.path": f"{place}/metadata",
    }
    lake.table("elsewhere", 2, properties=properties)
    kit.age(lake.root / "elsewhere", OLD)
    for path in ("data/left.parquet", "metadata/left-m0.avro", "data/_x"):
        kit.orphan(lake.root / "elsewhere", path)
    kit.orphan(lake.root / "elsewhere", "other/left.parquet")
    lake.orphan("elsewhere")
    # Two tables of the fleet write their data to one place.
    shared = {"write.data.path": f"file://{lake.root}/common"}
    for name in ("common_one", "common_two"):
        lake.table(name, properties=shared)
        lake.orphan(name)
    kit.age(lake.root / "common", OLD)


def _object_storage(lake: Lake) -> None:
    properties = {"write.object-storage.enabled": "true"}
    kit.age(lake.table("hashed", 3, properties=properties).location(), OLD)
    lake.orphan("hashed", "data/0101/1100/0011/10101010/left.parquet")


def _outside(lake: Lake) -> None:
    table = lake.table("outside")
    kit.add_outside(table, f"file://{lake.root}/imported/a.parquet", 200)
    kit.age(table.location(), OLD)
    kit.age(lake.root / "imported", OLD)
    kit.orphan(lake.root / "imported", "b.parquet")
    lake.orphan("outside")
    # A file in one table's directory that only another table needs.
    lake.table("lender")
    borrower = lake.table("borrower")
    kit.add_outside(borrower, f"file://{lake.home('lender')}/data/lent.parquet", 300)
    for name in ("lender", "borrower"):
        kit.age(lake.home(name), OLD)
        lake.orphan(name)


def _damaged(lake: Lake) -> None:
    for name in ("bad_manifest", "bad_list", "bad_metadata", "no_manifest", "no_list", "cut_list",
                 "no_data", "no_metadata"):  # fmt: skip
        table = lake.table(name, 2)
        snapshot = table.metadata.snapshots[0]
        manifest = kit.local(snapshot.manifests(table.io)[0].manifest_path)
        listed, metadata = kit.local(snapshot.manifest_list), kit.local(table.metadata_location)
        data = next(iter((lake.home(name) / "data").iterdir()))
        match name:
            case "bad_manifest":
                manifest.write_bytes(b"Obj\x01 no manifest")
            case "bad_list":
                listed.write_bytes(b"no list")
            case "cut_list":
                listed.write_bytes(listed.read_bytes()[:-40])
            case "bad_metadata":
                metadata.write_text('{"format-version": 2, "loc')
            case _:
                {"no_manifest": manifest, "no_list": listed, "no_data": data,
                 "no_metadata": metadata}[name].unlink()  # fmt: skip
        kit.age(lake.home(name), OLD)
        lake.orphan(name)


def _not_collected(lake: Lake) -> None:
    kit.age(lake.table("gc", properties={"gc.enabled": "false"}).location(), OLD)
    lake.orphan("gc")
    relative = lake.table("relative")
    _edit_location(relative, "warehouse/db/relative")
    kit.age(lake.home("relative"), OLD)
    lake.orphan("relative")


BUILDS = (
    _valid_files, _staged, _ages, _metadata_versions, _partitions, _statistics, _delete_files,
    _first_format, _empty, _hidden, _names, _spellings, _encoded_root, _siblings, _linked, _overlapping,
    _strangers, _elsewhere, _object_storage, _outside, _damaged, _not_collected,
)  # fmt: skip
LEFT = {"data/left.parquet"}


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    made = Lake(spark, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def fleet(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """One run over all tables, and a Lance table of its own in the same call."""
    lake = Lake(spark, tmp_path_factory.mktemp("orphans"))
    for build in BUILDS:
        build(lake)
    vectors = lake.root / "vectors.lance"
    lance_kit.create(vectors)
    lance_kit.age(vectors, OLD)
    kit.orphan(vectors, "data/0123.lance")
    yield lake.run("iceberg://lake", str(vectors))
    lake.close()


def test_or_2_all_valid_files_are_kept(fleet: Outcome) -> None:
    assert fleet.gone_from("valid") == VALID_GONE
    assert fleet.done("valid").removed == fleet.planned("valid").removal
    assert fleet.planned("valid").removal.files_removed == len(VALID_GONE)
    fleet.intact("valid")


def test_or_3_what_goes_is_exactly_what_was_planned(fleet: Outcome) -> None:
    roots = {root.root_id: root.location.uri for root in fleet.plan.roots}
    planned = {f"{roots[row.root_id]}/{row.path}" for row in fleet.plan.deletions.collect()}
    assert fleet.gone == planned
    assert fleet.receipt.removed == fleet.plan.removal


def test_or_4_files_of_staged_snapshots_are_kept(fleet: Outcome) -> None:
    assert fleet.gone_from("staged") == LEFT
    fleet.intact("staged")


def test_or_6_only_what_is_older_than_the_cutoff_goes(fleet: Outcome) -> None:
    assert fleet.gone_from("ages") == {"data/older.parquet"}
    planned = fleet.planned("ages")
    assert planned.kept_unverified == 2, "younger, just"
    assert planned.kept_unknown_age == 3, "future, zero, before"
    assert fleet.done("ages").kept_unknown_age == 3
    fleet.intact("ages")


def test_or_7_metadata_versions_outside_the_log_go(fleet: Outcome) -> None:
    gone = fleet.gone_from("versions")
    assert {path.partition("-")[0] for path in gone} == {
        "metadata/00000", "metadata/00001", "metadata/00002", "metadata/x.gz.metadata.json",
    }  # fmt: skip
    assert fleet.planned("versions").removal.metadata_files_removed == len(gone) == 4
    assert (fleet.lake.home("versions") / "metadata/version-hint.text").exists()
    fleet.intact("versions")


def test_or_8_many_and_deep_partitions_are_listed(fleet: Outcome) -> None:
    gone = fleet.gone_from("partitions")
    assert len(gone) == 61
    assert all(path.endswith("left.parquet") for path in gone)
    fleet.intact("partitions")


def test_or_11_a_relative_location_is_refused(fleet: Outcome) -> None:
    fleet.refused("relative", ErrorKind.UNKNOWN_SCHEME)


def test_or_13_a_table_without_garbage_collection_is_refused(fleet: Outcome) -> None:
    fleet.refused("gc", ErrorKind.GC_DISABLED)


def test_or_15_statistics_are_kept_while_they_are_named(fleet: Outcome) -> None:
    replaced = (fleet.lake.root / "replaced").read_text().splitlines()
    home = f"{fleet.lake.home('statistics')}/"
    names = {str(kit.local(path)).removeprefix(home) for path in replaced}
    assert fleet.gone_from("statistics") == names
    fleet.intact("statistics")


@pytest.mark.parametrize(
    ("name", "left"),
    [("deletes", "data/left-deletes.parquet"), ("vectors", "data/left-deletes.puffin")],
)
def test_or_16_live_delete_files_are_kept(fleet: Outcome, name: str, left: str) -> None:
    assert fleet.gone_from(name) == {left}
    fleet.intact(name)


@pytest.mark.parametrize("name", ["first_format", "empty"])
def test_or_23_first_format_and_empty_tables(fleet: Outcome, name: str) -> None:
    assert fleet.gone_from(name) == LEFT
    fleet.intact(name)


def test_or_32_hidden_paths_stay_but_partitions_are_not_hidden(fleet: Outcome) -> None:
    assert fleet.gone_from("hidden") == {"_p=n1/left.parquet", "data/_p=n1/left.parquet"}
    assert fleet.planned("hidden").kept_unknown_kind == 8
    fleet.intact("hidden")


def test_or_30_odd_names_are_listed_and_deleted_as_they_are(fleet: Outcome) -> None:
    assert len(fleet.gone_from("names")) == 11
    assert not {path for path in fleet.gone_from("names") if path.startswith("metadata")}
    fleet.intact("names")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_or_18_a_file_named_by_another_spelling_is_kept(fleet: Outcome, spelling: str) -> None:
    name = f"spelled_{spelling}"
    real = Path((fleet.lake.root / f"real_{spelling}").read_text())
    assert real.exists()
    assert fleet.planned(name).error is None
    relative = str(real.relative_to(fleet.lake.home(name)))
    assert fleet.reasons(name)[relative] == "in_use"
    assert "data/left.parquet" in fleet.gone_from(name)


def test_or_18_a_location_in_another_spelling_is_in_doubt(fleet: Outcome) -> None:
    fleet.refused("encoded_root", ErrorKind.PREFIX_MISMATCH)
    assert Path((fleet.lake.root / "real_root").read_text()).exists()


def test_or_28_neighbours_with_longer_names_are_left_alone(fleet: Outcome) -> None:
    assert fleet.gone_from("t") == LEFT
    for name in ("t_backup", "t.old", "t0"):
        assert (fleet.lake.home(name) / "data/left.parquet").exists()
    fleet.intact("t")


def test_or_28_a_linked_location_is_followed(fleet: Outcome) -> None:
    table = fleet.lake.catalog.load_table("db.linked")
    oracle.assert_intact(table)
    real = f"{fleet.lake.root}/real/linked/"
    gone = {path for path in fleet.gone if path.startswith(real)}
    assert f"{real}data/left.parquet" in gone
    # The snapshot that _respell took out of the metadata left its list and manifest.
    assert all("/metadata/" in path for path in gone - {f"{real}data/left.parquet"})


def test_or_28_a_linked_directory_inside_is_not_entered(fleet: Outcome) -> None:
    assert (fleet.lake.root / "disk" / "left.parquet").exists()
    assert (fleet.lake.home("linked_data") / "data").is_symlink()
    fleet.intact("linked_data")


@pytest.mark.parametrize("name", ["shared_one", "shared_two", "outer", "inner", "twice", "again"])
def test_or_26_tables_that_overlap_are_refused(fleet: Outcome, name: str) -> None:
    fleet.refused(name, ErrorKind.LOCATION_OVERLAP)
    fleet.intact(name)


@pytest.mark.parametrize(
    ("name", "foreign"),
    [("with_stranger", "x.same"), ("with_nested", "x.nested"), ("with_lance", ""),
     ("with_lance_data", "")],
)  # fmt: skip
def test_or_26_tables_of_others_inside_are_noticed(fleet: Outcome, name: str, foreign: str) -> None:
    fleet.refused(name, ErrorKind.LOCATION_OVERLAP)
    fleet.intact(name)
    if foreign:
        oracle.assert_intact(fleet.lake.other().load_table(foreign))


def test_or_29_orphans_are_found_where_writers_were_sent(fleet: Outcome) -> None:
    start = f"{fleet.lake.root}/elsewhere/"
    assert {path.removeprefix(start) for path in fleet.gone if path.startswith(start)} == {
        "data/left.parquet", "metadata/left-m0.avro",
    }  # fmt: skip
    assert fleet.gone_from("elsewhere") == LEFT
    fleet.intact("elsewhere")


@pytest.mark.parametrize("name", ["common_one", "common_two"])
def test_or_26_live_files_in_a_shared_data_path_are_kept(fleet: Outcome, name: str) -> None:
    assert fleet.gone_from(name) == LEFT
    fleet.intact(name)


def test_or_8_the_object_storage_layout_is_listed(fleet: Outcome) -> None:
    assert fleet.gone_from("hashed") == {"data/0101/1100/0011/10101010/left.parquet"}
    fleet.intact("hashed")


def test_or_29_files_outside_survive_and_are_not_looked_at(fleet: Outcome) -> None:
    assert fleet.gone_from("outside") == LEFT
    assert (fleet.lake.root / "imported" / "b.parquet").exists()
    fleet.intact("outside")


def test_or_29_a_file_that_only_another_table_needs_is_kept(fleet: Outcome) -> None:
    assert fleet.gone_from("lender") == LEFT
    assert fleet.gone_from("borrower") == LEFT
    fleet.intact("lender")
    fleet.intact("borrower")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bad_manifest", ErrorKind.CORRUPT_MANIFEST),
        ("bad_list", ErrorKind.CORRUPT_MANIFEST),
        ("cut_list", ErrorKind.CORRUPT_MANIFEST),
        ("bad_metadata", ErrorKind.CORRUPT_MANIFEST),
        ("no_manifest", ErrorKind.NOT_FOUND),
        ("no_list", ErrorKind.DAMAGED_VERSION),
        ("no_data", ErrorKind.DAMAGED_VERSION),
        ("no_metadata", ErrorKind.NOT_FOUND),
    ],
)
def test_or_23_a_damaged_table_is_left_alone(fleet: Outcome, name: str, kind: ErrorKind) -> None:
    fleet.refused(name, kind)


def test_or_12_a_lance_table_goes_on_beside_damaged_ones(fleet: Outcome) -> None:
    done = _of(fleet.receipt.tables, "/vectors.lance")
    assert done.error is None
    assert done.removed.files_removed == 1
    assert not (fleet.lake.root / "vectors.lance/data/0123.lance").exists()


# -- between plan and execution -------------------------------------------------------------------


def _old_data(lake: Lake, name: str, start: int = 500) -> str:
    """Leave an old data file that could be added to a table; returns its URI."""
    path = lake.orphan(name, "data/ready.parquet")
    pq.write_table(kit.rows(start), path)
    kit.age(lake.home(name), OLD)
    return f"file://{path}"


@pytest.fixture(scope="module")
def changed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """Tables that others change after they were planned."""
    lake = Lake(spark, tmp_path_factory.mktemp("changed"))
    names = ("quiet", "adds", "appends", "remade", "dropped", "described", "restored", "watched",
             "spelled", "borrowed")  # fmt: skip
    tables = {name: lake.table(name, 2) for name in names}
    beside = lake.table("beside")
    idle = lake.table("idle")
    ready = {name: _old_data(lake, name) for name in ("adds", "watched", "borrowed")}
    statistics = lake.home("described") / "metadata" / "old.stats"
    kit.statistics(tables["described"], path=f"file://{statistics}")
    kit.statistics(tables["described"])
    respelled = _respelled_entry(lake)
    old_metadata = tables["restored"].metadata_location
    for _ in range(3):
        kit.append(tables["restored"], 900)
    with tables["restored"].transaction() as change:
        change.set_properties({"write.metadata.previous-versions-max": "1"})
    kit.append(tables["restored"], 950)
    for name in (*names, "beside", "idle"):
        kit.age(lake.home(name), OLD)
        if name != "idle":
            lake.orphan(name)

    def meanwhile() -> None:
        tables["adds"].add_files([ready["adds"]])
        kit.append(tables["appends"], 700)
        _remake(lake, "remade")
        lake.catalog.drop_table("db.dropped")
        kit.statistics(tables["described"], path=f"file://{statistics}")
        lake.catalog.drop_table("db.restored")
        lake.catalog.register_table("db.restored", old_metadata)
        beside.add_files([ready["watched"]])
        idle.add_files([ready["borrowed"]])
        kit.commit(tables["spelled"], kit.Manifest([respelled]))

    targets = [*names, "idle"]
    yield lake.run(*targets, between=meanwhile, protect=["iceberg://lake/db.beside"])
    lake.close()


def _respelled_entry(lake: Lake) -> dict[str, Any]:
    """Return an entry that names an old file with a scheme that means the same to its user."""
    uri = _old_data(lake, "spelled")
    return {
        "content": 0, "file_path": uri.replace("file://", "nfs://"), "file_format": "PARQUET",
        "partition": {}, "record_count": 3, "block_size_in_bytes": 1 << 26,
        "file_size_in_bytes": kit.local(uri).stat().st_size,
    }  # fmt: skip


def _remake(lake: Lake, name: str) -> None:
    lake.catalog.drop_table(f"db.{name}")
    lake.table(name, 1)


@pytest.mark.nightly
def test_or_23_a_quiet_table_goes_on(changed: Outcome) -> None:
    assert changed.gone_from("quiet") == LEFT
    changed.intact("quiet")


def test_or_23_an_old_file_that_is_added_meanwhile_survives(changed: Outcome) -> None:
    assert not changed.gone_from("adds")
    assert changed.done("adds").outdated
    changed.intact("adds")


def test_or_23_an_append_meanwhile_stops_nothing(changed: Outcome) -> None:
    assert changed.gone_from("appends") == LEFT
    assert changed.done("appends").error is None
    changed.intact("appends")


def test_or_23_a_table_that_was_made_again_is_left_alone(changed: Outcome) -> None:
    assert not changed.gone_from("remade")
    assert changed.done("remade").outdated
    changed.intact("remade")


def test_or_23_a_dropped_table_is_left_alone(changed: Outcome) -> None:
    assert not changed.gone_from("dropped")
    assert changed.done("dropped").error_kind == ErrorKind.NOT_FOUND.value


def test_or_15_statistics_that_are_named_meanwhile_survive(changed: Outcome) -> None:
    assert "metadata/old.stats" not in changed.gone_from("described")
    changed.intact("described")


def test_or_7_metadata_that_is_current_again_survives(changed: Outcome) -> None:
    changed.intact("restored")


def test_or_29_a_protected_table_may_take_an_old_file_meanwhile(changed: Outcome) -> None:
    assert "data/ready.parquet" not in changed.gone_from("watched")
    changed.intact("beside")


def test_or_29_a_table_with_nothing_to_remove_may_take_one_too(changed: Outcome) -> None:
    assert "data/ready.parquet" not in changed.gone_from("borrowed")
    changed.intact("idle")


def test_or_19_a_file_that_is_named_by_another_scheme_meanwhile_survives(changed: Outcome) -> None:
    assert "data/ready.parquet" not in changed.gone_from("spelled")


# -- tables nobody asked about --------------------------------------------------------------------


@pytest.mark.nightly
def test_or_26_a_data_path_shared_with_another_table_is_not_touched(lake: Lake) -> None:
    """The other tables are in the catalog, but no targets: their manifests are not read."""
    shared = {"write.data.path": f"file://{lake.root}/common"}
    for name in ("one", "two"):
        lake.table(name, properties=shared)
    # One writes into the directory of a table that is no target.
    lake.table("host")
    lake.table("guest", properties={"write.data.path": f"file://{lake.home('host')}/data"})
    # And one that is no target writes into the directory of a target.
    lake.table("landlord")
    lake.table("tenant", properties={"write.data.path": f"file://{lake.home('landlord')}/rooms"})
    kit.age(lake.root, OLD)
    for name in ("one", "guest", "landlord"):
        lake.orphan(name)
    lake.run("one", "guest", "landlord")
    lost = {
        name: oracle.missing(lake.catalog.load_table(f"db.{name}"))
        for name in ("one", "two", "host", "guest", "landlord", "tenant")
    }
    assert not {name for name, files in lost.items() if files}


def test_or_26_a_shared_data_path_is_not_touched_if_one_table_cannot_be_read(lake: Lake) -> None:
    shared = {"write.data.path": f"file://{lake.root}/common"}
    for name in ("one", "two"):
        lake.table(name, properties=shared)
    before = oracle.everything(oracle.reachable(lake.catalog.load_table("db.two")))
    two = lake.catalog.load_table("db.two")
    manifest = two.metadata.snapshots[0].manifests(two.io)[0].manifest_path
    kit.local(manifest).write_bytes(b"cut")
    kit.age(lake.root, OLD)
    lake.orphan("one")
    lake.run("one", "two")
    assert not {path for path in before if not Path(path).exists()}


@pytest.mark.nightly
def test_or_26_an_unreadable_table_of_the_catalog_may_lie_anywhere(lake: Lake) -> None:
    """Its location is in its metadata, which cannot be read: it may be inside ours."""
    outer = lake.table("outer")
    inner = lake.table(
        "inner",
        location=f"{outer.location()}/inner",
        properties={"write.metadata.path": f"file://{lake.root}/metadata"},
    )
    data = {path for path in oracle.on_disk(lake.root) if "/inner/data/" in path}
    assert data
    kit.age(lake.root, OLD)
    moved = kit.local(inner.metadata_location)
    moved.rename(moved.with_suffix(".away"))
    lake.orphan("outer")
    lake.run("outer")
    assert data <= oracle.on_disk(lake.root)


def _stranger(lake: Lake, name: str) -> Table:
    """A table of another catalog at the location of one of ours, with old data."""
    mine = lake.table(name)
    foreign = kit.create(lake.other(), f"x.{name}", location=mine.location())
    kit.grow(foreign, 2)
    kit.age(lake.home(name), OLD)
    lake.orphan(name)
    return foreign


def test_or_26_a_stranger_that_has_just_committed_is_noticed(lake: Lake) -> None:
    """All its metadata files are young, its data is old."""
    foreign = _stranger(lake, "busy")
    for path in oracle.reachable(foreign)["metadata-log"] | oracle.reachable(foreign)["metadata"]:
        os.utime(path)
    outcome = lake.run("busy")
    oracle.assert_intact(foreign)
    outcome.refused("busy", ErrorKind.LOCATION_OVERLAP)


@pytest.mark.nightly
def test_or_26_a_stranger_is_noticed_among_failed_commits(lake: Lake) -> None:
    """Metadata files that our own failed commits left must not hide it."""
    foreign = _stranger(lake, "crowd")
    mine = lake.catalog.load_table("db.crowd")
    for number in range(6):
        made = mine.location_provider().new_table_metadata_file_location(1)
        kit.write_metadata(mine, made, kit.read_metadata(mine, mine.metadata_location))
        then = kit.local(made).stat().st_mtime - (20 + number) * kit.DAY
        os.utime(kit.local(made), (then, then))
    outcome = lake.run("crowd")
    oracle.assert_intact(foreign)
    outcome.refused("crowd", ErrorKind.LOCATION_OVERLAP)


def test_or_5_only_the_given_place_is_cleaned(lake: Lake) -> None:
    table = lake.table("part", 2)
    kit.age(table.location(), OLD)
    for path in ("data/left.parquet", "metadata/left-m0.avro", "data2/left.parquet", "stray"):
        lake.orphan("part", path)
    outcome = lake.run("part", location=f"{table.location()}/data")
    assert outcome.gone_from("part") == LEFT
    outcome.intact("part")
    for outside in (f"file://{lake.root}/warehouse", f"{table.location()}2", "s3://other/data"):
        with pytest.raises(UsageError, match="not inside"):
            lake.plan("part", location=outside)


@pytest.mark.nightly
def test_or_5_a_stranger_is_noticed_when_only_data_is_cleaned(lake: Lake) -> None:
    foreign = _stranger(lake, "partly")
    outcome = lake.run("partly", location=f"file://{lake.home('partly')}/data")
    oracle.assert_intact(foreign)
    outcome.refused("partly", ErrorKind.LOCATION_OVERLAP)


def test_or_29_a_protected_table_that_cannot_be_read_stops_everything(lake: Lake) -> None:
    lake.table("lender")
    borrower = lake.table("borrower")
    lent = lake.home("lender") / "data/lent.parquet"
    kit.add_outside(borrower, f"file://{lent}", 300)
    snapshot = borrower.metadata.snapshots[-1]
    kit.local(snapshot.manifest_list).write_bytes(b"cut")
    kit.age(lake.root / "warehouse", OLD)
    with suppress(Refused):
        lake.run("lender", protect=["iceberg://lake/db.borrower"])
    assert lent.exists()


def test_or_13_a_table_without_garbage_collection_still_protects(lake: Lake) -> None:
    """Spark's `snapshot` makes such tables: they use the files of another one."""
    lake.table("source")
    copy = lake.table("copy", properties={"gc.enabled": "false"})
    kit.add_outside(copy, f"file://{lake.home('source')}/data/used.parquet", 300)
    kit.age(lake.root / "warehouse", OLD)
    lake.orphan("source")
    outcome = lake.run("source", "copy")
    assert outcome.gone_from("source") <= LEFT
    outcome.intact("copy")


# -- rules ----------------------------------------------------------------------------------------


def test_or_1_a_preview_lists_and_deletes_nothing(lake: Lake) -> None:
    kit.age(lake.table("t").location(), OLD)
    young = lake.orphan("t", "data/young.parquet", 1.5)
    for number in range(10):
        lake.orphan("t", f"data/left-{number}.parquet", 3)
    nothing = lake.plan("t")
    assert nothing.removal.files_removed == 0, "the default is seven days"
    assert nothing.tables[0].kept_unverified == 11
    plan = lake.plan("t", older_than="2d")
    assert plan.removal.files_removed == 10
    # OR-22: a sample is a sample, the count is right.
    assert len(plan.orphans(limit=5)) == 5
    assert all(f"{lake.home('t')}/data/left-" in row["path"] for row in plan.orphans(limit=5))
    before = oracle.on_disk(lake.root)
    assert lake.execute(nothing).removed.files_removed == 0
    assert oracle.on_disk(lake.root) == before
    assert lake.execute(plan).removed.files_removed == 10
    assert young.exists()
    again = lake.plan("t", older_than="2d")
    assert again.removal.files_removed == 0
    oracle.assert_intact(lake.catalog.load_table("db.t"))


def test_or_24_less_than_a_day_is_refused(lake: Lake) -> None:
    table = lake.table("t")
    lake.orphan("t", days=0.5)
    for older_than in ("0s", "23h", "1439m"):
        with pytest.raises(Refused, match=r"24 hours|1 day") as refused:
            lake.plan("t", older_than=older_than)
        assert refused.value.kind is ErrorKind.RETENTION_TOO_SHORT
    assert lake.plan("t", older_than="24h").removal.files_removed == 0
    outcome = lake.run("t", older_than="1h", unsafe_below_floor=True)
    assert outcome.gone_from("t") == LEFT
    oracle.assert_intact(table)


def test_or_23_bad_arguments_say_so(lake: Lake) -> None:
    lake.table("t")
    for target in ("missing", "iceberg://lake/nowhere.t", "iceberg://lake/a/b", "iceberg://"):
        with pytest.raises(LakewardenError) as error:
            lake.plan(target)
        assert "\n" not in error.value.message
    with pytest.raises(ValueError, match="wrong"):
        lake.plan("t", prefix_mismatch="wrong")


def _with_prefix(prefix: str, uri: str) -> str:
    return uri.replace("file://", prefix)


@pytest.fixture(scope="module")
def foreign(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """Tables that name files with a scheme or authority nobody here can reach."""
    lake = Lake(spark, tmp_path_factory.mktemp("prefixes"))
    for name, prefix in (("scheme", "hdfs://nn:8020"), ("no_authority", "hdfs:")):
        table = lake.table(name)
        _respell(table, partial(_with_prefix, prefix))
        kit.age(table.location(), OLD)
        lake.orphan(name)
    yield lake
    lake.close()


def _live(lake: Lake, name: str) -> str:
    (path,) = (lake.home(name) / "data").glob("00000-*")
    return str(path.relative_to(lake.home(name)))


@pytest.mark.nightly
def test_or_19_another_prefix_is_an_error_until_it_is_mapped(foreign: Lake) -> None:
    plan = foreign.plan("scheme", "no_authority")
    scheme, bare = plan.tables
    assert scheme.error_kind == ErrorKind.PREFIX_MISMATCH.value
    assert scheme.removal.files_removed == 0
    # OR-18: without an authority a name does not say where, so it means this file.
    assert bare.error is None
    reasons = {row.path: row.reason for row in plan.files.collect() if row.table_id == 1}
    assert reasons[_live(foreign, "no_authority")] == "in_use"


@pytest.mark.parametrize(
    "equal",
    [
        {"equal_schemes": {"hdfs": "file"}, "equal_authorities": {"nn:8020": ""}},
        {"prefix_mismatch": "ignore"},
    ],
)
def test_or_20_mapped_or_ignored_it_is_kept(foreign: Lake, equal: dict[str, Any]) -> None:
    plan = foreign.plan("scheme", "no_authority", **equal)
    assert [table.error for table in plan.tables] == [None, None]
    gone = {(row.table_id, row.path) for row in plan.deletions.collect()}
    assert {(0, "data/left.parquet"), (1, "data/left.parquet")} <= gone
    assert (0, _live(foreign, "scheme")) not in gone
    assert (1, _live(foreign, "no_authority")) not in gone


@pytest.mark.nightly
def test_or_20_asked_to_delete_it_goes(foreign: Lake) -> None:
    plan = foreign.plan("scheme", "no_authority", prefix_mismatch="delete")
    gone = {(row.table_id, row.path) for row in plan.deletions.collect()}
    assert (0, _live(foreign, "scheme")) in gone
    assert (1, _live(foreign, "no_authority")) not in gone, "nothing says that it is another file"


@pytest.mark.nightly
def test_or_29_a_protected_table_is_read_and_not_changed(lake: Lake) -> None:
    lake.table("lender")
    borrower = lake.table("borrower")
    kit.add_outside(borrower, f"file://{lake.home('lender')}/data/lent.parquet", 300)
    kit.age(lake.root / "warehouse", OLD)
    for name in ("lender", "borrower"):
        lake.orphan(name)
    outcome = lake.run("lender", protect=["iceberg://lake/db.borrower"])
    assert outcome.gone_from("lender") == LEFT
    assert not outcome.gone_from("borrower")
    assert outcome.planned("borrower").skipped
    outcome.intact("borrower")
    with pytest.raises(LakewardenError):
        lake.plan("lender", protect=["iceberg://lake/db.nobody"])


def test_or_26_without_the_guard_targets_are_still_compared(lake: Lake) -> None:
    one = lake.table("one")
    lake.table("two", location=one.location())
    kit.age(lake.home("one"), OLD)
    lake.orphan("one")
    outcome = lake.run("one", "two", guard="targets")
    outcome.refused("one", ErrorKind.LOCATION_OVERLAP)
    outcome.refused("two", ErrorKind.LOCATION_OVERLAP)
    # The other table is not asked, but its metadata lies in the same directory.
    alone = lake.run("one", guard="targets")
    alone.refused("one", ErrorKind.LOCATION_OVERLAP)
    alone.intact("two")
