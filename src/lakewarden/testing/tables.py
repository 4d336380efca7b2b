"""Small Lance tables of every shape, made with pylance.

Each function makes one version (or one ref) unless it says otherwise.  Every table has a column
`id`; rows are told apart by it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.fragment import write_fragments

DAY = 86400.0


def rows(start: int, number: int = 3) -> pa.Table:
    """Return rows with the ids from `start`."""
    ids = range(start, start + number)
    return pa.table({"id": pa.array(ids, pa.int64()), "name": [f"n{one}" for one in ids]})


def create(root: Path, start: int = 0, number: int = 3, **options: Any) -> Path:
    """Create a table; also with a name of its own for the first version."""
    lance.write_dataset(rows(start, number), str(root), **options)
    return root


def append(root: Path, start: int, number: int = 3, **options: Any) -> None:
    lance.write_dataset(rows(start, number), str(root), mode="append", **options)


def overwrite(root: Path, start: int, number: int = 3, **options: Any) -> None:
    lance.write_dataset(rows(start, number), str(root), mode="overwrite", **options)


def overwritten(root: Path, versions: int) -> Path:
    """Create a table of `versions` versions that share no data file."""
    create(root)
    for number in range(1, versions):
        overwrite(root, number * 10)
    return root


def appended(root: Path, versions: int) -> Path:
    """Create a table of `versions` versions, each with one data file more."""
    create(root)
    for number in range(1, versions):
        append(root, number * 10)
    return root


def delete(root: Path, predicate: str) -> None:
    lance.dataset(str(root)).delete(predicate)


def index(root: Path, column: str = "id") -> None:
    """Build a scalar index; an older one of the column is replaced."""
    lance.dataset(str(root)).create_scalar_index(column, "BTREE", replace=True)


def compact(root: Path, *, defer_index_remap: bool = False) -> None:
    """Rewrite small fragments into one; makes two versions or none."""
    lance.dataset(str(root)).optimize.compact_files(defer_index_remap=defer_index_remap)


def restore(root: Path, version: int) -> None:
    lance.dataset(str(root), version=version).restore()


def tag(root: Path, name: str, version: int | tuple[str, int]) -> None:
    lance.dataset(str(root)).tags.create(name, version)


def untag(root: Path, name: str) -> None:
    lance.dataset(str(root)).tags.delete(name)


def branch(root: Path, name: str, at: int | tuple[str, int] | None = None) -> Path:
    """Create a branch and return its own directory, which can be written to like a table."""
    source = lance.dataset(str(root))
    return Path(source.create_branch(name, source.version if at is None else at).uri)


def clone(root: Path, target: Path, version: int | str) -> Path:
    """Create a shallow clone: a table whose first version takes its files from another table."""
    lance.dataset(str(root)).shallow_clone(str(target), version)
    return target


def detached(root: Path, start: int, number: int = 3) -> int:
    """Commit an append as a detached version and return its number."""
    source = lance.dataset(str(root))
    fragments = write_fragments(rows(start, number), str(root))
    operation = lance.LanceOperation.Append(fragments)
    made = lance.LanceDataset.commit(
        str(root), operation, read_version=source.version, detached=True
    )
    return int(made.version)


def multi_base(root: Path, plain: Path, rooted: Path) -> Path:
    """Create a table with a version in a plain extra base and another in one laid out as a root."""
    plain.mkdir(parents=True)
    rooted.mkdir(parents=True)
    bases = [
        lance.DatasetBasePath(str(plain), name="plain", is_dataset_root=False),
        lance.DatasetBasePath(str(rooted), name="rooted", is_dataset_root=True),
    ]
    create(root, 0, initial_bases=bases, target_bases=["plain"])
    append(root, 10, target_bases=["rooted"])
    return root


def blobs(root: Path, start: int, mode: str = "create") -> Path:
    """Write rows whose blobs live inline, in a packed sidecar and in one of their own."""
    payloads = [bytes([start % 251]) * size for size in (10, 100_000, 5 << 20)]
    data = rows(start).append_column("payload", lance.blob_array(payloads))
    lance.write_dataset(data, str(root), mode=mode, data_storage_version="2.2")
    return root


def old_naming(root: Path, versions: int) -> Path:
    """Create a table whose manifests are named by plain version numbers."""
    create(root, enable_v2_manifest_paths=False)
    for number in range(1, versions):
        overwrite(root, number * 10)
    return root


def staged_copy(root: Path, version: int, suffix: str = "0b3d") -> Path:
    """Leave a staged copy of a manifest, as a committer that died after publishing does."""
    manifest = root / f"_versions/{2**64 - 1 - version:020}.manifest"
    return Path(shutil.copy2(manifest, f"{manifest}-{suffix}"))


def uncommitted(root: Path, start: int, number: int = 3) -> Any:
    """Write fragments and return the operation that would commit them."""
    return lance.LanceOperation.Append(write_fragments(rows(start, number), str(root)))


def commit(root: Path, operation: Any, read_version: int) -> None:
    lance.LanceDataset.commit(str(root), operation, read_version=read_version)


def orphan(root: Path, path: str, days: float = 30) -> Path:
    """Leave a file that no version names."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"left over")
    age_files([file], days)
    return file


def age(root: Path, days: float) -> Path:
    """Make every file below `root` that many days old."""
    age_files((file for file in root.rglob("*") if file.is_file()), days)
    return root


def age_files(paths: Iterable[Path], days: float) -> None:
    then = time.time() - days * DAY
    for path in paths:
        os.utime(path, (then, then))
