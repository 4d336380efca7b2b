"""What only object stores do: requests, refusals, keys no path can spell."""

from __future__ import annotations

import itertools
import pickle
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest

from lakewarden.errors import ErrorKind, LakewardenError, NotFound, StorageError, UsageError
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import Deletion, ReadStore, Request, Store
from lakewarden.testing.s3 import ACCESS_KEY, S3Server

pytestmark = pytest.mark.s3

numbers = itertools.count()
QUICK = {"client_max_retries": "2", "client_retry_timeout": "5"}


@pytest.fixture
def bucket(s3: S3Server) -> str:
    name = f"cloud-{next(numbers)}"
    s3.create_bucket(name)
    return name


@pytest.fixture
def store(s3: S3Server, bucket: str) -> Store:
    return Opener(s3.options)(Location.parse(f"s3://{bucket}"))


def put_raw(s3: S3Server, bucket: str, key: str) -> None:
    """Write a key our own client refuses to spell."""
    request = urllib.request.Request(
        f"{s3.endpoint}/{bucket}/{quote(key)}",
        data=b"",
        method="PUT",
        headers={"Authorization": f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/1/us-east-1/s3/x"},
    )
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).close()


def fill(store: Store, keys: list[str]) -> None:
    with ThreadPoolExecutor(32) as pool:
        for _ in pool.map(lambda key: store.put(key, b"x"), keys):
            pass


def keys(store: ReadStore, prefix: str, after: str | None = None) -> list[str]:
    return [key for batch in store.list(prefix, after=after) for key in batch["key"].to_pylist()]


def one_line(error: LakewardenError) -> str:
    assert "\n" not in error.message
    assert len(error.message) < 400
    for noise in ("Debug", "RetryError", "lakewarden-test-secret", "<"):
        assert noise not in error.message
    return error.message


def test_counts_equal_the_servers(s3: S3Server, store: Store) -> None:
    names = [f"t/{number:05d}" for number in range(2500)]
    fill(store, names)
    s3.reset()
    store.requests.drain()
    assert keys(store, "t") == names
    assert store.requests.drain() == s3.requests() == {Request.LIST: 3}
    s3.reset()
    for start in (0, 1000, 2000):
        store.delete(names[start : start + 1000])
    assert keys(store, "t") == []
    assert store.requests.drain() == s3.requests() == {Request.LIST: 1, Request.DELETE: 3}


def test_listing_a_range_asks_only_for_the_range(s3: S3Server, store: Store) -> None:
    names = [f"t/{number:05d}" for number in range(3500)]
    fill(store, names)
    s3.reset()
    store.requests.drain()
    batches = store.list("t", after=names[1200], before=names[1900])
    assert [key for batch in batches for key in batch["key"].to_pylist()] == names[1201:1900]
    assert store.requests.drain() == s3.requests() == {Request.LIST: 1}


def test_one_refused_key_fails_alone(s3: S3Server, store: Store) -> None:
    names = [f"t/{number:03d}" for number in range(30)]
    fill(store, names)
    s3.deny_deletes([names[3], names[17]])
    try:
        store.requests.drain()
        s3.reset()
        results = store.delete(names)
        assert store.requests.drain() == s3.requests() == {Request.DELETE: 3}
    finally:
        s3.deny_deletes([])
    assert [result.key for result in results] == names
    failed = {result.key: result.error for result in results if result.outcome is Deletion.FAILED}
    assert list(failed) == [names[3], names[17]] == keys(store, "t")
    assert "AccessDenied" in failed[names[3]]
    assert "\n" not in failed[names[3]]


def test_many_refused_keys_fail_alone(s3: S3Server, store: Store) -> None:
    names = [f"t/{number:03d}" for number in range(30)]
    fill(store, names)
    s3.deny_deletes(names[:20])
    try:
        results = store.delete(names)
    finally:
        s3.deny_deletes([])
    outcomes = [result.outcome for result in results]
    assert outcomes == [Deletion.FAILED] * 20 + [Deletion.DELETED] * 10
    assert keys(store, "t") == names[:20]


def test_throttled_requests_are_repeated(s3: S3Server, store: Store) -> None:
    fill(store, ["t/a", "t/b"])
    s3.throttle(4)
    assert keys(store, "t") == ["t/a", "t/b"]
    s3.throttle(4)
    outcomes = {result.outcome for result in store.delete(["t/a", "t/b"])}
    assert outcomes == {Deletion.DELETED}


@pytest.mark.nightly
def test_throttling_beyond_patience_fails_each_key(s3: S3Server, bucket: str) -> None:
    opener = Opener({**s3.options, "client_max_retries": "0"})
    store = opener(Location.parse(f"s3://{bucket}"))
    fill(store, ["t/a", "t/b"])
    s3.throttle(1)
    outcomes = [result.outcome for result in store.delete(["t/a"])]
    assert outcomes == [Deletion.DELETED], "our own repetition should have covered one refusal"
    s3.throttle(1000)
    try:
        [result] = store.delete(["t/b"])
        with pytest.raises(StorageError, match="503 SlowDown") as caught:
            keys(store, "t")
    finally:
        s3.throttle(0)
    assert result.outcome is Deletion.FAILED
    assert "SlowDown" in result.error
    one_line(caught.value)


@pytest.mark.parametrize("key", ["t/a//b", "t/a/../b", "t/./x", "t/tab\tx", "t/\x01"])
def test_unspeakable_key_fails_the_listing_by_name(
    s3: S3Server, bucket: str, store: Store, key: str
) -> None:
    put_raw(s3, bucket, "t/first")
    put_raw(s3, bucket, key)
    with pytest.raises(StorageError, match="cannot address a key") as caught:
        keys(store, "t")
    assert key.split("/")[1].split("\t", maxsplit=1)[0].strip("\x01") in one_line(caught.value)
    assert keys(store, "elsewhere") == []


@pytest.mark.parametrize("key", ["t/a//b", "t/../b", "t/", "/t", "", "t/\n"])
def test_unspeakable_key_is_refused(store: Store, key: str) -> None:
    """The client would strip outer slashes and delete another object."""
    store.put("t", b"precious")
    assert store.delete([key])[0].outcome is Deletion.FAILED
    for call in (store.get, store.exists, lambda k: store.put(k, b"")):
        with pytest.raises(StorageError, match="cannot be addressed") as caught:
            call(key)
        one_line(caught.value)
    assert store.get("t") == b"precious"


def test_directory_markers_are_no_objects(s3: S3Server, bucket: str, store: Store) -> None:
    for key in ("t/", "t/d/", "t/d.x", "t/d/1", "t/e/", "t/e/2"):
        put_raw(s3, bucket, key)
    assert keys(store, "t") == ["t/d.x", "t/d/1", "t/e/2"]
    assert keys(store, "t", after="t/d.x") == ["t/d/1", "t/e/2"]
    assert store.list_directory("t") == (["d", "e"], ["d.x"])


def test_marker_at_the_end_of_a_page_is_found(s3: S3Server, bucket: str, store: Store) -> None:
    names = [f"t/{number:04d}" for number in range(999)]
    fill(store, names)
    put_raw(s3, bucket, "t/z/")
    fill(store, ["t/z/1"])
    assert keys(store, "t") == [*names, "t/z/1"]


def test_wrong_credentials_are_reported(s3: S3Server, bucket: str) -> None:
    opener = Opener({**s3.options, "aws_access_key_id": "somebody"})
    store = opener(Location.parse(f"s3://{bucket}"))
    calls: list[Callable[[], object]] = [
        lambda: keys(store, "t"),
        lambda: store.get("x"),
        lambda: store.exists("x"),
    ]
    for call in calls:
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.kind is ErrorKind.ACCESS_DENIED
        one_line(caught.value)


def test_missing_bucket_is_no_missing_object(s3: S3Server) -> None:
    store = Opener(s3.options)(Location.parse("s3://no-such-bucket"))
    calls: list[Callable[[], object]] = [
        lambda: keys(store, "t"),
        lambda: store.get("x"),
        lambda: store.put("x", b""),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="bucket or container does not exist") as caught:
            call()
        assert caught.value.kind is ErrorKind.NOT_FOUND
        assert not isinstance(caught.value, NotFound)
        one_line(caught.value)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://nowhere.invalid"])
def test_unreachable_endpoint_is_reported(s3: S3Server, endpoint: str) -> None:
    opener = Opener({**s3.options, **QUICK, "aws_endpoint": endpoint})
    store = opener(Location.parse("s3://bucket"))
    with pytest.raises(StorageError, match="endpoint did not answer") as caught:
        keys(store, "t")
    one_line(caught.value)
    assert {result.outcome for result in store.delete(["a", "b"])} == {Deletion.FAILED}


def test_environment_reaches_an_http_endpoint(
    s3: S3Server, bucket: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("x", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    assert Opener({"user_agent": "fresh"})(Location.parse(f"s3a://{bucket}")).get("x") == b"1"


def test_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'aws_acess_key_id'") as caught:
        Opener({"aws_acess_key_id": "x"})(Location.parse("s3://b"))
    assert caught.value.kind is ErrorKind.UNKNOWN_OPTION


def test_options_of_another_cloud_are_no_mistake() -> None:
    Opener({"google_service_account": "x", "aws_region": "y"})(Location.parse("s3://b"))


def test_bad_option_value_is_refused_without_showing_it() -> None:
    with pytest.raises(UsageError) as caught:
        Opener({"google_service_account_key": "hush-hush"})(Location.parse("gs://b"))
    assert "hush" not in one_line(caught.value)
    with pytest.raises(UsageError, match="neither true nor false"):
        Opener({"allow_http": "maybe"})(Location.parse("s3://b"))


def test_opener_travels_and_keeps_its_secrets(s3: S3Server, bucket: str, store: Store) -> None:
    store.put("x", b"1")
    opener = pickle.loads(pickle.dumps(Opener(s3.options)))
    assert opener == Opener(s3.options)
    assert opener(Location.parse(f"s3://{bucket}/any/where")).get("x") == b"1"
    shown = repr(opener) + repr(opener(Location.parse(f"s3://{bucket}")))
    assert not any(value in shown for value in s3.options.values())


def test_each_opened_store_counts_for_itself(s3: S3Server, bucket: str) -> None:
    first, second = (Opener(s3.options)(Location.parse(f"s3://{bucket}")) for _ in range(2))
    first.put("x", b"1")
    assert second.requests.drain() == {}
    assert first.requests.drain() == {Request.PUT: 1}


def test_memory_store_is_shared_by_name() -> None:
    Opener()(Location.parse("memory://shared/t")).put("t/x", b"1")
    other = Opener({"timeout": "9s"})  # not served from the cache of connections
    assert other(Location.parse("memory://shared")).get("t/x") == b"1"
    assert not Opener()(Location.parse("memory://other")).exists("t/x")


def test_azure_is_opened_with_the_account_of_the_location() -> None:
    options = {"azure_storage_account_key": "a2V5", "azure_storage_account_name": "other"}
    store = Opener(options)(Location.parse("abfss://c@acc.dfs.core.windows.net/t"))
    assert not store.lists_ranges
    assert "acc" in repr(store)
