"""Fixtures for all levels: one Spark session, and operations bound to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.postgres import postgres

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lakewarden.maintenance.plan import Plan
    from lakewarden.maintenance.removal import Receipt

__all__ = ["postgres"]

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", max_examples=5000, deadline=None)
# The profile is the environment's to choose: CI digs deeper.
profile = os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev")  # noqa: TID251
settings.load_profile(profile)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if profile != "nightly":
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="HYPOTHESIS_PROFILE is not nightly"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session the command line would start, shared by all tests of a process."""
    from lakewarden.cli.session import Engine, start

    # Tables here are small: writing and compiling Java for each query takes longer than the query.
    session = start(Engine(conf={"spark.sql.codegen.wholeStage": "false"}))
    yield session
    session.stop()


@pytest.fixture
def clean(spark: SparkSession) -> Callable[..., tuple[Plan, Receipt]]:
    """Plan and execute cleanup of the given targets; writers' margin off unless asked for."""
    import lakewarden

    def run(targets: str | Path | list[str], **rules: Any) -> tuple[Plan, Receipt]:
        named = targets if isinstance(targets, list) else [str(targets)]
        plan = lakewarden.plan_cleanup(spark, named, **{"min_age": "0s", "tasks": 4, **rules})
        return plan, lakewarden.execute(
            spark, plan, tasks=4, storage_options=rules.get("storage_options")
        )

    return run
