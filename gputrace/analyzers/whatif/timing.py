"""From recorded times to the lags of a graph: what each call and operation started after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from gputrace.analyzers.intervals import EMPTY, Intervals, Times
from gputrace.analyzers.whatif.graph import LONG_AGO, NONE, Index
from gputrace.analyzers.whatif.items import Items
from gputrace.traces.events import Mask
from gputrace.traces.ids import distinct_ids

USUAL_LATENCY_NS: Final = 6_000
USUAL_SPACING_NS: Final = 1_500
"""Where a window has too few operations to tell: from a launch, and from one kernel to the next."""
_ENOUGH: Final = 20
SLACK_NS: Final = 15_000
"""An operation that starts so much later than usual is late by chance; by more, for a cause."""
QUEUE: Final = 1_000
"""Launches that a GPU takes, at least, before the next must wait; 1,030 were seen on an H200."""
_NEARLY: Final = 0.8
_BLOCKED_NS: Final = 50_000


class HostTimes(NamedTuple):
    """Of each call, see `Graph`."""

    gap: Times
    data: Times
    hand: Index
    hand_lag: Times


def host_times(
    items: Items,
    previous: Index,
    hand: Index,
    data: Mapping[int, Intervals],
) -> HostTimes:
    """The thread's own time before each call, and how much of it was spent waiting for data."""
    since = np.where(previous >= 0, items.returned[previous], 0)
    gap = np.where(items.thread >= 0, items.begin - since, 0)
    hand_lag = np.where(hand >= 0, items.begin - items.returned[hand], 0)
    since = np.where(hand >= 0, items.returned[hand], since)
    waited = np.zeros(len(items), np.int64)
    for thread in distinct_ids(items.thread[items.thread >= 0]).tolist():
        rows = np.flatnonzero((items.thread == thread) & ((previous >= 0) | (hand >= 0)))
        own = data.get(thread, EMPTY)
        waited[rows] = own.within(since[rows] + items.base, items.begin[rows] + items.base)
    return HostTimes(np.where(hand >= 0, 0, gap), waited, hand, hand_lag)


class StartTimes(NamedTuple):
    """Of each operation, see `Graph`; what remains unexplained is more than `SLACK_NS`."""

    latency: Times
    spacing: Times
    residual: Times
    bound: Times
    """The earliest start by call and stream."""


def start_times(items: Items, before: Index) -> StartTimes:
    """What each operation's start is after: its call, or the operation before it on the stream."""
    runs = items.stream >= 0
    called = np.where(items.thread >= 0, items.begin, 0)
    free = np.where(before >= 0, items.end[before], LONG_AGO)
    lag, pause = items.start - called, items.start - free
    has_call = runs & (items.thread >= 0)
    usual = _usual(lag[has_call & (called > free) & (lag < SLACK_NS)], USUAL_LATENCY_NS)
    queued = has_call & (called + 2 * usual < free) & (pause >= 0) & (pause < SLACK_NS)
    close = _usual(pause[queued], USUAL_SPACING_NS)
    latency = np.where(has_call, np.minimum(lag, usual), 0)
    alone = runs & (items.thread < 0) & (before < 0)
    latency = np.where(alone, items.start, latency)
    spacing = np.where(before >= 0, np.minimum(pause, close), 0)
    by_call, by_stream = called + latency, free + spacing
    late = np.where(runs, items.start - np.maximum(by_call, by_stream), 0)
    little = late <= SLACK_NS
    latency += np.where(little & (by_call >= by_stream), late, 0)
    spacing += np.where(little & (by_call < by_stream), late, 0)
    bound = np.maximum(called + latency, free + spacing)
    return StartTimes(latency, spacing, np.where(little, 0, late), bound)


def _usual(samples: Times, otherwise: int) -> int:
    return int(np.median(samples)) if len(samples) >= _ENOUGH else otherwise


class Queueing(NamedTuple):
    """See `Graph`."""

    slot: Index
    own: Times
    gap: Times


def find_slots(items: Items, gpu: Index, own: Times, host: HostTimes) -> Queueing:
    """The operation whose start makes room for each launch: so many are queued at most.

    As many as were ever seen, or `QUEUE` where a host never ran so far ahead. A launch that found
    the queue full took long for that alone, and what freed it is what started just before it
    returned: places come free several at a time. So did a thread that was silent with a full queue:
    calls that need a place, too, need not have been recorded (of events).
    """
    slots = np.full(len(items), NONE, np.int64)
    own, gap = own.copy(), host.gap.copy()
    lanes = [_Lane.of(items, gpu, one) for one in distinct_ids(gpu[gpu >= 0]).tolist()]
    depth = max([QUEUE, *(int(lane.waiting(items.begin).max(initial=0)) for lane in lanes)])
    launches = (items.thread >= 0) & (items.stream >= 0)
    usual = int(np.median(own[launches])) if launches.any() else 0
    long = max(_BLOCKED_NS, 10 * usual)
    silent = np.where(host.hand < 0, host.gap - host.data, 0)
    for lane in lanes:
        rows = lane.rows
        slots[rows[depth:]] = rows[: max(len(rows) - depth, 0)]
        for spent, since, until in (
            (silent, items.begin - host.gap, items.begin),
            (own, items.begin, items.returned),
        ):
            blocked, freed = lane.blocked(spent > long, since, until, _NEARLY * depth)
            slots[blocked] = freed
            (gap if spent is silent else own)[blocked] = usual
    return Queueing(slots, own, gap)


class _Lane(NamedTuple):
    """The launches of one GPU."""

    rows: Index
    by_start: Index
    """In order of start on the GPU."""
    started: Times

    @classmethod
    def of(cls, items: Items, gpu: Index, one: int) -> _Lane:
        rows = np.flatnonzero((gpu == one) & (items.thread >= 0) & (items.stream >= 0))
        by_start = rows[np.argsort(items.start[rows], kind="stable")]
        return cls(rows, by_start, items.start[by_start])

    def waiting(self, since: Times) -> Times:
        """How many were queued at the moment given for each launch."""
        gone = np.searchsorted(self.started, since[self.rows], "right")
        return np.arange(1, len(self.rows) + 1) - gone

    def blocked(self, long: Mask, since: Times, until: Times, full: float) -> tuple[Index, Index]:
        """The launches that waited for a place from one moment until another, and what freed it.

        Of those issued before the first start that is seen, how much was queued is not known.
        """
        unseen = since[self.rows] < self.started[:1]
        found = long[self.rows] & (unseen | (self.waiting(since) >= full))
        freed = np.searchsorted(self.started, until[self.rows], "right") - 1
        found &= (freed >= 0) & (self.started[freed] > since[self.rows])
        return self.rows[found], self.by_start[freed[found]]
