"""The report as Markdown, for an issue or a pull request."""

from __future__ import annotations

import re
from typing import Final

from gputrace.analyzers.results import Analysis
from gputrace.cleaning import sentence
from gputrace.views.savings import savings
from gputrace.views.sections import Limits, tables_after, tables_before
from gputrace.views.tables import TEXT_COLUMNS, Table, notes, verdict

_MARKUP: Final = re.compile(r"[\\`*_<>|\[\]~$&#]")
_ADDRESS: Final = re.compile(r":(?=//)|\bwww(?=\.)")
"""What GitHub makes a link of without being asked."""
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
    """A table under its title; text to the left, numbers to the right."""
    lines = [f"#### {escape(table.title)}", ""]
    lines.append(_row(table.header))
    sides = (" :-- " if name in TEXT_COLUMNS else " --: " for name in table.header[1:])
    lines.append("|" + "|".join([" :-- ", *sides]) + "|")
    lines += [_row(row) for row in table.rows]
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(escape(cell) for cell in cells) + " |"


def escape(text: str) -> str:
    """Text that Markdown shows as it is: no markup, formula, address or person is made of it."""
    text = _MARKUP.sub(r"\\\g<0>", sentence(text))
    text = _ADDRESS.sub(r"\g<0>\\", text)
    return " ".join(text.replace("@", "@<!-- -->").split())
