"""PURE: the settings of each queue, and what applies to one table, with where it comes from.

A table's property beats the warehouse's config, which beats the default.  `gc.enabled` beats all; of
two answers about a dry run the safer one counts.  Names, types, defaults and limits are Lakekeeper's;
properties of ours (`lakewarden.…`) beat those of the same name that Lakekeeper's users have set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from lakewarden.errors import ErrorKind
from lakewarden.expiry import (
    ENCRYPTION_KEY,
    GC_ENABLED,
    LONGEST_MS,
    MAX_REF_AGE,
    MAX_SNAPSHOT_AGE,
    MIN_SNAPSHOTS_TO_EXPIRE,
    MIN_SNAPSHOTS_TO_KEEP,
    MS_MAX,
    WHOLE_NUMBER,
)
from lakewarden.jobs.durations import parse_iso_duration
from lakewarden.jobs.queues import (
    DAY_SECONDS,
    EXPIRE_SNAPSHOTS,
    OPTIMIZE,
    REMOVE_ORPHAN_FILES,
    TASK_LOG_CLEANUP,
    queue_kind,
)
from lakewarden.jobs.refusals import RequestRefused, bad_request
from lakewarden.jobs.tasks import EntityType

#: Shorter than a write may take: files of writes in progress could go.
FLOOR_MS = 86_400_000
#: What a config says about itself, which is no setting.
QUEUE_NAME = "queue-name"

_LONGEST = timedelta(milliseconds=LONGEST_MS)


class Form(StrEnum):
    """What a setting looks like in JSON."""

    BOOLEAN = "a boolean"
    INT32 = "a whole number below 2^31"
    INT64 = "a whole number below 2^63"
    DURATION = "a duration like P1D, without years and months"


class Source(StrEnum):
    """Where a value comes from."""

    TABLE = "table-property"
    WAREHOUSE = "warehouse"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a queue."""

    key: str
    form: Form
    default: bool | int | str | None
    minimum: int | None = None
    nullable: bool = False
    #: Properties of a table that override it; the first that is set counts.
    properties: tuple[str, ...] = ()
    #: What a property may not be below.
    property_minimum: int = 0


@dataclass(frozen=True, slots=True)
class Applied:
    """What applies to a table, and from where."""

    value: Any
    source: Source
    #: The property that says so, if one does.
    property: str | None = None


def _both(name: str) -> tuple[str, str]:
    return f"lakewarden.{name}", f"lakekeeper.{name}"


_NULL = True
SETTINGS: Mapping[str, tuple[Setting, ...]] = {
    EXPIRE_SNAPSHOTS: (
        Setting(
            "enable-expire-snapshots", Form.BOOLEAN, default=False, nullable=_NULL,
            properties=_both("history.expire.enabled"),
        ),
        Setting("max-snapshot-age-ms", Form.INT64, 432_000_000, None, _NULL, (MAX_SNAPSHOT_AGE,)),
        Setting(
            "min-snapshots-to-keep", Form.INT32, 1, None, _NULL, (MIN_SNAPSHOTS_TO_KEEP,), 1
        ),
        Setting("min-snapshots-to-expire", Form.INT32, 20, 0, _NULL, MIN_SNAPSHOTS_TO_EXPIRE),
        Setting("max-ref-age-ms", Form.INT64, MS_MAX, None, _NULL, (MAX_REF_AGE,)),
    ),
    REMOVE_ORPHAN_FILES: (
        Setting(
            "enable-remove-orphan-files", Form.BOOLEAN, default=False,
            properties=_both("remove-orphan-files.enabled"),
        ),
        Setting(
            "default-older-than-ms", Form.INT64, 604_800_000,
            properties=_both("remove-orphan-files.older-than-ms"),
        ),
        Setting("target-reclaim-bytes", Form.INT64, 1_073_741_824, 0),
        Setting("maximum-interval-seconds", Form.INT64, 7_776_000, DAY_SECONDS),
        Setting("max-run-time-seconds", Form.INT64, 3600, 60),
        Setting(
            "dry-run", Form.BOOLEAN, default=False,
            properties=_both("remove-orphan-files.dry-run"),
        ),
        Setting("disable-min-older-than-check", Form.BOOLEAN, default=False),
    ),
    OPTIMIZE: (
        Setting(
            "enable-optimize", Form.BOOLEAN, default=False, properties=_both("optimize.enabled")
        ),
        # Without one, as the format has it.
        Setting(
            "target-file-size-bytes", Form.INT64, None, 1, _NULL,
            _both("optimize.target-file-size-bytes"), 1,
        ),
        Setting("min-files", Form.INT32, 10, 2, properties=_both("optimize.min-files"),
                property_minimum=2),
        Setting("max-bytes", Form.INT64, None, 1, _NULL),
        Setting("min-interval-seconds", Form.INT64, 3600, 60),
        Setting("min-files-saved-per-gib", Form.INT64, 8, 0),
        Setting("max-run-time-seconds", Form.INT64, 3600, 60),
    ),
    TASK_LOG_CLEANUP: (
        Setting("cleanup-period", Form.DURATION, "P1D", nullable=_NULL),
        Setting("retention-period", Form.DURATION, "P90D", nullable=_NULL),
    ),
}  # fmt: skip

_ENABLING = {
    EXPIRE_SNAPSHOTS: ("enable-expire-snapshots", "ExpireSnapshotsDisabled"),
    REMOVE_ORPHAN_FILES: ("enable-remove-orphan-files", "RemoveOrphanFilesDisabled"),
    OPTIMIZE: ("enable-optimize", "OptimizeDisabled"),
}
#: Queues that delete what others might need.
_COLLECTING = frozenset({EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES})


def parse_config(queue: str, given: object) -> dict[str, Any]:
    """Return a config as it is stored, or raise InvalidQueueConfig.

    It is stored as it was given: what is read back is what was written.  Only the queue's own name,
    which reading adds, is left out.  A key that is none is refused: whoever mistypes a threshold must
    not get the default.
    """
    settings = SETTINGS[queue_kind(queue).name]
    if not isinstance(given, Mapping):
        raise _invalid(queue, "a config is an object")
    known = [setting.key for setting in settings]
    for key in given:
        if key not in known and key != QUEUE_NAME:
            raise _invalid(queue, f"{str(key)[:50]!r} is no setting of it; {nearest(key, known)}")
    for setting in settings:
        if setting.key in given:
            _check(queue, setting, given[setting.key])
    return {key: value for key, value in given.items() if key != QUEUE_NAME}


def nearest(key: object, known: Sequence[str]) -> str:
    """Say which of the keys that there are somebody may have meant."""
    spelled = str(key)[:50].lower().replace("_", "-")
    found = get_close_matches(spelled, known, 1)
    return f"did you mean {found[0]}?" if found else f"there are {', '.join(known)}"


def _check(queue: str, setting: Setting, value: object) -> None:
    if value is None and setting.nullable:
        return
    if not _fits(setting.form, value):
        # Whatever was given, it may have been a credential in the wrong place.
        raise _invalid(queue, f"{setting.key} must be {setting.form}")
    if setting.minimum is not None and isinstance(value, int) and value < setting.minimum:
        raise _invalid(queue, f"{setting.key} must be at least {setting.minimum}")


def _fits(form: Form, value: object) -> bool:
    match form:
        case Form.BOOLEAN:
            return isinstance(value, bool)
        case Form.INT32 | Form.INT64:
            bits = 31 if form is Form.INT32 else 63
            # To Python, true is a number.
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole and -(2**bits) <= value < 2**bits
        case Form.DURATION:
            return isinstance(value, str) and parse_iso_duration(value) is not None


def _invalid(queue: str, what: str) -> RequestRefused:
    return bad_request(
        "InvalidQueueConfig",
        f"the config of {queue} cannot be used: {what}; nothing was changed",
        ErrorKind.QUEUE_CONFIG,
    )


def effective(
    queue: str, properties: Mapping[str, str], stored: Mapping[str, Any]
) -> dict[str, Applied]:
    """Return what applies to a table, by the keys of the queue's config."""
    applied = {setting.key: _apply(setting, properties, stored) for setting in SETTINGS[queue]}
    if queue in _ENABLING:
        veto = _veto(queue, properties)
        if veto is not None:
            applied[_ENABLING[queue][0]] = Applied(value=False, source=Source.TABLE, property=veto)
    return applied


def _veto(queue: str, properties: Mapping[str, str]) -> str | None:
    """Return the property that excludes a table, whatever else is said."""
    if queue in _COLLECTING and properties.get(GC_ENABLED, "true").lower() != "true":
        return GC_ENABLED
    return ENCRYPTION_KEY if properties.get(ENCRYPTION_KEY) else None


def _apply(setting: Setting, properties: Mapping[str, str], stored: Mapping[str, Any]) -> Applied:
    kept = stored.get(setting.key)
    below = (
        Applied(setting.default, Source.DEFAULT)
        if kept is None
        else Applied(kept, Source.WAREHOUSE)
    )
    named = [name for name in setting.properties if name in properties]
    if not named:
        return below
    if setting.key == "dry-run":
        # Whoever wants none to go is heard, and what cannot be read is no permission to delete.
        wants = [name for name in named if properties[name].strip().lower() != "false"]
        if below.value is True:
            return below
        name = wants[0] if wants else named[0]
        return Applied(bool(wants), Source.TABLE, name)
    if setting.form is Form.BOOLEAN:
        # What cannot be read is no permission.
        return Applied(properties[named[0]].strip().lower() == "true", Source.TABLE, named[0])
    return Applied(_number(properties, named[0], setting), Source.TABLE, named[0])


def _number(properties: Mapping[str, str], name: str, setting: Setting) -> int:
    text = properties[name]
    if not WHOLE_NUMBER.fullmatch(text) or not setting.property_minimum <= int(text) <= MS_MAX:
        raise bad_request(
            "InvalidTableProperty",
            f"the table's property {name} is {text[:50]!r}, not a whole number from "
            f"{setting.property_minimum}; correct or remove it",
            ErrorKind.QUEUE_CONFIG,
        )
    return int(text)


def exclusion(
    queue: str, properties: Mapping[str, str], stored: Mapping[str, Any], entity: EntityType
) -> RequestRefused | None:
    """Return why a queue does not concern a table, as an answer to whoever asked; None if it does.

    A worker that finds a reason at pickup ends the task as done, with nothing to do.
    """
    kind = queue_kind(queue)
    if entity not in kind.entities:
        return bad_request("UnsupportedEntityType", f"{queue} does not concern a {entity}")
    if queue not in _ENABLING:
        return None
    veto = _veto(queue, properties)
    if veto == GC_ENABLED:
        return bad_request(
            "GcDisabled",
            "the table has gc.enabled=false: others may need its files; nothing is done to it",
            ErrorKind.GC_DISABLED,
        )
    if veto is not None:
        return bad_request(
            "EncryptedTable", "the table is encrypted; what its files need cannot be read"
        )
    key, name = _ENABLING[queue]
    applied = effective(queue, properties, stored)[key]
    if applied.value is True:
        return None
    if applied.source is Source.TABLE:
        return bad_request(
            name, f"the table's property {applied.property} excludes it from {queue}"
        )
    return bad_request(
        name,
        f"{queue} is off in this warehouse; set {key} to true, or the table's property to true",
    )


def trouble(
    queue: str, properties: Mapping[str, str], stored: Mapping[str, Any]
) -> RequestRefused | None:
    """Return why every task with these settings fails; None if they can be used."""
    kinds: Mapping[str, Callable[[Mapping[str, str], Mapping[str, Any]], object]] = {
        EXPIRE_SNAPSHOTS: ExpireSettings.of,
        REMOVE_ORPHAN_FILES: OrphanSettings.of,
        OPTIMIZE: OptimizeSettings.of,
    }
    try:
        kinds[queue](properties, stored)
    except RequestRefused as refusal:
        return refusal
    return None


@dataclass(frozen=True, slots=True)
class ExpireSettings:
    """What expiry does to one table."""

    max_snapshot_age: timedelta
    min_snapshots_to_keep: int
    min_snapshots_to_expire: int
    max_ref_age: timedelta

    @classmethod
    def of(cls, properties: Mapping[str, str], stored: Mapping[str, Any]) -> ExpireSettings:
        found = effective(EXPIRE_SNAPSHOTS, properties, stored)
        return cls(
            _age(EXPIRE_SNAPSHOTS, "max-snapshot-age-ms", found),
            # Fewer than one is not possible: the newest always stays.
            max(found["min-snapshots-to-keep"].value, 1),
            found["min-snapshots-to-expire"].value,
            _age(EXPIRE_SNAPSHOTS, "max-ref-age-ms", found),
        )


@dataclass(frozen=True, slots=True)
class OrphanSettings:
    """What removal of orphan files does to one table, and how often."""

    older_than: timedelta
    target_reclaim_bytes: int
    maximum_interval_seconds: int
    max_run_time_seconds: int
    dry_run: bool

    @classmethod
    def of(cls, properties: Mapping[str, str], stored: Mapping[str, Any]) -> OrphanSettings:
        """Return what applies, or raise RemoveOrphanFilesRetentionTooShort.

        The warehouse's own age is checked even where a table has another: the mistake is in the
        config, and would hit the next table.  A table's own age has no floor.
        """
        floor = effective(REMOVE_ORPHAN_FILES, {}, stored)
        age = floor["default-older-than-ms"].value
        if age < FLOOR_MS and floor["disable-min-older-than-check"].value is not True:
            raise bad_request(
                "RemoveOrphanFilesRetentionTooShort",
                f"default-older-than-ms is {age}, less than 24 hours ({FLOOR_MS}): files of writes in "
                "progress could go; raise it, or set disable-min-older-than-check if nobody writes",
                ErrorKind.RETENTION_TOO_SHORT,
            )
        found = effective(REMOVE_ORPHAN_FILES, properties, stored)
        return cls(
            _age(REMOVE_ORPHAN_FILES, "default-older-than-ms", found),
            found["target-reclaim-bytes"].value,
            found["maximum-interval-seconds"].value,
            found["max-run-time-seconds"].value,
            found["dry-run"].value,
        )


@dataclass(frozen=True, slots=True)
class OptimizeSettings:
    """What optimize does to one table, and when it is worthwhile."""

    target_file_size_bytes: int | None
    min_files: int
    max_bytes: int | None
    min_interval_seconds: int
    min_files_saved_per_gib: int
    max_run_time_seconds: int
    #: Whether anybody has said how many files are worth a run.
    min_files_is_set: bool = True

    @property
    def min_files_by_hand(self) -> int | None:
        """What counts if somebody asks for a run; None for as few as the format has it."""
        return self.min_files if self.min_files_is_set else None

    @classmethod
    def of(cls, properties: Mapping[str, str], stored: Mapping[str, Any]) -> OptimizeSettings:
        found = effective(OPTIMIZE, properties, stored)
        return cls(
            found["target-file-size-bytes"].value,
            found["min-files"].value,
            found["max-bytes"].value,
            found["min-interval-seconds"].value,
            found["min-files-saved-per-gib"].value,
            found["max-run-time-seconds"].value,
            found["min-files"].source is not Source.DEFAULT,
        )


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How long the log of tasks is kept, and how often it is cleaned."""

    cleanup_period: timedelta
    retention_period: timedelta

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> LogSettings:
        found = effective(TASK_LOG_CLEANUP, {}, stored)
        periods = [
            parse_iso_duration(found[key].value) for key in ("cleanup-period", "retention-period")
        ]
        cleanup, retention = (min(period or timedelta(0), _LONGEST) for period in periods)
        return cls(max(cleanup, timedelta(days=1)), retention)


def _age(queue: str, key: str, found: Mapping[str, Applied]) -> timedelta:
    """Return an age.  One that is too long to be said means "never", not "at once"."""
    milliseconds = found[key].value
    if milliseconds < 0:
        raise _invalid(queue, f"{key} is {milliseconds}, and no file or snapshot is that young")
    return timedelta(milliseconds=min(milliseconds, LONGEST_MS))
