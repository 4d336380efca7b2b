"""Going back: one table or all of them, as a new version."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lakewarden.errors import (
    Conflict,
    LakewardenError,
    NotFound,
)
from lakewarden.model import Format
from lakewarden.storage.opening import Opener
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.manifest import Operation
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import (
    IDS,
    VERSIONS,
    Failure,
    Opening,
    T,
    Tampered,
    catalog,
    every_step,
    iceberg_ids,
    id_rows,
    is_open,
    lance_ids,
    make,
    names_of,
    on_branch,
    reopen,
    write,
)

# -- going back ------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def both(root: Path) -> Warehouse:
    """Lance table db.t with ids 1, 2 and Iceberg table db.facts with 10, 20, at the last version."""
    warehouse = make(root, actor="anna")
    namespace, facts = Namespace(warehouse), catalog(root)
    write(namespace, "create", 1)
    write(namespace, "append", 2)
    facts.create_namespace_if_not_exists("db")
    table = facts.create_table("db.facts", IDS)
    table.append(id_rows(10))
    table.append(id_rows(20))
    warehouse.refresh()
    return warehouse


def spoil(warehouse: Warehouse, root: Path) -> None:
    write(Namespace(warehouse), "append", 3)
    facts = catalog(root).load_table("db.facts")
    facts.overwrite(id_rows(99))


def rows(warehouse: Warehouse, root: Path) -> dict[str, list[int]]:
    """Read every table, each through its own client."""
    facts = catalog(root)
    return {
        ".".join(one.name): lance_ids(warehouse, one.name)
        if one.format is Format.LANCE
        else iceberg_ids(facts, ".".join(one.name))
        for one in warehouse.read().tables()
    }


BEFORE = {"db.facts": [10, 20], "db.t": [1, 2]}


def test_everything_comes_back_as_one_new_version(both: Warehouse, root: Path) -> None:
    good = both.read()
    spoil(both, root)
    bad = both.read()
    done = both.restore(good)
    assert done.version == bad.version + 1
    assert rows(both, root) == BEFORE
    (last,) = both.history(1)
    assert {one.operation for one in last.transaction.changes} == {Operation.RESTORE}
    assert last.transaction.message == f"restore version {good.version}"
    both.restore(bad)
    assert rows(both, root) == {"db.facts": [99], "db.t": [1, 2, 3]}
    both.restore(good, message="once more")
    assert rows(reopen(root), root) == BEFORE


def test_what_comes_back_can_be_written(both: Warehouse, root: Path) -> None:
    good = both.read()
    spoil(both, root)
    both.restore(good)
    write(Namespace(both), "append", 7)
    catalog(root).load_table("db.facts").append(id_rows(70))
    assert rows(reopen(root), root) == {"db.facts": [10, 20, 70], "db.t": [1, 2, 7]}


@pytest.mark.parametrize("name", [T, ("db", "facts")])
def test_one_table_comes_back_and_the_others_stay(
    both: Warehouse, root: Path, name: tuple[str, ...]
) -> None:
    good = both.read()
    spoil(both, root)
    spoilt = {"db.facts": [99], "db.t": [1, 2, 3]}
    both.restore(good, name)
    key = ".".join(name)
    assert rows(both, root) == {**spoilt, key: BEFORE[key]}


def test_going_back_to_what_is_there_makes_no_version(both: Warehouse) -> None:
    before = both.read()
    assert both.restore(before).version == before.version
    both.create_tag("here")
    assert both.restore(both.read(tag="here")).version == before.version + 1
    assert both.restore(before, T).version == before.version + 1


def test_tables_made_since_are_dropped_and_dropped_ones_come_back(
    both: Warehouse, root: Path
) -> None:
    good = both.read()
    both.drop(T)
    catalog(root).drop_table("db.facts")
    write(Namespace(both), "create", 5, name=("db", "new"))
    catalog(root).create_table("db.newer", IDS).append(id_rows(50))
    bad = both.read()
    both.restore(good)
    assert rows(both, root) == BEFORE
    both.restore(bad)
    assert rows(both, root) == {"db.new": [5], "db.newer": [50]}


def test_a_table_without_a_version_that_was_declared_since_is_dropped(both: Warehouse) -> None:
    good = both.read()
    both.declare(("db", "empty"), Format.LANCE)
    both.restore(good)
    assert names_of(both) == ["db.facts", "db.t"]


def test_a_table_without_a_version_that_was_dropped_since_comes_back(both: Warehouse) -> None:
    both.declare(("db", "empty"), Format.LANCE)
    good = both.read()
    both.drop(("db", "empty"))
    both.restore(good)
    assert names_of(both) == ["db.empty", "db.facts", "db.t"]


def test_a_dropped_table_comes_back_as_it_was_even_further_ago_and_can_be_written(
    both: Warehouse, root: Path
) -> None:
    """Its own head is newer than what comes back: readers by path must not see that head."""
    good = both.read()
    spoil(both, root)
    both.drop(T)
    catalog(root).drop_table("db.facts")
    both.restore(good)
    assert rows(both, root) == BEFORE
    write(Namespace(both), "append", 7)
    catalog(root).load_table("db.facts").append(id_rows(70))
    assert rows(reopen(root), root) == {"db.facts": [10, 20, 70], "db.t": [1, 2, 7]}


def test_names_come_back_with_everything(both: Warehouse, root: Path) -> None:
    good = both.read()
    spoil(both, root)
    both.rename(T, ("db", "other"))
    both.rename(("db", "facts"), ("db", "renamed"))
    both.restore(good)
    assert rows(both, root) == BEFORE


def test_a_table_renamed_since_comes_back(both: Warehouse, root: Path) -> None:
    """It is asked for by the name that it had then."""
    good = both.read()
    spoil(both, root)
    both.rename(T, ("db", "other"))
    both.restore(good, T)
    (found,) = (one for one in both.read().tables() if one.id == good.table(T).id)
    assert lance_ids(both, found.name) == [1, 2]


def test_a_table_never_comes_back_over_a_namesake(both: Warehouse) -> None:
    good = both.read()
    both.drop(T)
    write(Namespace(both), "create", 7)
    with pytest.raises(LakewardenError):
        both.restore(good, T)
    assert lance_ids(both) == [7]


def test_a_renamed_namesake_does_not_hide_what_comes_back(both: Warehouse, root: Path) -> None:
    write(Namespace(both), "create", 7, name=("db", "second"))
    good = both.read()
    both.drop(T)
    both.rename(("db", "second"), T)
    both.restore(good)
    assert rows(both, root) == {**BEFORE, "db.second": [7]}


def test_a_restore_never_takes_one_table_for_another(both: Warehouse, root: Path) -> None:
    """Another table has the name now that ours had then."""
    good = both.read()
    write(Namespace(both), "append", 3)
    both.rename(T, ("db", "ours"))
    write(Namespace(both), "create", 7)
    write(Namespace(both), "append", 8)
    both.restore(good, T)
    (ours,) = (one for one in both.read().tables() if one.id == good.table(T).id)
    assert lance_ids(both, ours.name) == [1, 2]
    assert [7, 8] in rows(both, root).values()


def test_a_warehouse_that_was_just_opened_goes_back(both: Warehouse, root: Path) -> None:
    good = both.known.version
    spoil(both, root)
    fresh = Warehouse.open(str(root))
    fresh.restore(fresh.read(version=good))
    assert rows(both, root) == BEFORE


def test_going_back_to_a_tag_and_a_time(both: Warehouse, root: Path) -> None:
    both.create_tag("good")
    moment = datetime.fromtimestamp(both.known.manifest.at_us / 1e6, UTC)
    spoil(both, root)
    both.restore(both.read(tag="good"))
    assert rows(both, root) == BEFORE
    spoil(both, root)
    both.restore(both.read(at=moment))
    assert rows(both, root) == BEFORE


def test_a_branch_goes_back_alone(both: Warehouse, root: Path) -> None:
    both.create_branch("side")
    side = on_branch(root, "side")
    good = both.read(branch="side")
    side.load_table("db.facts").append(id_rows(30))
    side.create_table("db.side", IDS)
    both.restore(replace(good, branch="side"))
    assert iceberg_ids(side) == [10, 20]
    assert names_of(both, branch="side") == ["db.facts", "db.t"]
    assert rows(both, root) == BEFORE


def test_a_table_that_was_not_there_then_does_not_come_back(both: Warehouse) -> None:
    first = both.read(version=1)
    with pytest.raises(NotFound):
        both.restore(first, T)


def test_a_restore_that_is_outrun_by_an_append_changes_nothing(both: Warehouse, root: Path) -> None:
    good = both.read()
    spoil(both, root)
    tampered = Tampered()
    late = reopen(root, opener=tampered)
    tampered.once("put_if_absent", VERSIONS, lambda: write(Namespace(reopen(root)), "append", 4))
    with pytest.raises(Conflict):
        late.restore(good)
    assert rows(reopen(root), root) == {"db.facts": [99], "db.t": [1, 2, 3, 4]}
    write(Namespace(both), "append", 5)
    late.restore(good)
    assert rows(reopen(root), root) == BEFORE


def test_an_append_that_is_outrun_by_a_restore_fails_or_is_put_on_top(
    both: Warehouse, root: Path
) -> None:
    good = both.read()
    spoil(both, root)
    tampered = Tampered()
    late = Namespace(reopen(root, opener=tampered))
    tampered.once("put_if_absent", VERSIONS, lambda: reopen(root).restore(good))
    try:
        write(late, "append", 4)
        expected = [1, 2, 4]
    except OSError:
        expected = [1, 2]
    assert lance_ids(reopen(root)) == expected


def test_a_restore_may_fail_anywhere_and_a_rerun_finishes_it(tmp_path: Path) -> None:
    place, saved = tmp_path / "lake", tmp_path / "saved"
    warehouse = make(place)
    write(Namespace(warehouse), "create", 1)
    facts = catalog(place)
    facts.create_namespace_if_not_exists("db")
    facts.create_table("db.facts", IDS).append(id_rows(10))
    good = warehouse.read().version
    write(Namespace(warehouse), "append", 2)
    facts.load_table("db.facts").append(id_rows(20))
    write(Namespace(warehouse), "create", 5, name=("db", "new"))
    after = warehouse.read().version + 1
    shutil.copytree(place, saved)

    def prepare() -> Opening:
        # Iceberg's metadata names absolute paths: every round takes place at the same one.
        shutil.rmtree(place)
        shutil.copytree(saved, place)
        return Opener()

    def act(opener: Opening) -> None:
        lake = reopen(place, opener=opener)
        lake.restore(lake.read(version=good))

    def check(opener: Opening, raised: Failure | None, where: str) -> None:
        lake = reopen(place)
        if raised is not None and lake.known.version == after:
            assert is_open(raised), (where, raised)
        if lake.known.version < after:
            assert raised is not None, where
            act(opener)
        lake = reopen(place)
        assert lake.known.version == after, where
        assert rows(lake, place) == {"db.facts": [10], "db.t": [1]}, where

    assert every_step(tmp_path / "calls", prepare, act, check) > 10
