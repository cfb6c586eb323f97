"""Training steps of every rank, from the best source that the trace has: markers that it names
(recorded, profiler steps, NVTX ranges), else inferred from the kernel stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Final

import numpy as np
from msgspec.structs import replace

from gputrace.analyzers.cuda_api_calls import CudaApiCalls
from gputrace.analyzers.operations import GpuOperations, GpuSummary
from gputrace.analyzers.steps.inferred import (
    Rows,
    find_bursts,
    infer_training,
    inputs_alone,
    inputs_of_steps,
    until_written,
    with_averages,
)
from gputrace.analyzers.steps.kinds import find_turns, settle_kind
from gputrace.analyzers.steps.marks import Marks, choose_marks, read_marks, read_passes
from gputrace.analyzers.steps.rollouts import NamedRanges, read_named_ranges, rollouts_of
from gputrace.analyzers.steps.windows import (
    Interlude,
    StepWindows,
    count_warmup,
    estimate_cost,
    with_compilation,
)
from gputrace.model.events import Kind, Mask
from gputrace.model.intervals import Intervals, union
from gputrace.model.results import KINDS, RecorderCost
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace
from gputrace.units import format_ids


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
        """One of `KINDS`."""
        return next((windows.kind for windows in self.by_rank.values()), "none")


def steps_by_rank(
    trace: Trace, gpus: Sequence[GpuOperations], calls: CudaApiCalls | None
) -> dict[int, StepWindows]:
    """Return the steps that each rank shows by itself."""
    marks = read_marks(trace) if calls is not None else []
    ranges = trace.once(read_named_ranges)
    stretches = trace.node_stretches()
    nodes = union(*np.array(stretches, np.int64).reshape(-1, 2).T)
    indices: dict[int, list[int]] = {}
    for index, operations in enumerate(gpus):
        indices.setdefault(operations.gpu.rank, []).append(index)
    by_rank = {}
    for rank in sorted(indices):
        these = [gpus[index] for index in indices[rank]]
        windows = _of_rank(trace, these, marks, calls, ranges)
        if windows is not None:
            most = max(these, key=len)
            windows = settle_kind(trace, most, windows, ranges)
            process = these[0].gpu.process
            windows = with_compilation(trace, until_written(trace, windows, process), process)
            windows = with_averages(trace, most, windows)
            whole = within(windows, these[0].recorded)
            if stretches:  # Recording the nodes of CUDA graphs, on any rank, makes steps longer.
                longer = nodes.within(whole.start, whole.end) > 0
                kept = _select(whole, ~longer, these[0].recorded)
                whole = replace(kept, with_nodes=int(np.count_nonzero(longer)))
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
    kind = min((w.kind for w in by_rank.values()), key=KINDS.index, default="none")
    by_rank = {rank: w for rank, w in by_rank.items() if w.kind == kind}
    # Ranks that exchange data run the same pass, also one whose own kernels may be two.
    others = [gpu for gpu in gpus if gpu.gpu.rank not in by_rank and gpu.communicates]
    if kind == "pass" and others:
        shared = next(iter(by_rank.values()))
        by_rank |= _pass_of_others(shared, others)
        by_rank = dict(sorted(by_rank.items()))
    elif by_rank and others:
        ranks = format_ids("rank", sorted({gpu.gpu.rank for gpu in others}))
        trace.quality.notes.append(f"no steps were found on {ranks}: measured are the other ranks")
    by_rank = same_steps(by_rank, gpus)
    for rank, windows in by_rank.items():
        note = describe_windows(windows, next(gpu.recorded for gpu in gpus if gpu.gpu.rank == rank))
        news = [note for note in (note, *windows.notes) if note not in trace.quality.notes]
        trace.quality.notes += filter(None, news)
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


def _pass_of_others(shared: StepWindows, gpus: Sequence[GpuSummary]) -> dict[int, StepWindows]:
    """Return all that some GPUs did as the pass of their ranks, known as that of another rank."""
    passes: dict[int, StepWindows] = {}
    for rank in sorted({gpu.gpu.rank for gpu in gpus}):
        spans = [gpu.span for gpu in gpus if gpu.gpu.rank == rank]
        start = np.array([min(span.start for span in spans)])
        end = np.array([max(span.end for span in spans)])
        passes[rank] = replace(shared, rank=rank, start=start, end=end, busy_from=start)
    return passes


def _of_rank(
    trace: Trace,
    gpus: list[GpuOperations],
    marks: list[Marks],
    calls: CudaApiCalls | None,
    ranges: NamedRanges,
) -> StepWindows | None:
    """Return the steps of the rank's GPU that shows them best, or the one pass that it ran."""
    marked = choose_marks(trace, gpus, marks, calls, ranges, training=True)
    if marked is not None:
        return marked
    inferred: StepWindows | None = None
    for gpu in gpus:
        rolled = rollouts_of(gpu.gpu.process, ranges.rollouts)
        windows = infer_training(trace, gpu, rolled)
        if windows is not None and (inferred is None or windows.confidence > inferred.confidence):
            inferred = windows
    if inferred is not None and inferred.kind in ("training", "rl"):
        return inferred
    marked = choose_marks(trace, gpus, [*read_passes(trace)], calls, ranges, training=True)
    if marked is None:
        marked = choose_marks(trace, gpus, marks, calls, ranges, training=False)
    if marked is not None:
        return marked
    turns = find_turns(trace, gpus, calls, ranges, inferred)
    if turns is not None and turns.kind != "iterations":
        return turns
    unnamed = [] if calls is None else read_marks(trace, named=False)
    outer = choose_marks(trace, gpus, unnamed, calls, ranges, training=False)
    if outer is None or len(outer) < _FEWEST_UNNAMED:
        return turns
    return turns if turns is not None and len(turns) <= len(outer) else outer


_FEWEST_UNNAMED: Final = 10
"""Ranges of any name that hold the GPU's work one after another, from which they are iterations."""


def find_input_copies(trace: Trace, operations: GpuOperations) -> Rows:
    """Return the rows of the copies that bring batches to this GPU; empty if they are unknown."""
    bursts = find_bursts(trace, operations)
    if bursts is not None and len(bursts) > 1:
        copies = inputs_of_steps(operations, bursts)
        if len(copies):
            return copies
    return inputs_alone(operations).copies


_HELD_UP_PART: Final = 0.5
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
                if end - start >= _HELD_UP_PART * (interlude.end - interlude.start):
                    yield BlockedSteps(rank, step, by, interlude, start, end)


def within(windows: StepWindows, recorded: Intervals) -> StepWindows:
    """Return the steps in one recorded stretch each, with the gap before their first operation.

    Of the first step of a stretch that gap is not known, but for the very first one's.
    """
    if len(recorded) < 2:
        return windows
    place = np.maximum(np.searchsorted(recorded.start, windows.busy_from, "right") - 1, 0)
    whole = (windows.start >= recorded.start[place]) & (windows.end <= recorded.end[place])
    return _select(windows, whole, recorded)


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
