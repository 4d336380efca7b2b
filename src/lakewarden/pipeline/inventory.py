"""A listing that somebody else has made: an inventory of the bucket, instead of LIST requests.

Parquet or CSV, one object per row: bucket (optional), path or key, size, time of modification.  The
columns of S3 Inventory work as they are; its `manifest.json` may be named instead of the files.
An inventory is older than the tables' metadata, which is what makes it safe: a file that was there
then and is named by nothing now has had all the time to be committed.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote_plus

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Row as SparkRow

from lakewarden.errors import ErrorKind, LakewardenError, UsageError
from lakewarden.formats.iceberg.paths import Places, place_all
from lakewarden.pipeline.frames import (
    BATCH_ROWS,
    LISTING,
    NOTE_ERROR,
    NOTE_REQUESTS,
    OBJECTS,
    Opening,
    ReadStores,
    Root,
    Stage,
    as_text,
    batches,
    concurrently,
    frame,
    from_text,
    request_notes,
    settle,
    spread,
    sql,
)
from lakewarden.pipeline.listing import iceberg_objects
from lakewarden.storage.location import Location

_PARTS = pa.schema(
    [
        ("uri", pa.string()),
        ("columns", pa.string()),
        ("encoded", pa.bool_()),
        # Of a file that several tasks share, every so many row groups from this one on.
        ("first", pa.int32()),
        ("step", pa.int32()),
    ]
)
#: 2001 in milliseconds; smaller numbers are seconds, or no times.
_EARLIEST_MS = 10**12
#: Names that a column may have, in lower case without underscores.
_NAMES = {
    "bucket": ("bucket",),
    "key": ("key", "path", "filepath"),
    "size": ("size", "length", "sizeinbytes"),
    "modified": ("lastmodifieddate", "lastmodified", "modificationtime", "modifiedat"),
    "latest": ("islatest",),
    "marker": ("isdeletemarker",),
}


def read(
    uri: str, roots: Sequence[Root], spark: SparkSession, opening: Opening, *, tasks: int
) -> tuple[DataFrame, list[SparkRow]]:
    """Return the inventory's objects under the given roots, like a listing, and its notes."""
    stores = ReadStores(opening)
    parts = _parts(uri, stores)
    costs = [
        SparkRow(key=kind.value, size=number, note=NOTE_REQUESTS)
        for kind, number in stores.requests().items()
    ]
    buckets = sorted({root.location.store.uri for root in roots})
    parts = [share for part in parts for share in _shares(part, -(-tasks // len(parts)))]
    cut = spread(frame(spark, _PARTS, parts), min(tasks, len(parts)))
    # In one go: between two functions Spark would take the rows into its own form and back.
    reads, identifies = _reader(opening, buckets), iceberg_objects(buckets, roots)
    objects, noted = settle(
        cut.mapInArrow(lambda incoming: identifies(reads(incoming)), sql(OBJECTS))
    )
    failed = [row for row in noted if row.note == NOTE_ERROR]
    if failed:
        # A listing with a hole is none.
        raise from_text(failed[0].key)
    return objects, noted + costs


def _parts(uri: str, stores: ReadStores) -> list[dict[str, Any]]:
    """Return the files of an inventory."""
    found = Location.parse(uri)
    if found.path.endswith("manifest.json"):
        return list(_of_manifest(stores(found).get(found.key), found))
    keys = [
        key for batch in stores(found).list(found.path) for key in batch.column("key").to_pylist()
    ]
    keys = keys or ([found.key] if stores(found).exists(found.key) else [])
    files = [key for key in keys if key.endswith((".parquet", ".csv", ".csv.gz"))]
    if not files:
        raise UsageError(
            ErrorKind.NOT_FOUND,
            f"--inventory {uri} holds no .parquet, .csv or .csv.gz file; name the files' directory "
            "or S3 Inventory's manifest.json",
        )
    return [{"uri": Location(found.scheme, found.authority, key).uri} for key in files]


def _shares(part: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Let several tasks read one large file where there are fewer files than tasks."""
    number = number if part["uri"].endswith(".parquet") else 1
    return [{**part, "first": first, "step": number} for first in range(number)]


def _of_manifest(data: bytes, at: Location) -> Iterator[dict[str, Any]]:
    """Yield the parts that S3 Inventory's manifest names, with the columns CSV files lack."""
    try:
        manifest = json.loads(data)
        is_csv = manifest["fileFormat"].upper() == "CSV"
        columns = manifest["fileSchema"] if is_csv else None
        bucket = manifest["destinationBucket"].rpartition(":")[2]
        store = at.store if at.is_local else Location(at.scheme, bucket, "")
        for part in manifest["files"]:
            yield {"uri": store.child(part["key"]).uri, "columns": columns, "encoded": is_csv}
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            ErrorKind.USAGE, f"{at.uri} is no manifest of an S3 inventory ({error!r})"
        ) from error


def _reader(opening: Opening, buckets: Sequence[str]) -> Stage:
    units = {bucket: number for number, bucket in enumerate(buckets)}

    def read_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stores = ReadStores(opening)
        rows = (row for batch in incoming for row in batch.to_pylist())
        # Parts are large: few at a time.
        for found in concurrently(partial(_read_part, stores, units), rows, 2):
            yield from found
        yield from request_notes(stores.requests(), LISTING, "key", "size")

    return read_batches


def _read_part(
    stores: ReadStores, units: Mapping[str, int], row: Mapping[str, Any]
) -> list[pa.RecordBatch]:
    at = Location.parse(row["uri"])
    try:
        table = _table(stores(at).get(at.key), row)
        return _listing(table, row, units)
    except LakewardenError as error:
        return list(batches([{"key": as_text(error), "note": NOTE_ERROR}], LISTING))
    except (pa.ArrowException, ValueError, OSError, EOFError, zlib.error) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        unread = UsageError(ErrorKind.USAGE, f"inventory part {row['uri']} cannot be read: {first}")
        return list(batches([{"key": as_text(unread), "note": NOTE_ERROR}], LISTING))


def _table(data: bytes, part: Mapping[str, Any]) -> pa.Table:
    columns = part["columns"]
    if part["uri"].endswith(".parquet"):
        file = pq.ParquetFile(io.BytesIO(data))
        return file.read_row_groups(range(part["first"], file.num_row_groups, part["step"]))
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    names = [name.strip() for name in columns.split(",")] if columns else None
    if names is None:
        names = next(csv.reader([text.partition(b"\n")[0].decode()]))
        text = text.partition(b"\n")[2]
    kinds = {name: pa.string() for name in names}
    return (
        pa_csv.read_csv(
            io.BytesIO(text),
            read_options=pa_csv.ReadOptions(column_names=names),
            parse_options=pa_csv.ParseOptions(newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(column_types=kinds),
        )
        if text.strip()
        else pa.table({name: pa.array([], pa.string()) for name in names})
    )


def _listing(
    table: pa.Table, part: Mapping[str, Any], units: Mapping[str, int]
) -> list[pa.RecordBatch]:
    columns = _columns(table, part["uri"])
    for name, wanted in (("latest", "true"), ("marker", "false")):
        if name in columns:
            # In a bucket with versions only the newest counts, unless it says "deleted".
            text = pc.utf8_lower(pc.cast(columns[name], pa.string()))
            chosen = pc.fill_null(pc.equal(text, wanted), True)  # noqa: FBT003
            columns = {one: column.filter(chosen) for one, column in columns.items()}
    key = columns["key"].combine_chunks()
    if key.null_count:
        raise UsageError(ErrorKind.USAGE, "a row of the inventory has no path")
    if part["encoded"]:
        key = pa.array([unquote_plus(one) for one in key.to_pylist()], pa.string())
    bucket = columns["bucket"].combine_chunks() if "bucket" in columns else None
    unit, key = _placed(bucket, key, units)
    mine = pc.is_valid(unit)
    size = pc.fill_null(pc.cast(columns["size"], pa.int64()), 0).combine_chunks()
    modified = pc.cast(_moments(columns["modified"]), pa.int64()).combine_chunks()
    arrays = [unit, key, size, modified, pa.nulls(len(key), pa.string())]
    listed = pa.RecordBatch.from_arrays(arrays, schema=LISTING).filter(mine)
    return [listed.slice(at, BATCH_ROWS) for at in range(0, listed.num_rows, BATCH_ROWS)]


def _placed(
    bucket: pa.Array | None, key: pa.Array, units: Mapping[str, int]
) -> tuple[pa.Array, pa.Array]:
    """Return the unit of each row, null if it is in none of ours, and the key in its store."""
    whole = pc.match_substring_regex(key, "^(/|[A-Za-z][A-Za-z0-9+.-]*:/)")
    if bucket is None and pc.any(whole, min_count=0).as_py():
        # Whole paths, of which there may be some elsewhere.
        places = Places((number, Location.parse(uri)) for uri, number in units.items())
        placed = place_all(key, places)
        return placed.root_id, placed.path
    if bucket is None and len(units) > 1:
        raise UsageError(
            ErrorKind.USAGE,
            "the tables lie in several buckets and the inventory does not say which each key is "
            "in; add a column bucket, or whole paths",
        )
    if bucket is None:
        unit = pa.repeat(pa.scalar(0, pa.int32()), len(key))
    else:
        names = pa.array([Location.parse(uri).authority for uri in units], pa.string())
        unit = pc.cast(pc.index_in(bucket, names), pa.int32())
    return unit, pc.utf8_ltrim(key, characters="/")


def _columns(table: pa.Table, uri: str) -> dict[str, pa.ChunkedArray]:
    names = {name.replace("_", "").replace(" ", "").lower(): name for name in table.column_names}
    found = {
        ours: table.column(names[spelling])
        for ours, spellings in _NAMES.items()
        for spelling in spellings
        if spelling in names
    }
    missing = [name for name in ("key", "size", "modified") if name not in found]
    if missing:
        raise UsageError(
            ErrorKind.USAGE,
            f"inventory part {uri} has columns {', '.join(table.column_names)}; a path (or key), a "
            "size and a modification time are needed",
        )
    return found


def _moments(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return microseconds; null where the time is not told."""
    if pa.types.is_timestamp(column.type):
        return pc.cast(column, pa.timestamp("us", tz=column.type.tz))
    if pa.types.is_integer(column.type):
        if pc.any(pc.less(column, _EARLIEST_MS), min_count=0).as_py():
            raise UsageError(
                ErrorKind.USAGE,
                "the inventory's modification times are no milliseconds since 1970; write them so, "
                "or as timestamps",
            )
        return pc.cast(pc.multiply(column, 1000), pa.timestamp("us"))
    text = pc.if_else(pc.equal(column, ""), None, column)
    if pc.all(pc.fill_null(pc.utf8_is_decimal(text), True)).as_py():  # noqa: FBT003
        return _moments(pc.cast(text, pa.int64()))
    return pc.cast(text, pa.timestamp("us", tz="UTC"))
