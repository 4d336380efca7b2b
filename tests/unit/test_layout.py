"""What a path says about a file."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lakewarden.formats.lance.layout import Entry, classify, classify_extra_base
from lakewarden.model import FileKind

U64 = 2**64 - 1
KINDS = [
    ("data/0101.lance", FileKind.DATA, "data/0101.lance"),
    ("data/0101/1000.blob", FileKind.DATA, "data/0101.lance"),
    ("data/.tmp123", FileKind.TEMPORARY, "data/.tmp123"),
    ("data/0101/.tmp1", FileKind.TEMPORARY, "data/0101/.tmp1"),
    ("data/.tmp.lance", FileKind.TEMPORARY, "data/.tmp.lance"),
    ("data/readme.txt", FileKind.UNKNOWN, "data/readme.txt"),
    ("data/a/b.lance", FileKind.UNKNOWN, "data/a/b.lance"),
    ("data/a/b/c.blob", FileKind.UNKNOWN, "data/a/b/c.blob"),
    ("_deletions/1-2-3.arrow", FileKind.DELETION, "_deletions/1-2-3.arrow"),
    ("_deletions/1-2-3.bin", FileKind.DELETION, "_deletions/1-2-3.bin"),
    ("_deletions/1-2-3.txt", FileKind.UNKNOWN, "_deletions/1-2-3.txt"),
    ("_deletions/x/1.bin", FileKind.UNKNOWN, "_deletions/x/1.bin"),
    ("_transactions/1-ab.txn", FileKind.TRANSACTION, "_transactions/1-ab.txn"),
    ("_transactions/1-ab.txt", FileKind.UNKNOWN, "_transactions/1-ab.txt"),
    ("_indices/ab-cd/page.lance", FileKind.INDEX, "_indices/ab-cd"),
    ("_indices/ab-cd/sub/x.idx", FileKind.INDEX, "_indices/ab-cd"),
    ("_indices/stray", FileKind.UNKNOWN, "_indices/stray"),
    ("_refs/tags/x.json", FileKind.REF, "_refs/tags/x.json"),
    ("_refs/branches/a%2Fb.json", FileKind.REF, "_refs/branches/a%2Fb.json"),
    ("_versions/latest_version_hint.json", FileKind.HINT, "_versions/latest_version_hint.json"),
    ("_versions/.tmp_7.manifest", FileKind.TEMPORARY, "_versions/.tmp_7.manifest"),
    ("_versions/x.manifest", FileKind.MANIFEST, "_versions/x.manifest"),
    ("_versions/1.manifest.bak", FileKind.UNKNOWN, "_versions/1.manifest.bak"),
    ("_versions/٣.manifest", FileKind.MANIFEST, "_versions/٣.manifest"),
    ("_blobs/1.blob", FileKind.UNKNOWN, "_blobs/1.blob"),
    ("_fri/1/stable_partition.lance", FileKind.UNKNOWN, "_fri/1/stable_partition.lance"),
    ("_mem_wal/x/data/1.lance", FileKind.UNKNOWN, "_mem_wal/x/data/1.lance"),
    ("images/cat.png", FileKind.UNKNOWN, "images/cat.png"),
    ("x/data/1.lance", FileKind.UNKNOWN, "x/data/1.lance"),
    ("readme", FileKind.UNKNOWN, "readme"),
    ("", FileKind.UNKNOWN, ""),
]


@pytest.mark.parametrize(("path", "kind", "key"), KINDS)
def test_kinds(path: str, kind: FileKind, key: str) -> None:
    found = classify(path)
    assert (found.kind, found.key, found.branch) == (kind, key, "main")


@pytest.mark.parametrize("branch", ["dev", "a/b", "data", "_versions", "x.y", "ü"])
@pytest.mark.parametrize(("path", "kind", "key"), [one for one in KINDS if one[1] in (
    FileKind.DATA, FileKind.DELETION, FileKind.INDEX, FileKind.TRANSACTION, FileKind.TEMPORARY)])  # fmt: skip
def test_branches_are_laid_out_like_tables(
    branch: str, path: str, kind: FileKind, key: str
) -> None:
    found = classify(f"tree/{branch}/{path}")
    assert (found.kind, found.key, found.branch) == (kind, f"tree/{branch}/{key}", branch)


@pytest.mark.parametrize(
    ("name", "version", "detached", "kind"),
    [
        ("1.manifest", 1, False, FileKind.MANIFEST),
        ("18446744073709551614.manifest", 1, False, FileKind.MANIFEST),
        (f"{U64 - 77:020}.manifest", 77, False, FileKind.MANIFEST),
        (f"{U64:020}.manifest", 0, False, FileKind.MANIFEST),
        (f"d{2**63 + 5}.manifest", 5, True, FileKind.MANIFEST),
        ("7.manifest-0b3d-1", 7, False, FileKind.STAGED_MANIFEST),
        (f"{U64 - 7:020}.manifest-0b3d", 7, False, FileKind.STAGED_MANIFEST),
        (f"d{2**63 + 5}.manifest-x", 5, True, FileKind.STAGED_MANIFEST),
    ],
)
def test_manifests_tell_their_version(
    name: str, version: int, detached: bool, kind: FileKind
) -> None:
    for prefix, branch in (("", "main"), ("tree/a/b/", "a/b")):
        path = f"{prefix}_versions/{name}"
        assert classify(path) == Entry(kind, path, branch, version, detached)


segments = st.lists(
    st.one_of(
        st.sampled_from(["_versions", "data", "_indices", "tree", "_refs", "_deletions", "a.b"]),
        st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1),
    ),
    min_size=1,
    max_size=5,
)


@example(["_versions"], 3)
@example(["data", "_versions", "x\n"], 3)
@given(segments, st.integers(1, 2**62))
def test_no_branch_name_hides_a_manifest(names: list[str], version: int) -> None:
    """A manifest not seen as one protects nothing: the one misreading that could lose data."""
    branch = "/".join(names)
    found = classify(f"tree/{branch}/_versions/{U64 - version:020}.manifest")
    assert (found.kind, found.branch, found.version) == (FileKind.MANIFEST, branch, version)


@given(segments, st.sampled_from(["data/x.lance", "_indices/ab/p.lance", "_deletions/1-1-1.bin"]))
def test_listing_and_manifest_agree_on_the_key(names: list[str], path: str) -> None:
    """The same function reads both sides, so a file of a branch is found however it is called."""
    full = f"tree/{'/'.join(names)}/{path}"
    found = classify(full)
    assert full.startswith(found.key)
    assert classify(full) == found


@given(st.text())
def test_any_text_is_read(path: str) -> None:
    assert classify(path).key == path or classify(path).kind in (FileKind.DATA, FileKind.INDEX)


def test_plain_bases_hold_data_files_only() -> None:
    assert classify_extra_base("x.lance") == Entry(FileKind.DATA, "x.lance")
    assert classify_extra_base("x/1.blob") == Entry(FileKind.DATA, "x.lance")
    for path in ("x.txt", "data/x.lance", "a/b/1.blob", "_versions/1.manifest"):
        assert classify_extra_base(path).kind is FileKind.UNKNOWN
