"""Pseudo-terminal for a program whose terminal shows the live view meanwhile."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import termios
import threading
import time
import tty
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Final

from gputrace.collectors.launch import FORWARDED, wait_for, wait_for_children
from gputrace.collectors.launch.group_witness import GroupWitness
from gputrace.errors import UsageError

_POLL_S: Final = 0.1
_WAIT_S: Final = 5.0
"""Longest wait for a signal at a time."""
_PIECE: Final = 1 << 16
_STREAMS: Final = (0, 1, 2)


def open_terminal() -> int:
    """Open the controlling terminal; raise UsageError without one, or if another program has it."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        problem = "--live needs a terminal, and there is none; record without it"
        raise UsageError(problem) from None
    if os.tcgetpgrp(terminal) != os.getpgrp() or os.environ.get("TERM", "dumb") == "dumb":
        os.close(terminal)
        problem = "--live needs a terminal that it can draw on and no other program shows"
        raise UsageError(f"{problem}; record without it")
    return terminal


class PtySession:
    """Child process on a pseudo-terminal; ``hung_up`` is True once our terminal is gone.

    It leads a process group of its own, to which signals to ours are forwarded.
    """

    def __init__(self, terminal: int, log: Path, command: Sequence[str]) -> None:
        """``terminal`` is ours; output of the child that exceeds the buffer goes to ``log``."""
        self._command = command
        self.code: int | None = None
        self.hung_up = False
        self._terminal, self._held = terminal, OutputBuffer(log)
        self._master, self._slave = os.openpty()
        self._settings = termios.tcgetattr(terminal)
        termios.tcsetattr(self._slave, termios.TCSANOW, self._settings)
        self._fit()
        self._pid = 0
        self._is_shown = False
        self._lock = threading.Lock()
        self._pump = threading.Thread(target=self._take, name="output", daemon=True)

    def divide(self) -> bool:
        """Fork the child; return True in it, on its own terminal, and False in the parent."""
        wait_for_children()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        self._pid = os.fork()
        if not self._pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(self._master)
            theirs = []
            for number in _STREAMS:
                with suppress(OSError):
                    if os.isatty(number):
                        theirs.append(number)
            os.setsid()
            fcntl.ioctl(self._slave, termios.TIOCSCTTY, 0)
            for number in theirs:
                os.dup2(self._slave, number)
            os.close(self._slave)
            os.close(self._terminal)
            return True
        os.close(self._slave)
        for number in _STREAMS:
            os.dup2(self._terminal, number)
        # Signals stay blocked here, and so in all threads but for this one.
        threading.Thread(target=self._forward, name="signals", daemon=True).start()
        self._pump.start()
        return False

    def _forward(self) -> None:
        """Forward each signal, unless it was sent to the program as well."""
        ours = GroupWitness(self._command, FORWARDED)
        others = GroupWitness(self._command, FORWARDED, apart=True)
        while self.code is None:
            came = wait_for(FORWARDED, _WAIT_S)
            if came is None:
                ours.forget_old()
                others.forget_old()
                continue
            self.hung_up = self.hung_up or came.number == signal.SIGHUP
            with suppress(ProcessLookupError):
                if not ours.saw(came):
                    os.kill(self._pid, came.number)
                elif not others.saw(came):
                    os.killpg(self._pid, came.number)
        ours.close()
        others.close()

    def type_control(self, name: str) -> None:
        """Type the key that our terminal has for a character of termios, as ``VINTR``."""
        self.type(self._settings[6][getattr(termios, name)])

    def type(self, keys: bytes) -> None:
        """Type at its terminal."""
        with suppress(OSError):
            os.write(self._master, keys)

    def lines(self, most: int) -> list[str]:
        """Return the last lines that it wrote, without escape sequences."""
        with self._lock:
            return self._held.lines(most)

    def is_over(self) -> bool:
        """Return True once it has ended; ``code`` is its exit code then, -N for signal N."""
        if self.code is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def give_terminal(self) -> str:
        """Connect it to our terminal until it ends, after writing its buffered output there.

        Returns a line on where its output is, if it is in a file.
        """
        with suppress(termios.error):
            # The output already has line ends for a terminal.
            tty.setraw(self._terminal, termios.TCSADRAIN)
        try:
            with self._lock:
                said = self._held.release(self._terminal)
                self._is_shown = True
            while not self.is_over():
                if self.hung_up:
                    time.sleep(_POLL_S)
                elif select.select([self._terminal], [], [], _POLL_S)[0]:
                    try:
                        keys = os.read(self._terminal, _PIECE)
                    except OSError:
                        keys = b""
                    self.hung_up = not keys
                    self.type(keys)
            self._pump.join()
        finally:
            with suppress(termios.error):
                termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._settings)
        return said

    def _take(self) -> None:
        """Read its output as it comes, so that it never waits for us."""
        while True:
            self._fit()
            piece = b""
            if select.select([self._master], [], [], _POLL_S)[0]:
                try:
                    piece = os.read(self._master, _PIECE)
                except OSError:
                    # The other side is not open, or not yet.
                    if self.code is None:
                        time.sleep(_POLL_S)
            if not piece:
                if self.code is not None:
                    return
                continue
            with self._lock:
                if self._is_shown:
                    _write(self._terminal, piece)
                else:
                    self._held.add(piece)

    def _fit(self) -> None:
        """Give its terminal the size of ours; the kernel reports a change to it."""
        with suppress(OSError):
            ours = fcntl.ioctl(self._terminal, termios.TIOCGWINSZ, bytes(8))
            theirs = fcntl.ioctl(self._master, termios.TIOCGWINSZ, bytes(8))
            if ours != theirs and struct.unpack("4H", ours)[0]:
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, ours)


def _write(file: int, data: bytes) -> None:
    """Write all data, unless the terminal is gone."""
    with suppress(OSError):
        while data:
            data = data[os.write(file, data) :]


MOST: Final = 4 << 20
"""Maximum bytes buffered in memory; more go into a file."""
_TAIL: Final = 1 << 14
_ESCAPES: Final = re.compile(
    # Strings (OSC, DCS, ...) to their end, CSI sequences, and those of a letter or two.
    r"\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?|\x9b[0-?]*[@-~]?",
    re.DOTALL,
)


class OutputBuffer:
    """Complete output, in memory, or from `MOST` bytes on in a file."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._file: FileIO | None = None
        self._bytes, self._tail = bytearray(), b""
        self._next = MOST

    def add(self, data: bytes) -> None:
        """Append output."""
        self._tail = (self._tail + data)[-_TAIL:]
        self._bytes += data
        if self._file is not None or len(self._bytes) > self._next:
            self._save()

    def lines(self, most: int) -> list[str]:
        """Return the last lines as plain text, in their last state if they were overwritten."""
        text = _ESCAPES.sub("", self._tail.decode("utf-8", "replace"))
        lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines[-most:]]

    def release(self, terminal: int) -> str:
        """Write everything to the terminal; return a line on the file, if there is one."""
        if self._file is not None:
            self._save()
            self._file.close()
        _write(terminal, bytes(self._bytes))
        return f"what the program wrote meanwhile is in {self._log}" if self._file else ""

    def _save(self) -> None:
        """Move the output from memory to the file, if that can be written."""
        try:
            if self._file is None:
                self._log, self._file = _fresh(self._log)
            written = self._file.write(self._bytes) or 0
            del self._bytes[:written]
        except OSError:
            self._next = 2 * len(self._bytes)


def _fresh(log: Path) -> tuple[Path, FileIO]:
    """Create the file, or one with a number in its name; no existing file is replaced."""
    for number in count():
        path = log.with_name(f"{log.stem}-{number}{log.suffix}") if number else log
        with suppress(FileExistsError):
            return path, FileIO(path, "x")
    raise AssertionError
