"""A program on a terminal of its own, measured by what it draws."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from benchmarks.measure import ROOT, Failed
from benchmarks.processes import cpu_s, folder_of

QUIET_S: Final = 0.25
"""A screen that has been still for so long is done."""
_BURST_S: Final = 0.02
"""Pause after which output belongs to another frame."""
_LIMIT_S: Final = 60.0


class Answer(NamedTuple):
    """How long a key took: by the clock, and of the processor."""

    wall_s: float
    cpu_s: float


class Terminal:
    """Runs a command on a pseudo-terminal; use it as a context manager."""

    def __init__(self, command: Sequence[str], columns: int, rows: int) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self._began, self._seen = time.perf_counter(), b""
        self._process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)

    def until(self, text: str) -> Answer:
        """How long from the start until a text is drawn, by the clock and of the processor in all
        threads; raises Failed where it never is.
        """
        while time.perf_counter() - self._began < _LIMIT_S:
            if text.encode() in self._seen:
                wall_s = time.perf_counter() - self._began
                return Answer(wall_s, cpu_s(folder_of(self._process.pid)))
            part = self._read(1.0)
            self._seen += part
            if not part and self._process.poll() is not None:
                break
        raise Failed(f"{text!r} was never drawn")

    def press(self, key: str) -> Answer:
        """Presses a key, and waits for the frame that answers it."""
        self.settle()
        cpu, began = self._cpu_s(), time.perf_counter()
        os.write(self._master, key.encode())
        last, patience = began, QUIET_S
        while self._read(patience):
            last, patience = time.perf_counter(), _BURST_S
        return Answer(last - began, self._cpu_s() - cpu)

    def _cpu_s(self) -> float:
        """Seconds that the program's main thread, which draws, has run."""
        pid = self._process.pid
        text = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii")
        return int(text.split()[0]) / 1e9

    def settle(self) -> None:
        """Waits until nothing is drawn any more."""
        while self._read(QUIET_S):
            pass

    def _read(self, patience_s: float) -> bytes:
        ready, _, _ = select.select([self._master], [], [], patience_s)
        try:
            return os.read(self._master, 1 << 16) if ready else b""
        except OSError:
            return b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        os.close(self._master)
