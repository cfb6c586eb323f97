"""What was made of a trace, kept for the next time: Arrow IPC files in the user's cache folder.

An entry is some text and some columns. It is found by the path, size and time of change of each of
a run's files, and by the version of gputrace and its code, so it is never that of other files. One
with which anything is wrong counts as not there. Columns are mapped, not read: opening takes
milliseconds.
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

from gputrace.traces.nsys.report import cache_folder

MOST_BYTES: Final = 4 << 30
"""Of all entries together; the ones not used for longest go first."""
_LARGEST: Final = MOST_BYTES // 2
"""A larger entry is not kept."""
_SUFFIX: Final = ".arrow"
_LEVELS: Final = 2
"""A folder has traces in it, of which some are folders of tables; below them, nothing is read."""
_OFF: Final = ("off", "0")


class Kept(NamedTuple):
    """An entry."""

    text: bytes
    columns: Sequence[NDArray[Any]]
    """Of any lengths; those of an entry that was loaded cannot be written to."""


def folder() -> Path | None:
    """Where entries are: GPUTRACE_CACHE, else in the cache folder; None if that says ``off``."""
    named = os.environ.get("GPUTRACE_CACHE", "")
    if named.lower() in _OFF:
        return None
    return Path(named) if named else cache_folder() / "traces"


def key_of(traces: Sequence[Path], what: str) -> str | None:
    """The name of an entry about files and folders as they are at this moment.

    None where one cannot be read, is no file, or has unfinished writes beside it.
    """
    try:
        files = [str(part) for trace in traces for part in _identity(trace)]
    except OSError:
        return None
    return f"{_hash(*files, _code())[:32]}-{_hash(what)[:16]}"


def is_known(key: str | None) -> bool:
    """Whether anything is kept of the same files: so they could be opened, as they are."""
    where = folder()
    if key is None or where is None:
        return False
    return next(where.glob(key.partition("-")[0] + "-*"), None) is not None


def _identity(path: Path, levels: int = _LEVELS) -> Iterator[object]:
    """What a file cannot change without; of a folder, that of what readers look at in it."""
    status = path.stat()
    if path.is_dir():
        inside = sorted(one for one in path.iterdir() if not one.name.startswith("."))
        yield from (path.resolve(), status.st_mtime_ns)
        for one in inside if levels else ():
            yield from _identity(one, levels - 1)
        return
    journals = (path.with_name(path.name + suffix) for suffix in ("-wal", "-journal"))
    if not (path.is_file() and os.access(path, os.R_OK)) or any(one.exists() for one in journals):
        raise FileNotFoundError(path)
    yield from (path.resolve(), status.st_size, status.st_mtime_ns, status.st_ino)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def load(key: str | None) -> Kept | None:
    """The entry of that name; None where there is none, or it is broken."""
    where = folder()
    if key is None or where is None:
        return None
    path = where / (key + _SUFFIX)
    try:
        if not path.exists() or path.lstat().st_uid != os.geteuid():
            return None
        kept = _read(path)
        os.utime(path)
    except Exception:
        # Whatever is wrong with it: it can be made again.
        with suppress(OSError):
            path.unlink()
        return None
    return kept


def keep(key: str | None, entry: Kept) -> None:
    """Writes an entry, and removes old ones; does nothing where that does not work."""
    where = folder()
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


def keep_beside(key: str | None, make: Callable[[], Kept]) -> None:
    """Makes an entry and writes it in a thread, for which the interpreter waits at its end."""

    def work() -> None:
        # Whatever goes wrong: it can be made again.
        with suppress(Exception):
            keep(key, make())

    if key is not None and folder() is not None:
        Thread(target=work, name="cache").start()


def _make_room(where: Path, size: int) -> None:
    """Removes the entries that were not used for longest, and what was left unfinished."""
    entries = []
    for path in where.iterdir():
        if path.suffix == _SUFFIX:
            status = path.stat()
            entries.append((status.st_mtime_ns, status.st_size, path))
        elif path.name.startswith(".") and _SUFFIX in path.name and _is_left(path):
            path.unlink(missing_ok=True)
    total = sum(bytes_ for _, bytes_, _ in entries) + size
    for _, bytes_, path in sorted(entries):
        if total <= MOST_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= bytes_


def _is_left(unfinished: Path) -> bool:
    """Whether who was writing it is gone."""
    writer = unfinished.suffix[1:]
    return not (writer.isdecimal() and Path("/proc", writer).exists())


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
    """Changes with gputrace: its version, and when its newest module was written."""
    from gputrace import __version__

    package = Path(__file__).parents[1]
    newest = max((path.stat().st_mtime_ns for path in package.rglob("*.py")), default=0)
    return f"{__version__}:{newest}"
