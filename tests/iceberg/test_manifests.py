"""Manifests are read as PyIceberg and fastavro read them, or called damaged; never read short."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterable, Sequence
from copy import deepcopy
from datetime import timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg import types as t
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.manifest import read_manifest_list as pyiceberg_list
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    IdentityTransform,
    Transform,
    TruncateTransform,
    VoidTransform,
)
from pyiceberg.typedef import Record

from lakewarden.errors import Damaged, ErrorKind
from lakewarden.formats.iceberg import manifests
from lakewarden.formats.iceberg.manifests import (
    ENTRIES,
    MANIFEST_LIST,
    read_manifest_list,
    read_manifests,
)

PATHS = [
    "s3://b/t/data/00000-0-a.parquet",
    "s3://b/t/data/day=2024-01-01/x y%20z%2F+&=.parquet",
    "s3://b/t/data/ключ=значение/データ/🦆.parquet",
    "file:///tmp/new\nline\tand\\back'quote\".orc",
    "/" + "long/" * 400 + "x.avro",
]
METRICS: list[dict[str, Any]] = [
    {},
    {"column_sizes": {}, "value_counts": {}, "lower_bounds": {}, "split_offsets": []},
    {
        "column_sizes": {i: 10**i for i in range(1, 15)},
        "value_counts": {1: 0, 2: 2**40},
        "null_value_counts": {1: 0},
        "nan_value_counts": {2: 1},
        "lower_bounds": {1: b"", 2: b"\x00" * 200, 3: b"\xff"},
        "upper_bounds": {1: b"zz"},
        "key_metadata": b"k" * 70,
        "split_offsets": [4, 2**33],
        "sort_order_id": 1,
    },
]
Row = dict[str, Any]


def entry(
    path: str,
    size: int = 7,
    content: int = 0,
    status: int = 1,
    partition: Record | None = None,
    metrics: dict[str, Any] | None = None,
) -> ManifestEntry:
    data_file = DataFile.from_args(
        content=DataFileContent(content),
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=partition if partition is not None else Record(),
        record_count=3,
        file_size_in_bytes=size,
        **(metrics or {}),
    )
    return ManifestEntry.from_args(
        status=ManifestEntryStatus(status),
        snapshot_id=9,
        sequence_number=None if status == 1 else 4,
        file_sequence_number=None if status == 1 else 4,
        data_file=data_file,
    )


def manifest(
    where: Path,
    entries: Iterable[ManifestEntry],
    version: Any = 2,
    schema: Schema | None = None,
    spec: PartitionSpec | None = None,
    codec: Any = "deflate",
) -> bytes:
    """Return the manifest that PyIceberg writes."""
    schema = schema or Schema(t.NestedField(1, "a", t.LongType()))
    output = PyArrowFileIO().new_output(str(where / "m.avro"))
    writer = write_manifest(version, spec or PartitionSpec(), schema, output, 9, codec)
    with writer:
        for each in entries:
            writer.add_entry(each)
    return (where / "m.avro").read_bytes()


def by_pyiceberg(where: Path, data: bytes) -> list[Row]:
    (where / "r.avro").write_bytes(data)
    file = ManifestFile.from_args(
        manifest_path=str(where / "r.avro"), sequence_number=1, added_snapshot_id=9
    )
    return [
        {
            "path": each.data_file.file_path,
            "size": each.data_file.file_size_in_bytes,
            "content": int(each.data_file.content or 0),
            "status": int(each.status),
        }
        for each in file.fetch_manifest_entry(PyArrowFileIO(), discard_deleted=False)
    ]


def by_fastavro(data: bytes) -> list[Row]:
    rows: Any = fastavro.reader(io.BytesIO(data), handle_unicode_errors="replace")
    return [
        {
            "path": each["data_file"]["file_path"],
            "size": each["data_file"]["file_size_in_bytes"],
            "content": each["data_file"].get("content") or 0,
            "status": each["status"],
        }
        for each in rows
    ]


def read(data: bytes) -> list[Row]:
    """Read in each way; they must agree."""
    file = manifests._File.open(data, manifests._ENTRY)
    plain = manifests._entry_table(manifests._one_by_one(file))
    if file.counts:
        walked = manifests._side_by_side([file])
        assert manifests._entry_table(walked[id(file)]).equals(plain)
    (table,) = read_manifests([data])
    assert isinstance(table, pa.Table)
    assert table.equals(plain)
    assert table.schema.equals(ENTRIES)
    rows: list[Row] = table.to_pylist()
    return rows


def damage(data: bytes) -> str:
    (found,) = read_manifests([data])
    assert isinstance(found, Damaged), found.to_pylist()
    assert found.kind is ErrorKind.CORRUPT_MANIFEST
    assert "\n" not in found.message
    return found.message


def rewritten(data: bytes, codec: str = "null", interval: int = 16000, edit: Any = None) -> bytes:
    """Return the same records with another codec, block size or schema."""
    reader = fastavro.reader(io.BytesIO(data))
    assert isinstance(reader.writer_schema, dict)
    schema, rows = deepcopy(reader.writer_schema), list(reader)
    schema.pop("__fastavro_parsed__", None)
    schema.pop("__named_schemas", None)
    if edit:
        edit(schema, rows)
    return avro(schema, rows, codec, interval)


def avro(schema: Any, rows: Sequence[Any], codec: str = "null", interval: int = 16000) -> bytes:
    stream = io.BytesIO()
    parsed = fastavro.parse_schema(schema)
    fastavro.writer(stream, parsed, rows, codec=codec, sync_interval=interval)
    return stream.getvalue()


def many(count: int) -> list[ManifestEntry]:
    return [
        entry(f"{PATHS[i % 5]}{i}", i * 1000, 0, i % 3, metrics=METRICS[i % 3])
        for i in range(count)
    ]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("metrics", METRICS, ids=["absent", "empty", "full"])
def test_statuses_and_metrics(tmp_path: Path, version: int, metrics: dict[str, Any]) -> None:
    wanted = [entry(path, i, 0, i % 3, metrics=metrics) for i, path in enumerate(PATHS)]
    data = manifest(tmp_path, wanted, version)
    assert read(data) == by_pyiceberg(tmp_path, data)
    assert [row["path"] for row in read(data)] == PATHS
    assert [row["status"] for row in read(data)] == [0, 1, 2, 0, 1]


def test_contents(tmp_path: Path) -> None:
    data = manifest(tmp_path, [entry(f"p{i}", content=i) for i in range(3)])
    assert [row["content"] for row in read(data)] == [0, 1, 2]
    assert read(data) == by_pyiceberg(tmp_path, data)


UTC = timezone.utc  # noqa: UP017
PARTITIONS: list[tuple[t.PrimitiveType, Transform[Any, Any], list[Any]]] = [
    (t.BooleanType(), IdentityTransform(), [True, False]),
    (t.IntegerType(), IdentityTransform(), [0, -1, 2**31 - 1]),
    (t.LongType(), IdentityTransform(), [0, -(2**63), 2**63 - 1]),
    (t.FloatType(), IdentityTransform(), [1.5]),
    (t.DoubleType(), IdentityTransform(), [-0.25]),
    (t.StringType(), IdentityTransform(), ["", "s3://b/t/x", "ü" * 100]),
    (t.DateType(), IdentityTransform(), [0, -1, 20000]),
    (t.TimeType(), IdentityTransform(), [0, 86_399_999_999]),
    (t.TimestampType(), IdentityTransform(), [0, -1, 2**50]),
    (t.TimestamptzType(), IdentityTransform(), [0, 2**50]),
    (t.DecimalType(9, 2), IdentityTransform(), [Decimal("-1.25"), Decimal("99.99")]),
    (t.DecimalType(38, 0), IdentityTransform(), [Decimal(10**37)]),
    (t.UUIDType(), IdentityTransform(), [uuid.UUID(int=1), uuid.UUID(int=2**127)]),
    (t.BinaryType(), IdentityTransform(), [b"", b"\x80" * 300]),
    (t.FixedType(5), IdentityTransform(), [b"12345"]),
    (t.StringType(), BucketTransform(16), [0, 15]),
    (t.StringType(), TruncateTransform(4), ["abcd"]),
    (t.TimestampType(), DayTransform(), [0, 20000]),
    (t.StringType(), VoidTransform(), []),
]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("kind", "transform", "values"), PARTITIONS, ids=str)
def test_partitions(
    tmp_path: Path, version: int, kind: t.PrimitiveType, transform: Any, values: list[Any]
) -> None:
    schema = Schema(t.NestedField(1, "a", kind, required=False))
    spec = PartitionSpec(PartitionField(1, 1000, transform, "a_part"), spec_id=3)
    entries = [
        entry(f"p{i}", partition=Record(value), metrics=METRICS[2])
        for i, value in enumerate([*values, None] * 20)
    ]
    try:
        data = manifest(tmp_path, entries, version, schema, spec)
    except (TypeError, AttributeError, ValueError) as error:
        pytest.skip(f"PyIceberg cannot write it: {error}")
    assert [row["path"] for row in read(data)] == [f"p{i}" for i in range(len(entries))]
    assert read(data) == by_pyiceberg(tmp_path, data)
    assert read(rewritten(data, interval=500)) == read(data)


def test_partitioned_by_several_fields_with_names_that_avro_does_not_have(tmp_path: Path) -> None:
    schema = Schema(
        t.NestedField(1, "a b/ü", t.StringType(), required=False),
        t.NestedField(2, "9", t.LongType(), required=False),
    )
    spec = PartitionSpec(
        PartitionField(1, 1000, IdentityTransform(), "a b/ü"),
        PartitionField(2, 1001, BucketTransform(4), "9_bucket"),
        PartitionField(1, 1002, VoidTransform(), "gone"),
    )
    entries = [
        entry("p", partition=Record("x", 1, None)),
        entry("q", partition=Record(None, 2, None)),
    ]
    data = manifest(tmp_path, entries, 2, schema, spec)
    assert read(data) == by_pyiceberg(tmp_path, data)

    def unsanitised(node: Any) -> Any:
        return json.loads(json.dumps(node).replace("_9_bucket", "9 bucket"))

    header = manifests._header(data)[1]["avro.schema"]
    odd = json.dumps(unsanitised(json.loads(header))).encode()
    assert read(data.replace(_string(header), _string(odd))) == read(data)


def _string(value: bytes) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, "bytes", value)
    return stream.getvalue()


def test_a_batch_of_evolved_specs_keeps_its_order(tmp_path: Path) -> None:
    schema = Schema(t.NestedField(1, "a", t.LongType(), required=False))
    spec = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "a"), spec_id=1)
    data = []
    for i in range(60):
        partitioned = i % 2 == 1
        partition = Record(i) if partitioned else Record()
        entries = [entry(f"m{i}e{j}", i, partition=partition) for j in range(1 + i % 7)]
        data.append(manifest(tmp_path, entries, 2, schema, spec if partitioned else None))
    data[30] = data[30][:-5]
    data[40] = b""
    for i, found in enumerate(read_manifests(data)):
        assert isinstance(found, Damaged) == (i in {30, 40})
        if not isinstance(found, Damaged):
            assert found.to_pylist() == by_pyiceberg(tmp_path, data[i])


def test_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = manifest(tmp_path, many(50))
    monkeypatch.setattr(manifests, "_BATCH", 3000)
    found: list[Any] = list(read_manifests([data] * 5))
    assert [table.num_rows for table in found] == [50] * 5
    assert list(read_manifests([])) == []


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz"])
@pytest.mark.parametrize("interval", [1, 700, 16000, 10**7])
def test_codecs_and_blocks(tmp_path: Path, codec: str, interval: int) -> None:
    data = rewritten(manifest(tmp_path, many(150)), codec, interval)
    assert read(data) == by_fastavro(data)
    assert len(read(data)) == 150


@pytest.mark.parametrize("codec", ["snappy", "zstandard"])
def test_codecs_by_pyarrow(tmp_path: Path, codec: str) -> None:
    data = rewritten(manifest(tmp_path, many(50)))
    assert read(_recoded(data, codec)) == read(data)
    if codec == "snappy":
        assert "checksum" in damage(_recoded(data, codec, spoil=True))


def _recoded(data: bytes, codec: str, spoil: bool = False) -> bytes:
    import zlib

    at, header = manifests._header(data)
    sync = data[at : at + 16]
    file = manifests._File.open(data, manifests._ENTRY)
    head = io.BytesIO()
    metadata = {**header, "avro.codec": codec.encode()}
    fastavro.schemaless_writer(head, {"type": "map", "values": "bytes"}, metadata)
    result = b"Obj\x01" + head.getvalue() + sync
    for count, block in zip(file.counts, file.blocks, strict=True):
        packed = pa.Codec({"zstandard": "zstd"}.get(codec, codec)).compress(block, asbytes=True)
        if codec == "snappy":
            packed += (zlib.crc32(block) ^ spoil).to_bytes(4, "big")
        result += manifests._encoded(count) + _string(packed) + sync
    return result


def test_an_unknown_codec_is_named(tmp_path: Path) -> None:
    data = manifest(tmp_path, [entry("p")])
    assert "'deflat9'" in damage(data.replace(b"deflate", b"deflat9"))


def test_no_entries(tmp_path: Path) -> None:
    def clear(schema: Any, rows: list[Any]) -> None:
        rows.clear()

    assert read(rewritten(manifest(tmp_path, [entry("p")]), edit=clear)) == []


def field_of(schema: Any, name: str) -> Any:
    (found,) = [each for each in schema["fields"] if each["name"] == name]
    return found


def test_deletion_vectors_and_unknown_fields(tmp_path: Path) -> None:
    """As version 3 and a version after it would write."""

    def to_v3(schema: Any, rows: list[Any]) -> None:
        inner = {"type": "record", "name": "later", "fields": [{"name": "x", "type": "long"}]}
        extra = [
            ("first_row_id", ["null", "long"], 142, 5),
            ("referenced_data_file", ["null", "string"], 143, "s3://b/t/data/other.parquet"),
            ("content_offset", ["null", "long"], 144, 4),
            ("content_size_in_bytes", ["null", "long"], 145, 2**40),
            ("later", {"type": "map", "values": ["null", inner, "double"]}, 9001, {"k": {"x": 1}}),
            ("mode", {"type": "enum", "name": "mode", "symbols": ["A", "B"]}, 9002, "B"),
        ]
        data_file = field_of(schema, "data_file")["type"]
        for name, kind, number, _ in extra:
            data_file["fields"].insert(1, {"name": name, "type": kind, "field-id": number})
        schema["fields"].insert(0, {"name": "z", "type": ["null", "later"], "field-id": 9003})
        schema["fields"][0], schema["fields"][-1] = schema["fields"][-1], schema["fields"][0]
        for i, row in enumerate(rows):
            row["z"] = {"x": i} if i % 2 else None
            for name, _, _, value in extra:
                row["data_file"][name] = value if i % 2 or name in {"mode", "later"} else None
            row["data_file"]["file_format"] = "puffin"

    entries = [entry(PATHS[i % 5] + str(i), content=1, metrics=METRICS[i % 3]) for i in range(90)]
    data = rewritten(manifest(tmp_path, entries), interval=1500, edit=to_v3)
    assert read(data) == by_fastavro(data)
    assert {row["content"] for row in read(data)} == {1}


def test_names_count_only_without_ids(tmp_path: Path) -> None:
    def rename(schema: Any, rows: list[Any]) -> None:
        data_file = field_of(schema, "data_file")["type"]
        field_of(data_file, "file_path")["name"] = "location"
        field_of(data_file, "file_format")["name"] = "file_path"
        for row in rows:
            each = row["data_file"]
            each["location"], each["file_path"] = each["file_path"], each["file_format"]

    def drop_ids(schema: Any, rows: list[Any]) -> None:
        for node in (schema, field_of(schema, "data_file")["type"]):
            for each in node["fields"]:
                del each["field-id"]

    data = manifest(tmp_path, [entry(path) for path in PATHS])
    assert read(rewritten(data, edit=rename)) == read(data)
    assert read(rewritten(data, edit=drop_ids)) == read(data)


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("status", 3, "status 3"),
        ("status", -1, "status -1"),
        ("status", None, "without status"),
        ("content", 3, "content 3"),
        ("file_path", None, "without a path"),
        ("file_path", "", "without a path"),
        ("file_size_in_bytes", None, "without size"),
        ("file_size_in_bytes", -5, "size -5"),
    ],
)
def test_values_that_cannot_be(
    tmp_path: Path, where: str, value: Any, message: str, optional: bool
) -> None:
    if value is None and not optional:
        return

    def spoil(schema: Any, rows: list[Any]) -> None:
        top = where == "status"
        node = field_of(schema if top else field_of(schema, "data_file")["type"], where)
        node["type"] = ["null", node["type"]] if optional else node["type"]
        row = rows[20]
        (row if top else row["data_file"])[where] = value

    data = rewritten(manifest(tmp_path, many(40)), interval=1, edit=spoil)
    assert message in damage(data)


def test_null_content_is_data(tmp_path: Path) -> None:
    def clear(schema: Any, rows: list[Any]) -> None:
        node = field_of(field_of(schema, "data_file")["type"], "content")
        node["type"] = ["null", "int"]
        rows[0]["data_file"]["content"] = None

    data = rewritten(manifest(tmp_path, [entry("p"), entry("q")]), edit=clear)
    assert [row["content"] for row in read(data)] == [0, 0]


def test_a_schema_without_paths(tmp_path: Path) -> None:
    data = avro({"type": "record", "name": "r", "fields": [{"name": "a", "type": "int"}]}, [])
    assert "without paths" in damage(data)

    def retype(schema: Any, rows: list[Any]) -> None:
        field_of(field_of(schema, "data_file")["type"], "file_path")["type"] = "long"
        rows[0]["data_file"]["file_path"] = 5

    assert "another type" in damage(rewritten(manifest(tmp_path, [entry("p")]), edit=retype))


entries_strategy = st.lists(
    st.tuples(
        st.text(min_size=1),
        st.integers(0, 2**63 - 1),
        st.integers(0, 2),
        st.integers(0, 2),
        st.one_of(st.none(), st.text(), st.just("x" * 70)),
        st.dictionaries(st.integers(0, 2**31 - 1), st.binary(max_size=80), max_size=4),
    ),
    min_size=1,
    max_size=60,
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=entries_strategy, interval=st.sampled_from([1, 200, 5000]))
def test_any_entries(tmp_path: Path, rows: list[Any], interval: int) -> None:
    schema = Schema(t.NestedField(1, "a", t.StringType(), required=False))
    spec = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "a"))
    entries = [
        entry(path, size, content, status, Record(part), {"lower_bounds": bounds})
        for path, size, content, status, part, bounds in rows
    ]
    data = manifest(tmp_path, entries, 2, schema, spec)
    expected = [dict(zip(("path", "size", "content", "status"), row, strict=False)) for row in rows]
    assert read(data) == by_pyiceberg(tmp_path, data) == expected
    assert read(rewritten(data, interval=interval)) == expected


def block_ends(data: bytes) -> set[int]:
    at, _ = manifests._header(data)
    sync = data[at : at + 16]
    ends = set()
    while (at := data.find(sync, at)) != -1:
        at += 16
        ends.add(at)
    return ends


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_cut_anywhere(tmp_path: Path, codec: str) -> None:
    """Only a cut between two blocks looks whole, to every reader of Avro."""
    data = rewritten(manifest(tmp_path, many(12)), codec, interval=800)
    ends = block_ends(data)
    assert len(ends) > 2
    for length in range(len(data)):
        if length not in ends:
            damage(data[:length])
    for extra in (b"\0", b"\2", b"\xff" * 20, data[-30:]):
        damage(data + extra)


@pytest.mark.parametrize("codec", ["null", "deflate"])
@pytest.mark.parametrize("abreast", [0, 10**9])
def test_overwritten_anywhere(
    tmp_path: Path, codec: str, abreast: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still read is what fastavro reads."""
    monkeypatch.setattr(manifests, "_ABREAST", abreast)
    data = rewritten(manifest(tmp_path, many(9)), codec, interval=800)
    start = manifests._header(data)[0]
    seen = set()
    for at in range(start, len(data), 3 if abreast else 17):
        for bits in (0x01, 0x80, 0xFF):
            bad = bytearray(data)
            bad[at] ^= bits
            (found,) = read_manifests([bytes(bad)])
            seen.add(type(found))
            if not isinstance(found, Damaged):
                assert found.num_rows == 9
                assert found.to_pylist() == by_fastavro(bytes(bad))
    assert seen == {Damaged, pa.Table}


def test_overwritten_header(tmp_path: Path) -> None:
    data = rewritten(manifest(tmp_path, many(9)))
    for at in range(manifests._header(data)[0]):
        bad = bytearray(data)
        bad[at] ^= 0x04
        (found,) = read_manifests([bytes(bad)])
        if not isinstance(found, Damaged):
            assert found.num_rows == 9
            assert found["path"].to_pylist() == [row["path"] for row in by_fastavro(data)]


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=80), st.booleans())
def test_garbage(data: bytes, magic: bool) -> None:
    damage(b"Obj\x01" + data if magic else data)


def test_a_block_that_does_not_end_with_its_records(tmp_path: Path) -> None:
    data = rewritten(manifest(tmp_path, many(5)))
    file = manifests._File.open(data, manifests._ENTRY)
    at, _ = manifests._header(data)
    sync = data[at : at + 16]
    for count in (0, 3, 4, 6):
        head = data[: at + 16] + manifests._encoded(count)
        damage(head + _string(file.blocks[0]) + sync)


def list_of(where: Path, version: Any, files: list[ManifestFile]) -> bytes:
    output = PyArrowFileIO().new_output(str(where / "l.avro"))
    with write_manifest_list(version, output, 9, None, 5, "deflate") as writer:
        writer.add_manifests(files)
    return (where / "l.avro").read_bytes()


def listed(i: int, content: int = 0, key: bytes | None = None) -> ManifestFile:
    return ManifestFile.from_args(
        manifest_path=PATHS[i % 5],
        manifest_length=2**33 + i,
        partition_spec_id=i,
        content=ManifestContent(content),
        sequence_number=4,
        min_sequence_number=1,
        added_snapshot_id=2**62 + i,
        added_files_count=i,
        existing_files_count=10,
        deleted_files_count=100,
        added_rows_count=1,
        existing_rows_count=1,
        deleted_rows_count=1,
        partitions=None,
        key_metadata=key,
    )


def expected_list(where: Path, data: bytes) -> list[Row]:
    (where / "e.avro").write_bytes(data)
    return [
        {
            "path": each.manifest_path,
            "length": each.manifest_length,
            "content": int(each.content or 0),
            "entries": (each.added_files_count or 0)
            + (each.existing_files_count or 0)
            + (each.deleted_files_count or 0),
            "live": (each.added_files_count or 0) + (each.existing_files_count or 0),
            "encrypted": each.key_metadata is not None,
        }
        for each in pyiceberg_list(PyArrowFileIO().new_input(str(where / "e.avro")))
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_lists(tmp_path: Path, version: int) -> None:
    files = [listed(i, i % 2 if version == 2 else 0, b"k" if i == 3 else None) for i in range(7)]
    data = list_of(tmp_path, version, files)
    table = read_manifest_list(data).fresh
    assert table.schema.equals(MANIFEST_LIST)
    assert table.to_pylist() == expected_list(tmp_path, data)
    assert table["entries"].to_pylist() == [110 + i for i in range(7)]
    assert table["encrypted"].to_pylist() == [i == 3 for i in range(7)]
    for length in range(len(data)):
        if length not in block_ends(data):
            with pytest.raises(Damaged):
                read_manifest_list(data[:length])


def test_old_lists(tmp_path: Path) -> None:
    """Counts under their first names, or none, and no content."""

    def old(schema: Any, rows: list[Any]) -> None:
        schema["fields"] = [f for f in schema["fields"] if f["name"] != "content"]
        for kind in ("added", "existing", "deleted"):
            node = field_of(schema, f"{kind}_files_count")
            node["name"] = f"{kind}_data_files_count"
            node["type"] = ["null", "int"]
            for i, row in enumerate(rows):
                row[node["name"]] = None if i == 1 and kind == "deleted" else 2

    def without(schema: Any, rows: list[Any]) -> None:
        schema["fields"] = [f for f in schema["fields"] if not f["name"].endswith("files_count")]

    def without_ids(schema: Any, rows: list[Any]) -> None:
        old(schema, rows)
        for each in schema["fields"]:
            del each["field-id"]

    data = list_of(tmp_path, 1, [listed(0), listed(1)])
    for edit, entries in ((old, [6, None]), (without_ids, [6, None]), (without, [None, None])):
        table = read_manifest_list(rewritten(data, edit=edit)).fresh
        assert table["entries"].to_pylist() == entries
        assert table["content"].to_pylist() == [0, 0]
        assert table["path"].to_pylist() == PATHS[:2]


@pytest.mark.parametrize(
    ("before", "after", "fresh"),
    [
        ([0, 1], [0, 1], []),
        ([0, 1], [0, 1, 2], [2]),
        ([0, 1], [2, 3, 0, 1], [2, 3]),
        ([0, 1], [2, 0, 1, 3], [2, 0, 1, 3]),
        ([0, 1], [0, 2], [0, 2]),
        ([0, 1], [0], [0]),
        ([0, 0], [0, 0, 0], [0]),
    ],
)
def test_lists_that_name_what_another_names(
    tmp_path: Path, before: list[int], after: list[int], fresh: list[int]
) -> None:
    base = read_manifest_list(list_of(tmp_path, 2, [listed(i) for i in before]))
    found = read_manifest_list(list_of(tmp_path, 2, [listed(i) for i in after]), base)
    assert found.number == len(after)
    assert found.fresh["path"].to_pylist() == [PATHS[i] for i in fresh]
    alone = read_manifest_list(list_of(tmp_path, 2, [listed(i) for i in after]))
    assert (found.raw, found.schema) == (alone.raw, alone.schema)


def test_lists_of_another_schema_are_read_whole(tmp_path: Path) -> None:
    base = read_manifest_list(list_of(tmp_path, 1, [listed(0)]))
    assert read_manifest_list(list_of(tmp_path, 2, [listed(0)]), base).fresh.num_rows == 1


def test_damage_beside_what_is_known_is_found(tmp_path: Path) -> None:
    """Of the bytes before those of the other list, every length but the right one is refused."""
    data = rewritten(list_of(tmp_path, 2, [listed(1), listed(0)]))
    base = read_manifest_list(rewritten(list_of(tmp_path, 2, [listed(0)])))
    at, _ = manifests._header(data)
    sync = data[at : at + 16]
    front = read_manifest_list(data).raw.removesuffix(base.raw)
    for length in range(1, len(front) + 1):
        block = _string(front[:length] + base.raw)
        cut = data[: at + 16] + manifests._encoded(2) + block + sync
        if length == len(front):
            assert read_manifest_list(cut, base).fresh["path"].to_pylist() == [PATHS[1]]
        else:
            with pytest.raises(Damaged):
                read_manifest_list(cut, base)


def test_lists_with_values_that_cannot_be(tmp_path: Path) -> None:
    def content(schema: Any, rows: list[Any]) -> None:
        rows[0]["content"] = 2

    def length(schema: Any, rows: list[Any]) -> None:
        rows[0]["manifest_length"] = -1

    data = list_of(tmp_path, 2, [listed(0)])
    for edit in (content, length):
        with pytest.raises(Damaged, match="not known"):
            read_manifest_list(rewritten(data, edit=edit))


def test_an_empty_list(tmp_path: Path) -> None:
    def clear(schema: Any, rows: list[Any]) -> None:
        rows.clear()

    empty = read_manifest_list(rewritten(list_of(tmp_path, 2, [listed(0)]), edit=clear))
    assert (empty.number, empty.fresh.num_rows) == (0, 0)
