"""Timeline of a page, reduced to what fits into a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from gputrace.analyzers.kernel_names import short_name
from gputrace.analyzers.operations import classify
from gputrace.analyzers.timeline_model import Scene, SceneLane
from gputrace.analyzers.timeline_model.cells import Runs, Tiled, reduce, tile
from gputrace.analyzers.timeline_model.gaps import GapDetail, worst_gaps
from gputrace.analyzers.timeline_model.trace_rows import HOST_TRACKS, TrackRow, read_track_rows
from gputrace.errors import InputError
from gputrace.model.events import UNKNOWN, Kind
from gputrace.model.intervals import Intervals
from gputrace.model.options import Window
from gputrace.model.results import Analysis
from gputrace.model.trace import Trace
from gputrace.report.html.charts import (
    GROUND,
    PHASES,
    class_list,
    folded_range,
    measured_window,
    plain_text,
)
from gputrace.report.html.models import Chart, Model, compress, fixed_ticks, mapping, source
from gputrace.report.palette import LOOKS
from gputrace.report.wording import gpu_name, needs_ranks

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
_QUAD: Final = ("left", "right", "bottom", "top", "color", "what", "share")
_SIDES: Final = {side: side for side in _QUAD[:4]}


def timeline_charts(material: Material) -> dict[str, Chart]:
    """Draw the timeline, and the overview of the whole run that navigates it."""
    scene = material.scene
    origin, span = scene.origin, scene.span
    whole = ((span.start - origin) / 1e9, (span.end - origin) / 1e9)
    first = tuple(at - origin for at in _first_window(scene, material.gaps))
    shown = Model(
        "Range1d",
        start=first[0] / 1e9,
        end=first[1] / 1e9,
        bounds=whole,
        min_interval=_shortest(scene) / 1e9,
        name="window",
    )
    tall, low = _LANE_PX
    lane_px = tall if len(scene.lanes) <= _MANY else low
    detail = _figure(scene, "timeline", 90 + lane_px * len(scene.lanes), shown)
    measured = measured_window(material.analysis) or scene.span
    part = tuple((at - origin) / 1e9 for at in measured)
    over = _figure(
        scene,
        "overview",
        64 + (12 if lane_px == tall else 6) * len(scene.lanes),
        folded_range((part[0], part[1]), whole),
    )
    over.toolbar.tools.append(Model("RangeTool", x_range=shown, start_gesture="pan"))
    over.toolbar_location = None
    # The page's script finds them by their names.
    lanes = [
        source({"length": runs.length, "kind": runs.kind}, name=f"lane-{index}")
        for index, runs in enumerate(material.runs)
    ]
    detail.tags = [*lanes, _step_source(material.analysis, scene)]
    return {"overview": over, "timeline": detail} | (
        {"rows": _row_figure(shown)} if material.rows else {}
    )


def _shortest(scene: Scene) -> int:
    """Return the length of the shortest view, which the shortest operation fills.

    It is at most an eighth of the span.
    """
    known = [lane.operations for lane in scene.lanes if lane.operations is not None]
    shortest = min((int((each.end - each.start).min()) for each in known), default=0)
    return max(min(shortest, (scene.span.end - scene.span.start) // 8), _LEAST_NS)


def _row_figure(shown: Model) -> Chart:
    """Return the empty chart of streams and threads; the page's script fills it and sets its
    height.
    """
    plot = Chart("rows", 40, x_range=shown, y_range=(0, 1), tools=(), toolbar_location=None)
    plot.update(margin=0, background_fill_color=GROUND, background_fill_alpha=1)
    plot.min_border_bottom = 0
    plot.hide_grid()
    plot.xaxis.visible = False
    plot.yaxis.update(axis_line_alpha=0, major_tick_line_alpha=0, ticker=fixed_ticks([]))
    columns = (*_QUAD[:5], "name", "row", "length", "step", "launch")
    look: dict[str, Any] = {"fill_color": "color", "line_color": GROUND, "line_width": 0.6}
    boxes = plot.draw("Quad", _empty("rows-boxes", columns), **_SIDES, **look)
    # What is not selected stays as it is.
    boxes.nonselection_glyph = None
    tips = [(name, f"@{name}") for name in ("name", "row", "launch", "length", "step")]
    tips.append(("from", "@left{0.000000000} s"))
    plot.add_tips(boxes, tips, attachment="below")
    plot.toolbar.tools.append(Model("TapTool", renderers=[boxes], visible=False))
    for kind, color in (("hits", "#ffff00"), ("chosen", "#ffffff")):
        look = {"fill_alpha": 0, "line_color": color, "line_width": 2}
        plot.draw("Quad", _empty(f"rows-{kind}", _QUAD[:4]), **_SIDES, **look)
    arrow = _empty("rows-arrow", ("x", "y", "end_x", "end_y"))
    ends = {"x0": "x", "y0": "y", "x1": "end_x", "y1": "end_y"}
    plot.draw("Segment", arrow, **ends, line_color="#ffffff", line_width=1.5)
    look = {"marker": "inverted_triangle", "fill_color": "#ffffff", "line_color": "#ffffff"}
    plot.draw("Scatter", arrow, x="end_x", y="end_y", **look)
    words = _empty("rows-words", ("x", "y", "text", "color"))
    look = {"text_baseline": "middle", "text_color": "color", "text_font_size": "11px"}
    plot.draw("Text", words, x="x", y="y", text="text", x_offset=3, **look)
    return plot


def _step_source(analysis: Analysis, scene: Scene) -> Model:
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
    return source(
        {
            "left": [(start - scene.origin) / 1e9 for start, *_ in rows],
            "right": [(end - scene.origin) / 1e9 for _, end, *_ in rows],
            "number": [number for *_, number, _ in rows],
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


def facts(material: Material) -> dict[str, Any]:
    """Return the plain values that the page's script needs beside the figures."""
    scene = material.scene
    return {
        "classes": class_list(),
        "phases": PHASES,
        "ground": GROUND,
        "start": scene.span.start - scene.origin,
        "end": scene.span.end - scene.origin,
        "shortest": _shortest(scene),
        "lanes": [lane_label(lane, scene) for lane in scene.lanes],
        "tracks": [
            {"name": name, "color": LOOKS[_TRACK_LOOKS[kind]].color} for kind, name in HOST_TRACKS
        ],
        "rows": material.rows,
        "first_lane": next((worst.lane for worst in material.gaps), 0),
    }


def lane_label(lane: SceneLane, scene: Scene) -> str:
    """Return ``gpu 3``, with rank and host where they differ between lanes."""
    label = gpu_name(lane.gpu, lane.rank, lane.gpu_known, needs_ranks(scene.lanes))
    several = lane.gpu is not None and len({other.host for other in scene.lanes}) > 1
    return plain_text(label + (f" {plain_text(lane.host, 24)}" if several else ""), 60)


def _figure(scene: Scene, name: str, height: int, x_range: Model) -> Chart:
    count = len(scene.lanes)
    plot = Chart(
        name,
        height,
        x_range=x_range,
        y_range=(0, count + (0.5 if name == "timeline" else 0)),
        x_axis_label="seconds",
        tools=("BoxZoomTool",) if name == "timeline" else (),
    )
    plot.toolbar.active_drag = None
    plot.update(background_fill_color=GROUND, background_fill_alpha=1)
    plot.hide_grid()
    places = [count - index - 0.55 for index in range(count)]
    plot.yaxis.ticker = fixed_ticks(places)
    labels = [lane_label(lane, scene) for lane in scene.lanes]
    plot.yaxis.major_label_overrides = mapping(dict(zip(places, labels, strict=True)))
    plot.yaxis.update(axis_line_alpha=0, major_tick_line_alpha=0)
    plain = {"use_scientific": False, "precision": 9, "power_limit_high": 12}
    plot.xaxis.formatter = Model("BasicTickFormatter", **plain)
    _glyphs(plot, name)
    return plot


def _glyphs(plot: Chart, name: str) -> None:
    """Add the glyphs that the script fills: bars, the selected gap, steps, and labels."""
    # Without lines, the background would show between neighbours that meet inside a pixel.
    look: dict[str, Any] = {"fill_color": "color", "line_color": "color", "line_width": 0.7}
    bars = plot.draw("Quad", _empty(f"{name}-bars", _QUAD), **_SIDES, **look)
    if name != "timeline":
        hits = _empty(f"{name}-hits", _QUAD[:4])
        plot.draw("Quad", hits, **_SIDES, fill_color="#ffff00", line_color=None)
        return
    tips = [("", "@what"), ("share", "@share"), ("from", "@left{0.000000000} s")]
    plot.add_tips(bars, tips)
    for kind, alpha, line, width in (("steps", 0.35, "#9a9aa5", 1), ("chosen", 0, "#ffffff", 2)):
        look = {"fill_color": "color", "fill_alpha": alpha, "line_color": line, "line_width": width}
        plot.draw("Quad", _empty(f"{name}-{kind}", _QUAD[:5]), **_SIDES, **look)
    look = {"text_align": "center", "text_baseline": "middle", "text_color": "color"}
    look |= {"text_font_size": "11px", "text_font_style": "bold"}
    words = _empty(f"{name}-words", ("x", "y", "text", "color"))
    plot.draw("Text", words, x="x", y="y", text="text", **look)


def _empty(name: str, columns: Sequence[str]) -> Model:
    return source({column: [] for column in columns}, name=name)


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
    rows: str = ""
    """Streams and threads, as `PackedRows` has them; empty without any."""

    @property
    def whole(self) -> bool:
        """True if nothing had to be reduced."""
        return all(lane_runs.whole for lane_runs in self.runs)

    def runs_around(self, start: int, end: int, most: int) -> tuple[Runs, ...]:
        """Reduce the lanes, with full detail in a window, or exact shares where that is too much.

        Around the window they are coarse.
        """
        span = self.scene.span
        window = Window(max(start, span.start), min(end, span.end))
        return reduce(self.lanes, span, most, [window], between=window)


def gather(scene: Scene, most: int = MOST_RUNS, rows: str = "") -> Material:
    """Reduce the timeline of a scene with an analysis; add the text of its `PackedRows`.

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
    return Material(analysis, scene, gaps, lanes, reduce(lanes, scene.span, most, matter), rows)


MOST_OPERATIONS: Final = 30_000
"""Maximum number of GPU operations with names in a file."""
_LONGEST_NAME: Final = 300


@dataclass(frozen=True)
class PackedRows:
    """Streams and threads as compressed JSON in base64; nothing without any."""

    text: str


def read_rows(trace: Trace, scene: Scene, most: int = MOST_OPERATIONS) -> PackedRows:
    """Read streams and threads from a trace: of a large one, around the view, the longest kernel
    of the measured steps and the gaps.
    """
    assert scene.analysis is not None
    gaps = worst_gaps(scene, scene.analysis)
    windows = [_first_window(scene, gaps), *_longest_kernel(scene, scene.analysis)]
    windows += [worst.around for worst in gaps]
    rows, within = read_track_rows(trace, scene, windows, most)
    return PackedRows(_packed(trace, scene, rows, within) if rows else "")


def _longest_kernel(scene: Scene, analysis: Analysis) -> list[Window]:
    """Return the time of the longest kernel that begins in the measured steps; empty for none."""
    measured = measured_window(analysis) or scene.span
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
    """Return the text of `PackedRows`.

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
        "names": [plain_text(text, _LONGEST_NAME) for text in texts],
        "short": [plain_text(text, 80) for text in shown],
        "within": spans,
        "rows": [
            {
                "lane": row.lane,
                "group": row.group,
                "label": plain_text(row.track.name, 40),
                "process": row.process,
                "track": -1 if row.on_gpu else row.track.kind_index,
                "kind": classify(trace, row.track.events).tolist() if row.on_gpu else [],
                "start": np.diff(row.track.events.start, prepend=scene.origin).tolist(),
                "length": (row.track.events.end - row.track.events.start).tolist(),
                "name": places[first:end].tolist(),
                "link": row.track.events.correlation.tolist(),
            }
            for row, first, end in zip(rows, edges[:-1], edges[1:], strict=True)
        ],
    }  # fmt: skip
    text = json.dumps(packed, separators=(",", ":"))
    return compress(text.encode())


def file_name(analysis: Analysis) -> str:
    """Return the name of the trace in a page's title."""
    more = len(analysis.paths) - 1
    return Path(analysis.path).name + (f" and {more} more" if more else "")
