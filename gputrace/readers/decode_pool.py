"""Parallel decoding, in worker processes, of files that must be read completely.

Workers are started as new interpreters: a fork of a program with threads may hang, and the start
methods of multiprocessing run the caller's script again.

Messages are MessagePack, which cannot carry code. A worker reads untrusted files; should one ever
compromise it, its replies can still only contain columns and texts of known types.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import Lock
from typing import Any, Final

import msgspec
import numpy as np

from gputrace.errors import ErrorPolicy, GputraceError, InputError, MissingError, UsageError
from gputrace.model.events import COLUMN_TYPES, Events
from gputrace.model.trace import Device, NoGpu, Process, Quality, Session, Trace
from gputrace.readers.gzip_io import text_size
from gputrace.readers.in_memory import MemoryTrace
from gputrace.readers.kineto import LargeKineto
from gputrace.readers.registry import Candidate, reader_of, try_open

_PROGRAM: Final = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from gputrace.readers.decode_pool import serve; serve()"
)
"""Ctrl-C reaches all processes of a terminal; the parent process ends the workers."""
_WORTH: Final = 150 << 20
"""Bytes of text worth parallel decoding: one second of work; a process starts in a third."""
_MOST: Final = 8
"""Maximum number of processes, each of which needs about 100 MB."""

Opened = Trace | GputraceError


def open_each(
    files: Sequence[Path],
    keep_going: bool = False,
    workers: int | None = None,
    windows: bool = False,
) -> Iterator[Opened]:
    """Yield the trace of each file, or the error, in order; stop at an error unless ``keep_going``.

    ``workers`` is the number of decoding processes, including this one; by default it depends on
    the file sizes. The results do not depend on it.
    """
    decoded = [file for file in files if _is_decoded(file)] if len(files) > 1 else []
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        many = sys.executable and text_size(decoded) >= _WORTH
        workers = min(cores or 1, _MOST) if many else 1
    more = min(len(decoded), workers) - 1
    results = iter(_decode(decoded, keep_going, windows, more) if more > 0 else ())
    for file in files:
        in_pool = more > 0 and file in decoded
        opened = next(results) if in_pool else try_open(file, keep_going, windows)
        yield opened
        if not keep_going and not isinstance(opened, Trace):
            return


def _is_decoded(file: Path) -> bool:
    try:
        with closing(Candidate(file)) as candidate:
            reader = reader_of(candidate)
    except InputError:
        return False
    return reader is not None and reader.decodes


def _decode(files: Sequence[Path], keep_going: bool, windows: bool, more: int) -> list[Opened]:
    """Do the work of `open_each` in this process and ``more`` workers."""
    tasks = iter(list(enumerate(files)))  # Threads may share the iterator of a list.
    results: dict[int, Opened] = {}

    def work(open_file: Callable[[Path, bool, bool], Opened]) -> None:
        for number, file in tasks:
            results[number] = open_file(file, keep_going, windows)
            if not keep_going and not isinstance(results[number], Trace):
                list(tasks)

    workers = [Worker() for _ in range(more)]
    with ThreadPoolExecutor(more) as pool:
        try:
            futures = [pool.submit(work, worker.open) for worker in workers]
            work(try_open)
            for future in futures:
                future.result()
        finally:
            list(tasks)
            for worker in workers:
                worker.kill()
    return [results[number] for number in sorted(results)]


class Worker:
    """Worker process that opens one file at a time; started on first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._lock = Lock()

    def open(self, file: Path, keep_going: bool, windows: bool = False) -> Opened:
        """Call `try_open` in the worker; return and raise like it."""
        with self._lock:
            if self._ended:
                raise RuntimeError("a worker that was ended is asked to read")
            if self._process is None:
                self._pipe, theirs = Pipe()
                end = theirs.fileno()
                command = [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path), str(end)]
                # What a reader may print is not part of this process's output.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[end]
                )
                theirs.close()
            process = self._process
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode((os.fsencode(file), keep_going, windows)))
            opened = unpack(self._pipe.recv_bytes())
        except (OSError, EOFError, ValueError):
            return InputError(file, self._why_dead(process))
        return try_open(file, keep_going, windows) if opened is None else opened

    def _why_dead(self, process: subprocess.Popen[bytes]) -> str:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.kill()
        self._process, code = None, process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"the process that read it died ({how}); there may be too little memory"

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        with self._lock:
            self._ended, process = True, self._process
        if process is not None:
            process.kill()
            process.wait()


_ERRORS: Final = {kind.__name__: kind for kind in (GputraceError, UsageError, MissingError)}


class Parcel(msgspec.Struct, frozen=True):
    """An in-memory trace."""

    path: Path
    source: str
    origin: int
    parts: list[Events]
    names: list[str]
    processes: list[Process]
    devices: list[Device]
    session: Session
    no_gpu: NoGpu | None
    quality: Quality
    dropped: list[tuple[str, str, int]]
    large: tuple[bool, int] | None
    """State of `LargeKineto` beyond its columns: ``allowed`` and ``first``."""


class Answer(msgspec.Struct, frozen=True):
    """Reply with a trace or an error; with neither if the trace cannot be serialized."""

    parcel: Parcel | None = None
    kind: str = ""
    """Class of an error; ``bug`` for the traceback of an unexpected exception."""
    path: Path = Path()
    problem: str = ""


def _to_plain(value: Any) -> Any:
    if isinstance(value, Events):
        return {name: getattr(value, name).tobytes() for name in value.columns}
    if isinstance(value, Path):
        return os.fsencode(value)
    raise TypeError(value)


def _from_plain(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(os.fsdecode(value))
    return Events(
        {name: np.frombuffer(raw, COLUMN_TYPES[name]).copy() for name, raw in value.items()}
    )


def pack(opened: Opened) -> bytes:
    """Encode a trace or an error."""
    answer = Answer()
    if isinstance(opened, InputError):
        answer = Answer(kind="InputError", path=Path(opened.path), problem=opened.problem)
    elif isinstance(opened, GputraceError):
        answer = Answer(kind=type(opened).__name__, problem=str(opened))
    elif isinstance(opened, MemoryTrace | LargeKineto):
        large = (opened.allowed, opened.first) if isinstance(opened, LargeKineto) else None
        held = opened.look if isinstance(opened, LargeKineto) else opened
        parts, names, devices = held.held_columns()
        about = opened.processes, list(devices), opened.session, opened.no_gpu, opened.quality
        dropped = [(*where, rows) for where, rows in opened.quality.places.items()]
        trace = opened.path, opened.source, opened.origin, list(parts), list(names)
        answer = Answer(Parcel(*trace, *about, dropped, large))
    try:
        return msgspec.msgpack.encode(answer, enc_hook=_to_plain)
    except (TypeError, UnicodeEncodeError, OverflowError):
        return msgspec.msgpack.encode(Answer(), enc_hook=_to_plain)


def unpack(raw: bytes) -> Opened | None:
    """Decode a result of `pack`, or raise ValueError; None if it must be read in this process."""
    answer = msgspec.msgpack.decode(raw, type=Answer, dec_hook=_from_plain)
    if answer.kind == "bug":
        raise RuntimeError(f"in the process that read it:\n{answer.problem}")
    if answer.kind == InputError.__name__:
        return InputError(answer.path, answer.problem)
    if answer.kind:
        return _ERRORS.get(answer.kind, GputraceError)(answer.problem)
    if (parcel := answer.parcel) is None:
        return None
    about = parcel.names, parcel.processes, parcel.devices, parcel.session
    no_gpu = parcel.no_gpu or NoGpu("", "")
    trace = MemoryTrace(parcel.path, parcel.source, parcel.parts, *about, no_gpu)
    trace.origin, trace.no_gpu, trace.quality = parcel.origin, parcel.no_gpu, parcel.quality
    for reason, where, rows in parcel.dropped:
        trace.quality.drop(reason, rows, where)
    if parcel.large is None:
        return trace
    allowed, first = parcel.large
    return LargeKineto(parcel.path, ErrorPolicy(allowed), trace, first)


def serve() -> None:
    """Answer requests from the pipe until its other end is closed."""
    pipe: Connection[bytes, bytes] = Connection(int(sys.argv[2]))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        try:
            path, *how = msgspec.msgpack.decode(request, type=tuple[bytes, bool, bool])
            answer = pack(try_open(Path(os.fsdecode(path)), *how))
        except Exception:
            bug = Answer(kind="bug", problem=traceback.format_exc())
            answer = msgspec.msgpack.encode(bug, enc_hook=_to_plain)
        try:
            pipe.send_bytes(answer)
        except BrokenPipeError:
            os._exit(1)  # The parent is gone.
