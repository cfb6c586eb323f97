"""Report of one step against the median step, for every format."""

from __future__ import annotations

import re
from typing import Final

from gputrace.model.comparison import StepExplanation, StepOnGpu, StepPart
from gputrace.model.struct import Column
from gputrace.report import Document, Limits, Line, Records, attributes, declared, present
from gputrace.report.wording import capital, gpu_name, kernel_labels
from gputrace.units import format_ns, format_share

_LEAST_PART: Final = 0.005
"""Difference of a cause, as a fraction of the median step, from which it is listed."""


def _name(row: StepOnGpu) -> str:
    return gpu_name(row.gpu, row.rank, known=True, ranked=row.gpu not in (None, row.rank))


def worth_listing(row: StepOnGpu) -> list[StepPart]:
    """Return the causes by which a step differs from the median step beyond noise."""
    least = _LEAST_PART * row.usual_ns
    return [part for part in row.parts if abs(part.more_ns) >= least]


def document(result: StepExplanation, limits: Limits) -> Document:
    """Return the answer, what the step differs in from the median step, and the other GPUs."""
    first, notes = result.gpus[0], []
    if (gap := first.longest_gap) is not None:
        share = format_share(gap.length_ns, first.total_ns)
        evidence = f": {gap.evidence}" if gap.evidence else ""
        notes.append(f"The longest gap in it takes {format_ns(gap.length_ns)} ({share}){evidence}.")
    elif first.line is not None:
        place, _, counts = first.line.rpartition(" (")
        every = re.match(r"(\d+) of \1 ", counts)
        if every is None:
            notes.append(f"Most samples of it are at {first.line}.")
        elif every[1] == "1":
            notes.append(f"Its one sample is at {place}.")
        else:
            notes.append(f"All {every[1]} samples of it are at {place}.")
    names = [kernel.name for kernel in first.kernels]
    labels = dict(zip(names, kernel_labels(names, limits.width or 80), strict=True))
    gpus = result.gpus if len(result.gpus) > 1 else ()
    notes.append(f"What to do: {result.advice}." if result.advice else "Nothing stands out in it.")
    tables = (
        declared(
            f"What step {result.step} differs in from step {first.usual_step}",
            worth_listing(first),
        ),
        declared("Kernels that differ", first.kernels, Column("", lambda each: labels[each.name])),
        declared("On each GPU", gpus, Column("", _name)),
    )
    return Document(
        head=(Line(f"{capital(result.message)}."),),
        tables=present(tables),
        notes=tuple(Line(note) for note in notes),
    )


def records(result: StepExplanation) -> Records:
    """Return a row for each GPU and cause."""
    names = ("cause", "ns", "usual_ns", "more_ns")
    rows = (
        (result.step, row.gpu, row.rank, *part)
        for row in result.gpus
        for part in attributes(row.parts, names)
    )
    return ("step", "gpu", "rank", *names), rows
