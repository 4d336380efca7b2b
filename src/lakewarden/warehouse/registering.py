"""Lance tables that are there already, and those that a warehouse lets go.

The files of a table that was registered, or that was let go, are not the warehouse's: the record says
`external`: it is cleaned while it is in the warehouse, and its files stay when it is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from lakewarden.errors import Conflict, ErrorKind, NotFound, Refused
from lakewarden.model import WAREHOUSE_MARK, Format
from lakewarden.storage.location import Location
from lakewarden.warehouse import forks
from lakewarden.warehouse.manifest import MAIN, Change, Name, Operation, Pin, Table
from lakewarden.warehouse.warehouse import View, Warehouse


def register(
    warehouse: Warehouse, view: View, name: Name, location: str, properties: Mapping[str, str]
) -> Table:
    """Make a Lance table that lies somewhere one of the warehouse, with its newest version."""
    place = Location.parse(location)
    pin = head_of(warehouse, place)
    _check_free(warehouse, place)
    _check_forks(warehouse, view, place)
    known = _let_go(view, place)
    if known is not None:
        # The same table again: it goes on where it was, under the id that older versions know.
        table = replace(known, name=warehouse.new_table(view, name, Format.LANCE).name)
        change = Change(Operation.UNDROP, table.id, after=pin, name=table.name)
    else:
        table = warehouse.new_table(view, name, Format.LANCE, location=location)
        table = replace(table, properties=dict(properties), external=True)
        change = Change(Operation.CREATE, table.id, after=pin, name=table.name, made=table)
    warehouse.mark(table)
    warehouse.commit([change], branch=view.branch, message=f"register {'.'.join(name)}")
    return table


def head_of(warehouse: Warehouse, place: Location) -> Pin:
    """Return the newest version of a Lance table, or raise NotFound."""
    newest = Pin(0, "")
    for batch in warehouse.opener(place).list(f"{place.key}/_versions"):
        for key in batch.column("key").to_pylist():
            last = key.rpartition("/")[2]
            version = forks.version(last)
            if version is not None and version > newest.version:
                newest = Pin(version, f"_versions/{last}")
    if not newest.version:
        raise NotFound(f"there is no Lance table in {place.uri}; give the directory of one")
    return newest


def _let_go(view: View, place: Location) -> Table | None:
    """Return the table that lay there once and was let go, to be taken back."""
    if view.branch != MAIN:
        return None
    for one in view.manifest.tables.values():
        gone = one.external and one.dropped is not None and one.branch == MAIN
        if gone and Location.parse(one.location) == place:
            return one
    return None


def _check_free(warehouse: Warehouse, place: Location) -> None:
    """Raise if the table belongs to another warehouse."""
    mark = place.child(WAREHOUSE_MARK)
    try:
        owner = json.loads(warehouse.opener(mark).get(mark.key)).get("warehouse")
    except NotFound:
        return
    except (ValueError, AttributeError):
        owner = "one that cannot be read"
    if owner != warehouse.location.uri:
        raise Refused(
            ErrorKind.LOCATION_OVERLAP,
            f"{place.uri} is a table of another warehouse ({owner}); deregister it there first",
        )


def _check_forks(warehouse: Warehouse, view: View, place: Location) -> None:
    """Raise if another warehouse has left forks that branches to come would take for theirs."""
    directories, _ = warehouse.opener(place).list_directory(f"{place.key}/tree")
    numbers = [forks.number(one.rstrip("/").rpartition("/")[2]) for one in directories]
    ahead = [one for one in numbers if one is not None and one > view.version]
    if ahead:
        raise Refused(
            ErrorKind.LOCATION_OVERLAP,
            f"{place.uri} has a branch lakewarden-{ahead[0]} of another warehouse, which one to come "
            "would take for its own; delete it with Lance first: dataset.branches.delete",
        )


def letting_go(warehouse: Warehouse, view: View, name: Name) -> tuple[Table, Change]:
    """Return the change that takes a table out of the warehouse and leaves its files for ever."""
    table = view.table(name)
    for branch in view.manifest.branches:
        if branch != MAIN and table.id in warehouse.view(view.manifest, branch).pins:
            raise Conflict(
                ErrorKind.CONFLICT,
                f"branch {branch} still has {'.'.join(name)}; drop it there first, or delete the "
                "branch",
            )
    if view.branch != MAIN:
        raise Refused(ErrorKind.UNSUPPORTED_FEATURE, "a table is let go on main")
    pin = view.pins.get(table.id)
    return table, Change(Operation.DROP, table.id, before=pin, external=True)
