"""Drives the browser: a screen without a terminal, keys and the mouse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from textual.pilot import Pilot

from gputrace.report.tui.app import BrowseApp

PATIENCE_S: Final = 60.0

Driver = Callable[[BrowseApp, Pilot[None]], Awaitable[None]]


def browse(
    paths: Sequence[Path],
    drive: Driver,
    beside: Sequence[Path] = (),
    size: tuple[int, int] = (120, 40),
) -> BrowseApp:
    """Opens traces, waits until all is there, drives, and leaves."""

    async def run() -> BrowseApp:
        app = BrowseApp([paths, beside] if beside else [paths])
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: loaded(app))
            await drive(app, pilot)
        return app

    return asyncio.run(run())


def loaded(app: BrowseApp) -> bool:
    """Return true once all traces are analyzed and the selection, if any, is described."""
    done = all(scene and scene.analysis for scene in app.board.scenes)
    return done and (app.board.selected is None or bool(app.detail_text.plain))


async def until(pilot: Pilot[None], true: Callable[[], object]) -> None:
    """Waits for something that a thread does."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it never came true"
        await pilot.pause(0.02)
    await pilot.pause()


async def settled(pilot: Pilot[None], app: BrowseApp) -> list[str]:
    """The lines of the screen, once they stay as they are."""
    before: list[str] = []
    while (now := screen(app)) != before:
        before = now
        await pilot.pause(0.08)
    return now


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await pilot.pause()


async def answer(pilot: Pilot[None], key: str, text: str) -> None:
    """Presses a key that asks, types a line in place of what it proposes, and Enter."""
    await press(pilot, key)
    prompt = pilot.app.screen.query_one("Input")
    prompt.value = text  # type: ignore[attr-defined]
    await press(pilot, "enter")


def screen(app: BrowseApp) -> list[str]:
    """The lines of the screen."""
    width, height = app.size
    lines = app.screen._compositor.render_strips()
    assert len(lines) == height
    return ["".join(segment.text for segment in line)[:width] for line in lines]
