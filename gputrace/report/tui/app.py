"""Browser application: the screen, its actions, prompts, and details of the selection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from rich.text import Text
from textual.app import ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.containers import Container, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from gputrace.analyzers.gpu_shards import Shard
from gputrace.analyzers.timeline_model import SORTS, GapTable, Scene, SceneLane, gaps, most_visible
from gputrace.analyzers.timeline_model.trace_rows import stream_lanes, thread_lanes
from gputrace.report.palette import Palette
from gputrace.report.tui import panes
from gputrace.report.tui.screen import (
    FILTER,
    KEYS,
    Help,
    Prompt,
    Source,
    TerminalApp,
    parse_filter,
    parse_ranks,
    picture,
)
from gputrace.report.tui.state import Board, Picked, ShownLane, Viewport
from gputrace.report.tui.timeline import Ruler, Timeline
from gputrace.sanitize import clean

_AT_ONCE: Final = 200_000
"""Up to so many gaps are sorted at once; more, in the source's thread."""

_LOOKING: Final = "the GPUs' work is here; gaps, causes and steps follow"
_GAPS: Final = "gaps"
_SHORT: Final = 20
"""Screens with fewer rows omit legend, status and tabs."""
_AROUND_LANES: Final = 8
"""Rows of the verdict, the ruler, the legend, the status, the tabs and the footer."""
_NARROW: Final = 110
"""Screens with fewer columns have the details below the list, and two rows for long lines."""
_LEFT_OUT: Final = 3
"""Rows saved by short screens."""
_AROUND: Final = 1.0
"""Margin shown on either side of a gap, as a fraction of its length."""
_ROWS_WITH_CURVE: Final = 4
"""Rows per GPU from which a curve is shown below it from the start, if there are samples."""
_REST_S: Final = 0.05
"""Seconds that a gap stays selected before its details are read."""


class BrowseApp(TerminalApp[None]):
    """Terminal browser of one trace, or of two side by side.

    `Board` holds the state, a `Source` reads each trace in its own thread, and the widgets draw the
    board; the actions here connect them.
    """

    TITLE = "gputrace browse"
    ENABLE_COMMAND_PALETTE = True
    CSS: ClassVar[str] = """
    Screen { layout: vertical; overflow: hidden; }
    #verdict { height: auto; max-height: 2; padding: 0 1; background: $panel; }
    Timeline { height: 1; }
    #legend { height: auto; max-height: 2; padding: 0 1; }
    #tabs { height: 1; padding: 0 1; }
    #pane { height: 1fr; padding: 0 1; display: none; scrollbar-gutter: stable; }
    #pane-text { height: auto; }
    #status { height: 1; padding: 0 1; color: $text-muted; background: $panel; }
    #below { height: 1fr; layout: horizontal; }
    GapList { width: 73; }
    #detail-box { width: 1fr; padding: 0 1; border-left: solid $panel; }
    #detail { height: auto; }
    .narrow #below { layout: vertical; }
    .narrow GapList { width: 100%; height: 4; }
    .narrow #detail-box { height: 1fr; border-left: none; }
    .short #legend, .short #status, .short #tabs { display: none; }
    """
    # The footer of a narrow screen is cut: what a newcomer needs comes first.
    BINDINGS: ClassVar[list[BindingType]] = [
        key.binding for key in sorted(KEYS, key=lambda key: key.action not in ("help", "quit"))
    ]

    def __init__(self, traces: Sequence[Sequence[Path]]) -> None:
        """Prepare the screen of one run, or of two side by side; each is given by its files."""
        super().__init__()
        self.board = Board([None] * len(traces))
        self.sources = [Source(number, paths, self) for number, paths in enumerate(traces)]
        self.error: Exception | None = None
        """Error because of which a trace cannot be shown."""
        self.enlarged = False
        """True while the lanes take the whole screen."""
        self.timeline = Timeline(self.board, self.palette)
        self.ruler = Ruler(self.board, self.palette, self.timeline)
        self.gap_list = panes.GapList(self.board, self.palette)
        self.detail_text = Text()
        """Details of the selection."""
        self._pattern = ""
        """Last search pattern."""
        self._matches: dict[int, NDArray[np.int64]] = {}
        """Ids of the names that match it, by trace."""
        self._followed: Picked | None = None
        """Operation whose launch was followed to."""
        self._opened = False
        """True once the worst gap was shown."""
        self.pane = _GAPS
        """One of `PANES`, or the gaps."""

    def compose(self) -> ComposeResult:
        yield Static(id="verdict", markup=False)
        yield self.ruler
        yield self.timeline
        yield Static(id="legend", markup=False)
        yield Static(id="status", markup=False)
        yield Static(id="tabs", markup=False)
        yield panes.Pane(self._draw_pane, id="pane", can_focus=False)
        with Container(id="below"):
            yield self.gap_list
            with VerticalScroll(id="detail-box", can_focus=False):
                yield Static(id="detail", markup=False)
        yield Footer(show_command_palette=False)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Offer every key in the command palette by what it does."""
        for key in KEYS:
            title = f"{key.does[0].upper()}{key.does[1:]}"
            yield SystemCommand(title, key.written, partial(self.run_action, key.action))
        yield from super().get_system_commands(screen)

    def on_mount(self) -> None:
        self.use_palette(self.make_palette(letters=self.no_color))
        self.exit_when_terminated()
        self.update_text("#verdict", "reading …")
        for source in self.sources:
            source.start()

    def on_unmount(self) -> None:
        for source in self.sources:
            source.stop()

    def on_resize(self) -> None:
        # This is called before the handler that sets ``size``.
        self.call_later(self.lay_out)

    def lay_out(self) -> None:
        """Divide the screen between lanes and gaps by its size, and redraw everything."""
        is_narrow, is_short = self.size.width < _NARROW, self.size.height < _SHORT
        self.set_class(is_narrow, "narrow")
        self.set_class(is_short, "short")
        # A narrow screen may need a second row for the verdict, and one for the legend.
        around = _AROUND_LANES - (_LEFT_OUT if is_short else 0) + is_narrow * (1 + (not is_short))
        room = self.size.height - around
        # The other rows are for the gaps.
        self.timeline.most_rows = max(room if self.enlarged else room * 3 // 5, 1)
        self.show()

    def use_palette(self, palette: Palette) -> None:
        for widget in (self.timeline, self.ruler, self.gap_list):
            widget.palette = palette
        super().use_palette(palette)

    # Called from the sources' threads:

    def progress(self, trace: int, done: int, total: int) -> None:
        share = f" {done / total:.0%}" if total else ""
        name = clean(self.sources[trace].paths[0].name, 60)

        def update() -> None:
            # Asked on the screen's thread, where a scene that was sent before is taken by now.
            here = self.board.scenes[trace] is not None
            what = f"{_LOOKING} once the host's rows are read:" if here else f"reading {name}"
            self.update_text("#verdict", f"{what}{share}")

        self.later(update)

    def scene(self, trace: int, scene: Scene) -> None:
        self.later(lambda: self._take(trace, scene))

    def failed(self, trace: int, error: Exception) -> None:
        self.later(lambda: self._fail(trace, error))

    def later(self, job: Callable[[], None]) -> None:
        """Run a job on the screen's thread; do nothing once the screen is closed."""
        if self.is_running:
            self.call_later(job)

    def _fail(self, trace: int, error: Exception) -> None:
        """Exit if a trace cannot be read; notify the user of errors of later requests."""
        if self.board.scenes[trace] is not None:
            message = str(error) or type(error).__name__
            self.notify(clean(message), severity="error", markup=False)
            return
        self.error = error
        self.exit()

    def _take(self, trace: int, scene: Scene) -> None:
        self.board.scenes[trace] = scene
        self.board.forget()
        self.board.rebuild()
        if scene.analysis is None:
            self.update_text("#verdict", f"{_LOOKING} …")
            self.show()
        elif self._opened:
            self.rearrange(lambda: self.select(0))
        else:
            self._open()
            self.rearrange(self._follow_selection)

    def rearrange(self, then: Callable[[], None] | None = None) -> None:
        """Filter and sort the gaps again; many gaps, in the source's thread."""
        table = self.board.table

        def arrange() -> None:
            rows = self.board.arrange(table)
            self.later(lambda: self._arranged(table, rows, then))

        if len(table) <= _AT_ONCE:
            self._arranged(table, self.board.arrange(table), then)
        else:
            self.show()
            self.update_text("#status", "sorting …")
            self.call_after_refresh(self.sources[0].ask, arrange)

    def _arranged(
        self, table: GapTable, rows: NDArray[np.intp], then: Callable[[], None] | None
    ) -> None:
        if table is not self.board.table:
            return
        self.board.rows = rows
        self.gap_list.index = 0
        if then is not None:
            then()
        self.show()

    def update_text(self, where: str, text: str | Text) -> None:
        """Update a text; redo the layout only for those whose height varies."""
        shown = text if isinstance(text, Text) else Text(text)
        self.query_one(where, Static).update(shown, layout=where not in ("#status", "#tabs"))

    def show(self) -> None:
        """Redraw everything."""
        board, width = self.board, self.size.width
        if verdicts := panes.verdict_text(board.scenes):
            self.update_text("#verdict", verdicts)
        self.update_text("#legend", panes.legend_text(board.lanes, self.palette, width))
        self.update_text("#status", panes.status_text(board, self.gap_list.index, width - 2))
        names = {name: name for name in (_GAPS, *panes.PANES)}
        self.gap_list.display = bool(len(self.board.table)) or not self._opened
        if not self.gap_list.display:
            # Of the host alone, there are steps to explain in place of gaps, and no kernels.
            names |= {_GAPS: "step", "kernels": ""}
        tabs = [
            Text(f" {number} {name} ", "reverse" if pane == self.pane else "dim")
            for number, (pane, name) in enumerate(names.items(), 1)
            if name
        ]
        self.update_text("#tabs", Text(" ").join(tabs))
        pane, has_gaps = self.query_one(panes.Pane), self.pane == _GAPS
        pane.display = not has_gaps and not self.enlarged
        self.query_one("#below").display = has_gaps and not self.enlarged
        pane.show_board()
        self.ruler.refresh()
        self.timeline.show_board()
        self.gap_list.show_board()

    def action_pane(self, name: str) -> None:
        """Show the gaps, or another of the panes in their place."""
        self.pane = name
        if name == _GAPS and not self.gap_list.display and not self.detail_text:
            self.action_explain_step()
        self.query_one(panes.Pane).scroll_home(animate=False)
        self.show()

    def _draw_pane(self, height: int) -> Text:
        shown = self.board.lane_at_cursor
        trace = shown.trace if shown else 0
        scene = self.board.scenes[trace]
        if self.pane == _GAPS or scene is None or scene.analysis is None:
            return Text()
        head = Text()
        if len(self.board.scenes) > 1:
            name = clean(self.sources[trace].paths[0].name, 60)
            head = Text(f"{'AB'[trace]} {name}, the trace at the cursor\n", "bold")
        height = max(height, 6) - bool(head)
        text_of = panes.PANES[self.pane]
        return head + text_of(scene.analysis, self.size.width - 4, height, self.palette)

    # Window, cursor and selection:

    def show_window(self, view: Viewport) -> None:
        self.board.view = view
        self.show()

    def on_timeline_moved(self, message: Timeline.Moved) -> None:
        view = self.board.view
        if message.zoom != 1.0:
            view = view.zoom(message.zoom, message.anchor)
        self.show_window(view.pan(message.pan) if message.pan else view)

    def on_timeline_resized(self) -> None:
        self.timeline.reveal_cursor()
        self.show()

    def on_timeline_clicked(self, message: Timeline.Clicked) -> None:
        self.board.cursor_lane, self.board.cursor = message.lane, message.moment
        self.action_pick()

    def on_gap_list_chosen(self, message: panes.GapList.Chosen) -> None:
        self.select(message.index)

    def action_zoom(self, factor: float) -> None:
        self.show_window(self.board.view.zoom(factor, self.board.cursor))

    def action_pan(self, part: float) -> None:
        self.show_window(self.board.view.pan(part))

    def action_fit_run(self) -> None:
        self.show_window(self.board.view.whole())

    def action_fit_step(self) -> None:
        if (span := self.board.step_span(self.board.cursor)) is not None:
            self.show_window(self.board.view.fit(*span))
        else:
            self.notify("no steps were found", markup=False)

    def action_fit_gap(self) -> None:
        if self.board.selected is not None:
            start, end = self.board.gap_span(self.board.selected)
            around = round((end - start) * _AROUND)
            self.show_window(self.board.view.show(start - around, end + around))

    def action_explain_step(self) -> None:
        """Describe the step under the cursor against the median step."""
        shown = self.board.lane_at_cursor
        steps = self.board.steps_at(shown)
        if shown is None or steps is None:
            self.notify("no steps were found", markup=False)
            return
        at = int(np.searchsorted(steps.end, self.board.cursor, "right"))
        number, scene = min(at, len(steps) - 1), self.board.scenes[shown.trace]
        source = self.sources[shown.trace]

        def read() -> None:
            if scene is not None and scene.analysis is not None:
                found = gaps.explain_step(scene, number, Shard(source.trace))
                self.later(lambda: self._set_detail(panes.step_text(found, shown)))

        source.ask(read)
        self.pane = _GAPS
        self.show()

    def action_step(self, by: int) -> None:
        if self.board.go_to_step(by):
            self.show()
        else:
            self.notify("no steps were found", markup=False)

    def action_cursor(self, by: int) -> None:
        board, cells = self.board, self.timeline.cells
        cell = min(max(board.view.cell_of(board.cursor, cells) + by, 0), cells - 1)
        board.cursor = board.view.moment_of(cell, cells) + board.view.length // cells // 2
        self.show()

    def action_lane(self, by: int) -> None:
        last = len(self.board.lanes) - 1
        self.board.cursor_lane = min(max(self.board.cursor_lane + by, 0), max(last, 0))
        self.timeline.reveal_cursor()
        self.show()

    def action_pick(self) -> None:
        """Select the gap under the cursor, or else the operation that is visible there."""
        board, shown = self.board, self.board.lane_at_cursor
        if shown is None:
            return
        cell = max(board.view.length // self.timeline.cells, 1)
        start, gap = board.cursor + shown.zero, None
        if shown.number >= 0:
            gap = board.table.find(board.gpus.index(shown), board.cursor + cell // 2)
        if gap is not None:
            self.select_gap(gap)
        elif (row := most_visible(shown.lane, start, start + cell)) is not None:
            board.picked = Picked(shown, row)
            self.show_detail()
        self.show()

    def action_gap(self, by: int) -> None:
        """Go on in the list of gaps, or scroll what is shown in its place."""
        if self.pane != _GAPS and not self.enlarged:
            self.query_one(panes.Pane).scroll_relative(y=by, animate=False)
            return
        self.select(self.gap_list.index + by if self.board.selected is not None else 0)

    def action_gap_page(self, by: int) -> None:
        self.select(self.gap_list.index + by * max(self.gap_list.size.height - 1, 1))

    def action_gap_first(self) -> None:
        self.select(0)

    def select(self, index: int) -> None:
        """Select a row of the list, and bring its gap into view."""
        board = self.board
        if not len(board.rows):
            return
        self.gap_list.index = min(max(index, 0), len(board.rows) - 1)
        row = int(board.rows[self.gap_list.index])
        self.select_gap(row)
        board.view = board.view.reveal(*board.gap_span(row))
        self.timeline.reveal_cursor()
        self.show()

    def select_gap(self, row: int) -> None:
        """Select a row of the table of gaps; the list follows if it contains that row."""
        board = self.board
        board.selected, board.picked = row, None
        board.cursor = board.gap_span(row)[0]
        index = board.index_of(board.gpus[int(board.table.lane[row])])
        board.cursor_lane = board.cursor_lane if index is None else index
        listed = np.flatnonzero(board.rows == row)
        if len(listed):
            self.gap_list.index = int(listed[0])
        self.show_detail()

    def action_sort(self) -> None:
        following = SORTS.index(self.board.sort) + 1
        self.board.sort = SORTS[following % len(SORTS)]
        self.board.descending = self.board.sort == "length"
        self.rearrange(self._reselect)

    def action_reverse(self) -> None:
        self.board.descending = not self.board.descending
        self.rearrange(self._reselect)

    def action_toggle_filter(self, name: str) -> None:
        """Toggle ``steady`` or ``between`` of the filter."""
        chosen = self.board.gap_filter
        toggled: dict[str, Any] = {name: not getattr(chosen, name)}
        self.board.gap_filter = replace(chosen, **toggled)
        # Who stands at the longest gap stays at the longest.
        self.rearrange(self.action_gap_first if not self.gap_list.index else self._reselect)

    def _reselect(self) -> None:
        """Keep the selection if it is still listed; else select the first row."""
        self._follow_selection()
        self.select(self.gap_list.index)

    def _follow_selection(self) -> None:
        """Place the list's cursor on what is selected, or on the first row if it is not listed."""
        listed = np.flatnonzero(self.board.rows == self.board.selected)
        self.gap_list.index = int(listed[0]) if len(listed) else 0

    def action_mark(self) -> None:
        """Set a mark; a third one clears the first two."""
        marks = self.board.marks if len(self.board.marks) < 2 else ()
        self.board.marks = (*marks, self.board.cursor)
        self.show()

    def action_clear(self) -> None:
        self.board.marks, self.board.picked = (), None
        self.show_detail()
        self.show()

    def action_align(self) -> None:
        """Shift the second trace so that the steps of equal number at the cursor start together."""
        if len(self.board.scenes) < 2 or None in self.board.scenes:
            self.notify("there is one trace; give another with --beside", markup=False)
        elif not self.board.align():
            self.notify("no steps were found in one of them", markup=False)
        else:
            self.show_detail()
            self.rearrange(self._follow_selection)

    # Prompts:

    def ask(self, question: str, value: str, then: Callable[[str], Any]) -> None:
        """Prompt for a line until ``then`` accepts it; its errors are shown beside the line."""
        self.push_screen(Prompt(question, value, then))

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_search(self) -> None:
        self.ask("operations whose name has (a regular expression):", self._pattern, self._search)

    def _search(self, text: str) -> None:
        self._pattern, self._matches = text, self.board.search(text)
        self.action_match(1)

    def action_match(self, by: int) -> None:
        if not self._pattern:
            self.action_search()
        elif (match := self.board.next_match(self._matches, forward=by > 0)) is not None:
            self.pick(match)
        else:
            self.notify(f"none {'after' if by > 0 else 'before'} the cursor", markup=False)

    def pick(self, picked: Picked) -> None:
        """Select an operation and bring it into view."""
        self.board.pick(picked)
        self.timeline.reveal_cursor()
        self.show_detail()
        self.show()

    def action_jump(self) -> None:
        self.ask("time as 28.6s, from the cursor as +5ms, or step as #17:", "", self._jump)

    def _jump(self, text: str) -> None:
        self.board.jump(text.strip())
        self.show()

    def action_ranks(self) -> None:
        self.ask("ranks to show, e.g. 0,2-3; empty for all:", "", self._ranks)

    def _ranks(self, text: str) -> None:
        self.board.ranks = parse_ranks(text, {gpu.lane.rank for gpu in self.board.gpus})
        self.board.filter_lanes()
        self.rearrange(self._reselect)

    def action_beside(self) -> None:
        """Show only the rank at the cursor and the next one; if filtered, show all."""
        shown = self.board.lane_at_cursor
        if self.board.ranks is not None or shown is None:
            self._ranks("")
            return
        ranks = sorted({gpu.lane.rank for gpu in self.board.gpus})
        other = ranks[(ranks.index(shown.lane.rank) + 1) % len(ranks)]
        self._ranks(f"{shown.lane.rank},{other}")

    def action_filter(self) -> None:
        self.ask(f"gaps: {FILTER}; nothing for all:", "", self._filter)

    def _filter(self, text: str) -> None:
        self.board.gap_filter = replace(
            parse_filter(text, [gpu.label for gpu in self.board.gpus], self.board.causes),
            steady=self.board.gap_filter.steady and "step" not in text,
            between=self.board.gap_filter.between,
        )
        self.rearrange(self._reselect)

    def action_export(self) -> None:
        self.ask("write the view to (.svg), or its window as a trace to:", "view.svg", self._export)

    def _export(self, text: str) -> None:
        path = Path(text).expanduser()
        if not text or not path.parent.is_dir() or path.exists():
            raise ValueError(f"{text}: exists, or its folder does not; name another")
        if path.suffix == ".svg":
            self.call_later(self._write_svg, path)
            return
        shown, view = self.board.lane_at_cursor, self.board.view
        trace = shown.trace if shown else 0
        source, zero = self.sources[trace], self.board.zero(trace)

        def cut() -> None:
            source.export(path, view.start + zero, view.end + zero)
            self.later(lambda: self.notify(f"wrote {path}", markup=False))

        source.ask(cut)

    def _write_svg(self, path: Path) -> None:
        path.write_text(picture(self), encoding="utf-8")
        self.notify(f"wrote {path}", markup=False)

    # Details and lanes:

    def _open(self) -> None:
        """Select the worst gap, with a step on either side in view."""
        self._opened = True
        board = self.board
        worst = board.begin(self.timeline.most_rows >= _ROWS_WITH_CURVE * len(board.gpus))
        if worst is None:
            self.pane = "findings"
        else:
            self.select_gap(worst)
            self.timeline.reveal_cursor()
            board.view = board.view_around(worst)

    def show_detail(self) -> None:
        if self.board.picked is not None:
            self._show_operation(self.board.picked)
        elif self.board.selected is not None:
            self._show_gap(self.board.selected)
        else:
            self._set_detail(Text())

    def _set_detail(self, text: Text) -> None:
        self.detail_text = text
        self.update_text("#detail", text)

    def _show_gap(self, row: int) -> None:
        """Request the details of a gap; nothing changes until they are read and if it was left."""
        board = self.board
        shown = board.gpus[int(board.table.lane[row])]
        source, scene = self.sources[shown.trace], board.scenes[shown.trace]
        before = board.scenes[: shown.trace]
        in_trace = row - sum(len(other.gaps) for other in before if other is not None)

        def read() -> None:
            if scene is not None and board.selected == row and board.picked is None:
                detail = gaps.describe_gap(source.trace, scene, in_trace)
                self.later(lambda: self._gap_read(row, shown, detail))

        # Reading at once would delay drawing the selection, and the repeats of a key held down.
        self.set_timer(_REST_S, lambda: source.ask(read))

    def _gap_read(self, row: int, shown: ShownLane, detail: gaps.GapDetail) -> None:
        scene = self.board.scenes[shown.trace]
        if self.board.selected != row or self.board.picked is not None:
            return
        if scene is None or scene.analysis is None:
            return
        labels = [gpu.label for gpu in self.board.gpus if gpu.trace == shown.trace]
        where = self.board.steps_around(row)
        text = panes.gap_text(detail, scene.analysis, shown.label, labels, shown.zero, where)
        self._set_detail(text)

    def _show_operation(self, picked: Picked) -> None:
        source, scene = self.sources[picked.lane.trace], self.board.scenes[picked.lane.trace]
        operations, shown = picked.operations, picked.lane

        def read() -> None:
            if scene is not None and self.board.picked == picked:
                operation = gaps.operation_at(scene, operations, picked.row)
                launch = source.issuer(scene, operations, picked.row)
                what = shown.lane.layers.classes[int(operations.classes[picked.row])]
                text = panes.operation_text(operation, launch, shown.label, what, shown.zero)
                self.later(lambda: self._set_detail(text))

        source.ask(read)

    def action_follow(self) -> None:
        """Go from an operation to the call that issued it, and back."""
        picked = self.board.picked
        if picked is None:
            self.notify("pick an operation first (e, or click on one)", markup=False)
            return
        if self._followed == picked:
            self._followed = None
            self.pick(picked)
            return
        source, scene = self.sources[picked.lane.trace], self.board.scenes[picked.lane.trace]

        def read() -> None:
            launch = source.issuer(scene, picked.operations, picked.row) if scene else None
            self.later(lambda: self._go_to(picked, launch))

        source.ask(read)

    def _go_to(self, picked: Picked, launch: gaps.IssuingCall | None) -> None:
        """Show a launch together with its operation."""
        if launch is None:
            self.notify("the trace does not show which call issued it", markup=False)
            return
        at, end = launch.start_ns - picked.lane.zero, picked.span[1]
        self._followed, self.board.cursor = picked, at
        self.show_window(self.board.view.fit(min(at, end), max(at, end)))

    def action_curves(self) -> None:
        """Show the next curve below the GPUs; after the last, none."""
        known = ["", *self.board.known_curves()]
        if len(known) == 1:
            self.notify("the trace has no samples of NVML", markup=False)
            return
        index = known.index(self.board.curve) if self.board.curve in known else 0
        self.board.curve = known[(index + 1) % len(known)]
        self._filter_again()

    def action_toggle_parts(self, threads: bool) -> None:
        """Toggle lanes of the host's threads, or of the streams."""
        for source in self.sources:
            parts_shown = self.board.extra[source.number]
            kept = [lane for lane in parts_shown if (lane.operations is None) != threads]
            if len(kept) < len(parts_shown):
                self._take_parts(source.number, kept)
                continue
            if (scene := self.board.scenes[source.number]) is None:
                continue
            self.notify("reading …", timeout=1, markup=False)

            def read(source: Any = source, kept: Any = kept, scene: Any = scene) -> None:
                parts = thread_lanes(source.trace, scene) if threads else stream_lanes(source.trace)
                self.later(lambda: self._take_parts(source.number, kept + parts))

            source.ask(read)

    def _take_parts(self, trace: int, lanes: list[SceneLane]) -> None:
        self.board.extra[trace] = lanes
        self._filter_again()

    def _filter_again(self) -> None:
        """Update the lanes that are shown; the cursor stays on its lane."""
        board, shown = self.board, self.board.lane_at_cursor
        board.filter_lanes()
        index = board.index_of(shown) if shown else None
        board.cursor_lane = index if index is not None else board.cursor_lane
        self.timeline.reveal_cursor()
        self.show()

    def action_enlarge(self) -> None:
        """Toggle between lanes alone and lanes with list and details."""
        self.enlarged = not self.enlarged
        self.lay_out()

    def action_scroll_detail(self, by: int) -> None:
        box = self.query_one("#detail-box" if self.pane == _GAPS else "#pane")
        box.scroll_relative(y=by * max(box.size.height - 1, 1), animate=False)

    def action_copy(self) -> None:
        self.copy_to_clipboard(self.detail_text.plain)
        self.notify("copied", timeout=2, markup=False)


def browse(paths: Sequence[Path], beside: Sequence[Path] = ()) -> int:
    """Show one run, or two side by side, until the user leaves; return the exit code.

    Raises InputError where a trace cannot be read.
    """
    app = BrowseApp([paths, beside] if beside else [paths])
    app.run()
    if app.error is not None:
        raise app.error
    return app.return_code or 0
