"""Runs a program as if nobody watched: its terminal, signals and exit code are its own."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gputrace.collectors.program.signals import FORWARDED, forget, wait_for

NOT_FOUND: Final = 127
NOT_RUNNABLE: Final = 126
LOOK_S: Final = 5.0
"""Seconds between two calls of what is to be done meanwhile."""

PYTHONS: Final = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores, and a program that it starts should not."""


class CannotRun(Exception):
    """The program cannot be started; ``code`` is what shells exit with then."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def find_program(name: str) -> str:
    """The file that a command's first word means; raises CannotRun as a shell would."""
    found = shutil.which(name)
    if found is not None:
        return found
    if os.sep in name and os.path.exists(name):  # noqa: PTH110
        raise CannotRun(f"{name}: cannot be run (no permission, or a directory)", NOT_RUNNABLE)
    raise CannotRun(f"{name}: no such program", NOT_FOUND)


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    meanwhile: Callable[[], None] = lambda: None,
    every_s: float = LOOK_S,
) -> int:
    """Runs the program to its end and gives back its exit code, 128 + N for signal N.

    Signals sent to us go on to it, save those that the terminal has sent to both. ``meanwhile`` is
    called every so many seconds while it runs.
    """
    program = find_program(command[0])
    watched = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        child = _spawn(program, command, environment, before)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise CannotRun(f"{command[0]}: cannot be run ({error.strerror})", NOT_RUNNABLE) from None
    try:
        return _wait(child, watched, meanwhile, every_s)
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
        return spawn(program, list(command))
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        # A script without #! is for the shell, as execvp and the shells themselves have it.
        return spawn("/bin/sh", ["/bin/sh", program, *command[1:]])


def _wait(
    child: int, watched: set[signal.Signals], meanwhile: Callable[[], None], every_s: float
) -> int:
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            forget(watched)
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        came = wait_for(watched, every_s)
        if came is None:
            meanwhile()
        elif came.number != signal.SIGCHLD and not came.is_typed:
            os.kill(child, came.number)
