"""The tables of a report, as text cells that every view lays out in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gputrace.analyzers.results import Analysis, Breakdown, Gap
from gputrace.units import format_ns, format_share

CLASS_NAMES: Final = {
    "compute": "compute",
    "communication": "communication",
    "h2d": "host to device",
    "other_copy": "other copies",
    "memset": "memset",
    "recorder": "idle: recorder",
    "data_feeding": "idle: data feeding",
    "sync": "idle: sync",
    "alloc": "idle: allocation",
    "launch": "idle: launch",
    "other_idle": "idle",
}
"""What people call the classes, in the order of the partition."""

_SHORT_NAMES: Final = {
    "compute": "compute",
    "communication": "comm",
    "h2d": "h2d",
    "other_copy": "copies",
    "memset": "memset",
    "recorder": "recorder",
    "data_feeding": "data",
    "sync": "sync",
    "alloc": "alloc",
    "launch": "launch",
    "other_idle": "idle",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A heading, column names, and rows of cells; the first column is text, the rest numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def verdict(analysis: Analysis) -> str:
    """The first finding's message, as a sentence."""
    if not analysis.findings:
        return "Nothing stands out: no class of time is worth a change."
    message = analysis.findings[0].message
    return message[0].upper() + message[1:] + "."


def gpu_label(row: Breakdown | Gap, analysis: Analysis) -> str:
    """``gpu 3``, with the rank where there are several, ``device 3`` for an unknown card."""
    known = {(total.gpu, total.rank): total.gpu_known for total in analysis.gpus}
    word = "gpu" if known.get((row.gpu, row.rank), True) else "device"
    several = len({total.rank for total in analysis.gpus}) > 1
    return f"{word} {row.gpu}" + (f" rank {row.rank}" if several else "")


def classes_table(analysis: Analysis) -> Table:
    """Classes down, GPUs across: time and share of each; for a few GPUs."""
    rows = analysis.breakdown
    names = _present(rows)
    body = [
        (label, *(cell for row in rows for cell in _cells(row.of(name), row.total_ns)))
        for name, label in names.items()
    ]
    body.append(("total", *(cell for row in rows for cell in (format_ns(row.total_ns), ""))))
    header = ("", *(cell for row in rows for cell in (gpu_label(row, analysis), "")))
    return Table(_title(analysis), header, tuple(body))


def gpus_table(analysis: Analysis) -> Table:
    """GPUs down, classes across, shares only; for many GPUs."""
    rows = analysis.breakdown
    names = _present(rows)
    body = tuple(
        (
            gpu_label(row, analysis),
            format_ns(row.total_ns),
            *(format_share(row.of(name), row.total_ns) for name in names),
        )
        for row in rows
    )
    header = ("", "total", *(_SHORT_NAMES[name] for name in names))
    return Table(_title(analysis), header, body)


def gaps_table(analysis: Analysis, most: int) -> Table:
    """The largest gaps."""
    gaps = analysis.gaps
    shown = gaps.largest[:most]
    body = tuple(
        (
            gpu_label(gap, analysis),
            format_ns(gap.length_ns),
            f"{(gap.start_ns - analysis.origin_ns) / 1e9:.6f} s",
            "" if gap.step is None else str(gap.step),
            gap.cause.replace("_", " "),
        )
        for gap in shown
    )
    title = f"Largest of {gaps.count:,} gaps ({format_ns(gaps.total_ns)} in all)"
    return Table(title, ("gpu", "length", "from", "step", "cause"), body)


def notes(analysis: Analysis) -> Iterator[str]:
    """What a reader must know to trust the figures, a line each."""
    if any(not total.gpu_known for total in analysis.gpus):
        yield "The trace does not say which physical cards these are; CUDA ordinals are shown."
    for reason, rows in analysis.dropped_rows.items():
        yield f"{rows:,} rows left out: {reason}."
    yield from analysis.warnings


def _title(analysis: Analysis) -> str:
    steps = {row.steps for row in analysis.breakdown}
    if steps == {0}:
        return f"Where the time went (whole span, {format_ns(analysis.span_ns)})"
    return f"Where the time went ({max(steps)} steady steps)"


def _present(rows: Sequence[Breakdown]) -> dict[str, str]:
    """Labels of the classes of which some GPU has some; compute and idle always."""
    always = ("compute", "h2d", "other_idle")
    return {
        name: label
        for name, label in CLASS_NAMES.items()
        if name in always or any(row.of(name) for row in rows)
    }


def _cells(part: int, whole: int) -> tuple[str, str]:
    return (format_ns(part) if part else "–", format_share(part, whole) if part else "")
