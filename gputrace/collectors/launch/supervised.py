"""Run of a program under a tool that records it (nsys, nvprof), as if the tool were not there."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from gputrace.collectors.launch import (
    FORWARDED,
    NOT_RUNNABLE,
    PYTHONS,
    CannotRun,
    Launch,
    ReceivedSignal,
    ignored_for_program,
    wait_for,
    wait_for_children,
)
from gputrace.collectors.launch.group_witness import GroupWitness
from gputrace.errors import InputError, MissingError
from gputrace.tools import ask_tool

SUPERVISOR: Final = Path(__file__).with_name("tool_shim.py")
_STREAMS: Final = "STREAMS"
"""Placeholder on the command line for the descriptors, which are known when the tool starts."""
_HIGH: Final = 200
_LOOK_S: Final = 0.2
"""Seconds between checks of the program, which is not our child."""
_WATCHED: Final = FORWARDED | {signal.SIGCHLD}


def prefix(folder: Path) -> list[str]:
    """Return the words before the program on its command line."""
    wait_for_children()
    ignored = ",".join(str(int(number)) for number in ignored_for_program()) or "-"
    shim = [sys.executable, "-I", "-S", str(SUPERVISOR)]
    return [*shim, str(folder.absolute()), _STREAMS, ignored]


class Supervision:
    """Program under a tool, from the start to the end of both.

    The tool's pid is in ``NAME.pid`` of the folder while it runs, its output in ``NAME.log``. A
    tool that is ``apart`` puts the program into a session that no terminal reaches: it then gets
    its own process group, and signals to our process group are forwarded to the program's.
    """

    def __init__(
        self, name: str, launch: Launch, folder: Path, apart: bool, why_not: Callable[[int], str]
    ) -> None:
        """``why_not`` returns the message for a tool that exited with a code before the program."""
        self._launch, self._folder, self._apart, self._why_not = launch, folder, apart, why_not
        self._pid: int | None = None
        self._pid_file, self._log, self._code = folder / f"{name}.pid", folder / f"{name}.log", 0

    def run(self, meanwhile: Callable[[], None]) -> int:
        """Run the tool and the program to their ends; return the program's exit code, or -N.

        ``meanwhile`` is called several times a second. Raises CannotRun if the program cannot be
        run, MissingError if the tool cannot be run or does not start it.
        """
        wait_for_children()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            with ExitStack() as stack:
                words = self._launch.command
                ours = stack.enter_context(closing(GroupWitness(words, FORWARDED)))
                others = None
                if self._apart:
                    others = stack.enter_context(closing(GroupWitness(words, FORWARDED, True)))
                self._pid = self._start(before)
                self._pid_file.write_text(str(self._pid), encoding="utf-8")
                while not self._is_over():
                    meanwhile()
                    came = wait_for(_WATCHED, _LOOK_S)
                    if came is not None and came.number != signal.SIGCHLD:
                        self._pass_on(came, ours, others)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if (problem := _left(self._folder, "program.failed")) is not None:
            raise CannotRun(f"the program cannot be run ({problem})", NOT_RUNNABLE)
        if not self.has_begun():
            raise MissingError(self._why_not(self._code))
        code = _left(self._folder, "program.code")
        return int(code) if code is not None else self._code

    def has_begun(self) -> bool:
        """Return True once the program has been started."""
        return _number(self._folder, "program.pid") is not None

    def is_writing(self) -> bool:
        """Return True if the program has ended and the tool has not."""
        return self._pid is not None and _left(self._folder, "program.code") is not None

    def _start(self, mask: set[int] | set[signal.Signals]) -> int:
        spawn = partial(os.posix_spawn, setpgroup=0) if self._apart else os.posix_spawn
        words = list(self._launch.command)
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        with _handed_down() as streams, _opened(self._log) as log:
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

    def _is_over(self) -> bool:
        if self._pid is not None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                self._pid, self._code = None, os.waitstatus_to_exitcode(status)
                self._pid_file.unlink(missing_ok=True)
        return self._pid is None and _running_program(self._folder) is None

    def _pass_on(
        self, came: ReceivedSignal, ours: GroupWitness, others: GroupWitness | None
    ) -> None:
        """Forward a signal, unless the program has got it, too."""
        was_sent_to_group = ours.saw(came)
        if was_sent_to_group and (others is None or others.saw(came)):
            return
        program = _running_program(self._folder)
        with suppress(ProcessLookupError):
            if program is None:
                if self._pid is not None:
                    os.kill(self._pid, came.number)
            elif was_sent_to_group:
                os.killpg(os.getpgid(program), came.number)
            else:
                os.kill(program, came.number)


def check_ended(folder: Path, tool: str) -> None:
    """Raise InputError if the program of an interrupted recording, or the tool, still runs."""
    pid = _alive(folder, f"{tool}.pid") or _running_program(folder)
    if pid is not None:
        problem = f"still recording (process {pid}); wait for it to end, or end it"
        raise InputError(folder, problem)


@contextmanager
def _handed_down() -> Iterator[str]:
    """Duplicate our streams to high descriptors; yield these as the shim takes them."""
    streams: dict[int, int] = {}
    for stream in range(3):
        with suppress(OSError):
            # A closed stream's number may be that of a file of Python's, which is closed at exec.
            if not fcntl.fcntl(stream, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                streams[stream] = fcntl.fcntl(stream, fcntl.F_DUPFD, _HIGH)
    try:
        yield ",".join(str(streams.get(stream, "-")) for stream in range(3))
    finally:
        for handed in streams.values():
            os.close(handed)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Create a file with a descriptor above those of the standard streams."""
    low = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(low)
    try:
        yield high
    finally:
        os.close(high)


def _running_program(folder: Path) -> int | None:
    """Return the program's pid while it runs."""
    return None if _left(folder, "program.code") is not None else _alive(folder, "program.pid")


def _alive(folder: Path, name: str) -> int | None:
    """Return the pid in a file of the folder, if there is such a process."""
    pid = _number(folder, name)
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


Causes = Sequence[tuple[str, str]]
"""Patterns of lines, ignoring case, each with a message to the user; ``{said}`` is the line."""


def ask(words: Sequence[str]) -> tuple[int, str]:
    """Return exit code and output of a command; raise MissingError if it cannot be run."""
    try:
        run = ask_tool(words)
    except OSError as error:
        raise MissingError(f"{words[0]}: cannot be run ({error.strerror})") from None
    return run.returncode, f"{run.stdout}\n{run.stderr}"


def find_cause(causes: Causes, lines: Sequence[str]) -> str | None:
    """Return the message of the first cause that any line shows; None if no line does."""
    for pattern, message in causes:
        for line in lines:
            if re.search(pattern, line, re.IGNORECASE):
                return message.format(said=line)
    return None
