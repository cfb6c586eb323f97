"""Runs a program of this folder under torch.profiler: ``python profiled.py TRACE PROGRAM``.

Its first steps are left out; then as many are recorded as take 0.3 s without a recorder,
but three at least, and twelve at most, since some faults come with every tenth step.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from torch.profiler import ProfilerAction, profile

BEFORE: Final = 6
"""Steps before the first recorded one; the profiler starts in the last of them."""
ENOUGH_S: Final = 0.3
FEWEST, MOST = 3, 12


class Plan:
    """Says which steps are recorded, by the median of those before."""

    def __init__(self) -> None:
        self._laps: list[float] = []
        self._last = BEFORE + MOST - 1

    def __call__(self, step: int) -> ProfilerAction:
        """Say what the profiler does in a step, counted from 0; it asks once for each, in turn."""
        self._laps.append(perf_counter())
        if step == BEFORE:
            laps = sorted(b - a for a, b in zip(self._laps, self._laps[1:], strict=False))
            fit = int(ENOUGH_S / laps[len(laps) // 2])
            self._last = BEFORE - 1 + min(max(fit, FEWEST), MOST)
        if step < BEFORE or step > self._last:
            return ProfilerAction.WARMUP if step == BEFORE - 1 else ProfilerAction.NONE
        last = step == self._last
        return ProfilerAction.RECORD_AND_SAVE if last else ProfilerAction.RECORD


def main() -> None:
    """Run the program to the last step that is recorded."""
    trace, program = sys.argv[1:3]
    sys.argv = [program]
    sys.path.insert(0, str(Path(program).parent))
    parts = importlib.import_module("parts")

    def save(profiler: Any) -> None:
        parts.leave()
        profiler.export_chrome_trace(trace)
        sys.exit(0)

    done = parts.Clock.done

    def counted(clock: Any) -> Any:
        over = done(clock)
        profiler.step()
        return over

    with profile(
        schedule=Plan(), on_trace_ready=save, record_shapes=True, with_stack=True
    ) as profiler:
        parts.Clock.done = counted
        runpy.run_path(program, run_name="__main__")


main()
