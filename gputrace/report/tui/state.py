"""State of the browser: lanes of one or two traces on one axis, the window, the selection."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.analyzers.timeline_model import (
    NO_STEP,
    GapFilter,
    GapTable,
    Scene,
    SceneLane,
    join,
    next_named,
    order,
)
from gputrace.analyzers.timeline_model.cells import CURVES, NOTHING
from gputrace.model.intervals import Times
from gputrace.model.results import CauseNode
from gputrace.report.wording import needs_ranks
from gputrace.sanitize import clean
from gputrace.units import format_ns, parse_duration

_NAMES: Final = "AB"
"""Names of two traces."""
_NO_ROWS: Final = np.empty(0, np.intp)


@dataclass
class Board:
    """State that the user changes, and what is derived from it.

    Times are integer nanoseconds on the axis unless a trace's clock is named.
    """

    scenes: list[Scene | None]
    """Scenes by trace; None while a trace is being read."""
    shifts: list[int] = field(default_factory=list)
    """Offset of each trace's zero, to align two traces."""
    extra: list[list[SceneLane]] = field(default_factory=list)
    """Lanes of streams and threads to show, by trace."""
    curve: str = ""
    """Curve (of `CURVES`) drawn below each GPU; empty for none."""
    ranks: frozenset[int] | None = None
    """Ranks shown; None for all."""
    gap_filter: GapFilter = field(default_factory=lambda: GapFilter(steady=True))
    sort: str = "length"
    descending: bool = True
    view: Viewport = field(default_factory=lambda: Viewport(0, 1, 0, 1))
    cursor: int = 0
    cursor_lane: int = 0
    """Index into ``lanes``."""
    marks: tuple[int, ...] = ()
    selected: int | None = None
    """Selected row of ``table``."""
    picked: Picked | None = None
    table: GapTable = field(default_factory=lambda: join([]))
    """Gaps of all GPUs of all traces; their lanes are indexes into ``gpus``."""
    rows: NDArray[np.intp] = field(default_factory=lambda: _NO_ROWS)
    """Rows of ``table`` that are listed, in their order."""
    gpus: list[ShownLane] = field(default_factory=list)
    lanes: list[ShownLane] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shifts = self.shifts or [0] * len(self.scenes)
        self.extra = self.extra or [[] for _ in self.scenes]

    def zero(self, trace: int) -> int:
        """Return the time on a trace's clock that is 0 on the axis."""
        scene = self.scenes[trace]
        return (scene.origin if scene else 0) + self.shifts[trace]

    def rebuild(self) -> None:
        """Rebuild lanes and gaps after a scene or a shift has changed."""
        self.gpus = [
            self._shown(trace, number, lane)
            for trace, scene in enumerate(self.scenes)
            if scene is not None
            for number, lane in enumerate(scene.lanes)
        ]
        self.table = join([self._gaps_of(trace) for trace in range(len(self.scenes))])
        ends = [
            at - self.zero(trace)
            for trace, scene in enumerate(self.scenes)
            if scene is not None
            for at in scene.span
        ]
        if ends:
            low, high = min(ends), max(max(ends), min(ends) + 1)
            fresh = self.view.high - self.view.low <= 1
            view = Viewport(low, high, low, high) if fresh else self.view
            self.view = replace(view, low=low, high=high).show(view.start, view.end)
        self.filter_lanes()

    def filter_lanes(self) -> None:
        """Collect the lanes to show, each GPU followed by its parts."""
        parts = [
            self._shown(trace, -1, lane) for trace, lanes in enumerate(self.extra) for lane in lanes
        ]
        self.lanes = []
        for shown in self.gpus:
            lane = shown.lane
            if self.ranks is not None and lane.rank not in self.ranks:
                continue
            self.lanes.append(shown)
            curves = tuple(curve for curve in lane.curves if curve.name == self.curve)
            if curves:
                part = replace(
                    lane, layers=NOTHING, operations=None, part=self.curve, curves=curves
                )
                self.lanes.append(self._shown(shown.trace, -1, part))
            last = not any(
                later.trace == shown.trace and later.lane.rank == lane.rank
                for later in self.gpus[self.gpus.index(shown) + 1 :]
            )
            self.lanes += [part for part in parts if belongs(part, shown, last)]
        self.cursor_lane = min(self.cursor_lane, max(len(self.lanes) - 1, 0))

    def forget(self) -> None:
        """Clear selection and list before the table of gaps is replaced."""
        self.selected = self.picked = None
        self.rows = _NO_ROWS

    def known_curves(self) -> list[str]:
        """Return the curves of which any GPU has samples."""
        there = {curve.name for shown in self.gpus for curve in shown.lane.curves}
        return [name for name in CURVES if name in there]

    def arrange(self, table: GapTable) -> NDArray[np.intp]:
        """Return the rows to list, filtered and sorted; slow for many gaps."""
        return order(table, self._chosen(table), self.sort, descending=self.descending)

    def worst_gap(self) -> int | None:
        """Return the row of the longest gap that passes the filter; None if none does."""
        rows = self._chosen(self.table)
        return int(rows[np.argmax(self.table.length[rows])]) if len(rows) else None

    def begin(self, has_room: bool) -> int | None:
        """Show the whole run, with a curve if there is room for it; return the worst gap of the
        steady steps, else of all; None without gaps.
        """
        if (worst := self.worst_gap()) is None:
            self.gap_filter = GapFilter()
            worst = self.worst_gap()
        self.view = self.view.whole()
        if has_room and (known := self.known_curves()):
            self.curve = known[0]
            self.filter_lanes()
        return worst

    def view_around(self, row: int) -> Viewport:
        """Return the window with a gap, and a step on either side of it."""
        start, end = self.gap_span(row)
        step = self.step_span(start) or (start, end)
        length = max(step[1] - step[0], end - start)
        return self.view.show(start - length // 2, start + 3 * length // 2)

    def _chosen(self, table: GapTable) -> NDArray[np.intp]:
        """Return the rows that pass the filter."""
        chosen = self.gap_filter
        if self.ranks is not None:
            ranks = [n for n, gpu in enumerate(self.gpus) if gpu.lane.rank in self.ranks]
            lanes = ranks if chosen.lanes is None else sorted(set(ranks) & set(chosen.lanes))
            chosen = replace(chosen, lanes=lanes)
        return chosen.rows(table, [(gpu.lane, gpu.zero) for gpu in self.gpus])

    def steps_at(self, shown: ShownLane | None) -> StepWindows | None:
        """Return the steps of a lane's rank, on the axis; None if there are none."""
        trace = shown.trace if shown else 0
        scene, zero = self.scenes[trace], self.zero(trace)
        steps = scene.steps_of(shown.lane.rank if shown else 0) if scene else None
        if steps is None or not len(steps):
            return None
        return replace(steps, start=steps.start - zero, end=steps.end - zero)

    def _step_starts(self, trace: int, rank: int) -> Times | None:
        """Return the starts of the steps of a rank; of another one if the trace lacks it."""
        gpus = [gpu for gpu in self.gpus if gpu.trace == trace]
        same = [gpu for gpu in gpus if gpu.lane.rank == rank]
        steps = self.steps_at((same or gpus)[0]) if gpus else None
        return None if steps is None else steps.start

    def align(self) -> bool:
        """Shift the second trace so that the steps of equal number at the cursor start together.

        The step is the nearest one in the trace and the rank at the cursor. Lanes and gaps are
        rebuilt, and what is selected stays so. Returns false where a trace has no steps.
        """
        at = self.lane_at_cursor
        trace, rank = (at.trace, at.lane.rank) if at is not None else (0, 0)
        first, second = (self._step_starts(each, rank) for each in (0, 1))
        if first is None or second is None:
            return False
        number = int(np.abs((first, second)[trace] - self.cursor).argmin())
        self.cursor = int(first[min(number, len(first) - 1)])
        self.shifts[1] += int(second[min(number, len(second) - 1)]) - self.cursor
        self.rebuild()
        if self.picked is not None:
            known, row = self.picked.lane.lane, self.picked.row
            again = next((shown for shown in self.lanes if shown.lane is known), None)
            self.picked = None if again is None else Picked(again, row)
        return True

    def go_to_step(self, by: int) -> bool:
        """Move the cursor to the next or the previous step; the window keeps its length.

        Returns false where there are no steps.
        """
        steps = self.steps_at(self.lane_at_cursor)
        if steps is None:
            return False
        number = int(np.searchsorted(steps.start, self.cursor, "right" if by > 0 else "left"))
        number = min(max(number - (by < 0), 0), len(steps) - 1)
        self.cursor = int(steps.start[number])
        self.view = self.view.reveal(self.cursor, int(steps.end[number]))
        return True

    def jump(self, text: str) -> None:
        """Move to a time (``28.6s``), by a duration (``+5ms``), or to a step (``#17``).

        Raises ValueError for other input and for what lies outside of the trace.
        """
        if text.startswith("#"):
            steps = self.steps_at(self.lane_at_cursor)
            if steps is None or not text[1:].isdecimal() or int(text[1:]) >= len(steps):
                raise ValueError(f"{text} is not a step of this trace")
            number = int(text[1:])
            self.cursor = int(steps.start[number])
            self.view = self.view.fit(self.cursor, int(steps.end[number]))
            return
        relative = text[:1] in "+-"
        moment = parse_duration(text.removeprefix("+")) + (self.cursor if relative else 0)
        if not self.view.low <= moment <= self.view.high:
            raise ValueError(f"{text} is outside of the trace")
        self.cursor = moment
        self.view = self.view.center(moment)

    def search(self, text: str) -> dict[int, NDArray[np.int64]]:
        """Return the ids of the names in which a regular expression is found, by trace.

        Raises ValueError for an invalid one, and where no name matches.
        """
        try:
            pattern = re.compile(text, re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        matches = {
            trace: np.array(
                [id for id, name in scene.names.items() if pattern.search(name)], np.int64
            )
            for trace, scene in enumerate(self.scenes)
            if scene is not None
        }
        if not text or not any(map(len, matches.values())):
            raise ValueError(f"no operation's name contains {text!r}")
        return matches

    def next_match(
        self, matches: Mapping[int, NDArray[np.int64]], *, forward: bool
    ) -> Picked | None:
        """Return the nearest operation after or before the cursor, on any lane of a whole GPU.

        ``matches`` has the ids of the names looked for, by trace.
        """
        hits = []
        for shown in self.lanes:
            if shown.number >= 0 and shown.trace in matches:
                ids, moment = matches[shown.trace], self.cursor + shown.zero
                row = next_named(shown.lane, ids, moment, forward=forward)
                hits += [] if row is None else [Picked(shown, row)]
        return min(hits, key=lambda picked: abs(picked.span[0] - self.cursor), default=None)

    def pick(self, picked: Picked) -> None:
        """Select an operation and bring it into view."""
        start, end = picked.span
        self.picked = picked
        self.cursor = start
        self.view = self.view.reveal(start, end)
        index = self.index_of(picked.lane)
        self.cursor_lane = self.cursor_lane if index is None else index

    def step_span(self, moment: int) -> tuple[int, int] | None:
        """Return the span of the step at a time, or the next one, on the lane with the cursor."""
        steps = self.steps_at(self.lane_at_cursor)
        if steps is None:
            return None
        number = min(int(np.searchsorted(steps.end, moment, "right")), len(steps) - 1)
        return int(steps.start[number]), int(steps.end[number])

    @property
    def causes(self) -> list[CauseNode]:
        """Causes of the ledger that the traces know, the general ones first."""
        known = [scene.analysis.causes for scene in self.scenes if scene and scene.analysis]
        return list(dict.fromkeys(node for causes in known for node in causes))

    @property
    def lane_at_cursor(self) -> ShownLane | None:
        return self.lanes[self.cursor_lane] if self.lanes else None

    def gap_span(self, row: int) -> tuple[int, int]:
        return int(self.table.start[row]), int(self.table.end[row])

    def steps_around(self, row: int) -> str:
        """Describe the steps around a gap, or the one that contains it; empty if unknown."""
        steps = self.steps_at(self.gpus[int(self.table.lane[row])])
        number = int(self.table.step[row])
        if steps is None or number == NO_STEP or number >= len(steps):
            return ""

        def named(number: int) -> str:
            return f"step {number} ({format_ns(int(steps.lengths[number]))})"

        if not self.table.between[row]:
            return f"within {named(number)}"
        first = int(np.searchsorted(steps.start, int(self.table.start[row])))
        return f"between {named(first - 1)} and {named(first)}" if first else f"before {named(0)}"

    def chosen_span(self, shown: ShownLane) -> tuple[int, int] | None:
        """Return the span of the selection on a lane; None if nothing on it is selected."""
        if self.picked is not None:
            return self.picked.span if self.picked.lane is shown else None
        if self.selected is None or self.gpus[int(self.table.lane[self.selected])] is not shown:
            return None
        return self.gap_span(self.selected)

    def index_of(self, shown: ShownLane) -> int | None:
        """Return the index of a lane in ``lanes``; None if it is not shown."""
        return next((index for index, each in enumerate(self.lanes) if each is shown), None)

    def _shown(self, trace: int, number: int, lane: SceneLane) -> ShownLane:
        scene = self.scenes[trace]
        if lane.part:
            known = CURVE_LOOKS.get(lane.part)
            label = f" {clean(known.label if known else lane.part, 24)}"
        elif lane.gpu is None:
            label = f"rank {lane.rank}"
        else:
            # With the rank where the numbers of ranks and GPUs differ.
            rank = f" r{lane.rank}" if needs_ranks(scene.lanes if scene else ()) else ""
            label = f"{'gpu' if lane.gpu_known else 'dev'} {lane.gpu}{rank}"
        if len(self.scenes) > 1:
            label = f"{_NAMES[trace]} {label}"
        return ShownLane(trace, number, lane, label, self.zero(trace))

    def _gaps_of(self, trace: int) -> GapTable:
        scene = self.scenes[trace]
        if scene is None:
            return join([])
        first = next((n for n, gpu in enumerate(self.gpus) if gpu.trace == trace), 0)
        table, zero = scene.gaps, self.zero(trace)
        lane = table.lane + np.int16(first)
        return replace(table, lane=lane, start=table.start - zero, end=table.end - zero)


class CurveLook(NamedTuple):
    """Name and unit of a curve."""

    label: str
    short: str
    scale: float
    """Number by which values are divided."""
    unit: str


CURVE_LOOKS: Final = {
    "utilization": CurveLook("use", "use", 1, "%"),
    "power": CurveLook("power", "power", 1e3, "W"),
    "smClock": CurveLook("SM clock", "clock", 1, "MHz"),
    "memoryUsed": CurveLook("memory", "memory", 1 << 30, "GiB"),
    "temperature": CurveLook("heat", "heat", 1, "°C"),
}
"""Looks of the curves, by name."""


@dataclass(frozen=True, eq=False)
class ShownLane:
    """Lane on the axis."""

    trace: int
    """Index of its trace."""
    number: int
    """Index among the GPUs of its trace; -1 for a part of a GPU."""
    lane: SceneLane
    label: str
    zero: int
    """Time on its trace's clock that is 0 on the axis."""


@dataclass(frozen=True, slots=True)
class Picked:
    """Operation that the user picked."""

    lane: ShownLane
    row: int

    @property
    def operations(self) -> GpuOperations:
        """Operations of its lane."""
        assert self.lane.lane.operations is not None
        return self.lane.lane.operations

    @property
    def span(self) -> tuple[int, int]:
        """Start and end on the axis."""
        start, end = (int(at[self.row]) for at in (self.operations.start, self.operations.end))
        return start - self.lane.zero, end - self.lane.zero


def belongs(part: ShownLane, gpu: ShownLane, last: bool) -> bool:
    """Return true if a part is shown below a GPU; threads are, below the last GPU of their rank."""
    same_rank = (part.trace, part.lane.rank) == (gpu.trace, gpu.lane.rank)
    is_thread = part.lane.operations is None
    return same_rank and (last if is_thread else part.lane.gpu == gpu.lane.gpu)


MARGIN: Final = 0.02
"""Margin on either side of a fitted span, as a fraction of its length."""


@dataclass(frozen=True)
class Viewport:
    """Window on the axis, always within its bounds and no shorter than ``shortest``."""

    start: int
    end: int
    low: int
    high: int
    shortest: int = 100

    @property
    def length(self) -> int:
        return self.end - self.start

    def show(self, start: int, end: int) -> Viewport:
        """Return the valid window nearest to the requested one."""
        whole = max(self.high - self.low, 1)
        length = min(max(end - start, min(self.shortest, whole)), whole)
        start += (end - start - length) // 2
        start = min(max(start, self.low), self.low + whole - length)
        return replace(self, start=start, end=start + length)

    def fit(self, start: int, end: int) -> Viewport:
        """Return the window that shows a span, with a margin on both sides."""
        margin = round((end - start) * MARGIN)
        return self.show(start - margin, end + margin)

    def whole(self) -> Viewport:
        return self.show(self.low, self.high)

    def zoom(self, factor: float, anchor: int | None = None) -> Viewport:
        """Scale the window's length; the anchor keeps its position on the screen."""
        if anchor is None or not self.start <= anchor <= self.end:
            anchor = (self.start + self.end) // 2
        length = max(round(self.length * factor), 1)
        length = min(max(length, self.shortest), max(self.high - self.low, 1))
        before = round((anchor - self.start) * length / self.length)
        return self.show(anchor - before, anchor - before + length)

    def pan(self, part: float) -> Viewport:
        """Move to the right by a fraction of the length; to the left if negative."""
        by = round(self.length * part) or (1 if part > 0 else -1)
        return self.show(self.start + by, self.end + by)

    def center(self, moment: int) -> Viewport:
        start = moment - self.length // 2
        return self.show(start, start + self.length)

    def reveal(self, start: int, end: int) -> Viewport:
        """Bring a span into view; the window gets longer only if necessary."""
        if start >= self.start and end <= self.end:
            return self
        if end - start > self.length * (1 - 2 * MARGIN):
            return self.fit(start, end)
        return self.center((start + end) // 2)

    def cell_of(self, moment: int, cells: int) -> int:
        """Return the cell that contains a time; outside of 0 to ``cells`` if out of view."""
        return (moment - self.start) * cells // max(self.length, 1)

    def moment_of(self, cell: int, cells: int) -> int:
        """Return the start of a cell."""
        return self.start + self.length * cell // max(cells, 1)
