"""Training steps of every rank, from the best source that the trace has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gputrace.analyzers.host_calls import CudaApiCalls
from gputrace.analyzers.operations import GpuOperations, GpuSummary
from gputrace.analyzers.steps.inferred import (
    Rows,
    find_bursts,
    infer_iterations,
    infer_training,
    inputs_alone,
    inputs_of_steps,
    until_written,
)
from gputrace.analyzers.steps.markers import Marks, project, read_marks, same_steps, told, within
from gputrace.analyzers.steps.windows import Interlude, StepWindows, count_warmup
from gputrace.model.trace import Trace


@dataclass(frozen=True)
class FoundSteps:
    """Steps of all ranks that have some.

    Attributes:
        by_rank: one set of windows for each rank, all of one kind.
        warmup: steps at the start of every rank that are warm-up.
        chosen: the steps to measure, first and end, where a person named them.
        reason: why there are none, where there are none.
    """

    by_rank: Mapping[int, StepWindows]
    warmup: int
    chosen: tuple[int, int] | None = None
    reason: str = "nothing repeats in the kernel stream, and no marker names steps"

    @property
    def kind(self) -> str:
        """``training``, ``iterations`` or ``none``."""
        return next((windows.kind for windows in self.by_rank.values()), "none")


def steps_by_rank(
    trace: Trace, gpus: Sequence[GpuOperations], calls: CudaApiCalls | None
) -> dict[int, StepWindows]:
    """Return the steps that each rank shows by itself."""
    marks = read_marks(trace) if calls is not None else []
    ranks = sorted({operations.gpu.rank for operations in gpus})
    found = {}
    for rank in ranks:
        own = [operations for operations in gpus if operations.gpu.rank == rank]
        windows = _of_rank(trace, own, marks, calls)
        if windows is not None:
            whole = within(until_written(trace, windows, own[0].gpu.process), own[0].recorded)
            if len(whole):
                found[rank] = whole
    return found


def agree(
    trace: Trace,
    shown: Mapping[int, StepWindows],
    gpus: Sequence[GpuSummary],
    chosen: tuple[int, int] | None = None,
) -> FoundSteps:
    """Everyone's steps, of what each rank shows; a kind that only some ranks show is dropped."""
    found = dict(shown)
    if "training" in {windows.kind for windows in found.values()}:
        found = {rank: w for rank, w in found.items() if w.kind == "training"}
    found = same_steps(found, gpus)
    for rank, windows in found.items():
        note = told(windows, next(gpu.recorded for gpu in gpus if gpu.gpu.rank == rank))
        if note and note not in trace.quality.notes:
            trace.quality.notes.append(note)
    warmup = max((count_warmup(w.lengths) for w in found.values()), default=0)
    return FoundSteps(found, warmup, chosen)


def _of_rank(
    trace: Trace, gpus: list[GpuOperations], marks: list[Marks], calls: CudaApiCalls | None
) -> StepWindows | None:
    """The steps of the rank's GPU that shows them best."""
    if calls is not None:
        for mark in marks:
            projected = [w for gpu in gpus if (w := project(mark, gpu, calls)) is not None]
            if projected:
                return projected[0]
    inferred = [w for gpu in gpus if (w := infer_training(trace, gpu)) is not None]
    if inferred:
        return max(inferred, key=lambda windows: windows.confidence)
    busiest = max(gpus, key=len)
    return infer_iterations(busiest)


def find_input_copies(trace: Trace, operations: GpuOperations) -> Rows:
    """Rows of the copies that bring batches to this GPU; none where none can be told."""
    bursts = find_bursts(trace, operations)
    if bursts is not None and len(bursts) > 1:
        copies = inputs_of_steps(operations, bursts)
        if len(copies):
            return copies
    return inputs_alone(operations)[0]


_COVERED: Final = 0.5
"""Part of another rank's interlude that lies in the step of a rank that is held up by it."""


@dataclass(frozen=True)
class BlockedSteps:
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
    """The steps that follow another rank's interlude and mostly last as long as it.

    Where nothing stops the other ranks, they go on to the next step's first collective, and wait
    there.
    """
    for by, windows in by_rank.items():
        for interlude in windows.interludes:
            step = interlude.after + 1
            for rank, own in by_rank.items():
                if rank == by or step >= len(own) or _pauses(own, interlude.after):
                    continue
                start = max(interlude.start, int(own.start[step]))
                end = min(interlude.end, int(own.end[step]))
                if end - start >= _COVERED * (interlude.end - interlude.start):
                    yield BlockedSteps(rank, step, by, interlude, start, end)


def _pauses(windows: StepWindows, after: int) -> bool:
    return any(interlude.after == after for interlude in windows.interludes)
