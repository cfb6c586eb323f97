"""The report as Markdown, for an issue or a pull request."""

from __future__ import annotations

from gputrace.analyzers.results import Analysis
from gputrace.views.savings import savings
from gputrace.views.sections import Limits, tables_after, tables_before
from gputrace.views.tables import Table, notes, verdict

_LIMITS = Limits(gpus_across=4, gaps=10, links=8, kernels=15)


def render(analysis: Analysis) -> str:
    """GitHub's Markdown; names from the trace are escaped."""
    parts = [f"**{escape(verdict(analysis))}**"]
    if analysis.findings:
        first = analysis.findings[0]
        parts.append(f"What to do: {escape(first.advice)}.{escape(savings(analysis, first))}")
    parts += [render_table(table) for table in tables_before(analysis, _LIMITS)]
    others = [
        f"- `{f.id}`: {escape(f.message)}.{escape(savings(analysis, f))}"
        for f in analysis.findings[1:]
    ]
    others += [f"- {escape(note)}" for note in notes(analysis)]
    if others:
        parts.append("\n".join(others))
    parts += [render_table(table) for table in tables_after(analysis, _LIMITS)]
    return "\n\n".join(parts) + "\n"


def render_table(table: Table) -> str:
    """A table under its title; the first column is text, the rest numbers."""
    lines = [f"#### {escape(table.title)}", ""]
    lines.append(_row(table.header))
    lines.append("|" + "|".join([" :-- "] + [" --: "] * (len(table.header) - 1)) + "|")
    lines += [_row(row) for row in table.rows]
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(escape(cell) for cell in cells) + " |"


def escape(text: str) -> str:
    """Text that Markdown shows as it is."""
    for character in "\\`*_<>|[]":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
