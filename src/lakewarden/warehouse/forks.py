"""Where a Lance table's versions lie: beside its data, or in a fork of a branch of the warehouse.

A branch copies nothing.  A table that is about to be written there gets a branch of Lance's own, named
after the version of the warehouse that has made ours, which nothing else is ever called: a branch that
is made again under an old name meets no old files.  Paths of versions are relative to the table, so
that those of a fork begin with its directory.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lakewarden.warehouse.manifest import Table
    from lakewarden.warehouse.warehouse import View

_LAST = 2**64 - 1
#: Newer tables number their versions downward, in names of one length.
_DIGITS = 20
_VERSION = re.compile(rf"(\d{{1,{_DIGITS}}})\.manifest")
PREFIX = "lakewarden-"
_DIRECTORY = re.compile(rf"tree/{PREFIX}\d+/")
_NAME = re.compile(rf"{PREFIX}(\d+)")
_MANIFEST = re.compile(r"(.*\.manifest)(-[^/]*)?")


def directory(path: str) -> str:
    """Return the directory of the fork that a version is one of; none if it is in no fork."""
    found = _DIRECTORY.match(path)
    return found[0] if found else ""


def name(directory: str) -> str | None:
    """Return what Lance calls a fork."""
    return directory.removeprefix("tree/").removesuffix("/") or None


def number(name: str) -> int | None:
    """Return which version of the warehouse has made the branch of a fork; None if it is no fork."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def own(view: View, table: Table) -> str:
    """Return where a branch's versions of a table belong: it is at home where it was made."""
    if view.branch == table.branch:
        return ""
    return f"tree/{PREFIX}{view.manifest.branches[view.branch].made}/"


def version(file_name: str) -> int | None:
    """Return the number of a version by the last part of its public path; None if it has none."""
    found = _VERSION.fullmatch(file_name)
    if found is None:
        return None
    stem = int(found[1])
    return _LAST - stem if len(found[1]) == _DIGITS else stem


def file_name(version: int, like: str | None = None) -> str:
    """Return the last part of a version's public path, in the scheme of another one's."""
    old = like is not None and len(like) != len(f"{_LAST}.manifest")
    return f"{version}.manifest" if old else f"{_LAST - version:0{_DIGITS}d}.manifest"


def public(path: str) -> str:
    """Return the path under which everybody finds a version, wherever it waits now."""
    last = path.rpartition("/")[2]
    found = _MANIFEST.fullmatch(last)
    return f"{directory(path)}_versions/{found[1] if found else last}"
