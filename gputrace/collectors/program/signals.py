"""Signals for a program that come to its recorder."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

FORWARDED: Final = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Those that go on to the program."""
_OF_THE_KERNEL: Final = 0x80
"""SI_KERNEL of signal.h."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Came(NamedTuple):
    """A signal that came."""

    number: int
    code: int
    """Who sent it: ``si_code`` of sigaction(2)."""

    @property
    def is_typed(self) -> bool:
        """Whether it was typed at the terminal: the kernel sends that to the whole group.

        The sender's id tells less: it is 0 for one outside our container too, as `docker stop` is.
        """
        return self.code == _OF_THE_KERNEL


def wait_for(signals: Iterable[int], seconds: float) -> Came | None:
    """Takes one of some blocked signals; None where none comes in so many seconds.

    As Python's own sigtimedwait, which gives a signal that never came where the process is stopped
    (Ctrl+Z, `docker pause`) and goes on after its time was up. No other thread may let the signals
    through, or it takes some.
    """
    until = time.monotonic() + seconds
    wanted = (ctypes.c_uint64 * 16)()  # sigset_t
    for number in signals:
        wanted[(number - 1) // 64] |= 1 << (number - 1) % 64
    found = (ctypes.c_int * 32)()  # siginfo_t: the signal, an error, the code
    while True:
        left = max(until - time.monotonic(), 0.0)
        span = (ctypes.c_long * 2)(int(left), int(left % 1 * 1e9))  # timespec
        number = _LIBC.sigtimedwait(wanted, found, span)
        if number > 0:
            return Came(number, found[2])
        problem = ctypes.get_errno()
        if problem == errno.EAGAIN:
            return None
        if problem != errno.EINTR:
            raise OSError(problem, os.strerror(problem))


def forget(signals: Iterable[int]) -> None:
    """Drops signals that were for the program, and came too late for it."""
    signals = list(signals)
    while wait_for(signals, 0) is not None:
        pass
