"""Keys that ask for a line first: searches, filters, jumps, files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.scene.scene import next_named
from gputrace.units import parse_duration
from gputrace.views.browse.lanes import Picked
from gputrace.views.browse.moving import Moving
from gputrace.views.browse.picture import picture
from gputrace.views.browse.screens import Help, Prompt
from gputrace.views.browse.typed import parse_filter, parse_ranks


class Asking(Moving):
    """Asks."""

    pattern = ""
    """What was searched for last."""
    found_names: Mapping[int, NDArray[np.int64]] = MappingProxyType({})
    """By trace, the names that have it."""

    def ask(self, question: str, value: str, then: Callable[[str], Any]) -> None:
        """Asks for a line until ``then`` takes it; errors of it are shown beside the line."""
        self.push_screen(Prompt(question, value, then))

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_search(self) -> None:
        self.ask("operations whose name has (a regular expression):", self.pattern, self._search)

    def _search(self, text: str) -> None:
        try:
            pattern = re.compile(text, re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        found = {
            trace: _found(scene.names, pattern)
            for trace, scene in enumerate(self.board.scenes)
            if scene is not None
        }
        if not text or not any(len(ids) for ids in found.values()):
            raise ValueError(f"no operation's name has {text!r}")
        self.pattern, self.found_names = text, found
        self.action_match(1)

    def action_match(self, by: int) -> None:
        """The next operation that was searched, on any lane of a whole GPU."""
        board = self.board
        lanes = [shown for shown in board.lanes if shown.number >= 0]
        if not self.pattern:
            self.action_search()
            return
        best: tuple[int, Picked] | None = None
        for trace, ids in self.found_names.items():
            own = [shown for shown in lanes if shown.trace == trace]
            after = [board.cursor + shown.zero for shown in own]
            hit = next_named([each.lane for each in own], ids, after, forward=by > 0)
            if hit is not None:
                picked = Picked(own[hit[0]], hit[1])
                away = abs(self._start_of(picked) - board.cursor)
                best = min(best or (away, picked), (away, picked), key=lambda pair: pair[0])
        if best is None:
            self.notify(f"none {'after' if by > 0 else 'before'} the cursor", markup=False)
            return
        self.pick(best[1])

    def _start_of(self, picked: Picked) -> int:
        own = picked.lane.lane.operations
        assert own is not None
        return int(own.start[picked.row]) - picked.lane.zero

    def pick(self, picked: Picked) -> None:
        """Selects an operation and brings it into view."""
        board, own = self.board, picked.lane.lane.operations
        assert own is not None
        board.picked = picked
        board.cursor = self._start_of(picked)
        board.view = board.view.reveal(board.cursor, int(own.end[picked.row]) - picked.lane.zero)
        place = board.place_of(picked.lane)
        board.cursor_lane = board.cursor_lane if place is None else place
        self.timeline.reveal_cursor()
        self.show_detail()
        self.show()

    def action_jump(self) -> None:
        self.ask("time as 28.6s, from the cursor as +5ms, or step as #17:", "", self._jump)

    def _jump(self, text: str) -> None:
        board, text = self.board, text.strip()
        if text.startswith("#"):
            found = board.steps_at(board.lane_at_cursor)
            if found is None or not text[1:].isdecimal() or int(text[1:]) >= len(found[0]):
                raise ValueError(f"{text} is no step of this trace")
            steps, zero = found
            number = int(text[1:])
            board.cursor = int(steps.start[number]) - zero
            board.view = board.view.fit(board.cursor, int(steps.end[number]) - zero)
        else:
            relative = text[:1] in "+-"
            moment = parse_duration(text.removeprefix("+")) + (board.cursor if relative else 0)
            if not board.view.low <= moment <= board.view.high:
                raise ValueError(f"{text} is outside of the trace")
            board.cursor = moment
            board.view = board.view.center(moment)
        self.show()

    def action_ranks(self) -> None:
        self.ask("show ranks, as 0,2-3; nothing for all:", "", self._ranks)

    def _ranks(self, text: str) -> None:
        self.board.ranks = parse_ranks(text, {gpu.lane.rank for gpu in self.board.gpus})
        self.board.filter_lanes()
        self.rearrange(self._reselect)

    def action_beside(self) -> None:
        """The rank at the cursor and the next one alone; again, all."""
        ranks = sorted({gpu.lane.rank for gpu in self.board.gpus})
        shown = self.board.lane_at_cursor
        if self.board.ranks is not None or shown is None:
            self._ranks("")
            return
        place = ranks.index(shown.lane.rank)
        other = ranks[(place + 1) % len(ranks)]
        self._ranks(f"{shown.lane.rank},{other}")

    def action_filter(self) -> None:
        self.ask(
            "gaps: gpu=0,1 cause=data,sync step=8:24 len>1ms; nothing for all:",
            "",
            self._filter,
        )

    def _filter(self, text: str) -> None:
        self.board.gap_filter = replace(
            parse_filter(text, [gpu.label for gpu in self.board.gpus]),
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
        zero, source = self.board.zero(trace), self.sources[trace]

        def cut() -> None:
            source.export(path, view.start + zero, view.end + zero)
            self.later(lambda: self.notify(f"wrote {path}", markup=False))

        source.ask(cut)

    def _write_svg(self, path: Path) -> None:
        path.write_text(picture(self), encoding="utf-8")
        self.notify(f"wrote {path}", markup=False)


def _found(names: Mapping[int, str], pattern: re.Pattern[str]) -> NDArray[np.int64]:
    """The ids of the names in which a pattern is found."""
    return np.array([id for id, name in names.items() if pattern.search(name)], np.int64)
