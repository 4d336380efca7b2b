"""What kind of change a Lance transaction is.

Read from the transaction file, whose layout is a public specification: the operation is the one
field with a number of 100 or more.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import empty_pb2, message
from google.protobuf.unknown_fields import UnknownFieldSet

from lakewarden.errors import Damaged, ErrorKind

OPERATIONS = {
    100: "append",
    101: "delete",
    102: "overwrite",
    103: "create_index",
    104: "rewrite",
    105: "merge",
    106: "restore",
    107: "reserve_fragments",
    108: "update",
    109: "project",
    110: "update_config",
    111: "data_replacement",
    112: "update_mem_wal_state",
    113: "clone",
    114: "update_bases",
}
_FIRST_OPERATION = 100
_PROPERTIES = 4


def operation(data: bytes) -> str:
    """Return the operation of a transaction file; a number for one that is not known here."""
    found = [number for number, _ in _fields(data) if number >= _FIRST_OPERATION]
    if not found:
        raise Damaged(ErrorKind.CORRUPT_MANIFEST, "the transaction file names no operation")
    return OPERATIONS.get(found[0], str(found[0]))


def restored(data: bytes) -> int | None:
    """Return the version that a transaction goes back to; None if it does something else."""
    for number, value in _fields(data):
        if OPERATIONS.get(number) == "restore":
            return next((version for field, version in _fields(value) if field == 1), 0)
    return None


def properties(data: bytes) -> dict[str, str]:
    """Return what the writer has noted beside the operation."""
    found: dict[str, str] = {}
    for number, value in _fields(data):
        if number == _PROPERTIES and isinstance(value, bytes):
            pair = dict(_fields(value))
            found[_text(pair.get(1))] = _text(pair.get(2))
    return found


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _fields(data: bytes) -> list[tuple[int, Any]]:
    try:
        fields = UnknownFieldSet(empty_pb2.Empty.FromString(data))
        return [(fields[at].field_number, fields[at].data) for at in range(len(fields))]
    except message.DecodeError as error:
        raise Damaged(
            ErrorKind.CORRUPT_MANIFEST, f"the transaction file is corrupt or truncated ({error})"
        ) from error
