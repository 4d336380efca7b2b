"""Drift of Iceberg tables: metadata that goes on from a pin and that the log does not know.

An Iceberg table has no head of its own: whoever keeps a pointer to its metadata says what is current,
and for the warehouse's tables that is the log.  Another catalog over the same place leaves metadata
files that name ours as the one before.  A writer of ours that died before it was announced, or that is
still at work, leaves the same.  So what the log knows or was announced is left out; what is young may
be somebody's work in progress and is only told; and what is left is taken for another catalog's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound
from lakewarden.formats.iceberg.metadata import unpacked
from lakewarden.formats.iceberg.paths import place
from lakewarden.model import age_is_known
from lakewarden.retention import MIN_AGE
from lakewarden.storage.location import Location
from lakewarden.storage.store import ReadStore
from lakewarden.warehouse.codec import TRANSACTIONS
from lakewarden.warehouse.commit import Log
from lakewarden.warehouse.drift import Line, Step, classify
from lakewarden.warehouse.iceberg import snapshots_named
from lakewarden.warehouse.manifest import Pin

#: Metadata files that are read to find those that go on from a pin.
_READ_MAX = 1000
_ENDING = ".metadata.json"
#: What describes a table besides its snapshots.
_DESCRIBED = (
    "format-version", "location", "current-schema-id", "schemas", "default-spec-id", "partition-specs",
    "default-sort-order-id", "sort-orders", "properties",
)  # fmt: skip
_STATISTICS = ("statistics", "partition-statistics")


@dataclass(frozen=True, slots=True)
class _Found:
    """A metadata file."""

    uri: str
    modified: datetime | None
    raw: Mapping[str, Any]

    @property
    def before(self) -> list[str]:
        """The files that came before, oldest first, as canonical URIs."""
        log = self.raw.get("metadata-log") or []
        return [_canonical(one["metadata-file"]) for one in log]


def announced(log: Log) -> frozenset[str]:
    """Return the metadata that writers of ours have announced, whatever became of it."""
    found: set[str] = set()
    for batch in log.store.list(f"{log.prefix}/_transactions"):
        for key in batch.column("key").to_pylist():
            try:
                changes = TRANSACTIONS.decode(log.store.get(key), key).changes
            except LakewardenError:
                # What an announcement says is worth knowing; that it cannot be read is told elsewhere.
                continue
            pins = (change.after for change in changes)
            found.update(_canonical(pin.path) for pin in pins if pin is not None)
    return frozenset(found)


def examine(
    line: Line,
    store: ReadStore,
    known: Container[str],
    ours: Callable[[], frozenset[str]],
    now: datetime,
) -> Line:
    """Find out whether somebody has gone on from a table's pin.

    `known` are metadata files of the log, of all tables; `ours` returns those that were announced.
    """
    try:
        pin = _read(store, line.pin.path)
        before = {_canonical(line.pin.path), *pin.before}
        later = list(_later(line, store, known, before))
        if later:
            announced = ours()
            later = [one for one in later if one.uri not in announced]
    except LakewardenError as error:
        return line.failed(_named(line, error))
    mine = [one for one in later if _goes_on(one, pin)]
    line = replace(line, head=line.pin)
    return _between(line, pin, mine, now) if mine else line


def _later(
    line: Line, store: ReadStore, known: Container[str], before: Container[str]
) -> Iterator[_Found]:
    """Yield metadata files beside the pin's that are not known, and neither before it nor older."""
    home = _placed(line.pin.path).parent
    listed: dict[str, datetime | None] = {}
    for batch in store.list(home.key):
        columns = (batch.column(name).to_pylist() for name in ("key", "modified"))
        for key, modified in zip(*columns, strict=True):
            if key.endswith(_ENDING):
                listed[replace(home, path=key).uri] = modified
    began = listed.get(_canonical(line.pin.path))
    unknown = {
        uri: modified
        for uri, modified in listed.items()
        if uri not in known
        and uri not in before
        and (began is None or modified is None or modified >= began)
    }
    if len(unknown) > _READ_MAX:
        raise Damaged(
            ErrorKind.DRIFT,
            f"{len(unknown):,} metadata files lie beside {line.pin.path} that the log does not know; "
            "that is more than can be looked at: take away what nobody needs (lakewarden cleanup)",
        )
    for uri, modified in sorted(unknown.items()):
        try:
            yield _read(store, uri, modified)
        except (NotFound, Damaged):
            # Gone meanwhile, or no metadata of any table: nobody goes on from there.
            continue


def _goes_on(one: _Found, pin: _Found) -> bool:
    same = one.raw.get("table-uuid") == pin.raw.get("table-uuid")
    return same and pin.uri in one.before


def _between(line: Line, pin: _Found, found: Sequence[_Found], now: datetime) -> Line:
    named = {uri for one in found for uri in one.before}
    ends = [one for one in found if one.uri not in named]
    last = max(ends or found, key=lambda one: len(one.before))
    steps = tuple(_steps(pin.raw, last.raw))
    error = None
    if len(ends) != 1:
        error = (
            f"{len(ends)} metadata files go on from the pin beside each other ({ends[0].uri}, …); which "
            "of them counts cannot be told"
        )
    elif not age_is_known(last.modified, now) or now - (last.modified or now) < MIN_AGE:
        error = (
            f"{last.uri} is younger than an hour, so a writer of the warehouse may be about to commit "
            "it; run again later"
        )
    steps_made = last.before.index(pin.uri)
    version = line.pin.version + len(last.before) - steps_made
    return replace(
        line,
        head=Pin(version, _spelled(line.pin, last.uri), snapshots=snapshots_named(last.raw)),
        steps=steps,
        classification=classify(steps, error),
        error=error,
        rows_at_pin=_rows(_current(pin.raw)),
        rows_at_head=_rows(_current(last.raw)),
    )


def _steps(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Step]:
    """Yield what happened: snapshots in their order, and all else that is not as it was."""
    known = {one["snapshot-id"]: one for one in after.get("snapshots") or []}
    way: list[Mapping[str, Any]] = []
    at, goal = _current(after), _current(before)
    while at is not None and not _same(at, goal):
        way.append(at)
        at = known.get(at.get("parent-snapshot-id", 0))
    if not _same(at, goal):
        yield Step("replace_main", "main does not go on from the snapshot that was current")
        return
    for one in reversed(way):
        yield _step(one, known.get(one.get("parent-snapshot-id", 0)))
    doubts = list(_beside(before, after, {one["snapshot-id"] for one in way}))
    if not way and not doubts:
        doubts = ["the metadata was written anew, and what changed is not known"]
    for doubt in doubts:
        yield Step("update_metadata", doubt)


def _beside(before: Mapping[str, Any], after: Mapping[str, Any], way: set[int]) -> Iterator[str]:
    """Yield what changed besides main's own snapshots, whether main went on or not."""
    changed = [name for name in _DESCRIBED if before.get(name) != after.get(name)]
    if changed:
        yield f"the table's {', '.join(changed)} changed"
    had, has = _refs(before), _refs(after)
    refs = sorted(name for name in had.keys() | has.keys() if had.get(name) != has.get(name))
    if refs:
        yield f"refs changed ({', '.join(refs)})"
    old, new = (
        {one["snapshot-id"] for one in raw.get("snapshots") or []} for raw in (before, after)
    )
    if old - new:
        yield f"snapshots are gone ({len(old - new)})"
    if new - old - way:
        yield f"snapshots came that main does not go through ({len(new - old - way)})"
    told = [name for name in _STATISTICS if (before.get(name) or []) != (after.get(name) or [])]
    if told:
        yield f"the table's {', '.join(told)} changed"


def _refs(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the refs; of main, only what is kept of it, since where it is, its snapshots tell."""
    found = {name: dict(one) for name, one in (raw.get("refs") or {}).items()}
    main = found.pop("main", {})
    kept = {name: told for name, told in main.items() if name not in {"snapshot-id", "type"}}
    return {**found, "main": kept}


def _same(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Tell whether two are one snapshot; some writers let go of its parent when that expires."""
    if one is None or other is None:
        return one is other
    names = (one.keys() | other.keys()) - {"parent-snapshot-id"}
    return all(one.get(name) == other.get(name) for name in names)


def _step(snapshot: Mapping[str, Any], parent: Mapping[str, Any] | None) -> Step:
    does = str((snapshot.get("summary") or {}).get("operation", "unknown"))
    if does != "replace":
        return Step(does, f"{does} may change rows")
    rows, was = _rows(snapshot), _rows(parent)
    if rows is None or was is None:
        return Step(does, "replace does not tell how many rows there are")
    return Step(does, "" if rows == was else f"replace has made {rows} rows of {was}")


def _current(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    wanted = raw.get("current-snapshot-id")
    found = (one for one in raw.get("snapshots") or [] if one["snapshot-id"] == wanted)
    return next(found, None)


def _rows(snapshot: Mapping[str, Any] | None) -> int | None:
    """Return a snapshot's rows, if nothing that deletes rows is pending: files tell no sum then."""
    if snapshot is None:
        return 0
    summary = snapshot.get("summary") or {}
    told = [summary.get(name, "0") for name in ("total-position-deletes", "total-equality-deletes")]
    total = str(summary.get("total-records", ""))
    return int(total) if total.isdecimal() and set(told) <= {"0"} else None


def _read(store: ReadStore, uri: str, modified: datetime | None = None) -> _Found:
    where = _placed(uri)
    data = store.get(where.key)
    try:
        raw = json.loads(unpacked(data))
        found = _Found(where.uri, modified, raw)
        # Whatever is looked at later is looked at now.
        found.before, _current(raw), raw["table-uuid"]
    except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError) as error:
        raise Damaged(
            ErrorKind.CORRUPT_MANIFEST,
            f"cannot read table metadata {uri} ({type(error).__name__}: {error})",
        ) from error
    return found


def _named(line: Line, error: LakewardenError) -> LakewardenError:
    if not isinstance(error, NotFound):
        return error
    return Damaged(
        ErrorKind.DAMAGED_VERSION,
        f"the warehouse has committed {line.pin.path} as {line.key} on {line.branch}, and it does not "
        "exist: it was deleted past the warehouse, or the store has lost it; bring it back from a "
        f"backup, or go back: lakewarden restore WAREHOUSE {line.key} --version N",
    )


def _spelled(pin: Pin, uri: str) -> str:
    """Return a neighbour of the pin in the spelling that its own path has."""
    return f"{pin.path.rpartition('/')[0]}/{uri.rpartition('/')[2]}"


def _canonical(uri: str) -> str:
    found = place(uri)
    return uri if found is None else found.uri


def _placed(uri: str) -> Location:
    found = place(uri)
    if found is None:
        raise Damaged(ErrorKind.UNKNOWN_SCHEME, f"{uri} is in no store that can be reached here")
    return found
