"""The real command on a terminal of its own, as a person has it."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.helpers import command
from tests.helpers.forked import ForkedProcess

PATIENCE_S: Final = 60.0
_LAUNCH: Final = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0)
os.close(int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])
"""
GPUTRACE: Final = (sys.executable, "-m", "gputrace")
_SCREEN: Final = re.compile(r"\x1b\[\?1049h.*?\x1b\[\?1049l(\x1b\[\?\d+[hl])*", re.DOTALL)
"""With the modes that are set back after it."""


class OnTerminal:
    """One run of ``gputrace``, or of another program; streams not given are the terminal."""

    def __init__(
        self,
        *words: str | Path,
        cwd: Path | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: dict[str, str] | None = None,
        program: Sequence[str] = GPUTRACE,
    ) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
        self._settings = termios.tcgetattr(slave)
        self._slave = slave
        arguments = [str(word) for word in words]
        variables = command.environment({"TERM": "xterm"} | (env or {}))
        given = [slave if stream is None else stream for stream in (stdin, stdout, stderr)]
        forked = None
        if program is GPUTRACE and subprocess.DEVNULL not in given:
            streams = [each if isinstance(each, int) else each.fileno() for each in given]
            forked = command.start_on_terminal(
                arguments, variables, cwd or Path.cwd(), [*streams, slave]
            )
        self.process: subprocess.Popen[bytes] | ForkedProcess = forked or subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(slave), *program, *arguments],
            stdin=given[0],
            stdout=given[1],
            stderr=given[2],
            pass_fds=[slave],
            cwd=cwd,
            env=variables,
        )
        self.seen = b""

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        self.seen += os.read(self._master, 1 << 16)
        return True

    @property
    def text(self) -> str:
        return self.seen.decode(errors="replace")

    @property
    def left(self) -> str:
        """Return what stays on the terminal once the screens are gone."""
        return _SCREEN.sub("", self.text).replace("\r\n", "\n")

    def until(self, words: str, left: bool = False) -> None:
        """Waits for words to be drawn; ``left``: to be there once the screens are gone."""
        end = time.monotonic() + PATIENCE_S
        while words not in (self.left if left else self.text):
            assert time.monotonic() < end, self.text[-3000:]
            self._read(0.1)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Waits for the end, and gives the exit code; the terminal is as it was."""
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text[-3000:]
            self._read(0.1)
        while self._read(0.1):
            pass
        assert termios.tcgetattr(self._slave) == self._settings
        os.close(self._slave)
        os.close(self._master)
        return self.process.returncode
