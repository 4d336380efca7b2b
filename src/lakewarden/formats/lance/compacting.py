"""Few large files and indices that cover all rows: Lance's own compaction, step by step.

Lance plans the tasks and commits their results; what happens in between may happen anywhere.  A plan
is pinned to the version it was made from: if a row of a task's files was deleted since, Lance refuses
the result of that task, and the results of the others are committed without it.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import lance
from lance.commit import CommitConflictError
from lance.optimize import Compaction, CompactionTask, RewriteResult

from lakewarden.errors import Conflict, Damaged, ErrorKind, LakewardenError, StorageError
from lakewarden.formats.lance.layout import stem
from lakewarden.formats.lance.rehearsal import Rehearsal, Version
from lakewarden.model import MAINTENANCE, OPTIMIZE
from lakewarden.packing import Coverage, Rules, Shape
from lakewarden.storage.opening import Opener

#: Rows that Lance puts into a fragment.
_TARGET_ROWS = 1024 * 1024
_MIN_FILES = 2
#: A fragment of this share of the rows that are wanted is large enough.
_LARGE = 0.75
#: Share of the fragments that must be saved for it to be worth writing indices anew.
_INDEXED_GAIN = 0.05
#: Indices of Lance's own, which cover nothing.
_SYSTEM = "__lance"
#: The one that says where rows went that indices still name by their old addresses.
_MOVED_ROWS = "__lance_frag_reuse"
_CLEANS_ITSELF = "lance.auto_cleanup."
#: What Lance says if others were faster; anything else leaves open what became of a commit.
_PREEMPTED = re.compile("commit conflict|preempted by|incompatible with", re.IGNORECASE)
#: What Lance raises, whatever it is about.
TROUBLE = (OSError, ValueError, RuntimeError)

#: Opens the table: at a version, or at its head.
Opening = Callable[[int | None], Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A task of Lance's: some fragments become one, or a few."""

    task: str
    files: int
    rows: int
    bytes: int
    #: Fragments of which rows were deleted.
    with_deletions: int
    #: Fragments that it makes.
    makes: int

    @property
    def gain(self) -> float:
        return self.files - self.makes + self.with_deletions


@dataclass(frozen=True, slots=True)
class Work:
    """What there is to do for a table, at one version of it."""

    version: int
    shape: Shape
    pieces: tuple[Piece, ...]
    #: Fragments that are left alone, by the reason.
    left_alone: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of results."""

    fragments_removed: int
    fragments_added: int
    #: Results that somebody else's change has made worthless.
    lost: tuple[str, ...]


def cleans_itself(found: Any) -> bool:
    """Tell whether Lance would delete old versions after a commit to this table."""
    return any(key.startswith(_CLEANS_ITSELF) for key in found.config())


def moves_later(found: Any) -> bool:
    """Tell whether indices of this table name rows by addresses of earlier fragments.

    Somebody has compacted it with `defer_index_remap`.  Whoever then moves rows and writes indices anew
    at once gets indices that do not find them, also with Lance's own `compact_files`; so it is deferred
    again.
    """
    return any(index.name == _MOVED_ROWS for index in found.describe_indices())


def shape(found: Any) -> Shape:
    """Return what readers of a version meet."""
    fragments = {one.id: one for one in _fragments(found)}
    live = {number: one.physical_rows - _deleted(one) for number, one in fragments.items()}
    return Shape(
        files=sum(len(one.files) for one in fragments.values()),
        bytes=sum(map(_bytes, fragments.values())),
        rows=sum(live.values()),
        deleted_rows=sum(map(_deleted, fragments.values())),
        delete_files=sum(bool(_deleted(one)) for one in fragments.values()),
        manifests=1,
        indices=tuple(_coverage(found, live)),
    )


def _coverage(found: Any, live: dict[int, int]) -> Iterator[Coverage]:
    for index in found.describe_indices():
        if index.name.startswith(_SYSTEM):
            continue
        covered: set[int] = set()
        for segment in index.segments:
            # A segment that does not say what it covers counts as covering everything.
            covered |= {*live} if segment.fragment_ids is None else {*segment.fragment_ids}
        missing = {*live} - covered
        unindexed = sum(live[number] for number in missing)
        yield Coverage(index.name, sum(live.values()), len(missing), unindexed)


def plan(found: Any, rules: Rules) -> Work:
    """Ask Lance what is worth rewriting."""
    seen = shape(found)
    target = _TARGET_ROWS
    if rules.target_bytes is not None:
        written = max(seen.rows + seen.deleted_rows, 1)
        target = max(1, int(rules.target_bytes / max(seen.bytes / written, 1)))
    fragments = _fragments(found)
    options = {
        "target_rows_per_fragment": target,
        "materialize_deletions": True,
        "materialize_deletions_threshold": rules.deletions,
        "excluded_fragment_ids": [one.id for one in fragments if _is_fine(one, target, rules)],
        "defer_index_remap": moves_later(found),
    }
    planned = Compaction.plan(found, options)
    pieces = [_piece(task, target) for task in planned.tasks]
    least = rules.min_files or _MIN_FILES
    worth = [piece for piece in pieces if piece.files >= least or piece.with_deletions]
    if seen.indices and not any(piece.with_deletions for piece in worth):
        # Whatever is rewritten, every index is written anew as a whole.
        enough = _INDEXED_GAIN * len(fragments)
        if sum(piece.gain for piece in worth) < enough:
            left = {"index_costs_more": sum(piece.files for piece in worth)} if worth else {}
            return Work(found.version, seen, (), left)
    return Work(found.version, seen, tuple(worth))


def _is_fine(fragment: Any, target: int, rules: Rules) -> bool:
    """Tell whether a fragment is large enough; how many rows make a size is only known roughly."""
    written, deleted = fragment.physical_rows, _deleted(fragment)
    return bool(written - deleted >= _LARGE * target and deleted < rules.deletions * written)


def _piece(task: Any, target: int) -> Piece:
    fragments = task.fragments
    rows = sum(one.physical_rows - _deleted(one) for one in fragments)
    return Piece(
        task=task.json(),
        files=len(fragments),
        rows=rows,
        bytes=sum(map(_bytes, fragments)),
        with_deletions=sum(bool(_deleted(one)) for one in fragments),
        makes=ceil(rows / target),
    )


def _fragments(found: Any) -> list[Any]:
    return [one.metadata for one in found.get_fragments()]


def _bytes(fragment: Any) -> int:
    # Older tables do not say how large their files are.
    return sum(file.file_size_bytes or 0 for file in fragment.files)


def _deleted(fragment: Any) -> int:
    return fragment.num_deletions or 0


# -- on a worker -----------------------------------------------------------------------------------


def rewrite(version: Version, task: str) -> str:
    """Write the new files of one task; nobody sees them yet."""
    # A version that waits in a transaction is not public.
    found = version.open() if version.path is None else Rehearsal(version).open()
    result: str = CompactionTask.from_json(task).execute(found).json()
    return result


def reindex(version: Version) -> bytes | None:
    """Fold fragments that an index does not cover into it; return the transaction, if there is one."""
    rehearsal = Rehearsal(version)
    try:
        found = rehearsal.open()
        found.optimize.optimize_indices()
        if not rehearsal.made:
            _check_left(shape(found))
            return None
        return pickle.dumps(found.read_transaction(found.version))
    finally:
        rehearsal.forget()


def _check_left(seen: Shape) -> None:
    """Raise if Lance has left indices as they are that do not cover everything."""
    left = [one.name for one in seen.indices if one.unindexed_fragments]
    if left:
        # It drops what it cannot open, and says so to nobody.
        raise Damaged(
            ErrorKind.DAMAGED_VERSION,
            f"Lance left {', '.join(left)} as incomplete as before, which it does if an index cannot be "
            "read; scans answer instead: build it anew with replace=True",
        )


# -- on the driver ---------------------------------------------------------------------------------


def commit(version: Version, opening: Opening, results: Sequence[str]) -> Committed:
    """Make a version of what workers have rewritten, but for what others have changed since."""
    kept = list(results)
    lost: list[str] = []
    while kept:
        # Whoever tries results again must look: if Lance cannot reserve numbers for fragments it takes
        # the files away (lance#6320) and says nothing; a version that names them could not be read.
        there = _there(version, kept)
        lost += [one for one in kept if one not in there]
        kept = there
        if not kept:
            break
        parsed = [RewriteResult.from_json(one) for one in kept]
        read = opening(parsed[0].read_version)
        later = moves_later(read)
        if len(_untouched(read, kept, parsed)) < len(kept) or moves_later(opening(None)) != later:
            # Another table is there now, whose versions and fragments have the same numbers; or somebody
            # has begun to defer what is done at once here.
            return Committed(0, 0, (*lost, *kept))
        try:
            done = Compaction.commit(read, parsed, {"defer_index_remap": later})
        except TROUBLE as error:
            if not _PREEMPTED.search(str(error)):
                raise _unknown(error) from error
            left = _untouched(opening(None), kept, parsed)
            # If no file of theirs has changed, it is something else that they do not get along with.
            left = left if len(left) < len(kept) else []
            lost += [one for one in kept if one not in left]
            kept = left
        else:
            return Committed(done.fragments_removed, done.fragments_added, tuple(lost))
    return Committed(0, 0, tuple(lost))


def _there(version: Version, results: Sequence[str]) -> list[str]:
    """Return the results all of whose files are on storage."""
    store, data = Opener(version.options)(version.location), version.location.child("data")
    return [
        result
        for result in results
        if all(
            store.exists(data.child(file.path).key)
            for fragment in RewriteResult.from_json(result).new_fragments
            for file in fragment.files
        )
    ]


def _untouched(head: Any, results: Sequence[str], parsed: Sequence[Any]) -> list[str]:
    """Return the results whose files are in the head as they were read."""
    there = {one.id: one.to_json() for one in _fragments(head)}
    return [
        result
        for result, one in zip(results, parsed, strict=True)
        if all(there.get(old.id) == old.to_json() for old in one.original_fragments)
    ]


def commit_index(opening: Opening, told: bytes) -> None:
    """Make a version of indices that a worker has brought up to date; raise Conflict if it cannot be."""
    made = pickle.loads(told)  # noqa: S301  # from our own workers
    # Says whose it is, so that repair knows it again.
    made = replace(made, transaction_properties={MAINTENANCE: OPTIMIZE})
    try:
        lance.LanceDataset.commit(opening(made.read_version), made)
    except CommitConflictError as error:
        raise Conflict(
            ErrorKind.CONFLICT, f"the indices were changed by somebody else ({line(error)})"
        ) from error
    except TROUBLE as error:
        raise _unknown(error) from error


def discard(version: Version, results: Sequence[str], indices: Sequence[bytes] = ()) -> None:
    """Take away files that workers have written, and that are certain not to be committed."""
    store, root = Opener(version.options)(version.location), version.location
    keys: list[str] = []
    for result in results:
        for fragment in RewriteResult.from_json(result).new_fragments:
            for file in fragment.files:
                data = root.child("data")
                keys.append(data.child(file.path).key)
                keys += _below(store, data.child(stem(file.path)).key)
    for told in indices:
        made = pickle.loads(told).operation  # noqa: S301  # from our own workers
        for index in made.new_indices:
            keys += _below(store, root.child("_indices").child(index.uuid).key)
    store.delete(keys)


def _below(store: Any, prefix: str) -> list[str]:
    return [key for batch in store.list(prefix) for key in batch.column("key").to_pylist()]


def _unknown(error: Exception) -> LakewardenError:
    return StorageError(
        ErrorKind.COMMIT_UNKNOWN,
        f"Lance could not commit ({line(error)}); whether it did anything cannot be told, so what was "
        "written stays until cleanup: try again",
    )


def line(error: Exception) -> str:
    # After a comma Lance says where in its sources that was.
    return re.split(r", (?:/|src)", " ".join(str(error).split()))[0][:160]
