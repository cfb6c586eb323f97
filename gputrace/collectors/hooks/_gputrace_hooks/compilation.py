"""Compilations: how each framework's are timed, and named with the reason for compiling again."""

from . import steps
from .host_file import is_handlers, time_ns
from .recorder import COMPILATION, note_ours, record, thread_id, word
from .wrappers import around

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_LONGEST = 160
running: "dict[int, list[str]]" = {}
"""By thread that compiles a function, the reasons that were found for it."""


def times_compilations(holder: "Any", name: str, name_of: "Callable[..., str]") -> None:
    """Record calls in steps, with a name from their first arguments, unless they are a part of
    another compilation.
    """

    @around(holder, name)
    def compiled(original: "Any", *args: "Any", **keywords: "Any") -> "Any":
        thread, start = thread_id(), time_ns()
        if thread in running or steps.recorded()[0] <= 0:
            return original(*args, **keywords)
        running[thread] = []
        try:
            return original(*args, **keywords)
        finally:
            running.pop(thread, None)
            try:
                called = str(name_of(*args))
            except Exception as error:
                if is_handlers(error):
                    raise
                called = "a kernel"
            keep(start, called, [])


def keep(start: int, name: str, reasons: "list[str]") -> None:
    """Record a compilation that ends now, with the first of its reasons.

    Left out of a reason are the number before it, the code behind it, and the stack below.
    """
    try:
        if reasons:
            reason = reasons[0].splitlines()[0].partition("  #")[0]
            number, colon, rest = reason.partition(": ")
            name += ": " + (rest if colon and "/" in number else reason).strip()[:_LONGEST]
        record(start, time_ns(), word(name), COMPILATION)
    except Exception:
        note_ours("naming a compilation")
