"""Moments of all processes on one clock, and processes under one kind of id."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

LARGEST: Final = 1 << 62
"""What SQLite can hold, and a garbled file may exceed."""
OWN: Final = 1
"""This machine in the upper 16 bits of global ids, where no nsys has numbered it."""


def session_time(moments: NDArray[np.uint64], start: int) -> NDArray[np.int64]:
    """Nanoseconds since the session's start on CLOCK_REALTIME; 0 means no moment, and stays."""
    signed = moments.astype(np.int64)
    return np.where(signed == 0, 0, signed - start)


def global_pid(pid: int, machine: int = OWN) -> int:
    """A process in the form of nsys's globalPid: 16 bits of host, 24 of pid, 24 of thread."""
    return machine << 48 | (pid & 0xFFFFFF) << 24


def global_tids(pid: int, threads: NDArray[np.uint32], machine: int = OWN) -> NDArray[np.int64]:
    """Threads of a process in the form of nsys's globalTid."""
    return threads.astype(np.int64) & 0xFFFFFF | global_pid(pid, machine)
