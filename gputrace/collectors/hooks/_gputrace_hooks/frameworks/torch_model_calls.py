"""Calls of a torch program's model: of the modules that no other module calls, a loss among them.

Which classes these are of is seen in one early step, as `torch_modules` sees modules. Each such
class is given a ``__call__`` of its own then, so that no module has a hook, which would be pickled,
copied, compiled or scripted with it, and the calls of all others cost what they did.
"""

import os
import sys
from functools import wraps
from types import FunctionType
from typing import Any

from ..host_file import time_ns
from ..recorder import PHASE, note_ours, on_fork, record, word
from ..wrappers import passed_over

IS_ASKED = os.environ.get("GPUTRACE_MODULES") != "0"
_MOST = 8
_what = word("model")
_timed: "set[type]" = set()
_within: "list[None]" = []
"""Not empty while a module is called that is timed."""


def is_backward(torch: Any, unknown: bool = True) -> bool:
    """Return whether this thread is in a backward pass, which may call modules once more.

    Before torch 2.1 that is ``unknown``.
    """
    number = getattr(torch._C, "_current_graph_task_id", None)
    return unknown if number is None else number() != -1


def time_calls(cls: Any) -> None:
    """Time calls of modules of a class from now on."""
    own = vars(cls).get("__call__")
    # Before torch 2.3, nobody can tell whether a call is traced.
    compiler = getattr(sys.modules["torch"], "compiler", None)
    if not hasattr(compiler, "is_compiling") or not isinstance(own, (type(None), FunctionType)):
        return
    if cls in _timed or len(_timed) >= _MOST:
        return
    _timed.add(cls)

    # It needs nothing of ours: cloudpickle takes a class of the main program as it is.
    @wraps(cls.__call__)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        around = super(cls, self).__call__ if own is None else own.__get__(self)
        timer = sys.modules.get("_gputrace_hooks.frameworks.torch_model_calls")
        if timer is None or timer.is_untimed():
            return around(*args, **keywords)
        return timer.timed(around, args, keywords)

    try:
        cls.__call__ = call
        cls.__call__.__code__ = passed_over(cls.__call__.__code__)
    except Exception:
        note_ours("timing calls of a model")


def is_untimed() -> bool:
    """Return whether a call is one of another's, or is traced: no graph may contain the clock."""
    torch: Any = sys.modules["torch"]
    return torch.compiler.is_compiling() or bool(_within) or is_backward(torch)


def timed(call: Any, args: Any, keywords: Any) -> Any:
    """Make the call, and record it."""
    start = time_ns()
    # Within: what a signal handler raises may end the call that it comes after.
    try:
        _within.append(None)
        return call(*args, **keywords)
    finally:
        del _within[:]
        record(start, time_ns(), _what, PHASE)


timed.__code__ = passed_over(timed.__code__)


# A thread that was in such a call is not in the child.
on_fork.append(_within.clear)
