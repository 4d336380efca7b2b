"""Optimize behind a gate: asked before every commit; where it closes, what is there stays whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import lance
import pytest
from pyiceberg.catalog import Catalog

from lakewarden.errors import ErrorKind
from lakewarden.formats.iceberg.catalog import Lake as Catalogs
from lakewarden.maintenance import deleting, optimize
from lakewarden.maintenance.deleting import Passage
from lakewarden.maintenance.fleet import parse_targets
from lakewarden.maintenance.places import Alone
from lakewarden.maintenance.rewriting import LanceJob
from lakewarden.storage.opening import Opener
from lakewarden.testing import iceberg
from tests.optimize import tuning
from tests.optimize.tuning import Lake, Tuner, alone, everything, in_pieces, unindexed

pytestmark = pytest.mark.spark

STOPPED = ErrorKind.STOPPED.value


@dataclass
class Closing:
    """A gate that closes after so many questions, for all tables or for one."""

    most: int
    only: str | None = None
    asked: int = 0
    batch_files: int | None = None

    def passing(self, found: Collection[str]) -> Passage:
        self.asked += 1
        if self.asked <= self.most:
            return Passage(found)
        return Passage([one for one in found if self.only is not None and self.only not in one])

    def gone(self, files: Mapping[str, int]) -> None:
        raise AssertionError(f"optimize deletes nothing, but {files}")


@pytest.fixture(autouse=True)
def asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deleting, "_FRESH_SECONDS", 0.0)


def test_a_lance_table_is_left_as_it_was_wherever_the_gate_closes(
    tuner: Tuner, tmp_path: Path
) -> None:
    finished, steps = False, 0
    while not finished:
        place = in_pieces(tmp_path / f"{steps}.lance")
        lance.dataset(str(place)).create_scalar_index("id", "BTREE")
        tuning.add(place, 600)
        before, version = tuning.rows(lance.dataset(str(place))), lance.dataset(str(place)).version
        files = everything(place)
        gate = Closing(steps)
        receipt = optimize.execute(tuner.plan(alone(place)), tuner.reading, gate)
        (row,) = receipt.rows
        found = lance.dataset(str(place))
        assert tuning.rows(found) == before
        assert tuning.rows(found.checkout_version(version)) == before
        assert row.committed == (found.version > version)
        finished = row.error is None
        assert finished == (gate.asked <= steps)
        if not finished:
            assert row.error_kind == STOPPED
            if not row.committed:
                assert everything(place) == files
            tuner.run(alone(place))
        assert unindexed(lance.dataset(str(place)), "id_idx") == 0
        assert len(lance.dataset(str(place)).get_fragments()) == 1
        steps += 1
    # The beginning, the files and the indices at least.
    assert steps > 3


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with iceberg.catalog(tmp_path / "lake") as found:
        found.create_namespace("db")
        yield found


def test_an_iceberg_table_is_left_as_it_was_if_the_gate_closes(
    tuner: Tuner, catalog: Catalog
) -> None:
    table = catalog.create_table("db.t", tuning.SCHEMA)
    for at in range(7):
        table.append(tuning.some(at * 100))
    before, there = table.metadata_location, everything(Path(table.location()))
    place = Alone(
        parse_targets(["iceberg://lake/db.t"]), Opener(), Catalogs(None, {"lake": catalog})
    )
    # Open when the work begins, and closed before the commit.
    receipt = optimize.execute(tuner.plan(place), tuner.reading, Closing(1))
    assert [(row.error_kind, row.committed) for row in receipt.rows] == [(STOPPED, False)]
    assert table.refresh().metadata_location == before
    assert everything(Path(table.location())) == there


def test_of_a_warehouse_only_tables_whose_gate_is_open_become_public(
    tuner: Tuner, lake: Lake
) -> None:
    for name in ("a", "b"):
        lake.fill(name)
    before = {name: tuning.rows(lake.open(name)) for name in "ab"}
    versions = {name: lake.open(name).version for name in "ab"}
    questions, made = 0, -1
    while made != 2:
        view = lake.warehouse.read()
        gate = Closing(questions, only="db.a")
        receipt = optimize.execute(tuner.plan(lake.place()), tuner.reading, gate)
        told = {row.table_key: row for row in receipt.rows}
        made = sum(row.committed for row in receipt.rows)
        for name in "ab":
            assert tuning.rows(lake.open(name)) == before[name]
            committed = told[f"db.{name}"].committed
            assert committed == (lake.open(name).version > versions[name])
            assert committed == (lance.dataset(str(lake.path(name))).version > versions[name])
        if made:
            assert lake.version == view.manifest.version + 1
            assert told["db.b"].committed
        if made == 1:
            assert told["db.a"].error_kind == STOPPED
        lake.warehouse.restore(view)
        versions = {name: lake.open(name).version for name in "ab"}
        questions += 1
    # Of both at the beginning and before their commits, and again before all of it is public.
    assert questions > 5


def test_files_that_cannot_be_taken_away_are_told_and_the_other_table_goes_on(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, other = (in_pieces(tmp_path / f"{name}.lance") for name in ("stopped", "other"))

    def refuse(*_: object) -> None:
        raise OSError("the disk is read-only")

    monkeypatch.setattr(LanceJob, "discard", refuse)
    gate = Closing(2, only="stopped")
    receipt = optimize.execute(tuner.plan(alone(stopped, other)), tuner.reading, gate)
    told = {row.table_key.rpartition("/")[2]: row for row in receipt.rows}
    assert told["stopped.lance"].error_kind == STOPPED
    assert "the disk is read-only" in str(told["stopped.lance"].error)
    assert told["other.lance"].committed
    assert len(lance.dataset(str(stopped)).get_fragments()) == 6
