"""Which rows of a long file are kept: those that touch a window, and their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.events import UNKNOWN, Mask
from gputrace.traces.kineto.decode import Event, Value
from gputrace.traces.trace import Window

FAR: Final = 3_600 * 1_000_000_000
"""A time of 0 so far before all others, in nanoseconds, is none."""

NOTHING: Final = Window(-(1 << 62), -(1 << 62))

_Place = tuple[bool, str | None, Value, Value]
"""Before the window or after it, and of which stream, or of which thread's rows of one sort."""


class Kept:
    """Rows that touch a window, and on each side of it the nearest of each stream and thread.

    Rows whose times make no sense are kept, so that they are counted.

    Attributes:
        touched: whether any row touches the window.
    """

    def __init__(self, window: Window = NOTHING, first: int = 0) -> None:
        """``window`` is of the file's own times, of which ``first`` is the earliest."""
        self._window, self._zero_is_lost = window, first > FAR
        self._nearest: dict[_Place, tuple[int, Event]] = {}
        self.touched = False

    def choose(
        self, events: Sequence[Event], start: NDArray[np.int64], end: NDArray[np.int64]
    ) -> Mask:
        """Which of some rows are kept; the nearest ones come at the end, by `nearest`."""
        window = self._window
        odd = (start == UNKNOWN) | (end == UNKNOWN) | (end < start)
        if self._zero_is_lost or window == NOTHING:
            odd |= start == 0
        touching: Mask = (start < window.end) & (end > window.start)
        if window != NOTHING:
            self._note(False, events, end - window.start, ~odd & (end <= window.start))
            self._note(True, events, window.end - start, ~odd & (start >= window.end))
        self.touched |= bool((touching & ~odd).any())
        chosen: Mask = touching | odd
        return chosen

    def _note(
        self, after: bool, events: Sequence[Event], closeness: NDArray[np.int64], rows: Mask
    ) -> None:
        """Takes the closest of some rows that are on one side of the window."""
        here = np.flatnonzero(rows)
        here = here[np.argsort(closeness[here], kind="stable")]
        last = {
            (after, event.cat, event.pid, event.tid): (close, event)
            for event, close in zip(
                map(events.__getitem__, here.tolist()), closeness[here].tolist(), strict=True
            )
        }
        for place, (close, event) in last.items():
            known = self._nearest.get(place)
            if known is None or known[0] < close:
                self._nearest[place] = close, event.copied()

    def nearest(self) -> list[Event]:
        """The rows nearest to the window, which it does not touch."""
        return [event for _, event in self._nearest.values()]
