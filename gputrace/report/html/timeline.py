"""Timeline of a page, reduced to what fits into a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bokeh.models import ColumnDataSource, HoverTool, Range1d, RangeTool, WheelZoomTool
from bokeh.plotting import figure

from gputrace.analyzers.findings.context import Facts
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.pipeline import Options, analyze
from gputrace.analyzers.timeline_model import Scene, SceneLane, full_scene
from gputrace.analyzers.timeline_model.cells import Runs, Tiled, reduce, tile
from gputrace.analyzers.timeline_model.gaps import WorstGap, worst_gaps
from gputrace.errors import InputError
from gputrace.model.results import Analysis
from gputrace.model.trace import Progress, Trace, Window
from gputrace.report.html.charts import GROUND, PHASES, class_list, new_figure, plain_text
from gputrace.report.tables import gpu_name, needs_ranks

_SHOWN_STEPS: Final = 3
"""Number of steps in the initial view, around the worst gap."""
_MOST_STEPS: Final = 20_000
_LANE_PX: Final = (46, 22)
"""Height of a lane in pixels: with few lanes, and with many."""
_MANY: Final = 8
_QUAD: Final = ("left", "right", "bottom", "top", "color", "what", "share")


def timeline_charts(material: Material) -> dict[str, figure]:
    """Draw the timeline, and the overview of the whole run that navigates it."""
    scene = material.scene
    origin, span = scene.origin, scene.span
    whole = ((span.start - origin) / 1e9, (span.end - origin) / 1e9)
    first = _first_window(material)
    shown = Range1d(
        start=first[0] / 1e9, end=first[1] / 1e9, bounds=whole, min_interval=1e-7, name="window"
    )
    tall, low = _LANE_PX
    lane_px = tall if len(scene.lanes) <= _MANY else low
    detail = _figure(scene, "timeline", 90 + lane_px * len(scene.lanes), shown)
    over = _figure(scene, "overview", 64 + (12 if lane_px == tall else 6) * len(scene.lanes), whole)
    over.add_tools(RangeTool(x_range=shown, start_gesture="pan"))
    over.toolbar_location = None
    # The page's script finds them by their names.
    lanes = [
        ColumnDataSource({"length": runs.length, "kind": runs.kind}, name=f"lane-{index}")
        for index, runs in enumerate(material.runs)
    ]
    detail.tags = [*lanes, _step_source(material.analysis, scene)]
    return {"overview": over, "timeline": detail}


def _step_source(analysis: Analysis, scene: Scene) -> ColumnDataSource:
    """Return steps and phases of the first rank that has steps, in seconds from the origin.

    Phases have the number -1. The warm-up phase is left out, as its steps carry it.
    """
    rank = min((step.rank for step in analysis.step_list), default=None)
    by_number = {step.step: step for step in analysis.step_list if step.rank == rank}
    steps = list(by_number.values())[:_MOST_STEPS]
    phases = [phase for phase in analysis.phases if phase.rank == rank and phase.phase != "warmup"]
    rows = [
        *((step.start_ns, step.end_ns, step.step, step.phase) for step in steps),
        *((phase.start_ns, phase.end_ns, -1, phase.phase) for phase in phases),
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


def _first_window(material: Material) -> tuple[int, int]:
    """Return the initial window, in nanoseconds from the origin: steps around the worst gap."""
    scene, steps = material.scene, material.analysis.step_list
    start, end = scene.span
    for worst in (worst.gap for worst in material.gaps[:1]):
        on_gpu = [step for step in steps if step.rank == worst.rank and step.gpu == worst.gpu]
        middle = (worst.start_ns + worst.end_ns) // 2
        on_gpu.sort(key=lambda step: abs((step.start_ns + step.end_ns) // 2 - middle))
        near, around = on_gpu[:_SHOWN_STEPS], 0 if on_gpu else worst.length_ns
        start = min([worst.start_ns - around, *(step.start_ns for step in near)])
        end = max([worst.end_ns + around, *(step.end_ns for step in near)])
    start, end = max(start, scene.span.start), min(end, scene.span.end)
    return start - scene.origin, end - scene.origin


def facts(material: Material) -> dict[str, Any]:
    """Return the plain values that the page's script needs beside the figures."""
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
    """Return ``gpu 3``, with rank and host where they differ between lanes."""
    label = gpu_name(lane.gpu, lane.rank, lane.gpu_known, needs_ranks(scene.lanes))
    several = lane.gpu is not None and len({other.host for other in scene.lanes}) > 1
    return plain_text(label + (f" {plain_text(lane.host, 24)}" if several else ""), 60)


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
    places = [count - index - 0.55 for index in range(count)]
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
    """Add the glyphs that the script fills: bars, the selected gap, steps, and labels."""
    sides = ("left", "right", "top", "bottom")
    # Without lines, the background would show between neighbours that meet inside a pixel.
    look: dict[str, Any] = {"fill_color": "color", "line_color": "color", "line_width": 0.7}
    bars = plot.quad(*sides, source=_empty(f"{name}-bars", _QUAD), **look)
    if name != "timeline":
        return
    tips = [("", "@what"), ("share", "@share"), ("from", "@left{0.000000000} s")]
    plot.add_tools(HoverTool(renderers=[bars], tooltips=tips, visible=False))
    for kind, alpha, line, width in (("steps", 0.35, "#9a9aa5", 1), ("chosen", 0, "#ffffff", 2)):
        look = {"fill_color": "color", "fill_alpha": alpha, "line_color": line, "line_width": width}
        plot.quad(*sides, source=_empty(f"{name}-{kind}", _QUAD[:5]), **look)
    look = {"text_align": "center", "text_baseline": "middle", "text_color": "color"}
    look |= {"text_font_size": "11px", "text_font_style": "bold"}
    words = _empty(f"{name}-words", ("x", "y", "text", "color"))
    plot.text("x", "y", "text", source=words, **look)


def _empty(name: str, columns: Sequence[str]) -> ColumnDataSource:
    return ColumnDataSource({column: [] for column in columns}, name=name)


MOST_RUNS: Final = 400_000
"""Maximum number of runs in a file: some 2.7 MB of text if incompressible."""
LONGEST_NS: Final = 100 * 86_400 * 10**9
"""Longest span drawn: a run holds at most four seconds, so a longer one needs too many."""


@dataclass(frozen=True)
class Material:
    """Data of a page."""

    analysis: Analysis
    scene: Scene
    gaps: tuple[WorstGap, ...]
    lanes: tuple[Tiled, ...]
    """All runs of each lane of the scene, over the scene's span."""
    runs: tuple[Runs, ...]
    """Runs of ``lanes``, reduced to what fits into a file."""

    @property
    def whole(self) -> bool:
        """True if nothing had to be reduced."""
        return all(lane_runs.whole for lane_runs in self.runs)

    def runs_around(self, start: int, end: int, most: int = MOST_RUNS) -> tuple[Runs, ...]:
        """Reduce the lanes, with full detail in a window, or exact shares where that is too much.

        Around the window they are coarse.
        """
        span = self.scene.span
        window = Window(max(start, span.start), min(end, span.end))
        return reduce(self.lanes, span, most, [window], between=window)


class _Watched:
    """Observer that keeps the facts of an analysis."""

    facts: Facts

    def operations_read(self, operations: Sequence[GpuOperations]) -> None:
        pass

    def facts_found(self, facts: Facts) -> None:
        self.facts = facts


def read_scene(trace: Trace, options: Options, progress: Progress | None = None) -> Scene:
    """Analyze a trace for its timeline; raise what `analyze` raises."""
    watched = _Watched()
    analysis = analyze(trace, options, progress, watched)
    return full_scene(watched.facts, analysis)


def gather(scene: Scene, most: int = MOST_RUNS) -> Material:
    """Reduce the timeline of a scene with an analysis.

    Raises InputError where rows lie so far apart that their times must be wrong.
    """
    analysis = scene.analysis
    assert analysis is not None
    apart = scene.span.end - scene.span.start
    if apart > LONGEST_NS:
        days = f"its rows lie {apart / 86_400e9:,.0f} days apart"
        raise InputError(scene.title, f"{days}, too far to be drawn; give a part (--time)")
    gaps = worst_gaps(scene, analysis)
    lanes = tuple(tile(lane.layers, scene.span) for lane in scene.lanes)
    matter = [*(gap.itself for gap in gaps), *(gap.around for gap in gaps)]
    return Material(analysis, scene, gaps, lanes, reduce(lanes, scene.span, most, matter))


def file_name(analysis: Analysis) -> str:
    """Return the name of the trace in a page's title."""
    more = len(analysis.paths) - 1
    return Path(analysis.path).name + (f" and {more} more" if more else "")
