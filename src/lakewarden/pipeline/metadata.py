"""Metadata of Iceberg tables: every snapshot with what expiry decides about it, and the files it names.

Opened in tasks, one metadata file per table; a table that belongs to a warehouse may need others, for
what older versions of the warehouse read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound, Refused
from lakewarden.expiry import (
    ExpiryPolicy,
    Held,
    check_collectable,
    decide,
    encrypted,
    rules_for,
)
from lakewarden.formats.iceberg.layout import METADATA_FILE, PENDING
from lakewarden.formats.iceberg.metadata import TableMetadata, parse
from lakewarden.formats.iceberg.paths import place
from lakewarden.model import FileKind, FileReason
from lakewarden.pipeline.frames import (
    NOTE_ERROR,
    NOTE_TABLE,
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

Row = dict[str, Any]
#: What a row of FACTS is about.
SNAPSHOT, MANIFEST, FILE = "snapshot", "manifest", "file"
#: When a manifest list is opened: at once, or only if something could go that it may still name.
FIRST, SECOND = 1, 2
#: Properties that put files elsewhere than under the table's location.
_PLACES = (
    "write.data.path",
    "write.object-storage.path",
    "write.folder-storage.path",
    "write.metadata.path",
)
#: Metadata files of one table that are opened before anything goes: of each sort, and in all.
_SUSPECTS = 4
_SUSPECTS_MAX = 1000
_STRANGERS = pa.schema(
    [
        ("table_id", pa.int32()),
        ("root_id", pa.int32()),
        ("path", pa.string()),
        ("found", pa.string()),
        ("note", pa.string()),
    ]
)
_TABLES = pa.schema(
    [
        ("table_id", pa.int32()),
        ("uri", pa.string()),
        ("role", pa.string()),
        ("held", pa.string()),
    ]
)
FACTS = pa.schema(
    [
        ("table_id", pa.int32()),
        ("what", pa.string()),
        ("version", pa.int64()),
        ("branch", pa.string()),
        ("uri", pa.string()),
        ("kind", pa.string()),
        ("size", pa.int64()),
        ("modified_us", pa.int64()),
        ("kept", pa.bool_()),
        ("reasons", pa.string()),
        ("round", pa.int32()),
        ("files", pa.int64()),
        ("text", pa.string()),
        ("note", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Source:
    """A table to read: everything of it, or only where it lies."""

    table_id: int
    metadata_location: str
    #: Whether the operation may change it; otherwise all its snapshots stay.
    changes: bool = True
    #: Only its location is wanted, to see whether it overlaps with others.
    only_place: bool = False
    #: It was read before; expiries that were not finished are known.
    again: bool = False
    #: It belongs to a warehouse, whose log decides what stays.
    held: Held | None = None

    @property
    def role(self) -> str:
        if self.only_place:
            return "place"
        if not self.changes:
            return "read"
        return "again" if self.again else "change"


@dataclass(frozen=True, slots=True)
class Rule:
    """How snapshots are decided: by a policy, or (None) everything stays."""

    policy: ExpiryPolicy | None
    now_ms: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What the driver needs to know of one table."""

    location: str
    uuid: str | None = None
    #: Other places its writers are told to use.
    places: tuple[str, ...] = ()
    partition_fields: tuple[str, ...] = ()
    kept: int = 0
    going: int = 0
    expired_refs: tuple[str, ...] = ()
    skipped: str | None = None
    #: Its manifests cannot be read.
    encrypted: bool = False
    #: Records of expiries that were committed, or about to be, and not finished.
    pending: tuple[str, ...] = ()
    #: Records of runs that started from the current metadata and have not committed.
    rivals: tuple[str, ...] = ()
    #: Snapshots that went earlier and left files.
    resumed: int = 0


def tables(
    spark: SparkSession, sources: Sequence[Source], rule: Rule, opening: Opening, *, tasks: int
) -> DataFrame:
    """Open the metadata of every source; returns FACTS, with one note per table."""
    rows = [
        {
            "table_id": source.table_id,
            "uri": source.metadata_location,
            "role": source.role,
            "held": None if source.held is None else json.dumps(asdict(source.held)),
        }
        for source in sources
    ]
    cut = spread(frame(spark, _TABLES, rows), min(tasks, -(-len(rows) // 16)))
    return cut.mapInArrow(_table_reader(rule, opening), sql(FACTS))


def strangers(
    judged: DataFrame, roots: Sequence[Root], uuids: Mapping[int, str | None], opening: Opening
) -> DataFrame:
    """Look into metadata files that nothing names, and return those of other tables.

    Every table numbers its metadata files.  Two with one number may come from two tables, so those
    are opened; and of the others the newest and the lowest, where a second table would show.
    """
    number = F.regexp_extract("path", r"([0-9]+)-[^/]*$", 1).try_cast("bigint")
    metadata = judged.filter(F.col("kind") == FileKind.METADATA.value).withColumn("number", number)
    table = Window.partitionBy("table_id")
    suspects = (
        metadata.withColumn(
            "twins", F.count("number").over(Window.partitionBy("table_id", "number"))
        )
        .filter(F.col("reason") != FileReason.IN_USE.value)
        .withColumn("new", F.row_number().over(table.orderBy(F.desc("modified_us"))))
        .withColumn("low", F.row_number().over(table.orderBy("number")))
        .withColumn("same", F.row_number().over(table.orderBy(F.desc("twins"), "number")))
        .filter(
            (F.col("new") <= _SUSPECTS)
            | (F.col("low") <= _SUSPECTS)
            | ((F.col("twins") > 1) & (F.col("same") <= _SUSPECTS_MAX))
        )
    )
    places = {root.root_id: root for root in roots}
    homes = {root.table_id: root.location for root in roots if root.root_id == root.table_id}

    def look(stores: ReadStores, row: Row) -> Row | None:
        root = places[row["root_id"]]
        try:
            found = parse(stores(root.location).get(root.key(row["path"])), row["path"])
        except NotFound:
            return None
        except LakewardenError as error:
            # What is corrupt belongs to nobody; what only a newer release can read may be anyone's.
            corrupt = error.kind is ErrorKind.CORRUPT_MANIFEST
            return None if corrupt else {**row, "note": as_text(error)}
        mine = place(found.location) == homes[row["table_id"]]
        if found.uuid == uuids.get(row["table_id"]) or (found.uuid is None and mine):
            return None
        return {**row, "found": found.uuid or found.location}

    def look_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (row for batch in incoming for row in batch.to_pylist())
        stores = ReadStores(opening)
        yield from batches(filter(None, concurrently(partial(look, stores), rows)), _STRANGERS)
        yield from request_notes(stores.requests(), _STRANGERS, "path", "root_id")

    return suspects.select("table_id", "root_id", "path").mapInArrow(look_batches, sql(_STRANGERS))


# -- one table -------------------------------------------------------------------------------------


def _table_reader(rule: Rule, opening: Opening) -> Stage:
    def read_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stores = ReadStores(opening)
        rows = (row for batch in incoming for row in batch.to_pylist())
        for found in concurrently(partial(_read_table, rule, stores), rows):
            yield from batches(found, FACTS)
        yield from request_notes(stores.requests(), FACTS, "text", "size")

    return read_batches


def _read_table(rule: Rule, stores: ReadStores, row: Row) -> list[Row]:
    number = {"table_id": row["table_id"]}
    held = None if row["held"] is None else Held(**json.loads(row["held"]))
    try:
        if held is not None and held.purged:
            return [{**fact, **number} for fact in _purged(stores, row["uri"], held)]
        metadata = parse(get(stores, row["uri"]), row["uri"])
        if row["role"] == "place":
            return [_note(where(metadata), number)]
        changes = row["role"] in ("change", "again")
        try:
            beyond = None if held is None else _beyond(stores, held, metadata)
            reading = _TableReading(metadata, row["uri"], rule if changes else None, beyond)
        except LakewardenError as error:
            # Nothing of it goes, but what it needs, perhaps of other tables, is still needed.
            reading = _TableReading(metadata, row["uri"], None)
            refused = [{**number, "text": as_text(error), "note": NOTE_ERROR}]
            return [{**fact, **number} for fact in reading.facts()] + refused
        if reading.expires and row["role"] == "change":
            reading.resume(stores)
        return [{**fact, **number} for fact in reading.facts()]
    except LakewardenError as error:
        return [{**number, "text": as_text(error), "note": NOTE_ERROR}]


@dataclass(frozen=True, slots=True)
class _Beyond:
    """What versions of the warehouse need beyond the table's current metadata."""

    #: Snapshots that must stay.
    ids: frozenset[int]
    #: Metadata files that must stay.
    files: tuple[str, ...]
    #: Other metadata, with those of its snapshots that must stay.
    others: tuple[tuple[TableMetadata, frozenset[int]], ...]


def _beyond(stores: ReadStores, held: Held, current: TableMetadata) -> _Beyond:
    """Find what is needed, opening metadata only where the current one does not know a snapshot."""
    listed = {one.snapshot_id for one in current.snapshots}
    ids = {number for numbers in held.files.values() for number in numbers or ()}
    others: list[tuple[TableMetadata, frozenset[int]]] = []
    unseen = ids - listed
    for uri, numbers in held.files.items():
        if numbers is not None and unseen.isdisjoint(numbers):
            continue
        try:
            other = parse(get(stores, uri), uri)
        except NotFound:
            if uri in held.refs:
                raise
            # A version whose metadata is gone can be read by nobody, so it needs nothing.
            continue
        named = _named_by(other)
        ids |= named
        others.append((other, frozenset(named - listed)))
        unseen -= named
    return _Beyond(frozenset(ids), tuple(held.files), tuple(others))


def _named_by(metadata: TableMetadata) -> set[int]:
    history = metadata.history()
    named = {ref.snapshot_id for ref in history.refs}
    return named | ({history.current_id} if history.current_id is not None else set())


def _purged(stores: ReadStores, uri: str, held: Held) -> Iterator[Row]:
    """Say that everything of a table goes, as far as there is still metadata that tells what."""
    try:
        metadata = parse(get(stores, uri), uri)
    except NotFound:
        yield _note(Summary(held.location), {})
        return
    for one in metadata.snapshots:
        row = {"version": one.snapshot_id, "branch": "", "kept": False, "round": FIRST,
               "modified_us": _micros(one.timestamp_ms), "reasons": ""}  # fmt: skip
        yield from _named_lists(one, row)
    for name in dict.fromkeys([*metadata.metadata_log, uri]):
        yield _file(name, FileKind.METADATA, kept=False)
    for about in (*metadata.statistics, *metadata.partition_statistics):
        yield _file(about.path, FileKind.STATISTICS, kept=False, size=about.size)
    yield _note(_summary(metadata, going=len(metadata.snapshots)), {})


class _TableReading:
    """One table's metadata, decided."""

    def __init__(
        self,
        metadata: TableMetadata,
        uri: str,
        rule: Rule | None,
        beyond: _Beyond | None = None,
    ) -> None:
        if rule is not None:
            check_collectable(metadata.properties)
        self._metadata = metadata
        self._uri = uri
        policy = rule.policy if rule is not None else None
        self._skipped = encrypted(metadata.properties) if rule is not None else None
        rules = rules_for(metadata.properties, policy) if policy and not self._skipped else None
        if rules is not None and beyond is not None:
            rules = replace(rules, held=beyond.ids)
        self._beyond = beyond
        self.expires = rules is not None
        self._expiry = decide(metadata.history(), rules, rule.now_ms if rule else 0)
        self._stays = {one.snapshot.snapshot_id for one in self._expiry.decisions if one.keep}
        self._pending: list[str] = []
        self._rivals: list[str] = []
        self._earlier: list[TableMetadata] = []

    def resume(self, stores: ReadStores) -> None:
        """Find expiries that were committed but not finished: their files are still there."""
        directory = _placed(f"{self._uri.rpartition('/')[0]}/{PENDING}")
        found = stores(directory).list(directory.path)
        for key in [key for batch in found for key in batch.column("key").to_pylist()]:
            self._follow(stores, Location(directory.scheme, directory.authority, key))

    def _follow(self, stores: ReadStores, record: Location) -> None:
        """Take up one record.

        One that leads nowhere is cleared away: what it stood for is left to the removal of orphans.
        One of another table is not ours to touch, and one that started from the current metadata
        belongs to a run that has not committed yet, or never did.
        """
        try:
            started_from = _started_from(stores(record).get(record.key))
        except NotFound:
            return
        if started_from == self._uri:
            self._rivals.append(record.uri)
            return
        earlier = _read_or_none(stores, started_from)
        if earlier is None:
            self._pending.append(record.uri)
            return
        if (earlier.uuid, earlier.location) != (self._metadata.uuid, self._metadata.location):
            return
        self._pending.append(record.uri)
        # Only what this table's own log leads to is part of its history.
        if started_from in self._metadata.metadata_log:
            self._earlier.append(earlier)

    def facts(self) -> Iterator[Row]:
        yield from self._snapshots()
        yield from self._files()
        yield _note(
            _summary(
                self._metadata,
                kept=len(self._stays),
                going=len(self._expiry.decisions) - len(self._stays),
                expired_refs=self._expiry.expired_refs,
                # What an earlier run has left is worth a run by itself.
                encrypted=self._skipped is not None,
                skipped=self._skipped or (None if self._earlier else self._expiry.skipped),
                pending=tuple(self._pending),
                rivals=tuple(self._rivals),
                resumed=len(self._gone_before()),
            ),
            {},
        )

    def _snapshots(self) -> Iterator[Row]:
        stored = {one.snapshot_id: one for one in self._metadata.snapshots}
        near = self._neighbours()
        for decision in self._expiry.decisions:
            one = stored[decision.snapshot.snapshot_id]
            row = {
                "version": one.snapshot_id,
                "branch": decision.branch,
                "kept": decision.keep,
                "modified_us": _micros(one.timestamp_ms),
                "reasons": "; ".join(decision.reasons),
                "round": FIRST if not decision.keep or one.snapshot_id in near else SECOND,
            }
            yield from _named_lists(one, row)
        for one in self._gone_before().values():
            yield from _named_lists(
                one, {"version": one.snapshot_id, "kept": False, "round": FIRST}
            )
        for other, ids in self._beyond.others if self._beyond else ():
            for one in other.snapshots:
                if one.snapshot_id in ids:
                    row = {"version": one.snapshot_id, "kept": True, "round": FIRST}
                    yield from _named_lists(one, row)

    def _neighbours(self) -> set[int]:
        """Return the kept snapshots next to going ones: most likely to share their manifests.

        Which lists are opened first decides only about requests.  If everything that going lists
        name is in these, nothing can go and the other lists need not be opened at all.
        """
        if not self.expires:
            return self._stays
        near: set[int] = set()
        for one in self._metadata.snapshots:
            here, parent = one.snapshot_id in self._stays, one.parent_id in self._stays
            if here and one.parent_id is not None and not parent:
                near.add(one.snapshot_id)
            elif parent and not here and one.parent_id is not None:
                near.add(one.parent_id)
        return near

    def _gone_before(self) -> dict[int, Any]:
        current = {one.snapshot_id for one in self._metadata.snapshots}
        return {
            one.snapshot_id: one
            for earlier in self._earlier
            for one in earlier.snapshots
            if one.snapshot_id not in current
        }

    def _files(self) -> Iterator[Row]:
        yield from self._metadata_files()
        statistics = (*self._metadata.statistics, *self._metadata.partition_statistics)
        listed = {one.snapshot_id for one in self._metadata.snapshots}
        for one in statistics:
            stays = one.snapshot_id in self._stays or one.snapshot_id not in listed
            yield _file(one.path, FileKind.STATISTICS, kept=stays, size=one.size)
        for other, ids in self._beyond.others if self._beyond else ():
            for one in (*other.statistics, *other.partition_statistics):
                if one.snapshot_id in ids:
                    yield _file(one.path, FileKind.STATISTICS, kept=True, size=one.size)
        gone = self._gone_before()
        for earlier in self._earlier:
            for one in (*earlier.statistics, *earlier.partition_statistics):
                if one.snapshot_id in gone:
                    yield _file(one.path, FileKind.STATISTICS, kept=False, size=one.size)

    def _metadata_files(self) -> Iterator[Row]:
        if self._beyond is None:
            for uri in dict.fromkeys([*self._metadata.metadata_log, self._uri]):
                yield _file(uri, FileKind.METADATA, kept=True)
            return
        needed = dict.fromkeys([*self._beyond.files, self._uri])
        for uri in needed:
            yield _file(uri, FileKind.METADATA, kept=True)
        # What only the table's own log remembers, no version of the warehouse is read through.
        for uri in self._metadata.metadata_log:
            if uri not in needed:
                yield _file(uri, FileKind.METADATA, kept=not self.expires)


def _started_from(record: bytes) -> str:
    """Return the metadata file a record names; empty if it makes no sense."""
    try:
        found = json.loads(record)["metadata"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    named = isinstance(found, str) and METADATA_FILE.fullmatch(found)
    return found if named else ""


def _read_or_none(stores: ReadStores, uri: str) -> TableMetadata | None:
    try:
        return parse(get(stores, uri), uri)
    except (NotFound, Damaged, Refused):
        return None


def _named_lists(one: Any, row: Row) -> Iterator[Row]:
    if one.manifest_list is not None:
        yield {**row, "what": SNAPSHOT, "uri": one.manifest_list, "files": one.files}
        return
    # Old writers named manifests in the metadata itself.
    yield {**row, "what": SNAPSHOT, "uri": None}
    for uri in one.manifests:
        yield {"what": MANIFEST, "version": one.snapshot_id, "uri": uri, "kept": row["kept"],
               "round": FIRST}  # fmt: skip


def _micros(millis: int) -> int | None:
    """Return microseconds; None for a time beyond all calendars."""
    return millis * 1000 if abs(millis) < 2**53 else None


def _file(uri: str, kind: FileKind, *, kept: bool, size: int | None = None) -> Row:
    return {
        "what": FILE,
        "uri": uri,
        "kind": kind.value,
        "kept": kept,
        "size": size,
        "round": FIRST,
    }


def where(metadata: TableMetadata) -> Summary:
    """Return which table it is, and where it lies."""
    return _summary(metadata)


def _summary(metadata: TableMetadata, **found: Any) -> Summary:
    places = tuple(
        dict.fromkeys(metadata.properties[name] for name in _PLACES if name in metadata.properties)
    )
    return Summary(metadata.location, metadata.uuid, places, metadata.partition_fields, **found)


def _note(summary: Summary, number: Row) -> Row:
    return {**number, "text": json.dumps(asdict(summary)), "note": NOTE_TABLE}


def summary_of(text: str) -> Summary:
    """Read a table's note."""
    found = json.loads(text)
    for name in ("places", "partition_fields", "expired_refs", "pending", "rivals"):
        found[name] = tuple(found[name])
    return Summary(**found)


def get(stores: ReadStores, uri: str) -> bytes:
    """Return what is at a URI, or raise if no store is known there."""
    found = _placed(uri)
    return stores(found).get(found.key)


def _placed(uri: str) -> Location:
    found = place(uri)
    if found is None:
        raise Refused(
            ErrorKind.UNKNOWN_SCHEME,
            f"{uri} lies in no store that can be reached from here; nothing goes",
        )
    return found
