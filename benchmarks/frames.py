"""The page while its timeline moves: what a frame costs, in Chromium without a GPU to draw with."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import commands
from benchmarks.inputs import nsys_export
from benchmarks.measure import machine, pin
from benchmarks.measure import run as run_once
from benchmarks.options import Options
from benchmarks.processes import cpu_s, descendants, folder_of
from benchmarks.tables import show, verdict
from tests.chromium import PROGRAM, Browser, chromium

SIZE: Final = "3 M"
FRAMES: Final = 60
TARGET_FRAME_S: Final = 1 / 60
_VIEWS: Final = {"three steps in view": (), "half of the run": ("run", "in"), "all of it": ("run",)}
"""Buttons that lead to each view."""
_COUNT: Final = "drawn = 0; (function count() { drawn++; requestAnimationFrame(count); })()"
_PLACE: Final = (
    "(box => [box.x, box.y, box.width, box.height])"
    "(document.getElementById('timeline').getBoundingClientRect())"
)
_STEP_PX: Final = 4
_CTRL: Final = 2
"""Bit of the modifier keys in the DevTools protocol."""
Send = Callable[..., None]
"""Sends an event of the mouse, so many pixels to the left of where it began."""


class Cost(NamedTuple):
    """A frame of a gesture."""

    cpu_s: float
    """Processor time of the thread that runs scripts, lays out and paints."""
    rate: float
    """Frames a second, by the clock."""


def run(options: Options) -> int:
    """Prints the table; 1 where a page cannot be made."""
    if options.check:
        return 0
    pin()
    print(f"frames: {machine()}")
    if PROGRAM is None:
        print("frames: no Chromium in PATH, so nothing is measured", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        command = (*commands.gputrace(), "report", str(nsys_export(SIZE)), "-o", str(page))
        made = run_once(command)
        if made.code:
            print(f"frames: {made.error.strip()[-500:]}", file=sys.stderr)
            return 1
        costs = _measure(page, Path(folder), options.runs)
    show(
        f"Moving the timeline of {SIZE} kernels, {FRAMES} frames, median of {options.runs}",
        ("gesture", "thread that draws, ms", "frames a second"),
        [(name, f"{cost.cpu_s * 1e3:.1f}", f"{cost.rate:.0f}") for name, cost in costs.items()],
    )
    met = all(cost.cpu_s < TARGET_FRAME_S for cost in costs.values())
    print(f"\n  Target {TARGET_FRAME_S * 1e3:.1f} ms of that thread: {verdict(met)}")
    return 0


def _measure(page: Path, folder: Path, turns: int) -> dict[str, Cost]:
    costs = {}
    with chromium(folder) as browser:
        browser.open(page.as_uri())
        browser.until("document.body.dataset.rows")
        browser.run("document.getElementById('lanes').scrollIntoView()")
        browser.run(_COUNT)
        for view, buttons in _VIEWS.items():
            for button in buttons:
                browser.run(f"document.querySelector('[data-do={button}]').click()")
                time.sleep(1)
            for name, gesture in {"pan": _drag, "zoom": _turn_wheel}.items():
                each = [_cost(browser, gesture) for _ in range(turns)]
                costs[f"{name}, {view}"] = Cost(*map(statistics.median, zip(*each, strict=True)))
    return costs


def _cost(browser: Browser, gesture: Callable[[Send, int], None]) -> Cost:
    """Processor time and frames while a gesture goes on, its first and last events apart."""
    left, top, width, height = browser.run(_PLACE)

    def send(kind: str, moved: int = 0, **more: object) -> None:
        at = {"x": left + width * 0.7 - moved, "y": top + height / 2}
        browser.ask("Input.dispatchMouseEvent", type=kind, **at, **more)

    send("mouseMoved")
    send("mousePressed", button="left", buttons=1, clickCount=1)
    gesture(send, 5)
    thread = _thread_that_draws()
    first, began, before = browser.run("drawn"), time.monotonic(), cpu_s(thread)
    gesture(send, FRAMES)
    spent = cpu_s(thread) - before
    seconds = time.monotonic() - began
    drawn = browser.run("drawn") - first
    send("mouseReleased", button="left", clickCount=1)
    time.sleep(1)
    return Cost(spent / FRAMES, min(drawn, FRAMES) / seconds)


def _drag(send: Send, frames: int) -> None:
    """To one side and back."""
    for frame in range(frames):
        send("mouseMoved", _STEP_PX * (20 + min(frame, frames - frame)), button="left", buttons=1)


def _turn_wheel(send: Send, frames: int) -> None:
    """In and out again."""
    for frame in range(frames):
        turn = -20 if frame < frames / 2 else 20
        send("mouseWheel", deltaX=0, deltaY=turn, modifiers=_CTRL)


def _thread_that_draws() -> Path:
    """Return the folder of the main thread of the tab's process."""
    renderers = [
        pid
        for pid in descendants(os.getpid())
        if b"--type=renderer" in (folder_of(pid) / "cmdline").read_bytes()
    ]
    busiest = max(renderers, key=lambda pid: cpu_s(folder_of(pid)))
    return folder_of(busiest) / "task" / str(busiest)
