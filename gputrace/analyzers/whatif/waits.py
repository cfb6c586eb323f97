"""What synchronising calls waited for: operations that ended just before the calls returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from gputrace.analyzers.host import Call
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.whatif.items import Items
from gputrace.traces.events import Column, Kind, Mask

_WAKE_NS: Final = 60_000
"""A call that returns this soon after an operation ended had waited for it."""
SHORT_NS: Final = 5_000
"""What a synchronising call takes when there is nothing to wait for."""
_STAGED_NS: Final = 30_000
"""A copy call that lasts longer, until its copy is done, holds the host."""

_EVERY_STREAM = ("Device", "Ctx", "Thread", "Free", "Unmap", "Release")
"""Parts of names of calls that wait for all streams."""

Waits = dict[int, tuple[tuple[int, int], ...]]


class Waiting(NamedTuple):
    """See `Graph`."""

    own: Times
    waits: Waits


def find_waits(
    items: Items, sort: Column, kind: Column, blocks: Mask, names: Mapping[int, str], name: Column
) -> Waiting:
    """Which operations each synchronising, freeing or blocking copy call waited for.

    The recorded times tell: of the operations issued before the call, those that ended before it
    returned, and within it. ``blocks`` tells copies from or to pageable memory.
    """
    own = np.where(items.thread >= 0, items.returned - items.begin, 0)
    waits: Waits = {}
    stream, process = items.stream.tolist(), items.process.tolist()
    last: dict[int, int] = {}
    latest: dict[int, int] = {}  # the stream that each thread issued to last
    copies = np.isin(kind, (Kind.COPY_H2D, Kind.COPY_D2H)) & (items.thread >= 0)
    held = copies & blocks & (own > _STAGED_NS) & (items.returned > items.start)
    matters = np.isin(sort, (Call.SYNC, Call.ALLOC)) & (items.thread >= 0)
    finder = _Finder(items)
    for i in range(len(stream)):
        if i and process[i] != process[i - 1]:
            last.clear()
        if matters[i]:
            every = any(part in names[int(name[i])] for part in _EVERY_STREAM)
            found = finder.find(i, last, None if every else latest.get(int(items.thread[i])))
            if sort[i] == Call.SYNC or any(binds for _, binds in found):
                waits[i], own[i] = finder.edges(i, found, int(own[i]))
        if stream[i] >= 0:
            last[stream[i]] = i
            latest[int(items.thread[i])] = stream[i]
            if held[i]:
                waits[i] = ((i, int(items.returned[i] - items.end[i])),)
                own[i] = min(int(own[i]), SHORT_NS)
    return Waiting(own, waits)


Found = list[tuple[int, bool]]
"""Operations, and whether the call had to wait for them."""


class _Finder:
    def __init__(self, items: Items) -> None:
        self.begin, self.returned = items.begin.tolist(), items.returned.tolist()
        self.end = items.end.tolist()

    def find(self, i: int, last: Mapping[int, int], stream: int | None) -> Found:
        """The latest operation of each stream, or of one, that had ended when the call returned.

        Without one to wait for on its own stream, a call may have waited for another's.
        """
        done = {s: j for s, j in last.items() if self.end[j] <= self.returned[i] + SHORT_NS}
        found = [(j, self._binds(i, j)) for s, j in done.items()]
        if stream is None:
            return found
        binding = [(j, binds) for j, binds in found if binds]
        if binding:
            return [max(binding, key=lambda pair: self.end[pair[0]])]
        return [(done[stream], False)] if stream in done else []

    def _binds(self, i: int, j: int) -> bool:
        return bool(self.begin[i] < self.end[j] > self.returned[i] - _WAKE_NS)

    def edges(self, i: int, found: Found, ns: int) -> tuple[tuple[tuple[int, int], ...], int]:
        """The edges of a call, and what it takes by itself."""
        waited = any(binds for _, binds in found)
        wake = SHORT_NS
        edges = tuple((j, min(wake, self.returned[i] - self.end[j])) for j, _ in found)
        if waited:
            latest = max((j for j, binds in found if binds), key=lambda j: self.end[j])
            edges = tuple(
                (j, self.returned[i] - self.end[j] if j == latest else lag) for j, lag in edges
            )
        return edges, min(ns, SHORT_NS) if waited else ns
