"""Sets of nanoseconds as sorted, disjoint, half-open intervals, in exact integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Times = NDArray[np.int64]


@dataclass(frozen=True)
class Intervals:
    """A set of nanoseconds: ``start[i] <= t < end[i]``, sorted, none empty, none touching.

    Build one with `union`; the constructor trusts what it is given.
    """

    start: Times
    end: Times

    def __len__(self) -> int:
        return len(self.start)

    @property
    def lengths(self) -> Times:
        """Length of each interval in nanoseconds."""
        return self.end - self.start

    @property
    def total(self) -> int:
        """Nanoseconds in the set."""
        return int(self._covered[-1])

    @cached_property
    def _covered(self) -> Times:
        """Nanoseconds of the set before each interval, and at the end all of them."""
        covered = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.lengths, out=covered[1:])
        return covered

    def before(self, times: ArrayLike) -> Times:
        """How many nanoseconds of the set lie before each time; shape as ``times``."""
        times = np.asarray(times, np.int64)
        if not len(self.start):
            return np.zeros_like(times)
        index = np.searchsorted(self.start, times, "right")
        last = np.maximum(index - 1, 0)
        unfinished = np.maximum(self.end[last] - times, 0)
        return np.where(index > 0, self._covered[index] - unfinished, 0)

    def within(self, starts: ArrayLike, ends: ArrayLike) -> Times:
        """Nanoseconds of the set inside each window ``[start, end)``."""
        return self.before(ends) - self.before(starts)

    def contains(self, times: ArrayLike) -> NDArray[np.bool_]:
        """Whether each time is in the set."""
        times = np.asarray(times, np.int64)
        if not len(self.start):
            return np.zeros(times.shape, bool)
        index = np.searchsorted(self.start, times, "right") - 1
        return (index >= 0) & (times < self.end[np.maximum(index, 0)])

    def clip(self, start: int, end: int) -> Intervals:
        """The part of the set inside ``[start, end)``."""
        if start >= end:
            return EMPTY
        keep = (self.end > start) & (self.start < end)
        return Intervals(np.maximum(self.start[keep], start), np.minimum(self.end[keep], end))

    def complement(self, start: int, end: int) -> Intervals:
        """The nanoseconds of ``[start, end)`` that are not in the set."""
        inside = self.clip(start, end)
        edges = np.array([start]), np.array([end])
        starts = np.concatenate([edges[0], inside.end])
        ends = np.concatenate([inside.start, edges[1]])
        keep = ends > starts
        return Intervals(starts[keep], ends[keep])

    def intersection(self, other: Intervals) -> Intervals:
        """The nanoseconds that are in both sets."""
        if not len(self) or not len(other):
            return EMPTY
        first = np.searchsorted(other.end, self.start, "right")
        end = np.searchsorted(other.start, self.end, "left")
        counts = np.maximum(end - first, 0)
        mine = np.repeat(np.arange(len(self)), counts)
        offsets = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
        theirs = first[mine] + offsets
        return Intervals(
            np.maximum(self.start[mine], other.start[theirs]),
            np.minimum(self.end[mine], other.end[theirs]),
        )

    def difference(self, other: Intervals) -> Intervals:
        """The nanoseconds of this set that are not in the other."""
        if not len(self) or not len(other):
            return self
        low = min(int(self.start[0]), int(other.start[0]))
        high = max(int(self.end[-1]), int(other.end[-1]))
        return self.intersection(other.complement(low, high))


EMPTY = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: ArrayLike, end: ArrayLike, *, is_sorted: bool = False) -> Intervals:
    """The union of any intervals; those that overlap or touch become one, empty ones vanish.

    Args:
        start, end: nanoseconds, of one length, in any order unless ``is_sorted`` by start.
    """
    start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
    keep = end > start
    if not keep.all():
        start, end = start[keep], end[keep]
    if not len(start):
        return EMPTY
    if not is_sorted:
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return Intervals(start[first], reach[last])
