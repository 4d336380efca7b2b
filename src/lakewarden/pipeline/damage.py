"""Files that versions name and that are not there, or not as large as they should be.

Versions are read twice at most: once for every file any of them needs, and only of tables with
damage again, to tell which versions need what is broken.  What the listing does not show is looked up
once more: it may have been written since, or lie in a place that was not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound
from lakewarden.formats.iceberg.manifests import read_manifest_list, read_manifests
from lakewarden.formats.iceberg.metadata import TableMetadata, parse
from lakewarden.formats.iceberg.paths import place
from lakewarden.formats.lance.manifest import Files, Seen, files
from lakewarden.model import Format
from lakewarden.pipeline.frames import (
    NOTE_ERROR,
    Opening,
    ReadStores,
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
MISSING, WRONG_SIZE, UNREADABLE = "missing_file", "wrong_size", "unreadable_file"
#: A note: the snapshots that the refs of an Iceberg version name.
NOTE_CURRENT = "current"
#: What a file is: the metadata of an Iceberg version itself, a list, a manifest.
METADATA, _LIST, _MANIFEST = "metadata", "list", "manifest"
#: The status of an entry whose file is not part of the snapshot any more.
_DELETED = 2
#: Versions in a row that one task reads.
_NEIGHBOURS = 64

#: Versions to be looked at; `also` is where a version lies that has not got its public name yet.  Of
#: Iceberg metadata that is `whole` every snapshot is needed, else those that its refs name.
VERSIONS = pa.schema(
    [
        ("table_id", pa.int32()),
        ("format", pa.string()),
        ("version", pa.int64()),
        ("root", pa.string()),
        ("uri", pa.string()),
        ("also", pa.string()),
        ("size", pa.int64()),
        ("whole", pa.bool_()),
    ]
)
#: Files that versions need; `via` is the file that says so, where that is not the version itself.
NEEDED = pa.schema(
    [
        ("table_id", pa.int32()),
        ("version", pa.int64()),
        ("uri", pa.string()),
        ("size", pa.int64()),
        ("what", pa.string()),
        ("via", pa.string()),
        ("note", pa.string()),
    ]
)
_BROKEN = pa.schema(
    [
        ("table_id", pa.int32()),
        ("version", pa.int64()),
        ("uri", pa.string()),
        ("size", pa.int64()),
        ("what", pa.string()),
        ("via", pa.string()),
        ("found", pa.int64()),
        ("problem", pa.string()),
        ("note", pa.string()),
    ]
)


def of_lance(
    versions: DataFrame, opening: Opening, *, tasks: int, all_versions: bool = False
) -> DataFrame:
    """Return the files that versions of Lance tables need, each once; or once for every version."""
    mine = versions.filter(F.col("format") == Format.LANCE.value)
    near = spread(mine, tasks, "table_id", F.floor(F.col("version") / _NEIGHBOURS))
    return near.mapInArrow(_lance_reader(opening, all_versions=all_versions), sql(NEEDED))


def of_metadata(versions: DataFrame, opening: Opening, *, tasks: int) -> DataFrame:
    """Return what the metadata of Iceberg tables names: lists of snapshots, statistics."""
    mine = versions.filter(F.col("format") == Format.ICEBERG.value)
    return spread(mine, tasks).mapInArrow(_opening(opening, _in_metadata), sql(NEEDED))


def of_lists(named: DataFrame, opening: Opening, *, tasks: int) -> DataFrame:
    """Return the manifests that lists name."""
    lists = named.filter(F.col("what") == _LIST).dropDuplicates(["table_id", "uri"])
    return spread(lists, tasks).mapInArrow(_opening(opening, _in_list), sql(NEEDED))


def of_manifests(named: DataFrame, opening: Opening, *, tasks: int) -> DataFrame:
    """Return the files that manifests name."""
    manifests = named.filter(F.col("what") == _MANIFEST).dropDuplicates(["table_id", "uri"])
    return spread(manifests, tasks).mapInArrow(_opening(opening, _in_manifest), sql(NEEDED))


def broken(needed: DataFrame, listed: DataFrame, opening: Opening) -> DataFrame:
    """Return what is needed and missing, or of another size than it should have.

    `listed` has the columns `uri` and `size`.
    """
    once = needed.dropDuplicates(["table_id", "uri"])
    sizes = listed.select("uri", F.col("size").alias("found"))
    joined = once.join(sizes, on="uri", how="left").filter(
        "found IS NULL OR (size IS NOT NULL AND size <> found)"
    )
    problem = F.when(F.col("found").isNull(), MISSING).otherwise(WRONG_SIZE)
    doubtful = joined.withColumn("problem", problem).select(*_BROKEN.names)
    return doubtful.mapInArrow(_looking_again(opening), sql(_BROKEN))


def attributed(found: DataFrame, every: DataFrame) -> DataFrame:
    """Return broken files with every version that needs them, what they are, and why if that is told.

    `every` holds, once for every version, the files of Lance tables and the lists and manifests of
    Iceberg tables.
    """
    by_version = every.select("table_id", "uri", "version").filter("version IS NOT NULL")
    # What a manifest names is needed by all snapshots that name the manifest.
    through = F.coalesce(
        F.when(F.col("what") == _MANIFEST, F.col("uri")), F.col("via"), F.col("uri")
    )
    named = found.withColumn("through", through).select(
        "table_id",
        "problem",
        F.col("uri").alias("file"),
        "size",
        "found",
        "what",
        "through",
        F.col("note").alias("why"),
    )
    return named.join(
        by_version.withColumnRenamed("uri", "through"), on=["table_id", "through"], how="left"
    )


# -- reading ---------------------------------------------------------------------------------------


def _lance_reader(opening: Opening, *, all_versions: bool) -> Stage:
    def read_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (row for batch in incoming for row in batch.to_pylist())
        stores, seen = ReadStores(opening), Seen()
        for row, answer in concurrently(partial(_fetch, stores), rows):
            known = None if all_versions else seen
            yield from batches(_in_lance(row, answer, known), NEEDED)
        yield from request_notes(stores.requests(), NEEDED, "uri", "size")

    return read_batches


def _opening(opening: Opening, names: Any) -> Stage:
    def read_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (row for batch in incoming for row in batch.to_pylist())
        stores = ReadStores(opening)
        for row, answer in concurrently(partial(_fetch, stores), rows):
            if row.get("format"):
                # A version itself, which is needed, too; which one it is tells its place.
                own = {"table_id": row["table_id"], "uri": row["uri"], "size": row["size"]}
                yield from batches([{**own, "what": METADATA}], NEEDED)
            yield from batches(_named(row, answer, names), NEEDED)
        yield from request_notes(stores.requests(), NEEDED, "uri", "size")

    return read_batches


def _fetch(stores: ReadStores, row: Row) -> tuple[Row, bytes | LakewardenError]:
    try:
        where = Location.parse(row["uri"])
        return row, stores(where).get(where.key)
    except NotFound as error:
        if row.get("also"):
            # Not public yet, perhaps.
            return _fetch(stores, {**row, "uri": row["also"], "also": None})
        return row, error
    except LakewardenError as error:
        return row, error


def _named(row: Row, answer: bytes | LakewardenError, names: Any) -> Iterator[Row]:
    """Yield what a file names, or why that cannot be told; that it is missing is found out anyway."""
    try:
        if isinstance(answer, LakewardenError):
            raise answer
        yield from names(row, answer)
    except NotFound:
        return
    except LakewardenError as error:
        yield _unread(row, error)


def _unread(row: Row, error: LakewardenError) -> Row:
    mark = {name: row.get(name) for name in ("table_id", "version", "uri")}
    if row.get("format") == Format.ICEBERG.value:
        # Which snapshots it has, nobody can tell.
        mark |= {"version": None, "via": METADATA}
    return {**mark, "what": as_text(error), "note": NOTE_ERROR}


def _in_lance(row: Row, answer: bytes | LakewardenError, seen: Seen | None) -> Iterator[Row]:
    mark = {"table_id": row["table_id"], "version": row["version"]}
    yield {**mark, "uri": row["uri"], "size": row["size"]}

    def names(_: Row, data: bytes) -> Iterator[Row]:
        found = files(data, seen, (row["table_id"], row["root"]))
        for uri, size in _places(row["root"], found):
            yield {**mark, "uri": uri, "size": size}

    yield from _named(row, answer, names)


def _places(directory: str, found: Files) -> Iterator[tuple[str, int | None]]:
    """Yield where files are; a place that nobody can tell from here is left out."""
    roots: dict[int | None, tuple[str, bool] | None] = {None: (directory, True)}
    for base_id, base in found.bases.items():
        where = Location.parse_absolute(base.path)
        roots[base_id] = None if where is None else (where.uri, base.is_dataset_root)
    for (number, path), expected in found.named.items():
        if number not in roots:
            raise Damaged(
                ErrorKind.CORRUPT_MANIFEST, f"it names base path {number}, which it lacks"
            )
        known = roots[number]
        if known is not None:
            inner = path if known[1] else path.removeprefix("data/")
            yield f"{known[0].rstrip('/')}/{inner}", expected


def _in_metadata(row: Row, data: bytes) -> Iterator[Row]:
    found: TableMetadata = parse(data, row["uri"])
    table = {"table_id": row["table_id"]}
    current = {found.current_snapshot_id, *(ref.snapshot_id for ref in found.refs)} - {None}
    for number in current:
        yield {**table, "version": number, "uri": row["uri"], "note": NOTE_CURRENT}
    wanted = {
        one.snapshot_id for one in found.snapshots if row["whole"] or one.snapshot_id in current
    }
    for one in found.snapshots:
        if one.snapshot_id not in wanted:
            continue
        mark = {**table, "version": one.snapshot_id}
        if one.manifest_list is not None:
            yield {**mark, "uri": _uri(one.manifest_list), "what": _LIST}
        for manifest in one.manifests:
            yield {**mark, "uri": _uri(manifest), "what": _MANIFEST}
    for told in (*found.statistics, *found.partition_statistics):
        if told.snapshot_id in wanted:
            mark = {**table, "version": told.snapshot_id}
            yield {**mark, "uri": _uri(told.path), "size": told.size}


def _in_list(row: Row, data: bytes) -> Iterator[Row]:
    found = read_manifest_list(data).fresh
    mark = {"table_id": row["table_id"], "version": row["version"], "what": _MANIFEST}
    columns = (found.column(name).to_pylist() for name in ("path", "length"))
    for path, length in zip(*columns, strict=True):
        yield {**mark, "uri": _uri(path), "size": length}


def _in_manifest(row: Row, data: bytes) -> Iterator[Row]:
    (found,) = read_manifests([data])
    if isinstance(found, Damaged):
        raise found
    live = found.filter(pc.not_equal(found.column("status"), _DELETED))
    paths, sizes = (live.column(name).to_pylist() for name in ("path", "size"))
    for path, size in zip(paths, sizes, strict=True):
        yield {"table_id": row["table_id"], "uri": _uri(path), "size": size, "via": row["uri"]}


def _uri(named: str) -> str:
    """Return a file's place as listings spell it."""
    directory, slash, name = named.rpartition("/")
    found = _directory(directory + slash)
    return named if found is None else f"{found.rstrip('/')}/{name}"


@lru_cache(maxsize=65536)
def _directory(uri: str) -> str | None:
    found = place(uri)
    return None if found is None else found.uri


# -- looking again ---------------------------------------------------------------------------------


def _looking_again(opening: Opening) -> Stage:
    def look(stores: ReadStores, row: Row) -> Row | None:
        if row["problem"] != MISSING:
            return row
        try:
            where = Location.parse(row["uri"])
            store = stores(where)
            if row["uri"].endswith("/"):
                there = any(batch.num_rows for batch in store.list(where.key))
            else:
                there = store.exists(where.key)
        except LakewardenError as error:
            return {**row, "note": as_text(error), "problem": UNREADABLE}
        return None if there else row

    def look_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (row for batch in incoming for row in batch.to_pylist())
        found = concurrently(partial(look, ReadStores(opening)), rows)
        yield from batches(filter(None, found), _BROKEN)

    return look_batches


def with_uris(listed: DataFrame, stores: Sequence[str]) -> DataFrame:
    """Return a listing with whole places; `stores` are those of the units, in their order."""
    prefixes: Mapping[int, str] = {
        number: f"{store.rstrip('/')}/" for number, store in enumerate(stores)
    }
    distinct = sorted(set(prefixes.values()))
    if len(distinct) == 1:
        prefix = F.lit(distinct[0])
    else:
        pairs = [F.lit(one) for pair in prefixes.items() for one in pair]
        prefix = F.element_at(F.create_map(*pairs), F.col("unit"))
    return listed.select(F.concat(prefix, F.col("key")).alias("uri"), "size")
