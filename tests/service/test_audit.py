"""No change without its line in the audit log: both are one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
import sqlalchemy as sa

from lakewarden.jobs.database import Database
from lakewarden.jobs.schema import METADATA
from tests.cli.terminal import lakewarden
from tests.service.small import Lake, Service, refusal

Change = Callable[[Service, Lake, Path, str], Any]


@contextmanager
def unwritable_audit(database: Database) -> Iterator[None]:
    """Let the real database refuse every new line of the audit log."""
    with database.writing() as connection:
        if database.is_postgres:
            connection.exec_driver_sql(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE EXCEPTION 'the audit log is full' USING ERRCODE = 'disk_full'; END $$"
            )
            connection.exec_driver_sql(
                "CREATE TRIGGER full_up BEFORE INSERT ON audit "
                "FOR EACH ROW EXECUTE FUNCTION refuse()"
            )
        else:
            connection.exec_driver_sql(
                "CREATE TRIGGER full_up BEFORE INSERT ON audit "
                'BEGIN SELECT * FROM "the audit log is full"; END'
            )
    yield
    with database.writing() as connection:
        connection.exec_driver_sql(
            "DROP TRIGGER full_up ON audit" if database.is_postgres else "DROP TRIGGER full_up"
        )


def everything(database: Database) -> dict[str, list[Any]]:
    """Return all rows of all tables."""
    with database.reading() as connection:
        return {
            table.name: sorted(map(repr, connection.execute(sa.select(table))))
            for table in METADATA.sorted_tables
        }


def configure(service: Service, lake: Lake, _place: Path, _task: str) -> Any:
    body = {"queue-config": {"enable-remove-orphan-files": True}}
    return service.post(f"{lake.path}/task-queue/remove_orphan_files/config", body)


def configure_project(service: Service, _lake: Lake, _place: Path, _task: str) -> Any:
    body = {"queue-config": {"retention-period": "P1D"}}
    return service.post("/project/task-queue/task_log_cleanup/config", body)


def schedule(service: Service, lake: Lake, _place: Path, _task: str) -> Any:
    path = f"{lake.path}/task-queue/expire_snapshots/schedule"
    return service.post(path, {"entity": lake.entity(1)})


def control(_service: Service, lake: Lake, _place: Path, task: str) -> Any:
    return lake.control("cancel", task)


def control_project(service: Service, _lake: Lake, _place: Path, _task: str) -> Any:
    (task,) = service.post("/project/task/list", {}).json()["tasks"]
    body = {"action": {"action-type": "run-now"}, "task-ids": [task["task-id"]]}
    return service.post("/project/task/control", body)


def register(service: Service, _lake: Lake, place: Path, _task: str) -> Any:
    body = {"warehouse-name": "new", "kind": "lance", "location": f"{place}-other"}
    return service.post("/warehouse", body)


def forget(service: Service, _lake: Lake, _place: Path, _task: str) -> Any:
    (empty,) = [one for one in service.parts.warehouses.all() if one.name == "empty"]
    return service.call("DELETE", f"/warehouse/{empty.id}")


def look(service: Service, _lake: Lake, _place: Path, _task: str) -> Any:
    (grown,) = [one for one in service.parts.warehouses.all() if one.name == "grown"]
    return service.call("POST", f"/warehouse/{grown.id}/tables/refresh")


@pytest.mark.parametrize(
    "change",
    [
        configure, configure_project, schedule, control, control_project, register, forget, look,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_what_cannot_be_written_down_is_not_done(
    service: Service, tmp_path: Path, change: Change
) -> None:
    lake = service.warehouse(tables=2)
    lake.enable()
    task = lake.schedule()
    service.warehouse(name="empty")
    place = tmp_path / "lances"
    lance.write_dataset(pa.table({"id": [1]}), place / "one.lance")
    lance.write_dataset(pa.table({"id": [1]}), tmp_path / "lances-other" / "one.lance")
    body = {"warehouse-name": "grown", "kind": "lance", "location": str(place)}
    assert service.post("/warehouse", body).status_code == 201
    lance.write_dataset(pa.table({"id": [2]}), place / "two.lance")
    service.world._pass(1)
    database = service.parts.database
    before = everything(database)
    with unwritable_audit(database):
        refusal(change(service, lake, place, task), 503, "ServiceUnavailable")
        assert everything(database) == before
    # The same request, as soon as it can be written down.
    assert change(service, lake, place, task).is_success
    after = everything(database)
    assert len(after["audit"]) == len(before["audit"]) + 1
    assert {name for name in after if after[name] != before[name]} > {"audit"}


def test_a_token_that_cannot_be_written_down_is_neither_made_nor_revoked(
    service: Service, url: str
) -> None:
    database = service.parts.database
    before = everything(database)
    with unwritable_audit(database):
        for command in (("create", "grafana", "--role", "admin"), ("revoke", "reader")):
            found = lakewarden("token", *command, "--database-url", url)
            assert "the audit log is full" in found.error
            assert found.stdout == ""
        assert everything(database) == before
    assert lakewarden("token", "revoke", "reader", "--database-url", url).code == 0
    assert len(everything(database)["audit"]) == len(before["audit"]) + 1
