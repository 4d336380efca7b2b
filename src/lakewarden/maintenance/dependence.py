"""Which tables need files of which others.  Pure.

A shallow clone names files of its source; two tables may keep files in the same extra base path.
When a table keeps versions that were to go (it is in trouble, or has changed since the plan), what
those versions need must stay too, wherever it lies, and so on along the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

Uses = Mapping[int, Set[int]]


def held_by(stopped: Iterable[int], uses: Uses) -> dict[int, int]:
    """Return every further table that must keep its files, with the stopped table that needs them."""
    held: dict[int, int] = {}
    first = set(stopped)
    waiting = [(table, table) for table in sorted(first)]
    while waiting:
        user, origin = waiting.pop()
        for used in uses.get(user, frozenset()):
            if used not in held and used not in first:
                held[used] = origin
                waiting.append((used, origin))
    return held
