"""Which tables an operation is about, and that none of them overlap.

A target is a table, or with `recursive` a directory of tables.  A directory is listed flat, in
pages of a thousand objects, so small tables share requests instead of costing some each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lakewarden.errors import ErrorKind, LakewardenError, Refused, UsageError
from lakewarden.expiry import Held
from lakewarden.formats.iceberg.paths import Equality
from lakewarden.formats.iceberg.target import SCHEME, CatalogTarget
from lakewarden.model import Guard, PrefixMismatch
from lakewarden.pipeline.frames import ReadStores, concurrently
from lakewarden.pipeline.listing import Unit
from lakewarden.retention import Pins
from lakewarden.storage.location import Location

if TYPE_CHECKING:
    from lakewarden.formats.iceberg.catalog import Lake, Pointer
    from lakewarden.pipeline.metadata import Summary

#: Ranges a directory of tables is listed in; more of them list in parallel, each costs a page.
_RANGES_PER_DIRECTORY = 16
#: Small tables that share a range at least: together they fill a page or so.
_TABLES_PER_RANGE = 16


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A table of a catalog in which no target is: it may lie at the same place, or be the same."""

    table: CatalogTarget
    pointer: Pointer
    #: None if its metadata cannot be read.
    summary: Summary | None = None


@dataclass(frozen=True, slots=True)
class IcebergTargets:
    """Iceberg tables an operation is about."""

    tables: tuple[CatalogTarget, ...] = ()
    #: Read for what they need, but not changed.
    protected: tuple[CatalogTarget, ...] = ()
    #: Patterns of names to leave alone.
    exclude: tuple[str, ...] = ()
    guard: Guard = Guard.CATALOG
    equality: Equality = field(default_factory=Equality)
    prefix_mismatch: PrefixMismatch = PrefixMismatch.ERROR
    #: A listing of the bucket that is used instead of LIST requests.
    inventory: str | None = None
    #: Only files below this place count as orphans.
    below: str | None = None
    #: Of tables that belong to the warehouse which is cleaned: what its log says is needed.
    held: Mapping[CatalogTarget, Held] | None = None
    #: Tables among those that stay as they are.
    unchanged: frozenset[CatalogTarget] = frozenset()
    #: Tables of other catalogs that are known.
    beside: tuple[Neighbour, ...] = ()

    def storage_options(self, lake: Lake | None) -> dict[str, str]:
        """Return what the catalogs say about reaching their tables' files."""
        if lake is None:
            return {}
        names = dict.fromkeys(table.catalog for table in (*self.tables, *self.protected))
        return {k: v for name in names for k, v in lake.storage_options(name).items()}

    def changes(self, table: CatalogTarget) -> bool:
        if table in self.protected or table in self.unchanged:
            return False
        return not any(
            fnmatch(table.uri, pattern) or fnmatch(table.parts[-1], pattern)
            for pattern in self.exclude
        )


@dataclass(frozen=True, slots=True)
class Targets:
    """What the user named."""

    tables: tuple[Location, ...]
    #: Directories in which every table counts.
    directories: tuple[Location, ...] = ()
    #: Tables that are read for what they need, but not changed.
    protected: tuple[Location, ...] = ()
    #: Patterns of table locations to leave alone; still read for what they need.
    exclude: tuple[str, ...] = ()
    iceberg: IcebergTargets = field(default_factory=IcebergTargets)
    #: Of tables that belong to the warehouse which is cleaned: what its log says is needed.
    pins: Mapping[Location, Pins] | None = None
    #: Tables among those that stay as they are.
    unchanged: frozenset[Location] = frozenset()
    #: The only tables that may change; the others are read for what they need.  None: all may.
    only: frozenset[Location] | None = None

    def changes(self, table: Location) -> bool:
        """Tell whether the operation may change this table."""
        if table in self.unchanged or (self.only is not None and table not in self.only):
            return False
        if any(table == place or place.contains(table) for place in self.protected):
            return False
        return not any(
            fnmatch(table.uri, pattern) or fnmatch(table.path.rpartition("/")[2], pattern)
            for pattern in self.exclude
        )


def open_lake(
    properties: Mapping[str, str] | None = None, opened: Mapping[str, Any] | None = None
) -> Lake:
    """Return the catalogs of PyIceberg's configuration, with further settings for each.

    `opened` are catalogs that the caller has open already, by name.
    """
    try:
        from lakewarden.formats.iceberg.catalog import Lake  # noqa: PLC0415  # loads PyIceberg
    except ImportError as error:
        raise UsageError(
            ErrorKind.CATALOG,
            f"Iceberg tables need PyIceberg, which does not load ({error}); "
            "pip install 'pyiceberg[sql-sqlite]', or with the extra for your catalog",
        ) from error
    return Lake(properties, opened)


def parse_targets(
    targets: Sequence[str],
    *,
    recursive: bool = False,
    protect: Sequence[str] = (),
    exclude: Sequence[str] = (),
    iceberg: IcebergTargets | None = None,
) -> Targets:
    """Normalise what the user wrote.  The same place in two spellings counts once.

    `iceberg` carries the settings for targets in catalogs.
    """
    if not targets:
        raise UsageError(
            ErrorKind.USAGE, "no target given; name a table, or a directory with --recursive"
        )
    in_catalogs = replace(
        iceberg or IcebergTargets(),
        tables=_named(targets, in_catalogs=True),
        protected=_named(protect, in_catalogs=True),
        exclude=tuple(exclude),
    )
    if in_catalogs.protected and not in_catalogs.tables:
        raise UsageError(
            ErrorKind.USAGE,
            "--protect names an Iceberg table, but no target is one; Lance tables do not share "
            "files with it",
        )
    places, protected = _named(targets, in_catalogs=False), _named(protect, in_catalogs=False)
    if recursive:
        return Targets((), (*places, *protected), protected, tuple(exclude), in_catalogs)
    tables = (*places, *(p for p in protected if p not in places))
    return Targets(tables, (), protected, tuple(exclude), in_catalogs)


def targets_of(keys: Sequence[str]) -> Targets:
    """Return the tables that a plan names."""
    return Targets(
        _named(keys, in_catalogs=False),
        iceberg=IcebergTargets(_named(keys, in_catalogs=True)),
    )


def _named(targets: Sequence[str], *, in_catalogs: bool) -> tuple[Any, ...]:
    parse = CatalogTarget.parse if in_catalogs else Location.parse
    mine = [target for target in targets if target.lower().startswith(SCHEME) is in_catalogs]
    return tuple(dict.fromkeys(parse(target) for target in mine))


def refuse_overlaps(places: Iterable[Location]) -> None:
    """Refuse targets that lie inside each other: a file would have two owners."""
    ordered = sorted(places, key=lambda place: (place.scheme, place.authority, f"{place.path}/"))
    for outer, inner in pairwise(ordered):
        if outer.contains(inner):
            raise Refused(
                ErrorKind.LOCATION_OVERLAP,
                f"{inner.uri} lies inside {outer.uri}, so a file could belong to both; nothing was "
                "touched: name only one of them",
            )


def units_of(targets: Targets, stores: ReadStores) -> list[Unit]:
    """Return the flat listings that cover all targets."""
    refuse_overlaps((*targets.tables, *targets.directories))
    units = [Unit(place) for place in targets.tables]
    for directory in targets.directories:
        units += _ranges(directory, stores)
    return units


def _ranges(directory: Location, stores: ReadStores) -> list[Unit]:
    """Cut a directory between its subdirectories into ranges of about equal number."""
    names, _ = stores(directory).list_directory(directory.path)
    prefix = f"{directory.path}/" if directory.path else ""
    if "_versions" in names or not names:
        return [Unit(directory)]
    ordered = sorted(f"{prefix}{name}/" for name in names)
    size = -(-len(ordered) // _RANGES_PER_DIRECTORY)
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    # Each range ends where the next begins, so that a table made later is in one of them, too.
    cuts = [None, *(group[0] for group in groups[1:]), None]
    return [
        Unit(directory, after, before, tuple(name[:-1] for name in group))
        for group, (after, before) in zip(groups, pairwise(cuts), strict=True)
    ]


def ranges(parent: Location, inside: Iterable[str]) -> list[Unit]:
    """Cut a directory into ranges that cover the given tables in it, by their paths."""
    ordered = sorted(f"{path}/" for path in inside)
    size = max(_TABLES_PER_RANGE, -(-len(ordered) // _RANGES_PER_DIRECTORY))
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    # "0" is the character after "/": all keys of the last table come before it.
    return [
        Unit(parent, group[0], f"{group[-1][:-1]}0", tuple(path[:-1] for path in group))
        for group in groups
    ]


def outermost(prefixes: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Tell tables from their branches among all directories that hold versions.

    Returns the tables' paths, and for each table that has another table inside, that other one.
    """
    tables: list[str] = []
    nested: dict[str, str] = {}
    for prefix in sorted(set(prefixes), key=lambda path: f"{path}/" if path else ""):
        outer = tables[-1] if tables else None
        if outer is not None and (outer == "" or prefix.startswith(f"{outer}/")):
            below = prefix[len(outer) :].lstrip("/")
            if not below.startswith("tree/"):
                nested.setdefault(outer, prefix)
        else:
            tables.append(prefix)
    return tables, nested


def tables_above(places: Iterable[Location], stores: ReadStores) -> dict[Location, Location]:
    """Return, for each place that lies inside a table, that table (a branch is no table)."""
    chains = {place: _ancestors(place) for place in places}
    distinct = list(dict.fromkeys(above for chain in chains.values() for above in chain))
    holds = dict(
        zip(distinct, concurrently(lambda above: _is_table(above, stores), distinct), strict=True)
    )
    found: dict[Location, Location] = {}
    for place, chain in chains.items():
        owner = next((above for above in chain if holds[above]), None)
        if owner is not None:
            found[place] = owner
    return found


def _ancestors(place: Location) -> list[Location]:
    chain = []
    while place.path:
        place = place.parent
        chain.append(place)
    return chain


def _is_table(place: Location, stores: ReadStores) -> bool:
    prefix = f"{place.path}/_versions" if place.path else "_versions"
    try:
        return any(batch.num_rows for batch in stores(place).list(prefix))
    except LakewardenError as error:
        if error.kind is ErrorKind.ACCESS_DENIED:
            # Credentials often reach only the table itself; what we may not see we cannot delete.
            return False
        if error.kind is ErrorKind.NOT_FOUND:
            # A bucket that is not there holds no table; listing the target will say so.
            return False
        raise
