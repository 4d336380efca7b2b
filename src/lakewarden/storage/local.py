"""The local disk as a store, on plain `os` calls.

Not on obstore, whose local store is unfit for deciding what may be deleted: one file name with a
newline fails the whole listing, links to directories are followed out of the table, and names that
end in `#1` are hidden (it uses them for its own staging files).  Here links are objects like any
other: listed, never followed, and deleting one removes the link.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from lakewarden.errors import AlreadyExists, ErrorKind, NotFound, StorageError
from lakewarden.storage.store import (
    LIST_PAGE_SIZE,
    OBJECT_SCHEMA,
    DeleteResult,
    Deletion,
    Request,
    Requests,
)

_BATCH_ROWS = 4096
#: Answers of file systems without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}


# Inside the class `list` is the method.
DeleteResults = list[DeleteResult]


class LocalStore:
    """Files below `/`; a key is an absolute path without its leading slash."""

    #: A range of one large directory costs reading all its names, so cutting saves nothing.
    lists_ranges = False

    def __init__(self) -> None:
        self.requests = Requests()

    def list(
        self, prefix: str, *, after: str | None = None, before: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        rows = 0
        batch = _Rows()
        try:
            for key, path in _walk(prefix.strip("/"), after, before):
                batch.add(key, path)
                if len(batch.keys) == _BATCH_ROWS:
                    rows += _BATCH_ROWS
                    yield batch.as_arrow()
                    batch = _Rows()
            if batch.keys:
                rows += len(batch.keys)
                yield batch.as_arrow()
        finally:
            # Counted in pages like an object store's, so that numbers compare.
            self.requests.add(Request.LIST, max(1, -(-rows // LIST_PAGE_SIZE)))

    def list_directory(self, prefix: str) -> tuple[Sequence[str], Sequence[str]]:
        self.requests.add(Request.LIST)
        directories: list[str] = []
        objects: list[str] = []
        for name, _, is_directory in _scan(os.fsencode(f"/{prefix.strip('/')}")):
            (directories if is_directory else objects).append(name)
        return sorted(directories), sorted(objects)

    def get(self, key: str) -> bytes:
        self.requests.add(Request.GET)
        with _translated("read", key):
            return _path(key).read_bytes()

    def exists(self, key: str) -> bool:
        self.requests.add(Request.HEAD)
        try:
            with _translated("look at", key):
                return not stat.S_ISDIR(_path(key).lstat().st_mode)
        except NotFound:
            return False

    def put(self, key: str, data: bytes) -> None:
        self.requests.add(Request.PUT)
        path = _path(key)
        with _translated("write", key), _temporary(path, data) as temporary:
            temporary.replace(path)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.requests.add(Request.PUT)
        path = _path(key)
        try:
            with _translated("write", key), _temporary(path, data) as temporary:
                _link(temporary, path, data)
        except FileExistsError:
            raise AlreadyExists(f"/{key} already exists and was left as it is") from None

    def jot(self, key: str, data: bytes) -> None:
        self.requests.add(Request.PUT)
        path = _path(key)
        with _translated("write", key), _temporary(path, data, synced=False) as temporary:
            temporary.replace(path)

    def link(self, source: str, target: str) -> bool:
        self.requests.add(Request.PUT)
        path = _path(target)
        try:
            with _translated("write", target):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.hardlink_to(_path(source))
        except FileExistsError:
            raise AlreadyExists(f"/{target} already exists and was left as it is") from None
        except StorageError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in _NO_LINKS:
                return False
            raise
        return True

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        self.requests.add(Request.DELETE)
        real_parents: set[str] = set()
        return [_unlink(key, real_parents) for key in keys]

    def prune_directory(self, prefix: str) -> bool:
        path = f"/{prefix.strip('/')}"
        if path == "/" or os.path.realpath(path) != path:
            return False
        with suppress(OSError):
            os.rmdir(path)  # noqa: PTH106  # refuses links, files and directories in use
            return True
        return False

    def __repr__(self) -> str:
        return "LocalStore()"


class _Rows:
    """Columns of the batch being filled."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.sizes: list[int] = []
        self.modified: list[int | None] = []

    def add(self, key: str, path: bytes) -> None:
        with _translated("look at", key, missing_is_fine=True):
            found = os.lstat(path)
            self.keys.append(key)
            self.sizes.append(found.st_size)
            micros = found.st_mtime_ns // 1000
            # Zero or less is a clock that was not set, not a file from 1970.
            self.modified.append(micros if micros > 0 else None)

    def as_arrow(self) -> pa.RecordBatch:
        columns = [self.keys, self.sizes, self.modified]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, OBJECT_SCHEMA, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=OBJECT_SCHEMA)


def _walk(prefix: str, after: str | None, before: str | None) -> Iterator[tuple[str, bytes]]:
    """Yield keys with their raw paths in key order, entering only directories in the range."""
    root = os.fsencode(f"/{prefix}")
    if prefix and Path(f"/{prefix}").is_symlink():
        return  # a link is an object of the directory above, not a directory
    stack = [iter(_entries(prefix, root))]
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
            continue
        key, path, is_directory = entry
        if before is not None and key >= before:
            return  # keys only grow from here, also those in directories still on the stack
        # A directory's own key ends in a slash, so `after` may lie inside it.
        skipped = after is not None and key <= after
        if is_directory:
            if not skipped or (after is not None and after.startswith(key)):
                stack.append(iter(_entries(key.rstrip("/"), path)))
        elif not skipped:
            yield key, path


def _entries(prefix: str, path: bytes) -> list[tuple[str, bytes, bool]]:
    """Return the directory's (key, path, is directory) in key order.

    A directory takes part as `name/`, because its keys do: `a.b` sorts before `a/x`.
    """
    start = f"{prefix}/" if prefix else ""
    return sorted(
        (f"{start}{name}/" if is_directory else f"{start}{name}", child, is_directory)
        for name, child, is_directory in _scan(path)
    )


def _scan(path: bytes) -> Iterator[tuple[str, bytes, bool]]:
    """Yield (name, raw path, is directory) of a directory that may be gone by now."""
    with (
        _translated("list", os.fsdecode(path).lstrip("/"), missing_is_fine=True),
        os.scandir(path) as entries,
    ):
        for entry in entries:
            # A name that is no UTF-8 must show up, though nothing can address it by this key.
            name = entry.name.decode("utf-8", "backslashreplace")
            yield name, entry.path, entry.is_dir(follow_symlinks=False)


def _path(key: str) -> Path:
    if any(segment in ("", ".", "..") for segment in key.split("/")) or "\0" in key:
        raise StorageError(
            ErrorKind.STORAGE,
            f"{key!r} is no usable key: it has an empty, '.' or '..' segment or a NUL; "
            "this is a defect in the caller or in the table's metadata",
        )
    return Path(f"/{key}")


def _unlink(key: str, real_parents: set[str]) -> DeleteResult:
    try:
        path = _path(key)
        parent = str(path.parent)
        if parent not in real_parents:
            # Through a linked directory the file may belong to somebody else.
            if os.path.realpath(parent) != parent:
                return DeleteResult(key, Deletion.FAILED, f"{parent} is reached through a link")
            real_parents.add(parent)
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return DeleteResult(key, Deletion.MISSING)
    except StorageError as error:
        return DeleteResult(key, Deletion.FAILED, error.message)
    except OSError as error:
        return DeleteResult(key, Deletion.FAILED, error.strerror or str(error))
    return DeleteResult(key, Deletion.DELETED)


@contextmanager
def _temporary(path: Path, data: bytes, *, synced: bool = True) -> Iterator[Path]:
    """Write `data` beside `path` under a temporary name that is gone afterwards."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StorageError(
            ErrorKind.STORAGE,
            f"cannot write {path}: one of its directories is a file; choose another location",
        ) from None
    try:
        _write_new(temporary, data, synced=synced)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path, data: bytes) -> None:
    try:
        path.hardlink_to(temporary)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Still exclusive, but a crash can leave a short file: the best such file systems offer.
        _write_new(path, data)


def _write_new(path: Path, data: bytes, *, synced: bool = True) -> None:
    with path.open("xb") as file:
        file.write(data)
        if synced:
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def _translated(action: str, key: str, *, missing_is_fine: bool = False) -> Iterator[None]:
    """Turn the system's errors into ours, once."""
    try:
        yield
    except FileExistsError:
        raise  # the create-if-absent puts decide on it
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        if not missing_is_fine:
            raise NotFound(f"/{key} does not exist as a file") from None
    except PermissionError as error:
        raise StorageError(
            ErrorKind.ACCESS_DENIED,
            f"cannot {action} /{key}: {error.strerror}; run as a user who may, or fix its mode",
        ) from error
    except OSError as error:
        raise StorageError(
            ErrorKind.STORAGE,
            f"cannot {action} /{key}: {error.strerror or error}; check the disk and try again",
        ) from error
