"""The time axis: the whole run with the window in it, moments, and the steps."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from gputrace.analyzers.scene.cells import Layers, edges_of, stack
from gputrace.analyzers.scene.scene import Scene
from gputrace.views.browse.board import Board
from gputrace.views.browse.drawing import Row, bar_rows
from gputrace.views.browse.timeline import Timeline
from gputrace.views.browse.viewport import Viewport
from gputrace.views.palette import Palette
from gputrace.views.words import duration, moment

_ROOM: Final = 14
"""Cells between two moments that are written."""
_OUTSIDE: Final = Style(dim=True)
_SHOWN: Final = Style(underline=True, bold=True)


class Ruler(Widget, can_focus=False):
    """Three lines above the lanes, aligned with them."""

    DEFAULT_CSS: ClassVar[str] = "Ruler { height: 3; }"

    def __init__(self, board: Board, palette: Palette, timeline: Timeline) -> None:
        super().__init__(id="ruler")
        self.board, self.palette, self._timeline = board, palette, timeline
        self._whole: tuple[object, Row] | None = None

    def render_line(self, y: int) -> Strip:
        lead = self._timeline.gutter_width
        titles = ("run", "time", "steps")
        row = (self._overview, self._moments, self._steps)[y]()
        line = Row([*f"  {titles[y]:<{lead - 2}}"[:lead]], [Style(dim=True)] * lead).segments()
        strip = Strip([*line, *row.segments()]).adjust_cell_length(self.size.width)
        return strip.apply_style(self.rich_style)

    def _blank(self) -> Row:
        cells = self._timeline.cells
        return Row([" "] * cells, [Style()] * cells)

    def _overview(self) -> Row:
        """All GPUs together over the whole run; where the window is, it is underlined."""
        board, cells = self.board, self._timeline.cells
        key = (tuple(map(id, board.lanes)), board.view.low, board.view.high, cells, self.palette)
        if self._whole is None or self._whole[0] != key:
            self._whole = key, self._draw_whole(cells)
        known = self._whole[1]
        row = Row(list(known.letters), list(known.styles))
        whole = board.view.whole()
        first, last = (whole.cell_of(at, cells) for at in (board.view.start, board.view.end))
        last = max(last, first + 1)
        if board.view.length < whole.length:
            row.restyle(0, first, _OUTSIDE)
            row.restyle(last, cells, _OUTSIDE)
            row.restyle(first, last, _SHOWN)
            row.write(first - 1, "▐", Style())
            row.write(last, "▌", Style())
        return row

    def _draw_whole(self, cells: int) -> Row:
        view, row = self.board.view.whole(), self._blank()
        gpus = [shown for shown in self.board.lanes if shown.number >= 0]
        if not gpus:
            return row
        classes = max((shown.lane.layers.classes for shown in gpus), key=len)
        total = np.zeros((cells, len(classes)), np.int64)
        for shown in gpus:
            layers: Layers = shown.lane.layers
            shares = layers.split(edges_of(view.start + shown.zero, view.end + shown.zero, cells))
            total[:, : shares.shape[1]] += shares
        lengths = np.maximum(np.diff(edges_of(view.start, view.end, cells)), 1) * len(gpus)
        return bar_rows(stack(total, lengths), (*classes, ""), self.palette)[0]

    def _moments(self) -> Row:
        """Round moments, and above them marks, the cursor and the gap that is selected."""
        board, view, row = self.board, self.board.view, self._blank()
        cells = self._timeline.cells
        step = round_step(view.length * _ROOM // max(cells, 1))
        for at in range(-(-view.start // step) * step, view.end, step):
            cell = view.cell_of(at, cells)
            row.write(cell, f"│{moment(at, step)}", Style(dim=True))
        if board.selected is not None:
            start, end = board.gap_span(board.selected)
            first, last = view.cell_of(start, cells), view.cell_of(end, cells)
            row.restyle(first, max(last, first + 1), Style(reverse=True, dim=False))
        cursor = view.cell_of(board.cursor, cells)
        if 0 <= cursor < cells and row.letters[cursor] in " │":
            row.write(cursor, "▼", Style(bold=True))
        self._write_marks(row, view, cells)
        return row

    def _write_marks(self, row: Row, view: Viewport, cells: int) -> None:
        marks = self.board.marks
        style = Style(bold=True, reverse=True)
        places = [view.cell_of(mark, cells) for mark in marks]
        if len(marks) == 2:
            first, last = sorted(places)
            row.write(first, "─" * min(last - first, cells), Style(bold=True))
            told = f" {duration(abs(marks[1] - marks[0]))} "
            if last - first > len(told) + 2:
                row.write((first + last - len(told)) // 2, told, style)
        for place, letter in zip(places, "ab", strict=False):
            row.write(place, letter, style)

    def _steps(self) -> Row:
        """Where each step begins, with its number; warm-up is dim."""
        board, view, row = self.board, self.board.view, self._blank()
        found, cells = board.steps_at(board.lane_at_cursor), self._timeline.cells
        if found is None:
            row.write(0, self._no_steps(), Style(dim=True))
            return row
        steps, zero = found
        first = int(np.searchsorted(steps.end, view.start + zero, "right"))
        last = int(np.searchsorted(steps.start, view.end + zero))
        trace = board.lane_at_cursor.trace if board.lane_at_cursor else 0
        scene = board.scenes[trace]
        free = 0
        for number in range(first, last):
            start, end = int(steps.start[number]) - zero, int(steps.end[number]) - zero
            cell = max(view.cell_of(start, cells), 0)
            style = Style(dim=True) if scene and number < scene.found.warmup else Style()
            row.write(min(view.cell_of(end, cells), cells), "│", Style(dim=True))
            text = self._step_text(number, start, end, scene, cells)
            if cell >= free:
                row.write(cell, text, style)
                free = cell + len(text) + (len(text) > 1)
        self._write_interludes(row, scene, view, cells, zero)
        return row

    def _step_text(self, number: int, start: int, end: int, scene: Scene | None, cells: int) -> str:
        view = self.board.view
        room = min(view.cell_of(end, cells), cells) - max(view.cell_of(start, cells), 0)
        word = "warm-up " if scene and number < scene.found.warmup else "step "
        texts = (f"├ {word}{number}, {duration(end - start)} ", f"├ {number} ", f"├{number}")
        return next((text for text in texts if len(text) <= room), "│")

    def _no_steps(self) -> str:
        analysis = self.board.analysis()
        return "" if analysis is None else "no steps found"

    def _write_interludes(
        self, row: Row, scene: Scene | None, view: Viewport, cells: int, zero: int
    ) -> None:
        lane = self.board.lane_at_cursor
        steps = scene.steps_of(lane.lane.rank) if scene and lane else None
        for interlude in steps.interludes if steps else ():
            first, last = (
                view.cell_of(at - zero, cells) for at in (interlude.start, interlude.end)
            )
            if last - first > len(interlude.phase):
                row.write(max(first, 0), f"{interlude.phase} ", Style(italic=True, reverse=True))


def round_step(least: int) -> int:
    """The smallest of 1, 2, 5, 10, 20… that is no less."""
    scale = 1
    while True:
        for factor in (1, 2, 5):
            if scale * factor >= least:
                return scale * factor
        scale *= 10
