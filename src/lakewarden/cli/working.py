"""The command that works on tasks until it is told to stop."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from lakewarden.cli import output
from lakewarden.cli.options import (
    DATABASE_VARIABLES,
    ConfOpt,
    MasterOpt,
    OtlpOpt,
    RemoteOpt,
    read_engine,
    read_otlp,
)
from lakewarden.errors import ErrorKind, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lakewarden.cli.session import Engine as Session
    from lakewarden.jobs.running import Engine


def worker(
    database_url: Annotated[
        str | None,
        typer.Option(
            "--database-url",
            metavar="URL",
            envvar=DATABASE_VARIABLES,
            show_envvar=False,
            help="The service's database: postgresql://user@host/name, sqlite:////path; also "
            "DATABASE_URL.",
        ),
    ] = None,
    master: MasterOpt = None,
    remote: RemoteOpt = None,
    conf: ConfOpt = [],
    otlp_endpoint: OtlpOpt = None,
) -> None:
    """Work on tasks: expire versions, remove orphan files, optimize, clean the task log.

    Tasks that are due at the same time share pipeline runs. How many loops each queue has is set by
    LAKEWARDEN__TASK_EXPIRE_SNAPSHOTS_WORKERS and so on; docs/reference/cli.md lists them. SIGTERM ends it: what runs is
    stopped at the next batch and tried again by others.

    [bold]Examples[/bold]

      lakewarden worker --database-url postgresql://lakewarden@db/tasks

      LAKEWARDEN__TASK_OPTIMIZE_WORKERS=0 lakewarden worker --master spark://spark:7077
    """
    from lakewarden.jobs.worker import WorkerSettings, run_workers
    from lakewarden.service.logs import log_to_stderr
    from lakewarden.service.tracing import tracing_to

    if not database_url:
        raise UsageError(
            ErrorKind.USAGE,
            f"no database is named; pass --database-url, or set {' or '.join(DATABASE_VARIABLES)}",
        )
    settings = WorkerSettings.of(
        os.environ, database_url, engine_of(read_engine(master, remote, conf))
    )
    settings = replace(settings, around=tracing_to(read_otlp(otlp_endpoint)).batch)
    log_to_stderr("info")
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    output.to_stderr(
        "worker   " + ", ".join(f"{queue}: {n}" for queue, n in settings.workers.items())
    )
    run_workers(settings, stop)


def engine_of(session: Session) -> Callable[[], Engine]:
    """Return what starts Spark for workers, as the maintenance commands do."""

    def start() -> Engine:
        from lakewarden.cli.session import start as start_spark
        from lakewarden.cli.session import tasks_for
        from lakewarden.jobs.running import Engine

        spark = start_spark(session)
        return Engine(spark, tasks_for(spark, session))

    return start


def register(main: typer.Typer) -> None:
    """Add the command to the command line."""
    main.command()(worker)
