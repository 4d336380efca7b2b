"""Builds small tables with a history, cleans them, and proves that every kept version still reads."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from lakewarden.cli import output
from lakewarden.cli.session import Engine, cores, start
from lakewarden.errors import ErrorKind, LakewardenError
from lakewarden.maintenance import cleanup, removal
from lakewarden.maintenance.fleet import parse_targets
from lakewarden.maintenance.survey import Reading
from lakewarden.retention import OnTagged, Policy
from lakewarden.storage.opening import Opener
from lakewarden.world import SystemClock

_DAY = 86400


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What one version of a table contains: enough to notice any loss."""

    place: str
    version: int
    rows: int
    total: int


def show(*, keep_directory: bool) -> None:
    """Run the demonstration; raise if anything that should have stayed is gone."""
    lance = _lance()
    clock = SystemClock()
    root = Path(tempfile.mkdtemp(prefix="lakewarden-demo-"))
    try:
        _say(f"building three tables and a shallow clone in {root}")
        _build(lance, root, clock.now().timestamp())
        _say("starting local Spark")
        spark = start(Engine(archive=True))
        reading = Reading(spark, Opener({}), clock, 2 * cores())
        targets = parse_targets([str(root)], recursive=True)
        policy = Policy(older_than=timedelta(days=14), keep=5, on_tagged=OnTagged.KEEP)

        _say(
            f"\n$ lakewarden cleanup {root} --recursive --older-than 14d --keep 5 --on-tagged keep"
        )
        plan = cleanup.plan(targets, cleanup.Cleanup(policy), reading, now=clock.now())
        _say(output.plan_text(plan, []))
        _say("preview: nothing was changed; add --confirm to remove")
        _say("\nplan.kept_versions(), in Python, says why versions stay:")
        for row in plan.kept_versions(8):
            branch = "" if row["branch"] == "main" else f"@{row['branch']}"
            _say(f"  {Path(row['table_key']).name} v{row['version']}{branch}: {row['reasons']}")

        kept = [
            (row.root_id, row.branch, row.version)
            for row in plan.versions.filter("kept and not detached").collect()
        ]
        places = {one.root_id: one.location.uri for one in plan.roots}
        before = list(_fingerprints(lance, kept, places))
        _say("\n$ … --confirm")
        receipt = removal.execute(plan, reading)
        _say(output.receipt_text(receipt))
        after = list(_fingerprints(lance, kept, places))
        if receipt.failed or before != after:
            raise LakewardenError(ErrorKind.DAMAGED_VERSION, "a kept version reads differently now")
        _say(f"\nproof    all {len(after)} kept versions read the same rows as before")
        again = cleanup.plan(targets, cleanup.Cleanup(policy), reading, now=clock.now())
        if again.removal.files_removed:
            raise LakewardenError(ErrorKind.DAMAGED_VERSION, "a second run found more to remove")
        _say("proof    a second run finds nothing left to remove")
        spark.stop()
    finally:
        if keep_directory:
            _say(f"left     {root}")
        else:
            shutil.rmtree(root)


def _build(lance: Any, root: Path, now: float) -> None:
    events = root / "events.lance"
    _grow(lance, events, range(10))
    lance.fragment.write_fragments(_rows(900, 5), str(events))  # a write that was never committed
    _grow(lance, events, range(10, 30))
    table = lance.dataset(str(events))
    table.delete("id % 7 = 0")
    table.create_scalar_index("id", "BTREE")
    table.tags.create("release-1", 4)
    branch = table.create_branch("experiment", 9)
    lance.write_dataset(_rows(500, 20), branch, mode="append")

    prices = root / "prices.lance"
    for step in range(25):
        lance.write_dataset(_rows(step, 200), str(prices), mode="overwrite" if step else "create")
    _grow(lance, root / "users.lance", range(12))
    clone = lance.dataset(str(root / "users.lance")).shallow_clone(
        str(root / "users-test.lance"), 3
    )
    lance.write_dataset(_rows(5000, 10), clone, mode="append")
    _age(root, now)


def _grow(lance: Any, place: Path, steps: range) -> None:
    for step in steps:
        lance.write_dataset(_rows(step * 10, 10), str(place), mode="append" if step else "create")


def _rows(first: int, number: int) -> pa.Table:
    return pa.table({"id": range(first, first + number), "value": [i * 0.5 for i in range(number)]})


def _age(root: Path, now: float) -> None:
    """Spread each table's history over the last ninety days."""
    span = 90 * _DAY
    for table in root.iterdir():
        files = sorted(
            (path.stat().st_mtime_ns, path) for path in table.rglob("*") if path.is_file()
        )
        for position, (_, path) in enumerate(files):
            moment = now - span + (span - _DAY) * (position + 1) / len(files)
            os.utime(path, (moment, moment))


def _fingerprints(
    lance: Any, versions: list[tuple[int, str, int]], places: dict[int, str]
) -> Iterator[Fingerprint]:
    for root_id, branch, version in sorted(versions):
        place = places[root_id] if branch == "main" else f"{places[root_id]}/tree/{branch}"
        rows = lance.dataset(place, version=version).to_table()
        yield Fingerprint(place, version, rows.num_rows, sum(rows.column("id").to_pylist()))


def _lance() -> Any:
    try:
        import lance
        import lance.fragment
    except ImportError as error:
        raise LakewardenError(
            ErrorKind.USAGE,
            "the demo writes Lance tables and needs pylance; pip install 'lakewarden[lance]'",
        ) from error
    return lance


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
