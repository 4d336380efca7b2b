"""When a table is due to be cleaned: its properties say after how many versions.

A commit that makes a table due leaves a mark beside the log, and is done.  Whoever looks for marks
cleans the tables and takes the marks away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from lakewarden.errors import ErrorKind, LakewardenError, UsageError
from lakewarden.model import parse_duration
from lakewarden.storage.store import Store
from lakewarden.warehouse.manifest import Change, Manifest

INTERVAL = "lakewarden.auto-cleanup.interval"
OLDER_THAN = "lakewarden.auto-cleanup.older-than"
RETAIN = "lakewarden.auto-cleanup.retain"

_MARKS = "_due"
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class AutoCleanup:
    """What a table's properties ask for."""

    #: Versions of the table after which it is due.
    interval: int
    older_than: timedelta | None = None
    #: Versions of the table that stay, whatever their age.
    retain: int | None = None

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> AutoCleanup | None:
        """Return what properties ask for; None if nothing.  Raises if it makes no sense."""
        if not {INTERVAL, OLDER_THAN, RETAIN} & properties.keys():
            return None
        if INTERVAL not in properties or len({OLDER_THAN, RETAIN} & properties.keys()) == 0:
            raise UsageError(
                ErrorKind.USAGE,
                f"{INTERVAL} goes with {OLDER_THAN}, {RETAIN} or both; set them together",
            )
        age = properties.get(OLDER_THAN)
        return cls(
            _number(properties, INTERVAL),
            None if age is None else parse_duration(age),
            _number(properties, RETAIN) if RETAIN in properties else None,
        )


def _number(properties: Mapping[str, str], name: str) -> int:
    if not _NUMBER.fullmatch(properties[name]):
        raise UsageError(
            ErrorKind.USAGE, f"property {name} is {properties[name]!r}, not a whole number from 1"
        )
    return int(properties[name])


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one warehouse."""

    store: Store
    prefix: str

    def leave(self, manifest: Manifest, changes: tuple[Change, ...]) -> list[str]:
        """Leave marks for tables that a commit has made due, and return those tables.

        The commit stands whatever becomes of a mark: the next one is left an interval later.
        """
        due = [change.table for change in changes if _makes_due(manifest, change)]
        for number in due:
            with suppress(LakewardenError):
                self.store.put(self._key(f"{number}.{manifest.version}"), b"")
        return due

    def found(self) -> dict[str, list[str]]:
        """Return the tables that are due, each with its marks."""
        marks: dict[str, list[str]] = {}
        for name in self._names():
            marks.setdefault(name.partition(".")[0], []).append(name)
        return marks

    def take_away(self, names: list[str]) -> None:
        if names:
            self.store.delete([self._key(name) for name in names])

    def _names(self) -> Iterator[str]:
        for batch in self.store.list(f"{self.prefix}/{_MARKS}"):
            for key in batch.column("key").to_pylist():
                yield key.rpartition("/")[2]

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{_MARKS}/{name}"


def _makes_due(manifest: Manifest, change: Change) -> bool:
    table = manifest.tables.get(change.table)
    if table is None or change.after is None or INTERVAL not in table.properties:
        return False
    try:
        wanted = AutoCleanup.of(table.properties)
    except LakewardenError:
        # Nobody's commit fails because of it.
        return False
    if wanted is None:
        return False
    # A commit may bring several versions of a table at once.
    before = change.before.version if change.before is not None else 0
    return change.after.version // wanted.interval > before // wanted.interval
