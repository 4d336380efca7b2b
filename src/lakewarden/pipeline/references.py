"""Files named by given versions.

Kept versions must all be read, or nothing may go.  Going versions are read only where that can
change a verdict.  A file that a version takes from another place (a branch from its parent, a
clone from its source) is protected by name alone, wherever it lies: names are random, and the
place is spelled as its writer happened to spell it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound
from lakewarden.formats.lance import layout
from lakewarden.formats.lance.manifest import Base, Manifest, Seen, decode
from lakewarden.pipeline.frames import (
    NOTE_BASE,
    NOTE_ERROR,
    NOTE_STEMS,
    NOTE_WARNING,
    REFERENCES,
    Opening,
    ReadStores,
    Root,
    Stage,
    as_text,
    batches,
    concurrently,
    request_notes,
    spread,
    sql,
)
from lakewarden.storage.location import Location

Row = dict[str, Any]
#: Versions in a row that one task reads.
_NEIGHBOURS = 64


def references_of(
    versions: DataFrame, roots: Sequence[Root], opening: Opening, *, tasks: int
) -> DataFrame:
    """Open the given versions (rows of DECISIONS) and return what they name."""
    needed = versions.select("root_id", "branch", "version", "path", "kept")
    # Neighbours share fragments, so they are read by the same task, kept ones first.
    neighbourhood = F.floor(F.col("version") / _NEIGHBOURS)
    near = spread(needed, tasks, "root_id", "branch", neighbourhood)
    ordered = near.sortWithinPartitions("root_id", "branch", F.desc("kept"), "version")
    return ordered.mapInArrow(_reader(roots, opening), sql(REFERENCES))


def own_manifests(versions: DataFrame) -> DataFrame:
    """Return the references of versions to their own manifests, without opening any."""
    return versions.select(
        "root_id",
        F.col("path").alias("key"),
        F.lit(None).cast("string").alias("stem"),
        F.lit(None).cast("boolean").alias("unlisted"),
        "kept",
        F.col("root_id").alias("by_root"),
        "branch",
        "version",
        F.lit(None).cast("string").alias("note"),
    )


def _reader(roots: Sequence[Root], opening: Opening) -> Stage:
    places = {root.root_id: root for root in roots}

    def fetch(stores: ReadStores, row: Row) -> tuple[Row, bytes | LakewardenError]:
        root = places[int(row["root_id"])]
        try:
            return row, stores(root.location).get(root.key(str(row["path"])))
        except LakewardenError as error:
            return row, error

    def read_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (row for batch in incoming for row in batch.to_pylist())
        stores, naming = ReadStores(opening), _Naming(roots)
        for row, answer in concurrently(partial(fetch, stores), rows):
            yield from batches(naming.names(row, answer), REFERENCES)
        yield from request_notes(stores.requests(), REFERENCES, "key", "version")

    return read_batches


class _Naming:
    """Turns manifests into reference rows; remembers what it has already reported."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self._roots = {root.root_id: root for root in roots}
        self._by_place = {root.location: root for root in roots}
        self._seen = Seen()
        self._bases: dict[str, tuple[Root, str] | None] = {}
        self._noted: set[tuple[object, ...]] = set()

    def names(self, row: Row, answer: bytes | LakewardenError) -> Iterator[Row]:
        """Yield one row per file the version names, or one that says why it could not be read."""
        try:
            if isinstance(answer, LakewardenError):
                raise answer
            tree = row["path"].rpartition("_versions/")[0]
            found = decode(answer, self._seen, (row["root_id"], tree))
            if found.branch and not tree:
                yield from self._note(row, NOTE_ERROR, _a_branch(found.branch))
            yield from self._named(row, found)
        except NotFound:
            # A going version that is gone already was removed by somebody else.
            if row["kept"]:
                message = f"{row['path']} vanished while the plan was made; run again"
                yield from self._note(row, NOTE_ERROR, Damaged(ErrorKind.DAMAGED_VERSION, message))
        except Damaged as error:
            named = Damaged(
                error.kind, f"version {row['version']} ({row['path']}): {error.message}"
            )
            # What a going version names only ever adds to what may go, so doing without is safe.
            yield from self._note(row, NOTE_ERROR if row["kept"] else NOTE_WARNING, named)
        except LakewardenError as error:
            yield from self._note(row, NOTE_ERROR, error)

    def _named(self, row: Row, found: Manifest) -> Iterator[Row]:
        root = self._roots[int(row["root_id"])]
        tree = str(row["path"]).rpartition("_versions/")[0]
        mark = {name: row[name] for name in ("kept", "branch", "version")} | {
            "by_root": row["root_id"]
        }
        for base_id, path in found.named:
            if base_id is None:
                key = layout.classify(tree + path).key
                yield {"root_id": root.root_id, "key": key, **mark}
                continue
            base = found.bases.get(base_id)
            if base is None:
                raise Damaged(
                    ErrorKind.CORRUPT_MANIFEST, f"it names base path {base_id}, which it lacks"
                )
            if row["kept"]:
                yield from self._stem(path, mark)
            else:
                yield from self._going_elsewhere(base, path, mark)
        if row["kept"]:
            for mention in found.mentions:
                yield from self._stem(mention, mark)
        for base in found.bases.values():
            if self._first((NOTE_BASE, row["root_id"], base)):
                yield {
                    "key": base.path,
                    "stem": str(base.is_dataset_root),
                    "note": NOTE_BASE,
                    **mark,
                }

    def _stem(self, name: str, mark: Row) -> Iterator[Row]:
        """Protect a name wherever it appears; say once that there are such names at all."""
        if self._first((NOTE_STEMS,)):
            yield {"note": NOTE_STEMS}
        yield {"stem": layout.stem(name), **mark}

    def _going_elsewhere(self, base: Base, path: str, mark: Row) -> Iterator[Row]:
        """Yield the reference of a going version to a file in another root that we know."""
        resolved = self._resolve(base.path)
        if resolved is None:
            return
        root, below = resolved
        inner = path if base.is_dataset_root else path.removeprefix("data/")
        if root.plain:
            key = layout.classify_extra_base(below + inner).key
        else:
            key = layout.classify(below + inner).key
        yield {"root_id": root.root_id, "key": key, **mark}

    def _resolve(self, base_path: str) -> tuple[Root, str] | None:
        """Return the root a base path lies in, and the directory below that root."""
        if base_path not in self._bases:
            self._bases[base_path] = self._find(base_path)
        return self._bases[base_path]

    def _find(self, base_path: str) -> tuple[Root, str] | None:
        place = Location.parse_absolute(base_path)
        ancestor = place
        while place is not None and ancestor is not None:
            root = self._by_place.get(ancestor)
            if root is not None:
                below = root.location.relative(place)
                return root, f"{below}/" if below else ""
            ancestor = ancestor.parent if ancestor.path else None
        return None

    def _note(self, row: Row, note: str, error: LakewardenError) -> Iterator[Row]:
        """Yield what went wrong with a table, the first time only."""
        if self._first((note, row["root_id"], error.kind)):
            yield {
                "by_root": row["root_id"],
                "branch": row["branch"],
                "version": row["version"],
                "key": as_text(error),
                "note": note,
            }

    def _first(self, mark: tuple[object, ...]) -> bool:
        new = mark not in self._noted
        self._noted.add(mark)
        return new


def _a_branch(name: str) -> LakewardenError:
    return Damaged(
        ErrorKind.LOCATION_OVERLAP,
        f"this is branch {name!r} of another table, whose versions and tags may need its files; "
        "nothing goes: name that table, with --branch",
    )
