"""References joined with the listing: a verdict and a reason for every object.

`judged` is the column form of `verdict.judge`; a property test runs both on the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from lakewarden.errors import LakewardenError
from lakewarden.model import REMOVABLE, FileReason, Verdict
from lakewarden.pipeline.frames import (
    Opening,
    ReadStores,
    Root,
    Stage,
    as_text,
    batches,
    concurrently,
    frame,
    sql,
    to_micros,
)
from lakewarden.verdict import Margin

_ROOTS = pa.schema([("root_id", pa.int32()), ("table_id", pa.int32()), ("owned", pa.bool_())])
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
    "version", "verdict", "reason",
)  # fmt: skip


def classify(
    spark: SparkSession,
    objects: DataFrame,
    references: DataFrame,
    roots: Sequence[Root],
    margin: Margin,
    *,
    stems: bool,
) -> DataFrame:
    """Return every object with its verdict, and what kept versions name but the listing lacks.

    `stems` says whether any reference protects by name alone; without, a join is saved.
    """
    named = (
        references.filter(F.col("key").isNotNull())
        .groupBy("root_id", "key")
        .agg(
            F.bool_or("kept").alias("named_by_kept"),
            F.bool_or(~F.col("kept")).alias("named_by_going"),
            F.max_by("by_root", "kept").alias("by_root"),
            F.max_by("version", "kept").alias("by_version"),
        )
    )
    table = F.broadcast(frame(spark, _ROOTS, [_root_row(root) for root in roots]))
    facts = (
        objects.join(named, on=["root_id", "key"], how="full_outer")
        .join(table, on="root_id", how="inner")
        .withColumn("stem", stem_of(F.col("key")))
        .withColumn("named_by_kept", F.coalesce("named_by_kept", F.lit(False)))
        .withColumn("named_by_going", F.coalesce("named_by_going", F.lit(False)))
    )
    if stems:
        # Random names protect wherever they appear, so the root plays no part in this join.
        mentioned = (
            references.filter(F.col("stem").isNotNull() & F.col("kept"))
            .select("stem")
            .distinct()
            .withColumn("mentioned", F.lit(True))
        )
        facts = facts.join(mentioned, on="stem", how="left").withColumn(
            "named_by_kept", F.col("named_by_kept") | F.col("mentioned").isNotNull()
        )
    present = F.col("path").isNotNull()
    # Transaction files are history, not data: a version reads without its own.
    lost = F.col("named_by_kept") & F.col("owned") & ~F.col("key").contains("_transactions/")
    return (
        judged(facts, margin)
        .withColumn("verdict", F.when(present, F.col("verdict")).otherwise(F.lit(MISSING)))
        .filter(present | lost)
        .select(*VERDICTS, "by_root", "by_version")
    )


def judged(facts: DataFrame, margin: Margin) -> DataFrame:
    """Add `verdict` and `reason` to rows with the columns of `verdict.Fact`."""
    now = F.lit(to_micros(margin.now))
    cutoff = F.lit(to_micros(margin.now - margin.unverified_after))
    modified = F.col("modified_us")
    age_is_known = modified.isNotNull() & (modified > 0) & (modified <= now)
    cases: tuple[tuple[Column, FileReason], ...] = (
        (~F.col("kind").isin([kind.value for kind in REMOVABLE]), FileReason.UNKNOWN_KIND),
        (F.col("named_by_kept"), FileReason.IN_USE),
        (F.col("named_by_going"), FileReason.ONLY_REMOVED_VERSIONS),
        (~F.col("owned"), FileReason.SHARED_PLACE),
        (~age_is_known, FileReason.UNKNOWN_AGE),
        (modified < cutoff, FileReason.UNVERIFIED_OLD),
        (F.lit(margin.delete_unverified), FileReason.UNVERIFIED_REQUESTED),
    )
    reason: Column | None = None
    for condition, answer in cases:
        literal = F.lit(answer.value)
        reason = F.when(condition, literal) if reason is None else reason.when(condition, literal)
    assert reason is not None
    goes = [
        FileReason.ONLY_REMOVED_VERSIONS.value,
        FileReason.UNVERIFIED_OLD.value,
        FileReason.UNVERIFIED_REQUESTED.value,
    ]
    verdict = F.when(F.col("reason").isin(goes), F.lit(Verdict.DELETE.value))
    return facts.withColumn(
        "reason", reason.otherwise(F.lit(FileReason.UNVERIFIED_YOUNG.value))
    ).withColumn("verdict", verdict.otherwise(F.lit(Verdict.KEEP.value)))


def really_missing(classified: DataFrame, roots: Sequence[Root], opening: Opening) -> DataFrame:
    """Return the files of kept versions that do not exist: damage.

    A file may have been written after its directory was listed, so each is looked up once more.
    """
    lost = classified.filter(F.col("verdict") == MISSING).select(*LOST.names[:-1])
    return lost.mapInArrow(_look_again(roots, opening), sql(LOST))


def stem_of(key: Column) -> Column:
    """Return the random part of a key; the column form of `references.stem`."""
    name = F.substring_index(key, "/", -1)
    return F.regexp_replace(name, r"(?s)^(.+)\.[^.]*$", "$1")


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


def _root_row(root: Root) -> dict[str, Any]:
    return {"root_id": root.root_id, "table_id": root.table_id, "owned": root.owned}
