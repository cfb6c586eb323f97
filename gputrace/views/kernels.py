"""The table of the kernels that take most time."""

from __future__ import annotations

from typing import Final

from gputrace.analyzers.kernels import Kernels, KernelUse
from gputrace.analyzers.results import Analysis
from gputrace.units import format_ns, format_share
from gputrace.views.tables import Table

_WORTH: Final = 0.001
"""Part of the time below which a kernel is not shown."""


def kernels_table(analysis: Analysis, most: int, longest: int = 80) -> Table | None:
    """The kernels that take most time, over all GPUs; None where none takes any to speak of.

    Names longer than ``longest`` are cut in the middle: their ends tell kernels apart.
    """
    kernels = analysis.kernels
    shown = [use for use in kernels.top[:most] if use.share >= _WORTH] if kernels else []
    if kernels is None or not shown:
        return None
    rows = tuple(_row(use, kernels, longest) for use in shown)
    loop = "a step" if analysis.steps.kind == "training" else "an iteration"
    where = loop if kernels.steps else "in all"
    of = f"{len(shown)} of {kernels.distinct}, {where} on a GPU; tc: on tensor cores"
    head = ("", "family", "tc", "times", "median", "time", "")
    return Table(f"Kernels that take most time ({of})", head, rows)


def _row(use: KernelUse, kernels: Kernels, longest: int) -> tuple[str, ...]:
    each = kernels.steps or max(len(use.by_gpu), 1)
    count = use.count / each
    return (
        _cut(use.short, longest),
        use.family,
        {"unknown": "?"}.get(use.tensor_cores or "", use.tensor_cores or ""),
        f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.1f}",
        format_ns(use.median_ns),
        format_ns(use.total_ns / each),
        format_share(use.total_ns, kernels.total_ns),
    )


def _cut(name: str, longest: int) -> str:
    if len(name) <= longest:
        return name
    head = longest // 2
    return f"{name[:head]}…{name[len(name) - (longest - head - 1) :]}"
