"""Cache of results computed from unchanged traces: Arrow IPC files in the user's cache folder.

An entry consists of a text and columns. Its key covers the path, size and modification time of each
file of a run, and the version of gputrace and its code, so that it never matches other files. A
broken entry counts as missing. Columns are memory-mapped, not read: opening takes milliseconds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.store import cache_folder

MOST_BYTES: Final = 4 << 30
"""Maximum total size of the entries; the least recently used are removed first."""
_LARGEST: Final = MOST_BYTES // 2
"""Maximum bytes of an entry; larger ones are not cached."""
_SUFFIX: Final = ".arrow"
_LEVELS: Final = 2
"""Folder levels to inspect: a folder of traces, some of which are folders of tables."""
_OFF: Final = ("off", "0")


class Kept(NamedTuple):
    """A cache entry."""

    text: bytes
    columns: Sequence[NDArray[Any]]
    """Columns of any lengths; read-only in a loaded entry."""


def cache_root() -> Path | None:
    """Return the folder of entries: GPUTRACE_CACHE or the default; None if that is ``off``."""
    named = os.environ.get("GPUTRACE_CACHE", "")
    if named.lower() in _OFF:
        return None
    return Path(named) if named else cache_folder() / "traces"


def key_of(traces: Sequence[Path], what: str) -> str | None:
    """Return the key of an entry about files and folders in their present state.

    None if one cannot be read, is not a file, or has a journal with unfinished writes.
    """
    try:
        files = [str(part) for trace in traces for part in _identity(trace)]
    except OSError:
        return None
    return f"{_hash(*files, _code())[:32]}-{_hash(what)[:16]}"


def is_known(key: str | None) -> bool:
    """Return True if there is any entry for the same unchanged files, which were then readable."""
    where = cache_root()
    if key is None or where is None:
        return False
    return next(where.glob(key.partition("-")[0] + "-*"), None) is not None


def _identity(path: Path, levels: int = _LEVELS) -> Iterator[object]:
    """Yield values that change whenever the file, or a file that readers use in a folder, does."""
    status = path.stat()
    if path.is_dir():
        inside = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        yield from (path.resolve(), status.st_mtime_ns)
        for entry in inside if levels else ():
            yield from _identity(entry, levels - 1)
        return
    journals = (path.with_name(path.name + suffix) for suffix in ("-wal", "-journal"))
    readable = path.is_file() and os.access(path, os.R_OK)
    if not readable or any(journal.exists() for journal in journals):
        raise FileNotFoundError(path)
    yield from (path.resolve(), status.st_size, status.st_mtime_ns, status.st_ino)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def load(key: str | None) -> Kept | None:
    """Load the entry of a key; None if it is missing or broken."""
    where = cache_root()
    if key is None or where is None:
        return None
    path = where / (key + _SUFFIX)
    try:
        if not path.exists() or path.lstat().st_uid != os.geteuid():
            return None
        entry = _read(path)
        os.utime(path)
    except Exception:
        # Remove a broken entry, whatever the problem: it can be computed again.
        with suppress(OSError):
            path.unlink()
        return None
    return entry


def store(key: str | None, entry: Kept) -> None:
    """Write an entry and evict old ones; do nothing if that fails."""
    where = cache_root()
    size = len(entry.text) + sum(column.nbytes for column in entry.columns)
    if key is None or where is None or size > _LARGEST:
        return
    path = where / (key + _SUFFIX)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(where, size)
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        _write(unfinished, entry)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()


def store_in_background(key: str | None, make: Callable[[], Kept]) -> None:
    """Compute and write an entry in a thread, which the interpreter joins at exit."""

    def work() -> None:
        # The cache is optional, so errors are ignored.
        with suppress(Exception):
            store(key, make())

    if key is not None and cache_root() is not None:
        Thread(target=work, name="cache").start()


def _make_room(where: Path, size: int) -> None:
    """Evict the least recently used entries, and remove abandoned temporary files."""
    entries = []
    for path in where.iterdir():
        if path.suffix == _SUFFIX:
            status = path.stat()
            entries.append((status.st_mtime_ns, status.st_size, path))
        elif path.name.startswith(".") and _SUFFIX in path.name:
            writer = path.suffix[1:]
            if not (writer.isdecimal() and Path("/proc", writer).exists()):
                path.unlink(missing_ok=True)
    total = sum(bytes_ for _, bytes_, _ in entries) + size
    for _, bytes_, path in sorted(entries):
        if total <= MOST_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= bytes_


def _write(path: Path, entry: Kept) -> None:
    import pyarrow as pa

    columns = [np.frombuffer(entry.text, np.uint8), *entry.columns]
    cells, fields = [], []
    for number, column in enumerate(columns):
        data = np.ascontiguousarray(column)
        offsets = np.array([0, data.nbytes], np.int64)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data.view(np.uint8))]
        cells.append(pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, buffers))
        fields.append(pa.field(str(number), pa.large_binary(), metadata={"type": data.dtype.str}))
    batch = pa.record_batch(cells, schema=pa.schema(fields))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _read(path: Path) -> Kept:
    import pyarrow as pa

    batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    batch.validate()
    columns = []
    for field, cell in zip(batch.schema, batch.columns, strict=True):
        type_ = np.dtype(field.metadata[b"type"].decode())
        if type_.kind not in "iufb":
            raise ValueError(f"a column of {type_}")
        _, offsets, data = cell.buffers()
        first, last = np.frombuffer(offsets, np.int64, 2).tolist()
        columns.append(np.frombuffer(data, np.uint8)[first:last].view(type_))
    return Kept(columns[0].tobytes(), columns[1:])


@cache
def _code() -> str:
    """Return an identifier of the code: the version, and the time of its newest module."""
    from gputrace.version import __version__

    package = Path(__file__).parents[1]
    newest = max((path.stat().st_mtime_ns for path in package.rglob("*.py")), default=0)
    return f"{__version__}:{newest}"
