"""S3, Google Cloud Storage, Azure and the in-process memory store, on obstore.

What obstore (0.12) does that the rest of the program must not notice:

- An object whose key has an empty, `.` or `..` segment or a control character fails the listing
  that meets it.  That is kept, as an error that names the key: a listing that left the object out
  would be a lie.
- A directory marker (`dir/`, zero bytes) is listed as `dir`, out of order and perhaps twice; those
  rows are dropped.  Outer slashes of keys given to it are stripped in silence; they are refused.
- A bulk delete raises for the first key that failed, though the others were tried as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Literal

import obstore
import pyarrow as pa
import pyarrow.compute as pc
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from lakewarden.errors import ErrorKind, StorageError, UsageError
from lakewarden.storage.location import Location
from lakewarden.storage.options import ClientSettings, parse_flag
from lakewarden.storage.store import (
    LIST_PAGE_SIZE,
    OBJECT_SCHEMA,
    DeleteResult,
    Deletion,
    Request,
    Requests,
)
from lakewarden.storage.translation import (
    RAISED,
    headline,
    is_transient,
    short,
    translate,
    translated,
)
from lakewarden.world import Clock, SystemClock

if TYPE_CHECKING:
    Client = S3Store | GCSStore | AzureStore | MemoryStore

#: Keys per request of a bulk delete; Google has none and gets a request per key.
_DELETE_REQUEST_KEYS = {"s3": 1000, "gs": 1, "az": 256, "memory": 1000}
#: Waits between tries of a bulk delete, on top of obstore's own, which do not cover timeouts of
#: requests it takes for unsafe to repeat.  Deleting twice is safe.
_DELETE_WAITS_SECONDS = (1.0, 4.0)
#: After so many keys were refused one by one in bulk requests, single requests are cheaper.
_REFUSALS_MAX = 8
_UNPARSABLE = re.compile(r"[\x00-\x1f\x7f]|//|(?:^|/)\.{1,2}(?:/|$)")

# Inside the class `list` is the method.
DeleteResults = list[DeleteResult]

_memory: dict[str, MemoryStore] = {}
_memory_lock = Lock()


def open_client(location: Location, settings: ClientSettings) -> Client:
    """Connect to the store `location` is in.  No request is made yet."""
    bucket, _, account = location.authority.partition("@")
    config = dict(settings.config)
    try:
        match location.scheme:
            case "memory":
                with _memory_lock:
                    return _memory.setdefault(location.authority, MemoryStore())
            case "s3":
                return S3Store(
                    bucket,
                    config=config,  # type: ignore[arg-type]
                    client_options=settings.client,
                    retry_config=settings.retry,
                )
            case "gs":
                return GCSStore(
                    bucket,
                    config=config,  # type: ignore[arg-type]
                    client_options=settings.client,
                    retry_config=settings.retry,
                )
            case "az":
                return AzureStore(
                    bucket,
                    config=_with_account(config, account),  # type: ignore[arg-type]
                    client_options=settings.client,
                    retry_config=settings.retry,
                )
            case scheme:
                raise AssertionError(f"{scheme} is no object store")
    except exceptions.UnknownConfigurationKeyError as error:
        name = headline(error).split("'")[1]
        raise UsageError(
            ErrorKind.UNKNOWN_OPTION,
            f"storage option {name!r} is not known for {location.scheme}:// stores; check its "
            "spelling",
        ) from None
    except RAISED as error:
        raise UsageError(
            ErrorKind.USAGE,
            f"the storage options for {location.uri} do not fit: "
            f"{short(_masked(headline(error), settings))}",
        ) from None


class ObjectStore:
    """A bucket or container; keys are the object's full names."""

    def __init__(
        self,
        location: Location,
        client: Client,
        settings: ClientSettings,
        clock: Clock | None = None,
    ) -> None:
        self.requests = Requests()
        self.lists_ranges = _lists_in_key_order(location, settings)
        self._location = location.store
        self._client = client
        self._clock: Clock = clock or SystemClock()

    def list(
        self, prefix: str, *, after: str | None = None, before: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        prefix = prefix.strip("/")
        batches = self._listed(prefix, after if self.lists_ranges else None)
        if not self.lists_ranges:
            batches = _sorted(batches)
        return _in_range(_ordered(batches, prefix, self._location.uri), after, before)

    def _listed(self, prefix: str, after: str | None) -> Iterator[pa.RecordBatch]:
        rows = 0
        place = self._location.child(prefix).uri
        try:
            with translated("list", place):
                stream = obstore.list(
                    self._client,
                    prefix or None,
                    offset=_offset(after),
                    chunk_size=LIST_PAGE_SIZE,
                    return_arrow=True,
                )
            while True:
                with translated("list", place):
                    page = next(stream, None)
                if page is None:
                    return
                rows += page.num_rows
                yield _as_objects(pa.record_batch(page))
        finally:
            self.requests.add(Request.LIST, _pages(rows))

    def list_directory(self, prefix: str) -> tuple[Sequence[str], Sequence[str]]:
        prefix = prefix.strip("/")
        with translated("list", self._location.child(prefix).uri):
            found = obstore.list_with_delimiter(self._client, prefix or None)
        keys = [entry["path"] for entry in found["objects"] if entry["path"] != prefix]
        directories = found["common_prefixes"]
        self.requests.add(Request.LIST, _pages(len(found["objects"]) + len(directories)))
        return sorted(map(_name, directories)), sorted(map(_name, keys))

    def get(self, key: str) -> bytes:
        self.requests.add(Request.GET)
        with translated("read", self._checked(key)):
            return obstore.get(self._client, key).bytes().to_bytes()

    def exists(self, key: str) -> bool:
        self.requests.add(Request.HEAD)
        place = self._checked(key)
        try:
            obstore.head(self._client, key)
        except FileNotFoundError:
            return False
        except RAISED as error:
            raise translate(error, "look at", place) from None
        return True

    def put(self, key: str, data: bytes) -> None:
        self._put(key, data, "overwrite")

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._put(key, data, "create")

    def _put(self, key: str, data: bytes, mode: Literal["overwrite", "create"]) -> None:
        self.requests.add(Request.PUT)
        with translated("write", self._checked(key)):
            # One request: a multipart upload could not be conditional everywhere.
            obstore.put(self._client, key, data, mode=mode, use_multipart=False)

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        results = {key: self._refused(key) for key in keys}
        pending = [key for key, result in results.items() if result is None]
        refusals = 0
        while pending:
            error = self._delete_together(pending)
            if error is None:
                results.update((key, DeleteResult(key, Deletion.DELETED)) for key in pending)
                break
            named = next((key for key in pending if f"for key {key}: " in headline(error)), None)
            if named is not None and refusals < _REFUSALS_MAX:
                refusals += 1
                pending.remove(named)
                results[named] = self._failed(named, error)
            elif named is not None or isinstance(error, FileNotFoundError):
                results.update((key, self._delete_alone(key)) for key in pending)
                break
            else:
                # The request as a whole failed; so would a thousand single ones, one by one.
                results.update((key, self._failed(key, error)) for key in pending)
                break
        return [result for key in keys if (result := results[key]) is not None]

    def _delete_together(self, keys: Sequence[str]) -> Exception | None:
        """Try to delete the keys in bulk; return why that did not work."""
        for wait in (*_DELETE_WAITS_SECONDS, None):
            per_request = _DELETE_REQUEST_KEYS[self._location.scheme]
            self.requests.add(Request.DELETE, -(-len(keys) // per_request))
            try:
                obstore.delete(self._client, keys)
            except RAISED as error:
                if wait is None or not is_transient(error):
                    return error
                self._clock.sleep(wait)
            else:
                return None
        raise AssertionError("the last wait is None, so the loop has returned")

    def _delete_alone(self, key: str) -> DeleteResult:
        match self._delete_together([key]):
            case None:
                return DeleteResult(key, Deletion.DELETED)
            case FileNotFoundError():
                return DeleteResult(key, Deletion.MISSING)
            case error:
                return self._failed(key, error)

    def _failed(self, key: str, error: Exception) -> DeleteResult:
        why = translate(error, "delete", self._location.child(key).uri)
        return DeleteResult(key, Deletion.FAILED, why.message)

    def _refused(self, key: str) -> DeleteResult | None:
        try:
            self._checked(key)
        except StorageError as error:
            return DeleteResult(key, Deletion.FAILED, error.message)
        return None

    def _checked(self, key: str) -> str:
        """Return the key's URI; refuse keys obstore would silently change or cannot send."""
        if not key or key != key.strip("/") or _UNPARSABLE.search(key):
            raise StorageError(
                ErrorKind.STORAGE,
                f"{key!r} in {self._location.uri} cannot be addressed: it has an empty, '.' or "
                "'..' segment or a control character; rename or remove the object by other means",
            )
        return self._location.child(key).uri

    def prune_directory(self, prefix: str) -> bool:  # noqa: ARG002  # there are no directories
        return False

    def __repr__(self) -> str:
        return f"ObjectStore({self._location.uri!r})"


def _lists_in_key_order(location: Location, settings: ClientSettings) -> bool:
    """Tell whether the store lists by key, the condition for stopping early.

    Azure accounts with a hierarchical namespace and S3 directory buckets do not, and Azure does
    not tell which kind an account is.  There, listings are collected and sorted.
    """
    flag = settings.config.get("aws_s3_express", settings.config.get("s3_express", "false"))
    express = location.authority.endswith("--x-s3") or parse_flag("aws_s3_express", flag)
    return location.scheme != "az" and not express


def _as_objects(page: pa.RecordBatch) -> pa.RecordBatch:
    names = ("path", "size", "last_modified")
    columns = [page[n].cast(f.type) for n, f in zip(names, OBJECT_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=OBJECT_SCHEMA)


def _sorted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Collect a listing and yield it in key order; a marker comes after an object of its name."""
    whole = pa.Table.from_batches(batches, OBJECT_SCHEMA)
    yield from whole.sort_by([("key", "ascending"), ("size", "descending")]).to_batches()


def _in_range(
    batches: Iterator[pa.RecordBatch], after: str | None, before: str | None
) -> Iterator[pa.RecordBatch]:
    """Filter a listing in key order; stop reading it at `before`."""
    for batch in batches:
        kept = batch
        if after is not None:
            kept = kept.filter(pc.greater(kept["key"], after))
        if before is not None:
            kept = kept.filter(pc.less(kept["key"], before))
        if kept.num_rows:
            yield kept
        if before is not None and batch.num_rows and batch["key"][-1].as_py() >= before:
            return


def _ordered(
    batches: Iterator[pa.RecordBatch], prefix: str, place: str
) -> Iterator[pa.RecordBatch]:
    """Drop directory markers, and refuse a listing that is still out of order.

    A consumer that stops at a key, or merges two listings, would miss objects without noticing.
    """
    last = ""
    for batch in _complete(batches):
        kept = _without_markers(batch, prefix, last)
        if not kept.num_rows:
            continue
        keys = kept["key"]
        first = keys[0].as_py()
        ascending = pc.all(pc.less(keys[:-1], keys[1:]), min_count=0).as_py()
        if not ascending or (last and first <= last):
            raise StorageError(
                ErrorKind.STORAGE,
                f"{place} lists objects below {prefix!r} out of key order near {first!r}, so "
                "objects could be missed; this store cannot be maintained safely",
            )
        last = keys[-1].as_py()
        yield kept


def _complete(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join batches so that none ends in an empty object: what follows tells if it is a marker."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if batch.num_rows and batch["size"][-1].as_py() != 0:
            yield pa.concat_batches(held)
            held = []
    if held:
        yield pa.concat_batches(held)


def _without_markers(batch: pa.RecordBatch, prefix: str, last: str) -> pa.RecordBatch:
    """Drop empty rows that stand where `key/` sorts but `key` does not, or that have children.

    An empty object `d` beside objects `d/…` is dropped with them: keeping it forever costs
    nothing.  A marker without children stays, as the empty object it cannot be told from.
    """
    if not pc.any(pc.equal(batch["size"], 0)).as_py():
        return batch
    keys, sizes = batch["key"].to_pylist(), batch["size"].to_pylist()
    keep = []
    for number, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        following = keys[number + 1] if number + 1 < len(keys) else ""
        marker = size == 0 and (
            key == prefix or (last and key <= last) or following.startswith(f"{key}/")
        )
        keep.append(not marker)
        last = last if marker else key
    return batch.filter(pa.array(keep))


def _offset(after: str | None) -> str | None:
    """Return an offset obstore can parse; the beginning of a key sorts before it, never after."""
    if after is None:
        return None
    found = _UNPARSABLE.search(after)
    return (after[: found.start()] if found else after).strip("/") or None


def _pages(rows: int) -> int:
    return max(1, -(-rows // LIST_PAGE_SIZE))


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _with_account(config: dict[str, str], account: str) -> dict[str, str]:
    if not account:
        return config
    rest = {
        name: value
        for name, value in config.items()
        if name not in ("azure_storage_account_name", "account_name")
    }
    if "." in account:  # a host outside the public cloud
        return {**rest, "account_name": account.partition(".")[0], "endpoint": f"https://{account}"}
    return {**rest, "account_name": account}


def _masked(text: str, settings: ClientSettings) -> str:
    for value in settings.config.values():
        if len(value) > 3:
            text = text.replace(value, "***")
    return text
