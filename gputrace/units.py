"""Parsing and formatting of durations, sizes and counts; times are integer nanoseconds inside."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Final

_UNITS: Final = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "\N{GREEK SMALL LETTER MU}s": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
}
_DURATION: Final = rf"(-?\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})?"
_FOREVER: Final = 1 << 62


def parse_duration(text: str) -> int:
    """Parse ``12s``, ``3.5ms``, ``250us``, ``5min``, ``2h`` to nanoseconds; a bare number is in s.

    Raises ValueError for anything else.
    """
    match = re.fullmatch(_DURATION, text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time; write 12s, 3.5ms, 250us, 40ns, 5min or 2h")
    whole, _, fraction = match[1].partition(".")
    unit = _UNITS[match[2] or "s"]
    sign = -1 if whole.startswith("-") else 1
    below = int(fraction or 0) * unit // int(10 ** len(fraction))
    return int(whole) * unit + sign * below


def parse_window(text: str) -> tuple[int, int]:
    """Return start and end in nanoseconds of ``12s:14s``; either side may be omitted.

    Raises ValueError for anything else, and for an empty window.
    """
    first, colon, last = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} is not a window; write START:END, e.g. 12s:14s")
    start = parse_duration(first) if first.strip() else -_FOREVER
    end = parse_duration(last) if last.strip() else _FOREVER
    if start >= end:
        raise ValueError(f"{text!r} ends before it starts")
    return start, end


def format_ns(nanoseconds: int | float) -> str:
    """Format as ``969 ms``, ``25.1 ms``, ``340 ns``: three digits and a suitable unit."""
    size = abs(nanoseconds)
    if size < 1000:
        return f"{nanoseconds:.0f} ns"
    for unit, scale in (("µs", 10**3), ("ms", 10**6), ("s", 10**9)):
        value = nanoseconds / scale
        if abs(value) < 999.5 or unit == "s":
            break
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"


def format_times(ratio: float) -> str:
    """Format a ratio as ``1.31x``, ``9.8x``, ``120x``."""
    digits = 0 if ratio >= 99.95 else 1 if ratio >= 1.995 else 2
    return f"{ratio:,.{digits}f}x"


def format_change(nanoseconds: int | float) -> str:
    """Format a difference as ``+1.20 ms``, ``-310 µs``, ``0``."""
    return f"{'+' * (nanoseconds > 0)}{format_ns(nanoseconds)}" if nanoseconds else "0"


def format_number(value: float) -> str:
    """Format with three significant digits or more, never as a power of ten: ``1,234``, ``2.5``."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def format_bytes(count: int | float) -> str:
    """Format as ``1.39 GB``, ``4.61 MB``, ``340 B``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{format_number(count / scale)} {unit}"
    return f"{count:.0f} B"


def format_count(count: int, noun: str) -> str:
    """Format as ``1 byte``, ``4,096 bytes``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_pair(first_ns: float, word: str, second_ns: float) -> str:
    """Format two durations as ``25.3 of 63.4 ms``, with the unit once where both have it."""
    first, second = format_ns(first_ns), format_ns(second_ns)
    number, _, unit = first.rpartition(" ")
    return f"{number if second.endswith(f' {unit}') else first} {word} {second}"


def format_share(part: float, whole: float) -> str:
    """Format as ``40.1%``; a dash for nothing, ``<0.1%`` for very little."""
    if not part or not whole:
        return "–"
    share = 100 * part / whole
    return "<0.1%" if 0 < share < 0.05 else f"{share:.1f}%"


def format_ranges(numbers: Sequence[int]) -> str:
    """Format distinct sorted numbers as ``0-3, 7``."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


_MOST_NUMBERS: Final = 5
_REGULAR_PART: Final = 0.6
"""Part of the distances between numbers that have to be equal for these to be regular."""


def format_steps(numbers: Sequence[int]) -> str:
    """Format distinct sorted numbers of steps as ``5, 10, 15, 20, 25, …, every 5``."""
    runs = format_ranges(numbers).split(", ")
    text = ", ".join(runs[:_MOST_NUMBERS]) + ", …" * (len(runs) > _MOST_NUMBERS)
    apart = Counter(b - a for a, b in pairwise(numbers))
    (distance, count), *_ = apart.most_common(1) or [(1, 0)]
    is_regular = distance > 1 and count > 1 and count >= _REGULAR_PART * apart.total()
    return f"{text}, every {distance}" if is_regular else text


def format_ids(noun: str, ids: Sequence[int]) -> str:
    """Format distinct sorted ids as ``rank 3``, ``ranks 0-3, 7``."""
    return f"{noun}{'' if len(ids) == 1 else 's'} {format_ranges(ids)}"


def format_window(start: int, end: int) -> str:
    """Format a window as ``12s to 14.5s``; open sides as ``its start`` and ``its end``."""
    first = "its start" if start <= -_FOREVER else f"{start / 10**9:.9g}s"
    last = "its end" if end >= _FOREVER else f"{end / 10**9:.9g}s"
    return f"{first} to {last}"
