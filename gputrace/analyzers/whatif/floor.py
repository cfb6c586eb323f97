"""Time of a step that no prediction undercuts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.operations import Gpu, OperationClass
from gputrace.analyzers.whatif.graph import Graph
from gputrace.model.results import Breakdown


@dataclass(frozen=True)
class Recorded:
    """Time of the measured steps, by which predictions are bounded."""

    compute: NDArray[np.float64]
    """Mean compute of a step, in nanoseconds, by GPU of the graph; 0 for a GPU without steps."""
    rows: Sequence[Breakdown]
    """Breakdown of the GPUs that do the work."""
    mean_ns: int
    """Mean step of the whole run, to which gains are scaled."""

    @classmethod
    def of(
        cls,
        gpus: Sequence[Gpu],
        breakdown: Sequence[Breakdown],
        rows: Sequence[Breakdown],
        mean_ns: int,
    ) -> Recorded:
        """Return what a run's GPUs, in the order of the graph, have recorded.

        Args:
            gpus: GPUs of the graph.
            breakdown: rows of all GPUs.
            rows: those of the GPUs that do the work.
            mean_ns: mean step.
        """
        means = {
            (row.gpu, row.rank): row.of("compute") / row.steps for row in breakdown if row.steps
        }
        compute = np.array([means.get((gpu.gpu, gpu.rank), 0.0) for gpu in gpus])
        return cls(compute, rows, mean_ns)

    def floor(self, graph: Graph, edit: Graph, shortens: Collection[str] = ()) -> int:
        """Return the nanoseconds of a step that an edit of the graph leaves.

        The busiest GPU's compute stays, as far as the edit leaves it, and so does what the edit
        cannot shorten, if that is known.

        Args:
            graph: dependency graph of some steps.
            edit: the same with an optimization.
            shortens: classes of time that the edit can shorten at most; empty for any.
        """
        left = self.compute * _part_left(graph, edit, len(self.compute))
        least = math.ceil(float(left.max(initial=0.0)))
        if shortens:
            parts = [sum(map(row.of, shortens)) // max(row.steps, 1) for row in self.rows]
            least = max(least, self.mean_ns - max(parts, default=0))
        return min(least, self.mean_ns)


def _part_left(graph: Graph, edit: Graph, gpus: int) -> NDArray[np.float64]:
    """Return the part of each GPU's compute that an edit leaves; all of it where none was seen."""
    before, after = _kernel_time(graph, gpus), _kernel_time(edit, gpus)
    return np.divide(after, before, out=np.ones(gpus), where=before > 0)


def _kernel_time(graph: Graph, gpus: int) -> NDArray[np.float64]:
    """Return the nanoseconds that the computing kernels of each GPU take in the graph."""
    computes = (graph.stream >= 0) & (graph.operation == OperationClass.COMPUTE)
    return np.bincount(graph.gpu[computes], graph.ns[computes], gpus).astype(np.float64)
