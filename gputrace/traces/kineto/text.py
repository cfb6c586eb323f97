"""The text of a file that may be packed with gzip, a block at a time."""

from __future__ import annotations

import gzip
import zlib
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Final, cast

from gputrace.errors import InputError
from gputrace.traces.sqlite import open_input

GZIP: Final = b"\x1f\x8b"

_TRAILER: Final = 8
"""Bytes at the end of gzip's data that hold its sum, which may be wrong."""

_BLOCK: Final = 4 << 20
"""Bytes of text that are decoded at once."""

_RATIO: Final = 250
_FREE: Final = 256 << 20
"""Text of a file may be this many times its size, and this many bytes whatever its size.

Real traces are 15 to 60 times as long as packed; what gzip can do at most is 1030.
"""


def unpack_head(head: bytes, limit: int = 1 << 20) -> bytes:
    """The text at the beginning of a file, of which only the first bytes are there."""
    if not head.startswith(GZIP):
        return head
    for known in (head, head[:-_TRAILER]):
        with suppress(zlib.error):
            return zlib.decompressobj(wbits=31).decompress(known, limit)
    return b""


class Text:
    """The text of one file; use it as a context manager.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_input(path)
        self._packed = self._file.read(2) == GZIP
        self._file.seek(0)
        unpacked = gzip.GzipFile(fileobj=self._file) if self._packed else self._file
        self._text = cast(BufferedReader, unpacked)
        self._length = 0

    def read(self) -> bytes:
        """The next block, nothing at the end; raises InputError where it cannot be unpacked."""
        block = bytearray()
        try:
            while len(block) < _BLOCK and (piece := self._text.read1(_BLOCK)):
                block += piece
                self._length += len(piece)
        except EOFError as error:
            problem = f"cut off: its gzip data end after {self._length:,} bytes of text"
            raise InputError(self.path, f"{problem}; copy it again") from error
        except (OSError, zlib.error) as error:
            problem = f"broken gzip data after {self._length:,} bytes of text ({error})"
            raise InputError(self.path, f"{problem}; copy it again") from error
        if self._packed:
            self._check_ratio()
        return bytes(block)

    def _check_ratio(self) -> None:
        packed = self._file.tell()
        if self._length > max(_FREE, _RATIO * packed):
            problem = f"{self._length >> 20:,} MiB of text came out of {packed:,} bytes"
            raise InputError(self.path, f"{problem}: no trace packs like that; not read on")

    def __enter__(self) -> Text:
        return self

    def __exit__(self, *_: object) -> None:
        self._text.close()
        self._file.close()
