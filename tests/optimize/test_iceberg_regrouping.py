"""Which files are rewritten together: whatever there is, it is worth it, and done once."""

from __future__ import annotations

import math
import uuid
from dataclasses import replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import cmp_to_key
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    VoidTransform,
    YearTransform,
)
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from lakewarden.formats.iceberg.arranging import arranged, dividable, divided, sortable
from lakewarden.formats.iceberg.regrouping import SMALL, Group, Sized, Wanted, outputs, regroup

TARGET = 1000


@st.composite
def partitions(draw: st.DrawFn) -> list[Sized]:
    """Files of one partition, in the order they were written."""
    made = []
    for place in range(draw(st.integers(0, 40))):
        size = draw(st.integers(1, 3 * TARGET))
        deleted = draw(st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.2, 1.0]))
        settled = draw(st.booleans())
        made.append(Sized(place, size, int(size * (1 - deleted)), deleted, settled))
    return made


def after(
    files: list[Sized], groups: list[Group], packing: float, shuffled: st.DataObject
) -> list[Sized]:
    """Return the files that a rewrite leaves; rows take that share of what was expected.

    Its own files may be anywhere among the others, which keep their order.
    """
    gone = {one.place for group in groups for one in group.members}
    left = [one for one in files if one.place not in gone]
    for group in groups:
        whole = sum(one.live_bytes for one in group.members)
        for _ in range(group.outputs):
            size = max(1, int(whole * packing) // group.outputs)
            where = shuffled.draw(st.integers(0, len(left)))
            left.insert(where, Sized(0, size, size, settled=True))
    return [replace(one, place=place) for place, one in enumerate(left)]


@given(partitions(), st.integers(2, 8))
def test_every_group_is_worth_it(files: list[Sized], least: int) -> None:
    wanted = Wanted(TARGET, least)
    groups = regroup(files, wanted)
    event(f"groups: {min(len(groups), 3)}")
    seen = [one.place for group in groups for one in group.members]
    assert len(seen) == len(set(seen))
    for group in groups:
        with_deletes = any(one.deleted >= wanted.deletions for one in group.members)
        assert with_deletes or group.outputs < len(group.members)
        whole = sum(one.live_bytes for one in group.members)
        assert with_deletes or len(group.members) >= least or whole >= TARGET
        assert with_deletes or not all(one.settled for one in group.members)
        assert group.outputs == outputs(group.members, TARGET)
        if whole >= SMALL * TARGET:
            assert SMALL * TARGET <= whole / group.outputs <= 1.8 * TARGET
        fresh = [one.place for one in group.members if not one.settled]
        assert fresh == sorted(fresh)


@given(partitions())
def test_what_has_many_deleted_rows_goes_and_what_is_large_enough_stays(files: list[Sized]) -> None:
    chosen = {one for group in regroup(files, Wanted(TARGET)) for one in group.members}
    for file in files:
        if file.deleted >= 0.1:
            assert file in chosen
        elif file.bytes >= SMALL * TARGET:
            assert file not in chosen


@given(partitions(), st.integers(2, 8), st.sampled_from([0.05, 0.5, 1.0, 1.1]), st.data())
def test_a_second_run_finds_nothing(
    files: list[Sized], least: int, packing: float, shuffled: st.DataObject
) -> None:
    """Also where rows take much less than was expected, and the first run has left files out."""
    wanted = Wanted(TARGET, least)
    groups = regroup(files, wanted)
    event("with groups" if groups else "without")
    assert regroup(after(files, groups, packing, shuffled), wanted) == []


# -- order and partitions --------------------------------------------------------------------------

_AT = datetime.fromisoformat("2026-03-04T05:06:07.000089")
_OLD = datetime.fromisoformat("1960-01-01")
_EPOCH = datetime.fromisoformat("1970-01-01")
VALUES: list[tuple[PrimitiveType, list[Any]]] = [
    (LongType(), [5, None, -7, 5, 0]),
    (DoubleType(), [1.5, None, math.nan, -math.inf, 2.0]),
    (StringType(), ["b", None, "ä", "", "ba"]),
    (BinaryType(), [b"b", None, b"\xff", b"", b"ba"]),
    (FixedType(2), [b"bb", None, b"\xff\x00", b"aa", b"ab"]),
    (UUIDType(), [uuid.UUID(int=n).bytes if n else None for n in (5, 0, 1 << 127, 9, 3)]),
    (BooleanType(), [True, None, False, True, False]),
    (DateType(), [date(2026, 1, 2), None, date(1969, 12, 31), date(2026, 1, 1), date(2027, 1, 1)]),
    (TimeType(), [time(5), None, time(1), time(23), time(2)]),
    (TimestampType(), [_AT, None, _OLD, _AT.replace(hour=6), _AT]),
    (TimestamptzType(), [_AT.replace(tzinfo=UTC), None, _OLD.replace(tzinfo=UTC)]),
    (DecimalType(9, 2), [Decimal("1.10"), None, Decimal("-3.00"), Decimal("1.09")]),
]
TRANSFORMS: list[Transform[Any, Any]] = [
    IdentityTransform(), BucketTransform(3), TruncateTransform(2), YearTransform(),
    MonthTransform(), DayTransform(), HourTransform(),
]  # fmt: skip
CASES = [
    (kind, values, transform)
    for kind, values in VALUES
    for transform in TRANSFORMS
    if transform.can_transform(kind)
]
NAMES = [f"{kind}-{transform}" for kind, _, transform in CASES]


def table_of(kind: PrimitiveType, values: list[Any]) -> tuple[Schema, pa.Table]:
    schema = Schema(
        NestedField(1, "n", LongType()), NestedField(2, "s", StructType(NestedField(3, "v", kind)))
    )
    whole = schema.as_arrow()
    inside = whole.field("s").type.field(0)
    if isinstance(inside.type, pa.BaseExtensionType):
        held = pa.array(values, inside.type.storage_type)
        column = pa.ExtensionArray.from_storage(inside.type, held)
    else:
        column = pa.array(values, inside.type)
    nested = pa.StructArray.from_arrays([column], fields=[inside])
    return schema, pa.table([pa.array(range(len(values))), nested], schema=whole)


def stored(value: Any) -> Any:
    """Return a value as the specification stores it; written out, not by the code that is tested."""
    if isinstance(value, datetime):
        naive = value.replace(tzinfo=None) - _EPOCH
        return naive.days * 86_400_000_000 + naive.seconds * 1_000_000 + naive.microseconds
    if isinstance(value, date):
        return (value - date(1970, 1, 1)).days
    if isinstance(value, time):
        return value.hour * 3_600_000_000
    return value


@pytest.mark.parametrize(("kind", "values", "transform"), CASES, ids=NAMES)
@pytest.mark.parametrize("way", SortDirection)
@pytest.mark.parametrize("nulls", NullOrder)
def test_rows_are_sorted_as_python_sorts_them(
    kind: PrimitiveType,
    values: list[Any],
    transform: Transform[Any, Any],
    way: SortDirection,
    nulls: NullOrder,
) -> None:
    schema, rows = table_of(kind, values)
    order = SortOrder(SortField(3, transform, way, nulls))
    assert sortable(order, schema)
    made = [transform.transform(kind)(stored(one)) for one in values]

    def compare(left: int, right: int) -> int:
        one, two = made[left], made[right]
        if one is None or two is None:
            first = -1 if nulls is NullOrder.NULLS_FIRST else 1
            return first * ((one is None) - (two is None))
        greater = _above(one, two) - _above(two, one)
        return greater if way is SortDirection.ASC else -greater

    expected = sorted(range(len(values)), key=cmp_to_key(compare))
    assert arranged(rows, order, schema).column("n").to_pylist() == expected


def _above(one: Any, two: Any) -> bool:
    if isinstance(one, float) and (math.isnan(one) or math.isnan(two)):
        return math.isnan(one) and not math.isnan(two)
    return bool(one > two)


@pytest.mark.parametrize(("kind", "values", "transform"), CASES, ids=NAMES)
def test_rows_are_divided_as_the_transform_says(
    kind: PrimitiveType, values: list[Any], transform: Transform[Any, Any]
) -> None:
    schema, rows = table_of(kind, values)
    spec = PartitionSpec(
        PartitionField(3, 1000, transform, "p"), PartitionField(1, 1001, VoidTransform(), "gone")
    )
    assert dividable(spec, schema)
    expected: dict[str, list[int]] = {}
    for place, one in enumerate(values):
        key = repr([transform.transform(kind)(stored(one)), None])
        expected.setdefault(key, []).append(place)
    found = {
        repr([record[0], record[1]]): part.column("n").to_pylist()
        for record, part in divided(rows, spec, schema)
    }
    assert found == expected
