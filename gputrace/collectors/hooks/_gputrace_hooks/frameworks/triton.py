"""Triton (tried with 3.x): compilations of kernels, and the search for their fastest configuration;
where kernels are defined.

Only compilations in steps are recorded: Inductor has processes that do nothing else. One costs a
few µs; a call of a compiled kernel costs nothing.
"""

from typing import Any

from ..recorder import note_ours, note_source
from ..wrappers import call_after, times_compilations


def compilations(module: Any) -> None:
    """Time the compiling of kernels, and record where those are defined that are loaded."""
    times_compilations(module, "compile", lambda source, *_: "Triton " + _name_of(source))
    call_after(getattr(module, "CompiledKernel", None), "__init__", _is_loaded)


def _is_loaded(kernel: Any) -> None:
    """Record where a kernel is defined; Inductor's are compiled in other processes."""
    try:
        code = getattr(getattr(getattr(kernel.src, "fn", None), "fn", None), "__code__", None)
        if code is not None and not kernel.src.fn.__module__.startswith("torch._inductor."):
            name = kernel.metadata.name
            note_source(name, code.co_filename, code.co_firstlineno, code.co_name)
    except Exception:
        note_ours("naming a kernel's source")


def searches(module: Any) -> None:
    """Time the trial of each configuration of a kernel, with its compiling."""
    times_compilations(
        module.Autotuner, "_bench", lambda tuner, *_: "Triton's search for " + _name_of(tuner)
    )


def _name_of(source: Any) -> str:
    function = getattr(source, "fn", source)
    return str(getattr(function, "__name__", None) or getattr(source, "name", "kernel"))


PATCHES = [
    ("triton.compiler.compiler", compilations),
    ("triton.runtime.autotuner", searches),
]
