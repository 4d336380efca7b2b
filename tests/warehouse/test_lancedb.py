"""LanceDB, which makes its namespace by the name of the class, on a warehouse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import lance_ids, make, names_of, reopen, write

lancedb: Any = pytest.importorskip("lancedb", reason="LanceDB is not installed")
IMPL = "lakewarden.warehouse.lance.Namespace"
NAME = ("db", "vectors")


@pytest.fixture
def lake(tmp_path: Path) -> Warehouse:
    return make(tmp_path / "lake")


def connected(lake: Warehouse, **properties: str) -> Any:
    return lancedb.connect_namespace(IMPL, {"warehouse": lake.location.uri, **properties})


def vectors(*ids: int) -> pa.Table:
    places = pa.array([[float(one), 0.0] for one in ids], pa.list_(pa.float32(), 2))
    return pa.table({"id": pa.array(ids, pa.int64()), "vector": places})


def test_what_lancedb_does_is_versions_of_the_warehouse(lake: Warehouse) -> None:
    database = connected(lake, actor="anna")
    database.create_namespace(["db"])
    table = database.create_table("vectors", vectors(1, 2), namespace_path=["db"])
    table.add(vectors(3))
    table.delete("id = 1")
    table.update(where="id = 2", values={"id": 20})
    table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(
        vectors(3, 4)
    )
    assert lance_ids(lake, NAME) == [3, 4, 20]
    done = [one.transaction.message for one in lake.history(6)]
    assert done[::-1] == [
        "create db.vectors",
        "overwrite db.vectors",
        "append db.vectors",
        "delete db.vectors",
        "update db.vectors",
        "update db.vectors",
    ]
    assert {one.transaction.actor for one in lake.history(6)} == {"anna"}
    found = table.search([4.0, 0.0]).limit(1).to_arrow()
    assert found["id"].to_pylist() == [4]


def test_lancedb_sees_what_others_wrote_and_they_see_what_it_wrote(lake: Warehouse) -> None:
    write(Namespace(lake), "create", 1, name=("t",))
    table = connected(lake).open_table("t")
    table.add(pa.table({"id": pa.array([2], pa.int64())}))
    write(Namespace(reopen(lake.location.uri)), "append", 3, name=("t",))
    table.checkout_latest()
    assert sorted(table.to_arrow()["id"].to_pylist()) == [1, 2, 3]
    assert lance_ids(lake, ("t",)) == [1, 2, 3]


def test_two_of_lancedb_lose_nothing(lake: Warehouse) -> None:
    write(Namespace(lake), "create", 0, name=("t",))
    tables = [connected(lake).open_table("t") for _ in range(2)]
    for number in range(1, 5):
        tables[number % 2].add(pa.table({"id": pa.array([number], pa.int64())}))
    assert lance_ids(lake, ("t",)) == [0, 1, 2, 3, 4]


def test_lancedb_writes_on_a_branch_by_the_name_of_its_fork(lake: Warehouse) -> None:
    write(Namespace(lake), "create", 1, name=("t",))
    lake.create_branch("dev")
    fork = f"lakewarden-{lake.known.manifest.branches['dev'].made}"
    table = connected(lake).open_table("t", branch=fork)
    table.add(pa.table({"id": pa.array([2], pa.int64())}))
    assert table.to_arrow()["id"].to_pylist() == [1, 2]
    assert lance_ids(lake, ("t",)) == [1]
    write(Namespace(lake, branch="dev"), "append", 3, name=("t",))
    table.checkout_latest()
    assert sorted(table.to_arrow()["id"].to_pylist()) == [1, 2, 3]
    assert [one.transaction.branch for one in lake.history(2)] == ["dev", "dev"]


def test_lancedb_goes_back_compacts_and_drops(lake: Warehouse) -> None:
    table = connected(lake).create_table("t", vectors(1, 2))
    table.add(vectors(3))
    table.optimize()
    assert lance_ids(lake, ("t",)) == [1, 2, 3]
    table.restore(1)
    assert lance_ids(lake, ("t",)) == [1, 2]
    connected(lake).drop_table("t")
    assert names_of(lake) == []
    lake.undrop(("t",))
    assert lance_ids(lake, ("t",)) == [1, 2]
