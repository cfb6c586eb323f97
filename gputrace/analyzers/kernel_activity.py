"""Activity of the parts of a card while each kernel runs, from counters that cover many at once.

A reading of the counters (`Nvml.activity`) is the mean of 100 ms, in which a long kernel may be
alone, and short ones alternate. The activity of each kernel is that which explains all readings
best, if each kernel contributes in proportion to the time that it runs in them: linear regression,
whose uncertainty says what is not known, such as the shares of two kernels that always run in equal
parts. A card takes stock every 100 ms exactly, by a clock of its own, and shows the counters up to
0.1 s later, a little more or less each time (H100 and H200, driver 580). When it took stock follows
from the readings, too: all moments count, each by how well kernels then explain the readings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import GpuOperations, OperationClass
from gputrace.model.events import Kind, Mask, number_ids
from gputrace.model.intervals import Intervals, Times, merge_touching, union
from gputrace.model.kernels import KernelActivity
from gputrace.model.nvml import Samples

Floats = NDArray[np.float64]

_ARITHMETIC: Final = ("tensorActive", "fp64Active", "fp32Active", "fp16Active")
_FIGURES: Final[Mapping[str, tuple[str, ...]]] = {
    "sms": ("smActive",),
    "tensor_cores": ("tensorActive",),
    "arithmetic": _ARITHMETIC,
    "memory": ("dramActive",),
    "nvlink_bytes_per_s": ("nvlinkTxRate", "nvlinkRxRate"),
    "pcie_bytes_per_s": ("pcieTxRate", "pcieRxRate"),
}
"""Columns that sum to a figure of `KernelActivity`."""
_FLOOR: Final = np.array([0.002, 0.002, 0.002, 0.002, 1e6, 1e6])
"""Least standard deviation of a reading: percent, or bytes a second."""
_LEAST_SCALE: Final = np.array([1, 1, 1, 1, 1e8, 1e8])
_EDGE_PART: Final = 0.005
"""Standard deviation of the time of a kernel in a reading, as a part of the reading."""
_RECORDED_PART: Final = 0.99
"""Minimum part of a reading that must have been recorded."""
_FRACTIONS: Final = 4
"""Figures that are percents, the first of all."""
_ROUNDS: Final = 4
_TINY: Final = 1e-9
_CELL_NS: Final = 100_000_000
"""Time from one stocktaking of a card to the next."""
_PHASES: Final = np.arange(0, 100, 2) * 1_000_000
"""When a card may take stock, within that time."""
_FINER: Final = (np.arange(-3, 4) * 500_000, np.arange(-4, 5) * 100_000)
"""Distances tried around the likely phases, and then around the likely ones of these."""
_LEAST_DELAYS: Final = (0, 50_000_000)
"""Least time from stocktaking to a change that is seen; it varies by less than 100 ms."""
_CHUNK_NS: Final = 60_000_000_000
"""Time for which the clocks of card and host agree within a millisecond or so."""
_MOST_CHUNKS: Final = 30
"""Maximum number of such times that are looked at for a GPU, evenly spaced."""
_LEAST_LIKELY: Final = 10
"""Natural logarithm by which a delay may be less likely than the best to count at all."""
_BEFORE_NS: Final = 200_000_000
"""Time before the first operation of a process in which it is known that it ran nothing."""
_FEWEST_READINGS: Final = 5
_MOST_ERROR: Final = 0.05
"""Maximum standard error of the shares of a kernel whose activity is told."""
_SURE: Final = 3
"""Standard errors within which a value certainly is."""
_NO_ARITHMETIC: Final = 0.02
"""Maximum arithmetic of a kernel that waits, as a part of the activity of its SMs."""
_NO_MEMORY: Final = 0.02
_NO_TRAFFIC: Final = 1e9
"""Bytes a second over NVLink and PCIe below which a kernel exchanges nothing."""
_EXCHANGES: Final = 10e9
"""Bytes a second from which it is an exchange."""
_FEW_SMS: Final = 0.05


def measure_activity(
    gpus: PerGpu, lanes: Sequence[LaneSummary], codes: Sequence[dict[int, int]], chosen: list[int]
) -> dict[int, KernelActivity]:
    """Return the activity of some kernels (``chosen``, by code of the name) where it is known.

    ``codes`` are by id of the name, for each lane. Cards that several ranks share are left out.
    """
    activity, cards = gpus.trace.nvml.activity, Counter(map(_card, gpus.lanes))
    asked = [
        (lane, names, activity.of(*_card(lane)))
        for lane, names in zip(lanes, codes, strict=True)
        if cards[_card(lane)] == 1
    ]
    by_lane = gpus.each(explain, *zip(*asked, strict=True), same=(chosen,)) if asked else []
    parts = [part for parts in by_lane for part in parts]
    found = {code: _pooled(parts, at) for at, code in enumerate(chosen)}
    return {code: known for code, known in found.items() if known is not None}


def _card(lane: LaneSummary) -> tuple[int, int]:
    return lane.gpu.host, lane.gpu.gpu


class Explained(NamedTuple):
    """Activity of each chosen kernel by the readings of one GPU: shape (figures, chosen)."""

    values: Floats
    errors: Floats
    """Standard errors; NaN where the kernel did not run."""
    readings: NDArray[np.int64]
    """Readings in which it ran: shape (chosen,)."""


def explain(
    view: GpuShardView, codes: dict[int, int], samples: Samples, chosen: list[int]
) -> list[Explained]:
    """Return the activity of kernels that explains the readings of a GPU best, each minute."""
    # The figures of each reading: shape (readings, figures); links are 0 where unknown.
    columns = [[samples[name] for name in names] for names in _FIGURES.values()]
    summed = np.array([np.sum(parts, axis=0) for parts in columns])
    summed[_FRACTIONS:] = np.nan_to_num(summed[_FRACTIONS:])
    figures = summed.T
    starts = samples.time - np.nan_to_num(samples["periodNs"]).astype(np.int64)
    known = _recorded(view, starts, samples.time) & np.isfinite(figures).all(axis=1)
    rows = np.flatnonzero(known & (starts < samples.time))
    chunks = np.split(rows, np.flatnonzero(np.diff(samples.time[rows] // _CHUNK_NS)) + 1)
    chunks = [chunk for chunk in chunks if len(chunk) >= _FEWEST_READINGS]
    seen, column = np.array([starts, samples.time]), _places(view, codes, chosen)
    column = np.where(column < 0, len(chosen) + view.operations.classes, column)
    return [
        _explain(view.operations, column, seen[:, chunk], figures[chunk], len(chosen))
        for chunk in chunks[:: len(chunks) // _MOST_CHUNKS + 1]
    ]


def _explain(
    ops: GpuOperations, column: NDArray[np.int64], seen: Times, figures: Floats, kernels: int
) -> Explained:
    """Explain some readings by ``kernels`` kernels.

    ``column`` is the place of each operation among the kernels and, after these, the classes;
    ``seen`` are the changes before and after each reading: shape (2, readings).

    Moments of stocktaking that explain them about as well add to the uncertainty.
    """
    phases = _PHASES
    for finer in (*_FINER, None):
        cells = np.concatenate([_cells(seen, phases, least) for least in _LEAST_DELAYS])
        shares = _shares(ops, column, cells, kernels + len(OperationClass))
        likely = np.array([_likelihood(share, figures) for share in shares])
        counts = likely >= likely.max() - _LEAST_LIKELY
        if finer is not None:
            near = np.tile(phases, len(_LEAST_DELAYS))[counts]
            phases = np.unique((near[:, None] + finer) % _CELL_NS)
    used = np.flatnonzero(shares.any(axis=(0, 1)))
    weight = np.exp(likely[counts] - likely.max())
    weight /= weight.sum()
    solved = [_solve(share[:, used], figures) for share in shares[counts]]
    means, deviations = np.array(solved).swapaxes(0, 1)
    mean = np.tensordot(weight, means, 1)
    variance = np.tensordot(weight, deviations**2 + (means - mean) ** 2, 1)
    values, errors = np.full((2, len(_FIGURES), shares.shape[2]), np.nan)
    values[:, used], errors[:, used] = mean, np.sqrt(variance)
    runs = (shares[likely.argmax()] > 0).sum(axis=0)
    return Explained(values[:, :kernels], errors[:, :kernels], runs[:kernels])


def _cells(seen: Times, phases: Times, least_delay: int) -> Times:
    """Return the moments of stocktaking before changes were seen: shape (phases, 2, readings)."""
    late = seen - least_delay - phases[:, None, None]
    return late // _CELL_NS * _CELL_NS + phases[:, None, None]


def _recorded(view: GpuShardView, starts: Times, ends: Times) -> Mask:
    """Return whether all that a reading may be of was recorded."""
    ops = view.operations
    known, first = ops.recorded, int(ops.start[0])
    if ops.coverage.from_the_start:
        known = merge_touching(known, union([first - _BEFORE_NS], [first]))
    starts = starts - _CELL_NS - _LEAST_DELAYS[-1]
    return known.within(starts, ends) >= _RECORDED_PART * (ends - starts)


def _shares(ops: GpuOperations, column: NDArray[np.int64], cells: Times, columns: int) -> Floats:
    """Return the part of each reading in which the operations of each column run, for each phase:
    shape (phases, readings, columns).

    ``cells`` are the starts and ends of the readings: shape (phases, 2, readings).
    """
    origin = int(cells.min())
    rows = slice(
        int(np.searchsorted(ops.reach, origin, "right")),
        int(np.searchsorted(ops.start, cells.max())),
    )
    column = column[rows]
    starts, ends = ops.start[rows] - origin, ops.end[rows] - origin
    moments = cells - origin
    lengths = np.maximum(moments[:, 1] - moments[:, 0], 1)
    shares = np.zeros((len(cells), cells.shape[2], columns))

    def before(edges: Times) -> Floats:
        """Sum the time from each edge to each of the moments after it."""
        edges = np.sort(edges)
        past = np.searchsorted(edges, moments)
        sums = np.concatenate([[0.0], np.cumsum(edges, dtype=np.float64)])
        return np.asarray(past * moments.astype(np.float64) - sums[past])

    for at in np.unique(column).tolist():
        mine = column == at
        passed = before(starts[mine]) - before(ends[mine])
        shares[:, :, at] = (passed[:, 1] - passed[:, 0]) / lengths
    return shares


def _places(view: GpuShardView, codes: dict[int, int], chosen: list[int]) -> NDArray[np.int64]:
    """Return the place among the chosen kernels of each operation; -1 if it has none."""
    events = view.operations.events
    distinct, where = number_ids(events.name)
    place = {code: at for at, code in enumerate(chosen)}
    places = [place.get(codes.get(name, -1), -1) for name in distinct.tolist()]
    return np.where(events.kind == Kind.KERNEL, np.array(places, np.int64).take(where), -1)


def _likelihood(share: Floats, figures: Floats) -> float:
    """Return the logarithm of how likely readings are, up to a constant, by the fractions."""
    fractions = figures[:, :_FRACTIONS] / np.maximum(figures.max(axis=0), _LEAST_SCALE)[:_FRACTIONS]
    ridge = _TINY * np.eye(share.shape[1])
    values = np.linalg.solve(share.T @ share + ridge, share.T @ fractions)
    squares = ((fractions - share @ values) ** 2).mean(axis=0)
    return float(-len(figures) / 2 * np.log(squares + _EDGE_PART**2 / 10).mean())


def _solve(share: Floats, figures: Floats) -> tuple[Floats, Floats]:
    """Return the figures of each column of ``share``, and their standard errors."""
    idle = np.maximum(1 - share.sum(axis=1), 0)
    mixed = np.sqrt(np.clip(1 - (share**2).sum(axis=1) - idle**2, 0, 1))
    values, errors = np.zeros((2, figures.shape[1], share.shape[1]))
    for at, figure in enumerate(figures.T):
        scale = max(float(figure.max()), _LEAST_SCALE[at])
        known = (_EDGE_PART * scale * mixed) ** 2 + _FLOOR[at] ** 2
        own = np.zeros(share.shape[1])
        for _ in range(_ROUNDS):
            variance = known + share**2 @ own
            weighted = share / variance[:, None]
            covariance = np.linalg.inv(share.T @ weighted + np.eye(len(own)) / scale**2)
            values[at] = covariance @ (weighted.T @ figure)
            # A kernel's launches differ, by as much as readings deviate in which it runs.
            alone = share**4 + _TINY
            own = alone.T @ (figure - share @ values[at]) ** 2 / alone.sum(axis=0)
        errors[at] = np.sqrt(np.diag(covariance))
    return values, errors


def _pooled(parts: Sequence[Explained], at: int) -> KernelActivity | None:
    """Return the activity of one kernel by all GPUs; None if it is not known."""
    parts = [part for part in parts if part.readings[at]]
    runs = sum(int(part.readings[at]) for part in parts)
    if runs < _FEWEST_READINGS:
        return None
    values = np.array([part.values[:, at] for part in parts])
    weights = np.array([part.errors[:, at] for part in parts]) ** -2.0
    value = (weights * values).sum(axis=0) / weights.sum(axis=0)
    # GPUs that disagree leave it as uncertain as they do.
    misfit = (weights * (values - value) ** 2).sum(axis=0) / max(len(parts) - 1, 1)
    error = np.sqrt(np.maximum(misfit, 1) / weights.sum(axis=0))
    value[:_FRACTIONS], error[:_FRACTIONS] = value[:_FRACTIONS] / 100, error[:_FRACTIONS] / 100
    if error[:_FRACTIONS].max() > _MOST_ERROR:
        return None
    shown = zip(_FIGURES, np.round(np.maximum(value, 0), 4).tolist(), strict=True)
    worst, does = round(float(error[:_FRACTIONS].max()), 4), _verdict(value, error)
    return KernelActivity(readings=runs, **dict(shown), error=worst, does=does)


def _verdict(values: Floats, errors: Floats) -> str | None:
    """Say what a kernel mostly does, if that is certain."""
    most, least = np.maximum(values, 0) + _SURE * errors, values - _SURE * errors
    sms, _, arithmetic, memory, nvlink, pcie = most.tolist()
    if least[4] + least[5] >= _EXCHANGES:
        return "exchanges"
    if max(nvlink, pcie) >= _NO_TRAFFIC:
        return None
    if arithmetic <= _NO_ARITHMETIC * values[0] and memory <= _NO_MEMORY:
        return "waits"
    return "few SMs" if sms <= _FEW_SMS else None


def time_alone(
    view: GpuShardView, windows: Intervals, codes: dict[int, int], chosen: list[int]
) -> list[int]:
    """Return the nanoseconds in some intervals in which each of some kernels runs alone."""
    ops, place = view.operations, _places(view, codes, chosen)
    alone = []
    for at in range(len(chosen)):
        mine = place == at
        others = union(ops.start[~mine], ops.end[~mine])
        running = union(ops.start[mine], ops.end[mine]).difference(others)
        alone.append(running.intersection(windows).total)
    return alone
