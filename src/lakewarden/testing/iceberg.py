"""Small Iceberg tables of every shape, made with PyIceberg.

Each function makes one snapshot (or one ref) unless it says otherwise.  Every table has the columns
`id`, `name` and `day`; rows are told apart by their id.  What PyIceberg cannot write (delete files,
format version 3) is written here with fastavro and committed through the catalog like the rest.
Nothing of ours is imported.
"""

from __future__ import annotations

import json
import os
import time
import uuid
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    data_file_with_partition,
    manifest_entry_schema_with_data_file,
)
from pyiceberg.partitioning import PartitionField, PartitionFieldValue, PartitionKey, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.serializers import Compressor, ToOutputFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    SetPartitionStatisticsUpdate,
    SetSnapshotRefUpdate,
    SetStatisticsUpdate,
    TableUpdate,
)
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, Transform
from pyiceberg.types import (
    DateType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
)
from pyiceberg.utils.schema_conversion import AvroSchemaConversion
from pyroaring import BitMap
from sqlalchemy import update
from sqlalchemy.orm import Session

DAY = 86400.0
DAY_MS = 86_400_000
MAIN = "main"
#: How a table can be partitioned: the column and what is made of it.
PARTITIONINGS: Mapping[str, tuple[str, int, Transform[Any, Any]]] = {
    "identity": ("name", 2, IdentityTransform()),
    "day": ("day", 3, DayTransform()),
    "bucket": ("id", 1, BucketTransform(4)),
}
SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "name", StringType(), required=False),
    NestedField(3, "day", DateType(), required=False),
)
#: Ids of the two columns of a position delete file, as the specification fixes them.
PATH_ID, POSITION_ID = 2147483546, 2147483545

_DATA, _POSITION_DELETES, _EQUALITY_DELETES = 0, 1, 2
_DATA_MANIFEST, _DELETE_MANIFEST = 0, 1
_ADDED, _DELETED = 1, 2
_SEQUENCES = ("sequence_number", "file_sequence_number")
_FIRST_DAY = date(2026, 1, 1)
#: An empty theta sketch, which is what statistics of no rows hold.
_SKETCH = bytes((1, 3, 3, 0, 0, 0x1E, 0x93, 0xCC))
_VECTOR_MAGIC = bytes((0xD1, 0xD3, 0x39, 0x64))


class Server(Protocol):
    """What is needed of `testing.s3.S3Server`."""

    @property
    def options(self) -> dict[str, str]: ...

    def load(self, bucket: str, prefix: str, directory: str, *, age_days: float = 0) -> None: ...


# -- catalogs --------------------------------------------------------------------------------------


def catalog_properties(root: Path | str, **properties: str) -> dict[str, str]:
    """Return the properties of a catalog in SQLite below `root`; `properties` win."""
    directory = Path(root).absolute()
    return {
        "type": "sql",
        "uri": f"sqlite:///{directory / 'catalog.db'}",
        "warehouse": f"file://{directory / 'warehouse'}",
        **properties,
    }


def s3_properties(server: Server) -> dict[str, str]:
    """Return the catalog properties with which PyIceberg reaches a test server."""
    options = server.options
    return {
        "s3.endpoint": options["aws_endpoint"],
        "s3.access-key-id": options["aws_access_key_id"],
        "s3.secret-access-key": options["aws_secret_access_key"],
        "s3.region": options["aws_region"],
    }


class LakeCatalog(SqlCatalog):
    """PyIceberg's SQL catalog, which here also writes metadata of format version 3.

    Stock PyIceberg reads such metadata, and refuses to write it.
    """

    @staticmethod
    def _write_metadata(metadata: TableMetadata, io: FileIO, metadata_path: str) -> None:
        if metadata.format_version < 3:
            ToOutputFile.table_metadata(metadata, io.new_output(metadata_path))
            return
        # PyIceberg leaves out the row id of a new table, which the specification demands.
        known = {"next-row-id": 0, **metadata.model_dump(mode="json")}
        with io.new_output(metadata_path).create() as file:
            file.write(json.dumps(known).encode())


def catalog(root: Path | str, name: str = "lake", **properties: str) -> LakeCatalog:
    """Open (or create) the catalog in SQLite below `root`."""
    Path(root).mkdir(parents=True, exist_ok=True)
    settings = catalog_properties(root, **properties)
    settings.pop("type")
    return LakeCatalog(name, **settings)


def configure(directory: Path, properties: Mapping[str, str], name: str = "lake") -> dict[str, str]:
    """Write PyIceberg's configuration; returns the environment in which it is found by name."""
    lines = [f"    {key}: {json.dumps(value)}" for key, value in properties.items()]
    text = "\n".join(["catalog:", f"  {name}:", *lines, ""])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ".pyiceberg.yaml").write_text(text)
    return {"PYICEBERG_HOME": str(directory)}


# -- tables and what PyIceberg can do to them ------------------------------------------------------


def rows(start: int, number: int = 3) -> pa.Table:
    """Return rows with the ids from `start`; every third row is of the next day."""
    ids = range(start, start + number)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": pa.array([f"n{one % 4}" for one in ids], pa.string()),
            "day": pa.array([_FIRST_DAY + timedelta(days=one // 3) for one in ids], pa.date32()),
        }
    )


def create(
    where: Catalog,
    name: str = "db.t",
    *,
    partitioning: str = "",
    version: int = 2,
    location: str | None = None,
    properties: Mapping[str, str] | None = None,
) -> Table:
    """Create an empty table, and its namespace where it is missing."""
    where.create_namespace_if_not_exists(name.rpartition(".")[0])
    return where.create_table(
        name,
        SCHEMA,
        location=location,
        partition_spec=_spec(partitioning),
        properties={**(properties or {}), "format-version": str(version)},
    )


def append(table: Table, start: int, number: int = 3, branch: str = MAIN) -> int:
    """Append one data file (one for each partition) and return the snapshot's id."""
    if _by_hand(table):
        return commit(table, Manifest(_data_files(table, rows(start, number))), ref=branch)
    table.append(rows(start, number), branch=branch)
    return _head(table, branch)


def grow(table: Table, steps: int, start: int = 0) -> list[int]:
    """Append `steps` times; returns the ids of the snapshots."""
    return [append(table, start + 10 * step) for step in range(steps)]


def overwrite(table: Table, start: int, number: int = 3) -> list[int]:
    """Replace all rows; where PyIceberg can do it, it makes two snapshots, a delete first."""
    before = set(ids(table))
    if _by_hand(table):
        new = Manifest(_data_files(table, rows(start, number)))
        commit(table, new, operation=Operation.OVERWRITE, replace=True)
    else:
        table.overwrite(rows(start, number))
    return [one for one in ids(table) if one not in before]


def delete(table: Table, predicate: str) -> list[int]:
    """Delete rows by rewriting their files; not for tables that are written by hand."""
    before = set(ids(table))
    table.delete(predicate)
    return [one for one in ids(table) if one not in before]


def add_column(table: Table, name: str = "extra") -> None:
    """Evolve the schema; makes no snapshot."""
    with table.update_schema() as change:
        change.add_column(name, StringType())


def repartition(table: Table, partitioning: str) -> None:
    """Evolve the partition spec; makes no snapshot."""
    column, _, transform = PARTITIONINGS[partitioning]
    with table.update_spec() as change:
        change.add_field(column, transform, f"by_{partitioning}")


def tag(
    table: Table, name: str, snapshot: int | None = None, *, max_ref_age_ms: int | None = None
) -> int:
    """Tag a snapshot, the current one unless it is given."""
    named = _head(table) if snapshot is None else snapshot
    table.manage_snapshots().create_tag(named, name, max_ref_age_ms).commit()
    return named


def branch(table: Table, name: str, snapshot: int | None = None, **limits: int) -> int:
    """Create a branch; `limits` are max_ref_age_ms, max_snapshot_age_ms, min_snapshots_to_keep."""
    named = _head(table) if snapshot is None else snapshot
    table.manage_snapshots().create_branch(named, name, **limits).commit()
    return named


def unref(table: Table, name: str) -> None:
    """Remove a tag or branch; its snapshots stay in the metadata."""
    changes = table.manage_snapshots()
    if table.refs()[name].snapshot_ref_type is SnapshotRefType.TAG:
        changes.remove_tag(name).commit()
    else:
        changes.remove_branch(name).commit()


def stage(table: Table, start: int, number: int = 3, wap_id: str = "audit") -> int:
    """Add a snapshot that no ref names, as write-audit-publish does; returns its id."""
    if _by_hand(table):
        return commit(table, Manifest(_data_files(table, rows(start, number))), ref=None)
    before = set(ids(table))
    table.append(rows(start, number), branch=None, snapshot_properties={"wap.id": wap_id})
    return next(one for one in ids(table) if one not in before)


def rollback(table: Table, snapshot: int) -> None:
    """Point main at an earlier snapshot; makes no snapshot, and later ones lose their ref."""
    table.manage_snapshots().rollback_to_snapshot(snapshot).commit()


def add_outside(table: Table, path: str, start: int, number: int = 3) -> int:
    """Write a file wherever `path` says and add it to the table as it is."""
    _write(table, path, _parquet(rows(start, number)))
    table.add_files([path])
    return _head(table)


def ids(table: Table) -> list[int]:
    """Return the ids of all snapshots, in the order they were made."""
    return [snapshot.snapshot_id for snapshot in table.metadata.snapshots]


# -- statistics ------------------------------------------------------------------------------------


def statistics(table: Table, snapshot: int | None = None, path: str | None = None) -> str:
    """Give a snapshot a statistics file; a `path` that exists is shared and not written again."""
    named = table.metadata.snapshot_by_id(_head(table) if snapshot is None else snapshot)
    assert named is not None
    sequence = named.sequence_number or 0
    described = {
        "type": "apache-datasketches-theta-v1", "fields": [1], "snapshot-id": named.snapshot_id,
        "sequence-number": sequence, "properties": {"ndv": "0"},
    }  # fmt: skip
    data, _ = puffin([(described, _SKETCH)])
    place = path or table.location_provider().new_metadata_location(f"{uuid.uuid4()}.stats")
    if not table.io.new_input(place).exists():
        _write(table, place, data)
    made = {
        "snapshot-id": named.snapshot_id,
        "statistics-path": place,
        "file-size-in-bytes": len(data),
        "file-footer-size-in-bytes": len(data) - 4 - len(_SKETCH),
        "blob-metadata": [described],
    }
    _apply(table, SetStatisticsUpdate.model_validate({"statistics": made}))
    return place


def partition_statistics(table: Table, snapshot: int | None = None, path: str | None = None) -> str:
    """Give a snapshot a partition statistics file; a `path` that exists is shared."""
    named = _head(table) if snapshot is None else snapshot
    place = path or table.location_provider().new_metadata_location(
        f"partition-stats-{named}-{uuid.uuid4()}.parquet"
    )
    if not table.io.new_input(place).exists():
        counted = {"spec_id": [0], "data_record_count": [0], "data_file_count": [0]}
        _write(table, place, _parquet(pa.table(counted)))
    made = {
        "snapshot-id": named,
        "statistics-path": place,
        "file-size-in-bytes": len(table.io.new_input(place)),
    }
    _apply(table, SetPartitionStatisticsUpdate.model_validate({"partition-statistics": made}))
    return place


def puffin(blobs: Sequence[tuple[Mapping[str, Any], bytes]]) -> tuple[bytes, list[int]]:
    """Return the bytes of a Puffin file and where each blob starts."""
    body, described, offsets = b"PFA1", [], []
    for about, blob in blobs:
        offsets.append(len(body))
        described.append({**about, "offset": len(body), "length": len(blob)})
        body += blob
    footer = json.dumps({"blobs": described, "properties": {}}).encode()
    tail = len(footer).to_bytes(4, "little") + bytes(4) + b"PFA1"
    return body + b"PFA1" + footer + tail, offsets


# -- delete files ----------------------------------------------------------------------------------


def position_deletes(table: Table, gone: Iterable[int]) -> int:
    """Delete rows by id with one position delete file for each data file."""
    entries = []
    for file, positions in _positions(table, gone):
        columns = {"file_path": [file.file_path] * len(positions), "pos": positions}
        data = _parquet(pa.table(columns), {"file_path": PATH_ID, "pos": POSITION_ID})
        bounds = {PATH_ID: file.file_path.encode()}
        made = _written(table, f"{uuid.uuid4()}-deletes.parquet", data, len(positions))
        entries.append(
            made
            | {"content": _POSITION_DELETES, "partition": _partition_of(table, file)}
            | {"lower_bounds": _pairs(bounds), "upper_bounds": _pairs(bounds)}
        )
    return commit(table, Manifest(entries, _DELETE_MANIFEST), operation=Operation.DELETE)


def equality_deletes(table: Table, gone: Iterable[int]) -> int:
    """Delete rows by id with an equality delete file; PyIceberg then refuses to read the table."""
    assert table.spec().is_unpartitioned()
    named = list(gone)
    data = _parquet(pa.table({"id": pa.array(named, pa.int64())}), {"id": 1})
    made = _written(table, f"{uuid.uuid4()}-equality.parquet", data, len(named))
    entry = made | {"content": _EQUALITY_DELETES, "equality_ids": [1]}
    return commit(table, Manifest([entry], _DELETE_MANIFEST), operation=Operation.DELETE)


def deletion_vectors(table: Table, gone: Iterable[int]) -> int:
    """Delete rows by id with deletion vectors, all in one Puffin file; needs format version 3."""
    assert table.format_version >= 3
    found = list(_positions(table, gone))
    blobs = [
        (
            {
                "type": "deletion-vector-v1", "fields": [POSITION_ID], "snapshot-id": -1,
                "sequence-number": -1, "properties": {
                    "referenced-data-file": file.file_path, "cardinality": str(len(positions)),
                },
            },
            _vector(positions),
        )
        for file, positions in found
    ]  # fmt: skip
    data, offsets = puffin(blobs)
    made = _written(table, f"{uuid.uuid4()}-deletes.puffin", data, 0)
    entries = [
        made
        | {"content": _POSITION_DELETES, "file_format": "PUFFIN", "record_count": len(positions)}
        | {"partition": _partition_of(table, file), "referenced_data_file": file.file_path}
        | {"content_offset": offset, "content_size_in_bytes": len(blob)}
        for (file, positions), offset, (_, blob) in zip(found, offsets, blobs, strict=True)
    ]
    return commit(table, Manifest(entries, _DELETE_MANIFEST), operation=Operation.DELETE)


def _vector(positions: Iterable[int]) -> bytes:
    bitmap = (1).to_bytes(8, "little") + bytes(4) + BitMap(positions).serialize()
    framed = _VECTOR_MAGIC + bitmap
    return len(framed).to_bytes(4, "big") + framed + zlib.crc32(framed).to_bytes(4, "big")


def _positions(table: Table, gone: Iterable[int]) -> Iterable[tuple[DataFile, list[int]]]:
    wanted = set(gone)
    for task in table.scan().plan_files():
        with table.io.new_input(task.file.file_path).open() as file:
            held = pq.read_table(BytesIO(file.read()), columns=["id"]).column("id").to_pylist()
        positions = [position for position, one in enumerate(held) if one in wanted]
        if positions:
            yield task.file, positions


# -- commits by hand -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest to be written: files to add, as the specification names their fields.

    `gone` are entries of files that the snapshot takes away, and `spec` is the id of their spec.
    """

    files: Sequence[Mapping[str, Any]]
    content: int = _DATA_MANIFEST
    gone: Sequence[Mapping[str, Any]] = ()
    spec: int | None = None


def commit(
    table: Table,
    *manifests: Manifest,
    ref: str | None = MAIN,
    operation: Operation = Operation.APPEND,
    replace: bool = False,
) -> int:
    """Commit new manifests on top of what `ref` holds, or instead of it; returns the snapshot's id.

    Without a ref the snapshot is staged on top of main.
    """
    metadata = table.metadata
    made = metadata.new_snapshot_id()
    sequence = getattr(metadata, "last_sequence_number", -1) + 1
    head = metadata.refs.get(ref or MAIN)
    parent = None if head is None else metadata.snapshot_by_id(head.snapshot_id)
    kept = [] if parent is None else _read_avro(table, parent.manifest_list)
    gone = [_emptied(table, one) for one in kept] if replace else []
    kept = [] if replace else kept
    new = [
        _write_manifest(table, one, made, sequence)
        for one in (*manifests, *gone)
        if one.files or one.gone
    ]
    first = getattr(metadata, "next_row_id", None)
    added = _number_rows(new, first or 0)
    listed = _write_list(table, new + kept, made, sequence)
    snapshot = {
        "snapshot-id": made,
        "parent-snapshot-id": None if parent is None else parent.snapshot_id,
        "sequence-number": sequence,
        "timestamp-ms": int(time.time() * 1000),
        "manifest-list": listed,
        "summary": Summary(operation),
        "schema-id": metadata.current_schema_id,
        "first-row-id": first,
        "added-rows": added if metadata.format_version >= 3 else None,
    }
    updates: list[TableUpdate] = [AddSnapshotUpdate.model_validate({"snapshot": snapshot})]
    expected: tuple[AssertRefSnapshotId, ...] = ()
    if ref is not None:
        named = {"ref-name": ref, "type": SnapshotRefType.BRANCH, "snapshot-id": made}
        updates.append(SetSnapshotRefUpdate.model_validate(named))
        held = {"ref": ref, "snapshot-id": None if head is None else head.snapshot_id}
        expected = (AssertRefSnapshotId.model_validate(held),)
    table.catalog.commit_table(table, expected, tuple(updates))
    table.refresh()
    return made


def _write_manifest(table: Table, made: Manifest, snapshot: int, sequence: int) -> dict[str, Any]:
    version = table.format_version
    spec = table.spec() if made.spec is None else table.specs()[made.spec]
    schema = manifest_entry_schema_with_data_file(version, _file_type(table, spec))
    header = {
        "schema": table.schema().model_dump_json(),
        "partition-spec": json.dumps([field.model_dump(by_alias=True) for field in spec.fields]),
        "partition-spec-id": str(spec.spec_id),
        "format-version": str(version),
        "content": "data" if made.content == _DATA_MANIFEST else "deletes",
    }
    added = ({"status": _ADDED, "snapshot_id": snapshot, "data_file": one} for one in made.files)
    gone = ({**one, "status": _DELETED, "snapshot_id": snapshot} for one in made.gone)
    path = table.location_provider().new_metadata_location(f"{uuid.uuid4()}-m0.avro")
    length = _write_avro(table, path, (schema, "manifest_entry"), header, chain(added, gone))
    return {
        "manifest_path": path,
        "manifest_length": length,
        "partition_spec_id": spec.spec_id,
        "content": made.content,
        "sequence_number": sequence,
        "min_sequence_number": sequence,
        "added_snapshot_id": snapshot,
        "added_files_count": len(made.files),
        "existing_files_count": 0,
        "deleted_files_count": len(made.gone),
        "added_rows_count": sum(one["record_count"] for one in made.files),
        "existing_rows_count": 0,
        "deleted_rows_count": sum(one["data_file"]["record_count"] for one in made.gone),
    }


def _file_type(table: Table, spec: PartitionSpec) -> StructType:
    """Return the type of a file in a manifest; PyIceberg has longs where equality ids are ints."""
    held = data_file_with_partition(spec.partition_type(table.schema()), table.format_version)
    whole = ListType(element_id=136, element_type=IntegerType(), element_required=True)
    fixed = NestedField(135, "equality_ids", whole, required=False)
    return StructType(*(fixed if field.field_id == 135 else field for field in held.fields))


def _number_rows(manifests: Iterable[dict[str, Any]], first: int) -> int:
    """Give rows of new data manifests their ids (format version 3); returns how many there are."""
    following = first
    for one in manifests:
        if one["content"] == _DATA_MANIFEST:
            one["first_row_id"] = following
            following += one["added_rows_count"]
    return following - first


def _emptied(table: Table, manifest: Mapping[str, Any]) -> Manifest:
    """Return a manifest that takes away everything another one holds."""
    sequence = manifest.get("sequence_number", 0)
    gone = [
        {**entry, **{name: entry.get(name) or sequence for name in _SEQUENCES}}
        for entry in _read_avro(table, manifest["manifest_path"])
        if entry["status"] != _DELETED
    ]
    content = manifest.get("content", _DATA_MANIFEST)
    return Manifest([], content, gone, manifest["partition_spec_id"])


def _write_list(table: Table, manifests: Sequence[Any], snapshot: int, sequence: int) -> str:
    version = table.format_version
    header = {
        "snapshot-id": str(snapshot),
        "format-version": str(version),
        "sequence-number": str(sequence),
    }
    name = f"snap-{snapshot}-0-{uuid.uuid4()}.avro"
    path = table.location_provider().new_metadata_location(name)
    _write_avro(
        table, path, (MANIFEST_LIST_FILE_SCHEMAS[version], "manifest_file"), header, manifests
    )
    return path


def _write_avro(
    table: Table,
    path: str,
    schema: tuple[Schema, str],
    header: Mapping[str, str],
    records: Iterable[Any],
) -> int:
    converted: Any = AvroSchemaConversion().iceberg_to_avro(schema[0], schema_name=schema[1])
    buffer = BytesIO()
    known = {**header, "iceberg.schema": schema[0].model_dump_json()}
    fastavro.writer(buffer, converted, records, codec="deflate", metadata=known)
    _write(table, path, buffer.getvalue())
    return buffer.tell()


def _read_avro(table: Table, path: str) -> list[Any]:
    with table.io.new_input(path).open() as file:
        return list(fastavro.reader(BytesIO(file.read())))


def _by_hand(table: Table) -> bool:
    """Tell whether PyIceberg alone cannot write the table: a new format, a computed partition."""
    computed = any(not isinstance(one.transform, IdentityTransform) for one in table.spec().fields)
    return table.format_version >= 3 or computed


def _data_files(table: Table, data: pa.Table) -> list[dict[str, Any]]:
    """Write rows as one file for each partition."""
    field_ids = {field.name: field.field_id for field in table.schema().fields}
    groups: dict[tuple[Any, ...], tuple[PartitionKey | None, list[int]]] = {}
    for position, row in enumerate(data.to_pylist()):
        key = _partition_key(table, row)
        values = (
            ()
            if key is None
            else tuple(key.partition[place] for place in range(len(key.partition)))
        )
        groups.setdefault(values, (key, []))[1].append(position)
    made = []
    for values, (key, positions) in groups.items():
        held = _parquet(data.take(positions), field_ids)
        path = table.location_provider().new_data_location(f"{uuid.uuid4()}.parquet", key)
        _write(table, path, held)
        named = dict(zip((field.name for field in table.spec().fields), values, strict=True))
        made.append(_described(path, len(positions), len(held)) | {"partition": named})
    return made


def _partition_key(table: Table, row: Mapping[str, Any]) -> PartitionKey | None:
    schema, spec = table.schema(), table.spec()
    if spec.is_unpartitioned():
        return None
    values = []
    for field in spec.fields:
        source = schema.find_field(field.source_id)
        value = row[source.name]
        if isinstance(value, date):
            value = (value - date(1970, 1, 1)).days
        # A partition key takes values as they are: what the transform makes of them is ours to say.
        made = field.transform.transform(source.field_type)(value)
        values.append(PartitionFieldValue(field, made))
    return PartitionKey(values, spec, schema)


def _written(table: Table, name: str, data: bytes, number: int) -> dict[str, Any]:
    path = table.location_provider().new_data_location(name)
    _write(table, path, data)
    return _described(path, number, len(data))


def _described(path: str, number: int, size: int) -> dict[str, Any]:
    return {
        "content": _DATA, "file_path": path, "file_format": "PARQUET", "partition": {},
        "record_count": number, "file_size_in_bytes": size, "block_size_in_bytes": 1 << 26,
    }  # fmt: skip


def _partition_of(table: Table, file: DataFile) -> dict[str, Any]:
    fields = table.spec().fields
    return {field.name: file.partition[position] for position, field in enumerate(fields)}


def _pairs(values: Mapping[int, bytes]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value} for key, value in values.items()]


# -- many snapshots --------------------------------------------------------------------------------


def synthetic(
    table: Table, snapshots: int, entries: int, *, real: bool = False, step_ms: int = 1000
) -> list[int]:
    """Append `snapshots` times `entries` data files that nobody has written.

    The metadata is real; the data files exist only if asked for, and then hold one row each.  The
    snapshots are `step_ms` apart, the newest is of now.  Needs an unpartitioned table.
    """
    assert table.spec().is_unpartitioned()
    location = table.metadata_location
    metadata = read_metadata(table, location)
    kept = [] if table.current_snapshot() is None else _read_avro(table, _manifest_list(table))
    last, row = metadata.get("last-sequence-number", 0), metadata.get("next-row-id", 0)
    parent, now = metadata.get("current-snapshot-id"), int(time.time() * 1000)
    made: list[int] = []
    for number in range(snapshots):
        one, sequence = table.metadata.new_snapshot_id(), last + number + 1
        files = [_unwritten(table, made, k) for k in range(entries)]
        if real:
            files = [_real(table, file, number * entries + k) for k, file in enumerate(files)]
        kept.insert(0, _write_manifest(table, Manifest(files), one, sequence))
        _number_rows(kept[:1], row + number * entries)
        metadata["snapshots"].append(
            {
                "snapshot-id": one,
                "sequence-number": sequence,
                "timestamp-ms": now - (snapshots - number - 1) * step_ms,
                "manifest-list": _write_list(table, kept, one, sequence),
                "summary": {"operation": "append"},
                "schema-id": metadata["current-schema-id"],
                "first-row-id": row + number * entries,
                "added-rows": entries,
            }
            | ({} if parent in {None, -1} else {"parent-snapshot-id": parent})
        )
        parent = one
        made.append(one)
    _logged(metadata, made)
    metadata["last-sequence-number"] = last + snapshots
    metadata["next-row-id"] = row + snapshots * entries
    _point(table, metadata, location)
    return made


def _unwritten(table: Table, made: Sequence[int], number: int) -> dict[str, Any]:
    name = f"{len(made):05}-{number:05}-{uuid.uuid5(table.metadata.table_uuid, str(len(made)))}"
    return _described(table.location_provider().new_data_location(f"{name}.parquet"), 1, 500)


def _real(table: Table, file: Mapping[str, Any], row: int) -> dict[str, Any]:
    field_ids = {field.name: field.field_id for field in table.schema().fields}
    data = _parquet(rows(row, 1), field_ids)
    _write(table, file["file_path"], data)
    return {**file, "file_size_in_bytes": len(data)}


def _logged(metadata: dict[str, Any], made: Sequence[int]) -> None:
    """Make new snapshots, the last ones in the metadata, main's history."""
    new = metadata["snapshots"][-len(made) :]
    metadata.setdefault("snapshot-log", []).extend(
        {"snapshot-id": one["snapshot-id"], "timestamp-ms": one["timestamp-ms"]} for one in new
    )
    metadata["current-snapshot-id"] = made[-1]
    metadata.setdefault("refs", {})[MAIN] = {"snapshot-id": made[-1], "type": "branch"}


def _point(table: Table, metadata: dict[str, Any], previous: str) -> None:
    """Write metadata as the next version and make it the catalog's."""
    assert isinstance(table.catalog, SqlCatalog)
    held = {"metadata-file": previous, "timestamp-ms": metadata["last-updated-ms"]}
    metadata.setdefault("metadata-log", []).append(held)
    metadata["last-updated-ms"] = int(time.time() * 1000)
    version = int(previous.rpartition("/")[2].partition("-")[0]) + 1
    place = table.location_provider().new_table_metadata_file_location(version)
    write_metadata(table, place, metadata)
    *namespace, name = table.name()
    with Session(table.catalog.engine) as session:
        session.execute(
            update(IcebergTables)
            .where(
                IcebergTables.catalog_name == table.catalog.name,
                IcebergTables.table_namespace == ".".join(namespace),
                IcebergTables.table_name == name,
            )
            .values(metadata_location=place, previous_metadata_location=previous)
        )
        session.commit()
    table.refresh()


# -- time ------------------------------------------------------------------------------------------


def backdate(table: Table, ages: float | Sequence[float]) -> None:
    """Move the table's history into the past.

    `ages` are the snapshots' ages in days, oldest first; one number is the age of the newest, and
    all others move with it.  Everything else that has a time (the logs, the table's last change,
    on a local disk the files below the table's location) moves as the snapshot before it does.
    Metadata files are changed in place, so that no file comes or goes.
    """
    now = int(time.time() * 1000)
    old = [snapshot.timestamp_ms for snapshot in table.metadata.snapshots]
    if isinstance(ages, int | float):
        new = [time_ms - max(old) + now - int(ages * DAY_MS) for time_ms in old]
    else:
        new = [now - int(age * DAY_MS) for age in ages]
    moves = sorted(zip(old, new, strict=True))
    if [move[1] for move in moves] != sorted(new):
        raise ValueError("the ages must fall from the oldest snapshot to the newest")
    if table.location().startswith(("file:", "/")):
        _move_files(local(table.location()), moves)
    stamps = dict(zip(ids(table), new, strict=True))
    log = [entry.metadata_file for entry in table.metadata.metadata_log]
    for path in [*log, table.metadata_location]:
        if table.io.new_input(path).exists():
            _move_metadata(table, path, stamps, moves)
    table.refresh()


def _move_metadata(
    table: Table, path: str, stamps: Mapping[int, int], moves: Sequence[tuple[int, int]]
) -> None:
    """Change the times in a metadata file, in place, and let it keep its own."""
    metadata = read_metadata(table, path)
    for snapshot in metadata.get("snapshots", []):
        snapshot["timestamp-ms"] = stamps.get(
            snapshot["snapshot-id"], _moved(snapshot["timestamp-ms"], moves)
        )
    for entry in [*metadata.get("snapshot-log", []), *metadata.get("metadata-log", [])]:
        entry["timestamp-ms"] = _moved(entry["timestamp-ms"], moves)
    metadata["last-updated-ms"] = _moved(metadata["last-updated-ms"], moves)
    file = local(path)
    then = file.stat().st_mtime if file.exists() else None
    write_metadata(table, path, metadata)
    if then is not None:
        os.utime(file, (then, then))


def _moved(time_ms: int, moves: Sequence[tuple[int, int]]) -> int:
    """Return where a time goes: with the last snapshot until then, but not past the next one."""
    position = bisect_right(moves, time_ms, key=lambda move: move[0]) - 1
    old, new = moves[max(position, 0)]
    following = [move[1] for move in moves[position + 1 : position + 2]]
    return min([time_ms - old + new, *following])


def _move_files(root: Path, moves: Sequence[tuple[int, int]]) -> None:
    """Move files with their snapshot: all are written before it is stamped, metadata files after.

    What was written after the last snapshot moves with the last.
    """
    for path in root.rglob("*"):
        if path.is_file():
            written = int(path.stat().st_mtime * 1000)
            position = bisect_left(moves, written, key=lambda move: move[0])
            old, new = moves[min(position, len(moves) - 1)]
            after = path.name.endswith(".metadata.json")
            then = (_moved(written, moves) if after else written - old + new) / 1000
            os.utime(path, (then, then))


def age(root: Path | str, days: float) -> None:
    """Make every file below a local directory that many days old."""
    then = time.time() - days * DAY
    for path in local(root).rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def age_on_s3(server: Server, location: str, days: float, scratch: Path) -> None:
    """Make every object below a location that many days old; `scratch` is a new directory."""
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    files = PyArrowFileIO(s3_properties(server)).fs_by_scheme("s3", bucket)
    selector = pa.fs.FileSelector(f"{bucket}/{prefix}", recursive=True)
    for info in files.get_file_info(selector):
        if info.is_file:
            target = scratch / info.path.removeprefix(f"{bucket}/{prefix}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files.open_input_stream(info.path).read())
    server.load(bucket, prefix, str(scratch), age_days=days)


def orphan(root: Path | str, path: str, days: float = 30) -> Path:
    """Leave a file that no snapshot names."""
    file = local(root) / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"left over")
    then = time.time() - days * DAY
    os.utime(file, (then, then))
    return file


# -- small parts -----------------------------------------------------------------------------------


def local(place: Path | str) -> Path:
    """Return the directory or file that a location on a local disk names."""
    return Path(str(place).removeprefix("file://").removeprefix("file:"))


def read_metadata(table: Table, location: str) -> dict[str, Any]:
    """Read a metadata file as it is written."""
    compressor = Compressor.get_compressor(location)
    with table.io.new_input(location).open() as file, compressor.stream_decompressor(file) as plain:
        read: dict[str, Any] = json.loads(plain.read())
    return read


def write_metadata(table: Table, location: str, metadata: Mapping[str, Any]) -> None:
    """Write a metadata file, also over one that exists."""
    compress = Compressor.get_compressor(location).bytes_compressor()
    _write(table, location, compress(json.dumps(metadata).encode()))
    if location.startswith(("file:", "/")):
        # Hadoop's checksum of what was there before: with it, Java would not read the file.
        path = local(location)
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


def _write(table: Table, path: str, data: bytes) -> None:
    with table.io.new_output(path).create(overwrite=True) as file:
        file.write(data)


def _parquet(data: pa.Table, field_ids: Mapping[str, int] | None = None) -> bytes:
    """Return a table as Parquet; without field ids the columns are found by name mapping."""
    if field_ids is not None:
        fields = [
            field.with_metadata({"PARQUET:field_id": str(field_ids[field.name])})
            for field in data.schema
        ]
        data = data.cast(pa.schema(fields))
    buffer = BytesIO()
    pq.write_table(data, buffer)
    return buffer.getvalue()


def _apply(table: Table, *updates: TableUpdate) -> None:
    table.catalog.commit_table(table, (), updates)
    table.refresh()


def _head(table: Table, branch_name: str = MAIN) -> int:
    return table.refs()[branch_name].snapshot_id


def _manifest_list(table: Table) -> str:
    current = table.current_snapshot()
    assert current is not None
    return current.manifest_list


def _spec(partitioning: str) -> PartitionSpec:
    if not partitioning:
        return PartitionSpec()
    _, source, transform = PARTITIONINGS[partitioning]
    field = PartitionField(
        source_id=source, field_id=1000, transform=transform, name=f"by_{partitioning}"
    )
    return PartitionSpec(field)
