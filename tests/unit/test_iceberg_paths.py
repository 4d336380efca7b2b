from __future__ import annotations

import unicodedata
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakewarden.errors import UsageError
from lakewarden.formats.iceberg import layout
from lakewarden.formats.iceberg.paths import (
    Equality,
    Places,
    comparable,
    comparables,
    place,
    place_all,
)
from lakewarden.formats.iceberg.target import CatalogTarget
from lakewarden.model import REMOVABLE, FileKind
from lakewarden.storage.location import Location

# -- where a name leads ---------------------------------------------------------------------------

PLACES = {
    "file:///nowhere/t/x": "/nowhere/t/x",
    "file:/nowhere/t/x": "/nowhere/t/x",
    "FILE:/nowhere/t/x": "/nowhere/t/x",
    "file://localhost/nowhere/t/x": "/nowhere/t/x",
    "/nowhere/t/x": "/nowhere/t/x",
    "/nowhere//t/./y/../x": "/nowhere/t/x",
    "file:///nowhere/a%20b": "/nowhere/a%20b",
    "file:/nowhere/a b": "/nowhere/a b",
    "/nowhere/x:y": "/nowhere/x:y",
    "s3://b/t/x": "s3://b/t/x",
    "s3a://b/t/x": "s3://b/t/x",
    "s3n://b/t//x": "s3://b/t/x",
    "S3://b/t/x": "s3://b/t/x",
    "s3://b/a%20b": "s3://b/a%20b",
    "gcs://b/t": "gs://b/t",
    "abfss://c@acc.dfs.core.windows.net/t": "abfss://c@acc.dfs.core.windows.net/t",
    "wasbs://c@acc.blob.core.windows.net/t": "abfss://c@acc.dfs.core.windows.net/t",
}


@pytest.mark.parametrize(("uri", "expected"), PLACES.items())
def test_a_name_is_taken_as_it_stands(uri: str, expected: str) -> None:
    found = place(uri)
    assert found is not None
    assert found.uri == expected


@pytest.mark.parametrize(
    "uri",
    ["data/x", "", "x", "file:x", "file://host/x", "hdfs://nn/x", "s3:/b/x", "s3:///x", "oss://b/x",
     "s3://key:secret@b/x", "://x"],
)  # fmt: skip
def test_what_no_store_of_ours_has_is_nowhere(uri: str) -> None:
    assert place(uri) is None


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert place(f"file://{tmp_path}/link/x") == place(f"{tmp_path}/real/x")


# -- when two names are one -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a b", "a%20b"),
        ("a%20b", "a%2520b"),
        ("gr\u00fcn", unicodedata.normalize("NFD", "gr\u00fcn")),
        ("gr\u00fcn", "gr%C3%BCn"),
        ("gr\u00fcn", "gru%CC%88n"),
        ("data/x", "data//x"),
        ("data/x", "data///x"),
        ("x=a%2Fb/f", "x=a/b/f"),
    ],
)
def test_names_that_may_be_one_compare_as_one(one: str, other: str) -> None:
    assert comparable(one) == comparable(other)


@pytest.mark.parametrize(
    ("one", "other"), [("a", "A"), ("a+b", "a b"), ("a", "a/"), ("100%", "100"), ("a.b", "a/b")]
)
def test_other_names_differ(one: str, other: str) -> None:
    assert comparable(one) != comparable(other)


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1)
hard_names = st.one_of(
    names,
    st.sampled_from(
        ["%", "%%", "%2", "%25", "%2F", "a b", "\u00fc", "u\u0308", "\u212b", "%zz", "x"]
    ),
)
paths = st.lists(hard_names, min_size=1, max_size=4).map("/".join)


@given(paths, st.integers(0, 2))
def test_encoding_changes_nothing(path: str, times: int) -> None:
    encoded = path
    for _ in range(times):
        encoded = quote(encoded, safe="/")
    # A name that itself reads like an encoded one is decoded further.
    if "%" not in path:
        assert comparable(encoded) == comparable(path)


@given(paths)
def test_unicode_forms_change_nothing(path: str) -> None:
    for form in ("NFC", "NFD"):
        if "%" not in path:
            assert comparable(unicodedata.normalize(form, path)) == comparable(path)


@given(st.lists(st.one_of(paths, st.none())))
def test_bulk_and_single_comparison_agree(found: list[str | None]) -> None:
    array = pa.array(found, pa.string())
    assert comparables(array).to_pylist() == [p if p is None else comparable(p) for p in found]


# -- which root -----------------------------------------------------------------------------------

ROOTS = [
    (1, Location("s3", "b", "w/t")),
    (2, Location("s3", "b", "w/t_backup")),
    (3, Location("s3", "b", "w/t.old")),
    (4, Location("s3", "c", "")),
    (5, Location("file", "", "nowhere/w/t")),
    (6, Location("s3", "b", "w/u/a b")),
]


@pytest.mark.parametrize(
    ("uri", "root", "path"),
    [
        ("s3://b/w/t/data/x", 1, "data/x"),
        ("s3a://b/w/t/x", 1, "x"),
        ("s3n://b//w//t//data//x", 1, "data/x"),
        ("s3://b/w/t_backup/x", 2, "x"),
        ("s3://b/w/t.old/x", 3, "x"),
        ("s3://b/w/tt/x", None, "w/tt/x"),
        ("s3://b/w/x", None, "w/x"),
        ("s3://b/x", None, "x"),
        ("s3://c/x", 4, "x"),
        ("s3://c/deep/er/x", 4, "deep/er/x"),
        ("file:/nowhere/w/t/x", 5, "x"),
        ("/nowhere/w/t/data/x", 5, "data/x"),
        ("file://localhost/nowhere/w/t/x", 5, "x"),
        ("s3://b/w/u/a b/x", 6, "x"),
        ("s3://b/w/u/a%20b/x", None, "w/u/a%20b/x"),
    ],
)
def test_files_are_found_under_their_root(uri: str, root: int | None, path: str) -> None:
    placed = place_all(pa.array([uri]), Places(ROOTS))
    assert placed.root_id.to_pylist() == [root]
    assert placed.path.to_pylist() == [path]
    assert (placed.bare.to_pylist() == [None]) is (root is not None)


@pytest.mark.parametrize(
    ("uri", "store", "bare"),
    [
        ("hdfs://nn/w/t/x", None, "w/t/x"),
        ("hdfs:/w/t/x", "", "w/t/x"),
        ("hdfs:///w/t/x", "", "w/t/x"),
        ("file://host/w/t/x", None, "w/t/x"),
        ("w/t/x", None, "w/t/x"),
        ("s3://b/w/u/a%20b/x", "s3://b", "w/u/a b/x"),
        ("oss://b//w//t/./x", None, "w/t/x"),
    ],
)
def test_names_that_cannot_be_placed_keep_their_path(
    uri: str, store: str | None, bare: str
) -> None:
    placed = place_all(pa.array([uri]), Places(ROOTS))
    assert placed.root_id.to_pylist() == [None]
    assert placed.store.to_pylist() == [store]
    assert placed.bare.to_pylist() == [bare]


def test_no_files_no_rows() -> None:
    placed = place_all(pa.array([], pa.string()), Places(ROOTS))
    assert [len(column) for column in placed] == [0] * 5


starts = st.sampled_from(
    ["s3://b/w/t", "s3a://b/w/t", "s3://b/w/t_backup", "s3://b/w//t", "s3://c", "s3://b", "hdfs://nn",
     "hdfs:", "oss://b/w/t", "file:/nowhere/w/t", "file:///nowhere/w/t", "/nowhere/w/t", "relative",
     "file://localhost/nowhere/w/t", "file://other/nowhere/w/t", "s3://b/w/u/a b", "s3://b/w/./t"]
)  # fmt: skip


def _one_by_one(uri: str, equality: Equality) -> tuple[int | None, str | None]:
    """Say slowly where a file is: its root, and how it is compared below it."""
    directory, _, name = uri.rpartition("/")
    found = place(equality.apply(directory))
    if found is None:
        return None, None
    for root_id, root in ROOTS:
        if found == root or root.contains(found):
            inside = root.relative(found)
            return root_id, comparable(f"{inside}/{name}" if inside else name)
    return None, comparable(f"{found.path}/{name}" if found.path else name)


@given(
    st.lists(st.tuples(starts, paths).map("/".join)),
    st.sampled_from([Equality(), Equality({"hdfs": "s3", "oss": "s3"}, {"nn": "c"})]),
)
def test_placing_in_bulk_is_placing_one_by_one(uris: list[str], equality: Equality) -> None:
    placed = place_all(pa.array(uris, pa.string()), Places(ROOTS, equality))
    slowly = [_one_by_one(uri, equality) for uri in uris]
    assert placed.root_id.to_pylist() == [root for root, _ in slowly]
    keys = zip(placed.key.to_pylist(), slowly, placed.store.to_pylist(), strict=True)
    for key, (_, expected), store in keys:
        if store:
            assert key == expected


@given(st.sampled_from([root for root in ROOTS if root[1].scheme == "s3"]), paths)
def test_a_listed_file_and_its_name_compare_as_one(root: tuple[int, Location], path: str) -> None:
    """A key that a store lists, spelled as a URI, leads back to it."""
    segments = path.split("/")
    if any(segment in {".", ".."} for segment in segments):
        return
    placed = place_all(pa.array([f"{root[1].uri}/{path}"]), Places(ROOTS))
    assert placed.root_id.to_pylist() == [root[0]]
    assert placed.key.to_pylist() == [comparable(path)]


def test_what_the_user_says_is_the_same() -> None:
    equality = Equality({"oss": "s3"}, {"old": "b"})
    assert equality.apply("oss://old/x") == "s3://b/x"
    assert equality.apply("oss://b/x") == "s3://b/x"
    assert equality.apply("s3://old/x") == "s3://b/x"
    assert equality.apply("gs://other/x") == "gs://other/x"
    assert equality.apply("/x") == "/x"
    assert Equality().apply("oss://old//x") == "oss://old//x"


# -- what a file is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("data/x.parquet", FileKind.DATA),
        ("data/by_day=1/x.orc", FileKind.DATA),
        ("x", FileKind.DATA),
        ("data/x.avro", FileKind.DATA),
        ("metadata/x-m0.avro", FileKind.MANIFEST_FILE),
        ("metadata/snap-1-0-x.avro", FileKind.MANIFEST_LIST),
        ("snap-1-0-x.avro", FileKind.MANIFEST_LIST),
        ("metadata/00001-x.metadata.json", FileKind.METADATA),
        ("metadata/v1.metadata.json", FileKind.METADATA),
        ("metadata/v1.gz.metadata.json", FileKind.METADATA),
        ("metadata/v1.metadata.json.gz", FileKind.METADATA),
        ("metadata/x.stats", FileKind.STATISTICS),
        ("metadata/x.puffin", FileKind.STATISTICS),
        ("data/x-deletes.puffin", FileKind.POSITION_DELETE),
        ("metadata/version-hint.text", FileKind.HINT),
        ("metadata/_lakewarden/1.json", FileKind.UNKNOWN),
        ("_x", FileKind.UNKNOWN),
        (".x/y", FileKind.UNKNOWN),
        ("data/.x.parquet.crc", FileKind.UNKNOWN),
        ("data/_temporary/0/x.parquet", FileKind.UNKNOWN),
        ("_p=1/x", FileKind.DATA),
        ("_p=1/_x", FileKind.UNKNOWN),
        ("_pq=1/x", FileKind.UNKNOWN),
        ("_p/x", FileKind.UNKNOWN),
        (".h=1/x", FileKind.DATA),
    ],
)
def test_kinds(path: str, kind: FileKind) -> None:
    assert layout.classify(path, ("_p", ".h", "plain")) is kind


@given(paths, paths)
def test_nothing_below_a_hidden_directory_is_removable(above: str, below: str) -> None:
    for mark in "_.":
        assert layout.classify(f"{above}/{mark}x/{below}", ("p",)) not in REMOVABLE


# -- how users name tables ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "catalog", "parts"),
    [
        ("iceberg://lake", "lake", ()),
        ("iceberg://lake/", "lake", ()),
        ("iceberg://lake/db", "lake", ("db",)),
        ("iceberg://lake/db.t", "lake", ("db", "t")),
        ("iceberg://lake/a.b.t/", "lake", ("a", "b", "t")),
        ("iceberg://lake/db.a%2Eb", "lake", ("db", "a.b")),
        ("iceberg://lake/db.100%25", "lake", ("db", "100%")),
        ("iceberg://lake/db.gr\u00fcn x", "lake", ("db", "gr\u00fcn x")),
        ("iceberg://my%2Flake/db.a%2Fb", "my/lake", ("db", "a/b")),
    ],
)
def test_targets_are_read(text: str, catalog: str, parts: tuple[str, ...]) -> None:
    assert CatalogTarget.parse(text) == CatalogTarget(catalog, parts)


@pytest.mark.parametrize(
    "text",
    [
        "iceberg://",
        "iceberg:///db.t",
        "iceberg://lake/db..t",
        "iceberg://lake/.t",
        "iceberg://lake/a/b",
    ],
)
def test_targets_that_name_nothing(text: str) -> None:
    with pytest.raises(UsageError, match="names no Iceberg table"):
        CatalogTarget.parse(text)


@given(hard_names, st.lists(st.one_of(hard_names, st.just("a.b"), st.just("a/b")), max_size=3))
def test_targets_survive_being_written(catalog: str, parts: list[str]) -> None:
    target = CatalogTarget(catalog, tuple(parts))
    assert CatalogTarget.parse(target.uri) == target
