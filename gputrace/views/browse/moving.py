"""Keys and the mouse that move the window, the cursor and the selection."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gputrace.analyzers.scene.gap_table import SORTS
from gputrace.analyzers.scene.scene import most_visible
from gputrace.views.browse.base import Base
from gputrace.views.browse.gap_list import GapList
from gputrace.views.browse.lanes import Picked
from gputrace.views.browse.timeline import Timeline

_AROUND = 1.0
"""How much of a gap's length is shown on either side of it."""


class Moving(Base):
    """Moves."""

    def on_timeline_moved(self, message: Timeline.Moved) -> None:
        view = self.board.view
        if message.zoom != 1.0:
            view = view.zoom(message.zoom, message.anchor)
        if message.pan:
            view = view.pan(message.pan)
        self.board.view = view
        self.show()

    def on_timeline_clicked(self, message: Timeline.Clicked) -> None:
        self.board.cursor_lane, self.board.cursor = message.lane, message.moment
        self.action_pick()

    def on_gap_list_chosen(self, message: GapList.Chosen) -> None:
        self.select(message.place)

    def action_zoom(self, factor: float) -> None:
        self.board.view = self.board.view.zoom(factor, self.board.cursor)
        self.show()

    def action_pan(self, part: float) -> None:
        self.board.view = self.board.view.pan(part)
        self.show()

    def action_fit_run(self) -> None:
        self.board.view = self.board.view.whole()
        self.show()

    def action_fit_step(self) -> None:
        span = self.board.step_span(self.board.cursor)
        if span is None:
            self.notify("no steps were found", markup=False)
            return
        self.board.view = self.board.view.fit(*span)
        self.show()

    def action_fit_gap(self) -> None:
        if self.board.selected is not None:
            start, end = self.board.gap_span(self.board.selected)
            around = round((end - start) * _AROUND)
            self.board.view = self.board.view.show(start - around, end + around)
            self.show()

    def action_step(self, by: int) -> None:
        """The next or the previous step; the window keeps its length."""
        found = self.board.steps_at(self.board.lane_at_cursor)
        if found is None:
            self.notify("no steps were found", markup=False)
            return
        steps, zero = found
        at = self.board.cursor + zero
        place = int(np.searchsorted(steps.start, at, "right" if by > 0 else "left"))
        place = min(max(place - (by < 0), 0), len(steps) - 1)
        start, end = int(steps.start[place]) - zero, int(steps.end[place]) - zero
        self.board.cursor = start
        self.board.view = self.board.view.reveal(start, end)
        self.show()

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
        """Selects what is under the cursor: the gap, or the operation that shows there."""
        board, shown = self.board, self.board.lane_at_cursor
        if shown is None:
            return
        cell = max(board.view.length // self.timeline.cells, 1)
        row = most_visible(shown.lane, board.cursor + shown.zero, board.cursor + shown.zero + cell)
        gap = None
        if shown.number >= 0:
            gap = board.table.find(board.gpus.index(shown), board.cursor + cell // 2)
        if gap is not None:
            self.select_gap(gap)
        elif row is not None:
            board.picked = Picked(shown, row)
            self.show_detail()
        self.show()

    def action_gap(self, by: int) -> None:
        self.select(self.gap_list.place + by if self.board.selected is not None else 0)

    def action_gap_page(self, by: int) -> None:
        self.select(self.gap_list.place + by * max(self.gap_list.size.height - 1, 1))

    def action_gap_first(self) -> None:
        self.select(0)

    def select(self, place: int) -> None:
        """Selects a row of the list, and brings its gap into view."""
        board = self.board
        if not len(board.rows):
            return
        self.gap_list.place = min(max(place, 0), len(board.rows) - 1)
        row = int(board.rows[self.gap_list.place])
        self.select_gap(row)
        board.view = board.view.reveal(*board.gap_span(row))
        self.timeline.reveal_cursor()
        self.show()

    def select_gap(self, row: int) -> None:
        """Selects a row of the table of gaps; the list follows where it has that row."""
        board = self.board
        board.selected, board.picked = row, None
        board.cursor = board.gap_span(row)[0]
        place = board.place_of(board.gpus[int(board.table.lane[row])])
        board.cursor_lane = board.cursor_lane if place is None else place
        listed = np.flatnonzero(board.rows == row)
        if len(listed):
            self.gap_list.place = int(listed[0])
        self.show_detail()

    def show_detail(self) -> None:
        """Tells of what is selected."""

    def action_sort(self) -> None:
        following = SORTS.index(self.board.sort) + 1
        self.board.sort = SORTS[following % len(SORTS)]
        self.board.descending = self.board.sort == "length"
        self.rearrange(self._reselect)

    def action_reverse(self) -> None:
        self.board.descending = not self.board.descending
        self.rearrange(self._reselect)

    def action_steady(self) -> None:
        chosen = self.board.gap_filter
        self.board.gap_filter = replace(chosen, steady=not chosen.steady)
        self.rearrange(self._reselect)

    def action_between(self) -> None:
        chosen = self.board.gap_filter
        self.board.gap_filter = replace(chosen, between=not chosen.between)
        self.rearrange(self._reselect)

    def _reselect(self) -> None:
        """The selection stays where it is if it is still listed; else the first is selected."""
        listed = np.flatnonzero(self.board.rows == self.board.selected)
        self.select(int(listed[0]) if len(listed) else 0)

    def action_mark(self) -> None:
        """Up to two marks; a third begins anew."""
        marks = self.board.marks if len(self.board.marks) < 2 else ()
        self.board.marks = (*marks, self.board.cursor)
        self.show()

    def action_clear(self) -> None:
        self.board.marks, self.board.picked = (), None
        self.show_detail()
        self.show()

    def action_align(self) -> None:
        """Lays the second trace so that its step begins with that of the first of its number."""
        board = self.board
        if len(board.scenes) < 2 or None in board.scenes:
            self.notify("there is one trace; give another with --beside", markup=False)
            return
        first, second = board.same_step(board.cursor)
        if first is None or second is None:
            self.notify("no steps were found in one of them", markup=False)
            return
        board.shifts[1] += second - first
        board.cursor = first
        board.forget()
        board.rebuild()
        self.show_detail()
        self.rearrange()
