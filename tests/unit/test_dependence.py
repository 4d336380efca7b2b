"""Tables that need files of others hold those back, along the whole chain."""

from __future__ import annotations

from lakewarden.maintenance.dependence import held_by


def test_holding_back_goes_along_the_chain() -> None:
    uses = {1: {2}, 2: {3}, 3: set(), 4: {1}}
    assert held_by([1], uses) == {2: 1, 3: 1}


def test_circles_end() -> None:
    assert held_by([1], {1: {2}, 2: {1, 2}}) == {2: 1}


def test_nobody_stopped_holds_nobody() -> None:
    assert held_by([], {1: {2}}) == {}


def test_stopped_tables_are_not_named_again() -> None:
    assert held_by([1, 2], {1: {2}, 2: {1}}) == {}
