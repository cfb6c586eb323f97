"""Runs a program under nsys as if nsys were not there.

nsys puts what it starts into a session of its own, which no terminal reaches, and talks on standard
output; it may end before the program, whose later children then fail where they look for it. What
stands between them mends that. A window of time is ended by `nsys stop`, after which nsys stays.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Launch
from gputrace.collectors.nsys.log import LOG, why_not_started
from gputrace.collectors.program.supervised import Supervision, Tool

TOOL: Final = Tool("nsys", apart=True, why_not_started=why_not_started)
_PATIENCE_S: Final = 3.0
"""So long nsys may write after the program's end before we say that it does."""


def run_under_nsys(
    launch: Launch, folder: Path, tell: Callable[[str], object], meanwhile: Callable[[], None]
) -> int:
    """Runs the program to its end and nsys to its own; the program's exit code.

    Raises CannotRun where the program cannot be run, MissingError where nsys does not start it.
    """
    supervision = Supervision(TOOL, launch, folder)
    window, patience = _Window(launch, folder), _Patience(tell)

    def look() -> None:
        if supervision.has_begun():
            window.end_when_due()
        if supervision.is_writing():
            patience.lose()
        meanwhile()

    return supervision.run(look)


class _Window:
    """Ends the recording some time after the program's start, by a command of nsys."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        self._stop, self._after_s = launch.stop, launch.stop_after_ns / 1e9
        self._log = folder / LOG
        self._began_at = 0.0

    def end_when_due(self) -> None:
        """To be called from the program's start on."""
        if not self._stop:
            return
        self._began_at = self._began_at or time.monotonic()
        if time.monotonic() - self._began_at >= self._after_s:
            with self._log.open("ab") as log:
                # It ends when nsys has written the report, which the program need not wait for.
                subprocess.Popen(self._stop, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            self._stop = ()


class _Patience:
    """Says once that nsys is still at work, when it has been for a while."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell, self._since = tell, 0.0

    def lose(self) -> None:
        """To be called while nsys writes."""
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > _PATIENCE_S:
            self._since = float("inf")
            self._tell("the program has ended; nsys is still writing its report")
