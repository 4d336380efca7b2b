"""How one version of a Lance table is doing: what it is set to, and how scattered it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import lance

from lakewarden.errors import Damaged, ErrorKind, NotFound
from lakewarden.formats.lance import compacting
from lakewarden.packing import Rules


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
    except (OSError, ValueError) as error:
        line = " ".join(str(error).split())[:160]
        if "not found" in line.lower():
            raise NotFound(f"{uri} holds no Lance table ({line})") from error
        raise Damaged(ErrorKind.CORRUPT_MANIFEST, f"{uri} cannot be opened ({line})") from error
    pieces = compacting.plan(found, Rules()).pieces
    return Condition(
        found.config(), sum(one.files for one in pieces), sum(one.bytes for one in pieces)
    )
