"""Which changes get along, pair by pair.

`RULES` is the whole of it, as data: what happens to a change that was prepared before another one of
the same table was committed.  The rows are those of Lance's own rules, which decide when a Lance
client commits; Iceberg's are its requirements, checked against the new metadata.  Changes of
different tables always get along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lakewarden.errors import Conflict, ErrorKind
from lakewarden.warehouse.manifest import (
    CONTENT,
    Change,
    Logged,
    Name,
    Operation,
    Transaction,
)


class Rule(StrEnum):
    """What becomes of our change after theirs."""

    #: It stands as it is.
    STANDS = "stands"
    #: It is made again on top of theirs, by the table's format, from the same files.
    REBASES = "rebases"
    #: The same, unless both touch the same fragments; then the work must be done again.
    APART = "rebases if apart"
    #: What it was computed from has changed: the work must be done again.
    AGAIN = "again"
    #: It makes no sense any more.
    NEVER = "never"


_LETTERS = {
    "=": Rule.STANDS,
    "+": Rule.REBASES,
    "o": Rule.APART,
    "R": Rule.AGAIN,
    "X": Rule.NEVER,
}
_TABLE = """
            append overwrite delete update merge index rewrite schema restore expire create drop undrop rename properties
append      +      X         +      +      R     +     +       R      X       +      X      X    X      =      =
overwrite   +      R         +      +      +     +     +       +      +       +      X      X    X      =      =
delete      +      X         o      o      R     +     o       +      X       +      X      X    X      =      =
update      R      X         o      o      R     +     o       R      X       +      X      X    X      =      =
merge       R      X         R      R      R     +     R       X      X       +      X      X    X      =      =
index       +      X         +      +      +     R     o       +      X       +      X      X    X      =      =
rewrite     +      X         o      o      R     o     o       +      X       +      X      X    X      =      =
schema      R      X         +      R      R     +     +       R      X       +      X      X    X      =      =
restore     +      +         +      +      +     +     +       +      +       R      X      X    X      =      =
expire      R      R         R      R      R     R     R       R      R       R      X      X    X      =      =
create      X      X         X      X      X     X     X       X      X       X      X      X    X      X      X
drop        R      R         R      R      R     R     R       R      R       R      X      X    X      =      =
undrop      X      X         X      X      X     X     X       X      X       X      X      X    X      X      X
rename      =      =         =      =      =     =     =       =      =       =      X      X    X      R      =
properties  =      =         =      =      =     =     =       =      =       =      X      X    X      =      =
"""


def _parsed(table: str) -> dict[tuple[Operation, Operation], Rule]:
    head, *rows = (line.split() for line in table.strip().splitlines())
    return {
        (Operation(ours), Operation(theirs)): _LETTERS[letter]
        for ours, *letters in rows
        for theirs, letter in zip(head, letters, strict=True)
    }


#: Ours, prepared before theirs was committed; both of one table on one branch.
RULES = _parsed(_TABLE)


@dataclass(frozen=True, slots=True)
class Clash:
    """Our change and one of theirs that it does not simply stand beside."""

    ours: Change
    theirs: Change
    logged: Logged
    rule: Rule


def clashes(ours: Transaction, since: Iterable[Logged]) -> Iterator[Clash]:
    """Yield what is in the way of our transaction, in the order in which it came."""
    for logged in since:
        for theirs in logged.transaction.changes:
            for change in ours.changes:
                rule = _rule(ours, change, logged.transaction, theirs)
                if rule is not Rule.STANDS:
                    yield Clash(change, theirs, logged, rule)


def check(ours: Transaction, since: Sequence[Logged], names: Mapping[str, Name]) -> frozenset[str]:
    """Return the tables whose changes must be rebased; raise if ours cannot be committed any more.

    `names` are those of the tables, to be told.
    """
    rebased: set[str] = set()
    for clash in clashes(ours, since):
        if clash.rule in (Rule.NEVER, Rule.AGAIN):
            raise _conflict(ours, clash, names)
        rebased.add(clash.ours.table)
    for logged in since:
        for theirs in logged.transaction.changes:
            moved = theirs.operation in CONTENT or theirs.operation in _APPEARS
            if logged.transaction.branch == ours.branch and moved and theirs.table in ours.expects:
                raise Conflict(
                    ErrorKind.CONFLICT,
                    f"{ours} depends on what it read of {_table(theirs, names)}, and "
                    f"{logged.transaction} has committed {theirs.operation} of it as version "
                    f"{logged.version}; nothing was committed: read again and do it again",
                )
    return frozenset(rebased)


def _conflict(ours: Transaction, clash: Clash, names: Mapping[str, Name]) -> Conflict:
    never = clash.rule is Rule.NEVER
    end = "these exclude each other" if never else "what it was computed from has changed"
    advice = "" if never else ": read again and do it again"
    return Conflict(
        ErrorKind.INCOMPATIBLE if never else ErrorKind.CONFLICT,
        f"{ours} wants {clash.ours.operation} of {_table(clash.ours, names)}, and "
        f"{clash.logged.transaction} has committed {clash.theirs.operation} of "
        f"{_table(clash.theirs, names)} as version {clash.logged.version}; {end}, so nothing was "
        f"committed{advice}",
    )


def _table(change: Change, names: Mapping[str, Name]) -> str:
    return ".".join(_name(change) or names.get(change.table, ())) or change.table or "the warehouse"


_APPEARS = frozenset({Operation.CREATE, Operation.DROP, Operation.UNDROP})
#: What is said of a table by these holds on every branch.
_EVERYWHERE = frozenset({Operation.RENAME, Operation.PROPERTIES})
_NAMING = frozenset({Operation.CREATE, Operation.UNDROP, Operation.RENAME})
#: What brings back, or holds, something older.
_LOOKING_BACK = frozenset({Operation.TAG, Operation.BRANCH, Operation.RESTORE, Operation.UNDROP})
_CLEARING = frozenset({Operation.RECLAIM, Operation.PURGE, Operation.FORGET})


def _rule(ours: Transaction, change: Change, their: Transaction, theirs: Change) -> Rule:
    """Return the rule for one change of each side."""
    if {change.operation, theirs.operation} & _CLEARING:
        return _clearing(change, theirs)
    if theirs.operation is Operation.UNBRANCH:
        gone = theirs.name[0]
        leans = change.operation is Operation.BRANCH and change.source == gone
        return Rule.NEVER if ours.branch == gone or leans else _same_name(change, theirs)
    if change.operation is Operation.UNBRANCH:
        gone = change.name[0]
        leans = theirs.operation is Operation.BRANCH and theirs.source == gone
        # Somebody has worked on it since we decided that it may go.
        return Rule.AGAIN if their.branch == gone or leans else _same_name(change, theirs)
    if not change.table or not theirs.table:
        return _same_name(change, theirs)
    pair = set(_pair(change, theirs))
    if change.table != theirs.table:
        near = ours.branch == their.branch or Operation.RENAME in pair
        same = pair <= _NAMING and near and _name(change) == _name(theirs)
        return Rule.NEVER if same or _overlap_in_place(change, theirs) else Rule.STANDS
    if ours.branch != their.branch and not pair <= _EVERYWHERE:
        return Rule.STANDS
    return _overlap(change, theirs, RULES[_pair(change, theirs)])


def _clearing(ours: Change, theirs: Change) -> Rule:
    """Return the rule if one side lets go of what is old.

    Whatever looks back must look again, whichever of both came first: what it needs may be going.
    """
    pair = {ours.operation, theirs.operation}
    back = any(_looks_back(change) for change in (ours, theirs))
    return Rule.AGAIN if pair <= _CLEARING or back else Rule.STANDS


def _looks_back(change: Change) -> bool:
    """Tell whether a change may need what is old: a table that comes with files may be a clone."""
    comes = change.operation is Operation.CREATE and change.after is not None
    return comes or change.operation in _LOOKING_BACK


def _overlap_in_place(ours: Change, theirs: Change) -> bool:
    """Tell whether both make a table, and one inside the other."""
    if ours.made is None or theirs.made is None:
        return False
    one, other = (
        f"{change.made.location.rstrip('/')}/" for change in (ours, theirs) if change.made
    )
    return one.startswith(other) or other.startswith(one)


def _name(change: Change) -> Name:
    return change.name or (change.made.name if change.made is not None else ())


def _pair(ours: Change, theirs: Change) -> tuple[Operation, Operation]:
    return ours.operation, theirs.operation


def _overlap(ours: Change, theirs: Change, rule: Rule) -> Rule:
    if _pair(ours, theirs) == (Operation.PROPERTIES, Operation.PROPERTIES):
        return Rule.NEVER if _same_key(ours, theirs) else rule
    if rule is not Rule.APART:
        return rule
    unknown = ours.touches is None or theirs.touches is None
    return (
        Rule.AGAIN
        if unknown or (ours.touches or set()) & (theirs.touches or set())
        else (Rule.REBASES)
    )


def _same_key(ours: Change, theirs: Change) -> bool:
    """Tell whether both set one property to different values."""
    return any(
        value != theirs.properties[name]
        for name, value in ours.properties.items()
        if name in theirs.properties
    )


def _same_name(ours: Change, theirs: Change) -> Rule:
    """Return the rule for changes of the warehouse itself: tags, branches, settings."""
    kinds = ({Operation.TAG, Operation.UNTAG}, {Operation.BRANCH, Operation.UNBRANCH})
    if any({ours.operation, theirs.operation} <= kind for kind in kinds):
        return Rule.NEVER if ours.name == theirs.name else Rule.STANDS
    if _pair(ours, theirs) == (Operation.SETTINGS, Operation.SETTINGS):
        return Rule.NEVER if _same_key(ours, theirs) else Rule.STANDS
    return Rule.STANDS
