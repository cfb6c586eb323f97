"""Lanes reduced to cells or runs, and samples of a card to curves, exact at any zoom.

A class is a set of disjoint intervals with its running total, so its time in a cell is the
difference of two look-ups at the cell's edges. Nothing is sampled and nothing is left out: the
cells of any width sum to the window that they divide.

A sampled value holds from its sample to the next one. A curve keeps its integral over time, so the
mean of a cell is the difference of two look-ups too. Utilization describes the time before its
sample, and holds from the previous one.

Runs follow each other without gaps, so their lengths and classes are all there is to store. A trace
of few runs is kept as it is. A larger one is divided into cells: in a cell the runs of a class
become one, so that every cell still holds exactly the nanoseconds of each class that it had, and
only their order in it is lost. Windows that matter, such as those around the worst gaps, are kept
as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.device_metrics import held_by_tensors
from gputrace.analyzers.lanes import Lane, Timeline
from gputrace.model.intervals import EMPTY, Intervals, Times, union
from gputrace.model.nvml import Card
from gputrace.model.options import Window
from gputrace.model.time_class import BUSY_CLASSES, CLASSES, IDLE_CAUSES
from gputrace.model.trace import Trace

EIGHTHS: Final = 8
"""Number of parts into which a character's height is divided."""


@dataclass(frozen=True)
class Layers:
    """Time of one lane by class, as disjoint sets of intervals; the rest of the time is unknown."""

    classes: tuple[str, ...]
    """Names of the sets, in the order in which they are stacked from the bottom up."""
    sets: tuple[Intervals, ...]

    def split(self, edges: ArrayLike) -> NDArray[np.int64]:
        """Return the nanoseconds of each class between adjacent edges: shape (cells, classes)."""
        edges = np.asarray(edges, np.int64)
        if not self.sets:
            return np.empty((len(edges) - 1, 0), np.int64)
        before = np.stack([intervals.before(edges) for intervals in self.sets], axis=-1)
        return before[1:] - before[:-1]


NOTHING: Final = Layers((), ())
"""Layers of a lane without classes."""


@dataclass(frozen=True)
class Bars:
    """Cells as stacked bars of characters: in each, a lower class below an upper one.

    All arrays have shape (rows, cells), the top row first. A class is its index; unknown time has
    the number of classes as its index.
    """

    lower: NDArray[np.int8]
    upper: NDArray[np.int8]
    level: NDArray[np.int8]
    """Eighths of the character that the lower class fills, from 1 to 8."""


def edges_of(start: int, end: int, cells: int) -> Times:
    """Return the ``cells + 1`` moments that divide a window as evenly as integers can."""
    whole, rest = divmod(end - start, cells)
    index = np.arange(cells + 1, dtype=np.int64)
    return start + index * whole + index * rest // cells


def busy_layers(timeline: Timeline) -> Layers:
    """Return the busy time of a GPU by class, while the causes of its idle time are unknown."""
    return Layers(BUSY_CLASSES, timeline.classes)


def gpu_layers(lane: Lane) -> Layers:
    """Return all classes of a GPU; they sum to any window within its span."""
    busy = busy_layers(lane.timeline)
    idle = tuple(lane.causes.of[cause].clip(*lane.window) for cause in IDLE_CAUSES)
    return Layers(CLASSES, (*busy.sets, *idle))


def stack(shares: NDArray[np.int64], lengths: Times, rows: int = 1) -> Bars:
    """Draw cells as bars, some rows of characters high.

    A character shows the two classes that have most of its height, to the nearest eighth.

    Args:
        shares: nanoseconds by class, as `Layers.split` returns them.
        lengths: of the cells in nanoseconds, none of them 0.
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
    share = most / (most + np.maximum(next_most, 0))
    level = np.rint(np.where(first < second, share, 1 - share) * EIGHTHS).astype(np.int8)
    alone = (level == 0) | (level == EIGHTHS) | (next_most <= 0)
    lower = np.where(alone, first, np.minimum(first, second)).astype(np.int8)
    upper = np.where(alone, first, np.maximum(first, second)).astype(np.int8)
    return Bars(lower, upper, np.where(alone, EIGHTHS, level).astype(np.int8))


RUN_CLASSES: Final = (*CLASSES, "host_data", "host_rest", "unknown")
"""Classes of runs: a GPU's time, that of a host without one, or unknown."""

IN_CELL: Final = 0x40
"""Flag in `Runs.kind` of a run whose position in its cell is not kept."""
BEGINS_CELL: Final = 0x80
"""Flag of the first run of such a cell."""

_LONGEST: Final = (1 << 32) - 1
_UNKNOWN: Final = RUN_CLASSES.index("unknown")
_FEWEST_CELLS: Final = 64
_COARSE_CELLS: Final = 512


@dataclass(frozen=True)
class Runs:
    """Consecutive runs that fill an interval of time; their lengths sum to it."""

    length: NDArray[np.uint32]
    """Nanoseconds of each; one too long for 32 bits is split into several."""
    kind: NDArray[np.uint8]
    """Index of its class in `RUN_CLASSES`, and the flags `IN_CELL` and `BEGINS_CELL`."""

    def __len__(self) -> int:
        return len(self.length)

    @property
    def whole(self) -> bool:
        """Return whether every run kept its position."""
        return not np.any(self.kind & IN_CELL)


@dataclass(frozen=True, eq=False)
class Tiled:
    """All runs of a lane, in order."""

    layers: Layers
    start: Times
    kind: NDArray[np.uint8]
    """Index of each run's class in `RUN_CLASSES`."""


def tile(layers: Layers, span: Window) -> Tiled:
    """Return a lane as runs that fill a window."""
    sets = [each.clip(*span) for each in layers.sets]
    starts = np.concatenate([EMPTY.start, *(each.start for each in sets)])
    ends = np.concatenate([EMPTY.end, *(each.end for each in sets)])
    sets.append(union(starts, ends).complement(*span))
    kinds = [*(RUN_CLASSES.index(name) for name in layers.classes), _UNKNOWN]
    start = np.concatenate([each.start for each in sets])
    kind = np.repeat(np.array(kinds, np.uint8), [len(each) for each in sets])
    order = np.argsort(start, kind="stable")
    return Tiled(layers, start[order], kind[order])


def reduce(
    lanes: Sequence[Tiled],
    span: Window,
    most: int,
    whole: Iterable[Window] = (),
    between: Window | None = None,
) -> tuple[Runs, ...]:
    """Reduce each lane to runs, at most ``most`` together.

    Every lane has at least 64 cells, even where that exceeds ``most``.

    Args:
        lanes: lanes to reduce.
        span: window that the runs of every lane fill.
        most: maximum number of runs.
        whole: windows in which each run keeps its position, the most important first. They get half
            of the runs; those that do not fit are reduced too.
        between: window to divide into cells; the rest of the span is cut into a few hundred.
    """
    if sum(len(lane.start) for lane in lanes) <= most:
        return tuple(_packed(lane.start, lane.kind, span.end) for lane in lanes)
    kept = EMPTY
    for window in whole:
        first, last = max(window.start, span.start), min(window.end, span.end)
        more = union([*kept.start.tolist(), first], [*kept.end.tolist(), last])
        kept = more if _runs_within(lanes, more) <= most // 2 else kept
    left = most - _runs_within(lanes, kept)
    edges = _edges_that_fit(lanes, span, kept, left, between or span)
    runs = []
    for lane in lanes:
        in_cells, whole_runs = _cell_runs(lane.layers, edges, kept), _whole_runs(lane, kept)
        start = np.concatenate([in_cells[0], whole_runs[0]])
        kind = np.concatenate([in_cells[1], whole_runs[1]])
        order = np.argsort(start, kind="stable")
        runs.append(_packed(start[order], kind[order], span.end))
    return tuple(runs)


def _runs_within(lanes: Sequence[Tiled], windows: Intervals) -> int:
    """Count the runs of all lanes that touch some windows."""
    edges = np.stack([windows.start, windows.end])
    return sum(
        int((np.diff(np.searchsorted(lane.start, edges), axis=0) + 1).sum()) for lane in lanes
    )


def _edges_that_fit(
    lanes: Sequence[Tiled], span: Window, kept: Intervals, most: int, between: Window
) -> Times:
    """Return the edges of as many cells as leave few enough runs."""
    cells = max(most // max(len(lanes), 1), _FEWEST_CELLS)
    while True:
        # The edges of the cells and of the kept windows, without those inside the windows.
        fine = edges_of(*between, min(cells, between.end - between.start))
        coarse = edges_of(*span, min(_COARSE_CELLS, span.end - span.start))
        coarse = coarse[(coarse < between.start) | (coarse > between.end)]
        edges = np.unique(np.concatenate([fine, coarse, span, kept.start, kept.end]))
        edges = edges[~(kept.contains(edges) & kept.contains(edges - 1))]
        runs = sum(int(np.count_nonzero(lane.layers.split(edges))) for lane in lanes)
        if runs <= most or cells == _FEWEST_CELLS:
            return edges
        cells = max(min(cells - cells // 8, int(cells * 0.95 * most / runs)), _FEWEST_CELLS)


def _cell_runs(layers: Layers, edges: Times, kept: Intervals) -> tuple[Times, NDArray[np.uint8]]:
    """Return a run per class of each cell that is not kept whole, in the order of the classes."""
    shares = layers.split(edges)
    shares = np.concatenate([shares, (np.diff(edges) - shares.sum(axis=1))[:, None]], axis=1)
    kinds = [*(RUN_CLASSES.index(name) for name in layers.classes), _UNKNOWN]
    ends = np.cumsum(shares, axis=1)
    starts = edges[:-1, None] + ends - shares
    there = (shares > 0) & ~kept.contains(edges[:-1])[:, None]
    alone = there.sum(axis=1) == 1
    flags = np.where(alone, 0, IN_CELL)[:, None] | np.where(
        (ends == shares) & ~alone[:, None], BEGINS_CELL, 0
    )
    kind = (np.array(kinds)[None, :] | flags).astype(np.uint8)
    return starts[there], kind[there]


def _whole_runs(lane: Tiled, kept: Intervals) -> tuple[Times, NDArray[np.uint8]]:
    """Return the runs inside the kept windows, cut at their edges."""
    first = np.searchsorted(lane.start, kept.start, "right") - 1
    last = np.searchsorted(lane.start, kept.end)
    rows = [np.arange(low, high) for low, high in zip(first, last, strict=True)]
    indices = np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int64)
    low = np.repeat(kept.start, [len(row) for row in rows])
    return np.maximum(lane.start[indices], low), lane.kind[indices]


def _packed(start: Times, kind: NDArray[np.uint8], end: int) -> Runs:
    """Return the runs, with those too long for 32 bits split into several."""
    length = np.diff(np.append(start, end))
    pieces = np.maximum(-(-length // _LONGEST), 1)
    if int(pieces.max(initial=1)) > 1:
        indices = np.repeat(np.arange(len(length)), pieces)
        number = np.arange(len(indices)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        length = np.minimum(length[indices] - number * _LONGEST, _LONGEST)
        kind = np.where(number == 0, kind[indices], kind[indices] & ~np.uint8(BEGINS_CELL))
    return Runs(length.astype(np.uint32), kind)


CURVES: Final = ("utilization", "smClock", "power", "memoryUsed", "temperature")
"""Samples to draw, by their names there."""
_BACKWARD: Final = ("utilization",)
_MOST_PERCENT_OR_CELSIUS: Final = 100.0
"""Upper bound of utilization in percent, and of temperature in degrees Celsius."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Time series of one value of one card."""

    name: str
    """One of `CURVES`."""
    time: Times
    """Moments from which each value holds, and at the end the one until which the last holds."""
    value: NDArray[np.float64]
    """Values, one fewer than ``time``."""
    top: float
    """Upper bound of the value, where it is known; else the largest value."""

    def means(self, edges: Times) -> NDArray[np.float64]:
        """Return the mean between neighbouring edges; NaN where there is no sample."""
        inside = np.clip(edges, self.time[0], self.time[-1])
        # Relative to the first, since absolute nanoseconds exceed the precision of a float.
        since = (inside - self.time[0]).astype(np.float64)
        known = (self.time - self.time[0]).astype(np.float64)
        integral = np.concatenate([[0.0], np.cumsum(self.value * np.diff(self.time))])
        sums, lengths = np.diff(np.interp(since, known, integral)), np.diff(since)
        return np.where(lengths > 0, sums / np.maximum(lengths, 1), np.nan)


def find_curves(trace: Trace, lanes: Sequence[Lane]) -> tuple[tuple[Curve, ...], ...]:
    """Return the curves of each lane's card; where it was not sampled, of what tensors hold."""
    curves: list[tuple[Curve, ...]] = []
    nvml = trace.nvml
    for gpu in (lane.gpu for lane in lanes):
        samples, card = nvml.samples.of(gpu.host, gpu.gpu), nvml.card(gpu.host, gpu.gpu)
        if not gpu.gpu_known or not len(samples):
            samples = held_by_tensors(trace, gpu)
        made = (make_curve(name, samples.time, samples[name], card) for name in CURVES)
        curves.append(tuple(curve for curve in made if curve is not None))
    return tuple(curves)


def make_curve(
    name: str, time: Times, value: NDArray[np.float64], card: Card | None
) -> Curve | None:
    """Return one of `CURVES` from its samples, NaN where there was none; None of too few."""
    known = np.isfinite(value)
    time, value = time[known], value[known]
    time, first = np.unique(time, return_index=True)
    value = value[first]
    if len(time) < 2:
        return None
    held = value[1:] if name in _BACKWARD else value[:-1]
    tops = {"utilization": _MOST_PERCENT_OR_CELSIUS, "temperature": _MOST_PERCENT_OR_CELSIUS}
    if card is not None:
        tops |= {
            "smClock": card.sm_clock_max or 0.0,
            "power": card.power_limit_mw or 0.0,
            "memoryUsed": card.memory_bytes or 0.0,
        }
    return Curve(name, time, held, float(tops.get(name) or value.max()) or 1.0)
