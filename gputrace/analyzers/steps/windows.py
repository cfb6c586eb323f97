"""Step windows: one set per rank, and how many at the start are warm-up."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from gputrace.model.events import Mask
from gputrace.model.intervals import Times
from gputrace.model.struct import Struct


class Interlude(Struct, frozen=True, dict=True):
    """A stretch between two steps of a rank that belongs to neither."""

    phase: str
    """``validation`` or ``checkpoint``."""
    start: int
    end: int
    after: int
    """The step it follows."""
    evidence: str


class MarkedSteps(Struct, frozen=True, dict=True):
    """Steps of one rank as its host marked them, in order."""

    number: Times
    length: Times
    """Nanoseconds from mark to mark, in host time."""
    recorded: Mask
    """True where GPU activity was recorded for all of the step."""
    control: Mask
    """True where the recorder was out of the program's way for all of the step."""

    def select(self, kept: Mask) -> MarkedSteps:
        """Return some of the steps."""
        times = self.number[kept], self.length[kept]
        return MarkedSteps(*times, self.recorded[kept], self.control[kept])


class StepWindows(Struct, frozen=True, dict=True):
    """The steps of one rank, in GPU time, in order and disjoint."""

    rank: int
    start: Times
    end: Times
    busy_from: Times
    """When the first operation of each step starts."""
    source: str
    """``markers``, ``profiler``, ``nvtx`` or ``inferred``."""
    kind: str
    """``training`` or ``iterations``."""
    confidence: float
    reason: str
    interludes: tuple[Interlude, ...] = ()
    numbers: Times | None = None
    """Numbers of the steps as the program counted; None if it did not."""
    marked: MarkedSteps | None = None
    """All steps that the host marked; None without control stretches."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def lengths(self) -> Times:
        """Nanoseconds of each step."""
        return self.end - self.start

    @property
    def intervals(self) -> Times:
        """Nanoseconds from each step's start to the next one's."""
        return np.diff(self.start)


_SLOWER: Final = 0.15
"""A step longer than the later ones by this part of them is not yet at speed,"""
_NOISE: Final = 3 * 1.4826
"""unless they scatter so much: three standard deviations, from the median deviation."""
_IN_A_ROW: Final = 3
"""So many steps at speed end the warm-up: one slow step later on is a hiccup."""
_FIRST_SLOWER: Final = 1.5
_OTHERS_ALIKE: Final = 1.25
"""A first of less than six steps is warm-up if it takes this many times as long as the longest of
the others, which are alike within this factor."""


def count_warmup(lengths: ArrayLike) -> int:
    """Steps before the first three in a row at speed, where speed is the later half's median.

    At most half of the steps; of three to five, the first alone may be warm-up.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) < 2 * _IN_A_ROW:
        first, others = lengths[:1], lengths[1:]
        if len(others) < 2 or others.max() > _OTHERS_ALIKE * others.min():
            return 0
        return int(first[0] > _FIRST_SLOWER * others.max())
    half = len(lengths) // 2
    usual = np.median(lengths[half:])
    scatter = np.median(np.abs(lengths[half:] - usual))
    fast = lengths <= usual + max(_SLOWER * usual, _NOISE * scatter)
    for step in range(half):
        if fast[step : step + _IN_A_ROW].all():
            return step
    return half
