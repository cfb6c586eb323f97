"""Report for notebooks: an HTML fragment, and tables as pandas DataFrames."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from gputrace.errors import MissingError, UsageError
from gputrace.model.results import (
    Analysis,
    Breakdown,
    CardUse,
    Finding,
    Gap,
    GpuTotals,
    KernelOnGpu,
    KernelUse,
    Phase,
    Step,
)
from gputrace.report.tables import (
    Limits,
    Table,
    notes,
    savings,
    tables_after,
    tables_before,
    verdict,
)
from gputrace.sanitize import sentence

if TYPE_CHECKING:
    import pandas


_LIMITS = Limits(gpus_across=4, gaps=5, links=8, kernels=8)


def render(analysis: Analysis) -> str:
    """Render a ``div`` without scripts or styles; everything from the trace is escaped."""
    parts = [f"<p><b>{escape(verdict(analysis))}</b></p>"]
    if analysis.findings:
        first = analysis.findings[0]
        advice = f"What to do: {first.advice}.{savings(analysis, first)}"
        parts.append(f"<p>{escape(advice)}</p>")
    parts += [_table(table) for table in tables_before(analysis, _LIMITS)]
    others = [f"{f.id}: {f.message}.{savings(analysis, f)}" for f in analysis.findings[1:]]
    parts += [f"<p>{escape(other)}</p>" for other in others]
    parts += [_table(table) for table in tables_after(analysis, _LIMITS)]
    parts += [f"<p><small>{escape(note)}</small></p>" for note in notes(analysis)]
    return "<div>" + "".join(parts) + "</div>"


def escape(text: str) -> str:
    """Escape text for HTML."""
    return html.escape(sentence(text))


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    caption = f"<caption>{escape(table.title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


_TABLES: Final[dict[str, type]] = {
    "breakdown": Breakdown,
    "gpus": GpuTotals,
    "step_list": Step,
    "phases": Phase,
    "gaps": Gap,
    "findings": Finding,
    "cards": CardUse,
    "kernels": KernelUse,
}


def frame(analysis: Analysis, table: str) -> pandas.DataFrame:
    """Return one table as a DataFrame, a column per field.

    Raises UsageError for an unknown table, MissingError without pandas.
    """
    if table not in _TABLES:
        raise UsageError(f"no table is called {table!r}; there are {', '.join(_TABLES)}")
    try:
        import pandas
    except ImportError:
        raise MissingError("to_pandas() needs pandas; install gputrace[pandas]") from None
    rows: Sequence[Any] = getattr(analysis, table)
    if table == "gaps":
        rows = analysis.gaps.largest
    if table == "kernels":
        return pandas.DataFrame(_kernels(analysis))
    names = [field.name for field in fields(_TABLES[table])]
    return pandas.DataFrame({name: [getattr(row, name) for row in rows] for name in names})


def _kernels(analysis: Analysis) -> dict[str, list[Any]]:
    """Return the columns of the top kernels, a row per kernel and GPU that runs it."""
    top = analysis.kernels.top if analysis.kernels else ()
    pairs = [(use, on_gpu) for use in top for on_gpu in use.by_gpu]
    own_names = [field.name for field in fields(KernelOnGpu)]
    names = [f.name for f in fields(KernelUse) if f.name not in {*own_names, "by_gpu", "share"}]
    columns = {name: [getattr(use, name) for use, _ in pairs] for name in names}
    return columns | {name: [getattr(on_gpu, name) for _, on_gpu in pairs] for name in own_names}
