"""Causes of idle time: each nanosecond of a gap is given to the first cause that is proven."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY, Call, CudaApiCalls, by_thread, thread_keys
from gputrace.analyzers.grouping import median
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.model.events import Events, Kind, Mask, distinct_ids, is_among
from gputrace.model.host import BACKWARD, DATA_RANGE, MODEL, OTHER
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching, search, union
from gputrace.model.results import RecorderCost
from gputrace.model.struct import Struct
from gputrace.model.time_class import IDLE_CAUSES
from gputrace.model.trace import Trace

_RECORDER: Final = (
    r"(?i)CUPTI|profiling|\(Profiler\)|injection|^Buffer Flush|^Activity Buffer|^Instrumentation"
)
"""Names of overhead rows caused by the recorder, not the driver (lazy loading, JIT)."""

_PART_RANGE: Final = r"(?i)(?<![a-z])(layers?|weights?|kv|experts?|attention|mlp)(?![a-z])"
"""Names of ranges within a pass: what is copied in them, such as weights, is none of a batch."""
_MPI_WAITS: Final = (
    r"P?MPI_(?!\w*_(init|local)\b)(Wait|Barrier|S?[Ss]end|M?[Rr]ecv|M?[Pp]robe|All(?!oc)|Reduce"
    r"|Bcast|Gather|Scatter|Scan|Exscan|Neighbor|Win_(fence|wait|lock|unlock|flush))"
)
"""Names of MPI's calls that return when other ranks have come, or have taken what is sent."""
_LATENCY_NS: Final = 100_000
"""Maximum time from the issue of an operation to its start that is the launch's own."""
_HELD_NS: Final = 1_000_000
_LONG_HELD_NS: Final = 50_000_000
"""Minimum times for which issued work does not start while its host is in a copy that blocks, and
in a synchronising call, as a sign that both wait for the same thing: other GPUs hold up work, too,
but not for so long."""
_NO_WAIT_NS: Final = 20_000
"""Maximum duration of a synchronisation that had nothing to wait for."""


class HostEvidence(Struct, frozen=True, dict=True):
    """Host activity beside CUDA calls, by (process, thread)."""

    data: Mapping[tuple[int, int], Intervals]
    """Recorded waits for data: hooks in loaders, NVTX ranges named so."""
    loader: Mapping[tuple[int, int], Intervals]
    """Waits for data that hooks in loaders saw."""
    recorder: Mapping[tuple[int, int], Intervals]
    """Work of the recorder."""
    mpi: Mapping[tuple[int, int], Intervals]
    """Calls of MPI that wait for other ranks."""
    phases: Mapping[tuple[int, int], Intervals]
    """Calls and ranges that are a part of a step, as a forward pass or a layer is: no thread loads
    data in them."""
    passes: Mapping[tuple[int, int], Intervals]
    """Forward passes that call a model several times, with what lies between the calls."""


class Causes(Struct, frozen=True, dict=True):
    """Gaps of one GPU divided by cause: disjoint, and together all of the gaps."""

    of: Mapping[str, Intervals]
    """Intervals by each of `IDLE_CAUSES`."""
    ends: Times
    """Ends of the gaps of the GPU, in order."""
    feeder: NDArray[np.int32]
    """Thread that fed the GPU at the end of each, as an index in `CudaApiCalls.threads`."""
    in_mpi: Intervals
    """Part of ``sync`` in which the process waits in MPI."""
    between_calls: Intervals
    """Part of ``launch`` in which the host prepares a copy between calls of a forward pass."""

    def feeder_of(self, end: int) -> int:
        """Return the feeding thread of the gap that ends at a moment, or `NOBODY`."""
        index = int(np.searchsorted(self.ends, end))
        return int(self.feeder[index]) if index < len(self.feeder) else NOBODY

    def within(self, starts: ArrayLike, ends: ArrayLike) -> NDArray[np.int64]:
        """Return nanoseconds of windows by cause, in order: shape (windows, causes)."""
        return np.stack([self.of[cause].within(starts, ends) for cause in IDLE_CAUSES], axis=-1)


def read_evidence(trace: Trace) -> HostEvidence:
    """Read recorded data waits, recorder overhead, waits in MPI and phases."""
    columns = ("start", "end", "name", "process", "thread")
    waits = trace.events([Kind.DATA_WAIT], columns)
    every = trace.events([Kind.RANGE], columns)
    overhead = trace.events([Kind.OVERHEAD], columns)
    overhead = overhead.select(trace.matches(overhead.name, _RECORDER))
    ranges, mpi, parts = (
        intervals_by_thread(every.select(trace.matches(every.name, pattern)))
        for pattern in (DATA_RANGE, _MPI_WAITS, _PART_RANGE)
    )
    loader = intervals_by_thread(waits)
    data = dict(loader)
    for thread, intervals in ranges.items():
        data[thread] = merge_touching(data.get(thread, EMPTY), intervals)
    phases = intervals_by_thread(trace.events([Kind.PHASE], columns))
    for thread, intervals in parts.items():
        phases[thread] = merge_touching(phases.get(thread, EMPTY), intervals)
    return HostEvidence(
        data, loader, intervals_by_thread(overhead), mpi, phases, _forward_passes(trace)
    )


def _forward_passes(trace: Trace) -> dict[tuple[int, int], Intervals]:
    """Return when each thread calls its model several times before a backward pass, from the first
    call to the last: what it does between them needs what the first returned, as a game that is
    played does, unless it is recorded as a wait for data.
    """
    kinds = {Kind.PHASE, Kind.DATA_WAIT} & trace.kinds
    events = by_thread(trace.events(kinds, ("start", "end", "name", "process", "thread")))
    texts = trace.names(distinct_ids(events.name))

    def named(name: str) -> Mask:
        return is_among(events.name, [id for id, text in texts.items() if text == name])

    events = events.select(~named(OTHER))
    keys, called, backward = thread_keys(events), named(MODEL), named(BACKWARD)
    # Calls in a row: no phase or wait of the thread lies between them.
    follows = np.append(False, called[1:] & called[:-1] & (keys[1:] == keys[:-1]))[: len(keys)]
    last = np.flatnonzero(called[:-1] & backward[1:] & (keys[1:] == keys[:-1]))
    firsts = np.flatnonzero(~follows)
    first = firsts[np.searchsorted(firsts, last, "right") - 1]
    of_passes = Intervals(events.start[first], events.end[last])
    passes = {}
    for row in np.flatnonzero(np.diff(keys[first], prepend=-1)).tolist():
        thread = int(events.process[first[row]]), int(events.thread[first[row]])
        passes[thread] = of_passes.select(keys[first] == keys[first[row]])
    return passes


def intervals_by_thread(events: Events) -> dict[tuple[int, int], Intervals]:
    """Return when any event of each thread lasts."""
    keys = thread_keys(events)
    by_thread = {}
    for key in distinct_ids(keys).tolist():
        rows = np.flatnonzero(keys == key)
        thread = int(events.process[rows[0]]), int(events.thread[rows[0]])
        by_thread[thread] = union(events.start[rows], events.end[rows])
    return by_thread


def without_calls(gaps: Intervals) -> Causes:
    """Return the causes without CUDA calls: nothing can be proven."""
    of = dict.fromkeys(IDLE_CAUSES, EMPTY) | {"other_idle": gaps}
    return Causes(of, gaps.end, np.full(len(gaps), NOBODY, np.int32), EMPTY, EMPTY)


def find_causes(
    operations: GpuOperations,
    gaps: Intervals,
    calls: CudaApiCalls,
    evidence: HostEvidence,
    waits: Mapping[int, Intervals],
) -> Causes:
    """Divide the gaps of one GPU by cause.

    The gaps end where an operation starts, or at the end of a window; ``waits`` are those of the
    threads that feed this GPU's process, from `waits_for_data`.
    """
    proofs, feeder = _proofs(operations, gaps, calls, evidence, waits)
    # Each cause without the time of earlier ones; empties the proofs, to save memory.
    given = EMPTY
    of = {}
    for cause in IDLE_CAUSES:
        of[cause] = reduce(merge_touching, proofs.pop(cause), EMPTY).difference(given)
        if proofs:
            given = merge_touching(given, of[cause])
    feeding = [calls.threads[thread] for thread in distinct_ids(feeder[feeder != NOBODY]).tolist()]
    mpi = [evidence.mpi.get(pair, EMPTY) for pair in feeding]
    in_mpi = of["sync"].intersection(reduce(merge_touching, mpi, EMPTY))
    prepares = [
        times.intersection(evidence.passes.get(calls.threads[thread], EMPTY))
        for thread, times in waits.items()
    ]
    between_calls = of["launch"].intersection(reduce(merge_touching, prepares, EMPTY))
    return Causes(of, gaps.end, feeder, in_mpi, between_calls)


def _proofs(
    operations: GpuOperations,
    gaps: Intervals,
    calls: CudaApiCalls,
    evidence: HostEvidence,
    waits: Mapping[int, Intervals],
) -> tuple[dict[str, list[Intervals]], NDArray[np.int32]]:
    """Return when each cause is proven, overlaps included, and the feeding thread of each gap."""
    ending = np.minimum(search(operations.start, gaps.end), len(operations) - 1)
    issued_by = calls.issued_by(operations.events, ending)
    known = issued_by != NOBODY
    feeder = np.where(known, calls.thread[issued_by], NOBODY).astype(np.int32)
    # Work is issued somewhere within the call, at the latest when it starts.
    issued = np.minimum(calls.end[issued_by], operations.start[ending])
    issued = np.where(known, issued, gaps.start)
    held_calls = calls_held_by_copies(operations, calls)
    proofs: dict[str, list[Intervals]] = {cause: [] for cause in IDLE_CAUSES}
    for thread in distinct_ids(feeder[known]).tolist():
        rows = feeder == thread
        mine = Intervals(gaps.start[rows], gaps.end[rows])
        # From its moment of issue on, the GPU has work.
        until = np.clip(issued[rows], mine.start, mine.end)
        waiting = Intervals(mine.start, until).select(until > mine.start)
        pair = calls.threads[thread]
        loads = waits.get(thread, EMPTY).difference(evidence.passes.get(pair, EMPTY))
        data = merge_touching(loads, evidence.data.get(pair, EMPTY))
        proofs["recorder"].append(mine.intersection(evidence.recorder.get(pair, EMPTY)))
        proofs["data_feeding"].append(waiting.intersection(data))
        blocked = merge_touching(
            calls.of_thread(thread, Call.SYNC, Call.COPY), held_calls.get(thread, EMPTY)
        )
        proofs["sync"].append(waiting.intersection(blocked))
        allocating = calls.of_thread(thread, Call.ALLOC)
        # MPI maps the memory of other ranks, once for each buffer.
        in_mpi = evidence.mpi.get(pair, EMPTY).difference(allocating)
        proofs["sync"].append(waiting.intersection(in_mpi))
        stuck, queued = issued[rows] + _LATENCY_NS, issued[rows] <= mine.start
        # Work that was queued before the gap may wait for another stream or GPU.
        fresh = Intervals(mine.start[~queued], mine.end[~queued])
        for times, since, sort, least in (
            (mine, stuck, Call.COPY, _HELD_NS),
            (fresh, stuck[~queued], Call.SYNC, _LONG_HELD_NS),
        ):
            begins = np.clip(since, times.start, times.end)
            after = Intervals(begins, times.end).select(times.end > begins)
            held = after.intersection(calls.of_thread(thread, sort))
            long = held.lengths > least
            proofs["sync"].append(Intervals(held.start[long], held.end[long]))
        proofs["alloc"].append(waiting.intersection(allocating))
    late = known & (issued > gaps.start) & _is_seen(operations, gaps, ending, calls)
    proofs["launch"].append(Intervals(gaps.start[late], gaps.end[late]))
    proofs["other_idle"].append(gaps)
    return proofs, feeder


def calls_held_by_copies(operations: GpuOperations, calls: CudaApiCalls) -> dict[int, Intervals]:
    """Return by thread the calls that copied to the host and returned after that copy had ended:
    into pageable memory, all do.
    """
    copies = np.flatnonzero(operations.events.kind == Kind.COPY_D2H)
    issued_by = calls.issued_by(operations.events, copies)
    held = issued_by != NOBODY
    held[held] = calls.end[issued_by[held]] >= operations.end[copies[held]]
    rows = distinct_ids(issued_by[held])
    threads = calls.thread[rows]
    return {
        thread: union(calls.start[rows[threads == thread]], calls.end[rows[threads == thread]])
        for thread in distinct_ids(threads).tolist()
    }


def _is_seen(
    operations: GpuOperations, gaps: Intervals, ending: NDArray[np.int64], calls: CudaApiCalls
) -> Mask:
    """Return whether the host was recorded throughout the gap and since it issued what ran before.

    Else it is not known that it did nothing but come late.
    """
    process = operations.gpu.process
    seen = calls.all_recorded(process, gaps.start, gaps.end)
    if operations.coverage.calls is None:
        return seen
    seen &= calls.issued_by(operations.events, np.maximum(ending - 1, 0)) != NOBODY
    return seen


def waits_for_data(
    calls: CudaApiCalls, input_copies: Sequence[Events], evidence: HostEvidence
) -> dict[int, Intervals]:
    """Return when each thread made no CUDA call before issuing an input copy, by thread; within a
    forward pass, that copy is none of a batch.

    The way starts where the thread last handed work to a GPU or had waited for one; calls after
    that which do neither (events, queries, allocations, synchronisations with nothing to wait for)
    interrupt the wait and do not end it; so does a phase of a step, where these were recorded. If a
    wait for the loader was recorded on the way, it starts there: what comes before, such as
    logging, is other work of the program.
    """
    waits: dict[int, Intervals] = {}
    copies = np.concatenate([calls.issued_by(events) for events in input_copies])
    copies = copies[copies != NOBODY]
    for thread in distinct_ids(calls.thread[copies]).tolist():
        first, end = int(calls.first[thread]), int(calls.first[thread + 1])
        sorts = calls.sort[first:end]
        waited = calls.end[first:end] - calls.start[first:end] > _NO_WAIT_NS
        issues = is_among(sorts, (Call.ISSUE, Call.COPY))
        work = np.flatnonzero(issues | ((sorts == Call.SYNC) & waited)) + first
        mine = distinct_ids(copies[calls.thread[copies] == thread])
        before = np.searchsorted(work, mine) - 1
        mine, before = mine[before >= 0], before[before >= 0]
        begins, ends = calls.end[work[before]], calls.start[mine]
        # Where calls were not recorded all along, none between the two proves nothing.
        sure = calls.all_recorded(calls.threads[thread][0], begins, ends)
        stretches = _from_request(
            union(begins[sure], ends[sure]), evidence.data.get(calls.threads[thread], EMPTY)
        )
        phases = evidence.phases.get(calls.threads[thread], EMPTY)
        waits[thread] = stretches.difference(calls.of_thread(thread)).difference(phases)
    return waits


def _from_request(stretches: Intervals, requests: Intervals) -> Intervals:
    """Return stretches from the first request in each on; whole where there is none in it."""
    if not len(requests):
        return stretches
    first = np.minimum(search(requests.end, stretches.start, "right"), len(requests) - 1)
    start = np.clip(requests.start[first], stretches.start, None)
    return Intervals(np.where(start < stretches.end, start, stretches.start), stretches.end)


def all_waits(
    process: int, calls: CudaApiCalls | None, evidence: HostEvidence, waits: Mapping[int, Intervals]
) -> dict[tuple[int, int], Intervals]:
    """Return when threads of a process waited for data: recorded, or shown by their calls."""
    threads = calls.threads if calls is not None else ()
    shown = {
        (pair := threads[thread]): intervals.difference(evidence.passes.get(pair, EMPTY))
        for thread, intervals in waits.items()
    }
    recorded = {pair: times for pair, times in evidence.data.items() if pair[0] == process}
    return {
        pair: merge_touching(recorded.get(pair, EMPTY), shown.get(pair, EMPTY))
        for pair in {*recorded, *shown}
    }


def charge_recorder(
    causes: Causes, starts: Times, steps: StepWindows, cost: RecorderCost
) -> Causes:
    """Return the causes with the recorder's part of the idle time before launches as its own.

    What recording adds is time of the host, which lengthens a step only where a GPU waits. Each
    launch is charged alike, up to the idle time that it ends, such that all charges within the
    steps sum to what recording adds to them, or to all idle time before launches.
    """
    waits = causes.of["launch"]
    if not cost.added_ns or not len(waits) or not len(steps):
        return causes
    issued = np.searchsorted(starts, waits.end, "right")
    launches = np.diff(issued, prepend=issued[0] - 1)
    row = np.maximum(np.searchsorted(steps.start, waits.start, "right") - 1, 0)
    inside = (waits.start >= steps.start[row]) & (waits.end <= steps.end[row])
    typical = float(median(steps.lengths))
    total = len(steps) * typical * cost.added_ns / max(cost.step_ns, 1)
    each = charge_of_each(waits.lengths[inside], launches[inside], total)
    charged = np.minimum(waits.lengths, (launches * each).astype(np.int64))
    split = waits.end - charged
    recorder_time = Intervals(split, waits.end).select(charged > 0)
    left = Intervals(waits.start, split).select(split > waits.start)
    recorder = merge_touching(causes.of["recorder"], recorder_time)
    return replace(causes, of={**causes.of, "launch": left, "recorder": recorder})


def charge_of_each(lengths: Times, launches: Times, total: float) -> float:
    """Return the charge for which the sum of ``min(length, launches * charge)`` is the total.

    A total above the sum of lengths takes all of each.
    """
    if not len(lengths):
        return 0.0
    counts = np.maximum(launches, 1)
    full = lengths / counts
    order = np.argsort(full, kind="stable")
    before = np.cumsum(lengths[order]) - lengths[order]
    later = np.cumsum(counts[order][::-1])[::-1]
    reached = before + full[order] * later
    index = int(np.searchsorted(reached, total))
    if index == len(reached):
        return float(full.max())
    return max(0.0, (total - float(before[index])) / float(later[index]))
