"""The results as Markdown, for an issue or a pull request."""

from __future__ import annotations

from gputrace.bench.answer import Summary
from gputrace.bench.views.tables import headline, same, tables
from gputrace.views.markdown import escape, render_table


def render(summary: Summary) -> str:
    """GitHub's Markdown; words of scripts are escaped."""
    parts = [f"**{escape(summary.title)}**"]
    if summary.question:
        parts.append(escape(summary.question))
    parts.append(escape(headline(summary)))
    if summary.same:
        parts.append(f"The same in all runs: {escape(same(summary))}.")
    parts += [render_table(table) for table in tables(summary)]
    if summary.notes:
        parts.append("\n".join(f"- {escape(note)}" for note in summary.notes))
    return "\n\n".join(parts) + "\n"
