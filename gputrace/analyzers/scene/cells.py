"""A lane of a timeline as cells: the nanoseconds of each class in every cell, exact at any zoom.

A class is a set of disjoint intervals with its running total, so what a cell holds of it is the
difference of two look-ups at the cell's edges. Nothing is sampled and nothing is left out: the
cells of any width sum to the window that they divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.intervals import Intervals, Times
from gputrace.analyzers.lanes import Lane
from gputrace.analyzers.partition import Timeline
from gputrace.analyzers.results import CLASSES, IDLE_CAUSES

EIGHTHS: Final = 8
"""Into so many parts a character's height is divided."""


@dataclass(frozen=True)
class Layers:
    """What one lane did, as disjoint sets of nanoseconds; the rest of the time is not known."""

    classes: tuple[str, ...]
    """The name of each set, in the order in which they are stacked from the ground up."""
    sets: tuple[Intervals, ...]

    def split(self, edges: ArrayLike) -> NDArray[np.int64]:
        """Nanoseconds of each class between neighbouring edges: shape (cells, classes)."""
        edges = np.asarray(edges, np.int64)
        if not self.sets:
            return np.empty((len(edges) - 1, 0), np.int64)
        before = np.stack([each.before(edges) for each in self.sets], axis=-1)
        return before[1:] - before[:-1]

    def at(self, moment: int) -> str | None:
        """The class of a moment; None where nothing is known."""
        for name, each in zip(self.classes, self.sets, strict=True):
            if bool(each.contains([moment])[0]):
                return name
        return None


NOTHING: Final = Layers((), ())
"""Of a lane without classes."""


@dataclass(frozen=True)
class Bars:
    """Cells as stacked bars of characters: in each, a lower class below an upper one.

    All are of shape (rows, cells), the top row first. A class is its index, or the number of
    classes for time of which nothing is known.
    """

    lower: NDArray[np.int8]
    upper: NDArray[np.int8]
    level: NDArray[np.int8]
    """Eighths of the character that the lower class fills, from 1 to 8."""


def edges_of(start: int, end: int, cells: int) -> Times:
    """The ``cells + 1`` moments that divide a window as evenly as integers can."""
    whole, rest = divmod(end - start, cells)
    places = np.arange(cells + 1, dtype=np.int64)
    return start + places * whole + places * rest // cells


def busy_layers(timeline: Timeline) -> Layers:
    """The busy time of a GPU by class, where no cause of its idle time is known yet."""
    return Layers(
        CLASSES[: len(OperationClass)],
        tuple(timeline.of_class(which) for which in OperationClass),
    )


def gpu_layers(lane: Lane) -> Layers:
    """All classes of a GPU: they sum to any window within its span."""
    busy = busy_layers(lane.timeline)
    idle = tuple(lane.causes.of[cause].clip(*lane.window) for cause in IDLE_CAUSES)
    return Layers(CLASSES, (*busy.sets, *idle))


def stack(shares: NDArray[np.int64], lengths: Times, rows: int = 1) -> Bars:
    """Draws cells as bars of some rows of characters.

    A character shows the two classes that have most of its height, to the nearest eighth.

    Args:
        shares: nanoseconds by class, as `Layers.split` gives them.
        lengths: of the cells, in nanoseconds, none 0.
        rows: the height of a bar in characters.
    """
    heights = np.concatenate([shares, (lengths - shares.sum(axis=1))[:, None]], axis=1)
    tops = np.cumsum(heights, axis=1) / lengths[:, None] * rows
    bottoms = np.concatenate([np.zeros((len(tops), 1)), tops[:, :-1]], axis=1)
    row = np.arange(rows - 1, -1, -1)[:, None, None]
    weights = np.clip(np.minimum(tops, row + 1) - np.maximum(bottoms, row), 0, None)
    first = weights.argmax(axis=-1)
    most = np.take_along_axis(weights, first[..., None], -1)[..., 0]
    np.put_along_axis(weights, first[..., None], -1, -1)
    second = weights.argmax(axis=-1)
    next_most = np.take_along_axis(weights, second[..., None], -1)[..., 0]
    return _bars(first, second, most, next_most)


def _bars(
    first: NDArray[np.intp],
    second: NDArray[np.intp],
    most: NDArray[np.float64],
    next_most: NDArray[np.float64],
) -> Bars:
    share = most / (most + np.maximum(next_most, 0))
    level = np.rint(np.where(first < second, share, 1 - share) * EIGHTHS).astype(np.int8)
    lower, upper = np.minimum(first, second), np.maximum(first, second)
    alone = (level == 0) | (level == EIGHTHS) | (next_most <= 0)
    lower, upper = np.where(alone, first, lower), np.where(alone, first, upper)
    level = np.where(alone, EIGHTHS, level)
    return Bars(lower.astype(np.int8), upper.astype(np.int8), level.astype(np.int8))
