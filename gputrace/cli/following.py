"""Looks at a recording under way for the screen: joins what is collected with the analysis."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from gputrace.analyzers.analysis import analyze
from gputrace.analyzers.options import Options
from gputrace.analyzers.results import Analysis
from gputrace.analyzers.scene.curves import CURVES, make_curve
from gputrace.collectors.live.following import Following, RankSteps
from gputrace.collectors.nvml.cards import NULL
from gputrace.collectors.nvml.log import NvmlLog
from gputrace.errors import GputraceError
from gputrace.traces.nvml.model import Card
from gputrace.traces.opening import open_traces
from gputrace.views.live.now import CardNow, Now, Pace

_SHARE: Final = 0.03
"""Of one core, what making and analyzing traces of the last moments may take."""
_STEPS: Final = 30
_NOTHING: Final = "nothing of a GPU is recorded yet"


class RecordingFeed:
    """Looks at a recording's folder, NAME.spool."""

    def __init__(self, folder: Path) -> None:
        self._following = Following(folder)
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
        state = self._state()
        if state == "ended" and self._last is not None:
            return self._told(state, self._last.bytes)
        following.read()
        self._analyze_now_and_then()
        return self._told(state, following.size)

    def _told(self, state: str, size: int) -> Now:
        following, now = self._following, time.time_ns()
        self._last = Now(
            name=self.trace.name,
            state=state,
            time_ns=now,
            elapsed_ns=following.elapsed_ns,
            bytes=size,
            processes=following.processes,
            paces=tuple(_pace(own, now) for own in following.steps(_STEPS)),
            cards=tuple(card for log in following.nvml() for card in _cards(log)),
            analysis=self._analysis,
            window=self._window,
            why_not=self._why_not,
        )
        return self._last

    def _state(self) -> str:
        if self._following.is_under_way:
            return "ending" if self._following.has_ended else "running"
        if self._folder.exists():
            return "cut"
        return "ended"

    def _analyze_now_and_then(self) -> None:
        """As often as keeps all this cheap: the busier the program, the more seldom."""
        if time.monotonic() < self._rest_until:
            return
        began = time.process_time()
        window = self._following.window()
        if window is None or window == self._window:
            return
        self._window = window
        with tempfile.TemporaryDirectory(prefix="gputrace-") as folder:
            self._analyze(Path(folder) / self.trace.name, window)
        cost = time.process_time() - began
        self._rest_until = time.monotonic() + cost / _SHARE

    def _analyze(self, path: Path, window: tuple[int, int]) -> None:
        try:
            self._following.write(path, window)
            with open_traces([path]) as trace:
                self._analysis = analyze(trace, Options(gaps=0))
        except GputraceError as error:
            self._analysis, self._why_not = None, _without(str(error), path)


def _without(problem: str, path: Path) -> str:
    """A message without the path, which is gone."""
    return problem.removeprefix(f"{path}: ")


def _pace(own: RankSteps, now: int) -> Pace:
    """The speed falls while a step takes longer than those before it."""
    ends = own.ends
    since_last = max(now - ends[-1], 0)
    waiting = since_last if since_last > 2 * max(own.lengths) + 2_000_000_000 else 0
    passed = ends[-1] - ends[0] + waiting
    speed = (len(ends) - 1) / passed * 1e9 if len(ends) > 1 and passed > 0 else None
    return Pace(own.rank, own.number, own.lengths, speed)


def _cards(log: NvmlLog) -> Iterator[CardNow]:
    for device in log.devices:
        gpu = int(device["gpu"])
        own = log.samples["gpu"] == gpu
        card = Card(
            gpu,
            sm_clock_max=_number(device["smClockMax"]),
            power_limit_mw=_number(device["powerLimit"]),
            memory_bytes=_number(device["memoryTotal"]),
        )
        curves = {}
        for name in CURVES:
            column = log.samples[name][own].astype(np.float64)
            value = np.where(column == NULL, np.nan, column)
            curve = make_curve(name, log.samples["timeNs"][own].astype(np.int64), value, card)
            if curve is not None:
                curves[name] = curve
        yield CardNow(gpu, str(device["name"] or ""), curves)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None
