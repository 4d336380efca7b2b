"""Which manifests a snapshot names, and which files a manifest names.

Both are Avro files.  Only a path, a size and two codes of each entry matter here, but to find the
next entry all of an entry must be walked, and a writer puts metrics of every column into it.
PyIceberg and fastavro build what they walk over, and neither tells when a block goes on after its
last record.  A manifest that is read short would lose live data files, so this is done here, and
checked:

- Blocks are taken apart here: magic, header, counts, sizes, sync markers, checksums.
- The blocks of a batch are walked *side by side*: one numpy step reads the next number of every
  block.  The step costs the same for one block and for hundreds.
- A block must end exactly where its last record ends.
- Whatever does not pass, or has too few blocks for that to pay, is read by fastavro, block by
  block, with the same checks.  Only blocks that fastavro cannot read either are called damaged.

Fields are found by their Iceberg field id, since names changed over time; by name if a writer left
the ids out.
"""

from __future__ import annotations

import bz2
import io
import json
import lzma
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lakewarden.errors import Damaged, ErrorKind

#: One row per manifest that a snapshot names.
MANIFEST_LIST = pa.schema(
    [
        ("path", pa.string()),
        ("length", pa.int64()),
        ("content", pa.int32()),
        #: All entries, and those of files that were there when it was written; null if not told.
        ("entries", pa.int64()),
        ("live", pa.int64()),
        ("encrypted", pa.bool_()),
    ]
)
#: One row per entry of a manifest.
ENTRIES = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("content", pa.int32()),
        ("status", pa.int32()),
    ]
)

Ints = NDArray[np.int64]
Step = Callable[[Ints], Ints]
Read = Callable[[Ints], tuple[Ints, Ints]]
#: A list of Python values, or an Arrow array.
Columns = dict[str, Any]
#: What is wanted of a record: its name here, and how to get there, as field id and names.
Wanted = Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]]

_DATA_FILE = (2, ("data_file",))
_ENTRY: Wanted = {
    "status": ((0, ("status",)),),
    "path": (_DATA_FILE, (100, ("file_path",))),
    "size": (_DATA_FILE, (104, ("file_size_in_bytes",))),
    "content": (_DATA_FILE, (134, ("content",))),
}
_MANIFEST: Wanted = {
    "path": ((500, ("manifest_path",)),),
    "length": ((501, ("manifest_length",)),),
    "content": ((517, ("content",)),),
    "added": ((504, ("added_files_count", "added_data_files_count")),),
    "existing": ((505, ("existing_files_count", "existing_data_files_count")),),
    "deleted": ((506, ("deleted_files_count", "deleted_data_files_count")),),
    "key_metadata": ((519, ("key_metadata",)),),
}
_COUNTS = ("added", "existing", "deleted")

_MAGIC = b"Obj\x01"
_SYNC = 16
#: Inflated bytes that are walked together; they are in memory at once.
_BATCH = 64 << 20
#: Entries per numpy step from which walking side by side is faster than fastavro.
_ABREAST = 32
#: Where a cursor goes that met nonsense.  Beyond any buffer, and numbers there read as zero.
_FAR = 1 << 36
_INSIDE = (-1,)
_NULL = np.iinfo(np.int64).min
#: More items in one array than tables have columns; not worth trying side by side.
_MANY = 1 << 12
_ZIGZAG = (np.arange(256) >> 1) ^ -(np.arange(256) & 1)
_WIDTHS = {"null": 0, "boolean": 1, "float": 4, "double": 8}
#: What reading nonsense with a library can end in.
_UNREADABLE = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RecursionError,
    TypeError, ValueError, lzma.LZMAError, zlib.error, fastavro.schema.SchemaParseException,
    fastavro.schema.UnknownType,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ManifestList:
    """A manifest list, compared with another."""

    #: A `MANIFEST_LIST` of what the other does not name.
    fresh: pa.Table
    #: Manifests in all.
    number: int
    schema: str
    raw: bytes


def read_manifest_list(data: bytes, base: ManifestList | None = None) -> ManifestList:
    """Read a manifest list, or what it names before or after all that another one names.

    Most of a list is what the list of the snapshot before it named, in the same bytes.

    A list that was cut exactly between two blocks cannot be told from a shorter one; the same
    holds for manifests, of which the list knows the length and the number of entries.
    """
    file = _File.open(data, _MANIFEST)
    raw, number = b"".join(file.blocks), sum(file.counts)
    if base is not None and base.raw and base.schema == file.text:
        # Records have no mark between them, but only one way to be read from the left: if one part
        # of the bytes is exactly so many records, and the rest is that of the other list, so be it.
        for begin, end in ((0, len(raw) - len(base.raw)), (len(base.raw), len(raw))):
            rest = raw[:begin] + raw[end:]
            if begin <= end and rest == base.raw and number >= base.number:
                part = replace(file, counts=[number - base.number], blocks=[raw[begin:end]])
                try:
                    return ManifestList(_list_table(_one_by_one(part)), number, file.text, raw)
                except Damaged:
                    break
    return ManifestList(_list_table(_one_by_one(file)), number, file.text, raw)


def read_manifests(data: Sequence[bytes]) -> Iterator[pa.Table | Damaged]:
    """Yield `ENTRIES` of each manifest, in order, or what is wrong with it."""
    batch: list[_File | Damaged] = []
    size = 0
    for one in data:
        try:
            file = _File.open(one, _ENTRY)
            size += sum(map(len, file.blocks))
            batch.append(file)
        except Damaged as damaged:
            batch.append(damaged)
        if size >= _BATCH:
            yield from _read_batch(batch)
            batch, size = [], 0
    yield from _read_batch(batch)


def _read_batch(batch: Sequence[_File | Damaged]) -> Iterator[pa.Table | Damaged]:
    alike: dict[str, list[_File]] = defaultdict(list)
    for file in batch:
        if isinstance(file, _File) and file.counts:
            alike[file.text].append(file)
    walked: dict[int, Columns] = {}
    for files in alike.values():
        counts = [count for file in files for count in file.counts]
        if sum(counts) >= _ABREAST * max(counts):
            walked.update(_side_by_side(files))
    for file in batch:
        yield file if isinstance(file, Damaged) else _entries(file, walked.get(id(file)))


def _entries(file: _File, walked: Columns | None) -> pa.Table | Damaged:
    if walked is not None:
        try:
            return _entry_table(walked)
        except Damaged:
            pass
    try:
        return _entry_table(_one_by_one(file))
    except Damaged as damaged:
        return damaged


def _entry_table(columns: Columns) -> pa.Table:
    table = _table(columns, ENTRIES)
    _require(table, "content", 2)
    _require(table, "status", 2)
    _require(table, "size", None)
    return table


def _list_table(columns: Columns) -> pa.Table:
    counts = zip(*(columns[name] for name in _COUNTS), strict=True)
    columns["entries"], columns["live"] = [], []
    for added, existing, deleted in counts:
        live = None if added is None or existing is None else added + existing
        columns["live"].append(live)
        columns["entries"].append(None if live is None or deleted is None else live + deleted)
    columns["encrypted"] = [key is not None for key in columns["key_metadata"]]
    table = _table(columns, MANIFEST_LIST)
    _require(table, "content", 1)
    _require(table, "length", None)
    return table


def _table(columns: Columns, schema: pa.Schema) -> pa.Table:
    try:
        arrays = [
            column.cast(each.type) if isinstance(column, pa.Array) else pa.array(column, each.type)
            for each, column in ((each, columns[each.name]) for each in schema)
        ]
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise _damaged(f"holds a value of another type: {_line(error)}") from error
    table = pa.table(arrays, schema)
    # As in Java, a file that does not say what it contains contains data.
    content = pc.fill_null(table["content"], 0)
    table = table.set_column(schema.get_field_index("content"), schema.field("content"), content)
    if table["path"].null_count or pc.any(pc.equal(table["path"], "")).as_py():
        raise _damaged("has an entry without a path")
    return table


def _require(table: pa.Table, name: str, most: int | None) -> None:
    """Raise unless each value is there, not negative, and at most `most`."""
    values = table[name]
    if values.null_count:
        raise _damaged(f"has an entry without {name}")
    for value in pc.min_max(values).as_py().values() if len(values) else ():
        if value < 0 or (most is not None and value > most):
            raise _damaged(f"has an entry with {name} {value}, which is not known")


def _damaged(what: str) -> Damaged:
    return Damaged(ErrorKind.CORRUPT_MANIFEST, f"the Avro file {what}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@dataclass(frozen=True)
class _File:
    """An Avro file taken apart: its schema, and its blocks, inflated."""

    text: str
    schema: Any
    #: Where the wanted fields are, as positions: `(4, 1)` is the second field in the fifth.
    places: Mapping[tuple[int, ...], str]
    absent: frozenset[str]
    counts: list[int] = field(default_factory=list)
    blocks: list[bytes] = field(default_factory=list)

    @classmethod
    def open(cls, data: bytes, wanted: Wanted) -> _File:
        try:
            at, header = _header(data)
            codec = header.get("avro.codec", b"null").decode()
            text = header["avro.schema"].decode()
            schema, places = _understood(text, wanted is _ENTRY)
            file = cls(text, schema, places, frozenset(wanted) - set(places.values()))
        except _UNREADABLE as error:
            raise _damaged(f"has no readable header: {_line(error)}") from error
        if "path" in file.absent:
            raise _damaged("has a schema without paths; it is no manifest or manifest list")
        if codec not in _INFLATE:
            raise _damaged(f"is compressed with {codec[:40]!r}, which cannot be read here")
        file._fill(data, at, _INFLATE[codec])
        return file

    def _fill(self, data: bytes, at: int, inflate: Callable[[bytes], bytes]) -> None:
        sync = data[at : at + _SYNC]
        at += _SYNC
        try:
            if len(sync) < _SYNC:
                raise EOFError("the file ends in its header")
            while at < len(data):
                count, at = _number(data, at)
                size, at = _number(data, at)
                if count < 0 or size < 0:
                    raise ValueError(f"a block of {count} records in {size} bytes")
                if data[at + size : at + size + _SYNC] != sync:
                    raise ValueError("a block does not end in the sync marker")
                block = inflate(data[at : at + size])
                # A record with a path in it has bytes.
                if count > len(block):
                    raise ValueError(f"a block of {count} records in {len(block)} bytes")
                self.counts.append(count)
                self.blocks.append(block)
                at += size + _SYNC
        except _UNREADABLE as error:
            raise _damaged(f"is cut off or overwritten: {_line(error)}") from error


@lru_cache(maxsize=256)
def _understood(text: str, entries: bool) -> tuple[Any, dict[tuple[int, ...], str]]:  # noqa: FBT001
    """Read a schema; manifests of one table, and often of many, have the same."""
    schema = json.loads(text, object_hook=_plain)
    return schema, _locate(schema, _ENTRY if entries else _MANIFEST)


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """Return what fastavro makes of a schema, as the schema of a block."""
    numbered = _numbered(json.loads(text, object_hook=_plain))
    return fastavro.parse_schema({"type": "array", "items": numbered})


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        shift += 7
        if byte < 128:
            return (value >> 1) ^ -(value & 1), at
        if shift > 63:
            raise ValueError("a number is longer than ten bytes")


def _header(data: bytes) -> tuple[int, dict[str, bytes]]:
    if not data.startswith(_MAGIC):
        raise ValueError(f"it starts with {data[:4]!r}")
    found: dict[str, bytes] = {}
    at = len(_MAGIC)
    while True:
        count, at = _number(data, at)
        if count == 0:
            return at, found
        if count < 0:
            _, at = _number(data, at)
        for _ in range(abs(count)):
            pair = []
            for _ in range(2):
                size, at = _number(data, at)
                if not 0 <= size <= len(data) - at:
                    raise EOFError("the file ends in its header")
                pair.append(data[at : at + size])
                at += size
            found[pair[0].decode()] = pair[1]


def _plain(node: dict[str, Any]) -> dict[str, Any]:
    """Drop what says how to show or default a value; only its encoding matters."""
    return {key: value for key, value in node.items() if key not in {"default", "logicalType"}}


def _locate(schema: Any, wanted: Wanted) -> dict[tuple[int, ...], str]:
    places = {}
    for key, way in wanted.items():
        node, place = schema, []
        for number, names in way:
            fields = node["fields"]
            found = [i for i, f in enumerate(fields) if f.get("field-id") == number] or [
                i for i, f in enumerate(fields) if "field-id" not in f and f["name"] in names
            ]
            if not found:
                break
            place.append(found[0])
            node = fields[found[0]]["type"]
        else:
            places[tuple(place)] = key
    return places


def _snappy(block: bytes) -> bytes:
    # A snappy block begins with its inflated size, an unsigned number; Avro appends a checksum.
    size = shift = 0
    for byte in block:
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if size > 32 * len(block) + 64:
        raise ValueError("a snappy block cannot be that small")
    inflated: bytes = pa.Codec("snappy").decompress(block[:-4], size, asbytes=True)
    if zlib.crc32(inflated) != int.from_bytes(block[-4:], "big"):
        raise ValueError("the checksum of a block differs")
    return inflated


def _deflate(block: bytes) -> bytes:
    stream = zlib.decompressobj(-15)
    inflated = stream.decompress(block)
    if not stream.eof:
        raise ValueError("a deflated block does not end")
    return inflated


def _zstandard(block: bytes) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(block), "zstd") as stream:
        inflated: bytes = stream.read()
    return inflated


_INFLATE: Mapping[str, Callable[[bytes], bytes]] = {
    "null": bytes,
    "deflate": _deflate,
    "snappy": _snappy,
    "zstandard": _zstandard,
    "bzip2": bz2.decompress,
    "xz": lzma.decompress,
}


def _one_by_one(file: _File) -> Columns:
    """Read with fastavro, a block as the array that it would be without its end."""
    columns: Columns = {key: [] for key in [*file.places.values(), *file.absent]}
    try:
        parsed = _parsed(file.text)
        for count, block in zip(file.counts, file.blocks, strict=True):
            stream = io.BytesIO(_encoded(count) + block + b"\0")
            rows: Any = fastavro.schemaless_reader(stream, parsed, None) if count else []
            if len(rows) != count or (count and stream.read(1)) or (block and not count):
                raise ValueError("a block does not end with its last record")
            for place, key in file.places.items():
                values = rows
                for position in place:
                    values = [row[f"f{position}"] for row in values]
                columns[key].extend(values)
            for key in file.absent:
                columns[key].extend([None] * count)
    except _UNREADABLE as error:
        raise _damaged(f"cannot be decoded: {_line(error)}") from error
    return columns


def _encoded(count: int) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, "long", count)
    return stream.getvalue()


def _numbered(node: Any) -> Any:
    """Name fields by position: the name of a partition field may be none in Avro."""
    if isinstance(node, list):
        return [_numbered(each) for each in node]
    if not isinstance(node, dict):
        return node
    items = node.get("items")
    if items == "null" or (isinstance(items, dict) and items.get("fields") == []):
        raise ValueError("an array of nothing, of which there is no end")
    if node.get("type") == "record":
        fields = [
            {"name": f"f{i}", "type": _numbered(each["type"])}
            for i, each in enumerate(node["fields"])
        ]
        return {**node, "fields": fields}
    return {key: _numbered(value) for key, value in node.items()}


def _side_by_side(files: Sequence[_File]) -> dict[int, Columns]:
    """Read the blocks of files of one schema all at once; leave out files that do not come out."""
    counts = np.array([count for file in files for count in file.counts])
    sizes = np.array([len(block) for file in files for block in file.blocks])
    data = b"".join([*(block for file in files for block in file.blocks), b"\0"])
    walk = _Walk(data, files[0].places)
    try:
        record = walk.step(files[0].schema, ())
    except _UNREADABLE:
        return {}
    # Blocks of many records first: those that still have some are then a slice.
    order = np.argsort(-counts, kind="stable")
    ends = np.cumsum(sizes)
    at = (ends - sizes)[order]
    first = (np.cumsum(counts) - counts)[order]
    columns = {key: np.full((2, counts.sum()), _NULL) for key in files[0].places.values()}
    for row in range(counts.max()):
        abreast = np.count_nonzero(counts > row)
        at[:abreast] = record(at[:abreast])
        for key, found in walk.found.items():
            columns[key][:, first[:abreast] + row] = found
    # A cursor only goes forward: one that is at the end has never been beyond.
    even = np.empty(len(counts), np.bool_)
    even[order] = at == ends[order]
    result = {}
    block = entry = 0
    for file in files:
        rows = slice(entry, entry := entry + sum(file.counts))
        if even[block : (block := block + len(file.counts))].all():
            nulls = dict.fromkeys(file.absent, pa.nulls(rows.stop - rows.start))
            result[id(file)] = _cut(columns, rows, data) | nulls
    return result


def _cut(columns: Mapping[str, Ints], rows: slice, data: bytes) -> Columns:
    result: Columns = {}
    for key, column in columns.items():
        values = column[0, rows]
        if key == "path":
            result[key] = _strings(values, column[1, rows], data)
        else:
            result[key] = pa.array(values, mask=values == _NULL)
    return result


def _strings(starts: Ints, ends: Ints, data: bytes) -> pa.Array:
    if (starts == _NULL).any():
        return pa.nulls(len(starts), pa.binary())
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    joined = b"".join([data[start:end] for start, end in spans])
    offsets = np.concatenate(([0], np.cumsum(ends - starts)))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.large_binary(), len(starts), buffers)


class _Walk:
    """Steps over the next value in every block at once.

    A step takes the positions of the value and returns those after it.  Nonsense sends a position
    far away, where all reads as zero, and which is not the end of any block.
    """

    def __init__(self, data: bytes, places: Mapping[tuple[int, ...], str]) -> None:
        self._bytes = np.frombuffer(data, np.uint8)
        self._places = places
        self._types: dict[str, Step] = {
            **dict.fromkeys(("int", "long", "enum"), self._skip_number),
            **dict.fromkeys(("string", "bytes"), self._skip_string),
            **{kind: self._forward(width) for kind, width in _WIDTHS.items()},
        }
        #: What the last step read of the wanted fields: numbers, or starts and ends of strings.
        self.found: dict[str, tuple[Ints, Ints]] = {}

    def step(self, schema: Any, place: tuple[int, ...]) -> Step:
        """Return the step over a value; `place` is where it is in a record, `_INSIDE` if deeper."""
        if place in self._places:
            return self._wanted(schema, self._places[place])
        if isinstance(schema, list):
            return self._union([self.step(each, _INSIDE) for each in schema])
        kind = schema["type"] if isinstance(schema, dict) else schema
        if isinstance(kind, dict | list):
            return self.step(kind, place)
        if kind == "record":
            fields = enumerate(schema["fields"])
            made = self._record([self.step(each["type"], (*place, i)) for i, each in fields])
        elif kind == "array":
            made = self._array(self.step(schema["items"], _INSIDE))
        elif kind == "map":
            pair = [self._skip_string, self.step(schema["values"], _INSIDE)]
            made = self._array(self._record(pair))
        else:
            made = self._forward(schema["size"]) if kind == "fixed" else self._types[kind]
        # A type with wanted fields in it stands in one place only.
        name = schema.get("name") if isinstance(schema, dict) else None
        if name is not None and all(way[: len(place)] != place for way in self._places):
            self._types[name] = made
        return made

    def _wanted(self, schema: Any, key: str) -> Step:
        kinds = schema if isinstance(schema, list) else [schema]
        read = {"int": self._number, "long": self._number, "string": self._string}
        reads = [read[kind] if kind != "null" else None for kind in kinds]

        def note(at: Ints) -> Ints:
            if len(reads) == 1 and reads[0] is not None:
                self.found[key] = reads[0](at)
                return self.found[key][1]
            branch, at = self._number(at)
            value = np.full(len(at), _NULL)
            after = at + _FAR
            for number, read in enumerate(reads):
                chosen = np.flatnonzero(branch == number)
                if read is None:
                    after[chosen] = at[chosen]
                else:
                    value[chosen], after[chosen] = read(at[chosen])
            self.found[key] = value, after
            return after

        return note

    def _number(self, at: Ints) -> tuple[Ints, Ints]:
        byte = self._bytes.take(at, mode="clip")
        at = at + 1
        more = (byte > 127).nonzero()[0]
        if not more.size:
            return _ZIGZAG.take(byte), at
        value = (byte & 127).astype(np.uint64)
        for shift in range(7, 70, 7):
            byte = self._bytes.take(at[more], mode="clip")
            value[more] |= (byte & 127).astype(np.uint64) << np.uint64(shift)
            at[more] += 1
            more = more[byte > 127]
            if not more.size:
                break
        at[more] += _FAR
        return (value >> np.uint64(1)).view(np.int64) ^ -(value & np.uint64(1)).view(np.int64), at

    def _skip_number(self, at: Ints) -> Ints:
        more = (self._bytes.take(at, mode="clip") > 127).nonzero()[0]
        at = at + 1
        for _ in range(9):
            if not more.size:
                return at
            next_ = at[more]
            at[more] = next_ + 1
            more = more[self._bytes.take(next_, mode="clip") > 127]
        at[more] += _FAR
        return at

    def _string(self, at: Ints) -> tuple[Ints, Ints]:
        size, at = self._number(at)
        # A negative size is a huge one without its sign.
        return at, at + np.minimum(size.view(np.uint64), np.uint64(_FAR)).view(np.int64)

    def _skip_string(self, at: Ints) -> Ints:
        return self._string(at)[1]

    @staticmethod
    def _forward(width: int) -> Step:
        return lambda at: at + width

    @staticmethod
    def _record(steps: Sequence[Step]) -> Step:
        def walk(at: Ints) -> Ints:
            for step in steps:
                at = step(at)
            return at

        return walk

    def _union(self, steps: Sequence[Step]) -> Step:
        def walk(at: Ints) -> Ints:
            branch, at = self._number(at)
            lowest, highest = branch.min(), branch.max()
            if lowest == highest and 0 <= lowest < len(steps):
                return steps[int(lowest)](at)
            after = at + _FAR
            for number, step in enumerate(steps):
                chosen = np.flatnonzero(branch == number)
                if chosen.size:
                    after[chosen] = step(at[chosen])
            return after

        return walk

    def _array(self, item: Step) -> Step:
        def walk(at: Ints) -> Ints:
            going = np.arange(len(at))
            at = at.copy()
            while going.size:
                count, here = self._number(at[going])
                # After a negative count comes a size, to skip by; walking shows if it fits.
                sized = np.flatnonzero(count < 0)
                if sized.size:
                    here[sized] = self._skip_number(here[sized])
                left = np.abs(count)
                nonsense = (left > _MANY) | (left < 0)
                here[nonsense] += _FAR
                left[nonsense] = 0
                for _ in range(left.min()):
                    here = item(here)
                left -= left.min()
                while (rest := np.flatnonzero(left)).size:
                    here[rest] = item(here[rest])
                    left[rest] -= 1
                at[going] = here
                going = going[count != 0]
            return at

        return walk
