"""Tasks over HTTP: asked for, listed, looked at, controlled, as Lakekeeper's clients expect it."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from lakewarden.jobs.tasks import EntityType, Failure
from lakewarden.jobs.warehouses import FoundTable
from tests.service import shapes
from tests.service.small import Lake, Service, refusal

SOMEBODY = "00000000-0000-7000-8000-00000000abcd"


@pytest.fixture
def lake(service: Service) -> Lake:
    made = service.warehouse(tables=3)
    made.enable()
    return made


def schedule(lake: Lake, body: Any, queue: str = "expire_snapshots") -> Any:
    return lake.service.post(f"{lake.path}/task-queue/{queue}/schedule", body)


def at(service: Service, **later: float) -> str:
    return (service.world.now() + timedelta(**later)).isoformat()


# -- asking for one ------------------------------------------------------------------------------


def test_a_task_that_is_asked_for_is_due_at_once(service: Service, lake: Lake) -> None:
    answer = schedule(lake, {"entity": lake.entity()})
    assert answer.status_code == 200
    assert answer.json().keys() == {"task-id"}
    number = UUID(answer.json()["task-id"])
    assert number.version == 7
    assert lake.pick().task_id == number


@pytest.mark.parametrize("days", [365, -3])
def test_times_up_to_a_year_ahead_and_in_the_past_are_fine(
    service: Service, lake: Lake, days: int
) -> None:
    wanted = at(service, days=days)
    task = lake.schedule(**{"scheduled-for": wanted})
    assert lake.details(task)["scheduled-for"] == wanted.replace("+00:00", "Z")


def test_a_time_later_than_that_is_refused_before_the_table_is_looked_for(
    service: Service, lake: Lake
) -> None:
    nobody = {"type": "table", "table-id": SOMEBODY}
    later = at(service, days=365, seconds=1)
    answer = schedule(lake, {"entity": nobody, "scheduled-for": later})
    refusal(answer, 400, "ScheduledForTooFarInFuture")
    assert lake.listed() == []
    # Nor the warehouse.
    nowhere = replace(lake, id=UUID(SOMEBODY))
    answer = schedule(nowhere, {"entity": nobody, "scheduled-for": later})
    refusal(answer, 400, "ScheduledForTooFarInFuture")
    refusal(schedule(nowhere, {"entity": nobody}), 404, "WarehouseNotFound")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("table", "NoSuchTableException"),
        ("view", "NoSuchViewException"),
        ("generic-table", "NoSuchGenericTableException"),
    ],
)
def test_what_is_not_there_is_refused_before_the_queue_is_looked_for(
    lake: Lake, kind: str, name: str
) -> None:
    refusal(schedule(lake, {"entity": {"type": kind, f"{kind}-id": SOMEBODY}}, "none"), 404, name)


def test_a_lance_table_is_no_table_of_iceberg(lake: Lake) -> None:
    wrong = {"type": "table", "table-id": str(lake.tables[1])}
    refusal(schedule(lake, {"entity": wrong}), 404, "NoSuchTableException")


def test_a_table_that_is_gone_is_not_there(service: Service, lake: Lake) -> None:
    other = FoundTable(("db", "other"), EntityType.TABLE, "/nowhere/other")
    service.parts.warehouses.refresh(lake.id, [other])
    refusal(schedule(lake, {"entity": lake.entity()}), 404, "NoSuchTableException")


def test_a_task_does_not_outlive_a_warehouse_that_is_forgotten_meanwhile(
    service: Service, lake: Lake
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with service.parts.database.writing() as connection:
            service.parts.warehouses.delete(lake.id, joined=connection)
            # Whoever asks now still sees the warehouse, until that is over.
            answer = pool.submit(schedule, lake, {"entity": lake.entity()})
            with pytest.raises(TimeoutError):
                answer.result(0.5)
        refusal(answer.result(30), 404, "NoSuchTableException")
    assert service.parts.queue.pick("expire_snapshots") == []


def test_a_queue_that_is_none_is_not_found_and_says_which_there_are(lake: Lake) -> None:
    message = refusal(schedule(lake, {"entity": lake.entity()}, "vacuum"), 404, "QueueNotFound")
    assert "expire_snapshots" in message


def test_the_log_cleanup_cannot_be_asked_for(lake: Lake) -> None:
    answer = schedule(lake, {"entity": lake.entity()}, "task_log_cleanup")
    refusal(answer, 400, "QueueNotUserSchedulable")


@pytest.mark.parametrize(
    ("queue", "name"),
    [
        ("expire_snapshots", "ExpireSnapshotsDisabled"),
        ("remove_orphan_files", "RemoveOrphanFilesDisabled"),
        ("optimize", "OptimizeDisabled"),
    ],
)
def test_a_queue_that_is_off_is_refused(service: Service, queue: str, name: str) -> None:
    lake = service.warehouse()
    refusal(schedule(lake, {"entity": lake.entity()}, queue), 400, name)


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"gc.enabled": "false"}, "GcDisabled"),
        ({"encryption.key-id": "k1"}, "EncryptedTable"),
        ({"lakekeeper.history.expire.enabled": "false"}, "ExpireSnapshotsDisabled"),
    ],
)
def test_a_table_that_is_excluded_is_refused(
    service: Service, properties: dict[str, str], name: str
) -> None:
    lake = service.warehouse(properties=properties)
    lake.enable()
    refusal(schedule(lake, {"entity": lake.entity()}), 400, name)
    assert lake.listed() == []


def test_a_property_includes_a_table_where_the_queue_is_off(service: Service) -> None:
    lake = service.warehouse(properties={"lakewarden.history.expire.enabled": "true"})
    lake.schedule()


@pytest.mark.parametrize("payload", [{"dry-run": True}, [], "x", 0, False])
def test_a_payload_that_would_be_ignored_is_refused(lake: Lake, payload: Any) -> None:
    answer = schedule(lake, {"entity": lake.entity(), "payload": payload})
    refusal(answer, 400, "InvalidTaskPayload")
    assert lake.listed() == []


@pytest.mark.parametrize("payload", [None, {}])
def test_no_payload_can_be_said_in_two_ways(lake: Lake, payload: Any) -> None:
    lake.schedule(payload=payload)


def test_a_second_task_for_a_table_is_refused_and_told_of_the_first(lake: Lake) -> None:
    first = lake.schedule()
    message = refusal(schedule(lake, {"entity": lake.entity()}), 409, "TaskAlreadyActive")
    assert f"task-id={first}" in message
    assert "run-now" in message
    lake.schedule(1)


# -- lists ---------------------------------------------------------------------------------------


def test_a_list_has_the_keys_of_the_sheet_and_no_other(lake: Lake) -> None:
    lake.schedule()
    answer = lake.service.post(f"{lake.path}/task/list", {})
    assert answer.json().keys() == {"tasks", "next-page-token"}
    (task,) = answer.json()["tasks"]
    assert shapes.fits(task, shapes.TASK)
    assert task["entity"] == lake.entity()
    assert task["entity-name"] == ["db", "t000"]
    assert (task["status"], task["attempt"], task["progress"]) == ("SCHEDULED", 0, 0.0)
    lake.pick()
    (task,) = lake.listed()
    assert shapes.fits(task, shapes.TASK)
    assert (task["status"], task["attempt"]) == ("RUNNING", 1)


def test_a_list_ends(service: Service) -> None:
    lake = service.warehouse(tables=25)
    lake.enable()
    made = []
    for number in range(25):
        # Some at the same time: their ids decide then.
        service.world._pass(number % 3)
        made.append(lake.schedule(number))
    seen: list[str] = []
    token = None
    for _ in range(4):
        body = {"page-size": 7, "page-token": token}
        answer = service.post(f"{lake.path}/task/list", body).json()
        seen += [task["task-id"] for task in answer["tasks"]]
        token = answer["next-page-token"]
        if token is None:
            break
    assert token is None
    assert sorted(seen) == sorted(made)
    ordered = [(task["created-at"], task["task-id"]) for task in lake.listed()]
    assert ordered == sorted(ordered, reverse=True)
    assert seen == [number for _, number in ordered]


def test_a_full_last_page_has_no_token(service: Service, lake: Lake) -> None:
    lake.schedule(0)
    lake.schedule(1)
    answer = service.post(f"{lake.path}/task/list", {"page-size": 2}).json()
    assert len(answer["tasks"]) == 2
    assert answer["next-page-token"] is None


def test_tokens_have_the_form_that_lakekeeper_gives_them(service: Service, lake: Lake) -> None:
    lake.schedule(0)
    lake.schedule(1)
    body = service.post(f"{lake.path}/task/list", {"page-size": 1}).json()
    token = body["next-page-token"]
    version, micros, number = base64.urlsafe_b64decode(token + "==").decode().split("&")
    assert version == "1"
    assert int(micros) == service.world.now().timestamp() * 1_000_000
    assert number == body["tasks"][0]["task-id"]


@pytest.mark.parametrize("size", [0, -5, 2**62])
def test_sizes_of_pages_are_brought_within_bounds(lake: Lake, size: int) -> None:
    lake.schedule()
    assert len(lake.listed(**{"page-size": size})) == 1


@pytest.mark.parametrize(
    ("token", "name"),
    [
        ("***", "PaginateTokenDecodeError"),
        ("\u00e9", "PaginateTokenDecodeError"),
        (base64.urlsafe_b64encode(b"1&2").decode(), "PaginateTokenParseError"),
        (
            base64.urlsafe_b64encode(f"1&{9**40}&{SOMEBODY}".encode()).decode(),
            "PaginateTokenParseError",
        ),
    ],
)
def test_tokens_of_somebody_else_are_refused(lake: Lake, token: str, name: str) -> None:
    refusal(lake.service.post(f"{lake.path}/task/list", {"page-token": token}), 400, name)


def test_a_task_that_is_tried_again_is_listed_once(service: Service, lake: Lake) -> None:
    task = lake.schedule()
    service.parts.queue.fail(lake.pick(), "the store did not answer")
    (found,) = lake.listed()
    assert (found["task-id"], found["status"]) == (task, "SCHEDULED")


def test_lists_are_filtered(service: Service, lake: Lake) -> None:
    lake.enable("optimize")
    first = lake.schedule(0)
    service.world._pass(60)
    second = lake.schedule(1, "optimize")
    service.world._pass(60)
    claim = lake.pick()
    service.parts.queue.succeed(claim)

    def found(**wanted: Any) -> list[str]:
        return [task["task-id"] for task in lake.listed(**wanted)]

    assert found() == [second, first]
    assert found(status=["SUCCESS"]) == [first]
    assert found(status=["SCHEDULED", "RUNNING"]) == [second]
    assert found(**{"queue-name": ["optimize", "nothing"]}) == [second]
    assert found(entities=[lake.entity(0)]) == [first]
    assert found(entities=[{"type": "warehouse"}]) == []
    made = next(task["created-at"] for task in lake.listed() if task["task-id"] == first)
    assert found(**{"created-before": made}) == [first]
    assert found(**{"created-after": made}) == [second, first]
    assert found(entities=[]) == found(**{"queue-name": []}) == []


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"queue-name": ["q"] * 101}, "TooManyQueueNames"),
        ({"entities": [{"type": "warehouse"}] * 101}, "TooManyEntities"),
    ],
)
def test_filters_are_bounded(lake: Lake, wanted: Any, name: str) -> None:
    refusal(lake.service.post(f"{lake.path}/task/list", wanted), 400, name)


def test_a_list_needs_no_body(service: Service, lake: Lake) -> None:
    answer = service.call("POST", f"{lake.path}/task/list")
    assert answer.json() == {"tasks": [], "next-page-token": None}


def test_tasks_of_one_warehouse_are_nobody_elses(service: Service, lake: Lake) -> None:
    task = lake.schedule()
    other = service.warehouse(name="other")
    assert other.listed() == []
    refusal(service.get(f"{other.path}/task/by-id/{task}"), 404, "TaskNotFoundError")
    refusal(other.control("cancel", task), 404, "TaskNotFoundError")
    assert lake.listed()[0]["status"] == "SCHEDULED"


# -- details -------------------------------------------------------------------------------------


def test_details_have_the_keys_of_the_sheet_and_no_other(service: Service, lake: Lake) -> None:
    task = lake.schedule()
    found = lake.details(task)
    assert shapes.fits(found, shapes.DETAILS)
    assert (found["message"], found["execution-details"], found["attempts"]) == (None, None, [])
    assert found["task-data"] == {"origin": "manual", "reason": "asked for by adminer"}
    claim = lake.pick()
    service.parts.queue.heartbeat(claim, 0.5, {"listed_count": 7})
    found = lake.details(task)
    assert shapes.fits(found, shapes.DETAILS)
    assert (found["progress"], found["execution-details"]) == (0.5, {"listed_count": 7})
    assert found["message"] is None


def test_what_failed_before_is_an_attempt_and_what_came_of_it_a_message(
    service: Service, lake: Lake
) -> None:
    task = lake.schedule()
    for number in range(3):
        service.world._pass(4000)
        claim = lake.pick()
        service.world._pass(90.5)
        service.parts.queue.fail(claim, f"failure {number}")
    found = lake.details(task)
    assert shapes.fits(found, shapes.DETAILS)
    assert [one["attempt"] for one in found["attempts"]] == [3, 2, 1]
    assert found["attempts"][0]["message"] == "failure 2"
    assert found["attempts"][0]["duration"] == "PT1M30.5S"
    assert len(lake.details(task, numAttempts=1)["attempts"]) == 1
    assert lake.details(task, numAttempts=0)["attempts"] == []
    service.world._pass(4000)
    service.parts.queue.succeed(lake.pick(), "12 snapshots expired", result={"deleted_bytes": 1})
    found = lake.details(task)
    assert (found["status"], found["message"]) == ("SUCCESS", "12 snapshots expired")
    assert (found["progress"], found["execution-details"]) == (1.0, {"deleted_bytes": 1})
    assert [one["attempt"] for one in found["attempts"]] == [3, 2, 1]


def test_a_task_that_failed_for_good_tells_why(service: Service, lake: Lake) -> None:
    task = lake.schedule()
    service.parts.queue.fail(lake.pick(), "a manifest is damaged", Failure.PERMANENT)
    found = lake.details(task)
    assert (found["status"], found["message"]) == ("FAILED", "a manifest is damaged")
    assert found["attempts"] == []


def test_a_task_that_is_not_there_is_told_by_two_names(service: Service, lake: Lake) -> None:
    refusal(service.get(f"{lake.path}/task/by-id/{SOMEBODY}"), 404, "TaskNotFoundError")
    refusal(service.get(f"/project/task/by-id/{SOMEBODY}"), 404, "TaskNotFound")


@pytest.mark.parametrize("number", ["-1", "65536", "x", "", "1e3"])
def test_a_number_of_attempts_that_is_none_is_refused(lake: Lake, number: str) -> None:
    answer = lake.service.get(f"{lake.path}/task/by-id/{SOMEBODY}?numAttempts={number}")
    assert "numAttempts" in refusal(answer, 400, "BadRequest")


# -- control -------------------------------------------------------------------------------------


def test_a_running_task_is_asked_to_stop(lake: Lake) -> None:
    task = lake.schedule()
    assert lake.control("stop", task).status_code == 204
    assert lake.listed()[0]["status"] == "SCHEDULED"
    lake.pick()
    answer = lake.control("stop", task)
    assert (answer.status_code, answer.content) == (204, b"")
    assert lake.listed()[0]["status"] == "STOPPING"


def test_a_task_is_cancelled_for_good(lake: Lake) -> None:
    task = lake.schedule()
    assert lake.control("cancel", task).status_code == 204
    assert lake.details(task)["status"] == "CANCELLED"
    assert lake.control("run-now", task).status_code == 204
    assert lake.details(task)["status"] == "CANCELLED"
    assert lake.schedule() != task


@pytest.mark.parametrize("key", ["scheduled-for", "scheduled_for"])
def test_a_task_is_moved_to_another_time_and_back(service: Service, lake: Lake, key: str) -> None:
    task = lake.schedule()
    # There is no limit here, as in Lakekeeper.
    later = at(service, days=1000)
    assert lake.control("run-at", task, **{key: later}).status_code == 204
    assert lake.details(task)["scheduled-for"] == later.replace("+00:00", "Z")
    assert service.parts.queue.pick("expire_snapshots") == []
    assert lake.control("run-now", task).status_code == 204
    assert str(lake.pick().task_id) == task


def test_all_tasks_of_a_request_are_changed_or_none(lake: Lake) -> None:
    task = lake.schedule()
    refusal(lake.control("cancel", task, SOMEBODY), 404, "TaskNotFoundError")
    assert lake.details(task)["status"] == "SCHEDULED"
    refusal(lake.control("cancel", task, task), 400, "DuplicateTaskIds")
    many = [str(UUID(int=number)) for number in range(101)]
    refusal(lake.control("cancel", *many), 400, "TooManyTasks")
    assert lake.details(task)["status"] == "SCHEDULED"
    assert lake.control("cancel").status_code == 204


@pytest.mark.parametrize(
    "action",
    [
        {"action-type": "explode"},
        {"action-type": "run-at"},
        {"action-type": "run-at", "scheduled-for": None},
        {"action-type": "run-at", "scheduled-for": "tomorrow"},
        {},
        "stop",
    ],
)
def test_an_action_that_is_none_is_refused(lake: Lake, action: Any) -> None:
    body = {"action": action, "task-ids": [lake.schedule()]}
    answer = lake.service.post(f"{lake.path}/task/control", body)
    refusal(answer, 422, "UnprocessableEntity")


@pytest.mark.parametrize("year", ["0001", "9999"])
def test_a_time_that_nobody_can_mean_is_refused(lake: Lake, year: str) -> None:
    at, task = f"{year}-12-31T23:59:59Z", lake.schedule()
    answer = lake.control("run-at", task, **{"scheduled-for": at})
    assert "years 1970 to 2999" in refusal(answer, 400, "BadRequest")
    assert lake.details(task)["status"] == "SCHEDULED"


# -- the project ---------------------------------------------------------------------------------


def test_the_project_has_its_own_tasks(service: Service, lake: Lake) -> None:
    lake.schedule()
    answer = service.post("/project/task/list", {}).json()
    assert answer.keys() == {"tasks", "next-page-token"}
    (task,) = answer["tasks"]
    assert shapes.fits(task, shapes.PROJECT_TASK)
    assert task["queue-name"] == "task_log_cleanup"
    assert task["project-id"] == str(UUID(int=0))
    details = service.get(f"/project/task/by-id/{task['task-id']}").json()
    assert shapes.fits(details, shapes.PROJECT_DETAILS)
    # Through the other door it is not seen.
    refusal(service.get(f"{lake.path}/task/by-id/{task['task-id']}"), 404, "TaskNotFoundError")


def test_tasks_of_the_project_are_controlled(service: Service) -> None:
    (task,) = service.post("/project/task/list", {}).json()["tasks"]
    body = {"action": {"action-type": "run-now"}, "task-ids": [task["task-id"]]}
    assert service.post("/project/task/control", body).status_code == 204
    (claim,) = service.parts.queue.pick("task_log_cleanup")
    assert str(claim.task_id) == task["task-id"]
    body["task-ids"] = [SOMEBODY]
    refusal(service.post("/project/task/control", body), 404, "TaskNotFoundError")


def test_the_one_project_has_a_name_and_others_are_not_there(service: Service) -> None:
    same = service.post("/project/task/list", {}, headers={"x-project-id": str(UUID(int=0))})
    assert len(same.json()["tasks"]) == 1
    other = service.post("/project/task/list", {}, headers={"x-project-id": SOMEBODY})
    refusal(other, 404, "ProjectNotFound")
    strange = service.post("/project/task/list", {}, headers={"x-project-id": "main"})
    refusal(strange, 400, "BadRequest")


def test_a_warehouse_that_is_not_there_has_no_tasks(service: Service) -> None:
    for method, path in [
        ("POST", "task/list"),
        ("GET", f"task/by-id/{SOMEBODY}"),
        ("GET", "task-queue/optimize/config"),
        ("GET", "tables"),
    ]:
        answer = service.call(method, f"/warehouse/{SOMEBODY}/{path}")
        refusal(answer, 404, "WarehouseNotFound")
