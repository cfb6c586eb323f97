"""The texts and tables of a page, as the template lays them out; all of it is escaped there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gputrace.analyzers.results import Analysis, Finding
from gputrace.analyzers.scene.worst_gaps import WorstGap
from gputrace.traces.names import short
from gputrace.units import format_ns, format_share
from gputrace.views.cards import cards_table
from gputrace.views.collectives import collectives_tables
from gputrace.views.extra import extra_table
from gputrace.views.kernels import kernels_table
from gputrace.views.links import links_tables
from gputrace.views.page.charts import CURVES
from gputrace.views.page.colors import class_label
from gputrace.views.page.material import Material
from gputrace.views.page.plain import plain_text
from gputrace.views.page.topology import topology
from gputrace.views.savings import savings
from gputrace.views.tables import Table, gpu_label, main_table, notes, verdict

_MOST_GPUS_ACROSS: Final = 4
_MOST_KERNELS: Final = 25
_MOST_LINKS: Final = 16
_MOST_NOTES: Final = 50
_NAME: Final = 60
"""Letters of a kernel's name in the list of gaps."""


@dataclass(frozen=True, slots=True)
class GapRow:
    """A row of the list of gaps; a click on it moves the timeline there."""

    lane: int
    start_ns: int
    """From the trace's origin, as is the end."""
    end_ns: int
    in_steps: bool
    cells: tuple[str, ...]


GAP_HEADER: Final = (
    "length",
    "gpu",
    "from",
    "step",
    "cause",
    "evidence",
    "before",
    "after",
    "the other GPUs meanwhile",
    "finding",
)


@dataclass(frozen=True, slots=True)
class Content:
    """Everything that a page says in words."""

    title: str
    verdict: str
    severity: str
    """Of the first finding; nothing where there is none."""
    first: str
    """The id of the first finding."""
    advice: str
    saved: str
    """What removing its cause would save, as a sentence; nothing where that is not known."""
    findings: tuple[tuple[Finding, str], ...]
    """The others, each with what removing its cause would save."""
    has_gpus: bool
    gaps: tuple[GapRow, ...]
    gap_summary: str
    breakdown: Table
    phases: Table | None
    cards: Table | None
    kernels: Table | None
    links: tuple[Table, ...]
    extra: tuple[Table, ...]
    """Of plugins."""
    notes: tuple[str, ...]
    source: str
    summary: Mapping[str, str]
    """What each chart shows, in a sentence, by its name."""


def find_content(material: Material, title: str) -> Content:
    """The words of a page."""
    analysis = material.analysis
    first = analysis.findings[0] if analysis.findings else None
    return Content(
        title=plain_text(title),
        verdict=plain_text(verdict(analysis), 1000),
        severity=first.severity if first else "",
        first=first.id if first else "",
        advice=plain_text(first.advice, 1000) if first else "",
        saved=savings(analysis, first) if first else "",
        findings=tuple((one, savings(analysis, one)) for one in analysis.findings[1:]),
        has_gpus=bool(analysis.gpus),
        gaps=tuple(_gap_row(worst, analysis) for worst in material.gaps),
        gap_summary=_gap_summary(analysis),
        breakdown=main_table(analysis, _MOST_GPUS_ACROSS),
        phases=_phases(analysis),
        cards=cards_table(analysis),
        kernels=kernels_table(analysis, _MOST_KERNELS),
        links=(
            *topology(analysis),
            *links_tables(analysis, _MOST_LINKS),
            *collectives_tables(analysis),
        ),
        extra=tuple(map(extra_table, analysis.tables)),
        notes=tuple(_first_notes(analysis)),
        source=analysis.source,
        summary=_summary(material),
    )


def _gap_row(worst: WorstGap, analysis: Analysis) -> GapRow:
    gap, origin = worst.gap, analysis.origin_ns
    causes = [f"{class_label(name)[6:]} {format_ns(ns)}" for name, ns in worst.by_cause.items()]
    cells = (
        format_ns(gap.length_ns),
        gpu_label(gap, analysis),
        f"{(gap.start_ns - origin) / 1e9:.6f} s",
        "" if gap.step is None else str(gap.step),
        causes[0] if len(causes) == 1 else ", ".join(causes[:3]),
        gap.evidence,
        short(worst.before[:4000]),
        short(worst.after[:4000]),
        _shares(worst.others),
        worst.finding,
    )
    return GapRow(
        worst.lane,
        gap.start_ns - origin,
        gap.end_ns - origin,
        worst.in_steps,
        tuple(plain_text(cell, _NAME if 6 <= at <= 7 else 200) for at, cell in enumerate(cells)),
    )


def _shares(others: Mapping[str, int]) -> str:
    """What the other GPUs did during a gap: the three classes with most time."""
    whole = sum(others.values())
    return ", ".join(
        f"{class_label(name)} {format_share(ns, whole)}" for name, ns in list(others.items())[:3]
    )


def _gap_summary(analysis: Analysis) -> str:
    gaps = analysis.gaps
    causes = sorted(gaps.by_cause.items(), key=lambda item: -item[1])
    told = ", ".join(f"{class_label(name)[6:]} {format_ns(ns)}" for name, ns in causes if ns)
    return f"In all {gaps.count:,} gaps of all GPUs, {format_ns(gaps.total_ns)}: {told or 'none'}."


def _phases(analysis: Analysis) -> Table | None:
    if not analysis.phases:
        return None
    rows = tuple(
        (
            one.phase,
            str(one.rank),
            f"{(one.start_ns - analysis.origin_ns) / 1e9:.3f} s",
            format_ns(one.end_ns - one.start_ns),
            "unknown" if one.idle_ns is None else format_ns(one.idle_ns),
            one.evidence,
        )
        for one in analysis.phases[:_MOST_NOTES]
    )
    return Table("Phases that are not steady training", _PHASE_HEADER, rows)


_PHASE_HEADER: Final = ("phase", "rank", "from", "length", "idle in it", "evidence")


def _first_notes(analysis: Analysis) -> Iterator[str]:
    for count, note in enumerate(notes(analysis)):
        if count == _MOST_NOTES:
            yield "More notes are in the JSON (gputrace analyze --json)."
            return
        yield plain_text(note, 400)


def _summary(material: Material) -> dict[str, str]:
    """Text alternatives: what one would see."""
    analysis = material.analysis
    lanes = len(material.scene.lanes)
    worst = next((worst.gap for worst in material.gaps), None)
    shown = (
        f" It first shows the steps around the largest gap, {format_ns(worst.length_ns)} of "
        f"{class_label(worst.cause)[6:]} on {gpu_label(worst, analysis)}."
        if worst
        else ""
    )
    steps = analysis.steps
    told = {
        "overview": f"The whole run of {format_ns(analysis.span_ns)}; the lit part is what the "
        "timeline below shows.",
        "timeline": f"{lanes} lane{'' if lanes == 1 else 's'}, one a GPU, coloured by class of "
        f"time.{shown} All that matters in it is in the list of gaps below.",
        "classes": "The same as the table: the classes of a step on each GPU, one bar a GPU.",
        "steps": f"{steps.count} steps, {steps.warmup_count} of them warm-up (hollow); "
        "longer ones than the chart is high are triangles at its edge.",
    }
    if steps.p50_ns is not None and steps.p95_ns is not None:
        told["steps"] += (
            f" Half of the measured steps take less than {format_ns(steps.p50_ns)}, "
            f"19 of 20 less than {format_ns(steps.p95_ns)}."
        )
    return told | _curve_summaries(analysis)


def _curve_summaries(analysis: Analysis) -> dict[str, str]:
    use = analysis.utilization
    told: dict[str, list[str]] = {}
    for gpu in use.gpus if use else ():
        for curve in gpu.curves:
            label, scale = CURVES[curve.name]
            unit, digits = label.rpartition(", ")[2], 1 if scale < 1 else 0
            mean, most = sum(curve.mean) / len(curve.mean) * scale, max(curve.high) * scale
            told.setdefault(curve.name, []).append(
                f"gpu {gpu.gpu} {mean:,.{digits}f} {unit}, at most {most:,.{digits}f}"
            )
    return {name: f"Mean over the run: {'; '.join(parts)}." for name, parts in told.items()}
