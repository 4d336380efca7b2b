"""Work for the workers that is no reading of rows: one errand each, all of them in one job.

An errand is small and picklable and brings back a few words.  What goes wrong with one is told with
it; the others go on.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession

from lakewarden.errors import ErrorKind, LakewardenError, StorageError
from lakewarden.pipeline.frames import as_text, from_text

Brought = TypeVar("Brought", covariant=True)  # noqa: PLC0105  # reads better than Brought_co

#: Tasks for each that runs at once: enough for those that end early to take another.
_TASKS_PER_SLOT = 2
_ERRANDS = pa.schema([("errands", pa.binary())])
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


def run(
    spark: SparkSession, errands: Sequence[Errand[Brought]], weights: Sequence[float], tasks: int
) -> list[Back[Brought]]:
    """Let workers run all errands, as one job; return what they bring, in the same order.

    A task costs something by itself, so that there are only some for each of `tasks` that run at
    once; errands are dealt out by their weights, which may be any numbers.
    """
    if not errands:
        return []
    hands = dealt(weights, min(len(errands), _TASKS_PER_SLOT * tasks))
    numbered = [{"errands": pickle.dumps([(at, errands[at]) for at in hand])} for hand in hands]
    rows = spark.createDataFrame(pa.Table.from_pylist(numbered, schema=_ERRANDS))
    # From one partition rows are dealt out one by one, so that each task gets its own.
    held = rows.coalesce(1).repartition(len(hands))
    found = held.mapInArrow(_run, "number int, brought binary, error string").collect()
    by_number = {row.number: row for row in found}
    return [_back(by_number[at]) for at in range(len(errands))]


def dealt(weights: Sequence[float], hands: int) -> list[list[int]]:
    """Deal out items by their weights, the heaviest first, so that no hand is much heavier."""
    heap = [(0.0, hand) for hand in range(hands)]
    found: list[list[int]] = [[] for _ in range(hands)]
    for at in sorted(range(len(weights)), key=lambda at: -weights[at]):
        weight, hand = heappop(heap)
        found[hand].append(at)
        # Items without a weight are spread, too.
        heappush(heap, (weight + max(weights[at], 1e-9), hand))
    return found


def _back(row: Any) -> Back[Any]:
    if row.error is not None:
        return Back(error=from_text(row.error))
    return Back(pickle.loads(row.brought))  # noqa: S301  # from our own workers


def _run(incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in incoming:
        for packed in batch.column("errands").to_pylist():
            for number, errand in pickle.loads(packed):  # noqa: S301  # from our own driver
                row = {"number": number, **_outcome(errand)}
                yield pa.RecordBatch.from_pylist([row], schema=_BACK)


def _outcome(errand: Errand[Any]) -> dict[str, Any]:
    try:
        return {"brought": pickle.dumps(errand.run())}
    except LakewardenError as error:
        return {"error": as_text(error)}
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this errand's
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        return {"error": as_text(StorageError(ErrorKind.STORAGE, words))}
