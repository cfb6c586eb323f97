"""The step time without one cause, for every cure that would be worth it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import numpy as np

from gputrace.analyzers.results.whatif import WhatIf
from gputrace.analyzers.whatif.cures import CURES, Cure, Effect
from gputrace.analyzers.whatif.edits import issues, runs
from gputrace.analyzers.whatif.graph import Graph
from gputrace.analyzers.whatif.measure import Measure, measure, standard_error
from gputrace.analyzers.whatif.replay import replay

WORTH: Final = 0.01
"""Part of a step that a cure must save to be listed."""
MOST_ERROR: Final = 0.10
"""Part of the step time that may stay unexplained before nothing is predicted."""
_SURE: Final = 2.0
"""Standard errors of a mean by which it may be off."""


def predict(graph: Graph, mean_ns: int, findings: Collection[str]) -> Iterator[WhatIf]:
    """What each cure gives; nothing where the replay explains too little of the recorded steps.

    Args:
        graph: of some steps.
        mean_ns: the mean step of the whole run, to which gains are scaled.
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
    """The part of the recorded time that the replay lacks when only what is explained counts."""
    recorded = measure(graph, graph.end).mean
    explained = measure(graph, replay(explained_only(graph))).mean
    return abs(recorded - explained) / recorded if recorded else 1.0


def explained_only(graph: Graph) -> Graph:
    """The graph with the usual lag after every cause, and no lateness without one."""
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
    """The least, the likely and the greatest step time with a cure; None where it gains little.

    The bounds are those of the cure's effect, of how the steps scatter, and of what the replay
    cannot explain, which may or may not be cured too.
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
    # The step is known as the recorded one less the gain, or by itself: by what scatters less.
    known = (recorded.lengths - middle.lengths, middle.lengths)
    scatter = _SURE * min(standard_error(lengths) for lengths in known)
    highest = max(middle.mean, min(max(bounds) + scatter, recorded.mean))
    return max(min(bounds) - scatter, 0.0), middle.mean, highest
