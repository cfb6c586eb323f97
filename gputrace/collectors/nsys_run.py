"""Runs a program under nsys as if nsys were not there.

nsys puts what it starts into a session of its own, which no terminal reaches, and talks on standard
output; it may end before the program, whose later children then fail where they look for it. So
the program gets our streams, its signals come from us, its end is what counts, and a window of time
is ended by `nsys stop`, after which nsys stays.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from gputrace.collectors.backend import Launch
from gputrace.collectors.child import FORWARDED, NOT_RUNNABLE, PYTHONS, CannotRun, is_typed
from gputrace.collectors.nsys_log import LOG, why_not_started
from gputrace.errors import MissingError

SUPERVISOR: Final = Path(__file__).with_name("nsys_supervisor.py")
_STREAMS: Final = "STREAMS"
"""Stands on the command line for the descriptors, which are known when nsys starts."""
_HIGH: Final = 200
_LOOK_S: Final = 0.2
"""How often the program is looked after, which is no child of ours."""
_PATIENCE_S: Final = 3.0
"""So long nsys may write after the program's end before we say that it does."""


def supervised(folder: Path) -> list[str]:
    """What comes before the program on its command line."""
    return [sys.executable, "-I", "-S", str(SUPERVISOR), str(folder.absolute()), _STREAMS]


def run_under_nsys(
    launch: Launch, folder: Path, tell: Callable[[str], object], meanwhile: Callable[[], None]
) -> int:
    """Runs the program to its end and nsys to its own; the program's exit code.

    Raises CannotRun where the program cannot be run, MissingError where nsys does not start it.
    """
    watched = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        nsys = _start(launch.command, launch.environment, folder, before)
        (folder / "nsys.pid").write_text(str(nsys), encoding="utf-8")
        return _Watch(nsys, launch, folder, tell).wait(watched, meanwhile)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    command: tuple[str, ...],
    environment: Mapping[str, str],
    folder: Path,
    mask: set[int] | set[signal.Signals],
) -> int:
    streams = [handed_down(number) for number in range(3)]
    listed = ",".join("-" if stream is None else str(stream) for stream in streams)
    words = list(command)
    words[words.index(_STREAMS)] = listed
    log = above(os.open(folder / LOG, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
    actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    actions += [(os.POSIX_SPAWN_DUP2, log, number) for number in (1, 2)]
    try:
        # A group of its own: what is typed at the terminal is not for nsys.
        return os.posix_spawn(
            command[0],
            words,
            dict(environment),
            file_actions=actions,
            setpgroup=0,
            setsigmask=mask,
            setsigdef=PYTHONS,
        )
    except OSError as error:
        raise MissingError(f"{command[0]}: cannot be run ({error.strerror})") from None
    finally:
        for descriptor in (log, *streams):
            if descriptor is not None:
                os.close(descriptor)


def handed_down(stream: int) -> int | None:
    """A descriptor of one of our streams that nsys passes on, out of the way of its own."""
    try:
        # Python's own files are closed at exec: one of them sits where a stream is closed.
        ours = fcntl.fcntl(stream, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        return None if ours else fcntl.fcntl(stream, fcntl.F_DUPFD, _HIGH)
    except OSError:
        return None


def above(descriptor: int) -> int:
    """The file under a number that is none of a standard stream."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(descriptor)
    return high


def still_running(folder: Path) -> int | None:
    """The process, of the program or of nsys, that a recording cut short goes on in."""
    names = ["nsys.pid", *([] if (folder / "program.code").exists() else ["program.pid"])]
    for name in names:
        with suppress(OSError, ValueError):
            pid = int((folder / name).read_text(encoding="utf-8"))
            if _is_alive(pid):
                return pid
    return None


class _Watch:
    """Waits for the program and for nsys, whichever ends last."""

    def __init__(
        self, nsys: int, launch: Launch, folder: Path, tell: Callable[[str], object]
    ) -> None:
        self._nsys: int | None = nsys
        self._nsys_code = 0
        self._stop, self._stop_after_s = launch.stop, launch.stop_after_ns / 1e9
        self._folder, self._tell = folder, tell
        self._began_at = self._ended_at = 0.0

    def wait(self, watched: set[signal.Signals], meanwhile: Callable[[], None]) -> int:
        while not self._over():
            self._end_window()
            meanwhile()
            came = signal.sigtimedwait(watched, _LOOK_S)
            if came is not None and came.si_signo != signal.SIGCHLD:
                self._pass_on(came.si_signo, typed=is_typed(came))
        if (problem := self._read("program.failed")) is not None:
            raise CannotRun(f"the program cannot be run ({problem})", NOT_RUNNABLE)
        if self._program() is None:
            raise MissingError(why_not_started(self._folder, self._nsys_code))
        code = self._read("program.code")
        return int(code) if code is not None else self._nsys_code

    def _over(self) -> bool:
        if self._nsys is not None:
            found, status = os.waitpid(self._nsys, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                self._nsys, self._nsys_code = None, code if code >= 0 else 128 - code
                (self._folder / "nsys.pid").unlink(missing_ok=True)
        if self._nsys is not None and self._read("program.code") is not None:
            self._tell_once()
        return self._nsys is None and not self._program_runs()

    def _end_window(self) -> None:
        if not self._stop or self._program() is None:
            return
        self._began_at = self._began_at or time.monotonic()
        if time.monotonic() - self._began_at >= self._stop_after_s:
            with (self._folder / LOG).open("ab") as log:
                # It ends when nsys has written the report, which the program need not wait for.
                subprocess.Popen(self._stop, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            self._stop = ()

    def _tell_once(self) -> None:
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() - self._ended_at > _PATIENCE_S:
            self._ended_at = float("inf")
            self._tell("the program has ended; nsys is still writing its report")

    def _program_runs(self) -> bool:
        program = self._program()
        return program is not None and self._read("program.code") is None and _is_alive(program)

    def _pass_on(self, number: int, typed: bool) -> None:
        program = self._program()
        with suppress(ProcessLookupError):
            if program is None or not self._program_runs():
                if self._nsys is not None:
                    os.kill(self._nsys, number)
            elif typed:
                # The terminal would have sent it to all processes of the program.
                os.killpg(os.getpgid(program), number)
            else:
                os.kill(program, number)

    def _program(self) -> int | None:
        text = self._read("program.pid")
        return int(text) if text is not None else None

    def _read(self, name: str) -> str | None:
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except OSError:
            return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
