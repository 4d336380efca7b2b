"""What a file under an Iceberg table's location is, told from its path alone.

Iceberg lets writers name files as they like, so anything that nothing names is an orphan, whatever
it is called.  Hidden paths are the exception, as in Iceberg's own procedure: engines keep scratch
files under names that begin with `_` or `.`, unless the name is that of a partition field.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from lakewarden.model import OURS, FileKind

#: Where records of expiries in progress lie, below a table's metadata directory.  Hidden, so that
#: nobody's orphan removal takes them away.
PENDING = OURS
METADATA_FILE = re.compile(r".*\.metadata\.json(\.gz)?|.*\.gz\.metadata\.json", re.DOTALL)
_KINDS = (
    (re.compile(r".*\.stats|(.*/)?metadata/[^/]*\.puffin", re.DOTALL), FileKind.STATISTICS),
    (re.compile(r".*\.puffin", re.DOTALL), FileKind.POSITION_DELETE),
    (METADATA_FILE, FileKind.METADATA),
    (re.compile(r"(.*/)?snap-[^/]*\.avro", re.DOTALL), FileKind.MANIFEST_LIST),
    (re.compile(r"(.*/)?metadata/[^/]*\.avro", re.DOTALL), FileKind.MANIFEST_FILE),
)


#: Of a path that may be something else than a data file.
_NOT_PLAIN_DATA = r"(^|/)[_.]|\.(avro|stats|puffin|json|gz|text)$"


class PartitionNames(Protocol):
    """Whatever knows the names of a table's partition fields."""

    @property
    def partition_fields(self) -> tuple[str, ...]: ...


def classify(path: str, partition_fields: Collection[str] = ()) -> FileKind:
    """Return the kind of a file, by its path below the table's location."""
    if any(is_hidden(part, partition_fields) for part in path.split("/")):
        return FileKind.UNKNOWN
    if path.endswith("version-hint.text"):
        return FileKind.HINT
    for pattern, kind in _KINDS:
        if pattern.fullmatch(path):
            return kind
    return FileKind.DATA


def kinds(paths: pa.Array, root_ids: pa.Array, roots: Mapping[int, PartitionNames]) -> pa.Array:
    """Return the kind of each file; `classify` in bulk."""
    known = pa.repeat(pa.scalar(FileKind.DATA.value), len(paths))
    # Most files are data by their names; only the others are looked at one by one.
    other = pc.match_substring_regex(paths, _NOT_PLAIN_DATA)
    if not pc.any(other, min_count=0).as_py():
        return known
    looked_at = pa.array(
        [
            classify(path, roots[root_id].partition_fields).value
            for path, root_id in zip(
                paths.filter(other).to_pylist(), root_ids.filter(other).to_pylist(), strict=True
            )
        ],
        pa.string(),
    )
    return pc.replace_with_mask(known, other, looked_at)


def is_hidden(name: str, partition_fields: Collection[str]) -> bool:
    """Tell whether a directory or file of this name is left alone."""
    return name.startswith(("_", ".")) and not any(
        name.startswith(f"{field}=") for field in partition_fields
    )
