"""Manifests read directly name exactly what pylance says they name."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import lance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakewarden.errors import Damaged, ErrorKind
from lakewarden.formats.lance.layout import classify
from lakewarden.formats.lance.manifest import Seen, decode
from lakewarden.model import FileKind
from lakewarden.testing import invariants, tables


def _everything(lake: Path) -> None:
    source = tables.create(lake / "source", number=20)
    tables.append(source, 30)
    tables.index(source)
    tables.delete(source, "id = 1")
    tables.append(source, 40)
    tables.compact(source)
    dev = tables.branch(source, "dev/x", 4)
    tables.delete(dev, "id = 3")
    tables.append(tables.branch(dev, "leaf", ("dev/x", 4)), 50)
    tables.detached(source, 60)
    tables.restore(source, 1)
    tables.append(tables.clone(source, lake / "clone", 4), 70)
    tables.overwrite(tables.multi_base(lake / "multi", lake / "plain", lake / "rooted"), 80)
    tables.blobs(lake / "blobs", 1)
    tables.old_naming(lake / "old-naming", 3)
    tables.create(lake / "row-ids", enable_stable_row_ids=True)
    tables.append(lake / "row-ids", 90)
    lance.dataset(str(lake / "row-ids")).update({"name": "'x'"}, where="id > 1")
    big = tables.create(lake / "dense-deletions", number=150_000)
    tables.delete(big, "id % 2 = 0")
    deferred = tables.appended(lake / "deferred", 3)
    tables.index(deferred)
    tables.compact(deferred, defer_index_remap=True)
    added = tables.create(lake / "columns")
    lance.dataset(str(added)).add_columns({"twice": "id * 2"})


ROOTS = [
    "source", "clone", "multi", "blobs", "old-naming", "row-ids", "dense-deletions", "deferred",
    "columns",
]  # fmt: skip


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("manifests")
    _everything(place)
    return place


def manifests(root: Path) -> Iterator[Path]:
    yield from root.rglob("_versions/*.manifest")


def named_by(manifest: Path) -> set[Path]:
    """The files our reading names, as paths; of an index segment, those that are there."""
    found = decode(manifest.read_bytes())
    own = manifest.parent.parent
    files = {manifest}
    for base_id, path in found.named:
        if base_id is None:
            place = own / path
        else:
            base = found.bases[base_id]
            inner = path if base.is_dataset_root else path.removeprefix("data/")
            place = Path(base.path) / inner
        files |= set(place.glob("*")) if path.startswith("_indices/") else {place}
    return files


@pytest.mark.parametrize("name", ROOTS)
def test_names_are_those_pylance_reports(lake: Path, name: str) -> None:
    root = lake / name
    ours = {file for manifest in manifests(root) for file in named_by(manifest)}
    sidecars = {file for file in invariants.live_files(root) if file.suffix == ".blob"}
    assert ours == invariants.live_files(root) - sidecars


@pytest.mark.parametrize("name", ROOTS)
def test_each_version_names_its_own_files(lake: Path, name: str) -> None:
    root = lake / name
    tracked = lance.dataset(str(root)).tracked_files().read_all().to_pylist()
    for manifest in root.glob("_versions/*.manifest"):
        entry = classify(f"_versions/{manifest.name}")
        if not entry.detached:
            theirs = {
                Path(row["base_uri"]) / row["path"]
                for row in tracked
                if row["version"] == entry.version
            }
            assert entry.version is not None
            # pylance leaves out the indices a clone took over.
            theirs |= set(invariants.index_files(root, ("main", entry.version)))
            assert named_by(manifest) == theirs
            assert decode(manifest.read_bytes()).version == entry.version


def test_what_was_seen_is_left_out_and_nothing_else(lake: Path) -> None:
    for name in ROOTS:
        for branch in {file.parent for file in manifests(lake / name)}:
            seen = Seen()
            whole: set[tuple[int | None, str]] = set()
            parts: set[tuple[int | None, str]] = set()
            for file in sorted(branch.glob("*.manifest")):
                whole |= decode(file.read_bytes()).named
                parts |= decode(file.read_bytes(), seen, name).named
            assert parts == whole


def test_commit_time_is_that_of_the_version(lake: Path) -> None:
    root = lake / "source"
    times = {row["version"]: row["timestamp"] for row in lance.dataset(str(root)).versions()}
    for manifest in root.glob("_versions/*.manifest"):
        entry = classify(f"_versions/{manifest.name}")
        committed = decode(manifest.read_bytes()).committed
        assert committed is not None
        if entry.version is not None and not entry.detached:
            assert int(committed.timestamp()) == int(times[entry.version].timestamp())


# Manifests of a newer Lance, and damaged ones.


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def manifest_of(body: bytes, indices: bytes | None = None) -> bytes:
    """A manifest file with the given message (and index section) and version 7."""
    start = b""
    if indices is not None:
        start = struct.pack("<I", len(indices)) + indices
        body += field(6, 0)
    body += field(3, 7)
    tail = struct.pack("<qHH4s", len(start), 0, 3, b"LANC")
    return start + struct.pack("<I", len(body)) + body + tail


NAME = b"data/0101-new.lance"
WRAPPED = field(1, field(2, NAME) + field(3, 5))


@pytest.mark.parametrize(
    "body",
    [
        field(99, NAME),
        field(99, WRAPPED),
        field(2, field(1, 4) + field(77, NAME)),
        field(2, field(2, field(1, b"x.lance") + field(77, WRAPPED))),
        field(2, field(3, field(3, 9) + field(77, NAME))),
        field(18, field(4, b"/base") + field(77, NAME)),
    ],
)
def test_names_in_unknown_fields_are_mentions(body: bytes) -> None:
    found = decode(manifest_of(body))
    assert "0101-new.lance" in found.mentions
    assert found.version == 7


def test_ids_in_unknown_fields_of_indices_are_mentions() -> None:
    segment = bytes(range(16))
    index = field(1, field(1, segment)) + field(77, bytes(range(16, 32)))
    found = decode(manifest_of(b"", field(1, index) + field(88, NAME)))
    assert found.named == {(None, "_indices/00010203-0405-0607-0809-0a0b0c0d0e0f/")}
    assert {"10111213-1415-1617-1819-1a1b1c1d1e1f", "0101-new.lance"} <= found.mentions


def test_system_index_is_mentioned_not_named() -> None:
    """Its content is mostly inside the manifest, so its directory need not exist."""
    index = field(1, field(1, bytes(range(16)))) + field(3, b"__lance_frag_reuse")
    found = decode(manifest_of(b"", field(1, index)))
    assert not found.named
    assert "00010203-0405-0607-0809-0a0b0c0d0e0f" in found.mentions


@pytest.mark.parametrize("which", [9, 10])
@pytest.mark.parametrize("bit", [*range(9, 16), 31, 63])
def test_unknown_features_are_refused(which: int, bit: int) -> None:
    with pytest.raises(Damaged) as caught:
        decode(manifest_of(field(which, 1 << bit)))
    assert caught.value.kind is ErrorKind.UNSUPPORTED_FEATURE


def test_known_features_are_read() -> None:
    assert decode(manifest_of(field(9, 2**9 - 1) + field(10, 2**9 - 1))).version == 7


@pytest.mark.parametrize("name", ["source", "multi"])
def test_truncated_anywhere_is_damage_and_nothing_else(lake: Path, name: str) -> None:
    data = next(file for file in manifests(lake / name)).read_bytes()
    for length in range(len(data)):
        with pytest.raises(Damaged):
            decode(data[:length])
        with pytest.raises(Damaged):
            # The tail survived, the middle did not.
            decode(data[:length][:-16] + data[-16:])


@given(st.data())
def test_flipped_bits_are_damage_or_readable(lake: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(manifests(lake / "source"))))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(Damaged):
        decode(bytes(content))


@given(st.binary(max_size=200))
def test_any_bytes_are_damage_or_readable(data: bytes) -> None:
    for content in (data, manifest_of(data), manifest_of(b"", data)):
        with suppress(Damaged):
            decode(content)


def test_file_kinds_that_manifests_name_are_known(lake: Path) -> None:
    for name in ROOTS:
        for manifest in manifests(lake / name):
            for _, path in decode(manifest.read_bytes()).named:
                shown = f"{path}x" if path.endswith("/") else path
                assert classify(shown).kind is not FileKind.UNKNOWN
