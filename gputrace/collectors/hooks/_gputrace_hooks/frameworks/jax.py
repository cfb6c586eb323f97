"""JAX (tried with 0.10 and 0.11): the steps that a program annotates, and compilations.

A step is a `jax.profiler.StepTraceAnnotation`, at 2 µs; how long parts of a compilation took is
what JAX says, at some µs each, and why a function is compiled again what changed of the arguments
in the frame that compiles it. The collector makes way for JAX's profiler.
"""

import sys
from typing import Any

from ..host_file import Suppress, time_ns
from ..recorder import COMPILATION, record, word
from ..steps import LOOP, step_ended
from ..wrappers import after, around, makes_way


def profiler(module: Any) -> None:
    """Make way for JAX's profiler, which uses CUPTI; its step annotations are steps."""
    makes_way(module, "start_trace", "stop_trace", "JAX's profiler", lets_go=True)
    annotation = getattr(module, "StepTraceAnnotation", None)
    if annotation is not None:
        what = word("jax.profiler.StepTraceAnnotation")
        leave = annotation.__exit__
        annotation.__exit__ = after(leave, lambda self: step_ended(what, LOOP, annotation))


def compilations(module: Any) -> None:
    """Record what JAX says of the parts of a compilation: tracing, lowering, XLA."""

    @around(module, "record_event_duration_secs")
    def say(original: Any, event: str, duration: float, **more: Any) -> Any:
        if event.startswith("/jax/core/compile/"):
            end, name = time_ns(), str(more.get("fun_name", ""))
            if event.endswith("jaxpr_trace_duration"):
                _look_why(name)
            # Of a function `step`, XLA compiles `jit(step)`.
            inner = name.partition("(")[2].rstrip(")") or name
            what = word(": ".join(filter(None, (name, _whys.get(inner, "")))))
            record(end - int(duration * 1e9), end, what, COMPILATION)
        return original(event, duration, **more)


_seen: "dict[Any, tuple[int, dict[str, str]]]" = {}
"""By the code of a function that is compiled: its id, and its arguments, as they were last."""
_whys: "dict[str, str]" = {}
"""Why functions were compiled again, by name: the first reason for each that changes."""
_reasons: "dict[Any, str]" = {}


def _look_why(name: str) -> None:
    """Find out which arguments of a function differ from those that it was compiled for before."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "cache_miss":
        frame = frame.f_back
    with Suppress(Exception):
        if frame is None:
            return
        held = frame.f_locals
        function = held["fun"]
        code = getattr(function, "__code__", function)
        now = id(function), _described(held["args"], held["kwargs"], code, held["jit_info"])
        before = _seen.get(code)
        _seen[code] = now
        if before is None:
            return
        changed = [key for key in now[1] if now[1][key] != before[1].get(key)]
        said = [f"{key} was {before[1].get(key, 'not given')}, is {now[1][key]}" for key in changed]
        if not changed and now[0] != before[0]:
            said = ["it is another function each time"]
        # The same words each time: all of them are kept.
        _whys[name] = _reasons.setdefault((code, tuple(changed)), "; ".join(said)[:160])


def _described(args: Any, keywords: Any, code: Any, how: Any) -> "dict[str, str]":
    """Return arguments as JAX tells them apart: arrays by type and shape, static ones by value."""
    names = getattr(code, "co_varnames", ())
    described = {}
    for at, value in (*enumerate(args), *keywords.items()):
        key = names[at] if isinstance(at, int) and at < len(names) else str(at)
        static = at in (how.static_argnums or ()) or key in (how.static_argnames or ())
        if static:
            described[f"static argument {key}"] = repr(value)[:60]
        else:
            described[f"argument {key}"] = _shape(value)
    return described


def _shape(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shape(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shape, value))})"
    return type(value).__name__


PATCHES = [
    ("jax._src.monitoring", compilations),
    ("jax._src.profiler", profiler),
]
