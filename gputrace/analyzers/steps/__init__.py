"""Training steps of every rank, from the best source that the trace has: markers that it names
(recorded, profiler steps, NVTX ranges), else inferred from the kernel stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.grouping import median
from gputrace.analyzers.host_calls import NOBODY, CudaApiCalls, by_thread, thread_keys
from gputrace.analyzers.operations import GpuOperations, GpuSummary
from gputrace.analyzers.steps.inferred import (
    Rows,
    find_bursts,
    infer_iterations,
    infer_training,
    inputs_alone,
    inputs_of_steps,
    part_interludes,
    until_written,
    window_starts,
    without_foreign,
)
from gputrace.analyzers.steps.windows import (
    Interlude,
    MarkedSteps,
    StepWindows,
    count_warmup,
    estimate_cost,
)
from gputrace.model.events import Events, Kind, Mask, distinct_ids
from gputrace.model.intervals import Intervals, Times, lie_in, union
from gputrace.model.options import Window
from gputrace.model.results import RecorderCost
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace


class FoundSteps(Struct, frozen=True, dict=True):
    """Steps of all ranks that have some.

    Attributes:
        by_rank: one set of windows for each rank, all of one kind.
        warmup: steps at the start of every rank that are warm-up.
        chosen: the steps to measure, first and end, where a person named them.
        reason: why there are none, where there are none.
        cost: of recording them, where it is known.
    """

    by_rank: Mapping[int, StepWindows]
    warmup: int
    chosen: tuple[int, int] | None = None
    reason: str = "no marker names steps, and no repeating pattern of kernels is a step"
    cost: RecorderCost | None = None

    @property
    def kind(self) -> str:
        """``training``, ``iterations`` or ``none``."""
        return next((windows.kind for windows in self.by_rank.values()), "none")


def steps_by_rank(
    trace: Trace, gpus: Sequence[GpuOperations], calls: CudaApiCalls | None
) -> dict[int, StepWindows]:
    """Return the steps that each rank shows by itself."""
    marks = read_marks(trace) if calls is not None else []
    stretches = trace.node_stretches()
    nodes = union(*np.array(stretches, np.int64).reshape(-1, 2).T)
    indices: dict[int, list[int]] = {}
    for index, operations in enumerate(gpus):
        indices.setdefault(operations.gpu.rank, []).append(index)
    by_rank = {}
    for rank in sorted(indices):
        these = [gpus[index] for index in indices[rank]]
        windows = _of_rank(trace, these, marks, calls)
        if windows is not None:
            whole = within(until_written(trace, windows, these[0].gpu.process), these[0].recorded)
            whole = _without_nodes(nodes, whole, these[0].recorded) if stretches else whole
            if len(whole):
                by_rank[rank] = whole
    return by_rank


def agree(
    trace: Trace,
    shown: Mapping[int, StepWindows],
    gpus: Sequence[GpuSummary],
    chosen: tuple[int, int] | None = None,
) -> FoundSteps:
    """Everyone's steps, of what each rank shows; a kind that only some ranks show is dropped."""
    by_rank = dict(shown)
    if "training" in {windows.kind for windows in by_rank.values()}:
        by_rank = {rank: w for rank, w in by_rank.items() if w.kind == "training"}
    by_rank = same_steps(by_rank, gpus)
    for rank, windows in by_rank.items():
        note = describe_windows(windows, next(gpu.recorded for gpu in gpus if gpu.gpu.rank == rank))
        if note and note not in trace.quality.notes:
            trace.quality.notes.append(note)
    if with_nodes := max((windows.with_nodes for windows in by_rank.values()), default=0):
        trace.quality.notes.append(
            f"{with_nodes:,} steps in which CUDA graph nodes were recorded, which lengthens them, "
            "are left out"
        )
    warmup = max((count_warmup(w.lengths) for w in by_rank.values()), default=0)
    cost = estimate_cost([windows.marked for windows in by_rank.values()])
    marks = len(trace.events([Kind.STEP], ["start"])) if Kind.STEP in trace.kinds else 0
    if marks and not by_rank:
        are, hold = (
            ("range named as a step is", "holds")
            if marks == 1
            else ("ranges named as steps are", "hold")
        )
        few = f"{marks:,} {are} too few, or {hold} too little"
        return FoundSteps(by_rank, warmup, chosen, f"{few} of the GPUs' work", cost)
    return FoundSteps(by_rank, warmup, chosen, cost=cost)


def _of_rank(
    trace: Trace, gpus: list[GpuOperations], marks: list[Marks], calls: CudaApiCalls | None
) -> StepWindows | None:
    """Return the steps of the rank's GPU that shows them best."""
    if calls is not None:
        for mark in marks:
            projected = [w for gpu in gpus if (w := project(mark, gpu, calls)) is not None]
            if projected:
                return replace(projected[0], marked=mark.in_control_of(trace))
    inferred = [w for gpu in gpus if (w := infer_training(trace, gpu)) is not None]
    if inferred:
        return max(inferred, key=lambda windows: windows.confidence)
    busiest = max(gpus, key=len)
    iterations = infer_iterations(busiest)
    if iterations is None or calls is None or not _are_layers(trace, busiest, calls, iterations):
        return iterations
    return None


def _are_layers(
    trace: Trace, operations: GpuOperations, calls: CudaApiCalls, windows: StepWindows
) -> bool:
    """Return whether what repeats lies within one iteration of the program: in one launch of a CUDA
    graph, in one call of a network, or in one marked step without a copy or a graph for each
    repetition.
    """
    first, last = np.searchsorted(operations.start, (windows.start[0], windows.end[-1]))
    events = operations.events.select(slice(first, last))
    issued_by = calls.issued_by(events)
    by, counts = np.unique(issued_by[issued_by != NOBODY], return_counts=True)
    if not len(by) or counts.max() >= _MOST * counts.sum():
        return bool(len(by))
    if np.bincount(_calls_of_networks(trace, calls, by)).max(initial=0) >= _MOST * len(by):
        return True
    copies = np.count_nonzero(events.kind == Kind.COPY_H2D)
    if Kind.STEP not in trace.kinds or max(copies, counts.sum() - len(by)) >= len(windows):
        return False
    steps = trace.events([Kind.STEP], ["start", "end"])
    steps = steps.select(np.argsort(steps.start, kind="stable"))
    place = np.searchsorted(steps.start, calls.start[by], "right") - 1
    place = place[(place >= 0) & (calls.start[by] < steps.end[place])]
    return bool(np.bincount(place, minlength=1).max() >= _MOST * len(by))


def _calls_of_networks(trace: Trace, calls: CudaApiCalls, by: NDArray[np.int32]) -> Numbers:
    """Return the number of the network's call in which each CUDA call was made that was in one.

    Stretches within modules follow one another without a pause until the network returns.
    """
    if Kind.MODULE not in trace.kinds:
        return np.empty(0, np.intp)
    stretches = by_thread(trace.events([Kind.MODULE], ("start", "end", "process", "thread")))
    keys = thread_keys(stretches)
    begins = (np.diff(keys) != 0) | (stretches.start[1:] > stretches.end[:-1])
    around = calls.ranges_around(by, stretches)
    numbers: Numbers = np.append(0, np.cumsum(begins))[around[around != NOBODY]]
    return numbers


def find_input_copies(trace: Trace, operations: GpuOperations) -> Rows:
    """Return the rows of the copies that bring batches to this GPU; empty if they are unknown."""
    bursts = find_bursts(trace, operations)
    if bursts is not None and len(bursts) > 1:
        copies = inputs_of_steps(operations, bursts)
        if len(copies):
            return copies
    return inputs_alone(operations).copies


_COVERED: Final = 0.5
"""Part of another rank's interlude that lies in the step of a rank that is held up by it."""


class BlockedSteps(Struct, frozen=True, dict=True):
    """A step of a rank that has no interlude before it, though another rank has."""

    rank: int
    step: int
    by: int
    """The rank that has."""
    interlude: Interlude
    start: int
    end: int
    """The part of the interlude that lies in the step."""


def find_blocked_steps(by_rank: Mapping[int, StepWindows]) -> Iterator[BlockedSteps]:
    """Return the steps that follow another rank's interlude and mostly last as long as it.

    Where nothing stops the other ranks, they go on to the next step's first collective, and wait
    there.
    """
    for by, windows in by_rank.items():
        for interlude in windows.interludes:
            step = interlude.after + 1
            for rank, theirs in by_rank.items():
                pauses = any(known.after == interlude.after for known in theirs.interludes)
                if rank == by or step >= len(theirs) or pauses:
                    continue
                start = max(interlude.start, int(theirs.start[step]))
                end = min(interlude.end, int(theirs.end[step]))
                if end - start >= _COVERED * (interlude.end - interlude.start):
                    yield BlockedSteps(rank, step, by, interlude, start, end)


_LEAST_STEPS: Final = 3
_LEAST_PROFILED: Final = 2
"""Minimum number of ranges that are steps, and of a profiler's, whose name leaves no doubt."""
_LEAST_COVERED: Final = 0.5
"""Part of a GPU's operations that must be issued inside the ranges."""

_MOST_BEHIND: Final = 0.5
"""Part of a step that a GPU which keeps up with its host may be behind."""

_STEP: Final = r"(?i)(?<![a-z])(step|iter(ation)?|batch|train(ing)?)(?![a-z])"
_NOT_STEP: Final = (
    r"(?i)optim|forward|backward|eval|valid|(?<![a-z])(val|test|load|data|epoch)(?![a-z])"
)
_PROFILER: Final = r"ProfilerStep#?\d*"


class Marks(Struct, frozen=True, dict=True):
    """Ranges of one name on one thread, one a step, in order and disjoint, in host time."""

    process: int
    name: str
    source: str
    start: Times
    end: Times
    numbers: Times
    """Numbers as the program counted them; else from 0."""

    def lie_in(self, windows: Sequence[Window]) -> Mask:
        """Return the mask of steps that lie in one window each."""
        return lie_in(self.start, self.end, windows)

    def in_control_of(self, trace: Trace) -> MarkedSteps | None:
        """Return the steps with and without the recorder; None without control stretches."""
        coverage = trace.coverage(self.process)
        if not coverage.control:
            return None
        masks = map(self.lie_in, (coverage.windows, coverage.control, coverage.idle))
        return MarkedSteps(self.numbers, self.end - self.start, *masks)

    def within(self, windows: Sequence[Window]) -> Marks:
        """Return the steps that lie in one window each; all if no window is recorded."""
        if not windows:
            return self
        whole = self.lie_in(windows)
        parts = (times[whole] for times in (self.start, self.end, self.numbers))
        return Marks(self.process, self.name, self.source, *parts)


def read_marks(trace: Trace) -> list[Marks]:
    """All families of ranges that may be steps: markers first, then NVTX ranges named so."""
    marks: list[Marks] = []
    columns = ("start", "end", "name", "process", "thread", "correlation")
    for kind in (kind for kind in (Kind.STEP, Kind.RANGE) if kind in trace.kinds):
        events = trace.events([kind], columns)
        ids = distinct_ids(events.name)
        text = trace.names(ids) if kind == Kind.STEP else trace.search(ids, _STEP)
        families = {
            id: re.sub(r"\d+", "#", name)
            for id, name in text.items()
            if kind == Kind.STEP or not re.search(_NOT_STEP, name)
        }
        events = events.select(np.isin(events.name, list(families)))
        for process in distinct_ids(events.process).tolist():
            mine = events.select(events.process == process)
            members: dict[str, list[int]] = {}
            for id in distinct_ids(mine.name).tolist():
                members.setdefault(families[id], []).append(id)
            for family, names in members.items():
                marks += _by_thread(mine.select(np.isin(mine.name, names)), kind, family)
    return marks


def _by_thread(events: Events, kind: Kind, family: str) -> Iterator[Marks]:
    """Yield the ranges of a family in one process that are steps on each thread."""
    is_profiled = re.match(_PROFILER, family) is not None
    least = _LEAST_PROFILED if is_profiled else _LEAST_STEPS
    source = "profiler" if is_profiled else "markers" if kind == Kind.STEP else "nvtx"
    threads = events.thread.astype(np.int64) & 0xFFFFFFFF
    for thread in distinct_ids(threads).tolist():
        ranges = events.select(threads == thread)
        ranges = ranges.select(np.argsort(ranges.start, kind="stable"))
        start, end = ranges.start, ranges.end
        if len(ranges) >= least and bool((start[1:] >= end[:-1]).all()):
            is_numbered = kind == Kind.STEP and bool((ranges.correlation >= 0).all())
            numbers = ranges.correlation if is_numbered else np.arange(len(ranges))
            yield Marks(int(ranges.process[0]), family, source, start, end, numbers)


def project(marks: Marks, operations: GpuOperations, calls: CudaApiCalls) -> StepWindows | None:
    """Return the ranges in the GPU's time, through the operations issued inside them.

    None where too little of the GPU's work is issued in them to be the training loop.
    """
    marks = marks.within(operations.coverage.windows)
    issued_by = calls.issued_by(operations.events)
    mine = operations.events.process == marks.process
    rows = np.flatnonzero((issued_by != NOBODY) & mine)
    issued = calls.start[issued_by[rows]]
    step = np.searchsorted(marks.start, issued, "right") - 1
    inside = (step >= 0) & (issued < marks.end[np.maximum(step, 0)])
    if not len(rows) or not len(marks.start) or np.mean(inside) < _LEAST_COVERED:
        return None
    first, last = _extent(rows[inside], step[inside], len(marks.start))
    full, recorded = first <= last, operations.coverage.calls
    with_calls = np.ones_like(full) if recorded is None else marks.lie_in(recorded)
    full &= with_calls
    least = _LEAST_PROFILED if marks.source == "profiler" else _LEAST_STEPS
    if np.count_nonzero(full) < max(least, 0.5 * np.count_nonzero(with_calls)):
        return None
    number, first, last = np.flatnonzero(full), first[full], last[full]
    first = _with_early_copies(operations, first, last)
    is_sampled = not with_calls.all()
    if is_sampled:
        number, first, last = fill_in(operations, number, first, last)
    first = without_foreign(operations, first, last)
    starts, ends = window_starts(operations, first), operations.reach[last]
    ends, interludes = part_interludes(operations, first, last, starts, ends)
    if is_sampled:  # Steps may be missing between two that do not follow each other.
        follows = np.diff(number) == 1
        interludes = tuple(interlude for interlude in interludes if follows[interlude.after])
    if marks.source == "profiler" and _keeps_up(ends, marks.start[number], marks.end[number]):
        starts, ends, interludes = marks.start[number], marks.end[number], ()
    return StepWindows(
        rank=operations.gpu.rank,
        start=starts,
        end=ends,
        busy_from=operations.start[first],
        source=marks.source,
        kind="training",
        confidence=0.9 if marks.source == "nvtx" else 1.0,
        reason=f"ranges named {marks.name!r}",
        interludes=interludes,
        numbers=marks.numbers[number],
        is_part=bool(marks.numbers[0]),
    )


def _keeps_up(done: Times, start: Times, end: Times) -> bool:
    """Return whether the GPU is through with each step soon after the host is.

    A profiler's few steps are then the windows themselves: cut by the GPU's time, the first would
    lose its wait for data, and their sum would not be what the profiler's users know.
    """
    return bool((done - end).max() < _MOST_BEHIND * median(end - start))


def _extent(rows: Rows, step: NDArray[np.intp], steps: int) -> tuple[Rows, Rows]:
    """Return the first and last row of each step; first > last for a step without rows."""
    first = np.full(steps, np.iinfo(np.intp).max)
    last = np.full(steps, -1)
    np.minimum.at(first, step, rows)
    np.maximum.at(last, step, rows)
    return first, last


def _with_early_copies(operations: GpuOperations, first: Rows, last: Rows) -> Rows:
    """Start each step with the input copies issued after the step before: they feed it."""
    copies = np.flatnonzero(operations.events.kind == Kind.COPY_H2D)
    place = np.searchsorted(copies, np.concatenate([[-1], last[:-1]]), "right")
    early: Rows = np.append(copies, len(operations))[place]
    return np.minimum(first, early)


def within(windows: StepWindows, recorded: Intervals) -> StepWindows:
    """Return the steps in one recorded stretch each, with the gap before their first operation.

    Of the first step of a stretch that gap is not known, but for the very first one's.
    """
    if len(recorded) < 2:
        return windows
    place = np.maximum(np.searchsorted(recorded.start, windows.busy_from, "right") - 1, 0)
    whole = (windows.start >= recorded.start[place]) & (windows.end <= recorded.end[place])
    return _select(windows, whole, recorded)


def _without_nodes(nodes: Intervals, windows: StepWindows, recorded: Intervals) -> StepWindows:
    """Return the steps that no recording of the nodes of CUDA graphs made longer, on any rank."""
    longer = nodes.within(windows.start, windows.end) > 0
    kept = _select(windows, ~longer, recorded)
    return replace(kept, with_nodes=int(np.count_nonzero(longer)))


def _select(windows: StepWindows, kept: Mask, recorded: Intervals) -> StepWindows:
    """Some of the steps, and what lies between two of them that follow each other."""
    place = np.cumsum(kept) - 1
    interludes = tuple(
        replace(interlude, after=int(place[interlude.after]))
        for interlude in windows.interludes
        if kept[interlude.after : interlude.after + 2].all()
        and not recorded.complement(interlude.start, interlude.end).total
    )
    return replace(
        windows,
        start=windows.start[kept],
        end=windows.end[kept],
        busy_from=windows.busy_from[kept],
        numbers=None if windows.numbers is None else windows.numbers[kept],
        interludes=interludes,
    )


def same_steps(
    by_rank: Mapping[int, StepWindows], gpus: Sequence[GpuSummary]
) -> dict[int, StepWindows]:
    """Return the steps that every rank has, where ranks were not recorded from their first step on.

    Windows begin on each rank when it is there, so that one may have a step more; steps that
    nobody numbered are left as they are.
    """
    numbers = {r: w.numbers for r, w in by_rank.items() if w.numbers is not None}
    whole = all(gpu.coverage.is_whole for gpu in gpus)
    if whole or len(numbers) < max(len(by_rank), 2):
        return dict(by_rank)
    common = reduce(np.intersect1d, numbers.values())
    if not len(common):
        return dict(by_rank)
    stretch = {gpu.gpu.rank: gpu.recorded for gpu in reversed(gpus)}
    return {
        rank: _select(windows, np.isin(numbers[rank], common), stretch[rank])
        for rank, windows in by_rank.items()
    }


def describe_windows(windows: StepWindows, recorded: Intervals) -> str:
    """Describe how the steps lie in the recorded windows; empty if there is only one."""
    if len(recorded) < 2 or not len(windows):
        return ""
    place = np.searchsorted(recorded.start, windows.start, "right")
    _, counts = np.unique(place, return_counts=True)
    least, most = int(counts.min()), int(counts.max())
    steps = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    control = 0 if windows.marked is None else int(windows.marked.control.sum())
    between = "nothing between them was recorded"
    if control:
        between = f"{control:,} unrecorded steps between show what recording costs"
    return f"recorded in {len(counts):,} windows of {steps} steps; {between}"


_MOST: Final = 0.9
"""Part of the steps with calls that must begin alike, and hold what begins them equally often."""

Numbers = NDArray[np.intp]
Found = tuple[Numbers, Rows, Rows]


def fill_in(operations: GpuOperations, marks: Numbers, first: Rows, last: Rows) -> Found:
    """Return the marks, first and last rows of the steps that have calls and of those between.

    Of the first step of a stretch it is not known what was issued for it before its mark: it counts
    as one without calls.
    """
    known = np.diff(marks, prepend=-1) == 1
    marks, first, last = marks[known], first[known], last[known]
    if len(marks) < 2:
        return marks, first, last
    rows = _like(operations, first)
    place = np.searchsorted(rows, first)
    alike = rows[np.minimum(place, len(rows) - 1)] == first
    counts = np.diff(place)[np.diff(marks) == 1]
    each = int(median(counts)) if len(counts) else 0
    if not each or np.mean(counts == each) < _MOST or np.mean(alike) < _MOST:
        return marks, first, last
    parts = [(marks, first, last)]
    for before in np.flatnonzero(np.diff(marks) > 1).tolist():
        after, steps = before + 1, int(marks[before + 1] - marks[before])
        if alike[[before, after]].all() and place[after] - place[before] == each * steps:
            begins = rows[place[before] + each * np.arange(1, steps)]
            numbers = marks[before] + np.arange(1, steps)
            parts.append((numbers, begins, np.append(begins[1:], first[after]) - 1))
    marks, first, last = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(marks)
    return marks[order], first[order], last[order]


def _like(operations: GpuOperations, first: Rows) -> Rows:
    """Return the operations that are as most of some are."""
    events = operations.events
    keys = np.stack([events.name[first], events.kind[first], events.bytes[first]], axis=-1)
    distinct, counts = np.unique(keys, axis=0, return_counts=True)
    name, kind, size = distinct[np.argmax(counts)]
    return np.flatnonzero((events.name == name) & (events.kind == kind) & (events.bytes == size))
