"""Report of a comparison as text, Markdown, CSV and JSON."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain, takewhile
from typing import Final

from rich.text import Text

from gputrace.analyzers.compare import NARROW
from gputrace.analyzers.compare.results import (
    Change,
    ClassChange,
    Comparison,
    FindingChange,
    GpuPair,
    KernelChange,
    Pair,
    Scaling,
    ScalingRow,
    Worst,
)
from gputrace.analyzers.kernel_names import short_name
from gputrace.model.results import Breakdown
from gputrace.report import render_as
from gputrace.report.csv import render_rows
from gputrace.report.json import one_line, plain
from gputrace.report.markdown import escape, render_table
from gputrace.report.tables import CLASS_NAMES, Table
from gputrace.report.text import open_console, print_table, said, without_blanks
from gputrace.sanitize import sentence
from gputrace.units import format_ns, format_share

FORMATS: Final = {
    "text": "gputrace.report.comparison.render_text",
    "json": "gputrace.report.comparison.render_json",
    "markdown": "gputrace.report.comparison.render_markdown",
    "csv": "gputrace.report.comparison.render_csv",
}


def render(comparison: Comparison, form: str) -> str:
    """Render a comparison in one of `FORMATS`; raise UsageError for any other."""
    return render_as(comparison, form, FORMATS)


_STYLES: Final = {"faster": "bold green", "slower": "bold red", "same": "green"}
_NOTES: Final = {"appeared": "red", "gone": "green", "stayed": "yellow"}
_BESIDE_NAMES: Final = 56
"""Terminal columns that the figures of a kernel take."""


def render_text(comparison: Comparison, width: int = 80, color: bool = False) -> str:
    """Render text at most ``width`` columns wide; with ANSI escape sequences if ``color``."""
    out = io.StringIO()
    console = open_console(out, width, color)
    console.print(said(verdict(comparison), _STYLES.get(comparison.verdict, "bold")))
    for run in comparison.runs:
        more = f" and {len(run.paths) - 1} more" if len(run.paths) > 1 else ""
        console.print(said(f"  {run.label}: {run.paths[0]}{more}", "dim"), soft_wrap=True)
    console.print()
    for table in tables(comparison, max(width - _BESIDE_NAMES, 16)):
        print_table(console, table)
    for heading, note in notes(comparison):
        console.print(Text.assemble((f"{heading}: ", _NOTES.get(heading, "dim")), sentence(note)))
    return without_blanks(out)


_NAME_WIDTH: Final = 60


def render_markdown(comparison: Comparison) -> str:
    """Render GitHub Markdown; names from the traces are escaped."""
    runs = [f"- {escape(run.label)}: {escape(run.paths[0])}" for run in comparison.runs]
    others = [f"- {heading}: {escape(note)}" for heading, note in notes(comparison)]
    parts = [
        f"**{escape(verdict(comparison))}**",
        "\n".join(runs),
        *map(render_table, tables(comparison, _NAME_WIDTH)),
        "\n".join(others),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


_CLASSES: Final = ("name", *(f.name for f in fields(Change)), "a_share", "b_share")
_RUNS: Final = tuple(field.name for field in fields(ScalingRow) if field.name != "losses")


def render_csv(comparison: Comparison) -> str:
    """Render RFC 4180 CSV with a header line; times in nanoseconds, unknown values empty."""
    if comparison.scaling is not None:
        return render_rows(_RUNS, comparison.scaling.rows)
    pair = comparison.pair
    if pair is None:
        return render_rows(("label", "gpus", "span_ns"), comparison.runs)
    classes = list(pair.classes)
    if pair.step is not None:
        step = {field.name: getattr(pair.step, field.name) for field in fields(Change)}
        total = ClassChange(
            **step, name="total", a_share=1.0, b_share=1.0, a_worst=None, b_worst=None
        )
        classes.insert(0, total)
    return render_rows(_CLASSES, classes)


def render_json(comparison: Comparison) -> str:
    """Render one line of JSON, text as UTF-8."""
    return one_line(plain(comparison))


NAMES: Final = CLASS_NAMES | {
    "host_data": "(host in loader)",
    "communication_wait": "(wait in comm.)",
}
"""Names of the classes, and in brackets of times beside them or part of one."""
UNITS: Final = {"step": "a step", "iteration": "an iteration", "span": "the span"}
_LOOPS: Final = {"training": "steps", "iterations": "iterations", "none": "steps"}
_MOST_KERNELS: Final = 8
_MOST_GPUS: Final = 2
_LEAST_SHARE: Final = 0.001
_OUTSTANDING: Final = 1.05
"""Ratio to the mean from which the GPU with most of a class is shown."""


def verdict(comparison: Comparison) -> str:
    """Return the message as a sentence; a label at its beginning keeps its case."""
    message = comparison.message
    labelled = any(message.startswith(run.label) for run in comparison.runs)
    return (message if labelled else message[0].upper() + message[1:]) + "."


def tables(comparison: Comparison, width: int) -> Iterator[Table]:
    """Yield all tables with content; kernel names are cut at ``width``."""
    yield runs_table(comparison)
    pair = comparison.pair
    if comparison.scaling is not None:
        yield from _scaling_tables(comparison, comparison.scaling)
        return
    if pair is None:
        return
    yield classes_table(comparison, pair)
    if len(pair.gpus) > 1 or comparison.unit != "step":
        yield from gpus_tables(comparison, pair)
    yield from kernels_table(comparison, pair, width)


def runs_table(comparison: Comparison) -> Table:
    """Tabulate the runs: GPUs, measured steps and step times."""
    batch = any(run.throughput for run in comparison.runs)
    rows = tuple(
        (
            run.label,
            str(run.gpus),
            f"{run.steps} {_LOOPS[run.steps_kind]}",
            *(time_or_dash(ns) for ns in (run.mean_ns, run.p50_ns, run.p95_ns)),
            *([_rate(run.throughput)] if batch else []),
        )
        for run in comparison.runs
    )
    header = ("", "GPUs", "measured", "mean", "p50", "p95", *(["samples/s"] if batch else []))
    return Table("The runs", header, rows)


def classes_table(comparison: Comparison, pair: Pair) -> Table:
    """Tabulate each class in both runs: difference, bounds, and whether it changed."""
    a, b = (run.label for run in comparison.runs)
    if comparison.unit == "span":
        shares = tuple(
            (
                NAMES[row.name],
                format_share(row.a_share, 1),
                format_share(row.b_share, 1),
                f"{100 * (row.b_share - row.a_share):+.1f} points",
            )
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
    """Tabulate few GPUs one by one; for many, the GPU with most of each class."""
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
    """Tabulate the kernels that changed; without steps, those whose shares differ most."""
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
    """Tabulate the kernels whose shares of the span differ most."""
    a, b = comparison.runs

    def shares(row: KernelChange) -> tuple[float, float]:
        return row.a_ns / max(a.span_ns, 1), row.b_ns / max(b.span_ns, 1)

    def apart(row: KernelChange) -> float:
        return abs(shares(row)[1] - shares(row)[0])

    far = [row for row in pair.kernels if apart(row) >= _LEAST_SHARE]
    shown = sorted(far, key=apart, reverse=True)[:_MOST_KERNELS]
    rows = tuple(
        (name, *(format_share(share, 1) for share in shares(row)))
        for name, row in zip(short_kernels([k.name for k in shown], width), shown, strict=True)
    )
    if rows:
        yield Table("Kernels whose shares of the span differ most", ("", a.label, b.label), rows)


def notes(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield findings and caveats, each with its heading."""
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
        _outcome(row, step),
    )


def _outcome(row: Change, step: int) -> str:
    """Return ``more``, ``less``, ``same``, or ``noise`` where the bounds allow a change."""
    if row.changed is None or row.low_ns is None or row.high_ns is None:
        return "?"
    if row.changed:
        return "more" if row.difference_ns > 0 else "less"
    return "same" if max(-row.low_ns, row.high_ns) <= NARROW * step else "noise"


def _outstanding(row: ClassChange) -> bool:
    pairs = ((row.a_worst, row.a_ns), (row.b_worst, row.b_ns))
    matters = max(row.a_share, row.b_share) >= 0.01
    return matters and any(w is not None and w.ns > _OUTSTANDING * mean for w, mean in pairs)


def format_bounds(low: int | None, high: int | None) -> str:
    """Format ``-0.31 to +1.20 ms``, in the unit that suits the larger bound."""
    if low is None or high is None:
        return "unknown"
    size = max(abs(low), abs(high))
    units = (("s", 10**9), ("ms", 10**6), ("us", 10**3))
    unit, scale = next((pair for pair in units if size >= pair[1]), ("ns", 1))
    digits = 0 if size / scale >= 100 or scale == 1 else 1 if size / scale >= 10 else 2
    return f"{low / scale:+.{digits}f} to {high / scale:+.{digits}f} {unit}"


def signed(ns: int) -> str:
    """Format a difference: ``+1.20 ms``, ``-310 us``, ``0``."""
    return ("+" if ns > 0 else "") + format_ns(ns) if ns else "0"


def time_or_dash(ns: int | None) -> str:
    """Format a time; a dash for none."""
    return "–" if not ns else format_ns(ns)


def _rate(a_second: float | None) -> str:
    """Format samples per second; a dash where the batch size is unknown."""
    if a_second is None:
        return "–"
    return f"{a_second:,.0f}" if a_second >= 100 else f"{a_second:.3g}"


def mean(row: Breakdown, name: str) -> str:
    """Format the mean time of a class, or of all (``total``), per step."""
    amount = row.total_ns if name == "total" else row.of(name)
    return time_or_dash(round(amount / max(row.steps, 1)))


def worst(gpu: Worst | None) -> tuple[str, str]:
    """Return the time of the GPU with most of a class, and its label."""
    if gpu is None:
        return "–", ""
    return time_or_dash(gpu.ns), f"rank {gpu.rank}" if gpu.gpu is None else f"gpu {gpu.gpu}"


def arrow(a: str, b: str) -> str:
    """Format ``1.2 → 1.4 ms``; one value where both are the same."""
    if a == b:
        return a
    if a.rpartition(" ")[2] == b.rpartition(" ")[2] and " " in a:
        a = a.rpartition(" ")[0]
    return f"{a} → {b}"


def each(row: KernelChange) -> str:
    """Format the median of one launch in both runs; the status if only one run has it."""
    if row.a_median_ns is None or row.b_median_ns is None:
        return row.status
    return arrow(format_ns(row.a_median_ns), format_ns(row.b_median_ns))


def short_kernels(names: Sequence[str], width: int) -> list[str]:
    """Cut names at a width; names that would look the same show where they differ."""
    short = [short_kernel(name, width) for name in names]
    return [
        text if short.count(text) == 1 else _parted(name, [n for n in names if n != name], width)
        for name, text in zip(names, short, strict=True)
    ]


def _parted(name: str, others: Sequence[str], width: int) -> str:
    """Return the function's name and what follows the longest prefix shared with another name."""
    prefixes = (takewhile(lambda at: at[0] == at[1], zip(name, o, strict=False)) for o in others)
    same = max(len(list(prefix)) for prefix in prefixes)
    start = same - len(re.split(r"[\W_]", name[:same])[-1])
    head = short_kernel(name, width).split(" ")[0].rstrip("…")[: width // 2]
    text = f"{head}…{name[start:]}"
    return text if len(text) <= width else text[: width - 1] + "…"


def short_kernel(name: str, width: int) -> str:
    """Return the distinctive part of a name, cut with ``…`` at a width."""
    text = short_name(name)
    return text if len(text) <= width else text[: width - 1] + "…"


_MOST_ACROSS: Final = 5
_SOURCES: Final = {
    "batch": "by the batch given",
    "input_bytes": "by the bytes of the input copies",
    "kernels": "by the time of the kernels",
    "none": "",
}


def _scaling_tables(comparison: Comparison, scaling: Scaling) -> Iterator[Table]:
    """Tabulate speed-up and efficiency, then what each class adds to the ideal step."""
    yield _speeds(scaling)
    rows = [row for row in scaling.rows if row.losses][-_MOST_ACROSS:]
    if rows:
        yield _losses(comparison, rows)


def _speeds(scaling: Scaling) -> Table:
    base = scaling.rows[0]
    body = tuple(
        (
            row.label,
            str(row.gpus),
            format_ns(row.mean_ns),
            "–" if row.speed_up is None else f"{row.speed_up:.2f}x",
            ""
            if row is base or row.speed_up_low is None
            else f"{row.speed_up_low:.2f}x to {row.speed_up_high:.2f}x",
            "–" if row.efficiency is None else f"{row.efficiency:.0%}",
        )
        for row in scaling.rows
    )
    header = ("", "GPUs", "step", "speed-up", "95% bounds", "efficiency")
    return Table(_title(scaling), header, body)


def _title(scaling: Scaling) -> str:
    if scaling.kind == "same":
        return "Speed, beside the first"
    if scaling.kind == "unknown":
        return "Scaling: nothing tells how much work a step does"
    stays = "a GPU" if scaling.kind == "weak" else "a step"
    source = _SOURCES[scaling.source]
    return f"{scaling.kind.capitalize()} scaling: the work of {stays} stays ({source})"


def _losses(comparison: Comparison, rows: list[ScalingRow]) -> Table:
    """Tabulate losses, a row per class, a column per run; those within the noise in brackets."""
    names = {loss.name: 0 for row in rows for loss in row.losses}
    lost = [{loss.name: loss for loss in row.losses} for row in rows]
    shown = [n for n in NAMES if n in names and any(n in of and abs(of[n].ns) > 0 for of in lost)]
    body = [
        (NAMES[name], *(_lost(of[name].ns, of[name].changed) if name in of else "–" for of in lost))
        for name in shown
    ]
    totals = (_lost(row.mean_ns - (row.ideal_ns or 0), True) for row in rows)
    body.append(("total", *totals))
    unit = UNITS[comparison.unit]
    title = f"What {unit} takes beyond the ideal (in brackets: small, or within the noise)"
    return Table(title, ("", *(row.label for row in rows)), tuple(body))


def _lost(ns: int, changed: bool | None) -> str:
    text = signed(ns) if ns else format_ns(ns)
    return text if changed else f"({text})"
