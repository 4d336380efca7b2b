"""What is there: the objects of every table, the decision on every version, the files in use.

The survey reads and never writes; it opens stores read-only.  Trouble with one table is
that table's: it is recorded as its error, and nothing of it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from lakewarden.errors import Damaged, ErrorKind, LakewardenError, NotFound, Refused
from lakewarden.formats.lance.layout import MANIFEST_PATH
from lakewarden.maintenance import fleet
from lakewarden.maintenance.fleet import Targets
from lakewarden.model import FileKind
from lakewarden.pipeline import history, listing, references
from lakewarden.pipeline.frames import (
    NOTE_BASE,
    NOTE_ERROR,
    NOTE_LEFTOVER,
    NOTE_REQUESTS,
    NOTE_WARNING,
    Opening,
    ReadStores,
    Root,
    data_rows,
    from_text,
    notes,
    pin,
)
from lakewarden.pipeline.history import Retention
from lakewarden.pipeline.listing import Unit
from lakewarden.storage.location import Location
from lakewarden.world import Clock

Progress = Callable[[str, str], None]


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


@dataclass(slots=True)
class Costs:
    """Requests by kind and seconds by stage, added up while work goes on."""

    requests: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add_requests(self, rows: Iterable[Sequence[Any]]) -> None:
        for kind, number in rows:
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
    objects: int = 0
    bytes: int = 0
    refs_mark: str = ""
    error: LakewardenError | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything a plan is made of.  Frames are pinned: reading them again gives the same rows."""

    tables: Sequence[TableState]
    roots: Sequence[Root]
    units: Sequence[Unit]
    objects: DataFrame
    versions: DataFrame
    references: DataFrame


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
    with costs.stage(reading, "decide", f"{len(roots)} tables"):
        versions = pin(_decided(objects, roots, scope, reading))
        noted = notes(versions)
        costs.add_requests((row.branch, row.version) for row in noted if row.note == NOTE_REQUESTS)
        states = _with_errors(states, errors_in(noted, "root_id", "reasons"))
        decided = data_rows(versions)
    with costs.stage(reading, "read versions"):
        must_open = decided.filter(F.col("must_open"))
        named = pin(
            references.references_of(must_open, roots, reading.opening, tasks=reading.tasks)
        )
        noted = notes(named)
        costs.add_requests((row.key, row.version) for row in noted if row.note == NOTE_REQUESTS)
        states = _with_unread(states, named, noted)
        bases = {(row.by_root, row.key, row.stem) for row in noted if row.note == NOTE_BASE}
        extra = _extra_bases(bases, roots, reading, costs) if bases else []
    if extra:
        with costs.stage(reading, "read extra bases"):
            users = [by_root for by_root, _, _ in bases]
            closed = decided.filter(F.col("root_id").isin(users) & ~F.col("kept"))
            beside = _beside([*roots, *extra], extra, closed, reading, costs)
            states = _with_errors(states, beside.errors)
            roots = [*roots, *extra]
            objects = objects.unionByName(beside.objects)
            named = named.unionByName(beside.named)
    everything = data_rows(named).unionByName(references.own_manifests(decided))
    return Survey(states, roots, units, data_rows(objects), decided, everything)


def list_tables(
    targets: Targets, reading: Reading, costs: Costs
) -> tuple[list[Unit], DataFrame, list[TableState]]:
    """List all targets and find the tables among the objects."""
    stores = ReadStores(reading.opening)
    units = fleet.units_of(targets, stores)
    above = fleet.tables_above((*targets.tables, *targets.directories), stores)
    costs.add_requests((kind.value, number) for kind, number in stores.requests().items())
    if targets.directories:
        listed, noted = list_fully(units, reading)
        places = discover(listed, units)
        roots = [Root(number, number, place) for number, place in enumerate(places)]
        objects = pin(listing.identify(data_rows(listed), units, roots))
    else:
        places = dict.fromkeys(targets.tables)
        roots = [Root(number, number, place) for number, place in enumerate(places)]
        objects, noted = list_fully(units, reading, roots)
    costs.add_requests((row.key, row.size) for row in noted if row.note == NOTE_REQUESTS)
    states = _states(objects, roots, targets, places)
    states = [_inside_another(state, above) for state in states]
    failed = errors_in(noted, "unit", "key")
    return units, objects, _with_listing_errors(states, units, failed)


def list_fully(
    units: Sequence[Unit], reading: Reading, roots: Sequence[Root] | None = None
) -> tuple[DataFrame, list[Row]]:
    """List units to the end, in one round or two; with `roots` say what each object is."""

    def known(listed: DataFrame) -> DataFrame:
        return pin(listed if roots is None else listing.identify(listed, units, roots))

    first = known(listing.list_units(reading.spark, units, reading.opening, tasks=reading.tasks))
    noted = notes(first)
    left = [(row.unit, row.key) for row in noted if row.note == NOTE_LEFTOVER]
    rest = listing.list_leftovers(reading.spark, units, left, reading.opening, tasks=reading.tasks)
    if rest is None:
        return first, noted
    second = known(rest)
    return first.unionByName(second), noted + notes(second)


def discover(listed: DataFrame, units: Sequence[Unit]) -> dict[Location, Location | None]:
    """Return the tables among listed objects; for each, another table inside it if there is one."""
    prefix = F.regexp_extract("key", MANIFEST_PATH, 1)
    rows = (
        data_rows(listed)
        .filter(F.col("key").rlike(MANIFEST_PATH))
        .select("unit", prefix.alias("prefix"))
        .distinct()
        .collect()
    )
    by_store: dict[Location, list[str]] = {}
    for unit, path in rows:
        by_store.setdefault(units[unit].place.store, []).append(path)
    found: dict[Location, Location | None] = {}
    for store, prefixes in by_store.items():
        tables, nested = fleet.outermost(prefixes)
        for path in tables:
            inner = nested.get(path)
            place = replace(store, path=path)
            found[place] = replace(store, path=inner) if inner is not None else None
    return dict(sorted(found.items()))


def _states(
    objects: DataFrame,
    roots: Sequence[Root],
    targets: Targets,
    nested: dict[Location, Location | None],
) -> list[TableState]:
    """Summarise each table and refuse what is none, or has another table inside."""
    another = F.regexp_extract("path", MANIFEST_PATH, 1)
    rows = (
        data_rows(objects)
        .groupBy("root_id")
        .agg(
            F.count(F.lit(1)).alias("objects"),
            F.sum("size").alias("bytes"),
            F.count_if(F.col("kind") == FileKind.MANIFEST.value).alias("manifests"),
            refs_mark().alias("refs_mark"),
            F.max(F.when((another != "") & ~F.col("path").startswith("tree/"), another)).alias(
                "nested"
            ),
        )
        .collect()
    )
    by_root = {row.root_id: row for row in rows}
    states = []
    for root in roots:
        row = by_root.get(root.root_id)
        inner = nested.get(root.location)
        if inner is None and row is not None and row.nested:
            inner = root.location.child(row.nested)
        state = TableState(root.table_id, root, targets.changes(root.location))
        if row is not None:
            state = replace(
                state, objects=row.objects, bytes=row.bytes or 0, refs_mark=row.refs_mark
            )
        states.append(replace(state, error=_not_a_table(root, row, inner)))
    return states


def refs_mark() -> Column:
    """Return an aggregate that changes whenever a tag or branch is made, moved or deleted."""
    ref = F.when(F.col("kind") == FileKind.REF.value, F.struct("path", "size", "modified_us"))
    return F.sha2(F.to_json(F.sort_array(F.collect_list(ref))), 256)


def _not_a_table(root: Root, row: Any, inner: Location | None) -> LakewardenError | None:
    place = root.location.uri
    if row is None:
        return NotFound(f"{place} does not exist or is empty; check the path and credentials")
    if inner is not None:
        return Refused(
            ErrorKind.LOCATION_OVERLAP,
            f"another table lies inside {place} ({inner.uri}), so its files could be taken for "
            "this table's; nothing goes: move one of them away",
        )
    if not row.manifests:
        return Damaged(
            ErrorKind.NOT_A_TABLE,
            f"{place} holds no Lance table (no _versions/*.manifest); name the table itself, or "
            "add --recursive for a directory of tables",
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
    marked = []
    for state in states:
        place = state.root.location
        for number, error in failed.items():
            unit = units[number]
            key = f"{place.path}/"
            inside = place == unit.place or (
                unit.place.contains(place)
                and (unit.after is None or key >= unit.after)
                and (unit.before is None or key < unit.before)
            )
            if inside:
                state = replace(state, error=error)  # noqa: PLW2901
        marked.append(state)
    if not marked:
        raise next(iter(failed.values()))
    return marked


def _decided(
    objects: DataFrame, roots: Sequence[Root], scope: Scope, reading: Reading
) -> DataFrame:
    data = data_rows(objects)
    found = history.versions_of(data)
    if scope.age_from_commit:
        found = history.commit_times(found, roots, reading.opening)
    everything = found.unionByName(history.refs_of(data, roots, reading.opening))
    policy = scope.retention.policy
    if policy is not None and policy.clean_referenced_branches:
        rules = history.branch_rules(history.versions_of(data), roots, reading.opening)
        everything = everything.unionByName(rules)
    return history.decisions(everything, scope.retention)


def _with_unread(
    states: list[TableState], named: DataFrame, noted: Sequence[Row]
) -> list[TableState]:
    """Record which tables could not be read, and hold back what those may need."""
    failed = errors_in(noted, "by_root", "key")
    if failed:
        seen = {row[0] for row in data_rows(named).select("by_root").distinct().collect()}
        uses: dict[int, set[str]] = {}
        for row in noted:
            if row.note == NOTE_BASE:
                uses.setdefault(row.by_root, set()).add(row.key)
        states = _with_errors(_block_sources(states, failed, seen, uses), failed)
    warned = errors_in(noted, "by_root", "key", NOTE_WARNING)
    return [
        replace(state, warnings=(warned[state.root.root_id].message,))
        if state.root.root_id in warned
        else state
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
    costs.add_requests((row.key, row.size) for row in noted if row.note == NOTE_REQUESTS)
    errors = {
        extra[number].table_id: error for number, error in errors_in(noted, "unit", "key").items()
    }
    named = pin(references.references_of(closed, roots, reading.opening, tasks=reading.tasks))
    noted = notes(named)
    costs.add_requests((row.key, row.version) for row in noted if row.note == NOTE_REQUESTS)
    return _Beside(objects, named, errors | errors_in(noted, "by_root", "key"))


def _block_sources(
    states: list[TableState],
    failed: dict[int, LakewardenError],
    seen: set[int],
    uses: dict[int, set[str]],
) -> list[TableState]:
    """Keep the files of tables that a table which could not be read may be a shallow clone of.

    A corrupt manifest can be read by nobody, so it needs nothing.  One that the store did not
    hand out may need files of any table, unless its neighbours show which places they use.
    """
    unread = {
        root_id
        for root_id, error in failed.items()
        if error.kind not in (ErrorKind.CORRUPT_MANIFEST, ErrorKind.UNSUPPORTED_FEATURE)
    }
    blocked = []
    for state in states:
        reason = next(
            (
                root_id
                for root_id in unread
                if root_id != state.root.root_id
                and (root_id not in seen or _uses(uses.get(root_id, set()), state.root.location))
            ),
            None,
        )
        if reason is not None and state.error is None:
            other = next(one for one in states if one.root.root_id == reason).root.location.uri
            state = replace(  # noqa: PLW2901
                state,
                error=Damaged(
                    ErrorKind.STORAGE,
                    f"{other} could not be read and may be a shallow clone that needs files of "
                    "this table; nothing goes: make it readable and run again, or name this table alone if you know better",
                ),
            )
        blocked.append(state)
    return blocked


def _uses(bases: set[str], place: Location) -> bool:
    for base in bases:
        try:
            source = Location.parse(base)
        except LakewardenError:
            return True
        if source == place or place.contains(source):
            return True
    return False


def _extra_bases(
    bases: Iterable[tuple[int, str, str]], roots: Sequence[Root], reading: Reading, costs: Costs
) -> list[Root]:
    """Return base paths that hold files of our tables but are no tables themselves."""
    stores = ReadStores(reading.opening)
    extra: dict[Location, Root] = {}
    for by_root, path, is_dataset_root in sorted(bases):
        try:
            place = Location.parse(path)
        except LakewardenError:
            # A place we cannot even name is not one we delete from.
            continue
        known = (*roots, *extra.values())
        if any(_overlap(place, root.location) for root in known):
            continue
        names, _ = stores(place).list_directory(place.path)
        # A table of its own (the source of a shallow clone) looks after its own files.
        if "_versions" not in names:
            plain = is_dataset_root != "True"
            table_id = roots[by_root].table_id
            extra[place] = Root(len(known), table_id, place, owned=False, plain=plain)
    costs.add_requests((kind.value, number) for kind, number in stores.requests().items())
    return list(extra.values())


def _overlap(one: Location, other: Location) -> bool:
    return one == other or one.contains(other) or other.contains(one)


def errors_in(
    noted: Iterable[Row], owner: str, text: str, note: str = NOTE_ERROR
) -> dict[int, LakewardenError]:
    """Return the errors among notes by their owner, one each."""
    return {row[owner]: from_text(row[text]) for row in noted if row.note == note}


def _with_errors(
    states: Iterable[TableState], errors: dict[int, LakewardenError]
) -> list[TableState]:
    return [
        state
        if state.error is not None or state.root.root_id not in errors
        else replace(state, error=errors[state.root.root_id])
        for state in states
    ]
