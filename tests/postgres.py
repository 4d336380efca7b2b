"""A PostgreSQL server that ends with the tests."""

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


@dataclass
class PostgresServer:
    """A server of our own, reached through a socket in its directory."""

    directory: Path
    pg_ctl: str
    user: int | None
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://lakewarden@/{database}?host={self.directory}"

    def database(self, template: str = "template1") -> str:
        """Make an empty database and return its name."""
        name = f"test{next(self._numbers)}"
        self.run(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop(self, name: str) -> None:
        """Take a database away from under its users."""
        self.run(f"DROP DATABASE {name} WITH (FORCE)")

    def start(self) -> None:
        settings = f"-F -c listen_addresses='' -c unix_socket_directories={self.directory}"
        self.control("-w", "-l", str(self.directory / "log"), "-o", settings, "start")

    def control(self, *arguments: str) -> None:
        run_as(
            self.user, self.directory, self.pg_ctl, "-D", str(self.directory / "data"), *arguments
        )

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
        run_as(
            user, directory,
            initdb, "-D", data, "-U", "lakewarden", "-A", "trust", "-E", "UTF8", "-N", "--no-locale",
        )  # fmt: skip
        server = PostgresServer(directory, pg_ctl, user)
        server.start()
        try:
            yield server
        finally:
            server.control("-w", "-m", "immediate", "stop")


def run_as(user: int | None, directory: Path, *command: str) -> None:
    subprocess.run(
        command, check=True, user=user, cwd=directory, stdout=subprocess.DEVNULL, timeout=120
    )


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
