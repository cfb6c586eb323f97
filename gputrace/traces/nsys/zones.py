"""Which rows of a table may lie in a window, as told by having read all of them once.

Recorders write rows more or less in order of time, so that a window needs few of them. Nothing
relies on that order: rows out of it only make the part larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gputrace.traces.arrow import Integers
from gputrace.traces.trace import Window

_ROWS: Final = 1 << 12
"""Rows of a zone."""


@dataclass(frozen=True)
class Zones:
    """The earliest start and the latest end in each stretch of a table's rows."""

    first: int
    """The first rowid."""
    start: Integers
    end: Integers

    def rows(self, window: Window) -> tuple[int, int]:
        """The rowids, the end not included, outside of which no row touches a window."""
        near = np.flatnonzero((self.start < window.end) & (self.end >= window.start))
        if not len(near):
            return self.first, self.first
        return self.first + int(near[0]) * _ROWS, self.first + (int(near[-1]) + 1) * _ROWS


def find_zones(start: Integers, end: Integers, bounds: tuple[int, int] | None) -> Zones | None:
    """The zones of all rows of a table in order of rowid; None where rowids have holes.

    ``bounds`` are the first rowid and the last.
    """
    if bounds is None or len(start) != bounds[1] - bounds[0] + 1:
        return None
    edges = np.arange(0, len(start), _ROWS)
    return Zones(bounds[0], np.minimum.reduceat(start, edges), np.maximum.reduceat(end, edges))


def joined_zones(parts: Sequence[Zones | None]) -> Zones | None:
    """The zones of stretches of whole zones, in order; None where one of them has none."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return Zones(
        known[0].first,
        np.concatenate([part.start for part in known]),
        np.concatenate([part.end for part in known]),
    )
