"""The service's database: SQLite beside one machine's processes, PostgreSQL for many.

**Which clock decides.**  Whether a task is due, whether a worker was heard of lately and when an
attempt ended is all told by one clock: PostgreSQL's own, so that a worker whose clock is wrong takes
nothing over from one that lives; with SQLite, whose users share a machine, that machine's.  A clock
that is passed to `open_database` replaces either, for simulations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from lakewarden.errors import ErrorKind, Refused, StorageError, UsageError
from lakewarden.jobs.schema import METADATA
from lakewarden.world import Clock, SystemClock

#: The table in which Alembic keeps the revision; others may keep theirs in the same database.
VERSION_TABLE = "lakewarden_revision"
#: How long one writer waits for others on SQLite.
_BUSY_MS = 30_000
_IMMEDIATE = "lakewarden_immediate"
#: What comes of values and statements, however long one waits.
_MISTAKES = (
    sa.exc.DataError,
    sa.exc.IntegrityError,
    sa.exc.NotSupportedError,
    sa.exc.ProgrammingError,
)
#: PostgreSQL's word for it; it is for the operator to mend.
_NO_PRIVILEGE = "42501"
#: Its words for two that waited for each other, of whom it has ended one.
_COLLISIONS = frozenset({"40P01", "40001"})
_TRIES = 5
#: Any number, as long as nobody else takes it: only one migration runs at a time.
_MIGRATION_LOCK = 7_115_203_811

Answer = TypeVar("Answer")


class CollisionError(StorageError):
    """A transaction was ended in favour of another.  Nothing of it was done; it may go well now."""


@dataclass(frozen=True, slots=True)
class Database:
    """Connections, each in a transaction of its own."""

    engine: sa.Engine
    #: For waiting; what time it is, `moment` says.
    clock: Clock
    #: Whether the server's clock decides.
    server_time: bool

    @property
    def is_postgres(self) -> bool:
        return self.engine.dialect.name == "postgresql"

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Yield a connection that waits for no writer."""
        with translated(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self, joined: sa.Connection | None = None) -> Iterator[sa.Connection]:
        """Yield a connection whose changes are made together when the block ends, or not at all.

        Whoever is in such a block already passes its connection on, to be `joined`: the outer block
        ends both.  On SQLite there is one writer at a time, from the first statement on: two that read
        first and then write would both lose.
        """
        if joined is not None:
            yield joined
            return
        engine = self.engine.execution_options(**{_IMMEDIATE: True})
        with translated(), engine.begin() as connection:
            yield connection

    def transact(self, work: Callable[[sa.Connection], Answer]) -> Answer:
        """Do something in a transaction, and all of it again if it was ended in favour of another."""
        for left in reversed(range(_TRIES)):
            try:
                with self.writing() as connection:
                    return work(connection)
            except CollisionError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    def moment(self, connection: sa.Connection) -> datetime:
        """Return what time it is, by the clock that decides."""
        if not self.server_time:
            return self.clock.now()
        found = connection.scalar(sa.select(sa.func.clock_timestamp()))
        assert isinstance(found, datetime)
        return found.astimezone(UTC)

    def ahead(self) -> timedelta:
        """Return by how much this process's clock is ahead of the one that decides."""
        with self.reading() as connection:
            found = self.moment(connection)
        return self.clock.now() - found

    def close(self) -> None:
        self.engine.dispose()


def open_database(url: str, *, clock: Clock | None = None) -> Database:
    """Open a database whose tables are this release's, or say what to do about it."""
    engine = _engine(url)
    try:
        _check(engine)
    except BaseException:
        engine.dispose()
        raise
    server_time = clock is None and engine.dialect.name == "postgresql"
    return Database(engine, SystemClock() if clock is None else clock, server_time)


def migrate(url: str) -> tuple[str | None, str]:
    """Bring the tables up to date, and return the revision before and after.  Running it again is fine."""
    engine = _engine(url)
    config = _alembic()
    try:
        with (
            translated(),
            engine.execution_options(**{_IMMEDIATE: True}).begin() as connection,
        ):
            if engine.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            before = _revision(connection)
            _refuse_newer(before)
            if before is None:
                _refuse_strangers(connection)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            after = _revision(connection)
    finally:
        engine.dispose()
    assert after is not None
    return before, after


def _check(engine: sa.Engine) -> None:
    _refuse_missing(engine.url)
    with translated(), engine.connect() as connection:
        found = _revision(connection)
    _refuse_newer(found)
    if found != _head():
        raise Refused(
            ErrorKind.DATABASE_OUTDATED,
            f"the service's database is at revision {found or 'none'}, this release needs {_head()}; "
            "stop the workers and run: lakewarden migrate",
        )


def _refuse_missing(url: sa.URL) -> None:
    """Refuse a file that is not there: SQLite would make one, and nobody would notice the slip.

    Where even the directory is missing, it may be a mount that is still to come.
    """
    if url.get_backend_name() != "sqlite" or "uri" in url.query:
        return
    assert url.database is not None
    place = Path(url.database)
    if place.parent.is_dir() and not place.exists():
        raise Refused(
            ErrorKind.NOT_FOUND,
            f"there is no database at {place}; check the address, or if it is to be a new one, run: "
            "lakewarden migrate",
        )


def _refuse_strangers(connection: sa.Connection) -> None:
    """Refuse to make our tables among those of somebody else that are called the same.

    A server's database may be shared; a file is its owner's alone.
    """
    there = set(sa.inspect(connection).get_table_names())
    alone = connection.dialect.name == "sqlite"
    strangers = sorted(there if alone else there & set(METADATA.tables))
    if strangers:
        shown = ", ".join(strangers[:3])
        raise Refused(
            ErrorKind.ALREADY_EXISTS,
            f"the database holds tables of something else ({shown}); nothing was changed: give the "
            "service a database of its own",
        )


def _refuse_newer(revision: str | None) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(_alembic()).walk_revisions()}
    if revision is not None and revision not in known:
        raise Refused(
            ErrorKind.NEWER_STAMP,
            f"the service's database is at revision {revision}, which a newer release has made; "
            "upgrade lakewarden first",
        )


def _head() -> str | None:
    return ScriptDirectory.from_config(_alembic()).get_current_head()


def _revision(connection: sa.Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision()


def _alembic() -> Config:
    config = Config()
    # A percent sign would be a reference to another setting.
    place = str(Path(__file__).with_name("migrations")).replace("%", "%%")
    config.set_main_option("script_location", place)
    config.set_main_option("path_separator", "os")
    return config


def _engine(url: str) -> sa.Engine:
    try:
        address = sa.make_url(re.sub("^postgres(ql)?://", "postgresql+psycopg://", url))
        # A server that was restarted leaves connections that only look alive.
        engine = sa.create_engine(address, pool_pre_ping=True, hide_parameters=True)
    except (sa.exc.ArgumentError, ImportError, ValueError) as error:
        raise _unusable(type(error).__name__) from None
    if engine.dialect.name not in {"sqlite", "postgresql"}:
        raise _unusable(engine.dialect.name)
    if engine.dialect.name == "sqlite" and address.database in {None, "", ":memory:"}:
        # Each connection would have a database of its own.
        raise _unusable("in memory")
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _prepare)
        sa.event.listen(engine, "begin", _begin)
    else:
        sa.event.listen(engine, "connect", _speak_utc)
    return engine


def _unusable(why: str) -> UsageError:
    return UsageError(
        ErrorKind.USAGE,
        f"the service's database cannot be used ({why}); write its address like "
        "sqlite:////var/lib/lakewarden.db, or postgresql://user@host/name with "
        "lakewarden[postgres] installed",
    )


def _prepare(connection: Any, _record: object) -> None:
    # The driver's own transactions begin with the first change, which is too late.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _speak_utc(connection: Any, _record: object) -> None:
    """Let times be told in UTC: in the server's own zone some have no name that Python knows.

    Not as an option of the address, where it would stand for others that are given there or in the
    environment, and which some poolers refuse.
    """
    cursor = connection.cursor()
    cursor.execute("SET TIME ZONE 'UTC'")
    cursor.close()
    connection.commit()


def _begin(connection: sa.Connection) -> None:
    immediate = connection.get_execution_options().get(_IMMEDIATE)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


@contextmanager
def translated() -> Iterator[None]:
    """Turn the database's errors into ours; mistakes of our own stay what they are.

    Whoever waits for a database that is away must not wait for one that has refused a value.
    """
    try:
        yield
    except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
        state = getattr(getattr(error, "orig", None), "sqlstate", None)
        if isinstance(error, _MISTAKES) and state != _NO_PRIVILEGE:
            raise
        if state in _COLLISIONS:
            raise CollisionError(
                ErrorKind.STORAGE,
                "the service's database ended this in favour of something else; try again",
            ) from None
        said = " ".join(str(getattr(error, "orig", None) or type(error).__name__).split())[:200]
        raise StorageError(
            ErrorKind.STORAGE,
            f"the service's database failed: {said}; check its address and that it is running",
        ) from None
