"""Tables that come and go: dropped, brought back, renamed, and where they may lie."""

from __future__ import annotations

import pytest

from lakewarden.errors import (
    AlreadyExists,
    Conflict,
    ErrorKind,
    LakewardenError,
    NotFound,
    Refused,
    UsageError,
)
from lakewarden.model import Format
from lakewarden.testing.memory import MemoryStore
from lakewarden.warehouse.manifest import MAIN
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import (
    MEMORY,
    VERSIONS,
    T,
    Tampered,
    declared,
    moved,
    names_of,
    opened,
    pinned,
    prepared,
)

# -- tables that come and go -----------------------------------------------------------------------


def test_a_dropped_table_is_hidden_and_comes_back(lake: Warehouse) -> None:
    table = declared(lake)
    moved(lake, table, 1)
    lake.set_properties({"owner": "anna"}, T)
    before = lake.known.version
    lake.drop(T)
    assert names_of(lake) == []
    assert lake.known.manifest.tables[table.id].dropped == before + 1
    assert pinned(lake, version=before) == 1
    with pytest.raises(NotFound):
        lake.drop(T)
    found = lake.undrop(T)
    assert (found.id, found.dropped, dict(found.properties)) == (table.id, None, {"owner": "anna"})
    assert pinned(lake) == 1
    with pytest.raises(NotFound, match="no dropped table"):
        lake.undrop(T)


def test_a_table_without_a_version_can_be_dropped_and_brought_back(lake: Warehouse) -> None:
    declared(lake)
    lake.drop(T)
    assert names_of(lake) == []
    lake.undrop(T)
    assert names_of(lake) == ["db.t"]


def test_undrop_never_brings_a_namesake_over_a_table_that_is_there(lake: Warehouse) -> None:
    first = declared(lake)
    moved(lake, first, 1)
    lake.drop(T)
    second = declared(lake)
    moved(lake, second, 2)
    with pytest.raises(AlreadyExists, match="rename it first"):
        lake.undrop(T)
    lake.rename(T, ("db", "second"))
    assert lake.undrop(T).id == first.id
    assert (pinned(lake), pinned(lake, ("db", "second"))) == (1, 2)


def test_of_several_namesakes_the_last_that_was_dropped_comes_back_first(lake: Warehouse) -> None:
    found = []
    for version in (1, 2):
        table = declared(lake)
        moved(lake, table, version)
        lake.drop(T)
        found.append(table.id)
    assert lake.undrop(T).id == found[1]
    assert pinned(lake) == 2


def test_undrop_needs_no_version_from_before_the_drop(lake: Warehouse) -> None:
    table = declared(lake)
    moved(lake, table, 1)
    lake.drop(T)
    lake.log.handler.forget([2, 3])
    lake.undrop(T)
    assert lake.read().pins[table.id].version == 1


def test_a_table_dropped_on_a_branch_stays_on_main(lake: Warehouse) -> None:
    table = declared(lake)
    moved(lake, table, 1)
    lake.create_branch("side")
    lake.drop(T, branch="side")
    assert names_of(lake, branch="side") == []
    assert names_of(lake) == ["db.t"]
    moved(lake, table, 2)
    assert names_of(lake, branch="side") == []


def test_a_table_dropped_on_main_stays_on_a_branch(lake: Warehouse) -> None:
    table = declared(lake)
    moved(lake, table, 1)
    lake.create_branch("side")
    lake.drop(T)
    assert names_of(lake) == []
    assert pinned(lake, branch="side") == 1
    moved(lake, table, 2, "side")
    lake.undrop(T)
    assert (pinned(lake), pinned(lake, branch="side")) == (1, 2)


@pytest.mark.parametrize("version", [None, 1], ids=["empty", "written"])
def test_a_table_that_was_made_and_dropped_on_a_branch_is_gone_there(
    lake: Warehouse, version: int | None
) -> None:
    lake.create_branch("side")
    table = declared(lake, branch="side")
    if version is not None:
        moved(lake, table, version, "side")
    lake.drop(T, branch="side")
    assert names_of(lake, branch="side") == []
    assert declared(lake, branch="side").id != table.id


def test_a_renamed_table_stays_where_it_is(lake: Warehouse) -> None:
    table = declared(lake)
    moved(lake, table, 1)
    before = lake.known.version
    lake.rename(T, ("other", "name"))
    found = lake.read().table(("other", "name"))
    assert (found.id, found.location) == (table.id, table.location)
    assert (pinned(lake), pinned(lake, ("other", "name"))) == (None, 1)
    assert names_of(lake, version=before) == ["db.t"]
    declared(lake)
    assert names_of(lake) == ["db.t", "other.name"]


def test_a_rename_needs_a_table_and_a_free_good_name(lake: Warehouse) -> None:
    declared(lake)
    declared(lake, "db", "other")
    with pytest.raises(AlreadyExists):
        lake.rename(T, ("db", "other"))
    with pytest.raises(NotFound):
        lake.rename(("db", "none"), ("db", "x"))
    for bad in ((), ("",), ("a", "b/c"), ("__x",), ("a.b",)):
        with pytest.raises(UsageError) as raised:
            lake.rename(T, bad)
        assert raised.value.kind is ErrorKind.BAD_NAME
    assert names_of(lake) == ["db.other", "db.t"]


def test_of_two_who_take_one_name_at_once_one_loses(store: MemoryStore, lake: Warehouse) -> None:
    declared(lake, "db", "old")
    tampered = Tampered(lambda _: store)
    late = Warehouse.open(MEMORY, opener=tampered)
    tampered.once("put_if_absent", VERSIONS, lambda: declared(opened(store)))
    with pytest.raises(Conflict):
        late.rename(("db", "old"), T)
    tampered.once("put_if_absent", VERSIONS, lambda: declared(opened(store), "db", "y"))
    with pytest.raises(Conflict):
        late.declare(("db", "y"), Format.ICEBERG)
    assert names_of(lake) == ["db.old", "db.t", "db.y"]


def test_properties_are_set_and_taken_away(lake: Warehouse) -> None:
    declared(lake)
    lake.set_properties({"a": "1", "b": "2"}, T)
    lake.set_properties({"a": None, "c": "3"}, T)
    assert lake.read().table(T).properties == {"b": "2", "c": "3"}
    lake.set_properties({"x": "1"})
    lake.set_properties({"x": None, "y": "2"})
    assert lake.read().manifest.properties.items() >= {"y": "2"}.items()
    assert "x" not in lake.read().manifest.properties
    with pytest.raises(NotFound):
        lake.set_properties({"a": "b"}, ("db", "none"))


def test_a_table_is_not_dropped_over_a_write_that_nobody_has_looked_at(
    store: MemoryStore, lake: Warehouse
) -> None:
    table = declared(lake)
    tampered = Tampered(lambda _: store)
    late = Warehouse.open(MEMORY, opener=tampered)
    tampered.once("put_if_absent", VERSIONS, lambda: moved(opened(store), table, 1))
    with pytest.raises(Conflict) as raised:
        late.drop(T)
    assert raised.value.kind is ErrorKind.CONFLICT
    assert pinned(lake) == 1


def test_nothing_is_written_to_a_table_that_was_dropped_meanwhile(lake: Warehouse) -> None:
    late = prepared(lake, declared(lake), MAIN)
    lake.drop(T)
    with pytest.raises(Conflict) as raised:
        late()
    assert raised.value.kind is ErrorKind.INCOMPATIBLE
    assert names_of(lake) == []


# -- places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        "memory://lake/wh/mine",
        "memory://lake/wh/mine/",
        "memory://lake/wh/./mine",
        "memory://lake/wh/mine/deeper",
        "memory://lake/wh",
        "memory://lake",
        "memory://lake/wh/__manifest",
        "memory://lake/wh/__manifest/_versions",
    ],
)
def test_a_place_that_overlaps_with_another_table_or_the_log_is_refused(
    lake: Warehouse, place: str
) -> None:
    lake.declare(T, Format.LANCE, location="memory://lake/wh/mine")
    with pytest.raises(Refused) as raised:
        lake.declare(("db", "u"), Format.ICEBERG, location=place)
    assert raised.value.kind is ErrorKind.LOCATION_OVERLAP
    assert names_of(lake) == ["db.t"]


@pytest.mark.parametrize(
    "place", ["memory://lake/wh/mine2", "memory://lake/wh_mine", "memory://other/wh/mine"]
)
def test_neighbours_do_not_overlap(lake: Warehouse, place: str) -> None:
    lake.declare(T, Format.LANCE, location="memory://lake/wh/mine")
    lake.declare(("db", "u"), Format.ICEBERG, location=place)
    assert names_of(lake) == ["db.t", "db.u"]


def test_the_place_of_a_dropped_table_stays_taken(lake: Warehouse) -> None:
    lake.declare(T, Format.LANCE, location="memory://lake/wh/mine")
    lake.drop(T)
    with pytest.raises(Refused) as raised:
        lake.declare(("db", "u"), Format.LANCE, location="memory://lake/wh/mine")
    assert raised.value.kind is ErrorKind.LOCATION_OVERLAP
    # Of its own name a table may be made again, elsewhere.
    assert declared(lake).location != "memory://lake/wh/mine"


def test_of_two_who_take_one_place_at_once_one_loses(store: MemoryStore, lake: Warehouse) -> None:
    tampered = Tampered(lambda _: store)
    late, other = Warehouse.open(MEMORY, opener=tampered), opened(store)
    place = "memory://lake/wh/mine"
    tampered.once("put_if_absent", VERSIONS, lambda: other.declare(T, Format.LANCE, location=place))
    with pytest.raises(LakewardenError):
        late.declare(("db", "u"), Format.LANCE, location=place)
    assert names_of(lake) == ["db.t"]
