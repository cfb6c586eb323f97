"""What every way of finding steps gives: one set of step windows per rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gputrace.analyzers.intervals import Times


@dataclass(frozen=True)
class Interlude:
    """A stretch between two steps of a rank that belongs to neither."""

    phase: str
    """``validation`` or ``checkpoint``."""
    start: int
    end: int
    after: int
    """The step it follows."""
    evidence: str


@dataclass(frozen=True)
class StepWindows:
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
    """Of the steps, as the program counted; None where nobody did."""

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
