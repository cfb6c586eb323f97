"""Report of a comparison: its tables, findings and notes, for every format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Final

from gputrace.analyzers.compare import NARROW, UNITS
from gputrace.model.comparison import (
    Change,
    ClassChange,
    Comparison,
    FindingChange,
    KernelChange,
    Loss,
    Pair,
    Scaling,
    ScalingRow,
    Worst,
)
from gputrace.model.results import Breakdown
from gputrace.model.struct import UNKNOWN, Column
from gputrace.report import (
    Document,
    Limits,
    Line,
    Records,
    Table,
    attributes,
    declared,
    present,
    render_as,
    room_for_names,
    tabulate,
)
from gputrace.report.tables import CLASS_NAMES
from gputrace.report.wording import gpu_name, kernel_labels
from gputrace.units import format_change, format_ns, format_number, format_share

_STYLES: Final = {"faster": "bold green", "slower": "bold red", "same": "green"}
_NO_COST: Final = 0.001
"""Part of a step below which a finding has no cost of its own: others are charged with it."""
_STATES: Final = {
    "appeared": "red",
    "gone": "green",
    "still there": "yellow",
    "grew": "red",
    "shrank": "green",
}
_SAME_COST: Final = 0.8
"""Ratio of the costs of a cause from which it neither appeared nor is gone."""
_UNTOLD: Final = 0.05
"""Part of a step up to which the cost of a finding may go untold."""
_GREW: Final = 2
"""Ratio of the costs of a finding from which it grew or shrank rather than stayed."""
_BESIDE_KERNELS: Final = 56
"""Terminal columns that the figures of a kernel take."""
_LONGEST: Final = 60
"""Longest name of a kernel elsewhere, in characters."""
NAMES: Final = CLASS_NAMES | {
    "host_data": "(host waits for data)",
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


def render(comparison: Comparison, form: str, width: int = 80, color: bool = False) -> str:
    """Render a comparison in one of `FORMATS`; raise UsageError for any other."""
    return render_as(comparison, form, "gputrace.report.comparison", width, color)


def document(comparison: Comparison, limits: Limits) -> Document:
    """Return the report of a comparison."""
    names = room_for_names(limits.width, _BESIDE_KERNELS) if limits.width else _LONGEST
    runs = []
    for run in comparison.runs:
        more = f" and {len(run.paths) - 1} more" if len(run.paths) > 1 else ""
        runs.append(Line(f"{run.paths[0]}{more}", "dim", run.label))
    return Document(
        head=(Line(verdict(comparison), _STYLES.get(comparison.verdict, "bold")),),
        lead=tuple(runs),
        tables=present(_tables(comparison, names)),
        notes=tuple(
            Line(note, _STATES.get(heading, "dim"), heading) for heading, note in notes(comparison)
        ),
    )


def records(comparison: Comparison) -> Records:
    """Return the runs that scale, or the classes of two; times in nanoseconds."""
    pair, changes = comparison.pair, [field.name for field in fields(Change)]
    if comparison.scaling is not None:
        names = [field.name for field in fields(ScalingRow) if field.name != "losses"]
        return names, attributes(comparison.scaling.rows, names)
    if pair is None:
        names = ["label", "gpus", "span_ns"]
        return names, attributes(comparison.runs, names)
    names = ["name", *changes, "a_share", "b_share"]
    rows = list(attributes(pair.classes, names))
    if pair.step is not None:
        (step,) = attributes([pair.step], changes)
        rows.insert(0, ("total", *step, 1.0, 1.0))
    return names, rows


def verdict(comparison: Comparison) -> str:
    """Return the message as a sentence; a label at its beginning keeps its case."""
    message = comparison.message
    labelled = any(message.startswith(run.label) for run in comparison.runs)
    return (message if labelled else message[0].upper() + message[1:]) + "."


def _tables(comparison: Comparison, longest: int) -> Iterator[Table]:
    """Yield all tables; names of kernels are at most ``longest`` characters."""
    yield declared("The runs", comparison.runs)
    pair = comparison.pair
    if comparison.scaling is not None:
        yield _speeds_table(comparison, comparison.scaling)
        yield _losses_table(comparison, comparison.scaling)
    elif pair is not None:
        yield _classes_table(comparison, pair)
        # The causes of lost time that grew or shrank.
        least = _LEAST_CAUSE * pair.step.a_ns if pair.step is not None else 0
        rows = [row for row in pair.causes[:_MOST_CAUSES] if abs(row.difference_ns) >= least]
        title = f"Why ({UNITS[comparison.unit]}, mean over the GPUs; largest changes first)"
        yield tabulate(title, (Column("", "label"), *_changes(comparison)), rows)
        title = f"Where the host is, by function ({UNITS[comparison.unit]}; what changed)"
        lines = pair.lines[:_MOST_CAUSES]
        yield tabulate(title, (Column("", "line"), *_changes(comparison)), lines)
        if len(pair.gpus) > 1 or comparison.unit != "step":
            yield _gpus_table(comparison, pair)
        by_share = comparison.unit == "span"
        yield (_kernels_by_share if by_share else _kernels_table)(comparison, pair, longest)


def _changes(comparison: Comparison) -> tuple[Column, ...]:
    """Return the columns of a time in both runs; none is a dash."""
    a, b = (run.label for run in comparison.runs)
    return (
        Column(a, lambda row: row.a_ns or None, format_ns),
        Column(b, lambda row: row.b_ns or None, format_ns),
        Column("change", "difference_ns", format_change),
    )


def _classes_table(comparison: Comparison, pair: Pair) -> Table:
    """Tabulate each class in both runs: difference, bounds, and whether it changed."""
    name = Column("", lambda row: NAMES[row.name] if isinstance(row, ClassChange) else "total")
    if comparison.unit == "span":
        a, b = (run.label for run in comparison.runs)
        title = f"Shares of the whole span (mean over the GPUs); {comparison.unit_reason}"
        columns = (
            name,
            Column(a, lambda row: format_share(row.a_share, 1)),
            Column(b, lambda row: format_share(row.b_share, 1)),
            Column("change", lambda row: 100 * (row.b_share - row.a_share), "{:+.1f} points"),
        )
        return tabulate(title, columns, pair.classes)
    step = pair.step.a_ns if pair.step is not None else 0
    bounds = Column("95% bounds", _bounds, unknown="?")
    outcome = Column("outcome", lambda row: _outcome(row, step))
    rows = (*pair.classes, pair.step) if pair.step is not None else pair.classes
    unit = comparison.unit
    each = "GPUs" if any(run.gpus for run in comparison.runs) else "ranks"
    title = f"Where the time of {UNITS[unit]} goes (mean over {unit}s and {each})"
    return tabulate(title, (name, *_changes(comparison), bounds, outcome), rows)


def _bounds(row: Change) -> str | None:
    """Format ``-0.31 to +1.20 ms``, in the unit that suits the larger bound."""
    low, high = row.low_ns, row.high_ns
    if low is None or high is None:
        return None
    size = max(abs(low), abs(high))
    units = (("s", 10**9), ("ms", 10**6), ("µs", 10**3))
    unit, scale = next((pair for pair in units if size >= pair[1]), ("ns", 1))
    digits = 0 if size / scale >= 100 or scale == 1 else 1 if size / scale >= 10 else 2
    return f"{low / scale:+.{digits}f} to {high / scale:+.{digits}f} {unit}"


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


def _gpus_table(comparison: Comparison, pair: Pair) -> Table:
    """Tabulate few GPUs one by one; for many, the GPU with most of each class."""
    a, b = (run.label for run in comparison.runs)
    both = [gpu for gpu in pair.gpus if gpu.a is not None and gpu.b is not None]
    if not both or len(pair.gpus) > _MOST_GPUS:

        def time(worst: Worst) -> str:
            return format_ns(worst.ns) if worst.ns else UNKNOWN

        def where(worst: Worst) -> str:
            return f"rank {worst.rank}" if worst.gpu is None else f"gpu {worst.gpu}"

        worst_of = (
            Column("", lambda row: NAMES[row.name]),
            *(Column(a, "a_worst", time), Column(f"{a} on", "a_worst", where, "")),
            *(Column(b, "b_worst", time), Column(f"{b} on", "b_worst", where, "")),
        )
        title = f"The GPU that has most of a class ({UNITS[comparison.unit]})"
        return tabulate(title, worst_of, filter(_outstanding, pair.classes))
    names = {**CLASS_NAMES, "total": "total"}
    columns = [Column("", names.__getitem__)]
    rows: list[Breakdown] = []
    for gpu in both:
        known = all(row is None or row.gpu_known for row in (gpu.a, gpu.b))
        label = gpu_name(gpu.gpu, gpu.rank, known, False)
        for run, row in ((a, gpu.a), (b, gpu.b)):
            if row is not None:
                rows.append(row)
                columns.append(Column(f"{label} {run}", partial(_mean, row), format_ns))
    shown = [name for name in names if name == "total" or any(row.of(name) for row in rows)]
    unit = "a step" if any(row.steps for row in rows) else "the whole span"
    return tabulate(f"GPU by GPU ({unit})", columns, shown)


def _mean(row: Breakdown, name: str) -> int | None:
    """Return the time of a class in a mean step; None for nothing."""
    return round(row.of(name) / max(row.steps, 1)) or None


def _outstanding(row: ClassChange) -> bool:
    pairs = ((row.a_worst, row.a_ns), (row.b_worst, row.b_ns))
    matters = max(row.a_share, row.b_share) >= 0.01
    return matters and any(w is not None and w.ns > _OUTSTANDING * mean for w, mean in pairs)


def _kernels_table(comparison: Comparison, pair: Pair, longest: int) -> Table:
    changed = [row for row in pair.kernels if row.changed]
    title = f"Kernels: {len(changed)} of {len(pair.kernels)} changed"
    if any(row.status != "both" for row in changed):
        words = [{"both": "in both"}.get(row.status, row.status) for row in changed]
        title += ": " + ", ".join(f"{words.count(each)} {each}" for each in sorted({*words}))

    def counts(row: KernelChange) -> str:
        return _arrow(format_number(row.a_count), format_number(row.b_count))

    def each(row: KernelChange) -> str:
        """Format the median of one launch in both runs; the status if only one run has it."""
        if row.a_median_ns is None or row.b_median_ns is None:
            return row.status
        return _arrow(format_ns(row.a_median_ns), format_ns(row.b_median_ns))

    columns = (*_changes(comparison), Column("count", counts), Column("each", each))
    title += f" ({UNITS[comparison.unit]} and GPU)"
    return _by_kernel(title, columns, changed[:_MOST_KERNELS], longest)


def _kernels_by_share(comparison: Comparison, pair: Pair, longest: int) -> Table:
    """Tabulate the kernels whose shares of the span differ most."""
    a, b = comparison.runs
    # As those of the classes: GPUs may begin and end at other times than the run.
    whole_a = max(sum(row.a_ns for row in pair.classes), 1)
    whole_b = max(sum(row.b_ns for row in pair.classes), 1)

    def apart(row: KernelChange) -> float:
        return abs(row.b_ns / whole_b - row.a_ns / whole_a)

    far = sorted(pair.kernels, key=apart, reverse=True)[:_MOST_KERNELS]
    columns = (
        Column(a.label, lambda row: format_share(row.a_ns, whole_a)),
        Column(b.label, lambda row: format_share(row.b_ns, whole_b)),
    )
    shown = [row for row in far if apart(row) >= _LEAST_SHARE]
    return _by_kernel("Kernels whose shares of the span differ most", columns, shown, longest)


def _by_kernel(
    title: str, columns: Sequence[Column], rows: Sequence[KernelChange], longest: int
) -> Table:
    names = [row.name for row in rows]
    labels = dict(zip(names, kernel_labels(names, longest), strict=True))
    label = Column("", lambda row: labels[row.name])
    return tabulate(title, (label, *columns), rows, names=tuple(names))


def _arrow(a: str, b: str) -> str:
    """Format ``1.2 → 1.4 ms``; one value where both are the same."""
    if a == b:
        return a
    if a.rpartition(" ")[2] == b.rpartition(" ")[2] and " " in a:
        a = a.rpartition(" ")[0]
    return f"{a} → {b}"


_MOST_ACROSS: Final = 5
_SOURCES: Final = {
    "batch": "by the batch given",
    "input_bytes": "by the bytes of the input copies",
    "kernels": "by the time of the kernels",
    "none": "",
}


def _speeds_table(comparison: Comparison, scaling: Scaling) -> Table:
    stays = "a GPU" if scaling.kind == "weak" else "a step"
    title = {
        "same": "Speed compared with the first run",
        "unknown": "Scaling: the amount of work of a step is unknown",
    }.get(
        scaling.kind,
        f"{scaling.kind.capitalize()} scaling: the work of {stays} stays the same "
        f"({_SOURCES[scaling.source]})",
    )

    def bounds(row: ScalingRow) -> str:
        low, high = row.speed_up_low, row.speed_up_high
        known = row is not scaling.rows[0] and low is not None
        return f"{low:.2f}x to {high:.2f}x" if known else ""

    columns = (
        Column("", "label"),
        Column("GPUs" if any(run.gpus for run in comparison.runs) else "ranks", "gpus"),
        Column("step", "mean_ns"),
        Column("speed-up", "speed_up", "{:.2f}x"),
        Column("95% bounds", bounds, unknown=""),
        Column("efficiency", "efficiency", "{:.0%}"),
    )
    return tabulate(title, columns, scaling.rows)


def _losses_table(comparison: Comparison, scaling: Scaling) -> Table:
    """Tabulate losses, a row per class, a column per run; those within the noise in brackets."""
    columns = [Column("", {**NAMES, "total": "total"}.__getitem__)]
    rows = [row for row in scaling.rows if row.losses][-_MOST_ACROSS:]
    of_runs = []
    for row in rows:
        total = Loss("total", row.mean_ns - (row.ideal_ns or 0), None, None, True)
        losses = {loss.name: loss for loss in (*row.losses, total)}
        columns.append(Column(row.label, losses.get, _lost))
        of_runs.append(losses)
    shown = [name for name in NAMES if any(name in of and of[name].ns for of in of_runs)]
    unit = UNITS[comparison.unit]
    title = f"What {unit} takes beyond the ideal (in brackets: small, or within the noise)"
    return tabulate(title, columns, [*shown, "total"] if rows else ())


def _lost(loss: Loss) -> str:
    text = format_change(loss.ns) if loss.ns else format_ns(0)
    return text if loss.changed else f"({text})"


def finding_notes(comparison: Comparison) -> Iterator[tuple[int, str, str]]:
    """Yield what came of each finding that costs time: its place in the pair's, heading, text."""
    pair = comparison.pair if comparison.scaling is None else None
    for at, finding in enumerate(pair.findings if pair is not None else ()):
        heading, text = _finding(finding, pair)
        if text and {finding.a_severity, finding.b_severity} != {"info"}:
            yield at, heading, text


def notes(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield findings and caveats, each with its heading."""
    for _, heading, text in finding_notes(comparison):
        yield heading, text
    pair = comparison.pair if comparison.scaling is None else None
    kernels = pair.kernels if pair is not None and comparison.unit != "span" else ()
    if kernels and all(kernel.changed is None for kernel in kernels):
        yield "kernels", f"too few steps to tell which of {len(kernels)} differ."
    elif kernels and not any(kernel.changed for kernel in kernels):
        yield "kernels", f"of {len(kernels)}, none differs by more than the noise and 2%."
    if comparison.unit == "iteration":
        yield "note", f"Iterations are compared: {comparison.unit_reason}."
    for warning in comparison.warnings:
        yield "note", f"{warning}."


def _units(pair: Pair) -> tuple[str, str]:
    """Return what the costs of the findings of both runs are per."""
    runs = ([gpu.a for gpu in pair.gpus], [gpu.b for gpu in pair.gpus])
    a, b = (any(row.steps for row in rows if row is not None) for rows in runs)
    return " a step" if a else " in the whole span", " a step" if b else " in the whole span"


def _may_be_in_both(finding: FindingChange, pair: Pair | None) -> str:
    """Return what to add of a finding of one run that may cost as much in the other, if it would be
    too small a part of that one's longer step to be told.
    """
    if pair is None or pair.step is None:
        return ""
    shorter, longer, other = pair.step.a_ns, pair.step.b_ns, "B"
    if finding.status == "appeared":
        shorter, longer, other = longer, shorter, "A"
    cost = finding.a_impact_ns or finding.b_impact_ns or 0
    if not _UNTOLD * shorter <= cost < _UNTOLD * longer:
        return ""
    return f". As much would go untold in the longer step of {other}"


def _finding(finding: FindingChange, pair: Pair | None) -> tuple[str, str]:
    """Say what came of a finding, and its cost; nothing of one that stayed and costs nothing, or of
    one that only the length of the other step made worth telling.
    """
    if finding.status != "stayed" or pair is None:
        charged = (row for row in pair.causes if row.cause == finding.id) if pair else ()
        costs = next(((row.a_ns, row.b_ns) for row in charged), (0, 1))
        is_same = 0 < _SAME_COST * max(costs) <= min(costs)
        more = _may_be_in_both(finding, pair)
        return finding.status, "" if is_same else f"{finding.id}: {finding.message}{more}."
    a, b = finding.a_impact_ns or 0, finding.b_impact_ns or 0
    if max(a, b) <= _NO_COST * (pair.step.a_ns if pair.step else 1):
        return finding.status, ""
    first, second = _units(pair)
    changed = "grew" if b >= _GREW * a else "shrank" if a >= _GREW * b else "still there"
    heading = changed if first == second else "still there"
    was, now = f"{format_ns(a)}{first}", f"{format_ns(b)}{second}"
    before = "" if was == now else f", {was.removesuffix(second)} before"
    return heading, f"{finding.id} costs {now}{before}."
