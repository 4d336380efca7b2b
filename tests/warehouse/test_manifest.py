"""Versions applied one after the other are the warehouse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakewarden.errors import Damaged, ErrorKind
from lakewarden.warehouse import manifest as manifest_module
from lakewarden.warehouse.codec import CHECKPOINTS
from lakewarden.warehouse.manifest import (
    CONTENT,
    EMPTY,
    MAIN,
    STAMP,
    Branch,
    Change,
    Logged,
    Manifest,
    Operation,
    Tag,
    apply,
    replay,
)
from tests.warehouse.small import append, content, create, logged, pin, ref, table, transaction


def after(*versions: tuple[Change, ...], **fields: Any) -> Manifest:
    """Return the warehouse after versions of these changes; `fields` are those of the last one."""
    last = len(versions)
    return replay(
        EMPTY,
        [
            logged(number, *changes, **(fields if number == last else {}))
            for number, changes in enumerate(versions, start=1)
        ],
    )


MADE = (create("a", after=pin(1)),)


# -- tables --------------------------------------------------------------------------------------


def test_a_table_that_is_made_has_its_name_and_pin() -> None:
    found = after(MADE)
    assert found.tables == {"a": table("a")}
    assert found.pins() == {"a": pin(1)}
    assert (found.version, found.at_us) == (1, 1_000_000)


def test_a_table_that_is_only_declared_has_no_pin() -> None:
    found = after((create("a"),))
    assert found.tables == {"a": table("a")}
    assert found.pins() == {}


def test_its_first_write_gives_a_declared_table_a_pin() -> None:
    found = after((create("a"),), (Change(Operation.OVERWRITE, "a", after=pin(1)),))
    assert found.pins() == {"a": pin(1)}


@pytest.mark.parametrize("operation", sorted(CONTENT))
def test_content_moves_the_pin_and_nothing_else(operation: Operation) -> None:
    before = after(MADE)
    found = after(MADE, (content(operation),))
    assert found.pins() == {"a": pin(2)}
    assert (found.tables, found.tags, found.properties) == (before.tables, {}, {})


def test_a_pin_keeps_all_that_is_said_of_it() -> None:
    whole = replace(pin(3), e_tag='"x"', through=("_versions/2.manifest",))
    found = after(MADE, (Change(Operation.APPEND, "a", pin(1), whole),))
    assert found.pins()["a"] == whole


def test_a_dropped_table_keeps_its_place_but_not_its_pin() -> None:
    found = after(MADE, (Change(Operation.DROP, "a", before=pin(1)),))
    assert found.pins() == {}
    assert found.tables == {"a": table("a", dropped=2, dropped_us=2_000_000, last=pin(1))}


def test_undrop_brings_back_pin_and_name() -> None:
    drop = (Change(Operation.DROP, "a", before=pin(1)),)
    found = after(MADE, drop, (Change(Operation.UNDROP, "a", name=("b",), after=pin(1)),))
    assert found.pins() == {"a": pin(1)}
    assert found.tables == {"a": table("a", "b")}


def test_a_table_that_is_made_again_is_another_one() -> None:
    drop = (Change(Operation.DROP, "a", before=pin(1)),)
    found = after(MADE, drop, (create("a2", "a", pin(1)),))
    assert found.pins() == {"a2": pin(1)}
    assert {one.id for one in found.tables.values() if one.name == ("a",)} == {"a", "a2"}


def test_a_rename_keeps_id_place_and_pin() -> None:
    found = after(MADE, (Change(Operation.RENAME, "a", name=("db", "b")),))
    assert found.tables == {"a": replace(table("a"), name=("db", "b"))}
    assert found.pins() == {"a": pin(1)}


def test_properties_are_set_changed_and_taken_away() -> None:
    found = after(
        MADE,
        (Change(Operation.PROPERTIES, "a", properties={"x": "1", "y": "1", "z": ""}),),
        (Change(Operation.PROPERTIES, "a", properties={"x": "2", "y": None, "none": None}),),
    )
    assert found.tables["a"].properties == {"x": "2", "z": ""}
    assert found.properties == {}


def test_a_transaction_may_change_many_tables_and_one_of_them_twice() -> None:
    found = after((create("a", after=pin(1)), create("b"), append("a", 2), append("b", 1)))
    assert found.pins() == {"a": pin(2), "b": pin(1)}


# -- the warehouse itself ------------------------------------------------------------------------


def test_tags_come_and_go() -> None:
    found = after(MADE, (ref(Operation.TAG, "x", version=1), ref(Operation.TAG, "y")))
    assert found.tags == {"x": Tag(1, MAIN, 2_000_000), "y": Tag(1, MAIN, 2_000_000)}
    found = apply(found, logged(3, ref(Operation.UNTAG, "x"), ref(Operation.UNTAG, "never-was")))
    assert list(found.tags) == ["y"]


def test_a_tag_of_a_branch_says_so() -> None:
    found = after((ref(Operation.BRANCH, "dev"),), (ref(Operation.TAG, "x", source="dev"),))
    assert found.tags["x"] == Tag(1, "dev", 2_000_000)


def test_settings_are_set_changed_and_taken_away() -> None:
    found = after(
        (Change(Operation.SETTINGS, properties={"x": "1", "y": "1"}),),
        (Change(Operation.SETTINGS, properties={"x": "2", "y": None}),),
    )
    assert found.properties == {"x": "2"}


def test_a_branch_begins_where_it_is_told() -> None:
    found = after(MADE, (append(),), (ref(Operation.BRANCH, "dev", version=1),))
    assert found.branches["dev"] == Branch(3, 1, MAIN)
    assert found.branches[MAIN] == Branch(0, pins={"a": pin(2)})


def test_a_branch_of_no_given_version_begins_at_the_one_before() -> None:
    found = after(MADE, (ref(Operation.BRANCH, "dev"),))
    assert found.branches["dev"] == Branch(2, 1, MAIN)


def test_a_branch_has_pins_of_its_own() -> None:
    base = after(MADE).pins()
    found = after(MADE, (ref(Operation.BRANCH, "dev"),), (append("a", 7),), branch="dev")
    assert found.pins() == {"a": pin(1)}
    assert found.pins("dev", base) == {"a": pin(7)}
    assert found.pins("dev", {"a": pin(1), "b": pin(4)}) == {"a": pin(7), "b": pin(4)}


def test_a_drop_on_a_branch_hides_the_table_there_alone() -> None:
    base = after(MADE).pins()
    drop = Change(Operation.DROP, "a", before=pin(1))
    found = after(MADE, (ref(Operation.BRANCH, "dev"),), (drop,), branch="dev")
    assert found.pins() == {"a": pin(1)}
    assert found.pins("dev", base) == {}
    assert found.tables["a"].dropped is None


def test_a_drop_on_main_leaves_a_branch_what_it_has() -> None:
    base = after(MADE).pins()
    drop = Change(Operation.DROP, "a", before=pin(1))
    found = after(MADE, (ref(Operation.BRANCH, "dev"),), (drop,))
    assert found.pins("dev", base) == {"a": pin(1)}


def test_a_branch_that_is_deleted_is_gone_with_its_pins() -> None:
    begin = (ref(Operation.BRANCH, "dev"),)
    found = after(MADE, begin, (append("a", 7),), branch="dev")
    found = apply(found, logged(4, ref(Operation.UNBRANCH, "dev")))
    assert list(found.branches) == [MAIN]
    again = apply(found, logged(5, *begin))
    assert again.branches["dev"] == Branch(5, 4, MAIN), "it is told from the earlier one"


# -- requests ------------------------------------------------------------------------------------


def asked(number: int) -> Logged:
    return logged(number, Change(Operation.SETTINGS), request=f"r{number}")


def test_requests_are_remembered_with_their_versions() -> None:
    found = replay(EMPTY, [asked(1), logged(2, Change(Operation.SETTINGS)), asked(3)])
    assert found.requests == {"r1": 1, "r3": 3}


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7])
def test_the_oldest_requests_fall_out_and_no_others(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(manifest_module, "REMEMBERED", limit)
    found = EMPTY
    for number in range(1, 3 * limit):
        found = apply(found, asked(number))
        first = max(1, number - limit + 1)
        assert found.requests == {f"r{one}": one for one in range(first, number + 1)}


# -- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 3, 4])
def test_a_version_that_does_not_follow_is_damage(version: int) -> None:
    found = after(MADE)
    with pytest.raises(Damaged, match="does not follow") as error:
        apply(found, logged(version, append()))
    assert error.value.kind is ErrorKind.CORRUPT_MANIFEST


def test_a_gap_anywhere_is_damage() -> None:
    versions = [logged(1, *MADE), *(logged(number, append()) for number in range(2, 8))]
    for missing in range(len(versions) - 1):
        with pytest.raises(Damaged):
            replay(EMPTY, versions[:missing] + versions[missing + 1 :])


@pytest.mark.parametrize(
    "operation",
    sorted({*CONTENT, Operation.DROP, Operation.UNDROP, Operation.RENAME, Operation.PROPERTIES}),
)
def test_a_change_of_an_unknown_table_is_damage(operation: Operation) -> None:
    with pytest.raises(Damaged, match="nobody") as error:
        apply(after(MADE), logged(2, Change(operation, "nobody", after=pin(1), name=("x",))))
    assert error.value.kind is ErrorKind.CORRUPT_MANIFEST


def test_a_version_of_an_unknown_branch_is_damage() -> None:
    with pytest.raises(Damaged, match="dev"):
        apply(after(MADE), logged(2, append(), branch="dev"))


def test_every_operation_can_be_applied() -> None:
    for operation in Operation:
        made = table("x") if operation is Operation.CREATE else None
        change = Change(operation, "x" if made else "a", name=("n",), made=made, after=pin(2))
        assert apply(after(MADE), logged(2, change)).version == 2


# -- histories -----------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[Logged]:
    """Histories in which every change is of something that there is."""
    tables: list[str] = []
    branches = [MAIN]
    versions: list[Logged] = []
    for version in range(1, draw(st.integers(1, 12)) + 1):
        branch = draw(st.sampled_from(branches))
        changes = []
        for at in range(draw(st.integers(1, 3))):
            change = draw(changes_of(tables, branches, f"{version}-{at}"))
            if change.operation is Operation.UNBRANCH and change.name == (branch,):
                continue
            changes.append(change)
            tables += [change.table] if change.made is not None else []
            branches += [*change.name] if change.operation is Operation.BRANCH else []
            if change.operation is Operation.UNBRANCH:
                branches.remove(change.name[0])
        request = draw(st.none() | st.sampled_from(["r1", "r2"]))
        versions.append(logged(version, *changes, branch=branch, request=request))
    return versions


@st.composite
def changes_of(draw: st.DrawFn, tables: list[str], branches: list[str], fresh: str) -> Change:
    properties = st.dictionaries(st.sampled_from("xyz"), st.none() | st.text(max_size=3))
    names = st.tuples(st.sampled_from(["n", "m"]))
    pins = st.integers(1, 9).map(pin)
    whole = [
        st.builds(Change, st.just(Operation.SETTINGS), properties=properties),
        st.builds(Change, st.sampled_from([Operation.TAG, Operation.UNTAG]), name=names),
        st.builds(lambda after: create(f"t{fresh}", after=after), st.none() | pins),
        st.builds(Change, st.just(Operation.BRANCH), name=st.just((f"b{fresh}",))),
    ]
    others = branches[1:]
    if others:
        gone = st.tuples(st.sampled_from(others))
        whole.append(st.builds(Change, st.just(Operation.UNBRANCH), name=gone))
    if tables:
        one = st.sampled_from(tables)
        whole += [
            st.builds(Change, st.sampled_from(sorted(CONTENT)), one, after=pins),
            st.builds(Change, st.just(Operation.DROP), one, before=pins),
            st.builds(Change, st.just(Operation.UNDROP), one, name=names, after=pins),
            st.builds(Change, st.just(Operation.RENAME), one, name=names),
            st.builds(Change, st.just(Operation.PROPERTIES), one, properties=properties),
        ]
    return draw(st.one_of(whole))


#: Histories are long to make.
FEWER = settings(max_examples=max(20, settings().max_examples // 5))


@FEWER
@given(histories(), st.data())
def test_replay_in_pieces_is_replay_in_one_go(versions: list[Logged], data: st.DataObject) -> None:
    whole = replay(EMPTY, versions)
    cut = data.draw(st.integers(0, len(versions)))
    assert replay(replay(EMPTY, versions[:cut]), versions[cut:]) == whole


@FEWER
@given(histories(), st.data())
def test_replay_from_a_stored_checkpoint_is_the_same(
    versions: list[Logged], data: st.DataObject
) -> None:
    whole = replay(EMPTY, versions)
    cut = data.draw(st.integers(0, len(versions)))
    stored = CHECKPOINTS.encode(replay(EMPTY, versions[:cut]))
    assert replay(CHECKPOINTS.decode(stored, "checkpoint"), versions[cut:]) == whole


@FEWER
@given(histories())
def test_no_version_changes_an_earlier_one(versions: list[Logged]) -> None:
    found = [EMPTY]
    for version in versions:
        found.append(apply(found[-1], version))
    seen = [CHECKPOINTS.encode(one) for one in found]
    for version in versions:
        apply(found[version.version - 1], version)
        apply(found[version.version - 1], replace(version, transaction=transaction(*MADE)))
    assert [CHECKPOINTS.encode(one) for one in found] == seen
    assert Manifest(STAMP) == EMPTY


def test_later_versions_share_no_dictionary_that_changes() -> None:
    first = after(MADE, (ref(Operation.BRANCH, "dev"),))
    second = apply(first, logged(3, append("a", 2)))
    for name in ("tables", "tags", "properties", "requests", "branches"):
        assert getattr(first, name) is not getattr(second, name)
    assert first.branches[MAIN].pins == {"a": pin(1)}
    assert second.branches[MAIN].pins == {"a": pin(2)}
