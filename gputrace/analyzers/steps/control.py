"""The recorder's cost: steps of control stretches, in which it was out of the way, against others.

Hooks mark steps whether GPU activity is recorded or not, so both are measured in one run, on one
host, seconds apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import reduce
from typing import Final

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
_OF_MEDIAN: Final = 1.2533 * 1.4826
"""Standard error of a median, in median absolute deviations over the square root of the count."""
_LASTING: Final = 1.5
"""Factor for neighbouring steps that are slow together."""


def estimate_cost(ranks: Collection[MarkedSteps | None]) -> RecorderCost | None:
    """Return how much longer a step takes because it is recorded; None without control stretches.

    Steps count if all ranks were recorded in them, or none: ranks that train together wait for the
    slowest. Medians are compared, of each stretch with the steps around it; the interval covers two
    standard errors, from the scatter of steps or of stretches, whichever is larger.
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
    usual = float(np.median(np.concatenate(recorded)))
    relative = [own / np.median(around) for own, around in pairs]
    ratio = float(np.median(np.concatenate(relative)))
    scatter = np.hypot(
        _error_of_median(np.concatenate(relative)),
        _error_of_median(np.concatenate([around / np.median(around) for around in recorded])),
    )
    if len(relative) > 2:
        medians = [np.median(own) for own in relative]
        scatter = max(scatter, float(np.std(medians, ddof=1)) / len(medians) ** 0.5)
    low, high = ratio - _SURE * scatter, ratio + _SURE * scatter
    return RecorderCost(
        step_ns=round(usual),
        unrecorded_step_ns=round(usual * min(ratio, 1.0)),
        low_ns=round(usual * max(min(low, 1.0), 0.0)),
        high_ns=round(usual * high),
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


def _error_of_median(values: NDArray[np.float64]) -> float:
    deviation = float(np.median(np.abs(values - np.median(values))))
    return _LASTING * _OF_MEDIAN * deviation / float(np.sqrt(len(values)))
