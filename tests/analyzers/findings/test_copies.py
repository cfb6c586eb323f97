"""Cost of copies from pageable memory: what as many bytes from pinned memory would save."""

from __future__ import annotations

from pathlib import Path

import pytest

import gputrace
from tests.helpers.exports import RUNTIME
from tests.helpers.handmade import BATCH_BYTES, MS, US, Run, analyze, ids, train
from tests.helpers.lookups import finding_of
from tests.synthetic import Plan, simulate, write_nsys, write_nvml


def test_the_traces_own_pinned_copies_tell_how_fast_it_could_be(tmp_path: Path) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.input_copy(length=900 * US, pageable=True)
        run.model()
        run.optimizer()
        run.synchronize()
    finding = finding_of(analyze(run, tmp_path), "h2d-pageable")
    assert finding.impact_ns == pytest.approx(600 * US, rel=0.01)
    assert finding.evidence["copy_ns"] == 900 * US
    assert finding.evidence["pinned_bandwidth"] == pytest.approx(BATCH_BYTES / 300e-6, rel=0.01)


def test_copies_have_their_rate_by_direction_and_memory(tmp_path: Path) -> None:
    run = Run()
    run.export.card(0, "0000:01:00.0", "NVIDIA H100 80GB HBM3").ordinal(100, 0, 0)
    for _ in range(20):
        run.input_copy()
        run.input_copy(length=900 * US, pageable=True)
        run.model()
        run.copy(50 * US, to_host=False)
        run.optimizer()
        run.synchronize()
    report = analyze(run, tmp_path)
    rows = {(row.kind, row.memory): row for row in report.copies}
    (measured,) = report.breakdown
    lengths = {("h2d", "pageable"): 900, ("h2d", "pinned"): 300, ("d2d", ""): 50}
    assert list(rows) == list(lengths), "most time first"
    for key, row in rows.items():
        assert row.count == row.steps == measured.steps
        assert row.total_ns == row.count * lengths[key] * US
        assert row.bytes_per_s == round(BATCH_BYTES * 1e6 / lengths[key])
    # What is written was read before: half of the 3.35 TB/s of the memory.
    assert rows["d2d", ""].limit_bytes_per_s == 1_675_000_000_000
    assert rows["h2d", "pinned"].limit_bytes_per_s is None, "the slot is unknown"
    table = " ".join(report.render("text").split())
    assert "GB/s limit of limit host to device, pageable 1 38 MB 900 µs 42.22 host" in table
    assert "within the device 1 38 MB 50.0 µs 760 1,675 45%" in table


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
    assert {row.limit_bytes_per_s for row in report.copies} == {63_015_384_608 if nvml else None}
    assert finding_of(report, "h2d-pageable").impact_ns == pytest.approx(cost, rel=0.01)
    # What is charged there is not charged again.
    rest = {row.cause: row.ns for row in report.ledger}.get("h2d-exposed", 0)
    assert rest == pytest.approx((4 * MS - cost) * report.breakdown[0].steps, rel=0.05, abs=MS)
    assert report.findings[0].id == "h2d-pageable"


@pytest.mark.parametrize("pageable", [False, True])
def test_pinned_memory_is_not_advised_where_it_is_pinned(tmp_path: Path, pageable: bool) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy(length=2 * MS, pageable=pageable)
        run.model()
        run.optimizer()
        run.synchronize()
    report = analyze(run, tmp_path)
    (told,) = (
        f for f in report.findings if f.id == ("h2d-pageable" if pageable else "h2d-exposed")
    )
    assert ("pin_memory" in told.advice) is pageable
    assert ("pinned already" in told.advice) is not pageable
    assert "from pinned memory" not in report.render().partition("What to do")[2] or pageable


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


@pytest.mark.parametrize("copies", [1, 20])
def test_weights_copied_before_the_first_kernel_are_no_input(tmp_path: Path, copies: int) -> None:
    run = Run()
    for _ in range(copies):
        run.input_copy(length=900 * US, pageable=True)
    run.model(kernels=60)
    report = analyze(run, tmp_path)
    assert report.steps.kind == "pass"
    assert ("h2d-pageable" in ids(report)) == (copies == 1)
    assert "h2d-exposed" not in ids(report)


@pytest.mark.parametrize("waits", [True, False])
def test_copies_that_the_host_waits_for_have_its_line(tmp_path: Path, waits: bool) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.model()
        run.optimizer()
        run.synchronize()
        run.copy(2 * MS, to_host=True)
        run.wait_at("train.py:7 keep", "train.py:7 keep")
        if waits:
            run.export.rows[RUNTIME][-1]["nameId"] = run.export.string("cudaMemcpy")
            run.export.rows[RUNTIME][-1]["end"] = run.now
    finding = finding_of(analyze(run, tmp_path), "copies-exposed")
    assert finding.evidence.get("line") == ("train.py:7 keep" if waits else None)


def test_copies_from_pageable_memory_have_the_line_whose_call_they_hold(tmp_path: Path) -> None:
    """The call returns shortly before the copy has ended, once its last part is staged."""
    run = Run()
    for _ in range(20):
        arrived = run.input_copy(length=2 * MS, pageable=True)
        run.export.rows[RUNTIME][-1]["end"] = arrived - 10 * US
        run.wait_at("train.py:7 to_gpu", "train.py:7 to_gpu")
        run.model()
        run.optimizer()
        run.synchronize()
    finding = finding_of(analyze(run, tmp_path), "h2d-pageable")
    assert "the host is at train.py:7 to_gpu in 100% of 40 samples" in finding.details
