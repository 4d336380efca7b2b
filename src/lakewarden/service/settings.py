"""What a running service was told.  Read once, at the edge; nothing here looks at the environment."""

from __future__ import annotations

from dataclasses import dataclass, field

#: As Lakekeeper has it: a commit that expires a hundred thousand snapshots must fit.
BODY_BYTES_MAX = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """The settings of one process."""

    #: May hold a password.
    database_url: str = field(repr=False)
    #: Whether callers need a token.  Without, only callers on this machine are answered.
    authenticate: bool = True
    body_bytes_max: int = BODY_BYTES_MAX
    #: So many warehouses are looked at on request at the same time, each for so long.
    looks_max: int = 4
    look_seconds: float = 300.0
    #: How long the database may take to say that it is there.
    health_seconds: float = 5.0
