"""The OpenAPI document: complete, true, and good enough to make a client of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from lakewarden.jobs.tokens import Role
from lakewarden.testing.simulation import World
from tests.conftest import profile
from tests.service.client import generate
from tests.service.small import Service

#: The operations of the sheet's first table, by their ids.
OPERATIONS = {
    *(
        f"{verb}_task_queue_config_{queue}"
        for verb in ("get", "set")
        for queue in ("expire_snapshots", "remove_orphan_files", "optimize")
    ),
    *(f"schedule_task_{queue}" for queue in ("expire_snapshots", "remove_orphan_files", "optimize")),
    "list_tasks", "get_task_details", "control_tasks",
    "get_project_task_queue_config_task_log_cleanup",
    "set_project_task_queue_config_task_log_cleanup",
    "list_project_tasks", "get_project_task_details", "control_project_tasks",
}  # fmt: skip
OURS = {
    "get_server_info", "get_health", "get_metrics", "list_audit", "get_effective_config",
    "create_warehouse", "list_warehouses", "get_warehouse", "delete_warehouse", "list_tables",
    "refresh_tables",
}  # fmt: skip
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        operation["operationId"]: operation
        for path in document["paths"].values()
        for operation in path.values()
    }


def test_every_operation_of_the_sheet_has_its_id(plain: Service) -> None:
    found = operations(plain.app.openapi())
    assert found.keys() == OPERATIONS | OURS
    for name, operation in found.items():
        assert operation["x-required-role"] in {"none", "read", "operate", "admin"}
        assert ("security" in operation) == (operation["x-required-role"] != "none")
        for answer in ("4XX", "5XX"):
            schema = operation["responses"][answer]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorBody"}, name
    assert "422" not in str(found["list_tasks"]["responses"].keys())
    assert "HTTPValidationError" not in str(plain.app.openapi())


def test_a_query_is_spelled_as_lakekeeper_spells_it(plain: Service) -> None:
    details = operations(plain.app.openapi())["get_task_details"]["parameters"]
    (found,) = [one for one in details if one["in"] == "query"]
    assert found["name"] == "numAttempts"
    assert (found["schema"]["default"], found["schema"]["minimum"]) == (5, 0)


def test_settings_of_queues_are_described_with_their_limits(plain: Service) -> None:
    schemas = plain.app.openapi()["components"]["schemas"]
    orphans = schemas["RemoveOrphanFilesQueueConfig"]["properties"]
    assert orphans["maximum-interval-seconds"] == {
        "type": "integer", "format": "int64", "minimum": 86400, "maximum": 2**63 - 1,
        "default": 7776000,
    }  # fmt: skip
    expire = schemas["ExpireSnapshotsQueueConfig"]["properties"]
    assert {"type": "null"} in expire["max-snapshot-age-ms"]["anyOf"]


def test_the_document_is_the_same_for_everybody(plain: Service) -> None:
    answer = plain.client.request("GET", "/openapi.json")
    assert answer.json() == plain.app.openapi()


# -- made-up requests ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_lived(
    template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, str]]:
    from lakewarden.service.app import create_app
    from lakewarden.service.settings import ServiceSettings

    place = tmp_path_factory.mktemp("schemathesis") / "tasks.db"
    place.write_bytes(template.read_bytes())
    world = World(0)
    with Service.running(
        create_app(ServiceSettings(f"sqlite:///{place}"), clock=world), world
    ) as made:
        lake = made.warehouse(tables=3)
        for queue in ("expire_snapshots", "remove_orphan_files", "optimize"):
            lake.enable(queue)
        yield made, str(lake.id)


@pytest.mark.parametrize("name", sorted(OPERATIONS | OURS))
def test_whatever_the_document_allows_is_answered_as_it_says(
    long_lived: tuple[Service, str], name: str
) -> None:
    """Half of the requests go to a warehouse that there is; the rest is made up altogether."""
    service, number = long_lived
    schema = schemathesis.openapi.from_dict(service.app.openapi())
    operation = schema.find_operation_by_id(name)
    headers = {"authorization": f"Bearer {service.tokens[Role.ADMIN]}"}

    @settings(
        max_examples=1000 if profile == "nightly" else 15,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
        derandomize=profile != "nightly",
    )
    @given(case=operation.as_strategy(), real=st.booleans())
    def check(case: Any, real: bool) -> None:
        # Catalogs and buckets that somebody makes up are waited for; those have tests of their own.
        if name == "create_warehouse" and isinstance(case.body, dict):
            case.body = {**case.body, "kind": "lance", "storage-options": {}}
            case.body["location"] = "/nowhere"
        if real and name != "delete_warehouse" and "warehouse_id" in (case.path_parameters or {}):
            case.path_parameters["warehouse_id"] = number
        given_headers = {**(case.headers or {}), **headers}
        sent = case.as_transport_kwargs(base_url="http://localhost", headers=given_headers)
        answer = service.client.request(
            sent["method"],
            sent["url"],
            params=sent.get("params"),
            headers={key: str(value) for key, value in sent["headers"].items()},
            **{key: sent[key] for key in ("json",) if sent.get(key) is not None},
        )
        case.validate_response(answer, checks=list(CHECKS))

    check()


# -- a client that is made of it -----------------------------------------------------------------


@pytest.fixture
def client(service: Service, tmp_path: Path) -> ModuleType:
    return generate(service.app.openapi(), tmp_path / "lakewarden_client.py")


def test_a_generated_client_does_a_days_work(service: Service, client: ModuleType) -> None:
    lake = service.warehouse(tables=2)

    def send(method: str, path: str, query: dict[str, Any], body: Any) -> tuple[int, Any]:
        answer = service.call(method, f"/{path}", body, params=query)
        return answer.status_code, answer.json() if answer.content else None

    api = client.Client(send)
    assert "optimize" in api.get_server_info().queues
    config = {"queue-config": {"enable-optimize": True}}
    assert api.set_task_queue_config_optimize(lake.id, body=config) is None
    tables = api.list_tables(lake.id, page_size=1)
    entity = tables.tables[0]["entity"]
    made = api.schedule_task_optimize(lake.id, body={"entity": entity})
    details = api.get_task_details(lake.id, made.task_id, numAttempts=2)
    assert (details.status, details.attempts) == ("SCHEDULED", [])
    stop = {"action": {"action-type": "cancel"}, "task-ids": [made.task_id]}
    assert api.control_tasks(lake.id, body=stop) is None
    assert [one["status"] for one in api.list_tasks(lake.id, body={}).tasks] == ["CANCELLED"]
    api.schedule_task_optimize(lake.id, body={"entity": entity})
    with pytest.raises(client.ApiError, match="TaskAlreadyActive") as caught:
        api.schedule_task_optimize(lake.id, body={"entity": entity})
    assert caught.value.code == 409


def test_a_generated_client_has_every_operation(service: Service, client: ModuleType) -> None:
    public = {name for name in vars(client.Client) if not name.startswith("_")}
    assert public == OPERATIONS | OURS
    assert re.search(r"numAttempts: 'int' = 5", Path(str(client.__file__)).read_text())
