"""Report as Markdown, for an issue or a pull request."""

from __future__ import annotations

import re
from typing import Final

from gputrace.model.results import Analysis
from gputrace.report.tables import (
    TEXT_COLUMNS,
    Limits,
    Table,
    notes,
    savings,
    tables_after,
    tables_before,
    verdict,
)
from gputrace.sanitize import sentence

_MARKUP: Final = re.compile(r"[\\`*_<>|\[\]~$&#]")
_ADDRESS: Final = re.compile(r":(?=//)|\bwww(?=\.)")
"""Text that GitHub turns into links by itself."""
_LIMITS = Limits(gpus_across=4, gaps=10, links=8, kernels=15)


def render(analysis: Analysis) -> str:
    """Render a report as GitHub Markdown; names from the trace are escaped."""
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
    """Render a table under its title; text left-aligned, numbers right-aligned."""
    lines = [f"#### {escape(table.title)}", ""]
    lines.append(_row(table.header))
    sides = (" :-- " if name in TEXT_COLUMNS else " --: " for name in table.header[1:])
    lines.append("|" + "|".join([" :-- ", *sides]) + "|")
    lines += [_row(row) for row in table.rows]
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(escape(cell) for cell in cells) + " |"


def escape(text: str) -> str:
    """Escape text for Markdown: it yields no markup, formula, link or mention."""
    text = _MARKUP.sub(r"\\\g<0>", sentence(text))
    text = _ADDRESS.sub(r"\g<0>\\", text)
    return " ".join(text.replace("@", "@<!-- -->").split())
