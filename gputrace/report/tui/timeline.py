"""Widgets of the lanes and of the time axis, drawn line by line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from gputrace.analyzers.timeline_model import Scene
from gputrace.analyzers.timeline_model.cells import CURVES, edges_of, stack
from gputrace.report.palette import Palette
from gputrace.report.tables import moment
from gputrace.report.tui.drawing import (
    Row,
    bar_rows,
    curve_value,
    draw_bars,
    gap_words,
    operation_words,
)
from gputrace.report.tui.state import Board, ShownLane, Viewport
from gputrace.units import format_ns, format_share

TALLEST: Final = 4
"""Maximum rows of a lane; with three or more, the last one is left blank."""
_SHARE: Final = 8
"""Columns on the right for a lane's busy share."""
_WIDEST_LABEL: Final = 22
_ZOOM: Final = 1.25


class Timeline(ScrollView, can_focus=False):
    """Lanes of a board in its window."""

    DEFAULT_CSS: ClassVar[str] = "Timeline { scrollbar-size-horizontal: 0; }"

    @dataclass
    class Clicked(Message):
        """Click on a lane."""

        lane: int
        moment: int

    @dataclass
    class Moved(Message):
        """Wheel or drag that changes the window."""

        zoom: float = 1.0
        anchor: int | None = None
        pan: float = 0.0

    def __init__(self, board: Board, palette: Palette) -> None:
        super().__init__(id="timeline")
        self.board, self.palette = board, palette
        self._rows: dict[int, tuple[object, list[Row]]] = {}
        self._dragged: tuple[int, bool] | None = None
        self.gutter_width = 2
        """Columns of the lanes' labels."""
        self.most_rows = TALLEST
        """Maximum rows of all lanes together; further ones are scrolled to."""
        self.lane_height = 1
        """Rows of a lane, as many as fit."""
        self.room = 80
        """Columns available beside the scroll bar."""

    @property
    def cells(self) -> int:
        """Number of cells of a lane."""
        return max(self.room - self.gutter_width - _SHARE, 10)

    @property
    def bar_height(self) -> int:
        """Number of rows of a lane that are drawn on."""
        return self.lane_height - (self.lane_height > 2)

    def show_board(self) -> None:
        """Redraw what has changed."""
        height = len(self.board.lanes) * self.lane_height
        widest = max((len(shown.label) for shown in self.board.lanes), default=5)
        self.gutter_width = min(widest, _WIDEST_LABEL) + 2
        lanes = max(len(self.board.lanes), 1)
        self.lane_height = max(1, min(TALLEST, self.most_rows // lanes))
        self.styles.height = min(lanes * self.lane_height, self.most_rows)
        self.virtual_size = Size(self.size.width - self.scrollbar_size_vertical, height)
        self.room = self.scrollable_content_region.width
        self.refresh()

    def reveal_cursor(self) -> None:
        """Scroll to the lane with the cursor."""
        top = self.board.cursor_lane * self.lane_height
        if top < self.scroll_offset.y:
            self.scroll_to(y=top, animate=False)
        elif top + self.lane_height > self.scroll_offset.y + self.size.height:
            self.scroll_to(y=top + self.lane_height - self.size.height, animate=False)

    def on_resize(self) -> None:
        self.show_board()

    def render_line(self, y: int) -> Strip:
        """Render one line of a lane: its label, its cells, its busy share."""
        index, line = divmod(y + self.scroll_offset.y, self.lane_height)
        width = self.room
        if index >= len(self.board.lanes):
            return Strip.blank(width, self.rich_style)
        shown = self.board.lanes[index]
        rows, share = self._drawn(shown, index)
        current = index == self.board.cursor_lane
        style = Style(bold=current)
        name = shown.label[: self.gutter_width - 2] if line == 0 else ""
        pointer = "▸" if current and line == 0 else " "
        gutter = Segment(f"{pointer}{name:<{self.gutter_width - 2}} ", style)
        busy = f"{share:>{_SHARE - 1}} " if line == 0 else " " * _SHARE
        cells = rows[line].segments() if line < len(rows) else [Segment(" " * self.cells)]
        strip = Strip([gutter, *cells, Segment(busy)]).adjust_cell_length(width)
        return strip.apply_style(self.rich_style)

    def _drawn(self, shown: ShownLane, index: int) -> tuple[list[Row], str]:
        """Return the cached rows of a lane, and its busy share."""
        board = self.board
        cursor = board.cursor if index == board.cursor_lane else None
        shape = (self.cells, self.bar_height, self.palette)
        key = (shown, board.view, shape, cursor, board.chosen_span(shown))
        known = self._rows.get(index)
        if known is None or known[0] != key:
            rows = self._draw(shown, index)
            known = self._rows[index] = (key, rows)
        return known[1], self._busy(shown)

    def _busy(self, shown: ShownLane) -> str:
        """Format the share of the window in which a GPU is busy, or the mean of a curve."""
        view, layers = self.board.view, shown.lane.layers
        if shown.lane.part in CURVES:
            return curve_value(shown.lane.curves[0], shown.zero, view)
        if shown.lane.operations is None:
            return ""
        shares = layers.split(edges_of(view.start + shown.zero, view.end + shown.zero, 1))[0]
        return format_share(float(shares[:5].sum()), view.length)

    def _draw(self, shown: ShownLane, index: int) -> list[Row]:
        board, view, cells = self.board, self.board.view, self.cells
        rows = draw_bars(shown, view, cells, self.bar_height, self.palette)
        middle = rows[self.bar_height // 2]
        scene = board.scenes[shown.trace]
        words = list(operation_words(shown, scene.names if scene else {}, view, cells))
        if shown.number >= 0:
            words += gap_words(board.gpus.index(shown), board.table, view, cells)
        for each in words:
            middle.write(each.first, each.text, self.palette.text(each.ground))
        self._overlay(shown, index, rows)
        return rows

    def _overlay(self, shown: ShownLane, index: int, rows: list[Row]) -> None:
        """Mark the selection, and the cursor on its lane."""
        board, view, cells = self.board, self.board.view, self.cells
        chosen = board.chosen_span(shown)
        if chosen is not None:
            first, last = (view.cell_of(moment, cells) for moment in chosen)
            for row in rows:
                row.restyle(first, max(last, first + 1), Style(underline=True))
        if index == board.cursor_lane:
            at = view.cell_of(board.cursor, cells)
            for row in rows:
                row.restyle(at, at + 1, Style(reverse=True))

    def _moment(self, x: int) -> int:
        return self.board.view.moment_of(x - self.gutter_width, self.cells)

    def _wheel(self, event: events.MouseEvent, direction: int) -> None:
        event.stop()
        event.prevent_default()
        if event.shift:
            self.post_message(self.Moved(pan=0.1 * direction))
        elif event.ctrl:
            self.scroll_relative(y=direction, animate=False)
        else:
            factor = _ZOOM if direction > 0 else 1 / _ZOOM
            self.post_message(self.Moved(factor, self._moment(event.x)))

    def _on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, 1)

    def _on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, -1)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._dragged = (event.x, False)
        self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._dragged is None or event.x == self._dragged[0]:
            return
        by = (self._dragged[0] - event.x) / self.cells
        self._dragged = (event.x, True)
        self.post_message(self.Moved(pan=by))

    def on_mouse_up(self, event: events.MouseUp) -> None:
        dragged, self._dragged = self._dragged, None
        self.release_mouse()
        index = (event.y + self.scroll_offset.y) // self.lane_height
        inside = 0 <= event.x - self.gutter_width < self.cells
        if dragged is not None and not dragged[1] and inside and index < len(self.board.lanes):
            self.post_message(self.Clicked(index, self._moment(event.x)))


_ROOM: Final = 14
"""Minimum cells between two labelled ticks."""
_OUTSIDE: Final = Style(dim=True)
_SHOWN: Final = Style(underline=True, bold=True)


class Ruler(Widget, can_focus=False):
    """Three lines above the lanes and aligned with them: overview, time axis, steps."""

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
        """Draw all GPUs together over the whole run, the window underlined."""
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
            shares = shown.lane.layers.split(
                edges_of(view.start + shown.zero, view.end + shown.zero, cells)
            )
            total[:, : shares.shape[1]] += shares
        lengths = np.maximum(np.diff(edges_of(view.start, view.end, cells)), 1) * len(gpus)
        return bar_rows(stack(total, lengths), (*classes, ""), self.palette)[0]

    def _moments(self) -> Row:
        """Draw ticks at round times, over them the selected gap, the cursor and marks."""
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
            text = f" {format_ns(abs(marks[1] - marks[0]))} "
            if last - first > len(text) + 2:
                row.write((first + last - len(text)) // 2, text, style)
        for cell, letter in zip(places, "ab", strict=False):
            row.write(cell, letter, style)

    def _steps(self) -> Row:
        """Draw the start of each step with its number; warm-up is dim."""
        board, view, row = self.board, self.board.view, self._blank()
        at_cursor, cells = board.steps_at(board.lane_at_cursor), self._timeline.cells
        if at_cursor is None:
            row.write(0, "no steps found" if board.analysis() else "", Style(dim=True))
            return row
        steps, zero = at_cursor
        first = int(np.searchsorted(steps.end, view.start + zero, "right"))
        last = int(np.searchsorted(steps.start, view.end + zero))
        scene = board.scenes[board.lane_at_cursor.trace if board.lane_at_cursor else 0]
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
        texts = (f"├ {word}{number}, {format_ns(end - start)} ", f"├ {number} ", f"├{number}")
        return next((text for text in texts if len(text) <= room), "│")

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
    """Return the smallest of 1, 2, 5, 10, 20… that is at least ``least``."""
    scale = 1
    while True:
        for factor in (1, 2, 5):
            if scale * factor >= least:
                return scale * factor
        scale *= 10
