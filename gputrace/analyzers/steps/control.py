"""The recorder's cost: steps of control stretches, in which it was out of the way, against others.

Hooks mark steps whether GPU activity is recorded or not, so both are measured in one run, on one
host, seconds apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import reduce
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.steps.windows import MarkedSteps
from gputrace.model.intervals import Times
from gputrace.model.results import RecorderCost

_SETTLES: Final = 3
"""Steps after the recorder's return that are not compared: it takes time to begin."""
_BESIDE: Final = 20
"""Minimum number of recorded steps on either side that a control stretch is compared with."""
_FEWEST: Final = 8
"""Minimum number of control steps, and of recorded ones, to compare."""
_SURE: Final = 2.0
"""Half-width of the interval, in standard errors."""
_TRIMMED: Final = 0.1
"""Part of the steps that is left out of a mean at either end: a checkpoint, a batch that is late.
A median would leap where others on the machine interrupt nearly half of the steps."""
_ORDINARY: Final = 3.0
"""Most that an ordinary step takes, in medians; others are left out of the mean of all."""
_LASTING: Final = 1.5
"""Factor for neighbouring steps that are slow together."""


def estimate_cost(ranks: Collection[MarkedSteps | None]) -> RecorderCost | None:
    """Return how much longer a step takes because it is recorded; None without control stretches.

    Steps count if all ranks were recorded in them, or none: ranks that train together wait for the
    slowest. Trimmed means are compared, of each stretch with the steps around it; their difference
    is taken off the mean of the recorded steps, which a few long ones lengthen in any run. The
    interval covers two standard errors, from the scatter of steps or of stretches, whichever is
    larger.
    """
    marked = [steps for steps in ranks if steps is not None and len(steps.number)]
    if not marked or len(marked) < len(ranks):
        return None
    common = reduce(np.intersect1d, [steps.number for steps in marked])
    marked = [steps.select(np.isin(steps.number, common)) for steps in marked]
    together = MarkedSteps(
        common,
        np.mean([steps.length for steps in marked], axis=0).astype(np.int64),
        np.all([steps.recorded for steps in marked], axis=0),
        np.all([steps.control for steps in marked], axis=0),
    )
    pairs = list(_stretches(together))
    control = [beside for beside, _ in pairs]
    recorded = [around for _, around in pairs]
    if not pairs or min(sum(map(len, control)), sum(map(len, recorded))) < _FEWEST:
        return None
    usual = _mean(np.concatenate(recorded))[0]
    each = [_mean(around)[0] for around in recorded]
    relative = [own / mean for own, mean in zip(control, each, strict=True)]
    beside = [own / mean for own, mean in zip(recorded, each, strict=True)]
    ratio, error = _mean(np.concatenate(relative))
    scatter = float(np.hypot(error, _mean(np.concatenate(beside))[1]))
    if len(relative) > 2:
        means = [_mean(own)[0] for own in relative]
        scatter = max(scatter, float(np.std(means, ddof=1)) / len(means) ** 0.5)
    low, high = ratio - _SURE * scatter, ratio + _SURE * scatter
    every = np.concatenate(recorded)
    mean = float(every[every <= _ORDINARY * np.median(every)].mean())
    return RecorderCost(
        step_ns=round(mean),
        unrecorded_step_ns=round(mean - usual * max(1.0 - ratio, 0.0)),
        low_ns=round(max(mean - usual * max(1.0 - low, 0.0), 0.0)),
        high_ns=round(mean + usual * (high - 1.0)),
        stretches=len(pairs),
        steps=sum(map(len, control)),
    )


def _stretches(steps: MarkedSteps) -> Iterator[tuple[Times, Times]]:
    """Yield the lengths of the steps of each control stretch, and of recorded ones around it."""
    rows = np.flatnonzero(steps.control)
    for run in np.split(rows, np.flatnonzero(np.diff(steps.number[rows]) != 1) + 1):
        if not len(run):
            continue
        most = max(len(run), _BESIDE)
        before = np.flatnonzero(steps.recorded[: run[0]])[-most:]
        after = run[-1] + 1 + np.flatnonzero(steps.recorded[run[-1] + 1 :])
        around = np.concatenate([before, after[_SETTLES : _SETTLES + most]])
        if len(around):
            yield steps.length[run], steps.length[around]


def _mean(values: NDArray[Any]) -> tuple[float, float]:
    """Return the trimmed mean and its standard error (Tukey and McLaughlin, 1963)."""
    values = np.sort(values.astype(np.float64))
    cut = int(_TRIMMED * len(values))
    inner = values[cut : len(values) - cut]
    spread = float(np.std(np.clip(values, inner[0], inner[-1]), ddof=1)) if len(values) > 1 else 0.0
    return float(inner.mean()), _LASTING * spread / (len(inner) / len(values)) / len(values) ** 0.5
