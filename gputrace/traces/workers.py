"""Files that must be decoded whole, read in several processes at once.

The processes are started afresh: a fork of a program that has threads may hang, and Python's own
ways to start one run the caller's script again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

from gputrace.errors import GputraceError, InputError
from gputrace.traces.candidate import Candidate
from gputrace.traces.packed import GZIP
from gputrace.traces.readers import open_trace, reader_of
from gputrace.traces.trace import Trace

_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gputrace.traces.worker import serve; serve()"
)
_PACKED: Final = 15
"""How many times as long as packed a trace is, about."""
_WORTH: Final = 150 << 20
"""Bytes of text that take a second to decode; to start a process takes a third of that."""
_MOST: Final = 8
"""Processes, each of which needs about 100 MB."""
_PATIENCE_S: Final = 1.0
"""For a process that says no more to end."""

Opened = Trace | GputraceError


def open_each(
    files: Sequence[Path],
    keep_going: bool = False,
    workers: int | None = None,
    windows: bool = False,
) -> Iterator[Opened]:
    """Each file's trace, or why it cannot be read, in order; ends at an error, or keeps going.

    ``workers`` says how many processes decode, this one among them; chosen by the files' sizes if
    not given. The results do not depend on it.
    """
    decoded = [file for file in files if _is_decoded(file)] if len(files) > 1 else []
    count = min(len(decoded), workers or _workers(decoded))
    more = count - 1
    found = iter(_decode(decoded, keep_going, windows, more) if more > 0 else ())
    for file in files:
        own = next(found) if more > 0 and file in decoded else open_here(file, keep_going, windows)
        yield own
        if not keep_going and not isinstance(own, Trace):
            return


def open_here(file: Path, keep_going: bool, windows: bool = False) -> Opened:
    """The trace of one file, or why it cannot be read; knows nothing but the file."""
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
    """Bytes of text in some files, about, where they are packed."""
    return sum(map(_text_size, files))


def _text_size(file: Path) -> int:
    with file.open("rb") as opened:
        packed = opened.read(2) == GZIP
    return file.stat().st_size * (_PACKED if packed else 1)


def _decode(files: Sequence[Path], keep_going: bool, windows: bool, more: int) -> list[Opened]:
    """What is found of each file, up to the first error that one does not go on from.

    This process decodes, and so many more do.
    """
    todo = deque(enumerate(files))
    found: dict[int, Opened] = {}

    def take(open_one: Callable[[Path, bool, bool], Opened]) -> None:
        while (own := _next(todo)) is not None:
            number, file = own
            found[number] = open_one(file, keep_going, windows)
            if not keep_going and not isinstance(found[number], Trace):
                todo.clear()

    others = [Worker() for _ in range(more)]
    with ThreadPoolExecutor(more) as pool:
        try:
            taken = [pool.submit(take, worker.open) for worker in others]
            take(open_here)
            for one in taken:
                one.result()
        finally:
            todo.clear()
            for worker in others:
                worker.kill()
    return [found[number] for number in sorted(found)]


def _next(todo: deque[tuple[int, Path]]) -> tuple[int, Path] | None:
    try:
        return todo.popleft()
    except IndexError:
        return None


class Worker:
    """A process that opens one file after another; started when it is first asked to."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._lock = Lock()

    def _started(self) -> subprocess.Popen[bytes]:
        """The process, which is started where there is none; not after the end."""
        with self._lock:
            if self._ended:
                raise RuntimeError("a worker that was ended is asked to read")
            if self._process is None:
                command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            return self._process

    def open(self, file: Path, keep_going: bool, windows: bool = False) -> Opened:
        """What `open_here` gives in that process; raises what it raises."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        from gputrace.traces import parcels

        try:
            parcels.ask(file, keep_going, windows, process.stdin)
            found = parcels.unpack(parcels.receive(process.stdout))
        except (OSError, EOFError, ValueError):
            return InputError(file, self._why_dead(process))
        return open_here(file, keep_going, windows) if found is None else found

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
        """Ends it, whatever it is doing."""
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
                with suppress(OSError):  # What was not sent to a dead process.
                    pipe.close()
