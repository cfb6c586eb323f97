"""The page of a comparison: runs side by side, speed-up and efficiency, what changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bokeh.models import ColumnDataSource, DataRange1d, HoverTool
from bokeh.models.annotations import Whisker
from bokeh.plotting import figure

from gputrace.analyzers.compare import Comparison
from gputrace.analyzers.results import CLASSES
from gputrace.views.compare.scaling import scaling_tables
from gputrace.views.compare.tables import UNITS, notes, tables, verdict
from gputrace.views.page.charts import add_legend, new_figure, stacked_bars
from gputrace.views.page.document import common_variables, render_page
from gputrace.views.page.plain import plain_text
from gputrace.views.tables import Table

_NAME: Final = 60
_SEVERITIES: Final = {"slower": "high", "faster": "", "same": ""}


@dataclass(frozen=True, slots=True)
class Words:
    """What the page says."""

    title: str
    verdict: str
    severity: str
    runs: tuple[tuple[str, str], ...]
    """Label and file of each."""
    tables: tuple[Table, ...]
    notes: tuple[tuple[str, str], ...]
    summary: Mapping[str, str]


def render(comparison: Comparison) -> str:
    """The page as one HTML text that loads nothing from anywhere."""
    charts = _charts(comparison)
    return render_page(
        "compare.html", charts, common_variables(charts) | {"content": _words(comparison)}
    )


def _words(comparison: Comparison) -> Words:
    runs = tuple(
        (plain_text(run.label, 80), plain_text(", ".join(run.paths), 400))
        for run in comparison.runs
    )
    rows = comparison.scaling.rows if comparison.scaling is not None else ()
    speeds = "; ".join(
        f"{row.label} {row.speed_up:.2f} times, efficiency {row.efficiency:.0%}"
        for row in rows
        if row.speed_up is not None and row.efficiency is not None
    )
    told = f"By run: {speeds}." if speeds else ""
    return Words(
        title=plain_text(" and ".join(Path(run.paths[0]).name for run in comparison.runs), 300),
        verdict=plain_text(verdict(comparison), 1000),
        severity=_SEVERITIES.get(comparison.verdict, "low"),
        runs=runs,
        tables=(*tables(comparison, _NAME), *scaling_tables(comparison)),
        notes=tuple((heading, plain_text(note, 1000)) for heading, note in notes(comparison)),
        summary={
            "speed": plain_text(f"{told} The dashed line is as many times faster as GPUs.", 1000),
            "efficiency": plain_text(f"{told} The dashed line is ideal.", 1000),
            "classes": "The same as the table: the classes of time, one bar a run.",
        },
    )


def _charts(comparison: Comparison) -> dict[str, figure]:
    charts: dict[str, figure] = {}
    scaling = comparison.scaling
    if scaling is not None and any(row.speed_up is not None for row in scaling.rows):
        charts["speed"] = _speed_chart(comparison, "speed", "times faster")
        charts["efficiency"] = _speed_chart(comparison, "efficiency", "efficiency, %")
    pair = comparison.pair
    if pair is not None:
        classes = {row.name: row for row in pair.classes if row.name in CLASSES}
        labels = [plain_text(run.label, 80) for run in comparison.runs]
        values = {name: [row.a_ns / 1e6, row.b_ns / 1e6] for name, row in classes.items()}
        charts["classes"] = stacked_bars(labels, values, f"ms {UNITS[comparison.unit]}")
    return charts


def _speed_chart(comparison: Comparison, name: str, label: str) -> figure:
    """Measured, with its bounds where it is the speed-up, and ideal."""
    assert comparison.scaling is not None
    rows = [row for row in comparison.scaling.rows if row.speed_up is not None]
    least = min(row.gpus for row in rows)
    data: dict[str, Any] = {
        "gpus": [row.gpus for row in rows],
        "run": [plain_text(row.label, 80) for row in rows],
        "ideal": [row.gpus / least if name == "speed" else 100.0 for row in rows],
    }
    if name == "speed":
        data["value"] = [row.speed_up for row in rows]
        data["low"] = [row.speed_up_low or row.speed_up for row in rows]
        data["high"] = [row.speed_up_high or row.speed_up for row in rows]
    else:
        data["value"] = [100 * (row.efficiency or 0.0) for row in rows]
    source = ColumnDataSource(data)
    plot = new_figure(
        name, 260, y_range=DataRange1d(start=0), x_axis_label="GPUs", y_axis_label=label, tools=""
    )
    plot.toolbar_location = None
    plot.xaxis.ticker = sorted(set(data["gpus"]))
    line = plot.line("gpus", "value", source=source, color="#009e73", line_width=2)
    dots = plot.scatter("gpus", "value", source=source, color="#009e73", size=9)
    ideal = plot.line("gpus", "ideal", source=source, color="#8a8a8a", line_dash="dashed")
    if name == "speed":
        plot.add_layout(
            Whisker(base="gpus", lower="low", upper="high", source=source, line_color="#009e73")
        )
    tips = [("run", "@run"), ("GPUs", "@gpus"), (label, "@value{0.00}"), ("ideal", "@ideal{0.00}")]
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tips, visible=False))
    add_legend(plot, [("measured", [line, dots]), ("ideal", [ideal])])
    return plot
