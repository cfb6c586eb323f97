"""What NVML saw of each card in the measured steps, a line a card."""

from __future__ import annotations

from typing import Final

from gputrace.analyzers.results import Analysis
from gputrace.views.tables import Table

_UNKNOWN: Final = "–"


def cards_table(analysis: Analysis) -> Table | None:
    """Nothing where no card was sampled."""
    if not analysis.cards:
        return None
    hosts = len({card.host for card in analysis.cards}) > 1
    header = ("", "utilized", "memory", "power", "SM clock", "memory clock", "hottest")
    body = tuple(
        (
            f"gpu {card.gpu}" + (f" rank {card.rank}" if hosts else ""),
            _number(card.utilization_percent, "%"),
            _of(_gib(card.memory_used_bytes), _gib(card.memory_bytes), "GiB"),
            _of(_watts(card.power_mw), _watts(card.power_limit_mw), "W"),
            _of(card.sm_clock_mhz, card.sm_clock_max_mhz, "MHz"),
            _of(card.memory_clock_mhz, card.memory_clock_max_mhz, "MHz"),
            _number(card.temperature_c, " °C"),
        )
        for card in analysis.cards
    )
    return _without_unknown(Table(_title(analysis), header, body))


def _without_unknown(table: Table) -> Table:
    """Without the columns of which nothing is known."""
    columns = list(zip(table.header, *table.rows, strict=True))
    known = [column for column in columns if set(column[1:]) != {_UNKNOWN}]
    header, *rows = zip(*known, strict=True)
    return Table(table.title, header, tuple(rows))


def _title(analysis: Analysis) -> str:
    fewest = min(card.samples for card in analysis.cards)
    most = max(card.samples for card in analysis.cards)
    count = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    where = "in these steps" if any(row.steps for row in analysis.breakdown) else "while they work"
    samples = "sample" if most == 1 else "samples"
    return f"The cards {where} (NVML, {count} {samples} of each at work)"


def _number(value: float | None, unit: str) -> str:
    return _UNKNOWN if value is None else f"{value:,.0f}{unit}"


def _of(value: float | None, most: float | None, unit: str) -> str:
    if value is None:
        return _UNKNOWN
    digits = 1 if unit == "GiB" and value < 100 else 0
    limit = "" if most is None else f"/{most:,.0f}"
    return f"{value:,.{digits}f}{limit} {unit}"


def _gib(count: int | None) -> float | None:
    return None if count is None else count / 2**30


def _watts(milliwatts: float | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
