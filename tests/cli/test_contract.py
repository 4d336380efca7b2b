"""What scripts and people may rely on: preview, consent, streams, JSON, exit codes, plans."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow.parquet as pq
import pytest
import typer.main

from lakewarden.cli.main import app
from tests.cli.small import (
    HOUR,
    age,
    contents,
    first_ids,
    make_table,
    manifest,
    rows,
    versions_of,
)
from tests.cli.terminal import lakewarden

pytestmark = pytest.mark.spark

#: Nobody listens on port 1; a request there takes many retries to fail.
NOWHERE = ("--storage-option", "aws_endpoint=http://127.0.0.1:1")
#: The names of a row in `--json`, of the design's section 6.
ROW_NAMES = {
    "table_key", "old_versions_removed", "bytes_removed", "data_files_removed",
    "deletion_files_removed", "index_files_removed", "transaction_files_removed",
    "manifest_files_removed", "kept_unverified", "kept_unknown_age", "failed_deletes", "requests",
    "skipped", "error",
}  # fmt: skip


@pytest.fixture
def table(tmp_path: Path, spark: object) -> Path:
    """Six versions, thirty days old."""
    place = tmp_path / "t.lance"
    make_table(place)
    return place


def saved_plan(table: Path, *rules: object) -> Path:
    plan = table.parent / "plan"
    outcome = lakewarden("cleanup", table, *(rules or ("--keep", 2)), "--save-plan", plan)
    assert outcome.code == 0, outcome
    return plan


# -- preview and confirm ---------------------------------------------------------------------------


def test_preview_is_the_default_and_changes_nothing(table: Path) -> None:
    lance.dataset(str(table)).tags.create("release", 2)
    before = contents(table)
    outcome = lakewarden("cleanup", table, "--keep", 2, "--on-tagged", "keep")
    assert outcome.code == 0
    assert contents(table) == before
    said = outcome.stdout.splitlines()
    assert said[0].startswith("policy   remove versions beyond the last 2")
    assert "keep     3 of 6 versions" in said
    reasons = {line.split()[0]: line for line in said if line.startswith("  v")}
    assert set(reasons) == {"v6", "v5", "v2"}
    assert reasons["v6"].endswith("head; last 2")
    assert reasons["v2"].endswith("tag release")
    assert any(line.startswith("remove   3 versions, 9 files, ") for line in said)
    assert "  data 3   transactions 3   manifests 3" in said
    assert said[-1] == "preview: nothing was changed; add --confirm to remove"


def test_confirm_removes_what_the_preview_named(table: Path) -> None:
    preview = lakewarden("cleanup", table, "--keep", 2, "--json")
    outcome = lakewarden("cleanup", table, "--keep", 2, "--confirm", "--json")
    assert (preview.code, outcome.code) == (0, 0)
    assert preview.document["message_type"] == "cleanup_plan"
    assert outcome.document["message_type"] == "cleanup_receipt"
    assert outcome.document["total"] == preview.document["total"]
    assert outcome.document["total"]["old_versions_removed"] == 4
    assert versions_of(table) == [5, 6]
    assert first_ids(table, [5, 6]) == [20, 25]
    assert len(list((table / "data").iterdir())) == 2


def test_confirm_in_text_shows_the_plan_and_then_the_receipt(table: Path) -> None:
    outcome = lakewarden("cleanup", table, "--keep", 2, "--confirm")
    said = outcome.stdout
    assert outcome.code == 0
    assert said.index("\nremove   4 versions, 12 files") < said.index("\nremoved  4 versions, 12 ")
    assert "preview" not in said


def test_writers_margin_is_on_by_default(table: Path) -> None:
    age(table, 0)  # a file a minute: the whole history is younger than an hour
    outcome = lakewarden("cleanup", table, "--keep", 1, "--json")
    assert outcome.rows[0]["old_versions_removed"] == 0
    assert {row["version"] for row in outcome.document["kept_versions"]} == {1, 2, 3, 4, 5, 6}
    assert "a writer may still build on it" in outcome.document["kept_versions"][-1]["reasons"]


def test_orphans_go_by_age_and_every_version_stays(table: Path) -> None:
    orphan, fresh = table / "data" / f"{'0' * 24}.lance", table / "data" / f"{'1' * 24}.lance"
    orphan.write_bytes(b"left over")
    age(table, 20 * 24 * HOUR)
    fresh.write_bytes(b"being written")
    preview = lakewarden("remove-orphans", table, "--json")
    assert preview.document["message_type"] == "remove-orphans_plan"
    assert orphan.exists()
    outcome = lakewarden("remove-orphans", table, "--confirm", "--json")
    assert outcome.code == 0
    assert (orphan.exists(), fresh.exists()) == (False, True)
    assert outcome.rows[0]["data_files_removed"] == 1
    assert outcome.rows[0]["kept_unverified"] == 1
    assert versions_of(table) == [1, 2, 3, 4, 5, 6]


def test_orphans_below_the_floor_are_refused(table: Path) -> None:
    outcome = lakewarden("remove-orphans", table, "--older-than", "23h", "--confirm")
    assert outcome.code == 1
    assert "--unsafe-below-floor" in outcome.error


# -- consent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(), ("--json",), ("--quiet",)])
def test_no_consent_no_touch(extra: tuple[str, ...]) -> None:
    started = time.perf_counter()
    outcome = lakewarden(
        "cleanup", "s3://bucket/t.lance", "--keep", 2, "--confirm", *NOWHERE, *extra
    )
    # A single request to nobody would be retried for much longer than this.
    assert time.perf_counter() - started < 2
    assert outcome.code == 1
    assert "--yes" in outcome.error
    assert "stage " not in outcome.stderr
    if "--json" in extra:
        assert outcome.document["kind"] == "consent"


@pytest.mark.parametrize("command", ["cleanup", "remove-orphans"])
def test_json_never_asks_even_at_a_terminal(command: str) -> None:
    rules = ("--keep", "2") if command == "cleanup" else ()
    outcome = lakewarden(command, "gs://bucket/t.lance", *rules, "--confirm", "--json", typed="y\n")
    assert (outcome.code, outcome.document["kind"]) == (1, "consent")


def test_a_person_may_say_no(spark: object) -> None:
    outcome = lakewarden(
        "cleanup", "s3://bucket/t.lance", "--keep", 2, "--confirm", *NOWHERE, typed="n\n"
    )
    assert outcome.code == 1
    assert "Delete from a store that is not local" in outcome.stderr
    assert "stage " not in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_apply_asks_for_consent_too(table: Path) -> None:
    plan = saved_plan(table)
    header = json.loads((plan / "plan.json").read_text())
    header["roots"][0]["location"] = "s3://bucket/t.lance"
    (plan / "plan.json").write_text(json.dumps(header))
    outcome = lakewarden("apply", plan, "--confirm", *NOWHERE)
    assert outcome.code == 1
    assert "--yes" in outcome.error
    assert "stage " not in outcome.stderr


# -- streams ---------------------------------------------------------------------------------------


def test_the_resolved_target_is_echoed_first_on_stderr(table: Path) -> None:
    spelled = f"{table.parent}/./x/../{table.name}/"
    outcome = lakewarden("cleanup", spelled, "--keep", 9)
    first = outcome.stderr.splitlines()[0]
    assert first.startswith(f"target   {table} (local disk; local Spark")
    quiet = lakewarden("cleanup", spelled, "--keep", 9, "--quiet")
    assert "target" not in quiet.stderr
    assert str(quiet.stdout).splitlines()[:-2] == outcome.stdout.splitlines()[:-2]


def test_apply_echoes_its_targets(table: Path) -> None:
    plan = saved_plan(table)
    assert f"target   {table}" in lakewarden("apply", plan).stderr
    assert f"target   {table}" not in lakewarden("apply", plan, "--quiet").stderr


def test_json_rows_carry_the_documented_names(table: Path) -> None:
    for extra in ((), ("--confirm",)):
        outcome = lakewarden("cleanup", table, "--keep", 2, "--json", *extra)
        (row,) = outcome.rows
        assert row.keys() >= ROW_NAMES
        assert row["table_key"] == str(table)
        assert row["old_versions_removed"] == row["manifest_files_removed"] == 4
        assert row["data_files_removed"] == row["transaction_files_removed"] == 4
        assert row["bytes_removed"] > 0
        assert row["requests"]["LIST"] >= 1
        assert (row["error"], row["skipped"], row["failed_deletes"]) == (None, None, 0)


def test_json_of_a_usage_error_is_a_document_too(spark: object) -> None:
    outcome = lakewarden("cleanup", "/nowhere", "--json")
    assert outcome.code == 2
    assert outcome.document["message_type"] == "error"
    assert outcome.document["kind"] == "empty_policy"
    assert outcome.document["exit_code"] == 2
    assert outcome.document["message"] == outcome.error


# -- usage -----------------------------------------------------------------------------------------

WRONG_USAGE: dict[str, tuple[Any, ...]] = {
    "no rule": ("cleanup", "/t"),
    "no target": ("cleanup", "--keep", 3),
    "no command": ("vacuum", "/t"),
    "no option": ("cleanup", "/t", "--keep", 3, "--force"),
    "no number": ("cleanup", "/t", "--keep", "many"),
    "no duration": ("cleanup", "/t", "--older-than", "soon"),
    "no choice": ("cleanup", "/t", "--keep", 3, "--on-tagged", "perhaps"),
    "no version list": ("cleanup", "/t", "--versions", "3;4"),
    "no pair": ("cleanup", "/t", "--keep", 3, "--storage-option", "aws_region"),
    "web address": ("cleanup", "https://example.com/t.lance", "--keep", 3),
    "plain web address": ("remove-orphans", "http://example.com/t.lance"),
    "server": ("cleanup", "/t", "--keep", 3, "--server", "http://localhost:8181"),
    "orphans on a server": ("remove-orphans", "/t", "--server", "http://localhost:8181"),
    "unknown scheme": ("cleanup", "hdfs://host/t.lance", "--keep", 3),
    "versions of an unknown scheme": ("versions", "ftp://host/t.lance"),
    "two engines": (
        "cleanup", "/t", "--keep", 3, "--master", "local[1]", "--remote", "sc://localhost",
    ),
    "no tasks": ("cleanup", "/t", "--keep", 3, "--conf", "lakewarden.tasks=many"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_USAGE)
@pytest.mark.parametrize("extra", [(), ("--json",)], ids=["text", "json"])
def test_wrong_usage_is_one_line_and_exit_2(
    case: str, extra: tuple[str, ...], spark: object
) -> None:
    if extra and case == "no command":
        pytest.skip("options come after a command")
    outcome = lakewarden(*WRONG_USAGE[case], *extra)
    assert outcome.code == 2
    assert len(outcome.error) > 10
    if extra:
        assert outcome.document["exit_code"] == 2
        assert outcome.document["message"] == outcome.error
    else:
        assert outcome.stdout == ""


def test_a_rule_that_is_missing_is_named(spark: object) -> None:
    said = lakewarden("cleanup", "/t").error
    assert all(
        rule in said for rule in ("--keep", "--older-than", "--before-version", "--versions")
    )


# -- exit codes of fleets --------------------------------------------------------------------------


def test_one_bad_table_of_a_fleet_is_exit_3_and_the_rest_is_done(table: Path) -> None:
    missing = table.parent / "missing.lance"
    preview = lakewarden("cleanup", table, missing, "--keep", 2)
    assert preview.code == 3
    assert str(missing) in preview.error
    outcome = lakewarden("cleanup", table, missing, "--keep", 2, "--confirm", "--json")
    assert outcome.code == 3
    by_key = {row["table_key"]: row for row in outcome.rows}
    assert by_key[str(missing)]["error_kind"] == "not_found"
    assert by_key[str(table)]["error"] is None
    assert versions_of(table) == [5, 6]


def test_a_tagged_version_that_would_go_stops_the_table(table: Path) -> None:
    lance.dataset(str(table)).tags.create("release", 2)
    before = contents(table)
    outcome = lakewarden("cleanup", table, "--keep", 2, "--confirm")
    assert outcome.code == 1
    assert "tag release" in outcome.error
    assert "--on-tagged keep" in outcome.error
    assert contents(table) == before
    kept = lakewarden("cleanup", table, "--keep", 2, "--confirm", "--on-tagged", "keep")
    assert kept.code == 0
    assert versions_of(table) == [2, 5, 6]
    assert first_ids(table, [2]) == [5]


# -- saved plans -----------------------------------------------------------------------------------


def test_apply_executes_exactly_the_saved_plan(table: Path) -> None:
    plan = saved_plan(table)
    # Meanwhile the table moves on; with the same rules a new plan would now remove more.
    lance.write_dataset(rows(100), str(table), mode="overwrite")
    planned = {str(name) for name in pq.read_table(plan / "files")["path"].to_pylist()}
    before = contents(table)
    shown = lakewarden("apply", plan)
    assert shown.code == 0
    assert "preview: nothing was changed" in shown.stdout
    assert contents(table) == before
    outcome = lakewarden("apply", plan, "--confirm", "--json")
    assert outcome.code == 0, outcome
    assert before.keys() - contents(table).keys() == planned
    assert len(planned) == 12
    assert outcome.rows[0]["old_versions_removed"] == 4
    assert versions_of(table) == [5, 6, 7]

    again = lakewarden("apply", plan, "--confirm", "--json")
    assert again.code == 0, again
    assert again.document["total"]["old_versions_removed"] == 0
    assert versions_of(table) == [5, 6, 7]


def test_saving_a_plan_changes_nothing_and_needs_an_empty_directory(table: Path) -> None:
    before = contents(table)
    plan = saved_plan(table)
    assert contents(table) == before
    outcome = lakewarden("cleanup", table, "--keep", 2, "--save-plan", plan)
    assert outcome.code == 2
    assert "not empty" in outcome.error


CHANGES: dict[str, Callable[[Any], object]] = {
    "tag": lambda dataset: dataset.tags.create("release", 2),
    "tag on a kept version": lambda dataset: dataset.tags.create("release", 6),
    "restore": lambda dataset: dataset.checkout_version(3).restore(),
    "branch": lambda dataset: dataset.create_branch("experiment", 2),
}


@pytest.mark.nightly
def test_apply_refuses_a_table_that_changed(table: Path) -> None:
    plan = saved_plan(table)
    CHANGES["tag"](lance.dataset(str(table)))
    before = contents(table)
    outcome = lakewarden("apply", plan, "--confirm")
    assert outcome.code == 4
    assert "nothing of this table was deleted: plan it again" in outcome.error
    assert contents(table) == before


def test_apply_refuses_what_changed_and_goes_on_with_the_rest(table: Path) -> None:
    changed = {change: table.parent / f"{change}.lance" for change in CHANGES}
    for place in changed.values():
        make_table(place)
    plan = table.parent / "plan"
    lakewarden("cleanup", table, *changed.values(), "--keep", 2, "--save-plan", plan)
    for change, place in changed.items():
        CHANGES[change](lance.dataset(str(place)))
    before = {place: contents(place) for place in changed.values()}
    outcome = lakewarden("apply", plan, "--confirm", "--json")
    assert outcome.code == 4
    by_key = {row["table_key"]: row for row in outcome.rows}
    for place in changed.values():
        assert by_key[str(place)]["error_kind"] == "plan_outdated", place
        assert contents(place) == before[place]
    assert by_key[str(table)]["error"] is None
    assert versions_of(table) == [5, 6]


@pytest.mark.nightly
def test_cleanup_plans_again_by_itself_when_the_table_changed_under_it(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lakewarden.maintenance import removal

    execute = removal.execute
    tagged: list[Any] = []

    def late(*arguments: Any, **options: Any) -> Any:
        if not tagged:
            tagged.append(lance.dataset(str(table)).tags.create("release", 2))
        return execute(*arguments, **options)

    monkeypatch.setattr(removal, "execute", late)
    outcome = lakewarden("cleanup", table, "--keep", 2, "--on-tagged", "keep", "--confirm")
    assert outcome.code == 0, outcome
    assert versions_of(table) == [2, 5, 6]
    assert first_ids(table, [2, 5, 6]) == [5, 20, 25]


GARBAGE = {
    "empty": {},
    "no json": {"plan.json": "{"},
    "no plan": {"plan.json": "{}"},
    "a list": {"plan.json": "[]"},
    "a number": {"plan.json": "7"},
    "binary": {"plan.json": "\x00\x01"},
    "another format": {"plan.json": '{"format": 99}'},
    "no frames": {"plan.json": '{"format": 1, "roots": []}'},
}


@pytest.mark.parametrize("case", GARBAGE)
def test_apply_of_garbage_says_so(case: str, tmp_path: Path, spark: object) -> None:
    for name, text in GARBAGE[case].items():
        (tmp_path / name).write_text(text)
    outcome = lakewarden("apply", tmp_path, "--confirm")
    assert outcome.code == 2
    assert "plan" in outcome.error


def test_apply_of_a_plan_that_lost_its_frames_says_so(table: Path) -> None:
    plan = saved_plan(table)
    shutil.rmtree(plan / "files")
    before = contents(table)
    outcome = lakewarden("apply", plan, "--confirm")
    assert outcome.code == 2
    assert "no whole plan" in outcome.error
    assert contents(table) == before


def test_apply_of_a_plan_with_broken_frames_says_so(table: Path) -> None:
    plan = saved_plan(table)
    for part in (plan / "files").glob("*.parquet"):
        part.write_bytes(b"PAR1 but not really")
    before = contents(table)
    outcome = lakewarden("apply", plan, "--confirm")
    assert outcome.code in (1, 2)
    assert "plan" in outcome.error
    assert contents(table) == before


def test_a_plan_directory_may_have_a_strange_name(table: Path) -> None:
    plan = table.parent / "plan #1 100%25 ü"
    saved = lakewarden("cleanup", table, "--keep", 2, "--save-plan", plan)
    assert saved.code == 0, saved
    assert (plan / "files").is_dir()
    outcome = lakewarden("apply", plan, "--confirm")
    assert outcome.code == 0, outcome
    assert versions_of(table) == [5, 6]


def test_a_plan_that_cannot_be_saved_is_one_line(table: Path) -> None:
    (table.parent / "file").write_text("in the way")
    outcome = lakewarden("cleanup", table, "--keep", 2, "--save-plan", table.parent / "file" / "x")
    assert outcome.code in (1, 2)
    assert str(table.parent / "file") in outcome.error


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_breakers_stop_a_plan_that_is_too_large(table: Path) -> None:
    before = contents(table)
    for option, tight in (
        ("--max-delete-files", 11),
        ("--max-delete-bytes", 100),
        ("--max-delete-share", 0.5),
    ):
        outcome = lakewarden("cleanup", table, "--keep", 2, "--confirm", option, tight)
        assert outcome.code == 1
        assert option in outcome.error
    assert contents(table) == before
    wide = ("--max-delete-files", 12, "--max-delete-bytes", 10**6, "--max-delete-share", 0.7)
    assert lakewarden("cleanup", table, "--keep", 2, "--confirm", *wide).code == 0
    assert versions_of(table) == [5, 6]


def test_breakers_stop_a_saved_plan_too(table: Path) -> None:
    plan = saved_plan(table)
    before = contents(table)
    outcome = lakewarden("apply", plan, "--confirm", "--max-delete-files", 3)
    assert outcome.code == 1
    assert contents(table) == before


def test_rate_limit_slows_deletion_and_all_of_it_happens(table: Path) -> None:
    started = time.perf_counter()
    outcome = lakewarden("cleanup", table, "--keep", 2, "--confirm", "--rate-limit", 4, "--json")
    elapsed = time.perf_counter() - started
    assert outcome.code == 0
    assert versions_of(table) == [5, 6]
    # Eight files and four manifests at four a second; the first of each kind need not wait.
    assert elapsed > 1.0
    assert outcome.document["seconds"]["delete"] > 1.0


# -- looking ---------------------------------------------------------------------------------------


def test_versions_as_text_and_as_json(table: Path) -> None:
    dataset = lance.dataset(str(table))
    dataset.tags.create("release", 2)
    dataset.create_branch("experiment", 3)
    before = contents(table)
    text = lakewarden("versions", table, "--limit", 3)
    assert text.code == 0
    lines = text.stdout.splitlines()
    # The newest first, on whichever branch; the branch was made last.
    assert [line.split()[0] for line in lines[1:4]] == ["v3@experiment", "v6", "v5"]
    assert lines[4].startswith("… and ")
    everything = lakewarden("versions", table, "--limit", 0).stdout
    assert "tag release" in next(line for line in everything.splitlines() if line.startswith("v2 "))
    assert "branch experiment starts here" in next(
        line for line in everything.splitlines() if line.startswith("v3 ")
    )
    found = lakewarden("versions", table, "--json", "--limit", 0).document
    assert found["message_type"] == "versions"
    assert found["table_key"] == str(table)
    main = [row for row in found["versions"] if row["branch"] == "main"]
    assert [row["version"] for row in main] == [6, 5, 4, 3, 2, 1]
    assert main[4]["held_by"] == ["tag release"]
    assert contents(table) == before


def test_limit_means_the_same_in_json(table: Path) -> None:
    found = lakewarden("versions", table, "--json", "--limit", 2).document
    assert [row["version"] for row in found["versions"]] == [6, 5]


def test_refs_as_text_and_as_json(table: Path) -> None:
    assert lakewarden("refs", table).stdout == "no tags and no branches\n"
    dataset = lance.dataset(str(table))
    dataset.tags.create("release", 2)
    dataset.create_branch("experiment", 3)
    text = lakewarden("refs", table).stdout.splitlines()
    assert [line.split() for line in text] == [
        ["tag", "release", "v2"],
        ["branch", "experiment", "from", "v3"],
    ]
    found = lakewarden("refs", table, "--json").document
    assert found["message_type"] == "refs"
    assert found["tags"] == [{"name": "release", "branch": "main", "version": 2}]
    assert found["branches"] == [{"name": "experiment", "parent": "main", "parent_version": 3}]


@pytest.mark.parametrize("command", ["versions", "refs"])
@pytest.mark.parametrize("extra", [(), ("--json",)], ids=["text", "json"])
def test_looking_at_nothing_is_one_line(
    command: str, extra: tuple[str, ...], tmp_path: Path
) -> None:
    missing = lakewarden(command, tmp_path / "missing", *extra)
    assert missing.code == 1
    assert "does not exist" in missing.error
    (tmp_path / "file.txt").write_text("no table")
    other = lakewarden(command, tmp_path, *extra)
    assert other.code == 1
    assert "no Lance table" in other.error
    if extra:
        assert (missing.document["kind"], other.document["kind"]) == ("not_found", "not_a_table")


def test_looking_does_not_open_manifests(table: Path) -> None:
    manifest(table, 3).write_bytes(b"broken")
    assert lakewarden("versions", table).code == 0


# -- help ------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, command in typer.main.get_group(app).commands.items():
        inner = getattr(command, "commands", None)
        found += [(name, below) for below in inner] if inner else [(name,)]
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_explains_and_shows_an_example(command: tuple[str, ...]) -> None:
    outcome = lakewarden(*command, "--help")
    assert outcome.code == 0
    assert outcome.stderr == ""
    assert "Example" in outcome.stdout
    assert f"lakewarden {' '.join(command)}" in outcome.stdout.split("Example", 1)[1]


def test_storage_validate_says_which_guarantees_hold(tmp_path: Path) -> None:
    outcome = lakewarden("storage", "validate", tmp_path)
    assert outcome.code == 0
    assert outcome.stdout.splitlines()[-1] == "all guarantees hold"
    assert list(tmp_path.rglob("*")) == [], "it cleans up after itself"
    checks = lakewarden("storage", "validate", tmp_path, "--json").document["checks"]
    assert all(check["ok"] for check in checks)
    assert len(checks) > 5
