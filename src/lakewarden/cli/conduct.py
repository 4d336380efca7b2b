"""How every destructive command goes: echo, consent, plan, show or execute, show."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lakewarden.cli import output
from lakewarden.cli.options import opening, pairs
from lakewarden.errors import Conflict, ErrorKind, Exit, LakewardenError, NotFound, Refused
from lakewarden.world import SystemClock

if TYPE_CHECKING:
    from rich.progress import Progress

    from lakewarden.cli.session import Engine
    from lakewarden.formats.iceberg.catalog import Lake
    from lakewarden.formats.iceberg.table import SnapshotLook
    from lakewarden.formats.lance.table import Look
    from lakewarden.maintenance.cleanup import Cleanup
    from lakewarden.maintenance.fleet import Targets
    from lakewarden.maintenance.plan import Plan, TablePlan
    from lakewarden.maintenance.removal import Receipt, TableReceipt
    from lakewarden.maintenance.safety import Breakers
    from lakewarden.maintenance.survey import Reading
    from lakewarden.maintenance.warehouse import Request
    from lakewarden.storage.location import Location
    from lakewarden.warehouse.warehouse import Warehouse

#: Stages from the start of Spark to the last manifest.
_STAGES = 7
#: Between two lines about one stage in a log.
_QUIET_SECONDS = 15.0
#: Times a table that changed under its plan is planned again.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Consent:
    """What the user agreed to, and how to talk to them."""

    confirm: bool
    yes: bool
    json: bool
    quiet: bool


def remove(
    targets: Targets,
    request: Cleanup,
    consent: Consent,
    breakers: Breakers,
    engine: Engine,
    *,
    options: dict[str, str],
    catalog: dict[str, str],
    rate_limit: float | None,
    save_plan: str | None,
) -> None:
    """Remove from tables; the targets were echoed and consented to."""
    from lakewarden.maintenance import cleanup as operations
    from lakewarden.maintenance import plan as plans
    from lakewarden.maintenance import removal
    from lakewarden.pipeline.frames import Stores

    places = [*targets.tables, *targets.directories]
    if places and all(place.is_local and not Path(place.uri).exists() for place in places):
        raise NotFound(f"{places[0].uri} does not exist; check the path")
    if save_plan is not None:
        plans.check_new(save_plan, Stores(opening(options)))
    lake = open_catalogs(targets, catalog)
    if lake is not None:
        # Where a catalog keeps its tables; each table is asked about again once it is known.
        warehouses = [lake.warehouse(target.catalog) for target in targets.iceberg.tables]
        places += [place for place in warehouses if place is not None]
        consent = ask(places, consent)
    reading = start(engine, options, targets, lake)
    plan = operations.plan(targets, request, reading, now=reading.clock.now())
    tell_warnings(plan)
    if save_plan is not None:
        plans.save(plan, save_plan, Stores(reading.opening))
        output.to_stderr(
            f"saved    {save_plan}; execute it with: lakewarden apply {save_plan} --confirm"
        )
    if not consent.confirm:
        show_plan(plan, plan.kept_versions(), consent)
        return
    # Tables of a catalog, and extra base paths, may lie in other stores than was to be expected.
    agreed = {place.store for place in places}
    others = [root.location for root in plan.roots if root.location.store not in agreed]
    ask([place for place in others if place.scheme != "iceberg"], consent)
    if not consent.json and len(plan.failed) < len(plan.tables):
        output.to_stdout(output.plan_text(plan, plan.kept_versions(), _orphans(plan)))
    receipt = removal.execute(plan, reading, breakers=breakers, rate_limit=rate_limit).after(plan)
    for _ in range(_ATTEMPTS - 1):
        if not receipt.outdated:
            break
        try:
            plan = operations.plan(targets, request, reading, now=reading.clock.now())
            left = breakers.less(receipt.removed)
            again = removal.execute(plan, reading, breakers=left, rate_limit=rate_limit)
        except LakewardenError as error:
            # What was removed before is removed; the tables that changed are reported as such.
            output.to_stderr(
                f"warning  tables that changed were not planned again: {error.message}"
            )
            break
        receipt = receipt.followed_by(again.after(plan))
    show_receipt(receipt, consent)


def is_warehouse(targets: Targets, options: dict[str, str]) -> bool:
    """Tell whether the one target is a warehouse."""
    from lakewarden.warehouse.warehouse import Warehouse

    alone = len(targets.tables) == 1 and not targets.iceberg.tables
    return alone and Warehouse.is_at(targets.tables[0], opening(options))


def remove_from_warehouse(
    warehouse: Warehouse,
    request: Request,
    consent: Consent,
    breakers: Breakers,
    engine: Engine,
    *,
    options: dict[str, str],
    rate_limit: float | None,
) -> None:
    """Clean a whole warehouse; the target was echoed and consented to."""
    from lakewarden.maintenance import warehouse as operations
    from lakewarden.maintenance.fleet import Targets

    reading = start(engine, options, Targets(()), None)
    receipt: Receipt | None = None
    for attempt in range(_ATTEMPTS):
        if consent.confirm:
            operations.publish(warehouse)
        plan = operations.plan(warehouse, request, reading, now=reading.clock.now())
        shown = plan.shown
        if not attempt:
            tell_warnings(shown)
        if not consent.confirm:
            show_plan(shown, shown.kept_versions(), consent)
            return
        agreed = {warehouse.location.store}
        others = [one.location for one in shown.roots if one.location.store not in agreed]
        consent = ask([one for one in others if one.scheme != "iceberg"], consent)
        if not consent.json and not attempt:
            output.to_stdout(output.plan_text(shown, shown.kept_versions(), []))
        limits = breakers if receipt is None else breakers.less(receipt.removed)
        try:
            done = operations.execute(plan, reading, breakers=limits, rate_limit=rate_limit)
        except Conflict:
            # Somebody has made a tag or a branch, or gone back: what stays must be decided again.
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        done = done.after(plan.tables)
        receipt = done if receipt is None else receipt.followed_by(done)
        if not receipt.outdated:
            break
    assert receipt is not None
    show_receipt(receipt, consent)


def echo(targets: Targets, consent: Consent, engine: Engine) -> None:
    """Say what is about to be looked at, and through what."""
    if consent.quiet:
        return
    named = [
        (place.uri, "local disk" if place.is_local else f"{place.scheme} store")
        for place in (*targets.tables, *targets.directories)
    ] + [(target.uri, f"catalog {target.catalog}") for target in targets.iceberg.tables]
    for name, access in named[:5]:
        output.to_stderr(f"target   {name} ({access}; {engine.words})")
    if len(named) > 5:
        output.to_stderr(f"target   … and {len(named) - 5} more")


_DELETING = "Delete from a store that is not local, as the plan will say?"


def ask(places: Sequence[Location], consent: Consent, question: str = _DELETING) -> Consent:
    """Get consent to change these places, or refuse; a person is asked once."""
    if not consent.confirm or consent.yes or all(place.is_local for place in places):
        return consent
    if consent.json or not sys.stdin.isatty():
        raise Refused(
            ErrorKind.CONSENT,
            "the target is not local and nobody is here to ask; nothing was touched: add --yes to consent",
        )
    typer.confirm(question, abort=True, err=True)
    return replace(consent, yes=True)


def open_catalogs(targets: Targets, properties: dict[str, str]) -> Lake | None:
    """Open the catalogs that targets are in; errors show before Spark starts."""
    from lakewarden.maintenance.fleet import open_lake

    if not targets.iceberg.tables:
        return None
    lake = open_lake(properties)
    for target in targets.iceberg.tables:
        lake.catalog(target.catalog)
    return lake


def look_at(target: str, storage: list[str], catalog: list[str]) -> tuple[str, Look | SnapshotLook]:
    """Return what a target is called, and what its history and refs are."""
    from lakewarden.formats.iceberg import table as iceberg
    from lakewarden.formats.iceberg.metadata import parse
    from lakewarden.formats.lance import table as lance
    from lakewarden.maintenance.fleet import parse_targets
    from lakewarden.pipeline.frames import ReadStores

    options = pairs(storage, "--storage-option")
    targets = parse_targets([target])
    if not targets.iceberg.tables:
        place = targets.tables[0]
        return place.uri, lance.look(place, opening(options)(place))
    lake = open_catalogs(targets, pairs(catalog, "--catalog-property"))
    assert lake is not None
    pointer = lake.locate(targets.iceberg.tables[0])
    stores = ReadStores(opening(targets.iceberg.storage_options(lake) | options))
    data = lake.read(pointer, stores)
    return pointer.table.uri, iceberg.look(parse(data, pointer.metadata_location))


def start(engine: Engine, options: dict[str, str], targets: Targets, lake: Lake | None) -> Reading:
    from lakewarden.cli import session
    from lakewarden.maintenance.survey import Reading

    stages("start Spark", engine.words)
    spark = session.start(engine)
    session.watch(spark, stages.tasks)
    return Reading(
        spark,
        opening(targets.iceberg.storage_options(lake) | options),
        SystemClock(),
        session.tasks_for(spark, engine),
        stages,
        lake,
    )


class Stages:
    """Says which stage is running: a bar on a terminal, a log line each elsewhere."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._words = ""
        self._told = 0.0

    def tasks(self, done: int, total: int) -> None:
        """Say how far the running stage is; elsewhere than on a terminal only now and then."""
        words = f"{self._words}: {done:,} of {total:,} tasks"
        bar, now = self._bar, SystemClock().elapsed()
        if bar is not None:
            bar.update(bar.task_ids[0], description=words)
        elif now - self._told > _QUIET_SECONDS and not sys.stderr.isatty():
            self._told = now
            output.to_stderr(f"stage    {words}")

    def __call__(self, stage: str, detail: str) -> None:
        words = self._words = f"{stage} ({detail})" if detail else stage
        self._told = SystemClock().elapsed()
        if not sys.stderr.isatty():
            output.to_stderr(f"stage    {words}")
            return
        if self._bar is None:
            self._bar = self._new_bar()
            self._bar.add_task(words, total=_STAGES)
            self._bar.start()
            return
        self._bar.update(self._bar.task_ids[0], description=words, advance=1)

    def end(self) -> None:
        """Take the bar away; results follow."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @staticmethod
    def _new_bar() -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (
            SpinnerColumn(),
            BarColumn(20),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        return Progress(*columns, console=Console(stderr=True), transient=True)


stages = Stages()


def end_progress() -> None:
    """Leave the terminal clean, whatever happened."""
    stages.end()


def show_plan(plan: Plan, kept: Sequence[dict[str, Any]], consent: Consent) -> None:
    end_progress()
    if consent.json:
        output.to_stdout(output.plan_json(plan, kept))
    elif len(plan.failed) < len(plan.tables):
        output.to_stdout(output.plan_text(plan, kept, _orphans(plan)))
        output.to_stdout("preview: nothing was changed; add --confirm to remove")
    _tell_failures(plan.failed, len(plan.tables))
    if plan.failed and all(table.error_kind == ErrorKind.USAGE.value for table in plan.tables):
        raise typer.Exit(Exit.USAGE)
    if plan.failed:
        raise typer.Exit(Exit.REFUSED if len(plan.failed) == len(plan.tables) else Exit.PARTIAL)


def show_receipt(receipt: Receipt, consent: Consent) -> None:
    end_progress()
    for warning in receipt.warnings:
        output.to_stderr(f"warning  {warning}")
    if consent.json:
        output.to_stdout(output.receipt_json(receipt))
    elif receipt.removed.files_removed or len(receipt.failed) < len(receipt.tables):
        output.to_stdout(output.receipt_text(receipt))
    _tell_failures(receipt.failed, len(receipt.tables))
    raise typer.Exit(receipt.exit_code)


def _orphans(plan: Plan) -> list[dict[str, Any]]:
    """Return files worth naming: in a plan for orphans those are what it is about."""
    return plan.orphans() if plan.operation == "remove-orphans" else []


def _tell_failures(failed: Sequence[TablePlan] | Sequence[TableReceipt], tables: int) -> None:
    """Say in one line for each table that failed what is wrong with it."""
    for table in failed:
        name = (
            f"{table.table_key}: " if tables > 1 and table.table_key not in str(table.error) else ""
        )
        output.to_stderr(f"error    {name}{table.error}")


def tell_warnings(plan: Plan) -> None:
    """Say what was noticed but holds nothing back."""
    end_progress()
    for table in plan.tables:
        for warning in table.warnings:
            name = f"{table.table_key}: " if len(plan.tables) > 1 else ""
            output.to_stderr(f"warning  {name}{warning}")
