"""Whatever storage call fails, nothing that stays is lost, and a rerun ends as if nothing had failed.

The n-th call of a kind fails, once before and once after its effect.  A round costs two runs, so
the default takes every deletion, after it, and a few other calls; the profile `nightly` takes all.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import SparkSession

from lakewarden.errors import ErrorKind, LakewardenError, StorageError
from lakewarden.maintenance import cleanup, removal
from lakewarden.maintenance.fleet import parse_targets
from lakewarden.maintenance.survey import Reading
from lakewarden.retention import OnTagged, Policy
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import Request
from lakewarden.testing import invariants, tables
from lakewarden.testing.faults import FaultyOpener, When
from lakewarden.world import SystemClock

REQUEST = cleanup.Cleanup(
    Policy(older_than=timedelta(days=2), on_tagged=OnTagged.KEEP, min_age=timedelta(0))
)
#: What an undisturbed run keeps; `source` 2 is tagged, `dev` starts at 3.
KEPT = {
    "source": {("main", 2), ("main", 3), ("main", 6), ("dev", 3), ("dev", 4)},
    "clone": {("main", 1)},
    "other": {("main", 3)},
}


def build(lake: Path) -> None:
    source = tables.overwritten(lake / "source", 3)
    tables.clone(source, lake / "clone", 1)
    tables.index(source)
    tables.delete(source, "id = 20")
    tables.tag(source, "release", 2)
    tables.append(tables.branch(source, "dev", 3), 50)
    tables.overwrite(source, 60)
    tables.overwritten(lake / "other", 3)
    # Young enough that a file whose versions are all gone would be taken for a write in progress.
    tables.age(lake, 3)
    tables.orphan(source, "data/left-over.lance")
    tables.orphan(source, "_versions/.tmp1")


@dataclass
class Lab:
    """A fleet that can be put back, and what an undisturbed run makes of it."""

    lake: Path
    master: Path
    spark: SparkSession
    counter: Path
    before: dict[str, dict[invariants.Place, str]]
    calls: dict[Request, int]
    ended: set[str]

    def reset(self) -> None:
        # At the same place: branches and clones name where their files are.
        shutil.rmtree(self.lake, ignore_errors=True)
        shutil.copytree(self.master, self.lake)
        self.counter.unlink(missing_ok=True)

    def run(self, opening: Callable[..., Any]) -> Any:
        reading = Reading(self.spark, opening, SystemClock(), 2)
        targets = parse_targets([str(self.lake)], recursive=True)
        plan = cleanup.plan(targets, REQUEST, reading, now=reading.clock.now())
        return removal.execute(plan, reading)

    def faulty(self, kind: Request, call: int, when: When) -> FaultyOpener:
        return FaultyOpener(Opener(), call, when, str(self.counter), frozenset({kind}))

    def check(self) -> None:
        """Every version that an undisturbed run keeps reads as before, in every table."""
        for name, kept in KEPT.items():
            known = {place: self.before[name][place] for place in kept}
            invariants.assert_all_versions_read(self.lake / name, known)


@pytest.fixture(scope="module")
def lab(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    place = tmp_path_factory.mktemp("anomaly")
    lake, master = place / "lake", place / "master"
    build(lake)
    before = {name: invariants.fingerprints(lake / name) for name in KEPT}
    lake.rename(master)
    lab = Lab(lake, master, spark, place / "counter", before, {}, set())
    lab.reset()
    counting: dict[Request, FaultyOpener] = {}
    opening: Callable[..., Any] = Opener()
    for kind in (Request.LIST, Request.GET, Request.DELETE):
        opening = counting[kind] = FaultyOpener(
            opening, 0, "before", str(place / kind), frozenset({kind})
        )
    receipt = lab.run(opening)
    lab.calls = {kind: opener.plan.calls() for kind, opener in counting.items()}
    assert not receipt.failed
    lab.ended = invariants.files(lake)
    for name, kept in KEPT.items():
        assert set(invariants.versions(lake / name)) == kept
    lab.check()
    return lab


def round_of(lab: Lab, kind: Request, call: int, when: When) -> None:
    lab.reset()
    refused = None
    try:
        receipt = lab.run(lab.faulty(kind, call, when))
    except LakewardenError as error:
        refused = error
    else:
        if kind is Request.DELETE:
            assert receipt.failed, "a failed delete is reported"
    if refused is not None:
        assert "injected fault" in refused.message
        assert invariants.files(lab.lake) == invariants.files(lab.master), "refused, yet changed"
    lab.check()
    receipt = lab.run(Opener())
    assert not receipt.failed
    lab.check()
    assert invariants.files(lab.lake) == lab.ended, "a rerun ends where an undisturbed run ends"


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.nightly), "after"])
def test_every_failed_deletion_is_made_up_for(lab: Lab, when: When) -> None:
    assert lab.calls[Request.DELETE] >= 2
    for call in range(1, lab.calls[Request.DELETE] + 1):
        round_of(lab, Request.DELETE, call, when)


@pytest.mark.parametrize("kind", [Request.LIST, Request.GET])
def test_failed_reads_lose_nothing(lab: Lab, kind: Request) -> None:
    # The last of each kind is made while a plan is executed.
    moments: list[tuple[int, When]] = [(lab.calls[kind] // 2, "before"), (lab.calls[kind], "after")]
    for call, when in moments:
        round_of(lab, kind, call, when)


@pytest.mark.skipif(settings.get_current_profile_name() != "nightly", reason="takes minutes")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [Request.LIST, Request.GET])
def test_every_failed_read_loses_nothing(lab: Lab, kind: Request, when: When) -> None:
    for call in range(1, lab.calls[kind] + 1):
        round_of(lab, kind, call, when)


@dataclass(frozen=True)
class WithoutAccess:
    """Opens stores in which one directory cannot be listed, ever."""

    directory: str

    def __call__(self, location: Location) -> Any:
        return Guarded(Opener()(location), self.directory)


class Guarded:
    """A store that keeps one directory to itself."""

    def __init__(self, inner: Any, directory: str) -> None:
        self._inner, self._directory = inner, directory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def list(self, prefix: str, *, after: str | None = None, before: str | None = None) -> Any:
        for batch in self._inner.list(prefix, after=after, before=before):
            if any(key.startswith(self._directory) for key in batch.column("key").to_pylist()):
                raise StorageError(ErrorKind.ACCESS_DENIED, f"cannot list {self._directory}")
            yield batch


def test_clone_that_cannot_be_listed_is_not_forgotten(lab: Lab) -> None:
    """Part of a fleet that cannot be seen may hold a clone; it must be reported and must protect."""
    lab.reset()
    register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    receipt = lab.run(WithoutAccess(f"{lab.lake}/clone/".lstrip("/")))
    assert receipt.failed
    lab.check()
