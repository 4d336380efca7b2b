"""Measure readers of manifests: entries per second of CPU time, on one core.

    .venv/bin/python bench/avro.py

Manifests are synthetic: two partition fields, metrics of ten columns, deflate, blocks of 64,000 bytes.
"""

from __future__ import annotations

import io
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fastavro
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import ManifestFile

from lakewarden.formats.iceberg.manifests import read_manifests

COLUMNS = 10
RUNS = 3


def _pairs(number: int, value: str) -> dict[str, Any]:
    fields = [
        {"name": "key", "type": "int", "field-id": number + 1},
        {"name": "value", "type": value, "field-id": number + 2},
    ]
    items = {"type": "record", "name": f"k{number}_v{number}", "fields": fields}
    return {"type": "array", "items": items, "logicalType": "map"}


def _field(name: str, kind: Any, number: int) -> dict[str, Any]:
    return {"name": name, "type": kind, "field-id": number}


def schema() -> dict[str, Any]:
    partition = [_field("day", ["null", "int"], 1000), _field("bucket", ["null", "int"], 1001)]
    counts = ("column_sizes", 108), ("value_counts", 109), ("null_value_counts", 110)
    bounds = ("lower_bounds", 125), ("upper_bounds", 128)
    file = [
        _field("content", "int", 134),
        _field("file_path", "string", 100),
        _field("file_format", "string", 101),
        _field("partition", {"type": "record", "name": "r102", "fields": partition}, 102),
        _field("record_count", "long", 103),
        _field("file_size_in_bytes", "long", 104),
        *(_field(name, ["null", _pairs(number * 10, "long")], number) for name, number in counts),
        *(_field(name, ["null", _pairs(number * 10, "bytes")], number) for name, number in bounds),
    ]
    return {
        "type": "record",
        "name": "manifest_entry",
        "fields": [
            _field("status", "int", 0),
            _field("snapshot_id", ["null", "long"], 1),
            _field("sequence_number", ["null", "long"], 3),
            _field("file_sequence_number", ["null", "long"], 4),
            _field("data_file", {"type": "record", "name": "r2", "fields": file}, 2),
        ],
    }


def manifest(entries: int, chance: random.Random) -> bytes:
    def numbers() -> list[dict[str, Any]]:
        return [{"key": one, "value": chance.randrange(1 << 30)} for one in range(COLUMNS)]

    def values() -> list[dict[str, Any]]:
        return [{"key": one, "value": chance.randbytes(8)} for one in range(COLUMNS)]

    rows = [
        {
            "status": 1,
            "snapshot_id": 1,
            "sequence_number": 1,
            "file_sequence_number": 1,
            "data_file": {
                "content": 0,
                "file_path": f"s3://lake/db/t/data/day={at % 30}/{chance.getrandbits(128):032x}.parquet",
                "file_format": "PARQUET",
                "partition": {"day": at % 30, "bucket": at % 16},
                "record_count": 1000,
                "file_size_in_bytes": 1 << 20,
                "column_sizes": numbers(),
                "value_counts": numbers(),
                "null_value_counts": numbers(),
                "lower_bounds": values(),
                "upper_bounds": values(),
            },
        }
        for at in range(entries)
    ]
    stream = io.BytesIO()
    parsed = fastavro.parse_schema(schema())
    told = {"partition-spec": "[]", "schema": "{}", "format-version": "2", "content": "data"}
    fastavro.writer(stream, parsed, rows, codec="deflate", sync_interval=64_000, metadata=told)
    return stream.getvalue()


def ours(data: Sequence[bytes], _: Sequence[Path]) -> int:
    return sum(one.num_rows for one in read_manifests(data))  # type: ignore[union-attr]


def by_fastavro(data: Sequence[bytes], _: Sequence[Path]) -> int:
    whole = schema()
    file = next(one for one in whole["fields"] if one["name"] == "data_file")
    wanted = {"content", "file_path", "file_size_in_bytes"}
    file["type"]["fields"] = [one for one in file["type"]["fields"] if one["name"] in wanted]
    whole["fields"] = [one for one in whole["fields"] if one["name"] in {"status", "data_file"}]
    projected = fastavro.parse_schema(whole)
    return sum(1 for one in data for _ in fastavro.reader(io.BytesIO(one), projected))


def by_pyiceberg(_: Sequence[bytes], paths: Sequence[Path]) -> int:
    files = PyArrowFileIO()
    found = 0
    for path in paths:
        one = ManifestFile.from_args(
            manifest_path=str(path), sequence_number=1, added_snapshot_id=1, partition_spec_id=0
        )
        found += len(one.fetch_manifest_entry(files, discard_deleted=False))
    return found


READERS: dict[str, Callable[[Sequence[bytes], Sequence[Path]], int]] = {
    "this": ours,
    "PyIceberg": by_pyiceberg,
    "fastavro, projected": by_fastavro,
}


def main() -> None:
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as place:
        for files, entries in ((100, 1_000), (1, 100_000)):
            data = [manifest(entries, chance) for _ in range(files)]
            paths = [Path(place) / f"{at}.avro" for at in range(files)]
            for path, one in zip(paths, data, strict=True):
                path.write_bytes(one)
            for name, read in READERS.items():
                spent = []
                for _ in range(RUNS):
                    started = time.process_time()
                    assert read(data, paths) == files * entries
                    spent.append(time.process_time() - started)
                rate = files * entries / min(spent)
                print(f"{files:>4} x {entries:>7,}  {name:<20} {rate:>10,.0f} entries/s")


if __name__ == "__main__":
    main()
