"""The cards over the whole run as curves of a bounded number of points, exactly reduced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.results.cards import Curve, GpuCurves, Utilization
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.nvml.model import Nvml, Samples
from gputrace.traces.trace import Window

MOST_POINTS: Final = 240
"""Of a curve."""

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
    """Of at most `MOST_POINTS` stretches of equal length, to a nanosecond."""
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


def _busy_between(one: OneGpu, edges: Times) -> Times:
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
