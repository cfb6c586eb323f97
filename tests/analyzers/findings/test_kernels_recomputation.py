"""Parts of the forward pass that the backward pass computes again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gputrace.analyzers.findings.kernels import launched_again
from tests.helpers.handmade import US, Run, analyze, ids

PARTS = ("norm", "project", "attention", "project", "add", "norm", "widen", "gelu", "narrow", "add")
BLOCKS = 6
GRADIENT_KERNELS = 20


def trained(*, again: bool, serves: bool = False, parts: tuple[str, ...] = PARTS) -> Run:
    """Steps of some blocks, of which autograd's thread launches the backward pass."""
    run = Run()
    backward = Run(run.export, thread=200)
    backward.gpu_free = run.gpu_free
    for _ in range(20):
        run.input_copy(length=20 * US)
        for part in BLOCKS * parts:
            run.kernel(30 * US, f"{part}_kernel")
        backward.now = run.now
        for _block in range(BLOCKS):
            for part in parts if again or serves else ():
                backward.kernel(30 * US, f"{part}_kernel")
            for number in range(0 if serves else GRADIENT_KERNELS):
                backward.kernel(30 * US, f"{parts[number % len(parts)]}_grad_{number % 3}")
        run.now = backward.now
        run.optimizer()
        run.synchronize()
    return run


def test_what_is_launched_again_is_charged_with_its_time(tmp_path: Path) -> None:
    report = analyze(trained(again=True), tmp_path)
    found = next(finding for finding in report.findings if finding.id == "recomputation")
    assert found.impact_ns == pytest.approx(BLOCKS * len(PARTS) * 30 * US, rel=0.02)
    charged = sum(row.ns for row in report.ledger if row.cause == "recomputation")
    assert charged == pytest.approx(found.impact_ns * report.steps.steady_count, rel=0.02)
    cure = next(cure for cure in report.what_if if cure.finding == "recomputation")
    assert cure.gain_ns >= 0.95 * found.impact_ns


@pytest.mark.parametrize("serves", [False, True], ids=["backward", "the same network twice"])
def test_a_backward_pass_and_a_second_thread_that_serves_compute_nothing_again(
    tmp_path: Path, serves: bool
) -> None:
    assert "recomputation" not in ids(analyze(trained(again=False, serves=serves), tmp_path))


def test_sums_that_sort_in_both_passes_compute_nothing_again(tmp_path: Path) -> None:
    sorts = "fill", "copy", "radix_histogram", "radix_scan", "radix_onesweep", "index_sum", "add"
    assert "recomputation" not in ids(analyze(trained(again=True, parts=sorts), tmp_path))


def test_a_row_of_like_kernels_is_no_part_of_a_network() -> None:
    """Sums of gradients repeat one name."""
    names = np.array([1, 2, 3, 4] * 5 + [7] * 20 + [7] * 20 + [8, 9, 10, 11] * 5)
    threads = np.repeat([0, 1], 40)
    assert not launched_again(names, threads, 0).any()
    repeated = np.concatenate([names[:40], names[:20], names[60:]])
    assert launched_again(repeated, threads, 0).sum() == 20
