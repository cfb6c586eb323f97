"""What a growing file has gained since it was last read, in whole pieces."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from gputrace.collectors.files.chunks import CHUNK, HEADER, ChunkFile, Format, open_chunk_file

_FAR: Final = 16 << 20
"""So many bytes of records are read at once at most; what lies before them is left out."""
_LINES: Final = 4 << 20

Chunk = tuple[bytes, bytes]
"""Tag and body."""


class ChunkTail:
    """The whole chunks that a file gains. The file is open only while it is read."""

    def __init__(self, path: Path, known: Format) -> None:
        self._path, self._known = path, known
        self._at = HEADER.size
        self.head: ChunkFile | None = None
        """Who wrote it; None until that is there."""

    def read(self, records: Collection[bytes]) -> list[Chunk]:
        """The chunks since the last call, in order; raises InputError where it is no such file.

        Of chunks with the tags in ``records`` only the last `_FAR` bytes, so that a large file is
        begun to be read at once; of the others, which name and describe things, all.
        """
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            size = os.fstat(file).st_size
            if size < HEADER.size:
                return []
            if self.head is None:
                self.head = open_chunk_file(self._path, self._known, os.pread(file, HEADER.size, 0))
            found = list(self._walk(file, size))
            return list(_read(file, found, records))
        finally:
            os.close(file)

    def _walk(self, file: int, size: int) -> Iterator[tuple[bytes, int, int]]:
        """Tag, place and length of each whole chunk."""
        while self._at + CHUNK.size <= size:
            head = os.pread(file, CHUNK.size, self._at)
            if len(head) < CHUNK.size:
                return
            tag, length = CHUNK.unpack(head)
            start = self._at + CHUNK.size
            if start + length > size:
                return
            self._at = start + length
            yield tag, start, length


def _read(
    file: int, found: list[tuple[bytes, int, int]], records: Collection[bytes]
) -> Iterator[Chunk]:
    left = sum(length for tag, _, length in found if tag in records) - _FAR
    for tag, start, length in found:
        if tag in records and left > 0:
            left -= length
            continue
        yield tag, os.pread(file, length, start)


class LineTail:
    """The whole lines that a file gains."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> list[bytes]:
        """The lines since the last call, without their ends; of a long file the first and the last.

        Those between are skipped where more than `_LINES` bytes would have to be read.
        """
        try:
            with self._path.open("rb") as file:
                first = [] if self._at else [file.readline()]
                if first and not first[0].endswith(b"\n"):
                    return []
                self._at = max(self._at, file.tell())
                self._skip(file)
                whole, end, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._at += len(whole) + len(end)
        return [line[:-1] for line in first] + (whole.split(b"\n") if end else [])

    def _skip(self, file: BinaryIO) -> None:
        """Goes to where reading is to go on."""
        far = file.seek(0, os.SEEK_END) - _LINES
        file.seek(max(self._at, far))
        if far > self._at:
            file.readline()
            self._at = file.tell()
