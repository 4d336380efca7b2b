"""Which names tables, branches and tags may have."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from lakewarden.errors import ErrorKind, UsageError
from lakewarden.warehouse.manifest import MAIN, Name

_LONGEST = 255
#: Names that mean something else somewhere: versions, places, ourselves.
_RESERVED = frozenset({".", "..", "head", "null", "none"})
#: Kinds of characters that cannot be seen, or not be written: controls, marks of direction, halves.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_REF = re.compile(r"[^\W_][\w.-]*")
_NOT_IN_PATHS = re.compile(r"[^A-Za-z0-9_-]+")


def table_name(parts: Sequence[str]) -> Name:
    """Return a table's name, checked; namespaces come first."""
    if not parts:
        raise _bad("", "a table has a name")
    return tuple(_part(part, ".".join(parts)) for part in parts)


def parse_name(text: str) -> Name:
    """Return the name that `namespace.table` means."""
    return table_name(text.split("."))


def ref_name(text: str, what: str) -> str:
    """Return the name of a branch or tag, checked."""
    name = unicodedata.normalize("NFC", text)
    if not _REF.fullmatch(name) or len(name.encode()) > _LONGEST:
        raise _bad(
            text, f"a {what} begins with a letter or digit, goes on with those, '_', '-', '.'"
        )
    if name == MAIN or name.lower() in _RESERVED:
        raise _bad(text, f"no {what} can be called that")
    if name.isdecimal():
        raise _bad(text, f"a {what} that is a number would be taken for a version")
    return name


def directory(name: Name, table_id: str) -> str:
    """Return a directory name that tells people whose it is, and is nobody else's."""
    readable = _NOT_IN_PATHS.sub("-", "-".join(name)).strip("-")[:64]
    return f"{readable or 'table'}-{table_id[:8]}"


def _part(part: str, whole: str) -> str:
    name = unicodedata.normalize("NFC", part)
    if not name.strip():
        raise _bad(whole, "a part of it is empty")
    if "/" in name or "\\" in name or "$" in name:
        raise _bad(whole, "'/', '\\' and '$' separate other things; use '_' or '-'")
    if "." in name:
        raise _bad(whole, "'.' separates namespaces; use '_' or '-'")
    unseen = any(unicodedata.category(one) in _UNSEEN for one in name)
    if unseen or name != name.strip():
        raise _bad(whole, "it holds characters that cannot be seen")
    if name.startswith("__") or name.lower() in _RESERVED:
        raise _bad(whole, f"{name} is reserved")
    if len(name.encode()) > _LONGEST:
        raise _bad(whole, f"a part of it is longer than {_LONGEST} bytes")
    return name


def _bad(name: str, why: str) -> UsageError:
    return UsageError(ErrorKind.BAD_NAME, f"{name!r} cannot be a name: {why}")
