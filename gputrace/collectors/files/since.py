"""A file of a recorded process from some point on, as if the process had begun there."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from gputrace.collectors.files.chunks import HEADER, read_raw

_LASTING: Final = frozenset((b"FULL", b"NAME", b"INFO", b"THRD", b"DEVI"))
"""Chunks that explain what comes after them, whenever that is."""


def copy_since(source: Path, target: Path, offset: int, began: tuple[int, int]) -> None:
    """Copies a spool or a host file without the records that end before ``offset`` bytes.

    ``began`` is the moment of CLOCK_REALTIME and CLOCK_MONOTONIC that the copy is to begin at.
    Raises OSError where that cannot be done.
    """
    file = read_raw(source)
    if file is None:
        return
    magic, version, pid, _, _ = HEADER.unpack_from(file.raw)
    parts = [HEADER.pack(magic, version, pid, *began)]
    at = HEADER.size
    for tag, body, whole in file.chunks():
        if not whole:
            break
        if at >= offset or tag in _LASTING:
            parts += [struct.pack("<4sI", tag, len(body)), bytes(body)]
        at += 8 + len(body)
    ended = b"ended=a cell of a notebook"
    parts.append(struct.pack("<4sI", b"INFO", len(ended)) + ended)
    target.write_bytes(b"".join(parts))
