"""Which versions stay: examples, and properties that hold for every history and policy."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from lakewarden.errors import Damaged, ErrorKind, Refused, UsageError
from lakewarden.retention import (
    Branch,
    History,
    OnTagged,
    Policy,
    Tag,
    Version,
    decide,
)
from lakewarden.testing.strategies import NOW, durations, histories, policies

DAY = timedelta(days=1)
NO_MARGIN = timedelta(0)


def line(ages: dict[int, float], branch: str = "main") -> list[Version]:
    """Versions by number with their ages in days."""
    return [Version(number, branch, NOW - age * DAY) for number, age in ages.items()]


def kept(history: History, policy: Policy | None) -> dict[tuple[str, int], tuple[str, ...]]:
    return {
        (one.version.branch, one.version.number): one.reasons
        for one in decide(history, policy, NOW)
        if one.keep
    }


def going(history: History, policy: Policy | None) -> set[Version]:
    return {one.version for one in decide(history, policy, NOW) if not one.keep}


FIVE = line({1: 30, 2: 20, 3: 10, 4: 5, 5: 0.5})


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (Policy(keep=2), [4, 5]),
        (Policy(keep=1), [5]),
        (Policy(keep=99), [1, 2, 3, 4, 5]),
        (Policy(older_than=7 * DAY), [4, 5]),
        (Policy(older_than=NO_MARGIN), [5]),
        (Policy(older_than=7 * DAY, keep=3), [3, 4, 5]),
        (Policy(before_version=3), [3, 4, 5]),
        (Policy(before_version=99), [5]),
        (Policy(versions=frozenset({2, 5, 77})), [1, 3, 4, 5]),
        (Policy(versions=frozenset({2, 3}), older_than=15 * DAY), [1, 3, 4, 5]),
        (Policy(keep=1, min_age=6 * DAY), [4, 5]),
    ],
)
def test_rules_keep_what_they_say(policy: Policy, left: list[int]) -> None:
    assert sorted(number for _, number in kept(History(FIVE), policy)) == left


def test_reasons_name_every_rule_that_keeps() -> None:
    history = History(FIVE, [Tag("a", "main", 2), Tag("b", "main", 4)])
    policy = Policy(older_than=7 * DAY, keep=1, before_version=4, on_tagged=OnTagged.KEEP)
    assert kept(history, policy) == {
        ("main", 2): ("tag a",),
        ("main", 4): ("not before version 4", "younger than 7 days", "tag b"),
        ("main", 5): ("head", "last 1", "not before version 4", "younger than 7 days"),
    }


def test_without_a_policy_everything_stays() -> None:
    assert set(kept(History(FIVE), None).values()) == {
        ("head", "not being cleaned"),
        ("not being cleaned",),
    }


def test_unknown_ages_keep_when_age_matters_and_only_then() -> None:
    odd = [Version(1), Version(2, modified=NOW + DAY), *line({3: 9})]
    assert set(kept(History(odd), Policy(keep=1))) == {("main", 1), ("main", 2), ("main", 3)}
    assert set(kept(History(odd), Policy(keep=1, min_age=NO_MARGIN))) == {("main", 3)}


def test_limits_are_exact() -> None:
    """As old as `older_than` is not older; as old as `min_age` is not younger."""
    at = [Version(1, modified=NOW - DAY), Version(2, modified=NOW - DAY), *line({3: 0})]
    assert set(kept(History(at), Policy(older_than=DAY))) == {("main", n) for n in (1, 2, 3)}
    assert set(kept(History(at), Policy(keep=1, min_age=DAY))) == {("main", 3)}


def test_other_branches_are_left_alone() -> None:
    versions = [*FIVE, *line({2: 20, 3: 15, 4: 10}, "dev")]
    history = History(versions, [], [Branch("dev", "main", 2)])
    on_main = kept(history, Policy(keep=1))
    assert on_main["main", 2] == ("branch dev starts here",)
    assert {("dev", number) for number in (2, 3, 4)} < set(on_main)
    on_dev = kept(history, Policy(keep=1, branch="dev"))
    assert set(on_dev) == {("dev", 4), *(("main", number) for number in range(1, 6))}


def test_cascade_lets_go_of_the_start_of_a_branch() -> None:
    versions = [*FIVE, *line({2: 20, 3: 10}, "dev")]
    own = {"dev": Policy(keep=1)}
    history = History(versions, [], [Branch("dev", "main", 2)], own)
    cascading = Policy(keep=1, clean_referenced_branches=True)
    assert set(kept(history, cascading)) == {("main", 5), ("dev", 3)}
    # The margin of the run holds on branches, too.
    careful = replace(cascading, min_age=15 * DAY)
    assert ("dev", 3) in kept(history, careful)
    assert kept(history, careful)["main", 3]
    # A tag on the branch is kept around, not an error: the branch's owner set no such rule.
    tagged = replace(history, tags=[Tag("x", "dev", 2)])
    assert kept(tagged, cascading)["dev", 2] == ("tag x",)
    assert kept(tagged, cascading)["main", 2] == ("branch dev starts here",)


def test_cascade_leaves_branches_whose_start_stays() -> None:
    versions = [*FIVE, *line({4: 20, 5: 10}, "dev")]
    history = History(versions, [], [Branch("dev", "main", 4)], {"dev": Policy(keep=1)})
    policy = Policy(keep=2, clean_referenced_branches=True)
    assert {("dev", 4), ("dev", 5)} < set(kept(history, policy))


def test_detached_versions_stay_unless_asked() -> None:
    old = Version(2**40, modified=NOW - 30 * DAY, detached=True)
    pinned = Version(2**41, modified=NOW - 30 * DAY, detached=True)
    history = History([*FIVE, old, pinned], [Tag("x", "main", 2**41)])
    assert not {old, pinned} & going(history, Policy(older_than=DAY))
    assert not {old, pinned} & going(history, Policy(keep=1, expire_detached=True))
    policy = Policy(older_than=DAY, expire_detached=True, on_tagged=OnTagged.KEEP)
    assert {old, pinned} & going(history, policy) == {old}


def test_tagged_version_that_would_go_is_an_error_unless_kept() -> None:
    history = History(FIVE, [Tag("x", "main", 1), Tag("y", "main", 5)])
    with pytest.raises(Refused, match=r"1 tagged version.*tag x") as caught:
        decide(history, Policy(keep=1), NOW)
    assert caught.value.kind is ErrorKind.TAGGED_VERSION
    assert set(kept(history, Policy(keep=1, on_tagged=OnTagged.KEEP))) == {("main", 1), ("main", 5)}
    assert set(kept(history, Policy(keep=5))) == {("main", number) for number in range(1, 6)}


@pytest.mark.parametrize(
    ("history", "kind"),
    [
        (History(FIVE, [Tag("x", "main", 9)]), ErrorKind.DAMAGED_REF),
        (History(FIVE, [Tag("x", "dev", 1)]), ErrorKind.DAMAGED_REF),
        (History(FIVE, [], [Branch("dev", "main", 1)]), ErrorKind.DAMAGED_REF),
        (History([]), ErrorKind.NOT_A_TABLE),
        (History(line({1: 1}, "dev")), ErrorKind.NOT_A_TABLE),
    ],
)
def test_incomplete_picture_is_refused(history: History, kind: ErrorKind) -> None:
    for policy in (Policy(keep=1, on_tagged=OnTagged.KEEP), None):
        with pytest.raises(Damaged) as caught:
            decide(history, policy, NOW)
        assert caught.value.kind is kind


@pytest.mark.parametrize(
    "rules",
    [
        {}, {"keep": 0}, {"keep": -1}, {"keep": 2**63}, {"before_version": 0},
        {"versions": frozenset()}, {"versions": frozenset({0})}, {"older_than": -DAY},
        {"keep": 1, "min_age": -DAY},
    ],
)  # fmt: skip
def test_senseless_rules_are_refused(rules: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Policy(**rules)  # type: ignore[arg-type]


def test_unknown_branch_is_refused() -> None:
    with pytest.raises(UsageError):
        decide(History(FIVE), Policy(keep=1, branch="dev"), NOW)


@given(histories(), st.none() | policies())
def test_heads_stay_and_every_version_is_decided_once(
    history: History, policy: Policy | None
) -> None:
    decided = decide(history, policy, NOW)
    assert sorted(map(repr, (one.version for one in decided))) == sorted(
        map(repr, history.versions)
    )
    assert all(all(one.reasons) for one in decided)
    for name in {version.branch for version in history.versions}:
        attached = [
            one for one in decided
            if one.version.branch == name and not one.version.detached and not one.version.staged
        ]  # fmt: skip
        assert "head" in max(attached, key=lambda one: one.version.number).reasons
    event(f"going: {min(3, sum(not one.keep for one in decided))}")


@given(histories(), policies(), policies())
def test_adding_a_rule_never_removes_more(history: History, one: Policy, two: Policy) -> None:
    def both(name: str) -> object:
        mine, theirs = getattr(one, name), getattr(two, name)
        return theirs if mine is None else mine

    names = ("older_than", "keep", "before_version", "versions")
    more = replace(one, **{name: both(name) for name in names})  # type: ignore[arg-type]
    if one.expire_detached and one.older_than is None and two.older_than is not None:
        # `expire_detached` does nothing without `older_than`; giving that turns it on.
        more = replace(more, expire_detached=False)
    assert going(history, more) <= going(history, one)


@given(histories(), policies(), durations())
def test_longer_margin_never_removes_more(
    history: History, policy: Policy, margin: timedelta
) -> None:
    longer = replace(policy, min_age=policy.min_age + margin)
    assert going(history, longer) <= going(history, policy)


@given(histories(), policies(), st.data())
def test_adding_a_ref_never_removes_more(
    history: History, policy: Policy, data: st.DataObject
) -> None:
    version = data.draw(st.sampled_from([one for one in history.versions if not one.staged]))
    tagged = replace(history, tags=[*history.tags, Tag("new", version.branch, version.number)])
    assert version not in going(tagged, policy)
    assert going(tagged, policy) <= going(history, policy)
    if not version.detached:
        started = replace(
            history,
            versions=[*history.versions, Version(version.number, "new", NOW)],
            branches=[*history.branches, Branch("new", version.branch, version.number)],
        )
        assert version not in going(started, policy)
        assert going(started, policy) <= going(history, policy)


@given(histories(), policies(on_tagged=OnTagged.ERROR))
def test_stopping_at_tags_never_removes_a_tagged_version(history: History, policy: Policy) -> None:
    around = going(history, replace(policy, on_tagged=OnTagged.KEEP))
    try:
        gone = going(history, policy)
    except Refused:
        event("refused")
        return
    assert gone == around


@given(histories(), policies())
def test_only_the_branch_that_is_cleaned_loses_versions(history: History, policy: Policy) -> None:
    assert {version.branch for version in going(history, policy)} <= {"main"}
    assert not any(version.staged for version in going(history, policy))
