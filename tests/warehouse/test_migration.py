"""A log that an older release wrote is read as it is, and moves on with the first write."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from lakewarden.errors import Refused
from lakewarden.warehouse import codec
from lakewarden.warehouse.codec import CHECKPOINTS, ENTRIES
from lakewarden.warehouse.commit import CHECKPOINT_EVERY, Log
from lakewarden.warehouse.handlers import StoreHandler
from lakewarden.warehouse.manifest import STAMP, Manifest
from tests.warehouse.small import PREFIX, FakeClock, Haunted, append, commit, grow, open_log

#: The shape that the first release wrote.
FIRST = 1


@pytest.fixture
def store() -> Haunted:
    return Haunted(FakeClock())


def keys(store: Haunted) -> list[str]:
    return [key for batch in store.list(PREFIX) for key in batch.column("key").to_pylist()]


def sealed(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    return text + b"\nsha256:" + hashlib.sha256(text).hexdigest().encode()


def made_older(store: Haunted, log: Log) -> None:
    """Write every entry and checkpoint again, as the first release would have."""
    handler = StoreHandler(store, f"{PREFIX}/_versions")
    for version in list(handler.versions()):
        body = json.loads(ENTRIES.encode(log.entry(version)).rpartition(b"\nsha256:")[0])
        store.put(handler.key(version), sealed({**body, "stamp": FIRST}))
    for key in [key for key in keys(store) if "/_checkpoints/" in key]:
        manifest = CHECKPOINTS.decode(store.get(key), key)
        plain: codec.Codec[Manifest] = codec.Codec(Manifest, "checkpoint")
        body = json.loads(plain.encode(manifest).rpartition(b"\n")[0])
        store.put(key, sealed({**body, "stamp": FIRST}))


@pytest.mark.parametrize("versions", [3, CHECKPOINT_EVERY + 5])
def test_an_older_log_is_read_and_nothing_is_written(store: Haunted, versions: int) -> None:
    log = open_log(store)
    before = grow(log, versions)
    made_older(store, log)
    seen = {key: store.get(key) for key in keys(store)}
    fresh = open_log(store)
    assert fresh.head().manifest == before.manifest
    assert fresh.at(2) == log.at(2)
    assert {key: store.get(key) for key in keys(store)} == seen


@pytest.mark.parametrize("versions", [3, CHECKPOINT_EVERY + 5])
def test_the_first_write_moves_it_on_and_the_stamp_comes_last(
    store: Haunted, versions: int
) -> None:
    log = open_log(store)
    before = grow(log, versions)
    made_older(store, log)
    later = open_log(store)
    done = commit(later, append("a", before.manifest.pins()["a"].version + 1))
    entry = later.entry(done.version)
    assert entry.stamp == STAMP > FIRST
    # All that opens it is of this format: its checkpoint was written before it.
    assert entry.checkpoint == before.version
    assert entry.tail == ()
    assert open_log(store).head().manifest == done.manifest
    assert done.manifest.stamp == STAMP


def test_an_interrupted_move_is_made_again(store: Haunted) -> None:
    """The checkpoint is there and the version is not: the next writer just does it again."""
    log = open_log(store)
    before = grow(log, 3)
    made_older(store, log)
    later = open_log(store)
    later._with_checkpoint(later.head())
    assert open_log(store).head().manifest == before.manifest
    done = commit(open_log(store), append("a", before.manifest.pins()["a"].version + 1))
    assert open_log(store).head().manifest == done.manifest


def test_an_older_release_refuses_what_this_one_wrote(
    store: Haunted, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(open_log(store), 3)
    monkeypatch.setattr(codec, "STAMP", FIRST)
    with pytest.raises(Refused, match="upgrade lakewarden first"):
        open_log(store).head()


def test_there_is_a_way_from_every_older_format() -> None:
    assert set(codec.MIGRATIONS) == set(range(1, STAMP))
