"""What is shown, whatever draws it: lanes of one or two traces on one axis, and a selection.

The axis counts nanoseconds from each trace's own 0, so that two traces lie side by side. Moments
here are on the axis; a lane turns them into its trace's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.intervals import Times
from gputrace.analyzers.results import Analysis
from gputrace.analyzers.scene.cells import NOTHING
from gputrace.analyzers.scene.curves import CURVES
from gputrace.analyzers.scene.gap_table import NO_STEP, GapFilter, GapTable, join, order
from gputrace.analyzers.scene.scene import Scene, SceneLane
from gputrace.analyzers.steps import StepWindows
from gputrace.views.browse.lanes import Picked, ShownLane, belongs, label_of
from gputrace.views.browse.viewport import Viewport
from gputrace.views.words import duration

_NAMES: Final = "AB"
"""Of two traces."""
_NO_ROWS: Final = np.empty(0, np.intp)


@dataclass
class Board:
    """All that a person may change, and what follows from it."""

    scenes: list[Scene | None]
    """By trace; None while nothing of it is there."""
    shifts: list[int] = field(default_factory=list)
    """What is added to each trace's 0, to lay two side by side."""
    extra: list[list[SceneLane]] = field(default_factory=list)
    """Of each trace, lanes of streams and threads that are to be shown."""
    curve: str = ""
    """Which of `CURVES` is drawn below each GPU; nothing for none."""
    ranks: frozenset[int] | None = None
    """The ranks that are shown; None for all."""
    gap_filter: GapFilter = field(default_factory=lambda: GapFilter(steady=True))
    sort: str = "length"
    descending: bool = True
    view: Viewport = field(default_factory=lambda: Viewport(0, 1, 0, 1))
    cursor: int = 0
    cursor_lane: int = 0
    """Place among the lanes that are shown."""
    marks: tuple[int, ...] = ()
    selected: int | None = None
    """A row of the table of gaps."""
    picked: Picked | None = None
    table: GapTable = field(default_factory=lambda: join([]))
    """Of all GPUs of all traces; its lanes are those of `gpus`."""
    rows: NDArray[np.intp] = field(default_factory=lambda: _NO_ROWS)
    """Those of the table that are listed, in their order."""
    gpus: list[ShownLane] = field(default_factory=list)
    lanes: list[ShownLane] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shifts = self.shifts or [0] * len(self.scenes)
        self.extra = self.extra or [[] for _ in self.scenes]

    def zero(self, trace: int) -> int:
        """The moment of a trace that the axis calls 0."""
        scene = self.scenes[trace]
        return (scene.origin if scene else 0) + self.shifts[trace]

    def rebuild(self) -> None:
        """Makes lanes and gaps of the scenes, after one of them or a shift has changed."""
        self.gpus = [
            self._shown(trace, number, lane)
            for trace, scene in enumerate(self.scenes)
            if scene is not None
            for number, lane in enumerate(scene.lanes)
        ]
        self.table = join([self._gaps_of(trace) for trace in range(len(self.scenes))])
        spans = [
            (scene.span.start - self.zero(trace), scene.span.end - self.zero(trace))
            for trace, scene in enumerate(self.scenes)
            if scene is not None
        ]
        if spans:
            low, high = min(span[0] for span in spans), max(span[1] for span in spans)
            fresh = self.view.high - self.view.low <= 1
            view = Viewport(low, max(high, low + 1), low, max(high, low + 1))
            self.view = view if fresh else self.view.within(low, max(high, low + 1))
        self.filter_lanes()

    def filter_lanes(self) -> None:
        """The lanes to show, each GPU's parts below it."""
        parts = [
            self._shown(trace, -1, lane) for trace, own in enumerate(self.extra) for lane in own
        ]
        self.lanes = []
        for shown in self.gpus:
            lane = shown.lane
            if self.ranks is not None and lane.rank not in self.ranks:
                continue
            self.lanes.append(shown)
            self.lanes += self._curve_of(shown)
            last = not any(
                later.trace == shown.trace and later.lane.rank == lane.rank
                for later in self.gpus[self.gpus.index(shown) + 1 :]
            )
            self.lanes += [part for part in parts if belongs(part, shown, last)]
        self.cursor_lane = min(self.cursor_lane, max(len(self.lanes) - 1, 0))

    def forget(self) -> None:
        """Selects nothing and lists nothing, as another table of gaps is to come."""
        self.selected = self.picked = None
        self.rows = _NO_ROWS

    def _curve_of(self, shown: ShownLane) -> list[ShownLane]:
        """The lane of the curve that is drawn below a GPU."""
        own = tuple(curve for curve in shown.lane.curves if curve.name == self.curve)
        if not own:
            return []
        lane = replace(shown.lane, layers=NOTHING, operations=None, part=self.curve, curves=own)
        return [self._shown(shown.trace, -1, lane)]

    def known_curves(self) -> list[str]:
        """Those of which any GPU has samples."""
        there = {curve.name for shown in self.gpus for curve in shown.lane.curves}
        return [name for name in CURVES if name in there]

    def arrange(self, table: GapTable) -> NDArray[np.intp]:
        """The rows to list, by the filter and in the order that are set; may take a while."""
        chosen = self.gap_filter
        if self.ranks is not None:
            ranks = [n for n, gpu in enumerate(self.gpus) if gpu.lane.rank in self.ranks]
            lanes = ranks if chosen.lanes is None else sorted(set(ranks) & set(chosen.lanes))
            chosen = replace(chosen, lanes=lanes)
        return order(table, chosen.rows(table), self.sort, descending=self.descending)

    def analysis(self, trace: int = 0) -> Analysis | None:
        scene = self.scenes[trace]
        return scene.analysis if scene else None

    def steps_at(self, shown: ShownLane | None) -> tuple[StepWindows, int] | None:
        """The steps of a lane's rank, and the moment of them that the axis calls 0."""
        trace = shown.trace if shown else 0
        scene = self.scenes[trace]
        steps = scene.steps_of(shown.lane.rank if shown else 0) if scene else None
        return None if steps is None or not len(steps) else (steps, self.zero(trace))

    def same_step(self, moment: int) -> tuple[int | None, int | None]:
        """Where the step begins in each of two traces that is nearest a moment, by its number.

        Of the rank at the cursor, and nearest in the trace that the cursor is in.
        """
        at = self.lane_at_cursor
        trace, rank = (at.trace, at.lane.rank) if at is not None else (0, 0)
        starts = [self._step_starts(each, rank) for each in (0, 1)]
        own = starts[trace]
        if own is None:
            return None, None
        number = int(np.abs(own - moment).argmin())
        first, second = (
            None if each is None else int(each[min(number, len(each) - 1)]) for each in starts
        )
        return first, second

    def _step_starts(self, trace: int, rank: int) -> Times | None:
        """Where the steps of a rank begin, or of another where the trace has no such rank."""
        own = [gpu for gpu in self.gpus if gpu.trace == trace]
        same = [gpu for gpu in own if gpu.lane.rank == rank]
        found = self.steps_at((same or own)[0]) if own else None
        return None if found is None else found[0].start - found[1]

    def step_span(self, moment: int) -> tuple[int, int] | None:
        """The step around a moment, or the first after it; of the lane with the cursor."""
        found = self.steps_at(self.lane_at_cursor)
        if found is None:
            return None
        steps, zero = found
        number = int(np.searchsorted(steps.end, moment + zero, "right"))
        number = min(number, len(steps) - 1)
        return int(steps.start[number]) - zero, int(steps.end[number]) - zero

    @property
    def lane_at_cursor(self) -> ShownLane | None:
        return self.lanes[self.cursor_lane] if self.lanes else None

    def gap_span(self, row: int) -> tuple[int, int]:
        return int(self.table.start[row]), int(self.table.end[row])

    def steps_around(self, row: int) -> str:
        """Which batches a gap lies between, or which one it is in; nothing if unknown."""
        found = self.steps_at(self.gpus[int(self.table.lane[row])])
        number = int(self.table.step[row])
        if found is None or number == NO_STEP or number >= len(found[0]):
            return ""
        lengths = found[0].lengths
        if not self.table.between[row]:
            return f"within step {number} ({duration(int(lengths[number]))})"
        first = int(np.searchsorted(found[0].start, int(self.table.start[row]) + found[1]))
        after = f"step {first} ({duration(int(lengths[first]))})"
        if not first:
            return f"before {after}"
        return f"between step {first - 1} ({duration(int(lengths[first - 1]))}) and {after}"

    def chosen_span(self, shown: ShownLane) -> tuple[int, int] | None:
        """From when to when what is selected on a lane lasts."""
        if self.picked is not None:
            own, row = shown.lane.operations, self.picked.row
            if own is None or self.picked.lane is not shown:
                return None
            return int(own.start[row]) - shown.zero, int(own.end[row]) - shown.zero
        if self.selected is None or self.gpus[int(self.table.lane[self.selected])] is not shown:
            return None
        return self.gap_span(self.selected)

    def first_gap(self, trace: int) -> int:
        """Where the gaps of a trace begin in the table."""
        return sum(len(scene.gaps) for scene in self.scenes[:trace] if scene is not None)

    def place_of(self, shown: ShownLane) -> int | None:
        """Which of the lanes that are shown it is."""
        return next((place for place, each in enumerate(self.lanes) if each is shown), None)

    def _shown(self, trace: int, number: int, lane: SceneLane) -> ShownLane:
        scene = self.scenes[trace]
        own = label_of(lane, scene.lanes if scene else ())
        label = f"{_NAMES[trace]} {own}" if len(self.scenes) > 1 else own
        return ShownLane(trace, number, lane, label, self.zero(trace))

    def _gaps_of(self, trace: int) -> GapTable:
        scene = self.scenes[trace]
        if scene is None:
            return join([])
        first = next((n for n, gpu in enumerate(self.gpus) if gpu.trace == trace), 0)
        table, zero = scene.gaps, self.zero(trace)
        lane = table.lane + np.int16(first)
        return replace(table, lane=lane, start=table.start - zero, end=table.end - zero)
