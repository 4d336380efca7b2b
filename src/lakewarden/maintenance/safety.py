"""What may stop a plan: limits, floors and the numbers behind them.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from lakewarden.errors import ErrorKind, Refused, UsageError
from lakewarden.model import RemovalStats, format_duration

#: A file that no version names may belong to a write in progress; most are over within days.
UNVERIFIED_AFTER = timedelta(days=7)
#: Nobody waits less than this to call a file an orphan without saying so explicitly.
ORPHAN_FLOOR = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Breakers:
    """Limits beyond which a plan is larger than its user expects."""

    max_files: int | None = None
    max_bytes: int | None = None
    #: Of all files of the tables, between 0 and 1.
    max_share: float | None = None

    def __post_init__(self) -> None:
        if any(limit is not None and limit < 0 for limit in (self.max_files, self.max_bytes)):
            raise UsageError(
                ErrorKind.USAGE, "--max-delete-files and --max-delete-bytes cannot be negative"
            )
        if self.max_share is not None and not 0 <= self.max_share <= 1:
            raise UsageError(ErrorKind.USAGE, "--max-delete-share is a share between 0 and 1")

    def less(self, removed: RemovalStats) -> Breakers:
        """Return what is left of the limits after something was removed."""
        return replace(
            self,
            max_files=None
            if self.max_files is None
            else max(0, self.max_files - removed.files_removed),
            max_bytes=None
            if self.max_bytes is None
            else max(0, self.max_bytes - removed.bytes_removed),
        )

    def check(self, *, files: int, size: int, files_in_all: int) -> None:
        """Refuse a plan that is over a limit."""
        share = files / files_in_all if files_in_all else 0.0
        for found, limit, option in (
            (files, self.max_files, "--max-delete-files"),
            (size, self.max_bytes, "--max-delete-bytes"),
            (share, self.max_share, "--max-delete-share"),
        ):
            if limit is not None and found > limit:
                shown = f"{found:.2f}" if isinstance(found, float) else f"{found:,}"
                raise Refused(
                    ErrorKind.BREAKER,
                    f"the plan would delete {shown}, more than {option} {limit:,} allows; nothing "
                    "was deleted: look at the plan, then raise the limit or narrow the policy",
                )


def check_unverified_age(unverified_after: timedelta) -> None:
    """Refuse to call files of writes in progress left over."""
    if unverified_after < ORPHAN_FLOOR:
        raise Refused(
            ErrorKind.RETENTION_TOO_SHORT,
            f"--unverified-after {format_duration(unverified_after)} is below the floor of "
            f"{format_duration(ORPHAN_FLOOR)} and could delete files of writes in progress; nothing "
            "was touched: raise it, or add --delete-unverified if no writer is active",
        )


def check_orphan_age(older_than: timedelta, *, unsafe_below_floor: bool) -> None:
    """Refuse to call young files orphans: a writer may be about to commit them."""
    if older_than < ORPHAN_FLOOR and not unsafe_below_floor:
        raise Refused(
            ErrorKind.RETENTION_TOO_SHORT,
            f"--older-than {format_duration(older_than)} is below the floor of "
            f"{format_duration(ORPHAN_FLOOR)} and could delete files of writes in progress; nothing "
            "was touched: raise it, or add --unsafe-below-floor if no writer is active",
        )
