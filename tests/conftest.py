"""Fixtures and Hypothesis profiles that every level shares."""

from hypothesis import settings

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None)
settings.load_profile("dev")
