"""Timeline of a page, reduced to what fits into a file."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from bokeh.models import (
    BasicTickFormatter,
    ColumnDataSource,
    Range1d,
    RangeTool,
    TapTool,
)
from bokeh.plotting import figure

from gputrace.analyzers.gpu_shards import Shard
from gputrace.analyzers.grouping import median
from gputrace.analyzers.kernel_names import short_name
from gputrace.analyzers.operations import classify
from gputrace.analyzers.timeline_model import Scene, SceneLane
from gputrace.analyzers.timeline_model.cells import Runs, Tiled, reduce, tile
from gputrace.analyzers.timeline_model.gaps import GapDetail, explain_step, worst_gaps
from gputrace.analyzers.timeline_model.trace_rows import (
    HOST_TRACKS,
    TrackRow,
    read_track_rows,
    read_window_rows,
)
from gputrace.errors import InputError
from gputrace.model.events import UNKNOWN, Kind
from gputrace.model.intervals import Intervals, union
from gputrace.model.options import Window
from gputrace.model.results import Analysis
from gputrace.model.trace import Trace
from gputrace.report.html import charts
from gputrace.report.palette import LOOKS
from gputrace.report.wording import capital, gpu_name, needs_ranks

_SHOWN_STEPS: Final = 3
"""Number of steps in the initial view, around the worst gap."""
_MOST_STEPS: Final = 20_000
_LEAST_NS: Final = 100
"""Shortest view."""
_LANE_PX: Final = (46, 22)
"""Height of a lane in pixels: with few lanes, and with many."""
_MANY: Final = 8
_TRACK_LOOKS: Final = {
    Kind.STEP: "host_rest",
    Kind.DATA_WAIT: "host_data",
    Kind.RANGE: "host_sync",
    Kind.API: "host_launch",
    Kind.OS_RUNTIME: "host_system",
    Kind.OVERHEAD: "recorder",
    Kind.MARK: "host_alloc",
    Kind.SAMPLE: "host_call",
}
_SLOW_RATIO: Final = 1.1
"""Ratio to the median from which the page says why a step is longer, of at most so many steps."""
_MOST_EXPLAINED: Final = 20
_SIDES: Final = ("left", "right", "top", "bottom")
_QUAD: Final = (*_SIDES, "color", "what", "share")


def timeline_charts(material: Material) -> dict[str, figure]:
    """Draw the timeline, and the overview of the whole run that navigates it."""
    scene = material.scene
    origin, span = scene.origin, scene.span
    whole = ((span.start - origin) / 1e9, (span.end - origin) / 1e9)
    first = tuple(at - origin for at in _first_window(scene, material.gaps))
    shown = Range1d(
        start=first[0] / 1e9,
        end=first[1] / 1e9,
        bounds=whole,
        min_interval=_shortest(scene) / 1e9,
        name="window",
    )
    tall, low = _LANE_PX
    lane_px = tall if len(scene.lanes) <= _MANY else low
    detail = _figure(scene, "timeline", 90 + lane_px * len(scene.lanes), shown)
    measured = charts.measured_window(material.analysis) or scene.span
    part = tuple((at - origin) / 1e9 for at in measured)
    over = _figure(
        scene,
        "overview",
        64 + (12 if lane_px == tall else 6) * len(scene.lanes),
        charts.folded_range((part[0], part[1]), whole),
    )
    over.add_tools(RangeTool(x_range=shown, start_gesture="pan"))
    over.toolbar_location = None
    # The page's script finds them by their names.
    lanes = [
        ColumnDataSource({"length": runs.length, "kind": runs.kind}, name=f"lane-{index}")
        for index, runs in enumerate(material.runs)
    ]
    detail.tags = [*lanes, _step_source(material.analysis, scene)]
    return {"overview": over, "timeline": detail} | (
        {"rows": _row_figure(shown)} if material.parts.rows else {}
    )


def _shortest(scene: Scene) -> int:
    """Return the length of the shortest view, which the shortest operation fills.

    It is at most an eighth of the span.
    """
    known = [lane.operations for lane in scene.lanes if lane.operations is not None]
    shortest = min((int((each.end - each.start).min()) for each in known), default=0)
    return max(min(shortest, (scene.span.end - scene.span.start) // 8), _LEAST_NS)


def _row_figure(shown: Range1d) -> figure:
    """Return the empty chart of streams and threads; the page's script fills it and sets its
    height.
    """
    plot = charts.new_figure(
        "rows",
        40,
        x_range=shown,
        y_range=(0, 1),
        tools="",
        toolbar_location=None,
        margin=0,
        min_border_bottom=0,
        background_fill_color=charts.GROUND,
        background_fill_alpha=1,
    )
    plot.grid.visible = plot.xaxis.visible = False
    plot.yaxis[0].update(axis_line_alpha=0, major_tick_line_alpha=0, ticker=[])
    columns = (*_QUAD[:5], "name", "row", "length", "step", "launch")
    look: dict[str, Any] = {"fill_color": "color", "line_color": charts.GROUND, "line_width": 0.6}
    boxes = plot.quad(*_SIDES, source=_empty("rows-boxes", columns), **look)
    # What is not selected stays as it is.
    boxes.nonselection_glyph = None
    tips = [(name, f"@{name}") for name in ("name", "row", "launch", "length", "step")]
    tips.append(("from", "@left{0.000000000} s"))
    charts.add_tips(plot, boxes, tips, attachment="below")
    plot.add_tools(TapTool(renderers=[boxes], visible=False))
    # What a server sends in place of what the page has.
    plot.tags = [_empty("rows-served", ("text",))]
    look = {"hatch_pattern": "right_diagonal_line", "hatch_color": "#5a5a66", "fill_alpha": 0}
    look |= {"hatch_scale": 12, "hatch_weight": 1, "line_color": None}
    plot.quad(*_SIDES, source=_empty("rows-absent", _SIDES), **look)
    for kind, color in (("hits", "#ffff00"), ("chosen", "#ffffff")):
        look = {"fill_alpha": 0, "line_color": color, "line_width": 2}
        plot.quad(*_SIDES, source=_empty(f"rows-{kind}", _SIDES), **look)
    arrow = _empty("rows-arrow", ("x", "y", "end_x", "end_y"))
    look = {"source": arrow, "color": "#ffffff"}
    plot.segment("x", "y", "end_x", "end_y", line_width=1.5, **look)
    plot.scatter("end_x", "end_y", marker="inverted_triangle", **look)
    words = _empty("rows-words", ("x", "y", "text", "color"))
    look = {"text_baseline": "middle", "text_color": "color", "text_font_size": "11px"}
    plot.text("x", "y", "text", source=words, x_offset=3, **look)
    return plot


def _step_source(analysis: Analysis, scene: Scene) -> ColumnDataSource:
    """Return steps and phases of the first rank that has steps, in seconds from the origin.

    Phases have the number -1, as has the program's own count where it is unknown. The warm-up phase
    is left out, as its steps carry it.
    """
    rank = min((step.rank for step in analysis.step_list), default=None)
    by_number = {step.step: step for step in analysis.step_list if step.rank == rank}
    steps = list(by_number.values())[:_MOST_STEPS]
    phases = [phase for phase in analysis.phases if phase.rank == rank and phase.phase != "warmup"]
    rows = [
        *(
            (s.start_ns, s.end_ns, s.step, -1 if s.number is None else s.number, s.phase)
            for s in steps
        ),
        *((phase.start_ns, phase.end_ns, -1, -1, phase.phase) for phase in phases),
    ]
    return ColumnDataSource(
        {
            "left": [(start - scene.origin) / 1e9 for start, *_ in rows],
            "right": [(end - scene.origin) / 1e9 for _, end, *_ in rows],
            "number": [number for *_, number, _, _ in rows],
            "named": [named for *_, named, _ in rows],
            "phase": [phase for *_, phase in rows],
        },
        name="step-list",
    )


def _first_window(scene: Scene, gaps: Sequence[GapDetail]) -> Window:
    """Return the initial window: steps around the worst gap."""
    steps = scene.analysis.step_list if scene.analysis is not None else ()
    start, end = scene.span
    for worst in (worst.gap for worst in gaps[:1]):
        on_gpu = [step for step in steps if step.rank == worst.rank and step.gpu == worst.gpu]
        middle = (worst.start_ns + worst.end_ns) // 2
        on_gpu.sort(key=lambda step: abs((step.start_ns + step.end_ns) // 2 - middle))
        near, around = on_gpu[:_SHOWN_STEPS], 0 if on_gpu else worst.length_ns
        start = min([worst.start_ns - around, *(step.start_ns for step in near)])
        end = max([worst.end_ns + around, *(step.end_ns for step in near)])
    return Window(max(start, scene.span.start), min(end, scene.span.end))


def slow_steps(analysis: Analysis) -> list[int]:
    """Return the numbers of the slowest measured steps, of which the page says why; the longest
    first.
    """
    longest: dict[int, int] = {}
    for step in analysis.step_list:
        if step.phase == "steady":
            longest[step.step] = max(longest.get(step.step, 0), step.end_ns - step.start_ns)
    least = _SLOW_RATIO * median([*longest.values()]) if len(longest) > 1 else 0
    slow = sorted(longest, key=lambda number: -longest[number])[:_MOST_EXPLAINED]
    return [number for number in slow if longest[number] >= least > 0]


def facts(material: Material) -> dict[str, Any]:
    """Return the plain values that the page's script needs beside the figures."""
    scene = material.scene
    measured = [step for step in material.analysis.step_list if step.phase == "steady"]
    slowest = max(measured, key=lambda step: step.end_ns - step.start_ns, default=None)
    return {
        "classes": charts.class_list(),
        "phases": charts.PHASES,
        "ground": charts.GROUND,
        "start": scene.span.start - scene.origin,
        "end": scene.span.end - scene.origin,
        "shortest": _shortest(scene),
        "lanes": [lane_label(lane, scene) for lane in scene.lanes],
        "tracks": [
            {"name": name, "color": LOOKS[_TRACK_LOOKS[kind]].color} for kind, name in HOST_TRACKS
        ],
        "rows": material.parts.rows,
        "why": material.parts.why,
        "slowest": slowest and slowest.step,
        "first_lane": next((worst.lane for worst in material.gaps), 0),
    }


def lane_label(lane: SceneLane, scene: Scene) -> str:
    """Return ``gpu 3``, with rank and host where they differ between lanes."""
    label = gpu_name(lane.gpu, lane.rank, lane.gpu_known, needs_ranks(scene.lanes))
    several = lane.gpu is not None and len({other.host for other in scene.lanes}) > 1
    host = f" {charts.plain_text(lane.host, 24)}" if several else ""
    return charts.plain_text(label + host, 60)


def _figure(scene: Scene, name: str, height: int, x_range: Range1d) -> figure:
    count = len(scene.lanes)
    plot = charts.new_figure(
        name,
        height,
        x_range=x_range,
        y_range=(0, count + (0.5 if name == "timeline" else 0)),
        x_axis_label="seconds",
        tools="xbox_zoom" if name == "timeline" else "",
        background_fill_color=charts.GROUND,
        background_fill_alpha=1,
    )
    plot.toolbar.active_drag = None
    plot.grid.visible = False
    places = [count - index - 0.55 for index in range(count)]
    labels = [lane_label(lane, scene) for lane in scene.lanes]
    plot.yaxis[0].update(
        ticker=places,
        major_label_overrides=dict(zip(places, labels, strict=True)),
        axis_line_alpha=0,
        major_tick_line_alpha=0,
    )
    plot.xaxis.formatter = BasicTickFormatter(
        use_scientific=False, precision=9, power_limit_high=12
    )
    _glyphs(plot, name)
    return plot


def _glyphs(plot: figure, name: str) -> None:
    """Add the glyphs that the script fills: bars, the selected gap, steps, and labels."""
    # Without lines, the background would show between neighbours that meet inside a pixel.
    look: dict[str, Any] = {"fill_color": "color", "line_color": "color", "line_width": 0.7}
    bars = plot.quad(*_SIDES, source=_empty(f"{name}-bars", _QUAD), **look)
    if name != "timeline":
        hits = _empty(f"{name}-hits", _SIDES)
        plot.quad(*_SIDES, source=hits, fill_color="#ffff00", line_color=None)
        return
    tips = [("", "@what"), ("share", "@share"), ("from", "@left{0.000000000} s")]
    charts.add_tips(plot, bars, tips)
    for kind, alpha, line, width in (("steps", 0.35, "#9a9aa5", 1), ("chosen", 0, "#ffffff", 2)):
        look = {"fill_color": "color", "fill_alpha": alpha, "line_color": line, "line_width": width}
        plot.quad(*_SIDES, source=_empty(f"{name}-{kind}", _QUAD[:5]), **look)
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
    gaps: tuple[GapDetail, ...]
    lanes: tuple[Tiled, ...]
    """All runs of each lane of the scene, over the scene's span."""
    runs: tuple[Runs, ...]
    """Runs of ``lanes``, reduced to what fits into a file."""
    parts: TraceParts
    window_rows: Callable[[Window], str] = field(default=lambda _window: "", repr=False)
    """Reads those of a window while the trace is open."""

    @property
    def whole(self) -> bool:
        """True if nothing had to be reduced."""
        return all(lane_runs.whole for lane_runs in self.runs) and self.has_names

    @property
    def has_names(self) -> bool:
        """True if ``parts.rows`` have all operations."""
        return sum(len(lane.operations or ()) for lane in self.scene.lanes) <= MOST_OPERATIONS

    def runs_around(self, start: int, end: int, most: int) -> tuple[Runs, ...]:
        """Reduce the lanes, with full detail in a window, or exact shares where that is too much.

        Around the window they are coarse.
        """
        span = self.scene.span
        window = Window(max(start, span.start), min(end, span.end))
        return reduce(self.lanes, span, most, [window], between=window)


def gather(scene: Scene, parts: TraceParts, most: int = MOST_RUNS) -> Material:
    """Reduce the timeline of a scene with an analysis; add what was read of its trace.

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
    return Material(analysis, scene, gaps, lanes, reduce(lanes, scene.span, most, matter), parts)


MOST_OPERATIONS: Final = 30_000
"""Maximum number of GPU operations with names in a file."""
_LONGEST_NAME: Final = 300


@dataclass(frozen=True)
class TraceParts:
    """Parts of a page that are read from the trace itself, as its scene lacks them."""

    rows: str = ""
    """Streams and threads as compressed JSON in base64; empty without any."""
    why: Mapping[int, str] = field(default_factory=dict)
    """Why the slowest measured steps took as long as they did, by their numbers."""


def read_parts(trace: Trace, scene: Scene, most: int = MOST_OPERATIONS) -> TraceParts:
    """Read streams and threads from a trace (of a large one, around the view, the longest kernel
    of the measured steps and the gaps) and why its slowest steps took as long as they did.
    """
    assert scene.analysis is not None
    gaps = worst_gaps(scene, scene.analysis)
    windows = [_first_window(scene, gaps), *_longest_kernel(scene, scene.analysis)]
    windows += [worst.around for worst in gaps]
    rows, within = read_track_rows(trace, scene, windows, most)
    why, shard = {}, Shard(trace)
    for number in slow_steps(scene.analysis):
        message = explain_step(scene, number, shard, evidence=False).message
        why[number] = charts.plain_text(f"{capital(message)}.", 400)
    return TraceParts(_packed(trace, scene, rows, within) if rows else "", why)


def read_window(trace: Trace, scene: Scene, window: Window) -> str:
    """Return the text of `TraceParts.rows` of all streams and threads in a window."""
    window = Window(max(window.start, scene.span.start), min(window.end, scene.span.end))
    rows = read_window_rows(trace, scene, window, 2 * MOST_OPERATIONS)
    return _packed(trace, scene, rows, union([window.start], [window.end])) if rows else ""


def _longest_kernel(scene: Scene, analysis: Analysis) -> list[Window]:
    """Return the time of the longest kernel that begins in the measured steps; empty for none."""
    measured = charts.measured_window(analysis) or scene.span
    longest = []
    for known in (lane.operations for lane in scene.lanes):
        if known is None:
            continue
        is_inside = (measured.start <= known.start) & (known.start < measured.end)
        rows = np.flatnonzero(is_inside & (known.events.kind == Kind.KERNEL))
        if len(rows):
            row = int(rows[np.argmax(known.end[rows] - known.start[rows])])
            longest.append(Window(int(known.start[row]), int(known.end[row])))
    return sorted(longest, key=lambda window: window.start - window.end)[:1]


def _packed(trace: Trace, scene: Scene, rows: Sequence[TrackRow], within: Intervals | None) -> str:
    """Return the text of `TraceParts.rows`.

    Starts count from the previous one, the first from the origin; ``link`` is the correlation.
    """
    ids, places = np.unique(
        np.concatenate([row.track.events.name for row in rows]), return_inverse=True
    )
    known = trace.names(ids)
    # Copies and memsets have none: the page calls them by their class.
    texts = [known.get(name, "") if name != UNKNOWN else "" for name in ids.tolist()]
    edges = np.cumsum([0, *(len(row.track.events) for row in rows)]).tolist()
    on_gpu = {name for row in rows if row.on_gpu for name in row.track.events.name.tolist()}
    shown = [
        short_name(text[:4000]) if name in on_gpu else text
        for name, text in zip(ids.tolist(), texts, strict=True)
    ]
    spans = None
    if within is not None:
        spans = (np.column_stack([within.start, within.end]) - scene.origin).tolist()
    packed = {
        "names": [charts.plain_text(text, _LONGEST_NAME) for text in texts],
        "short": [charts.plain_text(text, 80) for text in shown],
        "within": spans,
        "rows": [
            {
                "lane": row.lane,
                "group": row.group,
                "label": charts.plain_text(row.track.name, 40),
                "process": row.process,
                "track": -1 if row.on_gpu else row.track.kind_index,
                "kind": classify(trace, row.track.events).tolist() if row.on_gpu else [],
                "start": np.diff(row.track.events.start, prepend=scene.origin).tolist(),
                "length": (row.track.events.end - row.track.events.start).tolist(),
                "name": places[first:end].tolist(),
                "link": row.track.events.correlation.tolist(),
                "count": [] if row.counts is None else row.counts.tolist(),
            }
            for row, first, end in zip(rows, edges[:-1], edges[1:], strict=True)
        ],
    }  # fmt: skip
    text = json.dumps(packed, separators=(",", ":"))
    # The same bytes each time.
    return b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def file_name(analysis: Analysis) -> str:
    """Return the name of the trace in a page's title."""
    more = len(analysis.paths) - 1
    return Path(analysis.path).name + (f" and {more} more" if more else "")
