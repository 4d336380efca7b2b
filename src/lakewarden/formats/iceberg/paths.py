"""When two spellings in table metadata, or one there and one in a listing, name the same file.

Writers spell a file as their engine does: `s3a://`, `file:/x`, doubled slashes, percent signs that
one library decodes and another does not.  A spelling that is missed makes a file in use look like
an orphan, so comparison is generous (`comparable`: two names that might be the same are), while
reading and deleting take a name as it stands (`place`).
"""

from __future__ import annotations

import os
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from posixpath import normpath
from typing import NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from lakewarden.errors import UsageError
from lakewarden.storage.location import Location

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?!$)", re.DOTALL)
_SLASHES = re.compile(r"/{2,}")
#: Times a name is decoded before the rest is taken as it stands.
_DECODINGS = 4


def comparable(path: str) -> str:
    """Return the form in which names are compared: decoded, composed, with single slashes."""
    if path.isascii() and "%" not in path and "//" not in path and not path.startswith("/"):
        return path
    for _ in range(_DECODINGS):
        decoded = unquote(path) if "%" in path else path
        if decoded == path:
            break
        path = decoded
    return _SLASHES.sub("/", unicodedata.normalize("NFC", path)).lstrip("/")


def place(uri: str) -> Location | None:
    """Return where a file of a table is, its name taken literally; None if no store of ours has it.

    Percent signs are part of the name, on the local disk too: that is how both Iceberg libraries
    read `file:` URIs.
    """
    scheme, authority, path = _parts(uri)
    if scheme in ("", "file"):
        if authority not in ("", "localhost") or not path.startswith("/"):
            return None
        return Location("file", "", os.path.realpath(path).strip("/"))
    try:
        return Location.parse(f"{scheme}://{authority}{path}")
    except UsageError:
        return None


def _parts(uri: str) -> tuple[str, str, str]:
    found = _SCHEME.match(uri)
    if found is None:
        return "", "", uri
    scheme, rest = found[1].lower(), uri[found.end() :]
    if not rest.startswith("//"):
        return scheme, "", rest
    authority, slash, path = rest[2:].partition("/")
    return scheme, authority, slash + path


@dataclass(frozen=True, slots=True)
class Equality:
    """Schemes and authorities that the user says are the same, on top of those that always are."""

    schemes: Mapping[str, str] = field(default_factory=dict)
    authorities: Mapping[str, str] = field(default_factory=dict)

    def apply(self, uri: str) -> str:
        """Return the URI with its scheme and authority replaced by what they stand for."""
        if not self.schemes and not self.authorities:
            return uri
        scheme, authority, path = _parts(uri)
        if not scheme:
            return uri
        scheme = self.schemes.get(scheme, scheme)
        return f"{scheme}://{self.authorities.get(authority, authority)}{path}"


class Spot(NamedTuple):
    """Where a directory of a table is: below a root we know, or elsewhere in a store."""

    root_id: int | None
    #: The store's URI; None if no store of ours has it, empty if the name does not say which.
    store: str | None
    #: Below the root, or the store's own name for it; ends with a slash unless empty.
    directory: str
    #: The path alone, without scheme and authority, for names that cannot be placed.
    bare: str


class Places:
    """Says under which of the given roots a file lies.  Roots do not overlap."""

    def __init__(self, roots: Iterable[tuple[int, Location]], equality: Equality | None = None):
        by_store: dict[str, list[tuple[str, int]]] = {}
        for root_id, location in roots:
            prefix = f"{location.path}/" if location.path else ""
            by_store.setdefault(location.store.uri, []).append((prefix, root_id))
        self._roots = {store: sorted(found) for store, found in by_store.items()}
        self._equality = equality or Equality()
        self._spots: dict[str, Spot] = {}

    def spot(self, directory: str) -> Spot:
        """Return where a directory (a URI without its last slash) is."""
        known = self._spots.get(directory)
        if known is None:
            known = self._spots[directory] = self._find(self._equality.apply(directory))
        return known

    def _find(self, directory: str) -> Spot:
        scheme, authority, path = _parts(directory)
        bare = f"{normpath('/' + path)}/".lstrip("/")
        found = place(directory)
        if found is None:
            return Spot(None, None if authority or not scheme else "", "", bare)
        key = f"{found.path}/" if found.path else ""
        roots = self._roots.get(found.store.uri, [])
        position = bisect_right(roots, (key, 1 << 62)) - 1
        if position >= 0 and key.startswith(roots[position][0]):
            prefix, root_id = roots[position]
            return Spot(root_id, found.store.uri, key[len(prefix) :], bare)
        return Spot(None, found.store.uri, key, bare)


class Placed(NamedTuple):
    """Columns that say where files are, in step with the URIs that were given."""

    root_id: pa.Array
    store: pa.Array
    #: As the store names it, below the root or the store.
    path: pa.Array
    #: The same, as names are compared.
    key: pa.Array
    #: The whole path without scheme and authority, where the file is below no root; else null.
    bare: pa.Array


def place_all(uris: pa.Array, places: Places) -> Placed:
    """Place many files at once: each directory is looked at once, names in bulk."""
    if not len(uris):
        none = pa.nulls(0, pa.string())
        return Placed(pa.nulls(0, pa.int32()), none, none, none, none)
    # A slash in front, so that every URI has one to split at.
    halves = pc.split_pattern(_joined(pa.scalar("/"), uris), "/", max_splits=1, reverse=True)
    names = pc.list_element(halves, 1)
    directories = pc.dictionary_encode(pc.utf8_slice_codeunits(pc.list_element(halves, 0), 1))
    spots = [places.spot(directory) for directory in directories.dictionary.to_pylist()]
    at = directories.indices

    def column(values: Sequence[object], kind: pa.DataType) -> pa.Array:
        return pc.take(pa.array(values, kind), at)

    path = _joined(column([spot.directory for spot in spots], pa.string()), names)
    outside = column([spot.bare if spot.root_id is None else None for spot in spots], pa.string())
    return Placed(
        column([spot.root_id for spot in spots], pa.int32()),
        column([spot.store for spot in spots], pa.string()),
        path,
        comparables(path),
        comparables(_joined(outside, names)),
    )


def comparables(paths: pa.Array) -> pa.Array:
    """Return `comparable` of each path; the ordinary ones are left as they are, in bulk."""
    odd = pc.or_(
        pc.match_substring_regex(paths, "%|//|^/"),
        pc.invert(pc.string_is_ascii(paths)),
    )
    if not pc.any(odd, min_count=0).as_py():
        return paths
    return pa.array(
        [path and comparable(path) for path in paths.to_pylist()],
        pa.string(),
    )


def _joined(directories: pa.Array | pa.Scalar, names: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(directories, names, "")
