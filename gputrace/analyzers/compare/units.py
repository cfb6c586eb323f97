"""What two runs may be compared by: a step, an iteration of the same work, or the whole span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gputrace.analyzers.compare.run import Run

_ALIKE: Final = 0.9
"""Part of the kernels of an iteration that both must have, by name, to be the same work."""


def common_unit(runs: Sequence[Run]) -> tuple[str, str]:
    """``step``, ``iteration`` or ``span``, and why it is not the step."""
    without = [run.label for run in runs if run.loop is None]
    if without:
        return "span", f"no steps were found in {' and '.join(without)}"
    kinds = {run.analysis.steps.kind for run in runs}
    if kinds == {"training"}:
        return "step", ""
    if len(kinds) > 1:
        which = [run.label for run in runs if run.analysis.steps.kind != "training"]
        return "span", f"what repeats in {' and '.join(which)} is not shown to be training"
    if min(alike(runs[0], run) for run in runs) < _ALIKE:
        return "span", "what repeats is not shown to be training, and its kernels differ"
    return "iteration", "what repeats is not shown to be training; its kernels are the same"


def alike(a: Run, b: Run) -> float:
    """Part of the kernels a step that both have, by name, 0 to 1."""
    counts = [{use.name: use.count for use in run.kernels} for run in (a, b)]
    names = counts[0].keys() | counts[1].keys()
    pairs = [(counts[0].get(name, 0.0), counts[1].get(name, 0.0)) for name in names]
    most = sum(max(pair) for pair in pairs)
    return sum(min(pair) for pair in pairs) / most if most else 0.0
