"""Objects that exist under given places.

A unit is one flat listing: a directory, or a range of keys in it.  A unit that turns out to be
large stops early and says where (a *leftover*); the driver splits the rest into ranges and lists
those in a second round, so one huge table is spread over many tasks while a thousand small ones
share a few requests.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Row, SparkSession

from lakewarden.errors import LakewardenError
from lakewarden.formats.iceberg import layout as iceberg
from lakewarden.formats.iceberg.paths import Places, place_all
from lakewarden.formats.lance import layout
from lakewarden.model import MAIN, WAREHOUSE_MARK, FileKind, Format
from lakewarden.pipeline.frames import (
    LISTING,
    NOTE_ERROR,
    NOTE_LEFTOVER,
    NOTE_STATE,
    NOTE_TABLE,
    OBJECTS,
    Opening,
    ReadStores,
    Root,
    Stage,
    as_text,
    batches,
    concurrently,
    frame,
    request_notes,
    spread,
    sql,
)
from lakewarden.storage.location import Location
from lakewarden.storage.store import LIST_PAGE_SIZE

#: Pages a unit lists before it leaves the rest to others.
PAGES_PER_UNIT = 20
#: Units that one task lists at the same time.
_UNITS_PER_TASK = 8
#: Names of data files start with random binary digits, transactions with a version number.
_SPLITS = (
    "_deletions/", "_indices/", "_refs/",
    *(f"_transactions/{digit}" for digit in range(1, 10)),
    "_versions/",
    *(f"data/{number:05b}" for number in range(32)),
    "data/2", "tree/",
)  # fmt: skip

_MANIFEST_PATH = re.compile(layout.MANIFEST_PATH, re.DOTALL)
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
    #: Keys to split at, where they are known; else those at which Lance tables branch out.
    cuts: tuple[str, ...] = ()

    def covers(self, place: Location) -> bool:
        """Tell whether a table at `place` is listed here, at least its beginning."""
        key = f"{place.path}/"
        return place == self.place or (
            self.place.contains(place)
            and (self.after is None or key >= self.after)
            and (self.before is None or key < self.before)
        )


@dataclass(frozen=True, slots=True)
class Lister:
    """Lists units on `tasks` tasks; with `roots` it also says what each object is."""

    spark: SparkSession
    opening: Opening
    tasks: int
    roots: Sequence[Root] | None = None

    def first(self, units: Sequence[Unit]) -> DataFrame:
        """List every unit; notes tell tables found, leftovers, errors and requests."""
        return self._list(units, units, range(len(units)), self.tasks, PAGES_PER_UNIT)

    def rest(self, units: Sequence[Unit], leftovers: Iterable[tuple[int, str]]) -> DataFrame | None:
        """List what the first round left (unit, last key), by key range; None if nothing."""
        parts: list[Unit] = []
        owners: list[int] = []
        for unit, last_key in leftovers:
            for part in split(replace(units[unit], after=last_key)):
                parts.append(part)
                owners.append(unit)
        if not parts:
            return None
        return self._list(units, parts, owners, len(parts), None)

    def _list(
        self,
        units: Sequence[Unit],
        parts: Sequence[Unit],
        owners: Sequence[int],
        tasks: int,
        pages: int | None,
    ) -> DataFrame:
        rows = [
            {"unit": owner, "uri": part.place.uri, "after": part.after, "before": part.before}
            for owner, part in zip(owners, parts, strict=True)
        ]
        cut = spread(frame(self.spark, _UNITS, rows), min(tasks, -(-len(rows) // _UNITS_PER_TASK)))
        lists = _lister(self.opening, pages)
        if self.roots is None:
            return cut.mapInArrow(lists, sql(LISTING))
        identifies = _identifier([unit.place.store.uri for unit in units], self.roots)
        return cut.mapInArrow(lambda batches: identifies(lists(batches)), sql(OBJECTS))


def split(unit: Unit) -> list[Unit]:
    """Cut a unit at its own cuts, or at keys where Lance tables are known to branch out."""
    roots = unit.inside or (unit.place.path,)
    known = {f"{root}/{cut}" if root else cut for root in roots for cut in ("", *_SPLITS)}
    cuts = sorted((set(unit.cuts) or known) - {"", f"{unit.place.path}/"})
    after, before = unit.after, unit.before
    inner = [
        cut for cut in cuts if (after is None or cut > after) and (before is None or cut < before)
    ]
    # Both ends are exclusive, so an object called exactly like a cut is not seen.  Lance writes none
    # by such names; somebody else's (a folder marker, say) is then simply not considered.
    bounds = [after, *inner, before]
    return [replace(unit, after=low, before=high) for low, high in pairwise(bounds)]


def _lister(opening: Opening, pages: int | None) -> Stage:
    def list_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stores = ReadStores(opening)
        units = (row for batch in incoming for row in batch.to_pylist())
        for listed in concurrently(lambda row: _list_one(row, stores, pages), units):
            yield from listed
        yield from request_notes(stores.requests(), LISTING, "key", "size")

    return list_batches


def _list_one(row: dict[str, Any], stores: ReadStores, pages: int | None) -> list[pa.RecordBatch]:
    place = Location.parse(str(row["uri"]))
    after, before = row["after"], row["before"]
    limit = pages * LIST_PAGE_SIZE if pages else None
    found: list[pa.RecordBatch] = []
    tables: set[str] = set()
    count = 0
    try:
        store = stores(place)
        if not store.lists_ranges:
            limit = None
        listing = store.list(place.path, after=after, before=before)
        for batch in listing:
            found.append(_listing_batch(batch, row["unit"]))
            tables.update(_tables_in(batch.column("key").to_pylist()))
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
    noted = [{"unit": row["unit"], "key": table, "note": NOTE_TABLE} for table in tables]
    return [*found, *batches(noted, LISTING)]


def _tables_in(keys: Iterable[str]) -> Iterator[str]:
    """Yield the directories that hold versions."""
    for key in keys:
        if "_versions/" in key and (found := _MANIFEST_PATH.match(key)):
            yield found[1] or ""


def _listing_batch(batch: pa.RecordBatch, unit: int) -> pa.RecordBatch:
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


class _Places:
    """Finds the root an object lies under.  Roots do not overlap."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self._roots: dict[str, list[Root]] = {}
        for root in sorted(roots, key=lambda root: root.key("")):
            self._roots.setdefault(root.location.store.uri, []).append(root)
        self._prefixes = {
            store: [root.key("") for root in inside] for store, inside in self._roots.items()
        }

    def root_of(self, store: str, key: str) -> Root | None:
        prefixes = self._prefixes.get(store, [])
        position = bisect_right(prefixes, key) - 1
        if position < 0 or not key.startswith(prefixes[position]):
            return None
        return self._roots[store][position]


def _identifier(stores: Sequence[str], roots: Sequence[Root]) -> Stage:
    if all(root.format is Format.ICEBERG for root in roots):
        return iceberg_objects(stores, roots)
    places = _Places(roots)

    def identify_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        states: dict[int, State] = {}
        for batch in incoming:
            rows: list[tuple[object, ...]] = []
            # Row by row as tuples: a dictionary per row would double the time of a long listing.
            for unit, key, size, modified, note in zip(
                *(column.to_pylist() for column in batch.columns), strict=True
            ):
                if note is not None:
                    rows.append((*[None] * 4, key, *[None] * 4, size, None, None, unit, note))
                    continue
                root = places.root_of(stores[unit], key)
                if root is None:
                    continue
                path = key[len(root.key("")) :]
                state = states.setdefault(root.root_id, State())
                entry = layout.classify_extra_base(path) if root.plain else layout.classify(path)
                state.count(path, entry, size, modified)
                rows.append(
                    (root.table_id, root.root_id, path, entry.kind.value, entry.key,
                     layout.stem(entry.key), entry.branch, entry.version, entry.detached, size, modified,
                     root.owned, unit, None)
                )  # fmt: skip
            if rows:
                columns = zip(zip(*rows, strict=True), OBJECTS, strict=True)
                arrays = [pa.array(column, field.type) for column, field in columns]
                yield pa.RecordBatch.from_arrays(arrays, schema=OBJECTS)
        noted = [
            {"root_id": root_id, "key": json.dumps(asdict(state)), "note": NOTE_STATE}
            for root_id, state in states.items()
        ]
        yield from batches(noted, OBJECTS)

    return identify_batches


def iceberg_objects(stores: Sequence[str], roots: Sequence[Root]) -> Stage:
    """Say of every object which Iceberg table it lies under and what it is, batch by batch."""
    by_id = {root.root_id: root for root in roots}
    numbers = pa.array(list(by_id), pa.int32())
    tables = pa.array([root.table_id for root in by_id.values()], pa.int32())

    def identify_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        places = Places((root.root_id, root.location) for root in roots)
        states: dict[int, State] = {}
        for batch in incoming:
            notes = batch.filter(pc.is_valid(batch.column("note")))
            yield from batches(notes.to_pylist(), OBJECTS)
            found = batch.filter(pc.is_null(batch.column("note")))
            units = pc.dictionary_encode(found.column("unit"))
            prefixes = pa.array(
                [f"{stores[unit].rstrip('/')}/" for unit in units.dictionary.to_pylist()],
                pa.string(),
            )
            uris = pc.binary_join_element_wise(
                pc.take(prefixes, units.indices), found.column("key"), ""
            )
            placed = place_all(uris, places)
            mine = pc.is_valid(placed.root_id)
            found, root_id = found.filter(mine), placed.root_id.filter(mine)
            if not found.num_rows:
                continue
            path = placed.path.filter(mine)
            kind = iceberg.kinds(path, root_id, by_id)
            _count(states, root_id, path, kind, found.column("size"))
            columns = {
                "table_id": pc.take(tables, pc.index_in(root_id, numbers)),
                "root_id": root_id,
                "path": path,
                "kind": kind,
                "key": placed.key.filter(mine),
                "size": found.column("size"),
                "modified_us": found.column("modified_us"),
                "owned": pa.repeat(pa.scalar(True), found.num_rows),  # noqa: FBT003
                "unit": found.column("unit"),
            }
            yield pa.RecordBatch.from_arrays(
                [columns.get(f.name, pa.nulls(found.num_rows, f.type)) for f in OBJECTS],
                schema=OBJECTS,
            )
        noted = [
            {"root_id": root_id, "key": json.dumps(asdict(state)), "note": NOTE_STATE}
            for root_id, state in states.items()
        ]
        yield from batches(noted, OBJECTS)

    return identify_batches


def _count(
    states: dict[int, State], root_id: pa.Array, path: pa.Array, kind: pa.Array, size: pa.Array
) -> None:
    """Add a batch to what is known of each table."""
    summed = pa.table({"root_id": root_id, "size": size}).group_by("root_id")
    for row in summed.aggregate([("size", "sum"), ("size", "count")]).to_pylist():
        state = states.setdefault(row["root_id"], State())
        state.objects += row["size_count"]
        state.bytes += row["size_sum"] or 0
    # Few: metadata files show other tables inside, hidden ones may be those of a Lance table.
    odd = pc.is_in(kind, pa.array([FileKind.METADATA.value, FileKind.UNKNOWN.value]))
    for number, one, what in zip(
        *(column.filter(odd).to_pylist() for column in (root_id, path, kind)), strict=True
    ):
        states[number].kept |= one == WAREHOUSE_MARK
        nested = _nested_in(one, what)
        states[number].nested = max(states[number].nested, nested)


def _nested_in(path: str, kind: str) -> str:
    """Return the table inside that a file belongs to; empty if it belongs to this one."""
    if kind == FileKind.METADATA.value:
        return path.rpartition("/")[0].rpartition("metadata")[0]
    found = _MANIFEST_PATH.match(path)
    return (found[1] or path) if found else ""


@dataclass(slots=True)
class State:
    """What a listing shows of one table, or of the part of it that one task saw.

    Marks are sums of hashes: independent of order, they add up over tasks and change whenever an
    object of that kind appears, disappears or is written again.
    """

    objects: int = 0
    bytes: int = 0
    #: On the main branch: without any there is no table here.
    manifests: int = 0
    refs_mark: int = 0
    manifests_mark: int = 0
    #: Another table found inside.
    nested: str = ""
    #: It belongs to a warehouse.
    kept: bool = False

    def count(self, path: str, entry: layout.Entry, size: int, modified: int | None) -> None:
        self.objects += 1
        self.bytes += size
        self.kept |= path == WAREHOUSE_MARK
        if entry.kind is FileKind.REF:
            self.refs_mark += _hash(f"{path}\0{size}\0{modified}")
        elif entry.kind in (FileKind.MANIFEST, FileKind.STAGED_MANIFEST):
            self.manifests += entry.kind is FileKind.MANIFEST and entry.branch == MAIN
            self.manifests_mark += _hash(f"{path}\0{size}\0{modified}")
            if entry.branch != MAIN and not path.startswith("tree/"):
                self.nested = max(self.nested, entry.branch)

    def __add__(self, other: State) -> State:
        return State(
            self.objects + other.objects,
            self.bytes + other.bytes,
            self.manifests + other.manifests,
            self.refs_mark + other.refs_mark,
            self.manifests_mark + other.manifests_mark,
            max(self.nested, other.nested),
            self.kept or other.kept,
        )


def states_in(noted: Iterable[Row]) -> dict[int, State]:
    """Add up the states that tasks have noted, by root."""
    states: dict[int, State] = {}
    for row in noted:
        if row.note == NOTE_STATE:
            states[row.root_id] = states.get(row.root_id, State()) + State(**json.loads(row.key))
    return states


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
