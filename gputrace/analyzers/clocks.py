"""Clocks of hosts, or of files with one each, aligned by the collectives that their ranks share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.grouping import median
from gputrace.analyzers.operations import OperationClass
from gputrace.errors import InputError
from gputrace.model.events import Kind, distinct_ids
from gputrace.model.intervals import Times
from gputrace.model.struct import Struct
from gputrace.units import format_ns

_ENDS_AT_ONCE: Final = r"(?i)all_?reduce|all_?gather|reduce_?scatter"
_ENDS_WITH_ITS_PARTNER: Final = r"(?i)send_?recv"
_WIDEST_NS: Final = 500_000
"""Maximum scatter of the ends of the same collectives around a shift."""
_FEWEST_PAIRS: Final = 5
"""Minimum pairs of ends for a shift: the first of a communicator end far apart."""


class ClockFit(Struct, frozen=True):
    """Alignment of the clocks of hosts, or of files with one each, with that of the first.

    Attributes:
        shifts: nanoseconds to add to the times of each clock.
        pairs: number of compared pairs of ends of one collective on two ranks.
        residual_ns: 95th percentile of their difference after the shifts.
        of: whose clocks they are, for messages.
    """

    shifts: Mapping[int, int]
    pairs: int
    residual_ns: int
    of: str = "hosts"

    def __str__(self) -> str:
        return (
            f"the clocks of {self.of} are aligned by {self.pairs:,} ends of collectives, to within "
            f"{format_ns(self.residual_ns)} (95 % of them)"
        )


def put_on_one_clock(gpus: PerGpu) -> None:
    """Correct the clocks of several hosts as far as collectives show it; raise InputError where
    nothing else could.
    """
    trace = gpus.trace
    fit = fit_clocks(gpus) if len(trace.paths) > 1 else None
    if fit is not None:
        gpus.move(fit.shifts, str(fit))
        gpus.clocks_apart_ns = max(gpus.clocks_apart_ns, fit.residual_ns)
    elif not trace.has_one_clock:
        problem = "does not say when it was recorded, and shares too few collectives with the "
        raise InputError(
            trace.path, problem + "other files to be aligned to one clock; analyze it alone"
        )


def fit_clocks(gpus: PerGpu) -> ClockFit | None:
    """Fit the shifts of clocks; None with one clock, if collectives do not determine them, or if
    those of one host agree already.

    Ranks that ran a collective equally often are taken to have run the same ones in order. Two
    files of one host that have none are aligned by what they send each other.
    """
    clock_of = gpus.trace.clock_of
    ran = sorted(gpus.operations, key=lambda summary: summary.gpu.rank)
    clocks = [{clock_of(process) for process, _ in summary.gpu.pairs} for summary in ran]
    distinct = set[int]().union(*clocks)
    if len(distinct) < 2 or any(len(several) > 1 for several in clocks):
        return None
    one_host = len({summary.gpu.host for summary in ran}) == 1
    pair = one_host and len(distinct) == 2
    patterns = (_ENDS_AT_ONCE, _ENDS_WITH_ITS_PARTNER) if pair else (_ENDS_AT_ONCE,)
    of_gpu = [min(clock) for clock in clocks]
    fits = (_fit(of_gpu, gpus.each(_ends, ran, same=(pattern,))) for pattern in patterns)
    fit = next(filter(None, fits), None)
    if fit is None or not one_host:
        return fit
    apart_ns = max(*map(abs, fit.shifts.values()), fit.residual_ns)
    return replace(fit, of="files") if apart_ns > gpus.clocks_apart_ns else None


def _fit(clocks: Sequence[int], ends: Sequence[Mapping[str, Times]]) -> ClockFit | None:
    """Fit the shifts of the clocks of GPUs, given the ends of their collectives by name."""
    ends_of: dict[int, list[Mapping[str, Times]]] = defaultdict(list)
    for clock, clock_ends in zip(clocks, ends, strict=True):
        ends_of[clock].append(clock_ends)
    shifts, residuals = {clocks[0]: 0}, []
    for clock in ends_of.keys() - shifts.keys():
        earlier = [
            ours[name] - theirs[name]
            for ours in ends_of[clocks[0]]
            for theirs in ends_of[clock]
            for name in ours.keys() & theirs.keys()
            if len(ours[name]) == len(theirs[name])
        ]
        apart = np.concatenate([np.empty(0, np.int64), *earlier])
        if len(apart) < _FEWEST_PAIRS:
            return None
        shifts[clock] = int(median(apart))
        residuals.append(np.abs(apart - shifts[clock]))
    scatter = np.concatenate(residuals)
    residual = int(np.percentile(scatter, 95))
    return ClockFit(shifts, len(scatter), residual) if residual <= _WIDEST_NS else None


def _ends(view: GpuShardView, pattern: str) -> dict[str, Times]:
    """Return the ends of the communication kernels of each name, in order of start."""
    operations, events = view.operations, view.operations.events
    rows = (operations.classes == OperationClass.COMMUNICATION) & (events.kind == Kind.KERNEL)
    names = view.trace.search(distinct_ids(events.name[rows]), pattern)
    return {text: events.end[rows & (events.name == id)] for id, text in names.items()}
