"""Durations as ISO 8601 writes them: `P1D`, `PT1H30M45.5S`."""

from __future__ import annotations

import re
from datetime import timedelta

#: Years and months have no fixed length, and nothing here lasts less than no time.
_FORM = re.compile(
    r"P(?=[0-9T])(?:(?P<weeks>[0-9]{1,6})W)?(?:(?P<days>[0-9]{1,6})D)?"
    r"(?:T(?=[0-9])(?:(?P<hours>[0-9]{1,9})H)?(?:(?P<minutes>[0-9]{1,9})M)?"
    r"(?:(?P<seconds>[0-9]{1,9}(?:\.[0-9]{1,9})?)S)?)?"
)
#: The same for those who know no names of groups: JSON Schema's patterns are JavaScript's.
ISO_DURATION = "^" + re.sub(r"\?P<[a-z]+>|\?:", "", _FORM.pattern) + "$"


def parse_iso_duration(text: str) -> timedelta | None:
    """Return the duration that text means; None if it means none."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    return timedelta(**{unit: float(number or 0) for unit, number in found.groupdict().items()})


def format_iso_duration(seconds: float) -> str:
    """Say seconds as `PT1H30M45.5S`."""
    micros = round(seconds * 1_000_000)
    hours, rest = divmod(micros, 3_600_000_000)
    minutes, rest = divmod(rest, 60_000_000)
    parts = [f"{hours}H" if hours else "", f"{minutes}M" if minutes else ""]
    if rest or not any(parts):
        parts.append(f"{rest / 1_000_000:.6f}".rstrip("0").rstrip(".") + "S")
    return "PT" + "".join(parts)
