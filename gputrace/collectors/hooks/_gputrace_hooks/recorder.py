"""Events of this process: kept in a list, and written to its file from time to time.

No thread of ours writes: a second thread would make ``os.fork`` warn. An event is written at once
while there are fewer than four a second; of more, all that came in a quarter of one go together.
"""

import _thread
import atexit
import os
import sys
from array import array
from struct import pack

from . import BEGAN
from .host_file import HostFile, both_clocks, chunk, clocks, info, time_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DATA_WAIT, STEP, ANNOTATION, NOTE, SAMPLE = 1, 2, 3, 4, 5

_SECOND = 1000000000
_BETWEEN_WRITES = _SECOND // 4
_SAVED_UP = 8 * _BETWEEN_WRITES
_MOST_NAMES = 10000
_FOLDER = os.path.dirname(__file__) + os.sep

on_write: "list[Callable[[], None]]" = []
"""Called after events were written, four times a second in the long run."""
on_fork: "list[Callable[[], None]]" = []
"""Called in a forked child."""
on_worker: "list[Callable[[], None]]" = []
"""Called in a process that multiprocessing has forked, before it works."""


class _State:
    """What this process has open; a forked child starts with a fresh one."""

    def __init__(self) -> None:
        pid = os.getpid()
        # Forked since: the fork is what begins it.
        began = (BEGAN[1], BEGAN[2]) if BEGAN[0] == pid else both_clocks()
        self.file = HostFile(pid, began)
        self.lock = _thread.allocate_lock()
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
    if state.file.pid != os.getpid():
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
    if state.file.pid == os.getpid() and _events and state.lock.acquire(True, 1):
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
    state.stopped = state.stopped or time_ns()
    state.lost += lost
    state.file.tell_stop(state.stopped, state.lost, state.errno)


def _write_chunks(state: _State, events: bytes, now: int) -> None:
    state.file.open()
    chunks = []
    if not 0 <= now - state.clock_told < _SECOND:
        state.clock_told = now
        chunks.append(clocks())
    met = _pthreads[:]
    del _pthreads[: len(met)]
    chunks += [info(f"pthread.{thread}", pthread) for thread, pthread in met]
    names = list(_names)
    for number in range(state.names_written, len(names)):
        text = names[number].encode("utf-8", "replace")
        chunks.append(chunk(b"NAME", pack("<I", number) + text))
    chunks.append(chunk(b"EVNT", events))
    state.file.append(b"".join(chunks))
    state.names_written = len(names)


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
        left.file.close()
    except OSError:
        pass
    for call in on_fork:
        call()


atexit.register(finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
