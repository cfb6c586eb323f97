"""A graph divided into stretches, which are replayed at once, and items that must be looked at.

Most items depend on nothing but the call before them on their thread and the operation before them
on their stream, and nothing else depends on them. A stretch of such items, begun when its thread is
free (t) and its stream is (s), lets them go at

    t + calls    and    max(s, t + ahead) + busy

whatever t and s are: sums and a maximum over the stretch, found for all stretches at once. Where
launches wait for a place in the queue, t is a maximum over the stretch too.
"""

from __future__ import annotations

from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from gputrace.analyzers.intervals import Times
from gputrace.analyzers.whatif.graph import Graph, Index
from gputrace.traces.events import Mask

_LONGEST: Final = 500
"""Items of a stretch, so that no launch in it needs the place of another: see `QUEUE`."""


class Stretches(NamedTuple):
    """The items in the order of a replay, in parts: stretches, and items that are alone."""

    items: Index
    first: Index
    """Where in ``items`` each part begins."""
    last: Index
    inside: Index
    """Where in ``items`` those of stretches are."""
    stretch: Index
    """Which stretch each of these is of."""
    alone: Mask
    """Of each item in that order, as all below."""
    calls: Times
    """From when the thread is free for the part until the call returns."""
    busy: Times
    """From when the stream is free for the part until the operation ends."""
    lead: Times
    """The same from when the thread is free for the item, less ``busy``."""
    ahead: Times
    """The same from when the thread is free for the part: the most of it so far."""

    def ends(self, threads: Times, streams: Times) -> tuple[Times, Times]:
        """When the calls of stretches return and their operations end.

        Args:
            threads, streams: when they are free for the stretch of each.
        """
        ended = np.maximum(streams, threads + self.ahead[self.inside]) + self.busy[self.inside]
        return threads + self.calls[self.inside], ended

    def queued(self, rows: slice, t: int, s: int, places: Times) -> tuple[Times, Times]:
        """The same for one stretch whose launches wait until there is a place for them."""
        calls = self.calls[rows]
        free = np.maximum.accumulate(np.maximum(places - calls, t))
        before = np.concatenate([[t], free[:-1]])
        ended = np.maximum.accumulate(np.maximum(before + self.lead[rows], s))
        return free + calls, ended + self.busy[rows]


def divide(graph: Graph, shortest: int) -> Stretches:
    """The stretches of so many items, at least, and all others alone."""
    g, items = graph, graph.order
    alone = _tied(g)[items]
    new = _begins(g, alone)
    alone |= np.diff(np.flatnonzero(new), append=len(items))[np.cumsum(new) - 1] < shortest
    new = _begins(g, alone)
    first, part = np.flatnonzero(new), np.cumsum(new) - 1
    ran = g.residual + g.ns
    calls = _sums((g.gap + g.own)[items], first, part)
    busy = _sums((g.spacing + ran)[items], first, part)
    lead = calls + (g.latency + ran - g.own)[items] - busy
    last, inside = np.append(first[1:], len(items)) - 1, np.flatnonzero(~alone)
    stretch = (np.cumsum(~alone[first]) - 1)[part[inside]]
    ahead = _highest(lead, part)
    return Stretches(items, first, last, inside, stretch, alone, calls, busy, lead, ahead)


def _begins(graph: Graph, alone: Mask) -> Mask:
    """In the order of the replay, where a part begins."""
    thread, stream = graph.thread[graph.order], graph.stream[graph.order]
    new: Mask = np.arange(len(graph)) % _LONGEST == 0
    new[1:] |= alone[1:] | alone[:-1] | (thread[1:] != thread[:-1]) | (stream[1:] != stream[:-1])
    return new


def _tied(graph: Graph) -> Mask:
    """Items that depend on more than their thread and stream, or on which more does."""
    tied = (graph.thread < 0) | (graph.stream < 0) | (graph.group >= 0) | (graph.hand >= 0)
    tied[graph.hand[graph.hand >= 0]] = True
    tied |= (graph.slot >= 0) & (np.arange(len(graph)) - graph.slot < _LONGEST)
    for edges in (graph.waits, graph.after):
        tied[list(edges)] = True
        tied[[cause for cause, _ in chain.from_iterable(edges.values())]] = True
    return tied


def _sums(values: Times, first: Index, part: Index) -> Times:
    """Of each part so far."""
    sums = np.cumsum(values)
    return sums - (sums - values)[first][part]


def _highest(values: Times, part: Index) -> Times:
    """Of each part so far."""
    apart = part * (np.ptp(values) + 1) if len(values) else part
    return np.maximum.accumulate(values + apart) - apart
