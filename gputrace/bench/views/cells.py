"""The figures of a study as short texts; nothing for what is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gputrace.analyzers.compare.noise import Bounds
from gputrace.analyzers.compare.results import Loss
from gputrace.bench.answer import Efficiency, Spread
from gputrace.units import format_bytes, format_ns
from gputrace.views.tables import Table

NOTHING = "–"


def lay_out(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without the columns that are empty in all rows; a dash where a cell is."""
    body = list(rows)
    kept = [place for place in range(len(header)) if not place or any(row[place] for row in body)]
    return Table(
        title,
        tuple(header[place] for place in kept),
        tuple(tuple(row[place] or NOTHING for place in kept) for row in body),
    )


def time(ns: float | None) -> str:
    """``12.3 ms``."""
    return "" if ns is None else format_ns(ns) if ns else "0"


def seconds(value: float | None) -> str:
    """As `time`, of seconds."""
    return "" if value is None else time(value * 1e9)


def rate(value: float | None) -> str:
    """Samples a second: ``12,345``, ``812``, ``7.24``."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def range_of(figure: Spread, show: Callable[[float], str]) -> str:
    """``801–823``."""
    low, high = show(figure.low), show(figure.high)
    return low if low == high else f"{low}–{high}"


def number(value: float) -> str:
    """To three digits."""
    return f"{value:.3g}"


def percent(share: float | None) -> str:
    """``12.3%``."""
    return "" if share is None else f"{share:.1%}"


def signed_percent(share: float | None) -> str:
    """``+1.2%``."""
    return "" if share is None else f"{share:+.1%}"


def bandwidth(a_second: int | None) -> str:
    """``21.3 GB/s``."""
    return "" if a_second is None else f"{format_bytes(a_second)}/s"


def memory(count: int | None) -> str:
    """``1.29 GiB``, as nvidia-smi counts."""
    return "" if count is None else f"{count / 2**30:.2f} GiB"


def clock(mhz: float | None) -> str:
    """``1,980 MHz``."""
    return "" if mhz is None else f"{mhz:,.0f} MHz"


def times_range(bounds: Bounds | None) -> str:
    """``1.21x–1.25x``."""
    return "" if bounds is None else f"{times(bounds.low)}–{times(bounds.high)}"


def times(ratio: float | None) -> str:
    """``1.23x``."""
    return "" if ratio is None else f"{ratio:.2f}x"


def signed_time(ns: int | None) -> str:
    """``+1.2 ms``, ``-310 us``, ``0``."""
    return "" if ns is None else f"+{format_ns(ns)}" if ns > 0 else time(ns)


def amount(loss: Loss | None, row: Efficiency) -> str:
    """What a class adds, and its part of the base's step."""
    if loss is None or not loss.ns:
        return ""
    share = loss.ns / row.base_step_ns if row.base_step_ns else 0.0
    return f"{signed_time(loss.ns)} ({share:+.1%})"
