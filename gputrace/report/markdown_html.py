"""Report as Markdown for an issue or a pull request, and as HTML for notebooks."""

from __future__ import annotations

import html
import re
from itertools import chain
from typing import Final

from gputrace.report import TEXT_COLUMNS, Document, Limits, Line, Table
from gputrace.sanitize import sentence

_MARKUP: Final = re.compile(r"[\\`*_<>|\[\]~$&#]")
_ADDRESS: Final = re.compile(r":(?=//)|\bwww(?=\.)")
"""Text that GitHub turns into links by itself."""


MARKDOWN: Final = Limits(gaps=10, kernels=15)
NOTEBOOK: Final = Limits(gaps=5)


def render_markdown(document: Document) -> str:
    """Render a report as GitHub Markdown; names from the trace are escaped."""
    verdict, *head = document.head
    parts = [f"**{escape(verdict.text)}**", "\n".join(map(_item, verdict.below))]
    parts += [escape(line.text) for line in head]
    parts.append("\n".join(map(_item, document.lead)))
    parts += map(render_table, document.tables)
    findings: list[str] = []
    for line in document.findings:
        findings.append(f"- `{line.name}`: {escape(line.text)}")
        findings += [f"  {_item(each)}" for each in line.below]
    parts.append("\n".join([*findings, *map(_item, document.notes)]))
    parts += map(render_table, chain.from_iterable(document.sections.values()))
    return "\n\n".join(filter(None, parts)) + "\n"


def _item(line: Line) -> str:
    return f"- {escape(line.text if line.name == 'note' else line.sentence)}"


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


def render_html(document: Document) -> str:
    """Render a ``div`` without scripts or styles; everything from the trace is escaped."""
    verdict, *head = document.head
    return "".join(
        (
            f"<div><p><b>{escape_html(verdict.text)}</b></p>{_html_list(verdict)}",
            *(f"<p>{escape_html(line.text)}</p>" for line in (*head, *document.lead)),
            *map(_html_table, document.tables),
            *(
                f"<p>{escape_html(line.sentence)}</p>{_html_list(line)}"
                for line in document.findings
            ),
            *map(_html_table, chain.from_iterable(document.sections.values())),
            *(f"<p><small>{escape_html(note.text)}</small></p>" for note in document.notes),
            "</div>",
        )
    )


def _html_list(line: Line) -> str:
    items = "".join(f"<li>{escape_html(each.sentence)}</li>" for each in line.below)
    return f"<ul>{items}</ul>" if items else ""


def escape_html(text: str) -> str:
    """Escape text for HTML."""
    return html.escape(sentence(text))


def _html_table(table: Table) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape_html(cell)}</{tag}>' for cell in cells)}</tr>"

    caption = f"<caption>{escape_html(table.title)}</caption>"
    body = "".join(row(cells, "td") for cells in table.rows)
    return f"<table>{caption}<thead>{row(table.header, 'th')}</thead><tbody>{body}</tbody></table>"
