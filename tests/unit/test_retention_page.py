"""The example in docs/understanding/retention.md says what the rules really do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from lakewarden.errors import ErrorKind, Refused
from lakewarden.retention import Branch, History, OnTagged, Policy, Tag, Version, decide

DAY_0 = datetime(2026, 1, 1, tzinfo=UTC)
NOW = DAY_0 + timedelta(days=10)
HISTORY = History(
    versions=[
        *(Version(number, modified=DAY_0 + timedelta(days=number)) for number in range(1, 11)),
        Version(4, "dev", modified=DAY_0 + timedelta(days=4)),
    ],
    tags=[Tag("release", "main", 2)],
    branches=[Branch("dev", "main", 4)],
)
FIVE_DAYS = timedelta(days=5)


@pytest.mark.parametrize(
    ("policy", "goes"),
    [
        (Policy(keep=3, on_tagged=OnTagged.KEEP), {1, 3, 5, 6, 7}),
        (Policy(older_than=FIVE_DAYS, on_tagged=OnTagged.KEEP), {1, 3}),
        (Policy(keep=3, older_than=FIVE_DAYS, on_tagged=OnTagged.KEEP), {1, 3}),
    ],
)
def test_the_rows_of_the_example(policy: Policy, goes: set[int]) -> None:
    decisions = decide(HISTORY, policy, NOW)
    assert {one.version.number for one in decisions if not one.keep} == goes
    assert all(one.keep for one in decisions if one.version.branch == "dev")


def test_the_last_row_is_an_error_that_names_the_tag() -> None:
    with pytest.raises(Refused, match="tag release") as caught:
        decide(HISTORY, Policy(versions=frozenset({2, 3})), NOW)
    assert caught.value.kind is ErrorKind.TAGGED_VERSION
