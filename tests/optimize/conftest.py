"""What the tests of optimize share."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.optimize.tuning import Lake, Tuner


@pytest.fixture
def tuner(spark: SparkSession) -> Tuner:
    return Tuner(spark)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")
