"""How much work a step does: samples where a person says so, else what the input copies tell."""

from __future__ import annotations

from math import log
from typing import Final

from gputrace.analyzers.compare.run import Run

_EQUAL: Final = 0.02
"""Input copies that differ by less bring the same batch."""
_AGREE: Final = 0.5
"""How far the kernels' time may be from growing as the input does, on a logarithmic scale."""


def kernel_ns(run: Run) -> float:
    """Time of the kernels that compute, a step and GPU."""
    return sum(use.total.value for use in run.kernels if not use.communication)


def work_ratio(a: Run, b: Run) -> tuple[float, str, str]:
    """Samples in a step of B for each in one of A, what tells it, and a warning or nothing.

    Input copies of other sizes mean another batch only where the kernels agree: they may be of
    another type, or of pictures of another size.
    """
    if a.samples and b.samples:
        return b.samples / a.samples, "batch", ""
    equal = len(b.keys) / len(a.keys)
    if not a.input_bytes or not b.input_bytes:
        return equal, "assumed", ""
    ratio = b.input_bytes / a.input_bytes
    if abs(ratio / equal - 1) <= _EQUAL:
        return equal, "input_bytes", ""
    bytes_of_gpu = log(ratio / equal)
    work = log(max(kernel_ns(b), 1) / max(kernel_ns(a), 1))
    if abs(work - bytes_of_gpu) <= _AGREE * abs(bytes_of_gpu):
        return ratio, "input_bytes", ""
    sizes = f"{a.input_bytes / 1e6:,.2f} MB and {b.input_bytes / 1e6:,.2f} MB"
    return (
        equal,
        "assumed",
        f"The input copies of a step bring {sizes}, and the kernels do not tell whether the batch "
        "or only its type differs: steps are taken as equal work; --batch says otherwise",
    )
