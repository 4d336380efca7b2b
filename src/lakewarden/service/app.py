"""Puts the service together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware

import lakewarden
from lakewarden.service import failures, openapi, queues, status, tasks, warehouses
from lakewarden.service.metrics import Metrics
from lakewarden.service.parts import Parts, open_parts
from lakewarden.service.settings import ServiceSettings
from lakewarden.service.tracing import NoTracing, Tracing
from lakewarden.service.watch import Watch
from lakewarden.world import Clock, SystemClock


def create_app(
    settings: ServiceSettings, *, clock: Clock | None = None, tracing: Tracing | None = None
) -> FastAPI:
    """Return the application.  The database is opened here, and must be up to date.

    `clock` replaces the database's, for tests.
    """
    parts = open_parts(settings, clock=clock)
    metrics = Metrics(parts.database)
    app = FastAPI(
        title="Lakewarden",
        version=lakewarden.__version__,
        lifespan=_closing(parts),
        # Pages come from elsewhere, and an address has one spelling.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(
                Watch,
                clock=SystemClock(),
                metrics=metrics,
                tracing=tracing or NoTracing(),
                body_bytes_max=settings.body_bytes_max,
            )
        ],
    )
    app.state.parts = parts
    app.state.metrics = metrics
    failures.install(app)
    for router in (queues.router, tasks.router, warehouses.router, status.router):
        app.include_router(router)
    app.include_router(status.outside)
    openapi.install(app)
    return app


def _closing(parts: Parts) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        parts.database.close()

    return lifespan
