"""Names as a terminal's browser draws them, and moments as words."""

from __future__ import annotations

from functools import lru_cache

from rich.cells import cell_len

from gputrace.cleaning import LONGEST, clean
from gputrace.traces.names import short
from gputrace.units import format_ns


@lru_cache(maxsize=4096)
def label(name: str) -> str:
    """A kernel's own name, every letter one column wide."""
    own = short(name) if len(name) < 10 * LONGEST else name
    own = clean(own, 80)
    return own if own.isascii() else "".join(c if cell_len(c) == 1 else "·" for c in own)


def moment(ns: int, step_ns: int = 1_000) -> str:
    """``28.6547s``: with as many decimals as tell apart what lies ``step_ns`` apart."""
    decimals = min(max(0, 10 - len(str(max(step_ns, 1)))), 9)
    sign, size = ("-", -ns) if ns < 0 else ("", ns)
    whole, below = divmod(size, 10**9)
    if not decimals:
        return f"{sign}{whole}s"
    return f"{sign}{whole}.{below:09d}"[: len(f"{sign}{whole}") + 1 + decimals] + "s"


def duration(ns: int) -> str:
    """As reports write it."""
    return format_ns(ns)
