"""Versions, tags and branches of every table, and what retention decides about them.

Ages come from the listing, so no manifest is opened here unless the caller asks for the times
written inside (`commit_times`) or for the rules branches carry themselves (`branch_rules`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound
from lakewarden.formats.lance import manifest, refs
from lakewarden.model import FileKind, age_is_known
from lakewarden.pipeline.frames import (
    DECISIONS,
    HISTORY,
    NOTE_ERROR,
    NOTE_OPEN,
    NOTE_REQUESTS,
    Opening,
    ReadStores,
    Root,
    Stage,
    as_text,
    batches,
    concurrently,
    from_micros,
    from_text,
    request_notes,
    sql,
    to_micros,
)
from lakewarden.retention import Branch, History, Pins, Policy, Tag, Version, decide

Reader = Callable[[dict[str, Any], bytes], dict[str, Any] | None]
_VERSION, _STAGED, _TAG, _BRANCH, _RULES = "version", "staged", "tag", "branch", "rules"


@dataclass(frozen=True, slots=True)
class Retention:
    """What decides about versions: the policy (None keeps all), the moment, and the cost rule."""

    policy: Policy | None
    now: datetime
    #: A going version at least this old need not be opened: all it names is old enough to go.
    unverified_after: timedelta
    #: Roots that are only read: all their versions stay.
    unchanged: frozenset[int] = frozenset()
    #: Of roots that belong to a warehouse: what its log says is needed.
    pins: Mapping[int, Pins] = field(default_factory=dict)


def versions_of(objects: DataFrame) -> DataFrame:
    """Return the history rows of all manifests."""
    kinds = [FileKind.MANIFEST.value, FileKind.STAGED_MANIFEST.value]
    what = F.when(F.col("kind") == kinds[0], F.lit(_VERSION)).otherwise(F.lit(_STAGED))
    return objects.filter(F.col("kind").isin(kinds)).select(
        "root_id",
        what.alias("what"),
        "branch",
        "version",
        F.lit(None).cast("string").alias("name"),
        "path",
        "detached",
        "modified_us",
        F.col("modified_us").alias("age_us"),
        F.lit(None).cast("string").alias("note"),
    )


def refs_of(objects: DataFrame, roots: Sequence[Root], opening: Opening) -> DataFrame:
    """Read every tag and branch."""
    found = objects.filter(F.col("kind") == FileKind.REF.value).select("root_id", "path")
    return found.mapInArrow(_reading(roots, opening, _read_ref), sql(HISTORY))


def commit_times(versions: DataFrame, roots: Sequence[Root], opening: Opening) -> DataFrame:
    """Open every manifest and take the version's age from the time written inside."""
    every = versions.select(*HISTORY.names).repartition(F.col("path"))
    return every.mapInArrow(_reading(roots, opening, _read_commit_time), sql(HISTORY))


def branch_rules(versions: DataFrame, roots: Sequence[Root], opening: Opening) -> DataFrame:
    """Read the cleanup rules in the configuration of every branch's head."""
    attached = versions.filter((F.col("what") == _VERSION) & ~F.col("detached"))
    heads = attached.groupBy("root_id", "branch").agg(
        F.max_by("path", "version").alias("path"), F.max("version").alias("version")
    )
    on_branches = heads.filter(F.col("path").startswith("tree/"))
    return on_branches.mapInArrow(_reading(roots, opening, _read_rules), sql(HISTORY))


def decisions(history: DataFrame, retention: Retention) -> DataFrame:
    """Decide about every version; a table that cannot be decided becomes one error row."""

    def decide_table(table: pa.Table) -> pa.Table:
        return _decide(retention, table)

    return history.groupBy("root_id").applyInArrow(decide_table, sql(DECISIONS))


def _decide(retention: Retention, table: pa.Table) -> pa.Table:
    rows = table.to_pylist()
    if rows[0]["root_id"] is None:
        # The counts of requests; they belong to no table.
        counted = [
            {"branch": row["name"], "version": row["version"], "note": NOTE_REQUESTS}
            for row in rows
        ]
        return pa.Table.from_pylist(counted, schema=DECISIONS)
    try:
        return _decide_rows(retention, rows)
    except LakewardenError as error:
        failed = {"root_id": rows[0]["root_id"], "reasons": as_text(error), "note": NOTE_ERROR}
        # Nothing of this table goes, but other tables do: what its versions take from them (it may
        # be a shallow clone) must still be known.
        return pa.Table.from_pylist([failed, *_all_kept(rows)], schema=DECISIONS)


def _all_kept(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row["what"] in (_VERSION, _STAGED):
            known = {name: row[name] for name in DECISIONS.names if name in row and name != "note"}
            yield {**known, "kept": True, "reasons": "not decided", "must_open": True}


def _decide_rows(retention: Retention, rows: list[dict[str, Any]]) -> pa.Table:
    failed = next((row for row in rows if row["note"] == NOTE_ERROR), None)
    if failed is not None:
        raise from_text(str(failed["name"]))
    strange = next(
        (row for row in rows if row["what"] == _VERSION and row["version"] is None), None
    )
    if strange is not None:
        raise Damaged(
            ErrorKind.UNSUPPORTED_FEATURE,
            f"{strange['path']} is named like no version this release knows; nothing goes: upgrade "
            "lakewarden, or move that file away",
        )
    history, by_version = _history(rows)
    decided: list[dict[str, Any]] = []
    policy = None if rows[0]["root_id"] in retention.unchanged else retention.policy
    pins = retention.pins.get(rows[0]["root_id"])
    for decision in decide(history, policy, retention.now, pins):
        row = by_version[decision.version]
        modified = from_micros(row["modified_us"])
        can_change_a_verdict = not age_is_known(modified, retention.now) or (
            modified is not None and modified >= retention.now - retention.unverified_after
        )
        decided.append(
            {
                "root_id": row["root_id"],
                "branch": row["branch"],
                "version": row["version"],
                "detached": row["detached"],
                "path": row["path"],
                "modified_us": row["modified_us"],
                "kept": decision.keep,
                "reasons": "; ".join(decision.reasons),
                "must_open": decision.keep or can_change_a_verdict,
            }
        )
    to_open = sum(row["must_open"] for row in decided)
    decided.append({"root_id": rows[0]["root_id"], "version": to_open, "note": NOTE_OPEN})
    return pa.Table.from_pylist(decided, schema=DECISIONS)


def _history(
    rows: list[dict[str, Any]],
) -> tuple[History, dict[Version, dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["what"], []).append(row)
    by_version = {_version(row, staged=False): row for row in kinds.get(_VERSION, ())}
    published: dict[str, set[int]] = {}
    for version in by_version:
        if not version.detached:
            published.setdefault(version.branch, set()).add(version.number)
    for row in kinds.get(_STAGED, ()):
        # A staged manifest may be the only copy of a commit.  It is left over only if its version
        # was published, or lies below the history that is still there.
        known = published.get(row["branch"], set())
        if row["version"] not in known and (not known or row["version"] > min(known)):
            by_version[_version(row, staged=True)] = row
    rules = {
        row["branch"]: refs.own_policy(json.loads(row["name"]), row["version"])
        for row in kinds.get(_RULES, ())
    }
    history = History(
        versions=list(by_version),
        tags=[Tag(row["name"], row["branch"], row["version"]) for row in kinds.get(_TAG, ())],
        branches=[
            Branch(row["name"], row["branch"], row["version"]) for row in kinds.get(_BRANCH, ())
        ],
        branch_policies={branch: own for branch, own in rules.items() if own is not None},
    )
    return history, by_version


def _version(row: dict[str, Any], *, staged: bool) -> Version:
    return Version(
        number=int(row["version"]),
        branch=str(row["branch"]),
        modified=from_micros(row["age_us"]),
        detached=bool(row["detached"]),
        staged=staged,
        stored=from_micros(row["modified_us"]),
        path=row["path"],
    )


def _reading(roots: Sequence[Root], opening: Opening, reader: Reader) -> Stage:
    """Return a stage that GETs the object of every row and turns it into a history row."""
    places = {root.root_id: root for root in roots}

    def read(stores: ReadStores, row: dict[str, Any]) -> dict[str, Any] | None:
        root = places[int(row["root_id"])]
        try:
            refs.check_path(row["path"])
            return reader(row, stores(root.location).get(root.key(str(row["path"]))))
        except NotFound:
            # Gone since it was listed: a ref that no longer is protects nothing, and a version
            # that no longer is needs nothing.
            return None
        except LakewardenError as error:
            named = Damaged(error.kind, f"{row['path']}: {error.message}")
            return {**row, "name": as_text(named), "note": NOTE_ERROR}

    def read_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stores = ReadStores(opening)
        rows = (row for batch in incoming for row in batch.to_pylist())
        yield from batches(filter(None, concurrently(partial(read, stores), rows)), HISTORY)
        yield from request_notes(stores.requests(), HISTORY, "name", "version")

    return read_batches


def _read_ref(row: dict[str, Any], data: bytes) -> dict[str, Any] | None:
    ref = refs.parse_ref(row["path"], data)
    if ref is None:
        return None
    found = {"root_id": row["root_id"], "name": ref.name, "path": row["path"]}
    if isinstance(ref, Tag):
        return found | {"what": _TAG, "branch": ref.branch, "version": ref.version}
    return found | {"what": _BRANCH, "branch": ref.parent, "version": ref.parent_version}


def _read_commit_time(row: dict[str, Any], data: bytes) -> dict[str, Any]:
    committed = manifest.decode(data).committed
    if committed is None:
        raise Damaged(ErrorKind.CORRUPT_MANIFEST, "it carries no commit time")
    return {**row, "age_us": to_micros(committed)}


def _read_rules(row: dict[str, Any], data: bytes) -> dict[str, Any]:
    config = dict(manifest.decode(data).config)
    return {**row, "what": _RULES, "name": json.dumps(config)}
