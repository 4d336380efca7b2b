"""What is wrong with the log of a warehouse, as findings, and putting aside what nobody reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lakewarden.errors import LakewardenError
from lakewarden.maintenance.damage import EXAMPLES, LOG, Finding
from lakewarden.warehouse import soundness
from lakewarden.warehouse.soundness import Flaw, Trouble
from lakewarden.warehouse.warehouse import Warehouse

_STRAYS = (Trouble.UNREADABLE_ANNOUNCEMENT, Trouble.STRAY_OBJECT)
_ADVICE: dict[Trouble, tuple[str, str]] = {
    Trouble.UNREADABLE_VERSION: (
        (
            "a version of the warehouse cannot be read ({why}): nobody can go back to it or, if "
            "it is the newest, read or write at all"
        ),
        "bring {path} back from a backup of the log",
    ),
    Trouble.BROKEN_CHAIN: (
        (
            "a version of the warehouse does not follow the one before ({why}): the store has lost one that "
            "it had acknowledged"
        ),
        "look at lakewarden log {uri}, and write again what is missing",
    ),
    Trouble.UNREADABLE_CHECKPOINT: (
        "a checkpoint cannot be read ({why}): versions that are read from it cannot either",
        "bring {path} back from a backup of the log",
    ),
    Trouble.MISSING_CHECKPOINT: (
        "a checkpoint is missing ({why}): versions that are read from it cannot be read",
        "bring {path} back from a backup of the log",
    ),
    Trouble.WRONG_CHECKPOINT: (
        (
            "a checkpoint disagrees with the log ({why}): tables may be shown at other versions than were "
            "committed"
        ),
        "stop writers, and bring {path} back from a backup of the log; compare lakewarden tables {uri}",
    ),
    Trouble.UNREADABLE_ANNOUNCEMENT: (
        "what a writer has announced cannot be read ({why}); nothing depends on it",
        "put it aside: lakewarden repair {uri} --confirm",
    ),
    Trouble.STRAY_OBJECT: (
        "an object lies among those of the log: {why}",
        "put it aside: lakewarden repair {uri} --confirm",
    ),
}


def find(warehouse: Warehouse) -> list[Finding]:
    """Read the whole log and say what is wrong with it."""
    return _joined([_flaw(flaw, warehouse) for flaw in soundness.flaws(warehouse.log)])


def _flaw(flaw: Flaw, warehouse: Warehouse) -> Finding:
    means, advice = _ADVICE[flaw.trouble]
    if flaw.trouble in _STRAYS and not flaw.stray:
        advice = "find out whose it is; it is left where it is"
    told = {"why": flaw.why, "path": flaw.path, "uri": warehouse.location.uri}
    return Finding(
        flaw.trouble.value,
        LOG,
        means.format(**told),
        advice.format(**told),
        files=1,
        examples=(flaw.path,),
        versions=() if flaw.version is None else (flaw.version,),
        strays=(flaw.path,) if flaw.stray else (),
    )


def _joined(findings: Sequence[Finding]) -> list[Finding]:
    """Return one finding for all strays that mean the same: there may be many."""
    joined: dict[tuple[str, bool], Finding] = {}
    alone: list[Finding] = []
    for one in findings:
        if one.kind not in {trouble.value for trouble in _STRAYS}:
            alone.append(one)
            continue
        key = one.kind, bool(one.strays)
        first = joined.get(key)
        joined[key] = one if first is None else replace(
            first,
            files=first.files + 1,
            examples=(*first.examples, *one.examples)[: EXAMPLES],
            strays=(*first.strays, *one.strays),
        )  # fmt: skip
    return [*alone, *joined.values()]


def unread_history(error: LakewardenError) -> Finding:
    return Finding(
        Trouble.UNREADABLE_VERSION.value,
        LOG,
        f"older versions of the warehouse cannot be read ({error.message}); what they need was not "
        "looked at",
        "bring the log's objects back from a backup",
    )


def put_aside(warehouse: Warehouse, finding: Finding) -> Finding:
    if not finding.strays:
        return finding
    log = warehouse.log
    done = soundness.quarantine(log.store, log.prefix, finding.strays)
    return replace(finding, quarantined=len(done))
