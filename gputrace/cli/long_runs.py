"""The options of ``gputrace record`` for runs of hours and days, as people write them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from gputrace.errors import UsageError
from gputrace.units import format_bytes, format_ns, parse_duration

if TYPE_CHECKING:
    from gputrace.collectors.backend import Every, Plan
    from gputrace.collectors.limits import Limits

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT])B", re.IGNORECASE)
_SCALES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_FACTOR: Final = re.compile(r"(\d+(?:\.\d+)?)x")
_SHORTEST_NS: Final = 2_000_000_000
_SMALLEST: Final = 10**6
_EXAMPLE_RATE: Final = 10**7
"""Bytes a second."""


def parse_every(text: str | None) -> Every | None:
    """``1000:10``, steps, or ``10min:5s``, times."""
    from gputrace.collectors.backend import Every

    if text is None:
        return None
    distance, _, length = text.partition(":")
    if distance.isdecimal() and length.isdecimal():
        every = Every(int(distance), int(length), in_steps=True)
    else:
        every = Every(_time(distance, text), _time(length, text), in_steps=False)
    if not 0 < every.length < every.distance:
        raise UsageError(f"--every {text}: the second number is a part of the first, above 0")
    return every


def _time(part: str, text: str) -> int:
    try:
        if part.strip()[-1:].isalpha():
            return parse_duration(part)
    except ValueError:
        pass
    raise UsageError(
        f"--every {text}: write steps, as 1000:10 (10 of each 1,000), or times, as 10min:5s"
    )


def parse_limits(keep: str | None, max_size: str | None) -> Limits:
    """``5min`` of a ring, or ``2GB`` in all."""
    from gputrace.collectors.limits import ring

    if keep is not None and max_size is not None:
        raise UsageError("--keep and --max-size exclude each other: a ring is as large as its time")
    return ring(_keep(keep) if keep is not None else 0, _size(max_size) if max_size else 0)


def _keep(text: str) -> int:
    try:
        time = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--keep: {error}") from None
    if time < _SHORTEST_NS:
        raise UsageError(f"--keep {text}: 2s is the least that can be kept")
    return time


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--max-size: {text!r} is not a size; write 500MB or 2GB")
    size = int(float(match[1]) * _SCALES[match[2].lower()])
    if size < _SMALLEST:
        raise UsageError(f"--max-size {text}: 1MB is the least")
    return size


def parse_when_slow(text: str | None, keep: str | None) -> float:
    """``2x``: steps that take over twice the usual time; 0 where none are asked for."""
    if text is None:
        return 0.0
    match = _FACTOR.fullmatch(text.strip())
    if match is None or float(match[1]) <= 1:
        raise UsageError(f"--when-slow: {text!r} says not how slow; write 2x, or more than 1x")
    if keep is None:
        raise UsageError("--when-slow keeps what --keep has of a slow step: give --keep, as 5min")
    return float(match[1])


def check_together(plan: Plan) -> None:
    """Raises UsageError where options of a plan contradict each other."""
    if (every := plan.every) is None:
        return
    others = {
        "--profiler-api": plan.profiler_api,
        "--delay": every.in_steps and plan.delay_ns > 0,
        "--duration": every.in_steps and plan.duration_ns > 0,
        "--steps": not every.in_steps and plan.steps is not None,
    }
    wrong = next((name for name, is_given in others.items() if is_given), None)
    if wrong is not None:
        unit = "steps" if every.in_steps else "times"
        raise UsageError(f"--every in {unit} cannot be told when by {wrong}; leave out one of them")


def bound_of(plan: Plan) -> str:
    """A line on what a long recording keeps on disk; nothing where nothing bounds it."""
    limits = plan.limits
    if limits.segment_ns:
        longest = limits.longest_ns
        example = format_bytes(longest / 10**9 * _EXAMPLE_RATE)
        return (
            f"keeps the last {format_ns(limits.segment_ns * limits.keep)}: at most "
            f"{format_ns(longest)} are on disk (at 10 MB/s, {example})"
        )
    if limits.max_bytes:
        return f"records {format_bytes(limits.max_bytes)} at most, then the program goes on without"
    return ""
