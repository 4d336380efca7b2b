"""Damage: versions that somebody may read and that cannot be read.

Looked at are the versions of a warehouse's tables that its branches, its tags and its log can bring
back, or all versions of a table that is in no warehouse.  Each finding says what it means, and what to
do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from lakewarden.errors import LakewardenError
from lakewarden.maintenance.survey import Costs, Reading, errors_in, list_fully
from lakewarden.model import Format
from lakewarden.pipeline import damage
from lakewarden.pipeline.damage import (
    METADATA,
    MISSING,
    NOTE_CURRENT,
    UNREADABLE,
    VERSIONS,
    WRONG_SIZE,
)
from lakewarden.pipeline.frames import NOTE_ERROR, NOTE_REQUESTS, frame, from_text, pin
from lakewarden.pipeline.listing import Unit
from lakewarden.storage.location import Location

#: Files, versions and refs that a finding names; the rest is counted.
EXAMPLES = 5
NAMED = 20
#: Versions to read that make it worth another task.
_VERSIONS_PER_TASK = 64
#: The log among the tables.
LOG = "__manifest"


@dataclass(frozen=True, slots=True)
class Version:
    """A version that somebody may read."""

    number: int
    #: Its manifest or metadata, and where that waits if it is not public yet.
    uri: str
    #: Where files lie that it names by a path alone.
    root: str
    also: str | None = None
    size: int | None = None
    #: What brings it back: branches, tags, versions of the warehouse.
    refs: tuple[str, ...] = ()
    #: Of Iceberg metadata: all its snapshots are needed, not only those that its refs name.
    whole: bool = False
    #: Somebody reads it without naming a version.
    current: bool = False
    #: How to get back to it, as a command.
    back: str | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """A table, and the versions of it that are looked at, newest first."""

    key: str
    format: Format
    location: str
    versions: Sequence[Version]
    #: What to do if none of them is sound.
    otherwise: str = "bring the files back from a backup"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong."""

    kind: str
    table_key: str
    means: str
    next: str
    #: Files, of which some are named.
    files: int = 0
    examples: tuple[str, ...] = ()
    #: Versions of the table (snapshots, of Iceberg; versions of the log, of the log itself).
    versions: tuple[int, ...] = ()
    refs: tuple[str, ...] = ()
    #: Objects that were, or can be, put aside.
    strays: tuple[str, ...] = field(default=(), repr=False)
    quarantined: int = 0


def find(tables: Sequence[Checked], reading: Reading, costs: Costs) -> list[Finding]:
    """Look at all versions of all tables in one go."""
    tables = [one for one in tables if one.versions]
    if not tables:
        return []
    units = [Unit(Location.parse(table.location)) for table in tables]
    with costs.stage(reading, "list", f"tables: {len(tables):,}"):
        listed, noted = list_fully(units, reading)
        costs.add_noted(noted, "key", "size")
        unlisted = errors_in(noted, "unit", "key")
    findings = [_unlisted(tables[number], error) for number, error in unlisted.items()]
    wanted = [
        # Numbers of versions are not unique: branches count on from where they began.
        {"table_id": number, "format": table.format.value, "version": position,
         "root": one.root, "uri": one.uri, "also": one.also, "size": one.size, "whole": one.whole}
        for number, table in enumerate(tables) if number not in unlisted
        for position, one in enumerate(table.versions)
    ]  # fmt: skip
    if not wanted:
        return findings
    with costs.stage(reading, "read versions", f"versions: {len(wanted):,}"):
        tasks = max(1, min(reading.tasks, len(wanted) // _VERSIONS_PER_TASK))
        work = _Work(frame(reading.spark, VERSIONS, wanted), reading, tasks)
        needed = work.needed({table.format for table in tables})
        notes = needed.filter("note IS NOT NULL")
        costs.add_noted(notes.filter(F.col("note") == NOTE_REQUESTS).collect(), "uri", "size")
        unread = _unread(notes)
        current = notes.filter(F.col("note") == NOTE_CURRENT).collect()
    with costs.stage(reading, "look for damage"):
        places = damage.with_uris(listed, [unit.place.store.uri for unit in units])
        lost = work.broken(needed, places)
    needing = [(row, _needing(tables[row.table_id], row, current)) for row in (*unread, *lost)]
    broken: dict[int, set[str]] = {}
    for row, versions in needing:
        broken.setdefault(row.table_id, set()).update(one.uri for one in versions)
    for row, versions in needing:
        findings.append(_finding(tables[row.table_id], row, versions, broken[row.table_id]))
    return sorted(findings, key=lambda one: (one.table_key, one.kind))


class _Work:
    """The frames of one search."""

    def __init__(self, versions: DataFrame, reading: Reading, tasks: int) -> None:
        self._versions = versions
        self._opening = reading.opening
        self._tasks = tasks
        # How many lists and manifests there are, nobody knows before.
        self._most = reading.tasks
        #: What names files by version: lists and manifests of Iceberg tables.
        self._every: list[DataFrame] = []

    def needed(self, formats: set[Format]) -> DataFrame:
        """Return all files that the versions need."""
        parts: list[DataFrame] = []
        if Format.LANCE in formats:
            parts.append(pin(damage.of_lance(self._versions, self._opening, tasks=self._tasks)))
        if Format.ICEBERG in formats:
            named = pin(damage.of_metadata(self._versions, self._opening, tasks=self._tasks))
            lists = pin(damage.of_lists(named, self._opening, tasks=self._most))
            self._every = [named, lists]
            both = named.unionByName(lists)
            parts += [
                *self._every,
                pin(damage.of_manifests(both, self._opening, tasks=self._most)),
            ]
        return _union(parts)

    def broken(self, needed: DataFrame, places: DataFrame) -> list[Row]:
        """Return by table and problem what is broken, and which versions need it."""
        found = pin(damage.broken(needed.filter("note IS NULL"), places, self._opening))
        tables = [row.table_id for row in found.select("table_id").distinct().collect()]
        if not tables:
            return []
        mine = self._versions.filter(F.col("table_id").isin(tables))
        again = damage.of_lance(mine, self._opening, tasks=self._tasks, all_versions=True)
        every = _union([again, *self._every]).filter("note IS NULL")
        return _summed(damage.attributed(found, every))


def _union(parts: Sequence[DataFrame]) -> DataFrame:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.unionByName(part)
    return whole


def _summed(found: DataFrame) -> list[Row]:
    example = F.concat(
        F.col("file"),
        F.when(
            F.col("problem") == WRONG_SIZE,
            F.concat(F.lit(" ("), "found", F.lit(" bytes, not "), "size", F.lit(")")),
        ).otherwise(F.lit("")),
    )
    some = F.slice(F.sort_array(F.collect_set(example)), 1, EXAMPLES)
    return (
        found.groupBy("table_id", "problem")
        .agg(
            F.countDistinct("file").alias("files"),
            some.alias("examples"),
            F.sort_array(F.collect_set("version")).alias("versions"),
            _metadata(F.col("what"), "file"),
            F.min("why").alias("why"),
        )
        .collect()
    )


def _metadata(what: Column, file: str) -> Column:
    """Return the metadata among files that are broken: never more than there are versions."""
    return F.collect_set(F.when(what == METADATA, F.col(file))).alias("metadata")


def _unread(notes: DataFrame) -> list[Row]:
    """Return by table what is there and cannot be read."""
    return (
        notes.filter(F.col("note") == NOTE_ERROR)
        .groupBy("table_id")
        .agg(
            F.lit(UNREADABLE).alias("problem"),
            F.countDistinct("uri").alias("files"),
            F.slice(F.sort_array(F.collect_set("uri")), 1, EXAMPLES).alias("examples"),
            F.sort_array(F.collect_set("version")).alias("versions"),
            _metadata(F.col("via"), "uri"),
            F.min("what").alias("why"),
        )
        .collect()
    )


def _unlisted(table: Checked, error: LakewardenError) -> Finding:
    return Finding(
        UNREADABLE,
        table.key,
        f"its files cannot be listed ({error.message}), so nothing is known of them",
        "check the path and the credentials, and run again",
    )


_MEANS = {
    MISSING: "{files} file(s) that {versions} need do not exist: whoever reads there fails",
    WRONG_SIZE: "{files} file(s) that {versions} need have another size than was written: they were cut "
    "short or overwritten, and whoever reads them fails or reads nonsense",
    UNREADABLE: "{files} file(s) that say what {versions} need cannot be read ({why})",
}


def _needing(table: Checked, row: Any, current: Sequence[Row]) -> list[Version]:
    """Return the versions that need what is broken; of Iceberg, those whose refs name such a snapshot."""
    numbers, uris = {*row.versions}, {*row.metadata}
    if table.format is Format.LANCE:
        return [one for position, one in enumerate(table.versions) if position in numbers]
    naming = {one.uri for one in current if one.version in numbers}
    return [one for one in table.versions if one.uri in naming or one.uri in uris]


def _finding(table: Checked, row: Any, needing: Sequence[Version], broken: set[str]) -> Finding:
    lance = table.format is Format.LANCE
    numbers = {one.number for one in needing} if lance else {*row.versions} - {None}
    # Of metadata that cannot be read, nobody can tell the snapshots.
    noun = "version" if lance or not numbers else "snapshot"
    count = len(numbers) or len(needing)
    named = f"{noun} {min(numbers)}" if len(numbers) == 1 else f"{count} {noun}(s)"
    why = from_text(row.why).message if row.why else ""
    refs = tuple(dict.fromkeys(ref for one in needing for ref in one.refs))
    return Finding(
        row.problem,
        table.key,
        _MEANS[row.problem].format(files=row.files, versions=named, why=why),
        _advice(table, needing, broken),
        row.files,
        tuple(row.examples),
        tuple(sorted(numbers, reverse=True)),
        refs,
    )


def _advice(table: Checked, needing: Sequence[Version], broken: set[str]) -> str:
    """Say what to do: go back to the newest version in which nothing is wrong, or let old ones go."""
    if needing and not any(one.current for one in needing):
        return (
            f"{table.otherwise}, or let those versions go (delete the tags that name them, and run "
            "lakewarden cleanup); what is current is sound"
        )
    ways = (one.back for one in table.versions if one.back and one.uri not in broken)
    way = next(ways, None)
    if way is None:
        return table.otherwise
    return f"{table.otherwise}, or go back to the newest version that is sound: {way}"
