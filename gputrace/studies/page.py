"""HTML page of a study's results, with charts, in one file that opens offline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bokeh.models import ColumnDataSource, DataRange1d, FactorRange, HoverTool, NumeralTickFormatter
from bokeh.models.annotations import Whisker
from bokeh.plotting import figure

from gputrace.model.time_class import CLASSES
from gputrace.report.html.charts import (
    add_legend,
    class_color,
    class_label,
    gpu_look,
    new_figure,
    plain_text,
    stacked_bars,
)
from gputrace.report.html.page import common_variables, render_page
from gputrace.report.tables import Table
from gputrace.studies.report import headline, rate, same, tables
from gputrace.studies.results import Efficiency, GpuShare, Row, Summary


@dataclass(frozen=True, slots=True)
class Words:
    """Texts of the page."""

    title: str
    question: str
    told: str
    severity: str
    same: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    summary: Mapping[str, str]


def render(summary: Summary) -> str:
    """Return the page as one HTML text without external resources."""
    charts = find_charts(summary)
    failed = any(row.failed for row in summary.rows)
    wrong = any(check.ok is False for check in summary.checks)
    words = Words(
        title=plain_text(summary.title, 300),
        question=plain_text(summary.question, 1000),
        told=headline(summary),
        severity="high" if failed or wrong else "info",
        same=plain_text(same(summary), 1000) if summary.same else "",
        tables=tuple(tables(summary)),
        notes=tuple(plain_text(note, 1000) for note in summary.notes),
        summary=_captions(summary),
    )
    return render_page("study.html", charts, common_variables(charts) | {"content": words})


def _captions(summary: Summary) -> dict[str, str]:
    """Describe each chart in words."""
    rates = "; ".join(f"{row.label}: {rate(row.rate.median)}" for row in summary.rows if row.rate)
    shares = (f"{row.label}: {row.efficiency:.0%}" for row in summary.efficiency)
    scaled = " The dashed line is what as many GPUs would do at the efficiency of the fewest."
    return {
        "rates": plain_text(f"{rates}.{scaled if all_scale(summary) else ''}", 1000),
        "efficiency": plain_text(f"{'; '.join(shares)}.", 1000),
        "losses": "What a step has more of than that of the fewest GPUs, to the right, and what it "
        "has less of, to the left. Both sides together are the loss.",
        "classes": "The mean steady step of each configuration, by what its GPUs do.",
        "compute": "A step's kernels that compute, GPU by GPU.",
        "memory": "The most that was in use on each card, of all processes.",
    }


_GREEN: Final = "#009e73"
_IDEAL: Final = "#8a8a8a"
_LABEL: Final = 80
"""Maximum characters of a label."""
_ROOM: Final = 1.03
"""Length of an axis relative to its largest value: bokeh leaves no room for whiskers."""
_BAR: Final = 26
"""Pixels per bar, with spacing."""


def find_charts(summary: Summary) -> dict[str, figure]:
    """Return the non-empty figures of the page by name."""
    scaled = [row for row in summary.efficiency if row.rate > 0]
    made = {
        "rates": (
            _rates_by_gpus(summary, scaled) if all_scale(summary) else _rate_bars(summary.rows)
        ),
        "efficiency": _efficiency_chart(scaled) if scaled else None,
        "losses": _losses(scaled),
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
    plot = _by_gpus("rates", "samples/s", rows)
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    entries: list[tuple[str, list[Any]]] = []
    ideal: list[Any] = []
    tops: list[float] = []
    for number, (series, members) in enumerate(_series(rows).items()):
        color, dash = gpu_look(number)
        spreads = [ranges[row.label] for row in members]
        first = members[0]
        source = ColumnDataSource(
            {
                "gpus": [row.gpus for row in members],
                "value": [row.rate for row in members],
                "low": [spread.low if spread else 0.0 for spread in spreads],
                "high": [spread.high if spread else 0.0 for spread in spreads],
                # As many GPUs at the efficiency of the base.
                "ideal": [
                    row.rate / row.efficiency if row.efficiency else first.rate for row in members
                ],
            }
        )
        entries.append((series, _line(plot, source, color, dash, "samples/s", "@value{0,0}")))
        ideal.append(plot.line("gpus", "ideal", source=source, color=_IDEAL, line_dash="dashed"))
        plot.add_layout(
            Whisker(base="gpus", lower="low", upper="high", source=source, line_color=color)
        )
        tops += [*source.data["high"], *source.data["ideal"]]
    plot.y_range.update(end=_ROOM * max(tops))
    add_legend(plot, [*entries, ("ideal", ideal)])
    return plot


def _efficiency_chart(rows: Sequence[Efficiency]) -> figure:
    plot = _by_gpus("efficiency", "efficiency, %", rows)
    entries = []
    for number, (series, members) in enumerate(_series(rows).items()):
        color, dash = gpu_look(number)
        percent = [100 * row.efficiency for row in members]
        source = ColumnDataSource({"gpus": [row.gpus for row in members], "value": percent})
        entries.append((series, _line(plot, source, color, dash, "efficiency", "@value{0.0} %")))
    gpus = sorted({row.gpus for row in rows})
    ideal = plot.line(gpus, [100.0] * len(gpus), color=_IDEAL, line_dash="dashed")
    add_legend(plot, [*entries, ("ideal", [ideal])])
    return plot


def _by_gpus(name: str, axis: str, rows: Sequence[Efficiency]) -> figure:
    plot = new_figure(
        name,
        280,
        y_range=DataRange1d(start=0),
        x_axis_label="GPUs",
        y_axis_label=axis,
        tools="",
        toolbar_location=None,
    )
    plot.xaxis.ticker = sorted({row.gpus for row in rows})
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
        plain_text(name, _LABEL) or "measured": sorted(members, key=lambda row: row.gpus)
        for name, members in series.items()
    }


def _line(
    plot: figure, source: ColumnDataSource, color: str, dash: str, word: str, value: str
) -> list[Any]:
    line = plot.line("gpus", "value", source=source, color=color, line_dash=dash, line_width=2)
    dots = plot.scatter("gpus", "value", source=source, color=color, size=9)
    tips = [("GPUs", "@gpus"), (word, value)]
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tips, visible=False))
    return [line, dots]


def _rate_bars(rows: Sequence[Row]) -> figure | None:
    """Draw a bar for each configuration, with the range of its repeats."""
    known = [(row, row.rate) for row in rows if row.rate is not None]
    if not known:
        return None
    labels = [plain_text(row.label, _LABEL) for row, _ in known]
    source = ColumnDataSource(
        {
            "row": labels,
            "value": [rate.median for _, rate in known],
            "low": [rate.low for _, rate in known],
            "high": [rate.high for _, rate in known],
        }
    )
    plot = _bars("rates", labels, "samples/s")
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    bars = plot.hbar(y="row", right="value", height=0.7, source=source, color=_GREEN)
    plot.x_range.update(end=_ROOM * max(rate.high for _, rate in known))
    if any(rate.count > 1 for _, rate in known):
        plot.add_layout(
            Whisker(base="row", lower="low", upper="high", dimension="width", source=source)
        )
    tips = [("", "@row"), ("samples/s", "@value{0,0}"), ("range", "@low{0,0} to @high{0,0}")]
    plot.add_tools(HoverTool(renderers=[bars], tooltips=tips, visible=False))
    return plot


def _bars(name: str, rows: Sequence[Any], axis: str) -> figure:
    """Return an empty chart with a line for each of the rows, from the top."""
    plot = new_figure(
        name,
        70 + _BAR * len(rows),
        x_range=DataRange1d(start=0, range_padding=0.02),
        y_range=FactorRange(factors=list(rows)[::-1]),
        x_axis_label=axis,
        tools="",
        toolbar_location=None,
    )
    plot.ygrid.visible = False
    return plot


def _classes(rows: Sequence[Row]) -> figure | None:
    known = [(row, row.classes) for row in rows if row.classes is not None]
    if not known:
        return None
    labels = [plain_text(row.label, _LABEL) for row, _ in known]
    values = {name: [table.get(name, 0) / 1e6 for _, table in known] for name in CLASSES}
    return stacked_bars(labels, values, "ms a step")


def _losses(rows: Sequence[Efficiency]) -> figure | None:
    """Draw what each class adds to the base's step to the right, savings to the left."""
    known = [row for row in rows if row.losses]
    if not known:
        return None
    labels = [plain_text(row.label, _LABEL) for row in known]
    plot = _bars("losses", labels, "ms a step")
    plot.x_range = DataRange1d(range_padding=0.02)
    lost = [{loss.name: loss.ns / 1e6 for loss in row.losses} for row in known]
    for sign in (1, -1):
        values = {
            name: [max(sign * table.get(name, 0), 0) * sign for table in lost] for name in CLASSES
        }
        names = [name for name in CLASSES if any(values[name])]
        drawn = plot.hbar_stack(
            names,
            y="row",
            height=0.8,
            source=ColumnDataSource({"row": labels, **values}),
            color=[class_color(name) for name in names],
            line_color="#808080",
            line_width=0.5,
        )
        for name, bar in zip(names, drawn, strict=True):
            tips = [("", "@row"), (class_label(name), f"@{name}{{+0,0.000}} ms")]
            plot.add_tools(HoverTool(renderers=[bar], tooltips=tips, visible=False))
    return plot


def _shares(
    summary: Summary, name: str, axis: str, value: Callable[[GpuShare], float]
) -> figure | None:
    """Draw a bar for each GPU of each placement."""
    bars = [
        ((plain_text(row.label, _LABEL), f"gpu {number}"), value(share), gpu_look(number)[0])
        for row in summary.placements
        for number, share in enumerate(row.shares)
    ]
    if not any(length for _, length, _ in bars):
        return None
    rows = [row for row, _, _ in bars]
    data = {"row": rows, "value": [b for _, b, _ in bars], "color": [c for _, _, c in bars]}
    plot = _bars(name, rows, axis)
    drawn = plot.hbar(
        y="row", right="value", height=0.8, source=ColumnDataSource(data), color="color"
    )
    tips = [("", "@row"), (axis, "@value{0,0.00}")]
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips, visible=False))
    plot.yaxis[0].update(group_label_orientation="horizontal")
    return plot
