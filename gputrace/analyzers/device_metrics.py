"""Clocks, throttling, link, memory and utilization of each card, from NVML's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.grouping import StepsOf, stretches
from gputrace.analyzers.operations import Gpu
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.nvml import Card, Nvml, Samples
from gputrace.model.options import Window
from gputrace.model.results import CardUse, Curve, GpuCurves, Step, Utilization

REASONS: Final[Mapping[str, tuple[int, str]]] = {
    "power cap": (0x4, "powerCapTime"),
    "hardware slowdown": (0x8, ""),
    "sync boost": (0x10, "syncBoostTime"),
    "software thermal": (0x20, "swThermalTime"),
    "hardware thermal": (0x40, "hwThermalTime"),
    "power brake": (0x80, "powerBrakeTime"),
}
"""Reasons for lower clocks: bit of `clocksEventReasons`, and counter of its time."""

Floats = NDArray[np.float64]

_GPU_IDLE: Final = 0x1
_BEFORE: Final = 100_000_000
_BUSY: Final = 0.1
"""Minimum busy share of the time before a sample for a GPU to count as busy: clocks fall about a
second after the last kernel."""
_AT_MAX: Final = 0.99
"""Minimum fraction of the maximum clock that counts as the maximum: clocks move in small steps."""
_ENOUGH: Final = 0.5
"""Minimum fraction of the measured time that a counter's readings must span, and of a figure's
period that must be measured time."""
_PERIOD: Final = 1_000_000_000
"""Longest window of the first figure: the driver's sampling period."""


def find_cards(nvml: Nvml, gpus: PerGpu, steps: Sequence[Step]) -> tuple[CardUse, ...]:
    """Return the use of the sampled cards, in the order of the lanes.

    Where nothing else was recorded: all cards over all their samples, busy by the driver's figure.

    Args:
        nvml: samples and cards.
        gpus: GPUs, whose timelines show when the cards were busy.
        steps: steps to measure, by GPU; the whole span of a GPU that has none.
    """
    if not len(nvml.samples):
        return ()
    if gpus.trace.is_card_log:
        return tuple(_use_alone(nvml, host, gpu) for host, gpu in sorted(nvml.places))
    steps_of = StepsOf(steps)
    by_lane = [(lane, nvml.samples.of(lane.gpu.host, lane.gpu.gpu)) for lane in gpus.lanes]
    sampled = [(lane, samples) for lane, samples in by_lane if len(samples)]
    lanes = [lane for lane, _ in sampled]
    before = [(samples.time - _BEFORE, samples.time) for _, samples in sampled]
    busy = gpus.each(_busy_within, lanes, *zip(*before, strict=True)) if sampled else []
    return tuple(
        _use(
            lane.gpu,
            nvml.card(lane.gpu.host, lane.gpu.gpu) or Card(lane.gpu.gpu, lane.gpu.host),
            samples,
            stretches(steps_of(lane.gpu), lane.window),
            busy_ns >= _BUSY * _BEFORE,
        )
        for (lane, samples), busy_ns in zip(sampled, busy, strict=True)
    )


def _use_alone(nvml: Nvml, host: int, gpu: int) -> CardUse:
    samples = nvml.samples.of(host, gpu)
    card = nvml.card(host, gpu) or Card(gpu, host)
    measured = union([int(samples.time[0]) - _PERIOD], [int(samples.time[-1]) + 1])
    worked = np.nan_to_num(samples["utilization"]) > 0
    alone = Gpu(gpu, True, gpu, 0, gpu, False, card.name, host, "", ())
    return _use(alone, card, samples, measured, worked)


def _busy_within(view: GpuShardView, starts: Times, ends: Times) -> Times:
    return view.lane.timeline.busy.within(starts, ends)


def _use(
    gpu: Gpu,
    card: Card,
    samples: Samples,
    measured: Intervals,
    worked: NDArray[np.bool_],
) -> CardUse:
    here = measured.contains(samples.time)
    inside = samples.select(here)
    reasons = np.nan_to_num(samples["clocksEventReasons"]).astype(np.int64)
    busy = samples.select(here & worked & (reasons & _GPU_IDLE == 0))
    return CardUse(
        gpu=gpu.gpu,
        rank=gpu.rank,
        host=gpu.host_name,
        name=card.name or gpu.name,
        samples=len(busy),
        sm_clock_mhz=_reduced(busy["smClock"], np.median),
        sm_clock_max_mhz=card.sm_clock_max,
        sm_clock_application_mhz=card.sm_clock_application,
        sm_below_max=_below(busy["smClock"], card.sm_clock_max),
        memory_clock_mhz=_reduced(busy["memoryClock"], np.median),
        memory_clock_max_mhz=card.memory_clock_max,
        memory_clock_application_mhz=card.memory_clock_application,
        memory_below_max=_below(busy["memoryClock"], card.memory_clock_max),
        throttled=_throttled(busy, inside, measured),
        power_mw=_reduced(busy["power"], np.mean),
        power_limit_mw=card.power_limit_mw,
        temperature_c=_reduced(busy["temperature"], np.max),
        pcie_gen=_whole(busy["pcieGen"], np.median),
        pcie_gen_max=card.pcie_gen_max,
        pcie_width=_whole(busy["pcieWidth"], np.median),
        pcie_width_max=card.pcie_width_max,
        utilization_percent=_utilization(samples, measured),
        memory_used_bytes=_whole(inside["memoryUsed"], np.max),
        memory_bytes=card.memory_bytes,
    )


def _utilization(samples: Samples, measured: Intervals) -> float | None:
    """Return the mean of the driver's figure, which describes the time since the previous sample.

    Figures whose period is mostly outside of the measured time do not count.
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


def _throttled(busy: Samples, inside: Samples, measured: Intervals) -> dict[str, float]:
    """Return shares of time by reason: from the bits, or the counters where these show more.

    Counters of nanoseconds miss nothing between samples, but those that were read too seldom for
    the measured time are ignored.
    """
    span = int(measured.end[-1] - measured.start[0]) if len(measured) else 0
    bits = busy["clocksEventReasons"]
    known = bits[np.isfinite(bits)].astype(np.int64)
    shares = {}
    for reason, (bit, counter) in REASONS.items():
        share = float((known & bit != 0).mean()) if len(known) else 0.0
        values = inside[counter] if counter else np.empty(0)
        rows = np.flatnonzero(np.isfinite(values))
        if len(rows) > 1:
            passed = int(inside.time[rows[-1]] - inside.time[rows[0]])
            grown = float(values[rows[-1]] - values[rows[0]])
            if passed >= _ENOUGH * span:
                share = max(share, min(grown / passed, 1.0))
        shares[reason] = round(share, 4)
    # A hardware slowdown is thermal or a power brake, where these are known.
    if shares["hardware thermal"] or shares["power brake"]:
        shares["hardware slowdown"] = 0.0
    return {reason: share for reason, share in shares.items() if share}


def _reduced(values: Floats, how: Callable[[Floats], np.floating[Any]]) -> float | None:
    """Reduce the known values to two decimals; None where there are none."""
    known = values[np.isfinite(values)]
    return round(float(how(known)), 2) if len(known) else None


def _whole(values: Floats, how: Callable[[Floats], np.floating[Any]]) -> int | None:
    value = _reduced(values, how)
    return None if value is None else round(value)


def _below(clock: NDArray[np.float64], most: int | None) -> float | None:
    known = clock[np.isfinite(clock)]
    if not len(known) or not most:
        return None
    return round(float((known < _AT_MAX * most).mean()), 4)


MOST_POINTS: Final = 240
"""Maximum number of points of a curve."""

_CURVES: Final = (
    ("utilization", "%", "utilization", 1.0),
    ("memory", "bytes", "memoryUsed", 1.0),
    ("power", "W", "power", 1e-3),
    ("sm_clock", "MHz", "smClock", 1.0),
    ("memory_clock", "MHz", "memoryClock", 1.0),
    ("temperature", "°C", "temperature", 1.0),
)
"""Name, unit, column of the samples, and factor."""


def find_utilization(nvml: Nvml, gpus: PerGpu, window: Window | None = None) -> Utilization | None:
    """Return the curves of every card that was sampled or active; None if there is none.

    All samples in the window are shown, also before the first operation and after the last one.
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
    # Processes that see one card each call it by the same number: several lanes of one card.
    by_card: dict[tuple[int, int], list[tuple[Gpu | None, tuple[Curve, ...]]]] = {}
    for gpu, curves in _busy(gpus, whole):
        by_card.setdefault((gpu.host, gpu.gpu), []).append((gpu, curves))
    sampled = set(zip(samples.host.tolist(), samples.gpu.tolist(), strict=True))
    rows = []
    for key in sorted(by_card.keys() | sampled):
        card, of_samples = nvml.card(*key), tuple(_sampled(samples.of(*key), whole))
        for gpu_or_none, curves in by_card.get(key, [(None, ())]):
            gpu_name = gpu_or_none.name if gpu_or_none else ""
            rows.append(
                GpuCurves(
                    gpu=key[1],
                    rank=gpu_or_none.rank if gpu_or_none else None,
                    host=gpu_or_none.host_name if gpu_or_none else "",
                    name=card.name if card is not None else gpu_name,
                    memory_bytes=None if card is None else card.memory_bytes,
                    curves=(*curves, *of_samples),
                )
            )
    return Utilization(whole.start, whole.end, tuple(rows))


def _busy(gpus: PerGpu, whole: Window) -> Iterator[tuple[Gpu, tuple[Curve, ...]]]:
    """Yield the busy share of each GPU over time; no curve for an empty window."""
    if whole.end <= whole.start:
        yield from ((lane.gpu, ()) for lane in gpus.lanes)
        return
    edges = _edges(whole)
    lengths = np.diff(edges)
    middles = tuple((edges[:-1] + lengths // 2).tolist())
    busy = gpus.each(_busy_within, gpus.lanes, same=(edges[:-1], edges[1:]))
    for lane, busy_ns in zip(gpus.lanes, busy, strict=True):
        shares = _rounded(100 * busy_ns / lengths)
        yield lane.gpu, (Curve("busy", "%", middles, shares, shares, shares),)


def _edges(whole: Window) -> NDArray[np.int64]:
    """Return the edges of at most `MOST_POINTS` intervals of equal length."""
    count = min(MOST_POINTS, whole.end - whole.start)
    length = whole.end - whole.start
    return np.array([whole.start + length * at // count for at in range(count + 1)], np.int64)


def _sampled(samples: Samples, whole: Window) -> Iterator[Curve]:
    """Yield a curve for each sampled quantity.

    Many samples are reduced to minimum, mean and maximum of each interval, so no extreme is lost.
    """
    for name, unit, column, scale in _CURVES:
        values = samples[column]
        known = np.isfinite(values)
        if not known.any():
            continue
        time, values = samples.time[known], values[known] * scale
        if len(time) <= MOST_POINTS:
            same = _rounded(values)
            yield Curve(name, unit, tuple(time.tolist()), same, same, same)
            continue
        edges = _edges(whole)
        cells = np.searchsorted(edges, time, "right") - 1
        at, first, counts = np.unique(cells, return_index=True, return_counts=True)
        yield Curve(
            name,
            unit,
            tuple((edges[at] + (edges[at + 1] - edges[at]) // 2).tolist()),
            _rounded(np.minimum.reduceat(values, first)),
            _rounded(np.add.reduceat(values, first) / counts),
            _rounded(np.maximum.reduceat(values, first)),
        )


def _rounded(values: Floats) -> tuple[float, ...]:
    return tuple(np.round(values, 2).tolist())
