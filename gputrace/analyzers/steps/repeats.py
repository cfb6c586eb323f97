"""Loops that repeat in the kernel stream without anything that shows training."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.steps.anchors import Rows
from gputrace.analyzers.steps.inferred import window_starts
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.traces.events import Kind

_LEAST_REPEATS: Final = 3
_MOST_NAMES: Final = 200
_MOST_TRIED: Final = 20
_UNEVEN: Final = 0.25
"""Usual deviation of the distances from their median, as a part of it, that is no loop."""
_ALIKE: Final = 0.95
"""Cosine of the kernel counts of a stretch with those of the usual stretch."""
_COVERED: Final = 0.6
"""Part of the kernels that the loop must contain."""


def infer_iterations(operations: GpuOperations) -> StepWindows | None:
    """The outermost loop: the rarest kernel that cuts the stream into stretches all alike."""
    kernels = np.flatnonzero(np.isin(operations.events.kind, (Kind.KERNEL, Kind.GRAPH)))
    if len(kernels) < 2 * _LEAST_REPEATS:
        return None
    _, names = np.unique(operations.events.name[kernels], return_inverse=True)
    counts = np.bincount(names)
    candidates = np.argsort(counts, kind="stable")
    candidates = candidates[counts[candidates] >= _LEAST_REPEATS][:_MOST_NAMES]
    tried = 0
    for name in candidates.tolist():
        cuts = np.flatnonzero(names == name)
        if not _is_even(cuts):
            continue
        tried += 1
        if tried > _MOST_TRIED:
            return None
        likeness = _likeness(names, cuts, len(counts))
        if likeness >= _ALIKE:
            return _windows(operations, kernels[cuts], likeness)
    return None


def _is_even(cuts: Rows) -> bool:
    """Whether the distances are mostly alike, which is cheap to ask before looking inside."""
    between = np.diff(cuts)
    usual = np.median(between)
    return bool(usual > 1 and np.median(np.abs(between - usual)) <= _UNEVEN * usual)


def _likeness(names: NDArray[np.intp], cuts: Rows, kinds: int) -> float:
    """How alike the stretches between the cuts are, 0 to 1; 0 where they cover too little."""
    inside = names[cuts[0] : cuts[-1]]
    if len(inside) < _COVERED * len(names) or len(inside) < 2 * (len(cuts) - 1):
        return 0.0
    stretch = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    table = np.bincount(stretch * kinds + inside, minlength=(len(cuts) - 1) * kinds)
    table = table.reshape(len(cuts) - 1, kinds).astype(float)
    usual = np.median(table, axis=0)
    norms = np.linalg.norm(table, axis=1) * np.linalg.norm(usual)
    cosines = np.divide(table @ usual, norms, out=np.zeros(len(table)), where=norms > 0)
    return float(np.quantile(cosines, 0.1))


def _windows(operations: GpuOperations, cuts: Rows, likeness: float) -> StepWindows:
    starts = window_starts(operations, cuts)
    reason = "one kernel cuts the stream into stretches alike; no optimizer, no input copy shows"
    return StepWindows(
        rank=operations.gpu.rank,
        start=starts[:-1],
        end=starts[1:],
        busy_from=operations.start[cuts[:-1]],
        source="inferred",
        kind="iterations",
        confidence=round(0.5 * likeness, 2),
        reason=reason,
    )
