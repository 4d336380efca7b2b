"""A service on each kind of database, called in the test's process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lakewarden.service.app import create_app
from lakewarden.service.settings import ServiceSettings
from lakewarden.testing.simulation import World
from tests.jobs.conftest import postgres_template, template, url, world
from tests.service.small import Service

__all__ = ["postgres_template", "template", "url", "world"]


@pytest.fixture
def service(url: str, world: World) -> Iterator[Service]:
    """A service that asks for tokens; whoever calls through `service.admin` has one."""
    app = create_app(ServiceSettings(url, body_bytes_max=1024 * 1024), clock=world)
    with Service.running(app, world) as made:
        yield made


@pytest.fixture
def plain(
    tmp_path_factory: pytest.TempPathFactory, template: object, world: World
) -> Iterator[Service]:
    """The same on SQLite alone, for what the database has no part in."""
    place = tmp_path_factory.mktemp("plain") / "tasks.db"
    place.write_bytes(template.read_bytes())  # type: ignore[attr-defined]
    settings = ServiceSettings(f"sqlite:///{place}", body_bytes_max=1024 * 1024)
    with Service.running(create_app(settings, clock=world), world) as made:
        yield made
