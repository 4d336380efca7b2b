"""Versions, tags and branches of every table, and what retention decides about them.

Ages come from the listing, so no manifest is opened here unless the caller asks for the times
written inside (`commit_times`) or for the rules branches carry themselves (`branch_rules`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    NOTE_REQUESTS,
    Opening,
    ReadStores,
    Root,
    as_text,
    batches,
    concurrently,
    from_micros,
    from_text,
    sql,
    to_micros,
)
from lakewarden.retention import Branch, History, Policy, Tag, Version, decide

Reader = Callable[[dict[str, Any], bytes], dict[str, Any] | None]
_VERSION, _STAGED, _TAG, _BRANCH, _RULES = "version", "staged", "tag", "branch", "rules"


@dataclass(frozen=True, slots=True)
class Retention:
    """What decides about versions: the policy (None keeps all), the moment, and the cost rule."""

    policy: Policy | None
    now: datetime
    #: A going version at least this old need not be opened; see `design.md`, the cost rule.
    unverified_after: timedelta


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
    spread = versions.select(*HISTORY.names).repartition(F.col("path"))
    return spread.mapInArrow(_reading(roots, opening, _read_commit_time), sql(HISTORY))


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
        row = {"root_id": rows[0]["root_id"], "reasons": as_text(error), "note": NOTE_ERROR}
        return pa.Table.from_pylist([row], schema=DECISIONS)


def _decide_rows(retention: Retention, rows: list[dict[str, Any]]) -> pa.Table:
    failed = next((row for row in rows if row["note"] == NOTE_ERROR), None)
    if failed is not None:
        raise from_text(str(failed["name"]))
    history, by_version = _history(rows)
    decided = []
    for decision in decide(history, retention.policy, retention.now):
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
    return pa.Table.from_pylist(decided, schema=DECISIONS)


def _history(
    rows: list[dict[str, Any]],
) -> tuple[History, dict[Version, dict[str, Any]]]:
    by_version: dict[Version, dict[str, Any]] = {}
    tags, branches, policies = [], [], {}
    published: dict[str, set[int]] = {}
    for row in rows:
        match row["what"]:
            case "version":
                by_version[_version(row, staged=False)] = row
                if not row["detached"]:
                    published.setdefault(str(row["branch"]), set()).add(int(row["version"]))
            case "tag":
                tags.append(Tag(str(row["name"]), str(row["branch"]), int(row["version"])))
            case "branch":
                branches.append(Branch(str(row["name"]), str(row["branch"]), int(row["version"])))
            case "rules":
                config = json.loads(str(row["name"]))
                own = refs.own_policy(config, int(row["version"]))
                if own is not None:
                    policies[str(row["branch"])] = own
    for row in rows:
        # A staged manifest may be the only copy of a commit.  It is left over only if its version
        # was published, or lies below the history that is still there.
        if row["what"] == _STAGED:
            known = published.get(str(row["branch"]), set())
            version = int(row["version"])
            if version not in known and (not known or version > min(known)):
                by_version[_version(row, staged=True)] = row
    return History(list(by_version), tags, branches, policies), by_version


def _version(row: dict[str, Any], *, staged: bool) -> Version:
    return Version(
        number=int(row["version"]),
        branch=str(row["branch"]),
        modified=from_micros(row["age_us"]),
        detached=bool(row["detached"]),
        staged=staged,
    )


def _reading(
    roots: Sequence[Root], opening: Opening, reader: Reader
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a stage that GETs the object of every row and turns it into a history row."""
    places = {root.root_id: root for root in roots}

    def read(stores: ReadStores, row: dict[str, Any]) -> dict[str, Any] | None:
        root = places[int(row["root_id"])]
        try:
            return reader(row, stores(root.location).get(root.key(str(row["path"]))))
        except NotFound:
            # Gone since it was listed: a ref that no longer is protects nothing, and a version
            # that no longer is needs nothing.
            return None
        except LakewardenError as error:
            named = Damaged(error.kind, f"{row['path']}: {error.message}")
            return {"root_id": row["root_id"], "name": as_text(named), "note": NOTE_ERROR}

    def read_batches(incoming: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stores = ReadStores(opening)
        rows = (row for batch in incoming for row in batch.to_pylist())
        yield from batches(filter(None, concurrently(partial(read, stores), rows)), HISTORY)
        yield from batches(
            [
                {"name": kind.value, "version": number, "note": NOTE_REQUESTS}
                for kind, number in stores.requests().items()
            ],
            HISTORY,
        )

    return read_batches


def _read_ref(row: dict[str, Any], data: bytes) -> dict[str, Any] | None:
    match refs.parse_ref(str(row["path"]), data):
        case Tag(name, branch, version):
            what = _TAG
        case Branch(name, branch, version):
            what = _BRANCH
        case None:
            return None
    return {
        "root_id": row["root_id"],
        "what": what,
        "branch": branch,
        "version": version,
        "name": name,
        "path": row["path"],
    }


def _read_commit_time(row: dict[str, Any], data: bytes) -> dict[str, Any]:
    committed = manifest.decode(data).committed
    if committed is None:
        raise Damaged(ErrorKind.CORRUPT_MANIFEST, "it carries no commit time")
    return {**row, "age_us": to_micros(committed)}


def _read_rules(row: dict[str, Any], data: bytes) -> dict[str, Any]:
    config = dict(manifest.decode(data).config)
    return {**row, "what": _RULES, "name": json.dumps(config)}
