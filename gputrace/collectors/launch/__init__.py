"""Recorded program as a child process with its own terminal, signals and exit code."""

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
"""Seconds between two calls of ``meanwhile``."""

PYTHONS: Final = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores, but programs that it starts should not."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Command and environment that start the program so that it is recorded."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop: tuple[str, ...] = ()
    """Command that ends the recording while the program goes on; empty for none."""
    stop_after_ns: int = 0
    """Nanoseconds from the program's start after which to run it."""
    look_s: float = 0.0
    """Seconds between checks of the recording; 0 for the default."""


class CannotRun(Exception):
    """Error for a program that cannot be started; ``code`` is a shell's exit code for it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def gputrace_command(*words: str) -> list[str]:
    """Return the words that run a gputrace command, whatever ``gputrace.py`` the caller has.

    Not ``-m gputrace``, which would look in the working directory and in PYTHONPATH first.
    """
    start = Path(__file__).parents[3] / "_gputrace_start.py"
    return [sys.executable, "-P", str(start), *words]


def find_program(name: str) -> str:
    """Return the file of a command's first word; raise CannotRun where a shell would fail."""
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
    """Run the program to its end; return its exit code, -N if signal N ended it.

    Signals are forwarded to it, except those that the terminal has sent to both. ``meanwhile`` is
    called every ``every_s`` seconds while it runs.
    """
    program = find_program(command[0])
    watched = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        child = _spawn(program, command, environment, before)
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                # Discard signals that came too late for the program.
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
            # Like execvp and shells, run a script without #! by the shell.
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


class ReceivedSignal(NamedTuple):
    """Received signal."""

    number: int
    is_typed: bool
    """True if the kernel sent it, as it does to the whole group for a key at the terminal.

    The sender's id does not show this: it is 0 also for senders outside the container.
    """


def wait_for(signals: Iterable[int], seconds: float) -> ReceivedSignal | None:
    """Wait for one of some blocked signals; return None if none arrives in time.

    Replaces Python's sigtimedwait, which returns a signal that never came if the process is stopped
    (Ctrl+Z, `docker pause`) until after the timeout. All threads must block the signals.
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
            return ReceivedSignal(number, info[2] == _OF_THE_KERNEL)
        problem = ctypes.get_errno()
        if problem == errno.EAGAIN:
            return None
        if problem != errno.EINTR:
            raise OSError(problem, os.strerror(problem))


def orphans_of(folder: Path, variable: str = "GPUTRACE_DIR") -> list[int]:
    """Return the pids of this user's processes with a variable that names the folder."""
    wanted = os.path.realpath(folder)
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = os.fsdecode(path.read_bytes()).split("\0")
        except OSError:
            continue
        named = [v.partition("=")[2] for v in variables if v.startswith(f"{variable}=")]
        if any(os.path.realpath(name) == wanted for name in named):
            pids.append(int(path.parent.name))
    return sorted(pids)


_THREADS: Final = "OPENBLAS_NUM_THREADS"
_ROOM: Final = 96 << 20
"""Bytes of address space that importing numpy takes, with a margin."""


def load_numpy() -> None:
    """Import numpy without the threads of its linear algebra, one for each core.

    A recorder needs none, and they would receive signals meant for its program. Raises MemoryError
    if there is not enough address space, for which OpenBLAS would end the process.
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
