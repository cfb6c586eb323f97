"""The kernels of a run by name: how many a step, and how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import is_communication
from gputrace.analyzers.compare.loop import Key
from gputrace.analyzers.compare.noise import Mean, means_of
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.results import Step
from gputrace.traces.events import Kind
from gputrace.traces.trace import Trace

_Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class KernelUse:
    """All kernels of one name, a GPU, in ns; a kernel belongs to the step in which it starts."""

    name: str
    communication: bool
    total: Mean
    """Their time a step; in the whole span, without a known error, where there are no steps."""
    count: float
    """How many a step, or in the whole span."""
    median_ns: float
    """How long one takes."""


def use_kernels(
    trace: Trace, operations: Sequence[GpuOperations], steps: Sequence[Step] | None
) -> tuple[KernelUse, ...]:
    """The kernels in some steps of the GPUs given, or in the whole span with None."""
    numbers = sorted({step.step for step in steps}) if steps is not None else [0]
    parts = [_placed(own, steps, numbers) for own in operations]
    if not parts:
        return ()
    ids, ns, place = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not len(ids):
        return ()
    texts, ids = _by_text(trace, ids)
    totals = np.bincount(
        place * len(texts) + ids, weights=ns, minlength=len(numbers) * len(texts)
    ).reshape(len(numbers), len(texts))
    counts = np.bincount(ids, minlength=len(texts)) / (len(numbers) * len(operations))
    means = means_of(totals / len(operations))
    medians = _medians(ids, ns, len(texts))
    return tuple(
        KernelUse(text, is_communication(text), mean, count, median)
        for text, mean, count, median in zip(texts, means, counts.tolist(), medians, strict=True)
    )


def _placed(
    own: GpuOperations, steps: Sequence[Step] | None, numbers: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.int64], _Rows]:
    """Name id, length and place of the step of each kernel that is in one."""
    kernels = np.flatnonzero(own.events.kind == Kind.KERNEL)
    ids, ns = own.events.name[kernels], own.end[kernels] - own.start[kernels]
    if steps is None:
        return ids, ns, np.zeros(len(kernels), np.intp)
    key: Key = own.gpu.gpu, own.gpu.rank
    mine = sorted((s.start_ns, s.end_ns, s.step) for s in steps if (s.gpu, s.rank) == key)
    if not mine:
        return ids[:0], ns[:0], np.zeros(0, np.intp)
    starts, ends, which = np.array(mine, np.int64).T
    index = np.searchsorted(starts, own.start[kernels], "right") - 1
    inside = (index >= 0) & (own.start[kernels] < ends[index])
    return ids[inside], ns[inside], np.searchsorted(numbers, which[index[inside]])


def _by_text(trace: Trace, ids: NDArray[np.int32]) -> tuple[list[str], _Rows]:
    """The names, and each kernel's place among them: several ids may mean one text."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    names = trace.names(distinct)
    texts = sorted(set(names.values()))
    place = {text: index for index, text in enumerate(texts)}
    return texts, np.array([place[names[id]] for id in distinct.tolist()], np.intp)[inverse]


def _medians(ids: _Rows, ns: NDArray[np.int64], count: int) -> Iterator[float]:
    order = np.argsort(ids, kind="stable")
    edges = np.searchsorted(ids[order], np.arange(1, count))
    return (float(np.median(part)) for part in np.split(ns[order], edges))
