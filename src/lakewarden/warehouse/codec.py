"""Entries, transactions and checkpoints as bytes, with a seal that tells whether they are whole."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from lakewarden.errors import Damaged, ErrorKind, Refused, UsageError
from lakewarden.warehouse.manifest import STAMP, Entry, Manifest, Transaction

_SEAL = b"\nsha256:"
_PACKED = b"\x78"
Value = TypeVar("Value")


class Codec(Generic[Value]):
    """Turns values of one type into bytes and back."""

    def __init__(self, kind: Any, what: str, *, packed: bool = False) -> None:
        self._adapter: TypeAdapter[Value] = TypeAdapter(kind)
        self._what = what
        self._packed = packed

    def encode(self, value: Value) -> bytes:
        try:
            body = self._adapter.dump_json(value, exclude_defaults=True)
        except PydanticSerializationError as error:
            raise UsageError(
                ErrorKind.USAGE, f"the {self._what} holds text that cannot be written ({error})"
            ) from error
        whole = body + _SEAL + hashlib.sha256(body).hexdigest().encode()
        return zlib.compress(whole, 1) if self._packed else whole

    def decode(self, data: bytes, where: str) -> Value:
        """Read what `encode` has written; anything else means that it is damaged."""
        try:
            whole = zlib.decompress(data) if data.startswith(_PACKED) else data
        except zlib.error as error:
            raise self._damaged(where, f"it cannot be inflated ({error})") from error
        body, seal, digest = whole.rpartition(_SEAL)
        if not seal or hashlib.sha256(body).hexdigest().encode() != digest:
            raise self._damaged(where, "its seal is missing or does not match")
        stamp = _stamp(body, where)
        try:
            if stamp == STAMP:
                return self._adapter.validate_json(body)
            older = json.loads(body)
            for number in range(stamp, STAMP):
                older = MIGRATIONS[number](older)
            return self._adapter.validate_json(json.dumps(older))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where_in = ".".join(map(str, first["loc"]))
            raise self._damaged(where, f"{where_in}: {first['msg']}") from error

    def _damaged(self, where: str, why: str) -> Damaged:
        return Damaged(
            ErrorKind.CORRUPT_MANIFEST,
            f"{self._what} {where} is damaged: {why}; restore the object from a backup",
        )


def _second(older: dict[str, Any]) -> dict[str, Any]:
    """Make format 2 of format 1, which knew of no reclaiming: all that is new has its default."""
    return older


#: What makes of each format the next one, as it is read; the first write then leaves a checkpoint
#: in the format of this release before the version that says so.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _second}


def _stamp(body: bytes, where: str) -> int:
    """Return the format; refuse what a newer release wrote, before anything is made of it."""
    try:
        found = json.loads(body)
        stamp = found.get("stamp", STAMP) if isinstance(found, dict) else STAMP
    except ValueError:
        return STAMP
    if not isinstance(stamp, int) or stamp < 1:
        # Reading it says what is wrong.
        return STAMP
    if stamp > STAMP:
        raise Refused(
            ErrorKind.NEWER_STAMP,
            f"{where} was written in format {stamp}, and this release knows {STAMP}; upgrade "
            "lakewarden first",
        )
    return stamp


ENTRIES: Codec[Entry] = Codec(Entry, "warehouse version")
CHECKPOINTS: Codec[Manifest] = Codec(Manifest, "checkpoint", packed=True)
TRANSACTIONS: Codec[Transaction] = Codec(Transaction, "transaction")
