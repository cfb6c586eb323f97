"""Charts of a study's page: speeds, efficiency, losses, classes of time, and GPUs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from bokeh.models import ColumnDataSource, DataRange1d, NumeralTickFormatter
from bokeh.plotting import figure

from gputrace.model.time_class import CLASSES
from gputrace.report.html.charts import (
    DASHED,
    add_legend,
    add_tips,
    bars_chart,
    class_label,
    draw_points,
    draw_spread,
    draw_stack,
    gpu_look,
    gpus_chart,
    plain_text,
    stacked_bars,
)
from gputrace.studies.results import ConfigurationResult, Efficiency, GpuShare, Summary

_GREEN: Final = "#009e73"
_IDEAL: Final[dict[str, Any]] = {"line_color": "#8a8a8a", "line_dash": DASHED}
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
    plot = gpus_chart("rates", _TALL, (row.gpus for row in rows), "samples/s")
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    entries, ideal, tops = (
        list[tuple[str, list[Any]]](),
        list[Any](),
        list[float](),
    )
    for number, (series, members) in enumerate(_series(rows).items()):
        look = gpu_look(number)
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
        draw_spread(plot, points, "gpus", line_color=look[0])
        tops += [*columns["high"], *columns["ideal"]]
    plot.y_range.update(end=_ROOM * max(tops))
    add_legend(plot, [*entries, ("ideal", ideal)])
    return plot


def _efficiency_chart(rows: Sequence[Efficiency]) -> figure:
    gpus = sorted({row.gpus for row in rows})
    plot = gpus_chart("efficiency", _TALL, gpus, "efficiency, %")
    entries = []
    for number, (series, members) in enumerate(_series(rows).items()):
        percent = [100 * row.efficiency for row in members]
        points = ColumnDataSource({"gpus": [row.gpus for row in members], "value": percent})
        entries.append(
            (series, _line(plot, points, gpu_look(number), "efficiency", "@value{0.0} %"))
        )
    whole = ColumnDataSource({"gpus": gpus, "ideal": [100.0] * len(gpus)})
    ideal = plot.line("gpus", "ideal", source=whole, **_IDEAL)
    add_legend(plot, [*entries, ("ideal", [ideal])])
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
    plot: figure, points: ColumnDataSource, look: tuple[str, Sequence[int]], word: str, value: str
) -> list[Any]:
    drawn = draw_points(plot, points, *look)
    add_tips(plot, drawn[-1], [("GPUs", "@gpus"), (word, value)])
    return drawn


def _rate_bars(rows: Sequence[ConfigurationResult]) -> figure | None:
    """Draw a bar for each configuration, with the range of its repeats."""
    known = [(row, row.rate) for row in rows if row.rate is not None]
    if not known:
        return None
    labels = [plain_text(row.label, _LABEL) for row, _ in known]
    points = ColumnDataSource(
        {
            "row": labels,
            "value": [rate.median for _, rate in known],
            "low": [rate.low for _, rate in known],
            "high": [rate.high for _, rate in known],
        }
    )
    plot = bars_chart("rates", labels, "samples/s")
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    bars = plot.hbar("row", right="value", height=0.7, color=_GREEN, source=points)
    plot.x_range.update(end=_ROOM * max(rate.high for _, rate in known))
    if any(rate.count > 1 for _, rate in known):
        draw_spread(plot, points, "row", dimension="width")
    tips = [("", "@row"), ("samples/s", "@value{0,0}"), ("range", "@low{0,0} to @high{0,0}")]
    add_tips(plot, bars, tips)
    return plot


def _classes(rows: Sequence[ConfigurationResult]) -> figure | None:
    known = [(row, row.classes) for row in rows if row.classes is not None]
    if not known:
        return None
    labels = [plain_text(row.label, _LABEL) for row, _ in known]
    values = {name: [table.get(name, 0) / 1e6 for _, table in known] for name in CLASSES}
    return stacked_bars(labels, values, "ms a step")


def _losses_chart(rows: Sequence[Efficiency]) -> figure | None:
    """Draw what each class adds to the base's step to the right, savings to the left."""
    known = [row for row in rows if row.losses]
    if not known:
        return None
    labels = [plain_text(row.label, _LABEL) for row in known]
    plot = bars_chart("losses", labels, "ms a step")
    plot.x_range = DataRange1d(range_padding=0.02)
    lost = [{loss.name: loss.ns / 1e6 for loss in row.losses} for row in known]
    for sign in (1, -1):
        values = {
            name: [max(sign * table.get(name, 0), 0) * sign for table in lost] for name in CLASSES
        }
        names = [name for name in CLASSES if any(values[name])]
        for name, bar in draw_stack(plot, names, {"row": labels, **values}).items():
            tips = [("", "@row"), (class_label(name), f"@{name}{{+0,0.000}} ms")]
            add_tips(plot, bar, tips)
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
    plot = bars_chart(name, rows, axis)
    points = ColumnDataSource(data)
    drawn = plot.hbar("row", right="value", height=0.8, color="color", source=points)
    add_tips(plot, drawn, [("", "@row"), (axis, "@value{0,0.00}")])
    plot.yaxis[0].update(group_label_orientation="horizontal")
    return plot
