"""What the screen shows of a recording under way, whoever reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gputrace.analyzers.results import Analysis
from gputrace.analyzers.scene.curves import Curve


@dataclass(frozen=True, slots=True)
class Pace:
    """The last steps of a rank."""

    rank: int
    number: int
    """Of the last step, from 0."""
    lengths: tuple[int, ...]
    """Nanoseconds of each, the last one last; at least one."""
    per_second: float | None
    """Steps a second over these, and what time has passed since; None where they are too few."""

    @property
    def mean_ns(self) -> int:
        return sum(self.lengths) // len(self.lengths)


@dataclass(frozen=True, eq=False, slots=True)
class CardNow:
    """A card's last minutes."""

    gpu: int
    name: str
    curves: Mapping[str, Curve]
    """By name; on CLOCK_REALTIME."""


@dataclass(frozen=True, eq=False, slots=True)
class Now:
    """A recording at one moment."""

    name: str
    """Of the trace that it is to become."""
    state: str
    """``running``, ``ending`` (the trace is being made), ``ended`` or ``cut`` (it was killed)."""
    time_ns: int
    """CLOCK_REALTIME."""
    elapsed_ns: int
    bytes: int
    processes: int
    paces: tuple[Pace, ...] = ()
    cards: tuple[CardNow, ...] = ()
    analysis: Analysis | None = None
    """Of the last steps; None where nothing can be said yet."""
    window: tuple[int, int] = (0, 0)
    """What was analyzed (CLOCK_REALTIME)."""
    why_not: str = ""
    """Why there is no analysis."""


class Feed(Protocol):
    """Looks at a recording."""

    @property
    def trace(self) -> Path:
        """What there is once the recording has ended."""

    def look(self) -> Now:
        """What there is to see; called in a thread, by one at a time."""
