"""Every fault of the checklist has a line, and every test that a line names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/understanding/faults.md").read_text()
ITEMS = [*range(1, 30), *range(33, 78)]
ROWS = re.findall(r"^\| *(\d+) *\|([^|]*)\|([^|]*)\|$", PAGE, re.MULTILINE)
OWN = "warehouse/test_faults.py"
NAMED = sorted(set(re.findall(r"`([^`\s]+\.py)::(\w+)`", PAGE)))


@cache
def functions_of(path: str) -> dict[str, str]:
    """Return the functions of a module, each with its decorators as text."""
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {
        one.name: " ".join(ast.unparse(decorator) for decorator in one.decorator_list)
        for one in tree.body
        if isinstance(one, ast.FunctionDef)
    }


def test_every_item_has_one_line() -> None:
    assert [int(number) for number, _, _ in ROWS] == ITEMS


def test_every_line_says_something() -> None:
    """A test, why there can be none, or that it is still to be done."""
    for number, fault, answer in ROWS:
        assert fault.strip(), number
        assert any(one in answer for one in ("::test_", "Impossible: ")), number


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda value: value)
def test_every_test_that_is_named_is_there(path: str, name: str) -> None:
    assert name in functions_of(path)


def test_every_test_that_is_named_is_read() -> None:
    """What looks like a test and is not written like the others would be overlooked."""
    assert PAGE.count("::") == len(re.findall(r"`[^`\s]+\.py::\w+`", PAGE))
    assert len(NAMED) > 50


def test_every_fault_that_has_a_test_of_its_own_is_on_the_page() -> None:
    mine = {name for name in functions_of(OWN) if name.startswith("test_")}
    assert mine <= {name for path, name in NAMED if path == OWN}


def test_what_is_said_to_be_open_is_expected_to_fail_and_nothing_else() -> None:
    said = {
        name
        for _, _, answer in ROWS
        for name in re.findall(r"::(\w+)`", answer.partition("*Open*")[2])
    }
    fails = {
        name
        for name, decorators in functions_of(OWN).items()
        if "xfail" in decorators or "UNCHECKED" in decorators
    }
    assert said == fails
