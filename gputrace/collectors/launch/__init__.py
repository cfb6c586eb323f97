"""The recorded program as a child: its terminal, signals and exit code are its own."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from mmap import mmap
from pathlib import Path
from typing import Final, NamedTuple

NOT_FOUND: Final = 127
NOT_RUNNABLE: Final = 126
LOOK_S: Final = 5.0
"""Seconds between two calls of what is to be done meanwhile."""

PYTHONS: Final = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores, and a program that it starts should not."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Command and environment that start the program so that it is recorded."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop: tuple[str, ...] = ()
    """A command that ends the recording while the program goes on, where one is to be run."""
    stop_after_ns: int = 0
    """When to run it, from the program's start."""
    look_s: float = 0.0
    """Seconds from one look at what is recorded to the next; 0 for the usual ones."""


class CannotRun(Exception):
    """The program cannot be started; ``code`` is what shells exit with then."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def find_program(name: str) -> str:
    """The file that a command's first word means; raises CannotRun as a shell would."""
    if (program := shutil.which(name)) is not None:
        return program
    if os.sep in name and os.path.exists(name):  # noqa: PTH110
        raise CannotRun(f"{name}: cannot be run (no permission, or a directory)", NOT_RUNNABLE)
    raise CannotRun(f"{name}: no such program", NOT_FOUND)


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    meanwhile: Callable[[], None] = lambda: None,
    every_s: float = LOOK_S,
) -> int:
    """Runs the program to its end and gives back its exit code, -N where signal N ended it.

    Signals sent to us go on to it, save those that the terminal has sent to both. ``meanwhile`` is
    called every so many seconds while it runs.
    """
    program = find_program(command[0])
    watched = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        child = _spawn(program, command, environment, before)
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                # Signals that were for the program, and came too late for it.
                while wait_for(watched, 0) is not None:
                    pass
                return os.waitstatus_to_exitcode(status)
            came = wait_for(watched, every_s)
            if came is None:
                meanwhile()
            elif came.number != signal.SIGCHLD and not came.is_typed:
                os.kill(child, came.number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(
    program: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    mask: set[signal.Signals | int],
) -> int:
    def spawn(file: str, words: list[str]) -> int:
        return os.posix_spawn(file, words, environment, setsigmask=mask, setsigdef=PYTHONS)

    try:
        try:
            return spawn(program, list(command))
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            # A script without #! is for the shell, as execvp and the shells themselves have it.
            return spawn("/bin/sh", ["/bin/sh", program, *command[1:]])
    except OSError as error:
        raise CannotRun(f"{command[0]}: cannot be run ({error.strerror})", NOT_RUNNABLE) from None


FORWARDED: Final = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that are forwarded to the program."""
_OF_THE_KERNEL: Final = 0x80
"""SI_KERNEL of signal.h."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Came(NamedTuple):
    """A signal that came."""

    number: int
    is_typed: bool
    """True if the kernel sent it, as it sends what is typed at the terminal to the whole group.

    The sender's id tells less: it is 0 for one outside our container too, as `docker stop` is.
    """


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
    info = (ctypes.c_int * 32)()  # siginfo_t: the signal, an error, the code
    while True:
        left = max(until - time.monotonic(), 0.0)
        span = (ctypes.c_long * 2)(int(left), int(left % 1 * 1e9))  # timespec
        number = _LIBC.sigtimedwait(wanted, info, span)
        if number > 0:
            return Came(number, info[2] == _OF_THE_KERNEL)
        problem = ctypes.get_errno()
        if problem == errno.EAGAIN:
            return None
        if problem != errno.EINTR:
            raise OSError(problem, os.strerror(problem))


def orphans_of(folder: Path) -> list[int]:
    """Pids of this user's processes that were started to write into a recording's folder."""
    wanted = os.path.realpath(folder)
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = os.fsdecode(path.read_bytes()).split("\0")
        except OSError:
            continue
        named = [v.partition("=")[2] for v in variables if v.startswith("GPUTRACE_DIR=")]
        if any(os.path.realpath(name) == wanted for name in named):
            pids.append(int(path.parent.name))
    return sorted(pids)


_THREADS: Final = "OPENBLAS_NUM_THREADS"
_ROOM: Final = 96 << 20
"""Bytes of address space that numpy takes, and some more."""


def load_numpy() -> None:
    """Imports numpy without the threads of its linear algebra, of which there are as many as cores.

    A recorder multiplies no matrices, and they would take signals from it that are its program's.
    Raises MemoryError where there is no room: OpenBLAS would end the process, and say so its way.
    """
    if "numpy" in sys.modules:
        return
    try:
        mmap(-1, _ROOM).close()
    except OSError as error:
        raise MemoryError from error
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        import_module("numpy")
    finally:
        del os.environ[_THREADS]
        if before is not None:
            os.environ[_THREADS] = before
