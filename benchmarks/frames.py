"""The page while its timeline moves: what a frame costs, in Chromium without a GPU to draw with."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import commands
from benchmarks.inputs import nsys_export
from benchmarks.measure import machine, pin
from benchmarks.measure import run as run_once
from benchmarks.options import Options
from benchmarks.processes import cpu_s, descendants, folder_of
from benchmarks.tables import show, verdict
from tests.helpers.chromium import PROGRAM, Browser, chromium

SIZE: Final = "3 M"
EVENTS: Final = 125
"""Events of the mouse in a second, which a gesture lasts; they come whatever the page does."""
TARGET_FRAME_S: Final = 1 / 60
TARGET_RATE: Final = 59.0
"""Frames a second on a screen that shows 60; the first and the last may fall outside."""
_VIEWS: Final = {"three steps in view": (), "half of the run": ("run", "in"), "all of it": ("run",)}
"""Buttons that lead to each view."""
_COUNT: Final = """
drawn = 0;
const canvas = CanvasRenderingContext2D.prototype, put = canvas.putImageData;
canvas.putImageData = function (...all) { drawn++; put.apply(this, all); };
"""
"""Counts the frames in which the lanes move: each puts their pixels down once."""
_PLACE: Final = (
    "(box => [box.x, box.y, box.width, box.height])"
    "(document.getElementById('timeline').getBoundingClientRect())"
)
_STEP_PX: Final = 4
_TURN: Final = 20
"""One turn of the wheel, in pixels; it zooms by 5 %."""
_CTRL: Final = 2
"""Bit of the modifier keys in the DevTools protocol."""


class Cost(NamedTuple):
    """A frame of a gesture."""

    cpu_s: float
    """Processor time of the thread that runs scripts, lays out and paints."""
    rate: float
    """Frames drawn in a second, by the clock."""


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
        f"Moving the timeline of {SIZE} kernels for a second, median of {options.runs}",
        ("gesture", "thread that draws, ms a frame", "frames a second"),
        [(name, f"{cost.cpu_s * 1e3:.1f}", f"{cost.rate:.0f}") for name, cost in costs.items()],
    )
    met = all(cost.cpu_s < TARGET_FRAME_S for cost in costs.values())
    print(f"\n  Target {TARGET_FRAME_S * 1e3:.1f} ms of that thread: {verdict(met)}", end="; ")
    met = all(cost.rate >= TARGET_RATE for cost in costs.values())
    print(f"{TARGET_RATE:.0f} frames a second: {verdict(met)}")
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


def _cost(browser: Browser, gesture: Callable[[int, int], dict[str, Any]]) -> Cost:
    """Processor time and frames while a gesture goes on, its beginning and its end apart.

    Events are posted as a mouse sends them. Waiting for the browser's answer to each would measure
    the protocol: it begins and ends a scroll for every turn of the wheel, a frame for each.
    """
    left, top, width, height = browser.run(_PLACE)

    def post(moved: int = 0, **event: Any) -> None:
        at = {"x": left + width * 0.7 - moved, "y": top + height / 2}
        browser.post("Input.dispatchMouseEvent", **at, **event)

    def go_on(events: int) -> None:
        began = time.monotonic()
        for event in range(events):
            post(**gesture(event, events))
            time.sleep(max(0.0, began + (event + 1) / EVENTS - time.monotonic()))

    post(type="mouseMoved")
    post(type="mousePressed", button="left", buttons=1, clickCount=1)
    go_on(10)
    thread = _thread_that_draws()
    first, began, before = browser.run("drawn"), time.monotonic(), cpu_s(thread)
    go_on(EVENTS)
    spent, seconds = cpu_s(thread) - before, time.monotonic() - began
    frames = browser.run("drawn") - first
    post(type="mouseReleased", button="left", clickCount=1)
    time.sleep(1)
    return Cost(spent / frames, frames / seconds)


def _drag(event: int, events: int) -> dict[str, Any]:
    """To one side and back."""
    moved = _STEP_PX * (10 + min(event, events - event))
    return {"type": "mouseMoved", "moved": moved, "button": "left", "buttons": 1}


def _turn_wheel(event: int, events: int) -> dict[str, Any]:
    """In and out again."""
    turn = -_TURN if event < events / 2 else _TURN
    return {"type": "mouseWheel", "deltaX": 0, "deltaY": turn, "modifiers": _CTRL}


def _thread_that_draws() -> Path:
    """Return the folder of the main thread of the tab's process."""
    renderers = [
        pid
        for pid in descendants(os.getpid())
        if b"--type=renderer" in (folder_of(pid) / "cmdline").read_bytes()
    ]
    busiest = max(renderers, key=lambda pid: cpu_s(folder_of(pid)))
    return folder_of(busiest) / "task" / str(busiest)
