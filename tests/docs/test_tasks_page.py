"""The page on tasks names every setting with its default, every queue, and tests that exist."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from lakewarden.jobs import results
from lakewarden.jobs.config import SETTINGS, Setting
from lakewarden.jobs.queues import QUEUES
from lakewarden.jobs.scheduling import Decision
from lakewarden.maintenance.plan import TablePlan

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/understanding/tasks.md").read_text()


def row(setting: Setting) -> str:
    """Return the line that describes a setting."""
    default = "none" if setting.default is None else str(setting.default)
    default = {"False": "false", "True": "true"}.get(default, default)
    least = "" if setting.minimum is None else f"{setting.minimum}"
    names = ", ".join(f"`{name}`" for name in setting.properties)
    return f"| `{setting.key}` | {default} | {least} | {names} |".replace("  ", " ")


@pytest.mark.parametrize("queue", QUEUES)
def test_every_setting_is_described(queue: str) -> None:
    section = PAGE.partition(f"### `{queue}`\n")[2].partition("\n### ")[0].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    assert lines == [row(setting) for setting in SETTINGS[queue]]


def test_every_queue_is_described_with_its_patience() -> None:
    for kind in QUEUES.values():
        wanted = f"| `{kind.name}` | {kind.max_attempts} | {kind.heartbeat_seconds} s |"
        assert wanted in PAGE


def test_tests_that_are_named_exist() -> None:
    places = [*(ROOT / "tests/jobs").glob("test_*.py"), *(ROOT / "tests/service").glob("test_*.py")]
    sources = "".join(path.read_text() for path in places)
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) >= 12
    assert [name for name in named if f"def {name}(" not in sources] == []


def test_every_name_of_a_result_is_described() -> None:
    plan = TablePlan(0, "t")
    told = {
        **results.expired(plan, None),
        **results.kept({"head": 1}),
        **results.orphans(plan, None, timedelta(0), dry_run=True),
        **results.scheduled(Decision(None, ""), None),
        **results.skipped(""),
    }
    section = PAGE.partition("## What a task tells\n")[2].partition("\n## ")[0]
    assert [name for name in told if f"`{name}`" not in section] == []
