"""Construction of the dependency graph from the rows of some steps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import Call, CudaApiCalls
from gputrace.analyzers.grouping import median
from gputrace.analyzers.kernel_names import family_of, on_tensor_cores, precision_of
from gputrace.analyzers.operations import OperationClass
from gputrace.analyzers.whatif.graph import Graph, Held, before_on, order_items
from gputrace.analyzers.whatif.step_rows import LONG_AGO, NONE, Index, Items, Rows, make_items
from gputrace.model.events import Column, Kind, Mask, Memory, distinct_ids, is_among, number_ids
from gputrace.model.intervals import EMPTY, Intervals, Times, search
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace


def build_graph(
    trace: Trace,
    rows: Rows,
    calls: CudaApiCalls,
    data: Mapping[tuple[int, int], Intervals],
    host: Mapping[str, Mapping[int, Intervals]] | None = None,
) -> Graph:
    """Build the dependency graph of some steps.

    Args:
        trace: of the run.
        rows: operations of the steps.
        calls: that issued them.
        data: intervals in which threads, by (process, thread), waited for data, on the trace's
            clock.
        host: those in which the hosts were at something else than launching, by cause and process.
    """
    items = make_items(rows, calls)
    described = _describe(trace, rows, items)
    kind, gpu = described["kind"], described["gpu"]
    sort = np.where(items.call >= 0, calls.sort[items.call], Call.OTHER).astype(np.int8)
    previous, before = before_on(items.thread), before_on(items.stream)
    waits = _by_thread(items, calls, data)
    times = host_times(items, previous, find_hands(items, previous), waits)
    held = dict(_held(items, previous, times, host or {}))
    starts = start_times(items, before)
    after, residual = find_causes(items, starts.residual, starts.bound)
    join_streams(items, described["operation"], kind, gpu, described["step"], after)
    for item, edges in after.items():
        explained = max(int(items.end[other]) + lag for other, lag in edges)
        late = int(items.start[item]) - max(explained, int(starts.bound[item]))
        residual[item] = min(int(residual[item]), max(late, 0))
    called = calls.name[items.call]
    names = trace.names(distinct_ids(called[items.call >= 0].astype(np.int32)))
    # Copy calls that return only when the copy is done.
    blocking = [id for id, name in names.items() if "emcpy" in name and "Async" not in name]
    holds = described["pageable"] | is_among(called, blocking)
    waiting = find_waits(items, sort, kind, holds, names, called)
    instance = np.where(items.operation >= 0, rows.collective[items.operation], NONE)
    group = keep_together(items, instance)
    order, group = order_items(items.process, before, group, after, waiting.waits)
    queueing = find_slots(items, gpu, waiting.own, times)
    return Graph(
        **described,
        order=order,
        thread=items.thread,
        sort=sort,
        gap=queueing.gap,
        data=times.data,
        held=held,
        hand=times.hand,
        hand_lag=times.hand_lag,
        own=queueing.own,
        waits=waiting.waits,
        slot=queueing.slot,
        stream=items.stream,
        latency=starts.latency,
        spacing=starts.spacing,
        after=after,
        residual=residual,
        ns=_durations(items, group),
        group=group,
        process=items.process,
        cards=tuple(known.name for known in rows.gpus),
        start=items.start,
        end=items.end,
    )


def _describe(trace: Trace, rows: Rows, items: Items) -> dict[str, NDArray[Any]]:
    """Return the columns of `Graph` that describe the operations."""
    events, op, some = rows.events, items.operation, items.operation >= 0
    kind = np.where(some, events.kind[op], NONE).astype(np.int8)
    # Map name ids to one id per text: the files of a run have separate ids.
    texts = trace.names(distinct_ids(events.name))
    first = {text: id for id, text in texts.items()}
    ids_of_texts = np.fromiter(texts, np.int64, len(texts))
    canonical = np.array([first[text] for text in texts.values()], np.int64)
    order = np.argsort(ids_of_texts)
    by_text = canonical[order][np.searchsorted(ids_of_texts[order], events.name)]
    name = np.where(some, by_text[op], NONE)
    gpu = np.where(some, rows.gpu[op], NONE)
    memory = np.stack([events.source_memory[op], events.destination_memory[op]])
    # Products in FP32 beside the tensor cores.
    single = [
        id
        for id, text in trace.names(
            distinct_ids(name[kind == Kind.KERNEL].astype(np.int32))
        ).items()
        if precision_of(text) == "fp32" and on_tensor_cores(text, family_of(text)) == "no"
    ]
    # An item without an operation is of the rank of its process.
    of_process = {known.process: known.rank for known in rows.gpus}
    processes, index = number_ids(items.process)
    others = np.array([of_process.get(process, NONE) for process in processes.tolist()])[index]
    return {
        "operation": np.where(some, rows.classes[op], NONE).astype(np.int8),
        "kind": kind,
        "pageable": some & (memory == Memory.PAGEABLE).any(axis=0),
        "size": np.where(some, events.bytes[op], 0).astype(np.int64),
        "name": name,
        "rank": np.where(gpu >= 0, np.array([known.rank for known in rows.gpus])[gpu], others),
        "gpu": gpu,
        "step": np.where(some, rows.step[op], NONE),
        "gathers": some & is_among(rows.collective[op], rows.gathers),
        "single": (kind == Kind.KERNEL) & is_among(name, single),
    }


def _by_thread(
    items: Items, calls: CudaApiCalls, data: Mapping[tuple[int, int], Intervals]
) -> dict[int, Intervals]:
    """Return the waits for data by the thread numbers of the items."""
    waits = {}
    for thread in distinct_ids(items.thread[items.thread >= 0]).tolist():
        call = items.call[np.flatnonzero(items.thread == thread)[0]]
        pair = calls.threads[calls.thread[call]]
        if pair in data:
            waits[thread] = data[pair]
    return waits


def _durations(items: Items, group: Index) -> Index:
    """Return the duration of operations; in a collective, from the last arrival."""
    arrived = np.full(int(group.max(initial=0)) + 1, np.iinfo(np.int64).min)
    parts = np.flatnonzero(group >= 0)
    np.maximum.at(arrived, group[parts], items.start[parts])
    return np.where(group >= 0, items.end - arrived[group], items.end - items.start)


USUAL_LATENCY_NS: Final = 6_000
USUAL_SPACING_NS: Final = 1_500
"""Defaults for windows with too few samples: launch to start, and one kernel to the next."""
_FEWEST_SAMPLES: Final = 20
"""Minimum samples for a median."""
SLACK_NS: Final = 15_000
"""Delay of an operation beyond the usual up to which it is noise; above, it has a cause."""
QUEUE: Final = 1_000
"""Minimum depth of the launch queue of a GPU; 1,030 were measured on an H200."""
_FULL_QUEUE_PART: Final = 0.8
"""Fraction of the depth from which the queue may have been full."""
_FULL_QUEUE_NS: Final = 50_000
"""Minimum duration of a call or gap that a full queue explains."""


class HostTimes(Struct, frozen=True):
    """Columns of calls, see `Graph`."""

    gap: Times
    data: Times
    hand: Index
    hand_lag: Times


def host_times(
    items: Items, previous: Index, hand: Index, data: Mapping[int, Intervals]
) -> HostTimes:
    """Return the host time before each call, and the part of it spent waiting for data."""
    since = np.where(previous >= 0, items.returned[previous], 0)
    gap = np.where(items.thread >= 0, items.begin - since, 0)
    hand_lag = np.where(hand >= 0, items.begin - items.returned[hand], 0)
    since = np.where(hand >= 0, items.returned[hand], since)
    waited = np.zeros(len(items), np.int64)
    for thread in distinct_ids(items.thread[items.thread >= 0]).tolist():
        rows = np.flatnonzero((items.thread == thread) & ((previous >= 0) | (hand >= 0)))
        data_waits = data.get(thread, EMPTY)
        waited[rows] = data_waits.within(since[rows] + items.base, items.begin[rows] + items.base)
    return HostTimes(np.where(hand >= 0, 0, gap), waited, hand, hand_lag)


def _held(
    items: Items, previous: Index, times: HostTimes, host: Mapping[str, Mapping[int, Intervals]]
) -> Iterator[tuple[str, Held]]:
    """Yield what each cause of the host explains of the time before the calls, and of the calls."""
    before = np.where(times.hand >= 0, times.hand, previous)
    called = (items.thread >= 0) & (before >= 0)
    since = np.where(called, items.returned[before], items.begin) + items.base
    left = np.where(times.hand >= 0, times.hand_lag, times.gap) - times.data
    for cause, by_process in host.items():
        spent, inside = np.zeros(len(items), np.int64), np.zeros(len(items), np.bool_)
        for process, active in by_process.items():
            mine = np.flatnonzero(called & (items.process == process))
            spent[mine] = active.within(since[mine], items.begin[mine] + items.base)
            inside[mine] = active.contains(items.begin[mine] + items.base)
        spent = np.clip(spent, 0, left)
        left = left - spent
        if spent.any() or inside.any():
            yield cause, Held(spent, inside)


HAND_OVER_NS: Final = 30_000
"""Silence after which a thread is taken to wait for another active thread of its process."""
_MOST_CALLS_BACK: Final = 400
"""Maximum number of calls searched backwards for the one that handed over."""


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


class StartTimes(Struct, frozen=True):
    """Columns of operations, see `Graph`; residuals are 0 or above `SLACK_NS`."""

    latency: Times
    spacing: Times
    residual: Times
    bound: Times
    """Earliest start by call and stream."""


def start_times(items: Items, before: Index) -> StartTimes:
    """Explain the start of each operation by its call or the previous operation on the stream."""
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
    return int(median(samples)) if len(samples) >= _FEWEST_SAMPLES else otherwise


class Queueing(Struct, frozen=True):
    """Columns of calls, corrected for full launch queues, see `Graph`."""

    slot: Index
    own: Times
    gap: Times


def find_slots(items: Items, gpu: Index, call_ns: Times, host: HostTimes) -> Queueing:
    """Find the operation whose start frees a slot in the launch queue for each launch.

    The depth of the queue is the highest seen, or `QUEUE` where no host ran that far ahead. The
    whole excess duration of a launch into a full queue is waiting for a slot, which the operation
    freed that started just before the launch returned: slots become free several at a time. Gaps
    of a thread with a full queue are treated alike, since calls that need a slot (of events) may
    not be recorded.
    """
    slots = np.full(len(items), NONE, np.int64)
    call_ns, gap = call_ns.copy(), host.gap.copy()
    lanes = [_Lane.of(items, gpu, number) for number in distinct_ids(gpu[gpu >= 0]).tolist()]
    depth = max([QUEUE, *(int(lane.waiting(items.begin).max(initial=0)) for lane in lanes)])
    launches = (items.thread >= 0) & (items.stream >= 0)
    usual = int(median(call_ns[launches])) if launches.any() else 0
    long = max(_FULL_QUEUE_NS, 10 * usual)
    silent = np.where(host.hand < 0, host.gap - host.data, 0)
    for lane in lanes:
        rows = lane.rows
        slots[rows[depth:]] = rows[: max(len(rows) - depth, 0)]
        for spent, since, until in (
            (silent, items.begin - host.gap, items.begin),
            (call_ns, items.begin, items.returned),
        ):
            blocked, freed = lane.blocked(spent > long, since, until, _FULL_QUEUE_PART * depth)
            slots[blocked] = freed
            (gap if spent is silent else call_ns)[blocked] = usual
    return Queueing(slots, call_ns, gap)


class _Lane(Struct, frozen=True):
    """Launches of one GPU."""

    rows: Index
    by_start: Index
    """``rows`` in order of start on the GPU."""
    started: Times

    @classmethod
    def of(cls, items: Items, gpu: Index, number: int) -> _Lane:
        rows = np.flatnonzero((gpu == number) & (items.thread >= 0) & (items.stream >= 0))
        by_start = rows[np.argsort(items.start[rows], kind="stable")]
        return cls(rows, by_start, items.start[by_start])

    def waiting(self, since: Times) -> Times:
        """Return the number of queued launches at the time given for each launch."""
        gone = search(self.started, since[self.rows], "right")
        return np.arange(1, len(self.rows) + 1) - gone

    def blocked(self, long: Mask, since: Times, until: Times, full: float) -> tuple[Index, Index]:
        """Return the launches that waited for a slot, and the operations that freed it.

        The queue is taken as full for launches issued before the first recorded start, for which
        its length is unknown.

        Args:
            long: mask of items that took long.
            since, until: period in which each item may have waited.
            full: queue length from which a launch may have to wait.
        """
        unseen = since[self.rows] < self.started[:1]
        blocked = long[self.rows] & (unseen | (self.waiting(since) >= full))
        freed = search(self.started, until[self.rows], "right") - 1
        blocked &= (freed >= 0) & (self.started[freed] > since[self.rows])
        return self.rows[blocked], self.by_start[freed[blocked]]


_WAKE_NS: Final = 60_000
"""Maximum delay from the end of an operation to the return of a call that waited for it."""
SHORT_NS: Final = 5_000
"""Duration of a synchronising call that need not wait."""
_STAGED_NS: Final = 30_000
"""Minimum duration of a copy call that blocks the host until its copy is done."""

_EVERY_STREAM = ("Device", "Ctx", "Thread", "Free", "Unmap", "Release")
"""Name fragments of calls that wait for all streams."""

Waits = dict[int, tuple[tuple[int, int], ...]]


class Waiting(Struct, frozen=True):
    """Columns of calls, see `Graph`."""

    own: Times
    waits: Waits


def find_waits(
    items: Items, sort: Column, kind: Column, blocks: Mask, names: Mapping[int, str], name: Column
) -> Waiting:
    """Find the operations that each synchronising, freeing or blocking copy call waited for.

    These are operations issued before the call that ended during it, by the recorded times.

    ``blocks`` is a mask of copies that may block the host, as from or to pageable memory; ``sort``,
    ``kind`` and ``name`` are those of the call, or operation, of each item.
    """
    call_ns = np.where(items.thread >= 0, items.returned - items.begin, 0)
    waits: Waits = {}
    copies = is_among(kind, (Kind.COPY_H2D, Kind.COPY_D2H)) & (items.thread >= 0)
    blocked = copies & blocks & (call_ns > _STAGED_NS) & (items.returned > items.start)
    blocked &= items.stream >= 0
    matters = is_among(sort, (Call.SYNC, Call.ALLOC)) & (items.thread >= 0)
    finder, issued = _Finder(items), _Issued(items)
    for i in np.flatnonzero(matters | blocked).tolist():
        if matters[i]:
            called = names[int(name[i])]
            every = any(part in called for part in _EVERY_STREAM)
            of = None if every else issued.last_stream(i)
            ended = finder.find(i, issued.before(i), of, of_event="Event" in called)
            if sort[i] == Call.SYNC or any(binds for _, binds in ended):
                waits[i], call_ns[i] = finder.edges(i, ended, int(call_ns[i]))
        if blocked[i]:
            waits[i] = ((i, int(items.returned[i] - items.end[i])),)
            call_ns[i] = min(int(call_ns[i]), SHORT_NS)
    return Waiting(call_ns, waits)


Found = list[tuple[int, bool]]
"""Pairs of an operation and whether the call had to wait for it."""
Issued = Mapping[int, tuple[list[int], int]]
"""Operations of each stream in order, and how many of them were issued before a call."""


class _Issued:
    """Operations that were issued before an item, by stream of its process."""

    def __init__(self, items: Items) -> None:
        rows = np.flatnonzero(items.stream >= 0)
        self._process, self._thread, self._stream = items.process, items.thread, items.stream
        self._by_process = self._grouped(rows, items.process)
        self._by_thread = self._grouped(rows, items.thread)
        self._streams: dict[int, list[list[int]]] = {}

    @staticmethod
    def _grouped(rows: Index, keys: Column) -> dict[int, Index]:
        """Return the rows of each key, in order."""
        rows = rows[np.argsort(keys[rows], kind="stable")]
        parts = np.split(rows, np.flatnonzero(np.diff(keys[rows])) + 1) if len(rows) else []
        return {int(keys[part[0]]): part for part in parts}

    def last_stream(self, i: int) -> int | None:
        """Return the stream to which the thread of an item issued last."""
        rows = self._by_thread.get(int(self._thread[i]))
        count = 0 if rows is None else int(np.searchsorted(rows, i))
        return None if rows is None or not count else int(self._stream[rows[count - 1]])

    def before(self, i: int) -> Issued:
        """Return the operations of each stream, and how many of them come before an item."""
        process = int(self._process[i])
        if process not in self._streams:
            rows = self._by_process.get(process, np.empty(0, np.int64))
            parts = self._grouped(rows, self._stream).values()
            self._streams[process] = sorted(part.tolist() for part in parts)
        counted = ((rows, bisect_left(rows, i)) for rows in self._streams[process])
        return {int(self._stream[rows[0]]): (rows, count) for rows, count in counted if count}


class _Finder:
    """Search for the operations that calls waited for."""

    def __init__(self, items: Items) -> None:
        self.begin, self.returned = items.begin.tolist(), items.returned.tolist()
        self.end = items.end.tolist()

    def find(self, i: int, issued: Issued, stream: int | None, *, of_event: bool) -> Found:
        """Return the latest operation per stream, or of one, that had ended at the call's return.

        A call with nothing to wait for on its stream may have waited for another stream. An event
        may have been recorded before the stream's last operations: a call that waited long for one
        waited for the operation that ended last before its return.
        """
        before = self.returned[i] + SHORT_NS
        last = {s: rows[count - 1] for s, (rows, count) in issued.items()}
        done = {s: row for s, row in last.items() if self.end[row] <= before}
        if of_event and self.returned[i] - self.begin[i] > 2 * _WAKE_NS:
            for s, (rows, count) in issued.items():
                earlier = bisect_right(rows, before, 0, count, key=self.end.__getitem__)
                if earlier and s not in done and self._binds(i, rows[earlier - 1]):
                    done[s] = rows[earlier - 1]
        ended = [(j, self._binds(i, j)) for s, j in done.items()]
        if stream is None:
            return ended
        binding = [(j, binds) for j, binds in ended if binds]
        if binding:
            return [max(binding, key=lambda pair: self.end[pair[0]])]
        return [(done[stream], False)] if stream in done else []

    def _binds(self, i: int, j: int) -> bool:
        return bool(self.begin[i] < self.end[j] > self.returned[i] - _WAKE_NS)

    def edges(self, i: int, ended: Found, ns: int) -> tuple[tuple[tuple[int, int], ...], int]:
        """Return the edges of a call, and its duration without waiting."""
        binding = [j for j, binds in ended if binds]
        latest = max(binding, key=lambda j: self.end[j], default=None)
        lags = {j: self.returned[i] - self.end[j] for j, _ in ended}
        edges = tuple((j, lag if j == latest else min(SHORT_NS, lag)) for j, lag in lags.items())
        return edges, min(ns, SHORT_NS) if binding else ns


_JUST_ENDED_NS: Final = 12_000
"""Maximum delay from the end of an operation to a start on another stream that waited for it."""
_MOST_CANDIDATES: Final = 64
"""Maximum number of candidates tried per operation."""

After = dict[int, tuple[tuple[int, int], ...]]


def find_causes(items: Items, late: Times, bound: Times) -> tuple[After, Times]:
    """Find causes on other streams for operations that start late.

    The cause is the operation that ended just before. Returns the edges and the remaining
    unexplained delays.
    """
    after: After = {}
    left = late.copy()
    runs = np.flatnonzero(items.stream >= 0)
    runs = runs[np.argsort(items.end[runs], kind="stable")]
    ends = items.end[runs]
    for i in np.flatnonzero(late > 0).tolist():
        start = int(items.start[i])
        low, high = np.searchsorted(ends, (start - _JUST_ENDED_NS, start), "right").tolist()
        low = max(low, high - _MOST_CANDIDATES)
        for j in reversed(runs[low:high].tolist()):
            is_elsewhere = (
                items.process[j] == items.process[i] and items.stream[j] != items.stream[i]
            )
            if j < i and is_elsewhere and items.end[j] > bound[i]:
                after[i] = ((j, start - int(items.end[j])),)
                left[i] = 0
                break
    return after, left


def join_streams(
    items: Items, operation: Column, kind: Column, gpu: Index, step: Index, after: After
) -> None:
    """Add the edges that data flow demands, to ``after``, where the recorded times agree.

    A collective follows the operations issued to the main stream of its GPU before it; the last
    collective of a step, and an input copy on a separate stream, precede the next operation on the
    main stream.
    """
    for number in distinct_ids(gpu[gpu >= 0]).tolist():
        rows = np.flatnonzero((gpu == number) & (items.stream >= 0))
        compute = rows[operation[rows] == OperationClass.COMPUTE]
        busy = np.bincount(items.stream[compute], (items.end - items.start)[compute], 1)
        for i, j in _joins(items, operation, kind, step, rows, int(np.argmax(busy))):
            lag = int(items.start[i] - items.end[j])
            if lag >= 0 and all(j != known for known, _ in after.get(i, ())):
                after[i] = (*after.get(i, ()), (j, min(lag, 2_000)))


def _joins(
    items: Items, operation: Column, kind: Column, step: Index, rows: Index, main: int
) -> Iterator[tuple[int, int]]:
    """Yield pairs of an operation and one that it follows, if the recorded times agree."""
    talks = operation[rows] == OperationClass.COMMUNICATION
    on_main = items.stream[rows] == main
    beside = np.flatnonzero(~on_main & (talks | (kind[rows] == Kind.COPY_H2D)))
    mains = rows[on_main]
    starts, ends = items.start[mains], items.end[rows[beside]].tolist()
    positions = np.searchsorted(np.flatnonzero(on_main), beside)
    last_of_step = {int(step[i]): i for i in rows[talks & ~on_main].tolist()}
    each = zip(positions.tolist(), rows[beside].tolist(), talks[beside].tolist(), ends, strict=True)
    for position, row, collective, end in each:
        if collective and position:
            yield row, int(mains[position - 1])
        if not collective or last_of_step[int(step[row])] == row:
            later = np.flatnonzero(starts[position:] >= end)
            if len(later):
                yield int(mains[position + later[0]]), row


def keep_together(items: Items, instance: Index) -> Index:
    """Return the collective that each operation belongs to, or `NONE`.

    An operation that ends before the last one arrives waits for none, and is excluded.

    ``instance`` is the number of the matched collective of each item, or `NONE`.
    """
    numbers, group = number_ids(instance)
    arrived = np.full(len(numbers), np.iinfo(np.int64).min)
    np.maximum.at(arrived, group, items.start)
    together = (instance >= 0) & (items.end >= arrived[group])
    counts = np.bincount(group[together], minlength=len(numbers))
    return np.where(together & (counts[group] > 1), group, NONE)
