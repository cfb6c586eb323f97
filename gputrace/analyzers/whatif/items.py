"""The items of a graph: each host call that matters, with the GPU operation that it issued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.host import Call, HostCalls
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.whatif.graph import LONG_AGO, NONE, Index
from gputrace.analyzers.whatif.rows import Rows
from gputrace.traces.ids import distinct_ids, number_ids

_FAR: Final = 1 << 40
"""Nanoseconds, more than a window is long: keeps the threads apart in one running maximum."""
HAND_OVER_NS: Final = 30_000
"""A thread that makes no call for so long, while another of its process does, waits for it."""
_FARTHEST_HAND: Final = 400
"""Calls that are looked through, at most, for the one that handed over."""


@dataclass(frozen=True)
class Items:
    """By process and time of issue; times from the earliest. -1 where there is no such thing."""

    call: Index
    """Of the trace."""
    operation: Index
    """A row of the operations."""
    leader: Index
    """For a further operation of a call, the item that has the call."""
    process: Index
    thread: Index
    begin: Times
    """When the call begins and returns; `LONG_AGO` without one."""
    returned: Times
    stream: Index
    start: Times
    """When the operation starts and ends; without one, when the call does."""
    end: Times
    base: int
    """What the times are counted from, on the trace's clock."""

    def __len__(self) -> int:
        return len(self.call)


def make_items(rows: Rows, calls: HostCalls) -> Items:
    """Calls that issued the operations, and those that wait or allocate among them."""
    outer, owner = _outermost(calls, _kept(rows, calls), rows.call)
    first = np.full(len(outer), NONE, np.int64)
    known = np.flatnonzero(owner >= 0)
    first[owner[known][::-1]] = known[::-1]  # the earliest of each call comes to stand
    alone = np.ones(len(rows.call), bool)
    alone[first[first >= 0]] = False
    extra = np.flatnonzero(alone)
    call = np.concatenate([outer, np.full(len(extra), NONE, np.int64)])
    operation = np.concatenate([first, extra])
    leads = np.concatenate([np.full(len(outer), NONE, np.int64), owner[extra]])
    order, process = _in_order(rows, calls, call, operation, leads)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    leader = np.where(leads >= 0, place[leads], NONE)[order]
    return _with_times(rows, calls, call[order], operation[order], leader, process)


def _kept(rows: Rows, calls: HostCalls) -> Index:
    """The calls that issue, and all that wait or allocate between those of a thread."""
    issuing = distinct_ids(rows.call[rows.call >= 0])
    kept = [issuing]
    for thread in distinct_ids(calls.thread[issuing]).tolist():
        own = issuing[calls.thread[issuing] == thread]
        between = np.arange(own[0], own[-1] + 1)
        kept.append(between[np.isin(calls.sort[between], (Call.SYNC, Call.ALLOC))])
    return distinct_ids(np.concatenate(kept))


def _outermost(calls: HostCalls, kept: Index, issued: Index) -> tuple[Index, Index]:
    """The calls that lie in no other, and for each operation the place of its own among them."""
    if not len(kept):
        return kept, np.full(len(issued), NONE, np.int64)
    apart = calls.thread[kept].astype(np.int64) * _FAR - int(calls.start[kept].min())
    reach = np.maximum.accumulate(calls.end[kept] + apart)
    inside = np.concatenate([[False], (calls.start[kept] + apart)[1:] < reach[:-1]])
    place = np.cumsum(~inside) - 1
    at = np.minimum(np.searchsorted(kept, issued), len(kept) - 1)
    return kept[~inside], np.where(issued >= 0, place[at], NONE)


def _in_order(
    rows: Rows, calls: HostCalls, call: Index, operation: Index, leads: Index
) -> tuple[Index, Index]:
    """The order by process and issue, and the process of each item in that order."""
    processes = np.array([process for process, _ in calls.threads])
    ran = rows.events.start[operation]
    issued = np.where(call >= 0, calls.start[call], ran)
    issued = np.where(leads >= 0, issued[leads], issued)
    process = np.where(
        call >= 0, processes[calls.thread[call]], rows.events.process[operation]
    ).astype(np.int64)
    order = np.lexsort((np.where(operation >= 0, ran, issued), leads >= 0, issued, process))
    return order, process[order]


def _with_times(
    rows: Rows, calls: HostCalls, call: Index, operation: Index, leader: Index, process: Index
) -> Items:
    events = rows.events
    base = int(events.start.min())
    if (call >= 0).any():
        base = min(base, int(calls.start[call[call >= 0]].min()))
    begin = np.where(call >= 0, calls.start[call] - base, LONG_AGO)
    returned = np.where(call >= 0, calls.end[call] - base, LONG_AGO)
    some = operation >= 0
    devices, device = number_ids(events.device)
    streams, stream = number_ids(events.stream)
    device = events.process.astype(np.int64) * len(devices) + device
    _, stream = number_ids(device * len(streams) + stream)
    _, thread = number_ids(calls.thread[call])
    return Items(
        call=call,
        operation=operation,
        leader=leader,
        process=process,
        thread=np.where(call >= 0, thread, NONE),
        begin=begin,
        returned=returned,
        stream=np.where(some, stream[operation], NONE),
        start=np.where(some, events.start[operation] - base, begin),
        end=np.where(some, events.end[operation] - base, returned),
        base=base,
    )


def before_on(lane: Index) -> Index:
    """For each item, the one before it on its lane (a thread or a stream), or `NONE`."""
    rows = np.flatnonzero(lane >= 0)
    rows = rows[np.argsort(lane[rows], kind="stable")]
    same = lane[rows][1:] == lane[rows][:-1]
    found = np.full(len(lane), NONE, np.int64)
    found[rows[1:][same]] = rows[:-1][same]
    return found


def find_hands(items: Items, previous: Index) -> Index:
    """The call of another thread that each call had to wait for, or `NONE`.

    A thread that is silent while another thread of its process issues work, and goes on once that
    one has: so the forward pass hands over to the thread of the backward pass, and back. So does
    the first call of a thread to what the process did before it.
    """
    hands = np.full(len(items), NONE, np.int64)
    silent_from = np.where(previous >= 0, items.returned[previous], LONG_AGO)
    waits = (items.thread >= 0) & (items.begin - silent_from > HAND_OVER_NS)
    begin, returned = items.begin.tolist(), items.returned.tolist()
    thread, process = items.thread.tolist(), items.process.tolist()
    for i in np.flatnonzero(waits).tolist():
        since = int(silent_from[i])
        for j in range(i - 1, max(i - _FARTHEST_HAND, -1), -1):
            if process[j] != process[i] or (thread[j] >= 0 and begin[j] < since):
                break
            if thread[j] >= 0 and thread[j] != thread[i] and returned[j] <= begin[i]:
                hands[i] = j
                break
    return hands


def is_sort(calls: HostCalls, call: Index, *sorts: Call) -> NDArray[np.bool_]:
    """Whether each item's call is of one of some sorts."""
    return (call >= 0) & np.isin(calls.sort[call], sorts)
