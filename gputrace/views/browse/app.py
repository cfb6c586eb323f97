"""The browser as a whole: what is told of the selection, and the lanes that are read on demand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from gputrace.analyzers.scene.gap_detail import GapDetail, operation_at
from gputrace.analyzers.scene.gap_table import GapFilter
from gputrace.analyzers.scene.launches import Launch
from gputrace.analyzers.scene.scene import SceneLane
from gputrace.views.browse.asking import Asking
from gputrace.views.browse.describing import gap_text, operation_text
from gputrace.views.browse.lanes import Picked, ShownLane
from gputrace.views.palette import Palette

_ROWS_WITH_CURVE: Final = 4
"""Rows for each GPU from which there is a curve below it from the start, if there are samples."""
_REST_S: Final = 0.05
"""How long a gap has been selected before the trace is asked about it."""


class BrowseApp(Asking):
    """The browser."""

    detail_text = Text()
    """What is told of the selection."""
    _followed: tuple[Picked, int] | None = None
    _opened = False

    def _begin(self) -> None:
        """Shows the worst gap with a step on either side of it, the first time."""
        if self._opened:
            self.select(0)
            return
        self._opened = True
        if not len(self.board.rows):
            self.board.gap_filter = GapFilter()
            self.board.rows = self.board.arrange(self.board.table)
        self.board.view = self.board.view.whole()
        room = self.timeline.most_rows >= _ROWS_WITH_CURVE * len(self.board.gpus)
        if room and (known := self.board.known_curves()):
            self.board.curve = known[0]
            self.board.filter_lanes()
        if not len(self.board.rows):
            return
        self.select(0)
        start, end = self.board.gap_span(int(self.board.rows[0]))
        step = self.board.step_span(start) or (start, end)
        length = max(step[1] - step[0], end - start)
        self.board.view = self.board.view.show(start - length // 2, start + 3 * length // 2)

    def show_detail(self) -> None:
        board = self.board
        if board.picked is not None:
            self._show_operation(board.picked)
        elif board.selected is not None:
            self._show_gap(board.selected)
        else:
            self._tell_detail(Text())

    def _tell_detail(self, text: Text) -> None:
        self.detail_text = text
        self.tell("#detail", text)

    def _show_gap(self, row: int) -> None:
        """Asks the trace; meanwhile, and for gaps that were left again, nothing changes."""
        board = self.board
        shown = board.gpus[int(board.table.lane[row])]
        source, scene = self.sources[shown.trace], board.scenes[shown.trace]
        own = row - board.first_gap(shown.trace)

        def read() -> None:
            if scene is not None and board.selected == row and board.picked is None:
                detail = source.detail(scene, own)
                self.later(lambda: self._gap_read(row, shown, detail))

        # Reading would slow the frame that shows the selection, and those of a key held down.
        self.set_timer(_REST_S, lambda: source.ask(read))

    def _gap_read(self, row: int, shown: ShownLane, detail: GapDetail) -> None:
        if self.board.selected != row or self.board.picked is not None:
            return
        labels = [gpu.label for gpu in self.board.gpus if gpu.trace == shown.trace]
        where = self.board.steps_around(row)
        self._tell_detail(gap_text(detail, shown.label, labels, shown.zero, where))

    def _show_operation(self, picked: Picked) -> None:
        source, own = self.sources[picked.lane.trace], picked.lane.lane.operations
        scene = self.board.scenes[picked.lane.trace]
        assert own is not None

        def read() -> None:
            if scene is not None and self.board.picked == picked:
                operation = operation_at(scene, own, picked.row)
                launch = source.issuer(scene, own, picked.row)
                what = picked.lane.lane.layers.classes[int(own.classes[picked.row])]
                label, zero = picked.lane.label, picked.lane.zero
                text = operation_text(operation, launch, label, what, zero)
                self.later(lambda: self._tell_detail(text))

        source.ask(read)

    def action_follow(self) -> None:
        """From an operation to the call that issued it, and back."""
        board, picked = self.board, self.board.picked
        if picked is None:
            self.notify("pick an operation first (e, or click on one)", markup=False)
            return
        if self._followed is not None and self._followed[0] == picked:
            self._followed = None
            self.pick(picked)
            return
        source, own = self.sources[picked.lane.trace], picked.lane.lane.operations
        scene = board.scenes[picked.lane.trace]
        assert own is not None

        def read() -> None:
            launch = source.issuer(scene, own, picked.row) if scene else None
            self.later(lambda: self._go_to(picked, launch))

        source.ask(read)

    def _go_to(self, picked: Picked, launch: Launch | None) -> None:
        """Shows a launch, and its operation with it."""
        own = picked.lane.lane.operations
        if launch is None or own is None:
            self.notify("the trace does not tell which call issued it", markup=False)
            return
        at, end = (ns - picked.lane.zero for ns in (launch.start_ns, int(own.end[picked.row])))
        self._followed = picked, at
        self.board.cursor = at
        self.board.view = self.board.view.fit(min(at, end), max(at, end))
        self.show()

    def action_curves(self) -> None:
        """The next curve below the GPUs; after the last, none."""
        known = ["", *self.board.known_curves()]
        if len(known) == 1:
            self.notify("the trace has no samples of NVML", markup=False)
            return
        place = known.index(self.board.curve) if self.board.curve in known else 0
        self.board.curve = known[(place + 1) % len(known)]
        self._filter_again()

    def action_streams(self) -> None:
        self._toggle_parts(threads=False)

    def action_threads(self) -> None:
        self._toggle_parts(threads=True)

    def _toggle_parts(self, *, threads: bool) -> None:
        for source in self.sources:
            own = self.board.extra[source.number]
            kept = [lane for lane in own if (lane.operations is None) != threads]
            if len(kept) < len(own):
                self._take_parts(source.number, kept)
                continue
            self.notify("reading …", timeout=1, markup=False)

            scene = self.board.scenes[source.number]

            def read(source: Any = source, kept: Any = kept, scene: Any = scene) -> None:
                parts = source.parts(scene, threads) if scene else []
                self.later(lambda: self._take_parts(source.number, kept + parts))

            source.ask(read)

    def _take_parts(self, trace: int, lanes: list[SceneLane]) -> None:
        self.board.extra[trace] = lanes
        self._filter_again()

    def _filter_again(self) -> None:
        """The lanes that are to be shown; the cursor stays on its lane."""
        board, shown = self.board, self.board.lane_at_cursor
        board.filter_lanes()
        place = board.place_of(shown) if shown else None
        board.cursor_lane = place if place is not None else board.cursor_lane
        self.timeline.reveal_cursor()
        self.show()

    def action_letters(self) -> None:
        """Letters for colours, and colours again."""
        colors = 16 if self.console.color_system == "standard" else 1 << 24
        self.use_palette(Palette(0 if self.palette.colors else colors))
        self.show()

    def action_enlarge(self) -> None:
        """Hides the list and the detail, or shows them again."""
        self.enlarged = not self.enlarged
        self.query_one("#below").display = not self.enlarged
        self.on_resize()

    def action_scroll_detail(self, by: int) -> None:
        box = self.query_one("#detail-box")
        box.scroll_relative(y=by * max(box.size.height - 1, 1), animate=False)

    def action_copy(self) -> None:
        self.copy_to_clipboard(self.detail_text.plain)
        self.notify("copied", timeout=2, markup=False)


def browse(paths: Sequence[Path], beside: Sequence[Path] = ()) -> int:
    """Shows one run, or two side by side, until the person leaves; gives the exit code.

    Raises InputError where a trace cannot be read.
    """
    app = BrowseApp([paths, beside] if beside else [paths])
    app.run()
    if app.error is not None:
        raise app.error
    return app.return_code or 0
