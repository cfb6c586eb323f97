"""The replay of a graph: its longest path.

Stretches are gone through at once; only the other items, one in twenty of a training, one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from gputrace.analyzers.intervals import Times
from gputrace.analyzers.whatif.graph import LONG_AGO, NONE, Graph, Index
from gputrace.analyzers.whatif.stretches import divide

_WORTH_ARRAYS: Final = 16
"""Items that a stretch must have to be quicker at once where its launches wait for places."""


def replay(graph: Graph) -> Times:
    """When the operation of each item ends; of items without one, when the call does.

    At first as if a GPU took any number of launches. If one then returns before there is a place
    for it in the queue, all is gone through again with the queues as they are.
    """
    endless = _Replay(graph, queued=False)
    return (endless if endless.fits else _Replay(graph, queued=True)).ended


class _Replay:
    """What is found out of each item: when it begins on the GPU, ends, and its call returns."""

    def __init__(self, graph: Graph, queued: bool) -> None:
        self.graph = graph
        self.parts = parts = divide(graph, _WORTH_ARRAYS if queued else 1)
        self.ended, self.returned = np.zeros((2, len(graph)), np.int64)
        self.began = np.zeros(len(graph) + 1, np.int64)
        self.began[-1] = LONG_AGO  # Of the place of a launch that needs none: see `NONE`.
        free = self._walk(queued)
        if not queued:
            self._keep(parts.inside, *parts.ends(*free[:, parts.stretch]))

    @property
    def fits(self) -> bool:
        """Whether each launch has its place in the queue when its call returns."""
        early = self.began[self.graph.slot] > self.returned
        return not (early & (self.graph.thread >= 0)).any()

    def _keep(self, rows: slice | Index, returned: Times, ended: Times) -> None:
        items = self.parts.items[rows]
        self.returned[items], self.ended[items] = returned, ended
        self.began[items] = ended - self.graph.ns[items]

    def _stretch(self, part: int, t: int, s: int) -> tuple[int, int]:
        """One whose launches wait for places, and when its thread and stream are free then."""
        rows = slice(self.parts.first[part], self.parts.last[part] + 1)
        places = self.began[self.graph.slot[self.parts.items[rows]]]
        returned, ended = self.parts.queued(rows, t, s, places)
        self._keep(rows, returned, ended)
        return int(returned[-1]), int(ended[-1])

    def _walk(self, queued: bool) -> Times:  # noqa: C901 (see below)
        """Goes through the parts; when each stretch had its thread and its stream, in two rows.

        One tight loop over plain numbers, half a microsecond a part: calls would double that.
        """
        g, waits, after = self.graph, self.graph.waits, self.graph.after
        free = [LONG_AGO] * (int(g.stream.max(initial=0)) + 1)
        reached = [0] * (int(g.thread.max(initial=0)) + 1)
        began, ended, returned = [0] * len(g), [0] * len(g), [0] * len(g)
        missing = np.bincount(g.group[g.group >= 0], minlength=1).tolist()
        arrived = [LONG_AGO] * len(missing)
        members: list[list[tuple[int, int, int]]] = [[] for _ in missing]
        frees = []
        for part, alone, at, on, calls, busy, ahead, item in self._listed(queued):
            t, s = reached[at], free[on]
            if not alone:
                frees.append((t, s))
                if queued:
                    reached[at], free[on] = self._stretch(part, t, s)
                else:
                    reached[at] = t + calls
                    free[on] = (s if s > t + ahead else t + ahead) + busy
                continue
            i, gap, own, latency, spacing, ns, residual, which, place, hand, hand_lag = item
            begin = done = 0
            if at >= 0:
                begin = t + gap
                if hand >= 0 and returned[hand] + hand_lag > begin:
                    begin = returned[hand] + hand_lag
                done = begin + own
            if on >= 0:
                start = begin + latency
                if s + spacing > start:
                    start = s + spacing
                if i in after:
                    for j, lag in after[i]:
                        if ended[j] + lag > start:
                            start = ended[j] + lag
                start += residual
                began[i] = start
                if queued:
                    self.began[i] = start
                if which < 0:
                    ended[i] = free[on] = start + ns
                else:
                    members[which].append((i, on, ns))
                    missing[which] -= 1
                    if start > arrived[which]:
                        arrived[which] = start
                    if not missing[which]:
                        for j, stream, length in members[which]:
                            ended[j] = free[stream] = arrived[which] + length
            if at >= 0:
                if i in waits:
                    for j, lag in waits[i]:
                        if ended[j] + lag > done:
                            done = ended[j] + lag
                if place >= 0 and self.began[place] > done:
                    done = int(self.began[place])
                returned[i] = reached[at] = done
                if on < 0:
                    ended[i] = done
        single = self.parts.items[self.parts.alone].tolist()
        for times, found in (self.began, began), (self.ended, ended), (self.returned, returned):
            times[single] = [found[i] for i in single]
        return np.array(frees, np.int64).reshape(-1, 2).T

    def _listed(self, queued: bool) -> Iterator[tuple[Any, ...]]:
        """Of each part, what it is and what its sums come to, and what its first item is."""
        g, parts = self.graph, self.parts
        items, last = parts.items[parts.first], parts.last
        slot = g.slot if queued else np.full(len(g), NONE)
        of_item = [g.gap, g.own, g.latency, g.spacing, g.ns, g.residual]
        of_item += [g.group, slot, g.hand, g.hand_lag]
        columns = parts.alone[last], g.thread[items], g.stream[items]
        sums = parts.calls[last], parts.busy[last], parts.ahead[last]
        item = zip(items.tolist(), *(column[items].tolist() for column in of_item), strict=True)
        listed = (column.tolist() for column in (*columns, *sums))
        return zip(range(len(items)), *listed, item, strict=True)
