"""Warehouses and their tables, stored configs, tokens, the record of what was done, the log's cleanup."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from uuid import UUID

import pytest
import sqlalchemy as sa

from lakewarden.jobs.commits import Change, Commits
from lakewarden.jobs.config_store import ConfigStore, StoredConfig
from lakewarden.jobs.control import Action, TaskControl
from lakewarden.jobs.database import Database, open_database
from lakewarden.jobs.listing import TaskLists
from lakewarden.jobs.log_cleanup import LogCleanup
from lakewarden.jobs.queue import TaskQueue
from lakewarden.jobs.queues import TASK_LOG_CLEANUP
from lakewarden.jobs.refusals import RequestRefused
from lakewarden.jobs.schema import AUDIT, SLOT, TOKEN
from lakewarden.jobs.tasks import EntityType, Failure, NewTask, Scope
from lakewarden.jobs.tokens import Audit, Role, Tokens
from lakewarden.jobs.warehouses import Access, FoundTable, WarehouseKind, Warehouses
from lakewarden.testing.simulation import World
from lakewarden.world import SystemChance
from tests.jobs.small import EXPIRE, LAKE, ORPHANS, active, logged, picked, store, wanted

SECRET = "hunter2"
ACCESS = Access({"secret_access_key": SECRET}, {"token": SECRET})


@pytest.fixture
def warehouses(database: Database, world: World) -> Warehouses:
    return Warehouses(database, world)


# -- warehouses ----------------------------------------------------------------------------------


def test_a_warehouse_is_registered_once(warehouses: Warehouses) -> None:
    made = warehouses.register("lake", WarehouseKind.ICEBERG, "prod")
    assert warehouses.get(made.id) == made
    with pytest.raises(RequestRefused) as error:
        warehouses.register("lake", WarehouseKind.LANCE, "s3://b/lake")
    assert (error.value.name, error.value.code) == ("WarehouseAlreadyExists", 409)
    elsewhere = warehouses.register(
        "lake", WarehouseKind.LANCE, "s3://b/lake", project_id=UUID(int=7)
    )
    assert warehouses.all() == [made]
    assert warehouses.all(UUID(int=7)) == [elsewhere]


@pytest.mark.parametrize(
    ("kind", "place", "taken"),
    [
        (WarehouseKind.LANCE, "s3://b/lake", True),
        (WarehouseKind.LAKEWARDEN, "s3a://b//lake/", True),
        (WarehouseKind.LAKEWARDEN, "s3://b/lake/inner", True),
        (WarehouseKind.LANCE, "s3://b", True),
        (WarehouseKind.LANCE, "s3://b/lake_backup", False),
        (WarehouseKind.LANCE, "s3://other/lake", False),
        (WarehouseKind.LAKEWARDEN, "/lake", False),
        (WarehouseKind.ICEBERG, "lake", False),
    ],
)
def test_a_place_belongs_to_one_warehouse(
    warehouses: Warehouses, kind: WarehouseKind, place: str, taken: bool
) -> None:
    one = warehouses.register("one", WarehouseKind.LANCE, "s3://b/lake")
    warehouses.register("catalog", WarehouseKind.ICEBERG, "prod")
    if not taken:
        warehouses.register("two", kind, place)
        return
    with pytest.raises(RequestRefused, match="'one'") as error:
        warehouses.register("two", kind, place, project_id=UUID(int=7))
    assert (error.value.name, error.value.code) == ("WarehouseLocationTaken", 409)
    warehouses.delete(one.id)
    warehouses.register("two", kind, place)


@pytest.mark.parametrize(
    ("place", "taken"),
    [
        ("abfss://c@lakes.dfs.core.windows.net/lake", True),
        ("wasbs://c@lakes.blob.core.windows.net/lake/inner", True),
        ("az://c/lake/", True),
        ("az://other/lake", False),
    ],
)
def test_a_container_without_its_account_may_be_anybodys(
    warehouses: Warehouses, place: str, taken: bool
) -> None:
    warehouses.register("one", WarehouseKind.LANCE, "az://c/lake")
    if not taken:
        warehouses.register("two", WarehouseKind.LANCE, place)
        return
    with pytest.raises(RequestRefused, match="'one'"):
        warehouses.register("two", WarehouseKind.LANCE, place)


def test_of_many_that_want_a_place_one_gets_it(url: str, world: World) -> None:
    barrier = Barrier(4)

    def register(number: int) -> bool:
        database = open_database(url, clock=world)
        try:
            barrier.wait()
            place = "s3://b/lake" + "/inner" * number
            Warehouses(database, SystemChance()).register(f"w{number}", WarehouseKind.LANCE, place)
        except RequestRefused:
            return False
        finally:
            database.close()
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(register, range(4))) == 1


def test_no_credential_is_shown(warehouses: Warehouses) -> None:
    made = warehouses.register("lake", WarehouseKind.LANCE, "s3://b/lake", access=ACCESS)
    assert warehouses.access(made.id) == ACCESS
    shown = [made, warehouses.all(), warehouses.get(made.id), warehouses.access(made.id)]
    assert SECRET not in repr(shown)
    assert "secret_access_key=…" in repr(ACCESS)


def test_a_warehouse_with_tasks_is_not_forgotten(
    warehouses: Warehouses, queue: TaskQueue, world: World
) -> None:
    made = warehouses.register("lake", WarehouseKind.LANCE, "s3://b/lake")
    scope = Scope(warehouse_id=made.id)
    store(queue.database, scope, EXPIRE, {"min-snapshots-to-keep": 2})
    (task,) = queue.enqueue([wanted(world.now(), scope=scope)])
    assert task is not None
    with pytest.raises(RequestRefused) as error:
        warehouses.delete(made.id)
    assert error.value.name == "WarehouseHasUnfinishedTasks"
    assert warehouses.get(made.id) == made
    for number, whose in ((2, scope), (3, LAKE)):
        queue.enqueue([wanted(world.now(), number, scope=whose)])
    assert len(queue.pick(EXPIRE, limit=3)) == 3
    mine = [row.task_id for row in active(queue.database) if row.warehouse_id == made.id]
    TaskControl(queue.database).control(scope, Action.CANCEL, mine)
    warehouses.delete(made.id)
    with queue.database.reading() as connection:
        # Those of others stay.
        (slot,) = connection.scalars(sa.select(SLOT.c.slot))
    assert slot.startswith(LAKE.slots)
    for gone in (warehouses.get, warehouses.delete):
        with pytest.raises(RequestRefused) as error:
            gone(made.id)
        assert (error.value.name, error.value.code) == ("WarehouseNotFound", 404)
    assert ConfigStore(queue.database).get(scope, EXPIRE) == StoredConfig()
    assert warehouses.access(made.id) == Access()


def test_a_task_comes_before_the_end_of_its_warehouse_or_not_at_all(
    warehouses: Warehouses, queue: TaskQueue, world: World
) -> None:
    lake = warehouses.register("lake", WarehouseKind.ICEBERG, "c").id
    (table,) = warehouses.refresh(lake, found("a"))
    scope = Scope(warehouse_id=lake)
    with ThreadPoolExecutor(1) as pool:
        with queue.database.writing() as connection:
            warehouses.table(lake, table.type, table.id, joined=connection)
            gone = pool.submit(warehouses.delete, lake)
            # It waits for us.
            with pytest.raises(TimeoutError):
                gone.result(0.5)
            queue.schedule(NewTask(EXPIRE, scope, table.entity, world.now()), joined=connection)
        with pytest.raises(RequestRefused) as error:
            gone.result(10)
    assert error.value.name == "WarehouseHasUnfinishedTasks"
    (claim,) = queue.pick(EXPIRE)
    queue.succeed(claim)
    warehouses.delete(lake)
    with queue.database.writing() as connection, pytest.raises(RequestRefused) as error:
        warehouses.table(lake, table.type, table.id, joined=connection)
    assert error.value.code == 404


def found(*names: str, **properties: str) -> list[FoundTable]:
    return [
        FoundTable(("db", name), EntityType.TABLE, f"iceberg://c/db.{name}", properties)
        for name in names
    ]


def test_tables_keep_their_ids_when_they_come_and_go(warehouses: Warehouses) -> None:
    lake = warehouses.register("lake", WarehouseKind.ICEBERG, "c").id
    one, two = warehouses.refresh(lake, found("a", "b"))
    assert (one.name, one.target) == (("db", "a"), "iceberg://c/db.a")
    (changed,) = warehouses.refresh(lake, found("b", owner="ada"))
    assert (changed.id, changed.properties) == (two.id, {"owner": "ada"})
    assert warehouses.tables(lake) == [changed]
    with pytest.raises(RequestRefused) as error:
        warehouses.table(lake, EntityType.TABLE, one.id)
    assert (error.value.name, error.value.code) == ("NoSuchTableException", 404)
    assert [table.id for table in warehouses.refresh(lake, found("a", "b"))] == [one.id, two.id]
    assert warehouses.table(lake, EntityType.TABLE, one.id).active


def test_a_table_that_is_back_is_looked_at_again(queue: TaskQueue, world: World) -> None:
    warehouses, commits = Warehouses(queue.database, world), Commits(queue)
    lake = warehouses.register("lake", WarehouseKind.ICEBERG, "c").id
    scope = Scope(warehouse_id=lake)
    one, two = warehouses.refresh(lake, found("a", "b"))
    commits.record(scope, [Change(table.id, "m1", world.now()) for table in (one, two)])
    warehouses.refresh(lake, found("b"))
    warehouses.refresh(lake, found("a", "b"))
    assert commits.unseen(scope, {one.id: "m1", two.id: "m1"}) == [one.id]


def test_what_a_commit_says_is_not_undone_by_who_looked_before(
    queue: TaskQueue, world: World
) -> None:
    warehouses, commits = Warehouses(queue.database, world), Commits(queue)
    lake = warehouses.register("lake", WarehouseKind.ICEBERG, "c").id
    one, two = warehouses.refresh(lake, found("a", "b", owner="ada"))
    commit = Change(one.id, "m1", world.now(), {"gc.enabled": "false"})
    commits.record(Scope(warehouse_id=lake), [commit])
    # The place of both is another, so both are written.
    moved = [replace(table, target=f"{table.target}x") for table in found("a", "b", owner="eve")]
    one, two = warehouses.refresh(lake, moved)
    assert (one.target, one.properties) == ("iceberg://c/db.ax", {"gc.enabled": "false"})
    assert (two.target, two.properties) == ("iceberg://c/db.bx", {"owner": "eve"})
    # Who has not asked a table says nothing for it.
    unasked = [replace(table, properties=None) for table in found("a", "b")]
    assert [table.properties for table in warehouses.refresh(lake, unasked)] == [
        one.properties,
        two.properties,
    ]


def test_tables_do_not_all_vanish_at_once(
    warehouses: Warehouses, caplog: pytest.LogCaptureFixture
) -> None:
    lake = warehouses.register("lake", WarehouseKind.ICEBERG, "c").id
    known = warehouses.refresh(lake, found("a", "b"))
    assert caplog.records == []
    assert warehouses.refresh(lake, []) == known
    assert warehouses.tables(lake) == known
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(lake) in caplog.text


def test_tables_that_are_as_they_were_are_not_written_again(warehouses: Warehouses) -> None:
    lake = warehouses.register("lake", WarehouseKind.ICEBERG, "c").id
    names = [f"t{number:04}" for number in range(1200)]
    first = warehouses.refresh(lake, found(*names))
    assert len({table.id for table in first}) == 1200
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement != "BEGIN":
            statements.append(statement.split(maxsplit=1)[0])

    sa.event.listen(warehouses.database.engine, "before_cursor_execute", note)
    try:
        assert warehouses.refresh(lake, found(*names)) == first
        assert set(statements) == {"SELECT"}
        statements.clear()
        warehouses.refresh(lake, found(*names[1:], "new"))
        assert statements.count("INSERT") == statements.count("UPDATE") == 1
    finally:
        sa.event.remove(warehouses.database.engine, "before_cursor_execute", note)


def test_a_table_is_looked_for_where_it_was_asked_for(warehouses: Warehouses) -> None:
    lake = warehouses.register("lake", WarehouseKind.ICEBERG, "c").id
    other = warehouses.register("other", WarehouseKind.ICEBERG, "c2").id
    (table,) = warehouses.refresh(lake, found("a"))
    warehouses.refresh(other, [])
    assert warehouses.tables(lake) == [table]
    for where, kind, name in (
        (other, EntityType.TABLE, "NoSuchTableException"),
        (lake, EntityType.VIEW, "NoSuchViewException"),
        (lake, EntityType.GENERIC_TABLE, "NoSuchGenericTableException"),
    ):
        with pytest.raises(RequestRefused) as error:
            warehouses.table(where, kind, table.id)
        assert error.value.name == name


def test_names_with_dots_are_not_mixed_up(warehouses: Warehouses) -> None:
    lake = warehouses.register("lake", WarehouseKind.ICEBERG, "c").id
    names = [("a", "b.c"), ("a.b", "c"), ("a", "b", "c"), ('a","b', "c")]
    made = warehouses.refresh(
        lake, [FoundTable(name, EntityType.TABLE, "iceberg://c/x") for name in names]
    )
    assert {table.name for table in made} == set(names)


# -- configs -------------------------------------------------------------------------------------


def test_a_table_with_a_long_name_is_one_like_others(
    queue: TaskQueue, warehouses: Warehouses, world: World
) -> None:
    lake = warehouses.register("l", WarehouseKind.ICEBERG, "c").id
    scope = Scope(warehouse_id=lake)
    # Nothing that could be made shorter, and no end that tells them apart.
    word = "".join(f"{world.below(1 << 60):x}" for _ in range(2000))
    names = [("db", "short"), ("db", f"{word}1"), ("db", f"{word}2")]
    told = [FoundTable(name, EntityType.TABLE, f"iceberg://c/{'.'.join(name)}") for name in names]
    made = warehouses.refresh(lake, told)
    assert {one.name: one.target for one in made} == {one.name: one.target for one in told}
    again = warehouses.refresh(lake, [replace(one, properties={"a": "b"}) for one in told])
    assert {one.id for one in again} == {one.id for one in made}
    commits = Commits(queue)
    markers = {one.id: f"{one.target}/metadata/{one.name[1]}.json" for one in made}
    commits.record(scope, [Change(one, marker, world.now()) for one, marker in markers.items()])
    assert commits.unseen(scope, markers) == []
    assert (
        len(queue.enqueue([NewTask(EXPIRE, scope, one.entity, world.now()) for one in made])) == 3
    )
    assert {claim.entity.name for claim in queue.pick(EXPIRE, limit=3)} == set(names)


def test_a_config_is_read_as_it_was_written(database: Database) -> None:
    configs = ConfigStore(database)
    assert configs.get(LAKE, EXPIRE) == configs.get(LAKE, "nonsense") == StoredConfig()
    store(database, LAKE, EXPIRE, {"max-ref-age-ms": None, "min-snapshots-to-keep": 3}, 300)
    assert configs.get(LAKE, EXPIRE) == StoredConfig(
        {"max-ref-age-ms": None, "min-snapshots-to-keep": 3}, 300
    )
    # As a whole, but for the heartbeat time, which stays.
    store(database, LAKE, EXPIRE, {"min-snapshots-to-keep": 2})
    assert configs.get(LAKE, EXPIRE) == StoredConfig({"min-snapshots-to-keep": 2}, 300)
    assert configs.get(LAKE, ORPHANS) == StoredConfig()


def test_a_config_that_cannot_be_used_changes_nothing(database: Database) -> None:
    configs = ConfigStore(database)
    store(database, LAKE, ORPHANS, {"dry-run": True})
    for config, seconds in (({"dry-run": "no"}, None), ({}, 0), ({}, -5), ({}, 2**62)):
        with pytest.raises(RequestRefused) as error:
            store(database, LAKE, ORPHANS, config, seconds)
        assert error.value.name == "InvalidQueueConfig"
    assert configs.get(LAKE, ORPHANS) == StoredConfig({"dry-run": True})


def test_configs_are_set_where_their_tasks_are(database: Database) -> None:
    store(database, Scope(), TASK_LOG_CLEANUP, {"retention-period": "P7D"})
    for scope, queue in ((LAKE, TASK_LOG_CLEANUP), (Scope(), EXPIRE)):
        with pytest.raises(RequestRefused) as error:
            store(database, scope, queue, {})
        assert error.value.name == "QueueNotFound"


# -- tokens --------------------------------------------------------------------------------------


def test_a_token_is_known_until_it_is_revoked(
    database: Database, world: World, tmp_path: Path
) -> None:
    tokens = Tokens(database, world)
    made, secret = tokens.create("ada", Role.OPERATE)
    assert tokens.holder(secret) == made
    assert tokens.holder(secret[:-1]) is None
    assert tokens.holder("") is None
    assert secret not in repr(tokens.all())
    with database.reading() as connection:
        assert secret.encode() not in bytes(
            repr(connection.execute(sa.select(TOKEN)).all()), "utf8"
        )
    with pytest.raises(RequestRefused) as error:
        tokens.create("ada", Role.ADMIN)
    assert error.value.code == 409
    tokens.revoke("ada")
    assert tokens.holder(secret) is None
    with pytest.raises(RequestRefused):
        tokens.revoke("ada")


def test_a_token_ends_when_it_was_said_to(database: Database, world: World) -> None:
    tokens = Tokens(database, world)
    _, secret = tokens.create("ada", Role.READ, expires_at=world.now() + timedelta(hours=1))
    world.sleep(3599)
    assert tokens.holder(secret) is not None
    world.sleep(1)
    assert tokens.holder(secret) is None


def test_roles_may_what_lesser_ones_may() -> None:
    allowed = {(one, two) for one in Role for two in Role if one.may(two)}
    assert allowed == {
        (Role.READ, Role.READ),
        (Role.OPERATE, Role.READ), (Role.OPERATE, Role.OPERATE),
        (Role.ADMIN, Role.READ), (Role.ADMIN, Role.OPERATE), (Role.ADMIN, Role.ADMIN),
    }  # fmt: skip


def test_what_was_done_is_told_newest_first(database: Database, world: World) -> None:
    audit = Audit(database, world)
    audit.record("ada", "schedule_task", LAKE, {"queue_name": EXPIRE})
    world.sleep(1)
    audit.record("bob", "create_token")
    assert [(one.actor, one.action, one.scope) for one in audit.page().entries] == [
        ("bob", "create_token", None),
        ("ada", "schedule_task", LAKE),
    ]
    assert len(audit.page(size=1).entries) == 1
    with database.reading() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(AUDIT)) == 2


# -- the log's cleanup ---------------------------------------------------------------------------


def test_old_tasks_are_forgotten_and_the_next_cleanup_is_queued(
    queue: TaskQueue, database: Database, world: World
) -> None:
    cleanup = LogCleanup(queue)
    for _ in range(2):
        cleanup.ensure()
    old = picked(queue, world.now(), 1)
    queue.fail(old, "not yet")
    world.sleep(3600)
    queue.succeed(queue.pick(EXPIRE)[0])
    waits = picked(queue, world.now(), 2)
    queue.fail(waits, "not yet")
    world.sleep(89 * 86_400)
    young = picked(queue, world.now(), 3, ORPHANS)
    queue.fail(young, "broken", Failure.PERMANENT)
    world.sleep(86_401)

    (claim,) = queue.pick(TASK_LOG_CLEANUP)
    assert cleanup.run(claim) == 1
    left = {row.task_id for row in logged(database)}
    # A task that is active keeps its attempts, however old they are.
    assert left == {waits.task_id, young.task_id, claim.task_id}
    following = next(row for row in active(database) if row.queue_name == TASK_LOG_CLEANUP)
    assert following.parent_task_id == claim.task_id
    at = (world.now() + timedelta(days=1)).replace(second=0, microsecond=0)
    assert following.scheduled_for == at
    details = TaskLists(database).details(Scope(), claim.task_id)
    assert details.details == {"forgotten_tasks_count": 1}


def test_how_long_tasks_are_remembered_can_be_set(
    queue: TaskQueue, database: Database, world: World
) -> None:
    store(
        database, Scope(), TASK_LOG_CLEANUP, {"retention-period": "PT1H", "cleanup-period": "P3D"}
    )
    cleanup = LogCleanup(queue)
    cleanup.ensure()
    queue.succeed(picked(queue, world.now()))
    world.sleep(3 * 86_400)
    (claim,) = queue.pick(TASK_LOG_CLEANUP)
    assert cleanup.run(claim) == 1
    (following,) = active(database)
    assert following.scheduled_for - world.now() <= timedelta(days=3)
    assert following.scheduled_for - world.now() > timedelta(days=2)


def test_a_table_of_whatever_kind_is_found_by_its_id(warehouses: Warehouses) -> None:
    lake = warehouses.register("lake", WarehouseKind.ICEBERG, "c").id
    one, two = warehouses.refresh(lake, found("a", "b"))
    assert [warehouses.table(lake, None, table.id) for table in (one, two)] == [one, two]
    with pytest.raises(RequestRefused) as error:
        warehouses.table(lake, None, UUID(int=5))
    assert (error.value.name, error.value.code) == ("NoSuchTableException", 404)
