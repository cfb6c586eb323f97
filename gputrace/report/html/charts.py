"""Charts of a page other than the timeline, and its colours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from bokeh.core.properties import value
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    FactorRange,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.models.annotations import Legend, LegendItem, Whisker
from bokeh.plotting import figure

from gputrace.analyzers.timeline_model.cells import RUN_CLASSES
from gputrace.model.cards import Curve, Utilization
from gputrace.model.intervals import union
from gputrace.model.options import Window
from gputrace.model.results import Analysis
from gputrace.model.time_class import CLASSES
from gputrace.report.palette import LOOKS, NOTHING
from gputrace.report.tables import CLASS_NAMES
from gputrace.report.wording import card_name, gpu_label
from gputrace.sanitize import clean

CURVES: Final = {
    "busy": ("GPU busy, %", 1.0),
    "utilization": ("utilization, %", 1.0),
    "memory": ("memory in use, GiB", 2.0**-30),
    "sm_clock": ("SM clock, MHz", 1.0),
    "memory_clock": ("memory clock, MHz", 1.0),
    "power": ("power, W", 1.0),
    "temperature": ("temperature, °C", 1.0),
    "sm_active": ("SMs active, %", 1.0),
    "tensor_active": ("tensor cores active, %", 1.0),
    "dram_active": ("memory bandwidth used, %", 1.0),
    "nvlink_sent": ("sent over NVLink, GB/s", 1e-9),
    "pcie_received": ("received over PCIe, GB/s", 1e-9),
}
"""Curves of a run: label of the axis, and factor that scales the values to its unit."""

_BAR_PX: Final = 26
"""Height of a bar, with spacing."""
_ENTRY_PX: Final = 16
"""Height of an entry of a legend."""
_ABOVE_PX: Final = 46
"""Height of what is above a legend, and of its margins."""
_FEW_POINTS: Final = 80
"""Curves of up to so many points get dots, too."""
_OVER: Final = 1.2
"""Height of the chart of step times, relative to the longest steady step."""
_MOST_STEPS: Final = 20_000
"""Maximum number of steps of a rank in the chart of step times; later ones are left out."""


def new_figure(name: str, height: int, **options: Any) -> figure:
    """Return an empty chart in the style and width of the page."""
    plot = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        border_fill_alpha=0,
        outline_line_alpha=0,
        lod_threshold=None,
        **{
            "background_fill_alpha": 0,
            "tools": "xpan,xbox_zoom,reset",
            "toolbar_location": "above",
            **options,
        },
    )
    plot.toolbar.logo = None
    plot.grid.grid_line_alpha = 0.25
    return plot


def add_tips(
    plot: figure,
    drawn: Any,
    tips: Sequence[tuple[str, str]],
    attachment: Literal["horizontal", "below"] = "horizontal",
) -> None:
    """Show words and values beside the pointer over a glyph."""
    plot.add_tools(
        HoverTool(renderers=[drawn], tooltips=list(tips), attachment=attachment, visible=False)
    )


def measured_window(analysis: Analysis) -> Window | None:
    """Return the time from the first measured step to the last one; None without any."""
    steady = [step for step in analysis.step_list if step.phase == "steady"]
    if not steady:
        return None
    return Window(min(step.start_ns for step in steady), max(step.end_ns for step in steady))


def folded_range(
    measured: tuple[float, float], whole: tuple[float, float], share: float = 0.03
) -> Range1d:
    """Return a range that first shows the measured part; a button of the page unfolds the rest.

    The page's script finds both parts in its tags. A share of the part's length is its margin.
    """
    margin = share * (measured[1] - measured[0])
    low, high = max(measured[0] - margin, whole[0]), min(measured[1] + margin, whole[1])
    if not low < high:
        low, high = whole
    return Range1d(start=low, end=high, bounds=whole, tags=[low, high, *whole])


def run_charts(analysis: Analysis) -> dict[str, figure]:
    """Draw the utilization curves of the GPUs, on a shared time axis that starts at 0 or later."""
    use = analysis.utilization
    if use is None:
        return {}
    sampled = {curve.name for gpu in use.gpus for curve in gpu.curves}
    start, end = max(use.start_ns, analysis.origin_ns), use.end_ns
    measured = measured_window(analysis) or (start, end)
    shown, whole = (
        ((first - analysis.origin_ns) / 1e9, (last - analysis.origin_ns) / 1e9)
        for first, last in (measured, (start, end))
    )
    axis = folded_range(shown, whole)
    return {name: _run_chart(analysis, use, name, axis) for name in CURVES if name in sampled}


def _run_chart(analysis: Analysis, use: Utilization, name: str, axis: Range1d) -> figure:
    origin, (label, scale) = analysis.origin_ns, CURVES[name]
    drawn = [
        (index, gpu, curve)
        for index, gpu in enumerate(use.gpus)
        for curve in gpu.curves
        if curve.name == name
    ]
    top = max(max(curve.high, default=0) for _, _, curve in drawn) * scale
    limit = 100.0 if label.endswith("%") else max(top * 1.08, 1e-9)
    plot = new_figure(
        name,
        190,
        x_range=axis,
        y_range=(0, limit * 1.02),
        x_axis_label="seconds",
        y_axis_label=label,
    )
    _shade(plot, analysis, limit * 1.02)
    hosts = len({gpu.host for gpu in use.gpus}) > 1
    entries = [
        (
            plain_text(card_name(gpu.gpu, analysis) + (f" {gpu.host}" if hosts else "")),
            _line(plot, index, curve, origin, scale),
        )
        for index, gpu, curve in drawn
    ]
    add_legend(plot, entries)
    return plot


def _line(plot: figure, index: int, curve: Curve, origin: int, scale: float) -> list[Any]:
    """Draw the mean; where points aggregate samples, a band shows their extremes."""
    color, dash = gpu_look(index)
    values = {"y": curve.mean, "low": curve.low, "high": curve.high}
    data = {name: [value * scale for value in column] for name, column in values.items()}
    look: dict[str, Any] = {
        "source": ColumnDataSource({"x": [(at - origin) / 1e9 for at in curve.time_ns], **data}),
        "color": color,
    }
    drawn: list[Any] = []
    if curve.low != curve.high:
        drawn.append(plot.varea("x", "low", "high", fill_alpha=0.2, **look))
    drawn.append(plot.line("x", "y", line_dash=dash, line_width=1.8, **look))
    if len(curve.time_ns) <= _FEW_POINTS:
        drawn.append(plot.scatter("x", "y", size=5, **look))
    return drawn


def _shade(plot: figure, analysis: Analysis, top: float) -> None:
    """Shade phases behind the curves, each kind in its colour."""
    origin = analysis.origin_ns
    entries = []
    for phase, color in PHASES.items():
        matching = [match for match in analysis.phases if match.phase == phase]
        spans = union([match.start_ns for match in matching], [match.end_ns for match in matching])
        if len(spans):
            data = {"left": (spans.start - origin) / 1e9, "right": (spans.end - origin) / 1e9}
            look: dict[str, Any] = {"fill_color": color, "fill_alpha": 0.13, "line_color": None}
            look["source"] = ColumnDataSource(data)
            drawn = plot.quad("left", "right", bottom=0, top=top, **look)
            entries.append((phase, [drawn]))
    add_legend(plot, entries)


def add_legend(
    plot: figure, entries: Sequence[tuple[str, list[Any]]], points: Sequence[int] = ()
) -> None:
    """Add entries to the legend beside the chart; a click on one hides its line.

    Each shows its first point's look, or that of the one given in ``points``.
    """
    if not entries:
        return
    # As a value: a string that is a column's name would be that column.
    items = [LegendItem(label=value(label), renderers=drawn) for label, drawn in entries]
    for item, index in zip(items, points, strict=False):
        item.index = index
    if plot.legend:
        items = plot.legend.items = [*plot.legend.items, *items]
    else:
        legend = Legend(
            items=items,
            click_policy="hide",
            background_fill_alpha=0,
            border_line_alpha=0,
            label_text_font_size="11px",
            label_height=_ENTRY_PX,
            glyph_height=_ENTRY_PX,
        )
        legend.update(spacing=0, padding=0)
        plot.add_layout(legend, "right")
    plot.height = max(plot.height or 0, _ABOVE_PX + _ENTRY_PX * len(items))


def step_chart(analysis: Analysis) -> figure | None:
    """Draw the duration of each step by rank, or by GPU where each rank has one; steps of other
    phases than steady are hollow.

    The axis ends above the longest steady step; longer steps are triangles at its edge.
    """
    steps = analysis.step_list
    if not steps:
        return None
    steady = [step for step in steps if step.phase == "steady"] or steps
    top = _OVER * max(step.end_ns - step.start_ns for step in steady) / 1e6
    numbers, first = [step.step for step in steps], min(step.step for step in steady)
    ends = (min(numbers) - 0.5, max(numbers) + 0.5)
    axis = folded_range((first - 0.5, ends[1]), ends, 0)
    plot = new_figure(
        "steps", 220, x_range=axis, y_range=(0, top), x_axis_label="step", y_axis_label="ms"
    )
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    entries, typical = [], []
    ranks = sorted({step.rank for step in steps})
    for index, rank in enumerate(ranks):
        gpus = {gpu_label(step, analysis) for step in steps if step.rank == rank}
        label = gpus.pop() if len(gpus) == 1 else f"rank {rank}" if len(ranks) > 1 else "all GPUs"
        by_number = {step.step: step for step in steps if step.rank == rank}
        shown = list(by_number.values())[:_MOST_STEPS]
        color, dash = gpu_look(index)
        ms = [(step.end_ns - step.start_ns) / 1e6 for step in shown]
        points = ColumnDataSource(
            {
                "x": [step.step for step in shown],
                "y": [min(length, top * 0.97) for length in ms],
                "ms": ms,
                "fill": [color if step.phase == "steady" else "#ffffff" for step in shown],
                "marker": ["circle" if length <= top else "triangle" for length in ms],
                "phase": [step.phase for step in shown],
            }
        )
        look: dict[str, Any] = {"source": points, "line_color": color}
        line = plot.line("x", "y", line_dash=dash, line_alpha=0.6, **look)
        dots = plot.scatter("x", "y", marker="marker", size=6, fill_color="fill", **look)
        tips = [("", label), ("step", "@x"), ("ms", "@ms{0,0.00}"), ("phase", "@phase")]
        add_tips(plot, dots, tips)
        entries.append((plain_text(label), [line, dots]))
        typical.append(next((at for at, step in enumerate(shown) if step.phase == "steady"), 0))
    add_legend(plot, entries, typical)
    return plot


def class_chart(analysis: Analysis) -> figure | None:
    """Draw the breakdown of a step on each GPU, in milliseconds per step."""
    rows = [row for row in analysis.breakdown if row.compute_ns is not None]
    if not rows:
        return None
    values = {name: [row.of(name) / max(row.steps, 1) / 1e6 for row in rows] for name in CLASSES}
    labels: list[str] = []
    seen: Counter[str] = Counter()
    for row in rows:
        label = gpu_label(row, analysis)
        seen[label] += 1
        # They name the rows of the chart, and must differ.
        labels.append(plain_text(f"{label} ({seen[label]})" if seen[label] > 1 else label))
    loop = "ms a step" if any(row.steps for row in rows) else "ms, whole span"
    return stacked_bars(labels, values, loop)


def gpus_chart(name: str, height: int, gpus: Iterable[int], label: str) -> figure:
    """Return an empty chart over numbers of GPUs, whose other axis begins at 0."""
    plot = new_figure(
        name,
        height,
        y_range=DataRange1d(start=0),
        x_axis_label="GPUs",
        y_axis_label=label,
        tools="",
        toolbar_location=None,
    )
    plot.xaxis.ticker = sorted(set(gpus))
    return plot


def draw_points(
    plot: figure, points: ColumnDataSource, color: str, dash: Sequence[int] = ()
) -> list[Any]:
    """Draw the values over numbers of GPUs: a line, and dots."""
    look: dict[str, Any] = {"source": points, "color": color}
    line = plot.line("gpus", "value", line_dash=dash, line_width=2, **look)
    return [line, plot.scatter("gpus", "value", size=9, **look)]


def draw_spread(plot: figure, points: ColumnDataSource, base: str, **look: Any) -> None:
    """Draw from the low to the high of each row."""
    plot.add_layout(Whisker(source=points, base=base, lower="low", upper="high", **look))


def stacked_bars(labels: Sequence[str], values: Mapping[str, Sequence[float]], axis: str) -> figure:
    """Draw a bar for each label, stacked from the classes with any time."""
    names = [name for name in CLASSES if any(values.get(name, ()))]
    data: dict[str, Any] = {"row": labels, **{name: values[name] for name in names}}
    plot = bars_chart("classes", labels, axis)
    for name, bar in draw_stack(plot, names, data).items():
        add_tips(plot, bar, [(class_label(name), f"@{name}{{0,0.000}} ms")])
    return plot


def draw_stack(
    plot: figure, names: Sequence[str], data: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Draw a bar for each row, stacked from the columns of classes; return each class's part."""
    look: dict[str, Any] = {"height": 0.8, "line_color": "#808080", "line_width": 0.5}
    colors, source = [class_color(name) for name in names], ColumnDataSource(data)
    drawn = plot.hbar_stack(names, y="row", fill_color=colors, source=source, **look)
    return dict(zip(names, drawn, strict=True))


def bars_chart(name: str, rows: Sequence[Any], axis: str) -> figure:
    """Return an empty chart with a line for each of the rows, from the top."""
    plot = new_figure(
        name,
        70 + _BAR_PX * len(rows),
        x_range=DataRange1d(start=0, range_padding=0.02),
        y_range=FactorRange(factors=list(rows)[::-1]),
        x_axis_label=axis,
        tools="",
        toolbar_location=None,
    )
    plot.ygrid.visible = False
    return plot


GROUND: Final = "#16161c"
"""Background of class colours, which are chosen for it."""

_GPUS: Final = ("#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#0072b2", "#d55e00", "#8a8a8a")
"""Colours by Okabe and Ito from green on, without the yellow that vanishes on white."""
DASHED: Final = (6,)
_DASHES: Final = ((), DASHED, (2, 4), (2, 4, 6, 4))
"""Pixels drawn and left out, in turn."""
PHASES: Final = {"warmup": "#e69f00", "validation": "#56b4e9", "checkpoint": "#cc79a7"}

_LABELS: Final = CLASS_NAMES | {
    "host_data": "waits for data",
    "host_rest": "the rest",
    "unknown": "outside of what was recorded",
}


def gpu_look(index: int) -> tuple[str, tuple[int, ...]]:
    """Return the colour and the dash pattern of a GPU's line, by its index in the list."""
    return _GPUS[index % len(_GPUS)], _DASHES[index // len(_GPUS) % len(_DASHES)]


def class_color(name: str) -> str:
    """Return the colour of one of `RUN_CLASSES`."""
    return LOOKS.get(name, NOTHING).color


def class_label(name: str) -> str:
    """Return the display name of one of `RUN_CLASSES`."""
    return _LABELS[name]


def class_list() -> list[dict[str, str]]:
    """Return name, label and colour of every run class, in the order of their numbers."""
    return [
        {"name": name, "label": class_label(name), "color": class_color(name)}
        for name in RUN_CLASSES
    ]


LONGEST: Final = 200
"""Longest name shown, in characters."""


def plain_text(text: str, most: int = LONGEST) -> str:
    """Cut text to one line without control characters and without what charts take for TeX."""
    return clean(text, most).replace("$$", "$ $").replace("\\(", "\\ (").replace("\\[", "\\ [")
