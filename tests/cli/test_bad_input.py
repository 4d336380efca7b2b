"""Whatever is wrong: one clear line, the right exit code, nothing lost, other tables unharmed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from lakewarden.testing.s3 import S3Server
from tests.cli.small import DAY, contents, first_ids, make_table, manifest, rows, versions_of
from tests.cli.terminal import Outcome, lakewarden

pytestmark = pytest.mark.spark

STRANGE_NAMES = (
    "data/two\nlines.txt",
    "data/ünïcödé ✓.lance.bak",
    "data/100%25.txt",
    "data/part#1",
    "data/ .lance ",
    "notes with spaces.md",
    "_indices/loose file",
    "_versions/not-a-version.manifest.bak",
    "_versions/-1",
    "data/sub/dir/x.lance",
)


def chattr(mode: str, place: Path) -> bool:
    command = shutil.which("chattr")
    return (
        command is not None
        and subprocess.run([command, mode, str(place)], capture_output=True, check=False).returncode
        == 0
    )


# -- a fleet in which nearly everything is wrong ---------------------------------------------------


def nothing_there(place: Path) -> None:
    assert not place.exists()


def a_directory(place: Path) -> None:
    (place / "sub").mkdir(parents=True)
    (place / "sub" / "notes.txt").write_text("no table here")


def an_empty_directory(place: Path) -> None:
    place.mkdir()


def a_file(place: Path) -> None:
    place.write_text("not even a directory")


def corrupt_head(place: Path) -> None:
    make_table(place)
    manifest(place, 6).write_bytes(os.urandom(500))


def truncated_kept(place: Path) -> None:
    make_table(place)
    path = manifest(place, 5)
    path.write_bytes(path.read_bytes()[:-9])


def empty_kept(place: Path) -> None:
    make_table(place)
    manifest(place, 5).write_bytes(b"")


def missing_data_file(place: Path) -> None:
    dataset = make_table(place)
    (file,) = dataset.checkout_version(5).get_fragments()[0].data_files()
    (place / "data" / file.path).unlink()


def tag_of_no_version(place: Path) -> None:
    make_table(place).tags.create("release", 2)
    tag = place / "_refs" / "tags" / "release.json"
    tag.write_text(json.dumps({**json.loads(tag.read_text()), "version": 99}))


def branch_without_tree(place: Path) -> None:
    make_table(place).create_branch("experiment", 2)
    shutil.rmtree(place / "tree")


def unreadable_ref(place: Path) -> None:
    make_table(place).tags.create("release", 2)
    (place / "_refs" / "tags" / "release.json").write_text("{")


def binary_ref(place: Path) -> None:
    make_table(place).create_branch("experiment", 2)
    (place / "_refs" / "branches" / "experiment.json").write_bytes(b"\xff\xfe\x00")


def ref_with_a_word_for_a_number(place: Path) -> None:
    make_table(place).tags.create("release", 2)
    (place / "_refs" / "tags" / "release.json").write_text('{"version": "two"}')


def table_inside(place: Path) -> None:
    make_table(place)
    make_table(place / "data" / "inner.lance")


#: Tables nothing may be deleted from: how to break one, the kind of error, a word of its message.
UNTOUCHABLE: dict[Callable[[Path], None], tuple[str, str]] = {
    nothing_there: ("not_found", "does not exist"),
    a_directory: ("not_a_table", "no Lance table"),
    an_empty_directory: ("not_found", "is empty"),
    a_file: ("not_found", "does not exist"),
    corrupt_head: ("corrupt_manifest", "version 6"),
    truncated_kept: ("corrupt_manifest", "version 5"),
    empty_kept: ("corrupt_manifest", "version 5"),
    missing_data_file: ("damaged_version", "do not exist"),
    tag_of_no_version: ("damaged_ref", "names version 99"),
    branch_without_tree: ("damaged_ref", "'experiment'"),
    unreadable_ref: ("damaged_ref", "release.json"),
    binary_ref: ("damaged_ref", "experiment.json"),
    ref_with_a_word_for_a_number: ("damaged_ref", "'two'"),
    table_inside: ("location_overlap", "inner.lance"),
}


def good(place: Path) -> None:
    make_table(place)


def corrupt_going(place: Path) -> None:
    make_table(place, days=2)
    manifest(place, 2).write_bytes(os.urandom(500))
    _two_days_old(manifest(place, 2))


def truncated_going(place: Path) -> None:
    make_table(place, days=2)
    path = manifest(place, 3)
    path.write_bytes(path.read_bytes()[:20])
    _two_days_old(path)


def old_corrupt_going(place: Path) -> None:
    """So old that nobody needs to open it."""
    make_table(place)
    manifest(place, 2).write_bytes(b"nonsense")
    moment = time.time() - 40 * DAY  # noqa: TID251
    os.utime(manifest(place, 2), (moment, moment))


def without_rows(place: Path) -> None:
    for step in range(6):
        lance.write_dataset(rows(0, 0), str(place), mode="overwrite" if step else "create")
    from tests.cli.small import age

    age(place, 30 * DAY)


def with_gaps(place: Path) -> None:
    make_table(place)
    manifest(place, 1).unlink()
    manifest(place, 3).unlink()


def strange_files(place: Path) -> None:
    make_table(place)
    for name in STRANGE_NAMES:
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("whose is this?")
        moment = time.time() - 300 * DAY  # noqa: TID251
        os.utime(path, (moment, moment))


#: Tables that are odd but can be cleaned: `--keep 2` leaves versions 5 and 6.
CLEANABLE: tuple[Callable[[Path], None], ...] = (
    good, corrupt_going, truncated_going, old_corrupt_going, without_rows, with_gaps, strange_files,
)  # fmt: skip


def in_the_future(place: Path) -> None:
    """Manifests 1 and 2 and an orphan are from tomorrow."""
    make_table(place)
    orphan = place / "data" / f"{'01' * 12}.lance"
    orphan.write_bytes(b"from the future")
    moment = time.time() + DAY  # noqa: TID251
    for path in (manifest(place, 1), manifest(place, 2), orphan):
        os.utime(path, (moment, moment))


def read_only(place: Path) -> None:
    make_table(place)


def _two_days_old(path: Path) -> None:
    moment = time.time() - 2 * DAY  # noqa: TID251
    os.utime(path, (moment, moment))


@dataclass(frozen=True)
class Fleet:
    root: Path
    before: dict[str, dict[str, str]]
    preview: Outcome
    outcome: Outcome
    is_read_only: bool

    def row(self, name: str) -> dict[str, Any]:
        (row,) = [
            row for row in self.outcome.rows if row["table_key"] == str(self.root / f"{name}.lance")
        ]
        return row

    def now(self, name: str) -> dict[str, str]:
        return _contents(self.root / f"{name}.lance")


def _contents(place: Path) -> dict[str, str]:
    return {".": place.read_text()} if place.is_file() else contents(place)


@pytest.fixture(scope="module")
def fleet(spark: object, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Every case above in one run, as a user with a bad week would see it."""
    root = tmp_path_factory.mktemp("fleet")
    makers = (*UNTOUCHABLE, *CLEANABLE, in_the_future, read_only)
    places = {maker.__name__: root / f"{maker.__name__}.lance" for maker in makers}
    for maker in makers:
        maker(places[maker.__name__])
    before = {name: _contents(place) for name, place in places.items()}
    locked = places["read_only"] / "data"
    is_read_only = chattr("+i", locked)
    try:
        arguments = ("cleanup", *places.values(), "--keep", 2)
        preview = lakewarden(*arguments)
        shown = {name: _contents(place) for name, place in places.items()}
        outcome = lakewarden(*arguments, "--confirm", "--json")
    finally:
        chattr("-i", locked)
    assert shown == before, "a preview changes nothing, whatever it meets"
    return Fleet(root, before, preview, outcome, is_read_only)


def test_some_failed_and_the_rest_is_done(fleet: Fleet) -> None:
    assert (fleet.preview.code, fleet.outcome.code) == (3, 3)


def test_each_failure_is_one_line_that_names_its_table(fleet: Fleet) -> None:
    for outcome, extra in ((fleet.preview, 0), (fleet.outcome, int(fleet.is_read_only))):
        assert "Traceback" not in outcome.stderr
        assert all(line.startswith("error    ") for line in outcome.errors), outcome.stderr
        assert len(outcome.errors) == len(UNTOUCHABLE) + extra
        for maker in UNTOUCHABLE:
            assert sum(f"/{maker.__name__}.lance" in line for line in outcome.errors) == 1


@pytest.mark.parametrize("maker", UNTOUCHABLE, ids=lambda maker: str(maker.__name__))
def test_nothing_goes_from_a_table_that_is_not_understood(
    fleet: Fleet, maker: Callable[[Path], None]
) -> None:
    kind, word = UNTOUCHABLE[maker]
    row = fleet.row(maker.__name__)
    assert row["error_kind"] == kind
    assert word in row["error"]
    assert "\n" not in row["error"]
    assert row["old_versions_removed"] == row["bytes_removed"] == 0
    assert fleet.now(maker.__name__) == fleet.before[maker.__name__]


@pytest.mark.parametrize("maker", CLEANABLE, ids=lambda maker: str(maker.__name__))
def test_odd_tables_are_cleaned(fleet: Fleet, maker: Callable[[Path], None]) -> None:
    row = fleet.row(maker.__name__)
    place = fleet.root / f"{maker.__name__}.lance"
    assert row["error"] is None
    assert versions_of(place) == [5, 6]
    gone = 2 if maker is with_gaps else 4
    assert row["old_versions_removed"] == row["manifest_files_removed"] == gone
    if maker is without_rows:
        assert lance.dataset(str(place)).count_rows() == 0
    else:
        assert first_ids(place, [5, 6]) == [20, 25]


@pytest.mark.parametrize(
    ("name", "version"), [("corrupt_going", 2), ("truncated_going", 3)], ids=str
)
def test_an_unreadable_version_that_goes_is_a_warning(
    fleet: Fleet, name: str, version: int
) -> None:
    for outcome in (fleet.preview, fleet.outcome):
        lines = [line for line in outcome.stderr.splitlines() if line.startswith("warning ")]
        assert [
            line for line in lines if f"/{name}.lance" in line and f"version {version} " in line
        ]
    # Nobody can say any more which files only it named, so a young one stays until it is old.
    assert fleet.row(name)["kept_unverified"] >= 1


def test_what_is_too_old_to_matter_is_not_opened(fleet: Fleet) -> None:
    assert "old_corrupt_going" not in fleet.outcome.stderr


def test_files_with_strange_names_stay_and_are_counted(fleet: Fleet) -> None:
    place = fleet.root / "strange_files.lance"
    assert [name for name in STRANGE_NAMES if not (place / name).exists()] == []
    alone = lakewarden("cleanup", place, "--keep", 2, "--json")
    assert alone.rows[0]["kept_unknown_kind"] == len(STRANGE_NAMES)


def test_what_is_from_the_future_stays(fleet: Fleet) -> None:
    place = fleet.root / "in_the_future.lance"
    row = fleet.row("in_the_future")
    assert row["error"] is None
    assert versions_of(place) == [1, 2, 5, 6]
    assert first_ids(place, [1, 2, 5, 6]) == [0, 5, 20, 25]
    assert row["kept_unknown_age"] == 1
    assert (place / "data" / f"{'01' * 12}.lance").exists()
    alone = lakewarden("cleanup", place, "--keep", 2)
    assert [line.split()[0] for line in alone.stdout.splitlines() if "age unknown" in line] == [
        "v2",
        "v1",
    ]
    assert "keep     1 file of unknown age" in alone.stdout


def test_what_cannot_be_deleted_is_counted_and_a_rerun_finishes(fleet: Fleet) -> None:
    if not fleet.is_read_only:
        pytest.skip("root may write anywhere here, and chattr +i does not work")
    place = fleet.root / "read_only.lance"
    row = fleet.row("read_only")
    assert row["failed_deletes"] == 4
    assert row["error_kind"] == "storage"
    assert "run again" in row["error"]
    # Manifests wait for their files, or a rerun would not know whose those were.
    assert row["manifest_files_removed"] == 0
    assert versions_of(place) == [1, 2, 3, 4, 5, 6]
    assert first_ids(place, [1, 2, 3, 4, 5, 6]) == [0, 5, 10, 15, 20, 25]
    again = lakewarden("cleanup", place, "--keep", 2, "--confirm", "--json")
    assert again.code == 0
    assert versions_of(place) == [5, 6]


def test_a_second_run_over_the_fleet_has_nothing_left_to_do(fleet: Fleet) -> None:
    places = [fleet.root / f"{maker.__name__}.lance" for maker in CLEANABLE]
    again = lakewarden("cleanup", *places, "--keep", 2, "--json")
    assert again.code == 0
    assert again.document["total"]["manifest_files_removed"] == 0
    assert again.document["total"]["data_files_removed"] == 0


# -- one bad target alone --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "maker", [nothing_there, a_directory, a_file, corrupt_head], ids=lambda maker: maker.__name__
)
def test_alone_it_is_exit_1_and_nothing_on_stdout(
    maker: Callable[[Path], None], tmp_path: Path, spark: object
) -> None:
    place = tmp_path / "t.lance"
    maker(place)
    outcome = lakewarden("cleanup", place, "--keep", 2, "--confirm")
    assert outcome.code == 1
    assert UNTOUCHABLE[maker][1] in outcome.error
    assert outcome.stdout == ""


@pytest.mark.parametrize("case", ["missing", "no tables", "empty", "file"])
def test_a_directory_without_tables_is_an_error(case: str, tmp_path: Path, spark: object) -> None:
    place = tmp_path / "lake"
    match case:
        case "no tables":
            a_directory(place)
        case "empty":
            place.mkdir()
        case "file":
            a_file(place)
        case _:
            pass
    before = _contents(place) if place.exists() else {}
    outcome = lakewarden("cleanup", place, "--recursive", "--keep", 2, "--confirm")
    assert outcome.code == 1
    assert str(place) in outcome.error
    assert (_contents(place) if place.exists() else {}) == before


# -- places ----------------------------------------------------------------------------------------


def test_one_table_in_many_spellings_is_cleaned_once(
    tmp_path: Path, spark: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "täble #1 100%.lance"
    make_table(place)
    (tmp_path / "link").symlink_to(place)
    monkeypatch.chdir(tmp_path)
    spellings = (
        place,
        f"{place}/",
        f"{tmp_path}//./{place.name}",
        place.name,
        "link",
        f"file://{tmp_path}/t%C3%A4ble%20%231%20100%25.lance",
    )
    outcome = lakewarden("cleanup", *spellings, "--keep", 2, "--confirm", "--json")
    assert outcome.code == 0
    assert [row["table_key"] for row in outcome.rows] == [str(place)]
    assert versions_of(place) == [5, 6]


def test_a_place_inside_another_table_is_refused_and_others_go_on(
    tmp_path: Path, spark: object
) -> None:
    outer, branchy, other = (tmp_path / name for name in ("outer", "branchy", "branchy_backup"))
    make_table(outer)
    make_table(outer / "data" / "inner.lance")
    branch = make_table(branchy).create_branch("experiment", 2)
    lance.write_dataset(rows(1000), branch, mode="append")
    make_table(other)
    before = contents(outer), contents(branchy)
    targets = (outer / "data" / "inner.lance", branchy / "tree" / "experiment", other)
    outcome = lakewarden("cleanup", *targets, "--keep", 1, "--confirm", "--json")
    assert outcome.code == 3
    assert [row["error_kind"] for row in outcome.rows] == ["location_overlap"] * 2 + [None]
    assert (contents(outer), contents(branchy)) == before
    assert versions_of(other) == [6]


@pytest.mark.parametrize("extra", [(), ("--recursive",)], ids=["tables", "directories"])
def test_nested_targets_are_refused_whole(
    extra: tuple[str, ...], tmp_path: Path, spark: object
) -> None:
    make_table(tmp_path / "lake" / "t.lance")
    before = contents(tmp_path)
    outcome = lakewarden(
        "cleanup",
        tmp_path / "lake" / "t.lance",
        tmp_path / "lake",
        "--keep",
        1,
        "--confirm",
        *extra,
    )
    assert outcome.code == 1
    assert "lies inside" in outcome.error
    assert contents(tmp_path) == before


# -- numbers ---------------------------------------------------------------------------------------

HUGE = str(10**30)
BAD_NUMBERS: dict[str, tuple[str, ...]] = {
    "--keep": ("0", "-1", HUGE, "1.5", "", "nan"),
    "--before-version": ("0", "-3", HUGE, "x"),
    "--versions": ("0", "-1", HUGE, "", ",", "3,,4", "1-5", "3.0"),
    "--older-than": ("-1d", f"{HUGE}d", "14", "", "d", "1.5h", "14 fortnights", "nan"),
    "--min-age": ("-1h", f"{HUGE}s", "1", ""),
    "--unverified-after": ("-1d", f"{HUGE}d", "soon"),
    "--rate-limit": ("0", "-1", "nan", "inf", "-inf", "fast"),
    "--max-delete-files": ("-1", "1.5", "nan"),
    "--max-delete-bytes": ("-1", "1GB"),
    "--max-delete-share": ("-0.1", "1.1", "nan", "inf", "50%"),
    "--conf": ("lakewarden.tasks=0", "lakewarden.tasks=-1", f"lakewarden.tasks={HUGE}"),
}


@pytest.mark.parametrize(
    ("option", "value"),
    [(option, value) for option, values in BAD_NUMBERS.items() for value in values],
)
def test_absurd_numbers_are_refused_before_anything_is_read(
    option: str, value: str, tmp_path: Path
) -> None:
    rule = () if option in ("--keep", "--versions", "--older-than") else ("--keep", "2")
    outcome = lakewarden("cleanup", tmp_path / "t.lance", *rule, f"{option}={value}", "--confirm")
    assert outcome.code == 2
    assert (
        option.removeprefix("--") in outcome.error
        or "duration" in outcome.error
        or ("years" in outcome.error)
    )
    assert "stage " not in outcome.stderr


@pytest.mark.parametrize("value", ["-1", "x", "1.5"])
def test_absurd_limits_are_refused(value: str, tmp_path: Path) -> None:
    outcome = lakewarden("versions", tmp_path, f"--limit={value}")
    assert outcome.code == 2
    assert "--limit" in outcome.error


@pytest.mark.parametrize(
    "setting",
    [
        "client_max_retries=-1",
        f"client_max_retries={HUGE}",
        "client_max_retries=x",
        "client_retry_timeout=-1",
        "client_retry_timeout=nan",
        "client_retry_timeout=inf",
        f"client_retry_timeout={HUGE}",
        "timeout=-1s",
        "timeout=soon",
        "allow_http=perhaps",
        "no_such_option=1",
    ],
)
def test_absurd_storage_options_are_refused(setting: str, s3: S3Server) -> None:
    outcome = lakewarden(
        "versions", "s3://bucket/t.lance", *_reach(s3), "--storage-option", setting
    )
    assert outcome.code == 2
    assert any(word in outcome.error for word in setting.split("="))


def test_large_numbers_are_no_reason_to_fail(tmp_path: Path, spark: object) -> None:
    place = tmp_path / "t.lance"
    make_table(place)
    outcome = lakewarden(
        "cleanup", place, "--keep", 2**63 - 1, "--before-version", 2**63 - 1, "--versions",
        f"1,{2**63 - 1}", "--older-than", "36500d", "--min-age", "36500d", "--unverified-after",
        "36500d", "--max-delete-files", HUGE, "--max-delete-bytes", HUGE, "--rate-limit", "1e300",
        "--confirm",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    assert "removed  nothing" in outcome.stdout
    assert versions_of(place) == [1, 2, 3, 4, 5, 6]


# -- object stores ---------------------------------------------------------------------------------


def _reach(s3: S3Server, **changes: str) -> tuple[str, ...]:
    options = s3.options | changes
    return tuple(
        word for name, value in options.items() for word in ("--storage-option", f"{name}={value}")
    )


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    s3.create_bucket("bad-input")
    for step in range(4):
        lance.write_dataset(
            pa.table({"id": [step]}),
            "s3://bad-input/t.lance",
            mode="overwrite" if step else "create",
            storage_options=s3.options,
        )
    return "s3://bad-input"


@pytest.mark.s3
@pytest.mark.parametrize("command", ["versions", "refs", "cleanup"])
@pytest.mark.parametrize("case", ["wrong key", "missing bucket", "missing table"])
def test_a_store_that_says_no_is_one_line(
    command: str, case: str, s3: S3Server, bucket: str, spark: object
) -> None:
    target, options = f"{bucket}/t.lance", _reach(s3)
    words: tuple[str, ...] = ("access", "credentials")
    match case:
        case "wrong key":
            options = _reach(s3, aws_access_key_id="WRONG")
        case "missing bucket":
            target, words = "s3://no-such-bucket/t.lance", ("no-such-bucket",)
        case _:
            target, words = f"{bucket}/nothing.lance", ("does not exist",)
    rule = ("--keep", "1", "--confirm", "--yes") if command == "cleanup" else ()
    started = time.perf_counter()
    outcome = lakewarden(command, target, *rule, *options)
    assert outcome.code == 1
    assert any(word in outcome.error.lower() for word in words), outcome.error
    assert "WRONG" not in outcome.stderr
    assert "lakewarden-test-secret" not in outcome.stderr + outcome.stdout
    assert outcome.stdout == ""
    assert time.perf_counter() - started < 30


@pytest.mark.s3
def test_a_missing_bucket_harms_no_other_table(s3: S3Server, bucket: str, spark: object) -> None:
    outcome = lakewarden(
        "cleanup", "s3://no-such-bucket/t.lance", f"{bucket}/t.lance", "--keep", 2, "--min-age",
        "0s", "--confirm", "--yes", "--json", *_reach(s3),
    )  # fmt: skip
    assert outcome.code == 3, outcome
    by_key = {row["table_key"]: row for row in outcome.rows}
    assert by_key["s3://no-such-bucket/t.lance"]["error_kind"] in ("not_found", "storage")
    assert by_key[f"{bucket}/t.lance"]["old_versions_removed"] == 2
    left = lance.dataset(f"{bucket}/t.lance", storage_options=s3.options)
    assert [entry["version"] for entry in left.versions()] == [3, 4]
    assert left.checkout_version(3).to_table()["id"].to_pylist() == [2]
