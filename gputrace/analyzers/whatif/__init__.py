"""What-if: the step time predicted when one cause is removed, by replaying the steps' dependencies.

`graph` says what a graph is and replays it, `build` makes it of recorded times, `cures` lists what
can be removed, `predict` compares.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gputrace.analyzers.host import HostCalls
from gputrace.analyzers.intervals import Intervals
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.results import Step
from gputrace.analyzers.steps import FoundSteps
from gputrace.analyzers.whatif.build import build_graph
from gputrace.analyzers.whatif.predict import predict
from gputrace.analyzers.whatif.rows import choose_steps, read_rows
from gputrace.analyzers.whatif_results import WhatIf
from gputrace.traces.trace import Trace

__all__ = ["what_if"]


def what_if(
    trace: Trace,
    operations: Sequence[GpuOperations],
    calls: HostCalls | None,
    found: FoundSteps,
    measured: Sequence[Step],
    data: Mapping[tuple[int, int], Intervals],
    findings: Collection[str],
) -> tuple[WhatIf, ...]:
    """The cures that are worth it, the greatest gain first.

    None without host calls, which tell what the GPUs wait for, or with too few steps.
    """
    steps = choose_steps(found, measured, operations) if calls is not None else None
    if calls is None or steps is None:
        return ()
    rows = read_rows(trace, operations, calls, found, steps)
    if not len(rows.events):
        return ()
    graph = build_graph(trace, rows, calls, data)
    lengths = {(s.rank, s.step): s.end_ns - s.start_ns for s in measured}
    mean = round(sum(lengths.values()) / len(lengths))
    return tuple(sorted(predict(graph, mean, findings), key=lambda cure: -cure.gain_ns))
