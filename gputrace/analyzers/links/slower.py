"""Which links of a run are slower than others of it, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.collectives.matched import Collectives
from gputrace.analyzers.intervals import Intervals, union
from gputrace.analyzers.links.hardware import badness
from gputrace.analyzers.links.measure import FEWEST, Links, by_class, speeds_of

_SLOWER: Final = 1.1
"""So many times as long must the middle transfer take, to be no scatter."""
_MOSTLY: Final = 75
"""Percent of the transfers that must be on their side of the others' middle."""
_FEWEST_PAIRS: Final = 10
"""Collectives of two groups that are compared one by one."""
_EDGE: Final = 3
"""Collectives that one group may have more, where the recording begins or ends between them."""


@dataclass(frozen=True)
class Slower:
    """Links of one sort that are slower than those of another sort."""

    what: str
    """``copies`` or ``collectives``."""
    link: str
    than: str
    ratio: float
    """How many times as long the same takes; above 1."""
    bandwidth: int | None
    """Bytes per second; None where the size is not known."""
    than_bandwidth: int | None
    busy: Mapping[int, Intervals]
    """When each GPU, by its place, was in such a transfer."""


def slower_links(links: Links) -> Iterator[Slower]:
    """The sorts of links that are measurably slower than the best of those in use."""
    yield from _by_copies(links)
    yield from _by_collectives(links)


def _by_copies(links: Links) -> Iterator[Slower]:
    classes = by_class(links)
    speeds = {name: speeds_of(copies) for name, copies in classes.items()}
    known = {name: speed for name, speed in speeds.items() if len(speed) >= FEWEST}
    if len(known) < 2:
        return
    best = max(known, key=lambda name: float(np.median(known[name])))
    fast = known[best]
    for name, slow in known.items():
        ratio = float(np.median(fast) / np.median(slow))
        apart = np.percentile(slow, _MOSTLY) < np.percentile(fast, 100 - _MOSTLY)
        if ratio >= _SLOWER and apart and badness(name) > badness(best):
            rates = round(float(np.median(slow))), round(float(np.median(fast)))
            busy = {gpu: classes[name].on(gpu) for gpu in range(len(links.gpus))}
            yield Slower("copies", name, best, ratio, *rates, busy)


def _by_collectives(links: Links) -> Iterator[Slower]:
    """Groups of as many GPUs that run the same collectives in turn, over links of two sorts."""
    groups = {lanes: links.topology.worst([links.gpus[i] for i in lanes]) for lanes in links.groups}
    series = {lanes: _series(links.collectives, lanes) for lanes, name in groups.items() if name}
    found: dict[str, Slower] = {}
    for slow, fast in permutations(series, 2):
        if len(slow) != len(fast) or badness(groups[slow]) <= badness(groups[fast]):
            continue
        ratio = _ratio(series[slow], series[fast])
        if ratio is not None and ratio > found.get(groups[slow], _NONE).ratio:
            busy = {lane: _transfers(links.collectives, slow, lane) for lane in slow}
            name = groups[slow]
            found[name] = Slower("collectives", name, groups[fast], ratio, None, None, busy)
    yield from found.values()


_NONE: Final = Slower("", "", "", 0.0, None, None, {})


@dataclass(frozen=True)
class _Series:
    """The collectives of one group of GPUs in order: what each is, and how long it transfers."""

    name: NDArray[np.int16]
    bytes: NDArray[np.int64]
    ns: NDArray[np.int64]


def _rows_of(collectives: Collectives, lanes: tuple[int, ...], lane: int) -> NDArray[np.intp]:
    """The rows of one GPU in the joint operations of just these GPUs, in order."""
    one = collectives
    inside = np.isin(one.lane, lanes)
    count = np.bincount(one.instance)
    within = np.bincount(one.instance[inside], minlength=len(count))
    whole = (count == len(lanes)) & (within == count)
    return np.flatnonzero(one.joint & one.known & whole[one.instance] & (one.lane == lane))


def _series(collectives: Collectives, lanes: tuple[int, ...]) -> _Series:
    rows = _rows_of(collectives, lanes, lanes[0])
    ns = collectives.end[rows] - collectives.start[rows] - collectives.wait[rows]
    return _Series(collectives.operation[rows], collectives.bytes[rows], ns)


def _ratio(slow: _Series, fast: _Series) -> float | None:
    """How many times as long each takes in the one group as in the other; None if not longer.

    A recording may begin or end between the two: of the few ways to lay the one series beside the
    other, that in which the ratios scatter least.
    """
    tried = [_ratios(slow, fast, offset) for offset in range(-_EDGE, _EDGE + 1)]
    ways = [ratios for ratios in tried if len(ratios) >= _FEWEST_PAIRS]
    if abs(len(slow.ns) - len(fast.ns)) > _EDGE or not ways:
        return None
    ratios = min(ways, key=lambda ratios: float(np.std(np.log(ratios))))
    ratio = float(np.median(ratios))
    return ratio if ratio >= _SLOWER and np.percentile(ratios, 100 - _MOSTLY) > 1 else None


def _ratios(slow: _Series, fast: _Series, offset: int) -> NDArray[np.float64]:
    """The ratio of each to the one so many places later; none where these are not the same."""
    own, other = max(0, -offset), max(0, offset)
    count = max(0, min(len(slow.ns) - own, len(fast.ns) - other))
    mine, theirs = slice(own, own + count), slice(other, other + count)
    same = (slow.name[mine] == fast.name[theirs]) & (slow.bytes[mine] == fast.bytes[theirs])
    if not same.all():
        return np.empty(0)
    return np.maximum(slow.ns[mine], 1) / np.maximum(fast.ns[theirs], 1)


def _transfers(collectives: Collectives, lanes: tuple[int, ...], lane: int) -> Intervals:
    rows = _rows_of(collectives, lanes, lane)
    starts = collectives.start[rows] + collectives.wait[rows]
    return union(starts, collectives.end[rows])
