"""A queue on each kind of database, with a clock that only goes on when it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lakewarden.jobs.database import Database, migrate, open_database
from lakewarden.jobs.queue import TaskQueue
from lakewarden.testing.simulation import World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.jobs.lab import Lab
    from tests.postgres import PostgresServer


@pytest.fixture(scope="session")
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite database with all tables, to be copied: making them takes longer."""
    place = tmp_path_factory.mktemp("template") / "tasks.db"
    migrate(f"sqlite:///{place}")
    return place


@pytest.fixture
def bare_lab(template: Path, tmp_path: Path) -> Iterator[Lab]:
    """A lab without Spark, for what does not need it."""
    from tests.jobs.lab import Lab

    place = tmp_path / "tasks.db"
    place.write_bytes(template.read_bytes())
    made = Lab.of(f"sqlite:///{place}", None)
    yield made
    made.database.close()


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    name = postgres.database()
    migrate(postgres.url(name))
    return name


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database with all tables and nothing in them."""
    if request.param == "sqlite":
        place = tmp_path / "tasks.db"
        template: Path = request.getfixturevalue("template")
        place.write_bytes(template.read_bytes())
        return f"sqlite:///{place}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.database(template=request.getfixturevalue("postgres_template")))


@pytest.fixture
def world() -> World:
    return World(0)


@pytest.fixture
def database(url: str, world: World) -> Iterator[Database]:
    opened = open_database(url, clock=world)
    yield opened
    opened.close()


@pytest.fixture
def queue(database: Database, world: World) -> TaskQueue:
    return TaskQueue(database, world)


@pytest.fixture
def lab(template: Path, tmp_path: Path, spark: SparkSession) -> Iterator[Lab]:
    """What a worker process has, with the machine's own clock."""
    from tests.jobs.lab import Lab

    place = tmp_path / "tasks.db"
    place.write_bytes(template.read_bytes())
    made = Lab.of(f"sqlite:///{place}", spark)
    yield made
    made.database.close()
