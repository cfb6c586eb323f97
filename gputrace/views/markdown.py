"""The report as Markdown, for an issue or a pull request."""

from __future__ import annotations

from gputrace.analyzers.results import Analysis
from gputrace.views.collectives import collectives_tables
from gputrace.views.tables import Table, gaps_table, main_table, notes, savings, verdict

_MOST_GPUS_ACROSS = 4
_MOST_GAPS = 10


def render(analysis: Analysis) -> str:
    """GitHub's Markdown; names from the trace are escaped."""
    parts = [f"**{_escape(verdict(analysis))}**"]
    if analysis.findings:
        first = analysis.findings[0]
        parts.append(f"What to do: {_escape(first.advice)}.{savings(analysis, first)}")
    parts.append(_table(main_table(analysis, _MOST_GPUS_ACROSS)))
    if analysis.gaps.largest:
        parts.append(_table(gaps_table(analysis, _MOST_GAPS)))
    parts += [_table(table) for table in collectives_tables(analysis)]
    others = [
        f"- `{f.id}`: {_escape(f.message)}.{savings(analysis, f)}" for f in analysis.findings[1:]
    ]
    others += [f"- {_escape(note)}" for note in notes(analysis)]
    if others:
        parts.append("\n".join(others))
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [f"#### {_escape(table.title)}", ""]
    lines.append(_row(table.header))
    lines.append("|" + "|".join([" :-- "] + [" --: "] * (len(table.header) - 1)) + "|")
    lines += [_row(row) for row in table.rows]
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"


def _escape(text: str) -> str:
    for character in "\\`*_<>|[]":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
