"""Repair on an object store, as its server counts requests."""

from __future__ import annotations

import lance
import pytest
from pyspark.sql import SparkSession

from lakewarden.errors import Exit
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import Request
from lakewarden.testing.s3 import s3_server
from lakewarden.warehouse.formats import with_formats
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.warehouse import Warehouse
from tests.cli.terminal import lakewarden
from tests.warehouse.lakes import dataset, id_rows, write

pytestmark = [pytest.mark.spark, pytest.mark.s3, pytest.mark.nightly]


def test_a_warehouse_on_s3_is_looked_at_and_mended(spark: SparkSession) -> None:
    """The preview makes no request that could change anything; going back and publishing work."""
    with s3_server() as server:
        server.create_bucket("lake")
        uri, options = "s3://lake/wh", server.options
        lake = with_formats(Warehouse.init(uri, opener=Opener(options)))
        for mode, number in (("create", 1), ("append", 2)):
            write(Namespace(lake), mode, number)
        place = lake.read().table(("db", "t")).location
        given = [one for pair in options.items() for one in ("--storage-option", "=".join(pair))]

        lance.dataset(place, storage_options=options).optimize.compact_files()
        server.reset()
        outcome = lakewarden("repair", uri, "--json", *given)
        assert outcome.rows[0]["classification"] == "verified_maintenance"
        assert outcome.document["damage"] == []
        counted = server.requests()
        assert {kind for kind, number in counted.items() if number} <= {
            Request.GET,
            Request.LIST,
            Request.HEAD,
        }
        outcome = lakewarden("repair", uri, "--confirm", "--yes", "--json", *given)
        assert (outcome.code, outcome.rows[0]["action"]) == (Exit.DONE, "healed")

        lance.write_dataset(id_rows(66), place, mode="append", storage_options=options)
        outcome = lakewarden("repair", uri, "--to-pin", "--confirm", "--yes", "--json", *given)
        assert (outcome.code, outcome.rows[0]["action"]) == (Exit.DONE, "healed")
        again = with_formats(Warehouse.open(uri, opener=Opener(options)))
        assert sorted(dataset(Namespace(again)).to_table()["id"].to_pylist()) == [1, 2]
        assert lance.dataset(place, storage_options=options).count_rows() == 2
