"""A program below a tool that records it (nsys, nvprof), run as if the tool were not there."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from gputrace.collectors.launch import FORWARDED, NOT_RUNNABLE, PYTHONS, CannotRun, Launch, wait_for
from gputrace.errors import InputError, MissingError

SUPERVISOR: Final = Path(__file__).with_name("supervisor.py")
_STREAMS: Final = "STREAMS"
"""Stands on the command line for the descriptors, which are known when the tool starts."""
_HIGH: Final = 200
_LOOK_S: Final = 0.2
"""Seconds between looks at the program, which is no child of ours."""
_WATCHED: Final = frozenset({*FORWARDED, signal.SIGCHLD})


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that runs the program, and how.

    Attributes:
        name: its pid is in ``NAME.pid`` of the folder while it runs, what it says in ``NAME.log``.
        apart: whether it puts the program into a session of its own, which no terminal reaches. It
            gets a process group of its own then, and what is typed goes to the program from here.
        why_not_started: what to tell where it ended with an exit code before the program began.
    """

    name: str
    apart: bool
    why_not_started: Callable[[Path, int], str]


def supervised(folder: Path) -> list[str]:
    """Return the words before the program on its command line."""
    return [sys.executable, "-I", "-S", str(SUPERVISOR), str(folder.absolute()), _STREAMS]


class Supervision:
    """A program below a tool, from their start to the end of both."""

    def __init__(self, tool: Tool, launch: Launch, folder: Path) -> None:
        self._tool, self._launch, self._folder = tool, launch, folder
        self._pid: int | None = None
        self._code = 0

    def run(self, meanwhile: Callable[[], None]) -> int:
        """Runs the tool to its end and the program to its own; the program's exit code.

        ``meanwhile`` is called several times a second. Raises CannotRun where the program cannot
        be run, MissingError where the tool cannot or does not start it.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            self._pid = self._start(before)
            (self._folder / f"{self._tool.name}.pid").write_text(str(self._pid), encoding="utf-8")
            self._wait(meanwhile)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._result()

    def has_begun(self) -> bool:
        """Return whether the program has been started."""
        return _program(self._folder) is not None

    def is_writing(self) -> bool:
        """Return whether the program has ended and the tool has not."""
        return self._pid is not None and _left(self._folder, "program.code") is not None

    def _start(self, mask: set[int] | set[signal.Signals]) -> int:
        spawn = partial(os.posix_spawn, setpgroup=0) if self._tool.apart else os.posix_spawn
        words = list(self._launch.command)
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        with _handed_down() as streams, _opened(self._folder / f"{self._tool.name}.log") as log:
            words[words.index(_STREAMS)] = streams
            actions += [(os.POSIX_SPAWN_DUP2, log, number) for number in (1, 2)]
            try:
                return spawn(
                    words[0],
                    words,
                    dict(self._launch.environment),
                    file_actions=actions,
                    setsigmask=mask,
                    setsigdef=PYTHONS,
                )
            except OSError as error:
                raise MissingError(f"{words[0]}: cannot be run ({error.strerror})") from None

    def _wait(self, meanwhile: Callable[[], None]) -> None:
        while not self._is_over():
            meanwhile()
            came = wait_for(_WATCHED, _LOOK_S)
            if came is not None and came.number != signal.SIGCHLD:
                self._pass_on(came.number, came.is_typed)

    def _is_over(self) -> bool:
        if self._pid is not None:
            found, status = os.waitpid(self._pid, os.WNOHANG)
            if found:
                self._pid, self._code = None, _shells(os.waitstatus_to_exitcode(status))
                (self._folder / f"{self._tool.name}.pid").unlink(missing_ok=True)
        return self._pid is None and _running_program(self._folder) is None

    def _pass_on(self, number: int, typed: bool) -> None:
        if typed and not self._tool.apart:
            # The terminal has sent it to the program too.
            return
        program = _running_program(self._folder)
        with suppress(ProcessLookupError):
            if program is None:
                if self._pid is not None:
                    os.kill(self._pid, number)
            elif typed:
                # The terminal would have sent it to all processes of the program.
                os.killpg(os.getpgid(program), number)
            else:
                os.kill(program, number)

    def _result(self) -> int:
        if (problem := _left(self._folder, "program.failed")) is not None:
            raise CannotRun(f"the program cannot be run ({problem})", NOT_RUNNABLE)
        if not self.has_begun():
            raise MissingError(self._tool.why_not_started(self._folder, self._code))
        code = _left(self._folder, "program.code")
        return int(code) if code is not None else self._code


def check_ended(folder: Path, tool: str) -> None:
    """Raises InputError where the program of a recording that was cut short, or the tool, runs."""
    pid = _alive(_number(folder, f"{tool}.pid")) or _running_program(folder)
    if pid is not None:
        problem = f"the recording goes on (process {pid}); wait for its end, or end it"
        raise InputError(folder, problem)


@contextmanager
def _handed_down() -> Iterator[str]:
    """Our streams under numbers out of the tool's way, as the supervisor takes them."""
    streams = [_handed(number) for number in range(3)]
    try:
        yield ",".join("-" if stream is None else str(stream) for stream in streams)
    finally:
        for stream in streams:
            if stream is not None:
                os.close(stream)


def _handed(stream: int) -> int | None:
    try:
        # Python's own files are closed at exec: one of them sits where a stream is closed.
        ours = fcntl.fcntl(stream, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        return None if ours else fcntl.fcntl(stream, fcntl.F_DUPFD, _HIGH)
    except OSError:
        return None


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A fresh file under a number that is none of a standard stream."""
    low = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(low)
    try:
        yield high
    finally:
        os.close(high)


def _program(folder: Path) -> int | None:
    return _number(folder, "program.pid")


def _running_program(folder: Path) -> int | None:
    """The program's pid while it runs."""
    ended = _left(folder, "program.code") is not None
    return None if ended else _alive(_program(folder))


def _alive(pid: int | None) -> int | None:
    """The pid, where there is such a process."""
    if pid is None:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return pid


def _number(folder: Path, name: str) -> int | None:
    text = _left(folder, name)
    return int(text) if text is not None and text.isdecimal() else None


def _left(folder: Path, name: str) -> str | None:
    """Return the content of a file of the folder, if it exists."""
    try:
        return (folder / name).read_text(encoding="utf-8")
    except OSError:
        return None


def _shells(code: int) -> int:
    """An exit code as shells have it: 128 + N for signal N."""
    return code if code >= 0 else 128 - code


Causes = Sequence[tuple[str, str]]
"""Patterns of lines, any case, each with what to tell a person; ``{said}`` stands for the line."""


def ask(words: Sequence[str]) -> tuple[int, str]:
    """The exit code of a command and all that it said; raises MissingError where it cannot run."""
    try:
        run = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        raise MissingError(f"{words[0]}: cannot be run ({error.strerror})") from None
    return run.returncode, f"{run.stdout}\n{run.stderr}"


def find_cause(causes: Causes, lines: Iterable[str]) -> str | None:
    """Return the message of the first cause that any line shows; None if no line does."""
    said = list(lines)
    for pattern, told in causes:
        for line in said:
            if re.search(pattern, line, re.IGNORECASE):
                return told.format(said=line)
    return None
