"""Checks that a store keeps the promises of `store`.

The tests run them against every store of ours, `lakewarden storage validate` against a user's
bucket: S3-compatible servers and gateways differ exactly here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import pyarrow as pa

from lakewarden.errors import AlreadyExists, LakewardenError, NotFound
from lakewarden.storage.location import Location
from lakewarden.storage.store import (
    DELETE_BATCH_MAX,
    OBJECT_SCHEMA,
    Deletion,
    ReadStore,
    Store,
)
from lakewarden.world import SystemClock

#: Ages decide about deletion, so the store's clock and ours must agree about this well.
CLOCK_SKEW_MAX = timedelta(minutes=5)
_RACERS = 8


class ContractBroken(Exception):  # noqa: N818  # like errors.Refused, named for what happened
    """The store did not keep a promise; the message says what was seen instead."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise and the experiment that tests it under an empty prefix."""

    name: str
    guarantee: str
    run: Callable[[Store, str], None]


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """What the experiment showed; `detail` is empty when all is well."""

    name: str
    guarantee: str
    ok: bool
    detail: str = ""


def validate(store: Store, location: Location, *, ids: Callable[[], str]) -> list[CheckOutcome]:
    """Run every check below `location` in a fresh directory that is gone afterwards."""
    root = location.child(f".lakewarden-validate-{ids()}").key
    try:
        return [_outcome(check, store, f"{root}/{check.name}") for check in CHECKS]
    finally:
        _clean(store, root)


def creates_if_absent(store: Store, prefix: str) -> bool:
    """Tell whether the store keeps the one promise that commits stand on."""
    try:
        for check in (_conditional, _race):
            check(store, f"{prefix}/{check.__name__}")
    except ContractBroken:
        return False
    finally:
        _clean(store, prefix)
    return True


def _outcome(check: Check, store: Store, prefix: str) -> CheckOutcome:
    try:
        check.run(store, prefix)
    except (ContractBroken, LakewardenError) as broken:
        return CheckOutcome(check.name, check.guarantee, ok=False, detail=str(broken))
    return CheckOutcome(check.name, check.guarantee, ok=True)


def _clean(store: Store, root: str) -> None:
    """Remove what the checks left.  A store that fails here has failed a check already."""
    try:
        keys = _keys(store, root)
        for start in range(0, len(keys), DELETE_BATCH_MAX):
            store.delete(keys[start : start + DELETE_BATCH_MAX])
        _prune(store, root)
    except LakewardenError:
        return


def _prune(store: Store, prefix: str) -> None:
    for name in store.list_directory(prefix)[0]:
        _prune(store, f"{prefix}/{name}")
    store.prune_directory(prefix)


def _rows(batches: Iterator[pa.RecordBatch]) -> list[tuple[str, int, object]]:
    table = pa.Table.from_batches(batches, OBJECT_SCHEMA)
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _keys(
    store: ReadStore, prefix: str, after: str | None = None, before: str | None = None
) -> list[str]:
    return [row[0] for row in _rows(store.list(prefix, after=after, before=before))]


def _expect(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise ContractBroken(f"{what}: expected {_shown(wanted)}, saw {_shown(seen)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:159]}…"


def _round_trip(store: Store, prefix: str) -> None:
    key = f"{prefix}/deep/er/ö b+c%20.bin"
    for data in (b"first", b"", bytes(range(256)) * 300):
        store.put(key, data)
        _expect("bytes read after a write", store.get(key), data)
    _expect("existence of a written object", store.exists(key), wanted=True)


def _missing(store: Store, prefix: str) -> None:
    _expect("existence of an unwritten object", store.exists(f"{prefix}/none"), wanted=False)
    try:
        data = store.get(f"{prefix}/none")
    except NotFound:
        return
    raise ContractBroken(f"reading an unwritten object gave {_shown(data)} instead of an error")


#: Names whose order differs between bytes, directories first, and case folding.
_NAMES = ("a", "a.b", "a/x", "a/x.y", "a/x/z", "a0", "B", "b/%20", "b/+", "z", "é", "😀", "\uff5a")


def _fill(store: Store, prefix: str) -> list[str]:
    # `a` and `a/x` cannot both exist on a disk.
    names = [name for name in _NAMES if name not in ("a", "a/x")]
    for name in reversed(names):
        store.put(f"{prefix}/{name}", name.encode())
    return sorted((f"{prefix}/{name}" for name in names), key=str.encode)


def _listing(store: Store, prefix: str) -> None:
    wanted = _fill(store, prefix)
    rows = _rows(store.list(prefix))
    _expect("keys listed right after their writes", [row[0] for row in rows], wanted)
    sizes = [len(key.removeprefix(f"{prefix}/").encode()) for key in wanted]
    _expect("sizes listed", [row[1] for row in rows], sizes)
    store.delete(wanted[:2])
    _expect("keys listed right after two deletes", _keys(store, prefix), wanted[2:])


def _ages(store: Store, prefix: str) -> None:
    store.put(f"{prefix}/now", b"")
    now = SystemClock().now()
    for key, _, modified in _rows(store.list(prefix)):
        if modified is None:
            raise ContractBroken(f"{key} has no modification time, so its age is unknown")
        skew = abs(now - modified)  # type: ignore[operator]
        if skew > CLOCK_SKEW_MAX:
            raise ContractBroken(
                f"an object written now is dated {modified}, {skew} off this machine's clock"
            )


def _ranges(store: Store, prefix: str) -> None:
    keys = _fill(store, prefix)
    bounds = [
        None,
        *keys,
        f"{prefix}/",
        f"{prefix}/a",
        f"{prefix}/a/",
        f"{prefix}/b\n",
        "",
        "\U0010ffff",
    ]
    for after in bounds:
        for before in (None, keys[4], f"{prefix}/a/", f"{prefix}/b/"):
            wanted = [
                key
                for key in keys
                if (after is None or key > after) and (before is None or key < before)
            ]
            seen = _keys(store, prefix, after, before)
            _expect(f"keys between {after!r} and {before!r}", seen, wanted)


def _segments(store: Store, prefix: str) -> None:
    for name in ("t/1", "t_backup/2", "t.old", "tt/3"):
        store.put(f"{prefix}/{name}", b"")
    _expect("keys in directory t", _keys(store, f"{prefix}/t"), [f"{prefix}/t/1"])
    _expect("keys in a missing directory", _keys(store, f"{prefix}/none"), [])


def _one_level(store: Store, prefix: str) -> None:
    for name in ("d/1", "d/e/2", "f", "g/h/3"):
        store.put(f"{prefix}/{name}", b"x")
    directories, objects = store.list_directory(prefix)
    _expect("directories one level down", sorted(directories), ["d", "g"])
    _expect("objects one level down", sorted(objects), ["f"])
    empty = store.list_directory(f"{prefix}/none")
    _expect("names in a missing directory", tuple(map(list, empty)), ([], []))


def _conditional(store: Store, prefix: str) -> None:
    store.put_if_absent(f"{prefix}/key", b"first")
    if _creates(store, f"{prefix}/key", b"second"):
        raise ContractBroken("a second create-if-absent put of the same key succeeded")
    _expect("bytes after a refused put", store.get(f"{prefix}/key"), b"first")


def _race(store: Store, prefix: str) -> None:
    key = f"{prefix}/key"
    with ThreadPoolExecutor(_RACERS) as pool:
        for number in range(3):
            tries = [
                pool.submit(_creates, store, f"{key}{number}", bytes([racer]))
                for racer in range(_RACERS)
            ]
            winners = [bytes([racer]) for racer, won in enumerate(tries) if won.result()]
            _expect(f"winners among {_RACERS} concurrent puts", len(winners), 1)
            _expect("bytes the winner left", store.get(f"{key}{number}"), winners[0])


def _creates(store: Store, key: str, data: bytes) -> bool:
    try:
        store.put_if_absent(key, data)
    except AlreadyExists:
        return False
    return True


def _bulk_delete(store: Store, prefix: str) -> None:
    keys = [f"{prefix}/{number:04d}" for number in range(DELETE_BATCH_MAX)]
    with ThreadPoolExecutor(32) as pool:
        for _ in pool.map(lambda key: store.put(key, b"x"), keys):
            pass
    store.put(f"{prefix}/kept", b"x")
    results = store.delete(keys)
    _expect("keys answered by a bulk delete", [result.key for result in results], keys)
    failed = [result.error for result in results if result.outcome is not Deletion.DELETED]
    _expect("failures of a bulk delete", failed, [])
    _expect("keys left by a bulk delete", _keys(store, prefix), [f"{prefix}/kept"])


def _delete_missing(store: Store, prefix: str) -> None:
    store.put(f"{prefix}/there", b"x")
    keys = [f"{prefix}/gone", f"{prefix}/there", f"{prefix}/never/was"]
    results = store.delete(keys)
    _expect("keys answered, in the order asked", [result.key for result in results], keys)
    failed = [result.error for result in results if result.outcome is Deletion.FAILED]
    _expect("failures when deleting missing keys", failed, [])
    _expect("result for the key that was there", results[1].outcome, Deletion.DELETED)
    _expect("keys left", _keys(store, prefix), [])


def _delete_refused(store: Store, prefix: str) -> None:
    # No store of ours can address a key with an empty segment; each must say so for this key only.
    keys = [f"{prefix}/a", f"{prefix}//b", f"{prefix}/c"]
    store.put(keys[0], b"x")
    store.put(keys[2], b"x")
    outcomes = [result.outcome for result in store.delete(keys)]
    _expect("results", outcomes, [Deletion.DELETED, Deletion.FAILED, Deletion.DELETED])
    _expect("keys left", _keys(store, prefix), [])


CHECKS: Sequence[Check] = (
    Check("round-trip", "A read after an acknowledged write returns the new bytes.", _round_trip),
    Check("missing", "Reading an object that is not there says so.", _missing),
    Check("listing", "A listing sees every earlier write, in byte order of the keys.", _listing),
    Check("ages", "Modification times are known and agree with this machine's clock.", _ages),
    Check("ranges", "Listing a range equals filtering the whole listing.", _ranges),
    Check("segments", "A directory's listing has nothing from its neighbours.", _segments),
    Check("one-level", "One level can be listed without what is below.", _one_level),
    Check("conditional-put", "A create-if-absent put refuses an existing key.", _conditional),
    Check("race", "Of concurrent create-if-absent puts exactly one succeeds.", _race),
    Check("bulk-delete", "A bulk delete removes its keys and no others.", _bulk_delete),
    Check("delete-missing", "Deleting a missing key is no error.", _delete_missing),
    Check(
        "delete-per-key", "A key that cannot be deleted does not affect others.", _delete_refused
    ),
)
