"""The commands: parse, call, print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakewarden.cli import output
from lakewarden.errors import ErrorKind, Exit, LakewardenError, Refused, UsageError
from lakewarden.model import MAIN, parse_duration

if TYPE_CHECKING:
    from lakewarden.cli.session import Engine
    from lakewarden.maintenance.cleanup import Cleanup
    from lakewarden.maintenance.fleet import Targets
    from lakewarden.maintenance.plan import Plan
    from lakewarden.maintenance.removal import Receipt
    from lakewarden.maintenance.safety import Breakers
    from lakewarden.maintenance.survey import Reading

# Heavy imports (Spark, Arrow, stores) happen inside the commands: `--help` answers at once.

app = typer.Typer(
    name="lakewarden",
    help="Looks after versioned tables: removes old versions and orphan files, and nothing else.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
storage_app = typer.Typer(help="About object stores.", no_args_is_help=True)
app.add_typer(storage_app, name="storage")

#: Times a table that changed under its plan is planned again.
_ATTEMPTS = 3


class OnTagged(StrEnum):
    """What to do when the policy would remove a tagged version."""

    error = "error"
    keep = "keep"


class AgeFrom(StrEnum):
    """Where a version's age comes from."""

    store = "store"
    commit = "commit"


TargetsArg = Annotated[
    list[str],
    typer.Argument(
        help="Tables: paths or URIs (/data/t.lance, s3://b/t.lance).", show_default=False
    ),
]
TargetArg = Annotated[str, typer.Argument(help="A table: path or URI.", show_default=False)]
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
ServerOpt = Annotated[str | None, typer.Option("--server", hidden=True)]


@dataclass(frozen=True, slots=True)
class Consent:
    """What the user agreed to, and how to talk to them."""

    confirm: bool
    yes: bool
    json: bool
    quiet: bool


@app.command()
def cleanup(
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
    ] = OnTagged.error,
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
    master: MasterOpt = None,
    remote: RemoteOpt = None,
    conf: ConfOpt = [],
    json: JsonOpt = False,
    quiet: QuietOpt = False,
    server: ServerOpt = None,
) -> None:
    """Remove old versions and the files only they use.

    Rules given together all have to let a version go. Shows the plan; --confirm executes it.

    [bold]Examples[/bold]

      lakewarden cleanup /data/events.lance --keep 10 --older-than 14d

      lakewarden cleanup /data/events.lance --keep 10 --confirm

      lakewarden cleanup s3://lake/tables --recursive --older-than 30d --on-tagged keep --confirm --yes
    """
    from lakewarden import retention
    from lakewarden.maintenance.cleanup import Cleanup

    _refuse_server(server)
    policy = retention.Policy(
        older_than=None if older_than is None else parse_duration(older_than),
        keep=keep,
        before_version=before_version,
        versions=None if versions is None else _numbers(versions),
        on_tagged=retention.OnTagged(on_tagged.value),
        min_age=parse_duration(min_age),
        expire_detached=expire_detached,
        branch=branch,
        clean_referenced_branches=clean_referenced_branches,
    )
    request = Cleanup(
        policy, parse_duration(unverified_after), delete_unverified, age_from is AgeFrom.commit
    )
    _remove(
        _targets(targets, recursive, protect, exclude),
        request,
        Consent(confirm, yes, json, quiet),
        _breakers(max_delete_files, max_delete_bytes, max_delete_share),
        _engine(master, remote, conf),
        options=_pairs(storage_option, "--storage-option"),
        rate_limit=rate_limit,
        save_plan=save_plan,
    )


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
    """
    from lakewarden.maintenance import cleanup as operations

    _refuse_server(server)
    request = operations.orphans(parse_duration(older_than), unsafe_below_floor=unsafe_below_floor)
    _remove(
        _targets(targets, recursive, protect, exclude),
        request,
        Consent(confirm, yes, json, quiet),
        _breakers(max_delete_files, max_delete_bytes, max_delete_share),
        _engine(master, remote, conf),
        options=_pairs(storage_option, "--storage-option"),
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
    from lakewarden.pipeline.frames import ReadStores

    consent = Consent(confirm, yes, json, quiet)
    breakers = _breakers(max_delete_files, max_delete_bytes, max_delete_share)
    options = _pairs(storage_option, "--storage-option")
    engine = _engine(master, remote, conf)
    _check_rate(rate_limit)
    places, _ = plans.read_header(directory, ReadStores(_opening(options)))
    _ask(places, consent)
    reading = _start(engine, options, consent)
    plan = plans.load(reading.spark, directory, ReadStores(reading.opening))
    kept = plan.kept_versions()
    if not confirm:
        _show_plan(plan, kept, consent)
        return
    receipt = removal.execute(plan, reading, breakers=breakers, rate_limit=rate_limit)
    _show_receipt(receipt, consent)


@app.command()
def versions(
    target: TargetArg,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", help="Show the newest N; 0 for all.")
    ] = 20,
    storage_option: StorageOpt = [],
    json: JsonOpt = False,
) -> None:
    """Show the versions of a table, what holds them, and their age.

    [bold]Example[/bold]

      lakewarden versions /data/events.lance --limit 5
    """
    from lakewarden.formats.lance.table import look
    from lakewarden.storage.location import Location

    if limit < 0:
        raise UsageError(ErrorKind.USAGE, f"--limit is {limit}; give a number from 0 (all)")
    place = Location.parse(target)
    seen = look(place, _opening(_pairs(storage_option, "--storage-option"))(place))
    output.to_stdout(
        output.versions_json(place, seen) if json else output.versions_text(seen, limit or None)
    )


@app.command()
def refs(
    target: TargetArg,
    storage_option: StorageOpt = [],
    json: JsonOpt = False,
) -> None:
    """Show the tags and branches of a table.

    [bold]Example[/bold]

      lakewarden refs s3://lake/events.lance --json
    """
    from lakewarden.formats.lance.table import look
    from lakewarden.storage.location import Location

    place = Location.parse(target)
    seen = look(place, _opening(_pairs(storage_option, "--storage-option"))(place))
    output.to_stdout(output.refs_json(place, seen) if json else output.refs_text(seen))


@app.command()
def demo(
    keep_directory: Annotated[
        bool, typer.Option("--keep-directory", help="Leave the tables there to look at.")
    ] = False,
) -> None:
    """Build small tables in a temporary directory, clean them, and prove nothing was lost."""
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
    store = _opening(_pairs(storage_option, "--storage-option"))(place)
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


# -- how every destructive command goes -----------------------------------------------------------


def _remove(
    targets: Targets,
    request: Cleanup,
    consent: Consent,
    breakers: Breakers,
    engine: Engine,
    *,
    options: dict[str, str],
    rate_limit: float | None,
    save_plan: str | None,
) -> None:
    from lakewarden.maintenance import cleanup as operations
    from lakewarden.maintenance import plan as plans
    from lakewarden.maintenance import removal
    from lakewarden.pipeline.frames import Stores

    _check_rate(rate_limit)
    places = (*targets.tables, *targets.directories)
    _echo(places, consent, engine)
    _ask(places, consent)
    reading = _start(engine, options, consent)
    plan = operations.plan(targets, request, reading, now=reading.clock.now())
    if save_plan is not None:
        plans.save(plan, save_plan, Stores(reading.opening))
    if not consent.confirm:
        _show_plan(plan, plan.kept_versions(), consent)
        return
    if not consent.json:
        output.to_stdout(output.plan_text(plan, plan.kept_versions()))
    receipt = removal.execute(plan, reading, breakers=breakers, rate_limit=rate_limit)
    for _ in range(_ATTEMPTS - 1):
        if not receipt.outdated:
            break
        plan = operations.plan(targets, request, reading, now=reading.clock.now())
        again = removal.execute(plan, reading, breakers=breakers, rate_limit=rate_limit)
        receipt = receipt.followed_by(again)
    _show_receipt(receipt, consent)


def _echo(places: Sequence[Any], consent: Consent, engine: Engine) -> None:
    if consent.quiet:
        return
    for place in places[:5]:
        access = "local disk" if place.is_local else f"{place.scheme} store"
        output.to_stderr(f"target   {place.uri} ({access}; {engine.words})")
    if len(places) > 5:
        output.to_stderr(f"target   … and {len(places) - 5} more")


def _ask(places: Sequence[Any], consent: Consent) -> None:
    """Get consent before anything is read, or refuse."""
    if not consent.confirm or consent.yes or all(place.is_local for place in places):
        return
    if consent.json or not sys.stdin.isatty():
        raise Refused(
            ErrorKind.CONSENT,
            "the target is not local and nobody is here to ask; nothing was touched: add --yes to consent",
        )
    typer.confirm(
        "Delete from a store that is not local, as the plan will say?", abort=True, err=True
    )


def _start(engine: Engine, options: dict[str, str], consent: Consent) -> Reading:
    from lakewarden.cli.session import start, tasks_for
    from lakewarden.maintenance.survey import Reading
    from lakewarden.world import SystemClock

    opening = _opening(options)
    progress = _progress(consent)
    progress("start Spark", engine.words)
    spark = start(engine)
    return Reading(spark, opening, SystemClock(), tasks_for(spark, engine), progress)


def _progress(consent: Consent) -> Callable[[str, str], None]:
    """Say which stage is running: one line that changes on a terminal, log lines elsewhere."""
    terminal = sys.stderr.isatty()

    def tell(stage: str, detail: str) -> None:
        words = f"{stage} ({detail})" if detail else stage
        if terminal:
            sys.stderr.write(f"\r\x1b[K… {words}")
            sys.stderr.flush()
        elif not consent.quiet:
            output.to_stderr(f"stage    {words}")

    return tell


def _end_progress() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _show_plan(plan: Plan, kept: Sequence[dict[str, Any]], consent: Consent) -> None:
    _end_progress()
    if consent.json:
        output.to_stdout(output.plan_json(plan, kept))
    else:
        output.to_stdout(output.plan_text(plan, kept))
        output.to_stdout("preview: nothing was changed; add --confirm to remove")
    if plan.failed:
        raise typer.Exit(Exit.REFUSED if len(plan.failed) == len(plan.tables) else Exit.PARTIAL)


def _show_receipt(receipt: Receipt, consent: Consent) -> None:
    _end_progress()
    output.to_stdout(output.receipt_json(receipt) if consent.json else output.receipt_text(receipt))
    raise typer.Exit(receipt.exit_code)


# -- reading options -------------------------------------------------------------------------------


def _targets(
    targets: list[str], recursive: bool, protect: list[str], exclude: list[str]
) -> Targets:
    from lakewarden.maintenance.fleet import parse_targets

    return parse_targets(targets, recursive=recursive, protect=protect, exclude=exclude)


def _breakers(files: int | None, size: int | None, share: float | None) -> Breakers:
    from lakewarden.maintenance.safety import Breakers

    return Breakers(files, size, share)


def _engine(master: str | None, remote: str | None, conf: list[str]) -> Engine:
    from lakewarden.cli.session import Engine

    return Engine(master, remote, _pairs(conf, "--conf"))


def _opening(options: dict[str, str]) -> Any:
    from lakewarden.storage.opening import Opener

    return Opener(options)


def _pairs(values: list[str], option: str) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, sign, text = value.partition("=")
        if not sign or not name.strip():
            raise UsageError(
                ErrorKind.USAGE, f"{option} {name!r} has no '='; write it as name=value"
            )
        pairs[name.strip()] = text
    return pairs


def _numbers(text: str) -> frozenset[int]:
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            ErrorKind.USAGE, f"--versions {text!r} is no list of numbers; write it like 3,4,7"
        ) from error


def _check_rate(rate_limit: float | None) -> None:
    if rate_limit is not None and not 0 < rate_limit < float("inf"):
        raise UsageError(
            ErrorKind.USAGE, f"--rate-limit is {rate_limit:g}; it must be above 0 keys a second"
        )


def _refuse_server(server: str | None) -> None:
    if server is not None:
        raise UsageError(
            ErrorKind.USAGE,
            "maintenance needs direct storage access; name the table's own URI, not --server",
        )


def run() -> None:
    """Run the command line; every error on purpose is one line and an exit code."""
    as_json = "--json" in sys.argv
    try:
        app(standalone_mode=True)
    except LakewardenError as error:
        _end_progress()
        if as_json:
            output.to_stdout(output.error_document(error))
        output.to_stderr(f"error    {error.message}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    run()
