"""Objects that exist under given places.

A unit is one flat listing: a directory, or a range of keys in it.  A unit that turns out to be
large stops early and says where (a *leftover*); the driver splits the rest into ranges and lists
those in a second round, so one huge table is spread over many tasks while a thousand small ones
share a few requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from lakewarden.errors import LakewardenError
from lakewarden.formats.lance import layout
from lakewarden.pipeline.frames import (
    LISTING,
    NOTE_ERROR,
    NOTE_LEFTOVER,
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
    sql,
)
from lakewarden.storage.location import Location
from lakewarden.storage.store import LIST_PAGE_SIZE

#: Pages a unit lists before it leaves the rest to others.
PAGES_PER_UNIT = 20
#: Names of data files start with random binary digits, transactions with a version number.
_SPLITS = (
    "_deletions/", "_indices/", "_refs/",
    *(f"_transactions/{digit}" for digit in range(1, 10)),
    "_versions/",
    *(f"data/{number:05b}" for number in range(32)),
    "data/2", "tree/",
)  # fmt: skip

_UNITS = pa.schema(
    [("unit", pa.int32()), ("uri", pa.string()), ("after", pa.string()), ("before", pa.string())]
)


@dataclass(frozen=True, slots=True)
class Unit:
    """One flat listing of `place`, of the keys strictly between `after` and `before`."""

    place: Location
    after: str | None = None
    before: str | None = None
    #: Roots of tables or directories inside; where the listing may be split.
    inside: tuple[str, ...] = ()


def list_units(
    spark: SparkSession, units: Sequence[Unit], opening: Opening, *, tasks: int
) -> DataFrame:
    """List every unit; one row per object, notes for leftovers, errors and requests."""
    return _list(spark, units, opening, range(len(units)), tasks=tasks, pages=PAGES_PER_UNIT)


def list_leftovers(
    spark: SparkSession,
    units: Sequence[Unit],
    leftovers: Iterable[tuple[int, str]],
    opening: Opening,
    *,
    tasks: int,
) -> DataFrame | None:
    """List what the first round left (unit, last key), by key range; None if it left nothing."""
    parts: list[Unit] = []
    owners: list[int] = []
    for unit, last_key in leftovers:
        for part in split(replace(units[unit], after=last_key)):
            parts.append(part)
            owners.append(unit)
    if not parts:
        return None
    return _list(spark, parts, opening, owners, tasks=max(tasks, len(parts)), pages=None)


def split(unit: Unit) -> list[Unit]:
    """Cut a unit at keys where Lance tables are known to branch out."""
    roots = unit.inside or (unit.place.path,)
    cuts = sorted(
        {f"{root}/{cut}" if root else cut for root in roots for cut in ("", *_SPLITS)}
        - {"", f"{unit.place.path}/"}
    )
    after, before = unit.after, unit.before
    inner = [
        cut for cut in cuts if (after is None or cut > after) and (before is None or cut < before)
    ]
    # Both ends are exclusive, so an object called exactly like a cut is not seen.  Lance writes none
    # by such names; somebody else's (a folder marker, say) is then simply not considered.
    bounds = [after, *inner, before]
    return [replace(unit, after=low, before=high) for low, high in pairwise(bounds)]


def _list(
    spark: SparkSession,
    units: Sequence[Unit],
    opening: Opening,
    owners: Sequence[int],
    *,
    tasks: int,
    pages: int | None,
) -> DataFrame:
    rows = [
        {"unit": owner, "uri": unit.place.uri, "after": unit.after, "before": unit.before}
        for owner, unit in zip(owners, units, strict=True)
    ]
    spread = frame(spark, _UNITS, rows).repartition(max(1, min(tasks, len(rows))))
    return spread.mapInArrow(_lister(opening, pages), sql(LISTING))


def _lister(opening: Opening, pages: int | None) -> Stage:
    def list_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stores = ReadStores(opening)
        units = (row for batch in incoming for row in batch.to_pylist())
        for listed in concurrently(lambda row: _list_one(row, stores, pages), units):
            yield from listed
        rows = [
            {"key": kind.value, "size": number, "note": NOTE_REQUESTS}
            for kind, number in stores.requests().items()
        ]
        yield from batches(rows, LISTING)

    return list_batches


def _list_one(row: dict[str, Any], stores: ReadStores, pages: int | None) -> list[pa.RecordBatch]:
    place = Location.parse(str(row["uri"]))
    after, before = row["after"], row["before"]
    limit = pages * LIST_PAGE_SIZE if pages else None
    found: list[pa.RecordBatch] = []
    count = 0
    try:
        listing = stores(place).list(place.path, after=after, before=before)
        for batch in listing:
            found.append(_listing_batch(batch, row["unit"]))
            count += batch.num_rows
            if limit is not None and count >= limit:
                last = batch.column("key")[-1].as_py()
                found += batches(
                    [{"unit": row["unit"], "key": last, "note": NOTE_LEFTOVER}], LISTING
                )
                break
    except LakewardenError as error:
        # What was listed before the failure says nothing about the rest.
        return list(
            batches([{"unit": row["unit"], "key": as_text(error), "note": NOTE_ERROR}], LISTING)
        )
    return found


def _listing_batch(batch: pa.RecordBatch, unit: object) -> pa.RecordBatch:
    rows = batch.num_rows
    return pa.RecordBatch.from_arrays(
        [
            pa.array([unit] * rows, pa.int32()),
            batch.column("key"),
            batch.column("size"),
            pc.cast(batch.column("modified"), pa.int64()),
            pa.nulls(rows, pa.string()),
        ],
        schema=LISTING,
    )


def identify(listing: DataFrame, units: Sequence[Unit], roots: Sequence[Root]) -> DataFrame:
    """Say of every object which root it lies under and what it is; objects of no root are dropped."""
    stores = [unit.place.store.uri for unit in units]
    return listing.mapInArrow(_identifier(stores, roots), sql(OBJECTS))


def _identifier(stores: Sequence[str], roots: Sequence[Root]) -> Stage:
    by_store: dict[str, list[tuple[str, Root]]] = {}
    for root in roots:
        prefix = f"{root.location.path}/" if root.location.path else ""
        by_store.setdefault(root.location.store.uri, []).append((prefix, root))
    for entries in by_store.values():
        entries.sort(key=lambda entry: entry[0])
    prefixes = {store: [prefix for prefix, _ in entries] for store, entries in by_store.items()}

    def identify_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in incoming:
            rows = []
            for row in batch.to_pylist():
                if row["note"] is not None:
                    rows.append({name: row[name] for name in ("unit", "key", "size", "note")})
                    continue
                store = stores[row["unit"]]
                position = bisect_right(prefixes.get(store, []), row["key"]) - 1
                if position >= 0:
                    prefix, root = by_store[store][position]
                    if row["key"].startswith(prefix):
                        rows.append(_object(row, row["key"][len(prefix) :], root))
            yield from batches(rows, OBJECTS)

    return identify_batches


def _object(row: dict[str, Any], path: str, root: Root) -> dict[str, Any]:
    entry = layout.classify_extra_base(path) if root.plain else layout.classify(path)
    return {
        "root_id": root.root_id,
        "path": path,
        "kind": entry.kind.value,
        "key": entry.key,
        "branch": entry.branch,
        "version": entry.version,
        "detached": entry.detached,
        "size": row["size"],
        "modified_us": row["modified_us"],
        "unit": row["unit"],
    }
