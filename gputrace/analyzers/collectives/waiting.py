"""How long each GPU waits for other ranks in its communication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.intervals import Intervals, Times
from gputrace.analyzers.partition import Timeline
from gputrace.traces.events import UNKNOWN


@dataclass(frozen=True)
class Waiting:
    """One GPU in collectives, as far as it is waiting."""

    waits: Intervals
    """When it ran a collective to which the last rank had not come."""
    unknown: Intervals
    """When it ran one of which the last arrival is not known."""

    def within(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Nanoseconds of windows spent waiting; `UNKNOWN` where any of it is not known."""
        unknown = self.unknown.within(starts, ends) > 0
        return np.where(unknown, UNKNOWN, self.waits.within(starts, ends))


def find_waiting(timeline: Timeline, waits: Waiting) -> Waiting:
    """The waiting of a GPU in the class ``communication``, of that in its collectives."""
    communication = timeline.of_class(OperationClass.COMMUNICATION)
    return Waiting(
        communication.intersection(waits.waits), communication.intersection(waits.unknown)
    )
