"""Small Lance tables with a past, and ways to compare directories."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

HOUR, DAY = 3600.0, 86400.0


def rows(first: int, number: int = 5) -> pa.Table:
    return pa.table({"id": range(first, first + number)})


def make_table(place: Path, *, versions: int = 6, mode: str = "overwrite", days: float = 30) -> Any:
    """Write a table whose versions 1 to `versions` hold 5 rows from 0, from 5, … each; `days` old."""
    for step in range(versions):
        lance.write_dataset(rows(step * 5), str(place), mode=mode if step else "create")
    age(place, days * DAY)
    return lance.dataset(str(place))


def age(place: Path, seconds: float) -> None:
    """Move all files into the past, the newest `seconds` ago, a minute between them."""
    files = sorted(
        (path for path in place.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_mtime_ns,
    )
    now = time.time()  # noqa: TID251  # the files' own clock
    for position, path in enumerate(reversed(files)):
        moment = now - seconds - 60 * position
        os.utime(path, (moment, moment))


def versions_of(place: Path) -> list[int]:
    return sorted(entry["version"] for entry in lance.dataset(str(place)).versions())


def first_ids(place: Path, versions: list[int]) -> list[int]:
    """Read the given versions of a table made by `make_table`; the first id of each."""
    return [
        min(lance.dataset(str(place), version=version).to_table()["id"].to_pylist())
        for version in versions
    ]


def contents(place: Path) -> dict[str, str]:
    """Return a fingerprint of every file below a directory, with its time."""
    return {
        str(path.relative_to(place)): f"{path.lstat().st_mtime_ns} {_digest(path)}"
        for path in sorted(place.rglob("*"))
    }


def manifest(place: Path, version: int) -> Path:
    """Return the manifest of a version, in either naming."""
    for name in (f"{2**64 - 1 - version:020}", str(version)):
        path = place / "_versions" / f"{name}.manifest"
        if path.exists():
            return path
    raise FileNotFoundError(f"version {version} of {place}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
