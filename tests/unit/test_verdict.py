"""Which files go: every case, and that what keeps comes first."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given

from lakewarden.model import REMOVABLE, FileKind, FileReason, Verdict
from lakewarden.testing.strategies import NOW, durations, facts, margins
from lakewarden.verdict import Fact, Margin, judge

WEEK = Margin(NOW, timedelta(days=7))
ASKED = replace(WEEK, delete_unverified=True)
OLD, YOUNG = NOW - timedelta(days=7, microseconds=1), NOW - timedelta(days=7)


def fact(
    kind: FileKind = FileKind.DATA,
    kept: bool = False,
    going: bool = False,
    modified: datetime | None = OLD,
    owned: bool = True,
) -> Fact:
    return Fact(kind, kept, going, modified, owned)


@pytest.mark.parametrize(
    ("one", "margin", "reason"),
    [
        (fact(kept=True), WEEK, FileReason.IN_USE),
        (fact(kept=True, going=True), ASKED, FileReason.IN_USE),
        (fact(going=True, modified=NOW), WEEK, FileReason.ONLY_REMOVED_VERSIONS),
        (fact(going=True, modified=None), WEEK, FileReason.ONLY_REMOVED_VERSIONS),
        (fact(going=True, owned=False), WEEK, FileReason.ONLY_REMOVED_VERSIONS),
        (fact(), WEEK, FileReason.UNVERIFIED_OLD),
        (fact(modified=YOUNG), WEEK, FileReason.UNVERIFIED_YOUNG),
        (fact(modified=NOW), ASKED, FileReason.UNVERIFIED_REQUESTED),
        (fact(modified=None), ASKED, FileReason.UNKNOWN_AGE),
        (fact(modified=datetime(1970, 1, 1, tzinfo=UTC)), ASKED, FileReason.UNKNOWN_AGE),
        (fact(modified=NOW + timedelta(microseconds=1)), ASKED, FileReason.UNKNOWN_AGE),
        (fact(owned=False), ASKED, FileReason.SHARED_PLACE),
        (fact(FileKind.UNKNOWN), ASKED, FileReason.UNKNOWN_KIND),
        (fact(FileKind.REF, going=True), ASKED, FileReason.UNKNOWN_KIND),
        (fact(FileKind.HINT), ASKED, FileReason.UNKNOWN_KIND),
        (fact(FileKind.STAGED_MANIFEST), WEEK, FileReason.UNVERIFIED_OLD),
        (fact(FileKind.TEMPORARY, modified=NOW), WEEK, FileReason.UNVERIFIED_YOUNG),
    ],
)
def test_cases(one: Fact, margin: Margin, reason: FileReason) -> None:
    goes = {
        FileReason.ONLY_REMOVED_VERSIONS, FileReason.UNVERIFIED_OLD, FileReason.UNVERIFIED_REQUESTED,
    }  # fmt: skip
    assert judge(one, margin) == (Verdict.DELETE if reason in goes else Verdict.KEEP, reason)


@given(facts(), margins())
def test_what_is_in_use_or_unknown_never_goes(one: Fact, margin: Margin) -> None:
    verdict, _ = judge(one, margin)
    if one.named_by_kept or one.kind not in REMOVABLE:
        assert verdict is Verdict.KEEP
    if not one.named_by_going and (not one.owned or one.modified is None):
        assert verdict is Verdict.KEEP


@given(facts(), margins(), durations())
def test_more_protection_never_deletes_more(one: Fact, margin: Margin, more: timedelta) -> None:
    if judge(one, margin)[0] is Verdict.KEEP:
        longer = replace(margin, unverified_after=margin.unverified_after + more)
        assert judge(one, longer)[0] is Verdict.KEEP
        assert judge(one, replace(margin, delete_unverified=False))[0] is Verdict.KEEP
        assert judge(replace(one, named_by_kept=True), margin)[0] is Verdict.KEEP
