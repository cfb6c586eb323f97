"""Live view of a recording under way: the collected rows joined with the analysis."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gputrace.analyzers.pipeline import analyze
from gputrace.analyzers.timeline_model.cells import CURVES, make_curve
from gputrace.cli.console import log
from gputrace.collectors.launch.pty_session import PtySession
from gputrace.collectors.live import RankSteps, RecordingFollower
from gputrace.collectors.nvml.log import NvmlLog
from gputrace.collectors.nvml.queries import NULL
from gputrace.errors import ExitCode, GputraceError
from gputrace.model.nvml import Card
from gputrace.model.options import Options
from gputrace.model.results import Analysis
from gputrace.readers.open import open_traces
from gputrace.report.tui.live import CardNow, Now, Pace

if TYPE_CHECKING:
    from gputrace.collectors.session import Prepared


_MOST_COST: Final = 0.03
"""Share of one core that slicing and analyzing the most recent rows may take."""
_STEPS_SHOWN: Final = 30
_NOTHING: Final = "nothing of a GPU is recorded yet"


class RecordingFeed:
    """Feed of the live view, read from a recording's folder, NAME.spool."""

    def __init__(self, folder: Path) -> None:
        self._following = RecordingFollower(folder)
        self._folder = folder
        self._rest_until = 0.0
        self._window = (0, 0)
        self._analysis: Analysis | None = None
        self._why_not = _NOTHING
        self._last: Now | None = None

    @property
    def trace(self) -> Path:
        return self._folder.with_name(self._folder.name.removesuffix(".spool"))

    def look(self) -> Now:
        following = self._following
        if following.is_under_way:
            state = "ending" if following.has_ended else "running"
        else:
            state = "cut" if self._folder.exists() else "ended"
        if state == "ended" and self._last is not None:
            size = self._last.bytes
        else:
            following.read()
            self._analyze_now_and_then()
            size = following.size
        now = time.time_ns()
        self._last = Now(
            name=self.trace.name,
            state=state,
            time_ns=now,
            elapsed_ns=following.elapsed_ns,
            bytes=size,
            processes=following.processes,
            paces=tuple(_pace(steps, now) for steps in following.steps(_STEPS_SHOWN)),
            cards=tuple(card for log in following.nvml() for card in _cards(log)),
            analysis=self._analysis,
            window=self._window,
            why_not=self._why_not,
        )
        return self._last

    def _analyze_now_and_then(self) -> None:
        """Analyze the latest window, at most as often as keeps the cost below `_MOST_COST`."""
        if time.monotonic() < self._rest_until:
            return
        began = time.process_time()
        window = self._following.window()
        if window is None or window == self._window:
            return
        self._window = window
        with tempfile.TemporaryDirectory(prefix="gputrace-") as folder:
            path = Path(folder) / self.trace.name
            try:
                self._following.write(path, window)
                with open_traces([path]) as trace:
                    self._analysis = analyze(trace, Options(gaps=0))
            except GputraceError as error:
                # The path is temporary.
                self._analysis, self._why_not = None, str(error).removeprefix(f"{path}: ")
        cost = time.process_time() - began
        self._rest_until = time.monotonic() + cost / _MOST_COST


def _pace(steps: RankSteps, now: int) -> Pace:
    """Compute the pace of a rank; a step that takes unusually long lowers the speed."""
    ends = steps.ends
    since_last = max(now - ends[-1], 0)
    waiting = since_last if since_last > 2 * max(steps.lengths) + 2_000_000_000 else 0
    passed = ends[-1] - ends[0] + waiting
    speed = (len(ends) - 1) / passed * 1e9 if len(ends) > 1 and passed > 0 else None
    return Pace(steps.rank, steps.number, steps.lengths, speed)


def _cards(log: NvmlLog) -> Iterator[CardNow]:
    for device in log.devices:
        gpu = int(device["gpu"])
        rows = log.samples["gpu"] == gpu
        card = Card(
            gpu,
            sm_clock_max=_number(device["smClockMax"]),
            power_limit_mw=_number(device["powerLimit"]),
            memory_bytes=_number(device["memoryTotal"]),
        )
        curves = {}
        for name in CURVES:
            column = log.samples[name][rows].astype(np.float64)
            value = np.where(column == NULL, np.nan, column)
            curve = make_curve(name, log.samples["timeNs"][rows].astype(np.int64), value, card)
            if curve is not None:
                curves[name] = curve
        yield CardNow(gpu, curves)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def record_live(prepared: Prepared, terminal: int, record: Callable[[], int]) -> int:
    """Run ``record`` in a child and show the live view on the terminal; return its exit code."""
    output = prepared.plan.output
    sys.stdout.flush()
    sys.stderr.flush()
    session = PtySession(terminal, output.with_name(f"{output.name}.log"), prepared.command)
    if session.divide():
        return record()
    prepared.team.forget()
    # Python's standard streams are those of the terminal now.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)  # type: ignore[misc]
    problem = _show(prepared, session)
    for line in (problem, session.give_terminal()):
        if line:
            # The terminal may be gone; the exit code is still the program's.
            with suppress(OSError):
                log(line)
    return session.code if session.code is not None else ExitCode.RECORDING_FAILED


def _show(prepared: Prepared, session: PtySession) -> str:
    """Run the live view until the program ends or the user quits; return the error, if any."""
    try:
        from gputrace.report.tui.live import LiveApp

        feed = RecordingFeed(prepared.folder)
        app = LiveApp(
            feed, session.lines, session.type_control, lambda: session.is_over() or session.hung_up
        )
        app.run()
    except Exception as error:
        # A failure of the view must not end the program.
        return f"the view ended ({error}); the recording continues"
    finally:
        # Textual's handlers would redraw a screen that is gone.
        for number in (signal.SIGTSTP, signal.SIGCONT):
            signal.signal(number, signal.SIG_DFL)
    return ""
