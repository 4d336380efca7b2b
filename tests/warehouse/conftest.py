"""A warehouse in memory with a clock of its own."""

from __future__ import annotations

import pytest

from lakewarden.testing.memory import MemoryStore
from lakewarden.testing.simulation import World
from lakewarden.warehouse.warehouse import Warehouse
from tests.warehouse.lakes import made_in


@pytest.fixture
def world() -> World:
    """A clock that only goes on when it is told to."""
    return World(0)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def lake(store: MemoryStore, world: World) -> Warehouse:
    return made_in(store, world)
