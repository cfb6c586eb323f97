"""Speed of the kernels of each GPU, compared with the same launches on the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu, same_names
from gputrace.analyzers.grouping import StepsOf, edges_of, median_of_known, overlap
from gputrace.analyzers.operations import Gpu, GpuOperations, OperationClass
from gputrace.model.events import Kind, Mask, distinct_ids, number_ids, sort_numbers
from gputrace.model.intervals import Times, number_windows, union
from gputrace.model.options import Window
from gputrace.model.results import Step
from gputrace.model.struct import Struct

_MOST_KERNELS: Final = 40_000
"""Maximum number of compared kernels of one GPU, which limits the number of compared steps."""
_COMPARED_PART: Final = 0.5
"""Minimum fraction of a GPU's kernel time in kernels that others run too."""
_ALONE_PART: Final = 0.1
"""Minimum fraction of the compared time in launches without concurrent communication, for the ratio
to be based on these only."""
_QUARTILES: Final = (0.25, 0.5, 0.75)

Floats = NDArray[np.float64]


class KernelRatio(Struct, frozen=True):
    """Kernel time of one GPU relative to the fastest, without communication kernels, which wait."""

    gpu: Gpu
    ratio: float
    """Median time ratio to the fastest GPU over equal launches, weighted by their time; 1.0 is the
    fastest."""
    low: float
    high: float
    """Quartiles of that ratio: a lower clock slows all kernels alike, larger batches only some."""
    mean: float
    """Ratio of the times of all equal launches; 1.0 is the fastest. Of a GPU that is slow in bursts
    it is larger than the median."""
    launches: int
    """Number of compared launches per step."""
    compared_ns: int
    """Time of the compared launches per step."""
    own_ns: int
    """Time per step of kernels that no other GPU runs, or not as often."""


class _Launches(Struct, frozen=True, dict=True):
    """Launches of one GPU in a typical step, with median durations."""

    keys: NDArray[np.int64]
    """Number of the name (upper 32 bits), and of the launch of that name in the step (lower)."""
    lengths: Floats
    alone: Floats
    """Median of the launches without concurrent communication; NaN where these are the minority."""


def kernel_ratios(gpus: PerGpu, steps: Sequence[Step]) -> tuple[KernelRatio, ...]:
    """Compare the kernel speed of the GPUs whose kernels mostly run on others; none of only one.

    Without steps, the whole trace is compared.
    """
    operations = gpus.operations
    if len(operations) < 2:
        return ()
    steps_of = StepsOf(steps)
    together = overlap([summary.span for summary in operations])
    edges = [
        edges_of(steps_of(summary.gpu)) if steps else _compared_time(summary.span, together)
        for summary in operations
    ]
    _, names = same_names(gpus, [summary.computing for summary in operations])
    launches = gpus.each(_typical, operations, edges, names)
    keys = distinct_ids(np.concatenate([typical.keys for typical in launches]))
    table = _ratio_table(keys, [(typical.keys, typical.lengths) for typical in launches])
    shared = _shared(table)
    whole = np.nansum(table, axis=1)
    compared = np.nansum(shared, axis=1)
    alone = _shared(_ratio_table(keys, [(typical.keys, typical.alone) for typical in launches]))
    enough = compared > _COMPARED_PART * np.maximum(whole, 1)
    if enough.sum() < 2:
        return ()
    often_alone = np.nansum(alone, axis=1) > _ALONE_PART * compared
    lengths = alone if often_alone[enough].all() else shared
    rows, usual = lengths[enough], median_of_known(lengths)
    quartiles = np.stack([_quartiles(row, usual) for row in rows])
    fastest = quartiles[:, 1].min()
    means = np.nansum(rows, axis=1) / np.where(np.isfinite(rows), usual, 0).sum(axis=1)
    return tuple(
        KernelRatio(
            gpu=operations[index].gpu,
            ratio=float(middle / fastest),
            low=float(low / fastest),
            high=float(high / fastest),
            mean=float(mean / means.min()),
            launches=int(np.isfinite(shared[index]).sum()),
            compared_ns=round(float(compared[index])),
            own_ns=round(float(whole[index] - compared[index])),
        )
        for index, (low, middle, high), mean in zip(
            np.flatnonzero(enough).tolist(), quartiles.tolist(), means.tolist(), strict=True
        )
    )


def _ratio_table(
    keys: NDArray[np.int64], rows: Sequence[tuple[NDArray[np.int64], Floats]]
) -> NDArray[np.float64]:
    """Return durations of shape (GPUs, keys); NaN where the GPU has no such launch."""
    table = np.full((len(rows), len(keys)), np.nan)
    for row, (row_keys, lengths) in zip(table, rows, strict=True):
        row[np.searchsorted(keys, row_keys)] = lengths
    return table


def _shared(table: Floats) -> Floats:
    """Return the columns that several GPUs have."""
    return table[:, np.isfinite(table).sum(axis=0) > 1]


_UNEVEN_SPAN_PART: Final = 0.1
"""Part by which a GPU's span must exceed the time that all have in common to be cut to it."""


def _compared_time(span: Window, together: Window) -> NDArray[np.int64]:
    """Return the time of a GPU that is compared without steps: shape (2, 1).

    That is all of it, unless another GPU began much later or ended much earlier.
    """
    uneven = span.end - span.start > (1 + _UNEVEN_SPAN_PART) * (together.end - together.start)
    return np.array([together if uneven else span], np.int64).T


def _typical(view: GpuShardView, steps: NDArray[np.int64], names: dict[int, int]) -> _Launches:
    """Return the median duration of each launch that most steps have."""
    operations = view.operations
    computes = operations.classes == OperationClass.COMPUTE
    rows = np.flatnonzero(computes & (operations.events.kind == Kind.KERNEL))
    rows, step, count = _in_steps(operations, rows, *steps)
    ids, where = number_ids(operations.events.name[rows])
    texts = np.array([names[id] for id in ids.tolist()], np.int64).take(where)
    order, places = number_launches(step, texts)
    rows, texts = rows[order], texts[order]
    lengths = operations.end[rows] - operations.start[rows]
    talks = operations.classes == OperationClass.COMMUNICATION
    busy = union(operations.start[talks], operations.end[talks], is_sorted=True)
    free = busy.within(operations.start[rows], operations.end[rows]) == 0
    keys, lengths, free = _sorted(texts, places, lengths, free)
    distinct, medians = _medians(keys, lengths, count)
    some, unmixed = _medians(keys[free], lengths[free], count)
    alone = np.full(len(distinct), np.nan)
    alone[np.searchsorted(distinct, some)] = unmixed
    return _Launches(distinct, medians, alone)


def number_launches(
    step: NDArray[np.intp], names: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the order of launches by step and name, and the number of each, in that order, among
    those of its step and name, from 0; the rows are in order of start.
    """
    order = np.argsort(step << 32 | names, kind="stable")
    step, names = step[order], names[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (step[1:] != step[:-1]) | (names[1:] != names[:-1])
    number = np.arange(len(order))
    return order, number - np.maximum.accumulate(np.where(first, number, 0))


def _sorted(
    texts: NDArray[np.int64], places: NDArray[np.int64], lengths: Times, free: Mask
) -> tuple[NDArray[np.int64], Times, Mask]:
    """Return the keys of launches, their lengths, and which are free, in order of key and length.

    Numbers that hold all three are sorted at once, which takes a tenth of sorting by two.
    """
    most, bits = int(places.max(initial=0)) + 1, int(lengths.max(initial=0)).bit_length() + 1
    if (int(texts.max(initial=0)) + 1) * most << bits > np.iinfo(np.int64).max:
        keys = texts << 32 | places
        order = np.lexsort((lengths, keys))
        return keys[order], lengths[order], free[order]
    packed = (texts * most + places) << bits | lengths << 1 | free
    sort_numbers(packed)
    text, place = np.divmod(packed >> bits, most)
    return text << 32 | place, packed >> 1 & (1 << bits - 1) - 1, packed & 1 == 1


def _in_steps(
    operations: GpuOperations, rows: NDArray[np.intp], start: Times, end: Times
) -> tuple[NDArray[np.intp], NDArray[np.intp], int]:
    """Sample rows in evenly spread steps; return them, their steps, and the number of steps."""
    if not len(start):
        return rows, np.zeros(len(rows), np.intp), 1
    step = number_windows(operations.start, start, end)[rows]
    inside = step >= 0
    rows, step = rows[inside], step[inside]
    stride = -(-len(rows) // _MOST_KERNELS)
    if stride > 1:
        chosen = step % stride == 0
        rows, step = rows[chosen], step[chosen]
    return rows, step, len(distinct_ids(step))


def _medians(
    keys: NDArray[np.int64], lengths: Times, steps: int
) -> tuple[NDArray[np.int64], Floats]:
    """Return the keys that most steps have, and their median lengths; input sorted by both."""
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    count = np.diff(first, append=len(keys))
    low, high = first + (count - 1) // 2, first + count // 2
    middle = lengths[low] / 2 + lengths[high] / 2
    often = 2 * count > steps
    return keys[first[often]], np.maximum(middle[often], 1.0)


def _quartiles(lengths: Floats, usual: Floats) -> Floats:
    """Return the quartiles of length by usual length, weighted by usual length."""
    known = np.isfinite(lengths)
    ratios, weights = lengths[known] / usual[known], usual[known]
    order = np.argsort(ratios)
    passed = np.cumsum(weights[order])
    at = np.searchsorted(passed, np.array(_QUARTILES) * passed[-1])
    quartiles: Floats = ratios[order][np.minimum(at, len(order) - 1)]
    return quartiles
