"""What a file of a Lance table is, told from its path alone.

`classify` is used for files found on storage and for files named in manifests alike, so both
sides agree on the *key* they are joined by.  The key is the unit that lives and dies together: a
data file with its blob sidecars, an index segment with all its files, otherwise the file itself.

A path that is not understood is UNKNOWN and never removed, so a misreading can only keep.  The
one misreading that could lose data is a manifest that is not seen as one (what it names would go
unprotected); therefore everything below any `_versions/` directory under `tree/` is a manifest of
the branch in between, however strange the branch's name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lakewarden.model import MAIN, FileKind

_U64_MAX = 2**64 - 1
_DETACHED_BIT = 2**63

#: What Lance leaves beside versions to find the newest.
HINT = "latest_version_hint.json"
#: A link (or an object) in the place of these hides tags, branches or versions.
_DIRECTORIES_THAT_PROTECT = frozenset({"_refs", "_versions", "tree"})
_TREE = re.compile(
    r"tree/(.+?)/((?:_versions|_transactions|_deletions|_indices|data|_blobs|_fri|_mem_wal)/.*)",
    re.DOTALL,
)
_MANIFEST = re.compile(r"(d?)(\d{1,20})\.manifest(-.+)?", re.ASCII)
_DATA = re.compile(r"[^/]+\.lance")
_SIDECAR = re.compile(r"([^/]+)/[^/]+\.blob")
_DELETION = re.compile(r"[^/]+\.(?:arrow|bin)")
_TRANSACTION = re.compile(r"[^/]+\.txn")
#: Any manifest below a directory; tells tables (and tables inside tables) apart from directories.
MANIFEST_PATH = r"^(?:(.*)/)?_versions/d?[0-9]{1,20}\.manifest$"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a path says."""

    kind: FileKind
    key: str
    branch: str = MAIN
    #: Of manifests: the version; a detached one without the bit that marks it.
    version: int | None = None
    detached: bool = False


def classify(path: str) -> Entry:
    """Read a path relative to the table's root."""
    if path.startswith("tree/"):
        return _in_tree(path)
    if path in _DIRECTORIES_THAT_PROTECT:
        return Entry(FileKind.REF, path)
    cut = path.rfind("/_versions/")
    if cut > 0:
        # Another table inside this one: refused, but what its versions need must be known.
        return _in_branch(path, path[cut + 1 :], path[: cut + 1], path[:cut])
    return _in_branch(path, path, "", MAIN)


def _in_tree(path: str) -> Entry:
    # The last `_versions/` decides: see the module's explanation.
    cut = path.rfind("/_versions/")
    if cut > len("tree/"):
        return _in_branch(path, path[cut + 1 :], path[: cut + 1], path[len("tree/") : cut])
    match = _TREE.fullmatch(path)
    if match is None:
        return Entry(FileKind.UNKNOWN, path)
    return _in_branch(path, match[2], path[: match.start(2)], match[1])


def _in_branch(path: str, rest: str, prefix: str, branch: str) -> Entry:
    """Read `rest`, the path below the branch's root; `prefix` + `rest` is `path`."""
    top, _, name = rest.partition("/")
    if top == "data":
        return _data(path, name, f"{prefix}data/", branch)
    if top == "_transactions" and _TRANSACTION.fullmatch(name):
        return Entry(FileKind.TRANSACTION, path, branch)
    if top == "_versions":
        return _manifest(path, name, branch)
    if top == "_deletions" and _DELETION.fullmatch(name):
        return Entry(FileKind.DELETION, path, branch)
    if top == "_indices" and "/" in name:
        return Entry(FileKind.INDEX, f"{prefix}_indices/{name.partition('/')[0]}", branch)
    if top == "_refs":
        return Entry(FileKind.REF, path, branch)
    return Entry(FileKind.UNKNOWN, path, branch)


def _data(path: str, name: str, directory: str, branch: str) -> Entry:
    if name.rpartition("/")[2].startswith(".tmp"):
        return Entry(FileKind.TEMPORARY, path, branch)
    if _DATA.fullmatch(name):
        return Entry(FileKind.DATA, path, branch)
    if sidecar := _SIDECAR.fullmatch(name):
        return Entry(FileKind.DATA, f"{directory}{sidecar[1]}.lance", branch)
    return Entry(FileKind.UNKNOWN, path, branch)


def _manifest(path: str, name: str, branch: str) -> Entry:
    if name == HINT:
        return Entry(FileKind.HINT, path, branch)
    if name.startswith(".tmp"):
        return Entry(FileKind.TEMPORARY, path, branch)
    match = _MANIFEST.fullmatch(name)
    if match is None:
        # Named like no version we know: a manifest nobody can decide on, so the table is refused.
        strange = name.endswith(".manifest") or ".manifest-" in name
        unknown = FileKind.MANIFEST if strange else FileKind.UNKNOWN
        return Entry(unknown, path, branch)
    kind = FileKind.STAGED_MANIFEST if match[3] else FileKind.MANIFEST
    detached, digits = bool(match[1]), match[2]
    number = int(digits)
    if detached:
        version = number & ~_DETACHED_BIT
    else:
        # Twenty digits are the newer naming, which sorts the newest version first.
        version = _U64_MAX - number if len(digits) == 20 else number
    if not 0 <= version < _DETACHED_BIT:
        return Entry(FileKind.MANIFEST, path, branch)
    return Entry(kind, path, branch, version, detached)


def manifest_names(version: int) -> tuple[str, str]:
    """Return what a version's manifest may be called: the newer way, and the older."""
    return f"{_U64_MAX - version:020d}.manifest", f"{version}.manifest"


def stem(name: str) -> str:
    """Return the random part of a name: its last component without the extension."""
    last = name.rstrip("/").rpartition("/")[2]
    return last.rpartition(".")[0] or last


def classify_extra_base(path: str) -> Entry:
    """Read a path relative to an extra base that is a plain directory of data files."""
    if _DATA.fullmatch(path):
        return Entry(FileKind.DATA, path)
    if sidecar := _SIDECAR.fullmatch(path):
        return Entry(FileKind.DATA, f"{sidecar[1]}.lance")
    return Entry(FileKind.UNKNOWN, path)
