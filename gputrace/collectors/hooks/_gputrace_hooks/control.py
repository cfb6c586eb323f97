"""Control of what records this process: when to begin, to end and to make way.

That is a library which is loaded when the program starts CUDA, the collector's or, where another
tool follows CUDA's profiler API (GPUTRACE_PROFILER_API), the driver's. A call that comes before
that is kept, and made as soon as the library is found.
"""

import os

from . import recorder
from .host_file import is_handlers

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

_DRIVER = "libcuda.so.1"
_START = "cuProfilerStart"

_pending: "dict[str, tuple[int, ...]]" = {}
_step: "list[Callable[[], object]]" = []


def pause(on: bool) -> None:
    """Make way for another user of CUPTI, or come back."""
    _ask("gputrace_pause", int(on))


def capture(on: bool) -> None:
    """Begin or end the window to record.

    For a tool that follows the program's calls: nsys records all processes from the first start
    until each that started has stopped (seen with 2025.3), nvprof each process by itself.
    """
    if not os.environ.get("GPUTRACE_PROFILER_API"):
        _ask("gputrace_capture", int(on))
    elif on:
        _keep(_START)
    else:
        # What the GPU was given in the window, it shall finish in the window.
        _keep("cuCtxSynchronize")
        _keep("cuProfilerStop")


def rest(hold_ns: int, stays: bool) -> bool:
    """Begin a control stretch, which ``capture(True)`` ends; return True if it has begun.

    After ``hold_ns``, which the GPU has to end what it was given, CUPTI is idle or, unless it
    ``stays``, out of the process.
    """
    import ctypes

    try:
        library = _loaded_library() if os.environ.get("GPUTRACE_LIBRARY") else None
        return (
            library is not None and library.gputrace_rest(ctypes.c_uint64(hold_ns), int(stays)) == 0
        )
    except Exception as error:
        _pass_on(error)
        recorder.note_failure("reaching the collector")
        return False


def step_ended() -> None:
    """Notify the collector, which may record the calls of some steps only."""
    if _step:
        _step[0]()


def _find_step() -> None:
    """Look for the collector's function each second, since a step must cost next to nothing."""
    if _step or not os.environ.get("GPUTRACE_LIBRARY"):
        return
    try:
        function = getattr(_loaded_library(), "gputrace_step", None)
        if function is not None:
            _step.append(function)
    except Exception as error:
        _pass_on(error)
        recorder.note_failure("reaching the collector")


def _ask(function: str, value: int) -> None:
    if os.environ.get("GPUTRACE_LIBRARY"):
        _keep(function, value)


def _keep(function: str, *values: int) -> None:
    _pending.pop(function, None)
    _pending[function] = values
    deliver()


def deliver() -> None:
    """Make the pending calls."""
    if not _pending:
        return
    try:
        library = _loaded_library()
        while library and _pending:
            function, values = next(iter(_pending.items()))
            del _pending[function]
            result = getattr(library, function)(*values)
            if function == _START and result:
                # No context yet.
                _pending[function] = values
                break
    except Exception as error:
        _pass_on(error)
        _pending.clear()
        recorder.note_failure("reaching the collector")


def _loaded_library() -> "ctypes.CDLL | None":
    import ctypes

    try:
        # Symbols stay out of the program's scope: found through this handle only.
        name = os.environ.get("GPUTRACE_LIBRARY", _DRIVER)
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError as error:
        _pass_on(error)
        return None


def _pass_on(error: Exception) -> None:
    """Raise an error again if a signal handler of the program, and not ctypes, raised it."""
    import ctypes

    if is_handlers(error, ctypes.__file__):
        raise error


recorder.on_write += [deliver, _find_step]
recorder.on_fork.append(_pending.clear)
