"""How one version of a Lance table is doing: what it is set to, and how scattered it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import lance

from lakewarden.errors import Damaged, ErrorKind, NotFound, StorageError
from lakewarden.formats.lance import compacting
from lakewarden.packing import Rules

#: What Lance says if a store did not answer; it has one kind of error for that and for damage.
_AWAY = re.compile(r"Error performing|HTTP error|error sending request", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Condition:
    """What a look at the version shows."""

    properties: Mapping[str, str]
    #: Files that are worth rewriting, and their bytes.
    small_files: int
    small_bytes: int


def condition(uri: str, number: int | None, options: Mapping[str, str]) -> Condition:
    """Open a version, the newest if there is no number; no data is read."""
    try:
        found = lance.dataset(uri, version=number, storage_options=dict(options) or None)
        properties, pieces = found.config(), compacting.plan(found, Rules()).pieces
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        # Of a manifest that makes no sense, what it does may be anything.
        line = " ".join(str(error).split())[:160]
        if isinstance(error, OSError | ValueError) and "not found" in line.lower():
            raise NotFound(f"{uri} holds no Lance table ({line})") from error
        if _AWAY.search(line):
            raise StorageError(ErrorKind.STORAGE, f"{uri} cannot be reached ({line})") from error
        raise Damaged(ErrorKind.CORRUPT_MANIFEST, f"{uri} cannot be opened ({line})") from error
    return Condition(properties, sum(one.files for one in pieces), sum(one.bytes for one in pieces))


def _is_panic(error: BaseException) -> bool:
    """Tell whether Lance gave up in the middle: Python knows that as something that is no Exception."""
    return type(error).__name__ == "PanicException"
