"""What must be true of Lance tables whatever was done to them, checked with pylance alone.

Nothing of ours is imported here: an oracle that shares code with what it judges shares its bugs.
pylance knows every attached version of a branch (`tracked_files`), but neither detached versions,
which are opened one by one, nor indices that a branch or clone took over, nor blob sidecars, which
are found by the name of their data file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance

MAIN = "main"
#: A version of a table: the branch's name and the number as Lance counts it.
Place = tuple[str, int]
#: Directories of a table (and of each branch) in which nothing may be left that no version names.
_SWEPT = ("data", "_deletions", "_indices", "_transactions")


def versions(root: Path | str) -> Iterator[Place]:
    """Yield every version that exists: attached ones of all branches, and detached ones."""
    root = Path(root)
    for branch in [MAIN, *lance.dataset(root).branches.list()]:
        for row in _open(root, branch).version_refs():
            yield branch, row["version"]
        for manifest in _tree(root, branch).glob("_versions/d*.manifest"):
            yield branch, int(manifest.stem[1:])


def fingerprint(root: Path | str, place: Place) -> str:
    """Read one version completely, its blobs and through its indices too; equal means unchanged."""
    branch, version = place
    opened = _open(root, branch, version)
    digest = hashlib.sha256()
    table = opened.to_table(with_row_id=True)
    digest.update(repr(table.schema.names).encode())
    digest.update(repr(table.to_pylist()).encode())
    for field in opened.schema:
        if getattr(field.type, "extension_name", "") == "lance.blob.v2" and opened.count_rows():
            for blob in opened.take_blobs(field.name, indices=list(range(opened.count_rows()))):
                digest.update(blob.read())
    for index in opened.describe_indices():
        for column in index.field_names:
            # A comparison that every row satisfies makes Lance read the index.
            lowest = min((v for v in table.column(column).to_pylist() if v is not None), default=0)
            digest.update(str(opened.count_rows(filter=f"{column} >= {lowest!r}")).encode())
    return digest.hexdigest()


def fingerprints(root: Path | str) -> dict[Place, str]:
    """Read every version that can be read."""
    return {place: fingerprint(root, place) for place in versions(root)}


def assert_all_versions_read(root: Path | str, expected: Mapping[Place, str]) -> None:
    """Every expected version is there and reads what it read before."""
    for place, before in expected.items():
        assert fingerprint(root, place) == before, f"{root} {place} reads differently now"


def live_files(root: Path | str) -> set[Path]:
    """Return every file that any version needs, resolved, whether it exists or not."""
    root = Path(root)
    files: set[Path] = set()
    for branch in [MAIN, *lance.dataset(root).branches.list()]:
        tracked = _open(root, branch).tracked_files().read_all().to_pylist()
        files |= {_place(row["base_uri"], root) / row["path"] for row in tracked}
    for branch, version in versions(root):
        files |= set(index_files(root, (branch, version)))
        if version >= 1 << 63:
            files |= set(_files_of_detached(root, branch, version))
    sidecars = (file.with_suffix("").glob("*.blob") for file in files if file.suffix == ".lance")
    return {file.resolve() for file in files}.union(
        blob.resolve() for blobs in sidecars for blob in blobs
    )


def assert_no_live_file_missing(root: Path | str) -> None:
    """Every file that a version names exists."""
    missing = sorted(str(file) for file in live_files(root) if not file.exists())
    assert not missing, f"{root} lacks {missing}"


def leftovers(root: Path | str, *, extra: Iterable[Path] = ()) -> set[Path]:
    """Return files where only the table's own should be, and in `extra`, that no version names."""
    root = Path(root)
    trees = [root, *(_tree(root, name) for name in lance.dataset(root).branches.list())]
    places = [tree / name for tree in trees for name in _SWEPT] + [Path(place) for place in extra]
    present = {file.resolve() for place in places for file in place.rglob("*") if file.is_file()}
    return present - live_files(root)


def assert_nothing_deletable_left(
    root: Path | str, *, extra: Iterable[Path] = (), allowed: Collection[Path] = ()
) -> None:
    """After a cleanup of old files nothing is left that no remaining version names."""
    left = leftovers(root, extra=extra) - {Path(file).resolve() for file in allowed}
    assert not left, f"{root} still has {sorted(str(file) for file in left)}"


def files(root: Path | str) -> set[str]:
    """Return all files below a directory, relative to it."""
    return {str(file.relative_to(root)) for file in Path(root).rglob("*") if not file.is_dir()}


def _open(root: Path | str, branch: str = MAIN, version: int | None = None) -> Any:
    opened = lance.dataset(str(root))
    if branch != MAIN:
        opened = opened.checkout_version((branch, None if version is None else version))
    elif version is not None and version != opened.version:
        opened = opened.checkout_version(version)
    return opened


def _tree(root: Path, branch: str) -> Path:
    return root if branch == MAIN else root / "tree" / branch


def _place(base_uri: str, root: Path) -> Path:
    """Return the directory a base URI names; a relative one is relative to where it was written."""
    path = base_uri.removeprefix("file-object-store://").removeprefix("file://")
    return Path(path) if os.path.isabs(path) else root.parent / path  # noqa: PTH117


def index_files(root: Path | str, place: Place) -> Iterator[Path]:
    """Yield the files of the index segments of a version, its own and those it took over."""
    opened = _open(root, *place)
    for index in opened.describe_indices():
        for segment in index.segments:
            directory = _holding(opened, _tree(Path(root), place[0]), segment.base_id, "_indices")
            yield from (directory / str(segment.uuid)).glob("*")


def _holding(opened: Any, own: Path, base_id: int | None, directory: str) -> Path:
    """Return where a version has its files of one directory in the given base."""
    if base_id is None:
        return own / directory
    base = opened.base_paths()[base_id]
    place = _place(base.path, own)
    return place / directory if base.is_dataset_root else place


def _files_of_detached(root: Path, branch: str, version: int) -> Iterator[Path]:
    opened = _open(root, branch, version)
    own = _tree(root, branch)
    yield own / f"_versions/d{version}.manifest"
    for fragment in opened.get_fragments():
        described = fragment.metadata.to_json()
        for file in described["files"]:
            yield _holding(opened, own, file["base_id"], "data") / file["path"]
        deletion = described["deletion_file"]
        if deletion is not None:
            suffix = "arrow" if deletion["file_type"] == "array" else "bin"
            name = f"{described['id']}-{deletion['read_version']}-{deletion['id']}.{suffix}"
            yield _holding(opened, own, deletion["base_id"], "_deletions") / name
    with suppress(TypeError):  # pylance cannot show every kind of transaction
        made = opened.read_transaction(version)
        yield own / f"_transactions/{made.read_version}-{made.uuid}.txn"
