"""Snapshots of Iceberg tables: the manifests and files that they name.

Two stages after that which opens the metadata (`pipeline.metadata`), each a frame in and a frame out:

1. `lists` opens manifest lists and says which manifests there are.  A manifest is shared by many
   snapshots; the caller keeps each once.
2. `contents` opens manifests and says which files they name.

Everything that names a file says where it is in the same columns (NAMED).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound, Refused
from lakewarden.formats.iceberg.manifests import ManifestList, read_manifest_list, read_manifests
from lakewarden.formats.iceberg.paths import Equality, Places, comparable, place_all
from lakewarden.model import FileKind, Format
from lakewarden.pipeline.frames import (
    BATCH_ROWS,
    NOTE_BASE,
    NOTE_ERROR,
    NOTE_WARNING,
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
from lakewarden.pipeline.metadata import MANIFEST, get
from lakewarden.storage.location import Location

Row = dict[str, Any]
#: Manifests that one task decodes at a time.
_DECODED_TOGETHER = 64
#: Kinds of files by the number that an entry has for them.
_KINDS = pa.array(
    [kind.value for kind in (FileKind.DATA, FileKind.POSITION_DELETE, FileKind.EQUALITY_DELETE)]
)
_DELETED = 2
_PREFIXES = pa.schema([("root_id", pa.int32()), ("prefix", pa.string())])
#: A named file and where it is: below a root, elsewhere in a store, or (store null) out of reach.
NAMED = pa.schema(
    [
        ("table_id", pa.int32()),
        ("root_id", pa.int32()),
        ("store", pa.string()),
        ("path", pa.string()),
        ("key", pa.string()),
        ("bare", pa.string()),
        ("kind", pa.string()),
        ("size", pa.int64()),
        ("kept", pa.bool_()),
        ("version", pa.int64()),
        ("uri", pa.string()),
        ("content", pa.int32()),
        ("entries", pa.int64()),
        ("live", pa.int64()),
        ("text", pa.string()),
        ("note", pa.string()),
    ]
)


def lists(
    facts: DataFrame,
    places: Mapping[int, Location],
    opening: Opening,
    equality: Equality,
    *,
    tasks: int,
) -> DataFrame:
    """Open the manifest lists of snapshots (rows of FACTS with `open`); returns NAMED."""
    cut = spread(
        facts.select("table_id", "what", "version", "uri", "kind", "size", "kept", "files", "open"),
        tasks,
    )
    return cut.mapInArrow(_list_reader(places, opening, equality), sql(NAMED))


def contents(
    manifests: DataFrame,
    places: Mapping[int, Location],
    opening: Opening,
    equality: Equality,
    *,
    tasks: int,
) -> DataFrame:
    """Open manifests (`tables`: the ids of all tables that share it); returns NAMED."""
    cut = spread(manifests.select("tables", "version", "uri", "kept", "entries", "size"), tasks)
    return cut.mapInArrow(_content_reader(places, opening, equality), sql(NAMED))


def with_whole_paths(files: DataFrame, roots: Sequence[Root]) -> DataFrame:
    """Fill in `stem` of Iceberg's files: the whole path, by which a name without place is compared.

    Few need it, and it is as long again as the path.
    """
    rows = [
        {"root_id": root.root_id, "prefix": comparable(root.key(""))}
        for root in roots
        if root.format is Format.ICEBERG
    ]
    prefixes = F.broadcast(frame(files.sparkSession, _PREFIXES, rows))
    whole = F.coalesce("stem", F.concat("prefix", "key"))
    return files.join(prefixes, on="root_id", how="left").withColumn("stem", whole).drop("prefix")


def rooted(named: DataFrame, roots: Sequence[Root]) -> DataFrame:
    """Fill in the root of files that lie outside their table, by the store they are in."""
    outside = [root for root in roots if root.table_id < 0]
    cases = "".join(f" WHEN '{root.location.uri}' THEN {root.root_id}" for root in outside)
    elsewhere = F.expr(f"CASE store{cases} END") if cases else F.lit(None)
    return named.withColumn("root_id", F.coalesce("root_id", elsewhere))


# -- manifest lists and manifests ------------------------------------------------------------------


class _Output:
    """Collects what one task has found, and says of all of it together where it is.

    Files come by the handful from a list and by the thousand from a manifest.  Placing them, and
    handing them to Spark, costs the same for few as for many.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._seen: set[tuple[object, ...]] = set()
        self._few: list[Row] = []
        self._many: list[pa.RecordBatch] = []
        self._rows = 0
        self._notes: list[Row] = []

    def one(self, named: str, /, **columns: Any) -> None:
        """Take a file."""
        self._few.append({"named": named, **columns})
        self._rows += 1

    def many(self, uris: pa.Array, **columns: Any) -> None:
        """Take files; columns are arrays, or values for all of them."""
        arrays = [uris]
        for column in list(_FOUND)[1:]:
            value = columns.get(column.name)
            if not isinstance(value, pa.Array):
                value = pa.repeat(pa.scalar(value, column.type), len(uris))
            arrays.append(value)
        self._many.append(pa.RecordBatch.from_arrays(arrays, schema=_FOUND))
        self._rows += len(uris)

    def first(self, *mark: object) -> bool:
        """Tell whether this is the first time."""
        new = mark not in self._seen
        self._seen.add(mark)
        return new

    def trouble(
        self, table_id: int, version: int | None, error: LakewardenError, note: str
    ) -> None:
        """Say what is wrong with a table, once for each kind."""
        if self.first(table_id, note, error.kind):
            self._notes.append(
                {"table_id": table_id, "version": version, "text": as_text(error), "note": note}
            )

    def ready(self, *, all_of_it: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield what has come together, if it is enough to be worth it."""
        if self._rows < BATCH_ROWS and not all_of_it:
            return
        parts = [*self._many, pa.RecordBatch.from_pylist(self._few, schema=_FOUND)]
        found = pa.Table.from_batches(parts, schema=_FOUND).combine_chunks()
        self._few, self._many, self._rows = [], [], 0
        if found.num_rows:
            yield self._placed(found)
        yield from batches(self._notes, NAMED)
        self._notes = []

    def _placed(self, found: pa.Table) -> pa.RecordBatch:
        placed = place_all(found.column("named").combine_chunks(), self._places)
        outside = pc.is_null(placed.root_id)
        if placed.root_id.null_count:
            for store in pc.unique(placed.store.filter(outside)).to_pylist():
                if self.first("outside", store):
                    self._notes.append({"store": store, "note": NOTE_BASE})
        kept = found.column("kept").combine_chunks()
        where = {
            "root_id": placed.root_id,
            "store": pc.if_else(outside, placed.store, None),
            # Only what may go is ever looked up by its own name.
            "path": pc.if_else(kept, None, placed.path),
            "key": placed.key,
            "bare": placed.bare,
        }
        arrays = []
        for column in NAMED:
            if column.name in where:
                arrays.append(where[column.name])
            elif column.name in _FOUND.names:
                arrays.append(found.column(column.name).combine_chunks())
            else:
                arrays.append(pa.nulls(found.num_rows, column.type))
        return pa.RecordBatch.from_arrays(arrays, schema=NAMED)


#: A named file before it is clear where it is.
_FOUND = pa.schema(
    [
        ("named", pa.string()),
        *(
            NAMED.field(name)
            for name in (
                "table_id", "kind", "size", "kept", "version", "uri", "content", "entries",
                "live",
            )
        ),
    ]
)  # fmt: skip


def _list_reader(places: Mapping[int, Location], opening: Opening, equality: Equality) -> Stage:
    def read_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stores = ReadStores(opening)
        output = _Output(Places(places.items(), equality))
        rows = (row for batch in incoming for row in batch.to_pylist())
        lists = _Lists(output)
        for row, answer in concurrently(partial(_fetch, stores), rows):
            lists.take(row, answer)
            yield from output.ready()
        yield from output.ready(all_of_it=True)
        yield from request_notes(stores.requests(), NAMED, "text", "size")

    return read_batches


def _fetch(stores: ReadStores, row: Row) -> tuple[Row, bytes | LakewardenError | None]:
    if not row["open"] or row["uri"] is None:
        return row, None
    try:
        return row, get(stores, row["uri"])
    except LakewardenError as error:
        return row, error


class _Lists:
    """Takes manifest lists, one after another, and what they name."""

    def __init__(self, output: _Output) -> None:
        self._output = output
        #: The one before, and whose it was.
        self._last: tuple[Row, ManifestList] | None = None

    def take(self, row: Row, answer: bytes | LakewardenError | None) -> None:
        """Take the file that the row names, and what it names itself if it was opened."""
        uri = row["uri"]
        if uri is None:
            return
        mark = {name: row[name] for name in ("table_id", "version", "kept")}
        if row["what"] == MANIFEST:
            kind = FileKind.MANIFEST_FILE.value
            self._output.one(uri, **mark, kind=kind, uri=uri, content=0)
            return
        kind = row["kind"] or FileKind.MANIFEST_LIST.value
        size = len(answer) if isinstance(answer, bytes) else row["size"]
        self._output.one(uri, **mark, kind=kind, size=size)
        try:
            if isinstance(answer, LakewardenError):
                raise answer
            if answer is not None:
                self._manifests(row, answer)
        except NotFound:
            if row["kept"]:
                missing = Damaged(
                    ErrorKind.DAMAGED_VERSION,
                    f"snapshot {row['version']} needs {uri}, which does not exist; nothing goes: "
                    "restore the file, or expire that snapshot",
                )
                self._output.trouble(row["table_id"], row["version"], missing, NOTE_ERROR)
        except LakewardenError as error:
            # What a going list names only ever adds to what may go.
            note = NOTE_ERROR if row["kept"] or not isinstance(error, Damaged) else NOTE_WARNING
            named = Damaged(error.kind, f"snapshot {row['version']} ({uri}): {error.message}")
            self._output.trouble(row["table_id"], row["version"], named, note)

    def _manifests(self, row: Row, data: bytes) -> None:
        whose = {name: row[name] for name in ("table_id", "kept")}
        base = self._last[1] if self._last is not None and self._last[0] == whose else None
        found = read_manifest_list(data, base)
        if not found.number and row["files"]:
            raise Damaged(
                ErrorKind.CORRUPT_MANIFEST,
                f"it names no manifest, and the snapshot says that it has {row['files']:,} file(s)",
            )
        if pc.any(found.fresh.column("encrypted")).as_py():
            raise Refused(
                ErrorKind.UNSUPPORTED_FEATURE, "its manifests are encrypted and cannot be read here"
            )
        self._last = whose, found
        columns = ("path", "length", "content", "entries", "live")
        values = zip(*(found.fresh.column(name).to_pylist() for name in columns), strict=True)
        for uri, length, content, entries, live in values:
            # Lists that are not read one after the other name the same, too.
            if self._output.first(row["table_id"], row["kept"], uri):
                self._output.one(
                    uri,
                    **whose,
                    version=row["version"],
                    kind=FileKind.MANIFEST_FILE.value,
                    uri=uri,
                    size=length,
                    content=content,
                    entries=entries,
                    live=live,
                )


def _content_reader(places: Mapping[int, Location], opening: Opening, equality: Equality) -> Stage:
    def read_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stores = ReadStores(opening)
        output = _Output(Places(places.items(), equality))
        rows = ({**row, "open": True} for batch in incoming for row in batch.to_pylist())
        answers = concurrently(partial(_fetch, stores), rows)
        while group := list(islice(answers, _DECODED_TOGETHER)):
            _decode(group, output)
            yield from output.ready()
        yield from output.ready(all_of_it=True)
        yield from request_notes(stores.requests(), NAMED, "text", "size")

    return read_batches


def _decode(group: Sequence[tuple[Row, bytes | LakewardenError | None]], output: _Output) -> None:
    fetched = [(row, data) for row, data in group if isinstance(data, bytes)]
    decoded = read_manifests([data for _, data in fetched])
    for (row, data), found in zip(fetched, decoded, strict=True):
        whole = _whole(row, data, found)
        if isinstance(whole, pa.Table):
            _entries(row, whole, output)
        else:
            _unread(row, whole, output)
    for row, error in group:
        if isinstance(error, LakewardenError):
            _unread(row, error, output)


def _whole(row: Row, data: bytes, found: pa.Table | Damaged) -> pa.Table | Damaged:
    """Compare a manifest with what its list says: one that was cut between blocks reads well."""
    if isinstance(found, Damaged) or (
        row["entries"] in (None, found.num_rows) and row["size"] in (None, len(data))
    ):
        return found
    return Damaged(
        ErrorKind.CORRUPT_MANIFEST,
        f"it holds {found.num_rows:,} entries in {len(data):,} bytes, and its list says "
        f"{row['entries']} in {row['size']}",
    )


def _entries(row: Row, found: pa.Table, output: _Output) -> None:
    live = found.filter(pc.not_equal(found.column("status"), _DELETED)).combine_chunks()
    shared = "," in row["tables"]
    if not live.num_rows or (shared and not row["kept"]):
        # What two tables let go stays: only one of them may get through with its commit.
        return
    path, size, content = (live.column(n).combine_chunks() for n in ("path", "size", "content"))
    output.many(
        path,
        table_id=int(row["tables"].partition(",")[0]),
        version=row["version"],
        kept=row["kept"],
        kind=pc.take(_KINDS, content),
        size=size,
    )


def _unread(row: Row, error: LakewardenError, output: _Output) -> None:
    """Say that a manifest could not be read, for every table that needs it."""
    if isinstance(error, NotFound) and not row["kept"]:
        return
    note = NOTE_ERROR if row["kept"] or not isinstance(error, Damaged) else NOTE_WARNING
    named = Damaged(
        error.kind,
        f"manifest {row['uri']}: {error.message}"
        + ("; what it needs cannot be known, so nothing goes" if row["kept"] else ""),
    )
    for table_id in row["tables"].split(","):
        output.trouble(int(table_id), row["version"], named, note)
