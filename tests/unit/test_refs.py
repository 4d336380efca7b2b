"""Tags, branches, the rules a branch carries, and durations as people write them."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakewarden.errors import Damaged, UsageError
from lakewarden.formats.lance.refs import own_policy, parse_ref
from lakewarden.model import format_duration, parse_duration
from lakewarden.retention import Branch, OnTagged, Policy, Tag
from lakewarden.testing import tables


def test_refs_that_lance_writes_are_read(tmp_path: Path) -> None:
    root = tables.overwritten(tmp_path / "t", 2)
    dev = tables.branch(root, "dev/x", 1)
    tables.branch(dev, "leaf", ("dev/x", 1))
    tables.tag(root, "v1.0-a_b", 2)
    tables.tag(root, "on-branch", ("dev/x", 1))
    number = tables.detached(root, 50)
    tables.tag(root, "loose", number)
    found = {
        parse_ref(str(file.relative_to(root)), file.read_bytes())
        for file in root.glob("_refs/*/*.json")
    }
    assert found == {
        Branch("dev/x", "main", 1),
        Branch("leaf", "dev/x", 1),
        Tag("v1.0-a_b", "main", 2),
        Tag("on-branch", "dev/x", 1),
        Tag("loose", "main", number & (2**63 - 1)),
    }


def test_main_can_be_spelled_out() -> None:
    data = json.dumps({"branch": "main", "version": 3}).encode()
    assert parse_ref("_refs/tags/x.json", data) == Tag("x", "main", 3)


@pytest.mark.parametrize("path", ["_refs/tags/x.txt", "_refs/odd.json", "_refs/tags/.tmp1"])
def test_what_is_no_ref_is_ignored(path: str) -> None:
    assert parse_ref(path, b"{}") is None


@pytest.mark.parametrize("path", ["_refs/tags/x.json", "_refs/branches/x.json"])
@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"version": "1", "parentVersion": "1"}',
     b'{"version": -1, "parentVersion": -1}', b'{"version": true, "parentVersion": true}',
     b'{"version": null, "parentVersion": null}', b'{"version": 1.5, "parentVersion": 1.5}'],
)  # fmt: skip
def test_unreadable_refs_stop_everything(path: str, data: bytes) -> None:
    with pytest.raises(Damaged):
        parse_ref(path, data)


AUTO = "lance.auto_cleanup."


@pytest.mark.parametrize(
    ("config", "head", "policy"),
    [
        ({}, 4, None),
        ({"older_than": "1d"}, 4, None),
        ({"interval": "3"}, 4, None),
        ({"interval": "2"}, 4, Policy(older_than=timedelta(0), on_tagged=OnTagged.KEEP)),
        ({"interval": "0", "retain_versions": "2"}, 5, Policy(keep=2, on_tagged=OnTagged.KEEP)),
        (
            {"interval": "1", "older_than": "14days", "retain_versions": "3"},
            5,
            Policy(older_than=timedelta(days=14), keep=3, on_tagged=OnTagged.KEEP),
        ),
    ],
)
def test_rules_of_a_branch(config: dict[str, str], head: int, policy: Policy | None) -> None:
    assert own_policy({AUTO + key: value for key, value in config.items()}, head) == policy


@pytest.mark.parametrize(
    "config",
    [{"interval": "x"}, {"interval": "1", "older_than": "soon"}, {"interval": "1", "retain_versions": "0"}],
)  # fmt: skip
def test_unreadable_rules_of_a_branch_stop_everything(config: dict[str, str]) -> None:
    with pytest.raises(Damaged):
        own_policy({AUTO + key: value for key, value in config.items()}, 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0), ("60s", 60), ("90m", 5400), ("36h", 129600), ("14d", 1209600), ("14days", 1209600),
     ("1h 30m", 5400), ("1h30m", 5400), (" 2 Weeks ", 1209600), ("1day 1sec", 86401)],
)  # fmt: skip
def test_durations_are_read(text: str, seconds: int) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "14",
        "d",
        "1x",
        "-1d",
        "1.5h",
        "1d,2h",
        "99999999999d",
        "1 d x",
        "\uff11d x",
        "1e3s",
    ],
)
def test_unclear_durations_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


@given(st.integers(0, 36500 * 86400))
def test_durations_survive_being_written(seconds: int) -> None:
    span = timedelta(seconds=seconds)
    assert parse_duration(format_duration(span)) == span


@given(st.text(max_size=12))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    with suppress(UsageError):
        assert parse_duration(text) >= timedelta(0)
