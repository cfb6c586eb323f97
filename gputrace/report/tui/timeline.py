"""Lanes and time axis of the browser, drawn line by line as rows of characters.

A lane has bars of the exact classes, with labels where they fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
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

from gputrace.analyzers.timeline_model import GapTable
from gputrace.analyzers.timeline_model.cells import CURVES, EIGHTHS, Bars, edges_of, stack
from gputrace.analyzers.timeline_model.gaps import operation_name
from gputrace.model.events import Kind
from gputrace.model.intervals import Times
from gputrace.model.time_class import IDLE_CAUSES
from gputrace.report.palette import LEVELS, LOOKS, Palette
from gputrace.report.tui.state import CURVE_LOOKS, Board, ShownLane, Viewport
from gputrace.report.wording import label, moment
from gputrace.sanitize import cut
from gputrace.units import format_ns, format_share

_CURVE: Final = Style(color="#9aa5b8")
_SHORTEST_WORD: Final = 6
"""Minimum width in cells of a labelled gap or operation."""
_MOST_ROWS: Final = 200_000
"""Maximum operations in view with labels; with more, hardly one is wide enough for a label."""
_Words = tuple[int, str, str]
"""Label on a lane: its first cell, its text, and the class that colours its background."""


def _edges(shown: ShownLane, view: Viewport, cells: int) -> Times:
    """Return the edges of the cells of a window, on the clock of a lane's trace."""
    return edges_of(view.start + shown.zero, view.end + shown.zero, cells)


class Row:
    """Line of characters, each with a style."""

    def __init__(self, letters: list[str], styles: list[Style]) -> None:
        self.letters, self.styles = letters, styles

    def write(self, first: int, text: str, style: Style) -> None:
        """Overwrite characters with text, clipped at the ends of the row."""
        for cell, letter in enumerate(text, first):
            if 0 <= cell < len(self.letters):
                self.letters[cell], self.styles[cell] = letter, style

    def restyle(self, first: int, last: int, style: Style) -> None:
        """Combine a style with those of some cells."""
        for cell in range(max(first, 0), min(last, len(self.styles))):
            self.styles[cell] = self.styles[cell] + style

    def segments(self) -> list[Segment]:
        """Return the row as segments, one per run of equal style."""
        cell, segments = 0, []
        for _, run in groupby(self.styles, key=id):
            count = sum(1 for _ in run)
            text = "".join(self.letters[cell : cell + count])
            segments.append(Segment(text, self.styles[cell]))
            cell += count
        return segments


def bar_rows(bars: Bars, names: Sequence[str], palette: Palette, each: int = 1) -> list[Row]:
    """Draw bars of classes as rows, a bar ``each`` cells wide.

    Without colours, a cell has the letter of the class with most time.
    """
    lists = (part.repeat(each, axis=-1).tolist() for part in (bars.lower, bars.upper, bars.level))
    rows = [list(zip(*row, strict=True)) for row in zip(*lists, strict=True)]
    if palette.colors:
        styles = palette.bars(tuple(names))
        return [
            Row([LEVELS[level] for _, _, level in row], [styles[low][up] for low, up, _ in row])
            for row in rows
        ]
    letters, plain = [palette.look(name).letter for name in names], Style()
    half = EIGHTHS // 2
    return [
        Row([letters[low if level >= half else up] for low, up, level in row], [plain] * len(row))
        for row in rows
    ]


def class_words(name: str) -> str:
    """Return a class of time in words, without ``idle:``."""
    special = {"other_idle": "unexplained", "h2d": "host to device", "other_copy": "other copies"}
    return special.get(name, name).replace("_", " ")


def _gap_words(number: int, table: GapTable, view: Viewport, width: int) -> Iterator[_Words]:
    """Yield labels, cause and length, of the gaps of a lane that are wide enough."""
    first, last = table.of_lane(number)
    begin = first + int(np.searchsorted(table.end[first:last], view.start, "right"))
    stop = first + int(np.searchsorted(table.start[first:last], view.end))
    least = view.length * _SHORTEST_WORD // max(width, 1)
    long = table.end[begin:stop] - table.start[begin:stop] >= least
    for row in (np.flatnonzero(long) + begin).tolist():
        start, end = int(table.start[row]), int(table.end[row])
        cause, length = IDLE_CAUSES[int(table.cause[row])], format_ns(end - start)
        full = f"{class_words(cause)} {length}"
        brief = f"{LOOKS[cause].short} {length}"
        yield from _fitted(start, end, (full, brief, LOOKS[cause].short), cause, view, width)


def _operation_words(
    shown: ShownLane, names: Mapping[int, str], view: Viewport, width: int
) -> Iterator[_Words]:
    """Yield labels of the operations of a lane that are wide enough."""
    operations = shown.lane.operations
    if operations is None:
        return
    begin = int(np.searchsorted(operations.reach, view.start + shown.zero, "right"))
    stop = int(np.searchsorted(operations.start, view.end + shown.zero))
    if stop - begin > _MOST_ROWS:
        return
    length = operations.end[begin:stop] - operations.start[begin:stop]
    rows = np.flatnonzero(length >= view.length * _SHORTEST_WORD // max(width, 1)) + begin
    # Classes that take precedence in the partition are written last, over the others.
    for row in rows[np.argsort(-operations.classes[rows], kind="stable")].tolist():
        id, kind = int(operations.events.name[row]), Kind(int(operations.events.kind[row]))
        name = label(operation_name(names, id, kind))
        start, end = int(operations.start[row]) - shown.zero, int(operations.end[row]) - shown.zero
        ground = shown.lane.layers.classes[int(operations.classes[row])]
        yield from _fitted(start, end, (name,), ground, view, width)


def _fitted(
    start: int, end: int, texts: Sequence[str], ground: str, view: Viewport, width: int
) -> Iterator[_Words]:
    """Yield the first text that fits between two times, else the last one, cut."""
    first = max(view.cell_of(start, width) + 1, 0)
    last = min(view.cell_of(end, width), width)
    room = last - first
    text = next((text for text in texts if len(text) <= room), texts[-1])
    if room < _SHORTEST_WORD - 2 or not text:
        return
    yield first, cut(text, room), ground


TALLEST: Final = 4
"""Maximum rows of a lane; with three or more, the last one is left blank."""
_SHARE: Final = 8
"""Columns on the right for a lane's busy share."""
_WIDEST_LABEL: Final = 22
_ZOOM: Final = 1.25


class Timeline(ScrollView, can_focus=False):
    """Lanes of a board in its window."""

    DEFAULT_CSS: ClassVar[str] = "Timeline { scrollbar-size: 0 1; scrollbar-gutter: stable; }"

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

    class Resized(Message):
        """Change of the room for lanes."""

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
        self.show_board()
        top = self.board.cursor_lane * self.lane_height
        lowest = max(top + self.lane_height - self.size.height, 0)
        y = min(max(self.scroll_offset.y, lowest), top)
        self.scroll_to(y=y, animate=False)

    def on_resize(self) -> None:
        self.post_message(self.Resized())

    def watch_show_vertical_scrollbar(self) -> None:
        """Redraw beside the scroll bar, which only now can be moved."""
        self.post_message(self.Resized())

    def render_line(self, y: int) -> Strip:
        """Render one line of a lane: its label, its cells, its busy share."""
        index, line = divmod(y + self.scroll_offset.y, self.lane_height)
        width = self.room
        if index >= len(self.board.lanes):
            return Strip.blank(width, self.rich_style)
        shown = self.board.lanes[index]
        # The cached rows of a lane.
        board = self.board
        cursor = board.cursor if index == board.cursor_lane else None
        shape = (self.cells, self.bar_height, self.palette)
        key = (shown, board.view, shape, cursor, board.chosen_span(shown))
        if index not in self._rows or self._rows[index][0] != key:
            self._rows[index] = (key, self._draw(shown, index))
        rows = self._rows[index][1]
        current = index == self.board.cursor_lane
        style = Style(bold=current)
        name = shown.label[: self.gutter_width - 2] if line == 0 else ""
        pointer = "▸" if current and line == 0 else " "
        gutter = Segment(f"{pointer}{name:<{self.gutter_width - 2}} ", style)
        busy = f"{self._busy(shown):>{_SHARE - 1}} " if line == 0 else " " * _SHARE
        cells = rows[line].segments() if line < len(rows) else [Segment(" " * self.cells)]
        strip = Strip([gutter, *cells, Segment(busy)]).adjust_cell_length(width)
        return strip.apply_style(self.rich_style)

    def _busy(self, shown: ShownLane) -> str:
        """Format the share of the window in which a GPU is busy, or the mean of a curve."""
        view, lane = self.board.view, shown.lane
        if lane.part in CURVES:
            curve = lane.curves[0]
            mean, look = float(curve.means(_edges(shown, view, 1))[0]), CURVE_LOOKS[curve.name]
            return "" if np.isnan(mean) else f"{mean / look.scale:.0f}{look.unit}"
        if lane.operations is None:
            return ""
        shares = lane.layers.split(_edges(shown, view, 1))[0]
        return format_share(float(shares[:5].sum()), view.length)

    def _draw(self, shown: ShownLane, index: int) -> list[Row]:
        board, view, cells = self.board, self.board.view, self.cells
        # Draw a lane as rows, the top one first; a curve is filled up to its mean in each cell.
        edges = _edges(shown, self.board.view, self.cells)
        lane, height = shown.lane, self.bar_height
        if lane.part not in CURVES:
            bars = stack(lane.layers.split(edges), np.maximum(np.diff(edges), 1), height)
            rows = bar_rows(bars, (*lane.layers.classes, ""), self.palette)
        else:
            curve = lane.curves[0]
            filled = np.nan_to_num(np.clip(curve.means(edges) / curve.top, 0, 1)) * height * EIGHTHS
            levels = [
                np.clip(np.rint(filled - row * EIGHTHS), 0, EIGHTHS).astype(int).tolist()
                for row in range(height - 1, -1, -1)
            ]
            rows = [Row([LEVELS[level] for level in row], [_CURVE] * len(row)) for row in levels]
        scene = board.scenes[shown.trace]
        words = list(_operation_words(shown, scene.names if scene else {}, view, cells))
        if shown.number >= 0:
            # Before the lane's first moment, and after its last.
            window, zero = lane.window, shown.zero
            for start, end in ((view.start, window.start - zero), (window.end - zero, view.end)):
                if start < end:
                    texts = ("nothing recorded", "nothing")
                    words += _fitted(start, end, texts, "", view, cells)
            words += _gap_words(board.gpus.index(shown), board.table, view, cells)
        for cell, text, ground in words:
            rows[self.bar_height // 2].write(cell, text, self.palette.text(ground))
        if (chosen := board.chosen_span(shown)) is not None:
            first, last = (view.cell_of(moment, cells) for moment in chosen)
            for row in rows:
                row.restyle(first, max(last, first + 1), Style(underline=True))
        if index == board.cursor_lane:
            at = view.cell_of(board.cursor, cells)
            for row in rows:
                row.restyle(at, at + 1, Style(reverse=True))
        return rows

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


_LONGEST_TITLE: Final = 5
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
        title = f"{'  ' if lead > _LONGEST_TITLE + 2 else ' '}{titles[y]}"
        line = Row([*f"{title:<{lead}}"], [Style(dim=True)] * lead).segments()
        is_last = y == len(titles) - 1 and any(shown.number >= 0 for shown in self.board.lanes)
        busy = Segment(f"{'busy' if is_last else '':>{_SHARE - 1}} ", Style(dim=True))
        strip = Strip([*line, *row.segments(), busy]).adjust_cell_length(self.size.width)
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
            shares = shown.lane.layers.split(_edges(shown, view, cells))
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
        marks, view, cells = self.board.marks, self.board.view, self._timeline.cells
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
        return row

    def _steps(self) -> Row:
        """Draw the start of each step with its number; warm-up is dim."""
        board, view, row = self.board, self.board.view, self._blank()
        steps, cells = board.steps_at(board.lane_at_cursor), self._timeline.cells
        if steps is None:
            if board.scenes[0] and board.scenes[0].analysis:
                row.write(0, "no steps found", Style(dim=True))
            return row
        shown = board.lane_at_cursor
        scene, zero = board.scenes[shown.trace if shown else 0], shown.zero if shown else 0
        first = int(np.searchsorted(steps.end, view.start, "right"))
        last = int(np.searchsorted(steps.start, view.end))
        free = 0
        for number in range(first, last):
            start, end = int(steps.start[number]), int(steps.end[number])
            cell, stop = max(view.cell_of(start, cells), 0), min(view.cell_of(end, cells), cells)
            warm = scene is not None and number < scene.all_steps.warmup
            row.write(stop, "│", Style(dim=True))
            name = f"{'warm-up' if warm else 'step'} {number}, {format_ns(end - start)}"
            texts = (f"├ {name} ", f"├ {number} ", f"├{number}")
            text = next((text for text in texts if len(text) <= stop - cell), "│")
            if cell >= free:
                row.write(cell, text, Style(dim=True) if warm else Style())
                free = cell + len(text) + (len(text) > 1)
        for interlude in steps.interludes if shown else ():
            first, last = (
                view.cell_of(at - zero, cells) for at in (interlude.start, interlude.end)
            )
            if last - first > len(interlude.phase):
                row.write(max(first, 0), f"{interlude.phase} ", Style(italic=True, reverse=True))
        return row


def round_step(least: int) -> int:
    """Return the smallest of 1, 2, 5, 10, 20… that is at least ``least``."""
    scale = 1
    while 5 * scale < least:
        scale *= 10
    return next(step for step in (scale, 2 * scale, 5 * scale) if step >= least)
