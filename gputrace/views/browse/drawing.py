"""Lanes as rows of characters: bars of exact classes, with words where there is room for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from rich.segment import Segment
from rich.style import Style

from gputrace.analyzers.results import IDLE_CAUSES
from gputrace.analyzers.scene.cells import EIGHTHS, Bars, edges_of, stack
from gputrace.analyzers.scene.curves import CURVES, Curve
from gputrace.analyzers.scene.gap_table import GapTable
from gputrace.views.browse.lanes import ShownLane
from gputrace.views.browse.viewport import Viewport
from gputrace.views.palette import LEVELS, LOOKS, Palette
from gputrace.views.words import duration, label

_CURVE: Final = Style(color="#9aa5b8")
_UNITS: Final = {
    "utilization": (1, "%"),
    "smClock": (1, "MHz"),
    "power": (1_000, "W"),
    "memoryUsed": (1 << 30, "GiB"),
    "temperature": (1, "°C"),
}
"""By curve, what a unit of it is made of, and its sign."""
_SHORTEST_WORD: Final = 6
"""Cells that something must be wide to be named."""
_MOST_ROWS: Final = 200_000
"""Of more operations than that in view, hardly one is wide enough to be named."""


@dataclass(frozen=True, slots=True)
class Words:
    """A text on a lane, within some cells."""

    first: int
    last: int
    text: str
    ground: str
    """The class that it names."""


class Row:
    """One line of characters, each with a style."""

    def __init__(self, letters: list[str], styles: list[Style]) -> None:
        self.letters, self.styles = letters, styles

    def write(self, first: int, text: str, style: Style) -> None:
        """Puts a text over what is there, as far as there is room."""
        for place, letter in enumerate(text, first):
            if 0 <= place < len(self.letters):
                self.letters[place], self.styles[place] = letter, style

    def restyle(self, first: int, last: int, style: Style) -> None:
        """Adds to the style of some cells."""
        for place in range(max(first, 0), min(last, len(self.styles))):
            self.styles[place] = self.styles[place] + style

    def segments(self) -> list[Segment]:
        """As few as the changes of style allow."""
        place, found = 0, []
        for _, run in groupby(self.styles, key=id):
            count = sum(1 for _ in run)
            text = "".join(self.letters[place : place + count])
            found.append(Segment(text, self.styles[place]))
            place += count
        return found


def draw_bars(
    shown: ShownLane, view: Viewport, width: int, height: int, palette: Palette
) -> list[Row]:
    """A lane as rows, the top one first."""
    lane = shown.lane
    if lane.part in CURVES:
        return draw_curve(lane.curves[0], shown.zero, view, width, height)
    edges = edges_of(view.start + shown.zero, view.end + shown.zero, width)
    bars = stack(lane.layers.split(edges), np.maximum(np.diff(edges), 1), height)
    return bar_rows(bars, (*lane.layers.classes, ""), palette)


def draw_curve(curve: Curve, zero: int, view: Viewport, width: int, height: int) -> list[Row]:
    """A curve as rows, filled up to its mean in each cell."""
    means = curve.means(edges_of(view.start + zero, view.end + zero, width))
    filled = np.nan_to_num(np.clip(means / curve.top, 0, 1)) * height * EIGHTHS
    rows = []
    for row in range(height - 1, -1, -1):
        levels = np.clip(np.rint(filled - row * EIGHTHS), 0, EIGHTHS).astype(int).tolist()
        rows.append(Row([LEVELS[level] for level in levels], [_CURVE] * width))
    return rows


def curve_value(curve: Curve, zero: int, view: Viewport) -> str:
    """The mean in the window, in few letters."""
    mean = float(curve.means(edges_of(view.start + zero, view.end + zero, 1))[0])
    scale, unit = _UNITS[curve.name]
    return "" if np.isnan(mean) else f"{mean / scale:.0f}{unit}"


def bar_rows(bars: Bars, names: Sequence[str], palette: Palette) -> list[Row]:
    """Bars of some classes as rows; where there are no colours, the letter of what has most."""
    lists = bars.lower.tolist(), bars.upper.tolist(), bars.level.tolist()
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


def gap_words(number: int, table: GapTable, view: Viewport, width: int) -> Iterator[Words]:
    """The gaps of a lane that are wide enough to be named: their cause and length."""
    first, last = table.of_lane(number)
    begin = first + int(np.searchsorted(table.end[first:last], view.start, "right"))
    stop = first + int(np.searchsorted(table.start[first:last], view.end))
    long = table.end[begin:stop] - table.start[begin:stop] >= _needed(view, width)
    for row in (np.flatnonzero(long) + begin).tolist():
        start, end = int(table.start[row]), int(table.end[row])
        cause, length = IDLE_CAUSES[int(table.cause[row])], duration(end - start)
        told = f"{cause.replace('other_idle', 'unexplained').replace('_', ' ')} {length}"
        brief = f"{LOOKS[cause].short} {length}"
        yield from _fitted(start, end, (told, brief, LOOKS[cause].short), cause, view, width)


def operation_words(
    shown: ShownLane, names: Mapping[int, str], view: Viewport, width: int
) -> Iterator[Words]:
    """The operations of a lane that are wide enough to be named."""
    own = shown.lane.operations
    if own is None:
        return
    begin = int(np.searchsorted(own.reach, view.start + shown.zero, "right"))
    stop = int(np.searchsorted(own.start, view.end + shown.zero))
    if stop - begin > _MOST_ROWS:
        return
    length = own.end[begin:stop] - own.start[begin:stop]
    rows = np.flatnonzero(length >= _needed(view, width)) + begin
    # What the partition shows on top is written last.
    for row in rows[np.argsort(-own.classes[rows], kind="stable")].tolist():
        name = label(names.get(int(own.events.name[row]), ""))
        start, end = int(own.start[row]) - shown.zero, int(own.end[row]) - shown.zero
        ground = shown.lane.layers.classes[int(own.classes[row])]
        yield from _fitted(start, end, (name,), ground, view, width)


def _needed(view: Viewport, width: int) -> int:
    return view.length * _SHORTEST_WORD // max(width, 1)


def _fitted(
    start: int, end: int, texts: Sequence[str], ground: str, view: Viewport, width: int
) -> Iterator[Words]:
    """The first of some texts that fits between two moments, else the last, cut."""
    first = max(view.cell_of(start, width) + 1, 0)
    last = min(view.cell_of(end, width), width)
    room = last - first
    text = next((text for text in texts if len(text) <= room), texts[-1])
    if room < _SHORTEST_WORD - 2 or not text:
        return
    fitted = text if len(text) <= room else text[: room - 1] + "…"
    yield Words(first, first + len(fitted), fitted, ground)


def legend(names: list[str], palette: Palette) -> list[Segment]:
    """A swatch and a name for each class."""
    found = []
    for name in names:
        swatch, style = palette.swatch(name)
        found += [Segment(swatch, style), Segment(f"{palette.look(name).short} ")]
    return found
