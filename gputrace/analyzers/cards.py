"""Clocks, throttling, link and memory of each card while its GPU works.

A GPU that idles lowers its clocks and its PCIe link, which says nothing of the run; so what counts
are the samples inside the measured steps before which the GPU was busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.grouping import StepsOf, stretches
from gputrace.analyzers.intervals import Intervals, Times
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.results import Step
from gputrace.analyzers.results.cards import CardUse
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.nvml.model import Card, Nvml, Samples

REASONS: Final[Mapping[str, tuple[int, str]]] = {
    "power cap": (0x4, "powerCapTime"),
    "hardware slowdown": (0x8, ""),
    "sync boost": (0x10, "syncBoostTime"),
    "software thermal": (0x20, "swThermalTime"),
    "hardware thermal": (0x40, "hwThermalTime"),
    "power brake": (0x80, "powerBrakeTime"),
}
"""Why clocks are held down: the bit of `clocksEventReasons`, and the counter of its time."""

_GPU_IDLE: Final = 0x1
_BEFORE: Final = 100_000_000
_BUSY: Final = 0.1
"""A GPU counts as busy that ran something for so much of the time before a sample: clocks fall
about a second after the last kernel."""
_AT_MAX: Final = 0.99
"""Part of the maximum from which a clock is at it: clocks move in small steps."""
_ENOUGH: Final = 0.5
"""Part of the measured time that a counter's readings must span to tell of it, and part of a
figure's own time that must be measured time."""
_PERIOD: Final = 1_000_000_000
"""What the first figure is of at most: the driver's sampling period."""


def find_cards(nvml: Nvml, gpus: PerGpu, steps: Sequence[Step]) -> tuple[CardUse, ...]:
    """The cards of which there are samples, in the order of the lanes.

    Args:
        nvml: what NVML told.
        gpus: tell when the cards were busy.
        steps: those to measure, in which each GPU's own count; the whole span if it has none.
    """
    if not len(nvml.samples):
        return ()
    steps_of = StepsOf(steps)
    seen = [nvml.samples.of(lane.gpu.host, lane.gpu.gpu) for lane in gpus.lanes]
    sampled = [(lane, own) for lane, own in zip(gpus.lanes, seen, strict=True) if len(own)]
    lanes = [lane for lane, _ in sampled]
    worked = gpus.each(_worked, lanes, (own.time for _, own in sampled))
    return tuple(
        _use(
            lane,
            nvml.card(lane.gpu.host, lane.gpu.gpu) or Card(lane.gpu.gpu, lane.gpu.host),
            samples,
            stretches(steps_of(lane.gpu), lane.window),
            busy,
        )
        for (lane, samples), busy in zip(sampled, worked, strict=True)
    )


def _worked(one: OneGpu, moments: Times) -> NDArray[np.bool_]:
    """Whether a GPU was mostly at work just before some moments."""
    busy = one.lane.timeline.busy.within(moments - _BEFORE, moments)
    found: NDArray[np.bool_] = busy >= _BUSY * _BEFORE
    return found


def _use(
    lane: LaneSummary,
    card: Card,
    samples: Samples,
    measured: Intervals,
    worked: NDArray[np.bool_],
) -> CardUse:
    here = measured.contains(samples.time)
    inside = samples.select(here)
    busy = samples.select(here & worked & _not_idle(samples))
    return CardUse(
        gpu=lane.gpu.gpu,
        rank=lane.gpu.rank,
        host=lane.gpu.host_name,
        name=card.name or lane.gpu.name,
        samples=len(busy),
        sm_clock_mhz=_median(busy["smClock"]),
        sm_clock_max_mhz=card.sm_clock_max,
        sm_clock_application_mhz=card.sm_clock_application,
        sm_below_max=_below(busy["smClock"], card.sm_clock_max),
        memory_clock_mhz=_median(busy["memoryClock"]),
        memory_clock_max_mhz=card.memory_clock_max,
        memory_clock_application_mhz=card.memory_clock_application,
        memory_below_max=_below(busy["memoryClock"], card.memory_clock_max),
        throttled=_throttled(busy, inside, measured),
        power_mw=_mean(busy["power"]),
        power_limit_mw=card.power_limit_mw,
        temperature_c=_most(busy["temperature"]),
        pcie_gen=_whole(_median(busy["pcieGen"])),
        pcie_gen_max=card.pcie_gen_max,
        pcie_width=_whole(_median(busy["pcieWidth"])),
        pcie_width_max=card.pcie_width_max,
        utilization_percent=_utilization(samples, measured),
        memory_used_bytes=_whole(_most(inside["memoryUsed"])),
        memory_bytes=card.memory_bytes,
    )


def _utilization(samples: Samples, measured: Intervals) -> float | None:
    """The driver's figure; a sample's is of all the time since the one before it that has one.

    Of figures that are mostly of other times than the measured, none counts.
    """
    known = np.isfinite(samples["utilization"])
    ends, values = samples.time[known], samples["utilization"][known]
    if not len(ends) or not len(measured):
        return None
    starts = np.concatenate([[ends[0] - _PERIOD], ends[:-1]])
    inside = measured.within(starts, ends)
    counts = inside >= _ENOUGH * (ends - starts)
    if not inside[counts].any():
        return None
    return round(float(np.average(values[counts], weights=inside[counts])), 2)


def _not_idle(samples: Samples) -> NDArray[np.bool_]:
    """Which samples are of a GPU at work by what its driver says."""
    reasons = np.nan_to_num(samples["clocksEventReasons"]).astype(np.int64)
    found: NDArray[np.bool_] = reasons & _GPU_IDLE == 0
    return found


def _throttled(busy: Samples, inside: Samples, measured: Intervals) -> dict[str, float]:
    """By the bits, or by the counters where these tell more: they miss nothing between samples."""
    span = int(measured.end[-1] - measured.start[0]) if len(measured) else 0
    bits = busy["clocksEventReasons"]
    known = bits[np.isfinite(bits)].astype(np.int64)
    shares = {}
    for reason, (bit, counter) in REASONS.items():
        seen = float((known & bit != 0).mean()) if len(known) else 0.0
        shares[reason] = round(max(seen, _counted(inside, counter, span)), 4)
    # The slowdown of the hardware is either of the two below it, where these are told.
    if shares["hardware thermal"] or shares["power brake"]:
        shares["hardware slowdown"] = 0.0
    return {reason: share for reason, share in shares.items() if share}


def _counted(samples: Samples, counter: str, span: int) -> float:
    """Share of the time between the first and the last reading of a counter of nanoseconds.

    0 where it was not read, or too seldom to tell of the measured time.
    """
    if not counter:
        return 0.0
    values = samples[counter]
    rows = np.flatnonzero(np.isfinite(values))
    if len(rows) < 2:
        return 0.0
    first, last = rows[0], rows[-1]
    passed = int(samples.time[last] - samples.time[first])
    grown = float(values[last] - values[first])
    return min(max(grown / passed, 0.0), 1.0) if passed >= _ENOUGH * span else 0.0


def _below(clock: NDArray[np.float64], most: int | None) -> float | None:
    known = clock[np.isfinite(clock)]
    if not len(known) or not most:
        return None
    return round(float((known < _AT_MAX * most).mean()), 4)


def _median(values: NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _mean(values: NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return round(float(known.mean()), 2) if len(known) else None


def _most(values: NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
