"""Damage: which versions cannot be read, because of which files, and who needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pytest
from pyiceberg.table.statistics import StatisticsFile
from pyspark.sql import SparkSession

from lakewarden.errors import LakewardenError
from lakewarden.maintenance import damage, kept
from lakewarden.maintenance.damage import Finding
from lakewarden.maintenance.survey import Costs, Reading
from lakewarden.storage.local import LocalStore
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.testing.iceberg import local
from lakewarden.warehouse.lance import Namespace
from lakewarden.world import SystemClock
from tests.repair.mending import Mender, append, compact
from tests.warehouse.cleaning import Cleaner, Lake, before, floor_here
from tests.warehouse.lakes import catalog, dataset, iceberg_ids, id_rows, lance_ids, reopen, write

pytestmark = pytest.mark.spark


def files_of(place: Path, version: int | None = None) -> list[Path]:
    """Return the data files that a version of a Lance table needs, by Lance's own account."""
    found = lance.dataset(str(place), version=version)
    return [
        place / "data" / one.path
        for fragment in found.get_fragments()
        for one in fragment.data_files()
    ]


def unreadable(place: Path) -> set[int]:
    """Return the versions that Lance cannot read: what the findings must agree with."""
    found = set()
    for one in lance.dataset(str(place)).versions():
        try:
            lance.dataset(str(place), version=one["version"]).to_table()
        except (OSError, ValueError):
            found.add(one["version"])
    return found


def only(findings: Any, kind: str) -> Finding:
    (found,) = findings
    assert isinstance(found, Finding)
    assert found.kind == kind
    return found


def look_at(spark: SparkSession, place: Path) -> list[Finding]:
    """Look for damage in a table that is in no warehouse."""
    where = Location.parse(str(place))
    checked = kept.lance_table(where, LocalStore())
    return damage.find([checked], Reading(spark, Opener({}), SystemClock(), 2), Costs())


def full(lake: Lake) -> None:
    """Give the warehouse tags, branches, deletions, indices, and a table that uses another's files."""
    lake.lance("append", "t", 4, 5)
    lake.at("t").create_scalar_index("id", "BTREE")
    lake.at("t").delete("id = 4")
    lake.create("facts", 1, 2).delete("id = 1")
    lake.warehouse.create_tag("tagged")
    lake.warehouse.create_branch("dev")
    write(Namespace(reopen(lake.root), branch="dev"), "append", 10)
    lake.clone("other", "clone")
    lake.iceberg("facts", "dev").append(id_rows(7))
    lake.iceberg("facts").overwrite(id_rows(9))


def test_a_sound_warehouse_has_no_findings(lake: Lake, mender: Mender, spark: SparkSession) -> None:
    full(lake)
    assert mender.plan().findings == []
    assert look_at(spark, lake.place("t")) == []
    compact(lake.place("t"))
    append(lake.place("other"), 66)
    assert mender.plan().findings == []


@pytest.mark.nightly
def test_a_sound_warehouse_has_no_findings_after_a_cleanup(
    lake: Lake, mender: Mender, spark: SparkSession
) -> None:
    full(lake)
    for number in range(20, 24):
        lake.lance("overwrite", "t", number)
        lake.iceberg("facts").overwrite(id_rows(number))
    floor = floor_here(lake.warehouse)
    lake.lance("append", "t", 30)
    Cleaner(spark).run(lake.again(), before(floor))
    assert mender.plan().findings == []


def test_a_missing_file_is_told_with_the_versions_and_refs_that_need_it(
    lake: Lake, mender: Mender
) -> None:
    """The first file of db.t: every version of it needs that, until it is overwritten."""
    lake.warehouse.create_tag("tagged")
    place = lake.place("t")
    lake.lance("overwrite", "t", 9)
    gone = files_of(place, 1)[0]
    gone.unlink()
    found = only(mender.plan().findings, "missing_file")
    assert set(found.versions) == unreadable(place) == {1, 2, 3}
    assert (found.table_key, found.files, found.examples) == ("db.t", 1, (str(gone),))
    assert "tag tagged" in found.refs
    assert not any(ref.startswith("branch") for ref in found.refs)
    assert "what is current is sound" in found.next
    assert "lakewarden cleanup" in found.next


def test_what_is_current_and_damaged_can_be_brought_back_by_the_command_that_is_told(
    lake: Lake, mender: Mender
) -> None:
    place = lake.place("t")
    (third,) = set(files_of(place, 3)) - set(files_of(place, 2))
    third.unlink()
    found = only(mender.plan().findings, "missing_file")
    assert set(found.versions) == unreadable(place) == {3}
    assert "branch main" in found.refs
    command = found.next.partition("sound: ")[2].split()
    assert command[:3] == ["lakewarden", "restore", str(lake.root)]
    warehouse = reopen(lake.root)
    assert (command[3], command[4]) == ("db.t", "--version")
    warehouse.restore(warehouse.read(version=int(command[5])), ("db", "t"))
    assert lance_ids(reopen(lake.root)) == [1, 2]
    assert set(only(mender.plan().findings, "missing_file").versions) == {3}


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "longer"])
def test_a_file_of_another_size_is_told(lake: Lake, mender: Mender, cut: bool) -> None:
    place = lake.place("t")
    (third,) = set(files_of(place, 3)) - set(files_of(place, 2))
    whole = third.read_bytes()
    third.write_bytes(whole[:-10] if cut else whole + b"x")
    found = only(mender.plan().findings, "wrong_size")
    assert found.versions == (3,)
    changed = len(whole) - 10 if cut else len(whole) + 1
    assert found.examples == (f"{third} ({changed} bytes, not {len(whole)})",)
    assert "lakewarden restore" in found.next


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["_deletions", "_indices"])
def test_deletions_and_indices_are_looked_at(lake: Lake, mender: Mender, what: str) -> None:
    full(lake)
    for one in (lake.place("t") / what).rglob("*.*"):
        one.unlink()
    found = only(mender.plan().findings, "missing_file")
    assert all(f"/{what}/" in example for example in found.examples)
    assert {"branch main", "branch dev", "tag tagged"} <= set(found.refs)


def test_a_missing_transaction_is_no_damage(lake: Lake, mender: Mender) -> None:
    """A version reads without it."""
    for one in (lake.place("t") / "_transactions").iterdir():
        one.unlink()
    assert mender.plan().findings == []


def test_a_manifest_that_is_missing_or_damaged_is_told(lake: Lake, mender: Mender) -> None:
    place = lake.place("t")
    manifests = [place / "_versions" / f"{2**64 - 1 - one:020d}.manifest" for one in (1, 2)]
    manifests[0].unlink()
    manifests[1].write_bytes(b"nonsense")
    found = {one.kind: one for one in mender.plan().findings}
    assert found["missing_file"].versions == (1,)
    assert found["unreadable_file"].versions == (2,)
    assert str(manifests[1]) in found["unreadable_file"].examples


def test_versions_of_the_same_number_are_told_apart(lake: Lake, mender: Mender) -> None:
    """A branch counts on from where it began: version 4 of main and of dev have nothing in common."""
    lake.warehouse.create_branch("dev")
    write(Namespace(reopen(lake.root), branch="dev"), "append", 10)
    lake.lance("append", "t", 4)
    (fork,) = (lake.place("t") / "tree").iterdir()
    for one in (fork / "data").iterdir():
        one.unlink()
    found = only(mender.plan().findings, "missing_file")
    assert found.versions == (4,)
    assert "branch dev" in found.refs
    assert "branch main" not in found.refs
    assert lance_ids(reopen(lake.root)) == [1, 2, 3, 4]


def test_what_a_branch_or_a_clone_takes_from_elsewhere_is_looked_at(
    lake: Lake, mender: Mender
) -> None:
    lake.warehouse.create_branch("dev")
    write(Namespace(reopen(lake.root), branch="dev"), "append", 10)
    lake.clone("other", "clone")
    for name in ("t", "other"):
        files_of(lake.place(name), 1)[0].unlink()
    found = {one.table_key: one for one in mender.plan().findings}
    assert set(found) == {"db.t", "db.other", "db.clone"}
    assert {"branch dev", "branch main"} <= set(found["db.t"].refs)
    with pytest.raises((OSError, ValueError, LakewardenError)):
        dataset(Namespace(reopen(lake.root)), ("db", "clone")).to_table()


def test_many_files_are_counted_and_some_are_named(lake: Lake, mender: Mender) -> None:
    for number in range(10, 20):
        lake.lance("append", "t", number)
    for one in files_of(lake.place("t")):
        one.unlink()
    found = only(mender.plan().findings, "missing_file")
    assert found.files == 13
    assert len(found.examples) == 5


def test_only_tables_that_are_asked_for_are_looked_at(lake: Lake, mender: Mender) -> None:
    for name in ("t", "other"):
        files_of(lake.place(name))[0].unlink()
    assert only(mender.plan(tables=("db.t",)).findings, "missing_file").table_key == "db.t"


# -- Iceberg ---------------------------------------------------------------------------------------


def parts(lake: Lake) -> dict[str, list[Path]]:
    """Return the files of db.facts by kind."""
    place = lake.place("facts")
    return {
        "data": sorted((place / "data").rglob("*.parquet")),
        "list": sorted((place / "metadata").glob("snap-*.avro")),
        "manifest": sorted((place / "metadata").glob("*-m*.avro")),
        "metadata": sorted((place / "metadata").glob("*.metadata.json")),
    }


@pytest.fixture
def facts(lake: Lake) -> Lake:
    """A warehouse with Iceberg table db.facts: ids 1, tagged, and 1, 2."""
    lake.create("facts", 1)
    lake.warehouse.create_tag("tagged")
    lake.iceberg("facts").append(id_rows(2))
    return lake


@pytest.mark.parametrize("what", ["data", "list", "manifest"])
@pytest.mark.parametrize(
    "how", ["missing_file", pytest.param("wrong_size", marks=pytest.mark.nightly)]
)
def test_files_of_snapshots_are_looked_at(facts: Lake, mender: Mender, what: str, how: str) -> None:
    snapshots = {
        one.snapshot_id: {task.file.file_path.removeprefix("file://") for task in
                          facts.iceberg("facts").scan(snapshot_id=one.snapshot_id).plan_files()}
        for one in facts.iceberg("facts").snapshots()
    }  # fmt: skip
    victim = parts(facts)[what][0]
    if how == "missing_file":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-9])
    found = {one.kind: one for one in mender.plan().findings}
    if what == "list" and how == "wrong_size":
        # Nobody tells how long a list is; that it cannot be read is seen.
        how = "unreadable_file"
    assert any(str(victim) in example for example in found[how].examples)
    assert found[how].table_key == "db.facts"
    if what == "data":
        needing = {number for number, needed in snapshots.items() if str(victim) in needed}
        assert set(found[how].versions) == needing
    current = facts.iceberg("facts").current_snapshot()
    assert current is not None
    assert ("branch main" in found[how].refs) == (current.snapshot_id in found[how].versions)


@pytest.mark.nightly
def test_metadata_that_is_missing_or_damaged_is_told(facts: Lake, mender: Mender) -> None:
    first, *_, newest = parts(facts)["metadata"]
    first.write_text("{}")
    plan = mender.plan()
    found = only(plan.findings, "unreadable_file")
    assert found.examples == (str(first),)
    # Which snapshots it has, nobody can tell; which version it is, its place tells.
    assert found.versions == ()
    assert "that say what 1 version(s) need cannot be read (" in found.means
    assert found.refs
    newest.unlink()
    found = {one.kind: one for one in mender.plan().findings}["missing_file"]
    assert found.examples == (str(newest),)
    assert "branch main" in found.refs
    assert "lakewarden restore" in found.next


@pytest.mark.nightly
def test_no_advice_names_metadata_that_is_missing_however_much_is_missing_besides(
    facts: Lake, mender: Mender
) -> None:
    """Five files are named, and what is current needs five that are missing itself."""
    facts.iceberg("facts").append(id_rows(3))
    metadata = local(facts.iceberg("facts").metadata_location)
    then = set(parts(facts)["data"])
    with facts.iceberg("facts").transaction() as changes:
        for number in range(4, 9):
            changes.append(id_rows(number))
    for one in {*parts(facts)["data"]} - then:
        one.unlink()
    metadata.unlink()
    found = only(mender.plan().findings, "missing_file")
    assert (found.files, len(found.examples)) == (6, 5)
    assert str(metadata) not in found.examples
    version = int(found.next.partition("--version ")[2])
    warehouse = reopen(facts.root)
    assert set(found.refs) >= {"branch main", f"version {version + 1}", f"version {version + 2}"}
    warehouse.restore(warehouse.read(version=version), ("db", "facts"))
    assert iceberg_ids(catalog(facts.root)) == [1, 2]


@pytest.mark.nightly
def test_why_a_file_cannot_be_looked_at_is_told(facts: Lake, mender: Mender) -> None:
    table = facts.iceberg("facts")
    current = table.current_snapshot()
    assert current is not None
    place = "nowhere://lake/a.stats"
    told = {"snapshot-id": current.snapshot_id, "statistics-path": place, "blob-metadata": [],
            "file-size-in-bytes": 1, "file-footer-size-in-bytes": 1}  # fmt: skip
    table.update_statistics().set_statistics(StatisticsFile.model_validate(told)).commit()
    found = only(mender.plan().findings, "unreadable_file")
    assert found.examples == (place,)
    assert found.versions == (current.snapshot_id,)
    assert "nowhere" in found.means.partition("cannot be read (")[2]


# -- tables in no warehouse ------------------------------------------------------------------------


def test_all_versions_of_a_table_of_its_own_are_looked_at(
    tmp_path: Path, spark: SparkSession
) -> None:
    place = tmp_path / "t.lance"
    for number in (1, 2, 3):
        lance.write_dataset(id_rows(number), str(place), mode="append" if number > 1 else "create")
    found = lance.dataset(str(place))
    found.tags.create("mine", 2)
    found.create_branch("side").insert(id_rows(4))
    assert look_at(spark, place) == []
    (second,) = set(files_of(place, 2)) - set(files_of(place, 1))
    second.unlink()
    told = only(look_at(spark, place), "missing_file")
    assert set(told.versions) == {2, 3, 4}
    assert {"tag mine", "branch main", "branch side"} <= set(told.refs)
    assert "version=1).restore()" in told.next
    lance.dataset(str(place), version=1).restore()
    assert lance.dataset(str(place)).count_rows() == 1
