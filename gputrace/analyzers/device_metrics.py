"""Clocks, throttling, link, memory and utilization of each card, from NVML's samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.grouping import StepsOf, median
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import Gpu
from gputrace.model.cards import CardUse, Curve, Energy, GpuCurves, Utilization
from gputrace.model.events import UNKNOWN, Kind
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.kernels import Kernels, Roofline
from gputrace.model.nvml import Card, Nvml, Samples
from gputrace.model.options import Window
from gputrace.model.results import Step, Throughput
from gputrace.model.time_class import CLASSES
from gputrace.model.trace import Trace

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
_BUSY_SHARE: Final = 0.1
"""Minimum busy share of the time before a sample for a GPU to count as busy: clocks fall about a
second after the last kernel."""
_MAXIMUM_CLOCK_PART: Final = 0.99
"""Minimum fraction of the maximum clock that counts as the maximum: clocks move in small steps."""
_MEASURED_PART: Final = 0.5
"""Minimum fraction of the measured time that a counter's readings must span, and of a figure's
period that must be measured time."""
_UNMEASURED_PART: Final = 0.25
"""Maximum recorded time beside measured steps between two readings of energy, as a fraction of the
time that was not recorded, which does not begin and end with a step."""
_FIRST_PERIOD_NS: Final = 1_000_000_000
"""Longest window of the first figure: the driver's sampling period."""


def find_cards(nvml: Nvml, gpus: PerGpu, steps: Sequence[Step]) -> tuple[CardUse, ...]:
    """Return the use of the sampled cards, in the order of the lanes.

    Where nothing else was recorded: all cards over all their samples, busy by the driver's figure.

    Measures ``steps``, by GPU; the whole span of a GPU that has none.
    """
    if not len(nvml.samples):
        return ()
    if gpus.trace.is_card_log:
        uses = []
        for host, gpu in sorted(nvml.places):
            samples, card = nvml.samples.of(host, gpu), nvml.card(host, gpu) or Card(gpu, host)
            start, end = int(samples.time[0]) - _FIRST_PERIOD_NS, int(samples.time[-1]) + 1
            worked = np.nan_to_num(samples["utilization"], nan=1) > 0
            alone = Gpu(gpu, True, gpu, 0, gpu, False, card.name, host, "", ())
            uses.append(_use(alone, card, samples, union([start], [end]), worked))
        return tuple(uses)
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
            steps_of.time(lane.gpu, lane.window),
            busy_ns >= _BUSY_SHARE * _BEFORE,
        )
        for (lane, samples), busy_ns in zip(sampled, busy, strict=True)
    )


def _busy_within(view: GpuShardView, starts: Times, ends: Times) -> Times:
    return view.lane.timeline.busy.within(starts, ends)


def _use(
    gpu: Gpu, card: Card, samples: Samples, measured: Intervals, worked: NDArray[np.bool_]
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
        sm_clock_mhz=_reduced(busy["smClock"], median),
        sm_clock_max_mhz=card.sm_clock_max,
        sm_clock_application_mhz=card.sm_clock_application,
        sm_below_max=_below(busy["smClock"], card.sm_clock_max),
        memory_clock_mhz=_reduced(busy["memoryClock"], median),
        memory_clock_max_mhz=card.memory_clock_max,
        memory_clock_application_mhz=card.memory_clock_application,
        memory_below_max=_below(busy["memoryClock"], card.memory_clock_max),
        throttled=_throttled(busy, inside, measured),
        power_mw=_reduced(busy["power"], np.mean),
        power_limit_mw=card.power_limit_mw,
        temperature_c=_reduced(busy["temperature"], np.max),
        pcie_gen=_whole(busy["pcieGen"], median),
        pcie_gen_max=card.pcie_gen_max,
        pcie_width=_whole(busy["pcieWidth"], median),
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
    starts = np.concatenate([[ends[0] - _FIRST_PERIOD_NS], ends[:-1]])
    inside = measured.within(starts, ends)
    counts = inside >= _MEASURED_PART * (ends - starts)
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
            if passed >= _MEASURED_PART * span:
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
    return round(float((known < _MAXIMUM_CLOCK_PART * most).mean()), 4)


def find_energy(
    nvml: Nvml, gpus: PerGpu, steps: Sequence[Step], throughput: Sequence[Throughput]
) -> tuple[Energy, ...]:
    """Return the energy of each GPU by class, between the readings of NVML's counter that lie in
    the measured steps; nothing of cards without two such readings. What was not recorded between
    them, half of the time at most, is taken to draw as much as the rest, and left out.

    What ranks that share a card draw between two readings is divided by the time in which each runs
    anything; evenly where none does.

    Measures ``steps``, by GPU; the whole span of a GPU that has none.
    """
    steps_of, work = StepsOf(steps), {row.rank: row for row in throughput}
    counted = []
    for lane in gpus.lanes:
        mine = steps_of(lane.gpu)
        measured = steps_of.time(lane.gpu, lane.window)
        starts, ends, grown = _growth(nvml, lane, measured)
        if len(starts):
            counted.append((lane, mine, measured, starts, ends, grown))
    lanes = [row[0] for row in counted]
    edges = [row[3] for row in counted], [row[4] for row in counted]
    tables = gpus.each(_split, lanes, *edges) if lanes else []
    rows = []
    for (lane, mine, measured, starts, ends, grown), (classes, waited) in zip(
        counted, tables, strict=True
    ):
        # Of what was not recorded no class is known; it draws as much as what is beside it.
        lengths, passed = classes.sum(axis=1), ends - starts
        beside = lengths - measured.within(starts, ends)
        known = (lengths >= _MEASURED_PART * passed) & (
            beside <= _UNMEASURED_PART * (passed - lengths)
        )
        if known.any():
            drawn = (grown * _drawn_by(lane, gpus, starts, ends) * lengths / passed)[known]
            done = work.get(lane.gpu.rank)
            rows.append(_energy(lane.gpu, mine, done, classes[known], waited[known], drawn))
    return tuple(rows)


def _growth(nvml: Nvml, lane: LaneSummary, measured: Intervals) -> tuple[Times, Times, Times]:
    """Return the times between two readings of a card's counter within the measured time, and the
    millijoules by which it grew in each: starts, ends, growth.
    """
    samples = nvml.samples.of(lane.gpu.host, lane.gpu.gpu)
    samples = samples.select(np.isfinite(samples["energy"]))
    starts, ends = samples.time[:-1], samples.time[1:]
    grown = np.diff(samples["energy"]).astype(np.int64)
    # A counter falls back to 0 where the driver was loaded anew.
    keep = (ends > starts) & (grown >= 0)
    if len(measured):
        keep &= (starts >= measured.start[0]) & (ends <= measured.end[-1])
    else:
        keep[:] = False
    return starts[keep], ends[keep], grown[keep]


def _energy(
    gpu: Gpu,
    steps: Sequence[Step],
    work: Throughput | None,
    classes: NDArray[np.int64],
    waited: Times,
    drawn: Floats,
) -> Energy:
    """Return the energy of a GPU by class, of shape (readings, classes) in nanoseconds, and the
    millijoules drawn between readings.
    """
    lengths = classes.sum(axis=1)
    passed, total = int(lengths.sum()), round(float(drawn.sum()))
    # Rounded as running sums, so that the classes sum to the total.
    edge = np.round(np.cumsum((classes * (drawn / lengths)[:, None]).sum(axis=0))).astype(np.int64)
    edge[-1] = total
    waits = None if (waited == UNKNOWN).any() else (waited * drawn / lengths).sum()
    length = np.mean([step.end_ns - step.start_ns for step in steps]) if steps else None
    step_mj = None if length is None else total / passed * float(length)
    return Energy(
        gpu=gpu.gpu,
        rank=gpu.rank,
        host=gpu.host_name,
        measured_ns=passed,
        total_mj=total,
        classes_mj=dict(zip(CLASSES, np.diff(edge, prepend=0).tolist(), strict=True)),
        communication_wait_mj=None if waits is None else round(float(waits)),
        step_mj=None if step_mj is None else round(step_mj),
        sample_mj=_per(step_mj, work.samples_per_step if work else None),
        token_mj=_per(step_mj, work.tokens_per_step if work else None),
    )


PEAKS: Final[Mapping[str, Mapping[str, float]]] = {
    r"GB300": {"fp4": 15000, "fp8": 5000, "bf16": 2500, "fp16": 2500, "tf32": 1250, "fp32": 80,
               "fp64": 1.3},
    r"B300": {"fp4": 14000, "fp8": 4500, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75,
              "fp64": 1.2},
    r"GB200": {"fp4": 10000, "fp8": 5000, "bf16": 2500, "fp16": 2500, "tf32": 1250, "fp32": 80,
               "fp64": 40},
    r"B200": {"fp4": 9000, "fp8": 4500, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75,
              "fp64": 37},
    r"(?i)rubin": {"fp4": 35000, "fp8": 16700},
    r"H[12]00 NVL":
        {"fp8": 1671, "bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60, "fp64": 60},
    r"H800.*PCIe": {"fp8": 1513, "bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51, "fp64": 0.8},
    r"H800": {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67, "fp64": 1},
    r"H100.*PCIe": {"fp8": 1513, "bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51, "fp64": 51},
    r"H100|H200": {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67, "fp64": 67},
    r"H20(?!0)": {"fp8": 296, "bf16": 148, "fp16": 148, "tf32": 74, "fp32": 44},
    r"A100|A800": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5, "fp64": 19.5},
    r"L40S": {"fp8": 733, "bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6},
    r"L4(?!0)": {"fp8": 242, "bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3},
    r"A40(?!0)": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    r"A10(?![0G])": {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2},
    r"V100": {"fp16": 125, "fp32": 15.7, "fp64": 7.8},
    r"T4(?!00)": {"fp16": 65, "fp32": 8.1},
    r"MI300X": {"fp8": 2614, "bf16": 1307, "fp16": 1307, "tf32": 653, "fp32": 163, "fp64": 163},
}  # fmt: skip
"""Dense peak in TFLOP/s by card and precision, without sparsity, from the makers' data sheets of
each card (NVIDIA; AMD of the MI300X); where a name does not say which form a card has, SXM's. Of
Rubin, the maker has only given preliminary figures of training."""


_MEMORY: Final[Mapping[str, int]] = {
    r"(?i)rubin": 22000, r"B[23]00": 8000, r"H200": 4800, r"H100 NVL": 3900, r"H[18]00.*PCIe": 2000,
    r"H[18]00": 3350, r"H20(?!0)": 4000, r"A[18]00.*PCIe.*80": 1935, r"A[18]00.*80": 2039,
    r"A100": 1555, r"L40S": 864, r"L4(?!0)": 300, r"A40(?!0)": 696, r"A10(?![0G])": 600,
    r"V100": 900, r"MI300X": 5300,
}  # fmt: skip
"""Peak of the memory in GB/s by card, from the same data sheets."""


_LEAST_MFU: Final = 0.0005
"""Part of the peak below which the counted FLOPs are hardly the work of the steps: it would be
shown as 0.0 %."""


def add_use(
    throughput: Sequence[Throughput], lanes: Sequence[LaneSummary], kernels: Kernels | None
) -> tuple[Throughput, ...]:
    """Add the FLOP/s of each rank as a part of its cards' peak (MFU), where both are known.

    The peak is that of the precision in which most time goes to matrix products.
    """
    products = [] if kernels is None else kernels.products
    precision = products[0].precision if products else "unknown"
    precision = "bf16" if precision == "half" else precision
    rows = []
    for row in throughput:
        names = [lane.gpu.name for lane in lanes if lane.gpu.rank == row.rank]
        peaks = [peak_of(name, precision) for name in names]
        peak = sum(each or 0 for each in peaks)
        if peaks and None not in peaks and (row.flop_per_s or 0) >= _LEAST_MFU * peak:
            mfu = round((row.flop_per_s or 0) / peak, 4)
            row = replace(row, precision=precision, peak_flop_per_s=peak, mfu=mfu)
        rows.append(row)
    return tuple(rows)


_KNOWN_PRODUCTS_SHARE: Final = 0.98
"""Least share of the time of matrix products whose work is known, for FLOPs of steps."""


def flop_of_step(kernels: Kernels | None) -> dict[int, float]:
    """Return the FLOPs of a mean measured step by rank, where almost all of them are known."""
    rows = kernels.flop if kernels is not None else ()
    ranks = {row.rank for row in rows} - {
        row.rank for row in rows if row.known < _KNOWN_PRODUCTS_SHARE
    }
    return {
        rank: sum(row.flop / row.steps for row in rows if row.rank == rank)
        for rank in sorted(ranks)
        if all(row.steps for row in rows if row.rank == rank)
    }


def peak_of(card: str, precision: str) -> float | None:
    """Return the peak in FLOP/s of a card by its name; None where unknown."""
    table = next((row for rule, row in PEAKS.items() if re.search(rule, card)), {})
    return 1e12 * table[precision] if precision in table else None


def memory_peak_of(card: str) -> float | None:
    """Return the peak of a card's memory in bytes a second by its name; None where unknown."""
    return next((1e9 * peak for rule, peak in _MEMORY.items() if re.search(rule, card)), None)


def roofline(
    flop: float, traffic: float | None, time_ns: int, precision: str, card: str
) -> Roofline:
    """Set the speed of a kernel beside the peaks of a card in a precision.

    One that has no FLOPs counted moves what it computes with, and its memory is its limit.
    """
    speed = flop * 1e9 / time_ns
    moved = traffic * 1e9 / time_ns if traffic else None
    intensity = flop / traffic if traffic else None
    peak, memory = peak_of(card, "bf16" if precision == "half" else precision), memory_peak_of(card)
    if not flop and moved and memory:
        return Roofline(speed, 0.0, "memory", None, round(moved / memory, 4), moved)
    if not flop or peak is None or memory is None or intensity is None:
        return Roofline(speed, intensity, None, None, None, moved)
    limit = min(peak, intensity * memory)
    bound = "compute" if limit == peak else "memory"
    return Roofline(speed, round(intensity, 2), bound, limit, round(speed / limit, 4), moved)


def _split(view: GpuShardView, starts: Times, ends: Times) -> tuple[NDArray[np.int64], Times]:
    return view.lane.split(starts, ends), view.lane.waited(starts, ends)


def _drawn_by(lane: LaneSummary, gpus: PerGpu, starts: Times, ends: Times) -> Floats:
    """Return the part of its card's energy that a rank draws in each window, 0 to 1."""
    of_card = [x for x in gpus.lanes if (x.gpu.host, x.gpu.gpu) == (lane.gpu.host, lane.gpu.gpu)]
    if len(of_card) == 1:
        return np.ones(len(starts))
    count = len(of_card)
    busy = np.stack(gpus.each(_busy_within, of_card, [starts] * count, [ends] * count))
    together = busy.sum(axis=0)
    mine = busy[of_card.index(lane)]
    return np.where(together > 0, mine / np.maximum(together, 1), 1 / count)


def _per(energy: float | None, number: float | None) -> float | None:
    return round(energy / number, 6) if energy is not None and number else None


MOST_POINTS: Final = 240
"""Maximum number of points of a curve."""

_CURVES: Final = (
    ("utilization", "%", "utilization", 1.0),
    ("memory", "bytes", "memoryUsed", 1.0),
    ("power", "W", "power", 1e-3),
    ("sm_clock", "MHz", "smClock", 1.0),
    ("memory_clock", "MHz", "memoryClock", 1.0),
    ("temperature", "°C", "temperature", 1.0),
    ("sm_active", "%", "smActive", 1.0),
    ("tensor_active", "%", "tensorActive", 1.0),
    ("dram_active", "%", "dramActive", 1.0),
    ("nvlink_sent", "bytes/s", "nvlinkTxRate", 1.0),
    ("pcie_received", "bytes/s", "pcieRxRate", 1.0),
)
"""Name, unit, column of the samples or of the activity, and factor."""


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
    activity = nvml.activity
    inside = (activity.time >= whole.start) & (activity.time < whole.end)
    activity = activity.select(inside)
    # Processes that see one card each call it by the same number: several lanes of one card.
    by_card: dict[tuple[int, int], list[tuple[Gpu | None, tuple[Curve, ...]]]] = {}
    for gpu, curves in _busy(gpus, whole):
        by_card.setdefault((gpu.host, gpu.gpu), []).append((gpu, curves))
    sampled = set(zip(samples.host.tolist(), samples.gpu.tolist(), strict=True))
    rows = []
    for key in sorted(by_card.keys() | sampled):
        card = nvml.card(*key)
        both = samples.of(*key), activity.of(*key)
        of_samples = [curve for rows_of in both for curve in _sampled(rows_of, whole)]
        for gpu_or_none, curves in by_card.get(key, [(None, ())]):
            if gpu_or_none and not any(curve.name == "memory" for curve in of_samples):
                held = held_by_tensors(gpus.trace, gpu_or_none)
                inside = (held.time >= whole.start) & (held.time < whole.end)
                curves += tuple(_sampled(held.select(inside), whole))
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


def held_by_tensors(trace: Trace, gpu: Gpu) -> Samples:
    """Return the memory that tensors of a GPU's process hold, as samples of ``memoryUsed``."""
    if Kind.MEMORY not in trace.kinds:
        return Samples()
    rows = trace.events([Kind.MEMORY], ["start", "process", "device", "bytes"])
    rows = rows.select((rows.process == gpu.process) & (rows.device == gpu.device))
    rows = rows.select(np.argsort(rows.start, kind="stable"))
    host, number = (np.full(len(rows), place) for place in (gpu.host, gpu.gpu))
    return Samples(rows.start, host, number, {"memoryUsed": rows.bytes.astype(np.float64)})


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
