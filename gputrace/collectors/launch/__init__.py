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
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import import_module
from mmap import mmap
from pathlib import Path
from typing import Final, NamedTuple

from gputrace.collectors.launch.group_witness import GRACE_S, GroupWitness

NOT_FOUND: Final = 127
NOT_RUNNABLE: Final = 126
LOOK_S: Final = 2.0
"""Seconds between two calls of ``meanwhile``."""
_FIRST_LOOK_S: Final = 0.125
"""Seconds to the first call, from which on they double."""

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
    hint = f"; write python {name}" if name.endswith(".py") else ""
    if os.sep in name and os.path.exists(name):  # noqa: PTH110
        why = f"{name}: cannot be run (no permission, or a directory){hint}"
        raise CannotRun(why, NOT_RUNNABLE)
    raise CannotRun(f"{name}: no such program{hint}", NOT_FOUND)


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    meanwhile: Callable[[], None] = lambda: None,
    every_s: float = LOOK_S,
) -> int:
    """Run the program to its end; return its exit code, -N if signal N ended it.

    Signals that were sent to this process alone are forwarded to it. ``meanwhile`` is called every
    ``every_s`` seconds while it runs, and more often at its start.
    """
    program = find_program(command[0])
    wait_for_children()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        with closing(GroupWitness(command, _PASSED_ON)) as witness:
            child = _Child(_spawn(program, command, environment, before))
            if early := signal.sigpending() & _PASSED_ON:
                # Sent before the program was there to get its own.
                for number in early:
                    if (came := wait_for([number], 0)) is not None:
                        child.send(came)
                witness.forget()
            pause_s = min(_FIRST_LOOK_S, every_s)
            look_at = time.monotonic() + pause_s
            while (code := child.code()) is None:
                came = wait_for(_WATCHED, max(look_at - time.monotonic(), 0))
                if came is not None and came.number != signal.SIGCHLD:
                    child.handle(came, witness.saw(came))
                elif time.monotonic() >= look_at:
                    witness.forget_old()
                    meanwhile()
                    pause_s = min(2 * pause_s, every_s)
                    look_at = time.monotonic() + pause_s
            # Signals that came too late for the program, also if they have yet to come to us.
            until, late = time.monotonic() + GRACE_S, witness.unmatched()
            while came := wait_for(_WATCHED, max(until - time.monotonic(), 0) if late else 0):
                late.discard(came.number)
            return code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Child:
    """Program, which gets the signals that were not sent to it as well, and is stopped with us."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopped_by = 0
        self._stop_until = 0.0
        """Until when to stop if the program does; on the monotonic clock."""

    def code(self) -> int | None:
        """Return the exit code, -N for signal N; None while it runs."""
        while True:
            ended, status = os.waitpid(self._pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not ended:
                self._stop_with_it()
                return None
            if not os.WIFSTOPPED(status) and not os.WIFCONTINUED(status):
                return os.waitstatus_to_exitcode(status)
            self._stopped_by = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else 0

    def handle(self, came: ReceivedSignal, was_sent_to_group: bool) -> None:
        """Forward a signal, unless the program has got it as a member of our process group."""
        if came.number in _STOPS:
            self._stop_until = time.monotonic() + _STOPPING_S
        elif came.number == signal.SIGCONT:
            self._stop_until = 0.0
        # The kernel tells us of the processor time that we have used.
        is_ours = came.is_from_kernel and came.number == signal.SIGXCPU
        if was_sent_to_group:
            # Where we lead our group, the program would lead it without us, and to make a group of
            # its own, as timeout(1) does, would change nothing: the signal would have reached it.
            its = os.getpgid(self._pid)
            leads = os.getpgrp() == os.getpid() and its == self._pid
            if leads and os.getsid(self._pid) == os.getsid(0):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(its, came.number)
        elif not is_ours and not signal.sigpending() & _UNDONE_BY.get(came.number, set()):
            self.send(came)

    def send(self, came: ReceivedSignal) -> None:
        """Send it a signal, with the value that came with it, unless it is another user's now."""
        if came.code == _SI_QUEUE:
            _LIBC.sigqueue(self._pid, came.number, ctypes.c_void_p(came.value))
        else:
            with suppress(PermissionError):
                os.kill(self._pid, came.number)

    def _stop_with_it(self) -> None:
        """Stop as the program has, if we were asked to, so that a shell sees its job stopped."""
        if not self._stopped_by or time.monotonic() > self._stop_until:
            return
        self._stop_until = 0.0
        if signal.SIGCONT in signal.sigpending():
            return
        os.kill(os.getpid(), self._stopped_by)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def block_late_signals() -> None:
    """Block the signals for a program that has ended which would end this process, too.

    Those with which people end a process still do.
    """
    endings = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED - endings)


_sigchld_is_ignored = False


def wait_for_children() -> None:
    """Make ended children wait for us, where whoever started us ignores SIGCHLD.

    The program still inherits that it is ignored, as it would without us.
    """
    global _sigchld_is_ignored
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        _sigchld_is_ignored = True
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def ignored_for_program() -> tuple[signal.Signals, ...]:
    """Return the signals that the program must ignore and this process does not."""
    return (signal.SIGCHLD,) if _sigchld_is_ignored else ()


def _spawn(
    program: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    mask: set[signal.Signals | int],
) -> int:
    def spawn(file: str, words: list[str]) -> int:
        if ignored := ignored_for_program():
            return _spawn_ignoring(ignored, file, words, environment, mask)
        return os.posix_spawn(file, words, environment, setsigmask=mask, setsigdef=PYTHONS)

    return start_program(spawn, program, command)


def start_program(
    start: Callable[[str, list[str]], int], program: str, command: Sequence[str]
) -> int:
    """Start a program by its path and words; return what that returns. Raises CannotRun."""
    try:
        try:
            return start(program, list(command))
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            # Like execvp and shells, run a script without #! by the shell.
            return start("/bin/sh", ["/bin/sh", program, *command[1:]])
    except OSError as error:
        raise CannotRun(f"{command[0]}: cannot be run ({error.strerror})", NOT_RUNNABLE) from None


def _spawn_ignoring(
    ignored: Sequence[signal.Signals],
    file: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    mask: set[signal.Signals | int],
) -> int:
    """Start a program that ignores signals, which posix_spawn cannot; raises OSError."""
    import subprocess

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    started = subprocess.Popen(
        words, executable=file, env=environment, preexec_fn=prepare, close_fds=False
    )
    # Its end is waited for by its pid.
    started.returncode = 0
    return started.pid


FORWARDED: Final = frozenset(
    (
        *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
        *(signal.SIGIO, signal.SIGPWR, signal.SIGURG, signal.SIGXCPU),
        *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
    )
)
"""Signals that are forwarded to the program: all that processes send each other on purpose."""
_STOPS: Final = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""Signals of a terminal that stop a job."""
_UNDONE_BY: Final[Mapping[int, set[signal.Signals]]] = {
    signal.SIGCONT: {*_STOPS},
    **{number: {signal.SIGCONT} for number in _STOPS},
}
"""Signals to stop and to continue, with what follows one that does not count: the last one does, as
in the kernel."""
_STOPPING_S: Final = 5.0
"""Longest time that a program takes to stop, where it handles such a signal first."""
_PASSED_ON: Final = FORWARDED | {*_STOPS, signal.SIGCONT, signal.SIGWINCH}
"""Signals that are forwarded to a program that is our child and has our terminal."""
_WATCHED: Final = _PASSED_ON | {signal.SIGCHLD}
_SI_KERNEL: Final = 0x80
_SI_QUEUE: Final = -1
"""Constants of signal.h."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class ReceivedSignal(NamedTuple):
    """Received signal, with the fields of siginfo_t."""

    number: int
    code: int
    sender: int
    """Pid of the process that sent it; 0 for the kernel and for senders outside the container."""
    value: int
    """Value that sigqueue(3) sends along; undefined for other senders."""

    @property
    def is_from_kernel(self) -> bool:
        """Return True for a key at the terminal, the end of the terminal, and limits."""
        return self.code == _SI_KERNEL


def wait_for(signals: Iterable[int], seconds: float) -> ReceivedSignal | None:
    """Wait for one of some blocked signals; return None if none arrives in time.

    Replaces Python's sigtimedwait, which returns a signal that never came if the process is stopped
    (Ctrl+Z, `docker pause`) until after the timeout. All threads must block the signals.
    """
    until = time.monotonic() + seconds
    wanted = (ctypes.c_uint64 * 16)()  # sigset_t
    for number in signals:
        wanted[(number - 1) // 64] |= 1 << (number - 1) % 64
    info = (ctypes.c_int * 32)()  # siginfo_t: signal, error, code, padding, sender, its user, value
    while True:
        left = max(until - time.monotonic(), 0.0)
        span = (ctypes.c_long * 2)(int(left), int(left % 1 * 1e9))  # timespec
        number = _LIBC.sigtimedwait(wanted, info, span)
        if number > 0:
            value = ctypes.c_uint64.from_buffer(info, 6 * ctypes.sizeof(ctypes.c_int)).value
            return ReceivedSignal(number, info[2], info[4], value)
        problem = ctypes.get_errno()
        if problem == errno.EAGAIN:
            return None
        if problem != errno.EINTR:
            raise OSError(problem, os.strerror(problem))


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
