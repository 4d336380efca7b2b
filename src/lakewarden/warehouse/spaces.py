"""Namespaces of a warehouse, for clients of both formats.

A namespace is there if a table is in it or in one below, or if somebody has made it: then it is a
setting of the warehouse, with its properties as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lakewarden.warehouse.manifest import Name
from lakewarden.warehouse.warehouse import View

_NAMESPACE = "namespace:"


def all_of(view: View) -> set[Name]:
    """Return every namespace, without the root."""
    named = {
        tuple(key.removeprefix(_NAMESPACE).split("."))
        for key in view.manifest.properties
        if key.startswith(_NAMESPACE)
    }
    named |= {one.name[:-1] for one in view.tables()}
    return {space[:end] for space in named for end in range(1, len(space) + 1)}


def exists(view: View, space: Name) -> bool:
    """Tell whether there is a namespace; the root always is."""
    return not space or space in all_of(view)


def is_empty(view: View, space: Name) -> bool:
    """Tell whether no table and no other namespace is in a namespace."""
    below = [one for one in all_of(view) if one != space and one[: len(space)] == space]
    return not below and all(one.name[:-1] != space for one in view.tables())


def properties(view: View, space: Name) -> dict[str, str]:
    told = view.manifest.properties.get(_key(space))
    return dict(json.loads(told)) if told else {}


def setting(space: Name, given: Mapping[str, Any] | None) -> dict[str, str | None]:
    """Return the setting that makes a namespace, or with None takes it away."""
    told = None if given is None else json.dumps(dict(given), sort_keys=True)
    return {_key(space): told}


def _key(space: Name) -> str:
    return f"{_NAMESPACE}{'.'.join(space)}"
