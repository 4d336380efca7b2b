"""What can be set, and what applies to a table: the tables of the seed, line by line."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakewarden.errors import ErrorKind
from lakewarden.jobs.config import (
    SETTINGS,
    Applied,
    ExpireSettings,
    Form,
    LogSettings,
    OptimizeSettings,
    OrphanSettings,
    Source,
    effective,
    exclusion,
    parse_config,
)
from lakewarden.jobs.durations import ISO_DURATION, format_iso_duration, parse_iso_duration
from lakewarden.jobs.queues import (
    EXPIRE_SNAPSHOTS,
    OPTIMIZE,
    QUEUES,
    REMOVE_ORPHAN_FILES,
    TASK_LOG_CLEANUP,
)
from lakewarden.jobs.refusals import RequestRefused
from lakewarden.jobs.tasks import EntityType

MS_MAX = 9223372036854775807
DAY_MS = 86_400_000
#: As the seed and the published schema have them: key, default, minimum, whether it may be null.
PUBLISHED: dict[str, dict[str, tuple[object, int | None, bool]]] = {
    EXPIRE_SNAPSHOTS: {
        "enable-expire-snapshots": (False, None, True),
        "max-snapshot-age-ms": (432000000, None, True),
        "min-snapshots-to-keep": (1, None, True),
        "min-snapshots-to-expire": (20, 0, True),
        "max-ref-age-ms": (MS_MAX, None, True),
    },
    REMOVE_ORPHAN_FILES: {
        "enable-remove-orphan-files": (False, None, False),
        "default-older-than-ms": (604800000, None, False),
        "target-reclaim-bytes": (1073741824, 0, False),
        "maximum-interval-seconds": (7776000, 86400, False),
        "max-run-time-seconds": (3600, 60, False),
        "dry-run": (False, None, False),
        "disable-min-older-than-check": (False, None, False),
    },
    TASK_LOG_CLEANUP: {
        "cleanup-period": ("P1D", None, True),
        "retention-period": ("P90D", None, True),
    },
}
CASES = [(queue, key) for queue, keys in PUBLISHED.items() for key in keys]


def refused(queue: str, config: object) -> RequestRefused:
    with pytest.raises(RequestRefused) as error:
        parse_config(queue, config)
    assert (error.value.name, error.value.code) == ("InvalidQueueConfig", 400)
    assert error.value.kind is ErrorKind.QUEUE_CONFIG
    assert "\n" not in error.value.message
    return error.value


# -- what can be set -----------------------------------------------------------------------------


@pytest.mark.parametrize("queue", PUBLISHED)
def test_a_queue_has_the_published_settings_and_no_others(queue: str) -> None:
    assert {setting.key for setting in SETTINGS[queue]} == set(PUBLISHED[queue])
    assert set(SETTINGS) == set(QUEUES)


@pytest.mark.parametrize(("queue", "key"), CASES)
def test_what_is_not_set_has_the_published_default(queue: str, key: str) -> None:
    default, _, _ = PUBLISHED[queue][key]
    assert effective(queue, {}, {})[key] == Applied(default, Source.DEFAULT)


@pytest.mark.parametrize(("queue", "key"), CASES)
def test_null_is_taken_where_it_is_published_and_means_the_default(queue: str, key: str) -> None:
    default, _, nullable = PUBLISHED[queue][key]
    if nullable:
        assert parse_config(queue, {key: None}) == {key: None}
        assert effective(queue, {}, {key: None})[key] == Applied(default, Source.DEFAULT)
    else:
        refused(queue, {key: None})


@pytest.mark.parametrize(("queue", "key"), CASES)
def test_minima_are_kept_when_a_config_is_set(queue: str, key: str) -> None:
    default, minimum, _ = PUBLISHED[queue][key]
    if minimum is not None:
        assert parse_config(queue, {key: minimum}) == {key: minimum}
        assert f"at least {minimum}" in refused(queue, {key: minimum - 1}).message
    elif isinstance(default, int) and not isinstance(default, bool):
        # The floor of ages is checked when a task is picked.
        assert parse_config(queue, {key: -1}) == {key: -1}


MISFITS: dict[Form, tuple[object, ...]] = {
    Form.BOOLEAN: (0, 1, "true", "false", [], {}),
    Form.INT32: (True, 5.0, "5", 2**31, [5]),
    Form.INT64: (False, 86400.0, "86400", 2**63, -(2**63) - 1, float("nan"), {}),
    Form.DURATION: (1, "1d", "P", "PT", "P1Y", "P1M", "-P1D", "P-1D", "P1DT", "p1d", "P1D "),
}


@pytest.mark.parametrize(
    ("queue", "key", "value"),
    [
        (queue, setting.key, value)
        for queue, settings in SETTINGS.items()
        for setting in settings
        for value in MISFITS[setting.form]
    ],
)
def test_a_value_of_another_type_is_refused(queue: str, key: str, value: object) -> None:
    assert key in refused(queue, {key: value}).message


@pytest.mark.parametrize("config", [None, [], "x", 3, [["dry-run", True]]])
def test_a_config_is_an_object(config: object) -> None:
    refused(REMOVE_ORPHAN_FILES, config)


def test_a_config_is_kept_as_it_was_given() -> None:
    given = {"dry-run": True, "target-reclaim-bytes": 0, "queue-name": "other"}
    assert parse_config(REMOVE_ORPHAN_FILES, given) == {"dry-run": True, "target-reclaim-bytes": 0}


@pytest.mark.parametrize(
    ("queue", "key", "nearest"),
    [
        (EXPIRE_SNAPSHOTS, "max-snapshot-age", "did you mean max-snapshot-age-ms?"),
        (EXPIRE_SNAPSHOTS, "MIN_SNAPSHOTS_TO_KEEP", "did you mean min-snapshots-to-keep?"),
        (REMOVE_ORPHAN_FILES, "older-than-ms", "did you mean default-older-than-ms?"),
        (REMOVE_ORPHAN_FILES, "dry-runs", "did you mean dry-run?"),
        (OPTIMIZE, "vacuum", "there are enable-optimize, target-file-size-bytes, "),
        # What another queue has.
        (OPTIMIZE, "dry-run", "there are enable-optimize, "),
        (TASK_LOG_CLEANUP, "retention", "did you mean retention-period?"),
        (OPTIMIZE, "x\n" * 9999, "there are "),
        (OPTIMIZE, "", "there are "),
    ],
)
def test_a_key_that_is_none_is_named_with_the_nearest(queue: str, key: str, nearest: str) -> None:
    for value in (None, 1, True):
        message = refused(queue, {key: value}).message
        assert repr(key[:50]) in message
        assert nearest in message
        assert "\n" not in message
        assert len(message) < 400


@pytest.mark.parametrize("queue", PUBLISHED)
def test_no_key_of_lakekeeper_is_refused(queue: str) -> None:
    given = {key: default for key, (default, _, _) in PUBLISHED[queue].items()}
    assert parse_config(queue, given) == given


def test_an_unknown_queue_has_no_config() -> None:
    with pytest.raises(RequestRefused, match="the queues are") as error:
        parse_config("remove_orphaned_files", {})
    assert (error.value.name, error.value.code) == ("QueueNotFound", 400)


# -- what applies --------------------------------------------------------------------------------

OVERRIDES = [
    (EXPIRE_SNAPSHOTS, "enable-expire-snapshots", "history.expire.enabled", True, "true", True),
    (EXPIRE_SNAPSHOTS, "min-snapshots-to-expire", "history.expire.min-snapshots-to-expire", True, "7", 7),
    (EXPIRE_SNAPSHOTS, "max-snapshot-age-ms", "history.expire.max-snapshot-age-ms", False, "5", 5),
    (EXPIRE_SNAPSHOTS, "min-snapshots-to-keep", "history.expire.min-snapshots-to-keep", False, "9", 9),
    (EXPIRE_SNAPSHOTS, "max-ref-age-ms", "history.expire.max-ref-age-ms", False, "8", 8),
    (REMOVE_ORPHAN_FILES, "enable-remove-orphan-files", "remove-orphan-files.enabled", True, "true", True),
    (REMOVE_ORPHAN_FILES, "default-older-than-ms", "remove-orphan-files.older-than-ms", True, "6000", 6000),
    (REMOVE_ORPHAN_FILES, "dry-run", "remove-orphan-files.dry-run", True, "true", True),
    (OPTIMIZE, "enable-optimize", "optimize.enabled", True, "true", True),
    (OPTIMIZE, "min-files", "optimize.min-files", True, "4", 4),
]  # fmt: skip


@pytest.mark.parametrize(("queue", "key", "name", "prefixed", "text", "value"), OVERRIDES)
def test_a_property_of_the_table_beats_the_warehouse(
    queue: str, key: str, name: str, prefixed: bool, text: str, value: object
) -> None:
    stored: dict[str, Any] = {} if isinstance(value, bool) else {key: 1000}
    for prefix in ("lakewarden.", "lakekeeper.") if prefixed else ("",):
        found = effective(queue, {prefix + name: text}, stored)[key]
        assert found == Applied(value, Source.TABLE, prefix + name)
    other = effective(queue, {"elsewhere." + name: text}, stored)[key]
    assert other.source is (Source.WAREHOUSE if stored else Source.DEFAULT)


def test_our_own_property_beats_lakekeepers() -> None:
    properties = {
        "lakekeeper.remove-orphan-files.enabled": "true",
        "lakewarden.remove-orphan-files.enabled": "false",
        "lakekeeper.remove-orphan-files.older-than-ms": "1",
        "lakewarden.remove-orphan-files.older-than-ms": "2",
    }
    found = effective(REMOVE_ORPHAN_FILES, properties, {"enable-remove-orphan-files": True})
    assert found["enable-remove-orphan-files"].value is False
    assert found["default-older-than-ms"].value == 2


@pytest.mark.parametrize("warehouse", [True, False, None])
@pytest.mark.parametrize("ours", ["true", "false", "False", "yes", "", None])
@pytest.mark.parametrize("theirs", ["TRUE", "false", None])
def test_the_safer_dry_run_wins(
    warehouse: bool | None, ours: str | None, theirs: str | None
) -> None:
    stored = {} if warehouse is None else {"dry-run": warehouse}
    given = {
        "lakewarden.remove-orphan-files.dry-run": ours,
        "lakekeeper.remove-orphan-files.dry-run": theirs,
    }
    properties = {name: text for name, text in given.items() if text is not None}
    live = [text.lower() == "false" for text in properties.values()]
    expected = warehouse is True or not all(live)
    assert OrphanSettings.of(properties, stored).dry_run is expected


@pytest.mark.parametrize("queue", [EXPIRE_SNAPSHOTS, REMOVE_ORPHAN_FILES])
@pytest.mark.parametrize(
    ("text", "excluded"),
    [("true", False), ("TRUE", False), ("false", True), ("False", True), ("no", True), ("", True)],
)
def test_gc_enabled_beats_everything(queue: str, text: str, excluded: bool) -> None:
    key = SETTINGS[queue][0].key
    enabling = {SETTINGS[queue][0].properties[0]: "true", "gc.enabled": text}
    refusal = exclusion(queue, enabling, {key: True}, EntityType.TABLE)
    assert (refusal is not None) is excluded
    assert effective(queue, enabling, {key: True})[key].value is not excluded
    if refusal is not None:
        assert (refusal.name, refusal.code) == ("GcDisabled", 400)


@pytest.mark.parametrize(
    ("queue", "name"),
    [
        (EXPIRE_SNAPSHOTS, "ExpireSnapshotsDisabled"),
        (REMOVE_ORPHAN_FILES, "RemoveOrphanFilesDisabled"),
        (OPTIMIZE, "OptimizeDisabled"),
    ],
)
def test_who_is_excluded_is_told_why(queue: str, name: str) -> None:
    switch = SETTINGS[queue][0]
    own = switch.properties[0]

    def why(properties: dict[str, str], stored: dict[str, Any]) -> str | None:
        refusal = exclusion(queue, properties, stored, EntityType.TABLE)
        return None if refusal is None else refusal.name

    assert why({}, {}) == name
    assert why({}, {switch.key: True}) is None
    assert why({own: "true"}, {}) is None
    assert why({own: "false"}, {switch.key: True}) == name
    assert why({own: "nonsense"}, {switch.key: True}) == name
    assert why({"encryption.key-id": "k"}, {switch.key: True}) == "EncryptedTable"
    view = exclusion(queue, {}, {switch.key: True}, EntityType.VIEW)
    assert view is not None
    assert view.name == "UnsupportedEntityType"
    assert exclusion(queue, {}, {switch.key: True}, EntityType.GENERIC_TABLE) is None


# -- floors and limits ---------------------------------------------------------------------------


@pytest.mark.parametrize("age", [6000, 0, -1, -(2**63), DAY_MS - 1])
def test_an_age_below_a_day_is_refused_when_a_task_is_picked(age: int) -> None:
    stored = parse_config(REMOVE_ORPHAN_FILES, {"default-older-than-ms": age})
    for properties in ({}, {"lakewarden.remove-orphan-files.older-than-ms": str(10 * DAY_MS)}):
        with pytest.raises(RequestRefused, match="less than 24 hours") as error:
            OrphanSettings.of(properties, stored)
        assert error.value.name == "RemoveOrphanFilesRetentionTooShort"
        assert error.value.kind is ErrorKind.RETENTION_TOO_SHORT


def test_a_day_is_enough_and_the_check_can_be_switched_off() -> None:
    stored: dict[str, Any] = {"default-older-than-ms": DAY_MS}
    assert OrphanSettings.of({}, stored).older_than == timedelta(days=1)
    stored = {"default-older-than-ms": 6000, "disable-min-older-than-check": True}
    assert OrphanSettings.of({}, stored).older_than == timedelta(seconds=6)
    stored["default-older-than-ms"] = -1
    with pytest.raises(RequestRefused, match="that young"):
        OrphanSettings.of({}, stored)


def test_a_tables_own_age_has_no_floor() -> None:
    properties = {"lakekeeper.remove-orphan-files.older-than-ms": "0"}
    assert OrphanSettings.of(properties, {}).older_than == timedelta(0)


def test_an_age_that_is_too_long_to_say_means_never() -> None:
    for milliseconds in (2**63 - 1, 10**15):
        found = OrphanSettings.of({}, {"default-older-than-ms": milliseconds})
        assert found.older_than >= timedelta(days=36_500)
    assert ExpireSettings.of({}, {}).max_ref_age >= timedelta(days=36_500)


@pytest.mark.parametrize("text", ["abc", "-1", "1.5", "", " 5", "1_000", "9" * 20])
def test_a_number_that_cannot_be_read_is_no_permission(text: str) -> None:
    for name in ("lakewarden", "lakekeeper"):
        properties = {f"{name}.remove-orphan-files.older-than-ms": text}
        with pytest.raises(RequestRefused, match="correct or remove it") as error:
            OrphanSettings.of(properties, {})
        assert error.value.name == "InvalidTableProperty"


def test_at_least_one_snapshot_is_kept() -> None:
    assert ExpireSettings.of({}, {"min-snapshots-to-keep": -5}).min_snapshots_to_keep == 1


def test_the_log_is_cleaned_once_a_day_at_most() -> None:
    assert LogSettings.of({}) == LogSettings(timedelta(days=1), timedelta(days=90))
    assert LogSettings.of({"cleanup-period": "PT1H"}).cleanup_period == timedelta(days=1)
    assert LogSettings.of({"cleanup-period": "P1W"}).cleanup_period == timedelta(weeks=1)
    assert LogSettings.of({"retention-period": "PT0S"}).retention_period == timedelta(0)
    assert LogSettings.of({"retention-period": "P999999D"}).retention_period.days == 36_500


def test_settings_of_optimize_are_handed_on() -> None:
    stored = {"target-file-size-bytes": 5, "min-files": 3, "max-bytes": 9}
    assert OptimizeSettings.of({}, stored) == OptimizeSettings(5, 3, 9, 3600, 8, 3600)


# -- durations -----------------------------------------------------------------------------------


@given(st.integers(0, 10**12))
def test_durations_are_read_as_they_are_written(micros: int) -> None:
    text = format_iso_duration(micros / 1_000_000)
    assert parse_iso_duration(text) == timedelta(microseconds=micros)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5445.5, "PT1H30M45.5S"), (0, "PT0S"), (60, "PT1M"), (0.25, "PT0.25S"), (90000, "PT25H")],
)
def test_durations_look_as_published(seconds: float, text: str) -> None:
    assert format_iso_duration(seconds) == text


@pytest.mark.parametrize(
    "text",
    ["P1D", "PT1H30M45.5S", "P1W", "P1W2DT3H", "P", "PT", "P1Y", "P1M", "PT1.5H", "1D", "P1D ", "-P1D"],
)  # fmt: skip
def test_what_is_published_of_durations_is_what_is_read(text: str) -> None:
    assert bool(re.search(ISO_DURATION, text)) == (parse_iso_duration(text) is not None)
