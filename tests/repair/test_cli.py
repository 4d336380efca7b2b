"""`lakewarden repair`: what it says, as text and as JSON, and how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pytest
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

from lakewarden.errors import Exit
from lakewarden.warehouse.lance import Namespace
from tests.cli.terminal import Outcome, lakewarden
from tests.repair.mending import append, compact
from tests.warehouse.cleaning import Lake
from tests.warehouse.lakes import IDS, id_rows, lance_ids, reopen, write

pytestmark = pytest.mark.spark

ROW = {
    "table_key", "branch", "format", "manifest_version", "lance_head_version", "classification",
    "action", "operations", "doubts", "rows_at_pin", "rows_at_head", "pin", "error", "error_kind",
}  # fmt: skip
FINDING = {
    "kind", "table_key", "files", "examples", "versions", "versions_count", "refs", "refs_count",
    "quarantined", "means", "next",
}  # fmt: skip


def repair(lake: Lake, *options: str) -> Outcome:
    return lakewarden("repair", lake.root, *options)


def row(outcome: Outcome, key: str = "db.t") -> dict[str, Any]:
    (found,) = (one for one in outcome.rows if one["table_key"] == key)
    return found


# -- refused before anything is looked at ----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--force"], "--force goes with --confirm"),
        (["--force", "--to-pin", "--confirm"], "choose one"),
        (["--server", "http://x"], "direct storage access"),
    ],
)
def test_options_that_make_no_sense_are_refused(lake: Lake, options: list[str], said: str) -> None:
    outcome = repair(lake, *options)
    assert outcome.code == Exit.USAGE
    assert said in outcome.error
    assert outcome.stdout == ""


def test_a_store_that_is_not_local_needs_consent() -> None:
    outcome = lakewarden("repair", "s3://bucket/lake", "--confirm", "--json")
    assert outcome.code == Exit.REFUSED
    assert outcome.document["kind"] == "consent"


def test_a_table_of_its_own_has_no_pin(tmp_path: Path) -> None:
    place = tmp_path / "t.lance"
    lance.write_dataset(id_rows(1), str(place))
    for option in ("--confirm", "--to-pin"):
        outcome = lakewarden("repair", place, option)
        assert outcome.code == Exit.USAGE
        assert "is no warehouse" in outcome.error


def test_what_is_not_there_is_told(tmp_path: Path, spark: SparkSession) -> None:
    outcome = lakewarden("repair", tmp_path / "none")
    assert outcome.code == Exit.REFUSED
    assert "does not exist" in outcome.error


def test_a_table_that_is_not_there_is_told(lake: Lake, spark: SparkSession) -> None:
    outcome = repair(lake, "--table", "db.none")
    assert outcome.code == Exit.REFUSED
    assert "no table of" in outcome.error


# -- drift -----------------------------------------------------------------------------------------


def test_a_preview_says_what_happened_and_what_to_do(lake: Lake, spark: SparkSession) -> None:
    compact(lake.place("t"))
    append(lake.place("other"), 66)
    outcome = repair(lake)
    assert outcome.code == Exit.DONE
    assert outcome.errors == []
    lines = outcome.stdout.splitlines()
    assert lines[0] == "drift    2 of 2 tables"
    assert "  db.other   pin 3, head 4   suspicious   preview" in lines
    assert "    rows         3 at the pin, 4 now" in lines
    assert "  db.t   pin 3, head 5   verified_maintenance   preview" in lines
    assert "    operations   reserve_fragments, rewrite" in lines
    assert "damage   none" in lines
    assert lines[-1].startswith("preview: nothing was changed; ")
    assert f"lakewarden repair {lake.root} --confirm" in lines[-1]
    assert "--to-pin --confirm" in lines[-1]


def test_refused_tables_end_it_after_everything_was_told(lake: Lake, spark: SparkSession) -> None:
    compact(lake.place("t"))
    append(lake.place("other"), 66)
    outcome = repair(lake, "--confirm", "--json")
    assert outcome.code == Exit.REFUSED
    assert "1 table not published (db.other)" in outcome.error
    told = outcome.document
    newest = reopen(lake.root).known.version
    assert (told["message_type"], told["uri"]) == ("repair", str(lake.root))
    assert (told["confirm"], told["force"], told["to_pin"]) == (True, False, False)
    assert (told["manifest_version"], told["damage"], told["error"]) == (newest, [], None)
    assert all(set(one) == ROW for one in outcome.rows)
    assert row(outcome)["action"] == "healed"
    assert row(outcome)["pin"] == 5
    refused = row(outcome, "db.other")
    assert (refused["classification"], refused["action"]) == ("suspicious", "refused")
    assert (refused["manifest_version"], refused["lance_head_version"]) == (3, 4)
    assert refused["operations"] == ["append"]
    forced = repair(lake, "--confirm", "--force", "--json", "--quiet")
    assert (forced.code, row(forced, "db.other")["action"]) == (Exit.DONE, "forced")
    again = repair(lake, "--confirm", "--json")
    assert (again.code, again.document["manifest_version"]) == (Exit.DONE, None)


@pytest.mark.nightly
def test_going_back_says_so(lake: Lake, spark: SparkSession) -> None:
    append(lake.place("t"), 66)
    preview = repair(lake, "--to-pin")
    assert preview.stdout.splitlines()[-1].endswith("--to-pin --confirm goes back")
    outcome = repair(lake, "--to-pin", "--confirm", "--table", "db.t")
    assert outcome.code == Exit.DONE
    newest = reopen(lake.root).known.version
    last = outcome.stdout.splitlines()[-1]
    assert last == f"done     published as version {newest} of the warehouse"
    assert lance_ids(reopen(lake.root)) == [1, 2, 3]


@pytest.mark.nightly
def test_a_table_that_lost_its_pin_is_an_error_of_its_own(lake: Lake, spark: SparkSession) -> None:
    (lake.place("t") / "_versions" / f"{2**64 - 1 - 3:020d}.manifest").unlink()
    outcome = repair(lake, "--json")
    assert outcome.code == Exit.PARTIAL
    assert row(outcome)["error_kind"] == "damaged_version"
    assert row(outcome, "db.other")["error"] is None
    assert outcome.error.startswith("db.t: ")


# -- damage ----------------------------------------------------------------------------------------


def test_damage_is_told_with_what_it_means_and_what_to_do(lake: Lake, spark: SparkSession) -> None:
    for one in (lake.place("t") / "data").iterdir():
        one.unlink()
    outcome = repair(lake, "--json")
    assert outcome.code == Exit.DONE
    (found,) = outcome.document["damage"]
    assert set(found) == FINDING
    assert (found["kind"], found["table_key"], found["files"]) == ("missing_file", "db.t", 3)
    assert found["versions"] == [3, 2, 1]
    text = repair(lake).stdout
    assert "damage   1 finding" in text
    assert "needed by    branch main" in text
    assert "next         bring the files back from a backup" in text


def test_a_log_that_cannot_be_read_is_told_in_full(lake: Lake, spark: SparkSession) -> None:
    newest = min((lake.root / "__manifest/_versions").iterdir())
    newest.write_bytes(b"nonsense")
    outcome = repair(lake, "--json")
    assert outcome.code == Exit.REFUSED
    assert outcome.document["error_kind"] == "corrupt_manifest"
    (found,) = outcome.document["damage"]
    assert (found["kind"], found["table_key"]) == ("unreadable_version", "__manifest")
    assert "backup" in found["next"]
    assert "is damaged" in outcome.error


@pytest.mark.nightly
def test_strays_are_put_aside_when_that_is_confirmed(lake: Lake, spark: SparkSession) -> None:
    stray = lake.root / "__manifest/_transactions/odd.json"
    stray.write_text("odd")
    (found,) = repair(lake, "--json").document["damage"]
    assert (found["kind"], found["quarantined"]) == ("unreadable_announcement", 0)
    assert stray.exists()
    outcome = repair(lake, "--confirm")
    assert outcome.code == Exit.DONE
    assert "put aside    1 object, to __manifest/_quarantine/" in outcome.stdout
    assert not stray.exists()
    assert (lake.root / "__manifest/_quarantine/_transactions/odd.json").read_text() == "odd"
    assert "damage   none" in repair(lake).stdout
    write(Namespace(reopen(lake.root)), "append", 4)
    assert lance_ids(reopen(lake.root)) == [1, 2, 3, 4]


# -- tables of their own ---------------------------------------------------------------------------


def test_a_lance_table_is_only_looked_at(tmp_path: Path, spark: SparkSession) -> None:
    place = tmp_path / "t.lance"
    lance.write_dataset(id_rows(1), str(place))
    lance.write_dataset(id_rows(2), str(place), mode="append")
    outcome = lakewarden("repair", place)
    assert (outcome.code, outcome.stdout) == (Exit.DONE, "damage   none\n")
    next((place / "data").iterdir()).unlink()
    told = lakewarden("repair", place, "--json").document
    assert (told["uri"], told["tables"], told["manifest_version"]) == (str(place), [], None)
    assert [one["kind"] for one in told["damage"]] == ["missing_file"]


@pytest.mark.nightly
def test_an_iceberg_table_is_only_looked_at(tmp_path: Path, spark: SparkSession) -> None:
    settings = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/c.db",
        "warehouse": f"file://{tmp_path}",
    }
    found = load_catalog("cat", **settings)
    found.create_namespace("db")
    table = found.create_table("db.t", IDS)
    for number in (1, 2):
        table.append(id_rows(number))
    options = [one for pair in settings.items() for one in ("--catalog-property", "=".join(pair))]
    outcome = lakewarden("repair", "iceberg://cat/db.t", *options)
    assert (outcome.code, outcome.stdout) == (Exit.DONE, "damage   none\n")
    victim = next(tmp_path.rglob("*.parquet"))
    victim.unlink()
    told = lakewarden("repair", "iceberg://cat/db.t", "--json", *options).document
    (one,) = told["damage"]
    assert (one["kind"], one["table_key"]) == ("missing_file", "iceberg://cat/db.t")
    assert one["examples"] == [str(victim)]
