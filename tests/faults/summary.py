"""Summary of a run of faults: JSON, and the table of docs/faults.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from tests.faults.model import Kind, Outcome

HEADER: Final = "| what is injected | times | program unchanged | trace whole | longest missing |"
MARK: Final = "<!-- What follows is made by `make faults`. -->"


def summarize(kinds: Sequence[Kind], outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """A row for each kind that was injected."""
    by_kind: dict[str, list[Outcome]] = {kind.name: [] for kind in kinds}
    for outcome in outcomes:
        by_kind[outcome.kind].append(outcome)
    return [_row(kind, by_kind[kind.name]) for kind in kinds if by_kind[kind.name]]


def _row(kind: Kind, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "group": kind.group,
        "kind": kind.name,
        "times": len(outcomes),
        "program_unchanged": sum(not outcome.changed for outcome in outcomes),
        "trace_whole": sum(not outcome.broken for outcome in outcomes),
        "recovered": sum(outcome.recovered for outcome in outcomes),
        "events": sum(outcome.events for outcome in outcomes),
        "missing_s": round(max(outcome.missing_s for outcome in outcomes), 3),
        "note": kind.note,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Render Markdown: a table for each group, with its notes."""
    parts = []
    for group, members in groupby(rows, lambda row: row["group"]):
        own = list(members)
        parts.append(f"### {group}")
        parts.append("\n".join([HEADER, "| :-- | --: | --: | --: | --: |", *map(_line, own)]))
        parts += [f"Of `{row['kind']}`: {row['note']}." for row in own if row["note"]]
    return "\n\n".join(parts)


def _line(row: dict[str, Any]) -> str:
    missing = f"{row['missing_s']:.2f} s" if row["missing_s"] else ""
    counts = f"{row['times']} | {row['program_unchanged']} | {row['trace_whole']}"
    return f"| {row['kind']} | {counts} | {missing} |"


def write_into(page: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Replaces the tables of a page."""
    before, _, _ = page.read_text(encoding="utf-8").partition(MARK)
    text = f"{before}{MARK}\n\nIn all, {total(rows)}.\n\n{table(rows)}\n"
    page.write_text(text, encoding="utf-8")


def total(rows: Sequence[dict[str, Any]]) -> str:
    """One line of all."""
    names = ("times", "program_unchanged", "trace_whole")
    times, unchanged, whole = (sum(row[name] for row in rows) for name in names)
    return f"{times:,} faults: {unchanged:,} programs unchanged, {whole:,} traces whole"
