"""Cache in the user's folder: of results computed from unchanged traces, and of files that these
were converted or unpacked to.

Results are a value in MessagePack and the columns in it. Their key covers the path, size and
modification time of each file of a run, and the version of gputrace and its code, so that it never
matches other files. A broken entry counts as missing. Columns are memory-mapped, not read: opening
takes milliseconds, and one without columns does not import numpy.

A file has the length of its head (8 bytes, little-endian); the head, in MessagePack: the value, and
type, offset and bytes of each column; and the columns, at multiples of 64 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from gputrace.errors import MissingError
from gputrace.plugins import plugins

try:
    from _blake2 import blake2b  # hashlib imports OpenSSL, which takes 0.003 s.
except ImportError:
    from hashlib import blake2b

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_BYTES: Final = 4 << 30
"""Maximum total size of the entries; the least recently used are removed first."""
_LARGEST: Final = MOST_BYTES // 2
"""Maximum bytes of an entry; larger ones are not cached."""
_SUFFIX: Final = ".entry"
_LENGTH: Final = 8
"""Bytes of the length of a file's head."""
_ALIGNED: Final = 64
"""Bytes to a multiple of which columns begin."""
_LEVELS: Final = 2
"""Folder levels to inspect: a folder of traces, some of which are folders of tables."""

_WRITING: Final[list[Thread]] = []
"""Threads that write entries, and those that have."""
_DECODES: Final = Lock()
"""Held while an entry is decoded: msgspec 0.22 crashes where two threads are the first to decode a
type."""

_Value = TypeVar("_Value")


def cache_folder() -> Path:
    """Return gputrace's folder in the user's cache, for files that can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gputrace"


def cached_file(folder: str, identity: str, make: Callable[[Path], None]) -> Path:
    """Return the SQLite file made of an input, from a folder of the cache, making it if need be.

    Args:
        folder: name in the cache.
        identity: text that changes with the input.
        make: writes the file; what it raises is passed on.

    Raises MissingError if the folder cannot be created.
    """
    import hashlib

    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    target = cache_folder() / folder / f"{key}.sqlite"
    if target.exists():
        return target
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.parent.chmod(0o700)
    except OSError as error:
        raise MissingError(
            f"{target.parent}: cannot be created ({error.strerror}), but converted and unpacked "
            "files are kept there; set XDG_CACHE_HOME to a writable folder"
        ) from error
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        make(unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


class ResultCache:
    """Cached results of files and folders, in their state when this is created.

    Disabled where plugins add readers, analyzers or causes, whose code may change unnoticed.
    """

    def __init__(self, paths: Sequence[Path | str], windows: bool = False) -> None:
        self._paths = [Path(path) for path in paths]
        # Results show the names as given, and windows alone may be read in another way.
        self._given = f"{[str(path) for path in paths]} {windows}"
        plugged = any(map(plugins, ("readers", "analyzers", "causes")))
        off = plugged or cache_root() is None
        self._files = None if off else key_of(self._paths, "")

    @property
    def any(self) -> bool:
        """True if anything is cached for these files, which could then be opened.

        What this process is still writing is waited for: to compute it again would take longer.
        """
        while _WRITING:
            _WRITING.pop().join()
        where = cache_root()
        if self._files is None or where is None:
            return False
        return next(where.glob(self._files.partition("-")[0] + "-*"), None) is not None

    def find(self, kind: type[_Value], options: object) -> _Value | None:
        """Return the cached result of a type for the same options; None if there is none."""
        entry = load(self._key(kind, options)) if self.any else None
        return load_columns(entry, kind) if entry is not None else None

    def keep(self, answer: object, options: object) -> None:
        """Cache a result, unless its files have changed.

        It is written by a thread, which the interpreter joins at exit.
        """
        if self._files is None or key_of(self._paths, "") != self._files or cache_root() is None:
            return
        key = self._key(type(answer), options)

        def work() -> None:
            # The cache is optional, so errors are ignored.
            with suppress(Exception):
                store(key, dump_columns(answer))

        writer = Thread(target=work, name="cache")
        writer.start()
        _WRITING.append(writer)

    def _key(self, kind: type, options: object) -> str | None:
        return key_of(self._paths, f"{kind.__name__} {options} {self._given}")


class Kept(NamedTuple):
    """A cache entry."""

    text: bytes
    columns: Sequence[NDArray[Any]]
    """Columns of any lengths; read-only in a loaded entry."""


def cache_root() -> Path | None:
    """Return the folder of entries: GPUTRACE_CACHE or the default; None if that is ``off``."""
    named = os.environ.get("GPUTRACE_CACHE", "")
    if named.lower() in ("off", "0"):
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
    state = "\0".join([*files, _code()])
    return f"{_hash(state)[:32]}-{_hash(what)[:16]}"


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


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=32).hexdigest()


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
    import msgspec
    import numpy as np

    columns = [np.ascontiguousarray(column) for column in entry.columns]
    table, end = [], 0
    for column in columns:
        table.append((column.dtype.str, end, column.nbytes))
        end += _padded(column.nbytes)
    head = msgspec.msgpack.encode((entry.text, table))
    with path.open("wb") as file:
        file.write(len(head).to_bytes(_LENGTH, "little") + head)
        for column, (_, begin, _) in zip(columns, table, strict=True):
            file.seek(_padded(_LENGTH + len(head)) + begin)
            file.write(column.data)


def _read(path: Path) -> Kept:
    import msgspec

    # Opened once: another process may replace it meanwhile.
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        size = os.fstat(file.fileno()).st_size
        head = file.read(length) if length <= size else b""
        kind = tuple[bytes, list[tuple[str, int, int]]]
        text, table = msgspec.msgpack.decode(head, type=kind)
        if not table:
            return Kept(text, ())
        import numpy as np

        mapped = np.asarray(np.memmap(file, np.uint8, "r", _padded(_LENGTH + length)))
    columns = []
    for type_, begin, size in table:
        if type_[1:2] not in {*"iufb"} or not 0 <= begin <= begin + size <= len(mapped):
            raise ValueError(f"a column of {type_} at {begin}")
        columns.append(mapped[begin : begin + size].view(type_))
    return Kept(text, columns)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def dump_columns(value: object) -> Kept:
    """Encode a result; equal columns that are one object are kept once."""
    import msgspec
    import numpy as np

    from gputrace.model.events import Events

    columns: list[NDArray[Any]] = []
    positions: dict[int, int] = {}

    def encode(part: Any) -> Any:
        if isinstance(part, Events):
            return {name: getattr(part, name) for name in part.columns}
        if not isinstance(part, np.ndarray):
            return part.item()
        if id(part) not in positions:
            positions[id(part)] = len(columns)
            columns.append(part)
        return positions[id(part)]

    return Kept(msgspec.msgpack.encode(value, enc_hook=encode), columns)


def load_columns(entry: Kept, kind: type[_Value]) -> _Value | None:
    """Decode a result of a type; None if the entry is broken or of another type."""
    import msgspec

    def decode(type_: Any, part: Any) -> Any:
        from gputrace.model.events import Events

        if type_ is Events:
            return Events({name: entry.columns[position] for name, position in part.items()})
        return entry.columns[part]

    try:
        with _DECODES:
            return msgspec.msgpack.decode(entry.text, type=kind, dec_hook=decode)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


@cache
def _code() -> str:
    """Return an identifier of the code: the version, and the time of its newest module."""
    from gputrace.version import __version__

    return f"{__version__}:{_newest(os.fspath(Path(__file__).parents[1]))}"


def _newest(folder: str) -> int:
    """Return the time of the newest module in a folder; `Path.rglob` takes five times as long."""
    newest = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                newest = max(newest, entry.stat().st_mtime_ns)
            elif entry.name != "__pycache__" and entry.is_dir():
                newest = max(newest, _newest(entry.path))
    return newest
