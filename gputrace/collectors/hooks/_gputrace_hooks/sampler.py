"""Sampler of the line that the program's main thread is at.

On where GPUTRACE_PYTHON names the library of the clock, native/ticker, which says how it is that
``_look`` runs on the main thread; less often where GPUTRACE_LINES does, from when the process
writes its first events or torch uses CUDA. A sample names the line that the program's own code has
come to, and the innermost line of all, in a library mostly: file, number, function; no values.

The clock is a thread, which a program should not notice: it runs no Python, no signal reaches it,
and it is gone while the process forks, so that nothing warns of a thread. A child gets one of its
own when it is multiprocessing's or records something: another may be about to exec.

Python looks for calls to make when it has called something and where functions and turns of loops
begin: what an operator in between does is seen at the next of these.

Where a tick met the main thread waiting for the interpreter's lock, a row names the thread that has
used most processor time of the others of Python since the last such tick, and the line that it is
at: it has just let go of the lock.
"""

import _thread
import atexit
import fcntl  # noqa: F401 (so that what we do in the midst of the program need not import it)
import os
import sys

from . import control, host_file, load, recorder, steps
from .host_file import time_ns
from .recorder import COUNTER, SAMPLE, note, record, record_of, word

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from types import FrameType

_PERIOD, _PERIOD_IN_STEPS = 10000000, 50000000
_MOST_TICKS = 6000
_MOST_WAITING = 4 * 10000
_MOST_FRAMES = 200
_ROOM = 40
"""Calls within one another that a look may take."""
_MOST_THREADS = 64
_MOST_LINES = 8000
"""Leaves room in the recorder's table of names."""
_TRIES = 5
_IS_WATCHED = "GPUTRACE_HANG" in os.environ

_USER, _LIBRARY, _STANDARD, _OURS, _RECORDING = range(5)
_TYPED_IN = ("<string>", "<stdin>", "<ipython-input")
_standard = os.path.dirname(os.__file__) + os.sep
_package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))) + os.sep
# Python 3.11 begins a function with a few bytes that make it ready.
_BEGUN = 8 if sys.version_info >= (3, 11) else 0

_sides = dict.fromkeys(
    [m.__file__ for m in (recorder, host_file, control, load, steps)], _RECORDING
)
_lines: "dict[tuple[str, int, str], int]" = {}
_used: "dict[int, int]" = {}
"""Processor time of other threads of Python at the last wait for the lock, by the system's id."""

# A fork counts threads after what is to be called after it.
_COUNTS_LATE = sys.version_info >= (3, 12)
# Once it has waited for threads, and before its exit handlers, it refuses pending calls: with a
# message, or a crash, in the clock's thread.
_REFUSES_AT_EXIT = sys.version_info[:2] == (3, 8)

_clock: "ctypes.CDLL | None" = None
_clock_with_lock: "ctypes.PyDLL | None" = None
_held: "list[None]" = []
"""One for each fork under way and for the end of the process: no thread may be there."""
_asleep = False
"""True in a process that has done nothing yet."""
_tried: "list[None]" = []


def install(path: str) -> None:
    """Start sampling, or add a note if that is impossible; never raises."""
    try:
        if not _get_ready(path, _PERIOD):
            note("this Python cannot be sampled")
            return
        recorder.on_worker.append(wake_up)
        _start()
    except Exception:
        recorder.note_failure("starting to sample")


def install_for_steps(path: str) -> None:
    """Start sampling when first events are written, as at a step's end; raises nothing of ours."""
    global _asleep
    if _clock is not None or "GPUTRACE_PYTHON" in os.environ or _tried:
        return
    _tried.append(None)
    try:
        _asleep = True
        # What it asks of the interpreter is asked on the main thread.
        if recorder.thread_id() == os.getpid():
            _get_ready(path, _PERIOD_IN_STEPS)
    except Exception as error:
        if host_file.is_handlers(error):
            raise


def _get_ready(path: str, period: int) -> bool:
    """Return whether the clock may start."""
    global _clock, _clock_with_lock
    import ctypes

    _clock_with_lock = ctypes.PyDLL(path)
    if not _prepare(_clock_with_lock, period):
        return False
    _clock = ctypes.CDLL(path)
    recorder.on_fork.append(_in_forked_child)
    recorder.on_write.append(wake_up)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_hold, after_in_parent=_let_go)
    atexit.register(_hold)
    if _REFUSES_AT_EXIT:
        _hold_before_exit()
    return True


def _hold_before_exit() -> None:
    """Stop the clock where Python, at its end, begins to wait for threads."""
    import threading

    shut_down = threading._shutdown  # type: ignore[attr-defined]

    def hold_and_shut_down() -> None:
        _hold()
        shut_down()

    threading._shutdown = hold_and_shut_down  # type: ignore[attr-defined]


def _prepare(clock: "ctypes.PyDLL", period: int) -> bool:
    from ctypes import c_longlong, c_size_t, c_void_p, cast, py_object, pythonapi

    names = ["Py_AddPendingCall", "PyObject_CallFunction", "Py_DecRef"]
    names += ["PyErr_Fetch", "PyErr_Restore", "PyEval_GetFrame"]
    if sys.version_info < (3, 10):
        names += ["Py_GetRecursionLimit", "Py_SetRecursionLimit"]
    functions = (c_void_p * 9)(*[cast(getattr(pythonapi, name), c_void_p) for name in names])
    if _COUNTS_LATE:
        functions[8] = cast(pythonapi.PyFrame_GetBack, c_void_p).value
    get_tool = getattr(getattr(sys, "monitoring", None), "get_tool", None)
    objects = (c_void_p * 5)(id(None), id(sys.getprofile), id(sys.gettrace), None, id(_look))
    if get_tool is not None:
        objects[3] = id(get_tool)
    # The clock keeps them; they must outlive their modules.
    for kept in sys.getprofile, sys.gettrace, get_tool, _look:
        pythonapi.Py_IncRef(py_object(kept))
    received = interpreter = None
    if sys.version_info >= (3, 9):
        main, present = pythonapi.PyInterpreterState_Main, pythonapi.PyInterpreterState_Get
        main.restype = present.restype = c_void_p
        interpreter = main()
        # The main one makes the calls: an object of another must not get there.
        if interpreter != present():
            return False
        if sys.version_info < (3, 13):
            received = cast(pythonapi._PyEval_SignalReceived, c_void_p)
    prepare = clock.gputrace_ticker_prepare
    prepare.argtypes = [c_void_p] * 2 + [c_longlong] + [c_void_p] * 3 + [c_size_t]
    known = functions, objects, period, received, interpreter, *_runtime()
    return any(not prepare(*known) for _ in range(_TRIES))


def _runtime() -> "tuple[int | None, int]":
    """Return where ``_PyRuntime`` is and its size in bytes, 0 if the linker does not know it."""
    import ctypes

    # Dl_info and the size in Elf64_Sym, of dlfcn.h and elf.h.
    info, symbol = (ctypes.c_void_p * 4)(), ctypes.c_void_p()
    try:
        start = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
        ask = ctypes.CDLL(None).dladdr1
    except (ValueError, AttributeError):
        return None, 0
    ask.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int]
    if not ask(start, info, ctypes.byref(symbol), 1) or not symbol.value or info[3] != start:
        return None, 0
    return start, ctypes.c_uint64.from_address(symbol.value + 16).value


def _start() -> None:
    if _clock is not None and _clock.gputrace_ticker_start():
        note("no thread could be started to sample")


def _hold() -> None:
    _held.append(None)
    if _clock is not None:
        _clock.gputrace_ticker_stop()


def _let_go() -> None:
    _held.pop()
    if _held or _asleep:
        return
    is_later = False
    # Other threads would be counted, and warned of, in any case.
    if _COUNTS_LATE and _clock_with_lock is not None and recorder.thread_id() == os.getpid():
        is_later = not _clock_with_lock.gputrace_ticker_resume()
    if not is_later:
        _start()


def _in_forked_child() -> None:
    global _asleep
    _asleep = True
    del _held[:]


def wake_up() -> None:
    """Sample from now on, in a process that has done nothing yet."""
    global _asleep
    if _asleep and not _held:
        _asleep = False
        _start()


def _look(ticks: int, since: int, waits: int, sleeps: int, interrupted: "FrameType") -> None:
    """Record the current line of the program for each tick since the first one, who had the
    interpreter's lock at those ticks that met a wait for it, and how many met it asleep.
    """
    try:
        _need_room(_ROOM)
    except RecursionError:
        return
    try:
        now = time_ns()
        frame, inner = _user_frame(interrupted)
        # Nothing in the midst of the recorder, which may have locked its names.
        if frame is not None and inner is not None:
            if waits:
                _record_holder(since, now, waits)
            if 2 * sleeps > ticks:
                record_of(recorder.thread_id(), since, now, word("asleep"), COUNTER | sleeps << 32)
            _record_line(frame, inner, min(ticks, _MOST_TICKS), since, now)
    except Exception as error:
        if host_file.is_handlers(error):
            raise


def _need_room(calls: int) -> None:
    """Raise RecursionError now if so many calls would: what follows then meets none of ours."""
    if calls:
        _need_room(calls - 1)


def _record_line(frame: "FrameType", inner: "FrameType", count: int, since: int, now: int) -> None:
    what, kind = _line(frame) << 32, SAMPLE | _line(inner) << 32
    for tick in range(count):
        start = since + (now - since) * tick // count
        if not _IS_WATCHED:
            record(start, now, what, kind)
        elif len(recorder._events) < _MOST_WAITING:
            # No write: a file that grows says that the program gets on.
            record_of(recorder.thread_id(), start, now, what, kind)


def _record_holder(since: int, now: int, waits: int) -> None:
    """Record who had the interpreter's lock before this thread: nobody where no thread is known.

    A frame that is held keeps all that its function holds, batches in pinned memory among it, and
    one that holds itself keeps that until garbage is collected: maybe in a forked worker, which
    CUDA aborts for giving such memory back. So no frame is held across anything that lets go of
    the lock, and never that of this function.
    """
    threading = sys.modules.get("threading")
    threads = {} if threading is None else dict(threading._active)
    most, holder, busiest, me = -1, 0, 0, _thread.get_ident()
    for ident, thread in list(threads.items())[:_MOST_THREADS]:
        native = getattr(thread, "native_id", None) or 0
        if not native or ident == me:
            continue
        with host_file.Suppress(OSError):
            used = load.scheduled(f"/proc/self/task/{native}/schedstat")[0]
            since_then = used - _used.get(native, used)
            _used[native] = used
            if since_then > most:
                most, holder, busiest = since_then, native, ident
    name = _name_of_lock(busiest)
    record_of(holder or recorder.thread_id(), since, now, word(name), COUNTER | waits << 32)


def _name_of_lock(thread: int) -> str:
    """Return what to call the interpreter's lock that a thread holds: by its line."""
    line, _ = _user_frame(sys._current_frames().get(thread))
    return "lock held" if line is None else "lock held: {}:{} {}".format(*_place(line))


def _user_frame(frame: "FrameType | None") -> "tuple[FrameType | None, FrameType | None]":
    """Return the innermost frame of the user's program, and of all; None if it is nobody's.

    Of a program that is itself an installed package, the outermost frame of such: it has no other.
    """
    inner = outermost = None
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        file = frame.f_code.co_filename
        side = _sides.get(file)
        if side is None:
            side = _sides[file] = _side(file)
        if side == _RECORDING:
            return None, None
        # A function that has only begun has done nothing: what came before was its caller's.
        if inner is None and side != _OURS and frame.f_lasti > _BEGUN:
            inner = frame
        if side == _USER and inner is not None:
            return frame, inner
        if side == _LIBRARY:
            outermost = frame
        frame = frame.f_back
    return outermost, inner


def _side(file: str) -> int:
    """Return whose code a file is, as one of the constants above."""
    if len(_sides) > _MOST_LINES:
        return _STANDARD
    if file.startswith(_package):
        return _OURS
    if file.startswith("<"):
        return _USER if file.startswith(_TYPED_IN) else _STANDARD
    if "/site-packages/" in file or "/dist-packages/" in file:
        return _LIBRARY
    return _STANDARD if file.startswith(_standard) else _USER


def _line(frame: "FrameType") -> int:
    """Return the number of the name of a frame's line."""
    key = _place(frame)
    number = _lines.get(key)
    if number is None:
        full = len(_lines) >= _MOST_LINES
        number = word("(more lines)" if full else "{}:{} {}".format(*key)) >> 32
        if not full:
            _lines[key] = number
    return number


def _place(frame: "FrameType") -> "tuple[str, int, str]":
    code = frame.f_code
    return code.co_filename, frame.f_lineno or 0, getattr(code, "co_qualname", code.co_name)
