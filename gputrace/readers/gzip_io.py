"""Reading of plain or gzip-compressed files: peeking, block by block, or completely.

Text comes as UTF-8 without a byte-order mark, whatever its encoding. Data compressed twice, as by
``gzip`` of a ``.json.gz`` or by a server, are unpacked twice.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, cast

from gputrace.errors import STOP, ErrorPolicy, InputError
from gputrace.store.sqlite_reader import open_input

GZIP: Final = b"\x1f\x8b"
_LAYERS: Final = 2
"""Layers of gzip that are unpacked."""
_UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_PACKED: Final = 15
"""Typical compression ratio of a trace."""
_TRAILER: Final = 8
"""Bytes of the checksum and length at the end of gzip data, which may be wrong."""

_BLOCK: Final = 4 << 20
"""Bytes of content per block."""

MOST_RATIO: Final = 250
FREE_BYTES: Final = 256 << 20
"""Limits of decompression: this ratio, and this many bytes regardless of the ratio.

Real traces have ratios of 15 to 60; the maximum of gzip is 1030.
"""


def peek(head: bytes, limit: int = 1 << 20) -> bytes:
    """Return the beginning of the uncompressed content, given the first bytes of a file."""
    for _ in range(_LAYERS):
        if head.startswith(GZIP):
            head = _unpacked(head, limit)
    return _Plain().text(head[:limit])


def _unpacked(head: bytes, limit: int) -> bytes:
    import zlib

    for known in (head, head[:-_TRAILER]):
        with suppress(zlib.error):
            return zlib.decompressobj(wbits=31).decompress(known, limit)
    return b""


class _Plain:
    """Converter of text with a byte-order mark, in blocks, to UTF-8 without one."""

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_first = True

    def text(self, block: bytes) -> bytes:
        """Return the next block as UTF-8; as it is if the first one has no mark."""
        if self._is_first:
            block = block.removeprefix(codecs.BOM_UTF8)
            if block.startswith(_UTF_16):
                self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
            self._is_first = False
        if self._decoder is None:
            return block
        return self._decoder.decode(block).encode("utf-8", "replace")


def text_size(files: Iterable[Path]) -> int:
    """Estimate the uncompressed size of some files in bytes."""
    size = 0
    for file in files:
        with file.open("rb") as opened:
            packed = opened.read(len(GZIP)) == GZIP
        size += file.stat().st_size * (_PACKED if packed else 1)
    return size


def _quick_gzip() -> Any:
    """Return isal's or zlib-ng's module in place of `gzip`, if installed: they take a fifth."""
    for name in ("isal.igzip", "zlib_ng.gzip_ng"):
        with suppress(ImportError):
            return import_module(name)
    return import_module("gzip")


class Content(AbstractContextManager["Content"]):
    """Block reader of the uncompressed content of a file; use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_input(path)
        self._packed = self._file.read(2) == GZIP
        self._file.seek(0)
        gzip_ = _quick_gzip() if self._packed else None
        self._is_quick = gzip_ is not None and gzip_.__name__ != "gzip"
        self._unpacked = self._layers(gzip_) if gzip_ else cast(BufferedReader, self._file)
        self._plain = _Plain()
        self._length = 0
        self._broken: InputError | None = None

    def _layers(self, gzip_: Any) -> BufferedReader:
        """Return the file, unpacked by a module like ``gzip``."""
        unpacked = gzip_.GzipFile(fileobj=self._file)
        with suppress(Exception):  # Each library raises its own; reading meets it again.
            for _ in range(_LAYERS - 1):
                again = unpacked.read(len(GZIP)) == GZIP
                unpacked.seek(0)
                unpacked = gzip_.GzipFile(fileobj=unpacked, mode="rb") if again else unpacked
        return cast(BufferedReader, unpacked)

    def read(self) -> bytes:
        """Return the next block, empty at the end; raise InputError at the first broken one."""
        if self._broken is not None:
            raise self._broken
        pieces: list[bytes] = []
        start = self._length
        try:
            while self._length < start + _BLOCK and (piece := self._unpacked.read1(_BLOCK)):
                pieces.append(piece)
                self._length += len(piece)
        except Exception as error:  # Each library raises its own.
            if self._is_quick:
                # `gzip` gives all that there is before a break.
                import gzip

                self._file.seek(0)
                self._unpacked = self._layers(gzip)
                self._unpacked.seek(start)
                self._is_quick, self._length = False, start
                return self.read()
            self._broken = self._broken_by(error)
        if self._packed:
            check_ratio(self.path, self._length, self._file.tell())
        if self._broken is not None and not pieces:
            raise self._broken
        return self._plain.text(b"".join(pieces))

    def _broken_by(self, error: Exception) -> InputError:
        import zlib

        if not isinstance(error, EOFError | OSError | zlib.error):
            raise error
        where = f"after {self._length:,} bytes of content"
        problem = f"broken gzip data {where} ({error})"
        if isinstance(error, EOFError):
            problem = f"cut off: its gzip data end {where}"
        return InputError(self.path, f"{problem}; copy it again")

    def __exit__(self, *_: object) -> None:
        self._unpacked.close()
        self._file.close()


def check_ratio(path: Path, unpacked: int, packed: int) -> None:
    """Raise InputError if a file decompressed to more than a real trace of its size would."""
    if unpacked > max(FREE_BYTES, MOST_RATIO * packed):
        problem = f"{unpacked >> 20:,} MiB came out of {packed:,} bytes"
        raise InputError(path, f"{problem}: no trace compresses that well; not read further")


def read_content(path: Path, most: int, breaks: ErrorPolicy = STOP) -> bytearray:
    """Read the uncompressed content of a file of at most ``most`` bytes, or raise InputError."""
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
