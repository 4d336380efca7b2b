"""Nothing that PyIceberg does not know is lost when it rewrites table metadata."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import (
    TableMetadataV1,
    TableMetadataV2,
    TableMetadataV3,
)
from pyiceberg.table.refs import SnapshotRef
from pyiceberg.table.snapshots import MetadataLogEntry, Snapshot, SnapshotLogEntry
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.table.statistics import BlobMetadata, PartitionStatisticsFile, StatisticsFile
from pyiceberg.typedef import IcebergBaseModel
from pyiceberg.types import ListType, MapType, NestedField, StructType

from lakewarden.formats.iceberg import carrying as module
from lakewarden.formats.iceberg.carrying import carry_over
from tests.unit.table_metadata import (
    VERSIONS,
    at,
    commit,
    dump,
    load,
    objects,
    table,
)


@VERSIONS
def test_without_unknown_fields_it_is_what_pyiceberg_wrote(version: int) -> None:
    before = table(version)
    known, after = commit(before, 1, 2)
    assert known == before
    assert carry_over(before, known, after) == after
    assert [one["snapshot-id"] for one in after["snapshots"]] == [3]


@VERSIONS
def test_unknown_fields_survive_everywhere(version: int) -> None:
    before = table(version)
    for path, one in list(objects(before)):
        one["x-new"] = {"at": list(path)}
    known, after = commit(before)
    # PyIceberg copies v1's own partition-spec as it is; every other place loses the field.
    assert all(path[0] == "partition-spec" for path, one in objects(known) if "x-new" in one)
    result = carry_over(before, known, after)
    places = 0
    for path, one in objects(before):
        if path[-1:] != ("x-new",):
            assert at(result, path)["x-new"] == {"at": list(path)}, path
            places += "x-new" in one
    assert places >= 20
    assert dump(load(result)) == after


@VERSIONS
def test_what_expired_is_not_revived(version: int) -> None:
    before = table(version)
    for _, one in list(objects(before)):
        one["x-new"] = 1
    known, after = commit(before, 1, 2)
    result = carry_over(before, known, after)
    assert [one["snapshot-id"] for one in result["snapshots"]] == [3]
    assert [one["snapshot-id"] for one in result["snapshot-log"]] == [3]
    assert [one["snapshot-id"] for one in result["statistics"]] == [3]
    assert list(result["refs"]) == ["main"]
    assert "parent-snapshot-id" not in result["snapshots"][0]
    for name in ("snapshots", "snapshot-log", "statistics", "partition-statistics"):
        assert all(one["x-new"] == 1 for one in result[name])
    # The entry that the commit has added to the log is new, so it has nothing to carry.
    assert [one.get("x-new") for one in result["metadata-log"]] == [1, 1, None]
    assert dump(load(result)) == after


def test_fields_of_the_standard_that_pyiceberg_does_not_know_survive() -> None:
    before = table(3)
    before["encryption-keys"] = [{"key-id": "k", "encrypted-key-metadata": "aa"}]
    for one in before["snapshots"]:
        one["key-id"] = "k"
    known, after = commit(before, 1)
    assert "encryption-keys" not in after
    result = carry_over(before, known, after)
    assert result["encryption-keys"] == before["encryption-keys"]
    assert [one["key-id"] for one in result["snapshots"]] == ["k", "k"]
    assert result["next-row-id"] == 9
    assert [one["first-row-id"] for one in result["snapshots"]] == [0, 0]


def test_once_pyiceberg_knows_a_list_it_is_matched_by_identity() -> None:
    before = {"encryption-keys": [{"key-id": "a", "x": 1}, {"key-id": "b", "x": 2}]}
    known = {"encryption-keys": [{"key-id": "a"}, {"key-id": "b"}]}
    after = {"encryption-keys": [{"key-id": "b"}, {"key-id": "c"}]}
    result = carry_over(before, known, after)
    assert result == {"encryption-keys": [{"key-id": "b", "x": 2}, {"key-id": "c"}]}


@VERSIONS
def test_what_pyiceberg_leaves_out_on_purpose_stays_out(version: int) -> None:
    """Empty, null and default values are dropped by PyIceberg and are no loss."""
    before = table(version)
    before |= {"current-snapshot-id": -1, "refs": {}, "snapshot-log": [], "statistics": []}
    before["snapshots"][0]["parent-snapshot-id"] = None
    before["schemas"][0]["fields"][0] |= {"doc": None, "initial-default": None}
    if version == 1:
        before["snapshots"][0]["sequence-number"] = 0
        before["last-sequence-number"] = 0
    known, after = commit(before, 2)
    result = carry_over(before, known, after)
    assert result == after
    assert "current-snapshot-id" not in result


@pytest.mark.parametrize("name", ["current-snapshot-id", "snapshot-log", "statistics", "refs"])
def test_state_that_the_commit_removed_is_not_resurrected(name: str) -> None:
    before = table(2)
    known, after = commit(before)
    del after[name]
    assert name not in carry_over(before, known, after)
    # Not even where PyIceberg would not have repeated it.
    del known[name]
    assert name not in carry_over(before, known, after)


def test_transform_that_pyiceberg_cannot_read_is_not_replaced() -> None:
    """PyIceberg writes `unknown` for it in specs that are not the default, and would lose it."""
    before = table(2)
    old = before["partition-specs"][0]["fields"][0] | {"transform": "zorder[3]", "field-id": 1001}
    before["partition-specs"].append({"spec-id": 1, "fields": [old]})
    ordered = before["sort-orders"][0]["fields"][0] | {"transform": "hilbert"}
    before["sort-orders"].append({"order-id": 2, "fields": [ordered]})
    known, after = commit(before, 1)
    assert after["partition-specs"][1]["fields"][0]["transform"] == "unknown"
    assert after["sort-orders"][1]["fields"][0]["transform"] == "unknown"
    result = carry_over(before, known, after)
    assert result["partition-specs"] == before["partition-specs"]
    assert result["sort-orders"] == before["sort-orders"]


def test_other_spellings_are_left_as_pyiceberg_writes_them() -> None:
    before = table(2)
    before["schemas"][0]["fields"][0]["type"] = "decimal(9,2)"
    before["schemas"][0]["identifier-field-ids"] = []
    before["partition-specs"][0]["fields"][0] = {
        "source-ids": [1], "field-id": 1000, "transform": "void", "name": "a",
    }  # fmt: skip
    known, after = commit(before, 1)
    assert carry_over(before, known, after) == after
    assert after["schemas"][0]["fields"][0]["type"] == "decimal(9, 2)"


def test_old_version_1_metadata_keeps_fields_in_the_lists_that_readers_prefer() -> None:
    before = table(1)
    for name in ("schemas", "partition-specs", "refs", "sort-orders", "current-schema-id"):
        del before[name]
    del before["schema"]["schema-id"]
    before["default-sort-order-id"] = 0
    before["schema"]["fields"][0]["x-new"] = 1
    before["partition-spec"][0]["x-new"] = 2
    known, after = commit(before, 1)
    result = carry_over(before, known, after)
    assert result["schema"]["fields"][0]["x-new"] == 1
    assert result["schemas"][0]["fields"][0]["x-new"] == 1
    assert result["partition-spec"][0]["x-new"] == 2
    assert result["partition-specs"][0]["fields"][0]["x-new"] == 2
    assert dump(load(result)) == after


def test_ref_that_pyiceberg_does_not_repeat_is_not_revived() -> None:
    before = table(2)
    known, after = commit(before)
    del known["refs"]["v1"], after["refs"]["v1"]
    assert list(carry_over(before, known, after)["refs"]) == ["main"]


def test_inputs_are_not_changed() -> None:
    before = table(2)
    for _, one in list(objects(before)):
        one["x-new"] = 1
    known, after = commit(before, 1)
    untouched = copy.deepcopy((before, known, after))
    carry_over(before, known, after)
    assert (before, known, after) == untouched


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text(min_size=1).map(lambda name: f"x-{name}"), JSON, max_size=3), st.data()
)
def test_any_unknown_value_survives_any_expiry(extra: dict[str, Any], data: st.DataObject) -> None:
    before = table(2)
    places = [path for path, _ in objects(before)]
    for name, value in extra.items():
        at(before, data.draw(st.sampled_from(places)))[name] = value
    gone = data.draw(st.sets(st.sampled_from([1, 2])))
    known, after = commit(before, *gone)
    result = carry_over(before, known, after)
    assert dump(load(result)) == after
    for one in before["snapshots"]:
        left = [kept for kept in result["snapshots"] if kept["snapshot-id"] == one["snapshot-id"]]
        assert bool(left) == (one["snapshot-id"] not in gone)
        for name in extra:
            assert not left or (name in left[0]) == (name in one)
    for name in extra:
        assert (name in result) == (name in before)
        assert result.get(name) == before.get(name)


def aliases(*models: type[IcebergBaseModel]) -> set[str]:
    return {info.alias or name for model in models for name, info in model.model_fields.items()}


def test_every_field_that_pyiceberg_knows_is_listed_as_known() -> None:
    shape = module._TABLE
    inner = {name: element for name, (_, element) in shape.lists.items()}
    types = shape.objects["schema"].lists["fields"][1].objects["type"]
    for known, models in (
        (shape, (TableMetadataV1, TableMetadataV2, TableMetadataV3)),
        (inner["snapshots"], (Snapshot,)),
        (inner["schemas"], (Schema,)),
        (inner["schemas"].lists["fields"][1], (NestedField,)),
        (types, (StructType, ListType, MapType)),
        (inner["partition-specs"], (PartitionSpec,)),
        (inner["partition-specs"].lists["fields"][1], (PartitionField,)),
        (inner["sort-orders"], (SortOrder,)),
        (inner["sort-orders"].lists["fields"][1], (SortField,)),
        (inner["statistics"], (StatisticsFile,)),
        (inner["statistics"].lists["blob-metadata"][1], (BlobMetadata,)),
        (inner["partition-statistics"], (PartitionStatisticsFile,)),
        (inner["metadata-log"], (MetadataLogEntry,)),
        (inner["snapshot-log"], (SnapshotLogEntry,)),
        (shape.objects["refs"].values, (SnapshotRef,)),
    ):
        assert known is not None
        assert aliases(*models) <= known.known
