"""Table metadata: what is read of it, and that an expiry changes nothing else."""

from __future__ import annotations

import copy
import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.table.update import SetPropertiesUpdate, update_table_metadata

from lakewarden import expiry
from lakewarden.errors import Damaged, ErrorKind
from lakewarden.formats.iceberg import metadata as module
from lakewarden.formats.iceberg.metadata import (
    Removal,
    deletes_after_commit,
    dropped_metadata_files,
    parse,
    previous_versions_max,
    without,
)
from tests.unit.table_metadata import (
    VERSIONS,
    WHERE,
    commit,
    dump,
    load,
    objects,
    snapshot,
    table,
)


@VERSIONS
def test_expiry_changes_what_pyiceberg_would_change(version: int) -> None:
    before = table(version)
    theirs = commit(before, 1)[1]
    ours = dump(
        load(
            without(before, Removal(frozenset({1}), gone_refs(before, 1)), location=WHERE, now_ms=9)
        )
    )
    # PyIceberg also cuts the link to the parent, which Java leaves.
    for one in (*theirs["snapshots"], *ours["snapshots"]):
        one.pop("parent-snapshot-id", None)
    # PyIceberg forgets about statistics of partitions.
    theirs["partition-statistics"] = ours["partition-statistics"]
    assert ours | {"last-updated-ms": 0} == theirs | {"last-updated-ms": 0}


def gone_refs(raw: dict[str, Any], *gone: int) -> tuple[str, ...]:
    return tuple(name for name, ref in raw["refs"].items() if ref["snapshot-id"] in gone)


@VERSIONS
def test_unknown_fields_survive_everywhere(version: int) -> None:
    before = table(version)
    for number, (_, one) in enumerate(list(objects(before))):
        one["x-unknown"] = number
    after = without(before, Removal(frozenset({1})), location=WHERE, now_ms=9)
    marks = {one["x-unknown"] for _, one in objects(after) if "x-unknown" in one}
    expired = {
        one["x-unknown"]
        for name in ("snapshots", "snapshot-log", "statistics", "partition-statistics")
        for element in before.get(name, ())
        if element["snapshot-id"] == 1
        for _, one in objects(element)
    }
    assert marks == {one["x-unknown"] for _, one in objects(before)} - expired
    assert expired


def test_expiry_leaves_its_input_alone() -> None:
    before = table()
    same = copy.deepcopy(before)
    without(before, Removal(frozenset({1}), tuple(before["refs"])), location=WHERE, now_ms=9)
    assert before == same


def test_null_is_as_good_as_nothing() -> None:
    nothing = (
        "statistics", "partition-statistics", "snapshot-log", "metadata-log", "refs", "properties",
    )  # fmt: skip
    before = table() | dict.fromkeys(nothing)
    after = without(before, Removal(frozenset({1})), location=WHERE, now_ms=9)
    assert [one["snapshot-id"] for one in after["snapshots"]] == [
        one["snapshot-id"] for one in before["snapshots"] if one["snapshot-id"] != 1
    ]
    assert {after[name] for name in nothing if name != "metadata-log"} == {None}
    assert [entry["metadata-file"] for entry in after["metadata-log"]] == [WHERE]


def test_successor_names_its_predecessor_and_trims_the_log() -> None:
    before = table() | {"properties": {"write.metadata.previous-versions-max": "2"}}
    log = [{"timestamp-ms": n, "metadata-file": f"{n}.json"} for n in range(5)]
    after = without(before | {"metadata-log": log}, Removal(frozenset()), location=WHERE, now_ms=9)
    assert [entry["metadata-file"] for entry in after["metadata-log"]] == ["4.json", WHERE]
    assert after["last-updated-ms"] >= before["last-updated-ms"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def read(raw: Any) -> module.TableMetadata:
    return parse(json.dumps(raw).encode(), WHERE)


@VERSIONS
def test_reading(version: int) -> None:
    raw = table(version)
    raw["x-new"] = raw["snapshots"][0]["x-new"] = {"any": "thing"}
    found = read(raw)
    assert (found.uuid, found.location) == ("9c12d441-03fe-4693-9a96-a0705ddf69c1", "s3://b/t")
    assert found.current_snapshot_id == 3
    assert found.properties == {"owner": "me"}
    assert found.snapshots[1] == module.StoredSnapshot(
        2, 1, 2000, "s3://b/t/metadata/snap-2.avro", ()
    )
    assert found.refs == [
        expiry.Ref("main", 3, expiry.RefKind.BRANCH),
        expiry.Ref("v1", 1, expiry.RefKind.TAG, max_ref_age_ms=5),
    ]
    assert found.statistics[1] == module.Statistics(3, "s3://b/t/3.puffin", 10)
    assert found.partition_statistics == [module.Statistics(3, "s3://b/t/3.parquet", 11)]
    assert found.metadata_log == [
        "s3://b/t/metadata/00001.metadata.json", "s3://b/t/metadata/00002.metadata.json",
    ]  # fmt: skip
    assert found.partition_fields == ("a_bucket",)
    history = found.history()
    assert history.current_id == 3
    assert list(history.snapshots)[2] == expiry.Snapshot(3, 3000, 2)
    assert expiry.decide(history, None, 0).decisions


def test_reading_compressed() -> None:
    raw = json.dumps(table()).encode()
    assert parse(gzip.compress(raw), WHERE) == parse(raw, WHERE)


def test_reading_the_least_there_can_be() -> None:
    found = read({"format-version": 1, "location": "s3://b/t", "current-snapshot-id": -1})
    assert (found.uuid, found.current_snapshot_id) == (None, None)
    assert found.history() == expiry.SnapshotHistory([], [], None)
    nulls = dict.fromkeys(("properties", "snapshots", "refs", "statistics", "metadata-log"))
    assert read({"format-version": 2, "location": "s3://b/t"} | nulls).snapshots == []


def test_reading_old_snapshots() -> None:
    raw = table(1)
    del raw["snapshots"][0]["manifest-list"]
    raw["snapshots"][0]["manifests"] = ["s3://b/m1.avro", "s3://b/m2.avro"]
    first, *_ = read(raw).snapshots
    assert (first.manifest_list, first.manifests) == (None, ("s3://b/m1.avro", "s3://b/m2.avro"))


def test_settings_that_are_no_strings_are_not_taken_for_consent() -> None:
    properties = read(table() | {"properties": {"gc.enabled": False, "n": 5, "z": None}}).properties
    assert properties == {"gc.enabled": "false", "n": "5", "z": "null"}


def test_partition_fields_of_every_spec() -> None:
    raw = table(1)
    raw["partition-specs"].append({"spec-id": 1, "fields": [{"name": "b"}, {"name": "a_bucket"}]})
    assert read(raw).partition_fields == ("a_bucket", "b")


@pytest.mark.parametrize(
    "change",
    [
        {"format-version": 0}, {"format-version": "2"}, {"format-version": True},
        {"format-version": None}, {"location": None}, {"location": 5}, {"snapshots": {}},
        {"snapshots": [5]}, {"snapshots": [{"snapshot-id": 1, "timestamp-ms": 1}]},
        {"snapshots": [snapshot(1) | {"timestamp-ms": "1"}]},
        {"snapshots": [snapshot(1) | {"manifest-list": None, "manifests": [5]}]},
        {"snapshots": [snapshot(1), snapshot(1)]}, {"refs": []}, {"refs": {"a": 5}},
        {"refs": {"a": {"snapshot-id": 1, "type": "twig"}}},
        {"refs": {"a": {"snapshot-id": 1, "type": "tag", "max-ref-age-ms": 0}}},
        {"refs": {"a": {"type": "tag"}}}, {"statistics": [{"snapshot-id": 1}]},
        {"metadata-log": [{}]}, {"properties": []}, {"current-snapshot-id": "3"},
        {"partition-specs": [{"fields": [{}]}]},
    ],
)  # fmt: skip
def test_damage_is_told(change: dict[str, Any]) -> None:
    with pytest.raises(Damaged) as caught:
        read(table() | change)
    assert caught.value.kind is ErrorKind.CORRUPT_MANIFEST
    assert WHERE in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"5", b"null", b"\xff\xfe\x00", b"\x1f\x8b", b"\x1f\x8b\x00\x00garbage",
        gzip.compress(b"{}", mtime=0)[:-4], gzip.compress(b"x", mtime=0), b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_metadata_is_damage(data: bytes) -> None:
    with pytest.raises(Damaged) as caught:
        parse(data, WHERE)
    assert caught.value.kind is ErrorKind.CORRUPT_MANIFEST
    assert "\n" not in caught.value.message


def test_newer_format_asks_to_upgrade() -> None:
    with pytest.raises(Damaged, match=r"version 4.*upgrade") as caught:
        read({"format-version": 4})
    assert caught.value.kind is ErrorKind.UNSUPPORTED_FEATURE


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_or_told(data: bytes) -> None:
    with pytest.raises(Damaged):
        parse(data, WHERE)


@pytest.mark.parametrize(
    ("value", "number"),
    [(None, 100), ("5", 5), ("0", 1), ("-3", 1), ("many", 100), ("", 100), ("1.5", 100)],
)
def test_previous_versions_max(value: str | None, number: int) -> None:
    name = "write.metadata.previous-versions-max"
    assert previous_versions_max({} if value is None else {name: value}) == number


def test_deletes_after_commit() -> None:
    name = "write.metadata.delete-after-commit.enabled"
    for default in (True, False):
        assert deletes_after_commit({}, default=default) is default
        for yes in ("true", "TRUE", "Yes", "1"):
            assert deletes_after_commit({name: yes}, default=default)
        for no in ("false", "", "on", "2"):
            assert not deletes_after_commit({name: no}, default=default)


def test_dropped_metadata_files() -> None:
    def dropped(after: list[str], *, default: bool = True, enabled: str | None = None) -> list[str]:
        name = "write.metadata.delete-after-commit.enabled"
        properties = {} if enabled is None else {name: enabled}
        return dropped_metadata_files(
            ["1", "2", "3"], "4", after, properties, default_enabled=default
        )

    assert dropped(["1", "2", "3", "4"]) == []
    assert dropped(["2", "3", "4"]) == ["1"]
    assert dropped(["4"]) == ["1", "2", "3"]
    assert dropped(["4"], default=False) == []
    assert dropped(["4"], enabled="no") == []
    assert dropped(["4"], default=False, enabled="true") == ["1", "2", "3"]


def test_log_that_does_not_name_the_previous_file_deletes_nothing() -> None:
    """A commit that changed nothing leaves the previous file the current one."""
    assert dropped_metadata_files(["1"], "2", [], {}, default_enabled=True) == []
    assert dropped_metadata_files(["1"], "2", ["1"], {}, default_enabled=True) == []


@given(st.integers(1, 4), st.integers(0, 8))
def test_files_dropped_as_pyiceberg_trims_the_log(limit: int, commits: int) -> None:
    """Limit + 1 files are left at any time, and none that the table names goes."""
    raw = table(2) | {"metadata-log": []}
    raw["properties"] = {"write.metadata.previous-versions-max": str(limit)}
    metadata, current, files = load(raw), "0", {"0"}
    for number in range(1, commits + 1):
        before = [one.metadata_file for one in metadata.metadata_log]
        update = SetPropertiesUpdate(updates={"commit": str(number)})
        metadata = update_table_metadata(metadata, (update,), metadata_location=current)
        after = [one.metadata_file for one in metadata.metadata_log]
        gone = dropped_metadata_files(
            before, current, after, metadata.properties, default_enabled=True
        )
        current = str(number)
        files = (files | {current}) - set(gone)
        assert files == {current, *after}
        assert len(files) == min(number, limit) + 1
