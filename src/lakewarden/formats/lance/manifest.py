"""Which files a Lance manifest names.

The manifest is read directly, one GET each, instead of through pylance: opening a dataset costs
several requests, hides detached versions and names no blob sidecars.  The layout is a public
specification: sections, then `u32 length + Manifest`, then the 16-byte tail
`i64 position of the manifest, u16 major, u16 minor, "LANC"`.

Only fields that name files are decoded; messages without any are declared as bytes and skipped at
C speed.  Neighbouring versions share nearly all fragments, byte for byte, so a fragment that was
decoded before (`seen`) is not decoded again: reading a history costs its changes, not its square.  A newer Lance may add fields: whatever an unknown field contains that could be a name is
reported as a *mention*, and a mentioned file is kept.  A feature flag that is not known here means
the rules may have changed: reading such a manifest raises, and nothing goes for that table.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from google.protobuf.unknown_fields import UnknownFieldSet

from lakewarden.errors import Damaged, ErrorKind

_TAIL = struct.Struct("<qHH4s")
_LENGTH = struct.Struct("<I")
_MAGIC = b"LANC"
#: Bits 0 to 8: deletion files, stable row ids, v2 format, config, base paths, no transaction file,
#: overlays, covering indices, mixed file versions.
_KNOWN_FLAGS = (1 << 9) - 1
_WIRE_LENGTH_DELIMITED = 2
_EXTERNAL = ("external_row_ids", "external_updated_at", "external_created_at")
#: Names of indices that Lance keeps for itself, such as `__lance_frag_reuse`.
_SYSTEM_INDEX = "__lance_"
_YEAR_10000 = 253_402_300_800

_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "u64": _FIELD.TYPE_UINT64,
    "u32": _FIELD.TYPE_UINT32,
    "i64": _FIELD.TYPE_INT64,
    "i32": _FIELD.TYPE_INT32,
    "bool": _FIELD.TYPE_BOOL,
    "str": _FIELD.TYPE_STRING,
    "raw": _FIELD.TYPE_BYTES,
}
#: message -> field number -> (name, type); `*` repeated, `?` presence is known, a message by name.
_MESSAGES: Mapping[str, Mapping[int, tuple[str, str]]] = {
    "Timestamp": {1: ("seconds", "i64"), 2: ("nanos", "i32")},
    "Entry": {1: ("key", "str"), 2: ("value", "str")},
    "Base": {
        1: ("id", "u32"), 2: ("name", "str"), 3: ("is_dataset_root", "bool"), 4: ("path", "str"),
    },
    "External": {1: ("path", "str"), 2: ("offset", "u64"), 3: ("size", "u64")},
    "DataFile": {
        1: ("path", "str"), 2: ("fields", "*i32"), 3: ("column_indices", "*i32"),
        4: ("major", "u32"), 5: ("minor", "u32"), 6: ("size", "u64"), 7: ("base_id", "?u32"),
    },
    "Overlay": {
        1: ("data_file", "DataFile"), 2: ("shared_bitmap", "raw"),
        3: ("committed_version", "u64"), 4: ("field_coverage", "raw"),
    },
    "Deletion": {
        1: ("file_type", "u64"), 2: ("read_version", "u64"), 3: ("id", "u64"),
        4: ("deleted_rows", "u64"), 7: ("base_id", "?u32"),
    },
    "Fragment": {
        1: ("id", "u64"), 2: ("files", "*DataFile"), 3: ("deletion", "Deletion"),
        4: ("physical_rows", "u64"), 5: ("row_ids", "raw"), 6: ("external_row_ids", "External"),
        7: ("updated_at", "raw"), 8: ("external_updated_at", "External"),
        9: ("created_at", "raw"), 10: ("external_created_at", "External"),
        11: ("overlays", "*Overlay"),
    },
    "Fragments": {2: ("fragments", "*Fragment")},
    "Uuid": {1: ("uuid", "raw")},
    "Index": {
        1: ("uuid", "Uuid"), 2: ("fields", "*i32"), 3: ("name", "str"),
        4: ("dataset_version", "u64"), 5: ("fragment_bitmap", "raw"), 6: ("details", "raw"),
        7: ("index_version", "i32"), 8: ("created_at", "u64"), 9: ("base_id", "?u32"),
        10: ("files", "*raw"), 11: ("covering_fields", "*i32"),
    },
    "IndexSection": {1: ("indices", "*Index")},
    "IndexFile": {1: ("path", "str"), 2: ("size", "u64")},
    "Manifest": {
        1: ("fields", "*raw"), 2: ("fragments", "*raw"), 3: ("version", "u64"),
        4: ("aux", "u64"), 5: ("schema_metadata", "*raw"), 6: ("index_section", "?u64"),
        7: ("timestamp", "Timestamp"), 8: ("tag", "str"), 9: ("reader_flags", "u64"),
        10: ("writer_flags", "u64"), 11: ("max_fragment_id", "u32"),
        12: ("transaction_file", "str"), 13: ("writer_version", "raw"), 14: ("next_row_id", "u64"),
        15: ("data_format", "raw"), 16: ("config", "*Entry"), 17: ("blob_version", "u64"),
        18: ("base_paths", "*Base"), 19: ("table_metadata", "*raw"), 20: ("branch", "str"),
        21: ("transaction_section", "u64"),
    },
}  # fmt: skip


def _build() -> Mapping[str, Any]:
    """Turn the table above into protobuf message classes."""
    file = descriptor_pb2.FileDescriptorProto(
        name="lakewarden/lance.proto", package="lakewarden.lance", syntax="proto3"
    )
    for message_name, fields in _MESSAGES.items():
        declared = file.message_type.add(name=message_name)
        for number, (name, kind) in fields.items():
            bare = kind.lstrip("*?")
            one = declared.field.add(
                name=name,
                number=number,
                label=_FIELD.LABEL_REPEATED if kind[0] == "*" else _FIELD.LABEL_OPTIONAL,
                type=_TYPES.get(bare, _FIELD.TYPE_MESSAGE),
            )
            if bare not in _TYPES:
                one.type_name = f".lakewarden.lance.{bare}"
            if kind[0] == "?":
                one.proto3_optional = True
                one.oneof_index = len(declared.oneof_decl)
                declared.oneof_decl.add(name=f"_{name}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"lakewarden.lance.{name}")
        )
        for name in ("Manifest", "Fragments", "IndexSection", "IndexFile")
    }


_CLASSES = _build()


@dataclass(frozen=True, slots=True, order=True)
class Base:
    """Another place that holds files of this version; `path` as the writer spelled it."""

    path: str
    is_dataset_root: bool


@dataclass(frozen=True, slots=True)
class Manifest:
    """What cleanup needs to know of one version."""

    version: int
    committed: datetime | None
    config: Mapping[str, str]
    bases: Mapping[int, Base]
    #: (base id or None for the version's own root, path below that root).
    named: frozenset[tuple[int | None, str]]
    #: Components of names that fields unknown to us contain.
    mentions: frozenset[str]
    #: The branch the version was written on; empty on main.
    branch: str


#: Fragments remembered per line of versions; beyond it memory matters more than repeated work.
_SEEN_MAX = 1_000_000


class Seen:
    """Fragments whose names were already reported, per meaning of their base ids."""

    def __init__(self) -> None:
        self._fragments: dict[object, set[bytes]] = {}

    def new(self, context: object, fragments: Iterable[bytes]) -> set[bytes]:
        """Return the fragments not seen before in this context."""
        return set(fragments) - self._fragments.get(context, set())

    def remember(self, context: object, fragments: set[bytes]) -> None:
        """Call once the names of these fragments are known for good."""
        known = self._fragments.setdefault(context, set())
        if len(known) + len(fragments) > _SEEN_MAX:
            known.clear()
        known |= fragments


def decode(data: bytes, seen: Seen | None = None, context: object = None) -> Manifest:
    """Decode a manifest file.  Raises Damaged if it is corrupt or needs a newer reader.

    With `seen`, names of fragments that were reported before for an equal `context` and equal
    base paths are left out.
    """
    try:
        parsed, indices = _sections(data)
        bases = {base.id: Base(base.path, base.is_dataset_root) for base in parsed.base_paths}
        seen = seen or Seen()
        context = (context, tuple(sorted(bases.items())))
        fresh = seen.new(context, parsed.fragments)
        fragments = _CLASSES["Fragments"].FromString(_rejoin(fresh))
        manifest = _manifest(parsed, fragments, indices, bases)
        seen.remember(context, fresh)
        return manifest
    except (ValueError, struct.error, message.DecodeError) as error:
        raise _corrupt(error) from error


def transaction_file(data: bytes) -> str:
    """Return the name of the transaction file of a manifest; empty if it has none."""
    try:
        return str(_sections(data)[0].transaction_file)
    except (ValueError, struct.error, message.DecodeError) as error:
        raise _corrupt(error) from error


@dataclass(frozen=True, slots=True)
class Contents:
    """What a version has in it, as far as two versions can be compared by it."""

    version: int
    #: Fragments (their data files, deletions and counts) and columns, as they are written.
    fragments: tuple[bytes, ...]
    columns: tuple[bytes, ...]
    #: Rows that are not deleted; None if some writer has not counted them.
    rows: int | None
    #: The file that says what the version changes; empty if there is none.
    transaction_file: str


def contents(data: bytes) -> Contents:
    """Read what a version has in it.  Raises Damaged if it is corrupt or needs a newer reader."""
    try:
        parsed, _ = _sections(data)
        fragments = _CLASSES["Fragments"].FromString(_rejoin(parsed.fragments)).fragments
    except (ValueError, struct.error, message.DecodeError) as error:
        raise _corrupt(error) from error
    counted = all(
        one.physical_rows and (not one.HasField("deletion") or one.deletion.deleted_rows)
        for one in fragments
    )
    rows = sum(one.physical_rows - one.deletion.deleted_rows for one in fragments)
    return Contents(
        parsed.version,
        tuple(parsed.fragments),
        tuple(parsed.fields),
        rows if counted else None,
        parsed.transaction_file,
    )


@dataclass(frozen=True, slots=True)
class Files:
    """What a version needs to be read, with the sizes that it tells; a directory ends with a slash."""

    bases: Mapping[int, Base]
    named: Mapping[tuple[int | None, str], int | None]


def files(data: bytes, seen: Seen | None = None, context: object = None) -> Files:
    """Read which files a version needs; with `seen`, of fragments those not reported before."""
    try:
        parsed, indices = _sections(data)
        bases = {base.id: Base(base.path, base.is_dataset_root) for base in parsed.base_paths}
        seen = seen or Seen()
        context = (context, tuple(sorted(bases.items())))
        fresh = seen.new(context, parsed.fragments)
        named: dict[tuple[int | None, str], int | None] = {}
        for fragment in _CLASSES["Fragments"].FromString(_rejoin(fresh)).fragments:
            named |= dict.fromkeys(_named_by_fragment(fragment))
            for file in (*fragment.files, *(one.data_file for one in fragment.overlays)):
                base = file.base_id if file.HasField("base_id") else None
                named[base, f"data/{file.path}"] = file.size or None
        for index in indices.indices:
            named |= _sizes_of_index(index)
        seen.remember(context, fresh)
    except (ValueError, struct.error, message.DecodeError) as error:
        raise _corrupt(error) from error
    return Files(bases, named)


def _sizes_of_index(index: Any) -> dict[tuple[int | None, str], int | None]:
    base = index.base_id if index.HasField("base_id") else None
    directory = f"_indices/{uuid.UUID(bytes=index.uuid.uuid)}/"
    told = [_CLASSES["IndexFile"].FromString(raw) for raw in index.files]
    if told:
        return {(base, f"{directory}{one.path}"): one.size or None for one in told}
    # Small ones are written into the manifest and have no files.
    return {} if index.name.startswith(_SYSTEM_INDEX) else {(base, directory): None}


def _corrupt(error: Exception) -> Damaged:
    return Damaged(ErrorKind.CORRUPT_MANIFEST, f"the manifest is corrupt or truncated ({error})")


def _sections(data: bytes) -> tuple[Any, Any]:
    """Return the manifest and its indices as messages, if we know all that they may mean."""
    if len(data) < _TAIL.size:
        raise ValueError("the file is too short")
    position, _, _, magic = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    if magic != _MAGIC or position < 0:
        raise ValueError("the file does not end like a Lance manifest")
    parsed = _CLASSES["Manifest"].FromString(_section(data, position))
    if not parsed.version:
        raise ValueError("it carries no version number")
    unknown = (parsed.reader_flags | parsed.writer_flags) & ~_KNOWN_FLAGS
    if unknown:
        raise Damaged(
            ErrorKind.UNSUPPORTED_FEATURE,
            f"version {parsed.version} uses table features this release does not know "
            f"(flags {unknown:#x}); nothing goes: upgrade lakewarden first",
        )
    indices = _CLASSES["IndexSection"]()
    if parsed.HasField("index_section"):
        indices.ParseFromString(_section(data, parsed.index_section))
    return parsed, indices


def _rejoin(fragments: Iterable[bytes]) -> bytes:
    """Put raw fragments back into one message, so that protobuf decodes them in one call."""
    parts: list[bytes] = []
    for raw in fragments:
        length, prefix = len(raw), bytearray(b"\x12")
        while length > 0x7F:
            prefix.append(length & 0x7F | 0x80)
            length >>= 7
        prefix.append(length)
        parts += (bytes(prefix), raw)
    return b"".join(parts)


def _section(data: bytes, position: int) -> bytes:
    (length,) = _LENGTH.unpack_from(data, position)
    start = position + _LENGTH.size
    if start + length > len(data) - _TAIL.size:
        raise ValueError("a section ends beyond the file")
    return data[start : start + length]


def _manifest(parsed: Any, fragments: Any, indices: Any, bases: Mapping[int, Base]) -> Manifest:
    named: set[tuple[int | None, str]] = set()
    mentions: set[str] = set()
    for fragment in fragments.fragments:
        named.update(_named_by_fragment(fragment))
        for field in _EXTERNAL:
            if fragment.HasField(field):
                # Such a path has no base: in a clone the file may lie in the source.
                mentions.update(getattr(fragment, field).path.split("/"))
    for index in indices.indices:
        base = index.base_id if index.HasField("base_id") else None
        segment = str(uuid.UUID(bytes=index.uuid.uuid))
        if index.name.startswith(_SYSTEM_INDEX):
            # Small ones are written into the manifest and have no files, so none can be missing.
            mentions.add(segment)
        else:
            named.add((base, f"_indices/{segment}/"))
        mentions.update(_strings(index.details))
    if parsed.transaction_file:
        named.add((None, f"_transactions/{parsed.transaction_file}"))
    for section in (parsed, fragments, indices):
        if _has_unknown_fields(section):
            mentions.update(_unknown_strings(section))
    moment = parsed.timestamp.seconds + parsed.timestamp.nanos / 1e9
    return Manifest(
        version=parsed.version & ~(1 << 63),
        committed=datetime.fromtimestamp(moment, UTC) if 0 < moment < _YEAR_10000 else None,
        config={entry.key: entry.value for entry in parsed.config},
        bases=bases,
        named=frozenset(named),
        mentions=frozenset(mentions),
        branch=parsed.branch,
    )


def _named_by_fragment(fragment: Any) -> Iterator[tuple[int | None, str]]:
    for file in fragment.files:
        yield (file.base_id if file.HasField("base_id") else None), f"data/{file.path}"
    if fragment.HasField("deletion"):
        deletion = fragment.deletion
        suffix = "bin" if deletion.file_type else "arrow"
        name = f"_deletions/{fragment.id}-{deletion.read_version}-{deletion.id}.{suffix}"
        yield (deletion.base_id if deletion.HasField("base_id") else None), name
    for overlay in fragment.overlays:
        file = overlay.data_file
        yield (file.base_id if file.HasField("base_id") else None), f"data/{file.path}"
    for field in _EXTERNAL:
        if fragment.HasField(field):
            yield None, getattr(fragment, field).path


def _has_unknown_fields(parsed: Any) -> bool:
    """Tell at C speed whether anything in the message, at any depth, was not understood."""
    size = parsed.ByteSize()
    stripped = type(parsed)()
    stripped.CopyFrom(parsed)
    stripped.DiscardUnknownFields()
    return bool(stripped.ByteSize() != size)


def _unknown_strings(parsed: Any) -> Iterator[str]:
    for unknown in UnknownFieldSet(parsed):  # type: ignore[attr-defined]
        if unknown.wire_type == _WIRE_LENGTH_DELIMITED:
            yield from _strings(unknown.data)
    for field, value in parsed.ListFields():
        if field.message_type is not None:
            for one in value if field.is_repeated else (value,):
                yield from _unknown_strings(one)


def _strings(data: bytes) -> Iterator[str]:
    """Yield every component of everything in `data` that could name a file or a directory.

    Protobuf does not tell a string from a nested message, so both readings are followed.
    """
    if len(data) == 16:
        yield str(uuid.UUID(bytes=bytes(data)))
    try:
        text = data.decode()
        if text.isprintable() and text:
            yield from filter(None, text.split("/"))
    except UnicodeDecodeError:
        pass
    for part in _length_delimited(data):
        yield from _strings(part)


def _length_delimited(data: bytes) -> list[bytes]:
    """Return the length-delimited fields of `data` read as a message; empty if it is none."""
    parts, position = [], 0
    try:
        while position < len(data):
            tag, position = _varint(data, position)
            wire = tag & 7
            if wire == 0:
                _, position = _varint(data, position)
            elif wire == 1:
                position += 8
            elif wire == 5:
                position += 4
            elif wire == _WIRE_LENGTH_DELIMITED:
                length, position = _varint(data, position)
                parts.append(data[position : position + length])
                position += length
            else:
                return []
    except IndexError:
        return []
    return parts if position == len(data) else []


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
        if shift > 63:
            raise IndexError("no varint")
