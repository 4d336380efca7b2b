"""Work for the workers that is no reading of rows: one errand each, all of them in one job.

An errand is small and picklable and brings back a few words.  What goes wrong with one is told with
it; the others go on.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession

from lakewarden.errors import ErrorKind, LakewardenError, StorageError
from lakewarden.pipeline.frames import as_text, from_text

Brought = TypeVar("Brought", covariant=True)  # noqa: PLC0105  # reads better than Brought_co

#: Tasks that a job is cut into at most; beyond that, workers run several errands in a row.
_TASKS = 4096
_ERRANDS = pa.schema([("number", pa.int32()), ("errand", pa.binary())])
_BACK = pa.schema([("number", pa.int32()), ("brought", pa.binary()), ("error", pa.string())])


class Errand(Protocol[Brought]):
    """Something that a worker does."""

    def run(self) -> Brought:
        """Do it; what it returns must be picklable."""
        ...


@dataclass(frozen=True)
class Back(Generic[Brought]):
    """What became of an errand: it brings something, or an error."""

    brought: Brought | None = None
    error: LakewardenError | None = None


def run(spark: SparkSession, errands: Sequence[Errand[Brought]]) -> list[Back[Brought]]:
    """Let workers run all errands, as one job; return what they bring, in the same order."""
    if not errands:
        return []
    numbered = [{"number": at, "errand": pickle.dumps(errand)} for at, errand in enumerate(errands)]
    rows = spark.createDataFrame(pa.Table.from_pylist(numbered, schema=_ERRANDS))
    # From one partition they are dealt out one by one, so that each task gets its own.
    tasks = rows.coalesce(1).repartition(min(len(errands), _TASKS))
    found = tasks.mapInArrow(_run, "number int, brought binary, error string").collect()
    by_number = {row.number: row for row in found}
    return [_back(by_number[at]) for at in range(len(errands))]


def _back(row: Any) -> Back[Any]:
    if row.error is not None:
        return Back(error=from_text(row.error))
    return Back(pickle.loads(row.brought))  # noqa: S301  # from our own workers


def _run(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in incoming:
        for row in batch.to_pylist():
            yield pa.RecordBatch.from_pylist([_outcome(row)], schema=_BACK)


def _outcome(row: dict[str, Any]) -> dict[str, Any]:
    try:
        brought = pickle.loads(row["errand"]).run()  # noqa: S301  # from our own driver
    except LakewardenError as error:
        return {"number": row["number"], "error": as_text(error)}
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this errand's
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        return {
            "number": row["number"],
            "error": as_text(StorageError(ErrorKind.STORAGE, words)),
        }
    return {"number": row["number"], "brought": pickle.dumps(brought)}
