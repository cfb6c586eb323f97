"""Handling of broken input by readers: error policy for files, validation of event times."""

from __future__ import annotations

from typing import Final

import numpy as np

from gputrace.errors import InputError
from gputrace.model.events import UNKNOWN, Events
from gputrace.model.trace import Quality


class ErrorPolicy:
    """Policy for recoverable errors in one file: raise them, or collect them in ``errors``."""

    def __init__(self, allowed: bool = False) -> None:
        self.allowed = allowed
        self.errors: list[InputError] = []

    def meet(self, error: InputError) -> None:
        """Record a recoverable error; raise it unless errors are allowed."""
        if not self.allowed:
            raise error
        self.errors.append(error)


STOP: Final = ErrorPolicy()
"""Policy that raises every error."""


_BEYOND: Final = 1 << 62
"""Nanoseconds beyond any clock: 146 years."""
_FAR_LONGER: Final = 2
"""Ratio to the longest duration beyond which a start at 0 is not believed."""


def drop_invalid_rows(events: Events, quality: Quality, where: str = "") -> Events:
    """Drop rows with invalid times, and count them in ``quality`` under ``where``.

    CUPTI writes 0 for a timestamp it could not take (``CUpti_ActivityKernel9::start``). Rows of
    zero duration are kept: they happened, and add nothing to any sum.
    """
    start, end = events.start, events.end
    if len(events) and start.min() > 0 and end.max() <= _BEYOND and (end >= start).all():
        return events
    beyond = (start < -_BEYOND) | (start > _BEYOND) | (end > _BEYOND)
    null = (start == UNKNOWN) | (end == UNKNOWN)
    negative = (end < start) & ~beyond & ~null
    # A row that starts at 0 and would be far longer than all others has lost its start.
    timed = ~beyond & ~null & (start != 0)
    is_long = end > _FAR_LONGER * int((end - start)[timed].max()) if timed.any() else False
    lost = (start == 0) & ((end == 0) | is_long)
    without_time = (null | lost) & ~beyond & ~negative
    quality.drop("end before start", int(np.count_nonzero(negative)), where)
    quality.drop("no timestamp", int(np.count_nonzero(without_time)), where)
    quality.drop("impossible time", int(np.count_nonzero(beyond)), where)
    bad = negative | without_time | beyond
    return events.select(~bad) if bad.any() else events
