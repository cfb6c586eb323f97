"""Runs a program under nvprof as if nvprof were not there.

nvprof gives the program its own streams and process group, so the terminal reaches it. But it dies
of signals that it does not know without a word to the program, ends with a code of its own, and
makes the program ignore SIGPIPE. So a supervisor stands between: our signals go to the program
itself, and its exit code comes from there. What nvprof says goes into a file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Launch
from gputrace.collectors.child import FORWARDED, NOT_RUNNABLE, PYTHONS, CannotRun, is_typed
from gputrace.collectors.nsys_run import above, handed_down, supervised
from gputrace.collectors.nvprof_log import LOG, why_not_started
from gputrace.errors import MissingError

_LOOK_S: Final = 0.2
"""How often the supervisor's files are looked at, besides when nvprof ends."""


def run_under_nvprof(
    launch: Launch, folder: Path, _tell: Callable[[str], object], meanwhile: Callable[[], None]
) -> int:
    """Runs the program to its end and nvprof to its own; the program's exit code.

    Raises CannotRun where the program cannot be run, MissingError where nvprof does not start it.
    """
    watched = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        nvprof = _start(launch, folder, before)
        (folder / "nvprof.pid").write_text(str(nvprof), encoding="utf-8")
        code = _wait(nvprof, folder, watched, meanwhile)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if (problem := _left(folder, "program.failed")) is not None:
        raise CannotRun(f"the program cannot be run ({problem})", NOT_RUNNABLE)
    if _left(folder, "program.pid") is None:
        raise MissingError(why_not_started(folder, code))
    own = _left(folder, "program.code")
    return int(own) if own is not None else code


def _start(launch: Launch, folder: Path, mask: set[int] | set[signal.Signals]) -> int:
    streams = [handed_down(number) for number in range(3)]
    listed = ",".join("-" if stream is None else str(stream) for stream in streams)
    words = list(launch.command)
    words[words.index(supervised(folder)[-1])] = listed
    log = above(os.open(folder / LOG, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
    actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    try:
        return os.posix_spawn(
            words[0],
            words,
            dict(launch.environment),
            file_actions=[*actions, *((os.POSIX_SPAWN_DUP2, log, number) for number in (1, 2))],
            setsigmask=mask,
            setsigdef=PYTHONS,
        )
    except OSError as error:
        raise MissingError(f"{words[0]}: cannot be run ({error.strerror})") from None
    finally:
        for descriptor in (log, *streams):
            if descriptor is not None:
                os.close(descriptor)


def _wait(
    nvprof: int, folder: Path, watched: set[signal.Signals], meanwhile: Callable[[], None]
) -> int:
    """Waits for nvprof and, should nvprof be gone first, for the program; nvprof's exit code."""
    code = None
    while code is None or _program(folder) is not None:
        if code is None:
            ended, status = os.waitpid(nvprof, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                continue
        meanwhile()
        came = signal.sigtimedwait(watched, _LOOK_S)
        if came is not None and came.si_signo != signal.SIGCHLD and not is_typed(came):
            with suppress(ProcessLookupError):
                os.kill(_program(folder) or nvprof, came.si_signo)
    return code if code >= 0 else 128 - code


def still_running(folder: Path) -> int | None:
    """The process, of the program or of nvprof, that a recording cut short goes on in."""
    return _program(folder) or _alive(_left(folder, "nvprof.pid"))


def _program(folder: Path) -> int | None:
    """The program's pid while it runs."""
    ended = _left(folder, "program.code") is not None
    return None if ended else _alive(_left(folder, "program.pid"))


def _alive(pid: str | None) -> int | None:
    if pid is None:
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return int(pid)


def _left(folder: Path, name: str) -> str | None:
    """What the supervisor wrote down, where it did."""
    try:
        return (folder / name).read_text(encoding="utf-8")
    except OSError:
        return None
