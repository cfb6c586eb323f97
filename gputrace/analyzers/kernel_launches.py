"""Launches of one kernel, and which of them a kernel profiler should look at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from gputrace.analyzers.operations import GpuOperations, read_operations
from gputrace.errors import InputError, UsageError
from gputrace.model.events import Kind, distinct_ids
from gputrace.model.names import short, words_of_mangled
from gputrace.model.results import Analysis, GpuTotals, KernelUse
from gputrace.model.trace import FROM_THE_START, Progress, Trace

_MOST_WORDS: Final = 12
_WORD: Final = re.compile(r"\b(?:[A-Za-z_]\w*|[0-9]+)")
_PARAMETERS: Final = re.compile(r"\([^()]*\)")
_WRITTEN_DIFFERENTLY: Final = {
    *("void", "const", "volatile", "true", "false", "0", "1", "auto", "std", "__1", "operator"),
    *("anonymous", "namespace", "unnamed", "lambda", "instance"),
}
"""Words of a C++ name that depend on who made it readable."""


@dataclass(frozen=True, slots=True)
class Launches:
    """A kernel, and the launch of it to look at: one in a steady step on its busiest GPU."""

    kernel: KernelUse
    place: int
    """Its place by time, from 1."""
    gpu: int
    rank: int
    device: int
    """The CUDA ordinal in that rank's process."""
    pattern: str
    """An expression that finds the kernel in a readable name, whoever made it readable."""
    alike: int
    """Different kernels of the trace that it finds, this one among them."""
    skip: int
    """Launches on that device that it finds before the one to look at."""
    step: int | None
    """The step that the launch is in; None where none was found."""
    from_start: bool
    """True if the trace holds the run from its beginning, so that all launches are counted."""


def find_launches(
    trace: Trace, analysis: Analysis, which: str, progress: Progress | None = None
) -> Launches:
    """The kernel of a name, of a part of one, or of a place by time (``1`` takes most).

    Raises UsageError where there is none, or one that cannot be profiled alone.
    """
    place, use = _choose(analysis, trace.title, which)
    busiest = max(use.by_gpu, key=lambda one: one.total_ns)
    totals = next(t for t in analysis.gpus if (t.gpu, t.rank) == (busiest.gpu, busiest.rank))
    own = _operations(trace, totals, progress)
    pattern = pattern_of(use.name)
    of_process = own.events.process == own.gpu.process
    kernels = own.events.select((own.events.kind == Kind.KERNEL) & of_process)
    names = trace.names(distinct_ids(kernels.name))
    alike = {id for id, name in names.items() if re.search(pattern, _in_words(name))}
    ours = {id for id, name in names.items() if name == use.name}
    start, step = _from(analysis, totals)
    found = kernels.select(np.isin(kernels.name, sorted(alike)))
    wanted = np.isin(found.name, sorted(ours)) & (found.start >= start)
    skip = int(np.flatnonzero(wanted)[0]) if wanted.any() else 0
    return Launches(
        kernel=use,
        place=place,
        gpu=busiest.gpu,
        rank=busiest.rank,
        device=totals.device,
        pattern=pattern,
        alike=len({names[id] for id in alike}),
        skip=skip,
        step=step if wanted.any() else None,
        from_start=not own.windows or own.windows[0].start <= FROM_THE_START,
    )


def pattern_of(name: str) -> str:
    """An expression for the kernel's own name and then the words of its template arguments.

    What is in parentheses is left out: different tools write parameters differently (ncu has
    ``const T2 *`` where others have ``c10::BFloat16 const*``), and numbers, as ``(int)4``. It needs
    nothing that any two kinds of regular expressions disagree on.
    """
    function = short(name)
    clear = _in_words(name)
    rest = _without_parameters(clear[clear.find(function) + len(function) :])
    words = [word for word in _WORD.findall(rest) if word not in _WRITTEN_DIFFERENTLY]
    own = f"(^|[^A-Za-z0-9_]){re.escape(function)}([^A-Za-z0-9_]|$)"
    return ".*".join([own, *words[:_MOST_WORDS]])


def _in_words(name: str) -> str:
    """A name in which a pattern finds what it finds in the readable one."""
    return " ".join(words_of_mangled(name)) if name.startswith("_Z") else name


def _without_parameters(name: str) -> str:
    """Parentheses within others are taken out first."""
    found = 1
    while found:
        name, found = _PARAMETERS.subn("", name)
    return name


def _choose(analysis: Analysis, title: str, which: str) -> tuple[int, KernelUse]:
    top = analysis.kernels.top if analysis.kernels is not None else ()
    if not top:
        raise InputError(title, "no kernels in it; record a run on a GPU")
    if which.isdecimal():
        found = [(i, use) for i, use in enumerate(top, 1) if i == int(which)]
    else:
        found = _named(list(enumerate(top, 1)), which)
    if not found:
        shown = ", ".join(f"{i} {use.short}" for i, use in enumerate(top[:5], 1))
        raise UsageError(f"{title}: no kernel {which!r} among the {len(top)} longest: {shown}, …")
    place, use = found[0]
    if use.family == "communication":
        raise UsageError(
            f"{use.short} waits for other GPUs and cannot be profiled alone: ncu would hang; "
            "`gputrace analyze` tells of communication"
        )
    return place, use


def _named(all_of_them: list[tuple[int, KernelUse]], which: str) -> list[tuple[int, KernelUse]]:
    """Return the kernels of exactly that name, else those that contain it; the longest first."""
    exact = [pair for pair in all_of_them if which in (pair[1].name, pair[1].short)]
    return exact or [pair for pair in all_of_them if which.lower() in pair[1].name.lower()]


def _operations(trace: Trace, totals: GpuTotals, progress: Progress | None) -> GpuOperations:
    return next(
        own
        for own in read_operations(trace, progress)
        if (own.gpu.gpu, own.gpu.rank) == (totals.gpu, totals.rank)
    )


def _from(analysis: Analysis, totals: GpuTotals) -> tuple[int, int | None]:
    """From when on to look for a launch: the first steady step, and its number."""
    own = [
        (step.start_ns, step.step)
        for step in analysis.step_list
        if (step.gpu, step.rank, step.phase) == (totals.gpu, totals.rank, "steady")
    ]
    return min(own, default=(totals.start_ns, None))
