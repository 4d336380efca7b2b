"""What can go wrong, grouped by what a handler would do about it.

Each category owns an exit code.  `kind` is the stable name programs may match on; kinds are only
ever added.  A message says what was found, what it means and what to do next, in one line.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Exit(IntEnum):
    """Exit codes of the command line."""

    DONE = 0
    REFUSED = 1
    USAGE = 2
    PARTIAL = 3
    CONFLICT = 4


class ErrorKind(StrEnum):
    """Stable names of errors, the same in JSON, logs and documentation.  Append only."""

    USAGE = "usage"
    EMPTY_POLICY = "empty_policy"
    UNKNOWN_SCHEME = "unknown_scheme"
    UNKNOWN_OPTION = "unknown_option"
    NOT_FOUND = "not_found"
    NOT_A_TABLE = "not_a_table"
    ACCESS_DENIED = "access_denied"
    STORAGE = "storage"
    ALREADY_EXISTS = "already_exists"
    CORRUPT_MANIFEST = "corrupt_manifest"
    UNSUPPORTED_FEATURE = "unsupported_feature"
    DAMAGED_REF = "damaged_ref"
    DAMAGED_VERSION = "damaged_version"
    TAGGED_VERSION = "tagged_version"
    LOCATION_OVERLAP = "location_overlap"
    RETENTION_TOO_SHORT = "retention_too_short"
    BREAKER = "breaker"
    CONSENT = "consent"
    PLAN_OUTDATED = "plan_outdated"
    PLAN_INVALID = "plan_invalid"
    SPARK = "spark"
    CATALOG = "catalog"
    GC_DISABLED = "gc_disabled"
    PREFIX_MISMATCH = "prefix_mismatch"
    CONFLICT = "conflict"
    INCOMPATIBLE = "incompatible"
    COMMIT_UNKNOWN = "commit_unknown"
    HISTORY_GAP = "history_gap"
    RECLAIMED = "reclaimed"
    NEWER_STAMP = "newer_stamp"
    NOT_A_WAREHOUSE = "not_a_warehouse"
    BAD_NAME = "bad_name"
    DRIFT = "drift"
    IN_WAREHOUSE = "in_warehouse"
    DATABASE_OUTDATED = "database_outdated"
    QUEUE_CONFIG = "queue_config"
    QUEUE_UNKNOWN = "queue_unknown"
    TASK_ACTIVE = "task_active"
    TASK_TAKEN_OVER = "task_taken_over"
    STOPPED = "stopped"


class LakewardenError(Exception):
    """Base of every error raised on purpose.  Anything else that reaches the user is a bug."""

    exit_code = Exit.REFUSED

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message

    def __reduce__(self) -> tuple[type[LakewardenError], tuple[ErrorKind, str]]:
        return type(self), (self.kind, self.message)


class UsageError(LakewardenError):
    """The request itself is wrong; the same request will never work."""

    exit_code = Exit.USAGE


class Refused(LakewardenError):
    """The request is well formed but acting on it would be unsafe; nothing was changed."""


class StorageError(LakewardenError):
    """The store said no or did not answer."""


class NotFound(StorageError):
    """The object is not there."""

    def __init__(self, message: str, kind: ErrorKind = ErrorKind.NOT_FOUND) -> None:
        super().__init__(kind, message)

    def __reduce__(self) -> tuple[type[NotFound], tuple[str, ErrorKind]]:  # type: ignore[override]
        return type(self), (self.message, self.kind)


class AlreadyExists(StorageError):
    """A create-if-absent put found the object already there."""

    def __init__(self, message: str, kind: ErrorKind = ErrorKind.ALREADY_EXISTS) -> None:
        super().__init__(kind, message)

    def __reduce__(self) -> tuple[type[AlreadyExists], tuple[str, ErrorKind]]:  # type: ignore[override]
        return type(self), (self.message, self.kind)


class Damaged(LakewardenError):
    """Something that must be readable is not: fail closed for that table."""


class Conflict(LakewardenError):
    """Somebody else committed in between; planning again will do.

    `landed` says that our own commit was made all the same.
    """

    exit_code = Exit.CONFLICT

    def __init__(self, kind: ErrorKind, message: str, *, landed: bool = False) -> None:
        super().__init__(kind, message)
        self.landed = landed


class Interrupted(LakewardenError):
    """Something was changed before the work could not go on; running again resumes it."""

    exit_code = Exit.PARTIAL
