"""Which versions stay, with the reasons for each.  Pure.

Rules given together are AND-ed for removal: a version goes only if every rule lets it go, so
adding a rule never removes more.  The head of every branch stays whatever the policy says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from lakewarden.errors import Damaged, ErrorKind, Refused, UsageError
from lakewarden.model import MAIN, age_is_known, format_duration

VERSION_MAX = 2**63 - 1
#: A writer may still be building on a version this young.
MIN_AGE = timedelta(hours=1)
#: Why all versions stay where no rule was given.
UNTOUCHED = "not being cleaned"
#: Why versions from a number on stay, before that number.
NOT_BEFORE = "not before version"


class OnTagged(StrEnum):
    """What to do when the policy would remove a tagged version."""

    ERROR = "error"
    KEEP = "keep"


def check_some(*rules: object, or_else: str = "") -> None:
    """Refuse to remove anything if no rule says what may go."""
    if all(rule is None for rule in rules):
        raise UsageError(
            ErrorKind.EMPTY_POLICY,
            "no rule says which versions may go; give at least one of --keep N, "
            f"--older-than 14d, --before-version N{or_else}",
        )


def check_rules(keep: int | None, before_version: int | None, *spans: timedelta | None) -> None:
    """Refuse numbers that are no versions, and ages that are none."""
    for option, number in (("--keep", keep), ("--before-version", before_version)):
        if number is not None and not 1 <= number <= VERSION_MAX:
            raise UsageError(
                ErrorKind.USAGE, f"{option} is {number}; it must be between 1 and 2^63-1"
            )
    if any(span is not None and span < timedelta(0) for span in spans):
        raise UsageError(ErrorKind.USAGE, "a duration cannot be negative; write 0s for none")


@dataclass(frozen=True, slots=True)
class Policy:
    """The user's rules.  None means the rule was not given; at least one must be."""

    older_than: timedelta | None = None
    keep: int | None = None
    before_version: int | None = None
    versions: frozenset[int] | None = None
    on_tagged: OnTagged = OnTagged.ERROR
    min_age: timedelta = MIN_AGE
    #: Let detached versions go by `older_than`; otherwise they always stay.
    expire_detached: bool = False
    branch: str = MAIN
    clean_referenced_branches: bool = False

    def __post_init__(self) -> None:
        if self.versions is None:
            check_some(self.older_than, self.keep, self.before_version, or_else=", --versions 3,4")
        check_rules(self.keep, self.before_version, self.older_than, self.min_age)
        if self.versions is not None and (
            not self.versions or not all(1 <= number <= VERSION_MAX for number in self.versions)
        ):
            raise UsageError(
                ErrorKind.USAGE, "--versions needs one or more version numbers from 1 to 2^63-1"
            )

    def describe(self) -> str:
        """Say the policy in words, as the plan prints it."""
        rules = []
        if self.older_than is not None:
            rules.append(f"older than {format_duration(self.older_than)}")
        if self.keep is not None:
            rules.append(f"beyond the last {self.keep}")
        if self.before_version is not None:
            rules.append(f"before version {self.before_version}")
        if self.versions is not None:
            rules.append("among " + ", ".join(str(number) for number in sorted(self.versions)))
        words = "remove versions " + " and ".join(rules)
        if self.min_age:
            words += f"; never younger than {format_duration(self.min_age)}"
        return words if self.branch == MAIN else f"{words}; on branch {self.branch}"


@dataclass(frozen=True, slots=True)
class Version:
    """One manifest of a table, as the listing shows it."""

    number: int
    branch: str = MAIN
    modified: datetime | None = None
    detached: bool = False
    #: A staged manifest that was never given its final name; perhaps the only copy of a commit.
    staged: bool = False
    #: The store's time where `modified` is the one written inside; writers are judged by this.
    stored: datetime | None = None
    #: Where it lies: two manifests may claim one number.
    path: str = ""


@dataclass(frozen=True, slots=True)
class Tag:
    """A name for one version; it keeps that version alive."""

    name: str
    branch: str
    version: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of versions of its own that started from a version of its parent."""

    name: str
    parent: str
    parent_version: int


@dataclass(frozen=True, slots=True)
class History:
    """All that retention needs to know of one table."""

    versions: Sequence[Version]
    tags: Sequence[Tag] = ()
    branches: Sequence[Branch] = ()
    #: Rules that branches carry in their own configuration, used when cleaning cascades.
    branch_policies: Mapping[str, Policy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pins:
    """What a warehouse needs of one of its tables; of branches, those that the table itself has."""

    #: The version that is current on each branch.
    heads: Mapping[str, int] = field(default_factory=dict)
    #: On each branch this version and all after it stay; 0 for all.
    floors: Mapping[str, int] = field(default_factory=dict)
    #: Older ones that tags and branches of the warehouse hold.
    held: frozenset[tuple[str, int]] = frozenset()
    #: How branches are called that the warehouse has made, and those that it still has.
    forks: str = ""
    alive: frozenset[str] = frozenset()
    #: Nobody needs anything of it any more.
    purged: bool = False

    def lets_go(self, branch: str) -> bool:
        """Tell whether a branch was the warehouse's, and nothing of it is needed any more."""
        if self.purged:
            return True
        needed = branch in self.alive or any(name == branch for name, _ in self.held)
        return bool(self.forks) and branch.startswith(self.forks) and not needed


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a version stays, and every reason it does."""

    version: Version
    reasons: tuple[str, ...]

    @property
    def keep(self) -> bool:
        return bool(self.reasons)


def decide(
    history: History, policy: Policy | None, now: datetime, pins: Pins | None = None
) -> list[Decision]:
    """Decide every version of a table.  Without a policy everything stays.

    `pins` are those of a warehouse that the table belongs to: its log says what is current and what
    is needed, on every branch.

    Raises Damaged when a ref names a version that is not there (what it needs cannot be known,
    so nothing may go) and Refused when a tagged version would go and the policy says to stop.
    """
    decisions: list[Decision] = []
    if pins is not None and policy is not None:
        gone = [version for version in history.versions if pins.lets_go(version.branch)]
        decisions += (Decision(version, ()) for version in gone)
        if pins.purged:
            return decisions
        history = _without(history, pins)
        _check_heads(history, pins, now)
    _check_refs(history, policy)
    by_branch: dict[str, list[Version]] = {}
    for version in history.versions:
        by_branch.setdefault(version.branch, []).append(version)
    if pins is not None and policy is not None:
        policies = _pinned_policies(policy, pins)
    else:
        policies = _policies(history, policy, by_branch, now)
    held: set[tuple[str, int]] = set()
    # Leaf branches first: a parent's fork version is held only while the child still keeps the
    # version it started with.
    for name in _leaves_first(by_branch, history.branches):
        branch_decisions = _decide_branch(
            by_branch[name], policies.get(name), _protection(name, history, held, pins), now
        )
        decisions.extend(branch_decisions)
        held.update((name, one.version.number) for one in branch_decisions if one.keep)
    return decisions


def _without(history: History, pins: Pins) -> History:
    """Return a history without branches that the warehouse has let go."""
    return replace(
        history,
        versions=[one for one in history.versions if not pins.lets_go(one.branch)],
        tags=[one for one in history.tags if not pins.lets_go(one.branch)],
        branches=[one for one in history.branches if not pins.lets_go(one.name)],
    )


def _check_heads(history: History, pins: Pins, now: datetime) -> None:
    """Refuse a table whose newest version is not the one that the warehouse knows.

    What was written since the log was read, the log cannot have known: it stays, and is looked at
    again before anything goes.
    """
    newest: dict[str, int] = {}
    known: dict[str, int] = {}
    for one in history.versions:
        if not one.detached and not one.staged:
            newest[one.branch] = max(one.number, newest.get(one.branch, 0))
            stored = one.stored or one.modified
            if stored is None or stored < now:
                known[one.branch] = max(one.number, known.get(one.branch, 0))
    for branch, head in pins.heads.items():
        found, where = newest.get(branch, 0), "" if branch == MAIN else f" on branch {branch}"
        if known.get(branch, 0) > head:
            raise Refused(
                ErrorKind.DRIFT,
                f"version {found}{where} was written past the warehouse, which knows the table up to "
                f"{head}; what it needs is not known to the log, so nothing goes: see what it is with "
                "lakewarden repair WAREHOUSE",
            )
        if found < head:
            raise Refused(
                ErrorKind.CONFLICT,
                f"version {head}{where} is committed and not public yet; nothing goes: read the table "
                "once, or run with --confirm, which publishes it",
            )


def _pinned_policies(policy: Policy, pins: Pins) -> dict[str, Policy]:
    return {
        branch: replace(policy, branch=branch, before_version=floor, on_tagged=OnTagged.KEEP)
        for branch, floor in pins.floors.items()
        if floor
    }


def _protection(
    branch: str, history: History, held: set[tuple[str, int]], pins: Pins | None = None
) -> Mapping[int, list[str]]:
    """Return reasons by version: tags on it, and branches that start from it."""
    reasons: dict[int, list[str]] = {}
    for name, number in pins.held if pins is not None else ():
        if name == branch:
            reasons.setdefault(number, []).append("a tag or branch of the warehouse")
    for tag in history.tags:
        if tag.branch == branch:
            reasons.setdefault(tag.version, []).append(f"tag {tag.name}")
    for child in history.branches:
        if child.parent == branch and (child.name, child.parent_version) in held:
            reasons.setdefault(child.parent_version, []).append(f"branch {child.name} starts here")
    return reasons


def _decide_branch(
    versions: Sequence[Version],
    policy: Policy | None,
    protection: Mapping[int, list[str]],
    now: datetime,
) -> list[Decision]:
    attached = sorted(
        (version for version in versions if not version.detached and not version.staged),
        key=lambda version: version.number,
    )
    head = attached[-1].number if attached else None
    kept_last = {v.number for v in attached[-policy.keep :]} if policy and policy.keep else set()
    decisions, tagged = [], []
    for version in versions:
        reasons: list[str] = []
        if version.number == head and version in attached:
            reasons.append("head")
        reasons += _rules_that_keep(version, policy, kept_last, now)
        refs = protection.get(version.number, []) if not version.staged else []
        if refs and not reasons and policy and policy.on_tagged is OnTagged.ERROR:
            tagged += [ref for ref in refs if ref.startswith("tag ")]
        decisions.append(Decision(version, tuple(reasons + refs)))
    if tagged:
        shown = ", ".join(tagged[:5]) + (", …" if len(tagged) > 5 else "")
        raise Refused(
            ErrorKind.TAGGED_VERSION,
            f"the policy would remove {len(tagged)} tagged version(s) ({shown}); nothing goes: "
            "pass --on-tagged keep to clean around tags, or delete the tags",
        )
    return decisions


def _rules_that_keep(
    version: Version, policy: Policy | None, kept_last: set[int], now: datetime
) -> list[str]:
    """Return why the rules keep a version; empty if every rule lets it go."""
    if version.staged:
        return ["staged manifest without a published version"]
    if policy is None:
        return [UNTOUCHED]
    reasons = []
    if version.detached:
        if not policy.expire_detached or policy.older_than is None:
            return ["detached version"]
    else:
        if version.number in kept_last:
            reasons.append(f"last {policy.keep}")
        if policy.before_version is not None and version.number >= policy.before_version:
            reasons.append(f"{NOT_BEFORE} {policy.before_version}")
        if policy.versions is not None and version.number not in policy.versions:
            reasons.append("not among the given versions")
    return reasons + _ages_that_keep(version, policy, now)


def _ages_that_keep(version: Version, policy: Policy, now: datetime) -> list[str]:
    if policy.older_than is None and not policy.min_age:
        return []
    if not age_is_known(version.modified, now):
        return ["age unknown"]
    assert version.modified is not None
    reasons = []
    if policy.older_than is not None and version.modified >= now - policy.older_than:
        reasons.append(f"younger than {format_duration(policy.older_than)}")
    stored = version.stored or version.modified
    if policy.min_age and stored > now - policy.min_age:
        reasons.append(
            f"younger than {format_duration(policy.min_age)}: a writer may still build on it"
        )
    return reasons


def _policies(
    history: History,
    policy: Policy | None,
    by_branch: Mapping[str, Sequence[Version]],
    now: datetime,
) -> dict[str, Policy]:
    """Return the policy of each branch that is cleaned at all."""
    if policy is None:
        return {}
    policies = {policy.branch: policy}
    if not policy.clean_referenced_branches:
        return policies
    parents = {branch.name: branch for branch in history.branches}
    goes_by_rule = {
        decision.version.number
        for decision in _decide_branch(
            by_branch.get(policy.branch, ()), replace(policy, on_tagged=OnTagged.KEEP), {}, now
        )
        if not decision.keep
    }
    present = {version.number for version in by_branch.get(policy.branch, ())}
    for name, own in history.branch_policies.items():
        left_at = _left_at(name, policy.branch, parents)
        if left_at is not None and (left_at in goes_by_rule or left_at not in present):
            policies[name] = replace(
                own, branch=name, on_tagged=OnTagged.KEEP, min_age=policy.min_age
            )
    return policies


def _left_at(name: str, ancestor: str, parents: Mapping[str, Branch]) -> int | None:
    """Return the version of `ancestor` at which the line of branch `name` leaves it."""
    seen: set[str] = set()
    while name in parents and name not in seen:
        seen.add(name)
        branch = parents[name]
        if branch.parent == ancestor:
            return branch.parent_version
        name = branch.parent
    return None


def _leaves_first(present: Iterable[str], branches: Sequence[Branch]) -> list[str]:
    """Order branches so that each comes before its parent."""
    parents = {branch.name: branch.parent for branch in branches}

    def depth(name: str) -> int:
        steps = 0
        while name in parents and steps <= len(parents):
            name, steps = parents[name], steps + 1
        return steps

    return sorted(present, key=lambda name: (-depth(name), name))


def _check_refs(history: History, policy: Policy | None) -> None:
    attached = {(v.branch, v.number) for v in history.versions if not v.detached and not v.staged}
    every = {(version.branch, version.number) for version in history.versions}
    names = {branch for branch, _ in attached}
    if MAIN not in names:
        raise Damaged(ErrorKind.NOT_A_TABLE, "no version was found on the main branch")
    for tag in history.tags:
        if (tag.branch, tag.version) not in every:
            where = "" if tag.branch == MAIN else f" of branch {tag.branch}"
            raise Damaged(
                ErrorKind.DAMAGED_REF,
                f"tag {tag.name!r} names version {tag.version}{where}, which does not exist; what "
                "it needs cannot be known, so nothing goes: delete or move the tag, then run again",
            )
    for branch in history.branches:
        if branch.name not in names:
            raise Damaged(
                ErrorKind.DAMAGED_REF,
                f"branch {branch.name!r} is listed but has no versions; its tree may be damaged, "
                "so nothing goes: repair or delete the branch, then run again",
            )
    if policy is not None and policy.branch not in names:
        raise UsageError(
            ErrorKind.USAGE,
            f"there is no branch {policy.branch!r} in this table; `lakewarden refs` lists them",
        )
