"""First lines of recordings as people make them: short, begun too early, cut, without steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.handmade import MS, US, Run, analyze, ids


def first(run: Run, folder: Path) -> tuple[str, str]:
    """The id and the message of the first finding."""
    finding = analyze(run, folder).findings[0]
    return finding.id, finding.message


def test_five_steps_of_which_the_first_loads_code_are_judged_by_the_others(tmp_path: Path) -> None:
    run = Run()
    run.wait(US)
    for step in range(5):
        start = run.now
        run.input_copy(length=20 * US)
        if step == 0:
            run.allocate(8 * MS, "cuLibraryLoadData")
        run.model(60)
        run.synchronize()
        run.range(start, run.now, f"step {step}")
    report = analyze(run, tmp_path)
    assert report.findings[0].id == "compute-bound"
    assert (report.steps.warmup_count, report.steps.steady_count) == (1, 4)


def test_five_steps_that_differ_have_no_warmup(tmp_path: Path) -> None:
    run = Run()
    for step, kernels in enumerate((120, 40, 60, 80, 40)):
        start = run.now
        run.model(kernels)
        run.synchronize()
        run.range(start, run.now, f"step {step}")
    assert analyze(run, tmp_path).steps.warmup_count == 0


def test_a_recording_of_a_start_says_so(tmp_path: Path) -> None:
    """Not that allocations or launches are the limit: none of them comes again."""
    run = Run()
    for kernel in range(40):
        if kernel % 4 == 0:
            run.allocate(3 * MS, "cuLibraryLoadData")
            run.allocate(2 * MS)
        run.kernel(50 * US, f"void at::native::op_{kernel}")
    report = analyze(run, tmp_path)
    assert ids(report)[0] == "warmup"
    assert "loading modules" in report.findings[0].message
    assert not {"alloc-stall", "launch-bound"} & set(ids(report))


def test_capturing_a_graph_is_a_start_and_no_loss_of_records(tmp_path: Path) -> None:
    run = Run()
    run.kernels(4, "before")
    run.allocate(2 * US, "cudaStreamBeginCapture_v10000")
    for _ in range(400):
        run.allocate(5 * US, "cudaLaunchKernel")
    run.allocate(2 * US, "cudaStreamEndCapture_v10000")
    for _ in range(10):
        run.kernels(20, "after", 10 * US)
    report = analyze(run, tmp_path)
    assert not report.missing
    assert "capturing CUDA graphs" in report.findings[0].message


def test_a_host_that_waits_each_step_launches_late_for_that(tmp_path: Path) -> None:
    """It would be ahead: it takes 1.5 ms of a step of 3.4, and the GPU 2.4."""
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.wait(MS)
        run.model()
        run.optimizer()
        run.synchronize()
    name, message = first(run, tmp_path)
    assert name == "sync-bound"
    assert "before launches that come late after the call" in message
    assert "launch-bound" not in ids(analyze(run, tmp_path))


def test_a_slow_host_that_waits_once_a_step_is_launch_bound(tmp_path: Path) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy(length=20 * US)
        run.kernels(100, "small", 3 * US)
        run.optimizer()
        run.item()
    assert first(run, tmp_path)[0] == "launch-bound"


def test_launches_before_a_wait_are_not_its_doing(tmp_path: Path) -> None:
    """One synchronisation at the end of a recording that begins with a slow host."""
    run = Run()
    for _ in range(100):
        run.wait(20 * US)
        run.kernel(10 * US, "void at::native::op")
    run.kernels(30, "rest", 100 * US)
    run.synchronize()
    assert "sync-bound" not in ids(analyze(run, tmp_path))


def test_a_run_that_has_settled_is_healthy(tmp_path: Path) -> None:
    run = Run()
    for index in range(30):
        run.wait(20 * US)
        run.kernel(10 * US, f"void at::native::first_{index}")
    run.kernels(200, "rest", 40 * US)
    name, message = first(run, tmp_path)
    assert name == "compute-bound"
    assert "100% of its later half" in message


@pytest.mark.parametrize(("to_host", "said"), [(True, "to the host"), (False, "within the GPUs'")])
def test_copies_that_nothing_hides_are_a_finding(tmp_path: Path, to_host: bool, said: str) -> None:
    run = Run()
    for _ in range(20):
        run.input_copy()
        run.model()
        run.optimizer()
        run.copy(MS, to_host=to_host)
    report = analyze(run, tmp_path)
    found = next(finding for finding in report.findings if finding.id == "copies-exposed")
    assert said in found.message
    assert found.impact_ns == pytest.approx(MS, rel=0.06)
