"""The kernels of a run counted by name, on each GPU and over all of them.

The median over all GPUs is not that of their medians, and nobody has all launches in one place: it
lies between the least and the greatest of those, and is found by asking each GPU how many of its
launches are no longer than some lengths there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.intervals import Intervals, Times
from gputrace.analyzers.kernels.launches import LaunchTimes, look_at
from gputrace.analyzers.per_gpu import HasGpu, PerGpu
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.events import Kind
from gputrace.traces.ids import number_ids

_LENGTH_BITS: Final = 40
"""A kernel's nanoseconds fit in so many bits: 18 minutes."""
_LONGEST: Final = (1 << _LENGTH_BITS) - 1
_PACKED: Final = "packed kernels"
_ASKED: Final = 16
"""Lengths of each name that are asked about at once."""
_TOGETHER: Final = 512
"""GPUs that are asked at once."""

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Counted:
    """The kernels of one GPU that start in some stretches of time, by name; arrays of one length.

    Attributes:
        code: of each name, in order.
        count: how many there are.
        total: nanoseconds of all.
        median: nanoseconds of the (lower) middle one.
        launches: what their launching cost.
    """

    code: Codes
    count: NDArray[np.int64]
    total: Times
    median: Times
    launches: LaunchTimes

    @property
    def kernels(self) -> int:
        """How many there are of all names."""
        return int(self.count.sum())


def count(one: OneGpu, windows: Intervals, codes: dict[int, int], most: int) -> Counted:
    """Counts the kernels of a GPU.

    Args:
        one: the GPU.
        windows: in which they start.
        codes: by name id.
        most: kernels of which calls are looked up at most.
    """
    own = one.operations
    rows = np.flatnonzero((own.events.kind == Kind.KERNEL) & windows.contains(own.start))
    packed = one.keep(_PACKED, _pack(one, rows, codes))
    if not len(packed):
        nothing = np.empty(0, np.int64)
        return Counted(nothing, nothing, nothing, nothing, look_at(one, rows, most))
    edges = np.searchsorted(
        packed, np.arange((int(packed[-1]) >> _LENGTH_BITS) + 2) << _LENGTH_BITS
    )
    code = np.flatnonzero(np.diff(edges))
    first, counts = edges[code], np.diff(edges)[code]
    totals = np.add.reduceat(packed & _LONGEST, first)
    medians = packed[first + (counts - 1) // 2] & _LONGEST
    return Counted(code, counts, totals, medians, look_at(one, rows, most))


def _pack(one: OneGpu, rows: NDArray[np.intp], codes: dict[int, int]) -> NDArray[np.int64]:
    """The code of each one's name, and in the lower bits its length; in order."""
    own = one.operations
    distinct, where = number_ids(own.events.name[rows])
    packed = np.array([codes[id] << _LENGTH_BITS for id in distinct.tolist()], np.int64).take(where)
    packed |= np.minimum(own.end[rows] - own.start[rows], _LONGEST)
    packed.sort()
    return packed


def medians(gpus: PerGpu, of: Sequence[HasGpu], counted: Sequence[Counted]) -> dict[int, int]:
    """By code, nanoseconds of the (lower) middle one of all kernels of some GPUs."""
    codes, place = np.unique(np.concatenate([own.code for own in counted]), return_inverse=True)
    known = np.concatenate([own.median for own in counted])
    low, high = np.full(len(codes), _LONGEST), np.zeros(len(codes), np.int64)
    np.minimum.at(low, place, known)
    np.maximum.at(high, place, known)
    count = np.zeros(len(codes), np.int64)
    np.add.at(count, place, np.concatenate([own.count for own in counted]))
    wanted = (count - 1) // 2 + 1
    while len(left := np.flatnonzero(low < high)):
        asked = low[left, None] + (high - low)[left, None] * np.arange(_ASKED) // _ASKED
        found = _counted_on_all(gpus, of, codes[left], asked)
        low[left], high[left] = _narrowed(asked, found >= wanted[left, None], high[left])
    return dict(zip(codes.tolist(), low.tolist(), strict=True))


def _counted_on_all(
    gpus: PerGpu, of: Sequence[HasGpu], codes: Codes, lengths: Times
) -> NDArray[np.int64]:
    """As `_no_longer` of all GPUs; of some thousand, not all answers are held at once."""
    found = np.zeros(lengths.shape, np.int64)
    for first in range(0, len(of), _TOGETHER):
        for own in gpus.each(_no_longer, of[first : first + _TOGETHER], same=(codes, lengths)):
            found += own
    return found


def _narrowed(asked: Times, enough: NDArray[np.bool_], high: Times) -> tuple[Times, Times]:
    """Where each median is: above the last length of too few kernels, up to the next one asked."""
    first = np.where(enough.any(axis=1), enough.argmax(axis=1), _ASKED)
    rows = np.arange(len(asked))
    below = asked[rows, np.maximum(first - 1, 0)] + 1
    above = np.where(first < _ASKED, asked[rows, np.minimum(first, _ASKED - 1)], high)
    return np.where(first > 0, below, asked[:, 0]), above


def _no_longer(one: OneGpu, codes: Codes, lengths: Times) -> NDArray[np.int64]:
    """How many kernels of each name are no longer than some lengths of each."""
    packed, names = one.kept(_PACKED), codes[:, None] << _LENGTH_BITS
    found: NDArray[np.int64] = np.searchsorted(packed, names | lengths, "right")
    return found - np.searchsorted(packed, names)


def forget(one: OneGpu) -> None:
    """Gives back what `count` keeps for `medians`."""
    one.keep(_PACKED, None)
