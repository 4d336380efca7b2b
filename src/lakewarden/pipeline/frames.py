"""The schemas that travel between stages, and the few things every stage does alike."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from threading import Lock
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row, SparkSession

from lakewarden.errors import ErrorKind, LakewardenError, StorageError
from lakewarden.model import Format
from lakewarden.storage.location import Location
from lakewarden.storage.opening import read_only
from lakewarden.storage.store import ReadStore, Request, Store

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: Requests one task keeps in flight: waiting for a store needs threads, not cores.
IN_FLIGHT = 64
#: Tasks that run at once where nobody says how many.
_SLOTS = 16
#: Rows per Arrow batch that a task hands back.
BATCH_ROWS = 16_384

#: What kind of row this is besides ordinary data; null for data.
NOTE_ERROR = "error"
NOTE_WARNING = "warning"
NOTE_REQUESTS = "requests"
NOTE_LEFTOVER = "leftover"
NOTE_TABLE = "table"
NOTE_STATE = "state"
NOTE_BASE = "base"
NOTE_OPEN = "open"
NOTE_STEMS = "stems"

LISTING = pa.schema(
    [
        ("unit", pa.int32()),
        ("key", pa.string()),
        ("size", pa.int64()),
        ("modified_us", pa.int64()),
        ("note", pa.string()),
    ]
)
OBJECTS = pa.schema(
    [
        ("table_id", pa.int32()),
        ("root_id", pa.int32()),
        ("path", pa.string()),
        ("kind", pa.string()),
        ("key", pa.string()),
        ("stem", pa.string()),
        ("branch", pa.string()),
        ("version", pa.int64()),
        ("detached", pa.bool_()),
        ("size", pa.int64()),
        ("modified_us", pa.int64()),
        ("owned", pa.bool_()),
        ("unit", pa.int32()),
        ("note", pa.string()),
    ]
)
#: Versions, tags and branches of a table in one frame, the input of retention.
HISTORY = pa.schema(
    [
        ("root_id", pa.int32()),
        ("what", pa.string()),
        ("branch", pa.string()),
        ("version", pa.int64()),
        ("name", pa.string()),
        ("path", pa.string()),
        ("detached", pa.bool_()),
        ("modified_us", pa.int64()),
        ("age_us", pa.int64()),
        ("note", pa.string()),
    ]
)
DECISIONS = pa.schema(
    [
        ("root_id", pa.int32()),
        ("branch", pa.string()),
        ("version", pa.int64()),
        ("detached", pa.bool_()),
        ("path", pa.string()),
        ("modified_us", pa.int64()),
        ("kept", pa.bool_()),
        ("reasons", pa.string()),
        ("must_open", pa.bool_()),
        ("note", pa.string()),
    ]
)
#: Files named by versions.  `stem` rows protect by name alone, wherever the file lies.  An
#: `unlisted` reference names a place that was not listed: not to be found tells nothing, and its
#: stem only casts doubt.
REFERENCES = pa.schema(
    [
        ("root_id", pa.int32()),
        ("key", pa.string()),
        ("stem", pa.string()),
        ("unlisted", pa.bool_()),
        ("kept", pa.bool_()),
        ("by_root", pa.int32()),
        ("branch", pa.string()),
        ("version", pa.int64()),
        ("note", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Root:
    """A place that holds files of a table: its location, or an extra base path."""

    root_id: int
    table_id: int
    location: Location
    #: False for an extra base path: others may keep files there, too.
    owned: bool = True
    #: An extra base that is a plain directory of data files, not laid out like a table.
    plain: bool = False
    format: Format = Format.LANCE
    #: Of an Iceberg table: names of partition fields, which are never hidden.
    partition_fields: tuple[str, ...] = ()

    def key(self, path: str) -> str:
        """Return the store's key of a path below this root."""
        return f"{self.location.path}/{path}" if self.location.path else path


#: A function over the Arrow batches of one task.
Stage = Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]
Item = TypeVar("Item")
Result = TypeVar("Result")


def slots(spark: SparkSession) -> int:
    """Return how many tasks run at once, as far as the session tells."""
    # DataFrame API only: the number of executors is not ours to ask, their default is.
    local = re.fullmatch(r"local(?:\[(\d+|\*).*\])?", spark.conf.get("spark.master", "") or "")
    if local is not None:
        return (os.cpu_count() or 1) if local[1] == "*" else int(local[1] or 1)
    parallelism = spark.conf.get("spark.default.parallelism", "") or ""
    return int(parallelism) if parallelism.isdigit() else _SLOTS


def sql(schema: pa.Schema) -> str:
    """Return the schema as Spark wants it written."""
    names = {
        pa.int32(): "int",
        pa.int64(): "bigint",
        pa.string(): "string",
        pa.bool_(): "boolean",
    }
    return ", ".join(f"{field.name} {names[field.type]}" for field in schema)


def frame(spark: SparkSession, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Make a small frame on the driver."""
    if not rows:
        # Spark Connect does not take the schema of an empty table.
        return spark.createDataFrame([], sql(schema))
    return spark.createDataFrame(pa.Table.from_pylist(list(rows), schema=schema))


def pin(data: DataFrame) -> DataFrame:
    """Compute once and never again: what a plan was shown to be is what is executed.

    A local checkpoint, unlike a cache, fails when an executor is lost instead of quietly
    computing anew from a listing that has changed since.  In local mode nothing gets lost, so the
    first job that needs the rows makes the checkpoint in passing; elsewhere a job is spent on it.
    """
    local = (data.sparkSession.conf.get("spark.master", "") or "").startswith("local")
    return data.localCheckpoint(eager=not local)


def settle(data: DataFrame) -> tuple[DataFrame, list[Row]]:
    """Pin a stage; return its data, and its notes to the driver (stages write few of them)."""
    pinned = pin(data)
    noted = pinned.filter("note IS NOT NULL").collect()
    return pinned.filter("note IS NULL"), noted


def spread(data: DataFrame, tasks: int, *by: Column | str) -> DataFrame:
    """Cut a frame into tasks; rows that agree in `by` stay together.  One task needs no shuffle."""
    return data.repartition(tasks, *by) if tasks > 1 else data.coalesce(1)


def to_micros(moment: datetime | None) -> int | None:
    """Return microseconds since 1970; frames carry plain numbers so that no time zone interferes."""
    return None if moment is None else (moment - _EPOCH) // _MICROSECOND


def to_millis(moment: datetime) -> int:
    """Return milliseconds since 1970, as Iceberg counts."""
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def from_micros(micros: int | None) -> datetime | None:
    """Undo `to_micros`; a time that no calendar holds counts as unknown."""
    try:
        return None if micros is None else _EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        return None


def batches(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Pack rows into Arrow batches of bounded size."""
    iterator = iter(rows)
    while chunk := list(islice(iterator, BATCH_ROWS)):
        yield pa.RecordBatch.from_pylist(chunk, schema=schema)


def request_notes(
    counted: Mapping[Request, int], schema: pa.Schema, name: str, number: str
) -> Iterator[pa.RecordBatch]:
    """Tell how many requests a task made, in two columns of its schema."""
    rows = [{name: kind.value, number: n, "note": NOTE_REQUESTS} for kind, n in counted.items()]
    return batches(rows, schema)


def concurrently(
    work: Callable[[Item], Result], items: Iterable[Item], in_flight: int = IN_FLIGHT
) -> Iterator[Result]:
    """Run `work` for every item with bounded look-ahead; results in the order of the items."""
    iterator = iter(items)
    with ThreadPoolExecutor(in_flight) as pool:
        waiting = [pool.submit(work, item) for item in islice(iterator, in_flight)]
        while waiting:
            done = waiting.pop(0).result()
            waiting.extend(pool.submit(work, item) for item in islice(iterator, 1))
            yield done


def answers(spark: SparkSession) -> bool:
    """Tell whether a session still does what it is asked: its JVM or server may be gone."""
    try:
        return len(spark.range(1).collect()) == 1
    except Exception:  # noqa: BLE001  # whatever it says, it does not work
        return False


#: Opens the store a location is in; picklable, so that tasks can do it where they run.
Opening = Callable[[Location], Store]


class Stores:
    """The stores one task uses: each opened once for each place that has its own credentials."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._open: dict[Location, Store] = {}
        self._lock = Lock()

    def __call__(self, location: Location) -> Store:
        scope = self.scope(location)
        with self._lock:
            if scope not in self._open:
                self._open[scope] = self._opening(scope)
            return self._open[scope]

    def scope(self, location: Location) -> Location:
        """Return the place in which everything is reached like this location."""
        own = getattr(self._opening, "scope", None)
        return location.store if own is None else own(location)

    def requests(self) -> dict[Request, int]:
        """Return what was counted since the last call."""
        total: dict[Request, int] = {}
        for store in self._open.values():
            for kind, number in store.requests.drain().items():
                total[kind] = total.get(kind, 0) + number
        return total


class ReadStores:
    """The same without any means to change something: all that planning gets."""

    def __init__(self, opening: Opening) -> None:
        self._stores = Stores(opening)

    def __call__(self, location: Location) -> ReadStore:
        return read_only(self._stores(location))

    def requests(self) -> dict[Request, int]:
        return self._stores.requests()


def as_text(error: LakewardenError) -> str:
    """Pack an error into a note; `from_text` undoes it."""
    return f"{error.kind.value}|{error.message}"


def from_text(text: str) -> LakewardenError:
    """Read an error out of a note."""
    kind, _, message = text.partition("|")
    return StorageError(ErrorKind(kind), message)
