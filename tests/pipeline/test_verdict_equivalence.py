"""The rule about files is written twice; both must say the same of every file."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from lakewarden.model import FileKind
from lakewarden.pipeline.classification import judged
from lakewarden.pipeline.frames import frame, to_micros
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
        ("named_elsewhere", pa.bool_()),
    ]
)
#: Every combination with every age on a limit; drawn facts come on top.
EVERY = [
    Fact(kind, kept, going, modified, owned, elsewhere)
    for kind in (FileKind.DATA, FileKind.REF)
    for kept in (True, False)
    for going in (True, False)
    for owned in (True, False)
    for elsewhere in (True, False)
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
            "named_elsewhere": fact.named_elsewhere,
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
