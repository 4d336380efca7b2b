"""The commands of the service: tokens, migrations, and what serve refuses."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lakewarden.cli.options import OTLP_BASE_VARIABLE, read_otlp
from lakewarden.errors import Refused
from lakewarden.jobs.database import open_database
from lakewarden.jobs.tokens import Audit, Role, Tokens
from lakewarden.world import SystemChance
from tests.cli.terminal import lakewarden


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """A directory with a database in it."""
    found = ["--data-directory", str(tmp_path / "data")]
    assert lakewarden("migrate", *found).code == 0
    return found


@pytest.mark.parametrize(
    "command", [("create", "me", "--role", "admin"), ("list",), ("revoke", "me")], ids=" ".join
)
def test_a_mistyped_place_makes_no_database(
    tmp_path: Path, data: list[str], command: tuple[str, ...]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    for place in (
        ("--data-directory", tmp_path / "dada"),
        ("--data-directory", tmp_path),
        ("--database-url", f"sqlite:///{tmp_path}/data/lakewarden.bd"),
    ):
        found = lakewarden("token", *command, *place)
        assert found.error.startswith("there is no database ")
        assert "lakewarden migrate" in found.error
        assert (found.code, found.stdout) == (1, "")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_token_is_shown_once_and_works_until_it_is_revoked(
    tmp_path: Path, data: list[str]
) -> None:
    made = lakewarden(
        "token", "create", "grafana", "--role", "operate", "--expires-in", "90d", "--json", *data
    )
    assert made.code == 0
    assert made.document["role"] == "operate"
    database = open_database(f"sqlite:///{tmp_path}/data/lakewarden.db")
    try:
        holder = Tokens(database, SystemChance()).holder(made.document["token"])
        assert holder is not None
        assert holder.role is Role.OPERATE
        assert holder.expires_at is not None
        assert round((holder.expires_at - holder.created_at).total_seconds()) == 90 * 86_400
        listed = lakewarden("token", "list", *data)
        assert "grafana" in listed.stdout
        assert "operate" in listed.stdout
        assert made.document["token"] not in listed.stdout
        assert lakewarden("token", "revoke", "grafana", *data).code == 0
        assert Tokens(database, SystemChance()).holder(made.document["token"]) is None
        done = [one.action for one in Audit(database, SystemChance()).page().entries]
        assert sorted(done) == ["create_token", "revoke_token"]
    finally:
        database.close()
    assert lakewarden("token", "list", "--json", *data).document["tokens"] == []


def test_nobody_else_may_read_the_database(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o755)
    assert lakewarden("migrate", "--data-directory", tmp_path / "data").code == 0
    (made,) = (tmp_path / "data").glob("*.db")
    assert made.stat().st_mode & 0o777 == 0o600


def test_a_token_in_text_stands_alone_on_its_line(data: list[str]) -> None:
    made = lakewarden("token", "create", "me", *data)
    (secret,) = made.stdout.splitlines()
    assert secret.startswith("lwt_")
    assert made.stderr == "the token of me (role read); keep it, it is not shown again\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("create", "me", "--role", "king"), 2, "king"),
        (("create", "me", "--expires-in", "soon"), 2, "soon"),
        (("create", "me", "--expires-in", "0s"), 2, "no time at all"),
        (("create", " "), 2, "name"),
        (("create", "a\nb"), 2, "name"),
        (("create", "x" * 256), 2, "name"),
        (("revoke", "nobody"), 1, "nobody"),
        (("list", "--database-url", "mysql://host/x"), 2, "cannot be used"),
        (("list", "--database-url", "nonsense"), 2, "cannot be used"),
    ],
)
def test_tokens_that_cannot_be_made(
    data: list[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    found = lakewarden("token", *arguments, *data)
    assert words in found.error
    assert found.code == code


def test_a_name_is_used_once(data: list[str]) -> None:
    assert lakewarden("token", "create", "me", *data).code == 0
    assert "already" in lakewarden("token", "create", "me", *data).error


def test_a_database_of_ones_own_is_migrated_by_hand(tmp_path: Path) -> None:
    url = ["--database-url", f"sqlite:///{tmp_path}/own.db"]
    assert "lakewarden migrate" in lakewarden("token", "list", *url).error
    assert "lakewarden migrate" in lakewarden("serve", "--port", "0", *url).error
    assert not (tmp_path / "own.db").exists()
    first = lakewarden("migrate", "--json", *url)
    assert first.document["before"] is None
    again = lakewarden("migrate", "--json", *url)
    assert again.document["before"] == again.document["after"] == first.document["after"]
    assert "already" in lakewarden("migrate", *url).stdout
    assert lakewarden("token", "list", *url).stdout == "no tokens\n"


def test_nobody_serves_the_world_without_tokens(data: list[str]) -> None:
    found = lakewarden("serve", "--host", "0.0.0.0", "--port", "0", "--no-auth", *data)
    assert "--no-auth" in found.error
    assert found.code == 1


def test_a_port_that_is_taken_is_told(data: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = lakewarden("serve", "--port", port, *data)
    assert str(port) in found.error
    assert found.code == 2


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (("--host", "nowhere.invalid"), "cannot listen"),
        (("--host", "192.0.2.1"), "cannot listen"),
        (("--port", "70000"), "65535"),
        (("--port", "-1"), "--port"),
    ],
)
def test_a_place_that_is_none_is_told(data: list[str], where: tuple[str, str], words: str) -> None:
    found = lakewarden("serve", *where, *data)
    assert words in found.error
    assert found.code == 2


def test_small_answers_do_not_wait_for_larger_ones() -> None:
    """asyncio switches Nagle's algorithm off only on sockets that name their protocol.

    With it, every answer on a connection that is kept took 40 ms.
    """
    from lakewarden.cli.serving import _listening

    with _listening("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_service_whose_workers_cannot_go_on_ends(tmp_path: Path) -> None:
    from fastapi import FastAPI

    from lakewarden.cli.serving import _listening, _run
    from lakewarden.jobs.running import Engine
    from lakewarden.jobs.worker import WorkerSettings

    def nothing() -> Engine:
        raise AssertionError("nobody needs Spark here")

    # Nobody has migrated it.
    settings = WorkerSettings(f"sqlite:///{tmp_path}/empty.db", nothing)
    with (
        _listening("127.0.0.1", 0) as listener,
        pytest.raises(Refused, match="lakewarden migrate"),
    ):
        _run(FastAPI(), settings, listener)


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = lakewarden("migrate", "--data-directory", tmp_path / "file" / "below")
    assert "--data-directory" in found.error


@pytest.mark.parametrize(
    ("given", "shared", "found"),
    [
        (None, None, None),
        ("http://collector:4318", None, "http://collector:4318/v1/traces"),
        ("http://collector:4318/", None, "http://collector:4318/v1/traces"),
        ("http://collector/here", None, "http://collector/here"),
        (None, "http://collector/otlp/", "http://collector/otlp/v1/traces"),
        ("http://one", "http://other", "http://one/v1/traces"),
    ],
)
def test_traces_go_where_collectors_take_them(
    given: str | None, shared: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OTLP_BASE_VARIABLE, raising=False)
    if shared is not None:
        monkeypatch.setenv(OTLP_BASE_VARIABLE, shared)
    assert read_otlp(given) == found


def test_a_collector_without_an_address_is_refused(data: list[str]) -> None:
    said = lakewarden("serve", "--otlp-endpoint", "collector:4318", *data)
    assert said.code == 2
    assert "http://localhost:4318" in said.stderr
