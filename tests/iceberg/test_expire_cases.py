"""The cases of Iceberg's and PyIceberg's own expiry tests that apply here, and a few of our own.

IC-* are those of `TestRemoveSnapshots` and of Spark's expire action, PY-* those of PyIceberg's
`test_expire_snapshots`.  Tables that need the same rules are expired in one run, as users do.  After
each case the oracle, which shares no code with us, says what had to go.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyspark.sql import SparkSession

import lakewarden
from lakewarden.errors import Exit, UsageError
from lakewarden.maintenance import fleet, removal
from lakewarden.maintenance.survey import Reading
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import Request
from lakewarden.testing import iceberg as kit
from lakewarden.testing import iceberg_oracle as oracle
from lakewarden.testing import iceberg_rest, iceberg_spark
from lakewarden.testing.faults import FaultyOpener
from lakewarden.world import SystemClock

DAY_MS = kit.DAY_MS
MERGING = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
KEEP, AGE = "history.expire.min-snapshots-to-keep", "history.expire.max-snapshot-age-ms"

Make = Callable[..., Table]


def _nothing() -> None:
    pass


@dataclass
class Built:
    """A table as a case wants it, the snapshots that must be left, and what the test asks about."""

    table: Table
    stays: Iterable[int]
    also: dict[str, Any] = field(default_factory=dict)
    #: What others do between the plan and its execution.
    meanwhile: Callable[[], object] = _nothing
    unreadable: bool = False


Build = Callable[[Make], Built]


@dataclass
class Case:
    """One table before and after its fleet was expired."""

    name: str
    built: Built
    before: oracle.Reach
    prints: dict[int, str]
    location: str
    planned: Any = None
    receipt: Any = None
    gone: set[str] = field(default_factory=set)
    came: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def table(self) -> Table:
        return self.built.table

    @property
    def also(self) -> dict[str, Any]:
        return self.built.also

    def went(self, **counts: int) -> None:
        """Exactly so many files of each kind are gone."""
        removed = self.receipt.removed
        for kind in ("data_files", "manifest_files", "manifest_lists", "statistics_files",
                     "position_delete_files", "equality_delete_files"):  # fmt: skip
            assert getattr(removed, f"{kind}_removed") == counts.get(kind, 0), kind


@dataclass
class Fleet:
    """All cases of one run."""

    cases: dict[str, Case]
    plan: Any
    receipt: Any

    def __getitem__(self, name: str) -> Case:
        return self.cases[name]


@dataclass
class Lab:
    """A catalog with a session to expire its tables."""

    spark: SparkSession
    root: Path
    catalog: Catalog

    def make(self, name: str = "db.t", **options: Any) -> Table:
        if "location" in options:
            options["location"] = options["location"].format(root=self.root)
        return kit.create(self.catalog, name, **options)

    def plan(self, target: str = "db.t", **rules: Any) -> Any:
        return lakewarden.plan_cleanup(
            self.spark, f"iceberg://lake/{target}", catalog={"lake": self.catalog}, tasks=2, **rules
        )

    def execute(self, plan: Any) -> Any:
        return lakewarden.execute(self.spark, plan, catalog={"lake": self.catalog}, tasks=2)

    def execute_failing(self, plan: Any, kind: Request, call: int) -> Any:
        """Execute with one storage call failing."""
        opening = FaultyOpener(
            Opener(), call, "before", str(self.root / f"calls-{time.time_ns()}"), frozenset({kind})
        )
        lake = fleet.open_lake({}, {"lake": self.catalog})
        return removal.execute(plan, Reading(self.spark, opening, SystemClock(), 2, lake=lake))

    def expire(self, built: Built, **rules: Any) -> Case:
        """Plan and execute one table."""
        case = self.seen(built)
        files = self.files()
        plan = self.plan(case.name, **rules)
        assert self.files() == files, "a plan changes nothing"
        receipt = self.execute(plan)
        self.finish([case], files, plan, receipt)
        return case

    def run(self, namespace: str, builds: dict[str, Build], **rules: Any) -> Fleet:
        """Build all tables and expire them together; what others do comes after the plan."""
        built = {
            name: build(partial(self.make, f"{namespace}.{name}")) for name, build in builds.items()
        }
        files = self.files()
        plan = self.plan(namespace, **rules)
        assert self.files() == files, "a plan changes nothing"
        for one in built.values():
            one.meanwhile()
            one.table.refresh()
        cases = {name: self.seen(one) for name, one in built.items()}
        files = self.files()
        receipt = self.execute(plan)
        self.finish(cases.values(), files, plan, receipt)
        gone = files.keys() - self.files().keys()
        assert gone == set().union(*(case.gone for case in cases.values()))
        return Fleet(cases, plan, receipt)

    def seen(self, built: Built) -> Case:
        """Remember what a table is before it is expired."""
        table = built.table
        name, location = ".".join(table.name()), table.metadata_location
        if built.unreadable:
            return Case(name, built, {}, {}, location)
        return Case(name, built, oracle.reachable(table), oracle.fingerprints(table), location)

    def finish(self, cases: Iterable[Case], files: dict[str, int], plan: Any, receipt: Any) -> None:
        """Note what became of the tables."""
        now = self.files()
        for case in cases:
            case.table.refresh()
            mark = f"/{case.table.name()[-1]}/"
            case.gone = {path for path in files.keys() - now.keys() if mark in path}
            case.came = {path for path in now.keys() - files.keys() if mark in path}
            case.sizes = files
            key = f"iceberg://lake/{case.name}"
            case.planned = next(one for one in plan.tables if one.table_key == key)
            case.receipt = next(one for one in receipt.tables if one.table_key == key)

    def files(self) -> dict[str, int]:
        """Return every file of the warehouse, and outside of it, with its size."""
        places = [self.root / "warehouse", self.root / "outside"]
        found = set().union(*(oracle.on_disk(place) for place in places if place.exists()))
        # Java writes Hadoop's checksums beside its files; no table names them.
        return {path: Path(path).stat().st_size for path in found if not path.endswith(".crc")}


def check(case: Case, *, commits: bool = True) -> None:
    """What must hold for every case: only what was due is gone, and all else reads as before."""
    table = case.table
    assert case.receipt.error is None, case.receipt.error
    assert set(kit.ids(table)) == set(case.built.stays)
    assert case.gone == oracle.leftovers(case.before, table)
    if commits:
        assert case.came == {oracle.normal(table.metadata_location)}
        assert table.metadata.metadata_log[-1].metadata_file == case.location
    else:
        assert table.metadata_location == case.location
        assert not case.came
        assert not case.gone
    oracle.assert_intact(table, case.prints)
    removed = case.receipt.removed
    assert removed == case.planned.removal
    assert removed.files_removed == len(case.gone)
    assert removed.bytes_removed == sum(case.sizes[path] for path in case.gone)
    assert removed.old_versions_removed == len(set(case.prints) - set(kit.ids(table)))


def _branches(table: Table, snapshot: int, *names: str) -> None:
    for name in names:
        kit.branch(table, name, snapshot)


def _limit(table: Table, name: str, **limits: int) -> None:
    """Give a branch limits; after its commits, for with each one PyIceberg forgets them."""
    head = table.refs()[name].snapshot_id
    kit.unref(table, name)
    kit.branch(table, name, head, **limits)


def untouched(case: Case) -> None:
    """Nothing was committed and nothing deleted."""
    assert not case.gone
    assert not case.came
    assert case.table.metadata_location == case.location


# Tables that go by their own properties: without any, five days, and one snapshot of each branch.

OLD: dict[str, Build] = {}


def old(build: Build) -> Build:
    """Add a case to the fleet that goes by the tables' own rules."""
    OLD[getattr(build, "__name__", "")] = build
    return build


@pytest.fixture(scope="module")
def lab(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("expire-cases")
    catalog = kit.catalog(root)
    yield Lab(spark, root, catalog)
    catalog.close()


@pytest.fixture(scope="module")
def fleet_of_old(lab: Lab) -> Fleet:
    return lab.run("old", OLD)


@pytest.fixture
def single(spark: SparkSession, tmp_path: Path) -> Iterator[Lab]:
    """A catalog for one test."""
    catalog = kit.catalog(tmp_path)
    yield Lab(spark, tmp_path, catalog)
    catalog.close()


@old
def ic_1(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 3)
    kit.backdate(table, 30)
    return Built(table, made[2:])


def test_ic_1_only_lists_go_while_the_files_live_on(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_1"]
    check(case)
    case.went(manifest_lists=2)


@old
def ic_2(make: Make) -> Built:
    table = make()
    kit.append(table, 0)
    table.delete(AlwaysTrue())
    kit.backdate(table, 30)
    return Built(table, [kit.append(table, 10)])


def test_ic_2_a_file_removed_by_an_expired_delete_goes(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_2"]
    check(case)
    case.went(data_files=1, manifest_files=2, manifest_lists=2)


@old
def ic_3(make: Make) -> Built:
    table = make(properties=MERGING)
    kit.grow(table, 2)
    kit.delete(table, "id < 10")
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:])


def test_ic_3_a_deleted_entry_in_a_merged_manifest(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_3"]
    check(case)
    assert case.receipt.removed.data_files_removed == 1


@old
def ic_4(make: Make) -> Built:
    table = make()
    first, _ = kit.grow(table, 2)
    kit.rollback(table, first)
    kit.backdate(table, 30)
    return Built(table, [first])


def test_ic_4_a_rolled_back_append_goes_with_its_files(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_4"]
    check(case)
    case.went(data_files=1, manifest_files=1, manifest_lists=1)


@old
def ic_5(make: Make) -> Built:
    table = make(properties={KEEP: "2"})
    first, _ = kit.grow(table, 2)
    kit.rollback(table, first)
    third = kit.append(table, 100)
    kit.backdate(table, 30)
    return Built(table, [first, third])


def test_ic_5_a_history_that_is_not_linear(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_5"]
    check(case)
    case.went(data_files=1, manifest_files=1, manifest_lists=1)


@old
def ic_10(make: Make) -> Built:
    table = make(properties={KEEP: "10"})
    made = kit.grow(table, 3)
    kit.backdate(table, 30)
    return Built(table, made)


def test_ic_10_11_fewer_snapshots_than_are_to_be_kept(fleet_of_old: Fleet) -> None:
    check(fleet_of_old["ic_10"], commits=False)


@old
def ic_12(make: Make) -> Built:
    table = make(properties={KEEP: "2"})
    made = kit.grow(table, 5)
    kit.backdate(table, [30, 6, 4, 3, 2])
    return Built(table, made[2:])


def test_ic_12_young_snapshots_stay_beyond_the_number_to_keep(fleet_of_old: Fleet) -> None:
    check(fleet_of_old["ic_12"])


@old
def ic_16(make: Make) -> Built:
    table = make(properties=MERGING)
    kit.grow(table, 2)
    kit.delete(table, "id < 10")
    kit.backdate(table, 30)
    return Built(table, [kit.append(table, 20)])


@old
def ic_17(make: Make) -> Built:
    table = make()
    kit.grow(table, 2)
    kit.delete(table, "id < 10")
    kit.backdate(table, 30)
    return Built(table, [kit.append(table, 20)])


@pytest.mark.parametrize("name", ["ic_16", "ic_17"])
def test_ic_16_17_a_file_deleted_before_a_valid_append(fleet_of_old: Fleet, name: str) -> None:
    case = fleet_of_old[name]
    check(case)
    assert case.receipt.removed.data_files_removed == 1


@old
def ic_22(make: Make) -> Built:
    table = make()
    kit.append(table, 0)
    kit.stage(table, 100)
    kit.backdate(table, 30)
    return Built(table, [kit.append(table, 10)])


def test_ic_22_a_staged_snapshot_that_nobody_published_goes(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_22"]
    check(case)
    case.went(data_files=1, manifest_files=1, manifest_lists=2)


@old
def ic_23(make: Make) -> Built:
    table = make()
    kit.append(table, 0)
    staged = kit.stage(table, 100)
    table.manage_snapshots().set_current_snapshot(staged).commit()
    kit.backdate(table, 30)
    return Built(table, [kit.append(table, 10)])


def test_ic_23_a_staged_snapshot_that_was_published_lives_on(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_23"]
    check(case)
    case.went(manifest_lists=2)


@old
def ic_26(make: Make) -> Built:
    table = make(properties={"gc.enabled": "false"})
    made = kit.grow(table, 3)
    kit.backdate(table, 30)
    return Built(table, made)


def test_ic_26_gc_enabled_false_is_refused_by_name(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_26"]
    untouched(case)
    assert "gc.enabled" in case.planned.error
    assert "gc.enabled" in case.receipt.error
    assert case.receipt.error_kind == "gc_disabled"


@old
def ic_27_number(make: Make) -> Built:
    table = make(properties={KEEP: "2"})
    made = kit.grow(table, 4)
    kit.backdate(table, 30)
    return Built(table, made[2:])


@old
def ic_27_age(make: Make) -> Built:
    table = make(properties={AGE: str(15 * DAY_MS)})
    made = kit.grow(table, 4)
    kit.backdate(table, [30, 20, 10, 6])
    return Built(table, made[2:])


@pytest.mark.parametrize("name", ["ic_27_number", "ic_27_age"])
def test_ic_27_table_properties_are_the_defaults(fleet_of_old: Fleet, name: str) -> None:
    check(fleet_of_old[name])


@old
def ic_28(make: Make) -> Built:
    table = make()
    kit.grow(table, 2)
    kit.position_deletes(table, [1, 11])
    kit.overwrite(table, 50)
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:])


@old
def ic_28_live(make: Make) -> Built:
    table = make()
    kit.grow(table, 2)
    kit.position_deletes(table, [1])
    kit.position_deletes(table, [11])
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:])


def test_ic_28_delete_files_go_when_nothing_names_them(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_28"]
    check(case)
    assert case.receipt.removed.data_files_removed == 2


def test_ic_28_delete_files_in_use_stay(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_28_live"]
    check(case)
    case.went(manifest_lists=3)


@old
def equality(make: Make) -> Built:
    table = make()
    kit.grow(table, 2)
    kit.equality_deletes(table, [1, 11])
    kit.commit(table, operation=Operation.OVERWRITE, replace=True)
    kit.backdate(table, 30)
    return Built(table, [kit.append(table, 50)])


def test_ic_28_equality_deletes_go_when_nothing_names_them(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["equality"]
    check(case)
    assert case.receipt.removed.equality_delete_files_removed == 1


@old
def equality_live(make: Make) -> Built:
    table = make()
    kit.grow(table, 2)
    kit.equality_deletes(table, [1, 11])
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:])


def test_ic_28_equality_deletes_in_use_stay(fleet_of_old: Fleet) -> None:
    check(fleet_of_old["equality_live"])


@old
def vectors(make: Make) -> Built:
    table = make(version=3)
    kit.grow(table, 2)
    kit.deletion_vectors(table, [1, 11])
    current = table.current_snapshot()
    assert current is not None
    held: dict[int, list[Any]] = {0: [], 1: []}
    for manifest in _avro(current.manifest_list):
        entries = _avro(manifest["manifest_path"])
        held[manifest["content"]] += [entry["data_file"] for entry in entries]
    assert len({one["file_path"] for one in held[1]}) == 1
    # One data file goes with its vector; the file of both vectors stays for the other one.
    gone, kept = held[1]
    data = [one for one in held[0] if one["file_path"] != gone["referenced_data_file"]]
    kit.commit(
        table,
        kit.Manifest(data),
        kit.Manifest([kept], 1),
        operation=Operation.OVERWRITE,
        replace=True,
    )
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:])


def _avro(location: str) -> list[Any]:
    with kit.local(location).open("rb") as file:
        return list(fastavro.reader(file))


def test_ic_28_a_file_of_deletion_vectors_stays_while_one_is_in_use(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["vectors"]
    check(case)
    assert case.receipt.removed.position_delete_files_removed == 0
    assert case.receipt.removed.data_files_removed == 1


@old
def vectors_gone(make: Make) -> Built:
    table = make(version=3)
    kit.grow(table, 2)
    kit.deletion_vectors(table, [1, 11])
    kit.overwrite(table, 50)
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:])


def test_ic_28_a_file_of_several_deletion_vectors_goes_once(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["vectors_gone"]
    check(case)
    assert case.receipt.removed.position_delete_files_removed == 1
    assert case.receipt.removed.data_files_removed == 2


@old
def ic_29(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 3)
    kit.tag(table, "short", made[0], max_ref_age_ms=10 * DAY_MS)
    kit.tag(table, "long", made[1], max_ref_age_ms=90 * DAY_MS)
    kit.backdate(table, 30)
    return Built(table, made[1:])


def test_ic_29_tags_past_their_age_are_dropped(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_29"]
    check(case)
    assert set(case.table.refs()) == {"main", "long"}
    assert case.receipt.expired_refs == ("short",)


@old
def ic_30(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 2)
    _branches(table, made[0], "short", "long")
    kit.append(table, 100, branch="short")
    kept = kit.append(table, 200, branch="long")
    _limit(table, "short", max_ref_age_ms=10 * DAY_MS)
    _limit(table, "long", max_ref_age_ms=90 * DAY_MS)
    kit.backdate(table, 30)
    return Built(table, [made[1], kept])


def test_ic_30_branches_past_their_age_are_dropped_but_never_main(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_30"]
    check(case)
    assert set(case.table.refs()) == {"main", "long"}
    assert case.receipt.expired_refs == ("short",)
    assert case.receipt.removed.data_files_removed == 1


@old
def ic_32(make: Make) -> Built:
    table = make(partitioning="identity")
    made = kit.grow(table, 2)
    gone = [kit.statistics(table, made[0]), kit.partition_statistics(table, made[0])]
    kept = [kit.statistics(table, made[1]), kit.partition_statistics(table, made[1])]
    kit.backdate(table, 30)
    return Built(table, made[1:], {"gone": gone, "kept": kept})


def test_ic_32_py_8_statistics_go_with_their_snapshot(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_32"]
    check(case)
    assert {oracle.normal(path) for path in case.also["gone"]} <= case.gone
    metadata = case.table.metadata
    named = [one.statistics_path for one in (*metadata.statistics, *metadata.partition_statistics)]
    assert named == case.also["kept"]
    case.went(manifest_lists=1, statistics_files=2)


@old
def ic_33(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 3)
    first = kit.statistics(table, made[0])
    second = kit.partition_statistics(table, made[0])
    kit.statistics(table, made[2], first)
    kit.partition_statistics(table, made[2], second)
    kit.backdate(table, 30)
    return Built(table, made[2:])


def test_ic_33_statistics_that_a_live_snapshot_uses_stay(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_33"]
    check(case)
    case.went(manifest_lists=2)


@old
def ic_35(make: Make) -> Built:
    table = make()
    kit.append(table, 0)
    head = kit.append(table, 10)
    kit.backdate(table, 30)
    staged = kit.stage(table, 100)
    return Built(table, [head, staged])


def test_ic_35_an_unreferenced_young_snapshot_stays(fleet_of_old: Fleet) -> None:
    check(fleet_of_old["ic_35"])


@old
def ic_36(make: Make) -> Built:
    table = make()
    kit.append(table, 0)
    kit.overwrite(table, 10)
    tagged = kit.tag(table, "v1")
    kit.overwrite(table, 20)
    kit.backdate(table, 30)
    return Built(table, [tagged, kit.ids(table)[-1]])


def test_ic_36_a_tag_protects_no_ancestor(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_36"]
    check(case)
    assert case.receipt.removed.data_files_removed == 1


@old
def ic_37(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 3)
    kit.branch(table, "b", made[1], min_snapshots_to_keep=2)
    kit.append(table, 100)
    kit.backdate(table, 30)
    return Built(table, [made[0], made[1], kit.ids(table)[-1]])


def test_ic_37_the_ancestors_of_a_branch_follow_its_own_retention(fleet_of_old: Fleet) -> None:
    check(fleet_of_old["ic_37"])


@old
def ic_38_number(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 3)
    _branches(table, made[2], "two", "three")
    two = [kit.append(table, 100 + 10 * n, branch="two") for n in range(3)]
    three = [kit.append(table, 200 + 10 * n, branch="three") for n in range(2)]
    _limit(table, "two", min_snapshots_to_keep=2)
    _limit(table, "three", min_snapshots_to_keep=3)
    kit.backdate(table, 30)
    return Built(table, [*two[1:], *three, made[2]])


@old
def ic_38_age(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 2)
    _branches(table, made[1], "old", "young")
    first = [kit.append(table, 100 + 10 * n, branch="old") for n in range(3)]
    second = [kit.append(table, 200 + 10 * n, branch="young") for n in range(2)]
    _limit(table, "old", max_snapshot_age_ms=22 * DAY_MS)
    _limit(table, "young", max_snapshot_age_ms=1 * DAY_MS)
    kit.backdate(table, [40, 35, 30, 20, 15, 10, 3])
    return Built(table, [made[1], *first[1:], second[1]])


@pytest.mark.parametrize("name", ["ic_38_number", "ic_38_age"])
def test_ic_38_each_branch_by_its_own_limits(fleet_of_old: Fleet, name: str) -> None:
    check(fleet_of_old[name])


@old
def ic_42(make: Make) -> Built:
    table = make(partitioning="identity")
    kit.append(table, 0)
    kit.add_column(table)
    kit.append(table, 10)
    kit.repartition(table, "bucket")
    kit.backdate(table, 30)
    table.refresh()
    return Built(table, [kit.append(table, 20)])


def test_ic_42_schemas_and_specs_stay(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_42"]
    check(case)
    assert len(case.table.schemas()) == 2
    assert len(case.table.specs()) == 2


@old
def ic_44(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 3)
    return Built(table, made)


@old
def ic_51(make: Make) -> Built:
    return Built(make(), [])


@pytest.mark.parametrize("name", ["ic_44", "ic_51"])
def test_ic_44_48_51_nothing_to_do_is_no_commit(fleet_of_old: Fleet, name: str) -> None:
    check(fleet_of_old[name], commits=False)


@old
def ic_49(make: Make) -> Built:
    table = make()
    kit.append(table, 0)
    for number in range(1, 6):
        kit.overwrite(table, 10 * number)
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:])


def test_ic_49_repeated_overwrites_leave_one_file(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["ic_49"]
    check(case)
    assert case.receipt.removed.data_files_removed == 5
    assert len(oracle.reachable(case.table)[oracle.CONTENT]) == 1


def _mixed(make: Make, keep: int) -> Built:
    table = make(properties={KEEP: str(keep)})
    kit.append(table, 0)
    for number in range(1, 5):
        kit.overwrite(table, 10 * number)
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-keep:])


@old
def ic_54_most_go(make: Make) -> Built:
    return _mixed(make, 2)


@old
def ic_54_most_stay(make: Make) -> Built:
    return _mixed(make, 7)


@pytest.mark.parametrize("name", ["ic_54_most_go", "ic_54_most_stay"])
def test_ic_47_54_counts_by_class(fleet_of_old: Fleet, name: str) -> None:
    case = fleet_of_old[name]
    check(case)
    after = oracle.reachable(case.table)
    gone = {kind: len(case.before[kind] - after[kind]) for kind in oracle.KINDS}
    case.went(
        data_files=gone[oracle.CONTENT],
        manifest_files=gone[oracle.MANIFEST],
        manifest_lists=gone[oracle.MANIFEST_LIST],
    )


# Formats, places and fields.


@old
def version_1(make: Make) -> Built:
    table = make(version=1)
    kit.grow(table, 2)
    kit.overwrite(table, 50)
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:])


@old
def version_3(make: Make) -> Built:
    table = make(version=3)
    kit.grow(table, 2)
    kit.overwrite(table, 50)
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:])


@old
def bucketed(make: Make) -> Built:
    table = make(partitioning="bucket")
    kit.grow(table, 2)
    kit.overwrite(table, 50)
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:])


@pytest.mark.parametrize("name", ["version_1", "version_3", "bucketed"])
def test_every_format_version_and_partitioned_tables(fleet_of_old: Fleet, name: str) -> None:
    case = fleet_of_old[name]
    format_version = case.table.format_version
    check(case)
    assert case.table.format_version == format_version
    assert case.receipt.removed.data_files_removed >= 2


def _outside(table: Table, name: str) -> str:
    root = kit.local(table.location()).parents[2]
    path = root / "outside" / table.name()[-1] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"file://{path}"


@old
def outside_gone(make: Make) -> Built:
    table = make()
    path = _outside(table, "one.parquet")
    kit.add_outside(table, path, 0)
    kit.overwrite(table, 50)
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:], {"path": oracle.normal(path)})


@old
def outside_kept(make: Make) -> Built:
    table = make()
    path = _outside(table, "one.parquet")
    tagged = kit.add_outside(table, path, 0)
    kit.tag(table, "v1")
    kit.overwrite(table, 50)
    kit.backdate(table, 30)
    return Built(table, [tagged, kit.ids(table)[-1]], {"path": oracle.normal(path)})


def test_a_file_outside_the_location_goes_when_nothing_names_it(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["outside_gone"]
    check(case)
    assert case.also["path"] in case.gone


def test_a_file_outside_the_location_stays_while_a_tag_needs_it(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["outside_kept"]
    check(case)
    assert Path(case.also["path"]).exists()


@old
def added_twice(make: Make) -> Built:
    table = make()
    path = _outside(table, "one.parquet")
    kit.add_outside(table, path, 0)
    table.delete(AlwaysTrue())
    kit.backdate(table, 30)
    table.add_files([path])
    return Built(table, kit.ids(table)[-1:], {"path": oracle.normal(path)})


def test_a_file_that_was_taken_out_and_added_again_stays(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["added_twice"]
    check(case)
    assert Path(case.also["path"]).exists()


def _rewritten(table: Table, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the current metadata file in place."""
    metadata = kit.read_metadata(table, table.metadata_location)
    change(metadata)
    kit.write_metadata(table, table.metadata_location, metadata)
    table.refresh()


@old
def unknown_fields(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 3)
    kit.tag(table, "v1", made[1])
    kit.backdate(table, 30)

    def change(metadata: dict[str, Any]) -> None:
        metadata["x-new"] = {"a": [1, 2.5, None, "ü"]}
        for snapshot in metadata["snapshots"]:
            snapshot["x-snapshot"] = snapshot["snapshot-id"]
        for name, ref in metadata["refs"].items():
            ref["x-ref"] = name

    _rewritten(table, change)
    return Built(table, made[1:])


def test_unknown_fields_survive_our_commit(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["unknown_fields"]
    check(case)
    was = kit.read_metadata(case.table, case.location)
    now = kit.read_metadata(case.table, case.table.metadata_location)
    assert now["x-new"] == was["x-new"]
    assert [one["x-snapshot"] for one in now["snapshots"]] == case.built.stays
    assert {name: ref["x-ref"] for name, ref in now["refs"].items()} == {"main": "main", "v1": "v1"}
    changed = {name for name in was | now if was.get(name) != now.get(name)}
    assert changed <= {"snapshots", "snapshot-log", "metadata-log", "last-updated-ms"}


def _zipped(table: Table) -> Table:
    """Let the table's metadata be compressed, as Java writes it."""
    metadata = kit.read_metadata(table, table.metadata_location)
    metadata["properties"]["write.metadata.compression-codec"] = "gzip"
    place = table.metadata_location.replace(".metadata.json", ".gz.metadata.json")
    kit.write_metadata(table, place, metadata)
    kit.local(table.metadata_location).unlink()
    name = table.name()
    table.catalog.drop_table(name)
    return table.catalog.register_table(name, place)


@old
def zipped(make: Make) -> Built:
    table = make()
    kit.grow(table, 2)
    kit.overwrite(table, 50)
    kit.backdate(table, 30)
    return Built(_zipped(table), kit.ids(table)[-1:])


def test_compressed_metadata_is_read_and_succeeded(fleet_of_old: Fleet) -> None:
    check(fleet_of_old["zipped"])


@old
def odd(make: Make) -> Built:
    place = "file://{root}/warehouse/old/odd/a b%20c/\u00fc\u0301+=x"
    table = make(location=place, partitioning="identity")
    kit.grow(table, 2)
    kit.overwrite(table, 50)
    kit.backdate(table, 30)
    return Built(table, kit.ids(table)[-1:])


def test_a_location_with_odd_characters(fleet_of_old: Fleet) -> None:
    check(fleet_of_old["odd"])


@old
def encrypted(make: Make) -> Built:
    table = make(properties={"encryption.key-id": "k1"})
    made = kit.grow(table, 3)
    kit.backdate(table, 30)
    return Built(table, made)


def test_an_encrypted_table_is_skipped_with_the_reason(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["encrypted"]
    untouched(case)
    assert "encryption.key-id" in case.receipt.skipped


@old
def few_metadata_files(make: Make) -> Built:
    table = make(
        properties={
            "write.metadata.delete-after-commit.enabled": "true",
            "write.metadata.previous-versions-max": "2",
        }
    )
    made = kit.grow(table, 4)
    kit.backdate(table, 30)
    return Built(table, made[3:], {"log": oracle.reachable(table)[oracle.METADATA_LOG]})


def test_metadata_files_that_fall_out_of_the_log_go_after_the_commit(fleet_of_old: Fleet) -> None:
    case = fleet_of_old["few_metadata_files"]
    log = oracle.reachable(case.table)[oracle.METADATA_LOG]
    assert len(log) == 2
    dropped = case.also["log"] - log
    assert len(dropped) == 1
    assert dropped <= case.gone
    case.gone -= dropped
    check(case)


@old
def too_few(make: Make) -> Built:
    table = make(properties={"lakewarden.history.expire.min-snapshots-to-expire": "3"})
    made = kit.grow(table, 3)
    kit.backdate(table, 30)
    return Built(table, made)


@old
def enough(make: Make) -> Built:
    table = make(properties={"lakewarden.history.expire.min-snapshots-to-expire": "3"})
    made = kit.grow(table, 4)
    kit.backdate(table, 30)
    return Built(table, made[3:])


def test_min_snapshots_to_expire_of_the_table(fleet_of_old: Fleet) -> None:
    check(fleet_of_old["enough"])
    case = fleet_of_old["too_few"]
    untouched(case)
    assert "fewer than 3" in case.receipt.skipped


@old
def history(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 4)
    kit.tag(table, "v1", made[0])
    kit.backdate(table, 30)
    return Built(table, [made[0], made[3]])


def test_the_log_of_snapshots_has_no_gap(fleet_of_old: Fleet) -> None:
    """Entries before an expired one go: time travel into the gap must fail, not read the tag."""
    case = fleet_of_old["history"]
    check(case)
    assert [entry.snapshot_id for entry in case.table.history()] == [kit.ids(case.table)[-1]]


def test_the_fleet_is_told_in_one_receipt(fleet_of_old: Fleet) -> None:
    failed = [one.table_key for one in fleet_of_old.receipt.failed]
    assert failed == ["iceberg://lake/old.ic_26"]
    assert fleet_of_old.receipt.exit_code is Exit.PARTIAL


# Tables that go by the rules that were given.

GIVEN: dict[str, Build] = {}


def given(build: Build) -> Build:
    GIVEN[getattr(build, "__name__", "")] = build
    return build


@pytest.fixture(scope="module")
def fleet_of_given(lab: Lab) -> Fleet:
    rules = {"keep": 2, "older_than": "10d", "max_ref_age": "20d", "min_snapshots_to_expire": 2}
    return lab.run("given", GIVEN, **rules)


@given
def ic_7(make: Make) -> Built:
    table = make(properties={KEEP: "5"})
    made = kit.grow(table, 5)
    kit.backdate(table, 30)
    return Built(table, made[3:])


@given
def ic_7_by_age(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 5)
    kit.backdate(table, [30, 20, 9, 8, 7])
    return Built(table, made[2:])


@pytest.mark.parametrize("name", ["ic_7", "ic_7_by_age"])
def test_ic_7_age_and_number_combine(fleet_of_given: Fleet, name: str) -> None:
    check(fleet_of_given[name])


@given
def ic_29_given(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 5)
    kit.tag(table, "old", made[0])
    kit.tag(table, "own", made[1], max_ref_age_ms=90 * DAY_MS)
    kit.tag(table, "young", made[2])
    kit.backdate(table, [30, 29, 18, 17, 16])
    return Built(table, made[1:])


@given
def ic_29_enough(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 6)
    kit.tag(table, "old", made[0])
    kit.tag(table, "own", made[1], max_ref_age_ms=90 * DAY_MS)
    kit.tag(table, "young", made[2])
    kit.backdate(table, [30, 29, 18, 17, 16, 15])
    return Built(table, [made[1], made[2], *made[4:]])


def test_ic_29_30_the_given_age_of_refs_is_the_default(fleet_of_given: Fleet) -> None:
    case = fleet_of_given["ic_29_enough"]
    check(case)
    assert set(case.table.refs()) == {"main", "own", "young"}


def test_min_snapshots_to_expire_also_holds_refs(fleet_of_given: Fleet) -> None:
    case = fleet_of_given["ic_29_given"]
    untouched(case)
    assert set(case.table.refs()) == {"main", "old", "own", "young"}


# Snapshots by their ids.


@pytest.mark.nightly
def test_ic_8_50_py_3_6_named_snapshots_go_whatever_the_properties_keep(single: Lab) -> None:
    table = single.make(properties={KEEP: "10", AGE: str(90 * DAY_MS)})
    made = kit.grow(table, 2)
    kit.overwrite(table, 50)
    stays = [one for one in kit.ids(table) if one not in made]
    case = single.expire(Built(table, stays), versions=made)
    check(case)
    assert case.receipt.removed.old_versions_removed == 2


@pytest.mark.nightly
def test_ic_34_55_py_1_2_4_snapshots_in_use_and_unknown_ones_are_refused(single: Lab) -> None:
    table = single.make()
    made = kit.grow(table, 5)
    kit.tag(table, "v1", made[0])
    kit.branch(table, "side", made[1])
    files = single.files()
    for wanted, said, kind in (
        ([made[0], made[2]], "tag v1", "tagged_version"),
        ([made[1]], "branch side", "tagged_version"),
        ([made[4]], "branch main", "tagged_version"),
        ([12345], "12345", "not_found"),
    ):
        plan = single.plan(versions=wanted)
        assert said in plan.tables[0].error
        assert plan.tables[0].error_kind == kind
        receipt = single.execute(plan)
        assert receipt.exit_code is Exit.REFUSED
    assert single.files() == files


def test_ic_15_56_arguments_that_make_no_sense(single: Lab) -> None:
    kit.grow(single.make(), 2)
    senseless: list[dict[str, Any]] = [
        {"keep": 0},
        {"keep": -1},
        {"versions": []},
        {"older_than": "-1d"},
        {"older_than": "soon"},
        {"min_snapshots_to_expire": -1},
        {"before_version": 3},
        {"branch": "side"},
        {"versions": [1], "max_ref_age": "1d"},
    ]
    for rules in senseless:
        with pytest.raises(UsageError):
            single.plan(**rules)


# Twice, and for how many requests.


def _overwritten(table: Table) -> list[int]:
    """Make states of a table of which the last shares no file with the others."""
    kit.append(table, 0)
    kit.overwrite(table, 10)
    kit.overwrite(table, 20)
    kit.backdate(table, 30)
    return kit.ids(table)


def _first_file(table: Table) -> str:
    """Return the only file of the first snapshot."""
    manifests = table.metadata.snapshots[0].manifests(table.io)
    (entry,) = manifests[0].fetch_manifest_entry(table.io)
    return entry.data_file.file_path


@pytest.mark.nightly
def test_ic_53_py_7_a_second_run_finds_nothing_and_an_old_plan_does_no_harm(single: Lab) -> None:
    table = single.make()
    made = _overwritten(table)
    case = single.seen(Built(table, made[-1:]))
    files = single.files()
    first, second = single.plan(), single.plan()
    single.finish([case], files, first, single.execute(first))
    check(case)
    after = single.files()
    late = single.execute(second)
    assert late.tables[0].outdated
    assert late.exit_code is Exit.CONFLICT
    again = single.plan()
    assert again.removal.files_removed == 0
    assert single.execute(again).exit_code is Exit.DONE
    assert single.files() == after
    oracle.assert_intact(table, case.prints)


@pytest.mark.nightly
def test_ic_46_append_only_manifests_are_not_opened(single: Lab) -> None:
    table = single.make()
    made = kit.synthetic(table, 12, 2, real=True)
    plan = single.plan(versions=made[:1])
    # The metadata file, the going list, and the one after it; the mark of a warehouse.
    assert plan.requests == {"GET": 3, "HEAD": 1, "LIST": 1}
    case = single.expire(Built(table, made[1:]), versions=made[:1])
    check(case)
    case.went(manifest_lists=1)


@pytest.mark.nightly
def test_files_that_a_protected_table_uses_stay(single: Lab) -> None:
    table = single.make()
    made = _overwritten(table)
    shared = _first_file(table)
    other = single.make("db.other")
    other.add_files([shared])
    case = single.expire(Built(table, made[-1:]), protect=["iceberg://lake/db.other"])
    oracle.assert_intact(table, case.prints)
    oracle.assert_intact(other)
    assert case.gone == oracle.leftovers(case.before, table) - {oracle.normal(shared)}


@pytest.mark.parametrize("other", ["protected", "a target"])
def test_a_file_that_another_table_takes_meanwhile_stays(single: Lab, other: str) -> None:
    table = single.make()
    _overwritten(table)
    shared = _first_file(table)
    taker = single.make("db.taker")
    kit.grow(taker, 1)
    protect = {"protect": ["iceberg://lake/db.taker"]} if other == "protected" else {}
    plan = single.plan("db.t" if protect else "db", **protect)
    taker.add_files([shared])
    single.execute(plan)
    oracle.assert_intact(taker)


def test_a_plan_from_disk(single: Lab) -> None:
    table = single.make()
    made = _overwritten(table)
    kit.tag(table, "gone", made[0], max_ref_age_ms=10 * DAY_MS)
    case = single.seen(Built(table, made[-1:]))
    files = single.files()
    plan = single.plan()
    lakewarden.save_plan(plan, str(single.root / "plan"))
    stored = lakewarden.load_plan(single.spark, str(single.root / "plan"))
    single.finish([case], files, plan, single.execute(stored))
    check(case)
    assert case.receipt.expired_refs == ("gone",)


# Damaged tables.


def _damaged(make: Make, *, cut: bool, manifest: bool) -> Built:
    """A table of which a tagged snapshot, no neighbour of what goes, cannot be read."""
    table = make()
    tagged = kit.append(table, 0)
    kit.tag(table, "v1", tagged)
    kit.overwrite(table, 10)
    kit.overwrite(table, 20)
    kit.backdate(table, 30)
    snapshot = table.metadata.snapshot_by_id(tagged)
    assert snapshot is not None
    named = snapshot.manifests(table.io)[0].manifest_path if manifest else snapshot.manifest_list
    path = kit.local(named)
    if cut:
        path.write_bytes(path.read_bytes()[:-40])
    else:
        path.unlink()
    return Built(table, kit.ids(table), {"path": path}, unreadable=True)


DAMAGED: dict[str, Build] = {
    "list_missing": partial(_damaged, cut=False, manifest=False),
    "list_cut": partial(_damaged, cut=True, manifest=False),
    "manifest_missing": partial(_damaged, cut=False, manifest=True),
    "manifest_cut": partial(_damaged, cut=True, manifest=True),
}


@pytest.fixture(scope="module")
def fleet_of_damaged(lab: Lab) -> Fleet:
    return lab.run("damaged", DAMAGED)


@pytest.mark.nightly
@pytest.mark.parametrize("name", DAMAGED)
def test_ic_59_what_a_kept_snapshot_needs_cannot_be_read(
    fleet_of_damaged: Fleet, name: str
) -> None:
    case = fleet_of_damaged[name]
    untouched(case)
    assert case.also["path"].name in case.planned.error
    assert case.receipt.error == case.planned.error
    assert fleet_of_damaged.receipt.exit_code is Exit.REFUSED


# Broken off after the commit, then resumed.


def _records(table: Table) -> list[Path]:
    return list((kit.local(table.location()) / "metadata" / "_lakewarden").glob("*"))


@dataclass
class Resumed:
    """Tables whose deletes failed at first."""

    cases: dict[str, Case]
    first: Any
    again: Any
    second: Any
    #: Of each table, after the deletes failed.
    records: dict[str, int]
    snapshots: dict[str, list[int]]
    location: dict[str, str]


def _uncommitted(table: Table) -> Path:
    """Leave the record of a run that has not committed."""
    record = kit.local(table.location()) / "metadata" / "_lakewarden" / "1.json"
    record.parent.mkdir()
    about = {"format": 1, "table": "some", "metadata": table.metadata_location}
    record.write_text(json.dumps(about))
    return record


@pytest.fixture(scope="module")
def resumed(lab: Lab) -> Resumed:
    """Expire with failing deletes, let one table have a file back, and run again."""
    options = {
        "plain": {},
        "back": {},
        "few": {"lakewarden.history.expire.min-snapshots-to-expire": "2"},
        "never": {AGE: str(90 * DAY_MS)},
        "passed": {AGE: str(90 * DAY_MS)},
    }
    tables = {name: lab.make(f"resumed.{name}", properties=options[name]) for name in options}
    made = {name: _overwritten(table) for name, table in tables.items()}
    # Records of commits that have not been made; one table moves on afterwards.
    records_of_others = [_uncommitted(tables[name]) for name in ("never", "passed")]
    kit.append(tables["passed"], 1)
    made["passed"] = kit.ids(tables["passed"])
    young = ("never", "passed")
    stays = {name: made[name] if name in young else made[name][-1:] for name in tables}
    cases = {name: lab.seen(Built(table, stays[name])) for name, table in tables.items()}
    came_back = _first_file(tables["back"])
    files = lab.files()
    plan = lab.plan("resumed")
    first = lab.execute_failing(plan, Request.DELETE, 1)
    assert files.keys() <= lab.files().keys() | {str(record) for record in records_of_others}
    for case in cases.values():
        case.table.refresh()
        oracle.assert_intact(case.table, case.prints)
    records = {name: len(_records(table)) for name, table in tables.items()}
    snapshots = {name: kit.ids(table) for name, table in tables.items()}
    tables["back"].add_files([came_back])
    cases["back"].also["path"] = kit.local(came_back)
    location = {name: table.metadata_location for name, table in tables.items()}
    again = lab.plan("resumed")
    second = lab.execute(again)
    lab.finish(cases.values(), files, again, second)
    return Resumed(cases, first, again, second, records, snapshots, location)


@pytest.mark.parametrize("name", ["plain", "back", "few"])
def test_ic_41_failed_deletes_are_counted_and_the_record_stays(resumed: Resumed, name: str) -> None:
    case = resumed.cases[name]
    done = next(one for one in resumed.first.tables if one.table_key.endswith(f".{name}"))
    assert done.failed_deletes == 2
    assert done.error_kind == "storage"
    assert done.removed.files_removed == 0
    assert done.removed.old_versions_removed == len(case.prints) - 1
    assert resumed.snapshots[name] == list(case.built.stays)
    assert resumed.records[name] == 1


@pytest.mark.nightly
def test_a_file_that_another_target_uses_stays(single: Lab) -> None:
    table = single.make()
    _overwritten(table)
    taker = single.make("db.taker")
    taker.add_files([_first_file(table)])
    single.execute(single.plan("db"))
    oracle.assert_intact(taker)


def test_ic_41_a_commit_without_deletes_is_not_told_as_refused(resumed: Resumed) -> None:
    """The metadata was changed, even though no file could be deleted."""
    assert resumed.first.exit_code is Exit.PARTIAL
    alone = replace(
        resumed.first, tables=[one for one in resumed.first.tables if one.failed_deletes]
    )
    assert alone.exit_code is Exit.PARTIAL


@pytest.mark.parametrize("name", ["plain", "few"])
def test_ic_63_the_next_run_deletes_the_rest_and_the_record(resumed: Resumed, name: str) -> None:
    case = resumed.cases[name]
    assert case.planned.pending
    assert case.receipt.error is None
    assert not _records(case.table)
    assert case.gone == oracle.leftovers(case.before, case.table)
    assert case.receipt.removed.files_removed == len(case.gone)
    assert case.table.metadata_location == resumed.location[name], "there was nothing to commit"
    oracle.assert_intact(case.table, case.prints)


def test_ic_63_a_file_that_came_back_before_the_resumption_stays(resumed: Resumed) -> None:
    case = resumed.cases["back"]
    assert case.also["path"].exists()
    assert case.gone == oracle.leftovers(case.before, case.table)
    oracle.assert_intact(case.table, case.prints)
    assert not _records(case.table)


def test_ic_63_the_record_of_a_run_that_may_yet_commit_stays(resumed: Resumed) -> None:
    case = resumed.cases["never"]
    assert len(_records(case.table)) == 1
    assert not case.gone
    assert case.table.metadata_location == case.location
    oracle.assert_intact(case.table, case.prints)


def test_ic_63_a_record_of_a_commit_that_never_was_is_cleared(resumed: Resumed) -> None:
    """The table has moved on: whoever wrote the record can no longer commit."""
    case = resumed.cases["passed"]
    assert not _records(case.table)
    assert all("_lakewarden" in path for path in case.gone)
    assert case.table.metadata_location == case.location
    oracle.assert_intact(case.table, case.prints)


@pytest.mark.nightly
def test_ic_63_writes_that_fail_change_nothing(single: Lab) -> None:
    """First the record cannot be written, then the new metadata."""
    table = single.make()
    made = _overwritten(table)
    case = single.seen(Built(table, made[-1:]))
    files = single.files()
    plan = single.plan()
    for call in (1, 2):
        receipt = single.execute_failing(plan, Request.PUT, call)
        assert receipt.exit_code is Exit.REFUSED
        assert "injected" in receipt.tables[0].error
        table.refresh()
        assert table.metadata_location == case.location
        assert {path for path in single.files() if "_lakewarden" not in path} == files.keys()
    again = single.plan()
    single.finish([case], files, again, single.execute(again))
    check(case)
    assert not _records(table)


# Races: what others do between the plan and its execution.

RACES: dict[str, Build] = {}


def raced(build: Build) -> Build:
    RACES[getattr(build, "__name__", "")] = build
    return build


@pytest.fixture(scope="module")
def fleet_of_races(lab: Lab) -> Fleet:
    return lab.run("races", RACES)


def outdated(case: Case) -> None:
    """The plan was found to be outdated, and nothing was done."""
    untouched(case)
    assert case.receipt.outdated
    assert case.receipt.error_kind == "plan_outdated"
    oracle.assert_intact(case.table, case.prints)
    assert not _records(case.table)


@raced
def tagged(make: Make) -> Built:
    table = make()
    made = _overwritten(table)
    return Built(table, made, {"made": made}, lambda: kit.tag(table, "late", made[0]))


@pytest.mark.nightly
def test_a_tag_made_meanwhile_survives(fleet_of_races: Fleet) -> None:
    case = fleet_of_races["tagged"]
    outdated(case)
    assert case.table.refs()["late"].snapshot_id == case.also["made"][0]


@raced
def branched(make: Make) -> Built:
    table = make()
    made = _overwritten(table)
    return Built(table, made, {}, lambda: kit.branch(table, "late", made[1]))


def test_a_branch_made_meanwhile_from_a_going_snapshot_survives(fleet_of_races: Fleet) -> None:
    outdated(fleet_of_races["branched"])


@raced
def rolled_back(make: Make) -> Built:
    table = make()
    made = _overwritten(table)
    return Built(table, made, {}, lambda: kit.rollback(table, made[0]))


def test_a_rollback_meanwhile_to_a_going_snapshot_is_noticed(fleet_of_races: Fleet) -> None:
    outdated(fleet_of_races["rolled_back"])


@raced
def appended(make: Make) -> Built:
    table = make()
    made = _overwritten(table)
    return Built(table, made, {"made": made}, lambda: kit.append(table, 100))


def test_an_append_made_meanwhile_is_neither_lost_nor_in_the_way(fleet_of_races: Fleet) -> None:
    case = fleet_of_races["appended"]
    made = case.also["made"]
    case.built.stays = [made[-1], *(one for one in case.prints if one not in made)]
    assert len(case.built.stays) == 2
    check(case)


@raced
def added_again(make: Make) -> Built:
    table = make()
    made, path = _overwritten(table), _first_file(table)
    return Built(table, made, {}, lambda: table.add_files([path]))


def test_a_going_file_added_again_meanwhile_survives(fleet_of_races: Fleet) -> None:
    outdated(fleet_of_races["added_again"])


@raced
def added_again_and_expired(make: Make) -> Built:
    table = make()
    made, path = _overwritten(table), _first_file(table)

    def meanwhile() -> None:
        table.add_files([path])
        added = kit.ids(table)[-1]
        kit.append(table, 100)
        table.maintenance.expire_snapshots().by_id(added).commit()

    return Built(table, made, {}, meanwhile)


def test_a_going_file_added_again_by_a_snapshot_that_went_survives(fleet_of_races: Fleet) -> None:
    """The manifest that names it was added by a snapshot that neither plan nor table know."""
    case = fleet_of_races["added_again_and_expired"]
    oracle.assert_intact(case.table, case.prints)


@raced
def expired_by_others(make: Make) -> Built:
    table = make()
    made = _overwritten(table)
    return Built(
        table, made, {}, lambda: table.maintenance.expire_snapshots().by_id(made[0]).commit()
    )


def test_a_concurrent_expiry_is_left_to_finish(fleet_of_races: Fleet) -> None:
    outdated(fleet_of_races["expired_by_others"])


@raced
def made_again(make: Make) -> Built:
    table = make()
    _overwritten(table)
    built = Built(table, [])

    def meanwhile() -> None:
        table.catalog.drop_table(table.name())
        built.table = make()
        kit.grow(built.table, 2)

    built.meanwhile = meanwhile
    return built


def test_a_table_dropped_and_made_again_is_left_alone(fleet_of_races: Fleet) -> None:
    outdated(fleet_of_races["made_again"])


@raced
def gc_disabled(make: Make) -> Built:
    table = make()
    made = _overwritten(table)

    def meanwhile() -> None:
        with table.transaction() as change:
            change.set_properties({"gc.enabled": "false"})

    return Built(table, made, {}, meanwhile)


def test_gc_disabled_meanwhile_is_respected(fleet_of_races: Fleet) -> None:
    case = fleet_of_races["gc_disabled"]
    untouched(case)
    assert case.receipt.error is not None


@raced
def longer_memory(make: Make) -> Built:
    table = make()
    made = _overwritten(table)
    return Built(
        table, made, {}, lambda: kit.branch(table, "late", made[-1], min_snapshots_to_keep=3)
    )


def test_a_branch_with_a_longer_memory_made_meanwhile_is_respected(fleet_of_races: Fleet) -> None:
    untouched(fleet_of_races["longer_memory"])


@raced
def commit_to_old_branch(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 3)
    kit.branch(table, "side", made[1], max_ref_age_ms=10 * DAY_MS)
    kit.backdate(table, 30)
    return Built(table, made, {}, lambda: kit.append(table, 100, branch="side"))


def test_a_commit_meanwhile_to_a_branch_that_expires_is_not_lost(fleet_of_races: Fleet) -> None:
    case = fleet_of_races["commit_to_old_branch"]
    assert case.planned.expired_refs == ("side",)
    assert "side" in case.table.refs()
    oracle.assert_intact(case.table, case.prints)


@raced
def moved_tag(make: Make) -> Built:
    table = make()
    made = kit.grow(table, 3)
    kit.tag(table, "release", made[0], max_ref_age_ms=10 * DAY_MS)
    kit.backdate(table, 30)

    def meanwhile() -> None:
        kit.unref(table, "release")
        kit.tag(table, "release", made[2])

    return Built(table, made, {}, meanwhile)


def test_a_tag_that_expires_and_is_moved_meanwhile_is_not_lost(fleet_of_races: Fleet) -> None:
    case = fleet_of_races["moved_tag"]
    assert case.planned.expired_refs == ("release",)
    assert case.table.refs()["release"].snapshot_id == kit.ids(case.table)[-1]


# Races with the commit itself: another client is faster than we are.


class Racing:
    """Lets others act first when a commit is asked for; mixed into a catalog."""

    first: list[Callable[[], object]]

    def commit_table(self, *arguments: Any) -> Any:
        while self.first:
            self.first.pop()()
        return super().commit_table(*arguments)  # type: ignore[misc]


class RacingLake(Racing, kit.LakeCatalog):
    """A catalog in a database."""


class RacingRest(Racing, RestCatalog):
    """A catalog that is a service."""


class ForgetfulLake(kit.LakeCatalog):
    """A catalog whose answer gets lost after the commit."""

    def commit_table(self, *arguments: Any) -> Any:
        super().commit_table(*arguments)
        raise OSError("the connection was closed")


def test_ic_63_a_commit_whose_answer_was_lost_is_resumed(single: Lab) -> None:
    table = single.make()
    made = _overwritten(table)
    case = single.seen(Built(table, made[-1:]))
    files = single.files()
    unlucky = Lab(single.spark, single.root, ForgetfulLake("lake", **single.catalog.properties))
    receipt = unlucky.execute(unlucky.plan())
    assert receipt.tables[0].error_kind == "catalog"
    assert files.keys() <= single.files().keys()
    assert len(_records(table)) == 1
    again = single.plan()
    single.finish([case], files, again, single.execute(again))
    assert kit.ids(table) == made[-1:]
    assert case.gone == oracle.leftovers(case.before, table)
    assert not _records(table)
    oracle.assert_intact(table, case.prints)


def _racing(lab: Lab, kind: type[Any], act: Callable[[], object]) -> Lab:
    catalog = kind("lake", **lab.catalog.properties)
    catalog.first = [act]
    return Lab(lab.spark, lab.root, catalog)


def test_a_tag_made_during_the_commit_survives(single: Lab) -> None:
    table = single.make()
    made = _overwritten(table)
    case = single.seen(Built(table, made))
    racing = _racing(single, RacingLake, lambda: kit.tag(table, "late", made[1]))
    receipt = racing.execute(racing.plan())
    assert receipt.tables[0].outdated
    table.refresh()
    assert table.refs()["late"].snapshot_id == made[1]
    assert kit.ids(table) == made
    oracle.assert_intact(table, case.prints)
    assert not oracle.unreferenced(table)


def test_an_append_made_during_the_commit_is_not_lost(single: Lab) -> None:
    table = single.make()
    made = _overwritten(table)
    case = single.seen(Built(table, made))
    racing = _racing(single, RacingLake, lambda: kit.append(table, 100))
    receipt = racing.execute(racing.plan())
    assert receipt.exit_code is Exit.DONE
    table.refresh()
    assert kit.ids(table)[0] == made[-1]
    assert len(kit.ids(table)) == 2
    oracle.assert_intact(table, case.prints)
    assert not oracle.unreferenced(table)


# A catalog that is a service, and tables that Iceberg's own runtime wrote.


@pytest.fixture(scope="module")
def rest(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A catalog that is a service."""
    root = tmp_path_factory.mktemp("expire-rest")
    try:
        with iceberg_rest.rest_catalog(root) as catalog:
            yield Lab(spark, root, catalog)
    except iceberg_rest.UnavailableError as reason:
        pytest.skip(str(reason))


@pytest.mark.nightly
@pytest.mark.slow
def test_a_rest_catalog(rest: Lab) -> None:
    table = rest.make("db.plain")
    made = _overwritten(table)
    kit.statistics(table, made[0])
    kit.partition_statistics(table, made[0])
    check(rest.expire(Built(table, made[-1:])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "version"), [pytest.param(0, 3, marks=pytest.mark.nightly), (1, 2)]
)
def test_a_tag_made_during_the_commit_of_a_service_is_put_back(
    rest: Lab, position: int, version: int
) -> None:
    table = rest.make(f"db.raced{position}{version}", version=version)
    made = _overwritten(table)
    name = ".".join(table.name())
    case = rest.seen(Built(table, made))
    files = rest.files()
    racing = _racing(rest, RacingRest, lambda: kit.tag(table, "late", made[position]))
    receipt = racing.execute(racing.plan(name))
    assert receipt.tables[0].error is not None
    table = rest.catalog.load_table(name)
    assert table.refs()["late"].snapshot_id == made[position]
    assert files.keys() <= rest.files().keys()
    oracle.assert_intact(table, case.prints)
    # What the commit took away for good is for the next run.
    rest.execute(rest.plan(name))
    table.refresh()
    assert files.keys() - rest.files().keys() == oracle.leftovers(case.before, table)
    oracle.assert_intact(table, case.prints)


@pytest.mark.nightly
@pytest.mark.slow
def test_an_append_made_during_the_commit_of_a_service_is_not_lost(rest: Lab) -> None:
    table = rest.make("db.grown")
    made = _overwritten(table)
    case = rest.seen(Built(table, made))
    racing = _racing(rest, RacingRest, lambda: kit.append(table, 100))
    receipt = racing.execute(racing.plan("db.grown"))
    assert receipt.exit_code is Exit.DONE
    table = rest.catalog.load_table("db.grown")
    assert kit.ids(table)[0] == made[-1]
    assert len(kit.ids(table)) == 2
    oracle.assert_intact(table, case.prints)


SPARK_TABLES = {"one": 1, "two": 2, "three": 3}


def _spark_steps(name: str, version: int) -> list[iceberg_spark.Step]:
    def insert(start: int) -> str:
        rows = f"SELECT /*+ COALESCE(1) */ id, 'n' FROM range({start}, {start + 4})"
        return f"INSERT INTO db.{name} {rows}"

    create = (
        f"CREATE TABLE db.{name} (id BIGINT, name STRING) USING iceberg TBLPROPERTIES ("
        f"'format-version'='{version}', 'write.delete.mode'='merge-on-read', "
        "'write.metadata.compression-codec'='gzip')"
    )
    return [
        create,
        insert(0),
        insert(10),
        f"ALTER TABLE db.{name} CREATE TAG v1",
        *([f"DELETE FROM db.{name} WHERE id IN (1, 11)"] if version > 1 else []),
        f"CALL lake.system.compute_table_stats('db.{name}')",
        f"CALL lake.system.rewrite_manifests('db.{name}')",
        f"INSERT OVERWRITE db.{name} SELECT * FROM db.{name} WHERE id > 2",
        insert(20),
    ]


@pytest.mark.nightly
@pytest.mark.slow
def test_tables_that_spark_wrote(single: Lab) -> None:
    steps: list[iceberg_spark.Step] = ["CREATE NAMESPACE IF NOT EXISTS db"]
    for name, version in SPARK_TABLES.items():
        steps += _spark_steps(name, version)
    try:
        iceberg_spark.run(single.root, steps)
    except iceberg_spark.UnavailableError as reason:
        pytest.skip(str(reason))
    cases = []
    for name in SPARK_TABLES:
        table = single.catalog.load_table(f"db.{name}")
        kit.backdate(table, 30)
        stays = {ref.snapshot_id for ref in table.refs().values()}
        cases.append(single.seen(Built(table, stays)))
    files = single.files()
    plan = single.plan("db")
    receipt = single.execute(plan)
    single.finish(cases, files, plan, receipt)
    for case in cases:
        check(case)
    counted = [f"SELECT count(*) AS n FROM db.{name}" for name in SPARK_TABLES]
    counted += [f"{one} VERSION AS OF 'v1'" for one in counted]
    read = iceberg_spark.run(single.root, counted)
    assert [rows[0]["n"] for rows in read] == [9, 8, 8, 8, 8, 8]
