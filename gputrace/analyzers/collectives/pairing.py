"""Kernels of one name on several GPUs, paired into the collectives that they are.

The same kernel runs on every rank of a communicator, in one order. Where a window was cut or rows
are lost, time tells which belong together: nobody leaves an all-reduce before the last has come, so
that its kernels overlap, and end at about the same moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.intervals import Times
from gputrace.traces.events import UNKNOWN, Mask
from gputrace.traces.trace import Window

_SLACK_NS: Final = 20_000
"""Two clocks of GPUs on one machine may disagree by this much."""
_SCATTER: Final = 0.2
"""Ends of one all-reduce differ by no more of its length than this, in the middle case."""
_FIT: Final = 0.95
"""Part of the pairs that must overlap for an order to be believed."""
_FEWEST: Final = 5
"""So many kernels at least have ends that tell: the first of a communicator end far apart."""
ALONE: Final = 0
"""How many GPUs take part where nobody has to come."""
_SHARED: Final = 0.5
"""Part of the shorter sequence that must find partners where the order does not tell."""


@dataclass(frozen=True)
class Part:
    """Kernels of one name on one GPU, in order of start."""

    lane: int
    row: NDArray[np.int64]
    start: Times
    end: Times

    def __len__(self) -> int:
        return len(self.row)

    def select(self, rows: Mask | NDArray[np.int64]) -> Part:
        return Part(self.lane, self.row[rows], self.start[rows], self.end[rows])


Group = list[tuple[Part, NDArray[np.int64]]]
"""Parts that share collectives: of each, the number of the collective of every row."""


def group(parts: Sequence[Part], *, joint: bool) -> list[Group]:
    """Parts put together that ran the same collectives.

    The longest part numbers them; rows of others that find no partner there are tried again.

    Args:
        parts: not empty, at most one a GPU.
        joint: whether nobody leaves such a collective before all have come.
    """
    left, groups = list(parts), []
    while left:
        first = max(left, key=len)
        members: Group = [(first, np.arange(len(first)))]
        lonely = []
        for part in left:
            if part is not first:
                place = _pair(first, part, joint)
                found = place != UNKNOWN
                members += [(part.select(found), place[found])] if found.any() else []
                lonely += [part.select(~found)] if not found.all() else []
        groups.append(members)
        left = lonely
    return groups


def _pair(first: Part, other: Part, joint: bool) -> NDArray[np.int64]:
    """For each row of a part, the row of the first that is the same collective, or `UNKNOWN`."""
    if len(first) == len(other):
        place = np.arange(len(first))
        if not joint or _in_order(first, other):
            return place
    place = _nearest_ends(first, other)
    place[(place != UNKNOWN) & ~_overlap(first, other, place)] = UNKNOWN
    found = place != UNKNOWN
    few = np.count_nonzero(found) < _SHARED * min(len(first), len(other))
    if few or not _end_together(first.select(place[found]), other.select(found), joint):
        place[:] = UNKNOWN
    return place


def _in_order(first: Part, other: Part) -> bool:
    """Whether equally many kernels, taken one after the other, are the same collectives."""
    overlap = _overlap(first, other, np.arange(len(first))).mean() >= _FIT
    return bool(overlap) and (len(first) < _FEWEST or _end_together(first, other, True))


def _overlap(first: Part, other: Part, place: NDArray[np.int64]) -> Mask:
    latest = np.maximum(first.start[place], other.start)
    return latest <= np.minimum(first.end[place], other.end) + _SLACK_NS


def _end_together(first: Part, other: Part, joint: bool) -> bool:
    """Whether pairs of rows end together, as those of one communicator must."""
    if not joint:
        return True
    apart = np.median(np.abs(first.end - other.end))
    length = np.median(np.minimum(first.end - first.start, other.end - other.start))
    return bool(apart <= _SLACK_NS + _SCATTER * length)


def _nearest_ends(first: Part, other: Part) -> NDArray[np.int64]:
    """Rows of the first whose ends are nearest to those of the other, where both ways agree."""
    there, back = _nearest(first.end, other.end), _nearest(other.end, first.end)
    return np.where(back[there] == np.arange(len(other)), there, UNKNOWN)


def _nearest(among: Times, moments: Times) -> NDArray[np.int64]:
    """Index of the nearest of some times, for each moment."""
    order = np.argsort(among, kind="stable")
    ordered = among[order]
    after = np.clip(np.searchsorted(ordered, moments), 1, max(len(ordered) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(ordered) - 1)
    nearer = moments - ordered[before] <= ordered[after] - moments
    return order[np.where(nearer, before, after)]


@dataclass(frozen=True)
class Joined:
    """The rows of one group; ``instance`` counts within it."""

    operation: str
    lane: NDArray[np.int16]
    row: NDArray[np.int64]
    instance: NDArray[np.int64]
    lanes: NDArray[np.int64]
    """How many GPUs take part in the collective of each; `ALONE` where nobody has to come."""


def join(spans: Sequence[Window], own: Group, groups: Sequence[Group], operation: str) -> Joined:
    """The rows of one of the groups that a kernel's name has; ``spans`` are of all GPUs."""
    place = np.concatenate([place for _, place in own])
    starts, ends = (np.concatenate([getattr(part, n) for part, _ in own]) for n in ("start", "end"))
    missed = np.zeros(int(place.max()) + 1, np.int64)
    for lane in _relatives(own, groups):
        gone = (starts < spans[lane].start) | (ends > spans[lane].end)
        missed[place[gone]] += 1
    return Joined(
        operation,
        np.concatenate([np.full(len(part), part.lane, np.int16) for part, _ in own]),
        np.concatenate([part.row for part, _ in own]),
        place,
        len(own) + missed[place],
    )


def _relatives(own: Group, groups: Sequence[Group]) -> set[int]:
    """GPUs that share other collectives with those of a group: there, if they were recorded."""
    mine = {part.lane for part, _ in own}
    others = [{part.lane for part, _ in other} for other in groups]
    return set[int]().union(*(lanes for lanes in others if lanes & mine)) - mine
