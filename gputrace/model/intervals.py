"""Sets of nanoseconds as sorted, disjoint, half-open intervals, in exact integer arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gputrace.model.struct import Struct
from gputrace.native import address, library

Times = NDArray[np.int64]
_Columns = tuple[Times, ...]
IndexArray = NDArray[np.intp]

_WORTH_A_CALL = 64
"""Times for which a call of the C library is quicker than numpy's."""


class Intervals(Struct, frozen=True, dict=True):
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
        return int(self.lengths.sum())

    @cached_property
    def _memory(self) -> tuple[int, int, int, _Columns]:
        """The addresses of the columns as the C library takes them, their length, and they."""
        start, end = (
            np.ascontiguousarray(self.start, np.int64),
            np.ascontiguousarray(self.end, np.int64),
        )
        return address(start), address(end), min(len(start), len(end)), (start, end)

    @cached_property
    def _covered(self) -> Times:
        """Nanoseconds of the set before each interval, and at the end all of them."""
        covered = np.zeros(len(self) + 1, np.int64)
        if (native := library()) is not None:
            edges = [np.ascontiguousarray(edge, np.int64) for edge in (self.start, self.end)]
            native.gputrace_sum_lengths(*map(address, edges), len(self), address(covered))
            return covered
        np.subtract(self.end, self.start, out=covered[1:])
        np.cumsum(covered, out=covered)
        return covered

    def before(self, times: ArrayLike) -> Times:
        """Return how many nanoseconds of the set lie before each time; shape as ``times``."""
        times = np.asarray(times, np.int64)
        if not len(self.start):
            return np.zeros_like(times)
        if times.size > _WORTH_A_CALL and (native := library()) is not None:
            times = np.ascontiguousarray(times)
            result = np.empty_like(times)
            (start, end, count, _), whole = self._memory, address(self._covered)
            native.gputrace_covered_before(
                start, end, whole, count, address(times), times.size, address(result)
            )
            return result
        times = np.asarray(np.maximum(times, self.start[0]))
        index = self.start.searchsorted(times, "right")
        unfinished = np.maximum(self.end.take(index - 1) - times, 0)
        return np.asarray(self._covered.take(index) - unfinished)

    def within(self, starts: ArrayLike, ends: ArrayLike) -> Times:
        """Return the nanoseconds of the set inside each window ``[start, end)``."""
        return self.before(ends) - self.before(starts)

    def contains(self, times: ArrayLike) -> NDArray[np.bool_]:
        """Return whether each time is in the set."""
        times = np.asarray(times, np.int64)
        if not len(self.start):
            return np.zeros(times.shape, bool)
        if times.size >= _WORTH_A_CALL and (native := library()) is not None:
            times, inside = np.ascontiguousarray(times), np.empty(times.shape, bool)
            native.gputrace_contains(*self._memory[:3], address(times), times.size, address(inside))
            return inside
        index = np.searchsorted(self.start, times, "right") - 1
        return (index >= 0) & (times < self.end[np.maximum(index, 0)])

    def select(self, rows: NDArray[np.bool_] | slice) -> Intervals:
        """Return some of the intervals, in their order."""
        return Intervals(self.start[rows], self.end[rows])

    def clip(self, start: int, end: int) -> Intervals:
        """Return the part of the set inside ``[start, end)``."""
        if start >= end:
            return EMPTY
        first = int(np.searchsorted(self.end, start, "right"))
        inside = self.select(slice(first, int(np.searchsorted(self.start, end, "left"))))
        if len(inside) and (inside.start[0] < start or inside.end[-1] > end):
            inside = Intervals(np.maximum(inside.start, start), np.minimum(inside.end, end))
        return inside

    def complement(self, start: int, end: int) -> Intervals:
        """Return the nanoseconds of ``[start, end)`` that are not in the set."""
        inside = self.clip(start, end)
        starts = np.concatenate([[start], inside.end])
        ends = np.concatenate([inside.start, [end]])
        # Between two intervals there always is something; before and after them there may not be.
        last = len(starts) - int(starts[-1] >= ends[-1])
        rows = slice(int(starts[0] >= ends[0]), last)
        return Intervals(starts[rows], ends[rows])

    def intersection(self, other: Intervals) -> Intervals:
        """Return the nanoseconds that are in both sets."""
        if not len(self) or not len(other):
            return EMPTY
        if (native := library()) is not None:
            return _written(native.gputrace_intersect, self, other)
        first = np.searchsorted(other.end, self.start, "right")
        met = np.maximum(np.searchsorted(other.start, self.end, "left") - first, 0)
        mine = np.repeat(np.arange(len(self)), met)
        theirs = np.arange(len(mine)) + np.repeat(first - np.cumsum(met) + met, met)
        return Intervals(
            np.maximum(self.start[mine], other.start[theirs]),
            np.minimum(self.end[mine], other.end[theirs]),
        )

    def difference(self, other: Intervals) -> Intervals:
        """Return the nanoseconds of this set that are not in the other."""
        if not len(self) or not len(other):
            return self
        if (native := library()) is not None:
            return _written(native.gputrace_subtract, self, other)
        return self.intersection(other.complement(int(self.start[0]), int(self.end[-1])))


def search(ordered: Times, times: Times, side: Literal["left", "right"] = "left") -> IndexArray:
    """Return where times belong in a sorted column: before its equals, or after them.

    Done as ``numpy.searchsorted`` does; quicker where most times are near the one before.
    """
    if times.size < _WORTH_A_CALL or (native := library()) is None:
        return np.searchsorted(ordered, times, side)
    ordered, times = np.ascontiguousarray(ordered, np.int64), np.ascontiguousarray(times, np.int64)
    places = np.empty(times.shape, np.int64)
    given = address(ordered), len(ordered), address(times), times.size, side == "right"
    native.gputrace_search_sorted(*given, address(places))
    return places


def number_windows(ordered: Times, starts: Times, ends: Times) -> IndexArray:
    """Return for each time of a sorted column the last window that starts before it or with it;
    -1 where that has ended, and before all windows.

    Args:
        ordered: nanoseconds.
        starts, ends: of windows in order of start.
    """
    first = np.append(np.searchsorted(ordered, starts), len(ordered))
    number = np.repeat(np.arange(-1, len(starts)), np.diff(first, prepend=0))
    ended = np.maximum(np.searchsorted(ordered, ends), first[:-1])
    for end, until in zip(ended.tolist(), first[1:].tolist(), strict=True):
        number[end:until] = -1
    return number


def _written(function: Any, a: Intervals, b: Intervals) -> Intervals:
    """Return the set that a function of the C library makes of two."""
    result = np.empty((2, len(a) + len(b)), np.int64)
    at = address(result)
    return _kept(result, function(*a._memory[:3], *b._memory[:3], at, at + result.strides[0]))


def _kept(result: Times, count: int) -> Intervals:
    """Return the first intervals of those that there is room for, in no more than twice theirs."""
    kept = result[:, :count]
    return Intervals(*(kept if 2 * count > result.shape[1] else kept.copy()))


def merge_touching(first: Intervals, second: Intervals) -> Intervals:
    """Return the nanoseconds that are in either set."""
    if not len(first) or not len(second):
        return first if len(first) else second
    if (native := library()) is not None:
        return _written(native.gputrace_merge_sets, first, second)
    starts, ends = ((getattr(first, edge), getattr(second, edge)) for edge in ("start", "end"))
    return union(np.concatenate(starts), np.concatenate(ends))


EMPTY = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def lie_in(start: Times, end: Times, windows: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return the mask of intervals that lie in one window each; windows are in order."""
    begins, ends = np.array(windows, np.int64).reshape(-1, 2).T
    place = np.searchsorted(begins, start, "right") - 1
    inside: NDArray[np.bool_] = place >= 0
    inside[inside] = end[inside] <= ends[place[inside]]
    return inside


def union(start: ArrayLike, end: ArrayLike, *, is_sorted: bool = False) -> Intervals:
    """Return the union of any intervals: overlapping or touching ones joined, empty ones dropped.

    Args:
        start, end: nanoseconds, of one length, in any order unless ``is_sorted`` by start.
    """
    start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
    if (native := library()) is not None and start.shape == end.shape:
        joined = _joined(native, np.ascontiguousarray(start), np.ascontiguousarray(end))
        if joined is not None:
            return joined
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


def union_of(start: Times, end: Times, group: NDArray[np.int8], groups: range) -> Intervals:
    """Return the union of the intervals of some groups, numbered up to 127; sorted by start."""
    if (native := library()) is not None:
        start, end = np.ascontiguousarray(start), np.ascontiguousarray(end)
        joined = _joined(native, start, end, np.ascontiguousarray(group), groups)
        if joined is not None:
            return joined
    rows = (group >= groups.start) & (group < groups.stop)
    return union(start[rows], end[rows], is_sorted=True)


def _joined(
    native: Any,
    start: Times,
    end: Times,
    group: NDArray[np.int8] | None = None,
    groups: range = range(0),
) -> Intervals | None:
    """Return the union of intervals, by the C library; None unless they are sorted by start."""
    result = np.empty((2, len(start)), np.int64)
    at = address(result)
    which = None if group is None else address(group), groups.start, groups.stop
    count = native.gputrace_join_intervals(
        address(start), address(end), len(start), *which, at, at + result.strides[0]
    )
    return None if count < 0 else _kept(result, count)
