"""Rows whose times make no sense, told apart once for all readers."""

from __future__ import annotations

from typing import Final

import numpy as np

from gputrace.traces.events import Events, Mask
from gputrace.traces.trace import Quality

_BEYOND: Final = 1 << 62
"""Nanoseconds past any clock: 146 years."""

_FAR_LONGER: Final = 2
"""A row that starts at 0 and lasts this many times as long as any other has lost its start."""


def drop_broken(events: Events, quality: Quality) -> Events:
    """Leaves out rows that no time can be given to, and counts them.

    CUPTI writes 0 for a timestamp it could not take (``CUpti_ActivityKernel9::start``). A row of
    no duration stays: it happened, and adds nothing to any sum.
    """
    start, end = events.start, events.end
    negative = end < start
    without_time = (start == 0) & ((end == 0) | _lost_start(events))
    beyond = (start < -_BEYOND) | (start > _BEYOND) | (end > _BEYOND)
    quality.drop("end before start", int(np.count_nonzero(negative & ~beyond)))
    quality.drop("no timestamp", int(np.count_nonzero(without_time & ~negative)))
    quality.drop("impossible time", int(np.count_nonzero(beyond)))
    bad = negative | without_time | beyond
    return events.select(~bad) if bad.any() else events


def _lost_start(events: Events) -> Mask:
    """Rows that start at 0 and would, with that start, be far longer than all others."""
    at_zero = events.start == 0
    if not at_zero.any() or at_zero.all():
        return np.zeros(len(events), bool)
    longest = int((events.end - events.start)[~at_zero].max())
    lost: Mask = at_zero & (events.end > _FAR_LONGER * longest)
    return lost
