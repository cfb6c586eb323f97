"""Samples of a card as curves that are exact at every zoom: the mean of each cell.

A value holds from its sample to the next one; its integral over time is kept, so that what a cell
has on average is the difference of two look-ups. Utilization is told of the time before its sample,
and holds from the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.intervals import Times
from gputrace.analyzers.lanes import Lane
from gputrace.traces.nvml.model import Card, Nvml, Samples

CURVES: Final = ("utilization", "smClock", "power", "memoryUsed", "temperature")
"""What is drawn of the samples, by their names there."""
_BACKWARD: Final = ("utilization",)
_HOTTEST: Final = 100.0
"""Degrees."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One value of one card over time."""

    name: str
    """One of `CURVES`."""
    time: Times
    """Where each value begins to hold, and at the end where the last one ceases."""
    value: NDArray[np.float64]
    """One fewer than ``time``."""
    top: float
    """What the value can be at most, where that is known; else the largest."""

    @cached_property
    def _integral(self) -> NDArray[np.float64]:
        return np.concatenate([[0.0], np.cumsum(self.value * np.diff(self.time))])

    def means(self, edges: Times) -> NDArray[np.float64]:
        """The mean between neighbouring edges; NaN where there is no sample."""
        inside = np.clip(edges, self.time[0], self.time[-1])
        # Relative to the first, as nanoseconds of a clock are too many digits for a float.
        since = (inside - self.time[0]).astype(np.float64)
        known = (self.time - self.time[0]).astype(np.float64)
        sums, lengths = np.diff(np.interp(since, known, self._integral)), np.diff(since)
        return np.where(lengths > 0, sums / np.maximum(lengths, 1), np.nan)


def find_curves(nvml: Nvml, lanes: Sequence[Lane]) -> tuple[tuple[Curve, ...], ...]:
    """For each lane, the curves of its card; none where the card is not known."""
    return tuple(
        tuple(_curves(nvml, lane.gpu.host, lane.gpu.gpu)) if lane.gpu.gpu_known else ()
        for lane in lanes
    )


def _curves(nvml: Nvml, host: int, gpu: int) -> Iterator[Curve]:
    samples, card = nvml.samples.of(host, gpu), nvml.card(host, gpu)
    for name in CURVES:
        curve = _curve(samples, card, name)
        if curve is not None:
            yield curve


def _curve(samples: Samples, card: Card | None, name: str) -> Curve | None:
    return make_curve(name, samples.time, samples[name], card)


def make_curve(
    name: str, time: Times, value: NDArray[np.float64], card: Card | None
) -> Curve | None:
    """The curve of one of `CURVES` by its samples, NaN where there was none; None of too few."""
    known = np.isfinite(value)
    time, value = time[known], value[known]
    time, first = np.unique(time, return_index=True)
    value = value[first]
    if len(time) < 2:
        return None
    held = value[1:] if name in _BACKWARD else value[:-1]
    return Curve(name, time, held, _top(name, card) or float(value.max()) or 1.0)


def _top(name: str, card: Card | None) -> float | None:
    """What the card cannot exceed."""
    if name in ("utilization", "temperature"):
        return _HOTTEST
    if card is None:
        return None
    limits = {
        "smClock": card.sm_clock_max,
        "power": card.power_limit_mw,
        "memoryUsed": card.memory_bytes,
    }
    limit = limits[name]
    return None if limit is None else float(limit)
