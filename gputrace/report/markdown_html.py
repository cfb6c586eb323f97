"""Report as Markdown for an issue or a pull request, and as HTML for notebooks."""

from __future__ import annotations

import html
import re
from typing import Final

from gputrace.model.results import Analysis
from gputrace.report.tables import TEXT_COLUMNS, ShownLimits, Table, tables_after, tables_before
from gputrace.report.wording import advice, finding_text, notes, verdict
from gputrace.sanitize import sentence

_MARKUP: Final = re.compile(r"[\\`*_<>|\[\]~$&#]")
_ADDRESS: Final = re.compile(r":(?=//)|\bwww(?=\.)")
"""Text that GitHub turns into links by itself."""


def render_markdown(analysis: Analysis) -> str:
    """Render a report as GitHub Markdown; names from the trace are escaped."""
    limits = ShownLimits(gpus_across=4, gaps=10, links=8, kernels=15)
    parts = [f"**{escape(verdict(analysis))}**"]
    parts += map(escape, advice(analysis))
    parts += [render_table(table) for table in tables_before(analysis, limits)]
    others = [f"- `{f.id}`: {escape(finding_text(analysis, f))}" for f in analysis.findings[1:]]
    others += [f"- {escape(note)}" for note in notes(analysis)]
    if others:
        parts.append("\n".join(others))
    parts += [render_table(table) for table in tables_after(analysis, limits)]
    return "\n\n".join(parts) + "\n"


def render_table(table: Table) -> str:
    """Render a table under its title; text left-aligned, numbers right-aligned."""
    sides = (" :-- " if name in TEXT_COLUMNS else " --: " for name in table.header[1:])
    rows = ["| " + " | ".join(map(escape, cells)) + " |" for cells in (table.header, *table.rows)]
    rows.insert(1, "|" + "|".join([" :-- ", *sides]) + "|")
    return "\n".join([f"#### {escape(table.title)}", "", *rows])


def escape(text: str) -> str:
    """Escape text for Markdown: it yields no markup, formula, link or mention."""
    text = _MARKUP.sub(r"\\\g<0>", sentence(text))
    text = _ADDRESS.sub(r"\g<0>\\", text)
    return " ".join(text.replace("@", "@<!-- -->").split())


def render_html(analysis: Analysis) -> str:
    """Render a ``div`` without scripts or styles; everything from the trace is escaped."""
    limits = ShownLimits(gpus_across=4, gaps=5, links=8, kernels=8)
    parts = [f"<b>{escape_html(verdict(analysis))}</b>", *map(escape_html, advice(analysis))]
    others = [f"{f.id}: {finding_text(analysis, f)}" for f in analysis.findings[1:]]
    small = [f"<small>{escape_html(note)}</small>" for note in notes(analysis)]
    return "".join(
        (
            "<div>",
            *(f"<p>{part}</p>" for part in parts),
            *map(_html_table, tables_before(analysis, limits)),
            *(f"<p>{escape_html(other)}</p>" for other in others),
            *map(_html_table, tables_after(analysis, limits)),
            *(f"<p>{note}</p>" for note in small),
            "</div>",
        )
    )


def escape_html(text: str) -> str:
    """Escape text for HTML."""
    return html.escape(sentence(text))


def _html_table(table: Table) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape_html(cell)}</{tag}>' for cell in cells)}</tr>"

    caption = f"<caption>{escape_html(table.title)}</caption>"
    body = "".join(row(cells, "td") for cells in table.rows)
    return f"<table>{caption}<thead>{row(table.header, 'th')}</thead><tbody>{body}</tbody></table>"
