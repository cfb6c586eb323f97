"""Reading of plain files, or compressed by gzip, xz or zstd: peeking, in blocks, or completely.

Text comes as UTF-8 without a byte-order mark, whatever its encoding. Data compressed twice, as by
``gzip`` of a ``.json.gz`` or by a server, are unpacked twice.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, Final, cast

from gputrace.errors import STOP, ErrorPolicy, InputError
from gputrace.store.cache import cached_file
from gputrace.store.sqlite_reader import check_file, open_input

_FORMS: Final = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_MAGIC: Final = max(map(len, _FORMS))
_LAYERS: Final = 2
"""Layers of compression that are unpacked."""
_UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_PACKED: Final = 15
"""Typical compression ratio of a trace."""
_BLOCK: Final = 4 << 20
"""Bytes of content per block."""

MOST_RATIO: Final = 250
FREE_BYTES: Final = 256 << 20
"""Limits of decompression: this ratio, and this many bytes regardless of the ratio.

Real traces have ratios of 15 to 60; the maximum of gzip is 1030.
"""


def compression(head: bytes) -> str:
    """Return how a file with these first bytes is compressed: gzip, xz, zstd; empty if not."""
    return next((form for magic, form in _FORMS.items() if head.startswith(magic)), "")


def can_unpack(form: str) -> bool:
    """Return whether this Python has the library for a kind of compression."""
    try:
        _decompressor(BytesIO(), form)
    except ImportError:
        return False
    return True


def peek(head: bytes, limit: int = 1 << 20) -> bytes:
    """Return the beginning of the uncompressed content, given the first bytes of a file."""
    for _ in range(_LAYERS):
        if form := compression(head):
            head = _unpacked(head, form, limit)
    return _Plain().text(head[:limit])


def _unpacked(head: bytes, form: str, limit: int) -> bytes:
    """Decompress the beginning of a file as far as it goes."""
    content = bytearray()
    with suppress(Exception):  # Each library raises its own, if only since the rest is missing.
        opened = _decompressor(BytesIO(head), form)
        while len(content) < limit and (piece := opened.read1(limit)):
            content += piece
    return bytes(content)


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
            packed = compression(opened.read(_MAGIC))
        size += file.stat().st_size * (_PACKED if packed else 1)
    return size


def _decompressor(file: Any, form: str, quick: bool = False) -> Any:
    """Return a file of the content of a compressed one; raises ImportError without a library.

    With ``quick``, gzip is read by isal or zlib-ng, if installed: they take a fifth.
    """
    if form == "gzip":
        for name in ("isal.igzip", "zlib_ng.gzip_ng")[: 2 * quick]:
            with suppress(ImportError):
                return import_module(name).GzipFile(fileobj=file, mode="rb")
        return import_module("gzip").GzipFile(fileobj=file, mode="rb")
    if form == "xz":
        return import_module("lzma").LZMAFile(file)
    with suppress(ImportError):  # Python 3.14 has it.
        return import_module("compression.zstd").ZstdFile(file)
    decoder = import_module("zstandard").ZstdDecompressor()
    return BufferedReader(decoder.stream_reader(file, read_across_frames=True, closefd=False))


class Content(AbstractContextManager["Content"]):
    """Block reader of the uncompressed content of a file; use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_input(path)
        self._form = compression(self._file.peek(_MAGIC)[:_MAGIC])
        self._is_quick = self._form == "gzip"
        self._unpacked = self._layers()
        self._plain = _Plain()
        self._length = 0
        self._broken: InputError | None = None

    def _layers(self) -> BufferedReader:
        """Return the file, unpacked."""
        unpacked: Any = self._file
        with suppress(Exception):  # Each library raises its own; reading meets it again.
            for _ in range(_LAYERS):
                if not (form := compression(unpacked.peek(_MAGIC)[:_MAGIC])):
                    break
                unpacked = _decompressor(unpacked, form, self._is_quick)
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
                self._is_quick = False
                self._file.seek(0)
                self._unpacked = self._layers()
                self._unpacked.seek(start)
                self._length = start
                return self.read()
            import zlib

            known = isinstance(error, EOFError | OSError | zlib.error)
            if not known and type(error).__name__ not in ("LZMAError", "ZstdError"):
                raise error
            where = f"after {self._length:,} bytes of content"
            problem = f"broken {self._form} data {where} ({error})"
            if isinstance(error, EOFError):
                problem = f"cut off: its {self._form} data end {where}"
            self._broken = InputError(self.path, f"{problem}; copy it again")
        if self._form:
            check_ratio(self.path, self._length, self._file.tell())
        if self._broken is not None and not pieces:
            raise self._broken
        return self._plain.text(b"".join(pieces))

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


def unpack_database(path: Path) -> Path:
    """Return the SQLite file that a compressed one holds, in the cache; raise InputError if it is
    broken.
    """

    def unpack(target: Path) -> None:
        with Content(path) as source, target.open("xb") as file:
            while block := source.read():
                file.write(block)
        try:
            check_file(target)
        except InputError as error:
            raise InputError(path, f"the SQLite file in it is broken: {error.problem}") from None

    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return cached_file("unpacked", identity, unpack)
