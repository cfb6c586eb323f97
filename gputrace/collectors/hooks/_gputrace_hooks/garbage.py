"""Garbage collections of the program, those that take a fifth of a millisecond or more.

Python calls what is in ``gc.callbacks`` before and after each; shorter ones, which may be many, are
not kept. A program that empties the list is left alone.
"""

import gc

from .host_file import time_ns
from .recorder import GC, on_fork, record_of, thread_id, word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LEAST_NS = 200000

_begun = [0]


def _look(phase: str, info: "dict[str, Any]") -> None:
    """Raises nothing: Python would print it."""
    try:
        now = time_ns()
        start, _begun[0] = _begun[0], now if phase == "start" else 0
        if phase == "stop" and 0 < start <= now - _LEAST_NS:
            what = word("generation {}".format(info.get("generation")))
            record_of(thread_id(), start, now, what, GC)
    except Exception:
        _begun[0] = 0


def _in_forked_child() -> None:
    _begun[0] = 0


def watch() -> None:
    """Keeps them from now on: a process that trains nothing should leave no file."""
    if _look not in gc.callbacks:
        gc.callbacks.append(_look)
        on_fork.append(_in_forked_child)
