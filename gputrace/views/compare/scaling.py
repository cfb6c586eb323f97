"""The tables of runs with different numbers of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gputrace.analyzers.compare.results import Comparison, Scaling, ScalingRow
from gputrace.units import format_ns
from gputrace.views.compare.tables import NAMES, UNITS
from gputrace.views.tables import Table

_MOST_ACROSS: Final = 5
_SOURCES: Final = {
    "batch": "by the batch given",
    "input_bytes": "by the bytes of the input copies",
    "kernels": "by the time of the kernels",
    "none": "",
}


def scaling_tables(comparison: Comparison) -> Iterator[Table]:
    """Speed-up and efficiency; then what each class adds to the ideal step."""
    scaling = comparison.scaling
    if scaling is None:
        return
    yield _speeds(scaling)
    rows = [row for row in scaling.rows if row.losses][-_MOST_ACROSS:]
    if rows:
        yield _losses(comparison, rows)


def _speeds(scaling: Scaling) -> Table:
    base = scaling.rows[0]
    body = tuple(
        (
            row.label,
            str(row.gpus),
            format_ns(row.mean_ns),
            "–" if row.speed_up is None else f"{row.speed_up:.2f}x",
            "" if row is base or row.speed_up_low is None else _bounds(row),
            "–" if row.efficiency is None else f"{row.efficiency:.0%}",
        )
        for row in scaling.rows
    )
    header = ("", "GPUs", "step", "speed-up", "95% bounds", "efficiency")
    return Table(_title(scaling), header, body)


def _title(scaling: Scaling) -> str:
    if scaling.kind == "same":
        return "Speed, beside the first"
    if scaling.kind == "unknown":
        return "Scaling: nothing tells how much work a step does"
    stays = "a GPU" if scaling.kind == "weak" else "a step"
    told = _SOURCES[scaling.source]
    return f"{scaling.kind.capitalize()} scaling: the work of {stays} stays ({told})"


def _losses(comparison: Comparison, rows: list[ScalingRow]) -> Table:
    """Classes down, runs across; those within the noise in brackets."""
    names = {loss.name: 0 for row in rows for loss in row.losses}
    lost = [{loss.name: loss for loss in row.losses} for row in rows]
    shown = [n for n in NAMES if n in names and any(n in of and abs(of[n].ns) > 0 for of in lost)]
    body = [
        (NAMES[name], *(_lost(of[name].ns, of[name].changed) if name in of else "–" for of in lost))
        for name in shown
    ]
    totals = (_lost(row.mean_ns - (row.ideal_ns or 0), True) for row in rows)
    body.append(("total", *totals))
    unit = UNITS[comparison.unit]
    title = f"What {unit} takes beyond the ideal (in brackets: small, or within the noise)"
    return Table(title, ("", *(row.label for row in rows)), tuple(body))


def _lost(ns: int, changed: bool | None) -> str:
    text = f"+{format_ns(ns)}" if ns > 0 else format_ns(ns)
    return text if changed else f"({text})"


def _bounds(row: ScalingRow) -> str:
    return f"{row.speed_up_low:.2f}x to {row.speed_up_high:.2f}x"
