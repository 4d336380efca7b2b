"""Tags and branches of a whole warehouse."""

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
from lakewarden.testing.memory import MemoryStore
from lakewarden.warehouse.manifest import MAIN
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import (
    MEMORY,
    VERSIONS,
    T,
    Tampered,
    declared,
    keys,
    moved,
    names_of,
    opened,
    pinned,
    prepared,
)

# -- tags ------------------------------------------------------------------------------------------

BAD_REFS = ["", " ", "main", "HEAD", "12", ".", "..", "-x", "_x", "a/b", "a b", "a\n", "n" * 256]


@pytest.mark.parametrize("name", BAD_REFS)
def test_some_names_are_no_tags_and_no_branches(lake: Warehouse, name: str) -> None:
    for make_ref in (lake.create_tag, lake.create_branch):
        with pytest.raises(UsageError) as raised:
            make_ref(name)
        assert raised.value.kind is ErrorKind.BAD_NAME
    assert lake.read().version == 1


@pytest.mark.parametrize("name", ["a", "training-2026.11_b", "1.0", "Straße", "n" * 255])
def test_other_names_are(lake: Warehouse, name: str) -> None:
    lake.create_tag(name)
    lake.create_branch(name)
    assert lake.read(tag=name).version == 1
    assert lake.read(branch=name).branch == name


def test_one_name_in_two_spellings_is_one_tag(lake: Warehouse) -> None:
    lake.create_tag("na\u00efve")
    with pytest.raises(AlreadyExists):
        lake.create_tag("nai\u0308ve")
    assert lake.read(tag="nai\u0308ve").version == 1
    lake.delete_tag("nai\u0308ve")
    assert not lake.read().manifest.tags


def test_a_tag_stays_at_its_version(lake: Warehouse) -> None:
    table = declared(lake)
    moved(lake, table, 1)
    found = lake.create_tag("first")
    assert (found.version, found.branch) == (3, MAIN)
    moved(lake, table, 2)
    lake.drop(T)
    assert pinned(lake, tag="first") == 1
    assert pinned(lake) is None
    assert found.version in {one.version for one in lake.known.manifest.tags.values()}


def test_a_tag_can_be_given_to_an_older_version(lake: Warehouse) -> None:
    table = declared(lake)
    for version in (1, 2, 3):
        moved(lake, table, version)
    lake.create_tag("second", version=4)
    assert pinned(lake, tag="second") == 2


def test_a_tag_exists_once(lake: Warehouse) -> None:
    lake.create_tag("t1")
    with pytest.raises(AlreadyExists, match=r"version 1.*delete it first"):
        lake.create_tag("t1")
    lake.delete_tag("t1")
    with pytest.raises(NotFound):
        lake.read(tag="t1")
    with pytest.raises(NotFound):
        lake.delete_tag("t1")
    assert lake.create_tag("t1").version == 3


@pytest.mark.parametrize("version", [0, 7])
def test_what_is_not_there_gets_no_tag_and_no_branch(lake: Warehouse, version: int) -> None:
    for make_ref in (lake.create_tag, lake.create_branch):
        with pytest.raises(NotFound):
            make_ref("x", version=version)
    with pytest.raises(NotFound):
        lake.create_tag("x", branch="none")
    with pytest.raises(NotFound):
        lake.create_branch("x", source="none")
    assert lake.read().version == 1


def test_a_reclaimed_version_gets_no_tag(lake: Warehouse) -> None:
    lake.set_properties({"a": "b"})
    lake.log.handler.forget([1])
    with pytest.raises(NotFound) as raised:
        lake.create_tag("x", version=1)
    assert raised.value.kind is ErrorKind.RECLAIMED


def test_a_tag_of_a_branch_outlives_the_branch(lake: Warehouse) -> None:
    table = declared(lake)
    moved(lake, table, 1)
    lake.create_branch("side")
    moved(lake, table, 2, "side")
    lake.create_tag("there", branch="side")
    moved(lake, table, 3, "side")
    lake.delete_branch("side")
    assert pinned(lake, tag="there") == 2
    assert 2 in {pin.version for pin in lake.pinned_by_refs()}


def test_of_two_who_make_one_tag_at_once_one_loses(store: MemoryStore, lake: Warehouse) -> None:
    tampered = Tampered(lambda _: store)
    late = Warehouse.open(MEMORY, opener=tampered)
    tampered.once("put_if_absent", VERSIONS, lambda: opened(store).create_tag("t1"))
    with pytest.raises(Conflict):
        late.create_tag("t1")
    assert lake.read().version == 2


def test_a_tag_is_of_the_version_that_was_seen_though_others_are_faster(
    store: MemoryStore, lake: Warehouse
) -> None:
    declared(lake)
    tampered = Tampered(lambda _: store)
    late = Warehouse.open(MEMORY, opener=tampered)
    tampered.once("put_if_absent", VERSIONS, lambda: opened(store).drop(T))
    assert late.create_tag("t1").version == 2
    assert names_of(lake, tag="t1") == ["db.t"]


# -- branches --------------------------------------------------------------------------------------


def test_a_branch_copies_nothing_and_goes_its_own_way(lake: Warehouse, store: MemoryStore) -> None:
    table, other = declared(lake), declared(lake, "db", "other")
    moved(lake, table, 1)
    moved(lake, other, 1)
    before = set(keys(store))
    lake.create_branch("side")
    assert {key.split("/")[2] for key in set(keys(store)) - before} == {
        "_versions",
        "_transactions",
    }
    assert lake.known.manifest.branches["side"].pins == {}
    assert lake.read(branch="side").pins == lake.read().pins
    moved(lake, table, 2)
    moved(lake, table, 77, "side")
    assert (pinned(lake), pinned(lake, branch="side")) == (2, 77)
    assert lake.known.manifest.branches["side"].pins.keys() == {table.id}
    declared(lake, "db", "new")
    assert names_of(lake, branch="side") == ["db.other", "db.t"]


def test_a_branch_begins_at_any_version_of_any_branch(lake: Warehouse) -> None:
    table = declared(lake)
    moved(lake, table, 1)
    lake.create_branch("side")
    moved(lake, table, 5, "side")
    there = lake.known.version
    moved(lake, table, 6, "side")
    lake.create_branch("deep", version=there, source="side")
    moved(lake, table, 9)
    moved(lake, table, 7, "side")
    assert pinned(lake, branch="deep") == 5
    lake.create_branch("deeper", source="deep")
    moved(lake, table, 55, "deep")
    assert pinned(lake, branch="deeper") == 5
    lake.create_branch("old", version=there, source=MAIN)
    assert pinned(lake, branch="old") == 1


def test_a_branch_with_children_is_not_deleted(lake: Warehouse) -> None:
    lake.create_branch("a")
    lake.create_branch("b", source="a")
    with pytest.raises(Refused, match="delete b first"):
        lake.delete_branch("a")
    lake.delete_branch("b")
    lake.delete_branch("a")
    assert list(lake.read().manifest.branches) == [MAIN]
    with pytest.raises(NotFound):
        lake.delete_branch("a")


def test_main_is_not_deleted(lake: Warehouse) -> None:
    with pytest.raises(LakewardenError, match="main cannot be deleted"):
        lake.delete_branch(MAIN)


def test_a_branch_that_is_made_again_begins_anew(lake: Warehouse) -> None:
    table = declared(lake)
    moved(lake, table, 1)
    lake.create_branch("side")
    moved(lake, table, 50, "side")
    then = lake.known.version
    with pytest.raises(AlreadyExists):
        lake.create_branch("side")
    lake.delete_branch("side")
    with pytest.raises(NotFound):
        lake.read(branch="side")
    moved(lake, table, 2)
    lake.create_branch("side")
    assert pinned(lake, branch="side") == 2
    with pytest.raises(NotFound) as raised:
        pinned(lake, version=then, branch="side")
    assert raised.value.kind is ErrorKind.RECLAIMED


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "deleted and made again"])
def test_nothing_is_written_to_a_branch_that_was_deleted_meanwhile(
    lake: Warehouse, again: bool
) -> None:
    table = declared(lake)
    lake.create_branch("side")
    late = prepared(lake, table, "side")
    lake.delete_branch("side")
    if again:
        lake.create_branch("side")
    before = lake.known.version
    with pytest.raises(Conflict) as raised:
        late()
    assert raised.value.kind is ErrorKind.INCOMPATIBLE
    assert lake.read().version == before


def test_a_branch_is_not_deleted_when_somebody_has_just_written_to_it(
    store: MemoryStore, lake: Warehouse
) -> None:
    table = declared(lake)
    lake.create_branch("side")
    tampered = Tampered(lambda _: store)
    late = Warehouse.open(MEMORY, opener=tampered)
    tampered.once("put_if_absent", VERSIONS, lambda: moved(opened(store), table, 1, "side"))
    with pytest.raises(Conflict):
        late.delete_branch("side")
    assert pinned(lake, branch="side") == 1


def test_a_branch_is_not_deleted_when_somebody_has_just_branched_from_it(
    store: MemoryStore, lake: Warehouse
) -> None:
    lake.create_branch("side")
    tampered = Tampered(lambda _: store)
    late = Warehouse.open(MEMORY, opener=tampered)
    other = opened(store)
    tampered.once("put_if_absent", VERSIONS, lambda: other.create_branch("child", source="side"))
    with pytest.raises(Conflict):
        late.delete_branch("side")
    assert lake.read(branch="child").branch == "child"


def test_no_branch_begins_on_one_that_was_just_deleted(store: MemoryStore, lake: Warehouse) -> None:
    lake.create_branch("side")
    tampered = Tampered(lambda _: store)
    late = Warehouse.open(MEMORY, opener=tampered)
    tampered.once("put_if_absent", VERSIONS, lambda: opened(store).delete_branch("side"))
    with pytest.raises(Conflict):
        late.create_branch("child", source="side")
    assert list(lake.read().manifest.branches) == [MAIN]


def test_a_table_made_on_a_branch_is_known_there_alone(lake: Warehouse) -> None:
    lake.create_branch("side")
    here = declared(lake, branch="side")
    moved(lake, here, 1, "side")
    assert names_of(lake) == []
    assert names_of(lake, branch="side") == ["db.t"]
    there = declared(lake)
    moved(lake, there, 9)
    assert (pinned(lake), pinned(lake, branch="side")) == (9, 1)
