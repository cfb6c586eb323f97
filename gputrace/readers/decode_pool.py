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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO, Any, Final

import msgspec
import numpy as np

from gputrace.errors import GputraceError, InputError, MissingError, UsageError
from gputrace.model.events import COLUMN_TYPES, Events
from gputrace.model.trace import Device, LeftOut, NoGpu, Process, Quality, Session, Trace
from gputrace.readers.gzip_io import GZIP
from gputrace.readers.in_memory import MemoryTrace
from gputrace.readers.kineto import LargeKineto
from gputrace.readers.registry import Candidate, open_trace, reader_of

# Ctrl-C reaches all processes of a terminal; the parent process ends the workers.
_PROGRAM: Final = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from gputrace.readers.decode_pool import serve; serve()"
)
_PACKED: Final = 15
"""Typical compression ratio of a trace."""
_WORTH: Final = 150 << 20
"""Bytes of text worth parallel decoding: one second of work; a process starts in a third."""
_MOST: Final = 8
"""Maximum number of processes, each of which needs about 100 MB."""
_PATIENCE_S: Final = 1.0
"""Seconds to wait for the exit of a process that closed its pipe."""

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
    count = min(len(decoded), workers or _workers(decoded))
    more = count - 1
    results = iter(_decode(decoded, keep_going, windows, more) if more > 0 else ())
    for file in files:
        in_pool = more > 0 and file in decoded
        opened = next(results) if in_pool else open_here(file, keep_going, windows)
        yield opened
        if not keep_going and not isinstance(opened, Trace):
            return


def open_here(file: Path, keep_going: bool, windows: bool = False) -> Opened:
    """Open one file in this process; return the error instead of raising it."""
    try:
        return open_trace(file, keep_going, windows)
    except GputraceError as error:
        return error


def _is_decoded(file: Path) -> bool:
    try:
        candidate = Candidate(file)
        try:
            reader = reader_of(candidate)
        finally:
            candidate.close()
    except InputError:
        return False
    return reader is not None and reader.decodes


def _workers(files: Sequence[Path]) -> int:
    if not sys.executable or text_size(files) < _WORTH:
        return 1
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(here or 1, _MOST)


def text_size(files: Iterable[Path]) -> int:
    """Estimate the uncompressed size of some files in bytes."""
    return sum(map(_text_size, files))


def _text_size(file: Path) -> int:
    with file.open("rb") as opened:
        packed = opened.read(2) == GZIP
    return file.stat().st_size * (_PACKED if packed else 1)


def _decode(files: Sequence[Path], keep_going: bool, windows: bool, more: int) -> list[Opened]:
    """Decode files in this process and ``more`` workers; return traces and errors in order.

    Stops at the first error unless ``keep_going``.
    """
    todo = deque(enumerate(files))
    results: dict[int, Opened] = {}

    def work(open_file: Callable[[Path, bool, bool], Opened]) -> None:
        while (task := _next(todo)) is not None:
            number, file = task
            results[number] = open_file(file, keep_going, windows)
            if not keep_going and not isinstance(results[number], Trace):
                todo.clear()

    others = [Worker() for _ in range(more)]
    with ThreadPoolExecutor(more) as pool:
        try:
            futures = [pool.submit(work, worker.open) for worker in others]
            work(open_here)
            for future in futures:
                future.result()
        finally:
            todo.clear()
            for worker in others:
                worker.kill()
    return [results[number] for number in sorted(results)]


def _next(todo: deque[tuple[int, Path]]) -> tuple[int, Path] | None:
    try:
        return todo.popleft()
    except IndexError:
        return None


class Worker:
    """Worker process that opens one file at a time; started on first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._lock = Lock()

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the process, starting it if there is none; raise RuntimeError after `kill`."""
        with self._lock:
            if self._ended:
                raise RuntimeError("a worker that was ended is asked to read")
            if self._process is None:
                command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            return self._process

    def open(self, file: Path, keep_going: bool, windows: bool = False) -> Opened:
        """Call `open_here` in the worker; return and raise like it."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None

        try:
            ask(file, keep_going, windows, process.stdin)
            opened = unpack(receive(process.stdout))
        except (OSError, EOFError, ValueError):
            return InputError(file, self._why_dead(process))
        return open_here(file, keep_going, windows) if opened is None else opened

    def _why_dead(self, process: subprocess.Popen[bytes]) -> str:
        try:
            code = process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self._close(process)
        self._process = None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"the process that read it died ({how}); there may be too little memory"

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        with self._lock:
            self._ended, process = True, self._process
        if process is not None:
            process.kill()
            process.wait()
            self._close(process)

    @staticmethod
    def _close(process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # Unsent data to a dead process.
                    pipe.close()


_ERRORS: dict[str, type[GputraceError]] = {
    kind.__name__: kind for kind in (GputraceError, UsageError, MissingError)
}
_LENGTH = 8
"""Bytes of the length prefix of a message."""


class Order(msgspec.Struct, frozen=True):
    """Request to open a file."""

    path: bytes
    keep_going: bool
    windows: bool


class Large(msgspec.Struct, frozen=True):
    """State of `LargeKineto` beyond its columns."""

    allowed: bool
    first: int


class Parcel(msgspec.Struct, frozen=True):
    """An in-memory trace."""

    path: bytes
    source: str
    origin: int
    parts: list[dict[str, bytes]]
    names: list[str]
    processes: list[Process]
    devices: list[Device]
    session: Session
    no_gpu: NoGpu | None
    warnings: list[str]
    notes: list[str]
    left_out: list[LeftOut]
    dropped: list[tuple[str, str, int]]
    large: Large | None = None


class Answer(msgspec.Struct, frozen=True):
    """Reply with a trace or an error; with neither if the trace cannot be serialized."""

    parcel: Parcel | None = None
    kind: str = ""
    path: bytes = b""
    problem: str = ""
    bug: str = ""
    """Traceback of an unexpected exception, which is a bug."""


def ask(file: Path, keep_going: bool, windows: bool, pipe: IO[bytes]) -> None:
    """Send a request to open a file."""
    send(msgspec.msgpack.encode(Order(os.fsencode(file), keep_going, windows)), pipe)


def pack(opened: Trace | GputraceError) -> bytes:
    """Encode a trace or an error."""
    try:
        return msgspec.msgpack.encode(_answer(opened))
    except (TypeError, UnicodeEncodeError, OverflowError):
        return msgspec.msgpack.encode(Answer())


def unpack(raw: bytes) -> Trace | GputraceError | None:
    """Decode the result of `pack`; None if the file must be read in this process.

    Raises ValueError for malformed data.
    """
    answer = msgspec.msgpack.decode(raw, type=Answer)
    if answer.bug:
        raise RuntimeError(f"in the process that read it:\n{answer.bug}")
    if answer.kind == InputError.__name__:
        return InputError(Path(os.fsdecode(answer.path)), answer.problem)
    if answer.kind:
        return _ERRORS.get(answer.kind, GputraceError)(answer.problem)
    return None if answer.parcel is None else _trace(answer.parcel)


def _answer(opened: Trace | GputraceError) -> Answer:
    if isinstance(opened, InputError):
        return Answer(kind="InputError", path=os.fsencode(opened.path), problem=opened.problem)
    if isinstance(opened, GputraceError):
        return Answer(kind=type(opened).__name__, problem=str(opened))
    if isinstance(opened, LargeKineto):
        parcel = _parcel(opened.look, opened.quality)
        large = Large(opened.allowed, opened.first)
        return Answer(msgspec.structs.replace(parcel, large=large, no_gpu=opened.no_gpu))
    return Answer(_parcel(opened, opened.quality) if isinstance(opened, MemoryTrace) else None)


def _parcel(trace: MemoryTrace, quality: Quality) -> Parcel:
    held = trace.held_columns()
    return Parcel(
        path=os.fsencode(trace.path),
        source=trace.source,
        origin=trace.origin,
        parts=[_columns(part) for part in held.parts],
        names=list(held.names),
        processes=trace.processes,
        devices=list(held.devices),
        session=trace.session,
        no_gpu=trace.no_gpu,
        warnings=quality.warnings,
        notes=quality.notes,
        left_out=quality.left_out,
        dropped=[(reason, where, rows) for (reason, where), rows in quality.places.items()],
    )


def _columns(part: Events) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(getattr(part, name)).tobytes() for name in part.columns}


def _events(columns: dict[str, bytes]) -> Events:
    return Events(
        {name: np.frombuffer(raw, COLUMN_TYPES[name]).copy() for name, raw in columns.items()}
    )


def _trace(parcel: Parcel) -> Trace:
    trace = MemoryTrace(
        Path(os.fsdecode(parcel.path)),
        parcel.source,
        [_events(columns) for columns in parcel.parts],
        parcel.names,
        parcel.processes,
        parcel.devices,
        parcel.session,
        parcel.no_gpu or NoGpu("", ""),
    )
    trace.origin, trace.no_gpu = parcel.origin, parcel.no_gpu
    trace.quality = _quality(parcel)
    if parcel.large is None:
        return trace
    return LargeKineto.of(trace, parcel.large.allowed, parcel.large.first)


def _quality(parcel: Parcel) -> Quality:
    quality = Quality(parcel.warnings, parcel.notes, parcel.left_out)
    for reason, where, rows in parcel.dropped:
        quality.drop(reason, rows, where)
    return quality


def send(message: bytes, pipe: IO[bytes]) -> None:
    """Write a length-prefixed message."""
    pipe.write(len(message).to_bytes(_LENGTH, "little"))
    pipe.write(message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """Read the next message; raise EOFError at the end or for an incomplete message."""
    return _exactly(pipe, int.from_bytes(_exactly(pipe, _LENGTH), "little"))


def _exactly(pipe: IO[Any], length: int) -> bytes:
    read: bytes = pipe.read(length)
    if len(read) < length:
        raise EOFError
    return read


def serve() -> None:
    """Answer requests from stdin on stdout until end of file."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    while True:
        try:
            request = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            send(_carry_out(request), replies)
        except BrokenPipeError:
            os._exit(1)  # The parent is gone.


def _carry_out(raw: bytes) -> bytes:
    """Open the requested file and return the encoded reply."""
    import msgspec

    request = msgspec.msgpack.decode(raw, type=Order)
    try:
        path = Path(os.fsdecode(request.path))
        return pack(open_here(path, request.keep_going, request.windows))
    except Exception:
        return msgspec.msgpack.encode(Answer(bug=traceback.format_exc()))
