"""How fast each GPU runs the kernels that others run too.

GPUs that train together launch the same kernels in the same order, so the nth launch of a kernel in
a step on one GPU is compared with the nth launch of it in that step on the others. Launches that
only one GPU has are no part of a ratio: more work is told apart from slower work. Nor are those
beside communication, where there are others: a collective that waits takes part of the GPU from
them, and the rank for which the others wait would look faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.grouping import StepsOf
from gputrace.analyzers.intervals import Intervals, Times, union
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.per_gpu import PerGpu, same_names
from gputrace.analyzers.results import Step
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.events import Kind, Mask
from gputrace.traces.ids import distinct_ids

_MOST_KERNELS: Final = 40_000
"""Of one GPU; as many steps are compared as have so many."""
_LEAST_SHARE: Final = 0.5
"""Part of a GPU's time in kernels that must be in kernels that others run too."""
_ALONE: Final = 0.1
"""Part of the compared time that must be in launches without communication beside them, for these
alone to tell the ratio."""
_QUARTILES: Final = (0.25, 0.5, 0.75)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class KernelRatio:
    """One GPU against the fastest; kernels that communicate do not count, they wait for others."""

    gpu: Gpu
    ratio: float
    """How many times as long it takes for the same kernels as the fastest GPU; 1.0 is that one.

    The median over launches, weighted by their time.
    """
    low: float
    high: float
    """Quartiles of the same: a lower clock slows all kernels alike, larger batches only some."""
    launches: int
    """Of a step, that were compared."""
    compared_ns: int
    """Time of these in a step."""
    own_ns: int
    """Time of a step in kernels that no other GPU runs, or not as often."""

    @property
    def excess_ns(self) -> int:
        """Time of a step that the GPU would save at the speed of the fastest."""
        return round(self.compared_ns * (1 - 1 / self.ratio))


@dataclass(frozen=True)
class _Launches:
    """What one GPU runs in a typical step: a launch of a name, and its median time."""

    keys: NDArray[np.int64]
    lengths: Floats
    alone: Floats
    """The median of those with no communication beside them; NaN where most have some."""


def kernel_ratios(gpus: PerGpu, steps: Sequence[Step]) -> tuple[KernelRatio, ...]:
    """For each GPU whose kernels mostly run on others too; nothing where fewer than two do.

    Args:
        gpus: all of them.
        steps: the steps to compare, in which each GPU's own count; the whole of the trace if none.
    """
    operations = gpus.operations
    if len(operations) < 2:
        return ()
    steps_of = StepsOf(steps)
    edges = [_edges(steps_of(own.gpu)) for own in operations]
    _, names = same_names(gpus, [own.computing for own in operations])
    launches = gpus.each(_typical, operations, edges, names)
    keys = distinct_ids(np.concatenate([own.keys for own in launches]))
    table = _table(keys, [(own.keys, own.lengths) for own in launches])
    shared = _shared(table)
    whole = np.nansum(table, axis=1)
    compared = np.nansum(shared, axis=1)
    alone = _shared(_table(keys, [(own.keys, own.alone) for own in launches]))
    enough = compared > _LEAST_SHARE * np.maximum(whole, 1)
    if enough.sum() < 2:
        return ()
    often = np.nansum(alone, axis=1) > _ALONE * compared
    told = alone if often[enough].all() else shared
    usual = np.nanmedian(told, axis=0)
    quartiles = np.stack([_quartiles(row, usual) for row in told[enough]])
    fastest = quartiles[:, 1].min()
    return tuple(
        KernelRatio(
            gpu=operations[index].gpu,
            ratio=float(middle / fastest),
            low=float(low / fastest),
            high=float(high / fastest),
            launches=int(np.isfinite(shared[index]).sum()),
            compared_ns=round(float(compared[index])),
            own_ns=round(float(whole[index] - compared[index])),
        )
        for index, (low, middle, high) in zip(
            np.flatnonzero(enough).tolist(), quartiles.tolist(), strict=True
        )
    )


def _table(
    keys: NDArray[np.int64], rows: Sequence[tuple[NDArray[np.int64], Floats]]
) -> NDArray[np.float64]:
    """A row a GPU and a column a key; NaN where the GPU has no such launch."""
    table = np.full((len(rows), len(keys)), np.nan)
    for row, (own, lengths) in zip(table, rows, strict=True):
        row[np.searchsorted(keys, own)] = lengths
    return table


def _shared(table: Floats) -> Floats:
    """The columns of which several GPUs have something."""
    found: Floats = table[:, np.isfinite(table).sum(axis=0) > 1]
    return found


def _kernels(own: GpuOperations) -> Mask:
    """The rows of kernels that compute."""
    compute = own.classes == OperationClass.COMPUTE
    found: Mask = compute & (own.events.kind == Kind.KERNEL)
    return found


def _edges(steps: Sequence[Step]) -> tuple[Times, Times]:
    """Starts and ends."""
    edges = np.array([(step.start_ns, step.end_ns) for step in steps], np.int64).reshape(-1, 2)
    return edges[:, 0], edges[:, 1]


def _typical(one: OneGpu, steps: tuple[Times, Times], names: dict[int, int]) -> _Launches:
    """The median length of each launch over the steps that have it, if that is most of them."""
    own = one.operations
    rows = np.flatnonzero(_kernels(own))
    rows, step, count = _in_steps(own, rows, *steps)
    texts = _renumbered(own.events.name[rows], names)
    order = np.argsort(step << 32 | texts, kind="stable")  # The rows are in order of start.
    rows, step, texts = rows[order], step[order], texts[order]
    keys = texts << 32 | _places(step, texts)
    lengths = own.end[rows] - own.start[rows]
    free = _communication(own).within(own.start[rows], own.end[rows]) == 0
    order = np.lexsort((lengths, keys))
    keys, lengths, free = keys[order], lengths[order], free[order]
    distinct, medians = _medians(keys, lengths, count)
    some, unmixed = _medians(keys[free], lengths[free], count)
    alone = np.full(len(distinct), np.nan)
    alone[np.searchsorted(distinct, some)] = unmixed
    return _Launches(distinct, medians, alone)


def _communication(own: GpuOperations) -> Intervals:
    rows = own.classes == OperationClass.COMMUNICATION
    return union(own.start[rows], own.end[rows], is_sorted=True)


def _in_steps(
    own: GpuOperations, rows: NDArray[np.intp], start: Times, end: Times
) -> tuple[NDArray[np.intp], NDArray[np.intp], int]:
    """Rows that start within some of the steps, spread over all; the step of each; how many."""
    if not len(start):
        return rows, np.zeros(len(rows), np.intp), 1
    step = np.maximum(np.searchsorted(start, own.start[rows], "right") - 1, 0)
    inside = (own.start[rows] >= start[step]) & (own.start[rows] < end[step])
    rows, step = rows[inside], step[inside]
    apart = -(-len(rows) // _MOST_KERNELS)
    if apart > 1:
        chosen = step % apart == 0
        rows, step = rows[chosen], step[chosen]
    return rows, step, len(distinct_ids(step))


def _renumbered(ids: NDArray[np.int32], names: dict[int, int]) -> NDArray[np.int64]:
    known = np.array(sorted(names), np.int64)
    numbers = np.array([names[id] for id in known.tolist()], np.int64)
    found: NDArray[np.int64] = numbers[np.searchsorted(known, ids)] if len(ids) else numbers[:0]
    return found


def _places(step: NDArray[np.intp], texts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many rows of the same step and text come before each, where equal ones are together."""
    count = len(step)
    first = np.ones(count, bool)
    first[1:] = (step[1:] != step[:-1]) | (texts[1:] != texts[:-1])
    begins = np.maximum.accumulate(np.where(first, np.arange(count), 0))
    return np.arange(count) - begins


def _medians(
    keys: NDArray[np.int64], lengths: Times, steps: int
) -> tuple[NDArray[np.int64], Floats]:
    """The keys of most steps, and the median length of each; both come in order of both."""
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    count = np.diff(first, append=len(keys))
    low, high = first + (count - 1) // 2, first + count // 2
    middle = lengths[low] / 2 + lengths[high] / 2
    often = 2 * count > steps
    return keys[first[often]], np.maximum(middle[often], 1.0)


def _quartiles(lengths: Floats, usual: Floats) -> Floats:
    """The quartiles of length by usual length, each launch as weighty as it usually is long."""
    known = np.isfinite(lengths)
    ratios, weights = lengths[known] / usual[known], usual[known]
    order = np.argsort(ratios)
    passed = np.cumsum(weights[order])
    at = np.searchsorted(passed, np.array(_QUARTILES) * passed[-1])
    found: Floats = ratios[order][np.minimum(at, len(order) - 1)]
    return found
