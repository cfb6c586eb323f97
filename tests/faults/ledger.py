"""The program's own account of what it did: memory shared with a file, which outlives any end.

Numbers of 64 bits: whether it has begun, its process id, whether it came to its end, how many
kernels it launched, how many steps it marked, when it executed another program; then when
(CLOCK_MONOTONIC, ns) it launched each of the first 65,536 kernels, and marked each of as many
steps. gpu.c writes kernels.
"""

from __future__ import annotations

import array
import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOST: Final = 65536
_HEAD: Final = struct.Struct("<6Q")
_SIZE: Final = _HEAD.size + 2 * 8 * MOST
_READY, _PID, _ENDED, _STEPS, _LEFT = 0, 8, 16, 32, 40


class Ledger:
    """Writer of the program's ledger."""

    def __init__(self, path: Path, pid: int) -> None:
        """One that is there goes on: the process executes another program."""
        with path.open("ab") as file:
            file.truncate(_SIZE)
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), _SIZE)
        self._put(_PID, pid)

    def begin(self) -> None:
        """Note that from now on anything may happen."""
        self._put(_READY, time.monotonic_ns())

    def end(self) -> None:
        """Note that the program has done all that it was to do."""
        self._put(_ENDED, time.monotonic_ns())

    def leave(self) -> None:
        """Note that this process is about to execute another program."""
        self._put(_LEFT, time.monotonic_ns())

    def step(self, moment: int) -> None:
        """Note that a step was marked, and when (CLOCK_MONOTONIC, ns)."""
        (count,) = struct.unpack_from("<Q", self.memory, _STEPS)
        self._put(_HEAD.size + 8 * (MOST + count), moment)
        self._put(_STEPS, count + 1)

    def _put(self, at: int, value: int) -> None:
        struct.pack_into("<Q", self.memory, at, value)


@dataclass(frozen=True, slots=True)
class Told:
    """Content of a ledger: times in nanoseconds of CLOCK_MONOTONIC."""

    pid: int
    ready: int
    ended: int
    left: int
    kernels: array.array[int]
    steps: array.array[int]

    @property
    def last(self) -> int:
        """The last moment of which it tells."""
        return max([self.ready, *self.kernels[-1:], *self.steps[-1:]])


def read(path: Path) -> Told | None:
    """Read a ledger; None if the program has not come to write it."""
    raw = path.read_bytes() if path.exists() else b""
    if len(raw) < _SIZE:
        return None
    ready, pid, ended, kernels, steps, left = _HEAD.unpack_from(raw)
    times = array.array("Q", raw[_HEAD.size :])
    return Told(pid, ready, ended, left, times[:kernels], times[MOST : MOST + steps])
