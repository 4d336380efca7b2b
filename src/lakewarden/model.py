"""The nouns that every layer shares."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from lakewarden.errors import ErrorKind, UsageError

MAIN = "main"
#: The directory in which we leave word beside the files of a table, or of its metadata.
OURS = "_lakewarden"
#: An object in a table's directory that says which warehouse it belongs to: only the log of that
#: one knows which versions are needed.
WAREHOUSE_MARK = f"{OURS}/warehouse.json"
#: What our own maintenance writes into the properties of a transaction or snapshot.
MAINTENANCE = "lakewarden.maintenance"
OPTIMIZE = "optimize"


class Format(StrEnum):
    """Table formats."""

    LANCE = "lance"
    ICEBERG = "iceberg"


class PrefixMismatch(StrEnum):
    """What to do about a file whose path is named with another scheme or authority."""

    ERROR = "error"
    IGNORE = "ignore"
    DELETE = "delete"


class Guard(StrEnum):
    """Which other tables are asked where they lie."""

    CATALOG = "catalog"
    TARGETS = "targets"


class FileKind(StrEnum):
    """What a file under a table's location is, told from its path alone."""

    DATA = "data"
    DELETION = "deletion"
    INDEX = "index"
    TRANSACTION = "transaction"
    MANIFEST = "manifest"
    STAGED_MANIFEST = "staged_manifest"
    TEMPORARY = "temporary"
    POSITION_DELETE = "position_delete"
    EQUALITY_DELETE = "equality_delete"
    #: Of Iceberg; a Lance manifest is a version.
    MANIFEST_FILE = "manifest_file"
    MANIFEST_LIST = "manifest_list"
    STATISTICS = "statistics"
    METADATA = "metadata"
    REF = "ref"
    HINT = "hint"
    UNKNOWN = "unknown"


#: Kinds a verdict may send away; the rest is never touched.
REMOVABLE = frozenset(
    {
        FileKind.DATA,
        FileKind.DELETION,
        FileKind.INDEX,
        FileKind.TRANSACTION,
        FileKind.MANIFEST,
        FileKind.STAGED_MANIFEST,
        FileKind.TEMPORARY,
        FileKind.POSITION_DELETE,
        FileKind.EQUALITY_DELETE,
        FileKind.MANIFEST_FILE,
        FileKind.MANIFEST_LIST,
        FileKind.STATISTICS,
        FileKind.METADATA,
    }
)


class Verdict(StrEnum):
    """What happens to a file."""

    KEEP = "keep"
    DELETE = "delete"


class FileReason(StrEnum):
    """Why a file stays or goes."""

    IN_USE = "in_use"
    ONLY_REMOVED_VERSIONS = "only_removed_versions"
    UNVERIFIED_OLD = "unverified_old"
    UNVERIFIED_REQUESTED = "unverified_requested"
    UNVERIFIED_YOUNG = "unverified_young"
    UNKNOWN_AGE = "unknown_age"
    UNKNOWN_KIND = "unknown_kind"
    SHARED_PLACE = "shared_place"
    UNDECIDED = "undecided"
    OTHER_PREFIX = "other_prefix"


@dataclass(frozen=True, slots=True)
class RemovalStats:
    """What was (or would be) removed from one table; field names follow Lance's RemovalStats."""

    bytes_removed: int = 0
    old_versions_removed: int = 0
    data_files_removed: int = 0
    deletion_files_removed: int = 0
    index_files_removed: int = 0
    transaction_files_removed: int = 0
    manifest_files_removed: int = 0
    temporary_files_removed: int = 0
    position_delete_files_removed: int = 0
    equality_delete_files_removed: int = 0
    manifest_lists_removed: int = 0
    statistics_files_removed: int = 0
    metadata_files_removed: int = 0

    @property
    def files_removed(self) -> int:
        return sum(getattr(self, name) for name in set(STATS_FIELD.values()))

    def __add__(self, other: RemovalStats) -> RemovalStats:
        return RemovalStats(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )


#: The RemovalStats field that counts files of a kind.
STATS_FIELD = {
    FileKind.DATA: "data_files_removed",
    FileKind.DELETION: "deletion_files_removed",
    FileKind.INDEX: "index_files_removed",
    FileKind.TRANSACTION: "transaction_files_removed",
    FileKind.MANIFEST: "manifest_files_removed",
    FileKind.STAGED_MANIFEST: "temporary_files_removed",
    FileKind.TEMPORARY: "temporary_files_removed",
    FileKind.POSITION_DELETE: "position_delete_files_removed",
    FileKind.EQUALITY_DELETE: "equality_delete_files_removed",
    FileKind.MANIFEST_FILE: "manifest_files_removed",
    FileKind.MANIFEST_LIST: "manifest_lists_removed",
    FileKind.STATISTICS: "statistics_files_removed",
    FileKind.METADATA: "metadata_files_removed",
}

_UNIT_SECONDS = {
    "s": 1, "sec": 1, "secs": 1, "second": 1, "seconds": 1,
    "m": 60, "min": 60, "mins": 60, "minute": 60, "minutes": 60,
    "h": 3600, "hr": 3600, "hrs": 3600, "hour": 3600, "hours": 3600,
    "d": 86400, "day": 86400, "days": 86400,
    "w": 604800, "week": 604800, "weeks": 604800,
}  # fmt: skip
_PART = re.compile(r"(\d+)\s*([a-z]+)\s*")
#: Longer than anyone means; keeps arithmetic on dates from overflowing.
_LONGEST_SECONDS = 36500 * 86400


def parse_moment(text: str) -> datetime:
    """Return the moment that text like `2026-11-15T12:00Z` means; without a zone it is UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            ErrorKind.USAGE, f"{text!r} is no time; write it like 2026-11-15T12:00Z"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def parse_duration(text: str) -> timedelta:
    """Parse `14d`, `1h 30m`, `60s`, `14days` (the forms Lance's configuration uses, too)."""
    words = text.strip().lower()
    parts = _PART.findall(words)
    readable = parts and "".join(_PART.split(words)[::3]) == ""
    if not readable or any(unit not in _UNIT_SECONDS for _, unit in parts):
        raise UsageError(
            ErrorKind.USAGE,
            f"cannot read {text!r} as a duration; write it like 14d, 36h, 90m or 0s",
        )
    seconds = sum(int(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    if seconds > _LONGEST_SECONDS:
        raise UsageError(
            ErrorKind.USAGE, f"{text!r} is longer than 100 years; check the unit (14d, 36h, 90m)"
        )
    return timedelta(seconds=seconds)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.ASCII)


def parse_size(text: str) -> int:
    """Parse `256MiB`, `1.5GB`, `65536`: bytes."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None:
        raise UsageError(
            ErrorKind.USAGE, f"cannot read {text!r} as a size; write it like 256MiB, 1.5GB or 65536"
        )
    power = "kmgtp".find(found[2]) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def format_duration(duration: timedelta) -> str:
    """Say a duration in its largest whole unit: `14 days`, `36 hours`, `0 seconds`."""
    seconds = int(duration.total_seconds())
    units = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
    unit, size = next(
        pair for pair in units if pair[1] == 1 or (seconds and seconds % pair[1] == 0)
    )
    number = seconds // size
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def age_is_known(modified: datetime | None, now: datetime) -> bool:
    """Tell whether a modification time can be believed: present, after 1970, not in the future."""
    return modified is not None and modified.timestamp() > 0 and modified <= now
