"""The screen, and how what the sources read comes onto it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.containers import Container, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from gputrace.analyzers.scene.cells import Layers
from gputrace.analyzers.scene.gap_table import GapTable
from gputrace.analyzers.scene.scene import Scene
from gputrace.cleaning import clean
from gputrace.views.browse.board import Board
from gputrace.views.browse.drawing import legend
from gputrace.views.browse.gap_list import GapList
from gputrace.views.browse.keys import KEYS
from gputrace.views.browse.ruler import Ruler
from gputrace.views.browse.source import Source
from gputrace.views.browse.timeline import Timeline
from gputrace.views.palette import LOOKS, SEVERITIES, Palette
from gputrace.views.tables import verdict
from gputrace.views.words import duration, moment

_AT_ONCE: Final = 200_000
"""So many gaps are sorted while a key waits; more, in the source's thread."""

_LOOKING: Final = "the GPUs' work is here; looking for causes and steps"
_SHORT: Final = 20
"""Screens of fewer rows go without legend, status and footer."""
_AROUND_LANES: Final = 7
"""Rows of the verdict, the ruler, and these three."""
_LEFT_OUT: Final = 3
_CSS: Final = """
Screen { layout: vertical; overflow: hidden; }
#verdict { height: 1; padding: 0 1; background: $panel; }
Timeline { height: 1; }
#legend { height: 1; padding: 0 1; }
#status { height: 1; padding: 0 1; color: $text-muted; background: $panel; }
#below { height: 1fr; layout: horizontal; }
GapList { width: 62; }
#detail-box { width: 1fr; padding: 0 1; border-left: solid $panel; }
#detail { height: auto; }
.narrow #below { layout: vertical; }
.narrow GapList { width: 100%; height: 4; }
.narrow #detail-box { height: 1fr; border-left: none; }
.short #legend, .short #status, .short Footer { display: none; }
"""


class Base(App[None]):
    """Shows a board; those that inherit change it."""

    TITLE = "gputrace browse"
    ENABLE_COMMAND_PALETTE = True
    CSS: ClassVar[str] = _CSS
    BINDINGS: ClassVar[list[BindingType]] = [key.binding for key in KEYS]

    def __init__(self, traces: Sequence[Sequence[Path]]) -> None:
        """Each of ``traces`` is the files of one run; two are laid side by side."""
        super().__init__()
        self.board = Board([None] * len(traces))
        self.palette = Palette()
        self.sources = [Source(number, paths, self) for number, paths in enumerate(traces)]
        self.error: Exception | None = None
        """Why a trace cannot be shown."""
        self.enlarged = False
        """Whether the lanes have the whole screen."""
        self.timeline = Timeline(self.board, self.palette)
        self.ruler = Ruler(self.board, self.palette, self.timeline)
        self.gap_list = GapList(self.board, self.palette)

    def compose(self) -> ComposeResult:
        yield Static(id="verdict", markup=False)
        yield self.ruler
        yield self.timeline
        yield Static(id="legend", markup=False)
        yield Static(id="status", markup=False)
        with Container(id="below"):
            yield self.gap_list
            with VerticalScroll(id="detail-box", can_focus=False):
                yield Static(id="detail", markup=False)
        yield Footer(show_command_palette=False)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Every key by what it does, for the command palette."""
        for key in KEYS:
            title = f"{key.does[0].upper()}{key.does[1:]}"
            yield SystemCommand(title, key.written, partial(self.run_action, key.action))
        yield from super().get_system_commands(screen)

    def on_mount(self) -> None:
        colors = 16 if self.console.color_system == "standard" else 1 << 24
        self.use_palette(Palette(0 if self.no_color else colors))
        # Whoever ends the program gets the terminal back as it was.
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, partial(self.exit, return_code=128 + signal.SIGTERM)
        )
        self.tell("#verdict", "reading …")
        for source in self.sources:
            source.start()

    def on_unmount(self) -> None:
        for source in self.sources:
            source.stop()

    def on_resize(self) -> None:
        self.set_class(self.size.width < 110, "narrow")
        self.set_class(self.size.height < _SHORT, "short")
        self.timeline.most_rows = self._rows_for_lanes()
        self.timeline.show_board()

    def _rows_for_lanes(self) -> int:
        """How many rows the lanes may have; the others are for the gaps."""
        around = _AROUND_LANES - (_LEFT_OUT if self.size.height < _SHORT else 0)
        room = self.size.height - around
        return max(room if self.enlarged else room * 3 // 5, 1)

    def use_palette(self, palette: Palette) -> None:
        for widget in (self.timeline, self.ruler, self.gap_list):
            widget.palette = palette
        self.palette = palette

    # Called from the sources' threads.

    def progress(self, trace: int, done: int, total: int) -> None:
        share = f" {done / total:.0%}" if total else ""
        name = clean(self.sources[trace].paths[0].name, 60)
        here = self.board.scenes[trace] is not None
        what = f"{_LOOKING} in what the host did" if here else f"reading {name}"
        self.later(lambda: self.tell("#verdict", f"{what}{share}"))

    def scene(self, trace: int, scene: Scene) -> None:
        self.later(lambda: self._take(trace, scene))

    def failed(self, trace: int, error: Exception) -> None:
        self.later(lambda: self._fail(trace, error))

    def later(self, job: Callable[[], None]) -> None:
        """Does something on the screen's thread; nothing once the screen is gone."""
        if self.is_running:
            self.call_later(job)

    def _fail(self, trace: int, error: Exception) -> None:
        """A trace that cannot be shown ends all; of what is asked of one later, it is told."""
        if self.board.scenes[trace] is not None:
            told = str(error) or type(error).__name__
            self.notify(clean(told), severity="error", markup=False)
            return
        self.error = error
        self.exit()

    def _take(self, trace: int, scene: Scene) -> None:
        self.board.scenes[trace] = scene
        self.board.forget()
        self.board.rebuild()
        if scene.analysis is None:
            self.tell("#verdict", f"{_LOOKING} …")
            self.show()
        else:
            self.rearrange(self._begin)

    def _begin(self) -> None:
        """The first time all is known, shows the worst gap with a step on either side."""

    def rearrange(self, then: Callable[[], None] | None = None) -> None:
        """Filters and sorts the gaps anew; where they are many, beside the screen."""
        table = self.board.table

        def arrange() -> None:
            rows = self.board.arrange(table)
            self.later(lambda: self._arranged(table, rows, then))

        if len(table) <= _AT_ONCE:
            self._arranged(table, self.board.arrange(table), then)
        else:
            self.tell("#status", "sorting …")
            self.sources[0].ask(arrange)

    def _arranged(
        self, table: GapTable, rows: NDArray[np.intp], then: Callable[[], None] | None
    ) -> None:
        if table is not self.board.table:
            return
        self.board.rows = rows
        self.gap_list.place = 0
        if then is not None:
            then()
        self.show()

    def tell(self, where: str, text: str | Text) -> None:
        """Writes a line; lays the screen out anew only where that may have become longer."""
        shown = text if isinstance(text, Text) else Text(text)
        self.query_one(where, Static).update(shown, layout=where == "#detail")

    def show(self) -> None:
        """Draws all anew."""
        self._show_verdict()
        self._show_legend()
        self._show_status()
        self.ruler.refresh()
        self.timeline.show_board()
        self.gap_list.show_board()

    def _show_verdict(self) -> None:
        text = Text(no_wrap=True, overflow="ellipsis")
        for trace, scene in enumerate(self.board.scenes):
            if scene is None or scene.analysis is None:
                continue
            if len(self.board.scenes) > 1:
                text.append(f"{'AB'[trace]} ", "bold")
            found = scene.analysis.findings
            style = SEVERITIES[found[0].severity] if found else "green"
            text.append(f"{clean(verdict(scene.analysis))}  ", style)
        if text:
            self.tell("#verdict", text)

    def _show_legend(self) -> None:
        there = {name for shown in self.board.lanes for name in self._present(shown.lane.layers)}
        names = [name for name in LOOKS if name in there]
        line = Text(no_wrap=True, overflow="ellipsis")
        for segment in legend(names, self.palette):
            line.append(segment.text, segment.style or Style())
        self.tell("#legend", line)

    def _present(self, layers: Layers) -> list[str]:
        """The classes of which there is any time."""
        return [n for n, s in zip(layers.classes, layers.sets, strict=True) if len(s)]

    def _show_status(self) -> None:
        board, view = self.board, self.board.view
        parts = [f"window {duration(view.length)}", f"cursor {moment(board.cursor)}"]
        if len(board.marks) == 2:
            parts.insert(0, f"a to b {duration(abs(board.marks[1] - board.marks[0]))}")
        place = self.gap_list.place + 1 if len(board.rows) else 0
        which = "of steady steps" if board.gap_filter.steady else ""
        parts.append(f"gap {place:,} of {len(board.rows):,} {which}".rstrip())
        self.tell("#status", Text(" · ".join(parts), no_wrap=True, overflow="ellipsis"))
