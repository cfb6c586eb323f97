"""Construction of the dependency graph from the rows of some steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from gputrace.analyzers.host_calls import Call, CudaApiCalls
from gputrace.analyzers.operations import OperationClass
from gputrace.analyzers.whatif.graph import (
    LONG_AGO,
    NONE,
    Graph,
    Index,
    Items,
    before_on,
    find_hands,
    make_items,
    order_items,
)
from gputrace.analyzers.whatif.step_rows import Rows
from gputrace.model.events import Column, Kind, Mask, Memory, distinct_ids, number_ids
from gputrace.model.intervals import EMPTY, Intervals, Times
from gputrace.model.trace import Trace


def build_graph(
    trace: Trace, rows: Rows, calls: CudaApiCalls, data: Mapping[tuple[int, int], Intervals]
) -> Graph:
    """The graph of the rows.

    Args:
        trace: to name calls.
        rows: of the steps to replay.
        calls: of the whole trace.
        data: when threads, by (process, thread), waited for data, on the trace's clock.
    """
    items = make_items(rows, calls)
    events, op, some = rows.events, items.operation, items.operation >= 0
    sort = np.where(items.call >= 0, calls.sort[items.call], Call.OTHER).astype(np.int8)
    kind = np.where(some, events.kind[op], NONE).astype(np.int8)
    operation = np.where(some, rows.classes[op], NONE).astype(np.int8)
    gpu, step = np.where(some, rows.gpu[op], NONE), np.where(some, rows.step[op], NONE)
    name = np.where(some, _by_text(trace, events.name)[op], NONE)
    pageable = some & (
        (events.source_memory[op] == Memory.PAGEABLE)
        | (events.destination_memory[op] == Memory.PAGEABLE)
    )
    previous, before = before_on(items.thread), before_on(items.stream)
    host = host_times(items, previous, find_hands(items, previous), _by_thread(items, calls, data))
    starts = start_times(items, before)
    after, residual = find_causes(items, starts.residual, starts.bound)
    join_streams(items, operation, kind, gpu, step, after)
    called = calls.name[items.call]
    names = trace.names(distinct_ids(called[items.call >= 0].astype(np.int32)))
    holds = pageable | _holds(names, called)
    waiting = find_waits(items, sort, kind, holds, names, called)
    rank = _ranks(rows, calls, items, gpu)
    group = keep_together(items, np.where(some, rows.collective[op], NONE))
    order, group = order_items(items.process, before, group, after, waiting.waits)
    queueing = find_slots(items, gpu, waiting.own, host)
    return Graph(
        order=order,
        thread=items.thread,
        sort=sort,
        gap=queueing.gap,
        data=host.data,
        hand=host.hand,
        hand_lag=host.hand_lag,
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
        operation=operation,
        kind=kind,
        pageable=pageable,
        size=np.where(some, events.bytes[op], 0).astype(np.int64),
        name=name,
        rank=rank,
        gpu=gpu,
        process=items.process,
        step=step,
        start=items.start,
        end=items.end,
    )


def _by_text(trace: Trace, ids: Column) -> Index:
    """One id for each text: files that are read as one run have ids of their own."""
    texts = trace.names(distinct_ids(ids))
    first = {text: id for id, text in texts.items()}
    own = np.fromiter(texts, np.int64, len(texts))
    alike = np.array([first[text] for text in texts.values()], np.int64)
    order = np.argsort(own)
    return alike[order][np.searchsorted(own[order], ids)]


def _by_thread(
    items: Items, calls: CudaApiCalls, data: Mapping[tuple[int, int], Intervals]
) -> dict[int, Intervals]:
    """The waits for data by the items' own numbers of threads."""
    found = {}
    for thread in distinct_ids(items.thread[items.thread >= 0]).tolist():
        call = items.call[np.flatnonzero(items.thread == thread)[0]]
        pair = calls.threads[calls.thread[call]]
        if pair in data:
            found[thread] = data[pair]
    return found


def _holds(names: Mapping[int, str], called: Column) -> Mask:
    """Whether a copy call is one that returns when the copy is done."""
    plain = [id for id, name in names.items() if "emcpy" in name and "Async" not in name]
    found: Mask = np.isin(called, plain)
    return found


def _ranks(rows: Rows, calls: CudaApiCalls, items: Items, gpu: Index) -> Index:
    """The rank of each item: of its GPU, or of its process."""
    of_process = {one.process: one.rank for one in rows.gpus}
    ranks = np.array([one.rank for one in rows.gpus])
    processes, place = number_ids(items.process)
    others = np.array([of_process.get(process, NONE) for process in processes.tolist()])[place]
    return np.where(gpu >= 0, ranks[gpu], others)


def _durations(items: Items, group: Index) -> Index:
    """How long operations run; the parts of a collective from when the last one comes."""
    arrived = np.full(int(group.max(initial=0)) + 1, np.iinfo(np.int64).min)
    parts = np.flatnonzero(group >= 0)
    np.maximum.at(arrived, group[parts], items.start[parts])
    return np.where(group >= 0, items.end - arrived[group], items.end - items.start)


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


_JUST_ENDED_NS: Final = 12_000
"""An operation that starts this soon after one elsewhere ended had waited for it."""
_FARTHEST: Final = 64

After = dict[int, tuple[tuple[int, int], ...]]


def find_causes(items: Items, late: Times, bound: Times) -> tuple[After, Times]:
    """For operations that start late, the one on another stream that they started right after.

    Gives also the lateness that is left unexplained.
    """
    after: After = {}
    left = late.copy()
    runs = np.flatnonzero(items.stream >= 0)
    runs = runs[np.argsort(items.end[runs], kind="stable")]
    ends = items.end[runs]
    for i in np.flatnonzero(late > 0).tolist():
        start = int(items.start[i])
        low, high = np.searchsorted(ends, (start - _JUST_ENDED_NS, start), "right").tolist()
        low = max(low, high - _FARTHEST)
        for j in reversed(runs[low:high].tolist()):
            if _may_cause(items, i, j) and items.end[j] > bound[i]:
                after[i] = ((j, start - int(items.end[j])),)
                left[i] = 0
                break
    return after, left


def _may_cause(items: Items, i: int, j: int) -> bool:
    return bool(
        j < i and items.process[j] == items.process[i] and items.stream[j] != items.stream[i]
    )


def join_streams(
    items: Items, operation: Column, kind: Column, gpu: Index, step: Index, after: After
) -> None:
    """Adds what data flow demands though the recorded times need not show it.

    A collective comes after what its process had given the main stream of its GPU before; the
    step's last collective, and an input copied on a stream of its own, come before what the main
    stream is given next. Only where the recorded times agree.
    """
    for one in distinct_ids(gpu[gpu >= 0]).tolist():
        rows = np.flatnonzero((gpu == one) & (items.stream >= 0))
        main = _main_stream(items, operation, rows)
        for i, j in _joins(items, operation, kind, step, rows, main):
            lag = int(items.start[i] - items.end[j])
            if lag >= 0 and all(j != known for known, _ in after.get(i, ())):
                after[i] = (*after.get(i, ()), (j, min(lag, 2_000)))


def _main_stream(items: Items, operation: Column, rows: Index) -> int:
    compute = rows[operation[rows] == OperationClass.COMPUTE]
    busy = np.bincount(items.stream[compute], (items.end - items.start)[compute], 1)
    return int(np.argmax(busy))


def _joins(
    items: Items, operation: Column, kind: Column, step: Index, rows: Index, main: int
) -> Iterator[tuple[int, int]]:
    """Pairs of an operation and one that it comes after, if the recorded times agree."""
    talks = operation[rows] == OperationClass.COMMUNICATION
    on_main = items.stream[rows] == main
    aside = np.flatnonzero(~on_main & (talks | (kind[rows] == Kind.COPY_H2D)))
    mains = rows[on_main]
    place = np.searchsorted(np.flatnonzero(on_main), aside)
    last = {int(step[i]): i for i in rows[talks & ~on_main].tolist()}
    for at, row in zip(place.tolist(), rows[aside].tolist(), strict=True):
        collective = operation[row] == OperationClass.COMMUNICATION
        if collective and at:
            yield row, int(mains[at - 1])
        if not collective or last[int(step[row])] == row:
            later = np.flatnonzero(items.start[mains[at:]] >= items.end[row])
            if len(later):
                yield int(mains[at + later[0]]), row


def keep_together(items: Items, instance: Index) -> Index:
    """The collective that each operation is a part of, or `NONE`.

    A part that ends before the last one comes waits for nobody, and is none.

    Args:
        items: of the graph.
        instance: the number of the matched collective of each item, or `NONE`.
    """
    numbers, group = np.unique(instance, return_inverse=True)
    arrived = np.full(len(numbers), np.iinfo(np.int64).min)
    np.maximum.at(arrived, group, items.start)
    together = (instance >= 0) & (items.end >= arrived[group])
    counts = np.bincount(group[together], minlength=len(numbers))
    return np.where(together & (counts[group] > 1), group, NONE)
