"""How long a writer that was outrun waits before it tries again.

Writers that fail together would fail together again.  Each picks one of a few time slots, as long as
a try takes, and there are twice as many after every failure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lakewarden.world import Chance

_FIRST_SLOTS = 4
_UNIT_SECONDS = 0.05
#: A slot is a little longer than the try that it is to hold.
_MARGIN = 1.1


@dataclass(slots=True)
class SlotBackoff:
    """Tells how long to wait after each failed try."""

    chance: Chance
    _unit: float = _UNIT_SECONDS
    _failed: int = field(default=0)

    def beside(self, seconds: float) -> float:
        """Return how long to wait after a try that only had its place taken: it does not add up."""
        if self._failed == 0:
            self._unit = seconds * _MARGIN
        return self.chance.below(_FIRST_SLOTS) * self._unit

    def after(self, seconds: float) -> float:
        """Return how long to wait after a try that took `seconds` and failed.

        The first try measures: it alone sets how long a slot is.
        """
        if self._failed == 0:
            self._unit = seconds * _MARGIN
        slots = _FIRST_SLOTS << self._failed
        self._failed += 1
        return self.chance.below(slots) * self._unit
