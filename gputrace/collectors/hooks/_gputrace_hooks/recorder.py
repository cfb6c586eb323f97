"""Events of this process: kept in a list, written to GPUTRACE_DIR/HOST.PID.host.

The file is a header of 32 bytes (magic, version, pid, CLOCK_REALTIME, CLOCK_MONOTONIC, both of when
the process began or was forked), then chunks as in spool files: a tag of four letters, the length
of what follows in bytes, and that; all of it little-endian, times in nanoseconds of CLOCK_REALTIME.

FULL  u64 time, u64 events, u32 errno, u32 0: the first chunk, zeros until writing has failed
EVNT  records of 32 bytes: u64 start, u64 end, u32 thread, u32 name, u16 kind, u16 rank, u32 number
      (of a sample, the name is the user's line, the number that of the innermost line's name)
NAME  u32 id, text          INFO  "key=value"          CLOK  u64 realtime, monotonic, monotonic_raw

gputrace/collectors/host_events.py reads it; keep the two alike.

No thread of ours writes: a second thread would make ``os.fork`` warn. An event is written at once
while there are fewer than four a second; of more, all that came in a quarter of one go together.
"""

import _thread
import atexit
import os
import sys
import time
from array import array
from struct import pack

from . import BEGAN, FOLDER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAGIC = b"GPUTRHST"
VERSION = 1
DATA_WAIT, STEP, ANNOTATION, NOTE, SAMPLE = 1, 2, 3, 4, 5

_SECOND = 1000000000
_BETWEEN_WRITES = _SECOND // 4
_SAVED_UP = 8 * _BETWEEN_WRITES
_MOST_NAMES = 10000
_PLACE = 40
_FOLDER = os.path.dirname(__file__) + os.sep
_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE "
    "OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK PMI_SIZE SLURM_PROCID SLURM_NTASKS SLURM_LOCALID "
    "HOROVOD_RANK HOROVOD_SIZE CUDA_VISIBLE_DEVICES"
)

on_write: "list[Callable[[], None]]" = []
"""Called after events were written, four times a second in the long run."""
on_fork: "list[Callable[[], None]]" = []
"""Called in a forked child."""
on_worker: "list[Callable[[], None]]" = []
"""Called in a process that multiprocessing has forked, before it works."""

if sys.version_info >= (3, 7):
    time_ns = time.time_ns
else:

    def time_ns() -> int:
        """Nanoseconds of CLOCK_REALTIME."""
        return int(time.time() * 1e9)


def _both_clocks() -> "tuple[int, int]":
    return time_ns(), int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e9)


class _State:
    """What this process has open; a forked child starts with a fresh one."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        # Forked since: the fork is what begins it.
        self.began = BEGAN[1:] if BEGAN[0] == self.pid else _both_clocks()
        self.lock = _thread.allocate_lock()
        self.path = ""
        self.file = -1
        self.identity = (0, 0)
        self.names_written = 0
        self.clock_told = 0
        self.failed = False
        self.stopped = self.lost = self.errno = 0


# Four numbers an event. Threads extend it at its end and the one that writes cuts it at its front,
# each in one operation, so that recording takes no lock.
_events: "list[int]" = []
_names: "dict[str, int]" = {}
_names_lock = _thread.allocate_lock()
_thread_ids = _thread._local()
# Those met since the last write, by the system's id and that of pthreads, which nvprof knows.
_pthreads: "list[tuple[int, int]]" = []
_state = _State()
# Events that end in between wait; outside, be it that the clock was set back, they are written.
_written, _due = 0, 0


def record(start: int, end: int, what: int, kind: int) -> None:
    """Adds an event. ``what`` is from ``word``, ``kind`` is kind | rank << 16 | number << 32."""
    try:
        try:
            thread = _thread_ids.id
        except AttributeError:
            thread = _thread_ids.id = _meet_thread()
        _events.extend((start, end, what | thread, kind))
        if not _written <= end < _due:
            write(end)
    except Exception as error:
        if is_handlers(error):
            raise
        _state.failed = True


def is_handlers(error: BaseException) -> bool:
    """Whether a signal handler of the program raised it, which Python ran while we were at work."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and not last.tb_frame.f_code.co_filename.startswith(_FOLDER)


def word(name: str) -> int:
    """The name as ``record`` wants it."""
    number = _names.get(name)
    if number is None:
        with _names_lock:
            if len(_names) >= _MOST_NAMES:
                name = "(more names)"
            number = _names.setdefault(name, len(_names))
    return number << 32


def note(text: str) -> None:
    """Leaves a line for the reader of the trace."""
    now = time_ns()
    record(now, now, word(text), NOTE)


def note_failure(doing: str) -> None:
    """Leaves a line about the exception under way."""
    problem = " ".join(repr(sys.exc_info()[1]).split())[:300]
    note(f"the hooks failed in {doing}: {problem}")


def write(now: int) -> None:
    """Writes what is there, unless another thread is at it."""
    global _written, _due
    state = _state
    if state.pid != os.getpid():
        _in_forked_child()
    if not state.lock.acquire(False):
        return
    try:
        backwards = now < _written
        _written = now
        _due = (now if backwards else max(_due, now - _SAVED_UP)) + _BETWEEN_WRITES
        _write_events(state, now)
    except Exception as error:
        if is_handlers(error):
            raise
        state.failed = True
    finally:
        state.lock.release()
    for call in on_write:
        call()


def finish() -> None:
    """Writes what is there, at the end of the process."""
    state = _state
    if state.pid == os.getpid() and _events and state.lock.acquire(True, 1):
        try:
            _write_events(state, time_ns())
        except Exception:
            state.failed = True
        finally:
            state.lock.release()


def finish_with(util: "Any") -> None:
    """Takes multiprocessing.util: its processes leave by ``os._exit``, after their finalizers."""

    def register(_: object) -> None:
        util.Finalize(None, finish, exitpriority=-100)
        for call in on_worker:
            call()

    # A child forgets finalizers and then calls this.
    util.register_after_fork(finish, register)


def _meet_thread() -> int:
    """The system's id of this thread; its pthread id, where those are asked for, is to be told."""
    thread = _native_thread_id()
    if os.environ.get("GPUTRACE_PTHREADS"):
        _pthreads.append((thread, _thread.get_ident()))
    return thread


def _native_thread_id() -> int:
    # New in Python 3.8.
    if hasattr(_thread, "get_native_id"):
        return _thread.get_native_id()
    return int(os.path.basename(os.readlink("/proc/thread-self")))


def _write_events(state: _State, now: int) -> None:
    count = len(_events)
    events = array("Q", _events[:count])
    del _events[:count]
    if state.failed:
        _tell_stop(state, count // 4)
    elif events:
        try:
            _write_chunks(state, events.tobytes(), now)
        except BaseException as problem:
            if is_handlers(problem) or not isinstance(problem, Exception):
                _events[:0] = events
                raise
            # A full disk, say. From here on events are only counted.
            state.failed = True
            state.errno = getattr(problem, "errno", None) or 0
            _tell_stop(state, count // 4)


def _tell_stop(state: _State, lost: int) -> None:
    """Says in the place kept for it that writing has ended: that takes no room."""
    import fcntl

    state.stopped = state.stopped or time_ns()
    state.lost += lost
    if _is_open(state) and os.fstat(state.file).st_size > _PLACE:
        # Appending would override the place.
        flags = fcntl.fcntl(state.file, fcntl.F_GETFL)
        fcntl.fcntl(state.file, fcntl.F_SETFL, flags & ~os.O_APPEND)
        os.pwrite(state.file, pack("<QQI4x", state.stopped, state.lost, state.errno), _PLACE)


def _write_chunks(state: _State, events: bytes, now: int) -> None:
    if not _is_open(state):
        _append(state, b"".join(_open(state)))
    chunks = []
    if not 0 <= now - state.clock_told < _SECOND:
        state.clock_told = now
        chunks.append(_clocks())
    met = _pthreads[:]
    del _pthreads[: len(met)]
    for thread, pthread in met:
        chunks.append(_chunk(b"INFO", f"pthread.{thread}={pthread}".encode()))
    names = list(_names)
    for number in range(state.names_written, len(names)):
        text = names[number].encode("utf-8", "replace")
        chunks.append(_chunk(b"NAME", pack("<I", number) + text))
    chunks.append(_chunk(b"EVNT", events))
    _append(state, b"".join(chunks))
    state.names_written = len(names)


def _append(state: _State, data: bytes) -> None:
    size = os.fstat(state.file).st_size
    try:
        while data:
            data = data[os.write(state.file, data) :]
    except BaseException:
        # The disk is full, say, or a signal came: leave whole chunks.
        os.ftruncate(state.file, size)
        raise


def _is_open(state: _State) -> bool:
    # The program may have closed all descriptors and opened its own.
    try:
        found = os.fstat(state.file)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == state.identity


def _open(state: _State) -> "list[bytes]":
    """Opens the file; the chunks that a new one begins with."""
    known = bool(state.path)
    host = os.uname().nodename
    folder = os.environ.get("GPUTRACE_DIR") or FOLDER
    start = os.path.join(folder, f"{host}.{state.pid}")
    # One that is there is from a program that this process ran before it called exec.
    paths = [state.path] if known else [start + part + ".host" for part in ("", ".1", ".2", ".3")]
    for path in paths:
        try:
            state.file = _open_high(path, 0 if known else os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            continue
        state.path = path
        found = os.fstat(state.file)
        state.identity = (found.st_dev, found.st_ino)
        return [] if known else _beginning(state, host)
    raise OSError("no name is left")


def _open_high(path: str, flags: int) -> int:
    import fcntl

    low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
    try:
        # Out of the way of programs that count on low numbers.
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 200)
    except OSError:
        return low
    os.close(low)
    return high


def _beginning(state: _State, host: str) -> "list[bytes]":
    chunks = [pack("<8sIIQQ", MAGIC, VERSION, state.pid, *state.began), _chunk(b"FULL", bytes(24))]
    known = [(name, os.environ[name]) for name in _VARIABLES.split() if name in os.environ]
    for key, value in [("host", host), ("python", sys.version.split()[0]), *known]:
        chunks.append(_chunk(b"INFO", f"{key}={value}".encode("utf-8", "replace")))
    return chunks


def _clocks() -> bytes:
    others = _clock_ns(time.CLOCK_MONOTONIC), _clock_ns(time.CLOCK_MONOTONIC_RAW)
    return _chunk(b"CLOK", pack("<QQQ", time_ns(), *others))


def _clock_ns(clock: int) -> int:
    return int(time.clock_gettime(clock) * 1e9)


def _chunk(tag: bytes, body: bytes) -> bytes:
    return pack("<4sI", tag, len(body)) + body


def _in_forked_child() -> None:
    """Leaves the file to the parent, with what the parent has not written yet."""
    global _state, _names_lock, _written, _due
    left = _state
    _state = _State()
    _names_lock = _thread.allocate_lock()
    _written = _due = 0
    del _events[:]
    try:
        del _pthreads[:]
        _thread_ids.id = _meet_thread()
        if _is_open(left):
            os.close(left.file)
    except OSError:
        pass
    for call in on_fork:
        call()


atexit.register(finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
