"""Lanes: the exact partition of the time of one GPU, or of one host-only rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np
from msgspec import field
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY, CudaApiCalls
from gputrace.analyzers.grouping import median
from gputrace.analyzers.idle_causes import (
    Causes,
    HostEvidence,
    all_waits,
    charge_recorder,
    find_causes,
    read_evidence,
    waits_for_data,
    without_calls,
)
from gputrace.analyzers.operations import Gpu, GpuOperations, OperationClass
from gputrace.analyzers.steps import FoundSteps, find_input_copies
from gputrace.analyzers.steps.marks import mend
from gputrace.analyzers.steps.rollouts import join_updates, read_named_ranges, rollouts_of
from gputrace.analyzers.steps.windows import Interlude, StepWindows, count_warmup, read_between
from gputrace.errors import InputError
from gputrace.model.events import COPY_KINDS, UNKNOWN, Kind, distinct_ids, is_among
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching, union, union_of
from gputrace.model.options import Window
from gputrace.model.results import RecorderCost
from gputrace.model.struct import Struct
from gputrace.model.time_class import BUSY_CLASSES, IDLE_CAUSES
from gputrace.model.trace import Trace
from gputrace.store.spill_file import SpillFile


class Timeline(Struct, frozen=True, dict=True):
    """Activity of one GPU, as disjoint intervals."""

    gpu: Gpu
    window: Window
    """Window from the first start to the last end of an operation, or the requested part of it."""
    classes: tuple[Intervals, ...]
    """Intervals in which each `OperationClass` ran and none of higher precedence, not clipped."""
    busy: Intervals
    """Intervals in which anything ran."""
    kernels: int
    copies: int
    opaque_graphs: int
    """Number of CUDA graphs recorded as a whole; they count as compute."""
    recorded: Intervals
    """Recorded parts of the window, not clipped; the rest is unknown."""

    def of_class(self, which: OperationClass) -> Intervals:
        """Return when the class ran and none of higher precedence."""
        return self.classes[which]

    def split(self, starts: ArrayLike, ends: ArrayLike) -> NDArray[np.int64]:
        """Partition windows: shape (windows, classes + 1), the last column idle.

        The parts of a window that were not recorded are in no column.
        """
        starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        busy = np.stack([times.within(starts, ends) for times in self.classes], axis=-1)
        known = self.recorded.within(starts, ends) if len(self.recorded) > 1 else ends - starts
        idle = known - busy.sum(axis=-1)
        return np.concatenate([busy, idle[..., None]], axis=-1)

    @property
    def shares(self) -> dict[str, int]:
        """Nanoseconds of the whole window by busy class, and ``idle``; they sum to its length."""
        times = self.split([self.window.start], [self.window.end])[0].tolist()
        return dict(zip((*BUSY_CLASSES, "idle"), times, strict=True))

    @cached_property
    def gaps(self) -> Intervals:
        """Stretches of the window in which the GPU runs nothing."""
        gaps = self.busy.complement(*self.window)
        return gaps.intersection(self.recorded) if len(self.recorded) > 1 else gaps


def build_timeline(operations: GpuOperations, window: Window | None = None) -> Timeline:
    """Return the timeline of one GPU; a window narrows the GPU's span and never widens it."""
    start, end, kind = operations.start, operations.end, operations.events.kind
    span = Window(int(start[0]), int(end.max()))
    if window is not None:
        first, last = max(span.start, window.start), min(span.end, window.end)
        span = Window(first, max(first, last))
        kind = kind[(start < last) & (end > first)]
    classes: list[Intervals] = []
    busy = EMPTY
    for which in OperationClass:
        times = union_of(start, end, operations.classes, range(which, which + 1))
        classes.append(times.difference(busy))
        busy = merge_touching(busy, times)
    return Timeline(
        operations.gpu,
        span,
        tuple(classes),
        busy,
        kernels=int(np.count_nonzero(kind == Kind.KERNEL)),
        copies=int(is_among(kind, COPY_KINDS).sum()),
        opaque_graphs=int(np.count_nonzero(kind == Kind.GRAPH)),
        recorded=operations.recorded,
    )


class Waiting(Struct, frozen=True, dict=True):
    """Time that one GPU spends in collectives, waiting for other ranks."""

    waits: Intervals
    """When it ran a collective to which the last rank had not come."""
    unknown: Intervals
    """When it ran one of which the last arrival is not known."""

    def intersection(self, time: Intervals) -> Waiting:
        """Return the waiting within some intervals."""
        return Waiting(self.waits.intersection(time), self.unknown.intersection(time))

    def within(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Return nanoseconds of each window spent waiting; `UNKNOWN` if any of it is unknown."""
        unknown = self.unknown.within(starts, ends) > 0
        return np.where(unknown, UNKNOWN, self.waits.within(starts, ends))


class Lane(Struct, frozen=True, dict=True):
    """Partition of the time of one GPU, with the causes of its idle time."""

    timeline: Timeline
    causes: Causes
    host_data: Intervals | None
    """When its feeding threads waited for data; None where that is not known."""
    loader: Intervals = EMPTY
    """When hooks saw one of them in the data loader."""
    waiting: Waiting | None = None
    """When its communication waits for other ranks; None where collectives were not matched."""
    data: Mapping[tuple[int, int], Intervals] = field(default_factory=dict)
    """When threads of its process, by (process, thread), waited for data: recorded, or proven."""
    with_calls: Intervals | None = None
    """The parts of its window with all CUDA calls; None where that is all of it."""

    @property
    def gpu(self) -> Gpu:
        return self.timeline.gpu

    @property
    def window(self) -> Window:
        return self.timeline.window

    def split(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Partition windows, idle time by cause: shape (windows, len(CLASSES)).

        A step of the rank may begin before this GPU's first operation and end after its last. That
        is no gap, so its cause is unknown.
        """
        shares, causes = self.timeline.split(starts, ends), self.causes.within(starts, ends)
        causes[:, IDLE_CAUSES.index("other_idle")] += shares[:, -1] - causes.sum(axis=1)
        return np.concatenate([shares[:, :-1], causes], axis=1)

    def idle(self, start: int, end: int) -> int:
        """Return the nanoseconds of a window in which the GPU runs nothing."""
        return int(self.timeline.split([start], [end])[0, -1])

    def waited(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Return nanoseconds of communication spent waiting for other ranks, or `UNKNOWN`."""
        if self.waiting is None:
            return np.full(len(starts), UNKNOWN)
        return self.waiting.within(starts, ends)


class LaneSummary(Struct, frozen=True, dict=True):
    """Fields of a `Lane` and its `Timeline` that do not grow with the trace."""

    gpu: Gpu
    window: Window
    with_calls: Intervals | None
    kernels: int
    copies: int
    opaque_graphs: int
    shares: Mapping[str, int]

    @classmethod
    def of(cls, lane: Lane) -> LaneSummary:
        timeline = lane.timeline
        counts = timeline.kernels, timeline.copies, timeline.opaque_graphs
        return cls(lane.gpu, lane.window, lane.with_calls, *counts, timeline.shares)

    @property
    def operations(self) -> int:
        """Return the numbers of kernels, copies and graphs that ran."""
        return self.kernels + self.copies + self.opaque_graphs


class HostSide(Struct, frozen=True):
    """Recorded activity of the hosts that feed some GPUs."""

    calls: CudaApiCalls | None
    """None where only other hosts' calls were recorded."""
    evidence: HostEvidence
    waits: Mapping[int, Mapping[int, Intervals]]
    """When each thread prepared an input copy, by process and thread."""


def read_host_side(
    trace: Trace,
    operations: Sequence[GpuOperations],
    calls: CudaApiCalls | None,
    scratch: SpillFile | None,
) -> HostSide:
    """Read what the hosts did that issued some operations; memory is released to a ``scratch``."""
    evidence, waits = read_evidence(trace), dict[int, dict[int, Intervals]]()
    if calls is None:
        return HostSide(None, evidence, waits)
    rollouts = trace.once(read_named_ranges).rollouts
    gpus_of = defaultdict[int, list[GpuOperations]](list)
    for of_gpu in operations:
        gpus_of[of_gpu.gpu.process].append(of_gpu)
    for process, gpus in gpus_of.items():
        inputs = [of_gpu.events.select(find_input_copies(trace, of_gpu)) for of_gpu in gpus]
        # While another process generates, its answers are waited for.
        rolled = rollouts_of(process, rollouts)
        shown = waits_for_data(calls, inputs, evidence)
        waits[process] = {thread: times.difference(rolled) for thread, times in shown.items()}
        if scratch is not None:
            scratch.let_go()
    return HostSide(calls, evidence, waits)


def find_lanes(
    operations: Sequence[GpuOperations],
    host: HostSide | None,
    steps: Mapping[int, StepWindows],
    window: Window | None,
    cost: RecorderCost | None,
    scratch: SpillFile | None,
) -> Iterator[Lane]:
    """Yield the timelines and causes of all GPUs with anything in the window.

    Args:
        operations: of each GPU.
        host: None where no calls were recorded, on any host.
        steps: by rank.
        window: None for all of the trace.
        cost: of recording the steps; None where it is not known.
        scratch: holds what need not be in memory.
    """
    for of_gpu in operations:
        timeline = build_timeline(of_gpu, window)
        if window is not None and timeline.window.start >= timeline.window.end:
            continue
        if scratch is not None:  # Not in memory while causes are found.
            timeline = scratch.spill(timeline)
            scratch.let_go()
        marked = steps.get(of_gpu.gpu.rank)
        gaps = build_timeline(of_gpu).gaps if window is not None else timeline.gaps
        gaps = _with_edges(gaps, of_gpu, marked)
        if host is None:
            yield Lane(timeline, without_calls(gaps), None)
            continue
        lane = _explain(timeline, gaps, of_gpu, host)
        if host.calls is not None and cost is not None and marked is not None:
            causes = charge_recorder(lane.causes, of_gpu.start, marked, cost)
            lane = replace(lane, causes=causes)
        yield lane


def _explain(
    timeline: Timeline, gaps: Intervals, operations: GpuOperations, host: HostSide
) -> Lane:
    """Return a lane with the causes of its gaps, and its feeding thread's waits for data.

    Of several threads, the one with most counts. The calls show it only where no waits were
    recorded, and of threads that launch kernels, outside their forward passes: one that only copies
    prefetches, and may wait for room as well. While the GPU was not recorded, neither counts.
    """
    process, calls, evidence = operations.gpu.process, host.calls, host.evidence
    waits = host.waits.get(process, {})
    causes = without_calls(gaps)
    if calls is not None:
        causes = find_causes(operations, gaps, calls, evidence, waits)
    all_data = all_waits(process, calls, evidence, waits)
    known = [time for pair, time in evidence.data.items() if pair[0] == process]
    if not known and calls is not None:
        launched = is_among(operations.events.kind, (Kind.KERNEL, Kind.GRAPH))
        issued_by = calls.issued_by(operations.events, launched)
        launching = set(distinct_ids(calls.thread[issued_by[issued_by != NOBODY]]).tolist())
        known = [all_data[calls.threads[thread]] for thread in waits if thread in launching]
    data = max(known, key=lambda time: time.total, default=None)
    if data is not None and len(operations.recorded) > 1:
        data = data.intersection(operations.recorded)
    with_calls = None
    if (recorded := operations.coverage.calls) is not None:
        starts, ends = np.array(recorded, np.int64).reshape(-1, 2).T
        with_calls = union(starts, ends).clip(*timeline.window)
    in_loader = [time for pair, time in evidence.loader.items() if pair[0] == process]
    loader = max(in_loader, key=lambda time: time.total, default=EMPTY)
    return Lane(timeline, causes, data, loader, data=all_data, with_calls=with_calls)


def _with_edges(gaps: Intervals, operations: GpuOperations, steps: StepWindows | None) -> Intervals:
    """Add the time by which a profiler's steps reach beyond the GPU's operations to its gaps."""
    if steps is None or steps.source != "profiler":
        return gaps
    first, last = int(operations.start[0]), int(operations.reach[-1])
    before, after = min(int(steps.start[0]), first), max(int(steps.end[-1]), last)
    starts = np.concatenate([[before], gaps.start, [last]])
    ends = np.concatenate([[first], gaps.end, [after]])
    real = starts < ends
    return Intervals(starts[real], ends[real])


class HostRank(Struct, frozen=True):
    """Host-only rank: it stands where other lanes have their `Gpu`."""

    rank: int
    gpu: None = None
    gpu_known: bool = False
    device: None = None


class HostLane(Struct, frozen=True, dict=True):
    """Time of a host-only rank, as its host threads show it."""

    gpu: HostRank
    window: Window
    """From the first start to the last end of its steps and waits, or the part asked for."""
    host_data: Intervals | None
    """When the thread that trains waited for data; None where no wait of it was recorded."""
    with_calls: None = None

    def split(self, starts: Times, _ends: Times) -> NDArray[np.int64]:
        """No class of a GPU's time is known: no columns."""
        return np.empty((len(starts), 0), np.int64)

    def idle(self, _start: int, _end: int) -> None:
        """Return no time: it is unknown whether a GPU ran nothing."""

    def waited(self, starts: Times, _ends: Times) -> NDArray[np.int64]:
        """Return `UNKNOWN` for each window: communication was not recorded."""
        return np.full(len(starts), UNKNOWN)


AnyGpu = Gpu | HostRank
AnyLane = Lane | HostLane
AnyLaneSummary = LaneSummary | HostLane


class _Marked(Struct, frozen=True, dict=True):
    """Disjoint steps of one process, in order, and the threads that marked them."""

    start: Times
    end: Times
    numbers: Times | None
    """Numbers of the steps as the program counted them; None if it did not."""
    threads: frozenset[int]
    name: str


_Waits = Mapping[tuple[int, int], Intervals]
"""By process and thread."""


def find_host_lanes(
    trace: Trace, window: Window | None, chosen: tuple[int, int] | None = None
) -> tuple[list[HostLane], FoundSteps]:
    """Return a lane for every rank that has anything in the window, and the steps of all ranks.

    Ranks are the processes that mark steps; if none does, those that wait for data, or whose lines
    were sampled. Raises InputError where there are none.
    """
    waits = {thread: time for thread, time in read_evidence(trace).data.items() if len(time)}
    marked, rollouts = _read_marked(trace, waits), trace.once(read_named_ranges).rollouts
    work = {process: len(steps.start) for process, steps in marked.items()}
    ranks, known = ranks_of(trace, work or {process: 0 for process, _ in waits})
    unknown = "" if known or len(ranks) == 1 else _RANKS_UNKNOWN
    lanes, windows = [], {}
    for rank, process in sorted(ranks.items()):
        steps, turns = marked.get(process), None
        if steps is not None:
            turns = join_updates(rollouts_of(process, rollouts), steps.start, steps.end)
            if turns is not None:
                # The program counted the updates, of which a turn may have any number.
                steps = replace(steps, start=turns[2], end=steps.end[turns[1]], numbers=None)
        data = _waits_of(process, waits, steps.threads if steps else None)
        if steps is None and data is not None and len(data) < _FEWEST_WAITS:
            continue
        times = [some for some in (steps, data) if some is not None]
        first, last = min(int(t.start[0]) for t in times), max(int(t.end[-1]) for t in times)
        if window is not None:
            first, last = max(first, window.start), min(last, window.end)
        if first < last:
            lanes.append(HostLane(HostRank(rank), Window(first, last), data))
        if steps is not None:
            windows[rank] = _windows_of_marks(
                trace, rank, process, steps, unknown, rolls_out=turns is not None
            )
        elif data is not None and len(data) > _FEWEST_BATCHES:
            windows[rank] = _windows_of_batches(rank, data, unknown)
    if not lanes:
        lanes += _lanes_without_marks(trace, window)
    if not lanes and window is None:
        assert trace.no_gpu is not None
        why, remedy = trace.no_gpu
        message = (
            f"no GPU activity ({why}), and neither steps nor waits for data with other work "
            f"between; {remedy}; without a GPU, `gputrace record --python` names the lines of a "
            "Python program as it is; or `import gputrace`, call gputrace.step() at the end of "
            "each step, wrap what makes its batches in `with gputrace.annotate('data'):`, and "
            "record again"
        )
        raise InputError(trace.path, message)
    warmup = max((count_warmup(w.lengths) for w in windows.values()), default=0)
    return lanes, FoundSteps(windows, warmup, chosen, "no step was marked")


def _lanes_without_marks(trace: Trace, window: Window | None) -> Iterator[HostLane]:
    """Yield the lanes of a trace whose program marks neither steps nor waits: of each process with
    sampled lines, or one of all ranges of a host's timeline.
    """
    columns = ("start", "end", "process")
    samples = trace.events({Kind.SAMPLE} & trace.kinds, columns, window)
    sampled = np.unique(samples.process, return_counts=True)
    work = dict(zip(*(each.tolist() for each in sampled), strict=True))
    of_rank = {
        rank: samples.select(samples.process == process)
        for rank, process in sorted(ranks_of(trace, work)[0].items())
    }
    if not work and trace.is_host_timeline:
        of_rank = {0: trace.events([Kind.RANGE], columns, window)}
    for rank, rows in of_rank.items():
        if len(rows):
            span = Window(int(rows.start.min()), int(rows.end.max()))
            yield HostLane(HostRank(rank), span, None)


_FEWEST_WAITS: Final = 2
"""Waits for data between which something else was recorded of a program that marks no step."""
_FEWEST_BATCHES: Final = 10
"""Batches of a loader, in a program that marks no step, from which they are iterations."""
_RANKS_UNKNOWN: Final = " (ranks were not recorded: processes in order of their ids)"


def _windows_of_marks(
    trace: Trace, rank: int, process: int, steps: _Marked, unknown: str, *, rolls_out: bool
) -> StepWindows:
    """Return the steps of a rank from mark to mark; without what the host does between two that is
    no part of either, unless they are turns of rollouts. ``unknown`` says what is not known of it.
    """
    between = read_between(trace, process, steps.threads)
    begins = steps.start if rolls_out else between.begins(steps.start, steps.end)
    interludes: list[Interlude] = []
    for step in np.flatnonzero(begins[1:] > steps.start[1:]).tolist():
        interludes += between.interludes(step, int(steps.start[step + 1]), int(begins[step + 1]))
    turns = "; rollouts between the updates" if rolls_out else ""
    name = steps.name.partition("#")[0]
    return StepWindows(
        rank=rank,
        start=begins,
        end=steps.end,
        busy_from=begins,
        source="markers",
        kind="rl" if rolls_out else "training",
        confidence=1.0,
        reason=f"from mark to mark of {name!r}, in host time{unknown}{turns}",
        interludes=tuple(interludes),
        numbers=steps.numbers,
    )


def _windows_of_batches(rank: int, data: Intervals, unknown: str) -> StepWindows:
    """Return the iterations of a rank from batch to batch of its loader."""
    # The last wait is for the loader's end, or for a batch that was not used up.
    return StepWindows(
        rank=rank,
        start=data.start[:-1],
        end=data.start[1:],
        busy_from=data.start[:-1],
        source="markers",
        kind="iterations",
        confidence=0.6,
        reason=f"from batch to batch of the loader: no step was marked{unknown}",
    )


def _read_marked(trace: Trace, waits: _Waits) -> dict[int, _Marked]:
    """Return the steps by process, mended."""
    columns = ("start", "end", "name", "process", "thread", "correlation")
    events = trace.events([Kind.STEP], columns)
    marked = {}
    for process in np.unique(events.process).tolist():
        steps = events.select(events.process == process)
        mended = mend(steps.start, steps.end)
        if mended is None:
            rows = np.argsort(steps.start, kind="stable")
            before = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, steps.end[rows][:-1]))
            rows = rows[steps.start[rows] >= before]
            start, end = steps.start[rows], steps.end[rows]
            note = f"{len(steps) - len(rows):,} begin within another and are left out"
        else:
            rows, start, end, note = mended
        if note and (note := f"marked steps: {note}") not in trace.quality.notes:
            trace.quality.notes.append(note)
        is_range = trace.source.startswith("kineto")
        if is_range and len(rows) > 1 and 2 * median(end - start) < median(np.diff(start)):
            # Points, as older profilers of PyTorch write them: a step lasts until the next one.
            rows, start, end = rows[:-1], start[:-1], start[1:]
        steps = steps.select(rows)
        threads = frozenset(steps.thread.tolist())
        # Of marks at the ends of steps, nothing marks the start of the first one: it begins with
        # its first wait for data; without a wait its length is not known, and it is left out.
        data, start, numbers = _waits_of(process, waits, threads), start.copy(), steps.correlation
        if data is None or data.start[0] >= end[0]:
            start, end, numbers = (times[not is_range :] for times in (start, end, numbers))
        else:
            start[0] = min(int(start[0]), int(data.start[0]))
        if len(start):
            name = int(steps.name[0])
            counted = None if (numbers < 0).any() else numbers
            marked[process] = _Marked(start, end, counted, threads, trace.names([name])[name])
    return marked


def ranks_of(trace: Trace, work: Mapping[int, int]) -> tuple[dict[int, int], bool]:
    """Return the process of each rank, and True if ranks were recorded; if not, ranks are
    processes in order of host and process id.

    Of several processes of a rank, such as a loader's workers, the one with most steps counts.
    """
    recorded = {process: trace.processes[process].rank for process in work}
    if UNKNOWN not in recorded.values():
        ordered = sorted(work, key=lambda process: work[process])
        return {recorded[process]: process for process in ordered}, True
    places = {process: trace.processes[process] for process in work}
    return dict(enumerate(sorted(work, key=lambda p: (places[p].host, places[p].pid)))), False


def _waits_of(process: int, waits: _Waits, threads: Collection[int] | None) -> Intervals | None:
    """Return the waits of the thread that waits most, among those that mark the steps, or all.

    Training does not wait for what other threads wait for.
    """
    by_thread = (
        times
        for (of, thread), times in waits.items()
        if of == process and (threads is None or thread in threads)
    )
    return max(by_thread, key=lambda times: times.total, default=None)
