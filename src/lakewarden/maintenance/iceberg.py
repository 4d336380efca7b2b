"""What is there of Iceberg tables: snapshots with their decisions, and the files they name.

Expiry lists nothing: what goes is what going snapshots name and no kept one does.  The lists of
going snapshots are opened first, together with those of their neighbours; only if something seems
to go are the lists of all kept snapshots opened, and the manifests that could still name it.
Removal of orphans opens every list and every manifest once and compares with a listing, or with an
inventory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from lakewarden.errors import ErrorKind, LakewardenError, NotFound, Refused, UsageError
from lakewarden.expiry import Held
from lakewarden.formats.iceberg.paths import place
from lakewarden.formats.iceberg.target import CatalogTarget
from lakewarden.maintenance import fleet
from lakewarden.maintenance.fleet import IcebergTargets
from lakewarden.maintenance.survey import (
    Costs,
    Reading,
    Survey,
    TableState,
    errors_in,
    in_warehouse,
    list_fully,
    with_credentials,
)
from lakewarden.model import WAREHOUSE_MARK, FileKind, Format, Guard, PrefixMismatch
from lakewarden.pipeline import inventory, metadata, snapshots
from lakewarden.pipeline.frames import (
    DECISIONS,
    NOTE_BASE,
    NOTE_TABLE,
    NOTE_WARNING,
    OBJECTS,
    REFERENCES,
    ReadStores,
    Root,
    concurrently,
    frame,
    settle,
)
from lakewarden.pipeline.listing import State, Unit, states_in
from lakewarden.pipeline.metadata import (
    FIRST,
    SNAPSHOT,
    Rule,
    Source,
    Summary,
    summary_of,
)
from lakewarden.storage.location import Location

if TYPE_CHECKING:
    from lakewarden.formats.iceberg.catalog import Lake, Pointer

#: Lists or manifests that make it worth another task.
_OPENED_PER_TASK = 32
#: Catalogs are asked about so many tables at the same time.
_ASKED_TOGETHER = 8
#: Ranges that the listing of one large table is cut into.
_RANGES = 16
#: Tables in one directory from which on it is listed as a whole.
_SIBLINGS = 4


@dataclass(frozen=True, slots=True)
class _Found:
    """A table the catalog knows, with its place in the plan."""

    table_id: int
    table: CatalogTarget
    pointer: Pointer | None
    changes: bool
    protected: bool = False
    error: LakewardenError | None = None
    summary: Summary | None = None

    def but(self, error: LakewardenError | None) -> _Found:
        return self if self.error is not None or error is None else replace(self, error=error)


def survey_iceberg(
    targets: IcebergTargets, rule: Rule, reading: Reading, costs: Costs, *, first_id: int
) -> Survey:
    """Read the tables.  Trouble with one is that table's: it is recorded, and nothing of it goes."""
    with costs.stage(reading, "find tables"):
        found, others = _locate(targets, reading.lake or fleet.open_lake(), first_id)
        held = {one.table_id: (targets.held or {}).get(one.table) for one in found}
        reading = with_credentials(
            reading, [one.pointer for one in (*found, *others) if one.pointer]
        )
    with costs.stage(reading, "read metadata", f"tables: {len(found) + len(others):,}"):
        facts, known = _read_metadata(found, others, rule, reading, costs, held)
        # The log of a warehouse says what stays, so whatever else is found there may go.
        orphans = rule.policy is None or targets.held is not None
        _check_all_seen(known[len(found) :], orphans=orphans)
        beside = _beside(targets)
        overlapping = _overlaps([*known, *beside], orphans=orphans)
        found = [one.but(overlapping.get(one.table_id)) for one in known[: len(found)]]
        if not orphans:
            # A listing, where there is one, shows the mark.
            found = _without_kept(found, reading, costs)
        roots = _roots(found)
        if orphans and targets.guard is Guard.CATALOG:
            roots += _places_beside(found, [*known[len(found) :], *beside])
    work = _Work(targets, reading, costs, roots)
    return work.orphans(facts, found) if orphans else work.expiry(facts, found)


# -- which tables ----------------------------------------------------------------------------------


def _locate(
    targets: IcebergTargets, lake: Lake, first_id: int
) -> tuple[list[_Found], list[_Found]]:
    """Ask the catalogs for all targets, and for the tables beside them."""
    protected = {t for target in targets.protected for t in lake.tables(target)}
    named = [table for target in targets.tables for table in lake.tables(target)]
    names = list(dict.fromkeys([*named, *sorted(protected)]))
    scope = replace(targets, protected=tuple(protected))
    found = [
        _Found(first_id + number, table, pointer, scope.changes(table), table in protected, error)
        for number, (table, pointer, error) in enumerate(_pointers(lake, names))
    ]
    if targets.guard is Guard.TARGETS:
        return found, []
    catalogs = dict.fromkeys(name.catalog for name in names)
    known = set(names)
    rest = [t for name in catalogs for t in lake.tables(CatalogTarget(name)) if t not in known]
    first = first_id + len(found)
    others = [
        _Found(first + number, table, pointer, changes=False, error=error)
        for number, (table, pointer, error) in enumerate(_pointers(lake, rest))
    ]
    return found, [one for one in others if not isinstance(one.error, NotFound)]


def _beside(targets: IcebergTargets) -> list[_Found]:
    """Return tables of other catalogs, of which only the place counts: they have no number in a plan."""
    return [
        _Found(-1 - step, one.table, one.pointer, changes=False, summary=one.summary)
        for step, one in enumerate(targets.beside)
    ]


def _pointers(
    lake: Lake, tables: Sequence[CatalogTarget]
) -> Iterable[tuple[CatalogTarget, Pointer | None, LakewardenError | None]]:
    def locate(
        table: CatalogTarget,
    ) -> tuple[CatalogTarget, Pointer | None, LakewardenError | None]:
        try:
            return table, lake.locate(table), None
        except LakewardenError as error:
            return table, None, error

    return concurrently(locate, tables, _ASKED_TOGETHER)


def _read_metadata(
    found: Sequence[_Found],
    others: Sequence[_Found],
    rule: Rule,
    reading: Reading,
    costs: Costs,
    held: Mapping[int, Held | None],
) -> tuple[DataFrame, list[_Found]]:
    sources = [
        Source(
            one.table_id,
            one.pointer.metadata_location,
            one.changes,
            only_place=only_place,
            held=held.get(one.table_id),
        )
        for tables, only_place in ((found, False), (others, True))
        for one in tables
        if one.pointer is not None
    ]
    if not sources:
        return frame(reading.spark, metadata.FACTS, []), [*found, *others]
    facts, noted = settle(
        metadata.tables(reading.spark, sources, rule, reading.opening, tasks=reading.tasks)
    )
    costs.add_noted(noted, "text", "size")
    failed = errors_in(noted, "table_id", "text")
    summaries = {row.table_id: summary_of(row.text) for row in noted if row.note == NOTE_TABLE}
    known = [
        replace(one, summary=summaries.get(one.table_id)).but(failed.get(one.table_id))
        for one in (*found, *others)
    ]
    broken = next((one for one in known if one.protected and one.error), None)
    if broken is not None and broken.error is not None:
        raise _unprotectable(broken.error)
    return facts, known


def _check_all_seen(others: Sequence[_Found], *, orphans: bool) -> None:
    """Refuse to call files orphans while a table of the catalog does not say where it lies."""
    hidden = next((one for one in others if one.pointer is None), None)
    if orphans and hidden is not None and hidden.error is not None:
        raise Refused(
            hidden.error.kind,
            f"{hidden.table.uri} does not say where it lies ({hidden.error.message}), and it may share "
            "a place with a table that is cleaned; nothing goes: mend that, or pass --guard targets",
        )


def _unprotectable(error: LakewardenError) -> LakewardenError:
    return Refused(
        error.kind, f"the table to protect cannot be read, so nothing goes: {error.message}"
    )


@dataclass(frozen=True, slots=True)
class _Area:
    """A place where files of a table lie: its location, or one its writers are sent to."""

    location: Location
    table: _Found
    is_home: bool


def _areas(tables: Sequence[_Found]) -> list[_Area]:
    """Return the places of all tables that are known, outer ones first."""
    areas = []
    for one in tables:
        home = place(one.summary.location) if one.summary else _guessed_home(one)
        if home is None:
            continue
        areas.append(_Area(home, one, is_home=True))
        for uri in one.summary.places if one.summary else ():
            extra = place(uri)
            if extra is not None and extra != home and not home.contains(extra):
                areas.append(_Area(extra, one, is_home=False))
    return sorted(
        areas,
        key=lambda area: (area.location.store.uri, f"{area.location.path}/", not area.is_home),
    )


def _guessed_home(one: _Found) -> Location | None:
    """Return where a table whose metadata cannot be read seems to lie: above its metadata."""
    found = place(one.pointer.metadata_location) if one.pointer else None
    return None if found is None else found.parent.parent


def _pairs(areas: Sequence[_Area]) -> Iterator[tuple[_Area, _Area]]:
    """Yield areas of different tables that overlap, the outer one first."""
    above: list[_Area] = []
    for area in areas:
        above = [
            outer
            for outer in above
            if outer.location == area.location or outer.location.contains(area.location)
        ]
        yield from ((outer, area) for outer in above if outer.table is not area.table)
        above.append(area)


def _overlaps(tables: Sequence[_Found], *, orphans: bool) -> dict[int, LakewardenError]:
    """Refuse tables that share a place or an identity with another one of the catalog."""
    held: dict[int, LakewardenError] = {}
    by_uuid: dict[str, _Found] = {}
    for one in tables:
        if one.summary is None:
            continue
        if place(one.summary.location) is None:
            held[one.table_id] = Refused(
                ErrorKind.UNKNOWN_SCHEME,
                f"{one.table.uri} lies at {one.summary.location!r}, in no store that can be reached "
                "from here; nothing goes",
            )
        twin = by_uuid.setdefault(one.summary.uuid or one.table.uri, one)
        if twin is not one:
            held |= _both(one, twin, "is the same table under another name, or a copy of it")
    for outer, inner in _pairs(_areas(tables)):
        if outer.is_home and inner.is_home:
            held |= _both(outer.table, inner.table, "lies at the same place, inside or around it")
        elif outer.is_home and orphans:
            # Expiry removes only what its own table names; a listing would show the other's files.
            held[outer.table.table_id] = _refusal(inner.table, "writes into it")
        elif outer.location == inner.location and inner.is_home and orphans:
            held[inner.table.table_id] = _refusal(outer.table, "writes into it")
    return held


def _both(one: _Found, other: _Found, why: str) -> dict[int, LakewardenError]:
    return {one.table_id: _refusal(other, why), other.table_id: _refusal(one, why)}


def _refusal(other: _Found, why: str) -> LakewardenError:
    return Refused(
        ErrorKind.LOCATION_OVERLAP,
        f"{other.table.uri} {why}, so a file of one may be needed by the other; nothing goes: move "
        "one of them away, or repair it if it cannot be read",
    )


def _without_kept(found: Sequence[_Found], reading: Reading, costs: Costs) -> list[_Found]:
    """Refuse tables that belong to a warehouse of ours: only its log knows which snapshots it needs.

    Asked of those alone that something may go of.
    """
    stores = ReadStores(reading.opening)

    def look(one: _Found) -> _Found:
        home = place(one.summary.location) if one.summary else None
        if home is None or one.error is not None or one.summary is None:
            return one
        if not (one.summary.going or one.summary.resumed):
            return one
        mark = home.child(WAREHOUSE_MARK)
        try:
            return one.but(in_warehouse(home) if stores(mark).exists(mark.key) else None)
        except LakewardenError as error:
            return one.but(error)

    looked = list(concurrently(look, found, _ASKED_TOGETHER))
    costs.add_requests(stores.requests())
    return looked


def _roots(found: Sequence[_Found]) -> list[Root]:
    """Return the place of every table.

    A table that cannot be read has none; its name stands for it, and nothing of it goes.
    """
    return [
        Root(
            one.table_id,
            one.table_id,
            (place(one.summary.location) if one.summary else None)
            or Location("iceberg", one.table.catalog, ".".join(one.table.parts)),
            format=Format.ICEBERG,
            partition_fields=one.summary.partition_fields if one.summary else (),
        )
        for one in found
    ]


def _places_beside(found: Sequence[_Found], others: Sequence[_Found]) -> list[Root]:
    """Return the places that only one table's writers are sent to, outside its location."""
    areas = _areas([*found, *others])
    shared = {id(area) for pair in _pairs(areas) for area in pair}
    free = [
        area
        for area in areas
        if not area.is_home
        and id(area) not in shared
        and area.table.changes
        and area.table.error is None
    ]
    number = max(one.table_id for one in found) + 1
    return [
        Root(
            number + step,
            area.table.table_id,
            area.location,
            format=Format.ICEBERG,
            partition_fields=area.table.summary.partition_fields if area.table.summary else (),
        )
        for step, area in enumerate(free)
    ]


# -- what they name --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Work:
    """One survey under way."""

    targets: IcebergTargets
    reading: Reading
    costs: Costs
    roots: list[Root]

    @property
    def _places(self) -> dict[int, Location]:
        return {r.root_id: r.location for r in self.roots if r.location.scheme != "iceberg"}

    def expiry(self, facts: DataFrame, found: list[_Found]) -> Survey:
        """Find out which files only going snapshots name."""
        active = [
            one.table_id
            for one in found
            if one.error is None
            and one.summary is not None
            and (one.summary.going or one.summary.resumed)
        ]
        # Tables may share files, so what all of them need counts as soon as something could go.
        readable = [one.table_id for one in found if one.summary and not one.summary.encrypted]
        notes: list[Row] = []
        named = frame(self.reading.spark, snapshots.NAMED, [])
        if active:
            number = sum(
                one.summary.going + one.summary.resumed
                for one in found
                if one.table_id in active and one.summary
            )
            is_active = F.col("table_id").isin(active)
            at_once = is_active & (F.col("round") == FIRST)
            is_list = F.col("what") == SNAPSHOT
            with self.costs.stage(self.reading, "read manifest lists"):
                named, notes = self._lists(
                    facts.filter(is_active).withColumn("open", at_once & is_list), number
                )
                doomed = bool(_doomed(named).limit(1).collect())
                if doomed:
                    late = facts.filter(F.col("table_id").isin(readable) & ~at_once)
                    # What a table in trouble would let go, it keeps.
                    late = late.withColumn("kept", F.col("kept") | ~is_active)
                    rest, more = self._lists(late.withColumn("open", is_list), number)
                    named, notes = named.unionByName(rest), notes + more
            if doomed:
                with self.costs.stage(self.reading, "read manifests"):
                    contents, more = self._contents(_worth_opening(named))
                    named, notes = named.unionByName(contents), notes + more
        self._give_roots_to(notes)
        named = self._rooted(named)
        going = named.filter(~F.col("kept") & F.col("root_id").isNotNull())
        # What two tables let go stays for now: only one of them may get through with its commit.
        objects = going.groupBy("root_id", "key").agg(
            F.min("table_id").alias("table_id"),
            F.max("table_id").alias("other"),
            F.min("path").alias("path"),
            F.max("kind").alias("kind"),
            F.max("size").alias("size"),
            F.min("version").alias("version"),
        )
        objects = objects.filter("table_id = other")
        return self._survey(
            found, facts, _as_objects(objects), self._references(named, listed=False), notes
        )

    def orphans(self, facts: DataFrame, found: list[_Found]) -> Survey:
        """Find out which files any snapshot names, and list what is there."""
        # What a table in trouble needs, perhaps of another table, is needed all the same.
        readable = [one.table_id for one in found if one.summary and not one.summary.encrypted]
        changing = [one for one in found if one.error is None and one.summary and one.changes]
        with self.costs.stage(self.reading, "list"):
            objects, states, failed = self._listed(changing)
        number = sum(one.summary.kept + one.summary.going for one in found if one.summary)
        mine = facts.filter(F.col("table_id").isin(readable))
        with self.costs.stage(self.reading, "read manifest lists"):
            named, notes = self._lists(mine.withColumn("open", F.col("what") == SNAPSHOT), number)
        with self.costs.stage(self.reading, "read manifests"):
            contents, more = self._contents(_once(named))
            named, notes = named.unionByName(contents), notes + more
        self._give_roots_to(notes)
        # An inventory lacks what is younger than itself.
        listed = self.targets.inventory is None
        references = self._references(self._rooted(named), listed=listed)
        found = [one.but(failed.get(one.table_id)) for one in found]
        held = self.targets.held or {}
        shared = [one.table_id for one in found if one.table in held and held[one.table].external]
        if shared:
            objects = objects.withColumn("owned", F.col("owned") & ~F.col("table_id").isin(shared))
        if any(row.note == NOTE_BASE for row in notes):
            objects = snapshots.with_whole_paths(objects, self.roots)
        return self._survey(found, facts, objects, references, notes, states)

    def _lists(self, facts: DataFrame, number: int) -> tuple[DataFrame, list[Row]]:
        tasks = max(1, min(self.reading.tasks, number // _OPENED_PER_TASK))
        return self._settled(
            snapshots.lists(
                facts, self._places, self.reading.opening, self.targets.equality, tasks=tasks
            )
        )

    def _contents(self, manifests: DataFrame) -> tuple[DataFrame, list[Row]]:
        return self._settled(
            snapshots.contents(
                manifests,
                self._places,
                self.reading.opening,
                self.targets.equality,
                tasks=self.reading.tasks,
            )
        )

    def _settled(self, stage: DataFrame) -> tuple[DataFrame, list[Row]]:
        data, noted = settle(stage)
        self.costs.add_noted(noted, "text", "size")
        return data, noted

    def _give_roots_to(self, notes: Iterable[Row]) -> None:
        """Give the stores in which files lie that are under no table a root each."""
        stores = sorted({row.store for row in notes if row.note == NOTE_BASE and row.store})
        number = max(root.root_id for root in self.roots) + 1
        for step, uri in enumerate(stores):
            self.roots.append(
                Root(number + step, -1, Location.parse(uri), owned=False, format=Format.ICEBERG)
            )

    def _rooted(self, named: DataFrame) -> DataFrame:
        return snapshots.rooted(
            named.withColumn("inside", F.col("root_id").isNotNull()), self.roots
        )

    def _references(self, named: DataFrame, *, listed: bool) -> DataFrame:
        """Return what the verdict compares with."""
        doubtful = self.targets.prefix_mismatch is not PrefixMismatch.DELETE
        says_where = "store IS NULL OR store != ''"
        stem = (
            "CASE WHEN kept THEN bare END"
            if doubtful
            else f"CASE WHEN kept AND NOT ({says_where}) THEN bare END"
        )
        # Files that metadata merely remembers may well be gone.
        expected = f"inside AND kind != '{FileKind.METADATA.value}'" if listed else "false"
        return named.selectExpr(
            "root_id",
            "CASE WHEN root_id IS NOT NULL THEN key END AS key",
            f"{stem} AS stem",
            f"CASE WHEN bare IS NULL THEN NOT ({expected}) ELSE ({says_where}) END AS unlisted",
            "kept",
            "table_id AS by_root",
            "CAST(NULL AS STRING) AS branch",
            "version",
            "CAST(NULL AS STRING) AS note",
        ).select(*REFERENCES.names)

    def _listed(
        self, found: Sequence[_Found]
    ) -> tuple[DataFrame, dict[int, State], dict[int, LakewardenError]]:
        """List, or take from an inventory, everything under the tables' places."""
        mine = {one.table_id for one in found}
        roots = [root for root in self.roots if root.table_id in mine]
        if not roots:
            return frame(self.reading.spark, OBJECTS, []), {}, {}
        if self.targets.inventory is not None:
            units = [Unit(root.location) for root in roots]
            objects, noted = inventory.read(
                self.targets.inventory,
                roots,
                self.reading.spark,
                self.reading.opening,
                tasks=self.reading.tasks,
            )
        else:
            units = self._units(roots)
            objects, noted = list_fully(units, self.reading, roots, self._cuts)
        if self.targets.below is not None:
            objects = _below(objects, roots, self.targets.below)
        self.costs.add_noted(noted, "key", "size")
        failed = errors_in(noted, "unit", "key")
        states = states_in(noted)
        errors: dict[int, LakewardenError] = {}
        for root in roots:
            covering = [
                error for number, error in failed.items() if units[number].covers(root.location)
            ]
            if covering:
                errors[root.table_id] = covering[0]
            state = states.get(root.root_id, State())
            if state.kept and self.targets.held is None:
                errors.setdefault(root.table_id, in_warehouse(root.location))
            nested = state.nested
            if nested:
                errors.setdefault(root.table_id, _nested(root, nested))
        return objects, states, errors

    def _cuts(self, unit: Unit) -> tuple[str, ...]:
        """Return keys at which to split a large table: its partitions, or what names begin with."""
        if unit.inside:
            return unit.inside
        stores = ReadStores(self.reading.opening)
        data = unit.place.child("data")
        try:
            names, _ = stores(data).list_directory(data.path)
        except LakewardenError:
            names = ()
        self.costs.add_requests(stores.requests())
        step = -(-len(names) // _RANGES)
        begin = [f"{name}/" for name in names[::step]] if names else list("0123456789abcdef")
        return (*(f"{data.path}/{name}" for name in begin), f"{unit.place.path}/metadata/")

    def _units(self, roots: Sequence[Root]) -> list[Unit]:
        """Return the listings that cover all roots: of a whole directory where many lie in it."""
        parents: dict[Location, list[Root]] = {}
        for root in roots:
            parents.setdefault(root.location.parent, []).append(root)
        units: list[Unit] = []
        for parent, inside in parents.items():
            scoped = bool(getattr(self.reading.opening, "scopes", None))
            alone = (
                scoped
                or len(inside) < _SIBLINGS
                or self.targets.guard is Guard.TARGETS
                or not parent.path
            )
            units += (
                [Unit(root.location) for root in inside]
                if alone
                else fleet.ranges(parent, (root.location.path for root in inside))
            )
        return units

    def _survey(
        self,
        found: Sequence[_Found],
        facts: DataFrame,
        objects: DataFrame,
        references: DataFrame,
        notes: Sequence[Row],
        states: Mapping[int, State] | None = None,
    ) -> Survey:
        failed = errors_in(notes, "table_id", "text")
        for one in found:
            if one.protected and one.table_id in failed:
                raise _unprotectable(failed[one.table_id])
        warned = errors_in(notes, "table_id", "text", NOTE_WARNING)
        by_id = {root.root_id: root for root in self.roots}
        tables = []
        for one in found:
            one = one.but(failed.get(one.table_id))  # noqa: PLW2901
            warning = warned.get(one.table_id)
            tables.append(
                TableState(
                    one.table_id,
                    by_id[one.table_id],
                    one.changes,
                    (states or {}).get(one.table_id, State()),
                    error=one.error,
                    warnings=() if warning is None else (warning.message,),
                    key=one.table.uri,
                    metadata_location=one.pointer.metadata_location if one.pointer else None,
                    summary=one.summary,
                )
            )
        bases = any(row.note == NOTE_BASE for row in notes)
        return Survey(tables, self.roots, [], objects, _decisions(facts), references, bases)


def _doomed(named: DataFrame) -> DataFrame:
    """Return the manifests that no kept snapshot names, as far as lists have been opened."""
    return _once(named).filter(~F.col("kept"))


def _once(named: DataFrame) -> DataFrame:
    """Return every manifest once, with all tables that name it."""
    manifests = named.filter(F.col("uri").isNotNull())
    return manifests.groupBy(F.coalesce("store", "uri").alias("store"), "root_id", "key").agg(
        F.bool_or("kept").alias("kept"),
        F.min("uri").alias("uri"),
        F.max("entries").alias("entries"),
        F.max("live").alias("live"),
        F.max("size").alias("size"),
        F.max("content").alias("content"),
        F.max("version").alias("version"),
        F.min("table_id").alias("table_id"),
        F.expr("array_join(array_sort(collect_set(table_id)), ',')").alias("tables"),
    )


def _worth_opening(named: DataFrame) -> DataFrame:
    """Return going manifests, and kept ones that may name the same files: of the same content.

    A going one that only says what was deleted names nothing that could go.  If its list were
    wrong about that, a file would be left over, no more; of kept ones the list is not believed.
    """
    manifests = _once(named)
    doomed = manifests.filter("NOT kept AND (live IS NULL OR live > 0)")
    contents = doomed.select("content").distinct()
    return doomed.unionByName(
        manifests.filter("kept")
        .join(contents, on="content", how="left_semi")
        .select(doomed.columns)
    )


def _as_objects(going: DataFrame) -> DataFrame:
    """Give named files the columns of listed ones; their age plays no part."""
    made = {
        name: f"CAST(NULL AS {_SQL[str(kind)]}) AS {name}"
        for name, kind in zip(OBJECTS.names, OBJECTS.types, strict=True)
    }
    made |= {name: name for name in ("table_id", "root_id", "path", "kind", "key", "version")}
    made |= {"owned": "true AS owned", "size": "coalesce(size, 0) AS size"}
    return going.selectExpr(*(made[name] for name in OBJECTS.names))


_SQL = {"int32": "INT", "int64": "BIGINT", "string": "STRING", "bool": "BOOLEAN"}


def _decisions(facts: DataFrame) -> DataFrame:
    decided = facts.filter((F.col("what") == SNAPSHOT) & F.col("reasons").isNotNull())
    return decided.selectExpr(
        "table_id AS root_id",
        "branch",
        "version",
        "false AS detached",
        "uri AS path",
        "modified_us",
        "kept",
        "reasons",
        "true AS must_open",
        "CAST(NULL AS STRING) AS note",
    ).select(*DECISIONS.names)


def _below(objects: DataFrame, roots: Sequence[Root], below: str) -> DataFrame:
    """Leave all objects alone but those under the given place, part of one of the tables."""
    wanted = place(below)
    for root in roots:
        if wanted is not None and (root.location == wanted or root.location.contains(wanted)):
            inside = root.location.relative(wanted)
            below_it = F.col("path").startswith(f"{inside}/" if inside else "")
            return objects.withColumn("owned", (F.col("root_id") == root.root_id) & below_it)
    raise UsageError(
        ErrorKind.USAGE, f"--location {below} is not inside any of the tables; give a place that is"
    )


def _nested(root: Root, nested: str) -> LakewardenError:
    return Refused(
        ErrorKind.LOCATION_OVERLAP,
        f"another table lies inside {root.location.uri} ({nested.strip('/')}), so its files could be "
        "taken for this table's; nothing goes: move one of them away",
    )
