"""The page about the HTTP API promises what the service does: every address, role, error and number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.service.test_access import NEEDED

SOURCES = Path(__file__).parents[2] / "src" / "lakewarden"
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
ROWS = re.findall(r"^\| (GET|POST|DELETE) \| `(\S+)` \| (\w+) \|", PAGE, re.MULTILINE)


def test_every_address_is_on_the_page_with_its_role() -> None:
    described = {
        (method, path if path in {"/health", "/metrics"} else f"/management/v1{path}"): role
        for method, path, role in ROWS
    }
    assert len(described) == len(ROWS)
    queues = "expire_snapshots|remove_orphan_files|optimize|task_log_cleanup"
    there = {
        (method, re.sub(rf"(?<=task-queue/)({queues})", "{queue_name}", path)): role
        for (method, path), role in NEEDED.items()
    }
    assert described == there


def raised() -> set[str]:
    """Return the names of errors that the sources know."""
    found: set[str] = set()
    for place in (*SOURCES.glob("jobs/*.py"), *SOURCES.glob("service/*.py")):
        text = place.read_text()
        found |= set(re.findall(r'(?:bad_request|not_found)\(\s*"([A-Z]\w+)"', text))
        found |= set(re.findall(r'ErrorKind\.\w+,\s*"([A-Z]\w+)",\s*(?:\d{3}|code)', text))
        found |= set(re.findall(r'^    \d{3}: "([A-Z]\w+)"', text, re.MULTILINE))
    return found


def test_every_error_is_on_the_page() -> None:
    names = raised()
    assert len(names) > 20
    described = set(re.findall(r"`([A-Z]\w+)`", PAGE.partition("## Errors")[2]))
    # Workers meet this one; callers see it in a task's message.
    missing = names - described - {"RemoveOrphanFilesRetentionTooShort"}
    # Tokens are made on the command line.
    assert {name for name in missing if not name.startswith("Token")} == set()


@pytest.mark.parametrize(
    "name", re.findall(r'"(lakewarden_[a-z_]+)"', (SOURCES / "service" / "metrics.py").read_text())
)
def test_every_number_is_on_the_page(name: str) -> None:
    assert re.search(rf"^\| `{name}` \| `", PAGE, re.MULTILINE)
