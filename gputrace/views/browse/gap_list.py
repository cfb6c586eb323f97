"""The list of gaps: as long as it may be, only the rows on the screen are ever made."""

from __future__ import annotations

from typing import ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from gputrace.analyzers.results import IDLE_CAUSES
from gputrace.analyzers.scene.gap_table import NO_STEP
from gputrace.views.browse.board import Board
from gputrace.views.palette import Palette
from gputrace.views.words import duration, moment

_COLUMNS: Final = (
    ("lane", 9),
    ("length", 9),
    ("start", 13),
    ("step", 6),
    ("cause", 15),
)
"""What is told of a gap, and how wide."""
_TITLES: Final = {"lane": "gpu", "start": "from"}


class GapList(ScrollView, can_focus=False):
    """The gaps of a board that its filter lets pass, in its order."""

    DEFAULT_CSS: ClassVar[str] = "GapList { scrollbar-size-horizontal: 0; }"

    class Chosen(Message):
        """A person clicked on a gap."""

        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place

    def __init__(self, board: Board, palette: Palette) -> None:
        super().__init__(id="gaps")
        self.board, self.palette = board, palette
        self.place = 0
        """Which row of the list is selected."""

    def show_board(self) -> None:
        """Draws anew; keeps the selection in view."""
        self.virtual_size = Size(self.size.width, len(self.board.rows) + 1)
        top, height = self.scroll_offset.y, max(self.size.height - 1, 1)
        if self.place < top:
            self.scroll_to(y=self.place, animate=False)
        elif self.place >= top + height:
            self.scroll_to(y=self.place - height + 1, animate=False)
        self.refresh()

    def on_resize(self) -> None:
        self.show_board()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y == 0:
            line = [Segment(self._header(), self.rich_style + Style(bold=True))]
        else:
            place = y - 1 + self.scroll_offset.y
            line = self._line(place) if place < len(self.board.rows) else []
        return Strip(line).adjust_cell_length(width, self.rich_style)

    def _header(self) -> str:
        arrow = "▾" if self.board.descending else "▴"
        cells = []
        for name, width in _COLUMNS:
            title = _TITLES.get(name, name)
            text = f"{title}{arrow}" if self.board.sort == name else title
            cells.append(f"{text:<{width}}" if name in ("lane", "cause") else f"{text:>{width}}")
        return " " + " ".join(cells)

    def _line(self, place: int) -> list[Segment]:
        table, row = self.board.table, int(self.board.rows[place])
        cause, step = IDLE_CAUSES[int(table.cause[row])], int(table.step[row])
        start, end = self.board.gap_span(row)
        texts = {
            "lane": self.board.gpus[int(table.lane[row])].label,
            "length": duration(end - start),
            "start": moment(start),
            "step": "" if step == NO_STEP else str(step),
            "cause": cause.replace("other_idle", "unexplained").replace("_", " "),
        }
        chosen = place == self.place
        style = self.rich_style + Style(reverse=chosen, bold=chosen)
        swatch, color = self.palette.swatch(cause)
        cells = [
            Segment(
                f" {texts[name][:width]:<{width}}"
                if name in ("lane", "cause")
                else f" {texts[name][:width]:>{width}}",
                style,
            )
            for name, width in _COLUMNS
        ]
        return [*cells[:-1], Segment(" ", style), Segment(swatch, color), *cells[-1:]]

    def on_mouse_down(self, event: events.MouseDown) -> None:
        place = event.y - 1 + self.scroll_offset.y
        if event.y > 0 and place < len(self.board.rows):
            self.post_message(self.Chosen(place))
