"""Table metadata: what expiry needs of it, and how it survives a rewrite.

Read as plain JSON: building PyIceberg's models takes far longer on a table with many snapshots,
and they drop every field that they do not know.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lakewarden import expiry
from lakewarden.errors import Damaged, ErrorKind

NEWEST_FORMAT = 3
PREVIOUS_VERSIONS_MAX = "write.metadata.previous-versions-max"
DELETE_AFTER_COMMIT = "write.metadata.delete-after-commit.enabled"
DEFAULT_PREVIOUS_VERSIONS = 100

_GZIP = b"\x1f\x8b"
_NO_SNAPSHOT = -1


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot and where the names of its files are."""

    snapshot_id: int
    parent_id: int | None
    timestamp_ms: int
    manifest_list: str | None
    #: Named in the metadata itself, without a list, by old writers of format 1.
    manifests: tuple[str, ...]
    #: Files that the snapshot's summary counts; None if it does not.
    files: int | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """A file of statistics about one snapshot."""

    snapshot_id: int
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class TableMetadata:
    """The parts of a metadata file that maintenance looks at."""

    uuid: str | None
    location: str
    current_snapshot_id: int | None
    properties: Mapping[str, str]
    snapshots: Sequence[StoredSnapshot]
    refs: Sequence[expiry.Ref]
    statistics: Sequence[Statistics]
    partition_statistics: Sequence[Statistics]
    #: Earlier metadata files, oldest first.
    metadata_log: Sequence[str]
    #: Names in every partition spec, in use or not: directories may be named after any of them.
    partition_fields: tuple[str, ...]

    def history(self) -> expiry.SnapshotHistory:
        return expiry.SnapshotHistory(
            [
                expiry.Snapshot(one.snapshot_id, one.timestamp_ms, one.parent_id)
                for one in self.snapshots
            ],
            self.refs,
            self.current_snapshot_id,
        )


class _MalformedError(ValueError):
    """The JSON is not what a metadata file contains; says in what."""


def unpacked(data: bytes) -> bytes:
    """Return the JSON text of a metadata file, which may be compressed whatever its name."""
    return gzip.decompress(data) if data.startswith(_GZIP) else data


def packed(data: bytes, location: str) -> bytes:
    """Return a metadata file's text as its name promises it."""
    return gzip.compress(data) if ".gz." in location or location.endswith(".gz") else data


def parse(data: bytes, location: str) -> TableMetadata:
    """Read a metadata file.  Whatever is missing or of the wrong type means that it is damaged."""
    try:
        raw = json.loads(unpacked(data))
        version = _get(raw, "format-version", int)
        if version <= NEWEST_FORMAT:
            return _table(raw, version)
    except (ValueError, RecursionError, OSError, EOFError, zlib.error) as error:
        found = " ".join(str(error).split()) or type(error).__name__
        raise Damaged(
            ErrorKind.CORRUPT_MANIFEST,
            f"cannot read table metadata {location}: {found}; what it needs cannot be known, so "
            "nothing goes: restore the file or point the table to a readable one",
        ) from None
    raise Damaged(
        ErrorKind.UNSUPPORTED_FEATURE,
        f"table metadata {location} has format version {version}, newer than {NEWEST_FORMAT}; "
        "what it needs cannot be known, so nothing goes: upgrade lakewarden",
    )


def _table(raw: Mapping[str, Any], version: int) -> TableMetadata:
    if version < 1:
        raise _MalformedError(f"format-version is {version}")
    current = _optional(raw, "current-snapshot-id", int)
    snapshots = [_snapshot(one) for one in _objects(raw, "snapshots")]
    if len({one.snapshot_id for one in snapshots}) < len(snapshots):
        raise _MalformedError("two snapshots have the same snapshot-id")
    return TableMetadata(
        uuid=_optional(raw, "table-uuid", str),
        location=_get(raw, "location", str),
        current_snapshot_id=None if current == _NO_SNAPSHOT else current,
        properties={
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in (_optional(raw, "properties", dict) or {}).items()
        },
        snapshots=snapshots,
        refs=[_ref(name, raw["refs"]) for name in _optional(raw, "refs", dict) or {}],
        statistics=[_statistics(one) for one in _objects(raw, "statistics")],
        partition_statistics=[_statistics(one) for one in _objects(raw, "partition-statistics")],
        metadata_log=[_get(one, "metadata-file", str) for one in _objects(raw, "metadata-log")],
        partition_fields=_partition_fields(raw),
    )


def _snapshot(raw: Mapping[str, Any]) -> StoredSnapshot:
    manifest_list = _optional(raw, "manifest-list", str)
    manifests = () if manifest_list is not None else tuple(_get(raw, "manifests", list))
    if not all(isinstance(path, str) for path in manifests):
        raise _MalformedError("manifests has an entry that is no path")
    return StoredSnapshot(
        _get(raw, "snapshot-id", int),
        _optional(raw, "parent-snapshot-id", int),
        _get(raw, "timestamp-ms", int),
        manifest_list,
        manifests,
        _files(raw.get("summary")),
    )


def _files(summary: Any) -> int | None:
    """Return how many files a snapshot has by its own account, which may be wrong."""
    names = ("total-data-files", "total-delete-files")
    counts = [summary.get(name) for name in names] if isinstance(summary, dict) else [None]
    known = [int(text) for text in counts if isinstance(text, str) and text.isdecimal()]
    return sum(known) if known else None


def _ref(name: str, refs: Mapping[str, Any]) -> expiry.Ref:
    raw = _get(refs, name, dict)
    kind = _get(raw, "type", str).lower()
    if kind not in list(expiry.RefKind):
        raise _MalformedError(f"ref {name!r} has the type {kind!r}")
    limits = [
        _optional(raw, limit, int)
        for limit in ("min-snapshots-to-keep", "max-snapshot-age-ms", "max-ref-age-ms")
    ]
    if any(limit is not None and limit < 1 for limit in limits):
        raise _MalformedError(f"ref {name!r} has a limit below 1")
    return expiry.Ref(name, _get(raw, "snapshot-id", int), expiry.RefKind(kind), *limits)


def _statistics(raw: Mapping[str, Any]) -> Statistics:
    return Statistics(
        _get(raw, "snapshot-id", int),
        _get(raw, "statistics-path", str),
        _optional(raw, "file-size-in-bytes", int) or 0,
    )


def _partition_fields(raw: Mapping[str, Any]) -> tuple[str, ...]:
    fields = _objects(raw, "partition-spec")
    for spec in _objects(raw, "partition-specs"):
        fields += _objects(spec, "fields")
    return tuple(dict.fromkeys(_get(one, "name", str) for one in fields))


def _get(raw: Any, name: str, kind: type) -> Any:
    value = _optional(raw, name, kind)
    if value is None:
        raise _MalformedError(f"{name} is missing")
    return value


def _optional(raw: Any, name: str, kind: type) -> Any:
    if not isinstance(raw, dict):
        raise _MalformedError(f"found {type(raw).__name__} where an object with {name} belongs")
    value = raw.get(name)
    # `true` is an int to isinstance.
    if value is not None and type(value) is not kind:
        raise _MalformedError(f"{name} is {json.dumps(value)[:80]}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise _MalformedError(f"{name} is {str(value)[:80]}, which no 64 bits hold")
    return value


def _objects(raw: Mapping[str, Any], name: str) -> list[Any]:
    return list(_optional(raw, name, list) or ())


def previous_versions_max(properties: Mapping[str, str]) -> int:
    """Return how many earlier metadata files the log may name."""
    try:
        number = int(properties.get(PREVIOUS_VERSIONS_MAX, DEFAULT_PREVIOUS_VERSIONS))
    except ValueError:
        return DEFAULT_PREVIOUS_VERSIONS
    return max(1, number)


def deletes_after_commit(properties: Mapping[str, str], *, default: bool) -> bool:
    """Tell whether a commit deletes the metadata files that fall out of its log."""
    value = properties.get(DELETE_AFTER_COMMIT)
    return default if value is None else str(value).lower() in {"true", "yes", "1"}


def dropped_metadata_files(
    before_log: Sequence[str],
    previous: str,
    after_log: Sequence[str],
    properties: Mapping[str, str],
    *,
    default_enabled: bool,
) -> list[str]:
    """Return the metadata files that a commit has dropped from the log, if they are to go.

    `properties` are those of the new metadata.  A log that does not name `previous` was not
    written by an honest commit, and `previous` may still be the current file: nothing goes.
    """
    kept = set(after_log)
    if previous not in kept or not deletes_after_commit(properties, default=default_enabled):
        return []
    return [file for file in dict.fromkeys(before_log) if file not in kept]


@dataclass(frozen=True, slots=True)
class Removal:
    """What an expiry takes out of the metadata."""

    snapshot_ids: frozenset[int]
    refs: tuple[str, ...] = ()


def without(
    raw: Mapping[str, Any], removal: Removal, *, location: str, now_ms: int
) -> dict[str, Any]:
    """Return the metadata without what goes, as the successor of the file at `location`.

    Everything else stays as it was written, known to this release or not.
    """
    gone, after = removal.snapshot_ids, dict(raw)
    # Some writers say null for what is not there.
    there = {name: value for name, value in raw.items() if value is not None}
    for name in ("snapshots", "statistics", "partition-statistics"):
        if name in there:
            after[name] = [one for one in raw[name] if one["snapshot-id"] not in gone]
    if "snapshot-log" in there:
        after["snapshot-log"] = _without_gaps(raw["snapshot-log"], gone)
    if "refs" in there:
        after["refs"] = {name: ref for name, ref in raw["refs"].items() if name not in removal.refs}
    log = [
        *there.get("metadata-log", ()),
        {"timestamp-ms": there.get("last-updated-ms", 0), "metadata-file": location},
    ]
    properties = there.get("properties", {})
    after["metadata-log"] = log[-previous_versions_max(properties) :]
    after["last-updated-ms"] = max(now_ms, there.get("last-updated-ms", 0))
    return after


def _without_gaps(log: Sequence[Any], gone: frozenset[int]) -> list[Any]:
    """Return the log after its last entry that goes.

    With a gap, a reader who travels back to a moment in it would see an older snapshot.
    """
    last = max((n for n, one in enumerate(log) if one["snapshot-id"] in gone), default=-1)
    return list(log[last + 1 :])
