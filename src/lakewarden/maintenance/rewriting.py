"""What optimize does to one table of each format: errands for workers, then commits by the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from lakewarden.errors import Conflict, ErrorKind, LakewardenError
from lakewarden.formats.iceberg import rewriting, rewritten
from lakewarden.formats.lance import compacting
from lakewarden.formats.lance.rehearsal import Version
from lakewarden.model import MAINTENANCE, OPTIMIZE, Format
from lakewarden.packing import Rules, Shape
from lakewarden.pipeline.errands import Errand

if TYPE_CHECKING:
    from pyiceberg.table import Table as IcebergTable

_OURS = {MAINTENANCE: OPTIMIZE}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a commit has made of results."""

    removed: int = 0
    added: int = 0
    #: Results that somebody else's change has made worthless.
    lost: Sequence[Any] = ()
    changed: bool = False
    #: Others were faster with the table: nothing was committed, and all of it may still be good.
    outrun: bool = False

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.removed + other.removed,
            self.added + other.added,
            self.lost,
            self.changed or other.changed,
        )


class Opened(Protocol):
    """A table that is open for a change."""

    def lance(self, number: int | None) -> Any:
        """Open a Lance table: at a version, or at its newest."""
        ...

    def version(self) -> Version:
        """Return the newest version of a Lance table, for workers."""
        ...

    def iceberg(self) -> Any:
        """Open an Iceberg table."""
        ...

    def outrun(self) -> bool:
        """Tell whether what went wrong was never committed, and others have changed the table."""
        ...


@dataclass(frozen=True)
class Job:
    """What there is to do for one table, pinned to the version that was read."""

    key: str
    format: Format
    pieces: tuple[Any, ...]
    shape: Shape
    #: Groups of files that are left alone, by the reason.
    left_alone: Mapping[str, int] = field(default_factory=dict)
    #: The version that the warehouse names, and that the table has.
    pinned: int | None = None
    head: int | None = None

    @property
    def needed(self) -> bool:
        """Tell whether there is anything to do."""
        return bool(self.pieces)

    def errand(self, piece: Any) -> Errand[Any]:
        """Return what a worker does for a piece."""
        raise NotImplementedError

    def commit(self, opened: Opened, results: Sequence[Any]) -> Outcome:
        """Make a version of results."""
        raise NotImplementedError

    def index(self, opened: Opened) -> Errand[Any] | None:
        """Return what a worker does for the indices; None if they cover everything."""
        raise NotImplementedError

    def commit_index(self, opened: Opened, told: Any) -> bool:
        """Make a version of what a worker did for the indices; tell whether there was anything."""
        raise NotImplementedError

    def rest(self, opened: Opened, rules: Rules) -> Job:  # noqa: ARG002
        """Return what there is still to do once the indices cover everything."""
        return replace(self, pieces=())

    def discard(self, results: Sequence[Any], told: Sequence[Any] = ()) -> None:
        """Take away files that are certain not to have been committed."""
        raise NotImplementedError


# -- Lance -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LanceRewrite:
    version: Version
    task: str

    def run(self) -> str:
        return compacting.rewrite(self.version, self.task)


@dataclass(frozen=True)
class _LanceReindex:
    version: Version

    def run(self) -> bytes | None:
        return compacting.reindex(self.version)


@dataclass(frozen=True)
class LanceJob(Job):
    """Of a Lance table."""

    version: Version = field(kw_only=True)

    @property
    def needed(self) -> bool:
        return bool(self.pieces) or not self.shape.covered

    def errand(self, piece: compacting.Piece) -> Errand[str]:
        return _LanceRewrite(self.version, piece.task)

    def commit(self, opened: Opened, results: Sequence[str]) -> Outcome:
        try:
            done = compacting.commit(self.version, opened.lance, results)
        except LakewardenError:
            # Numbers that were reserved in a transaction are taken by others, and the like.
            if opened.outrun():
                return Outcome(outrun=True)
            raise
        return Outcome(
            done.fragments_removed, done.fragments_added, done.lost, bool(done.fragments_removed)
        )

    def index(self, opened: Opened) -> Errand[bytes | None] | None:
        if compacting.shape(opened.lance(None)).covered:
            return None
        return _LanceReindex(opened.version())

    def commit_index(self, opened: Opened, told: bytes | None) -> bool:
        if told is None:
            return False
        try:
            compacting.commit_index(opened.lance, told)
        except LakewardenError as error:
            if opened.outrun():
                raise Conflict(ErrorKind.CONFLICT, error.message) from error
            raise
        return True

    def rest(self, opened: Opened, rules: Rules) -> Job:
        # Lance keeps apart what an index covers and what it does not.
        work = compacting.plan(opened.lance(None), rules)
        return replace(self, pieces=work.pieces, version=opened.version())

    def discard(self, results: Sequence[str], told: Sequence[bytes | None] = ()) -> None:
        compacting.discard(self.version, results, [one for one in told if one is not None])


# -- Iceberg ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _IcebergRewrite:
    table: bytes
    piece: rewritten.Piece

    def run(self) -> rewritten.Rewritten:
        return rewritten.rewrite(self.piece, self.table)


@dataclass(frozen=True)
class IcebergJob(Job):
    """Of an Iceberg table."""

    work: rewriting.Work = field(kw_only=True)
    #: What workers must know of it.
    table: bytes = field(kw_only=True, repr=False)

    @classmethod
    def of(
        cls, key: str, table: IcebergTable, work: rewriting.Work, pinned: int | None
    ) -> IcebergJob:
        reasons: Counter[str] = Counter()
        for one in work.skipped:
            reasons[one.reason] += one.files
        return cls(
            key,
            Format.ICEBERG,
            work.pieces,
            Shape(
                work.files,
                work.bytes,
                work.rows,
                work.deleted_rows,
                work.delete_files,
                work.manifests,
            ),
            dict(reasons),
            pinned,
            work.snapshot_id,
            work=work,
            table=rewritten.described(table),
        )

    @property
    def needed(self) -> bool:
        return bool(self.pieces or self.work.merge_manifests or self.work.dangling)

    def errand(self, piece: rewritten.Piece) -> Errand[rewritten.Rewritten]:
        return _IcebergRewrite(self.table, piece)

    def commit(self, opened: Opened, results: Sequence[rewritten.Rewritten]) -> Outcome:
        done = rewriting.commit(opened.iceberg(), self.work, results, properties=_OURS)
        mine = [one for one in results if one.piece in done.committed]
        sources = {piece.number: piece.files for piece in self.work.pieces}
        merged = self._merge(opened) if self.work.merge_manifests else None
        return Outcome(
            sum(sources[one.piece] for one in mine),
            sum(len(one.files) for one in mine),
            [one for one in results if one.piece in done.lost],
            done.snapshot_id is not None or merged is not None,
        )

    def _merge(self, opened: Opened) -> int | None:
        """Rewrite manifests, if nobody is in the way; the files are committed, whatever comes of it."""
        try:
            done = rewriting.rewrite_manifests(opened.iceberg(), self.work, properties=_OURS)
        except Conflict:
            # The next run finds them as they are.
            return None
        return done.snapshot_id

    def index(self, opened: Opened) -> None:  # noqa: ARG002  # Iceberg has none
        return None

    def discard(
        self,
        results: Sequence[rewritten.Rewritten],
        told: Sequence[Any] = (),  # noqa: ARG002  # no indices
    ) -> None:
        rewritten.discard(results, rewritten.storage_of(self.table))
