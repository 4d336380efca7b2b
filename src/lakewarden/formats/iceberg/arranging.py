"""Rows in the order and in the partitions that a table asks for.

Transforms are PyIceberg's own, applied to each value that occurs once, so that all of them can be
used; those for Arrow need a library that is not there everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import NullOrder, SortDirection, SortOrder
from pyiceberg.transforms import IdentityTransform, Transform, UnknownTransform, VoidTransform
from pyiceberg.typedef import Record
from pyiceberg.types import StructType

_WAYS = {SortDirection.ASC: "ascending", SortDirection.DESC: "descending"}


def sortable(order: SortOrder, schema: Schema) -> bool:
    """Tell whether rows can be sorted by an order here."""
    return all(_computable(one.transform, one.source_id, schema) for one in order.fields)


def dividable(spec: PartitionSpec, schema: Schema) -> bool:
    """Tell whether rows can be divided into the partitions of a spec here."""
    return all(_computable(one.transform, one.source_id, schema) for one in spec.fields)


def _computable(transform: Transform[Any, Any], source: int, schema: Schema) -> bool:
    if isinstance(transform, VoidTransform):
        return True
    if isinstance(transform, UnknownTransform) or _path(schema.as_struct(), source) is None:
        return False
    return transform.can_transform(schema.find_type(source))


def arranged(rows: pa.Table, order: SortOrder, schema: Schema) -> pa.Table:
    """Return rows in a table's order; without one, as they are."""
    keys: dict[str, pa.Array] = {}
    ways: list[tuple[str, str]] = []
    for number, field in enumerate(order.fields):
        if isinstance(field.transform, VoidTransform):
            continue
        values = _values(rows, field.transform, field.source_id, schema)
        first = field.null_order is NullOrder.NULLS_FIRST
        keys[f"{number}null"] = pc.is_null(values).cast(pa.int8())
        ways.append((f"{number}null", "descending" if first else "ascending"))
        way = _WAYS[field.direction]
        if pa.types.is_floating(values.type):
            # Arrow puts NaN last whatever the direction is; for Iceberg it is the greatest.
            keys[f"{number}nan"] = pc.fill_null(pc.is_nan(values), fill_value=False).cast(pa.int8())
            ways.append((f"{number}nan", way))
        keys[f"{number}value"] = values
        ways.append((f"{number}value", way))
    if not ways:
        return rows
    return rows.take(pc.sort_indices(pa.table(keys), sort_keys=ways))


def divided(
    rows: pa.Table, spec: PartitionSpec, schema: Schema
) -> Iterator[tuple[Record, pa.Table]]:
    """Return the rows of each partition, in the order they had."""
    codes = np.zeros(rows.num_rows, np.int64)
    # Of each field the values that occur, and the place among them of every row's.
    fields: list[tuple[list[Any], Any]] = []
    for field in spec.fields:
        if isinstance(field.transform, VoidTransform):
            fields.append(([None], np.zeros(rows.num_rows, np.int64)))
            continue
        encoded = pc.dictionary_encode(_values(rows, field.transform, field.source_id, schema))
        held = [*encoded.dictionary.to_pylist(), None]
        places = pc.fill_null(encoded.indices, len(held) - 1).to_numpy(zero_copy_only=False)
        fields.append((held, places))
        # Codes stay small: there are never more of them than rows.
        codes = np.unique(codes * len(held) + places, return_inverse=True)[1]
    order = np.argsort(codes, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        if len(part):
            record = Record(*(held[places[part[0]]] for held, places in fields))
            yield record, rows.take(part)


def _values(
    rows: pa.Table, transform: Transform[Any, Any], source: int, schema: Schema
) -> pa.Array:
    """Return what a transform makes of a column, as Iceberg stores it in partitions."""
    path = _path(schema.as_struct(), source)
    assert path is not None, f"column {source} was said to be there"
    column: Any = rows.column(path[0]).combine_chunks()
    if len(path) > 1:
        column = pc.struct_field(column, path[1:])
    if isinstance(column, pa.ChunkedArray):
        column = pa.chunked_array(column.chunks, column.type).combine_chunks()
    column = _stored(column)
    if isinstance(transform, IdentityTransform):
        return column
    kind = schema.find_type(source)
    seen = pc.unique(column)
    function = transform.transform(kind)
    result = schema_to_pyarrow(transform.result_type(kind), include_field_ids=False)
    made = pa.array([function(one) for one in seen.to_pylist()], _stored_type(result))
    return made.take(pc.index_in(column, value_set=seen))


def _stored(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return column.cast(_stored_type(column.type))


def _stored_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_timestamp(kind) or pa.types.is_time64(kind):
        return pa.int64()
    return kind


def _path(struct: StructType, source: int) -> list[str] | None:
    """Return the names on the way to a column; there is none into lists and maps."""
    for field in struct.fields:
        if field.field_id == source:
            return [field.name]
        if isinstance(field.field_type, StructType):
            rest = _path(field.field_type, source)
            if rest is not None:
                return [field.name, *rest]
    return None
