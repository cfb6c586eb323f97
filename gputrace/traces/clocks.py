"""The clocks of several traces of one run, brought onto one axis.

What aligns them is the wall clock of each machine, which NTP keeps within a millisecond or so. The
analysis corrects the shifts that come from here by collectives, which end at once on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from gputrace.errors import InputError
from gputrace.traces.trace import Trace

MERGED_BY_WALL_CLOCK = (
    "the clocks of different hosts are aligned by their wall clocks only: what one host seems to "
    "wait for another is only as exact as NTP"
)


def wall_clock_shifts(traces: Sequence[Trace]) -> list[int]:
    """Nanoseconds to add to the times of each trace; none is negative, and one is 0.

    Raises InputError for a trace that does not say when it began.
    """
    epochs = [_epoch(trace) for trace in traces]
    return [epoch - min(epochs) for epoch in epochs]


def _epoch(trace: Trace) -> int:
    epoch = trace.session.epoch_ns
    if epoch is None:
        problem = "does not say when it was recorded, so it cannot be merged; analyze it alone"
        raise InputError(trace.path, problem)
    return epoch
