"""The commands about a warehouse: what they say, as text and as JSON, and how they fail."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from lakewarden.errors import Exit, UsageError
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.warehouse import Warehouse
from tests.cli.small import contents
from tests.cli.terminal import Outcome, lakewarden

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IMPL = "lakewarden.warehouse.iceberg.WarehouseCatalog"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A warehouse with Lance table db.t of ids 1, 2 and Iceberg table db.facts of 10, 20.

    1 init, 2 create db.t, 3 and 4 its rows, 5 namespace spare, 6 create db.facts, 7 and 8 its rows.
    """
    place = tmp_path / "lake"
    warehouse = Warehouse.init(str(place), actor="anna")
    for mode, number in (("create", 1), ("append", 2)):
        write(place, mode, number, warehouse)
    facts = load_catalog("lake", **{"py-catalog-impl": IMPL, "warehouse": str(place)})
    facts.create_namespace("spare")
    table = facts.create_table("db.facts", rows(1).schema)
    table.append(rows(10))
    table.append(rows(20))
    return place


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def write(place: Path, mode: str, number: int, warehouse: Warehouse | None = None) -> None:
    namespace = Namespace(warehouse or Warehouse.open(str(place)))
    lance.write_dataset(rows(number), namespace_client=namespace, table_id=["db", "t"], mode=mode)


def ids(place: Path) -> list[int]:
    namespace = Namespace(Warehouse.open(str(place)))
    found = lance.dataset(namespace_client=namespace, table_id=["db", "t"])
    return sorted(found.to_table()["id"].to_pylist())


def files(place: Path) -> dict[str, str]:
    """Return a fingerprint of every file; directories may have been touched."""
    return {name: told for name, told in contents(place).items() if "directory" not in told}


def newest(place: Path) -> int:
    return Warehouse.open(str(place)).known.version


def refused(outcome: Outcome, kind: str, code: int = Exit.REFUSED) -> str:
    """Check how a command with --json has failed; return what was said."""
    assert outcome.code == code, outcome
    assert outcome.document["message_type"] == "error"
    assert outcome.document["kind"] == kind, outcome.document
    assert outcome.document["exit_code"] == code
    assert outcome.document["message"] == outcome.error
    return outcome.error


# -- init and show ---------------------------------------------------------------------------------


def test_init_makes_a_warehouse_and_says_so(tmp_path: Path) -> None:
    place = tmp_path / "lake"
    outcome = lakewarden("warehouse", "init", place)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.stdout == f"{place} is a warehouse now\n"
    assert newest(place) == 1


def test_init_says_it_as_json(tmp_path: Path) -> None:
    outcome = lakewarden("warehouse", "init", tmp_path / "lake", "--as", "anna", "--json")
    assert outcome.code == 0
    assert outcome.document == {"message_type": "warehouse", "version": 1}
    (only,) = Warehouse.open(str(tmp_path / "lake")).history()
    assert only.transaction.actor == "anna"


def test_init_twice_is_refused(root: Path) -> None:
    before = files(root)
    outcome = lakewarden("warehouse", "init", root, "--json")
    assert "is a warehouse already" in refused(outcome, "already_exists")
    assert files(root) == before
    assert lakewarden("warehouse", "init", root).code == 1


def test_the_log_may_be_in_a_database(tmp_path: Path) -> None:
    place, database = tmp_path / "lake", f"sqlite:///{tmp_path}/log.db"
    assert lakewarden("warehouse", "init", place, "--log-database", database).code == 0
    outcome = lakewarden("tag", place, "t1", "--log-database", database, "--json")
    assert [one["name"] for one in outcome.document["tags"]] == ["t1"]
    outcome = lakewarden("log", place, "--json")
    assert "--log-database" in refused(outcome, "usage", Exit.USAGE)


@pytest.mark.parametrize(
    "database",
    ["nonsense", "nosuch://host/db", "sqlite:////none/such/place/log.db", "postgresql://"],
)
def test_a_bad_database_is_told_in_one_line(tmp_path: Path, database: str) -> None:
    outcome = lakewarden("warehouse", "init", tmp_path / "lake", "--log-database", database)
    assert outcome.code in (1, 2)
    assert outcome.error
    assert not (tmp_path / "lake").exists()


def test_show_says_what_there_is(root: Path) -> None:
    lakewarden("tag", root, "good")
    lakewarden("branch", root, "side")
    warehouse = Warehouse.open(str(root))
    warehouse.drop(("db", "facts"))
    outcome = lakewarden("warehouse", "show", root)
    said = dict(line.split(maxsplit=1) for line in outcome.stdout.splitlines())
    assert said["location"] == str(root)
    assert said["version"] == "11"
    assert said["tables"] == "1"
    assert said["branches"] == "main, side"
    assert said["tags"] == "good (version 8)"
    assert said["dropped"].split() == ["tables", "db.facts"]


def test_show_says_it_as_json(root: Path) -> None:
    lakewarden("tag", root, "good", "--version", 4)
    outcome = lakewarden("warehouse", "show", root, "--json")
    told = outcome.document
    assert outcome.code == 0
    assert told["message_type"] == "warehouse"
    assert (told["location"], told["version"], told["tables"]) == (str(root), 9, 2)
    assert (told["branches"], told["tags"]) == (["main"], {"good": 4})
    assert told["dropped_tables"] == []
    assert datetime.fromisoformat(told["committed_at"]).tzinfo is not None
    assert "lakewarden.id" in told["properties"]


COMMANDS = [
    ("warehouse", "show"),
    ("tables",),
    ("log",),
    ("tag",),
    ("branch",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_only_shows_changes_nothing(root: Path, command: tuple[str, ...]) -> None:
    before = contents(root)
    for extra in ((), ("--json",)):
        outcome = lakewarden(*command, root, *extra)
        assert (outcome.code, outcome.stderr) == (0, "")
    assert contents(root) == before


@pytest.mark.parametrize(
    "command",
    [
        *COMMANDS,
        ("restore", "--version", "1"),
        ("tag", "some", "--version", "1"),
    ],
    ids=" ".join,
)
def test_what_is_no_warehouse_is_told(tmp_path: Path, command: tuple[str, ...]) -> None:
    name, options = command[:1] if command[0] != "warehouse" else command, command[1:]
    options = options if command[0] != "warehouse" else ()
    outcome = lakewarden(*name, tmp_path, *options, "--json")
    assert "lakewarden warehouse init" in refused(outcome, "not_a_warehouse")
    assert list(tmp_path.iterdir()) == []
    assert lakewarden(*name, tmp_path, *options).error


def test_a_bad_location_is_told(tmp_path: Path) -> None:
    for place in ("http://host/lake", "ftp://host/lake", "s3://"):
        outcome = lakewarden("log", place)
        assert outcome.code == 2
        assert outcome.error


# -- log -------------------------------------------------------------------------------------------


def test_the_log_shows_the_newest_first(root: Path) -> None:
    outcome = lakewarden("log", root)
    lines = outcome.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert lines[0].endswith("append db.facts")
    assert lines[-1].split()[3:] == ["anna", "init"]


def test_the_log_is_limited(root: Path) -> None:
    assert len(lakewarden("log", root, "--limit", 3).stdout.splitlines()) == 3
    assert len(lakewarden("log", root, "--limit", 0).stdout.splitlines()) == 8
    outcome = lakewarden("log", root, "--limit", -1, "--json")
    refused(outcome, "usage", Exit.USAGE)


def test_the_log_says_it_as_json(root: Path) -> None:
    lakewarden("tag", root, "good", "--as", "bob")
    versions = lakewarden("log", root, "--limit", 3, "--json").document["versions"]
    assert [one["version"] for one in versions] == [9, 8, 7]
    assert versions[0]["changes"] == [{"operation": "tag", "table_key": "good"}]
    assert (versions[0]["actor"], versions[0]["branch"]) == ("bob", "main")
    assert versions[1]["changes"] == [{"operation": "append", "table_key": "db.facts"}]
    times = [datetime.fromisoformat(one["committed_at"]) for one in versions]
    assert times == sorted(times, reverse=True)


def test_the_log_stays_one_line_a_version_whatever_the_message(root: Path) -> None:
    warehouse = Warehouse.open(str(root), actor="eve\nil")
    warehouse.restore(warehouse.read())
    warehouse.commit([], base=warehouse.refresh(), message="two\nlines\x1b[31m")
    outcome = lakewarden("log", root)
    lines = outcome.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(newest(root), 0, -1))
    assert "\x1b" not in outcome.stdout


def test_the_log_names_the_branch(root: Path) -> None:
    lakewarden("branch", root, "side")
    side = load_catalog(
        "side", **{"py-catalog-impl": IMPL, "warehouse": str(root), "lakewarden.branch": "side"}
    )
    side.load_table("db.facts").append(rows(30))
    assert lakewarden("log", root, "--limit", 1).stdout.rstrip().endswith("[side]")
    (last,) = lakewarden("log", root, "--limit", 1, "--json").document["versions"]
    assert last["branch"] == "side"


# -- tables ----------------------------------------------------------------------------------------


def test_tables_are_shown_with_their_versions(root: Path) -> None:
    said = [line.split() for line in lakewarden("tables", root).stdout.splitlines()]
    assert [line[:3] for line in said] == [["db.facts", "iceberg", "v2"], ["db.t", "lance", "v2"]]
    assert all(line[3].startswith(f"{root}/tables/") for line in said)


def test_tables_are_shown_as_json_at_any_version(root: Path) -> None:
    lakewarden("tag", root, "early", "--version", 3)

    def told(*at: object) -> tuple[int, dict[str, Any]]:
        outcome = lakewarden("tables", root, *at, "--json")
        assert outcome.code == 0, outcome
        assert outcome.document["message_type"] == "tables"
        return outcome.document["version"], {one["table_key"]: one["pin"] for one in outcome.rows}

    assert told() == (9, {"db.facts": 2, "db.t": 2})
    assert told("--version", 2) == (2, {"db.t": None})
    assert told("--version", 7) == (7, {"db.facts": 1, "db.t": 2})
    assert told("--tag", "early") == (3, {"db.t": 1})
    assert "empty" in lakewarden("tables", root, "--version", 2).stdout
    assert lakewarden("tables", root, "--version", 1).stdout == "no tables\n"


def test_tables_are_shown_at_a_time(root: Path) -> None:
    versions = lakewarden("log", root, "--json").document["versions"]
    times = {one["version"]: datetime.fromisoformat(one["committed_at"]) for one in versions}
    later = times[8] + timedelta(hours=1)
    spelled = [
        later.isoformat(),
        later.strftime("%Y-%m-%dT%H:%M:%SZ"),
        later.astimezone(UTC).strftime("%Y-%m-%d %H:%M"),
        (later + timedelta(days=1)).strftime("%Y-%m-%d"),
    ]
    for text in spelled:
        assert lakewarden("tables", root, "--at", text, "--json").document["version"] == 8
    # In the log times are cut to milliseconds.
    after = (times[3] + timedelta(milliseconds=1)).isoformat()
    assert lakewarden("tables", root, "--at", after, "--json").document["version"] >= 3


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2026-13-01", "2026-11-15T25:00", "1234567890", "2026-11-15T12:00Zx"]
)
def test_what_is_no_time_is_told(root: Path, text: str) -> None:
    outcome = lakewarden("tables", root, "--at", text, "--json")
    assert "write it like" in refused(outcome, "usage", Exit.USAGE)


@pytest.mark.parametrize("text", ["1970-01-01", "0001-01-01T00:00+14:00", "0001-01-01"])
def test_a_time_before_the_first_version_is_told(root: Path, text: str) -> None:
    outcome = lakewarden("tables", root, "--at", text, "--json")
    assert "made later" in refused(outcome, outcome.document["kind"])
    assert outcome.document["kind"] in ("reclaimed", "not_found")


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-14:00", "9999-12-31"])
def test_a_time_far_ahead_is_now(root: Path, text: str) -> None:
    assert lakewarden("tables", root, "--at", text, "--json").document["version"] == 8


@pytest.mark.parametrize("version", ["0", "99", "-1", "99999999999999999999999"])
def test_a_version_that_never_was_is_told(root: Path, version: str) -> None:
    outcome = lakewarden("tables", root, f"--version={version}", "--json")
    assert "there is no version" in refused(outcome, "not_found")


def test_a_reclaimed_version_is_told(root: Path) -> None:
    Warehouse.open(str(root)).log.handler.forget([2, 3])
    outcome = lakewarden("tables", root, "--version", 3, "--json")
    assert "tag versions that must stay" in refused(outcome, "reclaimed")


def test_a_missing_tag_or_branch_is_told(root: Path) -> None:
    refused(lakewarden("tables", root, "--tag", "none", "--json"), "not_found")
    refused(lakewarden("tables", root, "--branch", "none", "--json"), "not_found")


def test_version_tag_and_time_exclude_each_other(root: Path) -> None:
    for at in (("--version", 1, "--tag", "x"), ("--tag", "x", "--at", "2026-01-01")):
        for command in ("tables", "restore"):
            refused(lakewarden(command, root, *at, "--json"), "usage", Exit.USAGE)


# -- tags and branches -----------------------------------------------------------------------------


def test_tags_are_made_shown_and_deleted(root: Path) -> None:
    assert lakewarden("tag", root).stdout == "no tags\n"
    outcome = lakewarden("tag", root, "good")
    assert outcome.stdout.split() == ["good", "version", "8"]
    outcome = lakewarden("tag", root, "early", "--version", 3, "--json")
    told = [(one["name"], one["version"], one["branch"]) for one in outcome.document["tags"]]
    assert told == [("early", 3, "main"), ("good", 8, "main")]
    assert outcome.document["message_type"] == "tags"
    outcome = lakewarden("tag", root, "good", "--delete", "--json")
    assert [one["name"] for one in outcome.document["tags"]] == ["early"]


def test_a_tag_exists_once_and_is_deleted_once(root: Path) -> None:
    lakewarden("tag", root, "good")
    assert "delete it first" in refused(lakewarden("tag", root, "good", "--json"), "already_exists")
    lakewarden("tag", root, "good", "--delete")
    refused(lakewarden("tag", root, "good", "--delete", "--json"), "not_found")


def test_a_tag_of_a_branch_is_read_as_such(root: Path) -> None:
    lakewarden("branch", root, "side")
    Warehouse.open(str(root)).drop(("db", "facts"), branch="side")
    lakewarden("tag", root, "there", "--branch", "side")
    outcome = lakewarden("tables", root, "--tag", "there", "--json")
    assert outcome.document["branch"] == "side"
    assert [one["table_key"] for one in outcome.rows] == ["db.t"]


def test_branches_are_made_shown_and_deleted(root: Path) -> None:
    outcome = lakewarden("branch", root, "side", "--version", 4)
    assert outcome.stdout.splitlines()[1].split() == ["side", "from", "main,", "version", "4"]
    outcome = lakewarden("branch", root, "deep", "--from", "side", "--json")
    assert outcome.document["message_type"] == "branches"
    told = {one["name"]: (one["from"], one["base"]) for one in outcome.document["branches"]}
    assert told == {"main": (None, 0), "side": ("main", 4), "deep": ("side", 9)}
    outcome = lakewarden("branch", root, "side", "--delete", "--json")
    assert "delete deep first" in refused(outcome, "conflict")
    lakewarden("branch", root, "deep", "--delete")
    outcome = lakewarden("branch", root, "side", "--delete", "--json")
    assert [one["name"] for one in outcome.document["branches"]] == ["main"]


def test_branches_that_cannot_be_are_refused(root: Path) -> None:
    lakewarden("branch", root, "side")
    refused(lakewarden("branch", root, "side", "--json"), "already_exists")
    refused(lakewarden("branch", root, "x", "--from", "none", "--json"), "not_found")
    refused(lakewarden("branch", root, "x", "--version", 99, "--json"), "not_found")
    refused(lakewarden("branch", root, "none", "--delete", "--json"), "not_found")
    outcome = lakewarden("branch", root, "main", "--delete", "--json")
    assert outcome.code in (Exit.REFUSED, Exit.USAGE)
    assert "main cannot be deleted" in outcome.error


@pytest.mark.parametrize("name", ["", " ", "main", "HEAD", "12", "a/b", "a b", "_x", "x" * 256])
@pytest.mark.parametrize("command", ["tag", "branch"])
def test_some_names_are_refused(root: Path, command: str, name: str) -> None:
    before = newest(root)
    refused(lakewarden(command, root, name, "--json"), "bad_name", Exit.USAGE)
    assert newest(root) == before


@pytest.mark.parametrize("command", ["tag", "branch"])
def test_delete_needs_a_name(root: Path, command: str) -> None:
    outcome = lakewarden(command, root, "--delete", "--json")
    refused(outcome, "usage", Exit.USAGE)


@pytest.mark.parametrize("command", ["tag", "branch"])
def test_a_version_without_a_name_is_not_ignored(root: Path, command: str) -> None:
    outcome = lakewarden(command, root, "--version", 3, "--json")
    refused(outcome, "usage", Exit.USAGE)


# -- going back ------------------------------------------------------------------------------------


def test_a_warehouse_goes_back(root: Path) -> None:
    lakewarden("tag", root, "good")
    write(root, "overwrite", 99)
    outcome = lakewarden("restore", root, "--tag", "good", "--as", "bob")
    assert outcome.stdout == "version 8 is back as version 11\n"
    assert ids(root) == [1, 2]
    (last,) = lakewarden("log", root, "--limit", 1, "--json").document["versions"]
    assert (last["actor"], last["message"]) == ("bob", "restore version 8")


def test_one_table_goes_back(root: Path) -> None:
    outcome = lakewarden("restore", root, "db.t", "--version", 3, "--json")
    assert outcome.code == 0
    assert outcome.document == {
        "message_type": "restore",
        "version": 9,
        "restored": 3,
        "table_key": "db.t",
    }
    assert ids(root) == [1]
    assert [one["pin"] for one in lakewarden("tables", root, "--json").rows] == [2, 3]
    outcome = lakewarden("restore", root, "db.t", "--version", 4)
    assert outcome.stdout == "version 4 of db.t is back as version 10\n"


def test_going_back_to_what_is_there_is_nothing_to_do(root: Path) -> None:
    outcome = lakewarden("restore", root, "--version", 8)
    assert outcome.stdout == "nothing to do: it is version 8 already\n"
    assert newest(root) == 8


def test_restore_needs_to_know_where_to(root: Path) -> None:
    outcome = lakewarden("restore", root, "--json")
    assert "--version, --tag or --at" in refused(outcome, "usage", Exit.USAGE)


def test_what_was_not_there_does_not_come_back(root: Path) -> None:
    refused(lakewarden("restore", root, "db.missing", "--version", 4, "--json"), "not_found")
    refused(lakewarden("restore", root, "db.facts", "--version", 4, "--json"), "not_found")
    refused(lakewarden("restore", root, "--version", 99, "--json"), "not_found")
    for name in ("a..b", "db.", "x/y"):
        outcome = lakewarden("restore", root, name, "--version", 4, "--json")
        refused(outcome, "bad_name", Exit.USAGE)
    assert newest(root) == 8


def test_a_cleaned_version_does_not_come_back_and_is_told(root: Path) -> None:
    """Somebody has run Lance's own cleanup on the table."""
    table = Warehouse.open(str(root)).read().table(("db", "t"))
    lance.dataset(table.location).cleanup_old_versions(
        older_than=timedelta(0), delete_unverified=True
    )
    refused(lakewarden("restore", root, "db.t", "--version", 3, "--json"), "reclaimed")
    assert (newest(root), ids(root)) == (8, [1, 2])


def test_drift_is_told(root: Path) -> None:
    table = Warehouse.open(str(root)).read().table(("db", "t"))
    lance.write_dataset(rows(66), table.location, mode="append")
    refused(lakewarden("restore", root, "db.t", "--version", 3, "--json"), "drift")
    assert newest(root) == 8


def test_a_dropped_table_comes_back(root: Path) -> None:
    Warehouse.open(str(root)).drop(("db", "t"))
    outcome = lakewarden("undrop", root, "db.t")
    assert (outcome.code, outcome.stdout) == (0, "db.t is back\n")
    assert ids(root) == [1, 2]
    Warehouse.open(str(root)).drop(("db", "facts"))
    outcome = lakewarden("undrop", root, "db.facts", "--json")
    assert outcome.document == {"message_type": "undrop", "version": 12, "table_key": "db.facts"}


def test_what_was_not_dropped_does_not_come_back(root: Path) -> None:
    refused(lakewarden("undrop", root, "db.t", "--json"), "not_found")
    refused(lakewarden("undrop", root, "db.missing", "--json"), "not_found")
    refused(lakewarden("undrop", root, "a..b", "--json"), "bad_name", Exit.USAGE)
    Warehouse.open(str(root)).drop(("db", "t"))
    write(root, "create", 5)
    outcome = lakewarden("undrop", root, "db.t", "--json")
    assert "rename it first" in refused(outcome, "already_exists")
    assert ids(root) == [5]


def test_damage_is_told_in_one_line(root: Path) -> None:
    (newest_entry,) = sorted((root / "__manifest" / "_versions").iterdir())[:1]
    newest_entry.write_bytes(newest_entry.read_bytes()[:-5])
    refused(lakewarden("log", root, "--json"), "corrupt_manifest")
    (root / "__manifest" / "handler.json").write_text("{")
    refused(lakewarden("log", root, "--json"), "corrupt_manifest")


def test_what_a_newer_release_has_written_is_told(root: Path) -> None:
    """With a seal of its own, as that release would leave it."""
    import hashlib
    import json

    (entry,) = sorted((root / "__manifest" / "_versions").iterdir())[:1]
    body, _, _ = entry.read_bytes().rpartition(b"\nsha256:")
    newer = json.dumps({**json.loads(body), "stamp": 99}).encode()
    entry.write_bytes(newer + b"\nsha256:" + hashlib.sha256(newer).hexdigest().encode())
    outcome = lakewarden("log", root, "--json")
    assert "upgrade lakewarden first" in refused(outcome, "newer_stamp")


@pytest.mark.parametrize(
    "command", ["warehouse", "log", "tables", "tag", "branch", "restore", "undrop"]
)
def test_help_is_there_with_an_example(command: str) -> None:
    names = (
        [("warehouse", "init"), ("warehouse", "show")] if command == "warehouse" else [(command,)]
    )
    for name in names:
        outcome = lakewarden(*name, "--help")
        assert outcome.code == 0
        assert f"lakewarden {' '.join(name)} s3://" in " ".join(outcome.stdout.split())


def test_a_warehouse_must_be_named() -> None:
    for command in (("warehouse", "init"), ("warehouse", "show"), ("log",), ("undrop",)):
        outcome = lakewarden(*command)
        assert outcome.code == 2
        assert "WAREHOUSE" in outcome.error


# -- cleanup ---------------------------------------------------------------------------------------


def reclaimed(place: Path, version: int) -> str:
    return refused(
        lakewarden("tables", str(place), "--version", str(version), "--json"), "reclaimed"
    )


def test_cleanup_shows_what_would_go_and_changes_nothing(spark: SparkSession, root: Path) -> None:
    write(root, "overwrite", 3)
    before = files(root)
    shown = lakewarden("cleanup", str(root), "--keep", "3", "--min-age", "0s")
    assert shown.code == Exit.DONE, shown
    assert "remove versions of the warehouse beyond the last 3" in shown.stdout
    assert "db.t " in shown.stdout
    assert "preview: nothing was changed" in shown.stdout
    assert files(root) == before


def test_cleanup_removes_old_versions_and_says_so(spark: SparkSession, root: Path) -> None:
    write(root, "overwrite", 3)
    done = lakewarden("cleanup", str(root), "--keep", "3", "--min-age", "0s", "--confirm", "--json")
    assert done.code == Exit.DONE, done
    by_key = {row["table_key"]: row for row in done.document["tables"]}
    assert set(by_key) == {"__manifest", "db.t", "db.facts"}
    # Whoever is about to commit must find them for a while.
    assert by_key["__manifest"]["old_versions_removed"] == 0
    assert all(row["error"] is None for row in by_key.values())
    assert "version 2 of the warehouse was reclaimed" in reclaimed(root, 2)
    assert ids(root) == [3]
    again = lakewarden("cleanup", str(root), "--keep", "3", "--min-age", "0s", "--confirm")
    assert again.code == Exit.DONE
    assert "removed  nothing" in again.stdout


@pytest.mark.nightly
def test_a_tagged_version_stays(spark: SparkSession, root: Path) -> None:
    assert lakewarden("tag", str(root), "first", "--version", "3").code == Exit.DONE
    for number in (3, 4, 5):
        write(root, "overwrite", number)
    done = lakewarden("cleanup", str(root), "--keep", "3", "--min-age", "0s", "--confirm")
    assert done.code == Exit.DONE, done
    assert lakewarden("restore", str(root), "db.t", "--tag", "first").code == Exit.DONE
    assert ids(root) == [1]


def test_fewer_versions_than_recovery_needs_are_warned_of(spark: SparkSession, root: Path) -> None:
    shown = lakewarden("cleanup", str(root), "--keep", "1", "--min-age", "0s")
    assert shown.code == Exit.DONE
    assert "the last 3 versions of the warehouse stay" in shown.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--keep", "3", "--versions", "2"),
        ("--keep", "3", "--branch", "side"),
        ("--keep", "3", "--save-plan", "somewhere"),
        ("--due", "--keep", "3"),
    ],
)
def test_what_means_nothing_for_a_warehouse_is_refused(
    root: Path, options: tuple[str, ...]
) -> None:
    before = files(root)
    said = refused(lakewarden("cleanup", str(root), *options, "--json"), "usage", Exit.USAGE)
    assert "cannot be used here" in said
    assert files(root) == before


def test_a_rule_is_needed(root: Path) -> None:
    refused(lakewarden("cleanup", str(root), "--json"), "empty_policy", Exit.USAGE)


def test_orphans_of_a_warehouse_go_with_its_cleanup(root: Path) -> None:
    said = refused(lakewarden("remove-orphans", str(root), "--json"), "in_warehouse")
    assert "lakewarden cleanup WAREHOUSE" in said


@pytest.mark.nightly
def test_what_is_due_is_cleaned(spark: SparkSession, root: Path) -> None:
    nothing = lakewarden("cleanup", "--due", str(root), "--confirm")
    assert nothing.code == Exit.DONE, nothing
    warehouse = Warehouse.open(str(root))
    wanted = {
        "lakewarden.auto-cleanup.interval": "3",
        "lakewarden.auto-cleanup.retain": "3",
    }
    warehouse.set_properties(wanted, ("db", "t"))
    before = newest(root)
    for number in range(3, 8):
        write(root, "overwrite", number)
    marks = root / "__manifest/_due"
    assert len(list(marks.iterdir())) == 2
    # Nothing is old enough yet, and nobody waits for it: the next interval comes.
    done = lakewarden("cleanup", "--due", str(root), "--confirm", "--json")
    assert done.code == Exit.DONE, done
    assert not list(marks.iterdir())
    assert newest(root) == before + 5
    assert [row["table_key"] for row in done.document["tables"]] == [
        "db.facts",
        "db.t",
        "__manifest",
    ]


@pytest.mark.parametrize(
    "properties",
    [
        {"lakewarden.auto-cleanup.interval": "often"},
        {"lakewarden.auto-cleanup.interval": "3"},
        {"lakewarden.auto-cleanup.retain": "3"},
        {"lakewarden.auto-cleanup.interval": "0", "lakewarden.auto-cleanup.retain": "3"},
        {"lakewarden.auto-cleanup.interval": "3", "lakewarden.auto-cleanup.older-than": "old"},
    ],
)
def test_properties_that_make_no_sense_are_refused(root: Path, properties: dict[str, str]) -> None:
    before = newest(root)
    with pytest.raises(UsageError):
        Warehouse.open(str(root)).set_properties(properties, ("db", "t"))
    assert newest(root) == before
