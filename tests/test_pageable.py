"""Cost of copies from pageable memory: what as many bytes from pinned memory would save."""

from __future__ import annotations

from pathlib import Path

import pytest

import gputrace
from gputrace.api import Report
from gputrace.model.results import Finding
from tests.handmade import BATCH_BYTES, MS, US, Run, analyze, ids, train
from tests.synthetic import Plan, simulate, write_nsys, write_nvml


def found(report: Report) -> Finding:
    return next(finding for finding in report.findings if finding.id == "h2d-pageable")


def test_the_traces_own_pinned_copies_tell_how_fast_it_could_be(tmp_path: Path) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.input_copy(length=900 * US, pageable=True)
        run.model()
        run.optimizer()
        run.synchronize()
    finding = found(analyze(run, tmp_path))
    assert finding.impact_ns == pytest.approx(600 * US, rel=0.01)
    assert finding.evidence["copy_ns"] == 900 * US
    assert finding.evidence["pinned_bandwidth"] == pytest.approx(BATCH_BYTES / 300e-6, rel=0.01)


@pytest.mark.parametrize("nvml", [True, False])
def test_else_the_cards_slot_does_if_it_is_known(tmp_path: Path, nvml: bool) -> None:
    path = tmp_path / "run.sqlite"
    plan = Plan(
        steps=12, warmup_steps=0, kernels_per_step=60, pageable=True, h2d_ns=4 * MS, jitter=0,
        input_copies=1, input_bytes=63_015_384, sync_every_step=True,
    )  # fmt: skip
    recording = simulate(plan)
    write_nsys(recording, path)
    if nvml:
        write_nvml(recording, path)
    with gputrace.open(path) as trace:
        report = trace.analyze()
    # PCIe 5 with 16 lanes carries these bytes in a millisecond.
    cost = 3 * MS if nvml else 4 * MS
    assert found(report).impact_ns == pytest.approx(cost, rel=0.01)
    # What is told there is not told again.
    assert "h2d-exposed" not in ids(report)
    assert report.findings[0].id == "h2d-pageable"


def test_copies_beside_kernels_cost_nothing(tmp_path: Path) -> None:
    run = Run()
    copier = Run(run.export, pid=100, thread=101)
    copier.wait(1 * MS)
    for _ in range(20):
        train(run, 1)
        copier.input_copy(length=900 * US, pageable=True)
        copier.wait(2_390 * US - 8 * US)
    report = analyze(run, tmp_path)
    assert (report.steps.count, report.gpus[0].copies) == (20, 40)
    assert "h2d-pageable" not in ids(report)
