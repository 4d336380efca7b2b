"""Histories to clean, built once and copied by hard links, so both sides clean the same files."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import lance
import pyarrow as pa

DAY = 86400


def rows(first: int, number: int = 3) -> pa.Table:
    return pa.table({"id": range(first, first + number), "value": [0.5] * number})


def grow(base: Path, kind: str, sizes: list[int]) -> dict[int, Path]:
    """Build one history and keep a copy of it at every size."""
    copies = {size: base / f"{kind}-{size}.lance" for size in sizes}
    if all(copy.exists() for copy in copies.values()):
        return copies
    growing = base / f"{kind}-growing.lance"
    shutil.rmtree(growing, ignore_errors=True)
    mode = "append" if kind == "append" else "overwrite"
    table = None
    for version in range(1, max(sizes) + 1):
        target = table if table is not None else str(growing)
        table = lance.write_dataset(rows(version), target, mode=mode if version > 1 else "create")
        if version in copies:
            shutil.rmtree(copies[version], ignore_errors=True)
            shutil.copytree(growing, copies[version])
            print(f"  built {kind} {version}", flush=True)
    shutil.rmtree(growing)
    return copies


def fleet(base: Path, number: int, versions: int = 20) -> Path:
    """Build `number` small tables by copying one."""
    place = base / f"fleet-{number}"
    if place.exists():
        return place
    one = base / "fleet-one.lance"
    shutil.rmtree(one, ignore_errors=True)
    for version in range(versions):
        lance.write_dataset(rows(version), str(one), mode="overwrite" if version else "create")
    making = base / "fleet-making"
    shutil.rmtree(making, ignore_errors=True)
    for table in range(number):
        shutil.copytree(one, making / f"t{table:04d}.lance")
    making.rename(place)
    return place


def age(place: Path, days: float) -> None:
    """Set every file's modification time back."""
    moment = time.time() - days * DAY
    for directory, _, names in os.walk(place):
        for name in names:
            os.utime(Path(directory) / name, (moment, moment))


def linked(source: Path, target: Path) -> Path:
    """Copy by hard links: cheap, and deleting the copy leaves the source."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-al", str(source), str(target)], check=True)
    return target
