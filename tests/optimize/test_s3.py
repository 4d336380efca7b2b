"""Tables on an S3 server: storage options reach the workers, and lost answers lose no rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lance
import pytest

from lakewarden.maintenance.fleet import parse_targets
from lakewarden.maintenance.places import Alone, Together
from lakewarden.storage.opening import Opener
from lakewarden.testing.s3 import S3Server, s3_server
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.warehouse import Warehouse
from tests.optimize.tuning import Tuner, rows, some, unindexed

pytestmark = [pytest.mark.spark, pytest.mark.s3, pytest.mark.nightly]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        running.create_bucket("lake")
        yield running


def filled(where: dict[str, Any]) -> None:
    """Make a table in pieces, the last of which its index does not cover."""
    for start in (0, 100):
        lance.write_dataset(some(start), **where, mode="append" if start else "create")
    at = dict(where)
    lance.dataset(**at).create_scalar_index("id", "BTREE")
    lance.write_dataset(some(200), **where, mode="append")


def check(found: Any, before: Any) -> None:
    assert rows(found) == before
    assert len(found.get_fragments()) == 1
    assert unindexed(found, "id_idx") == 0
    for wanted in (5, 150, 299):
        assert found.to_table(filter=f"id = {wanted}").num_rows == 1


def test_a_table_on_s3(tuner: Tuner, server: S3Server) -> None:
    where = {"uri": "s3://lake/plain/t.lance", "storage_options": server.options}
    filled(where)
    before = rows(lance.dataset(**where))
    targets = parse_targets(["s3://lake/plain"], recursive=True)
    (row,) = tuner.run(Alone(targets, Opener(server.options))).rows
    assert row.error is None
    check(lance.dataset(**where), before)
    assert lance.dataset(**where, version=1).count_rows() == 100


def test_a_warehouse_on_s3(tuner: Tuner, server: S3Server) -> None:
    opener = Opener(server.options)
    Warehouse.init("s3://lake/wh", opener=opener)

    def where() -> dict[str, Any]:
        space = Namespace(Warehouse.open("s3://lake/wh", opener=opener))
        return {"namespace_client": space, "table_id": ["db", "t"]}

    filled(where())
    before = rows(lance.dataset(**where()))
    (row,) = tuner.run(Together(Warehouse.open("s3://lake/wh", opener=opener))).rows
    assert row.error is None
    check(lance.dataset(**where()), before)
    path = Warehouse.open("s3://lake/wh", opener=opener).read().table(("db", "t")).location
    by_path = lance.dataset(path, storage_options=server.options)
    assert by_path.version == row.lance_head_version == row.manifest_version
