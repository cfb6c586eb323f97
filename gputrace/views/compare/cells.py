"""The figures of a comparison as short texts."""

from __future__ import annotations

from gputrace.analyzers.compare.results import ClassChange, KernelChange, RunSummary, Worst
from gputrace.analyzers.results import Breakdown
from gputrace.units import format_ns, format_share


def format_bounds(low: int | None, high: int | None) -> str:
    """``-0.31 to +1.20 ms``, in the unit that suits the larger."""
    if low is None or high is None:
        return "unknown"
    size = max(abs(low), abs(high))
    unit, scale = next(
        ((u, s) for u, s in (("s", 10**9), ("ms", 10**6), ("us", 10**3)) if size >= s), ("ns", 1)
    )
    digits = 0 if size / scale >= 100 or scale == 1 else 1 if size / scale >= 10 else 2
    return f"{low / scale:+.{digits}f} to {high / scale:+.{digits}f} {unit}"


def signed(ns: int) -> str:
    """``+1.20 ms``, ``-310 us``, ``0``."""
    return ("+" if ns > 0 else "") + format_ns(ns) if ns else "0"


def time_or_dash(ns: int | None) -> str:
    """The time; a dash for none."""
    return "–" if not ns else format_ns(ns)


def rate(run: RunSummary) -> str:
    """Samples a second; a dash where nobody said how many a step has."""
    a_second = run.throughput
    if a_second is None:
        return "–"
    return f"{a_second:,.0f}" if a_second >= 100 else f"{a_second:.3g}"


def mean(row: Breakdown, name: str) -> str:
    """The mean of a class over the steps, or of all of them (``total``)."""
    amount = row.total_ns if name == "total" else row.of(name)
    return time_or_dash(round(amount / max(row.steps, 1)))


def percent(share: float) -> str:
    """A share to a tenth of a percent."""
    return format_share(share, 1)


def points(row: ClassChange) -> str:
    """How much a share grew, in points."""
    return f"{100 * (row.b_share - row.a_share):+.1f} points"


def worst(gpu: Worst | None) -> tuple[str, str]:
    """The time of the GPU that has most, and which that is."""
    if gpu is None:
        return "–", ""
    return time_or_dash(gpu.ns), f"rank {gpu.rank}" if gpu.gpu is None else f"gpu {gpu.gpu}"


def arrow(a: str, b: str) -> str:
    """``1.2 → 1.4 ms``; one where both are the same."""
    if a == b:
        return a
    if a.rpartition(" ")[2] == b.rpartition(" ")[2] and " " in a:
        a = a.rpartition(" ")[0]
    return f"{a} → {b}"


def each(row: KernelChange) -> str:
    """What one call takes in both runs; the status of what only one has."""
    if row.a_median_ns is None or row.b_median_ns is None:
        return row.status
    return arrow(format_ns(row.a_median_ns), format_ns(row.b_median_ns))
