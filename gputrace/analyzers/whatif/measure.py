"""The mean step of a replay."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gputrace.analyzers.intervals import Times
from gputrace.analyzers.whatif.graph import LONG_AGO, Graph


class Measure(NamedTuple):
    """Steps of a replay: their mean length, and how far the mean may be off by chance."""

    mean: float
    error: float


def measure(graph: Graph, ended: Times) -> Measure:
    """The mean step over all GPUs that have steps; the first ones only set the scene."""
    ends = step_ends(graph, ended)
    ends = ends[(ends > LONG_AGO).all(axis=1)]
    if not len(ends):
        return Measure(0.0, 0.0)
    scene = max(1, ends.shape[1] // 4)
    lengths = np.diff(ends[:, scene - 1 :], axis=1).mean(axis=0)
    spread = float(lengths.std(ddof=1)) if len(lengths) > 1 else 0.0
    return Measure(float(lengths.mean()), spread / float(np.sqrt(len(lengths))))


def step_ends(graph: Graph, ended: Times) -> Times:
    """When the last operation of each step of each GPU ends: shape (gpus, steps).

    A step in which a GPU did nothing ends when the one before it does.
    """
    gpus = int(graph.gpu.max(initial=-1)) + 1
    ends = np.full((gpus, graph.steps), LONG_AGO, np.int64)
    rows = np.flatnonzero((graph.stream >= 0) & (graph.step >= 0))
    np.maximum.at(ends, (graph.gpu[rows], graph.step[rows]), ended[rows])
    return np.maximum.accumulate(ends, axis=1)
