"""Spool: files of tagged chunks that recorded processes write, read whole or while they grow."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from gputrace.errors import InputError

HEADER: Final = struct.Struct("<8sIIQQ")
"""Magic, version, pid, and the start on CLOCK_REALTIME and CLOCK_MONOTONIC."""
CHUNK: Final = struct.Struct("<4sI")
_STOP: Final = struct.Struct("<QQI4x")
LATEST: Final = 1 << 62
"""Nanoseconds since 1970 beyond any clock; arithmetic with later ones would exceed 64 bits."""
_ERRORS: Final = 4096
"""Upper bound of errno."""
TOO_LARGE: Final = 5000
"""STOP_SIZE of native/spool.h: the recording has reached its size limit."""

Loss = tuple[int, int, str]
"""Time (nanoseconds of CLOCK_REALTIME), number of records (0 if not counted), and reason."""


@dataclass(frozen=True)
class Format:
    """Kind of file: its header, and its name in messages."""

    magic: bytes
    version: int
    name: str
    full_name: str


@dataclass(frozen=True)
class ChunkFile:
    """Content of a file; times are in nanoseconds."""

    pid: int
    host: str
    """Host in the file's name, HOST.PID.KIND."""
    started: int
    """On CLOCK_REALTIME."""
    raw: bytes
    began: int = 0
    """The moment of ``started`` on CLOCK_MONOTONIC."""

    def chunks(self) -> Iterator[tuple[bytes, memoryview, bool]]:
        """Yield tag, body and completeness of each chunk; a kill may cut the last one short."""
        view, at = memoryview(self.raw), HEADER.size
        while at < len(self.raw):
            if at + CHUNK.size > len(self.raw):
                yield b"", view[:0], False
                return
            tag, size = CHUNK.unpack_from(self.raw, at)
            at += CHUNK.size
            yield tag, view[at : at + size], at + size <= len(self.raw)
            at += size


def read_chunk_file(path: Path, known: Format) -> ChunkFile:
    """Read a file; raise InputError for another format or version."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(path, f"cannot be read ({error.strerror})") from None
    return open_chunk_file(path, known, raw)


def open_chunk_file(path: Path, known: Format, raw: bytes) -> ChunkFile:
    """Parse the content, or only the header; raise InputError like `read_chunk_file`."""
    if not raw:
        raise InputError(path, "empty: its process was ended at once, or the disk was full")
    if len(raw) < HEADER.size or not raw.startswith(known.magic):
        raise InputError(path, f"not {known.full_name}")
    _, version, pid, started, began = HEADER.unpack_from(raw)
    if version != known.version:
        problem = f"{known.name} of version {version}; this gputrace reads {known.version}"
        raise InputError(path, problem)
    if max(started, began) > LATEST:
        raise InputError(path, "broken: it began at a time that no clock shows")
    return ChunkFile(pid, path.name.rsplit(".", 2)[0], started, raw, began)


def read_stop(body: bytes) -> Loss | None:
    """Return when and why writing ended, from a FULL chunk; None if it did not."""
    if len(body) < _STOP.size:
        return None
    time, records, error = _STOP.unpack_from(body)
    if time and error == TOO_LARGE:
        return time, records, "the recording had become as large as --max-size lets it"
    why = os.strerror(error) if 0 < error < _ERRORS else "an error in gputrace"
    return (time, records, f"nothing more could be written: {why}") if time else None


def read_numbered(body: bytes) -> tuple[int, bytes] | None:
    """Return the number and the text of a chunk with a name; None if it is too short."""
    return (int.from_bytes(body[:4], "little"), body[4:]) if len(body) >= 4 else None


_File = TypeVar("_File")


def base_of(path: Path) -> str:
    """Return the common stem of a process's files, HOST.PID.KIND or, in a ring, HOST.PID~N.KIND."""
    return path.name.removesuffix(path.suffix).partition("~")[0]


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Sort files by process, and those of each in the order written."""
    return sorted(paths, key=lambda path: (base_of(path), len(path.name), path.name))


def read_all(
    folder: Path,
    pattern: str,
    read: Callable[[Path], _File],
    join: Callable[[Sequence[_File]], _File],
    problems: list[InputError],
) -> list[_File]:
    """Read and join the files of each process; append errors of unreadable ones to ``problems``."""
    files: dict[str, list[_File]] = {}
    for path in in_order(folder.glob(pattern)):
        try:
            files.setdefault(base_of(path), []).append(read(path))
        except InputError as error:
            if path.exists():  # Else a ring has removed it.
                problems.append(error)
    return [join(parts) for parts in files.values() if parts]


_LASTING: Final = frozenset((b"FULL", b"NAME", b"INFO", b"THRD", b"DEVI"))
"""Tags of chunks that describe any later ones."""
_SWITCHES: Final = frozenset(
    (
        *(b"capture_on", b"capture_off", b"calls_on", b"calls_off", b"let_go", b"idle", b"paused"),
        *(b"nodes_on", b"nodes_off"),
    )
)
"""Keys of INFO that say when something was switched, and describe nothing later."""
_EVENT: Final = struct.Struct("<QQIIHHI")
"""Start, end, thread, name, kind, rank and number of an event in a host file."""
_LASTING_EVENTS: Final = (4, 12)
"""Kinds: notes, and places in the source."""


def copy_since(
    source: Path,
    target: Path,
    offset: int,
    began: tuple[int, int] | None,
    span: tuple[int, int] = (0, LATEST),
) -> None:
    """Copy a spool or a host file without the records that end before ``offset`` bytes.

    ``began`` is the start of the copy on CLOCK_REALTIME and CLOCK_MONOTONIC, None for that of the
    file. Of the events of a host file, those are kept that end after the start of ``span``, in
    nanoseconds of CLOCK_REALTIME, and not after its end. Raises OSError if that fails.
    """
    raw = source.read_bytes()
    if len(raw) < HEADER.size:
        return
    magic, version, pid, *own = HEADER.unpack_from(raw)
    parts = [HEADER.pack(magic, version, pid, *(began or own))]
    at = HEADER.size
    for tag, body, whole in ChunkFile(pid, source.name, own[0], raw).chunks():
        if not whole:
            break
        if tag == b"EVNT":
            # Those that end in the span, and those that describe any others.
            first, last = span if at >= offset else (LATEST, LATEST)
            kept = b"".join(
                _EVENT.pack(*event)
                for event in _EVENT.iter_unpack(body[: len(body) // _EVENT.size * _EVENT.size])
                if first < event[1] <= last or event[4] in _LASTING_EVENTS
            )
        elif at >= offset or (tag in _LASTING and bytes(body).partition(b"=")[0] not in _SWITCHES):
            kept = bytes(body)
        else:
            kept = b""
        parts += [CHUNK.pack(tag, len(kept)), kept] if kept else []
        at += CHUNK.size + len(body)
    ended = b"ended=a part of a recording"
    parts += [CHUNK.pack(b"INFO", len(ended)), ended]
    target.write_bytes(b"".join(parts))


_MOST_AT_ONCE: Final = 16 << 20
"""Maximum bytes of records read at once; earlier ones are skipped."""
_LAST_LINES: Final = 4 << 20


class ChunkTail:
    """Reader of new complete chunks of a growing file, which is open only while it is read."""

    def __init__(self, path: Path, known: Format) -> None:
        self._path, self._known = path, known
        self._at = HEADER.size
        self.head: ChunkFile | None = None
        """Header of the file; None until it is written."""

    def read(self, records: Collection[bytes]) -> list[tuple[bytes, bytes]]:
        """Return tag and body of the chunks since the last call; raise InputError for other files.

        Chunks with the tags in ``records`` are limited to the last `_MOST_AT_ONCE` bytes, so that a
        large file is soon read; those with names and descriptions are not.
        """
        try:
            file = self._path.open("rb")
        except OSError:
            return []
        with file:
            number, chunks = file.fileno(), []
            size = os.fstat(number).st_size
            if size < HEADER.size:
                return []
            if self.head is None:
                head = os.pread(number, HEADER.size, 0)
                self.head = open_chunk_file(self._path, self._known, head)
            walked = list(self._walk(number, size))
            left = sum(length for tag, _, length in walked if tag in records) - _MOST_AT_ONCE
            for tag, start, length in walked:
                if tag in records and left > 0:
                    left -= length
                else:
                    chunks.append((tag, os.pread(number, length, start)))
        return chunks

    def _walk(self, file: int, size: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield tag, position and length of each complete chunk."""
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


class LineTail:
    """Reader of new complete lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> list[bytes]:
        """Return the new lines without ends: the first and the last `_LAST_LINES` bytes at most."""
        try:
            with self._path.open("rb") as file:
                first = [] if self._at else [file.readline()]
                if first and not first[0].endswith(b"\n"):
                    return []
                self._at = max(self._at, file.tell())
                far = file.seek(0, os.SEEK_END) - _LAST_LINES
                file.seek(max(self._at, far))
                if far > self._at:
                    file.readline()
                    self._at = file.tell()
                whole, end, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._at += len(whole) + len(end)
        return [line[:-1] for line in first] + (whole.split(b"\n") if end else [])
