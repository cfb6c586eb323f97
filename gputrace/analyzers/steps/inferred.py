"""Training steps found from the kernel stream alone, by the optimizer and the input copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.steps.anchors import (
    Bursts,
    Rows,
    find_bursts,
    find_closers,
    inputs_alone,
    inputs_of_steps,
    may_train,
)
from gputrace.analyzers.steps.interludes import part_interludes
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.traces.events import Kind
from gputrace.traces.trace import Trace

_LEAST_STEPS: Final = 3
_LEAST_KERNELS: Final = 5
"""Fewer kernels an iteration than this are no training and no loop worth cutting."""
_WHOLE: Final = 0.95
"""A first stretch with fewer operations than this part of a usual step is a step cut off."""
_FAR_MORE: Final = 1.2
"""A stretch with this many times the operations of a usual step holds more than the step."""
_SOON: Final = 0.5
"""An input copy later than this part of a step after the optimizer is for the step after next."""


@dataclass(frozen=True)
class Cuts:
    """Where a rank's stream is cut: the first operation of each step, and its last own one."""

    first: Rows
    last: Rows

    def __len__(self) -> int:
        return len(self.first)


def infer_training(trace: Trace, operations: GpuOperations) -> StepWindows | None:
    """Steps of the rank whose main GPU this is; None where nothing shows that it trains."""
    bursts = find_bursts(trace, operations)
    inputs, like_batches = inputs_alone(operations)
    if bursts is not None and _cover(operations, bursts, inputs):
        inputs = inputs_of_steps(operations, bursts)
        return _windows(operations, _cut(operations, bursts, inputs), _told(inputs))
    if len(inputs) < _LEAST_STEPS:
        return None
    closers = find_closers(operations, inputs, bursts)
    if len(closers) < _LEAST_STEPS or not _does_work(operations, closers):
        return None
    cuts = _cut(operations, closers, inputs)
    if like_batches and may_train(trace, operations):
        told = 0.8, "an input copy of constant size, once for every batch"
        return _windows(operations, cuts, told)
    told = 0.4, "host-to-device copies repeat, but no optimizer and no backward pass shows"
    return _windows(operations, cuts, told, "iterations")


def _cover(operations: GpuOperations, bursts: Bursts, inputs: Rows) -> bool:
    """Whether the optimizer is seen through all of the run, not only before a graph's capture."""
    if len(bursts) < _LEAST_STEPS:
        return False
    first, last = operations.start[bursts.first[0]], operations.start[bursts.last[-1]]
    fed_after = np.count_nonzero(inputs > bursts.last[-1])
    seldom = fed_after < max(_LEAST_STEPS, 0.5 * len(inputs))
    return bool(seldom and operations.start[-1] - last <= last - first)


def _does_work(operations: GpuOperations, closers: Bursts) -> bool:
    work = np.flatnonzero(operations.classes == OperationClass.COMPUTE)
    graphs = bool((operations.events.kind == Kind.GRAPH).any())
    each = np.diff(np.searchsorted(work, closers.last, "right"))
    return graphs or float(np.median(each)) >= _LEAST_KERNELS


def _told(inputs: Rows) -> tuple[float, str]:
    if len(inputs):
        return 0.95, "an optimizer's kernels and an input copy of constant size, once a step"
    return 0.85, "an optimizer's kernels, once a step"


def _cut(operations: GpuOperations, bursts: Bursts, inputs: Rows) -> Cuts:
    """Cuts between the end of each step and the next step's first operation."""
    after = _first_after(operations, bursts.last)
    first = after[:-1].copy()
    place = np.searchsorted(inputs, bursts.last, "right")
    each = int(np.median(np.diff(place))) if len(place) > 1 else 0
    if each and _start_after_end(operations, bursts, inputs):
        own = place[1:] - each
        fed = own >= place[:-1]
        first[fed] = np.maximum(inputs[own[fed]], first[fed])
    elif not each:
        first = _of_usual_size(operations, _first_working(operations, first), bursts.last[1:])
    before = int(place[0])
    if before < each:
        return Cuts(first, after[1:] - 1)
    start = int(inputs[before - each]) if each else _first_like(operations, first, bursts)
    cuts = Cuts(np.append(start, first), after - 1)
    return Cuts(first, after[1:] - 1) if not each and _is_cut_off(cuts) else cuts


def _first_working(operations: GpuOperations, rows: Rows) -> Rows:
    """From each row on, the first operation that is not saving (to the host) or waiting."""
    kinds = operations.events.kind
    waiting = (operations.classes == OperationClass.COMMUNICATION) & (kinds == Kind.KERNEL)
    working = np.flatnonzero(~waiting & (kinds != Kind.COPY_D2H))
    return np.append(working, len(operations) - 1)[np.searchsorted(working, rows)]


def _of_usual_size(operations: GpuOperations, first: Rows, last: Rows) -> Rows:
    """Later starts for steps with far more operations than usual: validation came before them.

    Such a step starts where an operation like the others' first is followed by as many as usual.
    Operations strange to the other steps are not validation but autotuning, and stay.
    """
    usual = int(np.median(last - first))
    middle = int(np.argmin(np.abs(last - first - usual)))
    names = operations.events.name
    model = names[first[middle] : last[middle] + 1]
    first = first.copy()
    for step in np.flatnonzero(last - first > _FAR_MORE * usual).tolist():
        like = np.flatnonzero(names[first[step] : last[step]] == model[0]) + first[step]
        if not len(like):
            continue
        start = int(like[np.argmin(np.abs(last[step] - like - usual))])
        if np.isin(names[first[step] : last[step] + 1], model).mean() >= _WHOLE:
            first[step] = start
    return first


def _is_cut_off(cuts: Cuts) -> bool:
    """Whether the first step is only the end of one."""
    sizes = cuts.last - cuts.first + 1
    return len(cuts) > _LEAST_STEPS and bool(sizes[0] < _WHOLE * np.median(sizes[1:]))


def _start_after_end(operations: GpuOperations, bursts: Bursts, inputs: Rows) -> bool:
    """Whether input copies come after the optimizer, not beside the step before (prefetched)."""
    place = np.searchsorted(inputs, bursts.last, "right")[:-1]
    waiting = inputs[np.minimum(place, len(inputs) - 1)] - bursts.last[:-1]
    return float(np.median(waiting)) <= _SOON * float(np.median(np.diff(bursts.last)))


def _first_after(operations: GpuOperations, last: Rows) -> Rows:
    """The operation after each optimizer run and the copies to the host that close a step.

    A loss that is read back closes every step; more such copies than usual are a checkpoint.
    """
    others = np.flatnonzero(operations.events.kind != Kind.COPY_D2H)
    next_other = np.append(others, len(operations))[np.searchsorted(others, last + 1)]
    closing = next_other - last - 1
    return last + 1 + np.minimum(closing, int(np.median(closing)))


def _first_like(operations: GpuOperations, first: Rows, bursts: Bursts) -> int:
    """The first operation of the step before the first optimizer run.

    The later steps tell which it is; computing just before it is autotuning, and belongs to it.
    """
    until = int(bursts.first[0])
    begin = operations.events.name[int(first[len(first) // 2])]
    like = int(np.argmax(operations.events.name[:until] == begin)) if until else 0
    other = np.flatnonzero(operations.classes[:like] != OperationClass.COMPUTE)
    return int(other[-1]) + 1 if len(other) else 0


def _windows(
    operations: GpuOperations, cuts: Cuts, told: tuple[float, str], kind: str = "training"
) -> StepWindows:
    starts = window_starts(operations, cuts.first)
    ends = operations.reach[np.minimum(cuts.last, len(operations) - 1)]
    ends, interludes = part_interludes(operations, cuts.first, cuts.last, starts, ends)
    confidence, reason = told
    return StepWindows(
        rank=operations.gpu.rank,
        start=starts,
        end=ends,
        busy_from=operations.start[cuts.first],
        source="inferred",
        kind=kind,
        confidence=confidence,
        reason=reason,
        interludes=interludes,
    )


def window_starts(operations: GpuOperations, first: Rows) -> Times:
    """Where the gap before each operation starts: by when all operations before it had ended.

    An operation that starts while others run has no gap before it: its own start then.
    """
    before = operations.reach[np.maximum(first - 1, 0)]
    starts = np.minimum(before, operations.start[first])
    return np.where(first > 0, starts, operations.start[first])
