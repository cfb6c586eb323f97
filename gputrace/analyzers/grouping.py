"""Rows and steps put together by whose they are, once for all: runs may have thousands of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.intervals import Intervals, union
from gputrace.analyzers.results import Step
from gputrace.traces.events import Column
from gputrace.traces.trace import Window


def rows_by(groups: Column, count: int) -> list[NDArray[np.intp]]:
    """For each group from 0 to ``count``, its rows in order; others are in no group."""
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(count + 1))
    pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return [order[first:end] for first, end in pairs]


class OfGpu(Protocol):
    """What is of one GPU of one rank: a GPU itself, or a row of a result."""

    @property
    def gpu(self) -> int | None: ...
    @property
    def rank(self) -> int: ...


class StepsOf:
    """Steps by whose they are: ``StepsOf(steps)(gpu)`` are those of one GPU, in order."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = steps_by_gpu(steps)

    def __call__(self, whose: OfGpu) -> Sequence[Step]:
        return self._steps.get((whose.gpu, whose.rank), ())


def stretches(steps: Sequence[Step], window: Window) -> Intervals:
    """The time of some steps of a GPU, or a window where there are none."""
    if not steps:
        return union([window.start], [window.end])
    return union([step.start_ns for step in steps], [step.end_ns for step in steps])


def steps_by_gpu(steps: Iterable[Step]) -> dict[tuple[Any, int], list[Step]]:
    """The steps by GPU and rank, in order."""
    found: dict[tuple[Any, int], list[Step]] = {}
    for step in steps:
        found.setdefault((step.gpu, step.rank), []).append(step)
    return found
