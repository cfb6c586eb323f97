"""The report as a piece of HTML, as notebooks show it."""

from __future__ import annotations

import html

from gputrace.analyzers.results import Analysis
from gputrace.cleaning import sentence
from gputrace.views.savings import savings
from gputrace.views.sections import Limits, tables_after, tables_before
from gputrace.views.tables import Table, notes, verdict

_LIMITS = Limits(gpus_across=4, gaps=5, links=8, kernels=8)


def render(analysis: Analysis) -> str:
    """A ``div`` without scripts or styles of its own; everything from the trace is escaped."""
    parts = [f"<p><b>{escape(verdict(analysis))}</b></p>"]
    if analysis.findings:
        first = analysis.findings[0]
        told = f"What to do: {first.advice}.{savings(analysis, first)}"
        parts.append(f"<p>{escape(told)}</p>")
    parts += [_table(table) for table in tables_before(analysis, _LIMITS)]
    others = [f"{f.id}: {f.message}.{savings(analysis, f)}" for f in analysis.findings[1:]]
    parts += [f"<p>{escape(other)}</p>" for other in others]
    parts += [_table(table) for table in tables_after(analysis, _LIMITS)]
    parts += [f"<p><small>{escape(note)}</small></p>" for note in notes(analysis)]
    return "<div>" + "".join(parts) + "</div>"


def escape(text: str) -> str:
    """Text that HTML shows as it is."""
    return html.escape(sentence(text))


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    caption = f"<caption>{escape(table.title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
