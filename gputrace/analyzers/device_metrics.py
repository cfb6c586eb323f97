"""Clocks, throttling, link, memory and utilization of each card, from NVML's samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.execution import GpuShardView, PerGpu
from gputrace.analyzers.grouping import StepsOf, stretches
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import Gpu
from gputrace.model.intervals import Intervals, Times
from gputrace.model.nvml import Card, Nvml, Samples
from gputrace.model.results import CardUse, Curve, GpuCurves, Step, Utilization
from gputrace.model.trace import Window

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
"""Longest window of the first figure: the driver's sampling period."""


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


def _worked(one: GpuShardView, moments: Times) -> NDArray[np.bool_]:
    """Return whether a GPU was mostly at work just before each moment."""
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
    """Return the mask of samples of a GPU that is at work by its driver's figures."""
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


MOST_POINTS: Final = 240
"""Points of a curve at most."""

_CURVES: Final = (
    ("utilization", "%", "utilization", 1.0),
    ("memory", "bytes", "memoryUsed", 1.0),
    ("power", "W", "power", 1e-3),
    ("sm_clock", "MHz", "smClock", 1.0),
    ("memory_clock", "MHz", "memoryClock", 1.0),
    ("temperature", "°C", "temperature", 1.0),
)
"""Name, unit, column of the samples, and what that is multiplied by."""

Floats = NDArray[np.float64]


def find_utilization(nvml: Nvml, gpus: PerGpu, window: Window | None = None) -> Utilization | None:
    """Every card that was sampled or that ran something; None where nothing is on a GPU.

    Samples may begin before the first operation and end after the last: all are shown, but for what
    lies outside the window that was asked for.
    """
    samples = nvml.samples
    if window is not None:
        inside = (samples.time >= window.start) & (samples.time < window.end)
        samples = samples.select(inside)
    spans = [lane.window for lane in gpus.lanes]
    moments = [*(span.start for span in spans), *(span.end for span in spans)]
    moments += [int(samples.time[0]), int(samples.time[-1]) + 1] if len(samples) else []
    if not moments:
        return None
    whole = Window(min(moments), max(moments))
    # Processes that see one card each call it by the same number: several lanes of one place.
    by_place: dict[tuple[int, int], list[_Busy]] = {}
    for busy in _busy(gpus, whole):
        by_place.setdefault((busy.gpu.host, busy.gpu.gpu), []).append(busy)
    sampled = set(zip(samples.host.tolist(), samples.gpu.tolist(), strict=True))
    return Utilization(
        whole.start,
        whole.end,
        tuple(
            _curves_of(place, nvml, busy, samples.of(*place), whole)
            for place in sorted(by_place.keys() | sampled)
            for busy in by_place.get(place, [None])
        ),
    )


def _curves_of(
    place: tuple[int, int], nvml: Nvml, busy: _Busy | None, samples: Samples, whole: Window
) -> GpuCurves:
    card = nvml.card(*place)
    gpu = None if busy is None else busy.gpu
    return GpuCurves(
        gpu=place[1],
        rank=None if gpu is None else gpu.rank,
        host="" if gpu is None else gpu.host_name,
        name=card.name if card is not None else "" if gpu is None else gpu.name,
        memory_bytes=None if card is None else card.memory_bytes,
        curves=(*(busy.curves if busy is not None else ()), *_sampled(samples, whole)),
    )


def _edges(whole: Window) -> NDArray[np.int64]:
    """Return the edges of at most `MOST_POINTS` stretches of equal length, to a nanosecond."""
    count = min(MOST_POINTS, whole.end - whole.start)
    length = whole.end - whole.start
    return np.array([whole.start + length * at // count for at in range(count + 1)], np.int64)


@dataclass(frozen=True)
class _Busy:
    """A GPU, with the share of each stretch in which it ran anything, by the trace itself."""

    gpu: Gpu
    curves: tuple[Curve, ...]
    """None of a trace that does not last."""


def _busy(gpus: PerGpu, whole: Window) -> Iterator[_Busy]:
    if whole.end <= whole.start:
        yield from (_Busy(lane.gpu, ()) for lane in gpus.lanes)
        return
    edges = _edges(whole)
    lengths = np.diff(edges)
    middles = tuple((edges[:-1] + lengths // 2).tolist())
    found = gpus.each(_busy_between, gpus.lanes, same=(edges,))
    for lane, busy in zip(gpus.lanes, found, strict=True):
        shares = _rounded(100 * busy / lengths)
        yield _Busy(lane.gpu, (Curve("busy", "%", middles, shares, shares, shares),))


def _busy_between(one: GpuShardView, edges: Times) -> Times:
    return one.lane.timeline.busy.within(edges[:-1], edges[1:])


def _sampled(samples: Samples, whole: Window) -> Iterator[Curve]:
    """A curve for each quantity that any sample has."""
    for name, unit, column, scale in _CURVES:
        values = samples[column]
        known = np.isfinite(values)
        if known.any():
            time, values = samples.time[known], values[known] * scale
            if len(time) > MOST_POINTS:
                yield _reduced(name, unit, time, values, whole)
            else:
                same = _rounded(values)
                yield Curve(name, unit, tuple(time.tolist()), same, same, same)


def _reduced(name: str, unit: str, time: NDArray[np.int64], values: Floats, whole: Window) -> Curve:
    """Least, mean and greatest of each stretch that has samples: no extreme is lost."""
    edges = _edges(whole)
    places = np.searchsorted(edges, time, "right") - 1
    stretches, first, counts = np.unique(places, return_index=True, return_counts=True)
    middles = edges[stretches] + (edges[stretches + 1] - edges[stretches]) // 2
    return Curve(
        name,
        unit,
        tuple(middles.tolist()),
        _rounded(np.minimum.reduceat(values, first)),
        _rounded(np.add.reduceat(values, first) / counts),
        _rounded(np.maximum.reduceat(values, first)),
    )


def _rounded(values: Floats) -> tuple[float, ...]:
    return tuple(np.round(values, 2).tolist())
