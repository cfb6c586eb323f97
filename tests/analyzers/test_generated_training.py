"""Generated training runs, whose steps and causes are planted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gputrace
from gputrace.api import Report
from gputrace.model.time_class import CLASSES, IDLE_CAUSES
from tests.helpers.examples import few
from tests.synthetic import Plan, Recording, simulate, write_nsys

SMALL = Plan(steps=12, warmup_steps=0, kernels_per_step=60, ranks=1, seed=3)


def run(
    tmp_path: Path, plan: Plan, steps: str | None = None, nvtx: tuple[str, ...] = ("nccl",)
) -> tuple[Recording, Report]:
    recording, path = simulate(plan), tmp_path / "run.sqlite"
    path.unlink(missing_ok=True)
    write_nsys(recording, path, nvtx=nvtx)
    with gputrace.open(path) as trace:
        return recording, trace.analyze(steps=steps)


def changed(**values: object) -> Plan:
    fields = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    return Plan(**(fields | values))


def share(report: Report, name: str) -> float:
    return sum(row.of(name) for row in report.breakdown) / sum(r.total_ns for r in report.breakdown)


@settings(max_examples=few(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data_wait_ns=st.integers(0, 5_000_000),
    input_copies=st.integers(0, 2),
    ranks=st.integers(1, 3),
    sync_every_step=st.booleans(),
    allocs_per_step=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_classes_and_causes_of_every_step_sum_to_its_length(
    tmp_path: Path, **values: int | bool
) -> None:
    _, report = run(tmp_path, changed(**values))
    assert report.steps.count == 12
    for row in report.breakdown:
        assert sum(row.of(name) for name in CLASSES) == row.total_ns
    for step in report.step_list:
        parts = [getattr(step, f"{name}_ns") for name in CLASSES]
        assert sum(parts) == step.end_ns - step.start_ns
    assert sum(report.gaps.by_cause.values()) == report.gaps.total_ns
    assert report.gaps.total_ns == sum(gpu.idle_ns for gpu in report.gpus)


def test_steps_chosen_by_number_are_measured_and_no_others(tmp_path: Path) -> None:
    recording, report = run(tmp_path, SMALL, "2:5")
    windows = recording.truth.windows[2:5]
    assert report.steps.steady_count == 3
    assert [row.steps for row in report.breakdown] == [3]
    assert report.breakdown[0].total_ns == sum(w.end - w.start for w in windows)


def test_warmup_is_left_out(tmp_path: Path) -> None:
    _, report = run(tmp_path, changed(warmup_steps=2, steps=20))
    assert (report.steps.warmup_count, report.steps.steady_count) == (2, 18)
    assert [p.phase for p in report.phases] == ["warmup"]
    assert "warmup" in {finding.id for finding in report.findings}


def test_a_wait_for_data_is_found_and_comes_first(tmp_path: Path) -> None:
    recording, report = run(tmp_path, changed(data_wait_ns=8_000_000, sync_every_step=True))
    truth = recording.truth.breakdown[0]
    expected = truth["data_feeding"] / truth["total"]
    assert expected > 0.3
    assert share(report, "data_feeding") == pytest.approx(expected, abs=0.01)
    assert report.findings[0].id == "data-feeding"


def test_loading_that_hides_under_gpu_work_is_no_loss(tmp_path: Path) -> None:
    """The host runs ahead, so the GPU never waits; the loader's time is told all the same."""
    _, report = run(tmp_path, changed(data_wait_ns=1_000_000, kernel_ns=200_000, steps=20))
    assert share(report, "data_feeding") < 0.01
    assert (report.breakdown[0].host_data_ns or 0) > 0.5 * 1_000_000 * report.breakdown[0].steps
    assert "data-feeding" not in {finding.id for finding in report.findings}


def test_a_named_range_proves_a_wait_where_there_is_no_input_copy(tmp_path: Path) -> None:
    plan = changed(data_wait_ns=8_000_000, input_copies=0, sync_every_step=True)
    assert share(run(tmp_path, plan)[1], "data_feeding") == 0
    recording, report = run(tmp_path, plan, nvtx=("data",))
    truth = recording.truth.breakdown[0]
    expected = truth["data_feeding"] / truth["total"]
    assert share(report, "data_feeding") == pytest.approx(expected, abs=0.01)


def test_allocations_in_every_step_are_found(tmp_path: Path) -> None:
    plan = changed(allocs_per_step=8, alloc_ns=500_000, sync_every_step=True)
    recording, report = run(tmp_path, plan)
    truth = recording.truth.breakdown[0]
    assert share(report, "alloc") == pytest.approx(truth["alloc"] / truth["total"], abs=0.01)
    assert "alloc-stall" in {finding.id for finding in report.findings}


def test_a_host_slower_than_the_gpu_is_launch_bound(tmp_path: Path) -> None:
    plan = changed(kernel_ns=5_000, launch_ns=20_000, data_wait_ns=0, h2d_ns=20_000)
    recording, report = run(tmp_path, plan)
    truth = recording.truth.breakdown[0]
    assert share(report, "launch") == pytest.approx(truth["launch"] / truth["total"], abs=0.02)
    assert report.findings[0].id == "launch-bound"


def test_ranges_named_step_are_the_steps(tmp_path: Path) -> None:
    recording, report = run(tmp_path, SMALL, nvtx=("step",))
    assert (report.steps.source, report.steps.count) == ("nvtx", 12)
    true = [w.start for w in recording.truth.windows]
    lengths = np.diff(true)
    found = [step.start_ns for step in report.step_list]
    assert np.abs(np.array(found) - true).max() < 0.01 * lengths.mean()


def test_micro_batches_are_not_steps(tmp_path: Path) -> None:
    _, report = run(tmp_path, changed(micro_batches=4))
    assert report.steps.count == 12


@pytest.mark.parametrize("seed", range(3))
def test_a_hiccup_of_the_loader_explains_the_slow_step(tmp_path: Path, seed: int) -> None:
    plan = changed(
        steps=40, data_wait_ns=2_000_000, hiccup_rate=0.06, sync_every_step=True, seed=seed
    )
    _, report = run(tmp_path, plan)
    slow = [finding for finding in report.findings if finding.id == "slow-steps"]
    assert [finding.evidence["class"] for finding in slow] == ["data_feeding"]


def test_a_balanced_run_without_waits_yields_no_loss(tmp_path: Path) -> None:
    _, report = run(tmp_path, changed(data_wait_ns=0, kernel_ns=200_000, steps=20, h2d_ns=20_000))
    assert [f.id for f in report.findings if f.severity in ("high", "medium")] == []
    assert report.findings[0].id == "compute-bound"


def test_every_gap_has_a_cause_of_the_list(tmp_path: Path) -> None:
    _, report = run(tmp_path, changed(data_wait_ns=3_000_000, sync_every_step=True))
    assert {gap.cause for gap in report.gaps.largest} <= set(IDLE_CAUSES)
    worst = report.gaps.largest_in_steps[0]
    assert worst.cause == "data_feeding"
    assert "waited" in worst.evidence
    assert "(poll)" in worst.evidence
