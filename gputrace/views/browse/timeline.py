"""The lanes on the screen, drawn line by line: no widget for anything that is in a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from gputrace.analyzers.scene.cells import edges_of
from gputrace.analyzers.scene.curves import CURVES
from gputrace.units import format_share
from gputrace.views.browse.board import Board
from gputrace.views.browse.drawing import Row, curve_value, draw_bars, gap_words, operation_words
from gputrace.views.browse.lanes import ShownLane
from gputrace.views.palette import Palette

if TYPE_CHECKING:
    from collections.abc import Mapping

TALLEST: Final = 4
"""Rows of a lane, where there is room; of three and more, the last is left free."""
_SHARE: Final = 8
"""Columns on the right for how busy a lane is."""
_WIDEST_LABEL: Final = 22
_ZOOM: Final = 1.25


class Timeline(ScrollView, can_focus=False):
    """The lanes of a board in its window."""

    DEFAULT_CSS: ClassVar[str] = "Timeline { scrollbar-size-horizontal: 0; }"

    class Clicked(Message):
        """A person clicked on a lane."""

        def __init__(self, lane: int, moment: int) -> None:
            super().__init__()
            self.lane, self.moment = lane, moment

    class Moved(Message):
        """A person turned the wheel or dragged: the window is to change."""

        def __init__(self, zoom: float = 1.0, anchor: int | None = None, pan: float = 0.0) -> None:
            super().__init__()
            self.zoom, self.anchor, self.pan = zoom, anchor, pan

    def __init__(self, board: Board, palette: Palette) -> None:
        super().__init__(id="timeline")
        self.board, self.palette = board, palette
        self._rows: dict[int, tuple[object, list[Row]]] = {}
        self._dragged: tuple[int, bool] | None = None
        self.gutter_width = 2
        """Columns for the labels of lanes."""
        self.most_rows = TALLEST
        """How many rows all lanes together may have; what is beyond is scrolled to."""
        self.lane_height = 1
        """Rows of a lane: as many as there is room for."""
        self.room = 80
        """Columns beside the scroll bar."""

    @property
    def cells(self) -> int:
        """How many cells a lane has."""
        return max(self.room - self.gutter_width - _SHARE, 10)

    @property
    def bar_height(self) -> int:
        """Those of them that are drawn on."""
        return self.lane_height - (self.lane_height > 2)

    def show_board(self) -> None:
        """Draws anew what has changed."""
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
        """Scrolls to the lane with the cursor."""
        top = self.board.cursor_lane * self.lane_height
        if top < self.scroll_offset.y:
            self.scroll_to(y=top, animate=False)
        elif top + self.lane_height > self.scroll_offset.y + self.size.height:
            self.scroll_to(y=top + self.lane_height - self.size.height, animate=False)

    def on_resize(self) -> None:
        self.show_board()

    def render_line(self, y: int) -> Strip:
        """One line of a lane: its label, its cells, how busy it is."""
        place, line = divmod(y + self.scroll_offset.y, self.lane_height)
        width = self.room
        if place >= len(self.board.lanes):
            return Strip.blank(width, self.rich_style)
        shown = self.board.lanes[place]
        rows, share = self._drawn(shown, place)
        own = place == self.board.cursor_lane
        style = Style(bold=own)
        name = shown.label[: self.gutter_width - 2] if line == 0 else ""
        pointer = "▸" if own and line == 0 else " "
        gutter = Segment(f"{pointer}{name:<{self.gutter_width - 2}} ", style)
        told = f"{share:>{_SHARE - 1}} " if line == 0 else " " * _SHARE
        cells = rows[line].segments() if line < len(rows) else [Segment(" " * self.cells)]
        strip = Strip([gutter, *cells, Segment(told)]).adjust_cell_length(width)
        return strip.apply_style(self.rich_style)

    def _drawn(self, shown: ShownLane, place: int) -> tuple[list[Row], str]:
        """The rows of a lane, drawn once for all its lines."""
        board = self.board
        cursor = board.cursor if place == board.cursor_lane else None
        shape = (self.cells, self.bar_height, self.palette)
        key = (shown, board.view, shape, cursor, board.chosen_span(shown))
        known = self._rows.get(place)
        if known is None or known[0] != key:
            rows = self._draw(shown, place)
            known = self._rows[place] = (key, rows)
        return known[1], self._busy(shown)

    def _busy(self, shown: ShownLane) -> str:
        """The share of the window in which anything runs, of a GPU."""
        view, layers = self.board.view, shown.lane.layers
        if shown.lane.part in CURVES:
            return curve_value(shown.lane.curves[0], shown.zero, view)
        if shown.lane.operations is None:
            return ""
        shares = layers.split(edges_of(view.start + shown.zero, view.end + shown.zero, 1))[0]
        return format_share(float(shares[:5].sum()), view.length)

    def _draw(self, shown: ShownLane, place: int) -> list[Row]:
        board, view, cells = self.board, self.board.view, self.cells
        rows = draw_bars(shown, view, cells, self.bar_height, self.palette)
        middle = rows[self.bar_height // 2]
        words = list(operation_words(shown, self._names(shown), view, cells))
        if shown.number >= 0:
            number = board.gpus.index(shown)
            words += gap_words(number, board.table, view, cells)
        for each in words:
            middle.write(each.first, each.text, self.palette.text(each.ground))
        self._overlay(shown, place, rows)
        return rows

    def _names(self, shown: ShownLane) -> Mapping[int, str]:
        scene = self.board.scenes[shown.trace]
        return scene.names if scene else {}

    def _overlay(self, shown: ShownLane, place: int, rows: list[Row]) -> None:
        """The selection, and the cursor on its lane."""
        board, view, cells = self.board, self.board.view, self.cells
        chosen = board.chosen_span(shown)
        if chosen is not None:
            first, last = (view.cell_of(moment, cells) for moment in chosen)
            for row in rows:
                row.restyle(first, max(last, first + 1), Style(underline=True))
        if place == board.cursor_lane:
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
        place = (event.y + self.scroll_offset.y) // self.lane_height
        inside = 0 <= event.x - self.gutter_width < self.cells
        if dragged is not None and not dragged[1] and inside and place < len(self.board.lanes):
            self.post_message(self.Clicked(place, self._moment(event.x)))
