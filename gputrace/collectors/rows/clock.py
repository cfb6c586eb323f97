"""Moments of all processes on one clock, and processes under one kind of id."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LARGEST: Final = 1 << 62
"""What SQLite can hold, and a garbled file may exceed."""
_STEADY_CLOCK_NS: Final = 100_000
"""A wall clock that wanders less than this against the monotonic one is left as it is."""

OWN: Final = 1
"""This machine in the upper 16 bits of global ids, where no nsys has numbered it."""


def session_time(
    moments: NDArray[np.uint64], clocks: NDArray[Any], start: int
) -> NDArray[np.int64]:
    """Nanoseconds since the session's start; what the wall clock was set by meanwhile is taken out.

    Args:
        moments: nanoseconds of CLOCK_REALTIME; 0 means that there was none, and stays.
        clocks: records with ``realtime`` and ``monotonic``, the same moments on both clocks.
        start: the session's start on CLOCK_REALTIME.
    """
    signed = moments.astype(np.int64)
    shift = np.zeros(len(signed), np.int64)
    if len(clocks) > 1:
        realtime = clocks["realtime"].astype(np.int64)
        wander = realtime - clocks["monotonic"].astype(np.int64)
        wander -= wander[0]
        if np.abs(wander).max() > _STEADY_CLOCK_NS:
            at = np.searchsorted(realtime, signed, "right") - 1
            shift = wander[np.maximum(at, 0)]
    return np.where(signed == 0, 0, signed - start - shift)


def global_pid(pid: int, machine: int = OWN) -> int:
    """A process in the form of nsys's globalPid: 16 bits of host, 24 of pid, 24 of thread."""
    return machine << 48 | (pid & 0xFFFFFF) << 24


def global_tids(pid: int, threads: NDArray[np.uint32], machine: int = OWN) -> NDArray[np.int64]:
    """Threads of a process in the form of nsys's globalTid."""
    return threads.astype(np.int64) & 0xFFFFFF | global_pid(pid, machine)
