"""HTML pages of an analysis and of a comparison: texts, tables, templates, and a content
security policy.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from bokeh.document import Document as Charts
from bokeh.embed import file_html
from bokeh.models import ColumnDataSource, Spacer
from bokeh.plotting import figure
from bokeh.resources import INLINE
from jinja2 import Environment, FunctionLoader, Template, select_autoescape
from markupsafe import Markup, escape
from msgspec.structs import replace

from gputrace.analyzers.compare import UNITS, Comparison
from gputrace.analyzers.grouping import StepsOf
from gputrace.analyzers.kernel_names import short_name
from gputrace.analyzers.timeline_model import Scene
from gputrace.analyzers.timeline_model.gaps import GapDetail, Operation, operation_name
from gputrace.model.events import Kind, number_ids
from gputrace.model.results import Analysis, Gaps
from gputrace.model.struct import UNKNOWN, Column
from gputrace.model.time_class import CLASSES
from gputrace.report import TEXT_COLUMNS, Document, Limits, Table, present, tabulate, wording
from gputrace.report.comparison import document as comparison_document
from gputrace.report.html.charts import (
    CURVES,
    DASHED,
    PHASES,
    add_legend,
    add_tips,
    class_chart,
    class_label,
    class_list,
    draw_points,
    draw_spread,
    gpus_chart,
    measured_window,
    plain_text,
    run_charts,
    stacked_bars,
    step_chart,
)
from gputrace.report.html.timeline import Material, facts, file_name, timeline_charts
from gputrace.report.tables import document
from gputrace.units import format_ns, format_number, format_share
from gputrace.version import __version__

_SCRIPT: Final = re.compile(r"<script(?: type=\"text/javascript\")?>(.*?)</script>", re.DOTALL)


def render(material: Material) -> str:
    """Render an analysis as one self-contained HTML document."""
    charts = find_charts(material)
    return render_page("page.html", charts, page_variables(material, charts))


def render_page(template: str, charts: dict[str, figure], variables: dict[str, Any]) -> str:
    """Render a page from one of the templates beside this module."""
    document = Charts(title=f"gputrace: {variables['content'].title}")
    add_charts(document, charts)
    return file_html(
        document,
        INLINE,
        template=page_template(template),
        template_variables=variables,
        suppress_callback_warning=True,
    )


def add_charts(document: Charts, charts: Mapping[str, figure]) -> None:
    """Add all charts to a document at once: one by one, all models are visited for each."""
    with document.models.freeze():
        # A page's script waits for a document with anything in it.
        for chart in charts.values() or [Spacer(visible=False)]:
            document.add_root(chart)


def find_charts(material: Material) -> dict[str, figure]:
    """Draw all figures of a page, by name."""
    analysis = material.analysis
    charts: dict[str, figure | None] = {
        **(timeline_charts(material) if material.scene.lanes else {}),
        "classes": class_chart(analysis),
        "steps": step_chart(analysis),
        **run_charts(analysis),
    }
    return {name: chart for name, chart in charts.items() if chart is not None}


def page_variables(material: Material, charts: dict[str, figure]) -> dict[str, Any]:
    """Return the variables of a report's template, apart from those that Bokeh sets."""
    more = {"content": _content(material), "facts": facts(material), "keys": _KEYS}
    return common_variables(charts) | more


def common_variables(charts: dict[str, figure]) -> dict[str, Any]:
    """Return the variables of all templates; ``sources`` lists what a page may load."""
    return {
        "charts": list(charts),
        "classes": class_list(),
        "style": _file("page.css"),
        "scripts": [_file(name) for name in ("timeline.js", "rows.js", "moving.js", "page.js")],
        "version": __version__,
        "sources": "",
        "text_columns": TEXT_COLUMNS,
        "word_columns": ("family",),
        "facts": {"classes": class_list()},
    }


@cache
def page_template(name: str = "page.html") -> Template:
    """Load a template with autoescaping."""
    environment = Environment(
        loader=FunctionLoader(_file),
        autoescape=select_autoescape(default=True, default_for_string=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(hashes=hashes, cut=plain_text, code=mark_code)
    return environment.get_template(name)


def mark_code(text: str) -> Markup:
    """Return a text with what stands between backticks as code."""
    parts = map(escape, text.split("`"))
    return Markup("".join(f"<code>{p}</code>" if at % 2 else p for at, p in enumerate(parts)))


def hashes(html: str) -> str:
    """Return the hashes of the scripts in HTML as sources of a content security policy.

    A browser runs these scripts only, so that injected ones never run.
    """
    scripts = [match[1] for match in _SCRIPT.finditer(html)]
    digests = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _file(name: str) -> str:
    """Read one of the files beside this module."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


_LIMITS: Final = Limits(links=16, kernels=25, parallel=None)
_KEYS: Final = (
    ("W S or + −", "zoom in, zoom out"),
    ("A D or ← →", "to the left, to the right"),
    ("f", "fit the selection"),
    ("0", "the whole run"),
    ("m", "the measured steps"),
    ("n p", "the next and the previous gap of the list"),
    ("/", "search a name, or the number of a step"),
    ("Enter", "the next hit; with Shift, the previous one"),
    ("c", "copy a link to what is shown"),
    ("?", "these keys"),
)
_MOST_NOTES: Final = 50
_KERNELS: Final = ("h-kernels", "See the kernels")
_RUN: Final = ("h-run", "See the curves")
_LINKS: Final = ("h-links", "See the links")
_STEPS: Final = ("steps", "See the steps")
_PLACES: Final = {
    "kernel-waits": _KERNELS,
    "layout-transposes": _KERNELS,
    "double-precision": _KERNELS,
    "no-tensor-cores": _KERNELS,
    "recomputation": _KERNELS,
    "compute-bound": _KERNELS,
    "autotune-repeated": _KERNELS,
    "communication-exposed": _LINKS,
    "pipeline-bubble": _LINKS,
    "expert-imbalance": _LINKS,
    "topology": _LINKS,
    "host-staged-comm": _LINKS,
    "clock-mismatch": _RUN,
    "throttling": _RUN,
    "memory-imbalance": _RUN,
    "slow-steps": _STEPS,
    "steps-grow": _STEPS,
    "straggler": _STEPS,
    "late-host": _STEPS,
    "warmup": _STEPS,
}
"""Where the page has the evidence of a finding that owns no gap: id of the element, and link."""
_COVERED: Final = "Lines may cover each other; a click on a name hides or shows one."
_MOST_KERNELS: Final = 1_000
"""Kernels of the whole list."""
_LEAST_CHARGE: Final = 0.005
"""Share of a gap from which a cause is listed."""
_NAME: Final = 60
"""Longest kernel name in the list of gaps, in characters."""


def _content(material: Material) -> SimpleNamespace:
    """Collect the texts and tables of a page.

    ``severity`` and ``first`` are those of the verdict's finding, empty where there is none;
    ``below`` what stands below it. ``summary`` has the text alternatives of the charts.
    """
    analysis = material.analysis
    report = document(analysis, _LIMITS)
    verdict, shown = report.head[0], wording.shown_findings(analysis)
    first = shown[0] if len(shown) > len(report.findings) else None
    hosts = dict.fromkeys(link.host for link in analysis.links)
    matrices = present(_matrix(host, analysis) for host in hosts)
    links = (*matrices, *report.sections["links"])
    shown_notes = [note.text for note in report.notes]
    if len(shown_notes) > _MOST_NOTES:
        more = "More notes are in the JSON (gputrace analyze --json)."
        shown_notes[_MOST_NOTES:] = [more]
    there = {
        "h-run": analysis.utilization,
        "h-kernels": report.sections["kernels"],
        "h-links": links,
        "steps": analysis.step_list,
    }
    return SimpleNamespace(
        title=plain_text(file_name(analysis)),
        verdict=plain_text(verdict.text, 1000),
        severity=first.severity if first else "",
        first=first.id if first else "",
        below=verdict.below,
        findings=tuple(zip(shown[first is not None :], report.findings, strict=True)),
        has_gpus=bool(analysis.gpus),
        curves=analysis.utilization,
        has_steps=measured_window(analysis) is not None,
        **_gap_list(material),
        gap_findings={worst.finding.id if worst.finding else "" for worst in material.gaps},
        places={id: link for id, link in _PLACES.items() if there[link[0]]},
        gap_summary=_gap_summary(analysis.gaps),
        tables=report.tables,
        phases=_phases(analysis),
        parts=_parts(analysis),
        parts_told=wording.describe_parts(wording.run_parts(analysis)),
        numbers_told=wording.describe_numbers(analysis),
        sections={**report.sections, "links": links},
        all_kernels=_all_kernels(material.scene),
        longest=tuple(_longest(analysis)),
        more_kernels=_more_kernels(analysis, report.sections["kernels"]),
        notes=tuple(plain_text(note, 400) for note in shown_notes),
        source=analysis.source,
        summary=_summary(material),
    )


def _all_kernels(scene: Scene) -> Table:
    """Tabulate every kernel that begins in the measured steps, or in the span without steps."""
    assert scene.analysis is not None
    steps_of = StepsOf(step for step in scene.analysis.step_list if step.phase == "steady")
    found: dict[int, list[int]] = {}
    for lane in scene.lanes:
        if (known := lane.operations) is None:
            continue
        inside = steps_of.time(lane, lane.window).contains(known.start)
        rows = np.flatnonzero(inside & (known.events.kind == Kind.KERNEL))
        ids, index = number_ids(known.events.name[rows])
        lengths = known.end[rows] - known.start[rows]
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, index, lengths)
        total = np.zeros(len(ids), np.int64)
        np.add.at(total, index, lengths)
        counts = np.bincount(index, minlength=len(ids))
        figures = (each.tolist() for each in (ids, counts, total, longest))
        for id, *row in zip(*figures, strict=True):
            count, ns, most = found.get(id, (0, 0, 0))
            found[id] = [count + row[0], ns + row[1], max(most, row[2])]
    rows_of = sorted(found.items(), key=lambda item: -item[1][1])[:_MOST_KERNELS]
    names = [operation_name(scene.names, id, Kind.KERNEL) for id, _ in rows_of]
    labels = wording.kernel_labels(names, _NAME)
    columns = (
        Column("", lambda row: row[0]),
        Column("launches", lambda row: row[1][0], "{:,}"),
        Column("total", lambda row: row[1][1], format_ns),
        Column("mean", lambda row: row[1][1] / row[1][0], format_ns),
        Column("longest", lambda row: row[1][2], format_ns),
    )
    rows_shown = [(name, each) for name, (_, each) in zip(labels, rows_of, strict=True)]
    title = f"All {len(found):,} kernels of the measured steps, on all GPUs"
    if len(found) > len(rows_of):
        title = f"{len(rows_of):,} of {title[4:]}"
    return tabulate(title, columns, rows_shown, names=tuple(names))


def _more_kernels(analysis: Analysis, tables: Sequence[Table]) -> str:
    """Return how many of the kernels the table has."""
    kernels = analysis.kernels
    if kernels is None or not tables or len(tables[0].rows) == kernels.distinct:
        return ""
    return f"Top {len(tables[0].rows)} of {kernels.distinct} kernels."


def _longest(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """Yield the longest launches, and the part of the page's address that shows each."""
    if (kernels := analysis.kernels) is None:
        return
    launches = {kernels.longest: "the longest launch"}
    if kernels.longest_compute is not None:
        launches.setdefault(kernels.longest_compute, "the longest that computes")
    for launch, which in launches.items():
        start, length = launch.start_ns - analysis.origin_ns, launch.duration_ns
        at = f"{max(start - length, 0) / 1e9:.9f}-{(start + 2 * length) / 1e9:.9f}"
        yield which, f"#t={at}"


def _gap_list(material: Material) -> dict[str, Any]:
    """Return the list of gaps and its header; a click moves the timeline to lane and times."""
    analysis, origin = material.analysis, material.analysis.origin_ns

    def charged(worst: GapDetail) -> str:
        least = _LEAST_CHARGE * worst.gap.length_ns
        charges = ((cause, ns) for cause, ns in worst.gap.charges.items() if ns >= least)
        return ", ".join(f"{analysis.cause_label(cause)} {format_ns(ns)}" for cause, ns in charges)

    def others(worst: GapDetail) -> str:
        whole, most = sum(worst.elsewhere.values()), list(worst.elsewhere.items())[:3]
        return ", ".join(f"{class_label(name)} {format_share(ns, whole)}" for name, ns in most)

    def short(operation: Operation) -> str:
        return plain_text(short_name(operation.name[:4000]), _NAME)

    table = tabulate(
        "",
        (
            Column("length", lambda worst: worst.gap.length_ns, format_ns),
            Column("gpu", lambda worst: wording.gpu_label(worst.gap, analysis)),
            Column("from", lambda worst: f"{(worst.gap.start_ns - origin) / 1e9:.6f} s"),
            Column("step", lambda worst: worst.gap.step, "{}", ""),
            Column("cause", charged),
            Column("evidence", lambda worst: worst.gap.evidence, unknown=""),
            Column("before", "before", short, ""),
            Column("after", "after", short, ""),
            Column("the other GPUs meanwhile", others, unknown=""),
            Column("finding", "finding", lambda finding: finding.id, ""),
        ),
        material.gaps,
    )
    rows = [
        SimpleNamespace(
            lane=worst.lane,
            finding=worst.finding.id if worst.finding else "",
            start_ns=worst.gap.start_ns - origin,
            end_ns=worst.gap.end_ns - origin,
            in_steps=worst.gap in analysis.gaps.largest_in_steps,
            cells=cells,
            names={"before": worst.before, "after": worst.after},
        )
        for worst, cells in zip(material.gaps, table.rows, strict=True)
    ]
    return {"gaps": rows, "gap_header": table.header}


def _causes(times: Iterable[tuple[str, int]]) -> list[str]:
    """Format causes of idle time, without ``idle: `` before each, and their times."""
    return [f"{class_label(name)[6:]} {format_ns(ns)}" for name, ns in times]


def _gap_summary(gaps: Gaps) -> str:
    causes = sorted(gaps.by_cause.items(), key=lambda item: -item[1])
    parts = ", ".join(_causes(item for item in causes if item[1])) or "none"
    return f"In all {gaps.count:,} gaps of all GPUs, {format_ns(gaps.total_ns)}: {parts}."


def _phases(analysis: Analysis) -> Table:
    """Tabulate the phases; the begins of epochs are one row, with the first of them."""
    columns = (
        Column("phase", "phase"),
        Column("rank", "rank", "{}"),
        Column("from", lambda phase: f"{(phase.start_ns - analysis.origin_ns) / 1e9:.3f} s"),
        Column("length", lambda phase: phase.end_ns - phase.start_ns, format_ns),
        Column("idle in it", "idle_ns"),
        Column("evidence", "evidence", unknown=""),
    )
    epochs = [phase for phase in analysis.phases if phase.phase == "epoch"]
    shown = [phase for phase in analysis.phases if phase.phase != "epoch"]
    shown += [replace(each, phase=f"epoch, first of {len(epochs)}") for each in epochs[:1]]
    return tabulate("Phases that are not steady training", columns, shown[:_MOST_NOTES])


_COLORS: Final = {"measured": "#009e73", "warm-up": PHASES["warmup"], **PHASES}


def _parts(analysis: Analysis) -> list[dict[str, Any]]:
    """Return the parts of the run for a strip that is 1,000 wide."""
    parts = wording.run_parts(analysis)
    return [
        {
            "x": 1000 * (part.start - parts[0].start) / (parts[-1].end - parts[0].start),
            "width": 1000 * (part.end - part.start) / (parts[-1].end - parts[0].start),
            "color": _COLORS.get(part.name, "#8a8a8a"),
            "title": f"{part.name}: {format_ns(part.end - part.start)}",
        }
        for part in parts
    ]


def _summary(material: Material) -> dict[str, str]:
    """Return the text alternatives of the charts."""
    analysis = material.analysis
    lanes = len(material.scene.lanes)
    shown = "".join(
        f" It first shows the steps around the largest gap, {format_ns(worst.gap.length_ns)} of "
        f"{wording.gap_cause(worst.gap, analysis)} on {wording.gpu_label(worst.gap, analysis)}."
        for worst in material.gaps[:1]
    )
    steps, each = analysis.steps, "GPU" if analysis.gpus else "rank"
    warmup = f", {steps.warmup_count} of them warm-up (hollow)" if steps.warmup_count else ""
    captions = {
        "overview": f"The measured steps, or the whole run of {format_ns(analysis.span_ns)}; the "
        "lit part is what the timeline below shows.",
        "timeline": f"{lanes} lane{'' if lanes == 1 else 's'}, one a {each}, coloured by class of "
        f"time.{shown} The list of gaps below has everything important in it.",
        "classes": f"The same as the table, one bar a {each}.",
        "steps": f"{steps.count} steps{warmup}; triangles: off the scale.",
    }
    if steps.p50_ns is not None and steps.p95_ns is not None:
        captions["steps"] += f" p50 {format_ns(steps.p50_ns)}, p95 {format_ns(steps.p95_ns)}."
    lengths: dict[int, list[int]] = {}
    for step in analysis.step_list:
        if step.phase == "steady":
            lengths.setdefault(step.step, []).append(step.end_ns - step.start_ns)
    if len({step.rank for step in analysis.step_list}) > 1 and lengths:
        apart = max(max(known) - min(known) for known in lengths.values())
        captions["steps"] += (
            f" In a step the ranks differ by at most {format_ns(apart)}. {_COVERED}"
        )
    return captions | _curve_summaries(analysis)


def _curve_summaries(analysis: Analysis) -> dict[str, str]:
    captions: dict[str, list[str]] = {}
    window = measured_window(analysis)
    for gpu in analysis.utilization.gpus if analysis.utilization else ():
        for curve in gpu.curves:
            label, scale = CURVES[curve.name]
            unit, digits = label.rpartition(", ")[2], 1 if scale < 1 else 0
            rows = [
                at
                for at, moment in enumerate(curve.time_ns)
                if window is None or window.start <= moment < window.end
            ]
            captions.setdefault(curve.name, [])
            if rows:
                unit = unit if unit == "%" else f" {unit}"
                mean = sum(curve.mean[at] for at in rows) / len(rows) * scale
                most = max(curve.high[at] for at in rows) * scale
                text = f"{mean:,.{digits}f}{unit}, at most {most:,.{digits}f}{unit}"
                captions[curve.name].append(f"{wording.card_name(gpu.gpu, analysis)} {text}")
    part = "run" if window is None else "measured steps"
    return {
        name: f"Mean over the {part}: {'; '.join(parts)}.{f' {_COVERED}' * (len(parts) > 1)}"
        if parts
        else f"No sample in the {part}."
        for name, parts in captions.items()
    }


def _matrix(host: str, analysis: Analysis) -> Table | None:
    """Tabulate the links of a host, a row and a column for each GPU; None where none is known."""
    links = [link for link in analysis.links if link.host == host]
    if not any(link.link or link.bandwidth is not None or link.staged_copies for link in links):
        return None
    gpus = sorted({link.from_ for link in links} | {link.to for link in links})[: _LIMITS.links]
    between = {(link.from_, link.to): link for link in links}

    def cell(row: int, column: int) -> str:
        if row == column:
            return UNKNOWN
        if (link := between.get((row, column))) is None:
            return UNKNOWN
        rate = "" if link.bandwidth is None else f" {format_number(link.bandwidth / 1e9)} GB/s"
        staged = " through the host" if link.staged_copies else ""
        return f"{link.link or ''}{rate}{staged}".strip() or UNKNOWN

    names = [wording.card_name(gpu, analysis) for gpu in gpus]
    rows = tuple(
        (name, *(cell(row, column) for column in gpus))
        for name, row in zip(names, gpus, strict=True)
    )
    where = f" on {plain_text(host, 40)}" if host else ""
    measured = any(link.bandwidth is not None for link in links)
    rates = ", and GB/s measured in large copies" if measured else ""
    title = f"From GPU (row) to GPU (column){where}: the link{rates}"
    return Table(title, ("", *names), rows)


def render_document(
    document: Document,
    charts: dict[str, figure],
    captions: Mapping[str, tuple[str, str]],
    **content: str,
) -> str:
    """Render the page of a report without a timeline, whose first line is its heading.

    ``captions`` have the heading and the text alternative of each chart; ``content`` has ``what``
    and the ``title`` of the page, and the ``severity`` that its heading shows.
    """
    shown = SimpleNamespace(
        document=document,
        captions=captions,
        summary={name: plain_text(text, 1000) for name, (_, text) in captions.items()},
        **{name: plain_text(text, 300) for name, text in content.items()},
    )
    return render_page("document.html", charts, common_variables(charts) | {"content": shown})


def render_comparison(comparison: Comparison) -> str:
    """Render a comparison as one self-contained HTML document."""
    speeds = "; ".join(
        f"{row.label} {row.speed_up:.2f} times, efficiency {row.efficiency:.0%}"
        for row in (comparison.scaling.rows if comparison.scaling is not None else ())
        if row.speed_up is not None and row.efficiency is not None
    )
    by_run = f"By run: {speeds}." if speeds else ""
    captions = {
        "speed": (
            "Speed-up by the number of GPUs",
            f"{by_run} The dashed line is as many times faster as GPUs.",
        ),
        "efficiency": ("Efficiency", f"{by_run} The dashed line is ideal."),
        "classes": (
            "Where the time goes in each run",
            "The same as the table: the classes of time, one bar a run.",
        ),
    }
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
        if values:  # Runs without a GPU have none.
            charts["classes"] = stacked_bars(labels, values, f"ms {UNITS[comparison.unit]}")
    return render_document(
        comparison_document(comparison, _LIMITS),
        charts,
        captions,
        what="comparison of",
        title=" and ".join(Path(run.paths[0]).name for run in comparison.runs),
        severity={"slower": "high", "faster": "", "same": ""}.get(comparison.verdict, "low"),
    )


def _speed_chart(comparison: Comparison, name: str, label: str) -> figure:
    """Draw measured values, with bounds for the speed-up, and the ideal."""
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
    points = ColumnDataSource(data)
    plot = gpus_chart(name, 260, data["gpus"], label)
    measured = draw_points(plot, points, "#009e73")
    ideal = plot.line("gpus", "ideal", source=points, color="#8a8a8a", line_dash=DASHED)
    if name == "speed":
        draw_spread(plot, points, "gpus", line_color="#009e73")
    tips = [("run", "@run"), ("GPUs", "@gpus"), (label, "@value{0.00}"), ("ideal", "@ideal{0.00}")]
    add_tips(plot, measured[-1], tips)
    add_legend(plot, [("measured", measured), ("ideal", [ideal])])
    return plot
