"""The clocks of several hosts, aligned by collectives: an all-reduce ends at once on all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.events import Kind
from gputrace.traces.ids import distinct_ids
from gputrace.units import format_ns

_ENDS_AT_ONCE: Final = re.compile(r"all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE)
_FEWEST: Final = 5
"""So many pairs of ends at least tell the shift of a host."""
_WIDEST_NS: Final = 500_000
"""Ends that scatter more than this around a shift are not of the same collectives."""


@dataclass(frozen=True, slots=True)
class ClockFit:
    """How the clocks of hosts are brought onto that of the first.

    Attributes:
        shifts: nanoseconds to add to the times of each host.
        pairs: how many ends of one collective on two ranks were compared.
        residual_ns: 95 of 100 of these differ by less once the shifts are added.
    """

    shifts: Mapping[int, int]
    pairs: int
    residual_ns: int

    def __str__(self) -> str:
        return (
            f"the clocks of hosts are aligned by {self.pairs:,} ends of collectives, to within "
            f"{format_ns(self.residual_ns)} (95 % of them)"
        )


def fit_clocks(gpus: PerGpu) -> ClockFit | None:
    """The shifts of hosts; None where there is one host, or collectives do not tell."""
    first = min(gpus.operations, key=lambda own: own.gpu.rank, default=None)
    if first is None or len({own.gpu.host for own in gpus.operations}) < 2:
        return None
    found = gpus.each(_collectives, gpus.operations)
    ends = [(own.gpu.host, each) for own, each in zip(gpus.operations, found, strict=True)]
    shifts, residuals = {first.gpu.host: 0}, []
    for host in {host for host, _ in ends} - shifts.keys():
        apart = _apart(ends, first.gpu.host, host)
        if len(apart) < _FEWEST:
            return None
        shifts[host] = int(np.median(apart))
        residuals.append(np.abs(apart - shifts[host]))
    scatter = np.concatenate(residuals)
    residual = int(np.percentile(scatter, 95))
    return ClockFit(shifts, len(scatter), residual) if residual <= _WIDEST_NS else None


def _collectives(one: OneGpu) -> dict[str, Times]:
    """The ends of the collectives of each name, in the order in which they began."""
    own, events = one.operations, one.operations.events
    rows = (own.classes == OperationClass.COMMUNICATION) & (events.kind == Kind.KERNEL)
    names = one.trace.search(distinct_ids(events.name[rows]), _ENDS_AT_ONCE)
    return {text: events.end[rows & (events.name == id)] for id, text in names.items()}


def _apart(ends: Sequence[tuple[int, dict[str, Times]]], a: int, b: int) -> NDArray[np.int64]:
    """How much earlier collectives end on ranks of host b than on those of host a, by their clocks.

    Ranks that ran a collective equally often ran the same ones, one after the other.
    """
    found = [np.empty(0, np.int64)]
    found += (
        ours[name] - theirs[name]
        for ours in _of(ends, a)
        for theirs in _of(ends, b)
        for name in ours.keys() & theirs.keys()
        if len(ours[name]) == len(theirs[name])
    )
    return np.concatenate(found)


def _of(ends: Sequence[tuple[int, dict[str, Times]]], host: int) -> Iterator[dict[str, Times]]:
    return (collectives for at, collectives in ends if at == host)
