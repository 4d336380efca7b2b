"""PURE: which pieces of work are worth doing, and which fit into what may be spent.

A piece rewrites some files of one table into fewer.  What it gains are files that readers need not
open any more, and rows that they need not skip; what it costs are the bytes that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from lakewarden.errors import ErrorKind, UsageError

#: Deleted rows, of all rows of a file, from which on it is rewritten.
DELETIONS = 0.1


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user wants of files; what is not said is as the format has it."""

    #: Bytes that a file is to have.
    target_bytes: int | None = None
    #: Files that are worth being rewritten together; those with many deleted rows are, alone.
    min_files: int | None = None
    #: Share of deleted rows from which on a file is rewritten.
    deletions: float = DELETIONS
    #: Bytes that one run may read, over all tables.
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--target-size", self.target_bytes, 1),
            ("--min-files", self.min_files, 2),
            ("--max-bytes", self.max_bytes, 1),
        ):
            if value is not None and value < least:
                raise UsageError(ErrorKind.USAGE, f"{name} is {value}; it must be at least {least}")
        if not 0 < self.deletions <= 1:
            raise UsageError(
                ErrorKind.USAGE,
                f"--deletions is {self.deletions:g}; it is a share of rows, above 0 and up to 1",
            )


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a table an index covers."""

    name: str
    rows: int
    unindexed_fragments: int
    unindexed_rows: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What readers of a table meet."""

    files: int
    bytes: int
    rows: int
    deleted_rows: int
    #: Files that say which rows were deleted, and those that say which files there are.
    delete_files: int = 0
    manifests: int = 0
    indices: tuple[Coverage, ...] = ()

    @property
    def covered(self) -> bool:
        """Tell whether every index covers all rows."""
        return not any(one.unindexed_fragments for one in self.indices)


class Piece(Protocol):
    """Files of one table that are rewritten together."""

    @property
    def files(self) -> int:
        """Files that it reads."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes that it reads."""
        ...

    @property
    def makes(self) -> int:
        """Files that it is expected to make."""
        ...

    @property
    def gain(self) -> float:
        """What readers save: files fewer, and a file for the deleted rows of each."""
        ...


AnyPiece = TypeVar("AnyPiece", bound=Piece)


def within(
    pieces: Iterable[AnyPiece], max_bytes: int | None
) -> tuple[list[AnyPiece], list[AnyPiece]]:
    """Tell the pieces that are done from those that are put off: most gain for a byte comes first."""
    ordered = sorted(pieces, key=lambda piece: piece.gain / max(piece.bytes, 1), reverse=True)
    if max_bytes is None:
        return ordered, []
    done: list[AnyPiece] = []
    later: list[AnyPiece] = []
    left = max_bytes
    for piece in ordered:
        fits = piece.bytes <= left
        (done if fits else later).append(piece)
        left -= piece.bytes if fits else 0
    return done, later
