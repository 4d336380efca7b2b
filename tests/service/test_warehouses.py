"""Warehouses over HTTP: registered by looking at them, and never with a word about how to reach them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
import sqlalchemy as sa

from lakewarden.jobs.tasks import EntityType
from lakewarden.jobs.warehouses import FoundTable
from lakewarden.service.logs import JsonLines
from lakewarden.testing import iceberg
from lakewarden.testing.s3 import S3Server, s3_server
from lakewarden.warehouse.iceberg import WarehouseCatalog
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.warehouse import Warehouse
from tests.service import shapes
from tests.service.small import Service, refusal

ROWS = pa.table({"id": [1, 2, 3]})
WAREHOUSE: dict[str, shapes.Check] = {
    "warehouse-id": shapes.uuid,
    "name": shapes.text,
    "project-id": shapes.text,
    "kind": shapes.text,
    "location": shapes.text,
    "created-at": shapes.time,
}
TABLE: dict[str, shapes.Check] = {
    "entity": shapes.entity,
    "entity-name": shapes.names,
    "target": shapes.text,
    "properties": shapes.thing,
    "changed-at": shapes.or_null(shapes.time),
    "created-at": shapes.time,
}


@pytest.fixture
def lance_lake(tmp_path: Path) -> Path:
    root = tmp_path / "lance"
    for name in ("events.lance", "deep/er/clicks.lance"):
        lance.write_dataset(ROWS, root / name)
    marked = lance.dataset(root / "events.lance")
    marked.update_config({"lakewarden.optimize.enabled": "true", "own": "secret-of-theirs"})
    (root / "notes").mkdir()
    (root / "notes" / "readme.txt").write_text("no table")
    return root


def register(service: Service, **body: Any) -> Any:
    return service.post("/warehouse", {"warehouse-name": "lake", **body})


def tables_of(service: Service, number: str) -> dict[str, dict[str, Any]]:
    found = service.get(f"/warehouse/{number}/tables").json()
    assert found.keys() == {"tables", "next-page-token"}
    assert all(shapes.fits(one, TABLE) for one in found["tables"])
    return {".".join(one["entity-name"]): one for one in found["tables"]}


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Return what is in a directory, to tell whether anybody wrote to it."""
    return {
        str(one.relative_to(root)): (one.stat().st_size, one.stat().st_mtime_ns)
        for one in root.rglob("*")
        if one.is_file()
    }


def test_a_directory_of_lance_tables_is_found_and_only_read(
    service: Service, lance_lake: Path
) -> None:
    before = snapshot(lance_lake)
    answer = register(service, kind="lance", location=f"{lance_lake}/")
    assert answer.status_code == 201, answer.text
    assert answer.json().keys() == {"warehouse-id", "tables"}
    number = answer.json()["warehouse-id"]
    tables = tables_of(service, number)
    assert sorted(tables) == ["deep.er.clicks.lance", "events.lance"]
    assert {one["entity"]["type"] for one in tables.values()} == {"generic-table"}
    assert tables["events.lance"]["target"] == str(lance_lake / "events.lance")
    # What decides about maintenance, and nothing else.
    assert tables["events.lance"]["properties"] == {"lakewarden.optimize.enabled": "true"}
    assert snapshot(lance_lake) == before
    shown = service.get(f"/warehouse/{number}").json()
    assert shapes.fits(shown, WAREHOUSE)
    assert shown["location"] == str(lance_lake)
    assert service.get("/warehouse").json() == {"warehouses": [shown]}


def test_tables_that_come_and_go_are_seen_by_looking_again(
    service: Service, lance_lake: Path
) -> None:
    number = register(service, kind="lance", location=str(lance_lake)).json()["warehouse-id"]
    first = tables_of(service, number)
    lance.write_dataset(ROWS, lance_lake / "more.lance")
    (lance_lake / "events.lance").rename(lance_lake.parent / "away")
    answer = service.call("POST", f"/warehouse/{number}/tables/refresh")
    assert answer.json() == {"tables": 2, "added": 1, "gone": 1}
    assert sorted(tables_of(service, number)) == ["deep.er.clicks.lance", "more.lance"]
    (lance_lake.parent / "away").rename(lance_lake / "events.lance")
    service.call("POST", f"/warehouse/{number}/tables/refresh")
    # A table that is back is the one it was.
    assert tables_of(service, number)["events.lance"]["entity"] == first["events.lance"]["entity"]


def test_a_catalog_of_pyiceberg_is_found_and_only_read(service: Service, tmp_path: Path) -> None:
    root = tmp_path / "iceberg"
    catalog = iceberg.catalog(root)
    table = iceberg.create(catalog, "db.orders", properties={"gc.enabled": "false", "own": "x"})
    iceberg.append(table, 0)
    before = snapshot(root)
    answer = register(
        service,
        kind="iceberg",
        location="lake",
        **{"catalog-properties": iceberg.catalog_properties(root)},
    )
    assert answer.status_code == 201, answer.text
    tables = tables_of(service, answer.json()["warehouse-id"])
    assert tables["db.orders"]["entity"]["type"] == "table"
    assert tables["db.orders"]["target"] == "iceberg://lake/db.orders"
    assert tables["db.orders"]["properties"] == {"gc.enabled": "false"}
    assert snapshot(root) == before


def test_a_catalog_that_is_not_there_is_not_made(service: Service, tmp_path: Path) -> None:
    place = tmp_path / "catalog.db"
    properties = {"type": "sql", "uri": f"sqlite:///{place}", "warehouse": str(tmp_path)}
    answer = register(
        service, kind="iceberg", location="lake", **{"catalog-properties": properties}
    )
    refusal(answer, 400, "WarehouseNotReadable")
    assert service.get("/warehouse").json() == {"warehouses": []}


def test_a_warehouse_of_ours_is_found(service: Service, tmp_path: Path) -> None:
    place = str(tmp_path / "ours")
    made = Warehouse.init(place)
    lance.write_dataset(
        ROWS, namespace_client=Namespace(made), table_id=["db", "events"], mode="create"
    )
    catalog = WarehouseCatalog("ours", opened=Warehouse.open(place))
    catalog.create_table(
        "db.orders", ROWS.schema, properties={"history.expire.max-snapshot-age-ms": "5"}
    )
    answer = register(service, kind="lakewarden", location=place)
    assert answer.status_code == 201, answer.text
    tables = tables_of(service, answer.json()["warehouse-id"])
    kinds = {name: one["entity"]["type"] for name, one in tables.items()}
    assert kinds == {"db.events": "generic-table", "db.orders": "table"}
    assert tables["db.orders"]["properties"] == {"history.expire.max-snapshot-age-ms": "5"}
    # Its tables are no fleet of their own.
    wrong = register(service, kind="lance", location=place, **{"warehouse-name": "other"})
    assert "lakewarden" in refusal(wrong, 400, "WarehouseNotReadable")


def test_tables_are_listed_by_page_and_the_list_ends(service: Service) -> None:
    lake = service.warehouse(tables=23)
    seen, token = [], None
    for _ in range(5):
        query = {"page-size": 5} | ({} if token is None else {"page-token": token})
        answer = service.get(f"{lake.path}/tables", params=query).json()
        seen += [one["entity-name"][1] for one in answer["tables"]]
        token = answer["next-page-token"]
    assert token is None
    assert seen == [f"t{number:03}" for number in range(23)]
    refusal(service.get(f"{lake.path}/tables?page-token=***"), 400, "PaginateTokenDecodeError")
    refusal(service.get(f"{lake.path}/tables?page-token=AAAA"), 400, "PaginateTokenParseError")


def test_pages_of_tables_neither_repeat_nor_hide_any_while_others_come_and_go(
    service: Service,
) -> None:
    parts, info = service.parts, service.warehouse(name="empty")
    # Names that languages order in other ways, and the longest that there can be.
    words = [
        "a",
        "B",
        "ä",
        "Z",
        "z",
        "_",
        "0",
        "ß",
        "é",
        "e",
        " ",
        "-",
        "A",
        "\U0001f600",
        "\uffee" * 1000,
    ]
    names = sorted(
        {(one, f"{two}{n}") for one in words[:-1] for two in words[:-1] for n in range(3)}
    )
    names.append((words[-1], ""))
    everything = [FoundTable(name, EntityType.TABLE, "iceberg://c/x", {}) for name in names]
    parts.warehouses.refresh(info.id, everything)
    going, coming = set(names[::7]), {("new", f"{one}") for one in words[:-1]}
    seen: list[tuple[str, ...]] = []
    token, pages, asked = None, 0, list[int]()

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "FROM entity" in statement:
            asked.append(statement.count("LIMIT"))

    sa.event.listen(parts.database.engine, "before_cursor_execute", note)
    while pages == 0 or token is not None:
        query = {"page-size": 50} | ({} if token is None else {"page-token": token})
        answer = service.get(f"{info.path}/tables", params=query)
        assert answer.status_code == 200, answer.text
        seen += [tuple(one["entity-name"]) for one in answer.json()["tables"]]
        token = answer.json()["next-page-token"]
        pages += 1
        if pages == 3:
            sa.event.remove(parts.database.engine, "before_cursor_execute", note)
            left = [one for one in everything if one.name not in going]
            new = [FoundTable(name, EntityType.TABLE, "iceberg://c/x", {}) for name in coming]
            parts.warehouses.refresh(info.id, [*left, *new])
    # The database finds each page; nobody reads all tables for one.
    assert asked == [1] * 3
    assert len(seen) == len(set(seen))
    keys = [json.dumps(name, ensure_ascii=False).encode() for name in seen]
    assert keys == sorted(keys)
    assert set(names) - going <= set(seen) <= set(names) | coming
    assert pages == -(-len(seen) // 50)


def test_a_name_is_used_once(service: Service, lance_lake: Path) -> None:
    assert register(service, kind="lance", location=str(lance_lake)).status_code == 201
    again = register(service, kind="lance", location=str(lance_lake))
    refusal(again, 409, "WarehouseAlreadyExists")


def test_a_place_is_used_once(service: Service, lance_lake: Path) -> None:
    assert register(service, kind="lance", location=str(lance_lake)).status_code == 201
    for place in (lance_lake, lance_lake.parent):
        again = service.post(
            "/warehouse", {"warehouse-name": "two", "kind": "lance", "location": str(place)}
        )
        refusal(again, 409, "WarehouseLocationTaken")
    assert len(service.parts.warehouses.all()) == 1


def test_a_warehouse_is_forgotten_but_not_with_tasks(service: Service, lance_lake: Path) -> None:
    number = register(service, kind="lance", location=str(lance_lake)).json()["warehouse-id"]
    before = snapshot(lance_lake)
    entity = tables_of(service, number)["events.lance"]["entity"]
    task = service.post(f"/warehouse/{number}/task-queue/optimize/schedule", {"entity": entity})
    refusal(service.call("DELETE", f"/warehouse/{number}"), 409, "WarehouseHasUnfinishedTasks")
    body = {"action": {"action-type": "cancel"}, "task-ids": [task.json()["task-id"]]}
    assert service.post(f"/warehouse/{number}/task/control", body).status_code == 204
    answer = service.call("DELETE", f"/warehouse/{number}")
    assert (answer.status_code, answer.content) == (204, b"")
    refusal(service.get(f"/warehouse/{number}"), 404, "WarehouseNotFound")
    refusal(service.call("DELETE", f"/warehouse/{number}"), 404, "WarehouseNotFound")
    assert snapshot(lance_lake) == before


@pytest.mark.parametrize(
    ("kind", "location"),
    [
        ("lance", "relative/place"),
        ("lance", "https://example.com/lake"),
        ("lance", "ftp://example.com/lake"),
        ("lakewarden", "s3://"),
        ("iceberg", "../../etc/passwd"),
        ("iceberg", "a/b"),
    ],
)
def test_places_that_are_none_are_refused(plain: Service, kind: str, location: str) -> None:
    refusal(register(plain, kind=kind, location=location), 400, "BadRequest")
    assert plain.get("/warehouse").json() == {"warehouses": []}


@pytest.mark.parametrize("kind", ["lance", "lakewarden"])
def test_a_place_with_nothing_in_it_is_refused(plain: Service, tmp_path: Path, kind: str) -> None:
    answer = register(plain, kind=kind, location=str(tmp_path / "nothing"))
    refusal(answer, 400, "WarehouseNotReadable")


@pytest.mark.parametrize(
    "name", ["py-catalog-impl", "py-io-impl", "PY-CATALOG-IMPL", "auth.custom.impl"]
)
def test_nobody_has_code_loaded(plain: Service, tmp_path: Path, name: str) -> None:
    properties = {name: "subprocess.Popen", "type": "sql", "uri": f"sqlite:///{tmp_path}/c.db"}
    answer = register(plain, kind="iceberg", location="c", **{"catalog-properties": properties})
    assert "code" in refusal(answer, 400, "BadRequest")


# -- credentials ---------------------------------------------------------------------------------

SECRETS = ("sk-STORAGE-7f3a", "pw-CATALOG-91bc", "session-TOKEN-5e5e")


class Lines(logging.Handler):
    """Keeps every line as it would be written, whatever its level."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonLines())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(before)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        server.create_bucket("lake")
        yield server


def everything(service: Service, number: str) -> list[str]:
    """Call whatever tells of a warehouse, and of what was done to it."""
    paths = [
        "/warehouse", f"/warehouse/{number}", f"/warehouse/{number}/tables", "/audit", "/info",
        f"/warehouse/{number}/task-queue/optimize/config", "//metrics", "//health", "//openapi.json",
    ]  # fmt: skip
    answers = [service.get(path) for path in paths]
    answers.append(service.post(f"/warehouse/{number}/task/list", {}))
    answers.append(service.call("POST", f"/warehouse/{number}/tables/refresh"))
    return [f"{answer.headers} {answer.text}" for answer in answers]


@pytest.mark.s3
def test_credentials_go_in_and_never_come_out(
    service: Service, s3: S3Server, tmp_path: Path, lines: Lines
) -> None:
    lance.write_dataset(ROWS, tmp_path / "events.lance")
    s3.load("lake", "events.lance", str(tmp_path / "events.lance"))
    options = {**s3.options, "aws_secret_access_key": SECRETS[0], "aws_session_token": SECRETS[2]}
    good = register(
        service,
        kind="lance",
        location="s3://lake",
        **{"storage-options": options, "catalog-properties": {"password": SECRETS[1]}},
    )
    assert good.status_code == 201, good.text
    told = [good.text, *everything(service, good.json()["warehouse-id"])]
    # They are there, for workers.
    kept = service.parts.warehouses.access(service.parts.warehouses.all()[0].id)
    assert kept.storage_options["aws_secret_access_key"] == SECRETS[0]
    found = f"{told} {lines.lines} {service.app.state.parts!r} {kept!r}"
    assert [secret for secret in SECRETS if secret in found] == []
    assert any("register" in one or "/warehouse" in one for one in lines.lines)


@pytest.mark.parametrize(
    "body",
    [
        # The catalog repeats what it was given when it says that it cannot be opened.
        {"kind": "iceberg", "location": "c",
         "catalog-properties": {"type": "sql", "uri": f"postgresql+psycopg://me:{SECRETS[1]}@127.0.0.1:1/x"}},
        {"kind": "iceberg", "location": "c",
         "catalog-properties": {"type": "sql", "uri": f"nonsense {SECRETS[1]}"}},
        {"kind": "iceberg", "location": "c", "catalog-properties": {"type": SECRETS[1]}},
        {"kind": "iceberg", "location": "c",
         "catalog-properties": {"type": "rest", "uri": f"http://u:{SECRETS[1]}@127.0.0.1:1", "token": SECRETS[2]}},
        {"kind": "lance", "location": f"s3://{SECRETS[0]}:{SECRETS[1]}@bucket/x"},
        {"kind": "lance", "location": "s3://bucket/x", "storage-options": {SECRETS[0]: 5}},
        {"kind": "lance", "location": "s3://bucket/x", "storage-options": SECRETS[0]},
        {"kind": SECRETS[0], "location": "/x"},
        {"kind": "lance", "location": "/nowhere/at/all", "storage-options": {"aws_secret_access_key": SECRETS[0]}},
        {"kind": "lance", "location": "s3://bucket/x",
         "storage-options": {"aws_endpoint": "http://127.0.0.1:1", "client_max_retries": "0",
                             "aws_access_key_id": "k", "aws_secret_access_key": SECRETS[0]}},
        {"kind": "lance", "location": "s3://bucket/x", "storage-options": {"allow_http": SECRETS[0]}},
    ],
    ids=range(11),
)  # fmt: skip
def test_no_error_repeats_what_may_be_a_credential(
    plain: Service, lines: Lines, body: dict[str, Any]
) -> None:
    answer = register(plain, **body)
    assert 400 <= answer.status_code < 500, answer.text
    refusal(answer, answer.status_code, answer.json()["error"]["type"])
    values = [one for one in SECRETS if one in f"{answer.text} {lines.lines}"]
    # The name of an option is no secret, wherever it came from.
    named = body["storage-options"] if isinstance(body.get("storage-options"), dict) else {}
    assert set(values) <= set(named)
    assert plain.get("/warehouse").json() == {"warehouses": []}
