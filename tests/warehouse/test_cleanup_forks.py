"""Cleanup of a warehouse whose Lance tables are written on branches: forks that stay, and that go."""

from __future__ import annotations

from pathlib import Path

import lance
import pytest
from pyspark.sql import SparkSession

from lakewarden.errors import ErrorKind, LakewardenError, NotFound, Refused, UsageError
from lakewarden.maintenance.warehouse import LOG_AGE, Request
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.reclaiming import Rules, decide
from lakewarden.warehouse.warehouse import Warehouse
from lakewarden.world import SystemClock
from tests.warehouse.cleaning import NOW, Cleaner, Lake, before, floor_here, new_lake
from tests.warehouse.lakes import id_rows, write
from tests.warehouse.survivors import survivors

pytestmark = pytest.mark.spark
T = ("db", "t")


@pytest.fixture
def cleaner(spark: SparkSession) -> Cleaner:
    return Cleaner(spark)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    found = new_lake(tmp_path / "lake")
    found.lance("create", "t", 1)
    found.lance("append", "t", 2)
    return found


def on(lake: Lake, branch: str, mode: str, *ids: int) -> None:
    write(Namespace(lake.again(), branch=branch), mode, *ids, name=T)


def ids(warehouse: Warehouse, branch: str) -> list[int]:
    namespace = Namespace(warehouse, branch=branch)
    found = lance.dataset(namespace_client=namespace, table_id=list(T))
    return sorted(found.to_table()["id"].to_pylist())


def _with(rules: Rules) -> Request:
    return Request(rules, log_age=NOW)


def settled(lake: Lake) -> int:
    """Return a version that can be the floor: the last three stay in any case."""
    floor = floor_here(lake.again())
    for step in range(2):
        lake.again().set_properties({"step": str(step)})
    return floor


def forks(lake: Lake) -> set[str]:
    place = lake.place("t") / "tree"
    found = (one.relative_to(place).parts[0] for one in place.rglob("*") if one.is_file())
    return set(found)


def refs(lake: Lake) -> set[str]:
    place = lake.place("t") / "_refs/branches"
    return {one.stem for one in place.iterdir()} if place.exists() else set()


def made(warehouse: Warehouse, branch: str) -> str:
    return f"lakewarden-{warehouse.refresh().manifest.branches[branch].made}"


def test_branches_read_as_before_and_old_versions_on_them_go(lake: Lake, cleaner: Cleaner) -> None:
    """Several branches, nested and lazy; what each needs stays, whoever is the oldest."""
    warehouse = lake.warehouse
    for name in ("dev", "dev.a", "lazy"):
        source = "dev" if name == "dev.a" else "main"
        if name == "dev.a":
            on(lake, "dev", "append", 10)
            on(lake, "dev", "overwrite", 11)
        warehouse.create_branch(name, source=source)
    on(lake, "dev.a", "append", 20)
    for number in (12, 13):
        on(lake, "dev", "overwrite", number)
    for number in (3, 4):
        lake.lance("overwrite", "t", number)
    floor = settled(lake)
    on(lake, "dev", "append", 14)
    lake.lance("append", "t", 5)
    expected = survivors(lake.again(), floor)
    _, receipt = cleaner.run(lake.again(), before(floor))
    expected.check(lake.again())
    removed = {one.table_key: one.removed for one in receipt.tables}
    assert removed["db.t"].old_versions_removed >= 4
    assert removed["db.t"].data_files_removed >= 2
    seen = {name: ids(lake.again(), name) for name in ("main", "dev", "dev.a", "lazy")}
    assert seen == {"main": [4, 5], "dev": [13, 14], "dev.a": [11, 20], "lazy": [1, 2]}
    on(lake, "lazy", "append", 30)
    assert ids(lake.again(), "lazy") == [1, 2, 30]
    again, _ = cleaner.run(lake.again(), before(floor))
    assert again.changes == []


@pytest.mark.nightly
def test_the_fork_of_a_branch_that_was_deleted_goes_whatever_the_rules(
    lake: Lake, cleaner: Cleaner
) -> None:
    lake.warehouse.create_branch("dev")
    on(lake, "dev", "append", 10)
    lake.warehouse.create_branch("kept")
    on(lake, "kept", "append", 20)
    kept = made(lake.again(), "kept")
    lake.again().delete_branch("dev")
    expected = survivors(lake.again(), 1)
    cleaner.run(lake.again(), before(1, delete_unverified=True))
    assert (forks(lake), refs(lake)) == ({kept}, {kept})
    expected.check(lake.again())
    # Made again, it begins anew.
    lake.again().create_branch("dev")
    on(lake, "dev", "append", 11)
    assert ids(lake.again(), "dev") == [1, 2, 11]


@pytest.mark.nightly
def test_a_tag_keeps_what_a_deleted_branch_had(lake: Lake, cleaner: Cleaner) -> None:
    lake.warehouse.create_branch("dev")
    on(lake, "dev", "append", 10)
    lake.again().create_tag("mine", branch="dev")
    fork = made(lake.again(), "dev")
    lake.again().delete_branch("dev")
    for number in range(3, 7):
        lake.lance("overwrite", "t", number)
    floor = settled(lake)
    expected = survivors(lake.again(), floor)
    cleaner.run(lake.again(), before(floor, delete_unverified=True))
    expected.check(lake.again())
    assert fork in forks(lake)
    tagged = lake.again().read(tag="mine")
    lake.again().create_branch("again", version=tagged.version, source="dev")
    assert ids(lake.again(), "again") == [1, 2, 10]


@pytest.mark.nightly
def test_a_fork_that_nobody_has_committed_to_yet_stays(lake: Lake, cleaner: Cleaner) -> None:
    """A writer has opened the table on a branch, and is about to write."""
    lake.warehouse.create_branch("dev")
    namespace = Namespace(lake.again(), branch="dev")
    opened = lance.dataset(namespace_client=namespace, table_id=list(T))
    for number in range(3, 7):
        lake.lance("overwrite", "t", number)
    floor = settled(lake)
    # The writer goes on from a version of the log that it has seen a moment ago.
    cleaner.run(lake.again(), before(floor, log_age=LOG_AGE))
    assert forks(lake) == refs(lake) == {made(lake.again(), "dev")}
    opened.delete("id = 1")
    assert ids(lake.again(), "dev") == [2]


@pytest.mark.nightly
def test_drift_on_a_branch_holds_the_table_back(lake: Lake, cleaner: Cleaner) -> None:
    lake.warehouse.create_branch("dev")
    for number in range(10, 14):
        on(lake, "dev", "overwrite", number)
    floor = settled(lake)
    fork = lake.place("t") / "tree" / made(lake.again(), "dev")
    lance.dataset(str(fork)).delete("id = 13")
    warehouse = lake.again()
    receipt = cleaner.execute(cleaner.plan(warehouse, before(floor)), warehouse)
    failed = {one.table_key: one.error_kind for one in receipt.failed}
    assert failed == {"db.t": ErrorKind.DRIFT.value}


@pytest.mark.nightly
def test_a_table_whose_refs_cannot_be_read_is_an_error_and_the_others_are_done(
    lake: Lake, cleaner: Cleaner
) -> None:
    lake.warehouse.create_branch("dev")
    on(lake, "dev", "append", 10)
    lake.lance("create", "sound", 1)
    for name in ("t", "sound"):
        for number in (3, 4, 5):
            lake.lance("overwrite", name, number)
    floor = settled(lake)
    (ref,) = (lake.place("t") / "_refs/branches").iterdir()
    ref.write_bytes(b"{ damaged")
    warehouse = lake.again()
    receipt = cleaner.execute(cleaner.plan(warehouse, before(floor)), warehouse)
    assert {one.table_key for one in receipt.failed} == {"db.t"}
    removed = {one.table_key: one.removed.data_files_removed for one in receipt.tables}
    assert (removed["db.t"], removed["db.sound"]) == (0, 3)


def test_a_client_does_not_go_back_to_what_was_reclaimed(lake: Lake, cleaner: Cleaner) -> None:
    """Lance's own restore knows versions that are still there, though their files are going."""
    for number in range(3, 7):
        lake.lance("overwrite", "t", number)
    floor = settled(lake)
    namespace = Namespace(lake.again())
    old = lance.dataset(namespace_client=namespace, table_id=list(T), version=3)
    kept = lance.dataset(namespace_client=namespace, table_id=list(T), version=6)
    cleaner.run(lake.again(), before(floor))
    with pytest.raises((LakewardenError, OSError, RuntimeError, ValueError)), namespace.told():
        old.restore()
    kept.restore()
    assert ids(lake.again(), "main") == [6]


def test_who_reads_a_version_that_goes_is_told_that_it_was_reclaimed(
    lake: Lake, cleaner: Cleaner
) -> None:
    view = lake.warehouse.read()
    for number in range(3, 7):
        lake.lance("overwrite", "t", number)
    floor = settled(lake)
    cleaner.run(lake.again(), before(floor))
    with pytest.raises(NotFound) as raised:
        lake.again().restore(view)
    assert raised.value.kind is ErrorKind.RECLAIMED
    with pytest.raises(NotFound) as raised:
        lake.again().read(version=view.version)
    assert raised.value.kind is ErrorKind.RECLAIMED


@pytest.mark.parametrize(("keep", "stay"), [(1, 3), (3, 3), (5, 5), (10**6, 13)])
def test_at_least_three_versions_stay_and_never_more_than_asked_for(
    lake: Lake, keep: int, stay: int
) -> None:
    for number in range(3, 11):
        lake.lance("overwrite", "t", number)
    newest = lake.warehouse.refresh().version
    assert newest == 13
    rules = Rules(keep=keep, min_age=NOW)
    found = decide(lake.again(), rules, SystemClock().now())
    assert found.floor == newest - stay + 1
    assert bool(found.warnings) == (keep < 3)


def test_what_keeps_nothing_or_says_nothing_is_refused() -> None:
    for keep, version in ((0, None), (None, 0), (None, None), (-1, None)):
        with pytest.raises(UsageError):
            Rules(keep=keep, before_version=version)


@pytest.mark.nightly
def test_with_no_age_at_all_the_last_three_stay(lake: Lake, cleaner: Cleaner) -> None:
    for number in range(3, 7):
        lake.lance("overwrite", "t", number)
    newest = lake.warehouse.refresh().version
    plan = cleaner.plan(lake.again(), _with(Rules(older_than=NOW, min_age=NOW)))
    assert plan.reclaim.floor == newest - 2
    expected = survivors(lake.again(), newest - 2)
    cleaner.run(lake.again(), _with(Rules(older_than=NOW, min_age=NOW)))
    expected.check(lake.again())


def test_a_registered_table_is_cleaned_and_when_dropped_its_files_stay(
    tmp_path: Path, lake: Lake, cleaner: Cleaner
) -> None:
    place = tmp_path / "elsewhere/old.lance"
    lance.write_dataset(id_rows(1), place)
    lake.namespace.register_table({"id": ["db", "old"], "location": str(place)})
    lake.again().set_properties({"lakewarden.undrop-for": "0s"})
    for number in range(3, 7):
        lake.lance("overwrite", "old", number)
    floor = settled(lake)
    cleaner.run(lake.again(), before(floor))
    assert [one["version"] for one in lance.dataset(place).versions()] == [5]
    lake.again().drop(("db", "old"))
    cleaner.run(lake.again(), before(settled(lake), delete_unverified=True))
    assert lance.dataset(place).to_table()["id"].to_pylist() == [6]
    with pytest.raises((NotFound, Refused)):
        lake.again().undrop(("db", "old"))
