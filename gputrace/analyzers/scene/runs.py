"""A lane as a sequence of runs of one class each, small enough for a page that stands alone.

Runs follow each other without a hole, so their lengths and classes are all there is to keep. A
trace of few runs is kept as it is. Of a larger one the time is divided into cells: inside a cell
the runs of a class become one, so that every cell still holds exactly the nanoseconds of each class
that it had, and only their order in it is lost. Windows that matter, as those around the worst
gaps, are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.intervals import EMPTY, Intervals, Times, union
from gputrace.analyzers.results import CLASSES
from gputrace.analyzers.scene.cells import Layers, edges_of
from gputrace.traces.trace import Window

RUN_CLASSES: Final = (*CLASSES, "host_data", "host_rest", "unknown")
"""What a run can be: a GPU's time, that of a host without one, or not known."""

IN_CELL: Final = 0x40
"""Set in `Runs.kind` of a run whose place in its cell is not kept."""
BEGINS_CELL: Final = 0x80
"""Set in the first run of such a cell."""

_LONGEST: Final = (1 << 32) - 1
_UNKNOWN: Final = RUN_CLASSES.index("unknown")
_FEWEST_CELLS: Final = 64
_COARSE_CELLS: Final = 512


@dataclass(frozen=True)
class Runs:
    """A stretch of time as runs; their lengths sum to it."""

    length: NDArray[np.uint32]
    """Nanoseconds of each; a longer run is several."""
    kind: NDArray[np.uint8]
    """The place of its class in `RUN_CLASSES`, and the flags `IN_CELL` and `BEGINS_CELL`."""

    def __len__(self) -> int:
        return len(self.length)

    @property
    def whole(self) -> bool:
        """Whether every run kept its place."""
        return not np.any(self.kind & IN_CELL)


@dataclass(frozen=True, eq=False)
class Tiled:
    """All runs of a lane, in order."""

    layers: Layers
    start: Times
    kind: NDArray[np.uint8]
    """The place of each run's class in `RUN_CLASSES`."""


def tile(layers: Layers, span: Window) -> Tiled:
    """A lane as runs that fill a stretch of time."""
    sets = [each.clip(*span) for each in layers.sets]
    known = union(*(np.concatenate([EMPTY.start, *each]) for each in _ends(sets)))
    sets.append(known.complement(*span))
    kinds = [*(RUN_CLASSES.index(name) for name in layers.classes), _UNKNOWN]
    start = np.concatenate([each.start for each in sets])
    kind = np.repeat(np.array(kinds, np.uint8), [len(each) for each in sets])
    order = np.argsort(start, kind="stable")
    return Tiled(layers, start[order], kind[order])


def _ends(sets: Sequence[Intervals]) -> tuple[list[Times], list[Times]]:
    return [each.start for each in sets], [each.end for each in sets]


def reduce(
    lanes: Sequence[Tiled],
    span: Window,
    most: int,
    whole: Iterable[Window] = (),
    between: Window | None = None,
) -> tuple[Runs, ...]:
    """Each lane as runs, at most ``most`` together.

    A span of many lanes has at least 64 cells in each, whatever that makes.

    Args:
        lanes: what to reduce.
        span: the stretch of time that the runs fill, of every lane.
        most: how many runs there may be.
        whole: windows in which each run keeps its place, the most important first. They get half of
            the runs; those that do not fit are reduced too.
        between: where the cells are; the rest of the span is cut into a few hundred.
    """
    if sum(len(lane.start) for lane in lanes) <= most:
        return tuple(_packed(lane.start, lane.kind, span.end) for lane in lanes)
    kept = _fitting(lanes, span, whole, most // 2)
    left = most - _runs_within(lanes, kept)
    edges = _edges_that_fit(lanes, span, kept, left, between or span)
    return tuple(_reduced(lane, span, kept, edges) for lane in lanes)


def _fitting(lanes: Sequence[Tiled], span: Window, whole: Iterable[Window], most: int) -> Intervals:
    """The windows to keep whole, joined where they touch; the first that fit."""
    kept = EMPTY
    for window in whole:
        first, last = max(window.start, span.start), min(window.end, span.end)
        more = union([*kept.start.tolist(), first], [*kept.end.tolist(), last])
        if _runs_within(lanes, more) <= most:
            kept = more
    return kept


def _runs_within(lanes: Sequence[Tiled], windows: Intervals) -> int:
    """How many runs of all lanes touch some windows."""
    return sum(
        int(
            (
                np.searchsorted(lane.start, windows.end)
                - np.searchsorted(lane.start, windows.start)
                + 1
            ).sum()
        )
        for lane in lanes
    )


def _edges_that_fit(
    lanes: Sequence[Tiled], span: Window, kept: Intervals, most: int, between: Window
) -> Times:
    """Edges of as many cells as leave few enough runs."""
    cells = max(most // max(len(lanes), 1), _FEWEST_CELLS)
    while True:
        edges = _edges(span, kept, between, cells)
        runs = sum(int(np.count_nonzero(lane.layers.split(edges))) for lane in lanes)
        if runs <= most or cells == _FEWEST_CELLS:
            return edges
        cells = max(min(cells - cells // 8, int(cells * 0.95 * most / runs)), _FEWEST_CELLS)


def _edges(span: Window, kept: Intervals, between: Window, cells: int) -> Times:
    """Of the cells, and of the windows that are kept; none inside those."""
    fine = edges_of(*between, min(cells, between.end - between.start))
    coarse = edges_of(*span, min(_COARSE_CELLS, span.end - span.start))
    coarse = coarse[(coarse < between.start) | (coarse > between.end)]
    edges = np.unique(np.concatenate([fine, coarse, span, kept.start, kept.end]))
    return edges[~(kept.contains(edges) & kept.contains(edges - 1))]


def _reduced(lane: Tiled, span: Window, kept: Intervals, edges: Times) -> Runs:
    in_cells, whole = _cell_runs(lane.layers, edges, kept), _whole_runs(lane, kept)
    start = np.concatenate([in_cells[0], whole[0]])
    kind = np.concatenate([in_cells[1], whole[1]])
    order = np.argsort(start, kind="stable")
    return _packed(start[order], kind[order], span.end)


def _cell_runs(layers: Layers, edges: Times, kept: Intervals) -> tuple[Times, NDArray[np.uint8]]:
    """One run for each class of each cell that is not kept whole, in the order of the classes."""
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
    """The runs inside the windows, cut at their edges."""
    first = np.searchsorted(lane.start, kept.start, "right") - 1
    last = np.searchsorted(lane.start, kept.end)
    rows = [np.arange(low, high) for low, high in zip(first, last, strict=True)]
    places = np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int64)
    low = np.repeat(kept.start, [len(row) for row in rows])
    return np.maximum(lane.start[places], low), lane.kind[places]


def _packed(start: Times, kind: NDArray[np.uint8], end: int) -> Runs:
    """With runs that are too long for 32 bits cut into several."""
    length = np.diff(np.append(start, end))
    pieces = np.maximum(-(-length // _LONGEST), 1)
    if int(pieces.max(initial=1)) > 1:
        places = np.repeat(np.arange(len(length)), pieces)
        number = np.arange(len(places)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        length = np.minimum(length[places] - number * _LONGEST, _LONGEST)
        kind = np.where(number == 0, kind[places], kind[places] & ~np.uint8(BEGINS_CELL))
    return Runs(length.astype(np.uint32), kind)
