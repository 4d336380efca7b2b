"""Which files go, with the reason for each.  Pure.

The rule is written twice: here, case by case, and as column expressions in
`pipeline/classification.py`.  A property test runs both on the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from lakewarden.model import REMOVABLE, FileKind, FileReason, Verdict, age_is_known


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known about one file on storage."""

    kind: FileKind
    named_by_kept: bool
    named_by_going: bool
    modified: datetime | None
    #: Under the table's own location; False in an extra base path, which others may share.
    owned: bool = True
    #: A kept version names this very path, but in another store or by another scheme.
    named_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Margin:
    """How old a file that no version names must be before it goes."""

    now: datetime
    unverified_after: timedelta
    delete_unverified: bool = False


def judge(fact: Fact, margin: Margin) -> tuple[Verdict, FileReason]:
    """Decide one file.  The order of the cases is the rule: what keeps comes first.

    A kind that the format does not write is nobody's business but its owner's.  A file of a kept
    version stays.  A file that only going versions name has no writer working on it any more and
    goes whatever its age.  A Lance version goes only by decision, never by age.  The rest is named
    by nobody: left over, or part of a write in progress; only its age can tell, and an age that is
    missing, zero or in the future tells nothing.  In a place that other tables may share, a file
    that we never named may well be theirs; and a path that is named with another prefix may well
    be this file.
    """
    if fact.kind not in REMOVABLE:
        return Verdict.KEEP, FileReason.UNKNOWN_KIND
    if fact.named_by_kept:
        return Verdict.KEEP, FileReason.IN_USE
    if fact.named_by_going:
        return Verdict.DELETE, FileReason.ONLY_REMOVED_VERSIONS
    if fact.kind is FileKind.MANIFEST:
        return Verdict.KEEP, FileReason.UNDECIDED
    if not fact.owned:
        return Verdict.KEEP, FileReason.SHARED_PLACE
    if not age_is_known(fact.modified, margin.now):
        return Verdict.KEEP, FileReason.UNKNOWN_AGE
    assert fact.modified is not None
    old = fact.modified < margin.now - margin.unverified_after
    if fact.named_elsewhere and (old or margin.delete_unverified):
        return Verdict.KEEP, FileReason.OTHER_PREFIX
    if old:
        return Verdict.DELETE, FileReason.UNVERIFIED_OLD
    if margin.delete_unverified:
        return Verdict.DELETE, FileReason.UNVERIFIED_REQUESTED
    return Verdict.KEEP, FileReason.UNVERIFIED_YOUNG
