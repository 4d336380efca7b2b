"""Whoever looks back while a cleanup decides or deletes is refused, or the cleanup is."""

from __future__ import annotations

from collections.abc import Callable

import lance
import pytest
from pyspark.sql import SparkSession

from lakewarden.errors import Conflict, ErrorKind, LakewardenError
from lakewarden.maintenance.warehouse import Request
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.reclaiming import Rules
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.cleaning import NOW, Cleaner, Lab, before, floor_here, laboratory, new_lake
from tests.warehouse.lakes import VERSIONS, Tampered, id_rows, reopen
from tests.warehouse.survivors import everything, survivors

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Lab:
    root = tmp_path_factory.mktemp("races")
    lake = new_lake(root / "lake")
    lake.warehouse.set_properties({"lakewarden.undrop-for": "0s"})
    lake.lance("create", "l", 1)
    lake.create("i", 1)
    lake.lance("create", "dropped", 1)
    for number in (2, 3):
        lake.lance("overwrite", "l", number)
        lake.iceberg("i").overwrite(id_rows(number))
    lake.warehouse.drop(("db", "dropped"))
    floor = floor_here(lake.warehouse)
    for number in (4, 5):
        lake.lance("overwrite", "l", number)
        lake.iceberg("i").overwrite(id_rows(number))
    return laboratory(lake, root / "master", Cleaner(spark), floor)


@pytest.fixture
def lab(made: Lab) -> Lab:
    made.reset()
    return made


def tag(warehouse: Warehouse, version: int) -> None:
    warehouse.create_tag("late", version=version)


def branch(warehouse: Warehouse, version: int) -> None:
    warehouse.create_branch("late", version=version)


def restore(warehouse: Warehouse, version: int) -> None:
    warehouse.restore(warehouse.read(version=version), ("db", "l"))


def restore_iceberg(warehouse: Warehouse, version: int) -> None:
    warehouse.restore(warehouse.read(version=version), ("db", "i"))


def undrop(warehouse: Warehouse, version: int) -> None:
    warehouse.undrop(("db", "dropped"))


def native_restore(warehouse: Warehouse, version: int) -> None:
    """Go back the way Lance's users do."""
    view = warehouse.read(version=version)
    pin = view.pins[view.table(("db", "l")).id]
    lance.dataset(
        namespace_client=Namespace(warehouse), table_id=["db", "l"], version=pin.version
    ).restore()


LOOKING_BACK = (
    tag,
    native_restore,
    undrop,
    *(pytest.param(one, marks=pytest.mark.nightly) for one in (branch, restore, restore_iceberg)),
)
Act = Callable[[Warehouse, int], None]


@pytest.mark.parametrize("act", LOOKING_BACK)
def test_what_is_held_after_the_plan_stops_the_cleanup(lab: Lab, act: Act) -> None:
    version = lab.floor - 2
    act(lab.lake.again(), version)
    there = everything(lab.lake.root)
    expected = survivors(lab.lake.again(), 1)
    with pytest.raises(Conflict):
        lab.clean()
    gone = there - everything(lab.lake.root)
    assert gone == set()
    expected.check(lab.lake.again())


@pytest.mark.parametrize("act", LOOKING_BACK)
def test_what_is_prepared_before_a_cleanup_and_committed_after_it_is_refused(
    lab: Lab, act: Act
) -> None:
    lance_id, pins = lab.lake.table("l").id, lab.plan.reclaim.base.manifest.pins()
    tampered = Tampered()
    warehouse = reopen(lab.lake.root, opener=tampered)
    tampered.once("put_if_absent", VERSIONS, lab.clean)
    with pytest.raises((LakewardenError, OSError, RuntimeError)) as raised:
        act(warehouse, lab.floor - 2)
    if isinstance(raised.value, LakewardenError):
        assert raised.value.kind in (ErrorKind.CONFLICT, ErrorKind.RECLAIMED)
    lab.expected.check(lab.lake.again())
    head = lab.lake.again().refresh().manifest
    assert head.branches["main"].pins[lance_id] == pins[lance_id]
    assert "late" not in {*head.tags, *head.branches}


def test_the_second_of_two_cleanups_with_one_idea_is_refused(lab: Lab) -> None:
    lab.clean()
    there = everything(lab.lake.root)
    with pytest.raises(Conflict):
        lab.clean()
    assert there - everything(lab.lake.root) == set()
    lab.expected.check(lab.lake.again())


def test_a_cleanup_inside_a_cleanup_loses_nothing(lab: Lab) -> None:
    """The inner one runs when the outer one is about to commit its reclaim."""
    tampered = Tampered()
    warehouse = reopen(lab.lake.root, opener=tampered)
    tampered.once("put_if_absent", VERSIONS, lab.clean)
    with pytest.raises(Conflict):
        lab.cleaner.execute(lab.plan, warehouse)
    lab.expected.check(lab.lake.again())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "act", [tag, *(pytest.param(one, marks=pytest.mark.nightly) for one in (branch, restore))]
)
def test_who_looked_at_a_tag_that_is_deleted_and_cleaned_meanwhile_is_refused(
    lab: Lab, act: Act
) -> None:
    """No floor moves in such a cleanup, and still the version that the tag held goes."""
    warehouse, version = lab.lake.again(), lab.floor - 2
    # Or the dropped table is forgotten, which nobody gets past.
    warehouse.set_properties({"lakewarden.undrop-for": "7d"})
    warehouse.create_tag("held", version=version)
    request = Request(Rules(before_version=lab.floor, min_age=NOW), log_age=NOW)
    lab.cleaner.run(lab.lake.again(), request)
    tampered = Tampered()
    late = reopen(lab.lake.root, opener=tampered)

    def meanwhile() -> None:
        lab.lake.again().delete_tag("held")
        lab.cleaner.run(lab.lake.again(), request)

    tampered.once("put_if_absent", VERSIONS, meanwhile)
    with pytest.raises(LakewardenError) as raised:
        act(late, version)
    assert raised.value.kind in (ErrorKind.CONFLICT, ErrorKind.RECLAIMED, ErrorKind.HISTORY_GAP)
    lab.expected.check(lab.lake.again())


@pytest.mark.nightly
def test_who_tags_a_branch_that_is_deleted_and_cleaned_meanwhile_is_refused(lab: Lab) -> None:
    warehouse = lab.lake.again()
    warehouse.set_properties({"lakewarden.undrop-for": "7d"})
    warehouse.create_branch("dev")
    lab.lake.iceberg("i", "dev").overwrite(id_rows(40))
    lab.lake.iceberg("i", "dev").overwrite(id_rows(41))
    request = before(lab.floor, delete_unverified=True)
    lab.cleaner.run(lab.lake.again(), request)
    tampered = Tampered()
    late = reopen(lab.lake.root, opener=tampered)

    def meanwhile() -> None:
        lab.lake.again().delete_branch("dev")
        lab.cleaner.run(lab.lake.again(), request)

    tampered.once("put_if_absent", VERSIONS, meanwhile)
    with pytest.raises(LakewardenError) as raised:
        late.create_tag("late", branch="dev")
    assert raised.value.kind in (ErrorKind.CONFLICT, ErrorKind.INCOMPATIBLE, ErrorKind.RECLAIMED)
