"""Tags and branches of a Lance table: one small JSON object each, under `_refs/`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from urllib.parse import unquote

from lakewarden.errors import Damaged, ErrorKind, LakewardenError
from lakewarden.model import MAIN, parse_duration
from lakewarden.retention import Branch, OnTagged, Policy, Tag

TAGS = "_refs/tags/"
BRANCHES = "_refs/branches/"


#: What object stores and editors leave behind; no ref of Lance is called like this.
_LEFTOVER = re.compile(r".*(?:/\.tmp[^/]*|#\d+|~)", re.DOTALL)


def check_path(path: str) -> None:
    """Refuse what protects in a way that is not known here.  Raises Damaged."""
    if "/" not in path:
        raise Damaged(
            ErrorKind.UNSUPPORTED_FEATURE,
            f"{path} is no directory but a link or a file; links are not followed, so what lies "
            "behind is unknown and nothing goes: put the directory itself in its place",
        )
    known = path.startswith((TAGS, BRANCHES)) and path.endswith(".json")
    if path.startswith("_refs/") and not known and not _LEFTOVER.fullmatch(path):
        raise Damaged(
            ErrorKind.UNSUPPORTED_FEATURE,
            f"{path} is a kind of ref this release does not know; what it protects is unknown, so "
            "nothing goes: upgrade lakewarden, or move that file away",
        )


def parse_ref(path: str, data: bytes) -> Tag | Branch | None:
    """Read the ref stored at `path`; None if the path is no ref.  Raises Damaged if unreadable."""
    if not path.endswith(".json"):
        return None
    try:
        if path.startswith(TAGS):
            content = json.loads(data)
            name = path[len(TAGS) : -len(".json")]
            return Tag(name, content.get("branch") or MAIN, _number(content["version"]))
        if path.startswith(BRANCHES):
            content = json.loads(data)
            name = unquote(path[len(BRANCHES) : -len(".json")])
            return Branch(
                name, content.get("parentBranch") or MAIN, _number(content["parentVersion"])
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(
            ErrorKind.DAMAGED_REF,
            f"{path} cannot be read as a ref ({type(error).__name__}: {error}); what it protects "
            "is unknown, so nothing goes: repair or delete that file, then run again",
        ) from error
    return None


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is no version number")
    return value & ~(1 << 63)


def own_policy(config: Mapping[str, str], head: int) -> Policy | None:
    """Return the cleanup rules a branch carries in its configuration (`lance.auto_cleanup.*`).

    None if it carries none, or if its head is not at a multiple of the interval: then a cascade
    leaves the branch alone, as Lance does.
    """
    keys = {
        name: config[f"lance.auto_cleanup.{name}"]
        for name in ("interval", "older_than", "retain_versions")
        if f"lance.auto_cleanup.{name}" in config
    }
    try:
        interval = int(keys["interval"]) if "interval" in keys else None
        if interval is None or (interval and head % interval):
            return None
        older_than = parse_duration(keys["older_than"]) if "older_than" in keys else None
        keep = int(keys["retain_versions"]) if "retain_versions" in keys else None
        if older_than is None and keep is None:
            older_than = timedelta(0)
        return Policy(older_than=older_than, keep=keep, on_tagged=OnTagged.KEEP)
    except (ValueError, LakewardenError) as error:
        raise Damaged(
            ErrorKind.DAMAGED_REF,
            f"the branch's lance.auto_cleanup configuration cannot be read ({error}); "
            "nothing goes: correct it, or run without --clean-referenced-branches",
        ) from error
