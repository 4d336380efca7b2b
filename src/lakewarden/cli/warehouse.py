"""The commands about a warehouse: its tables, its log, its tags and branches, and going back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakewarden.cli import output
from lakewarden.cli.options import DatabaseOpt, JsonOpt, StorageOpt, opening, pairs
from lakewarden.errors import ErrorKind, UsageError
from lakewarden.model import MAIN, parse_moment

if TYPE_CHECKING:
    from lakewarden.warehouse.manifest import Logged
    from lakewarden.warehouse.warehouse import View, Warehouse

app = typer.Typer(help="Make and show warehouses.", no_args_is_help=True)

WarehouseArg = Annotated[
    str, typer.Argument(metavar="WAREHOUSE", help="Its path or URI.", show_default=False)
]
ActorOpt = Annotated[
    str | None, typer.Option("--as", metavar="NAME", help="Who the log says has done it.")
]
VersionOpt = Annotated[
    int | None, typer.Option("--version", metavar="N", help="A version of the warehouse.")
]
AtOpt = Annotated[
    str | None,
    typer.Option("--at", metavar="TIME", help="The newest version then (2026-11-15T12:00Z)."),
]
TagOpt = Annotated[str | None, typer.Option("--tag", metavar="NAME", help="A tagged version.")]
BranchOpt = Annotated[str, typer.Option("--branch", metavar="NAME", help="On this branch.")]
DeleteOpt = Annotated[bool, typer.Option("--delete", help="Delete the one of that name.")]


@app.command("init")
def init(
    warehouse: WarehouseArg,
    log_database: DatabaseOpt = None,
    actor: ActorOpt = None,
    storage_option: StorageOpt = [],
    json: JsonOpt = False,
) -> None:
    """Make an empty warehouse.

    [bold]Example[/bold]

      lakewarden warehouse init s3://lake/warehouse
    """
    from lakewarden.warehouse.warehouse import Warehouse

    options = pairs(storage_option, "--storage-option")
    made = Warehouse.init(warehouse, opener=opening(options), database=log_database, actor=actor)
    _tell(json, f"{made.location.uri} is a warehouse now", "warehouse", version=made.known.version)


@app.command("show")
def show(
    warehouse: WarehouseArg,
    log_database: DatabaseOpt = None,
    storage_option: StorageOpt = [],
    json: JsonOpt = False,
) -> None:
    """Show what a warehouse holds.

    [bold]Example[/bold]

      lakewarden warehouse show s3://lake/warehouse
    """
    found = open_warehouse(warehouse, log_database, storage_option)
    view = found.read()
    manifest = view.manifest
    dropped = [one for one in manifest.tables.values() if one.dropped is not None]
    tags = {name: tag.version for name, tag in sorted(manifest.tags.items())}
    gone = [".".join(one.name) for one in dropped]
    facts: dict[str, Any] = {
        "location": found.location.uri,
        "version": manifest.version,
        "committed_at": _moment(manifest.at_us),
        "tables": len(view.tables()),
        "dropped_tables": gone,
        "branches": sorted(manifest.branches),
        "tags": tags,
        "properties": dict(manifest.properties),
    }
    shown = {**facts, "branches": ", ".join(sorted(manifest.branches))}
    shown["tags"] = ", ".join(f"{name} (version {n})" for name, n in tags.items()) or "-"
    shown["dropped_tables"] = ", ".join(gone) or "-"
    del shown["properties"]
    text = "\n".join(f"{name.replace('_', ' '):<16} {value}" for name, value in shown.items())
    _tell(json, text, "warehouse", **facts)


def tables(
    warehouse: WarehouseArg,
    version: VersionOpt = None,
    tag: TagOpt = None,
    at: AtOpt = None,
    branch: BranchOpt = MAIN,
    log_database: DatabaseOpt = None,
    storage_option: StorageOpt = [],
    json: JsonOpt = False,
) -> None:
    """Show the tables of a warehouse, and which version of each is current.

    [bold]Example[/bold]

      lakewarden tables s3://lake/warehouse --tag training
    """
    found = open_warehouse(warehouse, log_database, storage_option)
    view = _read(found, version, tag, at, branch)
    rows: list[dict[str, Any]] = []
    for table in view.tables():
        pin = view.pins.get(table.id)
        rows.append(
            {
                "table_key": ".".join(table.name),
                "format": table.format.value,
                "pin": pin.version if pin is not None else None,
                "location": table.location,
                "properties": dict(table.properties),
            }
        )
    width = max((len(row["table_key"]) for row in rows), default=0)
    text = [
        f"{row['table_key']:<{width}}  {row['format']:<7}  "
        f"{'empty' if row['pin'] is None else 'v' + str(row['pin']):<6}  {row['location']}"
        for row in rows
    ]
    _tell(
        json,
        "\n".join(text) or "no tables",
        "tables",
        version=view.version,
        branch=view.branch,
        tables=rows,
    )


def log(
    warehouse: WarehouseArg,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", help="Show the newest N; 0 for all.")
    ] = 20,
    log_database: DatabaseOpt = None,
    storage_option: StorageOpt = [],
    json: JsonOpt = False,
) -> None:
    """Show the versions of a warehouse: what changed, when, and by whom.

    [bold]Example[/bold]

      lakewarden log s3://lake/warehouse --limit 5
    """
    if limit < 0:
        raise UsageError(ErrorKind.USAGE, f"--limit is {limit}; give a number from 0 (all)")
    found = open_warehouse(warehouse, log_database, storage_option)
    names = {one.id: ".".join(one.name) for one in found.known.manifest.tables.values()}
    rows = [_logged(one, names) for one in found.history(limit or None)]
    text = [
        f"{row['version']:>6}  {row['committed_at'][:19].replace('T', ' ')}  "
        f"{_line(row['actor'] or '-'):<12}  {_line(row['message'] or _changed(row))}"
        + (f"  [{row['branch']}]" if row["branch"] != MAIN else "")
        for row in rows
    ]
    _tell(json, "\n".join(text), "log", versions=rows)


def _changed(row: dict[str, Any]) -> str:
    return ", ".join(f"{one['operation']} {one['table_key']}".strip() for one in row["changes"])


def _line(text: str) -> str:
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def _logged(one: Logged, names: dict[str, str]) -> dict[str, Any]:
    made = one.transaction
    return {
        "version": one.version,
        "committed_at": _moment(one.at_us),
        "branch": made.branch,
        "actor": made.actor,
        "message": made.message,
        "transaction": made.id,
        "changes": [
            {
                "operation": change.operation.value,
                "table_key": names.get(change.table, ".".join(change.name)),
            }
            for change in made.changes
        ],
    }


def tag(
    warehouse: WarehouseArg,
    name: Annotated[
        str | None, typer.Argument(help="The tag; without one, all are shown.", show_default=False)
    ] = None,
    version: VersionOpt = None,
    delete: DeleteOpt = False,
    branch: BranchOpt = MAIN,
    actor: ActorOpt = None,
    log_database: DatabaseOpt = None,
    storage_option: StorageOpt = [],
    json: JsonOpt = False,
) -> None:
    """Give a version of a warehouse a name that keeps it, or show the tags.

    [bold]Examples[/bold]

      lakewarden tag s3://lake/warehouse training-2026-11

      lakewarden tag s3://lake/warehouse training-2026-11 --delete
    """
    _check_name(name, delete=delete, version=version)
    found = open_warehouse(warehouse, log_database, storage_option, actor)
    if name is not None and delete:
        found.delete_tag(name)
    elif name is not None:
        found.create_tag(name, version=version, branch=branch)
    manifest = found.known.manifest
    rows = [
        {
            "name": one,
            "version": tagged.version,
            "branch": tagged.branch,
            "created_at": _moment(tagged.made_us),
        }
        for one, tagged in sorted(manifest.tags.items())
    ]
    text = "\n".join(f"{row['name']:<24}  version {row['version']}" for row in rows)
    _tell(json, text or "no tags", "tags", tags=rows)


def branch(
    warehouse: WarehouseArg,
    name: Annotated[
        str | None,
        typer.Argument(help="The branch; without one, all are shown.", show_default=False),
    ] = None,
    version: VersionOpt = None,
    source: Annotated[
        str, typer.Option("--from", metavar="NAME", help="The branch to begin on.")
    ] = MAIN,
    delete: DeleteOpt = False,
    actor: ActorOpt = None,
    log_database: DatabaseOpt = None,
    storage_option: StorageOpt = [],
    json: JsonOpt = False,
) -> None:
    """Begin a branch of a whole warehouse, or show the branches; nothing is copied.

    [bold]Examples[/bold]

      lakewarden branch s3://lake/warehouse experiment

      lakewarden branch s3://lake/warehouse experiment --delete
    """
    _check_name(name, delete=delete, version=version)
    found = open_warehouse(warehouse, log_database, storage_option, actor)
    if name is not None and delete:
        found.delete_branch(name)
    elif name is not None:
        found.create_branch(name, version=version, source=source)
    manifest = found.known.manifest
    rows = [
        {"name": one, "from": own.parent or None, "base": own.base, "changed": len(own.pins)}
        for one, own in sorted(manifest.branches.items())
    ]
    text = "\n".join(
        f"{row['name']:<24}  "
        + (f"from {row['from']}, version {row['base']}" if row["from"] else "")
        for row in rows
    )
    _tell(json, text, "branches", branches=rows)


def restore(
    warehouse: WarehouseArg,
    table: Annotated[
        str | None,
        typer.Argument(help="Only this table (namespace.table).", show_default=False),
    ] = None,
    version: VersionOpt = None,
    tag: TagOpt = None,
    at: AtOpt = None,
    branch: BranchOpt = MAIN,
    actor: ActorOpt = None,
    log_database: DatabaseOpt = None,
    storage_option: StorageOpt = [],
    json: JsonOpt = False,
) -> None:
    """Bring a table or the whole warehouse back to an older version, as a new one.

    [bold]Examples[/bold]

      lakewarden restore s3://lake/warehouse --version 41

      lakewarden restore s3://lake/warehouse sales.orders --at 2026-11-14T08:00Z
    """
    from lakewarden.warehouse import names
    from lakewarden.warehouse.formats import with_formats

    if version is None and tag is None and at is None:
        raise UsageError(ErrorKind.USAGE, "say where to go back to: --version, --tag or --at")
    found = with_formats(open_warehouse(warehouse, log_database, storage_option, actor))
    before = found.known.version
    view = _read(found, version, tag, at, branch)
    done = found.restore(view, names.parse_name(table) if table else None)
    what = f"version {view.version}" + (f" of {table}" if table else "")
    text = (
        f"{what} is back as version {done.version}"
        if done.version > before
        else f"nothing to do: it is {what} already"
    )
    _tell(json, text, "restore", version=done.version, restored=view.version, table_key=table)


def undrop(
    warehouse: WarehouseArg,
    table: Annotated[str, typer.Argument(help="namespace.table", show_default=False)],
    actor: ActorOpt = None,
    log_database: DatabaseOpt = None,
    storage_option: StorageOpt = [],
    json: JsonOpt = False,
) -> None:
    """Bring back a table that was dropped.

    [bold]Example[/bold]

      lakewarden undrop s3://lake/warehouse sales.orders
    """
    from lakewarden.warehouse import names

    found = open_warehouse(warehouse, log_database, storage_option, actor)
    found.undrop(names.parse_name(table))
    _tell(json, f"{table} is back", "undrop", version=found.known.version, table_key=table)


def register(main: typer.Typer) -> None:
    """Add the commands to the command line."""
    main.add_typer(app, name="warehouse")
    for command in (log, tables, tag, branch, restore, undrop):
        main.command()(command)


def open_warehouse(
    uri: str, database: str | None, storage: list[str], actor: str | None = None
) -> Warehouse:
    """Open the warehouse that a command is about."""
    from lakewarden.warehouse.warehouse import Warehouse

    options = pairs(storage, "--storage-option")
    return Warehouse.open(uri, opener=opening(options), database=database, actor=actor)


def _read(
    found: Warehouse, version: int | None, tag: str | None, at: str | None, branch: str
) -> View:
    return found.read(
        version=version,
        tag=tag,
        at=None if at is None else parse_moment(at),
        branch=None if tag is not None and branch == MAIN else branch,
    )


def _check_name(name: str | None, *, delete: bool, version: int | None) -> None:
    if name is None and (delete or version is not None):
        raise UsageError(ErrorKind.USAGE, "say which: a name is missing")


def _moment(micros: int) -> str:
    return datetime.fromtimestamp(micros / 1_000_000, UTC).isoformat(timespec="milliseconds")


def _tell(json: bool, text: str, message_type: str, **facts: Any) -> None:
    output.to_stdout(output.document(message_type, **facts) if json else text)
