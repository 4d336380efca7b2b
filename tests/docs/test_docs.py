"""The reference pages promise what the program does: every command, option, error and exit code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

from lakewarden.cli.main import app
from lakewarden.errors import ErrorKind, Exit, UsageError
from lakewarden.model import RemovalStats

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
CLI, ERRORS = (REFERENCE / "cli.md").read_text(), (REFERENCE / "errors.md").read_text()
#: Sections that describe options for more than one command.
SHARED = ("Options of every removal", "Options of every command")
ROWS = (
    "table_key", "kept_unverified", "kept_unknown_age", "failed_deletes", "requests", "skipped",
    "error", "error_kind", *(field.name for field in fields(RemovalStats)),
)  # fmt: skip


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def all_commands() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in typer.main.get_group(app).commands.items():
        inner = getattr(command, "commands", None)
        if inner:
            found |= {f"{name} {below}": one for below, one in inner.items()}
        else:
            found[name] = command
    return found


def options(command: Any) -> list[Any]:
    return [
        one
        for one in command.params
        if one.param_type_name == "option" and not getattr(one, "hidden", False)
    ]


def row_of(option: str, text: str) -> str | None:
    """Return the table row that describes an option."""
    rows = [line for line in text.splitlines() if re.match(rf"\| `{option}[ `]", line)]
    assert len(rows) < 2, f"{option} is described twice"
    return rows[0] if rows else None


@pytest.mark.parametrize("name", all_commands())
def test_every_command_has_a_section_with_an_example(name: str) -> None:
    section = sections(CLI)[f"`lakewarden {name}`"]
    assert re.search(rf"^\$ lakewarden {name}\b", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, command in all_commands().items() for option in options(command)],
    ids=lambda value: value if isinstance(value, str) else value.opts[0],
)
def test_every_option_is_described_with_its_default(name: str, option: Any) -> None:
    parts = sections(CLI)
    own = parts[f"`lakewarden {name}`"]
    row = row_of(option.opts[0], own)
    if row is None:
        row = next(filter(None, (row_of(option.opts[0], parts[one]) for one in SHARED)), None)
    assert row is not None, f"{option.opts[0]} of {name} is not described"
    default = getattr(option.default, "value", option.default)
    if default not in (None, False, [], ()):
        assert f"| `{default}` |" in row
    for other in option.opts[1:]:
        assert f"`{other}`" in row


@pytest.mark.parametrize("page", [CLI, ERRORS], ids=["cli", "errors"])
def test_no_page_names_an_option_that_does_not_exist(page: str) -> None:
    known = {
        name
        for command in all_commands().values()
        for one in command.params
        for name in (*one.opts, *one.secondary_opts)
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    assert named - known - {"--help"} == set()


def test_no_page_names_a_command_that_does_not_exist() -> None:
    headed = re.findall(r"^## `lakewarden (.+)`$", CLI, re.MULTILINE)
    assert sorted(headed) == sorted(all_commands())


@pytest.mark.parametrize("code", Exit, ids=lambda code: code.name)
def test_every_exit_code_is_described(code: Exit) -> None:
    assert re.search(rf"^\| `{code.value}` \| \w+", sections(CLI)["Exit codes"], re.MULTILINE)


def test_no_other_exit_code_is_described() -> None:
    described = re.findall(r"^\| `(\d+)` \|", sections(CLI)["Exit codes"], re.MULTILINE)
    assert [int(code) for code in described] == sorted(Exit)


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_kind_of_error_is_described_with_its_exit_code(kind: ErrorKind) -> None:
    found = re.findall(rf"^\| `{kind.value}` \| (\d) \| .+ \| .+ \|$", ERRORS, re.MULTILINE)
    assert len(found) == 1
    assert int(found[0]) in set(Exit)


def test_no_other_kind_of_error_is_described() -> None:
    described = re.findall(r"^\| `(\w+)` \|", ERRORS, re.MULTILINE)
    assert sorted(described) == sorted(ErrorKind)


def test_usage_errors_are_described_as_such() -> None:
    assert UsageError(ErrorKind.EMPTY_POLICY, "").exit_code == 2
    wrong = sections(ERRORS)["The command is wrong"]
    assert set(re.findall(r"^\| `\w+` \| (\d) \|", wrong, re.MULTILINE)) == {"2"}


@pytest.mark.parametrize("name", ROWS)
def test_every_name_of_a_json_row_is_described(name: str) -> None:
    assert re.search(rf"^\| `{name}` \| \S+", sections(CLI)["What `--json` prints"], re.MULTILINE)
