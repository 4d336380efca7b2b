"""The options that commands share: how they are declared and how their text is read."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from lakewarden.errors import ErrorKind, UsageError
from lakewarden.model import Guard

if TYPE_CHECKING:
    from lakewarden.cli.session import Engine
    from lakewarden.formats.iceberg.paths import Equality
    from lakewarden.maintenance.fleet import Targets
    from lakewarden.maintenance.safety import Breakers
    from lakewarden.storage.opening import Opener


class AgeFrom(StrEnum):
    """Where a version's age comes from."""

    store = "store"
    commit = "commit"


#: More tasks than anyone has cores for.
TASKS_MAX = 100_000

TargetsArg = Annotated[
    list[str],
    typer.Argument(
        help="Tables: paths or URIs of Lance tables (/data/t.lance, s3://b/t.lance), or "
        "iceberg://CATALOG/NAMESPACE.TABLE, …/NAMESPACE, iceberg://CATALOG.",
        show_default=False,
    ),
]
TargetArg = Annotated[
    str,
    typer.Argument(
        help="A table: path, URI, or iceberg://CATALOG/NAMESPACE.TABLE.", show_default=False
    ),
]
CatalogOpt = Annotated[
    list[str],
    typer.Option(
        "--catalog-property",
        metavar="K=V",
        help="A setting on top of PyIceberg's configuration (uri=…, type=…); repeatable.",
    ),
]
GuardOpt = Annotated[
    Guard,
    typer.Option(
        "--guard",
        help="Iceberg: make sure that no other table of the catalog (or only of the targets) "
        "shares a place with one that is cleaned.",
    ),
]
JsonOpt = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")
]
QuietOpt = Annotated[bool, typer.Option("--quiet", help="Do not echo the target.")]
ConfirmOpt = Annotated[
    bool, typer.Option("--confirm", help="Do it; without this only the plan is shown.")
]
YesOpt = Annotated[
    bool, typer.Option("--yes", help="Consent to deleting on a store that is not local.")
]
StorageOpt = Annotated[
    list[str],
    typer.Option(
        "--storage-option", metavar="K=V", help="Credentials, endpoint and so on; repeatable."
    ),
]
RecursiveOpt = Annotated[
    bool, typer.Option("--recursive", "-r", help="Targets are directories; take every table below.")
]
ProtectOpt = Annotated[
    list[str],
    typer.Option(
        "--protect",
        metavar="URI",
        help="Read this table too, for what it needs, but do not change it; repeatable.",
    ),
]
ExcludeOpt = Annotated[
    list[str],
    typer.Option(
        "--exclude",
        metavar="GLOB",
        help="Leave tables alone whose URI or name matches; repeatable.",
    ),
]
#: Where the address of the service's database is looked for, in this order.
DATABASE_VARIABLES = ["LAKEWARDEN__DATABASE_URL", "DATABASE_URL"]
MasterOpt = Annotated[
    str | None, typer.Option("--master", metavar="URL", help="Run on this Spark cluster.")
]
RemoteOpt = Annotated[
    str | None,
    typer.Option(
        "--remote", metavar="URL", help="Run through this Spark Connect server (sc://host)."
    ),
]
ConfOpt = Annotated[
    list[str], typer.Option("--conf", metavar="K=V", help="A Spark setting; repeatable.")
]
#: Where traces go, and where everything goes, as OpenTelemetry has it.
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
OTLP_BASE_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
OtlpOpt = Annotated[
    str | None,
    typer.Option(
        "--otlp-endpoint",
        metavar="URL",
        envvar=OTLP_VARIABLE,
        show_envvar=False,
        help="Send traces to this OpenTelemetry collector; also OTEL_EXPORTER_OTLP_ENDPOINT, to which "
        "/v1/traces is added.",
    ),
]
RateOpt = Annotated[
    float | None, typer.Option("--rate-limit", metavar="N", help="Delete at most N keys a second.")
]
MaxFilesOpt = Annotated[
    int | None,
    typer.Option("--max-delete-files", metavar="N", help="Refuse a plan that deletes more files."),
]
MaxBytesOpt = Annotated[
    int | None,
    typer.Option("--max-delete-bytes", metavar="N", help="Refuse a plan that deletes more bytes."),
]
MaxShareOpt = Annotated[
    float | None,
    typer.Option(
        "--max-delete-share",
        metavar="X",
        help="Refuse a plan that deletes a larger share of all files (0 to 1).",
    ),
]
SavePlanOpt = Annotated[
    str | None,
    typer.Option(
        "--save-plan", metavar="DIR", help="Write the plan there, for `lakewarden apply`."
    ),
]
DatabaseOpt = Annotated[
    str | None,
    typer.Option(
        "--log-database",
        metavar="URL",
        help="Where a warehouse's log is kept if its store cannot create-if-absent (postgresql://…).",
    ),
]
ServerOpt = Annotated[str | None, typer.Option("--server", hidden=True)]


def read_otlp(endpoint: str | None) -> str | None:
    """Return where traces go: as the option or its variable says, else below what all signals share.

    A collector that is named without a path takes traces at the usual one.
    """
    shared = os.environ.get(OTLP_BASE_VARIABLE, "")  # noqa: TID251  # the edge
    address = endpoint or shared
    if not address:
        return None
    found = urlsplit(address)
    if found.scheme not in {"http", "https"} or not found.netloc:
        raise UsageError(
            ErrorKind.USAGE,
            f"traces cannot be sent to {address[:100]!r}; write the collector's address like "
            "http://localhost:4318",
        )
    bare = not endpoint or not found.path.strip("/")
    return f"{address.rstrip('/')}/v1/traces" if bare else address


def read_targets(
    targets: list[str],
    recursive: bool,
    protect: list[str],
    exclude: list[str],
    **iceberg: Any,
) -> Targets:
    from lakewarden.maintenance.fleet import IcebergTargets, parse_targets

    return parse_targets(
        targets,
        recursive=recursive,
        protect=protect,
        exclude=exclude,
        iceberg=IcebergTargets(**iceberg),
    )


def read_breakers(files: int | None, size: int | None, share: float | None) -> Breakers:
    from lakewarden.maintenance.safety import Breakers

    return Breakers(files, size, share)


def read_engine(master: str | None, remote: str | None, conf: list[str]) -> Engine:
    from lakewarden.cli.session import Engine

    settings = pairs(conf, "--conf")
    tasks = settings.get("lakewarden.tasks", "1")
    if not tasks.isdecimal() or not 1 <= int(tasks) <= TASKS_MAX:
        raise UsageError(
            ErrorKind.USAGE,
            f"--conf lakewarden.tasks={tasks} is no number of tasks from 1 to {TASKS_MAX:,}",
        )
    return Engine(master, remote, settings)


def opening(options: dict[str, str]) -> Opener:
    from lakewarden.storage.opening import Opener

    return Opener(options)


def pairs(values: list[str], option: str) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, sign, text = value.partition("=")
        if not sign or not name.strip():
            raise UsageError(
                ErrorKind.USAGE, f"{option} {name!r} has no '='; write it as name=value"
            )
        pairs[name.strip()] = text
    return pairs


def equality(schemes: list[str], authorities: list[str]) -> Equality:
    from lakewarden.formats.iceberg.paths import Equality

    return Equality(pairs(schemes, "--equal-scheme"), pairs(authorities, "--equal-authority"))


def numbers(text: str) -> frozenset[int]:
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            ErrorKind.USAGE, f"--versions {text!r} is no list of numbers; write it like 3,4,7"
        ) from error


def check_rate(rate_limit: float | None) -> None:
    if rate_limit is not None and not 0 < rate_limit < float("inf"):
        raise UsageError(
            ErrorKind.USAGE, f"--rate-limit is {rate_limit:g}; it must be above 0 keys a second"
        )


def refuse_server(server: str | None) -> None:
    if server is not None:
        raise UsageError(
            ErrorKind.USAGE,
            "maintenance needs direct storage access; name the table's own URI, not --server",
        )
