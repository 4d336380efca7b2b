"""The calls that the API's page shows are made, and answered with what it shows."""

from __future__ import annotations

import json
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlsplit

import pytest

from lakewarden.jobs.tokens import Role
from tests.service.small import Service

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
#: A command up to the next one or to its answer, and the answer.
_CALL = re.compile(r"^\$ (curl .*?)(?:\n(\{.*?))?(?=\n\$ |\Z)", re.DOTALL)


def examples() -> list[tuple[list[str], Any]]:
    """Return the words of every call of curl on the page, and the answer that is shown."""
    found = []
    for block in re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL):
        rest = block
        while rest:
            call = _CALL.match(rest)
            assert call is not None, rest
            shown = None if call[2] is None else json.loads(call[2])
            found.append((shlex.split(call[1]), shown))
            rest = rest[call.end() :].lstrip("\n")
    return found


def assert_same(shown: Any, found: Any, where: str = "") -> None:
    """Compare key by key; ids, times and names are whose they are."""
    if isinstance(shown, dict):
        assert found.keys() == shown.keys(), where
        for key, value in shown.items():
            assert_same(value, found[key], f"{where}/{key}")
    elif isinstance(shown, list):
        assert len(found) == len(shown), where
        for one, other in zip(shown, found, strict=True):
            assert_same(one, other, where)
    elif isinstance(shown, str) and (shown.endswith("…") or where.endswith(("name", "-at"))):
        assert isinstance(found, str), where
    else:
        assert found == shown, where


def test_the_calls_of_the_page_are_answered_as_it_says(plain: Service) -> None:
    calls = examples()
    assert len(calls) >= 10
    begun = datetime(2026, 11, 16, 8, tzinfo=UTC)
    plain.world._pass((begun - plain.world.now()).total_seconds())
    lake = plain.warehouse()
    names = {
        "API": "/management/v1",
        "JSON": "content-type: application/json",
        "WAREHOUSE": str(lake.id),
        "TABLE": str(lake.tables[0]),
    }
    asked = set()
    for words, shown in calls:
        curl, *rest = (Template(word).substitute(names) for word in words)
        assert (curl, rest.pop(0)) == ("curl", "-s")
        address = rest.pop(0)
        headers = {"authorization": f"Bearer {plain.tokens[Role.ADMIN]}"}
        method, body = "GET", None
        while rest:
            flag, value, *rest = rest
            if flag == "-H":
                name, _, text = value.partition(": ")
                headers[name] = text
            else:
                assert flag == "-d"
                method, body = "POST", value.encode()
        answer = plain.client.request(method, address, headers=headers, content=body)
        assert answer.is_success, (address, answer.text)
        if shown is not None:
            assert_same(shown, answer.json())
            if "task-id" in shown:
                names["TASK"] = answer.json()["task-id"]
        asked.add(urlsplit(address).path.rpartition("/")[2])
    assert asked >= {"config", "effective-config", "schedule", "list", "control"}
    assert lake.details(names["TASK"])["status"] == "CANCELLED"


@pytest.mark.parametrize(
    ("shown", "found"), [({"a": 1}, {"b": 1}), ([1], [1, 2]), ({"a": "x"}, {"a": "y"}), (1, "1")]
)
def test_another_answer_is_not_taken_for_the_one_that_is_shown(shown: Any, found: Any) -> None:
    with pytest.raises(AssertionError):
        assert_same(shown, found)
