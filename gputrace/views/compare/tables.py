"""The tables of a comparison, as text cells that every view lays out in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from gputrace.analyzers.compare.results import (
    Change,
    ClassChange,
    Comparison,
    FindingChange,
    GpuPair,
    KernelChange,
    Pair,
)
from gputrace.analyzers.compare.verdict import NARROW
from gputrace.units import format_ns
from gputrace.views.compare.cells import (
    arrow,
    each,
    format_bounds,
    mean,
    percent,
    points,
    rate,
    signed,
    time_or_dash,
    worst,
)
from gputrace.views.compare.names import short_kernels
from gputrace.views.tables import CLASS_NAMES, Table

NAMES: Final = CLASS_NAMES | {
    "host_data": "(host in loader)",
    "communication_wait": "(wait in comm.)",
}
"""The classes, and in brackets what is beside them or a part of one."""
UNITS: Final = {"step": "a step", "iteration": "an iteration", "span": "the span"}
_LOOPS: Final = {"training": "steps", "iterations": "iterations", "none": "steps"}
_MOST_KERNELS: Final = 8
_MOST_GPUS: Final = 2
_LEAST_SHARE: Final = 0.001
_OUTSTANDING: Final = 1.05
"""How much more than the mean the GPU with most of a class must have to be shown."""


def verdict(comparison: Comparison) -> str:
    """The message, as a sentence; a label that it begins with stays as it is."""
    message = comparison.message
    labelled = any(message.startswith(run.label) for run in comparison.runs)
    return (message if labelled else message[0].upper() + message[1:]) + "."


def tables(comparison: Comparison, width: int) -> Iterator[Table]:
    """All tables that there is something to say in; names of kernels get the width given."""
    yield runs_table(comparison)
    pair = comparison.pair
    if pair is None or comparison.scaling is not None:
        return
    yield classes_table(comparison, pair)
    if len(pair.gpus) > 1 or comparison.unit != "step":
        yield from gpus_tables(comparison, pair)
    yield from kernels_table(comparison, pair, width)


def runs_table(comparison: Comparison) -> Table:
    """A row per run: what it is and how long its steps take."""
    batch = any(run.throughput for run in comparison.runs)
    rows = tuple(
        (
            run.label,
            str(run.gpus),
            f"{run.steps} {_LOOPS[run.steps_kind]}",
            *(time_or_dash(ns) for ns in (run.mean_ns, run.p50_ns, run.p95_ns)),
            *([rate(run)] if batch else []),
        )
        for run in comparison.runs
    )
    header = ("", "GPUs", "measured", "mean", "p50", "p95", *(["samples/s"] if batch else []))
    return Table("The runs", header, rows)


def classes_table(comparison: Comparison, pair: Pair) -> Table:
    """Each class in both runs, the difference, its bounds, and whether that is a change."""
    a, b = (run.label for run in comparison.runs)
    if comparison.unit == "span":
        shares = tuple(
            (NAMES[row.name], percent(row.a_share), percent(row.b_share), points(row))
            for row in pair.classes
        )
        title = f"Shares of the whole span (mean over the GPUs); {comparison.unit_reason}"
        return Table(title, ("", a, b, "change"), shares)
    step = pair.step.a_ns if pair.step is not None else 0
    rows = tuple((NAMES[row.name], *_cells(row, step)) for row in pair.classes)
    total = () if pair.step is None else (("total", *_cells(pair.step, step)),)
    title = f"Where the time of {UNITS[comparison.unit]} goes (mean over steps and GPUs)"
    return Table(title, ("", a, b, "change", "95% bounds", ""), (*rows, *total))


def gpus_tables(comparison: Comparison, pair: Pair) -> Iterator[Table]:
    """A few GPUs one by one; of many, the one that has most of each class."""
    both = [gpu for gpu in pair.gpus if gpu.a is not None and gpu.b is not None]
    if both and len(pair.gpus) <= _MOST_GPUS:
        yield _few_gpus(comparison, both)
        return
    rows = tuple(
        (NAMES[row.name], *worst(row.a_worst), *worst(row.b_worst))
        for row in pair.classes
        if _outstanding(row)
    )
    if rows:
        a, b = (run.label for run in comparison.runs)
        title = f"The GPU that has most of a class ({UNITS[comparison.unit]})"
        yield Table(title, ("", a, "on", b, "on"), rows)


def _few_gpus(comparison: Comparison, gpus: Sequence[GpuPair]) -> Table:
    a, b = (run.label for run in comparison.runs)
    rows = [row for gpu in gpus for row in (gpu.a, gpu.b) if row is not None]
    names = [name for name in CLASS_NAMES if any(row.of(name) for row in rows)]
    body = [(CLASS_NAMES[name], *(mean(row, name) for row in rows)) for name in names]
    body.append(("total", *(mean(row, "total") for row in rows)))
    header = chain.from_iterable((f"{_gpu(gpu)} {a}", f"{_gpu(gpu)} {b}") for gpu in gpus)
    unit = "a step" if any(row.steps for row in rows) else "the whole span"
    return Table(f"GPU by GPU ({unit})", ("", *header), tuple(body))


def _gpu(pair: GpuPair) -> str:
    known = all(row is None or row.gpu_known for row in (pair.a, pair.b))
    return f"rank {pair.rank}" if pair.gpu is None else f"{'gpu' if known else 'device'} {pair.gpu}"


def kernels_table(comparison: Comparison, pair: Pair, width: int) -> Iterator[Table]:
    """The kernels that changed; by share, all that differ most, where there are no steps."""
    if comparison.unit == "span":
        yield from _kernels_by_share(comparison, pair, width)
        return
    changed = [row for row in pair.kernels if row.changed]
    if not changed:
        return
    a, b = comparison.runs
    new, gone = (sum(row.status == word for row in pair.kernels) for word in ("new", "gone"))
    title = f"Kernels: {len(changed)} of {len(pair.kernels)} changed"
    title += f", {new} new" if new else ""
    title += f", {gone} gone" if gone else ""
    title += f" ({UNITS[comparison.unit]} and GPU)"
    shown = changed[:_MOST_KERNELS]
    rows = tuple(
        (
            name,
            time_or_dash(row.a_ns) if row.a_count else "–",
            time_or_dash(row.b_ns) if row.b_count else "–",
            signed(row.difference_ns),
            arrow(f"{row.a_count:.3g}", f"{row.b_count:.3g}"),
            each(row),
        )
        for name, row in zip(short_kernels([k.name for k in shown], width), shown, strict=True)
    )
    yield Table(title, ("", a.label, b.label, "change", "count", "each"), rows)


def _kernels_by_share(comparison: Comparison, pair: Pair, width: int) -> Iterator[Table]:
    """Those whose shares of the span differ most."""
    a, b = comparison.runs

    def shares(row: KernelChange) -> tuple[float, float]:
        return row.a_ns / max(a.span_ns, 1), row.b_ns / max(b.span_ns, 1)

    def apart(row: KernelChange) -> float:
        return abs(shares(row)[1] - shares(row)[0])

    far = [row for row in pair.kernels if apart(row) >= _LEAST_SHARE]
    shown = sorted(far, key=apart, reverse=True)[:_MOST_KERNELS]
    rows = tuple(
        (name, *(percent(share) for share in shares(row)))
        for name, row in zip(short_kernels([k.name for k in shown], width), shown, strict=True)
    )
    if rows:
        yield Table("Kernels whose shares of the span differ most", ("", a.label, b.label), rows)


def notes(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """What to know besides, each with its heading."""
    pair = comparison.pair if comparison.scaling is None else None
    for finding in pair.findings if pair is not None else ():
        yield finding.status, _finding(finding)
    kernels = pair.kernels if pair is not None and comparison.unit != "span" else ()
    if kernels and not any(kernel.changed for kernel in kernels):
        yield "kernels", f"of {len(kernels)}, none differs by more than the noise and 2 %."
    if comparison.unit == "iteration":
        yield "note", f"Iterations are compared: {comparison.unit_reason}."
    for warning in comparison.warnings:
        yield "note", f"{warning}."


def _finding(finding: FindingChange) -> str:
    if finding.status != "stayed":
        return f"{finding.id}: {finding.message}."
    if not finding.a_impact_ns and not finding.b_impact_ns:
        return f"{finding.id}."
    impacts = arrow(format_ns(finding.a_impact_ns or 0), format_ns(finding.b_impact_ns or 0))
    return f"{finding.id} ({impacts})."


def _cells(row: Change, step: int) -> tuple[str, ...]:
    return (
        time_or_dash(row.a_ns),
        time_or_dash(row.b_ns),
        signed(row.difference_ns),
        format_bounds(row.low_ns, row.high_ns),
        _told(row, step),
    )


def _told(row: Change, step: int) -> str:
    """``more``, ``less``, ``same``, or ``noise`` where the bounds leave room for a change."""
    if row.changed is None or row.low_ns is None or row.high_ns is None:
        return "?"
    if row.changed:
        return "more" if row.difference_ns > 0 else "less"
    return "same" if max(-row.low_ns, row.high_ns) <= NARROW * step else "noise"


def _outstanding(row: ClassChange) -> bool:
    pairs = ((row.a_worst, row.a_ns), (row.b_worst, row.b_ns))
    matters = max(row.a_share, row.b_share) >= 0.01
    return matters and any(w is not None and w.ns > _OUTSTANDING * mean for w, mean in pairs)
