"""All gaps of a trace as columns, to be filtered and sorted whatever their number."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.intervals import Times
from gputrace.analyzers.lanes import Lane
from gputrace.analyzers.results import IDLE_CAUSES
from gputrace.analyzers.steps import FoundSteps, StepWindows

NO_STEP: Final = -1

SORTS: Final = ("length", "start", "lane", "cause", "step")
"""What gaps can be sorted by."""


@dataclass(frozen=True)
class GapTable:
    """A row for each gap, of a lane in order of time, one lane after another."""

    lane: NDArray[np.int16]
    """Which of the lanes that it was made of."""
    start: Times
    end: Times
    cause: NDArray[np.int8]
    """The one of `IDLE_CAUSES`, by its place there, that covers most of it."""
    step: NDArray[np.int32]
    """The step that its middle lies in, or `NO_STEP`."""
    steady: NDArray[np.bool_]
    """Whether that is a step after warm-up."""
    between: NDArray[np.bool_]
    """Whether a step begins in it: it lies between two batches."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def length(self) -> Times:
        """Nanoseconds of each."""
        return self.end - self.start

    @cached_property
    def _firsts(self) -> list[int]:
        lanes = int(self.lane[-1]) + 1 if len(self) else 0
        firsts: list[int] = np.searchsorted(
            self.lane, np.arange(lanes + 1, dtype=np.int16)
        ).tolist()
        return firsts

    def of_lane(self, lane: int) -> tuple[int, int]:
        """The first row of a lane, and the first after it."""
        if lane + 1 >= len(self._firsts):
            return 0, 0
        return self._firsts[lane], self._firsts[lane + 1]

    def find(self, lane: int, moment: int) -> int | None:
        """The gap of a lane in which a moment lies."""
        first, last = self.of_lane(lane)
        row = first + int(np.searchsorted(self.start[first:last], moment, "right")) - 1
        return row if row >= first and moment < self.end[row] else None


@dataclass(frozen=True)
class GapFilter:
    """Which gaps to list: those that meet every condition that is set."""

    lanes: Collection[int] | None = None
    causes: Collection[str] | None = None
    steps: tuple[int, int] | None = None
    """From, and up to but without."""
    shortest_ns: int = 0
    steady: bool = False
    between: bool = False

    def rows(self, table: GapTable) -> NDArray[np.intp]:
        """The rows of the gaps that it lets pass."""
        keep = table.length >= self.shortest_ns
        if self.lanes is not None:
            keep &= np.isin(table.lane, list(self.lanes))
        if self.causes is not None:
            keep &= np.isin(table.cause, [IDLE_CAUSES.index(cause) for cause in self.causes])
        if self.steps is not None:
            keep &= (table.step >= self.steps[0]) & (table.step < self.steps[1])
        if self.steady:
            keep &= table.steady
        if self.between:
            keep &= table.between
        return np.flatnonzero(keep)


def tabulate(lanes: Sequence[Lane], found: FoundSteps) -> GapTable:
    """The gaps of all lanes; a lane's number is its place among them."""
    parts = [_of_lane(number, lane, found) for number, lane in enumerate(lanes)]
    return join(parts)


def join(parts: Sequence[GapTable]) -> GapTable:
    """The rows of several tables, one after another."""
    if not parts:
        nothing = np.empty(0, np.int64)
        return GapTable(
            *(nothing.astype(kind) for kind in ("i2", "i8", "i8", "i1", "i4", "?", "?"))
        )
    return GapTable(
        *(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(GapTable))
    )


def order(
    table: GapTable, rows: NDArray[np.intp], by: str = "length", *, descending: bool = True
) -> NDArray[np.intp]:
    """Some rows sorted by one of `SORTS`; equal ones by their length, the longest first."""
    key = getattr(table, by)[rows].astype(np.int64)
    return rows[np.lexsort((rows, -table.length[rows], -key if descending else key))]


def _of_lane(number: int, lane: Lane, found: FoundSteps) -> GapTable:
    gaps = lane.timeline.gaps
    windows = found.by_rank.get(lane.gpu.rank)
    step = _steps(windows, gaps.start, gaps.end)
    steady = step >= (found.warmup if windows is not None else 0)
    return GapTable(
        lane=np.full(len(gaps), number, np.int16),
        start=gaps.start,
        end=gaps.end,
        cause=lane.causes.within(gaps.start, gaps.end).argmax(axis=-1).astype(np.int8),
        step=step,
        steady=steady & (step != NO_STEP),
        between=_between(windows, gaps.start, gaps.end),
    )


def _steps(windows: StepWindows | None, start: Times, end: Times) -> NDArray[np.int32]:
    if windows is None or not len(windows):
        return np.full(len(start), NO_STEP, np.int32)
    middle = (start + end) // 2
    number = np.searchsorted(windows.start, middle, "right") - 1
    inside = (number >= 0) & (middle < windows.end[np.maximum(number, 0)])
    return np.where(inside, number, NO_STEP).astype(np.int32)


def _between(windows: StepWindows | None, start: Times, end: Times) -> NDArray[np.bool_]:
    """Whether a step begins in each gap."""
    if windows is None:
        return np.zeros(len(start), bool)
    first = np.searchsorted(windows.start, start, "left")
    return np.asarray(first < np.searchsorted(windows.start, end, "left"))
