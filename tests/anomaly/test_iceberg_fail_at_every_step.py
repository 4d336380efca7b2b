"""Whatever storage call or commit fails, an Iceberg table stays whole, and a rerun finishes the work.

The n-th call of a kind fails, once before and once after its effect; so does the catalog's commit.
A round costs two runs, so the default takes every write and deletion and a few of the other calls;
the profile `nightly` takes all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.table import CommitTableResponse, Table
from pyspark.sql import SparkSession
from sqlalchemy.exc import OperationalError

from lakewarden.errors import LakewardenError
from lakewarden.expiry import ExpiryPolicy
from lakewarden.maintenance import cleanup, fleet, removal
from lakewarden.maintenance.cleanup import Cleanup
from lakewarden.maintenance.removal import Receipt
from lakewarden.maintenance.survey import Reading
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import Request
from lakewarden.testing import iceberg as kit
from lakewarden.testing import iceberg_oracle as oracle
from lakewarden.testing.faults import FaultyOpener, When
from lakewarden.testing.iceberg import LakeCatalog
from lakewarden.world import SystemClock

pytestmark = pytest.mark.spark

T = "iceberg://lake/db.t"
REQUESTS = {
    "cleanup": Cleanup(None, expiry=ExpiryPolicy(older_than=timedelta(0), keep=2)),
    "orphans": cleanup.orphans(timedelta(days=7)),
}
KINDS = (Request.LIST, Request.GET, Request.HEAD, Request.PUT, Request.DELETE)
NIGHTLY = settings.get_current_profile_name() == "nightly"
LOCKED = OperationalError("COMMIT", {}, Exception("database is locked"))


def build(lake: Path) -> None:
    """Make a table with something of every kind to remove, by expiry and as orphans."""
    catalog = kit.catalog(lake)
    # Old metadata files are removed by commits; one of the things that can fail.
    table = kit.create(
        catalog,
        properties={
            "write.metadata.previous-versions-max": "2",
            "write.metadata.delete-after-commit.enabled": "true",
        },
    )
    kit.grow(table, 3)
    kit.position_deletes(table, [1, 11])
    kit.statistics(table)
    kit.partition_statistics(table)
    kit.tag(table, "release", kit.ids(table)[1])
    kit.branch(table, "short", kit.ids(table)[2], max_ref_age_ms=1000)
    kit.stage(table, 300)
    kit.overwrite(table, 50)
    kit.append(table, 60)
    kit.backdate(table, 30)
    for name in ("data/left.parquet", "metadata/left-m0.avro", "metadata/snap-1-left.avro"):
        kit.orphan(table.location(), name)
    catalog.close()


@dataclass
class Fault:
    """What the catalog does to the next commit."""

    error: Exception
    when: When
    met: bool = False


class FaultyCatalog(LakeCatalog):
    """A catalog one commit of which fails, before or after its effect."""

    fault: Fault | None = None

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        fault = self.fault
        if fault is None or fault.met:
            return super().commit_table(table, requirements, updates)
        fault.met = True
        if fault.when == "after":
            super().commit_table(table, requirements, updates)
        raise fault.error


@dataclass
class Lab:
    """A table that can be put back, and what undisturbed runs make of it."""

    lake: Path
    master: Path
    spark: SparkSession
    counter: Path
    before: dict[int, str]
    calls: dict[tuple[str, Request], int] = field(default_factory=dict)
    ended: dict[str, set[str]] = field(default_factory=dict)
    kept: dict[str, list[int]] = field(default_factory=dict)

    def reset(self) -> None:
        # At the same place: the metadata says where its files are.
        shutil.rmtree(self.lake, ignore_errors=True)
        shutil.copytree(self.master, self.lake)
        self.counter.unlink(missing_ok=True)

    def run(
        self, operation: str, opening: Callable[..., Any], fault: Fault | None = None
    ) -> Receipt:
        given = kit.catalog_properties(self.lake)
        given.pop("type")
        catalog = FaultyCatalog("lake", **given)
        catalog.fault = fault
        try:
            reading = Reading(
                self.spark, opening, SystemClock(), 2, lake=fleet.open_lake({}, {"lake": catalog})
            )
            targets = fleet.parse_targets([T], recursive=False)
            plan = cleanup.plan(targets, REQUESTS[operation], reading, now=reading.clock.now())
            return removal.execute(plan, reading)
        finally:
            catalog.close()

    def check(self) -> list[int]:
        """See that the table is whole and every snapshot reads as ever; returns their ids."""
        catalog = kit.catalog(self.lake)
        try:
            table = catalog.load_table("db.t")
            oracle.assert_intact(table, self.before)
            assert {"main", "release"} <= table.refs().keys()
            return kit.ids(table)
        finally:
            catalog.close()

    def files(self) -> set[str]:
        """Return what is there, but for metadata files: a commit that failed may leave one."""
        found = oracle.on_disk(self.lake / "warehouse")
        return {path for path in found if not path.endswith(".metadata.json")}


@pytest.fixture(scope="module")
def lab(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    place = tmp_path_factory.mktemp("anomaly")
    lake, master = place / "lake", place / "master"
    build(lake)
    catalog = kit.catalog(lake)
    before = oracle.fingerprints(catalog.load_table("db.t"))
    catalog.close()
    lake.rename(master)
    lab = Lab(lake, master, spark, place / "counter", before)
    for operation in REQUESTS:
        lab.reset()
        counting: dict[Request, FaultyOpener] = {}
        opening: Callable[..., Any] = Opener()
        for kind in KINDS:
            opening = counting[kind] = FaultyOpener(
                opening, 0, "before", str(place / f"{operation}-{kind}"), frozenset({kind})
            )
        receipt = lab.run(operation, opening)
        assert not receipt.failed
        assert receipt.removed.files_removed >= 3
        for kind, opener in counting.items():
            lab.calls[operation, kind] = opener.plan.calls()
        lab.kept[operation] = lab.check()
        lab.ended[operation] = lab.files()
        assert not any("_lakewarden" in path for path in lab.files())
    assert len(lab.kept["cleanup"]) < len(before)
    return lab


def finish(lab: Lab, operation: str, what: str) -> None:
    """See that nothing is lost now, and that a rerun ends where an undisturbed run ends."""
    lab.check()
    receipt = lab.run(operation, Opener())
    assert not receipt.failed, (what, receipt.failed)
    assert lab.check() == lab.kept[operation], what
    assert lab.files() == lab.ended[operation], what


def round_of(lab: Lab, operation: str, kind: Request, call: int, when: When) -> None:
    what = f"{operation}: {kind} {call} fails {when} its effect"
    lab.reset()
    faulty = FaultyOpener(Opener(), call, when, str(lab.counter), frozenset({kind}))
    try:
        lab.run(operation, faulty)
    except LakewardenError as error:
        assert "injected fault" in error.message, what  # noqa: PT017
    finish(lab, operation, what)


def moments(number: int) -> list[tuple[int, When]]:
    """Return every call, before and after its effect; by default some, in turns."""
    both: tuple[When, When] = ("before", "after")
    whole: list[tuple[int, When]] = [(n, when) for n in range(1, number + 1) for when in both]
    some = [(n, when) for n, when in whole if when == both[n % 2]]
    return whole if NIGHTLY else [*some[::5], *some[-1:]]


@pytest.mark.parametrize("kind", [Request.PUT, Request.DELETE])
def test_every_failed_write_of_cleanup_is_made_up_for(lab: Lab, kind: Request) -> None:
    assert lab.calls["cleanup", kind] >= 2
    for call, when in moments(lab.calls["cleanup", kind]):
        round_of(lab, "cleanup", kind, call, when)


def test_every_failed_deletion_of_orphans_is_made_up_for(lab: Lab) -> None:
    assert lab.calls["orphans", Request.DELETE] >= 1
    for call, when in moments(lab.calls["orphans", Request.DELETE]):
        round_of(lab, "orphans", Request.DELETE, call, when)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("cleanup", Request.LIST),
        ("cleanup", Request.GET),
        ("orphans", Request.LIST),
        ("orphans", Request.GET),
    ],
)
def test_failed_reads_lose_nothing(lab: Lab, operation: str, kind: Request) -> None:
    every = moments(lab.calls[operation, kind])
    # Otherwise the last: of cleanup it is made while the plan is executed.
    for call, when in every if NIGHTLY else every[-1:]:
        round_of(lab, operation, kind, call, when)


@pytest.mark.parametrize(
    ("error", "when"),
    [
        pytest.param(
            CommitStateUnknownException("no answer"),
            "before",
            id="unknown-before",
            marks=pytest.mark.nightly,
        ),
        pytest.param(CommitStateUnknownException("no answer"), "after", id="unknown-after"),
        pytest.param(LOCKED, "before", id="locked-before", marks=pytest.mark.nightly),
        pytest.param(LOCKED, "after", id="locked-after"),
        pytest.param(CommitFailedException("changed"), "before", id="conflict-before"),
        pytest.param(
            CommitFailedException("changed"),
            "after",
            id="conflict-after",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_failed_commit_is_made_up_for(lab: Lab, error: Exception, when: When) -> None:
    lab.reset()
    fault = Fault(error, when)
    lab.run("cleanup", Opener(), fault)
    assert fault.met
    finish(lab, "cleanup", f"{type(error).__name__} {when} the commit")


def test_record_of_a_commit_that_never_landed_goes_in_the_end(lab: Lab) -> None:
    lab.reset()
    lab.run("cleanup", Opener(), Fault(CommitStateUnknownException("no answer"), "before"))
    lab.check()
    lab.run("cleanup", Opener())
    finish(lab, "cleanup", "no answer, and no commit")


def test_crash_at_the_commit_and_failing_deletions_after_it(lab: Lab) -> None:
    """Two faults in a row: the run that resumes fails, too."""
    lab.reset()
    lab.run("cleanup", Opener(), Fault(CommitStateUnknownException("no answer"), "after"))
    faulty = FaultyOpener(Opener(), 2, "before", str(lab.counter), frozenset({Request.DELETE}))
    lab.run("cleanup", faulty)
    finish(lab, "cleanup", "no answer to the commit, then a deletion that fails")


@pytest.mark.nightly
def test_orphans_between_a_crash_and_its_rerun(lab: Lab) -> None:
    """Removal of orphans after a crash of cleanup takes what is left, and the record is cleared."""
    lab.reset()
    lab.run("cleanup", Opener(), Fault(CommitStateUnknownException("no answer"), "after"))
    lab.check()
    assert not lab.run("orphans", Opener()).failed
    lab.check()
    assert not lab.run("cleanup", Opener()).failed
    lab.check()
    assert not any("_lakewarden" in path for path in lab.files())
    lab.run("orphans", Opener())
    assert lab.files() == lab.ended["cleanup"] & lab.ended["orphans"]
