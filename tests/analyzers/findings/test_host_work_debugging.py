"""Modes for debugging that were left on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.exports import RUNTIME
from tests.helpers.handmade import CALL, US, Run, analyze, ids


class Waits(Run):
    """Each launch returns some time after its kernel has ended."""

    def _issue(self, table: str, length: int, call: str, **values: Any) -> int:
        end = super()._issue(table, length, call, **values)
        self.export.rows[RUNTIME][-1]["end"] = self.now = max(end, self.now) + CALL
        return end


def steps_of(run: Run) -> Run:
    for _ in range(20):
        run.input_copy(length=20 * US)
        run.kernels(40, "gemm", 25 * US)
        run.optimizer()
        run.wait(200 * US)
    return run


def test_launches_that_wait_for_their_kernels_are_named_and_not_called_overhead(
    tmp_path: Path,
) -> None:
    report = analyze(steps_of(Waits()), tmp_path)
    assert ids(report)[0] == "debugging"
    assert "launch-bound" not in ids(report)
    # A comparison shows the message alone.
    assert "CUDA_LAUNCH_BLOCKING=1" in report.findings[0].message


@pytest.mark.parametrize("length", [2 * US, 50 * US])
def test_launches_that_return_at_once_are_no_mode(tmp_path: Path, length: int) -> None:
    """Even of kernels so short that they end within the call."""
    run = Run()
    for _ in range(20):
        run.input_copy(length=2 * US)
        run.kernels(60, "gemm", length)
        run.optimizer()
    assert "debugging" not in ids(analyze(run, tmp_path))
