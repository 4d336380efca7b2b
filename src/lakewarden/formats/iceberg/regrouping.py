"""PURE: which data files of a partition are rewritten together.

Small files are filled, in the order they were written, into groups of one new file each.  A file
with many deleted rows is rewritten whatever its size.  Files that are large enough stay, those that
are too large, too: readers split them, and nobody gains by more files.

A group must be worth it: enough files, or enough bytes for a whole new one, and fewer files after
than before.  What an earlier rewrite has made, for files of this size, does not count, though it may
come along: so a second run finds nothing to do, even where rows pack better than was expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Files of less than this share of the target are small.
SMALL = 0.75
#: Files that are worth being rewritten together, unless the user says otherwise.
MIN_FILES = 5


@dataclass(frozen=True, slots=True)
class Sized:
    """What matters of a data file here; `place` is its own in the list that it comes from."""

    place: int
    bytes: int
    #: Bytes that its rows would take that are not deleted.
    live_bytes: int
    #: Share of deleted rows.
    deleted: float = 0.0
    #: A rewrite has made it, for files of this size.
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What files are to be like."""

    target_bytes: int
    min_files: int = MIN_FILES
    deletions: float = 0.1


@dataclass(frozen=True, slots=True)
class Group:
    """Files that are rewritten together, and how many new ones that will give."""

    members: tuple[Sized, ...]
    outputs: int


def regroup(files: Iterable[Sized], wanted: Wanted) -> list[Group]:
    """Return the groups of one partition's files that are worth rewriting."""
    groups: list[list[Sized]] = []
    filling: list[Sized] = []
    held = 0
    # What is settled comes last: new files then fall into the groups they would fall into without.
    for file in sorted(files, key=lambda one: one.settled):
        if file.deleted < wanted.deletions and file.bytes >= SMALL * wanted.target_bytes:
            continue
        if file.live_bytes >= wanted.target_bytes:
            groups.append([file])
            continue
        filling.append(file)
        held += file.live_bytes
        if held >= wanted.target_bytes:
            groups.append(filling)
            filling, held = [], 0
    found = (
        Group(tuple(one), outputs(one, wanted.target_bytes)) for one in (*groups, filling) if one
    )
    return [group for group in found if _is_worth_it(group, wanted)]


def outputs(files: Sequence[Sized], target_bytes: int) -> int:
    """Return how many files of about the wanted size the rows of some fill."""
    held = sum(file.live_bytes for file in files)
    if not held:
        return 0
    return max(1, (2 * held + target_bytes) // (2 * target_bytes))


def _is_worth_it(group: Group, wanted: Wanted) -> bool:
    if any(file.deleted >= wanted.deletions for file in group.members):
        return True
    if group.outputs >= len(group.members):
        return False
    fresh = [file for file in group.members if not file.settled]
    filled = sum(file.live_bytes for file in fresh) >= wanted.target_bytes
    return filled or len(fresh) >= wanted.min_files
