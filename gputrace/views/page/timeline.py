"""The timeline of a page: empty figures, and the runs that the page's script draws into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bokeh.models import (
    ColumnDataSource,
    HoverTool,
    Range1d,
    RangeTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from gputrace.analyzers.results import Analysis
from gputrace.analyzers.scene.runs import Runs
from gputrace.analyzers.scene.scene import Scene, SceneLane
from gputrace.views.page.charts import new_figure
from gputrace.views.page.colors import GROUND, PHASES, class_list
from gputrace.views.page.material import Material
from gputrace.views.page.plain import plain_text

_SHOWN_STEPS: Final = 3
"""How many steps are in view at first, around the worst gap."""
_MOST_STEPS: Final = 20_000
_LANE_PX: Final = (46, 22)
"""The height of a lane: of few, and of many."""
_MANY: Final = 8
_QUAD: Final = ("left", "right", "bottom", "top", "color", "what", "share")
_TEXT: Final = ("x", "y", "text", "color")


def timeline_charts(material: Material) -> dict[str, figure]:
    """The timeline, and the overview of the whole run that moves it."""
    scene = material.scene
    origin, span = scene.origin, scene.span
    whole = ((span.start - origin) / 1e9, (span.end - origin) / 1e9)
    first = first_window(material)
    shown = Range1d(
        start=first[0] / 1e9, end=first[1] / 1e9, bounds=whole, min_interval=1e-7, name="window"
    )
    tall, low = _LANE_PX
    lane_px = tall if len(scene.lanes) <= _MANY else low
    detail = _figure(scene, "timeline", 90 + lane_px * len(scene.lanes), shown)
    over = _figure(scene, "overview", 64 + (12 if lane_px == tall else 6) * len(scene.lanes), whole)
    over.add_tools(RangeTool(x_range=shown, start_gesture="pan"))
    over.toolbar_location = None
    detail.tags = [*lane_sources(material.runs), step_source(material.analysis, scene)]
    return {"overview": over, "timeline": detail}


def lane_sources(runs: Sequence[Runs]) -> list[ColumnDataSource]:
    """A source of runs for each lane, which the page's script knows by its name."""
    return [
        ColumnDataSource({"length": own.length, "kind": own.kind}, name=f"lane-{place}")
        for place, own in enumerate(runs)
    ]


def step_source(analysis: Analysis, scene: Scene) -> ColumnDataSource:
    """Steps and phases of the first rank that has any, in seconds; a phase has no number, but -1.

    Warm-up is told by its steps.
    """
    rank = min((step.rank for step in analysis.step_list), default=None)
    own = {step.step: step for step in analysis.step_list if step.rank == rank}
    steps = list(own.values())[:_MOST_STEPS]
    phases = [one for one in analysis.phases if one.rank == rank and one.phase != "warmup"]
    rows = [
        *((step.start_ns, step.end_ns, step.step, step.phase) for step in steps),
        *((one.start_ns, one.end_ns, -1, one.phase) for one in phases),
    ]
    return ColumnDataSource(
        {
            "left": [(start - scene.origin) / 1e9 for start, *_ in rows],
            "right": [(end - scene.origin) / 1e9 for _, end, *_ in rows],
            "number": [number for *_, number, _ in rows],
            "phase": [phase for *_, phase in rows],
        },
        name="step-list",
    )


def first_window(material: Material) -> tuple[int, int]:
    """What is in view at first, in nanoseconds from the origin: some steps with the worst gap."""
    scene, steps = material.scene, material.analysis.step_list
    worst = next((worst.gap for worst in material.gaps), None)
    start, end = scene.span
    if worst is not None:
        own = [step for step in steps if step.rank == worst.rank and step.gpu == worst.gpu]
        middle = (worst.start_ns + worst.end_ns) // 2
        near = sorted(own, key=lambda step: abs((step.start_ns + step.end_ns) // 2 - middle))
        near = near[:_SHOWN_STEPS]
        start = min([worst.start_ns, *(step.start_ns for step in near)])
        end = max([worst.end_ns, *(step.end_ns for step in near)])
        if not near:
            start, end = worst.start_ns - worst.length_ns, worst.end_ns + worst.length_ns
    start, end = max(start, scene.span.start), min(end, scene.span.end)
    return start - scene.origin, end - scene.origin


def facts(material: Material) -> dict[str, Any]:
    """What the page's script must know beside the figures; plain values."""
    scene = material.scene
    return {
        "classes": class_list(),
        "phases": PHASES,
        "ground": GROUND,
        "start": scene.span.start - scene.origin,
        "end": scene.span.end - scene.origin,
        "lanes": [lane_label(lane, scene) for lane in scene.lanes],
    }


def lane_label(lane: SceneLane, scene: Scene) -> str:
    """``gpu 3``, with rank and host where they tell more."""
    if lane.gpu is None:
        return f"rank {lane.rank}"
    word = "gpu" if lane.gpu_known else "device"
    label = f"{word} {lane.gpu}" if lane.gpu >= 0 else "unknown device"
    if any(one.gpu != one.rank for one in scene.lanes) and len({x.rank for x in scene.lanes}) > 1:
        label += f" rank {lane.rank}"
    if len({one.host for one in scene.lanes}) > 1:
        label += f" {plain_text(lane.host, 24)}"
    return plain_text(label, 60)


def _figure(scene: Scene, name: str, height: int, x_range: Any) -> figure:
    count = len(scene.lanes)
    plot = new_figure(
        name,
        height,
        x_range=x_range,
        y_range=(0, count + (0.5 if name == "timeline" else 0)),
        x_axis_label="seconds",
        tools="xpan,xbox_zoom" if name == "timeline" else "",
        active_drag="xpan" if name == "timeline" else None,
    )
    plot.update(background_fill_color=GROUND, background_fill_alpha=1)
    plot.grid.visible = False
    places = [count - place - 0.55 for place in range(count)]
    plot.yaxis.ticker = places
    labels = [lane_label(lane, scene) for lane in scene.lanes]
    plot.yaxis.major_label_overrides = dict(zip(places, labels, strict=True))
    plot.yaxis.update(axis_line_alpha=0, major_tick_line_alpha=0)
    plot.xaxis.formatter.update(use_scientific=False, precision=9, power_limit_high=12)
    _glyphs(plot, name)
    if name == "timeline":
        plot.add_tools(WheelZoomTool(dimensions="width", modifiers={"ctrl": True}))
    return plot


def _glyphs(plot: figure, name: str) -> None:
    """What the script fills: bars, the mark of the chosen gap, the steps, and words."""
    bars = plot.quad(
        "left",
        "right",
        "top",
        "bottom",
        source=_empty(f"{name}-bars", _QUAD),
        fill_color="color",
        # Without lines, neighbours that end between two pixels would show the ground between them.
        line_color="color",
        line_width=0.7,
    )
    if name != "timeline":
        return
    tips = [("", "@what"), ("share", "@share"), ("from", "@left{0.000000000} s")]
    plot.add_tools(HoverTool(renderers=[bars], tooltips=tips, visible=False))
    for kind, line in (("steps", "#9a9aa5"), ("chosen", "#ffffff")):
        plot.quad(
            "left",
            "right",
            "top",
            "bottom",
            source=_empty(f"{name}-{kind}", _QUAD[:5]),
            fill_color="color",
            fill_alpha=0.35 if kind == "steps" else 0,
            line_color=line,
            line_width=1 if kind == "steps" else 2,
        )
    plot.text(
        "x",
        "y",
        "text",
        source=_empty(f"{name}-words", _TEXT),
        text_color="color",
        text_align="center",
        text_baseline="middle",
        text_font_size="11px",
        text_font_style="bold",
    )


def _empty(name: str, columns: Sequence[str]) -> ColumnDataSource:
    return ColumnDataSource({column: [] for column in columns}, name=name)
