"""`lakewarden optimize` as a command: what it prints, and what it refuses before Spark starts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import lance
import pytest

from lakewarden.cli.main import app
from lakewarden.errors import ErrorKind, Exit, LakewardenError
from lakewarden.testing.processes import lakewarden_command
from tests.optimize.tuning import everything, in_pieces, rows


def refused(*arguments: object) -> LakewardenError:
    """Return what the command raises before it starts Spark."""
    with pytest.raises(LakewardenError) as raised:
        app(["optimize", *map(str, arguments)], standalone_mode=False)
    return raised.value


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--target-size", "big"], 2, "as a size"),
        (["--max-bytes", "0"], 2, "--max-bytes is 0"),
        (["--min-files", "1"], 2, "--min-files is 1"),
        (["--deletions", "2"], 2, "--deletions is 2"),
        (["--where", "id >>> 3"], 2, "is no filter"),
        (["--branch", "dev"], 2, "--branch is one of a warehouse"),
        (["--table", "other*"], 1, "no table is left"),
        (["--server", "http://x"], 2, "direct storage access"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_makes_no_sense_is_one_line(
    tmp_path: Path, options: list[str], code: int, words: str
) -> None:
    table = in_pieces(tmp_path / "t.lance", 2)
    there = everything(table)
    error = refused(table, *options)
    assert error.exit_code == code
    assert words in error.message
    assert everything(table) == there


def test_a_number_of_tables_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKEWARDEN_MAINTENANCE_CONCURRENCY", "many")
    assert "1 or more" in refused(in_pieces(tmp_path / "t.lance", 2)).message


def test_a_table_that_does_not_exist(tmp_path: Path) -> None:
    error = refused(tmp_path / "nothing.lance")
    assert (error.kind, error.exit_code) == (ErrorKind.NOT_FOUND, Exit.REFUSED)


def run(*arguments: object) -> str:
    command = lakewarden_command("optimize", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.nightly
@pytest.mark.spark
def test_a_dry_run_changes_nothing_and_json_is_one_document(tmp_path: Path) -> None:
    table = in_pieces(tmp_path / "t.lance")
    before, there = rows(lance.dataset(str(table))), everything(table)
    told = json.loads(run("--dry-run", "--json", table))
    assert told["message_type"] == "optimize_plan"
    assert (told["tables"][0]["files_before"], told["tables"][0]["files_expected"]) == (6, 1)
    assert everything(table) == there
    assert "files    6 became 1" in run(table)
    assert rows(lance.dataset(str(table))) == before
