"""Which snapshots of an Iceberg table stay, with the reasons for each.  Pure.

Follows Iceberg Java's RemoveSnapshots, not the letter of the specification, where the two differ:
a snapshot that no ref reaches (staged, rolled back, or of a branch that has just gone) stays while
it is young, for a writer may be about to publish it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from itertools import islice

from lakewarden.errors import Damaged, ErrorKind, Refused, UsageError
from lakewarden.model import MAIN, format_duration

MS_MAX = 2**63 - 1

GC_ENABLED = "gc.enabled"
ENCRYPTION_KEY = "encryption.key-id"
MAX_SNAPSHOT_AGE = "history.expire.max-snapshot-age-ms"
MIN_SNAPSHOTS_TO_KEEP = "history.expire.min-snapshots-to-keep"
MAX_REF_AGE = "history.expire.max-ref-age-ms"
#: Our own name first; the other is what Lakekeeper's users have set.
MIN_SNAPSHOTS_TO_EXPIRE = (
    "lakewarden.history.expire.min-snapshots-to-expire",
    "lakekeeper.history.expire.min-snapshots-to-expire",
)

DEFAULT_MAX_SNAPSHOT_AGE_MS = 432_000_000
DEFAULT_MIN_SNAPSHOTS_TO_KEEP = 1

#: Why all snapshots stay where no rule was given.
UNTOUCHED = "not being expired"
#: Why a snapshot stays that a version of a warehouse of ours names.
BY_WAREHOUSE = "a version of the warehouse"

_MILLISECOND = timedelta(milliseconds=1)
#: What Java's parseLong accepts; Python's int() would also take spaces and underscores.
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")
#: Ages beyond this cannot be said as a date, and mean "never".
LONGEST_MS = 36_500 * 86_400_000


class RefKind(StrEnum):
    """A branch keeps some of its history, a tag one snapshot."""

    BRANCH = "branch"
    TAG = "tag"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One state of a table, as its metadata lists it."""

    snapshot_id: int
    timestamp_ms: int
    parent_id: int | None = None


@dataclass(frozen=True, slots=True)
class Ref:
    """A name for a snapshot.  None means that the table's rule applies."""

    name: str
    snapshot_id: int
    kind: RefKind
    min_snapshots_to_keep: int | None = None
    max_snapshot_age_ms: int | None = None
    max_ref_age_ms: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class SnapshotHistory:
    """All that expiry needs to know of one table."""

    snapshots: Sequence[Snapshot]
    refs: Sequence[Ref]
    #: Stands in for branch main, which the refs of old metadata may lack.
    current_id: int | None = None


@dataclass(frozen=True, slots=True)
class ExpiryPolicy:
    """The user's rules.  None means not given: each table's properties say."""

    older_than: timedelta | None = None
    keep: int | None = None
    snapshots: frozenset[int] | None = None
    max_ref_age: timedelta | None = None
    min_snapshots_to_expire: int | None = None

    def __post_init__(self) -> None:
        for option, number, least in (
            ("--keep", self.keep, 1),
            ("--min-snapshots-to-expire", self.min_snapshots_to_expire, 0),
        ):
            if number is not None and not least <= number <= MS_MAX:
                raise UsageError(
                    ErrorKind.USAGE, f"{option} is {number}; it must be between {least} and 2^63-1"
                )
        if any(
            span is not None and span < timedelta(0) for span in (self.older_than, self.max_ref_age)
        ):
            raise UsageError(ErrorKind.USAGE, "a duration cannot be negative; write 0s for none")
        if self.snapshots is not None and not self.snapshots:
            raise UsageError(ErrorKind.USAGE, "--snapshots needs one or more snapshot ids")
        if self.snapshots is not None and self.max_ref_age is not None:
            raise UsageError(
                ErrorKind.USAGE,
                "--snapshots lets nothing else go, so --max-ref-age would do nothing; give only "
                "one of them",
            )

    def describe(self) -> str:
        """Say the policy in words, as the plan prints it."""
        rules = []
        if self.older_than is not None:
            rules.append(f"older than {format_duration(self.older_than)}")
        if self.keep is not None:
            rules.append(f"beyond the last {self.keep} of each branch")
        words = " ".join(["expire snapshots", *self._ids(rules)])
        open_rules = [] if self.snapshots is not None else self._not_given()
        if rules and open_rules:
            words += f"; the {open_rules[0]} as each table's properties say"
        elif open_rules:
            words += " as each table's properties say"
        if self.max_ref_age is not None:
            words += f"; branches and tags older than {format_duration(self.max_ref_age)} too"
        if self.min_snapshots_to_expire:
            words += f"; only if at least {self.min_snapshots_to_expire} can go"
        return words

    def _ids(self, rules: Sequence[str]) -> list[str]:
        joined = [" and ".join(rules)] if rules else []
        if self.snapshots is None:
            return joined
        ids = ", ".join(str(number) for number in sorted(self.snapshots))
        return [ids, *(f"if {rule}" for rule in joined)]

    def _not_given(self) -> list[str]:
        rules = (("age", self.older_than), ("number to keep", self.keep))
        return [name for name, value in rules if value is None]


@dataclass(frozen=True, slots=True)
class Held:
    """What a warehouse needs of one of its tables."""

    #: The table's place: its metadata may be gone before the last of its files.
    location: str
    #: Metadata files that stay, with the snapshots that are read through each (None: not known).
    files: Mapping[str, Sequence[int] | None] = field(default_factory=dict)
    #: Those among them that a tag or a branch holds: they must be there.
    refs: Sequence[str] = ()
    #: Others may write there, too: only what is known to go does.
    external: bool = False
    #: Nobody needs anything of it any more.
    purged: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """What applies to one table: its properties, overridden by the policy."""

    max_snapshot_age_ms: int = DEFAULT_MAX_SNAPSHOT_AGE_MS
    min_snapshots_to_keep: int = DEFAULT_MIN_SNAPSHOTS_TO_KEEP
    max_ref_age_ms: int = MS_MAX
    min_snapshots_to_expire: int = 0
    #: Only these may go, and only the rules given with them can still hold them.
    snapshots: frozenset[int] | None = None
    given_age: bool = False
    given_keep: bool = False
    #: These stay whatever else is said: somebody outside the table needs them.
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SnapshotDecision:
    """Whether a snapshot stays, and every reason it does."""

    snapshot: Snapshot
    reasons: tuple[str, ...]
    #: The branch that reaches it, main if there are several; empty if none does.
    branch: str = ""

    @property
    def keep(self) -> bool:
        return bool(self.reasons)


@dataclass(frozen=True, slots=True)
class Expiry:
    """What expiry does to one table."""

    decisions: Sequence[SnapshotDecision]
    expired_refs: tuple[str, ...] = ()
    #: Why the table is left alone although something could go.
    skipped: str | None = None


def rules_for(properties: Mapping[str, str], policy: ExpiryPolicy) -> Rules:
    """Return the rules of one table.

    A property that is overridden is not read, so that a bad value can be worked around.
    """
    # Snapshots that are named go whatever the properties say.
    consulted = properties if policy.snapshots is None else {}
    return Rules(
        max_snapshot_age_ms=_either(
            policy.older_than, consulted, MAX_SNAPSHOT_AGE, DEFAULT_MAX_SNAPSHOT_AGE_MS
        ),
        min_snapshots_to_keep=_number(
            consulted, MIN_SNAPSHOTS_TO_KEEP, DEFAULT_MIN_SNAPSHOTS_TO_KEEP, least=1
        )
        if policy.keep is None
        else policy.keep,
        max_ref_age_ms=_either(policy.max_ref_age, consulted, MAX_REF_AGE, MS_MAX),
        min_snapshots_to_expire=_min_to_expire(consulted)
        if policy.min_snapshots_to_expire is None
        else policy.min_snapshots_to_expire,
        snapshots=policy.snapshots,
        given_age=policy.older_than is not None,
        given_keep=policy.keep is not None,
    )


def _either(span: timedelta | None, properties: Mapping[str, str], name: str, default: int) -> int:
    return _number(properties, name, default, least=0) if span is None else span // _MILLISECOND


def _min_to_expire(properties: Mapping[str, str]) -> int:
    name = next((name for name in MIN_SNAPSHOTS_TO_EXPIRE if name in properties), "")
    return _number(properties, name, 0, least=0)


def _number(properties: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    if name not in properties:
        return default
    text = properties[name]
    if not WHOLE_NUMBER.fullmatch(text) or not least <= int(text) <= MS_MAX:
        raise Refused(
            ErrorKind.USAGE,
            f"table property {name} is {text!r}, not a whole number from {least} to 2^63-1; what "
            "the table's owner wants kept cannot be known, so nothing goes: correct the property "
            "or give the rule on the command line",
        )
    return int(text)


def check_collectable(properties: Mapping[str, str]) -> None:
    """Refuse a table whose owner has forbidden that files are removed.

    Any value but "true" forbids it: a misspelt `false` must not cost data.
    """
    value = properties.get(GC_ENABLED)
    if value is not None and value.lower() != "true":
        raise Refused(
            ErrorKind.GC_DISABLED,
            f"table property {GC_ENABLED} is {value!r}; other tables may need this table's files, "
            f"so nothing goes: set {GC_ENABLED}=true if they do not, or leave the table out",
        )


def encrypted(properties: Mapping[str, str]) -> str | None:
    """Say why an encrypted table is skipped: what its manifests name cannot be read."""
    if ENCRYPTION_KEY not in properties:
        return None
    return f"the table is encrypted ({ENCRYPTION_KEY} is set)"


def decide(history: SnapshotHistory, rules: Rules | None, now_ms: int) -> Expiry:
    """Decide every snapshot and ref of a table.  Without rules everything stays.

    Raises Damaged when the current snapshot is not there, and Refused when a snapshot that is to
    go by its id is unknown or in use.
    """
    table = _Table(history)
    if rules is None:
        found = _Findings(table, table.refs)
        for snapshot in history.snapshots:
            found.keep(snapshot.snapshot_id, UNTOUCHED)
        return found.expiry()
    if rules.snapshots is not None:
        found = _by_id(table, rules.snapshots, rules, now_ms)
    else:
        found = _by_rules(table, rules, now_ms)
    for snapshot_id in rules.held & table.by_id.keys():
        found.keep(snapshot_id, BY_WAREHOUSE)
    return found.expiry(rules.min_snapshots_to_expire)


class _Table:
    """A history indexed for walking, with branch main present."""

    def __init__(self, history: SnapshotHistory) -> None:
        self.snapshots = history.snapshots
        self.by_id = {snapshot.snapshot_id: snapshot for snapshot in history.snapshots}
        self.current_id = history.current_id
        refs = list(history.refs)
        if self.current_id is not None and all(ref.name != MAIN for ref in refs):
            refs.append(Ref(MAIN, self.current_id, RefKind.BRANCH))
        self.refs = sorted(refs, key=lambda ref: (ref.name != MAIN, ref.name))
        needed = [ref.snapshot_id for ref in self.refs if ref.name == MAIN]
        if self.current_id is not None:
            needed.append(self.current_id)
        for missing in (number for number in needed if number not in self.by_id):
            raise Damaged(
                ErrorKind.DAMAGED_REF,
                f"branch {MAIN} names snapshot {missing}, which the table does not list; what it "
                "needs cannot be known, so nothing goes: repair the table's metadata, then run "
                "again",
            )

    def ancestors(self, snapshot_id: int) -> Iterator[Snapshot]:
        """Walk from a snapshot to its oldest ancestor that is there; survives a cycle."""
        seen: set[int] = set()
        follow: int | None = snapshot_id
        while follow is not None and follow in self.by_id and follow not in seen:
            seen.add(follow)
            yield self.by_id[follow]
            follow = self.by_id[follow].parent_id

    def reached(self, refs: Iterable[Ref]) -> dict[int, str]:
        """Return the first branch that reaches each snapshot."""
        reached: dict[int, str] = {}
        for ref in refs:
            if ref.kind is RefKind.BRANCH:
                for snapshot in self.ancestors(ref.snapshot_id):
                    if snapshot.snapshot_id in reached:
                        break
                    reached[snapshot.snapshot_id] = ref.name
        return reached


class _Findings:
    """The reasons found so far, in the order in which they were found, each once."""

    def __init__(self, table: _Table, refs: Sequence[Ref]) -> None:
        self._table = table
        self._surviving = {ref.name for ref in refs}
        self._reasons: dict[int, dict[str, None]] = {}
        for ref in refs:
            self._keep_ref(ref)
        main = next((ref.snapshot_id for ref in refs if ref.name == MAIN), None)
        if table.current_id is not None and table.current_id != main:
            self.keep(table.current_id, "current snapshot")

    def keep(self, snapshot_id: int, reason: str) -> None:
        self._reasons.setdefault(snapshot_id, {})[reason] = None

    def _keep_ref(self, ref: Ref) -> None:
        self.keep(ref.snapshot_id, f"head of {ref}" if ref.kind is RefKind.BRANCH else str(ref))

    def expiry(self, least: int = 0) -> Expiry:
        """Conclude; if fewer than `least` snapshots can go, everything stays."""
        snapshots = self._table.snapshots
        going = [one for one in snapshots if one.snapshot_id not in self._reasons]
        gone_refs = [ref for ref in self._table.refs if ref.name not in self._surviving]
        skipped = None
        if len(going) < least:
            skipped = f"{len(going)} snapshot(s) can go, fewer than {least}"
            for ref in gone_refs:
                self._keep_ref(ref)
            for one in going:
                self.keep(one.snapshot_id, f"fewer than {least} can go")
            gone_refs = []
        branches = self._table.reached(self._table.refs)
        decisions = [
            SnapshotDecision(
                one,
                tuple(self._reasons.get(one.snapshot_id, ())),
                branches.get(one.snapshot_id, ""),
            )
            for one in snapshots
        ]
        return Expiry(decisions, tuple(ref.name for ref in gone_refs), skipped)


def _by_rules(table: _Table, rules: Rules, now_ms: int) -> _Findings:
    refs = [ref for ref in table.refs if _survives(ref, table, rules, now_ms)]
    found = _Findings(table, refs)
    for ref in refs:
        if ref.kind is RefKind.BRANCH:
            _keep_branch(found, ref, table, rules, now_ms)
    referenced = {ref.snapshot_id for ref in refs} | table.reached(refs).keys()
    for snapshot in table.snapshots:
        young = snapshot.timestamp_ms >= now_ms - rules.max_snapshot_age_ms
        if young and snapshot.snapshot_id not in referenced:
            reason = f"not published, {_younger_than(rules.max_snapshot_age_ms)}"
            found.keep(snapshot.snapshot_id, reason)
    return found


def _survives(ref: Ref, table: _Table, rules: Rules, now_ms: int) -> bool:
    """Tell whether a ref stays.  Its age is that of its snapshot; without one it names nothing."""
    if ref.name == MAIN:
        return True
    snapshot = table.by_id.get(ref.snapshot_id)
    longest = rules.max_ref_age_ms if ref.max_ref_age_ms is None else ref.max_ref_age_ms
    return snapshot is not None and now_ms - snapshot.timestamp_ms <= longest


def _keep_branch(found: _Findings, ref: Ref, table: _Table, rules: Rules, now_ms: int) -> None:
    """Keep a branch's history up to the first snapshot that is both too old and too far back.

    What lies behind that one goes even if it is younger, as in Java.
    """
    age, number = ref.max_snapshot_age_ms, ref.min_snapshots_to_keep
    age = rules.max_snapshot_age_ms if age is None else age
    number = rules.min_snapshots_to_keep if number is None else number
    last, young = f"{ref}, last {number}", _younger_than(age)
    for index, snapshot in enumerate(table.ancestors(ref.snapshot_id)):
        is_young = snapshot.timestamp_ms >= now_ms - age
        if index >= number and not is_young:
            return
        if index < number:
            found.keep(snapshot.snapshot_id, last)
        if is_young:
            found.keep(snapshot.snapshot_id, young)


def _by_id(table: _Table, ids: frozenset[int], rules: Rules, now_ms: int) -> _Findings:
    """Let only the named snapshots go, and of these what every given rule lets go, too."""
    _check_ids(table, ids)
    found = _Findings(table, table.refs)
    branches = [ref for ref in table.refs if rules.given_keep and ref.kind is RefKind.BRANCH]
    for ref in branches:
        for snapshot in islice(table.ancestors(ref.snapshot_id), rules.min_snapshots_to_keep):
            found.keep(snapshot.snapshot_id, f"{ref}, last {rules.min_snapshots_to_keep}")
    for snapshot in table.snapshots:
        if snapshot.snapshot_id not in ids:
            found.keep(snapshot.snapshot_id, "not among the given snapshots")
        if rules.given_age and snapshot.timestamp_ms >= now_ms - rules.max_snapshot_age_ms:
            found.keep(snapshot.snapshot_id, _younger_than(rules.max_snapshot_age_ms))
    return found


def _check_ids(table: _Table, ids: frozenset[int]) -> None:
    unknown = sorted(ids - table.by_id.keys())
    if unknown:
        raise Refused(
            ErrorKind.NOT_FOUND,
            f"the table has no snapshot {_some(unknown)}; it may have gone already, or belong to "
            "another table: correct the ids, then run again",
        )
    users: dict[int, list[str]] = {}
    for ref in table.refs:
        users.setdefault(ref.snapshot_id, []).append(str(ref))
    if table.current_id is not None:
        users.setdefault(table.current_id, ["the current snapshot"])
    used = [f"{number} ({', '.join(users[number])})" for number in sorted(ids) if number in users]
    if used:
        raise Refused(
            ErrorKind.TAGGED_VERSION,
            f"snapshot {_some(used)} is in use and cannot expire; nothing goes: leave it out, or "
            "drop or move the refs first",
        )


def _some(items: Sequence[object]) -> str:
    return ", ".join(str(item) for item in items[:5]) + (", …" if len(items) > 5 else "")


def _younger_than(age_ms: int) -> str:
    if age_ms > LONGEST_MS:
        return "snapshots never grow too old"
    if age_ms % 1000:
        return f"younger than {age_ms} ms"
    return f"younger than {format_duration(timedelta(milliseconds=age_ms))}"
