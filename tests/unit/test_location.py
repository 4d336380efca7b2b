from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakewarden.errors import ErrorKind, UsageError
from lakewarden.storage.location import Location

SPELLINGS = {
    "s3://b/a/t": [
        "s3a://b/a/t",
        "s3n://b/a/t",
        "S3://b/a/t",
        "s3://b//a///t/",
        "s3://b/a/./t/.",
        "s3://b/x/../a/t",
        "s3://b/../a/t",
    ],
    "s3://b": ["s3://b/", "s3a://b//", "s3://b/x/.."],
    "gs://b/t": ["gcs://b/t", "gs://b/t/"],
    "az://c/t": ["azure://c/t", "abfs://c/t", "abfss://c/t/"],
    "abfss://c@acc.dfs.core.windows.net/t": [
        "abfs://c@acc.dfs.core.windows.net/t",
        "abfss://c@ACC.blob.core.windows.net/t",
        "az://c@acc/t",
        "wasbs://c@acc.blob.core.windows.net//t",
    ],
    "memory://m/t": ["memory://m/t/"],
    "/nowhere/a b": [
        "/nowhere//a b/",
        "file:///nowhere/a b",
        "file:/nowhere/a%20b",
        "file://localhost/nowhere/a%20b",
        "file-object-store:///nowhere/a%20b",
        "FILE:///nowhere/./x/../a b",
    ],
    "/nowhere/a%20b": ["/nowhere/./a%20b", "file:///nowhere/a%2520b"],
    "/": ["file:///", "//", "/.."],
}


@pytest.mark.parametrize(
    ("canonical", "spelling"),
    [(canonical, s) for canonical, group in SPELLINGS.items() for s in (canonical, *group)],
)
def test_spellings_of_one_place_are_equal(canonical: str, spelling: str) -> None:
    assert Location.parse(spelling) == Location.parse(canonical)
    assert Location.parse(spelling).uri == canonical


def test_canonical_spellings_differ() -> None:
    assert len({Location.parse(uri) for uri in SPELLINGS}) == len(SPELLINGS)


@pytest.mark.parametrize("key", ["a%20b", "a%2Fb", "a?b", "a#1", "a b", "ü", "a:b", "~", "a@b"])
def test_object_keys_are_taken_literally(key: str) -> None:
    assert Location.parse(f"s3://b/{key}").key == key


def test_parts_of_a_location() -> None:
    location = Location.parse("abfss://c@acc.dfs.core.windows.net/a/t")
    assert (location.scheme, location.authority, location.path) == ("az", "c@acc", "a/t")
    assert location.store == Location("az", "c@acc", "")
    assert location.parent.key == "a"
    assert location.store.parent == location.store
    assert not location.is_local
    assert str(location) == location.uri
    foreign = "abfss://c@acc.dfs.core.chinacloudapi.cn/t"
    assert Location.parse(foreign).uri == foreign


def test_relative_paths_home_and_links_are_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path.resolve() / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted = Location.parse(f"{real}/t")
    assert wanted.is_local
    for spelling in (
        "link/t",
        "./real/t",
        "~/link/t",
        f"file://{tmp_path}/link/t",
        "real/../link/t",
    ):
        assert Location.parse(spelling) == wanted


@pytest.mark.parametrize(
    ("uri", "kind", "says"),
    [
        ("", ErrorKind.USAGE, "empty"),
        ("http://host/t", ErrorKind.USAGE, "direct storage access"),
        ("https://host/t", ErrorKind.USAGE, "direct storage access"),
        ("s3+ddb://b/t", ErrorKind.UNKNOWN_SCHEME, "s3://"),
        ("hdfs://n/t", ErrorKind.UNKNOWN_SCHEME, "gs://"),
        ("s3:///t", ErrorKind.USAGE, "no bucket"),
        ("memory://", ErrorKind.USAGE, "no bucket"),
        ("abfss://@acc.dfs.core.windows.net/t", ErrorKind.USAGE, "no bucket"),
        ("file://host/t", ErrorKind.USAGE, "'host'"),
        ("/a\0b", ErrorKind.USAGE, "no path"),
    ],
)
def test_wrong_locations_are_refused(uri: str, kind: ErrorKind, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        Location.parse(uri)
    assert caught.value.kind is kind
    assert "\n" not in caught.value.message


def test_credentials_in_a_location_are_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        Location.parse("s3://key:hush@bucket/t")
    assert "hush" not in caught.value.message


@pytest.mark.parametrize("root", ["s3://b/t", "/nowhere/t", "memory://m/t"])
def test_a_directory_contains_what_is_below_by_segments(root: str) -> None:
    table = Location.parse(root)
    inside = table.child("data/x")
    assert table.contains(inside)
    assert table.store.contains(table)
    assert table.relative(inside) == "data/x"
    assert table.store.relative(table) == table.key
    assert table.relative(table) == ""
    for outside in (table, table.parent, Location.parse(f"{root}_backup"), table.store):
        assert not table.contains(outside)
    assert not Location.parse("s3://other/t").contains(inside)
    with pytest.raises(ValueError, match="not inside"):
        table.relative(Location.parse(f"{root}_backup/x"))


def test_children_cannot_climb_out() -> None:
    table = Location.parse("s3://b/t")
    assert table.child("") == table
    assert table.child("./a//b/").key == "t/a/b"
    assert table.store.child("a").key == "a"
    with pytest.raises(ValueError, match="climbs out"):
        table.child("a/../../x")


segments = st.one_of(
    st.sampled_from(["", ".", "..", "a", "a b", "%2F", "%", "t_backup", "ü", "#1"]),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1),
)
paths = st.lists(segments, max_size=6).map("/".join)
roots = st.sampled_from(
    ["s3://b/", "s3a://b/", "gs://b/", "az://c@acc/", "memory://m/", "/nowhere/"]
)


@given(roots, paths)
def test_normalising_twice_changes_nothing(root: str, path: str) -> None:
    once = Location.parse(root + path)
    assert Location.parse(once.uri) == once
    assert not once.path.startswith("/")
    assert not {"", ".", ".."} & set(once.path.split("/")) or once.path == ""


@given(paths)
def test_local_and_cloud_agree_about_segments(path: str) -> None:
    local = os.path.normpath(f"/{path}").lstrip("/")
    assert Location.parse(f"s3://b/{path}").key == local


@given(roots, paths, paths)
def test_containment_is_being_a_proper_child(root: str, path: str, below: str) -> None:
    table = Location.parse(root + path)
    if ".." in below.split("/"):
        return
    child = table.child(below)
    assert table.contains(child) == (child != table)
    assert table.child(table.relative(child)) == child
    assert not child.contains(table)
