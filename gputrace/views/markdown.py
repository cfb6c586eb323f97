"""The report as Markdown, for an issue or a pull request."""

from __future__ import annotations

from gputrace.analyzers.results import Analysis
from gputrace.views.cards import cards_table
from gputrace.views.collectives import collectives_tables
from gputrace.views.kernels import kernels_table
from gputrace.views.tables import Table, gaps_table, main_table, notes, verdict

_MOST_GPUS_ACROSS = 4
_MOST_GAPS = 10
_MOST_KERNELS = 15


def render(analysis: Analysis) -> str:
    """GitHub's Markdown; names from the trace are escaped."""
    parts = [f"**{escape(verdict(analysis))}**"]
    if analysis.findings:
        parts.append(f"What to do: {escape(analysis.findings[0].advice)}.")
    parts.append(render_table(main_table(analysis, _MOST_GPUS_ACROSS)))
    if analysis.gaps.largest:
        parts.append(render_table(gaps_table(analysis, _MOST_GAPS)))
    parts += [render_table(table) for table in collectives_tables(analysis)]
    if (cards := cards_table(analysis)) is not None:
        parts.append(render_table(cards))
    others = [f"- `{f.id}`: {escape(f.message)}." for f in analysis.findings[1:]]
    others += [f"- {escape(note)}" for note in notes(analysis)]
    if others:
        parts.append("\n".join(others))
    kernels = kernels_table(analysis, _MOST_KERNELS)
    if kernels is not None:
        parts.append(render_table(kernels))
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
