"""How many examples of what takes long: a few in each run of the tests, more before a release."""

from __future__ import annotations

from hypothesis import settings

_USUAL = 50
"""Examples of a property in a usual run, by the profile in conftest.py."""


def few(count: int) -> int:
    """Return how many examples to take: ``count``, and as many times more as the profile asks."""
    return count * max(settings().max_examples // _USUAL, 1)
