"""What a program wrote to its terminal while something else was drawn there."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Final

MOST: Final = 4 << 20
"""Bytes that are held for the terminal; more go into a file."""
_TAIL: Final = 1 << 14
_ESCAPES: Final = re.compile(
    # Strings (OSC, DCS, ...) to their end, CSI sequences, and those of a letter or two.
    r"\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?|\x9b[0-?]*[@-~]?",
    re.DOTALL,
)


class Held:
    """Output, whole: in memory, or from `MOST` bytes on in a file."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._file: FileIO | None = None
        self._bytes, self._tail = bytearray(), b""
        self._next = MOST

    def add(self, data: bytes) -> None:
        """Takes some more."""
        self._tail = (self._tail + data)[-_TAIL:]
        self._bytes += data
        if self._file is not None or len(self._bytes) > self._next:
            self._save()

    def lines(self, most: int) -> list[str]:
        """The last lines, as plain text; of a line that was written over, its last state."""
        text = _ESCAPES.sub("", self._tail.decode("utf-8", "replace"))
        lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines[-most:]]

    def release(self, terminal: int) -> str:
        """Writes all to the terminal, or tells where it is."""
        if self._file is not None:
            self._save()
            self._file.close()
        with suppress(OSError):
            data = bytes(self._bytes)
            while data:
                data = data[os.write(terminal, data) :]
        return f"what the program wrote meanwhile is in {self._log}" if self._file else ""

    def _save(self) -> None:
        """Moves what is in memory to the file; where that cannot be written, memory must do."""
        try:
            if self._file is None:
                self._log, self._file = _fresh(self._log)
            written = self._file.write(self._bytes) or 0
            del self._bytes[:written]
        except OSError:
            self._next = 2 * len(self._bytes)


def _fresh(log: Path) -> tuple[Path, FileIO]:
    """The file, or one beside it of the same name and a number: no other's is replaced."""
    for number in count():
        path = log.with_name(f"{log.stem}-{number}{log.suffix}") if number else log
        try:
            return path, FileIO(path, "x")
        except FileExistsError:
            continue
    raise AssertionError
