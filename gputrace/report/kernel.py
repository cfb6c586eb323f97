"""Report on one kernel: its time on each GPU, and the launch to profile."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.text import Text

from gputrace.analyzers.kernel_launches import Launches
from gputrace.report.tables import Table
from gputrace.report.text import open_console, print_table, without_blanks
from gputrace.units import format_ns


def text(launches: Launches, width: int = 80, color: bool = False) -> str:
    """Render the kernel's table and a description of the launch to profile."""
    out = io.StringIO()
    console = open_console(out, width, color)
    use = launches.kernel
    title = f"{use.short} ({use.family}): {use.share:.1%} of the time, number {launches.place}"
    rows = tuple(
        (f"gpu {gpu.gpu}", f"{gpu.count:,}", format_ns(gpu.median_ns), format_ns(gpu.total_ns))
        for gpu in use.by_gpu
    )
    print_table(console, Table(title, ("", "launches", "median", "total"), rows))
    console.print(Text(use.name))
    for line in _lines(launches):
        console.print(Text(line))
    return without_blanks(out)


def figures(name: str, values: Sequence[tuple[str, float, str]], verdict: str) -> str:
    """Render what a kernel profiler measured of one launch: name, value, unit."""
    wide = max((len(label) for label, _, _ in values), default=0)
    show = {"ns": format_ns, "%": "{:.3g}%".format}
    lines = [
        f"  {label:<{wide}}  {show.get(unit, '{:,.4g}'.format)(value)}"
        for label, value, unit in values
    ]
    return "\n".join([f"{name}: {verdict}", *lines]) + "\n"


def _lines(launch: Launches) -> list[str]:
    where = "no step was found" if launch.step is None else f"in step {launch.step}"
    lines = [
        f"To look at: a launch on gpu {launch.gpu} (device {launch.device} of rank {launch.rank}), "
        f"{where}, after {launch.skip:,} others of it."
    ]
    if launch.alike > 1:
        lines.append(
            f"{launch.alike} kernels cannot be told apart by name: the right one comes if the "
            "program launches what it launched in the trace."
        )
    if not launch.from_start:
        lines.append(
            "The trace does not begin with the run: earlier launches are not counted, and an "
            "earlier one is profiled."
        )
    return lines
