"""Files that must be decoded whole, read in several processes at once.

The processes are started afresh: a fork of a program that has threads may hang, and Python's own
ways to start one run the caller's script again.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from gputrace.errors import GputraceError, InputError
from gputrace.traces.packed import GZIP
from gputrace.traces.readers import Candidate, open_trace, reader_of
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

Opened = Trace | GputraceError


def open_each(
    files: Sequence[Path], keep_going: bool = False, workers: int | None = None
) -> Iterator[Opened]:
    """Each file's trace, or why it cannot be read, in order.

    ``workers`` says how many processes decode; 1 is this one. The results do not depend on it.
    """
    decoded = [file for file in files if _is_decoded(file)] if len(files) > 1 else []
    count = min(len(decoded), workers or _workers(decoded))
    if count <= 1:
        yield from (open_here(file, keep_going) for file in files)
        return
    with _Team(count) as team:
        found = team.open_each(decoded, keep_going)
        for file in files:
            yield next(found) if file in set(decoded) else open_here(file, keep_going)


def open_here(file: Path, keep_going: bool) -> Opened:
    """The trace of one file, or why it cannot be read; knows nothing but the file."""
    try:
        return open_trace(file, keep_going)
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
    if not sys.executable or sum(map(_text_size, files)) < _WORTH:
        return 1
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(here or 1, _MOST)


def _text_size(file: Path) -> int:
    with file.open("rb") as opened:
        packed = opened.read(2) == GZIP
    return file.stat().st_size * (_PACKED if packed else 1)


class _Team:
    """Worker processes, and a thread for each that talks to it; ends them when it is left."""

    def __init__(self, count: int) -> None:
        self._workers = [_Worker() for _ in range(count)]
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> _Team:
        for worker in self._workers:
            worker.start()
            self._free.put(worker)
        return self

    def open_each(self, files: Sequence[Path], keep_going: bool) -> Iterator[Opened]:
        return self._pool.map(lambda file: self._open(file, keep_going), files)

    def _open(self, file: Path, keep_going: bool) -> Opened:
        worker = self._free.get()
        try:
            return worker.open(file, keep_going)
        finally:
            self._free.put(worker)

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._pool.shutdown()


class _Worker:
    """A process that opens one file after another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def start(self) -> subprocess.Popen[bytes]:
        """The process, which is started where there is none."""
        if self._process is None:
            command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    def open(self, file: Path, keep_going: bool) -> Opened:
        """What `open_here` gives in that process; raises what it raises."""
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((file, keep_going), process.stdin)
            process.stdin.flush()
            found = pickle.load(process.stdout)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            return InputError(file, self._why_dead(process))
        if isinstance(found, Trace | GputraceError):
            return found
        raise found

    def _why_dead(self, process: subprocess.Popen[bytes]) -> str:
        process.kill()
        code = process.wait()
        self._close(process)
        self._process = None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"the process that read it died ({how}); there may be too little memory"

    def kill(self) -> None:
        if (process := self._process) is not None:
            process.kill()
            process.wait()
            self._close(process)

    @staticmethod
    def _close(process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # What was not sent to a dead process.
                    pipe.close()
