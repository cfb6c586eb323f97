"""The charts of a page but for the timeline: what each GPU did over the run, and in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bokeh.models import ColumnDataSource, DataRange1d, HoverTool, NumeralTickFormatter
from bokeh.models.annotations import Legend, LegendItem
from bokeh.plotting import figure

from gputrace.analyzers.intervals import union
from gputrace.analyzers.results import CLASSES, Analysis
from gputrace.analyzers.results.cards import Curve, GpuCurves, Utilization
from gputrace.views.page.colors import PHASES, class_color, class_label, gpu_look
from gputrace.views.page.plain import plain_text
from gputrace.views.tables import gpu_label

CURVES: Final = {
    "busy": ("runs anything, %", 1.0),
    "utilization": ("utilization, %", 1.0),
    "memory": ("memory in use, GiB", 2.0**-30),
    "sm_clock": ("SM clock, MHz", 1.0),
    "memory_clock": ("memory clock, MHz", 1.0),
    "power": ("power, W", 1.0),
    "temperature": ("temperature, °C", 1.0),
}
"""The curves of a run: what is on their axis, and what their values are multiplied by."""

_FEW_POINTS: Final = 80
"""Up to so many of a curve are drawn as dots too."""
_OVER: Final = 1.2
"""The top of the chart of step times, by the longest step after warm-up."""
_MOST_STEPS: Final = 20_000
"""Of a rank, in the chart of step times: the first ones."""


def new_figure(name: str, height: int, **options: Any) -> figure:
    """An empty chart in the style of the page, as wide as the page."""
    plot = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_alpha=0,
        lod_threshold=None,
        **{"tools": "xpan,xbox_zoom,reset", "toolbar_location": "above", **options},
    )
    plot.toolbar.logo = None
    plot.grid.grid_line_alpha = 0.25
    return plot


def run_charts(analysis: Analysis) -> dict[str, figure]:
    """What is known of the GPUs over the whole run, on one axis of time."""
    use = analysis.utilization
    if use is None:
        return {}
    charts = {
        name: _run_chart(analysis, use, name, label, scale)
        for name, (label, scale) in CURVES.items()
        if any(_curve(gpu, name) for gpu in use.gpus)
    }
    for chart in charts.values():
        chart.x_range = next(iter(charts.values())).x_range
    return charts


def _run_chart(analysis: Analysis, use: Utilization, name: str, label: str, scale: float) -> figure:
    origin = analysis.origin_ns
    drawn = [(place, gpu, _curve(gpu, name)) for place, gpu in enumerate(use.gpus)]
    top = max(max(one.high, default=0) for _, _, one in drawn if one is not None) * scale
    limit = 100.0 if label.endswith("%") else max(top * 1.08, 1e-9)
    plot = new_figure(
        name,
        190,
        x_range=((use.start_ns - origin) / 1e9, (use.end_ns - origin) / 1e9),
        y_range=(0, limit * 1.02),
        x_axis_label="seconds",
        y_axis_label=label,
    )
    _shade(plot, analysis, limit * 1.02)
    entries = [
        (plain_text(_card_label(gpu, use)), _line(plot, place, one, origin, scale))
        for place, gpu, one in drawn
        if one is not None
    ]
    add_legend(plot, entries)
    return plot


def _line(plot: figure, place: int, curve: Curve, origin: int, scale: float) -> list[Any]:
    """The mean; where a point stands for several samples, their extremes as a band around it."""
    color, dash = gpu_look(place)
    source = ColumnDataSource(
        {
            "x": [(moment - origin) / 1e9 for moment in curve.time_ns],
            "y": [value * scale for value in curve.mean],
            "low": [value * scale for value in curve.low],
            "high": [value * scale for value in curve.high],
        }
    )
    drawn: list[Any] = []
    if curve.low != curve.high:
        drawn.append(
            plot.varea("x", "low", "high", source=source, fill_color=color, fill_alpha=0.2)
        )
    drawn.append(plot.line("x", "y", source=source, color=color, line_dash=dash, line_width=1.8))
    if len(curve.time_ns) <= _FEW_POINTS:
        drawn.append(plot.scatter("x", "y", source=source, color=color, size=5))
    return drawn


def _curve(gpu: GpuCurves, name: str) -> Curve | None:
    return next((curve for curve in gpu.curves if curve.name == name), None)


def _card_label(gpu: GpuCurves, use: Utilization) -> str:
    several = len({one.host for one in use.gpus}) > 1
    return f"gpu {gpu.gpu}" + (f" {gpu.host}" if several else "")


def _shade(plot: figure, analysis: Analysis, top: float) -> None:
    """Phases behind the curves, each kind with its colour."""
    origin = analysis.origin_ns
    entries = []
    for phase, color in PHASES.items():
        own = [one for one in analysis.phases if one.phase == phase]
        spans = union([one.start_ns for one in own], [one.end_ns for one in own])
        if len(spans):
            source = {"left": (spans.start - origin) / 1e9, "right": (spans.end - origin) / 1e9}
            drawn = plot.quad(
                "left",
                "right",
                bottom=0,
                top=top,
                source=ColumnDataSource(source),
                fill_color=color,
                fill_alpha=0.13,
                line_color=None,
            )
            entries.append((phase, [drawn]))
    add_legend(plot, entries)


def add_legend(plot: figure, entries: Sequence[tuple[str, list[Any]]]) -> None:
    """Beside the chart; a click hides a line."""
    if not entries:
        return
    items = [LegendItem(label=label, renderers=drawn) for label, drawn in entries]
    legend = plot.legend[0] if len(plot.legend) else None
    if legend is not None:
        legend.items = [*legend.items, *items]
        return
    legend = Legend(items=items, click_policy="hide", background_fill_alpha=0, border_line_alpha=0)
    legend.update(label_text_font_size="11px", spacing=0, padding=0)
    plot.add_layout(legend, "right")


def step_chart(analysis: Analysis) -> figure | None:
    """How long each step of each rank took; those of warm-up and other phases are hollow.

    The axis ends above the longest steady step; what is longer is a triangle at the edge.
    """
    steps = analysis.step_list
    if not steps:
        return None
    steady = [step for step in steps if step.phase == "steady"] or steps
    top = _OVER * max(step.end_ns - step.start_ns for step in steady) / 1e6
    plot = new_figure("steps", 220, y_range=(0, top), x_axis_label="step", y_axis_label="ms")
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    entries = []
    for place, rank in enumerate(sorted({step.rank for step in steps})):
        own = {step.step: step for step in steps if step.rank == rank}
        shown = list(own.values())[:_MOST_STEPS]
        color, dash = gpu_look(place)
        ms = [(step.end_ns - step.start_ns) / 1e6 for step in shown]
        source = ColumnDataSource(
            {
                "x": [step.step for step in shown],
                "y": [min(length, top * 0.97) for length in ms],
                "ms": ms,
                "fill": [color if step.phase == "steady" else "#ffffff" for step in shown],
                "marker": ["circle" if length <= top else "triangle" for length in ms],
                "phase": [step.phase for step in shown],
            }
        )
        line = plot.line("x", "y", source=source, color=color, line_dash=dash, line_alpha=0.6)
        dots = plot.scatter(
            "x", "y", marker="marker", source=source, size=6, line_color=color, fill_color="fill"
        )
        plot.add_tools(_step_hover(rank, dots))
        entries.append((f"rank {rank}", [line, dots]))
    add_legend(plot, entries)
    return plot


def _step_hover(rank: int, dots: Any) -> HoverTool:
    tips = [("rank", str(rank)), ("step", "@x"), ("ms", "@ms{0,0.00}"), ("phase", "@phase")]
    return HoverTool(renderers=[dots], tooltips=tips, visible=False)


def class_chart(analysis: Analysis) -> figure | None:
    """Where a step's time goes on each GPU; milliseconds a step."""
    rows = [row for row in analysis.breakdown if row.compute_ns is not None]
    if not rows:
        return None
    values = {name: [row.of(name) / max(row.steps, 1) / 1e6 for row in rows] for name in CLASSES}
    labels = [plain_text(label) for label in _distinct(gpu_label(row, analysis) for row in rows)]
    loop = "ms a step" if any(row.steps for row in rows) else "ms, whole span"
    return stacked_bars(labels, values, loop)


def stacked_bars(labels: Sequence[str], values: Mapping[str, Sequence[float]], axis: str) -> figure:
    """A bar for each label, of the classes of which there is some."""
    names = [name for name in CLASSES if any(values.get(name, ()))]
    data: dict[str, Any] = {"row": labels, **{name: values[name] for name in names}}
    plot = new_figure(
        "classes",
        70 + 26 * len(labels),
        x_range=DataRange1d(start=0, range_padding=0.02),
        y_range=labels[::-1],
        x_axis_label=axis,
        tools="",
        toolbar_location=None,
    )
    drawn = plot.hbar_stack(
        names,
        y="row",
        height=0.8,
        source=ColumnDataSource(data),
        color=[class_color(name) for name in names],
        line_color="#808080",
        line_width=0.5,
    )
    for name, bar in zip(names, drawn, strict=True):
        tips = [(class_label(name), f"@{name}{{0,0.000}} ms")]
        plot.add_tools(HoverTool(renderers=[bar], tooltips=tips, visible=False))
    plot.ygrid.visible = False
    return plot


def _distinct(labels: Iterator[str]) -> Iterator[str]:
    """The labels, made different where two are equal: they name the rows of a chart."""
    seen: dict[str, int] = {}
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        yield label if seen[label] == 1 else f"{label} ({seen[label]})"
