"""The collectives of a run, as a table."""

from __future__ import annotations

from typing import Final

from gputrace.analyzers.results import Analysis
from gputrace.analyzers.results.collectives import CollectiveTotals
from gputrace.units import format_bytes, format_ns, format_ranges, format_share
from gputrace.views.tables import Table

_MOST: Final = 6
"""So many operations at most are shown."""


def collectives_tables(analysis: Analysis) -> list[Table]:
    """A row for each operation, times of a GPU; nothing where GPUs do not communicate."""
    shown = analysis.collectives[:_MOST]
    if not shown:
        return []
    speeds = any(total.bus_bandwidth is not None for total in shown)
    header = ("", "count", "size", "time", "exposed", "wait", "transfer", *(["bus"] * speeds))
    rows = tuple(_row(total, speeds) for total in shown)
    unit = "a GPU and step" if shown[0].steps else "a GPU"
    where = " within one process" if all(total.one_process for total in shown) else ""
    title = f"Communication{where} ({unit}; exposed: with no computation beside it)"
    return [Table(title, header, rows)]


def _row(total: CollectiveTotals, speeds: bool) -> tuple[str, ...]:
    per_step = total.count / max(total.steps, 1)
    cells = (
        _label(total),
        f"{per_step:.3g}" if total.steps else f"{total.count:,}",
        "?" if total.bytes is None else format_bytes(total.bytes),
        format_ns(total.total_ns),
        format_share(total.exposed_ns, total.total_ns),
        _time(total.wait_total_ns),
        _time(total.transfer_total_ns),
    )
    if not speeds:
        return cells
    bus = total.bus_bandwidth
    return (*cells, "?" if bus is None else f"{bus / 1e9:.3g} GB/s")


def _label(total: CollectiveTotals) -> str:
    """``AllReduce, gpus 0-3``."""
    gpus = sorted(set(total.gpus))
    return f"{total.operation}, gpu{'' if len(gpus) == 1 else 's'} {format_ranges(gpus)}"


def _time(nanoseconds: int | None) -> str:
    return "?" if nanoseconds is None else format_ns(nanoseconds)
