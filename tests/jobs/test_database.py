"""The tables are made by migrations, are what the code expects, and are never used otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations

from lakewarden.errors import ErrorKind, LakewardenError, Refused, StorageError, UsageError
from lakewarden.jobs.control import Action, TaskControl
from lakewarden.jobs.database import VERSION_TABLE, Database, migrate, open_database
from lakewarden.jobs.listing import TaskLists
from lakewarden.jobs.migrations.versions import (
    v0001_tasks,
    v0002_fixed_times,
    v0003_failures,
    v0004_log_by_end,
)
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.schema import ENTITY, METADATA, SLOT, TASK, TOKEN, WAREHOUSE
from lakewarden.jobs.tasks import EntityType, Failure, FixedBy, Turn
from lakewarden.jobs.warehouses import FoundTable, Warehouses
from lakewarden.world import SystemChance, SystemClock
from tests.jobs.small import EXPIRE, LAKE, active, logged, picked, wanted

if TYPE_CHECKING:
    from tests.postgres import PostgresServer

SECRET = "hunter2"
_OLD_SLOT = ("slot", "fence", "ran_at")


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database without tables."""
    if request.param == "sqlite":
        (tmp_path / "new.db").touch()
        return f"sqlite:///{tmp_path}/new.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.database())


@pytest.fixture
def statement(empty: str) -> Iterator[Callable[[str], None]]:
    engine = sa.create_engine(empty)

    def run(text: str) -> None:
        with engine.begin() as connection:
            connection.execute(sa.text(text))

    yield run
    engine.dispose()


def test_a_database_without_tables_is_refused_with_what_to_do(empty: str) -> None:
    with pytest.raises(Refused, match="run: lakewarden migrate") as error:
        open_database(empty)
    assert error.value.kind is ErrorKind.DATABASE_OUTDATED
    assert "\n" not in error.value.message
    assert migrate(empty)[0] is None
    open_database(empty).close()


def test_a_database_that_is_not_there_is_only_made_by_migrating(tmp_path: Path) -> None:
    place = tmp_path / "new.db"
    with pytest.raises(Refused, match=r"there is no database at .* lakewarden migrate") as error:
        open_database(f"sqlite:///{place}")
    assert error.value.kind is ErrorKind.NOT_FOUND
    assert not place.exists()
    migrate(f"sqlite:///{place}")
    open_database(f"sqlite:///{place}").close()


def test_tables_of_something_else_are_left_alone(empty: str) -> None:
    engine = sa.create_engine(empty)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE task (theirs INTEGER)"))
    with pytest.raises(Refused, match=r"tables of something else \(task\); nothing") as error:
        migrate(empty)
    assert error.value.kind is ErrorKind.ALREADY_EXISTS
    with engine.begin() as connection:
        assert sa.inspect(connection).get_table_names() == ["task"]
        connection.execute(sa.text("ALTER TABLE task RENAME TO theirs"))
    engine.dispose()
    if empty.startswith("sqlite"):
        with pytest.raises(Refused, match=r"a database of its own"):
            migrate(empty)
    else:
        # A server's database may be shared.
        migrate(empty)


def test_migrating_again_changes_nothing(empty: str) -> None:
    _, made = migrate(empty)
    database = open_database(empty)
    (task,) = TaskQueue(database, SystemChance()).enqueue([wanted(SystemClock().now())])
    assert migrate(empty) == (made, made)
    (claim,) = TaskQueue(database, SystemChance()).pick(EXPIRE)
    assert claim.task_id == task
    database.close()


def test_a_database_of_the_first_release_keeps_what_it_has(empty: str) -> None:
    engine = sa.create_engine(empty)
    with engine.begin() as connection:
        with Operations.context(MigrationContext.configure(connection)):
            v0001_tasks.upgrade()
        connection.execute(sa.text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32))"))
        connection.execute(sa.text(f"INSERT INTO {VERSION_TABLE} VALUES ('0001')"))
        old = sa.Table("task", sa.MetaData(), autoload_with=connection)
        new = sa.Table(
            "task", sa.MetaData(), *(sa.Column(c.name, TASK.c[c.name].type) for c in old.c)
        )
        now = SystemClock().now()
        task = wanted(now)
        row = {
            "task_id": UUID(int=9), "attempt": 0, "project_id": task.scope.project_id,
            "warehouse_id": task.scope.warehouse_id, "queue_name": EXPIRE,
            "entity_type": task.entity.type, "entity_id": task.entity.id, "slot": task.slot,
            "status": "SCHEDULED", "scheduled_for": now, "fence": 0, "progress": 0.0,
            "task_data": {}, "origin": task.origin, "created_at": now,
        }  # fmt: skip
        connection.execute(sa.insert(new).values(row))
        connection.execute(sa.text(f"INSERT INTO slot VALUES ('{task.slot}', 7, NULL, NULL)"))
        lake = {"id": task.scope.warehouse_id, "project_id": task.scope.project_id, "name": "l"}
        place = {"kind": "iceberg", "location": "c", "access": {}, "created_at": now}
        connection.execute(sa.insert(WAREHOUSE).values(lake | place))
        table: dict[str, object] = {
            "id": task.entity.id, "warehouse_id": task.scope.warehouse_id, "type": "table",
            "name": ["db", "é"], "key": '["db", "é"]', "target": "t", "properties": {},
            "created_at": now, "active": True,
        }  # fmt: skip
        given = sa.Table("entity", sa.MetaData(), *(sa.Column(n, ENTITY.c[n].type) for n in table))
        connection.execute(sa.insert(given).values(table))
    engine.dispose()
    assert migrate(empty)[0] == "0001"
    database = open_database(empty)
    queue = TaskQueue(database, SystemChance())
    with database.writing() as connection:
        sooner = replace(task, scheduled_for=now - timedelta(hours=1))
        assert queue.bring_forward([sooner], connection) == [Turn.SOONER]
    (claim,) = queue.pick(EXPIRE)
    assert claim.task_id == row["task_id"]
    assert claim.fence > 7
    found = FoundTable(("db", "é"), EntityType.TABLE, "elsewhere")
    assert task.scope.warehouse_id is not None
    (known,) = Warehouses(database, SystemChance()).refresh(task.scope.warehouse_id, [found])
    assert (known.id, known.target) == (task.entity.id, "elsewhere")
    database.close()


def test_what_was_said_of_times_is_kept(empty: str) -> None:
    engine = sa.create_engine(empty)
    now = SystemClock().now()
    with engine.begin() as connection:
        with Operations.context(MigrationContext.configure(connection)):
            for step in (v0001_tasks, v0002_fixed_times, v0003_failures, v0004_log_by_end):
                step.upgrade()
        connection.execute(sa.text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32))"))
        connection.execute(sa.text(f"INSERT INTO {VERSION_TABLE} VALUES ('0004')"))
        kinds = {**dict(TASK.c), "fixed": sa.Column("fixed", sa.Boolean)}
        for number, fixed in ((1, True), (2, False)):
            row = {
                "task_id": UUID(int=number), "attempt": 0, "project_id": LAKE.project_id,
                "queue_name": EXPIRE, "entity_type": "table", "slot": f"s{number}",
                "status": "SCHEDULED", "scheduled_for": now, "fence": 0, "progress": 0.0,
                "task_data": {}, "origin": "commit", "created_at": now, "fixed": fixed,
            }  # fmt: skip
            given = sa.Table("task", sa.MetaData(), *(sa.Column(n, kinds[n].type) for n in row))
            connection.execute(sa.insert(given).values(row))
        slot = sa.Table("slot", sa.MetaData(), *(sa.Column(n, SLOT.c[n].type) for n in _OLD_SLOT))
        connection.execute(sa.insert(slot).values(slot="s1", fence=1, ran_at=now))
    engine.dispose()
    assert migrate(empty)[0] == "0004"
    database = open_database(empty)
    assert [row.fixed_by for row in active(database)] == [FixedBy.PERSON, None]
    with database.reading() as connection:
        (kept,) = connection.execute(sa.select(SLOT)).all()
    assert kept.ran_at == kept.done_at == now
    database.close()


def test_migrations_make_the_tables_that_the_code_expects(empty: str) -> None:
    migrate(empty)
    database = open_database(empty)
    with database.reading() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": VERSION_TABLE,
                "compare_type": False,
                "target_metadata": METADATA,
            },
        )
        assert compare_metadata(context, METADATA) == []
        # Alembic does not compare what an index leaves out.
        indices = sa.inspect(connection).get_indexes("task_log")
        (final,) = [one for one in indices if one["name"] == "uq_task_log_final"]
        assert final["unique"]
        where = final["dialect_options"][f"{database.engine.dialect.name}_where"]
        assert str(where) == "final"
    database.close()


def test_several_may_migrate_at_once(empty: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(migrate, [empty] * 4))
    assert len([before for before, _ in found if before is None]) == 1
    open_database(empty).close()


def test_a_newer_database_is_refused(empty: str, statement: Callable[[str], None]) -> None:
    migrate(empty)
    statement(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    for use in (open_database, migrate):
        with pytest.raises(Refused, match="upgrade lakewarden first") as error:
            use(empty)
        assert error.value.kind is ErrorKind.NEWER_STAMP


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "nosuch://host/db",
        "mysql://ada:hunter2@host/db",
        "sqlite://",
        "sqlite:///:memory:",
        "postgresql+nosuch://ada:hunter2@host/db",
    ],
)
def test_an_address_that_cannot_be_used_is_told_without_the_password(url: str) -> None:
    for use in (open_database, migrate):
        with pytest.raises(UsageError, match="write its address like") as error:
            use(url)
        assert SECRET not in repr(error.value)


def test_a_server_that_is_not_there_is_told_without_the_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError, match="that it is running") as error:
        open_database(f"postgresql://ada:{SECRET}@/lake?host=/nowhere")
    assert SECRET not in repr(error.value)
    assert error.value.__cause__ is None


def test_a_place_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(LakewardenError, match="unable to open"):
        migrate(f"sqlite:///{tmp_path}/none/such.db")


def test_the_server_decides_what_time_it_is(
    postgres: PostgresServer, postgres_template: str
) -> None:
    class Wrong(SystemClock):
        """A worker's clock that must not be asked."""

        def now(self) -> datetime:
            raise AssertionError("the worker's clock was asked")

    url = postgres.url(postgres.database(template=postgres_template))
    opened = open_database(url)
    database = Database(opened.engine, Wrong(), opened.server_time)
    queue = TaskQueue(database, SystemChance())
    queue.enqueue([wanted(SystemClock().now())])
    (claim,) = queue.pick(EXPIRE)
    queue.heartbeat(claim)
    queue.fail(claim, "not yet")
    opened.close()


def test_a_writer_on_sqlite_waits_for_another(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    migrate(url)
    databases = [open_database(url) for _ in range(4)]

    def add(number: int) -> int:
        queue = TaskQueue(databases[number % 4], SystemChance())
        made = queue.enqueue([wanted(SystemClock().now(), number)])
        return len([one for one in made if one is not None])

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(add, range(1, 101))) == 100
    for database in databases:
        database.close()


def test_what_the_database_refuses_is_not_waited_for(database: Database) -> None:
    row = {"id": UUID(int=1), "name": "ada", "role": "read", "hash": b"1"}
    new = sa.insert(TOKEN).values(row | {"created_at": database.clock.now()})
    with database.writing() as connection:
        connection.execute(new)
    with pytest.raises(sa.exc.IntegrityError), database.writing() as connection:
        connection.execute(new)


def test_nul_is_taken_out_of_what_is_stored(queue: TaskQueue, database: Database) -> None:
    claim = picked(queue, database.clock.now())
    queue.heartbeat(claim, 0.5, {"detail": ["a\0b", {"c\0": 1}]})
    (row,) = active(database)
    assert row.execution_details == {"detail": ["a\ufffdb", {"c\ufffd": 1}]}
    queue.fail(claim, "no file a\0b", Failure.PERMANENT, result={"path": "a\0b", "files": 3})
    (row,) = logged(database)
    assert (row.message, row.result) == ("no file a\ufffdb", {"path": "a\ufffdb", "files": 3})


def test_who_may_not_do_it_is_told(postgres: PostgresServer, postgres_template: str) -> None:
    name = postgres.database(template=postgres_template)
    postgres.run("CREATE ROLE guest LOGIN")
    url = postgres.url(name).replace("lakewarden@", "guest@")
    with pytest.raises(StorageError, match="permission denied"):
        open_database(url)


@pytest.mark.parametrize(
    ("zone", "at"),
    [
        ("Europe/Berlin", datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
        ("America/New_York", datetime(1, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_server_in_another_time_zone_returns_every_time(
    postgres: PostgresServer, postgres_template: str, zone: str, at: datetime
) -> None:
    name = postgres.database(template=postgres_template)
    postgres.run(f"ALTER DATABASE {name} SET timezone = '{zone}'")
    # What the address says besides is heard, too.
    database = open_database(f"{postgres.url(name)}&options=-c%20statement_timeout%3D12345")
    queue, lists = TaskQueue(database, SystemChance()), TaskLists(database)
    queue.enqueue([wanted(at, 1), wanted(SystemClock().now(), 2)])
    assert at in {one.scheduled_for for one in lists.page(LAKE).tasks}
    assert [one.number for one in lists.counts()] == [2]
    claims = queue.pick(EXPIRE, limit=2)
    assert len(claims) == (1 if at.year == 9999 else 2)
    TaskControl(database).control(LAKE, Action.CANCEL, [one.task_id for one in active(database)])
    assert active(database) == []
    with database.reading() as connection:
        assert connection.scalar(sa.text("SHOW statement_timeout")) == "12345ms"
    database.close()


def test_no_error_repeats_what_was_to_be_stored(database: Database) -> None:
    row = {"id": UUID(int=1), "name": SECRET, "role": "read", "hash": b"1"}
    new = sa.insert(TOKEN).values(row | {"created_at": database.clock.now()})
    with database.writing() as connection:
        connection.execute(new)
    with pytest.raises(sa.exc.IntegrityError) as error, database.writing() as connection:
        connection.execute(new)
    # The driver's own words are another matter: PostgreSQL's tell which key was taken.
    assert SECRET not in str(error.value).replace(str(error.value.orig), "")
