"""Files that may be compressed with gzip: looked into, read a block at a time, or read whole."""

from __future__ import annotations

import gzip
import zlib
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Final, cast

from gputrace.errors import InputError
from gputrace.traces.breaks import STOP, Breaks
from gputrace.traces.sqlite import open_input

GZIP: Final = b"\x1f\x8b"

_TRAILER: Final = 8
"""Bytes at the end of gzip's data that hold its sum, which may be wrong."""

_BLOCK: Final = 4 << 20
"""Bytes of content that are read at once."""

MOST_RATIO: Final = 250
FREE_BYTES: Final = 256 << 20
"""A file may unpack to this many times its size, and to this many bytes whatever its size.

Real traces are 15 to 60 times as long as packed; what gzip can do at most is 1030.
"""


def peek(head: bytes, limit: int = 1 << 20) -> bytes:
    """The beginning of a file's content, of the first bytes of the file."""
    if not head.startswith(GZIP):
        return head[:limit]
    for known in (head, head[:-_TRAILER]):
        with suppress(zlib.error):
            return zlib.decompressobj(wbits=31).decompress(known, limit)
    return b""


class Content:
    """The content of one file; use it as a context manager.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_input(path)
        self._packed = self._file.read(2) == GZIP
        self._file.seek(0)
        unpacked = gzip.GzipFile(fileobj=self._file) if self._packed else self._file
        self._unpacked = cast(BufferedReader, unpacked)
        self._length = 0
        self._broken: InputError | None = None

    def read(self) -> bytes:
        """The next block, nothing at the end.

        Raises InputError where it cannot be unpacked, after all blocks that can.
        """
        if self._broken is not None:
            raise self._broken
        block = bytearray()
        try:
            while len(block) < _BLOCK and (piece := self._unpacked.read1(_BLOCK)):
                block += piece
                self._length += len(piece)
        except EOFError:
            problem = f"cut off: its gzip data end after {self._length:,} bytes of content"
            self._broken = InputError(self.path, f"{problem}; copy it again")
        except (OSError, zlib.error) as error:
            problem = f"broken gzip data after {self._length:,} bytes of content ({error})"
            self._broken = InputError(self.path, f"{problem}; copy it again")
        if self._packed:
            self._check_ratio()
        if self._broken is not None and not block:
            raise self._broken
        return bytes(block)

    def _check_ratio(self) -> None:
        packed = self._file.tell()
        check_ratio(self.path, self._length, packed)

    def __enter__(self) -> Content:
        return self

    def __exit__(self, *_: object) -> None:
        self._unpacked.close()
        self._file.close()


def check_ratio(path: Path, unpacked: int, packed: int) -> None:
    """Raises InputError where more came out of a file than does of a trace of its size."""
    if unpacked > max(FREE_BYTES, MOST_RATIO * packed):
        problem = f"{unpacked >> 20:,} MiB came out of {packed:,} bytes"
        raise InputError(path, f"{problem}: no trace packs like that; not read on")


def read_content(path: Path, most: int, breaks: Breaks = STOP) -> bytearray:
    """The content of a file, unpacked if it is compressed.

    Raises InputError where it is cut short or broken, or has more than ``most`` bytes, or far more
    than a trace of its size.
    """
    content = bytearray()
    try:
        with Content(path) as source:
            while block := source.read():
                content += block
                if len(content) > most:
                    raise InputError(path, f"holds over {most >> 20:,} MiB: no trace does")
    except InputError as error:
        breaks.meet(error)
    except MemoryError:
        raise InputError(path, "cannot be read: not enough memory") from None
    return content
