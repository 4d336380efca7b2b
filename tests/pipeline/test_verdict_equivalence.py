"""The rule about files is written twice; both must say the same of every file."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from lakewarden.model import FileKind
from lakewarden.pipeline.classification import judged, stem_of
from lakewarden.pipeline.frames import frame, to_micros
from lakewarden.pipeline.references import stem
from lakewarden.testing.strategies import AGES, NOW, facts, margins
from lakewarden.verdict import Fact, Margin, judge

ROWS = pa.schema(
    [
        ("number", pa.int32()),
        ("kind", pa.string()),
        ("named_by_kept", pa.bool_()),
        ("named_by_going", pa.bool_()),
        ("modified_us", pa.int64()),
        ("owned", pa.bool_()),
    ]
)
#: Every combination with every age on a limit; drawn facts come on top.
EVERY = [
    Fact(kind, kept, going, modified, owned)
    for kind in (FileKind.DATA, FileKind.REF)
    for kept in (True, False)
    for going in (True, False)
    for owned in (True, False)
    for modified in (None, *(NOW - age for age in AGES))
]


def in_spark(spark: SparkSession, given_facts: list[Fact], margin: Margin) -> list[tuple[str, str]]:
    rows: list[dict[str, Any]] = [
        {
            "number": number,
            "kind": fact.kind.value,
            "named_by_kept": fact.named_by_kept,
            "named_by_going": fact.named_by_going,
            "modified_us": to_micros(fact.modified),
            "owned": fact.owned,
        }
        for number, fact in enumerate(given_facts)
    ]
    found = judged(frame(spark, ROWS, rows), margin).orderBy("number").collect()
    return [(row.verdict, row.reason) for row in found]


@settings(max_examples=8, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.lists(facts(), min_size=100, max_size=200), margins())
def test_columns_judge_like_the_rule(
    spark: SparkSession, drawn: list[Fact], margin: Margin
) -> None:
    rows = EVERY + drawn
    wanted = [judge(fact, margin) for fact in rows]
    for fact, seen, one in zip(rows, in_spark(spark, rows, margin), wanted, strict=True):
        assert seen == (one[0].value, one[1].value), fact


NAMES = [
    "data/0101.lance", "_indices/6f9619ff-8b86-d011-b42d-00cf4fc964ff", "_deletions/1-2-3.arrow",
    "tree/a.b/data/x.y.lance", "data/.hidden", "data/no-extension", "plain.lance", "_indices/a.b",
    "data/new\nline.lance", "data/ü.lance", "data/x.", "x", "data/..", "_transactions/1-2.txn",
]  # fmt: skip


def test_stems_are_cut_alike(spark: SparkSession) -> None:
    """A file is protected by its stem only if both sides of the join cut it in the same place."""
    rows = [{"key": name} for name in NAMES]
    columns = frame(spark, pa.schema([("key", pa.string())]), rows)
    found = {
        row.key: row.stem
        for row in columns.select("key", stem_of(columns.key).alias("stem")).collect()
    }
    assert found == {name: stem(name) for name in NAMES}


@pytest.mark.parametrize(
    ("key", "wanted"),
    [("data/0101.lance", "0101"), ("_indices/6f96-8b/", "6f96-8b"), ("data/.tmp", ".tmp")],
)
def test_stem_is_the_random_part(key: str, wanted: str) -> None:
    assert stem(key) == wanted
