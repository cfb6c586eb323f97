"""Where epochs begin: steps at equal distances that wait far longer for data than the others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from gputrace.analyzers.intervals import Times

_LONGER: Final = 3.0
"""A wait this many times the usual one may be a loader that begins anew,"""
_PART: Final = 0.2
"""if it is longer than the usual one by this part of a step."""
_SHORTEST: Final = 3
"""Steps of an epoch that can be told from a loader that stutters."""


def find_epochs(waits: Times, lengths: Times, after_phases: Collection[int] = ()) -> list[int]:
    """The steps that begin an epoch, but for the very first; none where no loader begins anew.

    Args:
        waits: nanoseconds that each step waits for data.
        lengths: nanoseconds of each step.
        after_phases: steps that come right after a validation or a checkpoint.

    Three waits at one distance are a rule; two are, where each comes after such a phase. The run
    may begin and end within an epoch, but none of the waits is missing between.
    """
    if len(waits) < 2 * _SHORTEST:
        return []
    usual, step = float(np.median(waits)), float(np.median(lengths))
    far = (waits > _LONGER * usual) & (waits > usual + _PART * step)
    begins = [place for place in np.flatnonzero(far).tolist() if place > 0]
    enough = 2 if begins and set(begins) <= set(after_phases) else 3
    if len(begins) < enough:
        return []
    distances = np.diff(begins)
    distance = int(distances[0])
    edges = max(begins[0], len(waits) - begins[-1])
    regular = distance >= _SHORTEST and bool((distances == distance).all())
    return begins if regular and edges <= distance else []
