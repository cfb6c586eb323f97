"""The window that is in view on the time axis: plain arithmetic of whole nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

MARGIN: Final = 0.02
"""What is left free on either side of what is fitted, as a part of it."""


@dataclass(frozen=True)
class Viewport:
    """A window within the bounds of all that there is.

    It always lies within the bounds, and never gets shorter than ``shortest``.
    """

    start: int
    end: int
    low: int
    high: int
    shortest: int = 100

    @property
    def length(self) -> int:
        return self.end - self.start

    def show(self, start: int, end: int) -> Viewport:
        """The window nearest to the one asked for."""
        whole = max(self.high - self.low, 1)
        length = min(max(end - start, min(self.shortest, whole)), whole)
        start += (end - start - length) // 2
        start = min(max(start, self.low), self.low + whole - length)
        return replace(self, start=start, end=start + length)

    def fit(self, start: int, end: int) -> Viewport:
        """A stretch with a little room on both sides."""
        margin = round((end - start) * MARGIN)
        return self.show(start - margin, end + margin)

    def whole(self) -> Viewport:
        return self.show(self.low, self.high)

    def zoom(self, factor: float, anchor: int | None = None) -> Viewport:
        """``factor`` times as long; the anchor keeps its place on the screen."""
        if anchor is None or not self.start <= anchor <= self.end:
            anchor = (self.start + self.end) // 2
        length = max(round(self.length * factor), 1)
        length = min(max(length, self.shortest), max(self.high - self.low, 1))
        before = round((anchor - self.start) * length / self.length)
        return self.show(anchor - before, anchor - before + length)

    def pan(self, part: float) -> Viewport:
        """To the right by a part of its length; to the left by a negative one."""
        by = round(self.length * part) or (1 if part > 0 else -1)
        return self.show(self.start + by, self.end + by)

    def center(self, moment: int) -> Viewport:
        start = moment - self.length // 2
        return self.show(start, start + self.length)

    def reveal(self, start: int, end: int) -> Viewport:
        """Moved, and made longer only if it must be, so that a stretch is in view."""
        if start >= self.start and end <= self.end:
            return self
        if end - start > self.length * (1 - 2 * MARGIN):
            return self.fit(start, end)
        return self.center((start + end) // 2)

    def within(self, low: int, high: int) -> Viewport:
        """The same window in other bounds."""
        return replace(self, low=low, high=high).show(self.start, self.end)

    def cell_of(self, moment: int, cells: int) -> int:
        """The cell that a moment lies in; outside of 0 to ``cells`` if it is not in view."""
        return (moment - self.start) * cells // max(self.length, 1)

    def moment_of(self, cell: int, cells: int) -> int:
        """Where a cell begins."""
        return self.start + self.length * cell // max(cells, 1)
