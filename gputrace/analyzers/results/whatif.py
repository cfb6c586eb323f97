"""What a step would take without one cause; field names are those of the JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A cure, and the step time that the replay of the steps predicts with it.

    All times are nanoseconds a step, ``low_ns <= step_ns <= high_ns``.
    """

    id: str
    """The cure's name, such as ``prefetch``."""
    finding: str | None
    """The id of the finding that it cures; None where the analysis has no such finding."""
    what: str
    """The cure in a few words."""
    now_ns: int
    """The mean step as it was recorded."""
    step_ns: int
    """The mean step that is predicted."""
    low_ns: int
    """With the most that the cure can do."""
    high_ns: int
    """With the least that can be expected of it."""
    gain_ns: int
    """``now_ns - step_ns``."""
    assumption: str
    """What the cure is taken to do, and what bounds it."""
    replay_error: float
    """Part of the recorded step time that the known dependencies leave unexplained, 0 to 1."""
    steps: int
    """How many steps were replayed."""
