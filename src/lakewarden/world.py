"""Time, sleep, chance and ids: the only module that reads the system clock or invents anything.

One clock decides and deletes: `now` is read once at the top of an operation and passed down.
"""

from __future__ import annotations

import secrets
import time
import uuid
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> datetime:
        """Return the current instant, aware, in UTC."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""
        ...

    def elapsed(self) -> float:
        """Return seconds on a steady scale, for measuring durations."""
        ...


#: Where there is no clock of that name, the usual one does not stop either.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def elapsed(self) -> float:
        # Goes on while the machine sleeps: whoever wakes up must know how long ago it was.
        return time.clock_gettime(_STEADY)


class Chance(Protocol):
    """Where randomness comes from."""

    def below(self, number: int) -> int:
        """Return a whole number from 0 to `number` - 1, each as likely as the others."""
        ...


class SystemChance:
    """The machine's own randomness."""

    def below(self, number: int) -> int:
        return secrets.randbelow(number)


def fresh_id() -> str:
    """Return an id nobody else has."""
    return uuid.uuid4().hex


def ordered_id(now: datetime, chance: Chance) -> uuid.UUID:
    """Return an id nobody else has that sorts by the time it was made (version 7 of RFC 9562)."""
    milliseconds = int(now.timestamp() * 1000) & (2**48 - 1)
    noise = chance.below(2**74)
    number = milliseconds << 80 | 7 << 76 | (noise >> 62) << 64 | 2 << 62 | noise & (2**62 - 1)
    return uuid.UUID(int=number)
