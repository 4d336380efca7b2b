"""Fields of table metadata that PyIceberg does not know survive a commit that it makes.

PyIceberg reads metadata into models and writes the models, so whatever a newer writer has added is
lost.  What was there and is in no model is put back, at every level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class _Shape:
    """One kind of object in the metadata: what PyIceberg knows of it, and what it contains."""

    #: Fields of PyIceberg's model; if such a field is absent, that is meant.
    known: frozenset[str] = frozenset()
    objects: Mapping[str, _Shape] = field(default_factory=dict)
    #: Lists of objects, with the fields that identify one; none: by position.
    lists: Mapping[str, tuple[tuple[str, ...], _Shape]] = field(default_factory=dict)
    #: An object that maps names to objects of this shape; a name is no field and not carried.
    values: _Shape | None = None


def _known(*names: str) -> frozenset[str]:
    return frozenset(names)


def _types() -> _Shape:
    """Return the shape of a column's type.  Types nest, so it contains itself."""
    objects: dict[str, _Shape] = {}
    lists: dict[str, tuple[tuple[str, ...], _Shape]] = {}
    known = _known(
        "type", "fields", "element-id", "element", "element-required",
        "key-id", "key", "value-id", "value", "value-required",
    )  # fmt: skip
    nested = _Shape(known, objects, lists)
    column = _Shape(
        _known("id", "name", "type", "required", "doc", "initial-default", "write-default"),
        {"type": nested},
    )
    objects |= {"element": nested, "key": nested, "value": nested}
    lists["fields"] = (("id",), column)
    return nested


_SCHEMA = _Shape(
    _known("type", "fields", "schema-id", "identifier-field-ids"), lists=_types().lists
)
#: `source-ids` with one id is read, and written as `source-id`.
_PARTITION_FIELD = _Shape(_known("source-id", "source-ids", "field-id", "transform", "name"))
_SORT_FIELD = _Shape(_known("source-id", "source-ids", "transform", "direction", "null-order"))
_BLOB = _Shape(_known("type", "snapshot-id", "sequence-number", "fields", "properties"))
_REF = _Shape(
    _known(
        "snapshot-id", "type", "min-snapshots-to-keep", "max-snapshot-age-ms", "max-ref-age-ms"
    )
)  # fmt: skip
_SNAPSHOT = _Shape(
    _known(
        "snapshot-id", "parent-snapshot-id", "sequence-number", "timestamp-ms", "manifest-list",
        "summary", "schema-id", "first-row-id", "added-rows",
    )
)  # fmt: skip
_PARTITION_STATISTICS = _Shape(_known("snapshot-id", "statistics-path", "file-size-in-bytes"))
_STATISTICS = _Shape(
    _PARTITION_STATISTICS.known
    | {"file-footer-size-in-bytes", "key-metadata", "blob-metadata"},
    lists={"blob-metadata": ((), _BLOB)},
)  # fmt: skip
#: Of every format version together: a field of another version has no meaning worth keeping.
_TABLE = _Shape(
    _known(
        "location", "table-uuid", "last-updated-ms", "last-column-id", "schemas",
        "current-schema-id", "partition-specs", "default-spec-id", "last-partition-id",
        "properties", "current-snapshot-id", "snapshots", "snapshot-log", "metadata-log",
        "sort-orders", "default-sort-order-id", "refs", "statistics", "partition-statistics",
        "format-version", "schema", "partition-spec", "last-sequence-number", "next-row-id",
    ),
    objects={"schema": _SCHEMA, "refs": _Shape(values=_REF)},
    lists={
        "snapshots": (("snapshot-id",), _SNAPSHOT),
        "schemas": (("schema-id",), _SCHEMA),
        "partition-specs": (
            ("spec-id",),
            _Shape(_known("spec-id", "fields"), lists={"fields": (("field-id",), _PARTITION_FIELD)}),
        ),
        "sort-orders": (
            ("order-id",),
            _Shape(_known("order-id", "fields"), lists={"fields": ((), _SORT_FIELD)}),
        ),
        "statistics": (("snapshot-id", "statistics-path"), _STATISTICS),
        "partition-statistics": (("snapshot-id", "statistics-path"), _PARTITION_STATISTICS),
        "metadata-log": (("metadata-file",), _Shape(_known("metadata-file", "timestamp-ms"))),
        "snapshot-log": (
            ("snapshot-id", "timestamp-ms"), _Shape(_known("snapshot-id", "timestamp-ms")),
        ),
        "encryption-keys": (("key-id",), _Shape(_known("key-id"))),
    },
)  # fmt: skip

#: What PyIceberg writes for a transform that it cannot read.
_LOST_TRANSFORM = "unknown"


def carry_over(
    before: Mapping[str, Any], known: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `after` with the fields of `before` that PyIceberg does not know.

    `known` is what PyIceberg makes of `before`.  What was removed from `after` with the object
    that held it (an expired snapshot) stays removed.
    """
    return _merge(_with_lists(before), known, after, _TABLE)


def _with_lists(before: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return metadata with the lists that PyIceberg adds to format 1, which readers prefer."""
    added: dict[str, Any] = {}
    if not before.get("schemas") and isinstance(before.get("schema"), dict):
        added["schemas"] = [{"schema-id": 0, **before["schema"]}]
    if not before.get("partition-specs") and isinstance(before.get("partition-spec"), list):
        added["partition-specs"] = [{"spec-id": 0, "fields": before["partition-spec"]}]
    return {**before, **added}


def _merge(
    before: Mapping[str, Any], known: Mapping[str, Any], after: Mapping[str, Any], shape: _Shape
) -> dict[str, Any]:
    merged = dict(after)
    for name, value in before.items():
        if name in after and name in known:
            merged[name] = _merge_value(name, (value, known[name], after[name]), shape)
        elif not any(name in names for names in (after, known, shape.known)) and not shape.values:
            merged[name] = value
    return merged


def _merge_value(name: str, values: tuple[Any, Any, Any], shape: _Shape) -> Any:
    before, known, after = values
    inner = shape.values or shape.objects.get(name)
    if inner is not None and all(isinstance(value, Mapping) for value in values):
        return _merge(before, known, after, inner)
    if name in shape.lists and all(isinstance(value, list) for value in values):
        identity, element = shape.lists[name]
        old, same = _by_identity(before, identity), _by_identity(known, identity)
        return [
            _merge(old[key], same[key], one, element) if key in old and key in same else one
            for key, one in _identified(after, identity)
        ]
    if name == "transform" and known == after == _LOST_TRANSFORM:
        return before
    return after


def _by_identity(elements: Sequence[Any], identity: tuple[str, ...]) -> dict[Any, Any]:
    return {key: one for key, one in _identified(elements, identity) if key is not None}


def _identified(elements: Sequence[Any], identity: tuple[str, ...]) -> list[tuple[Any, Any]]:
    """Pair each object with what identifies it among its kind; None for what has no identity."""
    return [(_identity(one, identity, index), one) for index, one in enumerate(elements)]


def _identity(one: Any, identity: tuple[str, ...], index: int) -> tuple[Any, ...] | None:
    if not isinstance(one, Mapping):
        return None
    key = tuple(one.get(name) for name in identity) or (index,)
    return key if all(isinstance(part, (int, str)) for part in key) else None
