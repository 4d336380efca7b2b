"""Compactions on a branch that would lose an index.

Lance 14 rewrites an index that a branch has from its base in the branch's directory, and goes on to
name the base's: whoever reads with it would find nothing.  Such a version is not committed.
"""

from __future__ import annotations

from lakewarden.errors import ErrorKind, Refused
from lakewarden.formats.lance.manifest import decode
from lakewarden.storage.store import Store
from lakewarden.warehouse import forks
from lakewarden.warehouse.manifest import Pin, Table


def check_indices(store: Store, root: str, table: Table, pin: Pin, does: str) -> None:
    """Raise Refused if a version that was staged looks for an index elsewhere than where it is."""
    fork = forks.directory(pin.path)
    if not fork or does != "rewrite":
        return
    for base, path in decode(store.get(f"{root}/{pin.path}")).named:
        if base is None or not path.startswith("_indices/"):
            continue
        directories, files = store.list_directory(f"{root}/{fork}{path.rstrip('/')}")
        if directories or files:
            raise Refused(
                ErrorKind.UNSUPPORTED_FEATURE,
                f"compaction of {'.'.join(table.name)} on a branch would lose an index that the branch "
                "has from its base; nothing was committed: use "
                "compact_files(defer_index_remap=True), or build the index anew on the branch first",
            )
