"""Options of an analysis, as people and programs give them."""

from __future__ import annotations

from typing import NamedTuple

from gputrace.errors import UsageError
from gputrace.model.struct import Struct
from gputrace.units import parse_window


class Window(NamedTuple):
    """Half-open interval on the trace clock, in nanoseconds."""

    start: int
    end: int


class Options(Struct, frozen=True):
    """Options of an analysis."""

    window: Window | None = None
    """Nanoseconds from the trace's origin; None for all of it."""
    steps: tuple[int, int] | None = None
    """The steps to measure, counted from 0, the end not included; None for the steady ones."""
    gaps: int = 50
    """Number of the largest gaps to list."""


def read_options(
    steps: str | tuple[int, int] | None, time: str | tuple[int, int] | None, gaps: int
) -> Options:
    """Parse the arguments of `OpenTrace.analyze`; raise UsageError for invalid ones."""
    if gaps < 0:
        raise UsageError(f"{gaps} gaps cannot be listed; give a number from 0 on")
    return Options(read_window(time), read_steps(steps), gaps)


def read_steps(steps: str | tuple[int, int] | None) -> tuple[int, int] | None:
    """Parse first and end of ``"8:25"`` or of two numbers; raise UsageError for anything else."""
    if steps is None:
        return None
    if not isinstance(steps, str):
        low, high = steps
        if not 0 <= low < high:
            raise UsageError(f"{steps!r} does not name steps; give (first, end), e.g. (8, 25)")
        return low, high
    first, colon, end = (part.strip() for part in steps.partition(":"))
    digits = all(part.isdecimal() or not part for part in (first, end))
    if not colon or not digits or int(first or 0) >= int(end or 1 << 62):
        raise UsageError(f"{steps!r} does not name steps; write FIRST:END, e.g. 8:25")
    return int(first or 0), int(end or 1 << 62)


def read_window(time: str | tuple[int, int] | None) -> Window | None:
    """Parse ``"12s:14s"`` or two nanosecond counts; raise UsageError for anything else."""
    if time is None:
        return None
    try:
        return Window(*(parse_window(time) if isinstance(time, str) else time))
    except ValueError as error:
        raise UsageError(str(error)) from None
