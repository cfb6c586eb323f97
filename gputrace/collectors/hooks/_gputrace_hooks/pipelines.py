"""Events of input pipelines, besides the waits for them: parts of batches, and settings.

An event is one part of one batch, its length what the batch's samples took together. Instants
(start equals end) hold numbers. The rank of an event is, in the process that trains, the loader's
or pipeline's number plus one; in a worker of torch's DataLoader, the worker's plus one.
"""

import os
from collections.abc import Callable
from typing import Any

from .host_file import time_ns
from .recorder import note_ours, on_fork, record, word
from .wrappers import call_after

_LOADER = 8
_READY = word("ready")
AUTOMATIC = 0xFFFFFFFF
"""Value of a setting that the library finds by itself."""
_MOST_NUMBER = 0xFFFFFFFF
_MOST_DESCRIBED, _LONGEST_STAGE = 16, 60

worker = [0]
"""Number of this process plus one, if it is a worker of torch's DataLoader."""
count = [0]
"""Loaders and pipelines of this process so far."""
_described: "dict[Any, int]" = {}


def add(start: int, end: int, what: int, owner: int, number: int) -> None:
    """Record a part of a batch, or a number."""
    kind = _LOADER | (owner & 0xFFFF) << 16 | (number & _MOST_NUMBER) << 32
    # Parts of a batch are known at its end.
    record(start, end, what, kind, time_ns())


def describe(iterator: Any, library: str, settings_of: "Callable[[Any], Any]") -> None:
    """Record a pipeline's settings (stage, setting, value) at the first iterator that has them.

    The iterator keeps the pipeline's number; 0 in a worker, and after many.
    """
    try:
        settings = settings_of(iterator)
        key = library, tuple(settings)
        if key not in _described and not worker[0] and len(_described) < _MOST_DESCRIBED:
            count[0] += 1
            _described[key] = count[0]
            now = time_ns()
            for stage, setting, value in [("", "cores", len(os.sched_getaffinity(0))), *settings]:
                stage = stage.replace("|", " ")[:_LONGEST_STAGE]
                add(now, now, word(f"{library}|{stage}|{setting}"), _described[key], value)
        vars(iterator)["_of_gputrace"] = _described.get(key, 0)
    except Exception:
        note_ours(f"looking at the settings of {library}")


def describes(cls: Any, library: str, settings_of: "Callable[[Any], Any]") -> None:
    """Record the settings of a pipeline when an iterator of a class begins."""
    call_after(cls, "__init__", lambda iterator: describe(iterator, library, settings_of))


def ready(number: int, batches: int) -> None:
    """Record how many batches a pipeline has ready when it is asked for one."""
    now = time_ns()
    add(now, now, _READY, number, batches)


def callable_name(function: Any) -> str:
    """Return the name of a function of a stage, or of the class of another callable."""
    function = getattr(function, "map_fn", function)
    return str(getattr(function, "__name__", type(function).__name__))


on_fork.append(_described.clear)
