"""Prediction of the step time after each optimization, by replay of a dependency graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import numpy as np

from gputrace.analyzers.findings.context import Facts
from gputrace.analyzers.whatif.build import build_graph
from gputrace.analyzers.whatif.graph import Graph, Measure, measure, replay, standard_error
from gputrace.analyzers.whatif.optimizations import CURES, Cure, Effect, issues, runs
from gputrace.analyzers.whatif.step_rows import choose_steps, data_within, read_rows, when_issued
from gputrace.model.results import WhatIf

__all__ = ["what_if"]


def what_if(facts: Facts, findings: Collection[str]) -> tuple[WhatIf, ...]:
    """Return the optimizations that are worth it, largest gain first.

    Empty if the steps have no host calls, without which it is unknown what GPUs wait for, or if
    there are too few steps.

    Args:
        facts: earlier results of the analysis.
        findings: ids of the findings of the analysis.
    """
    gpus, all_steps = facts.per_gpu, facts.found
    steps = choose_steps(gpus, all_steps, facts.measured) if gpus.has_calls else None
    if steps is None:
        return ()
    window = when_issued(gpus, all_steps, steps)
    calls = None if window is None else gpus.calls_within(window)
    if window is None or calls is None:
        return ()
    rows = read_rows(gpus, calls, all_steps, steps, facts.collectives)
    graph = build_graph(facts.trace, rows, calls, data_within(gpus, window))
    lengths = {(s.rank, s.step): s.end_ns - s.start_ns for s in facts.measured}
    mean = round(sum(lengths.values()) / len(lengths))
    return tuple(sorted(predict(graph, mean, findings), key=lambda cure: -cure.gain_ns))


WORTH: Final = 0.01
"""Fraction of a step that an optimization must save to be listed."""
MOST_ERROR: Final = 0.10
"""Maximum unexplained fraction of the step time; above it, nothing is predicted."""
_SURE: Final = 2.0
"""Half-width of the bounds of a mean, in standard errors."""


def predict(graph: Graph, mean_ns: int, findings: Collection[str]) -> Iterator[WhatIf]:
    """Yield a prediction per optimization; none if the replay explains the steps too poorly.

    Args:
        graph: dependency graph of some steps.
        mean_ns: mean step of the whole run, to which gains are scaled.
        findings: ids of the findings of the analysis.
    """
    recorded = measure(graph, graph.end)
    error = replay_error(graph)
    if error > MOST_ERROR:
        return
    for cure in CURES:
        ranged = _range(graph, cure, recorded, error)
        if ranged is None:
            continue
        low, step, high = (round(mean_ns * value / recorded.mean) for value in ranged)
        finding = next((id for id in cure.findings if id in findings), None)
        yield WhatIf(
            id=cure.id,
            finding=finding,
            what=cure.what,
            now_ns=mean_ns,
            step_ns=step,
            low_ns=low,
            high_ns=high,
            gain_ns=mean_ns - step,
            assumption=cure.assumption,
            replay_error=round(error, 4),
            steps=graph.steps,
        )


def replay_error(graph: Graph) -> float:
    """Return the relative error of a replay without the unexplained delays."""
    recorded = measure(graph, graph.end).mean
    explained = measure(graph, replay(explained_only(graph))).mean
    return abs(recorded - explained) / recorded if recorded else 1.0


def explained_only(graph: Graph) -> Graph:
    """Return the graph with median lags after every cause and no unexplained delays."""
    launched = issues(graph)
    follows = runs(graph) & (graph.spacing > 0)
    usual = [
        int(np.median(lags)) if len(lags) else 0
        for lags in (graph.latency[launched], graph.spacing[follows])
    ]
    return graph.changed(
        latency=np.where(launched, usual[0], graph.latency),
        spacing=np.where(follows, usual[1], graph.spacing),
        residual=np.zeros_like(graph.residual),
    )


def _range(
    graph: Graph, cure: Cure, recorded: Measure, error: float
) -> tuple[float, float, float] | None:
    """Return the lowest, likely and highest step time after an optimization, in nanoseconds.

    None where it gains little. The bounds cover the range of its effect, the scatter of the steps,
    and the time that the replay cannot explain, which may or may not disappear too.
    """
    likely = cure.change(graph, Effect.LIKELY)
    if likely is None:
        return None
    middle = measure(likely, replay(likely))
    gain = recorded.mean - middle.mean
    if gain < WORTH * recorded.mean:
        return None
    bounds = [middle.mean, middle.mean - error * gain, middle.mean + error * gain]
    for effect in cure.bounds:
        changed = cure.change(graph, effect)
        if changed is not None:
            bounds.append(measure(changed, replay(changed)).mean)
    # Estimate the step directly or as the recorded one minus the gain: take what scatters less.
    known = (recorded.lengths - middle.lengths, middle.lengths)
    scatter = _SURE * min(standard_error(lengths) for lengths in known)
    highest = max(middle.mean, min(max(bounds) + scatter, recorded.mean))
    return max(min(bounds) - scatter, 0.0), middle.mean, highest
