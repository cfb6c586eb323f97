"""The report as a piece of HTML, as notebooks show it."""

from __future__ import annotations

from html import escape

from gputrace.analyzers.results import Analysis
from gputrace.views.tables import Table, gaps_table, main_table, notes, savings, verdict

_MOST_GPUS_ACROSS = 4
_MOST_GAPS = 5


def render(analysis: Analysis) -> str:
    """A ``div`` without scripts or styles of its own; everything from the trace is escaped."""
    parts = [f"<p><b>{escape(verdict(analysis))}</b></p>"]
    if analysis.findings:
        first = analysis.findings[0]
        parts.append(f"<p>What to do: {escape(first.advice)}.{savings(analysis, first)}</p>")
    parts.append(_table(main_table(analysis, _MOST_GPUS_ACROSS)))
    if analysis.gaps.largest:
        parts.append(_table(gaps_table(analysis, _MOST_GAPS)))
    parts += [
        f"<p>{escape(f'{f.id}: {f.message}')}.{savings(analysis, f)}</p>"
        for f in analysis.findings[1:]
    ]
    parts += [f"<p><small>{escape(note)}</small></p>" for note in notes(analysis)]
    return "<div>" + "".join(parts) + "</div>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    caption = f"<caption>{escape(table.title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
