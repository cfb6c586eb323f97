"""What launching costs: tiny kernels, the calls, and the time from a call to its kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.host import NOBODY
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.results.kernels import LaunchCost
from gputrace.analyzers.shard import OneGpu

_TINY_NS: Final = 5_000
"""A launching call takes a host about so long: shorter kernels cannot keep a GPU fed."""
_MOST_OF_ONE: Final = 20_000
_MOST_OF_ALL: Final = 160_000
"""Kernels of which calls are looked up; evenly taken from all."""

Rows = NDArray[np.intp]


@dataclass(frozen=True)
class LaunchTimes:
    """Of kernels of one GPU."""

    tiny_count: int
    tiny_total_ns: int
    """Those too short to keep a GPU fed."""
    calls: Times
    """Nanoseconds of the calls that launched some of them."""
    delays: Times
    """From those calls to kernels that an idle GPU started: it had done all before the call."""


def most_looked_at(gpus: int) -> int:
    """Of each of so many GPUs, the kernels of which calls are looked up."""
    return min(_MOST_OF_ONE, _MOST_OF_ALL // max(gpus, 1))


def look_at(one: OneGpu, rows: Rows, most: int) -> LaunchTimes:
    """What launching some kernels of a GPU costs; the calls of ``most`` of them are looked up."""
    lengths = one.operations.end[rows] - one.operations.start[rows]
    tiny = lengths[lengths < _TINY_NS]
    calls, delays = _calls_of(one, rows[:: len(rows) // most + 1])
    return LaunchTimes(len(tiny), int(tiny.sum()), calls, delays)


def launch_cost(launched: Iterable[LaunchTimes]) -> LaunchCost:
    """Of all GPUs together."""
    own = list(launched)
    return LaunchCost(
        _TINY_NS,
        sum(one.tiny_count for one in own),
        sum(one.tiny_total_ns for one in own),
        _median(np.concatenate([one.calls for one in own])),
        _median(np.concatenate([one.delays for one in own])),
    )


def _calls_of(one: OneGpu, rows: Rows) -> tuple[Times, Times]:
    """Lengths of the calls that launched kernels, and the delays of those an idle GPU began."""
    own, calls = one.operations, one.calls
    if calls is None or not len(rows):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    issued_by = calls.issued_by(own.events.having("process", "correlation").select(rows))
    known = issued_by != NOBODY
    rows, issued_by = rows[known], issued_by[known]
    began = calls.start[issued_by]
    done = np.where(rows > 0, own.reach[np.maximum(rows - 1, 0)], 0)
    delay = own.start[rows] - began
    return calls.end[issued_by] - began, delay[(done <= began) & (delay > 0)]


def _median(values: Times) -> int | None:
    return int(np.median(values)) if len(values) else None
