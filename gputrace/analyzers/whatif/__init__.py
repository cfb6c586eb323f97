"""What-if: the step time predicted when one cause is removed, by replaying the steps' dependencies.

`graph` says what a graph is, `build` makes it of recorded times, `replay` goes through it, `cures`
lists what can be removed, `predict` compares.
"""

from __future__ import annotations

from collections.abc import Collection

from gputrace.analyzers.findings import Facts
from gputrace.analyzers.results.whatif import WhatIf
from gputrace.analyzers.whatif.build import build_graph
from gputrace.analyzers.whatif.predict import predict
from gputrace.analyzers.whatif.rows import choose_steps, read_rows

__all__ = ["what_if"]


def what_if(facts: Facts, findings: Collection[str]) -> tuple[WhatIf, ...]:
    """The cures that are worth it, the greatest gain first.

    None without host calls, which tell what the GPUs wait for, or with too few steps.

    Args:
        facts: what has been found out about the trace.
        findings: ids of the findings of the analysis.
    """
    found, operations, calls = facts.found, facts.operations, facts.calls
    steps = None if calls is None else choose_steps(found, facts.measured, operations)
    if calls is None or steps is None:
        return ()
    rows = read_rows(facts.trace, operations, calls, found, steps, facts.collectives)
    data = {thread: waits for lane in facts.lanes for thread, waits in lane.data.items()}
    graph = build_graph(facts.trace, rows, calls, data)
    lengths = {(s.rank, s.step): s.end_ns - s.start_ns for s in facts.measured}
    mean = round(sum(lengths.values()) / len(lengths))
    return tuple(sorted(predict(graph, mean, findings), key=lambda cure: -cure.gain_ns))
