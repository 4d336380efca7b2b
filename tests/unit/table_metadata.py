"""Table metadata with something in every place, and what PyIceberg makes of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.table.update import RemoveSnapshotsUpdate, update_table_metadata
from pyiceberg.typedef import IcebergBaseModel

WHERE = "s3://b/t/metadata/00003.metadata.json"
VERSIONS = pytest.mark.parametrize("version", [1, 2, 3])


def snapshot(number: int, parent: int | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "snapshot-id": number, "sequence-number": number, "timestamp-ms": 1000 * number,
        "manifest-list": f"s3://b/t/metadata/snap-{number}.avro", "schema-id": 0,
        "summary": {"operation": "append", "added-records": "1"},
    }  # fmt: skip
    return made if parent is None else made | {"parent-snapshot-id": parent}


def table(version: int = 2) -> dict[str, Any]:
    """Metadata with something in every place, as PyIceberg itself would write it."""
    fields = [
        {"id": 1, "name": "a", "type": "long", "required": True},
        {
            "id": 2, "name": "m", "required": False,
            "type": {
                "type": "map", "key-id": 3, "key": "string", "value-id": 4,
                "value": {
                    "type": "list", "element-id": 5, "element-required": False,
                    "element": {
                        "type": "struct",
                        "fields": [{"id": 6, "name": "z", "type": "int", "required": False}],
                    },
                },
                "value-required": False,
            },
        },
    ]  # fmt: skip
    schema = {"type": "struct", "fields": fields, "schema-id": 0, "identifier-field-ids": [1]}
    part = {"source-id": 1, "field-id": 1000, "transform": "bucket[4]", "name": "a_bucket"}
    stats = {
        "snapshot-id": 1, "statistics-path": "s3://b/t/1.puffin", "file-size-in-bytes": 10,
        "file-footer-size-in-bytes": 4,
        "blob-metadata": [
            {
                "type": "apache-datasketches-theta-v1", "snapshot-id": 1, "sequence-number": 1,
                "fields": [1],
            }
        ],
    }  # fmt: skip
    raw: dict[str, Any] = {
        "location": "s3://b/t", "table-uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1",
        "last-updated-ms": 3000, "last-column-id": 6, "schemas": [schema], "current-schema-id": 0,
        "partition-specs": [{"spec-id": 0, "fields": [part]}], "default-spec-id": 0,
        "last-partition-id": 1000, "properties": {"owner": "me"}, "current-snapshot-id": 3,
        "snapshots": [snapshot(1), snapshot(2, 1), snapshot(3, 2)],
        "snapshot-log": [{"snapshot-id": n, "timestamp-ms": 1000 * n} for n in (1, 2, 3)],
        "metadata-log": [
            {"metadata-file": f"s3://b/t/metadata/0000{n}.metadata.json", "timestamp-ms": n}
            for n in (1, 2)
        ],
        "sort-orders": [
            {
                "order-id": 1,
                "fields": [
                    {
                        "source-id": 1, "transform": "identity", "direction": "asc",
                        "null-order": "nulls-first",
                    }
                ],
            }
        ],
        "default-sort-order-id": 1,
        "refs": {
            "main": {"snapshot-id": 3, "type": "branch"},
            "v1": {"snapshot-id": 1, "type": "tag", "max-ref-age-ms": 5},
        },
        "statistics": [stats, stats | {"snapshot-id": 3, "statistics-path": "s3://b/t/3.puffin"}],
        "partition-statistics": [
            {
                "snapshot-id": 3, "statistics-path": "s3://b/t/3.parquet",
                "file-size-in-bytes": 11,
            }
        ],
        "format-version": version,
    }  # fmt: skip
    if version == 1:
        raw |= {"schema": copy.deepcopy(schema), "partition-spec": [dict(part)]}
        for one in raw["snapshots"]:
            del one["sequence-number"]
    else:
        raw["last-sequence-number"] = 3
    if version == 3:
        raw["next-row-id"] = 9
        for one in raw["snapshots"]:
            one |= {"first-row-id": 0, "added-rows": 3}
    separate: dict[str, Any] = json.loads(json.dumps(raw))
    return separate


def dump(metadata: TableMetadata) -> dict[str, Any]:
    """Serialise as PyIceberg does; its refusal to write version 3 is bypassed."""
    raw: dict[str, Any] = json.loads(IcebergBaseModel.model_dump_json(metadata))
    return raw


def load(raw: dict[str, Any]) -> TableMetadata:
    return TableMetadataUtil.parse_raw(json.dumps(raw))


def commit(before: dict[str, Any], *gone: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Expire snapshots with PyIceberg; return what it knows of `before`, and what it wrote."""
    base = load(before)
    update = RemoveSnapshotsUpdate.model_validate({"snapshot-ids": gone})
    after = update_table_metadata(base, (update,) if gone else (), metadata_location=WHERE)
    return dump(base), dump(after)


def objects(
    raw: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Every object that holds fields of the format, not names or settings of the user."""
    if isinstance(raw, dict):
        if path != ("refs",):
            yield path, raw
        for name, value in raw.items():
            if name not in {"properties", "summary"}:
                yield from objects(value, (*path, name))
    elif isinstance(raw, list):
        for index, value in enumerate(raw):
            yield from objects(value, (*path, index))


def at(raw: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        raw = raw[step]
    return raw
