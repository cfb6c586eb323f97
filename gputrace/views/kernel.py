"""One kernel of a trace: what it takes where, and which launch is to be looked at."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.text import Text

from gputrace.analyzers.launches import Launches
from gputrace.units import format_ns
from gputrace.views.tables import Table
from gputrace.views.text import open_console, print_table


def text(found: Launches, width: int = 80, color: bool = False) -> str:
    """The kernel's table, and the launch in words."""
    out = io.StringIO()
    console = open_console(out, width, color)
    use = found.kernel
    title = f"{use.short} ({use.family}): {use.share:.1%} of the time, number {found.place}"
    rows = tuple(
        (f"gpu {one.gpu}", f"{one.count:,}", format_ns(one.median_ns), format_ns(one.total_ns))
        for one in use.by_gpu
    )
    print_table(console, Table(title, ("", "launches", "median", "total"), rows))
    console.print(Text(use.name))
    for line in _lines(found):
        console.print(Text(line))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def figures(name: str, values: Sequence[tuple[str, float, str]], verdict: str) -> str:
    """What a profiler of kernels measured of one launch: name, value, unit."""
    rows = [(label, _with_unit(value, unit)) for label, value, unit in values]
    wide = max((len(label) for label, _ in rows), default=0)
    lines = [f"  {label:<{wide}}  {told}" for label, told in rows]
    return "\n".join([f"{name}: {verdict}", *lines]) + "\n"


def _with_unit(value: float, unit: str) -> str:
    if unit == "ns":
        return format_ns(value)
    return f"{value:.3g}%" if unit == "%" else f"{value:,.4g}"


def _lines(found: Launches) -> list[str]:
    where = "no step was found" if found.step is None else f"in step {found.step}"
    lines = [
        f"To look at: a launch on gpu {found.gpu} (device {found.device} of rank {found.rank}), "
        f"{where}, after {found.skip:,} others of it."
    ]
    if found.alike > 1:
        lines.append(
            f"{found.alike} kernels cannot be told apart by name: the right one comes if the "
            "program launches what it launched in the trace."
        )
    if not found.from_start:
        lines.append(
            "The trace does not begin with the run: earlier launches are not counted, and an "
            "earlier one is profiled."
        )
    return lines
