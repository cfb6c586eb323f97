"""JAX (tried with 0.10 and 0.11): the steps that a program annotates, and compilations.

A step is a `jax.profiler.StepTraceAnnotation`, at 2 µs; how long parts of a compilation took is
what JAX says, at some µs each. The collector makes way for JAX's profiler.
"""

from typing import Any

from ..host_file import time_ns
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
            end, name = time_ns(), word(str(more.get("fun_name", "")))
            record(end - int(duration * 1e9), end, name, COMPILATION)
        return original(event, duration, **more)


PATCHES = [
    ("jax._src.monitoring", compilations),
    ("jax._src.profiler", profiler),
]
