"""The charts of a study."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from bokeh.models import ColumnDataSource, DataRange1d, FactorRange, HoverTool, NumeralTickFormatter
from bokeh.models.annotations import Whisker
from bokeh.plotting import figure

from gputrace.analyzers.results import CLASSES
from gputrace.bench.answer import Efficiency, GpuShare, Row, Summary
from gputrace.views.page.charts import add_legend, new_figure, stacked_bars
from gputrace.views.page.colors import class_color, class_label, gpu_look
from gputrace.views.page.plain import plain_text

_GREEN: Final = "#009e73"
_IDEAL: Final = "#8a8a8a"
_LABEL: Final = 80
"""Letters of a label."""
_ROOM: Final = 1.03
"""Of an axis, for each of its greatest value: a chart by itself leaves none to whiskers."""
_BAR: Final = 26
"""Pixels of a bar and the space beside it."""


def find_charts(summary: Summary) -> dict[str, figure]:
    """All figures of the page by name; only those that there is something to draw in."""
    scaled = [row for row in summary.efficiency if row.rate > 0]
    made = {
        "rates": (
            _rates_by_gpus(summary, scaled) if all_scale(summary) else _rate_bars(summary.rows)
        ),
        "efficiency": _efficiency(scaled) if scaled else None,
        "losses": _losses(scaled),
        "classes": _classes(summary.rows),
        "compute": _shares(summary, "compute", "ms a step", lambda own: own.compute_ns / 1e6),
        "memory": _shares(summary, "memory", "GiB", lambda own: (own.memory_bytes or 0) / 2**30),
    }
    return {name: chart for name, chart in made.items() if chart is not None}


def all_scale(summary: Summary) -> bool:
    """Whether lines over GPUs show all speeds: none is of a configuration that has no base."""
    scaled = {row.label for row in summary.efficiency if row.rate > 0}
    known = {row.label for row in summary.rows if row.rate is not None}
    return bool(scaled) and known <= scaled


def _rates_by_gpus(summary: Summary, rows: Sequence[Efficiency]) -> figure:
    """A line for each series, with the range of the repeats, and what would be ideal."""
    ranges = {row.label: row.rate for row in summary.rows}
    plot = _by_gpus("rates", "samples/s", rows)
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    entries: list[tuple[str, list[Any]]] = []
    ideal: list[Any] = []
    tops: list[float] = []
    for place, (series, own) in enumerate(_series(rows).items()):
        color, dash = gpu_look(place)
        spreads = [ranges[row.label] for row in own]
        first = own[0]
        source = ColumnDataSource(
            {
                "gpus": [row.gpus for row in own],
                "value": [row.rate for row in own],
                "low": [one.low if one else 0.0 for one in spreads],
                "high": [one.high if one else 0.0 for one in spreads],
                "ideal": [_ideal(row, first) for row in own],
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


def _ideal(row: Efficiency, first: Efficiency) -> float:
    """What as many GPUs would do if each did what one of the base does."""
    return row.rate / row.efficiency if row.efficiency else first.rate


def _efficiency(rows: Sequence[Efficiency]) -> figure:
    plot = _by_gpus("efficiency", "efficiency, %", rows)
    entries = []
    for place, (series, own) in enumerate(_series(rows).items()):
        color, dash = gpu_look(place)
        source = ColumnDataSource(
            {"gpus": [row.gpus for row in own], "value": [100 * row.efficiency for row in own]}
        )
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
    """Configurations that belong together, in order of GPUs, each series from its base on.

    A base of another series, as one GPU is of all placements, begins those that it is the base of.
    """
    found: dict[str, list[Efficiency]] = {}
    bases = {row.label: row for row in rows if row.label == row.base}
    for row in rows:
        if row.label != row.base:
            found.setdefault(row.series, [bases[row.base]]).append(row)
    return {
        plain_text(name, _LABEL) or "measured": sorted(own, key=lambda row: row.gpus)
        for name, own in found.items()
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
    """A bar for each configuration, with the range of its repeats."""
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
    """An empty chart with a line for each of the rows, from the top."""
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
    values = {name: [own.get(name, 0) / 1e6 for _, own in known] for name in CLASSES}
    return stacked_bars(labels, values, "ms a step")


def _losses(rows: Sequence[Efficiency]) -> figure | None:
    """What each class adds to the base's step, to the right; what it takes off, to the left."""
    known = [row for row in rows if row.losses]
    if not known:
        return None
    labels = [plain_text(row.label, _LABEL) for row in known]
    plot = _bars("losses", labels, "ms a step")
    plot.x_range = DataRange1d(range_padding=0.02)
    lost = [{loss.name: loss.ns / 1e6 for loss in row.losses} for row in known]
    for sign in (1, -1):
        values = {
            name: [max(sign * own.get(name, 0), 0) * sign for own in lost] for name in CLASSES
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
    """A bar for each GPU of each placement."""
    bars = [
        ((plain_text(row.label, _LABEL), f"gpu {place}"), value(share), gpu_look(place)[0])
        for row in summary.placements
        for place, share in enumerate(row.shares)
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
