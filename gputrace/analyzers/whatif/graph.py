"""Dependency graph of consecutive steps (host calls, GPU operations, waits), its replay, and the
time of a step that no prediction undercuts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.host_calls import Call, CudaApiCalls
from gputrace.analyzers.operations import Gpu, OperationClass
from gputrace.analyzers.whatif.step_rows import SCENE, Rows
from gputrace.model.events import Mask, distinct_ids, number_ids
from gputrace.model.intervals import Times
from gputrace.model.results import Breakdown

Index = NDArray[np.int64]
Edges = Mapping[int, tuple[tuple[int, int], ...]]
"""By item, the items it waits for, each with the lag after its end in nanoseconds."""

NONE: Final = -1
LONG_AGO: Final = -(1 << 60)


@dataclass(frozen=True)
class Graph:
    """Dependency graph: one entry per item in each column, sorted by process and order of issue.

    An item is a host call with the first operation that it issued, if any, or an operation alone.
    Times are integer nanoseconds.
    """

    order: Index
    """Items in the order of replay."""
    # The call.
    thread: Index
    """Number of the host thread; `NONE` for an operation whose call is unknown."""
    sort: NDArray[np.int8]
    """Kind of call: a `Call`."""
    gap: Times
    """Host time of the thread before the call; for the first call of a thread, its start."""
    data: Times
    """Part of ``gap``, or of ``hand_lag``, in which the thread waited for data."""
    hand: Index
    """Call of another thread that hands over to this one, or `NONE`."""
    hand_lag: Times
    """Host time between the return of that call and the start of this one."""
    own: Times
    """Duration of the call without waiting."""
    waits: Edges
    """Operations that must have ended before the call returns."""
    slot: Index
    """Operation whose start frees the slot in the launch queue for this call, or `NONE`."""
    # The operation.
    stream: Index
    """Number of the stream; `NONE` where the call issued nothing."""
    latency: Times
    """Time from the start of the call to the earliest start of the operation."""
    spacing: Times
    """Time from the end of the stream's previous operation to the earliest start."""
    after: Edges
    """Operations on other streams that must have ended before it starts."""
    residual: Times
    """Unexplained delay of its start."""
    ns: Times
    """Duration; for a collective, from the last arrival."""
    group: Index
    """Collective that it belongs to, or `NONE`."""
    # Description of the operation.
    operation: NDArray[np.int8]
    """Its `OperationClass`, or `NONE`."""
    kind: NDArray[np.int8]
    """Its `Kind`, or `NONE`."""
    pageable: NDArray[np.bool_]
    size: Times
    """Bytes copied."""
    name: Index
    rank: Index
    gpu: Index
    """Number of the GPU."""
    process: Index
    step: Index
    """Step in which the operation runs, counted from 0, or `NONE`."""
    start: Times
    """Recorded start of the operation, or of the call where there is none."""
    end: Times
    """Recorded end of the same."""

    def __len__(self) -> int:
        return len(self.thread)

    @property
    def steps(self) -> int:
        return int(self.step.max(initial=-1)) + 1

    def changed(self, **columns: Any) -> Graph:
        """Return a copy with some columns replaced."""
        return replace(self, **columns)


_FAR: Final = 1 << 40
"""Offset between threads, longer than any window, to take one running maximum over all."""
HAND_OVER_NS: Final = 30_000
"""Silence after which a thread is taken to wait for another active thread of its process."""
_FARTHEST_HAND: Final = 400
"""Maximum number of calls searched backwards for the one that handed over."""


@dataclass(frozen=True)
class Items:
    """Items by process and time of issue; times relative to ``base``, absent indices -1."""

    call: Index
    """Index of the call in the trace."""
    operation: Index
    """Row of the operation."""
    leader: Index
    """Item that has the call, for every further operation of a call."""
    process: Index
    thread: Index
    begin: Times
    """Start of the call; `LONG_AGO` without one."""
    returned: Times
    stream: Index
    start: Times
    """Start of the operation; without one, of the call."""
    end: Times
    base: int
    """Origin of the times, on the trace's clock."""

    def __len__(self) -> int:
        return len(self.call)


def make_items(rows: Rows, calls: CudaApiCalls) -> Items:
    """Make items of the operations, their calls, and the waiting or allocating calls between."""
    outer, owner = _outermost(calls, _kept(rows, calls), rows.call)
    first = np.full(len(outer), NONE, np.int64)
    known = np.flatnonzero(owner >= 0)
    first[owner[known][::-1]] = known[::-1]  # the last write wins: the earliest of each call
    separate = np.ones(len(rows.call), bool)
    separate[first[first >= 0]] = False
    extra = np.flatnonzero(separate)
    call = np.concatenate([outer, np.full(len(extra), NONE, np.int64)])
    operation = np.concatenate([first, extra])
    leads = np.concatenate([np.full(len(outer), NONE, np.int64), owner[extra]])
    order, process = _in_order(rows, calls, call, operation, leads)
    new_index = np.empty(len(order), np.int64)
    new_index[order] = np.arange(len(order))
    leader = np.where(leads >= 0, new_index[leads], NONE)[order]
    return _with_times(rows, calls, call[order], operation[order], leader, process)


def _kept(rows: Rows, calls: CudaApiCalls) -> Index:
    """Return the issuing calls, and all waiting or allocating calls between those of a thread."""
    issuing = distinct_ids(rows.call[rows.call >= 0])
    kept = [issuing]
    for thread in distinct_ids(calls.thread[issuing]).tolist():
        of_thread = issuing[calls.thread[issuing] == thread]
        between = np.arange(of_thread[0], of_thread[-1] + 1)
        kept.append(between[np.isin(calls.sort[between], (Call.SYNC, Call.ALLOC))])
    return distinct_ids(np.concatenate(kept))


def _outermost(calls: CudaApiCalls, kept: Index, issued: Index) -> tuple[Index, Index]:
    """Return the calls not nested in another, and the index among them for each operation."""
    if not len(kept):
        return kept, np.full(len(issued), NONE, np.int64)
    apart = calls.thread[kept].astype(np.int64) * _FAR - int(calls.start[kept].min())
    reach = np.maximum.accumulate(calls.end[kept] + apart)
    inside = np.concatenate([[False], (calls.start[kept] + apart)[1:] < reach[:-1]])
    index = np.cumsum(~inside) - 1
    position = np.minimum(np.searchsorted(kept, issued), len(kept) - 1)
    return kept[~inside], np.where(issued >= 0, index[position], NONE)


def _in_order(
    rows: Rows, calls: CudaApiCalls, call: Index, operation: Index, leads: Index
) -> tuple[Index, Index]:
    """Return the order by process and issue, and the process of each item in that order."""
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
    rows: Rows, calls: CudaApiCalls, call: Index, operation: Index, leader: Index, process: Index
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
    """Return, for each item, the previous one on its lane (thread or stream), or `NONE`."""
    rows = np.flatnonzero(lane >= 0)
    rows = rows[np.argsort(lane[rows], kind="stable")]
    same = lane[rows][1:] == lane[rows][:-1]
    before = np.full(len(lane), NONE, np.int64)
    before[rows[1:][same]] = rows[:-1][same]
    return before


def find_hands(items: Items, previous: Index) -> Index:
    """Return, for each call, the call of another thread that it had to wait for, or `NONE`.

    A thread waits if it is silent while another thread of its process issues work, and resumes
    afterwards: the forward pass hands over to the thread of the backward pass, and back. The first
    call of a thread waits for the last one of the process before it.
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


def is_sort(calls: CudaApiCalls, call: Index, *sorts: Call) -> NDArray[np.bool_]:
    """Return a mask of the items whose call is one of ``sorts``."""
    return (call >= 0) & np.isin(calls.sort[call], sorts)


_LONGEST: Final = 500
"""Maximum items in a segment, so that no launch needs the slot of another in it: see `QUEUE`."""


class Segments(NamedTuple):
    """Items in replay order, divided into parts: segments, and single items.

    The items of a segment depend only on their thread and stream, so it is replayed as arrays.
    """

    items: Index
    first: Index
    """First position of each part in ``items``."""
    last: Index
    """Last position of each part in ``items``."""
    inside: Index
    """Positions in ``items`` of those in segments."""
    stretch: Index
    """Segment of each of these."""
    alone: Mask
    """Mask of single items; like all columns below, by position in ``items``."""
    calls: Times
    """Time from when the thread is free for the part until the call returns."""
    busy: Times
    """Time from when the stream is free for the part until the operation ends."""
    lead: Times
    """Time from when the thread is free for the part until the operation ends, minus ``busy``."""
    ahead: Times
    """Running maximum of ``lead`` in the part."""

    def ends(self, threads: Times, streams: Times) -> tuple[Times, Times]:
        """Return when the calls in segments return, and when their operations end.

        Args:
            threads, streams: when thread and stream are free for the segment of each item.
        """
        ended = np.maximum(streams, threads + self.ahead[self.inside]) + self.busy[self.inside]
        return threads + self.calls[self.inside], ended

    def queued(
        self, rows: slice, thread_free: int, stream_free: int, slot_free: Times
    ) -> tuple[Times, Times]:
        """Return the times of `ends` for one segment whose launches wait for a queue slot.

        Args:
            rows: positions of the segment.
            thread_free, stream_free: when its thread and stream are free.
            slot_free: when the slot of each launch becomes free.
        """
        calls = self.calls[rows]
        free = np.maximum.accumulate(np.maximum(slot_free - calls, thread_free))
        before = np.concatenate([[thread_free], free[:-1]])
        ended = np.maximum.accumulate(np.maximum(before + self.lead[rows], stream_free))
        return free + calls, ended + self.busy[rows]


def divide(graph: Graph, shortest: int) -> Segments:
    """Divide the items into segments of at least ``shortest`` items, and single items."""
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
    return Segments(items, first, last, inside, stretch, alone, calls, busy, lead, ahead)


def _begins(graph: Graph, alone: Mask) -> Mask:
    """Return a mask, in replay order, of the items that begin a part."""
    thread, stream = graph.thread[graph.order], graph.stream[graph.order]
    new: Mask = np.arange(len(graph)) % _LONGEST == 0
    new[1:] |= alone[1:] | alone[:-1] | (thread[1:] != thread[:-1]) | (stream[1:] != stream[:-1])
    return new


def _tied(graph: Graph) -> Mask:
    """Return a mask of items with dependencies, in either direction, beyond thread and stream."""
    tied = (graph.thread < 0) | (graph.stream < 0) | (graph.group >= 0) | (graph.hand >= 0)
    tied[graph.hand[graph.hand >= 0]] = True
    tied |= (graph.slot >= 0) & (np.arange(len(graph)) - graph.slot < _LONGEST)
    for edges in (graph.waits, graph.after):
        tied[list(edges)] = True
        tied[[cause for cause, _ in chain.from_iterable(edges.values())]] = True
    return tied


def _sums(values: Times, first: Index, part: Index) -> Times:
    """Return running sums that restart at each part."""
    sums = np.cumsum(values)
    return sums - (sums - values)[first][part]


def _highest(values: Times, part: Index) -> Times:
    """Return running maxima that restart at each part."""
    apart = part * (np.ptp(values) + 1) if len(values) else part
    return np.maximum.accumulate(values + apart) - apart


def order_items(
    process: Index, before: Index, group: Index, after: Edges, waits: Edges
) -> tuple[Index, Index]:
    """Return a topological order, and the collectives that are consistent with it.

    Each process is followed in order of issue until an item depends on a collective that another
    process has yet to join. On a deadlock, one blocking collective is dissolved.
    """
    group = group.copy()
    needs = _needs(before, group, after, waits)
    matters = np.union1d(np.flatnonzero(group >= 0), np.fromiter(needs, np.int64, len(needs)))
    missing = np.bincount(group[group >= 0], minlength=1).tolist()
    edges = np.flatnonzero(np.diff(process)) + 1
    bounds = np.concatenate([[0], edges, [len(process)]]).tolist()
    cursors, ends = bounds[:-1], bounds[1:]
    stops = [
        [*matters[(matters >= a) & (matters < b)].tolist(), b]
        for a, b in zip(cursors, ends, strict=True)
    ]
    reached = [0] * len(ends)
    order: list[range] = []
    done = 0
    while done < len(process):
        done_before, blocked = done, NONE
        for number, end in enumerate(ends):
            first = cursors[number]
            while reached[number] < len(stops[number]):
                item = stops[number][reached[number]]
                cursors[number] = item
                lacking = [n for n in needs.get(item, ()) if missing[n] > 0 and group[item] != n]
                if lacking:
                    blocked = lacking[0]
                    break
                if item < end and group[item] >= 0:
                    missing[group[item]] -= 1
                reached[number] += 1
            order.append(range(first, cursors[number]))
            done += cursors[number] - first
        if done == done_before and blocked != NONE:
            missing[blocked] = 0
            group[group == blocked] = NONE
    return np.concatenate([np.arange(part.start, part.stop) for part in order]), group


def _needs(before: Index, group: Index, after: Edges, waits: Edges) -> dict[int, list[int]]:
    """Return the collectives that items depend on, by item."""
    needs: dict[int, list[int]] = {}
    follows = np.flatnonzero((before >= 0) & (group[before] >= 0))
    for i, number in zip(follows.tolist(), group[before[follows]].tolist(), strict=True):
        needs.setdefault(i, []).append(number)
    for edges in (after, waits):
        for i, causes in edges.items():
            groups = [int(group[j]) for j, _ in causes if group[j] >= 0]
            if groups:
                needs.setdefault(i, []).extend(groups)
    return needs


_WORTH_ARRAYS: Final = 16
"""Minimum items for which a segment with a full launch queue is faster as arrays."""


def replay(graph: Graph) -> Times:
    """Return when the operation of each item ends; for items without one, when the call does.

    The first pass assumes unlimited launch queues. If a launch then returns before its slot in the
    queue is free, a second pass models the queues.
    """
    endless = _Replay(graph, queued=False)
    return (endless if endless.fits else _Replay(graph, queued=True)).ended


class _Replay:
    """Replay of a graph: when each item begins on the GPU and ends, and when its call returns."""

    def __init__(self, graph: Graph, queued: bool) -> None:
        self.graph = graph
        self.parts = parts = divide(graph, _WORTH_ARRAYS if queued else 1)
        self.ended, self.returned = np.zeros((2, len(graph)), np.int64)
        self.began = np.zeros(len(graph) + 1, np.int64)
        self.began[-1] = LONG_AGO  # Index `NONE`: the slot of launches that need none.
        free = self._walk(queued)
        if not queued:
            self._store(parts.inside, *parts.ends(*free[:, parts.stretch]))

    @property
    def fits(self) -> bool:
        """True if the slot of each launch is free when its call returns."""
        early = self.began[self.graph.slot] > self.returned
        return not (early & (self.graph.thread >= 0)).any()

    def _store(self, rows: slice | Index, returned: Times, ended: Times) -> None:
        items = self.parts.items[rows]
        self.returned[items], self.ended[items] = returned, ended
        self.began[items] = ended - self.graph.ns[items]

    def _queued_segment(self, part: int, thread_free: int, stream_free: int) -> tuple[int, int]:
        """Replay a segment whose launches wait for slots; return the end on thread and stream."""
        rows = slice(self.parts.first[part], self.parts.last[part] + 1)
        slot_free = self.began[self.graph.slot[self.parts.items[rows]]]
        returned, ended = self.parts.queued(rows, thread_free, stream_free, slot_free)
        self._store(rows, returned, ended)
        return int(returned[-1]), int(ended[-1])

    def _walk(self, queued: bool) -> Times:  # noqa: C901 (see below)
        """Replay the parts in order.

        A single loop over plain integers, about half a microsecond a part: function calls would
        double that.

        Returns:
            When the thread (row 0) and the stream (row 1) are free for each segment.
        """
        g, parts = self.graph, self.parts
        waits, after = g.waits, g.after
        thread_free = [0] * (int(g.thread.max(initial=0)) + 1)
        stream_free = [LONG_AGO] * (int(g.stream.max(initial=0)) + 1)
        began, ended, returned = [0] * len(g), [0] * len(g), [0] * len(g)
        missing = np.bincount(g.group[g.group >= 0], minlength=1).tolist()
        arrived = [LONG_AGO] * len(missing)
        members: list[list[tuple[int, int, int]]] = [[] for _ in missing]
        segments_free = []

        # Columns by part: sums over a segment, and those of the graph for the part's first item.
        calls, busy, ahead = (
            column[parts.last].tolist() for column in (parts.calls, parts.busy, parts.ahead)
        )
        items = parts.items[parts.first]
        gap, call_ns, latency, spacing, residual, run_ns = (
            column[items].tolist()
            for column in (g.gap, g.own, g.latency, g.spacing, g.residual, g.ns)
        )
        group, hand, hand_lag = (column[items].tolist() for column in (g.group, g.hand, g.hand_lag))
        slot = g.slot[items].tolist() if queued else [NONE] * len(items)
        single = parts.alone[parts.first].tolist()
        threads, streams = g.thread[items].tolist(), g.stream[items].tolist()

        for part, (item, thread, stream) in enumerate(
            zip(items.tolist(), threads, streams, strict=True)
        ):
            if not single[part]:
                host, gpu = thread_free[thread], stream_free[stream]
                segments_free.append((host, gpu))
                if queued:
                    host, gpu = self._queued_segment(part, host, gpu)
                    thread_free[thread], stream_free[stream] = host, gpu
                else:
                    ready = host + ahead[part]
                    thread_free[thread] = host + calls[part]
                    stream_free[stream] = (gpu if gpu > ready else ready) + busy[part]
                continue
            call_begin = call_end = 0
            if thread >= 0:
                call_begin = thread_free[thread] + gap[part]
                if hand[part] >= 0:
                    handed_over = returned[hand[part]] + hand_lag[part]
                    if handed_over > call_begin:
                        call_begin = handed_over
                call_end = call_begin + call_ns[part]
            if stream >= 0:
                start = call_begin + latency[part]
                ready = stream_free[stream] + spacing[part]
                if ready > start:
                    start = ready
                if item in after:
                    for cause, lag in after[item]:
                        if ended[cause] + lag > start:
                            start = ended[cause] + lag
                start += residual[part]
                began[item] = start
                if queued:
                    self.began[item] = start
                collective = group[part]
                if collective < 0:
                    ended[item] = stream_free[stream] = start + run_ns[part]
                else:
                    members[collective].append((item, stream, run_ns[part]))
                    missing[collective] -= 1
                    if start > arrived[collective]:
                        arrived[collective] = start
                    if not missing[collective]:
                        for member, member_stream, ns in members[collective]:
                            end = arrived[collective] + ns
                            ended[member] = stream_free[member_stream] = end
            if thread >= 0:
                if item in waits:
                    for cause, lag in waits[item]:
                        if ended[cause] + lag > call_end:
                            call_end = ended[cause] + lag
                if slot[part] >= 0:
                    slot_free = int(self.began[slot[part]])
                    if slot_free > call_end:
                        call_end = slot_free
                returned[item] = thread_free[thread] = call_end
                if stream < 0:
                    ended[item] = call_end

        alone = parts.items[parts.alone].tolist()
        for times, replayed in (
            (self.began, began),
            (self.ended, ended),
            (self.returned, returned),
        ):
            times[alone] = [replayed[item] for item in alone]
        return np.array(segments_free, np.int64).reshape(-1, 2).T


class Measure(NamedTuple):
    """Step lengths of a replay."""

    lengths: NDArray[np.float64]
    """Mean length over the GPUs that have steps, by step, without the first `SCENE` steps."""

    @property
    def mean(self) -> float:
        """Return the mean step in nanoseconds."""
        return float(self.lengths.mean()) if len(self.lengths) else 0.0


def standard_error(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def measure(graph: Graph, ended: Times) -> Measure:
    """Return the step lengths of a replay."""
    ends = step_ends(graph, ended)
    ends = ends[(ends > LONG_AGO).all(axis=1)]
    if not len(ends):
        return Measure(np.empty(0))
    return Measure(np.diff(ends[:, SCENE - 1 :], axis=1).mean(axis=0))


def step_ends(graph: Graph, ended: Times) -> Times:
    """Return when the last operation of each step of each GPU ends, of shape (gpus, steps).

    A step in which a GPU did nothing ends with the previous step.
    """
    gpus = int(graph.gpu.max(initial=-1)) + 1
    ends = np.full((gpus, graph.steps), LONG_AGO, np.int64)
    rows = np.flatnonzero((graph.stream >= 0) & (graph.step >= 0))
    np.maximum.at(ends.reshape(-1), graph.gpu[rows] * graph.steps + graph.step[rows], ended[rows])
    return np.maximum.accumulate(ends, axis=1)


@dataclass(frozen=True)
class Recorded:
    """Time of the measured steps, by which predictions are bounded."""

    compute: NDArray[np.float64]
    """Mean compute of a step, in nanoseconds, by GPU of the graph; 0 for a GPU without steps."""
    rows: Sequence[Breakdown]
    """Breakdown of the GPUs that do the work."""
    mean_ns: int
    """Mean step of the whole run, to which gains are scaled."""

    @classmethod
    def of(
        cls,
        gpus: Sequence[Gpu],
        breakdown: Sequence[Breakdown],
        rows: Sequence[Breakdown],
        mean_ns: int,
    ) -> Recorded:
        """Return what a run's GPUs, in the order of the graph, have recorded.

        Args:
            gpus: GPUs of the graph.
            breakdown: rows of all GPUs.
            rows: those of the GPUs that do the work.
            mean_ns: mean step.
        """
        means = {
            (row.gpu, row.rank): row.of("compute") / row.steps for row in breakdown if row.steps
        }
        compute = np.array([means.get((gpu.gpu, gpu.rank), 0.0) for gpu in gpus])
        return cls(compute, rows, mean_ns)

    def floor(self, graph: Graph, edit: Graph, shortens: Collection[str] = ()) -> int:
        """Return the nanoseconds of a step that an edit of the graph leaves.

        The busiest GPU's compute stays, as far as the edit leaves it, and so does what the edit
        cannot shorten, if that is known.

        Args:
            graph: dependency graph of some steps.
            edit: the same with an optimization.
            shortens: classes of time that the edit can shorten at most; empty for any.
        """
        left = self.compute * _part_left(graph, edit, len(self.compute))
        least = math.ceil(float(left.max(initial=0.0)))
        if shortens:
            parts = [sum(map(row.of, shortens)) // max(row.steps, 1) for row in self.rows]
            least = max(least, self.mean_ns - max(parts, default=0))
        return min(least, self.mean_ns)


def _part_left(graph: Graph, edit: Graph, gpus: int) -> NDArray[np.float64]:
    """Return the part of each GPU's compute that an edit leaves; all of it where none was seen."""
    before, after = _kernel_time(graph, gpus), _kernel_time(edit, gpus)
    return np.divide(after, before, out=np.ones(gpus), where=before > 0)


def _kernel_time(graph: Graph, gpus: int) -> NDArray[np.float64]:
    """Return the nanoseconds that the computing kernels of each GPU take in the graph."""
    computes = (graph.stream >= 0) & (graph.operation == OperationClass.COMPUTE)
    return np.bincount(graph.gpu[computes], graph.ns[computes], gpus).astype(np.float64)
