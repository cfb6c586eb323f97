"""The tables of studies that ask about one thing: a setting, a cure, links, cards, placements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gputrace.bench.answer import PairOfGpus, Placement, Summary
from gputrace.bench.views.cells import (
    bandwidth,
    clock,
    lay_out,
    memory,
    rate,
    signed_percent,
    signed_time,
    time,
    times,
    times_range,
)
from gputrace.views.tables import Table

_CURES: Final = {"pinned": "pinned, own stream"}
"""Cures whose id is also a setting, and less than they do."""
_EVEN: Final = 0.02
"""Clocks and speeds of cards that differ by less are the same."""


def effects_table(summary: Summary) -> Iterator[Table]:
    """What each setting changes where all others are the same."""
    for name in dict.fromkeys(row.setting for row in summary.effects):
        body = [
            (
                f"{row.value} beside {row.base}" + (f" ({row.others})" if row.others else ""),
                times(row.speed_up),
                times_range(row.bounds),
                signed_time(row.gap_ns),
            )
            for row in summary.effects
            if row.setting == name
        ]
        yield lay_out(
            f"What changes with {name}", ("", "samples/s", "(range)", "idle a step"), body
        )


def predictions_table(summary: Summary) -> Iterator[Table]:
    """What recordings foretold, beside what came."""
    some = any(row.made < row.recordings for row in summary.predictions)
    body = [
        (
            row.change + (f" ({row.label})" if row.label != "all" else ""),
            _CURES.get(row.cure, row.cure),
            time(row.before_ns),
            time(row.predicted_ns),
            time(row.measured_ns),
            signed_percent(row.error),
            f"{row.made} of {row.recordings}" if some else "",
            f"{time(row.low_ns)}–{time(row.high_ns)}",
            " → ".join(filter(None, (time(row.gap_before_ns), time(row.gap_after_ns)))),
        )
        for row in summary.predictions
    ]
    header = (
        *("", "cure", "step", "predicted", "measured", "error"),
        *("foretold by", "(range)", "idle a step"),
    )
    yield lay_out("What the recording without it foretold, and what came", header, body)


def placements_table(summary: Summary) -> Iterator[Table]:
    """GPUs across: what each has to compute, and holds in memory."""
    most = max((len(row.shares) for row in summary.placements), default=0)
    body = tuple(_placement(row, most) for row in summary.placements)
    header = ("", "gpu 0 / others", *(f"gpu {place}" for place in range(most)))
    yield lay_out("Compute time a step, and memory, of each GPU", header, body)


def _placement(row: Placement, most: int) -> tuple[str, ...]:
    cells = [
        ", ".join(filter(None, (time(s.compute_ns), memory(s.memory_bytes)))) for s in row.shares
    ]
    return (row.label, times(row.skew), *cells, *[""] * (most - len(cells)))


def pairs_table(summary: Summary) -> Iterator[Table]:
    """A row per pair of GPUs, the quickest first."""
    body = [
        (
            row.label,
            row.link or "unknown",
            bandwidth(row.bandwidth),
            time(row.step_ns),
            time(row.communication_ns),
            rate(row.rate),
        )
        for row in summary.pairs
    ]
    header = ("", "link", "bandwidth", "step", "communication", "samples/s")
    yield lay_out(f"Pairs of GPUs{links_told(summary.pairs)}", header, body)


def links_told(pairs: tuple[PairOfGpus, ...]) -> str:
    """What the kinds of links allow to be said."""
    kinds = {pair.link for pair in pairs}
    if kinds == {""}:
        return ": what links them is not known"
    if len(kinds) == 1:
        return f": all are linked by {kinds.pop()}, so none can be told from another by its link"
    return ""


def cards_table(summary: Summary) -> Iterator[Table]:
    """A row per card, its clock and its speed."""
    body = [
        (
            row.label,
            row.name,
            clock(row.sm_clock_mhz),
            clock(row.sm_clock_max_mhz),
            time(row.step_ns),
            rate(row.rate),
            times(row.beside),
        )
        for row in summary.cards
    ]
    apart = [abs(row.beside - 1) for row in summary.cards if row.beside is not None]
    told = f": all within {_EVEN:.0%}" if apart and max(apart) <= _EVEN else ""
    header = ("", "card", "SM clock", "at most", "step", "samples/s", "beside the middle")
    yield lay_out(f"Cards, each beside the middle one{told}", header, body)
