"""Drift: somebody has written to a table past the warehouse.

A table's own newest version, its *head*, differs from its pin, and no version of the warehouse
explains it.  Writers and cleanup refuse such a table; here it is found out what happened between pin
and head.  What only moves rows from file to file is *verified maintenance*, if that can be seen in the
manifests before and after; everything else is *suspicious*; what cannot be read is *unverifiable*,
whatever else there is.

What the warehouse has committed and nobody has published yet is no drift.  Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound
from lakewarden.formats.lance.manifest import Contents, contents
from lakewarden.formats.lance.transaction import operation, properties
from lakewarden.model import MAINTENANCE, OPTIMIZE, Format
from lakewarden.storage.location import Location
from lakewarden.storage.store import ReadStore
from lakewarden.warehouse import forks
from lakewarden.warehouse.manifest import Pin, Table
from lakewarden.warehouse.warehouse import View


class Classification(StrEnum):
    """What drift is."""

    NO_DRIFT = "no_drift"
    VERIFIED_MAINTENANCE = "verified_maintenance"
    SUSPICIOUS = "suspicious"
    UNVERIFIABLE = "unverifiable"


class Action(StrEnum):
    """What is done about it."""

    NO_OP = "no_op"
    PREVIEW = "preview"
    HEALED = "healed"
    FORCED = "forced"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Step:
    """One change between pin and head."""

    operation: str
    #: Why it is not certain that it left the rows alone; empty if it is.
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A table on one branch: its pin, its head, and what happened between."""

    table: Table
    branch: str
    #: The version that is current, where the branch's own versions lie.
    pin: Pin
    #: The version that the log names: of a branch that has no version of its own yet, its base's.
    logged: Pin
    head: Pin | None = None
    steps: tuple[Step, ...] = ()
    classification: Classification = Classification.NO_DRIFT
    #: What is wrong, or why it could not be found out.
    error: str | None = None
    #: Set if nothing can be done about it by moving the pin, whatever is forced.
    error_kind: ErrorKind | None = None
    rows_at_pin: int | None = None
    rows_at_head: int | None = None

    @property
    def key(self) -> str:
        return ".".join(self.table.name)

    @property
    def drifted(self) -> bool:
        return self.classification is not Classification.NO_DRIFT

    @property
    def doubts(self) -> list[str]:
        return list(dict.fromkeys(step.doubt for step in self.steps if step.doubt))

    def failed(self, error: LakewardenError) -> Line:
        return replace(self, error=error.message, error_kind=error.kind)


# -- deciding --------------------------------------------------------------------------------------


def classify(steps: Sequence[Step], error: str | None = None) -> Classification:
    """Say what the changes between pin and head are; with an error some could not be read."""
    if error is not None:
        return Classification.UNVERIFIABLE
    if not steps:
        return Classification.NO_DRIFT
    doubted = any(step.doubt for step in steps)
    return Classification.SUSPICIOUS if doubted else Classification.VERIFIED_MAINTENANCE


def action_on(classification: Classification, *, confirm: bool, force: bool) -> Action:
    """Say what is to be done."""
    if classification is Classification.NO_DRIFT:
        return Action.NO_OP
    if not confirm:
        return Action.PREVIEW
    if classification is Classification.VERIFIED_MAINTENANCE:
        return Action.HEALED
    return Action.FORCED if force else Action.REFUSED


def step_between(before: Contents, after: Contents, told: bytes) -> Step:
    """Say what one version of a Lance table did, given the one before and its transaction.

    The name alone proves nothing: compaction that loses rows is called a rewrite, too.
    """
    does = operation(told)
    same = before.fragments == after.fragments and before.columns == after.columns
    match does:
        case "reserve_fragments":
            doubt = "" if same else "reserve_fragments has changed fragments or columns"
        case "rewrite":
            doubt = _doubt_of_rewrite(before, after)
        case "create_index":
            ours = properties(told).get(MAINTENANCE) == OPTIMIZE
            doubt = "" if ours else "create_index is not one of lakewarden optimize"
            doubt = doubt if same else "create_index has changed fragments or columns"
        case _:
            doubt = f"{does} may change rows, columns or settings"
    return Step(does, doubt)


def _doubt_of_rewrite(before: Contents, after: Contents) -> str:
    if before.columns != after.columns:
        return "rewrite has changed columns"
    if before.rows is None or after.rows is None:
        return "rewrite does not tell how many rows there are"
    return (
        "" if before.rows == after.rows else f"rewrite has made {after.rows} rows of {before.rows}"
    )


# -- finding, for Lance ----------------------------------------------------------------------------


def line_of(view: View, table: Table, tree: frozenset[str]) -> Line | None:
    """Return where a branch keeps a Lance table, not looked at yet; None if it has no version there.

    `tree` are the names of the table's forks that there are.
    """
    pin = view.pins.get(table.id)
    if pin is None or table.format is not Format.LANCE:
        return None
    own = forks.own(view, table)
    if forks.directory(pin.path) == own:
        return Line(table, view.branch, pin, pin)
    if forks.name(own) not in tree:
        return None
    # Somebody has opened it there; what the warehouse knows is what the fork began with.
    made = replace(pin, path=f"{own}_versions/{forks.file_name(pin.version)}", through=())
    return Line(table, view.branch, replace(made, size=None, e_tag=None), pin)


def examine(line: Line, store: ReadStore) -> Line:
    """Find out what a Lance table's head is, and what happened since its pin."""
    root = Location.parse(line.table.location).key
    try:
        return _examined(line, store, root)
    except LakewardenError as error:
        return line.failed(error)


def _examined(line: Line, store: ReadStore, root: str) -> Line:
    head = head_of(store, root, forks.directory(line.pin.path))
    public = forks.public(line.pin.path)
    waits = line.pin.path != public and store.exists(f"{root}/{line.pin.path}")
    line = replace(line, head=head)
    if head is None or head.version < line.pin.version:
        return replace(line, head=line.pin) if waits else line.failed(_lost(line, head))
    if waits and not _same(store, f"{root}/{line.pin.path}", f"{root}/{public}"):
        return line.failed(_taken(line, public))
    if head.version == line.pin.version:
        return line
    return _between(line, head, store, root)


def _between(line: Line, head: Pin, store: ReadStore, root: str) -> Line:
    """Read every version from the pin to the head, each compared with the one before."""
    steps: list[Step] = []
    error: str | None = None
    first = last = None
    try:
        first = last = _contents(store, root, line, line.pin.version)
        for version in range(line.pin.version + 1, head.version + 1):
            found = _contents(store, root, line, version)
            steps.append(step_between(last, found, _told(store, root, line, found)))
            last = found
    except (NotFound, Damaged) as trouble:
        error = (
            f"{trouble.message}; what happened from version {line.pin.version + len(steps) + 1} on "
            "cannot be told"
        )
    return replace(
        line,
        steps=tuple(steps),
        classification=classify(steps, error),
        error=error,
        rows_at_pin=first.rows if first is not None else None,
        rows_at_head=last.rows if last is not None and error is None else None,
    )


def head_of(store: ReadStore, root: str, fork: str) -> Pin | None:
    """Return the newest public version in a fork, or beside the data; None if there is none."""
    newest: Pin | None = None
    for key, size in _listed(store, f"{root}/{fork}_versions"):
        name = key.rpartition("/")[2]
        version = forks.version(name)
        if version is None or (newest is not None and version <= newest.version):
            continue
        newest = Pin(version, f"{fork}_versions/{name}", size)
        if forks.file_name(version) == name:
            # These names count down: the first is the newest.
            return newest
    return newest


def _listed(store: ReadStore, prefix: str) -> Iterator[tuple[str, int]]:
    for batch in store.list(prefix):
        columns = (batch.column(name).to_pylist() for name in ("key", "size"))
        yield from zip(*columns, strict=True)


def _contents(store: ReadStore, root: str, line: Line, version: int) -> Contents:
    within, _, name = forks.public(line.pin.path).rpartition("/")
    path = f"{within}/{forks.file_name(version, name)}"
    try:
        found = contents(store.get(f"{root}/{path}"))
    except NotFound:
        raise NotFound(f"version {version} ({path}) does not exist") from None
    except Damaged as error:
        raise Damaged(error.kind, f"version {version} ({path}): {error.message}") from error
    if found.version != version:
        raise Damaged(ErrorKind.CORRUPT_MANIFEST, f"{path} says that it is version {found.version}")
    return found


def _told(store: ReadStore, root: str, line: Line, found: Contents) -> bytes:
    """Return the transaction of a version."""
    if not found.transaction_file:
        raise Damaged(
            ErrorKind.CORRUPT_MANIFEST, f"version {found.version} does not say what it changes"
        )
    path = f"{forks.directory(line.pin.path)}_transactions/{found.transaction_file}"
    try:
        told = store.get(f"{root}/{path}")
        operation(told)
    except NotFound:
        raise NotFound(
            f"the transaction of version {found.version} ({path}) does not exist"
        ) from None
    except Damaged as error:
        raise Damaged(
            error.kind, f"the transaction of version {found.version} ({path}): {error.message}"
        ) from error
    return told


def _same(store: ReadStore, one: str, other: str) -> bool:
    try:
        return store.get(one) == store.get(other)
    except NotFound:
        # Somebody has published it meanwhile.
        return not store.exists(one)


def _lost(line: Line, head: Pin | None) -> Damaged:
    newest = "there is none" if head is None else f"its newest is {head.version}"
    return Damaged(
        ErrorKind.DAMAGED_VERSION,
        f"the warehouse has committed version {line.pin.version} of {line.key} on {line.branch}, and "
        f"{newest}: versions were deleted past the warehouse, or the store has lost them; no pin can "
        f"move there: bring {forks.public(line.pin.path)} back from a backup, or go back to a version "
        f"that is there: lakewarden restore WAREHOUSE {line.key} --version N",
    )


def _taken(line: Line, public: str) -> Damaged:
    return Damaged(
        ErrorKind.DRIFT,
        f"somebody has written {public} of {line.key} past the warehouse, which has committed another "
        f"version under that number and could not show it; it is in {line.pin.path}: move the other "
        "one away and put that in its place",
    )


def forks_of(table: Table, store: ReadStore) -> frozenset[str]:
    """Return the names of a table's forks that there are."""
    root = Location.parse(table.location).key
    directories, _ = store.list_directory(f"{root}/tree")
    return frozenset(one.rstrip("/").rpartition("/")[2] for one in directories)
