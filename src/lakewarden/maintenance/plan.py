"""What a plan is: counts on the driver, rows in frames, and a form to keep on disk.

A plan is pinned to what was read.  `files` and `versions` are frames; the driver holds one
summary per table.  On disk a plan is a directory: `plan.json` (header and summaries) beside
`files/` and `versions/` as Parquet.
"""

from __future__ import annotations

import html
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakewarden.errors import ErrorKind, NotFound, UsageError
from lakewarden.expiry import ExpiryPolicy, Held
from lakewarden.model import Format, RemovalStats, Verdict
from lakewarden.pipeline.frames import ReadStores, Root, Stores, from_micros
from lakewarden.pipeline.listing import Unit
from lakewarden.storage.location import Location

FORMAT = 2


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What would happen to one table."""

    table_id: int
    table_key: str
    format: Format = Format.LANCE
    objects: int = 0
    versions_kept: int = 0
    removal: RemovalStats = field(default_factory=RemovalStats)
    files_in_use: int = 0
    bytes_in_use: int = 0
    #: Of what goes: files that no version names.  Counted where every version was opened; cleanup
    #: leaves old ones closed, and what only those name cannot be told from this.
    orphans: int = 0
    kept_unverified: int = 0
    bytes_unverified: int = 0
    kept_unknown_age: int = 0
    kept_unknown_kind: int = 0
    refs_mark: int = 0
    manifests_mark: int = 0
    #: Other tables of the plan that hold files which versions of this one name.
    uses: tuple[int, ...] = ()
    skipped: str | None = None
    error: str | None = None
    error_kind: str | None = None
    warnings: tuple[str, ...] = ()
    #: Of an Iceberg table: the metadata file that was read, refs that expire, and records of
    #: expiries that were not finished.
    metadata_location: str | None = None
    uuid: str | None = None
    expired_refs: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    #: Records of runs that have not committed, and cannot any more once this one has.
    rivals: tuple[str, ...] = ()

    @property
    def commits(self) -> bool:
        """Whether execution changes the table's metadata before it deletes files."""
        going = self.removal.old_versions_removed > 0 or bool(self.expired_refs)
        # A table that is being purged is in no catalog any more.
        known = self.metadata_location is not None
        return self.format is Format.ICEBERG and self.stands and going and known

    @property
    def stands(self) -> bool:
        """Whether nothing holds this table back."""
        return self.error is None and self.skipped is None

    @property
    def goes_ahead(self) -> bool:
        """Whether execution touches this table at all."""
        return self.stands and (
            self.removal.files_removed > 0 or self.commits or bool(self.pending)
        )


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What an operation would do."""

    operation: str
    made_at: datetime
    policy: str
    tables: Sequence[TablePlan]
    roots: Sequence[Root]
    units: Sequence[Unit]
    #: Directories in which new tables may have appeared since.
    directories: Sequence[Location]
    #: Every object with verdict and reason (of a saved plan: those that go).
    files: DataFrame
    #: Every version with its decision and reasons.
    versions: DataFrame
    requests: Mapping[str, int]
    seconds: Mapping[str, float]
    #: The rules for snapshots of Iceberg tables; None if they all stay.
    expiry: ExpiryPolicy | None = None
    #: What a warehouse needs of its Iceberg tables, by `table_id`.
    held: Mapping[int, Held] = field(default_factory=dict)

    @property
    def deletions(self) -> DataFrame:
        """The files that go, of tables that nothing holds back."""
        going = [table.table_id for table in self.tables if table.goes_ahead]
        goes = F.col("verdict") == Verdict.DELETE.value
        if len(going) == len(self.tables):
            return self.files.filter(goes)
        return self.files.filter(goes & F.col("table_id").isin(going))

    @property
    def removal(self) -> RemovalStats:
        """What would be removed in total."""
        total = RemovalStats()
        for table in self.tables:
            if table.goes_ahead:
                total += table.removal
        return total

    @property
    def failed(self) -> list[TablePlan]:
        return [table for table in self.tables if table.error is not None]

    def __repr__(self) -> str:
        goes = self.removal
        return (
            f"<Plan {self.operation}: {len(self.tables)} table(s), {goes.old_versions_removed} "
            f"version(s) and {goes.files_removed} file(s) go, {goes.bytes_removed} bytes>"
        )

    def orphans(self, limit: int = 12) -> list[dict[str, Any]]:
        """Return some of the files that go because no version names them, the largest first."""
        unnamed = F.col("reason").startswith("unverified")
        rows = self.deletions.filter(unnamed).orderBy(F.desc("size"), "path").limit(limit).collect()
        keys = {root.root_id: root.location.uri for root in self.roots}
        return [
            {
                "path": f"{keys[row.root_id]}/{row.path}",
                "size": row.size,
                "modified": from_micros(row.modified_us),
            }
            for row in rows
        ]

    def kept_versions(self, limit: int = 20) -> list[dict[str, Any]]:
        """Return the kept versions worth showing: heads, then what refs hold, then the newest."""
        held = F.col("reasons").contains("tag ") | F.col("reasons").contains("branch ")
        rows = (
            self.versions.filter(F.col("kept"))
            .orderBy(
                F.col("reasons").startswith("head").desc(), held.desc(), F.desc("version"), "branch"
            )
            .limit(limit)
            .select("root_id", "branch", "version", "modified_us", "reasons")
            .collect()
        )
        keys = {table.table_id: table.table_key for table in self.tables}
        return [
            {
                "table_key": keys[row.root_id],
                "branch": row.branch,
                "version": row.version,
                "modified": from_micros(row.modified_us),
                "reasons": row.reasons,
            }
            for row in rows
        ]

    def kept_because(self, tables: Collection[int]) -> dict[int, dict[str, int]]:
        """Return for how many versions of these tables each reason holds; one may have several.

        Refs are told by their kind alone: there may be thousands.
        """
        kind = r"^(head of branch|branch|tag) .*?(?=, last \d+$| starts here$|$)"
        words = F.transform(
            F.split("reasons", "; "), lambda one: F.regexp_replace(one, F.lit(kind), F.lit("$1"))
        )
        rows = (
            self.versions.filter(F.col("kept") & F.col("root_id").isin(list(tables)))
            .select("root_id", F.explode(F.array_distinct(words)).alias("reason"))
            .groupBy("root_id", "reason")
            .agg(F.count(F.lit(1)).alias("versions"))
            .orderBy(F.desc("versions"), "reason")
            .collect()
        )
        found: dict[int, dict[str, int]] = {number: {} for number in tables}
        for row in rows:
            found[row.root_id][row.reason] = row.versions
        return found

    def _repr_html_(self) -> str:
        """Show the plan in a notebook."""
        head = (
            "<tr><th>table</th><th>versions kept</th><th>versions going</th><th>files going</th>"
            "<th>bytes going</th><th>held back by</th></tr>"
        )
        rows = "".join(
            f"<tr><td>{html.escape(table.table_key)}</td><td>{table.versions_kept}</td>"
            f"<td>{table.removal.old_versions_removed}</td><td>{table.removal.files_removed}</td>"
            f"<td>{table.removal.bytes_removed:,}</td>"
            f"<td>{html.escape(table.error or table.skipped or '')}</td></tr>"
            for table in self.tables[:50]
        )
        more = f"<p>… and {len(self.tables) - 50} more tables</p>" if len(self.tables) > 50 else ""
        return f"<p><b>{self.operation}</b>: {html.escape(self.policy)}</p><table>{head}{rows}</table>{more}"


def check_new(directory: str, stores: Stores | ReadStores) -> None:
    """Refuse a place for a plan that holds something already."""
    place = Location.parse(directory)
    if any(stores(place).list_directory(place.path)):
        raise UsageError(
            ErrorKind.ALREADY_EXISTS,
            f"{place.uri} is not empty; give --save-plan a directory of its own",
        )


def save(plan: Plan, directory: str, stores: Stores) -> None:
    """Write the plan to a new directory; the header goes last, so a plan is whole or not there."""
    place = Location.parse(directory)
    key = f"{place.path}/plan.json"
    check_new(directory, stores)
    uri = _spark_uri(place)
    try:
        plan.deletions.write.parquet(f"{uri}/files")
        plan.versions.write.parquet(f"{uri}/versions")
    except PySparkException as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(
            ErrorKind.SPARK,
            f"Spark could not write the plan to {place.uri} ({first}); give --save-plan a directory "
            "that Spark itself can write to, such as a local one",
        ) from error
    stores(place).put(key, json.dumps(_header(plan), indent=1).encode())


def read_header(directory: str, stores: ReadStores) -> tuple[list[Location], dict[str, Any]]:
    """Return the places a saved plan is about, and its header."""
    place = Location.parse(directory)
    try:
        header = json.loads(stores(place).get(f"{place.path}/plan.json"))
        if header["format"] != FORMAT:
            raise UsageError(
                ErrorKind.PLAN_INVALID,
                f"{place.uri} was written in plan format {header['format']}, this release reads "
                f"{FORMAT}; make the plan again",
            )
        places = [Location.parse(root["location"]) for root in header["roots"]]
        for place_now, root in zip(places, header["roots"], strict=True):
            if place_now.uri != root["location"]:
                raise UsageError(
                    ErrorKind.PLAN_INVALID,
                    f"{root['location']} now leads to {place_now.uri}, which the plan does not speak "
                    "of; plan again",
                )
        return places, header
    except NotFound as error:
        raise UsageError(
            ErrorKind.PLAN_INVALID,
            f"{place.uri} holds no plan (plan.json is missing); make one with --save-plan",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            ErrorKind.PLAN_INVALID, f"{place.uri}/plan.json cannot be read ({error}); plan again"
        ) from error


def load(spark: SparkSession, directory: str, stores: ReadStores) -> Plan:
    """Read a saved plan back."""
    _, header = read_header(directory, stores)
    uri = _spark_uri(Location.parse(directory))
    try:
        return Plan(
            operation=header["operation"],
            made_at=datetime.fromisoformat(header["made_at"]),
            policy=header["policy"],
            tables=[_table(row) for row in header["tables"]],
            roots=[_root(row) for row in header["roots"]],
            units=[_unit(row) for row in header["units"]],
            directories=[Location.parse(uri) for uri in header["directories"]],
            files=spark.read.parquet(f"{uri}/files"),
            versions=spark.read.parquet(f"{uri}/versions"),
            requests=header["requests"],
            seconds=header["seconds"],
            expiry=_expiry(header["expiry"]),
        )
    except (ValueError, KeyError, TypeError, AnalysisException) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(
            ErrorKind.PLAN_INVALID, f"{directory} is no whole plan ({first}); plan again"
        ) from error


def _spark_uri(place: Location) -> str:
    return f"file://{place.uri}" if place.is_local else place.uri


def _header(plan: Plan) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "operation": plan.operation,
        "made_at": plan.made_at.isoformat(),
        "policy": plan.policy,
        "tables": [asdict(table) for table in plan.tables],
        "roots": [
            {**asdict(root), "location": root.location.uri}
            for root in plan.roots
            if root.location.scheme != "iceberg"
        ],
        "units": [{**asdict(unit), "place": unit.place.uri} for unit in plan.units],
        "directories": [place.uri for place in plan.directories],
        "requests": dict(plan.requests),
        "seconds": dict(plan.seconds),
        "expiry": None if plan.expiry is None else _plain(plan.expiry),
    }


def _plain(policy: ExpiryPolicy) -> dict[str, Any]:
    """Return the policy as JSON has it: durations in seconds, ids in a list."""
    plain: dict[str, Any] = {}
    for name, value in asdict(policy).items():
        plain[name] = value.total_seconds() if isinstance(value, timedelta) else value
    ids = policy.snapshots
    return plain | {"snapshots": None if ids is None else sorted(ids)}


def _expiry(plain: dict[str, Any] | None) -> ExpiryPolicy | None:
    if plain is None:
        return None
    spans = {
        name: timedelta(seconds=plain[name])
        for name in ("older_than", "max_ref_age")
        if plain[name] is not None
    }
    ids = plain["snapshots"]
    return ExpiryPolicy(**{**plain, **spans, "snapshots": None if ids is None else frozenset(ids)})


def _table(row: dict[str, Any]) -> TablePlan:
    removal = RemovalStats(**row.pop("removal"))
    return TablePlan(
        **{
            **row,
            "removal": removal,
            "warnings": tuple(row["warnings"]),
            "uses": tuple(row["uses"]),
            "format": Format(row["format"]),
            "expired_refs": tuple(row["expired_refs"]),
            "pending": tuple(row["pending"]),
            "rivals": tuple(row["rivals"]),
        }
    )


def _root(row: dict[str, Any]) -> Root:
    return Root(
        **{
            **row,
            "location": Location.parse(row["location"]),
            "format": Format(row["format"]),
            "partition_fields": tuple(row["partition_fields"]),
        }
    )


def _unit(row: dict[str, Any]) -> Unit:
    return Unit(
        **{**row, "place": Location.parse(row["place"]), "inside": tuple(row["inside"]), "cuts": ()}
    )
