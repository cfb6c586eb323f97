"""Dependency graph of consecutive steps (host calls, GPU operations, waits), its replay, and the
time of a step that no prediction undercuts.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import Call
from gputrace.analyzers.ledger import Ledger
from gputrace.analyzers.operations import Gpu, OperationClass
from gputrace.analyzers.whatif.step_rows import LONG_AGO, NONE, SCENE, Index
from gputrace.model.events import Kind, Mask, distinct_ids, is_among
from gputrace.model.intervals import Times
from gputrace.model.results import Breakdown
from gputrace.model.struct import Struct
from gputrace.native import address, library

Edges = Mapping[int, tuple[tuple[int, int], ...]]
"""By item, the items it waits for, each with the lag after its end in nanoseconds."""


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

    @property
    def runs(self) -> Mask:
        """Items with an operation."""
        return self.stream >= 0

    @property
    def issues(self) -> Mask:
        """Items with an operation whose call is known."""
        return self.runs & (self.thread >= 0)

    @property
    def computes(self) -> Mask:
        """Items with an operation that computes."""
        computes: Mask = self.runs & (self.operation == OperationClass.COMPUTE)
        return computes

    @property
    def input_copies(self) -> Mask:
        """Copies from the host to a GPU."""
        copies: Mask = self.runs & (self.kind == Kind.COPY_H2D)
        return copies

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


def before_on(lane: Index) -> Index:
    """Return, for each item, the previous one on its lane (thread or stream), or `NONE`."""
    rows = np.flatnonzero(lane >= 0)
    rows = rows[np.argsort(lane[rows], kind="stable")]
    same = lane[rows][1:] == lane[rows][:-1]
    before = np.full(len(lane), NONE, np.int64)
    before[rows[1:][same]] = rows[:-1][same]
    return before


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
    computes = graph.computes
    return np.bincount(graph.gpu[computes], graph.ns[computes], gpus).astype(np.float64)


_LATER_HOST_RATIO: Final = 1.02
"""Ratio of host time to the median rank's above which a rank is later."""
_SAME_CALLS: Final = 0.98
"""Part of the ranks' calls that must be of one sort, in order, to be compared one by one."""
_COMPARED_CALLS_PART: Final = 0.5
"""Part of a rank's calls that must be between exchanges with as many calls on every rank."""


def with_quick_host(
    graph: Graph, late: Sequence[int], compared: Mask | None = None
) -> Graph | None:
    """Return the graph with the host time of ranks cut to the median rank's, one after another,
    call by call, until their totals agree; None where the ranks make different calls, or none of
    these is later.

    ``compared`` is a mask of the calls to compare; None for all.
    """
    ranks = distinct_ids(graph.rank[graph.rank >= 0])
    if len(ranks) < 2:
        return None
    with_calls = graph.thread >= 0 if compared is None else compared & (graph.thread >= 0)
    calls = [np.flatnonzero((graph.rank == other) & with_calls) for other in ranks.tolist()]
    table = _alike(graph, calls)[:, 1:]
    if table.shape[1] <= _COMPARED_CALLS_PART * max(map(len, calls)):
        return None
    same = (graph.sort[table] == graph.sort[table[0]]) & (graph.kind[table] == graph.kind[table[0]])
    if same.mean() <= _SAME_CALLS:
        return None
    quick = graph
    for rank in np.searchsorted(ranks, late).tolist():
        quick = _quicker(quick, table, rank) or quick
    return None if quick is graph else quick


def _quicker(graph: Graph, table: Index, late: int) -> Graph | None:
    """Return the graph with the host time of a rank cut to the median rank's, or None.

    ``table`` has the calls that are compared, a row for each rank; ``late`` is the rank's.
    """
    # A call that synchronizes is a wait, also where what it waits for was not recorded.
    works = np.where(graph.sort == Call.SYNC, 0, graph.own)
    times = (np.where(graph.hand >= 0, graph.hand_lag, graph.gap) + works)[table]
    middle = (len(table) - 1) // 2
    usual = np.sort(times, axis=0)[middle]
    total = np.sort(times.sum(axis=1))[middle]
    wanted = times[late].sum() - total
    excess = np.maximum(times[late] - usual, 0)
    if wanted <= (_LATER_HOST_RATIO - 1) * total or not excess.any():
        return None
    rows = table[late]
    saved = (excess * min(wanted / excess.sum(), 1.0)).astype(np.int64)
    saved[(before_on(graph.thread)[rows] < 0) & (graph.hand[rows] < 0)] = 0
    gap, lag, handed = graph.gap.copy(), graph.hand_lag.copy(), graph.hand[rows] >= 0
    gap[rows] = np.where(handed, gap[rows], np.maximum(gap[rows] - saved, 0))
    lag[rows] = np.where(handed, np.maximum(lag[rows] - saved, 0), lag[rows])
    return graph.changed(gap=gap, hand_lag=lag)


def _alike(graph: Graph, calls: list[Index]) -> Index:
    """Return the calls of each rank, a row each, between those exchanges of all ranks between which
    every rank makes as many calls: a call more on one rank shifts none of the others. None are
    where ranks take part in exchanges with different numbers of GPUs.
    """
    groups = [graph.group[rows] for rows in calls]
    first = distinct_ids(groups[0][groups[0] >= 0])
    shared = reduce(lambda kept, ids: kept[is_among(kept, ids)], groups[1:], first)
    sections = [np.cumsum(is_among(ids, shared)) for ids in groups]
    last = {int(section.max(initial=0)) for section in sections}
    if len(last) > 1:
        return np.empty((len(calls), 0), np.int64)
    counts = np.stack([np.bincount(section, minlength=max(last) + 1) for section in sections])
    even = (counts == counts[0]).all(axis=0)
    return np.stack([rows[even[section]] for rows, section in zip(calls, sections, strict=True)])
