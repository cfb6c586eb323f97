"""The comparison as Markdown, for an issue or a pull request."""

from __future__ import annotations

from typing import Final

from gputrace.analyzers.compare.results import Comparison
from gputrace.views.compare.scaling import scaling_tables
from gputrace.views.compare.tables import notes, tables, verdict
from gputrace.views.markdown import escape, render_table

_NAME_WIDTH: Final = 60


def render(comparison: Comparison) -> str:
    """GitHub's Markdown; names from the traces are escaped."""
    parts = [f"**{escape(verdict(comparison))}**"]
    runs = [f"- {escape(run.label)}: {escape(run.paths[0])}" for run in comparison.runs]
    parts.append("\n".join(runs))
    for table in (*tables(comparison, _NAME_WIDTH), *scaling_tables(comparison)):
        parts.append(render_table(table))
    others = [f"- {heading}: {escape(note)}" for heading, note in notes(comparison)]
    if others:
        parts.append("\n".join(others))
    return "\n\n".join(parts) + "\n"
