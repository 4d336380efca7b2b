"""The commands: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import lakewarden
from lakewarden.cli import optimizing, output, repairing, serving, warehouse, working
from lakewarden.cli.conduct import (
    Consent,
    ask,
    echo,
    end_progress,
    is_warehouse,
    look_at,
    open_catalogs,
    remove,
    remove_from_warehouse,
    show_plan,
    show_receipt,
    start,
    tell_warnings,
)
from lakewarden.cli.options import (
    AgeFrom,
    CatalogOpt,
    ConfirmOpt,
    ConfOpt,
    DatabaseOpt,
    ExcludeOpt,
    GuardOpt,
    JsonOpt,
    MasterOpt,
    MaxBytesOpt,
    MaxFilesOpt,
    MaxShareOpt,
    ProtectOpt,
    QuietOpt,
    RateOpt,
    RecursiveOpt,
    RemoteOpt,
    SavePlanOpt,
    ServerOpt,
    StorageOpt,
    TargetArg,
    TargetsArg,
    YesOpt,
    check_rate,
    equality,
    numbers,
    opening,
    pairs,
    read_breakers,
    read_engine,
    read_targets,
    refuse_server,
)
from lakewarden.cli.session import failure_of_spark
from lakewarden.errors import ErrorKind, Exit, LakewardenError, Refused, UsageError
from lakewarden.model import MAIN, Guard, PrefixMismatch, parse_duration
from lakewarden.retention import OnTagged

if TYPE_CHECKING:
    from lakewarden.cli.session import Engine
    from lakewarden.maintenance.safety import Breakers

# Heavy imports (Spark, Arrow, stores) happen inside the commands: `--help` answers at once.

app = typer.Typer(
    name="lakewarden",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
storage_app = typer.Typer(help="About object stores.", no_args_is_help=True)
app.add_typer(storage_app, name="storage")
optimizing.register(app)
warehouse.register(app)
repairing.register(app)
working.register(app)
serving.register(app)


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Looks after versioned tables: keeps every version of a warehouse, and removes what may go."""
    if version:
        output.to_stdout(f"lakewarden {lakewarden.__version__}")
        raise typer.Exit


@app.command()
def cleanup(
    context: typer.Context,
    targets: TargetsArg,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than", metavar="AGE", help="Versions older than this may go (14d, 36h)."
        ),
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep", metavar="N", help="The last N versions stay.")
    ] = None,
    before_version: Annotated[
        int | None, typer.Option("--before-version", metavar="N", help="Versions below N may go.")
    ] = None,
    versions: Annotated[
        str | None, typer.Option("--versions", metavar="3,4", help="Only these versions may go.")
    ] = None,
    on_tagged: Annotated[
        OnTagged,
        typer.Option("--on-tagged", help="A tagged version that would go: stop, or keep it."),
    ] = OnTagged.ERROR,
    min_age: Annotated[
        str,
        typer.Option(
            "--min-age",
            metavar="AGE",
            help="Younger versions stay whatever the policy says: writers may build on them.",
        ),
    ] = "1h",
    unverified_after: Annotated[
        str,
        typer.Option(
            "--unverified-after", metavar="AGE", help="Files no version names go after this long."
        ),
    ] = "7d",
    delete_unverified: Annotated[
        bool,
        typer.Option(
            "--delete-unverified",
            help="Files no version names go at once. Only without any active writer!",
        ),
    ] = False,
    age_from: Annotated[
        AgeFrom,
        typer.Option(
            "--age-from",
            help="A version's age: the store's time (no manifest opened) or the time written inside.",
        ),
    ] = AgeFrom.store,
    branch: Annotated[str, typer.Option("--branch", help="Clean this branch.")] = MAIN,
    clean_referenced_branches: Annotated[
        bool,
        typer.Option(
            "--clean-referenced-branches", help="Clean branches below too, by the rules they carry."
        ),
    ] = False,
    expire_detached: Annotated[
        bool,
        typer.Option("--expire-detached", help="Detached versions may go by --older-than, too."),
    ] = False,
    max_ref_age: Annotated[
        str | None,
        typer.Option(
            "--max-ref-age",
            metavar="AGE",
            help="Iceberg: tags and branches older than this go, too.",
        ),
    ] = None,
    min_snapshots_to_expire: Annotated[
        int | None,
        typer.Option(
            "--min-snapshots-to-expire",
            metavar="N",
            help="Iceberg: skip a table of which fewer snapshots could go.",
        ),
    ] = None,
    due: Annotated[
        bool,
        typer.Option(
            "--due",
            help="A warehouse: clean the tables that are due, each as its own properties say.",
        ),
    ] = False,
    guard: GuardOpt = Guard.CATALOG,
    recursive: RecursiveOpt = False,
    protect: ProtectOpt = [],
    exclude: ExcludeOpt = [],
    confirm: ConfirmOpt = False,
    yes: YesOpt = False,
    save_plan: SavePlanOpt = None,
    rate_limit: RateOpt = None,
    max_delete_files: MaxFilesOpt = None,
    max_delete_bytes: MaxBytesOpt = None,
    max_delete_share: MaxShareOpt = None,
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
    """Remove old versions and the files only they use.

    Rules given together all have to let a version go. Shows the plan; --confirm executes it.
    Iceberg tables expire snapshots; rules that are not given come from their history.expire.*
    properties. Of a warehouse, versions of all tables go together, and what its tags and branches
    hold stays.

    [bold]Examples[/bold]

      lakewarden cleanup /data/events.lance --keep 10 --older-than 14d

      lakewarden cleanup /data/events.lance --keep 10 --confirm

      lakewarden cleanup s3://lake/tables --recursive --older-than 30d --on-tagged keep --confirm --yes

      lakewarden cleanup iceberg://prod/sales.orders --older-than 5d --keep 10 --confirm --yes

      lakewarden cleanup s3://lake/warehouse --keep 20 --older-than 14d --confirm --yes
    """
    from lakewarden.maintenance.cleanup import Cleanup, Rules

    refuse_server(server)
    where = read_targets(targets, recursive, protect, exclude, guard=guard)
    options = pairs(storage_option, "--storage-option")
    consent, engine = Consent(confirm, yes, json, quiet), read_engine(master, remote, conf)
    breakers = read_breakers(max_delete_files, max_delete_bytes, max_delete_share)
    check_rate(rate_limit)
    echo(where, consent, engine)
    consent = ask([*where.tables, *where.directories], consent)
    if due or log_database is not None or is_warehouse(where, options):
        _clean_warehouse(context, targets, consent, breakers, engine)
        return
    rules = Rules(
        older_than=None if older_than is None else parse_duration(older_than),
        keep=keep,
        before_version=before_version,
        versions=None if versions is None else numbers(versions),
        on_tagged=on_tagged,
        min_age=parse_duration(min_age),
        expire_detached=expire_detached,
        branch=branch,
        clean_referenced_branches=clean_referenced_branches,
        max_ref_age=None if max_ref_age is None else parse_duration(max_ref_age),
        min_snapshots_to_expire=min_snapshots_to_expire,
    )
    policy, expiry = rules.for_targets(where)
    request = Cleanup(
        policy,
        parse_duration(unverified_after),
        delete_unverified,
        age_from is AgeFrom.commit,
        expiry,
    )
    remove(
        where,
        request,
        consent,
        breakers,
        engine,
        options=options,
        catalog=pairs(catalog_property, "--catalog-property"),
        rate_limit=rate_limit,
        save_plan=save_plan,
    )


#: Options of `cleanup` that say something about single tables.
_OF_TABLES = (
    "versions", "on_tagged", "age_from", "branch", "clean_referenced_branches", "expire_detached",
    "max_ref_age", "min_snapshots_to_expire", "guard", "recursive", "protect", "exclude",
    "save_plan", "catalog_property",
)  # fmt: skip
#: Options that tables which are due answer themselves.
_OF_WAREHOUSES = ("older_than", "keep", "before_version")


def _clean_warehouse(
    context: typer.Context,
    targets: list[str],
    consent: Consent,
    breakers: Breakers,
    engine: Engine,
) -> None:
    """Do what `cleanup` was asked for to a whole warehouse."""
    from lakewarden.maintenance.warehouse import Request
    from lakewarden.warehouse.reclaiming import Rules

    given = context.params
    strange = [name for name in _OF_TABLES if _is_given(context, name)]
    if given["due"]:
        strange += [name for name in _OF_WAREHOUSES if _is_given(context, name)]
    if strange:
        named = ", ".join("--" + name.replace("_", "-") for name in strange)
        raise UsageError(
            ErrorKind.USAGE,
            f"{named} cannot be used here: versions of a warehouse go for all its tables together"
            + (", and with --due each table's properties say which" if given["due"] else ""),
        )
    if len(targets) != 1:
        raise UsageError(ErrorKind.USAGE, "clean one warehouse at a time")
    margins = {
        "unverified_after": parse_duration(given["unverified_after"]),
        "delete_unverified": given["delete_unverified"],
    }
    age = given["older_than"]
    rules = None
    if not given["due"]:
        rules = Rules(
            None if age is None else parse_duration(age),
            given["keep"],
            given["before_version"],
            parse_duration(given["min_age"]),
        )
    opened = warehouse.open_warehouse(targets[0], given["log_database"], given["storage_option"])
    if rules is None:
        request = Request.for_due(opened, parse_duration(given["min_age"]), **margins)
    else:
        request = Request(rules, **margins)
    remove_from_warehouse(
        opened,
        request,
        consent,
        breakers,
        engine,
        options=pairs(given["storage_option"], "--storage-option"),
        rate_limit=given["rate_limit"],
    )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


@app.command("remove-orphans")
def remove_orphans(
    targets: TargetsArg,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Files must be older than this.")
    ] = "7d",
    unsafe_below_floor: Annotated[
        bool,
        typer.Option(
            "--unsafe-below-floor",
            help="Allow an age below 24 hours. Only without any active writer!",
        ),
    ] = False,
    prefix_mismatch: Annotated[
        PrefixMismatch,
        typer.Option(
            "--prefix-mismatch",
            help="Iceberg: a file whose path is named with another scheme or authority.",
        ),
    ] = PrefixMismatch.ERROR,
    equal_scheme: Annotated[
        list[str],
        typer.Option(
            "--equal-scheme", metavar="A=B", help="Iceberg: scheme A means B (oss=s3); repeatable."
        ),
    ] = [],
    equal_authority: Annotated[
        list[str],
        typer.Option(
            "--equal-authority",
            metavar="A=B",
            help="Iceberg: authority (bucket, host) A means B; repeatable.",
        ),
    ] = [],
    inventory: Annotated[
        str | None,
        typer.Option(
            "--inventory",
            metavar="URI",
            help="Iceberg: a Parquet or CSV listing (or S3 Inventory's manifest.json) to use "
            "instead of listing.",
        ),
    ] = None,
    location: Annotated[
        str | None,
        typer.Option(
            "--location", metavar="URI", help="Iceberg: only files below this place count."
        ),
    ] = None,
    guard: GuardOpt = Guard.CATALOG,
    recursive: RecursiveOpt = False,
    protect: ProtectOpt = [],
    exclude: ExcludeOpt = [],
    confirm: ConfirmOpt = False,
    yes: YesOpt = False,
    save_plan: SavePlanOpt = None,
    rate_limit: RateOpt = None,
    max_delete_files: MaxFilesOpt = None,
    max_delete_bytes: MaxBytesOpt = None,
    max_delete_share: MaxShareOpt = None,
    storage_option: StorageOpt = [],
    catalog_property: CatalogOpt = [],
    master: MasterOpt = None,
    remote: RemoteOpt = None,
    conf: ConfOpt = [],
    json: JsonOpt = False,
    quiet: QuietOpt = False,
    server: ServerOpt = None,
) -> None:
    """Remove files that no version names; every version stays.

    Shows the plan; --confirm executes it.

    [bold]Examples[/bold]

      lakewarden remove-orphans /data/events.lance

      lakewarden remove-orphans s3://lake/tables --recursive --older-than 3d --confirm --yes

      lakewarden remove-orphans iceberg://prod/sales --inventory s3://inventory/lake/manifest.json
    """
    from lakewarden.maintenance import cleanup as operations

    refuse_server(server)
    request = operations.orphans(parse_duration(older_than), unsafe_below_floor=unsafe_below_floor)
    where = read_targets(
        targets,
        recursive,
        protect,
        exclude,
        guard=guard,
        prefix_mismatch=prefix_mismatch,
        equality=equality(equal_scheme, equal_authority),
        inventory=inventory,
        below=location,
    )
    consent, engine = Consent(confirm, yes, json, quiet), read_engine(master, remote, conf)
    check_rate(rate_limit)
    echo(where, consent, engine)
    consent = ask([*where.tables, *where.directories], consent)
    if is_warehouse(where, pairs(storage_option, "--storage-option")):
        raise Refused(
            ErrorKind.IN_WAREHOUSE,
            f"{where.tables[0].uri} is a warehouse; its cleanup removes orphans as well: lakewarden "
            "cleanup WAREHOUSE --keep N",
        )
    remove(
        where,
        request,
        consent,
        read_breakers(max_delete_files, max_delete_bytes, max_delete_share),
        engine,
        options=pairs(storage_option, "--storage-option"),
        catalog=pairs(catalog_property, "--catalog-property"),
        rate_limit=rate_limit,
        save_plan=save_plan,
    )


@app.command()
def apply(
    directory: Annotated[
        str, typer.Argument(help="A directory written by --save-plan.", show_default=False)
    ],
    confirm: ConfirmOpt = False,
    yes: YesOpt = False,
    rate_limit: RateOpt = None,
    max_delete_files: MaxFilesOpt = None,
    max_delete_bytes: MaxBytesOpt = None,
    max_delete_share: MaxShareOpt = None,
    storage_option: StorageOpt = [],
    catalog_property: CatalogOpt = [],
    master: MasterOpt = None,
    remote: RemoteOpt = None,
    conf: ConfOpt = [],
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Execute a saved plan, exactly; tables that changed since are left alone.

    [bold]Example[/bold]

      lakewarden cleanup /data/events.lance --keep 10 --save-plan plan/ && lakewarden apply plan/ --confirm
    """
    from lakewarden.maintenance import plan as plans
    from lakewarden.maintenance import removal
    from lakewarden.maintenance.fleet import targets_of
    from lakewarden.pipeline.frames import ReadStores

    consent = Consent(confirm, yes, json, quiet)
    breakers = read_breakers(max_delete_files, max_delete_bytes, max_delete_share)
    options = pairs(storage_option, "--storage-option")
    engine = read_engine(master, remote, conf)
    check_rate(rate_limit)
    places, header = plans.read_header(directory, ReadStores(opening(options)))
    where = targets_of([table["table_key"] for table in header["tables"]])
    echo(where, consent, engine)
    ask(places, consent)
    lake = open_catalogs(where, pairs(catalog_property, "--catalog-property"))
    reading = start(engine, options, where, lake)
    plan = plans.load(reading.spark, directory, ReadStores(reading.opening))
    tell_warnings(plan)
    if not confirm:
        show_plan(plan, plan.kept_versions(), consent)
        return
    receipt = removal.execute(plan, reading, breakers=breakers, rate_limit=rate_limit)
    show_receipt(receipt, consent)


@app.command()
def versions(
    target: TargetArg,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", help="Show the newest N; 0 for all.")
    ] = 20,
    storage_option: StorageOpt = [],
    catalog_property: CatalogOpt = [],
    json: JsonOpt = False,
) -> None:
    """Show the versions of a table, what holds them, and their age.

    [bold]Example[/bold]

      lakewarden versions /data/events.lance --limit 5
    """
    if limit < 0:
        raise UsageError(ErrorKind.USAGE, f"--limit is {limit}; give a number from 0 (all)")
    key, seen = look_at(target, storage_option, catalog_property)
    output.to_stdout(
        output.versions_json(key, seen, limit or None)
        if json
        else output.versions_text(seen, limit or None)
    )


@app.command()
def refs(
    target: TargetArg,
    storage_option: StorageOpt = [],
    catalog_property: CatalogOpt = [],
    json: JsonOpt = False,
) -> None:
    """Show the tags and branches of a table.

    [bold]Example[/bold]

      lakewarden refs s3://lake/events.lance --json
    """
    key, seen = look_at(target, storage_option, catalog_property)
    output.to_stdout(output.refs_json(key, seen) if json else output.refs_text(seen))


@app.command()
def demo(
    keep_directory: Annotated[
        bool, typer.Option("--keep-directory", help="Leave the tables there to look at.")
    ] = False,
) -> None:
    """Build small tables in a temporary directory, clean them, and prove nothing was lost.

    [bold]Example[/bold]

      lakewarden demo --keep-directory
    """
    from lakewarden.cli.demo import show

    show(keep_directory=keep_directory)


@storage_app.command("validate")
def validate_storage(
    uri: Annotated[
        str,
        typer.Argument(
            help="A place you may write to: s3://bucket/prefix, /path.", show_default=False
        ),
    ],
    storage_option: StorageOpt = [],
    json: JsonOpt = False,
) -> None:
    """Check that a store keeps the promises Lakewarden builds on, in a directory of its own.

    [bold]Example[/bold]

      lakewarden storage validate s3://lake/scratch
    """
    from dataclasses import asdict

    from lakewarden.storage.contract import validate
    from lakewarden.storage.location import Location
    from lakewarden.world import fresh_id

    place = Location.parse(uri)
    if place.is_local and not Path(place.uri).is_dir():
        raise UsageError(ErrorKind.NOT_FOUND, f"{place.uri} is no directory; name one that exists")
    store = opening(pairs(storage_option, "--storage-option"))(place)
    outcomes = validate(store, place, ids=fresh_id)
    if json:
        output.to_stdout(
            output.document(
                "storage_validation", location=place.uri, checks=[asdict(one) for one in outcomes]
            )
        )
    else:
        output.to_stdout(output.outcomes_text(outcomes))
    if not all(one.ok for one in outcomes):
        raise typer.Exit(Exit.REFUSED)


#: What Typer raises about a command line it cannot read; it has no public name of its own.
_Unreadable: type[Exception] = typer.BadParameter.__mro__[2]


def run() -> None:
    """Run the command line; every error on purpose is one line and an exit code."""
    try:
        code = app(standalone_mode=False)
    except LakewardenError as error:
        _fail(error)
    except _Unreadable as error:
        _fail(_usage(error))
    except typer.Abort:
        _fail(Refused(ErrorKind.CONSENT, "not confirmed, so nothing was touched"))
    except Exception as error:
        told = failure_of_spark(error)
        if told is None:
            raise
        _fail(told)
    sys.exit(code if isinstance(code, int) else Exit.DONE)


def _fail(error: LakewardenError) -> NoReturn:
    end_progress()
    if "--json" in sys.argv:
        output.to_stdout(output.error_document(error))
    output.to_stderr(f"error    {error.message}")
    sys.exit(error.exit_code)


def _usage(error: Exception) -> UsageError:
    found = " ".join(str(getattr(error, "format_message", lambda: error)()).split()).rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "lakewarden"
    if not found:
        # The help was asked for by giving nothing, and has been printed.
        sys.exit(Exit.USAGE)
    return UsageError(ErrorKind.USAGE, f"{found}; see {command} --help")


if __name__ == "__main__":
    run()
