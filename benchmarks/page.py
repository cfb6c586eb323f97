"""The page: how long `gputrace report` takes at first and again, and how large it is."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks import commands
from benchmarks.inputs import nsys_export
from benchmarks.measure import Failed, Job, alternate_all, machine, pin
from benchmarks.measure import run as run_once
from benchmarks.options import Options
from benchmarks.tables import mebibytes, seconds, show, spread, verdict

SIZES: Final = ("0.1 M", "0.8 M", "3 M")
TARGET_BYTES: Final = 5_000_000
TARGET_S: Final = 5.0
"""Once the trace has been opened."""


def run(options: Options) -> int:
    """Prints the table; 1 where a page cannot be made."""
    if options.check:
        return 0
    pin()
    print(f"page: {machine()}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["GPUTRACE_CACHE"] = folder
            rows = [_row(size, Path(folder) / "page.html", options.runs) for size in SIZES]
    except Failed as failure:
        print(f"page: {failure}", file=sys.stderr)
        return 1
    header = ("kernels on 8 GPUs", "first, s", "again, s", "from, to", "peak MiB", "page, MB")
    show("Making a page", header, [cells for cells, _, _ in rows])
    print(
        f"\n  Target {TARGET_BYTES / 1e6:.0f} MB: {verdict(all(r[1] < TARGET_BYTES for r in rows))}"
    )
    print(f"  Target {TARGET_S:.0f} s, again: {verdict(all(r[2] < TARGET_S for r in rows))}")
    return 0


def _row(size: str, target: Path, turns: int) -> tuple[tuple[str, ...], int, float]:
    """The cells, the page's bytes, and the seconds once the trace has been opened."""
    trace = str(nsys_export(size))
    write = Job("page", (*commands.gputrace(), "report", trace, "--force", "-o", str(target)))
    first = run_once(write.command)
    again = alternate_all([write], turns)["page"]
    length = target.stat().st_size
    cells = (
        size,
        seconds(first.wall_s),
        seconds(again.wall_s),
        spread(again),
        mebibytes(max(first.peak_bytes, again.peak_bytes)),
        f"{length / 1e6:.2f}",
    )
    return cells, length, again.wall_s
