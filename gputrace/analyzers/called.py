"""Which steps have all their CUDA calls, where calls were recorded in stretches of the time alone.

What a host did is told of these: in other steps, no call in the trace does not mean that none was
made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gputrace.analyzers.breakdown import Lane
from gputrace.analyzers.grouping import StepsOf
from gputrace.analyzers.host import NOBODY, HostCalls
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.results import RecordedCalls, Step
from gputrace.traces.events import Mask


def with_calls(
    operations: Sequence[GpuOperations], calls: HostCalls | None, steps: tuple[Step, ...]
) -> tuple[Step, ...]:
    """Those of the steps of which every rank has all calls; all steps, where calls always were."""
    if calls is None or all(own.calls_recorded is None for own in operations):
        return steps
    steps_of = StepsOf(steps)
    lacking = {
        step.step
        for own in operations
        for step, has in _each(own, calls, steps_of(own.gpu))
        if not has
    }
    return tuple(step for step in steps if step.step not in lacking)


def _each(own: GpuOperations, calls: HostCalls, mine: Sequence[Step]) -> list[tuple[Step, bool]]:
    """The steps of a GPU, each with whether all calls of it were recorded."""
    if not mine or own.calls_recorded is None:
        return [(step, True) for step in mine]
    starts, ends = np.array([(step.start_ns, step.end_ns) for step in mine], np.int64).T
    has = _are_whole(own, calls, starts, ends)
    return list(zip(mine, has.tolist(), strict=True))


def _are_whole(own: GpuOperations, calls: HostCalls, starts: Times, ends: Times) -> Mask:
    """Whether steps lie in a recorded stretch each, and what was issued for them, too.

    That begins where the operation before a step was issued: from there on its host is seen.
    """
    first = np.minimum(np.searchsorted(own.start, starts), len(own) - 1)
    begins, known = starts, np.ones(len(starts), np.bool_)
    for row in (first, np.maximum(first - 1, 0)):
        issued_by = calls.issued_by(own.events.select(row))
        known &= issued_by != NOBODY
        begins = np.minimum(begins, calls.start[issued_by])
    # A GPU that has nothing to do in a step.
    idle = own.start[first] >= ends
    begins = np.where(idle, starts, begins)
    whole: Mask = (known | idle) & calls.all_recorded(own.gpu.process, begins, ends)
    return whole


def tell_calls(
    lanes: Sequence[Lane], measured: Sequence[Step], steps: Sequence[Step]
) -> RecordedCalls | None:
    """How much of the calls was recorded; None where all were.

    Args:
        lanes: of all GPUs.
        measured: the steps that have all calls.
        steps: all that would be measured if calls had been recorded throughout.
    """
    sampled = [lane for lane in lanes if lane.with_calls is not None]
    if not sampled:
        return None
    recorded = sum(lane.with_calls.total for lane in sampled if lane.with_calls is not None)
    span = sum(lane.window.end - lane.window.start for lane in sampled)
    have = len({step.step for step in measured})
    return RecordedCalls(round(recorded / max(span, 1), 4), have, len({s.step for s in steps}))
