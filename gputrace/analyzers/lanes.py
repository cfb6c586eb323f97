"""Lanes: the exact partition of the time of one GPU, or of one rank of which no GPU was seen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.host_calls import CudaApiCalls
from gputrace.analyzers.idle_causes import (
    Causes,
    HostEvidence,
    all_waits,
    find_causes,
    read_evidence,
    waits_for_data,
    without_calls,
)
from gputrace.analyzers.operations import Gpu, GpuOperations, OperationClass
from gputrace.analyzers.steps import FoundSteps, find_input_copies
from gputrace.analyzers.steps.windows import StepWindows, count_warmup
from gputrace.errors import InputError
from gputrace.model.events import COPY_KINDS, UNKNOWN, Kind, Mask
from gputrace.model.intervals import EMPTY, Intervals, Times, union
from gputrace.model.time_class import IDLE_CAUSES
from gputrace.model.trace import Trace, Window
from gputrace.store.spill_file import SpillFile


class Shares(NamedTuple):
    """Nanoseconds of one window by class; they sum to its length."""

    compute: int
    communication: int
    h2d: int
    other_copy: int
    memset: int
    idle: int


@dataclass(frozen=True)
class Timeline:
    """Activity of one GPU, as disjoint intervals."""

    gpu: Gpu
    window: Window
    """From the first start to the last end of an operation, or the part of that asked for."""
    classes: tuple[Intervals, ...]
    """For each `OperationClass`, when it ran and none of higher precedence, not clipped."""
    busy: Intervals
    """When anything ran on the GPU."""
    kernels: int
    copies: int
    opaque_graphs: int
    """CUDA graphs recorded as a whole; they count as compute."""
    recorded: Intervals
    """Recorded parts of the window, not clipped; the rest is unknown."""

    def of_class(self, which: OperationClass) -> Intervals:
        """When the class ran and none of higher precedence."""
        return self.classes[which]

    def split(self, starts: ArrayLike, ends: ArrayLike) -> NDArray[np.int64]:
        """Partition of many windows: shape (windows, 6), columns as in `Shares`.

        What was not recorded of a window is in none of them.
        """
        starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        own = np.stack([times.within(starts, ends) for times in self.classes], axis=-1)
        known = self.recorded.within(starts, ends) if len(self.recorded) > 1 else ends - starts
        idle = known - own.sum(axis=-1)
        return np.concatenate([own, idle[..., None]], axis=-1)

    @property
    def shares(self) -> Shares:
        """Partition of the whole window."""
        return Shares(*self.split([self.window.start], [self.window.end])[0].tolist())

    @cached_property
    def gaps(self) -> Intervals:
        """Stretches of the window in which the GPU runs nothing."""
        gaps = self.busy.complement(*self.window)
        return gaps.intersection(self.recorded) if len(self.recorded) > 1 else gaps


def build_timeline(operations: GpuOperations, window: Window | None = None) -> Timeline:
    """The timeline of one GPU; a window narrows the GPU's own span and never widens it."""
    start, end, kind = operations.start, operations.end, operations.events.kind
    span = Window(int(start[0]), int(end.max()))
    if window is not None:
        first, last = max(span.start, window.start), min(span.end, window.end)
        span = Window(first, max(first, last))
        kind = kind[(start < last) & (end > first)]
    classes, busy = _classes(start, end, operations.classes)
    return Timeline(
        operations.gpu,
        span,
        classes,
        busy,
        kernels=int(np.count_nonzero(kind == Kind.KERNEL)),
        copies=int(np.isin(kind, COPY_KINDS).sum()),
        opaque_graphs=int(np.count_nonzero(kind == Kind.GRAPH)),
        recorded=operations.recorded,
    )


def _classes(
    start: Times, end: Times, classes: NDArray[np.int8]
) -> tuple[tuple[Intervals, ...], Intervals]:
    """When each class has the GPU, and when any has."""
    found: list[Intervals] = []
    busy = EMPTY
    for which in OperationClass:
        own = _union(start, end, classes == which)
        found.append(own.difference(busy))
        if len(own):
            # At once, of all rows so far: to put the new ones among the others takes longer.
            busy = _union(start, end, classes <= which) if len(busy) else own
    return tuple(found), busy


def _union(start: Times, end: Times, rows: Mask) -> Intervals:
    return union(start[rows], end[rows], is_sorted=True)


@dataclass(frozen=True)
class Waiting:
    """One GPU in collectives, as far as it is waiting."""

    waits: Intervals
    """When it ran a collective to which the last rank had not come."""
    unknown: Intervals
    """When it ran one of which the last arrival is not known."""

    def within(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Nanoseconds of windows spent waiting; `UNKNOWN` where any of it is not known."""
        unknown = self.unknown.within(starts, ends) > 0
        return np.where(unknown, UNKNOWN, self.waits.within(starts, ends))


def find_waiting(timeline: Timeline, waits: Waiting) -> Waiting:
    """The waiting of a GPU in the class ``communication``, of that in its collectives."""
    communication = timeline.of_class(OperationClass.COMMUNICATION)
    return Waiting(
        communication.intersection(waits.waits), communication.intersection(waits.unknown)
    )


class Place(Protocol):
    """Subject of a row of results: a GPU, or a host-only rank (None)."""

    @property
    def gpu(self) -> int | None: ...
    @property
    def gpu_known(self) -> bool: ...
    @property
    def device(self) -> int | None: ...
    @property
    def rank(self) -> int: ...


class AnyLane(Protocol):
    """One place, with what is known about its time."""

    @property
    def gpu(self) -> Place: ...
    @property
    def window(self) -> Window: ...
    @property
    def host_data(self) -> Intervals | None: ...
    @property
    def with_calls(self) -> Intervals | None:
        """The parts of the window with all CUDA calls; None where that is all of it."""

    def split(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Shape (windows, len(CLASSES)); (windows, 0) where no class is known."""

    def idle(self, start: int, end: int) -> int | None: ...

    def waited(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Return the communication of each window spent waiting for other ranks; `UNKNOWN` if
        unknown.
        """


@dataclass(frozen=True)
class Lane:
    """One GPU with everything that has been found about its time."""

    timeline: Timeline
    causes: Causes
    host_data: Intervals | None
    """When its feeding threads were in the data loader; None where that is not known."""
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
        """The GPU's span, or the part of it that was asked for."""
        return self.timeline.window

    @property
    def operations(self) -> int:
        """Return the numbers of kernels, copies and graphs that ran."""
        return self.timeline.kernels + self.timeline.copies + self.timeline.opaque_graphs

    def split(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Partition of windows with idle time by cause: shape (windows, len(CLASSES)).

        A step of the rank may begin before this GPU's first operation and end after its last. That
        is no gap, so no cause is known of it.
        """
        shares, causes = self.timeline.split(starts, ends), self.causes.within(starts, ends)
        causes[:, IDLE_CAUSES.index("other_idle")] += shares[:, -1] - causes.sum(axis=1)
        return np.concatenate([shares[:, :-1], causes], axis=1)

    def idle(self, start: int, end: int) -> int:
        """Nanoseconds of a stretch in which the GPU runs nothing."""
        return int(self.timeline.split([start], [end])[0, -1])

    def waited(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Return the communication of each window spent waiting for other ranks; `UNKNOWN` if
        unknown.
        """
        if self.waiting is None:
            return np.full(len(starts), UNKNOWN)
        return self.waiting.within(starts, ends)


class AnyLaneSummary(Protocol):
    """A lane in brief."""

    @property
    def gpu(self) -> Place: ...
    @property
    def window(self) -> Window: ...
    @property
    def with_calls(self) -> Intervals | None: ...


@dataclass(frozen=True)
class LaneSummary:
    """The lane of a GPU in brief: where it reaches, and what ran in it."""

    gpu: Gpu
    window: Window
    with_calls: Intervals | None
    """These three as of `Lane`."""
    kernels: int
    copies: int
    opaque_graphs: int
    shares: Shares
    """These four as of `Timeline`."""

    @classmethod
    def of(cls, lane: Lane) -> LaneSummary:
        """A lane in brief."""
        own = lane.timeline
        counts = own.kernels, own.copies, own.opaque_graphs
        return cls(lane.gpu, lane.window, lane.with_calls, *counts, own.shares)

    @property
    def operations(self) -> int:
        """Return the numbers of kernels, copies and graphs that ran."""
        return self.kernels + self.copies + self.opaque_graphs


def find_lanes(
    trace: Trace,
    operations: Sequence[GpuOperations],
    calls: CudaApiCalls | None,
    steps: Mapping[int, StepWindows],
    window: Window | None = None,
    scratch: SpillFile | None = None,
    has_calls: bool = True,
) -> list[Lane]:
    """Timelines and causes of all GPUs with anything in the window.

    Args:
        trace: whose rows they are.
        operations: of the GPUs.
        calls: of the host threads that feed them.
        steps: of the GPUs' ranks.
        window: the part of the time that was asked for.
        scratch: for what is not held in memory.
        has_calls: whether there are calls of other ranks where there are none of these.
    """
    has_calls = has_calls or calls is not None
    evidence = read_evidence(trace) if has_calls else HostEvidence({}, {})
    waits = _waits(trace, operations, calls, scratch) if calls is not None else {}
    lanes = []
    for own in operations:
        timeline = build_timeline(own, window)
        if window is not None and timeline.window.start >= timeline.window.end:
            continue
        gaps = build_timeline(own).gaps if window is not None else timeline.gaps
        gaps = _with_edges(gaps, own, steps.get(own.gpu.rank))
        lane = Lane(timeline, without_calls(gaps), None)
        if has_calls:
            mine = waits.get(own.gpu.process, {})
            lane = replace(
                lane,
                host_data=_host_data(mine, evidence, own),
                data=all_waits(own.gpu.process, calls, evidence, mine),
                with_calls=_with_calls(own, timeline.window),
            )
        if calls is not None:
            lane = replace(lane, causes=find_causes(own, gaps, calls, evidence, mine))
        lanes.append(scratch.keep(lane) if scratch else lane)
    return lanes


def _with_calls(own: GpuOperations, window: Window) -> Intervals | None:
    if own.calls_recorded is None:
        return None
    starts, ends = np.array(own.calls_recorded, np.int64).reshape(-1, 2).T
    return union(starts, ends).clip(window.start, window.end)


def _waits(
    trace: Trace,
    operations: Sequence[GpuOperations],
    calls: CudaApiCalls,
    scratch: SpillFile | None,
) -> dict[int, dict[int, Intervals]]:
    """For each process, when its threads were on their way to an input copy."""
    copies: dict[int, list[GpuOperations]] = {}
    for own in operations:
        copies.setdefault(own.gpu.process, []).append(own)
    found = {}
    for process, gpus in copies.items():
        inputs = [own.events.select(find_input_copies(trace, own)) for own in gpus]
        found[process] = waits_for_data(calls, inputs)
        if scratch:
            scratch.let_go()
    return found


def _with_edges(gaps: Intervals, operations: GpuOperations, steps: StepWindows | None) -> Intervals:
    """The gaps, and where a profiler's steps reach beyond the GPU's operations, those stretches."""
    if steps is None or steps.source != "profiler":
        return gaps
    first, last = int(operations.start[0]), int(operations.reach[-1])
    before, after = min(int(steps.start[0]), first), max(int(steps.end[-1]), last)
    starts = np.concatenate([[before], gaps.start, [last]])
    ends = np.concatenate([[first], gaps.end, [after]])
    real = starts < ends
    return Intervals(starts[real], ends[real])


def _host_data(
    waits: dict[int, Intervals], evidence: HostEvidence, own: GpuOperations
) -> Intervals | None:
    """The feeding thread's time in the data loader; of several threads, the busiest one's.

    What was recorded of it counts, and what the calls show only where nothing was; while the GPU
    was not recorded, neither.
    """
    process = own.gpu.process
    recorded = [intervals for pair, intervals in evidence.data.items() if pair[0] == process]
    known = recorded or list(waits.values())
    if not known:
        return None
    most = max(known, key=lambda intervals: intervals.total)
    return most.intersection(own.recorded) if len(own.recorded) > 1 else most


@dataclass(frozen=True, slots=True)
class Unseen:
    """The GPU of a rank of which no GPU was seen."""

    rank: int
    gpu: None = None
    gpu_known: bool = False
    device: None = None


@dataclass(frozen=True)
class HostLane:
    """One rank, with what its host threads tell of its time."""

    gpu: Place
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
        """Nor is whether it waited for other ranks."""
        return np.full(len(starts), UNKNOWN)


@dataclass(frozen=True)
class _Marked:
    """The steps of one process, in order and disjoint, and the threads that marked them."""

    start: Times
    end: Times
    threads: frozenset[int]
    name: str


_Waits = Mapping[tuple[int, int], Intervals]
"""By process and thread."""


def find_host_lanes(
    trace: Trace, window: Window | None, chosen: tuple[int, int] | None = None
) -> tuple[list[HostLane], FoundSteps]:
    """A lane for every rank that has anything in the window, and everyone's steps.

    Where some process marks steps, only those that do are ranks; else those that wait for data.
    Raises InputError where there is neither.
    """
    waits = {thread: found for thread, found in read_evidence(trace).data.items() if len(found)}
    marked = _read_marked(trace, waits)
    work = {process: len(steps.start) for process, steps in marked.items()}
    ranks, known = _ranks(trace, work or {process: 0 for process, _ in waits})
    lanes, found = [], {}
    for rank, process in sorted(ranks.items()):
        steps = marked.get(process)
        own = _waits_of(process, waits, steps.threads if steps else None)
        span = _span(steps, own, window)
        if span.start < span.end:
            lanes.append(HostLane(Unseen(rank), span, own))
        if steps is not None:
            found[rank] = _windows(rank, steps, known or len(ranks) == 1)
    if not lanes and window is None:
        raise InputError(trace.path, _nothing_told(trace))
    warmup = max((count_warmup(w.lengths) for w in found.values()), default=0)
    return lanes, FoundSteps(found, warmup, chosen, "no step was marked")


def _nothing_told(trace: Trace) -> str:
    assert trace.no_gpu is not None
    why, remedy = trace.no_gpu
    return f"no GPU activity ({why}), and neither steps nor waits for data; {remedy}"


def _read_marked(trace: Trace, waits: _Waits) -> dict[int, _Marked]:
    """By process, its steps; those that a broken file makes begin within another are left out."""
    events = trace.events([Kind.STEP], ("start", "end", "name", "process", "thread"))
    found = {}
    for process in np.unique(events.process).tolist():
        rows = np.flatnonzero(events.process == process)
        rows = rows[np.argsort(events.start[rows], kind="stable")]
        before = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, events.end[rows][:-1]))
        own = events.select(rows[events.start[rows] >= before])
        threads = frozenset(own.thread.tolist())
        start = _with_known_start(own.start, own.end, _waits_of(process, waits, threads))
        if len(start):
            name = int(own.name[0])
            end = own.end[-len(start) :]
            found[process] = _Marked(start, end, threads, trace.names([name])[name])
    return found


def _with_known_start(start: Times, end: Times, waits: Intervals | None) -> Times:
    """The starts of steps, of which the first begins with its first wait for data.

    Nothing marks it: without a wait its length is not known, and it is left out.
    """
    if waits is None or waits.start[0] >= end[0]:
        return start[1:]
    return np.append(np.minimum(start[:1], waits.start[0]), start[1:])


def _ranks(trace: Trace, work: Mapping[int, int]) -> tuple[dict[int, int], bool]:
    """The process of each rank, and whether ranks were recorded; else by machine and process id.

    Of several processes of a rank, as loaders' workers are, the one with most steps.
    """
    recorded = {process: trace.processes[process].rank for process in work}
    if UNKNOWN not in recorded.values():
        ordered = sorted(work, key=lambda process: work[process])
        return {recorded[process]: process for process in ordered}, True

    def place(process: int) -> tuple[int, int]:
        return trace.processes[process].host, trace.processes[process].pid

    return dict(enumerate(sorted(work, key=place))), False


def _waits_of(process: int, waits: _Waits, threads: Collection[int] | None) -> Intervals | None:
    """The waits of the threads that mark the steps, or of all; of several, the one that waits most.

    What another thread waits for, the training does not wait for.
    """
    own = (
        found
        for (of, thread), found in waits.items()
        if of == process and (threads is None or thread in threads)
    )
    return max(own, key=lambda found: found.total, default=None)


def _span(steps: _Marked | None, waits: Intervals | None, window: Window | None) -> Window:
    known = [some for some in (steps, waits) if some is not None]
    span = Window(min(int(s.start[0]) for s in known), max(int(s.end[-1]) for s in known))
    if window is None:
        return span
    return Window(max(span.start, window.start), min(span.end, window.end))


def _windows(rank: int, steps: _Marked, rank_known: bool) -> StepWindows:
    unknown = "" if rank_known else " (ranks were not recorded: processes in order of their ids)"
    return StepWindows(
        rank=rank,
        start=steps.start,
        end=steps.end,
        busy_from=steps.start,
        source="markers",
        kind="training",
        confidence=1.0,
        reason=f"from mark to mark of {steps.name!r}, in host time{unknown}",
    )
