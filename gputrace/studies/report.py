"""Report of a study: its tables and notes, for every format, and its HTML page with charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from bokeh.models import ColumnDataSource, DataRange1d, NumeralTickFormatter
from bokeh.plotting import figure
from msgspec.structs import replace

from gputrace.model.struct import Column
from gputrace.model.time_class import CLASSES
from gputrace.report import (
    Document,
    Limits,
    Line,
    Records,
    Table,
    declared,
    plain,
    present,
    render_as,
    tabulate,
    to_json,
)
from gputrace.report.html import charts
from gputrace.report.html.page import render_document
from gputrace.report.tables import CLASS_NAMES
from gputrace.studies.database import Database
from gputrace.studies.results import (
    ConfigurationResult,
    Efficiency,
    GpuShare,
    Placement,
    Predicted,
    RecordingCheck,
    Summary,
    format_time,
)
from gputrace.studies.summary import device_word, label
from gputrace.units import format_change, format_number

_GREEN: Final = "#009e73"
_IDEAL: Final[dict[str, Any]] = {"line_color": "#8a8a8a", "line_dash": charts.DASHED}
_TALL: Final = 280
"""Height of a chart over numbers of GPUs, in pixels."""
_LABEL: Final = 80
"""Maximum characters of a label."""
_ROOM: Final = 1.03
"""Length of an axis relative to its largest value: bokeh leaves no room for whiskers."""


def find_charts(summary: Summary) -> dict[str, figure]:
    """Return the non-empty figures of the page by name."""
    scaled = [row for row in summary.efficiency if row.rate > 0]
    made = {
        "rates": (
            _rates_by_gpus(summary, scaled) if all_scale(summary) else _rate_bars(summary.rows)
        ),
        "efficiency": _efficiency_chart(scaled) if scaled else None,
        "losses": _losses_chart(scaled),
        "classes": _classes(summary.rows),
        "compute": _shares(summary, "compute", "ms a step", lambda gpu: gpu.compute_ns / 1e6),
        "memory": _shares(summary, "memory", "GiB", lambda gpu: (gpu.memory_bytes or 0) / 2**30),
    }
    return {name: chart for name, chart in made.items() if chart is not None}


def all_scale(summary: Summary) -> bool:
    """Return whether lines over GPUs show all speeds: every configuration has a base."""
    scaled = {row.label for row in summary.efficiency if row.rate > 0}
    known = {row.label for row in summary.rows if row.rate is not None}
    return bool(scaled) and known <= scaled


def _rates_by_gpus(summary: Summary, rows: Sequence[Efficiency]) -> figure:
    """Draw a line for each series, with the range of the repeats, and the ideal line."""
    ranges = {row.label: row.rate for row in summary.rows}
    plot = charts.gpus_chart("rates", _TALL, (row.gpus for row in rows), "samples/s")
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    entries: list[tuple[str, list[Any]]] = []
    ideal: list[Any] = []
    tops: list[float] = []
    for number, (series, members) in enumerate(_series(rows).items()):
        look = charts.gpu_look(number)
        spreads = [ranges[row.label] for row in members]
        columns: dict[str, list[Any]] = {
            "gpus": [row.gpus for row in members],
            "value": [row.rate for row in members],
            "low": [spread.low if spread else 0.0 for spread in spreads],
            "high": [spread.high if spread else 0.0 for spread in spreads],
            # As many GPUs at the efficiency of the base.
            "ideal": [
                row.rate / row.efficiency if row.efficiency else members[0].rate for row in members
            ],
        }
        points = ColumnDataSource(columns)
        entries.append((series, _line(plot, points, look, "samples/s", "@value{0,0}")))
        ideal.append(plot.line("gpus", "ideal", source=points, **_IDEAL))
        charts.draw_spread(plot, points, "gpus", line_color=look[0])
        tops += [*columns["high"], *columns["ideal"]]
    plot.y_range.update(end=_ROOM * max(tops))
    charts.add_legend(plot, [*entries, ("ideal", ideal)])
    return plot


def _efficiency_chart(rows: Sequence[Efficiency]) -> figure:
    gpus = sorted({row.gpus for row in rows})
    plot = charts.gpus_chart("efficiency", _TALL, gpus, "efficiency, %")
    entries = []
    for number, (series, members) in enumerate(_series(rows).items()):
        percent = [100 * row.efficiency for row in members]
        points = ColumnDataSource({"gpus": [row.gpus for row in members], "value": percent})
        entries.append(
            (series, _line(plot, points, charts.gpu_look(number), "efficiency", "@value{0.0} %"))
        )
    whole = ColumnDataSource({"gpus": gpus, "ideal": [100.0] * len(gpus)})
    ideal = plot.line("gpus", "ideal", source=whole, **_IDEAL)
    charts.add_legend(plot, [*entries, ("ideal", [ideal])])
    return plot


def _series(rows: Iterable[Efficiency]) -> Mapping[str, list[Efficiency]]:
    """Group configurations into series by number of GPUs, each starting with its base.

    A base may start several series, as one GPU does for all placements.
    """
    series: dict[str, list[Efficiency]] = {}
    bases = {row.label: row for row in rows if row.label == row.base}
    for row in rows:
        if row.label != row.base:
            series.setdefault(row.series, [bases[row.base]]).append(row)
    return {
        charts.plain_text(name, _LABEL) or "measured": sorted(members, key=lambda row: row.gpus)
        for name, members in series.items()
    }


def _line(
    plot: figure, points: ColumnDataSource, look: tuple[str, Sequence[int]], word: str, value: str
) -> list[Any]:
    drawn = charts.draw_points(plot, points, *look)
    charts.add_tips(plot, drawn[-1], [("GPUs", "@gpus"), (word, value)])
    return drawn


def _rate_bars(rows: Sequence[ConfigurationResult]) -> figure | None:
    """Draw a bar for each configuration, with the range of its repeats."""
    known = [(row, row.rate) for row in rows if row.rate is not None]
    if not known:
        return None
    labels = [charts.plain_text(row.label, _LABEL) for row, _ in known]
    points = ColumnDataSource(
        {
            "row": labels,
            "value": [rate.median for _, rate in known],
            "low": [rate.low for _, rate in known],
            "high": [rate.high for _, rate in known],
        }
    )
    plot = charts.bars_chart("rates", labels, "samples/s")
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    bars = plot.hbar("row", right="value", height=0.7, color=_GREEN, source=points)
    plot.x_range.update(end=_ROOM * max(rate.high for _, rate in known))
    if any(rate.count > 1 for _, rate in known):
        charts.draw_spread(plot, points, "row", dimension="width")
    tips = [("", "@row"), ("samples/s", "@value{0,0}"), ("range", "@low{0,0} to @high{0,0}")]
    charts.add_tips(plot, bars, tips)
    return plot


def _classes(rows: Sequence[ConfigurationResult]) -> figure | None:
    known = [(row, row.classes) for row in rows if row.classes is not None]
    if not known:
        return None
    labels = [charts.plain_text(row.label, _LABEL) for row, _ in known]
    values = {name: [table.get(name, 0) / 1e6 for _, table in known] for name in CLASSES}
    return charts.stacked_bars(labels, values, "ms a step")


def _losses_chart(rows: Sequence[Efficiency]) -> figure | None:
    """Draw what each class adds to the base's step to the right, savings to the left."""
    known = [row for row in rows if row.losses]
    if not known:
        return None
    labels = [charts.plain_text(row.label, _LABEL) for row in known]
    plot = charts.bars_chart("losses", labels, "ms a step")
    plot.x_range = DataRange1d(range_padding=0.02)
    lost = [{loss.name: loss.ns / 1e6 for loss in row.losses} for row in known]
    for sign in (1, -1):
        values = {
            name: [max(sign * table.get(name, 0), 0) * sign for table in lost] for name in CLASSES
        }
        names = [name for name in CLASSES if any(values[name])]
        for name, bar in charts.draw_stack(plot, names, {"row": labels, **values}).items():
            tips = [("", "@row"), (charts.class_label(name), f"@{name}{{+0,0.000}} ms")]
            charts.add_tips(plot, bar, tips)
    return plot


def _shares(
    summary: Summary, name: str, axis: str, value: Callable[[GpuShare], float]
) -> figure | None:
    """Draw a bar for each GPU of each placement."""
    bars: dict[str, list[Any]] = {"row": [], "value": [], "color": []}
    for row in summary.placements:
        for number, share in enumerate(row.shares):
            bars["row"].append((charts.plain_text(row.label, _LABEL), f"gpu {number}"))
            bars["value"].append(value(share))
            bars["color"].append(charts.gpu_look(number)[0])
    if not any(bars["value"]):
        return None
    plot = charts.bars_chart(name, bars["row"], axis)
    points = ColumnDataSource(bars)
    drawn = plot.hbar("row", right="value", height=0.8, color="color", source=points)
    charts.add_tips(plot, drawn, [("", "@row"), (axis, "@value{0,0.00}")])
    plot.yaxis[0].update(group_label_orientation="horizontal")
    return plot


def render(
    summary: Summary,
    form: str,
    width: int = 80,
    color: bool = False,
    database: Database | None = None,
) -> str:
    """Render the results in one of `gputrace.report.FORMATS`; raise UsageError for any other.

    With a database, the JSON has its study, configurations and runs, too.
    """
    if form != "json" or database is None:
        return render_as(summary, form, "gputrace.studies.report", width, color)
    plan, answer = database.plan(), plain(summary)
    assert isinstance(answer, dict)
    answer |= {"study": plain(plan.study), "configurations": plain(plan.configurations)}
    return to_json(answer | {"runs": plain(database.runs())})


def document(summary: Summary, limits: Limits) -> Document:
    """Return the report of a study; no format limits it."""
    del limits
    well = all(row.done and not row.failed for row in summary.rows) and summary.holds
    head = [Line(summary.title, "bold")]
    head += [Line(summary.question)] if summary.question else []
    head.append(Line(headline(summary), "green" if well else "yellow"))
    if summary.same:
        head.append(Line(f"The same in all runs: {label(summary.same, summary.same)}.", "dim"))
    return Document(
        head=tuple(head),
        tables=present(_tables(summary)),
        notes=tuple(Line(note, "dim", "note") for note in summary.notes),
    )


_SPREADS: Final = ("rate", "rate_of_median", "step_ns", "target_s")
_LEFT_OUT: Final = ("label", "settings", "gpus", "classes", *_SPREADS)


def records(summary: Summary) -> Records:
    """Return the configurations; times in nanoseconds."""
    settings = list(dict.fromkeys(name for row in summary.rows for name in row.settings))
    plain_names = [f.name for f in fields(ConfigurationResult) if f.name not in _LEFT_OUT]
    spreads = [f"{name}{end}" for name in _SPREADS for end in ("", "_low", "_high")]
    ends = ("median", "low", "high")
    rows = (
        (
            *map(row.settings.get, settings),
            *(getattr(getattr(row, name), end, None) for name in _SPREADS for end in ends),
            *(getattr(row, name) for name in plain_names),
            *((row.classes or {}).get(name) for name in CLASSES),
        )
        for row in summary.rows
    )
    return [*settings, *spreads, *plain_names, *(f"{name}_ns" for name in CLASSES)], rows


def render_html(summary: Summary) -> str:
    """Render one HTML page with charts, without external resources: it opens offline."""
    failed = any(row.failed for row in summary.rows)
    rates = "; ".join(
        f"{row.label}: {format_number(row.rate.median)}" for row in summary.rows if row.rate
    )
    scaled = " The dashed line is what as many GPUs would do at the efficiency of the fewest."
    shares = "; ".join(f"{row.label}: {row.efficiency:.0%}" for row in summary.efficiency)
    captions = {
        "rates": ("Samples a second", f"{rates}.{scaled if all_scale(summary) else ''}"),
        "efficiency": ("Efficiency", f"{shares}."),
        "losses": (
            "Where the efficiency goes",
            "What a step has more of than that of the fewest GPUs, to the right, and "
            "what it has less of, to the left. Both sides together are the loss.",
        ),
        "classes": (
            "Where the time of a step goes",
            "The mean steady step of each configuration, by what its GPUs do.",
        ),
        "compute": ("Compute time of each GPU", "A step's kernels that compute, GPU by GPU."),
        "memory": (
            "Memory in use on each GPU",
            "The most that was in use on each card, of all processes.",
        ),
    }
    report = document(summary, Limits())
    if summary.question:
        # The title is above it.
        report = replace(report, head=report.head[1:])
    return render_document(
        report,
        find_charts(summary),
        captions,
        what="bench:",
        title=summary.title,
        severity="high" if failed or not summary.holds else "info",
    )


def headline(summary: Summary) -> str:
    """Return a sentence on how many runs of how many configurations are done, failed, etc."""
    done, failed, skipped = (
        sum(getattr(row, name) for row in summary.rows) for name in ("done", "failed", "skipped")
    )
    are, end = "are" if done != 1 else "is", "s" * (len(summary.rows) != 1)
    parts = [f"{done} run{'s' * (done != 1)} of {len(summary.rows)} configuration{end} {are} done"]
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{skipped} skipped"] if skipped else []
    parts += [f"{summary.left} still to be run"] if summary.left else []
    wrong = sum(check.ok is False for check in _compared(summary))
    parts += [f"in {wrong} the recording does not hold"] if wrong else []
    return ", ".join(parts) + "."


_EVEN: Final = 0.02
"""Relative difference below which cards count as equally fast."""


def _tables(summary: Summary) -> Iterator[Table]:
    yield declared("The runs", summary.rows)
    # If all agree, the checks are not shown, unless only hosts were recorded.
    checks, host = _compared(summary), all(row.classes is None for row in summary.rows)
    if host or any(check.ok is False for check in checks):
        title = "The recordings beside what the scripts say of themselves"
        yield declared(title, checks)
    title = f"Speed-up and efficiency; the batch of a {device_word(summary.same)} stays"
    yield declared(title, summary.efficiency)
    yield from _losses_tables(summary)
    for name in dict.fromkeys(row.setting for row in summary.effects):
        effects = [row for row in summary.effects if row.setting == name]
        yield declared(f"What changes with {name}", effects)
    some = any(row.made < row.recordings for row in summary.predictions)
    columns = [each for each in Predicted.COLUMNS if some or each.title != "predicted by"]
    title = "What the recording without it predicted, and what was measured"
    yield tabulate(title, columns, summary.predictions)

    def share(gpu: int) -> Callable[[Placement], str]:
        return lambda row: str(row.shares[gpu]) if gpu < len(row.shares) else ""

    most = max((len(row.shares) for row in summary.placements), default=0)
    columns = [Column("", "label"), Column("gpu 0 / others", "skew", "{:.2f}x")]
    columns += (Column(f"gpu {gpu}", share(gpu)) for gpu in range(most))
    yield tabulate("Compute time a step, and memory, of each GPU", columns, summary.placements)
    kinds = {pair.link for pair in summary.pairs}
    links = ": their link is unknown" if kinds == {""} else ""
    if len(kinds) == 1 and not links:
        links = f": all are linked by {kinds.pop()}, so links explain no difference"
    yield declared(f"Pairs of GPUs{links}", summary.pairs)
    apart = [abs(row.beside - 1) for row in summary.cards if row.beside is not None]
    even = f": all within {_EVEN:.0%}" if apart and max(apart) <= _EVEN else ""
    title = f"Cards, each beside the middle one{even}"
    yield declared(title, summary.cards)
    yield _classes_table(summary)
    verdicts = [row for row in summary.rows if row.finding and row.classes]
    columns = [Column("", "label"), Column("evidence", "finding")]
    yield tabulate("What each recording says first (`gputrace analyze`)", columns, verdicts)


def _compared(summary: Summary) -> list[RecordingCheck]:
    """Return the checks of completed scripts; the notes say why others failed."""
    return [check for check in summary.checks if check.steps_run is not None]


_MOST_ACROSS: Final = 5
"""Maximum configurations as columns of a table of classes; more of them are rows."""


def _losses_tables(summary: Summary) -> Iterator[Table]:
    """Yield tables of what each class (row) adds to the base's step, a configuration a column."""
    every = [row for row in summary.efficiency if row.losses]
    names = {**CLASS_NAMES, "total": "total"}
    for start in range(0, len(every), _MOST_ACROSS):
        columns, lost = [Column("", names.__getitem__)], set[str]()
        for row in every[start : start + _MOST_ACROSS]:
            base_ns = row.base_step_ns or math.inf
            cells = {
                loss.name: f"{format_change(loss.ns)} ({loss.ns / base_ns:+.1%})"
                for loss in row.losses
                if loss.ns
            }
            lost.update(cells)
            cells["total"] = format_change((row.step_ns or 0) - (row.base_step_ns or 0))
            columns.append(Column(row.label, cells.get))
        title = "Where the efficiency goes: what a step has more of than that of the fewest GPUs"
        yield tabulate(title, columns, [*(name for name in CLASSES if name in lost), "total"])


_SHORT: Final = {
    "communication": "comm",
    "other_copy": "copies",
    "recorder": "rec.",
    "data_feeding": "data",
    "other_idle": "idle?",
}


def _classes_table(summary: Summary) -> Table:
    """Return the table of where a step's time goes in each configuration."""
    rows = [row for row in summary.rows if row.classes is not None]
    shown = [name for name in CLASSES if any((row.classes or {}).get(name) for row in rows)]
    over = "steps and GPUs" if any(row.gpus > 1 for row in rows) else "steps"
    title = f"Where the time of a step goes (mean over {over})"
    if len(rows) > _MOST_ACROSS:

        def share(name: str) -> Callable[[ConfigurationResult], float | None]:
            return lambda row: (
                (row.classes or {}).get(name, 0) / (row.recorded_step_ns or 1) or None
            )

        columns = [Column("", "label"), Column("step", "recorded_step_ns", format_time)]
        columns += (Column(_SHORT.get(name, name), share(name), "{:.1%}") for name in shown)
        return tabulate(title, columns, rows)
    names = {**CLASS_NAMES, "waiting": "of that waiting", "total": "total"}
    columns = [Column("", names.__getitem__)]
    for row in rows:
        times = {**(row.classes or {}), "waiting": row.wait_ns, "total": row.recorded_step_ns}
        columns.append(Column(row.label, times.get, format_time))
    if "communication" in shown and any(row.wait_ns for row in rows):
        shown.insert(shown.index("communication") + 1, "waiting")
    return tabulate(title, columns, [*shown, "total"] if rows else ())
