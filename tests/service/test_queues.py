"""Settings of queues over HTTP: stored as given, shown as stored, and explained for one table."""

from __future__ import annotations

from typing import Any

import pytest

from lakewarden.jobs.commits import Change, Commits
from tests.service.small import Service, refusal

QUEUES = ("expire_snapshots", "remove_orphan_files", "optimize")
SOMEBODY = "00000000-0000-7000-8000-00000000abcd"
#: The sheet's tables: what each setting is if nobody says anything.
DEFAULTS: dict[str, dict[str, Any]] = {
    "expire_snapshots": {
        "enable-expire-snapshots": False,
        "max-snapshot-age-ms": 432000000,
        "min-snapshots-to-keep": 1,
        "min-snapshots-to-expire": 20,
        "max-ref-age-ms": 9223372036854775807,
    },
    "remove_orphan_files": {
        "enable-remove-orphan-files": False,
        "default-older-than-ms": 604800000,
        "target-reclaim-bytes": 1073741824,
        "maximum-interval-seconds": 7776000,
        "max-run-time-seconds": 3600,
        "dry-run": False,
        "disable-min-older-than-check": False,
    },
}


def path_of(lake: Any, queue: str) -> str:
    return f"{lake.path}/task-queue/{queue}/config"


@pytest.mark.parametrize("queue", [*QUEUES, "vacuum"])
def test_nothing_stored_is_shown_as_nothing(service: Service, queue: str) -> None:
    answer = service.get(path_of(service.warehouse(), queue))
    assert answer.status_code == 200
    assert answer.json() == {
        "queue-config": {"queue-name": queue},
        "max-seconds-since-last-heartbeat": None,
    }


@pytest.mark.parametrize("queue", DEFAULTS)
def test_a_config_is_shown_exactly_as_it_was_stored(service: Service, queue: str) -> None:
    path = path_of(service.warehouse(), queue)
    config = DEFAULTS[queue]
    body = {"queue-config": {**config, "queue-name": "anything"}}
    answer = service.post(path, body)
    assert (answer.status_code, answer.content) == (204, b"")
    assert service.get(path).json()["queue-config"] == {**config, "queue-name": queue}


@pytest.mark.parametrize("config", [[], "text", 5, True, None], ids=str)
def test_a_config_that_is_no_object_is_no_config(plain: Service, config: Any) -> None:
    for path in (
        path_of(plain.warehouse(), "optimize"),
        "/project/task-queue/task_log_cleanup/config",
    ):
        answer = plain.post(path, {"queue-config": config})
        assert "an object" in refusal(answer, 400, "InvalidQueueConfig")
    assert plain.get("/audit").json()["entries"] == []


def test_a_config_replaces_the_one_before_as_a_whole(service: Service) -> None:
    path = path_of(service.warehouse(), "optimize")
    service.post(path, {"queue-config": {"min-files": 5, "enable-optimize": True}})
    service.post(path, {"queue-config": {"min-files": 6}})
    assert service.get(path).json()["queue-config"] == {"min-files": 6, "queue-name": "optimize"}


def test_a_heartbeat_time_stays_until_another_is_set(service: Service) -> None:
    path = path_of(service.warehouse(), "optimize")
    name = "max-seconds-since-last-heartbeat"
    for given, kept in [(90, 90), (None, 90), (30, 30)]:
        assert service.post(path, {"queue-config": {}, name: given}).status_code == 204
        assert service.get(path).json()[name] == kept
    assert service.post(path, {"queue-config": {}}).status_code == 204
    assert service.get(path).json()[name] == 30


def test_a_config_that_says_the_same_is_taken_and_audited(service: Service) -> None:
    lake = service.warehouse()
    path, body = path_of(lake, "optimize"), {"queue-config": {"enable-optimize": True}}
    assert service.post(path, body).status_code == 204
    Commits(service.parts.queue).record(
        lake.scope, [Change(table, "m1", service.world.now()) for table in lake.tables]
    )
    before = len(service.get("/audit").json()["entries"])
    assert service.post(path, body).status_code == 204
    assert len(service.get("/audit").json()["entries"]) == before + 1
    seen = dict.fromkeys(lake.tables, "m1")
    assert Commits(service.parts.queue).unseen(lake.scope, seen) == []


@pytest.mark.parametrize(
    ("queue", "config"),
    [
        ("expire_snapshots", {"enable-expire-snapshots": "true"}),
        ("expire_snapshots", {"max-snapshot-age-ms": 1.5}),
        ("expire_snapshots", {"min-snapshots-to-keep": 2**31}),
        ("expire_snapshots", {"min-snapshots-to-expire": -1}),
        ("expire_snapshots", {"max-ref-age-ms": 2**63}),
        ("remove_orphan_files", {"enable-remove-orphan-files": None}),
        ("remove_orphan_files", {"maximum-interval-seconds": 86399}),
        ("remove_orphan_files", {"max-run-time-seconds": 59}),
        ("remove_orphan_files", {"target-reclaim-bytes": -1}),
        ("remove_orphan_files", {"dry-run": 1}),
        ("optimize", {"min-files": 1}),
        ("expire_snapshots", {"max-snapshot-age": 1}),
        ("remove_orphan_files", {"default_older_than_ms": 1}),
        ("optimize", {"later": {"deep": [None, 1.5, "\u00fc"]}}),
    ],
)
def test_a_config_that_cannot_be_used_changes_nothing(
    service: Service, queue: str, config: dict[str, Any]
) -> None:
    path = path_of(service.warehouse(), queue)
    stored = {f"enable-{queue.replace('_', '-')}": False}
    assert service.post(path, {"queue-config": stored}).status_code == 204
    message = refusal(service.post(path, {"queue-config": config}), 400, "InvalidQueueConfig")
    assert next(iter(config)) in message
    assert service.get(path).json()["queue-config"] == {**stored, "queue-name": queue}


def test_a_config_counts_for_tables_that_nobody_writes_to(service: Service) -> None:
    lake = service.warehouse(3)
    commits, now = Commits(service.parts.queue), service.world.now()
    commits.record(lake.scope, [Change(table, "m1", now) for table in lake.tables])
    seen = dict.fromkeys(lake.tables, "m1")
    assert commits.unseen(lake.scope, seen) == []
    lake.enable("remove_orphan_files")
    # The rest is the detector's to decide, which looks at every table now.
    assert commits.unseen(lake.scope, seen) == lake.tables
    assert {one["entity-name"][-1] for one in lake.listed()} == {"t000", "t001", "t002"}
    assert {one["queue-name"] for one in lake.listed()} == {"remove_orphan_files"}
    # Nothing is there twice, and a config that is refused wakes nobody.
    commits.record(lake.scope, [Change(table, "m1", now) for table in lake.tables])
    refused = {"queue-config": {"min-files": 1}}
    refusal(service.post(path_of(lake, "optimize"), refused), 400, "InvalidQueueConfig")
    assert commits.unseen(lake.scope, seen) == []
    lake.enable("expire_snapshots")
    assert len(lake.listed()) == 3


def test_a_property_that_cannot_be_read_does_not_keep_a_config_out(service: Service) -> None:
    lake = service.warehouse(2, {"lakewarden.remove-orphan-files.older-than-ms": "soon"})
    lake.enable("remove_orphan_files")
    assert lake.listed() == []


def test_ages_that_a_worker_will_refuse_are_stored(service: Service) -> None:
    path = path_of(service.warehouse(), "remove_orphan_files")
    for age in (6000, 0, -1):
        body = {"queue-config": {"default-older-than-ms": age}}
        assert service.post(path, body).status_code == 204


@pytest.mark.parametrize("seconds", [0, -1, 2**40])
def test_a_heartbeat_time_that_makes_no_sense_is_refused(service: Service, seconds: int) -> None:
    path = path_of(service.warehouse(), "optimize")
    body = {"queue-config": {}, "max-seconds-since-last-heartbeat": seconds}
    refusal(service.post(path, body), 400, "InvalidQueueConfig")


def test_a_config_that_is_too_large_is_refused(plain: Service) -> None:
    path = path_of(plain.warehouse(), "optimize")
    body = {"queue-config": {"note": "x" * 70_000}}
    refusal(plain.post(path, body), 400, "InvalidQueueConfig")
    assert plain.get(path).json()["queue-config"] == {"queue-name": "optimize"}


@pytest.mark.parametrize(
    ("where", "queue"),
    [("warehouse", "vacuum"), ("warehouse", "task_log_cleanup"), ("project", "optimize")],
)
def test_a_queue_that_is_not_there_can_be_asked_but_not_set(
    service: Service, where: str, queue: str
) -> None:
    lake = service.warehouse()
    base = lake.path if where == "warehouse" else "/project"
    message = refusal(
        service.post(f"{base}/task-queue/{queue}/config", {"queue-config": {}}),
        400,
        "QueueNotFound",
    )
    assert "the queues are" in message or "is a queue of the" in message
    assert service.get(f"{base}/task-queue/{queue}/config").status_code == 200


def test_the_log_cleanup_is_set_for_the_project(service: Service) -> None:
    path = "/project/task-queue/task_log_cleanup/config"
    config = {"cleanup-period": "P2D", "retention-period": "P1W"}
    assert service.post(path, {"queue-config": config}).status_code == 204
    assert service.get(path).json() == {
        "queue-config": {**config, "queue-name": "task_log_cleanup"},
        "max-seconds-since-last-heartbeat": None,
    }
    for wrong in ("P1Y", "P1M", "-P1D", "1 day", "", 5):
        answer = service.post(path, {"queue-config": {"cleanup-period": wrong}})
        refusal(answer, 400, "InvalidQueueConfig")


# -- what applies --------------------------------------------------------------------------------


def effective(service: Service, lake: Any, queue: str, number: int = 0) -> dict[str, Any]:
    path = f"{lake.path}/task-queue/{queue}/effective-config?table={lake.tables[number]}"
    answer = service.get(path)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("queue", DEFAULTS)
def test_what_nobody_set_is_the_default(service: Service, queue: str) -> None:
    lake = service.warehouse()
    found = effective(service, lake, queue)
    assert found.keys() == {
        "queue-name", "entity", "entity-name", "enabled", "excluded", "settings",
    }  # fmt: skip
    assert (found["queue-name"], found["entity"]) == (queue, lake.entity())
    assert (found["entity-name"], found["enabled"]) == (["db", "t000"], False)
    assert found["excluded"].keys() == {"type", "message"}
    assert found["settings"] == {
        key: {"value": value, "source": "default", "property": None}
        for key, value in DEFAULTS[queue].items()
    }


def test_a_table_beats_its_warehouse_which_beats_the_default(service: Service) -> None:
    own = {
        "history.expire.max-snapshot-age-ms": "1000",
        "lakekeeper.history.expire.min-snapshots-to-expire": "3",
        "lakewarden.history.expire.min-snapshots-to-expire": "4",
    }
    lake = service.warehouse(properties=own)
    lake.enable(**{"max-snapshot-age-ms": 5, "min-snapshots-to-keep": 7})
    found = effective(service, lake, "expire_snapshots")
    assert (found["enabled"], found["excluded"]) == (True, None)
    settings = found["settings"]
    assert settings["max-snapshot-age-ms"] == {
        "value": 1000,
        "source": "table-property",
        "property": "history.expire.max-snapshot-age-ms",
    }
    assert settings["min-snapshots-to-keep"] == {
        "value": 7, "source": "warehouse", "property": None,
    }  # fmt: skip
    assert settings["min-snapshots-to-expire"]["value"] == 4
    assert settings["max-ref-age-ms"]["source"] == "default"


def test_of_two_dry_runs_the_safer_one_counts(service: Service) -> None:
    own = {"lakekeeper.remove-orphan-files.dry-run": "false"}
    lake = service.warehouse(properties=own)
    lake.enable("remove_orphan_files", **{"dry-run": True})
    settings = effective(service, lake, "remove_orphan_files")["settings"]
    assert settings["dry-run"] == {"value": True, "source": "warehouse", "property": None}


def test_a_property_that_cannot_be_read_is_told(service: Service) -> None:
    lake = service.warehouse(properties={"history.expire.max-snapshot-age-ms": "soon"})
    path = f"{lake.path}/task-queue/expire_snapshots/effective-config?table={lake.tables[0]}"
    message = refusal(service.get(path), 400, "InvalidTableProperty")
    assert "history.expire.max-snapshot-age-ms" in message


def test_settings_under_which_every_task_fails_are_told(service: Service) -> None:
    lake = service.warehouse()
    lake.enable("remove_orphan_files", **{"default-older-than-ms": 3_600_000})
    found = effective(service, lake, "remove_orphan_files")
    assert found["enabled"] is False
    assert found["excluded"]["type"] == "RemoveOrphanFilesRetentionTooShort"
    lake.enable("expire_snapshots", **{"max-snapshot-age-ms": -1})
    found = effective(service, lake, "expire_snapshots")
    assert found["excluded"]["type"] == "InvalidQueueConfig"
    assert "max-snapshot-age-ms is -1" in found["excluded"]["message"]


def test_questions_that_have_no_answer(service: Service) -> None:
    lake = service.warehouse()
    base, table = f"{lake.path}/task-queue", lake.tables[0]
    ask = f"effective-config?table={table}"
    refusal(service.get(f"{base}/vacuum/{ask}"), 404, "QueueNotFound")
    refusal(service.get(f"{base}/task_log_cleanup/{ask}"), 400, "UnsupportedEntityType")
    nobody = service.get(f"{base}/optimize/effective-config?table={SOMEBODY}")
    refusal(nobody, 404, "NoSuchTableException")
    refusal(service.get(f"{base}/optimize/effective-config"), 400, "BadRequest")
    refusal(service.get(f"{base}/optimize/effective-config?table=db.t"), 400, "BadRequest")


def test_switching_a_queue_on_wakes_its_tables_up(service: Service) -> None:
    lake = service.warehouse(tables=3, properties={})
    lake.enable("remove_orphan_files")
    found = lake.listed()
    assert [one["queue-name"] for one in found] == ["remove_orphan_files"] * 3
    # The same again makes nothing twice.
    lake.enable("remove_orphan_files")
    assert lake.listed() == found
