"""Rows whose times make no sense, told apart once for all readers."""

from __future__ import annotations

from typing import Final

import numpy as np

from gputrace.traces.events import UNKNOWN, Events, Mask
from gputrace.traces.quality import Quality

_BEYOND: Final = 1 << 62
"""Nanoseconds past any clock: 146 years."""

_FAR_LONGER: Final = 2
"""A row that starts at 0 and lasts this many times as long as any other has lost its start."""


def drop_broken(events: Events, quality: Quality, where: str = "") -> Events:
    """Leaves out rows that no time can be given to, and counts them as those of ``where``.

    CUPTI writes 0 for a timestamp it could not take (``CUpti_ActivityKernel9::start``). A row of
    no duration stays: it happened, and adds nothing to any sum.
    """
    start, end = events.start, events.end
    if len(events) and start.min() > 0 and end.max() <= _BEYOND and (end >= start).all():
        return events
    beyond = (start < -_BEYOND) | (start > _BEYOND) | (end > _BEYOND)
    null = (start == UNKNOWN) | (end == UNKNOWN)
    negative = (end < start) & ~beyond & ~null
    lost = (start == 0) & ((end == 0) | _lost_start(events, ~beyond & ~null))
    without_time = (null | lost) & ~beyond & ~negative
    quality.drop("end before start", int(np.count_nonzero(negative)), where)
    quality.drop("no timestamp", int(np.count_nonzero(without_time)), where)
    quality.drop("impossible time", int(np.count_nonzero(beyond)), where)
    bad = negative | without_time | beyond
    return events.select(~bad) if bad.any() else events


def _lost_start(events: Events, usable: Mask) -> Mask:
    """Rows that start at 0 and would, with that start, be far longer than all others."""
    others = usable & (events.start != 0)
    if len(others) == np.count_nonzero(others) or not others.any():
        return np.zeros(len(events), bool)
    longest = int((events.end - events.start)[others].max())
    lost: Mask = (events.start == 0) & (events.end > _FAR_LONGER * longest)
    return lost
