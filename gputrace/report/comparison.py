"""Report of a comparison as text, Markdown, CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Final

from rich.text import Text

from gputrace.analyzers.compare import NARROW, UNITS
from gputrace.model.comparison import (
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
from gputrace.report import render_as, render_rows
from gputrace.report.markdown_html import escape, render_table
from gputrace.report.tables import CLASS_NAMES, Table
from gputrace.report.text import open_console, print_table, room_for_names, said, without_blanks
from gputrace.report.wording import gpu_name, kernel_labels
from gputrace.units import format_change, format_ns, format_number, format_share

FORMATS: Final = {
    "text": "gputrace.report.comparison.render_text",
    "json": "gputrace.report.to_json",
    "markdown": "gputrace.report.comparison.render_markdown",
    "csv": "gputrace.report.comparison.render_csv",
}


def render(comparison: Comparison, form: str, width: int = 80, color: bool = False) -> str:
    """Render a comparison in one of `FORMATS`; raise UsageError for any other."""
    return render_as(comparison, form, FORMATS, width, color)


_STYLES: Final = {"faster": "bold green", "slower": "bold red", "same": "green"}
_NOTES: Final = {"appeared": "red", "gone": "green", "stayed": "yellow"}
_BESIDE_NAMES: Final = 56
"""Terminal columns that the figures of a kernel take."""


def render_text(comparison: Comparison, width: int = 80, color: bool = False) -> str:
    """Render text at most ``width`` columns wide; with ANSI escape sequences if ``color``."""
    console = open_console(width, color)
    console.print(said(verdict(comparison), _STYLES.get(comparison.verdict, "bold")))
    for run in comparison.runs:
        more = f" and {len(run.paths) - 1} more" if len(run.paths) > 1 else ""
        console.print(said(f"  {run.label}: {run.paths[0]}{more}", "dim"), soft_wrap=True)
    console.print()
    for table in tables(comparison, room_for_names(width, _BESIDE_NAMES)):
        print_table(console, table)
    for heading, note in notes(comparison):
        console.print(
            Text.assemble(
                (f"{heading}: ", _NOTES.get(heading.partition(",")[0], "dim")), said(note)
            )
        )
    return without_blanks(console)


def render_markdown(comparison: Comparison) -> str:
    """Render GitHub Markdown; names from the traces are escaped."""
    runs = [f"- {escape(run.label)}: {escape(run.paths[0])}" for run in comparison.runs]
    others = [f"- {heading}: {escape(note)}" for heading, note in notes(comparison)]
    parts = [
        f"**{escape(verdict(comparison))}**",
        "\n".join(runs),
        *map(render_table, tables(comparison, 60)),
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
    total = [] if pair.step is None else [asdict(pair.step)]
    totals = [SimpleNamespace(**row, name="total", a_share=1.0, b_share=1.0) for row in total]
    return render_rows(_CLASSES, [*totals, *pair.classes])


NAMES: Final = CLASS_NAMES | {
    "host_data": "(host in loader)",
    "communication_wait": "(wait in comm.)",
}
"""Names of the classes, and in brackets of times beside them or part of one."""
_MOST_CAUSES: Final = 8
_LEAST_CAUSE: Final = 0.005
"""Difference of a cause, as a fraction of the step, from which it is shown."""
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
    """Yield all tables with content; kernel names are at most ``width`` wide."""
    yield _runs_table(comparison)
    pair = comparison.pair
    if comparison.scaling is not None:
        yield _speeds_table(comparison.scaling)
        yield from _losses_table(comparison, comparison.scaling)
        return
    if pair is None:
        return
    yield _classes_table(comparison, pair)
    yield from _causes_table(comparison, pair)
    if len(pair.gpus) > 1 or comparison.unit != "step":
        yield from _gpus_table(comparison, pair)
    if comparison.unit == "span":
        yield from _kernels_by_share(comparison, pair, width)
    else:
        yield from _kernels_table(comparison, pair, width)


def _runs_table(comparison: Comparison) -> Table:
    """Tabulate the runs: GPUs, measured steps and step times."""
    header: tuple[str, ...] = ("", "GPUs", "measured", "mean", "p50", "p95", "samples/s")
    rows = tuple(
        (
            run.label,
            str(run.gpus),
            f"{run.steps} {'iterations' if run.steps_kind == 'iterations' else 'steps'}",
            *map(_time, (run.mean_ns, run.p50_ns, run.p95_ns)),
            _rate(run.throughput),
        )
        for run in comparison.runs
    )
    if not any(run.throughput for run in comparison.runs):
        header, rows = header[:-1], tuple(row[:-1] for row in rows)
    return Table("The runs", header, rows)


def _classes_table(comparison: Comparison, pair: Pair) -> Table:
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
    title = (
        f"Where the time of {UNITS[comparison.unit]} goes (mean over {comparison.unit}s and GPUs)"
    )
    return Table(title, ("", a, b, "change", "95% bounds", ""), (*rows, *total))


def _causes_table(comparison: Comparison, pair: Pair) -> Iterator[Table]:
    """Tabulate the causes of lost time that grew or shrank."""
    least = _LEAST_CAUSE * pair.step.a_ns if pair.step is not None else 0
    rows = tuple(
        (row.label, _time(row.a_ns), _time(row.b_ns), format_change(row.difference_ns))
        for row in pair.causes[:_MOST_CAUSES]
        if abs(row.difference_ns) >= least
    )
    if rows:
        a, b = (run.label for run in comparison.runs)
        title = f"Why ({UNITS[comparison.unit]}, mean over the GPUs; largest changes first)"
        yield Table(title, ("", a, b, "change"), rows)


def _gpus_table(comparison: Comparison, pair: Pair) -> Iterator[Table]:
    """Tabulate few GPUs one by one; for many, the GPU with most of each class."""
    both = [gpu for gpu in pair.gpus if gpu.a is not None and gpu.b is not None]
    a, b = (run.label for run in comparison.runs)
    if both and len(pair.gpus) <= _MOST_GPUS:
        yield _few_gpus(a, b, both)
        return
    rows = tuple(
        (NAMES[row.name], *_worst(row.a_worst), *_worst(row.b_worst))
        for row in pair.classes
        if _outstanding(row)
    )
    if rows:
        title = f"The GPU that has most of a class ({UNITS[comparison.unit]})"
        yield Table(title, ("", a, "on", b, "on"), rows)


def _few_gpus(a: str, b: str, gpus: Sequence[GpuPair]) -> Table:
    rows = [row for gpu in gpus for row in (gpu.a, gpu.b) if row is not None]
    body = tuple(
        (label, *(_time(round(row.of(name) / max(row.steps, 1))) for row in rows))
        for name, label in {**CLASS_NAMES, "total": "total"}.items()
        if name == "total" or any(row.of(name) for row in rows)
    )
    header = [""]
    for pair in gpus:
        known = all(row is None or row.gpu_known for row in (pair.a, pair.b))
        name = gpu_name(pair.gpu, pair.rank, known, False)
        header += [f"{name} {a}", f"{name} {b}"]
    unit = "a step" if any(row.steps for row in rows) else "the whole span"
    return Table(f"GPU by GPU ({unit})", tuple(header), body)


def _kernels_table(comparison: Comparison, pair: Pair, width: int) -> Iterator[Table]:
    """Tabulate the kernels that changed."""
    changed = [row for row in pair.kernels if row.changed]
    if not changed:
        return
    a, b = comparison.runs
    title = f"Kernels: {len(changed)} of {len(pair.kernels)} changed"
    for word in ("new", "gone"):
        count = sum(row.status == word for row in pair.kernels)
        title += f", {count} {word}" if count else ""
    title += f" ({UNITS[comparison.unit]} and GPU)"
    shown = changed[:_MOST_KERNELS]
    rows = tuple(
        (
            name,
            _time(row.a_ns) if row.a_count else "–",
            _time(row.b_ns) if row.b_count else "–",
            format_change(row.difference_ns),
            _arrow(format_number(row.a_count), format_number(row.b_count)),
            _each(row),
        )
        for name, row in zip(kernel_labels([k.name for k in shown], width), shown, strict=True)
    )
    header = ("", a.label, b.label, "change", "count", "each")
    yield Table(title, header, rows, tuple(kernel.name for kernel in shown))


def _kernels_by_share(comparison: Comparison, pair: Pair, width: int) -> Iterator[Table]:
    """Tabulate the kernels whose shares of the span differ most."""
    a, b = comparison.runs
    # As those of the classes: GPUs may begin and end at other times than the run.
    whole_a = max(sum(row.a_ns for row in pair.classes), 1)
    whole_b = max(sum(row.b_ns for row in pair.classes), 1)
    far = []
    for row in pair.kernels:
        shares = row.a_ns / whole_a, row.b_ns / whole_b
        if (apart := abs(shares[1] - shares[0])) >= _LEAST_SHARE:
            far.append((apart, row.name, shares))
    shown = sorted(far, key=lambda kernel: kernel[0], reverse=True)[:_MOST_KERNELS]
    names = kernel_labels([name for _, name, _ in shown], width)
    rows = tuple(
        (name, *(format_share(share, 1) for share in shares))
        for name, (_, _, shares) in zip(names, shown, strict=True)
    )
    if rows:
        title = "Kernels whose shares of the span differ most"
        yield Table(title, ("", a.label, b.label), rows, tuple(name for _, name, _ in shown))


def notes(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield findings and caveats, each with its heading."""
    pair = comparison.pair if comparison.scaling is None else None
    for finding in pair.findings if pair is not None else ():
        yield f"{finding.status}{growth(finding, pair)}", _finding(finding, pair)
    kernels = pair.kernels if pair is not None and comparison.unit != "span" else ()
    if kernels and all(kernel.changed is None for kernel in kernels):
        yield "kernels", f"too few steps to tell which of {len(kernels)} differ."
    elif kernels and not any(kernel.changed for kernel in kernels):
        yield "kernels", f"of {len(kernels)}, none differs by more than the noise and 2%."
    if comparison.unit == "iteration":
        yield "note", f"Iterations are compared: {comparison.unit_reason}."
    for warning in comparison.warnings:
        yield "note", f"{warning}."


_ALIKE: Final = 1.1
"""Ratio of the costs of a finding up to which it stayed as it was."""


def growth(finding: FindingChange, pair: Pair | None) -> str:
    """Return how a finding in both runs changed, as ``, twice as large``; empty if it did not."""
    a, b = finding.a_impact_ns or 0, finding.b_impact_ns or 0
    if pair is None or finding.status != "stayed" or not a or not b or len(set(_units(pair))) > 1:
        return ""
    if 1 / _ALIKE < b / a < _ALIKE:
        return ""
    if b < a:
        return f", {1 - b / a:.0%} smaller"
    times = f"{b / a:,.0f}" if b / a >= 9.95 else f"{b / a:.1f}"
    return ", twice as large" if times == "2.0" else f", {times} times as large"


def _units(pair: Pair) -> tuple[str, str]:
    """Return what the costs of the findings of both runs are per."""
    runs = ([gpu.a for gpu in pair.gpus], [gpu.b for gpu in pair.gpus])
    a, b = (any(row.steps for row in rows if row is not None) for rows in runs)
    return " a step" if a else " in the whole span", " a step" if b else " in the whole span"


def _finding(finding: FindingChange, pair: Pair | None) -> str:
    if finding.status != "stayed" or pair is None:
        return f"{finding.id}: {finding.message}."
    if not finding.a_impact_ns and not finding.b_impact_ns:
        return f"{finding.id}."
    a, b = format_ns(finding.a_impact_ns or 0), format_ns(finding.b_impact_ns or 0)
    first, second = _units(pair)
    if first == second:
        return f"{finding.id} ({_arrow(a, b)}{second})."
    return f"{finding.id} ({a}{first}; {b}{second})."


def _cells(row: Change, step: int) -> tuple[str, ...]:
    return (
        _time(row.a_ns),
        _time(row.b_ns),
        format_change(row.difference_ns),
        _bounds(row.low_ns, row.high_ns),
        _outcome(row, step),
    )


def _outcome(row: Change, step: int) -> str:
    """Return ``more`` or ``less``, ``slightly`` so where that hardly matters to the step; where
    the bounds include zero, ``same``, or ``noise`` if they allow a change.
    """
    if row.changed is None or row.low_ns is None or row.high_ns is None:
        return "?"
    word = "more" if row.difference_ns > 0 else "less"
    if row.changed:
        return word
    if row.low_ns > 0 or row.high_ns < 0:
        return f"slightly {word}"
    return "same" if max(-row.low_ns, row.high_ns) <= NARROW * step else "noise"


def _outstanding(row: ClassChange) -> bool:
    pairs = ((row.a_worst, row.a_ns), (row.b_worst, row.b_ns))
    matters = max(row.a_share, row.b_share) >= 0.01
    return matters and any(w is not None and w.ns > _OUTSTANDING * mean for w, mean in pairs)


def _bounds(low: int | None, high: int | None) -> str:
    """Format ``-0.31 to +1.20 ms``, in the unit that suits the larger bound."""
    if low is None or high is None:
        return "?"
    size = max(abs(low), abs(high))
    units = (("s", 10**9), ("ms", 10**6), ("µs", 10**3))
    unit, scale = next((pair for pair in units if size >= pair[1]), ("ns", 1))
    digits = 0 if size / scale >= 100 or scale == 1 else 1 if size / scale >= 10 else 2
    return f"{low / scale:+.{digits}f} to {high / scale:+.{digits}f} {unit}"


def _time(ns: int | None) -> str:
    """Format a time; a dash for none."""
    return "–" if not ns else format_ns(ns)


def _rate(a_second: float | None) -> str:
    """Format samples per second; a dash where the batch size is unknown."""
    return "–" if a_second is None else format_number(a_second)


def _worst(gpu: Worst | None) -> tuple[str, str]:
    """Return the time of the GPU with most of a class, and its label."""
    if gpu is None:
        return "–", ""
    return _time(gpu.ns), f"rank {gpu.rank}" if gpu.gpu is None else f"gpu {gpu.gpu}"


def _arrow(a: str, b: str) -> str:
    """Format ``1.2 → 1.4 ms``; one value where both are the same."""
    if a == b:
        return a
    if a.rpartition(" ")[2] == b.rpartition(" ")[2] and " " in a:
        a = a.rpartition(" ")[0]
    return f"{a} → {b}"


def _each(row: KernelChange) -> str:
    """Format the median of one launch in both runs; the status if only one run has it."""
    if row.a_median_ns is None or row.b_median_ns is None:
        return row.status
    return _arrow(format_ns(row.a_median_ns), format_ns(row.b_median_ns))


_MOST_ACROSS: Final = 5
_SOURCES: Final = {
    "batch": "by the batch given",
    "input_bytes": "by the bytes of the input copies",
    "kernels": "by the time of the kernels",
    "none": "",
}


def _speeds_table(scaling: Scaling) -> Table:
    """Tabulate speed-up and efficiency."""
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
    stays = "a GPU" if scaling.kind == "weak" else "a step"
    title = {
        "same": "Speed, beside the first",
        "unknown": "Scaling: the amount of work of a step is unknown",
    }.get(
        scaling.kind,
        f"{scaling.kind.capitalize()} scaling: the work of {stays} stays "
        f"({_SOURCES[scaling.source]})",
    )
    return Table(title, header, body)


def _losses_table(comparison: Comparison, scaling: Scaling) -> Iterator[Table]:
    """Tabulate losses, a row per class, a column per run; those within the noise in brackets."""
    rows = [row for row in scaling.rows if row.losses][-_MOST_ACROSS:]
    if not rows:
        return
    lost = [{loss.name: loss for loss in row.losses} for row in rows]
    shown = [name for name in NAMES if any(name in of and of[name].ns for of in lost)]
    body = [
        (NAMES[name], *(_lost(of[name].ns, of[name].changed) if name in of else "–" for of in lost))
        for name in shown
    ]
    totals = (_lost(row.mean_ns - (row.ideal_ns or 0), True) for row in rows)
    body.append(("total", *totals))
    unit = UNITS[comparison.unit]
    title = f"What {unit} takes beyond the ideal (in brackets: small, or within the noise)"
    yield Table(title, ("", *(row.label for row in rows)), tuple(body))


def _lost(ns: int, changed: bool | None) -> str:
    text = format_change(ns) if ns else format_ns(ns)
    return text if changed else f"({text})"
