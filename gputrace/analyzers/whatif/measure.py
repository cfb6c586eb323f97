"""The mean step of a replay."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.intervals import Times
from gputrace.analyzers.whatif.graph import LONG_AGO, Graph
from gputrace.analyzers.whatif.rows import SCENE


class Measure(NamedTuple):
    """Steps of a replay."""

    lengths: NDArray[np.float64]
    """Of each step, the mean over all GPUs that have steps, without the first `SCENE` ones."""

    @property
    def mean(self) -> float:
        """Nanoseconds."""
        return float(self.lengths.mean()) if len(self.lengths) else 0.0


def standard_error(values: NDArray[np.float64]) -> float:
    """Of the mean of some values."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def measure(graph: Graph, ended: Times) -> Measure:
    """The steps of a replay."""
    ends = step_ends(graph, ended)
    ends = ends[(ends > LONG_AGO).all(axis=1)]
    if not len(ends):
        return Measure(np.empty(0))
    return Measure(np.diff(ends[:, SCENE - 1 :], axis=1).mean(axis=0))


def step_ends(graph: Graph, ended: Times) -> Times:
    """When the last operation of each step of each GPU ends: shape (gpus, steps).

    A step in which a GPU did nothing ends when the one before it does.
    """
    gpus = int(graph.gpu.max(initial=-1)) + 1
    ends = np.full((gpus, graph.steps), LONG_AGO, np.int64)
    rows = np.flatnonzero((graph.stream >= 0) & (graph.step >= 0))
    np.maximum.at(ends.reshape(-1), graph.gpu[rows] * graph.steps + graph.step[rows], ended[rows])
    return np.maximum.accumulate(ends, axis=1)
