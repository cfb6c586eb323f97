"""Events of this process: kept in a list, and written to its file from time to time.

No thread of ours writes: a second thread would make ``os.fork`` warn. An event is written at once
while there are fewer than four a second; of more, all that came in a quarter of one go together.

Writing lets other threads of the program have Python's lock, and a loader's that makes batches
keeps it for milliseconds. So a wait for data, which a program may clock, leaves writing to the next
step's end, unless a second has passed since the last; the first one leaves it the file's making. So
does a phase of a step, after which a GPU may wait for launches.
"""

import _thread
import atexit
import os
import sys
from array import array
from struct import pack
from time import sleep

from . import BEGAN
from .host_file import (
    TOO_LARGE,
    HostFile,
    both_clocks,
    chunk,
    clocks,
    folder_bytes,
    info,
    is_handlers,
    time_ns,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

DATA_WAIT, STEP, ANNOTATION, NOTE, SAMPLE, GC, PHASE, COUNTER = 1, 2, 3, 4, 5, 6, 7, 9
COMPILATION, MODULE, SOURCE = 10, 11, 12

_WITHIN_STEPS = (DATA_WAIT, PHASE)

_SECOND = 1000000000
_BETWEEN_WRITES = _SECOND // 4
_SAVED_UP = 8 * _BETWEEN_WRITES
_MOST_NAMES = 10000
_MOST_LASTING = 400
_MOST_KEPT = 4 * 250000
# ENFILE, EMFILE
_NO_FILES = (23, 24)
# For another thread that is writing at the end of the process: a second in all.
_PATIENCE, _A_MOMENT_S = 100, 0.01
# What a process writes of the most that is allowed before it looks again.
_PART = 16

before_write: "list[Callable[[], None]]" = []
"""Called before events are written: what is quicker to keep as it is becomes events there."""
on_write: "list[Callable[[], None]]" = []
"""Called after events were written, four times a second in the long run."""
on_fork: "list[Callable[[], None]]" = []
"""Called in a forked child."""
on_worker: "list[Callable[[], None]]" = []
"""Called in a process that multiprocessing has forked, before it works."""


class _State:
    """State of this process; a forked child starts with a fresh one."""

    def __init__(self) -> None:
        pid = os.getpid()
        # Forked since: the fork is what begins it.
        began = (BEGAN[1], BEGAN[2]) if BEGAN[0] == pid else both_clocks()
        self.file = HostFile(pid, began)
        # Who writes, if anybody, under 0. A lock would stay locked where a signal handler raises
        # when it has been taken and the next line is not reached: Python calls them after calls.
        self.writer: dict[int, object] = {}
        self.names_written = 0
        self.clock_told = 0
        self.failed = False
        self.stopped = self.lost = self.errno = 0
        # Of a ring, and of a recording whose size is limited.
        self.segment_began = self.looked = self.bytes = self.since = 0


too_deep: "list[bool]" = []
"""True if Python had no room for a call of ours recently: set without a call."""

# Four numbers an event. Threads extend it at its end and the one that writes cuts it at its front,
# each in one operation, so that recording takes no lock.
_events: "list[int]" = []
# Those that each file of a ring repeats.
_lasting: "list[int]" = []
_names: "dict[str, int]" = {}
# A signal handler or finalizer of the program may come back here from within.
_names_lock = _thread.RLock()
_thread_ids = _thread._local()
# Those met since the last write, by the system's id and that of pthreads, which nvprof knows.
_pthreads: "list[tuple[int, int]]" = []
_state = _State()
# Events that end in between wait; others are written, also if the clock was set back.
_written, _due, _wait_due = 0, 0, 0


def record(start: int, end: int, what: int, kind: int, now: int = 0) -> None:
    """Add an event. ``what`` is from ``word``, ``kind`` is kind | rank << 16 | number << 32.

    ``now`` is the time where that is not the event's end.
    """
    try:
        _events.extend((start, end, what | thread_id(), kind))
        within_step = kind in _WITHIN_STEPS
        now = now or end
        if not _written <= now < (_wait_due if within_step else _due):
            if within_step and not _written:
                _put_off(now)
            else:
                write(now)
    except RecursionError:
        too_deep[:] = [True]
    except Exception as error:
        if is_handlers(error):
            raise
        _state.failed = True


def record_of(thread: int, start: int, end: int, what: int, kind: int) -> None:
    """Add an event of another thread, which is written with the next events."""
    _events.extend((start, end, what | thread, kind))


def thread_id() -> int:
    """Return the system's id of this thread."""
    try:
        return _thread_ids.id  # type: ignore[no-any-return]
    except AttributeError:
        thread = _thread_ids.id = _meet_thread()
        return thread


def _put_off(now: int) -> None:
    """Defer writing of the first event to the first step, or to an event a second later."""
    global _written, _wait_due
    if _state.file.pid == os.getpid():
        _written, _wait_due = now, now + _SECOND
    else:
        write(now)


def word(name: str) -> int:
    """Return a name in the form that ``record`` takes."""
    number = _names.get(name)
    if number is None:
        with _names_lock:
            if len(_names) >= _MOST_NAMES:
                name = "(more names)"
            number = _names.setdefault(name, len(_names))
    return number << 32


def record_for_good(now: int, what: int, kind: int) -> None:
    """Add an instant that each file of a ring repeats."""
    if len(_lasting) < _MOST_LASTING:
        _lasting.extend((now, now, what | _native_thread_id(), kind))
    record(now, now, what, kind)


def note(text: str) -> None:
    """Add a note for the reader of the trace."""
    record_for_good(time_ns(), word(text), NOTE)


def note_source(of: str, file: str, line: int, function: str) -> None:
    """Record where in the program's source something is."""
    now = time_ns()
    record(now, now, word(f"{of} at {file}:{line} {function}"), SOURCE)


def note_failure(doing: str) -> None:
    """Add a note about the exception being handled."""
    problem = " ".join(repr(sys.exc_info()[1]).split())[:300]
    note(f"the hooks failed in {doing}: {problem}")


def note_ours(doing: str) -> None:
    """Note the exception being handled, or raise it where a signal handler of the program did."""
    error = sys.exc_info()[1]
    if error is not None and is_handlers(error):
        raise error
    note_failure(doing)


def write(now: int) -> None:
    """Write the pending events, unless another thread is writing."""
    global _written, _due, _wait_due
    if _state.file.pid != os.getpid():
        _in_forked_child()
    state, token = _state, object()
    try:
        if state.writer.setdefault(0, token) is not token:
            return
        backwards = now < _written
        # Where steps take longer, a wait would be too old by the end of its step.
        _wait_due = 0 if 0 < _written <= now - _SECOND else now + _SECOND
        _written = now
        _due = (now if backwards else max(_due, now - _SAVED_UP)) + _BETWEEN_WRITES
        _write_events(state, now)
    except RecursionError:
        too_deep[:] = [True]
    except Exception as error:
        if is_handlers(error):
            raise
        state.failed = True
    finally:
        if 0 in state.writer and state.writer[0] is token:
            del state.writer[0]
    for call in on_write:
        call()


def finish() -> None:
    """Write the pending events at the end of the process."""
    state, token = _state, object()
    if state.file.pid != os.getpid():
        return
    for _ in range(_PATIENCE):
        if state.writer.setdefault(0, token) is token:
            break
        sleep(_A_MOMENT_S)
    else:
        return
    try:
        _write_events(state, time_ns())
    except Exception:
        state.failed = True
    finally:
        del state.writer[0]


def _meet_thread() -> int:
    """Return the system's id of this thread, and note its pthread id if those are wanted."""
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
    """Write the pending events; if that may succeed later, keep them for the next time."""
    # Where a signal handler raised between the writing of these and the line that forgets them.
    del _events[: state.file.held]
    state.file.held = 0
    count = 0
    try:
        for call in before_write:
            call()
        count = len(_events)
        if count and not state.failed:
            _write_chunks(state, _events[:count], now)
    except RecursionError:
        # Not even a call to see whose it is.
        too_deep[:] = [True]
        return
    except Exception as error:
        if is_handlers(error):
            raise
        errno = getattr(error, "errno", None)
        # No descriptor or no memory is left: another time there may be.
        passes = isinstance(error, MemoryError) or errno in _NO_FILES
        if passes and len(_events) < _MOST_KEPT:
            return
        # A full disk, say. From here on events are only counted.
        state.failed, state.errno = True, errno or 0
    del _events[:count]
    state.file.held = 0
    if state.failed:
        state.stopped = state.stopped or time_ns()
        state.lost += count // 4
        state.file.write_stop(state.stopped, state.lost, state.errno)


def _limit(name: str) -> int:
    try:
        return int(os.environ.get(name) or 0)
    except ValueError:
        return 0


_segment_ns = _limit("GPUTRACE_SEGMENT_NS")
_segments = _limit("GPUTRACE_SEGMENTS")
_max_bytes = _limit("GPUTRACE_MAX_BYTES")


def _keep_size(state: _State, now: int, more: int) -> None:
    """Raise OSError if as much growth as lately would make the recording too large."""
    state.since += more
    often = state.since < _max_bytes // _PART
    if not _max_bytes or (0 <= now - state.looked < _SECOND and often):
        return
    held, before = folder_bytes(), state.bytes
    state.looked, state.bytes, state.since = now, held, 0
    gained = max(held - before, 0) if before else 0
    if held + max(gained, more) >= _max_bytes:
        raise OSError(TOO_LARGE, "the recording is as large as it may become")


def _keep_segments(state: _State, now: int) -> bytes:
    """Begin a new file when it is due; return the events that it repeats."""
    if not _segment_ns or 0 <= now - state.segment_began < _segment_ns:
        return b""
    first, state.segment_began = not state.segment_began, state.segment_began + _segment_ns
    if not 0 <= now - state.segment_began < _segment_ns:
        state.segment_began = now
    if first:
        return b""
    state.file.rotate(_segments)
    state.names_written = state.clock_told = 0
    return array("Q", _lasting).tobytes()


def _write_chunks(state: _State, numbers: "list[int]", now: int) -> None:
    events = array("Q", numbers).tobytes()
    state.file.open()
    _keep_size(state, now, len(events))
    events = _keep_segments(state, now) + events
    chunks = []
    if not 0 <= now - state.clock_told < _SECOND:
        state.clock_told = now
        chunks.append(clocks())
    if too_deep:
        del too_deep[:]
        note("Python had no room for another call: an event may be missing")
    met = _pthreads[:]
    del _pthreads[: len(met)]
    chunks += [info(f"pthread.{thread}", pthread) for thread, pthread in met]
    names = list(_names)
    for number in range(state.names_written, len(names)):
        text = names[number].encode("utf-8", "replace")
        chunks.append(chunk(b"NAME", pack("<I", number) + text))
    chunks.append(chunk(b"EVNT", events))
    count, data = len(names), b"".join(chunks)
    state.file.append(data, len(numbers))
    state.names_written = count


def _in_forked_child() -> None:
    """Leave the file and the unwritten events to the parent."""
    global _state, _names_lock, _written, _due, _wait_due
    left = _state
    _state = _State()
    _names_lock = _thread.RLock()
    _written = _due = _wait_due = 0
    del _events[:], _lasting[:]
    try:
        del _pthreads[:]
        _thread_ids.id = _meet_thread()
        left.file.close()
    except OSError as error:
        if is_handlers(error):
            raise
    for call in on_fork:
        call()


atexit.register(finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
