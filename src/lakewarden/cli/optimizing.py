"""The command that keeps reads fast: what is asked, what is shown."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakewarden.cli import conduct, output
from lakewarden.cli.options import (
    CatalogOpt,
    ConfOpt,
    DatabaseOpt,
    ExcludeOpt,
    JsonOpt,
    MasterOpt,
    QuietOpt,
    RecursiveOpt,
    RemoteOpt,
    ServerOpt,
    StorageOpt,
    opening,
    pairs,
    read_engine,
    read_targets,
    refuse_server,
)
from lakewarden.cli.warehouse import open_warehouse
from lakewarden.errors import ErrorKind, Exit, UsageError
from lakewarden.model import MAIN, parse_size
from lakewarden.packing import DELETIONS, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lakewarden.maintenance.fleet import Targets
    from lakewarden.maintenance.optimize import Plan, Receipt, Row
    from lakewarden.maintenance.places import Place

CONCURRENCY = "LAKEWARDEN_MAINTENANCE_CONCURRENCY"
_TABLES_SHOWN = 40
#: What the reasons mean for which a table is left alone, and what to do about them.
_SKIPPED = {
    "drift_needs_repair": "somebody has written past the warehouse: lakewarden repair",
    "auto_cleanup_configured": "Lance would delete its old versions after our commit: take "
    "lance.auto_cleanup.* out of its configuration",
    "empty": "nothing was written to it yet",
    "inherited": "this branch has not changed it; optimize the branch it comes from",
}

TargetsArg = Annotated[
    list[str],
    typer.Argument(
        help="A warehouse, or tables: paths or URIs of Lance tables, iceberg://CATALOG/NAMESPACE.TABLE, "
        "…/NAMESPACE, iceberg://CATALOG.",
        show_default=False,
    ),
]


def optimize(
    targets: TargetsArg,
    target_size: Annotated[
        str | None,
        typer.Option(
            "--target-size",
            metavar="SIZE",
            help="What a file is to have (256MiB); else as the format or the table says.",
        ),
    ] = None,
    min_files: Annotated[
        int | None,
        typer.Option(
            "--min-files",
            metavar="N",
            help="Rewrite no fewer files together (Lance: 2, Iceberg: 5), but for deleted rows.",
        ),
    ] = None,
    deletions: Annotated[
        float,
        typer.Option(
            "--deletions",
            metavar="X",
            help="Rewrite a file from this share of deleted rows on (0 to 1).",
        ),
    ] = DELETIONS,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes",
            metavar="SIZE",
            help="Read no more than this in one run (50GiB); what gains most comes first.",
        ),
    ] = None,
    table: Annotated[
        list[str],
        typer.Option(
            "--table", metavar="GLOB", help="Only tables whose name or URI matches; repeatable."
        ),
    ] = [],
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="FILTER",
            help="Iceberg: only files that may hold such rows (day >= '2026-11-01').",
        ),
    ] = None,
    branch: Annotated[
        str, typer.Option("--branch", metavar="NAME", help="A warehouse: on this branch.")
    ] = MAIN,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would be done and what it gains; rewrite nothing."
        ),
    ] = False,
    recursive: RecursiveOpt = False,
    exclude: ExcludeOpt = [],
    storage_option: StorageOpt = [],
    catalog_property: CatalogOpt = [],
    log_database: DatabaseOpt = None,
    master: MasterOpt = None,
    remote: RemoteOpt = None,
    conf: ConfOpt = [],
    json: JsonOpt = False,
    quiet: QuietOpt = False,
    server: ServerOpt = None,
) -> None:
    """Rewrite small files into few large ones, and bring indices up to date.

    Rows stay the same and every old version stays readable until cleanup. Tables of a warehouse that
    were changed become one version of it; writers are not held up.

    [bold]Examples[/bold]

      lakewarden optimize /data/events.lance

      lakewarden optimize s3://lake/warehouse --max-bytes 50GiB

      lakewarden optimize iceberg://prod/sales --target-size 256MiB --dry-run

      lakewarden optimize s3://lake/tables --recursive --exclude 'tmp_*'
    """
    from lakewarden.maintenance import optimize as operations
    from lakewarden.packing import Rules

    refuse_server(server)
    rules = Rules(
        None if target_size is None else parse_size(target_size),
        min_files,
        deletions,
        None if max_bytes is None else parse_size(max_bytes),
    )
    if where is not None:
        _check_filter(where)
    request = operations.Request(rules, where, concurrency(os.environ))
    engine, options = read_engine(master, remote, conf), pairs(storage_option, "--storage-option")
    targeted = read_targets(targets, recursive, [], exclude)
    consent = conduct.Consent(confirm=True, yes=True, json=json, quiet=quiet)
    conduct.echo(targeted, consent, engine)
    whole = log_database is not None or conduct.is_warehouse(targeted, options)
    if branch != MAIN and not whole:
        raise UsageError(ErrorKind.USAGE, "--branch is one of a warehouse; name a warehouse")
    place, catalogs = _place(
        targeted,
        options,
        pairs(catalog_property, "--catalog-property"),
        tuple(table),
        (targets[0], branch, tuple(exclude), log_database, storage_option) if whole else None,
    )
    # Whatever is wrong with what was asked for shows before Spark starts.
    place.keys()
    reading = conduct.start(engine, options, targeted, catalogs)
    planned = operations.plan(place, request, reading)
    if dry_run:
        _show(json, "optimize_plan", planned.rows, planned.seconds, _plan_lines(planned), None)
        raise typer.Exit(_code(planned))
    receipt = operations.execute(planned, reading)
    lines = _receipt_lines(receipt)
    _show(json, "optimize_receipt", receipt.rows, receipt.seconds, lines, receipt.version)
    raise typer.Exit(receipt.exit_code)


def _place(
    targets: Targets,
    options: dict[str, str],
    properties: dict[str, str],
    only: tuple[str, ...],
    warehouse: tuple[str, str, tuple[str, ...], str | None, list[str]] | None,
) -> tuple[Place, Any]:
    """Return the tables, and the catalogs that they are in."""
    from lakewarden.maintenance.places import Alone, Together

    if warehouse is not None:
        uri, branch, exclude, database, storage = warehouse
        return Together(open_warehouse(uri, database, storage), branch, only, exclude), None
    lake = conduct.open_catalogs(targets, properties)
    opener = opening(targets.iceberg.storage_options(lake) | options)
    return Alone(targets, opener, lake, only), lake


def _check_filter(where: str) -> None:
    """Refuse a filter that is none; whether a table has its columns shows with the table."""
    from pyiceberg.expressions.parser import parse

    try:
        parse(where)
    except Exception as error:  # the parser's own, and ValueError
        raise UsageError(
            ErrorKind.USAGE,
            f"--where {where!r} is no filter; write it like: day >= '2026-11-01' AND region = 'eu'",
        ) from error


def concurrency(environ: Mapping[str, str]) -> int:
    """Return how many tables the driver looks after at once."""
    from lakewarden.maintenance.optimize import CONCURRENCY as DEFAULT

    told = environ.get(CONCURRENCY) or str(DEFAULT)
    if not told.isdecimal() or not int(told):
        raise UsageError(
            ErrorKind.USAGE, f"{CONCURRENCY} is {told!r}; it must be a number of tables, 1 or more"
        )
    return int(told)


def _code(planned: Plan) -> Exit:
    if not planned.failed:
        return Exit.DONE
    return Exit.REFUSED if len(planned.failed) == len(planned.rows) else Exit.PARTIAL


def _show(
    json: bool,
    kind: str,
    rows: Sequence[Row],
    seconds: Mapping[str, float],
    lines: Sequence[str],
    version: int | None,
) -> None:
    conduct.end_progress()
    if json:
        facts = {"tables": [row.json() for row in rows], "seconds": dict(seconds)}
        output.to_stdout(output.document(kind, warehouse_version=version, **facts))
    else:
        output.to_stdout("\n".join(lines))
    for row in rows:
        if row.error is not None:
            output.to_stderr(f"error    {row.table_key}: {row.error}")


def _plan_lines(planned: Plan) -> list[str]:
    lines = []
    todo = [row for row in planned.rows if row.groups or not _covered(row.before)]
    for row in sorted(todo, key=lambda row: -row.bytes_to_rewrite)[:_TABLES_SHOWN]:
        lines.append(f"table    {row.table_key}")
        if row.groups:
            lines.append(
                f"rewrite  {output.count_text(row.files_to_rewrite, 'file')} in "
                f"{output.count_text(row.groups, 'group')}, {output.size_text(row.bytes_to_rewrite)}; "
                f"{row.before.files:,} files become about {row.files_expected:,}"
                if row.before
                else ""
            )
        lines += _index_lines(row.before)
        if row.deferred:
            lines.append(f"later    {output.count_text(row.deferred, 'group')} beyond --max-bytes")
    lines += _others(planned.rows, todo)
    return [*lines, "dry run: nothing was rewritten; leave out --dry-run to do it"]


def _receipt_lines(receipt: Receipt) -> list[str]:
    lines = []
    done = [row for row in receipt.rows if row.committed]
    for row in sorted(done, key=lambda row: -row.bytes_to_rewrite)[:_TABLES_SHOWN]:
        lines.append(f"table    {row.table_key}")
        before, after = row.before, row.after
        if before and after:
            lines.append(
                f"files    {before.files:,} became {after.files:,}, "
                f"{output.size_text(before.bytes)} became {output.size_text(after.bytes)}"
            )
            if before.deleted_rows:
                lines.append(
                    f"deleted  {before.deleted_rows:,} deleted rows became {after.deleted_rows:,}"
                )
            if before.manifests != after.manifests:
                lines.append(f"lists    {before.manifests:,} manifests became {after.manifests:,}")
            lines += _index_lines(before, after)
        if row.deferred:
            lines.append(f"later    {output.count_text(row.deferred, 'group')} beyond --max-bytes")
    lines += _others(receipt.rows, done)
    if receipt.version is not None:
        lines.append(f"version  {receipt.version} of the warehouse shows it")
    lines.append(f"cost     {sum(receipt.seconds.values()):.1f} s")
    return lines


def _covered(shape: Shape | None) -> bool:
    return shape is None or shape.covered


def _index_lines(before: Shape | None, after: Shape | None = None) -> list[str]:
    lines = []
    now = {one.name: one for one in after.indices} if after else {}
    for one in before.indices if before else ():
        if not one.unindexed_fragments:
            continue
        left = f", now {now[one.name].unindexed_rows:,}" if one.name in now else ""
        lines.append(
            f"index    {one.name}: {one.unindexed_rows:,} of {one.rows:,} rows not covered{left}"
        )
    return lines


def _others(rows: Sequence[Row], shown: Sequence[Row]) -> list[str]:
    """Say what is with the tables of which nothing is said above."""
    lines = []
    if len(shown) > _TABLES_SHOWN:
        lines.append(f"         … and {len(shown) - _TABLES_SHOWN:,} more tables")
    for row in rows:
        if row.skipped is not None:
            means = _SKIPPED.get(row.skipped, "see the documentation")
            lines.append(f"skipped  {row.table_key}: {row.skipped} ({means})")
        for reason, files in row.left_alone.items():
            lines.append(f"leave    {row.table_key}: {output.count_text(files, 'file')}, {reason}")
    done = {row.table_key for row in shown}
    idle = [
        row
        for row in rows
        if row.table_key not in done and row.skipped is None and row.error is None
    ]
    if idle:
        lines.append(f"fine     {output.count_text(len(idle), 'table')} with nothing to do")
    return lines


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("optimize")(optimize)
