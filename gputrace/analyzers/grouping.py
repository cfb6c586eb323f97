"""Rows and steps grouped by GPU or rank, and leave-one-out medians, for runs of thousands of
ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gputrace.model.events import Column, Events, distinct_ids
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.options import Window
from gputrace.model.results import Step


def rows_by(groups: Column, count: int) -> list[NDArray[np.intp]]:
    """Return the rows of each group from 0 to ``count``, in order; others are in no group."""
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(count + 1))
    pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return [order[first:end] for first, end in pairs]


class OfGpu(Protocol):
    """Anything of one GPU of one rank: a GPU itself, or a row of a result."""

    @property
    def gpu(self) -> int | None: ...
    @property
    def rank(self) -> int: ...


class StepsOf:
    """Steps by whose they are: ``StepsOf(steps)(gpu)`` are those of one GPU, in order."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._of_gpu = defaultdict[tuple[Any, int], list[Step]](list)
        self._of_rank = defaultdict[int, dict[int, Step]](dict)
        for step in steps:
            self._of_gpu[step.gpu, step.rank].append(step)
            self._of_rank[step.rank][step.step] = step

    def __call__(self, whose: OfGpu) -> Sequence[Step]:
        return self._of_gpu.get((whose.gpu, whose.rank), ())

    def time(self, whose: OfGpu, window: Window) -> Intervals:
        """Return the time of one GPU's steps, or a window where it has none."""
        return time_of(self(whose)) if self(whose) else union([window.start], [window.end])

    def of_rank(self, rank: int) -> Sequence[Step]:
        """Return the steps of a rank: of each, that on the last of its GPUs."""
        return [*self._of_rank.get(rank, {}).values()]


def edges_of(steps: Iterable[Step]) -> Times:
    """Return starts and ends of steps: shape (2, steps)."""
    rows = [(step.start_ns, step.end_ns) for step in steps]
    return np.array(rows, np.int64).reshape(-1, 2).T


def time_of(steps: Iterable[Step]) -> Intervals:
    """Return the time in which any of some steps runs."""
    return union(*edges_of(steps))


def overlap(windows: Sequence[Window]) -> Window:
    """Return the time that all windows have in common; of no length where they have none."""
    start = max(window.start for window in windows)
    return Window(start, max(start, min(window.end for window in windows)))


def median_of_others(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return for each row the median of all other rows, column by column; at least two rows."""
    order = np.argsort(values, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0).astype(np.float64)
    place = np.argsort(order, axis=0, kind="stable")
    others = len(values) - 1
    low, high = (
        np.where(place <= middle, ordered[middle + 1], ordered[middle])
        for middle in ((others - 1) // 2, others // 2)
    )
    middle: NDArray[np.float64] = (low + high) / 2
    return middle


def median(values: ArrayLike, axis: Literal[0] | None = None) -> Any:
    """Return the median as ``numpy.median`` does, which imports masked arrays for floats and takes
    twenty times as long for a hundred numbers.
    """
    known = np.asarray(values).ravel() if axis is None else np.asarray(values)
    middle = [(len(known) - 1) // 2, len(known) // 2]
    if not len(known):
        return np.median(known, axis=0)
    if known.dtype.kind in "iu" and known.ndim == 1:
        # Dividing at one place takes a fifth of dividing at two.
        ordered = np.partition(known, middle[0])
        high = ordered[middle[0]] if len(known) % 2 else ordered[middle[1] :].min()
        return (np.float64(ordered[middle[0]]) + np.float64(high)) / 2
    ordered = np.partition(known, [*middle, -1], axis=0)
    if known.dtype.kind == "f" and known.ndim == 1:
        low, high, last = ordered[middle[0]], ordered[middle[1]], ordered[-1]
        return last if np.isnan(last) else (low + high) / 2
    # NaN comes last.
    of_all = np.mean(ordered[middle[0] : middle[1] + 1], axis=0)
    return np.where(np.isnan(ordered[-1]), np.nan, of_all)[()]


def median_of_known(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each column over the rows that are not NaN; NaN where all are."""
    ordered = np.sort(table, axis=0)
    count = np.count_nonzero(~np.isnan(table), axis=0)
    low, high = (
        np.take_along_axis(ordered, at[None], axis=0)[0]
        for at in (np.maximum(count - 1, 0) // 2, np.minimum(count // 2, len(table) - 1))
    )
    middle: NDArray[np.float64] = (low + high) / 2
    return middle


def quantile(values: Iterable[float], part: float) -> float:
    """Return the value below which a part of at least one value lies, between two in proportion."""
    ordered = sorted(values)
    whole, rest = divmod(part * (len(ordered) - 1), 1)
    low, high = ordered[int(whole)], ordered[min(int(whole) + 1, len(ordered) - 1)]
    # As numpy rounds it, whose function imports its masked arrays.
    return low + (high - low) * rest if rest < 0.5 else high - (high - low) * (1 - rest)


def times_by_process(events: Events) -> dict[int, Intervals]:
    """Return the union of some events' times by process."""
    by_process = {}
    for process in distinct_ids(events.process).tolist():
        mine = events.process == process
        by_process[process] = union(events.start[mine], events.end[mine])
    return by_process
