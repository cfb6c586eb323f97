"""Files that may be compressed with gzip, read whole or looked into."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import Final

from gputrace.errors import InputError
from gputrace.traces.sqlite import open_input

_GZIP: Final = b"\x1f\x8b"
_PIECE: Final = 1 << 24
_FREE: Final = 1 << 28
_RATIO: Final = 250
"""What a file may unpack to: `_FREE` bytes, or this many times its size. Traces reach 60 times."""


def peek(head: bytes) -> bytes:
    """The first bytes of a file's content, of the first bytes of the file."""
    if not head.startswith(_GZIP):
        return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, 4096)
    except zlib.error:
        return b""


def read_content(path: Path, most: int) -> bytearray:
    """The content of a file, unpacked if it is compressed.

    Raises InputError where it is cut short or broken, or has more than ``most`` bytes, or far more
    than a trace of its size.
    """
    content = bytearray()
    with open_input(path) as file:
        packed = file.read(2) == _GZIP
        if packed:
            most = min(most, max(_FREE, _RATIO * os.fstat(file.fileno()).st_size))
        file.seek(0)
        try:
            source = gzip.GzipFile(fileobj=file) if packed else file
            while piece := source.read(_PIECE):
                content += piece
                if len(content) > most:
                    raise InputError(path, f"holds over {most >> 20:,} MiB: no trace does")
        except EOFError:
            raise InputError(path, "truncated: the gzip data ends early; copy it again") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise InputError(path, f"broken gzip data ({error}); copy it again") from None
        except (MemoryError, OSError) as error:
            reason = "not enough memory" if isinstance(error, MemoryError) else error.strerror
            raise InputError(path, f"cannot be read: {reason}") from None
    return content
