"""Builds the graph of some steps out of their rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gputrace.analyzers.host import Call, HostCalls
from gputrace.analyzers.intervals import Intervals
from gputrace.analyzers.whatif.graph import NONE, Graph, Index
from gputrace.analyzers.whatif.items import Items, before_on, find_hands, make_items
from gputrace.analyzers.whatif.order import order_items
from gputrace.analyzers.whatif.rows import Rows
from gputrace.analyzers.whatif.streams import find_causes, join_streams, keep_together
from gputrace.analyzers.whatif.timing import find_slots, host_times, start_times
from gputrace.analyzers.whatif.waits import find_waits
from gputrace.traces.events import Column, Mask, Memory
from gputrace.traces.ids import distinct_ids, number_ids
from gputrace.traces.trace import Trace


def build_graph(
    trace: Trace, rows: Rows, calls: HostCalls, data: Mapping[tuple[int, int], Intervals]
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
    items: Items, calls: HostCalls, data: Mapping[tuple[int, int], Intervals]
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


def _ranks(rows: Rows, calls: HostCalls, items: Items, gpu: Index) -> Index:
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
