"""Compaction of an Iceberg table in a line, and what must be true after it, told by PyIceberg."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from pyiceberg.manifest import DataFileContent, ManifestEntry, ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation

from lakewarden.formats.iceberg import rewriting
from lakewarden.formats.iceberg.rewriting import Outcome, Work
from lakewarden.formats.iceberg.rewritten import Rewritten, described, discard, rewrite
from lakewarden.packing import Rules
from lakewarden.testing import iceberg as kit
from lakewarden.testing.iceberg import LakeCatalog
from lakewarden.world import fresh_id

PAIRS = Rules(min_files=2)
OPTIMIZE = {"lakewarden.maintenance": "optimize"}


def rewritten(table: Table, work: Work) -> list[Rewritten]:
    """Rewrite everything, as workers do: pieces and results travel."""
    told = described(table)
    results = [rewrite(pickle.loads(pickle.dumps(piece)), told) for piece in work.pieces]
    travelled: list[Rewritten] = pickle.loads(pickle.dumps(results))
    return travelled


def compact(table: Table, rules: Rules = PAIRS, **choice: Any) -> tuple[Work, Outcome]:
    work = rewriting.plan(table, rules, **choice)
    outcome = finish(table, work, rewritten(table, work))
    return work, outcome


def finish(table: Table, work: Work, results: list[Rewritten]) -> Outcome:
    outcome = rewriting.commit(table, work, results, properties=OPTIMIZE)
    assert not discard([one for one in results if one.piece in outcome.lost], table.io)
    return outcome


def rows(table: Table, **scan: Any) -> Counter[str]:
    """Return the rows that PyIceberg reads, each as often as it is there."""
    table.refresh()
    return Counter(map(repr, table.scan(**scan).to_arrow().to_pylist()))


def held(table: Table, **scan: Any) -> list[int]:
    table.refresh()
    return sorted(table.scan(**scan).to_arrow().column("id").to_pylist())


def live(table: Table, branch: str = "main") -> list[ManifestEntry]:
    """Return the live entries of a branch, as PyIceberg reads them."""
    snapshot = table.metadata.snapshot_by_name(branch)
    assert snapshot is not None
    return [
        entry
        for manifest in snapshot.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io)
        if entry.status is not ManifestEntryStatus.DELETED
    ]


def data(table: Table, branch: str = "main") -> list[ManifestEntry]:
    found = live(table, branch)
    return [one for one in found if one.data_file.content == DataFileContent.DATA]


def deletes(table: Table) -> list[ManifestEntry]:
    return [one for one in live(table) if one.data_file.content != DataFileContent.DATA]


def paths(table: Table) -> set[str]:
    return {one.data_file.file_path for one in live(table)}


def summary(table: Table) -> Mapping[str, str]:
    table.refresh()
    current = table.current_snapshot()
    assert current is not None
    assert current.summary is not None
    return {"operation": current.summary.operation.value, **current.summary.additional_properties}


def shared_deletes(table: Table, gone: set[int]) -> None:
    """Delete rows by id with one position delete file about several data files, without bounds."""
    columns: dict[str, list[Any]] = {"file_path": [], "pos": []}
    for file, positions in sorted(kit._positions(table, gone), key=lambda one: one[0].file_path):
        columns["file_path"] += [file.file_path] * len(positions)
        columns["pos"] += positions
    raw = kit._parquet(pa.table(columns), {"file_path": kit.PATH_ID, "pos": kit.POSITION_ID})
    name = f"{fresh_id()}-deletes.parquet"
    made = kit._written(table, name, raw, len(columns["pos"])) | {"content": 1}
    kit.commit(table, kit.Manifest([made], 1), operation=Operation.DELETE)


class Interrupted(LakeCatalog):
    """A catalog of which the next commit is disturbed: before it, after it, or instead of it."""

    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None

    def commit_table(self, *arguments: Any, **options: Any) -> Any:
        before, after = self.before, self.after
        self.before = self.after = None
        if before is not None:
            before()
        done = super().commit_table(*arguments, **options)
        if after is not None:
            after()
        return done
