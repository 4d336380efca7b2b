"""Tasks that were picked, with their tables: what applies to each, which share a run, and who may go on."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lakewarden.jobs.config import ExpireSettings, OptimizeSettings, OrphanSettings
from lakewarden.jobs.holding import Holding
from lakewarden.jobs.sources import Look, OwnTables, Source
from lakewarden.jobs.tasks import Claim, Origin
from lakewarden.jobs.warehouses import TableEntity
from lakewarden.maintenance.deleting import Passage
from lakewarden.warehouse.warehouse import MANIFEST

#: How far a task is when its plan is made.
PLANNED = 0.5

Settings = ExpireSettings | OrphanSettings | OptimizeSettings


@dataclass(frozen=True, slots=True)
class InHand:
    """A task with what was found out about its table when it was picked."""

    claim: Claim
    table: TableEntity
    look: Look
    settings: Settings
    #: Its share of the requests that the run has made so far, by kind.
    requests: Mapping[str, int] = field(default_factory=dict)

    @property
    def min_snapshots(self) -> int:
        """How many versions make a run worthwhile; whoever asks by hand has decided that."""
        if not isinstance(self.settings, ExpireSettings) or self.claim.origin is Origin.MANUAL:
            return 0
        return self.settings.min_snapshots_to_expire

    @property
    def min_files(self) -> int | None:
        """How many files are worth rewriting; whoever asks by hand wants what the format can do."""
        if not isinstance(self.settings, OptimizeSettings):
            return None
        by_hand = self.claim.origin is Origin.MANUAL
        return self.settings.min_files_by_hand if by_hand else self.settings.min_files

    @property
    def sharing(self) -> Hashable:
        """Return what tables must agree in to share a run."""
        match self.settings:
            case ExpireSettings():
                return replace(self.settings, min_snapshots_to_expire=self.min_snapshots)
            case OrphanSettings():
                return self.settings.older_than, self.settings.dry_run
            case OptimizeSettings():
                chosen = self.settings
                return chosen.target_file_size_bytes, self.min_files, chosen.max_bytes


@dataclass(frozen=True)
class Group:
    """Tasks that share a pipeline run."""

    source: Source
    hands: Sequence[InHand]

    @property
    def settings(self) -> Settings:
        return self.hands[0].settings

    def going(self, holding: Holding) -> Group:
        """Return the group without tasks that have ended meanwhile."""
        going = {one.task_id for one in holding.going([hand.claim for hand in self.hands])}
        return replace(self, hands=[hand for hand in self.hands if hand.claim.task_id in going])


@dataclass
class Doorkeeper:
    """Lets deletions pass for as long as this worker has the tables' tasks."""

    holding: Holding
    hands: Mapping[str, InHand]
    batch_files: int | None
    #: Files of each table that are to go, and those that are gone.
    going: Mapping[str, int]
    #: Tables that are left alone, whoever has their tasks.
    left_alone: Collection[str] = ()
    _gone: dict[str, int] = field(default_factory=dict)

    def passing(self, tables: Collection[str]) -> Passage:
        passing, until = self.holding.check([hand.claim for hand in self.hands.values()])
        allowed = {
            key
            for key, hand in self.hands.items()
            if hand.claim.task_id in passing and key not in self.left_alone
        }
        if allowed:
            # What is no table's, anybody who has a task may do.
            allowed.add(MANIFEST)
        return Passage([key for key in tables if key in allowed], until)

    def gone(self, files: Mapping[str, int]) -> None:
        for key, number in files.items():
            self._gone[key] = self._gone.get(key, 0) + number
            if key in self.hands:
                share = min(self._gone[key] / max(self.going.get(key, 0), 1), 1.0)
                told = {"stage": "delete", "deleted_files": self._gone[key]}
                progress = PLANNED + (1 - PLANNED) * share
                self.holding.tell(self.hands[key].claim, progress, told)


def groups(source: Source, hands: Sequence[InHand]) -> Iterator[Group]:
    """Put tasks together that can share a run."""
    found: dict[Hashable, list[InHand]] = {}
    for hand in hands:
        # In a warehouse of ours every table has its own rules for versions.
        free = isinstance(source, OwnTables) and isinstance(hand.settings, ExpireSettings)
        found.setdefault(None if free else hand.sharing, []).append(hand)
    yield from (Group(source, one) for one in found.values())
