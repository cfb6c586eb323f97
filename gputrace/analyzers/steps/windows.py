"""Step windows, one set per rank; how many at the start are warm-up, and what recording costs a
step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.grouping import median
from gputrace.model.events import Mask
from gputrace.model.intervals import Times
from gputrace.model.results import RecorderCost
from gputrace.model.struct import Struct


class Interlude(Struct, frozen=True, dict=True):
    """A stretch between two steps of a rank that belongs to neither."""

    phase: str
    """``validation`` or ``checkpoint``."""
    start: int
    end: int
    after: int
    """The step it follows."""
    evidence: str


class MarkedSteps(Struct, frozen=True, dict=True):
    """Steps of one rank as its host marked them, in order."""

    number: Times
    length: Times
    """Nanoseconds from mark to mark, in host time."""
    recorded: Mask
    """True where GPU activity was recorded for all of the step."""
    control: Mask
    """True where nothing was recorded for all of the step."""
    idle: Mask
    """True where CUPTI stayed in the process nevertheless, for all of the step."""

    def select(self, kept: Mask) -> MarkedSteps:
        """Return some of the steps."""
        times = self.number[kept], self.length[kept]
        return MarkedSteps(*times, self.recorded[kept], self.control[kept], self.idle[kept])


class StepWindows(Struct, frozen=True, dict=True):
    """The steps of one rank, in GPU time, in order and disjoint."""

    rank: int
    start: Times
    end: Times
    busy_from: Times
    """When the first operation of each step starts."""
    source: str
    """``markers``, ``profiler``, ``nvtx`` or ``inferred``."""
    kind: str
    """``training`` or ``iterations``."""
    confidence: float
    reason: str
    interludes: tuple[Interlude, ...] = ()
    numbers: Times | None = None
    """Numbers of the steps as the program counted; None if it did not."""
    marked: MarkedSteps | None = None
    """All steps that the host marked; None without control stretches."""
    with_nodes: int = 0
    """Number of steps left out because the nodes of CUDA graphs were recorded in them."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def lengths(self) -> Times:
        """Nanoseconds of each step."""
        return self.end - self.start


_SLOWER: Final = 0.15
"""A step longer than the later ones by this part of them is not yet at speed,"""
_NOISE: Final = 3 * 1.4826
"""unless they scatter so much: three standard deviations, from the median deviation."""
_IN_A_ROW: Final = 3
"""So many steps at speed end the warm-up: one slow step later on is a hiccup."""
_FIRST_SLOWER: Final = 1.5
_OTHERS_ALIKE: Final = 1.25
"""A first of less than six steps is warm-up if it takes this many times as long as the longest of
the others, which are alike within this factor."""


def count_warmup(lengths: ArrayLike) -> int:
    """Steps before the first three in a row at speed, where speed is the later half's median.

    At most half of the steps; of three to five, the first alone may be warm-up.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) < 2 * _IN_A_ROW:
        first, others = lengths[:1], lengths[1:]
        if len(others) < 2 or others.max() > _OTHERS_ALIKE * others.min():
            return 0
        return int(first[0] > _FIRST_SLOWER * others.max())
    half = len(lengths) // 2
    usual = median(lengths[half:])
    scatter = median(np.abs(lengths[half:] - usual))
    fast = lengths <= usual + max(_SLOWER * usual, _NOISE * scatter)
    for step in range(half):
        if fast[step : step + _IN_A_ROW].all():
            return step
    return half


_SETTLES: Final = 3
"""Steps after the recorder's return that are not compared: it takes time to begin."""
_BESIDE: Final = 20
"""Minimum number of recorded steps on either side that a control stretch is compared with."""
_SEVERAL: Final = 2.0
"""Stretches of equal weight from which on their scatter says something."""
_FEWEST: Final = 8
"""Minimum number of control steps, and of recorded ones, to compare."""
_SEEN: Final = 0.54
"""Part of the cost of recording that steps with an idle CUPTI are without: the median of nine
comparisons with whole runs without a recorder (0.33 to 0.68; ResNet-18, ResNet-50 and GPT-2 on
H100, CUPTI 13.0.1: docs/benchmarks.md)."""
_UNSURE: Final = 0.25
"""Its standard error, as a part of it."""
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
    """Return how much longer a step takes because it is recorded; None without control stretches,
    and where steps have no length.

    Steps count if all ranks were recorded in them, or none: ranks that train together wait for the
    slowest. Trimmed means are compared, of each stretch with the recorded steps beside it, and each
    recorded step of the run would be as much shorter as at the stretch that is next to it. So much
    is taken off their mean, which a few long ones lengthen in any run. Of the cost, a stretch in
    which CUPTI is idle shows the part `_SEEN`. The interval covers two standard errors, from the
    scatter of steps or of stretches, whichever is larger, and that of this part.
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
        np.any([steps.idle for steps in marked], axis=0),
    )
    settled = _settled(together)
    stretches = list(_stretches(together, settled))
    control = [together.length[run] for run, _ in stretches]
    beside = [together.length[around] for _, around in stretches]
    if not stretches or min(sum(map(len, control)), sum(map(len, beside))) < _FEWEST:
        return None
    if min(_mean(lengths)[0] for lengths in (*control, *beside)) <= 0:
        return None
    rows = settled[count_warmup(together.length[settled]) :]
    every = together.length[rows]
    rows = rows[every <= _ORDINARY * median(every)]
    middles = np.array([run.mean() for run, _ in stretches])
    nearest = np.searchsorted((middles[1:] + middles[:-1]) / 2, rows)
    near = np.split(together.length[rows], np.searchsorted(nearest, np.arange(1, len(stretches))))
    weights = np.array([len(own) * _mean(own)[0] if len(own) else 0.0 for own in near])
    usual = float(weights.sum()) / len(rows)
    if usual <= 0:
        return None
    weights /= weights.sum()
    means = np.array([_mean(around)[0] for around in beside])
    costs = 1 - np.array([_mean(own)[0] for own in control]) / means
    idle = np.array([together.idle[run].any() for run, _ in stretches])
    times = np.where(idle, 1 / _SEEN, 1.0)
    ratios = 1 - costs * times
    ratio = float(weights @ ratios)
    scatter = _scatter(control, beside, weights * times)
    effective = 1 / float(weights @ weights)
    if effective > _SEVERAL:
        variance = float(weights @ (ratios - ratio) ** 2) / (effective - 1)
        scatter = max(scatter, variance**0.5)
    scatter = np.hypot(scatter, _UNSURE * float((weights * idle) @ (1 - ratios)))
    low, high = ratio - _SURE * scatter, ratio + _SURE * scatter
    mean = float(together.length[rows].mean())
    return RecorderCost(
        step_ns=round(mean),
        unrecorded_step_ns=round(mean - usual * max(1.0 - ratio, 0.0)),
        low_ns=round(max(mean - usual * max(1.0 - low, 0.0), 0.0)),
        high_ns=round(mean + usual * (high - 1.0)),
        stretches=len(stretches),
        steps=sum(map(len, control)),
    )


def _scatter(
    control: Sequence[Times], beside: Sequence[Times], weights: NDArray[np.float64]
) -> float:
    """Return the standard error of the weighted mean ratio of stretches, from that of steps."""
    scatter = 0.0
    for lengths in (control, beside):
        relative = np.concatenate([own / _mean(own)[0] for own in lengths])
        spread = _mean(relative)[1] * len(relative) ** 0.5
        scatter = np.hypot(scatter, spread * np.sqrt((weights**2) @ [1 / len(n) for n in lengths]))
    return scatter


def _settled(steps: MarkedSteps) -> NDArray[np.int64]:
    """Return the rows of the recorded steps but for those in which recording begins anew."""
    rows = np.flatnonzero(steps.recorded)
    ends = np.flatnonzero(steps.control[:-1] & ~steps.control[1:]) + 1
    first = np.searchsorted(rows, ends)
    anew = (first[:, None] + np.arange(_SETTLES)).ravel()
    return np.delete(rows, anew[anew < len(rows)])


def _stretches(
    steps: MarkedSteps, settled: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the rows of each control stretch, and of settled steps beside it, up to the next one
    on either side.
    """
    rows = np.flatnonzero(steps.control)
    runs = np.split(rows, np.flatnonzero(np.diff(steps.number[rows]) != 1) + 1)
    ends = [-1, *(run[-1] for run in runs if len(run))]
    begins = [*(run[0] for run in runs[1:]), len(steps.number)]
    for run, since, until in zip(runs, ends, begins, strict=False):
        if not len(run):
            continue
        most = max(len(run), _BESIDE)
        first, begin, end, last = np.searchsorted(settled, [since, run[0], run[-1], until])
        before, after = settled[max(first, begin - most) : begin], settled[end:last][:most]
        if len(before) + len(after):
            yield run, np.concatenate([before, after])


def _mean(values: NDArray[Any]) -> tuple[float, float]:
    """Return the trimmed mean and its standard error (Tukey and McLaughlin, 1963)."""
    values = np.sort(values.astype(np.float64))
    cut = int(_TRIMMED * len(values))
    inner = values[cut : len(values) - cut]
    spread = float(np.std(np.clip(values, inner[0], inner[-1]), ddof=1)) if len(values) > 1 else 0.0
    return float(inner.mean()), _LASTING * spread / (len(inner) / len(values)) / len(values) ** 0.5
