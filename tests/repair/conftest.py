"""A warehouse of small tables, and repair of it the way the command line does it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.repair.mending import Mender
from tests.warehouse.cleaning import Lake, new_lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A warehouse with Lance tables db.t and db.other, of ids 1 to 3."""
    found = new_lake(tmp_path / "lake")
    for name in ("t", "other"):
        found.lance("create", name, 1)
        found.lance("append", name, 2)
        found.lance("append", name, 3)
    return found


@pytest.fixture
def mender(spark: SparkSession, lake: Lake) -> Mender:
    return Mender(spark, lake.root)
