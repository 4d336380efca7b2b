"""A warehouse in memory with a clock of its own, and a PostgreSQL server that ends with the tests."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa

from lakewarden.testing.memory import MemoryStore
from lakewarden.testing.simulation import World
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import made_in


@dataclass
class PostgresServer:
    """A server of our own, reached through a socket in its directory."""

    directory: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://lakewarden@/{database}?host={self.directory}"

    def database(self) -> str:
        """Make an empty database and return its name."""
        name = f"test{next(self._numbers)}"
        self.run(f"CREATE DATABASE {name}")
        return name

    def drop(self, name: str) -> None:
        """Take a database away from under its users."""
        self.run(f"DROP DATABASE {name} WITH (FORCE)")

    def run(self, statement: str) -> None:
        engine = sa.create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                connection.execute(sa.text(statement))
        finally:
            engine.dispose()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    pytest.importorskip("psycopg", reason="there is no driver for PostgreSQL")
    initdb, pg_ctl = shutil.which("initdb"), shutil.which("pg_ctl")
    if not initdb or not pg_ctl:
        pytest.skip("there is no PostgreSQL (initdb, pg_ctl) on this machine")
    user = _user()
    # Not below tmp_path, which nobody else may enter and whose name is long for a socket.
    with tempfile.TemporaryDirectory(prefix="lw-pg-", ignore_cleanup_errors=True) as root:
        directory = Path(root)
        if user is not None:
            os.chown(directory, user, -1)
        data = str(directory / "data")

        def run(*command: str) -> None:
            subprocess.run(
                command, check=True, user=user, cwd=root, stdout=subprocess.DEVNULL, timeout=120
            )

        run(
            initdb, "-D", data, "-U", "lakewarden", "-A", "trust", "-E", "UTF8", "-N", "--no-locale"
        )
        settings = f"-F -c listen_addresses='' -c unix_socket_directories={root}"
        log = str(directory / "log")
        run(pg_ctl, "-D", data, "-w", "-l", log, "-o", settings, "start")
        try:
            yield PostgresServer(directory)
        finally:
            run(pg_ctl, "-D", data, "-w", "-m", "immediate", "stop")


def _user() -> int | None:
    """Return who runs the server, which refuses to be run by root."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    pytest.skip("PostgreSQL does not run as root, and there is nobody else")


@pytest.fixture
def world() -> World:
    """A clock that only goes on when it is told to."""
    return World(0)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def lake(store: MemoryStore, world: World) -> Warehouse:
    return made_in(store, world)
