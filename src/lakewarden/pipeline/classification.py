"""References joined with the listing: a verdict and a reason for every object.

`judged` is the column form of `verdict.judge`; a property test runs both on the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakewarden.errors import LakewardenError
from lakewarden.model import REMOVABLE, FileKind, FileReason, Verdict
from lakewarden.pipeline.frames import (
    Opening,
    ReadStores,
    Root,
    Stage,
    as_text,
    batches,
    concurrently,
    sql,
    to_micros,
)
from lakewarden.verdict import Margin

_GOES = (
    FileReason.ONLY_REMOVED_VERSIONS,
    FileReason.UNVERIFIED_OLD,
    FileReason.UNVERIFIED_REQUESTED,
)
#: The verdict on a file that a kept version names and the listing did not show.
MISSING = "missing"
LOST = pa.schema(
    [
        ("root_id", pa.int32()),
        ("key", pa.string()),
        ("by_root", pa.int32()),
        ("by_version", pa.int64()),
        ("note", pa.string()),
    ]
)
#: Columns of a judged object.
VERDICTS = (
    "table_id", "root_id", "path", "kind", "key", "stem", "size", "modified_us", "branch",
    "version", "reason", "verdict",
)  # fmt: skip


def classify(
    objects: DataFrame,
    references: DataFrame,
    margin: Margin,
    *,
    stems: bool,
) -> DataFrame:
    """Return every object with its verdict, and what kept versions name but the listing lacks.

    `stems` says whether any reference protects by name alone; without, a join is saved.
    """
    # Names are long and alike; sorting and shipping a hash of each is several times faster.  Two
    # names with one hash can only make a file seem in use: what goes is compared by its name.
    hashed = F.xxhash64("key").alias("hash")
    named = (
        references.filter("key IS NOT NULL")
        .select("root_id", hashed, "key", "kept", "unlisted", "by_root", "version")
        .groupBy("root_id", "hash")
        .agg(
            F.expr("bool_or(kept) AS any_kept"),
            F.expr("max(key) FILTER (WHERE NOT kept) AS going"),
            F.expr("bool_or(kept AND NOT coalesce(unlisted, false)) AS expected"),
            F.expr("max(by_root) FILTER (WHERE kept) AS by_root"),
            F.expr("max(version) FILTER (WHERE kept) AS by_version"),
        )
    )
    # Sorting all objects would take longer than a table of hashes for each of many parts.
    facts = objects.withColumn("hash", hashed).join(
        named.hint("shuffle_hash"), on=["root_id", "hash"], how="full_outer"
    )
    protected, elsewhere = "coalesce(any_kept, false)", "false"
    if stems:
        # These protect wherever they appear, so the root plays no part in this join.
        mentioned = (
            references.filter("stem IS NOT NULL AND kept")
            .groupBy("stem")
            .agg(F.expr("bool_and(coalesce(unlisted, false)) AS in_doubt"))
        )
        facts = facts.join(mentioned, on="stem", how="left")
        protected = f"({protected} OR NOT coalesce(in_doubt, true))"
        elsewhere = "coalesce(in_doubt, false)"
    facts = facts.selectExpr(
        "*",
        f"{protected} AS named_by_kept",
        "coalesce(going = key, false) AS named_by_going",
        f"{elsewhere} AS named_elsewhere",
    )
    return (
        judged(facts, margin)
        .filter("path IS NOT NULL OR expected")
        .selectExpr(
            *(name for name in VERDICTS if name != "verdict"),
            f"CASE WHEN path IS NULL THEN '{MISSING}' ELSE verdict END AS verdict",
            "hash",
            "by_root",
            "by_version",
        )
    )


def judged(facts: DataFrame, margin: Margin) -> DataFrame:
    """Add `verdict` and `reason` to rows with the columns of `verdict.Fact`."""
    now, cutoff = to_micros(margin.now), to_micros(margin.now - margin.unverified_after)
    unverified = str(margin.delete_unverified).lower()
    kinds = ", ".join(f"'{kind.value}'" for kind in sorted(REMOVABLE))
    cases = (
        (f"kind NOT IN ({kinds})", FileReason.UNKNOWN_KIND),
        ("named_by_kept", FileReason.IN_USE),
        ("named_by_going", FileReason.ONLY_REMOVED_VERSIONS),
        (f"kind = '{FileKind.MANIFEST.value}'", FileReason.UNDECIDED),
        ("NOT owned", FileReason.SHARED_PLACE),
        (
            f"modified_us IS NULL OR modified_us <= 0 OR modified_us > {now}",
            FileReason.UNKNOWN_AGE,
        ),
        (
            f"named_elsewhere AND (modified_us < {cutoff} OR {unverified})",
            FileReason.OTHER_PREFIX,
        ),
        (f"modified_us < {cutoff}", FileReason.UNVERIFIED_OLD),
        (unverified, FileReason.UNVERIFIED_REQUESTED),
    )
    reason = " ".join(f"WHEN {condition} THEN '{answer.value}'" for condition, answer in cases)
    goes = ", ".join(f"'{answer.value}'" for answer in _GOES)
    return facts.selectExpr(
        "*", f"CASE {reason} ELSE '{FileReason.UNVERIFIED_YOUNG.value}' END AS reason"
    ).selectExpr(
        "*",
        f"CASE WHEN reason IN ({goes}) THEN '{Verdict.DELETE.value}' "
        f"ELSE '{Verdict.KEEP.value}' END AS verdict",
    )


def really_missing(
    classified: DataFrame, references: DataFrame, roots: Sequence[Root], opening: Opening
) -> DataFrame:
    """Return the files of kept versions that do not exist: damage.

    A file may have been written after its directory was listed, so each is looked up once more.
    Transaction files are history, not data: a version reads without its own.
    """
    history = F.col("key").rlike(r"(^|/)_transactions/[^/]*\.txn$")
    names = (
        references.filter("key IS NOT NULL AND kept")
        .filter(~history)
        .select("root_id", F.xxhash64("key").alias("hash"), "key")
        .distinct()
    )
    lost = (
        classified.filter(F.col("verdict") == MISSING)
        .select("root_id", "hash", "by_root", "by_version")
        .join(names, on=["root_id", "hash"])
        .select(*LOST.names[:-1])
    )
    return lost.mapInArrow(_look_again(roots, opening), sql(LOST))


def _look_again(roots: Sequence[Root], opening: Opening) -> Stage:
    places = {root.root_id: root for root in roots}

    def look(stores: ReadStores, row: dict[str, Any]) -> dict[str, Any] | None:
        root = places[int(row["root_id"])]
        key = root.key(str(row["key"]))
        try:
            store = stores(root.location)
            if "/_indices/" in f"/{row['key']}":
                there = any(batch.num_rows for batch in store.list(key))
            else:
                there = store.exists(key)
        except LakewardenError as error:
            return {**row, "note": as_text(error)}
        return None if there else row

    def look_batches(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (row for batch in incoming for row in batch.to_pylist())
        found = concurrently(partial(look, ReadStores(opening)), rows)
        yield from batches(filter(None, found), LOST)

    return look_batches
