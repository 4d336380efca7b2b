"""What is there: the objects of every table, the decision on every version, the files in use.

The survey reads and never writes; it opens stores read-only.  Trouble with one table is
that table's: it is recorded as its error, and nothing of it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound, Refused
from lakewarden.formats.iceberg.paths import place
from lakewarden.maintenance import fleet
from lakewarden.maintenance.dependence import held_by
from lakewarden.maintenance.fleet import Targets
from lakewarden.pipeline import history, listing, references
from lakewarden.pipeline.frames import (
    NOTE_BASE,
    NOTE_ERROR,
    NOTE_LEFTOVER,
    NOTE_OPEN,
    NOTE_REQUESTS,
    NOTE_STEMS,
    NOTE_TABLE,
    NOTE_WARNING,
    Opening,
    ReadStores,
    Root,
    from_text,
    settle,
)
from lakewarden.pipeline.history import Retention
from lakewarden.pipeline.listing import Lister, State, Unit, states_in
from lakewarden.pipeline.metadata import Summary
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import Request
from lakewarden.world import Clock

if TYPE_CHECKING:
    from lakewarden.formats.iceberg.catalog import Lake, Pointer

Progress = Callable[[str, str], None]
#: Errors of versions whose needs are known, or that nobody can read.
_READ_ALL_THE_SAME = frozenset({ErrorKind.CORRUPT_MANIFEST, ErrorKind.LOCATION_OVERLAP})
#: Manifests to read that make it worth another task.
_VERSIONS_PER_TASK = 64


def silent(_stage: str, _detail: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read: through which session and stores, on how many tasks, telling whom."""

    spark: SparkSession
    opening: Opening
    clock: Clock
    tasks: int
    progress: Progress = silent
    #: The catalogs of Iceberg targets.
    lake: Lake | None = None


def with_credentials(reading: Reading, pointers: Iterable[Pointer]) -> Reading:
    """Return the reading with what catalogs hand out for single tables."""
    opener = reading.opening
    if not isinstance(opener, Opener):
        return reading
    scopes = dict(opener.scopes)
    for pointer in pointers:
        location = place(pointer.location) if pointer.location else None
        own = {k: v for k, v in pointer.options.items() if opener.options.get(k) != v}
        if location is not None and not location.is_local and own:
            scopes[location] = own
    return replace(reading, opening=replace(opener, scopes=scopes))


@dataclass(slots=True)
class Costs:
    """Requests by kind and seconds by stage, added up while work goes on."""

    requests: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add_requests(self, counted: Mapping[Request, int]) -> None:
        self._add((kind.value, number) for kind, number in counted.items())

    def add_noted(self, notes: Iterable[Row], name: str, number: str) -> None:
        """Count the requests that tasks have noted in two columns of their schema."""
        self._add((row[name], row[number]) for row in notes if row.note == NOTE_REQUESTS)

    def _add(self, counted: Iterable[tuple[str, int]]) -> None:
        for kind, number in counted:
            self.requests[kind] = self.requests.get(kind, 0) + number

    @contextmanager
    def stage(self, reading: Reading, name: str, detail: str = "") -> Iterator[None]:
        reading.progress(name, detail)
        started = reading.clock.elapsed()
        try:
            yield
        finally:
            spent = reading.clock.elapsed() - started
            self.seconds[name] = round(self.seconds.get(name, 0.0) + spent, 3)


@dataclass(frozen=True, slots=True)
class TableState:
    """One table as the listing shows it."""

    table_id: int
    root: Root
    changes: bool
    seen: State
    #: Other tables (by `table_id`) that hold files which versions of this one name.
    uses: frozenset[int] = frozenset()
    error: LakewardenError | None = None
    warnings: tuple[str, ...] = ()
    #: What the user calls it, where that is not its location.
    key: str = ""
    #: Of an Iceberg table: the metadata file that was read, and what it says.
    metadata_location: str | None = None
    summary: Summary | None = None

    @property
    def table_key(self) -> str:
        return self.key or self.root.location.uri


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything a plan is made of.  Frames are pinned: reading them again gives the same rows."""

    tables: Sequence[TableState]
    roots: Sequence[Root]
    units: Sequence[Unit]
    objects: DataFrame
    versions: DataFrame
    references: DataFrame
    #: Whether some references protect by name alone.
    stems: bool


@dataclass(frozen=True, slots=True)
class Scope:
    """What to survey, and how versions are decided."""

    targets: Targets
    retention: Retention
    age_from_commit: bool = False


def survey(scope: Scope, reading: Reading, costs: Costs) -> Survey:
    """Read the fleet.  Raises only if nothing at all can be done."""
    with costs.stage(reading, "list"):
        units, objects, states = list_tables(scope.targets, reading, costs)
    roots = [state.root for state in states]
    with costs.stage(reading, "decide", f"tables: {len(roots):,}"):
        refs = any(state.seen.refs_mark for state in states)
        scope = replace(scope, retention=_for_fleet(scope, states))
        decided, noted = settle(_decided(objects, roots, scope, reading, refs=refs))
        costs.add_noted(noted, "branch", "version")
        states = _with_errors(states, errors_in(noted, "root_id", "reasons"))
    with costs.stage(reading, "read versions"):
        must_open = decided.filter(F.col("must_open"))
        number = sum(row.version for row in noted if row.note == NOTE_OPEN)
        tasks = max(1, min(reading.tasks, number // _VERSIONS_PER_TASK))
        named, noted = settle(
            references.references_of(must_open, roots, reading.opening, tasks=tasks)
        )
        costs.add_noted(noted, "key", "version")
        bases = {(row.by_root, row.key, row.stem) for row in noted if row.note == NOTE_BASE}
        states = _with_unread(_with_uses(states, bases), noted)
        extra = _extra_bases(bases, roots, reading, costs) if bases else []
    if extra:
        with costs.stage(reading, "read extra bases"):
            users = [by_root for by_root, _, _ in bases]
            closed = decided.filter(F.col("root_id").isin(users) & ~F.col("kept"))
            beside = _beside([*roots, *extra], extra, closed, reading, costs)
            states = hold_back(states, beside.errors)
            roots = [*roots, *extra]
            objects = objects.unionByName(beside.objects)
            named = named.unionByName(beside.named)
    everything = named.unionByName(references.own_manifests(decided))
    stems = any(row.note == NOTE_STEMS for row in noted)
    return Survey(states, roots, units, objects, decided, everything, stems)


def list_tables(
    targets: Targets, reading: Reading, costs: Costs
) -> tuple[list[Unit], DataFrame, list[TableState]]:
    """List all targets and find the tables among the objects."""
    stores = ReadStores(reading.opening)
    units = fleet.units_of(targets, stores)
    above = fleet.tables_above((*targets.tables, *targets.directories), stores)
    costs.add_requests(stores.requests())
    nested: dict[Location, Location] = {}
    if targets.directories:
        listed, noted = list_fully(units, reading)
        places, nested = tables_in(noted, units)
        # A directory without any table is an error of its own, like a table that is none.
        places += [
            directory
            for directory in targets.directories
            if not any(directory == place or directory.contains(place) for place in places)
        ]
        # What was named counts, whether versions are there or not.
        places += [table for table in targets.tables if table not in places]
        roots = [Root(number, number, place) for number, place in enumerate(places)]
        objects, more = settle(listing.identify(listed, units, roots))
        noted += more
    else:
        roots = [Root(number, number, place) for number, place in enumerate(targets.tables)]
        objects, noted = list_fully(units, reading, roots)
    costs.add_noted(noted, "key", "size")
    failed = errors_in(noted, "unit", "key")
    seen = states_in(noted)
    states = []
    for root in roots:
        changes = targets.changes(root.location)
        state = TableState(root.table_id, root, changes, seen.get(root.root_id, State()))
        state = replace(state, error=_not_a_table(state, nested.get(root.location), targets))
        state = _inside_another(state, above)
        if state.error is not None and root.location in targets.protected:
            raise Refused(
                state.error.kind,
                f"the table to protect cannot be read, so nothing goes: {state.error.message}",
            )
        states.append(state)
    if failed and not states:
        raise next(iter(failed.values()))
    return units, objects, _with_listing_errors(states, units, failed)


def list_fully(
    units: Sequence[Unit],
    reading: Reading,
    roots: Sequence[Root] | None = None,
    cuts: Callable[[Unit], tuple[str, ...]] | None = None,
) -> tuple[DataFrame, list[Row]]:
    """List units to the end, in one round or two; with `roots` say what each object is.

    `cuts` is asked for keys at which to split a unit that turns out to be large.
    """
    lister = Lister(reading.spark, reading.opening, reading.tasks, roots)
    first, noted = settle(lister.first(units))
    large = [(row.unit, row.key) for row in noted if row.note == NOTE_LEFTOVER]
    if cuts is not None:
        left = {number for number, _ in large}
        units = [replace(u, cuts=cuts(u)) if n in left else u for n, u in enumerate(units)]
    rest = lister.rest(units, large)
    if rest is None:
        return first, noted
    second, more = settle(rest)
    return first.unionByName(second), noted + more


def tables_in(
    noted: Iterable[Row], units: Sequence[Unit]
) -> tuple[list[Location], dict[Location, Location]]:
    """Return the tables that were listed, and those among them that have another one inside."""
    by_store: dict[Location, list[str]] = {}
    for row in noted:
        if row.note == NOTE_TABLE:
            by_store.setdefault(units[row.unit].place.store, []).append(row.key)
    places: list[Location] = []
    nested: dict[Location, Location] = {}
    for store, prefixes in by_store.items():
        outer, inner = fleet.outermost(prefixes)
        places += [replace(store, path=path) for path in outer]
        nested |= {replace(store, path=o): replace(store, path=i) for o, i in inner.items()}
    return sorted(places), nested


def in_warehouse(place: Location) -> Refused:
    """Say that a table is not to be cleaned on its own."""
    return Refused(
        ErrorKind.IN_WAREHOUSE,
        f"{place.uri} belongs to a warehouse, and only its log knows which versions and files tags, "
        "branches and restores need; nothing goes: clean the warehouse (lakewarden cleanup WAREHOUSE), or "
        "leave the table out (--exclude)",
    )


def _not_a_table(
    state: TableState, nested: Location | None, targets: Targets
) -> LakewardenError | None:
    place = state.root.location
    pins = (targets.pins or {}).get(place)
    if pins is not None and pins.purged:
        # Whatever is there goes, a version or not.
        return None
    if not state.seen.objects:
        advice = "check the path" if place.is_local else "check the path and the credentials"
        return NotFound(f"{place.uri} does not exist or is empty; {advice}")
    if not state.seen.manifests and state.seen.nested:
        return Damaged(
            ErrorKind.NOT_A_TABLE,
            f"{place.uri} is no table but holds some; add --recursive to take every table below",
        )
    if state.seen.kept and pins is None:
        return in_warehouse(place)
    if state.seen.nested:
        nested = replace(place, path=state.root.key(state.seen.nested))
    if nested is not None:
        return Refused(
            ErrorKind.LOCATION_OVERLAP,
            f"another table lies inside {place.uri} ({nested.uri}), so its files could be taken for "
            "this table's; nothing goes: move one of them away",
        )
    if not state.seen.manifests:
        return Damaged(
            ErrorKind.NOT_A_TABLE,
            f"{place.uri} holds no Lance table (no _versions/*.manifest); name a table, or with "
            "--recursive a directory of tables",
        )
    return None


def _inside_another(state: TableState, above: dict[Location, Location]) -> TableState:
    outer = next(
        (
            owner
            for place, owner in above.items()
            if place == state.root.location or place.contains(state.root.location)
        ),
        None,
    )
    if outer is None or state.error is not None:
        return state
    return replace(
        state,
        error=Refused(
            ErrorKind.LOCATION_OVERLAP,
            f"{state.root.location.uri} lies inside the table {outer.uri} (perhaps one of its "
            "branches), whose versions may need its files; nothing goes: name the outer table",
        ),
    )


def _with_listing_errors(
    states: list[TableState], units: Sequence[Unit], failed: dict[int, LakewardenError]
) -> list[TableState]:
    """A table whose listing failed, wholly or in part, keeps everything."""
    if not failed:
        return states
    marked: list[TableState] = []
    for state in states:
        covers = (e for number, e in failed.items() if units[number].covers(state.root.location))
        marked.append(replace(state, error=next(covers, state.error)))
    # What could not be listed may be a shallow clone of any other table; what is not there is none.
    unlisted = [one for one in failed.values() if one.kind is not ErrorKind.NOT_FOUND]
    if not unlisted:
        return marked
    blocked = Damaged(
        unlisted[0].kind,
        "another target could not be listed and may hold shallow clones of this table; nothing "
        f"goes: mend that first ({unlisted[0].message})",
    )
    return [state if state.error is not None else replace(state, error=blocked) for state in marked]


def _decided(
    objects: DataFrame, roots: Sequence[Root], scope: Scope, reading: Reading, *, refs: bool
) -> DataFrame:
    found = history.versions_of(objects)
    if scope.age_from_commit:
        found = history.commit_times(found, roots, reading.opening)
    everything = found
    if refs:
        everything = found.unionByName(history.refs_of(objects, roots, reading.opening))
    policy = scope.retention.policy
    if policy is not None and policy.clean_referenced_branches:
        rules = history.branch_rules(history.versions_of(objects), roots, reading.opening)
        everything = everything.unionByName(rules)
    return history.decisions(everything, scope.retention)


def _for_fleet(scope: Scope, states: Sequence[TableState]) -> Retention:
    """Keep all versions of tables that will not be changed: what they need stays needed."""
    unchanged = frozenset(
        state.root.root_id for state in states if not state.changes or state.error is not None
    )
    known = scope.targets.pins or {}
    pins = {
        state.root.root_id: known[state.root.location]
        for state in states
        if state.root.location in known
    }
    return replace(scope.retention, unchanged=unchanged, pins=pins)


def _with_uses(states: list[TableState], bases: Iterable[tuple[int, str, str]]) -> list[TableState]:
    """Record which other tables hold, or share a place with, files that a table's versions name."""
    places: dict[int, set[Location | None]] = {}
    for by_root, path, _ in bases:
        places.setdefault(by_root, set()).add(Location.parse_absolute(path))

    def uses(one: TableState, other: TableState) -> bool:
        theirs = {other.root.location, *places.get(other.root.root_id, ())}
        # A place that cannot be told may be any.
        return any(
            place is None or there is None or _overlap(place, there)
            for place in places.get(one.root.root_id, ())
            for there in theirs
        )

    return [
        state
        if state.root.root_id not in places
        else replace(
            state,
            uses=frozenset(
                other.table_id for other in states if other is not state and uses(state, other)
            ),
        )
        for state in states
    ]


def _with_unread(states: list[TableState], noted: Sequence[Row]) -> list[TableState]:
    """Record which tables could not be read, and hold back what those may need."""
    failed = errors_in(noted, "by_root", "key")
    # What the store did not hand out, or only a newer release can read, may be a shallow clone of
    # any table.  What is corrupt is read by nobody; the versions beside it show what they use.
    blind = {
        row.by_root
        for row in noted
        if row.note == NOTE_ERROR and from_text(row.key).kind not in _READ_ALL_THE_SAME
    }
    everyone = frozenset(state.table_id for state in states)
    states = [
        replace(state, uses=everyone) if state.root.root_id in blind else state for state in states
    ]
    states = hold_back(states, failed)
    warned = errors_in(noted, "by_root", "key", NOTE_WARNING)
    return [
        replace(state, warnings=(warned[state.root.root_id].message,))
        if state.root.root_id in warned
        else state
        for state in states
    ]


def hold_back(
    states: Sequence[TableState], errors: Mapping[int, LakewardenError]
) -> list[TableState]:
    """Record errors by root, and keep the files of tables that those tables use."""
    states = _with_errors(states, errors)
    keys = {state.table_id: state.table_key for state in states}
    stopped = [state.table_id for state in states if state.root.root_id in errors]
    held = held_by(stopped, {state.table_id: state.uses for state in states})
    return [
        state
        if state.error is not None or state.table_id not in held
        else replace(
            state,
            error=Damaged(
                ErrorKind.STORAGE,
                f"{keys[held[state.table_id]]} is in trouble and uses, or may use, files of this "
                "table as a shallow clone does; nothing goes: mend that one first",
            ),
        )
        for state in states
    ]


@dataclass(frozen=True, slots=True)
class _Beside:
    """What extra base paths hold, and what closed versions name there."""

    objects: DataFrame
    named: DataFrame
    errors: dict[int, LakewardenError]


def _beside(
    roots: Sequence[Root], extra: Sequence[Root], closed: DataFrame, reading: Reading, costs: Costs
) -> _Beside:
    """List extra bases, and open the versions the cost rule left closed: they may name files there."""
    units = [Unit(root.location) for root in extra]
    objects, noted = list_fully(units, reading, roots)
    costs.add_noted(noted, "key", "size")
    errors = {
        extra[number].table_id: error for number, error in errors_in(noted, "unit", "key").items()
    }
    named, noted = settle(
        references.references_of(closed, roots, reading.opening, tasks=reading.tasks)
    )
    costs.add_noted(noted, "key", "version")
    return _Beside(objects, named, errors | errors_in(noted, "by_root", "key"))


def _extra_bases(
    bases: Iterable[tuple[int, str, str]], roots: Sequence[Root], reading: Reading, costs: Costs
) -> list[Root]:
    """Return base paths that hold files of our tables but are no tables themselves.

    A shallow clone names the extra bases of its source, which looks after them; so a table that
    takes files from another table has no extra bases of its own here.
    """
    stores = ReadStores(reading.opening)
    found: list[tuple[int, Location, bool]] = []
    clones: set[int] = set()
    for by_root, path, is_dataset_root in sorted(bases):
        place = Location.parse_absolute(path)
        if place is None or _overlap(place, roots[by_root].location):
            continue
        try:
            names, objects = stores(place).list_directory(place.path)
        except LakewardenError:
            # Nothing is deleted from a place we cannot look at.
            continue
        # A table of its own, or one that was here and is gone.
        gone = is_dataset_root == "True" and not names and not objects
        if gone or "_versions" in names or any(_overlap(place, one.location) for one in roots):
            clones.add(by_root)
        else:
            found.append((by_root, place, is_dataset_root != "True"))
    extra: dict[Location, Root] = {}
    for by_root, place, plain in found:
        if by_root not in clones and not any(_overlap(place, other) for other in extra):
            number = len(roots) + len(extra)
            extra[place] = Root(number, roots[by_root].table_id, place, owned=False, plain=plain)
    costs.add_requests(stores.requests())
    return list(extra.values())


def _overlap(one: Location, other: Location) -> bool:
    return one == other or one.contains(other) or other.contains(one)


def errors_in(
    noted: Iterable[Row], owner: str, text: str, note: str = NOTE_ERROR
) -> dict[int, LakewardenError]:
    """Return the errors among notes by their owner, one each."""
    return {row[owner]: from_text(row[text]) for row in noted if row.note == note}


def _with_errors(
    states: Iterable[TableState], errors: Mapping[int, LakewardenError]
) -> list[TableState]:
    return [
        state
        if state.error is not None or state.root.root_id not in errors
        else replace(state, error=errors[state.root.root_id])
        for state in states
    ]
