"""The results as one HTML page with charts, which opens offline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gputrace.bench.answer import Efficiency, Summary
from gputrace.bench.views.cells import rate
from gputrace.bench.views.charts import all_scale, find_charts
from gputrace.bench.views.tables import headline, same, tables
from gputrace.views.page.document import common_variables, render_page
from gputrace.views.page.plain import plain_text
from gputrace.views.tables import Table


@dataclass(frozen=True, slots=True)
class Words:
    """What the page says."""

    title: str
    question: str
    told: str
    severity: str
    same: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    summary: Mapping[str, str]


def render(summary: Summary) -> str:
    """The page as one HTML text that loads nothing from anywhere."""
    charts = find_charts(summary)
    return render_page(
        "study.html", charts, common_variables(charts) | {"content": _words(summary)}
    )


def _words(summary: Summary) -> Words:
    failed = any(row.failed for row in summary.rows)
    wrong = any(check.ok is False for check in summary.checks)
    return Words(
        title=plain_text(summary.title, 300),
        question=plain_text(summary.question, 1000),
        told=headline(summary),
        severity="high" if failed or wrong else "info",
        same=plain_text(same(summary), 1000) if summary.same else "",
        tables=tuple(tables(summary)),
        notes=tuple(plain_text(note, 1000) for note in summary.notes),
        summary=_captions(summary),
    )


def _captions(summary: Summary) -> dict[str, str]:
    """What each chart shows, in words."""
    rates = "; ".join(f"{row.label}: {rate(row.rate.median)}" for row in summary.rows if row.rate)
    scaled = " The dashed line is what as many GPUs would do at the efficiency of the fewest."
    return {
        "rates": plain_text(f"{rates}.{scaled if all_scale(summary) else ''}", 1000),
        "efficiency": plain_text(f"{'; '.join(map(_efficiency, summary.efficiency))}.", 1000),
        "losses": "What a step has more of than that of the fewest GPUs, to the right, and what it "
        "has less of, to the left. Both sides together are the loss.",
        "classes": "The mean steady step of each configuration, by what its GPUs do.",
        "compute": "A step's kernels that compute, GPU by GPU.",
        "memory": "The most that was in use on each card, of all processes.",
    }


def _efficiency(row: Efficiency) -> str:
    return f"{row.label}: {row.efficiency:.0%}"
