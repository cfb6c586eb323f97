"""Dependency graph of consecutive steps (host calls, GPU operations, waits), its replay, and the
time of a step that no prediction undercuts.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import Call, CudaApiCalls
from gputrace.analyzers.ledger import Ledger
from gputrace.analyzers.operations import Gpu, OperationClass
from gputrace.analyzers.whatif.step_rows import SCENE, Rows
from gputrace.model.events import distinct_ids, is_among, number_ids
from gputrace.model.intervals import Times
from gputrace.model.results import Breakdown
from gputrace.model.struct import Struct
from gputrace.native import address, library

Index = NDArray[np.int64]
Edges = Mapping[int, tuple[tuple[int, int], ...]]
"""By item, the items it waits for, each with the lag after its end in nanoseconds."""

NONE: Final = -1
LONG_AGO: Final = -(1 << 60)


class Held(Struct, frozen=True):
    """Host time that one cause explains."""

    before: Times
    """Part of the time before each call."""
    inside: NDArray[np.bool_]
    """True for the calls that begin in such time."""


class Graph(Struct, frozen=True, dict=True):
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
    held: Mapping[str, Held]
    """Host time that is spent on something else than launching, by cause; with ``data`` at most
    ``gap``, or ``hand_lag``."""
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
    gathers: NDArray[np.bool_]
    """True for a gather of sharded parameters."""
    single: NDArray[np.bool_]
    """True for a matrix product or convolution in FP32 beside the tensor cores."""
    cards: Sequence[str]
    """Model of the card of each GPU; empty where unknown."""
    start: Times
    """Recorded start of the operation, or of the call where there is none."""
    end: Times
    """Recorded end of the same."""

    def __len__(self) -> int:
        return len(self.thread)

    @property
    def steps(self) -> int:
        return int(self.step.max(initial=-1)) + 1

    @cached_property
    def kept(self) -> Times:
        """Return the part of the time before each call that is not spent on launching."""
        return self.data + sum((held.before for held in self.held.values()), np.int64(0))

    def changed(self, **columns: Any) -> Graph:
        """Return a copy with some columns replaced."""
        copy = replace(self, **columns)
        copy.__dict__["_flat"] = self._flat
        return copy

    @cached_property
    def _flat(self) -> dict[int, tuple[Edges, tuple[Index, Index, Times]]]:
        """Edges as columns, by the address of the mapping, for all graphs made of this one."""
        return {}

    def edges(self, edges: Edges) -> tuple[Index, Index, Times]:
        """Return the first edge of each item, and cause and lag of all edges."""
        if id(edges) not in self._flat:
            waiting = sorted(edges)
            counts = np.zeros(len(self) + 1, np.int64)
            counts[np.array(waiting, np.int64) + 1] = [len(edges[item]) for item in waiting]
            pairs = [pair for item in waiting for pair in edges[item]]
            cause, lag = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
            self._flat[id(edges)] = edges, (np.cumsum(counts), cause, lag)
        return self._flat[id(edges)][1]


_THREADS_APART: Final = 1 << 40
"""Offset between threads, longer than any window, to take one running maximum over all."""
HAND_OVER_NS: Final = 30_000
"""Silence after which a thread is taken to wait for another active thread of its process."""
_MOST_CALLS_BACK: Final = 400
"""Maximum number of calls searched backwards for the one that handed over."""


class Items(Struct, frozen=True, dict=True):
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
        kept.append(between[is_among(calls.sort[between], (Call.SYNC, Call.ALLOC))])
    return distinct_ids(np.concatenate(kept))


def _outermost(calls: CudaApiCalls, kept: Index, issued: Index) -> tuple[Index, Index]:
    """Return the calls not nested in another, and the index among them for each operation."""
    if not len(kept):
        return kept, np.full(len(issued), NONE, np.int64)
    apart = calls.thread[kept].astype(np.int64) * _THREADS_APART - int(calls.start[kept].min())
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
        for j in range(i - 1, max(i - _MOST_CALLS_BACK, -1), -1):
            if process[j] != process[i] or (thread[j] >= 0 and begin[j] < since):
                break
            if thread[j] >= 0 and thread[j] != thread[i] and returned[j] <= begin[i]:
                hands[i] = j
                break
    return hands


def order_items(
    process: Index, before: Index, group: Index, after: Edges, waits: Edges
) -> tuple[Index, Index]:
    """Return a topological order, and the collectives that are consistent with it.

    Each process is followed in order of issue until an item depends on a collective that another
    process has yet to join. On a deadlock, one blocking collective is dissolved.
    """
    group = group.copy()
    needs = _needs(before, group, after, waits)
    needed = np.fromiter(needs, np.int64, len(needs))
    matters = distinct_ids(np.concatenate([np.flatnonzero(group >= 0), needed]))
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


REPLAYED: Final = (
    *("order", "thread", "gap", "hand", "hand_lag", "own", "slot"),
    *("stream", "latency", "spacing", "residual", "ns", "group"),
)
"""Columns of a graph that its replay depends on, in the order of `native/replay.c`."""


def replay(graph: Graph) -> Times:
    """Return when the operation of each item ends; for items without one, when the call does."""
    loaded = library()
    if loaded is None:
        return walk(graph)
    columns = [np.ascontiguousarray(getattr(graph, name), np.int64) for name in REPLAYED]
    edges = [graph.edges(column) for column in (graph.waits, graph.after)]
    pointers = [
        (ctypes.c_void_p * len(arrays))(*map(address, arrays)) for arrays in (columns, *edges)
    ]
    counts = (int(lane.max(initial=NONE)) + 1 for lane in (graph.thread, graph.stream, graph.group))
    ended = np.zeros(len(graph), np.int64)
    if loaded.gputrace_replay(*pointers, len(graph), *counts, address(ended)):
        raise MemoryError
    return ended


def walk(graph: Graph) -> Times:
    """Replay a graph as `replay` does, without the C library: half a microsecond an item."""
    columns = (getattr(graph, name)[graph.order].tolist() for name in REPLAYED[1:])
    thread_free = [0] * (int(graph.thread.max(initial=NONE)) + 1)
    stream_free = [LONG_AGO] * (int(graph.stream.max(initial=NONE)) + 1)
    began, ended, returned = ([0] * len(graph) for _ in range(3))
    missing = np.bincount(graph.group[graph.group >= 0]).tolist()
    arrived = [LONG_AGO] * len(missing)
    members: list[list[tuple[int, int, int]]] = [[] for _ in missing]
    for item, thread, gap, hand, hand_lag, duration, slot, *on_gpu in zip(
        graph.order.tolist(), *columns, strict=True
    ):
        stream, latency, spacing, residual, ns, group = on_gpu
        begin = end = 0
        if thread >= 0:
            begin = thread_free[thread] + gap
            if hand >= 0:
                begin = max(begin, returned[hand] + hand_lag)
            end = begin + duration
        if stream >= 0:
            start = max(begin + latency, stream_free[stream] + spacing)
            for cause, lag in graph.after.get(item, ()):
                start = max(start, ended[cause] + lag)
            began[item] = start = start + residual
            if group < 0:
                ended[item] = stream_free[stream] = start + ns
            else:
                members[group].append((item, stream, ns))
                arrived[group] = max(arrived[group], start)
                missing[group] -= 1
                # The last to arrive lets all of them begin.
                for member, member_stream, length in () if missing[group] else members[group]:
                    ended[member] = stream_free[member_stream] = arrived[group] + length
        if thread >= 0:
            for cause, lag in graph.waits.get(item, ()):
                end = max(end, ended[cause] + lag)
            if slot >= 0:
                end = max(end, began[slot])
            returned[item] = thread_free[thread] = end
            if stream < 0:
                ended[item] = end
    return np.array(ended, np.int64)


class Measure(Struct, frozen=True):
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
    """Return the step lengths of a replay, from the last operation of each step of each GPU."""
    gpus = int(graph.gpu.max(initial=-1)) + 1
    ends = np.full((gpus, graph.steps), LONG_AGO, np.int64)
    rows = np.flatnonzero((graph.stream >= 0) & (graph.step >= 0))
    np.maximum.at(ends.reshape(-1), graph.gpu[rows] * graph.steps + graph.step[rows], ended[rows])
    # A step in which a GPU did nothing ends with the previous step.
    ends = np.maximum.accumulate(ends, axis=1)
    ends = ends[(ends > LONG_AGO).all(axis=1)]
    if not len(ends):
        return Measure(np.empty(0))
    return Measure(np.diff(ends[:, SCENE - 1 :], axis=1).mean(axis=0))


class Recorded(Struct, frozen=True, dict=True):
    """Time of the measured steps, by which predictions are bounded.

    Columns are by GPU of the graph; 0 for a GPU without steps.
    """

    compute: NDArray[np.float64]
    """Mean compute of a step, in nanoseconds."""
    lost: Mapping[str, NDArray[np.float64]]
    """Rest of a mean step, by the cause that it is charged to."""
    mean_ns: int
    """Mean step of the whole run, to which gains are scaled."""

    @classmethod
    def of(
        cls, gpus: Sequence[Gpu], breakdown: Sequence[Breakdown], ledger: Ledger, mean_ns: int
    ) -> Recorded:
        """Return what a run's GPUs, in the order of the graph, have recorded."""
        steps = {(row.gpu, row.rank): row.steps for row in breakdown if row.steps}
        place: dict[tuple[int | None, int], int] = {
            (gpu.gpu, gpu.rank): number for number, gpu in enumerate(gpus)
        }
        compute = np.zeros(len(gpus))
        for row in breakdown:
            if row.steps and (row.gpu, row.rank) in place:
                compute[place[row.gpu, row.rank]] = row.of("compute") / row.steps
        lost: dict[str, NDArray[np.float64]] = {}
        for charge in ledger.rows:
            whose = charge.gpu, charge.paid_by
            if whose not in place or whose not in steps or charge.of == "compute":
                continue
            column = lost.setdefault(charge.cause, np.zeros(len(gpus)))
            column[place[whose]] += charge.ns / steps[whose]
        return cls(compute, lost, mean_ns)

    @property
    def lost_ns(self) -> float:
        """Return the nanoseconds of a step in which the GPU with most does not compute."""
        return float(sum(self.lost.values(), np.zeros(len(self.compute))).max(initial=0.0))

    def floor(
        self, graph: Graph, edit: Graph, takes: Collection[str] = (), evens: bool = False
    ) -> int:
        """Return the nanoseconds of a step that an edit of the graph leaves.

        The busiest GPU's compute stays, as far as the edit leaves it: no less than the GPU with
        least has now, unless the edit shortens kernels on all. So does, on each GPU, what is
        charged to causes that the edit does not take.

        Args:
            graph: graph of the steps.
            edit: the graph with the edit.
            takes: causes that the edit can take; empty for any.
            evens: true if the edit makes hosts as quick as the median rank's: no quicker, so that
                as much of each cause stays on every GPU as on the median one.
        """
        gpus = len(self.compute)
        before, after = _kernel_time(graph, gpus), _kernel_time(edit, gpus)
        # All of it is left where none was seen.
        parts_left = np.divide(after, before, out=np.ones(gpus), where=before > 0)
        left = self.compute * parts_left
        # The graph has not all steps, and may end within one.
        computing = self.compute[self.compute > 0]
        fewest = float(computing.min()) if len(computing) else 0.0
        shorter = parts_left[self.compute > 0]
        if np.all((shorter > 0) & (shorter < 1)):
            fewest *= float(shorter.max(initial=0.0))
        if takes:
            gone = (*takes, *(OF_OTHERS if evens else FOLLOW))
            for cause, ns in self.lost.items():
                if cause not in gone:
                    middle = np.sort(ns[self.compute > 0])[(len(computing) - 1) // 2 :][:1]
                    left = left + (np.minimum(ns, middle) if evens and len(middle) else ns)
        return min(math.ceil(max(float(left.max(initial=0.0)), fewest)), self.mean_ns)


OF_OTHERS: Final = (
    *("uneven-arrival", "straggler", "late-host", "pipeline-bubble", "communication-exposed"),
)
"""Causes of waits for other ranks."""
FOLLOW: Final = (
    *("launch-bound", "kernel-gaps", "sync-bound", "idle-unexplained", "recorder-overhead"),
    *OF_OTHERS,
    *("cpu-starved", "cpu-throttled", "slow-cores", "page-faults", "gil-wait"),
)
"""Causes whose time may go with that of any other: a host that is late, or a rank; exchange, which
other ranks' timing hides or exposes; and those that slow down whatever the host does."""


def _kernel_time(graph: Graph, gpus: int) -> NDArray[np.float64]:
    """Return the nanoseconds that the computing kernels of each GPU take in the graph."""
    computes = (graph.stream >= 0) & (graph.operation == OperationClass.COMPUTE)
    return np.bincount(graph.gpu[computes], graph.ns[computes], gpus).astype(np.float64)
