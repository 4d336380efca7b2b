"""Whether the log of a warehouse is sound: its versions, its checkpoints, and what else lies there.

Everything is read and nothing believed: each version must follow the one before, and each checkpoint
must be what the versions up to it make of the warehouse.  Objects that nobody reads are strays; they can
be put aside, in a directory beside the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from lakewarden.errors import (
    AlreadyExists,
    Damaged,
    ErrorKind,
    LakewardenError,
    NotFound,
    StorageError,
)
from lakewarden.storage.store import Deletion, Store
from lakewarden.warehouse.codec import CHECKPOINTS, TRANSACTIONS
from lakewarden.warehouse.commit import Log
from lakewarden.warehouse.manifest import EMPTY, STAMP, Entry, Manifest, apply

Item = TypeVar("Item")
Answer = TypeVar("Answer")

QUARANTINE = "_quarantine"
_CHECKPOINTS, _TRANSACTIONS, _VERSIONS = "_checkpoints", "_transactions", "_versions"
#: Objects that are read at the same time, and those that are held at once.
_AT_ONCE, _CHUNK = 16, 256
#: What the log writes below its directory.
_KNOWN = re.compile(
    r"handler\.json|_versions/\d{20}\.json|_checkpoints/\d{20}|_transactions/[0-9A-Za-z-]+\.json"
    r"|_due/.+|_quarantine/.+|_try-.+"
)
#: What is being written, or was when its writer died.
_UNFINISHED = re.compile(r"(?:.*/)?\.tmp[^/]*|.*#\d+")


class Trouble(StrEnum):
    """What is wrong with the log."""

    UNREADABLE_VERSION = "unreadable_version"
    BROKEN_CHAIN = "broken_chain"
    UNREADABLE_CHECKPOINT = "unreadable_checkpoint"
    MISSING_CHECKPOINT = "missing_checkpoint"
    WRONG_CHECKPOINT = "wrong_checkpoint"
    UNREADABLE_ANNOUNCEMENT = "unreadable_announcement"
    STRAY_OBJECT = "stray_object"


@dataclass(frozen=True, slots=True)
class Flaw:
    """One thing that is wrong with the log."""

    trouble: Trouble
    #: The object, relative to the log's directory.
    path: str
    why: str
    version: int | None = None
    #: It is certain that nobody reads it: it can be put aside.
    stray: bool = False


def flaws(log: Log) -> Iterator[Flaw]:
    """Read the whole log and yield what is wrong with it."""
    checkpoints: set[int] = set()
    announcements: list[str] = []
    for path in _paths(log):
        if _UNFINISHED.fullmatch(path) or path.startswith(f"{QUARANTINE}/"):
            continue
        if not _KNOWN.fullmatch(path):
            yield _stranger(path)
        elif path.startswith(f"{_CHECKPOINTS}/"):
            checkpoints.add(int(path.partition("/")[2]))
        elif path.startswith(f"{_TRANSACTIONS}/"):
            announcements.append(path)
    yield from _history(log, checkpoints)
    for found in _abreast(lambda path: _announcement(log, path), announcements):
        if found is not None:
            yield found


def _paths(log: Log) -> Iterator[str]:
    for batch in log.store.list(log.prefix):
        for key in batch.column("key").to_pylist():
            yield key[len(log.prefix) + 1 :]


def _stranger(path: str) -> Flaw:
    inside = path.startswith((f"{_VERSIONS}/", f"{_CHECKPOINTS}/", f"{_TRANSACTIONS}/"))
    why = (
        "its name is none that the log uses, so nobody reads it"
        if inside
        else "it is nothing of the log's; some other program, or a newer release, may need it"
    )
    return Flaw(Trouble.STRAY_OBJECT, path, why, stray=inside)


def _announcement(log: Log, path: str) -> Flaw | None:
    try:
        TRANSACTIONS.decode(log.store.get(f"{log.prefix}/{path}"), path)
    except NotFound:
        # A cleanup has been faster.
        return None
    except LakewardenError as error:
        # One that a newer release has written may be of use to that.
        stray = isinstance(error, Damaged)
        return Flaw(Trouble.UNREADABLE_ANNOUNCEMENT, path, error.message, stray=stray)
    return None


def _abreast(work: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
    """Do the same to many objects, some at a time, and yield the answers in order."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for start in range(0, len(items), _CHUNK):
            yield from pool.map(work, items[start : start + _CHUNK])


def _entry(log: Log, version: int) -> Entry | LakewardenError:
    try:
        return log.entry(version)
    except LakewardenError as error:
        return error


def _history(log: Log, checkpoints: set[int]) -> Iterator[Flaw]:
    """Follow the versions upward, and compare every checkpoint with what they make."""
    before: Entry | None = None
    #: What the warehouse is at the version before; None if that is not known.
    state: Manifest | None = EMPTY
    versions = sorted(log.handler.versions())
    for version, entry in zip(
        versions, _abreast(lambda one: _entry(log, one), versions), strict=True
    ):
        name = f"{_VERSIONS}/{version}"
        if isinstance(entry, LakewardenError):
            before, state = None, None
            # What is not there was reclaimed while this was going on.
            if not isinstance(entry, NotFound):
                yield Flaw(Trouble.UNREADABLE_VERSION, name, entry.message, version)
            continue
        if before is not None and before.version + 1 == version and entry.parent != before.write_id:
            why = f"it does not follow the version {before.version} that is there"
            yield Flaw(Trouble.BROKEN_CHAIN, name, why, version)
            state = None
        if entry.checkpoint and entry.checkpoint not in checkpoints:
            path = f"{_CHECKPOINTS}/{entry.checkpoint:020d}"
            if not _exists(log, path):
                why = f"version {version} needs it and it does not exist"
                yield Flaw(Trouble.MISSING_CHECKPOINT, path, why, version)
            checkpoints = checkpoints | {entry.checkpoint}
        state = _after(log, state, entry)
        if version in checkpoints:
            yield from _checkpoint(log, version, state)
        before = entry


def _after(log: Log, state: Manifest | None, entry: Entry) -> Manifest | None:
    """Return the warehouse at a version, from the one before or from what the entry itself says."""
    try:
        if state is not None and state.version == entry.version - 1:
            return replace(apply(state, entry.logged), stamp=STAMP)
        return log.at(entry.version)
    except LakewardenError:
        # Why is told where it is: at the checkpoint, or at an earlier version.
        return None


def _checkpoint(log: Log, version: int, state: Manifest | None) -> Iterator[Flaw]:
    path = f"{_CHECKPOINTS}/{version:020d}"
    try:
        found = CHECKPOINTS.decode(log.store.get(f"{log.prefix}/{path}"), path)
    except NotFound:
        return
    except LakewardenError as error:
        yield Flaw(Trouble.UNREADABLE_CHECKPOINT, path, error.message, version)
        return
    if state is not None and replace(found, stamp=STAMP) != state:
        why = (
            f"it is not what the versions up to {version} make of the warehouse; versions after it are "
            "read from it"
        )
        yield Flaw(Trouble.WRONG_CHECKPOINT, path, why, version)


def _exists(log: Log, path: str) -> bool:
    return log.store.exists(f"{log.prefix}/{path}")


def quarantine(store: Store, prefix: str, paths: Sequence[str]) -> list[str]:
    """Put strays aside and return those that were; each is copied first, and then taken away.

    Interrupted anywhere, nothing is lost; done again, it goes on.
    """
    done: list[str] = []
    for path in paths:
        try:
            data = store.get(f"{prefix}/{path}")
        except NotFound:
            continue
        with suppress(AlreadyExists):
            store.put_if_absent(f"{prefix}/{QUARANTINE}/{path}", data)
        if store.get(f"{prefix}/{QUARANTINE}/{path}") != data:
            # Another one of that name was put aside before; this one stays where it is.
            continue
        (result,) = store.delete([f"{prefix}/{path}"])
        if result.outcome is Deletion.FAILED:
            raise StorageError(
                ErrorKind.STORAGE,
                f"cannot take {path} away ({result.error}); a copy is in {QUARANTINE}/",
            )
        done.append(path)
    return done
