"""Which snapshots stay: the peers' cases by their ids, and properties of every history.

The ids (IC-n: Iceberg Java and Spark, PY-n: PyIceberg) are those of the conformance checklist.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lakewarden.errors import Damaged, ErrorKind, Refused, UsageError
from lakewarden.expiry import (
    MS_MAX,
    Expiry,
    ExpiryPolicy,
    Ref,
    RefKind,
    Rules,
    Snapshot,
    SnapshotHistory,
    check_collectable,
    decide,
    encrypted,
    rules_for,
)

NOW = 1_800_000_000_000
DAY = timedelta(days=1)
DAY_MS = 86_400_000
BRANCH, TAG = RefKind.BRANCH, RefKind.TAG


def line(*ages: float, first: int = 1, parent: int | None = None) -> list[Snapshot]:
    """Snapshots with ages in days, each the parent of the next."""
    made: list[Snapshot] = []
    for number, age in enumerate(ages, first):
        made.append(Snapshot(number, NOW - int(age * DAY_MS), parent))
        parent = number
    return made


def run(history: SnapshotHistory, policy: ExpiryPolicy | None = None, **properties: str) -> Expiry:
    named = {name.replace("__", ".").replace("_", "-"): text for name, text in properties.items()}
    return decide(history, rules_for(named, policy or ExpiryPolicy()), NOW)


def going(result: Expiry) -> set[int]:
    return {one.snapshot.snapshot_id for one in result.decisions if not one.keep}


def reasons(result: Expiry, snapshot_id: int) -> tuple[str, ...]:
    return next(one.reasons for one in result.decisions if one.snapshot.snapshot_id == snapshot_id)


def main(snapshots: list[Snapshot], *refs: Ref) -> SnapshotHistory:
    last = snapshots[-1].snapshot_id
    return SnapshotHistory(snapshots, [Ref("main", last, BRANCH), *refs], last)


FIVE = main(line(30, 20, 10, 5, 0.5))


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        (ExpiryPolicy(), {1, 2, 3}),
        (ExpiryPolicy(older_than=DAY), {1, 2, 3, 4}),
        (ExpiryPolicy(older_than=timedelta(0)), {1, 2, 3, 4}),
        (ExpiryPolicy(older_than=15 * DAY), {1, 2}),
        (ExpiryPolicy(older_than=DAY, keep=3), {1, 2}),
        (ExpiryPolicy(older_than=36500 * DAY), set()),
        (ExpiryPolicy(keep=4), {1}),
        (ExpiryPolicy(keep=2**63 - 1), set()),
    ],
)
def test_age_and_number_combine(policy: ExpiryPolicy, gone: set[int]) -> None:
    """IC-7: what is young or among the last N stays."""
    assert going(run(FIVE, policy)) == gone


def test_reasons_say_every_rule_that_keeps() -> None:
    result = run(main(line(30, 4, 0.5), Ref("v1", 1, TAG)), ExpiryPolicy(keep=2))
    assert reasons(result, 1) == ("tag v1",)
    assert reasons(result, 2) == ("branch main, last 2", "younger than 5 days")
    assert reasons(result, 3) == (
        "head of branch main", "branch main, last 2", "younger than 5 days",
    )  # fmt: skip
    assert [one.branch for one in result.decisions] == ["main"] * 3


def test_ic8_named_snapshot_goes_although_a_property_would_keep_it() -> None:
    named = ExpiryPolicy(snapshots=frozenset({4}))
    result = run(FIVE, named, history__expire__min_snapshots_to_keep="5")
    assert going(result) == {4}
    assert reasons(result, 1) == ("not among the given snapshots",)


def test_named_snapshot_goes_whatever_its_branch_or_a_bad_property_says() -> None:
    refs = [Ref("main", 5, BRANCH, min_snapshots_to_keep=5, max_snapshot_age_ms=MS_MAX)]
    history = SnapshotHistory(FIVE.snapshots, refs, 5)
    named = ExpiryPolicy(snapshots=frozenset({1, 4}))
    properties = {
        "history__expire__max_snapshot_age_ms": "soon",
        "lakewarden__history__expire__min_snapshots_to_expire": "20",
    }
    assert going(run(history, named, **properties)) == {1, 4}


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        ({}, {2, 4}),
        ({"older_than": 7 * DAY}, {2}),
        ({"older_than": 20 * DAY}, set()),
        ({"older_than": 20 * DAY - timedelta(milliseconds=1)}, {2}),
        ({"keep": 2}, {2}),
        ({"keep": 1}, {2, 4}),
        ({"keep": 2, "older_than": 25 * DAY}, set()),
        ({"min_snapshots_to_expire": 2}, {2, 4}),
        ({"min_snapshots_to_expire": 3}, set()),
    ],
)
def test_rules_given_with_ids_must_let_them_go_too(rules: dict[str, Any], gone: set[int]) -> None:
    named = ExpiryPolicy(snapshots=frozenset({2, 4}), **rules)
    assert going(run(FIVE, named)) == gone


def test_ids_leave_refs_alone() -> None:
    history = main(line(30, 20, 1), Ref("old", 1, TAG, max_ref_age_ms=1), Ref("lost", 99, TAG))
    result = run(history, ExpiryPolicy(snapshots=frozenset({2})))
    assert (going(result), result.expired_refs) == ({2}, ())


def test_ids_with_age_hold_what_is_young_behind_something_old() -> None:
    """The walk of a branch would stop at 2; a rule given with ids looks at each id."""
    history = main(line(0.1, 20, 0.1, 0))
    assert going(run(history, ExpiryPolicy(snapshots=frozenset({1}), older_than=DAY))) == set()


@pytest.mark.parametrize("keep", [5, 6, 100])
def test_ic10_ic11_more_than_there_are_keeps_all(keep: int) -> None:
    assert going(run(FIVE, ExpiryPolicy(older_than=timedelta(0), keep=keep))) == set()


def test_ic12_snapshot_at_the_cutoff_stays_and_more_than_n_may_stay() -> None:
    at = [Snapshot(1, NOW - DAY_MS - 1), Snapshot(2, NOW - DAY_MS, 1), Snapshot(3, NOW, 2)]
    assert going(run(main(at), ExpiryPolicy(older_than=DAY, keep=1))) == {1}


def test_ic15_less_than_one_is_rejected() -> None:
    for keep in (0, -1):
        with pytest.raises(UsageError):
            ExpiryPolicy(keep=keep)
        with pytest.raises(Refused, match="min-snapshots-to-keep"):
            rules_for({"history.expire.min-snapshots-to-keep": str(keep)}, ExpiryPolicy())


@pytest.mark.parametrize("value", ["false", "FALSE", "", "no", "yes", " true", "0"])
def test_ic26_gc_disabled_is_refused(value: str) -> None:
    with pytest.raises(Refused, match=r"gc\.enabled") as caught:
        check_collectable({"gc.enabled": value})
    assert caught.value.kind is ErrorKind.GC_DISABLED
    assert "\n" not in caught.value.message


def test_gc_is_enabled_by_default() -> None:
    for properties in ({}, {"gc.enabled": "true"}, {"gc.enabled": "True"}):
        check_collectable(properties)


def test_encrypted_tables_are_skipped() -> None:
    assert encrypted({}) is None
    assert "encryption.key-id" in (encrypted({"encryption.key-id": "k"}) or "")


def test_ic27_properties_are_the_defaults() -> None:
    assert rules_for({}, ExpiryPolicy()) == Rules(432_000_000, 1, MS_MAX, 0)
    properties = {
        "history.expire.max-snapshot-age-ms": "86400000",
        "history.expire.min-snapshots-to-keep": "+2",
        "history.expire.max-ref-age-ms": str(MS_MAX),
        "lakekeeper.history.expire.min-snapshots-to-expire": "7",
    }
    assert rules_for(properties, ExpiryPolicy()) == Rules(DAY_MS, 2, MS_MAX, 7)
    assert going(run(FIVE, history__expire__max_snapshot_age_ms="86400000")) == {1, 2, 3, 4}
    assert going(run(FIVE, history__expire__min_snapshots_to_keep="4")) == {1}
    ours = {**properties, "lakewarden.history.expire.min-snapshots-to-expire": "3"}
    assert rules_for(ours, ExpiryPolicy()).min_snapshots_to_expire == 3


def test_command_line_overrides_properties() -> None:
    properties = {
        "history.expire.max-snapshot-age-ms": "never",
        "history.expire.min-snapshots-to-keep": "0",
        "history.expire.max-ref-age-ms": "-1",
        "lakewarden.history.expire.min-snapshots-to-expire": "x",
    }
    policy = ExpiryPolicy(2 * DAY, 3, None, 4 * DAY, 0)
    rules = rules_for(properties, policy)
    assert rules == Rules(2 * DAY_MS, 3, 4 * DAY_MS, 0, None, given_age=True, given_keep=True)


@pytest.mark.parametrize(
    "value", ["", "5d", "1.5", "1_000", " 5", "-1", "9223372036854775808", "٣"]
)
@pytest.mark.parametrize(
    "name",
    [
        "history.expire.max-snapshot-age-ms",
        "history.expire.min-snapshots-to-keep",
        "history.expire.max-ref-age-ms",
        "lakewarden.history.expire.min-snapshots-to-expire",
        "lakekeeper.history.expire.min-snapshots-to-expire",
    ],
)
def test_property_that_cannot_be_read_is_refused(name: str, value: str) -> None:
    with pytest.raises(Refused) as caught:
        rules_for({name: value}, ExpiryPolicy())
    assert name in caught.value.message
    assert repr(value) in caught.value.message


def test_ic29_tag_past_its_age_goes_with_its_snapshot() -> None:
    history = main(
        line(30, 20, 10, 0),
        Ref("old", 1, TAG, max_ref_age_ms=30 * DAY_MS - 1),
        Ref("exact", 2, TAG, max_ref_age_ms=20 * DAY_MS),
        Ref("plain", 3, TAG),
    )
    result = run(history)
    assert (going(result), result.expired_refs) == ({1}, ("old",))
    # What the ref says beats the table and the command line.
    result = run(history, ExpiryPolicy(max_ref_age=15 * DAY))
    assert (going(result), result.expired_refs) == ({1}, ("old",))
    result = run(history, ExpiryPolicy(max_ref_age=5 * DAY))
    assert (going(result), result.expired_refs) == ({1, 3}, ("old", "plain"))


def test_ic30_branch_past_its_age_goes_and_main_never() -> None:
    snapshots = [*line(40, 30), *line(20, first=3, parent=1)]
    refs = [Ref("main", 2, BRANCH, max_ref_age_ms=1), Ref("dev", 3, BRANCH)]
    history = SnapshotHistory(snapshots, refs, 2)
    result = run(history, history__expire__max_ref_age_ms=str(20 * DAY_MS - 1))
    assert (going(result), result.expired_refs) == ({1, 3}, ("dev",))
    result = run(history, history__expire__max_ref_age_ms=str(20 * DAY_MS))
    assert (going(result), result.expired_refs) == ({1}, ())


def test_young_snapshots_of_a_branch_that_goes_stay() -> None:
    snapshots = [*line(40, 3), *line(6, 4, first=3, parent=1)]
    history = main(snapshots[:2], Ref("dev", 4, BRANCH, max_ref_age_ms=DAY_MS))
    result = run(replace(history, snapshots=snapshots))
    assert (going(result), result.expired_refs) == ({1, 3}, ("dev",))
    assert reasons(result, 4) == ("not published, younger than 5 days",)
    assert [one.branch for one in result.decisions] == ["main", "main", "dev", "dev"]


@pytest.mark.parametrize("ref", [Ref("dev", 2, BRANCH), Ref("v1", 2, TAG)])
def test_ic34_py2_named_snapshot_that_a_ref_needs_is_an_error(ref: Ref) -> None:
    also = Ref("again", 2, TAG)
    with pytest.raises(Refused, match=rf"2 \(tag again, {ref}\)") as caught:
        run(main(list(FIVE.snapshots), also, ref), ExpiryPolicy(snapshots=frozenset({1, 2})))
    assert caught.value.kind is ErrorKind.TAGGED_VERSION


@pytest.mark.parametrize("refs", [FIVE.refs, (), [Ref("main", 4, BRANCH)]])
def test_ic55_py1_current_snapshot_cannot_go(refs: list[Ref]) -> None:
    with pytest.raises(Refused, match="5 ") as caught:
        run(replace(FIVE, refs=refs), ExpiryPolicy(snapshots=frozenset({5})))
    assert caught.value.kind is ErrorKind.TAGGED_VERSION


def test_ic35_unreferenced_snapshots_stay_while_young() -> None:
    staged = [
        Snapshot(11, NOW - 5 * DAY_MS, 1),
        Snapshot(12, NOW - 5 * DAY_MS - 1, 1),
        Snapshot(13, NOW + DAY_MS),
    ]
    result = run(replace(FIVE, snapshots=[*FIVE.snapshots, *staged]))
    assert going(result) == {1, 2, 3, 12}
    assert reasons(result, 11) == ("not published, younger than 5 days",)
    assert [one.branch for one in result.decisions[-3:]] == ["", "", ""]


def test_ic36_ancestors_of_a_tag_are_not_protected() -> None:
    snapshots = [*line(30, 0), *line(20, 10, first=3)]
    history = main(snapshots[:2], Ref("v1", 4, TAG))
    assert going(run(replace(history, snapshots=snapshots))) == {1, 3}


def test_tagged_snapshot_off_every_branch_is_published() -> None:
    snapshots = [*line(30, 0), Snapshot(3, NOW)]
    history = replace(main(snapshots[:2], Ref("v1", 3, TAG)), snapshots=snapshots)
    assert reasons(run(history), 3) == ("tag v1",)


def test_ic37_ancestors_of_a_branch_follow_its_own_rules() -> None:
    """A young ancestor that its branch lets go is not rescued as unreferenced."""
    snapshots = [*line(30, 0), *line(4, 3, first=3)]
    own = Ref("dev", 4, BRANCH, min_snapshots_to_keep=1, max_snapshot_age_ms=DAY_MS)
    result = run(replace(main(snapshots[:2], own), snapshots=snapshots))
    assert going(result) == {1, 3}


def test_ic38_limits_are_per_branch_and_what_any_keeps_stays() -> None:
    snapshots = [*line(40, 30, 20), *line(25, 15, first=4, parent=2)]
    refs = [
        Ref("main", 3, BRANCH, min_snapshots_to_keep=2),
        Ref("dev", 5, BRANCH, max_snapshot_age_ms=26 * DAY_MS),
    ]
    history = SnapshotHistory(snapshots, refs, 3)
    assert going(run(history)) == {1}
    # What a branch says beats the command line, in both directions.
    assert going(run(history, ExpiryPolicy(keep=3))) == {1}
    assert going(run(history, ExpiryPolicy(keep=4))) == set()
    assert going(run(history, ExpiryPolicy(older_than=365 * DAY, keep=1))) == set()
    no_age = [replace(ref, max_snapshot_age_ms=DAY_MS, min_snapshots_to_keep=1) for ref in refs]
    result = run(replace(history, refs=no_age), ExpiryPolicy(older_than=365 * DAY, keep=9))
    assert going(result) == {1, 2, 4}


@pytest.mark.parametrize("history", [main(line(0)), main(line(3, 2, 1))])
def test_ic44_nothing_to_do_changes_nothing(history: SnapshotHistory) -> None:
    result = run(history)
    assert (going(result), result.expired_refs, result.skipped) == (set(), (), None)


def test_ic51_empty_table_has_nothing_to_expire() -> None:
    empty = SnapshotHistory([], [])
    assert run(empty) == Expiry([])
    assert decide(empty, None, NOW) == Expiry([])
    with pytest.raises(Refused):
        run(empty, ExpiryPolicy(snapshots=frozenset({1})))


def test_py3_py6_unprotected_snapshots_go_by_id() -> None:
    assert going(run(FIVE, ExpiryPolicy(snapshots=frozenset({1})))) == {1}
    assert going(run(FIVE, ExpiryPolicy(snapshots=frozenset({1, 3, 4})))) == {1, 3, 4}


def test_py4_unknown_id_is_refused() -> None:
    with pytest.raises(Refused, match="77") as caught:
        run(FIVE, ExpiryPolicy(snapshots=frozenset({1, 77})))
    assert caught.value.kind is ErrorKind.NOT_FOUND


def test_py5_age_passes_over_what_is_protected() -> None:
    refs = [Ref("v1", 1, TAG), Ref("dev", 2, BRANCH)]
    history = main(list(FIVE.snapshots), *refs)
    assert going(run(history, ExpiryPolicy(older_than=timedelta(0)))) == {3, 4}


def test_walk_stops_at_the_first_that_is_old_and_far_back() -> None:
    """As in Java: what is younger behind it is not rescued."""
    assert going(run(main(line(1, 20, 1)), ExpiryPolicy(older_than=5 * DAY))) == {1, 2}


def test_main_missing_in_old_metadata_is_the_current_snapshot() -> None:
    history = replace(FIVE, refs=())
    assert going(run(history)) == {1, 2, 3}
    assert reasons(run(history), 5)[0] == "head of branch main"


def test_current_snapshot_stays_even_if_main_is_elsewhere() -> None:
    history = replace(FIVE, refs=[Ref("main", 5, BRANCH)], current_id=1)
    assert reasons(run(history), 1) == ("current snapshot",)


@pytest.mark.parametrize("rules", [None, Rules(), Rules(snapshots=frozenset({1}))])
@pytest.mark.parametrize(
    "history",
    [
        SnapshotHistory(FIVE.snapshots, [Ref("main", 9, BRANCH)]),
        SnapshotHistory(FIVE.snapshots, [], 9),
        SnapshotHistory(FIVE.snapshots, [Ref("main", 5, BRANCH)], 9),
        SnapshotHistory([], [], 9),
    ],
)
def test_main_without_its_snapshot_is_damage(history: SnapshotHistory, rules: Rules | None) -> None:
    with pytest.raises(Damaged, match="9") as caught:
        decide(history, rules, NOW)
    assert caught.value.kind is ErrorKind.DAMAGED_REF


def test_other_ref_without_its_snapshot_goes() -> None:
    history = main(line(0), Ref("lost", 9, TAG), Ref("gone", 8, BRANCH))
    assert run(history).expired_refs == ("gone", "lost")


def test_missing_parent_and_cycle_end_the_walk() -> None:
    shallow = main([Snapshot(1, NOW - 30 * DAY_MS, 77), Snapshot(2, NOW, 1)])
    assert going(run(shallow)) == {1}
    assert going(run(shallow, ExpiryPolicy(keep=5))) == set()
    circle = main([Snapshot(1, 0, 2), Snapshot(2, 0, 1)])
    assert going(run(circle)) == {1}
    assert going(run(circle, ExpiryPolicy(keep=9))) == set()


def test_endless_ages_keep_everything() -> None:
    endless = str(MS_MAX)
    old = main([Snapshot(1, 0), Snapshot(2, 1, 1)], Ref("t", 1, TAG))
    result = run(
        old, history__expire__max_snapshot_age_ms=endless, history__expire__max_ref_age_ms=endless
    )
    assert (going(result), result.expired_refs) == (set(), ())
    assert "snapshots never grow too old" in reasons(result, 1)


def test_odd_ages_are_said_exactly() -> None:
    result = run(FIVE, history__expire__max_snapshot_age_ms="43200001")
    assert "younger than 43200001 ms" in reasons(result, 5)


def test_too_few_to_expire_leaves_snapshots_and_refs() -> None:
    history = main(list(FIVE.snapshots), Ref("old", 1, TAG, max_ref_age_ms=1))
    result = run(history, ExpiryPolicy(min_snapshots_to_expire=3))
    assert (going(result), result.expired_refs) == ({1, 2, 3}, ("old",))
    result = run(history, ExpiryPolicy(min_snapshots_to_expire=4))
    assert (going(result), result.expired_refs) == (set(), ())
    assert result.skipped == "3 snapshot(s) can go, fewer than 4"
    assert reasons(result, 1) == ("tag old", "fewer than 4 can go")
    assert reasons(result, 2) == ("fewer than 4 can go",)


def test_without_rules_everything_stays() -> None:
    history = main(list(FIVE.snapshots), Ref("old", 1, TAG, max_ref_age_ms=1))
    result = decide(history, None, NOW)
    assert (going(result), result.expired_refs) == (set(), ())
    assert reasons(result, 1) == ("tag old", "not being expired")


@pytest.mark.parametrize(
    "rules",
    [
        {"keep": 2**63}, {"older_than": -DAY}, {"max_ref_age": -DAY}, {"snapshots": frozenset()},
        {"min_snapshots_to_expire": -1}, {"snapshots": frozenset({1}), "max_ref_age": DAY},
    ],
)  # fmt: skip
def test_senseless_rules_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ExpiryPolicy(**rules)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (ExpiryPolicy(), "expire snapshots as each table's properties say"),
        (
            ExpiryPolicy(5 * DAY, 1),
            "expire snapshots older than 5 days and beyond the last 1 of each branch",
        ),
        (
            ExpiryPolicy(5 * DAY),
            "expire snapshots older than 5 days; the number to keep as each table's properties say",
        ),
        (
            ExpiryPolicy(keep=2),
            "expire snapshots beyond the last 2 of each branch; the age as each table's properties say",
        ),
        (ExpiryPolicy(snapshots=frozenset({9, 3})), "expire snapshots 3, 9"),
        (
            ExpiryPolicy(DAY, 2, frozenset({3})),
            "expire snapshots 3 if older than 1 day and beyond the last 2 of each branch",
        ),
        (
            ExpiryPolicy(max_ref_age=30 * DAY),
            "expire snapshots as each table's properties say; branches and tags older than 30 days too",
        ),
        (
            ExpiryPolicy(min_snapshots_to_expire=20),
            "expire snapshots as each table's properties say; only if at least 20 can go",
        ),
    ],
)
def test_policy_in_words(policy: ExpiryPolicy, words: str) -> None:
    assert policy.describe() == words


AGES = st.sampled_from([0, 1, DAY_MS - 1, DAY_MS, DAY_MS + 1, 5 * DAY_MS, 5 * DAY_MS + 1, NOW, -5])
LIMITS = st.none() | st.sampled_from([1, DAY_MS, 5 * DAY_MS, MS_MAX])


@st.composite
def histories(draw: st.DrawFn) -> SnapshotHistory:
    """Histories with forks, lost parents, cycles, refs to nothing, and main sometimes implied."""
    ids = draw(st.lists(st.integers(1, 12), unique=True, max_size=9))
    parents = st.none() | st.integers(1, 12)
    snapshots = [Snapshot(number, NOW - draw(AGES), draw(parents)) for number in ids]
    refs = [
        Ref(
            name,
            draw(st.integers(1, 12)),
            draw(st.sampled_from(RefKind)),
            max_ref_age_ms=draw(LIMITS),
        )
        for name in draw(st.lists(st.sampled_from("abc"), unique=True))
    ]
    current = draw(st.sampled_from(ids)) if ids else None
    if current is not None and draw(st.booleans()):
        refs.append(Ref("main", current, BRANCH))
    refs = [
        replace(ref, min_snapshots_to_keep=draw(st.none() | st.integers(1, 4)),
                max_snapshot_age_ms=draw(LIMITS))
        if ref.kind is BRANCH else ref
        for ref in draw(st.permutations(refs))
    ]  # fmt: skip
    return SnapshotHistory(snapshots, refs, current)


def spans() -> st.SearchStrategy[timedelta | None]:
    return st.none() | st.sampled_from([timedelta(0), DAY, 5 * DAY, 36500 * DAY])


@st.composite
def policies(draw: st.DrawFn) -> ExpiryPolicy:
    return ExpiryPolicy(
        draw(spans()),
        draw(st.none() | st.integers(1, 5)),
        None,
        draw(spans()),
        draw(st.none() | st.integers(0, 3)),
    )


def restated(history: SnapshotHistory, rules: Rules) -> tuple[set[int], set[str]]:
    """What goes, in the words of the specification and of RemoveSnapshots.java."""
    stamp = {one.snapshot_id: one.timestamp_ms for one in history.snapshots}
    parent = {one.snapshot_id: one.parent_id for one in history.snapshots}
    refs = {ref.name: ref for ref in history.refs}
    if history.current_id is not None:
        refs.setdefault("main", Ref("main", history.current_id, BRANCH))
    lost = set()
    for name, ref in refs.items():
        longest = ref.max_ref_age_ms or rules.max_ref_age_ms
        if name != "main" and (
            ref.snapshot_id not in stamp or NOW - stamp[ref.snapshot_id] > longest
        ):
            lost.add(name)
    retained, referenced = set(), set()
    for ref in (ref for name, ref in refs.items() if name not in lost):
        retained.add(ref.snapshot_id)
        referenced.add(ref.snapshot_id)
        if ref.kind is TAG:
            continue
        chain: list[int] = []
        step: int | None = ref.snapshot_id
        while step in stamp and step not in chain:
            chain.append(step)
            step = parent[step]
        referenced.update(chain)
        oldest = NOW - (ref.max_snapshot_age_ms or rules.max_snapshot_age_ms)
        least = ref.min_snapshots_to_keep or rules.min_snapshots_to_keep
        stop = [at for at, one in enumerate(chain) if at >= least and stamp[one] < oldest]
        retained.update(chain[: min(stop, default=len(chain))])
    cutoff = NOW - rules.max_snapshot_age_ms
    retained |= {one for one in stamp if one not in referenced and stamp[one] >= cutoff}
    gone = set(stamp) - retained
    return (gone, lost) if len(gone) >= rules.min_snapshots_to_expire else (set(), set())


@given(histories(), policies())
@settings(max_examples=300)
def test_agrees_with_a_restatement(history: SnapshotHistory, policy: ExpiryPolicy) -> None:
    rules = rules_for({}, policy)
    result = decide(history, rules, NOW)
    assert (going(result), set(result.expired_refs)) == restated(history, rules)
    event(f"going: {min(3, len(going(result)))}, refs: {len(result.expired_refs)}")


@given(histories(), st.none() | policies())
def test_what_is_named_stays_and_everything_is_decided_once(
    history: SnapshotHistory, policy: ExpiryPolicy | None
) -> None:
    untouched = copy.deepcopy(history)
    rules = None if policy is None else rules_for({}, policy)
    result = decide(history, rules, NOW)
    assert [one.snapshot for one in result.decisions] == list(history.snapshots)
    assert all(all(one.reasons) for one in result.decisions)
    surviving = {ref.snapshot_id for ref in history.refs if ref.name not in result.expired_refs}
    assert not going(result) & (surviving | {history.current_id})
    assert "main" not in result.expired_refs
    assert history == untouched
    assert decide(history, rules, NOW) == result
    shuffled = replace(history, refs=list(reversed(history.refs)))
    assert decide(shuffled, rules, NOW) == result


@given(histories(), policies(), st.integers(0, 4))
def test_keeping_more_never_expires_more(
    history: SnapshotHistory, policy: ExpiryPolicy, more: int
) -> None:
    raised = replace(policy, keep=(policy.keep or 1) + more)
    assert going(run(history, raised)) <= going(run(history, policy))


@given(histories(), policies(), spans())
def test_longer_age_never_expires_more(
    history: SnapshotHistory, policy: ExpiryPolicy, more: timedelta | None
) -> None:
    age = 5 * DAY if policy.older_than is None else policy.older_than
    raised = replace(policy, older_than=age + (more or timedelta(0)))
    assert going(run(history, raised)) <= going(run(history, policy))


@given(histories(), policies(), st.data())
def test_ids_let_nothing_else_go_and_rules_only_hold(
    history: SnapshotHistory, policy: ExpiryPolicy, data: st.DataObject
) -> None:
    held = {ref.snapshot_id for ref in history.refs} | {history.current_id}
    free = sorted(one.snapshot_id for one in history.snapshots if one.snapshot_id not in held)
    if not free:
        return
    ids = data.draw(st.frozensets(st.sampled_from(free), min_size=1))
    alone = run(history, ExpiryPolicy(snapshots=ids))
    assert (going(alone), alone.expired_refs) == (set(ids), ())
    both = run(history, replace(policy, snapshots=ids, max_ref_age=None))
    assert going(both) <= ids
    assert both.expired_refs == ()
