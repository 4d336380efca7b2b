"""What fits into a budget, and how work is dealt out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakewarden.errors import UsageError
from lakewarden.model import parse_size
from lakewarden.packing import Rules, within
from lakewarden.pipeline.errands import dealt


@dataclass(frozen=True)
class Some:
    bytes: int
    gain: float
    files: int = 2
    makes: int = 1


SOME = st.lists(st.builds(Some, bytes=st.integers(0, 100), gain=st.floats(0, 50)), max_size=20)


@given(SOME, st.integers(1, 500))
def test_what_is_done_fits_and_nothing_is_lost(pieces: list[Some], budget: int) -> None:
    done, later = within(pieces, budget)
    assert sum(piece.bytes for piece in done) <= budget
    assert sorted(map(repr, done + later)) == sorted(map(repr, pieces))
    # What was put off would not have fitted when its turn came.
    for piece in later:
        better = [
            one.bytes
            for one in done
            if one.gain / max(one.bytes, 1) >= piece.gain / max(piece.bytes, 1)
        ]
        assert sum(better) + piece.bytes > budget


@given(SOME)
def test_without_a_budget_everything_is_done(pieces: list[Some]) -> None:
    assert within(pieces, None)[1] == []


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 16))
def test_work_is_dealt_out_evenly(weights: list[int], hands: int) -> None:
    hands = min(hands, len(weights))
    found = dealt(weights, hands)
    assert sorted(at for hand in found for at in hand) == list(range(len(weights)))
    assert all(found)
    loads = [sum(weights[at] for at in hand) for hand in found]
    assert max(loads) <= sum(weights) / hands + max(weights) + 1e-6


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("256MiB", 256 << 20), ("1.5GB", 1_500_000_000), ("2 kib", 2048), ("3b", 3)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1xB", "1.2.3MB", "1e9", "MiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="as a size"):
        parse_size(text)


@pytest.mark.parametrize(
    "wrong",
    [{"target_bytes": 0}, {"min_files": 1}, {"max_bytes": 0}, {"deletions": 0}, {"deletions": 1.1}],
)
def test_rules_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Rules(**wrong)  # type: ignore[arg-type]
