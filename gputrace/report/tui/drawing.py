"""Lanes as rows of characters: bars of the exact classes, with labels where they fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from rich.segment import Segment
from rich.style import Style

from gputrace.analyzers.timeline_model import GapTable
from gputrace.analyzers.timeline_model.cells import CURVES, EIGHTHS, Bars, Curve, edges_of, stack
from gputrace.model.time_class import IDLE_CAUSES
from gputrace.report.palette import LEVELS, LOOKS, Palette
from gputrace.report.tables import label
from gputrace.report.tui.state import CURVE_LOOKS, ShownLane, Viewport
from gputrace.units import format_ns

_CURVE: Final = Style(color="#9aa5b8")
_SHORTEST_WORD: Final = 6
"""Minimum width in cells of a labelled gap or operation."""
_MOST_ROWS: Final = 200_000
"""Maximum operations in view with labels; with more, hardly one is wide enough for a label."""


@dataclass(frozen=True, slots=True)
class Words:
    """Label on a lane, and the cells that it takes."""

    first: int
    last: int
    text: str
    ground: str
    """Class of the labelled time, which colours the background."""


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


def draw_bars(
    shown: ShownLane, view: Viewport, width: int, height: int, palette: Palette
) -> list[Row]:
    """Draw a lane as rows, the top one first."""
    lane = shown.lane
    if lane.part in CURVES:
        return draw_curve(lane.curves[0], shown.zero, view, width, height)
    edges = edges_of(view.start + shown.zero, view.end + shown.zero, width)
    bars = stack(lane.layers.split(edges), np.maximum(np.diff(edges), 1), height)
    return bar_rows(bars, (*lane.layers.classes, ""), palette)


def draw_curve(curve: Curve, zero: int, view: Viewport, width: int, height: int) -> list[Row]:
    """Draw a curve as rows, filled up to its mean in each cell."""
    means = curve.means(edges_of(view.start + zero, view.end + zero, width))
    filled = np.nan_to_num(np.clip(means / curve.top, 0, 1)) * height * EIGHTHS
    rows = []
    for row in range(height - 1, -1, -1):
        levels = np.clip(np.rint(filled - row * EIGHTHS), 0, EIGHTHS).astype(int).tolist()
        rows.append(Row([LEVELS[level] for level in levels], [_CURVE] * width))
    return rows


def curve_value(curve: Curve, zero: int, view: Viewport) -> str:
    """Format the mean of a curve in the window, briefly."""
    mean = float(curve.means(edges_of(view.start + zero, view.end + zero, 1))[0])
    look = CURVE_LOOKS[curve.name]
    return "" if np.isnan(mean) else f"{mean / look.scale:.0f}{look.unit}"


def bar_rows(bars: Bars, names: Sequence[str], palette: Palette) -> list[Row]:
    """Draw bars of classes as rows; without colours, the letter of the class with most time."""
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


def class_words(name: str) -> str:
    """Return a class of time in words, without ``idle:``."""
    special = {"other_idle": "unexplained", "h2d": "host to device", "other_copy": "other copies"}
    return special.get(name, name).replace("_", " ")


def gap_words(number: int, table: GapTable, view: Viewport, width: int) -> Iterator[Words]:
    """Yield labels, cause and length, of the gaps of a lane that are wide enough."""
    first, last = table.of_lane(number)
    begin = first + int(np.searchsorted(table.end[first:last], view.start, "right"))
    stop = first + int(np.searchsorted(table.start[first:last], view.end))
    long = table.end[begin:stop] - table.start[begin:stop] >= _needed(view, width)
    for row in (np.flatnonzero(long) + begin).tolist():
        start, end = int(table.start[row]), int(table.end[row])
        cause, length = IDLE_CAUSES[int(table.cause[row])], format_ns(end - start)
        full = f"{class_words(cause)} {length}"
        brief = f"{LOOKS[cause].short} {length}"
        yield from _fitted(start, end, (full, brief, LOOKS[cause].short), cause, view, width)


def operation_words(
    shown: ShownLane, names: Mapping[int, str], view: Viewport, width: int
) -> Iterator[Words]:
    """Yield labels of the operations of a lane that are wide enough."""
    operations = shown.lane.operations
    if operations is None:
        return
    begin = int(np.searchsorted(operations.reach, view.start + shown.zero, "right"))
    stop = int(np.searchsorted(operations.start, view.end + shown.zero))
    if stop - begin > _MOST_ROWS:
        return
    length = operations.end[begin:stop] - operations.start[begin:stop]
    rows = np.flatnonzero(length >= _needed(view, width)) + begin
    # Classes that take precedence in the partition are written last, over the others.
    for row in rows[np.argsort(-operations.classes[rows], kind="stable")].tolist():
        name = label(names.get(int(operations.events.name[row]), ""))
        start, end = int(operations.start[row]) - shown.zero, int(operations.end[row]) - shown.zero
        ground = shown.lane.layers.classes[int(operations.classes[row])]
        yield from _fitted(start, end, (name,), ground, view, width)


def _needed(view: Viewport, width: int) -> int:
    return view.length * _SHORTEST_WORD // max(width, 1)


def _fitted(
    start: int, end: int, texts: Sequence[str], ground: str, view: Viewport, width: int
) -> Iterator[Words]:
    """Yield the first text that fits between two times, else the last one, cut."""
    first = max(view.cell_of(start, width) + 1, 0)
    last = min(view.cell_of(end, width), width)
    room = last - first
    text = next((text for text in texts if len(text) <= room), texts[-1])
    if room < _SHORTEST_WORD - 2 or not text:
        return
    fitted = text if len(text) <= room else text[: room - 1] + "…"
    yield Words(first, first + len(fitted), fitted, ground)


def legend(names: list[str], palette: Palette) -> list[Segment]:
    """Return a swatch and a name for each class."""
    segments = []
    for name in names:
        swatch, style = palette.swatch(name)
        segments += [Segment(swatch, style), Segment(f"{palette.look(name).short} ")]
    return segments
