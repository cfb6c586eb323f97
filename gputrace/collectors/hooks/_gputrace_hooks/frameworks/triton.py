"""Triton (tried with 3.x): compilations of kernels, and the search for their fastest configuration.

Only those in steps are recorded: Inductor has processes that do nothing else. A compilation costs
a few µs; a call of a compiled kernel costs nothing.
"""

from typing import Any

from ..compilation import times_compilations


def compilations(module: Any) -> None:
    """Time the compiling of kernels."""
    times_compilations(module, "compile", lambda source, *_: "Triton " + _name_of(source))


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
