"""The collector's library in this process: the driver loads it when the program starts CUDA.

A call that comes before that is kept, and made as soon as the library is found.
"""

import os

from . import recorder

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes

_pending: "dict[str, int]" = {}


def pause(on: bool) -> None:
    """Makes way for another user of CUPTI, or comes back."""
    _ask("gputrace_pause", int(on))


def capture(on: bool) -> None:
    """Begins or ends the window to record."""
    _ask("gputrace_capture", int(on))


def _ask(function: str, value: int) -> None:
    if os.environ.get("GPUTRACE_LIBRARY"):
        _pending.pop(function, None)
        _pending[function] = value
        deliver()


def deliver() -> None:
    """Makes the calls that are still to be made."""
    if not _pending:
        return
    try:
        library = _loaded_library()
        while library and _pending:
            function, value = next(iter(_pending.items()))
            del _pending[function]
            getattr(library, function)(value)
    except Exception:
        _pending.clear()
        recorder.note_failure("reaching the collector")


def _loaded_library() -> "ctypes.CDLL | None":
    import ctypes

    try:
        # Symbols stay out of the program's scope: found through this handle only.
        return ctypes.CDLL(os.environ["GPUTRACE_LIBRARY"], mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


recorder.on_write.append(deliver)
recorder.on_fork.append(_pending.clear)
