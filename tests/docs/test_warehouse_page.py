"""The table of changes that get along is printed as it is."""

from __future__ import annotations

from pathlib import Path

from lakewarden.warehouse.conflicts import RULES

PAGE = Path(__file__).parents[2] / "docs/understanding/warehouse.md"


def printed() -> str:
    """Return the rules as a table: ours down, theirs across."""
    operations = list(dict.fromkeys(ours for ours, _ in RULES))
    lines = [
        "| ours \\ theirs | " + " | ".join(operations) + " |",
        "|---" * (len(operations) + 1) + "|",
    ]
    lines += [
        f"| **{ours}** | " + " | ".join(RULES[ours, theirs] for theirs in operations) + " |"
        for ours in operations
    ]
    return "\n".join(lines)


def test_the_table_of_rules_is_the_one_that_decides() -> None:
    assert printed() in PAGE.read_text()
