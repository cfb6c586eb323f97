"""Which steps have all their CUDA calls, where calls were recorded in stretches of the time alone.

What a host did is told of these: in other steps, no call in the trace does not mean that none was
made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gputrace.analyzers.grouping import StepsOf
from gputrace.analyzers.host import NOBODY
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.results import RecordedCalls, Step
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.events import Mask


def with_calls(gpus: PerGpu, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Those of the steps of which every rank has all calls; all steps, where calls always were."""
    steps_of = StepsOf(steps)
    sampled = [own for own in gpus.operations if own.calls_recorded is not None]
    sampled = [own for own in sampled if steps_of(own.gpu)]
    if not gpus.has_calls or not sampled:
        return steps
    mine = [steps_of(own.gpu) for own in sampled]
    edges = [np.array([(s.start_ns, s.end_ns) for s in own], np.int64).T for own in mine]
    found = gpus.each(_are_whole, sampled, *zip(*edges, strict=True))
    lacking = {
        step.step
        for own, whole in zip(mine, found, strict=True)
        for step, has in zip(own, whole.tolist(), strict=True)
        if not has
    }
    return tuple(step for step in steps if step.step not in lacking)


def _are_whole(one: OneGpu, starts: Times, ends: Times) -> Mask:
    """Whether steps lie in a recorded stretch each, and what was issued for them, too.

    That begins where the operation before a step was issued: from there on its host is seen.
    """
    own, calls = one.operations, one.calls
    first = np.minimum(np.searchsorted(own.start, starts), len(own) - 1)
    # A GPU that has nothing to do in a step.
    idle = own.start[first] >= ends
    if calls is None:
        return idle
    begins, known = starts, np.ones(len(starts), np.bool_)
    for row in (first, np.maximum(first - 1, 0)):
        issued_by = calls.issued_by(own.events.select(row))
        known &= issued_by != NOBODY
        begins = np.minimum(begins, calls.start[issued_by])
    begins = np.where(idle, starts, begins)
    whole: Mask = (known | idle) & calls.all_recorded(own.gpu.process, begins, ends)
    return whole


def tell_calls(
    lanes: Sequence[LaneSummary], measured: Sequence[Step], steps: Sequence[Step]
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
