"""The command that says what is wrong with a warehouse or a table, and mends what can be mended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakewarden.cli import output
from lakewarden.cli.conduct import (
    Consent,
    ask,
    echo,
    end_progress,
    is_warehouse,
    open_catalogs,
    start,
)
from lakewarden.cli.options import (
    CatalogOpt,
    ConfOpt,
    DatabaseOpt,
    JsonOpt,
    MasterOpt,
    QuietOpt,
    RemoteOpt,
    ServerOpt,
    StorageOpt,
    opening,
    pairs,
    read_engine,
    read_targets,
    refuse_server,
)
from lakewarden.errors import ErrorKind, Exit, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lakewarden.cli.session import Engine
    from lakewarden.maintenance.damage import Finding
    from lakewarden.maintenance.fleet import Targets
    from lakewarden.maintenance.repair import RepairPlan, RepairReceipt, Request, Row

_QUESTION = "Change a store that is not local?"
#: Lines of a listing that a person reads; the rest is counted.
_SHOWN = 12


def repair(
    target: Annotated[
        str,
        typer.Argument(
            metavar="WAREHOUSE|TABLE",
            help="A warehouse, or a table of its own: path, URI, or iceberg://CATALOG/NAMESPACE.TABLE.",
            show_default=False,
        ),
    ],
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm", help="Publish verified maintenance; without this nothing is changed."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Publish what is suspicious or unverifiable, too, after you looked at it.",
        ),
    ] = False,
    to_pin: Annotated[
        bool,
        typer.Option(
            "--to-pin", help="Bring drifted tables back to their pins instead, as a new version."
        ),
    ] = False,
    table: Annotated[
        list[str],
        typer.Option(
            "--table", metavar="GLOB", help="Only tables whose name matches (sales.*); repeatable."
        ),
    ] = [],
    yes: Annotated[
        bool, typer.Option("--yes", help="Consent to changing a store that is not local.")
    ] = False,
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
    """Say what was written past a warehouse and what is damaged; mend what can be mended safely.

    Without --confirm nothing is changed. A table in no warehouse is only looked at.

    [bold]Examples[/bold]

      lakewarden repair s3://lake/warehouse

      lakewarden repair s3://lake/warehouse --confirm --yes

      lakewarden repair s3://lake/warehouse --to-pin --table sales.orders --confirm --yes

      lakewarden repair /data/events.lance
    """
    from lakewarden.maintenance.repair import Request

    refuse_server(server)
    _check(confirm=confirm, force=force, to_pin=to_pin)
    where = read_targets([target], False, [], [])
    options = pairs(storage_option, "--storage-option")
    consent, engine = Consent(confirm, yes, json, quiet), read_engine(master, remote, conf)
    echo(where, consent, engine)
    consent = ask([*where.tables], consent, _QUESTION)
    request = Request(confirm, force, to_pin, tuple(table))
    if log_database is not None or is_warehouse(where, options):
        _warehouse(target, request, consent, engine, options, log_database)
        return
    if confirm or force or to_pin or table:
        raise UsageError(
            ErrorKind.USAGE,
            f"{target} is no warehouse, so there is no pin to move: leave out --confirm, --force, "
            "--to-pin and --table to look for damage",
        )
    _table(where, consent, engine, options, pairs(catalog_property, "--catalog-property"))


def _check(*, confirm: bool, force: bool, to_pin: bool) -> None:
    if force and to_pin:
        raise UsageError(
            ErrorKind.USAGE,
            "--force publishes what was written past the warehouse, and --to-pin goes back behind it; "
            "choose one",
        )
    if force and not confirm:
        raise UsageError(
            ErrorKind.USAGE, "--force goes with --confirm; look at the preview first, without both"
        )


def register(main: typer.Typer) -> None:
    """Add the command to the command line."""
    main.command()(repair)


def _warehouse(
    uri: str,
    request: Request,
    consent: Consent,
    engine: Engine,
    options: dict[str, str],
    database: str | None,
) -> None:
    from lakewarden.maintenance import repair as operations
    from lakewarden.maintenance.fleet import Targets
    from lakewarden.storage.location import Location
    from lakewarden.warehouse.warehouse import Warehouse

    # Not read yet: its log may be what is damaged.
    found = Warehouse.unread(uri, opener=opening(options), database=database)
    reading = start(engine, options, Targets(()), None)
    plan = operations.plan(found, request, reading, now=reading.clock.now())
    if request.to_pin:
        # Going back writes to the tables, and those may lie elsewhere.
        ask([Location.parse(row.line.table.location) for row in plan.rows], consent, _QUESTION)
    done = operations.execute(plan) if request.confirm else None
    end_progress()
    location, version = found.location.uri, done.version if done is not None else None
    if consent.json:
        output.to_stdout(_json(location, done or plan, version))
    else:
        output.to_stdout(_text(location, done or plan, version))
    _end(done or plan)


def _table(
    targets: Targets,
    consent: Consent,
    engine: Engine,
    options: dict[str, str],
    catalog: dict[str, str],
) -> None:
    """Look for damage in a table that is in no warehouse."""
    from lakewarden.formats.iceberg.metadata import parse
    from lakewarden.maintenance import damage, kept
    from lakewarden.maintenance.survey import Costs, with_credentials
    from lakewarden.pipeline.frames import ReadStores

    lake = open_catalogs(targets, catalog)
    if lake is None:
        place = targets.tables[0]
        checked = kept.lance_table(place, opening(options)(place))
        reading = start(engine, options, targets, lake)
    else:
        pointer = lake.locate(targets.iceberg.tables[0])
        stores = ReadStores(opening(targets.iceberg.storage_options(lake) | options))
        current = parse(lake.read(pointer, stores), pointer.metadata_location)
        checked = kept.iceberg_table(pointer.table.uri, current.location, pointer.metadata_location)
        reading = with_credentials(start(engine, options, targets, lake), [pointer])
    findings = damage.find([checked], reading, Costs())
    end_progress()
    if consent.json:
        facts = {"uri": checked.key, "confirm": False, "force": False, "to_pin": False}
        rows = [_finding(one) for one in findings]
        output.to_stdout(
            output.document("repair", **facts, manifest_version=None, tables=[], damage=rows)
        )
        return
    output.to_stdout("\n".join(_damage(findings)))


# -- rendering -------------------------------------------------------------------------------------


def _json(uri: str, told: RepairPlan | RepairReceipt, version: int | None) -> str:
    return output.document(
        "repair",
        uri=uri,
        confirm=told.request.confirm,
        force=told.request.force,
        to_pin=told.request.to_pin,
        manifest_version=version,
        tables=[_row(row) for row in told.rows],
        damage=[_finding(one) for one in told.findings],
        error=None if told.error is None else told.error.message,
        error_kind=None if told.error is None else told.error.kind.value,
    )


def _row(row: Row) -> dict[str, Any]:
    line = row.line
    head = line.head.version if line.head is not None else None
    return {
        "table_key": line.key,
        "branch": line.branch,
        "format": line.table.format.value,
        "manifest_version": line.pin.version,
        "lance_head_version": head,
        "classification": line.classification.value,
        "action": row.action.value,
        "operations": [step.operation for step in line.steps],
        "doubts": line.doubts,
        "rows_at_pin": line.rows_at_pin,
        "rows_at_head": line.rows_at_head,
        "pin": row.pin.version if row.pin is not None else None,
        "error": row.error,
        "error_kind": None if row.error_kind is None else row.error_kind.value,
    }


def _finding(one: Finding) -> dict[str, Any]:
    from lakewarden.maintenance.damage import NAMED

    return {
        "kind": one.kind,
        "table_key": one.table_key,
        "files": one.files,
        "examples": list(one.examples),
        "versions": list(one.versions[:NAMED]),
        "versions_count": len(one.versions),
        "refs": list(one.refs[:NAMED]),
        "refs_count": len(one.refs),
        "quarantined": one.quarantined,
        "means": one.means,
        "next": one.next,
    }


def _text(uri: str, told: RepairPlan | RepairReceipt, version: int | None) -> str:
    drifted = [row for row in told.rows if row.line.drifted or row.failed]
    lines = [f"drift    {_count(drifted, told.rows)}"]
    for row in drifted:
        lines += _row_lines(row)
    lines += _damage(told.findings)
    if version is not None:
        lines.append(f"done     published as version {version} of the warehouse")
    elif told.request.confirm:
        lines.append("done     no pin was moved")
    else:
        lines.append(_preview(uri, drifted, to_pin=told.request.to_pin))
    return "\n".join(lines)


def _count(drifted: Sequence[Row], rows: Sequence[Row]) -> str:
    tables = output.count_text(len(rows), "table")
    return f"{len(drifted):,} of {tables}" if drifted else f"none in {tables}"


def _row_lines(row: Row) -> list[str]:
    line = row.line
    where = "" if line.branch == "main" else f" on {line.branch}"
    head = line.head.version if line.head is not None else "none"
    pins = f"pin {line.pin.version}, head {head}"
    lines = [f"  {line.key}{where}   {pins}   {line.classification.value}   {row.action.value}"]
    if line.steps:
        named = [step.operation for step in line.steps]
        more = f", … and {len(named) - _SHOWN:,} more" if len(named) > _SHOWN else ""
        lines.append(f"    operations   {', '.join(named[:_SHOWN])}{more}")
    if line.rows_at_pin is not None and line.rows_at_head is not None:
        lines.append(f"    rows         {line.rows_at_pin:,} at the pin, {line.rows_at_head:,} now")
    lines += [f"    doubt        {doubt}" for doubt in line.doubts]
    if row.error is not None:
        lines.append(f"    error        {row.error}")
    return lines


def _damage(findings: Sequence[Finding]) -> list[str]:
    lines = [f"damage   {output.count_text(len(findings), 'finding') if findings else 'none'}"]
    for one in findings:
        lines.append(f"  {one.table_key}   {one.kind}   {one.means}")
        lines += [f"    {example}" for example in one.examples]
        if one.files > len(one.examples) > 0:
            lines.append(f"    … and {one.files - len(one.examples):,} more")
        if one.refs:
            more = f", … and {len(one.refs) - _SHOWN:,} more" if len(one.refs) > _SHOWN else ""
            lines.append(f"    needed by    {', '.join(one.refs[:_SHOWN])}{more}")
        if one.quarantined:
            put = output.count_text(one.quarantined, "object")
            lines.append(f"    put aside    {put}, to __manifest/_quarantine/")
        else:
            lines.append(f"    next         {one.next}")
    return lines


def _preview(uri: str, drifted: Sequence[Row], *, to_pin: bool) -> str:
    from lakewarden.warehouse.drift import Classification

    if to_pin and drifted:
        return f"preview: nothing was changed; lakewarden repair {uri} --to-pin --confirm goes back"
    kinds = {row.line.classification for row in drifted if not row.failed}
    advice = []
    if Classification.VERIFIED_MAINTENANCE in kinds:
        advice.append(f"lakewarden repair {uri} --confirm publishes what is verified maintenance")
    if kinds & {Classification.SUSPICIOUS, Classification.UNVERIFIABLE}:
        advice.append(
            "--to-pin --confirm goes back behind the rest, --force --confirm publishes it"
        )
    return "; ".join(["preview: nothing was changed", *advice])


def _end(told: RepairPlan | RepairReceipt) -> None:
    """Say on stderr what was refused, and leave with the code that says so."""
    from lakewarden.maintenance.repair import RepairReceipt
    from lakewarden.warehouse.drift import Action

    if told.error is not None:
        output.to_stderr(f"error    {told.error.message}")
    failed = [row for row in told.rows if row.failed]
    refused = [row for row in told.rows if row.action is Action.REFUSED and not row.failed]
    for row in failed:
        output.to_stderr(f"error    {row.line.key}: {row.error}")
    if refused:
        named = ", ".join(row.line.key for row in refused[:_SHOWN])
        output.to_stderr(
            f"error    {output.count_text(len(refused), 'table')} not published ({named}): what was "
            "written past the warehouse is not verified maintenance; go back with --to-pin --confirm, or "
            "publish it with --force --confirm"
        )
    if isinstance(told, RepairReceipt):
        raise typer.Exit(told.exit_code)
    if told.error is not None or (failed and len(failed) == len(told.rows)):
        raise typer.Exit(Exit.REFUSED)
    if failed:
        raise typer.Exit(Exit.PARTIAL)
