"""The commands of the service: serve, migrate, and who may call."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakewarden.cli import output
from lakewarden.cli.options import DATABASE_VARIABLES, JsonOpt, OtlpOpt, read_otlp
from lakewarden.errors import ErrorKind, Refused, UsageError
from lakewarden.model import parse_duration

if TYPE_CHECKING:
    from fastapi import FastAPI

    from lakewarden.jobs.tokens import Audit, Principal, Tokens
    from lakewarden.jobs.worker import WorkerSettings
    from lakewarden.service.tracing import Tracing

app = typer.Typer(help="Make, show and revoke tokens of the service.", no_args_is_help=True)

_DATA = Path("~/.lakewarden")
_DATABASE = "lakewarden.db"
#: What the audit log calls whoever has the database itself.
_ACTOR = "command line"
#: How long workers are waited for when the service ends.
_PATIENCE_SECONDS = 60.0


class Level(StrEnum):
    """What is worth a line in the log."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class RoleName(StrEnum):
    """What the holder of a token may do."""

    read = "read"
    operate = "operate"
    admin = "admin"


ServiceDatabaseOpt = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        envvar=DATABASE_VARIABLES,
        show_envvar=False,
        help="PostgreSQL or SQLite, postgresql://…; also DATABASE_URL. Without: SQLite in the data "
        "directory.",
    ),
]
DataOpt = Annotated[
    Path,
    typer.Option(
        "--data-directory",
        metavar="DIR",
        envvar="LAKEWARDEN__DATA_DIRECTORY",
        show_envvar=False,
        help="Where the embedded database is.",
    ),
]


def serve(
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            envvar="LAKEWARDEN__BIND_IP",
            show_envvar=False,
            help="Where to listen.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="N",
            min=0,
            max=65535,
            envvar="LAKEWARDEN__LISTEN_PORT",
            show_envvar=False,
            help="On which port; 0 for any that is free.",
        ),
    ] = 8181,
    database_url: ServiceDatabaseOpt = None,
    data_directory: DataOpt = _DATA,
    auth: Annotated[
        bool | None,
        typer.Option(
            "--auth/--no-auth",
            help="Whether callers need a token. Off by default on loopback, and possible only there.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        bool,
        typer.Option("--workers/--no-workers", help="Run tasks in this process, too."),
    ] = True,
    log_level: Annotated[
        Level, typer.Option("--log-level", help="What is worth a line in the log.")
    ] = Level.info,
    otlp_endpoint: OtlpOpt = None,
) -> None:
    """Serve the management API, and run tasks.

    Without a database URL everything is in one SQLite file that is kept up to date by itself. A
    database of your own is brought up to date with lakewarden migrate.

    [bold]Examples[/bold]

      lakewarden serve

      DATABASE_URL=postgresql://lakewarden@db/lakewarden lakewarden serve --host 0.0.0.0 --no-workers
    """
    with _listening(host, port) as listener:
        address, bound = listener.getsockname()[:2]
        authenticate = _authenticates(auth, address)
        url = database_url or _embedded(data_directory)
        _require_service()
        from lakewarden.service.app import create_app
        from lakewarden.service.logs import log_to_stderr
        from lakewarden.service.settings import ServiceSettings
        from lakewarden.service.tracing import tracing_to

        tracing = tracing_to(read_otlp(otlp_endpoint))
        settings = ServiceSettings(url, authenticate=authenticate)
        application = create_app(settings, tracing=tracing)
        log_to_stderr(log_level.value)
        shown = f"[{address}]" if ":" in address else address
        access = "a token is needed" if authenticate else "this machine only, no token needed"
        output.to_stderr(f"serving  http://{shown}:{bound} ({access})")
        if authenticate and not application.state.parts.tokens.all():
            output.to_stderr(
                "nobody has a token yet; make one: lakewarden token create me --role admin"
            )
        _run(application, _workers(url, tracing) if workers else None, listener)


def _run(application: FastAPI, working: WorkerSettings | None, listener: socket.socket) -> None:
    """Answer requests until somebody ends the process, and work on tasks meanwhile.

    Workers that cannot go on end the process: whoever looks at its health must not believe that
    tasks are done.
    """
    import signal
    from threading import Event, Thread

    import uvicorn

    config = uvicorn.Config(
        application,
        # Ours logs, in our form; nobody stands before us whose headers say who calls.
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=30,
    )
    server, stop, failed = uvicorn.Server(config), Event(), list[Exception]()

    def end(*_: object) -> None:
        server.should_exit = True

    # Uvicorn raises a signal that has ended it once more, and workers are still to be waited for.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)

    def work(settings: WorkerSettings) -> None:
        from lakewarden.jobs.worker import run_workers

        try:
            run_workers(settings, stop)
        except Exception as error:  # noqa: BLE001  # raised again by whoever waits for the thread
            failed.append(error)
        finally:
            server.should_exit = True

    thread = None
    if working is not None:
        thread = Thread(target=work, args=(working,), name="workers", daemon=True)
        thread.start()
    try:
        server.run(sockets=[listener])
    finally:
        stop.set()
        if thread is not None:
            thread.join(_PATIENCE_SECONDS)
    if failed:
        raise failed[0]


def _workers(database_url: str, tracing: Tracing) -> WorkerSettings:
    """Return how this process works on tasks."""
    import os
    from dataclasses import replace

    from lakewarden.cli.options import read_engine
    from lakewarden.cli.working import engine_of
    from lakewarden.jobs.worker import WorkerSettings

    # How many loops each queue has is the environment's to say, here as for lakewarden worker.
    engine = engine_of(read_engine(None, None, []))
    found = WorkerSettings.of(os.environ, database_url, engine)  # noqa: TID251
    return replace(found, around=tracing.batch)


def _listening(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # With its protocol named: asyncio sends small answers at once only where it is.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
        return listener
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            ErrorKind.USAGE,
            f"cannot listen on {host} port {port} ({reason}); choose another --host or --port",
        ) from None


def _authenticates(wanted: bool | None, address: str) -> bool:
    """Return whether callers need a token; without, nobody else may reach the service."""
    from ipaddress import ip_address

    local = ip_address(address.partition("%")[0]).is_loopback
    if wanted is None:
        return not local
    if not wanted and not local:
        raise Refused(
            ErrorKind.CONSENT,
            f"{address} can be reached from other machines, so everybody could have tables cleaned; "
            "leave --no-auth out, or listen on 127.0.0.1",
        )
    return wanted


def _embedded(directory: Path, *, make: bool = True, up_to_date: bool = True) -> str:
    """Return the address of the embedded database, made or brought up to date if need be.

    Who only uses it does not `make` it: a mistyped directory would be a new service with no tokens.
    """
    _require_service()
    from lakewarden.jobs.database import migrate as bring_up_to_date

    place = directory.expanduser().absolute()
    if not make and not (place / _DATABASE).exists():
        raise Refused(
            ErrorKind.NOT_FOUND,
            f"there is no database in {place}; check --data-directory and --database-url, or make one "
            f"there with lakewarden serve or lakewarden migrate",
        )
    try:
        # It holds credentials of warehouses.
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        (place / _DATABASE).touch(mode=0o600)
        (place / _DATABASE).chmod(0o600)
    except OSError as error:
        raise UsageError(
            ErrorKind.USAGE,
            f"{place} cannot be made ({error.strerror}); name another --data-directory",
        ) from None
    url = f"sqlite:///{place / _DATABASE}"
    if up_to_date:
        bring_up_to_date(url)
    return url


def _require_service() -> None:
    try:
        import alembic  # noqa: F401
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(
            ErrorKind.USAGE,
            f"the service needs {error.name}, which is not installed; pip install 'lakewarden[service]'",
        ) from None


def migrate(
    database_url: ServiceDatabaseOpt = None,
    data_directory: DataOpt = _DATA,
    json: JsonOpt = False,
) -> None:
    """Bring the service's database up to date; running it again does nothing.

    Stop workers of the older release first.

    [bold]Example[/bold]

      DATABASE_URL=postgresql://lakewarden@db/lakewarden lakewarden migrate
    """
    url = database_url or _embedded(data_directory, up_to_date=False)
    _require_service()
    from lakewarden.jobs.database import migrate as bring_up_to_date

    before, after = bring_up_to_date(url)
    text = (
        f"the database is at revision {after} already"
        if before == after
        else f"the database went from revision {before or 'none'} to {after}"
    )
    _tell(json, text, "migrate", before=before, after=after)


@app.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="Whose it is, for the audit log.")],
    role: Annotated[
        RoleName, typer.Option("--role", help="What it allows: each role includes those before it.")
    ] = RoleName.read,
    expires_in: Annotated[
        str | None,
        typer.Option("--expires-in", metavar="AGE", help="It is worth nothing after this (90d)."),
    ] = None,
    database_url: ServiceDatabaseOpt = None,
    data_directory: DataOpt = _DATA,
    json: JsonOpt = False,
) -> None:
    """Make a token and show it, once: only its hash is kept.

    [bold]Example[/bold]

      lakewarden token create grafana --role read --expires-in 90d
    """
    age = None if expires_in is None else parse_duration(expires_in)
    if age is not None and age <= timedelta(0):
        raise UsageError(ErrorKind.USAGE, "--expires-in is no time at all; give an age like 90d")
    if not name.strip() or len(name) > 255 or not name.isprintable():
        raise UsageError(
            ErrorKind.BAD_NAME, "a token's name is 1 to 255 characters that can be printed"
        )
    from lakewarden.jobs.tokens import Role

    with (
        _tokens(database_url, data_directory) as (tokens, audit),
        tokens.database.writing() as connection,
    ):
        now = tokens.database.moment(connection)
        until = None if age is None else _later(now, age)
        made, secret = tokens.create(name, Role(role.value), expires_at=until, joined=connection)
        context = {"name": name, "role": role.value}
        audit.record(_ACTOR, "create_token", None, context, joined=connection)
    _tell(json, secret, "token", token=secret, **_row(made))
    # Alone on stdout, for whoever puts it into a variable.
    output.to_stderr(f"the token of {name} (role {role.value}); keep it, it is not shown again")


def _later(now: datetime, age: timedelta) -> datetime:
    try:
        return now + age
    except OverflowError:
        raise UsageError(
            ErrorKind.USAGE, "--expires-in is beyond all time; leave it out for a token that stays"
        ) from None


@app.command("list")
def list_tokens(
    database_url: ServiceDatabaseOpt = None,
    data_directory: DataOpt = _DATA,
    json: JsonOpt = False,
) -> None:
    """Show whose tokens there are, and what they allow.

    [bold]Example[/bold]

      lakewarden token list
    """
    with _tokens(database_url, data_directory) as (tokens, _):
        rows = [_row(one) for one in tokens.all()]
    text = "\n".join(
        f"{row['name']:<24}  {row['role']:<8}  since {row['created_at'][:10]}"
        + (f", until {row['expires_at'][:10]}" if row["expires_at"] else "")
        for row in rows
    )
    _tell(json, text or "no tokens", "tokens", tokens=rows)


@app.command("revoke")
def revoke_token(
    name: Annotated[str, typer.Argument(help="Whose it is.")],
    database_url: ServiceDatabaseOpt = None,
    data_directory: DataOpt = _DATA,
    json: JsonOpt = False,
) -> None:
    """Let a token be worth nothing from now on.

    [bold]Example[/bold]

      lakewarden token revoke grafana
    """
    with (
        _tokens(database_url, data_directory) as (tokens, audit),
        tokens.database.writing() as connection,
    ):
        tokens.revoke(name, joined=connection)
        audit.record(_ACTOR, "revoke_token", None, {"name": name}, joined=connection)
    _tell(json, f"the token of {name} is revoked", "token", name=name, revoked=True)


def register(main: typer.Typer) -> None:
    """Add the commands to the command line."""
    main.command()(serve)
    main.command()(migrate)
    main.add_typer(app, name="token")


@contextmanager
def _tokens(database_url: str | None, directory: Path) -> Iterator[tuple[Tokens, Audit]]:
    url = database_url or _embedded(directory, make=False)
    _require_service()
    from lakewarden.jobs.database import open_database
    from lakewarden.jobs.tokens import Audit, Tokens
    from lakewarden.world import SystemChance

    database = open_database(url)
    try:
        yield Tokens(database, SystemChance()), Audit(database, SystemChance())
    finally:
        database.close()


def _row(one: Principal) -> dict[str, Any]:
    return {
        "name": one.name,
        "role": one.role.value,
        "created_at": one.created_at.isoformat(timespec="seconds"),
        "expires_at": None
        if one.expires_at is None
        else one.expires_at.isoformat(timespec="seconds"),
    }


def _tell(json: bool, text: str, message_type: str, **facts: Any) -> None:
    output.to_stdout(output.document(message_type, **facts) if json else text)
