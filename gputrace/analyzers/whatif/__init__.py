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
from gputrace.analyzers.whatif.rows import choose_steps, data_within, read_rows, when_issued

__all__ = ["what_if"]


def what_if(facts: Facts, findings: Collection[str]) -> tuple[WhatIf, ...]:
    """The cures that are worth it, the greatest gain first.

    None without host calls in the steps, which tell what GPUs wait for, or with too few steps.

    Args:
        facts: what has been found out about the trace.
        findings: ids of the findings of the analysis.
    """
    gpus, found = facts.per_gpu, facts.found
    steps = choose_steps(gpus, found, facts.measured) if gpus.has_calls else None
    if steps is None:
        return ()
    window = when_issued(gpus, found, steps)
    calls = None if window is None else gpus.calls_within(window)
    if window is None or calls is None:
        return ()
    rows = read_rows(gpus, calls, found, steps, facts.collectives)
    graph = build_graph(facts.trace, rows, calls, data_within(gpus, window))
    lengths = {(s.rank, s.step): s.end_ns - s.start_ns for s in facts.measured}
    mean = round(sum(lengths.values()) / len(lengths))
    return tuple(sorted(predict(graph, mean, findings), key=lambda cure: -cure.gain_ns))
