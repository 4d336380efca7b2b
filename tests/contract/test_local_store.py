"""What only a disk can hold: links, odd names, directories."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lakewarden.errors import AlreadyExists, ErrorKind, NotFound, StorageError
from lakewarden.storage.local import LocalStore
from lakewarden.storage.store import Deletion, JotStore, LinkStore, Request


def key(path: Path) -> str:
    return str(path).lstrip("/")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path.resolve()


def rows(store: LocalStore, root: Path) -> dict[str, int]:
    """Names below `root` with sizes, in listing order."""
    start = f"{key(root)}/"
    return {
        row["key"].removeprefix(start): row["size"]
        for batch in store.list(key(root))
        for row in batch.to_pylist()
    }


@pytest.mark.parametrize(
    "name", ["new\nline", "a%20b", "a%2Fb", "x#1", "tail ", "back\\slash", "?*[", "ünï", ".tmpx"]
)
def test_odd_name_is_listed_read_and_deleted(root: Path, name: str) -> None:
    store = LocalStore()
    (root / name).write_bytes(b"123")
    assert rows(store, root) == {name: 3}
    assert store.get(key(root / name)) == b"123"
    assert store.delete([key(root / name)])[0].outcome is Deletion.DELETED
    assert rows(store, root) == {}


def test_name_that_is_no_utf8_is_listed(root: Path) -> None:
    raw = os.fsencode(root) + b"/\xff\xfe"
    try:
        with open(raw, "wb") as file:  # noqa: PTH123  # a Path cannot hold these bytes everywhere
            file.write(b"12")
    except OSError:
        pytest.skip("this file system only takes UTF-8 names")
    (root / "zz").touch()
    listed = rows(LocalStore(), root)
    assert listed == {"\\xff\\xfe": 2, "zz": 0}
    assert list(listed) == sorted(listed)


def test_links_are_objects_and_never_followed(root: Path) -> None:
    outside, table = root / "outside", root / "t"
    outside.mkdir()
    table.mkdir()
    (outside / "precious").write_bytes(b"12345")
    (table / "dir").symlink_to(outside)
    (table / "file").symlink_to(outside / "precious")
    (table / "broken").symlink_to(root / "nowhere")
    store = LocalStore()
    assert list(rows(store, table)) == ["broken", "dir", "file"]
    assert rows(store, table / "dir") == {}
    assert store.list_directory(key(table)) == ([], ["broken", "dir", "file"])
    through = store.delete([key(table / "dir" / "precious")])[0]
    assert through.outcome is Deletion.FAILED
    assert "link" in through.error
    assert not store.prune_directory(key(table / "dir"))
    results = store.delete([key(table / name) for name in ("broken", "dir", "file")])
    assert {result.outcome for result in results} == {Deletion.DELETED}
    assert (outside / "precious").read_bytes() == b"12345"


def test_directories_are_not_deleted_as_objects(root: Path) -> None:
    (root / "full").mkdir()
    (root / "full" / "x").touch()
    (root / "empty").mkdir()
    store = LocalStore()
    results = store.delete([key(root / "full"), key(root / "empty"), key(root / "none")])
    outcomes = [result.outcome for result in results]
    assert outcomes == [Deletion.FAILED, Deletion.FAILED, Deletion.MISSING]
    assert not store.prune_directory(key(root / "full"))
    assert not store.prune_directory(key(root / "none"))
    assert store.prune_directory(key(root / "empty"))
    assert [path.name for path in root.iterdir()] == ["full"]


def test_time_before_1970_is_no_time(root: Path) -> None:
    (root / "x").touch()
    os.utime(root / "x", ns=(0, 0))
    [batch] = LocalStore().list(key(root))
    assert batch["modified"].to_pylist() == [None]


def test_put_leaves_no_temporary_file_and_usual_permissions(root: Path) -> None:
    store = LocalStore()
    store.put(key(root / "a" / "b"), b"1")
    store.put_if_absent(key(root / "a" / "c"), b"2")
    (root / "plain").touch()
    assert sorted(path.name for path in (root / "a").iterdir()) == ["b", "c"]
    wanted = (root / "plain").stat().st_mode
    assert (root / "a" / "b").stat().st_mode == wanted
    assert (root / "a" / "c").stat().st_mode == wanted


def test_put_below_a_file_says_so(root: Path) -> None:
    (root / "file").touch()
    for put in (LocalStore().put, LocalStore().put_if_absent):
        with pytest.raises(StorageError, match="one of its directories is a file"):
            put(key(root / "file" / "x"), b"")


@pytest.mark.parametrize("bad", ["a/../b", "a//b", "./a", "a/", ""])
def test_key_that_could_mean_another_place_is_refused(bad: str) -> None:
    assert LocalStore().delete([bad])[0].outcome is Deletion.FAILED
    with pytest.raises(StorageError, match="no usable key"):
        LocalStore().get(bad)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_forbidden_directory_fails_the_listing(root: Path) -> None:
    (root / "closed").mkdir(mode=0)
    with pytest.raises(StorageError) as caught:
        rows(LocalStore(), root)
    assert caught.value.kind is ErrorKind.ACCESS_DENIED


def test_listing_a_range_does_not_read_directories_outside(root: Path) -> None:
    """Unless root runs this, the closed directories would fail the listing if touched."""
    for name in ("a", "b", "c"):
        (root / name).mkdir()
        (root / name / "x").touch()
    (root / "a").chmod(0)
    (root / "c").chmod(0)
    store = LocalStore()
    batches = store.list(key(root), after=f"{key(root)}/a0", before=f"{key(root)}/b/y")
    assert [k for batch in batches for k in batch["key"].to_pylist()] == [key(root / "b" / "x")]
    (root / "a").chmod(0o700)  # or the directory could not be cleaned up
    (root / "c").chmod(0o700)


def test_requests_are_counted_in_pages_like_an_object_stores(root: Path) -> None:
    store = LocalStore()
    for number in range(4200):
        (root / str(number)).touch()
    sizes = [batch.num_rows for batch in store.list(key(root))]
    store.delete([key(root / "1"), key(root / "2")])
    assert sizes == [4096, 104]
    assert store.requests.drain() == {Request.LIST: 5, Request.DELETE: 1}


def test_an_object_gets_a_second_name_once(root: Path) -> None:
    store = LocalStore()
    assert isinstance(store, LinkStore)
    (root / "a").write_bytes(b"123")
    assert store.link(key(root / "a"), key(root / "deep/b"))
    (root / "a").unlink()
    assert (root / "deep/b").read_bytes() == b"123"
    (root / "c").write_bytes(b"other")
    with pytest.raises(AlreadyExists):
        store.link(key(root / "c"), key(root / "deep/b"))
    assert (root / "deep/b").read_bytes() == b"123"
    with pytest.raises(NotFound):
        store.link(key(root / "gone"), key(root / "d"))


def test_a_disk_without_links_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    (root / "a").write_bytes(b"123")
    assert not LocalStore().link(key(root / "a"), key(root / "b"))
    assert not (root / "b").exists()


def test_what_is_jotted_down_is_there_and_can_be_replaced(root: Path) -> None:
    store = LocalStore()
    assert isinstance(store, JotStore)
    for data in (b"1", b"22"):
        store.jot(key(root / "notes/a"), data)
        assert store.get(key(root / "notes/a")) == data
    assert [one.name for one in (root / "notes").iterdir()] == ["a"]
