"""Hypothesis strategies, one per noun; each makes everything that is valid."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st

from lakewarden.model import FileKind
from lakewarden.retention import Branch, History, OnTagged, Policy, Tag, Version
from lakewarden.verdict import Fact, Margin

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
#: Ages around every limit in use: an hour, a day, a week; and none at all.
AGES = (
    timedelta(0), timedelta(minutes=59), timedelta(hours=1), timedelta(hours=1, microseconds=1),
    timedelta(days=1), timedelta(days=7), timedelta(days=7, microseconds=1), timedelta(days=30),
    timedelta(microseconds=-1), timedelta(days=-1),
)  # fmt: skip


def moments() -> st.SearchStrategy[datetime | None]:
    """Modification times: known, unknown, at zero, in the future, and on the limits."""
    known = st.one_of(
        st.sampled_from(AGES), st.timedeltas(timedelta(days=-1), timedelta(days=60))
    ).map(lambda age: NOW - age)
    zero = datetime(1970, 1, 1, tzinfo=UTC)
    return st.one_of(known, st.none(), st.sampled_from([zero, zero + timedelta(microseconds=1)]))


def durations() -> st.SearchStrategy[timedelta]:
    return st.one_of(
        st.sampled_from([age for age in AGES if age >= timedelta(0)]),
        st.timedeltas(timedelta(0), timedelta(days=60)),
    )


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Histories whose refs all resolve: a main line, branches of it and of each other."""
    names = ["main", *draw(st.lists(st.sampled_from(["a", "b", "c/d"]), unique=True))]
    lines: dict[str, list[int]] = {}
    branches: list[Branch] = []
    for name in names:
        start = 1
        if name != "main":
            parent = draw(st.sampled_from(list(lines)))
            start = draw(st.sampled_from(lines[parent]))
            branches.append(Branch(name, parent, start))
        numbers = draw(st.sets(st.integers(start, start + 8), max_size=6))
        lines[name] = sorted(numbers | {start})
    versions = [
        Version(number, name, draw(moments())) for name, line in lines.items() for number in line
    ]
    detached = draw(st.lists(st.integers(2**40, 2**62), max_size=2, unique=True))
    versions += [Version(number, "main", draw(moments()), detached=True) for number in detached]
    if draw(st.booleans()):
        versions.append(Version(99, "main", draw(moments()), staged=True))
    taggable = [version for version in versions if not version.staged]
    tags = [
        Tag(f"t{number}", version.branch, version.number)
        for number, version in enumerate(draw(st.lists(st.sampled_from(taggable), max_size=3)))
    ]
    return History(draw(st.permutations(versions)), tags, branches)


@st.composite
def policies(draw: st.DrawFn, *, on_tagged: OnTagged = OnTagged.KEEP) -> Policy:
    """Policies of every combination of rules, for the main branch."""
    rules = {
        "older_than": durations(),
        "keep": st.integers(1, 9),
        "before_version": st.integers(1, 12),
        "versions": st.frozensets(st.integers(1, 12), min_size=1),
    }
    given = draw(st.lists(st.sampled_from(sorted(rules)), min_size=1, unique=True))
    return Policy(
        **{name: draw(rules[name]) for name in given},  # type: ignore[arg-type]
        on_tagged=on_tagged,
        min_age=draw(durations()),
        expire_detached=draw(st.booleans()),
    )


def facts() -> st.SearchStrategy[Fact]:
    return st.builds(
        Fact,
        kind=st.sampled_from(FileKind),
        named_by_kept=st.booleans(),
        named_by_going=st.booleans(),
        modified=moments(),
        owned=st.booleans(),
    )


def margins() -> st.SearchStrategy[Margin]:
    return st.builds(
        Margin, now=st.just(NOW), unverified_after=durations(), delete_unverified=st.booleans()
    )
