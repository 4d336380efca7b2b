"""Iceberg tables: metadata that another catalog has left beside the pin's."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from pyiceberg.table.statistics import StatisticsFile

from lakewarden.errors import ErrorKind, Exit
from lakewarden.storage.local import LocalStore
from lakewarden.warehouse.codec import TRANSACTIONS
from lakewarden.warehouse.drift import Classification, Line
from lakewarden.warehouse.iceberg_drift import examine
from lakewarden.warehouse.manifest import Change, Operation, Pin, Transaction
from lakewarden.world import SystemClock
from tests.repair.mending import Mender, row_of, said, versions
from tests.warehouse.cleaning import Lake
from tests.warehouse.lakes import catalog, iceberg_ids, id_rows, on_branch, reopen

pytestmark = pytest.mark.spark

KEY = "db.facts"
#: What is an hour old is nobody's work in progress.
LATER = timedelta(hours=2)


@pytest.fixture
def lake(lake: Lake) -> Lake:
    """The warehouse with Iceberg table db.facts of ids 1, 2."""
    lake.create("facts", 1).append(id_rows(2))
    return lake


def registered(lake: Lake, tmp_path: Path) -> Catalog:
    """Return another catalog, that has registered db.facts where it lies."""
    found = load_catalog("other", type="sql", uri=f"sqlite:///{tmp_path}/other.db")
    found.create_namespace("db")
    found.register_table(KEY, lake.iceberg("facts").metadata_location)
    return found


@pytest.fixture
def other(lake: Lake, tmp_path: Path) -> Catalog:
    return registered(lake, tmp_path)


def newest(other: Catalog) -> Path:
    return Path(other.load_table(KEY).metadata_location.removeprefix("file://"))


def as_replace(other: Catalog, **total: str) -> None:
    """Let the last snapshot of the other catalog be one that only replaces files."""
    path = newest(other)
    told: dict[str, Any] = json.loads(path.read_text())
    for one in told["snapshots"]:
        if one["snapshot-id"] == told["current-snapshot-id"]:
            one["summary"] |= {"operation": "replace", **total}
    path.write_text(json.dumps(told))


def looked_at(lake: Lake, known: Container[str] = frozenset()) -> Line:
    """Look at db.facts on main as repair does, two hours later."""
    view = reopen(lake.root).read()
    table = view.table(("db", "facts"))
    pin = view.pins[table.id]
    line = Line(table, "main", pin, pin)
    return examine(line, LocalStore(), known, frozenset, SystemClock().now() + LATER)


def seen(mender: Mender, **asked: Any) -> tuple[str, str, list[str]]:
    return said(row_of(mender.plan(later=LATER, **asked), KEY))


def test_a_table_that_nobody_else_has_written_to_has_not_drifted(
    lake: Lake, mender: Mender, other: Catalog
) -> None:
    assert seen(mender) == ("no_drift", "no_op", [])
    lake.warehouse.create_branch("dev")
    on_branch(lake.root, "dev").load_table(KEY).append(id_rows(7))
    on_branch(lake.root, "dev").load_table(KEY).append(id_rows(8))
    lake.warehouse.create_tag("tagged", branch="dev")
    assert {row.line.classification.value for row in mender.plan(later=LATER).rows} == {"no_drift"}


@pytest.mark.parametrize(
    ("does", "steps"),
    [
        ("overwrite", ["delete", "append"]),
        pytest.param("append", ["append"], marks=pytest.mark.nightly),
        pytest.param("delete", ["delete"], marks=pytest.mark.nightly),
    ],
)
def test_what_another_catalog_has_committed_is_suspicious(
    lake: Lake, mender: Mender, other: Catalog, does: str, steps: list[str]
) -> None:
    table = other.load_table(KEY)
    if does == "delete":
        table.delete("id = 1")
    else:
        getattr(table, does)(id_rows(66))
    assert seen(mender) == ("suspicious", "preview", steps)
    receipt = mender.execute(mender.plan(later=LATER, confirm=True))
    assert (row_of(receipt, KEY).action.value, receipt.exit_code) == ("refused", Exit.REFUSED)
    assert iceberg_ids(catalog(lake.root)) == [1, 2]


@pytest.mark.nightly
def test_what_was_looked_at_can_be_forced(lake: Lake, mender: Mender, other: Catalog) -> None:
    for number in (66, 67):
        other.load_table(KEY).append(id_rows(number))
    plan = mender.plan(later=LATER, confirm=True, force=True)
    assert versions(row_of(plan, KEY)) == (2, 4)
    receipt = mender.execute(plan)
    assert said(row_of(receipt, KEY)) == ("suspicious", "forced", ["append", "append"])
    assert iceberg_ids(catalog(lake.root)) == [1, 2, 66, 67]
    catalog(lake.root).load_table(KEY).append(id_rows(3))
    assert iceberg_ids(catalog(lake.root)) == [1, 2, 3, 66, 67]
    assert seen(mender) == ("no_drift", "no_op", [])
    actors = [one.transaction.actor for one in reopen(lake.root).history(2)]
    assert actors == [None, "lakewarden:repair:force"]


@pytest.mark.nightly
def test_files_that_are_replaced_by_as_many_rows_are_verified(
    lake: Lake, mender: Mender, other: Catalog
) -> None:
    other.load_table(KEY).append(id_rows(66))
    as_replace(other)
    assert seen(mender) == ("suspicious", "preview", ["replace"])
    as_replace(other, **{"total-records": "2"})
    assert seen(mender) == ("verified_maintenance", "preview", ["replace"])
    as_replace(other, **{"total-position-deletes": "1"})
    assert seen(mender)[0] == "suspicious"
    as_replace(other, **{"total-position-deletes": "0"})
    receipt = mender.execute(mender.plan(later=LATER, confirm=True))
    assert said(row_of(receipt, KEY)) == ("verified_maintenance", "healed", ["replace"])
    assert catalog(lake.root).load_table(KEY).metadata_location.endswith(newest(other).name)


def statistics_of(table: Table, number: int) -> StatisticsFile:
    path = f"{table.location()}/metadata/{number}.stats"
    return StatisticsFile.model_validate(
        {"snapshot-id": number, "statistics-path": path, "file-size-in-bytes": 1,
         "file-footer-size-in-bytes": 1, "blob-metadata": []}
    )  # fmt: skip


def aside(table: Any, first: int) -> None:
    """Make a snapshot that no ref names any more."""
    table.manage_snapshots().create_branch(first, "side").commit()
    table.append(id_rows(7), branch="side")
    table.manage_snapshots().remove_branch("side").commit()


BESIDE: dict[str, tuple[Callable[[Table, int], Any], list[str]]] = {
    "tag dropped": (
        lambda table, first: table.manage_snapshots().remove_tag("old").commit(),
        ["refs changed (old)"],
    ),
    "tag created": (
        lambda table, first: table.manage_snapshots().create_tag(first, "new").commit(),
        ["refs changed (new)"],
    ),
    "snapshot expired": (
        lambda table, first: table.maintenance.expire_snapshots().by_id(first).commit(),
        ["snapshots are gone (1)"],
    ),
    "snapshot that no ref names": (
        aside,
        ["snapshots came that main does not go through (1)"],
    ),
    "statistics set": (
        lambda table, first: (
            table.update_statistics().set_statistics(statistics_of(table, first)).commit()
        ),
        ["the table's statistics changed"],
    ),
}


@pytest.mark.parametrize("what", BESIDE)
@pytest.mark.parametrize("compacted", [True, False], ids=["compacted", "alone"])
def test_what_changes_beside_main_is_suspicious(
    lake: Lake, tmp_path: Path, what: str, compacted: bool
) -> None:
    """Even if all that happened to main is maintenance: a tag may be what keeps a version alive."""
    first, *_ = (one.snapshot_id for one in lake.iceberg("facts").snapshots())
    if what == "tag dropped":
        lake.iceberg("facts").manage_snapshots().create_tag(first, "old").commit()
    other = registered(lake, tmp_path)
    if compacted:
        other.load_table(KEY).append(id_rows(66))
        as_replace(other, **{"total-records": "2"})
        assert looked_at(lake).classification is Classification.VERIFIED_MAINTENANCE
    does, doubts = BESIDE[what]
    does(other.load_table(KEY), first)
    found = looked_at(lake)
    assert found.classification is Classification.SUSPICIOUS
    steps = ["replace", "update_metadata"] if compacted else ["update_metadata"]
    assert [step.operation for step in found.steps] == steps
    assert found.doubts == doubts


def test_each_change_beside_main_is_a_doubt_of_its_own(lake: Lake, other: Catalog) -> None:
    first, *_ = (one.snapshot_id for one in lake.iceberg("facts").snapshots())
    BESIDE["tag created"][0](other.load_table(KEY), first)
    BESIDE["statistics set"][0](other.load_table(KEY), first)
    with other.load_table(KEY).transaction() as changes:
        changes.set_properties(a="b")
    assert looked_at(lake).doubts == [
        "the table's properties changed",
        "refs changed (new)",
        "the table's statistics changed",
    ]


class OnlyAsked:
    """Metadata of a log that is too long to be copied for every table."""

    def __init__(self, *known: str) -> None:
        self._known = known

    def __contains__(self, uri: object) -> bool:
        return uri in self._known


def test_what_the_log_knows_is_asked_and_not_copied(lake: Lake, other: Catalog) -> None:
    other.load_table(KEY).append(id_rows(66))
    assert looked_at(lake, OnlyAsked()).drifted
    assert not looked_at(lake, OnlyAsked(str(newest(other)))).drifted


@pytest.mark.nightly
def test_a_change_of_the_description_is_suspicious(mender: Mender, other: Catalog) -> None:
    with other.load_table(KEY).transaction() as changes:
        changes.set_properties(a="b")
    assert seen(mender) == ("suspicious", "preview", ["update_metadata"])


@pytest.mark.nightly
def test_what_is_young_may_be_a_writer_at_work(mender: Mender, other: Catalog) -> None:
    other.load_table(KEY).append(id_rows(66))
    row = row_of(mender.plan(), KEY)
    assert said(row)[:2] == ("unverifiable", "preview")
    assert "younger than an hour" in str(row.error)


@pytest.mark.nightly
def test_two_that_went_on_beside_each_other_cannot_be_told_apart(
    lake: Lake, mender: Mender, other: Catalog, tmp_path: Path
) -> None:
    third = load_catalog("third", type="sql", uri=f"sqlite:///{tmp_path}/third.db")
    third.create_namespace("db")
    third.register_table(KEY, lake.iceberg("facts").metadata_location)
    for one in (other, third):
        one.load_table(KEY).append(id_rows(66))
    row = row_of(mender.plan(later=LATER), KEY)
    assert said(row)[:2] == ("unverifiable", "preview")
    assert "beside each other" in str(row.error)


def test_what_a_writer_of_ours_has_announced_is_no_drift(
    lake: Lake, mender: Mender, other: Catalog
) -> None:
    """It wrote its metadata, announced it, and died: nobody has committed anything."""
    other.load_table(KEY).append(id_rows(66))
    assert seen(mender)[0] == "suspicious"
    table = lake.table("facts")
    change = Change(Operation.APPEND, table.id, after=Pin(3, str(newest(other))))
    announced = lake.root / "__manifest/_transactions/0123abcd.json"
    announced.write_bytes(TRANSACTIONS.encode(Transaction("0123abcd", 5, (change,))))
    assert seen(mender)[0] == "no_drift"


@pytest.mark.nightly
def test_going_back_to_the_pin_has_nothing_to_do(
    lake: Lake, mender: Mender, other: Catalog
) -> None:
    other.load_table(KEY).append(id_rows(66))
    receipt = mender.execute(mender.plan(later=LATER, confirm=True, to_pin=True))
    assert said(row_of(receipt, KEY))[:2] == ("suspicious", "no_op")
    assert (receipt.version, receipt.exit_code) == (None, Exit.DONE)
    assert iceberg_ids(catalog(lake.root)) == [1, 2]


def test_a_writer_that_is_faster_wins(lake: Lake, mender: Mender, other: Catalog) -> None:
    other.load_table(KEY).append(id_rows(66))
    plan = mender.plan(later=LATER, confirm=True, force=True)
    catalog(lake.root).load_table(KEY).append(id_rows(3))
    receipt = mender.execute(plan)
    assert row_of(receipt, KEY).error_kind is ErrorKind.CONFLICT
    assert receipt.exit_code is Exit.CONFLICT
    assert iceberg_ids(catalog(lake.root)) == [1, 2, 3]


@pytest.mark.nightly
def test_a_pin_that_does_not_exist_is_an_error_of_its_own(lake: Lake, mender: Mender) -> None:
    Path(lake.iceberg("facts").metadata_location.removeprefix("file://")).unlink()
    plan = mender.plan()
    row = row_of(plan, KEY)
    assert row.error_kind is ErrorKind.DAMAGED_VERSION
    assert "lakewarden restore" in str(row.error)
    assert row_of(plan).error is None
