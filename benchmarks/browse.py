"""The browser: how soon a trace is on the screen, and how soon a key is answered."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks import commands
from benchmarks.inputs import nsys_export
from benchmarks.measure import Failed, machine, pin
from benchmarks.options import Options
from benchmarks.tables import show, verdict
from benchmarks.terminal import Answer, Terminal

SIZE: Final = "3 M"
TARGET_OPEN_S: Final = 1.5
TARGET_LANES_S: Final = 0.4
TARGETS_FRAME_S: Final = {16: 0.050, 48: 0.100}
"""By lanes in view."""
_LANES: Final = "gpu 7"
"""The label of the last lane."""
_DONE: Final = "gap 1 of"
"""Text of the status line once the gaps are listed."""
_PATIENCE_S: Final = 30.0
_KEYS: Final = {
    "zoom in": "+",
    "pan": "d",
    "zoom out": "-",
    "fit run": "0",
    "next step": "]",
    "next gap": "n",
    "cursor": ".",
    "fit step": "f",
}


def run(options: Options) -> int:
    """Prints the tables; 1 where the browser does not start."""
    if options.check:
        return 0
    pin()
    print(f"browse: {machine()}")
    try:
        path = nsys_export(SIZE)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["GPUTRACE_CACHE"] = folder
            _openings(path, options.runs, Path(folder))
            for lanes in TARGETS_FRAME_S:
                _frames(path, lanes, options.runs)
    except Failed as failure:
        print(f"browse: {failure}", file=sys.stderr)
        return 1
    return 0


def _openings(path: Path, turns: int, cache: Path) -> None:
    openings = []
    for _ in range(turns + 1):
        with Terminal((*commands.gputrace(), "browse", str(path)), 200, 50) as terminal:
            openings.append([terminal.until(text) for text in (_LANES, _DONE)])
            _wait_for_entry(cache)
    first, *again = openings
    lanes, done = (
        Answer(*map(statistics.median, zip(*each, strict=True)))
        for each in zip(*again, strict=True)
    )
    slowest = max(each.wall_s for _, each in again)
    show(
        f"Opening {SIZE} kernels on 8 GPUs at 200x50, seconds",
        ("", "wall", "CPU"),
        [
            ("the first time, until the gaps are listed", *_seconds(first[1])),
            (f"again, until the lanes are there, median of {turns}", *_seconds(lanes)),
            (f"again, until the gaps are listed, median of {turns}", *_seconds(done)),
            ("again, slowest", f"{slowest:.2f}", ""),
        ],
    )
    met = verdict(done.wall_s < TARGET_OPEN_S)
    print(f"\n  Target {TARGET_OPEN_S} s: {met}", end="; ")
    met = verdict(lanes.cpu_s < TARGET_LANES_S)
    print(f"the lanes, {TARGET_LANES_S} s of the processor: {met}")


def _wait_for_entry(cache: Path) -> None:
    """Wait until the trace is kept, which the first opening does when all is shown."""
    ends = time.monotonic() + _PATIENCE_S
    while not any(cache.rglob("*.entry")):
        if time.monotonic() > ends:
            raise Failed("the browser kept nothing")
        time.sleep(0.05)


def _seconds(answer: Answer) -> tuple[str, str]:
    return f"{answer.wall_s:.2f}", f"{answer.cpu_s:.2f}"


def _frames(path: Path, lanes: int, turns: int) -> None:
    """The trace beside itself: 16 GPUs; with a lane for each stream, 48."""
    rows = 50 if lanes <= 16 else 60
    command = (*commands.gputrace(), "browse", str(path), "--beside", str(path))
    times: dict[str, list[Answer]] = {name: [] for name in _KEYS}
    with Terminal(command, 200, rows) as terminal:
        terminal.until(_DONE)
        terminal.settle()
        if lanes > 16:
            terminal.press("z")
            terminal.press("S")
            terminal.until("B  stream")
        for _ in range(turns):
            for name, key in _KEYS.items():
                times[name].append(terminal.press(key))
    show(
        f"Answering a key at 200x{rows} with {lanes} lanes in view, milliseconds",
        ("key", "median", "slowest", "CPU, median"),
        [(name, *_figures(own)) for name, own in times.items()],
    )
    target = TARGETS_FRAME_S[lanes]
    slowest = max(statistics.median(one.wall_s for one in own) for own in times.values())
    print(f"\n  Target {target * 1e3:.0f} ms, every key: {verdict(slowest < target)}")


def _figures(answers: list[Answer]) -> tuple[str, ...]:
    walls = [one.wall_s for one in answers]
    figures = (
        statistics.median(walls),
        max(walls),
        statistics.median(one.cpu_s for one in answers),
    )
    return tuple(f"{figure * 1e3:.0f}" for figure in figures)
